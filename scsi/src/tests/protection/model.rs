//! Property tests: a protected medium is compared with a model of all checks.

use proptest::prelude::*;

use super::super::properties::any_cdb;
use super::{
    APPLICATION, GUARD, INVALID_FIELD, READ, REFERENCE, TYPES, VERIFY, WRITE, WRITE_SAME,
    assert_failed, checks, crc, join, long, protection, sixteen, tuple, unit,
};
use crate::config::{BlockSize, Config, Protection, ProtectionFormat, ProtectionType};
use crate::tests::{A, Outcome, Rig, config};

/// An action of the model. Every action uses the range and the field of the step.
#[derive(Clone, Copy, Debug)]
enum Action {
    Read,
    Write,
    WriteSame,
    CompareAndWrite,
    OrWrite,
    Verify,
    Unmap,
    /// Flips a bit during this step, and reads the block.
    Flip(u16),
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => Just(Action::Read),
        3 => Just(Action::Write),
        1 => Just(Action::WriteSame),
        1 => Just(Action::CompareAndWrite),
        1 => Just(Action::OrWrite),
        1 => Just(Action::Verify),
        1 => Just(Action::Unmap),
        3 => any::<u16>().prop_map(Action::Flip),
    ]
}

/// A step of the model.
#[derive(Clone, Copy, Debug)]
struct Turn {
    action: Action,
    lba: u8,
    blocks: u8,
    protect: u8,
    fill: u8,
    application: u16,
    /// Added to the LBA for the reference tag.
    shift: u32,
    /// Use a 32-byte CDB, with type 2.
    is_long: bool,
}

fn any_turn() -> impl Strategy<Value = Turn> {
    let tags = (
        prop_oneof![Just(0_u16), Just(7), Just(0xffff)],
        prop_oneof![6 => Just(0_u32), 1 => Just(1)],
    );
    (
        any_action(),
        0..50_u8,
        1..12_u8,
        0..6_u8,
        any::<u8>(),
        tags,
        any::<bool>(),
    )
        .prop_map(
            |(action, lba, blocks, protect, fill, (application, shift), is_long)| Turn {
                action,
                lba,
                blocks,
                protect,
                fill,
                application,
                shift,
                is_long,
            },
        )
}

/// The expected sense data with the LBA.
type Failure = ((u8, u8, u8), u64);

struct Model {
    protection: Protection,
    block: usize,
    /// Number of blocks in a piece.
    window: usize,
    disk: Vec<u8>,
    tags: Vec<[u8; 8]>,
}

impl Model {
    fn block(&self, lba: usize) -> &[u8] {
        &self.disk[lba * self.block..][..self.block]
    }

    /// Returns the known values of the tags, for the block at an index of the command.
    fn known(&self, turn: Turn, index: usize) -> (Option<u16>, Option<u32>) {
        let reference = (u32::from(turn.lba) + turn.shift).wrapping_add(index as u32);
        match self.protection.protection_type {
            ProtectionType::Type1 => (None, Some(u32::from(turn.lba) + index as u32)),
            ProtectionType::Type2 if turn.is_long => {
                let owned = self.protection.client_owns_tag;
                (owned.then_some(turn.application), Some(reference))
            }
            _ => (None, None),
        }
    }

    /// Returns the result of checking a block.
    fn check(
        &self,
        checks: [bool; 3],
        turn: Turn,
        index: usize,
        data: &[u8],
        bytes: [u8; 8],
    ) -> Option<Failure> {
        let [guard, application, reference] = [&bytes[..2], &bytes[2..4], &bytes[4..]];
        let (known_application, known_reference) = self.known(turn, index);
        let lba = u64::from(turn.lba) + index as u64;
        if checks[0] && crc(data).to_be_bytes() != guard {
            return Some((GUARD, lba));
        }
        if checks[1] && known_application.is_some_and(|tag| tag.to_be_bytes() != application) {
            return Some((APPLICATION, lba));
        }
        if checks[2] && known_reference.is_some_and(|tag| tag.to_be_bytes() != reference) {
            return Some((REFERENCE, lba));
        }
        None
    }

