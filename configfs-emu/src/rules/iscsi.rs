//! iSCSI targets, portals and initiators, including the files that are also used for SRP.

use rustix::io::Errno;

use super::{Attr, Fabric, Kind, Read, Show, Store, Tree, Write, alua, session};
use crate::number;
use crate::tree::{NodeId, line};

const BIT: std::ops::RangeInclusive<u32> = 0..=1;

/// Files of the fabric, `iscsi/`.
pub(super) const FABRIC: &[Attr] = &[
    Attr::fixed("lio_version", "Datera Inc. iSCSI Target v4.1.0"),
    Attr::rw("cpus_allowed_list", "", Store::With(store_cpus)).shown(Show::With(show_cpus)),
];

/// Files in `iscsi/discovery_auth/`, which contain the credentials for discovery.
pub(super) const DISCOVERY: &[Attr] = &[
    auth("userid"),
    auth("password"),
    Attr::ro("authenticate_target", Show::With(show_mutual)),
    auth("userid_mutual"),
    auth("password_mutual"),
    Attr::rw("enforce_discovery_auth", "0", Store::With(store_enforce)),
];

/// `auth/` of a portal group. If a value is too long, it's truncated.
pub(super) const TPG_AUTH: &[Attr] = &[
    Attr::rw("userid", "", Store::With(store_cut)),
    Attr::rw("password", "", Store::With(store_cut)),
    Attr::ro("authenticate_target", Show::With(show_mutual)),
    Attr::rw("userid_mutual", "", Store::With(store_cut)),
    Attr::rw("password_mutual", "", Store::With(store_cut)),
];

/// `auth/` of an initiator.
pub(super) const NODE_AUTH: &[Attr] = &[
    auth("userid"),
    auth("password"),
    Attr::ro("authenticate_target", Show::With(show_mutual)),
    auth("userid_mutual"),
    auth("password_mutual"),
];

/// `param/` of a target.
pub(super) const WWPN_PARAM: &[Attr] = &[
    Attr::rw("cmd_completion_affinity", "-1", Store::With(store_affinity)),
    Attr::fixed("default_submit_type", "1"),
    Attr::fixed("direct_submit_supported", "1"),
];

/// Set to 1 if the portal group is served.
pub(super) const ENABLE: Attr = Attr::rw("enable", "0", Store::With(store_enable));

/// Relative target port identifier of a portal group.
pub(super) const RTPI: Attr =
    Attr::rw("rtpi", "0", Store::With(store_rtpi)).shown(Show::With(show_rtpi));

/// Files of a portal group, `iscsi/IQN/tpgt_N/`.
pub(super) const TPG: &[Attr] = &[
    Attr::ro("dynamic_sessions", Show::With(session::show_dynamic)),
    ENABLE,
    RTPI,
];

/// Portal group parameters, `iscsi/IQN/tpgt_N/attrib/`.
pub(super) const TPG_ATTRIB: &[Attr] = &[
    Attr::rw("authentication", "1", Store::With(store_authentication)),
    Attr::rw("login_timeout", "15", Store::Number(5..=30)),
    Attr::rw("generate_node_acls", "0", Store::With(store_generate)),
    Attr::rw("default_cmdsn_depth", "64", Store::Number(1..=512)),
    Attr::rw("cache_dynamic_acls", "0", Store::With(store_cache)),
    Attr::rw("demo_mode_write_protect", "1", Store::Number(BIT)),
    Attr::rw("prod_mode_write_protect", "0", Store::Number(BIT)),
    Attr::rw("demo_mode_discovery", "1", Store::Number(BIT)),
    Attr::rw("default_erl", "0", Store::Number(0..=2)),
    Attr::rw("t10_pi", "0", Store::Number(BIT)),
    Attr::rw("fabric_prot_type", "0", Store::With(store_prot_type)),
    Attr::rw("tpg_enabled_sendtargets", "1", Store::Number(BIT)),
    Attr::rw("login_keys_workaround", "1", Store::Number(BIT)),
];

/// Files of a portal, `np/ADDRESS:PORT/`.
pub(super) const PORTAL: &[Attr] = &[
    Attr::rw("iser", "0", Store::Number(BIT)),
    Attr::rw("cxgbit", "0", Store::With(store_offload)),
];

/// Files of an initiator, `acls/IQN/`.
pub(super) const ACL: &[Attr] = &[
    Attr::ro("info", Show::With(session::show_info)),
    Attr::rw("cmdsn_depth", "64", Store::With(store_depth)),
    Attr::rw("tag", "", Store::With(store_tag)).shown(Show::With(show_tag)),
];

