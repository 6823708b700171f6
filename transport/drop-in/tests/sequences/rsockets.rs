//! Sequences of the calls of rsockets.

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr;
use std::sync::Barrier;

use riser_rdma_core_sys::bindings::{sockaddr_in, sockaddr_storage};

use super::library::*;
use super::{ADDRESSES, Choices};

/// Calls of a thread.
const CALLS: usize = 300;

const PORTS: [u16; 3] = [7181, 7182, 0];

/// Errors that sockets have.
const ERRORS: &[c_int] = &[
    libc::EAGAIN,
    libc::EINPROGRESS,
    libc::EALREADY,
    libc::EINVAL,
    libc::EBADF,
    libc::EFAULT,
    libc::EISCONN,
    libc::ENOTCONN,
    libc::EDESTADDRREQ,
    libc::EADDRINUSE,
    libc::EADDRNOTAVAIL,
    libc::EAFNOSUPPORT,
    libc::EOPNOTSUPP,
    libc::ENODEV,
    libc::ENOMEM,
    libc::ENXIO,
    libc::ECONNREFUSED,
    libc::ECONNRESET,
    libc::ETIMEDOUT,
    libc::EHOSTUNREACH,
    libc::ENETUNREACH,
    libc::EMSGSIZE,
    libc::EPROTO,
    libc::ENOPROTOOPT,
    libc::EPERM,
    libc::EACCES,
    libc::EDOM,
    libc::EPIPE,
];

/// What a thread has.
struct Program {
    choices: Choices,
    live: Vec<c_int>,
    buffer: Box<[u8; 70_000]>,
    mapped: Box<[u8; 4096]>,
}

/// Runs a sequence: two threads that connect to each other's listeners as well.
pub(super) fn run(seed: u64) {
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        for n in 0..2 {
            let start = &start;
            scope.spawn(move || {
                let mut program = Program {
                    choices: Choices::new(2 * seed + n),
                    live: Vec::new(),
                    buffer: Box::new([7; 70_000]),
                    mapped: Box::new([0; 4096]),
                };
                start.wait();
                for _ in 0..CALLS {
                    program.step();
                }
                while let Some(socket) = program.live.first().copied() {
                    program.close(socket);
                }
            });
        }
    });
}

impl Program {
    fn step(&mut self) {
        let socket = self.socket();
        match self.choices.below(24) {
            0 | 1 => self.create(),
            2 => self.close(socket),
            3 | 4 => self.bind(socket),
            5 => self.listen(socket),
            6 | 7 => self.accept(socket),
            8..=10 => self.connect(socket),
            11..=13 => self.send(socket),
            14..=16 => self.receive(socket),
            17 => self.shutdown(socket),
            18 => self.poll(),
            19 => self.set_option(socket),
            20 => self.get_option(socket),
            21 => self.map(socket),
            22 => self.vectors(socket),
            _ => self.names(socket),
        }
    }

    /// Most often a socket of this thread, now and then a number that is none.
    fn socket(&mut self) -> c_int {
        if self.live.is_empty() || self.choices.once_in(15) {
            return self.choices.of(&[-1, 0, 9999, c_int::MAX, c_int::MIN]);
        }
        let at = self.choices.below(self.live.len());
        self.live[at]
    }

    #[track_caller]
    fn checked(&self, call: &str, result: isize) {
        assert!(result >= -1, "{call}: {result}");
        if result == -1 {
            let errno = errno();
            let is_known = ERRORS.contains(&errno) || errno == libc::ENOTSUP;
            assert!(
                is_known,
                "{call}: {}",
                std::io::Error::from_raw_os_error(errno)
            );
        }
    }

    fn keep(&mut self, socket: c_int) {
        if socket < 0 {
            return;
        }
        self.live.push(socket);
        // No call may wait.
        let result = call!(rfcntl(socket => c_int, libc::F_SETFL => c_int,
            libc::O_NONBLOCK => c_int) -> c_int);
        assert_eq!(result, 0);
    }

    fn create(&mut self) {
        if self.live.len() > 12 {
            return;
        }
        let domain = self
            .choices
            .of(&[libc::AF_INET, libc::AF_INET, libc::AF_INET6, 77, -1]);
        let kind = self
            .choices
            .of(&[libc::SOCK_STREAM, libc::SOCK_STREAM, libc::SOCK_DGRAM, 5]);
        self.choices.show("rsocket");
        let socket = call!(rsocket(domain => c_int, kind => c_int, 0 => c_int) -> c_int);
        self.checked("rsocket", socket as isize);
        self.keep(socket);
    }

    fn close(&mut self, socket: c_int) {
        self.choices.show(&format!("rclose {socket}"));
        let result = call!(rclose(socket => c_int) -> c_int);
        let is_live = self.live.contains(&socket);
        assert_eq!(result, if is_live { 0 } else { -1 });
        if is_live {
            self.live.retain(|live| *live != socket);
        }
    }