    /// Returns the result of checking a block on the medium.
    fn check_stored(&self, protect: u8, turn: Turn, index: usize) -> Option<Failure> {
        let lba = usize::from(turn.lba) + index;
        let bytes = self.tags[lba];
        let is_escape = match self.protection.protection_type {
            ProtectionType::Type3 => bytes[2..] == [0xff; 6],
            _ => bytes[2..4] == [0xff; 2],
        };
        let checks = if protect == 0 {
            [true; 3]
        } else {
            checks(protect)
        };
        let failure = self.check(checks, turn, index, self.block(lba), bytes);
        failure.filter(|_| !is_escape)
    }

    /// Returns the tuple that is generated for a block.
    fn generated(&self, turn: Turn, index: usize, data: &[u8]) -> [u8; 8] {
        let owned = self.protection.client_owns_tag;
        let reference = match self.protection.protection_type {
            ProtectionType::Type1 => u32::from(turn.lba) + index as u32,
            _ => u32::MAX,
        };
        let is_escape = owned || self.protection.is_type_2();
        tuple(crc(data), if is_escape { 0xffff } else { 0 }, reference)
    }

    /// Returns the payload that we send to the unit: the data and its tuples.
    fn fresh(&self, turn: Turn) -> (Vec<u8>, Vec<[u8; 8]>) {
        let len = usize::from(turn.blocks) * self.block;
        let data: Vec<u8> = (0..len)
            .map(|at| turn.fill.wrapping_add((at * 5 + at / 300) as u8))
            .collect();
        let tuples = (0..)
            .zip(data.chunks(self.block))
            .map(|(i, block)| {
                tuple(
                    crc(block),
                    turn.application,
                    u32::from(turn.lba) + turn.shift + i,
                )
            })
            .collect();
        (data, tuples)
    }

    /// Creates a CDB. `short` is the operation code of a 16-byte CDB, and `action` the service
    /// action of a 32-byte CDB.
    fn cdb(turn: Turn, short: u8, action: u8, flags: u8) -> Vec<u8> {
        if turn.is_long {
            let tags = (u32::from(turn.lba) + turn.shift, turn.application, 0xffff);
            return long(action, turn.protect, flags, turn.lba, turn.blocks, tags).to_vec();
        }
        sixteen(short, turn.protect, flags, turn.lba, turn.blocks).to_vec()
    }

    fn out(turn: Turn, data: &[u8], tuples: &[[u8; 8]]) -> Vec<u8> {
        match turn.protect {
            0 => data.to_vec(),
            _ => join(data, tuples),
        }
    }

    fn store(&mut self, lba: usize, data: &[u8], bytes: [u8; 8]) {
        self.disk[lba * self.block..][..self.block].copy_from_slice(data);
        self.tags[lba] = bytes;
    }

    #[track_caller]
    fn assert_result(outcome: Outcome, failure: Option<Failure>) -> Option<Vec<u8>> {
        match failure {
            Some((sense, lba)) => {
                assert_failed(&outcome, sense, lba);
                None
            }
            None => Some(outcome.good().data),
        }
    }

    fn first_stored(&self, protect: u8, turn: Turn) -> Option<Failure> {
        (0..usize::from(turn.blocks)).find_map(|i| self.check_stored(protect, turn, i))
    }

    fn read(&self, rig: &mut Rig, turn: Turn) {
        let failure = self.first_stored(turn.protect, turn);
        let outcome = rig.send(&Self::cdb(turn, 0x88, READ, 0));
        if let Some(data) = Self::assert_result(outcome, failure) {
            let (from, to) = (usize::from(turn.lba), usize::from(turn.lba + turn.blocks));
            let blocks = &self.disk[from * self.block..to * self.block];
            assert!(data == Self::out(turn, blocks, &self.tags[from..to]));
        }
    }

