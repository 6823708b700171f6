//! Servers that fork for each connection.
//!
//! An RDMA connection belongs to the process that has made it. So with `RDMAV_FORK_SAFE=1` at both ends
//! sockets connect by TCP first. The process of the server that first uses an accepted socket listens
//! for an rsocket at the same port, and says so by four zero bytes; the client then connects. This is how
//! rdma-core does it, with which it works together. A server that hears data first, and a client that hears
//! other bytes, stay with TCP.
//!
//! A server that cannot listen says nothing and stays with TCP: a client of rdma-core's would take the zero
//! bytes for data. So its client waits, until the server says something.
//!
//! Any host can connect to that port meanwhile, and ask in the name of another. So the server takes the
//! rsocket that is first to be connected, for which its client has had an answer, of those from the host
//! of the TCP connection.

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd as _;
use std::ptr;
use std::time::{Duration, Instant};

use libc::{pollfd, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::private::Private;
use crate::table::{Kind, Stage, change, kind, placeholder, thread};
use crate::turn::Turns;
use crate::wait::masked;
use crate::watch::{LOOK, Watch};
use crate::{config, connect, epoll, errno, rdma, real};

/// What a server says when it listens.
const READY: [u8; READY_LEN] = [0; READY_LEN];
const READY_LEN: usize = 4;

/// Multiple of its patience in which a server decides about an rsocket from another address, and the shortest
/// patience that a client expects of a server: the client's environment may have another one.
const UNDECIDED: u32 = 5;
const PATIENCE: Duration = Duration::from_secs(1);

/// Requests that wait at the port: those of strangers are among them.
const BACKLOG: c_int = 16;

/// Most rsockets of the client's host that are not connected yet.
const MAX_CANDIDATES: usize = 8;

/// The number of no rsocket: calls answer `EBADF`.
const CLOSED: c_int = c_int::MAX;

/// Makes an rsocket of a TCP socket that waits for its use; answers it, or `None` where the socket stays.
pub(crate) fn settle(fd: c_int) -> Option<c_int> {
    let [settling, offered] = stages();
    let stage = loop {
        match kind(fd) {
            Kind::Rsocket(n) => return Some(n),
            Kind::File | Kind::Forking(Stage::New | Stage::Listening) => return None,
            // A handler of a signal that interrupts it. Behind what it says by TCP, the client would take an offer for
            // data.
            now if now == settling => {
                change(fd, settling, Kind::File);
                return None;
            }
            now if now == offered => return None,
            // Another thread of the program uses it as well.
            Kind::Forking(Stage::Settling(_) | Stage::Offered(_) | Stage::Replacing) => {
                std::thread::sleep(LOOK);
            }
            Kind::Forking(stage @ (Stage::Active | Stage::Passive)) => {
                // The server of an active one may have made its offer.
                let is_active = stage == Stage::Active;
                let own = if is_active { offered } else { settling };
                if change(fd, Kind::Forking(stage), own) {
                    break stage;
                }
            }
        }
    };
    // Another thread may close the socket meanwhile, and its number may be another file's. A child has no copy:
    // the peer would not see the end of the connection.
    let copy = Private::copy(fd);
    let tcp = copy.as_ref().map_or(fd, |copy| copy.as_raw_fd());
    let made = match stage {
        Stage::Active => join(tcp),
        _ => accept(tcp, || change(fd, settling, offered)),
    };
    match made {
        None => {
            // A handler may have done that.
            for own in [settling, offered] {
                change(fd, own, Kind::File);
            }
            (!is_same(fd, tcp)).then_some(CLOSED)
        }
        Some(n) => {
            prepare(tcp, n);
            if put(fd, tcp, n) {
                return Some(n);
            }
            // Closed: it has no socket any more.
            close(n);
            Some(CLOSED)
        }
    }
}

/// Kinds of a socket of which this thread makes an rsocket, before and after it has offered that.
fn stages() -> [Kind; 2] {
    [Stage::Settling(thread()), Stage::Offered(thread())].map(Kind::Forking)
}

/// Whether two descriptors are the same socket. The C library closes descriptors also without a call of `close`, as in
/// `fclose`, and the number is another file's then, of which the table says nothing.
fn is_same(fd: c_int, copy: c_int) -> bool {
    let file = |fd| {
        // SAFETY: all-zero bytes are valid, and the place is alive.
        unsafe {
            let mut stat: libc::stat = zeroed();
            let is_open = real::fstat(fd, &raw mut stat) == 0;
            is_open.then_some((stat.st_dev, stat.st_ino))
        }
    };
    let found = file(fd);
    found.is_some() && found == file(copy)
}

/// Gives an rsocket the options of a TCP socket.
fn prepare(tcp: c_int, n: c_int) {
    config::apply(n);
    connect::copy_options((tcp, real::getsockopt), (n, rdma::rsetsockopt));
    // SAFETY: the calls take any numbers.
    unsafe {
        let flags = real::fcntl(tcp, libc::F_GETFL, 0) & libc::O_NONBLOCK;
        rdma::rfcntl(n, libc::F_SETFL, flags);
    }
}

/// Puts an rsocket in the place of the TCP socket that this thread makes it of, and ends that one. Answers whether the
/// descriptor was still the same socket as its copy.
fn put(fd: c_int, tcp: c_int, n: c_int) -> bool {
    let [_, offered] = stages();
    let replacing = Kind::Forking(Stage::Replacing);
    let begin = || {
        let begins = change(fd, offered, replacing);
        // After the change, from which on no call of `close` is made.
        let is_replaced = begins && is_same(fd, tcp);
        if begins && !is_replaced {
            change(fd, replacing, Kind::File);
        }
        is_replaced
    };
    let replace = || {
        // SAFETY: the calls take any numbers.
        unsafe {
            let at_exec = real::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC != 0;
            real::shutdown(fd, libc::SHUT_RDWR);
            let place = placeholder(at_exec);
            real::dup3(place, fd, if at_exec { libc::O_CLOEXEC } else { 0 });
            real::close(place);
        }
        change(fd, replacing, Kind::Rsocket(n));
    };
    // A handler of this thread would wait for it, or for the lock of the sets, without end.
    undisturbed(|| epoll::settle(fd, n, begin, replace))
}

/// Calls without a handler of a signal in between.
fn undisturbed<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: all-zero bytes are a valid set, which is alive.
    unsafe {
        let mut all: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut all);
        masked(&raw const all, call)
    }
}

