//! Attributes and status of integrity regions, which check, generate or remove the protection
//! information of logical blocks (T10 DIF) while data is transferred.
//!
//! An integrity region has two layouts: the user and the peer see the same blocks in different
//! *domains*.
//!
//! ```text
//!   memory domain                                 wire domain
//!   data segments   | block | block | …           addresses of the region, starting at 0
//!   and, with T10 DIF, protection segments  ◀──▶  | block | tuple | block | tuple | …
//!   | tuple | tuple | …, or tuples                or, without tuples, | block | block | …
//!   after the blocks in the data segments
//! ```
//!
//! | memory | wire | data sent from the region | data received into the region |
//! | --- | --- | --- | --- |
//! | [`SigDomain::None`] | [`SigDomain::T10Dif`] | tuples are inserted | tuples are checked and stripped |
//! | [`SigDomain::T10Dif`] | [`SigDomain::None`] | tuples are checked and stripped | tuples are inserted |
//! | [`SigDomain::T10Dif`] | [`SigDomain::T10Dif`] | tuples are checked and passed | tuples are checked and passed |
//!
//! A tuple consists of the guard (2 bytes), the application tag (2 bytes) and the reference tag (4
//! bytes), all big-endian (SBC-4 4.21.3). The names are those of Linux `rdma/signature.h`.

use bitflags::bitflags;

bitflags! {
    /// Types of protection information supported by a device (SBC-4 4.21.2, Linux
    /// `ib_signature_prot_cap`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ProtectionCap: u8 {
        /// Type 1: the reference tag contains the low bytes of the LBA.
        const TYPE_1 = 1;
        /// Type 2: the first reference tag is provided by the command.
        const TYPE_2 = 2;
        /// Type 3: the reference tag belongs to the application.
        const TYPE_3 = 4;
    }
}

bitflags! {
    /// Guards supported by a device (Linux `ib_signature_guard_cap`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GuardCap: u8 {
        /// [`GuardType::Crc`].
        const CRC = 1;
        /// [`GuardType::IpChecksum`].
        const IP_CHECKSUM = 2;
    }
}

/// Capabilities of a device with integrity regions (Linux `IB_DEVICE_INTEGRITY_HANDOVER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegrityCap {
    /// Supported types of protection information.
    pub protection: ProtectionCap,
    /// Supported guards.
    pub guard: GuardCap,
}

/// Calculation of the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardType {
    /// CRC-16/T10-DIF, polynomial 8BB7h (SBC-4 4.21.4).
    Crc,
    /// Internet checksum (RFC 1071), which is only used in the memory of a host (DIX).
    IpChecksum,
}

/// Tags that disable all checks of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagEscape {
    /// All blocks are checked.
    None,
    /// Blocks with application tag FFFFh are not checked, as for types 1 and 2.
    AppTag,
    /// Blocks with application tag FFFFh and reference tag `FFFF_FFFFh` are not checked, as for
    /// type 3.
    AppAndRefTag,
}

/// Tuples of a domain (Linux `ib_t10_dif_domain`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct T10Dif {
    /// Calculation of the guard.
    pub guard: GuardType,
    /// Initial value of the calculation, usually 0.
    pub guard_seed: u16,
    /// Protection interval: size of a block without the tuple, 512 or 4096 bytes.
    pub interval: u32,
    /// Application tag of all blocks.
    pub app_tag: u16,
    /// Bits of the application tag that are checked.
    pub app_tag_check_mask: u16,
    /// Reference tag of the first block.
    pub ref_tag: u32,
    /// Set if the reference tag is incremented for each block, wrapping after `FFFF_FFFFh`.
    pub ref_remap: bool,
    /// Tags that disable the checks of a block.
    pub escape: TagEscape,
}

impl T10Dif {
    /// Creates the attributes for types 1 and 2: CRC, application tag 0, and reference tags
    /// starting at `ref_tag`. `interval` is in bytes.
    #[must_use]
    pub fn new(interval: u32, ref_tag: u32) -> Self {
        Self {
            guard: GuardType::Crc,
            guard_seed: 0,
            interval,
            app_tag: 0,
            app_tag_check_mask: u16::MAX,
            ref_tag,
            ref_remap: true,
            escape: TagEscape::AppTag,
        }
    }
}

/// Layout of the blocks in memory or on the wire (Linux `ib_sig_domain`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SigDomain {
    /// Blocks without tuples.
    None,
    /// Blocks with T10 DIF tuples.
    T10Dif(T10Dif),
}

bitflags! {
    /// Fields of the tuple that are checked in the domain from which data is transferred, using the
    /// values of Linux `ib_sig_attrs::check_mask`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SigCheck: u8 {
        /// Guard.
        const GUARD = 0xc0;
        /// Application tag.
        const APP_TAG = 0x30;
        /// Reference tag.
        const REF_TAG = 0x0f;
    }
}

/// Signature attributes of an integrity region (Linux `ib_sig_attrs`).
///
/// If both domains have tuples, a field is copied if its attributes are the same in both domains,
/// and otherwise generated for the other domain. This is also how reference tags are remapped. A
/// block whose checks are disabled by its tags is passed without changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SigAttrs {
    /// Layout in memory.
    pub mem: SigDomain,
    /// Layout on the wire.
    pub wire: SigDomain,
    /// Fields to check.
    pub check: SigCheck,
}

/// Field for which a check has failed (Linux `ib_sig_err_type`), or a block without checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SigErrorKind {
    /// The guard does not match the block.
    BadGuard,
    /// The reference tag is not the expected one.
    BadRefTag,
    /// The application tag is not the expected one.
    BadAppTag,
    /// Not all bytes of the block were received, or not in order. The block was neither checked nor
    /// stored.
    Incomplete,
}

/// Failed check of an integrity region (Linux `ib_sig_err`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SigError {
    /// Field.
    pub kind: SigErrorKind,
    /// Expected value, in host byte order. For an incomplete block, its length in bytes, including
    /// the tuple.
    pub expected: u32,
    /// Value of the field, in host byte order. For an incomplete block, the number of bytes received
    /// in order.
    pub actual: u32,
    /// Offset of the block in bytes, with all blocks followed by tuples: the index of the block
    /// multiplied by the protection interval plus 8.
    pub offset: u64,
}
