use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;
use crate::rules::Shell;
use crate::testing::{Fake, TPG, run_line, served};

/// A daemon that others configure as well, and that can be made to say no.
#[derive(Debug, Default)]
struct State {
    document: Value,
    changes: u64,
    refusal: Option<ApplyError>,
    is_down: bool,
}

struct Shared {
    state: Arc<Mutex<State>>,
    seen: u64,
}

/// A configuration in the daemon's words.
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
        state.document = normal(document);
        state.changes += 1;
        Ok(())
    }
}

struct Rig {
    engine: Engine,
    state: Arc<Mutex<State>>,
}

impl Rig {
    fn new() -> Self {
        let state = Arc::new(Mutex::new(State {
            document: json!({ "targets": [] }),
            ..State::default()
        }));
        let daemon = Shared {
            state: Arc::clone(&state),
            seen: 0,
        };
        let engine = Engine::new(
            "a secret".into(),
            Box::new(Fake::default()),
            Box::new(daemon),
        );
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
        self.engine.look(|tree, world| {
            let mut tree = tree.clone();
            let tree = &mut tree;
            Shell { tree, world }.read(path)
        })
    }

    /// A change by another user.
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
fn what_others_change_is_shown_and_the_rest_stays() {
    let mut rig = Rig::new();
    // What the daemon does not know of.
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
    // What is gone takes along what was linked to it.
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
    // A change of the tree goes on from there.
    assert_eq!(rig.line(&format!("echo {OTHER}/enable 0")), Ok(()));
    assert_eq!(rig.document()["targets"], json!([]));
}

#[test]
fn a_change_never_undoes_what_others_did_meanwhile() {
    let mut rig = Rig::new();
    rig.other(add_other);
    assert_eq!(rig.line(&format!("rmdir {TPG}/np/127.0.0.1:3260")), Ok(()));
    let targets = rig.document()["targets"].clone();
    assert_eq!(targets.as_array().unwrap().len(), 1, "{targets}");
    assert_eq!(targets[0]["name"], "other");
    // What is not there any more cannot be changed.
    rig.other(|document| document["targets"] = json!([]));
    assert_eq!(
        rig.line(&format!("rmdir {OTHER}/np/127.0.0.1:3261")),
        Err(Errno::NOENT)
    );
}

#[test]
fn what_the_daemon_refuses_has_its_error_number_and_changes_nothing() {
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
fn without_a_daemon_the_tree_stays_readable() {
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
