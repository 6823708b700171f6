//! Messages to begin with, for fuzz targets whose decoders refuse most bytes at their headers.
//!
//! They are files in `__fuzz__/TARGET/corpus`, where bolero finds them, too: `seed-*` are valid
//! messages, which `fuzz_seeds.rs` makes; `found-*` reach more of the decoder, and `cargo xtask fuzz`
//! has found them.

use std::path::PathBuf;

/// Which seed, and what happens to it.
pub type Changes = (u8, Vec<(u8, u16, u8)>);

/// Where the seeds of a target are.
#[must_use]
pub fn dir(target: &str) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/__fuzz__");
    PathBuf::from(root).join(target).join("corpus")
}

/// The corpus of a target: its seeds and what was found from them, with their names, in order.
///
/// # Panics
/// If there is nothing.
#[must_use]
pub fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    files(target, &["seed-", "found-"])
}

/// The seeds of a target with their names, in order.
///
/// # Panics
/// If there are none.
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

/// A seed with a few changes: bytes replaced, flipped, inserted, removed, or cut off from there on.
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
