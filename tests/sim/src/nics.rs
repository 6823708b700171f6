//! Faults of RDMA devices, and disconnected addresses.

use std::net::IpAddr;
use std::time::Duration;

use fastrand::Rng;
use riser_transport::loopback::{Blocked, Fabric, Failing};
use riser_transport::nic::Breakage;
use riser_transport::verbs::{Mtu, WcStatus};
use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Trouble};
use crate::text;

/// A device, or the devices of all workers at one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The devices on a path of the target.
    Path(usize),
    /// The device of an initiator.
    Initiator(usize),
}

/// A fault of an RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicFault {
    /// Receive requests are posted with this delay in microseconds, so peers get RNR NAKs.
    LateReceives(u64),
    /// Fails a queue pair of a connection: the first one with this number or higher.
    BreakQp(usize),
    /// A completion queue loses a completion.
    OverrunCq(usize),
    /// Fails a call that allocates memory. Calls are numbered from the start of the trouble.
    FailCall(usize),
    /// Fails the completion with this number, with one of [`STATUSES`].
    FailCompletion(usize, usize),
    /// Reduces the path MTU to and from this device.
    Narrow(#[serde(with = "text::mtu")] Mtu),
    /// The device's socket is full.
    FullSocket,
    /// A route from the device drops segmented packets.
    Unsegmentable,
    /// Removes the device. An initiator needs a new process when the device is back.
    Unplug,
}

/// Statuses of failed completions. Some of them never occur for receive requests, but a program
/// should not depend on this.
pub const STATUSES: [WcStatus; 8] = [
    WcStatus::WrFlushErr,
    WcStatus::RetryExcErr,
    WcStatus::LocProtErr,
    WcStatus::LocLenErr,
    WcStatus::RemAccessErr,
    WcStatus::RnrRetryExcErr,
    WcStatus::RemOpErr,
    WcStatus::FatalErr,
];

impl NicFault {
    /// Draws the device faults for a seed, with these numbers of paths and initiators.
    pub(crate) fn draw(rng: &mut Rng, devices: (usize, usize)) -> Vec<Trouble> {
        let count = [0, 0, 0, 1, 3][rng.usize(..5)];
        (0..count).map(|_| Self::draw_one(rng, devices)).collect()
    }

    /// Draws more device faults: sockets that are full or drop segmented packets, and devices that
    /// are removed.
    pub(crate) fn draw_more(rng: &mut Rng, (paths, initiators): (usize, usize)) -> Vec<Trouble> {
        let number = [0, 0, 0, 1, 3][rng.usize(..5)];
        let one = |_| {
            let place = Place::draw(rng, (paths, initiators));
            let from = Duration::from_micros(rng.u64(0..100_000));
            let length = [500, 20_000, 2_000_000, 30_000_000][rng.usize(..4)];
            let fault = match rng.u8(..8) {
                0..3 => Self::FullSocket,
                3..5 => Self::Unsegmentable,
                _ => Self::Unplug,
            };
            Trouble {
                from,
                until: from + Duration::from_micros(rng.u64(1..length)),
                fault: Fault::Nic(place, fault),
            }
        };
        (0..number).map(one).collect()
    }

    /// Draws failed completions. `tests/enumerate.rs` tests failed calls one by one.
    pub(crate) fn failures(rng: &mut Rng, (paths, initiators): (usize, usize)) -> Vec<Trouble> {
        let number = [0, 0, 0, 0, 1, 2][rng.usize(..6)];
        let one = |_| {
            let place = Place::draw(rng, (paths, initiators));
            let from = Duration::from_micros(rng.u64(0..60_000));
            let most = [20, 400][rng.usize(..2)];
            let nth = rng.usize(..most);
            let fault = Self::FailCompletion(nth, rng.usize(..STATUSES.len()));
            Trouble {
                from,
                until: from + Duration::from_micros(rng.u64(1..2_000_000)),
                fault: Fault::Nic(place, fault),
            }
        };
        (0..number).map(one).collect()
    }

