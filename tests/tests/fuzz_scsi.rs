//! Fuzz targets for an active logical unit using both arbitrary and valid CDBs, and for parameter
//! data that is parsed by an initiator.

use std::io;
use std::sync::Arc;

use riser::inquiry;
use riser_initiator::scsi as received;
use riser_scsi::config::{BlockSize, Config, Identity, Limits, ProtectionFormat, Provisioning};
use riser_scsi::data::designator::Naa;
use riser_scsi::data::{designator, lba_status, luns, vpd};
use riser_scsi::device_server::Request;
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::opcode::Opcode;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_scsi::sense::Sense;
use riser_scsi::step::{Allocation, BlockOp, Expected, Step, StepResult, TaskAttribute};
use riser_tests::seeds;

/// No command should need more steps than this with the small disk used here.
const MANY: usize = 10_000;

/// Accepts all changes to reservations, so that initiators can use persistent reservations.
#[derive(Debug)]
struct Forgetful;

impl ReservationKeeper for Forgetful {
    fn load(&self, _: &Identity) -> io::Result<Option<SavedReservations>> {
        Ok(None)
    }

    fn save(&self, _: &Identity, _: Option<&SavedReservations>) -> io::Result<()> {
        Ok(())
    }
}

fn logical_unit() -> LogicalUnit {
    let lu = LogicalUnit::new(Config {
        blocks: 1 << 12,
        block_size: BlockSize::B512,
        protection: None,
        protection_format: ProtectionFormat::default(),
        physical_exponent: 3,
        read_only: false,
        provisioning: Provisioning::Thin { granularity: 8 },
        write_cache: true,
        stoppable: false,
        rotational: false,
        identity: Identity {
            vendor: "FUZZ".into(),
            product: "DISK".into(),
            revision: "1".into(),
            serial: "1".into(),
            naa: Naa::LocallyAssigned(7),
        },
        limits: Limits {
            max_transfer: 1 << 16,
            window: 1 << 13,
            segment: 1 << 12,
            ..Limits::default()
        },
        cache_generation: None,
        threshold: None,
    })
    .expect("a legal configuration")
    .with_keeper(Arc::new(Forgetful))
    .expect("it has kept nothing");
    let port = TargetPort {
        name: PortName::Srp([1; 16]),
        relative_id: 1,
        group: 0,
    };
    for id in [1, 2] {
        let initiator = PortName::Srp([id as u8; 16]);
        lu.add_nexus(
            NexusId(id),
            Nexus {
                initiator,
                target: port.clone(),
            },
        );
    }
    lu
}

/// Which of the two initiators to use, the CDB, and the number of bytes to send and receive.
type Command = (bool, Vec<u8>, u16, u16);

/// For any CDB, the command must return a response after a limited number of steps. All steps must
/// be within the medium and the buffer requested by the command.
#[test]
fn cdb() {
    bolero::check!()
        .with_type::<(Vec<Command>, Vec<u8>)>()
        .for_each(|(commands, fill)| carry_out_all(commands, fill));
}

/// Operation codes with service actions, if any: READ, WRITE, VERIFY, COMPARE AND WRITE, WRITE
/// SAME, UNMAP, reservations, MODE SENSE and SELECT, and commands that return information about the
/// unit.
const COMMANDS: [(u8, &[u8]); 38] = [
    (0x00, &[]),
    (0x03, &[]),
    (0x08, &[]),
    (0x0a, &[]),
    (0x12, &[]),
    (0x15, &[]),
    (0x16, &[]),
    (0x17, &[]),
    (0x1a, &[]),
    (0x1b, &[]),
    (0x25, &[]),
    (0x28, &[]),
    (0x2a, &[]),
    (0x2e, &[]),
    (0x2f, &[]),
    (0x34, &[]),
    (0x35, &[]),
    (0x41, &[]),
    (0x42, &[]),
    (0x55, &[]),
    (0x5a, &[]),
    (0x5e, &[0, 1, 2, 3]),
    (0x5f, &[0, 1, 2, 3, 4, 5, 6, 7]),
    (0x88, &[]),
    (0x89, &[]),
    (0x8a, &[]),
    (0x8b, &[]),
    (0x8e, &[]),
    (0x8f, &[]),
    (0x90, &[]),
    (0x91, &[]),
    (0x93, &[]),
    (0x9e, &[0x10, 0x12]),
    (0xa0, &[]),
    (0xa3, &[0x0a, 0x0c, 0x0d]),
    (0xa8, &[]),
    (0xaa, &[]),
    (0xaf, &[]),
];

