//! The received stream: PDUs, and data placed into the buffers of their commands.

use riser_memory::MemSlice;
use riser_scsi::iscsi::frame::{DataDigest, Digests, Frame, FrameError, Framer, digest, padding};
use riser_scsi::iscsi::{BHS_LEN, Itt};

use super::{cut, read_parts};
use crate::iscsi::session::Placement;
use crate::request::RequestId;
use crate::session::IscsiFault;

/// Length of the receive buffer in bytes.
pub(super) const BUFFER: usize = 32 << 10;

/// Maximum data segment length during login (default in RFC 7143 13.12).
const LOGIN_SEGMENT: u32 = 8192;

const DATA_IN: u8 = 0x25;
const LOGIN_RESPONSE: u8 = 0x23;
const REJECT: u8 = 0x3f;

/// A completely received part of the stream.
#[derive(Debug)]
pub(in crate::engine) enum Item<'a> {
    /// A complete PDU without a command's data.
    Pdu(Frame<'a>),
    /// A Data-In PDU with its data in place.
    Data {
        /// Header of the Data-In.
        bhs: [u8; BHS_LEN],
        /// Length of its data.
        len: u32,
        /// The data digest matches or is not used.
        is_intact: bool,
    },
}

/// A Data-In PDU whose header was received.
#[derive(Debug)]
struct Arriving {
    bhs: [u8; BHS_LEN],
    len: u32,
    /// Remaining number of data bytes.
    left: usize,
    /// The data is no longer needed.
    is_discarded: bool,
    digest: Option<DataDigest>,
}

/// See the documentation of the module.
#[derive(Debug)]
pub(in crate::engine) struct Incoming {
    framer: Framer,
    limit: u32,
    digests: Digests,
    buffer: Box<[u8]>,
    /// Unparsed range of the buffer.
    start: usize,
    end: usize,
    /// Data was received, and the peer uses iSCSI.
    has_begun: bool,
    arriving: Option<Arriving>,
    /// Memory for the remaining data of `arriving`.
    direct: Vec<MemSlice>,
}

impl Incoming {
    pub(super) fn new() -> Self {
        Self {
            framer: Framer::new(LOGIN_SEGMENT),
            limit: LOGIN_SEGMENT,
            digests: Digests::default(),
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            has_begun: false,
            arriving: None,
            direct: Vec::new(),
        }
    }

    /// Applies the parameters negotiated in the login.
    pub(in crate::engine) fn set(&mut self, limit: u32, digests: Digests) {
        self.framer.set(limit, digests);
        (self.limit, self.digests) = (limit, digests);
        self.has_begun = true;
    }

