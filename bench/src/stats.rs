//! Results which are recorded by workers without locks, reported once per interval, and then
//! collected.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::outcome::{Interval, Measured, OpKind};

/// Maximum number of intervals. Beyond this, adjacent intervals are merged.
const MAX_INTERVALS: usize = 3600;

/// Results of an interval or a run, by [`OpKind`].
pub(super) type Measurements = [Measured; 4];

/// Returns results without any operations. As most of these remain unused, the histograms are
/// small.
pub(super) fn no_measurements(is_open_loop: bool) -> Measurements {
    let empty = || Histogram::new(1).expect("one digit is allowed");
    std::array::from_fn(|_| Measured {
        bytes: 0,
        service: empty(),
        response: is_open_loop.then(empty),
    })
}

fn precise(histogram: &mut Histogram<u64>) -> &mut Histogram<u64> {
    if histogram.is_empty() && histogram.sigfig() != 3 {
        // The histogram is resized automatically for longer latencies.
        *histogram = Histogram::new(3).expect("three digits are allowed");
    }
    histogram
}

fn merge_histogram(into: &mut Histogram<u64>, from: Histogram<u64>) {
    if into.is_empty() {
        *into = from;
    } else if !from.is_empty() {
        into.add(from).expect("it grows by itself");
    }
}

fn merge(into: &mut Measurements, from: Measurements) {
    for (into, from) in into.iter_mut().zip(from) {
        into.bytes += from.bytes;
        merge_histogram(&mut into.service, from.service);
        if let (Some(into), Some(from)) = (&mut into.response, from.response) {
            merge_histogram(into, from);
        }
    }
}

/// Returns the memory size of all histograms in bytes.
pub(super) fn memory(measurements: &Measurements) -> usize {
    let counts = |measured: &Measured| {
        let response = measured.response.as_ref();
        measured.service.distinct_values() + response.map_or(0, Histogram::distinct_values)
    };
    8 * measurements.iter().map(counts).sum::<usize>()
}

/// A completed operation.
pub(super) struct Completed {
    pub(super) kind: OpKind,
    pub(super) bytes: u64,
    /// Time since its start.
    pub(super) service: Duration,
    /// Time since its planned arrival.
    pub(super) response: Duration,
    /// Time of completion, relative to the start of the measurement.
    pub(super) at: Duration,
}

/// Records the operations of a worker.
pub(super) struct Recorder {
    is_open_loop: bool,
    interval: Duration,
    /// End of the current interval, relative to the start of the measurement.
    end: Duration,
    index: u64,
    measurements: Measurements,
    is_empty: bool,
}

impl Recorder {
    pub(super) fn new(interval: Duration, is_open_loop: bool) -> Self {
        Self {
            is_open_loop,
            interval,
            end: interval,
            index: 0,
            measurements: no_measurements(is_open_loop),
            is_empty: true,
        }
    }

    /// Records an operation. If this is the first operation in a new interval, returns the index
    /// and results of the previous one.
    pub(super) fn record(&mut self, done: &Completed) -> Option<(u64, Measurements)> {
        let over = if done.at < self.end {
            None
        } else {
            let over = self.take_interval();
            self.index = (done.at.as_nanos() / self.interval.as_nanos()) as u64;
            self.end = self.interval * (self.index as u32 + 1);
            over
        };
        self.is_empty = false;
        let nanos = |time: Duration| time.as_nanos() as u64;
        let measured = &mut self.measurements[done.kind as usize];
        measured.bytes += done.bytes;
        let service = precise(&mut measured.service);
        service
            .record(nanos(done.service))
            .expect("it grows by itself");
        if let Some(response) = &mut measured.response {
            let response = precise(response);
            response
                .record(nanos(done.response))
                .expect("it grows by itself");
        }
        over
    }

    /// Returns the index and results of the current interval, and resets it. Returns `None` if it's
    /// empty.
    pub(super) fn take_interval(&mut self) -> Option<(u64, Measurements)> {
        if std::mem::replace(&mut self.is_empty, true) {
            return None;
        }
        let empty = no_measurements(self.is_open_loop);
        Some((self.index, std::mem::replace(&mut self.measurements, empty)))
    }

    /// Adds results which couldn't be reported to the current interval.
    pub(super) fn restore_interval(&mut self, measurements: Measurements) {
        merge(&mut self.measurements, measurements);
        self.is_empty = false;
    }
}

/// Collects the results from all workers of a job.
pub(super) struct Collector {
    is_open_loop: bool,
    /// Maximum memory size of all intervals in bytes. Beyond this, adjacent intervals are merged.
    max_memory: usize,
    /// Length of the intervals, which is doubled when they are merged.
    length: Duration,
    /// The intervals of workers are shorter by a factor of `2^shift`.
    shift: u32,
    intervals: Vec<Measurements>,
    total: Measurements,
}

