//! Tests of the ring with files, sockets and threads. Tests that do not depend on the host or its
//! threads also run on a simulated kernel ([`both`]).

use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};

use riser_testkit::eventually;
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::simulated::{Disk, Listener, Peer, Socket};
use crate::{
    Durability, Fallocate, MailSender, Offload, Receive, SyncKind, SystemThreads, mailbox,
};

fn ring(capacity: u32) -> Ring {
    Ring::new(RingConfig {
        capacity,
        ..RingConfig::default()
    })
    .unwrap()
}

/// Timeout for events that are expected to arrive.
const PATIENCE: Duration = Duration::from_secs(60);

/// Parks with a timeout, because a park without a timeout would hang if nothing wakes it.
#[track_caller]
fn park(ring: &mut Ring) {
    let begin = Instant::now();
    ring.park(Some(PATIENCE)).unwrap();
    assert!(begin.elapsed() < PATIENCE, "nothing has ended the park");
}

/// Waits for exactly `n` completions.
fn collect(ring: &mut Ring, n: usize) -> Vec<Completion> {
    collect_after(ring, n, || {})
}

fn collect_after(ring: &mut Ring, n: usize, complete: impl Fn()) -> Vec<Completion> {
    let mut out = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(20);
    while out.len() < n {
        assert!(
            Instant::now() < deadline,
            "only {} of {n} completions",
            out.len()
        );
        ring.park(Some(Duration::from_millis(100))).unwrap();
        complete();
        ring.reap(&mut out).unwrap();
    }
    assert_eq!(out.len(), n);
    out
}

/// A ring, and the simulated kernel if it doesn't use the host's.
struct Rig {
    ring: Ring,
    kernel: Option<simulated::Kernel>,
}

/// The far end of a connection.
enum Far {
    Host(UnixStream),
    Simulated(Peer),
}

/// Runs a test on a ring of the host and on a simulated ring.
fn both(config: RingConfig, test: impl Fn(&mut Rig)) {
    let ring = Ring::new(config).unwrap();
    test(&mut Rig { ring, kernel: None });
    let (ring, kernel) = Ring::simulated(config).unwrap();
    test(&mut Rig {
        ring,
        kernel: Some(kernel),
    });
}

fn of(capacity: u32) -> RingConfig {
    RingConfig {
        capacity,
        ..RingConfig::default()
    }
}

impl Rig {
    fn file(&self, len: u64) -> Handle {
        match self.kernel {
            None => temporary_file(len),
            Some(_) => Disk::new(len).open().into(),
        }
    }

    fn pair(&self) -> (Handle, Far) {
        match self.kernel {
            None => {
                let (a, b) = UnixStream::pair().unwrap();
                (OwnedFd::from(a).into(), Far::Host(b))
            }
            Some(_) => {
                let (socket, peer) = Socket::connected(anywhere());
                (socket.into(), Far::Simulated(peer))
            }
        }
    }

    fn collect(&mut self, n: usize) -> Vec<Completion> {
        let kernel = self.kernel.clone();
        collect_after(&mut self.ring, n, || {
            if let Some(kernel) = &kernel {
                kernel.complete_all();
            }
        })
    }
}

impl Far {
    fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::Host(stream) => stream.write_all(bytes).unwrap(),
            Self::Simulated(peer) => assert_eq!(peer.deliver(bytes), bytes.len()),
        }
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        match self {
            Self::Host(stream) => {
                let mut bytes = vec![0; len];
                stream.read_exact(&mut bytes).unwrap();
                bytes
            }
            Self::Simulated(peer) => peer.read_bytes(len),
        }
    }

    fn close(self) {
        if let Self::Simulated(peer) = self {
            peer.close();
        }
    }
}

fn anywhere() -> SocketAddr {
    ([192, 0, 2, 1], 50_000).into()
}

