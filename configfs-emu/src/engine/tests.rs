use std::sync::{Arc, Mutex};

use riser_admin_api::live::{LiveLun, LiveOp};
use serde_json::json;

use super::*;
use crate::rules::Shell;
use crate::testing::{Fake, TPG, run_line, served};
use crate::world::Session;

/// A daemon that is also configured by other users, and that can be set to reject a change.
#[derive(Debug, Default)]
struct State {
    document: Value,
    changes: u64,
    refusal: Option<ApplyError>,
    /// If set, a target with this address will be rejected.
    is_taken: Option<&'static str>,
    is_down: bool,
    /// A change by another user, to be applied after the next change.
    intrusion: Option<fn(&mut Value)>,
    /// All documents that have been applied.
    served: Vec<Value>,
}

/// Same check as in the daemon: if a backend is used by a LUN before and after a change, it must
/// not be replaced.
fn check_in_use(old: &Value, new: &Value) -> Result<(), ApplyError> {
    let names = |document: &Value| -> Vec<String> {
        let targets = document["targets"].as_array().into_iter().flatten();
        let luns = targets.flat_map(|target| target["luns"].as_object().into_iter().flatten());
        luns.filter_map(|(_, lun)| Some(lun.as_str()?.to_owned()))
            .collect()
    };
    let is_lun = |name: &str| {
        [old, new]
            .iter()
            .all(|doc| names(doc).iter().any(|n| n == name))
    };
    let backends = old["backends"].as_object().into_iter().flatten();
    let mut changed = backends.filter(|(name, doc)| new["backends"].get(name) != Some(doc));
    match changed.find(|(name, _)| is_lun(name)) {
        None => Ok(()),
        Some((name, _)) => Err(ApplyError::Refused {
            why: format!("backend {name} changed while it is a LUN"),
            errno: Some(Errno::BUSY),
        }),
    }
}

struct Shared {
    state: Arc<Mutex<State>>,
    seen: u64,
}

/// Converts a configuration to the daemon's format.
fn normal(document: &Value) -> Value {
    let config = Config::parse(&document.to_string(), "test").unwrap();
    config.to_value()
}

impl Daemon for Shared {
    fn document(&mut self) -> Result<Value, ApplyError> {
        let state = self.state.lock().unwrap();
        if state.is_down {
            return Err(ApplyError::Unreachable("down".to_owned()));
        }
        self.seen = state.changes;
        Ok(state.document.clone())
    }

    fn apply(&mut self, document: &Value) -> Result<(), ApplyError> {
        let mut state = self.state.lock().unwrap();
        if state.changes != self.seen {
            return Err(ApplyError::Outdated);
        }
        if let Some(refusal) = &state.refusal {
            return Err(refusal.clone());
        }
        if let Some(address) = state.is_taken
            && document.to_string().contains(address)
        {
            return Err(ApplyError::Refused {
                why: format!("{address} is in use"),
                errno: Some(Errno::ADDRINUSE),
            });
        }
        let document = normal(document);
        check_in_use(&state.document, &document)?;
        state.served.push(document.clone());
        state.document = document;
        state.changes += 1;
        if let Some(change) = state.intrusion.take() {
            let mut document = state.document.clone();
            change(&mut document);
            state.document = normal(&document);
            state.changes += 1;
        }
        Ok(())
    }
}

struct Rig {
    engine: Engine,
    state: Arc<Mutex<State>>,
}

impl Rig {
    fn new() -> Self {
        Self::within(Fake::default())
    }

    fn within(world: Fake) -> Self {
        let state = Arc::new(Mutex::new(State {
            document: json!({ "targets": [] }),
            ..State::default()
        }));
        let daemon = Shared {
            state: Arc::clone(&state),
            seen: 0,
        };
        let engine = Engine::new("a secret".into(), Box::new(world), Box::new(daemon));
        let mut rig = Self {
            engine: engine.unwrap(),
            state,
        };
        for line in served().lines() {
            assert_eq!(rig.line(line.trim()), Ok(()), "{line}");
        }
        rig
    }

    fn line(&mut self, line: &str) -> Result<(), Errno> {
        self.engine
            .change(|tree, world| run_line(tree, world, line))
    }

    fn read(&mut self, path: &str) -> Result<String, Errno> {
        self.engine.read_tree(|tree, world| {
            let mut tree = tree.clone();
            let tree = &mut tree;
            Shell { tree, world }.read(path)
        })
    }

