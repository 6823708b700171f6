//! Tests specific to streams: foreign peers, simulated by their bytes.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_transport::iwarp::{MAX_STRANGERS, SETUP_TIME};
use riser_transport::verbs::{
    AsyncEvent, CmEventKind, ConnParam, Provider as _, RdmaCm as _, SendOp, Verbs as _,
};
use socket2::{Domain, Socket, Type};

use crate::software::Streams;
use crate::suite::world::{
    End, Side, Wants, World as _, cm_event, connect_to, connected, init_attr, listen, objects,
    resolve,
};

/// Revision 1 request with CRCs and without private data.
const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\0\0";

/// Same as [`REQUEST`], without CRCs.
const WITHOUT_CRCS: &[u8; 20] = b"MPA ID Req Frame\0\x01\0\0";

/// Returns devices that do not request CRCs, so that messages can be written manually.
fn without_crcs() -> Streams {
    Streams::with(|config| config.crc = false)
}

fn dial_from(w: &Streams, ip: IpAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(ip, 0).into()).unwrap();
    let to = SocketAddr::new(w.addr(End::B), 4000);
    socket.connect(&to.into()).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

fn dial(w: &Streams) -> TcpStream {
    dial_from(w, Ipv4Addr::LOCALHOST.into())
}

/// Returns an FPDU without a CRC.
fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = (ulpdu.len() as u16).to_be_bytes().to_vec();
    out.extend_from_slice(ulpdu);
    out.resize(out.len().next_multiple_of(4) + 4, 0);
    out
}

/// Returns an RDMA READ request for a whole region, as message `msn` of its queue.
fn read_all(side: &Side, msn: u32) -> Vec<u8> {
    let size = side.mr.length as u32;
    let words = [0, 1, msn, 0, 1, 0, 0, size, side.mr.rkey.0];
    let mut ulpdu = b"\x41\x41".to_vec();
    ulpdu.extend(words.iter().flat_map(|word: &u32| word.to_be_bytes()));
    ulpdu.extend_from_slice(&side.mr.addr.to_be_bytes());
    fpdu(&ulpdu)
}

/// Computes CRC32C bit by bit, in wire order.
fn crc32c(bytes: &[u8]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    (!crc).to_le_bytes()
}

/// Receives at least `len` bytes from the device, or fewer if it closes the connection.
fn read_bytes(w: &mut Streams, socket: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut received = Vec::new();
    w.until("bytes of a peer", |_| {
        let mut bytes = [0; 256];
        match socket.read(&mut bytes) {
            Ok(0) => return Some(()),
            Ok(n) => received.extend_from_slice(&bytes[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // The socket was closed with unread data.
            Err(_) => return Some(()),
        }
        (received.len() >= len).then_some(())
    });
    received
}

/// Checks that a regular connection works at the same time.
fn works(w: &mut Streams) {
    let wants = Wants {
        region: 4096,
        ..Wants::default()
    };
    let (a, b) = connect_to(w, 4000, &wants, &wants);
    b.recv(w, 1, 0, 64);
    a.send(w, 1, SendOp::Send, 0, 64);
    assert!(a.completion(w).status.is_ok() && b.completion(w).status.is_ok());
}

#[test]
fn invalid_request_is_closed_without_event() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let more = [&REQUEST[..], b"too early"].concat();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"MPA ID Rep Frame", &more] {
        let mut socket = dial(w);
        socket.write_all(bytes).unwrap();
        assert!(read_bytes(w, &mut socket, 1).is_empty());
        assert_eq!(w.poll_cm_event(End::B), None);
    }
    // An unknown revision receives a reject reply.
    let mut socket = dial(w);
    socket.write_all(b"MPA ID Req Frame\0\x07\0\0").unwrap();
    let received = read_bytes(w, &mut socket, 20);
    assert_eq!(
        (&received[..16], received[16] & 0x20),
        (&b"MPA ID Rep Frame"[..], 0x20)
    );
    assert_eq!(w.poll_cm_event(End::B), None);
    works(w);
}

#[test]
fn silent_strangers_do_not_occupy_slots() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let mut strangers: Vec<_> = (0..MAX_STRANGERS + 1).map(|_| dial(w)).collect();
    // The newest replaces the oldest.
    assert!(read_bytes(w, &mut strangers[0], 1).is_empty());
    works(w);
    w.pass(Duration::from_millis(5));
    let left = strangers[MAX_STRANGERS].read(&mut [0; 1]).unwrap_err();
    assert_eq!(left.kind(), ErrorKind::WouldBlock);
}

