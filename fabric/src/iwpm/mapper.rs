//! The port mapper without I/O: what the kernel, peers and this program's user ask, and the answers.
//!
//! A query goes through these states, those of `iwpmd`:
//!
//! ```text
//!            request sent            accept: ack sent, kernel answered
//!  (none) ─────────────────▶ Asked ───────────────────────────────────▶ Answered ──▶ (none)
//!                             │  ▲                                        │  ▲   after a while
//!                             └──┘ request sent again                     └──┘ accept: ack sent
//!                             │                                                again
//!                             └──▶ (none): reject, or no answer to the last request
//! ```
//!
//! A peer's request is answered each time that it comes, and never without one: the peer repeats
//! it until it has an answer, and a request from a forged address causes no more datagrams, and no
//! longer ones, than it had itself. What is remembered of it, the *association*, only keeps the kernel
//! from being notified again. Where there are too many associations, a request is answered all the
//! same, and the kernel is not notified: it then knows the connection by the mapped address of its
//! peer. This also limits how fast peers can make the kernel remember addresses, which it does
//! until they connect.
//!
//! An association handle is a random number, so that only a host that has seen the request can
//! answer it. A mapping exchanges the port and never the IP address: a peer whose accept names
//! another host, by which it would choose whom the program connects to, is not believed. Nor is one
//! whose request does, by which its connection would seem to come from another host: it is
//! answered, and the kernel is not notified.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::mappings::{Conflict, Mapping, Mappings};
use super::message::{Connection, Request, Response, operation};
use super::wire::{MessageType, WireMessage};
use super::{ABI, ABI_MIN, ErrorCode, LIBRARY, NO_PORT_MAP, PORT, is_same};
use crate::netlink::message::{Header, Message, Messages};

/// Time after which a request is sent again.
pub const QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Number of times that a request is sent. The kernel waits for ten seconds; it is answered after
/// half of them, since most hosts that do not answer have no port mapper, and connects without.
pub const QUERY_TRIES: u32 = 5;

/// Time in which an accept that comes again is acknowledged again, as in `iwpmd`.
pub const ANSWERED_LIFETIME: Duration = Duration::from_secs(10);

/// Time in which a request is known to have come before. `iwpmd` repeats one for ten seconds.
pub const ASSOCIATION_LIFETIME: Duration = Duration::from_secs(15);

/// Largest number of queries that wait for an answer; as many more are remembered that have one.
pub const MAX_QUERIES: usize = 1024;

/// Largest number of associations.
pub const MAX_ASSOCIATIONS: usize = 4096;

/// Largest number of associations of one IP address.
pub const MAX_PEER_ASSOCIATIONS: usize = 256;

/// Largest number of clients that register, as many as netlink has numbers for.
const MAX_CLIENTS: u8 = 64;

/// Client of the kernel's connection manager (`RDMA_NL_IWCM`).
const IWCM: u8 = 2;

/// Client of a driver of older kernels (`RDMA_NL_C4IW`).
const C4IW: u8 = 3;

/// What the machine needs of its host.
pub trait Host {
    /// Keeps a port reserved until it is dropped.
    type Reservation;

    /// Reserves a TCP port at all addresses of the IP version of `ip`: this one, or any.
    ///
    /// # Errors
    /// Where the port is in use, or none is free.
    fn reserve(&mut self, ip: IpAddr, port: Option<u16>) -> io::Result<(u16, Self::Reservation)>;

    /// A random number.
    fn random(&mut self) -> u64;
}

/// Something that the driver has to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a datagram to a port mapper.
    Wire {
        /// Its address.
        to: SocketAddr,
        /// The datagram.
        datagram: Vec<u8>,
        /// It answers a request, whose address may be forged.
        is_answer: bool,
    },
    /// Send a netlink message to the kernel.
    Netlink(Vec<u8>),
    /// Give the answer to a query of the program's own.
    Answer(Answer),
}

/// Answer to [`Mapper::query`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The address that was asked for.
    pub remote: SocketAddr,
    /// The address it is mapped to.
    pub mapped: Result<SocketAddr, Refusal>,
}

/// Reason why there is no mapping of a remote address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The other host has none.
    #[error("the other host has no mapping of the address")]
    Rejected,
    /// The other host does not answer.
    #[error("the other host does not answer")]
    Silent,
}