/// Creates the CDB of an existing command with the correct length. If `near` is set, address and
/// length are small, so that most are in range.
fn known_cdb(which: u8, action: u8, fields: [u8; 15], near: bool) -> Vec<u8> {
    let (opcode, actions) = COMMANDS[usize::from(which) % COMMANDS.len()];
    let len = match opcode >> 5 {
        0 => 6,
        1 | 2 => 10,
        4 => 16,
        _ => 12,
    };
    let mut cdb = vec![opcode];
    cdb.extend_from_slice(&fields[..len - 1]);
    if near {
        // Flags are rarely set, addresses are below 4096, and the length is a single byte.
        let last = len - 1;
        cdb[1] &= 0x01;
        cdb[last] = 0;
        match len {
            10 => (cdb[2], cdb[3], cdb[4], cdb[6], cdb[7]) = (0, 0, fields[3] & 0x0f, 0, 0),
            12 => {
                (cdb[2], cdb[3], cdb[4]) = (0, 0, fields[3] & 0x0f);
                cdb[6..9].fill(0);
            }
            16 => {
                cdb[2..8].fill(0);
                cdb[8] = fields[7] & 0x0f;
                cdb[10..13].fill(0);
            }
            _ => {}
        }
    }
    if !actions.is_empty() {
        cdb[1] = cdb[1] & 0xe0 | actions[usize::from(action) % actions.len()];
    }
    cdb
}

/// Uses commands that are supported by the unit with mostly valid parameters. This covers more code
/// than arbitrary bytes.
#[test]
fn known_commands() {
    type Known = (bool, u8, u8, [u8; 15], bool, u16, u16);
    bolero::check!()
        .with_type::<(Vec<Known>, Vec<u8>)>()
        .for_each(|(known, fill)| {
            let commands: Vec<Command> = known
                .iter()
                .map(|&(second, which, action, fields, near, out, into)| {
                    (second, known_cdb(which, action, fields, near), out, into)
                })
                .collect();
            carry_out_all(&commands, fill);
        });
}

/// For each command there must be a form that is executed by the unit, or only rejected because of
/// its parameters.
#[test]
fn known_commands_are_known() {
    let lu = logical_unit();
    for which in 0..COMMANDS.len() as u8 {
        let actions = COMMANDS[usize::from(which)].1.len().max(1) as u8;
        for action in 0..actions {
            let cdb = known_cdb(which, action, [0; 15], true);
            for nexus in [1, 1] {
                let (_, step) = lu.start(&request(&cdb, NexusId(nexus), 512, 512));
                let Step::Respond(response) = step else {
                    continue;
                };
                // INVALID COMMAND OPERATION CODE
                let sense = &response.sense;
                assert!(sense.get(12) != Some(&0x20), "{cdb:02x?}: {sense:02x?}");
            }
        }
    }
}

fn request(cdb: &[u8], nexus: NexusId, data_out: u32, data_in: u32) -> Request<'_> {
    Request {
        nexus,
        cdb,
        opcode: Opcode::of(cdb),
        expected: Expected { data_out, data_in },
        attribute: TaskAttribute::Simple,
        luns: &[LunId::ZERO],
        read_only: false,
    }
}

