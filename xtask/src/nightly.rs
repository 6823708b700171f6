//! Tools that only a nightly toolchain has.

use std::process::Command;

use crate::packages::may_install;
use crate::{Failure, sh};

/// The toolchain of rustup that has them. `RISER_NIGHTLY` names another one, as a dated one.
fn toolchain() -> String {
    std::env::var("RISER_NIGHTLY").unwrap_or_else(|_| "nightly".to_owned())
}

/// Sees to it that the toolchain is there with these components, and installs them if that is
/// allowed.
///
/// # Errors
/// Names what is missing, and the command that installs it.
pub(crate) fn ensure(components: &[&str]) -> Result<(), Failure> {
    let toolchain = toolchain();
    let installed = installed(&toolchain);
    let missing = missing(installed.as_deref(), components);
    if missing.is_empty() {
        return Ok(());
    }
    let (what, names) = (missing.join(" and "), missing.join(","));
    // A toolchain that is there keeps its date: a newer one would build everything again.
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
    Err(format!("Rust {toolchain} lacks {what}, which `{shown}` brings: {why}").into())
}

/// Components that a toolchain has, one in a line; `None` without the toolchain.
fn installed(toolchain: &str) -> Option<String> {
    let args = ["component", "list", "--installed", "--toolchain", toolchain];
    sh::output(&mut sh::cmd("rustup", args)).ok()
}

/// The components that are not among those installed, in lines that may end in a platform's name.
fn missing<'a>(installed: Option<&str>, wanted: &[&'a str]) -> Vec<&'a str> {
    let installed = installed.unwrap_or_default();
    let has = |name: &str| installed.lines().any(|line| line.starts_with(name));
    wanted.iter().copied().filter(|name| !has(name)).collect()
}

/// Cargo of that toolchain.
pub(crate) fn cargo<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let toolchain = toolchain();
    let mut command = sh::cmd("rustup", ["run", &toolchain, "cargo"]);
    command.args(args).current_dir(crate::root());
    // The programs of the toolchain that runs this one are not those.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

/// The platform that this runs on, by its name in Rust.
pub(crate) fn host() -> Result<String, Failure> {
    let toolchain = toolchain();
    let text = sh::output(&mut sh::cmd("rustup", ["run", &toolchain, "rustc", "-vV"]))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned)
        .ok_or_else(|| "rustc names no host".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_found_with_and_without_a_platform() {
        let installed = Some("miri-x86_64-unknown-linux-gnu\nrust-src\n");
        assert!(missing(installed, &["miri", "rust-src"]).is_empty());
        assert_eq!(missing(installed, &["miri", "rustfmt"]), ["rustfmt"]);
        assert_eq!(missing(None, &["miri"]), ["miri"]);
    }
}
