//! Programs with sockets, with the library before the C library's: this one, started again for each test.

#![allow(unsafe_code, reason = "calls of the C library are made")]

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::zeroed;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

mod preloaded;

use preloaded::*;

#[test]
fn streams() {
    if !is_preloaded("streams", &[]) {
        return;
    }
    let (listener, mut client, mut server) = pair();
    assert!(
        !has_tcp(listener.local_addr().unwrap().port()),
        "it is no rsocket"
    );
    client.set_nodelay(true).unwrap();
    assert!(client.nodelay().unwrap());
    let long: Vec<u8> = (0..500_000_u32).map(|n| (n % 251) as u8).collect();
    let sent = long.clone();
    let sender = thread::spawn(move || {
        client.write_all(&sent).unwrap();
        let pieces = [IoSlice::new(b"in "), IoSlice::new(b"pieces")];
        assert_eq!(client.write_vectored(&pieces).unwrap(), 9);
        client.shutdown(Shutdown::Write).unwrap();
        client
    });
    let mut got = vec![0; long.len()];
    server.read_exact(&mut got).unwrap();
    assert!(got == long);
    let mut text = [0; 9];
    let (a, b) = text.split_at_mut(4);
    assert_eq!(server.peek(a).unwrap().min(1), 1);
    let mut done = 0;
    while done < 9 {
        done += match done {
            0 => server
                .read_vectored(&mut [IoSliceMut::new(a), IoSliceMut::new(b)])
                .unwrap(),
            4.. => server.read(&mut b[done - 4..]).unwrap(),
            _ => server.read(&mut a[done..]).unwrap(),
        };
    }
    assert_eq!(&text, b"in pieces");
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 0, "the end");
    let client = sender.join().unwrap();
    // Copies of a descriptor are the same socket, which stays until the last is closed.
    let mut copy = server.try_clone().unwrap();
    drop(server);
    copy.write_all(b"back").unwrap();
    let mut back = [0; 4];
    (&client).read_exact(&mut back).unwrap();
    assert_eq!(&back, b"back");
    // One of a file that takes a socket's number is a file.
    let number = copy.as_raw_fd();
    let file = fs::File::open("/proc/self/status").unwrap();
    let mut status = [0; 5];
    // SAFETY: both descriptors are the test's, and there is room for as many bytes.
    unsafe {
        assert_eq!(libc::dup2(file.as_raw_fd(), number), number);
        assert_eq!(libc::read(number, status.as_mut_ptr().cast(), 5), 5);
    }
    assert_eq!(&status, b"Name:");
    assert_eq!((&client).read(&mut back).unwrap(), 0, "its peer is closed");
}

#[test]
fn ranges_that_are_not_closed() {
    if !is_preloaded("ranges_that_are_not_closed", &[]) {
        return;
    }
    let (_listener, mut client, mut server) = pair();
    let fd = server.as_raw_fd() as u32;
    // SAFETY: nothing is closed.
    unsafe {
        assert_eq!(libc::close_range(fd, fd, 1 << 8), -1, "an unknown flag");
        assert_eq!(libc::close_range(fd, fd - 1, 0), -1, "an empty range");
    }
    server.write_all(b"word").unwrap();
    let mut word = [0; 4];
    client.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"word");
}

#[test]
fn non_blocking() {
    if !is_preloaded("non_blocking", &[]) {
        return;
    }
    let (listener, mut client, mut server) = pair();
    listener.set_nonblocking(true).unwrap();
    server.set_nonblocking(true).unwrap();
    let would_block = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
    assert!(listener.accept().is_err_and(would_block));
    assert!(server.read(&mut [0]).is_err_and(would_block));
    // SAFETY: the entries are alive.
    let poll = |fds: &mut [libc::pollfd], ms| unsafe {
        libc::poll(fds.as_mut_ptr(), fds.len() as u64, ms)
    };
    let entry = |fd: RawFd, events| libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let file = fs::File::open("/proc/self/status").unwrap();
    let mut fds = [
        entry(server.as_raw_fd(), libc::POLLIN),
        entry(listener.as_raw_fd(), libc::POLLIN),
        entry(-1, libc::POLLIN),
    ];
    assert_eq!(poll(&mut fds, 20), 0);
    client.write_all(b"x").unwrap();
    assert_eq!(poll(&mut fds, 5000), 1);
    assert_eq!(fds[0].revents, libc::POLLIN);
    // Beside a file, which is ready at all times.
    let mut fds = [
        entry(file.as_raw_fd(), libc::POLLIN),
        entry(server.as_raw_fd(), libc::POLLIN | libc::POLLOUT),
    ];
    assert_eq!(poll(&mut fds, 5000), 2);
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 1);
    select(&mut client, &mut server);
}

