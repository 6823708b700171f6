//! How a command sees the bytes of its data buffer.
//!
//! A command's buffer belongs to the target: it is a list of registered
//! segments shared by the network and the disk. A command never holds it; it
//! looks at it through [`DataAccess`] while it decides its next step. Block
//! data passes by untouched; only parameter lists, comparison and pattern
//! writes look inside.

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

    /// The longest contiguous run of bytes that starts at `offset`.
    ///
    /// Never empty while `offset < self.len()`.
    fn chunk(&self, offset: u32) -> &[u8];

    /// The same run, for writing.
    fn chunk_mut(&mut self, offset: u32) -> &mut [u8];
}

impl DataAccess for Vec<u8> {
    fn len(&self) -> u32 {
        u32::try_from(self.as_slice().len()).expect("a data buffer is shorter than 4 GiB")
    }

    fn chunk(&self, offset: u32) -> &[u8] {
        &self[offset as usize..]
    }

    fn chunk_mut(&mut self, offset: u32) -> &mut [u8] {
        &mut self[offset as usize..]
    }
}

/// The buffer of a command that needs none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoData;

impl DataAccess for NoData {
    fn len(&self) -> u32 {
        0
    }

    fn chunk(&self, _offset: u32) -> &[u8] {
        &[]
    }

    fn chunk_mut(&mut self, _offset: u32) -> &mut [u8] {
        &mut []
    }
}

/// Copies bytes out of the buffer; `into` must lie inside it.
pub(crate) fn copy_out(data: &dyn DataAccess, offset: u32, into: &mut [u8]) {
    let mut done = 0;
    while done < into.len() {
        let chunk = data.chunk(offset + done as u32);
        assert!(
            !chunk.is_empty(),
            "the data buffer is shorter than the command asked"
        );
        let take = chunk.len().min(into.len() - done);
        into[done..done + take].copy_from_slice(&chunk[..take]);
        done += take;
    }
}

/// Copies bytes into the buffer; `from` must fit.
pub(crate) fn copy_in(data: &mut dyn DataAccess, offset: u32, from: &[u8]) {
    let mut done = 0;
    while done < from.len() {
        let chunk = data.chunk_mut(offset + done as u32);
        assert!(
            !chunk.is_empty(),
            "the data buffer is shorter than the command asked"
        );
        let take = chunk.len().min(from.len() - done);
        chunk[..take].copy_from_slice(&from[done..done + take]);
        done += take;
    }
}

/// Compares two ranges of the buffer; the index of the first byte that differs.
pub(crate) fn first_difference(
    data: &dyn DataAccess,
    left_offset: u32,
    right_offset: u32,
    len: u32,
) -> Option<u32> {
    let mut done = 0;
    while done < len {
        let left = data.chunk(left_offset + done);
        let right = data.chunk(right_offset + done);
        let take = left.len().min(right.len()).min((len - done) as usize);
        assert!(
            take > 0,
            "the data buffer is shorter than the command asked"
        );
        if left[..take] != right[..take] {
            // Whole chunks are compared first, which is fast; only in the one that differs are the
            // bytes looked at.
            let index = (0..take).find(|&i| left[i] != right[i])?;
            return Some(done + index as u32);
        }
        done += take as u32;
    }
    None
}

/// Sets in one range of the buffer the bits that another one has. The ranges do
/// not overlap.
pub(crate) fn or_into(data: &mut dyn DataAccess, into: u32, from: u32, len: u32) {
    // Through a piece on the stack: the buffer cannot be borrowed in two places, one of them to be
    // written.
    let mut piece = [0; 4096];
    let mut done = 0;
    while done < len {
        let target = data.chunk(into + done).len();
        let take = target.min(piece.len()).min((len - done) as usize);
        assert!(
            take > 0,
            "the data buffer is shorter than the command asked"
        );
        copy_out(data, from + done, &mut piece[..take]);
        let target = &mut data.chunk_mut(into + done)[..take];
        for (byte, more) in target.iter_mut().zip(&piece) {
            *byte |= more;
        }
        done += take as u32;
    }
}

/// Whether every byte of a range is zero.
pub(crate) fn is_zero(data: &dyn DataAccess, offset: u32, len: u32) -> bool {
    let mut done = 0;
    while done < len {
        let chunk = data.chunk(offset + done);
        let take = chunk.len().min((len - done) as usize);
        assert!(
            take > 0,
            "the data buffer is shorter than the command asked"
        );
        if chunk[..take].iter().any(|&byte| byte != 0) {
            return false;
        }
        done += take as u32;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Segments of three bytes, to cross as many borders as possible.
    struct Pieces(Vec<[u8; 3]>);

    impl DataAccess for Pieces {
        fn len(&self) -> u32 {
            self.0.len() as u32 * 3
        }
        fn chunk(&self, offset: u32) -> &[u8] {
            &self.0[offset as usize / 3][offset as usize % 3..]
        }
        fn chunk_mut(&mut self, offset: u32) -> &mut [u8] {
            &mut self.0[offset as usize / 3][offset as usize % 3..]
        }
    }

    #[test]
    fn scattered_bytes_read_back_compare_and_differ() {
        let mut data = Pieces(vec![[0; 3]; 7]);
        assert!(is_zero(&data, 0, 21));
        copy_in(&mut data, 2, &[1, 2, 3, 4, 5, 6, 7]);
        copy_in(&mut data, 11, &[1, 2, 3, 4, 5, 9, 7]);
        let mut out = [0; 7];
        copy_out(&data, 2, &mut out);
        assert_eq!(out, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(first_difference(&data, 2, 11, 5), None);
        assert_eq!(first_difference(&data, 2, 11, 7), Some(5));
        assert!(!is_zero(&data, 0, 21));
        assert!(is_zero(&data, 9, 2));
        or_into(&mut data, 0, 10, 9);
        copy_out(&data, 2, &mut out);
        assert_eq!(out, [3, 3, 7, 5, 13, 7, 7]);
        assert!(NoData.is_empty());
    }
}
