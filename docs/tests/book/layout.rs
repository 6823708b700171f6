//! Compares the code layout in `ARCHITECTURE.md` with the manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use riser_docs::root;

use crate::all_right;

/// Returns the directories of all packages in the workspace, relative to the repository's root.
fn packages() -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, members) = manifest.split_once("\nmembers = [\n").unwrap();
    let (members, _) = members.split_once("\n]").unwrap();
    let members = members
        .lines()
        .map(|line| line.trim_matches([' ', '"', ',']));
    members.map(PathBuf::from).collect()
}

/// Returns the packages of the workspace that a package depends on, except in tests.
fn dependencies(package: &Path) -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
    let lines = manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]");
    let lines = lines.skip(1).take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.strip_prefix("riser-")?.split(['.', ' ']).next());
    names.map(str::to_owned).collect()
}

fn name(package: &Path) -> String {
    package.file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn dependency_picture_matches_manifests() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let rows = text.lines().filter_map(|line| {
        let (package, needs) = line.split_once(" → ")?;
        let package = package.trim_end();
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
        let needs: BTreeSet<_> = needs.split(", ").map(str::to_owned).collect();
        (is_name(package) && needs.iter().all(|name| is_name(name))).then_some((package, needs))
    });
    let rows: BTreeMap<_, _> = rows.collect();
    let mut wrong = Vec::new();
    let is_test =
        |name: &str| name.starts_with("test") || ["docs", "sim", "peers", "xtask"].contains(&name);
    for package in packages() {
        let (needs, name) = (dependencies(&package), name(&package));
        let drawn = rows.get(&*name).cloned().unwrap_or_default();
        if !is_test(&name) && drawn != needs {
            wrong.push(format!(
                "{name} is drawn with {drawn:?}, and needs {needs:?}"
            ));
        }
    }
    all_right(&wrong);
}

#[test]
fn packages_are_in_code_layout() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, layout) = text.split_once("## Code layout\n\n```\n").unwrap();
    let (layout, _) = layout.split_once("```").unwrap();
    let mut wrong = Vec::new();
    for package in packages() {
        let directory = format!("{}/", package.display());
        let is_listed = layout.lines().any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(&directory)
                || words.any(|word| word.trim_end_matches(':') == directory.trim_end_matches('/'))
        });
        if !is_listed {
            wrong.push(format!("the code layout lacks {directory}"));
        }
    }
    all_right(&wrong);
}
