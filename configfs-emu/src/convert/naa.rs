//! Creates the same identifier as LIO from the serial number of a unit.

/// Returns 32 digits: an NAA registered extended identifier (6), the company ID, and the first 25
/// hexadecimal digits in the serial number. Other characters in the serial number are skipped.
pub(super) fn naa(company: &str, serial: &str) -> String {
    let company = company.trim_start_matches("0x");
    let digits = serial.chars().filter(char::is_ascii_hexdigit);
    let digits: String = digits.take(25).collect();
    format!("6{company:0>6}{digits:0<25}").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naa_uses_hexadecimal_serial_digits() {
        for (serial, expected) in [
            (
                "6e756c6c62300000000000000",
                "60014056e756c6c62300000000000000",
            ),
            ("nullb0", "6001405b000000000000000000000000"),
            (
                "0da5c4d0-9a3c-4b5c-8f8f-1f4e7c4c2e11",
                "60014050da5c4d09a3c4b5c8f8f1f4e7",
            ),
        ] {
            assert_eq!(naa("0x001405", serial), expected);
        }
    }
}
