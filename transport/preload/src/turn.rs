//! Whose turn it is to listen at a port.
//!
//! The rsockets of clients say nothing of the TCP connections that they belong to, but their hosts. So one
//! process of a server listens at its port at a time, and its client has a moment to connect.
//!
//! - **Hosts take turns.** A process waits for its turn among those with clients at the same host, and only
//!   then among those of its port. So a host that opens many connections is before others once, not
//!   many times.
//! - **Patience runs out.** A host that has let the time pass, or much of it, gets half as much at its next turn,
//!   unless a client of its connects, or a minute passes. So do all hosts of a port after the second one of them,
//!   until any client connects: many that stay silent are not each waited for in full.
//! - **Those who are stopped are passed over.** A process that has its turn for much longer than its client has,
//!   by a signal or in a debugger, keeps those behind it waiting for that time only. Where it listens it still
//!   has the port, so these stay with TCP: the first one after a moment, and the others at once. Where all of
//!   them are paused, no time passes.
//!
//! Processes of a server that are several users' have no turns among them: to each other they are as another program at
//! the port.
//!
//! All is kept in a file of the user, at places that ports and hosts have there. Each place has a queue: a process
//! draws a number, locks the byte of that number, and has its turn when no byte of a lower number is locked.
//! Ports of different servers have nothing in common. The kernel releases the locks of a process that is killed,
//! since no child has its file: it would have the locks as well.
//!
//! A host with IPv6 has all addresses of its network (64 bits), so these take turns as one.

use std::ffi::{c_int, c_long};
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::private::Private;
use crate::watch::{LOOK, Watch};
use crate::{config, errno, real};

/// Times that patience is halved: what is left is enough for a client that is there.
const MAX_HALVINGS: u32 = 3;

/// Time after which a host, or a port, has all of it again.
const MEMORY: Duration = Duration::from_secs(60);

/// Multiple of the patience for which a process waits for another one that does not go on.
const STOPPED: u32 = 4;

/// Ports, and places for the hosts of a port's clients. Hosts may share one.
const PORTS: u64 = 1 << 16;
const HOSTS: u64 = 64;

/// Most times that are counted.
const MAX_PASSED: u64 = MAX_HALVINGS as u64 + 1;

/// Bytes of a place, which has five words: the seconds of the time when a host, or one at a port, let its time
/// pass, with how many times that was in the lowest byte; the next number of the queue; a count by which a
/// process that has the turn of its host shows that it goes on; the first number that was not passed over; and the
/// seconds of the time when a process could not have its port, 0 since one could.
const PLACE: u64 = 40;
const NUMBER: u64 = 8;
const BEAT: u64 = 16;
const PASSED_OVER: u64 = 24;
const OCCUPIED: u64 = 32;

/// Number of this layout: another one is in a file of another name, for processes with an older library may run.
const LAYOUT: u32 = 3;

/// Where the queues begin, behind the words of all places, and the bytes of each. They are locked only.
const QUEUES: u64 = PORTS * (1 + HOSTS) * PLACE;
const QUEUE: u64 = 1 << 40;

/// Most [`LOOK`]s between two looks at a queue: one for each number that is before one's own.
const MAX_LOOKS: u64 = 20;

/// The turns of a user's processes.
pub(crate) struct Turns {
    path: String,
    /// Longest wait for a client that was asked to connect.
    patience: Duration,
}

/// A turn, which ends when it is dropped.
pub(crate) struct Turn {
    /// `None` where there is no file: processes then have no turns, and each waits for the port while others have it.
    file: Option<Queues>,
    /// Places of the host and of the port.
    places: [u64; 2],
    /// Times that the host, and hosts of the port that were new, have let pass.
    passed: [u64; 2],
    /// Longest wait for any client.
    longest: Duration,
}

impl Turns {
    pub(crate) fn of_user() -> Self {
        // SAFETY: the call cannot fail.
        let user = unsafe { libc::geteuid() };
        Self {
            path: format!("/dev/shm/riser-rsocket-queues-{LAYOUT}.{user}"),
            patience: config::patience(),
        }
    }

