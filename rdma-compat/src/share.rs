//! Sharing an address between several processes.
//!
//! Programs fork, and `mpirun` starts several processes. All of them have a device with the same
//! address, but UDP port 4791 exists only once. So each process is one of the device's workers
//! (`riser_transport::roce::steer`): the low bits of its queue pair numbers and communication IDs
//! contain its slot, which the kernel uses to select the socket for a packet.
//!
//! - **Sockets.** The kernel numbers the sockets that share a port, so if one of them is closed,
//!   another socket is moved to its position. Therefore the first process creates the sockets of
//!   all slots, and every process holds all of them. A new process receives them from an existing
//!   process ([`Message::Join`]). They exist while there is at least one process.
//! - **Slots.** A process owns its slot while it holds the slot's name, which is an abstract
//!   address of a Unix socket. The kernel releases it when the process exits for any reason. This
//!   socket is the process's mailbox. Other users can use these names too. So to find out whether a
//!   slot has a process of this address, we check the shared memory, where each process holds a
//!   lock ([`PortTable::has_process`]), and only send packets to these processes.
//! - **Slot 0** is not used by a process. It receives connection requests, which do not contain any
//!   of our IDs. All processes read from it, and forward packets for other processes
//!   ([`Message::Packet`]).
//! - **Ports** of the RDMA CM are recorded in a table in shared memory (`port_table`), with the
//!   process that has allocated the port, and whether it is listening. There is also a table of the
//!   slots that recent requests were sent to: if a peer cancels a request before it gets a
//!   response, its message only contains its own ID, and must be delivered to this process only.
//! - **Early requests.** Some programs use other means to agree that one of them is listening now
//!   and the other can connect. They rely on the time needed for address resolution, which takes a
//!   while with a kernel, but is immediate here. So if no process is listening on the port of a
//!   request, the process that has received the request keeps it for [`LISTEN_GRACE`]. A process
//!   that starts to listen wakes all others ([`Share::listen`]).
//!
//! An address can only be shared by processes of the same user. For other users, the address is in
//! use. A malicious user can use the names of slots, which reduces the number of available slots,
//! or the name for opening the address, which prevents it from being opened.
//!
//! Not implemented: listeners with bare service IDs. Such requests are handled by the process that
//! receives them.

mod mail;
mod opening;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::lock::unpoisoned;
pub(crate) use crate::port_table::{BITS, Port};
use crate::port_table::{Owner, PortTable, SLOTS};

use mail::{
    MESSAGE, Message, Received, is_there, name, new_mailbox, new_sender, receive_with, reply,
    send_with,
};
use opening::{JoinResult, OTHER_VERSION, begin, in_use, join};
pub(crate) use opening::{LONGEST, Opening, Silent, await_others};
use riser_transport::roce::ForwardedPacket;
use riser_transport::roce::nic::IpFields;
use riser_transport::wire::cm_msg::{CmMessage, is_request};
use riser_transport::wire::cma::RdmaPortSpace;
use riser_transport::wire::mad::{MadClass, RESPONSE};
use riser_transport::wire::{Mad, MadHeader};
use rustix::io::Errno as Os;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendFlags, bind, connect, recvfrom, sendmsg, sockopt,
};
use tracing::{debug, warn};

/// Maximum number of packets that wait for space in mailboxes, and maximum time that a packet
/// waits. After this time, its sender has either retransmitted it or given up.
const MAX_WAITING: usize = 512;
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Maximum time that a request waits for a listener.
const LISTEN_GRACE: Duration = Duration::from_millis(300);

/// Maximum number of requests that wait for listeners, in total and for each peer address.
/// Additional requests are rejected immediately.
const MAX_EARLY: usize = 64;
const MAX_EARLY_PER_PEER: usize = MAX_EARLY / 8;

/// Maximum number of consecutive messages, and of consecutive packets for other processes, so that
/// a flood of them does not prevent this process from making progress.
const IN_A_ROW: usize = 64;

/// Offset of the MAD in a packet, after BTH and DETH.
const MAD: usize = 20;
const MAD_LEN: usize = 256;

/// First port and number of ports that are used if no specific port is requested.
const FIRST_EPHEMERAL: u16 = 32_768;
const EPHEMERALS: u16 = 28_232;

/// Returns the slot of the process that a response is for.
pub(crate) fn slot_of_answer(mad: &[u8]) -> Option<u8> {
    let mad: &Mad = mad.try_into().ok()?;
    let header = MadHeader::of(mad);
    let is_answer = header.class() == MadClass::SubnetAdm as u8 && header.method() & RESPONSE != 0;
    is_answer.then(|| (header.transaction().0 >> 32) as u8 & ((1 << BITS) - 1))
}

/// A process's part of an address.
pub(crate) struct Share {
    addr: IpAddr,
    slot: u8,
    ports: PortTable,
    /// Sockets of all slots. They must be closed before the mailbox, whose name indicates that the
    /// slot has a process.
    group: Vec<OwnedFd>,
    mailbox: OwnedFd,
    /// Socket for sending packets to other processes.
    sender: OwnedFd,
    outboxes: Mutex<Outboxes>,
    /// Requests waiting for a listener, oldest first.
    early: Mutex<VecDeque<Early>>,
}

/// Outboxes by slot, for processes with waiting packets.
type Outboxes = BTreeMap<u8, Outbox>;

/// Packets for a process whose mailbox is full. The kernel only allows a few messages in a mailbox.
struct Outbox {
    /// A separate socket that is connected to the mailbox, because unread messages use the send
    /// buffer of their socket.
    to: OwnedFd,
    /// Waiting packets with their deadlines, oldest first.
    waiting: VecDeque<(Instant, ForwardedPacket)>,
}

/// A request for a port without a listener.
struct Early {
    port: Port,
    /// Deadline of the request.
    until: Instant,
    packet: ForwardedPacket,
}

/// Result of reading the mailbox.
enum Mail {
    Packet(ForwardedPacket),
    Other,
}

