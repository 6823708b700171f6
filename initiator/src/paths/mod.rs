//! Several paths to a logical unit: path selection, and handling of commands on lost paths.
//!
//! [`Paths`] is a state machine without I/O, like the machines of the underlying sessions, which
//! may use any protocol. A path consists of a portal and a session via this portal, with a separate
//! initiator port. The owner opens and closes sessions as instructed by [`Output`], and reports
//! their events and the completions of their commands (`handle_*`). The underlying sessions do not
//! reconnect: a session with a broken connection closes and returns its requests.
//!
//! ```text
//!           ┌──────────────── lost, refused, another unit ─────────────┐
//!           ↓                                                          │
//! Idle → Opening (own portal) ──→ Checking (who is the unit?) ──→ Live ┘
//!   ↑  → Opening (another's)  ──→ Closing (what was there is fenced off)
//!   └──────────────────────────────────┘
//! ```
//!
//! # Path selection
//! A command uses a path with the best available access to the unit (ALUA, if supported by the
//! unit). Among these, it uses the path with the fewest outstanding commands, and round-robin for
//! equal numbers.
//!
//! # Stale writes must not reach the medium
//! Commands of a lost path might still be in flight: in the network, in a socket of the target, or
//! in its queue for the disk. If a write is retried on another path, or followed by a write to the
//! same blocks, the old copy could overwrite it long after its acknowledgement. So:
//! - **Fence before replay.** Requests that modify the unit and were outstanding on a lost path are
//!   retried, on any path, only after the path's initiator port has logged in again to the same
//!   target port (for iSCSI, the same portal group, and the same address if a login was
//!   redirected). This login replaces the old session: the target responds when the commands of the
//!   old session have completed (RFC 7143 6.3.5; SRP MULTI-CHANNEL ACTION 0), and anything received
//!   later on the old connection has no session. For iSCSI, this login may use any portal of the
//!   group, so we immediately try the portal of another, live path. This session has served its
//!   purpose after the login and is closed. If the portals are in different groups, or for SRP, a
//!   login at another portal proves nothing, and the writes wait for their own portal: an SRP
//!   session may belong to a single port of the target's device, even if several ports report the
//!   same identifier.
//! - **Remember abandoned writes.** If a request fails without a response while its path is not
//!   fenced (on timeout, or because it must not be retried), its effect is recorded, and
//!   conflicting requests wait for the fence. This includes reads of these blocks: otherwise, a
//!   read could return the old data, and a later one the written data.
//! - **No two conflicting requests are outstanding.** A request whose effect overlaps with an
//!   earlier one waits for its completion, regardless of its path. So the order across paths does
//!   not matter, and a replayed request cannot undo a later one.
//!
//! Reads have no effect, so after a path loss they are immediately retried on another path.
//! Requests that must not be executed twice fail with [`RequestError::ConnectionLost`], as on a
//! single session.
//!
//! # Targets without a proof
//! We trust the logins of iSCSI targets, like a reconnecting session does, and also of `riserd` on
//! SRP, which can be identified by its cache generation page ([`crate::unit`]). In these cases we
//! can only wait for [`Timing::settle`](crate::session::Timing::settle):
//! - **Other SRP targets.** Linux's `ib_srpt` responds to a login before the commands of the old
//!   session have completed. We assume that they have completed this long after the end of the
//!   session.
//! - **A portal that recovers in another group, or a login that is redirected to another address.**
//!   The old group or port does not know about the login; a host in the same group might not
//!   either. The time starts with the login, since a target that is unresponsive now may still
//!   execute commands later. In the same group, a login at the portal of another, live path also
//!   starts it, so that the writes don't wait for a portal that never recovers.
//! - **Lost sessions at several target ports.** If the session after such a login is lost before the
//!   time has passed, the time restarts with the next login.
//! - **A process that replaces a killed process** ([`Paths::recover`]). The outstanding commands of
//!   the old process are unknown, and so are the target ports of its sessions. So all requests that
//!   modify or read blocks wait. A login at a path's own portal is a proof for `riserd` only, and
//!   only if neither this login nor one of the old process was redirected; all other targets
//!   require the wait. The time starts with the process.
//!
//! If a write stays in a backend or in the network for longer than this, it can still reach the
//! medium late. In all other cases, we wait indefinitely for the lost path, and conflicting writes
//! and reads fail when they time out.
//!
//! # Time2Wait
//! An iSCSI target may request a wait between the end of a session and the next login of the same
//! initiator port (RFC 7143 clause 13.15). This also delays the login that fences a path.
//!
//! # Unit identity
//! We identify the unit every time a path is opened, and after unit attentions that may indicate a
//! different unit. All paths must report the same, non-empty identity ([`UnitReport`],
//! [`crate::unit`]). If the unit of a path is missing, the path is lost, and its commands will use
//! other paths. If a portal leads to another unit while the paths are first opened, opening fails.
//! If this happens later, we don't use the path, but check it periodically.
//!
//! # Not implemented
//! Persistent reservations: they belong to the initiator port of a path, and are not copied to
//! other paths.

