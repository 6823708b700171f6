//! Management datagrams of the Ethernet management class (EMA): headers, class port information,
//! notices. All fields are big-endian.
//!
//! A datagram of Omni-Path has up to 2048 bytes. Here one ends behind what its attribute needs, so
//! that it fits the path MTU.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Base version of Omni-Path's MADs (`OPA_MGMT_BASE_VERSION`).
pub const BASE_VERSION: u8 = 0x80;
/// Management class (`OPA_MGMT_CLASS_INTEL_EMA`).
pub const MGMT_CLASS: u8 = 0x34;
/// Version of the class (`OPA_EMA_CLASS_VERSION`).
pub const CLASS_VERSION: u8 = 0x80;
/// Longest datagram, in bytes.
pub const MAX: usize = 2048;
/// Intel's organization identifier.
pub const OUI: [u8; 3] = [0x00, 0x06, 0x6a];

/// Length of everything in front of the attribute, in bytes.
pub const HEADER: usize = size_of::<VemaHeader>();
/// Longest attribute, in bytes (`OPA_VNIC_EMA_DATA`).
pub const MAX_DATA: usize = MAX - HEADER;

/// Method of a datagram (IBTA 13.4.5).
pub mod method {
    /// Asks for an attribute.
    pub const GET: u8 = 0x01;
    /// Sets an attribute.
    pub const SET: u8 = 0x02;
    /// Reports an event, without an answer.
    pub const TRAP: u8 = 0x05;
    /// Bit that answers have.
    pub const RESPONSE: u8 = 0x80;
    /// Answers both requests.
    pub const GET_RESP: u8 = 0x81;
}

/// Status of an answer (IBTA 13.4.7).
pub mod status {
    /// The request was carried out.
    pub const OK: u16 = 0;
    /// No such attribute, or not by this method.
    pub const UNSUPPORTED_METHOD_ATTRIB: u16 = 0x000c;
    /// A value is not valid.
    pub const INVALID_ATTRIB_VALUE: u16 = 0x001c;
}

/// Headers of a datagram of a vendor's class, with its organization (`struct opa_vnic_vema_mad`).
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
    /// Nothing in this class.
    pub class_specific: U16,
    /// Transaction, which an answer repeats.
    pub tid: U64,
    /// Attribute, one of [`attr::id`](super::attr::id).
    pub attr_id: U16,
    /// Reserved.
    pub resv: U16,
    /// Modifier: the index of a virtual port in its low byte.
    pub attr_mod: U32,
    /// RMPP header, which no datagram of the class uses.
    pub rmpp: [u8; 12],
    /// Reserved.
    pub reserved: u8,
    /// [`OUI`].
    pub oui: [u8; 3],
}

impl VemaHeader {
    /// Headers of a request.
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

    /// Headers of the answer to this request.
    #[must_use]
    pub fn answer(&self, status: u16) -> Self {
        Self {
            method: method::GET_RESP,
            status: status.into(),
            ..*self
        }
    }

    /// Index of the virtual port that a request is for.
    #[must_use]
    pub fn vport(&self) -> u8 {
        self.attr_mod.get() as u8
    }

    /// Reads a datagram of the class; returns its headers and its attribute. None where it is of
    /// another class, version or organization, or too short or long.
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

    /// A datagram with these headers and an attribute.
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
    /// Further capabilities, and in the low 5 bits the response time: 4.096 µs × 2^n.
    pub cap_mask2_resp_time: U32,
    /// Where requests should go instead.
    pub redirect_gid: [u8; 16],
    /// Traffic class and flow label of that.
    pub redirect_tc_fl: U32,
    /// LID of that.
    pub redirect_lid: U32,
    /// Service level and queue pair of that.
    pub redirect_sl_qp: U32,
    /// Queue key of that.
    pub redirect_qkey: U32,
    /// Where traps go: the manager's GID.
    pub trap_gid: [u8; 16],
    /// Traffic class and flow label of that.
    pub trap_tc_fl: U32,
    /// LID of that; no trap is sent while it is 0.
    pub trap_lid: U32,
    /// Hop limit, and in the low 24 bits the queue pair of that.
    pub trap_hl_qp: U32,
    /// Queue key of that.
    pub trap_qkey: U32,
    /// Partition of that.
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

    /// Number of virtual ports that the agent can have.
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
    /// Type of notice in bits 1 to 7; bit 0 is clear, as the notice is a vendor's.
    pub gen_type: u8,
    /// [`OUI`].
    pub oui: [u8; 3],
    /// Number of the trap.
    pub trap_num: U16,
    /// Toggle bit and count.
    pub toggle_count: U16,
    /// LID of the sender.
    pub issuer_lid: U32,
    /// Reserved.
    pub reserved: U32,
    /// GID of the sender, in reports only.
    pub issuer_gid: [u8; 16],
    /// What has happened: a [`VeswPortTrap`] and zeros.
    pub raw_data: [u8; 64],
}

impl NoticeAttr {
    /// Type of information (`OPA_INTEL_EMA_NOTICE_TYPE_INFO`).
    pub const TYPE_INFO: u8 = 4;

    /// A notice of a port's event.
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

    /// The event that a notice reports; none of another organization's.
    #[must_use]
    pub fn trap(&self) -> Option<VeswPortTrap> {
        let trap = VeswPortTrap::read_from_prefix(&self.raw_data).ok()?.0;
        (self.oui == OUI).then_some(trap)
    }
}

/// What a trap reports (`struct opa_veswport_trap`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct VeswPortTrap {
    /// Fabric, 10 bits.
    pub fabric_id: U16,
    /// Virtual switch, 12 bits.
    pub vesw_id: U16,
    /// Number of the port at its switch.
    pub vesw_port_num: U32,
    /// Number of the fabric's port, from 1.
    pub opa_port_num: U16,
    /// Index of the virtual port, from 0.
    pub vesw_port_index: u8,
    /// One of [`TrapOpcode`].
    pub opcode: u8,
    /// Reserved.
    pub reserved: U32,
}

/// Kind of event that a trap reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TrapOpcode {
    /// The interface has other unicast addresses.
    IfaceUcastMacChange = 1,
    /// The interface has other multicast addresses.
    IfaceMcastMacChange = 2,
    /// The interface was connected or disconnected.
    EthLinkStatusChange = 3,
}

impl TrapOpcode {
    /// All kinds.
    pub const ALL: [Self; 3] = [
        Self::IfaceUcastMacChange,
        Self::IfaceMcastMacChange,
        Self::EthLinkStatusChange,
    ];

    /// The kind of a number.
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
            // Transaction.
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
        let answer = parsed.answer(status::INVALID_ATTRIB_VALUE).with(&[]);
        assert_eq!(answer[3..6], [0x81, 0x00, 0x1c]);
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
