//! Scalar types. Each is written as text, and its error contains the expected syntax.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use riser_units::{parse_duration, parse_size, show_duration, show_size};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::listen::Written as Listen;

/// Implements deserialization from a YAML scalar using `FromStr`, and uses its error as the
/// message.
macro_rules! from_text {
    ($($name:ident),*) => {$(
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }
    )*};
}

/// The same for types that are also serialized to text, using `Display`.
macro_rules! text {
    ($($name:ident),*) => {
        from_text!($($name),*);
        $(
            impl Serialize for $name {
                fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }
        )*
    };
}

text!(
    Span,
    OnOff,
    Guid,
    InitiatorId,
    Net,
    Percent,
    Listen,
    NaaText
);
from_text!(Size, Count);

/// A size in bytes: `1048576`, `512KiB`, `1.5 GiB`, `2TB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size(pub(super) u64);

/// Uses a unit if possible, or else a number.
impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 != 0 && self.0.is_multiple_of(1 << 10) {
            true => serializer.serialize_str(&show_size(self.0)),
            false => serializer.serialize_u64(self.0),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse_size(text)? {
            bytes if bytes <= i64::MAX as u64 => Ok(Self(bytes)),
            _ => Err(format!("`{text}` exceeds the maximum size of a file")),
        }
    }
}

/// A duration: `500ms`, `2s`, `1m`. A number without a unit is in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span(pub(super) Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&show_duration(self.0))
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_duration(text).map(Self)
    }
}

/// `on` or `off`; `true` and `false` are also supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OnOff(pub(super) bool);

impl fmt::Display for OnOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "on" } else { "off" })
    }
}

impl FromStr for OnOff {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" | "true" => Ok(Self(true)),
            "off" | "false" => Ok(Self(false)),
            _ => Err(format!("expected on or off, not `{text}`")),
        }
    }
}

/// Returns hexadecimal digits without `0x`, and without `:` or `-` separators.
fn hex_digits(text: &str) -> Option<String> {
    let digits: String = text
        .trim_start_matches("0x")
        .chars()
        .filter(|c| !matches!(c, ':' | '-'))
        .collect();
    (!digits.is_empty() && digits.chars().all(|c| c.is_ascii_hexdigit())).then_some(digits)
}

/// A 64-bit identifier: `0x0002c90300a1b2c3` or `0002:c903:00a1:b2c3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Guid(pub u64);

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

impl FromStr for Guid {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        hex_digits(text)
            .filter(|d| d.len() == 16)
            .and_then(|d| u64::from_str_radix(&d, 16).ok())
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a GUID; use 16 hexadecimal digits"))
    }
}

/// Initiator port name in an access rule (SRP 4.2: identifier extension, then GUID).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InitiatorId {
    /// All 16 bytes of the initiator port identifier.
    Port([u8; 16]),
    /// The low 8 bytes, with any extension.
    Guid(Guid),
}

impl InitiatorId {
    /// Returns true if this matches the given initiator port identifier.
    #[must_use]
    pub fn is_match(&self, port_id: &[u8; 16]) -> bool {
        match self {
            Self::Port(id) => id == port_id,
            Self::Guid(guid) => port_id[8..] == guid.0.to_be_bytes(),
        }
    }
}

impl fmt::Display for InitiatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(id) => write!(f, "{:#034x}", u128::from_be_bytes(*id)),
            Self::Guid(guid) => guid.fmt(f),
        }
    }
}

impl FromStr for InitiatorId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not an initiator; use 16 hexadecimal digits (its GUID) or 32 (its \
                 port identifier)"
            )
        };
        let digits = hex_digits(text).ok_or_else(wrong)?;
        match digits.len() {
            16 => digits.parse().map(Self::Guid),
            32 => u128::from_str_radix(&digits, 16)
                .map(|id| Self::Port(id.to_be_bytes()))
                .map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

/// An address, or a network prefix: `10.0.0.7`, `10.0.0.0/8`, `fd00::/64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Net {
    address: IpAddr,
    prefix: u8,
}

impl Net {
    /// Returns the address if this is a single address.
    #[must_use]
    pub fn single(&self) -> Option<IpAddr> {
        let all = if self.address.is_ipv4() { 32 } else { 128 };
        (self.prefix == all).then_some(self.address)
    }

