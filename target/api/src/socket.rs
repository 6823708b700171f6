//! The usual place of the admin API's socket.

use std::path::{Path, PathBuf};

/// Its file name in a directory of its own.
const NAME: &str = "admin.sock";

/// Default place where a daemon serves and a tool looks: in
/// `$RUNTIME_DIRECTORY`, which a service manager sets; for root in `/run/riserd`; for others in
/// `$XDG_RUNTIME_DIR/riserd`. `None` where there is none of these.
#[must_use]
pub fn default_path() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
    if let Some(dirs) = set("RUNTIME_DIRECTORY") {
        let first = std::env::split_paths(&dirs).next()?;
        return Some(first.join(NAME));
    }
    if rustix::process::geteuid().is_root() {
        return Some(Path::new("/run/riserd").join(NAME));
    }
    Some(
        Path::new(&set("XDG_RUNTIME_DIR")?)
            .join("riserd")
            .join(NAME),
    )
}