#![forbid(unsafe_code)]

pub mod access;
mod path;
mod types;

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::sense::{AdditionalSense, Sense, SenseKey};
use slab::Slab;

pub use self::access::Access;
use self::types::{Assignment, Path, PathRequest, Stage};
pub use self::types::{Output, PathIndex, PathState, PathView, PathsConfig, PortTag, UnitReport};
use crate::request::{
    CHECK_CONDITION, CommandResponse, RequestError, RequestId, RequestResult, RequestSpec, Retry,
};
use crate::session::{Down, Machine, SubmitError};
use crate::unit::Snapshot;

/// Paths to a logical unit. See the documentation of the module.
#[derive(Debug)]
pub struct Paths {
    config: PathsConfig,
    paths: Vec<Path>,
    /// Identity of the unit, once reported by a path.
    unit: Option<Snapshot>,
    requests: Slab<PathRequest>,
    /// Requests without a path, in order of submission. Bound: `config.max_requests`.
    waiting: VecDeque<u32>,
    next_seq: u64,
    /// Path of the last started request.
    last: usize,
    /// Last reported state; `None` until all paths were tried once.
    is_live: Option<bool>,
    /// Reason for closing, if closing.
    ending: Option<Down>,
    is_over: bool,
    outputs: VecDeque<Output>,
    /// Not later than the earliest deadline.
    timer: Option<Instant>,
}

impl Paths {
    /// Creates paths that are all opening.
    ///
    /// # Panics
    /// Panics if the number of paths or of requests is 0.
    #[must_use]
    pub fn new(config: PathsConfig) -> Self {
        assert!(config.paths > 0 && config.max_requests > 0);
        let mut paths = Self {
            paths: (0..config.paths).map(|_| Path::new(&config)).collect(),
            unit: None,
            requests: Slab::with_capacity(config.max_requests),
            waiting: VecDeque::new(),
            next_seq: 0,
            last: 0,
            is_live: None,
            ending: None,
            is_over: false,
            outputs: VecDeque::new(),
            timer: None,
            config,
        };
        for index in 0..paths.paths.len() {
            paths.open(index);
        }
        paths
    }

