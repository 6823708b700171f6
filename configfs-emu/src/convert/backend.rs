//! Converts the devices in `core` to backends.

use serde_json::{Map, Value, json};

use super::{Omission, merge, naa, origin};
use crate::rules::device::{PAGE, option};
use crate::rules::{Plugin, Tree};
use crate::tree::NodeId;
use crate::world::{Medium, World};

/// Maximum length of a unit serial number in bytes.
const MAX_SERIAL: usize = 64;

/// Converts a device to a backend in the document. Returns `None` if the device is omitted.
pub(super) fn backend(
    tree: &Tree,
    device: NodeId,
    plugin: Plugin,
    world: &dyn World,
    omitted: &mut Vec<Omission>,
) -> Option<Map<String, Value>> {
    let now = plain(tree, device, plugin, world, omitted)?;
    Some(merge(
        tree.hidden(device, origin::ORIGINAL),
        tree.hidden(device, origin::SEEN),
        now,
    ))
}

/// Converts a device using only its directory. Returns `None` if the device is omitted.
pub(super) fn plain(
    tree: &Tree,
    device: NodeId,
    plugin: Plugin,
    world: &dyn World,
    omitted: &mut Vec<Omission>,
) -> Option<Map<String, Value>> {
    let attrib = tree.child(device, "attrib").expect("it comes with it");
    let hidden = |name| tree.hidden(device, name);
    let mut doc = Map::new();
    let mut put = |key: &str, value: Value| doc.insert(key.to_owned(), value);
    let size = |text: Option<&str>| text.and_then(|t| t.parse::<u64>().ok()).unwrap_or(0);
    // For a block device, the cache mode can't be changed.
    if plugin != Plugin::Iblock {
        let cached = tree.value(attrib, "emulate_write_cache") == "1";
        put("write_cache", json!(if cached { "on" } else { "off" }));
    }
    match plugin {
        Plugin::Fileio => {
            let path = hidden(option::FILE).unwrap_or_default();
            put("path", json!(path));
            if matches!(world.medium(path), Medium::Device(_)) {
                put("kind", json!("device"));
            } else {
                put("kind", json!("file"));
                put("size", json!(size(hidden(option::SIZE)).to_string()));
                put("create", json!(true));
            }
        }
        Plugin::Iblock => {
            put("kind", json!("device"));
            put("path", json!(hidden(option::DEVICE).unwrap_or_default()));
            if hidden(option::READ_ONLY) == Some("1") {
                put("read_only", json!(true));
            }
        }
        Plugin::RamDisk => {
            let is_null = hidden(option::NULL) == Some("1");
            put("kind", json!(if is_null { "null" } else { "ram" }));
            let bytes = size(hidden(option::PAGES)) * PAGE;
            put("size", json!(bytes.to_string()));
        }
    }
    match tree.value(attrib, "block_size") {
        "512" => {}
        "4096" => {
            put("block_size", json!(4096));
        }
        other => {
            let reason = format!(
                "unsupported block size of {other} bytes, riserd supports 512 and 4096: this disk \
                 is omitted"
            );
            omitted.push(Omission::new(tree, device, reason));
            return None;
        }
    }
    if tree.value(attrib, "emulate_tpu") != "1" && tree.value(attrib, "emulate_tpws") != "1" {
        put("thin", json!(false));
    }
    put("rotational", json!(tree.value(attrib, "is_nonrot") == "0"));
    names(tree, device, &mut doc, omitted);
    Some(doc)
}

/// Adds the names used in INQUIRY data and the disk identifiers.
fn names(tree: &Tree, device: NodeId, doc: &mut Map<String, Value>, omitted: &mut Vec<Omission>) {
    let wwn = tree.child(device, "wwn").expect("it comes with it");
    for (key, name) in [
        ("vendor", "vendor_id"),
        ("product", "product_id"),
        ("revision", "revision"),
    ] {
        let value = tree.value(wwn, name);
        if !value.is_empty() {
            doc.insert(key.to_owned(), json!(value));
        }
    }
    let serial = tree.value(wwn, "vpd_unit_serial").trim();
    if serial.is_empty() {
        return;
    }
    let naa = naa::naa(tree.value(wwn, "company_id"), serial);
    doc.insert("naa".to_owned(), json!(naa));
    if serial.len() <= MAX_SERIAL && serial.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        doc.insert("serial".to_owned(), json!(serial));
    } else {
        let reason = format!(
            "the unit serial number of {} bytes is omitted, because riserd supports 1 to \
             {MAX_SERIAL} printable characters; the NAA identifier that LIO derives from it, \
             {naa}, is kept",
            serial.len()
        );
        omitted.push(Omission::new(tree, wwn, reason));
    }
}