impl Share {
    /// Joins an address. The process can't fork during this call, so everything that may take a
    /// long time is done in advance by [`await_others`].
    ///
    /// # Errors
    /// Returns `EADDRINUSE` if the port is used by anything other than processes of this user with
    /// this library, `EUSERS` if all slots are used, and errors of creating sockets.
    pub(crate) fn open(opening: Opening, silent: Silent) -> io::Result<Self> {
        let addr = opening.addr;
        let mailbox = new_mailbox()?;
        let slot = (1..SLOTS)
            .find_map(|slot| match bind(&mailbox, &name(addr, Some(slot)).ok()?) {
                Ok(()) => Some(Ok(slot)),
                Err(Os::ADDRINUSE) => None,
                Err(error) => Some(Err(error.into())),
            })
            .unwrap_or_else(|| {
                let why = format!(
                    "too many processes use the address: the limit is {}",
                    SLOTS - 1
                );
                Err(io::Error::new(io::ErrorKind::QuotaExceeded, why))
            })?;
        let (group, table) = match join(&mailbox, addr, slot, silent)? {
            JoinResult::Welcome(group, table) => (group, table),
            JoinResult::Nothing { why } => begin(addr).map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => in_use(&why),
                _ => error,
            })?,
        };
        let ports = PortTable::map(table, slot)?.ok_or_else(|| in_use(OTHER_VERSION))?;
        debug!(%addr, slot, "opened the address");
        Ok(Self {
            addr,
            slot,
            ports,
            group,
            mailbox,
            sender: new_sender()?,
            outboxes: Mutex::default(),
            early: Mutex::default(),
        })
    }

    /// Returns its slot number, which is the worker index of the device.
    pub(crate) fn slot(&self) -> u32 {
        self.slot.into()
    }

    /// Returns a duplicate of its socket, for the device.
    ///
    /// # Errors
    /// Returns errors of `dup(2)`.
    pub(crate) fn socket(&self) -> io::Result<OwnedFd> {
        self.group[usize::from(self.slot)].try_clone()
    }

    /// Returns the sockets to read in addition to its own: the mailbox and the socket of slot 0.
    pub(crate) fn inputs(&self) -> [BorrowedFd<'_>; 2] {
        [self.mailbox.as_fd(), self.group[0].as_fd()]
    }

    /// Returns all descriptors that a forked process must close. The address and the slot can only
    /// be reused when all of them are closed.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sockets = self.group.iter().chain([&self.mailbox, &self.sender]);
        sockets.map(AsFd::as_fd).chain([self.ports.life()])
    }

    /// Releases its part of an address that was removed.
    pub(crate) fn leave(&mut self) {
        self.ports.leave();
        self.early().clear();
        self.outboxes().clear();
        self.group.clear();
        // Replace the mailbox with an unnamed one.
        match new_mailbox() {
            Ok(mailbox) => self.mailbox = mailbox,
            Err(error) => warn!(%error, "cannot release a slot of a closed address"),
        }
    }

    /// Returns the next packet for this process that was received on slot 0 or from another
    /// process. If there were many packets for other processes, there may be more: in this case,
    /// one of the [`Share::inputs`] is still readable.
    pub(crate) fn poll_packet(&self, now: Instant) -> Option<ForwardedPacket> {
        let mut buffer = [0; MESSAGE];
        for _ in 0..IN_A_ROW {
            match self.read_mail(&mut buffer) {
                Some(Mail::Packet(packet)) if self.withdraws_early(&packet) => {}
                Some(Mail::Packet(packet)) => return Some(packet),
                Some(Mail::Other) => {}
                None => break,
            }
        }
        // This must follow reading the mailbox, which indicates that a process has started to
        // listen.
        while let Some((packet, until)) = self.next_early(now) {
            // If the listener was killed, it is ignored, and the request waits for its remaining
            // time.
            if let Some(ours) = self.sort(now, packet, Some(until).filter(|until| *until > now)) {
                return Some(ours);
            }
        }
        for _ in 0..IN_A_ROW {
            let flags = RecvFlags::DONTWAIT;
            let front = self.group.first()?;
            let (len, _, src) = recvfrom(front, &mut buffer[..], flags).ok()?;
            let Some(src) = src.and_then(|src| SocketAddr::try_from(src).ok()) else {
                continue;
            };
            let packet = ForwardedPacket {
                worker: 0,
                src,
                ip: IpFields::default(),
                bytes: buffer[..len].to_vec(),
            };
            if let Some(ours) = self.pass_on(now, packet) {
                return Some(ours);
            }
        }
        None
    }

    /// Forwards a packet to its process, or returns it if it is for this process. A request without
    /// a listener waits for one.
    pub(crate) fn pass_on(&self, now: Instant, packet: ForwardedPacket) -> Option<ForwardedPacket> {
        self.sort(now, packet, Some(now + LISTEN_GRACE))
    }

    /// Returns the time when [`Share::poll_packet`] should be called even if no input is readable.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.early().front().map(|early| early.until)
    }

    /// Returns the next request that has a listener or has reached its deadline, and its deadline.
    fn next_early(&self, now: Instant) -> Option<(ForwardedPacket, Instant)> {
        let mut all = self.early();
        let is_due = |early: &Early| early.until <= now || self.ports.owner(early.port).listens();
        let at = all.iter().position(is_due)?;
        all.remove(at).map(|early| (early.packet, early.until))
    }

    /// Stores a request for a port. Returns false if there are too many.
    fn keep_early(&self, port: Port, until: Instant, packet: &ForwardedPacket) -> bool {
        let mut all = self.early();
        let (mad, peer) = (MAD..MAD + MAD_LEN, packet.src.ip());
        let of_peer = all.iter().filter(|early| early.packet.src.ip() == peer);
        // A retransmitted request is already stored.
        if of_peer
            .clone()
            .any(|early| early.packet.bytes[mad.clone()] == packet.bytes[mad.clone()])
        {
            return true;
        }
        let has_place = of_peer.count() < MAX_EARLY_PER_PEER && all.len() < MAX_EARLY;
        if has_place {
            let packet = packet.clone();
            let at = all.partition_point(|early| early.until <= until);
            let early = Early {
                port,
                until,
                packet,
            };
            all.insert(at, early);
        }
        has_place
    }

    /// Returns whether a message cancels a stored request, which is then removed.
    fn withdraws_early(&self, packet: &ForwardedPacket) -> bool {
        let mut all = self.early();
        if all.is_empty() {
            return false;
        }
        let Some(CmMessage::Rej(rej)) = request_in(packet) else {
            return false;
        };
        let before = all.len();
        all.retain(|early| match request_in(&early.packet) {
            Some(CmMessage::Req(request)) => {
                early.packet.src.ip() != packet.src.ip()
                    || request.local_comm_id != rej.local_comm_id
            }
            _ => true,
        });
        all.len() < before
    }

    fn early(&self) -> MutexGuard<'_, VecDeque<Early>> {
        unpoisoned(self.early.lock())
    }

    /// Finds out which process a packet is for, like [`Share::pass_on`]. A request can wait until
    /// the given time, if any.
    fn sort(
        &self,
        now: Instant,
        packet: ForwardedPacket,
        until: Option<Instant>,
    ) -> Option<ForwardedPacket> {
        if packet.worker != 0 {
            if packet.worker == self.slot() {
                return Some(packet);
            }
            // A packet for a process that has exited is lost, like other packets in flight.
            if let Ok(slot) = u8::try_from(packet.worker) {
                self.forward(now, slot, &packet);
            }
            return None;
        }
        let mad = packet.bytes.get(MAD..MAD + MAD_LEN);
        if let Some(slot) = mad.and_then(slot_of_answer) {
            // The process that has sent the request may have exited.
            let is_ours = slot == 0 || slot == self.slot || !self.forward(now, slot, &packet);
            return is_ours.then_some(packet);
        }
        let (service, id) = match request_in(&packet) {
            Some(CmMessage::Req(request)) => (request.service_id, Some(request.local_comm_id)),
            Some(CmMessage::SidrReq(question)) => (question.service_id, None),
            // A REJ is for the process that has received the request.
            Some(CmMessage::Rej(rej)) => {
                let ports = &self.ports;
                let slot = ports.slot_of_request(packet.src.ip(), rej.local_comm_id);
                let is_ours = slot == 0 || slot == self.slot || !self.forward(now, slot, &packet);
                return (is_ours && !self.withdraws_early(&packet)).then_some(packet);
            }
            _ => return Some(packet),
        };
        let note = |slot| {
            if let Some(id) = id {
                self.ports.note_request(packet.src.ip(), id, slot);
            }
        };
        note(self.slot);
        // A request without a port is handled by this process.
        let Some(port) = RdmaPortSpace::of(service) else {
            return Some(packet);
        };
        let owner = self.ports.owner(port);
        if owner.listens() {
            if owner.slot() == self.slot {
                return Some(packet);
            }
            note(owner.slot());
            if self.forward(now, owner.slot(), &packet) {
                return None;
            }
            // It has exited without releasing the port.
            self.ports.free(port, owner);
            note(self.slot);
        }
        let waits = until.is_some_and(|until| self.keep_early(port, until, &packet));
        // No process is listening on the port, so this process rejects the request.
        (!waits).then_some(packet)
    }

    /// Sends a packet to another process, either immediately or later. Returns false if the slot
    /// has no process.
    fn forward(&self, now: Instant, slot: u8, packet: &ForwardedPacket) -> bool {
        let mut outboxes = self.outboxes();
        send_waiting(now, &mut outboxes);
        match self.send(&mut outboxes, slot, packet) {
            Err(Os::CONNREFUSED) => return false,
            Err(Os::AGAIN) => {}
            _ => return true,
        }
        let of = |outbox: &Outbox| outbox.waiting.len();
        if outboxes.values().map(of).sum::<usize>() >= MAX_WAITING {
            // A packet must be dropped, like in a full socket. We drop one for the process with the
            // most waiting packets, because this process may be stopped.
            let own = outboxes.get(&slot).map_or(0, of);
            match outboxes.values_mut().max_by_key(|outbox| of(outbox)) {
                Some(longest) if of(longest) > own => longest.waiting.pop_back(),
                _ => return true,
            };
        }
        if let Some(outbox) = outboxes.get_mut(&slot) {
            outbox
                .waiting
                .push_back((now + LONGEST_WAIT, packet.clone()));
        }
        true
    }

    /// Sends packets that are waiting for space in mailboxes. Returns whether there are more.
    pub(crate) fn flush(&self, now: Instant) -> bool {
        let mut outboxes = self.outboxes();
        send_waiting(now, &mut outboxes);
        !outboxes.is_empty()
    }

    fn outboxes(&self) -> MutexGuard<'_, Outboxes> {
        unpoisoned(self.outboxes.lock())
    }

    /// Sends a packet to another process.
    ///
    /// # Errors
    /// Returns `ECONNREFUSED` if the slot has no process, or `EAGAIN` if its mailbox is full. In
    /// this case, an outbox is created for it.
    fn send(&self, all: &mut Outboxes, slot: u8, packet: &ForwardedPacket) -> Result<(), Os> {
        if all.contains_key(&slot) {
            // It must be sent after the packets that are already waiting.
            return Err(Os::AGAIN);
        }
        self.connect(&self.sender, slot)?;
        match send_packet(&self.sender, packet) {
            Err(Os::AGAIN) => {}
            sent => return sent,
        }
        // Either the mailbox or the send buffer is full.
        let to = new_sender()?;
        self.connect(&to, slot)?;
        let sent = send_packet(&to, packet);
        let waiting = VecDeque::new();
        all.insert(slot, Outbox { to, waiting });
        sent
    }

    /// Connects a socket to the mailbox of a process, so that messages can't be received by another
    /// process that uses the slot's name later.
    ///
    /// # Errors
    /// Returns `ECONNREFUSED` if the slot has no process.
    fn connect(&self, socket: &OwnedFd, slot: u8) -> Result<(), Os> {
        connect(socket, &name(self.addr, Some(slot))?)?;
        // This must be checked after connecting: if the process exists now, it held the name at
        // that time.
        match self.ports.has_process(slot) {
            true => Ok(()),
            false => Err(Os::CONNREFUSED),
        }
    }

    /// Reads a message. Returns `None` if the mailbox is empty.
    fn read_mail(&self, buffer: &mut [u8]) -> Option<Mail> {
        let mut with = Vec::new();
        let (message, body, from) = match receive_with(&self.mailbox, buffer, &mut with)? {
            Received::Message { kind, len, from } => (kind, &buffer[1..len], from),
            Received::OfAnotherUser(from) => {
                reply(&self.mailbox, from.as_ref(), Message::Refusal);
                return Some(Mail::Other);
            }
            Received::Nothing => return Some(Mail::Other),
        };
        if message == Message::Ask as u8 {
            reply(&self.mailbox, from.as_ref(), Message::Here);
        }
        if message == Message::Join as u8
            && let Some(to) = with.first()
        {
            let mut all: Vec<BorrowedFd<'_>> = self.group.iter().map(AsFd::as_fd).collect();
            all.push(self.ports.memory());
            if let Err(error) = send_with(to, None, Message::Welcome, &all) {
                debug!(%error, "cannot reply to a process");
            }
        }
        if message == Message::Packet as u8
            && let Some((head, bytes)) = body.split_first_chunk::<20>()
        {
            let mut ip = [0; 16];
            ip.copy_from_slice(&head[4..]);
            let port = u16::from_be_bytes([head[2], head[3]]);
            return Some(Mail::Packet(ForwardedPacket {
                worker: self.slot(),
                src: SocketAddr::new(IpAddr::from(ip).to_canonical(), port),
                ip: IpFields {
                    traffic_class: head[0],
                    hop_limit: head[1],
                    // Sockets of additional addresses are not shared.
                    gid_index: 0,
                },
                bytes: bytes.to_vec(),
            }));
        }
        Some(Mail::Other)
    }

    /// Allocates a port for this process, or any free port if `port` is 0. Returns the port.
    ///
    /// # Errors
    /// Returns `EADDRINUSE` if another process uses it, or if all are in use, and `EIO` if the
    /// address was removed.
    pub(crate) fn take_port(&self, space: RdmaPortSpace, port: u16) -> io::Result<u16> {
        let in_use = || io::Error::from(io::ErrorKind::AddrInUse);
        if self.group.is_empty() {
            // The slot may now belong to another process, and the address may have returned.
            return Err(Os::IO.into());
        }
        if port != 0 {
            let wanted = (space, port);
            loop {
                let owner = self.ports.owner(wanted);
                if self.ports.is_own(owner) {
                    return Ok(port);
                }
                // Ports that were not released by a process that has exited are free.
                if owner != Owner::FREE && self.ports.has_process(owner.slot()) {
                    return Err(in_use());
                }
                if self.ports.claim_port(wanted, owner) {
                    return Ok(port);
                }
            }
        }
        let mut random = [0; 2];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let start = u16::from_ne_bytes(random) % EPHEMERALS;
        let mut all = (0..EPHEMERALS).map(|i| {
            FIRST_EPHEMERAL + ((u32::from(start) + u32::from(i)) % u32::from(EPHEMERALS)) as u16
        });
        // A port that this process has already allocated is not free.
        all.find(|port| self.ports.claim_port((space, *port), Owner::FREE))
            .ok_or_else(in_use)
    }

    /// Starts to receive requests for a port of this process, including requests that are waiting
    /// in other processes.
    pub(crate) fn listen(&self, port: Port) {
        self.ports.set_listening(port, true);
        for slot in (1..SLOTS).filter(|slot| self.ports.has_process(*slot)) {
            let to = name(self.addr, Some(slot)).map_err(io::Error::from);
            if let Err(error) = to.and_then(|to| is_there(&self.mailbox, &to, Message::Probe, &[]))
            {
                debug!(%error, slot, "cannot wake a process");
            }
        }
    }

    /// Stops receiving requests for a port of this process, so that they wait for a listener.
    pub(crate) fn stop_listening(&self, port: Port) {
        self.ports.set_listening(port, false);
    }

    /// Releases a port.
    pub(crate) fn give_back_port(&self, port: Port) {
        self.ports.release_port(port);
    }
}

