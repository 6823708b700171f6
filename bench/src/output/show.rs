//! Formats numbers and names for users.

use std::fmt::Write;

/// Maximum number of characters for a name or address in a table.
const LONGEST: usize = 200;

/// Formats a number using at most four digits and a decimal suffix: `950`, `12.3k`, `1.20M`.
pub(super) fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G", "T"], "")
}

/// Formats bytes using binary units: `512 B`, `4.00 KiB`.
pub(super) fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"], "")
}

/// Formats bytes per second using binary units.
pub(super) fn rate(value: f64) -> String {
    scaled(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"], "/s")
}

/// Formats a time in nanoseconds: `950 ns`, `12.3 us`, `1.20 ms`.
pub(super) fn time(nanos: f64) -> String {
    scaled(nanos, 1000.0, &[" ns", " us", " ms", " s"], "")
}

/// Formats a number using three significant digits. Selects the largest unit for which the result
/// is at least 1.
fn scaled(value: f64, step: f64, units: &[&str], suffix: &str) -> String {
    let mut value = value;
    let mut unit = 0;
    // Above this limit, the number would be rounded up to a fourth digit.
    while value.abs() >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = match value.abs() {
        // Only use fractions of the smallest unit if they are significant.
        small if unit == 0 && (small >= 100.0 || small.fract() == 0.0) => 0,
        small if small < 9.995 => 2,
        small if small < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{}{suffix}", units[unit])
}

/// Formats a percentage using one decimal digit.
pub(super) fn percent(fraction: f64) -> String {
    format!("{:.1} %", 100.0 * fraction)
}

/// Formats the name of a percentile: `p50`, `p99.9`.
pub(super) fn percentile(percent: f64) -> String {
    format!("p{percent}")
}

/// Formats untrusted text for a terminal. Control characters are replaced, as these could move the
/// cursor or change colors. Characters that change the text direction are also replaced. Long text
/// is truncated.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == LONGEST {
            shown.push('…');
            break;
        }
        match c {
            c if c.is_control() || is_direction(c) => shown.push('\u{fffd}'),
            c => shown.push(c),
        }
    }
    shown
}

fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Formats options in the same way as a job file, but on a single line.
pub(super) fn options(options: &[(String, String)]) -> String {
    let mut line = String::new();
    for (key, value) in options.iter().filter(|(key, _)| key != "name") {
        let separator = if line.is_empty() { "" } else { " " };
        let _ = match value.as_str() {
            "" => write!(line, "{separator}{key}"),
            value => write!(line, "{separator}{key}={value}"),
        };
    }
    printable(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits() {
        let cases = [(0.0, "0"), (0.25, "0.25"), (7.0, "7"), (950.0, "950")];
        for (value, shown) in cases {
            assert_eq!(count(value), shown);
        }
        assert_eq!(count(999.4), "999");
        assert_eq!(count(999.6), "1.00k");
        assert_eq!(count(12_345.0), "12.3k");
        assert_eq!(count(123_456_789.0), "123M");
        assert_eq!(rate(1536.0 * 1024.0), "1.50 MiB/s");
        assert_eq!(time(1_234.0), "1.23 us");
        assert_eq!(time(99_960.0), "100 us");
        assert_eq!(time(2.5e12), "2500 s");
        assert_eq!(percentile(99.9), "p99.9");
        assert_eq!(percentile(50.0), "p50");
    }

    #[test]
    fn names_are_printable() {
        assert_eq!(
            printable("a\x1b[31mb\nc\u{202e}d"),
            "a\u{fffd}[31mb\u{fffd}c\u{fffd}d"
        );
        assert_eq!(printable(&"x".repeat(300)).chars().count(), LONGEST + 1);
    }

    #[test]
    fn options_use_job_file_format() {
        let pairs = [("name", "x"), ("bs", "4k"), ("time_based", "")];
        let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(options(&pairs), "bs=4k time_based");
    }
}
