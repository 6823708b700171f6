//! How a command sees the bytes of its data buffer.
//!
//! A command's buffer belongs to the target: it is a list of registered segments shared by the
//! network and the disk. A command never holds it; it copies out of it and into it through
//! [`DataAccess`] while it decides its next step. No reference into the buffer exists, since a
//! device may write there at any time. Block data passes by untouched; only parameter lists,
//! comparison and pattern writes look inside.

/// Bytes of the pieces in which a command looks at more.
const PIECE: usize = 4096;

/// The bytes of one command's data buffer, possibly in several segments.
///
/// Offsets count bytes from the start of the buffer. A buffer is at least
/// [`buffer_len`](crate::device_server::Command::buffer_len) bytes long.
pub trait DataAccess {
    /// Length of the buffer in bytes.
    fn len(&self) -> u32;

    /// Whether the buffer holds no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes out of the buffer, from `offset` on.
    ///
    /// # Panics
    /// If `into` is longer than what the buffer has from there on.
    fn read(&self, offset: u32, into: &mut [u8]);

    /// Copies bytes into the buffer, from `offset` on.
    ///
    /// # Panics
    /// If `from` is longer than what the buffer has from there on.
    fn write(&mut self, offset: u32, from: &[u8]);
}

impl DataAccess for Vec<u8> {
    fn len(&self) -> u32 {
        u32::try_from(self.as_slice().len()).expect("a data buffer is shorter than 4 GiB")
    }

    fn read(&self, offset: u32, into: &mut [u8]) {
        into.copy_from_slice(&self[offset as usize..][..into.len()]);
    }

    fn write(&mut self, offset: u32, from: &[u8]) {
        self[offset as usize..][..from.len()].copy_from_slice(from);
    }
}

/// The buffer of a command that needs none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoData;

impl DataAccess for NoData {
    fn len(&self) -> u32 {
        0
    }

    fn read(&self, _offset: u32, into: &mut [u8]) {
        assert!(into.is_empty(), "a command without data reads some");
    }

    fn write(&mut self, _offset: u32, from: &[u8]) {
        assert!(from.is_empty(), "a command without data writes some");
    }
}

/// Ranges of the pieces of a range of `len` bytes, which counts from 0.
fn pieces(len: u32) -> impl Iterator<Item = (u32, usize)> {
    (0..len)
        .step_by(PIECE)
        .map(move |at| (at, PIECE.min((len - at) as usize)))
}

/// Compares two ranges of the buffer; the index of the first byte that differs.
pub(crate) fn first_difference(
    data: &dyn DataAccess,
    left_offset: u32,
    right_offset: u32,
    len: u32,
) -> Option<u32> {
    let (mut left, mut right) = ([0; PIECE], [0; PIECE]);
    for (at, take) in pieces(len) {
        let (left, right) = (&mut left[..take], &mut right[..take]);
        data.read(left_offset + at, left);
        data.read(right_offset + at, right);
        // Whole pieces are compared first, which is fast; only in the one that differs are the
        // bytes looked at.
        if left != right {
            let index = left.iter().zip(&*right).position(|(a, b)| a != b)?;
            return Some(at + index as u32);
        }
    }
    None
}

/// Sets in one range of the buffer the bits that another one has. The ranges do
/// not overlap.
pub(crate) fn or_into(data: &mut dyn DataAccess, into: u32, from: u32, len: u32) {
    let (mut bits, mut more) = ([0; PIECE], [0; PIECE]);
    for (at, take) in pieces(len) {
        let (bits, more) = (&mut bits[..take], &mut more[..take]);
        data.read(into + at, bits);
        data.read(from + at, more);
        for (byte, more) in bits.iter_mut().zip(&*more) {
            *byte |= more;
        }
        data.write(into + at, bits);
    }
}

/// Whether every byte of a range is zero.
pub(crate) fn is_zero(data: &dyn DataAccess, offset: u32, len: u32) -> bool {
    let mut piece = [0; PIECE];
    pieces(len).all(|(at, take)| {
        let piece = &mut piece[..take];
        data.read(offset + at, piece);
        piece.iter().all(|&byte| byte == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_buffer_compare_differ_and_join() {
        let mut data = vec![0; 21];
        assert!(is_zero(&data, 0, 21));
        data.write(2, &[1, 2, 3, 4, 5, 6, 7]);
        data.write(11, &[1, 2, 3, 4, 5, 9, 7]);
        let mut out = [0; 7];
        data.read(2, &mut out);
        assert_eq!(out, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(first_difference(&data, 2, 11, 5), None);
        assert_eq!(first_difference(&data, 2, 11, 7), Some(5));
        assert!(!is_zero(&data, 0, 21));
        assert!(is_zero(&data, 9, 2));
        or_into(&mut data, 0, 10, 9);
        data.read(2, &mut out);
        assert_eq!(out, [3, 3, 7, 5, 13, 7, 7]);
        assert!(NoData.is_empty());
    }

    #[test]
    fn what_lies_in_a_later_piece_is_seen() {
        let len = 2 * PIECE as u32 + 9;
        let mut data = vec![0; 2 * len as usize];
        for at in [0, PIECE as u32 - 1, PIECE as u32, len - 1] {
            data.write(len + at, &[1]);
            assert!(!is_zero(&data, len, len));
            assert_eq!(first_difference(&data, 0, len, len), Some(at));
            assert_eq!(first_difference(&data, 0, len, at), None);
            or_into(&mut data, 0, len, len);
            assert_eq!(first_difference(&data, 0, len, len), None);
            data.fill(0);
        }
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_range_past_the_end_panics() {
        vec![0; 4].read(2, &mut [0; 3]);
    }
}