    fn draw_one(rng: &mut Rng, (paths, initiators): (usize, usize)) -> Trouble {
        let place = match rng.bool() {
            true => Place::Path(rng.usize(..paths)),
            false => Place::Initiator(rng.usize(..initiators)),
        };
        let from = Duration::from_micros(rng.u64(0..100_000));
        let length = [2_000, 200_000, 8_000_000, 60_000_000][rng.usize(..4)];
        let until = from + Duration::from_micros(rng.u64(1..length));
        let fault = match rng.u8(..6) {
            0 | 1 => Self::LateReceives([20, 500, 5_000, 200_000][rng.usize(..4)]),
            2 | 3 => Self::BreakQp(rng.usize(..8)),
            4 => Self::OverrunCq(rng.usize(..8)),
            _ => Self::Narrow([Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024][rng.usize(..3)]),
        };
        let fault = Fault::Nic(place, fault);
        Trouble { from, until, fault }
    }

    /// Applies a fault that only happens once.
    pub(crate) fn strike(self, at: IpAddr, fabric: &Fabric) {
        match self {
            Self::BreakQp(nth) => fabric.break_one(at, Breakage::Qp, nth),
            Self::OverrunCq(nth) => fabric.break_one(at, Breakage::Cq, nth),
            Self::FailCall(number) => fabric.record(at, Some(Failing::Call(number))),
            Self::FailCompletion(number, status) => {
                let status = STATUSES[status % STATUSES.len()];
                fabric.record(at, Some(Failing::Completion(number, status)));
            }
            Self::LateReceives(_)
            | Self::Narrow(_)
            | Self::FullSocket
            | Self::Unsegmentable
            | Self::Unplug => {}
        }
    }

    /// Returns whether this is a fault of a specific call or completion, so these must be counted.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Self::FailCall(_) | Self::FailCompletion(..))
    }
}

impl Place {
    /// Draws a place, with these numbers of paths and initiators.
    pub(crate) fn draw(rng: &mut Rng, (paths, initiators): (usize, usize)) -> Self {
        match rng.bool() {
            true => Self::Path(rng.usize(..paths)),
            false => Self::Initiator(rng.usize(..initiators)),
        }
    }

    /// Returns how this place is disconnected by the active faults.
    pub(crate) fn blocked(self, active: &[Fault]) -> Blocked {
        let mut blocked = Blocked::NONE;
        for fault in active {
            match *fault {
                Fault::LosePath(path) if self == Self::Path(path) => blocked = Blocked::BOTH,
                Fault::Partition(index) if self == Self::Initiator(index) => {
                    blocked = Blocked::BOTH;
                }
                Fault::Deaf(place) if place == self => blocked.inbound = true,
                Fault::Mute(place) if place == self => blocked.outbound = true,
                _ => {}
            }
        }
        blocked
    }
}

/// Applies permanent faults at the address of a place.
pub(crate) fn follow((place, at): (Place, IpAddr), active: &[Fault], fabric: &Fabric) {
    let (mut delay, mut narrow, mut is_broken) = (0, None::<Mtu>, false);
    let (mut is_full, mut is_unsegmentable, mut is_unplugged) = (false, false, false);
    for fault in active {
        match *fault {
            Fault::Nic(there, fault) if there == place => match fault {
                NicFault::LateReceives(micros) => delay = delay.max(micros),
                NicFault::Narrow(mtu) => narrow = Some(narrow.map_or(mtu, |m| m.min(mtu))),
                NicFault::BreakQp(_) | NicFault::OverrunCq(_) => is_broken = true,
                NicFault::FullSocket => is_full = true,
                NicFault::Unsegmentable => is_unsegmentable = true,
                NicFault::Unplug => is_unplugged = true,
                NicFault::FailCall(_) | NicFault::FailCompletion(..) => {}
            },
            _ => {}
        }
    }
    fabric.delay_receives(at, Duration::from_micros(delay));
    fabric.narrow(at, narrow);
    if !is_broken {
        fabric.break_none(at);
    }
    fabric.fill_sockets(at, is_full);
    fabric.refuse_trains(at, is_unsegmentable);
    fabric.partition(at, place.blocked(active));
    match (is_unplugged, fabric.is_unplugged(at)) {
        (true, false) => fabric.unplug(at),
        (false, true) => fabric.plug(at),
        _ => {}
    }
}
