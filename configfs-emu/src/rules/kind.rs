//! Directory types used in LIO, and the tree type based on them.

use std::net::SocketAddr;

use rustix::io::Errno;

use crate::{number, tree};

/// A tree that uses LIO's directory types.
pub type Tree = tree::Tree<Kind>;

/// A file in a directory.
pub type Attr = tree::Attr<Kind>;

pub(crate) type Show = tree::Show<Kind>;
pub(crate) type Store = tree::Store<Kind>;
pub(crate) type Read<'a> = tree::Read<'a, Kind>;
pub(crate) type Write<'a> = tree::Write<'a, Kind>;
pub(crate) type Shell<'a> = tree::Shell<'a, Kind>;

/// LIO core plugin used for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Plugin {
    /// A file, or a block device used as a file.
    Fileio,
    /// A block device on an `iblock` host.
    Iblock,
    /// Memory on an `rd_mcp` host; data may also be discarded.
    RamDisk,
}

impl Plugin {
    /// All plugins.
    pub const ALL: [Self; 3] = [Self::Fileio, Self::Iblock, Self::RamDisk];

    /// Returns the plugin name, which is used in host names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fileio => "fileio",
            Self::Iblock => "iblock",
            Self::RamDisk => "rd_mcp",
        }
    }

    /// Returns the product name used in INQUIRY data.
    #[must_use]
    pub fn product(self) -> &'static str {
        match self {
            Self::Fileio => "FILEIO",
            Self::Iblock => "IBLOCK",
            Self::RamDisk => "RAMDISK-MCP",
        }
    }

    /// Returns the plugin for a host name such as `fileio_0`.
    #[must_use]
    pub fn of_host(name: &str) -> Option<Self> {
        let (plugin, index) = name.rsplit_once('_')?;
        number::unsigned(index, u64::from(u32::MAX)).ok()?;
        Self::ALL.into_iter().find(|p| p.name() == plugin)
    }
}

/// Target port protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fabric {
    /// iSCSI over TCP or RDMA.
    Iscsi,
    /// SRP, using the directory `srpt`.
    Srpt,
}

impl Fabric {
    /// Returns the directory name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iscsi => "iscsi",
            Self::Srpt => "srpt",
        }
    }
}

/// Directory type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each is the directory with the path next to it in `directories`"
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
    /// An empty directory that doesn't allow creating anything.
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

/// Returns the number in `lun_N`.
pub(crate) fn lun_number(name: &str) -> Result<u64, Errno> {
    let digits = name.strip_prefix("lun_").ok_or(Errno::INVAL)?;
    number::unsigned(digits, u64::MAX)
}

/// Parses a portal name, for example `192.0.2.1:3260` or `[2001:db8::1]:3260`.
pub(crate) fn portal_address(name: &str) -> Option<SocketAddr> {
    // LIO uses `[::0]` for the unspecified IPv6 address, which is supported by the standard
    // library.
    name.parse().ok()
}
