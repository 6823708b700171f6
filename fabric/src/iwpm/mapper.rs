//! Port mapper without I/O: processes requests from the kernel, from peers and from this program.
//!
//! A query has the same states as in `iwpmd`:
//!
//! ```text
//!            request sent            accept: send ack, notify kernel
//!  (none) ────────────────▶ Pending ──────────────────────────────────▶ Accepted ──▶ (none)
//!                             │  ▲                                        │  ▲   timeout
//!                             └──┘ retransmission                         └──┘ accept: send
//!                             │                                                another ack
//!                             └──▶ (none): reject, or no response to the last request
//! ```
//!
//! Each request from a peer receives exactly one immediate response. The peer retransmits it until
//! it receives a response, and a request from a forged address triggers no more and no longer
//! datagrams than it consists of. The only stored state, the *association*, prevents duplicate
//! notifications of the kernel. If there are too many associations, we still respond, but do not
//! notify the kernel, which then knows the connection by its peer's mapped address. This also
//! limits the rate at which peers can add addresses to the kernel, which stores them until they
//! connect.
//!
//! An association handle is a random number, so that only a host that has received the request can
//! respond to it. A mapping changes the port but never the IP address. An accept with the address
//! of another host is ignored, because it would let the peer redirect the connection. A request
//! with the address of another host receives a response without notifying the kernel, because the
//! connection would appear to originate from that host.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::mappings::{Conflict, Mapping, Mappings};
use super::message::{Connection, Request, Response, operation};
use super::wire::{MessageType, WireMessage};
use super::{ABI, ABI_MIN, ErrorCode, LIBRARY, NO_PORT_MAP, PORT, is_same};
use crate::netlink::message::{Header, Message, Messages};

/// Time before a request is retransmitted.
pub const QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of transmissions of a request. The kernel's timeout is ten seconds. It is
/// notified after half of that time, because most unresponsive hosts have no port mapper, and then
/// connects without a mapping.
pub const QUERY_TRIES: u32 = 5;

/// Time during which retransmitted accepts are acknowledged, as in `iwpmd`.
pub const ACCEPTED_LIFETIME: Duration = Duration::from_secs(10);

/// Time during which duplicate requests are detected. `iwpmd` retransmits a request for ten
/// seconds.
pub const ASSOCIATION_LIFETIME: Duration = Duration::from_secs(15);

/// Maximum number of pending queries, and of completed queries that are remembered.
pub const MAX_QUERIES: usize = 1024;

/// Maximum number of associations.
pub const MAX_ASSOCIATIONS: usize = 4096;

/// Maximum number of associations per IP address.
pub const MAX_PEER_ASSOCIATIONS: usize = 256;

/// Maximum number of registered clients, equal to the number of netlink clients.
const MAX_CLIENTS: u8 = 64;

/// Netlink client of the kernel's connection manager (`RDMA_NL_IWCM`).
const IWCM: u8 = 2;

/// Netlink client of a driver in earlier kernels (`RDMA_NL_C4IW`).
const C4IW: u8 = 3;

/// Host services required by the port mapper.
pub trait Host {
    /// Guard that keeps a port reserved until it is dropped.
    type Reservation;

    /// Reserves a TCP port on all addresses of the IP version of `ip`: the given port, or any free
    /// port.
    ///
    /// # Errors
    /// If the port is in use, or if no port is free.
    fn reserve(&mut self, ip: IpAddr, port: Option<u16>) -> io::Result<(u16, Self::Reservation)>;

    /// Returns a random number.
    fn random(&mut self) -> u64;
}

/// Action for the driver.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a datagram to a remote port mapper.
    Wire {
        /// Destination address.
        to: SocketAddr,
        /// Encoded message.
        datagram: Vec<u8>,
        /// The datagram is a response to a request, whose source address may be forged.
        is_response: bool,
    },
    /// Send a netlink message to the kernel.
    Netlink(Vec<u8>),
    /// Return the response to a query of this program.
    QueryResult(QueryResult),
}

/// Response to [`Mapper::query`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryResult {
    /// Queried address.
    pub remote: SocketAddr,
    /// Mapped address, or an error.
    pub mapped: Result<SocketAddr, Refusal>,
}

/// Reason for a missing mapping of a remote address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The remote host has no mapping.
    #[error("the remote host has no mapping for the address")]
    Rejected,
    /// The remote host does not respond.
    #[error("the remote host does not respond")]
    Silent,
}

