//! The exported calls.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr;
use std::slice;
use std::time::{Duration, Instant};

use libc::{iovec, msghdr, nfds_t, off_t, pollfd, size_t, ssize_t, timeval};
use riser_rdma_core_sys::bindings::{sockaddr, socklen_t};
use riser_transport::rdma_core::convert::SockAddr;

use super::connection::{AGAIN, Connection};
use super::datagram::{Datagram, address_length};
use super::link::{bytes, bytes_mut};
use super::options::SOL_RDMA;
use super::socket::{Inner, Kind, Socket};
use super::sockopt::{self, Value};
use super::stream::{LOW_WATER, State};
use super::{keep_alive, poll, socket, transfer};
use crate::cm::address;
use crate::errno::{Errno, minus};

/// Longest time for which a socket that is closed waits for its data to arrive.
const LINGER: Duration = Duration::from_secs(60);

/// Most pieces of a vector (`IOV_MAX`).
const MAX_PIECES: usize = 1024;

/// What a call returns that returns a number, or -1 with the reason in `errno`.
fn number(result: Result<usize, Errno>) -> ssize_t {
    match result {
        Ok(n) => n as ssize_t,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// As [`number`], for a call that returns an `int`.
fn int(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|errno| minus(Err(errno)))
}

/// `rsocket`
pub(crate) extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    int(create(domain, kind, protocol))
}

fn create(domain: c_int, kind: c_int, protocol: c_int) -> Result<c_int, Errno> {
    match (domain, kind, protocol) {
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
            let connection = Connection::new(domain)?;
            Ok(insert(connection))
        }
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
            let datagram = Datagram::new(domain)?;
            let number = datagram.fd();
            socket::insert(number, Kind::Datagram(datagram));
            Ok(number)
        }
        _ => Err(Errno(libc::ENOTSUP)),
    }
}

fn insert(connection: Connection) -> c_int {
    let number = connection.ident.fd();
    socket::insert(number, Kind::Stream(connection));
    number
}

/// `rbind`
pub(crate) unsafe extern "C" fn rbind(
    number: c_int,
    addr: *const sockaddr,
    _length: socklen_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        match &mut socket.lock().kind {
            // SAFETY: the program's address, as the manual page demands.
            Kind::Stream(connection) => unsafe { connection.bind(addr) },
            // SAFETY: as above.
            Kind::Datagram(datagram) => datagram.bind(unsafe { given(addr) }?),
        }
    }))
}

/// `rlisten`
pub(crate) extern "C" fn rlisten(number: c_int, backlog: c_int) -> c_int {
    minus(socket::get(number).and_then(|socket| socket.lock().kind.stream()?.listen(backlog)))
}

/// `raccept`: does not wait for the peer's last message of the handshake, for which the new
/// socket's calls wait.
pub(crate) unsafe extern "C" fn raccept(
    number: c_int,
    addr: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    int(socket::get(number).and_then(|socket| {
        let connection = socket.attempt(0, |inner| {
            inner.progress();
            inner.kind.stream()?.accept()
        })?;
        if !addr.is_null() {
            // SAFETY: the program's places, as the manual page demands.
            unsafe { connection.ident.address(true, addr, length) }?;
        }
        Ok(insert(connection))
    }))
}

/// `rconnect`
pub(crate) unsafe extern "C" fn rconnect(
    number: c_int,
    addr: *const sockaddr,
    _length: socklen_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        match &mut socket.lock().kind {
            // SAFETY: the program's address, as the manual page demands.
            Kind::Stream(connection) => unsafe { connection.connect(addr) }?,
            Kind::Datagram(datagram) => {
                // SAFETY: as above.
                let peer = unsafe { given(addr) }?;
                return datagram.connect(peer);
            }
        }
        let outcome = socket.attempt(0, |inner| {
            inner.progress();
            inner.kind.stream()?.outcome()
        });
        match outcome {
            Err(AGAIN) => Err(Errno(libc::EINPROGRESS)),
            outcome => outcome,
        }
    }))
}

