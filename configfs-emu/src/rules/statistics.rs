//! Counters for units and ports in `statistics`, based on the SCSI MIB (RFC 4455).
//!
//! We always show the current values of the daemon. The command and data counters of an initiator
//! also include its closed sessions. If a counter is not supported in the kernel, it's 0 here as
//! well.

use std::fmt::Display;

use riser_admin_api::live::{LiveLun, LiveShare};
use rustix::io::Errno;

use super::{Attr, Fabric, Initiator, Kind, Read, Show, Tree, device, lun_number, session};
use crate::tree::NodeId;
use crate::world::World;

/// Creates read-only files that use the same function to show their values.
macro_rules! files {
    ($show:expr; $($name:literal)*) => { &[$(Attr::ro($name, Show::With($show))),*] };
}
pub(super) use files;

/// Device counters, `core/HOST/NAME/statistics/scsi_dev/`.
pub(super) const SCSI_DEV: &[Attr] = files!(show_device; "inst" "indx" "role" "ports");

/// Device counters, `core/HOST/NAME/statistics/scsi_tgt_dev/`.
pub(super) const SCSI_TGT_DEV: &[Attr] = files!(show_target_device;
    "inst" "indx" "num_lus" "status" "non_access_lus" "resets" "aborts_complete" "aborts_no_task");

/// Device counters, `core/HOST/NAME/statistics/scsi_lu/`.
pub(super) const SCSI_LU: &[Attr] = files!(show_unit;
    "inst" "dev" "indx" "lun" "lu_name" "vend" "prod" "rev" "dev_type" "status" "state_bit"
    "num_cmds" "read_mbytes" "write_mbytes" "resets" "full_stat" "hs_num_cmds" "creation_time");

/// LUN counters, `lun/lun_N/statistics/scsi_port/`.
pub(super) const SCSI_PORT: &[Attr] = files!(show_port; "inst" "dev" "indx" "role" "busy_count");

/// LUN counters, `lun/lun_N/statistics/scsi_tgt_port/`.
pub(super) const SCSI_TGT_PORT: &[Attr] = files!(show_target_port;
    "inst" "dev" "indx" "name" "port_index" "in_cmds" "write_mbytes" "read_mbytes" "hs_in_cmds");

/// LUN counters, `lun/lun_N/statistics/scsi_transport/`.
pub(super) const SCSI_TRANSPORT: &[Attr] =
    files!(show_transport; "inst" "device" "indx" "dev_name" "proto_id");

/// Mapped LUN counters, `acls/INITIATOR/lun_N/statistics/scsi_auth_intr/`.
pub(super) const SCSI_AUTH_INTR: &[Attr] = files!(show_authorized;
    "inst" "dev" "port" "indx" "dev_or_port" "intr_name" "map_indx" "att_count" "num_cmds"
    "read_mbytes" "write_mbytes" "hs_num_cmds" "creation_time" "row_status");

/// Mapped LUN counters, `acls/INITIATOR/lun_N/statistics/scsi_att_intr_port/`.
pub(super) const SCSI_ATT_INTR_PORT: &[Attr] =
    files!(show_attached; "inst" "dev" "port" "indx" "port_auth_indx" "port_ident");

/// Hidden value: number of the directory, which is set when it's created.
const INDEX: &str = ".index";

/// Hidden value: creation time, in hundredths of a second since the host was booted.
const MADE: &str = ".made";

/// Sets the number of a directory that has counters, same as in LIO.
pub(super) fn on_made(tree: &mut Tree, id: NodeId) {
    let (like_it, first): (Vec<NodeId>, u32) = match tree.dir(id).kind {
        // In the kernel, there already is an internal host and device.
        Kind::Host(_) => (siblings(tree, id), 1),
        Kind::Device(_) => (devices(tree), 1),
        Kind::Wwpn(Fabric::Iscsi) => (siblings(tree, id), 0),
        Kind::Acl(_) => (acls(tree), 1),
        _ => return,
    };
    let numbers = like_it.into_iter().filter_map(|other| {
        let number = tree.hidden(other, INDEX)?;
        number.parse::<u32>().ok()
    });
    let next = numbers.max().map_or(first, |last| last + 1);
    tree.set(id, INDEX, next.to_string());
}

fn siblings(tree: &Tree, id: NodeId) -> Vec<NodeId> {
    let all = tree.subdirs(tree.parent(id));
    all.map(|(_, sibling)| sibling).collect()
}

