//! Creates a copy of the source tree that can be modified, and builds the simulator and tests in
//! it.
//!
//! A build takes minutes, so we put many changes in a single build. Each change is controlled by
//! `riser_state::is_planted("NAME")`, a function that only exists in the copy. An environment
//! variable selects the change to use in a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::daemon::RELEASE;
use crate::{Failure, root, sh};

/// The function that checks if a change is enabled. This is added to a crate that is used by all
/// other crates.
const SWITCH: &str = r#"
/// Returns true if the change with this name is enabled for this run.
#[must_use]
pub fn is_planted(name: &str) -> bool {
    static PLANTED: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("RISER_PLANTED").ok());
    PLANTED.as_deref() == Some(name)
}
"#;

/// Environment variable used to select a change.
const VARIABLE: &str = "RISER_PLANTED";

/// File that the function is added to.
const SWITCHED: &str = "state/src/lib.rs";

/// A git worktree. We keep it for the next run, so that only crates that have changed will be built
/// again.
pub(super) struct Copy {
    tree: PathBuf,
    build: PathBuf,
}

/// Result of a run that should detect a change.
pub(super) enum Run {
    /// All seeds passed.
    Clean,
    /// The first seed that failed, if there are seeds, and the reason.
    Failed(Option<u64>, String),
    /// The run timed out or crashed.
    Hung,
}

impl Copy {
    /// Creates the copy or updates it to the current commit. Changes that have not been committed
    /// are not included.
    pub(super) fn of_head() -> Result<Self, Failure> {
        let directory = root().join(".build/planted");
        let copy = Self {
            tree: directory.join("tree"),
            build: directory.join("build"),
        };
        let head = sh::output(git(&root()).args(["rev-parse", "HEAD"]))?;
        if !copy.tree.join(".git").exists() {
            fs::create_dir_all(&directory)?;
            sh::output(git(&root()).args(["worktree", "prune"]))?;
            let mut add = git(&root());
            add.args(["worktree", "add", "--quiet", "--detach"]);
            sh::output(add.arg(&copy.tree).arg(head.trim()))?;
        } else if sh::output(git(&copy.tree).args(["rev-parse", "HEAD"]))? != head {
            let args = ["checkout", "--force", "--quiet", "--detach", head.trim()];
            sh::output(git(&copy.tree).args(args))?;
        }
        copy.restore()?;
        Ok(copy)
    }

    /// Reverts all changes except the function.
    pub(super) fn restore(&self) -> Result<(), Failure> {
        let others = format!(":!{SWITCHED}");
        sh::output(git(&self.tree).args(["checkout", "--quiet", "--", ".", &others]))?;
        let path = self.path(SWITCHED);
        let text = fs::read_to_string(&path)?;
        // Don't write the file if it already contains the function, because this would rebuild all
        // crates.
        if !text.ends_with(SWITCH) {
            fs::write(path, text + SWITCH)?;
        }
        Ok(())
    }

    /// Applies a patch. If this fails, no file is changed.
    pub(super) fn apply(&self, patch: &Path) -> Result<(), Failure> {
        sh::output(git(&self.tree).arg("apply").arg(patch))?;
        Ok(())
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.tree.join(file)
    }

    pub(super) fn building(&self) -> Command {
        let args = "build --quiet --package riser-sim --features coverage --profile";
        let mut command = self.cargo(&args.split(' ').collect::<Vec<_>>());
        command.arg(RELEASE);
        command
    }

    pub(super) fn simulator(&self, seeds: u64) -> Command {
        let mut simulator = Command::new(self.build.join(RELEASE).join("riser-sim"));
        simulator.args(["--first", "--seeds", &seeds.to_string()]);
        simulator
    }

    /// Returns a Cargo command to run in the copy. We use a separate target directory, because
    /// with a common directory both trees would have to build each other's crates again.
    pub(super) fn cargo(&self, args: &[&str]) -> Command {
        let mut command = sh::cargo(args);
        command.env("CARGO_TARGET_DIR", &self.build);
        command.current_dir(&self.tree);
        command
    }

    /// Runs a program in the copy with a time limit, either with a change or without changes.
    /// `failed` is used to find the failed seed and the reason in its output.
    pub(super) fn run(
        &self,
        program: &Command,
        planted: Option<&str>,
        patience: Duration,
        failed: impl Fn(&str) -> Option<(Option<u64>, String)>,
    ) -> Result<Run, Failure> {
        // With a change, the program may hang at a point where it doesn't count steps.
        let mut command = sh::cmd("timeout", ["--signal=KILL"]);
        command.arg(patience.as_secs().to_string());
        command.arg(program.get_program()).args(program.get_args());
        command.current_dir(&self.tree).stdin(Stdio::null());
        let variables = program.get_envs();
        command.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        command.env_remove(VARIABLE);
        if let Some(name) = planted {
            command.env(VARIABLE, name);
        }
        let out = command.output()?;
        if out.status.success() {
            return Ok(Run::Clean);
        }
        let text = String::from_utf8_lossy(&out.stdout);
        let failed = failed(&text);
        Ok(failed.map_or(Run::Hung, |(seed, why)| Run::Failed(seed, why)))
    }
}

fn git(directory: &Path) -> Command {
    let mut git = sh::cmd("git", ["-C"]);
    git.arg(directory);
    git
}
