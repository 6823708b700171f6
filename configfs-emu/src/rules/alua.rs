//! Asymmetric logical unit access: logical unit groups, target port groups, and the groups of a
//! LUN.

use rustix::io::Errno;

use super::{Attr, Kind, Read, Show, Store, Tree, Write, device};
use crate::number;
use crate::tree::{NodeId, line};

/// Files of a group in `core/alua/lu_gps/`.
pub(super) const LU_GROUP: &[Attr] = &[
    Attr::rw("lu_gp_id", "", Store::With(store_id)).shown(Show::With(show_id)),
    Attr::ro("members", Show::With(show_lu_members)),
];

/// `alua/NAME/` of a device.
pub(super) const PORT_GROUP: &[Attr] = &[
    Attr::rw("alua_access_state", "0", Store::With(store_state)),
    Attr::rw("alua_access_status", "None", Store::With(store_status)),
    Attr::rw(
        "alua_access_type",
        "Implicit and Explicit",
        Store::With(store_type),
    ),
    Attr::rw(
        "alua_support_transitioning",
        "1",
        Store::With(store_support),
    ),
    Attr::rw("alua_support_offline", "1", Store::With(store_support)),
    Attr::rw(
        "alua_support_lba_dependent",
        "0",
        Store::With(store_support),
    ),
    Attr::rw("alua_support_unavailable", "1", Store::With(store_support)),
    Attr::rw("alua_support_standby", "1", Store::With(store_support)),
    Attr::rw(
        "alua_support_active_optimized",
        "1",
        Store::With(store_support),
    ),
    Attr::rw(
        "alua_support_active_nonoptimized",
        "1",
        Store::With(store_support),
    ),
    Attr::rw("alua_write_metadata", "0", Store::Long(0..=1)),
    Attr::rw("nonop_delay_msecs", "100", Store::Long(0..=10_000)),
    Attr::rw("trans_delay_msecs", "0", Store::Long(0..=30_000)),
    Attr::rw("implicit_trans_secs", "0", Store::Long(0..=255)),
    Attr::rw("preferred", "0", Store::Long(0..=1)),
    Attr::rw("tg_pt_gp_id", "", Store::With(store_id)).shown(Show::With(show_id)),
    Attr::ro("members", Show::With(show_port_members)),
];

/// ALUA files in `lun/lun_N/`.
pub(super) const LUN: &[Attr] = &[
    Attr::rw("alua_tg_pt_gp", "", Store::With(store_group_of)).shown(Show::With(show_group_of)),
    Attr::rw("alua_tg_pt_offline", "0", Store::With(store_lun_bit)).shown(Show::With(show_lun)),
    Attr::rw("alua_tg_pt_status", "0", Store::With(store_lun_status)).shown(Show::With(show_lun)),
    Attr::rw("alua_tg_pt_write_md", "0", Store::With(store_lun_bit)).shown(Show::With(show_lun)),
];

/// Maximum length of a group name in bytes.
const MAX_NAME: usize = 256;

/// Initial group of every LUN.
const DEFAULT_PORT_GROUP: &str = "default_tg_pt_gp";

/// Returns the ID of a group. The default groups already have an ID when they are created.
fn id_of(tree: &Tree, group: NodeId) -> Option<u32> {
    let dir = tree.dir(group);
    match (dir.is_default, dir.kind) {
        (true, _) => Some(0),
        (false, Kind::LuGroup) => tree.value(group, "lu_gp_id").parse().ok(),
        (false, _) => tree.value(group, "tg_pt_gp_id").parse().ok(),
    }
}

fn show_id(read: &Read<'_>) -> Result<String, Errno> {
    let id = id_of(read.tree, read.dir);
    Ok(id.map_or_else(String::new, |id| format!("{id}\n")))
}

/// An ID can only be set once. 0 is used to allocate a free ID.
fn store_id(write: &mut Write<'_>) -> Result<(), Errno> {
    let wanted = number::unsigned(write.text, u64::MAX)?;
    let wanted = u16::try_from(wanted).map_err(|_| Errno::INVAL)?;
    let tree = &*write.tree;
    if id_of(tree, write.dir).is_some() {
        return Err(Errno::INVAL);
    }
    let others = tree.subdirs(tree.parent(write.dir));
    let taken: Vec<u32> = others.filter_map(|(_, id)| id_of(tree, id)).collect();
    let id = match wanted {
        0 => (1..=u32::from(u16::MAX)).find(|id| !taken.contains(id)),
        id => Some(u32::from(id)).filter(|id| !taken.contains(id)),
    };
    write.keep(id.ok_or(Errno::INVAL)?.to_string());
    Ok(())
}

fn show_lu_members(read: &Read<'_>) -> Result<String, Errno> {
    let (tree, group) = (read.tree, &read.tree.dir(read.dir).name);
    let members = device::devices(tree).into_iter();
    let members = members.filter(|(id, _)| tree.value(*id, "alua_lu_gp") == group);
    Ok(members
        .map(|(id, _)| {
            let host = &tree.dir(tree.parent(id)).name;
            format!("{host}/{}\n", tree.dir(id).name)
        })
        .collect())
}

