//! Valid messages to begin with, for fuzz targets whose decoders refuse most bytes at their headers.
//!
//! The seeds of a target are the files `seed-*` in `__fuzz__/TARGET/corpus`, where bolero finds them, too;
//! `fuzz_seeds.rs` makes them.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::PathBuf;

/// Which seed, and what happens to it.
pub(crate) type Changes = (u8, Vec<(u8, u16, u8)>);

/// Where the seeds of a target are.
pub(crate) fn dir(target: &str) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/__fuzz__");
    PathBuf::from(root).join(target).join("corpus")
}

/// The seeds of a target with their names, in order.
///
/// # Panics
/// If there are none.
pub(crate) fn load(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = dir(target);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut seeds: Vec<_> = entries
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
        .filter(|(name, _)| name.starts_with("seed-"))
        .map(|(name, path)| (name, std::fs::read(path).unwrap()))
        .collect();
    seeds.sort();
    assert!(!seeds.is_empty(), "no seeds in {}", dir.display());
    seeds
}

/// A seed with a few changes: bytes replaced, flipped, inserted, removed, or cut off from there on.
pub(crate) fn change(seeds: &[(String, Vec<u8>)], (which, edits): &Changes) -> Vec<u8> {
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