/// Origin of a query.
#[derive(Clone, Copy, Debug)]
enum QueryOrigin {
    Kernel { client: u8, sequence: u32 },
    Program,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueryState {
    /// Number of transmissions of the request.
    Pending(u32),
    /// The peer accepted the request.
    Accepted,
}

#[derive(Debug)]
struct Query {
    origin: QueryOrigin,
    state: QueryState,
    local: SocketAddr,
    mapped_local: SocketAddr,
    remote: SocketAddr,
    /// Expiration of its timer.
    due: Instant,
}

/// Subject of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Query(u64),
    Association(SocketAddr, u64),
}

/// Port mapper of a host. The module documentation describes its states.
#[derive(Debug)]
pub struct Mapper<H: Host> {
    host: H,
    /// Port of the netlink socket, if any.
    netlink_port: Option<u32>,
    abi: u16,
    /// Sequence number of the next netlink message.
    sequence: u32,
    /// Registered clients, and the number of mappings sent by each.
    clients: BTreeMap<u8, u32>,
    mappings: Mappings<H::Reservation>,
    /// Queries by association handle.
    queries: HashMap<u64, Query>,
    /// Number of pending queries.
    pending: usize,
    /// Requests from peers, by source address and handle.
    associations: BTreeSet<(SocketAddr, u64)>,
    /// Number of associations per peer.
    of_peer: HashMap<IpAddr, usize>,
    timers: BTreeSet<(Instant, Timer)>,
    outputs: VecDeque<Output>,
}

impl<H: Host> Mapper<H> {
    /// Creates a port mapper. If there is a netlink socket, starts registering with the kernel.
    pub fn new(host: H, netlink_port: Option<u32>) -> Self {
        let mut mapper = Self {
            host,
            netlink_port,
            abi: ABI,
            sequence: 0,
            clients: BTreeMap::new(),
            mappings: Mappings::new(),
            queries: HashMap::new(),
            pending: 0,
            associations: BTreeSet::new(),
            of_peer: HashMap::new(),
            timers: BTreeSet::new(),
            outputs: VecDeque::new(),
        };
        mapper.respond(IWCM, &Response::Hello { abi: ABI });
        mapper
    }

    /// Returns the netlink message version in use.
    #[must_use]
    pub fn abi(&self) -> u16 {
        self.abi
    }

    /// Returns the mappings in arbitrary order.
    pub fn mappings(&self) -> impl Iterator<Item = &Mapping<H::Reservation>> {
        self.mappings.iter()
    }

