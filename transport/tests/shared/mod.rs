//! Tests specific to shared memory: peers that exit, send invalid data, or sleep.

use std::io::{IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use riser_memory::shared::SharedMemory;
use riser_transport::shm::{
    GREETING, MAX_GREETING, Shm, ShmConfig, ShmListener, ShmUsers, check_closed, query_listener,
    refuses_descriptors,
};
use riser_transport::verbs::{
    CmError, CmEventKind, ConnParam, PortSpace, Provider, QpAttr, QpState, RdmaCm, SendOp, SendWr,
    Verbs, WcStatus,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use rustix::process::Uid;

use crate::software::{Shared, addresses};
use crate::suite::world::{
    End, Side, Wants, World, cm_event, connect_to, connected, init_attr, listen, objects, resolve,
};

/// Memory size of a link without its first page, in bytes: a ring of 1 MiB for each direction.
const DATA: usize = 2 << 20;
/// Offsets of the tails of both rings in the first page, in words of four bytes: first the ring
/// written by the listening side, then the ring written by the connecting side.
const TAILS: [usize; 2] = [0, 96];

/// Connects a foreign program to the listener at an address.
fn knock(at: IpAddr) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let name = SocketAddrUnix::new_abstract_name(format!("riser-shm/{at}").as_bytes()).unwrap();
    rustix::net::connect(&socket, &name).unwrap();
    socket
}

/// Sends a HELLO from 127.0.0.1, as bytes.
fn greet(socket: &OwnedFd) {
    let mut hello = *b"RISRSHM>\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f\0\0\x01";
    hello[8..10].copy_from_slice(&1u16.to_ne_bytes());
    rustix::net::send(socket, &hello, SendFlags::NOSIGNAL).unwrap();
}

/// Receives a WELCOME and returns its memory.
fn take_welcome(w: &mut Shared, socket: &OwnedFd) -> SharedMemory {
    let memory = w.until("a WELCOME", |_| {
        let mut bytes = [0; 64];
        let mut room = [IoSliceMut::new(&mut bytes)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT;
        let received = rustix::net::recvmsg(socket, &mut room, &mut control, flags).ok()?;
        assert_eq!((received.bytes, &bytes[..8]), (16, &b"RISRSHM<"[..]));
        control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        })
    });
    SharedMemory::map(&memory, DATA).unwrap()
}

/// Waits until the other side has closed a socket.
fn await_end(w: &mut Shared, socket: &OwnedFd) {
    w.until("the end of a socket", |_| {
        let received = rustix::net::recv(socket, &mut [0; 64][..], RecvFlags::DONTWAIT);
        match received {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => Some(()),
            _ => None,
        }
    });
}

/// Returns whether the descriptors of a device become readable within `wait`.
fn is_readable(device: &Shm, wait: Duration) -> bool {
    let fds = device.event_fds();
    let mut fds: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let wait = Timespec::try_from(wait).unwrap();
    rustix::event::poll(&mut fds, Some(&wait)).unwrap() > 0
}

fn works(w: &mut Shared, a: &Side, b: &Side) {
    a.memory.fill(0, 10_000, 7);
    a.send(w, 1, SendOp::Write(b.remote(5)), 0, 10_000);
    assert_eq!(a.completion(w).status, WcStatus::Success);
    assert_eq!(b.bytes(5, 10_000), [7; 10_000]);
}

#[test]
fn process_exit_closes_connections_immediately() {
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    works(w, &a, &b);
    b.recv(w, 9, 0, 64);
    // Data sent before the process exits are received.
    b.recv(w, 10, 0, 64);
    a.send(w, 2, SendOp::Send, 0, 64);
    w.a.progress(Instant::now());
    let begin = Instant::now();
    let (other, _) = addresses();
    w.a = Shm::open(ShmConfig::new(other)).unwrap();
    let kinds = b.completions(w, 2);
    let status: Vec<_> = kinds.iter().map(|c| (c.wr_id.0, c.status)).collect();
    assert_eq!(status, [(9, WcStatus::Success), (10, WcStatus::WrFlushErr)]);
    assert_eq!(cm_event(w, End::B).kind, CmEventKind::Disconnected);
    let attr = w.b.query_qp(b.qp).unwrap();
    assert_eq!(attr.state, Some(QpState::Error));
    // This does not depend on a timer, which would take seconds.
    assert!(begin.elapsed() < w.patience() / 2);
}

