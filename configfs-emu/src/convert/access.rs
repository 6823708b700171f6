//! Access to a target: LIO's entries for initiators as access rules.
//!
//! A portal group's LUNs are the target's. A rule names the numbers that an initiator sees, where
//! these lead to the LUNs of the same numbers, and otherwise what each of them leads to.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::rules::{Fabric, Initiator, Kind, Tree, backend_name, lun_number};
use crate::tree::NodeId;

/// The highest number that a unit can have.
const MAX_LUN: u64 = 16_383;

/// The networks of all initiators.
pub(super) const ANY: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// LUN of the portal group that a number of an initiator leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedLun {
    /// The number of the portal group's LUN.
    number: u64,
    read_only: bool,
}

/// A LUN of a portal group.
#[derive(Debug)]
struct Unit {
    backend: String,
    /// True if it is read-only for all initiators.
    read_only: bool,
}

/// Credentials of an initiator, and of the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: (String, String),
    pub(super) mutual: Option<(String, String)>,
}

/// Initiators with equal rights, and their LUNs.
#[derive(Debug)]
struct View {
    /// Rules that match them.
    who: Vec<Map<String, Value>>,
    seen: BTreeMap<u64, MappedLun>,
    login: Option<Login>,
}

/// The parts of a portal group's document that are about access.
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
    let backends = backends(tree, group("lun"))?;
    let mut views = Vec::new();
    for (name, acl) in tree.subdirs(group("acls")) {
        views.extend(view(tree, tpg, fabric, name, acl)?);
    }
    let attrib = |name| tree.value(group("attrib"), name) == "1";
    let is_open = fabric == Fabric::Iscsi && attrib("generate_node_acls");
    let is_for_all = is_open && tree.subdirs(group("acls")).next().is_none();
    if is_open {
        let any = ANY.map(|net| rule("address", net));
        let login = login(tree, group("auth"));
        let read_only = attrib("demo_mode_write_protect");
        let seen = backends.keys().map(|number| {
            let seen = MappedLun {
                number: *number,
                read_only,
            };
            (*number, seen)
        });
        // An initiator without the credentials that it needs is not admitted.
        if login.is_some() || !attrib("authentication") {
            views.push(View {
                who: any.into(),
                seen: seen.collect(),
                login: login.filter(|_| attrib("authentication")),
            });
        }
    }
    // What all have in common is the target's, else each rule has its own.
    let mut logins = views.iter().map(|v| &v.login);
    let first = logins.next().cloned().flatten();
    let common = first.filter(|first| logins.all(|login| login.as_ref() == Some(first)));
    let is_common = common.is_some();
    let luns = units(backends, &views);
    let access = match (is_for_all, views.is_empty()) {
        (true, false) => json!("open"),
        _ => Value::Array(rules(views, &luns, is_common)),
    };
    let line = |(number, unit): (&u64, &Unit)| {
        let seen = MappedLun {
            number: *number,
            read_only: unit.read_only,
        };
        shown(&luns, *number, seen)
    };
    Ok(AccessDoc {
        luns: luns.iter().map(line).collect(),
        access,
        chap: common.as_ref().map(chap),
    })
}

/// A number and what it leads to, as the document has them.
fn shown(luns: &BTreeMap<u64, Unit>, number: u64, seen: MappedLun) -> (String, Value) {
    let backend = &luns[&seen.number].backend;
    let value = match seen.read_only {
        true => json!({ "backend": backend, "read_only": true }),
        false => json!(backend),
    };
    (number.to_string(), value)
}

fn rule(key: &str, value: &str) -> Map<String, Value> {
    Map::from_iter([(key.to_owned(), json!(value))])
}

/// The units that an initiator with an entry of its own sees; `None` if it is not let in.
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
            // Without credentials no login can succeed, so the initiator gets no rule at all.
            ("1", None) => return Ok(None),
            ("1", _) => {}
            _ => login_of = None,
        }
    }
    let mut seen = BTreeMap::new();
    for (name, mapped) in tree.subdirs(acl) {
        if tree.dir(mapped).kind != Kind::MappedLun {
            continue;
        }
        let Some((_, lun)) = tree.links(mapped).next() else {
            continue;
        };
        // A LUN whose device was unlinked serves nothing, though its mapping is still there.
        if tree.links(lun).next().is_none() {
            continue;
        }
        let leads_to = MappedLun {
            number: number(&tree.dir(lun).name)?,
            read_only: tree.value(mapped, "write_protect") == "1",
        };
        put(&mut seen, name, leads_to)?;
    }
    Ok(Some(View {
        who: vec![who],
        seen,
        login: login_of,
    }))
}

/// The number of a LUN's directory.
fn number(name: &str) -> Result<u64, String> {
    let number = lun_number(name).expect("checked by mkdir");
    match number {
        0..=MAX_LUN => Ok(number),
        _ => Err(format!("LUN {number}; the highest is {MAX_LUN}")),
    }
}

fn put<T>(all: &mut BTreeMap<u64, T>, name: &str, one: T) -> Result<(), String> {
    let number = number(name)?;
    match all.insert(number, one) {
        None => Ok(()),
        Some(_) => Err(format!("LUN {number} is there twice")),
    }
}

/// Names of the backends of a portal group's LUNs, by their numbers.
fn backends(tree: &Tree, luns: NodeId) -> Result<BTreeMap<u64, String>, String> {
    let mut backends = BTreeMap::new();
    for (name, lun) in tree.subdirs(luns) {
        if let Some((_, device)) = tree.links(lun).next() {
            put(&mut backends, name, backend_name(tree, device))?;
        }
    }
    Ok(backends)
}

/// The target's units. LIO protects what initiators see, not a portal group's LUN: one is read-only
/// if it is for all who see it.
fn units(backends: BTreeMap<u64, String>, views: &[View]) -> BTreeMap<u64, Unit> {
    let unit = |(number, backend)| {
        let seen = views.iter().flat_map(|view| view.seen.values());
        let mut seen = seen.filter(|seen| seen.number == number).peekable();
        let read_only = seen.peek().is_some() && seen.all(|seen| seen.read_only);
        (number, Unit { backend, read_only })
    };
    backends.into_iter().map(unit).collect()
}

/// The `luns` of a rule; nothing if it shows what the target has.
fn rule_luns(seen: &BTreeMap<u64, MappedLun>, luns: &BTreeMap<u64, Unit>) -> Option<Value> {
    let mut all = seen.iter();
    let is_own = all
        .all(|(number, seen)| *number == seen.number && luns[number].read_only == seen.read_only);
    match is_own {
        true if seen.len() == luns.len() => None,
        true => Some(json!(seen.keys().collect::<Vec<_>>())),
        false => {
            let seen = seen.iter();
            Some(Value::Object(
                seen.map(|(number, seen)| shown(luns, *number, *seen))
                    .collect(),
            ))
        }
    }
}

fn rules(views: Vec<View>, luns: &BTreeMap<u64, Unit>, is_common: bool) -> Vec<Value> {
    let mut rules = Vec::new();
    for view in views {
        let seen = rule_luns(&view.seen, luns);
        for mut who in view.who {
            if let Some(seen) = &seen {
                who.insert("luns".to_owned(), seen.clone());
            }
            if let Some(login) = view.login.as_ref().filter(|_| !is_common) {
                who.insert("chap".to_owned(), chap(login));
            }
            rules.push(Value::Object(who));
        }
    }
    rules
}
