//! Curves of the scaling run, with their axes and systems.

use super::stats::Interval;
use super::systems::{ISCSI, ISER, NBDKIT, SRP};

/// Value shown on the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vary {
    /// Number of operations in flight, using a single session.
    Depth,
    /// Number of sessions to the same unit.
    Sessions,
    /// Number of units, using one session per unit.
    Units,
    /// Size of an operation in bytes.
    BlockSize,
    /// Packet loss in percent.
    Loss,
    /// Arrival rate of an open loop, in percent of the maximum rate of a closed loop.
    Share,
    /// Number of idle sessions.
    IdleSessions,
}

/// Maximum cost of a step to the next point of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    /// Throughput must not fall below this fraction of the previous value.
    Keeps(f64),
    /// The value (where smaller is better) must not exceed this multiple of the previous value.
    Grows(f64),
}

impl Rule {
    /// Returns true if the whole interval violates the rule, so that this can't be noise.
    pub(super) fn is_broken(self, ratio: Interval) -> bool {
        match self {
            Self::Keeps(share) => ratio.high < share,
            Self::Grows(multiple) => ratio.low > multiple,
        }
    }

    /// Returns a sentence for use in documents.
    pub(super) fn about(self) -> String {
        match self {
            Self::Keeps(share) => {
                let percent = share * 100.0;
                format!("A step to the next point keeps at least {percent:.0} % of the throughput.")
            }
            Self::Grows(multiple) => {
                format!("A step to the next point makes it at most {multiple} times as much.")
            }
        }
    }
}

/// A chart with a line for each system.
#[derive(Debug)]
pub(super) struct Curve {
    /// Name used in the results file and for the chart.
    pub(super) id: &'static str,
    pub(super) vary: Vary,
    pub(super) title: &'static str,
    /// Name of the horizontal axis.
    pub(super) axis: &'static str,
    pub(super) xs: &'static [f64],
    pub(super) systems: &'static [&'static str],
    /// Maximum cost of a step to the next point.
    pub(super) rule: Rule,
    /// Description of the load.
    pub(super) about: &'static str,
}

/// Number of operations in flight per session when we use many sessions.
pub(super) const DEPTH_OF_MANY: u32 = 4;

/// Number of operations in flight when we vary the block size.
pub(super) const DEPTH_OF_BLOCKS: u32 = 8;

