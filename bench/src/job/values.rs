//! Parsers for the values of options.

use std::time::Duration;

use super::{Amount, BlockSizes, Distribution};

/// Meaning of `k` and `ki` in job files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KbBase {
    /// `k` is 1024 and `ki` 1000. This is the default in fio, for compatibility with old job files.
    #[default]
    Binary,
    /// `k` is 1000 and `ki` 1024.
    Decimal,
}

/// Units of sizes and times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// Units in fio's job files.
    Fio(KbBase),
    /// Units on Riser's command line: `k` and `KiB` are 1024, `KB` is 1000.
    CommandLine,
}

impl Units {
    /// Parses a size in bytes.
    ///
    /// # Errors
    /// Fails if this is not a valid size.
    pub fn size(self, text: &str) -> Result<u64, String> {
        match self {
            Self::Fio(base) => fio_size(text, base),
            Self::CommandLine => riser_units::parse_size(text),
        }
    }

    pub(super) fn block(self, text: &str) -> Result<u32, String> {
        match u32::try_from(self.size(text)?) {
            Ok(size) if size > 0 => Ok(size),
            _ => Err(format!("`{text}` is not a block size from 1 to 2^32-1")),
        }
    }

    pub(super) fn time(self, text: &str) -> Result<Duration, String> {
        match self {
            Self::Fio(_) => fio_time(text),
            Self::CommandLine => riser_units::parse_duration(text),
        }
    }

    /// Parses a duration. The default unit is microseconds.
    pub(super) fn micros(self, text: &str) -> Result<Duration, String> {
        match text.bytes().all(|b| b.is_ascii_digit()) {
            true => Ok(Duration::from_micros(number(text)?)),
            false => self.time(text),
        }
    }

    /// Parses a size or percentage. Files generated from templates can contain `%%` instead of a
    /// percent sign.
    pub(super) fn amount(self, text: &str) -> Result<Amount, String> {
        match text.ends_with('%') {
            true => Ok(Amount::Percent(percentage(text.trim_end_matches('%'))?)),
            false => self.size(text).map(Amount::Bytes),
        }
    }
}

fn split_unit(text: &str) -> (&str, String) {
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    (number, unit.trim().to_ascii_lowercase())
}

fn fio_size(text: &str, base: KbBase) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size such as 4096, 4k, 1m or 2g");
    if let Some(hex) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).map_err(|_| wrong());
    }
    let (number, unit) = split_unit(text);
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let (prefix, is_iec) = match unit.strip_suffix('i') {
        Some(prefix) => (prefix, true),
        None => (unit, false),
    };
    let power = match prefix {
        "" if !is_iec => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => return Err(wrong()),
    };
    // The meaning of the prefixes is swapped between the two bases.
    let factor: u64 = match is_iec == (base == KbBase::Binary) {
        true => 1000,
        false => 1024,
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let bytes = number.checked_mul(factor.pow(power));
    bytes.ok_or_else(|| format!("`{text}` is not a size of less than 2^64 bytes"))
}

fn fio_time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time such as 30, 30s, 500ms, 5m or 1h");
    let (number, unit) = split_unit(text);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let micros: u64 = match unit.as_str() {
        "us" | "usec" => 1,
        "ms" | "msec" => 1_000,
        "" | "s" | "sec" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(wrong()),
    };
    let micros = number.checked_mul(micros);
    // This is a year, so that adding it to the clock can't overflow.
    micros
        .filter(|micros| *micros <= 366 * 86_400_000_000)
        .map(Duration::from_micros)
        .ok_or_else(|| format!("`{text}` is not a time of at most a year"))
}

pub(super) fn percentage(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(percent) if percent <= 100 => Ok(percent),
        _ => Err(format!("`{text}` is not a percentage from 0 to 100")),
    }
}

pub(super) fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a number in the range of this option"))
}

/// Parses a boolean in fio's format: 1, 0 or no value.
pub(super) fn boolean(value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("1" | "true") => Ok(true),
        Some("0" | "false") => Ok(false),
        Some(text) => Err(format!("invalid value `{text}`: expected 0 or 1")),
    }
}

/// Parses comma-separated values for reads, writes and trims. Missing values at the end are the
/// same as the last value, and an empty value keeps the existing one.
pub(super) fn by_direction<T: Clone>(
    text: &str,
    into: &mut [T; 3],
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<(), String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    if parts.len() > 3 {
        return Err(format!(
            "`{text}` has values for more than three directions"
        ));
    }
    let mut last: Option<T> = None;
    for (index, place) in into.iter_mut().enumerate() {
        match parts.get(index) {
            Some(&"") => last = None,
            Some(part) => {
                let value = parse(part)?;
                *place = value.clone();
                last = Some(value);
            }
            None => {
                if let Some(value) = &last {
                    *place = value.clone();
                }
            }
        }
    }
    Ok(())
}