    /// Returns the memory for the next bytes: the data segments in order, then the buffer, which
    /// always has space.
    pub(super) fn room(&mut self) -> (&[MemSlice], &mut [u8]) {
        // Bytes in the buffer precede new data.
        let mut direct: &[MemSlice] = &[];
        if self.start == self.end {
            direct = &self.direct;
            (self.start, self.end) = (0, 0);
        } else if self.end == BUFFER {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        (direct, &mut self.buffer[self.end..])
    }

    /// Called when `len` bytes were received into this memory.
    pub(super) fn advance(&mut self, len: usize) {
        let mut rest = len;
        if self.start == self.end {
            let direct = self.direct.iter().map(MemSlice::len).sum::<usize>();
            let placed = rest.min(direct);
            self.place(placed);
            rest -= placed;
        }
        self.end += rest;
    }

    /// Called when `len` bytes of the arriving data are in place.
    fn place(&mut self, mut len: usize) {
        let Some(arriving) = &mut self.arriving else {
            return;
        };
        arriving.left -= len;
        let mut done = 0;
        for slice in &mut self.direct {
            if len == 0 {
                break;
            }
            let here = len.min(slice.len());
            if let Some(digest) = &mut arriving.digest {
                let placed = slice.slice(0..here).expect("within the slice");
                read_parts(&placed, |part| digest.update(part));
            }
            len -= here;
            if here == slice.len() {
                done += 1;
            } else {
                *slice = slice.slice(here..slice.len()).expect("within the slice");
            }
        }
        self.direct.drain(..done);
    }

    /// Returns the next complete item. `place` returns the placement for the data of a Data-In PDU,
    /// and `buffers` returns the buffers of a request.
    ///
    /// # Errors
    /// [`IscsiFault`]: the stream cannot be used anymore.
    pub(in crate::engine) fn next<'b>(
        &mut self,
        place: impl Fn(&[u8; BHS_LEN], u32) -> Result<Placement, IscsiFault>,
        buffers: impl Fn(RequestId) -> &'b [riser_block::Buffer],
    ) -> Result<Option<Item<'_>>, IscsiFault> {
        if !self.has_begun && self.start < self.end {
            self.check_peer()?;
        }
        if self.arriving.is_none() && self.framer.buffered_len() == 0 {
            self.begin_data(place, buffers)?;
        }
        if self.arriving.is_some() {
            return Ok(self.take_data());
        }
        if self.start == self.end || self.is_data_in() {
            return Ok(None);
        }
        let input = &self.buffer[self.start..self.end];
        let (used, frame) = self.framer.next(input)?;
        self.start += used;
        Ok(frame.map(Item::Pdu))
    }

    /// Returns the tag of the command that is receiving data.
    pub(in crate::engine) fn arriving(&self) -> Option<Itt> {
        let arriving = self.arriving.as_ref().filter(|a| !a.is_discarded)?;
        let bhs = &arriving.bhs;
        Some(Itt(u32::from_be_bytes([
            bhs[16], bhs[17], bhs[18], bhs[19],
        ])))
    }

    /// Validates the first byte of a connection: a target must respond to the login first.
    fn check_peer(&mut self) -> Result<(), IscsiFault> {
        if !matches!(self.buffer[self.start] & 0x3f, LOGIN_RESPONSE | REJECT) {
            return Err(IscsiFault::NotIscsi);
        }
        self.has_begun = true;
        Ok(())
    }

    /// Returns whether the next PDU is a Data-In, according to its first byte.
    fn is_data_in(&self) -> bool {
        self.framer.buffered_len() == 0
            && self.start < self.end
            && self.buffer[self.start] & 0x3f == DATA_IN
            && self.buffer[self.start..self.end]
                .get(5..8)
                .is_none_or(|len| len != [0; 3])
    }

    /// Parses the header of a Data-In PDU with data, if it is next and complete.
    fn begin_data<'b>(
        &mut self,
        place: impl Fn(&[u8; BHS_LEN], u32) -> Result<Placement, IscsiFault>,
        buffers: impl Fn(RequestId) -> &'b [riser_block::Buffer],
    ) -> Result<(), IscsiFault> {
        let header_len = BHS_LEN + if self.digests.header { 4 } else { 0 };
        let input = &self.buffer[self.start..self.end];
        if !self.is_data_in() || input.len() < header_len {
            return Ok(());
        }
        let bhs: [u8; BHS_LEN] = *input.first_chunk().expect("long enough");
        // Check this before placing data, because a corrupt header would refer to the memory of
        // another command.
        if self.digests.header && digest(&[&bhs]) != input[BHS_LEN..header_len] {
            return Err(FrameError::HeaderDigest.into());
        }
        if bhs[4] != 0 {
            return Err(FrameError::TotalAhsLength(usize::from(bhs[4]) * 4).into());
        }
        let len = u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]);
        if len > self.limit {
            let limit = self.limit;
            return Err(FrameError::DataSegmentLength { len, limit }.into());
        }
        let placement = place(&bhs, len)?;
        self.direct.clear();
        if let Placement::Into(request, offset) = placement {
            let slices = buffers(request).iter().map(riser_block::Buffer::slice);
            cut(slices, offset as usize, len as usize, |slice| {
                self.direct.push(slice);
            });
        }
        self.start += header_len;
        self.arriving = Some(Arriving {
            bhs,
            len,
            left: len as usize,
            is_discarded: placement == Placement::Discard,
            digest: self.digests.data.then(DataDigest::new),
        });
        Ok(())
    }

    /// Consumes the arriving data in the buffer, with its padding and digest.
    fn take_data(&mut self) -> Option<Item<'static>> {
        let arriving = self.arriving.as_mut()?;
        let here = arriving.left.min(self.end - self.start);
        if here > 0 {
            let bytes = &self.buffer[self.start..self.start + here];
            self.start += here;
            // Also check the data of an abandoned command: a wrong digest indicates that the stream
            // is corrupt.
            if arriving.is_discarded {
                if let Some(digest) = &mut arriving.digest {
                    digest.update(bytes);
                }
                arriving.left -= here;
            } else {
                let mut at = 0;
                for slice in &self.direct {
                    let part = &bytes[at..(at + slice.len()).min(here)];
                    slice.write(0, part);
                    at += part.len();
                }
                self.place(here);
            }
        }
        let arriving = self.arriving.as_mut()?;
        let pad = padding(arriving.len as usize);
        let tail = pad + if arriving.digest.is_some() { 4 } else { 0 };
        if arriving.left > 0 || self.end - self.start < tail {
            return None;
        }
        let tail = &self.buffer[self.start..self.start + tail];
        self.start += tail.len();
        let mut arriving = self.arriving.take()?;
        let is_intact = match arriving.digest.take() {
            None => true,
            Some(mut digest) => {
                digest.update(&tail[..pad]);
                digest.finish() == tail[pad..]
            }
        };
        Some(Item::Data {
            bhs: arriving.bhs,
            len: arriving.len,
            is_intact,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_block::{Buffer, BufferPool};
    use riser_scsi::iscsi::frame;

    use super::*;

    const LEN: usize = 70_001;

    /// Fills the memory in order, like a socket.
    fn feed(incoming: &mut Incoming, bytes: &[u8]) {
        let mut rest = bytes;
        let (direct, room) = incoming.room();
        for slice in direct {
            let (here, later) = rest.split_at(rest.len().min(slice.len()));
            slice.write(0, here);
            rest = later;
        }
        let here = rest.len().min(room.len());
        room[..here].copy_from_slice(&rest[..here]);
        incoming.advance(bytes.len() - (rest.len() - here));
        assert_eq!(here, rest.len(), "more than there was room for");
    }

    /// Returns the maximum length that a socket can receive at once.
    fn space(incoming: &mut Incoming) -> usize {
        let (direct, room) = incoming.room();
        direct.iter().map(MemSlice::len).sum::<usize>() + room.len()
    }

    fn data_in(offset: u32, data: &[u8], digests: Digests, out: &mut Vec<u8>) {
        let mut bhs = [0; BHS_LEN];
        bhs[0] = DATA_IN;
        bhs[40..44].copy_from_slice(&offset.to_be_bytes());
        frame::put_pdu(bhs, &[], data, digests, out);
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    /// Feeds a ping, the data of a command in three PDUs, and another ping, in pieces of these
    /// sizes.
    fn run(sizes: &[usize], digests: Digests, damage: Option<usize>) -> (Vec<String>, Vec<u8>) {
        let pool = BufferPool::new(1 << 20).unwrap();
        let buffers: Vec<Buffer> = [1, 4097, 30_000, LEN - 34_098]
            .iter()
            .map(|len| pool.try_take(*len).unwrap())
            .collect();
        let data = pattern(LEN);
        let mut stream = Vec::new();
        let mut ping = [0; BHS_LEN];
        ping[0] = 0x20;
        frame::put_pdu(ping, &[], b"hello", digests, &mut stream);
        for range in [0..5, 5..40_000, 40_000..LEN] {
            data_in(range.start as u32, &data[range], digests, &mut stream);
        }
        if let Some(at) = damage {
            let at = stream.len() - 100 - at;
            stream[at] ^= 1;
        }
        frame::put_pdu(ping, &[], b"", digests, &mut stream);
        let mut incoming = Incoming::new();
        incoming.set(1 << 20, digests);
        let mut seen = Vec::new();
        let mut at = 0;
        let mut sizes = sizes.iter().cycle();
        while at < stream.len() {
            let len = *sizes.next().expect("cycles");
            let len = len.min(space(&mut incoming)).min(stream.len() - at);
            feed(&mut incoming, &stream[at..at + len]);
            at += len;
            let place = |bhs: &[u8; BHS_LEN], _| {
                let offset = u32::from_be_bytes(bhs[40..44].try_into().expect("four bytes"));
                Ok(Placement::Into(RequestId(0), offset))
            };
            while let Some(item) = incoming.next(place, |_| &buffers).expect("a legal stream") {
                seen.push(match item {
                    Item::Pdu(frame) => format!("{:02x} {:?}", frame.bhs[0], frame.data),
                    Item::Data { len, is_intact, .. } => format!("{len} {is_intact}"),
                });
            }
        }
        let placed = buffers.iter().flat_map(|b| b.slice().to_vec()).collect();
        (seen, placed)
    }

    #[test]
    fn corrupt_data_is_reported() {
        let digests = Digests {
            header: true,
            data: true,
        };
        let (seen, placed) = run(&[1 << 20], digests, Some(0));
        assert_eq!(seen[3], "30001 false");
        assert_ne!(placed, pattern(LEN));
    }

    #[test]
    fn invalid_header_is_rejected() {
        let none = |_: &[u8; BHS_LEN], _| Err(IscsiFault::DataRange);
        let mut stream = Vec::new();
        data_in(0, &[0; 4], Digests::default(), &mut stream);
        let mut incoming = Incoming::new();
        incoming.set(LOGIN_SEGMENT, Digests::default());
        feed(&mut incoming, &stream);
        assert!(incoming.next(none, |_| &[]).is_err());
        for (at, byte, wanted) in [(4, 1, "header segments"), (5, 1, "data segment")] {
            let mut bad = stream.clone();
            bad[at] = byte;
            let mut incoming = Incoming::new();
            incoming.set(LOGIN_SEGMENT, Digests::default());
            feed(&mut incoming, &bad);
            let fault = incoming.next(none, |_| &[]).unwrap_err();
            assert!(fault.to_string().contains(wanted), "{fault}");
        }
    }

    #[test]
    fn non_iscsi_server_is_reported() {
        let none = |_: &[u8; BHS_LEN], _| Err(IscsiFault::DataRange);
        for text in [
            "HTTP/1.1 400 Bad Request\r\n",
            "SSH-2.0-x\r\n",
            "220 ready\r\n",
            "\x15\x03",
        ] {
            let mut incoming = Incoming::new();
            feed(&mut incoming, text.as_bytes());
            assert_eq!(
                incoming.next(none, |_| &[]).unwrap_err(),
                IscsiFault::NotIscsi
            );
        }
        for opcode in [LOGIN_RESPONSE, REJECT] {
            let mut incoming = Incoming::new();
            feed(&mut incoming, &[opcode]);
            assert!(incoming.next(none, |_| &[]).unwrap().is_none());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn stream_parsing_is_independent_of_splits(
            sizes in proptest::collection::vec(1usize..50_000, 1..8),
            header in any::<bool>(),
            data in any::<bool>(),
        ) {
            let (seen, placed) = run(&sizes, Digests { header, data }, None);
            let want = [
                "20 [104, 101, 108, 108, 111]",
                "5 true",
                "39995 true",
                "30001 true",
                "20 []",
            ];
            prop_assert_eq!(seen, want);
            prop_assert!(placed == pattern(LEN));
        }
    }
}
