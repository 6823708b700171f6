//! Device-management MADs, used by an I/O unit to report its controllers and services (IBTA volume
//! 1, chapter 16.3).
//!
//! InfiniBand initiators use these MADs to discover SRP targets. RoCE has no subnet manager that
//! could list the available targets, but the MADs can still be sent via queue pair 1 as on
//! InfiniBand: if an initiator knows an address, it can query [`ClassPortInfo`], [`IoUnitInfo`],
//! the [`IocProfile`] of each controller and its [`ServiceEntry`] list.
//!
//! A MAD is 256 bytes: the common header ([`DmHeader`], 24 bytes), 40 bytes that must be zero in
//! GET and its response, and 192 bytes of attribute data. We only rely on the received length, so
//! no input can cause a panic here.

use num_enum::{FromPrimitive, IntoPrimitive};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a management datagram in bytes.
pub const MAD_LEN: usize = 256;

/// Management class used for device management.
pub const CLASS: u8 = 0x06;

/// Offset of the attribute data.
const DATA: usize = 64;

/// Number of services in a single response.
pub const SERVICES_PER_MAD: usize = 4;

/// Maximum number of controller slots in an I/O unit.
pub const MAX_SLOTS: u8 = 255;

/// Methods used in the common header (IBTA 13.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum Method {
    /// DevMgtGet(): reads an attribute.
    Get = 0x01,
    /// DevMgtGetResp(): response to a Get.
    GetResp = 0x81,
    /// Any other value.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Attribute with its modifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// ClassPortInfo: class versions and capabilities.
    ClassPortInfo,
    /// IOUnitInfo: controllers in the unit's slots.
    IoUnitInfo,
    /// IOControllerProfile for a slot.
    IocProfile {
        /// Slot number, starting at 1.
        slot: u32,
    },
    /// ServiceEntries for a slot, given as an inclusive range.
    ServiceEntries {
        /// Slot number, starting at 1.
        slot: u16,
        /// First service, starting at 0.
        first: u8,
        /// Last service, inclusive.
        last: u8,
    },
    /// Any other value.
    Other {
        /// Attribute ID, 16 bits.
        id: u16,
        /// Attribute modifier, 32 bits.
        modifier: u32,
    },
}

impl Attribute {
    const fn fields(self) -> (u16, u32) {
        match self {
            Self::ClassPortInfo => (0x0001, 0),
            Self::IoUnitInfo => (0x0010, 0),
            Self::IocProfile { slot } => (0x0011, slot),
            Self::ServiceEntries { slot, first, last } => (
                0x0012,
                (slot as u32) << 16 | (last as u32) << 8 | first as u32,
            ),
            Self::Other { id, modifier } => (id, modifier),
        }
    }

    const fn from_fields(id: u16, modifier: u32) -> Self {
        match id {
            0x0001 => Self::ClassPortInfo,
            0x0010 => Self::IoUnitInfo,
            0x0011 => Self::IocProfile { slot: modifier },
            0x0012 => Self::ServiceEntries {
                slot: (modifier >> 16) as u16,
                first: (modifier & 0xff) as u8,
                last: (modifier >> 8 & 0xff) as u8,
            },
            id => Self::Other { id, modifier },
        }
    }
}

/// Response status (IBTA 13.4.7 and 16.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromPrimitive, IntoPrimitive)]
#[repr(u16)]
pub enum Status {
    /// The request succeeded.
    Success = 0,
    /// The method is not supported.
    UnsupportedMethod = 0x0008,
    /// The method is not supported for this attribute.
    UnsupportedAttribute = 0x000c,
    /// A field or the modifier is invalid.
    InvalidField = 0x001c,
    /// No controller present in this slot.
    NoController = 0x0100,
    /// Any other status code.
    #[num_enum(catch_all)]
    Other(u16),
}

/// Error returned for data that is not a valid device-management MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmError {
    /// The data is shorter than a MAD.
    #[error("invalid management datagram length {0}")]
    Length(usize),
    /// The base version, class or class version is not supported.
    #[error("unsupported {field} {value:#x}")]
    Field {
        /// Field name.
        field: &'static str,
        /// Value received.
        value: u8,
    },
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHeader {
    base_version: u8,
    class: u8,
    class_version: u8,
    method: u8,
    status: U16,
    class_specific: U16,
    transaction: U64,
    attribute: U16,
    reserved: U16,
    modifier: U32,
}

