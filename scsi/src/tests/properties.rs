//! Property tests: invalid CDBs, and a long sequence of random commands which is compared with a
//! simple array.

use proptest::prelude::*;

use super::{A, Rig, config};
use crate::config::BlockSize;
use crate::opcode::Opcode;
use crate::step::Status;

/// Returns CDBs with random bytes, and CDBs that are almost valid.
pub(super) fn any_cdb() -> impl Strategy<Value = Vec<u8>> {
    let wild = proptest::collection::vec(any::<u8>(), 0..20);
    let known = (
        0..Opcode::all().len(),
        proptest::collection::vec(any::<u8>(), 32),
    )
        .prop_map(|(row, noise)| {
            let entry = &Opcode::all()[row];
            let mut cdb: Vec<u8> = noise
                .iter()
                .zip(entry.usage())
                .map(|(n, u)| n & u)
                .collect();
            cdb[0] = entry.code;
            match entry.service_action {
                // A 32-byte CDB.
                Some(action) if entry.code == 0x7f => {
                    cdb[7..10].copy_from_slice(&[0x18, 0, action]);
                }
                Some(action) => cdb[1] = action,
                None => {}
            }
            // With random values for the high bytes of addresses and lengths, almost all of them
            // would be out of range.
            if noise[15] & 1 == 0 {
                let first = if entry.code == 0x7f { 11 } else { 2 };
                for byte in cdb.iter_mut().skip(first).filter(|byte| **byte & 3 != 0) {
                    *byte = 0;
                }
            }
            cdb
        });
    prop_oneof![1 => wild, 4 => known]
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Read,
    Write,
    WriteAndVerify,
    Verify,
    VerifyWrong,
    WriteSame { unmap: bool, zero: bool },
    CompareAndWrite,
    OrWrite,
    Unmap,
    Flush,
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        Just(Action::Read),
        Just(Action::Write),
        Just(Action::WriteAndVerify),
        Just(Action::Verify),
        Just(Action::VerifyWrong),
        (any::<bool>(), any::<bool>()).prop_map(|(unmap, zero)| Action::WriteSame { unmap, zero }),
        Just(Action::CompareAndWrite),
        Just(Action::OrWrite),
        Just(Action::Unmap),
        Just(Action::Flush),
    ]
}

/// Creates a CDB with one of the sizes supported by a command.
fn sized(codes: [u8; 3], size: usize, flags: u8, lba: u64, blocks: u32) -> Vec<u8> {
    let [_, b1, b2, b3] = blocks.to_be_bytes();
    let [.., l4, l5, l6, l7] = lba.to_be_bytes();
    match size % 3 {
        0 => vec![codes[0], flags, l4, l5, l6, l7, 0, b2, b3, 0],
        1 => vec![codes[1], flags, l4, l5, l6, l7, 0, b1, b2, b3, 0, 0],
        _ => {
            let mut cdb = vec![codes[2], flags];
            cdb.extend(lba.to_be_bytes());
            cdb.extend(blocks.to_be_bytes());
            cdb.extend([0, 0]);
            cdb
        }
    }
}

/// A reference model with the expected data on the medium.
struct Reference(Vec<u8>);

