use serde_json::{Value, json};

use super::*;
use crate::testing::{Fixture, TPG};
use riser_config::Config;

fn rest() -> Rest {
    Rest {
        lock_secret: "a secret that is not kept".to_owned(),
        ..Rest::default()
    }
}

fn check(document: &Value) -> Result<(), String> {
    if document["targets"].as_array().unwrap().is_empty() {
        return Ok(());
    }
    let config = Config::parse(&document.to_string(), "exported");
    config.map(|_| ()).map_err(|e| e.to_string())
}

impl Fixture {
    fn export(&self) -> Result<Value, String> {
        let exported = export(&self.tree, &rest(), &self.world);
        if let Some(omission) = exported.omitted.first() {
            return Err(omission.to_string());
        }
        check(&exported.document)?;
        Ok(exported.document)
    }

    /// Returns the first target, and the parts of the tree that are missing from the document.
    fn incomplete(&self) -> (Value, Vec<String>) {
        let exported = export(&self.tree, &rest(), &self.world);
        check(&exported.document).unwrap();
        let omitted = exported.omitted.iter().map(ToString::to_string);
        (exported.document["targets"][0].clone(), omitted.collect())
    }

    fn target(&self) -> Value {
        self.export().unwrap()["targets"][0].clone()
    }
}

const ACL: &str = "iscsi/iqn.2026-01.example:disk/tpgt_1/acls/iqn.2026-01.example:client";

#[test]
fn served_file_becomes_backend_and_target() {
    assert_eq!(
        Fixture::served().export().unwrap(),
        json!({
            "backends": {
                "fileio_0:disk": {
                    "kind": "file",
                    "path": "/srv/disk",
                    "size": "1048576",
                    "create": true,
                    "write_cache": "off",
                    "thin": false,
                    "rotational": true,
                    "vendor": "LIO-ORG",
                    "product": "FILEIO",
                    "revision": "4.0",
                    "serial": "5a0e1b2c-0000-4000-8000-0123456789ab",
                    "naa": "60014055a0e1b2c00004000800001234",
                }
            },
            "targets": [{
                "name": "iqn.2026-01.example:disk",
                "iqn": "iqn.2026-01.example:disk",
                "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3260" }],
                "luns": { "0": "fileio_0:disk" },
                "access": [{ "iqn": "iqn.2026-01.example:client" }],
            }],
        })
    );
}

#[test]
fn disabled_parts_are_not_exported() {
    let empty = json!({ "backends": {}, "targets": [] });
    let mut fixture = Fixture::default();
    assert_eq!(fixture.export().unwrap(), empty);
    fixture.run("mkdir core/rd_mcp_0\nmkdir core/rd_mcp_0/r\nmkdir iscsi\nmkdir iscsi/iqn.a:b");
    assert_eq!(fixture.export().unwrap(), empty);
    for line in [
        format!("echo {TPG}/enable 0"),
        format!("rmdir {TPG}/np/127.0.0.1:3260"),
    ] {
        let mut fixture = Fixture::served();
        fixture.run(&line);
        assert_eq!(fixture.export().unwrap()["targets"], json!([]), "{line}");
    }
}

#[test]
fn unspecified_address_is_preserved() {
    let mut fixture = Fixture::served();
    fixture.run(&format!(
        "rmdir {TPG}/np/127.0.0.1:3260
         mkdir {TPG}/np/0.0.0.0:3260
         mkdir {TPG}/np/[::0]:3261
         echo {TPG}/np/0.0.0.0:3260/iser 1"
    ));
    let document = fixture.export().unwrap();
    assert_eq!(
        document["targets"][0]["portals"],
        json!([
            { "protocol": "iscsi", "listen": "0.0.0.0:3260" },
            { "protocol": "iser", "listen": "0.0.0.0:3260" },
            { "protocol": "iscsi", "listen": ":3261" },
        ])
    );
    let imported = import(&document, "a secret".to_owned(), &fixture.world);
    assert_eq!(imported.hidden, [""; 0]);
    for np in ["0.0.0.0:3260", "[::]:3261"] {
        let np = format!("target/{TPG}/np/{np}");
        assert!(imported.tree.find(&np).is_some(), "{np}");
    }
    // If this is not supported by LIO, it can't be shown and must be kept.
    for listen in ["[::]:3260", "eth0:3260"] {
        let mut document = document.clone();
        document["targets"][0]["portals"] = json!([{ "protocol": "iscsi", "listen": listen }]);
        let imported = import(&document, "a secret".to_owned(), &fixture.world);
        assert_eq!(imported.hidden.len(), 1, "{listen}");
        let exported = export(&imported.tree, &imported.rest, &fixture.world);
        assert_eq!(exported.document["targets"], document["targets"]);
    }
}

