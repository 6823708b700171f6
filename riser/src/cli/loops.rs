//! Loop devices, and the tools that create and release them.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::exit::{CliError, Exit};

/// Returns the loop devices of this host and their backing files.
pub(super) fn loop_devices(block: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let disks = fs::read_dir(block).into_iter().flatten().flatten();
    disks.filter_map(|disk| {
        let file = fs::read_to_string(disk.path().join("loop/backing_file")).ok()?;
        let device = disk.file_name().to_string_lossy().into_owned();
        Some((device, file.trim_end_matches('\n').into()))
    })
}

/// Requests the kernel to release a loop device once it has no users.
pub(super) fn release_loop(device: &Path) -> Result<(), CliError> {
    run_tool("losetup", &["-d".as_ref(), device.as_ref()]).map(drop)
}

/// Releases the loop devices whose backing files are below a directory.
pub(super) fn release_loops_below(dir: &Path) {
    // We can't resolve a dead mount, but we can resolve its parent.
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        return;
    };
    let Ok(dir) = parent.canonicalize().map(|parent| parent.join(name)) else {
        return;
    };
    for (device, file) in loop_devices(Path::new("/sys/class/block")) {
        if file.starts_with(&dir)
            && let Err(error) = release_loop(&Path::new("/dev").join(&device))
        {
            let error = error.to_line();
            tracing::warn!(%device, error, "cannot release a loop device");
        }
    }
}

/// Runs a system tool and returns its output.
pub(super) fn run_tool(name: &str, args: &[&OsStr]) -> Result<String, CliError> {
    let output = Command::new(name)
        .args(args)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| CliError::io(format!("cannot run {name}"), e))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(CliError::new(Exit::Failure, format!("{name} failed")).because(said));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
