//! Who sees what of a target: LIO's entries for initiators as access rules.
//!
//! LIO numbers LUNs for each initiator; a target of `riserd` numbers them once, and its rules say which
//! of them an initiator sees. The target gets the numbers that initiators see. So what they are mapped
//! to can be said as long as no two of them see different things under one number.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::backend::backend_name;
use crate::rules::{Fabric, Initiator, Kind, lun_number};
use crate::tree::{NodeId, Tree};

/// The highest number that a unit can have.
const MAX_LUN: u64 = 16_383;

/// The networks of everybody.
pub(super) const ANY: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// A unit under its number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unit {
    backend: String,
    read_only: bool,
}

/// What proves who somebody is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: (String, String),
    pub(super) mutual: Option<(String, String)>,
}

/// Somebody and what he sees.
#[derive(Debug)]
struct View {
    /// Rules that match him.
    who: Vec<Map<String, Value>>,
    units: BTreeMap<u64, Unit>,
    login: Option<Login>,
}

/// What a portal group says about access.
#[derive(Debug)]
pub(super) struct AccessDoc {
    pub(super) luns: Map<String, Value>,
    pub(super) access: Value,
    pub(super) chap: Option<Value>,
}

/// Names and secrets in a directory `auth` or `discovery_auth`.
pub(super) fn login(tree: &Tree, auth: NodeId) -> Option<Login> {
    let pair = |name, secret| {
        let value = |key| Some(tree.value(auth, key)).filter(|v| !v.is_empty() && *v != "NULL");
        Some((value(name)?.to_owned(), value(secret)?.to_owned()))
    };
    Some(Login {
        user: pair("userid", "password")?,
        mutual: pair("userid_mutual", "password_mutual"),
    })
}

/// A login as `chap` of the document.
pub(super) fn chap(login: &Login) -> Value {
    let user = |(name, secret): &(String, String)| json!({ "name": name, "secret": secret });
    let mut doc = json!({ "users": [user(&login.user)] });
    if let Some(mutual) = &login.mutual {
        doc["mutual"] = user(mutual);
    }
    doc
}

/// The access to a portal group.
pub(super) fn access(tree: &Tree, tpg: NodeId, fabric: Fabric) -> Result<AccessDoc, String> {
    let group = |name| tree.child(tpg, name).expect("it comes with it");
    let mut views = Vec::new();
    for (name, acl) in tree.subdirs(group("acls")) {
        views.extend(view(tree, tpg, fabric, name, acl)?);
    }
    let attrib = |name| tree.value(group("attrib"), name) == "1";
    let is_open = fabric == Fabric::Iscsi && attrib("generate_node_acls");
    let only_everybody = is_open && tree.subdirs(group("acls")).next().is_none();
    if is_open {
        let everybody = ANY.map(|net| rule("address", net));
        let login = login(tree, group("auth"));
        let units = tpg_units(tree, tpg, attrib("demo_mode_write_protect"))?;
        // Whoever must prove who he is and cannot is not let in.
        if login.is_some() || !attrib("authentication") {
            views.push(View {
                who: everybody.into(),
                units,
                login: login.filter(|_| attrib("authentication")),
            });
        }
    }
    // What all have in common is the target's, else each rule has its own.
    let mut logins = views.iter().map(|v| &v.login);
    let first = logins.next().cloned().flatten();
    let common = first.filter(|first| logins.all(|login| login.as_ref() == Some(first)));
    let is_common = common.is_some();
    let luns = numbers(&views)?;
    let access = match (only_everybody, views.is_empty()) {
        (true, false) => json!("open"),
        _ => Value::Array(rules(views, luns.keys().copied().collect(), is_common)),
    };
    let line = |(number, unit): (&u64, &Unit)| {
        let value = match unit.read_only {
            true => json!({ "backend": unit.backend, "read_only": true }),
            false => json!(unit.backend),
        };
        (number.to_string(), value)
    };
    Ok(AccessDoc {
        luns: luns.iter().map(line).collect(),
        access,
        chap: common.as_ref().map(chap),
    })
}

fn rule(key: &str, value: &str) -> Map<String, Value> {
    Map::from_iter([(key.to_owned(), json!(value))])
}

