//! Arithmetic on one message: its packets, and the scatter list that holds it.

use super::MAX_MESSAGE;
use super::state::Inbound;
use crate::mr::KeyError;
use crate::verbs::{Access, RKey, Sge};
use crate::wire::Packet;

/// Payload bytes of a packet.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a datagram has less than 64 KiB"
)]
pub(crate) fn payload_len(pkt: &Packet<'_>) -> u32 {
    pkt.payload.len() as u32
}

/// The part of an RDMA WRITE that a packet has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePart {
    pub(crate) rkey: RKey,
    /// Address of the packet's first byte.
    pub(crate) addr: u64,
    /// Bytes of the message from there on.
    pub(crate) remaining: u32,
    /// Bytes of the whole message.
    pub(crate) total: u32,
    len: u32,
}

impl WritePart {
    /// The part of a packet, which goes on from what has arrived; `None` for one without a message,
    /// or of another length than its place in the message demands.
    pub(crate) fn of(inbound: Inbound, pkt: &Packet<'_>) -> Option<Self> {
        let (rkey, addr, remaining, total) = match (inbound, pkt.ext.reth) {
            (
                // A first packet brings address and length in its RETH; later ones go on from
                // what is left.
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
        // The length is compared with the RETH packet by packet, so that no payload reaches
        // beyond the range that the key was checked for, and a last packet that comes too early
        // is an error and not a short message.
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

    /// Whether the rights of a queue pair allow the message. One of no bytes needs neither right
    /// nor key (IBTA C9-88): peers send one to wake a connection, `ib_srpt` with address and key 0.
    pub(crate) fn is_allowed(&self, access: Access) -> bool {
        self.total == 0 || access.contains(Access::REMOTE_WRITE)
    }

    /// The message after this part, which is not its last.
    pub(crate) fn rest(&self) -> Inbound {
        Inbound::Write {
            rkey: self.rkey,
            addr: self.addr.wrapping_add(u64::from(self.len)),
            remaining: self.remaining - self.len,
            total: self.total,
        }
    }
}

/// Packets of a message of `length` bytes; a message of none takes one.
pub(crate) fn plan_packets(length: u32, mtu: u32) -> u32 {
    debug_assert!(mtu.is_power_of_two(), "a path MTU");
    // A message without payload is one packet: it needs a PSN to be acknowledged. Without a
    // division, since it is planned at each attempt to begin a request.
    1 + (length.saturating_sub(1) >> mtu.trailing_zeros())
}

/// Calls `f` with each entry that `len` bytes from `offset` on touch: the entry, the offset in it,
/// the offset in those bytes, and how many bytes. The list must be that long.
pub(crate) fn walk(
    sges: &[Sge],
    offset: usize,
    len: usize,
    mut f: impl FnMut(&Sge, usize, usize, usize) -> Result<(), KeyError>,
) -> Result<(), KeyError> {
    // Nearly all lists have one entry.
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
    // From the beginning each time: lists have a few entries, and a cursor would have to follow
    // every going back.
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
    // Lengths are checked when a request is posted and when a packet arrives, so this is a
    // mistake of ours.
    assert_eq!(done, len, "a scatter list shorter than its message");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rc::MAX_MESSAGE;
    use crate::verbs::Mtu;

    #[test]
    fn a_message_takes_as_many_packets_as_its_bytes_fill_and_one_at_least() {
        for mtu in Mtu::ALL.map(Mtu::bytes) {
            let planned = |length| plan_packets(length, mtu);
            assert_eq!([0, 1, mtu, mtu + 1].map(planned), [1, 1, 1, 2]);
            for length in [2 * mtu - 1, 2 * mtu, 2 * mtu + 1, MAX_MESSAGE] {
                assert_eq!(planned(length), length.div_ceil(mtu));
            }
        }
    }
}
