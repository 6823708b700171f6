//! `riser udev`: prints properties that are used by udev rules to name attached block devices, in
//! the same way as SCSI disks from the kernel.
//!
//! It's used by the rules in `deploy/udev/60-riser.rules` when the device is added, which may be
//! before its attachment is in the list, and again afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use riser_initiator::url::TargetUrl;

use super::address::Address;
use super::disk::Disk;
use super::exit::CliError;
use super::state::{Export, StateDir};

/// Prints the properties of a device, one per line. There are none if the device isn't attached.
pub(super) fn run(device: &Path) -> Result<(), CliError> {
    let found = StateDir::open()
        .and_then(|dir| dir.find(&device.to_string_lossy()))
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    let Some(Export::Ublk { properties, .. }) = found.map(|attachment| attachment.export) else {
        return Ok(());
    };
    let mut out = io::stdout().lock();
    for (name, value) in properties {
        writeln!(out, "{name}={value}")
            .map_err(|e| CliError::io("cannot write to standard output", e))?;
    }
    Ok(())
}

/// Notifies udev that properties are available. If udev isn't running, this has no effect.
pub(super) fn announce(number: u32) {
    let _ = fs::write(format!("/sys/class/block/ublkb{number}/uevent"), "change");
}

/// Returns the properties of a disk, using the same names as the rules of udev.
pub(super) fn properties(url: &Address, disk: &Disk) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut set = |name: &str, value: String| {
        found.insert(name.to_owned(), clean(&value));
    };
    if let Some(info) = disk.info() {
        let (vendor, model) = (info.inquiry.vendor.trim(), info.inquiry.product.trim());
        set("ID_BUS", "scsi".into());
        set("ID_VENDOR", vendor.into());
        set("ID_MODEL", model.into());
        set("ID_REVISION", info.inquiry.revision.trim().into());
        if let Some(serial) = &info.identity.serial {
            set("ID_SCSI_SERIAL", serial.clone());
            set("ID_SERIAL", format!("S{vendor}_{model}_{serial}"));
        }
        if let Some(naa) = &info.identity.naa {
            // As in scsi_id, use the type of the designator followed by the designator.
            set("ID_SERIAL", format!("3{naa}"));
            set("ID_WWN", format!("0x{naa}"));
        }
    }
    if let Address::Target(url) = url
        && let Some(path) = path(url)
    {
        set("ID_PATH", path);
    }
    found
}

/// Returns the path of a disk in the same format as `/dev/disk/by-path`.
fn path(url: &TargetUrl) -> Option<String> {
    let lun = url.lun()?;
    match url {
        TargetUrl::Iscsi(url) => {
            let (host, port) = (&url.host, url.port);
            let target = url.target.as_ref()?;
            Some(format!("ip-{host}:{port}-iscsi-{target}-lun-{lun}"))
        }
        TargetUrl::Srp(url) => Some(format!("ip-{}:{}-srp-lun-{lun}", url.host, url.port)),
    }
}

/// Replaces characters not allowed in names in `/dev` by underscores.
fn clean(text: &str) -> String {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || "#+-.:=@_".contains(c);
    text.chars()
        .map(|c| if is_fine(c) { c } else { '_' })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udev_names_are_sanitized() {
        assert_eq!(clean("VIRTUAL DISK/1\n"), "VIRTUAL_DISK_1_");
        assert_eq!(clean("iqn.2026-01.a:b"), "iqn.2026-01.a:b");
    }
}