/// `alua_lu_gp` of a device.
pub(super) fn show_lu_group_of(read: &Read<'_>) -> Result<String, Errno> {
    let name = read.tree.value(read.dir, "alua_lu_gp");
    let group = read.tree.find(&format!("target/core/alua/lu_gps/{name}"));
    Ok(match group {
        Some(group) if !name.is_empty() => format!(
            "LU Group Alias: {name}\nLU Group ID: {}\n",
            id_of(read.tree, group).unwrap_or(0)
        ),
        _ => String::new(),
    })
}

pub(super) fn store_lu_group_of(write: &mut Write<'_>) -> Result<(), Errno> {
    if write.text.len() > MAX_NAME {
        return Err(Errno::INVAL);
    }
    let name = write.text.trim();
    if name == "NULL" {
        write.keep("");
        return Ok(());
    }
    let groups = write.tree.find("target/core/alua/lu_gps");
    let group = groups.and_then(|groups| write.tree.child(groups, name));
    group.ok_or(Errno::NODEV)?;
    write.keep(name);
    Ok(())
}

/// A map from blocks to groups, where the first line contains the segment size and multiplier.
pub(super) fn store_lba_map(write: &mut Write<'_>) -> Result<(), Errno> {
    let lines = write.text.lines().filter(|l| !l.is_empty());
    for (i, line) in lines.enumerate() {
        let words: Vec<&str> = line.split(' ').collect();
        let is_number = |w: &&str| w.parse::<u64>().is_ok();
        let is_state = |w: &&str| {
            let parts = w.split_once(':');
            parts.is_some_and(|(id, state)| {
                id.parse::<u16>().is_ok() && matches!(state, "O" | "A" | "S" | "U")
            })
        };
        let is_good = match i {
            0 => words.len() == 2 && words.iter().all(is_number),
            _ => {
                words.len() > 2
                    && words[..2].iter().all(is_number)
                    && words[2..].iter().all(is_state)
            }
        };
        if !is_good {
            return Err(Errno::INVAL);
        }
    }
    write.keep(line(write.text));
    Ok(())
}

fn check_id(write: &Write<'_>) -> Result<(), Errno> {
    let id = id_of(write.tree, write.dir);
    id.map(|_| ()).ok_or(Errno::INVAL)
}

fn store_state(write: &mut Write<'_>) -> Result<(), Errno> {
    check_id(write)?;
    if !device::is_configured(write.tree, device::device_of(write.tree, write.dir)) {
        return Err(Errno::NODEV);
    }
    // As in the kernel, a number that is too long is truncated to the lower half.
    let state = number::unsigned(write.text, u64::MAX)? as u32;
    let access = write.tree.value(write.dir, "alua_access_type");
    let supported = match state {
        0 => "alua_support_active_optimized",
        1 => "alua_support_active_nonoptimized",
        2 => "alua_support_standby",
        3 => "alua_support_unavailable",
        4 => "alua_support_lba_dependent",
        14 => "alua_support_offline",
        // This is a transition state, which can't be set by the user.
        _ => return Err(Errno::INVAL),
    };
    let is_implicit = access.starts_with("Implicit");
    let is_explicit = access.ends_with("Explicit");
    let is_refused = !is_implicit
        || (state == 4 && is_explicit)
        || write.tree.value(write.dir, supported) != "1";
    if is_refused {
        return Err(Errno::INVAL);
    }
    write.keep(state.to_string());
    // In LIO, the status is set to indicate a change by the administrator and not by an initiator.
    write.tree.set(write.dir, "alua_access_status", STATUSES[2]);
    Ok(())
}

/// Returns the words that can also be written as a number in this file. For other files, this is
/// empty.
pub(crate) fn alua_words(file: &str) -> &'static [&'static str] {
    match file {
        "alua_access_status" => &STATUSES,
        "alua_access_type" => &TYPES,
        _ => &[],
    }
}

const TYPES: [&str; 4] = ["None", "Implicit", "Explicit", "Implicit and Explicit"];

const STATUSES: [&str; 3] = [
    "None",
    "Altered by Explicit STPG",
    "Altered by Implicit ALUA",
];

fn store_status(write: &mut Write<'_>) -> Result<(), Errno> {
    check_id(write)?;
    let status = number::unsigned(write.text, u64::MAX)? as u32 as usize;
    write.keep(*STATUSES.get(status).ok_or(Errno::INVAL)?);
    Ok(())
}

fn store_type(write: &mut Write<'_>) -> Result<(), Errno> {
    let kind = number::unsigned(write.text, u64::MAX)? as usize;
    write.keep(*TYPES.get(kind).ok_or(Errno::INVAL)?);
    Ok(())
}

fn store_support(write: &mut Write<'_>) -> Result<(), Errno> {
    check_id(write)?;
    let on = number::within(write.text, &(0..=1)).map_err(|_| Errno::INVAL)?;
    write.keep(on.to_string());
    Ok(())
}

