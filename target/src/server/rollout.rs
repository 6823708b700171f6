//! [`Rollout`]: a change that is applied by all workers. [`RolloutDriver`]: communicates with them.
//!
//! ```text
//!   Staging ─ all have acquired ─▶ Staged ─ commit ─▶ Applying ─ all done, or late ─▶ Applied
//!      │ refused, failed or late      │ withdraw
//!      └──────────▶ Undoing ◀─────────┘
//!                      └── all have released it, or late ──▶ Undone
//! ```
//!
//! The state machine does not do any I/O and has no clock. It returns orders for workers, handles
//! their replies, and is polled with the current time. Until *Staged*, a worker that fails or times
//! out undoes the whole change. After the commit, the change cannot fail: a worker that does not
//! confirm in time will apply the change later.
//!
//! Messages in a mailbox are ordered. Therefore, a worker that replies to [`Order::Confirm`] has
//! executed all previous orders. If it acquires its resources too late, the next message will be
//! the order to release them.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use riser_reactor::{MailSender, SendError};
use riser_state::{State, become_state};

use crate::worker::mail::Mail;
use crate::worker::portals::{Stage, StageError, Unserved};

/// Timeout for all workers to acquire the resources for a change.
const STAGING: Duration = Duration::from_secs(10);

/// Timeout for all workers to confirm that they have applied or undone a change.
const CONFIRMING: Duration = Duration::from_secs(1);

/// State of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutState {
    /// Workers are acquiring their resources, which are not visible.
    Staging,
    /// All resources were acquired, but are not visible.
    Staged,
    /// Workers are applying the change.
    Applying,
    /// The change was applied.
    Applied,
    /// Workers are releasing their resources.
    Undoing,
    /// All resources were released.
    Undone,
}

impl State for RolloutState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Staging => matches!(next, Self::Staged | Self::Undoing),
            Self::Staged => matches!(next, Self::Applying | Self::Undoing),
            Self::Applying => matches!(next, Self::Applied),
            Self::Undoing => matches!(next, Self::Undone),
            Self::Applied | Self::Undone => false,
        }
    }
}

/// Message to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Acquire resources, and reply.
    Stage,
    /// Apply the change.
    Change,
    /// Release resources.
    Unstage,
    /// Reply when all previous orders have been executed.
    Confirm,
}

/// The reason why a change was undone before it was staged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Workers cannot listen on these portals. Each includes the worker index.
    Portals(Vec<(usize, Unserved)>),
    /// A worker has failed in a different way, or does not reply.
    Worker {
        /// Worker index, starting at 0.
        worker: usize,
        /// Human-readable error.
        message: String,
    },
}

/// The state machine for a change: see the module documentation.
#[derive(Debug)]
pub struct Rollout {
    state: RolloutState,
    /// Set for each worker that has to reply.
    awaited: Vec<bool>,
    orders: VecDeque<(usize, Order)>,
    until: Option<Instant>,
    unserved: Vec<(usize, Unserved)>,
    failed: Option<(usize, String)>,
    /// Set if some workers have not applied the change in time.
    is_late: bool,
}

impl Rollout {
    /// Creates a change with resources to be acquired by each worker.
    #[must_use]
    pub fn stage(workers: usize, now: Instant) -> Self {
        let mut rollout = Self::new(RolloutState::Staging, workers);
        rollout.order_all(Order::Stage);
        rollout.await_all(now + STAGING);
        rollout.advance_state();
        rollout
    }

    /// Creates a change without new resources for workers.
    #[must_use]
    pub fn staged(workers: usize) -> Self {
        Self::new(RolloutState::Staged, workers)
    }

    fn new(state: RolloutState, workers: usize) -> Self {
        Self {
            state,
            awaited: vec![false; workers],
            orders: VecDeque::new(),
            until: None,
            unserved: Vec::new(),
            failed: None,
            is_late: false,
        }
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> RolloutState {
        self.state
    }

    /// Returns whether some workers may still be using the old state, although the change was
    /// applied.
    #[must_use]
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    /// Returns whether this is waiting for workers.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        use RolloutState::{Applying, Staging, Undoing};
        matches!(self.state, Staging | Applying | Undoing)
    }

