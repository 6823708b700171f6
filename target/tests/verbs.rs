//! Tests access to objects of a running daemon by path: `ls`, `get`, `info`, `set`, `create` and
//! `delete`.

#![allow(missing_docs, reason = "a test")]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Output;

use riser_test_peers::tcp::Client;
use riser_testkit::daemon::{Daemon, run_command};
use riser_testkit::programs::change_owner;
use serde_json::{Value, json};

const IQN: &str = "iqn.2026-01.com.example:demo";

/// Runs a verb, which must succeed. Returns the output.
fn ok(daemon: &Daemon, args: &[&str]) -> String {
    let output = daemon.run_command(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Same as [`ok`], but parses JSON.
fn document(daemon: &Daemon, args: &[&str]) -> Value {
    serde_json::from_str(&ok(daemon, &[args, &["-o", "json"]].concat())).unwrap()
}

/// Returns the exit code and error message of a verb that must have failed.
fn fails(output: &Output) -> (i32, String) {
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    (output.status.code().unwrap(), said.trim_end().to_owned())
}

/// Creates a target with a 1 MiB disk on this address.
fn build(daemon: &Daemon, address: &str) {
    ok(
        daemon,
        &["create", "/backends/disk0", "kind=ram", "size=1MiB"],
    );
    let iqn = format!("iqn={IQN}");
    let listen = format!("portals/0/listen={address}");
    let create = [
        "create",
        "/targets/demo",
        &iqn,
        "portals/0/protocol=iscsi",
        &listen,
    ];
    ok(daemon, &create);
    ok(daemon, &["create", "/targets/demo/luns/0", "backend=disk0"]);
    ok(daemon, &["set", "/targets/demo", "access=open"]);
}

#[test]
fn target_is_created_changed_and_removed() {
    let daemon = Daemon::start_empty("verbs");
    assert_eq!(document(&daemon, &["get", "/targets"]), json!([]));
    build(&daemon, "127.82.0.1");
    let to = "127.82.0.1:3260".parse().unwrap();
    let mut client = Client::ready_at(to, IQN, 1);
    let capacity = [&[0x25][..], &[0; 9]].concat();
    let (status, data) = client.command(&capacity, false, 8, &[]);
    assert_eq!((status, &data[..4]), (0, &2047u32.to_be_bytes()[..]));

    let tree = ok(&daemon, &["ls"]);
    for line in [
        "o- / .",
        "  | o- disk0 .",
        "[kind=ram size=1MiB, 1 LUN]",
        "  | o- demo .",
        "[iqn.2026-01.com.example:demo, 1 connection]",
        "  |   | o- iscsi:127.82.0.1:3260 .",
        "  |   | o- 0 .",
        "[backend=disk0, 1.0 MiB]",
        "[open to all initiators]",
        "  o- limits .",
        "[defaults]",
    ] {
        assert!(tree.contains(line), "no `{line}` in\n{tree}");
    }
    let node = document(&daemon, &["ls", "/targets", "--depth", "1"]);
    assert_eq!(node["children"][0]["path"], "/targets/demo");
    assert_eq!(node["children"][0]["children"], json!([]));

    let info = document(&daemon, &["info", "/targets/demo/luns/0"]);
    assert_eq!(info["config"], json!({ "backend": "disk0" }));
    assert_eq!(info["live"]["size"], 1 << 20);
    assert!(info["live"]["commands"].as_u64().unwrap() >= 2, "{info}");
    let info = document(&daemon, &["info", "/backends/disk0"]);
    assert_eq!(info["live"]["used_by"][0]["target"], "demo");
    let info = document(&daemon, &["info", "/targets/0"]);
    assert_eq!(info["path"], "/targets/demo");
    assert_eq!(info["live"]["connections"][0]["protocol"], "iscsi");
    let text = ok(&daemon, &["info", "/backends/disk0"]);
    assert!(text.contains("\nset:\n  kind: ram\n"), "{text}");
    assert!(text.contains("  serial: Unit serial number"), "{text}");
    let info = document(&daemon, &["info"]);
    assert_eq!(info["live"]["pid"], daemon.process.id());

    // The change is shown, but not applied.
    let grow = ["set", "/backends/disk0", "size=2MiB"];
    let shown = ok(&daemon, &[&grow[..], &["--dry-run"]].concat());
    assert_eq!(shown, "~ /backends/disk0/size: \"1MiB\" -> \"2MiB\"\n");
    assert_eq!(ok(&daemon, &["get", "/backends/disk0/size"]), "1MiB\n");
    assert_eq!(ok(&daemon, &grow), shown);
    assert_eq!(ok(&daemon, &["get", "/backends/disk0/size"]), "2MiB\n");
    assert_eq!(
        client.command(&[0; 6], false, 0, &[]).0,
        2,
        "capacity has changed"
    );
    let (_, data) = client.command(&capacity, false, 8, &[]);
    assert_eq!(&data[..4], 4095u32.to_be_bytes());

    let changes = document(&daemon, &["delete", "/targets/demo"]);
    assert_eq!(changes["changes"][0]["path"], "/targets/demo");
    ok(&daemon, &["delete", "/backends/disk0"]);
    assert_eq!(document(&daemon, &["get", "/targets"]), json!([]));
    // Each configuration can be restored.
    ok(&daemon, &["rollback", "2"]);
    assert_eq!(
        ok(&daemon, &["get", "/targets/demo/iqn"]),
        format!("{IQN}\n")
    );
}

#[test]
fn rejected_change_is_named() {
    let daemon = Daemon::start_empty("refusals");
    build(&daemon, "127.82.0.2");
    let before = ok(&daemon, &["save"]);
    let history = document(&daemon, &["history"]);
    for (args, code, why) in [
        (
            &["set", "/backends/disk0", "sise=2MiB"][..],
            2,
            "/backends/disk0: unknown key `sise` (did you mean `size`?)",
        ),
        (
            &["set", "/backends/disk0", "thin=perhaps"],
            2,
            "/backends/disk0/thin: expected true or false, not `perhaps`",
        ),
        (
            &["set", "/limits", "max_sessions=-1"],
            2,
            "/limits/max_sessions: expected a non-negative integer, not `-1`",
        ),
        (
            &["set", "/targets/demo/luns/0", "backend=disk1"],
            2,
            "/targets/demo/luns/0: unknown backend `disk1` (did you mean `disk0`?)",
        ),
        (
            &["create", "/targets/demo/luns/1", "backend=disk1"],
            2,
            "/targets/demo/luns/1: unknown backend `disk1` (did you mean `disk0`?)",
        ),
        (
            &["create", "/targets/other", "access=open"],
            2,
            "/targets/other: missing key `portals`",
        ),
        (
            &["create", "/targets/demo", "access=open"],
            2,
            "/targets/demo: it exists already",
        ),
        (&["create", "/shelves/a"], 2, "/: unknown key `shelves`"),
        (
            &["delete", "/backends/disk0"],
            2,
            "/backends/disk0: is in use by /targets/demo/luns/0",
        ),
        (
            &["delete", "/backends/disk7"],
            2,
            "/backends: unknown name `disk7` (did you mean `disk0`?)",
        ),
        (
            &["delete", "/targets/demo/portals/iscsi:127.82.0.2"],
            2,
            "/targets/demo/portals: missing portals: a target must listen on at least one address",
        ),
        (
            &["get", "/targets/demo/nothing"],
            2,
            "/targets/demo: unknown key `nothing`",
        ),
        (
            &["get", "/backends/disk0/serial"],
            1,
            "/backends/disk0/serial: not set",
        ),
        (
            &["ls", "/targets/none"],
            2,
            "/targets: unknown name `none` (valid names are demo)",
        ),
        // Errors that can only be detected by the daemon.
        (
            &["create", "/targets/demo/portals/iscsi:192.0.2.77"],
            1,
            "nothing was applied",
        ),
        (&["set", "/workers", "count=2"], 1, "requires a restart"),
        (
            &["set", "/workers", "count=2", "--dry-run"],
            1,
            "requires a restart",
        ),
    ] {
        let (found, said) = fails(&daemon.run_command(args));
        assert_eq!(found, code, "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
    }
    assert_eq!(ok(&daemon, &["save"]), before);
    assert_eq!(document(&daemon, &["history"]), history);
    assert_eq!(
        daemon.run_command(&["set", "/limits"]).status.code(),
        Some(2)
    );
    assert_eq!(
        daemon
            .run_command(&["set", "/limits", "max_sessions"])
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn secrets_are_set_and_never_shown() {
    let daemon = Daemon::start_empty("masked");
    build(&daemon, "127.82.0.3");
    let secret = "not to be shown at all";
    let own = "this one neither, please";
    let keys = [&format!("secret={secret}"), &format!("secret={own}")];
    let said = [
        ok(
            &daemon,
            &["create", "/targets/demo/chap/users/host", keys[0]],
        ),
        ok(
            &daemon,
            &["create", "/targets/demo/chap/mutual", "name=us", keys[1]],
        ),
        ok(&daemon, &["ls"]),
        ok(&daemon, &["ls", "-o", "json"]),
        ok(&daemon, &["get", "/"]),
        ok(&daemon, &["get", "/", "-o", "json"]),
        ok(&daemon, &["get", "/targets/demo/chap/users/host/secret"]),
        ok(&daemon, &["info", "/targets/demo/chap/mutual"]),
        ok(&daemon, &["info", "/targets/demo", "-o", "json"]),
        fails(&daemon.run_command(&["set", "/targets/demo/chap/users/host", "secret=short"])).1,
    ];
    for said in &said {
        assert!(!said.contains(secret) && !said.contains(own), "{said}");
    }
    assert!(said[2].contains("[1 user, mutual]"), "{}", said[2]);
    assert!(said[4].contains("secret: \"(secret)\""), "{}", said[4]);
    assert_eq!(said[6], "(secret)\n");
    assert!(
        said[9].contains("12 to 255 bytes") && !said[9].contains("short"),
        "{}",
        said[9]
    );
    // This applies to any change, because initiators must be notified.
    ok(
        &daemon,
        &["create", "/backends/disk1", "kind=ram", "size=1MiB"],
    );
    let to = "127.82.0.3:3260".parse().unwrap();
    assert!(Client::login_at(to, IQN, 1, Some("another secret of twelve")).is_err());
    assert!(ok(&daemon, &["save"]).contains(secret));
}

/// Forwards connections to a daemon sequentially, and calls `before` with the number of each
/// connection.
fn between(daemon: &Daemon, connections: usize, before: impl Fn(usize) + Send + 'static) {
    let listener = UnixListener::bind(daemon.dir.join("between.sock")).unwrap();
    let behind = daemon.socket();
    std::thread::spawn(move || {
        for n in 0..connections {
            let (mut front, _) = listener.accept().unwrap();
            before(n);
            let mut back = UnixStream::connect(&behind).unwrap();
            let mut front_in = front.try_clone().unwrap();
            let mut back_out = back.try_clone().unwrap();
            let up = std::thread::spawn(move || {
                let _ = std::io::copy(&mut front_in, &mut back_out);
                let _ = back_out.shutdown(Shutdown::Write);
            });
            let mut bytes = [0; 65536];
            while let Ok(n @ 1..) = back.read(&mut bytes) {
                if front.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            let _ = front.shutdown(Shutdown::Both);
            let _ = back.shutdown(Shutdown::Both);
            up.join().unwrap();
        }
    });
}

#[test]
fn concurrent_change_is_not_lost() {
    let daemon = Daemon::start_empty("between");
    build(&daemon, "127.82.0.4");
    let keys = ["address=127.0.0.1", "address=127.0.0.2"];
    ok(&daemon, &["create", "/targets/demo/access", keys[0]]);
    ok(&daemon, &["create", "/targets/demo/access", keys[1]]);
    let socket = daemon.socket();
    // Another client changes the configuration after it was read, but before it's changed.
    between(&daemon, 6, move |n| {
        let name = format!("/backends/other{n}");
        if n == 1 || n == 5 {
            let output = run_command(&socket, &["create", &name, "kind=ram", "size=1MiB"]);
            assert!(output.status.success(), "{output:?}");
        }
    });
    let front = daemon.dir.join("between.sock");
    let made = run_command(
        &front,
        &["create", "/backends/mine", "kind=ram", "size=1MiB"],
    );
    assert!(made.status.success(), "{made:?}");
    let backends = document(&daemon, &["get", "/backends"]);
    assert!(
        backends["mine"].is_object() && backends["other1"].is_object(),
        "{backends}"
    );
    // This may be the number of another rule by now.
    let (code, said) = fails(&run_command(&front, &["delete", "/targets/demo/access/0"]));
    assert_eq!(code, 1);
    assert!(said.contains("was changed in the meantime"), "{said}");
    let rules = document(&daemon, &["get", "/targets/demo/access"]);
    assert_eq!(rules.as_array().unwrap().len(), 2);
}

#[test]
fn concurrent_changes_all_succeed() {
    let daemon = Daemon::start_empty("many");
    let made: Vec<_> = (0..8)
        .map(|n| {
            let socket = daemon.socket();
            let name = format!("/backends/disk{n}");
            std::thread::spawn(move || {
                run_command(&socket, &["create", &name, "kind=ram", "size=1MiB"])
            })
        })
        .collect();
    for made in made {
        let output = made.join().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let backends = document(&daemon, &["get", "/backends"]);
    assert_eq!(backends.as_object().unwrap().len(), 8);
}

#[test]
fn grown_file_is_measured_again() {
    let daemon = Daemon::start_empty("rescan");
    let image = daemon.dir.join("disk.img");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    change_owner(&image);
    ok(
        &daemon,
        &[
            "create",
            "/backends/disk0",
            "kind=file",
            &format!("path={}", image.display()),
        ],
    );
    let listen = "portals/0/listen=127.82.0.9";
    let iqn = format!("iqn={IQN}");
    let portal = ["portals/0/protocol=iscsi", listen];
    ok(
        &daemon,
        &[&["create", "/targets/demo", &iqn][..], &portal].concat(),
    );
    ok(
        &daemon,
        &["create", "/targets/demo/luns/0", "backend=disk0"],
    );
    ok(&daemon, &["set", "/targets/demo", "access=open"]);
    let to = "127.82.0.9:3260".parse().unwrap();
    let mut client = Client::ready_at(to, IQN, 1);
    let mut last_block = || {
        let capacity = [&[0x25][..], &[0; 9]].concat();
        let (status, data) = client.command(&capacity, false, 8, &[]);
        (status, data.first_chunk().map(|b| u32::from_be_bytes(*b)))
    };
    assert_eq!(last_block(), (0, Some(2047)));
    let size = |document: &Value| document[0]["luns"]["0"]["size"].clone();
    let before = document(&daemon, &["rescan"]);
    assert_eq!(size(&before), 1 << 20, "{before}");
    file.set_len(2 << 20).unwrap();
    assert_eq!(last_block(), (0, Some(2047)), "it was not measured yet");
    let after = document(&daemon, &["rescan"]);
    assert_eq!(size(&after), 2 << 20, "{after}");
    assert_eq!(last_block().0, 2, "capacity has changed");
    assert_eq!(last_block(), (0, Some(4095)));
}
