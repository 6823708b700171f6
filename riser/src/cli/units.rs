//! Parses and formats sizes and durations.

use std::time::Duration;

pub(super) use riser_units::{parse_duration as duration, parse_size as size};

/// Parses a timeout, which is a duration other than 0, or `never` for a century.
pub(super) fn patience(text: &str) -> Result<Duration, String> {
    const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);
    match text {
        "never" => Ok(CENTURY),
        _ => match duration(text)? {
            Duration::ZERO => Err("invalid duration 0: use a positive duration or `never`".into()),
            duration => Ok(duration),
        },
    }
}

/// Formats a size in bytes.
pub(super) fn show_size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_parses_duration_or_never() {
        assert_eq!(patience("5s"), Ok(Duration::from_secs(5)));
        assert!(patience("never").unwrap() > Duration::from_secs(1 << 30));
        assert!(patience("0").is_err() && patience("always").is_err());
    }
}