const _: () = assert!(size_of::<RawHeader>() == 24);

/// Header of a device-management MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmHeader {
    /// Method.
    pub method: Method,
    /// Response status. Must be success in a request.
    pub status: Status,
    /// Transaction ID, set by the requester and returned in the response.
    pub transaction: u64,
    /// Attribute with its modifier.
    pub attribute: Attribute,
}

impl DmHeader {
    /// Parses the header and returns it with the 192 bytes of attribute data.
    ///
    /// # Errors
    /// Returns [`DmError`] if the data is not a valid MAD.
    pub fn parse(mad: &[u8]) -> Result<(Self, &[u8]), DmError> {
        let mad = mad.get(..MAD_LEN).ok_or(DmError::Length(mad.len()))?;
        let (raw, _) = RawHeader::ref_from_prefix(mad).expect("a MAD is longer than its header");
        let same = |field, value, expected| {
            (value == expected)
                .then_some(())
                .ok_or(DmError::Field { field, value })
        };
        same("BaseVersion", raw.base_version, 1)?;
        same("MgmtClass", raw.class, CLASS)?;
        same("ClassVersion", raw.class_version, 1)?;
        let header = Self {
            method: raw.method.into(),
            status: raw.status.get().into(),
            transaction: raw.transaction.get(),
            attribute: Attribute::from_fields(raw.attribute.get(), raw.modifier.get()),
        };
        Ok((header, &mad[DATA..]))
    }

    /// Builds a complete MAD from this header and the attribute data.
    ///
    /// # Panics
    /// Panics if the attribute data exceeds 192 bytes.
    #[must_use]
    pub fn emit(&self, attribute: &[u8]) -> [u8; MAD_LEN] {
        let (id, modifier) = self.attribute.fields();
        let raw = RawHeader {
            base_version: 1,
            class: CLASS,
            class_version: 1,
            method: self.method.into(),
            status: u16::from(self.status).into(),
            class_specific: 0.into(),
            transaction: self.transaction.into(),
            attribute: id.into(),
            reserved: 0.into(),
            modifier: modifier.into(),
        };
        let mut mad = [0; MAD_LEN];
        mad[..24].copy_from_slice(raw.as_bytes());
        mad[DATA..DATA + attribute.len()].copy_from_slice(attribute);
        mad
    }
}

/// ClassPortInfo (IBTA 13.4.8.1), limited to the fields used when redirection and traps are not
/// supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassPortInfo {
    /// RespTimeValue: the maximum response time is 4.096 µs × 2^n.
    pub response_time: u8,
}

impl ClassPortInfo {
    /// Attribute size in bytes.
    pub const LEN: usize = 72;

    /// Parses the attribute. Returns `None` if the data is too short.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let data = data.get(..Self::LEN)?;
        Some(Self {
            response_time: data[7] & 0x1f,
        })
    }

    /// Returns the attribute in wire format.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = 1;
        out[1] = 1;
        out[7] = self.response_time & 0x1f;
        out
    }
}

/// IOUnitInfo (IBTA 16.3.3.3): lists the slots that contain controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoUnitInfo {
    /// Must change whenever any other field is updated.
    pub change_id: u16,
    /// Number of slots in the unit.
    pub slots: u8,
    present: [bool; MAX_SLOTS as usize],
}

impl IoUnitInfo {
    /// Attribute size in bytes.
    pub const LEN: usize = 132;

    /// Creates a unit with `slots` slots and controllers in slots 1 to `controllers`.
    #[must_use]
    pub fn new(change_id: u16, slots: u8, controllers: u8) -> Self {
        let mut present = [false; MAX_SLOTS as usize];
        present[..usize::from(controllers.min(slots))].fill(true);
        Self {
            change_id,
            slots,
            present,
        }
    }

