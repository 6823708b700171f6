//! Curves of the scaling run, with their axes and systems.

use std::sync::LazyLock;

use serde::Deserialize;

use super::stats::Interval;
use super::tables::{self, Text, text, texts};

/// Value shown on the horizontal axis.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
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
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Rule {
    /// Throughput must not fall below this fraction of the previous value.
    Keeps(f64),
    /// The value (where smaller is better) must not exceed this multiple of the previous value.
    Grows(f64),
}

impl Rule {
    pub(super) fn is_broken(self, ratio: Interval) -> bool {
        match self {
            Self::Keeps(share) => ratio.high < share,
            Self::Grows(multiple) => ratio.low > multiple,
        }
    }

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
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Curve {
    /// Name used in the results file and for the chart.
    #[serde(deserialize_with = "text")]
    pub(super) id: Text,
    pub(super) vary: Vary,
    /// Name of the vertical axis.
    #[serde(deserialize_with = "text")]
    pub(super) measure: Text,
    /// Unit used in the table, and the number of axis units it contains.
    pub(super) unit: (String, f64),
    #[serde(deserialize_with = "text")]
    pub(super) title: Text,
    #[serde(deserialize_with = "text")]
    pub(super) axis: Text,
    pub(super) xs: Vec<f64>,
    #[serde(deserialize_with = "texts")]
    pub(super) systems: Vec<Text>,
    /// Maximum cost of a step to the next point.
    pub(super) rule: Rule,
    /// Description of the load.
    #[serde(deserialize_with = "text")]
    pub(super) about: Text,
}

/// Number of operations in flight per session when we use many sessions.
pub(super) const DEPTH_OF_MANY: u32 = 4;

/// Number of operations in flight when we vary the block size.
pub(super) const DEPTH_OF_BLOCKS: u32 = 8;

/// All curves.
pub(super) static CURVES: LazyLock<Vec<Curve>> = LazyLock::new(|| tables::read("curves"));

impl Curve {
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
        for curve in CURVES.iter() {
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
