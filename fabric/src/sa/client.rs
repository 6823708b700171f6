//! Client side of subnet administration.
//!
//! ```text
//!            query                response, or its last segment
//!   (none) ─────────▶ waiting ─────────────────────────────────▶ event: response
//!                      │  ▲ │ response timeout: retransmit
//!                      │  └─┘
//!                      ├──────▶ event: TimedOut (out of retries)
//!                      └──────▶ event: Canceled
//! ```
//!
//! Every query eventually produces exactly one event. Reports from the administrator are
//! acknowledged and delivered once each.
//!
//! Bounds: [`MAX_QUERIES`] pending queries, [`rmpp::MAX_LEN`] bytes per response, and
//! [`MAX_EVENTS`] undelivered reports. The administrator retransmits reports that were not
//! acknowledged.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_transport::verbs::{Gid, PortCapabilities};
use riser_transport::wire::mad::{MadClass, MadMethod, MadStatus, RESPONSE};
use riser_transport::wire::{Mad, TransactionId};
use thiserror::Error;
use zerocopy::FromZeros as _;
use zerocopy::big_endian::{U16, U32, U64};

use super::rmpp::{self, Received, Receiver};
use super::wire::inform::{InformInfo, Notice};
use super::wire::mcmember::{McMemberMask, McMemberRecord};
use super::wire::node::{PortInfoMask, PortInfoRecord};
use super::wire::path::{PathMask, PathRecord, REVERSIBLE};
use super::wire::service::{ServiceMask, ServiceRecord};
use super::wire::{DATA_LEN, Record, SaHeader, SaMethod};

/// Maximum number of pending queries.
pub const MAX_QUERIES: usize = 256;

/// Maximum number of undelivered reports.
pub const MAX_EVENTS: usize = 256;

/// Maximum number of queued MADs, in addition to one per query.
const MAX_WAITING: usize = 256;

/// Number of remembered report transactions, used to detect duplicates.
const REMEMBERED: usize = 64;

/// Configuration of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// GID of the administrator.
    pub administrator: Gid,
    /// Time before a request is retransmitted.
    pub timeout: Duration,
    /// Maximum number of retransmissions.
    pub retries: u8,
    /// Upper half of transaction identifiers. It distinguishes the users of a shared queue pair 1.
    pub transaction_prefix: u32,
}

impl ClientConfig {
    /// Creates a configuration with a timeout of two seconds and three retries.
    #[must_use]
    pub fn new(administrator: Gid) -> Self {
        Self {
            administrator,
            timeout: Duration::from_secs(2),
            retries: 3,
            transaction_prefix: 0,
        }
    }
}

/// Identifier of a query. Identifiers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueryId(u32);

/// Error of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SaError {
    /// The owner canceled the query.
    #[error("the query was canceled")]
    Canceled,
    /// No response arrived, despite retransmissions.
    #[error("subnet administration does not respond")]
    TimedOut,
    /// The administrator rejected the request with a status of [`MadStatus`] or
    /// [`SaStatus`](super::wire::SaStatus).
    #[error("subnet administration rejected the request: status {0:#06x}")]
    Status(u16),
    /// The response is malformed, too long or was aborted.
    #[error("malformed response of subnet administration")]
    Malformed,
    /// [`MAX_QUERIES`] queries are already pending.
    #[error("too many pending queries to subnet administration")]
    Busy,
}

/// Request to the administrator.
#[derive(Clone, Debug)]
pub struct Request {
    method: SaMethod,
    attribute: u16,
    mask: u64,
    record: Vec<u8>,
}

impl Request {
    /// Creates a request for records of type `R`. `mask` selects the fields of `record` to match.
    #[must_use]
    pub fn new<R: Record>(method: SaMethod, mask: u64, record: &R) -> Self {
        Self {
            method,
            attribute: R::ATTRIBUTE,
            mask,
            record: record.as_bytes().to_vec(),
        }
    }

    /// Creates a request for one reversible path between two ports, optionally restricted to a
    /// partition and a service (`ib_sa_path_rec_get`).
    #[must_use]
    pub fn path(sgid: Gid, dgid: Gid, pkey: Option<u16>, service_id: Option<u64>) -> Self {
        let mut mask = PathMask::SGID | PathMask::DGID | PathMask::REVERSIBLE | PathMask::NUMB_PATH;
        mask.set(PathMask::PKEY, pkey.is_some());
        mask.set(PathMask::SERVICE_ID, service_id.is_some());
        let record = PathRecord {
            sgid: sgid.0,
            dgid: dgid.0,
            reversible_and_count: REVERSIBLE | 1,
            pkey: U16::new(pkey.unwrap_or_default()),
            service_id: U64::new(service_id.unwrap_or_default()),
            ..PathRecord::default()
        };
        Self::new(SaMethod::Get, mask.bits(), &record)
    }

    /// Creates a request that sets a service record, including its lease, name and data.
    #[must_use]
    pub fn set_service(record: &ServiceRecord) -> Self {
        Self::new(SaMethod::Set, ServiceMask::ALL.bits(), record)
    }

