//! Management datagrams of the Ethernet management class (EMA): headers, class port information,
//! notices. All fields are big-endian.
//!
//! Omni-Path datagrams have up to 2048 bytes. Here a datagram only contains the bytes of its
//! attribute, so that it fits the path MTU.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Base version of Omni-Path's MADs (`OPA_MGMT_BASE_VERSION`).
pub const BASE_VERSION: u8 = 0x80;
/// Management class (`OPA_MGMT_CLASS_INTEL_EMA`).
pub const MGMT_CLASS: u8 = 0x34;
/// Class version (`OPA_EMA_CLASS_VERSION`).
pub const CLASS_VERSION: u8 = 0x80;
/// Maximum datagram length, in bytes.
pub const MAX: usize = 2048;
/// Intel's organization identifier.
pub const OUI: [u8; 3] = [0x00, 0x06, 0x6a];

/// Length of the headers preceding the attribute, in bytes.
pub const HEADER: usize = size_of::<VemaHeader>();
/// Maximum attribute length, in bytes (`OPA_VNIC_EMA_DATA`).
pub const MAX_DATA: usize = MAX - HEADER;

/// Method of a datagram (IBTA 13.4.5).
pub mod method {
    /// Reads an attribute.
    pub const GET: u8 = 0x01;
    /// Sets an attribute.
    pub const SET: u8 = 0x02;
    /// Reports an event; there is no response.
    pub const TRAP: u8 = 0x05;
    /// Response bit.
    pub const RESPONSE: u8 = 0x80;
    /// Response to both requests.
    pub const GET_RESP: u8 = 0x81;
}

/// Status of a response (IBTA 13.4.7).
pub mod status {
    /// The request was executed.
    pub const OK: u16 = 0;
    /// The attribute, or this method for it, is unsupported.
    pub const UNSUPPORTED_METHOD_ATTRIB: u16 = 0x000c;
    /// A value is invalid.
    pub const INVALID_ATTRIB_VALUE: u16 = 0x001c;
}

/// Headers of a vendor class datagram, including the organization (`struct opa_vnic_vema_mad`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct VemaHeader {
    /// [`BASE_VERSION`].
    pub base_version: u8,
    /// [`MGMT_CLASS`].
    pub mgmt_class: u8,
    /// [`CLASS_VERSION`].
    pub class_version: u8,
    /// One of [`method`].
    pub method: u8,
    /// One of [`status`].
    pub status: U16,
    /// Not used by this class.
    pub class_specific: U16,
    /// Transaction ID, repeated by a response.
    pub tid: U64,
    /// Attribute, one of [`attr::id`](super::attr::id).
    pub attr_id: U16,
    /// Reserved.
    pub resv: U16,
    /// Attribute modifier: the low byte is the index of a virtual port.
    pub attr_mod: U32,
    /// RMPP header, not used by this class.
    pub rmpp: [u8; 12],
    /// Reserved.
    pub reserved: u8,
    /// [`OUI`].
    pub oui: [u8; 3],
}

impl VemaHeader {
    /// Creates the headers of a request.
    #[must_use]
    pub fn new(method: u8, attr_id: u16, attr_mod: u32, tid: u64) -> Self {
        Self {
            base_version: BASE_VERSION,
            mgmt_class: MGMT_CLASS,
            class_version: CLASS_VERSION,
            method,
            tid: tid.into(),
            attr_id: attr_id.into(),
            attr_mod: attr_mod.into(),
            oui: OUI,
            ..Self::new_zeroed()
        }
    }

    /// Returns the headers of the response to this request.
    #[must_use]
    pub fn to_response(&self, status: u16) -> Self {
        Self {
            method: method::GET_RESP,
            status: status.into(),
            ..*self
        }
    }

    /// Returns the index of the virtual port in the request.
    #[must_use]
    pub fn vport(&self) -> u8 {
        self.attr_mod.get() as u8
    }

    /// Parses a datagram of the class, and returns its headers and attribute. Returns `None` if the
    /// class, version or organization differs, or if the length is invalid.
    #[must_use]
    pub fn parse(mad: &[u8]) -> Option<(Self, &[u8])> {
        if mad.len() > MAX {
            return None;
        }
        let (header, data) = Self::read_from_prefix(mad).ok()?;
        let is_class = header.base_version == BASE_VERSION
            && header.mgmt_class == MGMT_CLASS
            && header.class_version == CLASS_VERSION
            && header.oui == OUI;
        is_class.then_some((header, data))
    }

    /// Returns a datagram with these headers and an attribute.
    #[must_use]
    pub fn with(&self, data: &[u8]) -> Vec<u8> {
        [self.as_bytes(), data].concat()
    }
}

