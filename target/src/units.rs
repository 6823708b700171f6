//! Human-readable sizes.

use bytesize::ByteSize;

/// Formats a number of bytes with a binary prefix.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_prefixes() {
        for (number, expected) in [
            (1000, "1000 B"),
            (64 << 20, "64.0 MiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(bytes(number), expected);
        }
    }
}
