//! Files of the state directory, each of which one process writes.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

/// Writes a file, which appears at once and whole.
///
/// # Errors
/// The directory cannot be written; the error names the file.
pub(super) fn write(path: &Path, temporary: &Path, content: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(content)?;
    let written = fs::write(temporary, text).and_then(|()| fs::rename(temporary, path));
    written.map_err(|error| {
        // A part of the file would occupy space on a full file system.
        let _ = fs::remove_file(temporary);
        io::Error::new(error.kind(), format!("{}: {error}", path.display()))
    })
}
