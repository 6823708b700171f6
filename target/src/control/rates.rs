//! What happened between two moments.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::live::{Live, LiveLun, LiveOp, LiveSession};
use crate::stats::quantile;

/// What the daemon does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// When, in seconds since 1970.
    pub time: f64,
    /// Over how long, in seconds.
    pub seconds: f64,
    /// How long the daemon has served, in seconds.
    pub uptime: f64,
    /// Its version.
    pub version: String,
    /// What is missing that it should serve; nothing if it is ready.
    pub missing: Option<String>,
    /// All commands together.
    pub total: OpRate,
    /// Which part of the time each worker had something to do, from 0 to 1.
    pub busy: Vec<f64>,
    /// Packets sent again, per second.
    pub retransmits: f64,
    /// Logical units.
    pub luns: Vec<LunRate>,
    /// Sessions.
    pub sessions: Vec<SessionRate>,
}

/// Commands of one kind, or of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpRate {
    /// Per second.
    pub commands: f64,
    /// Bytes both ways per second.
    pub bytes: f64,
    /// How long one took on average, in seconds; nothing without any.
    pub mean: Option<f64>,
    /// The time that half of them kept, in seconds; see [`quantile`].
    pub p50: Option<f64>,
    /// The time that 99 % of them kept.
    pub p99: Option<f64>,
}

/// A logical unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LunRate {
    /// The target.
    pub target: String,
    /// Its number.
    pub lun: u16,
    /// Commands under way.
    pub queue_depth: u64,
    /// Commands that failed, per second.
    pub errors: f64,
    /// All commands.
    pub total: OpRate,
    /// Those that read.
    pub read: OpRate,
    /// Those that write.
    pub write: OpRate,
}

/// A session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionRate {
    /// The target.
    pub target: String,
    /// The initiator port.
    pub initiator: String,
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Where the initiator is.
    pub peer: String,
    /// Requests under way.
    pub in_flight: usize,
    /// Commands per second.
    pub commands: f64,
    /// Bytes both ways per second.
    pub bytes: f64,
}

/// How much a sum has grown, in a second.
fn rate(old: u64, new: u64, seconds: f64) -> f64 {
    new.saturating_sub(old) as f64 / seconds
}

/// What happened from `old` to `new`.
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
}