#[test]
fn initiators_see_their_mapped_luns() {
    let mut fixture = Fixture::served();
    fixture.run(&format!(
        "mkdir core/rd_mcp_1
         mkdir core/rd_mcp_1/r
         put core/rd_mcp_1/r/control rd_pages=256
         echo core/rd_mcp_1/r/enable 1
         mkdir {TPG}/lun/lun_1
         ln {TPG}/lun/lun_1/a ../../../../../core/rd_mcp_1/r
         mkdir {TPG}/acls/iqn.2026-01.example:second
         mkdir {TPG}/acls/iqn.2026-01.example:second/lun_5
         ln {TPG}/acls/iqn.2026-01.example:second/lun_5/a ../../../lun/lun_1
         echo {TPG}/acls/iqn.2026-01.example:second/lun_5/write_protect 1
         mkdir {TPG}/acls/iqn.2026-01.example:third"
    ));
    let target = fixture.target();
    let luns = json!({
        "0": "fileio_0:disk",
        "1": { "backend": "rd_mcp_1:r", "read_only": true },
    });
    assert_eq!(target["luns"], luns);
    assert_eq!(
        target["access"],
        json!([
            { "iqn": "iqn.2026-01.example:client", "luns": [0] },
            {
                "iqn": "iqn.2026-01.example:second",
                "luns": { "5": { "backend": "rd_mcp_1:r", "read_only": true } },
            },
            { "iqn": "iqn.2026-01.example:third", "luns": [] },
        ])
    );
    // The same number is used for two LUNs, and the same LUN has different access.
    fixture.run(&format!(
        "mkdir {TPG}/acls/iqn.2026-01.example:third/lun_0
         ln {TPG}/acls/iqn.2026-01.example:third/lun_0/a ../../../lun/lun_1"
    ));
    let target = fixture.target();
    assert_eq!(
        target["luns"],
        json!({ "0": "fileio_0:disk", "1": "rd_mcp_1:r" })
    );
    assert_eq!(
        target["access"][1]["luns"],
        json!({ "5": { "backend": "rd_mcp_1:r", "read_only": true } })
    );
    assert_eq!(target["access"][2]["luns"], json!({ "0": "rd_mcp_1:r" }));
}

/// If a rule uses its own LUN numbers, this must be shown and must not change when exported.
#[test]
fn numbers_of_rules_are_mapped_luns() {
    let target = |rules: Value| {
        json!({
            "name": "iqn.2026-01.example:t",
            "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3260" }],
            "luns": { "0": "a", "1": { "backend": "b", "read_only": true } },
            "access": rules,
        })
    };
    let running = |rules| {
        json!({
            "backends": {
                "a": { "kind": "ram", "size": 4096 },
                "b": { "kind": "ram", "size": 4096 },
            },
            "targets": [target(rules)],
        })
    };
    let any = ["0.0.0.0/0", "::/0"].map(|net| json!({ "address": net, "luns": [] }));
    for (rules, is_shown) in [
        (
            json!([
                { "iqn": "iqn.2026-01.example:a", "luns": { "0": "b", "7": "a" } },
                { "iqn": "iqn.2026-01.example:b", "luns": { "0": { "backend": "a", "read_only": true } } },
                { "iqn": "iqn.2026-01.example:c", "luns": { "0": "a", "1": "b" } },
                { "iqn": "iqn.2026-01.example:d", "luns": {} },
            ]),
            true,
        ),
        // All other initiators can see all LUNs of the portal group, or no LUNs.
        (json!(any), false),
    ] {
        let document = running(rules);
        let world = Fixture::default().world;
        let imported = import(&document, "a secret".to_owned(), &world);
        assert_eq!(
            imported.hidden.is_empty(),
            is_shown,
            "{:?}",
            imported.hidden
        );
        let exported = export(&imported.tree, &imported.rest, &world);
        assert_eq!(exported.document, document);
        if is_shown {
            let acls = "target/iscsi/iqn.2026-01.example:t/tpgt_1/acls";
            let tree = &imported.tree;
            let leads = |number: &str| {
                let at = format!("{acls}/iqn.2026-01.example:a/{number}");
                let mapped = tree.find(&at).unwrap();
                let (_, lun) = tree.links(mapped).next().unwrap();
                let protect = tree.value(mapped, "write_protect").to_owned();
                (tree.dir(lun).name.clone(), protect)
            };
            assert_eq!(leads("lun_0"), ("lun_1".to_owned(), "1".to_owned()));
            assert_eq!(leads("lun_7"), ("lun_0".to_owned(), "0".to_owned()));
        }
    }
}

