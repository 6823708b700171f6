//! Backstores: hosts and their devices.

use rustix::io::Errno;

use super::device::{PAGE, devices, is_configured, option};
use super::{Attr, Kind, Plugin, Read, Show, Store, Tree, Write, alua, statistics};
use crate::number;
use crate::tree::{Access, NodeId, line};
use crate::world::{BlockDevice, Medium, World};

/// Target core version to report.
const VERSION: &str = "v5.0";

/// Number of pages in each table used by LIO.
const PAGES_PER_TABLE: u64 = 2048;

/// Files in `target/`.
pub(super) const TARGET: &[Attr] = &[
    Attr::ro("version", Show::With(show_version)),
    Attr::rw("dbroot", "/var/target", Store::With(store_dbroot)),
];

/// Files of a host, `core/PLUGIN_N/`.
pub(super) const HOST: &[Attr] = &[
    Attr::ro("hba_info", Show::With(show_host)),
    // Modes are only supported for SCSI pass-through.
    Attr::rw("hba_mode", "0", Store::With(|_| Err(Errno::INVAL))),
];

/// Files of a device, `core/PLUGIN_N/NAME/`.
pub(super) const DEVICE: &[Attr] = &[
    Attr::ro("info", Show::With(show_info)),
    Attr {
        name: "control",
        access: Access::WriteOnly,
        initial: "",
        show: Show::Line,
        store: Store::With(store_control),
        is_locked: false,
    },
    Attr::rw("alias", "", Store::With(store_path)).shown(Show::LineIfAny),
    Attr::rw("udev_path", "", Store::With(store_path)).shown(Show::LineIfAny),
    Attr::rw("enable", "0", Store::With(store_enable)),
    Attr::rw(
        "alua_lu_gp",
        "default_lu_gp",
        Store::With(alua::store_lu_group_of),
    )
    .shown(Show::With(alua::show_lu_group_of)),
    Attr::rw("lba_map", "", Store::With(alua::store_lba_map)).shown(Show::LineIfAny),
];

fn show_version(_read: &Read<'_>) -> Result<String, Errno> {
    Ok(format!(
        "Target Engine Core ConfigFS Infrastructure {VERSION} on Linux/{} on riser-{}\n",
        std::env::consts::ARCH,
        env!("CARGO_PKG_VERSION")
    ))
}

fn store_dbroot(write: &mut Write<'_>) -> Result<(), Errno> {
    let path = line(write.text);
    let is_usable = devices(write.tree).is_empty()
        && path.len() < 256
        && write.world.medium(path) == Medium::Directory;
    if !is_usable {
        return Err(Errno::INVAL);
    }
    write.keep(path);
    Ok(())
}

fn host_index(tree: &Tree, host: NodeId) -> &str {
    let name = &tree.dir(host).name;
    name.rsplit_once('_').map_or("0", |(_, index)| index)
}

fn show_host(read: &Read<'_>) -> Result<String, Errno> {
    let Kind::Host(plugin) = read.tree.dir(read.dir).kind else {
        return Err(Errno::INVAL);
    };
    Ok(format!(
        "HBA Index: {} plugin: {} version: {VERSION}\n",
        statistics::index(read.tree, read.dir),
        plugin.name()
    ))
}

fn store_path(write: &mut Write<'_>) -> Result<(), Errno> {
    if write.text.is_empty() || write.text.len() > 511 {
        return Err(Errno::INVAL);
    }
    write.keep(line(write.text));
    Ok(())
}