    /// Returns the time at which we stop waiting for workers.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.until.filter(|_| self.is_waiting())
    }

    /// Returns the next order, and the worker index.
    pub fn poll_order(&mut self) -> Option<(usize, Order)> {
        self.orders.pop_front()
    }

    /// Returns the reason if the change was rejected by workers.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        if let Some((worker, message)) = self.failed.clone() {
            return Some(Refusal::Worker { worker, message });
        }
        let portals = self.unserved.clone();
        (!portals.is_empty()).then_some(Refusal::Portals(portals))
    }

    /// Called when a worker replies to [`Order::Stage`]. A late reply is ignored.
    pub fn handle_staged(&mut self, worker: usize, result: Result<(), StageError>, now: Instant) {
        if self.state != RolloutState::Staging || !self.awaited[worker] {
            return;
        }
        self.awaited[worker] = false;
        match result {
            Ok(()) => {}
            // Wait for the remaining workers, so that we can report all missing portals in a single
            // error.
            Err(StageError::Portals(portals)) => {
                let portals = portals.into_iter().map(|portal| (worker, portal));
                self.unserved.extend(portals);
            }
            Err(StageError::Worker(error)) => return self.fail(worker, error.to_string(), now),
        }
        self.advance(now);
    }

    /// Called when a worker replies to [`Order::Confirm`].
    pub fn handle_confirmed(&mut self, worker: usize, now: Instant) {
        if self.state != RolloutState::Staging {
            self.awaited[worker] = false;
            self.advance(now);
        }
    }

    /// Called when a worker has exited. It has no resources.
    pub fn handle_gone(&mut self, worker: usize, now: Instant) {
        match self.state {
            RolloutState::Staging => self.fail(worker, "it does not respond".into(), now),
            _ => self.handle_confirmed(worker, now),
        }
    }

    /// Stops waiting after the deadline.
    pub fn handle_time(&mut self, now: Instant) {
        if self.deadline().is_none_or(|until| until > now) {
            return;
        }
        if self.state == RolloutState::Staging {
            let late = self.awaited.iter().position(|awaited| *awaited);
            return self.fail(late.unwrap_or(0), "it does not respond".into(), now);
        }
        self.is_late |= self.state == RolloutState::Applying;
        self.awaited.fill(false);
        self.advance(now);
    }

    /// Makes the change visible, and lets workers apply it.
    ///
    /// # Panics
    /// Unless it is staged.
    pub fn commit(&mut self, now: Instant) {
        become_state(&mut self.state, RolloutState::Applying);
        self.order_all(Order::Change);
        self.confirm(now);
    }

    /// Cancels the change.
    ///
    /// # Panics
    /// Unless it is staged.
    pub fn withdraw(&mut self, now: Instant) {
        become_state(&mut self.state, RolloutState::Undoing);
        // This is also sent to workers that did not get their order to acquire resources yet, which
        // is harmless.
        self.order_all(Order::Unstage);
        self.confirm(now);
    }

    fn fail(&mut self, worker: usize, message: String, now: Instant) {
        self.failed = Some((worker, message));
        self.withdraw(now);
    }

    /// Continues when all replies were received.
    fn advance(&mut self, now: Instant) {
        if self.awaited.contains(&true) {
            return;
        }
        match self.state {
            RolloutState::Staging if !self.unserved.is_empty() => self.withdraw(now),
            _ => self.advance_state(),
        }
    }

    fn advance_state(&mut self) {
        if self.awaited.contains(&true) {
            return;
        }
        let next = match self.state {
            RolloutState::Staging => RolloutState::Staged,
            RolloutState::Applying => RolloutState::Applied,
            RolloutState::Undoing => RolloutState::Undone,
            RolloutState::Staged | RolloutState::Applied | RolloutState::Undone => return,
        };
        become_state(&mut self.state, next);
    }

    fn order_all(&mut self, order: Order) {
        let all = (0..self.awaited.len()).map(|worker| (worker, order));
        self.orders.extend(all);
    }

    fn confirm(&mut self, now: Instant) {
        self.order_all(Order::Confirm);
        self.await_all(now + CONFIRMING);
        self.advance_state();
    }

    fn await_all(&mut self, until: Instant) {
        self.awaited.fill(true);
        self.until = Some(until);
    }
}

/// Sends the orders of a [`Rollout`] to workers.
#[derive(Debug)]
pub struct RolloutDriver {
    rollout: Rollout,
    senders: Vec<MailSender<Mail>>,
    /// Resources that were not sent yet, by worker.
    parts: Vec<Option<Box<Stage>>>,
    replies: Vec<Option<WorkerReply>>,
    /// An order that could not be sent because the mailbox was full.
    refused: Option<(usize, Order)>,
}

/// A pending reply.
#[derive(Debug)]
enum WorkerReply {
    Staged(Receiver<Result<(), StageError>>),
    Confirmed(Receiver<()>),
}

/// A received reply.
enum WorkerEvent {
    Staged(Result<(), StageError>),
    Confirmed,
}