    /// Waits for the turn of a process whose client is at `host`.
    pub(crate) fn take(&self, port: u16, host: IpAddr) -> Turn {
        let port = u64::from(port);
        // Behind the places of ports.
        let host = PORTS + port * HOSTS + place(host);
        let limit = self.patience * STOPPED;
        let file = Queues::open(&self.path)
            .filter(|file| file.wait(host, None, limit) && file.wait(port, Some(host), limit));
        let places = [host, port].map(|place| place * PLACE);
        let passed = |place| file.as_ref().map_or(0, |file| passed(&file.0, place));
        let passed = places.map(passed);
        Turn {
            file,
            places,
            passed,
            longest: self.patience,
        }
    }
}

impl Turn {
    /// Time that the client has.
    pub(crate) fn patience(&self) -> Duration {
        let [host, port] = self.passed;
        let halvings = host.max(port.saturating_sub(1));
        self.longest / (1 << halvings.min(MAX_HALVINGS.into()))
    }

    /// Time in which the port may become free. A process that is out of turn has it for a moment; what has had it for
    /// longer within the last minute, such as one that is stopped or another program, is not waited for again. Without
    /// turns, one of the server's has it for as long as its client may take.
    pub(crate) fn wait_for_port(&self) -> Duration {
        let Some(Queues(file)) = &self.file else {
            return self.longest;
        };
        let is_occupied = now().abs_diff(word(file, self.places[1] + OCCUPIED)) < MEMORY.as_secs();
        let wait = self.longest / (1 << MAX_HALVINGS);
        if is_occupied { Duration::ZERO } else { wait }
    }

    /// Notes whether the process has the port.
    pub(crate) fn note_port(&self, is_had: bool) {
        let Some(Queues(file)) = &self.file else {
            return;
        };
        let at = self.places[1] + OCCUPIED;
        let since = if is_had { 0 } else { now() };
        if word(file, at) != since {
            // Where it fails, the next one waits.
            set_word(file, at, since);
        }
    }

    /// Notes whether the client has connected, or has let its time pass. One that says soon that it has no
    /// rsocket has kept no other waiting; one that goes away just before its time is over has.
    pub(crate) fn note(&self, is_connected: bool, after: Duration) {
        if !is_connected && after < self.longest / (1 << MAX_HALVINGS) {
            return;
        }
        let Some(Queues(file)) = &self.file else {
            return;
        };
        let [host, port] = self.passed;
        let now_passed = match is_connected {
            true => [0, 0],
            // A host counts once.
            false => [host + 1, port + u64::from(host == 0)],
        };
        for ((place, before), after) in self.places.iter().zip(self.passed).zip(now_passed) {
            if before != 0 || after != 0 {
                // Where it fails, the next one has to wait longer.
                set_word(file, *place, now() << 8 | after.min(MAX_PASSED));
            }
        }
    }
}

/// The file. Its locks are those of its descriptor, which are released with it.
struct Queues(Private);

impl Drop for Queues {
    fn drop(&mut self) {
        // One that was made without handlers of `fork` may have the file as well until it calls `exec`.
        set_lock(&self.0, libc::F_UNLCK, 0..0);
    }
}

impl Queues {
    /// The file, where it is this user's and has no other name.
    fn open(path: &str) -> Option<Self> {
        let file = Private::open(|| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
            options.mode(0o600).custom_flags(flags).open(path).ok()
        })?;
        // SAFETY: the call cannot fail.
        let user = unsafe { libc::geteuid() };
        let is_ours = file
            .metadata()
            .is_ok_and(|file| file.is_file() && file.uid() == user && file.nlink() == 1);
        is_ours.then(|| Self(file))
    }

    /// Waits for the turn at a place, with `limit` for each of those before it that does not go on. At a place where
    /// it has its turn already it shows meanwhile that it does. False without a lock.
    fn wait(&self, place: u64, shows: Option<u64>, limit: Duration) -> bool {
        let Some(number) = self.draw(place, limit) else {
            return false;
        };
        let own = queue(place) + number;
        let passed_over = place * PLACE + PASSED_OVER;
        let mut seen = None;
        let mut watch = Watch::new(Instant::now());
        // Without those that others behind them have passed over.
        let before = || queue(place) + word(&self.0, passed_over).min(number)..own;
        while let Some(first) = first_locked(&self.0, before()) {
            let now = (first, word(&self.0, place * PLACE + BEAT));
            if seen != Some(now) {
                seen = Some(now);
                watch = Watch::new(Instant::now());
            } else if watch.look(Instant::now()) > limit {
                if !set_word(&self.0, passed_over, first + 1 - queue(place)) {
                    return false;
                }
                continue;
            }
            if let Some(shows) = shows {
                let at = shows * PLACE + BEAT;
                set_word(&self.0, at, word(&self.0, at).wrapping_add(1));
            }
            thread::sleep(LOOK * (own - first).min(MAX_LOOKS) as u32);
        }
        true
    }

    /// Draws a number of a queue, and locks its byte.
    fn draw(&self, place: u64, limit: Duration) -> Option<u64> {
        let at = place * PLACE;
        let mut watch = Watch::new(Instant::now());
        while !set_lock(&self.0, libc::F_WRLCK, at..at + 1) {
            if errno() != libc::EAGAIN || watch.look(Instant::now()) > limit {
                return None;
            }
            thread::sleep(LOOK);
        }
        let number = word(&self.0, at + NUMBER) % QUEUE;
        let byte = queue(place) + number;
        let is_drawn = set_word(&self.0, at + NUMBER, number + 1)
            && set_lock(&self.0, libc::F_WRLCK, byte..byte + 1);
        set_lock(&self.0, libc::F_UNLCK, at..at + 1);
        is_drawn.then_some(number)
    }
}

