//! Sequences of calls in any order, with arguments of all kinds, on two devices that communicate
//! with each other.
//!
//! Each seed yields one sequence. A process runs a few of them sequentially, with a timeout for
//! each, so if a call crashes the process or never returns, the seed is known. Errors are checked
//! against the errors that rdma-core can return for a call. After each sequence, all of its objects
//! are destroyed. This must succeed, no descriptors may be left open, and the devices must still be
//! able to exchange messages.
//!
//! `RISER_SEQUENCES=N` runs this number of seeds of each kind, `RISER_SEQUENCES_FROM=SEED` sets the
//! first seed, and `RISER_SEQUENCES_SHOW=1` prints each call before it is executed.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]
#![allow(
    clippy::print_stderr,
    reason = "a process of the test names what it does"
)]

#[path = "../library/mod.rs"]
mod library;

mod cm;
mod verbs;

use std::env;
use std::ffi::c_int;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use library::*;
use riser_rdma_core_sys::bindings::*;

/// Number of seeds of each kind, unless set in the environment.
const SEEDS: u64 = 12;

/// Number of seeds per process.
const SEEDS_OF_A_PROCESS: u64 = 6;

/// Timeout for a seed in seconds. It usually takes a few tenths of a second.
const SECONDS: u32 = 40;

/// Devices used by the sequences.
const DEVICES: &str = "riser0=127.0.43.1,riser1=127.0.43.2";

/// Addresses of the devices.
const ADDRESSES: [[u8; 4]; 2] = [[127, 0, 43, 1], [127, 0, 43, 2]];

/// Source of random choices.
struct Choices {
    rng: fastrand::Rng,
    shows: bool,
}

impl Choices {
    fn new(seed: u64) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(seed),
            shows: env::var_os("RISER_SEQUENCES_SHOW").is_some(),
        }
    }

    /// Returns true with a probability of one in `n`.
    fn once_in(&mut self, n: u32) -> bool {
        self.rng.u32(0..n) == 0
    }

    fn below(&mut self, n: usize) -> usize {
        self.rng.usize(0..n)
    }

    /// Returns one of the given values.
    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.rng.usize(0..all.len())]
    }

    /// Returns a count, which is usually valid, but sometimes invalid or much too large.
    fn count(&mut self) -> u32 {
        if self.once_in(4) {
            return self.of(&[0, 1 << 16, 1 << 24, i32::MAX as u32, u32::MAX, 1 << 31]);
        }
        self.of(&[1, 2, 3, 7, 16, 64])
    }

    /// Returns flags, which are usually known, but sometimes unknown.
    fn flags(&mut self, known: u32) -> u32 {
        let some = self.rng.u32(..) & known;
        if self.once_in(10) {
            some | 1 << self.rng.u32(0..32)
        } else {
            some
        }
    }

    /// Prints a call before it is executed.
    fn show(&self, call: &str) {
        if self.shows {
            eprintln!("  {call}");
        }
    }
}

/// Objects of one kind, including destroyed ones.
struct Pool<T> {
    live: Vec<*mut T>,
    gone: Vec<*mut T>,
    /// Set if pointers to destroyed objects are used. Their memory may have been reused for an
    /// object of another thread, or for an object created by the library, so this is only possible
    /// with a single thread.
    uses_gone: bool,
}

impl<T> Pool<T> {
    fn new(uses_gone: bool) -> Self {
        Self {
            live: Vec::new(),
            gone: Vec::new(),
            uses_gone,
        }
    }

    fn add(&mut self, object: *mut T) {
        if !object.is_null() {
            // Its memory may have been used by a destroyed object.
            self.gone.retain(|gone| *gone != object);
            self.live.push(object);
        }
    }

    fn remove(&mut self, object: *mut T) {
        if let Some(at) = self.live.iter().position(|live| *live == object) {
            self.live.swap_remove(at);
            self.gone.push(object);
        }
    }

    /// Returns a live object, if any.
    fn live(&self, choices: &mut Choices) -> Option<*mut T> {
        (!self.live.is_empty()).then(|| self.live[choices.below(self.live.len())])
    }

    /// Usually returns a live object, but sometimes a destroyed object or null.
    fn any(&self, choices: &mut Choices) -> *mut T {
        if self.uses_gone && choices.once_in(12) && !self.gone.is_empty() {
            return self.gone[choices.below(self.gone.len())];
        }
        if choices.once_in(20) {
            return std::ptr::null_mut();
        }
        self.live(choices).unwrap_or(std::ptr::null_mut())
    }

    /// Same as [`Pool::any`], but never null, for functions that are called via a pointer in the
    /// object.
    fn reachable(&self, choices: &mut Choices) -> Option<*mut T> {
        let any = self.any(choices);
        (!any.is_null()).then_some(any)
    }
}

/// Checks an error number. 0 is success.
#[track_caller]
fn check(call: &str, errno: c_int, allowed: &[c_int]) {
    assert!(
        errno == 0 || allowed.contains(&errno),
        "{call}: {}",
        std::io::Error::from_raw_os_error(errno)
    );
}