/// The asker of a query.
#[derive(Clone, Copy, Debug)]
enum Asker {
    Kernel { client: u8, sequence: u32 },
    Program,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueryState {
    /// The request was sent this number of times.
    Asked(u32),
    /// The peer has accepted.
    Answered,
}

#[derive(Debug)]
struct Query {
    asker: Asker,
    state: QueryState,
    local: SocketAddr,
    mapped_local: SocketAddr,
    remote: SocketAddr,
    /// Its entry among the timers.
    due: Instant,
}

/// What something waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Query(u64),
    Association(SocketAddr, u64),
}

/// The port mapper of a host. See the module for its states.
#[derive(Debug)]
pub struct Mapper<H: Host> {
    host: H,
    /// Port of the netlink socket; none without one.
    netlink_port: Option<u32>,
    abi: u16,
    /// Sequence number of the next netlink message.
    sequence: u32,
    /// Clients that have registered, and the number of mappings that each has sent.
    clients: BTreeMap<u8, u32>,
    mappings: Mappings<H::Reservation>,
    /// By their handle.
    queries: HashMap<u64, Query>,
    /// Number of those that wait for an answer.
    asked: usize,
    /// Requests of peers, by the address that they came from and their handle.
    associations: BTreeSet<(SocketAddr, u64)>,
    /// Number of associations of each peer.
    of_peer: HashMap<IpAddr, usize>,
    timers: BTreeSet<(Instant, Timer)>,
    outputs: VecDeque<Output>,
}

impl<H: Host> Mapper<H> {
    /// A port mapper. With the port of a netlink socket it begins to speak to the kernel.
    pub fn new(host: H, netlink_port: Option<u32>) -> Self {
        let mut mapper = Self {
            host,
            netlink_port,
            abi: ABI,
            sequence: 0,
            clients: BTreeMap::new(),
            mappings: Mappings::new(),
            queries: HashMap::new(),
            asked: 0,
            associations: BTreeSet::new(),
            of_peer: HashMap::new(),
            timers: BTreeSet::new(),
            outputs: VecDeque::new(),
        };
        mapper.respond(IWCM, &Response::Hello { abi: ABI });
        mapper
    }

    /// Version of the netlink messages that is in use.
    #[must_use]
    pub fn abi(&self) -> u16 {
        self.abi
    }

    /// The mappings, in no order.
    pub fn mappings(&self) -> impl Iterator<Item = &Mapping<H::Reservation>> {
        self.mappings.iter()
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Time at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some((_, timer)) = self.timers.pop_first_if_due(now) {
            match timer {
                Timer::Query(handle) => self.on_query_due(now, handle),
                Timer::Association(peer, handle) => self.forget(peer, handle),
            }
        }
    }

    /// Adds a mapping of the program's own, of a local address to a port that its listener has
    /// taken, or to one that is reserved. Answers the address it is mapped to.
    ///
    /// # Errors
    /// [`ErrorCode::DuplicateMapping`], [`ErrorCode::CreateMapping`].
    pub fn add(&mut self, local: SocketAddr, port: Option<u16>) -> Result<SocketAddr, ErrorCode> {
        if self.mappings.conflict(local).is_some() {
            return Err(ErrorCode::DuplicateMapping);
        }
        match port {
            Some(port) => self.insert(None, local, SocketAddr::new(local.ip(), port), None),
            None => self.create(None, local, 0),
        }
    }

    /// Asks the port mapper of a remote address what that is mapped to, for a connection from
    /// `local`. [`Output::Answer`] has the answer.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidMessage`] where the addresses are not of one IP version or one is not
    /// specified, [`ErrorCode::CreateMapping`] where too many queries wait.
    pub fn query(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), ErrorCode> {
        check_pair(local, remote)?;
        self.ask(now, Asker::Program, (local, local), remote)
    }

    /// Takes a datagram of the kernel.
    pub fn handle_netlink(&mut self, now: Instant, datagram: &[u8]) {
        for message in Messages::new(datagram) {
            match message {
                Ok(Message::Client { header, payload }) => {
                    self.on_message(now, header, payload);
                }
                Ok(Message::Error { errno, request }) => self.on_error(errno, request),
                Ok(Message::Done | Message::Control) => {}
                Err(error) => tracing::warn!("from the kernel: {error}"),
            }
        }
    }

