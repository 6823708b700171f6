//! Protects logical units from accidentally being overwritten, if they are attached to this host,
//! or contain data such as a file system or partition table. Also rejects attachments that would
//! conflict with another attachment of the same unit.

use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use riser_block::{BlockDevice, BlockError, ByteDevice, task};
use riser_exports::mounts::Mounts;

use super::address::Address;
use super::args::Global;
use super::disk::Disk;
use super::exit::{CliError, Exit};
use super::loops;
use super::others;
use super::output;
use super::state::{Attachment, Export, Listing, Phase, StateDir};

/// Number of bytes to check at the start of a disk, including the last known [`signature`].
const HEAD: u64 = (1 << 20) + 4096;

/// Number of bytes to check at the end of a disk.
const TAIL: u64 = 128 << 10;

/// Fails if writing to a disk could destroy data.
///
/// # Errors
/// Fails if the disk is attached, or contains known data.
pub(super) fn check(disk: &Arc<Disk>, url: &Address, global: &Global) -> Result<(), CliError> {
    // Memory is only used by this process, and a read-only disk can't be overwritten.
    if matches!(url, Address::Memory { .. }) || disk.geometry().read_only {
        return Ok(());
    }
    let refuse = |why: String| {
        CliError::new(Exit::Busy, format!("{url} would be overwritten, and {why}"))
            .help("use --overwrite to write anyway")
    };
    let may_be = |why| refuse(format!("this host may have it attached: {why}"));
    let attachments = attachments(global, &may_be)?;
    let unit = disk.unit();
    let is_it = |other: &Option<String>| unit.is_some() && *other == unit;
    let url_text = url.to_string();
    let same = attachments.iter().find(|a| {
        !a.is_over() && (is_it(&a.unit) || a.url == url_text || is_same_file(url, &a.url))
    });
    if let Some(other) = same {
        let path = output::printable(&other.export.path().display());
        return Err(refuse(format!("this host has it attached at {path}")));
    }
    if let Ok(mounts) = Mounts::read()
        && let Some(path) = others::mount_of(&mounts, &url_text)
    {
        let path = output::printable(&path.display());
        return Err(refuse(format!("this host has it attached at {path}")));
    }
    let kernel_disk = |unit| kernel_disk(Path::new("/sys/class/block"), unit);
    if let Some(name) = unit.as_deref().and_then(kernel_disk) {
        return Err(refuse(format!(
            "this host's kernel has it attached as /dev/{name}"
        )));
    }
    if let Address::File { path, .. } = url
        && let Some(name) = loop_device(Path::new("/sys/class/block"), path)
    {
        return Err(refuse(format!("the loop device /dev/{name} uses it")));
    }
    match content(disk) {
        Ok(Some(what)) => Err(refuse(format!("it contains {what}"))),
        Ok(None) => Ok(()),
        Err((which, error)) => {
            let why = format!("its content is unknown: cannot read its {which} bytes");
            Err(refuse(why).because(error))
        }
    }
}

/// Detects the type of the contents of a disk. Returns `None` if it's unknown.
///
/// # Errors
/// Returns whether the first or last bytes couldn't be read.
pub(super) fn content(
    disk: &Arc<Disk>,
) -> Result<Option<&'static str>, (&'static str, BlockError)> {
    let capacity = disk.geometry().capacity;
    let head = read(disk, 0..HEAD.min(capacity)).map_err(|e| ("first", e))?;
    let tail = capacity.saturating_sub(TAIL)..capacity;
    let tail = read(disk, tail).map_err(|e| ("last", e))?;
    let block = disk.geometry().block_size;
    Ok(signature(&head).or_else(|| last_signature(&tail, capacity, block)))
}

/// A file or device, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileId {
    /// Device of the file system and inode number.
    File(u64, u64),
    /// A block device, which may have multiple device nodes.
    Device(u64),
}

impl FileId {
    pub(super) fn of(meta: &fs::Metadata) -> Self {
        match meta.file_type().is_block_device() {
            true => Self::Device(meta.rdev()),
            false => Self::File(meta.dev(), meta.ino()),
        }
    }
}

