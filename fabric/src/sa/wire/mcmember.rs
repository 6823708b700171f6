//! MCMemberRecord (IBTA 15.2.5.17).

use bitflags::bitflags;
use riser_transport::verbs::Gid;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Limit, Record, attribute, word};

/// Multicast group and one of its members.
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
pub struct McMemberRecord {
    /// GID of the group.
    pub mgid: [u8; 16],
    /// GID of the member's port.
    pub port_gid: [u8; 16],
    /// Queue key of the group.
    pub qkey: U32,
    /// LID of the group.
    pub mlid: U16,
    /// Path MTU.
    pub mtu: Limit,
    /// Traffic class.
    pub traffic_class: u8,
    /// Partition.
    pub pkey: U16,
    /// Static rate.
    pub rate: Limit,
    /// Packet life time: 4.096 µs × 2^n.
    pub packet_life_time: Limit,
    /// Service level, flow label and hop limit: 4, 20 and 8 bits.
    pub sl_flow_label_hop_limit: U32,
    /// Scope and [`join_state`], 4 bits each.
    pub scope_and_join_state: u8,
    /// ProxyJoin in the top bit: another port joined on behalf of this port.
    pub proxy_join: u8,
    /// Zero on the wire.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<McMemberRecord>() == 52);

/// Membership types (JoinState).
pub mod join_state {
    /// FullMember: sends and receives, and keeps the group alive.
    pub const FULL_MEMBER: u8 = 1;
    /// NonMember: sends and receives.
    pub const NON_MEMBER: u8 = 2;
    /// SendOnlyNonMember: sends.
    pub const SEND_ONLY_NON_MEMBER: u8 = 4;
    /// SendOnlyFullMember: sends, and keeps the group alive.
    pub const SEND_ONLY_FULL_MEMBER: u8 = 8;
}

bitflags! {
    /// Components of a MCMemberRecord.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct McMemberMask: u64 {
        /// MGID.
        const MGID = 1 << 0;
        /// PortGID.
        const PORT_GID = 1 << 1;
        /// Q_Key.
        const QKEY = 1 << 2;
        /// MLID.
        const MLID = 1 << 3;
        /// MTUSelector.
        const MTU_SELECTOR = 1 << 4;
        /// MTU.
        const MTU = 1 << 5;
        /// TClass.
        const TRAFFIC_CLASS = 1 << 6;
        /// P_Key.
        const PKEY = 1 << 7;
        /// RateSelector.
        const RATE_SELECTOR = 1 << 8;
        /// Rate.
        const RATE = 1 << 9;
        /// PacketLifeTimeSelector.
        const PACKET_LIFE_TIME_SELECTOR = 1 << 10;
        /// PacketLifeTime.
        const PACKET_LIFE_TIME = 1 << 11;
        /// SL.
        const SL = 1 << 12;
        /// FlowLabel.
        const FLOW_LABEL = 1 << 13;
        /// HopLimit.
        const HOP_LIMIT = 1 << 14;
        /// Scope.
        const SCOPE = 1 << 15;
        /// JoinState.
        const JOIN_STATE = 1 << 16;
        /// ProxyJoin.
        const PROXY_JOIN = 1 << 17;
        /// Fields required to create a group (IBTA 15.2.5.17.2).
        const CREATE = Self::QKEY.bits() | Self::TRAFFIC_CLASS.bits() | Self::PKEY.bits()
            | Self::SL.bits() | Self::FLOW_LABEL.bits();
        /// Fields of later versions.
        const _ = !0;
    }
}

impl Record for McMemberRecord {
    const ATTRIBUTE: u16 = attribute::MC_MEMBER_RECORD;
}

impl McMemberRecord {
    /// Creates a record to join or leave a group.
    #[must_use]
    pub fn new(mgid: Gid, port_gid: Gid, join_state: u8) -> Self {
        Self {
            mgid: mgid.0,
            port_gid: port_gid.0,
            scope_and_join_state: join_state & 0xf,
            ..Self::default()
        }
    }

    /// Returns the GID of the group.
    #[must_use]
    pub fn mgid(&self) -> Gid {
        Gid(self.mgid)
    }

    /// Returns the GID of the member's port.
    #[must_use]
    pub fn port_gid(&self) -> Gid {
        Gid(self.port_gid)
    }

    /// Returns the membership types.
    #[must_use]
    pub fn join_state(&self) -> u8 {
        self.scope_and_join_state & 0xf
    }

    /// Returns the scope of the group.
    #[must_use]
    pub fn scope(&self) -> u8 {
        self.scope_and_join_state >> 4
    }

    /// Sets the scope and the membership types, 4 bits each.
    #[must_use]
    pub fn with_state(mut self, scope: u8, join_state: u8) -> Self {
        self.scope_and_join_state = scope << 4 | join_state & 0xf;
        self
    }

    /// Returns the service level.
    #[must_use]
    pub fn sl(&self) -> u8 {
        (self.sl_flow_label_hop_limit.get() >> 28) as u8
    }

    /// Returns the flow label, 20 bits.
    #[must_use]
    pub fn flow_label(&self) -> u32 {
        self.sl_flow_label_hop_limit.get() >> 8 & 0x000f_ffff
    }

    /// Returns the hop limit.
    #[must_use]
    pub fn hop_limit(&self) -> u8 {
        self.sl_flow_label_hop_limit.get() as u8
    }

    /// Sets the service level (4 bits), flow label (20 bits) and hop limit.
    #[must_use]
    pub fn with_route(mut self, sl: u8, flow_label: u32, hop_limit: u8) -> Self {
        self.sl_flow_label_hop_limit = word(sl & 0xf, flow_label, hop_limit);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_layout_matches_libibumad() {
        // struct umad_sa_mcmember_record of <infiniband/umad_sa_mcm.h>, without its padding.
        let mut record = McMemberRecord {
            qkey: U32::new(0x8001_0000),
            mlid: U16::new(0xc001),
            mtu: Limit(0x84),
            traffic_class: 0x11,
            pkey: U16::new(0xffff),
            rate: Limit(0x82),
            packet_life_time: Limit(0x93),
            proxy_join: 0x80,
            ..McMemberRecord::new(
                Gid(std::array::from_fn(|i| 0x10 + i as u8)),
                Gid(std::array::from_fn(|i| 0x30 + i as u8)),
                0,
            )
        };
        record = record.with_route(5, 0xabcde, 64).with_state(5, 1);
        let mut expected: Vec<u8> = (0x10..0x20).collect();
        expected.extend(0x30..0x40);
        expected.extend([
            0x80, 0x01, 0, 0, 0xc0, 0x01, 0x84, 0x11, 0xff, 0xff, 0x82, 0x93,
        ]);
        expected.extend([0x5a, 0xbc, 0xde, 0x40, 0x51, 0x80, 0, 0]);
        assert_eq!(record.as_bytes(), expected);
        assert_eq!(
            (record.sl(), record.flow_label(), record.hop_limit()),
            (5, 0xabcde, 64)
        );
        assert_eq!((record.scope(), record.join_state()), (5, 1));
        // A response pads the record with four bytes.
        let mut data = Vec::new();
        record.append(&mut data);
        record.append(&mut data);
        assert_eq!(data.len(), 112);
        let all: Vec<_> = McMemberRecord::read_all(&data, 7).collect();
        assert_eq!(all, [record, record]);
        assert_eq!(McMemberRecord::read_all(&data, 6).count(), 0);
        assert_eq!(McMemberRecord::read_all(&data, 0).count(), 0);
    }
}