/// Returns the open descriptors of this process.
fn descriptors() -> Vec<String> {
    let all = fs::read_dir("/proc/self/fd").unwrap();
    let mut all: Vec<String> = all
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let to = fs::read_link(&path).ok()?;
            Some(format!("{} {}", path.display(), to.display()))
        })
        // Ignore the descriptor used for reading the list.
        .filter(|line| !line.contains("/proc/") || !line.ends_with("/fd"))
        .collect();
    all.sort();
    all
}

/// Checks that the devices can still exchange messages.
fn ping_pong() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (cq_one, cq_two) = (one.create_cq(10), two.create_cq(10));
    let sends = IBV_QP_EX_WITH_SEND;
    let a = one.create_qp_ex(&mut one.qp_attr(cq_one, IBV_QPT_RC, sends));
    let b = two.create_qp_ex(&mut two.qp_attr(cq_two, IBV_QPT_RC, sends));
    assert!(!a.is_null() && !b.is_null(), "{}", errno());
    // SAFETY: both are alive.
    unsafe {
        to_rts(a, two.gid(), (*b).qp_num);
        to_rts(b, one.gid(), (*a).qp_num);
    }
    for (from, own, to, peer) in [(a, cq_one, b, cq_two), (b, cq_two, a, cq_one)] {
        post_recv(to, 1, None);
        // SAFETY: all-zero bytes are valid; the queue pair is alive.
        unsafe {
            let mut wr: ibv_send_wr = std::mem::zeroed();
            wr.opcode = IBV_WR_SEND;
            wr.send_flags = IBV_SEND_SIGNALED;
            let mut bad = std::ptr::null_mut();
            let posted = riser_rdma_core_sys::ops::ibv_post_send(from, &raw mut wr, &raw mut bad);
            assert_eq!(posted, 0);
        }
        for cq in [own, peer] {
            let all = completions(cq, 1);
            assert_eq!(all[0].status, IBV_WC_SUCCESS);
        }
    }
    for (device, qp, cq) in [(one, a, cq_one), (two, b, cq_two)] {
        assert_eq!(call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int), 0);
        assert_eq!(call!(ibv_destroy_cq(cq => *mut ibv_cq) -> c_int), 0);
        assert_eq!(call!(ibv_dealloc_pd(device.pd => *mut ibv_pd) -> c_int), 0);
        assert_eq!(
            call!(ibv_close_device(device.context => *mut ibv_context) -> c_int),
            0
        );
    }
}

/// Runs seeds in separate processes.
fn run_in_processes(part: &str) {
    let number = |name: &str, default| {
        let text = env::var(name).ok();
        text.map_or(default, |text| text.parse().expect("a number"))
    };
    let first = number("RISER_SEQUENCES_FROM", 0);
    let end = first + number("RISER_SEQUENCES", SEEDS);
    let mut from = first;
    while from < end {
        let to = end.min(from + SEEDS_OF_A_PROCESS);
        let test = env::current_exe().unwrap();
        let out = Command::new(test)
            .args(["--exact", part, "--nocapture", "--test-threads", "1"])
            .env("SEQUENCES_OF_A_PROCESS", format!("{from} {to}"))
            .env("RISER_TEST_DEVICES", DEVICES)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        let lines: Vec<_> = said.lines().collect();
        let last = lines[lines.len().saturating_sub(40)..].join("\n");
        assert!(out.status.success(), "{part}: {}\n{last}", out.status);
        from = to;
    }
}

/// Runs the seeds of this process, if it was started for this purpose.
fn run_seeds(mut sequence: impl FnMut(u64)) {
    let Ok(range) = env::var("SEQUENCES_OF_A_PROCESS") else {
        return;
    };
    let (from, to) = range.split_once(' ').unwrap();
    let (from, to): (u64, u64) = (from.parse().unwrap(), to.parse().unwrap());
    // Devices opened by the library for identifiers stay open.
    let devices = call!(rdma_get_devices(std::ptr::null_mut() => *mut c_int)
        -> *mut *mut ibv_context);
    call!(rdma_free_devices(devices => *mut *mut ibv_context));
    let mut before = None;
    for seed in from..to {
        eprintln!("seed {seed}");
        // SAFETY: this only changes a timer, whose signal terminates the process.
        unsafe { libc::alarm(SECONDS) };
        let start = Instant::now();
        sequence(seed);
        ping_pong();
        eprintln!("seed {seed} took {:?}", start.elapsed());
        // The first seed opens descriptors that the library keeps.
        let now = descriptors();
        let before = before.get_or_insert_with(|| now.clone());
        if now.len() > before.len() {
            // The peer of an aborted connection may not have closed it yet.
            std::thread::sleep(Duration::from_millis(500));
            let now = descriptors();
            assert!(
                now.len() <= before.len(),
                "seed {seed}: {before:#?} became {now:#?}"
            );
        }
    }
}

#[test]
fn verbs_in_any_order() {
    run_in_processes("run_verbs_sequences");
}

/// Runs in a separate process, see above.
#[test]
fn run_verbs_sequences() {
    run_seeds(verbs::run);
}

#[test]
fn connections_in_any_order() {
    run_in_processes("run_connection_sequences");
}

/// Runs in a separate process, see above.
#[test]
fn run_connection_sequences() {
    run_seeds(cm::run);
}