    fn on_message(&mut self, now: Instant, header: Header, payload: &[u8]) {
        let client = header.kind.client;
        let request = Request::read(header.kind.operation, payload);
        let done = match request {
            Ok(request) => self.on_request(now, client, header.sequence, request),
            Err(_invalid) => Err(ErrorCode::InvalidMessage),
        };
        if let Err(code) = done {
            let operation = header.kind.operation;
            tracing::info!(
                client,
                operation,
                "a request of the kernel is refused: {code}"
            );
            let response = Response::HandleErr {
                sequence: header.sequence,
                code: code.number(),
            };
            self.respond(client, &response);
        }
    }

    /// The kernel reports errors of our messages. One for the first message means that it does not
    /// know the operation, as before version 4.
    fn on_error(&mut self, errno: i32, request: Header) {
        if errno == 0 {
            return;
        }
        let kind = request.kind;
        if kind.client == IWCM && kind.operation == operation::HELLO {
            tracing::info!(errno, "the kernel knows version 3 of the messages at most");
            self.on_abi(ABI_MIN);
        } else if kind.client == IWCM && kind.operation == operation::MAPINFO {
            // Nor does it know that one: its connection manager is not loaded, and may be later.
            tracing::info!(errno, "the kernel has no iWARP so far");
            self.abi = ABI;
        } else {
            tracing::debug!(errno, ?kind, "the kernel refuses a message");
        }
    }

    fn on_abi(&mut self, abi: u16) {
        self.abi = abi;
        // Before version 4, drivers were clients of their own.
        let clients = [Some(IWCM), (abi == ABI_MIN).then_some(C4IW)];
        for client in clients.into_iter().flatten() {
            let response = Response::MapInfo {
                library: LIBRARY.to_owned(),
                version: abi,
            };
            self.respond(client, &response);
        }
    }

    fn on_request(
        &mut self,
        now: Instant,
        client: u8,
        sequence: u32,
        request: Request,
    ) -> Result<(), ErrorCode> {
        match request {
            Request::RegPid {
                device, library, ..
            } => self.on_reg_pid(client, sequence, device, &library),
            Request::AddMapping { local, flags, .. } => {
                self.check_client(client)?;
                let mapped = self.on_add_mapping(client, local, flags.unwrap_or(0))?;
                let response = Response::AddMapping {
                    sequence,
                    local,
                    mapped,
                    error: 0,
                };
                self.respond(client, &response);
                Ok(())
            }
            Request::QueryMapping {
                local,
                remote,
                flags,
                ..
            } => {
                self.check_client(client)?;
                let asker = Asker::Kernel { client, sequence };
                self.on_query_mapping(now, asker, client, local, remote, flags.unwrap_or(0))
            }
            Request::RemoveMapping { local, .. } => {
                // The kernel also removes what it has failed to add.
                if !self.mappings.release(Some(client), local) {
                    tracing::debug!(client, %local, "no mapping to remove");
                }
                Ok(())
            }
            Request::MapInfo {
                local,
                mapped,
                flags,
            } => self.on_mapinfo(client, local, mapped, flags.unwrap_or(0)),
            Request::MapInfoNum { sent, .. } => {
                let acknowledged = self.clients.get_mut(&client).map_or(0, std::mem::take);
                let response = Response::MapInfoNum {
                    sequence,
                    sent,
                    acknowledged,
                };
                self.respond(client, &response);
                Ok(())
            }
            Request::Hello { abi } if (ABI_MIN..=ABI).contains(&abi) => {
                self.on_abi(abi);
                Ok(())
            }
            Request::Hello { .. } => Err(ErrorCode::VersionMismatch),
        }
    }

    fn on_reg_pid(
        &mut self,
        client: u8,
        sequence: u32,
        device: String,
        library: &str,
    ) -> Result<(), ErrorCode> {
        if library != LIBRARY {
            return Err(ErrorCode::UserLibraryInfo);
        }
        tracing::info!(client, device, "a client of the kernel has registered");
        self.register(client);
        let response = Response::RegPid {
            sequence,
            device,
            library: LIBRARY.to_owned(),
            version: self.abi,
            error: 0,
        };
        self.respond(client, &response);
        Ok(())
    }

    fn register(&mut self, client: u8) -> &mut u32 {
        debug_assert!(client < MAX_CLIENTS, "a header has bits for as many");
        self.clients.entry(client).or_insert(0)
    }

    fn check_client(&self, client: u8) -> Result<(), ErrorCode> {
        let is_registered = self.clients.contains_key(&client);
        is_registered
            .then_some(())
            .ok_or(ErrorCode::ClientDeviceInfo)
    }

