//! Copies a tree of real files for the demo and compares two trees.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use walkdir::WalkDir;

use crate::{Failure, sh};

/// Directories with real files; the directory with the most variety is first. The demo copies files
/// from this list until it has enough data.
fn sources() -> Vec<PathBuf> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cargo")));
    let sysroot = sh::output(&mut sh::cmd("rustc", ["--print", "sysroot"]))
        .map(|s| PathBuf::from(s.trim()).join("lib"))
        .ok();
    home.map(|h| h.join("registry/src"))
        .into_iter()
        .chain(["/usr/include", "/usr/share/doc", "/usr/share"].map(PathBuf::from))
        .chain(sysroot)
        .collect()
}

/// Tree entries by path.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct Tree {
    /// Maps a path relative to the root to its entry.
    pub(crate) entries: BTreeMap<PathBuf, Entry>,
    /// Total size of files, in bytes.
    pub(crate) bytes: u64,
}

/// An entry in a tree.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    /// A regular file with the SHA-256 checksum of its data.
    File([u8; 32]),
    /// A symbolic link with its target.
    Link(PathBuf),
    /// A directory.
    Folder,
}

/// Copies at least `enough` bytes of real files to `to` and returns the number of bytes copied.
pub(crate) fn collect(to: &Path, enough: u64) -> Result<u64, Failure> {
    let mut bytes = 0;
    for (i, source) in sources().into_iter().filter(|s| s.is_dir()).enumerate() {
        copy(&source, &to.join(format!("{i}")), enough, &mut bytes)?;
        if bytes >= enough {
            return Ok(bytes);
        }
    }
    Err(format!("found only {bytes} bytes of files to copy, {enough} required").into())
}

fn copy(from: &Path, to: &Path, enough: u64, bytes: &mut u64) -> Result<(), Failure> {
    fs::create_dir_all(to)?;
    let mut entries: Vec<_> = fs::read_dir(from)?.filter_map(Result::ok).collect();
    // Sort the entries, so that every run on this machine will copy the same files.
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if *bytes >= enough {
            return Ok(());
        }
        let (path, kind) = (entry.path(), entry.file_type()?);
        let target = to.join(entry.file_name());
        if kind.is_dir() {
            copy(&path, &target, enough, bytes)?;
        } else if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(&path)?, &target)?;
        // Skip sockets and files that we can't read: we don't depend on specific files.
        } else if kind.is_file() && File::open(&path).is_ok() {
            *bytes += fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

/// Reads a whole tree. `lost+found` in the root is created by the file system, so we ignore it.
pub(crate) fn read(root: &Path) -> Result<Tree, Failure> {
    let mut tree = Tree::default();
    let is_own =
        |entry: &walkdir::DirEntry| entry.depth() != 1 || entry.file_name() != "lost+found";
    for entry in WalkDir::new(root)
        .min_depth(1)
        .into_iter()
        .filter_entry(is_own)
    {
        let entry = entry?;
        let kind = entry.file_type();
        let value = if kind.is_dir() {
            Entry::Folder
        } else if kind.is_symlink() {
            Entry::Link(fs::read_link(entry.path())?)
        } else {
            let (sum, len) = checksum(entry.path())?;
            tree.bytes += len;
            Entry::File(sum)
        };
        tree.entries
            .insert(entry.path().strip_prefix(root)?.to_owned(), value);
    }
    Ok(tree)
}

/// Returns an error with the first difference, if any.
pub(crate) fn compare(expected: &Tree, found: &Tree) -> Result<(), Failure> {
    let paths: BTreeSet<_> = expected
        .entries
        .keys()
        .chain(found.entries.keys())
        .collect();
    for path in paths {
        let how = match (expected.entries.get(path), found.entries.get(path)) {
            (a, b) if a == b => continue,
            (Some(_), None) => "is missing",
            (None, _) => "is unexpected",
            _ => "differs",
        };
        return Err(format!("{} {how}", path.display()).into());
    }
    Ok(())
}

fn checksum(path: &Path) -> Result<([u8; 32], u64), Failure> {
    let sum = |path| -> io::Result<_> {
        let (mut file, mut sum, mut buffer) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
        let mut len = 0;
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                return Ok((sum.finalize().into(), len));
            }
            sum.update(&buffer[..n]);
            len += n as u64;
        }
    };
    sum(path).map_err(|e| format!("{}: {e}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_comparison_finds_differences() {
        let scratch = sh::Scratch::new("tree-test").unwrap();
        let (a, b) = (scratch.join("a"), scratch.join("b"));
        for root in [&a, &b] {
            fs::create_dir_all(root.join("d")).unwrap();
            fs::write(root.join("d/f"), b"one").unwrap();
        }
        let expected = read(&a).unwrap();
        assert_eq!(expected.bytes, 3);
        compare(&expected, &read(&b).unwrap()).unwrap();
        fs::write(b.join("d/f"), b"two").unwrap();
        assert!(compare(&expected, &read(&b).unwrap()).is_err());
        fs::write(b.join("d/f"), b"one").unwrap();
        fs::write(b.join("d/g"), b"").unwrap();
        assert!(compare(&expected, &read(&b).unwrap()).is_err());
        fs::remove_file(b.join("d/g")).unwrap();
        fs::remove_file(b.join("d/f")).unwrap();
        assert!(compare(&expected, &read(&b).unwrap()).is_err());
    }
}