/// An address of a socket, by one of the calls that answer one.
fn address(
    fd: c_int,
    call: unsafe fn(c_int, *mut libc::sockaddr, *mut socklen_t) -> c_int,
) -> Option<(sockaddr_storage, socklen_t)> {
    // SAFETY: all-zero bytes are a valid address, and the place has that size.
    unsafe {
        let mut addr: sockaddr_storage = zeroed();
        let mut length = size_of_val(&addr) as socklen_t;
        let result = call(fd, (&raw mut addr).cast(), &raw mut length);
        (result == 0).then_some((addr, length))
    }
}

/// The address in a socket address, an IPv4 address as such, and the port.
fn parts(addr: &sockaddr_storage) -> (IpAddr, u16) {
    let at = ptr::from_ref(addr);
    // SAFETY: the storage has an address of its family.
    unsafe {
        if c_int::from(addr.ss_family) == libc::AF_INET6 {
            let v6 = &*at.cast::<sockaddr_in6>();
            let ip: IpAddr = v6.sin6_addr.s6_addr.into();
            (ip.to_canonical(), u16::from_be(v6.sin6_port))
        } else {
            let v4 = &*at.cast::<sockaddr_in>();
            let ip = u32::from_be(v4.sin_addr.s_addr).to_be_bytes();
            (ip.into(), u16::from_be(v4.sin_port))
        }
    }
}

/// The client: waits until the server is ready, and connects.
fn join(fd: c_int) -> Option<c_int> {
    let mut said = [1_u8; READY.len()];
    let into: *mut c_void = said.as_mut_ptr().cast();
    // SAFETY: the place is alive, and has the size that is given.
    unsafe {
        let flags = real::fcntl(fd, libc::F_GETFL, 0);
        real::fcntl(fd, libc::F_SETFL, (flags & !libc::O_NONBLOCK).into());
        let mut all = 0;
        let n = loop {
            let n = real::recv(fd, into, said.len(), libc::MSG_PEEK | all);
            match usize::try_from(n) {
                // A program that went on without the answer would take it for data.
                Err(_) if errno() == libc::EINTR => {}
                // The rest comes. A server that says something else may wait for an answer to it.
                Ok(n @ 1..READY_LEN) if all == 0 && said[..n] == READY[..n] => {
                    all = libc::MSG_WAITALL;
                }
                _ => break n,
            }
        };
        real::fcntl(fd, libc::F_SETFL, flags.into());
        if n != said.len() as isize || said != READY {
            return None;
        }
        let rsocket = connected(fd);
        if rsocket.is_none() {
            // The server goes on by TCP as well. What it has said so far is no data.
            real::recv(fd, into, said.len(), libc::MSG_DONTWAIT);
        }
        rsocket
    }
}