fn devices(tree: &Tree) -> Vec<NodeId> {
    let all = device::devices(tree).into_iter();
    all.map(|(device, _)| device).collect()
}

fn tpgs(tree: &Tree) -> impl Iterator<Item = NodeId> + '_ {
    let fabrics = super::fabrics(tree).into_iter();
    let tpgs = fabrics.flat_map(move |(_, fabric)| super::tpgs(tree, fabric));
    tpgs.map(|(_, _, tpg)| tpg)
}

fn acls(tree: &Tree) -> Vec<NodeId> {
    let acls = tpgs(tree).filter_map(|tpg| tree.child(tpg, "acls"));
    acls.flat_map(|acls| tree.subdirs(acls).map(|(_, acl)| acl))
        .collect()
}

/// Returns the number of a directory.
pub(super) fn index(tree: &Tree, id: NodeId) -> u32 {
    let number = tree.hidden(id, INDEX);
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Sets the start time to the current time.
pub(super) fn note_time(tree: &mut Tree, id: NodeId, world: &dyn World) {
    tree.set(id, MADE, hundredths(world.uptime().as_secs_f64()));
}

/// Formats a time in the same way as the kernel.
pub(super) fn hundredths(seconds: f64) -> String {
    format!("{:.0}", (seconds * 100.0).max(0.0))
}

/// Adds a newline.
pub(super) fn line(text: impl Display) -> Result<String, Errno> {
    Ok(format!("{text}\n"))
}

/// Returns the device for a statistics directory.
fn device(tree: &Tree, dir: NodeId) -> Result<NodeId, Errno> {
    let is_it = |kind| matches!(kind, Kind::Device(_) | Kind::Lun | Kind::MappedLun);
    let owner = tree.above(dir, |dir| is_it(dir.kind)).ok_or(Errno::NODEV)?;
    match tree.dir(owner).kind {
        Kind::Device(_) => Ok(owner),
        Kind::Lun => linked(tree, owner),
        _ => linked(tree, linked(tree, owner)?),
    }
}

fn linked(tree: &Tree, id: NodeId) -> Result<NodeId, Errno> {
    let mut links = tree.links(id);
    links.next().map(|(_, to)| to).ok_or(Errno::NODEV)
}

/// Returns the first parent directory with this type, starting at the directory itself.
fn owner(tree: &Tree, dir: NodeId, is_it: fn(Kind) -> bool) -> Result<NodeId, Errno> {
    let owner = tree.above(dir, |dir| is_it(dir.kind));
    owner.ok_or(Errno::NODEV)
}

/// Returns the number of a device's host.
fn instance(tree: &Tree, device: NodeId) -> u32 {
    index(tree, tree.parent(device)) + 1
}

fn show_device(read: &Read<'_>) -> Result<String, Errno> {
    let device = device(read.tree, read.dir)?;
    match read.attr.name {
        "inst" => line(instance(read.tree, device)),
        "indx" => line(index(read.tree, device)),
        "role" => line("Target"),
        _ => line(read.tree.dir(device).link_count()),
    }
}

fn show_target_device(read: &Read<'_>) -> Result<String, Errno> {
    let device = device(read.tree, read.dir)?;
    let is_used = read.tree.dir(device).is_linked();
    // The counter is for the unit, so it's the same for all of its LUNs.
    let most = |count: fn(&LiveLun) -> u64| {
        let luns = counted(read, &luns_of(read.tree, device));
        line(luns.iter().map(count).max().unwrap_or(0))
    };
    match read.attr.name {
        "inst" => line(instance(read.tree, device)),
        "indx" => line(index(read.tree, device)),
        "num_lus" => line(1),
        // As in the kernel, there is no newline.
        "status" if is_used => Ok("activated".to_owned()),
        "status" => Ok("deactivated".to_owned()),
        "non_access_lus" => line(u8::from(!is_used)),
        "resets" => most(|lun| lun.resets),
        "aborts_complete" => most(|lun| lun.aborts),
        _ => most(|lun| lun.vain_aborts),
    }
}

fn show_unit(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let device = device(tree, read.dir)?;
    let wwn = tree.child(device, "wwn").ok_or(Errno::NODEV)?;
    match read.attr.name {
        "inst" => line(instance(tree, device)),
        "dev" => line(index(tree, device)),
        "indx" => line(1),
        "lu_name" => line(match tree.value(wwn, "vpd_unit_serial") {
            "" => "None",
            serial => serial,
        }),
        "vend" => line(format_args!("{:8}", tree.value(wwn, "vendor_id"))),
        "prod" => line(format_args!("{:16}", tree.value(wwn, "product_id"))),
        "rev" => line(format_args!("{:4}", tree.value(wwn, "revision"))),
        "status" if tree.dir(device).is_linked() => line("available"),
        "status" => line("notavailable"),
        "state_bit" => line("exposed"),
        "resets" => show_target_device(read),
        "num_cmds" | "read_mbytes" | "write_mbytes" => {
            show_share(read, total(&counted(read, &luns_of(tree, device))))
        }
        "creation_time" => line(tree.hidden(device, MADE).unwrap_or("0")),
        // Number and type, and values that are not counted in the kernel.
        _ => line(0),
    }
}

fn show_port(read: &Read<'_>) -> Result<String, Errno> {
    let device = device(read.tree, read.dir)?;
    let tpg = group(read.tree, read.dir)?;
    match read.attr.name {
        "inst" => line(instance(read.tree, device)),
        "dev" => line(index(read.tree, device)),
        "indx" => line(read.tree.value(tpg, "rtpi")),
        "role" => line(format_args!("Device{}", index(read.tree, device))),
        _ => line(0),
    }
}

fn show_target_port(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let tpg = group(tree, read.dir)?;
    let wwn = &tree.dir(tree.parent(tpg)).name;
    match read.attr.name {
        "name" => line(format_args!(
            "{}Port#{}",
            fabric(tree, tpg),
            tree.value(tpg, "rtpi")
        )),
        "port_index" => line(format_args!("{wwn}+t+{}", tag(tree, tpg))),
        "in_cmds" | "read_mbytes" | "write_mbytes" => {
            let lun = owner(tree, read.dir, |kind| kind == Kind::Lun)?;
            linked(tree, lun)?;
            show_share(read, total(&counted(read, &[lun])))
        }
        _ => show_port(read),
    }
}

fn show_transport(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let device = device(tree, read.dir)?;
    let tpg = group(tree, read.dir)?;
    match read.attr.name {
        "inst" => line(instance(tree, device)),
        "device" => line(format_args!("scsiTransport{}", fabric(tree, tpg))),
        "indx" => line(port_instance(tree, tpg)),
        "dev_name" => {
            let wwn = tree.child(device, "wwn").ok_or(Errno::NODEV)?;
            let name = match tree.value(wwn, "vpd_unit_serial") {
                "" => tree.value(wwn, "vendor_id"),
                serial => serial,
            };
            line(format_args!("{}+{name}", tree.dir(tree.parent(tpg)).name))
        }
        // Protocol identifiers from SPC.
        _ => line(match tree.dir(tpg).kind {
            Kind::Tpg(Fabric::Iscsi) => 5,
            _ => 4,
        }),
    }
}

fn show_authorized(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let device = device(tree, read.dir)?;
    let acl = owner(tree, read.dir, |kind| matches!(kind, Kind::Acl(_)))?;
    let mapped = owner(tree, read.dir, |kind| kind == Kind::MappedLun)?;
    match read.attr.name {
        "indx" => line(index(tree, acl)),
        "intr_name" => line(&tree.dir(acl).name),
        "dev_or_port" | "att_count" => line(1),
        "map_indx" | "hs_num_cmds" => line(0),
        "num_cmds" | "read_mbytes" | "write_mbytes" => {
            show_share(read, part_of(read, acl, mapped)?)
        }
        "creation_time" => line(tree.hidden(mapped, MADE).unwrap_or("0")),
        "row_status" => line("Ready"),
        _ => show_place(read, device),
    }
}

fn show_attached(read: &Read<'_>) -> Result<String, Errno> {
    let device = device(read.tree, read.dir)?;
    let acl = owner(read.tree, read.dir, |kind| matches!(kind, Kind::Acl(_)))?;
    let session = || session::session_of(read).ok_or(Errno::NODEV);
    match read.attr.name {
        "port_auth_indx" => line(index(read.tree, acl)),
        "indx" => line(match read.tree.dir(acl).kind {
            Kind::Acl(Fabric::Iscsi) => session()?.id,
            // The kernel doesn't have separate counters for SRP sessions.
            _ => session().map(|_| 0)?,
        }),
        "port_ident" => line(format_args!(
            "{}+i+{}",
            read.tree.dir(acl).name,
            session()?.isid
        )),
        _ => show_place(read, device),
    }
}

/// Shows the portal group and device of a mapped LUN.
fn show_place(read: &Read<'_>, device: NodeId) -> Result<String, Errno> {
    let tpg = group(read.tree, read.dir)?;
    match read.attr.name {
        "inst" => line(port_instance(read.tree, tpg)),
        "dev" => line(index(read.tree, device)),
        _ => line(tag(read.tree, tpg)),
    }
}

pub(super) fn group(tree: &Tree, dir: NodeId) -> Result<NodeId, Errno> {
    owner(tree, dir, |kind| matches!(kind, Kind::Tpg(_)))
}

pub(super) fn tag(tree: &Tree, tpg: NodeId) -> &str {
    let tag = tree.dir(tpg).name.strip_prefix("tpgt_");
    tag.filter(|_| tree.dir(tpg).kind == Kind::Tpg(Fabric::Iscsi))
        .unwrap_or("1")
}

pub(super) fn fabric(tree: &Tree, tpg: NodeId) -> &'static str {
    match tree.dir(tpg).kind {
        Kind::Tpg(Fabric::Iscsi) => "iSCSI",
        _ => "srpt",
    }
}