/// `rshutdown`
pub(crate) extern "C" fn rshutdown(number: c_int, how: c_int) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        let (reads, writes) = match how {
            libc::SHUT_RD => (true, false),
            libc::SHUT_WR => (false, true),
            libc::SHUT_RDWR => (true, true),
            _ => return Err(Errno::INVALID),
        };
        let outcome = socket.lock().kind.stream()?.outcome();
        outcome.map_err(|_| Errno(libc::ENOTCONN))?;
        shut(&socket, reads, writes)
    }))
}

/// Ends directions of a stream, and waits until all that was sent has arrived.
///
/// # Errors
/// Those of a socket that is not connected.
fn shut(socket: &Socket, reads: bool, writes: bool) -> Result<(), Errno> {
    let deadline = Instant::now().checked_add(LINGER);
    {
        let inner = &mut *socket.lock();
        let connection = inner.kind.stream()?;
        connection.outcome()?;
        connection.link().stream().shut(reads, writes);
        connection.link().post_controls();
        // Those who wait for data that will not come.
        inner.wake();
    }
    if writes {
        // A peer that does not answer keeps its data waiting, and this call no longer than that.
        wait_to_the_end(socket, deadline, |inner| {
            Ok(inner.kind.stream()?.link().stream().is_flushed())
        });
    }
    let inner = &mut *socket.lock();
    let connection = inner.kind.stream()?;
    if connection.link().stream().state() != State::Open {
        connection.disconnect();
    }
    Ok(())
}

/// Waits until the datagrams that were sent have left.
fn drain(socket: &Socket) {
    let deadline = Instant::now().checked_add(LINGER);
    wait_to_the_end(socket, deadline, |inner| match &inner.kind {
        Kind::Datagram(datagram) => Ok(datagram.is_flushed()),
        Kind::Stream(_) => Ok(true),
    });
}

/// Waits until something is so, also through signals; gives up at the deadline.
fn wait_to_the_end(
    socket: &Socket,
    deadline: Option<Instant>,
    is_so: impl Fn(&mut Inner) -> Result<bool, Errno>,
) {
    loop {
        let result = socket.wait(deadline, |inner| {
            inner.progress();
            if is_so(inner)? { Ok(()) } else { Err(AGAIN) }
        });
        if result != Err(Errno(libc::EINTR)) {
            return;
        }
    }
}

/// `rclose`
pub(crate) extern "C" fn rclose(number: c_int) -> c_int {
    minus(socket::remove(number).map(|socket| {
        // That of the parent stays connected. Nothing that it has sent arrives because of this process.
        if socket.is_inherited() {
            return;
        }
        // One that is not connected has nothing to wait for.
        let _ = shut(&socket, true, true);
        drain(&socket);
        socket.lock().wake();
    }))
}

/// An address that a program gives.
///
/// # Errors
/// `EAFNOSUPPORT`, and `EFAULT` for none.
///
/// # Safety
/// The pointer is null, or the address has the size of its family.
unsafe fn given(addr: *const sockaddr) -> Result<SocketAddr, Errno> {
    // SAFETY: as the caller promises.
    unsafe { address(addr) }?.ok_or(Errno(libc::EFAULT))
}

/// Copies an address to where a program wants it.
///
/// # Errors
/// `EFAULT` without a place for its length.
///
/// # Safety
/// The pointers are null or the program's, with room for as many bytes as it says.
unsafe fn put(addr: SocketAddr, place: *mut sockaddr, length: *mut socklen_t) -> Result<(), Errno> {
    if place.is_null() || length.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    let size = address_length(addr);
    let mut ours = SockAddr::new(addr);
    // SAFETY: as the caller promises.
    unsafe {
        let room = length.read().min(size) as usize;
        ptr::copy_nonoverlapping(ours.as_mut_ptr().cast::<u8>(), place.cast::<u8>(), room);
        length.write(size);
    }
    Ok(())
}