/// Initiator parameters, `acls/IQN/attrib/`.
pub(super) const NODE_ATTRIB: &[Attr] = &[
    Attr::rw("dataout_timeout", "3", Store::Number(2..=60)),
    Attr::rw("dataout_timeout_retries", "5", Store::Number(1..=15)),
    Attr::rw("default_erl", "0", Store::Number(0..=2)),
    Attr::rw("nopin_timeout", "15", Store::With(store_nopin)),
    Attr::rw("nopin_response_timeout", "30", Store::Number(3..=60)),
    Attr::rw("random_datain_pdu_offsets", "0", Store::Number(BIT)),
    Attr::rw("random_datain_seq_offsets", "0", Store::Number(BIT)),
    Attr::rw("random_r2t_offsets", "0", Store::Number(BIT)),
    Attr::rw("authentication", "-1", Store::With(store_node_auth)),
];

/// Files of a mapped LUN, `acls/INITIATOR/lun_N/`.
pub(super) const MAPPED_LUN: &[Attr] =
    &[Attr::rw("write_protect", "", Store::With(store_protect)).shown(Show::LineIfAny)];

/// Maximum length of a name or secret in bytes.
const MAX_AUTH: usize = 255;

/// A name or secret. `NULL` is used to clear the value.
const fn auth(name: &'static str) -> Attr {
    Attr::rw(name, "", Store::Text(MAX_AUTH + 1, Errno::INVAL))
}

/// Returns 1 if the target has credentials for mutual authentication.
fn show_mutual(read: &Read<'_>) -> Result<String, Errno> {
    let is_set = |name| {
        let value = read.tree.value(read.dir, name);
        !value.is_empty() && !value.starts_with("NULL")
    };
    let mutual = is_set("userid_mutual") && is_set("password_mutual");
    Ok(format!("{}\n", u8::from(mutual)))
}

/// Stores a name or secret of a portal group.
fn store_cut(write: &mut Write<'_>) -> Result<(), Errno> {
    let text = line(write.text);
    let end = text.floor_char_boundary(MAX_AUTH);
    write.keep(&text[..end]);
    Ok(())
}

/// Returns all CPUs if not set by the user.
fn show_cpus(read: &Read<'_>) -> Result<String, Errno> {
    let chosen = read.tree.value(read.dir, "cpus_allowed_list");
    Ok(match (chosen, read.world.cpus()) {
        ("", 0 | 1) => "0\n".to_owned(),
        ("", cpus) => format!("0-{}\n", cpus - 1),
        (chosen, _) => format!("{chosen}\n"),
    })
}

fn store_cpus(write: &mut Write<'_>) -> Result<(), Errno> {
    let text = line(write.text);
    let number = |text: &str| text.parse::<u32>().map_err(|_| Errno::INVAL);
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        if number(from)? > number(to)? {
            return Err(Errno::INVAL);
        }
    }
    write.keep(text);
    Ok(())
}

fn store_enforce(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::within(write.text, &BIT).map_err(|_| Errno::INVAL)?;
    write.keep(value.to_string());
    Ok(())
}

fn store_affinity(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::signed(write.text).map_err(|_| Errno::INVAL)?;
    // -1 is the CPU that received the command, and -2 is the current CPU.
    if value < -2 || i64::from(value) >= i64::from(write.world.cpus()) {
        return Err(Errno::INVAL);
    }
    write.keep(value.to_string());
    Ok(())
}

/// Enables or disables a portal group. If it has no port identifier, this is set when the group is
/// enabled.
fn store_enable(write: &mut Write<'_>) -> Result<(), Errno> {
    let on = number::boolean(write.text)?;
    if on && write.tree.value(write.dir, "rtpi") == "0" {
        let taken = port_ids(write.tree);
        let free = (1..=u32::from(u16::MAX)).find(|id| !taken.contains(id));
        let free = free.ok_or(Errno::NOSPC)?;
        write.tree.set(write.dir, "rtpi", free.to_string());
    }
    if on && write.tree.dir(write.dir).kind == Kind::Tpg(Fabric::Iscsi) {
        demand_chap(write.tree, write.dir);
    }
    write.keep(if on { "1" } else { "0" });
    Ok(())
}

fn port_ids(tree: &Tree) -> Vec<u32> {
    let target = tree.find("target").expect("it is always there");
    let fabrics = tree.subdirs(target);
    let fabrics = fabrics.filter(|(_, id)| matches!(tree.dir(*id).kind, Kind::Fabric(_)));
    let tpgs = fabrics.flat_map(|(_, fabric)| alua::tpgs(tree, fabric));
    tpgs.filter_map(|(_, _, tpg)| tree.value(tpg, "rtpi").parse().ok())
        .collect()
}

