//! What only a stream can show: peers that are no ours, by their bytes.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use riser_transport::iwarp::MAX_STRANGERS;
use riser_transport::verbs::{CmEventKind, CmId, ConnParam, Provider as _, RdmaCm as _, SendOp};

use crate::software::Streams;
use crate::suite::world::{
    End, Wants, World as _, cm_event, connect_to, init_attr, listen, objects,
};

/// A request of revision 1 with CRCs and no private data.
const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\0\0";

fn dial(w: &Streams) -> TcpStream {
    let socket = TcpStream::connect(SocketAddr::new(w.addr(End::B), 4000)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

/// Receives at least `len` bytes from the device, fewer where it closes the connection.
fn hear(w: &mut Streams, socket: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut heard = Vec::new();
    w.until("bytes of a peer", |_| {
        let mut bytes = [0; 256];
        match socket.read(&mut bytes) {
            Ok(0) => return Some(()),
            Ok(n) => heard.extend_from_slice(&bytes[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // What was sent to a socket that is closed.
            Err(_) => return Some(()),
        }
        (heard.len() >= len).then_some(())
    });
    heard
}

/// A connection of ours works beside all that.
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
fn what_is_no_request_is_closed_without_an_event() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let more = [&REQUEST[..], b"too early"].concat();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"MPA ID Rep Frame", &more] {
        let mut socket = dial(w);
        socket.write_all(bytes).unwrap();
        assert!(hear(w, &mut socket, 1).is_empty());
        assert_eq!(w.poll_cm_event(End::B), None);
    }
    // Another revision is refused in words.
    let mut socket = dial(w);
    socket.write_all(b"MPA ID Req Frame\0\x07\0\0").unwrap();
    let heard = hear(w, &mut socket, 20);
    assert_eq!(
        (&heard[..16], heard[16] & 0x20),
        (&b"MPA ID Rep Frame"[..], 0x20)
    );
    assert_eq!(w.poll_cm_event(End::B), None);
    works(w);
}

#[test]
fn strangers_that_say_nothing_keep_no_place() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let mut strangers: Vec<_> = (0..MAX_STRANGERS + 1).map(|_| dial(w)).collect();
    // The oldest goes for the newest.
    assert!(hear(w, &mut strangers[0], 1).is_empty());
    works(w);
    w.pass(Duration::from_millis(5));
    let left = strangers[MAX_STRANGERS].read(&mut [0; 1]).unwrap_err();
    assert_eq!(left.kind(), ErrorKind::WouldBlock);
}

/// A request by its bytes, which the device accepts.
fn accepted(w: &mut Streams) -> (TcpStream, CmId) {
    let mut socket = dial(w);
    // In two pieces, of which the first says nothing.
    let (first, rest) = REQUEST.split_at(7);
    socket.write_all(first).unwrap();
    w.pass(Duration::from_millis(2));
    assert_eq!(w.poll_cm_event(End::B), None);
    socket.write_all(rest).unwrap();
    let id = cm_event(w, End::B).id;
    let wants = Wants::default();
    let (pd, cq, _memory, _) = objects(w, End::B, &wants);
    let p = w.provider(End::B);
    p.create_cm_qp(id, &init_attr(pd, cq, &wants)).unwrap();
    p.accept(id, &ConnParam::default()).unwrap();
    let reply = hear(w, &mut socket, 20);
    assert_eq!(reply, b"MPA ID Rep Frame\x40\x01\0\0");
    // Revision 1 has no message that would confirm.
    let event = cm_event(w, End::B);
    assert!(matches!(event.kind, CmEventKind::Established { .. }));
    (socket, id)
}

#[test]
fn a_message_with_a_wrong_crc_is_answered_with_the_reason() {
    let w = &mut Streams::new();
    let _listener = listen(w, End::B, 4000);
    let (mut socket, id) = accepted(w);
    // An RDMA WRITE of no bytes.
    let fpdu = b"\0\x0e\xc1\x40\0\0\0\0\0\0\0\0\0\0\0\0nope";
    socket.write_all(fpdu).unwrap();
    // The length, a Terminate message as the only one of queue 2, MPA's error 2, and a CRC.
    let heard = hear(w, &mut socket, 28);
    let body = b"\0\x16\x41\x47\0\0\0\0\0\0\0\x02\0\0\0\x01\0\0\0\0\x20\x02\0\0";
    assert_eq!((heard.len(), &heard[..24]), (28, &body[..]));
    assert!(hear(w, &mut socket, 1).is_empty());
    drop(socket);
    let event = cm_event(w, End::B);
    assert_eq!((event.id, event.kind), (id, CmEventKind::Disconnected));
    assert_eq!(cm_event(w, End::B).kind, CmEventKind::TimewaitExit);
    works(w);
}

#[test]
fn a_peer_that_leaves_before_it_is_accepted_is_reported() {
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
fn a_user_that_sleeps_wakes_for_a_connection() {
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