    /// Returns true if this contains the address. An IPv4-mapped IPv6 address is treated as IPv4.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(a)) => {
                let mask = u32::MAX
                    .checked_shl(32 - u32::from(self.prefix))
                    .unwrap_or(0);
                (net.to_bits() ^ a.to_bits()) & mask == 0
            }
            (IpAddr::V6(net), IpAddr::V6(a)) => {
                let mask = u128::MAX
                    .checked_shl(128 - u32::from(self.prefix))
                    .unwrap_or(0);
                (net.to_bits() ^ a.to_bits()) & mask == 0
            }
            _ => false,
        }
    }
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Net {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is neither an IP address nor a network such as 10.0.0.0/8");
        let (address, prefix) = match text.split_once('/') {
            Some((a, p)) => (a, Some(p.parse::<u8>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.unwrap_or(most);
        (prefix <= most)
            .then_some(Self { address, prefix })
            .ok_or_else(wrong)
    }
}

/// A percentage: `2`, `0.5`, `2%`.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Percent(f64);

impl Percent {
    /// Zero percent.
    pub const ZERO: Self = Self(0.0);

    /// Returns this value as an integer, if possible.
    #[must_use]
    pub fn whole(self) -> Option<u8> {
        (self.0.fract() == 0.0).then_some(self.0 as u8)
    }

    /// Returns this value as a probability, 0 to 1.
    #[must_use]
    pub fn probability(self) -> f64 {
        self.0 / 100.0
    }
}

impl From<u8> for Percent {
    fn from(percent: u8) -> Self {
        Self(percent.into())
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.trim_end_matches('%')
            .trim_end()
            .parse::<f64>()
            .ok()
            .filter(|p| (0.0..=100.0).contains(p))
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a percentage from 0 to 100"))
    }
}

/// `auto`, or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count(pub(super) Option<u32>);

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_str("auto"),
            Some(number) => serializer.serialize_u32(number),
        }
    }
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self(None));
        }
        text.parse()
            .map(|n| Self(Some(n)))
            .map_err(|_| format!("expected auto or a number, not `{text}`"))
    }
}

/// A NAA designator: 16 digits starting with 3, or 32 starting with 6 (SPC-4 7.8.6.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NaaText(pub(super) riser_scsi::data::designator::Naa);

impl fmt::Display for NaaText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.bytes();
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for NaaText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        use riser_scsi::data::designator::Naa;
        let wrong = || {
            format!(
                "`{text}` is not an NAA identifier; use 16 hexadecimal digits starting with 3, or \
                 32 starting with 6"
            )
        };
        let digits = hex_digits(text).ok_or_else(wrong)?;
        let value = u128::from_str_radix(&digits, 16).map_err(|_| wrong())?;
        match (digits.len(), digits.as_bytes()[0]) {
            (16, b'3') => Ok(Self(Naa::LocallyAssigned(value as u64 & ((1 << 60) - 1)))),
            (32, b'6') => Ok(Self(Naa::RegisteredExtended {
                company: (value >> 100) as u32 & 0xff_ffff,
                vendor_specific: (value >> 64) as u64 & ((1 << 36) - 1),
                extension: value as u64,
            })),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        assert_eq!("1.5GiB".parse(), Ok(Size(3 << 29)));
        let most = "9223372036854775807";
        assert_eq!(most.parse(), Ok(Size(i64::MAX as u64)));
        let error = "8388608TiB".parse::<Size>().unwrap_err();
        assert!(
            error.ends_with("exceeds the maximum size of a file"),
            "{error}"
        );
        assert!("0.1GiB".parse::<Size>().is_err());
    }

    #[test]
    fn identifiers_are_full_hexadecimal() {
        let guid = Guid(0x0002_c903_00a1_b2c3);
        assert_eq!("0x0002c90300a1b2c3".parse(), Ok(guid));
        assert_eq!("0002:c903:00a1:b2c3".parse(), Ok(guid));
        assert_eq!(guid.to_string(), "0x0002c90300a1b2c3");
        assert!("2c90300a1b2c3".parse::<Guid>().is_err());
        let port: InitiatorId = "00000000000000010002c90300a1b2c3".parse().unwrap();
        let by_guid: InitiatorId = "0002c90300a1b2c3".parse().unwrap();
        let id = *b"\x00\x00\x00\x00\x00\x00\x00\x01\x00\x02\xc9\x03\x00\xa1\xb2\xc3";
        assert!(port.is_match(&id) && by_guid.is_match(&id));
        let mut other = id;
        other[7] = 2;
        assert!(!port.is_match(&other) && by_guid.is_match(&other));
    }

    #[test]
    fn networks_contain_addresses() {
        let net: Net = "10.1.0.0/16".parse().unwrap();
        assert!(net.contains("10.1.255.1".parse().unwrap()));
        assert!(net.contains("::ffff:10.1.0.1".parse().unwrap()));
        assert!(!net.contains("10.2.0.1".parse().unwrap()));
        assert!(
            "0.0.0.0/0"
                .parse::<Net>()
                .unwrap()
                .contains("8.8.8.8".parse().unwrap())
        );
        assert!(
            !"0.0.0.0/0"
                .parse::<Net>()
                .unwrap()
                .contains("::1".parse().unwrap())
        );
        assert!(
            "::/0"
                .parse::<Net>()
                .unwrap()
                .contains("fd00::1".parse().unwrap())
        );
        assert!("10.0.0.0/33".parse::<Net>().is_err());
    }

    #[test]
    fn naa_identifiers_keep_their_digits() {
        let bytes = |t: &str| t.parse::<NaaText>().unwrap().0.bytes();
        assert_eq!(
            bytes("3123456789abcdef"),
            [0x31, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]
        );
        let long = "6123456789abcdef0123456789abcdef";
        assert_eq!(long.parse::<NaaText>().unwrap().to_string(), long);
        assert!("5123456789abcdef".parse::<NaaText>().is_err());
    }
}
