//! A user of the unit that an administrator exchanges for another disk, and back.
//!
//! # Verdict
//! Each disk has a history of its own, by the identity that it has reported: what was written to
//! one is found there, and nowhere else. The user has one command at a time, since those that were
//! already sent when a unit changes are out of reach ([`riser_initiator::unit`]).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use riser_initiator::engine::{Client, LinkState};
use riser_initiator::lun::Lun;
use riser_initiator::scsi::Identity;
use riser_initiator::url::TargetUrl;
use riser_tests::history::History;

use crate::admin::SIDE;
use crate::initiator::{Initiator, User, pause};
use crate::plan::Plan;

/// Number of the initiator, which no other has.
pub const NUMBER: usize = 40;

/// Most commands of a visit.
const VISIT: u64 = 32;

/// Commands in all, with pauses between them, so that exchanges find the user at work.
const COMMANDS: u64 = 100;

/// Longest pause between two commands, in microseconds.
const PAUSE: u64 = 3_000;

/// A disk, by its identity, and its history.
type Disk = (Identity, Rc<History>);

/// The histories of disks.
#[derive(Clone, Default)]
pub struct Disks(Rc<RefCell<Vec<Disk>>>);

impl fmt::Debug for Disks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Disks")
            .field(&self.0.borrow().len())
            .finish()
    }
}

impl Disks {
    fn of(&self, lun: &Lun, new: impl FnOnce() -> Rc<History>) -> Rc<History> {
        let identity = &lun.info().identity;
        let mut all = self.0.borrow_mut();
        if let Some((_, known)) = all.iter().find(|(known, _)| known == identity) {
            return Rc::clone(known);
        }
        let history = new();
        all.push((identity.clone(), Rc::clone(&history)));
        history
    }

    /// The power of the target's host is gone.
    pub fn power_cut(&self) {
        for (_, history) in &*self.0.borrow() {
            history.power_cut();
        }
    }
}

/// Uses the unit until all commands are done, whichever disk is there. `new` makes a history.
pub fn work<N: Fn() -> Rc<History>>(
    initiator: &Initiator,
    user: User,
    disks: Disks,
    (plan, mut rng): (&Plan, Rng),
    new: N,
) -> impl Future<Output = ()> + use<N> {
    let (client, is_dead) = (initiator.client.clone(), Rc::clone(&initiator.is_dead));
    let url = initiator.url.clone().with_lun(Some(SIDE));
    // The first block is that of watchers.
    let (timeout, longest) = (plan.timeout, plan.longest.min(plan.blocks - 1));
    let (mut left, blocks) = (COMMANDS, plan.blocks);
    async move {
        while left > 0
            && let Some(lun) = open(&client, &url, timeout, &is_dead).await
        {
            let user = User {
                history: disks.of(&lun, &new),
                ..user.clone()
            };
            let visit = left.min(rng.u64(1..=VISIT));
            left -= visit;
            for _ in 0..visit {
                let len = rng.u64(1..=longest);
                let first = rng.u64(1..=blocks - len);
                match rng.u8(..8) {
                    0..4 => drop(user.write(&lun, first..first + len, rng.bool()).await),
                    4 => drop(user.flush(&lun).await),
                    _ => drop(user.read(&lun, first..first + len).await),
                }
                if lun.session().status().link() == LinkState::Closed {
                    break;
                }
                pause(&client, Duration::from_micros(rng.u64(1..=PAUSE))).await;
            }
            lun.session().close().await;
            pause(&client, Duration::from_micros(rng.u64(1..=20_000))).await;
        }
    }
}

/// Opens the unit, however often that fails, until the process dies.
async fn open(
    client: &Client,
    url: &TargetUrl,
    timeout: Duration,
    is_dead: &Cell<bool>,
) -> Option<Lun> {
    while !is_dead.get() {
        if let Ok(session) = client.connect(url.clone()).await {
            match session.lun(SIDE.into()).await {
                Ok(lun) => return Some(lun.with_timeout(timeout)),
                Err(_) => session.close().await,
            }
        }
        pause(client, Duration::from_millis(500)).await;
    }
    None
}