/// Receives from a socket of any kind; from a datagram socket with the sender.
fn receive(
    socket: &Socket,
    into: &mut [u8],
    flags: c_int,
) -> Result<(usize, Option<SocketAddr>), Errno> {
    if matches!(socket.lock().kind, Kind::Stream(_)) {
        return Ok((transfer::receive(socket, into, flags)?, None));
    }
    let is_peek = flags & libc::MSG_PEEK != 0;
    socket.attempt(flags, |inner| match &mut inner.kind {
        Kind::Datagram(datagram) => {
            let (n, from) = datagram.receive(into, is_peek)?;
            Ok((n, Some(from)))
        }
        Kind::Stream(_) => Err(Errno::INVALID),
    })
}

/// `rrecv`
pub(crate) unsafe extern "C" fn rrecv(
    number: c_int,
    into: *mut c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    self::number(socket::get(number).and_then(|socket| {
        // SAFETY: the program's buffer, as the manual page demands.
        let into = unsafe { bytes_mut(into.cast(), length) }?;
        receive(&socket, into, flags).map(|(n, _)| n)
    }))
}

/// `rrecvfrom`
pub(crate) unsafe extern "C" fn rrecvfrom(
    number: c_int,
    into: *mut c_void,
    length: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    addr_length: *mut socklen_t,
) -> ssize_t {
    self::number(socket::get(number).and_then(|socket| {
        // SAFETY: the program's buffer, as the manual page demands.
        let into = unsafe { bytes_mut(into.cast(), length) }?;
        let (n, from) = receive(&socket, into, flags)?;
        if addr.is_null() {
            return Ok(n);
        }
        // SAFETY: the program's places, as the manual page demands.
        unsafe {
            match (from, &mut socket.lock().kind) {
                (Some(from), _) => put(from, addr, addr_length)?,
                (None, Kind::Stream(connection)) if n > 0 => {
                    connection.ident.address(true, addr, addr_length)?;
                }
                _ => {}
            }
        }
        Ok(n)
    }))
}

/// The pieces of a program's vector.
///
/// # Safety
/// `at` points to `count` pieces.
unsafe fn pieces<'a>(at: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    match (at.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Errno(libc::EFAULT)),
        (false, count) if count > MAX_PIECES => Err(Errno::INVALID),
        // SAFETY: as the caller promises.
        _ => Ok(unsafe { slice::from_raw_parts(at, count) }),
    }
}