#[test]
fn demo_mode_admits_all_initiators() {
    let mut fixture = Fixture::served();
    fixture.run(&format!("echo {TPG}/attrib/generate_node_acls 1"));
    // This client can write, but other initiators can't.
    let read_only = json!({ "0": { "backend": "fileio_0:disk", "read_only": true } });
    assert_eq!(
        fixture.target()["access"],
        json!([
            { "iqn": "iqn.2026-01.example:client" },
            { "address": "0.0.0.0/0", "luns": read_only },
            { "address": "::/0", "luns": read_only },
        ])
    );
    fixture.run(&format!("echo {TPG}/attrib/demo_mode_write_protect 0"));
    assert_eq!(
        fixture.target()["access"],
        json!([
            { "iqn": "iqn.2026-01.example:client" },
            { "address": "0.0.0.0/0" },
            { "address": "::/0" },
        ])
    );
    fixture.run(&format!("rm {ACL}/lun_0/b\nrmdir {ACL}/lun_0\nrmdir {ACL}"));
    assert_eq!(fixture.target()["access"], json!("open"));
    fixture.run(&format!("echo {TPG}/attrib/demo_mode_write_protect 1"));
    assert_eq!(fixture.target()["luns"]["0"]["read_only"], json!(true));
}

#[test]
fn acl_secrets_are_converted_to_target() {
    let mut fixture = Fixture::served();
    fixture.run(&format!("echo {TPG}/attrib/authentication 1"));
    // If an initiator has no credentials but they are required, it must not get access.
    assert_eq!(fixture.target()["access"], json!([]));
    assert!(fixture.target().get("chap").is_none());
    fixture.run(&format!(
        "put {ACL}/auth/userid client
         put {ACL}/auth/password a-secret-of-some-length
         put {ACL}/auth/userid_mutual target
         put {ACL}/auth/password_mutual another-of-some-length"
    ));
    assert_eq!(
        fixture.target()["chap"],
        json!({
            "users": [{ "name": "client", "secret": "a-secret-of-some-length" }],
            "mutual": { "name": "target", "secret": "another-of-some-length" },
        })
    );
    fixture.run(&format!("put {ACL}/auth/password short"));
    assert!(
        fixture
            .export()
            .unwrap_err()
            .contains("has 5 bytes, and riserd requires 12 to 255")
    );
    fixture.run(&format!("put {ACL}/auth/password a-secret-of-some-length"));
    let second = format!("{TPG}/acls/iqn.2026-01.example:second");
    fixture.run(&format!("mkdir {second}\nput {second}/auth/userid other"));
    fixture.run(&format!("put {second}/auth/password other-secret-of-his"));
    // In this case, each rule must have its own credentials.
    let each = json!([
        {
            "iqn": "iqn.2026-01.example:client",
            "chap": {
                "users": [{ "name": "client", "secret": "a-secret-of-some-length" }],
                "mutual": { "name": "target", "secret": "another-of-some-length" },
            },
        },
        {
            "iqn": "iqn.2026-01.example:second",
            "luns": [],
            "chap": { "users": [{ "name": "other", "secret": "other-secret-of-his" }] },
        },
    ]);
    assert_eq!(fixture.target()["access"], each);
    assert!(fixture.target().get("chap").is_none());
    // If authentication is not required, this is also a difference.
    fixture.run(&format!("echo {second}/attrib/authentication 0"));
    let access = fixture.target()["access"].clone();
    assert_eq!(access[0], each[0]);
    assert_eq!(
        access[1],
        json!({ "iqn": "iqn.2026-01.example:second", "luns": [] })
    );
}

