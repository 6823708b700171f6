//! Reports from workers to the run. Since workers never wait, the memory used for pending reports
//! is limited here.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::error::BenchError;
use super::outcome::Verified;
use super::stats::{Measurements, memory};

/// A report from a worker.
pub(super) enum Report {
    /// Index of an interval and its results.
    Measurements(u64, Measurements),
    /// The worker has completed.
    Ended(WorkerReport),
}

/// Final report from a worker.
pub(super) struct WorkerReport {
    /// Time of the last completion.
    pub(super) at: Instant,
    /// Number of verified blocks.
    pub(super) checked: Verified,
    /// Set if the worker was stopped at the end of the run before it reached its amount of work.
    pub(super) is_by_time: bool,
    /// Number of operations that were due before the end, but not started.
    pub(super) not_started: u64,
    pub(super) result: Result<(), BenchError>,
}

/// Creates a channel for reports. Pending results are limited to `limit` bytes, except for a single
/// larger report and for the last report from each worker.
pub(super) fn channel(limit: usize) -> (Reporter, Reports) {
    let (sender, receiver) = mpsc::channel();
    let waiting = Arc::new(AtomicUsize::new(0));
    let reporter = Reporter {
        task: 0,
        limit,
        sender,
        waiting: waiting.clone(),
    };
    (reporter, Reports { receiver, waiting })
}

/// Sends reports from a worker. If the run has failed, reports are ignored because they are no
/// longer received.
#[derive(Clone)]
pub(super) struct Reporter {
    task: usize,
    limit: usize,
    sender: mpsc::Sender<(usize, Report)>,
    waiting: Arc<AtomicUsize>,
}

impl Reporter {
    /// Returns a reporter for a job in the run, using its index.
    pub(super) fn of_task(&self, task: usize) -> Self {
        Self {
            task,
            ..self.clone()
        }
    }

    /// Reports the results of an interval. Returns them if there are too many pending reports.
    pub(super) fn report_interval(
        &self,
        index: u64,
        measurements: Measurements,
    ) -> Option<Measurements> {
        let size = memory(&measurements);
        let before = self.waiting.fetch_add(size, Ordering::Relaxed);
        if before > 0 && before + size > self.limit {
            self.waiting.fetch_sub(size, Ordering::Relaxed);
            return Some(measurements);
        }
        self.send(Report::Measurements(index, measurements));
        None
    }

    /// Reports the last results and the completion of the worker.
    pub(super) fn report_end(&self, last: Option<(u64, Measurements)>, end: WorkerReport) {
        if let Some((index, measurements)) = last {
            let size = memory(&measurements);
            self.waiting.fetch_add(size, Ordering::Relaxed);
            self.send(Report::Measurements(index, measurements));
        }
        self.send(Report::Ended(end));
    }

    fn send(&self, report: Report) {
        let _ = self.sender.send((self.task, report));
    }
}

/// Receives reports from all workers, including the indices of their jobs.
pub(super) struct Reports {
    receiver: mpsc::Receiver<(usize, Report)>,
    waiting: Arc<AtomicUsize>,
}

impl Reports {
    /// Waits for a report.
    ///
    /// # Errors
    /// Fails on timeout, or if all workers have exited.
    pub(super) fn receive(&self, patience: Duration) -> Result<(usize, Report), RecvTimeoutError> {
        let received = self.receiver.recv_timeout(patience)?;
        if let (_, Report::Measurements(_, measurements)) = &received {
            self.waiting
                .fetch_sub(memory(measurements), Ordering::Relaxed);
        }
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::no_measurements;
    use super::*;

    fn index(reports: &Reports) -> Option<u64> {
        match reports.receive(Duration::ZERO) {
            Ok((7, Report::Measurements(index, _))) => Some(index),
            _ => None,
        }
    }

    #[test]
    fn pending_limit_returns_measurements() {
        let measurements = || no_measurements(false);
        let size = memory(&measurements());
        let (reporter, reports) = channel(2 * size);
        let reporter = reporter.of_task(7);
        assert!(reporter.report_interval(0, measurements()).is_none());
        assert!(reporter.report_interval(1, measurements()).is_none());
        assert!(reporter.report_interval(2, measurements()).is_some());
        assert_eq!(index(&reports), Some(0));
        assert!(reporter.report_interval(3, measurements()).is_none());
        let end = WorkerReport {
            at: Instant::now(),
            checked: Verified::default(),
            is_by_time: false,
            not_started: 0,
            result: Ok(()),
        };
        // The last results are never rejected, and previous results are received before them.
        reporter.report_end(Some((4, measurements())), end);
        drop(reporter);
        let received = [(); 3].map(|()| index(&reports));
        assert_eq!(received, [Some(1), Some(3), Some(4)]);
        assert!(matches!(
            reports.receive(Duration::ZERO),
            Ok((7, Report::Ended(_)))
        ));
    }

    #[test]
    fn single_report_may_exceed_limit() {
        let (reporter, _reports) = channel(1);
        assert!(reporter.report_interval(0, no_measurements(true)).is_none());
        assert!(reporter.report_interval(1, no_measurements(true)).is_some());
    }
}
