//! Reads and writes disks of kernel initiators while the daemon is killed by another process.
//!
//! This is run in a guest by a case in `cargo xtask interop` (`tests/vm/crash.sh`). The case uses
//! stock initiators with several protocols to log in to the same unit, and kills `riserd` at random
//! times. The kernel retries commands without a response, so requests must never fail, and all
//! acknowledged data must be present.
//!
//! `RISER_CRASH_DISKS` contains the disks, separated by spaces. The load stops when the file
//! `RISER_CRASH_STOP` is created. `RISER_CRASH_PROGRESS` is a file to which we periodically write
//! the number of operations completed by the slowest thread.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use riser_tests::contest::DISK;
use riser_tests::history::{BLOCK, History, Port};
use riser_tests::load::{Chance, Disk, Failed, Op, setting};

/// Number of threads per disk.
const THREADS: u64 = 2;

/// Maximum request size in blocks.
const LONGEST: u64 = 20;

/// Alignment for direct I/O in bytes.
const ALIGNMENT: usize = 4096;

/// A kernel disk that is opened with direct I/O.
struct KernelDisk {
    file: File,
    memory: Vec<u8>,
}

impl KernelDisk {
    fn open(path: &str) -> Self {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options.open(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let memory = vec![0; ALIGNMENT + LONGEST as usize * BLOCK];
        Self { file, memory }
    }

    /// Returns an aligned buffer.
    fn buffer(&mut self, len: usize) -> &mut [u8] {
        let at = self.memory.as_ptr().align_offset(ALIGNMENT);
        &mut self.memory[at..at + len]
    }
}

fn failed(error: io::Error) -> Failed {
    Failed {
        errno: error.raw_os_error().unwrap_or(0),
        has_response: false,
        text: error.to_string(),
    }
}

impl Disk for KernelDisk {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        let file = self.file.try_clone().map_err(failed)?;
        let buffer = self.buffer(bytes.len());
        // Fill the buffer first, so that we can detect data not sent by the target.
        buffer.fill(0xee);
        file.read_exact_at(buffer, offset).map_err(failed)?;
        bytes.copy_from_slice(buffer);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), Failed> {
        let file = self.file.try_clone().map_err(failed)?;
        let buffer = self.buffer(bytes.len());
        buffer.copy_from_slice(bytes);
        file.write_all_at(buffer, offset).map_err(failed)?;
        // After the request has completed, no data must be read from this buffer.
        buffer.fill(0xdd);
        match fua {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), Failed> {
        self.file.sync_data().map_err(failed)
    }
}

#[test]
#[ignore = "works on disks of kernel initiators, in a case of `cargo xtask interop`"]
fn kernel_disks_keep_acknowledged_data() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set"));
    let disks = variable("RISER_CRASH_DISKS");
    let disks: Vec<&str> = disks.split_whitespace().collect();
    let (stop_file, progress) = (
        variable("RISER_CRASH_STOP"),
        variable("RISER_CRASH_PROGRESS"),
    );
    let seed = setting("RISER_CRASH_SEED", 0x0c0f);
    // The kernel retries commands without a response.
    let history = Arc::new(History::new(DISK.end as usize).with_repeats());
    let stop = Arc::new(AtomicBool::new(false));
    let (mut done, mut workers) = (Vec::new(), Vec::new());
    for (port, path) in (1..).zip(&disks) {
        for thread in 0..THREADS {
            let mut disk = KernelDisk::open(path);
            let mut chance = Chance::new(seed, u64::from(port) << 8 | thread);
            let count = Arc::new(AtomicU64::new(0));
            done.push(count.clone());
            let (history, stop) = (history.clone(), stop.clone());
            workers.push(thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let op = Op::random(&mut chance, &DISK, LONGEST);
                    if let Err(error) = op.carry_out(&mut disk, Port(port), &history) {
                        panic!("{op:?} of disk {port}: {error:?}");
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
    }
    let counts = || done.iter().map(|count| count.load(Ordering::Relaxed));
    while !Path::new(&stop_file).exists() {
        if let Some(at) = workers.iter().position(JoinHandle::is_finished) {
            panic!("{:?}", workers.remove(at).join());
        }
        // Rename the file to replace it atomically, because the script may read it at any time.
        let next = format!("{progress}.next");
        fs::write(&next, counts().min().unwrap_or(0).to_string()).unwrap();
        fs::rename(&next, &progress).unwrap();
        thread::sleep(Duration::from_millis(50));
    }
    stop.store(true, Ordering::Relaxed);
    workers
        .into_iter()
        .for_each(|worker| worker.join().unwrap());
    for (port, path) in (1..).zip(&disks) {
        for start in DISK.step_by(LONGEST as usize) {
            let read = Op::read(start..(start + LONGEST).min(DISK.end));
            let mut disk = KernelDisk::open(path);
            read.carry_out(&mut disk, Port(port), &history).unwrap();
        }
    }
    let total: u64 = counts().sum();
    println!(
        "result: {total} operations on {} disks of the kernel",
        disks.len()
    );
}
