//! Subscriptions and the resulting reports.
//!
//! Each subscriber has at most one report in flight; the next report is sent after the response.
//! Subscriptions of an unresponsive subscriber are removed, so the list cannot grow stale.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use riser_transport::verbs::Gid;
use riser_transport::wire::mad::MadMethod;
use riser_transport::wire::{Mad, Qpn, TransactionId};
use zerocopy::IntoBytes as _;
use zerocopy::big_endian::{U16, U32};

use super::super::wire::inform::{InformInfo, InformInfoRecord, InformMask, Notice, Trap};
use super::super::wire::{Record, SaHeader, SaStatus};
use super::{Records, Refusal, request};

/// Maximum number of queued notices per subscriber; later notices are dropped.
const MAX_NOTICES: usize = 16;

/// Time before a report is retransmitted, and the maximum number of retransmissions.
const TIMEOUT: Duration = Duration::from_secs(1);
const RETRIES: u8 = 3;

/// Upper half of the transaction identifiers of reports.
const PREFIX: u64 = 0x5341 << 32;

struct Report {
    transaction: TransactionId,
    notice: Notice,
    attempts: u8,
    deadline: Instant,
    /// The report must be sent.
    is_due: bool,
}

struct Subscription {
    gid: Gid,
    /// Subscription number of its host.
    number: u16,
    info: InformInfo,
    waiting: VecDeque<Notice>,
    report: Option<Report>,
}

/// Subscriptions of all hosts.
pub(super) struct Notices {
    /// GID of the administrator.
    own: Gid,
    /// Maximum number of subscriptions: total, per host.
    limits: (usize, usize),
    all: Vec<Subscription>,
    next: u32,
}

impl Notices {
    /// Creates an empty list. The first transaction number is derived from the secret, because
    /// hosts would treat transaction numbers of the previous administrator as retransmissions.
    pub(super) fn new(own: Gid, limits: (usize, usize), secret: [u8; 16]) -> Self {
        let mut hasher = DefaultHasher::new();
        secret.hash(&mut hasher);
        Self {
            own,
            limits,
            all: Vec::new(),
            next: hasher.finish() as u32,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the hosts of all subscriptions. A host may occur several times.
    pub(super) fn hosts(&self) -> impl Iterator<Item = Gid> {
        self.all.iter().map(|subscription| subscription.gid)
    }

    /// Returns requests that recreate the subscriptions.
    pub(super) fn requests(&self) -> impl Iterator<Item = (Gid, Mad)> {
        let all = self.all.iter();
        all.map(|subscription| (subscription.gid, request(0, &subscription.info)))
    }

    /// Removes all subscriptions of a host.
    pub(super) fn remove(&mut self, gid: Gid) {
        self.all.retain(|subscription| subscription.gid != gid);
    }

    /// Returns the subscriptions that match a query. Queue pairs are only visible to their owner
    /// (C15-0.2-1.16).
    pub(super) fn find(&self, mask: InformMask, wanted: &InformInfoRecord) -> Records {
        let all = self.all.iter().map(|subscription| InformInfoRecord {
            subscriber_gid: subscription.gid.0,
            subscriber_enum: U16::new(subscription.number),
            info: InformInfo {
                qpn_and_response_time: U32::ZERO,
                ..subscription.info
            },
            ..InformInfoRecord::default()
        });
        Records::of(all.filter(|record| record.matches(mask, wanted)))
    }

    /// Handles a subscription or unsubscription.
    pub(super) fn handle(&mut self, from: Gid, info: &InformInfo) -> Result<Records, Refusal> {
        // Reports are only sent to queue pair 1, which is also the default.
        if info.subscribe > 1 || info.qpn() > Qpn::GSI.value() || info.is_generic == 0 {
            return Err(SaStatus::ReqInvalid.into());
        }
        let known = |s: &Subscription| s.gid == from && s.info.is_same(info);
        let known = self.all.iter().position(known);
        match (known, info.subscribe) {
            (Some(at), 0) => {
                self.all.swap_remove(at);
            }
            (None, 0) => return Err(SaStatus::ReqInvalid.into()),
            (Some(_), _) => {}
            (None, _) => {
                let (all, each) = self.limits;
                let his = || self.all.iter().filter(|s| s.gid == from);
                if self.all.len() >= all || his().count() >= each {
                    return Err(SaStatus::NoResources.into());
                }
                let is_free = |number: &u16| his().all(|s| s.number != *number);
                self.all.push(Subscription {
                    gid: from,
                    number: (0..).find(is_free).expect("a host has few"),
                    info: *info,
                    waiting: VecDeque::new(),
                    report: None,
                });
            }
        }
        Ok(Records::of([*info]))
    }

    /// Reports an event to all matching subscribers.
    pub(super) fn raise(&mut self, now: Instant, trap: Trap, about: Gid) {
        let notice = Notice::new(trap, about, self.own);
        for subscription in &mut self.all {
            // A host is not notified of its own actions.
            if subscription.info.admits(&notice)
                && subscription.gid != about
                && subscription.waiting.len() < MAX_NOTICES
            {
                subscription.waiting.push_back(notice);
            }
        }
        self.begin(now);
    }

    /// Starts the next report of each subscriber without a report in flight.
    fn begin(&mut self, now: Instant) {
        for subscription in &mut self.all {
            if subscription.report.is_some() {
                continue;
            }
            let Some(notice) = subscription.waiting.pop_front() else {
                continue;
            };
            let transaction = TransactionId(PREFIX | u64::from(self.next));
            self.next = self.next.wrapping_add(1);
            subscription.report = Some(Report {
                transaction,
                notice,
                attempts: 0,
                deadline: now + TIMEOUT,
                is_due: true,
            });
        }
    }

    /// Handles the response to a report.
    pub(super) fn handle_response(&mut self, now: Instant, from: Gid, transaction: TransactionId) {
        for subscription in self.all.iter_mut().filter(|s| s.gid == from) {
            let report = &mut subscription.report;
            if report
                .as_ref()
                .is_some_and(|r| r.transaction == transaction)
            {
                *report = None;
            }
        }
        self.begin(now);
    }

    pub(super) fn poll_transmit(&mut self, now: Instant) -> Option<(Gid, Mad)> {
        self.all.iter_mut().find_map(|subscription| {
            let report = subscription
                .report
                .as_mut()
                .filter(|report| report.is_due)?;
            report.is_due = false;
            report.deadline = now + TIMEOUT;
            let header = SaHeader::new(MadMethod::Report, Notice::ATTRIBUTE, report.transaction, 0);
            Some((subscription.gid, header.emit(report.notice.as_bytes())))
        })
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let reports = self.all.iter().filter_map(|s| s.report.as_ref());
        reports.map(|report| report.deadline).min()
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.all.retain_mut(|subscription| {
            let Some(report) = &mut subscription.report else {
                return true;
            };
            if report.deadline > now {
                return true;
            }
            report.attempts += 1;
            report.is_due = true;
            report.deadline = now + TIMEOUT;
            report.attempts <= RETRIES
        });
    }
}