/// Receives into the pieces of a vector. Waits for the first of them only.
///
/// # Safety
/// The vector is the program's, as the manual page demands.
unsafe fn receive_vector(
    number: c_int,
    vector: *const iovec,
    count: usize,
    mut flags: c_int,
) -> Result<usize, Errno> {
    let socket = socket::get(number)?;
    // SAFETY: as the caller promises.
    let pieces = unsafe { pieces(vector, count) }?;
    if matches!(socket.lock().kind, Kind::Datagram(_)) {
        // A datagram is received at once, and its pieces are filled from that.
        let mut whole = [0; LOW_WATER as usize];
        let (n, _) = receive(&socket, &mut whole, flags)?;
        let mut left = &whole[..n];
        for piece in pieces {
            // SAFETY: as above.
            let into = unsafe { bytes_mut(piece.iov_base.cast(), piece.iov_len) }?;
            let (part, rest) = left.split_at(left.len().min(into.len()));
            into[..part.len()].copy_from_slice(part);
            left = rest;
        }
        return Ok(n - left.len());
    }
    let mut done = 0;
    for piece in pieces {
        // SAFETY: as above.
        let into = unsafe { bytes_mut(piece.iov_base.cast(), piece.iov_len) }?;
        if into.is_empty() {
            continue;
        }
        match receive(&socket, into, flags).map(|(n, _)| n) {
            Ok(n) if n == into.len() => done += n,
            Ok(n) => return Ok(done + n),
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        if flags & libc::MSG_WAITALL == 0 {
            flags |= libc::MSG_DONTWAIT;
        }
    }
    Ok(done)
}

/// `rrecvmsg`
pub(crate) unsafe extern "C" fn rrecvmsg(
    number: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program's message, as the manual page demands.
    let Some(message) = (unsafe { message.as_mut() }) else {
        return self::number(Err(Errno(libc::EFAULT)));
    };
    // There are no ancillary data, and no flags to report.
    message.msg_controllen = 0;
    message.msg_flags = 0;
    let (vector, count) = (message.msg_iov, message.msg_iovlen);
    // SAFETY: as above.
    self::number(unsafe { receive_vector(number, vector, count, flags) })
}

/// `rread`
pub(crate) unsafe extern "C" fn rread(number: c_int, into: *mut c_void, length: size_t) -> ssize_t {
    // SAFETY: the program's buffer, as the manual page demands.
    unsafe { rrecv(number, into, length, 0) }
}

/// `rreadv`
pub(crate) unsafe extern "C" fn rreadv(
    number: c_int,
    vector: *const iovec,
    count: c_int,
) -> ssize_t {
    let count = usize::try_from(count).map_err(|_| Errno::INVALID);
    // SAFETY: the program's vector, as the manual page demands.
    self::number(count.and_then(|count| unsafe { receive_vector(number, vector, count, 0) }))
}

/// Sends on a socket of any kind; on a datagram socket to `to`, or to its peer.
fn send(
    socket: &Socket,
    from: &[u8],
    flags: c_int,
    to: Option<SocketAddr>,
) -> Result<usize, Errno> {
    let is_stream = matches!(socket.lock().kind, Kind::Stream(_));
    match (is_stream, to) {
        (true, None) => return transfer::send(socket, from, flags),
        // A stream has its peer already.
        (true, Some(_)) => return Err(Errno(libc::EISCONN)),
        (false, _) => {}
    }
    socket.attempt(flags, |inner| match &mut inner.kind {
        Kind::Datagram(datagram) => {
            let to = to.or(datagram.peer).ok_or(Errno(libc::EDESTADDRREQ))?;
            datagram.send(from, to)?;
            Ok(from.len())
        }
        Kind::Stream(_) => Err(Errno::INVALID),
    })
}

/// `rsend`
pub(crate) unsafe extern "C" fn rsend(
    number: c_int,
    from: *const c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program's buffer, as the manual page demands.
    unsafe { rsendto(number, from, length, flags, ptr::null(), 0) }
}

/// `rsendto`
pub(crate) unsafe extern "C" fn rsendto(
    number: c_int,
    from: *const c_void,
    length: size_t,
    flags: c_int,
    addr: *const sockaddr,
    _addr_length: socklen_t,
) -> ssize_t {
    self::number(socket::get(number).and_then(|socket| {
        // SAFETY: the program's buffer and its address, as the manual page demands.
        let (from, to) = unsafe { (bytes(from.cast(), length)?, address(addr)?) };
        send(&socket, from, flags, to)
    }))
}

/// Sends the pieces of a vector.
///
/// # Safety
/// The vector is the program's, as the manual page demands.
unsafe fn send_vector(
    number: c_int,
    vector: *const iovec,
    count: usize,
    flags: c_int,
    to: Option<SocketAddr>,
) -> Result<usize, Errno> {
    let socket = socket::get(number)?;
    // SAFETY: as the caller promises.
    let pieces = unsafe { pieces(vector, count) }?;
    if matches!(socket.lock().kind, Kind::Datagram(_)) {
        let mut whole = Vec::new();
        for piece in pieces {
            // SAFETY: as above.
            let from = unsafe { bytes(piece.iov_base.cast(), piece.iov_len) }?;
            // A datagram that is too long is refused, without its bytes.
            if from.len() > LOW_WATER as usize || whole.len() > LOW_WATER as usize {
                return Err(Errno(libc::EMSGSIZE));
            }
            whole.extend_from_slice(from);
        }
        return send(&socket, &whole, flags, to);
    }
    let mut done = 0;
    for piece in pieces {
        // SAFETY: as above.
        let from = unsafe { bytes(piece.iov_base.cast(), piece.iov_len) }?;
        match send(&socket, from, flags, to) {
            Ok(n) if n == from.len() => done += n,
            Ok(n) => return Ok(done + n),
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// `rsendmsg`: there are no ancillary data.
pub(crate) unsafe extern "C" fn rsendmsg(
    number: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program's message, as the manual page demands.
    let Some(message) = (unsafe { message.as_ref() }) else {
        return self::number(Err(Errno(libc::EFAULT)));
    };
    if !message.msg_control.is_null() && message.msg_controllen > 0 {
        return self::number(Err(Errno(libc::ENOTSUP)));
    }
    // SAFETY: as above.
    self::number(unsafe {
        address(message.msg_name.cast())
            .and_then(|to| send_vector(number, message.msg_iov, message.msg_iovlen, flags, to))
    })
}

/// `rwrite`
pub(crate) unsafe extern "C" fn rwrite(
    number: c_int,
    from: *const c_void,
    length: size_t,
) -> ssize_t {
    // SAFETY: the program's buffer, as the manual page demands.
    unsafe { rsend(number, from, length, 0) }
}

/// `rwritev`
pub(crate) unsafe extern "C" fn rwritev(
    number: c_int,
    vector: *const iovec,
    count: c_int,
) -> ssize_t {
    let count = usize::try_from(count).map_err(|_| Errno::INVALID);
    // SAFETY: the program's vector, as the manual page demands.
    self::number(count.and_then(|count| unsafe { send_vector(number, vector, count, 0, None) }))
}

/// `rpoll`
pub(crate) unsafe extern "C" fn rpoll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let fds = match (fds.is_null(), count) {
        (_, 0) => &mut [][..],
        // More than there are descriptors.
        (_, count) if c_int::try_from(count).is_err() => return minus(Err(Errno::INVALID)),
        (true, _) => return minus(Err(Errno(libc::EFAULT))),
        // SAFETY: the program's entries, as the manual page demands.
        (false, _) => unsafe { slice::from_raw_parts_mut(fds, count) },
    };
    let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
    int(poll::wait(fds, timeout).map(|n| n as c_int))
}

/// `rselect`
pub(crate) unsafe extern "C" fn rselect(
    count: c_int,
    reads: *mut libc::fd_set,
    writes: *mut libc::fd_set,
    exceptions: *mut libc::fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the program's sets and its time, as the manual page demands.
    let (sets, timeout) = unsafe {
        let sets = [reads.as_mut(), writes.as_mut(), exceptions.as_mut()];
        (sets, timeout.as_ref())
    };
    let duration = |t: &timeval| {
        let (seconds, micros) = (u64::try_from(t.tv_sec), u64::try_from(t.tv_usec));
        match (seconds, micros) {
            (Ok(seconds), Ok(micros)) => {
                Ok(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
            }
            _ => Err(Errno::INVALID),
        }
    };
    int(timeout
        .map(duration)
        .transpose()
        .and_then(|timeout| Ok(poll::select(count, sets, timeout)? as c_int)))
}

/// `rgetpeername`
pub(crate) unsafe extern "C" fn rgetpeername(
    number: c_int,
    addr: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        match &mut socket.lock().kind {
            Kind::Stream(connection) => {
                connection.has_peer()?;
                // SAFETY: the program's places, as the manual page demands.
                unsafe { connection.ident.address(true, addr, length) }
            }
            Kind::Datagram(datagram) => {
                let peer = datagram.peer.ok_or(Errno(libc::ENOTCONN))?;
                // SAFETY: as above.
                unsafe { put(peer, addr, length) }
            }
        }
    }))
}

/// `rgetsockname`
pub(crate) unsafe extern "C" fn rgetsockname(
    number: c_int,
    addr: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        match &mut socket.lock().kind {
            // SAFETY: the program's places, as the manual page demands.
            Kind::Stream(connection) => unsafe { connection.ident.address(false, addr, length) },
            // SAFETY: as above.
            Kind::Datagram(datagram) => unsafe { put(datagram.local_addr()?, addr, length) },
        }
    }))
}

