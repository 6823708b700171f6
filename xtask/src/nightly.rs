//! Tools that require a nightly toolchain.

use std::process::Command;

use crate::packages::may_install;
use crate::{Failure, sh};

/// Name of the rustup toolchain to use. Set `RISER_NIGHTLY` to select another one, such as a dated
/// toolchain.
fn toolchain() -> String {
    std::env::var("RISER_NIGHTLY").unwrap_or_else(|_| "nightly".to_owned())
}

/// Ensures that the toolchain is available with the given components. Missing components are
/// installed if allowed.
///
/// # Errors
/// Returns the missing components and the command to install them.
pub(crate) fn ensure(components: &[&str]) -> Result<(), Failure> {
    let toolchain = toolchain();
    let installed = installed(&toolchain);
    let missing = missing(installed.as_deref(), components);
    if missing.is_empty() {
        return Ok(());
    }
    let (what, names) = (missing.join(" and "), missing.join(","));
    // Don't update an existing toolchain: a newer version would have to rebuild everything.
    let args = match installed {
        Some(_) => [&["component", "add", "--toolchain", &toolchain], &*missing].concat(),
        None => [
            &["toolchain", "install", &toolchain, "--profile", "minimal"],
            &["--component", &names][..],
        ]
        .concat(),
    };
    let shown = format!("rustup {}", args.join(" "));
    let why = match may_install(&format!("{what} of Rust {toolchain}, by `{shown}`")) {
        true => match sh::output(&mut sh::cmd("rustup", &args)) {
            Ok(_) => return Ok(()),
            Err(why) => why.to_string(),
        },
        false => "it may not be installed".to_owned(),
    };
    Err(format!("Rust {toolchain} lacks {what}, install it with `{shown}`: {why}").into())
}

/// Lists the components of a toolchain, one per line. Returns `None` if the toolchain is not
/// installed.
fn installed(toolchain: &str) -> Option<String> {
    let args = ["component", "list", "--installed", "--toolchain", toolchain];
    sh::output(&mut sh::cmd("rustup", args)).ok()
}

/// Returns the wanted components that are not installed. The lines of installed components may have
/// the platform name as a suffix.
fn missing<'a>(installed: Option<&str>, wanted: &[&'a str]) -> Vec<&'a str> {
    let installed = installed.unwrap_or_default();
    let has = |name: &str| installed.lines().any(|line| line.starts_with(name));
    wanted.iter().copied().filter(|name| !has(name)).collect()
}

pub(crate) fn cargo<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let toolchain = toolchain();
    let mut command = sh::cmd("rustup", ["run", &toolchain, "cargo"]);
    command.args(args).current_dir(crate::root());
    // These are set by the toolchain currently running us, so don't use them.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

pub(crate) fn host() -> Result<String, Failure> {
    let toolchain = toolchain();
    sh::host(&mut sh::cmd("rustup", ["run", &toolchain, "rustc", "-vV"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_match_with_platform_suffix() {
        let installed = Some("miri-x86_64-unknown-linux-gnu\nrust-src\n");
        assert!(missing(installed, &["miri", "rust-src"]).is_empty());
        assert_eq!(missing(installed, &["miri", "rustfmt"]), ["rustfmt"]);
        assert_eq!(missing(None, &["miri"]), ["miri"]);
    }
}