#[test]
fn request_fails_when_peer_process_exits() {
    let w = &mut Shared::new();
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    let (pd, cq, _m, _) = objects(w, End::A, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    w.a.create_cm_qp(id, &init).unwrap();
    w.a.connect(id, &ConnParam::default()).unwrap();
    assert!(matches!(
        cm_event(w, End::B).kind,
        CmEventKind::ConnectRequest { .. }
    ));
    let (other, _) = addresses();
    w.b = Shm::open(ShmConfig::new(other)).unwrap();
    assert_eq!(cm_event(w, End::A).kind, CmEventKind::Unreachable);
}

#[test]
fn address_resolution_requires_listener() {
    let w = &mut Shared::new();
    let (unused, also_unused) = addresses();
    let refused = query_listener(unused, &ShmUsers::default()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    for to in [unused, also_unused] {
        let id = w.a.create_id(PortSpace::Tcp).unwrap();
        let dst = SocketAddr::new(to, 4000);
        w.a.resolve_addr(id, None, dst, Duration::from_secs(1))
            .unwrap();
        let wanted = CmEventKind::AddrError(CmError::Unreachable);
        assert_eq!(cm_event(w, End::A).kind, wanted);
    }
    let taken = ShmConfig::listening(w.addr(End::B)).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    let elsewhere: IpAddr = "192.0.2.1".parse().unwrap();
    let opened = Shm::open(ShmConfig::new(elsewhere)).unwrap_err();
    let bound = ShmListener::bind(elsewhere).unwrap_err();
    for error in [opened, bound] {
        assert_eq!(error.kind(), std::io::ErrorKind::AddrNotAvailable);
    }
}

#[test]
fn device_responds_to_probe() {
    let mut w = Shared::new();
    let addr = w.addr(End::B);
    let requesting = std::thread::spawn(move || query_listener(addr, &ShmUsers::default()));
    while !requesting.is_finished() {
        w.step();
    }
    requesting.join().unwrap().unwrap();
    // The link of the probe has been closed.
    works_afterwards(&mut w);
}

fn works_afterwards(w: &mut Shared) {
    let (a, b) = connected(w);
    works(w, &a, &b);
}

/// Three devices, two of which have the same address. Neither can interfere with the other's
/// connection, even if it has all information about it.
#[test]
fn peers_of_one_address_are_kept_apart() {
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    let know = w.a.query_qp(a.qp).unwrap();
    let same = w.addr(End::A);
    let mut first = std::mem::replace(&mut w.a, Shm::open(ShmConfig::new(same)).unwrap());
    let _listener = listen(w, End::B, 4001);
    let (c, d) = connect_to(w, 4001, &Wants::default(), &Wants::default());
    // The path leads to the correct peer, and all other attributes are copied from the other
    // connection.
    let own = w.a.query_qp(c.qp).unwrap();
    let qp =
        w.a.create_qp(&init_attr(c.pd, c.cq, &Wants::default()))
            .unwrap();
    let none = QpAttr::default();
    for attr in [
        QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: know.access,
            ..none
        },
        QpAttr {
            state: Some(QpState::Rtr),
            ah: own.ah,
            path_mtu: know.path_mtu,
            dest_qp: know.dest_qp,
            rq_psn: know.rq_psn,
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(1),
            ..none
        },
        QpAttr {
            state: Some(QpState::Rts),
            sq_psn: know.sq_psn,
            max_rd_atomic: Some(1),
            timeout: Some(14),
            retry_cnt: Some(0),
            rnr_retry: Some(0),
            ..none
        },
    ] {
        w.a.modify_qp(qp, &attr).unwrap();
    }
    let sges = [c.sge(0, 100)];
    let wr = SendWr::new(1, SendOp::Write(b.remote(0)), &sges);
    c.memory.fill(0, 100, 0xee);
    w.a.post_send(qp, &[wr]).unwrap();
    w.until("the packet", |w| {
        (w.b.counters().rx_wrong_source > 0).then_some(())
    });
    assert_eq!(w.b.qp_counters(b.qp).unwrap().rc.rx_packets, 0);
    assert_eq!(b.bytes(0, 100), [0; 100]);
    w.a.destroy_qp(qp).unwrap();
    // Both connections work.
    works(w, &c, &d);
    std::mem::swap(&mut first, &mut w.a);
    works(w, &a, &b);
}

#[test]
fn ring_violation_only_closes_violator() {
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    let at = w.addr(End::B);
    for (n, (tail, len)) in [
        (5u32, 0u32),
        (u32::MAX - 3, 0),
        ((1 << 20) + 4, 0),
        (64, 4356),
        (64, 61),
        (8, 8),
        (1 << 20, u32::MAX),
    ]
    .into_iter()
    .enumerate()
    {
        let socket = knock(at);
        greet(&socket);
        let memory = take_welcome(w, &socket);
        memory.write(DATA / 2, &len.to_ne_bytes());
        memory.word(TAILS[1]).store(tail, Ordering::Release);
        await_end(w, &socket);
        assert_eq!(w.b.link_counters().broken, n as u64 + 1);
    }
    works(w, &a, &b);
}

/// A process that writes arbitrary data into its memory does not disturb the device.
#[test]
fn random_packets_and_positions_harm_no_connection() {
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    let at = w.addr(End::B);
    let mut random = fastrand::Rng::with_seed(11);
    for _ in 0..40 {
        let socket = knock(at);
        greet(&socket);
        let memory = take_welcome(w, &socket);
        let mut tail = 0u32;
        for _ in 0..60 {
            let len = random.u32(..64) * 4;
            let mut packet = len.to_ne_bytes().to_vec();
            packet.extend((0..len).map(|_| random.u8(..)));
            if len > 8 {
                // Use a known opcode, and sometimes one of our queue pairs.
                packet[4] = random.u8(..0x15);
                packet[5] = 0;
                packet[6..8].copy_from_slice(&[0xff; 2]);
                let qpn = w.b.qp_num(b.qp).unwrap().to_be_bytes();
                packet[8..12].copy_from_slice(&qpn);
            }
            memory.write(DATA / 2 + tail as usize, &packet);
            tail += packet.len() as u32;
            let shown = if random.u8(..20) == 0 {
                random.u32(..)
            } else {
                tail
            };
            memory.word(TAILS[1]).store(shown, Ordering::Release);
            w.step();
        }
    }
    assert!(w.b.counters().rx_wrong_source > 0);
    assert!(w.b.link_counters().broken > 10);
    works(w, &a, &b);
}

#[test]
fn processes_without_valid_hello_are_dropped() {
    let w = &mut Shared::new();
    let at = w.addr(End::B);
    let mut strangers = Vec::new();
    for _ in 0..MAX_GREETING {
        strangers.push(knock(at));
    }
    w.pass(Duration::from_millis(20));
    assert_eq!(w.b.link_counters().refused, 0);
    // An additional process replaces the first.
    strangers.push(knock(at));
    let first = strangers.remove(0);
    await_end(w, &first);
    // An invalid message closes the link immediately, silence after a while.
    rustix::net::send(&strangers[0], b"hello", SendFlags::NOSIGNAL).unwrap();
    await_end(w, &strangers[0]);
    works_afterwards(w);
    w.pass(GREETING);
    await_end(w, strangers.last().unwrap());
    assert_eq!(w.b.link_counters().refused, MAX_GREETING as u64 + 1);
}

/// Runs as a user that our devices reject, in order to send a descriptor. Returns `None` if the
/// kernel refuses this, or if this process lacks the rights.
fn as_a_stranger<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
    if refuses_descriptors() {
        let why = "the kernel refuses it, as Linux does since 6.16";
        riser_testkit::skip::skip("a descriptor of another user", why);
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        riser_testkit::skip::skip("a connection of another user", "only root can make one");
        return None;
    }
    let act = || {
        let uid = Uid::from_raw(54_321);
        // This only affects the current thread.
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        act()
    };
    Some(std::thread::scope(|scope| scope.spawn(act).join().unwrap()))
}