/// `rsetsockopt`
pub(crate) unsafe extern "C" fn rsetsockopt(
    number: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        // SAFETY: the program's value, as the manual page demands.
        unsafe {
            let is_of_udp = match &socket.lock().kind {
                Kind::Datagram(datagram) if level != SOL_RDMA => {
                    datagram.set_option((level, name), value, length)?;
                    true
                }
                _ => false,
            };
            let value = sockopt::value(value, length)?;
            match sockopt::set(&mut socket.lock(), level, name, value) {
                // The UDP socket has it.
                Err(_) if is_of_udp => return Ok(()),
                result => result?,
            }
        }
        let interval = sockopt::keep_alive(&mut socket.lock());
        match (level, name, interval) {
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, Some(interval))
            | (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, Some(interval)) => {
                keep_alive::begin(number, interval)
            }
            _ => Ok(()),
        }
    }))
}

/// `rgetsockopt`
pub(crate) unsafe extern "C" fn rgetsockopt(
    number: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| {
        if value.is_null() || length.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        let found = sockopt::get(&mut socket.lock(), level, name)?;
        // SAFETY: the program's places, as the manual page demands.
        unsafe {
            let size = match found {
                Value::Int(_) => size_of::<c_int>(),
                Value::Linger(_) => size_of::<libc::linger>(),
            };
            if (length.read() as usize) < size {
                return Err(Errno::INVALID);
            }
            match found {
                Value::Int(n) => value.cast::<c_int>().write_unaligned(n),
                Value::Linger(is_on) => {
                    value.cast::<libc::linger>().write_unaligned(libc::linger {
                        l_onoff: is_on.into(),
                        l_linger: 0,
                    });
                }
            }
            length.write(size as socklen_t);
        }
        Ok(())
    }))
}

