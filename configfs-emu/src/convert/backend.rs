//! Conversion of the core's devices to backends of a configuration.

use serde_json::{Map, Value, json};

use super::{ConversionError, merge, naa, origin};
use crate::rules::device::{PAGE, option};
use crate::rules::{Plugin, Tree};
use crate::tree::NodeId;
use crate::world::{Medium, World};

/// A device as a backend of the document.
pub(super) fn backend(
    tree: &Tree,
    device: NodeId,
    plugin: Plugin,
    world: &dyn World,
) -> Result<Map<String, Value>, ConversionError> {
    let now = plain(tree, device, plugin, world)?;
    Ok(merge(
        tree.hidden(device, origin::ORIGINAL),
        tree.hidden(device, origin::SEEN),
        now,
    ))
}

/// A device as its directory says it.
pub(super) fn plain(
    tree: &Tree,
    device: NodeId,
    plugin: Plugin,
    world: &dyn World,
) -> Result<Map<String, Value>, ConversionError> {
    let error = |reason: String| ConversionError {
        path: tree.path(device),
        reason,
    };
    let attrib = tree.child(device, "attrib").expect("it comes with it");
    let hidden = |name| tree.hidden(device, name);
    let mut doc = Map::new();
    let mut put = |key: &str, value: Value| doc.insert(key.to_owned(), value);
    let size = |text: Option<&str>| text.and_then(|t| t.parse::<u64>().ok()).unwrap_or(0);
    // A block device has a cache or has none.
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
        other => return Err(error(format!("blocks of {other} bytes"))),
    }
    if tree.value(attrib, "emulate_tpu") != "1" && tree.value(attrib, "emulate_tpws") != "1" {
        put("thin", json!(false));
    }
    put("rotational", json!(tree.value(attrib, "is_nonrot") == "0"));
    names(tree, device, &mut doc).map_err(error)?;
    Ok(doc)
}

fn names(tree: &Tree, device: NodeId, doc: &mut Map<String, Value>) -> Result<(), String> {
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
    if serial.len() > 64 {
        return Err("a unit serial number of more than 64 bytes".to_owned());
    }
    if !serial.is_empty() {
        let naa = naa::naa(tree.value(wwn, "company_id"), serial);
        doc.insert("serial".to_owned(), json!(serial));
        doc.insert("naa".to_owned(), json!(naa));
    }
    Ok(())
}
