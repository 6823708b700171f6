//! `cargo xtask container`: builds the image of `deploy/container` and starts its programs.

use std::fs;

use crate::packages::{ensure, install, needs};
use crate::sh::{self, cmd};
use crate::tally::Outcome;
use crate::{Failure, root};

/// Supported container engines, which all use the same arguments. The preferred engine is first.
const ENGINES: [&str; 2] = ["podman", "docker"];

/// Image name.
const IMAGE: &str = "riser-xtask";

/// Commands to execute in the image. They check that the programs start, read the default
/// configuration and find the libraries to be used by other programs.
const TRIED: [&[&str]; 7] = [
    &["riserd", "--version"],
    &["riser", "--version"],
    &["riserd-configfs", "--version"],
    &["riser-sa", "--version"],
    &["riser-iwpmd", "--version"],
    &["riserd", "check", "/etc/riser/riserd.yaml"],
    &["riser", "run", "--", "true"],
];

/// Builds the image. Returns an error if it can't be tested here.
pub(crate) fn run() -> Result<(), Failure> {
    build_and_try()?.into_result()
}

/// Builds the image, if this machine supports it, and starts its programs.
pub(crate) fn build_and_try() -> Result<Outcome, Failure> {
    let Some(engine) = engine() else {
        let why = format!("no usable container engine: tried {}", ENGINES.join(", "));
        return Ok(Outcome::skipped(why));
    };
    let file = root().join("deploy/container/Containerfile");
    let bases = bases(&fs::read_to_string(&file)?);
    // We pull the base images separately: a missing network should not be reported as a failure,
    // but a failed build should.
    for base in &bases {
        let is_here = sh::output(&mut cmd(engine, ["image", "inspect", base])).is_ok();
        if is_here {
            continue;
        }
        println!("{engine} pull {base}");
        if let Err(e) = sh::output(&mut cmd(engine, ["pull", "--quiet", base])) {
            let e = e.to_string();
            let last = e.lines().last().unwrap_or_default();
            let why = format!("{engine} cannot pull the base image {base}: {last}");
            return Ok(Outcome::skipped(why));
        }
    }
    let try_it = ["run", "--rm", "--network", "none"];
    for base in &bases {
        // If we run in a container, the engine may support everything but this.
        if let Err(e) = sh::output(cmd(engine, try_it).args([base, "true"])) {
            let e = e.to_string();
            let last = e.lines().last().unwrap_or_default();
            let why = format!("{engine} cannot run a container: {last}");
            return Ok(Outcome::skipped(why));
        }
    }
    let mut build = cmd(engine, ["build", "--tag", IMAGE, "--file"]);
    sh::run(build.arg(&file).arg(root()))?;
    for command in TRIED {
        let mut run = cmd(engine, try_it);
        println!("{}", sh::output(run.arg(IMAGE).args(command))?.trim());
    }
    Ok(Ok(()).into())
}

/// Returns a working engine. If no engine works, we try to install the first one.
fn engine() -> Option<&'static str> {
    let works = |engine: &&str| sh::output(&mut cmd(*engine, ["info"])).is_ok();
    let found = || ENGINES.into_iter().find(works);
    found().or_else(|| {
        if ensure(needs("container")).is_empty() {
            // Required to execute a container, but only recommended by the package.
            let more = ["crun", "netavark", "aardvark-dns"];
            install(&more.map(|package| (package, "running a container".to_owned())));
        }
        found()
    })
}

fn bases(text: &str) -> Vec<String> {
    let from = text.lines().filter_map(|line| line.strip_prefix("FROM "));
    let name = |rest: &str| {
        rest.split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    from.map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_images_include_all_stages() {
        let text = "# FROM nothing\nFROM docker.io/rust:1 AS build\nRUN x\n\nFROM debian:12\nCOPY --from=build a b\n";
        assert_eq!(bases(text), ["docker.io/rust:1", "debian:12"]);
    }
}