/// Returns whether an attachment uses the same file or device, even if the path is different.
fn is_same_file(url: &Address, other: &str) -> bool {
    let id = |address: &Address| {
        let Address::File { path, .. } = address else {
            return None;
        };
        fs::metadata(path).ok().map(|meta| FileId::of(&meta))
    };
    id(url).is_some_and(|own| other.parse().ok().and_then(|other| id(&other)) == Some(own))
}

/// Returns the attachments on this host that are visible to this user. Only root can see the
/// attachments of other users.
///
/// # Errors
/// Fails if there may be additional attachments that can't be read.
fn attachments(
    global: &Global,
    refuse: &dyn Fn(String) -> CliError,
) -> Result<Vec<Attachment>, CliError> {
    let listing = StateDir::open().and_then(|dir| dir.with_patience(global.timeout).scan());
    let listing = match listing {
        Ok(listing) => listing,
        // If the directory can't be opened, this user doesn't have any attachments. There is no
        // warning, because only root can see attachments of other users. We still check their
        // mounts.
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            tracing::info!("cannot list attachments of other users of this host");
            return Ok(Vec::new());
        }
        Err(e) => return Err(CliError::io("cannot read the list of attachments", e)),
    };
    match listing.unknown.first() {
        None => {
            let own = StateDir::open().map(|dir| dir.path().to_owned());
            let others = others::attachments(Path::new("/run"), &own.unwrap_or_default());
            Ok(listing.attachments.into_iter().chain(others).collect())
        }
        Some(file) => {
            let file = file.display();
            Err(refuse(format!("invalid attachment file {file}")))
        }
    }
}

/// Use of a logical unit by an attachment.
#[derive(Clone, Copy, Debug)]
struct Usage<'a> {
    unit: Option<&'a str>,
    url: &'a str,
    writes: bool,
    /// Set if the file system is mounted. In this case, no other attachment may write to the unit.
    is_mount: bool,
}

impl<'a> Usage<'a> {
    fn of(attachment: &'a Attachment) -> Self {
        Self {
            unit: attachment.unit.as_deref(),
            url: &attachment.url,
            writes: !attachment.read_only,
            is_mount: matches!(attachment.export, Export::Mount { .. }),
        }
    }

    /// Returns whether both use the same logical unit, file or export. We compare their names if
    /// both are known, and their addresses otherwise.
    fn is_same_unit(&self, other: &Self) -> bool {
        match (self.unit, other.unit) {
            (Some(unit), Some(other)) => unit == other,
            _ => match (self.url.parse::<Address>(), other.url.parse::<Address>()) {
                (Ok(url), Ok(other)) => is_same_place(&url, &other),
                _ => self.url == other.url,
            },
        }
    }

    /// Returns whether two attachments of the same unit would corrupt data, because there are two
    /// writers, or a mounted file system that another attachment can write to.
    fn conflicts(&self, other: &Self) -> bool {
        let may_change = |one: &Self, other: &Self| one.writes && (other.writes || other.is_mount);
        may_change(self, other) || may_change(other, self)
    }
}

/// Returns whether two addresses refer to the same logical unit, file or export.
fn is_same_place(url: &Address, other: &Address) -> bool {
    match (url, other) {
        // The memory of each process is a separate disk.
        (Address::Memory { .. }, _) | (_, Address::Memory { .. }) => false,
        (Address::Target(url), Address::Target(other)) => url.is_same_unit(other),
        (Address::File { .. }, _) => is_same_file(url, &other.to_string()),
        _ => url == other,
    }
}