/// Sends a packet to the process that a socket is connected to.
///
/// # Errors
/// Returns `ECONNREFUSED` if the process has exited, or `EAGAIN` if its mailbox is full.
fn send_packet(to: &OwnedFd, packet: &ForwardedPacket) -> Result<(), Os> {
    let mut head = [0u8; 21];
    head[0] = Message::Packet as u8;
    head[1] = packet.ip.traffic_class;
    head[2] = packet.ip.hop_limit;
    head[3..5].copy_from_slice(&packet.src.port().to_be_bytes());
    let ip = match packet.src.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    head[5..].copy_from_slice(&ip.octets());
    let parts = [IoSlice::new(&head), IoSlice::new(&packet.bytes)];
    let mut none = SendAncillaryBuffer::default();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(to, &parts, &mut none, flags).map(drop)
}

/// Sends packets if there is space. A process that is stopped does not affect other processes.
fn send_waiting(now: Instant, outboxes: &mut Outboxes) {
    outboxes.retain(|_, outbox| {
        while let Some((until, packet)) = outbox.waiting.front() {
            if *until > now && send_packet(&outbox.to, packet) == Err(Os::AGAIN) {
                return true;
            }
            outbox.waiting.pop_front();
        }
        false
    });
}

impl Drop for Share {
    fn drop(&mut self) {
        // After it has left, the slot may belong to another process.
        let Some(own) = self.group.get(usize::from(self.slot)) else {
            return;
        };
        self.ports.leave();
        // Packets that still arrive should not use any memory.
        let _ = sockopt::set_socket_recv_buffer_size(own, 1);
    }
}

