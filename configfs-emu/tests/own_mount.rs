//! Tests backends that use a file in the mounted tree itself.

mod rig;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use rig::Rig;
use riser_target::backend::{Direct, OpenError, Source, Spec, Store};

/// Returns true if a shell command was successful. If it blocks because it's waiting for this
/// mount, the test will fail after the mount was aborted.
fn succeeds(rig: &Rig, command: &str) -> bool {
    let mut shell = Command::new("sh").args(["-ec", command]).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(status) = shell.try_wait().unwrap() {
            return status.success();
        }
        if Instant::now() > until {
            let config = rig.directory.join("config");
            let _ = Command::new("umount").arg("-f").arg(config).status();
            let _ = shell.kill();
            let _ = shell.wait();
            panic!("waits for itself: {command}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn backend_inside_own_mount_is_rejected() {
    let Some(rig) = Rig::mount("configfs_own_mount") else {
        return;
    };
    let config = rig.directory.join("config");
    let link = rig.directory.join("link");
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
    // The tree still responds, and the daemon did not receive a configuration.
    assert!(fs::read_dir(config.join("target/core")).unwrap().count() > 0);
    assert_eq!(rig.given.lock().unwrap().len(), 0);
    // The daemon must also reject these files if they are configured by other users.
    for path in [config.join("target/disk"), link.join("disk")] {
        let spec = Spec {
            name: "disk".into(),
            source: Source::File {
                path: path.clone(),
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Auto,
            write_cache: false,
            read_only: false,
            protection: None,
            faults: None,
        };
        let error = Store::open(&spec).unwrap_err();
        assert!(matches!(error, OpenError::DependsOnUs { .. }), "{error}");
        let said = error.to_string();
        for named in [&path, &config] {
            assert!(said.contains(named.to_str().unwrap()), "{said}");
        }
    }
}