/// Class port information (`struct opa_class_port_info`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ClassPortInfo {
    /// [`BASE_VERSION`].
    pub base_version: u8,
    /// [`CLASS_VERSION`].
    pub class_version: u8,
    /// Capabilities: [`ClassPortInfo::CAP_TRAP`], and the number of virtual ports in the high byte.
    pub cap_mask: U16,
    /// Additional capabilities; the low 5 bits are the response time: 4.096 µs × 2^n.
    pub cap_mask2_resp_time: U32,
    /// Redirection of requests.
    pub redirect_gid: [u8; 16],
    /// Traffic class and flow label of the redirection.
    pub redirect_tc_fl: U32,
    /// LID of the redirection.
    pub redirect_lid: U32,
    /// Service level and queue pair of the redirection.
    pub redirect_sl_qp: U32,
    /// Queue key of the redirection.
    pub redirect_qkey: U32,
    /// Destination of traps: the manager's GID.
    pub trap_gid: [u8; 16],
    /// Traffic class and flow label of traps.
    pub trap_tc_fl: U32,
    /// Destination LID of traps; 0 disables traps.
    pub trap_lid: U32,
    /// Hop limit of traps, and the destination queue pair in the low 24 bits.
    pub trap_hl_qp: U32,
    /// Queue key of traps.
    pub trap_qkey: U32,
    /// Partition of traps.
    pub trap_pkey: U16,
    /// Partition of the redirection.
    pub redirect_pkey: U16,
    /// Service level of traps, in the high 5 bits.
    pub trap_sl_rsvd: u8,
    /// Reserved.
    pub reserved: [u8; 3],
}

impl ClassPortInfo {
    /// The agent sends traps (`OPA_VNIC_CLASS_CAP_TRAP`).
    pub const CAP_TRAP: u16 = 1;
    /// Response time of an agent: 1.07 s.
    pub const RESP_TIME: u32 = 18;

    /// Returns the maximum number of virtual ports of the agent.
    #[must_use]
    pub fn vports(&self) -> u8 {
        (self.cap_mask.get() >> 8) as u8
    }
}

/// Attribute of a trap (`struct opa_vnic_notice_attr`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NoticeAttr {
    /// Notice type in bits 1 to 7; bit 0 is clear in vendor notices.
    pub gen_type: u8,
    /// [`OUI`].
    pub oui: [u8; 3],
    /// Trap number.
    pub trap_num: U16,
    /// Toggle bit and count.
    pub toggle_count: U16,
    /// LID of the sender.
    pub issuer_lid: U32,
    /// Reserved.
    pub reserved: U32,
    /// GID of the sender; only in reports.
    pub issuer_gid: [u8; 16],
    /// Event: a [`VeswPortTrap`] and zeros.
    pub raw_data: [u8; 64],
}

impl NoticeAttr {
    /// Notice type: information (`OPA_INTEL_EMA_NOTICE_TYPE_INFO`).
    pub const TYPE_INFO: u8 = 4;

    /// Creates a notice for an event of a port.
    #[must_use]
    pub fn new(issuer_lid: u32, trap: &VeswPortTrap) -> Self {
        let mut notice = Self {
            gen_type: Self::TYPE_INFO << 1,
            oui: OUI,
            issuer_lid: issuer_lid.into(),
            ..Self::new_zeroed()
        };
        notice.raw_data[..size_of::<VeswPortTrap>()].copy_from_slice(trap.as_bytes());
        notice
    }

    /// Returns the reported event, or `None` if the notice is from another organization.
    #[must_use]
    pub fn trap(&self) -> Option<VeswPortTrap> {
        let trap = VeswPortTrap::read_from_prefix(&self.raw_data).ok()?.0;
        (self.oui == OUI).then_some(trap)
    }
}

/// Event reported by a trap (`struct opa_veswport_trap`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct VeswPortTrap {
    /// Fabric, 10 bits.
    pub fabric_id: U16,
    /// Virtual switch, 12 bits.
    pub vesw_id: U16,
    /// Port number within the switch.
    pub vesw_port_num: U32,
    /// Number of the fabric port, starting at 1.
    pub opa_port_num: U16,
    /// Index of the virtual port, starting at 0.
    pub vesw_port_index: u8,
    /// One of [`TrapOpcode`].
    pub opcode: u8,
    /// Reserved.
    pub reserved: U32,
}

/// Type of event reported by a trap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TrapOpcode {
    /// The unicast addresses of the interface have changed.
    IfaceUcastMacChange = 1,
    /// The multicast addresses of the interface have changed.
    IfaceMcastMacChange = 2,
    /// The link state of the interface has changed.
    EthLinkStatusChange = 3,
}

