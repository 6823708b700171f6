//! The main loop of a broker.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use riser_transport::nic::IpFields;
use riser_transport::roce::ForwardedPacket;
use riser_transport::wire::{CommId, Mad, ROCE_PORT, gsi_datagram};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno as Os;
use rustix::net::{RecvFlags, SendFlags, recvfrom, sendto, sockopt};

use super::SLOTS;
use super::message::{MESSAGE, Message, PortAction, Received, VERSION, receive, send};
use super::place::{Place, accept};
use super::ports::Port;
use super::router::Router;
use crate::errno::Errno;

/// Maximum number of consecutive messages of a process, and of consecutive packets, so that a flood
/// of them does not delay other messages.
const IN_A_ROW: usize = 64;

/// Maximum number of packets for an exited process that are discarded.
const MAX_STALE: usize = 1 << 15;

/// Delay before the broker will retry to exit, or to accept a connection.
const PAUSE: Duration = Duration::from_millis(10);

/// Serves the processes of an address, until the last one has exited. `first` is the connection of
/// the process that has started the broker.
pub(super) fn serve(first: OwnedFd) {
    let mut descriptors = Vec::new();
    let wait = &mut [PollFd::new(&first, PollFlags::IN)];
    while poll(wait, None).is_err() {}
    let message = receive(&first, &mut [0; MESSAGE], &mut descriptors);
    let Received::Message(Message::Start {
        version,
        addr,
        listener: path,
    }) = message
    else {
        return;
    };
    // These precede the sockets of the slots.
    if version != VERSION || descriptors.len() != usize::from(SLOTS) + 3 {
        return;
    }
    let group = descriptors.split_off(3);
    let Ok([dir, listener, lock]) = <[OwnedFd; 3]>::try_from(descriptors) else {
        return;
    };
    let mut broker = Broker {
        addr: SocketAddr::new(addr, ROCE_PORT),
        group,
        listener,
        place: Place::at(dir, path),
        router: Router::new(),
        processes: BTreeMap::new(),
        buffer: Box::new([0; MESSAGE]),
        lock: None,
    };
    drop(lock);
    broker.add(first);
    broker.run();
}

/// A broker.
struct Broker {
    addr: SocketAddr,
    /// Sockets of all slots. The kernel numbers the sockets that share a port, so we ensure that
    /// all of them stay open.
    group: Vec<OwnedFd>,
    /// Accepts connections of processes.
    listener: OwnedFd,
    place: Place,
    router: Router,
    /// Processes by slot.
    processes: BTreeMap<u8, Process>,
    buffer: Box<[u8; MESSAGE]>,
    /// Lock that is held while the broker exits. It is released after the sockets, because the next
    /// broker needs their port.
    lock: Option<OwnedFd>,
}

/// A process of the address.
struct Process {
    connection: OwnedFd,
    /// Response that waits until the process has read its packets. It won't send another request
    /// until it has received the response.
    reply: Option<Message>,
    /// Established connections with the messages that close them.
    connections: HashMap<CommId, (IpAddr, Mad)>,
}

impl Process {
    fn note_connection(&mut self, id: CommId, dreq: Option<(IpAddr, Mad)>) {
        match dreq {
            Some(dreq) => drop(self.connections.insert(id, dreq)),
            None => drop(self.connections.remove(&id)),
        }
    }
}

impl Broker {
    fn run(mut self) {
        while !self.processes.is_empty() || !self.close() {
            self.wait();
            self.accept_processes();
            let now = Instant::now();
            // Process requests for ports before packets, which might be for a new listener.
            for slot in self.processes.keys().copied().collect::<Vec<_>>() {
                self.handle_messages(now, slot);
            }
            self.handle_packets(now);
            while let Some((slot, packet)) = self.router.poll_early(now) {
                self.deliver(slot, packet);
            }
        }
    }

    /// Removes the socket for new processes. Returns false if there is or might be a new process.
    fn close(&mut self) -> bool {
        match self.place.try_lock() {
            Ok(None) => return false,
            Ok(lock) => self.lock = lock,
            // The directory was removed, so no process can find the broker.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return false,
        }
        // A process might have connected before we acquired the lock.
        self.accept_processes();
        if self.processes.is_empty() {
            self.place.remove();
            return true;
        }
        self.lock = None;
        false
    }

    /// Waits until there is something to do.
    fn wait(&self) {
        let inputs = [&self.listener, &self.group[0]].map(|fd| PollFd::new(fd, PollFlags::IN));
        let processes = self.processes.values().map(|process| {
            let event = match process.reply {
                Some(_) => PollFlags::OUT,
                None => PollFlags::IN,
            };
            PollFd::new(&process.connection, event)
        });
        let mut inputs: Vec<_> = inputs.into_iter().chain(processes).collect();
        let timeout = match self.processes.is_empty() {
            true => Some(PAUSE),
            false => self
                .router
                .deadline()
                .map(|at| at.saturating_duration_since(Instant::now())),
        };
        let timeout = timeout.and_then(|timeout| timeout.try_into().ok());
        // If this is interrupted by a signal, nothing is ready.
        let _ = poll(&mut inputs, timeout.as_ref());
    }

    fn accept_processes(&mut self) {
        loop {
            match accept(&self.listener) {
                Ok(Some(connection)) => self.add(connection),
                Ok(None) => return,
                // There are too many open files in the system.
                Err(_) => return thread::sleep(PAUSE),
            }
        }
    }

