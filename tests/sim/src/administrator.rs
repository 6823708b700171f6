//! The administrator: has served what the troubles of the time say, tries what must be refused, and
//! looks whether those who may not log in are gone.
//!
//! # Verdict
//! - A change that must be refused is, and leaves files and configuration as they were.
//! - Any other is applied in the end, and refused before for what passes only: a file that commands
//!   still use, a device that is being closed.
//! - [`LIMIT`] after an initiator may not log in any more, it has no session.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use riser_reactor::simulated::Disk;
use riser_target::backend::OpenError;
use riser_target::server::ServerError;
use riser_target::server::reload::ChangeError;
use riser_target::worker::PATIENCE;
use riser_target::worker::mail::Snapshot;

use crate::admin::{AdminFault, Layout, Refusal};
use crate::model::Model;
use crate::nics::Place;
use crate::plan::{Fault, Plan, ProcessFault, Trouble};
use crate::process::JobStep;
use crate::target::Target;
use crate::watcher::Ledger;
use crate::{coverage, initiator};

/// Time after which an initiator that was denied has no session any more: a second for its logout,
/// the target's patience with a connection that does not end, and one to spare.
pub const LIMIT: Duration = PATIENCE.saturating_add(Duration::from_secs(1));

/// Wait before a change is tried again.
const AGAIN: Duration = Duration::from_millis(20);

/// Wait between changes that must be refused.
const REFUSED: Duration = Duration::from_millis(4);

/// The administrator.
#[derive(Debug)]
pub struct Administrator {
    plan: Plan,
    /// Troubles of the time.
    active: Vec<Fault>,
    /// Sizes that are to be.
    goal: Layout,
    /// Not before then is anything tried.
    next: Instant,
    /// Wait before the next change, after those that were refused.
    pause: Duration,
    /// When those whose sessions a change has ended are logged out.
    rest: Instant,
    ledger: Rc<RefCell<Ledger>>,
    model: Rc<Model>,
    /// Files before a change that must be refused, and its kind.
    refused: Option<(Refusal, Files)>,
    /// Initiators that may not log in, and when they must be gone.
    denied: Vec<(usize, Instant)>,
    /// Workers that were asked for their sessions.
    asked: Option<(Receiver<Snapshot>, Vec<Snapshot>)>,
}

/// Lengths of files that a change would create or extend.
type Files = [u64; 2];

fn files(target: &Target) -> Files {
    ["s", "a"].map(|backend| target.disk_of(backend).map_or(0, Disk::len))
}

impl Administrator {
    /// One with nothing to do.
    #[must_use]
    pub fn new(plan: &Plan, ledger: &Rc<RefCell<Ledger>>, model: &Rc<Model>, now: Instant) -> Self {
        Self {
            plan: plan.clone(),
            active: Vec::new(),
            goal: Layout::first(),
            next: now,
            pause: Duration::ZERO,
            rest: now,
            ledger: Rc::clone(ledger),
            model: Rc::clone(model),
            refused: None,
            denied: Vec::new(),
            asked: None,
        }
    }

    /// A trouble begins.
    pub fn on_begin(&mut self, change: AdminFault) {
        match change {
            AdminFault::GrowDisk => self.goal.disk += 1,
            AdminFault::GrowLun => self.goal.side += 1,
            _ => {}
        }
    }

    /// These troubles are there now.
    pub fn follow(&mut self, active: &[Fault]) {
        self.active = active.to_vec();
        self.pause = Duration::ZERO;
    }

    /// The process has gone, and what was asked of it.
    pub fn on_end_of_process(&mut self, target: &Target, now: Instant) {
        // A change that was not taken back may have made a file larger.
        self.goal.side = self.goal.side.max(target.layout.side);
        self.goal.disk = self.goal.disk.max(target.layout.disk);
        let mut ledger = self.ledger.borrow_mut();
        ledger.change(target.layout.seen(), now);
        ledger.settle(now);
        drop(ledger);
        (self.refused, self.asked) = (None, None);
        self.postpone(now);
    }

    /// Those who may not log in have the whole time again.
    fn postpone(&mut self, now: Instant) {
        for (_, due) in &mut self.denied {
            *due = (*due).max(now + LIMIT);
        }
    }