/// Where the queue of a place begins.
fn queue(place: u64) -> u64 {
    QUEUES + place * QUEUE
}

/// A word of a file, 0 where it has none.
fn word(file: &File, at: u64) -> u64 {
    let mut word = [0; 8];
    let is_read = file.read_exact_at(&mut word, at).is_ok();
    if is_read { u64::from_ne_bytes(word) } else { 0 }
}

/// Writes a word. Answers whether that was done.
fn set_word(file: &File, at: u64, word: u64) -> bool {
    file.write_all_at(&word.to_ne_bytes(), at).is_ok()
}

/// Times that were let pass at a place.
fn passed(file: &File, at: u64) -> u64 {
    let word = word(file, at);
    let is_recent = now().abs_diff(word >> 8) < MEMORY.as_secs();
    if is_recent { word & 0xff } else { 0 }
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

/// The first byte of a range that another descriptor has locked.
fn first_locked(file: &File, mut bytes: Range<u64>) -> Option<u64> {
    let mut first = None;
    // The kernel answers any of them.
    while bytes.start < bytes.end {
        let mut region = region(libc::F_WRLCK, &bytes);
        let argument = (&raw mut region).addr() as c_long;
        // SAFETY: the region is alive.
        let result = unsafe { real::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, argument) };
        if result < 0 || c_int::from(region.l_type) == libc::F_UNLCK {
            break;
        }
        bytes.end = bytes.start.max(region.l_start as u64);
        first = Some(bytes.end);
    }
    first
}

/// Changes the lock of bytes of a file, `0..0` for all, for this descriptor of it and its copies. Answers whether
/// that was done: `EAGAIN` says that another one has locked them.
fn set_lock(file: &File, kind: c_int, bytes: Range<u64>) -> bool {
    let region = region(kind, &bytes);
    let argument = (&raw const region).addr() as c_long;
    // SAFETY: the region is alive.
    unsafe { real::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, argument) == 0 }
}

