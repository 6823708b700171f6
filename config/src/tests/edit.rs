//! Configuration updates by path.

use crate::edit::{Document, Edited};
use crate::{Config, ObjectPath};

const TEXT: &str = "\
backends: { a: { kind: ram, size: 1MiB }, b.c: { kind: ram, size: 2MiB, serial: B } }
targets:
  - name: t
    iqn: iqn.2026-01.a:t
    portals:
      - { protocol: iscsi, listen: 127.0.0.1 }
      - { protocol: srp, listen: \"[::1]:5555\" }
    luns: { 0: a }
    chap: { users: [{ name: me/2, secret: twelve bytes or so }] }
    access: open
";

fn document() -> Document {
    Document::new(&Config::parse(TEXT, "test.yaml").unwrap())
}

fn pairs(pairs: &[&str]) -> Vec<(String, String)> {
    let pair = |pair: &&str| {
        let (key, value) = pair.split_once('=').unwrap();
        (key.to_owned(), value.to_owned())
    };
    pairs.iter().map(pair).collect()
}

fn place(text: &str) -> ObjectPath {
    text.parse().unwrap()
}

/// Applies an update, and returns the differences as text or the error.
fn changed(edit: impl FnOnce(&mut Document) -> Edited<()>) -> Result<Vec<String>, String> {
    let mut document = document();
    let after = edit(&mut document).and_then(|()| document.finish());
    let (after, yaml) = after.map_err(|error| error.to_string())?;
    assert_eq!(Config::parse(&yaml, "again.yaml").unwrap(), after);
    let before = Config::parse(TEXT, "test.yaml").unwrap();
    let changes = crate::diff(&before, &after).into_iter();
    Ok(changes
        .map(|d| format!("{} {} {}", d.path, d.old, d.new))
        .collect())
}

#[test]
fn keys_are_set_by_type() {
    let set = |at: &str, keys: &[&str]| changed(|d| d.set(&place(at), &pairs(keys)));
    for (at, keys, expected) in [
        (
            "/limits",
            "max_sessions=9",
            "/limits null {\"max_sessions\":9}",
        ),
        ("/backends/a", "serial=12", "/backends/a/serial null \"12\""),
        (
            "/backends/b.c",
            "thin=false",
            "/backends/b.c/thin null false",
        ),
        (
            "/targets/t/luns/0",
            "backend=b.c",
            "/targets/t/luns/0 \"a\" \"b.c\"",
        ),
        (
            "/targets/0",
            "luns/0=b.c",
            "/targets/t/luns/0 \"a\" \"b.c\"",
        ),
        (
            "/targets/t/portals/srp:[::1]",
            "ioc_guid=0x0200c0ffee000001",
            "/targets/t/portals/srp:[::1]:5555/ioc_guid null \"0x0200c0ffee000001\"",
        ),
        ("/workers", "cpus=0, 1", "/workers null {\"cpus\":[0,1]}"),
        (
            "/targets/t/chap/users/0",
            "secret=another twelve bytes",
            "/targets/t/chap/users/me~12/secret \"(secret)\" \"(secret)\"",
        ),
        (
            "/targets/t/chap/users/me~12",
            "secret=another twelve bytes",
            "/targets/t/chap/users/me~12/secret \"(secret)\" \"(secret)\"",
        ),
    ] {
        assert_eq!(
            set(at, &[keys]),
            Ok(vec![expected.to_owned()]),
            "{at} {keys}"
        );
    }
    for (at, keys, expected) in [
        (
            "/limits",
            "max_sesions=9",
            "/limits: unknown key `max_sesions` (did you mean `max_sessions`?)",
        ),
        (
            "/limits",
            "max_sessions=many",
            "/limits/max_sessions: expected a non-negative integer, not `many`",
        ),
        (
            "/limits",
            "max_sessions=0",
            "/limits/max_sessions: must be from 1 to 7500, not 0",
        ),
        (
            "/targets/u",
            "iqn=x",
            "/targets: unknown name `u` (valid names are t)",
        ),
        (
            "/targets/t",
            "luns/7=a",
            "/targets/t/luns: unknown name `7` (valid names are 0)",
        ),
        (
            "/targets/t",
            "luns/0=x",
            "/targets/t/luns/0: unknown backend `x`",
        ),
        (
            "/targets/t",
            "chap=yes",
            "/targets/t/chap: this is an object (its keys are algorithms, mutual, users)",
        ),
        (
            "/targets/t",
            "access=closed",
            "/targets/t/access: expected `open`, or a list of rules, not string \"closed\"",
        ),
        (
            "/backends/b.c",
            "kind=tape",
            "/backends/b.c/kind: `tape` is not one of file, device, ram, null",
        ),
        (
            "/backends/a/size",
            "x=1",
            "/backends/a/size: this is a key, not an object",
        ),
        (
            "/targets/t/chap/users/me",
            "name=x",
            "/targets/t/chap/users: unknown name `me` (did you mean `me~12`?)",
        ),
        (
            "/backends/a",
            "thin=yes",
            "/backends/a/thin: expected true or false, not `yes`",
        ),
    ] {
        assert_eq!(set(at, &[keys]), Err(expected.to_owned()), "{at} {keys}");
    }
}

#[test]
fn rule_luns_accept_list_or_mapping() {
    let rule = |d: &mut Document, keys: &[&str]| {
        d.delete(&place("/targets/t/access"))?;
        d.create(&place("/targets/t/access/0"), &pairs(keys))
    };
    let said = |luns: &str| {
        Ok(vec![format!(
            "/targets/t/access \"open\" [{{\"address\":\"10.0.0.0/8\",\"luns\":{luns}}}]"
        )])
    };
    let address = "address=10.0.0.0/8";
    assert_eq!(changed(|d| rule(d, &[address, "luns=0"])), said("[0]"));
    let unit = |d: &mut Document, number: u8, keys: &[&str]| {
        let at = format!("/targets/t/access/0/luns/{number}");
        d.create(&place(&at), &pairs(keys))
    };
    let mapped = changed(|d| {
        rule(d, &[address])?;
        unit(d, 5, &["backend=a"])?;
        unit(d, 7, &["backend=a", "read_only=true"])
    });
    assert_eq!(
        mapped,
        said("{\"5\":\"a\",\"7\":{\"backend\":\"a\",\"read_only\":true}}")
    );
    let changed_again = changed(|d| {
        rule(d, &[address])?;
        unit(d, 5, &["backend=a"])?;
        d.set(
            &place("/targets/t/access/0/luns/5"),
            &pairs(&["read_only=true"]),
        )?;
        unit(d, 6, &["backend=a"])?;
        d.delete(&place("/targets/t/access/0/luns/6"))
    });
    assert_eq!(
        changed_again,
        said("{\"5\":{\"backend\":\"a\",\"read_only\":true}}")
    );
    let mixed = changed(|d| {
        rule(d, &[address, "luns=0"])?;
        unit(d, 5, &["backend=a"])
    });
    assert_eq!(
        mixed.unwrap_err(),
        "/targets/t/access/0/luns: unknown key `5`: this is a value, not an object"
    );
}

#[test]
fn objects_are_created_and_deleted() {
    let create = |at: &str, keys: &[&str]| changed(|d| d.create(&place(at), &pairs(keys)));
    let one = |text: &str| Ok(vec![text.to_owned()]);
    assert_eq!(
        create("/backends/d", &["kind=null", "size=1GiB"]),
        one("/backends/d null {\"kind\":\"null\",\"size\":\"1GiB\"}")
    );
    assert_eq!(
        create("/targets/t/luns/3", &["backend=b.c", "read_only=true"]),
        one("/targets/t/luns/3 null {\"backend\":\"b.c\",\"read_only\":true}")
    );
    let portal = "/targets/t/portals/iser:127.0.0.1:3260 null \
                      {\"protocol\":\"iser\",\"listen\":\"127.0.0.1:3260\"}";
    assert_eq!(
        create("/targets/t/portals/iser:127.0.0.1", &[]),
        one(portal)
    );
    let keys = ["protocol=iser", "listen=127.0.0.1"];
    assert_eq!(create("/targets/t/portals", &keys), one(portal));
    assert_eq!(create("/targets/t/portals/2", &keys), one(portal));
    let keys = [
        "portals/srp:127.0.0.9/ioc_guid=0x0200c0ffee000001",
        "luns/1=a",
        "access=open",
    ];
    assert_eq!(create("/targets/u", &keys).unwrap().len(), 1);
    assert_eq!(
        create("/targets/t/access/0", &["iqn=iqn.2026-01.a:me", "luns=0"]),
        one("/targets/t/access \"open\" [{\"iqn\":\"iqn.2026-01.a:me\",\"luns\":[0]}]")
    );
    let keys = ["secret=our own twelve bytes", "name=us"];
    assert_eq!(create("/targets/t/chap/mutual", &keys).unwrap().len(), 1);
    for (at, keys, expected) in [
        ("/backends/a", "kind=ram", "/backends/a: it exists already"),
        (
            "/targets/t/luns/4",
            "read_only=true",
            "/targets/t/luns/4: missing key `backend`",
        ),
        (
            "/targets/v/luns/4",
            "backend=a",
            "/targets: unknown name `v` (valid names are t)",
        ),
        (
            "/targets/t/portals/5",
            "protocol=srp",
            "/targets/t/portals/5: a new item must have the number 2",
        ),
        (
            "/targets/t/access/1",
            "iqn=x",
            "/targets/t/access/1: invalid position: must be a number from 0 to 0",
        ),
        (
            "/targets/t/iqn",
            "x=y",
            "/targets/t/iqn: this is a key (use `set` to set it)",
        ),
        (
            "/targets/v",
            "access=open",
            "/targets/v: missing key `portals`",
        ),
    ] {
        assert_eq!(create(at, &[keys]), Err(expected.to_owned()), "{at} {keys}");
    }
    let delete = |at: &str| changed(|d| d.delete(&place(at)));
    assert_eq!(
        delete("/targets/t/luns/0"),
        one("/targets/t/luns {\"0\":\"a\"} null")
    );
    assert_eq!(
        delete("/targets/t/portals/srp:[::1]:5555").unwrap().len(),
        1
    );
    assert_eq!(
        delete("/backends/b.c/serial"),
        one("/backends/b.c/serial \"B\" null")
    );
    assert_eq!(
        delete("/targets/t/access"),
        one("/targets/t/access \"open\" null")
    );
    assert_eq!(delete("/targets/t").unwrap().len(), 1);
    for (at, expected) in [
        ("/", "/: the root of the configuration cannot be deleted"),
        ("/limits", "/limits: not set"),
        (
            "/backends/z",
            "/backends: unknown name `z` (valid names are a, b.c)",
        ),
        ("/backends/a", "/backends/a: is in use by /targets/t/luns/0"),
        (
            "/backends/a/serial/x",
            "/backends/a/serial: unknown key `x`: this is a value, not an object",
        ),
    ] {
        assert_eq!(delete(at), Err(expected.to_owned()), "{at}");
    }
}

/// A name can look like it ends with a port.
#[test]
fn name_prefix_does_not_match() {
    let text = "\
backends: { a: { kind: ram, size: 1MiB } }
targets:
  - name: disk:1
    portals:
      - { protocol: srp, listen: \"127.0.0.1:5555\" }
      - { protocol: srp, listen: \"127.0.0.1:5556\" }
  - name: disk
    portals: [{ protocol: srp, listen: 127.0.0.2 }]
";
    let mut document = Document::new(&Config::parse(text, "test.yaml").unwrap());
    let names = |document: &Document| {
        let targets = document.at(&place("/targets")).unwrap();
        let names = targets.children().into_iter().map(|(name, _)| name);
        names.collect::<Vec<_>>()
    };
    document.delete(&place("/targets/disk")).unwrap();
    assert_eq!(names(&document), ["disk:1"]);
    document.delete(&place("/targets/disk")).unwrap_err();
    let keys = pairs(&["portals/srp:127.0.0.2/id_ext=0000000000000001"]);
    document.create(&place("/targets/disk"), &keys).unwrap();
    assert_eq!(names(&document), ["disk:1", "disk"]);
    // Two portals with the same address are distinguished by port.
    let either = place("/targets/disk:1/portals/srp:127.0.0.1");
    document.delete(&either).unwrap_err();
    document
        .delete(&place("/targets/disk:1/portals/srp:127.0.0.1:5555"))
        .unwrap();
    document.delete(&either).unwrap();
}

#[test]
fn rules_keep_their_order() {
    let mut document = document();
    for (at, name) in [
        ("access/0", "b"),
        ("access/0", "a"),
        ("access", "d"),
        ("access/2", "c"),
    ] {
        let keys = pairs(&[&format!("iqn=iqn.2026-01.a:{name}")]);
        document
            .create(&place(&format!("/targets/t/{at}")), &keys)
            .unwrap();
    }
    assert!(document.is_by_number());
    document.delete(&place("/targets/t/access/1")).unwrap();
    let found = document.at(&place("/targets/t/access")).unwrap();
    let names: Vec<_> = found.children().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["0", "1", "2"]);
    let iqn = |n: usize| {
        let place = place(&format!("/targets/t/access/{n}/iqn"));
        document.at(&place).unwrap().value.cloned()
    };
    let text = |name: &str| Some(format!("iqn.2026-01.a:{name}").into());
    assert_eq!((iqn(0), iqn(1), iqn(2)), (text("a"), text("c"), text("d")));
}

#[test]
fn name_can_contain_slash() {
    let renamed = changed(|d| {
        let keys = pairs(&["users/me~12/name=a~b/c"]);
        d.set(&place("/targets/t/chap"), &keys)?;
        assert!(!d.is_by_number());
        assert!(d.at(&place("/targets/t/chap/users/a~0b~1c")).is_ok());
        Ok(())
    });
    let paths = renamed.unwrap();
    assert!(paths[0].starts_with("/targets/t/chap/users/me~12 {"));
    assert!(paths[1].starts_with("/targets/t/chap/users/a~0b~1c null"));
    let created = changed(|d| {
        let keys = pairs(&["secret=another twelve bytes"]);
        d.create(&place("/targets/t/chap/users/you~13"), &keys)
    });
    let created = created.unwrap();
    assert!(created[0].starts_with("/targets/t/chap/users/you~13 null "));
    let deleted = changed(|d| {
        d.create(
            &place("/targets/t/chap/users/x~0"),
            &pairs(&["secret=another twelve bytes"]),
        )?;
        d.delete(&place("/targets/t/chap/users/me~12"))
    });
    assert_eq!(deleted.unwrap().len(), 2);
}

#[test]
fn numeric_name_is_not_index() {
    let mut document = document();
    document
        .set(&place("/targets/t"), &pairs(&["iqn=iqn.2026-01.a:u"]))
        .unwrap();
    assert!(!document.is_by_number());
    document
        .set(&place("/targets/0"), &pairs(&["iqn=iqn.2026-01.a:t"]))
        .unwrap();
    assert!(document.is_by_number());
}

#[test]
fn unset_keys_are_listed() {
    let document = document();
    let target = document.at(&place("/targets/t")).unwrap();
    let children: Vec<_> = target
        .children()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(children, ["portals", "luns", "chap", "access"]);
    assert!(target.unset().is_empty());
    let users = document.at(&place("/targets/t/chap/users")).unwrap();
    assert_eq!(users.children()[0].0, "me/2");
    let backend = document.at(&place("/backends/a")).unwrap();
    let unset = backend.unset();
    assert!(
        unset
            .iter()
            .any(|(key, what)| key == "serial" && what.contains("serial number"))
    );
    assert!(!unset.iter().any(|(key, _)| key == "kind"));
    let top = document.at(&ObjectPath::default()).unwrap().children();
    assert!(
        top.iter()
            .any(|(name, found)| name == "limits" && found.value.is_none())
    );
    assert!(!top.iter().any(|(name, _)| name == "discovery_chap"));
}
