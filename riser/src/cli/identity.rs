//! Names of disks in state files of `riser bench`.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use super::address::Address;
use super::disk::Disk;

/// Returns the name of a disk. If possible, it doesn't depend on the address of the disk or change
/// after a reboot.
pub(super) fn of(address: &Address, disk: Option<&Arc<Disk>>) -> String {
    let unit = disk.and_then(|disk| disk.unit());
    unit.unwrap_or_else(|| match address {
        Address::File { path, .. } => of_file(path),
        Address::Memory { .. } | Address::Nbd(_) | Address::Target(_) => address.to_string(),
    })
}

fn of_file(path: &Path) -> String {
    let device = fs::metadata(path)
        .ok()
        .filter(|meta| meta.file_type().is_block_device());
    let name = device.and_then(|meta| of_device(Path::new("/sys/dev/block"), meta.rdev()));
    name.unwrap_or_else(|| {
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        format!("file:{}", path.display())
    })
}

/// Returns the identifier of a block device, because device nodes may change after a reboot. For a
/// partition, this includes the first sector. Returns `None` if there is no identifier, e.g. for
/// some devices in virtual machines.
fn of_device(sys: &Path, rdev: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let device = sys.join(format!("{major}:{minor}"));
    match device.join("partition").exists() {
        // In sysfs, the directory of a partition is in the directory of its disk.
        true => {
            let disk = identifier(&device.join(".."))?;
            let start = attribute(&device.join("start"))?;
            Some(format!("{disk} from sector {start}"))
        }
        false => identifier(&device),
    }
}

/// Returns the identifier of a disk, using its directory in sysfs. Globally unique identifiers use
/// the same format as [`Disk::unit`]. There are other formats for mapped devices, arrays and virtio
/// disks.
fn identifier(disk: &Path) -> Option<String> {
    let names = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "serial"];
    let mut ids = names.iter().filter_map(|name| attribute(&disk.join(name)));
    // An array without an identifier reports zeroes.
    let id = ids.find(|id| id.chars().any(|c| !matches!(c, '0' | '-')));
    id.or_else(|| {
        let file = attribute(&disk.join("loop/backing_file"))?;
        match attribute(&disk.join("loop/offset")).filter(|offset| offset != "0") {
            Some(offset) => Some(format!("loop of {file} from byte {offset}")),
            None => Some(format!("loop of {file}")),
        }
    })
}

/// Returns the contents of a sysfs attribute, unless it's empty.
fn attribute(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn device_identity_includes_partition_start() {
        let root = std::env::temp_dir().join(format!("riser-identity-{}", std::process::id()));
        let sys = root.join("dev");
        fs::create_dir_all(&sys).unwrap();
        let make = |number: &str, dir: &str, files: &[(&str, &str)]| {
            let dir = root.join(dir);
            fs::create_dir_all(&dir).unwrap();
            for (name, content) in files {
                let file = dir.join(name);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, content).unwrap();
            }
            symlink(&dir, sys.join(number)).unwrap();
        };
        make("8:0", "sda", &[("device/wwid", "naa.5000c500a1b2c3d4\n")]);
        let partition = [("partition", "1\n"), ("start", "2048\n")];
        make("8:1", "sda/sda1", &partition);
        make("259:0", "nvme0n1", &[("wwid", "eui.0025385b11b2c3d4\n")]);
        make("253:0", "vda", &[("device/wwid", "\n")]);
        make("253:1", "vda/vda1", &partition);
        make("253:16", "vdb", &[("serial", "data-1\n")]);
        make("254:0", "dm-0", &[("dm/uuid", "LVM-abc\n")]);
        make("9:0", "md0", &[("md/uuid", "5f0c-01\n")]);
        make("9:1", "md1", &[("md/uuid", "0000-00\n")]);
        make("7:0", "loop0", &[("loop/backing_file", "/img\n")]);
        let part = [("loop/backing_file", "/img\n"), ("loop/offset", "512\n")];
        make("7:1", "loop1", &part);
        let name = |major, minor| of_device(&sys, rustix::fs::makedev(major, minor));
        assert_eq!(name(8, 0).unwrap(), "naa.5000c500a1b2c3d4");
        assert_eq!(name(8, 1).unwrap(), "naa.5000c500a1b2c3d4 from sector 2048");
        assert_eq!(name(259, 0).unwrap(), "eui.0025385b11b2c3d4");
        assert_eq!(name(253, 0), None);
        assert_eq!(name(253, 1), None);
        assert_eq!(name(253, 16).unwrap(), "data-1");
        assert_eq!(name(254, 0).unwrap(), "LVM-abc");
        assert_eq!(name(9, 0).unwrap(), "5f0c-01");
        assert_eq!(name(9, 1), None);
        assert_eq!(name(7, 0).unwrap(), "loop of /img");
        assert_eq!(name(7, 1).unwrap(), "loop of /img from byte 512");
        assert_eq!(name(7, 2), None);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn file_identity_is_canonical_path() {
        let by = |text: &str| of(&text.parse().unwrap(), None);
        assert_eq!(by("/proc/../proc/version"), by("file:/proc/version"));
        assert_eq!(by("/does/not/exist"), "file:/does/not/exist");
    }
}