/// An rsocket that is connected to where a TCP socket is.
fn connected(tcp: c_int) -> Option<c_int> {
    let (peer, length) = address(tcp, real::getpeername)?;
    let (mut local, local_length) = address(tcp, real::getsockname)?;
    // SAFETY: the addresses are alive, and have the lengths that are given.
    unsafe {
        let rsocket = rdma::rsocket(peer.ss_family.into(), libc::SOCK_STREAM, 0);
        if rsocket < 0 {
            return None;
        }
        // The server expects it from the address that it knows. Without a device there, it comes from
        // another one.
        clear_port(&mut local);
        let is_bound = rdma::rbind(rsocket, (&raw const local).cast(), local_length) == 0;
        let is_expected = is_bound || is_default(parts(&local).0, parts(&peer).0);
        let is_connected = rdma::rconnect(rsocket, (&raw const peer).cast(), length) == 0
            || errno() == libc::EINTR && is_connected(rsocket);
        if !is_connected || !is_expected && !is_taken(rsocket, tcp) {
            rdma::rclose(rsocket);
            return None;
        }
        Some(rsocket)
    }
}

/// Whether a server takes an rsocket for its client's, which comes from another address. It ends the TCP
/// connection then, and closes the rsocket otherwise, both within its patience: one that does neither is not
/// waited for without end.
fn is_taken(rsocket: c_int, tcp: c_int) -> bool {
    let entry = |fd, events| pollfd {
        fd,
        events,
        revents: 0,
    };
    let mut byte = [0_u8];
    let patience = config::patience().max(PATIENCE) * UNDECIDED;
    let mut watch = Watch::new(Instant::now());
    loop {
        let Some(ms) = watch.wait(Instant::now(), patience) else {
            return false;
        };
        let mut entries = [entry(rsocket, libc::POLLIN), entry(tcp, libc::POLLRDHUP)];
        // SAFETY: the places are alive.
        unsafe {
            let n = rdma::rpoll(entries.as_mut_ptr(), entries.len() as u64, ms);
            if n < 0 && errno() != libc::EINTR {
                return false;
            }
            if n > 0 && entries[0].revents != 0 {
                let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
                return rdma::rrecv(rsocket, byte.as_mut_ptr().cast(), 1, flags) > 0;
            }
            if n > 0 {
                return true;
            }
        }
    }
}

/// The outcome of connecting after a signal.
fn is_connected(rsocket: c_int) -> bool {
    loop {
        match connect::outcome(rsocket, -1) {
            Some(Err(libc::EINTR)) | None => {}
            Some(outcome) => return outcome.is_ok(),
        }
    }
}

/// The server: listens at the port of the TCP socket, says so unless `offer` answers that it is too late, and accepts.
fn accept(fd: c_int, offer: impl FnOnce() -> bool) -> Option<c_int> {
    let (addr, length) = address(fd, real::getsockname)?;
    let (peer, _) = address(fd, real::getpeername)?;
    let ((own, port), (peer, _)) = (parts(&addr), parts(&peer));
    // A client waits for this end to be ready, unless it knows nothing of rsockets.
    if said(fd) != Said::Nothing {
        return None;
    }
    // Before the turn, in which others wait: the first rsocket at any address opens all devices.
    let opener = bound(any(addr), length);
    let turn = Turns::of_user().take(port, peer);
    if said(fd) != Said::Nothing {
        close(opener);
        return None;
    }
    // SAFETY: the call takes any numbers.
    let listener = unsafe { rdma::rsocket(addr.ss_family.into(), libc::SOCK_STREAM, 0) };
    if listener < 0 {
        close(opener);
        return None;
    }
    let mut reception = Reception {
        listener,
        tcp: fd,
        peer,
        own,
        candidates: Vec::new(),
        is_gone: false,
    };
    // SAFETY: the address has that length.
    let is_bound = unsafe { reception.bind(&any(addr), length, turn.wait_for_port()) };
    turn.note_port(is_bound);
    let is_ready = is_bound && reception.ask(offer);
    // From when the client knows of it.
    let mut watch = Watch::new(Instant::now());
    let accepted = is_ready
        .then(|| reception.run(&mut watch, turn.patience()))
        .flatten();
    close(listener);
    if is_ready {
        turn.note(accepted.is_some(), watch.look(Instant::now()));
    }
    drop(turn);
    // Closing one that is connected after all may take a while.
    reception.candidates.into_iter().for_each(close);
    close(opener);
    accepted
}

