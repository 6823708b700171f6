//! Tests of stores with protection information.

use riser_config::{Fault, FaultOn};
use riser_scsi::protection::Tuple;

use super::*;
use crate::backend::{Header, HeaderError};

/// Offset of the first frame with blocks of 512 bytes.
const FIRST: u64 = 127 * 520;

fn protected(source: Source, protection_type: ProtectionType) -> Spec {
    Spec {
        protection: Some(Protection::new(protection_type)),
        ..spec(source)
    }
}

fn type_1(path: PathBuf) -> Spec {
    protected(file(path, 64 << 10), ProtectionType::Type1)
}

/// A buffer of blocks, followed by their tuples.
struct Blocks {
    memory: Memory,
    blocks: u32,
}

impl Blocks {
    /// Fills each block and its tuple with the number of the block plus `first`.
    fn new(blocks: u32, first: u8) -> Self {
        let memory = Memory::new(blocks as usize * 520).unwrap();
        for n in 0..blocks as usize {
            memory.fill(n * 512, 512, first + n as u8);
            memory.fill(blocks as usize * 512 + n * 8, 8, first + n as u8);
        }
        Self { memory, blocks }
    }

    fn read(&self, lba: u64) -> BlockOp {
        BlockOp::Read {
            offset: lba * 512,
            len: self.blocks * 512,
            buffer_offset: 0,
            tags: Some(self.blocks * 512),
            fua: false,
        }
    }

    fn write(&self, lba: u64) -> BlockOp {
        BlockOp::Write {
            offset: lba * 512,
            len: self.blocks * 512,
            buffer_offset: 0,
            tags: Some(self.blocks * 512),
            fua: false,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.memory.whole().to_vec();
        bytes.truncate(self.blocks as usize * 520);
        bytes
    }
}

impl Rig {
    fn write_blocks(&mut self, lba: u64, blocks: &Blocks) -> StepResult {
        self.run(blocks.write(lba), &[blocks.memory.whole()])
    }