/// Returns the number of the target for a portal group.
fn port_instance(tree: &Tree, tpg: NodeId) -> u32 {
    match tree.dir(tpg).kind {
        Kind::Tpg(Fabric::Iscsi) => index(tree, tree.parent(tpg)),
        _ => 1,
    }
}

/// Returns the LUNs that use this device.
pub(super) fn luns_of(tree: &Tree, device: NodeId) -> Vec<NodeId> {
    let luns = tpgs(tree).filter_map(|tpg| tree.child(tpg, "lun"));
    let luns = luns.flat_map(|luns| tree.subdirs(luns).map(|(_, lun)| lun));
    luns.filter(|lun| linked(tree, *lun) == Ok(device))
        .collect()
}

/// Returns the daemon's counters for these LUNs.
pub(super) fn counted(read: &Read<'_>, luns: &[NodeId]) -> Vec<LiveLun> {
    let tree = read.tree;
    let wanted = luns.iter().filter_map(|lun| {
        let tpg = group(tree, *lun).ok()?;
        let number = lun_number(&tree.dir(*lun).name).ok()?;
        Some((super::target_name(tree, tpg), number))
    });
    let wanted: Vec<_> = wanted.collect();
    let mut all = read.world.live().luns;
    all.retain(|lun| {
        let is_it = |(target, number): &(String, u64)| {
            *target == lun.target && *number == u64::from(lun.lun)
        };
        wanted.iter().any(is_it)
    });
    all
}

