//! The end of subnet administration that asks.
//!
//! ```text
//!            query                 answer, or its last segment
//!   (none) ─────────▶ waiting ─────────────────────────────────▶ event: answered
//!                      │  ▲ │ no answer in time: sent once more
//!                      │  └─┘
//!                      ├──────▶ event: answered, TimedOut (retries used up)
//!                      └──────▶ event: answered, Canceled
//! ```
//!
//! Every query has one event in the end. Reports of the administrator are answered and handed on,
//! each once.
//!
//! Bounds: [`MAX_QUERIES`] wait, an answer has [`rmpp::MAX_LEN`] bytes, [`MAX_EVENTS`] reports wait
//! for the owner; the administrator repeats those that are not taken.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_transport::verbs::Gid;
use riser_transport::wire::mad::{MadClass, MadMethod, MadStatus, RESPONSE};
use riser_transport::wire::{Mad, TransactionId};
use thiserror::Error;
use zerocopy::big_endian::{U16, U64};

use super::rmpp::{self, Received, Receiver};
use super::wire::inform::{InformInfo, Notice};
use super::wire::mcmember::{McMemberMask, McMemberRecord};
use super::wire::path::{PathMask, PathRecord, REVERSIBLE};
use super::wire::service::{ServiceMask, ServiceRecord};
use super::wire::{DATA_LEN, Record, SaHeader, SaMethod};

/// Queries that wait at once, at most.
pub const MAX_QUERIES: usize = 256;

/// Reports that wait for the owner, at most.
pub const MAX_EVENTS: usize = 256;

/// MADs that wait to be sent, at most, beside one for each query.
const MAX_WAITING: usize = 256;

/// Transactions of reports that are remembered, so that a repeated one is handed on once.
const REMEMBERED: usize = 64;

/// Configuration of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// GID of the administrator.
    pub administrator: Gid,
    /// Time after which a request is repeated.
    pub timeout: Duration,
    /// Number of times that it is repeated.
    pub retries: u8,
    /// Upper half of transaction identifiers, by which a shared queue pair 1 distinguishes its users.
    pub transaction_prefix: u32,
}

impl ClientConfig {
    /// A client of an administrator, with two seconds for an answer and three repetitions.
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

/// Name of a query. It is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueryId(u32);

/// Reason why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SaError {
    /// The owner has canceled the query.
    #[error("the query was canceled")]
    Canceled,
    /// Nothing came, however often it was asked.
    #[error("subnet administration does not answer")]
    TimedOut,
    /// The administrator refuses, by a status of [`MadStatus`] or
    /// [`SaStatus`](super::wire::SaStatus).
    #[error("subnet administration refuses: status {0:#06x}")]
    Status(u16),
    /// The answer cannot be read, is too long, or was broken off.
    #[error("an answer of subnet administration that makes no sense")]
    Malformed,
    /// [`MAX_QUERIES`] wait already.
    #[error("too many queries wait for subnet administration")]
    Busy,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    method: SaMethod,
    attribute: u16,
    mask: u64,
    record: Vec<u8>,
}

impl Request {
    /// A request about records of a kind; `mask` names the fields of `record` that are given.
    #[must_use]
    pub fn new<R: Record>(method: SaMethod, mask: u64, record: &R) -> Self {
        Self {
            method,
            attribute: R::ATTRIBUTE,
            mask,
            record: record.as_bytes().to_vec(),
        }
    }

    /// A request for one path that may be used in both directions, from port to port, perhaps within
    /// a partition and for a service (`ib_sa_path_rec_get`).
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

    /// A request that sets a service record, with its lease, its name and its data.
    #[must_use]
    pub fn set_service(record: &ServiceRecord) -> Self {
        Self::new(SaMethod::Set, ServiceMask::ALL.bits(), record)
    }

    /// A request for service records, or for their removal, by the fields that are named
    /// (`ib_sa_service_rec_query`).
    #[must_use]
    pub fn service(method: SaMethod, mask: ServiceMask, record: &ServiceRecord) -> Self {
        Self::new(method, mask.bits(), record)
    }

    /// A request to join a group, which is made where the record and `mask` say all that a group
    /// needs ([`McMemberMask::CREATE`]).
    #[must_use]
    pub fn join(mask: McMemberMask, record: &McMemberRecord) -> Self {
        let needed = McMemberMask::PORT_GID | McMemberMask::JOIN_STATE;
        Self::new(SaMethod::Set, (mask | needed).bits(), record)
    }

    /// A request to leave a group.
    #[must_use]
    pub fn leave(record: &McMemberRecord) -> Self {
        let mask = McMemberMask::MGID | McMemberMask::PORT_GID | McMemberMask::JOIN_STATE;
        Self::new(SaMethod::Delete, mask.bits(), record)
    }

    /// A subscription to notices, or its end.
    #[must_use]
    pub fn inform(info: &InformInfo) -> Self {
        Self::new(SaMethod::Set, 0, info)
    }

    /// The MAD with a transaction identifier.
    #[must_use]
    pub fn emit(&self, transaction: TransactionId) -> Mad {
        let method = self.method.mad_method();
        SaHeader::new(method, self.attribute, transaction, self.mask).emit(&self.record)
    }
}

