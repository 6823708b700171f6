//! Log output to standard error, which is usually captured by the service manager. `line`
//! implements the line format.

mod line;

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::OnceLock;

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, reload};

use self::line::{Fields, Line};
use super::events::{Collector, Noteworthy};
use crate::audit;
use crate::config::{Log, LogFormat};

/// Log filter of this process, after the log was started.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Starts the log of this process. `RUST_LOG` overrides the configured filter, but the audit log is
/// only controlled by the configuration.
pub fn start(log: &Log) {
    let (filter, handle) = reload::Layer::new(filter(log));
    let in_journal = is_journal(io::stderr());
    let lines = lines(
        log.format,
        in_journal,
        io::stderr,
        io::stderr().is_terminal(),
    );
    let subscriber = tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(Collector.with_filter(Noteworthy { audit: log.audit }));
    // If the process already has a subscriber, as in tests, we keep it.
    if subscriber.try_init().is_ok() {
        let _ = FILTER.set(handle);
    }
}

/// Replaces the log filter.
pub fn set_filter(log: &Log) {
    if let Some(handle) = FILTER.get()
        && let Err(error) = handle.reload(filter(log))
    {
        tracing::warn!(%error, "cannot replace the log filter");
    }
}

/// Returns true if the filter is set in the environment, which overrides the configured filter.
#[must_use]
pub fn is_filter_overridden() -> bool {
    EnvFilter::try_from_default_env().is_ok()
}

fn filter(log: &Log) -> EnvFilter {
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(&log.filter))
        .expect("checked with the configuration");
    let level = if log.audit { "info" } else { "off" };
    let audit = format!("{}={level}", audit::TARGET);
    filter.add_directive(audit.parse().expect("a directive"))
}

/// Returns the layer that writes lines.
fn lines<W>(
    format: LogFormat,
    in_journal: bool,
    writer: W,
    ansi: bool,
) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => lines
            .with_ansi(ansi)
            .fmt_fields(Fields)
            .map_event_format(|inner| Line { inner, in_journal })
            .boxed(),
        LogFormat::Json => lines
            .json()
            .map_event_format(|inner| Line { inner, in_journal })
            .boxed(),
    }
}

/// Returns true if this descriptor is the journal stream opened by systemd for this process:
/// `JOURNAL_STREAM` contains the device and inode of the stream.
fn is_journal(descriptor: impl AsFd) -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(descriptor)
        .is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, in_journal: bool, log: impl FnOnce()) -> String {
        let buffer = Buffer::default();
        let own = buffer.clone();
        let lines = lines(format, in_journal, move || own.clone(), false);
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, log);
        let bytes = buffer.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn values_are_quoted_where_logfmt_requires() {
        let error = io::Error::from_raw_os_error(28);
        let text = logged(LogFormat::Text, false, || {
            tracing::warn!(
                reason = "logout", peer = %"10.0.0.1:4", %error, n = 3, empty = "",
                hostile = "a\x1b\" x=1\n", no = None::<u64>, "a \"message\"\nof two lines"
            );
        });
        let (_, fields) = text.split_once("logging::tests: ").unwrap();
        assert_eq!(
            fields,
            "a \"message\"\\nof two lines reason=logout peer=10.0.0.1:4 \
             error=\"No space left on device (os error 28)\" n=3 empty=\"\" \
             hostile=\"a\\u{1b}\\\" x=1\\n\"\n"
        );
    }

    #[test]
    fn lines_have_priorities_in_journal() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let log = || {
                tracing::error!("one");
                tracing::warn!("two");
                tracing::info!("three");
                tracing::debug!("four");
            };
            let text = logged(format, true, log);
            let priorities: Vec<_> = text.lines().map(|line| &line[..3]).collect();
            assert_eq!(priorities, ["<3>", "<4>", "<6>", "<7>"]);
            assert!(!logged(format, false, log).contains('<'));
        }
    }
}
