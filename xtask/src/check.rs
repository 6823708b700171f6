//! `cargo xtask check`: formatting, lints, documentation, quick tests and tidiness. This only takes
//! a few minutes.
//!
//! The tests are set by the nextest profile `check` (`.config/nextest.toml`). They don't require a
//! peer, root or a network namespace.

use crate::steps::{
    self, CLIPPY, DEPENDENCIES, DOC, FMT, Run, Selection, Step, Suite, TIDY, check, step,
};
use crate::tally::Outcome;
use crate::{Failure, sh};

const STEPS: &[Step] = &[
    FMT,
    TIDY,
    DEPENDENCIES,
    CLIPPY,
    DOC,
    step("quick tests", |_| quick_tests()).requiring_crate("cargo-nextest"),
];

/// Runs the steps and returns an error if any step failed.
pub(crate) fn run(selection: &Selection) -> Result<(), Failure> {
    let run = Run {
        suite: Suite::Everyday,
        lanes: 1,
        until: None,
    };
    steps::run(STEPS, selection, &run)
}

fn quick_tests() -> Outcome {
    let args = "nextest run --workspace --profile check --cargo-quiet";
    check(sh::cargo(args.split(' ')))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::root;

    #[test]
    fn toolchain_is_minimum_supported_version() {
        let read = |name: &str| -> toml::Table {
            let text = fs::read_to_string(root().join(name)).unwrap();
            text.parse().unwrap()
        };
        let (manifest, toolchain) = (read("Cargo.toml"), read("rust-toolchain.toml"));
        let oldest = manifest["workspace"]["package"]["rust-version"].as_str();
        let used = toolchain["toolchain"]["channel"].as_str().unwrap();
        assert_eq!(used.rsplit_once('.').map(|(version, _)| version), oldest);
    }
}
