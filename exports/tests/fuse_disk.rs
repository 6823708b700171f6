//! The FUSE export of a disk in memory: as a file, and with a loop device and ext4. Tests that need
//! root, FUSE or a loop device are skipped if not available, and the skip is counted.

#![allow(clippy::print_stderr, reason = "what could not be undone is printed")]
#![allow(missing_docs, reason = "a test")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riser_block::{
    BlockDevice, BlockError, Buffer, ByteDevice, Extent, Geometry, MemoryDevice, ZeroOptions,
};
use riser_exports::fuse::{Caching, FuseMount, FuseOptions, UnmountError};
use riser_testkit::eventually;
use riser_testkit::skip::skip;

const SIZE: u64 = 192 << 20;

struct Bed {
    dir: PathBuf,
    device: Arc<MemoryDevice>,
    mount: FuseMount,
    ended: mpsc::Receiver<()>,
}

/// Mounts a disk. If this host does not support mounts, reports a skip and returns `None`.
fn bed(over_file: bool, caching: Caching, change: impl FnOnce(&mut Geometry)) -> Option<Bed> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if !Path::new("/dev/fuse").exists() {
        skip("FUSE", "there is no /dev/fuse");
        return None;
    }
    let dir = std::env::temp_dir().join(format!(
        "riser-fuse-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    let path = dir.join("mount");
    std::fs::create_dir(&dir).unwrap();
    if over_file {
        File::create(&path).unwrap();
    } else {
        std::fs::create_dir(&path).unwrap();
    }
    let device = MemoryDevice::new(SIZE, 512)
        .unwrap()
        .with_geometry(change)
        .with_thread()
        .unwrap();
    let device = Arc::new(device);
    let (tx, ended) = mpsc::channel();
    let options = FuseOptions {
        path,
        name: "lun0".into(),
        source: "riser:test".into(),
        caching,
        allow_other: false,
    };
    let bytes = Arc::new(ByteDevice::new(device.clone()));
    match FuseMount::new(bytes, options, move || tx.send(()).unwrap()) {
        Ok(mount) => Some(Bed {
            dir,
            device,
            mount,
            ended,
        }),
        Err(e) => {
            skip("FUSE", &format!("it cannot be mounted here: {e}"));
            std::fs::remove_dir_all(dir).unwrap();
            None
        }
    }
}

impl Bed {
    fn open(&self) -> File {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.mount.file())
            .unwrap()
    }

    fn end(self) {
        // The kernel may still be closing files that a child process had open.
        eventually("the unmount", Duration::from_secs(10), || {
            match self.mount.try_unmount() {
                Ok(()) => true,
                Err(UnmountError::Busy(_)) => false,
                Err(e) => panic!("{e}"),
            }
        });
        self.ended.recv_timeout(Duration::from_secs(10)).unwrap();
        self.mount.wait().unwrap();
        std::fs::remove_dir_all(&self.dir).unwrap();
    }
}

fn fallocate(
    file: &File,
    mode: rustix::fs::FallocateFlags,
    offset: u64,
    len: u64,
) -> rustix::io::Result<()> {
    rustix::fs::fallocate(file, mode, offset, len)
}