#[test]
fn short_secret_leaves_out_its_initiator_alone() {
    let mut fixture = Fixture::served();
    let second = format!("{TPG}/acls/iqn.2026-01.example:second");
    fixture.run(&format!(
        "echo {TPG}/attrib/authentication 1
         put {ACL}/auth/userid client
         put {ACL}/auth/password short
         mkdir {second}
         put {second}/auth/userid other
         put {second}/auth/password other-secret-of-his
         put {second}/auth/userid_mutual me
         put {second}/auth/password_mutual brief"
    ));
    let (target, omitted) = fixture.incomplete();
    assert_eq!(
        target["access"],
        json!([{ "iqn": "iqn.2026-01.example:second", "luns": [] }])
    );
    assert_eq!(
        target["chap"],
        json!({ "users": [{ "name": "other", "secret": "other-secret-of-his" }] })
    );
    assert_eq!(target["luns"]["0"], "fileio_0:disk");
    assert_eq!(
        omitted,
        [
            format!(
                "target/{ACL}/auth: the CHAP secret of user `client` has 5 bytes, and riserd requires 12 \
                 to 255: this initiator is omitted until a valid secret is set at both sides"
            ),
            format!(
                "target/{second}/auth: the CHAP secret of user `me` has 5 bytes, and riserd requires 12 to \
                 255: mutual authentication is omitted, and initiators that require it cannot log in \
                 until a valid mutual secret is set at both sides"
            ),
        ]
    );
    fixture.run(&format!(
        "put {second}/auth/password_mutual other-secret-of-his"
    ));
    let (_, omitted) = fixture.incomplete();
    assert!(
        omitted[1].contains("is the same as that of the initiator"),
        "{omitted:?}"
    );
}

/// The rule for all initiators must not allow access for an initiator with an entry that rejects
/// it.
#[test]
fn open_access_does_not_admit_refused_initiator() {
    let mut fixture = Fixture::served();
    fixture.run(&format!(
        "echo {TPG}/attrib/generate_node_acls 1
         echo {ACL}/attrib/authentication 1"
    ));
    let refused = json!({ "iqn": "iqn.2026-01.example:client", "luns": [] });
    assert_eq!(fixture.target()["access"][0], refused);
    fixture.run(&format!(
        "put {ACL}/auth/userid client\nput {ACL}/auth/password short"
    ));
    let (target, omitted) = fixture.incomplete();
    assert_eq!(target["access"][0], refused);
    assert_eq!(
        (target["access"].as_array().unwrap().len(), omitted.len()),
        (3, 1)
    );
}

#[test]
fn short_secret_of_discovery_locks_discovery() {
    let mut fixture = Fixture::served();
    fixture.run(
        "echo iscsi/discovery_auth/enforce_discovery_auth 1
         put iscsi/discovery_auth/userid u
         put iscsi/discovery_auth/password short",
    );
    let exported = export(&fixture.tree, &rest(), &fixture.world);
    assert_eq!(
        exported.document["discovery_chap"]["users"][0]["name"],
        "locked"
    );
    assert!(
        exported.omitted[0]
            .reason
            .contains("no initiator can discover")
    );
    assert_eq!(exported.document["targets"].as_array().unwrap().len(), 1);
}

