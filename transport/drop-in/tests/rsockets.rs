//! rsockets, and what others can do to them.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use library::*;
use riser_rdma_core_sys::bindings::*;

/// Header of a datagram by UDP from 127.0.41.2: tag, version, operation, length, queue pair, address.
fn header(op: u8, qpn: u8) -> [u8; 16] {
    let [a, b, c, d] = [127, 0, 41, 2];
    [
        0x55, 0x55, 0x55, 0x55, 4, op, 16, 0, 0, 0, 0, qpn, a, b, c, d,
    ]
}

const DATA: u8 = 0;
const CONTROL: u8 = 7;

fn sockaddr_of(addr: SocketAddr) -> sockaddr_in {
    let SocketAddr::V4(addr) = addr else {
        panic!("{addr}")
    };
    // SAFETY: all-zero bytes are valid.
    let mut c: sockaddr_in = unsafe { zeroed() };
    c.sin_family = libc::AF_INET as u16;
    c.sin_port = addr.port().to_be();
    c.sin_addr.s_addr = u32::from_ne_bytes(addr.ip().octets());
    c
}

/// A receiver that is known by UDP only, so that it sees which way datagrams take.
struct Receiver {
    rsocket: c_int,
    udp: UdpSocket,
}

impl Receiver {
    fn new() -> Self {
        // Its first use sets the environment.
        address("rsocket");
        let udp = UdpSocket::bind("127.0.41.2:0").unwrap();
        udp.set_read_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        let rsocket = call!(rsocket(libc::AF_INET => c_int, libc::SOCK_DGRAM => c_int,
            0 => c_int) -> c_int);
        assert!(rsocket >= 0, "{}", errno());
        let own = sockaddr_of("127.0.41.1:0".parse().unwrap());
        let bound = call!(rbind(rsocket => c_int, &raw const own => *const sockaddr_in,
            size_of_val(&own) as u32 => u32) -> c_int);
        assert_eq!(bound, 0, "{}", errno());
        Self { rsocket, udp }
    }

    /// Sends a datagram; answers the queue pair of the sender where it has come by UDP.
    fn send(&self) -> Option<SocketAddr> {
        let to = sockaddr_of(self.udp.local_addr().unwrap());
        let text = b"data";
        let n = call!(rsendto(self.rsocket => c_int, text.as_ptr().cast() => *const c_void,
            text.len() => usize, 0 => c_int, &raw const to => *const sockaddr_in,
            size_of_val(&to) as u32 => u32) -> isize);
        assert_eq!(n, text.len() as isize, "{}", errno());
        let mut bytes = [0; 100];
        let (n, from) = self.udp.recv_from(&mut bytes).ok()?;
        assert_eq!((bytes[5], &bytes[16..n]), (DATA, &text[..]));
        Some(from)
    }

    /// Says something to the rsocket, which takes it in with its next look.
    fn say(&self, to: SocketAddr, op: u8, qpn: u8) {
        self.udp.send_to(&header(op, qpn), to).unwrap();
        let mut byte = 0_u8;
        call!(rrecv(self.rsocket => c_int, (&raw mut byte).cast() => *mut c_void,
            1 => usize, libc::MSG_DONTWAIT => c_int) -> isize);
    }

    /// Takes what the rsocket answers to data.
    fn take_answer(&self) {
        let mut bytes = [0; 100];
        let (n, _) = self.udp.recv_from(&mut bytes).unwrap();
        assert_eq!((n, bytes[5]), (16, CONTROL));
    }
}

#[test]
fn only_the_answer_to_a_datagram_names_a_receivers_queue_pair() {
    let receiver = Receiver::new();
    let from = receiver.send().expect("by UDP, since nothing is known");
    receiver.say(from, CONTROL, 77);
    assert_eq!(receiver.send(), None, "to the queue pair of the answer");
    // Anyone who knows the addresses can forge this: it changes nothing but the way.
    receiver.say(from, CONTROL, 78);
    assert_eq!(receiver.send(), Some(from), "it is asked again");
    receiver.say(from, CONTROL, 77);
    assert_eq!(receiver.send(), None);
    receiver.say(from, DATA, 78);
    receiver.take_answer();
    assert_eq!(receiver.send(), Some(from), "the answer is waited for");
    assert_eq!(receiver.send(), Some(from));
    receiver.say(from, CONTROL, 77);
    assert_eq!(receiver.send(), None);
    let closed = call!(rclose(receiver.rsocket => c_int) -> c_int);
    assert_eq!(closed, 0);
}

