//! The administrator: applies configuration changes according to the active troubles, tries changes
//! that must be rejected, and checks that denied initiators are disconnected.
//!
//! # Verdict
//! - A change that must be rejected is rejected, and leaves the files and the configuration
//!   unchanged.
//! - Any other change is applied eventually. Before that, it may only be rejected for a temporary
//!   reason: a file that is still in use by commands, or a device that is being closed.
//! - An initiator that was denied access has no session after [`LIMIT`].

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

/// Time after which a denied initiator must not have a session: one second for its logout, the
/// target's timeout for a connection that is not closed, and one more second.
pub const LIMIT: Duration = PATIENCE.saturating_add(Duration::from_secs(1));

/// Delay before a change is retried.
const AGAIN: Duration = Duration::from_millis(20);

/// Delay between changes that must be rejected.
const REFUSED: Duration = Duration::from_millis(4);

/// The administrator.
#[derive(Debug)]
pub struct Administrator {
    plan: Plan,
    /// Active troubles.
    active: Vec<Fault>,
    /// Wanted sizes.
    goal: Layout,
    /// Time of the next attempt.
    next: Instant,
    /// Delay before the next change, after rejected changes.
    pause: Duration,
    /// Time when all initiators have logged out whose sessions were closed by a change.
    rest: Instant,
    ledger: Rc<RefCell<Ledger>>,
    model: Rc<Model>,
    /// Files before a change that must be rejected, and the reason.
    refused: Option<(Refusal, Files)>,
    /// Denied initiators, and the time when they must be disconnected.
    denied: Vec<(usize, Instant)>,
    /// Pending query for the sessions of all workers.
    pending_snapshots: Option<(Receiver<Snapshot>, Vec<Snapshot>)>,
}

/// Sizes of the files that would be created or extended by a change.
type Files = [u64; 2];

fn files(target: &Target) -> Files {
    ["s", "a"].map(|backend| target.disk_of(backend).map_or(0, Disk::len))
}

