//! Helper functions for a message: its packets and its scatter list.

use super::MAX_MESSAGE;
use super::state::Inbound;
use crate::mr::KeyError;
use crate::verbs::{Access, RKey, Sge};
use crate::wire::Packet;

/// Returns the payload size of a packet.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a datagram has less than 64 KiB"
)]
pub(crate) fn payload_len(pkt: &Packet<'_>) -> u32 {
    pkt.payload.len() as u32
}

/// Part of an RDMA WRITE contained in a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePart {
    pub(crate) rkey: RKey,
    /// Start address in the packet.
    pub(crate) addr: u64,
    /// Remaining bytes of the message, starting with this packet.
    pub(crate) remaining: u32,
    /// Total message size in bytes.
    pub(crate) total: u32,
    len: u32,
}

impl WritePart {
    /// Returns the part contained in a packet, based on the current state. Returns `None` if there
    /// is no current message or if the size is invalid for this position in the message.
    pub(crate) fn of(inbound: Inbound, pkt: &Packet<'_>) -> Option<Self> {
        let (rkey, addr, remaining, total) = match (inbound, pkt.ext.reth) {
            (
                // The first packet contains address and length in the RETH. The following packets
                // use the current state.
                Inbound::Write {
                    rkey,
                    addr,
                    remaining,
                    total,
                },
                None,
            ) => (rkey, addr, remaining, total),
            (_, Some(reth)) => (RKey(reth.rkey()), reth.va(), reth.dma_len(), reth.dma_len()),
            _ => return None,
        };
        // Compare each packet with the length in the RETH. This ensures that no payload exceeds the
        // range for which the key was checked, and that we report an error if the last packet is
        // received too early, instead of a short message.
        let len = payload_len(pkt);
        let fits = if pkt.op.position.is_end() {
            len == remaining
        } else {
            len < remaining
        };
        (fits && total <= MAX_MESSAGE).then_some(Self {
            rkey,
            addr,
            remaining,
            total,
            len,
        })
    }

    /// Returns whether the access rights of the QP allow this message. A zero-length message
    /// requires neither access rights nor a key (IBTA C9-88). Peers send such a message to wake up
    /// a connection, for example `ib_srpt` with address and key set to 0.
    pub(crate) fn is_allowed(&self, access: Access) -> bool {
        self.total == 0 || access.contains(Access::REMOTE_WRITE)
    }

    /// Returns the state after this part if it's not the last one.
    pub(crate) fn rest(&self) -> Inbound {
        Inbound::Write {
            rkey: self.rkey,
            addr: self.addr.wrapping_add(u64::from(self.len)),
            remaining: self.remaining - self.len,
            total: self.total,
        }
    }
}

/// Returns the number of packets for a message of `length` bytes. An empty message requires one
/// packet.
pub(crate) fn plan_packets(length: u32, mtu: u32) -> u32 {
    debug_assert!(mtu.is_power_of_two(), "a path MTU");
    // A message without payload is a single packet, because it needs a PSN for the acknowledgement.
    // We avoid a division since this is called for each attempt to start a request.
    1 + (length.saturating_sub(1) >> mtu.trailing_zeros())
}

/// Calls `f` for each scatter list entry used by `len` bytes starting at `offset`. The arguments
/// are the entry, the offset in the entry, the offset in the data, and the size. The list must be
/// long enough.
pub(crate) fn walk(
    sges: &[Sge],
    offset: usize,
    len: usize,
    mut f: impl FnMut(&Sge, usize, usize, usize) -> Result<(), KeyError>,
) -> Result<(), KeyError> {
    // Most lists have a single entry.
    if let [only] = sges {
        let end = offset + len;
        assert!(
            end <= only.length as usize,
            "an entry shorter than its message"
        );
        return match len {
            0 => Ok(()),
            _ => f(only, offset, 0, len),
        };
    }
    // We always start with the first entry: lists only have a few entries, and a cursor would need
    // to be updated on each retransmission.
    let (mut skip, mut done) = (offset, 0);
    for sge in sges {
        let length = sge.length as usize;
        if skip >= length {
            skip -= length;
            continue;
        }
        let take = (length - skip).min(len - done);
        if take == 0 {
            break;
        }
        f(sge, skip, done, take)?;
        done += take;
        skip = 0;
    }
    // The size is checked when a request is posted and when a packet is received, so this would be
    // a bug.
    assert_eq!(done, len, "a scatter list shorter than its message");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rc::MAX_MESSAGE;
    use crate::verbs::Mtu;

    #[test]
    fn message_needs_at_least_one_packet() {
        for mtu in Mtu::ALL.map(Mtu::bytes) {
            let planned = |length| plan_packets(length, mtu);
            assert_eq!([0, 1, mtu, mtu + 1].map(planned), [1, 1, 1, 2]);
            for length in [2 * mtu - 1, 2 * mtu, 2 * mtu + 1, MAX_MESSAGE] {
                assert_eq!(planned(length), length.div_ceil(mtu));
            }
        }
    }
}
