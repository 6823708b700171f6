//! Files in the state directory. Each file is only written by a single process.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

/// Writes a file atomically.
///
/// # Errors
/// Fails if the directory can't be written. The error includes the file name.
pub(super) fn write(path: &Path, temporary: &Path, content: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(content)?;
    let written = fs::write(temporary, text).and_then(|()| fs::rename(temporary, path));
    written.map_err(|error| {
        // Don't leave a partial file on a file system that may be full.
        let _ = fs::remove_file(temporary);
        io::Error::new(error.kind(), format!("{}: {error}", path.display()))
    })
}
