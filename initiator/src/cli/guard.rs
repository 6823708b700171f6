//! What must not be overwritten by mistake: a unit that this host has attached, or one that carries a file
//! system, a partition table or the like.

use std::sync::Arc;

use super::args::Global;
use super::disk::{Address, Disk};
use super::exit::{CliError, Exit};
use super::state::StateDir;
use crate::block::{BlockDevice, ByteDevice, task};

/// How much of a disk is looked at, in bytes: as far as the last of [`signature`]s.
const HEAD: u64 = (1 << 20) + 4096;

/// Fails if writing to a disk would destroy what somebody may need.
///
/// # Errors
/// It is attached, or carries something.
pub(super) fn check(disk: &Arc<Disk>, url: &Address, global: &Global) -> Result<(), CliError> {
    if matches!(url, Address::Memory { .. }) {
        return Ok(());
    }
    let refuse = |why: String| {
        CliError::new(Exit::Busy, format!("{url} would be overwritten, and {why}"))
            .help("--overwrite does it all the same")
    };
    let attachments = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).list())
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    let unit = disk.unit();
    let is_it = |other: &Option<String>| unit.is_some() && *other == unit;
    let url_text = url.to_string();
    let same = attachments
        .iter()
        .find(|a| is_it(&a.unit) || a.url == url_text);
    if let Some(other) = same {
        let path = other.export.path().display();
        return Err(refuse(format!("this host has it attached at {path}")));
    }
    // What cannot be read cannot be judged; writing will show why.
    match read_head(disk).as_deref().and_then(signature) {
        Some(what) => Err(refuse(format!("it carries {what}"))),
        None => Ok(()),
    }
}

fn read_head(disk: &Arc<Disk>) -> Option<Vec<u8>> {
    let end = HEAD.min(disk.geometry().capacity);
    let device = ByteDevice::new(Arc::clone(disk));
    let mut head = Vec::new();
    while (head.len() as u64) < end {
        let at = head.len() as u64;
        let span = device.first_piece(at, end - at);
        let buffer = task::block_on(device.device().buffer(span.covering));
        let buffer = task::block_on(device.read(span, buffer)).ok()?;
        head.resize(head.len() + span.len, 0);
        buffer.slice().read(span.head, &mut head[at as usize..]);
    }
    Some(head)
}

/// What the first bytes of a disk say that is on it, by the magic numbers that libblkid knows.
fn signature(head: &[u8]) -> Option<&'static str> {
    let is = |at: usize, magic: &[u8]| head.get(at..at + magic.len()) == Some(magic);
    let has_partitions = || {
        let types = [0x1c2, 0x1d2, 0x1e2, 0x1f2];
        is(510, &[0x55, 0xaa]) && types.iter().any(|at| head[*at] != 0)
    };
    let magics: [(usize, &[u8], &str); 24] = [
        (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
        (0, b"XFSB", "an XFS file system"),
        (0x438, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
        (0x1_0040, b"_BHRfS_M", "a Btrfs file system"),
        (0x400, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
        (
            0x1018,
            b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca",
            "a bcache device",
        ),
        (0x18, b"LVM2 001", "an LVM physical volume"),
        (0x218, b"LVM2 001", "an LVM physical volume"),
        (0x418, b"LVM2 001", "an LVM physical volume"),
        (0x618, b"LVM2 001", "an LVM physical volume"),
        (0, &[0xfc, 0x4e, 0x2b, 0xa9], "a part of a RAID (MD)"),
        (0x1000, &[0xfc, 0x4e, 0x2b, 0xa9], "a part of a RAID (MD)"),
        (0xff6, b"SWAPSPACE2", "swap space"),
        (3, b"NTFS    ", "an NTFS file system"),
        (3, b"EXFAT   ", "an exFAT file system"),
        (3, b"ReFS\0", "a ReFS file system"),
        (0x36, b"FAT1", "a FAT file system"),
        (0x52, b"FAT32   ", "a FAT file system"),
        (0x8001, b"CD001", "an ISO 9660 file system"),
        (0x10_0000, &[0x0d, 0xd0, 0x01, 0xc0], "a VMFS volume"),
        (0x255c, &[0x19, 0x01, 0x54, 0x19], "a UFS file system"),
        (0x1_055c, &[0x19, 0x01, 0x54, 0x19], "a UFS file system"),
        (0x200, b"EFI PART", "a partition table (GPT)"),
        (0x1000, b"EFI PART", "a partition table (GPT)"),
    ];
    let known = magics.iter().find(|(at, magic, _)| is(*at, magic));
    // Each label of ZFS has uberblocks of at least a KiB from 128 KiB on.
    let is_zfs = || {
        (0x2_0000..0x4_0000).step_by(1024).any(|at| {
            is(at, &0x00ba_b10c_u64.to_le_bytes()) || is(at, &0x00ba_b10c_u64.to_be_bytes())
        })
    };
    match known {
        Some((_, _, what)) => Some(what),
        None if is_zfs() => Some("a part of a ZFS pool"),
        None if has_partitions() => Some("a partition table (MBR)"),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_carries_is_known_by_its_first_bytes() {
        let disk = |at: usize, magic: &[u8]| {
            let mut head = vec![0; HEAD as usize];
            head[at..at + magic.len()].copy_from_slice(magic);
            head
        };
        assert_eq!(signature(&disk(0, b"")), None);
        assert_eq!(signature(&[]), None);
        for (at, magic, what) in [
            (0x438, &b"\x53\xef"[..], "ext2"),
            (0, b"XFSB", "XFS"),
            (0x218, b"LVM2 001", "LVM"),
            (0x10_0000, b"\x0d\xd0\x01\xc0", "VMFS"),
            (0x2_0400, b"\0\0\0\0\0\xba\xb1\x0c", "ZFS"),
        ] {
            let found = signature(&disk(at, magic));
            assert!(found.is_some_and(|found| found.contains(what)), "{found:?}");
        }
        // A boot sector is no partition table unless it has partitions.
        let mut boot = disk(510, &[0x55, 0xaa]);
        assert_eq!(signature(&boot), None);
        boot[0x1c2] = 0x83;
        assert_eq!(signature(&boot), Some("a partition table (MBR)"));
    }
}
