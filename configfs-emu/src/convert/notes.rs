//! Notes about settings in a tree that have no effect, to be shown to the user.

use crate::rules::{Kind, Tree, device, fabrics};
use crate::tree::{Access, Kind as _, NodeId};

/// Attributes that are ignored for any value: limits that LIO calculates from the device but
/// `riserd` calculates itself, settings that were removed or are ignored in newer kernels, and the
/// iSCSI markers that were removed in RFC 7143.
const MEANINGLESS: [&str; 21] = [
    "IFMarkInt",
    "IFMarker",
    "OFMarkInt",
    "OFMarker",
    "atomic_max_len",
    "complete_type",
    "emulate_dpo",
    "emulate_fua_read",
    "fabric_max_sectors",
    "login_keys_workaround",
    "max_sectors",
    "max_unmap_block_desc_count",
    "max_unmap_lba_count",
    "max_write_same_len",
    "netif_timeout",
    "optimal_sectors",
    "queue_depth",
    "submit_type",
    "unmap_granularity",
    "unmap_granularity_alignment",
    "unmap_zeroes_data",
];

/// Returns true if an attribute of a device, portal group or initiator is ignored.
pub(crate) fn is_meaningless(name: &str) -> bool {
    MEANINGLESS.contains(&name) || name.starts_with("hw_")
}

/// Returns true for files that have an effect, and for files that report a state instead of a
/// setting.
fn has_effect(kind: Kind, name: &str) -> bool {
    match kind {
        Kind::Attrib(_) => matches!(
            name,
            "emulate_model_alias"
                | "emulate_write_cache"
                | "emulate_tpu"
                | "emulate_tpws"
                | "is_nonrot"
                | "block_size"
        ),
        Kind::TpgAttrib(_) => matches!(
            name,
            "authentication"
                | "generate_node_acls"
                | "cache_dynamic_acls"
                | "demo_mode_write_protect"
                | "prod_mode_write_protect"
        ),
        Kind::TpgParam(_) => name == "AuthMethod",
        Kind::NodeAttrib(_) => name == "authentication",
        Kind::PortGroup => name == "tg_pt_gp_id",
        // Port group states are stored and reported, but they have no effect.
        Kind::Lun => false,
        _ => true,
    }
}

/// Returns a message for each setting that has no effect.
pub(super) fn notes(tree: &Tree) -> Vec<String> {
    let mut notes = Vec::new();
    for (device, _) in device::devices(tree) {
        collect(tree, device, &mut notes);
    }
    for (_, fabric) in fabrics(tree) {
        collect(tree, fabric, &mut notes);
    }
    notes
}

fn collect(tree: &Tree, dir: NodeId, notes: &mut Vec<String>) {
    let kind = tree.dir(dir).kind;
    for attr in kind.attrs() {
        let value = tree.value(dir, attr.name);
        let is_group = kind == Kind::Lun && value == "default_tg_pt_gp";
        let is_set = value != attr.initial && attr.access == Access::ReadWrite;
        let is_quiet = is_group || is_meaningless(attr.name);
        if is_set && !is_quiet && !has_effect(kind, attr.name) {
            notes.push(format!("{}/{} has no effect", tree.path(dir), attr.name));
        }
    }
    for (_, child) in tree.subdirs(dir) {
        collect(tree, child, notes);
    }
}