    fn on_add_mapping(
        &mut self,
        client: u8,
        local: SocketAddr,
        flags: u32,
    ) -> Result<SocketAddr, ErrorCode> {
        match self.mappings.conflict(local) {
            None => self.create(Some(client), local, flags),
            // A program that listens at all addresses has a listener on each device.
            Some(Conflict::Same) if local.ip().is_unspecified() => {
                self.share(client, local).ok_or(ErrorCode::DuplicateMapping)
            }
            Some(_) => Err(ErrorCode::DuplicateMapping),
        }
    }

    /// Another user of a mapping that the client has.
    fn share(&mut self, client: u8, local: SocketAddr) -> Option<SocketAddr> {
        let mapping = self.mappings.get_mut(local)?;
        if mapping.owner != Some(client) {
            return None;
        }
        mapping.users = mapping.users.checked_add(1)?;
        Some(mapping.mapped)
    }

    /// A new mapping of an address that is in the way of no other.
    fn create(
        &mut self,
        owner: Option<u8>,
        local: SocketAddr,
        flags: u32,
    ) -> Result<SocketAddr, ErrorCode> {
        if flags & NO_PORT_MAP != 0 {
            return self.insert(owner, local, local, None);
        }
        let (port, reservation) = self.reserve(local.ip(), None)?;
        let mut mapped = local;
        mapped.set_port(port);
        self.insert(owner, local, mapped, Some(reservation))
    }

    fn reserve(
        &mut self,
        ip: IpAddr,
        port: Option<u16>,
    ) -> Result<(u16, H::Reservation), ErrorCode> {
        self.host.reserve(ip, port).map_err(|error| {
            tracing::warn!(%ip, port, "no TCP port is reserved: {error}");
            ErrorCode::CreateMapping
        })
    }

    fn insert(
        &mut self,
        owner: Option<u8>,
        local: SocketAddr,
        mapped: SocketAddr,
        reservation: Option<H::Reservation>,
    ) -> Result<SocketAddr, ErrorCode> {
        if self.mappings.is_full() {
            return Err(ErrorCode::CreateMapping);
        }
        tracing::debug!(%local, %mapped, "new mapping");
        self.mappings.insert(Mapping {
            local,
            mapped,
            owner,
            users: 1,
            _reservation: reservation,
        });
        Ok(mapped)
    }

    fn on_query_mapping(
        &mut self,
        now: Instant,
        asker: Asker,
        client: u8,
        local: SocketAddr,
        remote: SocketAddr,
        flags: u32,
    ) -> Result<(), ErrorCode> {
        check_pair(local, remote)?;
        if self.asked >= MAX_QUERIES {
            return Err(ErrorCode::CreateMapping);
        }
        // Connections may share an address, with each other or with a listener.
        let mapped_local = match self.mappings.conflict(local) {
            None => self.create(Some(client), local, flags)?,
            Some(Conflict::Same) => self
                .share(client, local)
                .ok_or(ErrorCode::DuplicateMapping)?,
            Some(Conflict::Overlap) => return Err(ErrorCode::DuplicateMapping),
        };
        self.ask(now, asker, (local, mapped_local), remote)
    }

    /// Begins a query: sends the first request.
    fn ask(
        &mut self,
        now: Instant,
        asker: Asker,
        (local, mapped_local): (SocketAddr, SocketAddr),
        remote: SocketAddr,
    ) -> Result<(), ErrorCode> {
        if self.asked >= MAX_QUERIES {
            return Err(ErrorCode::CreateMapping);
        }
        let handle = self.host.random();
        if self.queries.contains_key(&handle) {
            // It takes longer than the host runs until that happens by chance.
            return Err(ErrorCode::CreateMapping);
        }
        let query = Query {
            asker,
            state: QueryState::Asked(0),
            local,
            mapped_local,
            remote,
            due: now,
        };
        self.queries.insert(handle, query);
        self.asked += 1;
        self.on_query_due(now, handle);
        Ok(())
    }

    /// Sends a request, again if it was sent before, or ends the query.
    fn on_query_due(&mut self, now: Instant, handle: u64) {
        let Some(query) = self.queries.get_mut(&handle) else {
            return;
        };
        match query.state {
            QueryState::Asked(tries) if tries < QUERY_TRIES => {
                query.state = QueryState::Asked(tries + 1);
                query.due = now + QUERY_INTERVAL;
                self.timers.insert((query.due, Timer::Query(handle)));
                let message = WireMessage {
                    message_type: MessageType::Request {
                        mapped_cp: query.mapped_local,
                    },
                    assoc_handle: handle,
                    cp: query.local,
                    ap: query.remote,
                };
                let mut to = query.remote;
                to.set_port(PORT);
                self.send(to, message);
            }
            QueryState::Asked(_) => self.end_query(handle, Refusal::Silent),
            QueryState::Answered => {
                self.queries.remove(&handle);
            }
        }
    }