    /// Creates a request to query or delete the service records that match the selected fields
    /// (`ib_sa_service_rec_query`).
    #[must_use]
    pub fn service(method: SaMethod, mask: ServiceMask, record: &ServiceRecord) -> Self {
        Self::new(method, mask.bits(), record)
    }

    /// Creates a request to join a group. The group is created if the record and `mask` contain all
    /// required parameters ([`McMemberMask::CREATE`]).
    #[must_use]
    pub fn join(mask: McMemberMask, record: &McMemberRecord) -> Self {
        let needed = McMemberMask::PORT_GID | McMemberMask::JOIN_STATE;
        Self::new(SaMethod::Set, (mask | needed).bits(), record)
    }

    /// Creates a request to leave a group.
    #[must_use]
    pub fn leave(record: &McMemberRecord) -> Self {
        let mask = McMemberMask::MGID | McMemberMask::PORT_GID | McMemberMask::JOIN_STATE;
        Self::new(SaMethod::Delete, mask.bits(), record)
    }

    /// Creates a request to subscribe to notices or to unsubscribe.
    #[must_use]
    pub fn inform(info: &InformInfo) -> Self {
        Self::new(SaMethod::Set, 0, info)
    }

    /// Creates a request that registers the capabilities of the requesting port. The registration
    /// must be repeated, because the administrator forgets it after five minutes. The response
    /// contains the LID of the port.
    #[must_use]
    pub fn set_port(capabilities: PortCapabilities) -> Self {
        let mut record = PortInfoRecord::new_zeroed();
        record.info.capabilities = U32::new(capabilities.bits());
        Self::new(SaMethod::Set, PortInfoMask::CAPABILITIES.bits(), &record)
    }

    /// Builds the MAD with a transaction identifier.
    #[must_use]
    pub fn emit(&self, transaction: TransactionId) -> Mad {
        let method = self.method.mad_method();
        SaHeader::new(method, self.attribute, transaction, self.mask).emit(&self.record)
    }
}

/// Records of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaResponse {
    attribute: u16,
    words: u16,
    data: Vec<u8>,
}

impl SaResponse {
    /// Returns all records, if they are of type `R`.
    pub fn records<R: Record>(&self) -> impl Iterator<Item = R> {
        let data: &[u8] = if self.attribute == R::ATTRIBUTE {
            &self.data
        } else {
            &[]
        };
        R::read_all(data, self.words)
    }

    /// Returns the first record.
    #[must_use]
    pub fn record<R: Record>(&self) -> Option<R> {
        self.records().next()
    }
}

/// Event of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaEvent {
    /// A query completed.
    Completed {
        /// Identifier of the query.
        id: QueryId,
        /// Response or error.
        result: Result<SaResponse, SaError>,
    },
    /// Notice that matches a subscription of the owner.
    Notice(Box<Notice>),
}

struct Query {
    id: QueryId,
    request: Request,
    attempts: u8,
    deadline: Instant,
    /// Partially received response.
    receiver: Option<Receiver>,
}

/// Client of a subnet administrator.
pub struct SaClient {
    config: ClientConfig,
    next: u32,
    queries: Vec<Query>,
    /// MADs to be sent.
    waiting: VecDeque<Mad>,
    events: VecDeque<SaEvent>,
    reports: VecDeque<TransactionId>,
}

impl std::fmt::Debug for SaClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queries = self.queries.len();
        f.debug_struct("SaClient")
            .field("config", &self.config)
            .field("queries", &queries)
            .finish_non_exhaustive()
    }
}

