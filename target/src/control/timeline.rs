//! The last minutes of the daemon: one sample per second for the charts on the status page, so that
//! they have a history after a page reload.
//!
//! The size is bounded: [`KEPT`] samples of all units in total, and the last rates of each unit.

use std::collections::VecDeque;
use std::time::Duration;

use riser_admin_api::live::Live;
use riser_admin_api::rates::{OpRate, Rates, rates};
pub use riser_admin_api::recent::{Recent, Sample, Since};

use super::events;

/// Sample interval.
pub const EVERY: Duration = Duration::from_secs(1);

/// Number of samples to keep, which is ten minutes.
pub const KEPT: usize = 600;

/// Samples of the last minutes.
#[derive(Debug, Default)]
pub struct Timeline {
    last: Option<Live>,
    rates: Rates,
    samples: VecDeque<Sample>,
    /// Number of samples taken.
    count: u64,
}

impl Timeline {
    /// Adds a sample from these counters.
    pub fn add_sample(&mut self, live: Live) {
        // We need two sets of counters to compute rates, so the first set does not create a sample.
        if let Some(last) = &self.last {
            self.rates = rates(last, &live);
            if self.samples.len() == KEPT {
                self.samples.pop_front();
            }
            self.count += 1;
            let number = self.count;
            self.samples.push_back(Sample {
                number,
                ..sample(&self.rates)
            });
        }
        self.last = Some(live);
    }

    /// Returns the samples and events after `since`.
    #[must_use]
    pub fn recent(&self, since: Since) -> Recent {
        let new = self
            .samples
            .iter()
            // We must use the number instead of the time: if the clock is adjusted, a page would
            // get samples twice or not at all.
            .filter(|sample| sample.number > since.sample);
        Recent {
            rates: self.rates.clone(),
            samples: new.cloned().collect(),
            events: events::after(since.event),
        }
    }
}

fn sample(rates: &Rates) -> Sample {
    let sum = |of: fn(&OpRate) -> f64| {
        let luns = rates.luns.iter();
        luns.fold((0.0, 0.0), |(reads, writes), lun| {
            (reads + of(&lun.read), writes + of(&lun.write))
        })
    };
    let (reads, writes) = sum(|op| op.commands);
    let (read_bytes, write_bytes) = sum(|op| op.bytes);
    let luns = || rates.luns.iter();
    Sample {
        number: 0,
        time: rates.time,
        uptime: rates.uptime,
        reads,
        writes,
        // Due to rounding, the difference can be slightly below zero.
        others: (rates.total.commands - reads - writes).max(0.0),
        read_bytes,
        write_bytes,
        p50: rates.total.p50,
        p99: rates.total.p99,
        mean: rates.total.mean,
        queue_depth: luns().map(|lun| lun.queue_depth).sum(),
        errors: luns().map(|lun| lun.errors).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_admin_api::live::{LiveLun, LiveOp};

    fn live(second: u64) -> Live {
        let op = |n: u64| LiveOp {
            commands: n * second,
            bytes: 512 * n * second,
            seconds: 0.0,
            buckets: vec![n * second, 0],
        };
        let ops = [("read", op(3)), ("write", op(2)), ("flush", op(1))];
        Live {
            time: 1000.0 + second as f64,
            uptime: second as f64,
            bounds: vec![0.001],
            luns: vec![LiveLun {
                queue_depth: 4,
                ops: ops.map(|(name, op)| (name.to_owned(), op)).into(),
                ..LiveLun::default()
            }],
            ..Live::default()
        }
    }

    #[test]
    fn last_ten_minutes_are_reported_once() {
        let mut timeline = Timeline::default();
        assert_eq!(timeline.recent(Since::default()).samples, []);
        for second in 0..=2 * KEPT as u64 {
            timeline.add_sample(live(second));
        }
        let all = timeline.recent(Since::default()).samples;
        assert_eq!((all.len(), all[0].number), (KEPT, 601));
        let last = Sample {
            number: 1200,
            time: 2200.0,
            uptime: 1200.0,
            reads: 3.0,
            writes: 2.0,
            others: 1.0,
            read_bytes: 1536.0,
            write_bytes: 1024.0,
            p50: Some(0.0005),
            p99: Some(0.00099),
            mean: Some(0.0),
            queue_depth: 4,
            errors: 0.0,
        };
        let since = |sample| Since { sample, event: 0 };
        assert_eq!(timeline.recent(since(1199)).samples, [last]);
        assert_eq!(timeline.recent(since(1200)).samples, []);
        assert_eq!(timeline.recent(since(1200)).rates.luns.len(), 1);
    }

    #[test]
    fn clock_step_preserves_rates_and_new_samples() {
        for step in [-3600.0, 3600.0] {
            let mut timeline = Timeline::default();
            for second in 0..10 {
                timeline.add_sample(live(second));
            }
            for second in 10..12 {
                let now = live(second);
                let time = now.time + step;
                timeline.add_sample(Live { time, ..now });
            }
            let since = |sample| Since { sample, event: 0 };
            let new = timeline.recent(since(9)).samples;
            let seen: Vec<_> = new.iter().map(|s| (s.number, s.uptime, s.reads)).collect();
            assert_eq!(seen, [(10, 10.0, 3.0), (11, 11.0, 3.0)], "{step}");
        }
    }

    #[test]
    fn late_unit_has_no_earlier_rate() {
        let mut timeline = Timeline::default();
        timeline.add_sample(Live {
            luns: Vec::new(),
            ..live(0)
        });
        timeline.add_sample(live(0));
        let samples = timeline.recent(Since::default()).samples;
        assert!(
            samples.iter().all(|sample| sample.reads == 0.0),
            "{samples:?}"
        );
    }
}