/// An rsocket at any port of an address; -1 where there is no device.
fn bound(mut addr: sockaddr_storage, length: socklen_t) -> c_int {
    clear_port(&mut addr);
    // SAFETY: the address is alive and has that length.
    unsafe {
        let n = rdma::rsocket(addr.ss_family.into(), libc::SOCK_STREAM, 0);
        if n >= 0 && rdma::rbind(n, (&raw const addr).cast(), length) < 0 {
            rdma::rclose(n);
            return -1;
        }
        n
    }
}

/// Closes an rsocket, if there is one.
fn close(n: c_int) {
    if n >= 0 {
        // SAFETY: the rsocket is this module's.
        unsafe { rdma::rclose(n) };
    }
}

/// What a client says by TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// Nothing so far.
    Nothing,
    /// Data: it has no rsocket, and will have none.
    Data,
    /// That it is gone, or has an rsocket.
    End,
}

fn said(tcp: c_int) -> Said {
    let mut byte = [0_u8];
    // SAFETY: there is room for a byte.
    let n = unsafe {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        real::recv(tcp, byte.as_mut_ptr().cast(), 1, flags)
    };
    match n {
        1.. => Said::Data,
        0 => Said::End,
        _ if matches!(errno(), libc::EAGAIN | libc::EINTR) => Said::Nothing,
        _ => Said::End,
    }
}

/// A server that waits for the rsocket of its client.
struct Reception {
    listener: c_int,
    tcp: c_int,
    /// The client's address.
    peer: IpAddr,
    /// The address that the client has connected to.
    own: IpAddr,
    /// Rsockets of the client's host that are not connected yet.
    candidates: Vec<c_int>,
    /// Nothing more comes by TCP.
    is_gone: bool,
}

impl Reception {
    /// Takes the port, and waits for that time while another has it. Answers whether that was done.
    ///
    /// # Safety
    /// The address has that length.
    unsafe fn bind(&self, addr: &sockaddr_storage, length: socklen_t, wait: Duration) -> bool {
        let reuse: c_int = 1;
        let value = ptr::from_ref(&reuse).cast();
        let level = libc::SOL_SOCKET;
        let mut watch = Watch::new(Instant::now());
        // SAFETY: the places are alive, and have the sizes that are given.
        unsafe {
            let size = size_of_val(&reuse) as socklen_t;
            rdma::rsetsockopt(self.listener, level, libc::SO_REUSEADDR, value, size);
            while rdma::rbind(self.listener, ptr::from_ref(addr).cast(), length) < 0 {
                if errno() != libc::EADDRINUSE || watch.look(Instant::now()) >= wait {
                    return false;
                }
                std::thread::sleep(LOOK);
            }
            true
        }
    }

    /// Listens, and asks the client to connect, unless a call answers that it is too late. Answers whether that was done.
    fn ask(&self, offer: impl FnOnce() -> bool) -> bool {
        // SAFETY: the bytes are alive, and the calls take any numbers.
        unsafe {
            let send = || {
                let (bytes, length) = (READY.as_ptr().cast(), READY.len());
                real::send(self.tcp, bytes, length, libc::MSG_NOSIGNAL) == length as isize
            };
            rdma::rlisten(self.listener, BACKLOG) == 0
                && rdma::rfcntl(self.listener, libc::F_SETFL, libc::O_NONBLOCK) == 0
                && undisturbed(|| offer() && send())
        }
    }

