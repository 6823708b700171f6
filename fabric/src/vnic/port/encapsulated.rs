//! A frame on its way out, as the packets that it takes.

use crate::vnic::QpAddress;
use crate::vnic::wire::packet::{FRAGMENT_HEADER, Fragment, HEADER, Header};

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// To one port.
    Port(QpAddress),
    /// To all ports, by the group of the fabric.
    Group,
}

/// A frame on its way out.
#[derive(Clone, Copy, Debug)]
pub struct Encapsulated {
    /// Headers of the packet, or of all its fragments.
    pub header: Header,
    /// Where it goes.
    pub to: Destination,
    /// Virtual lane: Omni-Path's hardware has a queue for each, the software NIC one for all.
    pub vl: u8,
    /// Longest packet that all its receivers take, in bytes.
    pub mtu: usize,
    /// Number of the frame among the sender's.
    pub(super) ident: u32,
}

impl Encapsulated {
    /// Number of packets that a frame of `frame_len` bytes takes.
    #[must_use]
    pub fn packets(&self, frame_len: usize) -> usize {
        if frame_len + HEADER <= self.mtu {
            return 1;
        }
        frame_len.div_ceil(self.mtu - FRAGMENT_HEADER)
    }

    /// Writes packet `index` of those that the frame takes to `out`; returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than [`Encapsulated::mtu`], or the frame has no such packet.
    pub fn emit(&self, frame: &[u8], index: usize, out: &mut [u8]) -> usize {
        let (header, part) = if self.packets(frame.len()) == 1 {
            (self.header, frame)
        } else {
            let room = self.mtu - FRAGMENT_HEADER;
            let offset = index * room;
            let fragment = Fragment {
                ident: self.ident,
                offset: offset as u16,
                frame_len: frame.len() as u16,
            };
            let header = Header {
                fragment: Some(fragment),
                ..self.header
            };
            (header, &frame[offset..frame.len().min(offset + room)])
        };
        let at = header.emit(part.len(), out);
        out[at..at + part.len()].copy_from_slice(part);
        at + part.len()
    }
}
