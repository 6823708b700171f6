use riser_config::Config;
use serde_json::{Value, json};

use super::*;
use crate::convert;
use crate::testing::{Fake, Fixture, TPG};

/// What rtslib wrote after `targetcli` had made two backstores and an iSCSI target.
const SAVED: &str = include_str!("../../tests/data/saveconfig.json");

fn saved() -> Value {
    serde_json::from_str(SAVED).unwrap()
}

#[test]
fn a_file_comes_back_as_it_was() {
    let world = Fake::default();
    let restored = restore(&saved(), &world);
    assert_eq!(restored.lost, [] as [String; 0]);
    let again = save(&restored.tree, &world);
    assert_eq!(again.omitted, [] as [String; 0]);
    assert_eq!(again.document, saved());
}

/// By way of a configuration of riserd, which does not keep what links are called.
#[test]
fn a_file_comes_back_from_a_configuration() {
    let world = Fake::default();
    let (config, lost) = configuration(restore(&saved(), &world), "a secret", &world);
    assert_eq!(lost, [] as [String; 0]);
    let document = config.to_value();
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
fn what_cannot_be_done_is_named_and_the_rest_is_done() {
    let world = Fake::default();
    let mut file = saved();
    let objects = file["storage_objects"].as_array_mut().unwrap();
    objects.push(json!({ "plugin": "user", "name": "rbd", "config": "rbd/x" }));
    objects[0]["attributes"]["pi_prot_type"] = json!(1);
    let group = &mut file["targets"][0]["tpgs"][0];
    group["node_acls"][0]["chap_password"] = json!("short");
    let targets = file["targets"].as_array_mut().unwrap();
    targets.push(json!({ "fabric": "loopback", "wwn": "naa.5001405000000001", "tpgs": [] }));
    let mut second = targets[0].clone();
    second["wwn"] = json!("iqn.2026-01.com.example:second");
    second["tpgs"][0]["portals"][0]["port"] = json!(3261);
    second["tpgs"][0]["node_acls"][0]["chap_password"] = json!("long enough to be taken");
    targets.push(second);
    let (config, lost) = configuration(restore(&file, &world), "a secret", &world);
    assert_eq!(
        lost,
        [
            "core/fileio_0/img/attrib/pi_prot_type = 1: Function not implemented (os error 38)",
            "storage object rbd: riserd has no backstore `user`",
            "target naa.5001405000000001: riserd has no fabric `loopback`",
            "target iqn.2026-01.com.example:t.chap.users[0]: a secret has 12 to 255 bytes",
        ]
    );
    assert_eq!(config.targets.len(), 1);
    assert_eq!(config.targets[0].name, "iqn.2026-01.com.example:second");
    assert_eq!(config.backends.len(), 2);
}

#[test]
fn a_tree_says_what_the_file_has_no_words_for() {
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

/// Values that take the place of others.
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

/// The value of a number, counted from above.
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

/// A file from bytes: as JSON, or else a file of rtslib with changes of four bytes each.
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

/// Whatever a file says, it gives a tree and a configuration that is one, and what is saved of the
/// tree comes back as it was.
fn check_file(bytes: &[u8]) {
    let world = Fake::default();
    let file = file_of(bytes);
    let restored = restore(&file, &world);
    let once = save(&restored.tree, &world);
    let again = save(&restore(&once.document, &world).tree, &world);
    assert_eq!(again.document, once.document, "{file}");
    let (config, _) = configuration(restored, "a secret", &world);
    let text = config.to_yaml();
    let parsed = Config::parse(&text, "saveconfig").map_err(|e| e.to_string());
    assert_eq!(parsed, Ok(config), "{text}");
}

#[test]
fn saveconfig() {
    bolero::check!(name = "saveconfig").for_each(check_file);
}
