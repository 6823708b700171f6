//! The guest's initramfs. This contains busybox, the modules needed to mount the host file system,
//! and a single script.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::kernel::Kernel;
use crate::{Failure, sh};

/// Creates the archive in `folder` and returns its path. The guest runs `init` first. The modules
/// and their dependencies are in `/modules`, with the load order in `/modules/order`.
pub(crate) fn build(
    kernel: &Kernel,
    folder: &Path,
    init: &Path,
    modules: &[&str],
) -> Result<PathBuf, Failure> {
    let tree = folder.join("initramfs");
    let _ = fs::remove_dir_all(&tree);
    fs::create_dir_all(tree.join("bin"))?;
    fs::create_dir_all(tree.join("modules"))?;
    // We use the static busybox from Debian, because the archive doesn't contain libraries.
    fs::copy("/bin/busybox", tree.join("bin/busybox"))?;
    fs::copy(init, tree.join("init"))?;
    fs::set_permissions(tree.join("init"), fs::Permissions::from_mode(0o755))?;
    let mut order: Vec<String> = Vec::new();
    for module in modules {
        for path in dependencies(kernel, module)? {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let plain = name.trim_end_matches(".xz").to_owned();
            // A module can be a dependency of several modules. We keep the first entry, which is
            // after its own dependencies and before all modules that need it.
            if order.contains(&plain) {
                continue;
            }
            let bytes = if name.ends_with(".xz") {
                unpacked(&path)?
            } else {
                fs::read(&path)?
            };
            fs::write(tree.join("modules").join(&plain), bytes)?;
            order.push(plain);
        }
    }
    fs::write(tree.join("modules/order"), order.join("\n"))?;
    let archive = folder.join("initramfs.cpio");
    let script = format!("find . | cpio -o -H newc --quiet > '{}'", archive.display());
    sh::output(sh::cmd("sh", ["-c", &script]).current_dir(&tree))?;
    Ok(archive)
}

/// Returns the module files that `modprobe` would load for a module, in order.
fn dependencies(kernel: &Kernel, module: &str) -> Result<Vec<PathBuf>, Failure> {
    let text = sh::output(sh::cmd("modprobe", ["-d"]).arg(&kernel.root).args([
        "-S",
        &kernel.version,
        "--show-depends",
        module,
    ]))?;
    Ok(text
        .lines()
        .filter_map(|l| l.strip_prefix("insmod "))
        .filter_map(|l| l.split_whitespace().next())
        .map(PathBuf::from)
        .collect())
}

fn unpacked(path: &Path) -> Result<Vec<u8>, Failure> {
    let out = sh::cmd("xz", ["-dc"]).arg(path).output()?;
    if out.status.success() {
        Ok(out.stdout)
    } else {
        Err(format!("{}: xz failed", path.display()).into())
    }
}
