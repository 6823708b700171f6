//! Rates between two points in time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::live::{Live, LiveLun, LiveOp};
use crate::view::{SessionView, count_nexuses};

/// Rates of the daemon over an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// End of the interval in seconds since 1970.
    pub time: f64,
    /// Interval length in seconds.
    pub seconds: f64,
    /// Uptime of the daemon in seconds.
    pub uptime: f64,
    /// Version of the daemon.
    pub version: String,
    /// Problems with configured objects. Not set if the daemon is ready.
    pub missing: Option<String>,
    /// Rate for all commands.
    pub total: OpRate,
    /// Busy time of each worker as a fraction, from 0 to 1.
    pub busy: Vec<f64>,
    /// Retransmitted packets per second.
    pub retransmits: f64,
    /// Current number of I_T nexuses.
    #[serde(default)]
    pub nexuses: usize,
    /// Rates by logical unit.
    pub luns: Vec<LunRate>,
    /// Rates of current connections. All connections of a session on the same worker have the rates
    /// of the session on this worker.
    pub sessions: Vec<SessionRate>,
}

/// Rates for a command type, or for all commands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpRate {
    /// Commands per second.
    pub commands: f64,
    /// Bytes per second in both directions.
    pub bytes: f64,
    /// Average latency in seconds; not set without commands.
    pub mean: Option<f64>,
    /// Median latency in seconds; see [`quantile`].
    pub p50: Option<f64>,
    /// 99th percentile latency in seconds.
    pub p99: Option<f64>,
}

/// Rates of a logical unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LunRate {
    /// Target name.
    pub target: String,
    /// Logical unit number.
    pub lun: u16,
    /// Commands in flight.
    pub queue_depth: u64,
    /// Failed commands per second.
    pub errors: f64,
    /// Rate for all commands.
    pub total: OpRate,
    /// Rate for read commands.
    pub read: OpRate,
    /// Rate for write commands.
    pub write: OpRate,
}

/// Rates of a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionRate {
    /// Target name.
    pub target: String,
    /// Initiator port name.
    pub initiator: String,
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Initiator address.
    pub peer: String,
    /// Requests in flight.
    pub in_flight: usize,
    /// Commands per second.
    pub commands: f64,
    /// Bytes per second in both directions.
    pub bytes: f64,
}

/// Returns the rate per second between two values of a counter.
fn rate(old: u64, new: u64, seconds: f64) -> f64 {
    new.saturating_sub(old) as f64 / seconds
}

/// Returns the rates between two sets of counters.
#[must_use]
pub fn rates(old: &Live, new: &Live) -> Rates {
    // After a restart, the counters start at zero.
    let none = Live::default();
    let old = match new.uptime < old.uptime {
        true => &none,
        false => old,
    };
    // We cannot use the host's clock, because it could have been adjusted.
    let seconds = (new.uptime - old.uptime).max(1e-3);
    let empty = LiveLun::default();
    let mut total = Ops::default();
    let mut luns = Vec::new();
    // There can be thousands of units, and the daemon computes rates every second.
    let before = old.luns.iter().map(|lun| ((&*lun.target, lun.lun), lun));
    let before: BTreeMap<_, _> = before.collect();
    for lun in &new.luns {
        let before = before.get(&(&*lun.target, lun.lun)).copied();
        let before = before.unwrap_or(&empty);
        let of = |name: &str| Ops::between(before.ops.get(name), lun.ops.get(name));
        let mut all = Ops::default();
        for name in lun.ops.keys() {
            all.add(&of(name));
        }
        total.add(&all);
        let rate_of = |ops: &Ops| ops.rate(&new.bounds, seconds);
        luns.push(LunRate {
            target: lun.target.clone(),
            lun: lun.lun,
            queue_depth: lun.queue_depth,
            errors: rate(before.errors, lun.errors, seconds),
            total: rate_of(&all),
            read: rate_of(&of("read")),
            write: rate_of(&of("write")),
        });
    }
    let workers = new.workers.iter().map(|worker| {
        let before = old.workers.iter().find(|w| w.worker == worker.worker);
        let (busy, ran) = before.map_or((0.0, 0.0), |w| (w.busy, w.ran));
        ((worker.busy - busy) / (worker.ran - ran).max(1e-6)).clamp(0.0, 1.0)
    });
    let (was, is) = (&old.network, &new.network);
    Rates {
        time: new.time,
        seconds,
        uptime: new.uptime,
        version: new.version.clone(),
        missing: new.missing.clone(),
        total: total.rate(&new.bounds, seconds),
        busy: workers.collect(),
        retransmits: rate(was.retransmits, is.retransmits, seconds),
        nexuses: count_nexuses(&new.sessions),
        luns,
        sessions: sessions(old, new, seconds),
    }
}

