//! Netlink attributes (`struct nlattr`): length, type and value.

use super::{ALIGNMENT, Malformed, split};

/// Length of the header, in bytes.
const HEADER: usize = 4;

/// Flag bits of the type field: `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const FLAGS: u16 = 0xC000;

/// A single attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Type, without flags.
    pub kind: u16,
    /// Value, without padding.
    pub value: &'a [u8],
}

impl<'a> Attribute<'a> {
    /// Returns the value as an 8-bit number, or `None` if the length differs.
    #[must_use]
    pub fn u8(&self) -> Option<u8> {
        self.value.try_into().ok().map(u8::from_ne_bytes)
    }

    /// Returns the value as a 16-bit number in host byte order, or `None` if the length differs.
    #[must_use]
    pub fn u16(&self) -> Option<u16> {
        self.value.try_into().ok().map(u16::from_ne_bytes)
    }

    /// Returns the value as a 32-bit number in host byte order, or `None` if the length differs.
    #[must_use]
    pub fn u32(&self) -> Option<u32> {
        self.value.try_into().ok().map(u32::from_ne_bytes)
    }

    /// Returns the value as a 64-bit number in host byte order, or `None` if the length differs.
    #[must_use]
    pub fn u64(&self) -> Option<u64> {
        self.value.try_into().ok().map(u64::from_ne_bytes)
    }

    /// Returns the text up to the first NUL, or `None` if it is not valid UTF-8. A fixed-size field
    /// need not contain a NUL.
    #[must_use]
    pub fn text(&self) -> Option<&'a str> {
        let end = self.value.iter().position(|byte| *byte == 0);
        std::str::from_utf8(&self.value[..end.unwrap_or(self.value.len())]).ok()
    }
}

/// Iterator over the attributes of a message. It stops after the first malformed attribute.
#[derive(Clone, Debug)]
pub struct Attributes<'a> {
    rest: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// Creates an iterator over the attributes in these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let number = |at: usize| {
            let bytes = self.rest.get(at..at + 2)?;
            Some(u16::from_ne_bytes(bytes.try_into().ok()?))
        };
        let header = number(0).zip(number(2));
        let Some((len, kind)) = header else {
            // Trailing bytes shorter than a header are padding.
            return None;
        };
        let whole = split(&mut self.rest, HEADER, usize::from(len));
        if whole.is_err() {
            self.rest = &[];
        }
        Some(whole.map(|whole| Attribute {
            kind: kind & !FLAGS,
            value: &whole[HEADER..],
        }))
    }
}

/// Appends an attribute.
///
/// # Panics
/// If the value is longer than 65,531 bytes.
pub fn append_attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(HEADER + value.len()).expect("an attribute's value is shorter");
    bytes.extend_from_slice(&len.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    // As on a little-endian host.
    #[cfg(target_endian = "little")]
    #[test]
    fn attributes_match_kernel_layout() {
        let mut bytes = Vec::new();
        append_attribute(&mut bytes, 1, &[4, 0]);
        append_attribute(&mut bytes, 2, b"siw0\0");
        assert_eq!(
            bytes,
            [
                6, 0, 1, 0, 4, 0, 0, 0, 9, 0, 2, 0, b's', b'i', b'w', b'0', 0, 0, 0, 0
            ]
        );
        let read: Vec<_> = Attributes::new(&bytes).map(Result::unwrap).collect();
        assert_eq!((read[0].kind, read[0].u16()), (1, Some(4)));
        assert_eq!((read[1].kind, read[1].text()), (2, Some("siw0")));
        assert_eq!(read[1].u32(), None);
        // The last attribute is not padded, and the flag is not part of the type.
        let read: Vec<_> = Attributes::new(&[5, 0, 3, 0x80, 7]).collect();
        let last = Attribute {
            kind: 3,
            value: &[7],
        };
        assert_eq!(read, [Ok(last)]);
        assert_eq!(last.u8(), Some(7));
    }

    #[test]
    fn invalid_length_stops_attributes() {
        for len in [0_u16, 3, 9, u16::MAX] {
            let mut bytes = Vec::new();
            append_attribute(&mut bytes, 1, &[0; 4]);
            bytes.extend_from_slice(&len.to_ne_bytes());
            bytes.extend_from_slice(&[2, 0, 0, 0, 0, 0]);
            let read: Vec<_> = Attributes::new(&bytes).collect();
            assert_eq!((read.len(), read[1]), (2, Err(Malformed)), "{len}");
        }
        assert_eq!(Attributes::new(&[8, 0, 1]).count(), 0);
    }
}
