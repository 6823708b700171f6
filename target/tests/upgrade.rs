//! Tests programs that take over from a running daemon, or are rejected.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use riser_test_peers::tcp::Client;
use riser_testkit::daemon::{Daemon, RISERD};
use serde_json::Value;

const IQN: &str = "iqn.2026-01.com.example:demo";

const GOOD: u8 = 0;
const RESERVATION_CONFLICT: u8 = 0x18;

/// Logs in with a separate initiator port and clears the unit attention of the new nexus.
fn log_in(host: &str, isid: u8) -> Client {
    let to: SocketAddr = format!("{host}:3290").parse().unwrap();
    let mut client = Client::login_at(to, IQN, isid, None).unwrap();
    client.command(&[0; 6], false, 0, &[]);
    client
}

fn write(client: &mut Client, lba: u8, byte: u8) -> u8 {
    let cdb = [0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    client.command(&cdb, true, 512, &[byte; 512]).0
}

fn read(client: &mut Client, lba: u8) -> Vec<u8> {
    let cdb = [0x28, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    let (status, data) = client.command(&cdb, false, 512, &[]);
    assert_eq!(status, GOOD);
    data
}

/// Sends PERSISTENT RESERVE IN: READ KEYS or READ RESERVATION.
fn reserve_in(client: &mut Client, action: u8) -> Vec<u8> {
    let cdb = [0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0];
    let (status, data) = client.command(&cdb, false, 256, &[]);
    assert_eq!(status, GOOD);
    data
}

fn upgraded(daemon: &Daemon, args: &[&str]) -> Value {
    let output = daemon.run_command(&[&["upgrade", "-o", "json"][..], args].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the error message of an upgrade that is rejected or fails.
fn refused(daemon: &Daemon, program: &Path) -> String {
    let output = daemon.run_command(&["upgrade", "--binary", program.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Creates a shell script.
fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn upgrade_keeps_reservations_and_ram_disks() {
    const HOST: &str = "127.81.0.20";
    let mut daemon = Daemon::start("upgraded", HOST);
    let file = daemon.dir.join("riserd.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let metrics = format!("{HOST}:9909");
    fs::write(&file, format!("{text}metrics: {{ listen: {metrics:?} }}\n")).unwrap();
    daemon.restart(&[]);
    let mut a = log_in(HOST, 1);
    assert_eq!(write(&mut a, 3, 0xaa), GOOD);
    assert_eq!(a.reserve_out(0, 0, 0, 0xa), GOOD);
    assert_eq!(a.reserve_out(1, 1, 0xa, 0), GOOD);
    let mut b = log_in(HOST, 2);
    assert_eq!(b.reserve_out(0, 0, 0, 0xb), GOOD);
    assert_eq!(write(&mut b, 3, 0xbb), RESERVATION_CONFLICT);
    let before = [0, 1].map(|action| reserve_in(&mut a, action));
    let history = daemon.json("history");
    drop((a, b));
    // The served configuration is kept, even if the file has changed.
    fs::write(&file, "targets: [{}]").unwrap();

    // Connections must never be refused during this time.
    let stop = Arc::new(AtomicBool::new(false));
    let knocking = std::thread::spawn({
        let (stop, socket) = (Arc::clone(&stop), daemon.socket());
        move || {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                TcpStream::connect((HOST, 3290)).unwrap();
                TcpStream::connect(&metrics).unwrap();
                UnixStream::connect(&socket).unwrap();
                rounds += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
            rounds
        }
    });
    let pid = daemon.process.id();
    for round in 1..=3 {
        let done = upgraded(&daemon, &[]);
        assert_eq!(
            (&done["pid"], &done["upgrades"]),
            (&pid.into(), &round.into())
        );
        assert_eq!(done["program"], **RISERD);
        let status = daemon.json("status");
        assert_eq!(
            (&status["pid"], &status["upgrades"]),
            (&pid.into(), &round.into())
        );
        assert_eq!(status["upgraded_from"], env!("CARGO_PKG_VERSION"));
        assert_eq!(daemon.json("history"), history);
        assert!(daemon.http("GET /readyz").ends_with("ok\n"));

        let (mut a, mut b) = (log_in(HOST, 1), log_in(HOST, 2));
        assert_eq!([0, 1].map(|action| reserve_in(&mut a, action)), before);
        assert_eq!(read(&mut a, 3), [0xaa; 512]);
        assert_eq!(write(&mut b, 3, 0xbb), RESERVATION_CONFLICT);
        assert_eq!(write(&mut a, 4, round), GOOD);
        assert_eq!(read(&mut a, 4), [round; 512]);
    }
    stop.store(true, Ordering::Relaxed);
    assert!(knocking.join().unwrap() > 0);
    assert_eq!(
        daemon.run_command(&["reload"]).status.code(),
        Some(1),
        "the file is bad"
    );
    // The daemon still owns the socket, and removes it at exit.
    Command::new("kill").arg(pid.to_string()).status().unwrap();
    assert!(daemon.process.wait().unwrap().success());
    assert!(!daemon.socket().exists());
}

#[test]
fn unsuitable_program_is_rejected() {
    let mut daemon = Daemon::start("refused", "127.81.0.21");
    let dir = daemon.dir.clone();
    let plain = dir.join("plain");
    fs::write(&plain, "no program").unwrap();
    let old = script(&dir, "old", r#"echo '{"valid":true,"targets":[]}'"#);
    let other = r#"echo '{"valid":true,"version":"9.0.0","takes_over":[2,3]}'"#;
    let other = script(&dir, "other", other);
    let younger = r#"echo '{"valid":true,"version":"9.0.0","takes_over":[1],"system_calls":["read","mount"]}'"#;
    let younger = script(&dir, "younger", younger);
    let picky = script(&dir, "picky", "echo 'riserd.yaml:1:1: no' >&2; exit 2");
    let killed = script(&dir, "killed", "kill -9 $$");
    for (program, why) in [
        (Path::new("/nonexistent/riserd"), "No such file"),
        (&dir, "not a regular file"),
        (&plain, "Permission denied"),
        (
            Path::new("/bin/false"),
            "rejected the current configuration: exit status: 1",
        ),
        (
            Path::new("/bin/true"),
            "not a riserd that supports upgrades",
        ),
        (&old, "not a riserd that supports upgrades"),
        (
            &other,
            "riserd 9.0.0 only supports other versions of the handover state",
        ),
        (
            &younger,
            "riserd 9.0.0 requires system calls that are rejected by the sandbox of this process \
             (mount)",
        ),
        (&picky, "riserd.yaml:1:1: no"),
        (&killed, "terminated by signal 9"),
    ] {
        let said = refused(&daemon, program);
        assert!(said.contains(why), "{said}");
        assert!(said.contains(program.to_str().unwrap()), "{said}");
        assert!(said.contains("nothing has changed"), "{said}");
    }
    let status = daemon.json("status");
    assert_eq!(status["pid"], daemon.process.id());
    assert_eq!(status["upgrades"], 0);
    assert!(status.get("upgrade_error").is_none());

    // A disk that would be missing, or created again, at a start.
    let disk = dir.join("disk.img");
    let file = dir.join("riserd.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let backend = format!(
        "a: {{ kind: file, path: {}, size: 1MiB, create: true }}",
        disk.display()
    );
    fs::write(
        &file,
        text.replace("a: { kind: ram, size: 1MiB }", &backend),
    )
    .unwrap();
    daemon.restart(&[]);
    upgraded(&daemon, &["--binary", &RISERD]);
    fs::rename(&disk, dir.join("elsewhere.img")).unwrap();
    let said = refused(&daemon, Path::new(&*RISERD));
    assert!(said.contains("cannot find it again"), "{said}");
    fs::write(&disk, [0; 1 << 20]).unwrap();
    let said = refused(&daemon, Path::new(&*RISERD));
    assert!(
        said.contains("file was replaced while being served"),
        "{said}"
    );
    fs::rename(dir.join("elsewhere.img"), &disk).unwrap();
    upgraded(&daemon, &[]);
}

#[test]
fn vanished_program_keeps_old_one_serving() {
    const HOST: &str = "127.81.0.22";
    let daemon = Daemon::start("gone", HOST);
    let mut a = log_in(HOST, 1);
    assert_eq!(write(&mut a, 3, 0xaa), GOOD);
    assert_eq!(a.reserve_out(0, 0, 0, 0xa), GOOD);
    drop(a);
    let gone = format!("rm \"$0\"; exec {} \"$@\"", *RISERD);
    let gone = script(&daemon.dir, "gone", &gone);
    let said = refused(&daemon, &gone);
    assert!(
        said.contains("cannot execute the program: No such file"),
        "{said}"
    );
    let status = daemon.json("status");
    assert_eq!(status["pid"], daemon.process.id());
    assert_eq!(status["upgrades"], 0);
    assert!(
        status["upgrade_error"]
            .as_str()
            .unwrap()
            .contains("cannot execute the program")
    );
    let check = || {
        let mut a = log_in(HOST, 1);
        assert_eq!(read(&mut a, 3), [0xaa; 512]);
        assert_eq!(reserve_in(&mut a, 0)[7], 8, "one key");
    };
    check();
    assert_eq!(upgraded(&daemon, &[])["upgrades"], 1);
    assert!(daemon.json("status").get("upgrade_error").is_none());
    check();
}

#[test]
fn invalid_handover_causes_normal_start() {
    let mut daemon = Daemon::start("broken", "127.81.0.23");
    let log = daemon.dir.join("log");
    for (state, descriptors, why) in [
        ("garbage", "$$:9", Some("invalid handover state")),
        ("", "$$:9", Some("invalid handover state")),
        (
            r#"{"version":99,"news":[]}"#,
            "$$:9",
            Some("unsupported version 99 of the handover state, expected 1"),
        ),
        (
            "{}",
            "$$:987",
            Some("contains descriptors that are not open: 987"),
        ),
        (
            "{}",
            "$$:9,9",
            Some("contains descriptors that are not open: 9,9"),
        ),
        (
            "{}",
            "$$:x",
            Some("contains descriptors that are not open: x"),
        ),
        // A value for another process is ignored.
        ("garbage", "1:9", None),
    ] {
        daemon.kill();
        let path = daemon.dir.join("handover");
        fs::write(&path, state).unwrap();
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!(
                "RISERD_HANDOVER={descriptors} exec \"$@\" 9<\"$0\""
            ))
            .arg(&path)
            .args([&**RISERD, "run", "--config"])
            .arg(daemon.dir.join("riserd.yaml"))
            .stderr(Stdio::from(File::create(&log).unwrap()));
        daemon.spawn(command);
        assert_eq!(daemon.json("targets")[0]["name"], "demo");
        assert_eq!(daemon.json("status")["upgrades"], 0);
        let said = fs::read_to_string(&log).unwrap();
        match why {
            Some(why) => {
                assert!(said.contains(why), "{said}");
                assert!(said.contains("starting without it"), "{said}");
            }
            None => assert!(!said.contains("starting without it"), "{said}"),
        }
        // An upgrade is still possible.
        assert_eq!(upgraded(&daemon, &[])["upgrades"], 1);
    }
}

#[test]
fn service_manager_is_notified() {
    let mut daemon = Daemon::start("notify", "127.81.0.24");
    daemon.kill();
    let path = daemon.dir.join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let patience = Some(Duration::from_secs(20));
    manager.set_read_timeout(patience).unwrap();
    let next = || {
        let mut message = [0; 256];
        let len = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..len]).into_owned()
    };
    let mut command = daemon.command(&daemon.config());
    command.env("NOTIFY_SOCKET", &path).stderr(Stdio::null());
    daemon.spawn(command);
    assert_eq!(next().trim(), "READY=1");
    for _ in 0..2 {
        upgraded(&daemon, &[]);
        let reloading = next();
        assert!(
            reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="),
            "{reloading}"
        );
        assert_eq!(next().trim(), "READY=1");
    }
}