fn region(kind: c_int, bytes: &Range<u64>) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start as libc::off_t,
        l_len: (bytes.end - bytes.start) as libc::off_t,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    /// Turns of a test alone.
    fn turns(test: &str, patience: Duration) -> Turns {
        let name = format!("riser-preload-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let path = path.to_str().unwrap().to_owned();
        Turns { path, patience }
    }

    impl Drop for Turns {
        fn drop(&mut self) {
            if !self.path.starts_with("/dev/shm/riser-rsocket") {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }

    const PATIENCE: Duration = Duration::from_secs(2);

    /// Times that a client has let pass, or nearly.
    const ALL: Duration = PATIENCE;
    const MUCH: Duration = Duration::from_millis(300);

    #[test]
    fn patience_runs_out_and_comes_back() {
        let turns = turns("patience", PATIENCE);
        let take = || turns.take(0, HOST);
        assert_eq!(take().patience(), Duration::from_secs(2));
        take().note(false, ALL);
        assert_eq!(take().patience(), Duration::from_secs(1));
        for _ in 0..20 {
            take().note(false, ALL);
        }
        assert_eq!(take().patience(), Duration::from_millis(250));
        let other = turns.take(1, HOST);
        assert_eq!(other.patience(), Duration::from_secs(2));
        take().note(true, Duration::ZERO);
        assert_eq!(take().patience(), Duration::from_secs(2));
    }

    #[test]
    fn patience_runs_out_with_those_who_leave_before_their_time_is_over() {
        let turns = turns("leave", PATIENCE);
        let take = || turns.take(0, HOST);
        for ms in [2000, 1000, 500, 250, 250] {
            assert_eq!(take().patience(), Duration::from_millis(ms));
            take().note(false, MUCH);
        }
        take().note(true, Duration::ZERO);
        // One without rsockets speaks at once.
        take().note(false, Duration::from_millis(200));
        assert_eq!(take().patience(), Duration::from_secs(2));
    }

    #[test]
    fn a_port_loses_patience_with_hosts_that_are_new() {
        let turns = turns("new", PATIENCE);
        let hosts = (1..=50).map(|n| IpAddr::from([192, 0, 2, n]));
        let places: BTreeMap<_, _> = hosts.map(|host| (place(host), host)).collect();
        let mut hosts = places.into_values();
        let mut take = || turns.take(5, hosts.next().unwrap());
        for ms in [2000, 2000, 1000, 500, 250, 250] {
            let turn = take();
            assert_eq!(turn.patience(), Duration::from_millis(ms));
            turn.note(false, ALL);
        }
        take().note(true, Duration::ZERO);
        assert_eq!(take().patience(), Duration::from_secs(2));
    }

    #[test]
    fn a_port_that_another_program_has_is_waited_for_once() {
        let turns = turns("port", PATIENCE);
        let others = [10, 11].map(|port| turns.take(port, HOST));
        let [turn, other] = &others;
        assert_eq!(turn.wait_for_port(), Duration::from_millis(250));
        turn.note_port(false);
        assert_eq!(turn.wait_for_port(), Duration::ZERO);
        assert_eq!(other.wait_for_port(), Duration::from_millis(250));
        assert_eq!(turn.patience(), PATIENCE, "no client has let it pass");
        turn.note_port(true);
        assert_eq!(turn.wait_for_port(), Duration::from_millis(250));
    }

    #[test]
    fn processes_without_a_file_wait_for_the_port() {
        let path = "/nonexistent/queues".into();
        let turn = Turns {
            path,
            patience: PATIENCE,
        };
        assert_eq!(turn.take(1, HOST).wait_for_port(), PATIENCE);
    }

    #[test]
    fn one_host_has_a_turn_at_a_time() {
        let turns = turns("one", Duration::from_secs(60));
        let turn = turns.take(2, HOST);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let next = scope.spawn(|| {
                let _turn = turns.take(2, HOST);
                is_over.load(Ordering::Relaxed)
            });
            // Another port's is free.
            turns.take(3, HOST);
            is_over.store(true, Ordering::Relaxed);
            drop(turn);
            assert!(next.join().unwrap(), "after the turn before");
        });
    }

    /// Waits until as many have drawn a number of a queue.
    fn await_numbers(turns: &Turns, place: u64, numbers: u64) {
        let file = File::open(&turns.path).unwrap();
        riser_testkit::eventually("they wait", Duration::from_secs(20), || {
            word(&file, place * PLACE + NUMBER) == numbers
        });
    }

    #[test]
    fn a_host_is_before_others_once() {
        let turns = turns("once", Duration::from_secs(60));
        let other = IpAddr::from([192, 0, 2, 2]);
        assert_ne!(place(HOST), place(other));
        let turn = turns.take(6, HOST);
        let (send, receive) = mpsc::channel();
        thread::scope(|scope| {
            let host = PORTS + 6 * HOSTS + place(HOST);
            for n in 2..5 {
                let (send, turns) = (send.clone(), &turns);
                scope.spawn(move || {
                    let _turn = turns.take(6, HOST);
                    send.send(HOST).unwrap();
                });
                await_numbers(turns, host, n);
            }
            scope.spawn(|| {
                let _turn = turns.take(6, other);
                send.send(other).unwrap();
            });
            await_numbers(&turns, 6, 2);
            drop(turn);
            let order: Vec<_> = receive.iter().take(4).collect();
            assert_eq!(order, [other, HOST, HOST, HOST]);
        });
    }

    #[test]
    fn a_turn_is_over_though_a_copy_has_its_file() {
        let turns = turns("copy", Duration::from_secs(60));
        let turn = turns.take(4, HOST);
        let _copy = turn.file.as_ref().unwrap().0.try_clone().unwrap();
        drop(turn);
        assert!(turns.take(4, HOST).file.is_some());
    }

    #[test]
    fn a_turn_is_over_with_its_process_though_a_child_is_left() {
        let turns = turns("child", Duration::from_secs(60));
        // Handlers of `fork` are there before others' threads need them.
        drop(turns.take(4, HOST));
        let mut ends = [0; 2];
        // SAFETY: there is room for both ends. The children end without the harness, and the second one makes
        // calls only that may be made there.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            let process = libc::fork();
            if process == 0 {
                libc::alarm(60);
                let turn = turns.take(4, HOST);
                let child = libc::fork();
                if child == 0 {
                    libc::alarm(120);
                    libc::close(ends[1]);
                    libc::read(ends[0], [0_u8].as_mut_ptr().cast(), 1);
                    libc::_exit(0);
                }
                libc::_exit(c_int::from(child < 0 || turn.file.is_none()));
            }
            let mut status = 1;
            assert_eq!(libc::waitpid(process, &raw mut status, 0), process);
            assert_eq!(status, 0);
            let start = Instant::now();
            assert!(turns.take(4, HOST).file.is_some());
            assert!(start.elapsed() < Duration::from_secs(60));
            // The child ends.
            for end in ends {
                libc::close(end);
            }
        }
    }

    #[test]
    fn one_that_is_stopped_is_passed_over() {
        let turns = turns("stopped", Duration::from_millis(20));
        let _stopped = turns.take(7, HOST);
        let other = IpAddr::from([192, 0, 2, 2]);
        // Of the same host and of another one; and those behind them are in order.
        for host in [HOST, other] {
            let turn = turns.take(7, host);
            assert!(turn.file.is_some(), "it has its place in the queue");
        }
    }

    #[test]
    fn one_that_is_stopped_keeps_those_behind_it_waiting_once() {
        let turns = turns("stopped-once", Duration::from_millis(500));
        let _stopped = turns.take(9, HOST);
        let place_of_host = PORTS + 9 * HOSTS + place(HOST);
        let start = Instant::now();
        thread::scope(|scope| {
            for n in 2..8 {
                scope.spawn(|| drop(turns.take(9, HOST)));
                await_numbers(&turns, place_of_host, n);
                thread::sleep(Duration::from_millis(100));
            }
        });
        // Two seconds at the host and two at the port; four for each of six otherwise.
        assert!(start.elapsed() < Duration::from_secs(14));
    }

    #[test]
    fn one_that_waits_for_its_port_is_not_passed_over() {
        let turns = turns("waits", Duration::from_secs(1));
        let place_of_host = PORTS + 8 * HOSTS + place(HOST);
        let before = Queues::open(&turns.path).unwrap();
        assert!(before.wait(place_of_host, None, turns.patience));
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let next = scope.spawn(|| {
                let _turn = turns.take(8, HOST);
                is_over.load(Ordering::Relaxed)
            });
            await_numbers(&turns, place_of_host, 2);
            // Longer than the wait for one that is stopped, while it goes on.
            let start = Instant::now();
            while start.elapsed() < turns.patience * (STOPPED + 2) {
                let at = place_of_host * PLACE + BEAT;
                set_word(&before.0, at, word(&before.0, at) + 1);
                thread::sleep(LOOK);
            }
            is_over.store(true, Ordering::Relaxed);
            drop(before);
            assert!(next.join().unwrap());
        });
    }

    #[test]
    fn addresses_of_a_network_are_one_host() {
        let at = |n: u16| place([0x2001, 0xdb8, 0, 1, n, 0, 0, n].into());
        assert!((0..100).all(|n| at(n) == at(0)));
        let others = (0..100).map(|n| place([0x2001, 0xdb8, 0, n, 0, 0, 0, 1].into()));
        assert!(others.collect::<BTreeSet<_>>().len() > 1);
    }
}
