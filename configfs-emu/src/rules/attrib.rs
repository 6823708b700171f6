//! Attributes and names of a device.

use rustix::io::Errno;

use super::{Attr, Kind, Plugin, Read, Show, Store, Tree, Write, device};
use crate::number;
use crate::tree::NodeId;

const ANY: std::ops::RangeInclusive<u32> = 0..=u32::MAX;

/// Company ID used for identifiers in LIO.
pub(crate) const COMPANY: &str = "0x001405";

/// `attrib/` of a device.
pub(super) const ATTRIB: &[Attr] = &[
    Attr::locked("emulate_model_alias", "0", Store::With(store_model_alias)),
    Attr::rw("emulate_dpo", "1", Store::Ignored),
    Attr::rw("emulate_fua_write", "1", Store::Bool),
    Attr::rw("emulate_fua_read", "1", Store::Ignored),
    Attr::rw("emulate_write_cache", "0", Store::With(store_write_cache)),
    Attr::locked("emulate_ua_intlck_ctrl", "0", Store::Number(0..=2)),
    Attr::locked("emulate_tas", "1", Store::Bool),
    Attr::rw("emulate_tpu", "0", Store::With(store_unmap)),
    Attr::rw("emulate_tpws", "0", Store::With(store_unmap)),
    Attr::rw("emulate_caw", "1", Store::Bool),
    Attr::rw("emulate_3pc", "1", Store::Bool),
    Attr::rw("emulate_pr", "1", Store::Bool),
    Attr::rw("emulate_rsoc", "1", Store::Bool),
    Attr::rw("emulate_rest_reord", "0", Store::With(store_zero)),
    Attr::rw("pi_prot_type", "0", Store::With(store_protection)),
    Attr::fixed("hw_pi_prot_type", "0"),
    Attr::rw("pi_prot_format", "0", Store::With(store_format)),
    // If no protection type is set, enabling this check has no effect.
    Attr::rw("pi_prot_verify", "0", Store::With(check_truth)),
    Attr::rw("enforce_pr_isids", "1", Store::Bool),
    Attr::rw("is_nonrot", "0", Store::Bool),
    Attr::locked("force_pr_aptpl", "0", Store::Bool),
    Attr::fixed("hw_block_size", "0"),
    Attr::rw("block_size", "512", Store::With(store_block_size)),
    Attr::fixed("hw_max_sectors", "0"),
    Attr::rw("optimal_sectors", "0", Store::With(store_optimal)),
    Attr::fixed("hw_queue_depth", "0"),
    Attr::rw("queue_depth", "0", Store::With(store_queue_depth)),
    Attr::rw("max_unmap_lba_count", "0", Store::Number(ANY)),
    Attr::rw("max_unmap_block_desc_count", "0", Store::Number(ANY)),
    Attr::rw("unmap_granularity", "0", Store::Number(ANY)),
    Attr::rw("unmap_granularity_alignment", "0", Store::Number(ANY)),
    Attr::locked("unmap_zeroes_data", "0", Store::With(store_unmap)),
    Attr::rw("max_write_same_len", "0", Store::Number(ANY)),
    Attr::rw("alua_support", "1", Store::With(store_fixed_one)),
    Attr::rw("pgr_support", "1", Store::With(store_fixed_one)),
    Attr::rw("submit_type", "0", Store::With(store_submit_type)),
];

/// `wwn/` of a device.
pub(super) const WWN: &[Attr] = &[
    Attr::rw("vendor_id", "LIO-ORG", Store::With(store_inquiry)),
    Attr::rw("product_id", "", Store::With(store_inquiry)),
    Attr::rw("revision", "4.0", Store::With(store_inquiry)),
    Attr::rw("company_id", COMPANY, Store::With(store_company)),
    Attr::locked("vpd_unit_serial", "", Store::Text(254, Errno::OVERFLOW))
        .shown(Show::With(show_serial)),
    Attr::ro("vpd_protocol_identifier", Show::LineIfAny),
    Attr::ro("vpd_assoc_logical_unit", Show::LineIfAny),
    Attr::ro("vpd_assoc_target_port", Show::LineIfAny),
    Attr::ro("vpd_assoc_scsi_target_device", Show::LineIfAny),
];

/// Sets the product name of a new device and the fixed values of its plugin.
pub(super) fn on_device_made(tree: &mut Tree, device: NodeId) {
    let Kind::Device(plugin) = tree.dir(device).kind else {
        return;
    };
    let wwn = tree.child(device, "wwn").expect("it comes with a device");
    tree.set(wwn, "product_id", plugin.product());
}

fn store_model_alias(write: &mut Write<'_>) -> Result<(), Errno> {
    let is_alias = number::boolean(write.text)?;
    let device = device::device_of(write.tree, write.dir);
    let Kind::Device(plugin) = write.tree.dir(device).kind else {
        return Err(Errno::INVAL);
    };
    let name: String = if is_alias {
        // This is a character less than the INQUIRY field can hold, but we need to do the same as
        // LIO.
        write.tree.dir(device).name.chars().take(15).collect()
    } else {
        plugin.product().to_owned()
    };
    let wwn = write.tree.child(device, "wwn").expect("it comes with it");
    write.tree.set(wwn, "product_id", name);
    write.keep(if is_alias { "1" } else { "0" });
    Ok(())
}

