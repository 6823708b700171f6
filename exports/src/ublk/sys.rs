//! Messages between `ublk_drv` in the kernel and its servers: the `linux/ublk_cmd.h` structures, in
//! host byte order.

use std::io;

use riser_block::Geometry;
use zerocopy::byteorder::native_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Unit for sizes and offsets in bytes.
pub(super) const SECTOR: u64 = 512;

/// Device file offset of the request descriptors, used for `mmap`.
pub(super) const DESCS_OFFSET: i64 = 0;

/// Device file offset of the request data: the data for tag `t` starts at `DATA_OFFSET + (t <<
/// TAG_SHIFT)`.
pub(super) const DATA_OFFSET: u64 = 0x8000_0000;

/// Number of offset bits for each tag, see [`DATA_OFFSET`].
pub(super) const TAG_SHIFT: u32 = 25;

/// Result of a fetch if there will be no more requests.
pub(super) const ABORT: i32 = -libc::ENODEV;

const fn ioctl(direction: u32, number: u32, size: usize) -> u32 {
    (direction << 30) | ((size as u32) << 16) | ((b'u' as u32) << 8) | number
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// Command for `/dev/ublk-control`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ControlOp {
    GetInfo = ioctl(READ, 0x02, size_of::<ControlCmd>()),
    Add = ioctl(READ_WRITE, 0x04, size_of::<ControlCmd>()),
    Delete = ioctl(READ_WRITE, 0x05, size_of::<ControlCmd>()),
    Start = ioctl(READ_WRITE, 0x06, size_of::<ControlCmd>()),
    Stop = ioctl(READ_WRITE, 0x07, size_of::<ControlCmd>()),
    SetParams = ioctl(READ_WRITE, 0x08, size_of::<ControlCmd>()),
    StartRecovery = ioctl(READ_WRITE, 0x10, size_of::<ControlCmd>()),
    EndRecovery = ioctl(READ_WRITE, 0x11, size_of::<ControlCmd>()),
}

/// Command for `/dev/ublkcN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum IoOp {
    Fetch = ioctl(READ_WRITE, 0x20, size_of::<IoCmd>()),
    CommitAndFetch = ioctl(READ_WRITE, 0x21, size_of::<IoCmd>()),
}

/// Device features.
pub(super) mod feature {
    /// The device is kept if the server dies.
    pub(crate) const USER_RECOVERY: u64 = 1 << 3;
    /// Requests from a dead server are sent again to the new server.
    pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Use ioctl encoding for command numbers.
    pub(crate) const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The server copies data using `pread` and `pwrite`.
    pub(crate) const USER_COPY: u64 = 1 << 7;
}

/// Argument for a `/dev/ublk-control` command: `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ControlCmd {
    pub(super) dev_id: U32,
    pub(super) queue_id: U16,
    pub(super) len: U16,
    pub(super) addr: U64,
    pub(super) data: U64,
    pub(super) dev_path_len: U16,
    pub(super) pad: U16,
    pub(super) reserved: U32,
}

/// Device information: `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DevInfo {
    pub(super) nr_hw_queues: U16,
    pub(super) queue_depth: U16,
    pub(super) state: U16,
    pub(super) pad0: U16,
    pub(super) max_io_buf_bytes: U32,
    pub(super) dev_id: U32,
    pub(super) ublksrv_pid: I32,
    pub(super) pad1: U32,
    pub(super) flags: U64,
    pub(super) ublksrv_flags: U64,
    pub(super) owner_uid: U32,
    pub(super) owner_gid: U32,
    pub(super) reserved1: U64,
    pub(super) reserved2: U64,
}

/// Device state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Dead,
    Live,
    /// The server has died, and requests are queued.
    Quiesced,
    /// The server has died, and requests fail.
    FailIo,
}

impl DevInfo {
    /// Device state, or `None` if the kernel returns an unknown state.
    pub(super) fn state(&self) -> Option<State> {
        match self.state.get() {
            0 => Some(State::Dead),
            1 => Some(State::Live),
            2 => Some(State::Quiesced),
            3 => Some(State::FailIo),
            _ => None,
        }
    }
}

