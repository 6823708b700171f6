//! Whose turn it is to listen at a port.
//!
//! The rsockets of clients say nothing of the TCP connections that they belong to, but their hosts. So one
//! process of a server listens at its port at a time, and its client has a moment to connect.
//!
//! - **Hosts take turns.** A process waits for its turn among those with clients at the same host, and only
//!   then among those of its port. So a host that opens many connections is before others once, not
//!   many times.
//! - **Patience runs out.** A host that has let the time pass gets half as much at its next turn, unless a
//!   client of its connects, or a minute passes. So do all hosts of a port after the second one of them, until
//!   any client connects: many that stay silent are not each waited for in full.
//!
//! Both are kept in a file of the user, as locks and words at places that ports and hosts have there. Ports
//! of different servers have nothing in common. The kernel releases the locks of a process that is
//! killed.
//!
//! A host with IPv6 has all addresses of its network (64 bits), so these take turns as one.

use std::ffi::{c_int, c_long};
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{errno, real};

/// Longest wait for a client that was asked to connect.
const PATIENCE: Duration = Duration::from_secs(2);

/// Times that it is halved: what is left is enough for a client that is there.
const MAX_HALVINGS: u64 = 3;

/// Time after which a host, or a port, has all of it again.
const MEMORY: Duration = Duration::from_secs(60);

/// Places for the hosts of a port's clients. Hosts may share one.
const HOSTS: u64 = 64;

/// Most times that are counted.
const MAX_PASSED: u64 = MAX_HALVINGS + 1;

/// Bytes of a place: the seconds of the time when a host, or one at a port, let its time pass, and how many
/// times that was in the lowest byte.
const PLACE: u64 = 8;

/// A turn, which ends when it is dropped.
pub(crate) struct Turn {
    /// `None` where there is no file: processes then are in each other's way, and no worse.
    file: Option<File>,
    /// Places of the host and of the port.
    places: [u64; 2],
    /// Times that the host, and hosts of the port that were new, have let pass.
    passed: [u64; 2],
}

impl Turn {
    /// Waits for the turn of a process whose client is at `host`.
    pub(crate) fn take(port: u16, host: IpAddr) -> Self {
        let port = u64::from(port);
        // Behind the places of ports.
        let host = (1 << 16) + port * HOSTS + place(host);
        let places = [host, port].map(|place| place * PLACE);
        let file = open().filter(|file| places.iter().all(|place| lock(file, *place)));
        let passed = |place| file.as_ref().map_or(0, |file| passed(file, place));
        let passed = places.map(passed);
        Self {
            file,
            places,
            passed,
        }
    }

    /// Time that the client has.
    pub(crate) fn patience(&self) -> Duration {
        let [host, port] = self.passed;
        PATIENCE / (1 << host.max(port.saturating_sub(1)).min(MAX_HALVINGS))
    }

    /// Notes whether the client has connected or let its time pass.
    pub(crate) fn note(&self, is_connected: bool) {
        let Some(file) = &self.file else { return };
        let [host, port] = self.passed;
        let now_passed = match is_connected {
            true => [0, 0],
            // A host counts once.
            false => [host + 1, port + u64::from(host == 0)],
        };
        for ((place, before), after) in self.places.iter().zip(self.passed).zip(now_passed) {
            if before != 0 || after != 0 {
                let word = now() << 8 | after.min(MAX_PASSED);
                // Where it fails, the next one has to wait longer.
                let _ = file.write_all_at(&word.to_ne_bytes(), *place);
            }
        }
    }
}

/// Times that were let pass at a place.
fn passed(file: &File, place: u64) -> u64 {
    let mut word = [0; PLACE as usize];
    let is_read = file.read_exact_at(&mut word, place).is_ok();
    let word = u64::from_ne_bytes(word);
    let is_recent = is_read && now().abs_diff(word >> 8) < MEMORY.as_secs();
    if is_recent { word & 0xff } else { 0 }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A child that another thread has forked meanwhile has the file as well: closing it here would
        // leave the child the locks.
        if let Some(file) = &self.file {
            set_lock(file, libc::F_UNLCK, 0..0);
        }
    }
}

/// The place of a host among those of a port. Any address of an IPv6 network may be one host's.
fn place(host: IpAddr) -> u64 {
    let mut hasher = DefaultHasher::new();
    match host {
        IpAddr::V4(ip) => ip.hash(&mut hasher),
        IpAddr::V6(ip) => ip.segments()[..4].hash(&mut hasher),
    }
    hasher.finish() % HOSTS
}

