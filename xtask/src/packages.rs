//! Debian packages and crate programs required by commands.
//!
//! We decide once per run if missing packages should be installed: based on an option, or by a
//! prompt if we are running on a terminal. The default is to install them after printing a message.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{LazyLock, OnceLock};

use serde::Deserialize;

use crate::{Failure, sh};

/// Options to control installation.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install missing Debian packages and crate programs without a prompt.
    #[arg(long, global = true, conflicts_with = "no_install")]
    install: bool,
    /// Don't install anything: skip any work that needs a missing package.
    #[arg(long, global = true)]
    no_install: bool,
}

/// Decision for this run.
static DECISION: OnceLock<bool> = OnceLock::new();

impl Options {
    /// Sets the decision for this run if one of the options was given.
    pub(crate) fn decide(&self) {
        if self.install || self.no_install {
            let _ = DECISION.set(self.install);
        }
    }
}

/// A required program, the package that provides it, and its purpose.
#[derive(Debug, Deserialize)]
pub(crate) struct Need {
    /// Name of the program, or the path of a file.
    pub(crate) program: String,
    /// Debian package that contains the program.
    pub(crate) package: String,
    /// Work that is skipped if the program is missing.
    pub(crate) purpose: String,
}

static NEEDS: LazyLock<BTreeMap<String, Vec<Need>>> = LazyLock::new(|| {
    let needs = toml::from_str(include_str!("../cases/packages.toml"));
    needs.unwrap_or_else(|e| panic!("packages.toml: {e}"))
});

/// Returns the needs with these names in `packages.toml`, which are separated by spaces.
pub(crate) fn needs(names: &str) -> impl Iterator<Item = &'static Need> {
    names.split_whitespace().flat_map(|name| &NEEDS[name])
}

/// Installs any missing packages, if allowed, and returns the needs that are still missing.
pub(crate) fn ensure(needs: impl IntoIterator<Item = &'static Need>) -> Vec<&'static Need> {
    let needs: Vec<_> = needs.into_iter().collect();
    // Installing a package may downgrade another package and so remove programs provided by the
    // newer version, so we check again.
    for _ in 0..2 {
        let lacking = missing(needs.iter().copied());
        let mut packages = BTreeMap::<&str, Vec<&str>>::new();
        for need in &lacking {
            let purposes = packages.entry(&need.package).or_default();
            if !purposes.contains(&need.purpose.as_str()) {
                purposes.push(&need.purpose);
            }
        }
        let packages = packages
            .iter()
            .map(|(p, purposes)| (*p, purposes.join(", ")));
        install(&packages.collect::<Vec<_>>());
    }
    let lacking = missing(needs);
    for n in &lacking {
        println!(
            "missing: {} (Debian package {}): {}",
            n.program, n.package, n.purpose
        );
    }
    lacking
}

pub(crate) fn missing(needs: impl IntoIterator<Item = &'static Need>) -> Vec<&'static Need> {
    let is_missing = |need: &&Need| sh::which(&need.program).is_none();
    needs.into_iter().filter(is_missing).collect()
}

/// Installs packages, listed with their purpose, if allowed. A package can be a name,
/// `NAME=VERSION` or an archive path.
fn install(packages: &[(&str, String)]) {
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
    // In a new container the package lists are empty, and old lists may contain versions no longer
    // available from the archive.
    apt(&["update", "-qq"]);
    let mut args = vec!["install", "-y", "-qq", "--no-install-recommends"];
    args.extend(packages.iter().map(|(package, _)| *package));
    apt(&args);
}

/// Unpacks a package to a directory instead of installing it, because it may contain services or
/// other files that we don't want on this machine. We keep the archive in the user's cache
/// directory.
pub(crate) fn unpack(package: &str, into: &Path) -> Result<(), Failure> {
    let archives = cache().join("archives");
    fs::create_dir_all(&archives)?;
    let find = || find_archive(&archives, package);
    if find().is_err() {
        if !may_install(&format!("{package} into {}", archives.display())) {
            return Err(format!("the Debian package {package} is missing").into());
        }
        let mut download = sh::cmd("apt-get", ["download", package]);
        // The cache may be in a home directory that apt's own user can't access.
        download.args(["-o", "APT::Sandbox::User=root"]);
        sh::output(download.current_dir(&archives))?;
    }
    sh::output(sh::cmd("dpkg", ["-x"]).arg(find()?).arg(into)).map(drop)
}

pub(crate) fn find_archive(directory: &Path, package: &str) -> Result<PathBuf, Failure> {
    let is_it = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&format!("{package}_")) && file.ends_with(".deb")
    };
    let mut paths = fs::read_dir(directory)?.flatten().map(|entry| entry.path());
    let archive = paths.find(is_it);
    archive.ok_or_else(|| format!("apt did not download the package {package}").into())
}

pub(crate) fn codename() -> Result<String, Failure> {
    let release = fs::read_to_string("/etc/os-release")?;
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(name
        .ok_or("/etc/os-release contains no release")?
        .to_owned())
}

/// Cache directory for downloads and unpacked kernels.
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("riser")
}

/// Ensures that a crate's program is available: either the Cargo subcommand `cargo-NAME` or a
/// separate program. If missing, we build it if allowed.
pub(crate) fn have_program(name: &str) -> Result<(), Failure> {
    let mut version = match name.strip_prefix("cargo-") {
        // Cargo also searches for subcommands in directories that are not in `PATH`.
        Some(subcommand) => sh::cargo([subcommand]),
        None => sh::installed(name),
    };
    if sh::output(version.arg("--version")).is_ok() {
        return Ok(());
    }
    if !may_install(&format!("{name}, from crates.io")) {
        return Err(format!("{name} is missing").into());
    }
    // Use an unoptimized build: the optimized build would take minutes, but the program only runs
    // for seconds.
    let mut install = sh::cargo(["install", "-q", name, "--locked", "--debug"]);
    if name == "mdbook" {
        // Most of the build time is spent on the server and search features, but we don't use them.
        install.arg("--no-default-features");
    }
    sh::output(&mut install).map(drop)
}

/// Announces a package to be installed. On a terminal, prompts for permission.
pub(crate) fn may_install(what: &str) -> bool {
    match DECISION.get() {
        Some(false) => return false,
        Some(true) => println!("installing {what}"),
        // Check both input and output: if the prompt is redirected to a file or can't be read, the
        // run would block.
        None if io::stdin().is_terminal() && io::stdout().is_terminal() => {
            println!("Missing: {what}");
            let _ = DECISION.set(is_yes(
                "Install them, and all other packages of this run? [Y/n] ",
            ));
        }
        None => {
            println!("installing {what}\n(--no-install skips steps that need them)");
            let _ = DECISION.set(true);
        }
    }
    DECISION.get() == Some(&true)
}

fn is_yes(question: &str) -> bool {
    print!("{question}");
    let _ = io::stdout().flush();
    let mut line = String::new();
    let is_read = io::stdin().read_line(&mut line).is_ok_and(|n| n > 0);
    is_read && matches!(line.trim().to_lowercase().as_str(), "" | "y" | "yes")
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
