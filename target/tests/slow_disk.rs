//! Tests a slow disk with more commands in flight than fit into the ring of a worker.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use riser_scsi::iscsi::pdu::{FromTarget, LogoutReason, LogoutRequest, LogoutStatus, NopOut};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn, Ttt, frame};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;
use riser_testkit::skip::skip;

/// Number of sessions, and of commands per session. The total is larger than the maximum number of
/// block operations in a ring.
const SESSIONS: u8 = 12;
const COMMANDS: u8 = 127;

/// Timeout for any operation, which is much longer than usual.
const PATIENCE: Duration = Duration::from_secs(120);

fn run(name: &str, args: &[&str]) -> bool {
    let status = Command::new(name).args(args).status();
    status.is_ok_and(|status| status.success())
}

/// A file system that can be frozen.
struct Mount {
    at: String,
    dir: std::path::PathBuf,
}

impl Mount {
    fn new() -> Result<Self, &'static str> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("riser-slow-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let at = dir.join("mnt");
        std::fs::create_dir_all(&at).unwrap();
        let (image, at) = (dir.join("image"), at.to_str().unwrap().to_owned());
        let mount = Self { at, dir };
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(64 << 20).unwrap();
        let image = image.to_str().unwrap();
        if !run("mkfs.ext4", &["-q", "-F", image]) {
            return Err("no mkfs.ext4");
        }
        if !run("mount", &["-o", "loop", image, &mount.at]) {
            return Err("nothing may be mounted");
        }
        if !run("fsfreeze", &["-f", &mount.at]) {
            return Err("nothing may be frozen");
        }
        mount.thaw();
        Ok(mount)
    }

    fn thaw(&self) {
        run("fsfreeze", &["-u", &self.at]);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.thaw();
        run("umount", &["-l", &self.at]);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn serve(at: &str, port: u16) -> Server {
    let portals = [("iscsi", format!("127.0.0.1:{port}"))];
    let disk = format!("f: {{ kind: file, path: {at}/disk, size: 8MiB, create: true }}");
    let rest = "limits: { connections_per_session: 8 }\nworkers: { count: 1 }\n";
    let text = open_target("iqn.2026-01.org.example:t", &portals, &disk, "0: f", rest);
    Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap()
}

/// Starts a target with a disk on a file system that can be frozen. Returns its port, or `None` if
/// this is not supported here.
fn start() -> Option<(Mount, Server, u16)> {
    let mount = Mount::new()
        .map_err(|why| skip("a disk that takes its time", why))
        .ok()?;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let server = serve(&mount.at, port);
    Some((mount, server, port))
}

/// Connections need ring entries, same as block operations. They must not lose their entries even
/// if many block operations are waiting: each connection must respond to a ping after its commands,
/// and all commands must be executed.
#[test]
fn slow_disk_closes_no_connection() {
    let Some((mount, server, port)) = start() else {
        return;
    };
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let login = |isid| {
        let mut client = Client::login_at(to, "iqn.2026-01.org.example:t", isid, None).unwrap();
        client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 2, "power on");
        client
    };
    let mut clients: Vec<Client> = (0..SESSIONS).map(login).collect();
    assert!(run("fsfreeze", &["-f", &mount.at]));
    for client in &mut clients {
        for n in 0..COMMANDS {
            let cdb = [0x2a, 0, 0, 0, 0, n, 0, 0, 1, 0];
            client.send_command(&cdb, true, 512, &[n; 512]);
        }
        let ping = NopOut {
            immediate: true,
            lun: [0; 8],
            itt: Itt(0x7000_0000),
            ttt: Ttt::NONE,
            cmd_sn: CmdSn(client.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        client.send(ping.header(), b"");
    }
    let is_alive = |client: &mut Client| match client.receive() {
        Some((FromTarget::NopIn(_), ..)) => true,
        Some((pdu, ..)) => panic!("the disk is frozen: {pdu:?}"),
        None => false,
    };
    let lost = clients
        .iter_mut()
        .filter_map(|c| (!is_alive(c)).then_some(()));
    let lost = lost.count();
    // A new connection also gets an entry.
    let late = login(SESSIONS);
    mount.thaw();
    assert_eq!(lost, 0, "of {SESSIONS} connections");
    for client in &mut clients {
        for _ in 0..COMMANDS {
            assert_eq!(client.receive_response().0, 0);
        }
    }
    drop((clients, late));
    server.shutdown().unwrap();
}

/// Sends PERSISTENT RESERVE OUT.
fn change(client: &mut Client, action: u8, kind: u8, (own, other): (u64, u64)) {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&own.to_be_bytes());
    list[8..16].copy_from_slice(&other.to_be_bytes());
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    client.send_command(&cdb, true, 24, &list);
}

/// Operations that were started by a disk can't be cancelled. Therefore fencing must wait for them:
/// if it completed earlier, the next owner could write, and then the write of the fenced host would
/// overwrite the data.
#[test]
fn preempt_and_abort_waits_for_started_operations() {
    let Some((mount, server, port)) = start() else {
        return;
    };
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let [mut fenced, mut other] = [1, 2].map(|isid| {
        let mut client = Client::login_at(to, "iqn.2026-01.org.example:t", isid, None).unwrap();
        client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 2, "power on");
        client
    });
    for (client, key) in [(&mut fenced, 0xa), (&mut other, 0xb)] {
        change(client, 6, 0, (0, key));
        assert_eq!(client.receive_response().0, 0);
    }
    change(&mut other, 1, 5, (0xb, 0));
    assert_eq!(other.receive_response().0, 0);
    assert!(run("fsfreeze", &["-f", &mount.at]));
    fenced.send_command(&[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], true, 512, &[7; 512]);
    // A later command on the connection is completed, so this command was received.
    let keys = [0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    assert_eq!(fenced.command(&keys, false, 256, &[]).0, 0);
    change(&mut other, 5, 5, (0xb, 0xa));
    let soon = Some(Duration::from_millis(500));
    other.socket.set_read_timeout(soon).unwrap();
    let early = other.receive();
    mount.thaw();
    assert!(
        early.is_none(),
        "fenced while the disk still writes: {early:?}"
    );
    other.socket.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(other.receive_response().0, 0);
    let read = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    assert_eq!(other.command(&read, false, 512, &[]), (0, vec![7; 512]));
    server.shutdown().unwrap();
}

/// The logout must not be completed until no command of the session can reach the disk. The logout
/// of a connection that doesn't exist doesn't have to wait.
#[test]
fn logout_waits_for_all_connections() {
    let Some((mount, server, port)) = start() else {
        return;
    };
    let target = "iqn.2026-01.org.example:t";
    let mut first = Client::ready(port, target, 1);
    let mut second = Client::join(port, target, 1, (first.tsih.0, 1), None).unwrap();
    second.cmd_sn = first.cmd_sn;
    assert!(run("fsfreeze", &["-f", &mount.at]));
    second.send_command(&[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], true, 512, &[7; 512]);
    // A later command on the connection is completed, so this command was received.
    assert_eq!(second.command(&[0; 6], false, 0, &[]).0, 0);
    let logout = |reason, cid, itt| LogoutRequest {
        immediate: true,
        reason,
        itt: Itt(itt),
        cid: Cid(cid),
        cmd_sn: CmdSn(second.cmd_sn),
        exp_stat_sn: StatSn(0),
    };
    let mut bytes = Vec::new();
    for logout in [
        logout(LogoutReason::CloseConnection, 99, 0x1000),
        logout(LogoutReason::CloseSession, 0, 0x1001),
    ] {
        frame::put_pdu(logout.header(), &[], &[], first.digests, &mut bytes);
    }
    first.socket.write_all(&bytes).unwrap();
    let (response, ..) = first.receive().expect("response");
    assert!(matches!(response, FromTarget::LogoutResponse(r) if r.itt == Itt(0x1000)));
    let soon = Some(Duration::from_millis(500));
    first.socket.set_read_timeout(soon).unwrap();
    let early = first.receive();
    mount.thaw();
    assert!(
        early.is_none(),
        "the session is over while the disk still writes: {early:?}"
    );
    first.socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let (response, ..) = first.receive().expect("response");
    assert!(matches!(response, FromTarget::LogoutResponse(r) if r.status == LogoutStatus::Closed));
    server.shutdown().unwrap();
}

/// By default, the kernel uses four threads per CPU for blocking operations in a ring. A hanging
/// file system must not use all of them, because flushes of other disks also need a thread.
#[test]
fn frozen_file_system_delays_no_other_flush() {
    let mount = match Mount::new() {
        Ok(mount) => mount,
        Err(why) => return skip("a file system that hangs", why),
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let other = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("beside-a-slow-disk.img");
    let portals = [("iscsi", format!("127.0.0.1:{port}"))];
    let backends = format!(
        "hung: {{ kind: file, path: {}/disk, size: 8MiB, create: true }}, \
         other: {{ kind: file, path: {}, size: 8MiB, create: true }}",
        mount.at,
        other.display(),
    );
    let (iqn, luns) = ("iqn.2026-01.org.example:t", "0: hung, 1: other");
    let text = open_target(iqn, &portals, &backends, luns, "workers: { count: 1 }\n");
    let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
    let [mut user, mut client] = [1, 2].map(|isid| {
        let target = "iqn.2026-01.org.example:t";
        let mut client = Client::login(port, target, isid, None).unwrap();
        client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 2, "power on");
        client
    });
    // Uses the other disk.
    let mut send = |cdb: &[u8], data: &[u8]| {
        let (sn, len) = (client.cmd_sn, data.len() as u32);
        let mut command = riser_test_peers::pdus::scsi_command(sn, sn, cdb, len > 0, len);
        command.lun[1] = 1;
        client.cmd_sn += 1;
        let since = std::time::Instant::now();
        client.send(command.header(), data);
        client.receive().unwrap();
        since.elapsed()
    };
    send(&[0; 6], &[]);
    send(&[0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0], &[7; 512]);
    assert!(run("fsfreeze", &["-f", &mount.at]));
    let processors = std::thread::available_parallelism().unwrap().get();
    for n in 0..(4 * processors + 4).min(120) {
        let cdb = [0x2a, 0, 0, 0, 0, n as u8, 0, 0, 1, 0];
        user.send_command(&cdb, true, 512, &[n as u8; 512]);
    }
    std::thread::sleep(Duration::from_secs(1));
    let waited = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(10));
            mount.thaw();
        });
        send(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[])
    });
    drop((user, client));
    server.shutdown().unwrap();
    let most = Duration::from_secs(5);
    assert!(
        waited < most,
        "a flush of another disk has taken {waited:?}"
    );
}