    /// Applies a change made by another user.
    fn other(&self, change: impl FnOnce(&mut Value)) {
        let mut state = self.state.lock().unwrap();
        let mut document = state.document.clone();
        change(&mut document);
        state.document = normal(&document);
        state.changes += 1;
    }

    fn document(&self) -> Value {
        self.state.lock().unwrap().document.clone()
    }
}

const OTHER: &str = "iscsi/iqn.2026-01.example:other/tpgt_1";

fn add_other(document: &mut Value) {
    document["backends"]["memory"] = json!({ "kind": "ram", "size": "1MiB" });
    document["targets"].as_array_mut().unwrap().push(json!({
        "name": "other",
        "iqn": "iqn.2026-01.example:other",
        "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3261" }],
        "luns": { "4": "memory" },
        "access": [{ "iqn": "iqn.2026-01.example:client" }],
    }));
}

#[test]
fn foreign_changes_are_shown() {
    let mut rig = Rig::new();
    // These settings are not sent to the daemon.
    for line in [
        "mkdir core/rd_mcp_7",
        "mkdir core/rd_mcp_7/half",
        "mkdir iscsi/iqn.2026-01.example:half",
        "mkdir iscsi/iqn.2026-01.example:half/tpgt_3",
        "mkdir iscsi/iqn.2026-01.example:half/tpgt_3/lun/lun_0",
        "ln iscsi/iqn.2026-01.example:half/tpgt_3/lun/lun_0/x ../../../../../core/fileio_0/disk",
        "echo core/fileio_0/disk/attrib/emulate_tas 0",
    ] {
        let expected = match line.starts_with("echo") {
            true => Err(Errno::INVAL),
            false => Ok(()),
        };
        assert_eq!(rig.line(line), expected, "{line}");
    }
    assert_eq!(
        rig.line("echo core/fileio_0/disk/attrib/emulate_caw 0"),
        Ok(())
    );
    rig.other(add_other);
    rig.engine.refresh();
    assert_eq!(rig.read(&format!("{OTHER}/enable")), Ok("1\n".into()));
    assert_eq!(rig.read(&format!("{TPG}/enable")), Ok("1\n".into()));
    assert_eq!(
        rig.read("core/fileio_0/disk/attrib/emulate_caw"),
        Ok("0\n".into())
    );
    assert!(rig.read("core/rd_mcp_7/half/enable").is_ok());
    // Removing a directory must also remove all links to it.
    rig.other(|document| {
        let targets = document["targets"].as_array_mut().unwrap();
        targets.retain(|target| target["name"] == "other");
        document["backends"]
            .as_object_mut()
            .unwrap()
            .remove("fileio_0:disk");
    });
    rig.engine.refresh();
    assert_eq!(rig.read(&format!("{TPG}/enable")), Err(Errno::NOENT));
    assert_eq!(rig.read("core/fileio_0/hba_info"), Err(Errno::NOENT));
    let half = "iscsi/iqn.2026-01.example:half/tpgt_3";
    assert!(rig.read(&format!("{half}/enable")).is_ok());
    assert_eq!(
        rig.read(&format!("{half}/lun/lun_0/alua_tg_pt_gp")),
        Err(Errno::NOENT)
    );
    assert!(rig.read(&format!("{OTHER}/enable")).is_ok());
    // The tree can still be changed after this.
    assert_eq!(rig.line(&format!("echo {OTHER}/enable 0")), Ok(()));
    assert_eq!(rig.document()["targets"], json!([]));
}

#[test]
fn change_keeps_concurrent_foreign_changes() {
    let mut rig = Rig::new();
    rig.other(add_other);
    assert_eq!(rig.line(&format!("rmdir {TPG}/np/127.0.0.1:3260")), Ok(()));
    let targets = rig.document()["targets"].clone();
    assert_eq!(targets.as_array().unwrap().len(), 1, "{targets}");
    assert_eq!(targets[0]["name"], "other");
    // If something has been removed, it can't be changed.
    rig.other(|document| document["targets"] = json!([]));
    assert_eq!(
        rig.line(&format!("rmdir {OTHER}/np/127.0.0.1:3261")),
        Err(Errno::NOENT)
    );
}

