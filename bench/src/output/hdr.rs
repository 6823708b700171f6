//! HdrHistogram interval logs (version 1.3). Each histogram is compressed using the V2 encoding,
//! and has a tag for the kind of operation. These logs can be read by `HistogramLogProcessor`,
//! hdr-plot and HistogramLogAnalyzer.
//!
//! The header contains a comment with the disk of each run and the RDMA device used for the
//! connection. Values are in nanoseconds. The column with the maximum is intended for users and in
//! milliseconds.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{
    IntervalLogWriter, IntervalLogWriterBuilder, IntervalLogWriterError, Tag,
};

use super::show;
use super::summary::active;
use crate::outcome::{Interval, OpKind, Outcome};

/// Unit for the maximum column in nanoseconds.
const MAX_VALUE_DIVISOR: f64 = 1e6;

/// Line with the column names.
const LEGEND: &str =
    "\"StartTimestamp\",\"Interval_Length\",\"Interval_Max\",\"Interval_Compressed_Histogram\"";

/// Writes the intervals of all outcomes.
///
/// Tags are `read`, `write`, `trim` and `sync` for latencies measured from the start of an
/// operation. If there are planned arrivals, the suffix `-response` is added for latencies measured
/// from these. If there are multiple outcomes, tags start with the index and name of the outcome:
/// `0.job.read`.
///
/// # Errors
/// Returns errors from `out`.
pub fn write(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    let base = outcomes.iter().map(|o| o.started).min();
    let base = base.unwrap_or(SystemTime::UNIX_EPOCH);
    // The builder requires a sized writer.
    let mut out = out;
    let mut serializer = V2DeflateSerializer::new();
    let mut head = IntervalLogWriterBuilder::new();
    head.add_comment("[Histogram log format version 1.3]")
        .add_comment(&format!("[Logged by riser {}]", env!("CARGO_PKG_VERSION")))
        .add_comment("[Values are nanoseconds, maxima milliseconds]");
    for (run, outcome) in outcomes.iter().enumerate() {
        let disk = show::printable(&outcome.disk());
        head.add_comment(&format!("[Run {run}: {disk}]"));
    }
    head.with_start_time(base)
        .with_base_time(base)
        .begin_log_with(&mut out, &mut serializer)?;
    writeln!(out, "{LEGEND}")?;
    let mut log = IntervalLogWriterBuilder::new()
        .with_max_value_divisor(MAX_VALUE_DIVISOR)
        .begin_log_with(&mut out, &mut serializer)?;
    for (run, outcome) in outcomes.iter().enumerate() {
        let prefix = match outcomes.len() {
            1 => String::new(),
            _ => format!("{run}.{}.", tag_text(&outcome.name)),
        };
        let after = outcome.started.duration_since(base).unwrap_or_default();
        for interval in &outcome.intervals {
            for kind in active(outcome) {
                let start = after + interval.at;
                entries(&mut log, interval, kind, &prefix, start)?;
            }
        }
    }
    Ok(())
}

type Log<'a, 'b, 'c> = IntervalLogWriter<'a, 'b, &'c mut dyn Write, V2DeflateSerializer>;

fn entries(
    log: &mut Log<'_, '_, '_>,
    interval: &Interval,
    kind: OpKind,
    prefix: &str,
    start: Duration,
) -> io::Result<()> {
    // When adding up histograms, readers use the precision of the first one. It must therefore have
    // all digits, even if it's empty.
    let empty = Histogram::new(3).expect("three digits are allowed");
    let measured = &interval.measured[kind as usize];
    let response = measured.response.as_ref().map(|h| ("-response", h));
    for (suffix, histogram) in std::iter::once(("", &measured.service)).chain(response) {
        let text = format!("{prefix}{}{suffix}", kind.name());
        let tag = Tag::new(&text);
        let histogram = if histogram.is_empty() {
            &empty
        } else {
            histogram
        };
        log.write_histogram(histogram, start, interval.length, tag)
            .map_err(|error| match error {
                IntervalLogWriterError::IoError(error) => error,
                IntervalLogWriterError::SerializeError(error) => io::Error::other(error),
            })?;
    }
    Ok(())
}

/// Replaces characters in a name that would terminate the tag or line. As the tag starts with a
/// number, the first character can't be mistaken for a quoted line or a comment.
fn tag_text(name: &str) -> String {
    let allowed = |c: char| !(c == ',' || c.is_whitespace() || c.is_control());
    let replace = |c| if allowed(c) { c } else { '_' };
    name.chars().map(replace).collect()
}

#[cfg(test)]
mod tests {
    use hdrhistogram::Histogram;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::output::sample;

