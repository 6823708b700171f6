//! Converts the initiator ACLs of LIO to access rules.
//!
//! The LUNs of a portal group are used as the LUNs of the target. If the LUN numbers seen by an
//! initiator are the same as in the target, the rule is a list of numbers. Otherwise, it maps each
//! number to a LUN.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde_json::{Map, Value, json};

use super::Omission;
use super::credentials::{CheckedLogin, Login, chap, login};
use crate::rules::{Fabric, Initiator, Kind, Tree, backend_name, lun_number};
use crate::tree::NodeId;

/// Maximum LUN number.
const MAX_LUN: u64 = 16_383;

/// Networks that match all initiators.
pub(super) const ANY: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// A LUN in the portal group that is mapped to a number for an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedLun {
    /// Number of the LUN in the portal group.
    number: u64,
    read_only: bool,
}

/// A LUN in a portal group.
#[derive(Debug)]
struct Unit {
    backend: String,
    /// Set if this LUN is read-only for all initiators.
    read_only: bool,
}

/// Initiators with the same access, and the LUNs they can see.
#[derive(Debug)]
struct View {
    /// Rules used to match these initiators.
    who: Vec<Map<String, Value>>,
    seen: BTreeMap<u64, MappedLun>,
    login: Option<Login>,
}

/// The access settings in the document for a portal group.
#[derive(Debug)]
pub(super) struct AccessDoc {
    pub(super) luns: Map<String, Value>,
    pub(super) access: Value,
    pub(super) chap: Option<Value>,
}

/// A portal group to be converted to a target.
pub(super) struct Group<'a> {
    pub(super) tree: &'a Tree,
    pub(super) tpg: NodeId,
    pub(super) fabric: Fabric,
    /// Checks if the document contains this backend.
    pub(super) has_backend: &'a dyn Fn(&str) -> bool,
}

/// Result of reading the credentials for an initiator.
enum Admission {
    /// The initiator can log in using these credentials, if set.
    Admitted(Option<Login>),
    /// Login is not possible.
    Refused,
}

/// Converts the access settings of a portal group. If something is not supported, it's added to
/// `omitted`.
pub(super) fn access(group: &Group<'_>, omitted: &mut Vec<Omission>) -> AccessDoc {
    let Group { tree, .. } = group;
    let backends = group.backends(omitted);
    let acls = group.dir("acls");
    let is_open = group.fabric == Fabric::Iscsi && group.attrib("generate_node_acls");
    let mut views = Vec::new();
    for (name, acl) in tree.subdirs(acls) {
        match group.view(name, acl, &backends, omitted) {
            Some(view) => views.push(view),
            // The rule for all initiators must not allow access for an initiator that would be
            // rejected by LIO.
            None if is_open => views.push(View {
                who: vec![group.subject(name)],
                seen: BTreeMap::new(),
                login: None,
            }),
            None => {}
        }
    }
    let is_for_all = is_open && tree.subdirs(acls).next().is_none();
    if is_open && let Some(view) = group.open_view(&backends, omitted) {
        views.push(view);
    }
    // If all initiators use the same credentials, set them for the target instead of for each rule.
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
    AccessDoc {
        luns: luns.iter().map(line).collect(),
        access,
        chap: common.as_ref().map(chap),
    }
}

/// Returns the number and the LUN it's mapped to, using the format of the document.
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

