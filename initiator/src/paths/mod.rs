//! Several paths to one logical unit: which of them a command takes, and what becomes of the
//! commands of a path that is lost.
//!
//! [`Paths`] is a machine with no I/O in it, like the sessions below it, of any protocol. A
//! path is a portal and a session through it, with an initiator port of its own. The owner makes
//! and closes the sessions as it is asked to ([`Output`]), and reports what becomes of them and of
//! the commands on them (`handle_*`). Sessions below do not reconnect by themselves: one whose
//! connection breaks is over, and gives its requests back.
//!
//! ```text
//!           ┌──────────────── lost, refused, another unit ─────────────┐
//!           ↓                                                          │
//! Idle → Opening (own portal) ──→ Checking (who is the unit?) ──→ Live ┘
//!   ↑  → Opening (another's)  ──→ Closing (what was there is fenced off)
//!   └──────────────────────────────────┘
//! ```
//!
//! # Choice
//! A command goes to the path with the fewest outstanding commands among those whose access to the
//! unit is the best there is (ALUA, where the unit offers it), in turn where several are equal.
//!
//! # A stale write must not land
//! The commands of a lost path may still be on their way: in a network, in a socket of the target,
//! in its queue for the disk. A write that is repeated elsewhere, or a later one to the same
//! blocks, could be overwritten by the old copy long after it was acknowledged. So:
//! - **Fence before replay.** What writes and was outstanding on a lost path starts again, on
//!   any path, only after the path's initiator port has logged in again at the same target port
//!   (the same portal group, for iSCSI). That takes the place of the old session: the target
//!   answers such a login when the old session's commands have ended (RFC 7143 6.3.5; SRP
//!   MULTI-CHANNEL ACTION 0), and what arrives on the old connection later belongs to no session.
//!   Any portal of an iSCSI group will do for that login, so another path's, which is live, is
//!   tried at once; the session has done its work with its login and is closed. Where the portals
//!   are of different groups, or the paths are of SRP, nothing is proved by a login at another one,
//!   and the writes wait for their own portal: a session of SRP may belong to one port of the
//!   target's device, even if several ports report one identifier.
//! - **A write that was given up is not forgotten.** A request that ends without an answer while
//!   its path is not fenced (its time is over, or it may not be repeated) leaves its effect behind,
//!   and nothing that conflicts with it starts before the fence. Nor does a read of those blocks: it
//!   would bring what they held before, and a later one what the write has left.
//! - **Nothing that conflicts is outstanding twice.** A request whose effect overlaps with that of
//!   an earlier one waits for the end of that, whichever path it is on. So there is no order among
//!   paths to keep, and a request that is replayed cannot undo a later one.
//!
//! Reads change nothing, so one whose path is lost starts again at once on another. What may not be
//! carried out twice ends with [`RequestError::ConnectionLost`], as on a single session.
//!
//! # Where no login proves anything
//! iSCSI's targets are believed, as they are by a session that reconnects, and so is `riserd` on
//! SRP, which is known by its page of the cache's generation ([`crate::unit`]). In three cases
//! there is only time, [`Timing::settle`](crate::session::Timing::settle):
//! - **Another target of SRP.** Linux's `ib_srpt` answers a login before the old session's commands
//!   have ended. They are taken to be over that long after the end of the session.
//! - **A portal that has come back in another group.** The old group has not heard of that login.
//!   The time begins with it, since a target that says nothing at all may say more later.
//! - **A process that takes the place of one that was killed** ([`Paths::recover`]). The outstanding
//!   commands of the old process are not known, nor is the target port of its sessions. So
//!   everything that changes or reads blocks waits. A login at a path's own portal fences it at
//!   `riserd` only, and time at every other target. The time begins with the process.
//!
//! A write that stays in a backend or in the network for longer can then land late. A path that is
//! lost in any other way is waited for without end, and writes that conflict, and reads, end when
//! their time is over.
//!
//! # Time2Wait
//! A target of iSCSI may demand a wait between the end of a session and the next login of the same
//! initiator port (RFC 7143 clause 13.15), which also delays the login that fences a path.
//!
//! # One unit
//! Before a path is used, each time it is made, and after a unit attention that can mean another
//! unit, the unit behind it is identified; all paths must report the same identity, and not an
//! empty one ([`Found`], [`crate::unit`]). A path whose unit is gone is lost, and its commands go
//! elsewhere. A portal that leads elsewhere ends the whole while it is being opened; later it is
//! out of use, and is checked again from time to time.
//!
//! # Not here
//! Persistent reservations: they belong to a path's initiator port, and nothing copies them.

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
pub use self::types::{Found, Output, PathIndex, PathState, PathView, PathsConfig, PortTag};
use crate::request::{
    Answer, CHECK_CONDITION, RequestError, RequestId, RequestResult, RequestSpec, Retry,
};
use crate::session::{Down, Machine, SubmitError};
use crate::unit::Snapshot;