    /// Returns the next action.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which [`Self::handle_timeout`] should be called.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some((_, timer)) = self.timers.pop_first_if_due(now) {
            match timer {
                Timer::Query(handle) => self.on_query_due(now, handle),
                Timer::Association(peer, handle) => self.forget_peer(peer, handle),
            }
        }
    }

    /// Adds a mapping on behalf of this program, from a local address to the port of its listener,
    /// or to a newly reserved port. Returns the mapped address.
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

    /// Queries the port mapper of a remote address for its mapping, for a connection from `local`.
    /// [`Output::QueryResult`] returns the response.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidMessage`] if the IP versions differ or an address is unspecified,
    /// [`ErrorCode::CreateMapping`] if too many queries are pending.
    pub fn query(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), ErrorCode> {
        check_pair(local, remote)?;
        self.start_query(now, QueryOrigin::Program, (local, local), remote)
    }

    /// Handles a datagram from the kernel.
    pub fn handle_netlink(&mut self, now: Instant, datagram: &[u8]) {
        for message in Messages::new(datagram) {
            match message {
                Ok(Message::Client { header, payload }) => {
                    self.on_message(now, header, payload);
                }
                Ok(Message::Error { errno, request }) => self.on_error(errno, request),
                Ok(Message::Done | Message::Control) => {}
                Err(error) => tracing::warn!("cannot parse a message from the kernel: {error}"),
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
            tracing::info!(client, operation, "rejected a kernel request: {code}");
            let response = Response::HandleErr {
                sequence: header.sequence,
                code: code.number(),
            };
            self.respond(client, &response);
        }
    }

    /// Handles an error that the kernel reports for one of our messages. An error for the first
    /// message means that the kernel does not support the operation, which was added in version 4.
    fn on_error(&mut self, errno: i32, request: Header) {
        if errno == 0 {
            return;
        }
        let kind = request.kind;
        if kind.client == IWCM && kind.operation == operation::HELLO {
            tracing::info!(errno, "the kernel supports messages up to version 3 only");
            self.on_abi(ABI_MIN);
        } else if kind.client == IWCM && kind.operation == operation::MAPINFO {
            // It does not support this operation either: the connection manager is not loaded yet.
            tracing::info!(errno, "iWARP is not loaded in the kernel");
            self.abi = ABI;
        } else {
            tracing::debug!(errno, ?kind, "the kernel rejected a message");
        }
    }

    fn on_abi(&mut self, abi: u16) {
        self.abi = abi;
        // Before version 4, each driver was a client.
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
                let origin = QueryOrigin::Kernel { client, sequence };
                self.on_query_mapping(now, origin, client, local, remote, flags.unwrap_or(0))
            }
            Request::RemoveMapping { local, .. } => {
                // The kernel also removes mappings that it failed to add.
                if !self.mappings.release(Some(client), local) {
                    tracing::debug!(client, %local, "unknown mapping in a remove request");
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
        tracing::info!(client, device, "registered a kernel client");
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
            // A program that listens on the wildcard address has a listener on each device.
            Some(Conflict::Same) if local.ip().is_unspecified() => {
                self.share(client, local).ok_or(ErrorCode::DuplicateMapping)
            }
            Some(_) => Err(ErrorCode::DuplicateMapping),
        }
    }

    /// Adds a user to an existing mapping of the client.
    fn share(&mut self, client: u8, local: SocketAddr) -> Option<SocketAddr> {
        let mapping = self.mappings.get_mut(local)?;
        if mapping.owner != Some(client) {
            return None;
        }
        mapping.users = mapping.users.checked_add(1)?;
        Some(mapping.mapped)
    }

    /// Creates a mapping of an address without conflicts.
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
            tracing::warn!(%ip, port, "cannot reserve a TCP port: {error}");
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
        origin: QueryOrigin,
        client: u8,
        local: SocketAddr,
        remote: SocketAddr,
        flags: u32,
    ) -> Result<(), ErrorCode> {
        check_pair(local, remote)?;
        if self.pending >= MAX_QUERIES {
            return Err(ErrorCode::CreateMapping);
        }
        // Connections may share a local address with each other or with a listener.
        let mapped_local = match self.mappings.conflict(local) {
            None => self.create(Some(client), local, flags)?,
            Some(Conflict::Same) => self
                .share(client, local)
                .ok_or(ErrorCode::DuplicateMapping)?,
            Some(Conflict::Overlap) => return Err(ErrorCode::DuplicateMapping),
        };
        self.start_query(now, origin, (local, mapped_local), remote)
    }

    /// Starts a query by sending the first request.
    fn start_query(
        &mut self,
        now: Instant,
        origin: QueryOrigin,
        (local, mapped_local): (SocketAddr, SocketAddr),
        remote: SocketAddr,
    ) -> Result<(), ErrorCode> {
        if self.pending >= MAX_QUERIES {
            return Err(ErrorCode::CreateMapping);
        }
        let handle = self.host.random();
        if self.queries.contains_key(&handle) {
            // A random collision would not occur within the lifetime of the host.
            return Err(ErrorCode::CreateMapping);
        }
        let query = Query {
            origin,
            state: QueryState::Pending(0),
            local,
            mapped_local,
            remote,
            due: now,
        };
        self.queries.insert(handle, query);
        self.pending += 1;
        self.on_query_due(now, handle);
        Ok(())
    }

    /// Transmits or retransmits a request, or fails a query that is out of retries.
    fn on_query_due(&mut self, now: Instant, handle: u64) {
        let Some(query) = self.queries.get_mut(&handle) else {
            return;
        };
        match query.state {
            QueryState::Pending(tries) if tries < QUERY_TRIES => {
                query.state = QueryState::Pending(tries + 1);
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
            QueryState::Pending(_) => self.end_query(handle, Refusal::Silent),
            QueryState::Accepted => {
                self.queries.remove(&handle);
            }
        }
    }

    /// Fails a query.
    fn end_query(&mut self, handle: u64, refusal: Refusal) {
        let Some(query) = self.queries.remove(&handle) else {
            return;
        };
        self.timers.remove(&(query.due, Timer::Query(handle)));
        self.pending -= 1;
        let (client, sequence) = match query.origin {
            QueryOrigin::Kernel { client, sequence } => (client, sequence),
            QueryOrigin::Program => return self.push_result(query.remote, Err(refusal)),
        };
        let response = match refusal {
            // Without a mapping, the mapped address equals the address, as in `iwpmd`.
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
            // The kernel sends one message per user, and may have added a user since.
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

    /// Handles a datagram received from `from`.
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
            // Accepts are not retransmitted, so acknowledgments are ignored.
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

    /// Stores an association. Returns `false` if it already exists, or if there are too many.
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

    fn forget_peer(&mut self, peer: SocketAddr, handle: u64) {
        self.associations.remove(&(peer, handle));
        if let Some(of_peer) = self.of_peer.get_mut(&peer.ip()) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.of_peer.remove(&peer.ip());
            }
        }
    }

    /// Returns the query that matches an accept or reject by handle and local address.
    fn matching_query(&mut self, message: &WireMessage) -> Option<&mut Query> {
        let query = self.queries.get_mut(&message.assoc_handle)?;
        is_same(query.local, message.cp).then_some(query)
    }

    fn on_accept(&mut self, now: Instant, from: SocketAddr, message: WireMessage) {
        let query = self.matching_query(&message);
        let Some(query) = query.filter(|query| query.remote.ip() == message.ap.ip()) else {
            tracing::debug!(%from, "unexpected accept: no matching request, or an address of another host");
            return;
        };
        let ack = WireMessage {
            message_type: MessageType::Ack,
            ..message
        };
        if query.state == QueryState::Accepted {
            return self.send(from, ack);
        }
        let before = query.due;
        query.state = QueryState::Accepted;
        query.due = now + ACCEPTED_LIFETIME;
        let (due, origin, remote) = (query.due, query.origin, query.remote);
        let connection = connection(query, message.ap);
        let timer = Timer::Query(message.assoc_handle);
        self.timers.remove(&(before, timer));
        self.timers.insert((due, timer));
        self.pending -= 1;
        self.limit_accepted();
        match origin {
            QueryOrigin::Kernel { client, sequence } => {
                let response = Response::QueryMapping {
                    sequence,
                    connection,
                    error: 0,
                };
                self.respond(client, &response);
            }
            QueryOrigin::Program => self.push_result(remote, Ok(message.ap)),
        }
        self.send(from, ack);
    }

    /// Removes the oldest completed query if too many are remembered.
    fn limit_accepted(&mut self) {
        if self.queries.len() - self.pending <= MAX_QUERIES {
            return;
        }
        let mut timers = self.timers.iter();
        let oldest = timers.find_map(|(due, timer)| match timer {
            Timer::Query(handle) => {
                let is_accepted = self.queries[handle].state == QueryState::Accepted;
                is_accepted.then_some((*due, *handle))
            }
            Timer::Association(..) => None,
        });
        if let Some((due, handle)) = oldest {
            self.timers.remove(&(due, Timer::Query(handle)));
            self.queries.remove(&handle);
        }
    }

    fn on_reject(&mut self, message: WireMessage) {
        let query = self.matching_query(&message);
        if query.is_some_and(|query| query.state != QueryState::Accepted) {
            self.end_query(message.assoc_handle, Refusal::Rejected);
        }
    }

    fn push_result(&mut self, remote: SocketAddr, mapped: Result<SocketAddr, Refusal>) {
        let result = QueryResult { remote, mapped };
        self.outputs.push_back(Output::QueryResult(result));
    }

    fn send(&mut self, to: SocketAddr, message: WireMessage) {
        let is_response = matches!(
            message.message_type,
            MessageType::Accept | MessageType::Reject
        );
        self.outputs.push_back(Output::Wire {
            to,
            datagram: message.write(),
            is_response,
        });
    }

    fn respond(&mut self, client: u8, response: &Response) {
        // Without a netlink socket there are no kernel requests.
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

/// Checks that two addresses can form a connection.
fn check_pair(local: SocketAddr, remote: SocketAddr) -> Result<(), ErrorCode> {
    let is_pair = local.is_ipv4() == remote.is_ipv4()
        && !local.ip().is_unspecified()
        && !remote.ip().is_unspecified();
    is_pair.then_some(()).ok_or(ErrorCode::InvalidMessage)
}

/// Timers ordered by expiration time.
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