/// Returns the total of all commands for these LUNs.
fn total(luns: &[LiveLun]) -> LiveShare {
    let mut sum = LiveShare::default();
    luns.iter().for_each(|lun| sum += lun.total());
    sum
}

/// Returns the daemon's counters for an initiator and a mapped LUN.
fn part_of(read: &Read<'_>, acl: NodeId, mapped: NodeId) -> Result<LiveShare, Errno> {
    let tree = read.tree;
    let entry = &tree.dir(acl).name;
    let number = lun_number(&tree.dir(linked(tree, mapped)?).name)?;
    let target = super::target_name(tree, group(tree, mapped)?);
    let sessions = match Initiator::parse(entry) {
        Some(Initiator::Address(_)) => read.world.sessions(),
        _ => Vec::new(),
    };
    let luns = read.world.live().luns.into_iter();
    let luns = luns.filter(|lun| lun.target == target && u64::from(lun.lun) == number);
    let mut sum = LiveShare::default();
    for (initiator, share) in luns.flat_map(|lun| lun.initiators) {
        if session::is_named(entry, &initiator, &sessions) {
            sum += share;
        }
    }
    Ok(sum)
}

fn show_share(read: &Read<'_>, share: LiveShare) -> Result<String, Errno> {
    line(match read.attr.name {
        "read_mbytes" => share.read >> 20,
        "write_mbytes" => share.written >> 20,
        _ => share.commands,
    })
}
