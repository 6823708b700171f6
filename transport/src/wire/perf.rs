//! Performance management (IBTA 16.1): the counters of a port.
//!
//! A MAD has the common header of 24 bytes, 40 bytes that stay zero, and 192 bytes of attribute.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The only version of the class.
pub const CLASS_VERSION: u8 = 1;

/// Offset of the attribute, in bytes.
pub const DATA: usize = 64;

/// PortSelect that means all ports.
pub const ALL_PORTS: u8 = 0xff;

/// Identifiers of attributes (IBTA table 221).
pub mod attribute {
    /// ClassPortInfo: versions and capabilities of the class.
    pub const CLASS_PORT_INFO: u16 = 0x0001;
    /// PortSamplesControl: sampling of counters over intervals.
    pub const PORT_SAMPLES_CONTROL: u16 = 0x0010;
    /// PortSamplesResult: the samples.
    pub const PORT_SAMPLES_RESULT: u16 = 0x0011;
    /// PortCounters: counters that stop at their largest value.
    pub const PORT_COUNTERS: u16 = 0x0012;
    /// PortCountersExtended: counters of 64 bits.
    pub const PORT_COUNTERS_EXTENDED: u16 = 0x001d;
}

/// Capabilities of the class (IBTA table 222): PortSelect [`ALL_PORTS`] is understood.
pub const ALL_PORT_SELECT: u16 = 1 << 8;
/// PortCountersExtended is supported, with all its counters.
pub const EXTENDED_WIDTH: u16 = 1 << 9;
/// QP1Dropped is counted.
pub const COUNTS_QP1_DROPPED: u16 = 1 << 15;

/// Counters of PortCounters that are selected: bits of CounterSelect, and above them those of
/// CounterSelect2 (IBTA table 224).
pub mod select {
    /// PortRcvErrors.
    pub const RCV_ERRORS: u32 = 1 << 3;
    /// PortXmitData.
    pub const XMIT_DATA: u32 = 1 << 12;
    /// PortRcvData.
    pub const RCV_DATA: u32 = 1 << 13;
    /// PortXmitPkts.
    pub const XMIT_PKTS: u32 = 1 << 14;
    /// PortRcvPkts.
    pub const RCV_PKTS: u32 = 1 << 15;
    /// QP1Dropped.
    pub const QP1_DROPPED: u32 = 1 << 17;
}

/// PortCounters (IBTA 16.1.3.5). A counter that would not fit stays at its largest value.
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
pub struct PortCounters {
    pub(crate) reserved: u8,
    /// Port, from 1; in a request also [`ALL_PORTS`].
    pub port_select: u8,
    /// Counters that a Set() resets: see [`select`].
    pub counter_select: U16,
    pub(crate) symbol_errors: U16,
    pub(crate) link_error_recovery: u8,
    pub(crate) link_downed: u8,
    /// Packets that were malformed or failed the check of their ICRC.
    pub rcv_errors: U16,
    pub(crate) rcv_remote_physical_errors: U16,
    pub(crate) rcv_switch_relay_errors: U16,
    pub(crate) xmit_discards: U16,
    pub(crate) xmit_constraint_errors: u8,
    pub(crate) rcv_constraint_errors: u8,
    /// Further counters that a Set() resets: bit 0 selects PortXmitWait, bit 1 QP1Dropped.
    pub counter_select2: u8,
    pub(crate) link_overrun_errors: u8,
    /// MADs that were dropped at queue pair 1.
    pub qp1_dropped: U16,
    pub(crate) vl15_dropped: U16,
    /// Words of 4 bytes that were sent.
    pub xmit_data: U32,
    /// Words of 4 bytes that were received.
    pub rcv_data: U32,
    /// Packets that were sent.
    pub xmit_packets: U32,
    /// Packets that were received.
    pub rcv_packets: U32,
    pub(crate) xmit_wait: U32,
}

const _: () = assert!(size_of::<PortCounters>() == 44);

impl PortCounters {
    /// No counts of a port, with selected counters (see [`select`]).
    #[must_use]
    pub fn of(port_select: u8, selected: u32) -> Self {
        let [_, select2, high, low] = selected.to_be_bytes();
        Self {
            port_select,
            counter_select: U16::from_bytes([high, low]),
            counter_select2: select2,
            ..Self::default()
        }
    }

    /// Counters that are selected: see [`select`].
    #[must_use]
    pub fn selected(&self) -> u32 {
        u32::from(self.counter_select2) << 16 | u32::from(self.counter_select.get())
    }
}

/// PortCountersExtended (IBTA 16.1.4.11), as far as it has no counters of errors.
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
pub struct PortCountersExtended {
    pub(crate) reserved: u8,
    /// Port, from 1; in a request also [`ALL_PORTS`].
    pub port_select: u8,
    /// Counters that a Set() resets: bit 0 is that of the first, and so on.
    pub counter_select: U16,
    pub(crate) counter_select2: U32,
    /// Words of 4 bytes that were sent.
    pub xmit_data: U64,
    /// Words of 4 bytes that were received.
    pub rcv_data: U64,
    /// Packets that were sent.
    pub xmit_packets: U64,
    /// Packets that were received.
    pub rcv_packets: U64,
    /// Packets to single hosts that were sent.
    pub unicast_xmit_packets: U64,
    /// Packets to this host that were received.
    pub unicast_rcv_packets: U64,
    /// Packets to groups that were sent.
    pub multicast_xmit_packets: U64,
    /// Packets to groups that were received.
    pub multicast_rcv_packets: U64,
}

const _: () = assert!(size_of::<PortCountersExtended>() == 72);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_are_where_the_specification_has_them() {
        let counters = PortCounters {
            rcv_errors: U16::new(0x0203),
            qp1_dropped: U16::new(7),
            xmit_data: U32::new(0x1112_1314),
            rcv_data: U32::new(0x2122_2324),
            xmit_packets: U32::new(0x3132_3334),
            rcv_packets: U32::new(0x4142_4344),
            ..PortCounters::of(1, 0x2_f048)
        };
        let expected = [
            0, 1, 0xf0, 0x48, 0, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0x11,
            0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24, 0x31, 0x32, 0x33, 0x34, 0x41, 0x42, 0x43,
            0x44, 0, 0, 0, 0,
        ];
        assert_eq!(counters.as_bytes(), expected);
        assert_eq!(counters.selected(), 0x2_f048);
    }

    #[test]
    fn the_extended_counters_follow_in_eight_bytes_each() {
        let counters = PortCountersExtended {
            port_select: 1,
            counter_select: U16::new(0x00ff),
            xmit_data: U64::new(1),
            rcv_data: U64::new(2),
            xmit_packets: U64::new(3),
            rcv_packets: U64::new(4),
            unicast_xmit_packets: U64::new(5),
            unicast_rcv_packets: U64::new(6),
            multicast_xmit_packets: U64::new(7),
            multicast_rcv_packets: U64::new(0x0102_0304_0506_0708),
            ..PortCountersExtended::default()
        };
        let bytes = counters.as_bytes();
        assert_eq!(bytes[..8], [0, 1, 0, 0xff, 0, 0, 0, 0]);
        for n in 1..8 {
            assert_eq!(bytes[8 * n..8 * n + 8], [0, 0, 0, 0, 0, 0, 0, n as u8]);
        }
        assert_eq!(bytes[64..], [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