impl TrapOpcode {
    /// All event types.
    pub const ALL: [Self; 3] = [
        Self::IfaceUcastMacChange,
        Self::IfaceMcastMacChange,
        Self::EthLinkStatusChange,
    ];

    /// Converts a number to an event type.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|opcode| *opcode as u8 == code)
    }
}

const _: () = {
    assert!(HEADER == 40);
    assert!(size_of::<ClassPortInfo>() == 80);
    assert!(size_of::<NoticeAttr>() == 96);
    assert!(size_of::<VeswPortTrap>() == 16);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_matches_linux_bytes() {
        let header = VemaHeader::new(method::SET, 0x0011, 0x0000_0102, 0x0102_0304_0506_0708);
        #[rustfmt::skip]
        let golden = [
            // Base version, class, class version, method, status, class-specific.
            0x80, 0x34, 0x80, 0x02, 0, 0, 0, 0,
            // Transaction ID.
            1, 2, 3, 4, 5, 6, 7, 8,
            // Attribute, reserved, modifier.
            0x00, 0x11, 0, 0, 0, 0, 1, 2,
            // RMPP, reserved, organization.
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x06, 0x6a,
            0xaa,
        ];
        assert_eq!(header.with(&[0xaa]), golden);
        let (parsed, data) = VemaHeader::parse(&golden).unwrap();
        assert_eq!((parsed, data, parsed.vport()), (header, &[0xaa][..], 2));
        let response = parsed.to_response(status::INVALID_ATTRIB_VALUE).with(&[]);
        assert_eq!(response[3..6], [0x81, 0x00, 0x1c]);
    }

    #[test]
    fn datagrams_of_others_are_left_alone() {
        let mad = VemaHeader::new(method::GET, 1, 0, 1).with(&[]);
        assert!(VemaHeader::parse(&mad).is_some());
        assert!(VemaHeader::parse(&mad[..39]).is_none());
        assert!(VemaHeader::parse(&[0; 2049]).is_none());
        for at in [0, 1, 2, 37, 38, 39] {
            let mut other = mad.clone();
            other[at] ^= 1;
            assert!(VemaHeader::parse(&other).is_none(), "byte {at}");
        }
    }

    #[test]
    fn notice_matches_linux_bytes() {
        let trap = VeswPortTrap {
            fabric_id: 0x0123.into(),
            vesw_id: 0x0456.into(),
            vesw_port_num: 0x0708_090a.into(),
            opa_port_num: 1.into(),
            vesw_port_index: 2,
            opcode: 3,
            reserved: 0.into(),
        };
        let notice = NoticeAttr::new(0x0b0c_0d0e, &trap);
        let bytes = notice.as_bytes();
        #[rustfmt::skip]
        let golden = [
            0x08, 0x00, 0x06, 0x6a, 0, 0, 0, 0, 0x0b, 0x0c, 0x0d, 0x0e, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0x01, 0x23, 0x04, 0x56, 0x07, 0x08, 0x09, 0x0a, 0, 1, 2, 3, 0, 0, 0, 0,
        ];
        assert_eq!(bytes[..48], golden);
        assert!(bytes[48..].iter().all(|byte| *byte == 0));
        assert_eq!(notice.trap(), Some(trap));
        let other = NoticeAttr {
            oui: [1, 2, 3],
            ..notice
        };
        assert_eq!(other.trap(), None);
        assert_eq!(
            TrapOpcode::from_code(3),
            Some(TrapOpcode::EthLinkStatusChange)
        );
        assert_eq!(TrapOpcode::from_code(4), None);
    }

    #[test]
    fn class_port_info_matches_layout() {
        let info = ClassPortInfo {
            base_version: 0x80,
            class_version: 0x80,
            cap_mask: 0x0201.into(),
            cap_mask2_resp_time: 18.into(),
            trap_gid: [0x11; 16],
            trap_lid: 0x22.into(),
            trap_hl_qp: 0x33.into(),
            trap_qkey: 0x44.into(),
            trap_sl_rsvd: 0x55,
            ..FromZeros::new_zeroed()
        };
        let bytes = info.as_bytes();
        assert_eq!(bytes[..8], [0x80, 0x80, 2, 1, 0, 0, 0, 18]);
        assert_eq!(bytes[40..56], [0x11; 16]);
        assert_eq!(bytes[60..72], [0, 0, 0, 0x22, 0, 0, 0, 0x33, 0, 0, 0, 0x44]);
        assert_eq!(bytes[76], 0x55);
    }
}
