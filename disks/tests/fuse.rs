//! The FUSE export of a disk with a thread. If this host doesn't support mounts, the test is skipped
//! and the skip is counted.

#![allow(missing_docs, reason = "a test")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use riser_block::ByteDevice;
use riser_disks::file;
use riser_exports::fuse::{Caching, FuseMount, FuseOptions};
use riser_testkit::skip::skip;

#[test]
fn threaded_disk_serves_mount_on_its_thread() {
    let dir = std::env::temp_dir().join(format!("riser-fuse-thread-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let image = dir.with_extension("image");
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let disk = Arc::new(file::open(&image, file::FileConfig::default()).unwrap());
    let (sender, threads) = mpsc::channel();
    let on_end = move || {
        let name = std::thread::current().name().map(str::to_owned);
        sender.send(name.unwrap_or_default()).unwrap();
    };
    let options = FuseOptions {
        path: dir.clone(),
        name: "lun0".into(),
        source: "riser:test".into(),
        caching: Caching::Direct,
        allow_other: false,
    };
    let mount = match FuseMount::new(Arc::new(ByteDevice::new(disk)), options, on_end) {
        Ok(mount) => mount,
        Err(error) => {
            skip("FUSE", &format!("it cannot be mounted here: {error}"));
            std::fs::remove_file(&image).unwrap();
            return std::fs::remove_dir(&dir).unwrap();
        }
    };
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).open(mount.file()).unwrap();
    let file = Arc::new(file);
    std::thread::scope(|scope| {
        for worker in 0..4_usize {
            let file = file.clone();
            scope.spawn(move || {
                // Short, long, and unaligned transfers.
                for (i, len) in [512, 1 << 20, 70_001, 4096, 300_003]
                    .into_iter()
                    .enumerate()
                {
                    let at = ((worker << 22) + i * 17) as u64;
                    let data: Vec<u8> = (0..len).map(|n| (n * 7 / 5 + worker + i) as u8).collect();
                    let mut back = vec![0; len];
                    file.write_all_at(&data, at).unwrap();
                    file.read_exact_at(&mut back, at).unwrap();
                    assert!(back == data, "{len} bytes at {at}");
                }
            });
        }
    });
    file.sync_all().unwrap();
    drop(file);
    mount.detach().unwrap();
    mount.wait().unwrap();
    let served = threads.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(!served.starts_with("fuse"), "served by {served}");
    std::fs::remove_file(&image).unwrap();
    std::fs::remove_dir(&dir).unwrap();
}