/// The paths to a logical unit. See the module's documentation.
#[derive(Debug)]
pub struct Paths {
    config: PathsConfig,
    paths: Vec<Path>,
    /// Identity of the unit, once a path has reported it.
    unit: Option<Snapshot>,
    requests: Slab<PathRequest>,
    /// Requests that are on no path, in order of submission. Bound: `config.max_requests`.
    waiting: VecDeque<u32>,
    next_seq: u64,
    /// The path that the last request took.
    last: usize,
    /// State of the whole that was reported last; `None` until every path has been tried once.
    is_live: Option<bool>,
    /// It is being closed, for this reason.
    ending: Option<Down>,
    is_over: bool,
    outputs: VecDeque<Output>,
    /// Not after the earliest deadline of anything.
    timer: Option<Instant>,
}

impl Paths {
    /// Paths that are all being opened.
    ///
    /// # Panics
    /// If there is no path, or no room for a request.
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

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns whether all paths are being closed.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// State of each path.
    pub fn views(&self) -> impl Iterator<Item = PathView> + '_ {
        self.paths.iter().map(Path::view)
    }

    fn arm(&mut self, at: Instant) {
        self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
    }

    /// Starts what can be started.
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

    /// The path for the next request: the best access, then the shortest queue, then whose turn it
    /// is.
    fn choose(&self) -> Option<usize> {
        let count = self.paths.len();
        let in_turn = (1..=count).map(|i| (self.last + i) % count);
        in_turn
            .filter(|&i| self.paths[i].is_usable())
            .min_by_key(|&i| (self.paths[i].access, self.paths[i].outstanding))
    }

    /// Returns whether something has to end before a request may start: an earlier request with
    /// which its order matters, or what may still be on its way from a lost path.
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

    /// A path's session has ended a request.
    pub fn handle_ended(&mut self, request: RequestId, result: RequestResult, now: Instant) {
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
            Ok(answer) if self.is_refused(index, &answer) => {
                self.on_refused(path, now);
                self.wait_again(index);
            }
            Ok(answer) if self.is_gone(index, &answer) => {
                self.on_gone(path);
                self.wait_again(index);
            }
            result => self.complete(index, result),
        }
        self.finish();
        self.pump();
    }

    /// Returns whether the unit refused a command because of the path it came by, without
    /// carrying it out.
    fn is_refused(&self, index: u32, answer: &Answer) -> bool {
        let is_ours = self.requests[index as usize].spec.retry == Retry::Standard;
        let refused = matches!(
            answer.sense(),
            Some(Sense {
                key: SenseKey::NotReady,
                additional: AdditionalSense {
                    code: 0x04,
                    qualifier: 0x0a..=0x0c,
                },
                ..
            })
        );
        is_ours && refused && answer.status == CHECK_CONDITION && self.ending.is_none()
    }

    /// Returns whether a path no longer leads to the unit: LOGICAL UNIT NOT SUPPORTED. The
    /// command was not carried out.
    fn is_gone(&self, index: u32, answer: &Answer) -> bool {
        let is_ours = self.requests[index as usize].spec.retry == Retry::Standard;
        let is_missing = matches!(
            answer.sense(),
            Some(Sense {
                key: SenseKey::IllegalRequest,
                additional: AdditionalSense { code: 0x25, .. },
                ..
            })
        );
        is_ours && is_missing && answer.status == CHECK_CONDITION && self.ending.is_none()
    }

    /// A request's path was lost, and with it whether the request was carried out, or still is to
    /// be.
    fn on_lost(&mut self, index: u32, path: usize, now: Instant) {
        if self.paths[path].stage == Stage::Live {
            self.end_session(path);
        }
        let request = &mut self.requests[index as usize];
        if request.spec.effect.is_change() {
            request.behind = Some(PathIndex(path as u8));
        }
        if !request.spec.effect.is_replayable() {
            self.give_up(index, RequestError::ConnectionLost);
        } else if request.spec.deadline <= now {
            self.give_up(index, RequestError::TimedOut);
        } else {
            self.wait_again(index);
        }
    }

    /// Puts a request back among those that wait, in the order of submission.
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

    /// Ends a request without an answer. What it would change may happen until its path is fenced.
    fn give_up(&mut self, index: u32, error: RequestError) {
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
        self.end(Down::Closed);
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
                self.give_up(index, RequestError::TimedOut);
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
