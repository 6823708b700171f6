//! Parses numbers in configfs files using the same rules as the kernel.

use std::ops::RangeInclusive;

use rustix::io::Errno;

/// Parses a boolean. Only the first letter is used, so `1`, `yes`, `true` and `on` are true.
///
/// # Errors
/// Returns `EINVAL` if the value is not valid.
pub fn boolean(text: &str) -> Result<bool, Errno> {
    let mut letters = text.chars().map(|c| c.to_ascii_lowercase());
    match (letters.next(), letters.next()) {
        (Some('y' | 't' | '1'), _) | (Some('o'), Some('n')) => Ok(true),
        (Some('n' | 'f' | '0'), _) | (Some('o'), Some('f')) => Ok(false),
        _ => Err(Errno::INVAL),
    }
}

/// Parses an unsigned number in decimal, hexadecimal (`0x`) or octal (`0`) with an optional
/// newline.
///
/// # Errors
/// Returns `EINVAL` if the value is not valid, and `ERANGE` if it exceeds `max`.
pub fn unsigned(text: &str, max: u64) -> Result<u64, Errno> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let text = text.strip_prefix('+').unwrap_or(text);
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (digits, radix) = match hex {
        Some(hex) => (hex, 16),
        None if text.len() > 1 && text.starts_with('0') => (&text[1..], 8),
        None => (text, 10),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err(Errno::INVAL);
    }
    match u64::from_str_radix(digits, radix) {
        Ok(value) if value <= max => Ok(value),
        _ => Err(Errno::RANGE),
    }
}

/// Parses a signed number.
///
/// # Errors
/// Returns `EINVAL` if the value is not valid, and `ERANGE` if it exceeds 32 bits.
pub fn signed(text: &str) -> Result<i32, Errno> {
    match text.strip_prefix('-') {
        Some(positive) => unsigned(positive, 1 << 31).map(|n| (-(n as i64)) as i32),
        None => unsigned(text, i32::MAX as u64).map(|n| n as i32),
    }
}

/// Returns the number at the start of the text, or 0. As in the kernel, only the lower 32 bits are
/// used.
#[must_use]
pub fn leading(text: &str) -> u32 {
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (text, radix) = match hex {
        Some(hex) if hex.starts_with(|c: char| c.is_ascii_hexdigit()) => (hex, 16),
        _ if text.starts_with('0') => (text, 8),
        _ => (text, 10),
    };
    let digits = text.chars().map_while(|c| c.to_digit(radix));
    digits.fold(0, |n: u32, digit| n.wrapping_mul(radix).wrapping_add(digit))
}

/// Parses a 32-bit number and checks its range.
///
/// # Errors
/// Returns `EINVAL` if the value is not valid, and `ERANGE` if it exceeds 32 bits.
pub fn within(text: &str, range: &RangeInclusive<u32>) -> Result<u32, Errno> {
    let value = unsigned(text, u64::from(u32::MAX))? as u32;
    range.contains(&value).then_some(value).ok_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_letter_determines_boolean() {
        for (text, value) in [
            ("1\n", Ok(true)),
            ("10", Ok(true)),
            ("Yes", Ok(true)),
            ("on\n", Ok(true)),
            ("true", Ok(true)),
            ("0", Ok(false)),
            ("off", Ok(false)),
            ("No\n", Ok(false)),
            ("o", Err(Errno::INVAL)),
            ("2", Err(Errno::INVAL)),
            ("", Err(Errno::INVAL)),
            (" 1", Err(Errno::INVAL)),
        ] {
            assert_eq!(boolean(text), value, "{text:?}");
        }
    }

    #[test]
    fn numbers_accept_three_bases_and_newline() {
        let max = u64::from(u32::MAX);
        for (text, value) in [
            ("0", Ok(0)),
            ("42\n", Ok(42)),
            ("+7", Ok(7)),
            ("0x1F\n", Ok(31)),
            ("017", Ok(15)),
            ("4294967295", Ok(max)),
            ("4294967296", Err(Errno::RANGE)),
            ("99999999999999999999999", Err(Errno::RANGE)),
            ("-1", Err(Errno::INVAL)),
            ("1\n\n", Err(Errno::INVAL)),
            ("1 ", Err(Errno::INVAL)),
            ("08", Err(Errno::INVAL)),
            ("0x", Err(Errno::INVAL)),
            ("", Err(Errno::INVAL)),
            ("\n", Err(Errno::INVAL)),
        ] {
            assert_eq!(unsigned(text, max), value, "{text:?}");
        }
        assert_eq!(signed("-1\n"), Ok(-1));
        assert_eq!(signed("-2147483648"), Ok(i32::MIN));
        assert_eq!(signed("2147483648"), Err(Errno::RANGE));
        assert_eq!(within("5", &(1..=4)), Err(Errno::INVAL));
        for (text, value) in [
            ("42", 42),
            ("42 and more", 42),
            ("0x10", 16),
            ("0x", 0),
            ("010", 8),
            ("-1", 0),
            ("Yes", 0),
            ("4294967297", 1),
        ] {
            assert_eq!(leading(text), value, "{text}");
        }
    }
}
