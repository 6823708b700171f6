//! QEMU's driver for iSCSI and iSER disks.

use std::fs;

use crate::interop::kernel;
use crate::{Failure, packages, sh};

/// QEMU's block driver, which comes in a package of its own.
pub(crate) const PACKAGE: &str = "qemu-block-extra";

/// Returns whether QEMU's tools speak iSCSI, over TCP and iSER; installs the driver if it may.
pub(crate) fn is_there() -> bool {
    // What the tools list they may still not have, and no target listens at this port. A QEMU of
    // before 8 reports an unknown protocol, a newer one a module that it cannot load.
    let knows = || {
        let unserved = "iscsi://127.0.0.1:1/iqn.2026-01.org.example:none/0";
        let answer = sh::output(&mut sh::cmd("qemu-img", ["info", unserved]));
        answer.is_err_and(|error| {
            let error = error.to_string();
            !error.contains("Unknown protocol") && !error.contains("Unable to load module")
        })
    };
    // The package has no program by whose name it could be looked for.
    knows() || {
        let _ = install_driver().inspect_err(|e| println!("{PACKAGE}: {e}"));
        knows()
    }
}

/// Installs the driver in the version of the tools, which load no other. A QEMU from the backports
/// suite is often left where that suite is no longer among the sources.
fn install_driver() -> Result<(), Failure> {
    let query = ["-W", "-f", "${Version}", "qemu-utils"];
    let version = sh::output(&mut sh::cmd("dpkg-query", query))?;
    let package = format!("{PACKAGE}={}", version.trim());
    let purpose = || "iSCSI in QEMU's tools".to_owned();
    if !version.contains("~bpo") {
        packages::install(&[(&package, purpose())]);
        return Ok(());
    }
    let archive = kernel::download(&package)?;
    packages::install(&[(&archive.display().to_string(), purpose())]);
    fs::remove_file(&archive)?;
    Ok(())
}