#[test]
fn file_behaves_as_disk() {
    use rustix::fs::FallocateFlags as F;
    for (over_file, caching) in [
        (false, Caching::Direct),
        (false, Caching::Kernel),
        (true, Caching::Direct),
    ] {
        let Some(bed) = bed(over_file, caching, |_| {}) else {
            return;
        };
        let file = bed.open();
        assert_eq!(file.metadata().unwrap().size(), SIZE);
        // Odd offsets and lengths, longer than a single request.
        let data: Vec<u8> = (0..3_333_333u32).map(|i| (i * 7 / 5) as u8).collect();
        file.write_all_at(&data, 1_000_001).unwrap();
        let mut back = vec![0; data.len()];
        file.read_exact_at(&mut back, 1_000_001).unwrap();
        assert!(back == data);
        let mut on_disk = vec![0; data.len()];
        bed.device.memory().read(1_000_001, &mut on_disk);
        assert!(on_disk == data);

        let before = bed.device.flushes();
        file.sync_all().unwrap();
        assert!(bed.device.flushes() > before);

        // At the end of the disk, reads are short and writes fail.
        assert_eq!(file.read_at(&mut back[..100], SIZE - 10).unwrap(), 10);
        assert_eq!(file.read_at(&mut back, SIZE).unwrap(), 0);
        let error = file.write_at(b"x", SIZE).unwrap_err();
        assert!(
            matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EFBIG)),
            "{error}"
        );

        // Holes and zeroes.
        fallocate(&file, F::PUNCH_HOLE | F::KEEP_SIZE, 2_000_000, 500_000).unwrap();
        fallocate(&file, F::ZERO_RANGE, 1_000_001, 10).unwrap();
        fallocate(&file, F::empty(), 0, SIZE).unwrap();
        assert!(fallocate(&file, F::COLLAPSE_RANGE, 0, 4096).is_err());
        file.read_exact_at(&mut back, 1_000_001).unwrap();
        let mut want = data.clone();
        want[..10].fill(0);
        want[999_999..1_499_999].fill(0);
        assert!(back == want);
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(2_000_000)).unwrap();
        assert!((2_000_000..2_100_000).contains(&hole), "{hole}");
        let data_at = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(hole)).unwrap();
        assert!((2_400_000..2_500_001).contains(&data_at), "{data_at}");

        // Truncation has no effect, as on a disk.
        drop(
            OpenOptions::new()
                .write(true)
                .truncate(true)
                .open(bed.mount.file())
                .unwrap(),
        );
        assert_eq!(file.metadata().unwrap().size(), SIZE);
        let refused = file.set_len(SIZE / 2).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        file.set_len(SIZE).unwrap();

        // While in use, it cannot be unmounted.
        assert!(matches!(
            bed.mount.try_unmount(),
            Err(UnmountError::Busy(_))
        ));
        drop(file);
        bed.end();
    }
}

#[test]
fn errors_and_protection_reach_caller() {
    let Some(bed) = bed(false, Caching::Direct, |g| g.read_only = true) else {
        return;
    };
    bed.device.spoil(8192..8704);
    let file = File::open(bed.mount.file()).unwrap();
    let mut buf = [0; 4096];
    file.read_exact_at(&mut buf, 0).unwrap();
    let error = file.read_at(&mut buf, 8192).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let error = OpenOptions::new()
        .write(true)
        .open(bed.mount.file())
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    drop(file);
    bed.end();
}

#[test]
fn concurrent_readers_and_writers() {
    // A few small buffers: requests must wait for each other, and none may be lost.
    let Some(bed) = bed(false, Caching::Direct, |g| g.max_transfer = 65536) else {
        return;
    };
    let file = Arc::new(bed.open());
    std::thread::scope(|scope| {
        for worker in 0..8u64 {
            let file = file.clone();
            scope.spawn(move || {
                let base = worker * (16 << 20);
                let mut back = vec![0; 700_001];
                for round in 0..6u64 {
                    let data = vec![(worker * 16 + round) as u8 + 1; 700_001];
                    let at = base + round * 1_234_567;
                    file.write_all_at(&data, at).unwrap();
                    file.read_exact_at(&mut back, at).unwrap();
                    assert!(back == data);
                }
            });
        }
    });
    drop(file);
    bed.end();
}

#[test]
fn drop_detaches_mount_in_use() {
    let Some(bed) = bed(false, Caching::Direct, |_| {}) else {
        return;
    };
    let file = bed.open();
    let path = bed.mount.path().to_owned();
    drop(bed.mount);
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    // Programs with an open file can continue.
    file.write_all_at(b"still here", 0).unwrap();
    drop(file);
    bed.ended.recv_timeout(Duration::from_secs(10)).unwrap();
    std::fs::remove_dir_all(&bed.dir).unwrap();
}

fn run(name: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(name)
        .args(args)
        .output()
        .map_err(|e| format!("{name}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} {args:?}: {}: {said}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A loop device, removed on drop.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(e) = run("losetup", &["-d", &self.0]) {
            eprintln!("{e}");
        }
    }
}

