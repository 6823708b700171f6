//! A process's part of an address.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use riser_transport::roce::ForwardedPacket;
use riser_transport::roce::driver::bind_group;
use riser_transport::roce::steer::Requests;
use riser_transport::wire::cma::RdmaPortSpace;
use riser_transport::wire::{CommId, Mad, ROCE_PORT};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno as Os;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use tracing::debug;

use super::launch::launch;
use super::message::{MESSAGE, Message, PortAction, Received, VERSION, receive, send};
use super::place::Place;
use super::ports::Port;
use super::{BITS, SLOTS};

/// Time for the broker to start, and to respond to a request.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time until the port is free after its last process has exited.
const LEAVING: Duration = Duration::from_millis(200);

/// Interval for checking whether the port is free.
const PAUSE: Duration = Duration::from_millis(2);

/// Size of the socket buffer for requests, in bytes.
const FRONT_BUFFER: usize = 512 << 10;

/// Maximum number of packets that are received while a request waits for its response.
const MAX_PACKETS: usize = 512;

/// Reasons why an address is in use.
const NOT_SHARED: &str = "it belongs to a process without this library, such as riserd, to a \
             process of another user or with another XDG_RUNTIME_DIR or TMPDIR, to a device that \
             has it as a further address, or to the kernel's rdma_rxe, which uses all addresses";
const OTHER_VERSION: &str = "it belongs to a process with another version of this library";
const SILENT_BROKER: &str = "the broker of its processes does not respond; it may be stopped";

/// Returns the error if the port of the address is in use, with a reason that helps to free it.
pub(crate) fn in_use(why: &str) -> io::Error {
    let why = format!(
        "UDP port {ROCE_PORT} is in use: {why} (`ss -aunp 'sport = {ROCE_PORT}'` lists processes)"
    );
    io::Error::new(io::ErrorKind::AddrInUse, why)
}

/// A process's part of an address: its slot and its connection to the broker.
pub(crate) struct Share {
    slot: u8,
    /// `None` after the process has left the address.
    broker: Option<OwnedFd>,
    buffer: Box<[u8; MESSAGE]>,
    /// ID of the last request.
    last: u32,
    /// Messages for which the connection had no space.
    unsent: VecDeque<Message>,
    /// Whether a request has timed out, and the broker has not sent anything since.
    is_silent: bool,
    /// Requests to allocate a port that have failed without a response, and their IDs.
    late: Vec<(u32, Port)>,
    /// Allocated ports.
    ports: HashSet<Port>,
    /// Packets that were received while a request was waiting for its response.
    packets: VecDeque<ForwardedPacket>,
}