fn carry_out_all(commands: &[Command], fill: &[u8]) {
    let lu = logical_unit();
    for (second, cdb, data_out, data_in) in commands {
        let expected = Expected {
            data_out: u32::from(*data_out),
            data_in: u32::from(*data_in),
        };
        let nexus = NexusId(1 + u64::from(*second));
        let (out, into) = (expected.data_out, expected.data_in);
        let (mut command, mut step) = lu.start(&request(cdb, nexus, out, into));
        let mut buffer = vec![0; command.buffer_len() as usize];
        for (i, byte) in buffer.iter_mut().enumerate() {
            *byte = fill.get(i % fill.len().max(1)).copied().unwrap_or(0);
        }
        let mut steps = 0;
        while !matches!(step, Step::Respond(_)) {
            let result = carry_out(&step, &lu, buffer.len(), expected);
            step = command.advance(&lu, result, &mut buffer);
            steps += 1;
            assert!(steps < MANY, "no response to {cdb:02x?}");
        }
        let Step::Respond(response) = step else {
            unreachable!("the loop ended")
        };
        let end = response.data_in.from() + response.data_in.len();
        assert!(end <= expected.data_in, "{cdb:02x?}");
    }
}

/// Checks that a step is in range and completes it.
fn carry_out(step: &Step, lu: &LogicalUnit, buffer: usize, expected: Expected) -> StepResult {
    let size = lu.capacity_bytes();
    let on_medium = |offset: u64, len: u64| assert!(offset + len <= size);
    match *step {
        Step::ReceiveData { from, len } => {
            assert!(from + len <= expected.data_out && len as usize <= buffer);
        }
        Step::SendData { from, len } => {
            assert!(from + len <= expected.data_in && len as usize <= buffer);
        }
        Step::Block(
            BlockOp::Read {
                offset,
                len,
                buffer_offset,
                ..
            }
            | BlockOp::Write {
                offset,
                len,
                buffer_offset,
                ..
            },
        ) => {
            on_medium(offset, u64::from(len));
            assert!(buffer_offset as usize + len as usize <= buffer);
        }
        Step::Block(
            BlockOp::Flush { offset, len }
            | BlockOp::Discard { offset, len }
            | BlockOp::WriteZeroes { offset, len, .. },
        ) => on_medium(offset, len),
        Step::Block(BlockOp::Status { offset, len }) => {
            on_medium(offset, len);
            return StepResult::Status {
                allocation: Allocation::Mapped,
                len,
            };
        }
        Step::Block(BlockOp::ChangeReservations(change)) => {
            return StepResult::Reservations(lu.save_reservations(&change).map(drop));
        }
        Step::Block(BlockOp::ChangeProtection(change)) => {
            let saved = lu.save_protection(&change, |_| Ok(()));
            return saved.map_or_else(StepResult::Failed, |()| StepResult::Done);
        }
        Step::Respond(_) => {}
    }
    StepResult::Done
}

/// Parses the parameter data from a target as each of the supported types. All sizes must be valid,
/// and there must be no access beyond the end of the received data.
fn check_parameter_data(data: &[u8]) {
    if let Ok(capacity) = received::Capacity::parse(data) {
        let bytes = capacity.blocks.checked_mul(capacity.block_size.into());
        assert!(bytes.is_some(), "{capacity:?}");
    }
    let _ = (
        received::BlockLimits::parse(data),
        received::Provisioning::parse(data),
    );
    let _ = (received::CachingPage::parse(data), Sense::parse(data));
    if let Some(inquiry) = received::Inquiry::parse(data) {
        assert!(data.len() >= 36 && inquiry.vendor.len() <= 3 * 8);
    }
    assert!(luns::parse(data).len() <= data.len() / 8);
    assert!(lba_status::parse(data).len() <= data.len() / 16);
    for one in designator::parse(data) {
        assert!(one.id.len() <= data.len());
    }
    let _ = received::Identity::parse(Some(data), Some(data));
    let _ = inquiry::standard(data);
    for code in 0..=u8::MAX {
        if let Some(body) = vpd::body(data, code) {
            assert!(body.len() + 4 <= data.len());
            let _ = vpd::cache_generation(body);
        }
        let _ = inquiry::page(code, data);
    }
    let codes = inquiry::supported_pages(data);
    assert!(codes.map_or(0, |codes| codes.len()) <= data.len());
}

#[test]
fn parameter_data() {
    bolero::check!().for_each(check_parameter_data);
}

#[test]
fn changed_parameter_data() {
    let seeds = seeds::corpus("parameter_data");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_parameter_data(&seeds::change(&seeds, changes)));
}