    fn address(&mut self) -> sockaddr_in {
        // SAFETY: all-zero bytes are valid.
        let mut addr: sockaddr_in = unsafe { zeroed() };
        addr.sin_family = match self.choices.once_in(12) {
            true => self.choices.of(&[0, 77, u16::MAX]),
            false => libc::AF_INET as u16,
        };
        addr.sin_port = self.choices.of(&PORTS).to_be();
        let octets = match self.choices.once_in(10) {
            true => self.choices.of(&[[0; 4], [127, 0, 43, 9], [255; 4]]),
            false => self.choices.of(&ADDRESSES),
        };
        addr.sin_addr.s_addr = u32::from_ne_bytes(octets);
        addr
    }

    fn bind(&mut self, socket: c_int) {
        let addr = self.address();
        self.choices.show(&format!("rbind {socket}"));
        let result = call!(rbind(socket => c_int, &raw const addr => *const sockaddr_in,
            16 => u32) -> c_int);
        self.checked("rbind", result as isize);
    }

    fn listen(&mut self, socket: c_int) {
        let backlog = self.choices.of(&[5, 0, -1, c_int::MAX]);
        self.choices.show(&format!("rlisten {socket}"));
        let result = call!(rlisten(socket => c_int, backlog => c_int) -> c_int);
        self.checked("rlisten", result as isize);
    }

    fn accept(&mut self, socket: c_int) {
        // SAFETY: all-zero bytes are valid.
        let mut addr: sockaddr_storage = unsafe { zeroed() };
        let mut length = self.choices.of(&[128_u32, 16, 0]);
        self.choices.show(&format!("raccept {socket}"));
        let new = call!(raccept(socket => c_int, &raw mut addr => *mut sockaddr_storage,
            &raw mut length => *mut u32) -> c_int);
        self.checked("raccept", new as isize);
        self.keep(new);
    }

    fn connect(&mut self, socket: c_int) {
        let addr = self.address();
        self.choices.show(&format!("rconnect {socket}"));
        let result = call!(rconnect(socket => c_int, &raw const addr => *const sockaddr_in,
            16 => u32) -> c_int);
        self.checked("rconnect", result as isize);
    }

    fn length(&mut self) -> usize {
        self.choices.of(&[1, 100, 5000, 70_000, 0, usize::MAX])
    }

    fn send(&mut self, socket: c_int) {
        let length = self.length();
        let flags = self
            .choices
            .of(&[libc::MSG_DONTWAIT, 0, libc::MSG_NOSIGNAL]);
        let to = self.address();
        let to = match self.choices.once_in(3) {
            true => &raw const to,
            false => ptr::null(),
        };
        self.choices.show(&format!("rsendto {socket}"));
        let n = call!(rsendto(socket => c_int, self.buffer.as_ptr().cast() => *const c_void,
            length => usize, flags => c_int, to => *const sockaddr_in, 16 => u32) -> isize);
        self.checked("rsendto", n);
        assert!(n < 0 || n as usize <= length);
    }

    fn receive(&mut self, socket: c_int) {
        let length = self.length();
        let flags = self.choices.of(&[
            libc::MSG_DONTWAIT,
            libc::MSG_PEEK,
            libc::MSG_WAITALL | libc::MSG_DONTWAIT,
        ]);
        self.choices.show(&format!("rrecvfrom {socket}"));
        let n = call!(rrecvfrom(socket => c_int, self.buffer.as_mut_ptr().cast() => *mut c_void,
            length => usize, flags => c_int, ptr::null_mut() => *mut sockaddr_in,
            ptr::null_mut() => *mut u32) -> isize);
        self.checked("rrecvfrom", n);
        assert!(n < 0 || n as usize <= length);
    }

    fn shutdown(&mut self, socket: c_int) {
        let how = self
            .choices
            .of(&[libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR, 77]);
        self.choices.show(&format!("rshutdown {socket}"));
        let result = call!(rshutdown(socket => c_int, how => c_int) -> c_int);
        self.checked("rshutdown", result as isize);
    }

    fn poll(&mut self) {
        let mut fds: Vec<libc::pollfd> = (0..self.choices.below(6))
            .map(|_| libc::pollfd {
                fd: self.socket(),
                events: self.choices.of(&[libc::POLLIN, libc::POLLOUT, -1, 0]),
                revents: 0,
            })
            .collect();
        self.choices.show("rpoll");
        let timeout = self.choices.of(&[0, 1, 10]);
        let count = match self.choices.once_in(10) {
            true => u64::MAX,
            false => fds.len() as u64,
        };
        let n = call!(rpoll(fds.as_mut_ptr() => *mut libc::pollfd, count => u64,
            timeout => c_int) -> c_int);
        self.checked("rpoll", n as isize);
        assert!(n <= fds.len() as c_int);
    }