    /// Assigns a free slot to a process.
    fn add(&mut self, connection: OwnedFd) {
        let slot = self.free_slot().or_else(|| {
            let exited: Vec<_> = (1..SLOTS).filter(|slot| self.has_exited(*slot)).collect();
            exited.into_iter().for_each(|slot| self.remove(slot));
            self.free_slot()
        });
        let Some(slot) = slot else {
            let _ = send(&connection, &Message::Full, &[]);
            return;
        };
        let version = VERSION;
        let socket = self.group[usize::from(slot)].as_fd();
        if send(&connection, &Message::Welcome { version, slot }, &[socket]).is_ok() {
            let process = Process {
                connection,
                reply: None,
                connections: HashMap::new(),
            };
            self.processes.insert(slot, process);
            self.router.add(slot);
        }
    }

    fn free_slot(&self) -> Option<u8> {
        (1..SLOTS).find(|slot| !self.processes.contains_key(slot))
    }

    /// Removes a process that has exited, and closes its connections.
    fn remove(&mut self, slot: u8) {
        self.router.remove(slot);
        let Some(mut process) = self.processes.remove(&slot) else {
            return;
        };
        // It may have closed connections since.
        while let Received::Message(message) =
            receive(&process.connection, &mut self.buffer, &mut Vec::new())
        {
            if let Message::Connection { id, dreq } = message {
                process.note_connection(id, dreq);
            }
        }
        let socket = &self.group[usize::from(slot)];
        for (peer, dreq) in process.connections.into_values() {
            let peer = SocketAddr::new(peer, ROCE_PORT);
            // If it is lost, the remote peer notices this when it sends data.
            if let Some(datagram) = gsi_datagram(self.addr, peer, &dreq) {
                let _ = sendto(socket, &datagram, SendFlags::DONTWAIT, &peer);
            }
        }
        // Packets in flight should neither use any memory, nor be received by the next process in
        // this slot.
        let _ = sockopt::set_socket_recv_buffer_size(socket, 1);
        let discard = || recvfrom(socket, &mut [0; 0], RecvFlags::DONTWAIT);
        (0..MAX_STALE).all(|_| discard().is_ok());
    }

    fn handle_messages(&mut self, now: Instant, slot: u8) {
        for _ in 0..IN_A_ROW {
            let Some(process) = self.processes.get_mut(&slot) else {
                return;
            };
            if let Some(reply) = &process.reply
                && send(&process.connection, reply, &[]) == Err(Os::AGAIN)
            {
                return;
            }
            process.reply = None;
            match receive(&process.connection, &mut self.buffer, &mut Vec::new()) {
                Received::Message(Message::Request { id, action, port }) => {
                    let (errno, port) = match self.handle_request(slot, action, port) {
                        Ok(port) => (0, port),
                        Err(error) => (Errno::from(error).0, 0),
                    };
                    if let Some(process) = self.processes.get_mut(&slot) {
                        process.reply = Some(Message::Reply { id, errno, port });
                    }
                }
                Received::Message(Message::Packet(packet)) => {
                    if let Some(slot) = self.router.route(now, &packet) {
                        self.deliver(slot, packet);
                    }
                }
                Received::Message(Message::Connection { id, dreq }) => {
                    process.note_connection(id, dreq);
                }
                Received::Message(_) => {}
                Received::Nothing => return,
                Received::Closed => return self.remove(slot),
            }
        }
    }

    /// Executes a request of a process for a port. Returns the port.
    fn handle_request(&mut self, slot: u8, action: PortAction, port: Port) -> io::Result<u16> {
        let ports = &mut self.router.ports;
        match action {
            PortAction::Allocate => {
                if let Some(owner) = ports.owner(port)
                    && self.has_exited(owner)
                {
                    self.remove(owner);
                }
                return self.router.ports.allocate(slot, port);
            }
            PortAction::Listen => ports.set_listening(slot, port, true),
            PortAction::StopListening => ports.set_listening(slot, port, false),
            PortAction::Release => ports.release(slot, port),
        }
        Ok(port.1)
    }

    /// Returns whether a process has closed its connection. It might still have unread messages.
    fn has_exited(&self, slot: u8) -> bool {
        let Some(process) = self.processes.get(&slot) else {
            return true;
        };
        let mut state = [PollFd::new(&process.connection, PollFlags::empty())];
        let ready = poll(&mut state, Some(&Timespec::default()));
        ready.is_ok() && state[0].revents().contains(PollFlags::HUP)
    }

    /// Handles incoming packets of the broker's socket.
    fn handle_packets(&mut self, now: Instant) {
        for _ in 0..IN_A_ROW {
            let flags = RecvFlags::DONTWAIT;
            let received = recvfrom(&self.group[0], &mut self.buffer[..], flags);
            let Ok((len, _, src)) = received else {
                return;
            };
            let Some(src) = src.and_then(|src| SocketAddr::try_from(src).ok()) else {
                continue;
            };
            let packet = ForwardedPacket {
                worker: 0,
                src,
                ip: IpFields::default(),
                bytes: self.buffer[..len].to_vec(),
            };
            if let Some(slot) = self.router.route(now, &packet) {
                self.deliver(slot, packet);
            }
        }
    }

    /// Sends a packet to a process. If it is stopped, the packet is dropped, as with a full socket.
    fn deliver(&self, slot: u8, packet: ForwardedPacket) {
        if let Some(process) = self.processes.get(&slot) {
            let _ = send(&process.connection, &Message::Packet(packet), &[]);
        }
    }
}
