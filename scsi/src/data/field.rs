//! Locations of fields in parameter data and CDBs.
//!
//! The same constant is used to read and write a field. A field can only be read if it's within the
//! received data, so reading past the end returns `None`.

use std::marker::PhantomData;

/// A big-endian number, or some of the bits in a byte.
#[derive(Debug)]
pub struct Field<T> {
    at: usize,
    /// Size of the field, in bytes.
    len: usize,
    /// The least significant bit, if this is a bit field.
    low: u8,
    /// Size of the field, in bits.
    bits: u8,
    value: PhantomData<fn() -> T>,
}

impl<T> Clone for Field<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Field<T> {}

/// Type of a value that can be stored in a field.
pub trait Value: Copy {
    /// Creates a new value from a number. The caller must ensure that the number is in the range of
    /// the field.
    fn from_number(number: u64) -> Self;

    /// Returns the value as a number.
    fn number(self) -> u64;
}

impl Value for bool {
    fn from_number(number: u64) -> Self {
        number != 0
    }

    fn number(self) -> u64 {
        self.into()
    }
}

macro_rules! numbers {
    ($($number:ident),*) => {
        $(impl Value for $number {
            fn from_number(number: u64) -> Self {
                number as Self
            }

            fn number(self) -> u64 {
                self.into()
            }
        })*
    };
}

numbers!(u8, u16, u32, u64);

/// A single bit.
pub(crate) const fn bit(at: usize, bit: u8) -> Field<bool> {
    Field::new(at, 1, bit, 1)
}

/// Bits `high` to `low` in a byte.
pub(crate) const fn bits(at: usize, high: u8, low: u8) -> Field<u8> {
    Field::new(at, 1, low, high - low + 1)
}

/// A single byte.
pub(crate) const fn byte(at: usize) -> Field<u8> {
    Field::new(at, 1, 0, 8)
}

/// A 16-bit number.
pub(crate) const fn be16(at: usize) -> Field<u16> {
    Field::new(at, 2, 0, 16)
}

/// A 24-bit number.
pub(crate) const fn be24(at: usize) -> Field<u32> {
    Field::new(at, 3, 0, 24)
}

/// A 32-bit number.
pub(crate) const fn be32(at: usize) -> Field<u32> {
    Field::new(at, 4, 0, 32)
}

/// A 64-bit number.
pub(crate) const fn be64(at: usize) -> Field<u64> {
    Field::new(at, 8, 0, 64)
}

impl<T> Field<T> {
    const fn new(at: usize, len: usize, low: u8, bits: u8) -> Self {
        Self {
            at,
            len,
            low,
            bits,
            value: PhantomData,
        }
    }

    /// Returns the same location with a number as its type.
    #[must_use]
    pub const fn as_number(self) -> Field<u64> {
        Field::new(self.at, self.len, self.low, self.bits)
    }

    /// Returns the offset of the first byte.
    #[must_use]
    pub const fn at(self) -> usize {
        self.at
    }

    /// Returns the most significant bit for a bit field, used for field pointers.
    pub(crate) const fn highest_bit(self) -> u8 {
        (self.low + self.bits - 1) & 7
    }

    const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits)
    }
}

impl<T: Value> Field<T> {
    /// Returns the value, or `None` if the field is not within the data.
    #[inline]
    #[must_use]
    pub fn get(self, data: &[u8]) -> Option<T> {
        let field = data.get(self.at..)?.get(..self.len)?;
        let mut bytes = [0; 8];
        // Right-align the bytes, so that the same code can be used for a big-endian number of any
        // size.
        bytes[8 - self.len..].copy_from_slice(field);
        let number = u64::from_be_bytes(bytes);
        Some(T::from_number(number >> self.low & self.mask()))
    }

    /// Sets the value.
    ///
    /// # Panics
    /// If the field is not within the data, or the value is too large.
    #[inline]
    pub fn set(self, data: &mut [u8], value: T) {
        let number = value.number();
        assert!(number <= self.mask(), "value is too large for the field");
        let field = &mut data[self.at..][..self.len];
        if self.len == 1 {
            // Don't change any other fields in the same byte.
            let others = field[0] & !((self.mask() << self.low) as u8);
            field[0] = others | (number << self.low) as u8;
        } else {
            field.copy_from_slice(&number.to_be_bytes()[8 - self.len..]);
        }
    }
}

/// An ASCII string, padded with spaces (SPC-4 4.3.1).
#[derive(Clone, Copy, Debug)]
pub struct Text {
    at: usize,
    len: usize,
}

impl Text {
    pub(crate) const fn new(at: usize, len: usize) -> Self {
        Self { at, len }
    }

    /// Returns the bytes with padding, or `None` if the field is not within the data.
    #[must_use]
    pub fn get(self, data: &[u8]) -> Option<&[u8]> {
        data.get(self.at..)?.get(..self.len)
    }

    /// Sets the text, which is truncated to the size of the field.
    ///
    /// # Panics
    /// If the field is not within the data.
    pub fn set(self, data: &mut [u8], text: &str) {
        let field = &mut data[self.at..][..self.len];
        let len = text.len().min(field.len());
        field[..len].copy_from_slice(&text.as_bytes()[..len]);
        field[len..].fill(b' ');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_roundtrips_at_same_offset() {
        let mut data = [0xff; 12];
        bit(0, 3).set(&mut data, false);
        bits(1, 6, 4).set(&mut data, 2);
        byte(2).set(&mut data, 7);
        be16(3).set(&mut data, 0x0102);
        be32(8).set(&mut data, 0x0304_0506);
        assert_eq!(data, [0xf7, 0xaf, 7, 1, 2, 255, 255, 255, 3, 4, 5, 6]);
        assert_eq!(bit(0, 3).get(&data), Some(false));
        assert_eq!(bits(1, 6, 4).get(&data), Some(2));
        assert_eq!(be16(3).get(&data), Some(0x0102));
        assert_eq!(be64(4).get(&data), Some(0x02ff_ffff_0304_0506));
        assert_eq!(be32(8).as_number().get(&data), Some(0x0304_0506));
    }

    #[test]
    fn missing_field_returns_none() {
        assert_eq!(be32(8).get(&[0; 11]), None);
        assert_eq!(bit(0, 0).get(&[]), None);
        assert_eq!(Text::new(4, 4).get(&[0; 7]), None);
    }

    #[test]
    #[should_panic(expected = "too large")]
    fn oversized_field_value_panics() {
        bits(0, 2, 0).set(&mut [0], 8);
    }
}