    /// Waits for the client's rsocket, for that time.
    fn run(&mut self, watch: &mut Watch, patience: Duration) -> Option<c_int> {
        loop {
            let ms = watch.wait(Instant::now(), patience)?;
            let mut entries = self.entries();
            // SAFETY: the entries are alive.
            let n = unsafe { rdma::rpoll(entries.as_mut_ptr(), entries.len() as u64, ms) };
            if n < 0 && errno() != libc::EINTR {
                return None;
            }
            if n <= 0 {
                continue;
            }
            // Before the look at TCP, which a client ends as soon as it is connected.
            if let Some(connected) = self.take_connected(&entries) {
                // A client that was not answered in time has gone on by TCP.
                if said(self.tcp) != Said::Data {
                    return Some(connected);
                }
                close(connected);
                return None;
            }
            self.take_request();
            match said(self.tcp) {
                Said::Nothing => {}
                Said::Data => return None,
                Said::End => self.is_gone = true,
            }
            // One that has connected has had an answer, so its rsocket is among the candidates.
            if self.is_gone && self.candidates.is_empty() {
                return None;
            }
        }
    }

    /// What to poll. The candidates come first.
    fn entries(&self) -> Vec<pollfd> {
        let entry = |fd, events| pollfd {
            fd,
            events,
            revents: 0,
        };
        let candidates = self.candidates.iter();
        let mut entries: Vec<pollfd> = candidates.map(|n| entry(*n, libc::POLLOUT)).collect();
        entries.push(entry(self.listener, libc::POLLIN));
        if !self.is_gone {
            entries.push(entry(self.tcp, libc::POLLIN));
        }
        entries
    }

    /// A candidate that is connected. Those that have failed are none any longer.
    fn take_connected(&mut self, entries: &[pollfd]) -> Option<c_int> {
        for (at, n) in self.candidates.clone().into_iter().enumerate().rev() {
            let revents = entries[at].revents;
            if revents & libc::POLLERR != 0 {
                self.candidates.remove(at);
                close(n);
            } else if revents & libc::POLLOUT != 0 {
                return Some(self.candidates.remove(at));
            }
        }
        None
    }

    /// Accepts a request, if there is one. A stranger's is closed.
    fn take_request(&mut self) {
        // SAFETY: the calls take any numbers; no address is asked for.
        unsafe {
            let n = rdma::raccept(self.listener, ptr::null_mut(), ptr::null_mut());
            if n < 0 {
                return;
            }
            let from = address(n, rdma::rgetpeername).map(|(from, _)| parts(&from).0);
            if !from.is_some_and(|from| self.is_clients(from)) {
                rdma::rclose(n);
                return;
            }
            if self.candidates.len() == MAX_CANDIDATES {
                // Those that were asked for in the name of the host stay as they are.
                rdma::rclose(self.candidates.remove(0));
            }
            self.candidates.push(n);
        }
    }

    /// Whether an address is the client's host's: the address of its TCP connection, or any of this host's
    /// for a client that is here.
    fn is_clients(&self, from: IpAddr) -> bool {
        from == self.peer || is_default(self.peer, self.own) && is_own(from)
    }
}

/// Whether an address is the one that a client gets from the kernel which does not ask for one, and connects
/// to an address of its own host. Its device may have another one.
fn is_default(client: IpAddr, server: IpAddr) -> bool {
    let loopbacks = [[127, 0, 0, 1].into(), Ipv6Addr::LOCALHOST.into()];
    client == server || loopbacks.contains(&client)
}

/// Whether an address is one of this host's.
fn is_own(ip: IpAddr) -> bool {
    let mut list = ptr::null_mut();
    // SAFETY: the list is alive until it is freed, and each address has the size of its family.
    unsafe {
        if ip.is_loopback() || libc::getifaddrs(&raw mut list) != 0 {
            return ip.is_loopback();
        }
        let mut found = false;
        let mut at: *const libc::ifaddrs = list;
        while let Some(entry) = at.as_ref() {
            found |= match entry.ifa_addr.as_ref().map(|a| a.sa_family.into()) {
                Some(libc::AF_INET) => {
                    let v4 = &*entry.ifa_addr.cast::<sockaddr_in>();
                    ip == IpAddr::from(u32::from_be(v4.sin_addr.s_addr).to_be_bytes())
                }
                Some(libc::AF_INET6) => {
                    let v6 = &*entry.ifa_addr.cast::<sockaddr_in6>();
                    ip == IpAddr::from(v6.sin6_addr.s6_addr)
                }
                _ => false,
            };
            at = entry.ifa_next;
        }
        libc::freeifaddrs(list);
        found
    }
}