fn select(client: &mut TcpStream, server: &mut TcpStream) {
    let fd = server.as_raw_fd();
    // SAFETY: the sets and the time are alive.
    unsafe {
        let mut reads: libc::fd_set = zeroed();
        let mut writes: libc::fd_set = zeroed();
        libc::FD_SET(fd, &raw mut reads);
        let mut time = libc::timeval {
            tv_sec: 0,
            tv_usec: 20_000,
        };
        let none = ptr::null_mut();
        let n = libc::select(fd + 1, &raw mut reads, none, none, &raw mut time);
        assert_eq!((n, libc::FD_ISSET(fd, &raw const reads)), (0, false));
        client.write_all(b"y").unwrap();
        libc::FD_SET(fd, &raw mut reads);
        libc::FD_SET(fd, &raw mut writes);
        time.tv_sec = 5;
        let start = Instant::now();
        while !libc::FD_ISSET(fd, &raw const reads) || start.elapsed() < Duration::from_millis(1) {
            libc::FD_SET(fd, &raw mut reads);
            let n = libc::select(fd + 1, &raw mut reads, &raw mut writes, none, &raw mut time);
            assert!(n > 0 && start.elapsed() < Duration::from_secs(5), "{n}");
        }
        assert!(libc::FD_ISSET(fd, &raw const writes));
    }
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 1);
}

#[test]
fn datagrams() {
    if !is_preloaded("datagrams", &[]) {
        return;
    }
    let (a, b) = (
        UdpSocket::bind((ADDR, 0)).unwrap(),
        UdpSocket::bind((ADDR, 0)).unwrap(),
    );
    let to = b.local_addr().unwrap();
    let mut bytes = [0; 100];
    for n in 0..4_u8 {
        assert_eq!(a.send_to(&[n; 30], to).unwrap(), 30);
        let (length, from) = b.recv_from(&mut bytes).unwrap();
        assert_eq!((length, bytes[29], from), (30, n, a.local_addr().unwrap()));
        b.send_to(&bytes[..n.into()], from).unwrap();
        assert_eq!(a.recv(&mut bytes).unwrap(), usize::from(n));
    }
    // Options that rsockets do not have are those of the UDP socket.
    a.set_broadcast(true).unwrap();
    assert!(a.connect(to).is_ok());
    assert_eq!(a.send(b"connected").unwrap(), 9);
    assert_eq!(b.recv(&mut bytes).unwrap(), 9);
}

#[test]
fn files_to_sockets() {
    if !is_preloaded("files_to_sockets", &[]) {
        return;
    }
    let (_listener, client, mut server) = pair();
    let path = env::temp_dir().join(format!("riser-preload-file-{}", std::process::id()));
    let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n % 253) as u8).collect();
    fs::write(&path, &bytes).unwrap();
    let file = fs::File::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let sender = thread::spawn(move || {
        let (out, file_fd) = (client.as_raw_fd(), file.as_raw_fd());
        let mut offset = 100;
        // SAFETY: the offset is alive.
        unsafe {
            let n = libc::sendfile(out, file_fd, &raw mut offset, 50_000);
            assert_eq!((n, offset), (50_000, 50_100));
            let rest = libc::sendfile(out, file_fd, ptr::null_mut(), 1 << 30);
            assert_eq!(rest, 200_000, "from where the file is");
            assert_eq!(libc::lseek(file_fd, 0, libc::SEEK_CUR), 200_000);
        }
    });
    let mut got = vec![0; 250_000];
    server.read_exact(&mut got).unwrap();
    sender.join().unwrap();
    assert!(got[..50_000] == bytes[100..50_100] && got[50_000..] == bytes);
    // SAFETY: all-zero bytes are valid, and the place is alive.
    unsafe {
        let mut is: libc::stat = zeroed();
        assert_eq!(libc::fstat(server.as_raw_fd(), &raw mut is), 0);
        assert_eq!(is.st_mode & libc::S_IFMT, libc::S_IFSOCK);
    }
}

