//! Parses sizes and durations as written by users, with the same rules for configurations and the
//! command line: a decimal number that can be a fraction, followed by an optional unit. A value
//! must be exact. If it would have to be rounded, we return an error.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Maximum duration, so that adding a few durations to the current time will never overflow.
const MAX_DURATION: Duration = Duration::from_secs(366 * 86_400);

/// Parses a size in bytes: `1048576`, `512KiB`, `1.5 GiB`, `2TB`. K and KiB are 1024 bytes, KB is
/// 1000. Units are not case-sensitive.
///
/// # Errors
/// Returns an error message if the format is invalid, if the value is not an integer number of
/// bytes, or if it's 2^64 bytes or more.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let unit: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(no_size(text)),
    };
    match multiply(number, unit) {
        Ok(bytes) => Ok(bytes),
        Err(Inexact::Form) => Err(no_size(text)),
        Err(Inexact::Fraction) => Err(format!("`{text}` is not a whole number of bytes")),
        Err(Inexact::Range) => Err(format!("`{text}` is not a size of less than 2^64 bytes")),
    }
}

fn no_size(text: &str) -> String {
    format!("`{text}` is not a size; write bytes or a number with KiB, MiB, GiB, TiB or KB to TB")
}

/// Formats a size using the largest unit that doesn't need a fraction. This can be parsed by
/// [`parse_size`].
#[must_use]
pub fn show_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let mut whole = units
        .iter()
        .filter(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    match whole.next() {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Parses a duration of up to one year: `500ms`, `2s`, `1.5m`, `1h`. A number without a unit is in
/// seconds.
///
/// # Errors
/// Returns an error message if the format is invalid, if the value is not an integer number of
/// nanoseconds, or if it's more than a year.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let nanos: u64 = match unit {
        "ms" => 1_000_000,
        "" | "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(no_duration(text)),
    };
    let long = || format!("`{text}` is not a duration of at most a year");
    match multiply(number, nanos).map(Duration::from_nanos) {
        Ok(time) if time <= MAX_DURATION => Ok(time),
        Ok(_) | Err(Inexact::Range) => Err(long()),
        Err(Inexact::Form) => Err(no_duration(text)),
        Err(Inexact::Fraction) => Err(format!("`{text}` is not a whole number of nanoseconds")),
    }
}

fn no_duration(text: &str) -> String {
    format!("`{text}` is not a duration; write seconds, or a number with ms, s, m or h")
}

/// Formats a duration in seconds or milliseconds, using an integer if possible. This can be parsed
/// by [`parse_duration`].
#[must_use]
pub fn show_duration(time: Duration) -> String {
    let nanos = time.as_nanos();
    if nanos.is_multiple_of(1_000_000_000) {
        return format!("{}s", time.as_secs());
    }
    if nanos.is_multiple_of(1_000_000) {
        return format!("{}ms", time.as_millis());
    }
    let fraction = format!("{:06}", nanos % 1_000_000);
    format!("{}.{}ms", time.as_millis(), fraction.trim_end_matches('0'))
}

/// Splits a text after the number and returns the number and the unit.
fn split(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    (number, unit.trim())
}

/// Reasons why a decimal number of units is not an integer.
#[derive(Debug, PartialEq, Eq)]
enum Inexact {
    /// This is not a decimal number.
    Form,
    /// The result has a fraction.
    Fraction,
    /// The result doesn't fit in 64 bits.
    Range,
}

/// Multiplies a decimal number by a unit.
fn multiply(number: &str, unit: u64) -> Result<u64, Inexact> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(Inexact::Form);
    }
    let whole = whole.trim_start_matches('0');
    let fraction = fraction.trim_end_matches('0');
    // 2^64 has 20 digits, and numbers with 20 and 18 digits fit in 128 bits. If multiplying by the
    // unit overflows, the result would not fit in 64 bits anyway.
    if whole.len() > 20 {
        return Err(Inexact::Range);
    }
    if fraction.len() > 18 {
        return Err(Inexact::Fraction);
    }
    let digits = whole.bytes().chain(fraction.bytes());
    let digits = digits.fold(0, |n, digit| n * 10 + u128::from(digit - b'0'));
    let scale = 10_u128.pow(fraction.len() as u32);
    let scaled = digits.checked_mul(unit.into()).ok_or(Inexact::Range)?;
    match scaled.is_multiple_of(scale) {
        true => u64::try_from(scaled / scale).map_err(|_| Inexact::Range),
        false => Err(Inexact::Fraction),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("0 b", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("1K", 1024),
            ("512 KiB", 524_288),
            ("3MiB", 3 << 20),
            ("1.5GiB", 1_610_612_736),
            ("1.500000GiB", 1_610_612_736),
            ("0.0009765625 KiB", 1),
            (".5G", 1 << 29),
            ("1.G", 1 << 30),
            ("2 GB ", 2_000_000_000),
            ("0.1TB", 100_000_000_000),
            ("2TB", 2_000_000_000_000),
            ("8388607 TiB", 9_223_370_937_343_148_032),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for (text, why) in [
            ("", "is not a size"),
            (".", "is not a size"),
            ("GiB", "is not a size"),
            ("-1", "is not a size"),
            ("1,5G", "is not a size"),
            ("1.2.3G", "is not a size"),
            ("1 XB", "is not a size"),
            ("1x", "is not a size"),
            ("0.5", "whole number of bytes"),
            ("0.1GiB", "whole number of bytes"),
            ("1.2345G", "whole number of bytes"),
            ("1.0000000000000000001", "whole number of bytes"),
            ("18446744073709551616", "less than 2^64"),
            ("99999999T", "less than 2^64"),
            ("99999999999999999999.999999999999999999T", "less than 2^64"),
            ("999999999999999999999", "less than 2^64"),
        ] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn durations_are_read_exactly() {
        for (text, nanos) in [
            ("0", 0),
            ("1.5", 1_500_000_000),
            (".5s", 500_000_000),
            ("250ms", 250_000_000),
            ("0.0005 s", 500_000),
            ("0.000001ms", 1),
            ("2m", 120_000_000_000),
            ("2min", 120_000_000_000),
            ("0.5h", 1_800_000_000_000),
            ("8784h", 31_622_400_000_000_000),
        ] {
            let time = Duration::from_nanos(nanos);
            assert_eq!(parse_duration(text), Ok(time), "{text}");
        }
        for (text, why) in [
            ("", "is not a duration;"),
            ("1y", "is not a duration;"),
            ("1M", "is not a duration;"),
            ("9e99", "is not a duration;"),
            ("fast", "is not a duration;"),
            ("0.0000001ms", "whole number of nanoseconds"),
            ("8784.1h", "at most a year"),
            ("99999999999999999999h", "at most a year"),
        ] {
            let error = parse_duration(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn formatted_values_parse_back() {
        for (bytes, text) in [
            (0, "0"),
            (1000, "1000"),
            (1024, "1KiB"),
            (3 << 19, "1536KiB"),
            (32 << 20, "32MiB"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(show_size(bytes), text);
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for (nanos, text) in [
            (0, "0s"),
            (90_000_000_000, "90s"),
            (1_500_000_000, "1500ms"),
            (500_000, "0.5ms"),
            (1_000_000_001, "1000.000001ms"),
        ] {
            let time = Duration::from_nanos(nanos);
            assert_eq!(show_duration(time), text);
            assert_eq!(parse_duration(text), Ok(time));
        }
    }
}