/// Returns the group of a LUN, if this group exists.
fn group_of(tree: &Tree, lun: NodeId) -> Option<NodeId> {
    let (_, device) = tree.links(lun).next()?;
    let groups = tree.child(device, "alua")?;
    let name = tree.value(lun, "alua_tg_pt_gp");
    let group = tree.child(groups, name);
    group.or_else(|| tree.child(groups, DEFAULT_PORT_GROUP))
}

/// Adds a LUN to the default group when its device is linked.
pub(super) fn on_lun_linked(tree: &mut Tree, lun: NodeId) {
    tree.set(lun, "alua_tg_pt_gp", DEFAULT_PORT_GROUP);
}

fn show_port_members(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let target = tree.find("target").expect("it is always there");
    let mut text = String::new();
    let fabrics = tree.subdirs(target);
    for (_, fabric) in fabrics.filter(|(_, id)| matches!(tree.dir(*id).kind, Kind::Fabric(_))) {
        let Kind::Fabric(which) = tree.dir(fabric).kind else {
            continue;
        };
        let name = match which {
            super::Fabric::Iscsi => "iSCSI",
            super::Fabric::Srpt => "srpt",
        };
        for (wwn, tpg_name, tpg) in tpgs(tree, fabric) {
            let tag = tpg_name.strip_prefix("tpgt_").unwrap_or("1");
            let luns = tree.child(tpg, "lun").expect("it comes with it");
            for (lun, id) in tree.subdirs(luns) {
                if group_of(tree, id) == Some(read.dir) {
                    text += &format!("{name}/{wwn}/tpgt_{tag}/{lun}\n");
                }
            }
        }
    }
    Ok(text)
}

/// Returns the portal groups of a fabric. Each entry has the target name and the group name.
pub(crate) fn tpgs(tree: &Tree, fabric: NodeId) -> Vec<(&str, &str, NodeId)> {
    let wwns = tree.subdirs(fabric);
    let wwns = wwns.filter(|(_, id)| matches!(tree.dir(*id).kind, Kind::Wwpn(_)));
    wwns.flat_map(|(wwn, id)| tree.subdirs(id).map(move |(name, tpg)| (wwn, name, tpg)))
        .filter(|(_, _, tpg)| matches!(tree.dir(*tpg).kind, Kind::Tpg(_)))
        .collect()
}

fn show_group_of(read: &Read<'_>) -> Result<String, Errno> {
    let group = group_of(read.tree, read.dir).ok_or(Errno::NODEV)?;
    // Uses the same words as `core_alua_dump_state` in the kernel.
    let state = match read.tree.value(group, "alua_access_state") {
        "0" => "Active/Optimized",
        "1" => "Active/NonOptimized",
        "2" => "Standby",
        "3" => "Unavailable",
        "4" => "LBA Dependent",
        _ => "Offline",
    };
    let lun = |name| read.tree.value(read.dir, name);
    Ok(format!(
        "TG Port Alias: {}\nTG Port Group ID: {}\nTG Port Primary Access State: {state}\nTG Port \
         Primary Access Status: {}\nTG Port Secondary Access State: {}\nTG Port Secondary Access \
         Status: {}\n",
        read.tree.dir(group).name,
        id_of(read.tree, group).unwrap_or(0),
        read.tree.value(group, "alua_access_status"),
        if lun("alua_tg_pt_offline") == "1" {
            "Offline"
        } else {
            "None"
        },
        match lun("alua_tg_pt_status") {
            "1" => STATUSES[1],
            "2" => STATUSES[2],
            _ => STATUSES[0],
        },
    ))
}

fn device_of_lun(write: &Write<'_>) -> Result<NodeId, Errno> {
    let mut links = write.tree.links(write.dir);
    links.next().map(|(_, device)| device).ok_or(Errno::NODEV)
}

fn store_group_of(write: &mut Write<'_>) -> Result<(), Errno> {
    let device = device_of_lun(write)?;
    if write.text.len() > MAX_NAME {
        return Err(Errno::INVAL);
    }
    let name = write.text.trim().to_owned();
    if name == "NULL" {
        write.keep(DEFAULT_PORT_GROUP);
        return Ok(());
    }
    let groups = write.tree.child(device, "alua").expect("it comes with it");
    write.tree.child(groups, &name).ok_or(Errno::NODEV)?;
    write.keep(name);
    Ok(())
}

fn show_lun(read: &Read<'_>) -> Result<String, Errno> {
    let mut links = read.tree.links(read.dir);
    links.next().ok_or(Errno::NODEV)?;
    Ok(format!("{}\n", read.tree.value(read.dir, read.attr.name)))
}

fn store_lun_bit(write: &mut Write<'_>) -> Result<(), Errno> {
    device_of_lun(write)?;
    let value = number::within(write.text, &(0..=1)).map_err(|_| Errno::INVAL)?;
    write.keep(value.to_string());
    Ok(())
}

fn store_lun_status(write: &mut Write<'_>) -> Result<(), Errno> {
    device_of_lun(write)?;
    let value = number::within(write.text, &(0..=2)).map_err(|_| Errno::INVAL)?;
    write.keep(value.to_string());
    Ok(())
}