impl Collector {
    pub(super) fn new(interval: Duration, is_open_loop: bool, max_memory: usize) -> Self {
        Self {
            is_open_loop,
            max_memory,
            length: interval,
            shift: 0,
            intervals: Vec::new(),
            total: no_measurements(is_open_loop),
        }
    }

    /// Adds the results of a worker for an interval.
    pub(super) fn add(&mut self, index: u64, measurements: Measurements) {
        merge(&mut self.total, measurements.clone());
        while index >> self.shift >= MAX_INTERVALS as u64 || self.is_large() {
            self.merge_neighbours();
        }
        let index = (index >> self.shift) as usize;
        self.grow(index + 1);
        merge(&mut self.intervals[index], measurements);
    }

    fn grow(&mut self, count: usize) {
        let is_open_loop = self.is_open_loop;
        let count = count.max(self.intervals.len());
        self.intervals
            .resize_with(count, || no_measurements(is_open_loop));
    }

    /// Returns whether the memory limit is exceeded and can be reduced by merging.
    fn is_large(&self) -> bool {
        let memory: usize = self.intervals.iter().map(memory).sum();
        self.intervals.len() > 1 && memory > self.max_memory
    }

    fn merge_neighbours(&mut self) {
        let mut intervals = std::mem::take(&mut self.intervals).into_iter();
        while let Some(mut first) = intervals.next() {
            if let Some(second) = intervals.next() {
                merge(&mut first, second);
            }
            self.intervals.push(first);
        }
        self.length *= 2;
        self.shift += 1;
    }

    /// Returns the number of operations and bytes for the given kinds.
    pub(super) fn amount(&self, kinds: &[OpKind]) -> (u64, u64) {
        let all = kinds.iter().map(|kind| &self.total[*kind as usize]);
        all.fold((0, 0), |(ios, bytes), measured| {
            (ios + measured.ios(), bytes + measured.bytes)
        })
    }

    /// Returns the results of the last interval that is complete at `now` (relative to the start of
    /// the measurement). A worker only reports these with its first operation in a later interval,
    /// so this may return the interval before the last. Returns `None` if neither was reported.
    pub(super) fn last(&self, now: Duration) -> Option<(&Measurements, Duration)> {
        let over = (now.as_nanos() / self.length.as_nanos()) as usize;
        let last = over.checked_sub(1)?;
        let measurements = self.intervals.get(last);
        let measurements = measurements.or_else(|| self.intervals.get(last.checked_sub(1)?));
        Some((measurements?, self.length))
    }

