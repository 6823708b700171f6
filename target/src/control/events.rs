//! The last things that happened, as the status page shows them: the audit log, what is not served and is served
//! again, and warnings.
//!
//! A layer of the log collects them, so that everything that is worth a line in the log of an operator is an event
//! without being reported twice. The log belongs to the process, and so do its events.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, Layer};

use crate::audit;
use crate::server::problems;

/// Events that are kept.
pub const KEPT: usize = 200;

/// Bytes of an event's text that are kept; peers choose some of its words.
pub const LONGEST: usize = 400;

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Numbers the events of this process.
    pub number: u64,
    /// When, in seconds since 1970.
    pub time: f64,
    /// `info`, `warn` or `error`.
    pub level: String,
    /// What, and the fields that say more: `session ended reason=logout …`.
    pub text: String,
}

static EVENTS: Mutex<Events> = Mutex::new(Events::new());

/// Those that are kept.
#[derive(Debug)]
struct Events {
    last: VecDeque<Event>,
    count: u64,
}

impl Events {
    const fn new() -> Self {
        Self {
            last: VecDeque::new(),
            count: 0,
        }
    }

    fn push(&mut self, event: Event) {
        self.count += 1;
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        let number = self.count;
        self.last.push_back(Event { number, ..event });
    }

    fn after(&self, number: u64) -> Vec<Event> {
        let new = self.last.iter().filter(|event| event.number > number);
        new.cloned().collect()
    }
}

fn lock() -> MutexGuard<'static, Events> {
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The events after the one with this number, oldest first.
#[must_use]
pub fn after(number: u64) -> Vec<Event> {
    lock().after(number)
}

/// Collects events.
#[derive(Debug)]
pub struct Collector;

impl<S: Subscriber> Layer<S> for Collector {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        lock().push(Event {
            number: 0,
            time: now.unwrap_or_default().as_secs_f64(),
            level: event.metadata().level().as_str().to_ascii_lowercase(),
            text: text.finish(),
        });
    }
}

/// What is collected, whatever else the log shows.
#[derive(Debug)]
pub struct Noteworthy;

fn is_noteworthy(metadata: &Metadata<'_>) -> bool {
    let is_important = *metadata.level() <= Level::WARN;
    let is_told = [audit::TARGET, problems::TARGET];
    metadata.is_event() && (is_important || is_told.contains(&metadata.target()))
}

impl<S> Filter<S> for Noteworthy {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        is_noteworthy(metadata)
    }

    /// Only the place of an event in the code counts, so none is asked about twice.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        match is_noteworthy(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }
}

/// The text of an event: its message, then its fields.
#[derive(Debug, Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            "event" => Ok(()),
            name => write!(self.fields, " {name}={value}"),
        };
    }

    fn finish(mut self) -> String {
        self.message.push_str(&self.fields);
        let mut text = self.message.replace(char::is_control, "?");
        if text.len() > LONGEST {
            let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or(0));
            text.push('…');
        }
        text
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn what_matters_is_kept_up_to_a_bound() {
        let subscriber = tracing_subscriber::registry().with(Collector.with_filter(Noteworthy));
        let texts = tracing::subscriber::with_default(subscriber, || {
            let before = lock().count;
            tracing::info!(target: audit::TARGET, event = "login", peer = %"a\x1bb", "logged in");
            tracing::info!("of no interest");
            tracing::warn!(errno = 28, "a write failed");
            tracing::warn!("{}", "é".repeat(LONGEST));
            let events = after(before);
            // Other tests may log as well, but not here.
            let texts = events.into_iter().map(|event| (event.level, event.text));
            texts.collect::<Vec<_>>()
        });
        let of = |level: &str, text: &str| (level.to_owned(), text.to_owned());
        let long = format!("{}…", "é".repeat(LONGEST / 2));
        let expected = [
            of("info", "logged in peer=a?b"),
            of("warn", "a write failed errno=28"),
            of("warn", &long),
        ];
        assert_eq!(texts, expected);
        let mut events = Events::new();
        for _ in 0..2 * KEPT {
            events.push(Event::default());
        }
        assert_eq!((events.last.len(), events.count), (KEPT, 2 * KEPT as u64));
        let newer: Vec<_> = events
            .after(2 * KEPT as u64 - 2)
            .iter()
            .map(|e| e.number)
            .collect();
        assert_eq!(newer, [399, 400]);
    }
}
