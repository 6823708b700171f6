//! Sequences of calls: any order, with arguments of all kinds, on two devices that talk to each other.
//!
//! A seed is a sequence. A process runs some of them, one after the other, and has a time for each, so a
//! call that ends the process or never returns is known by its seed. Errors are checked against those
//! that rdma-core has for the call. After each sequence all that it has made is destroyed, which must
//! succeed, no descriptor may be left, and messages must still pass between the devices.
//!
//! `RISER_SEQUENCES=N` runs as many seeds of each kind, `RISER_SEQUENCES_FROM=SEED` begins at another
//! one, and `RISER_SEQUENCES_SHOW=1` prints each call before it is made.

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

/// Seeds of each kind, unless the environment says otherwise.
const SEEDS: u64 = 12;

/// Seeds that a process runs.
const SEEDS_OF_A_PROCESS: u64 = 6;

/// Longest time of a seed, in seconds: it takes some tenths of one.
const SECONDS: u32 = 40;

/// Devices of the sequences.
const DEVICES: &str = "riser0=127.0.43.1,riser1=127.0.43.2";

/// Their addresses.
const ADDRESSES: [[u8; 4]; 2] = [[127, 0, 43, 1], [127, 0, 43, 2]];

/// Where choices come from.
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

    /// One time in `n`.
    fn once_in(&mut self, n: u32) -> bool {
        self.rng.u32(0..n) == 0
    }

    fn below(&mut self, n: usize) -> usize {
        self.rng.usize(0..n)
    }

    /// One of some values.
    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.rng.usize(0..all.len())]
    }

    /// A count: often a usual one, now and then one that is wrong or much too large.
    fn count(&mut self) -> u32 {
        if self.once_in(4) {
            return self.of(&[0, 1 << 16, 1 << 24, i32::MAX as u32, u32::MAX, 1 << 31]);
        }
        self.of(&[1, 2, 3, 7, 16, 64])
    }

    /// Flags: some of those that exist, now and then of those that do not.
    fn flags(&mut self, known: u32) -> u32 {
        let some = self.rng.u32(..) & known;
        if self.once_in(10) {
            some | 1 << self.rng.u32(0..32)
        } else {
            some
        }
    }

    /// Shows a call that is about to be made.
    fn show(&self, call: &str) {
        if self.shows {
            eprintln!("  {call}");
        }
    }
}

/// Objects of a kind, and those that are gone.
struct Pool<T> {
    live: Vec<*mut T>,
    gone: Vec<*mut T>,
    /// Pointers to objects that are gone are used. Their memory may be that of another thread's object,
    /// or of one that the library has made, so that is for a thread by itself.
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
            // Its memory may have been another's.
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

    /// An object that is alive, or none.
    fn live(&self, choices: &mut Choices) -> Option<*mut T> {
        (!self.live.is_empty()).then(|| self.live[choices.below(self.live.len())])
    }

    /// Most often one that is alive, now and then one that is gone, or null.
    fn any(&self, choices: &mut Choices) -> *mut T {
        if self.uses_gone && choices.once_in(12) && !self.gone.is_empty() {
            return self.gone[choices.below(self.gone.len())];
        }
        if choices.once_in(20) {
            return std::ptr::null_mut();
        }
        self.live(choices).unwrap_or(std::ptr::null_mut())
    }

    /// The same, but not null: what a program reaches through a pointer of its object.
    fn reachable(&self, choices: &mut Choices) -> Option<*mut T> {
        let any = self.any(choices);
        (!any.is_null()).then_some(any)
    }
}

/// Checks an error number: 0 is none.
#[track_caller]
fn check(call: &str, errno: c_int, allowed: &[c_int]) {
    assert!(
        errno == 0 || allowed.contains(&errno),
        "{call}: {}",
        std::io::Error::from_raw_os_error(errno)
    );
}

/// Descriptors that this process has.
fn descriptors() -> Vec<String> {
    let all = fs::read_dir("/proc/self/fd").unwrap();
    let mut all: Vec<String> = all
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let to = fs::read_link(&path).ok()?;
            Some(format!("{} {}", path.display(), to.display()))
        })
        // The one that reads the list.
        .filter(|line| !line.contains("/proc/") || !line.ends_with("/fd"))
        .collect();
    all.sort();
    all
}

/// Messages between the devices still pass.
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

/// Runs seeds in processes of their own.
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

/// Runs the seeds of a process, if this is one.
fn run_seeds(mut sequence: impl FnMut(u64)) {
    let Ok(range) = env::var("SEQUENCES_OF_A_PROCESS") else {
        return;
    };
    let (from, to) = range.split_once(' ').unwrap();
    let (from, to): (u64, u64) = (from.parse().unwrap(), to.parse().unwrap());
    // What the library opens for identifiers stays open.
    let devices = call!(rdma_get_devices(std::ptr::null_mut() => *mut c_int)
        -> *mut *mut ibv_context);
    call!(rdma_free_devices(devices => *mut *mut ibv_context));
    let mut before = None;
    for seed in from..to {
        eprintln!("seed {seed}");
        // SAFETY: the call changes a timer only, whose signal ends the process.
        unsafe { libc::alarm(SECONDS) };
        let start = Instant::now();
        sequence(seed);
        ping_pong();
        eprintln!("seed {seed} took {:?}", start.elapsed());
        // The first one opens what the library keeps.
        let now = descriptors();
        let before = before.get_or_insert_with(|| now.clone());
        if now.len() > before.len() {
            // The peer of a connection that was given up may still be on its way.
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
    run_in_processes("verbs_of_a_process");
}

/// Runs in a process of its own, see above.
#[test]
fn verbs_of_a_process() {
    run_seeds(verbs::run);
}

#[test]
fn connections_in_any_order() {
    run_in_processes("connections_of_a_process");
}

/// Runs in a process of its own, see above.
#[test]
fn connections_of_a_process() {
    run_seeds(cm::run);
}
