//! A user of the unit whose disk is replaced by the administrator.
//!
//! # Verdict
//! Each disk, identified by the identity it has reported, has its own history: data written to a
//! disk must be found there, and nowhere else. The user only sends one command at a time, because
//! commands that were already sent when a unit changes cannot be protected
//! ([`riser_initiator::unit`]).

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

/// Number of the initiator, which is not used by any other.
pub const NUMBER: usize = 40;

/// Maximum number of commands per session.
const VISIT: u64 = 32;

/// Total number of commands. There are pauses between them, so that a disk is replaced while the
/// user is active.
const COMMANDS: u64 = 100;

/// Maximum pause between two commands in microseconds.
const PAUSE: u64 = 3_000;

/// The identity of a disk, and its history.
type Disk = (Identity, Rc<History>);

/// Histories of all disks.
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

    /// Called when the host of the target has lost power.
    pub fn power_cut(&self) {
        for (_, history) in &*self.0.borrow() {
            history.power_cut();
        }
    }
}

/// Uses the unit until all commands are done, with any disk. `new` creates a history.
pub fn run_workload<N: Fn() -> Rc<History>>(
    initiator: &Initiator,
    user: User,
    disks: Disks,
    (plan, mut rng): (&Plan, Rng),
    new: N,
) -> impl Future<Output = ()> + use<N> {
    let (client, is_dead) = (initiator.client.clone(), Rc::clone(&initiator.is_dead));
    let url = initiator.url.clone().with_lun(Some(SIDE));
    // The first block is used by watchers.
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

/// Opens the unit, retrying until the process is killed.
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