pub(super) const CURVES: &[Curve] = &[
    Curve {
        id: "depth",
        vary: Vary::Depth,
        title: "4 KiB random reads by depth",
        axis: "operations in flight",
        xs: &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0],
        systems: &[NBDKIT, SRP, ISER, ISCSI],
        rule: Rule::Keeps(0.9),
        about: "One session with an increasing number of operations in flight.",
    },
    Curve {
        id: "sessions",
        vary: Vary::Sessions,
        title: "4 KiB random reads by sessions at one unit",
        axis: "sessions",
        xs: &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
        systems: &[NBDKIT, SRP, ISCSI],
        // These processes have to share the CPU cores of this machine.
        rule: Rule::Keeps(0.8),
        about: "Sessions with four operations in flight each, all at one unit; each is a process of \
                `riser`, or a job of fio with a separate connection.",
    },
    Curve {
        id: "units",
        vary: Vary::Units,
        title: "4 KiB random reads by units with a session each",
        axis: "units",
        xs: &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
        systems: &[SRP, ISCSI],
        rule: Rule::Keeps(0.8),
        about: "The same number of sessions, each at a separate unit of one target.",
    },
    Curve {
        id: "block-size",
        vary: Vary::BlockSize,
        title: "Random reads by block size, depth 8",
        axis: "bytes of an operation",
        xs: &[
            512.0,
            4096.0,
            16_384.0,
            65_536.0,
            131_072.0,
            262_144.0,
            1_048_576.0,
            4_194_304.0,
        ],
        systems: &[NBDKIT, SRP, ISER, ISCSI],
        // Based on bytes: if operations are larger, we expect fewer of them.
        rule: Rule::Keeps(0.8),
        about: "One session with eight operations in flight.",
    },
    Curve {
        id: "loss",
        vary: Vary::Loss,
        title: "4 KiB random reads at depth 32 by loss",
        axis: "packets lost in each direction, in percent",
        xs: &[0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0],
        systems: &[SRP, ISER],
        // Each step loses several times as many packets, and every loss requires us to send a whole
        // window again.
        rule: Rule::Keeps(0.3),
        about: "The software NIC of the client drops sent and received packets. For this curve, \
                including 0 %, it sends packets one by one, so these results are not comparable with \
                the other curves.",
    },
    Curve {
        id: "tail",
        vary: Vary::Share,
        title: "99.9th percentile of the latency, as a multiple of the median, by load",
        axis: "arrivals, in percent of the peak",
        xs: &[10.0, 30.0, 50.0, 70.0],
        systems: &[SRP, ISER, ISCSI],
        rule: Rule::Grows(3.0),
        about: "4 KiB random reads that arrive at random times, regardless of the completion of \
                previous reads; each is measured from its scheduled time. The peak is the throughput \
                of a session with 32 operations in flight, measured just before.",
    },
    Curve {
        id: "idle",
        vary: Vary::IdleSessions,
        title: "Processor time of the target with idle sessions",
        axis: "sessions",
        xs: &[1.0, 10.0, 100.0],
        systems: &[SRP, ISCSI],
        // With ten times as many sessions, we allow for another half.
        rule: Rule::Grows(15.0),
        about: "Attached sessions without commands; the time includes all threads of `riserd`.",
    },
];

impl Curve {
    /// Name of the vertical axis.
    pub(super) fn measure(&self) -> &'static str {
        match self.vary {
            Vary::BlockSize => "bytes per second",
            Vary::Share => "99.9th percentile / median",
            Vary::IdleSessions => "ns of processor time per second",
            Vary::Depth | Vary::Sessions | Vary::Units | Vary::Loss => "IOPS",
        }
    }

    /// Returns the unit used in the table, and the number of axis units it contains.
    pub(super) fn unit(&self) -> (&'static str, f64) {
        match self.vary {
            Vary::BlockSize => ("MB/s", 1e6),
            Vary::Share => ("99.9th percentile / median", 1.0),
            Vary::IdleSessions => ("µs of processor time per second", 1e3),
            Vary::Depth | Vary::Sessions | Vary::Units | Vary::Loss => ("thousands of IOPS", 1e3),
        }
    }

    /// Formats a point on the horizontal axis.
    pub(super) fn label(&self, x: f64) -> String {
        let bytes = x as u64;
        match self.vary {
            Vary::BlockSize if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
            Vary::BlockSize if bytes >= 1 << 10 => format!("{}K", bytes >> 10),
            _ => x.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rig::MAX_UNITS;
    use super::super::systems;
    use super::*;

    #[test]
    fn curves_use_known_systems() {
        for curve in CURVES {
            let all = curve.systems.iter().all(|id| systems::named(id).is_some());
            assert!(all, "{curve:?}");
            assert!(curve.xs.is_sorted(), "{curve:?}");
        }
        let units = CURVES
            .iter()
            .find(|curve| curve.vary == Vary::Units)
            .unwrap();
        assert!(units.xs.iter().all(|x| *x as usize <= MAX_UNITS));
    }

    #[test]
    fn axis_sizes_are_abbreviated() {
        let of = |id| CURVES.iter().find(|curve| curve.id == id).unwrap();
        let sizes = of("block-size")
            .xs
            .iter()
            .map(|x| of("block-size").label(*x));
        assert_eq!(
            sizes.collect::<Vec<_>>().join(" "),
            "512 4K 16K 64K 128K 256K 1M 4M"
        );
        assert_eq!(of("loss").label(0.01), "0.01");
    }
}
