//! Sizes and durations as people write them.

use std::time::Duration;

/// Bytes: a number and perhaps a unit, as in a configuration of `riserd`. K and KiB are 1024 bytes, KB is 1000.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit());
    let (number, suffix) = text.split_at(digits.unwrap_or(text.len()));
    let suffix = suffix.trim().to_ascii_lowercase();
    let unit: u64 = match suffix.as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => {
            return Err(format!(
                "`{suffix}` is not K, M, G, T, KiB to TiB or KB to TB"
            ));
        }
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .ok_or_else(|| format!("`{text}` is not a size of less than 2^64 bytes"))
}

/// A duration: a number and perhaps ms, s, m or h.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, suffix) = text.split_at(digits.unwrap_or(text.len()));
    let unit = match suffix.trim() {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        other => return Err(format!("`{other}` is none of ms, s, m, h")),
    };
    number
        .parse::<f64>()
        .ok()
        .and_then(|n| Duration::try_from_secs_f64(n * unit).ok())
        .filter(|d| *d <= Duration::from_secs(366 * 86_400))
        .ok_or_else(|| format!("`{text}` is not a duration of at most a year"))
}

/// Parses a limit of waiting: a duration that is not 0, or `never` to give up, which is a century.
pub(super) fn patience(text: &str) -> Result<Duration, String> {
    const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);
    match text {
        "never" => Ok(CENTURY),
        _ => match duration(text)? {
            Duration::ZERO => Err("nothing succeeds in no time; write a duration or never".into()),
            duration => Ok(duration),
        },
    }
}

/// Size in bytes as people read it.
pub(super) fn show_size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations() {
        assert_eq!(size("0"), Ok(0));
        assert_eq!(size("4k"), Ok(4096));
        assert_eq!(size("3MiB"), Ok(3 << 20));
        assert_eq!(size("2 GB"), Ok(2_000_000_000));
        assert_eq!(size("2g"), Ok(2 << 30));
        assert!(size("").is_err() && size("-1").is_err() && size("1x").is_err());
        assert!(size("99999999T").is_err());
        assert_eq!(duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(patience("5s"), Ok(Duration::from_secs(5)));
        assert!(patience("never").unwrap() > Duration::from_secs(1 << 30));
        assert!(patience("0").is_err() && patience("always").is_err());
        assert!(duration("1y").is_err() && duration("").is_err() && duration("9e99").is_err());
    }
}