/// Returns the CM message in a packet, if it is a message that does not contain any of our IDs.
fn request_in(packet: &ForwardedPacket) -> Option<CmMessage> {
    let mad = packet.bytes.get(MAD..MAD + MAD_LEN);
    let mad = mad.filter(|mad| is_request(mad))?;
    CmMessage::parse(mad).ok().map(|(_, message)| message)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::{iter, thread};

    use riser_testkit::skip::skip;
    use riser_testkit::{eventually, eventually_some};
    use riser_transport::verbs::PKey;
    use riser_transport::wire::ROCE_PORT;
    use riser_transport::wire::cm_msg::{
        AdditionalInfo, CommId, PrivateData, RejMsg, RejOf, RejReason, SidrReqMsg,
    };
    use riser_transport::wire::mad::TransactionId;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{
        self, AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, shutdown, socket,
        socketpair, sockopt,
    };

    use super::mail::{MAX_DESCRIPTORS, receive};
    use super::opening::{
        Inquiry, InquiryResult, Opener, PATIENCE, PAUSE, ResponsePair, await_openers,
    };
    use super::*;

    fn addr(last: u8) -> IpAddr {
        [127, 98, 0, last].into()
    }

    fn open(addr: IpAddr, silent: Silent) -> io::Result<Share> {
        let opening = Opening::begin(addr)?.expect("no other opens it");
        Share::open(opening, silent)
    }

    fn await_all(addr: IpAddr) -> io::Result<Silent> {
        await_others(addr, Instant::now() + LONGEST)
    }

    /// Opens the address like another process would, while the existing process responds.
    fn open_beside(first: &Share) -> Share {
        thread::scope(|scope| {
            let opens = scope.spawn(|| open(first.addr, Silent::default()));
            while !opens.is_finished() {
                assert!(first.poll_packet(Instant::now()).is_none());
                thread::yield_now();
            }
            opens.join().unwrap().unwrap()
        })
    }

    #[test]
    fn processes_have_separate_slots_and_ports() {
        use RdmaPortSpace::{Tcp, Udp};
        let first = open(addr(1), Silent::default()).unwrap();
        let second = open_beside(&first);
        assert_eq!((first.slot, second.slot), (1, 2));

        let in_use = io::ErrorKind::AddrInUse;
        assert_eq!(first.take_port(Tcp, 4000).unwrap(), 4000);
        assert_eq!(second.take_port(Tcp, 4000).unwrap_err().kind(), in_use);
        // Identifiers of a process can share a port, if the device allows it.
        assert_eq!(first.take_port(Tcp, 4000).unwrap(), 4000);
        assert_eq!(second.take_port(Udp, 4000).unwrap(), 4000);
        first.give_back_port((Tcp, 4000));
        assert_eq!(second.take_port(Tcp, 4000).unwrap(), 4000);
        let chosen = [&first, &second].map(|share| share.take_port(Tcp, 0).unwrap());
        assert_ne!(chosen[0], chosen[1]);

        // The first process exits, and the address is still used.
        drop(first);
        let third = open_beside(&second);
        assert_eq!(third.slot, 1);
        assert_eq!(third.ports.owner((Tcp, chosen[0])), Owner::FREE);
        assert_eq!(third.take_port(Tcp, 4000).unwrap_err().kind(), in_use);
        drop(second);
        assert_eq!(third.take_port(Tcp, 4000).unwrap(), 4000);
    }

    #[test]
    fn ports_of_killed_process_are_free() {
        let first = open(addr(2), Silent::default()).unwrap();
        let port = (RdmaPortSpace::Tcp, 4000);
        // As left behind by a process in slot 9.
        leave_as_killed(&first, port, Owner::new(9, 0));
        assert_eq!(first.take_port(port.0, port.1).unwrap(), 4000);
    }

    /// Assigns a free port to a process that does not exist, as if it had been killed.
    fn leave_as_killed(share: &Share, port: Port, owner: Owner) {
        assert!(share.ports.replace(port, Owner::FREE, owner));
    }

    #[test]
    fn removed_address_allocates_no_port() {
        let mut first = open(addr(29), Silent::default()).unwrap();
        let second = open_beside(&first);
        first.leave();
        assert!(!second.ports.has_process(1));
        let third = open_beside(&second);
        assert_eq!(third.slot, 1);
        for port in [0, 4000] {
            let error = first.take_port(RdmaPortSpace::Tcp, port).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        assert_eq!(second.take_port(RdmaPortSpace::Tcp, 4000).unwrap(), 4000);
    }

    /// Creates a request to the process with datagram port 7471.
    fn question() -> Vec<u8> {
        datagram(&CmMessage::SidrReq(SidrReqMsg {
            request_id: CommId(0x0102_0304),
            pkey: PKey(0xffff),
            service_id: RdmaPortSpace::Udp.service_id(7471),
            private_data: PrivateData::default(),
        }))
    }

    fn datagram(message: &CmMessage) -> Vec<u8> {
        let mut datagram = vec![0; MAD];
        datagram[7] = 1;
        datagram.extend(message.emit(TransactionId(5)));
        datagram.extend([0; 4]);
        datagram
    }

    /// Creates a request with this ID for the connection service of port 7471.
    fn request(id: u32) -> Vec<u8> {
        let mut request = vec![0; MAD + MAD_LEN];
        // The header of a REQ, its ID and the service ID.
        request[MAD..MAD + 4].copy_from_slice(&[1, 7, 2, 3]);
        request[MAD + 17] = 0x10;
        request[MAD + 24..MAD + 28].copy_from_slice(&id.to_be_bytes());
        request[MAD + 32..MAD + 40].copy_from_slice(&0x0106_1d2f_u64.to_be_bytes());
        request.extend([0; 4]);
        request
    }

    /// Creates the message that a peer uses to cancel its request.
    fn cancellation(id: u32) -> Vec<u8> {
        datagram(&CmMessage::Rej(RejMsg {
            local_comm_id: CommId(id),
            remote_comm_id: CommId(0),
            message: RejOf::NoMessage,
            reason: RejReason::Timeout,
            info: AdditionalInfo::new(&[7; 8]).unwrap(),
            private_data: PrivateData::default(),
        }))
    }

    fn listen(share: &Share, space: RdmaPortSpace) {
        share.take_port(space, 7471).unwrap();
        share.listen((space, 7471));
    }

    fn is_woken(share: &Share) -> bool {
        let mut fds = [PollFd::new(&share.mailbox, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    /// Creates a packet that was received on slot 0 from an address.
    fn front(from: u8, bytes: Vec<u8>) -> ForwardedPacket {
        ForwardedPacket {
            worker: 0,
            src: (addr(from), 9000).into(),
            ip: IpFields::default(),
            bytes,
        }
    }

    #[test]
    fn early_request_waits_for_listener() {
        let first = open(addr(10), Silent::default()).unwrap();
        let second = open_beside(&first);
        let now = Instant::now();
        let early = front(11, request(1));
        assert_eq!(first.pass_on(now, early.clone()), None);
        assert_eq!(first.deadline(), Some(now + LISTEN_GRACE));
        // A process has allocated the port, but is not listening yet.
        second.take_port(RdmaPortSpace::Tcp, 7471).unwrap();
        assert_eq!(first.poll_packet(now), None);
        assert!(!is_woken(&first));
        second.listen((RdmaPortSpace::Tcp, 7471));
        assert!(is_woken(&first));
        assert_eq!(first.poll_packet(now), None, "it is passed on");
        assert_eq!(second.poll_packet(now).unwrap().bytes, early.bytes);
        assert_eq!(first.deadline(), None);
        // Subsequent messages of the peer about this request are sent to the listener.
        assert_eq!(first.pass_on(now, front(11, cancellation(1))), None);
        assert_eq!(second.poll_packet(now).unwrap().bytes, cancellation(1));

        // If the listener was killed, the request is treated as if there were no listener, even if
        // the port has changed in the meantime.
        let port = (RdmaPortSpace::Tcp, 7471);
        let killed = Owner::new(9, 0).listening();
        second.give_back_port(port);
        leave_as_killed(&second, port, killed);
        assert_eq!(first.pass_on(now, early.clone()), None);
        leave_as_killed(&second, port, killed);
        assert_eq!(first.poll_packet(now), None);
        assert_eq!(first.deadline(), Some(now + LISTEN_GRACE));
        listen(&first, RdmaPortSpace::Tcp);
        assert!(is_woken(&first));
        assert_eq!(first.poll_packet(now), Some(early.clone()));

        // A process that keeps the port but stops listening is not a listener either.
        first.stop_listening(port);
        assert_eq!(first.pass_on(now, early.clone()), None);
        assert_eq!(first.poll_packet(now), None);
        first.listen(port);
        assert_eq!(first.poll_packet(now), Some(early));

        // Without a listener, the request is eventually rejected, and so is a SIDR request.
        let question = front(11, question());
        assert_eq!(second.pass_on(now, question.clone()), None);
        let until = now + LISTEN_GRACE;
        assert_eq!(second.poll_packet(until - PAUSE), None);
        assert_eq!(second.poll_packet(until), Some(question));
        assert_eq!(second.poll_packet(until), None);
    }

    #[test]
    fn early_requests_are_limited_per_peer() {
        let share = open(addr(12), Silent::default()).unwrap();
        let now = Instant::now();
        let waits = |from, id| share.pass_on(now, front(from, request(id))).is_none();
        let mut again = front(13, request(0));
        for id in 0..MAX_EARLY_PER_PEER as u32 {
            assert!(waits(13, id));
        }
        assert!(!waits(13, 99), "the peer has its share");
        // A request that is retransmitted in a different datagram is only stored once.
        again.bytes[11] = 77;
        assert_eq!(share.pass_on(now, again), None);
        assert_eq!(share.early().len(), MAX_EARLY_PER_PEER);
        assert!((14..21).all(|from| (0..8).all(|id| waits(from, id))));
        assert!(!waits(21, 0), "all places are taken");
    }

    #[test]
    fn waiting_request_can_be_cancelled() {
        let first = open(addr(22), Silent::default()).unwrap();
        let second = open_beside(&first);
        let now = Instant::now();
        for id in 1..4 {
            assert_eq!(first.pass_on(now, front(23, request(id))), None);
        }
        // The message may be received by another process.
        assert_eq!(first.pass_on(now, front(23, cancellation(1))), None);
        assert_eq!(second.pass_on(now, front(23, cancellation(2))), None);
        assert_eq!(first.poll_packet(now), None);
        // A message from another host has no effect on it, in whichever process it is stored.
        first.ports.note_request(addr(24), CommId(3), 1);
        assert!(first.pass_on(now, front(24, cancellation(3))).is_some());
        let left = first.poll_packet(now + LISTEN_GRACE).unwrap();
        assert_eq!(left.bytes, request(3));
        assert_eq!(first.deadline(), None);
    }

    #[test]
    fn cancelled_request_affects_single_process() {
        let first = open(addr(8), Silent::default()).unwrap();
        let second = open_beside(&first);
        let third = open_beside(&first);
        listen(&second, RdmaPortSpace::Tcp);
        let peer = UdpSocket::bind((addr(9), 0)).unwrap();
        let send = |bytes: &[u8]| peer.send_to(bytes, (addr(8), ROCE_PORT)).unwrap();
        for bytes in [&request(77), &cancellation(77)] {
            send(bytes);
            assert!(
                first.poll_packet(Instant::now()).is_none(),
                "it is passed on"
            );
            assert_eq!(second.poll_packet(Instant::now()).unwrap().bytes, *bytes);
        }
        // A message for a different request is kept, and no other process receives it.
        send(&cancellation(78));
        assert!(first.poll_packet(Instant::now()).is_some());
        for share in [&first, &second, &third] {
            assert!(share.poll_packet(Instant::now()).is_none());
        }
    }

    #[test]
    fn flood_for_other_process_does_not_block() {
        let first = open(addr(6), Silent::default()).unwrap();
        let second = open_beside(&first);
        listen(&second, RdmaPortSpace::Udp);
        let peer = UdpSocket::bind((addr(7), 0)).unwrap();
        for _ in 0..2 * IN_A_ROW {
            peer.send_to(&question(), (addr(6), ROCE_PORT)).unwrap();
        }
        assert!(first.poll_packet(Instant::now()).is_none());
        let waits = |front| recvfrom(front, &mut [0; MESSAGE], RecvFlags::DONTWAIT).is_ok();
        assert!(waits(&first.group[0]), "some are left for the next turn");
    }

    #[test]
    fn requests_reach_owner_of_port() {
        let first = open(addr(3), Silent::default()).unwrap();
        let second = open_beside(&first);
        listen(&second, RdmaPortSpace::Udp);
        let datagram = question();
        let peer = UdpSocket::bind((addr(4), 0)).unwrap();
        let ask = || peer.send_to(&datagram, (addr(3), ROCE_PORT)).unwrap();

        // Either process can receive it. The first one forwards it to the mailbox of the second.
        ask();
        assert!(first.poll_packet(Instant::now()).is_none());
        let packet = second
            .poll_packet(Instant::now())
            .expect("the packet was passed on");
        assert_eq!(packet.bytes, datagram);
        assert_eq!(packet.src, peer.local_addr().unwrap());
        ask();
        assert!(second.poll_packet(Instant::now()).is_some());

        // Send more packets than fit into a mailbox.
        for _ in 0..100 {
            ask();
            assert!(first.poll_packet(Instant::now()).is_none());
        }
        let mut came = 0;
        loop {
            let waits = first.flush(Instant::now());
            while second.poll_packet(Instant::now()).is_some() {
                came += 1;
            }
            if !waits {
                break;
            }
        }
        assert_eq!(came, 100);

        // No process is listening, so the process that receives the request eventually rejects it.
        drop(second);
        ask();
        assert!(first.poll_packet(Instant::now()).is_none());
        let late = Instant::now() + LISTEN_GRACE;
        assert!(first.poll_packet(late).is_some());
    }

    #[test]
    fn slot_squatter_gets_no_packets() {
        let first = open(addr(36), Silent::default()).unwrap();
        let second = open_beside(&first);
        let (now, port) = (Instant::now(), (RdmaPortSpace::Tcp, 7471));
        listen(&second, port.0);
        let owner = first.ports.owner(port);
        assert_eq!(first.pass_on(now, front(37, request(1))), None);
        assert!(second.poll_packet(now).is_some());
        // It is killed, and the name of its slot is used by something else, which is possible for
        // any user.
        drop(second);
        let taken = stopped(addr(36), 2);
        leave_as_killed(&first, port, owner);
        first.ports.note_request(addr(37), CommId(1), 2);
        assert!(first.pass_on(now, front(37, cancellation(1))).is_some());
        assert_eq!(first.pass_on(now, numbered(2, 0)), None);
        assert_eq!(first.pass_on(now, front(37, request(2))), None);
        // The request waits for a listener, as for a port without one.
        leave_as_killed(&first, port, owner);
        listen(&first, port.0);
        assert_eq!(first.poll_packet(now).unwrap().bytes, request(2));
        assert!(receive(&taken, &mut [0; 1]).is_none());
        // The restarted process gets a different slot.
        let again = open_beside(&first);
        assert_eq!(again.slot, 3);
        first.give_back_port(port);
        assert_eq!(again.take_port(port.0, port.1).unwrap(), port.1);
    }

    #[test]
    fn sockets_are_sent_to_requesting_process() {
        let first = open(addr(39), Silent::default()).unwrap();
        let own = stopped(addr(39), 2);
        let (answers, to) = (
            ResponsePair::new().unwrap(),
            name(addr(39), Some(1)).unwrap(),
        );
        for _ in 0..2 {
            assert!(is_there(&own, &to, Message::Join, &[answers.to.as_fd()]).unwrap());
        }
        // It is killed before it receives a response, and its name is used by another process.
        drop(own);
        let taken = stopped(addr(39), 2);
        assert!(first.poll_packet(Instant::now()).is_none());
        assert!(receive(&taken, &mut [0; 1]).is_none());
        let mut all = Vec::new();
        assert!(receive_with(&answers.from, &mut [0; 1], &mut all).is_some());
        assert_eq!(all.len(), usize::from(SLOTS) + 1);
    }

    /// Returns the socket for the response that is passed with the next join request.
    fn join_socket(mailbox: &OwnedFd) -> OwnedFd {
        eventually_some("a question", PATIENCE, || {
            let mut with = Vec::new();
            receive_with(mailbox, &mut [0; 1], &mut with)?;
            with.pop()
        })
    }

    #[test]
    fn slot_squatter_cannot_redirect_responses() {
        let squat = stopped(addr(40), 1);
        let first = open(addr(40), Silent(0b10)).unwrap();
        while receive(&squat, &mut [0; 1]).is_some() {}
        let [to, to_listener] = [&b"riser-test-sink-of-answers"[..], b"riser-test-listener"]
            .map(|name| SocketAddrUnix::new_abstract_name(name).unwrap());
        let sink = new_mailbox().unwrap();
        bind(&sink, &to).unwrap();
        let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&listener, &to_listener).unwrap();
        net::listen(&listener, 1).unwrap();
        let second = thread::scope(|scope| {
            let opens = scope.spawn(|| open(addr(40), Silent::default()));
            let answer = join_socket(&squat);
            assert!(connect(&answer, &to).is_err());
            assert_eq!(connect(&answer, &to_listener), Err(Os::ISCONN));
            shutdown(&answer, Shutdown::Both).unwrap();
            while !opens.is_finished() {
                assert!(first.poll_packet(Instant::now()).is_none());
                thread::yield_now();
            }
            opens.join().unwrap()
        });
        assert_eq!(second.unwrap().slot, 3);
        assert!(receive(&sink, &mut [0; 1]).is_none());
        // The slot is not queried anymore.
        assert!(receive(&squat, &mut [0; 1]).is_none());
    }

    #[test]
    fn slot_squatter_does_not_block_address() {
        let squat = stopped(addr(41), 1);
        let first = thread::scope(|scope| {
            let opens = scope.spawn(|| open(addr(41), Silent::default()));
            shutdown(join_socket(&squat), Shutdown::Both).unwrap();
            opens.join().unwrap()
        });
        assert_eq!(first.unwrap().slot, 2);
    }

    #[test]
    fn received_socket_does_not_linger() {
        let first = open(addr(42), Silent::default()).unwrap();
        let listener = TcpListener::bind((addr(43), 0)).unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _peer = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        sockopt::set_socket_linger(&socket, Some(PATIENCE * 10)).unwrap();
        // Use the last of the maximum number of descriptors.
        let mut with = vec![listener.as_fd(); MAX_DESCRIPTORS - 1];
        with.push(socket.as_fd());
        let to = name(addr(42), Some(1)).unwrap();
        send_with(&new_sender().unwrap(), Some(&to), Message::Probe, &with).unwrap();
        drop(socket);
        let polls = thread::spawn(move || first.poll_packet(Instant::now()));
        eventually("the mail is read", PATIENCE, || polls.is_finished());
    }

    #[test]
    fn process_with_older_library_is_reported() {
        let old = stopped(addr(44), 1);
        let _port = UdpSocket::bind((addr(44), ROCE_PORT)).unwrap();
        let error = thread::scope(|scope| {
            let opens = scope.spawn(|| open(addr(44), Silent::default()).map(drop));
            let mut question = || receive(&old, &mut [0; 1]);
            let question = eventually_some("a question", PATIENCE, &mut question);
            let Received::Message { from, .. } = question else {
                panic!("it is of this user");
            };
            reply(&old, from.as_ref(), Message::Welcome);
            opens.join().unwrap().unwrap_err()
        });
        assert!(error.to_string().contains("another version"), "{error}");
    }

    /// Creates a numbered packet for the process in a slot.
    fn numbered(slot: u8, number: usize) -> ForwardedPacket {
        ForwardedPacket {
            worker: slot.into(),
            ..front(35, number.to_be_bytes().to_vec())
        }
    }

    /// Returns the numbers of the packets that a process has received.
    fn numbers(share: &Share) -> Vec<usize> {
        let packets = iter::from_fn(|| share.poll_packet(Instant::now()));
        let numbers = packets.map(|p| usize::from_be_bytes(p.bytes.try_into().unwrap()));
        numbers.collect()
    }

    /// Returns the number of packets that are waiting for the process in a slot.
    fn waits_for(share: &Share, slot: u8) -> usize {
        let outboxes = share.outboxes();
        outboxes.get(&slot).map_or(0, |o| o.waiting.len())
    }

    #[test]
    fn unread_packets_leave_space_for_others() {
        let first = open(addr(38), Silent::default()).unwrap();
        let others: Vec<_> = (2..9).map(|_| open_beside(&first)).collect();
        let (last, stopped) = others.split_last().unwrap();
        let send = |share: &Share| {
            let mut packet = numbered(share.slot, 0);
            packet.bytes.resize(MESSAGE / 2, 0);
            assert_eq!(first.pass_on(Instant::now(), packet), None);
        };
        // In total, this is more than a socket can send.
        for share in stopped {
            while waits_for(&first, share.slot) == 0 {
                send(share);
            }
        }
        send(last);
        assert!(last.poll_packet(Instant::now()).is_some());
    }

    #[test]
    fn stopped_process_does_not_block_others() {
        let first = open(addr(34), Silent::default()).unwrap();
        let (second, third) = (open_beside(&first), open_beside(&first));
        let now = Instant::now();
        let waits_for = |slot| waits_for(&first, slot);
        let send = |slot, number| assert_eq!(first.pass_on(now, numbered(slot, number)), None);
        // Both mailboxes are full, and packets are waiting.
        let mut counts = [0; 2];
        for (slot, count) in [2, 3].into_iter().zip(&mut counts) {
            while waits_for(slot) < 2 {
                send(slot, *count);
                *count += 1;
            }
        }
        let take_all = |share: &Share, count| {
            let mut all = Vec::new();
            // It first receives the packets in its mailbox, and then the waiting ones.
            while all.len() < count {
                let some = numbers(share);
                assert!(!some.is_empty(), "{} of {count} came", all.len());
                all.extend(some);
                first.flush(now);
            }
            assert!(all.is_sorted());
            all
        };
        assert_eq!(numbers(&third).len(), counts[1] - 2);
        assert!(first.flush(now), "the other process is stopped");
        // A new packet is sent after the waiting packets.
        assert_eq!(take_all(&third, 2), [counts[1] - 2, counts[1] - 1]);
        assert_eq!((waits_for(2), waits_for(3)), (2, 0));

        // The process that is stopped can use all places that are not needed by other processes.
        while waits_for(2) < MAX_WAITING {
            send(2, counts[0]);
            counts[0] += 1;
        }
        send(2, usize::MAX);
        for number in 0..=counts[1] {
            send(3, number);
        }
        assert_eq!(waits_for(2) + waits_for(3), MAX_WAITING);
        assert_eq!(take_all(&third, counts[1] + 1).len(), counts[1] + 1);
        let kept = counts[0] - (MAX_WAITING - waits_for(2));
        assert_eq!(take_all(&second, kept), (0..kept).collect::<Vec<_>>());
        assert!(!first.flush(now));

        // Packets do not wait forever.
        while waits_for(2) == 0 {
            send(2, 0);
        }
        assert!(first.flush(now + LONGEST_WAIT - PAUSE));
        assert!(!first.flush(now + LONGEST_WAIT));
    }

    /// Creates the mailbox of a process in a slot that is stopped.
    fn stopped(addr: IpAddr, slot: u8) -> OwnedFd {
        let mailbox = new_mailbox().unwrap();
        bind(&mailbox, &name(addr, Some(slot)).unwrap()).unwrap();
        mailbox
    }

    #[test]
    fn stopped_processes_do_not_hide_responder() {
        const STOPPED: u8 = 8;
        let silent: Vec<_> = (1..=STOPPED).map(|slot| stopped(addr(25), slot)).collect();
        let known = Silent((2 << STOPPED) - 2);
        let first = open(addr(25), known).unwrap();
        assert_eq!(first.slot, STOPPED + 1);
        // The timeout of the last process has expired when all were queried.
        let questions = || receive(&silent[usize::from(STOPPED) - 1], &mut [0; 1]);
        assert!(iter::from_fn(questions).count() < 5);
        let start = Instant::now();
        let others = thread::scope(|scope| {
            let waits = scope.spawn(|| await_all(addr(25)));
            while !waits.is_finished() {
                assert!(first.poll_packet(Instant::now()).is_none());
                thread::yield_now();
            }
            waits.join().unwrap().unwrap()
        });
        assert_eq!(others, Silent::default());
        let second = open_beside(&first);
        assert_eq!(second.slot, STOPPED + 2);
        // If they were queried sequentially, all timeouts would expire twice.
        let limit = PATIENCE * STOPPED.into();
        assert!(
            start.elapsed() < limit,
            "the time of those that are stopped"
        );
        drop((first, second));
        assert_eq!(await_all(addr(25)).unwrap(), known);
        drop(silent);
        assert_eq!(await_all(addr(25)).unwrap(), Silent::default());
    }

    #[test]
    fn opener_is_not_confused_with_later_one() {
        let first = Opening::begin(addr(30)).unwrap();
        assert!(first.is_some() && Opening::begin(addr(30)).unwrap().is_none());
        let opener = Opener::of(addr(30)).unwrap().unwrap();
        // This is more than fits into its mailbox.
        assert!((0..1000).all(|_| opener.is_opening()));
        drop(first);
        let second = Opening::begin(addr(30)).unwrap();
        assert!(second.is_some() && !opener.is_opening());
        assert!(Opener::of(addr(30)).unwrap().unwrap().is_opening());
        drop(second);
        assert!(Opener::of(addr(30)).unwrap().is_none());
    }

    /// Waits for processes that open an address, using a simulated clock. Each process starts
    /// immediately after the previous one has finished, and takes one of these times.
    fn await_in_turn(addr: IpAddr, until: Duration, times: &[Duration]) -> io::Result<()> {
        let begin = || Opening::begin(addr).unwrap().unwrap();
        let start = Instant::now();
        let mut now = start;
        let mut times = times.iter();
        let mut ends = start + *times.next().unwrap();
        let mut opening = Some(begin());
        await_openers(addr, start + until, |pause| {
            now += pause;
            if opening.is_some() && now >= ends {
                opening = None;
                if let Some(time) = times.next() {
                    opening = Some(begin());
                    ends += *time;
                }
            }
            now
        })
    }

    #[test]
    fn openers_have_separate_timeouts() {
        let (short, long) = (PATIENCE * 3 / 4, PATIENCE + 2 * PAUSE);
        await_in_turn(addr(32), LONGEST, &[short, short]).unwrap();
        let error = await_in_turn(addr(32), LONGEST, &[short, long]).unwrap_err();
        assert!(error.to_string().contains("does not finish"), "{error}");
        // The total time is limited too.
        assert!(await_in_turn(addr(32), PATIENCE, &[short, short]).is_err());
    }

    #[test]
    fn connected_opener_reports_address_in_use() {
        let sink = new_mailbox().unwrap();
        let to = SocketAddrUnix::new_abstract_name(b"riser-test-sink-of-opener").unwrap();
        bind(&sink, &to).unwrap();
        let deaf = new_mailbox().unwrap();
        bind(&deaf, &name(addr(33), None).unwrap()).unwrap();
        connect(&deaf, &to).unwrap();
        let error = await_all(addr(33)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn child_forked_during_open_releases_address() {
        let first = open(addr(27), Silent::default()).unwrap();
        let mailbox = new_mailbox().unwrap();
        let mut inquiry = Inquiry::new(&mailbox, addr(27), Message::Ask, Silent::default());
        let asks = thread::scope(|scope| {
            let asks = scope.spawn(move || {
                let asked = [inquiry.poll(), inquiry.poll()].map(Result::unwrap);
                asked
                    .iter()
                    .all(|asked| matches!(asked, InquiryResult::Mail))
            });
            while !asks.is_finished() {
                assert!(first.poll_packet(Instant::now()).is_none());
                thread::yield_now();
            }
            asks.join().unwrap()
        });
        assert!(asks);
        first.poll_packet(Instant::now());
        // This is a copy that includes pending responses, like after a fork.
        let of_child = mailbox.try_clone().unwrap();
        drop((mailbox, first));
        let again = open(addr(27), Silent::default()).map(drop);
        again.expect("no process has the address");
        assert!(matches!(
            receive(&of_child, &mut [0; 1]),
            Some(Received::Message { kind, .. }) if kind == Message::Here as u8
        ));
    }

    #[test]
    fn connected_mailbox_is_skipped() {
        let sink = new_mailbox().unwrap();
        let to = SocketAddrUnix::new_abstract_name(b"riser-test-sink").unwrap();
        bind(&sink, &to).unwrap();
        let deaf = stopped(addr(31), 1);
        connect(&deaf, &to).unwrap();
        let silent = await_all(addr(31)).unwrap();
        assert_eq!(silent, Silent(0b10));
        assert_eq!(open(addr(31), silent).unwrap().slot, 2);
    }

    #[test]
    fn foreign_response_does_not_hide_stopped_process() {
        if !rustix::process::geteuid().is_root() {
            return skip("an answer of another user", "only root can be another user");
        }
        let (others, _stopped) = (stopped(addr(28), 1), stopped(addr(28), 2));
        let is_over = AtomicBool::new(false);
        let silent = thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: this only changes the IDs of this thread, which exits afterwards.
                unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
                while !is_over.load(Ordering::Relaxed) {
                    let question = receive(&others, &mut [0; 1]);
                    if let Some(Received::OfAnotherUser(from)) = question {
                        reply(&others, from.as_ref(), Message::Here);
                    }
                    thread::sleep(PAUSE);
                }
            });
            let silent = await_all(addr(28));
            is_over.store(true, Ordering::Relaxed);
            silent
        });
        // It isn't waited for again either.
        assert_eq!(silent.unwrap(), Silent(0b110));
    }

    /// Creates a socket with a message whose only descriptor takes an hour to close, or until the
    /// returned peer is closed. Closing the socket itself would also block, and this can't be
    /// prevented.
    fn slow_to_close() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (never_reads, _) = listener.accept().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.write(&[0; 65536]).is_ok() {}
        sockopt::set_socket_linger(&full, Some(Duration::from_secs(3600))).unwrap();
        let (slow, other) = socketpair(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        send_with(&other, None, Message::Probe, &[full.as_fd()]).unwrap();
        (slow, never_reads)
    }

    #[test]
    fn slow_foreign_descriptors_do_not_delay_mail() {
        if !rustix::process::geteuid().is_root() {
            return skip("a message of another user", "only root can be another user");
        }
        let first = open(addr(59), Silent::default()).unwrap();
        let to = name(addr(59), Some(1)).unwrap();
        let never_reads = thread::scope(|scope| {
            let sent = scope.spawn(|| {
                // SAFETY: this only changes the IDs of this thread, which exits afterwards.
                unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
                let (slow, never_reads) = slow_to_close();
                let sender = new_sender().unwrap();
                assert!(is_there(&sender, &to, Message::Join, &[slow.as_fd()]).unwrap());
                never_reads
            });
            sent.join().unwrap()
        });
        let is_read = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let begun = Instant::now();
                while !is_read.load(Ordering::Relaxed) && begun.elapsed() < PATIENCE {
                    thread::sleep(PAUSE);
                }
                // If the process is blocked, this eventually unblocks it, so that the test fails.
                let was_read = is_read.load(Ordering::Relaxed);
                drop(never_reads);
                assert!(was_read, "the mailbox waits for a stranger's descriptor");
            });
            assert!(first.poll_packet(Instant::now()).is_none());
            let own = stopped(addr(59), 2);
            let answers = ResponsePair::new().unwrap();
            assert!(is_there(&own, &to, Message::Join, &[answers.to.as_fd()]).unwrap());
            assert!(first.poll_packet(Instant::now()).is_none());
            assert!(receive(&answers.from, &mut [0; 1]).is_some());
            is_read.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn unfinished_opener_times_out() {
        let opening = Opening::begin(addr(26)).unwrap().unwrap();
        let error = await_all(addr(26)).unwrap_err();
        assert!(error.to_string().contains("does not finish"), "{error}");
        drop(opening);
        assert_eq!(await_all(addr(26)).unwrap(), Silent::default());
    }

    #[test]
    fn foreign_address_is_in_use() {
        let _other = UdpSocket::bind((addr(5), ROCE_PORT)).unwrap();
        let error = open(addr(5), Silent::default()).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
