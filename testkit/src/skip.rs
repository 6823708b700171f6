//! Reports that something could not be tried on this machine, in the file where the test command
//! counts it.
//!
//! A line of the file has three fields, with tabs between them: the kind of thing, its name, and
//! the reason why it was not tried.

use std::fs::File;
use std::io::Write;
use std::path::Path;

/// The environment variable that names the file.
pub const LOG: &str = "RISER_SKIP_LOG";

/// The kind of a test function.
pub const FUNCTION: &str = "function";

/// Reports that the running test, or a part of it, `what`, did not run, and why. The test counts as
/// skipped.
///
/// # Panics
///
/// If the file cannot be written.
pub fn skip(what: &str, why: &str) {
    let why = why.lines().next().unwrap_or("no reason given");
    let _ = std::io::stderr().write_all(format!("SKIP: {what}: {why}\n").as_bytes());
    if let Some(log) = std::env::var_os(LOG) {
        let thread = std::thread::current();
        // The harness runs a test in a thread of its name.
        let test = thread.name().filter(|name| *name != "main").unwrap_or(what);
        let name = format!("{} {test}", program());
        note(Path::new(&log), FUNCTION, &name, &format!("{what}: {why}")).unwrap();
    }
}

/// Adds a line to the file.
///
/// # Errors
///
/// If the file cannot be written.
pub fn note(log: &Path, kind: &str, name: &str, why: &str) -> std::io::Result<()> {
    let flat = |text: &str| text.replace(['\t', '\n'], " ");
    let line = format!("{kind}\t{}\t{}\n", flat(name), flat(why));
    let mut log = File::options().create(true).append(true).open(log)?;
    log.write_all(line.as_bytes())
}

/// The name of the test program, without the hash that Cargo gives it.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    stem.rsplit_once('-')
        .map_or_else(|| stem.clone().into_owned(), |(name, _)| name.to_owned())
}