/// Returns the target, initiator port and worker of a connection, which have the same counters for
/// all of their connections.
fn account_of(session: &SessionView) -> (&str, &str, u16) {
    (&session.target, &session.initiator, session.worker)
}

fn sessions(old: &Live, new: &Live, seconds: f64) -> Vec<SessionRate> {
    let before: BTreeMap<_, _> = old.sessions.iter().map(|s| (account_of(s), s)).collect();
    let of = |session: &SessionView| {
        let before = before.get(&account_of(session));
        let sums = before.map(|s| (s.commands, s.bytes));
        let (commands, bytes) = sums.unwrap_or_default();
        SessionRate {
            target: session.target.clone(),
            initiator: session.initiator.clone(),
            protocol: session.protocol.clone(),
            peer: session.peer.clone(),
            in_flight: session.in_flight,
            commands: rate(commands, session.commands, seconds),
            bytes: rate(bytes, session.bytes, seconds),
        }
    };
    new.sessions.iter().map(of).collect()
}

/// Commands between two points in time.
#[derive(Default)]
struct Ops {
    commands: u64,
    bytes: u64,
    seconds: f64,
    buckets: Vec<u64>,
}

impl Ops {
    fn between(old: Option<&LiveOp>, new: Option<&LiveOp>) -> Self {
        let Some(new) = new else {
            return Self::default();
        };
        let none = LiveOp::default();
        let old = old.unwrap_or(&none);
        let before = old.buckets.iter().chain(std::iter::repeat(&0));
        let buckets = new.buckets.iter().zip(before);
        Self {
            commands: new.commands.saturating_sub(old.commands),
            bytes: new.bytes.saturating_sub(old.bytes),
            seconds: (new.seconds - old.seconds).max(0.0),
            buckets: buckets.map(|(n, o)| n.saturating_sub(*o)).collect(),
        }
    }

    fn add(&mut self, other: &Self) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        if self.buckets.len() < other.buckets.len() {
            self.buckets.resize(other.buckets.len(), 0);
        }
        for (sum, n) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += n;
        }
    }

    fn rate(&self, bounds: &[f64], seconds: f64) -> OpRate {
        let n = self.commands as f64;
        OpRate {
            commands: n / seconds,
            bytes: self.bytes as f64 / seconds,
            mean: (self.commands > 0).then(|| self.seconds / n),
            p50: quantile(&self.buckets, bounds, 0.5),
            p99: quantile(&self.buckets, bounds, 0.99),
        }
    }
}

