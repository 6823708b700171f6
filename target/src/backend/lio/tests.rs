//! Tests of conversions between files of LIO and protected files.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use riser_config::{Direct, Source, Spec};
use riser_scsi::config::{Protection, ProtectionType};
use riser_scsi::protection::{ProtectionError, Tuple, guard};

use super::*;
use crate::backend::sys::{self, Lock};
use crate::backend::{Header, Layout, OpenError, Store};
use crate::patience::at_once;

/// A directory with files of LIO.
struct Rig {
    dir: PathBuf,
    block_size: u32,
}

impl Rig {
    /// Creates a disk with a hole of several pieces, and no tuple for the blocks in it.
    fn new(name: &str, block_size: u32) -> Self {
        let dir = std::env::temp_dir().join(format!("riserd-lio-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let rig = Self { dir, block_size };
        let image = File::create(rig.files().image).unwrap();
        image.set_len(5 << 20).unwrap();
        let blocks = (5 << 20) / u64::from(block_size);
        fs::write(rig.files().protection, vec![u8::MAX; (blocks * 8) as usize]).unwrap();
        for lba in [0, 1, 40, blocks - 1] {
            rig.write(lba, 0, lba as u32);
        }
        rig
    }

    fn files(&self) -> LioFiles {
        LioFiles::new(&self.dir.join("image"))
    }

    fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    fn block(&self, lba: u64) -> Vec<u8> {
        (0..self.block_size as usize)
            .map(|at| (at / 3) as u8 ^ lba as u8 ^ 0x5a)
            .collect()
    }

    /// Writes a block with these tags.
    fn write(&self, lba: u64, application_tag: u16, reference_tag: u32) {
        let block = self.block(lba);
        let tuple = Tuple {
            guard: guard(&block),
            application_tag,
            reference_tag,
        };
        let open = |path| File::options().write(true).open(path).unwrap();
        let at = lba * u64::from(self.block_size);
        open(self.files().image).write_all_at(&block, at).unwrap();
        self.write_tuple(lba, tuple);
    }

    fn write_tuple(&self, lba: u64, tuple: Tuple) {
        let file = File::options().write(true).open(self.files().protection);
        file.unwrap()
            .write_all_at(&tuple.encode(), lba * 8)
            .unwrap();
    }

    fn import(&self, protection_type: ProtectionType) -> Result<Conversion, ConversionError> {
        let watch = &mut |_| ControlFlow::Continue(());
        at_once(|| {
            import(
                &self.files(),
                protection_type,
                self.block_size,
                &self.disk(),
                watch,
            )
        })
    }

    fn export(&self, to: &LioFiles) -> Result<Conversion, ConversionError> {
        let watch = &mut |_| ControlFlow::Continue(());
        at_once(|| export(&self.disk(), to, watch))
    }

    fn spec(&self, protection_type: ProtectionType) -> Spec {
        Spec {
            name: "disk".into(),
            source: Source::File {
                path: self.disk(),
                size: None,
                create: false,
            },
            block_size: self.block_size,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            protection: Some(Protection::new(protection_type)),
            faults: None,
        }
    }

    /// Returns the names of all files.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn round_trip_keeps_blocks_and_tuples() {
    for block_size in [512, 4096] {
        for protection_type in [ProtectionType::Type1, ProtectionType::Type3] {
            let rig = Rig::new("round-trip", block_size);
            // Not checked, although neither tag is correct.
            rig.write(41, 0xffff, u32::MAX);
            rig.write_tuple(
                41,
                Tuple {
                    guard: 1,
                    application_tag: 0xffff,
                    reference_tag: u32::MAX,
                },
            );
            // A block of zeroes with a tuple.
            rig.write_tuple(
                70,
                Tuple {
                    guard: 0,
                    application_tag: 7,
                    reference_tag: 70,
                },
            );
            let blocks = (5 << 20) / u64::from(block_size);
            let expected = Conversion {
                protection_type,
                block_size,
                blocks,
                unchecked: blocks - 5,
            };
            assert_eq!(rig.import(protection_type).unwrap(), expected);
            let store = Store::open(&rig.spec(protection_type)).unwrap();
            assert_eq!(store.capacity(), 5 << 20);
            let mut frame = vec![0; block_size as usize + 8];
            store.read_frames(40, &mut frame).unwrap();
            assert_eq!(frame[..block_size as usize], rig.block(40));
            assert_eq!(frame[block_size as usize + 4..], [0, 0, 0, 40]);
            store.read_frames(7, &mut frame).unwrap();
            assert_eq!(frame[block_size as usize..], [0xff; 8]);
            drop(store);
            let to = LioFiles::new(&rig.dir.join("again"));
            assert_eq!(rig.export(&to).unwrap(), expected);
            let is_same = |a, b| fs::read(a).unwrap() == fs::read(b).unwrap();
            assert!(is_same(to.image, rig.files().image));
            assert!(is_same(to.protection, rig.files().protection));
            let all = [
                "again",
                "again.protection",
                "disk",
                "image",
                "image.protection",
            ];
            assert_eq!(rig.names(), all);
        }
    }
}

#[test]
fn holes_remain_sparse() {
    let rig = Rig::new("sparse", 512);
    rig.import(ProtectionType::Type1).unwrap();
    // The header, and a few pages with blocks.
    assert!(allocated(&rig.disk()) <= 128 << 10);
    let to = LioFiles::new(&rig.dir.join("again"));
    rig.export(&to).unwrap();
    assert!(allocated(&to.image) <= 64 << 10);
}

#[test]
fn damaged_blocks_are_listed() {
    let rig = Rig::new("damaged", 512);
    rig.write_tuple(
        1,
        Tuple {
            guard: 0,
            application_tag: 0,
            reference_tag: 1,
        },
    );
    rig.write(9000, 0, 9001);
    let error = rig.import(ProtectionType::Type1).unwrap_err();
    let text = error.to_string();
    assert!(
        text.ends_with(
            "image: 2 blocks do not match their protection information (guard: 1, \
             reference_tag: 1)\n    LBA 1: guard\n    LBA 9000: reference_tag"
        ),
        "{text}"
    );
    assert_eq!(rig.names(), ["image", "image.protection"]);
    // With type 3, reference tags are not checked.
    let error = rig.import(ProtectionType::Type3).unwrap_err();
    let ConversionError::Defects { defects, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(defects.listed, [(1, ProtectionError::Guard)]);
}

#[test]
fn damaged_disk_is_not_exported() {
    let rig = Rig::new("export", 4096);
    rig.import(ProtectionType::Type1).unwrap();
    let disk = File::options().write(true).open(rig.disk()).unwrap();
    let first = Layout::new(4096).medium_offset(0);
    disk.write_all_at(&[0xa5], first + 40 * 4104 + 7).unwrap();
    let to = LioFiles::new(&rig.dir.join("again"));
    let error = rig.export(&to).unwrap_err().to_string();
    assert!(error.ends_with("(guard: 1)\n    LBA 40: guard"), "{error}");
    assert_eq!(rig.names(), ["disk", "image", "image.protection"]);
}

#[test]
fn mismatched_sizes_are_rejected() {
    let rig = Rig::new("sizes", 512);
    let error = at_once(|| {
        import(
            &rig.files(),
            ProtectionType::Type1,
            4096,
            &rig.disk(),
            &mut |_| ControlFlow::Continue(()),
        )
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.ends_with(
            "image.protection: has 81920 bytes, but 1280 blocks of 4096 bytes require 10240; its \
             size is correct for blocks of 512 bytes"
        ),
        "{error}"
    );
    let open = |path| File::options().write(true).open(path).unwrap();
    open(rig.files().protection).set_len(81_919).unwrap();
    let error = rig.import(ProtectionType::Type1).unwrap_err().to_string();
    assert!(
        error.ends_with("has 81919 bytes, but 10240 blocks of 512 bytes require 81920"),
        "{error}"
    );
    open(rig.files().image).set_len(511).unwrap();
    let error = rig.import(ProtectionType::Type1).unwrap_err().to_string();
    assert!(error.contains("smaller than a block of 512"), "{error}");
    assert_eq!(rig.names(), ["image", "image.protection"]);
}

#[test]
fn incomplete_last_block_is_ignored() {
    let rig = Rig::new("incomplete", 512);
    let image = File::options().write(true).open(rig.files().image).unwrap();
    image.write_all_at(&[1; 100], 5 << 20).unwrap();
    assert_eq!(rig.import(ProtectionType::Type1).unwrap().blocks, 10_240);
}

#[test]
fn existing_files_are_kept() {
    let rig = Rig::new("exists", 512);
    fs::write(rig.disk(), "a").unwrap();
    let error = rig.import(ProtectionType::Type1).unwrap_err();
    assert!(matches!(error, ConversionError::Exists { .. }), "{error}");
    assert_eq!(fs::read(rig.disk()).unwrap(), b"a");
    fs::remove_file(rig.disk()).unwrap();
    let partial = rig.dir.join("disk.partial");
    fs::write(&partial, "b").unwrap();
    let error = rig.import(ProtectionType::Type1).unwrap_err();
    assert!(matches!(error, ConversionError::Partial { .. }), "{error}");
    assert_eq!(fs::read(&partial).unwrap(), b"b");
    fs::remove_file(&partial).unwrap();
    rig.import(ProtectionType::Type1).unwrap();
    let to = LioFiles::new(&rig.dir.join("again"));
    for (name, other) in [(&to.image, &to.protection), (&to.protection, &to.image)] {
        fs::write(name, "c").unwrap();
        let error = rig.export(&to).unwrap_err();
        assert!(matches!(error, ConversionError::Exists { .. }), "{error}");
        assert_eq!(fs::read(name).unwrap(), b"c");
        assert!(!other.exists());
        fs::remove_file(name).unwrap();
    }
}

/// Another process may create a file with this name during the conversion.
#[test]
fn file_created_during_export_is_kept() {
    let rig = Rig::new("race", 512);
    rig.import(ProtectionType::Type1).unwrap();
    let to = LioFiles::new(&rig.dir.join("again"));
    let watch = &mut |_| {
        fs::write(&to.image, "d").unwrap();
        ControlFlow::Continue(())
    };
    let error = export(&rig.disk(), &to, watch).unwrap_err();
    assert!(matches!(error, ConversionError::Exists { .. }), "{error}");
    let names = ["again", "disk", "image", "image.protection"];
    assert_eq!(rig.names(), names);
    assert_eq!(fs::read(&to.image).unwrap(), b"d");
}

#[test]
fn files_in_use_are_rejected() {
    let rig = Rig::new("in-use", 512);
    let is_locked = |error: ConversionError| {
        assert!(
            matches!(error, ConversionError::File(OpenError::Locked { .. })),
            "{error}"
        );
    };
    for path in [rig.files().image, rig.files().protection] {
        let file = File::options().write(true).open(path).unwrap();
        assert!(sys::lock(file.as_fd(), Lock::Exclusive).unwrap());
        is_locked(rig.import(ProtectionType::Type1).unwrap_err());
    }
    rig.import(ProtectionType::Type1).unwrap();
    let store = Store::open(&rig.spec(ProtectionType::Type1)).unwrap();
    let to = LioFiles::new(&rig.dir.join("again"));
    is_locked(rig.export(&to).unwrap_err());
    drop(store);
    // During the conversion, the disk cannot be served for writing.
    let watch = &mut |_| {
        let error = at_once(|| Store::open(&rig.spec(ProtectionType::Type1))).unwrap_err();
        assert!(matches!(error, OpenError::Locked { .. }), "{error}");
        ControlFlow::Continue(())
    };
    export(&rig.disk(), &to, watch).unwrap();
}

#[test]
fn interrupted_conversion_leaves_no_file() {
    let rig = Rig::new("interrupted", 512);
    let mut calls = 0;
    let error = import(
        &rig.files(),
        ProtectionType::Type1,
        512,
        &rig.disk(),
        &mut |progress| {
            calls += 1;
            let (done, total) = (calls << 20, 5 << 20);
            assert_eq!(progress, Progress { done, total });
            match calls {
                3 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        },
    );
    let error = error.unwrap_err();
    assert!(matches!(error, ConversionError::Interrupted), "{error}");
    assert_eq!(calls, 3);
    assert_eq!(rig.names(), ["image", "image.protection"]);
}

#[test]
fn unsuitable_disks_are_not_exported() {
    let rig = Rig::new("unsuitable", 512);
    let to = LioFiles::new(&rig.dir.join("again"));
    for len in [0, 65_535, 1 << 20] {
        let file = File::create(rig.disk()).unwrap();
        file.set_len(len).unwrap();
        let error = rig.export(&to).unwrap_err();
        assert!(
            matches!(error, ConversionError::Unprotected { .. }),
            "{error}"
        );
    }
    fs::remove_file(rig.disk()).unwrap();
    rig.import(ProtectionType::Type1).unwrap();
    let disk = File::options().write(true).open(rig.disk()).unwrap();
    // A write was interrupted.
    disk.write_all_at(&[1], 65_535).unwrap();
    let error = rig.export(&to).unwrap_err();
    assert!(matches!(error, ConversionError::Torn { .. }), "{error}");
    disk.write_all_at(&[0], 65_535).unwrap();
    for (number, kind) in [(0, None), (2, Some(ProtectionType::Type2))] {
        let header = Header::new(512, kind).encode();
        disk.write_all_at(&header, 0).unwrap();
        let error = rig.export(&to).unwrap_err();
        assert!(
            matches!(error, ConversionError::Type(found) if found == number),
            "{error}"
        );
    }
    disk.write_all_at(&[9], 15).unwrap();
    let error = rig.export(&to).unwrap_err();
    assert!(matches!(error, ConversionError::Header { .. }), "{error}");
    assert_eq!(rig.names(), ["disk", "image", "image.protection"]);
}