    fn wanted(&self) -> Layout {
        self.goal.with(&self.active, self.plan.paths)
    }

    /// Whether all that is wanted is served.
    fn is_idle(&self, target: &Target) -> bool {
        target.is_free() && target.layout == self.wanted()
    }

    /// Whether all that is wanted is served, and sessions that ended for it are over.
    #[must_use]
    pub fn is_done(&self, target: &Target, now: Instant) -> bool {
        self.is_idle(target) && self.rest <= now
    }

    /// When there is something to do without anything else happening.
    #[must_use]
    pub fn next_deadline(&self, target: &Target, now: Instant) -> Option<Instant> {
        let refuses = |fault: &Fault| matches!(fault, Fault::Admin(AdminFault::Refuse(_)));
        let is_idle = self.is_idle(target) && !self.active.iter().any(refuses);
        let next = (target.is_free() && !is_idle).then_some(self.next);
        let due = self.denied.iter().map(|(_, due)| *due);
        let due = due.min().filter(|_| target.is_free());
        let rest = Some(self.rest).filter(|rest| *rest > now);
        next.into_iter().chain(due).chain(rest).min()
    }

    /// Does what there is to do; returns whether there was anything.
    ///
    /// # Errors
    /// The target is at fault.
    pub fn step(&mut self, target: &mut Target, now: Instant) -> Result<bool, String> {
        self.look_at_sessions(target, now)?;
        match target.go_on(now)? {
            JobStep::Waiting { is_committed: true } => self.on_committed(target, now),
            JobStep::Waiting { .. } => return self.begin(target, now),
            JobStep::Applied => {
                coverage::note("change", "layout", "applied");
                tracing::debug!("all workers serve the change");
                if !target.layout.has_target() {
                    self.model.remove();
                }
                self.settle(now);
            }
            JobStep::Undone(error) => self.on_undone(target, error.as_ref(), now)?,
        }
        Ok(true)
    }

    /// All workers serve it, unless one gets no time.
    fn settle(&self, now: Instant) {
        let is_stalled =
            |fault: &Fault| matches!(fault, Fault::Process(ProcessFault::StallWorker(_)));
        if !self.active.iter().any(is_stalled) {
            self.ledger.borrow_mut().settle(now);
        }
    }

    fn on_committed(&mut self, target: &Target, now: Instant) {
        tracing::debug!(layout = ?target.layout, "a change is served from now on");
        self.ledger.borrow_mut().change(target.layout.seen(), now);
        let ends_sessions = |trouble: &Trouble| match trouble.fault {
            Fault::Admin(change) => !change.is_mild(),
            _ => false,
        };
        if self.plan.troubles.iter().any(ends_sessions) {
            self.rest = now + LIMIT;
        }
        if !target.layout.has_target() {
            // Its units are gone, with all that does not persist through power loss.
            self.ledger.borrow_mut().lose_memory(now);
            self.model.begin_removal();
        }
        self.denied
            .retain(|(index, _)| target.layout.is_denied(*index));
        for index in target.layout.denied() {
            if self.denied.iter().all(|(known, _)| *known != index) {
                self.denied.push((index, now + LIMIT));
            }
        }
    }

    /// Begins the next change, if it is time for one.
    fn begin(&mut self, target: &mut Target, now: Instant) -> Result<bool, String> {
        if !target.is_free() || now < self.next {
            return Ok(false);
        }
        let wanted = self.wanted();
        if target.layout != wanted {
            self.next = now + AGAIN;
            if let Err(error) = target.begin_change(wanted, None, now) {
                self.judge(&error)?;
            }
            return Ok(true);
        }
        let mut refusals = self.active.iter().filter_map(|fault| match fault {
            Fault::Admin(AdminFault::Refuse(refusal)) => Some(*refusal),
            _ => None,
        });
        let Some(refusal) = refusals.next() else {
            return Ok(false);
        };
        // Without its device, a portal is listened on when that is back.
        let has_devices = !self.plan.troubles.iter().any(|t| t.fault.unplugs_target());
        let refusal = match refusal {
            Refusal::RdmaPortal if !has_devices => Refusal::Restart,
            other => other,
        };
        let (layout, refusal) = target.layout.refused(refusal);
        self.refused = Some((refusal, files(target)));
        if let Err(error) = target.begin_change(layout, Some(refusal), now) {
            self.on_undone(target, Some(&error), now)?;
        }
        Ok(true)
    }