/// Seconds of the time of day.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

/// The file, where it is this user's and has no other name.
fn open() -> Option<File> {
    // SAFETY: the call cannot fail.
    let user = unsafe { libc::geteuid() };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(format!("/dev/shm/riser-rsocket-turns.{user}"))
        .ok()?;
    let is_ours = file
        .metadata()
        .is_ok_and(|file| file.is_file() && file.uid() == user && file.nlink() == 1);
    is_ours.then_some(file)
}

/// Locks a byte of a file for this descriptor of it, and its copies.
fn lock(file: &File, at: u64) -> bool {
    set_lock(file, libc::F_WRLCK, at..at + 1)
}

/// Changes the lock of bytes of a file, `0..0` for all, when that is possible; false for an error.
fn set_lock(file: &File, kind: c_int, bytes: Range<u64>) -> bool {
    let region = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start as libc::off_t,
        l_len: (bytes.end - bytes.start) as libc::off_t,
        l_pid: 0,
    };
    let argument = (&raw const region).addr() as c_long;
    loop {
        // SAFETY: the region is alive.
        let result: c_int = unsafe { real::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, argument) };
        // A signal is no reason to be out of turn.
        if result == 0 || errno() != libc::EINTR {
            return result == 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn patience_runs_out_and_comes_back() {
        // A port that no server has.
        let take = || Turn::take(0, [192, 0, 2, 1].into());
        take().note(true);
        assert_eq!(take().patience(), Duration::from_secs(2));
        take().note(false);
        assert_eq!(take().patience(), Duration::from_secs(1));
        for _ in 0..20 {
            take().note(false);
        }
        assert_eq!(take().patience(), Duration::from_millis(250));
        let other = Turn::take(1, [192, 0, 2, 1].into());
        assert_eq!(other.patience(), Duration::from_secs(2));
        take().note(true);
        assert_eq!(take().patience(), Duration::from_secs(2));
    }

    #[test]
    fn a_port_loses_patience_with_hosts_that_are_new() {
        let hosts = (1..=50).map(|n| IpAddr::from([192, 0, 2, n]));
        let places: BTreeMap<_, _> = hosts.map(|host| (place(host), host)).collect();
        // What another run has left.
        for host in places.values() {
            Turn::take(5, *host).note(true);
        }
        let mut hosts = places.into_values();
        let mut take = || Turn::take(5, hosts.next().unwrap());
        for ms in [2000, 2000, 1000, 500, 250, 250] {
            let turn = take();
            assert_eq!(turn.patience(), Duration::from_millis(ms));
            turn.note(false);
        }
        take().note(true);
        assert_eq!(take().patience(), Duration::from_secs(2));
    }

    #[test]
    fn one_host_has_a_turn_at_a_time() {
        let turn = Turn::take(2, [192, 0, 2, 1].into());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                let _turn = Turn::take(2, [192, 0, 2, 1].into());
                is_over.load(Ordering::Relaxed)
            });
            // Another port's is free.
            Turn::take(3, [192, 0, 2, 1].into());
            is_over.store(true, Ordering::Relaxed);
            drop(turn);
            assert!(next.join().unwrap(), "after the turn before");
        });
    }

    #[test]
    fn a_turn_is_over_though_a_child_has_its_file() {
        let turn = Turn::take(4, [192, 0, 2, 1].into());
        // As `fork` copies it.
        let _copy = turn.file.as_ref().unwrap().try_clone().unwrap();
        drop(turn);
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let _turn = Turn::take(4, [192, 0, 2, 1].into());
            send.send(()).unwrap();
        });
        let next = receive.recv_timeout(Duration::from_secs(5));
        assert!(next.is_ok(), "the next one waits for the child's end");
    }

    #[test]
    fn addresses_of_a_network_are_one_host() {
        let at = |n: u16| place([0x2001, 0xdb8, 0, 1, n, 0, 0, n].into());
        assert!((0..100).all(|n| at(n) == at(0)));
        let others = (0..100).map(|n| place([0x2001, 0xdb8, 0, n, 0, 0, 0, 1].into()));
        assert!(others.collect::<BTreeSet<_>>().len() > 1);
    }
}
