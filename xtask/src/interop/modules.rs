//! Builds kernel modules that are not included in Debian's kernel, using the Debian sources and
//! headers for the same kernel. Each module is only built once.

use std::fs;
use std::path::{Path, PathBuf};

use super::case::Case;
use super::kernel::{Kernel, PrivateApt};
use crate::packages::cache;
use crate::{Failure, sh};

/// A module required by some of the cases.
pub(crate) struct Module {
    /// Module name.
    name: &'static str,
    /// Directory in the Linux sources.
    folder: &'static str,
    /// Kconfig variable that enables this module in its makefile.
    variable: &'static str,
    /// If the script of a case contains this word, it needs this module.
    word: &'static str,
    /// Changes to the sources.
    edits: &'static [Edit],
}

/// A source change: file, old text and new text.
type Edit = (&'static str, &'static str, &'static str);

/// All modules.
pub(crate) const MODULES: [Module; 2] = [
    // Software iWARP device in Linux.
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

/// `rdma_rxe` as an InfiniBand port. Linux only sends path queries on an InfiniBand port, but has
/// no software device with such a port. We don't change the code that sends the queries, only the
/// device. It still sends RoCE packets over IPv6, using its GID as the address. The GID of the
/// administrator is fd99::200:0:0:2, because the subnet prefix is based on the port's own GID.
const IB_RXE: [Edit; 14] = [
    // Use another name and link type, so that it can be loaded in addition to rdma_rxe.
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
    // The port's GID, fd99::1. On Ethernet, GIDs are based on addresses.
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
    // LIDs are required, but not used.
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
    // The speed of an Ethernet port, which is not available here.
    (
        "rxe_verbs.c",
        "ret = ib_get_eth_speed(ibdev, port_num, &attr->active_speed,",
        "ret = 0; (void)(",
    ),
];

impl Module {
    /// Returns true if this case needs the module.
    pub(crate) fn is_for(&self, case: &Case) -> bool {
        case.text.contains(self.word)
    }

    /// Returns the module name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the source changes as text to be saved along with the module.
    fn stamp(&self) -> String {
        self.edits
            .iter()
            .map(|edit| format!("{edit:?}\n"))
            .collect()
    }

    /// Builds the module and installs it in the kernel's module directory, if it doesn't exist.
    pub(crate) fn ensure(&self, kernel: &Kernel) -> Result<(), Failure> {
        let file = format!("{}.ko", self.name);
        let module = kernel.modules().join("updates").join(&file);
        // If the existing module was built with other source changes, build it again.
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
        // BTF debug information would require another program.
        make.args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
        sh::output(&mut make)?;
        let built = sources.join(&file);
        sh::output(sh::cmd("strip", ["--strip-debug"]).arg(&built))?;
        fs::create_dir_all(kernel.modules().join("updates"))?;
        // Rename the module when it's complete, so that an interrupted run doesn't leave a partial
        // file.
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

    /// Unpacks and changes the sources, and returns the module's directory.
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

/// Unpacks the kernel headers and returns the directory used to build a module.
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
    // The headers include a second package using its installed path.
    let headers = folder.join(format!("usr/src/linux-headers-{version}"));
    let makefile = fs::read_to_string(headers.join("Makefile"))?;
    let place = format!("{}/usr/src/", folder.display());
    fs::write(
        headers.join("Makefile"),
        makefile.replace("/usr/src/", &place),
    )?;
    Ok(headers)
}

/// Unpacks a package to a directory.
fn unpack(apt: &PrivateApt, package: &str, folder: &Path) -> Result<(), Failure> {
    let archive = apt.download(package)?;
    sh::output(sh::cmd("dpkg", ["-x"]).arg(&archive).arg(folder))?;
    fs::remove_file(&archive)?;
    Ok(())
}

/// Returns the source version for a kernel, for example `6.12` for `6.12.95+deb12-amd64`.
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