fn show_rtpi(read: &Read<'_>) -> Result<String, Errno> {
    let id: u32 = read.tree.value(read.dir, "rtpi").parse().unwrap_or(0);
    Ok(match id {
        0 => "0\n".to_owned(),
        id => format!("{id:#x}\n"),
    })
}

fn store_rtpi(write: &mut Write<'_>) -> Result<(), Errno> {
    let id = number::unsigned(write.text, u64::from(u16::MAX))?;
    if id == 0 || write.tree.value(write.dir, "enable") == "1" {
        return Err(Errno::INVAL);
    }
    write.keep(id.to_string());
    Ok(())
}

/// If authentication is required, `None` must not be offered as a method.
fn demand_chap(tree: &mut Tree, tpg: NodeId) {
    let attrib = tree.child(tpg, "attrib").expect("it comes with it");
    let param = tree.child(tpg, "param").expect("it comes with it");
    if tree.value(attrib, "authentication") == "1" {
        tree.set(param, "AuthMethod", "CHAP");
    }
}

fn store_authentication(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::within(write.text, &BIT)?;
    write.keep(value.to_string());
    let tpg = write.tree.parent(write.dir);
    if value == 1 {
        demand_chap(write.tree, tpg);
    } else {
        let param = write.tree.child(tpg, "param").expect("it comes with it");
        write.tree.set(param, "AuthMethod", "CHAP,None");
    }
    Ok(())
}

fn store_generate(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::within(write.text, &BIT)?;
    write.keep(value.to_string());
    if value == 1 {
        write.tree.set(write.dir, "cache_dynamic_acls", "1");
    }
    Ok(())
}

/// Generated entries are always cached.
fn store_cache(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::within(write.text, &BIT)?;
    let is_needed = write.tree.value(write.dir, "generate_node_acls") == "1";
    if value == 1 || !is_needed {
        write.keep(value.to_string());
    }
    Ok(())
}

fn store_prot_type(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::within(write.text, &(0..=u32::MAX))? {
        value @ (0 | 1 | 3) => {
            write.keep(value.to_string());
            Ok(())
        }
        _ => Err(Errno::INVAL),
    }
}

/// There is no offload hardware for a portal.
fn store_offload(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::within(write.text, &BIT)? {
        0 => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

fn store_depth(write: &mut Write<'_>) -> Result<(), Errno> {
    let depth = number::within(write.text, &(0..=512))?;
    // 0 is handled as 1.
    write.keep(depth.max(1).to_string());
    Ok(())
}

fn show_tag(read: &Read<'_>) -> Result<String, Errno> {
    Ok(read.tree.value(read.dir, "tag").to_owned())
}

fn store_tag(write: &mut Write<'_>) -> Result<(), Errno> {
    // Keep the newline if there is one, but don't add it.
    let tag = write.text;
    if tag.len() >= 64 {
        return Err(Errno::INVAL);
    }
    write.keep(if tag.starts_with("NULL") { "" } else { tag });
    Ok(())
}

fn store_nopin(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::within(write.text, &(0..=60))? {
        1 | 2 => Err(Errno::INVAL),
        seconds => {
            write.keep(seconds.to_string());
            Ok(())
        }
    }
}

fn store_node_auth(write: &mut Write<'_>) -> Result<(), Errno> {
    match number::signed(write.text)? {
        value @ -1..=1 => {
            write.keep(value.to_string());
            Ok(())
        }
        _ => Err(Errno::INVAL),
    }
}

/// Without a LUN there is nothing to protect, so the value is not stored.
fn store_protect(write: &mut Write<'_>) -> Result<(), Errno> {
    let value = number::unsigned(write.text, u64::MAX)?;
    if value > 1 {
        return Err(Errno::INVAL);
    }
    if write.tree.links(write.dir).next().is_some() {
        write.keep(value.to_string());
    }
    Ok(())
}

/// Sets the command window of a new initiator to the value of its portal group.
pub(super) fn on_acl_made(tree: &mut Tree, acl: NodeId) {
    let tpg = tree.parent(tree.parent(acl));
    let attrib = tree.child(tpg, "attrib").expect("it comes with it");
    let depth = tree.value(attrib, "default_cmdsn_depth").to_owned();
    tree.set(acl, "cmdsn_depth", depth);
}

/// Sets the write protection of a mapped LUN to the portal group's default.
pub(super) fn on_lun_mapped(tree: &mut Tree, mapped: NodeId, lun: NodeId) {
    let tpg = tree.parent(tree.parent(lun));
    let attrib = tree.child(tpg, "attrib").expect("it comes with it");
    let protect = match tree.dir(tpg).kind {
        Kind::Tpg(Fabric::Iscsi) => tree.value(attrib, "prod_mode_write_protect").to_owned(),
        _ => "0".to_owned(),
    };
    tree.set(mapped, "write_protect", protect);
}
