//! Checks which libraries are loaded by an executable.
//!
//! A statically linked program doesn't load any libraries. A program for another architecture loads
//! different libraries, and a program using musl can't load a library that requires glibc. Names of
//! fields and constants are from elf(5).

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Maximum length of a file header (`Elf64_Ehdr`).
const HEADER: usize = 64;

/// Maximum length of a program header (`Elf64_Phdr`).
const SEGMENT: usize = 56;

/// Maximum number of program headers to check. This is larger than what linkers generate.
const MAX_SEGMENTS: u16 = 64;

/// Maximum length of the loader path.
const MAX_PATH: u64 = 4096;

/// Type of the segment with the loader path (`PT_INTERP`).
const INTERPRETER: u64 = 3;

/// Returns the reason why a program would not load a library, as the rest of a sentence after its
/// name. Returns `None` for a script, or if a file can't be read.
pub(super) fn obstacle(program: &Path, library: &Path) -> Option<&'static str> {
    let program = Executable::open(program).ok()??;
    let library = Executable::open(library).ok()??;
    if program.architecture() != library.architecture() {
        return Some("has another architecture than the libraries, and cannot load them");
    }
    let Some(loader) = program.loader().ok()? else {
        return Some(
            "is linked statically: it loads no libraries, and uses the host's RDMA devices",
        );
    };
    let is_musl = loader.windows(7).any(|part| part == b"ld-musl");
    (is_musl != cfg!(target_env = "musl")).then_some(
        "uses another C library (musl or glibc) than the libraries, and cannot load them",
    )
}

/// A little-endian ELF file.
struct Executable {
    file: File,
    header: [u8; HEADER],
}

impl Executable {
    /// Opens a file. Returns `None` if it isn't an ELF file.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let mut file = File::open(path)?;
        let mut header = [0; HEADER];
        // A script may be shorter than the header.
        let len = file.by_ref().take(HEADER as u64).read(&mut header)?;
        let is_elf = len == HEADER && header.starts_with(b"\x7fELF") && header[5] == 1;
        Ok(is_elf.then_some(Self { file, header }))
    }

    /// Returns the class (32 or 64 bits) and machine.
    fn architecture(&self) -> (u8, u64) {
        (self.header[4], number(&self.header[18..20]))
    }

    /// Returns the loader path, or `None` if the program is statically linked.
    fn loader(&self) -> io::Result<Option<Vec<u8>>> {
        // Positions of fields for 64 and 32 bits.
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

/// Parses a little-endian number of at most eight bytes.
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

    /// A file created by a test.
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

    /// Creates a modified copy of this executable.
    fn changed(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Made {
        let mut bytes = std::fs::read(own()).unwrap();
        change(&mut bytes);
        Made::new(name, &bytes)
    }

    fn own() -> PathBuf {
        std::env::current_exe().unwrap()
    }

    #[test]
    fn incompatible_programs_are_detected() {
        // This executable can load libraries with the same properties.
        assert_eq!(obstacle(&own(), &own()), None);
        let script = Made::new("script", b"#!/bin/sh\n");
        assert_eq!(obstacle(&script.0, &own()), None);
        assert_eq!(obstacle(Path::new("/does/not/exist"), &own()), None);
        let loader = Executable::open(&own()).unwrap().unwrap().loader();
        let loader = loader.unwrap().unwrap();
        let says = |made: &Made| obstacle(&made.0, &own()).unwrap_or_default();
        let other = changed("machine", |bytes| bytes[18] ^= 1);
        assert!(says(&other).contains("architecture"));
        // No segments, or all segments except for the loader path.
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
        // Offsets outside of the file.
        let broken = changed("broken", |bytes| bytes[32..40].fill(0xff));
        assert_eq!(obstacle(&broken.0, &own()), None);
        let short = Made::new("short", &std::fs::read(own()).unwrap()[..HEADER]);
        assert_eq!(obstacle(&short.0, &own()), None);
    }
}
