//! Backends whose files would lie in the tree itself.

mod rig;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use rig::Rig;
use riser_target::backend::{Direct, OpenError, Source, Spec, Store};

/// Whether a shell command succeeds. One that waits for the mount that it is about fails the test,
/// after the mount was aborted.
fn succeeds(rig: &Rig, command: &str) -> bool {
    let mut shell = Command::new("sh").args(["-ec", command]).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(status) = shell.try_wait().unwrap() {
            return status.success();
        }
        if Instant::now() > until {
            let config = rig.folder.join("config");
            let _ = Command::new("umount").arg("-f").arg(config).status();
            let _ = shell.kill();
            let _ = shell.wait();
            panic!("waits for itself: {command}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_backend_below_the_tree_itself_is_refused() {
    let Some(rig) = Rig::mount("configfs_own_mount") else {
        return;
    };
    let config = rig.folder.join("config");
    let link = rig.folder.join("link");
    std::os::unix::fs::symlink(config.join("target"), &link).unwrap();
    for (number, path) in [config.join("target/disk"), link.join("disk")]
        .iter()
        .enumerate()
    {
        let dir = config.join(format!("target/core/fileio_{number}/disk"));
        let (at, path) = (dir.display(), path.display());
        let setup =
            format!("mkdir -p {at}; echo fd_dev_name={path},fd_dev_size=1048576 > {at}/control");
        assert!(succeeds(&rig, &setup));
        assert!(!succeeds(&rig, &format!("echo 1 > {at}/enable")), "{path}");
    }
    // The tree still answers, and the daemon was given nothing.
    assert!(fs::read_dir(config.join("target/core")).unwrap().count() > 0);
    assert_eq!(rig.given.lock().unwrap().len(), 0);
    // Nor does the daemon open what it is given by others.
    for path in [config.join("target/disk"), link.join("disk")] {
        let spec = Spec {
            source: Source::File {
                path: path.clone(),
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Auto,
            write_cache: false,
            read_only: false,
            faults: None,
        };
        let error = Store::open(&spec).unwrap_err();
        assert!(matches!(error, OpenError::AsksUs { .. }), "{error}");
        let said = error.to_string();
        for named in [&path, &config] {
            assert!(said.contains(named.to_str().unwrap()), "{said}");
        }
    }
}
