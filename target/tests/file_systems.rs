//! Tests a failing file system that is used for served files: either full, or read-only after an
//! I/O error.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use riser_target::backend::Cause;
use riser_target::config::Config;
use riser_target::server::Server;
use riser_target::server::problems::Subject;
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;
use riser_testkit::skip::skip;

const IQN: &str = "iqn.2026-01.com.example:t";

fn run(tool: &str, args: &[&str]) -> bool {
    let status = Command::new(tool).args(args).status();
    status.is_ok_and(|status| status.success())
}

/// A mounted file system, which is unmounted on drop.
struct Mount(PathBuf);

impl Mount {
    fn new(name: &str, mount: impl FnOnce(&str, &str) -> bool) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("riserd-fs-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("mnt")).unwrap();
        let mounted = Self(dir);
        let (image, at) = (mounted.0.join("image"), mounted.at());
        mount(image.to_str()?, at.to_str()?).then_some(mounted)
    }

    fn at(&self) -> PathBuf {
        self.0.join("mnt")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run("umount", &["-l", self.at().to_str().unwrap()]);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts a server with a sparse file on this file system, and another disk. Returns its address.
fn start(dir: &Path) -> (Server, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    drop(listener);
    let backends = format!(
        "a: {{ kind: file, path: {}/a, size: 64MiB, create: true }}, b: {{ kind: ram, size: 1MiB }}",
        dir.display()
    );
    let (portals, workers) = ([("iscsi", to.to_string())], "workers: { count: 1 }\n");
    let text = open_target(IQN, &portals, &backends, "0: a, 1: b", workers);
    let config = Config::parse(&text, "test.yaml").unwrap();
    (Server::start(&config).unwrap(), to)
}

/// Writes blocks of 64 KiB and flushes. Returns whether any of these has failed.
fn write_fails(client: &mut Client, mib: u32) -> bool {
    let data = vec![7; 64 << 10];
    (0..mib * 16).any(|n| {
        let [a, b, c, d] = (n * 128).to_be_bytes();
        let write = [0x2a, 0, a, b, c, d, 0, 0, 128, 0];
        let flush = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        client.command(&write, true, data.len() as u32, &data).0 != 0
            || client.command(&flush, false, 0, &[]).0 != 0
    })
}

fn causes(server: &mut Server) -> Vec<(Subject, Option<Cause>)> {
    assert!(server.measurer()());
    server.check_resources();
    let problems = server.problems();
    let all = problems.iter().map(|(s, p)| (s.clone(), p.cause));
    all.collect()
}

#[test]
fn full_file_system_fails_and_recovers() {
    let tmpfs = |_: &str, at: &str| run("mount", &["-t", "tmpfs", "-o", "size=4m", "none", at]);
    let Some(mount) = Mount::new("full", tmpfs) else {
        return skip(
            "full_file_system_fails_and_recovers",
            "nothing may be mounted",
        );
    };
    let (mut server, to) = start(&mount.at());
    let mut client = Client::ready_at(to, IQN, 1);
    assert_eq!(causes(&mut server), []);
    assert!(write_fails(&mut client, 8));
    let backend = Subject::Backend("a".to_owned());
    assert_eq!(causes(&mut server), [(backend, Some(Cause::NoSpace))]);
    // The daemon is still ready.
    assert_eq!(server.problems().unready().count(), 0);
    let at = mount.at();
    let grow = ["-o", "remount,size=128m", at.to_str().unwrap()];
    assert!(run("mount", &grow));
    assert!(!write_fails(&mut client, 8));
    drop(client);
    server.shutdown().unwrap();
}

/// Simulates ext4 after an error, which is read-only even for files that are open for writing.
#[test]
fn read_only_file_system_is_reported() {
    let ext4 = |image: &str, at: &str| {
        let file = std::fs::File::create(image).unwrap();
        file.set_len(32 << 20).unwrap();
        run("mkfs.ext4", &["-q", "-F", image])
            && run("mount", &["-o", "loop,errors=remount-ro", image, at])
    };
    let name = "read_only_file_system_is_reported";
    let Some(mount) = Mount::new("read-only", ext4) else {
        return skip(name, "nothing may be mounted");
    };
    let (mut server, to) = start(&mount.at());
    let mut client = Client::ready_at(to, IQN, 1);
    assert!(!write_fails(&mut client, 1));
    let at = mount.at();
    if !run("mount", &["-o", "remount,abort", at.to_str().unwrap()]) {
        return skip(name, "ext4 cannot be aborted");
    }
    assert!(write_fails(&mut client, 4));
    let found = causes(&mut server);
    let [(Subject::Backend(name), Some(cause))] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(name, "a");
    assert!(
        matches!(cause, Cause::ReadOnly | Cause::Medium | Cause::FlushFailed),
        "{cause:?}"
    );
    // Other disks are still served.
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let mut other = Client::ready_at(to, IQN, 2);
    assert_eq!(other.command(&read, false, 512, &[]).0, 0);
}
