//! LIO directories: their contents, the directories and links that can be created in them.

use rustix::io::Errno;

use super::kind::{Fabric, Kind, Plugin, Tree, lun_number, portal_address};
use super::{
    Attr, alua, attrib, core, device, initiator, iscsi, iscsi_statistics, param, pr, session, srpt,
    statistics,
};
use crate::tree::NodeId;
use crate::world::World;
use crate::{number, tree};

/// Maximum length of an iSCSI name in LIO, in bytes.
const MAX_NAME: usize = 223;

/// Directories of a device. The table for each plugin must be created at compile time.
macro_rules! device {
    ($plugin:expr) => {
        &[
            ("action", Kind::Empty),
            ("alua", Kind::PortGroups),
            ("attrib", Kind::Attrib($plugin)),
            ("pr", Kind::Pr),
            ("statistics", Kind::DeviceStatistics),
            ("wwn", Kind::Wwn($plugin)),
        ]
    };
}

/// Directories of a portal group.
macro_rules! tpg {
    ($fabric:expr) => {
        &[
            ("acls", Kind::Acls($fabric)),
            ("attrib", Kind::TpgAttrib($fabric)),
            ("auth", Kind::TpgAuth($fabric)),
            ("lun", Kind::Luns),
            ("np", Kind::Portals($fabric)),
            ("param", Kind::TpgParam($fabric)),
        ]
    };
}

/// Directories of an initiator entry.
macro_rules! acl {
    ($fabric:expr, $statistics:expr) => {
        &[
            ("attrib", Kind::NodeAttrib($fabric)),
            ("auth", Kind::NodeAuth($fabric)),
            ("fabric_statistics", $statistics),
            ("param", Kind::NodeParam($fabric)),
        ]
    };
}

impl tree::Kind for Kind {
    const ROOT: Self = Self::Root;

