//! File path checks.

use std::path::{Component, Path, PathBuf};

use crate::mistake::{Checked, Mistake};
use crate::yaml::At;

/// Checks a path. A leading `~` is only expanded by shells, so we reject it.
pub(super) fn whole_path(text: &str, at: At, path: &str) -> Checked<PathBuf> {
    match text.starts_with('~') {
        true => Err(
            Mistake::new(at, path, "`~` is not supported for home directories")
                .hint("use the full path, or `./~` for a file with this name"),
        ),
        false => Ok(PathBuf::from(text)),
    }
}

/// Normalizes a path by removing `.` components, and `..` components if it is safe to do so.
pub(super) fn normal(path: &Path) -> PathBuf {
    path.components()
        .filter(|c| !matches!(c, Component::CurDir))
        .collect()
}