/// Argument for a `/dev/ublkcN` command: `struct ublksrv_io_cmd`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoCmd {
    pub(super) q_id: U16,
    pub(super) tag: U16,
    pub(super) result: I32,
    pub(super) addr: U64,
}

/// Request descriptor: `struct ublksrv_io_desc`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(super) struct IoDesc {
    pub(super) op_flags: U32,
    pub(super) sectors: U32,
    pub(super) start_sector: U64,
    pub(super) addr: U64,
}

/// Request operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl IoDesc {
    /// Request operation, or `None` if it's an operation we don't support.
    pub(super) fn op(&self) -> Option<Op> {
        match self.op_flags.get() & 0xff {
            0 => Some(Op::Read),
            1 => Some(Op::Write),
            2 => Some(Op::Flush),
            3 => Some(Op::Discard),
            5 => Some(Op::WriteZeroes),
            _ => None,
        }
    }

    /// Returns whether the data must be on stable storage before completion.
    pub(super) fn fua(&self) -> bool {
        self.op_flags.get() & (1 << 13) != 0
    }

    /// Returns whether the zeroes must not create a hole.
    pub(super) fn no_unmap(&self) -> bool {
        self.op_flags.get() & (1 << 15) != 0
    }

    /// Offset of the first byte; must be ignored for a flush.
    pub(super) fn offset(&self) -> u64 {
        self.start_sector.get().saturating_mul(SECTOR)
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.sectors.get()) * SECTOR
    }
}

/// Device parameters: `struct ublk_params`, only the types that we set.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Params {
    len: U32,
    types: U32,
    attrs: U32,
    logical_shift: u8,
    physical_shift: u8,
    io_opt_shift: u8,
    io_min_shift: u8,
    max_sectors: U32,
    chunk_sectors: U32,
    dev_sectors: U64,
    virt_boundary_mask: U64,
    discard_alignment: U32,
    discard_granularity: U32,
    max_discard_sectors: U32,
    max_write_zeroes_sectors: U32,
    max_discard_segments: U16,
    reserved: U16,
}

const TYPE_BASIC: u32 = 1 << 0;
const TYPE_DISCARD: u32 = 1 << 1;
const ATTR_READ_ONLY: u32 = 1 << 0;
const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
const ATTR_FUA: u32 = 1 << 3;

/// Max logical block size supported by the driver: the page size.
const PAGE: u32 = 4096;