fn plugin_of(write: &Write<'_>) -> Option<Plugin> {
    match write.tree.dir(write.dir).kind {
        Kind::Attrib(plugin) => Some(plugin),
        _ => None,
    }
}

fn store_write_cache(write: &mut Write<'_>) -> Result<(), Errno> {
    let on = number::boolean(write.text)?;
    // For a block device, the cache mode can't be changed.
    if on && plugin_of(write) == Some(Plugin::Iblock) {
        return Err(Errno::INVAL);
    }
    write.keep(if on { "1" } else { "0" });
    Ok(())
}

fn store_unmap(write: &mut Write<'_>) -> Result<(), Errno> {
    let on = number::boolean(write.text)?;
    let device = device::device_of(write.tree, write.dir);
    if on && plugin_of(write) == Some(Plugin::RamDisk) {
        return Err(Errno::NOSYS);
    }
    if on && !device::is_configured(write.tree, device) {
        return Err(Errno::NODEV);
    }
    write.keep(if on { "1" } else { "0" });
    Ok(())
}

/// Only accepts 0, because this is not implemented.
fn store_zero(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::boolean(write.text)? {
        false => Ok(()),
        true => Err(Errno::NOSYS),
    }
}

fn check_truth(write: &mut Write<'_>) -> Result<(), Errno> {
    number::boolean(write.text).map(|_| ())
}

/// Only accepts 1, because this can't be disabled for backstores in the target core.
fn store_fixed_one(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::boolean(write.text)? {
        true => Ok(()),
        false => Err(Errno::NOSYS),
    }
}

fn store_protection(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::within(write.text, &(0..=3))? {
        2 => Err(Errno::NOSYS),
        _ if device::is_exported(write.tree, write.dir) => Err(Errno::INVAL),
        0 => Ok(()),
        _ => Err(Errno::NOSYS),
    }
}

/// Only a file can be formatted, but not when it's exported.
fn store_format(write: &mut Write<'_>) -> Result<(), Errno> {
    let is_file = plugin_of(write) == Some(Plugin::Fileio);
    match number::boolean(write.text)? {
        false => Ok(()),
        true if is_file && device::is_exported(write.tree, write.dir) => Err(Errno::INVAL),
        true => Err(Errno::NOSYS),
    }
}

fn store_submit_type(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::unsigned(write.text, u64::from(u8::MAX))?;
    if value > 2 {
        return Err(Errno::INVAL);
    }
    write.keep(value.to_string());
    Ok(())
}

/// Rejects a change if the device is currently exported. This is checked after the value was
/// parsed, unlike in [`Attr::locked`].
fn check_unlocked(write: &Write<'_>) -> Result<(), Errno> {
    match device::is_exported(write.tree, write.dir) {
        true => Err(Errno::INVAL),
        false => Ok(()),
    }
}

fn store_block_size(write: &mut Write<'_>) -> Result<(), Errno> {
    let size = number::within(write.text, &ANY)?;
    check_unlocked(write)?;
    if !matches!(size, 512 | 1024 | 2048 | 4096) {
        return Err(Errno::INVAL);
    }
    write.keep(size.to_string());
    Ok(())
}

fn store_optimal(write: &mut Write<'_>) -> Result<(), Errno> {
    let most = stored(write, "hw_max_sectors");
    let value = number::within(write.text, &ANY)?;
    check_unlocked(write)?;
    if value > most {
        return Err(Errno::INVAL);
    }
    write.keep(value.to_string());
    Ok(())
}

fn store_queue_depth(write: &mut Write<'_>) -> Result<(), Errno> {
    let most = stored(write, "hw_queue_depth").max(stored(write, "queue_depth"));
    let value = number::within(write.text, &ANY)?;
    check_unlocked(write)?;
    if value == 0 || value > most {
        return Err(Errno::INVAL);
    }
    write.keep(value.to_string());
    Ok(())
}

fn stored(write: &Write<'_>, name: &'static str) -> u32 {
    let value = write.tree.value(write.dir, name);
    value.parse().expect("only numbers are kept")
}

fn store_inquiry(write: &mut Write<'_>) -> Result<(), Errno> {
    let most = match write.attr.name {
        "vendor_id" => 8,
        "product_id" => 16,
        _ => 4,
    };
    // LIO first copies up to one byte more than the maximum length, to allow for a newline, and
    // then checks the text.
    if write.text.len() > most + 1 || write.text.trim().len() > most {
        return Err(Errno::OVERFLOW);
    }
    check_unlocked(write)?;
    let text = write.text.trim();
    if !text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        return Err(Errno::INVAL);
    }
    write.keep(text);
    Ok(())
}

fn store_company(write: &mut Write<'_>) -> Result<(), Errno> {
    let id = number::within(write.text, &ANY)?;
    check_unlocked(write)?;
    if id > 0xff_ffff {
        return Err(Errno::OVERFLOW);
    }
    write.keep(format!("{id:#08x}"));
    Ok(())
}

fn show_serial(read: &Read<'_>) -> Result<String, Errno> {
    let serial = read.tree.value(read.dir, "vpd_unit_serial");
    Ok(format!("T10 VPD Unit Serial Number: {serial}\n"))
}