#[test]
fn unsupported_part_leaves_out_nothing_else() {
    let mut fixture = Fixture::served();
    let serial = "5a0e1b2c-0000-4000-8000-0123456789".to_owned() + &"x".repeat(46);
    fixture.run(&format!(
        "mkdir core/fileio_1
         mkdir core/fileio_1/long,name
         put core/fileio_1/long,name/control fd_dev_name=/srv/b,fd_dev_size=1048576
         put core/fileio_1/long,name/wwn/vpd_unit_serial {serial}
         echo core/fileio_1/long,name/enable 1
         mkdir core/fileio_2
         mkdir core/fileio_2/odd
         put core/fileio_2/odd/control fd_dev_name=/srv/c,fd_dev_size=1048576
         echo core/fileio_2/odd/enable 1
         echo core/fileio_2/odd/attrib/block_size 2048
         mkdir {TPG}/lun/lun_1
         ln {TPG}/lun/lun_1/a ../../../../../core/fileio_1/long,name
         mkdir {TPG}/lun/lun_2
         ln {TPG}/lun/lun_2/a ../../../../../core/fileio_2/odd
         mkdir {TPG}/lun/lun_16384
         ln {TPG}/lun/lun_16384/a ../../../../../core/fileio_1/long,name
         mkdir {ACL}/lun_2
         ln {ACL}/lun_2/b ../../../lun/lun_2
         mkdir {TPG}/np/127.0.0.1:3261
         mkdir iscsi/iqn.2026-01.example:disk/tpgt_2
         mkdir iscsi/iqn.2026-01.example:disk/tpgt_2/np/127.0.0.1:3262
         echo iscsi/iqn.2026-01.example:disk/tpgt_2/enable 1"
    ));
    let exported = export(&fixture.tree, &rest(), &fixture.world);
    check(&exported.document).unwrap();
    let document = &exported.document;
    let names: Vec<&String> = document["backends"].as_object().unwrap().keys().collect();
    assert_eq!(names[0], "fileio_0:disk");
    assert!(names[1].starts_with("fileio_1:longname-"), "{names:?}");
    let second = &document["backends"][names[1]];
    // The first 25 digits are the same as the serial number of the first disk, which already uses
    // this identifier.
    assert_eq!((second.get("naa"), second.get("serial")), (None, None));
    let luns = document["targets"][0]["luns"].as_object().unwrap();
    assert_eq!(luns.keys().collect::<Vec<_>>(), ["0", "1"]);
    assert_eq!(
        document["targets"][0]["access"],
        json!([{ "iqn": "iqn.2026-01.example:client", "luns": [0] }])
    );
    let omitted: Vec<String> = exported.omitted.iter().map(ToString::to_string).collect();
    for (line, part) in omitted.iter().zip([
        "core/fileio_1/long,name/wwn: the unit serial number of 80 bytes is omitted",
        "core/fileio_1/long,name: the NAA identifier 60014055a0e1b2c00004000800001234 is also used by \
         backend fileio_0:disk",
        "core/fileio_2/odd: unsupported block size of 2048 bytes",
        "lun/lun_16384: LUN 16384 is omitted: the maximum is 16383",
        "lun/lun_2: backend fileio_2:odd is omitted",
        "tpgt_2: second enabled portal group of a target, riserd supports one per target: its 1 portals, \
         0 LUNs and 0 initiators are omitted",
    ]) {
        assert!(line.contains(part), "{line}\n{part}");
    }
    assert_eq!(omitted.len(), 6, "{omitted:?}");
}

#[test]
fn mapping_of_duplicate_lun_shows_no_disk() {
    let mut fixture = Fixture::served();
    // The kernel accepts octal numbers, so both names are the same as 0.
    fixture.run(&format!(
        "mkdir core/rd_mcp_1
         mkdir core/rd_mcp_1/r
         put core/rd_mcp_1/r/control rd_pages=256
         echo core/rd_mcp_1/r/enable 1
         mkdir {TPG}/lun/lun_00
         ln {TPG}/lun/lun_00/a ../../../../../core/rd_mcp_1/r
         mkdir {TPG}/acls/iqn.2026-01.example:other
         mkdir {TPG}/acls/iqn.2026-01.example:other/lun_0
         ln {TPG}/acls/iqn.2026-01.example:other/lun_0/a ../../../lun/lun_00"
    ));
    let (target, omitted) = fixture.incomplete();
    assert_eq!(target["luns"], json!({ "0": "fileio_0:disk" }));
    assert_eq!(
        target["access"],
        json!([
            { "iqn": "iqn.2026-01.example:client" },
            { "iqn": "iqn.2026-01.example:other", "luns": [] },
        ])
    );
    assert!(omitted[0].contains("duplicate LUN 0"), "{omitted:?}");
}

