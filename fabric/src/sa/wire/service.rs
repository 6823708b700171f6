//! ServiceRecord (IBTA 15.2.5.14).

use bitflags::bitflags;
use riser_transport::verbs::Gid;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Record, all_match, attribute};

/// Lease that never expires.
pub const LEASE_FOREVER: u32 = u32::MAX;

/// Service and the port that provides it. The identifier, GID and P_Key form the key of a record.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ServiceRecord {
    /// Service identifier.
    pub service_id: U64,
    /// GID of the port that provides the service.
    pub gid: [u8; 16],
    /// Partition of the service.
    pub pkey: U16,
    /// Zero on the wire.
    pub reserved: U16,
    /// Lease in seconds, or [`LEASE_FOREVER`].
    pub lease: U32,
    /// Key required to update the record; 0 if none.
    pub key: [u8; 16],
    /// Name in UTF-8, padded with zeros.
    pub name: [u8; 64],
    /// Service-specific data: bytes.
    pub data8: [u8; 16],
    /// Service-specific data: 16-bit words.
    pub data16: [U16; 8],
    /// Service-specific data: 32-bit words.
    pub data32: [U32; 4],
    /// Service-specific data: 64-bit words.
    pub data64: [U64; 2],
}

const _: () = assert!(size_of::<ServiceRecord>() == 176);

bitflags! {
    /// Components of a ServiceRecord.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ServiceMask: u64 {
        /// ServiceID.
        const SERVICE_ID = 1 << 0;
        /// ServiceGID.
        const GID = 1 << 1;
        /// ServiceP_Key.
        const PKEY = 1 << 2;
        /// ServiceLease.
        const LEASE = 1 << 4;
        /// ServiceKey.
        const KEY = 1 << 5;
        /// ServiceName.
        const NAME = 1 << 6;
        /// First byte of ServiceData8. The following bits select its remaining bytes and the words
        /// of the other data fields.
        const DATA = 1 << 7;
        /// All fields.
        const ALL = ((1 << 37) - 1) & !(1 << 3);
        /// Fields of data, and of later versions.
        const _ = !0;
    }
}

/// Data fields: first mask bit, number of words, word size and offset.
const DATA_FIELDS: [(u32, usize, usize, usize); 4] = [
    (7, 16, 1, 112),
    (23, 8, 2, 128),
    (31, 4, 4, 144),
    (35, 2, 8, 160),
];

impl Record for ServiceRecord {
    const ATTRIBUTE: u16 = attribute::SERVICE_RECORD;
}

impl ServiceRecord {
    /// Creates a record for the default partition without key, name, data or expiration.
    #[must_use]
    pub fn new(service_id: u64, gid: Gid) -> Self {
        let mut record = Self::read_from_bytes(&[0; 176]).expect("as many bytes");
        record.service_id = U64::new(service_id);
        record.gid = gid.0;
        record.pkey = U16::new(0xffff);
        record.lease = U32::new(LEASE_FOREVER);
        record
    }

    /// Sets the name, truncated to 63 bytes.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        self.name = [0; 64];
        let len = name.floor_char_boundary(63);
        self.name[..len].copy_from_slice(&name.as_bytes()[..len]);
        self
    }

    /// Returns the GID of the port that provides the service.
    #[must_use]
    pub fn gid(&self) -> Gid {
        Gid(self.gid)
    }

    /// Returns whether all fields selected by a request match. The lease is ignored because its
    /// remaining time decreases, and the key because it is secret.
    #[must_use]
    pub fn matches(&self, mask: ServiceMask, wanted: &Self) -> bool {
        let fields = [
            (
                ServiceMask::SERVICE_ID,
                self.service_id == wanted.service_id,
            ),
            (ServiceMask::GID, self.gid == wanted.gid),
            // A partition key matches with either membership bit.
            (
                ServiceMask::PKEY,
                (self.pkey.get() ^ wanted.pkey.get()) & 0x7fff == 0,
            ),
            (ServiceMask::NAME, self.name == wanted.name),
        ];
        let same = all_match(mask, &fields);
        let (ours, theirs) = (self.as_bytes(), wanted.as_bytes());
        same && DATA_FIELDS.iter().all(|&(first, count, size, at)| {
            (0..count).all(|word| {
                let place = at + word * size..at + (word + 1) * size;
                mask.bits() >> (first as usize + word) & 1 == 0
                    || ours[place.clone()] == theirs[place]
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_layout_matches_opensm() {
        // ib_service_record_t of opensm's <iba/ib_types.h>.
        let mut expected = [0; 176];
        expected[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        for (i, byte) in expected[8..24].iter_mut().enumerate() {
            *byte = 0x10 + i as u8;
        }
        expected[24..26].copy_from_slice(&[0xff, 0xff]);
        expected[28..32].copy_from_slice(&[0, 0, 0x0e, 0x10]);
        expected[32] = 0x77;
        expected[48..53].copy_from_slice(b"riser");
        expected[112] = 0x81;
        expected[130..132].copy_from_slice(&[0x16, 0x01]);
        expected[144 + 12..160].copy_from_slice(&[0x32, 0, 0, 3]);
        expected[168..176].copy_from_slice(&[0x64, 0, 0, 0, 0, 0, 0, 1]);
        let gid = Gid(std::array::from_fn(|i| 0x10 + i as u8));
        let mut record = ServiceRecord::new(0x0102_0304_0506_0708, gid).with_name("riser");
        record.lease = U32::new(3600);
        record.key[0] = 0x77;
        record.data8[0] = 0x81;
        record.data16[1] = U16::new(0x1601);
        record.data32[3] = U32::new(0x3200_0003);
        record.data64[1] = U64::new(0x6400_0000_0000_0001);
        assert_eq!(record.as_bytes(), expected);
        assert_eq!(ServiceRecord::read(&expected), Some(record));
    }

    #[test]
    fn unselected_components_are_ignored() {
        let one = ServiceRecord::new(1, Gid([1; 16])).with_name("a");
        let mut other = ServiceRecord::new(1, Gid([2; 16])).with_name("b");
        other.data16[7] = U16::new(5);
        let id = ServiceMask::SERVICE_ID;
        assert!(one.matches(id, &other) && one.matches(ServiceMask::default(), &other));
        for bit in [1, 6, 30] {
            let mask = ServiceMask::from_bits_retain(id.bits() | 1 << bit);
            assert!(!one.matches(mask, &other), "bit {bit}");
        }
        for bit in [2, 7, 22, 29, 31, 36] {
            let mask = ServiceMask::from_bits_retain(id.bits() | 1 << bit);
            assert!(one.matches(mask, &other), "bit {bit}");
        }
    }
}
