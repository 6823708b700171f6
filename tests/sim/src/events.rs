//! The last events of a run: actions of initiators, faults, and logs of the programs.
//!
//! Events are recorded through [`tracing`], so there is no cost unless [`record`] is used.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{MakeWriter, layer};
use tracing_subscriber::layer::SubscriberExt as _;

thread_local! {
    /// Virtual time of the run in this thread.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Sets the time for the following events.
pub(crate) fn set_time(now: Duration) {
    NOW.set(now);
}

/// Returns the time of the run.
pub(crate) fn now() -> Duration {
    NOW.get()
}

struct VirtualTime;

impl FormatTime for VirtualTime {
    fn format_time(&self, to: &mut Writer<'_>) -> fmt::Result {
        write!(to, "{:>12.6}", NOW.get().as_secs_f64())
    }
}

/// The last lines written to the log.
#[derive(Clone)]
struct Lines {
    last: Arc<Mutex<VecDeque<String>>>,
    most: usize,
}

impl Write for Lines {
    /// `write` is called once for each event.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() >= self.most {
            last.pop_front();
        }
        last.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// Calls a function and also returns its last events. These are selected by `RUST_LOG`; by default,
/// we record the simulator and the usual logs of the programs.
pub fn record<T>(most: usize, f: impl FnOnce() -> T) -> (T, Vec<String>) {
    let lines = Lines {
        last: Arc::default(),
        most,
    };
    let format = layer()
        .with_ansi(false)
        .with_timer(VirtualTime)
        .with_writer(lines.clone());
    let usual = Targets::new()
        .with_default(LevelFilter::INFO)
        .with_target("riser_sim", Level::TRACE);
    let filter = std::env::var("RUST_LOG").ok();
    let wanted = filter
        .and_then(|filter| filter.parse().ok())
        .unwrap_or(usual);
    let subscriber = tracing_subscriber::registry().with(wanted).with(format);
    let result = tracing::subscriber::with_default(subscriber, f);
    let mut last = lines.last.lock().unwrap_or_else(PoisonError::into_inner);
    (result, last.drain(..).collect())
}