    /// Returns the next output.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns whether all paths are being closed.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Returns the state of each path.
    pub fn views(&self) -> impl Iterator<Item = PathView> + '_ {
        self.paths.iter().map(Path::view)
    }

    fn arm(&mut self, at: Instant) {
        self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
    }

    /// Starts all requests that need not wait.
    fn pump(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            let Some(path) = self.choose() else {
                return;
            };
            let index = self.waiting[at];
            if self.must_wait(index) {
                at += 1;
                continue;
            }
            self.waiting.remove(at);
            self.last = path;
            self.paths[path].outstanding += 1;
            let path = PathIndex(path as u8);
            let request = &mut self.requests[index as usize];
            request.assignment = Assignment::On(path);
            request.behind = None;
            let request = RequestId(index);
            self.outputs.push_back(Output::Start { request, path });
        }
    }

    /// Selects the path for the next request: best access, then fewest outstanding commands, then
    /// round-robin.
    fn choose(&self) -> Option<usize> {
        let count = self.paths.len();
        let in_turn = (1..=count).map(|i| (self.last + i) % count);
        in_turn
            .filter(|&i| self.paths[i].is_usable())
            .min_by_key(|&i| (self.paths[i].access, self.paths[i].outstanding))
    }

    /// Returns whether a request must wait for an earlier, conflicting request, or for requests of
    /// a lost path that may still be in flight.
    fn must_wait(&self, index: u32) -> bool {
        let request = &self.requests[index as usize];
        let RequestSpec { lun, effect, .. } = request.spec;
        let ghosts = self.paths.iter().flat_map(|path| &path.ghosts);
        let mut ghosts = ghosts.filter(|(l, _)| l.is_none_or(|l| l == lun));
        if !effect.is_change() {
            return ghosts.any(|(_, ghost)| ghost.is_seen_by(effect));
        }
        let meets = |other: &RequestSpec| other.lun == lun && effect.conflicts(other.effect);
        !request.behind.is_none_or(|path| self.is_fenced(path))
            || ghosts.any(|(_, ghost)| effect.conflicts(*ghost))
            || self
                .requests
                .iter()
                .any(|(_, other)| other.seq < request.seq && meets(&other.spec))
    }

    fn is_fenced(&self, path: PathIndex) -> bool {
        !self.paths[usize::from(path.0)].unfenced
    }

    /// Called when a path's session has completed a request.
    pub fn handle_completed(&mut self, request: RequestId, result: RequestResult, now: Instant) {
        let index = request.0;
        let Some(PathRequest {
            assignment: Assignment::On(path),
            ..
        }) = self.requests.get(index as usize)
        else {
            return;
        };
        let path = usize::from(path.0);
        self.paths[path].outstanding -= 1;
        match result {
            Err(RequestError::Closed) if self.ending.is_none() => self.on_lost(index, path, now),
            Ok(response) if self.is_refused(index, &response) => {
                self.on_refused(path, now);
                self.wait_again(index);
            }
            Ok(response) if self.is_gone(index, &response) => {
                self.on_unit_missing(path);
                self.wait_again(index);
            }
            result => self.complete(index, result),
        }
        self.finish();
        self.pump();
    }

    /// Returns whether the unit rejected a command because of its path, without executing it.
    fn is_refused(&self, index: u32, response: &CommandResponse) -> bool {
        let is_ours = self.requests[index as usize].spec.retry == Retry::Standard;
        let refused = matches!(
            response.sense(),
            Some(Sense {
                key: SenseKey::NotReady,
                additional: AdditionalSense {
                    code: 0x04,
                    qualifier: 0x0a..=0x0c,
                },
                ..
            })
        );
        is_ours && refused && response.status == CHECK_CONDITION && self.ending.is_none()
    }

    /// Returns whether a path no longer leads to the unit: LOGICAL UNIT NOT SUPPORTED. The command
    /// was not executed.
    fn is_gone(&self, index: u32, response: &CommandResponse) -> bool {
        let is_ours = self.requests[index as usize].spec.retry == Retry::Standard;
        let is_missing = matches!(
            response.sense(),
            Some(Sense {
                key: SenseKey::IllegalRequest,
                additional: AdditionalSense { code: 0x25, .. },
                ..
            })
        );
        is_ours && is_missing && response.status == CHECK_CONDITION && self.ending.is_none()
    }

    /// Called when the path of a request is lost. It is unknown whether the request was executed,
    /// or still will be.
    fn on_lost(&mut self, index: u32, path: usize, now: Instant) {
        if self.paths[path].stage == Stage::Live {
            self.on_session_closed(path);
        }
        let request = &mut self.requests[index as usize];
        if request.spec.effect.is_change() {
            request.behind = Some(PathIndex(path as u8));
        }
        if !request.spec.effect.is_replayable() {
            self.fail_request(index, RequestError::ConnectionLost);
        } else if request.spec.deadline <= now {
            self.fail_request(index, RequestError::TimedOut);
        } else {
            self.wait_again(index);
        }
    }

    /// Returns a request to the queue, in order of submission.
    fn wait_again(&mut self, index: u32) {
        let request = &mut self.requests[index as usize];
        request.assignment = Assignment::Waiting;
        let (seq, deadline) = (request.seq, request.spec.deadline);
        let requests = &self.requests;
        let at = self
            .waiting
            .partition_point(|&other| requests[other as usize].seq < seq);
        self.waiting.insert(at, index);
        self.arm(deadline);
    }

    /// Fails a request without a response. Its effect may still occur until its path is fenced.
    fn fail_request(&mut self, index: u32, error: RequestError) {
        let request = &self.requests[index as usize];
        let ghost = (Some(request.spec.lun), request.spec.effect);
        if let Some(path) = request.behind {
            let path = &mut self.paths[usize::from(path.0)];
            if path.unfenced {
                path.ghosts.push(ghost);
            }
        }
        self.complete(index, Err(error));
    }

    fn complete(&mut self, index: u32, result: RequestResult) {
        self.requests.remove(index as usize);
        self.outputs
            .push_back(Output::Complete(RequestId(index), result));
    }
}

impl Machine for Paths {
    fn submit(&mut self, spec: RequestSpec, _now: Instant) -> Result<RequestId, SubmitError> {
        if self.ending.is_some() || self.is_over {
            return Err(SubmitError::Closed);
        }
        if self.requests.len() >= self.config.max_requests {
            return Err(SubmitError::Full);
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        let index = self.requests.insert(PathRequest {
            spec,
            seq,
            assignment: Assignment::Waiting,
            behind: None,
        }) as u32;
        self.waiting.push_back(index);
        self.pump();
        if self.requests[index as usize].assignment == Assignment::Waiting {
            self.arm(spec.deadline);
        }
        Ok(RequestId(index))
    }

    fn close(&mut self, _now: Instant) {
        self.close_paths(Down::Closed);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    fn is_settled(&self) -> bool {
        let is_over = |request: &PathRequest| match request.assignment {
            Assignment::On(_) => !request.spec.effect.is_change(),
            Assignment::Waiting => request.behind.is_none_or(|path| self.is_fenced(path)),
        };
        self.paths.iter().all(|path| path.ghosts.is_empty())
            && self.requests.iter().all(|(_, request)| is_over(request))
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.timer.is_none_or(|t| t > now) {
            return;
        }
        self.timer = None;
        for index in 0..self.paths.len() {
            self.expire_path(index, now);
        }
        let mut at = 0;
        while at < self.waiting.len() {
            let index = self.waiting[at];
            let deadline = self.requests[index as usize].spec.deadline;
            if deadline <= now {
                self.waiting.remove(at);
                self.fail_request(index, RequestError::TimedOut);
            } else {
                self.arm(deadline);
                at += 1;
            }
        }
        self.pump();
    }
}

#[cfg(test)]
mod tests;