impl SaClient {
    /// Creates a client. `first` is the lower half of the first transaction identifier. It should
    /// be random, so that late responses to a previous client of the same port are not accepted.
    #[must_use]
    pub fn new(config: ClientConfig, first: u32) -> Self {
        Self {
            config,
            next: first,
            queries: Vec::new(),
            waiting: VecDeque::new(),
            events: VecDeque::new(),
            reports: VecDeque::new(),
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &ClientConfig {
        &self.config
    }

    fn transaction(&self, id: QueryId) -> TransactionId {
        TransactionId(u64::from(self.config.transaction_prefix) << 32 | u64::from(id.0))
    }

    /// Starts a query.
    ///
    /// # Errors
    /// [`SaError::Busy`].
    pub fn query(&mut self, now: Instant, request: Request) -> Result<QueryId, SaError> {
        if self.queries.len() == MAX_QUERIES {
            return Err(SaError::Busy);
        }
        let id = QueryId(self.next);
        self.next = self.next.wrapping_add(1);
        self.waiting.push_back(request.emit(self.transaction(id)));
        self.queries.push(Query {
            id,
            request,
            attempts: 0,
            deadline: now + self.config.timeout,
            receiver: None,
        });
        Ok(id)
    }

    /// Cancels a query. Does nothing if it already completed (`ib_sa_cancel_query`).
    pub fn cancel(&mut self, id: QueryId) {
        if let Some(at) = self.queries.iter().position(|query| query.id == id) {
            self.complete_query(at, Err(SaError::Canceled));
        }
    }

    fn complete_query(&mut self, at: usize, result: Result<SaResponse, SaError>) {
        let id = self.queries.swap_remove(at).id;
        self.events.push_back(SaEvent::Completed { id, result });
    }

    /// Handles a MAD received from a port.
    pub fn handle_mad(&mut self, now: Instant, from: Gid, mad: &[u8]) {
        let Ok((header, data)) = SaHeader::parse(mad) else {
            return;
        };
        if from != self.config.administrator || header.mad.class() != MadClass::SubnetAdm as u8 {
            return;
        }
        if header.mad.method() == MadMethod::Report as u8 {
            self.take_report(&header, data);
        } else if header.mad.method() & RESPONSE != 0 {
            self.handle_response(now, &header, data);
        }
    }

    fn take_report(&mut self, header: &SaHeader, data: &[u8; DATA_LEN]) {
        let Some(notice) = Notice::read(data) else {
            return;
        };
        let transaction = header.mad.transaction();
        if header.mad.attribute() != Notice::ATTRIBUTE {
            return;
        }
        if !self.reports.contains(&transaction) {
            // The administrator will retransmit it.
            if self.events.len() >= MAX_EVENTS {
                return;
            }
            if self.reports.len() == REMEMBERED {
                self.reports.pop_front();
            }
            self.reports.push_back(transaction);
            self.events.push_back(SaEvent::Notice(Box::new(notice)));
        }
        let response = SaHeader {
            mad: header.mad.response(MadStatus::Success),
            ..*header
        };
        self.send(response.emit(data));
    }

    /// Queues a response. It may be dropped, because the administrator retransmits its request.
    fn send(&mut self, mad: Mad) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(mad);
        }
    }

    fn handle_response(&mut self, now: Instant, header: &SaHeader, data: &[u8; DATA_LEN]) {
        let transaction = header.mad.transaction();
        let is_it = |query: &Query| {
            let method = query.request.method.mad_method();
            let expected = match method {
                MadMethod::Set => MadMethod::GetResp as u8,
                method => method as u8 | RESPONSE,
            };
            self.transaction(query.id) == transaction
                && header.mad.method() == expected
                && header.mad.attribute() == query.request.attribute
        };
        let Some(at) = self.queries.iter().position(is_it) else {
            return;
        };
        let build_response = |data: &[u8], words| SaResponse {
            attribute: header.mad.attribute(),
            words,
            data: data.to_vec(),
        };
        let words = header.attribute_offset.get();
        if header.mad.status() != 0 {
            self.complete_query(at, Err(SaError::Status(header.mad.status())));
        } else if !header.rmpp.is_active() {
            // One record with padding.
            let words = (DATA_LEN / 8) as u16;
            self.complete_query(at, Ok(build_response(data, words)));
        } else {
            let query = &mut self.queries[at];
            let receiver = query.receiver.get_or_insert_default();
            let before = receiver.arrived();
            match receiver.handle(header, data) {
                Received::Going(reply) => {
                    // Only new segments extend the deadline.
                    if receiver.arrived() > before {
                        query.deadline = now + self.config.timeout;
                    }
                    if let Some(reply) = reply {
                        self.send(reply);
                    }
                }
                Received::Done(reply) => {
                    let data = std::mem::take(receiver).into_data();
                    self.send(reply);
                    self.complete_query(at, Ok(build_response(&data, words)));
                }
                Received::Failed(reply) => {
                    if let Some(reply) = reply {
                        self.send(reply);
                    }
                    self.complete_query(at, Err(SaError::Malformed));
                }
            }
        }
    }

    /// Returns the next MAD for queue pair 1 of the administrator.
    pub fn poll_transmit(&mut self) -> Option<Mad> {
        self.waiting.pop_front()
    }

    /// Returns the oldest event.
    pub fn poll_event(&mut self) -> Option<SaEvent> {
        self.events.pop_front()
    }

    /// Returns the time at which [`Self::handle_timeout`] should be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.queries.iter().map(|query| query.deadline).min()
    }

    /// Retransmits requests, and fails requests that are out of retries.
    pub fn handle_timeout(&mut self, now: Instant) {
        let mut at = 0;
        while at < self.queries.len() {
            let id = self.queries[at].id;
            let transaction = self.transaction(id);
            let query = &mut self.queries[at];
            if query.deadline > now {
                at += 1;
            } else if query.attempts == self.config.retries {
                self.complete_query(at, Err(SaError::TimedOut));
            } else {
                query.attempts += 1;
                query.deadline = now + self.config.timeout;
                // The response will restart from its first segment.
                query.receiver = None;
                self.waiting.push_back(query.request.emit(transaction));
                at += 1;
            }
        }
    }

    /// Returns whether no query is pending and no event is undelivered.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queries.is_empty() && self.waiting.is_empty() && self.events.is_empty()
    }
}

/// Maximum length of a response, in bytes.
pub const MAX_RESPONSE: usize = rmpp::MAX_LEN;