    /// Iterates over the slots that contain a controller, starting at 1.
    pub fn controllers(&self) -> impl Iterator<Item = u8> + '_ {
        (1..=self.slots).filter(|&slot| self.present[usize::from(slot) - 1])
    }

    /// Parses the attribute. Returns `None` if the data is too short.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let data = data.get(..Self::LEN)?;
        let mut present = [false; MAX_SLOTS as usize];
        for (slot, here) in present.iter_mut().enumerate() {
            // The upper half of each byte is used for the first of its two slots. Only the value 1
            // means "present".
            let nibble = data[4 + slot / 2] >> (4 * (1 - slot % 2)) & 0xf;
            *here = nibble == 1;
        }
        Some(Self {
            change_id: u16::from_be_bytes([data[0], data[1]]),
            slots: data[2],
            present,
        })
    }

    /// Returns the attribute in wire format.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..2].copy_from_slice(&self.change_id.to_be_bytes());
        out[2] = self.slots;
        // We need to set all 256 nibbles. For slots beyond this unit, 0xf indicates that the slot
        // does not exist.
        for slot in 0..256usize {
            let nibble = match self.present.get(slot) {
                _ if slot >= usize::from(self.slots) => 0xf,
                Some(true) => 1,
                _ => 0,
            };
            out[4 + slot / 2] |= nibble << (4 * (1 - slot % 2));
        }
        out
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawProfile {
    guid: U64,
    vendor: U32,
    device: U32,
    device_version: U16,
    reserved: U16,
    subsystem_vendor: U32,
    subsystem: U32,
    io_class: U16,
    io_subclass: U16,
    protocol: U16,
    protocol_version: U16,
    reserved2: U32,
    send_queue_depth: U16,
    reserved3: u8,
    read_depth: u8,
    send_size: U32,
    rdma_size: U32,
    capabilities: u8,
    reserved4: u8,
    services: u8,
    reserved5: [u8; 9],
    name: [u8; 64],
}

const _: () = assert!(size_of::<RawProfile>() == IocProfile::LEN);

/// IOControllerProfile for an SRP target (IBTA 16.3.3.4, SRP r16a table B.7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IocProfile {
    /// Controller GUID, used as the second half of its target port identifiers.
    pub guid: u64,
    /// Maximum number of outstanding requests per channel.
    pub send_queue_depth: u16,
    /// Maximum number of outstanding RDMA READs.
    pub read_depth: u8,
    /// Maximum size of an information unit that the controller can receive, in bytes.
    pub send_size: u32,
    /// Maximum RDMA transfer size in bytes.
    pub rdma_size: u32,
    /// Number of services provided by the controller.
    pub services: u8,
    /// Display name, truncated to 64 bytes of ASCII.
    pub name: String,
}

impl IocProfile {
    /// Attribute size in bytes.
    pub const LEN: usize = 128;

    /// I/O class for SRP revision 16a.
    const IO_CLASS: u16 = 0x0100;
    /// I/O subclass for SRP, "SCSI storage".
    const IO_SUBCLASS: u16 = 0x609e;
    /// SRP protocol number.
    const PROTOCOL: u16 = 0x0108;
    /// Send to and from the controller, RDMA READ and RDMA WRITE from the controller.
    const CAPABILITIES: u8 = 0x33;

    /// Parses the attribute. Returns `None` if the data is too short or if the controller is not an
    /// SRP target.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let (raw, _) = RawProfile::ref_from_prefix(data).ok()?;
        // Other slots can contain controllers using different protocols.
        let srp = raw.io_class.get() == Self::IO_CLASS
            && raw.io_subclass.get() == Self::IO_SUBCLASS
            && raw.protocol.get() == Self::PROTOCOL;
        srp.then(|| Self {
            guid: raw.guid.get(),
            send_queue_depth: raw.send_queue_depth.get(),
            read_depth: raw.read_depth,
            send_size: raw.send_size.get(),
            rdma_size: raw.rdma_size.get(),
            services: raw.services,
            name: text(&raw.name),
        })
    }

    /// Returns the attribute in wire format.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let raw = RawProfile {
            guid: self.guid.into(),
            vendor: 0.into(),
            device: 0.into(),
            device_version: 0.into(),
            reserved: 0.into(),
            subsystem_vendor: 0.into(),
            subsystem: 0.into(),
            io_class: Self::IO_CLASS.into(),
            io_subclass: Self::IO_SUBCLASS.into(),
            protocol: Self::PROTOCOL.into(),
            protocol_version: 1.into(),
            reserved2: 0.into(),
            send_queue_depth: self.send_queue_depth.into(),
            reserved3: 0,
            read_depth: self.read_depth,
            send_size: self.send_size.into(),
            rdma_size: self.rdma_size.into(),
            capabilities: Self::CAPABILITIES,
            reserved4: 0,
            services: self.services,
            reserved5: [0; 9],
            name: padded(&self.name),
        };
        let mut out = [0; Self::LEN];
        out.copy_from_slice(raw.as_bytes());
        out
    }
}