/// `rfcntl`: the argument is where a variadic call has it, as on all targets with a jump in
/// `build.rs`.
pub(crate) extern "C" fn rfcntl(number: c_int, command: c_int, argument: c_int) -> c_int {
    int(socket::get(number).and_then(|socket| {
        let inner: &mut Inner = &mut socket.lock();
        match command {
            libc::F_GETFL => Ok(inner.flags),
            libc::F_SETFL => {
                let kept = inner.flags & libc::O_ACCMODE;
                inner.flags = kept | argument & !libc::O_ACCMODE;
                Ok(0)
            }
            _ => Err(Errno(libc::ENOTSUP)),
        }
    }))
}

/// `riomap`: maps at the buffer's own address for an offset of -1.
pub(crate) unsafe extern "C" fn riomap(
    number: c_int,
    buffer: *mut c_void,
    length: size_t,
    protection: c_int,
    _flags: c_int,
    offset: off_t,
) -> off_t {
    let mapped = socket::get(number).and_then(|socket| {
        if protection & !(libc::PROT_WRITE | libc::PROT_NONE) != 0 {
            return Err(Errno::INVALID);
        }
        let offset = match offset {
            -1 => buffer.addr() as off_t,
            offset => offset,
        };
        let is_writable = protection & libc::PROT_WRITE != 0;
        // SAFETY: the program's buffer, as the manual page demands.
        unsafe { transfer::map(&socket, (buffer, length), is_writable, offset as u64) }?;
        Ok(offset)
    });
    mapped.unwrap_or_else(|errno| {
        errno.set();
        -1
    })
}

/// `riounmap`
pub(crate) unsafe extern "C" fn riounmap(
    number: c_int,
    buffer: *mut c_void,
    length: size_t,
) -> c_int {
    minus(socket::get(number).and_then(|socket| transfer::unmap(&socket, buffer, length)))
}

/// `riowrite`
pub(crate) unsafe extern "C" fn riowrite(
    number: c_int,
    from: *const c_void,
    length: size_t,
    offset: off_t,
    flags: c_int,
) -> size_t {
    let written = socket::get(number).and_then(|socket| {
        // SAFETY: the program's buffer, as the manual page demands.
        let from = unsafe { bytes(from.cast(), length) }?;
        transfer::send_direct(&socket, from, offset as u64, flags)
    });
    self::number(written) as size_t
}