/// Parses `key=value` options, separated by commas or newlines. Unknown options are ignored.
fn store_control(write: &mut Write<'_>) -> Result<(), Errno> {
    let Kind::Device(plugin) = write.tree.dir(write.dir).kind else {
        return Err(Errno::INVAL);
    };
    let one = |text: &str| (text == "1").then_some("1").ok_or(Errno::INVAL);
    for part in write.text.split([',', '\n']) {
        let Some((key, value)) = part.split_once('=') else {
            continue;
        };
        let (name, value): (&'static str, String) = match (plugin, key) {
            (_, "fd_dev_name" | "udev_path") if value.is_empty() || value.len() > 511 => {
                return Err(Errno::INVAL);
            }
            (Plugin::Fileio, "fd_dev_name") => (option::FILE, value.to_owned()),
            (Plugin::Fileio, "fd_dev_size") => {
                let size = number::unsigned(value, u64::MAX)?;
                (option::SIZE, size.to_string())
            }
            (Plugin::Fileio, "fd_buffered_io") => (option::BUFFERED, one(value)?.to_owned()),
            (Plugin::Fileio, "fd_async_io") => (option::ASYNC, one(value)?.to_owned()),
            (Plugin::Iblock, "udev_path") => {
                if is_configured(write.tree, write.dir) {
                    return Err(Errno::EXIST);
                }
                (option::DEVICE, value.to_owned())
            }
            (Plugin::Iblock, "readonly") => {
                let flag = number::unsigned(value, u64::MAX)?;
                (option::READ_ONLY, u8::from(flag != 0).to_string())
            }
            (Plugin::RamDisk, "rd_pages") => {
                let pages = number::unsigned(value, u64::from(u32::MAX))?;
                (option::PAGES, pages.to_string())
            }
            (Plugin::RamDisk, "rd_nullio") if value == "1" => (option::NULL, "1".to_owned()),
            (Plugin::RamDisk, "rd_dummy") if value == "1" => (option::DUMMY, "1".to_owned()),
            // In LIO, a plugin ignores unknown options, including options of other plugins.
            _ => continue,
        };
        write.tree.set(write.dir, name, value);
    }
    Ok(())
}

/// Attributes of a device that are set based on its medium when it's enabled.
struct DeviceLimits {
    block_size: u32,
    max_sectors: u32,
    is_nonrot: bool,
    unmap: Option<(u32, u32)>,
    write_same: u32,
}

/// Maximum transfer size of a command for a file, in bytes.
const FILE_MAX: u32 = 8 << 20;

/// Maximum number of concurrent commands for a device.
const QUEUE_DEPTH: u32 = 128;

fn store_enable(write: &mut Write<'_>) -> Result<(), Errno> {
    if !write.text.contains('1') {
        return Err(Errno::INVAL);
    }
    if is_configured(write.tree, write.dir) {
        return Err(Errno::EXIST);
    }
    let Kind::Device(plugin) = write.tree.dir(write.dir).kind else {
        return Err(Errno::INVAL);
    };
    let found = match plugin {
        Plugin::Fileio => find_file(write)?,
        Plugin::Iblock => find_block(write)?,
        Plugin::RamDisk => find_ram(write)?,
    };
    // LIO opens the medium when the device is enabled, and no attributes are set before this was
    // successful.
    let (tree, id) = (&mut *write.tree, write.dir);
    let attrib = tree.child(id, "attrib").expect("it comes with a device");
    let mut set = |name: &'static str, value: u32| tree.set(attrib, name, value.to_string());
    set("hw_block_size", found.block_size);
    set("block_size", found.block_size);
    set("hw_max_sectors", found.max_sectors);
    set("optimal_sectors", found.max_sectors);
    set("hw_queue_depth", QUEUE_DEPTH);
    set("queue_depth", QUEUE_DEPTH);
    set("max_write_same_len", found.write_same);
    if found.is_nonrot {
        set("is_nonrot", 1);
    }
    if let Some((lbas, descriptors)) = found.unmap {
        set("max_unmap_lba_count", lbas);
        set("max_unmap_block_desc_count", descriptors);
        set("unmap_granularity", 1);
    }
    if tree.hidden(id, option::BUFFERED).is_some() {
        tree.set(attrib, "emulate_write_cache", "1");
    }
    tree.set(id, "enable", "1");
    statistics::note_time(tree, id, write.world);
    Ok(())
}

/// Returns the error if the path has a different file type than expected.
fn not_found(medium: &Medium) -> Errno {
    match medium {
        Medium::Directory => Errno::ISDIR,
        Medium::File { .. } => Errno::NOTBLK,
        _ => Errno::NOENT,
    }
}

fn find_file(write: &Write<'_>) -> Result<DeviceLimits, Errno> {
    let path = write.tree.hidden(write.dir, option::FILE);
    let medium = write.world.medium(path.ok_or(Errno::INVAL)?);
    let (block_size, is_nonrot) = match medium {
        Medium::Device(device) => (device.block_size, true),
        Medium::File { .. } | Medium::Vacant => {
            let size = write.tree.hidden(write.dir, option::SIZE);
            let size = size.ok_or(Errno::INVAL)?;
            if size == "0" {
                return Err(Errno::INVAL);
            }
            (512, false)
        }
        medium => return Err(not_found(&medium)),
    };
    Ok(DeviceLimits {
        block_size,
        max_sectors: FILE_MAX / block_size.max(1),
        is_nonrot,
        unmap: Some((8192, 1)),
        write_same: 4096,
    })
}

