//! Outgoing frame, divided into packets.

use crate::vnic::QpAddress;
use crate::vnic::wire::packet::{FRAGMENT_HEADER, Fragment, HEADER, Header};

/// Destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A single port.
    Port(QpAddress),
    /// All ports, via the multicast group of the fabric.
    Group,
}

/// Outgoing frame.
#[derive(Clone, Copy, Debug)]
pub struct Encapsulated {
    /// Headers of the packet, or of all fragments.
    pub header: Header,
    /// Destination.
    pub to: Destination,
    /// Virtual lane: Omni-Path hardware has a queue per lane, the software NIC has a single queue.
    pub vl: u8,
    /// Maximum packet length accepted by all receivers, in bytes.
    pub mtu: usize,
    /// Frame number of this sender.
    pub(super) ident: u32,
}

impl Encapsulated {
    /// Returns the number of packets required for a frame of `frame_len` bytes.
    #[must_use]
    pub fn packets(&self, frame_len: usize) -> usize {
        if frame_len + HEADER <= self.mtu {
            return 1;
        }
        frame_len.div_ceil(self.mtu - FRAGMENT_HEADER)
    }

    /// Writes packet `index` of the frame to `out`; returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than [`Encapsulated::mtu`], or if there is no such packet.
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
