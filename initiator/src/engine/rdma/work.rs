//! Identifiers of work requests.

use riser_transport::verbs::{RKey, WrId};

/// A work request of a connection, encoded in its ID: the kind in the top byte, the key in the four
/// bytes above the lowest two, and the slot in the lowest two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum WorkRequest {
    /// A receive, with its slot.
    Recv(u16),
    /// The SEND of a command.
    Command(u16),
    /// The fast registration of a command's data.
    Register(u16),
    /// The invalidation of a command's key. Contains the key, because another command with another
    /// key may be using the slot when it completes.
    Invalidate(u16, RKey),
    /// The SEND of another message, from the buffer with this number.
    Message(u16),
    /// Probe for a silent peer.
    Probe,
}

impl WorkRequest {
    pub(super) fn id(self) -> WrId {
        let (kind, slot, key) = match self {
            Self::Recv(slot) => (0u64, slot, 0),
            Self::Command(slot) => (1, slot, 0),
            Self::Register(slot) => (2, slot, 0),
            Self::Invalidate(slot, key) => (3, slot, key.0),
            Self::Message(slot) => (4, slot, 0),
            Self::Probe => (5, 0, 0),
        };
        WrId(kind << 56 | u64::from(key) << 16 | u64::from(slot))
    }

    pub(in crate::engine) fn from_id(id: WrId) -> Option<Self> {
        let slot = id.0 as u16;
        Some(match id.0 >> 56 {
            0 => Self::Recv(slot),
            1 => Self::Command(slot),
            2 => Self::Register(slot),
            3 => Self::Invalidate(slot, RKey((id.0 >> 16) as u32)),
            4 => Self::Message(slot),
            5 => Self::Probe,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_request_ids_round_trip() {
        let key = RKey(0xfedc_ba98);
        for work in [
            WorkRequest::Recv(9),
            WorkRequest::Command(3),
            WorkRequest::Register(0x100),
            WorkRequest::Invalidate(0xffff, key),
            WorkRequest::Message(0),
            WorkRequest::Probe,
        ] {
            assert_eq!(WorkRequest::from_id(work.id()), Some(work));
        }
        assert_eq!(WorkRequest::from_id(WrId(u64::MAX)), None);
    }
}