/// Parses `1k-4k` or `1k:4k`.
pub(super) fn range(text: &str, units: Units) -> Result<BlockSizes, String> {
    let (low, high) = text
        .split_once(['-', ':'])
        .ok_or_else(|| format!("`{text}` is not a range such as 4k-64k"))?;
    let (low, high) = (units.block(low.trim())?, units.block(high.trim())?);
    Ok(BlockSizes::Range {
        min: low.min(high),
        max: low.max(high),
    })
}

/// Parses `4k/60:64k/40`. The remaining percentage is split evenly between all entries without one.
pub(super) fn split(text: &str, units: Units) -> Result<BlockSizes, String> {
    let mut parts = Vec::new();
    for part in text.split(':') {
        let (size, percent) = part.split_once('/').unwrap_or((part, ""));
        let percent = match percent.trim() {
            "" => None,
            percent => Some(f64::from(percentage(percent)?)),
        };
        parts.push((units.block(size.trim())?, percent));
    }
    if parts.len() > 64 {
        return Err("bssplit has more than 64 sizes".into());
    }
    let given: f64 = parts.iter().filter_map(|(_, percent)| *percent).sum();
    let open = parts
        .iter()
        .filter(|(_, percent)| percent.is_none())
        .count();
    if given > 100.0 || (open == 0 && given < 100.0) {
        return Err(format!(
            "the percentages of `{text}` add up to {given}, not 100"
        ));
    }
    let rest = (100.0 - given) / open.max(1) as f64;
    let parts = parts.into_iter().map(|(size, p)| (size, p.unwrap_or(rest)));
    Ok(BlockSizes::Split(parts.collect()))
}

/// Parses `random`, `zipf:1.2`, `zoned:80/20:20/80` or `hotspot:20/80`.
pub(super) fn distribution(text: &str) -> Result<Distribution, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    match name {
        "random" if rest.is_empty() => Ok(Distribution::Uniform),
        "zipf" => match rest.parse::<f64>() {
            Ok(theta) if theta.is_finite() && theta > 0.0 && theta <= 100.0 => {
                Ok(Distribution::Zipf(theta))
            }
            _ => Err(format!(
                "`{rest}` is not a theta from 0 to 100, as in zipf:1.2"
            )),
        },
        "zoned" => zones(rest),
        "hotspot" => {
            let (space, accesses) = pair(rest)?;
            if space > 100.0 || accesses > 100.0 {
                return Err(format!("`{rest}` has a percentage above 100"));
            }
            let rest = (100.0 - accesses, 100.0 - space);
            Ok(Distribution::Zoned(vec![(accesses, space), rest]))
        }
        "pareto" | "normal" | "zoned_abs" => Err(format!(
            "unsupported distribution `{name}`: expected random, zipf, zoned or hotspot"
        )),
        _ => Err(format!("`{text}` is not a distribution such as zipf:1.2")),
    }
}

fn pair(text: &str) -> Result<(f64, f64), String> {
    let parsed = text.split_once('/').and_then(|(a, b)| {
        let parse = |text: &str| text.trim().parse::<f64>().ok();
        let (a, b) = (parse(a)?, parse(b)?);
        (a >= 0.0 && b >= 0.0).then_some((a, b))
    });
    parsed.ok_or_else(|| format!("`{text}` is not two percentages such as 80/20"))
}

/// Parses the percentages of operations and blocks for each zone. The last zone can use the
/// remaining blocks.
fn zones(text: &str) -> Result<Distribution, String> {
    let (closed, last) = match text.strip_suffix('/') {
        Some(open) => open.rsplit_once(':').unwrap_or(("", open)),
        None => (text, ""),
    };
    let parts = closed.split(':').filter(|part| !part.is_empty());
    let mut zones = parts.map(pair).collect::<Result<Vec<_>, _>>()?;
    if !last.is_empty() {
        let given: f64 = zones.iter().map(|zone| zone.1).sum();
        zones.push(pair(&format!("{last}/{}", (100.0 - given).max(0.0)))?);
    }
    let sum = |of: fn(&(f64, f64)) -> f64| zones.iter().map(of).sum::<f64>();
    let is_whole = |sum: f64| (sum - 100.0).abs() < 1e-6;
    if zones.len() > 256 || !is_whole(sum(|z| z.0)) || !is_whole(sum(|z| z.1)) {
        return Err(format!(
            "`{text}` is not a list of up to 256 zones whose percentages add up to 100 on both sides"
        ));
    }
    if zones
        .iter()
        .any(|(accesses, size)| *accesses > 0.0 && *size == 0.0)
    {
        return Err(format!("`{text}` has operations in a zone without size"));
    }
    Ok(Distribution::Zoned(zones))
}