impl Share {
    /// Joins an address, and starts its broker if this is the first process. Also returns the
    /// socket of the slot. Returns `None` if another process is currently joining the address; in
    /// this case, try again later. The process must not fork during this call.
    ///
    /// # Errors
    /// Returns `EADDRINUSE` if the port is used by anything other than processes of this user with
    /// this library, `EUSERS` if all slots are used, and errors of creating sockets and starting
    /// the broker.
    pub(crate) fn open(addr: IpAddr) -> io::Result<Option<(Self, OwnedFd)>> {
        let place = Place::of(addr)?;
        let Some(lock) = place.try_lock()? else {
            return Ok(None);
        };
        let broker = match place.connect() {
            Ok(Some(broker)) => broker,
            Ok(None) => start_broker(&place, addr, &lock)?,
            // There are too many connections that it has not accepted.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(in_use(SILENT_BROKER));
            }
            Err(error) => return Err(error),
        };
        // The broker exits only while it holds the lock, and after it has accepted all connections.
        // A new broker holds the lock itself until it accepts connections.
        drop(lock);
        let mut share = Self {
            slot: 0,
            broker: Some(broker),
            buffer: Box::new([0; MESSAGE]),
            last: 0,
            unsent: VecDeque::new(),
            is_silent: false,
            late: Vec::new(),
            ports: HashSet::new(),
            packets: VecDeque::new(),
        };
        let mut sockets = Vec::new();
        let message = share.receive(Instant::now() + PATIENCE, &mut sockets);
        match message.map_err(|error| match error {
            Os::TIMEDOUT => in_use(SILENT_BROKER),
            Os::IO => io::Error::other("the broker of the address has exited"),
            error => error.into(),
        })? {
            Message::Welcome { version, slot } if version == VERSION => share.slot = slot,
            Message::Full => {
                let why = format!(
                    "too many processes use the address: the limit is {}",
                    SLOTS - 1
                );
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
            }
            _ => return Err(in_use(OTHER_VERSION)),
        }
        // The kernel drops a descriptor for which there is no space.
        let socket = sockets.pop().ok_or(Os::MFILE)?;
        debug!(%addr, slot = share.slot, "opened the address");
        Ok(Some((share, socket)))
    }

    /// Returns its slot number, which is the worker index of the device.
    pub(crate) fn slot(&self) -> u32 {
        self.slot.into()
    }

    /// Returns its connection, which is readable if there is a packet. A forked process must close
    /// it, because the broker would not notice otherwise when its parent exits.
    pub(crate) fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.broker.as_ref().map(OwnedFd::as_fd)
    }

    /// Leaves the address. The broker frees the slot and its ports.
    pub(crate) fn leave(&mut self) {
        self.broker = None;
        self.packets.clear();
        self.unsent.clear();
    }

    /// Returns whether there are packets that were received during a request, so that the
    /// connection may not be readable.
    pub(crate) fn has_packets(&self) -> bool {
        !self.packets.is_empty()
    }

    /// Returns the next packet for this process that was received by the broker or by another
    /// process.
    ///
    /// # Errors
    /// Returns `EIO` if the broker has exited.
    pub(crate) fn poll_packet(&mut self) -> Result<Option<ForwardedPacket>, Os> {
        let _ = self.flush();
        loop {
            if let Some(packet) = self.packets.pop_front() {
                return Ok(Some(packet));
            }
            match self.try_receive(&mut Vec::new())? {
                Some(message) => self.handle(message),
                None => return Ok(None),
            }
        }
    }

    /// Passes on a packet that belongs to another process. If the broker has too many unread
    /// messages, the packet is dropped, as with a full socket.
    pub(crate) fn pass_on(&self, packet: ForwardedPacket) {
        if let Some(broker) = &self.broker {
            let _ = send(broker, &Message::Packet(packet), &[]);
        }
    }

    /// Reports a connection that was established, with the DREQ that the broker sends if this
    /// process is killed, or a connection that was closed.
    pub(crate) fn note_connection(&mut self, id: CommId, dreq: Option<(IpAddr, Mad)>) {
        self.send(Message::Connection { id, dreq });
    }

    /// Allocates a port for this process, or any free port if `port` is 0. Returns the port.
    ///
    /// # Errors
    /// Returns `EADDRINUSE` if another process uses it, or if all are in use, `EIO` if the address
    /// was removed, and `ETIMEDOUT` if the broker does not respond.
    pub(crate) fn take_port(&mut self, space: RdmaPortSpace, port: u16) -> io::Result<u16> {
        let port = self.request(PortAction::Allocate, (space, port))?;
        self.ports.insert((space, port));
        Ok(port)
    }

    /// Starts to receive requests for a port of this process.
    ///
    /// # Errors
    /// Returns `EIO` if the address was removed, and `ETIMEDOUT` if the broker does not respond.
    pub(crate) fn listen(&mut self, port: Port) -> io::Result<()> {
        self.request(PortAction::Listen, port).map(drop)
    }

    /// Stops receiving requests for a port of this process, so that they wait for a listener.
    pub(crate) fn stop_listening(&mut self, port: Port) {
        self.release(PortAction::StopListening, port);
    }

    /// Releases a port.
    pub(crate) fn release_port(&mut self, port: Port) {
        self.ports.remove(&port);
        self.release(PortAction::Release, port);
    }

    fn release(&mut self, action: PortAction, port: Port) {
        if self.is_silent {
            let request = self.new_request(action, port);
            return self.send(request);
        }
        if let Err(error) = self.request(action, port) {
            debug!(%error, ?port, "cannot release a port");
        }
    }

    /// Sends a request for a port, and waits for the response. Returns the port. If the broker is
    /// silent, this fails immediately, because the caller holds the lock of the device.
    fn request(&mut self, action: PortAction, port: Port) -> io::Result<u16> {
        let until = Instant::now() + PATIENCE;
        if self.is_silent {
            self.receive_all()?;
        }
        if self.is_silent {
            return Err(Os::TIMEDOUT.into());
        }
        let request = self.new_request(action, port);
        let id = self.last;
        // The process has the port if any of these requests succeeds.
        self.late.retain(|(_, late)| port.1 == 0 || *late != port);
        self.unsent.push_back(request);
        match self.await_reply(id, until) {
            Ok((0, port)) => Ok(port),
            Ok((errno, _)) => Err(io::Error::from_raw_os_error(errno)),
            Err(error) => {
                self.is_silent = error == Os::TIMEDOUT;
                if action == PortAction::Allocate {
                    self.late.push((id, port));
                }
                Err(error.into())
            }
        }
    }

    fn new_request(&mut self, action: PortAction, port: Port) -> Message {
        self.last = self.last.wrapping_add(1);
        Message::Request {
            id: self.last,
            action,
            port,
        }
    }

    /// Sends all messages, and waits for the response to a request: its error number and port.
    ///
    /// # Errors
    /// Returns `ETIMEDOUT` if there is no reply, and `EIO` if the broker has exited.
    fn await_reply(&mut self, id: u32, until: Instant) -> Result<(i32, u16), Os> {
        while let Err(error) = self.flush() {
            if error != Os::AGAIN {
                return Err(error);
            }
            // The broker may be waiting until we read an earlier response.
            self.receive_all()?;
            let broker = self.broker.as_ref().ok_or(Os::IO)?;
            await_ready(broker, PollFlags::IN | PollFlags::OUT, until)?;
        }
        loop {
            match self.receive(until, &mut Vec::new())? {
                Message::Reply {
                    id: of,
                    errno,
                    port,
                } if of == id => return Ok((errno, port)),
                message => self.handle(message),
            }
        }
    }

    /// Handles a message that is not the response to the current request.
    fn handle(&mut self, message: Message) {
        match message {
            Message::Packet(packet) if self.packets.len() < MAX_PACKETS => {
                self.packets.push_back(packet);
            }
            Message::Reply { id, errno, port } => {
                let Some(at) = self.late.iter().position(|(late, _)| *late == id) else {
                    return;
                };
                let (_, (space, _)) = self.late.swap_remove(at);
                if errno == 0 && !self.ports.contains(&(space, port)) {
                    let release = self.new_request(PortAction::Release, (space, port));
                    self.send(release);
                }
            }
            _ => {}
        }
    }

    /// Handles all messages that have arrived.
    fn receive_all(&mut self) -> Result<(), Os> {
        while let Some(message) = self.try_receive(&mut Vec::new())? {
            self.handle(message);
        }
        Ok(())
    }

    /// Sends a message, or keeps it until the connection has space.
    fn send(&mut self, message: Message) {
        self.unsent.push_back(message);
        if self.flush() == Err(Os::IO) {
            self.unsent.clear();
        }
    }

    /// Sends the messages that were kept.
    ///
    /// # Errors
    /// Returns `EAGAIN` if there is not enough space, and `EIO` if the broker has exited.
    fn flush(&mut self) -> Result<(), Os> {
        let broker = self.broker.as_ref().ok_or(Os::IO)?;
        while let Some(message) = self.unsent.front() {
            match send(broker, message, &[]) {
                Err(Os::PIPE | Os::CONNRESET) => return Err(Os::IO),
                sent => sent?,
            }
            self.unsent.pop_front();
        }
        Ok(())
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// Returns `ETIMEDOUT` if there is no reply, and `EIO` if the broker has exited.
    fn receive(&mut self, until: Instant, sockets: &mut Vec<OwnedFd>) -> Result<Message, Os> {
        loop {
            if let Some(message) = self.try_receive(sockets)? {
                return Ok(message);
            }
            let broker = self.broker.as_ref().ok_or(Os::IO)?;
            await_ready(broker, PollFlags::IN, until)?;
        }
    }

    /// Returns the next message, if there is one.
    ///
    /// # Errors
    /// Returns `EIO` if the broker has exited.
    fn try_receive(&mut self, sockets: &mut Vec<OwnedFd>) -> Result<Option<Message>, Os> {
        let Some(broker) = &self.broker else {
            return Ok(None);
        };
        match receive(broker, &mut self.buffer, sockets) {
            Received::Message(message) => {
                self.is_silent = false;
                Ok(Some(message))
            }
            Received::Nothing => Ok(None),
            Received::Closed => Err(Os::IO),
        }
    }
}