    /// Decodes base64 (RFC 4648 section 4).
    fn decode(text: &str) -> Vec<u8> {
        let value = |c: u8| match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => panic!("no digit of base 64: {c}"),
        };
        let digits: Vec<_> = text.bytes().filter(|c| *c != b'=').map(value).collect();
        let mut bytes = Vec::new();
        for group in digits.chunks(4) {
            let bits = group.iter().fold(0, |bits, d| bits << 6 | u32::from(*d));
            let bits = bits << (6 * (4 - group.len()));
            bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
        }
        bytes
    }

    struct Entry {
        tag: String,
        start: Duration,
        length: Duration,
        histogram: Histogram<u64>,
    }

    fn parse(log: &[u8]) -> Vec<Entry> {
        let mut entries = Vec::new();
        for entry in IntervalLogIterator::new(log) {
            let LogEntry::Interval(interval) = entry.expect("it parses") else {
                continue;
            };
            let bytes = decode(interval.encoded_histogram());
            entries.push(Entry {
                tag: interval.tag().expect("each has a tag").as_str().to_owned(),
                start: interval.start_timestamp(),
                length: interval.duration(),
                histogram: Deserializer::new().deserialize(&mut &bytes[..]).unwrap(),
            });
        }
        entries
    }

    fn written(outcomes: &[Outcome]) -> Vec<u8> {
        let mut log = Vec::new();
        write(&mut log, outcomes).unwrap();
        log
    }

    #[test]
    fn log_contains_all_histograms() {
        let outcome = sample::mixed("a", 1);
        let entries = parse(&written(std::slice::from_ref(&outcome)));
        let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
        let expected = outcome
            .intervals
            .iter()
            .flat_map(|interval| kinds.map(|kind| (interval, kind)));
        assert_eq!(entries.len(), 3 * outcome.intervals.len());
        for (entry, (interval, kind)) in entries.iter().zip(expected) {
            assert_eq!(entry.tag, kind.name());
            assert_eq!((entry.start, entry.length), (interval.at, interval.length));
            assert_eq!(entry.histogram, interval.measured[kind as usize].service);
        }
    }

    #[test]
    fn idle_intervals_keep_histogram_precision() {
        let mut outcome = sample::open_loop("a", 1);
        for idle in [0, 3] {
            let measured = &mut outcome.intervals[idle].measured[0];
            measured.service = Histogram::new(1).unwrap();
            measured.response = Some(Histogram::new(1).unwrap());
        }
        let entries = parse(&written(std::slice::from_ref(&outcome)));
        let mut sum = Histogram::<u64>::new(entries[0].histogram.sigfig()).unwrap();
        for entry in entries.iter().filter(|entry| entry.tag == "read") {
            assert_eq!(entry.histogram.sigfig(), 3);
            sum.add(&entry.histogram).unwrap();
        }
        assert!(entries[0].histogram.is_empty());
        let services = outcome.intervals.iter().map(|i| &i.measured[0].service);
        let max = services.map(Histogram::max).max();
        assert_eq!(Some(sum.max()), max, "a reader that adds up loses nothing");
    }

    #[test]
    fn outcomes_use_separate_tags_and_times() {
        let mut outcomes = [
            sample::open_loop("a, b\n", 1),
            sample::open_loop("a, b\n", 2),
        ];
        outcomes[1].started += Duration::from_secs(60);
        let entries = parse(&written(&outcomes));
        assert_eq!(entries[0].tag, "0.a__b_.read");
        assert_eq!(entries[1].tag, "0.a__b_.read-response");
        let second = &entries[22];
        assert_eq!(second.tag, "1.a__b_.read");
        assert_eq!(second.start, Duration::from_secs(60));
        let response = outcomes[0].intervals[0].measured[0].response.as_ref();
        assert_eq!(Some(&entries[1].histogram), response);
    }

    #[test]
    fn header_contains_format_and_time() {
        let text = String::from_utf8(written(&[sample::mixed("a", 1)])).unwrap();
        let lines: Vec<_> = text.lines().take(8).collect();
        assert_eq!(lines[0], "#[Histogram log format version 1.3]");
        assert!(lines.contains(&"#[BaseTime: 1767323045.000 (seconds since epoch)]"));
        assert!(lines.contains(&LEGEND));
        let shared = Outcome {
            address: "srp://h/0\n".into(),
            device: Some("shm-h".into()),
            ..sample::mixed("a", 1)
        };
        let log = written(&[sample::mixed("a", 1), shared]);
        assert_eq!(parse(&log).len(), 2 * 11 * 3, "comments are skipped");
        let text = String::from_utf8(log).unwrap();
        let mut lines = text.lines();
        assert!(lines.any(|line| line == "#[Run 1: srp://h/0\u{fffd} over shm-h]"));
    }
}