fn temporary_file(len: u64) -> Handle {
    let file = File::from(memfd_create("ring", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    OwnedFd::from(file).into()
}

fn pieces(m: &Memory, ranges: &[(usize, usize)]) -> Vec<MemSlice> {
    ranges
        .iter()
        .map(|&(a, b)| m.slice(a..b).unwrap())
        .collect()
}

#[test]
fn registered_and_unregistered_transfers_match() {
    both(of(8), |rig| {
        let plain = rig.file(1 << 20);
        let fixed = rig.ring.register_file(&plain).unwrap();
        assert!(fixed.is_registered() && !plain.is_registered());
        let registered = Memory::new(16384).unwrap();
        rig.ring.register_memory(&registered).unwrap();
        rig.ring.register_memory(&registered).unwrap();
        let other = Memory::new(16384).unwrap();
        for (round, (file, memory)) in [
            (&plain, &registered),
            (&plain, &other),
            (&fixed, &registered),
            (&fixed, &other),
        ]
        .into_iter()
        .enumerate()
        {
            let text: Vec<u8> = (0..6000).map(|i| (i * 7 + round) as u8).collect();
            memory.write(0, &text);
            for from in [
                pieces(memory, &[(0, 6000)]),
                pieces(memory, &[(0, 100), (100, 1000), (1000, 6000)]),
            ] {
                rig.ring
                    .submit_write(file, 777, &from, Durability::Durable, Token(1))
                    .unwrap();
                let done = rig.collect(1);
                assert_eq!((done[0].token, done[0].result), (Token(1), 6000));
                memory.fill(8192, 8192, 0);
                let into = pieces(memory, &[(8192, 9000), (10000, 15192)]);
                rig.ring.submit_read(file, 777, &into, Token(2)).unwrap();
                assert_eq!(rig.collect(1)[0].outcome().unwrap(), 6000);
                let mut back = vec![0; 6000];
                memory.read(8192, &mut back[..808]);
                memory.read(10000, &mut back[808..]);
                assert_eq!(back, text);
            }
        }
    });
}

#[test]
fn full_ring_refuses_and_recovers() {
    both(of(4), |rig| {
        let (socket, _far) = rig.pair();
        let m = Memory::new(4096).unwrap();
        for i in 0..4 {
            rig.ring
                .submit_recv(&socket, &[m.whole()], Receive::Some, Token(i))
                .unwrap();
        }
        assert!(rig.ring.is_full());
        assert_eq!(
            rig.ring
                .submit_recv(&socket, &[m.whole()], Receive::Some, Token(9)),
            Err(SubmitError::Full)
        );
        assert_eq!(rig.ring.cancel(Token(2)).unwrap(), 1);
        let done = rig.collect(1);
        assert_eq!(
            (done[0].token, done[0].result),
            (Token(2), -libc::ECANCELED)
        );
        assert!(!rig.ring.is_full());
        assert_eq!(rig.ring.cancel(Token(77)).unwrap(), 0);
    });
}

#[test]
fn empty_and_oversized_lists_are_refused() {
    let mut ring = Ring::new(RingConfig {
        max_slices: 2,
        ..RingConfig::default()
    })
    .unwrap();
    let file = temporary_file(4096);
    let m = Memory::new(4096).unwrap();
    let list = pieces(&m, &[(0, 1), (2, 3), (4, 5)]);
    assert_eq!(
        ring.submit_read(&file, 0, &list, Token(0)),
        Err(SubmitError::TooManySlices { max: 2 })
    );
    assert_eq!(
        ring.submit_read(&file, 0, &pieces(&m, &[(3, 3)]), Token(0)),
        Err(SubmitError::Length { len: 0 })
    );
    assert_eq!(ring.in_flight(), 0);
    assert!(matches!(
        Ring::new(RingConfig {
            capacity: 0,
            ..RingConfig::default()
        }),
        Err(RingError::Capacity { requested: 0, .. })
    ));
}

#[test]
fn wake_interrupts_park_once() {
    let mut ring = ring(4);
    let waker = ring.waker();
    waker.wake();
    waker.wake();
    let mut out = Vec::new();
    park(&mut ring);
    assert!(ring.reap(&mut out).unwrap().woken);
    assert!(!ring.reap(&mut out).unwrap().woken);
    for _ in 0..100 {
        let w = waker.clone();
        let t = std::thread::spawn(move || w.wake());
        while !ring.reap(&mut out).unwrap().woken {
            park(&mut ring);
        }
        t.join().unwrap();
    }
    assert!(out.is_empty() && ring.in_flight() == 0);
    let before = Instant::now();
    ring.park(Some(Duration::from_millis(20))).unwrap();
    assert!(before.elapsed() >= Duration::from_millis(20));
}

#[test]
fn messages_from_multiple_threads_arrive() {
    let mut ring = ring(4);
    let (tx, mut rx) = mailbox(8, ring.waker());
    let threads: Vec<_> = (0..4u32)
        .map(|t| {
            let tx: MailSender<u32> = tx.clone();
            std::thread::spawn(move || {
                for i in 0..500 {
                    tx.send_blocking(t * 1000 + i).unwrap();
                }
            })
        })
        .collect();
    let mut seen = Vec::new();
    let mut out = Vec::new();
    while seen.len() < 2000 {
        park(&mut ring);
        ring.reap(&mut out).unwrap();
        seen.extend(std::iter::from_fn(|| rx.poll_message()));
    }
    for t in threads {
        t.join().unwrap();
    }
    for t in 0..4 {
        let of_thread: Vec<_> = seen.iter().copied().filter(|m| m / 1000 == t).collect();
        assert_eq!(
            of_thread,
            (0..500).map(|i| t * 1000 + i).collect::<Vec<_>>()
        );
    }
    drop(rx);
    assert!(matches!(tx.send(1), Err(crate::SendError::Closed(1))));
}

#[test]
fn mailbox_is_bounded() {
    let ring = ring(4);
    let (tx, mut rx) = mailbox(2, ring.waker());
    tx.send('a').unwrap();
    tx.send('b').unwrap();
    assert!(matches!(tx.send('c'), Err(crate::SendError::Full('c'))));
    assert_eq!(rx.poll_message(), Some('a'));
    tx.send('d').unwrap();
}

/// Returns a listening socket with a connection that has not been accepted yet.
fn connect(rig: &Rig) -> (Handle, Far) {
    if rig.kernel.is_some() {
        let listener = Listener::new(([192, 0, 2, 2], 3260).into());
        let peer = listener.connect(anywhere()).unwrap();
        return (listener.into(), Far::Simulated(peer));
    }
    let dir = std::env::temp_dir().join(format!("riser-ring-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("socket");
    let listener = OwnedFd::from(UnixListener::bind(&path).unwrap());
    let peer = UnixStream::connect(&path).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    (listener.into(), Far::Host(peer))
}

#[test]
fn sockets_accept_receive_and_send() {
    both(of(8), |rig| {
        let (listener, mut peer) = connect(rig);
        rig.ring.submit_accept(&listener, Token(1)).unwrap();
        let server = rig.collect(1)[0].socket.take().unwrap();

        let m = Memory::new(8192).unwrap();
        let into = pieces(&m, &[(0, 3), (10, 17)]);
        rig.ring
            .submit_recv(&server, &into, Receive::All, Token(2))
            .unwrap();
        peer.write(b"hello");
        let wait = Some(Duration::from_millis(5));
        rig.ring.park(wait).unwrap();
        rig.collect(0);
        peer.write(b"world");
        assert_eq!(rig.collect(1)[0].outcome().unwrap(), 10);
        assert_eq!(into[0].to_vec(), b"hel");
        assert_eq!(into[1].to_vec(), b"loworld");

        rig.ring.submit_send(&server, &into, Token(3)).unwrap();
        assert_eq!(rig.collect(1)[0].outcome().unwrap(), 10);
        assert_eq!(peer.read(10), b"helloworld");

        peer.close();
        rig.ring
            .submit_recv(&server, &into, Receive::Some, Token(4))
            .unwrap();
        assert_eq!(rig.collect(1)[0].result, 0);
        server.shut_down().unwrap();
        rig.ring.submit_send(&server, &into, Token(5)).unwrap();
        assert_eq!(rig.collect(1)[0].result, -libc::EPIPE);
    });
}

#[test]
fn shutdown_completes_receive() {
    both(of(8), |rig| {
        let (socket, far) = rig.pair();
        let m = Memory::new(4096).unwrap();
        rig.ring
            .submit_recv(&socket, &[m.whole()], Receive::Some, Token(1))
            .unwrap();
        rig.ring.submit().unwrap();
        socket.shut_down().unwrap();
        assert_eq!(rig.collect(1)[0].result, 0);
        far.close();
    });
}

#[test]
fn poll_reports_arrivals_until_cancelled() {
    both(of(4), |rig| {
        let (polled, mut far) = rig.pair();
        let events = libc::POLLIN;
        rig.ring.submit_poll(&polled, events, Token(5)).unwrap();
        let m = Memory::new(4096).unwrap();
        for _ in 0..3 {
            far.write(b"x");
            let done = rig.collect(1);
            assert!(done[0].more && done[0].result & i32::from(libc::POLLIN) != 0);
            let byte = [m.slice(0..1).unwrap()];
            rig.ring
                .submit_recv(&polled, &byte, Receive::Some, Token(6))
                .unwrap();
            assert_eq!(rig.collect(1)[0].outcome().unwrap(), 1);
        }
        assert_eq!(rig.ring.cancel(Token(5)).unwrap(), 1);
        let done = rig.collect(1);
        assert!(!done[0].more && done[0].result == -libc::ECANCELED);
        assert_eq!(rig.ring.in_flight(), 0);
    });
}

#[test]
fn oneshot_poll_reports_pending_event() {
    both(of(4), |rig| {
        let (polled, mut far) = rig.pair();
        far.write(b"x");
        rig.ring
            .submit_poll_once(&polled, libc::POLLIN, Token(6))
            .unwrap();
        let done = rig.collect(1);
        assert!(!done[0].more && done[0].result & i32::from(libc::POLLIN) != 0);
        assert_eq!(rig.ring.in_flight(), 0);
    });
}

#[test]
fn space_is_freed_zeroed_and_synced() {
    both(of(4), |rig| {
        let file = rig.file(1 << 16);
        let m = Memory::new(1 << 16).unwrap();
        m.fill(0, 1 << 16, 0x5a);
        rig.ring
            .submit_write(&file, 0, &[m.whole()], Durability::Cached, Token(1))
            .unwrap();
        rig.collect(1);
        rig.ring
            .submit_fallocate(&file, Fallocate::PunchHole, 4096, 8192, Token(2))
            .unwrap();
        assert_eq!(rig.collect(1)[0].result, 0);
        rig.ring
            .submit_sync(&file, SyncKind::Data, Token(3))
            .unwrap();
        rig.ring
            .submit_sync(&file, SyncKind::All, Token(4))
            .unwrap();
        assert!(rig.collect(2).iter().all(|c| c.result == 0));
        rig.ring
            .submit_read(&file, 0, &[m.whole()], Token(5))
            .unwrap();
        rig.collect(1);
        let bytes = m.whole().to_vec();
        assert!(bytes[..4096].iter().all(|&b| b == 0x5a));
        assert!(bytes[4096..12288].iter().all(|&b| b == 0));
        assert!(bytes[12288..].iter().all(|&b| b == 0x5a));
    });
}

#[test]
fn handle_of_other_ring_uses_descriptor() {
    let mut one = ring(4);
    let mut two = ring(4);
    let a = temporary_file(4096);
    let b = temporary_file(8192);
    let of_one = one.register_file(&a).unwrap();
    let _of_two = two.register_file(&b).unwrap();
    let m = Memory::new(8192).unwrap();
    two.submit_read(&of_one, 0, &[m.whole()], Token(1)).unwrap();
    assert_eq!(collect(&mut two, 1)[0].result, 4096);
}

#[test]
fn file_entries_are_reused() {
    both(
        RingConfig {
            files: 1,
            ..RingConfig::default()
        },
        |rig| {
            let a = rig.file(4096);
            for _ in 0..5 {
                let h = rig.ring.register_file(&a).unwrap();
                assert!(matches!(
                    rig.ring.register_file(&a),
                    Err(RegisterError::NoRoom)
                ));
                drop(h);
            }
        },
    );
}

#[test]
fn handle_of_other_kernel_returns_ebadf() {
    let m = Memory::new(4096).unwrap();
    both(of(4), |rig| {
        let other = match rig.kernel {
            None => Disk::new(4096).open().into(),
            Some(_) => temporary_file(4096),
        };
        rig.ring
            .submit_read(&other, 0, &[m.whole()], Token(1))
            .unwrap();
        assert_eq!(rig.collect(1)[0].result, -libc::EBADF);
    });
}

#[test]
fn dropped_ring_releases_files() {
    let (a, mut b) = UnixStream::pair().unwrap();
    let mut one = ring(4);
    let handle = one.register_file(&OwnedFd::from(a).into()).unwrap();
    let m = Memory::new(4096).unwrap();
    one.submit_recv(&handle, &[m.whole()], Receive::Some, Token(1))
        .unwrap();
    one.submit().unwrap();
    drop(handle);
    drop(one);
    // The other end only sees the end of the stream if nothing else holds the socket.
    b.set_nonblocking(true).unwrap();
    assert_eq!(b.read(&mut [0]).unwrap(), 0);
}

/// Returns the number of open descriptors and mapped areas of this process.
fn footprint() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count();
    (fds, maps)
}

#[test]
fn drop_with_operations_in_flight_leaks_nothing() {
    // This runs in a separate process, because other tests open and close descriptors concurrently.
    if std::env::var_os("RISER_RING_CHILD").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "ring::tests::drop_with_operations_in_flight_leaks_nothing",
            ])
            .args(["--test-threads", "1"])
            .env("RISER_RING_CHILD", "1")
            .output()
            .unwrap();
        assert!(
            status.status.success(),
            "{}",
            String::from_utf8_lossy(&status.stdout)
        );
        return;
    }
    let round = || {
        let mut ring = ring(16);
        let (a, b) = UnixStream::pair().unwrap();
        let socket = Handle::from(OwnedFd::from(a));
        let m = Memory::new(1 << 20).unwrap();
        // If memory can't be locked, we test without registered memory.
        let _ = ring.register_memory(&m);
        for i in 0..8 {
            let own = Memory::new(4096).unwrap();
            ring.submit_recv(&socket, &[own.whole()], Receive::All, Token(i))
                .unwrap();
        }
        ring.submit_poll(&socket, libc::POLLIN, Token(100)).unwrap();
        let file = temporary_file(1 << 20);
        let file = ring.register_file(&file).unwrap();
        ring.submit_write(&file, 0, &[m.whole()], Durability::Cached, Token(101))
            .unwrap();
        ring.submit().unwrap();
        ring.submit_read(&file, 0, &[m.whole()], Token(102))
            .unwrap();
        drop((file, socket, b, m));
        drop(ring);
    };
    round();
    // This may include resources of one ring that the kernel has not closed yet, which is less than
    // fifty rings would leak.
    let before = footprint();
    for _ in 0..50 {
        round();
    }
    // The kernel closes a ring's descriptors shortly after the last reference is dropped.
    eventually("all is closed and unmapped", PATIENCE, || {
        let after = footprint();
        after.0 <= before.0 && after.1 <= before.1 + 4
    });
}

