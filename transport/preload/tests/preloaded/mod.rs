//! Processes whose sockets are rsockets: the test program, started again for a test.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io::{self, Write};
use std::mem::zeroed;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::FromRawFd;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

// Only its file is used, which Cargo puts beside the test programs.
use riser_drop_in as _;

/// Address of the device.
pub(crate) const ADDR: &str = "127.0.45.1";

/// A folder with the links that programs load.
pub(crate) struct Links(PathBuf);

impl Links {
    pub(crate) fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("riser-preload-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        for link in ["libibverbs.so.1", "librdmacm.so.1"] {
            symlink(beside("libriser_drop_in.so"), folder.join(link)).unwrap();
        }
        Self(folder)
    }

    /// Starts a test again, in a process whose sockets are rsockets and whose device has an address.
    pub(crate) fn start(&self, test: &str, addr: &str, variables: &[(&str, &str)]) -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env("SOCKETS", "1")
            .env("LD_LIBRARY_PATH", &self.0)
            .env("LD_PRELOAD", beside("librspreload.so"))
            .env("RISER_DEVICES", format!("riser0={addr}"))
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
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

/// Lets a process that waits for it go on.
pub(crate) fn go_on(child: &mut Child) {
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
}

/// Waits until [`go_on`] lets this process go on.
pub(crate) fn wait_for_word() {
    io::stdin().read_line(&mut String::new()).unwrap();
}

/// Waits for the end of a test in another process, which must succeed.
pub(crate) fn finish(child: Child) {
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {said}", out.status);
    assert!(String::from_utf8_lossy(&out.stdout).contains("1 passed"));
}

/// Whether this process's sockets are rsockets. Its time is limited then.
pub(crate) fn is_inside() -> bool {
    let is_inside = env::var_os("SOCKETS").is_some();
    if is_inside {
        // SAFETY: the call changes a timer only, whose signal ends the process.
        unsafe { libc::alarm(60) };
    }
    is_inside
}

/// Runs a test again, in a process whose sockets are rsockets. Answers whether this is that process.
pub(crate) fn is_preloaded(test: &str, variables: &[(&str, &str)]) -> bool {
    if is_inside() {
        return true;
    }
    finish(Links::new(test).start(test, ADDR, variables));
    false
}

/// Whether the kernel has a TCP socket with a port that listens or is connected.
pub(crate) fn has_tcp(port: u16) -> bool {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let is_it = |line: &str| {
        line.contains(&format!(":{port:04X} ")) && (line.contains(" 0A ") || line.contains(" 01 "))
    };
    table.lines().any(is_it)
}

/// A TCP port of the device's address that is free.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// Connects to a port of the device's address from an address of this host.
pub(crate) fn connect_from(from: Ipv4Addr, port: u16) -> io::Result<TcpStream> {
    let addr = |ip: Ipv4Addr, port: u16| {
        // SAFETY: all-zero bytes are a valid address.
        let mut addr: libc::sockaddr_in = unsafe { zeroed() };
        addr.sin_family = libc::AF_INET as u16;
        addr.sin_addr.s_addr = u32::from(ip).to_be();
        addr.sin_port = port.to_be();
        addr
    };
    let (from, to) = (addr(from, 0), addr(ADDR.parse().unwrap(), port));
    let length = size_of_val(&to) as u32;
    // SAFETY: the addresses are alive and have that length; the descriptor is this function's.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        let stream = TcpStream::from_raw_fd(fd);
        if libc::bind(fd, (&raw const from).cast(), length) != 0
            || libc::connect(fd, (&raw const to).cast(), length) != 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok(stream)
    }
}

/// The same, as soon as a server listens.
pub(crate) fn connect_to_server(from: Ipv4Addr, port: u16) -> TcpStream {
    loop {
        match connect_from(from, port) {
            Ok(stream) => return stream,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                thread::sleep(std::time::Duration::from_millis(5));
            }
            Err(error) => panic!("{}: {error}", SocketAddrV4::new(from, port)),
        }
    }
}

/// Two ends of a connection.
pub(crate) fn pair() -> (TcpListener, TcpStream, TcpStream) {
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let client = thread::spawn(move || TcpStream::connect(addr).unwrap());
    let (server, from) = listener.accept().unwrap();
    let client = client.join().unwrap();
    assert_eq!(client.local_addr().unwrap(), from);
    assert_eq!(client.peer_addr().unwrap(), addr);
    (listener, client, server)
}

/// Waits for a descriptor, files and rsockets alike; answers whether it is readable in that time.
pub(crate) fn is_readable(fd: c_int, ms: c_int) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the entry is alive.
    unsafe { libc::poll(&raw mut entry, 1, ms) == 1 }
}