impl WorkerReply {
    fn poll(&self) -> Result<WorkerEvent, TryRecvError> {
        match self {
            Self::Staged(receiver) => receiver.try_recv().map(WorkerEvent::Staged),
            Self::Confirmed(receiver) => receiver.try_recv().map(|()| WorkerEvent::Confirmed),
        }
    }

    fn wait(&self, time: Duration) -> Result<WorkerEvent, RecvTimeoutError> {
        match self {
            Self::Staged(receiver) => receiver.recv_timeout(time).map(WorkerEvent::Staged),
            Self::Confirmed(receiver) => {
                receiver.recv_timeout(time).map(|()| WorkerEvent::Confirmed)
            }
        }
    }
}

impl RolloutDriver {
    /// Lets each worker acquire its resources.
    #[must_use]
    pub fn stage(senders: Vec<MailSender<Mail>>, parts: Vec<Stage>, now: Instant) -> Self {
        let rollout = Rollout::stage(senders.len(), now);
        let parts = parts.into_iter().map(|part| Some(Box::new(part)));
        Self::new(rollout, senders, parts.collect())
    }

    /// Creates a driver for a change without new resources for workers.
    #[must_use]
    pub fn staged(senders: Vec<MailSender<Mail>>) -> Self {
        Self::new(Rollout::staged(senders.len()), senders, Vec::new())
    }

    fn new(
        rollout: Rollout,
        senders: Vec<MailSender<Mail>>,
        parts: Vec<Option<Box<Stage>>>,
    ) -> Self {
        Self {
            rollout,
            replies: senders.iter().map(|_| None).collect(),
            senders,
            parts,
            refused: None,
        }
    }

    /// Same as [`Rollout::is_late`].
    #[must_use]
    pub fn is_late(&self) -> bool {
        self.rollout.is_late()
    }