    /// Ends a query without a mapping.
    fn end_query(&mut self, handle: u64, refusal: Refusal) {
        let Some(query) = self.queries.remove(&handle) else {
            return;
        };
        self.timers.remove(&(query.due, Timer::Query(handle)));
        self.asked -= 1;
        let (client, sequence) = match query.asker {
            Asker::Kernel { client, sequence } => (client, sequence),
            Asker::Program => return self.answer(query.remote, Err(refusal)),
        };
        let response = match refusal {
            // The address stands for its own mapping, as in `iwpmd`.
            Refusal::Rejected => Response::QueryMapping {
                sequence,
                connection: connection(&query, query.remote),
                error: ErrorCode::RemoteQueryReject.number(),
            },
            Refusal::Silent => Response::HandleErr {
                sequence,
                code: ErrorCode::UnknownMapping.number(),
            },
        };
        self.respond(client, &response);
    }

    fn on_mapinfo(
        &mut self,
        client: u8,
        local: SocketAddr,
        mapped: SocketAddr,
        flags: u32,
    ) -> Result<(), ErrorCode> {
        if local.ip() != mapped.ip() {
            return Err(ErrorCode::InvalidMessage);
        }
        match self.mappings.conflict(local) {
            None => {
                let reservation = match flags & NO_PORT_MAP {
                    0 => Some(self.reserve(local.ip(), Some(mapped.port()))?.1),
                    _ => None,
                };
                self.insert(Some(client), local, mapped, reservation)?;
            }
            // The kernel sends one for each user. It may also have used us meanwhile.
            Some(Conflict::Same) => {
                let known = self.share(client, local);
                if !known.is_some_and(|known| is_same(known, mapped)) {
                    return Err(ErrorCode::DuplicateMapping);
                }
            }
            Some(Conflict::Overlap) => return Err(ErrorCode::DuplicateMapping),
        }
        *self.register(client) += 1;
        Ok(())
    }

    /// Takes a datagram that came from `from`.
    pub fn handle_wire(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        let message = match WireMessage::read(datagram) {
            Ok(message) => message,
            Err(error) => {
                tracing::debug!(%from, "{error}");
                return;
            }
        };
        match message.message_type {
            MessageType::Request { mapped_cp } => {
                self.on_wire_request(now, from, message, mapped_cp);
            }
            MessageType::Accept => self.on_accept(now, from, message),
            MessageType::Reject => self.on_reject(message),
            // Nothing is sent again for want of one.
            MessageType::Ack => {}
        }
    }

    fn on_wire_request(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: WireMessage,
        mapped_cp: SocketAddr,
    ) {
        let Some(mapping) = self.mappings.serving(message.ap) else {
            let message_type = MessageType::Reject;
            return self.send(
                from,
                WireMessage {
                    message_type,
                    ..message
                },
            );
        };
        let accept = WireMessage {
            message_type: MessageType::Accept,
            ap: mapping.mapped_of(message.ap),
            ..message
        };
        let notice = mapping.owner.map(|owner| {
            let connection = Connection {
                local: mapping.local,
                remote: message.cp,
                mapped_local: mapping.mapped,
                mapped_remote: mapped_cp,
            };
            (owner, Response::RemoteInfo { connection })
        });
        self.send(from, accept);
        if let Some((owner, response)) = notice
            && mapped_cp.ip() == message.cp.ip()
            && self.associate(now, from, message.assoc_handle)
        {
            self.respond(owner, &response);
        }
    }

    /// Remembers a request; false if it has come before, or too many are remembered.
    fn associate(&mut self, now: Instant, peer: SocketAddr, handle: u64) -> bool {
        if self.associations.contains(&(peer, handle))
            || self.associations.len() >= MAX_ASSOCIATIONS
        {
            return false;
        }
        let of_peer = self.of_peer.entry(peer.ip()).or_default();
        if *of_peer >= MAX_PEER_ASSOCIATIONS {
            return false;
        }
        *of_peer += 1;
        self.associations.insert((peer, handle));
        let due = now + ASSOCIATION_LIFETIME;
        self.timers.insert((due, Timer::Association(peer, handle)));
        true
    }