/// Returns a quantile of the durations, where `part` is from 0 to 1, in the unit of `bounds`.
/// Returns `None` if there are no durations. `bounds` contains the upper bounds of all buckets
/// except for the last. As in Prometheus' `histogram_quantile`, we assume that values are evenly
/// distributed within a bucket, and values above the last bound are treated as equal to it.
#[must_use]
pub fn quantile(buckets: &[u64], bounds: &[f64], part: f64) -> Option<f64> {
    let all: u64 = buckets.iter().sum();
    let wanted = all as f64 * part;
    let mut below = 0.0;
    for (bucket, n) in buckets.iter().enumerate().filter(|(_, n)| **n > 0) {
        let n = *n as f64;
        if below + n >= wanted {
            let Some(high) = bounds.get(bucket) else {
                break;
            };
            let low = bucket.checked_sub(1).map_or(0.0, |before| bounds[before]);
            return Some(low + (high - low) * (wanted - below) / n);
        }
        below += n;
    }
    bounds.last().copied().filter(|_| all > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(uptime: f64, commands: u64, buckets: &[u64]) -> Live {
        let op = LiveOp {
            commands,
            bytes: commands * 4096,
            seconds: commands as f64 * 0.001,
            buckets: buckets.to_vec(),
        };
        Live {
            time: 1e9 + uptime,
            uptime,
            bounds: vec![0.001, 0.002, 0.004],
            luns: vec![LiveLun {
                target: "t".into(),
                ops: BTreeMap::from([("read".to_owned(), op)]),
                ..LiveLun::default()
            }],
            ..Live::default()
        }
    }

    #[test]
    fn rates_are_differences_by_time() {
        let (old, new) = (
            live(10.0, 100, &[100, 0, 0, 0]),
            live(12.0, 300, &[200, 98, 2, 0]),
        );
        let rates = rates(&old, &new);
        let read = &rates.luns[0].read;
        assert_eq!((read.commands, read.bytes), (100.0, 409_600.0));
        assert_eq!((read.p50, read.p99), (Some(0.001), Some(0.002)));
        assert!((read.mean.unwrap() - 0.001).abs() < 1e-9);
        assert_eq!(rates.total, *read);
        assert_eq!(rates.luns[0].write, OpRate::default());
    }

    /// A channel of a Linux host has no port, so its connections to all targets have the same peer.
    #[test]
    fn targets_of_port_have_separate_rates() {
        let sessions = |counts: [(&str, u64); 2]| {
            let session = |(target, commands): (&str, u64)| SessionView {
                target: target.to_owned(),
                initiator: "port".to_owned(),
                peer: "192.0.2.1:0".to_owned(),
                commands,
                ..SessionView::default()
            };
            counts.map(session).to_vec()
        };
        let live = |uptime, counts| Live {
            uptime,
            sessions: sessions(counts),
            ..Live::default()
        };
        let rates = rates(
            &live(1.0, [("a", 5000), ("b", 10)]),
            &live(2.0, [("a", 5100), ("b", 11)]),
        );
        let found: Vec<_> = rates.sessions.iter().map(|s| s.commands).collect();
        assert_eq!(found, [100.0, 1.0]);
    }

    /// Each connection reports the commands of the whole session on its worker.
    #[test]
    fn new_connection_has_rate_of_session() {
        let session = |peer: &str, commands| SessionView {
            initiator: "port".to_owned(),
            peer: peer.to_owned(),
            commands,
            ..SessionView::default()
        };
        let live = |uptime, sessions| Live {
            uptime,
            sessions,
            ..Live::default()
        };
        let rates = rates(
            &live(1.0, vec![session("a", 5000)]),
            &live(2.0, vec![session("a", 5100), session("b", 5100)]),
        );
        let found: Vec<_> = rates.sessions.iter().map(|s| s.commands).collect();
        assert_eq!(found, [100.0, 100.0]);
    }

    #[test]
    fn a_daemon_that_was_restarted_begins_again() {
        let (old, new) = (
            live(10.0, 100, &[100, 0, 0, 0]),
            live(2.0, 400, &[400, 0, 0, 0]),
        );
        assert_eq!(rates(&old, &new).total.commands, 200.0);
    }

    #[test]
    fn a_step_of_the_clock_changes_no_rate() {
        let (old, new) = (
            live(10.0, 100, &[100, 0, 0, 0]),
            live(12.0, 300, &[300, 0, 0, 0]),
        );
        for step in [-3600.0, 3600.0] {
            let time = new.time + step;
            let new = Live {
                time,
                ..new.clone()
            };
            assert_eq!(rates(&old, &new).total.commands, 100.0, "{step}");
        }
    }

    #[test]
    fn a_quantile_lies_within_its_bucket_as_prometheus_has_it() {
        let bounds = [0.001, 0.002, 0.004];
        let of = |buckets: &[u64], part| quantile(buckets, &bounds, part);
        assert_eq!(of(&[0; 4], 0.5), None);
        for (buckets, part, expected) in [
            ([4, 0, 0, 0], 0.5, 0.0005),
            ([4, 0, 0, 0], 1.0, 0.001),
            ([2, 2, 0, 0], 0.75, 0.0015),
            ([2, 0, 2, 0], 0.5, 0.001),
            ([0, 0, 100, 0], 0.99, 0.00398),
            ([1, 0, 0, 99], 0.99, 0.004),
        ] {
            let found = of(&buckets, part).unwrap();
            assert!(
                (found - expected).abs() < 1e-9,
                "{buckets:?} {part}: {found}"
            );
        }
    }
}