fn send_descriptor(socket: &OwnedFd, what: &impl AsFd) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [what.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [IoSlice::new(b"x")];
    rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)
}

#[test]
fn listener_receives_no_descriptors() {
    if !refuses_descriptors() {
        riser_testkit::skip::skip("sending descriptors", "the kernel is older than Linux 6.16");
        return;
    }
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    let socket = knock(w.addr(End::B));
    let send = || send_descriptor(&socket, &socket);
    assert_eq!(send(), Err(rustix::io::Errno::PERM), "not accepted yet");
    w.pass(Duration::from_millis(20));
    assert_eq!(send(), Err(rustix::io::Errno::PERM), "nor after that");
    greet(&socket);
    take_welcome(w, &socket);
    assert_eq!(send(), Err(rustix::io::Errno::PERM), "nor over a link");
    works(w, &a, &b);
}

/// Sends the only descriptor of a connection. Closing it waits for an hour, or until the returned
/// peer is closed.
fn send_what_is_slow_to_close(socket: &OwnedFd) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (never_reads, _) = listener.accept().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[0; 65536]).is_ok() {}
    let linger = Some(Duration::from_secs(3600));
    socket2::SockRef::from(&full).set_linger(linger).unwrap();
    send_descriptor(socket, &full).unwrap();
    never_reads
}

#[test]
fn slow_close_of_descriptor_delays_no_device() {
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    let at = w.addr(End::B);
    let sent = as_a_stranger(|| {
        let socket = knock(at);
        let never_reads = send_what_is_slow_to_close(&socket);
        (socket, never_reads)
    });
    let Some((socket, never_reads)) = sent else {
        return;
    };
    // If the device waits for it, this thread releases it eventually, so that the test fails.
    let (works_tx, works_rx) = mpsc::channel();
    let rescue = std::thread::spawn(move || {
        let is_held_up = works_rx.recv_timeout(Duration::from_secs(20)).is_err();
        drop(never_reads);
        is_held_up
    });
    await_end(w, &socket);
    assert_eq!(w.b.link_counters().refused, 1);
    works(w, &a, &b);
    works_tx.send(()).unwrap();
    assert!(!rescue.join().unwrap(), "a device has waited for it");
}