    /// Same as [`Rollout::refusal`].
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        self.rollout.refusal()
    }

    /// Same as [`Rollout::deadline`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.rollout.deadline()
    }

    /// Same as [`Rollout::commit`].
    pub fn commit(&mut self, now: Instant) {
        self.rollout.commit(now);
    }

    /// Same as [`Rollout::withdraw`].
    pub fn withdraw(&mut self, now: Instant) {
        self.rollout.withdraw(now);
    }

    /// Sends pending orders and handles pending replies, without waiting.
    pub fn poll(&mut self, now: Instant) -> RolloutState {
        self.advance(now, MailSender::send);
        self.rollout.state()
    }

    /// Waits until all workers have replied or timed out. Must only be used by threads that can
    /// block.
    pub fn wait(&mut self) -> RolloutState {
        loop {
            let now = Instant::now();
            self.advance(now, MailSender::send_blocking);
            let Some(until) = self.rollout.deadline() else {
                return self.rollout.state();
            };
            // Wait for the first worker that has not replied. The remaining replies are checked
            // after that.
            let mut replies = self.replies.iter().enumerate();
            let first = replies.find_map(|(worker, receiver)| Some((worker, receiver.as_ref()?)));
            let (worker, receiver) = first.expect("a pending reply was requested");
            let left = until.saturating_duration_since(Instant::now());
            match receiver.wait(left) {
                Ok(event) => self.handle(worker, Some(event), Instant::now()),
                Err(RecvTimeoutError::Disconnected) => self.handle(worker, None, Instant::now()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Sends orders using `send`, handles replies, and polls the state machine with the current
    /// time.
    fn advance(
        &mut self,
        now: Instant,
        send: impl Fn(&MailSender<Mail>, Mail) -> Result<(), SendError<Mail>>,
    ) {
        loop {
            self.send_orders(now, &send);
            let mut is_new = false;
            for worker in 0..self.replies.len() {
                let event = match self.replies[worker].as_ref().map(WorkerReply::poll) {
                    Some(Ok(event)) => Some(event),
                    Some(Err(TryRecvError::Disconnected)) => None,
                    Some(Err(TryRecvError::Empty)) | None => continue,
                };
                self.handle(worker, event, now);
                is_new = true;
            }
            let before = self.rollout.state();
            self.rollout.handle_time(now);
            // There may be more orders after a reply or a timeout.
            if !is_new && self.rollout.state() == before {
                return;
            }
        }
    }

    /// Handles a worker's reply, or `None` if it has exited.
    fn handle(&mut self, worker: usize, event: Option<WorkerEvent>, now: Instant) {
        self.replies[worker] = None;
        match event {
            Some(WorkerEvent::Staged(result)) => self.rollout.handle_staged(worker, result, now),
            Some(WorkerEvent::Confirmed) => self.rollout.handle_confirmed(worker, now),
            None => self.rollout.handle_gone(worker, now),
        }
    }

    fn send_orders(
        &mut self,
        now: Instant,
        send: &impl Fn(&MailSender<Mail>, Mail) -> Result<(), SendError<Mail>>,
    ) {
        while let Some((worker, order)) = self.refused.take().or_else(|| self.rollout.poll_order())
        {
            let (mail, receiver) = match order {
                Order::Stage => {
                    let (reply, receiver) = channel();
                    let part = self.parts[worker].take().expect("sent once");
                    (
                        Mail::Stage(part, reply),
                        Some(WorkerReply::Staged(receiver)),
                    )
                }
                Order::Confirm => {
                    let (reply, receiver) = channel();
                    (Mail::Ping(reply), Some(WorkerReply::Confirmed(receiver)))
                }
                Order::Change => (Mail::Changed, None),
                Order::Unstage => (Mail::Unstage, None),
            };
            match send(&self.senders[worker], mail) {
                Ok(()) => {
                    if receiver.is_some() {
                        self.replies[worker] = receiver;
                    }
                }
                // Orders must not be reordered, so the next order has to wait too.
                Err(SendError::Full(mail)) => {
                    if let Mail::Stage(part, _) = mail {
                        self.parts[worker] = Some(part);
                    }
                    self.refused = Some((worker, order));
                    return;
                }
                Err(SendError::Closed(_)) => {
                    self.replies[worker] = None;
                    if receiver.is_some() {
                        self.rollout.handle_gone(worker, now);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use riser_reactor::{MailReceiver, Waker, mailbox};
    use riser_state::testing;

    use super::*;
    use crate::worker::WorkerError;

    const ALL: [RolloutState; 6] = [
        RolloutState::Staging,
        RolloutState::Staged,
        RolloutState::Applying,
        RolloutState::Applied,
        RolloutState::Undoing,
        RolloutState::Undone,
    ];

    const MS: Duration = Duration::from_millis(1);

    fn orders(rollout: &mut Rollout) -> Vec<(usize, Order)> {
        std::iter::from_fn(|| rollout.poll_order()).collect()
    }

    fn failure() -> StageError {
        StageError::Worker(WorkerError::NoDevice("10.0.0.1:5555".into()))
    }

    fn unserved(port: u16) -> Unserved {
        Unserved {
            portal: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            why: "it is taken".into(),
        }
    }

    #[test]
    fn transition_table_matches_diagram() {
        let expected = "Staging: Staged Undoing\nStaged: Applying Undoing\nApplying: Applied\n\
                        Applied: \nUndoing: Undone\nUndone: \n";
        assert_eq!(testing::table(&ALL), expected);
    }

    #[test]
    fn transition_coverage_is_complete() {
        testing::assert_all_taken(&ALL, || {
            change_is_staged_before_commit();
            failed_worker_undoes_change();
            staged_change_can_be_withdrawn();
        });
    }

    #[test]
    fn change_is_staged_before_commit() {
        let start = Instant::now();
        let mut rollout = Rollout::stage(2, start);
        assert_eq!(orders(&mut rollout), [(0, Order::Stage), (1, Order::Stage)]);
        assert_eq!(rollout.deadline(), Some(start + STAGING));
        rollout.handle_staged(1, Ok(()), start + MS);
        // A duplicate reply is ignored.
        rollout.handle_staged(1, Ok(()), start + MS);
        assert_eq!(rollout.state(), RolloutState::Staging);
        rollout.handle_staged(0, Ok(()), start + 2 * MS);
        assert_eq!(rollout.state(), RolloutState::Staged);
        assert_eq!((rollout.deadline(), orders(&mut rollout)), (None, vec![]));
        // There is no timeout in this state.
        let commit = start + 10 * STAGING;
        rollout.handle_time(commit);
        rollout.commit(commit);
        let [change, confirm] = [Order::Change, Order::Confirm];
        let expected = [(0, change), (1, change), (0, confirm), (1, confirm)];
        assert_eq!(orders(&mut rollout), expected);
        rollout.handle_confirmed(0, commit + MS);
        // A worker that has not confirmed will apply the change later.
        rollout.handle_time(commit + CONFIRMING - MS);
        assert_eq!(rollout.state(), RolloutState::Applying);
        rollout.handle_time(commit + CONFIRMING);
        assert_eq!(rollout.state(), RolloutState::Applied);
        assert_eq!((rollout.refusal(), rollout.is_late()), (None, true));
    }

    #[test]
    fn failed_worker_undoes_change() {
        let start = Instant::now();
        let mut rollout = Rollout::stage(3, start);
        orders(&mut rollout);
        rollout.handle_staged(0, Ok(()), start);
        rollout.handle_staged(2, Err(failure()), start + MS);
        assert_eq!(rollout.state(), RolloutState::Undoing);
        let expected = [Order::Unstage, Order::Confirm].map(|order| [0, 1, 2].map(|w| (w, order)));
        assert_eq!(orders(&mut rollout), expected.concat());
        // It has acquired its resources in the meantime, and will release them with the next order.
        rollout.handle_staged(1, Ok(()), start + 2 * MS);
        for worker in 0..2 {
            rollout.handle_confirmed(worker, start + 2 * MS);
        }
        assert_eq!(rollout.state(), RolloutState::Undoing);
        rollout.handle_gone(2, start + 3 * MS);
        assert_eq!(rollout.state(), RolloutState::Undone);
        let Some(Refusal::Worker { worker: 2, .. }) = rollout.refusal() else {
            panic!("{:?}", rollout.refusal());
        };
    }

    #[test]
    fn unresponsive_worker_undoes_change() {
        let start = Instant::now();
        let mut rollout = Rollout::stage(2, start);
        rollout.handle_staged(0, Ok(()), start);
        rollout.handle_time(start + STAGING - MS);
        assert_eq!(rollout.state(), RolloutState::Staging);
        rollout.handle_time(start + STAGING);
        let refusal = Refusal::Worker {
            worker: 1,
            message: "it does not respond".into(),
        };
        assert_eq!(rollout.refusal(), Some(refusal));
        assert_eq!(rollout.deadline(), Some(start + STAGING + CONFIRMING));
        rollout.handle_time(start + STAGING + CONFIRMING);
        assert_eq!(rollout.state(), RolloutState::Undone);
    }

    #[test]
    fn rejected_portals_are_reported_together() {
        let start = Instant::now();
        let mut rollout = Rollout::stage(2, start);
        let refused = |port| Err(StageError::Portals(vec![unserved(port)]));
        rollout.handle_staged(1, refused(1), start);
        assert_eq!(rollout.state(), RolloutState::Staging);
        rollout.handle_staged(0, refused(2), start);
        assert_eq!(rollout.state(), RolloutState::Undoing);
        let portals = vec![(1, unserved(1)), (0, unserved(2))];
        assert_eq!(rollout.refusal(), Some(Refusal::Portals(portals)));
    }

    #[test]
    fn staged_change_can_be_withdrawn() {
        let start = Instant::now();
        let mut rollout = Rollout::staged(1);
        rollout.withdraw(start);
        rollout.handle_confirmed(0, start);
        assert_eq!(rollout.state(), RolloutState::Undone);
    }

    #[test]
    fn change_without_workers_is_immediate() {
        let start = Instant::now();
        let mut rollout = Rollout::stage(0, start);
        assert_eq!(rollout.state(), RolloutState::Staged);
        rollout.commit(start);
        assert_eq!(rollout.state(), RolloutState::Applied);
    }

    fn workers<const N: usize>(room: usize) -> (Vec<MailSender<Mail>>, [MailReceiver<Mail>; N]) {
        let mut senders = Vec::new();
        let receivers = std::array::from_fn(|_| {
            let (sender, receiver) = mailbox(room, Waker::simulated());
            senders.push(sender);
            receiver
        });
        (senders, receivers)
    }

    #[test]
    fn polled_driver_does_not_block() {
        let start = Instant::now();
        let (senders, [mut one, mut two]) = workers(1);
        let mut driver = RolloutDriver::staged(senders);
        driver.commit(start);
        assert_eq!(driver.poll(start), RolloutState::Applying);
        let mut confirm = |mails: &mut MailReceiver<Mail>| {
            let Some(Mail::Changed) = mails.poll_message() else {
                panic!("the change comes first");
            };
            driver.poll(start);
            let Some(Mail::Ping(reply)) = mails.poll_message() else {
                panic!("then a question");
            };
            reply.send(()).unwrap();
            driver.poll(start)
        };
        assert_eq!(confirm(&mut one), RolloutState::Applying);
        assert_eq!(confirm(&mut two), RolloutState::Applied);
    }

    #[test]
    fn driver_treats_exited_worker_as_reply() {
        let start = Instant::now();
        let (senders, [one, mut two]) = workers(8);
        drop(one);
        let mut driver = RolloutDriver::staged(senders);
        driver.commit(start);
        driver.poll(start);
        assert!(matches!(two.poll_message(), Some(Mail::Changed)));
        // It exits with the request in its mailbox.
        drop(two);
        assert_eq!(driver.wait(), RolloutState::Applied);
    }
}