/// Dropping a helper does not wait for a job that never completes, such as a call to a file system
/// that hangs.
#[test]
fn hung_helper_is_detached() {
    let ring = Ring::new(RingConfig::default()).unwrap();
    let mut offload = Offload::new(2, ring.waker(), &SystemThreads).unwrap();
    let (release, hangs) = std::sync::mpsc::channel::<()>();
    let (done, is_done) = std::sync::mpsc::channel();
    offload
        .submit(Token(1), move || hangs.recv().unwrap_or_default())
        .unwrap();
    let other = done.clone();
    offload
        .submit(Token(2), move || other.send("begun").unwrap())
        .unwrap();
    let (dropped, is_dropped) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        drop(offload);
        dropped.send(()).unwrap();
    });
    let patience = std::time::Duration::from_secs(60);
    assert_eq!(is_dropped.recv_timeout(patience), Ok(()));
    thread.join().unwrap();
    drop((release, done));
    // The other job was dropped instead.
    assert!(is_done.recv_timeout(patience).is_err());
}

#[test]
fn helper_thread_reports_through_ring() {
    let mut ring = ring(4);
    let mut offload = Offload::new(2, ring.waker(), &SystemThreads).unwrap();
    offload.submit(Token(1), || 10 + 1).unwrap();
    offload.submit(Token(2), || 20 + 2).unwrap();
    assert_eq!(offload.submit(Token(3), || 0), Err(crate::OffloadFull));
    let mut got = Vec::new();
    let mut out = Vec::new();
    while got.len() < 2 {
        park(&mut ring);
        ring.reap(&mut out).unwrap();
        got.extend(std::iter::from_fn(|| offload.poll_result()));
    }
    assert_eq!(got, [(Token(1), 11), (Token(2), 22)]);
    assert_eq!(offload.outstanding(), 0);
}

#[test]
fn setup_errors_are_explained() {
    let text = |n| RingError::from_setup(io::Error::from_raw_os_error(n), 8).to_string();
    assert!(text(libc::ENOSYS).contains("ENOSYS"));
    let forbidden = text(libc::EPERM);
    assert!(forbidden.contains("kernel.io_uring_disabled is ") && forbidden.contains("EPERM"));
    assert!(text(libc::ENOMEM).contains("ulimit -l"));
}

/// Otherwise operations that hang in one file system would delay all other file systems.
#[test]
fn operations_may_all_block_kernel_threads() {
    let ring = ring(511);
    let Kernel::Uring(uring) = &ring.kernel else {
        unreachable!("a ring of the host");
    };
    assert!(uring.threads() >= 511, "{} threads", uring.threads());
}
