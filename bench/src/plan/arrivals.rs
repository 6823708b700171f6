//! Planned arrivals of operations (open loop).

use std::time::Duration;

use fastrand::Rng;

use crate::job::{Job, Rate, RateProcess};
use crate::outcome::OpKind;

/// Planned arrivals for the operations of a clone. They don't depend on the latency, so a slow
/// operation doesn't hide the delay of later ones.
pub(crate) struct Arrivals {
    process: RateProcess,
    random: Rng,
    streams: Vec<Stream>,
}

/// Operations of one kind.
struct Stream {
    kind: OpKind,
    rate: Rate,
    /// Mean size of an operation in bytes.
    size: u64,
    /// Arrival of the next operation, in seconds since the start.
    due: f64,
}

impl Arrivals {
    /// Creates planned arrivals for a job, or returns `None` if it doesn't have a rate. `phase` is
    /// between 0 and 1 and distributes the first arrivals of clones over one interval.
    pub(crate) fn new(job: &Job, phase: f64, mut random: Rng) -> Option<Self> {
        let mut streams = Vec::new();
        for kind in job.access.planned() {
            let Some(rate) = job.rate_of(*kind) else {
                continue;
            };
            let gap = gap(rate, job.sizes_of(*kind).min().into());
            let due = match job.rate_process {
                RateProcess::Linear => gap * phase,
                RateProcess::Poisson => exponential(gap, &mut random),
            };
            streams.push(Stream {
                kind: *kind,
                rate,
                size: job.sizes_of(*kind).mean(),
                due,
            });
        }
        (!streams.is_empty()).then_some(Self {
            process: job.rate_process,
            random,
            streams,
        })
    }

    /// Returns the kind and the arrival of the next operation, relative to the start.
    pub(crate) fn peek(&self) -> (OpKind, Duration) {
        let stream = &self.streams[self.first()];
        (stream.kind, Duration::from_secs_f64(stream.due.min(1e9)))
    }

    /// Plans the next operation after the caller has started one of this length in bytes.
    pub(crate) fn advance(&mut self, len: u64) {
        let first = self.first();
        let stream = &mut self.streams[first];
        let gap = gap(stream.rate, len);
        stream.due += match self.process {
            RateProcess::Linear => gap,
            RateProcess::Poisson => exponential(gap, &mut self.random),
        };
    }

    /// Returns the number of operations which are due before `until` (relative to the start) and
    /// have not been started. This is the mean if times or sizes are random.
    pub(crate) fn before(&self, until: Duration) -> u64 {
        let until = until.as_secs_f64();
        let due = self.streams.iter().filter(|stream| stream.due < until);
        let count = due.map(|stream| {
            let gaps = (until - stream.due) / gap(stream.rate, stream.size);
            match self.process {
                RateProcess::Linear => gaps.ceil() as u64,
                RateProcess::Poisson => (1.0 + gaps) as u64,
            }
        });
        count.fold(0, u64::saturating_add)
    }

    fn first(&self) -> usize {
        let due = |index: &usize| self.streams[*index].due;
        let first = (0..self.streams.len()).min_by(|a, b| due(a).total_cmp(&due(b)));
        first.expect("there is a stream")
    }
}

/// Returns the mean interval in seconds after an operation of `len` bytes.
fn gap(rate: Rate, len: u64) -> f64 {
    match rate {
        Rate::Iops(n) => 1.0 / n as f64,
        Rate::Bytes(n) => len as f64 / n as f64,
    }
}

fn exponential(mean: f64, random: &mut Rng) -> f64 {
    -mean * (1.0 - random.f64()).ln()
}

#[cfg(test)]
mod tests {
    use super::super::super::job::Access;
    use super::*;

    fn arrivals(rates: [Option<Rate>; 3], process: RateProcess) -> Arrivals {
        let job = Job {
            access: Access::Mixed,
            rates,
            rate_process: process,
            ..Job::default()
        };
        Arrivals::new(&job, 0.0, Rng::with_seed(5)).unwrap()
    }

    fn times(arrivals: &mut Arrivals, count: usize) -> Vec<(OpKind, Duration)> {
        let next = |_| {
            let next = arrivals.peek();
            arrivals.advance(8192);
            next
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn linear_arrivals_match_rate() {
        let read = [Some(Rate::Iops(1000)), None, None];
        let due: Vec<_> = times(&mut arrivals(read, RateProcess::Linear), 1001);
        let error = due[1000].1.abs_diff(Duration::from_secs(1));
        assert!(error < Duration::from_micros(1), "{error:?}");
        let bytes = [Some(Rate::Bytes(819_200)), None, None];
        let due = times(&mut arrivals(bytes, RateProcess::Linear), 101);
        assert!(due[100].1.abs_diff(Duration::from_secs(1)) < Duration::from_micros(1));
    }

    #[test]
    fn directions_have_separate_rates() {
        let rates = [Some(Rate::Iops(300)), Some(Rate::Iops(100)), None];
        let due = times(&mut arrivals(rates, RateProcess::Linear), 400);
        let writes = due
            .iter()
            .filter(|(kind, _)| *kind == OpKind::Write)
            .count();
        assert!((99..=101).contains(&writes), "{writes}");
        assert!(due.windows(2).all(|w| w[0].1 <= w[1].1));
    }

    #[test]
    fn poisson_arrivals_are_exponentially_distributed() {
        let rates = [Some(Rate::Iops(1000)), None, None];
        let due = times(&mut arrivals(rates, RateProcess::Poisson), 50_001);
        let gaps: Vec<f64> = due
            .windows(2)
            .map(|w| (w[1].1 - w[0].1).as_secs_f64())
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let spread = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // For an exponential distribution, both are the inverse of the rate.
        assert!((mean * 1000.0 - 1.0).abs() < 0.02, "{mean}");
        assert!((spread.sqrt() * 1000.0 - 1.0).abs() < 0.04, "{spread}");
        let long = gaps.iter().filter(|g| **g > mean).count() as f64 / gaps.len() as f64;
        assert!((long - (-1.0_f64).exp()).abs() < 0.02, "{long}");
    }

    #[test]
    fn due_operations_are_counted() {
        let rates = [Some(Rate::Iops(1000)), Some(Rate::Bytes(4_096_000)), None];
        let mut arrivals = arrivals(rates, RateProcess::Linear);
        let half = Duration::from_micros(500);
        assert_eq!(arrivals.before(Duration::ZERO), 0);
        assert_eq!(arrivals.before(half), 2);
        assert_eq!(arrivals.before(Duration::from_millis(10) + half), 22);
        for _ in 0..5 {
            let (kind, _) = arrivals.peek();
            arrivals.advance(if kind == OpKind::Read { 1 } else { 4096 });
        }
        assert_eq!(arrivals.before(Duration::from_millis(10) + half), 17);
        assert_eq!(arrivals.before(half), 0);
    }

    #[test]
    fn job_without_rate_has_no_arrivals() {
        assert!(Arrivals::new(&Job::default(), 0.0, Rng::with_seed(1)).is_none());
    }
}
