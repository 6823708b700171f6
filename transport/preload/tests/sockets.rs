//! Programs with sockets, with the library before the C library's: this one, started again for each test.

#![allow(unsafe_code, reason = "calls of the C library are made")]

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::zeroed;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

// Only its file is used, which Cargo puts beside this program.
use riser_drop_in as _;

/// Address of the device.
const ADDR: &str = "127.0.45.1";

/// A folder with the links that programs load.
struct Links(PathBuf);

impl Links {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("riser-preload-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        for link in ["libibverbs.so.1", "librdmacm.so.1"] {
            symlink(beside("libriser_drop_in.so"), folder.join(link)).unwrap();
        }
        Self(folder)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A library, which Cargo puts beside the tests.
fn beside(name: &str) -> PathBuf {
    let path = env::current_exe().unwrap().with_file_name(name);
    assert!(path.is_file(), "{}", path.display());
    path
}

/// Runs a test again, in a process whose sockets are rsockets. Answers whether this is that process.
fn is_preloaded(test: &str, variables: &[(&str, &str)]) -> bool {
    if env::var_os("SOCKETS").is_some() {
        // SAFETY: the call changes a timer only, whose signal ends the process.
        unsafe { libc::alarm(60) };
        return true;
    }
    let links = Links::new(test);
    let out = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env("SOCKETS", "1")
        .env("LD_LIBRARY_PATH", &links.0)
        .env("LD_PRELOAD", beside("librspreload.so"))
        .env("RISER_DEVICES", format!("riser0={ADDR}"))
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {said}", out.status);
    assert!(String::from_utf8_lossy(&out.stdout).contains("1 passed"));
    false
}

/// Whether the kernel has a TCP socket with a port.
fn has_tcp(port: u16) -> bool {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    table.contains(&format!(":{port:04X} "))
}

/// Two ends of a connection.
fn pair() -> (TcpListener, TcpStream, TcpStream) {
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let client = thread::spawn(move || TcpStream::connect(addr).unwrap());
    let (server, from) = listener.accept().unwrap();
    let client = client.join().unwrap();
    assert_eq!(client.local_addr().unwrap(), from);
    assert_eq!(client.peer_addr().unwrap(), addr);
    (listener, client, server)
}

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

/// Waits for events of an `epoll` descriptor.
fn wait(epoll: c_int, ms: c_int) -> Vec<(u32, u64)> {
    // SAFETY: all-zero bytes are valid, and there is room for as many.
    unsafe {
        let mut events: [libc::epoll_event; 8] = zeroed();
        let n = libc::epoll_wait(epoll, events.as_mut_ptr(), 8, ms);
        assert!(n >= 0, "{}", io::Error::last_os_error());
        let all = events[..n as usize].iter();
        all.map(|event| (event.events, event.u64)).collect()
    }
}

fn control(epoll: c_int, op: c_int, fd: c_int, events: c_int, data: u64) -> c_int {
    let mut event = libc::epoll_event {
        events: events as u32,
        u64: data,
    };
    // SAFETY: the event is alive.
    match unsafe { libc::epoll_ctl(epoll, op, fd, &raw mut event) } {
        0 => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap(),
    }
}

#[test]
fn epoll() {
    if !is_preloaded("epoll", &[]) {
        return;
    }
    let (_listener, mut client, mut server) = pair();
    // SAFETY: the calls may be made at any time.
    let (epoll, eventfd) = unsafe { (libc::epoll_create1(0), libc::eventfd(0, 0)) };
    let fd = server.as_raw_fd();
    let level = libc::EPOLLIN;
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_MOD, fd, level, 0),
        libc::ENOENT
    );
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, level, 7), 0);
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_ADD, fd, level, 7),
        libc::EEXIST
    );
    assert_eq!(
        control(eventfd, libc::EPOLL_CTL_ADD, fd, level, 7),
        libc::EINVAL
    );
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, eventfd, level, 8), 0);
    assert_eq!(wait(epoll, 20), []);
    client.write_all(b"ab").unwrap();
    let readable = (libc::EPOLLIN as u32, 7);
    assert_eq!(wait(epoll, 5000), [readable]);
    assert_eq!(
        wait(epoll, 5000),
        [readable],
        "as long as there is something"
    );
    let one = 1_u64;
    // SAFETY: the number is alive.
    unsafe { libc::write(eventfd, (&raw const one).cast(), 8) };
    let mut both = wait(epoll, 5000);
    both.sort_unstable();
    assert_eq!(both, [readable, (libc::EPOLLIN as u32, 8)]);
    assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, eventfd, 0, 0), 0);

    let edge = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET;
    assert_eq!(control(epoll, libc::EPOLL_CTL_MOD, fd, edge, 9), 0);
    assert_eq!(
        wait(epoll, 5000),
        [((libc::EPOLLIN | libc::EPOLLOUT) as u32, 9)]
    );
    assert_eq!(wait(epoll, 20), [], "it was reported");
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 1);
    assert_eq!(
        wait(epoll, 5000),
        [(libc::EPOLLIN as u32, 9)],
        "more is there"
    );
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 1);
    // A thread that waits hears of what another one makes possible.
    let waiter = thread::spawn(move || wait(epoll, 5000));
    thread::sleep(Duration::from_millis(50));
    client.write_all(b"c").unwrap();
    assert_eq!(waiter.join().unwrap(), [(libc::EPOLLIN as u32, 9)]);

    let once = libc::EPOLLIN | libc::EPOLLONESHOT;
    assert_eq!(control(epoll, libc::EPOLL_CTL_MOD, fd, once, 1), 0);
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLIN as u32, 1)]);
    assert_eq!(wait(epoll, 20), []);
    assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, fd, 0, 0), 0);
    assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, fd, 0, 0), libc::ENOENT);
    // One that is closed is in no set.
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, level, 7), 0);
    drop(server);
    assert_eq!(wait(epoll, 20), []);
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
    if env::var_os("SOCKETS").is_some() {
        is_preloaded("", &[]);
        let addr: SocketAddr = env::var("PEER").unwrap().parse().unwrap();
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(b"by TCP").unwrap();
        return;
    }
    // No device is at that address.
    let listener = TcpListener::bind("127.0.45.9:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    let server = thread::spawn(move || {
        let mut text = String::new();
        listener
            .accept()
            .unwrap()
            .0
            .read_to_string(&mut text)
            .unwrap();
        text
    });
    assert!(!is_preloaded("peers_without_rsockets", &[("PEER", &peer)]));
    assert_eq!(server.join().unwrap(), "by TCP");
}