#[test]
fn rejected_change_returns_daemon_errno() {
    let mut rig = Rig::new();
    let before = rig.document();
    let refused = |errno| ApplyError::Refused {
        why: "no".to_owned(),
        errno,
    };
    for (refusal, errno) in [
        (refused(Some(Errno::ADDRINUSE)), Errno::ADDRINUSE),
        (refused(None), Errno::INVAL),
        (ApplyError::Unreachable("gone".into()), Errno::IO),
        (ApplyError::Outdated, Errno::BUSY),
    ] {
        rig.state.lock().unwrap().refusal = Some(refusal);
        let line = format!("mkdir {TPG}/np/127.0.0.1:3270");
        assert_eq!(rig.line(&line), Err(errno));
        assert_eq!(
            rig.read(&format!("{TPG}/np/127.0.0.1:3270/iser")),
            Err(Errno::NOENT)
        );
        assert_eq!(rig.document(), before);
    }
}

#[test]
fn tree_stays_readable_without_daemon() {
    let mut rig = Rig::new();
    rig.state.lock().unwrap().is_down = true;
    rig.engine.refresh();
    assert_eq!(rig.read(&format!("{TPG}/enable")), Ok("1\n".into()));
    rig.state.lock().unwrap().is_down = false;
    rig.other(|document| document["targets"] = json!([]));
    rig.engine.refresh();
    assert_eq!(rig.read(&format!("{TPG}/enable")), Err(Errno::NOENT));
    assert!(rig.read("core/fileio_0/disk/enable").is_ok());
}

#[test]
fn enabled_group_is_accepted_without_unsupported_parts() {
    let mut rig = Rig::new();
    // Use the same order as rtslib when it restores a file, where `enable` is written last.
    let acl = format!("{OTHER}/acls/iqn.2026-01.example:client");
    let lines = [
        "mkdir iscsi/iqn.2026-01.example:other".to_owned(),
        format!("mkdir {OTHER}"),
        format!("echo {OTHER}/attrib/authentication 1"),
        format!("mkdir {OTHER}/np/127.0.0.1:3261"),
        format!("mkdir {acl}"),
        format!("put {acl}/auth/userid client"),
        format!("put {acl}/auth/password short"),
        format!("echo {OTHER}/enable 1"),
    ];
    for line in &lines {
        assert_eq!(rig.line(line), Ok(()), "{line}");
    }
    let targets = rig.document()["targets"].clone();
    assert_eq!(targets[1]["name"], "iqn.2026-01.example:other");
    assert_eq!(targets[1].get("access"), None);
    // A change must be rejected if it would remove access from a target that is already served.
    let long = "a secret of some length";
    assert_eq!(rig.line(&format!("put {acl}/auth/password {long}")), Ok(()));
    let access = rig.document()["targets"][1]["access"].clone();
    assert_eq!(access.as_array().unwrap().len(), 1);
    let short = format!("put {acl}/auth/password short");
    assert_eq!(rig.line(&short), Err(Errno::INVAL));
    assert_eq!(
        rig.read(&format!("{acl}/auth/password")),
        Ok(format!("{long}\n"))
    );
    // A second group is not served, but this must not block changes to other groups.
    let second = "iscsi/iqn.2026-01.example:other/tpgt_2";
    for line in [
        format!("mkdir {second}"),
        format!("mkdir {second}/np/127.0.0.1:3262"),
        format!("echo {second}/enable 1"),
        format!("rmdir {TPG}/np/127.0.0.1:3260"),
    ] {
        assert_eq!(rig.line(&line), Ok(()), "{line}");
    }
    assert_eq!(rig.read(&format!("{second}/enable")), Ok("1\n".into()));
    assert_eq!(rig.document()["targets"].as_array().unwrap().len(), 1);
}

#[test]
fn rejected_group_is_retried_after_change() {
    let mut rig = Rig::new();
    rig.state.lock().unwrap().is_taken = Some("127.0.0.1:3261");
    for line in [
        "mkdir iscsi/iqn.2026-01.example:other".to_owned(),
        format!("mkdir {OTHER}"),
        format!("mkdir {OTHER}/np/127.0.0.1:3261"),
        format!("echo {OTHER}/enable 1"),
    ] {
        assert_eq!(rig.line(&line), Ok(()), "{line}");
    }
    assert_eq!(rig.read(&format!("{OTHER}/enable")), Ok("1\n".into()));
    assert_eq!(rig.document()["targets"].as_array().unwrap().len(), 1);
    // Changes to other parts are applied without this group, and a change to the group will try it
    // again.
    let acl = format!("mkdir {TPG}/acls/iqn.2026-01.example:third");
    assert_eq!(rig.line(&acl), Ok(()));
    let access = rig.document()["targets"][0]["access"].clone();
    assert_eq!(access.as_array().unwrap().len(), 2);
    for line in [
        format!("mkdir {OTHER}/np/127.0.0.1:3263"),
        format!("rmdir {OTHER}/np/127.0.0.1:3261"),
    ] {
        assert_eq!(rig.line(&line), Ok(()), "{line}");
    }
    assert_eq!(rig.document()["targets"].as_array().unwrap().len(), 2);
}