    fn forget(&mut self, peer: SocketAddr, handle: u64) {
        self.associations.remove(&(peer, handle));
        if let Some(of_peer) = self.of_peer.get_mut(&peer.ip()) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.of_peer.remove(&peer.ip());
            }
        }
    }

    /// The query that an accept or a reject answers: it has the handle and the address of ours.
    fn answered(&mut self, message: &WireMessage) -> Option<&mut Query> {
        let query = self.queries.get_mut(&message.assoc_handle)?;
        is_same(query.local, message.cp).then_some(query)
    }

    fn on_accept(&mut self, now: Instant, from: SocketAddr, message: WireMessage) {
        let query = self.answered(&message);
        let Some(query) = query.filter(|query| query.remote.ip() == message.ap.ip()) else {
            tracing::debug!(%from, "an accept of no request, or of another host's address");
            return;
        };
        let ack = WireMessage {
            message_type: MessageType::Ack,
            ..message
        };
        if query.state == QueryState::Answered {
            return self.send(from, ack);
        }
        let before = query.due;
        query.state = QueryState::Answered;
        query.due = now + ANSWERED_LIFETIME;
        let (due, asker, remote) = (query.due, query.asker, query.remote);
        let connection = connection(query, message.ap);
        let timer = Timer::Query(message.assoc_handle);
        self.timers.remove(&(before, timer));
        self.timers.insert((due, timer));
        self.asked -= 1;
        self.bound_answered();
        match asker {
            Asker::Kernel { client, sequence } => {
                let response = Response::QueryMapping {
                    sequence,
                    connection,
                    error: 0,
                };
                self.respond(client, &response);
            }
            Asker::Program => self.answer(remote, Ok(message.ap)),
        }
        self.send(from, ack);
    }

    /// Drops the query that was answered first, if too many are remembered.
    fn bound_answered(&mut self) {
        if self.queries.len() - self.asked <= MAX_QUERIES {
            return;
        }
        let mut timers = self.timers.iter();
        let oldest = timers.find_map(|(due, timer)| match timer {
            Timer::Query(handle) => {
                let is_answered = self.queries[handle].state == QueryState::Answered;
                is_answered.then_some((*due, *handle))
            }
            Timer::Association(..) => None,
        });
        if let Some((due, handle)) = oldest {
            self.timers.remove(&(due, Timer::Query(handle)));
            self.queries.remove(&handle);
        }
    }

    fn on_reject(&mut self, message: WireMessage) {
        let query = self.answered(&message);
        if query.is_some_and(|query| query.state != QueryState::Answered) {
            self.end_query(message.assoc_handle, Refusal::Rejected);
        }
    }

    fn answer(&mut self, remote: SocketAddr, mapped: Result<SocketAddr, Refusal>) {
        let answer = Answer { remote, mapped };
        self.outputs.push_back(Output::Answer(answer));
    }

    fn send(&mut self, to: SocketAddr, message: WireMessage) {
        let is_answer = matches!(
            message.message_type,
            MessageType::Accept | MessageType::Reject
        );
        self.outputs.push_back(Output::Wire {
            to,
            datagram: message.write(),
            is_answer,
        });
    }

    fn respond(&mut self, client: u8, response: &Response) {
        // Without a socket there is no kernel that has asked.
        if let Some(port) = self.netlink_port {
            let message = response.write(client, self.sequence, port);
            self.sequence = self.sequence.wrapping_add(1);
            self.outputs.push_back(Output::Netlink(message));
        }
    }
}

fn connection(query: &Query, mapped_remote: SocketAddr) -> Connection {
    Connection {
        local: query.local,
        remote: query.remote,
        mapped_local: query.mapped_local,
        mapped_remote,
    }
}

/// Whether a connection can be made between two addresses.
fn check_pair(local: SocketAddr, remote: SocketAddr) -> Result<(), ErrorCode> {
    let is_pair = local.is_ipv4() == remote.is_ipv4()
        && !local.ip().is_unspecified()
        && !remote.ip().is_unspecified();
    is_pair.then_some(()).ok_or(ErrorCode::InvalidMessage)
}

/// Timers in the order of their time.
trait Due {
    fn pop_first_if_due(&mut self, now: Instant) -> Option<(Instant, Timer)>;
}

impl Due for BTreeSet<(Instant, Timer)> {
    fn pop_first_if_due(&mut self, now: Instant) -> Option<(Instant, Timer)> {
        if self.first()?.0 > now {
            return None;
        }
        self.pop_first()
    }
}