fn find_block(write: &Write<'_>) -> Result<DeviceLimits, Errno> {
    let path = write.tree.hidden(write.dir, option::DEVICE);
    let device = match write.world.medium(path.ok_or(Errno::INVAL)?) {
        Medium::Device(device) => device,
        medium => return Err(not_found(&medium)),
    };
    Ok(DeviceLimits {
        block_size: device.block_size,
        max_sectors: 1024,
        is_nonrot: true,
        unmap: None,
        write_same: 65_535,
    })
}

fn find_ram(write: &Write<'_>) -> Result<DeviceLimits, Errno> {
    match write.tree.hidden(write.dir, option::PAGES) {
        None | Some("0") => Err(Errno::INVAL),
        Some(_) => Ok(DeviceLimits {
            block_size: 512,
            // Use the maximum value, rounded to full pages.
            max_sectors: !7,
            is_nonrot: true,
            unmap: None,
            write_same: 0,
        }),
    }
}

fn show_info(read: &Read<'_>) -> Result<String, Errno> {
    let (tree, id) = (read.tree, read.dir);
    let Kind::Device(plugin) = tree.dir(id).kind else {
        return Err(Errno::INVAL);
    };
    let attrib = tree.child(id, "attrib").expect("it comes with a device");
    let status = if tree.dir(id).is_linked() {
        "ACTIVATED"
    } else {
        "DEACTIVATED"
    };
    // LIO still shows a queue depth here, but doesn't store it any more.
    let state = format!(
        "Status: {status}  Max Queue Depth: 0  SectorSize: {}  HwMaxSectors: {}\n",
        tree.value(attrib, "block_size"),
        tree.value(attrib, "hw_max_sectors"),
    );
    let hidden = |name| tree.hidden(id, name);
    let flag = |name| u8::from(hidden(name) == Some("1"));
    let host = host_index(tree, tree.parent(id));
    Ok(state
        + &match plugin {
            Plugin::Fileio => format!(
                "        TCM FILEIO ID: {host}        File: {}  Size: {}  Mode: {} Async: {}\n",
                hidden(option::FILE).unwrap_or_default(),
                hidden(option::SIZE).unwrap_or("0"),
                if flag(option::BUFFERED) == 1 {
                    "Buffered-WCE"
                } else {
                    "O_DSYNC"
                },
                flag(option::ASYNC),
            ),
            Plugin::Iblock => info_of_block(tree, id, read.world),
            Plugin::RamDisk => {
                let pages = hidden(option::PAGES).unwrap_or("0");
                let tables = match flag(option::NULL) {
                    1 => 0,
                    _ => pages.parse().unwrap_or(0) / PAGES_PER_TABLE + 1,
                };
                format!(
                    "        TCM RamDisk ID: 0  RamDisk Makeup: rd_mcp\n        PAGES/PAGE_SIZE: \
                     {pages}*{PAGE}  SG_table_count: {tables}  nullio: {} dummy: {}\n",
                    flag(option::NULL),
                    flag(option::DUMMY),
                )
            }
        })
}

fn info_of_block(tree: &Tree, id: NodeId, world: &dyn World) -> String {
    let path = tree.hidden(id, option::DEVICE);
    let medium = path.filter(|_| is_configured(tree, id));
    let medium = medium.map(|path| world.medium(path));
    let mut text = String::new();
    let device: Option<BlockDevice> = match medium {
        Some(Medium::Device(device)) => Some(device),
        _ => None,
    };
    if let Some(device) = &device {
        text += &format!("iBlock device: {}", device.name);
    }
    if let Some(path) = path {
        text += &format!("  UDEV PATH: {path}");
    }
    let read_only = tree.hidden(id, option::READ_ONLY).unwrap_or("0");
    text += &format!("  readonly: {read_only}\n        ");
    text += &match device {
        Some(d) => format!("Major: {} Minor: {}  CLAIMED: IBLOCK\n", d.major, d.minor),
        None => "Major: 0 Minor: 0\n".to_owned(),
    };
    text
}