#[test]
fn ext4_works_on_loop_device() {
    if !rustix::process::geteuid().is_root() {
        return skip("a loop device", "it needs root");
    }
    let Some(bed) = bed(false, Caching::Direct, |_| {}) else {
        return;
    };
    let file = bed.mount.file().to_str().unwrap().to_owned();
    let device = match run("losetup", &["--find", "--show", "--direct-io=on", &file]) {
        Ok(device) => Loop(device),
        Err(e) => {
            skip("a loop device", &e.to_string());
            return bed.end();
        }
    };
    run("mkfs.ext4", &["-q", &device.0]).unwrap();
    let root = bed.dir.join("root");
    std::fs::create_dir(&root).unwrap();
    let root_path = root.to_str().unwrap();
    run("mount", &["-o", "discard", &device.0, root_path]).unwrap();
    let mut sums = Vec::new();
    for i in 0..200u32 {
        let data: Vec<u8> = (0..(i * 1777) % 300_000).map(|n| (n * i) as u8).collect();
        std::fs::write(root.join(format!("file{i}")), &data).unwrap();
        sums.push(data);
    }
    for i in (0..200).step_by(3) {
        std::fs::remove_file(root.join(format!("file{i}"))).unwrap();
    }
    run("umount", &[root_path]).unwrap();
    run("e2fsck", &["-fn", &device.0]).unwrap();
    run("mount", &["-o", "ro", &device.0, root_path]).unwrap();
    for (i, data) in sums.iter().enumerate().filter(|(i, _)| i % 3 != 0) {
        let got = std::fs::read(root.join(format!("file{i}"))).unwrap();
        assert!(got == *data, "file{i}");
    }
    run("umount", &[root_path]).unwrap();
    drop(device);
    bed.end();
}

/// A disk in memory that counts flushes and writes that must not stay in a volatile cache, and
/// records the lengths of transfers.
struct Counting {
    disk: MemoryDevice,
    stable: Arc<AtomicU32>,
    reads: Mutex<Vec<usize>>,
    writes: Mutex<Vec<usize>>,
}

impl Counting {
    fn new(bytes: u64) -> Self {
        Self {
            disk: MemoryDevice::new(bytes, 512).unwrap(),
            stable: Arc::default(),
            reads: Mutex::default(),
            writes: Mutex::default(),
        }
    }
}

impl BlockDevice for Counting {
    fn geometry(&self) -> &Geometry {
        self.disk.geometry()
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        self.disk.try_buffer(len)
    }

    fn buffer_bytes(&self) -> u64 {
        self.disk.buffer_bytes()
    }

    fn wake_when_free(&self, waker: &std::task::Waker) {
        self.disk.wake_when_free(waker);
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        self.reads.lock().unwrap().push(buffer.len());
        self.disk.read(offset, buffer).await
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        self.stable.fetch_add(fua.into(), Ordering::Relaxed);
        self.writes.lock().unwrap().push(buffer.len());
        self.disk.write(offset, buffer, fua).await
    }

    async fn flush(&self) -> Result<(), BlockError> {
        self.stable.fetch_add(1, Ordering::Relaxed);
        self.disk.flush().await
    }

    async fn discard(&self, range: std::ops::Range<u64>) -> Result<(), BlockError> {
        self.disk.discard(range).await
    }

    async fn write_zeroes(
        &self,
        range: std::ops::Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        self.disk.write_zeroes(range, options).await
    }

    async fn status(&self, range: std::ops::Range<u64>) -> Result<Vec<Extent>, BlockError> {
        self.disk.status(range).await
    }
}

/// Mounts a disk over a directory. If this host does not support mounts, reports a skip and returns
/// `None`.
fn mount_over<D: BlockDevice>(
    dir: &Path,
    disk: Arc<D>,
    caching: Caching,
    on_end: impl FnOnce() + Send + 'static,
) -> Option<FuseMount> {
    let options = FuseOptions {
        path: dir.to_owned(),
        name: "lun0".into(),
        source: "riser:test".into(),
        caching,
        allow_other: false,
    };
    let mount = FuseMount::new(Arc::new(ByteDevice::new(disk)), options, on_end);
    mount
        .inspect_err(|e| skip("FUSE", &format!("it cannot be mounted here: {e}")))
        .ok()
}

