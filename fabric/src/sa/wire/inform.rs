//! InformInfo and Notice (IBTA 13.4.8.2, 13.4.8.3): event subscriptions and event notifications.

use bitflags::bitflags;
use riser_transport::verbs::Gid;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Record, all_match, attribute};

/// Events reported by the administrator itself (IBTA 14.2.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum Trap {
    /// A GID came into service.
    GidInService = 64,
    /// A GID went out of service.
    GidOutOfService = 65,
    /// A multicast group was created.
    GroupCreated = 66,
    /// A multicast group was deleted.
    GroupDeleted = 67,
}

/// Wildcard for types, traps and LIDs.
pub const ALL: u16 = 0xffff;

/// Node type of a subnet manager.
pub const CLASS_MANAGER: u32 = 4;

/// Wildcard for node types: 24 bits.
const ALL_NODES: u32 = 0x00ff_ffff;

/// Informational notice type.
const INFORMATIONAL: u8 = 4;

/// Request to subscribe to notices or to unsubscribe.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct InformInfo {
    /// GID of the port that notices must refer to; 0 to select a LID range instead.
    pub gid: [u8; 16],
    /// First LID of the range, or [`ALL`].
    pub lid_range_begin: U16,
    /// Last LID of the range.
    pub lid_range_end: U16,
    /// Zero on the wire.
    pub reserved: U16,
    /// 1 for generic notices, which are common to all vendors.
    pub is_generic: u8,
    /// 1 to subscribe, 0 to unsubscribe.
    pub subscribe: u8,
    /// Notice type, or [`ALL`].
    pub notice_type: U16,
    /// Trap number, or [`ALL`].
    pub trap_number: U16,
    /// Queue pair that receives the reports. The low 5 bits contain the response time of the
    /// subscriber: 4.096 µs × 2^n.
    pub qpn_and_response_time: U32,
    /// Zero on the wire.
    pub reserved2: u8,
    /// Type of the node that generates the event, 24 bits.
    pub node_type: [u8; 3],
}

const _: () = assert!(size_of::<InformInfo>() == 36);

/// A subscription and its owner (InformInfoRecord, IBTA 15.2.5.12).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct InformInfoRecord {
    /// GID of the subscriber.
    pub subscriber_gid: [u8; 16],
    /// Index of the subscription among the subscriptions of its subscriber.
    pub subscriber_enum: U16,
    /// Zero on the wire.
    pub reserved: [u8; 6],
    /// The subscription.
    pub info: InformInfo,
}

const _: () = assert!(size_of::<InformInfoRecord>() == 60);

bitflags! {
    /// Components of an InformInfoRecord.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct InformMask: u64 {
        /// SubscriberGID.
        const SUBSCRIBER_GID = 1 << 0;
        /// SubscriberEnum.
        const SUBSCRIBER_ENUM = 1 << 1;
        /// TrapNumber.
        const TRAP_NUMBER = 1 << 10;
        /// Remaining fields.
        const _ = !0;
    }
}

/// Event notification.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Notice {
    /// IsGeneric in the top bit, followed by the type.
    pub generic_and_type: u8,
    /// Type of the node that generates the event, 24 bits.
    pub node_type: [u8; 3],
    /// Trap number.
    pub trap_number: U16,
    /// LID of the node.
    pub issuer_lid: U16,
    /// NoticeToggle in the top bit, followed by the number of pending notices.
    pub toggle_and_count: U16,
    /// Event data. The administrator's own events have a GID at offset 6.
    pub details: [u8; 54],
    /// GID of the node.
    pub issuer_gid: [u8; 16],
}

const _: () = assert!(size_of::<Notice>() == 80);

impl Record for InformInfo {
    const ATTRIBUTE: u16 = attribute::INFORM_INFO;
}

impl Record for InformInfoRecord {
    const ATTRIBUTE: u16 = attribute::INFORM_INFO_RECORD;
}

impl InformInfoRecord {
    /// Returns whether all fields selected by a request match.
    #[must_use]
    pub fn matches(&self, mask: InformMask, wanted: &Self) -> bool {
        let fields = [
            (
                InformMask::SUBSCRIBER_GID,
                self.subscriber_gid == wanted.subscriber_gid,
            ),
            (
                InformMask::SUBSCRIBER_ENUM,
                self.subscriber_enum == wanted.subscriber_enum,
            ),
            (
                InformMask::TRAP_NUMBER,
                self.info.trap_number == wanted.info.trap_number,
            ),
        ];
        all_match(mask, &fields)
    }
}

impl Record for Notice {
    const ATTRIBUTE: u16 = attribute::NOTICE;
}

impl InformInfo {
    /// Creates a request that subscribes queue pair 1 to an event on any port, or unsubscribes it.
    #[must_use]
    pub fn new(trap: Option<Trap>, is_subscription: bool) -> Self {
        Self {
            lid_range_begin: U16::new(ALL),
            is_generic: 1,
            subscribe: u8::from(is_subscription),
            notice_type: U16::new(ALL),
            trap_number: U16::new(trap.map_or(ALL, |trap| trap as u16)),
            qpn_and_response_time: U32::new(1 << 8 | 18),
            node_type: [0xff; 3],
            ..Self::default()
        }
    }