impl Reference {
    /// Executes an action on both and compares the results.
    fn step(&mut self, rig: &mut Rig, action: Action, at: u64, blocks: u32, size: usize, fill: u8) {
        let block = rig.block();
        let (from, to) = (at as usize * block, (at as usize + blocks as usize) * block);
        let len = to - from;
        let fresh: Vec<u8> = (0..len).map(|i| fill.wrapping_add((i * 7) as u8)).collect();
        match action {
            Action::Read => {
                let data = rig
                    .send(&sized([0x28, 0xa8, 0x88], size, 0, at, blocks))
                    .good()
                    .data;
                assert_eq!(data, self.0[from..to]);
            }
            Action::Write => {
                let cdb = sized([0x2a, 0xaa, 0x8a], size, fill & 0x18, at, blocks);
                rig.send_out(&cdb, &fresh).good();
                self.0[from..to].copy_from_slice(&fresh);
            }
            Action::WriteAndVerify => {
                let cdb = sized([0x2e, 0xae, 0x8e], size, 0x02, at, blocks);
                rig.send_out(&cdb, &fresh).good();
                self.0[from..to].copy_from_slice(&fresh);
            }
            Action::Verify => {
                let cdb = sized([0x2f, 0xaf, 0x8f], size, 0x02, at, blocks);
                let expected = self.0[from..to].to_vec();
                rig.send_out(&cdb, &expected).good();
            }
            Action::VerifyWrong => {
                let cdb = sized([0x2f, 0xaf, 0x8f], size, 0x02, at, blocks);
                let mut wrong = self.0[from..to].to_vec();
                let Some(byte) = wrong
                    .len()
                    .checked_sub(1)
                    .map(|last| last * usize::from(fill) / 255)
                else {
                    return;
                };
                wrong[byte] ^= 0x10;
                let outcome = rig.send_out(&cdb, &wrong);
                assert_eq!(outcome.check(), (0xe, 0x1d, 0));
                assert_eq!(outcome.sense().information, Some(byte as u64));
            }
            Action::WriteSame { unmap, zero } => {
                // There is no 12-byte CDB.
                let size = if size % 3 == 1 { 0 } else { size };
                let cdb = sized([0x41, 0, 0x93], size, u8::from(unmap) << 3, at, blocks);
                let pattern = if zero {
                    vec![0; block]
                } else {
                    vec![fill | 1; block]
                };
                let outcome = rig.send_out(&cdb, &pattern);
                if blocks == 0 {
                    assert_eq!(outcome.check(), (5, 0x24, 0));
                    return;
                }
                outcome.good();
                self.0[from..to].copy_from_slice(&pattern.repeat(blocks as usize));
            }
            Action::CompareAndWrite => {
                let most = rig.send(&[0x12, 1, 0xb0, 0, 64, 0]).good().data[5];
                let cdb = sized([0x89; 3], 2, fill & 0x18, at, blocks);
                let data = [&self.0[from..to], &fresh].concat();
                let outcome = rig.send_out(&cdb, &data);
                if blocks > u32::from(most) {
                    assert_eq!(outcome.check(), (5, 0x24, 0));
                    return;
                }
                outcome.good();
                self.0[from..to].copy_from_slice(&fresh);
            }
            Action::OrWrite => {
                let cdb = sized([0x8b; 3], 2, fill & 0x18, at, blocks);
                rig.send_out(&cdb, &fresh).good();
                for (byte, bits) in self.0[from..to].iter_mut().zip(&fresh) {
                    *byte |= bits;
                }
            }
            Action::Unmap => {
                let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
                list.extend(at.to_be_bytes());
                list.extend(blocks.to_be_bytes());
                list.extend([0; 4]);
                rig.send_out(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list)
                    .good();
                self.0[from..to].fill(0);
            }
            Action::Flush => {
                let size = if size % 3 == 1 { 0 } else { size };
                rig.send(&sized([0x35, 0, 0x91], size, 0, at, blocks))
                    .good();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// A CDB should never cause a panic or an endless loop, for any buffer size. This also checks
    /// residuals, ranges and buffer bounds.
    #[test]
    fn random_cdbs_return_response(
        cdb in any_cdb(),
        out in proptest::collection::vec(any::<u8>(), 0..2000),
        data_in in prop_oneof![0..2000_u32, Just(u32::MAX)],
    ) {
        let mut rig = Rig::new();
        let outcome = rig.run(A, &cdb, &out, data_in);
        let status = outcome.response.status;
        // PERSISTENT RESERVE OUT from a nexus that is not registered (SPC-4, 5.13).
        let is_conflict = cdb.first() == Some(&0x5f) && status == Status::ReservationConflict;
        prop_assert!(is_conflict || matches!(status, Status::Good | Status::CheckCondition));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn medium_matches_written_data(
        big_blocks in any::<bool>(),
        window in prop_oneof![Just(4096_u32), Just(12_288), Just(128 << 10)],
        script in proptest::collection::vec(
            (any_action(), 0..60_u64, 0..17_u32, any::<usize>(), any::<u8>()),
            1..60,
        ),
    ) {
        let size = if big_blocks { BlockSize::B4096 } else { BlockSize::B512 };
        let mut config = config(size, 76);
        config.limits.max_transfer = 128 << 10;
        config.limits.window = window;
        let mut rig = Rig::with(config);
        let mut reference = Reference(rig.disk.clone());
        for (action, at, blocks, form, fill) in script {
            reference.step(&mut rig, action, at, blocks, form, fill);
        }
        prop_assert!(rig.disk == reference.0);
    }
}

/// Returns a parameter list that is valid except for a few bytes.
fn nearly(right: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let len = right.len();
    let changes = proptest::collection::vec((0..len, any::<u8>()), 0..3);
    (changes, 0..=len).prop_map(move |(changes, cut)| {
        let mut list = right.clone();
        for (at, byte) in changes {
            list[at] = byte;
        }
        if cut % 4 == 0 {
            list.truncate(cut);
        }
        list
    })
}

/// MODE SELECT (6) with a block descriptor, the Caching page and the Control page.
fn mode_list() -> Vec<u8> {
    let mut list = vec![0, 0, 0, 8, 0, 0, 0, 128, 0, 0, 2, 0];
    list.extend([
        0x08, 0x12, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ]);
    list.extend([0x0a, 0x0a, 2, 0x10, 0, 0x40, 0, 0, 0xff, 0xff, 0, 0]);
    list
}

/// UNMAP with three descriptors.
fn unmap_list() -> Vec<u8> {
    let mut list = vec![0, 54, 0, 48, 0, 0, 0, 0];
    for lba in [0, 50, 120] {
        list.extend([0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, 8, 0, 0, 0, 0]);
    }
    list
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// A MODE SELECT should either update everything or nothing, and MODE SENSE should then return
    /// the same values.
    #[test]
    fn mode_select_is_all_or_nothing(list in nearly(mode_list())) {
        let mut rig = Rig::new();
        let pages = [0x5a, 0x08, 0x3f, 0, 0, 0, 0, 1, 0, 0];
        let before = rig.send(&pages).good().data;
        let outcome = rig.send_out(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list);
        let after = rig.send(&pages).good().data;
        if outcome.response.status == Status::Good {
            // After the header, the list contains exactly the pages that were set.
            let set = list.get(4 + usize::from(*list.get(3).unwrap_or(&0))..).unwrap_or_default();
            for page in [&after[8 + 12..8 + 32], &after[8 + 32..8 + 44]] {
                let there = set.windows(page.len()).any(|window| window == page);
                let mentioned = set.len() >= 32;
                prop_assert!(there || !mentioned);
            }
        } else {
            prop_assert_eq!(before, after);
        }
    }

    /// An UNMAP should either discard blocks within the capacity, or not change anything.
    #[test]
    fn unmap_is_all_or_nothing(list in nearly(unmap_list())) {
        let mut rig = Rig::new();
        let before = rig.disk.clone();
        let outcome = rig.send_out(&[0x42, 0, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], &list);
        if outcome.response.status != Status::Good {
            prop_assert!(outcome.ops.is_empty());
            prop_assert!(rig.disk == before);
        }
    }

    /// Decoders should not panic for any bytes. If they return a value, encoding and decoding it
    /// should return the same value.
    #[test]
    fn decoders_accept_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        use crate::lun::LunAddress;
        use crate::sense::{Sense, SenseFormat};
        if let Some(sense) = Sense::parse(&bytes) {
            let again = Sense::parse(&sense.encode(SenseFormat::Descriptor)).unwrap();
            // A target never sends deferred errors, so these are encoded as current errors.
            let current = Sense { is_deferred: false, ..sense };
            prop_assert_eq!(again, current);
        }
        if let Some(lun) = bytes.first_chunk::<8>()
            && let Ok(LunAddress::Unit(unit)) = LunAddress::parse(*lun)
        {
            prop_assert_eq!(LunAddress::parse(unit.encode()), Ok(LunAddress::Unit(unit)));
        }
    }
}
