//! `cargo xtask package`: builds the Debian package and tests it in a Debian system.
//!
//! The package is built twice, using a later version for the second build. `tests/package/run.sh`
//! creates a Debian root, where `tests/package/install.sh` will install, use, upgrade, remove and
//! purge them.

use std::fs;
use std::path::PathBuf;

use crate::daemon::DIST;
use crate::packages::{ensure, have_program, needs};
use crate::sh::{self, cmd};
use crate::{Failure, daemon, root};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Build the package only.
    #[arg(long)]
    no_test: bool,
}

/// Cargo subcommand used to create the package.
pub(crate) const SUBCOMMAND: &str = "cargo-deb";

/// Builds the package and tests it unless disabled by the options. If the test has missing
/// requirements, this fails before we build anything.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let needed = if options.no_test { 1 } else { usize::MAX };
    if let Some(need) = ensure(needs("package").take(needed)).first() {
        return Err(format!("{} is missing, for {}", need.program, need.purpose).into());
    }
    have_program(SUBCOMMAND)?;
    if options.no_test {
        return build_package(DIST, env!("CARGO_PKG_VERSION")).map(drop);
    }
    if !sh::is_root() {
        return Err(format!("{WANTS_ROOT}; --no-test only builds the package").into());
    }
    build_and_install(DIST)
}

/// Reason why we must be root to test the package.
pub(crate) const WANTS_ROOT: &str = "creating and entering a Debian root requires root";

/// Builds the package twice, with programs from the given Cargo profile, and tests both in a new
/// Debian root.
pub(crate) fn build_and_install(profile: &str) -> Result<(), Failure> {
    let version = env!("CARGO_PKG_VERSION");
    let deb = build_package(profile, version)?;
    // We use the same programs with a later version number, because this should test the upgrade
    // and not another program.
    let later = package(profile, &format!("{version}+later"))?;
    let mut test = cmd("bash", [root().join("tests/package/run.sh")]);
    sh::run(test.args([directory(), deb, later]))
}

/// Directory for packages and the Debian root.
fn directory() -> PathBuf {
    root().join(".build/package")
}

fn build_package(profile: &str, version: &str) -> Result<PathBuf, Failure> {
    fs::create_dir_all(directory())?;
    let programs = daemon::build_in(profile)?;
    sh::run(cmd("bash", [root().join("deploy/generate.sh")]).arg(programs))?;
    let deb = package(profile, version)?;
    println!("built {}", deb.display());
    println!(
        "{}",
        sh::output(&mut cmd("dpkg-deb", ["--info".as_ref(), deb.as_os_str()]))?
    );
    Ok(deb)
}

fn package(profile: &str, version: &str) -> Result<PathBuf, Failure> {
    let deb = directory().join(format!("riser_{version}.deb"));
    let mut command = sh::cargo(["deb", "-p", "riser-target", "--no-build", "--strip"]);
    // With this option, files that the manifest lists in the release directory are read from the
    // directory of this profile.
    command.args(["--profile", profile, "--deb-version", version, "--output"]);
    sh::run(command.arg(&deb))?;
    Ok(deb)
}
