//! Log line format.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Line format, including the priority if it is written to the journal (sd-daemon(3)).
pub(super) struct Line<F> {
    /// Format of the line itself.
    pub(super) inner: F,
    /// True if the line is written to the journal.
    pub(super) in_journal: bool,
}

impl<S, N, F> FormatEvent<S, N> for Line<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if self.in_journal {
            write!(writer, "<{}>", priority(*event.metadata().level()))?;
        }
        self.inner.format_event(context, writer, event)
    }
}

/// Returns the syslog priority for a level (syslog(3)).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Field format: logfmt, so that values are quoted if they are not a single word.
pub(super) struct Fields;

impl<'w> FormatFields<'w> for Fields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut visitor = FieldVisitor {
            writer,
            is_first: true,
            result: Ok(()),
        };
        fields.record(&mut visitor);
        visitor.result
    }
}

struct FieldVisitor<'w> {
    writer: Writer<'w>,
    is_first: bool,
    result: fmt::Result,
}

impl FieldVisitor<'_> {
    fn write(&mut self, field: &Field, value: &str) -> fmt::Result {
        if !std::mem::take(&mut self.is_first) {
            self.writer.write_char(' ')?;
        }
        match field.name() {
            "message" => write_message(&mut self.writer, value),
            name if is_word(value) => write!(self.writer, "{name}={value}"),
            name => write!(self.writer, "{name}={value:?}"),
        }
    }
}

fn is_word(value: &str) -> bool {
    let separates = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '=');
    !value.is_empty() && !value.contains(separates)
}

/// Writes a message on a single line, because it can contain names chosen by peers.
fn write_message(writer: &mut Writer<'_>, text: &str) -> fmt::Result {
    for c in text.chars() {
        match c.is_control() {
            true => write!(writer, "{}", c.escape_debug())?,
            false => writer.write_char(c)?,
        }
    }
    Ok(())
}

impl Visit for FieldVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if self.result.is_ok() {
            self.result = self.write(field, value);
        }
    }
}