/// Creates a directory.
fn directory(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("riser-fuse-{name}-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    dir
}

/// Opens the file of a mount for reading and writing.
fn open(mount: &FuseMount) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).open(mount.file()).unwrap()
}

#[test]
fn mebibyte_is_single_transfer() {
    const LEN: usize = 1 << 20;
    let dir = directory("long");
    let disk = Arc::new(Counting::new(16 << 20));
    let Some(mount) = mount_over(&dir, disk.clone(), Caching::Direct, || {}) else {
        return std::fs::remove_dir(&dir).unwrap();
    };
    let file = open(&mount);
    // Whole pages: an unaligned buffer needs one more page than a request can have.
    let mut memory = vec![0_u8; LEN + 4096];
    let at = memory.as_ptr().align_offset(4096);
    let data = &mut memory[at..at + LEN];
    for (i, byte) in data.iter_mut().enumerate() {
        *byte = (i * 7 / 5) as u8;
    }
    file.write_all_at(data, LEN as u64).unwrap();
    assert_eq!(*disk.writes.lock().unwrap(), [LEN]);
    let mut on_disk = vec![0; LEN];
    disk.disk.memory().read(LEN, &mut on_disk);
    assert!(on_disk == data);
    data.fill(0);
    file.read_exact_at(data, LEN as u64).unwrap();
    assert_eq!(*disk.reads.lock().unwrap(), [LEN]);
    assert!(on_disk == data);
    drop(file);
    mount.detach().unwrap();
    mount.wait().unwrap();
    std::fs::remove_dir(&dir).unwrap();
}

#[test]
fn detached_mount_keeps_next_mount() {
    let dir = directory("again");
    let (sender, ended) = mpsc::channel();
    let on_end = move || sender.send(()).unwrap();
    let first = Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
    let Some(mount) = mount_over(&dir, first, Caching::Direct, on_end) else {
        return std::fs::remove_dir(&dir).unwrap();
    };
    let file = open(&mount);
    mount.detach().unwrap();
    let second = Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
    let next = mount_over(&dir, second, Caching::Direct, || {}).unwrap();
    // The file is still served; closing it removes the last user.
    file.write_all_at(&[1; 512], 0).unwrap();
    drop(file);
    ended.recv_timeout(Duration::from_secs(10)).unwrap();
    mount.wait().unwrap();
    let mut back = [1; 512];
    open(&next).read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, [0; 512], "it is the second disk");
    next.detach().unwrap();
    next.wait().unwrap();
    std::fs::remove_dir(&dir).unwrap();
}

#[test]
fn aborted_connection_fails_and_unmounts() {
    let dir = directory("abort");
    let disk = Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
    let (sender, ended) = mpsc::channel();
    let on_end = move || sender.send(()).unwrap();
    let Some(mount) = mount_over(&dir, disk, Caching::Direct, on_end) else {
        return std::fs::remove_dir(&dir).unwrap();
    };
    let file = open(&mount);
    let connection = rustix::fs::minor(file.metadata().unwrap().dev());
    let abort = format!("/sys/fs/fuse/connections/{connection}/abort");
    if std::fs::write(abort, "1").is_err() {
        skip("FUSE", "connections cannot be aborted here");
    } else {
        ended.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(file.write_all_at(&[1; 512], 0).is_err());
        drop(file);
        let error = mount.wait().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        return std::fs::remove_dir(&dir).unwrap();
    }
    drop(file);
    mount.detach().unwrap();
    mount.wait().unwrap();
    std::fs::remove_dir(&dir).unwrap();
}

