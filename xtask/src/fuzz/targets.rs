//! List of fuzz targets, which are bolero tests, by topic.

use std::path::PathBuf;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::{cases, root};

/// A fuzz target; `xtask/cases/fuzz.toml` describes the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    pub(super) name: String,
    pub(super) about: String,
    pub(super) package: String,
    pub(super) program: String,
    modules: String,
    directory: String,
}

/// All targets.
pub(super) static TARGETS: LazyLock<Vec<Target>> =
    LazyLock::new(|| cases::read(include_str!("../../cases/fuzz.toml")));

impl Target {
    /// Returns the directory with the files of this target: `corpus`, which is part of the
    /// repository, and `crashes`.
    pub(super) fn directory(&self) -> PathBuf {
        root()
            .join(&self.directory)
            .join("__fuzz__")
            .join(&self.name)
    }

    pub(super) fn test(&self) -> String {
        format!("{}{}", self.modules, self.name)
    }

    pub(super) fn program_arg(&self) -> String {
        match self.program.as_str() {
            "lib" => "--lib".to_owned(),
            test => format!("--test={test}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use walkdir::WalkDir;

    use super::*;

    /// Maximum size of an input in the repository and maximum total size, in bytes.
    const LONGEST: u64 = 16 << 10;
    const ALL: u64 = 512 << 10;

    #[test]
    fn targets_match_tests_in_directory() {
        let names: BTreeSet<_> = TARGETS.iter().map(|target| &target.name).collect();
        assert_eq!(names.len(), TARGETS.len());
        for target in TARGETS.iter() {
            let function = format!("fn {}() {{", target.name);
            let files = fs::read_dir(root().join(&target.directory)).unwrap();
            let is_there = files.map(|file| file.unwrap().path()).any(|file| {
                let text = fs::read_to_string(file).unwrap_or_default();
                let at = text.find(&function);
                at.is_some_and(|at| text[at..].contains("bolero::check!("))
            });
            assert!(is_there, "{} in {}", target.name, target.directory);
        }
    }

    /// We might not notice if the inputs found by a fuzzer become too large.
    #[test]
    fn targets_have_small_corpus() {
        let mut sum = 0;
        for target in TARGETS.iter() {
            let corpus = target.directory().join("corpus");
            let files = WalkDir::new(&corpus).into_iter().filter_map(Result::ok);
            let files: Vec<_> = files.filter(|file| file.file_type().is_file()).collect();
            assert!(!files.is_empty(), "{}", corpus.display());
            for file in files {
                let len = file.metadata().unwrap().len();
                assert!(len <= LONGEST, "{}", file.path().display());
                sum += len;
            }
        }
        assert!(sum <= ALL, "{sum} bytes");
    }
}
