//! Commands that convert disks between the files of LIO and protected files.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use riser_scsi::config::ProtectionType;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::Failure;
use super::request::{Output, show};
use crate::backend::lio::{self, Conversion, ConversionError, LioFiles, Progress};
use crate::units::bytes;

/// Interval between two lines of progress, on a terminal and elsewhere.
const INTERVALS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

/// Options of `riserd import-disk`.
#[derive(Debug, clap::Args)]
pub(super) struct Import {
    /// Image of the backstore.
    image: PathBuf,
    /// File to create.
    file: PathBuf,
    /// Type of the protection information (`pi_prot_type`).
    #[arg(long = "type", value_name = "TYPE", value_parser = type_parser())]
    protection_type: ProtectionType,
    /// Block size of the backstore in bytes.
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = block_size_parser())]
    block_size: u32,
    /// File with the protection information [default: IMAGE.protection].
    #[arg(long, value_name = "FILE")]
    protection: Option<PathBuf>,
    /// Select the format of the result.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
}

/// Options of `riserd export-disk`.
#[derive(Debug, clap::Args)]
pub(super) struct Export {
    /// File of the disk.
    file: PathBuf,
    /// Image to create, together with IMAGE.protection.
    image: PathBuf,
    /// Select the format of the result.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
}

fn type_parser() -> impl TypedValueParser<Value = ProtectionType> {
    PossibleValuesParser::new(["1", "3"]).map(|text| match text.as_str() {
        "1" => ProtectionType::Type1,
        _ => ProtectionType::Type3,
    })
}

fn block_size_parser() -> impl TypedValueParser<Value = u32> {
    PossibleValuesParser::new(["512", "4096"]).map(|text| match text.as_str() {
        "512" => 512,
        _ => 4096,
    })
}

/// Result of a command.
#[derive(Debug, Serialize)]
struct Report<'a> {
    file: &'a Path,
    image: &'a Path,
    protection_type: u8,
    block_size: u32,
    blocks: u64,
    verified: u64,
    unchecked: u64,
}

impl<'a> Report<'a> {
    fn new(file: &'a Path, image: &'a Path, conversion: Conversion) -> Self {
        Self {
            file,
            image,
            protection_type: conversion.protection_type.number(),
            block_size: conversion.block_size,
            blocks: conversion.blocks,
            verified: conversion.blocks - conversion.unchecked,
            unchecked: conversion.unchecked,
        }
    }

    fn text(&self, action: &str) -> String {
        format!(
            "{action} {} blocks of {} bytes, with protection information of type {}: {} verified, \
             {} without checks",
            self.blocks, self.block_size, self.protection_type, self.verified, self.unchecked
        )
    }
}

impl Import {
    /// Executes the command.
    pub(super) fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let mut files = LioFiles::new(&self.image);
        if let Some(protection) = self.protection {
            files.protection = protection;
        }
        let conversion = convert(self.output, |watch| {
            lio::import(
                &files,
                self.protection_type,
                self.block_size,
                &self.file,
                watch,
            )
        })?;
        let report = Report::new(&self.file, &self.image, conversion);
        show(out, self.output, &report, |report| {
            format!(
                "{}\n    {}",
                report.text("imported"),
                backend(&self.file, &conversion)
            )
        })
    }
}

impl Export {
    /// Executes the command.
    pub(super) fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let files = LioFiles::new(&self.image);
        let conversion = convert(self.output, |watch| lio::export(&self.file, &files, watch))?;
        let report = Report::new(&self.file, &self.image, conversion);
        show(out, self.output, &report, |report| report.text("exported"))
    }
}

/// Returns the backend for an imported file, in the configuration format.
fn backend(file: &Path, conversion: &Conversion) -> String {
    // The daemon may have another working directory.
    let path = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let block_size = match conversion.block_size {
        512 => String::new(),
        size => format!("block_size: {size}, "),
    };
    format!(
        "disk: {{ kind: file, path: {}, {block_size}protection: {{ type: {} }} }}",
        serde_json::Value::from(path.to_string_lossy()),
        conversion.protection_type.number()
    )
}

