//! Curves of the scaling run: their axes and systems.

use super::stats::Interval;
use super::systems::{ISCSI, ISER, NBDKIT, SRP};

/// Quantity on the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vary {
    /// Operations of one session in flight.
    Depth,
    /// Sessions at one unit.
    Sessions,
    /// Units, with a session each.
    Units,
    /// Bytes of one operation.
    BlockSize,
    /// Packets lost, in percent.
    Loss,
    /// Arrivals in an open loop, in percent of what a closed loop reaches.
    Share,
    /// Sessions without commands.
    IdleSessions,
}

/// What a step to the next place of a curve may cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    /// At least this share of the throughput is left.
    Keeps(f64),
    /// The figure, of which less is better, is at most this multiple.
    Grows(f64),
}

impl Rule {
    /// Whether a step breaks the rule in all of an interval, that is, by more than noise.
    pub(super) fn is_broken(self, ratio: Interval) -> bool {
        match self {
            Self::Keeps(share) => ratio.high < share,
            Self::Grows(multiple) => ratio.low > multiple,
        }
    }

    /// A sentence for documents.
    pub(super) fn about(self) -> String {
        match self {
            Self::Keeps(share) => {
                let percent = share * 100.0;
                format!("A step to the next place keeps at least {percent:.0} % of the throughput.")
            }
            Self::Grows(multiple) => {
                format!("A step to the next place makes it at most {multiple} times as much.")
            }
        }
    }
}

/// A picture with a line for each system.
#[derive(Debug)]
pub(super) struct Curve {
    /// Name in the results file, and of the picture.
    pub(super) id: &'static str,
    pub(super) vary: Vary,
    pub(super) title: &'static str,
    /// Name of the horizontal axis.
    pub(super) axis: &'static str,
    pub(super) xs: &'static [f64],
    pub(super) systems: &'static [&'static str],
    /// What a step to the next place may cost.
    pub(super) rule: Rule,
    /// Sentences about the load.
    pub(super) about: &'static str,
}

/// Operations in flight of each session, where sessions are many.
pub(super) const DEPTH_OF_MANY: u32 = 4;

/// Operations in flight where the block size varies.
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
        about: "One session with more and more operations in flight.",
    },
    Curve {
        id: "sessions",
        vary: Vary::Sessions,
        title: "4 KiB random reads by sessions at one unit",
        axis: "sessions",
        xs: &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
        systems: &[NBDKIT, SRP, ISCSI],
        // Processes that share the machine's cores.
        rule: Rule::Keeps(0.8),
        about: "Sessions with four operations in flight each, all at one unit; each is a process of \
                `riser`, or a job of fio with a connection of its own.",
    },
    Curve {
        id: "units",
        vary: Vary::Units,
        title: "4 KiB random reads by units with a session each",
        axis: "units",
        xs: &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
        systems: &[SRP, ISCSI],
        rule: Rule::Keeps(0.8),
        about: "The same number of sessions, each at a unit of its own of one target.",
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
        // Of bytes: that operations become fewer as they become longer is no loss.
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
        // Each step loses several times as many packets, and a window is sent again for each.
        rule: Rule::Keeps(0.3),
        about: "The software NIC of the client loses packets that it sends and receives. For this curve, \
                at 0 % as well, it sends packets one by one, so these figures are not comparable \
                with those of the other curves.",
    },
    Curve {
        id: "tail",
        vary: Vary::Share,
        title: "99.9th percentile of the latency, as a multiple of the median, by load",
        axis: "arrivals, in percent of the peak",
        xs: &[10.0, 30.0, 50.0, 70.0],
        systems: &[SRP, ISER, ISCSI],
        rule: Rule::Grows(3.0),
        about: "4 KiB random reads that arrive at random times, whether or not others have ended; each \
                is measured from the time at which it was due. The peak is what a session with 32 \
                operations in flight reaches just before.",
    },
    Curve {
        id: "idle",
        vary: Vary::IdleSessions,
        title: "Processor time of the target with idle sessions",
        axis: "sessions",
        xs: &[1.0, 10.0, 100.0],
        systems: &[SRP, ISCSI],
        // Ten times the sessions, and half of that again.
        rule: Rule::Grows(15.0),
        about: "Sessions that are attached and have no commands; the time is that of all threads of \
                `riserd`.",
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

    /// Unit of its table, and how many of the axis it is.
    pub(super) fn unit(&self) -> (&'static str, f64) {
        match self.vary {
            Vary::BlockSize => ("MB/s", 1e6),
            Vary::Share => ("99.9th percentile / median", 1.0),
            Vary::IdleSessions => ("µs of processor time per second", 1e3),
            Vary::Depth | Vary::Sessions | Vary::Units | Vary::Loss => ("thousands of IOPS", 1e3),
        }
    }

    /// Text of a place on the horizontal axis.
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
    fn curves_name_systems_and_stay_within_the_rig() {
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
    fn sizes_are_short_on_the_axis() {
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
