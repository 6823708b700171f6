//! Rates between two moments.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::live::{Live, LiveLun, LiveOp, LiveSession};

/// Rates of the daemon over an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Seconds since 1970, of the later moment.
    pub time: f64,
    /// Over how long, in seconds.
    pub seconds: f64,
    /// Seconds since the daemon began to serve.
    pub uptime: f64,
    /// Version of the daemon.
    pub version: String,
    /// Problems with what it should serve; absent if it is ready.
    pub missing: Option<String>,
    /// Rate of all commands together.
    pub total: OpRate,
    /// Part of the time in which each worker had something to do, from 0 to 1.
    pub busy: Vec<f64>,
    /// Packets sent again, per second.
    pub retransmits: f64,
    /// Rates by logical unit.
    pub luns: Vec<LunRate>,
    /// Rates of each session that was there at both moments.
    pub sessions: Vec<SessionRate>,
}

/// Commands of one kind, or of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpRate {
    /// Commands per second of this kind.
    pub commands: f64,
    /// Bytes both ways per second.
    pub bytes: f64,
    /// Mean duration of one, in seconds; absent without any.
    pub mean: Option<f64>,
    /// The time that half of them kept, in seconds; see [`quantile`].
    pub p50: Option<f64>,
    /// The time that 99 % of them kept.
    pub p99: Option<f64>,
}

/// Rates of a logical unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LunRate {
    /// Name of the target.
    pub target: String,
    /// Logical unit number in the target.
    pub lun: u16,
    /// Number of commands under way.
    pub queue_depth: u64,
    /// Commands that failed, per second.
    pub errors: f64,
    /// Rate of all its commands.
    pub total: OpRate,
    /// Rate of commands that read.
    pub read: OpRate,
    /// Rate of commands that write.
    pub write: OpRate,
}

/// Rates of a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionRate {
    /// Name of the target.
    pub target: String,
    /// Name of the initiator port.
    pub initiator: String,
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Address of the initiator.
    pub peer: String,
    /// Number of requests under way.
    pub in_flight: usize,
    /// Commands per second of the session.
    pub commands: f64,
    /// Bytes both ways per second.
    pub bytes: f64,
}

/// Growth of a sum per second.
fn rate(old: u64, new: u64, seconds: f64) -> f64 {
    new.saturating_sub(old) as f64 / seconds
}

/// Rates between two sets of counters.
#[must_use]
pub fn rates(old: &Live, new: &Live) -> Rates {
    // A daemon that was restarted has counted from zero since.
    let none = Live::default();
    let old = match new.uptime < old.uptime {
        true => &none,
        false => old,
    };
    // Not by the host's clock, which may be set meanwhile.
    let seconds = (new.uptime - old.uptime).max(1e-3);
    let empty = LiveLun::default();
    let mut total = Ops::default();
    let mut luns = Vec::new();
    for lun in &new.luns {
        let same = |l: &&LiveLun| l.target == lun.target && l.lun == lun.lun;
        let before = old.luns.iter().find(same).unwrap_or(&empty);
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
        luns,
        sessions: sessions(old, new, seconds),
    }
}

fn sessions(old: &Live, new: &Live, seconds: f64) -> Vec<SessionRate> {
    let key = |s: &LiveSession| (s.initiator.clone(), s.peer.clone(), s.worker);
    let before: BTreeMap<_, _> = old.sessions.iter().map(|s| (key(s), s)).collect();
    let of = |session: &LiveSession| {
        let sums = before.get(&key(session)).map(|s| (s.commands, s.bytes));
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

/// Commands between two moments.
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

/// The duration that a part of all, from 0 to 1, did not exceed, in the unit of `bounds`; `None`
/// if there are none. `bounds` are those of all buckets but the last. Durations count as spread
/// evenly within a bucket, and those beyond the last bound as equal to it, as Prometheus'
/// `histogram_quantile` has it.
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