/// Two ends of a connection, and the listener.
fn pair() -> [c_int; 3] {
    let stream = || {
        let n = call!(rsocket(libc::AF_INET => c_int, libc::SOCK_STREAM => c_int,
            0 => c_int) -> c_int);
        assert!(n >= 0, "{}", errno());
        n
    };
    let (listener, client) = (stream(), stream());
    let mut addr = sockaddr_of("127.0.41.1:0".parse().unwrap());
    let mut length = size_of_val(&addr) as u32;
    let bound = call!(rbind(listener => c_int, &raw const addr => *const sockaddr_in,
        length => u32) -> c_int);
    assert_eq!(bound, 0, "{}", errno());
    assert_eq!(call!(rlisten(listener => c_int, 1 => c_int) -> c_int), 0);
    call!(rgetsockname(listener => c_int, &raw mut addr => *mut sockaddr_in,
        &raw mut length => *mut u32) -> c_int);
    let server = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let null = std::ptr::null_mut::<c_void>();
            call!(raccept(listener => c_int, null => *mut c_void, null => *mut c_void) -> c_int)
        });
        let connected = call!(rconnect(client => c_int, &raw const addr => *const sockaddr_in,
            length => u32) -> c_int);
        assert_eq!(connected, 0, "{}", errno());
        accepting.join().unwrap()
    });
    assert!(server >= 0);
    [listener, client, server]
}

fn write(n: c_int, text: &[u8]) -> isize {
    call!(rwrite(n => c_int, text.as_ptr().cast() => *const c_void, text.len() => usize) -> isize)
}

fn read(n: c_int) -> Result<Vec<u8>, c_int> {
    let mut bytes = [0; 100];
    let n = call!(rread(n => c_int, bytes.as_mut_ptr().cast() => *mut c_void,
        bytes.len() => usize) -> isize);
    match usize::try_from(n) {
        Ok(n) => Ok(bytes[..n].to_vec()),
        Err(_) => Err(errno()),
    }
}

fn close(n: c_int) {
    assert_eq!(call!(rclose(n => c_int) -> c_int), 0);
}

#[test]
fn a_child_closes_its_parents_sockets_at_once() {
    let sockets @ [_, client, server] = pair();
    // SAFETY: the child makes calls of the library, and ends without the harness.
    let status = unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(10);
                let is_refused = read(server) == Err(libc::EBADF) && write(client, b"x") == -1;
                for n in sockets {
                    close(n);
                }
                libc::_exit(if is_refused { 0 } else { 1 });
            }
            child => {
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                status
            }
        }
    };
    assert_eq!(status, 0);
    assert_eq!(write(client, b"still here"), 10);
    assert_eq!(read(server).unwrap(), b"still here");
    sockets.into_iter().for_each(close);
}

/// The other end ends by `exit`, without closing anything, as many programs do.
#[test]
fn peers_learn_that_a_process_has_ended() {
    let stream =
        || call!(rsocket(libc::AF_INET => c_int, libc::SOCK_STREAM => c_int, 0 => c_int) -> c_int);
    let listener = stream();
    let mut addr = sockaddr_of("127.0.41.1:0".parse().unwrap());
    let mut length = size_of_val(&addr) as u32;
    call!(rbind(listener => c_int, &raw const addr => *const sockaddr_in, length => u32) -> c_int);
    assert_eq!(call!(rlisten(listener => c_int, 1 => c_int) -> c_int), 0);
    call!(rgetsockname(listener => c_int, &raw mut addr => *mut sockaddr_in,
        &raw mut length => *mut u32) -> c_int);
    // SAFETY: the child makes calls of the library, and ends without the harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let client = stream();
        let connected = call!(rconnect(client => c_int, &raw const addr => *const sockaddr_in,
            length => u32) -> c_int);
        // SAFETY: as above; handlers of the library run, and the harness has none.
        unsafe {
            libc::alarm(10);
            let is_well = connected == 0 && write(client, b"bye") == 3;
            libc::exit(if is_well { 0 } else { 1 });
        }
    }
    let null = std::ptr::null_mut::<c_void>();
    let server =
        call!(raccept(listener => c_int, null => *mut c_void, null => *mut c_void) -> c_int);
    assert_eq!(read(server).unwrap(), b"bye");
    let start = std::time::Instant::now();
    assert_eq!(read(server), Ok(Vec::new()));
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "{:?}",
        start.elapsed()
    );
    [listener, server].into_iter().for_each(close);
}

#[test]
fn a_datagram_that_was_not_asked_for_names_no_queue_pair() {
    let receiver = Receiver::new();
    let from = receiver.send().expect("by UDP, since nothing is known");
    receiver.say(from, DATA, 77);
    receiver.take_answer();
    assert_eq!(receiver.send(), Some(from), "it has not answered");
    let closed = call!(rclose(receiver.rsocket => c_int) -> c_int);
    assert_eq!(closed, 0);
}