/// Checks if the driver supports this disk, before we add a device.
///
/// # Errors
/// Returns `Unsupported` if the block size exceeds the page size.
pub(super) fn check(geometry: &Geometry) -> io::Result<()> {
    if geometry.block_size > PAGE {
        let text = format!(
            "the block size of {} bytes exceeds the ublk limit of {PAGE}",
            geometry.block_size
        );
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    Ok(())
}

impl Params {
    /// Creates parameters for a disk. Requests are limited to `largest` bytes.
    pub(super) fn of(geometry: &Geometry, largest: u32) -> Self {
        let shift = |bytes: u32| bytes.ilog2() as u8;
        // Round down to blocks, using the largest value that fits into this field.
        let sectors = |bytes: u64| {
            let blocks = bytes.min(u64::from(u32::MAX) * SECTOR) / u64::from(geometry.block_size);
            (blocks * u64::from(geometry.block_size) / SECTOR) as u32
        };
        let logical = shift(geometry.block_size);
        // The driver requires a value between the block size and the page size.
        let physical = shift(
            geometry
                .physical_block_size
                .min(PAGE)
                .max(geometry.block_size),
        );
        // The write cache can be enabled later, and we can't update the kernel, so always send
        // flushes.
        let mut attrs = ATTR_VOLATILE_CACHE;
        if geometry.read_only {
            attrs |= ATTR_READ_ONLY;
        }
        // Without a write cache, the disk may not support FUA; the kernel will send a flush
        // instead.
        if geometry.volatile_cache {
            attrs |= ATTR_FUA;
        }
        let discards = sectors(geometry.max_discard);
        let zeroes = sectors(geometry.max_write_zeroes);
        let can_discard = !geometry.read_only && (discards > 0 || zeroes > 0);
        let mut params = Self {
            len: (size_of::<Self>() as u32).into(),
            types: TYPE_BASIC.into(),
            attrs: attrs.into(),
            logical_shift: logical,
            physical_shift: physical,
            io_opt_shift: physical,
            io_min_shift: physical,
            max_sectors: sectors(geometry.split_len().min(largest).into()).into(),
            dev_sectors: (geometry.capacity / SECTOR).into(),
            ..Self::default()
        };
        if can_discard {
            params.types = (TYPE_BASIC | TYPE_DISCARD).into();
            params.discard_granularity = geometry.block_size.into();
            params.max_discard_sectors = discards.into();
            params.max_write_zeroes_sectors = zeroes.into();
            params.max_discard_segments = 1.into();
        }
        params
    }
}

#[cfg(test)]
mod tests {
    use riser_block::{BlockDevice, MemoryDevice};

    use super::*;

    #[test]
    fn structures_and_commands_match_kernel() {
        assert_eq!(size_of::<ControlCmd>(), 32);
        assert_eq!(size_of::<DevInfo>(), 64);
        assert_eq!(size_of::<IoCmd>(), 16);
        assert_eq!(size_of::<IoDesc>(), 24);
        assert_eq!(size_of::<Params>(), 8 + 32 + 20);
        assert_eq!(ControlOp::GetInfo as u32, 0x8020_7502);
        assert_eq!(ControlOp::Add as u32, 0xc020_7504);
        assert_eq!(IoOp::CommitAndFetch as u32, 0xc010_7521);
    }

    #[test]
    fn disk_parameters_respect_driver_limits() {
        let disk = MemoryDevice::new(1 << 30, 4096).unwrap();
        let params = Params::of(disk.geometry(), 256 << 10);
        assert_eq!(params.len.get(), 60);
        assert_eq!((params.logical_shift, params.physical_shift), (12, 12));
        assert_eq!(params.max_sectors.get(), 512);
        assert_eq!(params.dev_sectors.get(), (1 << 30) / 512);
        assert_eq!(params.types.get(), 3);
        assert_eq!(params.max_discard_sectors.get(), (1 << 30) / 512);
        let fixed = disk.with_geometry(|g| {
            g.read_only = true;
            g.max_discard = u64::MAX;
            g.physical_block_size = 1 << 20;
            g.optimal_transfer = 64 << 10;
        });
        let params = Params::of(fixed.geometry(), 256 << 10);
        assert_eq!(params.max_sectors.get(), 128);
        assert_eq!((params.types.get(), params.attrs.get() & 1), (1, 1));
        assert_eq!(params.physical_shift, 12);
    }

    #[test]
    fn kernel_always_sends_flushes() {
        for (volatile_cache, attrs) in [(true, 0b1100), (false, 0b0100)] {
            let disk = MemoryDevice::new(1 << 30, 4096).unwrap();
            let disk = disk.with_geometry(|g| g.volatile_cache = volatile_cache);
            let params = Params::of(disk.geometry(), 256 << 10);
            assert_eq!(params.attrs.get(), attrs);
        }
    }

    #[test]
    fn block_larger_than_page_fails() {
        // READ CAPACITY can report up to 64 KiB.
        let mut geometry = MemoryDevice::new(1 << 30, 4096).unwrap().geometry().clone();
        (geometry.block_size, geometry.physical_block_size) = (8192, 8192);
        assert_eq!(Params::of(&geometry, 256 << 10).physical_shift, 13);
        let refused = check(&geometry).unwrap_err();
        assert!(refused.to_string().contains("8192"), "{refused}");
    }

    #[test]
    fn descriptor_fields_are_decoded() {
        let desc = IoDesc {
            op_flags: (5 | 1 << 13 | 1 << 15).into(),
            sectors: 8.into(),
            start_sector: (1 << 40).into(),
            addr: 0.into(),
        };
        assert_eq!(desc.op(), Some(Op::WriteZeroes));
        assert!(desc.fua() && desc.no_unmap());
        assert_eq!((desc.offset(), desc.len()), (1 << 49, 4096));
        let unknown = IoDesc {
            op_flags: 4.into(),
            ..desc
        };
        assert_eq!(unknown.op(), None);
    }
}