#[test]
fn discovery_without_user_rejects_all() {
    let mut fixture = Fixture::served();
    assert!(fixture.export().unwrap().get("discovery_chap").is_none());
    fixture.run("echo iscsi/discovery_auth/enforce_discovery_auth 1");
    let chap = &fixture.export().unwrap()["discovery_chap"];
    assert_eq!(
        chap["users"][0]["secret"],
        json!("a secret that is not kept")
    );
    fixture
        .run("put iscsi/discovery_auth/userid u\nput iscsi/discovery_auth/password 123456789012");
    assert_eq!(
        fixture.export().unwrap()["discovery_chap"],
        json!({ "users": [{ "name": "u", "secret": "123456789012" }] })
    );
}

#[test]
fn srp_port_is_served_at_its_addresses() {
    let mut fixture = Fixture::served();
    let port = "srpt/0002:c903:00a1:b2c3";
    fixture.run(&format!(
        "mkdir srpt
         echo srpt/discovery_auth/rdma_cm_port 5556
         mkdir {port}
         mkdir {port}/any
         mkdir {port}/any/lun/lun_0
         ln {port}/any/lun/lun_0/vdev ../../../../../core/fileio_0/disk
         mkdir {port}/any/acls/0x00000000000000010002c90300a1b2c4
         mkdir {port}/any/acls/0x00000000000000010002c90300a1b2c4/lun_0
         ln {port}/any/acls/0x00000000000000010002c90300a1b2c4/lun_0/l ../../../lun/lun_0
         mkdir {port}/any/acls/0002:c903:00a1:b2c5
         mkdir {port}/any/acls/10.0.0.2
         echo {port}/any/enable 1"
    ));
    let targets = fixture.export().unwrap()["targets"].clone();
    assert_eq!(
        targets[1],
        json!({
            "name": "0002:c903:00a1:b2c3",
            "portals": [{ "protocol": "srp", "listen": "10.0.0.1:5556" }],
            "luns": { "0": "fileio_0:disk" },
            "access": [
                { "initiator": "0002c90300a1b2c5", "luns": [] },
                { "initiator": "00000000000000010002c90300a1b2c4" },
                { "address": "10.0.0.2", "luns": [] },
            ],
        })
    );
}

#[test]
fn ineffective_settings_are_noted() {
    let mut fixture = Fixture::served();
    let notes = |f: &Fixture| export(&f.tree, &rest(), &f.world).notes;
    assert_eq!(notes(&fixture), Vec::<String>::new());
    fixture.run(&format!(
        "echo {TPG}/param/MaxBurstLength 1048576
         echo core/fileio_0/disk/attrib/emulate_caw 0"
    ));
    assert_eq!(
        notes(&fixture),
        [
            "target/core/fileio_0/disk/attrib/emulate_caw has no effect",
            &format!("target/{TPG}/param/MaxBurstLength has no effect"),
        ]
    );
}

#[test]
fn long_names_are_shortened_and_stay_distinct() {
    let mut fixture = Fixture::served();
    let long = format!("iqn.2026-01.example:{}", "x".repeat(80));
    fixture.run(&format!(
        "mkdir iscsi/{long}\nmkdir iscsi/{long}/tpgt_1\nmkdir iscsi/{long}/tpgt_1/np/127.0.0.1:1
         echo iscsi/{long}/tpgt_1/enable 1"
    ));
    let targets = fixture.export().unwrap()["targets"].clone();
    let target = targets
        .as_array()
        .unwrap()
        .iter()
        .find(|t| t["iqn"] == json!(long))
        .unwrap();
    assert_eq!(target["name"].as_str().unwrap().len(), 64);
    assert_eq!(target["access"], json!([]));
    let second = "iscsi/iqn.2026-01.example:disk/tpgt_2";
    fixture.run(&format!(
        "mkdir {second}\nmkdir {second}/np/127.0.0.1:2\necho {second}/enable 1"
    ));
    assert!(
        fixture
            .export()
            .unwrap_err()
            .contains("second enabled portal group")
    );
}

