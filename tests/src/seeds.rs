//! Seed messages for fuzz targets, which are needed because the decoders would reject most inputs
//! based on the header.
//!
//! The files are in `__fuzz__/TARGET/corpus`, so that bolero can find them as well. `seed-*` are
//! valid messages created by `fuzz_seeds.rs`. `found-*` cover more of the decoder and were found
//! using `cargo xtask fuzz`.

use std::path::PathBuf;

/// Index of a seed, and the changes to apply.
pub type Changes = (u8, Vec<(u8, u16, u8)>);

/// Returns the directory with the seeds of a target.
#[must_use]
pub fn dir(target: &str) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/__fuzz__");
    PathBuf::from(root).join(target).join("corpus")
}

/// Returns the corpus of a target with file names, in order. This includes the seeds and the inputs
/// that were found by fuzzing.
///
/// # Panics
/// Panics if the corpus is empty.
#[must_use]
pub fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    files(target, &["seed-", "found-"])
}

/// Returns the seeds of a target with file names, in order.
///
/// # Panics
/// Panics if there are no seeds.
#[must_use]
pub fn load(target: &str) -> Vec<(String, Vec<u8>)> {
    files(target, &["seed-"])
}

fn files(target: &str, prefixes: &[&str]) -> Vec<(String, Vec<u8>)> {
    let dir = dir(target);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut found: Vec<_> = entries
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
        .filter(|(name, _)| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(name, path)| (name, std::fs::read(path).unwrap()))
        .collect();
    found.sort();
    assert!(!found.is_empty(), "nothing in {}", dir.display());
    found
}

/// Applies changes to a seed: a byte can be replaced, flipped, inserted or removed, or the message
/// can be truncated.
#[must_use]
pub fn change(seeds: &[(String, Vec<u8>)], (which, edits): &Changes) -> Vec<u8> {
    let mut bytes = seeds[usize::from(*which) % seeds.len()].1.clone();
    for (kind, at, byte) in edits.iter().take(6) {
        if bytes.is_empty() {
            break;
        }
        let at = usize::from(*at) % bytes.len();
        match kind % 8 {
            0..3 => bytes[at] = *byte,
            3 => bytes[at] ^= 1 << (byte % 8),
            4 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][usize::from(byte % 5)],
            5 => bytes.insert(at, *byte),
            6 => drop(bytes.remove(at)),
            _ => bytes.truncate(at),
        }
    }
    bytes
}
