use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use riser_block::task::{block_on, join_all};
use riser_block::{BlockDevice, BlockError, Buffer, Extent, ExtentKind, Operation, ZeroOptions};

use super::*;
use crate::ThreadDisk;
use crate::testing::List;

/// Temporary file, removed on drop.
struct Temp(PathBuf);

impl Temp {
    fn new(len: u64) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("riser-file-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        Self(path)
    }

    fn file(&self) -> std::fs::File {
        let mut options = std::fs::File::options();
        options.read(true).write(true).open(&self.0).unwrap()
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn open_default(path: &Path) -> ThreadDisk {
    open(path, FileConfig::default()).unwrap()
}

fn filled(disk: &ThreadDisk, len: usize, byte: u8) -> Buffer {
    let buffer = block_on(disk.buffer(len));
    buffer.slice().fill(0, len, byte);
    buffer
}

fn read(disk: &ThreadDisk, offset: u64, len: usize) -> Result<Vec<u8>, BlockError> {
    let buffer = filled(disk, len, 0xee);
    block_on(BlockDevice::read(disk, offset, buffer)).map(|buffer| buffer.slice().to_vec())
}

#[test]
fn file_handles_concurrent_operations() {
    let temp = Temp::new(16 << 20);
    for direct in [false, true] {
        let config = FileConfig {
            direct,
            read_only: false,
            ..FileConfig::default()
        };
        let disk = match open(&temp.0, config) {
            // Direct I/O may not be supported for in-memory file systems.
            Err(FileError::NoDirect) if direct => continue,
            disk => Arc::new(disk.unwrap()),
        };
        let block = disk.geometry().block_size as usize;
        let writes = (0..64u64).map(|n| {
            let disk = disk.clone();
            async move {
                let buffer = disk.buffer(block << (n % 6)).await;
                buffer.slice().fill(0, buffer.len(), n as u8 + 1);
                BlockDevice::write(&*disk, n << 18, buffer, n % 8 == 0).await
            }
        });
        assert!(block_on(join_all(writes)).iter().all(Result::is_ok));
        block_on(BlockDevice::flush(&*disk)).unwrap();
        for n in 0..64u64 {
            let len = block << (n % 6);
            let want = vec![n as u8 + 1; len];
            assert!(read(&disk, n << 18, len).unwrap() == want, "{direct} {n}");
            let mut got = vec![0; len];
            temp.file().read_exact_at(&mut got, n << 18).unwrap();
            assert!(got == want);
        }
        drop(disk);
        temp.file().set_len(0).unwrap();
        temp.file().set_len(16 << 20).unwrap();
    }
}

#[test]
fn workload_runs_on_disk_thread() {
    let temp = Temp::new(4 << 20);
    let disk = open_default(&temp.0);
    let write = |n: u64| Operation::Write {
        offset: n << 16,
        buffer: filled(&disk, 4096, n as u8 + 1),
        fua: n.is_multiple_of(8),
    };
    let discard = Operation::Discard(0..4096);
    let operations = (0..64).map(write).chain([discard, Operation::Flush]);
    let (list, seen) = List::new(operations, 1);
    assert!(disk.drive(list).is_ok());
    let seen: Vec<_> = seen.iter().collect();
    assert_eq!(seen.len(), 66);
    for seen in seen {
        assert_eq!(seen.thread, "file-disk");
        assert_eq!(seen.completion.unwrap().is_some(), seen.tag < 64);
    }
    assert_eq!(read(&disk, 0, 4096).unwrap(), [0; 4096]);
    assert_eq!(read(&disk, 63 << 16, 4096).unwrap(), [64; 4096]);
}

#[test]
fn disk_has_configured_buffer_size() {
    let temp = Temp::new(1 << 20);
    assert_eq!(open_default(&temp.0).buffer_bytes(), crate::BUFFERS);
    let config = FileConfig {
        buffers: 96 << 20,
        ..FileConfig::default()
    };
    assert_eq!(open(&temp.0, config).unwrap().buffer_bytes(), 96 << 20);
}

#[test]
fn holes_are_reported_and_created() {
    let temp = Temp::new(4 << 20);
    let file = temp.file();
    file.write_all_at(&[1; 65536], 1 << 20).unwrap();
    file.write_all_at(&[2; 65536], 3 << 20).unwrap();
    let disk = open_default(&temp.0);
    let status = |range| block_on(BlockDevice::status(&disk, range)).unwrap();
    let extent = |len, kind| Extent { len, kind };
    let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
    let (mib, kib64) = (1 << 20, 65536);
    let gap = 2 * mib - kib64;
    assert_eq!(
        status(0..4 << 20),
        [
            extent(mib, hole),
            extent(kib64, data),
            extent(gap, hole),
            extent(kib64, data),
            extent(mib - kib64, hole)
        ]
    );
    assert_eq!(status(mib + 512..mib + 1024), [extent(512, data)]);
    assert_eq!(status(0..512), [extent(512, hole)]);
    assert!(disk.geometry().max_discard > 0);
    block_on(BlockDevice::discard(&disk, mib..mib + kib64)).unwrap();
    assert_eq!(status(0..3 * mib), [extent(3 * mib, hole)]);
    assert_eq!(read(&disk, mib, 512).unwrap(), [0; 512]);
    // Must be zeroed in both cases, even if the file system doesn't support zero ranges.
    for may_unmap in [false, true] {
        file.write_all_at(&[3; 8192], 4096).unwrap();
        let options = ZeroOptions {
            may_unmap,
            fua: true,
            fast: false,
        };
        block_on(BlockDevice::write_zeroes(&disk, 4096..8192, options)).unwrap();
        assert_eq!(read(&disk, 4096, 4096).unwrap(), [0; 4096]);
        assert_eq!(read(&disk, 8192, 4096).unwrap(), [3; 4096]);
        if !may_unmap {
            let extents = status(4096..8192);
            assert!(
                !extents.contains(&extent(4096, hole)),
                "it stays allocated: {extents:?}"
            );
        }
    }
}

#[test]
fn truncated_file_returns_error() {
    let temp = Temp::new(1 << 20);
    let disk = open_default(&temp.0);
    temp.file().set_len(100_352).unwrap();
    assert!(read(&disk, 0, 65536).is_ok());
    let error = read(&disk, 65536, 65536).unwrap_err().to_string();
    assert!(error.contains("truncated to 100352 bytes"), "{error}");
    let error = read(&disk, 1 << 19, 512).unwrap_err().to_string();
    assert!(error.contains("truncated to 524288 bytes"), "{error}");
    let extents = block_on(BlockDevice::status(&disk, 65536..1 << 20)).unwrap();
    assert_eq!(
        extents.iter().map(|e| e.len).sum::<u64>(),
        (1 << 20) - 65536
    );
    assert_eq!(
        read(&disk, 1 << 20, 512).unwrap_err(),
        BlockError::OutOfRange
    );
}

#[test]
fn read_only_disk_rejects_changes() {
    let temp = Temp::new(1 << 20);
    let config = FileConfig {
        direct: false,
        read_only: true,
        ..FileConfig::default()
    };
    let disk = open(&temp.0, config).unwrap();
    assert!(disk.geometry().read_only);
    let write = BlockDevice::write(&disk, 0, filled(&disk, 512, 1), false);
    assert_eq!(block_on(write).unwrap_err(), BlockError::ReadOnly);
    let zeroes = BlockDevice::write_zeroes(&disk, 0..512, ZeroOptions::default());
    assert_eq!(block_on(zeroes).unwrap_err(), BlockError::ReadOnly);
    assert_eq!(read(&disk, 0, 512).unwrap(), [0; 512]);
    // We don't even need write permission.
    let mut permissions = std::fs::metadata(&temp.0).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&temp.0, permissions).unwrap();
    assert!(open(&temp.0, config).is_ok());
}

#[test]
fn invalid_files_fail_with_reason() {
    let odd = Temp::new(1000);
    let empty = Temp::new(0);
    let default = FileConfig::default();
    for (path, words) in [
        (
            odd.0.as_path(),
            "1000 bytes is not a multiple of the block size of 512",
        ),
        (&empty.0, "0 bytes"),
        (&std::env::temp_dir(), "a directory"),
        (Path::new("/dev/null"), "a character device"),
        (Path::new("/does/not/exist"), "No such file"),
    ] {
        let error = open(path, default).unwrap_err().to_string();
        assert!(error.contains(words), "{}: {error}", path.display());
    }
    let error = open(Path::new("/proc/version"), default).unwrap_err();
    assert!(!error.to_string().is_empty());
}

#[test]
fn block_device_is_opened_exclusively() {
    let temp = Temp::new(8 << 20);
    let Some(device) = LoopDevice::new(&temp.0) else {
        riser_testkit::skip::skip("a block device", "loop devices cannot be made here");
        return;
    };
    let disk = open_default(&device.0);
    assert_eq!(disk.geometry().capacity, 8 << 20);
    assert!(!disk.geometry().reports_status);
    let second = open(&device.0, FileConfig::default()).unwrap_err();
    assert!(matches!(second, FileError::InUse), "{second}");
    let config = FileConfig {
        direct: true,
        read_only: true,
        ..FileConfig::default()
    };
    let reader = open(&device.0, config).unwrap();
    let block = disk.geometry().block_size as usize;
    let buffer = filled(&disk, block, 5);
    block_on(BlockDevice::write(&disk, 4096, buffer, true)).unwrap();
    assert_eq!(read(&reader, 4096, block).unwrap(), vec![5; block]);
    if disk.geometry().max_discard > 0 {
        block_on(BlockDevice::discard(&disk, 0..1 << 20)).unwrap();
        assert_eq!(read(&reader, 4096, block).unwrap(), vec![0; block]);
    }
    let options = ZeroOptions {
        fua: true,
        ..ZeroOptions::default()
    };
    let buffer = filled(&disk, 8192, 6);
    block_on(BlockDevice::write(&disk, 0, buffer, false)).unwrap();
    block_on(BlockDevice::write_zeroes(&disk, 0..4096, options)).unwrap();
    assert_eq!(read(&disk, 0, 4096).unwrap(), [0; 4096]);
    assert_eq!(read(&disk, 4096, 4096).unwrap(), [6; 4096]);
    drop((disk, reader));
}

/// Loop device for a file; requires root.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(file: &Path) -> Option<Self> {
        let output = std::process::Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        let made = output.status.success() && path.starts_with("/dev/");
        made.then(|| Self(path.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mut command = std::process::Command::new("losetup");
        let _ = command.arg("-d").arg(&self.0).status();
    }
}