    fn step(&mut self, rig: &mut Rig, turn: Turn) {
        let lba = usize::from(turn.lba);
        let count = usize::from(turn.blocks);
        let (data, tuples) = self.fresh(turn);
        let size = self.block;
        let blocks: Vec<&[u8]> = data.chunks(size).collect();
        let sent_check = |model: &Self, i: usize| {
            let checks = checks(turn.protect);
            model.check(checks, turn, i, blocks[i], tuples[i])
        };
        match turn.action {
            Action::Read => self.read(rig, turn),
            Action::Write => {
                let failure = (0..count).find_map(|i| sent_check(self, i).map(|f| (i, f)));
                let cdb = Self::cdb(turn, 0x8a, WRITE, 0);
                let outcome = rig.send_out(&cdb, &Self::out(turn, &data, &tuples));
                // Previous pieces have been written.
                let written = failure.map_or(count, |(i, _)| i / self.window * self.window);
                Self::assert_result(outcome, failure.map(|(_, failure)| failure));
                for i in 0..written {
                    let bytes = match turn.protect {
                        0 => self.generated(turn, i, blocks[i]),
                        _ => tuples[i],
                    };
                    self.store(lba + i, blocks[i], bytes);
                }
            }
            Action::WriteSame => {
                let failure = sent_check(self, 0);
                let cdb = Self::cdb(turn, 0x93, WRITE_SAME, 0);
                let out = Self::out(turn, blocks[0], &tuples[..1]);
                if Self::assert_result(rig.send_out(&cdb, &out), failure).is_none() {
                    return;
                }
                for i in 0..count {
                    let first = match turn.protect {
                        0 => self.generated(turn, i, blocks[0]),
                        _ => tuples[0],
                    };
                    let is_counted = turn.protect != 0
                        && self.protection.protection_type != ProtectionType::Type3;
                    let [.., a, b, c, d] = first;
                    let reference = u32::from_be_bytes([a, b, c, d]);
                    let added = if is_counted { i as u32 } else { 0 };
                    let mut bytes = first;
                    bytes[4..].copy_from_slice(
                        &(reference + added * u32::from(is_counted)).to_be_bytes(),
                    );
                    self.store(lba + i, blocks[0], bytes);
                }
            }
            Action::CompareAndWrite => {
                let turn = Turn {
                    is_long: false,
                    protect: if turn.is_long { 0 } else { turn.protect },
                    ..turn
                };
                let there = self.disk[lba * size..(lba + count) * size].to_vec();
                // The server should ignore these.
                let ignored = vec![[turn.fill; 8]; count];
                let out = [
                    Self::out(turn, &there, &ignored),
                    Self::out(turn, &data, &tuples),
                ]
                .concat();
                let sent = (0..count)
                    .find_map(|i| self.check(checks(turn.protect), turn, i, blocks[i], tuples[i]));
                let failure = self.first_stored(0, turn).or(sent);
                if count > self.window / 2 {
                    assert_eq!(
                        rig.send_out(&Self::cdb(turn, 0x89, 0, 0), &out).check(),
                        INVALID_FIELD
                    );
                    return;
                }
                let outcome = rig.send_out(&Self::cdb(turn, 0x89, 0, 0), &out);
                if Self::assert_result(outcome, failure).is_none() {
                    return;
                }
                for i in 0..count {
                    let bytes = match turn.protect {
                        0 => self.generated(turn, i, blocks[i]),
                        _ => tuples[i],
                    };
                    self.store(lba + i, blocks[i], bytes);
                }
            }
            Action::OrWrite => {
                let turn = Turn {
                    is_long: false,
                    protect: if turn.is_long { 0 } else { turn.protect },
                    ..turn
                };
                let mut failure = None;
                for piece in (0..count).step_by(self.window) {
                    let range = piece..(piece + self.window).min(count);
                    failure = range.clone().find_map(|i| {
                        self.check(checks(turn.protect), turn, i, blocks[i], tuples[i])
                    });
                    failure = failure.or(range
                        .clone()
                        .find_map(|i| self.check_stored(turn.protect, turn, i)));
                    if failure.is_some() {
                        break;
                    }
                    for i in range {
                        let mut result = self.block(lba + i).to_vec();
                        for (byte, bits) in result.iter_mut().zip(blocks[i]) {
                            *byte |= bits;
                        }
                        let mut bytes = match turn.protect {
                            0 => self.generated(turn, i, &result),
                            _ => tuples[i],
                        };
                        bytes[..2].copy_from_slice(&crc(&result).to_be_bytes());
                        self.store(lba + i, &result, bytes);
                    }
                }
                let out = Self::out(turn, &data, &tuples);
                let outcome = rig.send_out(&Self::cdb(turn, 0x8b, 0, 0), &out);
                Self::assert_result(outcome, failure);
            }
            Action::Verify => {
                let failure = self.first_stored(turn.protect, turn);
                let outcome = rig.send(&Self::cdb(turn, 0x8f, VERIFY, 0));
                Self::assert_result(outcome, failure);
            }
            Action::Unmap => {
                let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, turn.lba];
                list.extend([0, 0, 0, turn.blocks, 0, 0, 0, 0]);
                rig.send_out(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list)
                    .good();
                for i in 0..count {
                    self.store(lba + i, &vec![0; size], [0xff; 8]);
                }
            }
            Action::Flip(position) => {
                let bit = usize::from(position) % ((size + 8) * 8);
                let flip = |disk: &mut [u8], tags: &mut [[u8; 8]]| match bit.checked_sub(size * 8) {
                    None => disk[lba * size + bit / 8] ^= 1 << (bit % 8),
                    Some(bit) => tags[lba][bit / 8] ^= 1 << (bit % 8),
                };
                let was_good = self.check_stored(0, turn, 0).is_none();
                let is_checked = self.tags[lba][2..4] != [0xff; 2];
                flip(&mut rig.disk, &mut rig.tags);
                flip(&mut self.disk, &mut self.tags);
                self.read(rig, turn);
                // The guard detects every bit of the data, and every bit of itself.
                if was_good && is_checked && bit < (size + 2) * 8 {
                    let read = Turn { protect: 0, ..turn };
                    let outcome = rig.send(&Self::cdb(read, 0x88, READ, 0));
                    assert_failed(&outcome, GUARD, lba as u64);
                }
                flip(&mut rig.disk, &mut rig.tags);
                flip(&mut self.disk, &mut self.tags);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Commands with and without protection information return the same data and sense data as a
    /// simple model, and every flipped bit is detected.
    #[test]
    fn protected_medium_matches_model(
        kind in 0..3_usize,
        owned in any::<bool>(),
        big_blocks in any::<bool>(),
        window in prop_oneof![Just(8192_u32), Just(12_288), Just(128 << 10)],
        script in proptest::collection::vec(any_turn(), 1..30),
    ) {
        let size = if big_blocks { BlockSize::B4096 } else { BlockSize::B512 };
        let protection = protection(TYPES[kind], owned);
        let mut config = config(size, 64);
        config.protection = Some(protection);
        config.limits.max_transfer = 128 << 10;
        config.limits.window = window;
        config.limits.segment = 12_288;
        let block = size.bytes() as usize;
        let mut rig = Rig::with(config);
        let mut model = Model {
            protection,
            block,
            // Pieces are aligned to 4096 bytes.
            window: window as usize / (block + 16) / (4096 / block) * (4096 / block),
            disk: rig.disk.clone(),
            tags: rig.tags.clone(),
        };
        for turn in script {
            // Only 32-byte CDBs can be used to transfer tuples with type 2.
            let is_type_2 = protection.is_type_2();
            let is_long = is_type_2 && (turn.is_long || turn.protect != 0);
            model.step(&mut rig, Turn { is_long, ..turn });
            prop_assert!(rig.disk == model.disk, "{turn:?}");
            prop_assert!(rig.tags == model.tags, "{turn:?}");
        }
    }

    /// No CDB should ever trigger a panic or an endless loop.
    #[test]
    fn random_cdbs_return_response_with_protection(
        kind in 0..4_usize,
        cdb in any_cdb(),
        flags in any::<u8>(),
        out in proptest::collection::vec(any::<u8>(), 0..2000),
        data_in in prop_oneof![0..2000_u32, Just(u32::MAX)],
    ) {
        // FORMAT UNIT can also select each type.
        let protection_format = ProtectionFormat::Changeable(TYPES.get(kind).copied());
        let mut rig = Rig::with(Config {
            protection_format,
            ..unit(TYPES[0])
        });
        let mut cdb = cdb;
        if let Some(byte) = cdb.get_mut(if kind == 1 { 10 } else { 1 }) {
            *byte |= flags & 0xe0;
        }
        rig.run(A, &cdb, &out, data_in);
    }
}
