//! A copy of the tree, in which sources are changed, and the simulator and tests are built.
//!
//! A build takes minutes, so many changes go into one: each is behind a switch,
//! `riser_state::is_planted("NAME")`, which the copy has and the tree does not, and the environment
//! names the one that a run has.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::daemon::OPTIMIZED;
use crate::{Failure, root, sh};

/// The switch, at the end of the crate that all others use.
const SWITCH: &str = r#"
/// Whether this run has the change of that name.
#[must_use]
pub fn is_planted(name: &str) -> bool {
    static PLANTED: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("RISER_PLANTED").ok());
    PLANTED.as_deref() == Some(name)
}
"#;

/// Names the change that a run has.
const VARIABLE: &str = "RISER_PLANTED";

/// The crate that has the switch.
const SWITCHED: &str = "state/src/lib.rs";

/// A working tree of git, which stays for the next time: only crates that have changed are built
/// again.
pub(super) struct Copy {
    tree: PathBuf,
    build: PathBuf,
}

/// The end of a run of what has to notice a change.
pub(super) enum Run {
    /// No seed has failed.
    Clean,
    /// The first seed that has failed, where there are seeds, and why.
    Failed(Option<u64>, String),
    /// It did not end in time, or died.
    Hung,
}

impl Copy {
    /// Makes the copy, or brings it to the present commit. What is not committed is not in it.
    pub(super) fn of_head() -> Result<Self, Failure> {
        let folder = root().join(".build/planted");
        let copy = Self {
            tree: folder.join("tree"),
            build: folder.join("build"),
        };
        let head = sh::output(git(&root()).args(["rev-parse", "HEAD"]))?;
        if !copy.tree.join(".git").exists() {
            fs::create_dir_all(&folder)?;
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

    /// Takes back all changes but the switch.
    pub(super) fn restore(&self) -> Result<(), Failure> {
        let others = format!(":!{SWITCHED}");
        sh::output(git(&self.tree).args(["checkout", "--quiet", "--", ".", &others]))?;
        let path = self.path(SWITCHED);
        let text = fs::read_to_string(&path)?;
        // Untouched where it is there already, or every crate would be built again.
        if !text.ends_with(SWITCH) {
            fs::write(path, text + SWITCH)?;
        }
        Ok(())
    }

    /// Applies a patch to what is there, or nothing of it.
    pub(super) fn apply(&self, patch: &Path) -> Result<(), Failure> {
        sh::output(git(&self.tree).arg("apply").arg(patch))?;
        Ok(())
    }

    /// Path of a source.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.tree.join(file)
    }

    /// Cargo, about to build the simulator, in a folder of its own: in that of the tree, each would
    /// build the other's crates again.
    pub(super) fn building(&self) -> Command {
        let mut command = sh::cargo(["build", "--quiet", "--package", "riser-sim", "--profile"]);
        command.args([OPTIMIZED, "--features", "coverage", "--target-dir"]);
        command.arg(&self.build);
        command.current_dir(&self.tree);
        command
    }

    /// The simulator, about to run seeds until one fails.
    pub(super) fn simulator(&self, seeds: u64) -> Command {
        let mut simulator = Command::new(self.build.join(OPTIMIZED).join("riser-sim"));
        simulator.args(["--first", "--seeds", &seeds.to_string()]);
        simulator
    }

    /// Cargo, about to build and run tests of a package, which these arguments choose.
    pub(super) fn testing(&self, package: &str, harness: &[&str]) -> Command {
        let mut command = sh::cargo(["test", "--quiet", "--package", package]);
        command.args(harness).arg("--target-dir").arg(&self.build);
        command.current_dir(&self.tree);
        command
    }

    /// Runs a program of the copy for so long at most, with a change or without any. `failed` finds
    /// in its output which seed has failed, and why.
    pub(super) fn run(
        &self,
        program: &Command,
        planted: Option<&str>,
        patience: Duration,
        failed: impl Fn(&str) -> Option<(Option<u64>, String)>,
    ) -> Result<Run, Failure> {
        // A change may have the program hang where it counts no steps.
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

/// Git in a folder.
fn git(folder: &Path) -> Command {
    let mut git = sh::cmd("git", ["-C"]);
    git.arg(folder);
    git
}
