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

impl Fixture {
    fn export(&self) -> Result<Value, String> {
        let exported = export(&self.tree, &rest(), &self.world).map_err(|u| u.to_string())?;
        if !exported.document["targets"].as_array().unwrap().is_empty() {
            let text = exported.document.to_string();
            Config::parse(&text, "exported").map_err(|e| e.to_string())?;
        }
        Ok(exported.document)
    }

    fn target(&self) -> Value {
        self.export().unwrap()["targets"][0].clone()
    }
}

const ACL: &str = "iscsi/iqn.2026-01.example:disk/tpgt_1/acls/iqn.2026-01.example:client";

#[test]
fn a_served_file_is_a_backend_and_a_target() {
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
fn what_is_not_enabled_is_not_there() {
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
fn the_unspecified_address_stays_what_it_is() {
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
    // What LIO does not have is not shown, and stays.
    for listen in ["[::]:3260", "eth0:3260"] {
        let mut document = document.clone();
        document["targets"][0]["portals"] = json!([{ "protocol": "iscsi", "listen": listen }]);
        let imported = import(&document, "a secret".to_owned(), &fixture.world);
        assert_eq!(imported.hidden.len(), 1, "{listen}");
        let exported = export(&imported.tree, &imported.rest, &fixture.world).unwrap();
        assert_eq!(exported.document["targets"], document["targets"]);
    }
}

#[test]
fn initiators_see_what_is_mapped_for_them_under_their_numbers() {
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
    // One number, two things; and one thing with different rights.
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

/// What a configuration says by a rule's own numbers is shown, and stays what it is.
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
        // All other initiators see what the portal group has, or nothing.
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
        let exported = export(&imported.tree, &imported.rest, &world).unwrap();
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
fn a_demonstration_is_open_to_all() {
    let mut fixture = Fixture::served();
    fixture.run(&format!("echo {TPG}/attrib/generate_node_acls 1"));
    // Other initiators cannot write, and the client can.
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
fn secrets_are_the_targets() {
    let mut fixture = Fixture::served();
    fixture.run(&format!("echo {TPG}/attrib/authentication 1"));
    // An initiator without the credentials that it needs is not admitted.
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
            .contains("a secret has 12 to 255 bytes")
    );
    fixture.run(&format!("put {ACL}/auth/password a-secret-of-some-length"));
    let second = format!("{TPG}/acls/iqn.2026-01.example:second");
    fixture.run(&format!("mkdir {second}\nput {second}/auth/userid other"));
    fixture.run(&format!("put {second}/auth/password other-secret-of-his"));
    // Then each has his own.
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
    // Who need not prove who he is is different, too.
    fixture.run(&format!("echo {second}/attrib/authentication 0"));
    let access = fixture.target()["access"].clone();
    assert_eq!(access[0], each[0]);
    assert_eq!(
        access[1],
        json!({ "iqn": "iqn.2026-01.example:second", "luns": [] })
    );
}

#[test]
fn discovery_without_a_user_is_for_no_initiator() {
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
fn an_srp_port_is_served_at_its_addresses() {
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
fn what_has_no_effect_is_said() {
    let mut fixture = Fixture::served();
    let notes = |f: &Fixture| export(&f.tree, &rest(), &f.world).unwrap().notes;
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
            .contains("a second portal group")
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

/// The targets by their names, since their order is the tree's.
fn by_name(document: &Value) -> Value {
    let mut document = document.clone();
    let targets = document["targets"].as_array_mut().unwrap();
    targets.sort_by_key(|t| t["name"].as_str().unwrap().to_owned());
    document
}

#[test]
fn a_configuration_comes_back_as_it_was() {
    let (fixture, rest, hidden) = shown();
    assert_eq!(
        hidden,
        [
            "backend odd: its size is not one in pages",
            "target srp-open: Invalid argument (os error 22) in the tree",
            "target net: No such device (os error 19) in the tree",
        ]
    );
    let exported = export(&fixture.tree, &rest, &fixture.world).unwrap();
    assert_eq!(by_name(&exported.document), by_name(&running()));
}

#[test]
fn a_configuration_is_shown_as_it_is() {
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
fn only_what_changes_changes() {
    let (mut fixture, rest, _) = shown();
    let tpg = "iscsi/iqn.2026-01.example:first/tpgt_1";
    fixture.run(&format!(
        "rm {tpg}/acls/iqn.2026-01.example:b/lun_0/shown
         rmdir {tpg}/acls/iqn.2026-01.example:b/lun_0
         echo core/fileio_0/disk0/attrib/emulate_write_cache 0"
    ));
    let exported = by_name(
        &export(&fixture.tree, &rest, &fixture.world)
            .unwrap()
            .document,
    );
    let mut expected = by_name(&running());
    expected["backends"]["disk0"]["write_cache"] = json!("off");
    let first = expected["targets"].as_array_mut().unwrap();
    let first = first.iter_mut().find(|t| t["name"] == "first").unwrap();
    // LUN 0 is still there, but no initiator sees it.
    first["access"] = json!([
        { "iqn": "iqn.2026-01.example:a", "luns": [3] },
        { "iqn": "iqn.2026-01.example:b", "luns": [3] },
    ]);
    assert_eq!(exported, expected);
    let portals = &exported["targets"][0];
    assert_eq!(portals["name"], "first");
    assert_eq!(portals["portals"][1]["redirect"]["to"], "192.0.2.1:3260");
}

/// What Debian's `targetcli` did to the tree: it made backstores and a target, cleared all,
/// restored it from its file, and deleted the target and a backstore.
#[test]
fn what_targetcli_did_can_be_done_again() {
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
    // The portal, the LUN's initiator, CHAP and iSER one after the other; all of it at once when it
    // is restored, since the portal group is enabled last.
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
