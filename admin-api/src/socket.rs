//! Default path of the admin API socket.

use std::path::{Path, PathBuf};

/// File name of the socket.
const NAME: &str = "admin.sock";

/// Returns the default socket path used by the daemon and its tools: in `$RUNTIME_DIRECTORY`, which
/// is set by a service manager; in `/run/riserd` for root; and otherwise in
/// `$XDG_RUNTIME_DIR/riserd`. Returns `None` if none of these is available.
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
