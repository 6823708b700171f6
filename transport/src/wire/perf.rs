//! Performance management (IBTA 16.1): port counters.
//!
//! A MAD consists of the common 24-byte header, 40 bytes that must be zero, and 192 bytes of
//! attribute data.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Supported class version.
pub const CLASS_VERSION: u8 = 1;

/// Offset of the attribute data in bytes.
pub const DATA: usize = 64;

/// PortSelect value used to select all ports.
pub const ALL_PORTS: u8 = 0xff;

/// Attribute IDs (IBTA table 221).
pub mod attribute {
    /// ClassPortInfo: class versions and capabilities.
    pub const CLASS_PORT_INFO: u16 = 0x0001;
    /// PortSamplesControl: configures the sampling of counters.
    pub const PORT_SAMPLES_CONTROL: u16 = 0x0010;
    /// PortSamplesResult: the samples.
    pub const PORT_SAMPLES_RESULT: u16 = 0x0011;
    /// PortCounters: counters that saturate at the maximum value.
    pub const PORT_COUNTERS: u16 = 0x0012;
    /// PortCountersExtended: 64-bit counters.
    pub const PORT_COUNTERS_EXTENDED: u16 = 0x001d;
}

/// Class capability (IBTA table 222): [`ALL_PORTS`] is supported in PortSelect.
pub const ALL_PORT_SELECT: u16 = 1 << 8;
/// Class capability: all PortCountersExtended counters are supported.
pub const EXTENDED_WIDTH: u16 = 1 << 9;
/// Class capability: QP1Dropped is supported.
pub const COUNTS_QP1_DROPPED: u16 = 1 << 15;

/// Bits used to select counters in PortCounters: CounterSelect, followed by CounterSelect2 (IBTA
/// table 224).
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

/// PortCounters (IBTA 16.1.3.5). Counters saturate at the maximum value.
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
    /// Port number, starting at 1. [`ALL_PORTS`] is also valid in a request.
    pub port_select: u8,
    /// Counters reset by Set(), see [`select`].
    pub counter_select: U16,
    pub(crate) symbol_errors: U16,
    pub(crate) link_error_recovery: u8,
    pub(crate) link_downed: u8,
    /// Number of packets dropped because of an invalid format or ICRC.
    pub rcv_errors: U16,
    pub(crate) rcv_remote_physical_errors: U16,
    pub(crate) rcv_switch_relay_errors: U16,
    pub(crate) xmit_discards: U16,
    pub(crate) xmit_constraint_errors: u8,
    pub(crate) rcv_constraint_errors: u8,
    /// More counters reset by Set(): bit 0 is used for PortXmitWait, bit 1 for QP1Dropped.
    pub counter_select2: u8,
    pub(crate) link_overrun_errors: u8,
    /// Number of MADs dropped at queue pair 1.
    pub qp1_dropped: U16,
    pub(crate) vl15_dropped: U16,
    /// Data sent, in 4-byte words.
    pub xmit_data: U32,
    /// Data received, in 4-byte words.
    pub rcv_data: U32,
    /// Number of packets sent.
    pub xmit_packets: U32,
    /// Number of packets received.
    pub rcv_packets: U32,
    pub(crate) xmit_wait: U32,
}

const _: () = assert!(size_of::<PortCounters>() == 44);

impl PortCounters {
    /// Creates an attribute with all counters set to zero. `selected` is a set of bits in
    /// [`select`].
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

    /// Returns the selected counters, see [`select`].
    #[must_use]
    pub fn selected(&self) -> u32 {
        u32::from(self.counter_select2) << 16 | u32::from(self.counter_select.get())
    }
}

/// PortCountersExtended (IBTA 16.1.4.11), without the error counters.
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
    /// Port number, starting at 1. [`ALL_PORTS`] is also valid in a request.
    pub port_select: u8,
    /// Counters reset by Set(), starting with the first counter at bit 0.
    pub counter_select: U16,
    pub(crate) counter_select2: U32,
    /// Data sent, in 4-byte words.
    pub xmit_data: U64,
    /// Data received, in 4-byte words.
    pub rcv_data: U64,
    /// Number of packets sent.
    pub xmit_packets: U64,
    /// Number of packets received.
    pub rcv_packets: U64,
    /// Number of unicast packets sent.
    pub unicast_xmit_packets: U64,
    /// Number of unicast packets received.
    pub unicast_rcv_packets: U64,
    /// Number of multicast packets sent.
    pub multicast_xmit_packets: U64,
    /// Number of multicast packets received.
    pub multicast_rcv_packets: U64,
}

const _: () = assert!(size_of::<PortCountersExtended>() == 72);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_counters_match_specification_layout() {
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
    fn extended_counters_are_64_bits() {
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
