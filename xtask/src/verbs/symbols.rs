//! Checks that our libraries export all symbols of the Debian libraries with the same versions.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Failure, sh};

/// Libraries that are replaced by ours.
const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libibumad.so.3"];

/// Compares our library with the libraries on this machine and returns the number of symbols for
/// each.
///
/// # Errors
/// Returns the symbols that are missing in our library.
pub(super) fn compare(ours: &Path) -> Result<String, Failure> {
    let has = exports(ours)?;
    let mut said = Vec::new();
    let mut missing = Vec::new();
    for library in LIBRARIES {
        let path = find(library).ok_or_else(|| format!("{library} is missing"))?;
        let wanted = exports(&path)?;
        said.push(format!("{library}: {}", wanted.len()));
        missing.extend(wanted.difference(&has).cloned());
    }
    match missing.is_empty() {
        true => Ok(said.join(", ")),
        false => Err(format!("{} are missing: {}", missing.len(), missing.join(" ")).into()),
    }
}

pub(super) fn find(library: &str) -> Option<PathBuf> {
    // The library is in a directory with the architecture name.
    let directories = fs::read_dir("/usr/lib").ok()?;
    let files = directories
        .flatten()
        .map(|directory| directory.path().join(library));
    files.into_iter().find(|file| file.is_file())
}

fn exports(library: &Path) -> Result<BTreeSet<String>, Failure> {
    let text = sh::output(sh::cmd("nm", ["-D", "--defined-only"]).arg(library))?;
    let found = parse(&text);
    match found.is_empty() {
        true => Err(format!("{} has no symbols with versions", library.display()).into()),
        false => Ok(found),
    }
}

/// Returns `name@@VERSION` for each symbol with a version. Entries for a version itself (type `A`)
/// are skipped.
fn parse(text: &str) -> BTreeSet<String> {
    let symbol = |line: &str| {
        let mut fields = line.split_whitespace().rev();
        let (name, kind) = (fields.next()?, fields.next()?);
        (kind != "A" && name.contains('@')).then(|| name.to_owned())
    };
    text.lines().filter_map(symbol).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_have_their_versions() {
        let text = "0000000000000000 A IBVERBS_1.0\n000000000000d0a0 T ibv_alloc_pd@@IBVERBS_1.1\n\
                    000000000000d0a0 T ibv_alloc_pd@IBVERBS_1.0\n0000000000012345 T _init\n\
                    0000000000000000 A IBVERBS_1.1@@IBVERBS_1.1\n";
        let wanted = ["ibv_alloc_pd@@IBVERBS_1.1", "ibv_alloc_pd@IBVERBS_1.0"];
        assert_eq!(parse(text), wanted.map(str::to_owned).into());
    }

    #[test]
    fn function_list_contains_missing_functions() {
        let table = std::fs::read_to_string(crate::root().join("rdma-compat/symbols.txt"));
        let table = table.unwrap();
        let lines = table.lines().filter(|line| !line.starts_with('#'));
        let absent: Vec<_> = lines
            .filter_map(|line| line.split_once(' ')?.0.split_once('@'))
            .collect();
        let text = std::fs::read_to_string(crate::root().join("docs/verbs.md")).unwrap();
        let (_, section) = text
            .split_once("that the drop-in library does not provide")
            .unwrap();
        let numbers = section.lines().filter_map(|line| {
            let number = line.split('|').nth(2)?.trim();
            number.parse::<usize>().ok()
        });
        assert_eq!(numbers.sum::<usize>(), absent.len());
        let names: Vec<_> = section.split('`').skip(1).step_by(2).collect();
        for (function, version) in absent {
            let is_named = names.iter().any(|name| match name.strip_suffix('*') {
                Some(beginning) => function.starts_with(beginning),
                None => *name == function,
            });
            let is_of_group = version == "IBVERBS_1.0" || version.ends_with("PRIVATE_34");
            assert!(is_named || is_of_group, "{function}");
        }
    }
}
