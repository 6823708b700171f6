use std::path::Path;

use riser_config::{Access, Config, Target};
use serde_json::{Value, json};

use super::*;
use crate::convert;
use crate::host::OtherHost;
use crate::testing::{Fake, Fixture, TPG};

/// File written by rtslib after `targetcli` was used to create two backstores and an iSCSI target.
const SAVED: &str = include_str!("../../tests/data/saveconfig.json");

fn saved() -> Value {
    serde_json::from_str(SAVED).unwrap()
}

#[test]
fn saved_file_round_trips() {
    let world = Fake::default();
    let restored = restore(&saved(), &world);
    assert_eq!(restored.lost, [] as [String; 0]);
    assert_eq!(restored.notes, [] as [String; 0]);
    let again = save(&restored.tree, &world);
    assert_eq!(again.omitted, [] as [String; 0]);
    assert_eq!(again.document, saved());
}

/// Converts the file to a riserd configuration, which doesn't keep the names of links.
#[test]
fn saved_file_round_trips_via_configuration() {
    let world = Fake::default();
    let imported = configuration(restore(&saved(), &world), "a secret", &world);
    assert_eq!(imported.lost, [] as [String; 0]);
    assert_eq!(imported.notes, [] as [String; 0]);
    let document = imported.config.to_value();
    let imported = convert::import(&document, "a secret".into(), &world);
    assert_eq!(imported.hidden, [] as [String; 0]);
    let again = save(&imported.tree, &world);
    assert_eq!(again.omitted, [] as [String; 0]);
    let alike = |document: &Value| {
        let mut document = document.clone();
        let group = &mut document["targets"][0]["tpgs"][0];
        let acls = group["node_acls"].as_array_mut().unwrap();
        let mapped = acls
            .iter_mut()
            .flat_map(|acl| acl["mapped_luns"].as_array_mut().unwrap());
        mapped.for_each(|lun| lun["alias"] = Value::Null);
        let luns = group["luns"].as_array_mut().unwrap();
        luns.iter_mut().for_each(|lun| lun["alias"] = Value::Null);
        document
    };
    assert_eq!(alike(&again.document), alike(&saved()));
}

#[test]
fn unsupported_parts_are_reported() {
    let world = Fake::default();
    let mut file = saved();
    let objects = file["storage_objects"].as_array_mut().unwrap();
    objects.push(json!({ "plugin": "user", "name": "rbd", "config": "rbd/x" }));
    objects[0]["attributes"]["pi_prot_type"] = json!(1);
    objects[0]["attributes"]["block_size"] = json!(4096);
    objects[0]["dev"] = json!("/srv/the image");
    let group = &mut file["targets"][0]["tpgs"][0];
    group["node_acls"][0]["chap_password"] = json!("short");
    let luns = group["luns"].as_array_mut().unwrap();
    luns.push(json!({ "index": 9, "storage_object": "/backstores/user/rbd" }));
    let targets = file["targets"].as_array_mut().unwrap();
    targets.push(json!({ "fabric": "loopback", "wwn": "naa.5001405000000001", "tpgs": [] }));
    let mut second = targets[0].clone();
    second["wwn"] = json!("iqn.2026-01.com.example:second");
    second["tpgs"][0]["portals"][0]["port"] = json!(3261);
    second["tpgs"][0]["node_acls"][0]["chap_password"] = json!("long enough to be taken");
    targets.push(second);
    let mut off = targets[0].clone();
    off["wwn"] = json!("iqn.2026-01.com.example:off");
    off["tpgs"][0]["portals"][0]["port"] = json!(3262);
    off["tpgs"][0]["enable"] = json!(false);
    targets.push(off);
    let imported = configuration(restore(&file, &world), "a secret", &world);
    let Imported {
        config,
        lost,
        notes,
    } = imported;
    let first = "iscsi/iqn.2026-01.com.example:t/tpgt_1";
    let left_out = |name: &str| {
        format!(
            "iscsi/iqn.2026-01.com.example:{name}/tpgt_1/lun/lun_9: /backstores/user/rbd is \
             omitted or missing"
        )
    };
    assert_eq!(
        lost,
        [
            "storage object rbd: unsupported backstore `user`: this disk is omitted".to_owned(),
            left_out("t"),
            "target naa.5001405000000001: unsupported fabric `loopback`: this target is omitted"
                .to_owned(),
            left_out("second"),
            left_out("off"),
            format!(
                "target/{first}/acls/iqn.2026-01.com.example:host/auth: the CHAP secret of user `host` has 5 \
                 bytes, and riserd requires 12 to 255: this initiator is omitted until a valid secret is \
                 set at both sides"
            ),
        ]
    );
    assert_eq!(
        notes,
        [
            "core/fileio_0/img/attrib/pi_prot_type = 1: the image is served without its protection \
             information; to keep both, stop LIO, run `riserd import-disk --type 1 --block-size 4096 \
             '/srv/the image' '/srv/the image.protected'`, and set `path` to the new file and \
             `protection: { type: 1 }`",
            "iscsi/iqn.2026-01.com.example:off/tpgt_1: disabled in the file; its 3 LUNs and 1 ACLs \
             are omitted",
        ]
    );
    let names: Vec<&str> = config.targets.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "iqn.2026-01.com.example:second",
            "iqn.2026-01.com.example:t"
        ]
    );
    assert!(config.targets.iter().all(|target| target.luns.len() == 2));
    assert_eq!(config.backends.len(), 2);
}