/// What an initiator with an entry of its own sees; `None` if it is not let in.
fn view(
    tree: &Tree,
    tpg: NodeId,
    fabric: Fabric,
    name: &str,
    acl: NodeId,
) -> Result<Option<View>, String> {
    let who = match fabric {
        Fabric::Iscsi => rule("iqn", name),
        Fabric::Srpt => match Initiator::parse(name).expect("checked by mkdir") {
            Initiator::Port(id) => rule("initiator", &format!("{id:032x}")),
            Initiator::Guid(guid) => rule("initiator", &format!("{guid:016x}")),
            Initiator::Address(address) => rule("address", &address.to_string()),
        },
    };
    let mut login_of = None;
    if fabric == Fabric::Iscsi {
        let group = |dir, name| tree.child(dir, name).expect("it comes with it");
        let own = tree.value(group(acl, "attrib"), "authentication");
        let wanted = match own {
            "-1" => tree.value(group(tpg, "attrib"), "authentication"),
            own => own,
        };
        login_of = login(tree, group(acl, "auth"));
        match (wanted, &login_of) {
            ("1", None) => return Ok(None),
            ("1", _) => {}
            _ => login_of = None,
        }
    }
    let mut units = BTreeMap::new();
    for (name, mapped) in tree.subdirs(acl) {
        if tree.dir(mapped).kind != Kind::MappedLun {
            continue;
        }
        let Some((_, lun)) = tree.links(mapped).next() else {
            continue;
        };
        if let Some(unit) = unit(tree, lun, tree.value(mapped, "write_protect") == "1") {
            put(&mut units, name, unit)?;
        }
    }
    Ok(Some(View {
        who: vec![who],
        units,
        login: login_of,
    }))
}

/// What a LUN of the portal group is, if anything.
fn unit(tree: &Tree, lun: NodeId, read_only: bool) -> Option<Unit> {
    let (_, device) = tree.links(lun).next()?;
    Some(Unit {
        backend: backend_name(tree, device),
        read_only,
    })
}

fn put(units: &mut BTreeMap<u64, Unit>, name: &str, unit: Unit) -> Result<(), String> {
    let number = lun_number(name).expect("checked by mkdir");
    if number > MAX_LUN {
        return Err(format!("LUN {number}; the highest is {MAX_LUN}"));
    }
    match units.insert(number, unit) {
        None => Ok(()),
        Some(_) => Err(format!("LUN {number} is there twice")),
    }
}

/// All LUNs of a portal group under their own numbers.
fn tpg_units(tree: &Tree, tpg: NodeId, read_only: bool) -> Result<BTreeMap<u64, Unit>, String> {
    let mut units = BTreeMap::new();
    let luns = tree.child(tpg, "lun").expect("it comes with it");
    for (name, lun) in tree.subdirs(luns) {
        if let Some(unit) = unit(tree, lun, read_only) {
            put(&mut units, name, unit)?;
        }
    }
    Ok(units)
}

/// The numbers that anybody sees something under.
fn numbers(views: &[View]) -> Result<BTreeMap<u64, Unit>, String> {
    let mut all: BTreeMap<u64, Unit> = BTreeMap::new();
    for (number, unit) in views.iter().flat_map(|v| &v.units) {
        let known = all.entry(*number).or_insert_with(|| unit.clone());
        if known != unit {
            return Err(format!(
                "LUN {number} is {} for one initiator and {} for another",
                describe(known),
                describe(unit)
            ));
        }
    }
    Ok(all)
}

fn describe(unit: &Unit) -> String {
    let mode = if unit.read_only { " read-only" } else { "" };
    format!("{}{mode}", unit.backend)
}

fn rules(views: Vec<View>, all: BTreeSet<u64>, is_common: bool) -> Vec<Value> {
    let mut rules = Vec::new();
    for view in views {
        let seen: BTreeSet<u64> = view.units.into_keys().collect();
        for mut who in view.who {
            if seen != all {
                who.insert("luns".to_owned(), json!(seen));
            }
            if let Some(login) = view.login.as_ref().filter(|_| !is_common) {
                who.insert("chap".to_owned(), chap(login));
            }
            rules.push(Value::Object(who));
        }
    }
    rules
}