fn running() -> Value {
    json!({
        "identity": "host",
        "log": { "filter": "debug" },
        "backends": {
            "disk0": { "kind": "file", "path": "/srv/disk", "size": "1MiB", "direct": "off" },
            "fileio_7:new": { "kind": "file", "path": "/srv/new", "size": 4096, "create": true },
            "mem": { "kind": "ram", "size": "4KiB", "serial": "m1" },
            "odd": { "kind": "ram", "size": 512 },
            "sdz": { "kind": "device", "path": "/dev/sdz", "read_only": true, "block_size": 4096 },
        },
        "targets": [
            {
                "name": "first",
                "iqn": "iqn.2026-01.example:first",
                "portals": [
                    { "protocol": "iser", "listen": "127.0.0.1:3260" },
                    { "protocol": "iscsi", "listen": "127.0.0.1",
                      "redirect": { "to": "192.0.2.1:3260" } },
                    { "protocol": "iser", "listen": "127.0.0.1:3261" },
                ],
                "luns": { "0": "disk0", "3": { "backend": "mem", "read_only": true } },
                "access": [
                    { "iqn": "iqn.2026-01.example:b" },
                    { "iqn": "iqn.2026-01.example:a", "luns": [3] },
                ],
                "chap": { "users": [{ "name": "u", "secret": "a secret of some length" }] },
            },
            {
                "name": "first-each",
                "iqn": "iqn.2026-01.example:first-each",
                "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3264" }],
                "luns": { "0": "disk0" },
                "access": [
                    { "iqn": "iqn.2026-01.example:a",
                      "chap": { "users": [{ "name": "a", "secret": "the secret of a" }] } },
                    { "iqn": "iqn.2026-01.example:b" },
                ],
            },
            {
                "name": "most",
                "iqn": "iqn.2026-01.example:most",
                "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3265" }],
                "luns": { "0": "disk0", "1": "mem" },
                "access": [
                    { "iqn": "iqn.2026-01.example:a", "luns": [1] },
                    { "address": "0.0.0.0/0" },
                    { "address": "::/0" },
                ],
                "chap": { "users": [{ "name": "u", "secret": "a secret of some length" }] },
            },
            {
                "name": "iqn.2026-01.example:open",
                "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3262" }],
                "luns": { "0": "sdz" },
                "access": "open",
            },
            {
                "name": "srp",
                "portals": [{ "protocol": "srp", "listen": "127.0.0.1", "id_ext": "0x0200c0ffee000009" }],
                "luns": { "1": "mem" },
                "access": [{ "initiator": "0002c90300a1b2c3" }, { "address": "10.0.0.7" }],
            },
            {
                "name": "srp-open",
                "portals": [{ "protocol": "srp", "listen": "127.0.0.2" }],
                "luns": { "1": "mem" },
                "access": "open",
            },
            {
                "name": "net",
                "iqn": "iqn.2026-01.example:net",
                "portals": [{ "protocol": "iscsi", "listen": "127.0.0.1:3263" }],
                "luns": { "0": "odd" },
                "access": [{ "address": "10.0.0.0/8" }],
            },
        ],
        "discovery_chap": { "users": [{ "name": "d", "secret": "a secret of some length" }] },
    })
}

fn shown() -> (Fixture, Rest, Vec<String>) {
    Config::parse(&running().to_string(), "running").unwrap();
    let mut fixture = Fixture::default();
    let imported = import(&running(), "a secret".to_owned(), &fixture.world);
    fixture.tree = imported.tree;
    (fixture, imported.rest, imported.hidden)
}

/// Returns the targets by name, because the tree uses a different order.
fn by_name(document: &Value) -> Value {
    let mut document = document.clone();
    let targets = document["targets"].as_array_mut().unwrap();
    targets.sort_by_key(|t| t["name"].as_str().unwrap().to_owned());
    document
}

#[test]
fn configuration_round_trips() {
    let (fixture, rest, hidden) = shown();
    assert_eq!(
        hidden,
        [
            "backend odd: its size is not a multiple of the page size",
            "target srp-open: its portal is not on an address of this host, and LIO only has ports \
             of its host",
            "target net: backend odd of LUN 0 is not shown",
        ]
    );
    let exported = export(&fixture.tree, &rest, &fixture.world);
    assert_eq!(by_name(&exported.document), by_name(&running()));
}

