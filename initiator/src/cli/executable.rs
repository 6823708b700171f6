//! What the file of a program says about the libraries that it loads.
//!
//! A program that is linked statically loads none, one of another architecture loads others, and that of
//! musl cannot load a library that needs glibc. Fields and numbers are those of elf(5).

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Length of the longest header of a file (`Elf64_Ehdr`).
const HEADER: usize = 64;

/// Length of the longest header of a segment (`Elf64_Phdr`).
const SEGMENT: usize = 56;

/// Segments that are looked at: more than any linker makes.
const MAX_SEGMENTS: u16 = 64;

/// Longest path of a loader.
const MAX_PATH: u64 = 4096;

/// Type of the segment with the path of the loader (`PT_INTERP`).
const INTERPRETER: u64 = 3;

/// Why a program would not load a library, in words behind its name. A script, and what cannot be
/// read, has no such reason.
pub(super) fn obstacle(program: &Path, library: &Path) -> Option<&'static str> {
    let program = Executable::open(program).ok()??;
    let library = Executable::open(library).ok()??;
    if program.architecture() != library.architecture() {
        return Some("is for another architecture than the libraries, and will not load them");
    }
    let Some(loader) = program.loader().ok()? else {
        return Some(
            "is linked statically: it loads no libraries, and sees the host's RDMA devices",
        );
    };
    let is_musl = loader.windows(7).any(|part| part == b"ld-musl");
    (is_musl != cfg!(target_env = "musl"))
        .then_some("has another C library (musl or glibc) than the libraries, and cannot load them")
}

/// An ELF file for a machine with little-endian numbers.
struct Executable {
    file: File,
    header: [u8; HEADER],
}

impl Executable {
    /// Opens a file; none where it is another kind of file.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let mut file = File::open(path)?;
        let mut header = [0; HEADER];
        // Short scripts are shorter.
        let len = file.by_ref().take(HEADER as u64).read(&mut header)?;
        let is_elf = len == HEADER && header.starts_with(b"\x7fELF") && header[5] == 1;
        Ok(is_elf.then_some(Self { file, header }))
    }

    /// Class (32 or 64 bits) and machine.
    fn architecture(&self) -> (u8, u64) {
        (self.header[4], number(&self.header[18..20]))
    }

    /// Path of its loader; none where it is linked statically.
    fn loader(&self) -> io::Result<Option<Vec<u8>>> {
        // Where fields are, with 64 bits and with 32.
        let is_long = self.header[4] == 2;
        let (table, size, count) = match is_long {
            true => (32..40, 54..56, 56..58),
            false => (28..32, 42..44, 44..46),
        };
        let (offset, length) = match is_long {
            true => (8..16, 32..40),
            false => (4..8, 16..20),
        };
        let field = |range: std::ops::Range<usize>| number(&self.header[range]);
        let (table, size) = (field(table), field(size));
        for at in 0..field(count).min(MAX_SEGMENTS.into()) {
            let mut segment = [0; SEGMENT];
            let whole = &mut segment[..if is_long { SEGMENT } else { 32 }];
            self.file
                .read_exact_at(whole, table.saturating_add(at * size))?;
            if number(&segment[..4]) == INTERPRETER {
                let mut path = vec![0; number(&segment[length.clone()]).min(MAX_PATH) as usize];
                let at = number(&segment[offset.clone()]);
                self.file.read_exact_at(&mut path, at)?;
                return Ok(Some(path));
            }
        }
        Ok(None)
    }
}

/// A little-endian number of eight bytes at most.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |n, byte| n << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A file of a test.
    struct Made(PathBuf);

    impl Made {
        fn new(name: &str, bytes: &[u8]) -> Self {
            let name = format!("riser-executable-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, bytes).unwrap();
            Self(path)
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// The file of this test with some bytes changed.
    fn changed(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Made {
        let mut bytes = std::fs::read(own()).unwrap();
        change(&mut bytes);
        Made::new(name, &bytes)
    }

    fn own() -> PathBuf {
        std::env::current_exe().unwrap()
    }

    #[test]
    fn programs_that_load_other_libraries_are_known() {
        // As this test loads those of its own kind.
        assert_eq!(obstacle(&own(), &own()), None);
        let script = Made::new("script", b"#!/bin/sh\n");
        assert_eq!(obstacle(&script.0, &own()), None);
        assert_eq!(obstacle(Path::new("/does/not/exist"), &own()), None);
        let loader = Executable::open(&own()).unwrap().unwrap().loader();
        let loader = loader.unwrap().unwrap();
        let says = |made: &Made| obstacle(&made.0, &own()).unwrap_or_default();
        let other = changed("machine", |bytes| bytes[18] ^= 1);
        assert!(says(&other).contains("architecture"));
        // No segments, or one of each kind but the loader's.
        let alone = changed("static", |bytes| bytes[56..58].fill(0));
        assert!(says(&alone).contains("statically"));
        let musl = changed("musl", |bytes| {
            let found = bytes.windows(loader.len()).position(|part| part == loader);
            let at = found.unwrap();
            bytes[at..at + 16].copy_from_slice(b"/lib/ld-musl-x86");
        });
        assert_eq!(
            says(&musl).contains("C library"),
            cfg!(not(target_env = "musl"))
        );
        // Numbers that lead out of the file.
        let broken = changed("broken", |bytes| bytes[32..40].fill(0xff));
        assert_eq!(obstacle(&broken.0, &own()), None);
        let short = Made::new("short", &std::fs::read(own()).unwrap()[..HEADER]);
        assert_eq!(obstacle(&short.0, &own()), None);
    }
}