fn used(commands: u64) -> Fake {
    let mut world = Fake::default();
    let target = "iqn.2026-01.example:disk".to_owned();
    world.sessions.push(Session {
        target: target.clone(),
        is_live: true,
        ..Session::default()
    });
    let op = LiveOp {
        commands,
        ..LiveOp::default()
    };
    world.live.luns.push(LiveLun {
        target,
        ops: [("read".to_owned(), op)].into(),
        ..LiveLun::default()
    });
    world
}

/// This is done by the Pacemaker agent, which creates the LUN before it sets the attributes of the
/// disk.
#[test]
fn unmap_is_switched_on_for_unused_lun() {
    let line = "echo core/fileio_0/disk/attrib/emulate_tpu 1";
    for world in [Fake::default(), used(0)] {
        let mut rig = Rig::within(world);
        let before = rig.document();
        assert_eq!(before["backends"]["fileio_0:disk"]["thin"], false);
        assert_eq!(rig.line(line), Ok(()));
        let after = rig.document();
        assert_ne!(after["backends"]["fileio_0:disk"]["thin"], false);
        assert_eq!(after["targets"], before["targets"]);
        assert_eq!(
            rig.read("core/fileio_0/disk/attrib/emulate_tpu"),
            Ok("1\n".into())
        );
    }
    let mut rig = Rig::within(used(3));
    let before = rig.document();
    assert_eq!(rig.line(line), Err(Errno::BUSY));
    assert_eq!(rig.document(), before);
}

#[test]
fn replaced_lun_survives_change_by_another_user() {
    let mut rig = Rig::new();
    let before = rig.document();
    rig.state.lock().unwrap().intrusion = Some(add_other);
    let line = "echo core/fileio_0/disk/attrib/emulate_tpu 1";
    assert_eq!(rig.line(line), Ok(()));
    let after = rig.document();
    assert_ne!(after["backends"]["fileio_0:disk"]["thin"], false);
    let targets = after["targets"].as_array().unwrap();
    assert_eq!(targets.len(), 2);
    assert!(targets.contains(&before["targets"][0]), "{after}");
}

/// Returns the LUNs that are visible to the initiator, including their backend.
fn seen(document: &Value) -> Vec<(u16, String)> {
    let config = Config::parse(&document.to_string(), "test").unwrap();
    let target = &config.targets[0];
    let riser_config::Access::Rules(rules) = &target.access else {
        panic!("{document}");
    };
    let seen = target.seen_by(rules[0].luns.as_ref()).into_iter();
    let name = |number| config.backend(&target.luns[&number]).name.clone();
    seen.map(|(number, lun)| (number, name(lun.number)))
        .collect()
}

#[test]
fn replaced_lun_never_leads_to_another_disk() {
    let mut rig = Rig::new();
    let client = format!("{TPG}/acls/iqn.2026-01.example:client");
    for line in [
        "mkdir core/rd_mcp_1".to_owned(),
        "mkdir core/rd_mcp_1/r".to_owned(),
        "put core/rd_mcp_1/r/control rd_pages=256".to_owned(),
        "echo core/rd_mcp_1/r/enable 1".to_owned(),
        format!("mkdir {TPG}/lun/lun_1"),
        format!("ln {TPG}/lun/lun_1/a /sys/kernel/config/target/core/rd_mcp_1/r"),
        // This swaps the two numbers of the initiator.
        format!("rm {client}/lun_0/b"),
        format!("ln {client}/lun_0/b ../../../lun/lun_1"),
        format!("mkdir {client}/lun_1"),
        format!("ln {client}/lun_1/b ../../../lun/lun_0"),
    ] {
        assert_eq!(rig.line(&line), Ok(()), "{line}");
    }
    let expected = [(0, "rd_mcp_1:r"), (1, "fileio_0:disk")].map(|(n, name)| (n, name.to_owned()));
    assert_eq!(seen(&rig.document()), expected);
    rig.state.lock().unwrap().served.clear();
    let line = "echo core/fileio_0/disk/attrib/emulate_tpu 1";
    assert_eq!(rig.line(line), Ok(()));
    let served = rig.state.lock().unwrap().served.clone();
    assert_eq!(served.len(), 2);
    assert_eq!(seen(&served[0]), expected[..1]);
    assert_eq!(seen(&served[1]), expected);
}
