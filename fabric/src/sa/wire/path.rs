//! PathRecord (IBTA 15.2.5.16).

use bitflags::bitflags;
use riser_transport::verbs::{AhAttr, Gid};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Limit, Record, attribute};

/// Path between two ports.
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
pub struct PathRecord {
    /// Service that will use the path; 0 for any service.
    pub service_id: U64,
    /// GID of the destination.
    pub dgid: [u8; 16],
    /// GID of the source.
    pub sgid: [u8; 16],
    /// LID of the destination; on RoCE, 0 unless it was requested by LID.
    pub dlid: U16,
    /// LID of the source; on RoCE, 0 unless it was requested by LID.
    pub slid: U16,
    /// RawTraffic, flow label (20 bits) and hop limit (8 bits). On InfiniBand a hop limit of at
    /// most 1 indicates a path without GRH.
    pub flow_label_and_hop_limit: U32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Reversible in the top bit, followed by the requested number of paths.
    pub reversible_and_count: u8,
    /// Partition.
    pub pkey: U16,
    /// QoS class (12 bits) and service level.
    pub qos_class_and_sl: U16,
    /// Path MTU: codes from 1 (256 bytes) to 5 (4096).
    pub mtu: Limit,
    /// Static rate: codes such as 2 (2.5 Gbit/s).
    pub rate: Limit,
    /// Packet life time: 4.096 µs × 2^n.
    pub packet_life_time: Limit,
    /// Preference among the paths of a response, 0 is preferred.
    pub preference: u8,
    /// Zero on the wire.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<PathRecord>() == 64);

/// Reversible: responses may use the same path.
pub const REVERSIBLE: u8 = 0x80;

bitflags! {
    /// Components of a PathRecord.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PathMask: u64 {
        /// ServiceID: both halves, which were reserved in earlier class versions.
        const SERVICE_ID = 0b11;
        /// DGID.
        const DGID = 1 << 2;
        /// SGID.
        const SGID = 1 << 3;
        /// DLID.
        const DLID = 1 << 4;
        /// SLID.
        const SLID = 1 << 5;
        /// RawTraffic.
        const RAW_TRAFFIC = 1 << 6;
        /// FlowLabel.
        const FLOW_LABEL = 1 << 8;
        /// HopLimit.
        const HOP_LIMIT = 1 << 9;
        /// TClass.
        const TRAFFIC_CLASS = 1 << 10;
        /// Reversible.
        const REVERSIBLE = 1 << 11;
        /// NumbPath.
        const NUMB_PATH = 1 << 12;
        /// P_Key.
        const PKEY = 1 << 13;
        /// QoSClass.
        const QOS_CLASS = 1 << 14;
        /// SL.
        const SL = 1 << 15;
        /// MtuSelector.
        const MTU_SELECTOR = 1 << 16;
        /// Mtu.
        const MTU = 1 << 17;
        /// RateSelector.
        const RATE_SELECTOR = 1 << 18;
        /// Rate.
        const RATE = 1 << 19;
        /// PacketLifeTimeSelector.
        const PACKET_LIFE_TIME_SELECTOR = 1 << 20;
        /// PacketLifeTime.
        const PACKET_LIFE_TIME = 1 << 21;
        /// Preference.
        const PREFERENCE = 1 << 22;
        /// Fields of later versions.
        const _ = !0;
    }
}

impl Record for PathRecord {
    const ATTRIBUTE: u16 = attribute::PATH_RECORD;
}

impl PathRecord {
    /// Returns the GID of the destination.
    #[must_use]
    pub fn dgid(&self) -> Gid {
        Gid(self.dgid)
    }

    /// Returns the GID of the source.
    #[must_use]
    pub fn sgid(&self) -> Gid {
        Gid(self.sgid)
    }

    /// Returns the hop limit.
    #[must_use]
    pub fn hop_limit(&self) -> u8 {
        self.flow_label_and_hop_limit.get() as u8
    }

    /// Returns the flow label, 20 bits.
    #[must_use]
    pub fn flow_label(&self) -> u32 {
        self.flow_label_and_hop_limit.get() >> 8 & 0x000f_ffff
    }

    /// Returns the service level, 4 bits.
    #[must_use]
    pub fn sl(&self) -> u8 {
        (self.qos_class_and_sl.get() & 0xf) as u8
    }

    /// Returns the QoS class, 12 bits.
    #[must_use]
    pub fn qos_class(&self) -> u16 {
        self.qos_class_and_sl.get() >> 4
    }

    /// Returns the requested number of paths, 7 bits.
    #[must_use]
    pub fn count(&self) -> u8 {
        self.reversible_and_count & !REVERSIBLE
    }

    /// Returns the address vector of the path, using this source entry of the GID table
    /// (`ib_init_ah_attr_from_path`).
    #[must_use]
    pub fn ah_attr(&self, sgid_index: u16) -> AhAttr {
        AhAttr {
            sgid_index,
            hop_limit: self.hop_limit(),
            traffic_class: self.traffic_class,
            flow_label: self.flow_label(),
            ..AhAttr::new(self.dgid())
        }
    }

    /// Returns whether responses may use the same path.
    #[must_use]
    pub fn is_reversible(&self) -> bool {
        self.reversible_and_count & REVERSIBLE != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_layout_matches_rdma_core() {
        // struct ibv_path_record of <infiniband/sa.h>, initialized by field name.
        let record = PathRecord {
            service_id: U64::new(0x0102_0304_0506_0708),
            dgid: std::array::from_fn(|i| 0x10 + i as u8),
            sgid: std::array::from_fn(|i| 0x30 + i as u8),
            dlid: U16::new(0x5152),
            slid: U16::new(0x5354),
            flow_label_and_hop_limit: U32::new(0x0abc_de40),
            traffic_class: 0x55,
            reversible_and_count: 0x81,
            pkey: U16::new(0x8001),
            qos_class_and_sl: U16::new(0x1233),
            mtu: Limit(0x85),
            rate: Limit(0x82),
            packet_life_time: Limit(0x92),
            preference: 7,
            reserved: [0; 6],
        };
        let mut expected = vec![1, 2, 3, 4, 5, 6, 7, 8];
        expected.extend(0x10..0x20);
        expected.extend(0x30..0x40);
        expected.extend([0x51, 0x52, 0x53, 0x54, 0x0a, 0xbc, 0xde, 0x40, 0x55, 0x81]);
        expected.extend([
            0x80, 0x01, 0x12, 0x33, 0x85, 0x82, 0x92, 7, 0, 0, 0, 0, 0, 0,
        ]);
        assert_eq!(record.as_bytes(), expected);
        assert_eq!(PathRecord::read(&expected), Some(record));
        assert_eq!(PathRecord::read(&expected[..63]), None);
        assert_eq!(record.flow_label(), 0xabcde);
        assert_eq!(
            (record.hop_limit(), record.sl(), record.qos_class()),
            (64, 3, 0x123)
        );
        assert_eq!((record.is_reversible(), record.count()), (true, 1));
    }

    #[test]
    fn path_converts_to_address_vector() {
        let record = PathRecord {
            dgid: [7; 16],
            flow_label_and_hop_limit: U32::new(0x0abc_de40),
            traffic_class: 0x55,
            ..PathRecord::default()
        };
        let expected = AhAttr {
            dgid: Gid([7; 16]),
            sgid_index: 3,
            hop_limit: 64,
            traffic_class: 0x55,
            flow_label: 0xabcde,
            port: 1,
        };
        assert_eq!(record.ah_attr(3), expected);
    }
}
