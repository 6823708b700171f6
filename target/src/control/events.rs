//! Recent events for the status page: the audit log, objects that become available or unavailable,
//! and warnings.
//!
//! A layer of the log collects all events, so that everything an operator would see in the log is
//! also an event, and does not need to be reported twice. Like the log, the events are global to
//! the process. Note that events are visible without a login, so we don't include the audit log if
//! it is disabled in the log.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

pub use riser_admin_api::recent::Event;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, Layer};

use crate::audit;
use crate::server::problems;

/// Number of audit log events to keep, and number of other events to keep. These are separate,
/// because initiators can fill up the audit log.
pub const KEPT: usize = 200;

/// Maximum event text length in bytes, because some of the text is controlled by peers.
pub const LONGEST: usize = 400;

static EVENTS: Mutex<Events> = Mutex::new(Events::new());

/// Stored events.
#[derive(Debug)]
struct Events {
    routine: VecDeque<Event>,
    others: VecDeque<Event>,
    count: u64,
}

impl Events {
    const fn new() -> Self {
        Self {
            routine: VecDeque::new(),
            others: VecDeque::new(),
            count: 0,
        }
    }

    fn push(&mut self, event: Event) {
        self.count += 1;
        let last = match event.routine {
            true => &mut self.routine,
            false => &mut self.others,
        };
        if last.len() == KEPT {
            last.pop_front();
        }
        let number = self.count;
        last.push_back(Event { number, ..event });
    }

    fn after(&self, number: u64) -> Vec<Event> {
        let all = self.routine.iter().chain(&self.others);
        let mut new: Vec<_> = all.filter(|event| event.number > number).cloned().collect();
        new.sort_by_key(|event| event.number);
        new
    }
}

fn lock() -> MutexGuard<'static, Events> {
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns all events after the given number, oldest first.
#[must_use]
pub fn after(number: u64) -> Vec<Event> {
    lock().after(number)
}

/// Log layer that collects events.
#[derive(Debug)]
pub struct Collector;

impl<S: Subscriber> Layer<S> for Collector {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let metadata = event.metadata();
        let can_flood = text.names_peer || !is_important(metadata);
        lock().push(Event {
            number: 0,
            time: now.unwrap_or_default().as_secs_f64(),
            level: metadata.level().as_str().to_ascii_lowercase(),
            text: text.finish(),
            routine: metadata.target() == audit::TARGET && can_flood,
        });
    }
}

/// Filter for collected events, which is independent of the log filter.
#[derive(Debug)]
pub struct Noteworthy {
    /// Include the audit log.
    pub audit: bool,
}

fn is_important(metadata: &Metadata<'_>) -> bool {
    *metadata.level() <= Level::WARN
}

impl Noteworthy {
    fn has(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && match metadata.target() {
                audit::TARGET => self.audit,
                problems::TARGET => true,
                _ => is_important(metadata),
            }
    }
}

impl<S> Filter<S> for Noteworthy {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.has(metadata)
    }

    /// The result only depends on the callsite, so it can be cached.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        match self.has(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }
}

/// Event text: the message followed by its fields.
#[derive(Debug, Default)]
struct Text {
    message: String,
    fields: String,
    /// True if it contains a peer name, which means that it was caused by the peer.
    names_peer: bool,
}

impl Text {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            "event" => Ok(()),
            "peer" => {
                self.names_peer = true;
                write!(self.fields, " peer={value}")
            }
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
    fn important_events_are_kept_up_to_limit() {
        let noteworthy = Noteworthy { audit: true };
        let subscriber = tracing_subscriber::registry().with(Collector.with_filter(noteworthy));
        let texts = tracing::subscriber::with_default(subscriber, || {
            let before = lock().count;
            tracing::info!(target: audit::TARGET, event = "login", peer = %"a\x1bb", "logged in");
            tracing::info!("of no interest");
            tracing::warn!(errno = 28, "a write failed");
            tracing::warn!("{}", "é".repeat(LONGEST));
            let events = after(before);
            // Other tests can log as well, but not in this scope.
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
        assert_eq!((events.others.len(), events.count), (KEPT, 2 * KEPT as u64));
        assert_eq!(numbers(&events, 398), [399, 400]);
    }

    fn numbers(events: &Events, after: u64) -> Vec<u64> {
        let events = events.after(after);
        events.iter().map(|event| event.number).collect()
    }

    #[test]
    fn logins_do_not_displace_warnings() {
        let noteworthy = Noteworthy { audit: true };
        let subscriber = tracing_subscriber::registry().with(Collector.with_filter(noteworthy));
        let (before, events) = tracing::subscriber::with_default(subscriber, || {
            let before = lock().count;
            tracing::warn!("not served");
            tracing::info!(target: problems::TARGET, "served again");
            tracing::warn!(target: audit::TARGET, "configuration not applied");
            for _ in 0..2 * KEPT {
                tracing::info!(target: audit::TARGET, "logged in");
                tracing::warn!(target: audit::TARGET, peer = "a", "login denied");
            }
            (before, after(before))
        });
        let first: Vec<_> = events.iter().take(4).map(|e| e.text.as_str()).collect();
        let expected = [
            "not served",
            "served again",
            "configuration not applied",
            "logged in",
        ];
        assert_eq!(first, expected);
        assert_eq!(events.len(), 3 + KEPT);
        assert!(events.is_sorted_by_key(|event| event.number) && events[0].number > before);
    }

    #[test]
    fn disabled_audit_log_adds_no_events() {
        let noteworthy = Noteworthy { audit: false };
        let subscriber = tracing_subscriber::registry().with(Collector.with_filter(noteworthy));
        let texts = tracing::subscriber::with_default(subscriber, || {
            let before = lock().count;
            tracing::info!(target: audit::TARGET, initiator = "me", "logged in");
            tracing::warn!(target: audit::TARGET, who = "uid 1000", "configuration not applied");
            tracing::warn!("a write failed");
            let events = after(before);
            events
                .into_iter()
                .map(|event| event.text)
                .collect::<Vec<_>>()
        });
        assert_eq!(texts, ["a write failed"]);
    }
}