/// LIO can't restore this either.
#[test]
fn mapped_lun_of_missing_lun_is_noted() {
    let world = Fake::default();
    let mut file = saved();
    let group = &mut file["targets"][0]["tpgs"][0];
    let mapped = &mut group["node_acls"][0]["mapped_luns"];
    let mapped = mapped.as_array_mut().unwrap();
    mapped.push(json!({ "index": 8, "tpg_lun": 77 }));
    let imported = configuration(restore(&file, &world), "a secret", &world);
    assert_eq!(imported.lost, [] as [String; 0]);
    let acl = "iscsi/iqn.2026-01.com.example:t/tpgt_1/acls/iqn.2026-01.com.example:host";
    let note = format!("{acl}/lun_8: the portal group has no LUN 77: this LUN is omitted");
    assert_eq!(imported.notes, [note]);
}

/// This is the same as in rtslib, which writes true and false but accepts any number when reading.
#[test]
fn numbers_are_accepted_as_flags() {
    let world = Fake::default();
    for (on, off) in [(json!(1), json!(0)), (json!("1"), json!("0"))] {
        let mut file = saved();
        file["fabric_modules"] = json!([{ "name": "iscsi", "discovery_enable_auth": on }]);
        let group = &mut file["targets"][0]["tpgs"][0];
        group["node_acls"][0]["mapped_luns"][0]["write_protect"] = on.clone();
        let imported = configuration(restore(&file, &world), "a secret that is not kept", &world);
        assert!(imported.config.discovery_chap.is_some(), "{on}");
        let luns = &imported.config.targets[0].luns;
        assert!(luns[&0].read_only && !luns[&1].read_only, "{on}");
        file["targets"][0]["tpgs"][0]["enable"] = off.clone();
        let imported = configuration(restore(&file, &world), "a secret that is not kept", &world);
        assert!(imported.config.targets.is_empty(), "{off}");
    }
}

#[test]
fn unsaved_settings_are_reported() {
    let mut fixture = Fixture::served();
    fixture.run(&format!(
        "mkdir srpt
         mkdir srpt/0002:c903:00a1:b2c3
         mkdir srpt/0x00000000000000000000ffff7f000001
         mkdir srpt/0x00000000000000000000ffff7f000001/tpgt_1
         mkdir srpt/0x00000000000000000000ffff7f000001/tpgt_1/acls/10.0.0.7
         mkdir srpt/0x00000000000000000000ffff7f000001/tpgt_1/acls/0x00000000000000010002c90300a1b2c3
         echo {TPG}/acls/iqn.2026-01.example:client/tag some
         put {TPG}/auth/userid me
         put {TPG}/auth/password a-secret-of-some-length"
    ));
    fixture
        .run("mkdir core/rd_mcp_1\nmkdir core/rd_mcp_1/r\nput core/rd_mcp_1/r/wwn/vendor_id ACME");
    fixture
        .run("put core/rd_mcp_1/r/control rd_pages=256,rd_nullio=1\necho core/rd_mcp_1/r/enable 1");
    let saved = save(&fixture.tree, &fixture.world);
    assert_eq!(
        saved.omitted,
        [
            "target/core/rd_mcp_1/r/wwn/vendor_id: ACME",
            "target/srpt/0002:c903:00a1:b2c3",
            "target/srpt/0x00000000000000000000ffff7f000001/tpgt_1/acls/10.0.0.7",
        ]
    );
    let document = &saved.document;
    assert_eq!(document["storage_objects"][1]["nullio"], json!(true));
    assert_eq!(document["storage_objects"][1]["size"], json!(1 << 20));
    let (iscsi, srp) = (&document["targets"][0], &document["targets"][1]);
    assert_eq!(iscsi["tpgs"][0]["chap_userid"], json!("me"));
    assert_eq!(iscsi["tpgs"][0]["node_acls"][0]["tag"], json!("some"));
    assert_eq!(srp["wwn"], json!("ib.00000000000000000000ffff7f000001"));
    let acl = &srp["tpgs"][0]["node_acls"][0];
    assert_eq!(
        acl["node_wwn"],
        json!("ib.00000000000000010002c90300a1b2c3")
    );
}