    fn attrs(self) -> &'static [Attr] {
        use Fabric::{Iscsi, Srpt};
        match self {
            Self::Target => core::TARGET,
            Self::LuGroup => alua::LU_GROUP,
            Self::Host(_) => core::HOST,
            Self::Device(_) => core::DEVICE,
            Self::Attrib(_) => attrib::ATTRIB,
            Self::Wwn(_) => attrib::WWN,
            Self::Pr => pr::PR,
            Self::PortGroup => alua::PORT_GROUP,
            Self::Fabric(Iscsi) => iscsi::FABRIC,
            Self::Fabric(Srpt) => srpt::FABRIC,
            Self::Discovery(Iscsi) => iscsi::DISCOVERY,
            Self::Discovery(Srpt) => srpt::DISCOVERY,
            Self::WwpnParam => iscsi::WWPN_PARAM,
            Self::Tpg(Iscsi) => iscsi::TPG,
            Self::Tpg(Srpt) => srpt::TPG,
            Self::TpgAttrib(Iscsi) => iscsi::TPG_ATTRIB,
            Self::TpgAttrib(Srpt) => srpt::TPG_ATTRIB,
            Self::TpgAuth(Iscsi) => iscsi::TPG_AUTH,
            Self::NodeAuth(Iscsi) => iscsi::NODE_AUTH,
            Self::TpgParam(Iscsi) => param::TPG_PARAM,
            Self::Portal => iscsi::PORTAL,
            Self::Lun => alua::LUN,
            Self::Acl(Iscsi) => iscsi::ACL,
            Self::NodeAttrib(Iscsi) => iscsi::NODE_ATTRIB,
            Self::NodeParam(Iscsi) => session::NODE_PARAM,
            Self::MappedLun => iscsi::MAPPED_LUN,
            Self::ScsiDev => statistics::SCSI_DEV,
            Self::ScsiTgtDev => statistics::SCSI_TGT_DEV,
            Self::ScsiLu => statistics::SCSI_LU,
            Self::ScsiPort => statistics::SCSI_PORT,
            Self::ScsiTgtPort => statistics::SCSI_TGT_PORT,
            Self::ScsiTransport => statistics::SCSI_TRANSPORT,
            Self::ScsiAuthIntr => statistics::SCSI_AUTH_INTR,
            Self::ScsiAttIntrPort => statistics::SCSI_ATT_INTR_PORT,
            Self::IscsiInstance => iscsi_statistics::INSTANCE,
            Self::IscsiSessErr => iscsi_statistics::SESS_ERR,
            Self::IscsiTgtAttr => iscsi_statistics::TGT_ATTR,
            Self::IscsiLoginStats => iscsi_statistics::LOGIN_STATS,
            Self::IscsiLogoutStats => iscsi_statistics::LOGOUT_STATS,
            Self::IscsiSessStats => iscsi_statistics::SESS_STATS,
            // All other directories only contain directories.
            _ => &[],
        }
    }

    fn groups(self) -> &'static [(&'static str, Self)] {
        use Fabric::{Iscsi, Srpt};
        use Plugin::{Fileio, Iblock, RamDisk};
        match self {
            Self::Root => &[("target", Self::Target)],
            Self::Target => &[("core", Self::Core)],
            Self::Core => &[("alua", Self::Alua)],
            Self::Alua => &[("lu_gps", Self::LuGroups)],
            Self::LuGroups => &[("default_lu_gp", Self::LuGroup)],
            // We need a line for each plugin and fabric, because a static table can't depend on a
            // parameter.
            Self::Device(Fileio) => device!(Fileio),
            Self::Device(Iblock) => device!(Iblock),
            Self::Device(RamDisk) => device!(RamDisk),
            Self::PortGroups => &[("default_tg_pt_gp", Self::PortGroup)],
            Self::Fabric(Iscsi) => &[("discovery_auth", Self::Discovery(Iscsi))],
            Self::Fabric(Srpt) => &[("discovery_auth", Self::Discovery(Srpt))],
            Self::Wwpn(Iscsi) => &[
                ("fabric_statistics", Self::WwpnStatistics),
                ("param", Self::WwpnParam),
            ],
            Self::Wwpn(Srpt) => &[
                ("fabric_statistics", Self::Empty),
                ("param", Self::WwpnParam),
            ],
            Self::WwpnStatistics => &[
                ("iscsi_instance", Self::IscsiInstance),
                ("iscsi_login_stats", Self::IscsiLoginStats),
                ("iscsi_logout_stats", Self::IscsiLogoutStats),
                ("iscsi_sess_err", Self::IscsiSessErr),
                ("iscsi_tgt_attr", Self::IscsiTgtAttr),
            ],
            Self::Tpg(Iscsi) => tpg!(Iscsi),
            Self::Tpg(Srpt) => tpg!(Srpt),
            Self::Acl(Iscsi) => acl!(Iscsi, Self::NodeStatistics),
            Self::Acl(Srpt) => acl!(Srpt, Self::Empty),
            Self::NodeStatistics => &[("iscsi_sess_stats", Self::IscsiSessStats)],
            Self::DeviceStatistics => &[
                ("scsi_dev", Self::ScsiDev),
                ("scsi_lu", Self::ScsiLu),
                ("scsi_tgt_dev", Self::ScsiTgtDev),
            ],
            Self::Lun => &[("statistics", Self::LunStatistics)],
            Self::LunStatistics => &[
                ("scsi_port", Self::ScsiPort),
                ("scsi_tgt_port", Self::ScsiTgtPort),
                ("scsi_transport", Self::ScsiTransport),
            ],
            Self::MappedLun => &[("statistics", Self::MappedStatistics)],
            Self::MappedStatistics => &[
                ("scsi_att_intr_port", Self::ScsiAttIntrPort),
                ("scsi_auth_intr", Self::ScsiAuthIntr),
            ],
            _ => &[],
        }
    }

    fn make(self, tree: &Tree, id: NodeId, name: &str, world: &dyn World) -> Result<Self, Errno> {
        let valid = |is_valid: bool, kind: Self| is_valid.then_some(kind).ok_or(Errno::INVAL);
        match self {
            Self::Target => match name {
                "iscsi" => Ok(Self::Fabric(Fabric::Iscsi)),
                "srpt" => Ok(Self::Fabric(Fabric::Srpt)),
                _ => Err(Errno::INVAL),
            },
            // Errors must have the same numbers as in the kernel, because tools will report them.
            Self::Core => Plugin::of_host(name).map(Self::Host).ok_or(Errno::INVAL),
            Self::Host(plugin) => Ok(Self::Device(plugin)),
            Self::LuGroups => Ok(Self::LuGroup),
            Self::PortGroups => Ok(Self::PortGroup),
            Self::DeviceStatistics
            | Self::LunStatistics
            | Self::MappedStatistics
            | Self::Portals(Fabric::Srpt) => Err(Errno::NOSYS),
            Self::Fabric(Fabric::Iscsi) => valid(name.len() <= MAX_NAME, Self::Wwpn(Fabric::Iscsi)),
            Self::Fabric(Fabric::Srpt) => valid(
                !world.port_addresses(name).is_empty(),
                Self::Wwpn(Fabric::Srpt),
            ),
            Self::Wwpn(Fabric::Iscsi) => {
                let tag = name.strip_prefix("tpgt_");
                let tag = tag.map(|tag| number::unsigned(tag, u64::from(u16::MAX)));
                valid(matches!(tag, Some(Ok(_))), Self::Tpg(Fabric::Iscsi))
            }
            Self::Wwpn(Fabric::Srpt) => Ok(Self::Tpg(Fabric::Srpt)),
            Self::Luns => lun_number(name).map(|_| Self::Lun),
            Self::Portals(Fabric::Iscsi) => {
                let address = portal_address(name).ok_or(Errno::INVAL)?;
                let target = tree.parent(tree.parent(id));
                let rivals = tree.subdirs(target);
                let rivals = rivals.filter_map(|(_, tpg)| tree.child(tpg, "np"));
                let mut rivals = rivals.flat_map(|np| tree.subdirs(np));
                let is_taken = rivals.any(|(name, _)| portal_address(name) == Some(address));
                valid(!is_taken, Self::Portal)
            }
            Self::Acls(Fabric::Iscsi) => valid(name.len() <= MAX_NAME, Self::Acl(Fabric::Iscsi)),
            Self::Acls(Fabric::Srpt) => valid(
                initiator::Initiator::parse(name).is_some(),
                Self::Acl(Fabric::Srpt),
            ),
            Self::Acl(_) => lun_number(name).map(|_| Self::MappedLun),
            _ => Err(Errno::PERM),
        }
    }

    fn on_made(self, tree: &mut Tree, id: NodeId) {
        statistics::on_made(tree, id);
        match self {
            Self::Device(_) => attrib::on_device_made(tree, id),
            Self::Acl(Fabric::Iscsi) => iscsi::on_acl_made(tree, id),
            _ => {}
        }
    }

    fn takes_links(self) -> bool {
        matches!(self, Self::Lun | Self::MappedLun)
    }

    fn allow_link(self, tree: &Tree, id: NodeId, target: NodeId) -> Result<(), Errno> {
        match self {
            Self::Lun => {
                if !matches!(tree.dir(target).kind, Kind::Device(_)) {
                    return Err(Errno::FAULT);
                }
                if !device::is_configured(tree, target) {
                    return Err(Errno::NODEV);
                }
                if tree.links(id).next().is_some() {
                    return Err(Errno::EXIST);
                }
                Ok(())
            }
            Self::MappedLun => {
                if tree.dir(target).kind != Self::Lun {
                    return Err(Errno::FAULT);
                }
                let tpg = |id| tree.above(id, |dir| matches!(dir.kind, Self::Tpg(_)));
                let is_served = tree.links(target).next().is_some();
                let is_free = tree.links(id).next().is_none();
                let is_ours = tpg(id) == tpg(target);
                (is_served && is_free && is_ours)
                    .then_some(())
                    .ok_or(Errno::INVAL)
            }
            _ => Err(Errno::PERM),
        }
    }

    fn on_linked(self, tree: &mut Tree, id: NodeId, target: NodeId, world: &dyn World) {
        match self {
            Self::Lun => alua::on_lun_linked(tree, id),
            Self::MappedLun => {
                iscsi::on_lun_mapped(tree, id, target);
                statistics::note_time(tree, id, world);
            }
            _ => {}
        }
    }

    fn on_unlinked(self, tree: &mut Tree, id: NodeId) {
        if matches!(self, Self::Lun | Self::MappedLun) {
            tree.dir_mut(id).clear_values();
        }
    }

    fn is_exported(tree: &Tree, id: NodeId) -> bool {
        device::is_exported(tree, id)
    }
}