    /// Returns the queue pair that receives the reports.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.qpn_and_response_time.get() >> 8
    }

    /// Returns whether a notice matches the subscription.
    #[must_use]
    pub fn admits(&self, notice: &Notice) -> bool {
        let is_any = |wanted: U16, value: u16| wanted.get() == ALL || wanted.get() == value;
        let node = |bytes: [u8; 3]| u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
        let wanted = node(self.node_type);
        let is_about = self.gid == [0; 16] || self.gid == notice.issuer_gid;
        is_about
            && self.is_generic != 0
            && is_any(self.notice_type, u16::from(notice.generic_and_type & 0x7f))
            && is_any(self.trap_number, notice.trap_number.get())
            && (wanted == ALL_NODES || wanted == node(notice.node_type))
    }

    /// Returns whether both subscriptions select the same notices.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let without = |info: &Self| Self {
            subscribe: 0,
            qpn_and_response_time: U32::ZERO,
            ..*info
        };
        without(self) == without(other)
    }
}

impl Notice {
    /// Creates a notice from the administrator (`issuer`) about a port or group.
    #[must_use]
    pub fn new(trap: Trap, about: Gid, issuer: Gid) -> Self {
        let mut details = [0; 54];
        details[6..22].copy_from_slice(&about.0);
        let [_, node_type @ ..] = CLASS_MANAGER.to_be_bytes();
        Self {
            generic_and_type: 0x80 | INFORMATIONAL,
            node_type,
            trap_number: U16::new(trap as u16),
            issuer_lid: U16::ZERO,
            toggle_and_count: U16::ZERO,
            details,
            issuer_gid: issuer.0,
        }
    }

    /// Returns the administrator's event and the port or group it refers to. Returns `None` for any
    /// other notice.
    #[must_use]
    pub fn event(&self) -> Option<(Trap, Gid)> {
        let all = [
            Trap::GidInService,
            Trap::GidOutOfService,
            Trap::GroupCreated,
            Trap::GroupDeleted,
        ];
        let number = self.trap_number.get();
        let trap = all.into_iter().find(|trap| *trap as u16 == number)?;
        let is_generic = self.generic_and_type & 0x80 != 0;
        let gid = self.details[6..22].try_into().ok()?;
        is_generic.then_some((trap, Gid(gid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inform_info_layout_matches_opensm() {
        // ib_inform_info_t of opensm's <iba/ib_types.h>.
        let info = InformInfo {
            gid: std::array::from_fn(|i| 0x10 + i as u8),
            lid_range_end: U16::new(0x2122),
            node_type: [0, 0, 4],
            ..InformInfo::new(Some(Trap::GroupCreated), true)
        };
        let mut expected: Vec<u8> = (0x10..0x20).collect();
        expected.extend([0xff, 0xff, 0x21, 0x22, 0, 0, 1, 1, 0xff, 0xff, 0, 66]);
        expected.extend([0, 0, 1, 18, 0, 0, 0, 4]);
        assert_eq!(info.as_bytes(), expected);
        assert_eq!(info.qpn(), 1);
    }

    #[test]
    fn inform_record_layout_matches_libibmad() {
        // ib_inform_info_record_t of libibmad's iba_types.h, padded to 64 bytes.
        let record = InformInfoRecord {
            subscriber_gid: [0x31; 16],
            subscriber_enum: U16::new(0x0102),
            info: InformInfo::new(Some(Trap::GroupDeleted), true),
            ..InformInfoRecord::default()
        };
        let mut expected = vec![0x31; 16];
        expected.extend([1, 2, 0, 0, 0, 0, 0, 0]);
        expected.extend([0; 16]);
        expected.extend([0xff, 0xff, 0, 0, 0, 0, 1, 1, 0xff, 0xff, 0, 67]);
        expected.extend([0, 0, 1, 18, 0, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        let mut data = Vec::new();
        record.append(&mut data);
        assert_eq!(data, expected);
        assert_eq!(InformInfoRecord::ATTRIBUTE, 0xf3);
        let other = InformInfoRecord::default();
        for bit in [0, 1, 10] {
            let mask = InformMask::from_bits_retain(1 << bit);
            assert!(!record.matches(mask, &other), "{bit}");
        }
        assert!(record.matches(InformMask::empty(), &other));
    }

    #[test]
    fn notice_layout_matches_opensm() {
        // ib_mad_notice_attr_t, with ntc_64_67.
        let about = Gid(std::array::from_fn(|i| 0x50 + i as u8));
        let issuer = Gid(std::array::from_fn(|i| 0x70 + i as u8));
        let notice = Notice::new(Trap::GidInService, about, issuer);
        let mut expected = vec![0x84, 0, 0, 4, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        expected.extend(0x50..0x60);
        expected.resize(64, 0);
        expected.extend(0x70..0x80);
        assert_eq!(notice.as_bytes(), expected);
        assert_eq!(notice.event(), Some((Trap::GidInService, about)));
    }

    #[test]
    fn subscription_matches_selected_notices() {
        let issuer = Gid([7; 16]);
        let notice = Notice::new(Trap::GroupDeleted, Gid([0xff; 16]), issuer);
        assert!(InformInfo::new(None, true).admits(&notice));
        assert!(InformInfo::new(Some(Trap::GroupDeleted), true).admits(&notice));
        assert!(!InformInfo::new(Some(Trap::GroupCreated), true).admits(&notice));
        let of_other = InformInfo {
            gid: [8; 16],
            ..InformInfo::new(None, true)
        };
        assert!(!of_other.admits(&notice));
        let of_switches = InformInfo {
            node_type: [0, 0, 2],
            ..InformInfo::new(None, true)
        };
        assert!(!of_switches.admits(&notice));
        assert!(InformInfo::new(None, true).is_same(&InformInfo::new(None, false)));
    }
}