/// Records that an administrator has answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    attribute: u16,
    words: u16,
    data: Vec<u8>,
}

impl Answer {
    /// The records, if they are of this kind.
    pub fn records<R: Record>(&self) -> impl Iterator<Item = R> {
        let data: &[u8] = if self.attribute == R::ATTRIBUTE {
            &self.data
        } else {
            &[]
        };
        R::read_all(data, self.words)
    }

    /// The first record.
    #[must_use]
    pub fn record<R: Record>(&self) -> Option<R> {
        self.records().next()
    }
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaEvent {
    /// A query has ended.
    Answered {
        /// Its name.
        id: QueryId,
        /// The answer, or why there is none.
        result: Result<Answer, SaError>,
    },
    /// Something that the owner has subscribed to.
    Notice(Box<Notice>),
}

struct Query {
    id: QueryId,
    request: Request,
    attempts: u8,
    deadline: Instant,
    /// The answer, as far as its segments have arrived.
    receiver: Option<Receiver>,
}

/// The client.
pub struct SaClient {
    config: ClientConfig,
    next: u32,
    queries: Vec<Query>,
    /// MADs that wait to be sent.
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
    /// A client. `first` is the lower half of its first transaction identifier: a random number keeps
    /// answers to an earlier client of the same port from being taken for its own.
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

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &ClientConfig {
        &self.config
    }

    fn transaction(&self, id: QueryId) -> TransactionId {
        TransactionId(u64::from(self.config.transaction_prefix) << 32 | u64::from(id.0))
    }

    /// Asks.
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

    /// Cancels a query; one that has ended already is left as it is (`ib_sa_cancel_query`).
    pub fn cancel(&mut self, id: QueryId) {
        if let Some(at) = self.queries.iter().position(|query| query.id == id) {
            self.end(at, Err(SaError::Canceled));
        }
    }

    fn end(&mut self, at: usize, result: Result<Answer, SaError>) {
        let id = self.queries.swap_remove(at).id;
        self.events.push_back(SaEvent::Answered { id, result });
    }

    /// Takes a MAD that has come from a port.
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
            self.take_answer(now, &header, data);
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
            // It comes again.
            if self.events.len() >= MAX_EVENTS {
                return;
            }
            if self.reports.len() == REMEMBERED {
                self.reports.pop_front();
            }
            self.reports.push_back(transaction);
            self.events.push_back(SaEvent::Notice(Box::new(notice)));
        }
        let answer = SaHeader {
            mad: header.mad.response(MadStatus::Success),
            ..*header
        };
        self.send(answer.emit(data));
    }

    /// Has a MAD sent that the administrator can do without: it repeats what this answers.
    fn send(&mut self, mad: Mad) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(mad);
        }
    }

    fn take_answer(&mut self, now: Instant, header: &SaHeader, data: &[u8; DATA_LEN]) {
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
        let answer = |data: &[u8], words| Answer {
            attribute: header.mad.attribute(),
            words,
            data: data.to_vec(),
        };
        let words = header.attribute_offset.get();
        if header.mad.status() != 0 {
            self.end(at, Err(SaError::Status(header.mad.status())));
        } else if !header.rmpp.is_active() {
            // One record, and padding after it.
            let words = (DATA_LEN / 8) as u16;
            self.end(at, Ok(answer(data, words)));
        } else {
            let query = &mut self.queries[at];
            let receiver = query.receiver.get_or_insert_default();
            let before = receiver.arrived();
            match receiver.handle(header, data) {
                Received::Going(reply) => {
                    // What has arrived before gives no time.
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
                    self.end(at, Ok(answer(&data, words)));
                }
                Received::Failed(reply) => {
                    if let Some(reply) = reply {
                        self.send(reply);
                    }
                    self.end(at, Err(SaError::Malformed));
                }
            }
        }
    }

    /// The next MAD for queue pair 1 of the administrator.
    pub fn poll_transmit(&mut self) -> Option<Mad> {
        self.waiting.pop_front()
    }

    /// What has happened, oldest first.
    pub fn poll_event(&mut self) -> Option<SaEvent> {
        self.events.pop_front()
    }

    /// Time at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.queries.iter().map(|query| query.deadline).min()
    }

    /// Repeats requests, and ends those that were repeated often enough.
    pub fn handle_timeout(&mut self, now: Instant) {
        let mut at = 0;
        while at < self.queries.len() {
            let id = self.queries[at].id;
            let transaction = self.transaction(id);
            let query = &mut self.queries[at];
            if query.deadline > now {
                at += 1;
            } else if query.attempts == self.config.retries {
                self.end(at, Err(SaError::TimedOut));
            } else {
                query.attempts += 1;
                query.deadline = now + self.config.timeout;
                // The answer begins again.
                query.receiver = None;
                self.waiting.push_back(query.request.emit(transaction));
                at += 1;
            }
        }
    }

    /// Whether nothing waits, neither an answer nor an event.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queries.is_empty() && self.waiting.is_empty() && self.events.is_empty()
    }
}

/// Longest answer, in bytes.
pub const MAX_ANSWER: usize = rmpp::MAX_LEN;
