//! Disks of a kernel's initiators, written and read while others kill the daemon behind them.
//!
//! A case of `cargo xtask interop` runs this in its guest (`tests/vm/crash.sh`): it logs stock
//! initiators of several protocols in to one unit, and kills `riserd` at random moments. The kernel
//! repeats what was not answered, so no request fails, and all that was acknowledged is there.
//!
//! `RISER_CRASH_DISKS` names the disks, with spaces between them, and `RISER_CRASH_STOP` a file that
//! ends the load when it appears. `RISER_CRASH_PROGRESS` is a file that gets the number of
//! operations of the slowest thread, from time to time.

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

/// Threads of each disk.
const THREADS: u64 = 2;

/// Longest request in blocks.
const LONGEST: u64 = 20;

/// Alignment of direct I/O, in bytes.
const ALIGNMENT: usize = 4096;

/// A disk of the kernel, past its cache.
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

    /// Aligned memory.
    fn buffer(&mut self, len: usize) -> &mut [u8] {
        let at = self.memory.as_ptr().align_offset(ALIGNMENT);
        &mut self.memory[at..at + len]
    }
}

fn failed(error: io::Error) -> Failed {
    Failed {
        errno: error.raw_os_error().unwrap_or(0),
        is_answered: false,
        text: error.to_string(),
    }
}

impl Disk for KernelDisk {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        let file = self.file.try_clone().map_err(failed)?;
        let buffer = self.buffer(bytes.len());
        // What the target does not send is not taken for an answer.
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
        // Nothing may be taken from a buffer whose request has ended.
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
fn disks_of_a_kernel_keep_what_was_acknowledged() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set"));
    let disks = variable("RISER_CRASH_DISKS");
    let disks: Vec<&str> = disks.split_whitespace().collect();
    let (stop_file, progress) = (
        variable("RISER_CRASH_STOP"),
        variable("RISER_CRASH_PROGRESS"),
    );
    let seed = setting("RISER_CRASH_SEED", 0x0c0f);
    // The kernel repeats what was not answered.
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
        // By a name that is replaced at once: the script may read at any moment.
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
        "figure: {total} operations on {} disks of the kernel",
        disks.len()
    );
}