/// Waits until a connection is ready.
///
/// # Errors
/// Returns `ETIMEDOUT` if it does not become ready in time.
fn await_ready(broker: &OwnedFd, events: PollFlags, until: Instant) -> Result<(), Os> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Os::TIMEDOUT);
        }
        let timeout = left.try_into().map_err(|_| Os::INVAL)?;
        match poll(&mut [PollFd::new(broker, events)], Some(&timeout)) {
            Ok(0) | Err(Os::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Starts the broker of an address. Returns the connection to it.
fn start_broker(place: &Place, addr: IpAddr, lock: &OwnedFd) -> io::Result<OwnedFd> {
    let group = bind_sockets(addr)?;
    let listener = place.listen()?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let start = Message::Start {
        version: VERSION,
        addr,
        listener: place.socket().to_owned(),
    };
    let all = [place.dir(), &listener, lock].into_iter().chain(&group);
    let all: Vec<_> = all.map(OwnedFd::as_fd).collect();
    let started = send(&ours, &start, &all).map_err(io::Error::from);
    started
        .and_then(|()| launch(addr, theirs))
        .map_err(|error| {
            place.remove();
            io::Error::new(error.kind(), format!("cannot start a broker: {error}"))
        })?;
    Ok(ours)
}

/// Creates the sockets of all slots.
fn bind_sockets(addr: IpAddr) -> io::Result<Vec<OwnedFd>> {
    let until = Instant::now() + LEAVING;
    let group = loop {
        match bind_group(addr, BITS, Requests::ToFirst) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if Instant::now() >= until {
                    return Err(in_use(NOT_SHARED));
                }
                thread::sleep(PAUSE);
            }
            group => break group?,
        }
    };
    sockopt::set_socket_recv_buffer_size(&group[0], FRONT_BUFFER)?;
    Ok(group)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use RdmaPortSpace::{Tcp, Udp};
    use riser_testkit::{eventually, eventually_some};
    use riser_transport::wire::gsi_datagram;
    use rustix::event::Timespec;

    use super::super::place::accept;
    use super::super::router::tests::sidr_request;
    use super::*;

    const PORT: Port = (Udp, 7471);

    fn addr(last: u8) -> IpAddr {
        [127, 98, 0, last].into()
    }

    fn open(last: u8) -> Share {
        try_open(last).unwrap()
    }

    fn try_open(last: u8) -> io::Result<Share> {
        let opened = eventually_some("the lock", PATIENCE, || Share::open(addr(last)).transpose());
        opened.map(|(share, _socket)| share)
    }

    fn listen(share: &mut Share, port: Port) {
        share.take_port(port.0, port.1).unwrap();
        share.listen(port).unwrap();
    }

    /// Returns the next packet of a process.
    fn packet(share: &mut Share) -> ForwardedPacket {
        eventually_some("a packet", PATIENCE, || share.poll_packet().unwrap())
    }

    #[test]
    fn processes_have_separate_slots_and_ports() {
        let (mut first, mut second) = (open(1), open(1));
        assert_eq!((first.slot, second.slot), (1, 2));
        let in_use = |error: io::Error| error.raw_os_error() == Some(libc::EADDRINUSE);
        assert_eq!(first.take_port(Tcp, 4000).unwrap(), 4000);
        assert!(in_use(second.take_port(Tcp, 4000).unwrap_err()));
        assert_eq!(second.take_port(Udp, 4000).unwrap(), 4000);
        first.release_port((Tcp, 4000));
        assert_eq!(second.take_port(Tcp, 4000).unwrap(), 4000);
        let chosen = [&mut first, &mut second].map(|share| share.take_port(Tcp, 0).unwrap());
        assert_ne!(chosen[0], chosen[1]);

        // Verify that the address is still used after the first process exits, and that its port is
        // free immediately.
        drop(first);
        assert_eq!(second.take_port(Tcp, chosen[0]).unwrap(), chosen[0]);
        let mut third = open(1);
        assert_eq!(third.slot, 1);
        assert!(in_use(third.take_port(Tcp, 4000).unwrap_err()));
        drop(second);
        assert_eq!(third.take_port(Tcp, 4000).unwrap(), 4000);
    }

    #[test]
    fn broker_exits_after_last_process() {
        let (first, second) = (open(2), open(2));
        drop(first);
        let held = || UdpSocket::bind((addr(2), ROCE_PORT)).is_err();
        thread::sleep(Duration::from_millis(50));
        assert!(held());
        drop(second);
        eventually("the port is free", PATIENCE, || !held());
        // Verify that a new process never joins a broker that exits.
        for _ in 0..100 {
            drop(open(2));
        }
    }

    #[test]
    fn left_address_allocates_no_port() {
        let mut share = open(3);
        share.leave();
        assert!(share.connection().is_none());
        for port in [0, 4000] {
            let error = share.take_port(Tcp, port).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        assert_eq!(share.poll_packet(), Ok(None));
        assert_eq!(open(3).take_port(Tcp, 4000).unwrap(), 4000);
    }

    #[test]
    fn requests_reach_owner_of_port() {
        let (mut first, mut second) = (open(4), open(4));
        listen(&mut second, PORT);
        let peer = UdpSocket::bind((addr(5), 0)).unwrap();
        let request = || peer.send_to(&sidr_request(), (addr(4), ROCE_PORT)).unwrap();
        request();
        let received = packet(&mut second);
        assert_eq!(received.bytes, sidr_request());
        assert_eq!(received.src, peer.local_addr().unwrap());
        // Another process has received it by mistake.
        first.pass_on(received.clone());
        assert_eq!(packet(&mut second), received);
        // It can be received during a request for a port.
        request();
        eventually("a packet during a request", PATIENCE, || {
            second.take_port(Tcp, 4000).unwrap();
            second.has_packets()
        });
        assert_eq!(packet(&mut second), received);
        assert_eq!(first.poll_packet(), Ok(None));
        // There is no listener, so the process in the lowest slot rejects it.
        second.stop_listening(PORT);
        request();
        assert_eq!(packet(&mut first), received);
        assert_eq!(second.poll_packet(), Ok(None));
    }

    #[test]
    fn killed_process_is_disconnected() {
        let (mut killed, other) = (open(12), open(12));
        let peer = UdpSocket::bind((addr(13), ROCE_PORT)).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let dreq = |byte| Some((addr(13), [byte; 256]));
        killed.note_connection(CommId(1), dreq(1));
        killed.note_connection(CommId(2), dreq(2));
        killed.note_connection(CommId(1), None);
        drop(killed);
        let mut bytes = [0; 512];
        let (len, from) = peer.recv_from(&mut bytes).unwrap();
        assert_eq!(from, (addr(12), ROCE_PORT).into());
        let sent = gsi_datagram(from, (addr(13), ROCE_PORT).into(), &[2; 256]);
        assert_eq!(Some(&bytes[..len]), sent.as_deref());
        peer.set_nonblocking(true).unwrap();
        assert!(peer.recv_from(&mut bytes).is_err());
        drop(other);
    }

    #[test]
    fn unread_packets_do_not_affect_others() {
        let (mut first, mut second) = (open(6), open(6));
        listen(&mut first, PORT);
        listen(&mut second, (Tcp, 7471));
        let peer = UdpSocket::bind((addr(7), 0)).unwrap();
        for _ in 0..5000 {
            peer.send_to(&sidr_request(), (addr(6), ROCE_PORT)).unwrap();
        }
        assert_eq!(second.take_port(Tcp, 4000).unwrap(), 4000);
        first.release_port(PORT);
        listen(&mut second, PORT);
        while second.poll_packet().unwrap().is_some() {}
        peer.send_to(&sidr_request(), (addr(6), ROCE_PORT)).unwrap();
        packet(&mut second);
    }

    #[test]
    fn slots_are_limited() {
        let mut all: Vec<_> = (1..SLOTS).map(|_| open(8)).collect();
        let error = try_open(8).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("the limit is 31"), "{error}");
        drop(all.swap_remove(7));
        let again = eventually_some("a free slot", PATIENCE, || try_open(8).ok());
        assert_eq!(again.slot, 8);
    }

    #[test]
    fn foreign_address_is_in_use() {
        let _other = UdpSocket::bind((addr(9), ROCE_PORT)).unwrap();
        let error = try_open(9).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(
            error.to_string().contains("without this library"),
            "{error}"
        );
    }

    /// Opens an address with a broker that sends a message, or exits.
    fn open_with(last: u8, message: Option<&Message>) -> io::Result<Share> {
        let listener = Place::of(addr(last)).unwrap().listen().unwrap();
        thread::scope(|scope| {
            let opens = scope.spawn(|| try_open(last));
            let broker = eventually_some("a connection", PATIENCE, || accept(&listener).unwrap());
            if let Some(message) = message {
                send(&broker, message, &[listener.as_fd()]).unwrap();
            }
            drop(broker);
            opens.join().unwrap()
        })
    }

    /// Opens an address with a broker that does not respond to requests.
    fn open_silent(last: u8) -> (Share, OwnedFd) {
        let listener = Place::of(addr(last)).unwrap().listen().unwrap();
        thread::scope(|scope| {
            let opens = scope.spawn(|| open(last));
            let broker = eventually_some("a connection", PATIENCE, || accept(&listener).unwrap());
            let version = VERSION;
            let welcome = Message::Welcome { version, slot: 1 };
            send(&broker, &welcome, &[listener.as_fd()]).unwrap();
            (opens.join().unwrap(), broker)
        })
    }

    /// Returns the next message to a broker, if there is one.
    fn sent_to(broker: &OwnedFd) -> Option<Message> {
        match receive(broker, &mut [0; MESSAGE], &mut Vec::new()) {
            Received::Message(message) => Some(message),
            _ => None,
        }
    }

    #[test]
    fn silent_broker_delays_single_request() {
        let (mut share, broker) = open_silent(15);
        let timed_out = |share: &mut Share, port| {
            let error = share.take_port(Tcp, port).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
        };
        timed_out(&mut share, 0);
        let start = Instant::now();
        timed_out(&mut share, 4000);
        share.release_port(PORT);
        assert!(start.elapsed() < PATIENCE / 2);

        // It continues. Verify that the port, which nobody uses, is released.
        let request = |id, action, port| Some(Message::Request { id, action, port });
        assert_eq!(sent_to(&broker), request(1, PortAction::Allocate, (Tcp, 0)));
        assert_eq!(sent_to(&broker), request(2, PortAction::Release, PORT));
        let (id, errno, port) = (1, 0, 40000);
        send(&broker, &Message::Reply { id, errno, port }, &[]).unwrap();
        assert_eq!(share.poll_packet(), Ok(None));
        let release = request(3, PortAction::Release, (Tcp, port));
        assert_eq!(sent_to(&broker), release);
        assert!(!share.is_silent);
    }

    #[test]
    fn stopped_broker_learns_of_connections_later() {
        let (mut share, broker) = open_silent(16);
        for id in 0..5000 {
            share.note_connection(CommId(id), None);
        }
        assert!(!share.unsent.is_empty());
        let mut expected = 0;
        while expected < 5000 {
            let id = CommId(expected);
            assert_eq!(
                sent_to(&broker),
                Some(Message::Connection { id, dreq: None })
            );
            assert_eq!(share.poll_packet(), Ok(None));
            expected += 1;
        }
        assert_eq!(sent_to(&broker), None);
    }

    #[test]
    fn unusable_broker_is_reported() {
        let version = VERSION + 1;
        let other = Message::Welcome { version, slot: 1 };
        for (message, why) in [(Some(&other), "another version"), (None, "has exited")] {
            let error = open_with(10, message).map(drop).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn stopped_broker_with_backlog_is_reported() {
        let place = Place::of(addr(14)).unwrap();
        let _listener = place.listen().unwrap();
        let connections = std::iter::repeat_with(|| place.connect());
        let _waiting: Vec<_> = connections.map_while(Result::ok).collect();
        let error = try_open(14).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains(SILENT_BROKER), "{error}");
    }

    #[test]
    fn exited_broker_is_noticed() {
        let version = VERSION;
        let welcome = Message::Welcome { version, slot: 1 };
        let mut share = open_with(11, Some(&welcome)).unwrap();
        assert_eq!(share.poll_packet(), Err(Os::IO));
        let error = share.take_port(Tcp, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let connection = share.connection().unwrap();
        let mut connection = [PollFd::from_borrowed_fd(connection, PollFlags::IN)];
        assert_eq!(poll(&mut connection, Some(&Timespec::default())), Ok(1));
    }
}
