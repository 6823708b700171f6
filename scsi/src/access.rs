//! Access to the data buffer of a command.
//!
//! The buffer is owned by the target. It's a list of registered memory segments which are shared
//! between the network and the disk. A command never owns the buffer. It only uses [`DataAccess`]
//! to copy bytes from and to the buffer when it has to decide on the next step. We cannot create a
//! reference to the buffer contents, because a device could write to it at any time. Block data is
//! only accessed here to compare it, to combine it (ORWRITE), to write a pattern, and to calculate
//! or check protection information.

/// Number of bytes to process at once when a command needs to access more data.
const PIECE: usize = 4096;

/// The data buffer of a single command, which may use multiple segments.
///
/// All offsets are in bytes from the start of the buffer. The buffer size must be at least
/// [`buffer_len`](crate::device_server::Command::buffer_len) bytes.
pub trait DataAccess {
    /// Returns the size of the buffer, in bytes.
    fn len(&self) -> u32;

    /// Returns whether the buffer is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from the buffer, starting at `offset`.
    ///
    /// # Panics
    /// If `into` extends past the end of the buffer.
    fn read(&self, offset: u32, into: &mut [u8]);

    /// Copies bytes to the buffer, starting at `offset`.
    ///
    /// # Panics
    /// If `from` extends past the end of the buffer.
    fn write(&mut self, offset: u32, from: &[u8]);
}

impl DataAccess for Vec<u8> {
    fn len(&self) -> u32 {
        u32::try_from(self.as_slice().len()).expect("data buffer is smaller than 4 GiB")
    }

    fn read(&self, offset: u32, into: &mut [u8]) {
        into.copy_from_slice(&self[offset as usize..][..into.len()]);
    }

    fn write(&mut self, offset: u32, from: &[u8]) {
        self[offset as usize..][..from.len()].copy_from_slice(from);
    }
}

/// Used as a buffer for commands without any data.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoData;

impl DataAccess for NoData {
    fn len(&self) -> u32 {
        0
    }

    fn read(&self, _offset: u32, into: &mut [u8]) {
        assert!(into.is_empty(), "read from a command without data");
    }

    fn write(&mut self, _offset: u32, from: &[u8]) {
        assert!(from.is_empty(), "write to a command without data");
    }
}

/// Splits a range of `len` bytes into pieces, starting at offset 0.
fn pieces(len: u32) -> impl Iterator<Item = (u32, usize)> {
    (0..len)
        .step_by(PIECE)
        .map(move |at| (at, PIECE.min((len - at) as usize)))
}

/// Compares two ranges in the buffer. Returns the index of the first different byte.
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
        // It's faster to compare an entire piece first, so we only check the bytes if it is
        // different.
        if left != right {
            let index = left.iter().zip(&*right).position(|(a, b)| a != b)?;
            return Some(at + index as u32);
        }
    }
    None
}

/// Sets all bits in one range that are set in another range. The ranges must not overlap.
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

/// Returns whether all bytes in a range are zero.
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
    fn buffer_ranges_compare_and_combine() {
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
    fn later_pieces_are_compared_too() {
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
    fn read_past_buffer_end_panics() {
        vec![0; 4].read(2, &mut [0; 3]);
    }
}
