//! Debian packages that a command needs.

use std::process::{Command, Stdio};

use crate::sh;

/// A program, the package that brings it, and what cannot be done without it.
pub(crate) struct Need {
    /// The program that is looked for.
    pub(crate) program: &'static str,
    /// The Debian package that has it.
    pub(crate) package: &'static str,
    /// What is skipped without it.
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

/// Installs what is missing, if we may, and answers what is missing still.
pub(crate) fn ensure<'a>(needs: &[&'a Need]) -> Vec<&'a Need> {
    let missing = |needs: &[&'a Need]| -> Vec<&'a Need> {
        needs
            .iter()
            .copied()
            .filter(|n| sh::which(n.program).is_none())
            .collect()
    };
    let mut still = missing(needs);
    if still.is_empty() {
        return still;
    }
    // What is installed may replace a newer version of what was there, and take away what came with that.
    for _ in 0..2 {
        let mut packages: Vec<_> = still.iter().map(|n| n.package).collect();
        packages.sort_unstable();
        packages.dedup();
        install(&packages);
        still = missing(needs);
        if still.is_empty() {
            break;
        }
    }
    for n in &still {
        println!(
            "missing: {} (Debian package {}): {}",
            n.program, n.package, n.purpose
        );
    }
    still
}

/// Installs packages, if we may.
pub(crate) fn install(packages: &[&str]) {
    if !sh::is_root() || sh::which("apt-get").is_none() {
        return;
    }
    println!("installing Debian packages: {}", packages.join(" "));
    apt(&["update", "-qq"]);
    let mut args = vec!["install", "-y", "-qq", "--no-install-recommends"];
    args.extend(packages);
    apt(&args);
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