/// Runs a conversion. Shows its progress on standard error, and stops it on SIGINT and SIGTERM.
fn convert(
    output: Output,
    run: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<Conversion, ConversionError>,
) -> Result<Conversion, Failure> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_stopped)).map_err(Failure::run_time)?;
    }
    let mut meter = Meter::new();
    let result = run(&mut |progress| {
        if output == Output::Text {
            meter.show(progress);
        }
        match is_stopped.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    meter.clear();
    result.map_err(Failure::run_time)
}

/// Shows the progress of a command at intervals.
struct Meter {
    is_terminal: bool,
    interval: Duration,
    next: Instant,
    is_shown: bool,
}

impl Meter {
    fn new() -> Self {
        let is_terminal = io::stderr().is_terminal();
        let [terminal, other] = INTERVALS;
        let interval = if is_terminal { terminal } else { other };
        Self {
            is_terminal,
            interval,
            next: Instant::now() + interval,
            is_shown: false,
        }
    }

    fn show(&mut self, progress: Progress) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + self.interval;
        self.is_shown = true;
        let percent = progress.done as f64 * 100.0 / progress.total as f64;
        let text = format!("{percent:.1} % of {}", bytes(progress.total));
        // This is only informative, so ignore errors.
        let _ = match self.is_terminal {
            true => write!(io::stderr(), "\r{text}\x1b[K"),
            false => writeln!(io::stderr(), "riserd: {text}"),
        };
    }

    /// Removes the progress from a terminal.
    fn clear(&self) {
        if self.is_terminal && self.is_shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::super::{Cli, FAILURE, dispatch};
    use super::*;

    /// Runs a command line in a directory. Returns the output, or the exit code and the error.
    fn riserd(dir: &Path, args: &[&str]) -> Result<String, (u8, String)> {
        let args = args.iter().map(|arg| match *arg {
            name if name.starts_with("image") || name.starts_with("disk") => {
                dir.join(name).display().to_string()
            }
            other => other.to_owned(),
        });
        let cli = Cli::try_parse_from(std::iter::once("riserd".to_owned()).chain(args)).unwrap();
        let mut out = Vec::new();
        match dispatch(cli.command, |_| Ok(()), &mut out) {
            Ok(_) => Ok(String::from_utf8(out).unwrap()),
            Err(failure) => Err((failure.code, failure.text)),
        }
    }

    #[test]
    fn disk_is_imported_and_exported() {
        let dir = std::env::temp_dir().join(format!("riserd-convert-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("image"), [0; 8192]).unwrap();
        // The second block has a tuple.
        let tuples = [[0xff; 8], [0, 0, 0, 0, 0, 0, 0, 1]].concat();
        fs::write(dir.join("image.protection"), &tuples).unwrap();
        let import = ["import-disk", "--type", "1", "--block-size", "4096"];
        let said = riserd(&dir, &[&import as &[_], &["image", "disk"]].concat()).unwrap();
        let disk = dir.join("disk");
        let expected = format!(
            "imported 2 blocks of 4096 bytes, with protection information of type 1: 1 verified, 1 \
             without checks\n    disk: {{ kind: file, path: \"{}\", block_size: 4096, protection: {{ \
             type: 1 }} }}\n",
            disk.display()
        );
        assert_eq!(said, expected);
        let said = riserd(&dir, &["export-disk", "-o", "json", "disk", "image2"]).unwrap();
        let document: serde_json::Value = serde_json::from_str(&said).unwrap();
        let expected = serde_json::json!({
            "file": disk, "image": dir.join("image2"), "protection_type": 1, "block_size": 4096,
            "blocks": 2, "verified": 1, "unchecked": 1,
        });
        assert_eq!(document, expected);
        assert_eq!(fs::read(dir.join("image2.protection")).unwrap(), tuples);
        // A separate path, with the tuple of another block.
        fs::write(
            dir.join("image.other"),
            [&tuples[8..], &tuples[8..]].concat(),
        )
        .unwrap();
        let other = ["--protection", "image.other", "image", "disk2"];
        let (code, said) = riserd(&dir, &[&import as &[_], &other].concat()).unwrap_err();
        assert_eq!(code, FAILURE);
        assert!(said.ends_with("\n    LBA 0: reference_tag"), "{said}");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn options_of_lio_are_checked() {
        let parse = |args: &[&str]| {
            let command = ["riserd", "import-disk", "image", "disk"];
            Cli::try_parse_from([&command, args].concat()).is_ok()
        };
        assert!(parse(&["--type", "1"]));
        assert!(parse(&["--type", "3", "--block-size", "512"]));
        for wrong in [
            &[] as &[_],
            &["--type", "2"],
            &["--type", "1", "--block-size", "520"],
        ] {
            assert!(!parse(wrong), "{wrong:?}");
        }
    }
}
