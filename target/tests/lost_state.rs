//! Tests a state directory that is lost or becomes read-only while the daemon is running.

use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use riser_scsi::iscsi::pdu::FromTarget;
use riser_test_peers::tcp::Client;
use riser_testkit::daemon::Daemon;
use riser_testkit::programs::change_owner;
use riser_testkit::skip::skip;

const IQN: &str = "iqn.2026-01.com.example:demo";
const ADDRESS: &str = "127.81.7.1";

const GOOD: u8 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Full,
    ReadOnly,
    Removed,
}

fn run(tool: &str, args: &[&str]) -> bool {
    let ended = Command::new(tool).args(args).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}

/// A small file system for the state directory. It is unmounted on drop.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Option<Self> {
        let path = at.to_str()?;
        run("mount", &["-t", "tmpfs", "-o", "size=256k", "none", path]).then_some(Self(at))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn damage(&self, damage: Damage) {
        match damage {
            Damage::Full => {
                let mut fill = File::create(self.0.join("fill")).unwrap();
                while fill.write_all(&[0; 4096]).is_ok() {}
                while fill.write_all(&[0]).is_ok() {}
            }
            Damage::ReadOnly => {
                assert!(run("mount", &["-o", "remount,ro", self.path()]));
            }
            Damage::Removed => {
                assert!(run("umount", &["-l", self.path()]));
                fs::remove_dir_all(&self.0).unwrap();
            }
        }
    }

    fn repair(&self, damage: Damage) {
        match damage {
            Damage::Full => fs::remove_file(self.0.join("fill")).unwrap(),
            Damage::ReadOnly => assert!(run("mount", &["-o", "remount,rw", self.path()])),
            Damage::Removed => {}
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        run("umount", &["-l", self.path()]);
    }
}

fn log_in(isid: u8) -> Client {
    let to: SocketAddr = format!("{ADDRESS}:3290").parse().unwrap();
    let mut client = Client::login_at(to, IQN, isid, None).unwrap();
    client.command(&[0; 6], false, 0, &[]);
    client
}

/// Executes a command. Returns the status, with sense key, ASC and ASCQ.
fn execute(client: &mut Client, cdb: &[u8], data: &[u8]) -> (u8, Option<[u8; 3]>) {
    client.send_to(0, cdb, data, 0);
    let (FromTarget::ScsiResponse(response), _, data) = client.receive().unwrap() else {
        panic!("not a response");
    };
    let sense = data.get(2..16);
    let sense = sense.map(|sense| [sense[2], sense[12], sense[13]]);
    (response.status, sense)
}

/// Registers a key that persists through power loss.
fn register(client: &mut Client, key: u64) -> (u8, Option<[u8; 3]>) {
    let mut list = [0; 24];
    list[8..16].copy_from_slice(&key.to_be_bytes());
    // APTPL.
    list[20] = 1;
    execute(client, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list)
}

fn keys(client: &mut Client) -> Vec<u64> {
    let cdb = [0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    let (status, data) = client.command(&cdb, false, 256, &[]);
    assert_eq!(status, GOOD);
    let len = u32::from_be_bytes(data[4..8].try_into().unwrap()) as usize;
    let keys = data[8..8 + len].chunks_exact(8);
    keys.map(|key| u64::from_be_bytes(key.try_into().unwrap()))
        .collect()
}

fn config(disk: &Path) -> String {
    format!(
        "backends: {{ a: {{ kind: file, path: {}, size: 1MiB, create: true }} }}\n\
         targets:\n\
         - name: demo\n\
         \x20 iqn: {IQN}\n\
         \x20 portals: [{{ protocol: iscsi, listen: '{ADDRESS}:3290' }}]\n\
         \x20 luns: {{ 0: a }}\n\
         \x20 access: open\n",
        disk.display()
    )
}

/// Acknowledged reservations must be kept. If they can't be saved, the command must fail.
#[test]
fn damaged_state_directory_loses_no_reservation() {
    for (damage, reason) in [
        (Damage::Full, "No space left"),
        (Damage::ReadOnly, "Read-only file system"),
        (Damage::Removed, "No such file"),
    ] {
        let name = format!("lost-state-{damage:?}");
        let dir = std::env::temp_dir().join(format!("riserd-admin-{}-{name}", std::process::id()));
        let mut daemon = Daemon::start_logging(&name, &config(&dir.join("disk")));
        daemon.kill();
        let Some(state) = Small::mount(daemon.dir.join("state")) else {
            return skip(&name, "nothing may be mounted");
        };
        change_owner(&state.0);
        daemon.run(&[]);
        let (mut a, mut b) = (log_in(1), log_in(2));
        assert_eq!(register(&mut a, 0xa), (GOOD, None), "{damage:?}");

        state.damage(damage);
        fs::write(daemon.log(), "").unwrap();
        // INSUFFICIENT REGISTRATION RESOURCES.
        let refused = (2, Some([5, 0x55, 4]));
        assert_eq!(register(&mut b, 0xb), refused, "{damage:?}");
        assert_eq!(keys(&mut a), [0xa], "{damage:?}");
        let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let flush = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(execute(&mut b, &write, &[7; 512]), (GOOD, None));
        assert_eq!(execute(&mut b, &flush, &[]), (GOOD, None));
        let set = daemon.run_command(&["set", "/backends/a", "size=2MiB"]);
        let log = fs::read_to_string(daemon.log()).unwrap();
        let said = format!("{set:?} {log}");
        assert!(said.contains(reason), "{said}");
        assert!(
            said.contains(daemon.dir.join("state").to_str().unwrap()),
            "{said}"
        );

        drop((a, b));
        daemon.kill();
        state.repair(damage);
        daemon.run(&[]);
        let kept: &[u64] = match damage {
            Damage::Removed => &[],
            Damage::Full | Damage::ReadOnly => &[0xa],
        };
        let mut a = log_in(1);
        assert_eq!(keys(&mut a), kept, "{damage:?}");
        let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        assert_eq!(a.command(&read, false, 512, &[]), (GOOD, vec![7; 512]));
    }
}
