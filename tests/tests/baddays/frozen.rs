//! Freezes the file system used for one of two disks, similar to a snapshot.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use riser_testkit::programs::skip;

use crate::target::Daemon;

const TWO: &str = "
backends:
  frozen: { kind: file, path: DIR/mount/image }
  healthy: { kind: file, path: DIR/healthy, size: 16MiB, create: true }
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals: [{ protocol: srp, listen: 127.0.237.1 }]
    luns: { 0: frozen, 1: healthy }
    access: open
limits: { buffer_pool_mib: 8 }
workers: { count: 1 }";

fn run(tool: &str, args: &[&str]) -> bool {
    let ended = Command::new(tool).args(args).status();
    ended.is_ok_and(|status| status.success())
}

/// A file system that is mounted from an image file. Unmounted on drop.
struct Mount(String);

impl Mount {
    fn new(daemon: &Daemon) -> Option<Self> {
        let (file, at) = (daemon.path("file-system"), daemon.path("mount"));
        File::create(&file).unwrap().set_len(96 << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let (file, at) = (file.to_str().unwrap(), at.to_str().unwrap());
        let is_mounted =
            run("mkfs.ext4", &["-q", "-F", file]) && run("mount", &["-o", "loop", file, at]);
        let mount = is_mounted.then(|| Self(at.to_owned()))?;
        let image = File::create(daemon.path("mount/image")).unwrap();
        image.set_len(64 << 20).unwrap();
        let everyone = fs::Permissions::from_mode(0o666);
        image.set_permissions(everyone).unwrap();
        mount.freeze().then(|| mount.thaw()).map(|()| mount)
    }

    fn freeze(&self) -> bool {
        run("fsfreeze", &["-f", &self.0])
    }

    fn thaw(&self) {
        run("fsfreeze", &["-u", &self.0]);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.thaw();
        run("umount", &["-l", &self.0]);
    }
}

/// Starts to write 32 MiB to the frozen disk.
fn begin_writes(daemon: &Daemon) -> Child {
    let data = daemon.path("much");
    fs::write(&data, vec![7; 32 << 20]).unwrap();
    let url = "srp://127.0.237.1/0";
    let args = ["write", url, data.to_str().unwrap(), "-q", "--overwrite"];
    let mut command = daemon.riser(&args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn frozen_file_system_delays_no_other_disk() {
    let mut daemon = Daemon::new(TWO);
    let Some(mount) = Mount::new(&daemon) else {
        let name = "frozen_file_system_delays_no_other_disk";
        return skip(name, "nothing may be mounted and frozen");
    };
    daemon.serve();
    assert!(mount.freeze());
    let mut writes = begin_writes(&daemon);
    std::thread::sleep(Duration::from_secs(2));
    assert!(writes.try_wait().unwrap().is_none(), "the disk is frozen");
    let begin = Instant::now();
    for byte in 0..5 {
        daemon.write_block("srp://127.0.237.1/1", byte);
        assert_eq!(daemon.read_block("srp://127.0.237.1/1"), [byte; 4096]);
    }
    // This includes starting ten programs, which can be slow if the machine is under load. The disk
    // hangs for much longer than this.
    let taken = begin.elapsed();
    assert!(writes.try_wait().unwrap().is_none(), "it is frozen still");
    assert!(taken < Duration::from_secs(20), "{taken:?}");
    mount.thaw();
    assert!(writes.wait().unwrap().success());
}
