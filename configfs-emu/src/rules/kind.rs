//! The kinds of LIO's directories, and the tree that is made of them.

use std::net::SocketAddr;

use rustix::io::Errno;

use crate::{number, tree};

/// The tree with LIO's kinds of directories.
pub type Tree = tree::Tree<Kind>;

/// A file of a directory.
pub type Attr = tree::Attr<Kind>;

pub(crate) type Show = tree::Show<Kind>;
pub(crate) type Store = tree::Store<Kind>;
pub(crate) type Read<'a> = tree::Read<'a, Kind>;
pub(crate) type Write<'a> = tree::Write<'a, Kind>;
pub(crate) type Shell<'a> = tree::Shell<'a, Kind>;

/// The plugin of LIO's core that backs a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Plugin {
    /// A file, or a block device as a file.
    Fileio,
    /// A block device, in a host of `iblock`.
    Iblock,
    /// Memory, or nothing at all, in a host of `rd_mcp`.
    RamDisk,
}

impl Plugin {
    /// All that there are.
    pub const ALL: [Self; 3] = [Self::Fileio, Self::Iblock, Self::RamDisk];

    /// Its name in the names of hosts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fileio => "fileio",
            Self::Iblock => "iblock",
            Self::RamDisk => "rd_mcp",
        }
    }

    /// Its product name in INQUIRY data.
    #[must_use]
    pub fn product(self) -> &'static str {
        match self {
            Self::Fileio => "FILEIO",
            Self::Iblock => "IBLOCK",
            Self::RamDisk => "RAMDISK-MCP",
        }
    }

    /// A host's plugin, by its name: `fileio_0`.
    #[must_use]
    pub fn of_host(name: &str) -> Option<Self> {
        let (plugin, index) = name.rsplit_once('_')?;
        number::unsigned(index, u64::from(u32::MAX)).ok()?;
        Self::ALL.into_iter().find(|p| p.name() == plugin)
    }
}

/// The protocol of a target port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fabric {
    /// iSCSI, on TCP or RDMA.
    Iscsi,
    /// SRP, in the directory `srpt`.
    Srpt,
}

impl Fabric {
    /// The name of its directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iscsi => "iscsi",
            Self::Srpt => "srpt",
        }
    }
}

/// What a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each is the directory whose path stands beside it in `directories`"
)]
pub enum Kind {
    Root,
    Target,
    Core,
    Alua,
    LuGroups,
    LuGroup,
    Host(Plugin),
    Device(Plugin),
    Attrib(Plugin),
    Wwn(Plugin),
    Pr,
    PortGroups,
    PortGroup,
    DeviceStatistics,
    ScsiDev,
    ScsiTgtDev,
    ScsiLu,
    LunStatistics,
    ScsiPort,
    ScsiTgtPort,
    ScsiTransport,
    MappedStatistics,
    ScsiAuthIntr,
    ScsiAttIntrPort,
    /// A directory with nothing in it, in which nothing can be made.
    Empty,
    Fabric(Fabric),
    Discovery(Fabric),
    /// A target or target port: `iscsi/IQN`, `srpt/PORT`.
    Wwpn(Fabric),
    WwpnParam,
    WwpnStatistics,
    IscsiInstance,
    IscsiSessErr,
    IscsiTgtAttr,
    IscsiLoginStats,
    IscsiLogoutStats,
    Tpg(Fabric),
    TpgAttrib(Fabric),
    TpgAuth(Fabric),
    TpgParam(Fabric),
    Portals(Fabric),
    Portal,
    Luns,
    Lun,
    Acls(Fabric),
    Acl(Fabric),
    NodeAttrib(Fabric),
    NodeAuth(Fabric),
    NodeParam(Fabric),
    NodeStatistics,
    IscsiSessStats,
    MappedLun,
}

/// The number in `lun_N`.
pub(crate) fn lun_number(name: &str) -> Result<u64, Errno> {
    let digits = name.strip_prefix("lun_").ok_or(Errno::INVAL)?;
    number::unsigned(digits, u64::MAX)
}

/// The address in a portal's name: `192.0.2.1:3260`, `[2001:db8::1]:3260`.
pub(crate) fn portal_address(name: &str) -> Option<SocketAddr> {
    // LIO takes the unspecified address of IPv6 as `[::0]`, which the standard library reads too.
    name.parse().ok()
}