/// Sends a request as bytes; returns the socket and the objects to accept it.
fn requested(w: &mut Streams, request: &[u8]) -> (TcpStream, Side) {
    let mut socket = dial(w);
    // In two parts, of which the first is incomplete.
    let (first, rest) = request.split_at(7);
    socket.write_all(first).unwrap();
    w.pass(Duration::from_millis(2));
    assert_eq!(w.poll_cm_event(End::B), None);
    socket.write_all(rest).unwrap();
    let id = cm_event(w, End::B).id;
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, End::B, &wants);
    let init = init_attr(pd, cq, &wants);
    let qp = w.provider(End::B).create_cm_qp(id, &init).unwrap();
    let side = Side {
        end: End::B,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    };
    (socket, side)
}

/// Sends a revision 1 request as bytes, which the device accepts.
fn accepted(w: &mut Streams, request: &[u8; 20]) -> (TcpStream, Side) {
    let (mut socket, side) = requested(w, request);
    let p = w.provider(End::B);
    p.accept(side.id, &ConnParam::default()).unwrap();
    let reply = read_bytes(w, &mut socket, 20);
    assert_eq!(reply, [b"MPA ID Rep Frame", &request[16..]].concat());
    // Revision 1 has no confirmation message.
    let event = cm_event(w, End::B);
    assert!(matches!(event.kind, CmEventKind::Established { .. }));
    (socket, side)
}

#[test]
fn message_with_bad_crc_is_terminated() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let (mut socket, side) = accepted(w, REQUEST);
    // An empty RDMA WRITE.
    let fpdu = b"\0\x0e\xc1\x40\0\0\0\0\0\0\0\0\0\0\0\0nope";
    socket.write_all(fpdu).unwrap();
    // The length, the first Terminate message of queue 2, MPA error 2, and a CRC.
    let received = read_bytes(w, &mut socket, 28);
    let body = b"\0\x16\x41\x47\0\0\0\0\0\0\0\x02\0\0\0\x01\0\0\0\0\x20\x02\0\0";
    assert_eq!((received.len(), &received[..24]), (28, &body[..]));
    assert!(read_bytes(w, &mut socket, 1).is_empty());
    drop(socket);
    let event = cm_event(w, End::B);
    assert_eq!((event.id, event.kind), (side.id, CmEventKind::Disconnected));
    assert_eq!(cm_event(w, End::B).kind, CmEventKind::TimewaitExit);
    works(w);
}

#[test]
fn peer_disconnect_before_accept_is_reported() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let mut socket = dial(w);
    socket.write_all(REQUEST).unwrap();
    let id = cm_event(w, End::B).id;
    drop(socket);
    let event = cm_event(w, End::B);
    assert_eq!(event.id, id);
    assert!(matches!(event.kind, CmEventKind::Rejected { .. }));
    assert!(
        w.provider(End::B)
            .accept(id, &ConnParam::default())
            .is_err()
    );
    w.provider(End::B).destroy_id(id).unwrap();
    works(w);
}

#[test]
fn sleeping_user_is_woken_by_connection() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    w.pass(Duration::from_millis(2));
    let is_readable = |w: &Streams, wait: Duration| {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let fds = w.b.event_fds();
        let mut fds: Vec<_> = fds
            .iter()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        let wait = Timespec::try_from(wait).unwrap();
        rustix::event::poll(&mut fds, Some(&wait)).unwrap() > 0
    };
    assert!(!is_readable(w, Duration::from_millis(1)));
    let _socket = dial(w);
    assert!(is_readable(w, Duration::from_secs(5)));
}

#[test]
fn connection_flood_displaces_own_connections() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let other = w.addr(End::A);
    let mut slow = dial_from(w, other);
    slow.write_all(&REQUEST[..7]).unwrap();
    let mut many: Vec<_> = (0..MAX_STRANGERS * 2).map(|_| dial(w)).collect();
    assert!(read_bytes(w, &mut many[0], 1).is_empty());
    slow.write_all(&REQUEST[7..]).unwrap();
    let event = cm_event(w, End::B);
    assert!(matches!(event.kind, CmEventKind::ConnectRequest { peer, .. } if peer.ip() == other));
}

#[test]
fn non_receiving_peer_cannot_keep_closed_connection() {
    for errs in [true, false] {
        let w = &mut without_crcs();
        let _listener = listen(w, End::B, 4000);
        let (mut socket, side) = accepted(w, WITHOUT_CRCS);
        // More than fits in both socket buffers.
        for msn in 1..=16 {
            socket.write_all(&read_all(&side, msn)).unwrap();
        }
        w.pass(Duration::from_millis(50));
        assert_eq!(w.poll_cm_event(End::B), None);
        if errs {
            socket.write_all(&fpdu(b"\x42\x43")).unwrap();
            assert_eq!(side.event(w), AsyncEvent::QpReqError(side.qp));
        } else {
            w.provider(End::B).destroy_qp(side.qp).unwrap();
        }
        w.pass(Duration::from_millis(2));
        w.b.progress(Instant::now() + Duration::from_secs(3));
        let event = cm_event(w, End::B);
        assert_eq!((event.id, event.kind), (side.id, CmEventKind::Disconnected));
    }
}