    /// Returns the total results and all intervals of a run with this duration.
    pub(super) fn finish(mut self, runtime: Duration) -> (Measurements, Vec<Interval>) {
        let count = |length: Duration| runtime.as_nanos().div_ceil(length.as_nanos()).max(1);
        // The limit also applies to a long run without operations.
        while count(self.length) > MAX_INTERVALS as u128 {
            self.merge_neighbours();
        }
        let count = count(self.length) as usize;
        self.grow(count);
        // If an operation completes exactly at the end, add it to the last interval.
        while self.intervals.len() > count {
            let last = self.intervals.pop().expect("it has more than one");
            merge(&mut self.intervals[count - 1], last);
        }
        let length = self.length;
        let interval = |(index, measured): (usize, Measurements)| {
            let at = length * index as u32;
            Interval {
                at,
                length: length.min(runtime.saturating_sub(at)),
                measured,
            }
        };
        let intervals = self.intervals.into_iter().enumerate().map(interval);
        (self.total, intervals.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn done(millis: u64, micros: u64) -> Completed {
        Completed {
            kind: OpKind::Write,
            bytes: 4096,
            service: Duration::from_micros(micros),
            response: Duration::from_micros(2 * micros),
            at: Duration::from_millis(millis),
        }
    }

    #[test]
    fn later_operation_completes_interval() {
        let mut recorder = Recorder::new(SECOND, true);
        assert!(recorder.record(&done(10, 50)).is_none());
        assert!(recorder.record(&done(999, 70)).is_none());
        let (index, measurements) = recorder.record(&done(3000, 10)).unwrap();
        assert_eq!(index, 0);
        let writes = &measurements[OpKind::Write as usize];
        assert_eq!((writes.ios(), writes.bytes), (2, 8192));
        assert_eq!(writes.service.max() / 1000, 70);
        assert_eq!(writes.response.as_ref().unwrap().max() / 1000, 140);
        assert_eq!(measurements[OpKind::Read as usize].ios(), 0);
        assert_eq!(recorder.take_interval().unwrap().0, 3);
        assert!(recorder.take_interval().is_none());
    }

    const MEMORY: usize = 512 << 20;

    fn collected(count: u64) -> Collector {
        let mut collector = Collector::new(SECOND, false, MEMORY);
        for index in 0..count {
            let mut recorder = Recorder::new(SECOND, false);
            recorder.record(&done(1000 * index, 10 + index % 5));
            let (index, measurements) = recorder.take_interval().unwrap();
            collector.add(index, measurements);
        }
        collector
    }

    #[test]
    fn intervals_are_contiguous_until_end() {
        let mut collector = Collector::new(SECOND, false, MEMORY);
        let mut recorder = Recorder::new(SECOND, false);
        for millis in [100, 3500, 4200] {
            if let Some((index, measurements)) = recorder.record(&done(millis, 10)) {
                collector.add(index, measurements);
            }
        }
        let (index, measurements) = recorder.take_interval().unwrap();
        collector.add(index, measurements);
        let (total, intervals) = collector.finish(Duration::from_millis(4200));
        assert_eq!(total[1].ios(), 3);
        let ios: Vec<_> = intervals.iter().map(|i| i.measured[1].ios()).collect();
        assert_eq!(ios, [1, 0, 0, 1, 1]);
        assert_eq!(intervals[4].at, Duration::from_secs(4));
        assert_eq!(intervals[4].length, Duration::from_millis(200));
    }

    #[test]
    fn completion_at_end_joins_last_interval() {
        let (_, intervals) = collected(3).finish(Duration::from_secs(2));
        let ios: Vec<_> = intervals.iter().map(|i| i.measured[1].ios()).collect();
        assert_eq!(ios, [1, 2]);
    }

    #[test]
    fn interval_limit_merges_adjacent() {
        let (total, intervals) = collected(9000).finish(Duration::from_secs(9000));
        assert_eq!(intervals.len(), 2250);
        assert_eq!(intervals[1].at, Duration::from_secs(4));
        assert!(intervals.iter().all(|i| i.measured[1].ios() == 4));
        assert_eq!(total[1].ios(), 9000);
        let empty = Collector::new(SECOND, false, MEMORY);
        let (_, intervals) = empty.finish(Duration::from_secs(20_000));
        assert!(intervals.len() <= MAX_INTERVALS, "{}", intervals.len());
    }

    #[test]
    fn operations_and_bytes_are_counted_by_kind() {
        let collector = collected(3);
        let both = [OpKind::Read, OpKind::Write];
        assert_eq!(collector.amount(&both), (3, 3 * 4096));
        assert_eq!(collector.amount(&[OpKind::Trim]), (0, 0));
    }

    #[test]
    fn progress_shows_last_complete_interval() {
        let collector = collected(3);
        let ios = |now| {
            collector
                .last(now)
                .map(|(measurements, _)| measurements[1].ios())
        };
        assert_eq!(ios(Duration::from_millis(500)), None);
        assert_eq!(ios(Duration::from_millis(2500)), Some(1));
        // The fourth interval may not be reported yet. But we must not show an idle device as busy.
        assert_eq!(ios(Duration::from_millis(4500)), Some(1));
        assert_eq!(ios(Duration::from_millis(5500)), None);
    }

    #[test]
    fn memory_limit_merges_adjacent() {
        let one = memory(collected(1).last(SECOND).unwrap().0);
        let mut collector = Collector::new(SECOND, false, 10 * one);
        let mut recorder = Recorder::new(SECOND, false);
        for second in 0..100 {
            if let Some((index, measurements)) = recorder.record(&done(1000 * second, 10)) {
                collector.add(index, measurements);
            }
        }
        assert!(collector.intervals.len() <= 12);
        let (total, intervals) = collector.finish(Duration::from_secs(100));
        assert_eq!(total[1].ios(), 99);
        assert!(intervals[0].length > SECOND);
        // A single interval is always allowed.
        let mut least = Collector::new(SECOND, false, 0);
        for index in 0..3 {
            least.add(index, no_measurements(false));
        }
        assert!(least.intervals.len() <= 2, "{}", least.intervals.len());
    }

    #[test]
    fn returned_measurements_join_current_interval() {
        let mut recorder = Recorder::new(SECOND, true);
        assert!(recorder.record(&done(10, 50)).is_none());
        let (_, measurements) = recorder.record(&done(1010, 60)).unwrap();
        recorder.restore_interval(measurements);
        let (index, measurements) = recorder.take_interval().unwrap();
        assert_eq!((index, measurements[1].ios()), (1, 2));
    }
}