#[test]
fn peers_without_rsockets() {
    if is_inside() {
        let addr: SocketAddr = env::var("PEER").unwrap().parse().unwrap();
        let start = Instant::now();
        let mut stream = TcpStream::connect(addr).unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "as soon as TCP has an answer"
        );
        assert_eq!(stream.peer_addr().unwrap(), addr);
        stream.write_all(b"by TCP").unwrap();
        // It blocks, as the program wants it.
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        return;
    }
    // No device is at that address.
    let listener = TcpListener::bind("127.0.45.9:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    let server = thread::spawn(move || {
        let mut text = [0; 6];
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut text).unwrap();
        thread::sleep(Duration::from_millis(50));
        text
    });
    assert!(!is_preloaded("peers_without_rsockets", &[("PEER", &peer)]));
    assert_eq!(&server.join().unwrap(), b"by TCP");
}

#[test]
fn slow_peers() {
    if !is_preloaded("slow_peers", &[]) {
        return;
    }
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(b"x").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        stream.local_addr().unwrap()
    });
    // Longer than the client waits before it looks for a server without rsockets.
    thread::sleep(Duration::from_millis(2500));
    let (mut server, from) = listener.accept().unwrap();
    assert_eq!(server.read(&mut [0; 2]).unwrap(), 1);
    assert!(!has_tcp(from.port()), "it is no rsocket");
    drop(server);
    assert_eq!(client.join().unwrap(), from);
}

#[test]
fn signals_while_a_peer_is_slow() {
    extern "C" fn handle(_: c_int) {}
    if !is_preloaded("signals_while_a_peer_is_slow", &[]) {
        return;
    }
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    for (flags, outcome) in [(libc::SA_RESTART, Ok(())), (0, Err(libc::EINTR))] {
        // SAFETY: all-zero bytes are valid but for the handler, which may be called at any time.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handle as extern "C" fn(c_int) as libc::sighandler_t;
            action.sa_flags = flags;
            assert_eq!(
                libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()),
                0
            );
        }
        let client = thread::spawn(move || connect(port));
        for _ in 0..8 {
            thread::sleep(Duration::from_millis(200));
            // SAFETY: the thread has not been joined.
            unsafe { libc::pthread_kill(client.as_pthread_t(), libc::SIGUSR1) };
        }
        if outcome.is_ok() {
            drop(listener.accept().unwrap());
        }
        assert_eq!(client.join().unwrap(), outcome);
    }
}

/// Connects to a port of the device's address; answers the error of the call.
fn connect(port: u16) -> Result<(), c_int> {
    // SAFETY: all-zero bytes are a valid address, which has that length; the descriptor is closed here.
    unsafe {
        let mut addr: libc::sockaddr_in = zeroed();
        addr.sin_family = libc::AF_INET as u16;
        addr.sin_addr.s_addr = u32::from(ADDR.parse::<Ipv4Addr>().unwrap()).to_be();
        addr.sin_port = port.to_be();
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        let result = match libc::connect(fd, (&raw const addr).cast(), size_of_val(&addr) as u32) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap()),
        };
        libc::close(fd);
        result
    }
}

#[test]
fn servers_that_close_at_once() {
    const TEST: &str = "servers_that_close_at_once";
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            let listener = TcpListener::bind((ADDR, port)).unwrap();
            drop(listener.accept().unwrap());
            // SAFETY: the process ends without the harness, and without the library.
            unsafe { libc::_exit(0) };
        }
        // Until the server is there, it is refused by TCP as well.
        let mut stream = loop {
            if let Ok(stream) = TcpStream::connect((ADDR, port)) {
                break stream;
            }
        };
        let start = Instant::now();
        assert!(!stream.read(&mut [0]).is_ok_and(|n| n > 0));
        // It hears of the end, and does not find out that nothing answers.
        assert!(start.elapsed() < Duration::from_secs(20));
        return;
    }
    let links = Links::new(TEST);
    let port = &*free_port().to_string();
    let mut server = links.start(TEST, ADDR, &[("PORT", port), ("SERVER", "1")]);
    finish(links.start(TEST, "127.0.45.2", &[("PORT", port)]));
    server.wait().unwrap();
}