    fn set_option(&mut self, socket: c_int) {
        let (level, name) = self.option();
        let value = self.choices.of(&[1, 0, -1, c_int::MAX, 4096]);
        let length = self.choices.of(&[4, 4, 8, 0, 1]);
        let room = [value, 0];
        self.choices
            .show(&format!("rsetsockopt {socket} {level} {name} {value}"));
        let result = call!(rsetsockopt(socket => c_int, level => c_int, name => c_int,
            room.as_ptr().cast() => *const c_void, length => u32) -> c_int);
        // The kernel has errors of its own for the options of a UDP socket.
        assert!(result == 0 || (result == -1 && errno() > 0), "{result}");
    }

    fn option(&mut self) -> (c_int, c_int) {
        let level = self.choices.of(&[
            libc::SOL_SOCKET,
            libc::IPPROTO_TCP,
            libc::IPPROTO_IPV6,
            0x10000,
            77,
        ]);
        (level, self.choices.rng.i32(0..30))
    }

    fn get_option(&mut self, socket: c_int) {
        let (level, name) = self.option();
        let mut room = [0_u64; 8];
        let mut length = self.choices.of(&[64_u32, 4, 8, 0]);
        let given = length;
        self.choices
            .show(&format!("rgetsockopt {socket} {level} {name}"));
        let result = call!(rgetsockopt(socket => c_int, level => c_int, name => c_int,
            room.as_mut_ptr().cast() => *mut c_void, &raw mut length => *mut u32) -> c_int);
        self.checked("rgetsockopt", result as isize);
        assert!(result != 0 || length <= given);
    }

    fn map(&mut self, socket: c_int) {
        let at: *mut c_void = self.mapped.as_mut_ptr().cast();
        let length = self.choices.of(&[4096_usize, 1, 0]);
        let offset = self.choices.of(&[-1_i64, 0, 100, i64::MIN]);
        match self.choices.below(3) {
            0 => {
                let protection = self.choices.of(&[libc::PROT_WRITE, 0, libc::PROT_EXEC]);
                self.choices.show(&format!("riomap {socket}"));
                let result = call!(riomap(socket => c_int, at => *mut c_void, length => usize,
                    protection => c_int, 0 => c_int, offset => i64) -> i64);
                if result == -1 {
                    self.checked("riomap", -1);
                }
            }
            1 => {
                self.choices.show(&format!("riounmap {socket}"));
                let result = call!(riounmap(socket => c_int, at => *mut c_void,
                    length => usize) -> c_int);
                self.checked("riounmap", result as isize);
            }
            _ => {
                self.choices.show(&format!("riowrite {socket}"));
                let n = call!(riowrite(socket => c_int,
                    self.buffer.as_ptr().cast() => *const c_void, length => usize, offset => i64,
                    libc::MSG_DONTWAIT => c_int) -> isize);
                self.checked("riowrite", n);
            }
        }
    }

    fn vectors(&mut self, socket: c_int) {
        let at: *mut c_void = self.buffer.as_mut_ptr().cast();
        let lengths = [self.length(), self.length()];
        let vector = lengths.map(|iov_len| libc::iovec {
            iov_base: at,
            iov_len,
        });
        let count = self.choices.of(&[2, 1, 0, -1, c_int::MAX]);
        // Counts that are too large are refused before the vector is read.
        let vector = vector.as_ptr();
        if self.choices.once_in(2) {
            self.choices.show(&format!("rreadv {socket}"));
            let n = call!(rreadv(socket => c_int, vector => *const libc::iovec,
                count => c_int) -> isize);
            self.checked("rreadv", n);
        } else {
            self.choices.show(&format!("rwritev {socket}"));
            let n = call!(rwritev(socket => c_int, vector => *const libc::iovec,
                count => c_int) -> isize);
            self.checked("rwritev", n);
        }
    }

    fn names(&mut self, socket: c_int) {
        // SAFETY: all-zero bytes are valid.
        let mut addr: sockaddr_storage = unsafe { zeroed() };
        let mut length = self.choices.of(&[128_u32, 4, 0]);
        self.choices.show(&format!("rgetsockname {socket}"));
        let result = call!(rgetsockname(socket => c_int,
            &raw mut addr => *mut sockaddr_storage, &raw mut length => *mut u32) -> c_int);
        self.checked("rgetsockname", result as isize);
        let result = call!(rgetpeername(socket => c_int,
            &raw mut addr => *mut sockaddr_storage, &raw mut length => *mut u32) -> c_int);
        self.checked("rgetpeername", result as isize);
        let result = call!(rfcntl(socket => c_int, 77 => c_int, 0 => c_int) -> c_int);
        self.checked("rfcntl", result as isize);
    }
}