impl Group<'_> {
    fn dir(&self, name: &str) -> NodeId {
        self.tree.child(self.tpg, name).expect("it comes with it")
    }

    fn attrib(&self, name: &'static str) -> bool {
        self.tree.value(self.dir("attrib"), name) == "1"
    }

    /// Returns the rule that matches this initiator.
    fn subject(&self, name: &str) -> Map<String, Value> {
        match self.fabric {
            Fabric::Iscsi => rule("iqn", name),
            Fabric::Srpt => match Initiator::parse(name).expect("checked by mkdir") {
                Initiator::Port(id) => rule("initiator", &format!("{id:032x}")),
                Initiator::Guid(guid) => rule("initiator", &format!("{guid:016x}")),
                Initiator::Address(address) => rule("address", &address.to_string()),
            },
        }
    }

    /// Returns the backend name for each LUN in this group.
    fn backends(&self, omitted: &mut Vec<Omission>) -> BTreeMap<u64, String> {
        let mut backends = BTreeMap::new();
        for (_, lun) in self.tree.subdirs(self.dir("lun")) {
            let Some((_, device)) = self.tree.links(lun).next() else {
                continue;
            };
            let name = backend_name(self.tree, device);
            let added = match (self.has_backend)(&name) {
                true => self.insert_lun(&mut backends, lun, name),
                false => Err(format!("backend {name} is omitted")),
            };
            if let Err(reason) = added {
                omitted.push(Omission::new(self.tree, lun, reason));
            }
        }
        backends
    }

    /// Returns the LUNs of an initiator with an ACL, or `None` if it can't log in.
    fn view(
        &self,
        name: &str,
        acl: NodeId,
        backends: &BTreeMap<u64, String>,
        omitted: &mut Vec<Omission>,
    ) -> Option<View> {
        let Admission::Admitted(login) = self.admission(acl, omitted) else {
            return None;
        };
        let mut seen = BTreeMap::new();
        for (_, mapped) in self.tree.subdirs(acl) {
            if self.tree.dir(mapped).kind != Kind::MappedLun {
                continue;
            }
            let Some((_, lun)) = self.tree.links(mapped).next() else {
                continue;
            };
            // If the device has been unlinked from this LUN, the mapping still exists but doesn't
            // serve anything. If the LUN was omitted, we already reported it, and another LUN may
            // use the same number.
            let number = lun_number(&self.tree.dir(lun).name).expect("checked by mkdir");
            let device = self.tree.links(lun).next();
            let backend = device.map(|(_, device)| backend_name(self.tree, device));
            if backend.is_none() || backends.get(&number) != backend.as_ref() {
                continue;
            }
            let leads_to = MappedLun {
                number,
                read_only: self.tree.value(mapped, "write_protect") == "1",
            };
            if let Err(reason) = self.insert_lun(&mut seen, mapped, leads_to) {
                omitted.push(Omission::new(self.tree, mapped, reason));
            }
        }
        Some(View {
            who: vec![self.subject(name)],
            seen,
            login,
        })
    }

    /// Reads the credentials that are required for an initiator with an ACL.
    fn admission(&self, acl: NodeId, omitted: &mut Vec<Omission>) -> Admission {
        if self.fabric != Fabric::Iscsi {
            return Admission::Admitted(None);
        }
        let group = |name| self.tree.child(acl, name).expect("it comes with it");
        let is_required = match self.tree.value(group("attrib"), "authentication") {
            "-1" => self.attrib("authentication"),
            own => own == "1",
        };
        match is_required {
            true => self.credentials(group("auth"), "this initiator is omitted", omitted),
            false => Admission::Admitted(None),
        }
    }

    /// Reads the credentials that are required for login.
    fn credentials(
        &self,
        auth: NodeId,
        consequence: &str,
        omitted: &mut Vec<Omission>,
    ) -> Admission {
        let mut omit = |text: String| omitted.push(Omission::new(self.tree, auth, text));
        match login(self.tree, auth) {
            CheckedLogin::None => Admission::Refused,
            CheckedLogin::Unusable(reason) => {
                omit(format!(
                    "{reason}: {consequence} until a valid secret is set at both sides"
                ));
                Admission::Refused
            }
            CheckedLogin::Usable(login, None) => Admission::Admitted(Some(login)),
            CheckedLogin::Usable(login, Some(reason)) => {
                omit(format!(
                    "{reason}: mutual authentication is omitted, and initiators that require it \
                     cannot log in until a valid mutual secret is set at both sides"
                ));
                Admission::Admitted(Some(login))
            }
        }
    }

    /// Returns the LUNs that all other initiators can see, or `None` if they can't log in.
    fn open_view(
        &self,
        backends: &BTreeMap<u64, String>,
        omitted: &mut Vec<Omission>,
    ) -> Option<View> {
        let login = match self.attrib("authentication") {
            true => {
                let consequence = "initiators without an ACL are omitted";
                match self.credentials(self.dir("auth"), consequence, omitted) {
                    Admission::Admitted(login) => login,
                    Admission::Refused => return None,
                }
            }
            false => None,
        };
        let read_only = self.attrib("demo_mode_write_protect");
        let seen = backends.keys().map(|number| {
            let seen = MappedLun {
                number: *number,
                read_only,
            };
            (*number, seen)
        });
        Some(View {
            who: ANY.map(|net| rule("address", net)).into(),
            seen: seen.collect(),
            login,
        })
    }

    /// Adds a LUN directory by number.
    fn insert_lun<T>(
        &self,
        all: &mut BTreeMap<u64, T>,
        lun: NodeId,
        value: T,
    ) -> Result<(), String> {
        let number = lun_number(&self.tree.dir(lun).name).expect("checked by mkdir");
        if number > MAX_LUN {
            return Err(format!("LUN {number} is omitted: the maximum is {MAX_LUN}"));
        }
        // Several names can be the same number because of leading zeros.
        match all.entry(number) {
            Entry::Vacant(entry) => {
                entry.insert(value);
                Ok(())
            }
            Entry::Occupied(_) => Err(format!("duplicate LUN {number}")),
        }
    }
}

/// Returns the LUNs of the target. In LIO, write protection is set for the initiator and not for
/// the LUN of a portal group, so a LUN is read-only if this is set for all initiators that can see
/// it.
fn units(backends: BTreeMap<u64, String>, views: &[View]) -> BTreeMap<u64, Unit> {
    let unit = |(number, backend)| {
        let seen = views.iter().flat_map(|view| view.seen.values());
        let mut seen = seen.filter(|seen| seen.number == number).peekable();
        let read_only = seen.peek().is_some() && seen.all(|seen| seen.read_only);
        (number, Unit { backend, read_only })
    };
    backends.into_iter().map(unit).collect()
}

/// Returns the value to use for `luns` in a rule, or `None` if it's the same as for the target.
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
