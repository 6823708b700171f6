//! The log of a test.

use std::cell::RefCell;
use std::io;
use std::sync::Once;

thread_local! {
    /// Log lines of a test.
    static LINES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Writes log lines of the current thread.
struct Lines;

impl io::Write for Lines {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        LINES.with_borrow_mut(|lines| lines.extend_from_slice(text));
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs a function and returns its log. We use a global subscriber, because the first use of an
/// event in another thread without a subscriber could disable it for all threads.
pub(crate) fn log_of(run: impl FnOnce()) -> String {
    static LOG: Once = Once::new();
    LOG.call_once(|| {
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| Lines)
            .init();
    });
    LINES.take();
    run();
    String::from_utf8(LINES.take()).unwrap()
}