    /// Tries the next change later, and the longer it has been like that, the later: preparing one
    /// takes more time than all that goes on meanwhile.
    fn put_off(&mut self, now: Instant) {
        self.pause = (self.pause * 5 / 4).max(REFUSED);
        self.next = self.next.max(now + self.pause);
    }

    /// A change was not applied.
    fn on_undone(
        &mut self,
        target: &Target,
        error: Option<&ChangeError>,
        now: Instant,
    ) -> Result<(), String> {
        self.put_off(now);
        self.ledger.borrow_mut().note(now);
        let Some((refusal, before)) = self.refused.take() else {
            let error = error.ok_or("a change was withdrawn")?;
            return self.judge(error);
        };
        let outcome = error.map_or("withdrawn".to_owned(), ToString::to_string);
        tracing::debug!(?refusal, outcome, "a change is refused");
        coverage::note("change", "layout", "refused");
        let after = files(target);
        if after != before {
            return Err(format!(
                "a change that was refused ({refusal:?}) leaves files of {after:?} bytes, not {before:?}"
            ));
        }
        Ok(())
    }

    /// Whether a change that is to be may have to wait.
    fn judge(&self, error: &ChangeError) -> Result<(), String> {
        coverage::note("change", "layout", "put off");
        tracing::debug!(%error, "a change is put off");
        let passes = match error {
            ChangeError::Server(ServerError::Backend { source, .. }) => {
                matches!(source, OpenError::Locked { .. })
            }
            ChangeError::Server(ServerError::Closing(_)) => true,
            _ => false,
        };
        let mut faults = self.plan.troubles.iter().map(|trouble| trouble.fault);
        let may_fail = faults.any(|fault| {
            matches!(
                fault,
                Fault::Nic(Place::Path(_), _) | Fault::Process(_) | Fault::FailSaves(_)
            )
        });
        match passes || may_fail {
            true => Ok(()),
            false => Err(format!("a change cannot be made: {error}")),
        }
    }

    /// Looks for sessions of initiators that may have none.
    fn look_at_sessions(&mut self, target: &Target, now: Instant) -> Result<(), String> {
        let can_answer = target.is_free() && target.is_whole() && !target.faults.stall();
        if target.faults.stall() || !target.stalled.is_empty() {
            // A session is there as long as the disk has its commands, or its worker gets no time.
            self.postpone(now);
        }
        let Some((answers, mut snapshots)) = self.asked.take() else {
            if can_answer && self.denied.iter().any(|(_, due)| *due <= now) {
                self.asked = Some((target.ask(), Vec::new()));
            }
            return Ok(());
        };
        if !can_answer {
            self.postpone(now);
            return Ok(());
        }
        snapshots.extend(answers.try_iter());
        if snapshots.len() < target.workers() {
            self.asked = Some((answers, snapshots));
            return Ok(());
        }
        for (index, due) in &mut self.denied {
            if *due > now {
                continue;
            }
            *due = now + LIMIT;
            coverage::note("denied", "initiator", "is gone");
            if let Some(peer) = session_of(*index, &snapshots) {
                return Err(format!(
                    "initiator {index} may not log in, and has a session from {peer}"
                ));
            }
        }
        Ok(())
    }
}

/// The address from which an initiator has a session.
fn session_of(index: usize, snapshots: &[Snapshot]) -> Option<IpAddr> {
    let own = (0..initiator::ADDRESSES).map(|n| initiator::address_after(index, n as u8));
    let own: Vec<_> = own.collect();
    let srp = snapshots.iter().flat_map(|one| &one.sessions);
    let iscsi = snapshots.iter().flat_map(|one| &one.iscsi_sessions);
    let peers = srp.map(|one| one.peer.ip());
    let mut peers = peers.chain(iscsi.map(|one| one.peer.ip()));
    peers.find(|peer| own.contains(&peer.to_canonical()))
}