/// Entry in ServiceEntries (IBTA 16.3.3.5, SRP r16a table B.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEntry {
    /// Service name, up to 40 bytes of ASCII: [`SRP_SERVICE_PREFIX`] or [`RDMA_CM_SERVICE_PREFIX`],
    /// followed by the identifier extension in hexadecimal.
    pub name: String,
    /// Service ID to connect to.
    pub service_id: u64,
}

/// Prefix for SRP service names (SRP annex B).
pub const SRP_SERVICE_PREFIX: &str = "SRP.T10:";

/// Prefix for the names of SRP services that require the private data of the RDMA CM. Programs such
/// as `srp_daemon`, which log in without it, don't know this name.
pub const RDMA_CM_SERVICE_PREFIX: &str = "SRP.RDMA_CM:";

/// Service ID of the RDMA CM for TCP port 0 (annex A11).
pub const RDMA_CM_SERVICE: u64 = 0x0000_0000_0106_0000;

impl ServiceEntry {
    const LEN: usize = 48;

    /// Creates the service entry for an SRP target port with this identifier extension.
    #[must_use]
    pub fn srp(extension: u64, service_id: u64) -> Self {
        Self {
            name: format!("{SRP_SERVICE_PREFIX}{extension:016x}"),
            service_id,
        }
    }

    /// Creates the service entry for an SRP target port that listens on a port of the RDMA CM.
    #[must_use]
    pub fn srp_at_port(extension: u64, port: u16) -> Self {
        Self {
            name: format!("{RDMA_CM_SERVICE_PREFIX}{extension:016x}"),
            service_id: RDMA_CM_SERVICE | u64::from(port),
        }
    }

    /// Returns the identifier extension if this is an SRP service.
    #[must_use]
    pub fn srp_extension(&self) -> Option<u64> {
        let mut prefixes = [SRP_SERVICE_PREFIX, RDMA_CM_SERVICE_PREFIX].into_iter();
        let digits = prefixes.find_map(|prefix| self.name.strip_prefix(prefix))?;
        // We need this check because `from_str_radix` also accepts a sign.
        let plain = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
        plain.then(|| u64::from_str_radix(digits, 16).ok())?
    }

    /// Parses the first `count` entries of the attribute, or fewer if the data is too short.
    #[must_use]
    pub fn parse_list(data: &[u8], count: usize) -> Vec<Self> {
        data.chunks_exact(Self::LEN)
            // `count` is provided by the sender, so it must be limited to the available space.
            .take(count.min(SERVICES_PER_MAD))
            .map(|entry| {
                let (name, id) = entry.split_at(40);
                Self {
                    name: text(name),
                    service_id: id.iter().fold(0, |v, &b| v << 8 | u64::from(b)),
                }
            })
            .collect()
    }

    /// Returns the attribute in wire format with up to [`SERVICES_PER_MAD`] entries.
    #[must_use]
    pub fn emit_list(entries: &[Self]) -> [u8; Self::LEN * SERVICES_PER_MAD] {
        let mut out = [0; Self::LEN * SERVICES_PER_MAD];
        for (slot, entry) in out.chunks_exact_mut(Self::LEN).zip(entries) {
            slot[..40].copy_from_slice(&padded::<40>(&entry.name));
            slot[40..].copy_from_slice(&entry.service_id.to_be_bytes());
        }
        out
    }
}

