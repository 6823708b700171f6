//! Reports tests that can't run on this machine, using a file that is read by the test command to
//! count them.
//!
//! Each line has three fields, separated by tabs: the kind of test, its name, and the reason why it
//! was skipped.

use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Environment variable with the path of this file.
pub const LOG: &str = "RISER_SKIP_LOG";

/// The kind used for test functions.
pub const FUNCTION: &str = "function";

/// Reports that the current test, or a part of it (`what`), was skipped, and the reason. The whole
/// test is then counted as skipped.
///
/// # Panics
///
/// Panics if the file can't be written.
pub fn skip(what: &str, why: &str) {
    let why = why.lines().next().unwrap_or("no reason given");
    let _ = std::io::stderr().write_all(format!("SKIP: {what}: {why}\n").as_bytes());
    if let Some(log) = std::env::var_os(LOG) {
        let thread = std::thread::current();
        // The test harness uses the test name as the name of its thread.
        let test = thread.name().filter(|name| *name != "main").unwrap_or(what);
        let name = format!("{} {test}", program());
        note(Path::new(&log), FUNCTION, &name, &format!("{what}: {why}")).unwrap();
    }
}

/// Adds a line to the file.
///
/// # Errors
///
/// Returns an error if the file can't be written.
pub fn note(log: &Path, kind: &str, name: &str, why: &str) -> std::io::Result<()> {
    let flat = |text: &str| text.replace(['\t', '\n'], " ");
    let line = format!("{kind}\t{}\t{}\n", flat(name), flat(why));
    let mut log = File::options().create(true).append(true).open(log)?;
    log.write_all(line.as_bytes())
}

/// Returns the name of the test program without Cargo's hash.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    stem.rsplit_once('-')
        .map_or_else(|| stem.clone().into_owned(), |(name, _)| name.to_owned())
}
