//! Settings of a tree that have no effect, for people.

use crate::rules::{Kind, Tree, device, fabrics};
use crate::tree::{Access, Kind as _, NodeId};

/// Files that have an effect, or that say what is rather than what is wanted.
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
                | "optimal_sectors"
                | "queue_depth"
                | "max_unmap_lba_count"
                | "max_unmap_block_desc_count"
                | "unmap_granularity"
                | "max_write_same_len"
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
        // States of port groups are kept and reported, and have no effect.
        Kind::Lun => false,
        _ => true,
    }
}

/// A line for each setting that has no effect.
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
        if is_set && !is_group && !has_effect(kind, attr.name) {
            notes.push(format!("{}/{} has no effect", tree.path(dir), attr.name));
        }
    }
    for (_, child) in tree.subdirs(dir) {
        collect(tree, child, notes);
    }
}
