//! Modules that Debian's kernel comes without, built once from Debian's sources and headers of the same
//! kernel.

use std::fs;
use std::path::{Path, PathBuf};

use super::case::Case;
use super::kernel::{Kernel, PrivateApt};
use crate::packages::cache;
use crate::{Failure, sh};

/// A module that some cases need.
pub(crate) struct Module {
    /// Name of the module.
    name: &'static str,
    /// Folder of its sources in those of Linux.
    folder: &'static str,
    /// Variable of Linux's configuration by which its makefile builds it.
    variable: &'static str,
    /// Word in the scripts of cases that need it.
    word: &'static str,
    /// What is changed in its sources.
    edits: &'static [Edit],
}

/// A change of a source: a file, a text in it, and what stands in its place.
type Edit = (&'static str, &'static str, &'static str);

/// The modules.
pub(crate) const MODULES: [Module; 2] = [
    // Linux's device for iWARP.
    Module {
        name: "siw",
        folder: "drivers/infiniband/sw/siw",
        variable: "CONFIG_RDMA_SIW",
        word: "iwarp_hosts",
        edits: &[],
    },
    Module {
        name: "ib_rxe",
        folder: "drivers/infiniband/sw/rxe",
        variable: "CONFIG_RDMA_RXE",
        word: "ib_hosts",
        edits: &IB_RXE,
    },
];

/// `rdma_rxe` as a port of InfiniBand. Linux asks for paths on such a port only, and has no device of
/// software with one. So nothing of what asks is changed, only the device: its packets are still
/// those of RoCE, over IPv6, whose addresses are its GIDs. The administrator's GID is fd99::200:0:0:2, as
/// the subnet has its prefix from the port's own GID.
const IB_RXE: [Edit; 14] = [
    // Beside rdma_rxe: another name, and another type of link.
    ("Makefile", "rdma_rxe", "ib_rxe"),
    ("rxe.c", "\"rxe\"", "\"ib_rxe\""),
    (
        "rxe_verbs.c",
        "RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP",
        "(RDMA_CORE_PORT_IBA_IB & ~RDMA_CORE_CAP_IB_SMI) | RDMA_CORE_CAP_IB_GRH_REQUIRED",
    ),
    (
        "rxe_verbs.c",
        "IB_LINK_LAYER_ETHERNET",
        "IB_LINK_LAYER_INFINIBAND",
    ),
    // Its GID, fd99::1. Those of an Ethernet follow from its addresses.
    (
        "rxe_verbs.c",
        "static const struct ib_device_ops rxe_dev_ops = {",
        "static int gid_of_the_rig(struct ib_device *device, u32 port, int index, union ib_gid *gid)
{
	*gid = (union ib_gid){ .raw = { 0xfd, 0x99, [15] = 1 } };
	return 0;
}

static const struct ib_device_ops rxe_dev_ops = {
	.query_gid = gid_of_the_rig,",
    ),
    ("rxe_param.h", "GID_TBL_LEN\t\t= 1024", "GID_TBL_LEN\t\t= 1"),
    (
        "rxe_recv.c",
        "IB_GID_TYPE_ROCE_UDP_ENCAP",
        "IB_GID_TYPE_IB",
    ),
    ("rxe_recv.c", "1, skb->dev);", "1, NULL);"),
    (
        "rxe_av.c",
        "rdma_gid_attr_network_type(grh->sgid_attr)",
        "RDMA_NETWORK_IPV6",
    ),
    (
        "rxe_av.c",
        "rdma_gid_attr_network_type(sgid_attr)",
        "RDMA_NETWORK_IPV6",
    ),
    (
        "rxe_net.c",
        "rdma_read_gid_attr_ndev_rcu(attr);",
        "rcu_dereference(rxe->ib_dev.port_data[1].netdev) ?: ERR_PTR(-ENODEV);",
    ),
    // LIDs must be there, and are not used.
    (
        "rxe_param.h",
        "RXE_PORT_LID\t\t\t= 0",
        "RXE_PORT_LID\t\t\t= 1",
    ),
    (
        "rxe_param.h",
        "RXE_PORT_SM_LID\t\t\t= 0",
        "RXE_PORT_SM_LID\t\t\t= 2",
    ),
    // An Ethernet's speed, which only a port of it has.
    (
        "rxe_verbs.c",
        "ret = ib_get_eth_speed(ibdev, port_num, &attr->active_speed,",
        "ret = 0; (void)(",
    ),
];

impl Module {
    /// Whether a case needs the module.
    pub(crate) fn is_for(&self, case: &Case) -> bool {
        case.text.contains(self.word)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Its edits, as they are kept beside the module.
    fn stamp(&self) -> String {
        self.edits
            .iter()
            .map(|edit| format!("{edit:?}\n"))
            .collect()
    }

    /// Builds it into the modules of a kernel, if it is not there.
    pub(crate) fn ensure(&self, kernel: &Kernel) -> Result<(), Failure> {
        let file = format!("{}.ko", self.name);
        let module = kernel.modules().join("updates").join(&file);
        // A module that was built with other edits is built again.
        let (edits, stamp) = (self.stamp(), module.with_extension("edits"));
        if module.exists() && fs::read_to_string(&stamp).unwrap_or_default() == edits {
            return Ok(());
        }
        println!("building {} for Linux {}", self.name, kernel.version);
        let folder = cache().join(format!("{}-{}", self.name, std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let apt = PrivateApt::new()?;
        let headers = unpack_headers(&apt, kernel, &folder)?;
        let sources = self.unpack_sources(&apt, kernel, &folder)?;
        let mut make = sh::cmd("make", ["-C"]);
        make.arg(&headers).arg(format!("M={}", sources.display()));
        make.arg(format!("{}=m", self.variable));
        // Types for debuggers would need a program more.
        make.args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
        sh::output(&mut make)?;
        let built = sources.join(&file);
        sh::output(sh::cmd("strip", ["--strip-debug"]).arg(&built))?;
        fs::create_dir_all(kernel.modules().join("updates"))?;
        // By its name only when it is whole, for a run that is ended meanwhile.
        let whole = module.with_extension("new");
        fs::copy(&built, &whole)?;
        fs::rename(&whole, &module)?;
        fs::write(&stamp, edits)?;
        sh::output(
            sh::cmd("depmod", ["-b"]).args([kernel.root.as_os_str(), kernel.version.as_ref()]),
        )?;
        fs::remove_dir_all(&folder)?;
        Ok(())
    }

    /// Its sources, with the edits; the folder that has them.
    fn unpack_sources(
        &self,
        apt: &PrivateApt,
        kernel: &Kernel,
        folder: &Path,
    ) -> Result<PathBuf, Failure> {
        let name = format!("linux-source-{}", series(&kernel.version));
        unpack(apt, &name, folder)?;
        let packed = folder.join(format!("usr/src/{name}.tar.xz"));
        let sources = format!("{name}/{}", self.folder);
        let mut tar = sh::cmd("tar", ["-xJf"]);
        tar.arg(&packed).arg("-C").arg(folder).arg(&sources);
        sh::output(&mut tar)?;
        let sources = folder.join(sources);
        for (file, what, by) in self.edits {
            let path = sources.join(file);
            let text = fs::read_to_string(&path)?;
            if !text.contains(what) {
                return Err(format!("{file} of {name} has no {what:?}").into());
            }
            fs::write(&path, text.replace(what, by))?;
        }
        Ok(sources)
    }
}

/// The headers of a kernel, in a folder; that which a module is built with.
fn unpack_headers(apt: &PrivateApt, kernel: &Kernel, folder: &Path) -> Result<PathBuf, Failure> {
    let version = &kernel.version;
    let flavour = version.rsplit('-').next().unwrap_or_default();
    let build = version.trim_end_matches(flavour).trim_end_matches('-');
    for package in [
        format!("linux-headers-{version}"),
        format!("linux-headers-{build}-common"),
        format!("linux-kbuild-{build}"),
    ] {
        unpack(apt, &package, folder)?;
    }
    // The headers name their other half by its place in the system.
    let headers = folder.join(format!("usr/src/linux-headers-{version}"));
    let makefile = fs::read_to_string(headers.join("Makefile"))?;
    let place = format!("{}/usr/src/", folder.display());
    fs::write(
        headers.join("Makefile"),
        makefile.replace("/usr/src/", &place),
    )?;
    Ok(headers)
}

/// Unpacks a package in a folder.
fn unpack(apt: &PrivateApt, package: &str, folder: &Path) -> Result<(), Failure> {
    let archive = apt.download(package)?;
    sh::output(sh::cmd("dpkg", ["-x"]).arg(&archive).arg(folder))?;
    fs::remove_file(&archive)?;
    Ok(())
}

/// The series of a kernel's sources: `6.12` of `6.12.95+deb12-amd64`.
fn series(version: &str) -> String {
    let parts: Vec<&str> = version.split('.').take(2).collect();
    parts.join(".")
}

#[cfg(test)]
mod tests {
    #[test]
    fn sources_are_named_by_their_series() {
        assert_eq!(super::series("6.12.95+deb12-amd64"), "6.12");
    }
}