#[test]
fn externally_detached_mount_spares_next_mount() {
    for has_next in [false, true] {
        let dir = directory("others");
        let disk = || Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
        let first = disk();
        let Some(mount) = mount_over(&dir, first.clone(), Caching::Direct, || {}) else {
            return std::fs::remove_dir(&dir).unwrap();
        };
        let file = open(&mount);
        // Like `umount -l`.
        riser_exports::fuse::unmount(&dir, true).unwrap();
        let next = has_next.then(|| mount_over(&dir, disk(), Caching::Direct, || {}).unwrap());
        mount.detach().unwrap();
        if let Some(next) = next {
            assert!(next.file().exists(), "the next mount was removed");
            next.detach().unwrap();
            next.wait().unwrap();
        }
        // The program with the open file can continue.
        file.write_all_at(&[1; 512], 0).unwrap();
        drop(file);
        let flushes = first.flushes();
        mount.wait().unwrap();
        assert!(first.flushes() > flushes);
        std::fs::remove_dir(&dir).unwrap();
    }
}

#[test]
fn covered_mount_is_kept() {
    let dir = directory("under");
    let disk = || Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
    let Some(mount) = mount_over(&dir, disk(), Caching::Direct, || {}) else {
        return std::fs::remove_dir(&dir).unwrap();
    };
    if let Some(above) = mount_over(&dir, disk(), Caching::Direct, || {}) {
        for unmounted in [mount.try_unmount(), mount.detach()] {
            assert!(matches!(unmounted, Err(UnmountError::Failed { .. })));
        }
        assert!(above.file().exists(), "the mount above was removed");
        above.detach().unwrap();
        above.wait().unwrap();
    }
    assert!(mount.file().exists());
    mount.detach().unwrap();
    mount.wait().unwrap();
    std::fs::remove_dir(&dir).unwrap();
}

#[test]
fn forced_unmount_in_use_fails_cleanly() {
    use rustix::mount::{UnmountFlags, unmount};

    if !rustix::process::geteuid().is_root() {
        return skip("a forced unmount", "it needs root");
    }
    for is_used in [true, false] {
        let dir = directory("force");
        let disk = Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
        let (sender, ended) = mpsc::channel();
        let on_end = move || sender.send(()).unwrap();
        let Some(mount) = mount_over(&dir, disk, Caching::Direct, on_end) else {
            return std::fs::remove_dir(&dir).unwrap();
        };
        let file = is_used.then(|| open(&mount));
        let forced = unmount(&dir, UnmountFlags::FORCE);
        ended.recv_timeout(Duration::from_secs(10)).unwrap();
        drop(file);
        let result = mount.wait();
        if is_used {
            assert_eq!(forced, Err(rustix::io::Errno::BUSY));
            let error = result.unwrap_err();
            assert!(
                error.to_string().contains("aborted while mounted"),
                "{error}"
            );
        } else {
            assert_eq!(forced, Ok(()));
            result.unwrap();
        }
        // Neither a live nor a dead mount is left.
        std::fs::remove_dir(&dir).unwrap();
    }
}

#[test]
fn synchronous_write_reaches_medium_before_return() {
    use std::os::unix::fs::OpenOptionsExt;

    for caching in [Caching::Direct, Caching::Kernel] {
        for flag in [libc::O_DSYNC, libc::O_SYNC] {
            if !Path::new("/dev/fuse").exists() {
                return skip("FUSE", "there is no /dev/fuse");
            }
            let dir = std::env::temp_dir().join(format!(
                "riser-fuse-sync-{}-{caching:?}-{flag}",
                std::process::id()
            ));
            std::fs::create_dir(&dir).unwrap();
            let disk = Counting::new(16 << 20);
            let stable = disk.stable.clone();
            let Some(mount) = mount_over(&dir, Arc::new(disk), caching, || {}) else {
                std::fs::remove_dir(&dir).unwrap();
                return;
            };
            let file = OpenOptions::new()
                .write(true)
                .custom_flags(flag)
                .open(mount.file())
                .unwrap();
            file.write_all_at(&[7; 4096], 0).unwrap();
            let seen = stable.load(Ordering::Relaxed);
            drop(file);
            mount.detach().unwrap();
            mount.wait().unwrap();
            std::fs::remove_dir(&dir).unwrap();
            assert!(
                seen > 0,
                "{caching:?}, flag {flag:#o}: the write was left in the volatile cache"
            );
        }
    }
}