/// Parses a pattern in fio's format: `0xdeadbeef`, a decimal number or `"text"`.
pub(super) fn pattern(text: &str) -> Result<Vec<u8>, String> {
    let wrong = || format!("`{text}` is not a pattern such as 0xdeadbeef or \"text\"");
    if let Some(inner) = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')) {
        return match inner.is_empty() {
            true => Err(wrong()),
            false => Ok(inner.as_bytes().to_vec()),
        };
    }
    if let Some(hex) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        let even = format!("{}{hex}", if hex.len() % 2 == 1 { "0" } else { "" });
        if even.is_empty() || !even.is_ascii() || even.len() > 1024 {
            return Err(wrong());
        }
        let byte = |at| u8::from_str_radix(&even[at..at + 2], 16).map_err(|_| wrong());
        return (0..even.len()).step_by(2).map(byte).collect();
    }
    let number: i64 = text.parse().map_err(|_| wrong())?;
    let bytes = number.to_le_bytes();
    // As in fio, use the minimum number of bytes: one for 0, two for 300.
    let fill = if number < 0 { 0xff } else { 0 };
    let len = bytes
        .iter()
        .rposition(|b| *b != fill)
        .map_or(1, |last| last + 1);
    Ok(bytes[..len].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_match_fio() {
        let binary = |text| fio_size(text, KbBase::Binary);
        for (text, bytes) in [
            ("4096", 4096),
            ("4k", 4096),
            ("4kB", 4096),
            ("4KB", 4096),
            ("4ki", 4000),
            ("1m", 1 << 20),
            ("1MiB", 1_000_000),
            ("2g", 2 << 30),
            ("1t", 1 << 40),
            ("0x1000", 4096),
            ("512b", 512),
        ] {
            assert_eq!(binary(text), Ok(bytes), "{text}");
        }
        assert_eq!(fio_size("4k", KbBase::Decimal), Ok(4000));
        assert_eq!(fio_size("4ki", KbBase::Decimal), Ok(4096));
        for text in ["", "k", "4x", "4i", "-1", "99999999999t", "1.5k"] {
            assert!(binary(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_match_fio() {
        for (text, micros) in [
            ("30", 30_000_000),
            ("30s", 30_000_000),
            ("500ms", 500_000),
            ("10us", 10),
            ("5M", 300_000_000),
            ("1h", 3_600_000_000),
        ] {
            assert_eq!(fio_time(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        assert!(fio_time("5y").is_err() && fio_time("9999d").is_err());
    }

    #[test]
    fn direction_values_extend_to_later_directions() {
        let with = |text| {
            let mut values = [1, 1, 1];
            by_direction(text, &mut values, number).map(|()| values)
        };
        assert_eq!(with("8"), Ok([8, 8, 8]));
        assert_eq!(with("8,32"), Ok([8, 32, 32]));
        assert_eq!(with("8,32,"), Ok([8, 32, 1]));
        assert_eq!(with(",8"), Ok([1, 8, 8]));
        assert_eq!(with(",8,"), Ok([1, 8, 1]));
        assert!(with("1,2,3,4").is_err() && with("x").is_err());
    }

    #[test]
    fn splits_share_remaining_percentage() {
        let parts = |text| split(text, Units::Fio(KbBase::Binary));
        assert_eq!(
            parts("4k/50:1k/:32k/"),
            Ok(BlockSizes::Split(vec![
                (4096, 50.0),
                (1024, 25.0),
                (32768, 25.0)
            ]))
        );
        assert!(parts("4k/60:8k/50").unwrap_err().contains("110"));
        assert!(parts("4k/60:8k/30").unwrap_err().contains("90"));
        assert!(parts("0/100").is_err());
    }

    #[test]
    fn distributions_are_parsed() {
        assert_eq!(distribution("zipf:1.2"), Ok(Distribution::Zipf(1.2)));
        let hot = Distribution::Zoned(vec![(80.0, 20.0), (20.0, 80.0)]);
        assert_eq!(distribution("zoned:80/20:20/80"), Ok(hot.clone()));
        assert_eq!(distribution("hotspot:20/80"), Ok(hot.clone()));
        assert_eq!(distribution("zoned:80/20:20/"), Ok(hot));
        for text in [
            "zipf",
            "zipf:x",
            "zoned:80/20",
            "zoned:80/",
            "zoned:80/100:20/",
            "zoned:",
            "zoned:100/0:0/100",
            "hot",
            "hotspot:120/80",
        ] {
            assert!(distribution(text).is_err(), "{text}");
        }
        assert!(
            distribution("pareto:0.3")
                .unwrap_err()
                .contains("unsupported distribution")
        );
    }

    #[test]
    fn patterns_are_parsed_as_bytes() {
        assert_eq!(pattern("0xdeadbeef"), Ok(vec![0xde, 0xad, 0xbe, 0xef]));
        assert_eq!(pattern("0xf"), Ok(vec![0x0f]));
        assert_eq!(pattern("\"abcd\""), Ok(b"abcd".to_vec()));
        assert_eq!(pattern("300"), Ok(vec![0x2c, 0x01]));
        assert_eq!(pattern("-12"), Ok(vec![0xf4]));
        assert!(pattern("'file'").is_err() && pattern("0x").is_err() && pattern("").is_err());
    }
}
