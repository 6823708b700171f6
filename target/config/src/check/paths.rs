//! Paths of files.

use std::path::{Component, Path, PathBuf};

use crate::mistake::{Checked, Mistake};
use crate::yaml::At;

/// A path. Shells replace a `~` that it begins with, and nothing else does.
pub(super) fn whole_path(text: &str, at: At, path: &str) -> Checked<PathBuf> {
    match text.starts_with('~') {
        true => Err(
            Mistake::new(at, path, "`~` does not stand for a home directory here")
                .hint("write the path in full, or `./~` for a file of such a name"),
        ),
        false => Ok(PathBuf::from(text)),
    }
}

/// The path without `.` and, where that is certain, without `..`.
pub(super) fn normal(path: &Path) -> PathBuf {
    path.components()
        .filter(|c| !matches!(c, Component::CurDir))
        .collect()
}