    fn read_blocks(&mut self, lba: u64, blocks: u32) -> (StepResult, Vec<u8>) {
        let into = Blocks::new(blocks, 0);
        let result = self.run(into.read(lba), &[into.memory.whole()]);
        (result, into.bytes())
    }
}

#[test]
fn file_contains_header_and_inverted_tuples() {
    let dir = Dir::new(&std::env::temp_dir(), "frames");
    let path = dir.file("lun");
    let store = Store::open(&type_1(path.clone())).unwrap();
    assert_eq!(store.capacity(), 64 << 10);
    let mut rig = Rig::new(store.clone());
    assert_eq!(rig.write_blocks(2, &Blocks::new(2, 0x31)), StepResult::Done);
    let mut bytes = vec![0; (FIRST + 128 * 520) as usize];
    bytes[..36].copy_from_slice(
        b"RISER-PI\x00\x00\x00\x01\x00\x00\x02\x00\x00\x00\x00\x01\x00\x00\x00\x00\
          \x00\x00\x00\x00\x00\x40\x00\x00\x7a\xef\x49\xca",
    );
    bytes[66_040 + 1040..][..512].fill(0x31);
    bytes[66_040 + 1552..][..8].fill(0xce);
    bytes[66_040 + 1560..][..512].fill(0x32);
    bytes[66_040 + 2072..][..8].fill(0xcd);
    assert!(std::fs::read(&path).unwrap() == bytes);
    let (result, read) = rig.read_blocks(1, 3);
    assert_eq!(result, StepResult::Done);
    assert!(read[..512].iter().all(|byte| *byte == 0));
    assert_eq!(read[1536..1544], [0xff; 8]);
    assert_eq!(read[1544..1560], [[0x31; 8], [0x32; 8]].concat());
    let mut block = [0; 512];
    let tuple = store.read_block(3, &mut block).unwrap();
    assert_eq!((block, tuple), ([0x32; 512], Tuple::parse([0x32; 8])));
}

#[test]
fn null_blocks_are_deallocated() {
    let store = Store::open(&protected(
        Source::Null { size: 1 << 20 },
        ProtectionType::Type3,
    ));
    let (result, read) = Rig::new(store.unwrap()).read_blocks(7, 2);
    assert_eq!(result, StepResult::Done);
    assert!(read[..1024].iter().all(|byte| *byte == 0));
    assert_eq!(read[1024..], [0xff; 16]);
}

#[test]
fn mismatched_files_are_rejected_unchanged() {
    let dir = Dir::new(&std::env::temp_dir(), "foreign");
    let open = |spec: &Spec| match Store::open(spec).unwrap_err() {
        OpenError::Protection { source, .. } => source,
        other => panic!("{other}"),
    };
    let foreign = dir.file("foreign");
    for bytes in [vec![7; 512], [vec![0; 65_536], vec![0]].concat()] {
        std::fs::write(&foreign, &bytes).unwrap();
        let error = open(&type_1(foreign.clone()));
        assert_eq!(error, HeaderError::Missing);
        assert!(std::fs::read(&foreign).unwrap() == bytes);
    }
    let path = dir.file("lun");
    let created = Store::open(&type_1(path.clone())).unwrap();
    created.keep();
    drop(created);
    let bytes = std::fs::read(&path).unwrap();
    let error = open(&spec(file(path.clone(), 1 << 20)));
    assert_eq!(error, HeaderError::Unexpected);
    let (found, wanted) = (512, 4096);
    let error = open(&Spec {
        block_size: wanted,
        ..type_1(path.clone())
    });
    assert_eq!(error, HeaderError::BlockSize { found, wanted });
    assert!(std::fs::read(&path).unwrap() == bytes);
    let mut corrupt = bytes;
    corrupt[15] ^= 1;
    std::fs::write(&path, &corrupt).unwrap();
    assert_eq!(open(&type_1(path.clone())), HeaderError::Crc);
    assert!(std::fs::read(&path).unwrap() == corrupt);
}

#[test]
fn direct_io_and_devices_are_rejected() {
    let dir = Dir::new(&std::env::temp_dir(), "direct");
    let path = dir.file("lun");
    let error = Store::open(&Spec {
        direct: Direct::On,
        ..type_1(path.clone())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("it has protection information"), "{error}");
    assert!(!path.exists(), "undone");
    let device = Source::Device { path };
    let error = Store::open(&protected(device, ProtectionType::Type1)).unwrap_err();
    assert!(matches!(error, OpenError::ProtectedDevice), "{error}");
}

#[test]
fn blank_files_get_header() {
    let dir = Dir::new(&std::env::temp_dir(), "blank");
    for len in [0, 1, 4096, 65_536] {
        let path = dir.file("lun");
        std::fs::write(&path, vec![0; len]).unwrap();
        let store = Store::open(&type_1(path.clone())).unwrap();
        assert_eq!(store.capacity(), 64 << 10);
        store.keep();
        drop(store);
        let page = std::fs::read(&path).unwrap();
        let header = Header::new(512, ProtectionType::Type1);
        assert_eq!(Header::parse(&page, 512), Ok(header));
        // Without `create`, a blank file is not a disk.
        std::fs::write(&path, vec![0; len]).unwrap();
        let error = Store::open(&protected(
            Source::File {
                path,
                size: None,
                create: false,
            },
            ProtectionType::Type1,
        ));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("no protection information"), "{error}");
    }
}

#[test]
fn protected_disk_grows_and_reopens() {
    let dir = Dir::new(&std::env::temp_dir(), "grow");
    let path = dir.file("lun");
    let small = type_1(path.clone());
    let store = Store::open(&small).unwrap();
    let mut rig = Rig::new(store.clone());
    rig.write_blocks(127, &Blocks::new(1, 5));
    let large = protected(file(path.clone(), 128 << 10), ProtectionType::Type1);
    assert_eq!(store.grow(&large).unwrap(), Some(128 << 10));
    store.set_capacity(128 << 10);
    assert_eq!(store.measure().unwrap(), None);
    assert_eq!(store.grow(&large).unwrap(), None);
    store.check_reopen(&large).unwrap();
    let (_, read) = rig.read_blocks(127, 2);
    assert_eq!(read[1024..], [[5; 8], [0xff; 8]].concat());
    store.keep();
    store.set_protection_type(ProtectionType::Type3).unwrap();
    drop((rig, store));
    assert_eq!(
        std::fs::metadata(&path).unwrap().len(),
        FIRST + 256 * 520,
        "the undone change was kept"
    );
    // The size and the type of the file apply, and not those of a new file.
    let store = Store::open(&small).unwrap();
    assert_eq!(store.capacity(), 128 << 10);
    let protection = store.geometry().protection.unwrap();
    assert_eq!(protection.protection_type, ProtectionType::Type3);
}

#[test]
fn short_transfers_keep_frames() {
    let dir = Dir::new(&std::env::temp_dir(), "short-frames");
    let faults = Arc::new(Faults::default());
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..type_1(dir.file("lun"))
    });
    let mut rig = Rig::new(store.unwrap());
    let blocks = Blocks::new(64, 1);
    for most in [1, 519, 521, 4096, 0] {
        faults.shorten(most);
        assert_eq!(rig.write_blocks(3, &blocks), StepResult::Done);
        let (result, read) = rig.read_blocks(3, 64);
        assert_eq!(result, StepResult::Done);
        assert!(read == blocks.bytes(), "{most}");
    }
}