/// Returns the leading printable ASCII. We stop at any other byte because these names are provided
/// by the peer and can be printed to terminals and logs.
fn text(bytes: &[u8]) -> String {
    bytes
        .iter()
        .take_while(|b| b.is_ascii_graphic() || **b == b' ')
        .map(|&b| char::from(b))
        .collect()
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(text.bytes().filter(u8::is_ascii)) {
        *to = from;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn service_entries_get_matches_standard_bytes() {
        let mad = DmHeader {
            method: Method::Get,
            status: Status::Success,
            transaction: 0x0102_0304_0506_0708,
            attribute: Attribute::ServiceEntries {
                slot: 1,
                first: 0,
                last: 3,
            },
        }
        .emit(&[]);
        assert_eq!(
            mad[..24],
            [
                0x01, 0x06, 0x01, 0x01, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0x00, 0x12, 0, 0, 0x00,
                0x01, 0x03, 0x00
            ]
        );
        assert!(mad[24..].iter().all(|&b| b == 0));
    }

    #[test]
    fn slots_use_high_nibble_first() {
        let bytes = IoUnitInfo::new(7, 16, 3).emit();
        assert_eq!(bytes[..4], [0, 7, 16, 0]);
        assert_eq!(bytes[4..8], [0x11, 0x10, 0, 0]);
        assert_eq!(bytes[11], 0x00);
        assert_eq!(bytes[12], 0xff, "slots beyond the sixteenth do not exist");
        let back = IoUnitInfo::parse(&bytes).unwrap();
        assert_eq!(back.controllers().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn ioc_profile_matches_standard_layout() {
        let profile = IocProfile {
            guid: 0x1122_3344_5566_7788,
            send_queue_depth: 128,
            read_depth: 16,
            send_size: 8260,
            rdma_size: 65536,
            services: 2,
            name: "Riser SRP target".into(),
        };
        let bytes = profile.emit();
        assert_eq!(bytes[..8], [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(
            bytes[28..36],
            [0x01, 0x00, 0x60, 0x9e, 0x01, 0x08, 0x00, 0x01]
        );
        assert_eq!(bytes[40..52], [0, 128, 0, 16, 0, 0, 0x20, 0x44, 0, 1, 0, 0]);
        assert_eq!(bytes[52..55], [0x33, 0, 2]);
        assert_eq!(&bytes[64..80], b"Riser SRP target");
        assert_eq!(IocProfile::parse(&bytes), Some(profile));
        assert_eq!(IocProfile::parse(&bytes[..127]), None);
    }

    #[test]
    fn service_names_contain_extension() {
        let entry = ServiceEntry::srp(0xabc, 0x0106_12b7);
        assert_eq!(entry.name, "SRP.T10:0000000000000abc");
        assert_eq!(entry.srp_extension(), Some(0xabc));
        let at_port = ServiceEntry::srp_at_port(0xabc, 5555);
        assert_eq!(at_port.name, "SRP.RDMA_CM:0000000000000abc");
        assert_eq!(at_port.service_id, 0x0106_15b3);
        assert_eq!(at_port.srp_extension(), Some(0xabc));
        let list = ServiceEntry::emit_list(std::slice::from_ref(&entry));
        assert_eq!(ServiceEntry::parse_list(&list, 1), [entry]);
        let other = ServiceEntry {
            name: "SRP.T10:+000000000000abc".into(),
            service_id: 0,
        };
        assert_eq!(other.srp_extension(), None);
    }

    proptest! {
        #[test]
        fn arbitrary_mads_never_panic_or_leak_controls(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut mad = bytes.clone();
            if let Some(head) = mad.get_mut(..3) {
                head.copy_from_slice(&[1, CLASS, 1]);
            }
            let parsed = DmHeader::parse(&mad);
            prop_assert_eq!(parsed.is_ok(), mad.len() >= MAD_LEN);
            if let Ok((header, data)) = parsed {
                prop_assert_eq!(&header.emit(data)[..6], &mad[..6]);
                let _ = ClassPortInfo::parse(data);
                let _ = IoUnitInfo::parse(data).map(|i| i.controllers().count());
                let _ = IocProfile::parse(data);
                for entry in ServiceEntry::parse_list(data, 4) {
                    prop_assert!(!entry.name.chars().any(char::is_control));
                }
            }
            let _ = IocProfile::parse(&bytes);
        }
    }
}
