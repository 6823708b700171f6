//! Debian packages and programs of crates that a command needs.
//!
//! Whether something may be installed is decided once in a run: by an option, by the answer of a
//! person at a terminal, and otherwise with yes, after it has been announced.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::{Failure, sh};

/// Options about installing.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install missing Debian packages and programs of crates without a question.
    #[arg(long, global = true, conflicts_with = "no_install")]
    install: bool,
    /// Install nothing: skip what needs a missing package.
    #[arg(long, global = true)]
    no_install: bool,
}

/// The decision of this run.
static DECISION: OnceLock<bool> = OnceLock::new();

impl Options {
    /// Decides for the run, if one of the options is there.
    pub(crate) fn decide(&self) {
        if self.install || self.no_install {
            let _ = DECISION.set(self.install);
        }
    }
}

/// A program, the package that brings it, and what cannot be done without it.
pub(crate) struct Need {
    /// The program that is looked for, or a file by its path.
    pub(crate) program: &'static str,
    /// The Debian package that has it.
    pub(crate) package: &'static str,
    /// The work that is skipped without it.
    pub(crate) purpose: &'static str,
}

/// Shorthand for a table of needs.
pub(crate) const fn need(
    program: &'static str,
    package: &'static str,
    purpose: &'static str,
) -> Need {
    Need {
        program,
        package,
        purpose,
    }
}

/// Installs what is missing, if that is allowed, and returns what is missing still.
pub(crate) fn ensure<'a>(needs: impl IntoIterator<Item = &'a Need>) -> Vec<&'a Need> {
    let needs: Vec<&Need> = needs.into_iter().collect();
    let mut lacking = missing(needs.iter().copied());
    // What is installed may replace a newer version of what was there, and take away what came with
    // that.
    for _ in 0..2 {
        let mut packages = BTreeMap::<_, Vec<_>>::new();
        for need in &lacking {
            let purposes = packages.entry(need.package).or_default();
            if !purposes.contains(&need.purpose) {
                purposes.push(need.purpose);
            }
        }
        let packages = packages
            .iter()
            .map(|(p, purposes)| (*p, purposes.join(", ")));
        install(&packages.collect::<Vec<_>>());
        lacking = missing(needs.iter().copied());
    }
    for n in &lacking {
        println!(
            "missing: {} (Debian package {}): {}",
            n.program, n.package, n.purpose
        );
    }
    lacking
}

/// The needs that are not met now.
pub(crate) fn missing<'a>(needs: impl IntoIterator<Item = &'a Need>) -> Vec<&'a Need> {
    needs.into_iter().filter(is_missing).collect()
}

fn is_missing(need: &&Need) -> bool {
    sh::which(need.program).is_none()
}

/// Installs packages, each with its purpose, if that is allowed. A package is a name, `NAME=VERSION`
/// or the path of an archive.
pub(crate) fn install(packages: &[(&str, String)]) {
    if packages.is_empty() || !sh::is_root() || sh::which("apt-get").is_none() {
        return;
    }
    let lines = packages
        .iter()
        .map(|(package, purpose)| format!("  {package:<20} {purpose}"));
    let lines: Vec<_> = lines.collect();
    if !may_install(&format!("Debian packages:\n{}", lines.join("\n"))) {
        return;
    }
    // Lists of a fresh container are empty, and old ones name versions that the archive no longer
    // has.
    apt(&["update", "-qq"]);
    let mut args = vec!["install", "-y", "-qq", "--no-install-recommends"];
    args.extend(packages.iter().map(|(package, _)| *package));
    apt(&args);
}

/// Unpacks a package into a folder instead of installing it: it may bring services, or other things
/// that have no business on this machine. Its archive is kept in the user's cache folder.
pub(crate) fn unpack(package: &str, into: &Path) -> Result<(), Failure> {
    let archives = cache().join("archives");
    fs::create_dir_all(&archives)?;
    let find = || {
        let is_it = |path: &PathBuf| {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            file.starts_with(&format!("{package}_")) && file.ends_with(".deb")
        };
        let entries = fs::read_dir(&archives).ok()?;
        entries.flatten().map(|entry| entry.path()).find(is_it)
    };
    if find().is_none() {
        if !may_install(&format!("{package} into {}", archives.display())) {
            return Err(format!("the Debian package {package} is not there").into());
        }
        let mut download = sh::cmd("apt-get", ["download", package]);
        // The cache may be in a home that apt's own user cannot enter.
        download.args(["-o", "APT::Sandbox::User=root"]);
        sh::output(download.current_dir(&archives))?;
    }
    let archive = find().ok_or_else(|| format!("the package {package} did not arrive"))?;
    sh::output(sh::cmd("dpkg", ["-x"]).arg(&archive).arg(into)).map(drop)
}

/// The folder where downloads and unpacked kernels are kept.
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("riser")
}

/// Sees to it that the program of a crate is there: `cargo-NAME`, a subcommand of Cargo, or one by
/// itself. It is built if it is missing and may be.
pub(crate) fn have_program(name: &str) -> Result<(), Failure> {
    let mut version = match name.strip_prefix("cargo-") {
        // Cargo finds its subcommands in more folders than `PATH` has.
        Some(subcommand) => sh::cargo([subcommand]),
        None => sh::installed(name),
    };
    if sh::output(version.arg("--version")).is_ok() {
        return Ok(());
    }
    if !may_install(&format!("{name}, from crates.io")) {
        return Err(format!("{name} is missing").into());
    }
    // Not optimized: to optimize it takes minutes, and it runs for seconds.
    let mut install = sh::cargo(["install", "-q", name, "--locked", "--debug"]);
    if name == "mdbook" {
        // Its server and its search take most of the time to build, and are not for pages here.
        install.arg("--no-default-features");
    }
    sh::output(&mut install).map(drop)
}

/// Announces what is to be installed; asks for permission where a person can answer.
pub(crate) fn may_install(what: &str) -> bool {
    match DECISION.get() {
        Some(false) => return false,
        Some(true) => println!("installing {what}"),
        // Both ends: a question that is redirected to a file, or that has no reader, would hold up
        // the run.
        None if io::stdin().is_terminal() && io::stdout().is_terminal() => {
            println!("These are missing: {what}");
            let _ = DECISION.set(is_yes("Install them, and what else this run needs? [Y/n] "));
        }
        None => {
            println!("installing {what}\n(--no-install skips what needs them)");
            let _ = DECISION.set(true);
        }
    }
    DECISION.get() == Some(&true)
}

fn is_yes(question: &str) -> bool {
    print!("{question}");
    let _ = io::stdout().flush();
    let mut answer = String::new();
    let is_read = io::stdin().read_line(&mut answer).is_ok_and(|n| n > 0);
    is_read && matches!(answer.trim().to_lowercase().as_str(), "" | "y" | "yes")
}

fn apt(args: &[&str]) {
    let status = Command::new("apt-get")
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    if !status.is_ok_and(|s| s.success()) {
        println!("apt-get {} failed", args.join(" "));
    }
}