#[test]
fn error_offsets_are_those_of_unit() {
    let dir = Dir::new(&std::env::temp_dir(), "offsets");
    let (path, faults) = (dir.file("lun"), Arc::new(Faults::default()));
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..type_1(path.clone())
    });
    let mut rig = Rig::new(store.unwrap());
    let medium = |offset| {
        StepResult::Failed(BackendError::Medium {
            offset: Some(offset),
        })
    };
    faults.set(vec![Fault {
        on: FaultOn::Read,
        offset: 1536,
        len: 512,
        times: Some(1),
        delay: Duration::ZERO,
        error: Some(BackendError::Medium { offset: Some(1600) }),
    }]);
    assert_eq!(rig.read_blocks(0, 8).0, medium(1600));
    // The file ends in the tuple of the sixth block.
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(FIRST + 6 * 520 - 3).unwrap();
    let StepResult::Failed(BackendError::Medium {
        offset: Some(offset),
    }) = rig.read_blocks(0, 8).0
    else {
        panic!("no medium error");
    };
    assert_eq!(offset / 512, 5);
    file.set_len(FIRST + 128 * 520).unwrap();
}

#[test]
fn frames_are_whole_during_writes() {
    let (store, _disk) = store_of(type_1("/in/memory".into()));
    let mut rig = InMemory::new(&store);
    let submit = |rig: &mut InMemory, op: BlockOp, blocks: &Blocks| {
        let layout = store.layout.unwrap();
        let memory = [blocks.memory.whole()];
        let data: Vec<_> = layout
            .parts(&op)
            .flat_map(|part| cut(&memory, part))
            .collect();
        let op = rig.driver.store(rig.id).command(op);
        rig.driver
            .submit(&mut rig.ring, rig.id, op, &data, 1)
            .unwrap();
    };
    let (first, second, read) = (Blocks::new(4, 1), Blocks::new(4, 9), Blocks::new(4, 0));
    submit(&mut rig, first.write(1), &first);
    rig.run(&[]);
    submit(&mut rig, second.write(1), &second);
    submit(&mut rig, read.read(1), &read);
    // The write is pending, and the read waits for it.
    rig.ring.submit().unwrap();
    assert_eq!(rig.kernel.operations().len(), 1);
    rig.run(&[]);
    assert_eq!(read.bytes(), second.bytes());
}