impl Administrator {
    /// Creates an administrator without pending changes.
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
            pending_snapshots: None,
        }
    }

    /// Called when a trouble starts.
    pub fn on_begin(&mut self, change: AdminFault) {
        match change {
            AdminFault::GrowDisk => self.goal.disk += 1,
            AdminFault::GrowLun => self.goal.side += 1,
            _ => {}
        }
    }

    /// Updates the active troubles.
    pub fn follow(&mut self, active: &[Fault]) {
        self.active = active.to_vec();
        self.pause = Duration::ZERO;
    }

    /// Called when the process has exited, which cancels any pending operation.
    pub fn on_end_of_process(&mut self, target: &Target, now: Instant) {
        // A change that was not reverted may have extended a file.
        self.goal.side = self.goal.side.max(target.layout.side);
        self.goal.disk = self.goal.disk.max(target.layout.disk);
        let mut ledger = self.ledger.borrow_mut();
        ledger.change(target.layout.visible_units(), now);
        ledger.end_periods(now);
        drop(ledger);
        (self.refused, self.pending_snapshots) = (None, None);
        self.postpone(now);
    }

    /// Restarts the timeout for all denied initiators.
    fn postpone(&mut self, now: Instant) {
        for (_, due) in &mut self.denied {
            *due = (*due).max(now + LIMIT);
        }
    }

    fn wanted(&self) -> Layout {
        self.goal.with(&self.active, self.plan.paths)
    }

    /// Returns whether the wanted layout is being served.
    fn is_idle(&self, target: &Target) -> bool {
        target.is_free() && target.layout == self.wanted()
    }

    /// Returns whether the wanted layout is being served and sessions that were closed for it have
    /// been cleaned up.
    #[must_use]
    pub fn is_done(&self, target: &Target, now: Instant) -> bool {
        self.is_idle(target) && self.rest <= now
    }

    /// Returns the time of the next action, unless something else happens before.
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

    /// Performs pending work. Returns whether there was any.
    ///
    /// # Errors
    /// Returns an error if the target misbehaves.
    pub fn step(&mut self, target: &mut Target, now: Instant) -> Result<bool, String> {
        self.look_at_sessions(target, now)?;
        match target.continue_job(now)? {
            JobStep::Waiting { is_committed: true } => self.on_committed(target, now),
            JobStep::Waiting { .. } => return self.begin(target, now),
            JobStep::Applied => {
                coverage::note("change", "layout", "applied");
                tracing::debug!("all workers serve the change");
                if !target.layout.has_target() {
                    self.model.remove();
                }
                self.on_layout_served(now);
            }
            JobStep::Undone(error) => self.on_undone(target, error.as_ref(), now)?,
        }
        Ok(true)
    }

    /// Called when all workers are serving the new layout, unless a worker is stalled.
    fn on_layout_served(&self, now: Instant) {
        let is_stalled =
            |fault: &Fault| matches!(fault, Fault::Process(ProcessFault::StallWorker(_)));
        if !self.active.iter().any(is_stalled) {
            self.ledger.borrow_mut().end_periods(now);
        }
    }

    fn on_committed(&mut self, target: &Target, now: Instant) {
        tracing::debug!(layout = ?target.layout, "a change is served from now on");
        self.ledger
            .borrow_mut()
            .change(target.layout.visible_units(), now);
        let ends_sessions = |trouble: &Trouble| match trouble.fault {
            Fault::Admin(change) => !change.is_mild(),
            _ => false,
        };
        if self.plan.troubles.iter().any(ends_sessions) {
            self.rest = now + LIMIT;
        }
        if !target.layout.has_target() {
            // Its units are removed, with all state that does not persist through power loss.
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

    /// Starts the next change if it is due.
    fn begin(&mut self, target: &mut Target, now: Instant) -> Result<bool, String> {
        if !target.is_free() || now < self.next {
            return Ok(false);
        }
        let wanted = self.wanted();
        if target.layout != wanted {
            self.next = now + AGAIN;
            if let Err(error) = target.begin_change(wanted, None, now) {
                self.check_refusal(&error)?;
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
        // If the device of a portal is missing, the target only listens when it is back.
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

    /// Delays the next change, with exponential backoff: preparing a change takes more time than
    /// everything else in the simulation.
    fn defer_change(&mut self, now: Instant) {
        self.pause = (self.pause * 5 / 4).max(REFUSED);
        self.next = self.next.max(now + self.pause);
    }

    /// Called when a change was not applied.
    fn on_undone(
        &mut self,
        target: &Target,
        error: Option<&ChangeError>,
        now: Instant,
    ) -> Result<(), String> {
        self.defer_change(now);
        self.ledger.borrow_mut().note(now);
        let Some((refusal, before)) = self.refused.take() else {
            let error = error.ok_or("a change was withdrawn")?;
            return self.check_refusal(error);
        };
        let outcome = error.map_or("withdrawn".to_owned(), ToString::to_string);
        tracing::debug!(?refusal, outcome, "a change is refused");
        coverage::note("change", "layout", "refused");
        let after = files(target);
        if after != before {
            return Err(format!(
                "a rejected change ({refusal:?}) leaves files of {after:?} bytes, not {before:?}"
            ));
        }
        Ok(())
    }

    /// Checks that a valid change was only rejected for a temporary reason.
    fn check_refusal(&self, error: &ChangeError) -> Result<(), String> {
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
            false => Err(format!("cannot make a change: {error}")),
        }
    }

    /// Checks that denied initiators don't have a session.
    fn look_at_sessions(&mut self, target: &Target, now: Instant) -> Result<(), String> {
        let can_respond = target.is_free() && target.is_whole() && !target.faults.stall();
        if target.faults.stall() || !target.stalled.is_empty() {
            // A session is not removed while the disk is using its commands or its worker is
            // stalled.
            self.postpone(now);
        }
        let Some((receiver, mut snapshots)) = self.pending_snapshots.take() else {
            if can_respond && self.denied.iter().any(|(_, due)| *due <= now) {
                self.pending_snapshots = Some((target.request_snapshots(), Vec::new()));
            }
            return Ok(());
        };
        if !can_respond {
            self.postpone(now);
            return Ok(());
        }
        snapshots.extend(receiver.try_iter());
        if snapshots.len() < target.workers() {
            self.pending_snapshots = Some((receiver, snapshots));
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

/// Returns the source address of an initiator's session, if any.
fn session_of(index: usize, snapshots: &[Snapshot]) -> Option<IpAddr> {
    let own = (0..initiator::ADDRESSES).map(|n| initiator::address_after(index, n as u8));
    let own: Vec<_> = own.collect();
    let srp = snapshots.iter().flat_map(|one| &one.sessions);
    let iscsi = snapshots.iter().flat_map(|one| &one.iscsi_sessions);
    let peers = srp.map(|one| one.peer.ip());
    let mut peers = peers.chain(iscsi.map(|one| one.peer.ip()));
    peers.find(|peer| own.contains(&peer.to_canonical()))
}