#[test]
fn invalid_first_message_establishes_no_connection() {
    let w = &mut without_crcs();
    let _listener = listen(w, End::B, 4000);
    // Revision 2, with a WRITE as the first message, which allows the responder to send.
    let request = b"MPA ID Req Frame\x10\x02\0\x04\x80\x04\x80\x04";
    let (mut socket, side) = requested(w, request);
    let p = w.provider(End::B);
    p.accept(side.id, &ConnParam::default()).unwrap();
    let reply = read_bytes(w, &mut socket, 24);
    assert_eq!(reply[..20], *b"MPA ID Rep Frame\x10\x02\0\x04");
    w.pass(Duration::from_millis(2));
    assert_eq!(w.poll_cm_event(End::B), None);
    socket.write_all(&fpdu(b"\x42\x43")).unwrap();
    assert_eq!(side.event(w), AsyncEvent::QpReqError(side.qp));
    drop(socket);
    let event = cm_event(w, End::B);
    assert!(matches!(event.kind, CmEventKind::Rejected { .. }));
}

/// Connects the device to a peer, which should listen on port 4000 of B's address.
fn call(w: &mut Streams) -> Side {
    let wants = Wants::default();
    let id = resolve(w, 4000);
    let (pd, cq, memory, mr) = objects(w, End::A, &wants);
    let init = init_attr(pd, cq, &wants);
    let qp = w.provider(End::A).create_cm_qp(id, &init).unwrap();
    let param = ConnParam {
        private_data: b"hello".to_vec(),
        ..ConnParam::default()
    };
    w.provider(End::A).connect(id, &param).unwrap();
    Side {
        end: End::A,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    }
}

fn called(w: &mut Streams, listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let (socket, from) = w.until("a call", |_| listener.accept().ok());
    socket.set_nonblocking(true).unwrap();
    (socket, from)
}