/// Files using published formats, with the expected number of targets, LUNs, rules, lost parts and
/// notes after an import.
#[test]
fn published_shapes_keep_all_they_can() {
    // See tests/data/lio/README.md for a description of each file.
    let rows = [
        ("fcoe", [1, 1, 1, 1, 4]),
        ("gluster", [1, 0, 0, 4, 5]),
        ("groups", [2, 1, 1, 1, 1]),
        ("identities", [1, 4, 0, 0, 0]),
        ("installer", [1, 1, 0, 0, 0]),
        ("iser", [1, 1, 3, 0, 0]),
        ("minimal", [1, 1, 2, 0, 0]),
        ("names", [1, 3, 0, 1, 0]),
        ("old-kernel", [1, 1, 3, 0, 0]),
        ("plugins", [1, 3, 2, 4, 1]),
        ("read-only-demo", [1, 1, 4, 0, 0]),
        ("short-secrets", [2, 3, 3, 2, 0]),
        ("srp", [1, 1, 1, 1, 0]),
        ("twins", [1, 3, 1, 1, 0]),
        ("windows", [1, 3, 1, 0, 0]),
    ];
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/lio");
    let files = std::fs::read_dir(&directory).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    assert_eq!(
        names.filter(|name| name.ends_with(".json")).count(),
        rows.len()
    );
    for (name, expected) in rows {
        let text = std::fs::read_to_string(directory.join(format!("{name}.json"))).unwrap();
        let world = OtherHost::default();
        let restored = restore(&serde_json::from_str(&text).unwrap(), &world);
        let Imported {
            config,
            lost,
            notes,
        } = configuration(restored, "a secret that is not kept", &world);
        let rules = |target: &Target| match &target.access {
            Access::Open => 0,
            Access::Rules(rules) => rules.len(),
        };
        let luns = config.targets.iter().map(|target| target.luns.len());
        let found = [
            config.targets.len(),
            luns.sum(),
            config.targets.iter().map(rules).sum(),
            lost.len(),
            notes.len(),
        ];
        assert_eq!(found, expected, "{name}: {lost:#?} {notes:#?}");
        for line in lost.iter().chain(&notes) {
            assert!(!line.contains("os error"), "{name}: {line}");
        }
    }
}

/// Values used to replace other values.
fn other(kind: u8, document: &Value, number: usize) -> Value {
    match kind % 10 {
        0 => Value::Null,
        1 => json!(0),
        2 => json!(-1),
        3 => json!(u64::MAX),
        4 => json!(""),
        5 => json!("../a/b c\n"),
        6 => json!([]),
        7 => json!({}),
        8 => json!(true),
        _ => nth(&mut document.clone(), number).map_or(Value::Null, |at| at.clone()),
    }
}

/// Returns the value with this number, counting from the top.
fn nth(document: &mut Value, mut number: usize) -> Option<&mut Value> {
    fn find<'a>(value: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
        if *left == 0 {
            return Some(value);
        }
        *left -= 1;
        match value {
            Value::Array(items) => items.iter_mut().find_map(|item| find(item, left)),
            Value::Object(entries) => entries.values_mut().find_map(|entry| find(entry, left)),
            _ => None,
        }
    }
    find(document, &mut number)
}

/// Creates a file from bytes: either parse them as JSON, or apply changes (four bytes each) to a
/// file created by rtslib.
fn file_of(bytes: &[u8]) -> Value {
    if let Ok(file) = serde_json::from_slice(bytes) {
        return file;
    }
    let mut file = saved();
    for &[kind, high, low, from] in bytes.as_chunks().0.iter().take(16) {
        let new = other(kind, &file, usize::from(from));
        let number = usize::from(u16::from_be_bytes([high, low])) % 400;
        match nth(&mut file, number) {
            Some(Value::Array(items)) if kind >= 128 => items.push(new),
            Some(at) => *at = new,
            None => {}
        }
    }
    file
}

/// Checks that any file can be converted to a tree and a valid configuration, and that saving this
/// tree and reading it again returns the same values.
fn check_file(bytes: &[u8]) {
    let world = Fake::default();
    let file = file_of(bytes);
    let restored = restore(&file, &world);
    let once = save(&restored.tree, &world);
    let again = save(&restore(&once.document, &world).tree, &world);
    assert_eq!(again.document, once.document, "{file}");
    let config = configuration(restored, "a secret", &world).config;
    let text = config.to_yaml();
    let parsed = Config::parse(&text, "saveconfig").map_err(|e| e.to_string());
    assert_eq!(parsed, Ok(config), "{text}");
}

#[test]
fn saveconfig() {
    bolero::check!(name = "saveconfig").for_each(check_file);
}