/// Fails if a new attachment conflicts with another attachment on this host. The list is
/// locked, so the second of two concurrent processes sees the attachment of the first.
///
/// # Errors
/// Fails if the logical unit is, or may be, in use.
pub(super) fn check_unused(new: &Attachment, listing: &Listing) -> Result<(), CliError> {
    let is_mount = Usage::of(new).is_mount;
    if is_mount && let Some(file) = listing.unknown.first() {
        let file = file.display();
        let what = format!("{} may be in use already", new.url);
        return Err(CliError::new(Exit::Busy, what)
            .because(format!("invalid attachment file {file}"))
            .help("remove the file if it is not in use by a riser process"));
    }
    let own = StateDir::open().map(|dir| dir.path().to_owned());
    // Ignore other users, as they could otherwise prevent root from attaching disks.
    let others = others::of_root(Path::new("/run"), &own.unwrap_or_default());
    let Some(other) = find_conflict(new, listing.attachments.iter().chain(&others)) else {
        return Ok(());
    };
    let path = output::printable(&other.export.path().display());
    let state = match other.phase {
        Phase::Ending => ", where it is still open",
        _ => "",
    };
    let what = format!("this host is using the same logical unit at {path}{state}");
    let bind = match (is_mount, &other.export) {
        (true, Export::Mount { .. }) => format!(", or `mount --bind {path}`"),
        _ => String::new(),
    };
    Err(CliError::new(Exit::Busy, what).help(format!(
        "use `riser detach {path}` first{bind}, or --shared to attach it anyway"
    )))
}

/// Returns the first attachment that conflicts with a new one.
fn find_conflict<'a>(
    new: &Attachment,
    mut others: impl Iterator<Item = &'a Attachment>,
) -> Option<&'a Attachment> {
    let usage = Usage::of(new);
    // When taking over a block device, ignore the entry of the killed process.
    let is_own = |a: &Attachment| a.export.path() == new.export.path() && !a.is_alive();
    others.find(|a| {
        let other = Usage::of(a);
        !a.is_over() && !is_own(a) && usage.is_same_unit(&other) && usage.conflicts(&other)
    })
}

/// Returns the block device of this unit from an initiator in the kernel. Its `wwid` uses the same
/// format as [`Disk::unit`].
fn kernel_disk(block: &Path, unit: &str) -> Option<String> {
    fs::read_dir(block).ok()?.flatten().find_map(|disk| {
        let name = fs::read_to_string(disk.path().join("device/wwid")).ok()?;
        (name.trim() == unit).then(|| disk.file_name().to_string_lossy().into_owned())
    })
}

/// Returns the loop device for a file, which may contain a mounted file system. Some devices are
/// only visible to root.
fn loop_device(block: &Path, file: &Path) -> Option<String> {
    let file = fs::canonicalize(file).ok()?;
    let mut devices = loops::loop_devices(block);
    devices.find_map(|(device, below)| (below == file).then_some(device))
}

fn read(disk: &Arc<Disk>, place: Range<u64>) -> Result<Vec<u8>, BlockError> {
    let device = ByteDevice::new(Arc::clone(disk));
    let mut bytes = Vec::new();
    let mut at = place.start;
    while at < place.end {
        let span = device.first_piece(at, place.end - at);
        let buffer = task::block_on(device.device().buffer(span.covering));
        let buffer = task::block_on(device.read(span, buffer))?;
        let have = bytes.len();
        bytes.resize(have + span.len, 0);
        buffer.slice().read(span.head, &mut bytes[have..]);
        at += span.len as u64;
    }
    Ok(bytes)
}

/// Detects the contents of a disk with `capacity` bytes from its last bytes. Old RAID formats store
/// the superblock at the end, and the backup GPT is in the last block.
fn last_signature(tail: &[u8], capacity: u64, block_size: u32) -> Option<&'static str> {
    const MAGIC: u32 = 0xa92b_4efc;
    let start = capacity - tail.len() as u64;
    let is = |at: Option<u64>, magic: &[u8]| {
        let at = at.and_then(|at| at.checked_sub(start));
        let found = at
            .and_then(|at| tail.get(at as usize..))
            .unwrap_or_default();
        found.starts_with(magic)
    };
    // Version 0.90: the last full 64 KiB, using the byte order of the host. Version 1.0: at least 8
    // KiB before the end, aligned to 4 KiB.
    let old = (capacity & !0xffff).checked_sub(0x1_0000);
    let new = capacity.checked_sub(0x2000).map(|at| at & !0xfff);
    let is_old = is(old, &MAGIC.to_le_bytes()) || is(old, &MAGIC.to_be_bytes());
    if is_old || is(new, &MAGIC.to_le_bytes()) {
        Some("a part of a RAID (MD)")
    } else if is(capacity.checked_sub(block_size.into()), b"EFI PART") {
        Some("a partition table (GPT)")
    } else {
        None
    }
}

