//! Reports of workers to the run that has started them. Workers never wait, so the memory of what
//! the run has not yet taken is limited here.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::error::BenchError;
use super::outcome::Verified;
use super::stats::{Figures, memory};

/// Report of a worker.
pub(super) enum Report {
    /// Figures of an interval, with its number.
    Figures(u64, Figures),
    /// It is over.
    Ended(End),
}

/// End of a worker.
pub(super) struct End {
    /// Time of its last completion.
    pub(super) at: Instant,
    /// Data that were checked.
    pub(super) checked: Verified,
    /// The time of the run ended it, and not the amount of work.
    pub(super) is_by_time: bool,
    /// Operations whose planned time came before the end, and that had not started then.
    pub(super) not_started: u64,
    pub(super) result: Result<(), BenchError>,
}

/// A channel of reports, of which figures that wait have at most `limit` bytes: but for one report
/// that is larger, and for the last ones of the workers.
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

/// Sends the reports of a worker. They are without effect once the run has failed, when nothing
/// receives them any longer.
#[derive(Clone)]
pub(super) struct Reporter {
    task: usize,
    limit: usize,
    sender: mpsc::Sender<(usize, Report)>,
    waiting: Arc<AtomicUsize>,
}

impl Reporter {
    /// The same for a job of the run, by its number.
    pub(super) fn of_task(&self, task: usize) -> Self {
        Self {
            task,
            ..self.clone()
        }
    }

    /// Reports the figures of an interval. Returns them while too many wait.
    pub(super) fn figures(&self, index: u64, figures: Figures) -> Option<Figures> {
        let size = memory(&figures);
        let before = self.waiting.fetch_add(size, Ordering::Relaxed);
        if before > 0 && before + size > self.limit {
            self.waiting.fetch_sub(size, Ordering::Relaxed);
            return Some(figures);
        }
        self.send(Report::Figures(index, figures));
        None
    }

    /// Reports the last figures and the end.
    pub(super) fn end(&self, last: Option<(u64, Figures)>, end: End) {
        if let Some((index, figures)) = last {
            let size = memory(&figures);
            self.waiting.fetch_add(size, Ordering::Relaxed);
            self.send(Report::Figures(index, figures));
        }
        self.send(Report::Ended(end));
    }

    fn send(&self, report: Report) {
        let _ = self.sender.send((self.task, report));
    }
}

/// Receives the reports of all workers, each with the number of its job.
pub(super) struct Reports {
    receiver: mpsc::Receiver<(usize, Report)>,
    waiting: Arc<AtomicUsize>,
}

impl Reports {
    /// Waits for a report.
    ///
    /// # Errors
    /// The time is over, or all workers are.
    pub(super) fn receive(&self, patience: Duration) -> Result<(usize, Report), RecvTimeoutError> {
        let received = self.receiver.recv_timeout(patience)?;
        if let (_, Report::Figures(_, figures)) = &received {
            self.waiting.fetch_sub(memory(figures), Ordering::Relaxed);
        }
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::no_figures;
    use super::*;

    fn index(reports: &Reports) -> Option<u64> {
        match reports.receive(Duration::ZERO) {
            Ok((7, Report::Figures(index, _))) => Some(index),
            _ => None,
        }
    }

    #[test]
    fn figures_come_back_while_too_many_wait() {
        let figures = || no_figures(false);
        let size = memory(&figures());
        let (reporter, reports) = channel(2 * size);
        let reporter = reporter.of_task(7);
        assert!(reporter.figures(0, figures()).is_none());
        assert!(reporter.figures(1, figures()).is_none());
        assert!(reporter.figures(2, figures()).is_some());
        assert_eq!(index(&reports), Some(0));
        assert!(reporter.figures(3, figures()).is_none());
        let end = End {
            at: Instant::now(),
            checked: Verified::default(),
            is_by_time: false,
            not_started: 0,
            result: Ok(()),
        };
        // The last ones are never given back, and what there is is received first.
        reporter.end(Some((4, figures())), end);
        drop(reporter);
        let received = [(); 3].map(|()| index(&reports));
        assert_eq!(received, [Some(1), Some(3), Some(4)]);
        assert!(matches!(
            reports.receive(Duration::ZERO),
            Ok((7, Report::Ended(_)))
        ));
    }

    #[test]
    fn one_report_that_is_larger_than_the_limit_passes() {
        let (reporter, _reports) = channel(1);
        assert!(reporter.figures(0, no_figures(true)).is_none());
        assert!(reporter.figures(1, no_figures(true)).is_some());
    }
}