/// Closing a listener closes pending connections of strangers.
#[test]
fn pending_connections_do_not_delay_listener_close() {
    let (at, _) = addresses();
    let listener = ShmListener::bind(at).unwrap();
    let sent = as_a_stranger(|| {
        let socket = knock(at);
        let never_reads = send_what_is_slow_to_close(&socket);
        (socket, never_reads)
    });
    let Some((_socket, never_reads)) = sent else {
        return;
    };
    let (ended_tx, ended_rx) = mpsc::channel();
    let rescue = std::thread::spawn(move || {
        let is_held_up = ended_rx.recv_timeout(Duration::from_secs(20)).is_err();
        drop(never_reads);
        is_held_up
    });
    drop(listener);
    // The name is available immediately.
    ShmListener::bind(at).unwrap();
    // The socket is reported as not closed yet.
    assert!(check_closed(Duration::ZERO).is_err());
    ended_tx.send(()).unwrap();
    assert!(!rescue.join().unwrap(), "the thread has waited for it");
    check_closed(Duration::from_secs(20)).unwrap();
}

/// A process that shares memory but never reads it does not delay other processes.
#[test]
fn non_reading_peer_delays_no_other() {
    use riser_transport::verbs::{AhAttr, QKey, QpInitAttr, QpType, UdDest};

    let w = &mut Shared::new();
    let (a, b) = connected(w);
    // A listener that responds and then sleeps forever: another device that is not driven.
    let (idle, _) = addresses();
    let mut sleeper = Shm::open(ShmConfig::listening(idle).unwrap()).unwrap();
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, End::A, &wants);
    let init = QpInitAttr {
        qp_type: QpType::Ud,
        ..init_attr(pd, cq, &wants)
    };
    let qp = w.a.create_qp(&init).unwrap();
    for attr in [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(QKey(1)),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr::to(QpState::Rtr),
        QpAttr {
            sq_psn: Some(0),
            ..QpAttr::to(QpState::Rts)
        },
    ] {
        w.a.modify_qp(qp, &attr).unwrap();
    }
    let ah = AhAttr::new(idle.into());
    let ah = w.a.create_ah(pd, ah).unwrap();
    let sges = [riser_transport::verbs::Sge {
        addr: mr.addr,
        length: 4096,
        lkey: mr.lkey,
    }];
    let mut done = Vec::new();
    for n in 0..400 {
        let wr = SendWr {
            ud: Some(UdDest {
                ah,
                qpn: 0x1234,
                qkey: QKey(1),
            }),
            ..SendWr::new(n, SendOp::Send, &sges)
        };
        w.a.post_send(qp, &[wr]).unwrap();
        w.step();
        if n == 0 {
            w.until("the link", |w| {
                sleeper.progress(Instant::now());
                (w.a.link_counters().up == 2).then_some(())
            });
        }
        w.a.poll_cq(cq, 64, &mut done).unwrap();
    }
    assert!(w.a.link_counters().dropped > 50, "the ring is full");
    works(w, &a, &b);
    drop(memory);
}

#[test]
fn sleeping_device_is_woken_by_packets() {
    let w = &mut Shared::new();
    let (a, b) = connected(w);
    w.pass(Duration::from_millis(2));
    let patience = w.patience();
    for n in 0..20 {
        b.recv(w, n, 0, 64);
        w.b.progress(Instant::now());
        let send = |w: &mut Shared| {
            a.send(w, n, SendOp::Send, 0, 64);
            w.a.progress(Instant::now());
        };
        if n % 2 == 0 {
            send(w);
        }
        assert!(!w.b.arm_fds(), "the descriptor shows what has come");
        if n % 2 == 1 {
            assert!(!is_readable(&w.b, Duration::ZERO), "nothing has come");
            send(w);
        }
        assert!(is_readable(&w.b, patience));
        let mut out = Vec::new();
        w.b.progress(Instant::now());
        w.b.poll_cq(b.cq, 1, &mut out).unwrap();
        assert_eq!(out.len(), 1);
        assert_eq!(a.completion(w).status, WcStatus::Success);
        w.pass(Duration::from_millis(1));
    }
    // A device that is awake requires no wake-up by its peer.
    let bells = w.a.link_counters().bells;
    assert_eq!(bells, 10);
    works(w, &a, &b);
    assert_eq!(w.a.link_counters().bells, bells);
}