#[test]
fn configuration_is_shown_in_tree() {
    let (mut fixture, ..) = shown();
    let tpg = "iscsi/iqn.2026-01.example:first/tpgt_1";
    let mut says = |path: &str| fixture.read(path).unwrap().trim_end().to_owned();
    assert_eq!(says(&format!("{tpg}/enable")), "1");
    assert_eq!(says(&format!("{tpg}/np/127.0.0.1:3260/iser")), "1");
    assert_eq!(
        says(&format!(
            "{tpg}/acls/iqn.2026-01.example:b/lun_3/write_protect"
        )),
        "1"
    );
    assert_eq!(
        says(&format!("{tpg}/acls/iqn.2026-01.example:b/auth/userid")),
        "u"
    );
    assert_eq!(says("iscsi/discovery_auth/userid"), "d");
    assert_eq!(says("core/fileio_7/new/enable"), "1");
    let ls = |fixture: &mut Fixture, path: &str| fixture.shell().ls(path);
    let core = ls(&mut fixture, "core");
    assert_eq!(
        core,
        ["alua", "fileio_0", "fileio_7", "iblock_2", "rd_mcp_1"]
    );
    let serial = fixture
        .read("core/rd_mcp_1/mem/wwn/vpd_unit_serial")
        .unwrap();
    assert!(serial.ends_with(" m1\n"), "{serial}");
    let srp = "srpt/0x00000000000000000000ffff7f000001/tpgt_1/acls";
    let acls = ls(&mut fixture, srp);
    assert_eq!(acls, ["0002:c903:00a1:b2c3", "10.0.0.7"]);
}

#[test]
fn update_keeps_unchanged_parts() {
    let (mut fixture, rest, _) = shown();
    let tpg = "iscsi/iqn.2026-01.example:first/tpgt_1";
    fixture.run(&format!(
        "rm {tpg}/acls/iqn.2026-01.example:b/lun_0/shown
         rmdir {tpg}/acls/iqn.2026-01.example:b/lun_0
         echo core/fileio_0/disk0/attrib/emulate_write_cache 0"
    ));
    let exported = by_name(&export(&fixture.tree, &rest, &fixture.world).document);
    let mut expected = by_name(&running());
    expected["backends"]["disk0"]["write_cache"] = json!("off");
    let first = expected["targets"].as_array_mut().unwrap();
    let first = first.iter_mut().find(|t| t["name"] == "first").unwrap();
    // LUN 0 still exists, but it's not visible to any initiator.
    first["access"] = json!([
        { "iqn": "iqn.2026-01.example:a", "luns": [3] },
        { "iqn": "iqn.2026-01.example:b", "luns": [3] },
    ]);
    assert_eq!(exported, expected);
    let portals = &exported["targets"][0];
    assert_eq!(portals["name"], "first");
    assert_eq!(portals["portals"][1]["redirect"]["to"], "192.0.2.1:3260");
}

/// Repeats all operations that Debian's `targetcli` used to create backstores and a target, clear
/// everything, restore it from a file, and then delete the target and a backstore.
#[test]
fn targetcli_operations_can_be_replayed() {
    let mut fixture = Fixture::default();
    let mut served = Vec::new();
    for line in include_str!("../../tests/data/targetcli.txt").lines() {
        assert_eq!(fixture.try_line(line), Ok(()), "{line}");
        let targets = fixture.export().unwrap()["targets"].clone();
        if served.last() != Some(&targets) {
            served.push(targets);
        }
    }
    let portals = |doc: &Value| doc[0]["portals"].as_array().map_or(0, Vec::len);
    let access = |doc: &Value| doc[0]["access"].as_array().map_or(0, Vec::len);
    // The portal, the ACL, CHAP and iSER are added one at a time when created, but in a single step
    // when restored, because the portal group is enabled last.
    let steps: Vec<(usize, usize)> = served.iter().map(|d| (portals(d), access(d))).collect();
    assert_eq!(
        steps.iter().filter(|s| **s == (2, 1)).count(),
        2,
        "{steps:?}"
    );
    assert_eq!(served.first(), Some(&json!([])));
    assert_eq!(served.last(), Some(&json!([])));
    let backends = fixture.export().unwrap()["backends"].clone();
    let left: Vec<&String> = backends.as_object().unwrap().keys().collect();
    assert_eq!(left, ["rd_mcp_1:rd"]);
}