#[test]
fn servers_that_fork() {
    if !is_preloaded("servers_that_fork", &[("RDMAV_FORK_SAFE", "1")]) {
        return;
    }
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    // The server is a process of its own, which has no device before it forks.
    // SAFETY: no other thread runs yet, so the child may do all.
    let server = unsafe { libc::fork() };
    if server == 0 {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            // SAFETY: as above.
            if unsafe { libc::fork() } == 0 {
                let mut text = [0; 5];
                stream.read_exact(&mut text).unwrap();
                let is_tcp = has_tcp(stream.peer_addr().unwrap().port());
                stream
                    .write_all(if is_tcp { b"by TCP" } else { b"by RDMA" })
                    .unwrap();
                drop(stream);
                // SAFETY: the child ends without the harness.
                unsafe { libc::_exit(0) };
            }
        }
        // SAFETY: as above; the statuses are not asked for.
        unsafe {
            while libc::wait(ptr::null_mut()) > 0 {}
            libc::_exit(0);
        }
    }
    drop(listener);
    let clients = [0, 1].map(|_| {
        thread::spawn(move || {
            let mut stream = TcpStream::connect(addr).unwrap();
            stream.write_all(b"hello").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        })
    });
    for client in clients {
        assert_eq!(client.join().unwrap(), "by RDMA");
    }
    // SAFETY: the child is this process's.
    assert_eq!(unsafe { libc::waitpid(server, ptr::null_mut(), 0) }, server);
}
