//! What goes wrong at RDMA devices.

use std::net::IpAddr;
use std::time::Duration;

use fastrand::Rng;
use riser_transport::loopback::{Fabric, Failing};
use riser_transport::roce::nic::Breakage;
use riser_transport::verbs::{Mtu, WcStatus};
use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Trouble};
use crate::text;

/// A device, or the devices of all workers at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// That of a path of the target.
    Path(usize),
    /// That of an initiator.
    Initiator(usize),
}

/// A fault of RDMA devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicFault {
    /// Receives reach their queues this many microseconds late, so peers get RNR NAKs.
    LateReceives(u64),
    /// The queue pair of a connection fails: the first that there is from this number on.
    BreakQp(usize),
    /// A completion queue loses a completion.
    OverrunCq(usize),
    /// A call that takes memory of the system fails, by its number from the beginning of the trouble
    /// on.
    FailCall(usize),
    /// Likewise a completion, with one of [`STATUSES`].
    FailCompletion(usize, usize),
    /// The ways to the device take packets up to this path MTU only.
    Narrow(#[serde(with = "text::mtu")] Mtu),
}

/// Statuses of completions that fail. Some are never those of a receive, which is none of a program's
/// business.
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
    /// Draws the device faults of a seed, given the number of paths and of initiators.
    pub(crate) fn draw(rng: &mut Rng, devices: (usize, usize)) -> Vec<Trouble> {
        let count = [0, 0, 0, 1, 3][rng.usize(..5)];
        (0..count).map(|_| Self::draw_one(rng, devices)).collect()
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

    /// Begins at an address, if it does not last but strikes.
    pub(crate) fn strike(self, at: IpAddr, fabric: &Fabric) {
        match self {
            Self::BreakQp(nth) => fabric.break_one(at, Breakage::Qp, nth),
            Self::OverrunCq(nth) => fabric.break_one(at, Breakage::Cq, nth),
            Self::FailCall(number) => fabric.record(at, Some(Failing::Call(number))),
            Self::FailCompletion(number, status) => {
                let status = STATUSES[status % STATUSES.len()];
                fabric.record(at, Some(Failing::Completion(number, status)));
            }
            Self::LateReceives(_) | Self::Narrow(_) => {}
        }
    }

    /// Whether it fails one thing by its number, so that these are counted.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Self::FailCall(_) | Self::FailCompletion(..))
    }
}

/// Sets what lasts at the address of a place, from the faults that are there now.
pub(crate) fn follow((place, at): (Place, IpAddr), active: &[Fault], fabric: &Fabric) {
    let (mut delay, mut narrow, mut is_broken) = (0, None::<Mtu>, false);

    for fault in active {
        match *fault {
            Fault::Nic(there, fault) if there == place => match fault {
                NicFault::LateReceives(micros) => delay = delay.max(micros),
                NicFault::Narrow(mtu) => narrow = Some(narrow.map_or(mtu, |m| m.min(mtu))),
                NicFault::BreakQp(_) | NicFault::OverrunCq(_) => is_broken = true,
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
    let apart = match place {
        Place::Path(path) => Fault::LosePath(path),
        Place::Initiator(index) => Fault::Partition(index),
    };
    fabric.partition(at, active.contains(&apart));
}