/// Detects the contents of a disk from its first bytes, using the same magic numbers as libblkid.
fn signature(head: &[u8]) -> Option<&'static str> {
    let is = |at: usize, magic: &[u8]| head.get(at..at + magic.len()) == Some(magic);
    let has_partitions = || {
        let types = [0x1c2, 0x1d2, 0x1e2, 0x1f2];
        is(510, &[0x55, 0xaa]) && types.iter().any(|at| head[*at] != 0)
    };
    let magics: [(usize, &[u8], &str); 49] = [
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
        (0x255c, &[0x54, 0x19, 0x01, 0x00], "a UFS file system"),
        (0x1_0000, &[0x01, 0x16, 0x19, 0x70], "a GFS2 file system"),
        (0x400, b"OCFSV2", "an OCFS2 file system"),
        (0x800, b"OCFSV2", "an OCFS2 file system"),
        (0x1000, b"OCFSV2", "an OCFS2 file system"),
        (0x2000, b"OCFSV2", "an OCFS2 file system"),
        (0x20, b"ORCLDISK", "an Oracle ASM disk"),
        (0, b"bluestore block device", "a Ceph OSD"),
        (
            0x1018,
            b"\xc6\x85\x73\xf6\x66\xce\x90\xa9",
            "a bcachefs file system",
        ),
        (0x1_0034, b"ReIsEr", "a ReiserFS file system"),
        (0x8000, b"JFS1", "a JFS file system"),
        (0x20, b"NXSB", "an APFS container"),
        (0x400, b"H+\0\x04", "an HFS+ file system"),
        (0x400, b"HX\0\x05", "an HFS+ file system"),
        (0xfff6, b"SWAPSPACE2", "swap space"),
        (0xff6, b"S1SUSPEND", "a suspended system (swap space)"),
        (0xff6, b"S2SUSPEND", "a suspended system (swap space)"),
        (0xff6, b"ULSUSPEND", "a suspended system (swap space)"),
        (0xff6, b"LINHIB0001", "a suspended system (swap space)"),
        (0xfff6, b"S1SUSPEND", "a suspended system (swap space)"),
        (0xfff6, b"LINHIB0001", "a suspended system (swap space)"),
        (0x8001, b"BEA01", "a UDF file system"),
        (0, b"QFI\xfb", "a disk image (QCOW)"),
        (0, b"KDMV", "a disk image (VMDK)"),
        (0, b"vhdxfile", "a disk image (VHDX)"),
    ];
    let known = magics.iter().find(|(at, magic, _)| is(*at, magic));
    // Each ZFS label contains uberblocks, starting at 128 KiB. They are at least 1 KiB apart.
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
    use super::super::state::fixture;
    use super::*;

    #[test]
    fn signatures_are_detected_in_first_bytes() {
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
            (0x1_0000, b"\x01\x16\x19\x70", "GFS2"),
            (0x20, b"ORCLDISK", "Oracle ASM"),
            (0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9", "bcachefs"),
            (0xfff6, b"SWAPSPACE2", "swap"),
            (0xff6, b"S1SUSPEND", "suspended"),
            (0x8001, b"BEA01", "UDF"),
            (0, b"QFI\xfb\0\0\0\x03", "QCOW"),
            (0, b"KDMV", "VMDK"),
            (0, b"vhdxfile", "VHDX"),
        ] {
            let found = signature(&disk(at, magic));
            assert!(found.is_some_and(|found| found.contains(what)), "{found:?}");
        }
        // A boot sector without partitions is not a partition table.
        let mut boot = disk(510, &[0x55, 0xaa]);
        assert_eq!(signature(&boot), None);
        boot[0x1c2] = 0x83;
        assert_eq!(signature(&boot), Some("a partition table (MBR)"));
    }

    #[test]
    fn signatures_are_detected_in_last_bytes() {
        // 100 MiB and 20 KiB. The superblocks are 64 KiB before the last multiple of 64 KiB, and 8
        // KiB before the end.
        const CAPACITY: u64 = (100 << 20) + (20 << 10);
        let disk = |from_end: usize, magic: &[u8]| {
            let mut tail = vec![0; TAIL as usize];
            let at = tail.len() - from_end;
            tail[at..at + magic.len()].copy_from_slice(magic);
            last_signature(&tail, CAPACITY, 512)
        };
        let (raid, table) = ("a part of a RAID (MD)", "a partition table (GPT)");
        assert_eq!(disk(84 << 10, b"\xfc\x4e\x2b\xa9"), Some(raid));
        assert_eq!(disk(84 << 10, b"\xa9\x2b\x4e\xfc"), Some(raid));
        assert_eq!(disk(8 << 10, b"\xfc\x4e\x2b\xa9"), Some(raid));
        assert_eq!(disk(512, b"EFI PART"), Some(table));
        assert_eq!(disk(80 << 10, b"\xfc\x4e\x2b\xa9"), None);
        for short in [0, 512, 4096, 65536] {
            assert_eq!(last_signature(&vec![0; short], short as u64, 512), None);
        }
    }

    fn used(url: &str, unit: Option<&str>, is_mount: bool, read_only: bool) -> Attachment {
        let path = Path::new("/mnt");
        let mut attachment = fixture::attachment(path);
        attachment.url = url.to_owned();
        attachment.unit = unit.map(str::to_owned);
        attachment.read_only = read_only;
        if is_mount {
            attachment.export = Export::Mount {
                path: path.to_owned(),
                device: "/dev/loop0".into(),
                fuse: "/run/riser/1.fuse".into(),
                id: None,
            };
        }
        attachment
    }

    #[test]
    fn conflicts_depend_on_writers_and_mounts() {
        let (url, unit) = ("srp://host/0", Some("naa.6001405"));
        let conflicts = |new: (bool, bool), old: (bool, bool)| {
            let new = used(url, unit, new.0, new.1);
            find_conflict(&new, [used(url, unit, old.0, old.1)].iter()).is_some()
        };
        let (mount, plain) = (true, false);
        let (reads, writes) = (true, false);
        for (new, old, expected) in [
            ((plain, writes), (plain, writes), true),
            ((plain, reads), (plain, writes), false),
            ((plain, writes), (plain, reads), false),
            ((mount, writes), (mount, writes), true),
            ((mount, reads), (mount, writes), true),
            ((mount, writes), (mount, reads), true),
            ((mount, reads), (mount, reads), false),
            // An export may be mounted by another host.
            ((mount, writes), (plain, writes), true),
            ((mount, reads), (plain, writes), true),
            ((plain, writes), (mount, reads), true),
            ((plain, reads), (mount, writes), false),
        ] {
            assert_eq!(conflicts(new, old), expected, "{new:?} with {old:?}");
        }
    }

    #[test]
    fn starting_mount_excludes_next() {
        let mount = || used("srp://host/0", Some("naa.6001405"), true, false);
        let mut first = mount();
        first.phase = Phase::Starting;
        assert!(find_conflict(&mount(), [first.clone()].iter()).is_some());
        first.phase = Phase::Ending;
        assert!(find_conflict(&mount(), [first.clone()].iter()).is_some());
        first.phase = Phase::Failed;
        assert!(find_conflict(&mount(), [first].iter()).is_none());
    }

    #[test]
    fn units_match_by_name_or_else_address() {
        let is_same = |one: (&str, Option<&str>), other: (&str, Option<&str>)| {
            let attachment = |(url, unit)| used(url, unit, false, false);
            find_conflict(&attachment(one), [attachment(other)].iter()).is_some()
        };
        let iscsi = "iscsi://10.0.0.1/iqn.2026-01.com.example:disk/0";
        let iser = "iser://10.0.0.2:3261/iqn.2026-01.com.example:disk?queue_size=4";
        let other_lun = "iscsi://10.0.0.1/iqn.2026-01.com.example:disk/1";
        assert!(is_same((iscsi, Some("naa.1")), (iser, Some("naa.1"))));
        assert!(!is_same((iscsi, Some("naa.1")), (iscsi, Some("naa.2"))));
        assert!(is_same((iscsi, None), (iser, None)));
        assert!(is_same((iscsi, None), (iser, Some("naa.1"))));
        assert!(!is_same((iscsi, None), (other_lun, None)));
        let srp = "srp://10.0.0.1/0";
        assert!(is_same((srp, None), ("srp://10.0.0.1:5555/", None)));
        assert!(!is_same((srp, None), ("srp://10.0.0.2/0", None)));
        assert!(!is_same(("mem:1M", None), ("mem:1M", None)));
    }

    #[test]
    fn attached_file_is_found_by_any_path() {
        let dir = std::env::temp_dir().join(format!("riser-same-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let at = |name: &str| dir.join(name);
        fs::write(at("disk"), "").unwrap();
        fs::write(at("other"), "").unwrap();
        fs::hard_link(at("disk"), at("hard")).unwrap();
        std::os::unix::fs::symlink(at("disk"), at("soft")).unwrap();
        let address = |name: &str| -> Address {
            let text = at(name).to_str().unwrap().to_owned();
            text.parse().unwrap()
        };
        let attached = format!("file:{}?direct=on", at("disk").display());
        for (name, want) in [
            ("disk", true),
            ("hard", true),
            ("soft", true),
            ("other", false),
            ("missing", false),
        ] {
            assert_eq!(is_same_file(&address(name), &attached), want, "{name}");
        }
        let missing = address("missing");
        assert!(!is_same_file(&missing, &missing.to_string()));
        let memory: Address = "mem:1M".parse().unwrap();
        assert!(!is_same_file(&memory, &memory.to_string()));
        assert!(!is_same_file(&address("disk"), "no address"));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn loop_backing_file_is_detected() {
        let block = std::env::temp_dir().join(format!("riser-loop-{}", std::process::id()));
        fs::create_dir_all(block.join("loop3/loop")).unwrap();
        fs::create_dir_all(block.join("sda")).unwrap();
        let file = block.join("disk.img");
        fs::write(&file, "").unwrap();
        let shown = format!("{}\n", fs::canonicalize(&file).unwrap().display());
        fs::write(block.join("loop3/loop/backing_file"), shown).unwrap();
        assert_eq!(loop_device(&block, &file), Some("loop3".to_owned()));
        assert_eq!(loop_device(&block, &block.join("sda")), None);
        assert_eq!(loop_device(&block, Path::new("/does/not/exist")), None);
        fs::remove_dir_all(block).unwrap();
    }

    #[test]
    fn kernel_disk_is_found_by_wwid() {
        let block = std::env::temp_dir().join(format!("riser-block-{}", std::process::id()));
        for (name, wwid) in [("sda", "naa.5000c500a1b2c3d4\n"), ("sdb", "naa.60014051\n")] {
            fs::create_dir_all(block.join(name).join("device")).unwrap();
            fs::write(block.join(name).join("device/wwid"), wwid).unwrap();
        }
        fs::create_dir(block.join("loop0")).unwrap();
        let found = |unit| kernel_disk(&block, unit);
        assert_eq!(found("naa.60014051"), Some("sdb".to_owned()));
        assert_eq!(found("naa.6001405"), None);
        fs::remove_dir_all(&block).unwrap();
        assert_eq!(found("naa.60014051"), None);
    }
}