/// The same port of any address.
fn any(mut addr: sockaddr_storage) -> sockaddr_storage {
    let at = &raw mut addr;
    // SAFETY: the storage has room for an address of each family.
    unsafe {
        if c_int::from((*at).ss_family) == libc::AF_INET6 {
            let v6: *mut sockaddr_in6 = at.cast();
            (*v6).sin6_addr.s6_addr = Ipv6Addr::UNSPECIFIED.octets();
            (*v6).sin6_flowinfo = 0;
            (*v6).sin6_scope_id = 0;
        } else {
            (*at.cast::<sockaddr_in>()).sin_addr.s_addr = 0;
        }
    }
    addr
}

/// Takes the port out of an address.
fn clear_port(addr: &mut sockaddr_storage) {
    // The port is at the same place in both families.
    let at: *mut sockaddr_in = ptr::from_mut(addr).cast();
    // SAFETY: the storage has room for an address of each family.
    unsafe { (*at).sin_port = 0 };
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{ErrorKind, Read as _};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::thread;

    use riser_testkit::eventually;

    use super::*;
    use crate::table::set;

    /// The number of an rsocket that has no calls.
    const RSOCKET: c_int = 1000;

    /// A descriptor that a thread may make an rsocket of, with that number, which no other test gets, and its peer.
    fn socket(number: c_int) -> (c_int, UnixStream) {
        let (socket, peer) = UnixStream::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        // SAFETY: the call takes any numbers.
        let fd = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD, number) };
        assert_eq!(fd, number);
        let passive = Kind::Forking(Stage::Passive);
        assert_eq!(set(fd, passive), Some(Kind::File));
        (fd, peer)
    }

    /// Starts a thread, and waits until it sleeps.
    fn start<T: Send + 'static>(
        call: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let (send, receive) = mpsc::channel();
        let thread = thread::spawn(move || {
            // SAFETY: the call cannot fail.
            send.send(unsafe { libc::gettid() }).unwrap();
            call()
        });
        let stat = format!("/proc/self/task/{}/stat", receive.recv().unwrap());
        eventually("the thread sleeps", Duration::from_secs(20), || {
            // The state is behind the name, which is in brackets.
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit(')').next().unwrap().starts_with(" S")
        });
        thread
    }

    fn is_null(fd: c_int) -> bool {
        let path = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
        path.to_str() == Some("/dev/null")
    }

    /// Gives a number to another file while a thread is about to put an rsocket there, after the socket is closed.
    fn give_to_another_file(number: c_int, close: impl FnOnce(c_int) -> c_int) {
        let (fd, _peer) = socket(number);
        // Before the thread starts, which may sleep for the lock of the copies as well.
        let copy = Private::copy(fd).unwrap();
        let sets = epoll::hold_sets();
        let settler = start(move || {
            let [_, offered] = stages();
            assert!(change(fd, Kind::Forking(Stage::Passive), offered));
            put(fd, copy.as_raw_fd(), RSOCKET)
        });
        // SAFETY: the descriptors are this test's.
        unsafe {
            let file = File::open("/proc/self/exe").unwrap();
            assert_eq!(close(fd), 0);
            assert_eq!(real::fcntl(file.as_raw_fd(), libc::F_DUPFD, fd.into()), fd);
            drop(sets);
            assert!(!settler.join().unwrap());
            assert!(!is_null(fd));
            assert_eq!(kind(fd), Kind::File);
            libc::close(fd);
        }
    }

    #[test]
    fn a_number_that_another_file_gets_is_not_replaced() {
        // SAFETY: the descriptor is the test's.
        give_to_another_file(900, |fd| unsafe { libc::close(fd) });
    }

    #[test]
    fn a_number_that_another_file_gets_unseen_is_not_replaced() {
        // As `fclose` closes it.
        // SAFETY: as above.
        give_to_another_file(920, |fd| unsafe { real::close(fd) });
    }

    #[test]
    fn a_number_is_closed_once_it_is_replaced() {
        let (fd, mut peer) = socket(950);
        let replacing = Kind::Forking(Stage::Replacing);
        assert!(change(fd, Kind::Forking(Stage::Passive), replacing));
        // SAFETY: the descriptor is this test's.
        let closer = start(move || unsafe { libc::close(fd) });
        let waits = peer.read(&mut [0]).unwrap_err().kind();
        assert_eq!(waits, ErrorKind::WouldBlock, "it is open");
        assert!(change(fd, replacing, Kind::File));
        assert_eq!(closer.join().unwrap(), 0);
        // A child of another test may have it for a moment.
        peer.set_nonblocking(false).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "it is closed");
    }
}
