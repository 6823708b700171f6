//! Fuzz target: a live logical unit, driven by arbitrary CDBs.

use std::io;
use std::sync::Arc;

use riser_scsi::config::{BlockSize, Config, Identity, Limits, Provisioning};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_scsi::step::{Allocation, BlockOp, Expected, Request, Step, StepResult, TaskAttribute};
use riser_scsi::vpd::Naa;

/// More steps than any command may take on the small disk of this test.
const MANY: usize = 10_000;

/// Takes every change of reservations, so that initiators can have them persist.
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

/// Every command ends in an answer after a bounded number of steps, each within the medium and the
/// buffer that the command asked for, whatever its bytes.
#[test]
fn cdb() {
    type Input = (Vec<(bool, Vec<u8>, u16, u16)>, Vec<u8>);
    bolero::check!()
        .with_type::<Input>()
        .for_each(|(commands, fill)| {
            let lu = logical_unit();
            for (second, cdb, data_out, data_in) in commands {
                let expected = Expected {
                    data_out: u32::from(*data_out),
                    data_in: u32::from(*data_in),
                };
                let (mut command, mut step) = lu.start(&Request {
                    nexus: NexusId(1 + u64::from(*second)),
                    cdb,
                    expected,
                    attribute: TaskAttribute::Simple,
                    luns: &[LunId::ZERO],
                    read_only: false,
                });
                let mut buffer = vec![0; command.buffer_len() as usize];
                for (i, byte) in buffer.iter_mut().enumerate() {
                    *byte = fill.get(i % fill.len().max(1)).copied().unwrap_or(0);
                }
                let mut steps = 0;
                while !matches!(step, Step::Respond(_)) {
                    let result = carry_out(&step, &lu, buffer.len(), expected);
                    step = command.advance(&lu, result, &mut buffer);
                    steps += 1;
                    assert!(steps < MANY, "no answer to {cdb:02x?}");
                }
                let Step::Respond(response) = step else {
                    unreachable!("the loop ended")
                };
                let end = response.data_in.from() + response.data_in.len();
                assert!(end <= expected.data_in, "{cdb:02x?}");
            }
        });
}

/// Checks that a step stays within its bounds, and says that it is done.
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
        Step::Respond(_) => {}
    }
    StepResult::Done
}