fn listener_at_b(w: &Streams) -> TcpListener {
    let listener = TcpListener::bind(SocketAddr::new(w.addr(End::B), 4000)).unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

#[test]
fn mismatched_reply_is_terminated_with_reason() {
    let w = &mut Streams::new();
    let listener = listener_at_b(w);
    let side = call(w);
    let (mut socket, _) = called(w, &listener);
    let request = read_bytes(w, &mut socket, 29);
    assert_eq!(request[16..20], *b"\x50\x02\0\x09");
    assert_eq!(request[24..], *b"hello");
    // One RDMA READ more than allowed.
    let allowed = u16::from_be_bytes([request[20], request[21]]) & 0x3fff;
    let mut reply = b"MPA ID Rep Frame\x50\x02\0\x04\0\x01".to_vec();
    reply.extend_from_slice(&(allowed + 1).to_be_bytes());
    socket.write_all(&reply).unwrap();
    let received = read_bytes(w, &mut socket, 28);
    let body = b"\0\x16\x41\x47\0\0\0\0\0\0\0\x02\0\0\0\x01\0\0\0\0\x20\x06\0\0";
    assert_eq!((received.len(), &received[..24]), (28, &body[..]));
    assert_eq!(received[24..], crc32c(body));
    let event = cm_event(w, End::A);
    assert_eq!(event.id, side.id);
    assert!(matches!(event.kind, CmEventKind::ConnectError(_)));
}

#[test]
fn old_peer_is_retried_with_revision_1() {
    const OLDER: &[u8] = b"MPA ID Rep Frame\x40\x01\0\0";
    // The peer closes the connection, resets it because of unread data, or replies with its own
    // revision.
    for (reads, response) in [(29, &b""[..]), (1, b""), (29, OLDER)] {
        let w = &mut Streams::new();
        let listener = listener_at_b(w);
        let side = call(w);
        let (mut socket, from) = called(w, &listener);
        w.until("a request", |_| {
            let mut bytes = vec![0; reads];
            socket.read(&mut bytes).ok().filter(|len| *len == reads)
        });
        socket.write_all(response).unwrap();
        if response.is_empty() {
            drop(socket);
        } else {
            assert!(read_bytes(w, &mut socket, 1).is_empty(), "it is left alone");
        }
        let (mut socket, again) = called(w, &listener);
        assert_eq!(again, from);
        let request = read_bytes(w, &mut socket, 25);
        assert_eq!(request, b"MPA ID Req Frame\x40\x01\0\x05hello");
        socket
            .write_all(b"MPA ID Rep Frame\x40\x01\0\x02ok")
            .unwrap();
        let event = cm_event(w, End::A);
        assert_eq!(event.id, side.id);
        let CmEventKind::Established { param } = event.kind else {
            panic!("{event:?}");
        };
        assert_eq!(param.private_data, b"ok");
        // The connection transfers messages with CRCs.
        side.send(w, 1, SendOp::Send, 0, 4);
        assert_eq!(read_bytes(w, &mut socket, 28)[..2], *b"\0\x16");
    }
}

#[test]
fn peer_without_known_revision_is_not_retried() {
    let w = &mut Streams::new();
    let listener = listener_at_b(w);
    let side = call(w);
    for len in [29, 25] {
        let (mut socket, _) = called(w, &listener);
        assert_eq!(read_bytes(w, &mut socket, len).len(), len);
    }
    let event = cm_event(w, End::A);
    assert_eq!(event.id, side.id);
    assert!(matches!(
        event.kind,
        CmEventKind::Rejected { reason: 28, .. }
    ));
    w.pass(Duration::from_millis(5));
    assert!(listener.accept().is_err());
}

/// Checks that the device's request was rejected, and that it does not retry.
fn refused_for_good(w: &mut Streams, side: &Side, listener: &TcpListener) {
    let event = cm_event(w, End::A);
    assert_eq!(event.id, side.id);
    let reason = 28;
    assert!(matches!(event.kind, CmEventKind::Rejected { reason: it, .. } if it == reason));
    w.pass(Duration::from_millis(5));
    assert!(listener.accept().is_err());
}

#[test]
fn revision_1_rejection_is_final() {
    let w = &mut Streams::new();
    let listener = listener_at_b(w);
    let side = call(w);
    let (mut socket, _) = called(w, &listener);
    assert_eq!(read_bytes(w, &mut socket, 29).len(), 29);
    let refusal = b"MPA ID Rep Frame\x60\x01\0\x02no";
    socket.write_all(refusal).unwrap();
    refused_for_good(w, &side, &listener);
}

#[test]
fn late_close_or_revision_2_prevents_retry() {
    let w = &mut Streams::new();
    let listener = listener_at_b(w);
    // Like an overloaded server that closes connections which have waited too long.
    let side = call(w);
    let (mut socket, _) = called(w, &listener);
    assert_eq!(read_bytes(w, &mut socket, 29).len(), 29);
    w.pass(Duration::from_millis(5100));
    drop(socket);
    refused_for_good(w, &side, &listener);
    // Close immediately, but another connection has shown that the peer supports the revision.
    let side = call(w);
    let (mut open, _) = called(w, &listener);
    assert_eq!(read_bytes(w, &mut open, 29).len(), 29);
    let reply = b"MPA ID Rep Frame\x50\x02\0\x04\0\x01\0\x01";
    open.write_all(reply).unwrap();
    let event = cm_event(w, End::A);
    assert_eq!(event.id, side.id);
    assert!(matches!(event.kind, CmEventKind::Established { .. }));
    let side = call(w);
    drop(called(w, &listener));
    refused_for_good(w, &side, &listener);
}

/// CRCs match the bytes that are sent, even if a program modifies its memory concurrently.
#[test]
fn memory_changed_during_send_has_valid_crc() {
    for markers in [false, true] {
        let w = &mut Streams::with(|config| config.markers = markers);
        let (a, b) = connected(w);
        let half = a.mr.length as usize / 2;
        // The thread exits with this test, even if the test fails.
        let test = Arc::new(());
        let (alive, memories) = (test.clone(), [a.memory.clone(), b.memory.clone()]);
        let writer = std::thread::spawn(move || {
            let mut byte = 0;
            while Arc::strong_count(&alive) > 1 {
                byte ^= 0xff;
                for memory in &memories {
                    memory.fill(0, half, byte);
                }
            }
        });
        for round in 0..20 {
            b.recv(w, 1, half, half);
            a.send(w, 2, SendOp::Read(b.remote(0)), half, half);
            a.send(w, 3, SendOp::Write(b.remote(half)), 0, half);
            a.send(w, 4, SendOp::Send, 0, half);
            let all = [a.completions(w, 3), b.completions(w, 1)].concat();
            assert!(all.iter().all(|c| c.status.is_ok()), "{round}: {all:?}");
        }
        drop(test);
        writer.join().unwrap();
    }
}

#[test]
fn unresponsive_tcp_peer_becomes_unreachable() {
    let w = &mut Streams::new();
    let at = SocketAddr::new(w.addr(End::B), 4000);
    let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    full.bind(&at.into()).unwrap();
    full.listen(0).unwrap();
    // The backlog is full, and further connection attempts receive no response.
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
            let _ = socket.connect(&at.into());
            socket
        })
        .collect();
    let side = call(w);
    w.pass(Duration::from_millis(5));
    assert_eq!(w.poll_cm_event(End::A), None);
    w.a.progress(Instant::now() + SETUP_TIME);
    let event = cm_event(w, End::A);
    assert_eq!((event.id, event.kind), (side.id, CmEventKind::Unreachable));
    drop(callers);
}
