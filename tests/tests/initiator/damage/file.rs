//! Damage in the file: in the page cache, or on the medium below it.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use riser_block::task::block_on;
use riser_initiator::lun::LunError;
use riser_initiator::protection::PiError;
use riser_scsi::protection::ProtectionError;
use riser_testkit::skip::skip;
use riser_tests::rig::{Protocol, Rig, eventually};
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::{BLOCK, DAMAGED, Detector, damaged_lba, data, print_result, read, write};

/// Alignment of direct I/O.
const PAGE: usize = 4096;

/// A server with a file, which is protected or not.
struct Disk {
    rig: Rig,
    path: PathBuf,
    is_protected: bool,
}

impl Disk {
    fn new(number: u8, is_protected: bool) -> Self {
        let id = std::process::id();
        let path = std::env::temp_dir().join(format!("riser-damaged-{number}-{id}.img"));
        let protection = if is_protected {
            ", protection: { type: 1 }"
        } else {
            ""
        };
        let backend = format!(
            "{{ kind: file, path: {}, size: 16MiB, create: true{protection} }}",
            path.display()
        );
        Self {
            rig: Rig::new(Protocol::Tcp, number, &backend),
            path,
            is_protected,
        }
    }

    /// Offset of a byte of the damaged block in the file.
    fn offset(&self) -> u64 {
        let block = BLOCK as u64;
        let start = match self.is_protected {
            true => (64_u64 << 10).next_multiple_of(block + 8) + DAMAGED * (block + 8),
            false => DAMAGED * block,
        };
        start + 100
    }

    fn file(&self, flags: i32) -> std::io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(flags);
        options.open(&self.path)
    }

    /// Inverts a bit in the page cache.
    fn damage_cached(&self) {
        let (file, at) = (self.file(0).unwrap(), self.offset());
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        assert!(self.is_cached());
    }

    /// Writes all pages to the medium, removes them from the page cache, and inverts a bit on the
    /// medium. Returns false if the file system does not support direct I/O.
    fn damage_medium(&self) -> bool {
        let file = self.file(0).unwrap();
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let medium = match self.file(libc::O_DIRECT) {
            Ok(medium) => medium,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                skip("damage on the medium", "no direct I/O for temporary files");
                return false;
            }
            Err(error) => panic!("{error}"),
        };
        let mut memory = vec![0; 2 * PAGE];
        let aligned = memory.as_ptr().align_offset(PAGE);
        let page = &mut memory[aligned..aligned + PAGE];
        let at = self.offset();
        let start = at - at % PAGE as u64;
        medium.read_exact_at(page, start).unwrap();
        page[(at - start) as usize] ^= 0x10;
        // This also removes the page from the cache, if it was read again.
        medium.write_all_at(page, start).unwrap();
        true
    }

    /// Returns whether the page of the damaged block is in the page cache.
    fn is_cached(&self) -> bool {
        let file = self.file(0).unwrap();
        let mut byte = [0];
        let into = &mut [IoSliceMut::new(&mut byte)];
        match preadv2(&file, into, self.offset(), ReadWriteFlags::NOWAIT) {
            Ok(len) => len == 1,
            Err(Errno::AGAIN) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Damages a file with and without protection, and reads it.
fn damage_is_detected_in(place: &str, number: u8, damage: fn(&Disk) -> bool) {
    for is_protected in [true, false] {
        let disk = Disk::new(number, is_protected);
        let session = disk.rig.connect("");
        let lun = block_on(session.lun(0)).unwrap();
        block_on(write(&lun, 2)).unwrap();
        assert!(block_on(read(&lun)).unwrap() == data(2));
        if !damage(&disk) {
            return;
        }
        let read = block_on(read(&lun));
        if is_protected {
            let expected = PiError {
                check: ProtectionError::Guard,
                lba: Some(DAMAGED),
                is_by_target: true,
            };
            assert_eq!(read.unwrap_err(), LunError::Protection(expected));
        } else {
            assert_eq!(damaged_lba(&read.unwrap(), 2), DAMAGED);
        }
        block_on(session.close());
    }
    print_result(place, "iscsi", Detector::Target, DAMAGED);
}

#[test]
fn page_cache_is_checked() {
    damage_is_detected_in("page cache", 48, |disk| {
        disk.damage_cached();
        true
    });
}

#[test]
fn medium_is_checked() {
    damage_is_detected_in("file on the medium", 49, Disk::damage_medium);
}

#[test]
fn scrub_finds_damage_on_medium() {
    let mut disk = Disk::new(50, true);
    let session = disk.rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    block_on(write(&lun, 2)).unwrap();
    block_on(session.close());
    if !disk.damage_medium() {
        return;
    }
    let server = disk.rig.server.as_mut().unwrap();
    server.start_scrub("disk", None).unwrap();
    eventually("the scrub is complete", || {
        server.scrubs()[0].state == "completed"
    });
    let scrub = server.scrubs().remove(0);
    let listed = scrub.listed.iter();
    let listed: Vec<_> = listed.map(|one| (one.lba, one.defect.as_str())).collect();
    assert_eq!(listed, [(DAMAGED, "guard")]);
    drop(disk);

    let mut plain = Disk::new(50, false);
    let server = plain.rig.server.as_mut().unwrap();
    assert!(server.start_scrub("disk", None).is_err());
    print_result("file on the medium", "no command", Detector::Scrub, DAMAGED);
}
