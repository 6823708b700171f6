//! Sends INQUIRY, WRITE(10) and READ(10) to a logical unit whose medium is a byte array.
//!
//! ```sh
//! cargo run -p riser-scsi --example unit
//! ```
//!
//! The logical unit does not perform any I/O, so in this example the function `execute` provides
//! both the transport and the backend.

#![allow(clippy::print_stdout, reason = "the results are printed")]

use std::error::Error;

use riser_scsi::access::DataAccess;
use riser_scsi::config::{BlockSize, Config, Identity, Limits, ProtectionFormat, Provisioning};
use riser_scsi::data::designator::Naa;
use riser_scsi::device_server::Request;
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::opcode::Opcode;
use riser_scsi::step::{
    BackendError, BlockOp, DataIn, Expected, Response, Status, Step, StepResult, TaskAttribute,
};

const NEXUS: NexusId = NexusId(1);
const BLOCK: usize = 512;
const BLOCKS: usize = 2048;

/// Buffer of a command.
struct Buffer(Vec<u8>);

impl DataAccess for Buffer {
    fn len(&self) -> u32 {
        self.0.len() as u32
    }

    fn read(&self, offset: u32, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.0[start..start + into.len()]);
    }

    fn write(&mut self, offset: u32, from: &[u8]) {
        let start = offset as usize;
        self.0[start..start + from.len()].copy_from_slice(from);
    }
}

struct Disk {
    unit: LogicalUnit,
    medium: Vec<u8>,
}

impl Disk {
    fn new() -> Result<Self, Box<dyn Error>> {
        let unit = LogicalUnit::new(Config {
            blocks: BLOCKS as u64,
            block_size: BlockSize::B512,
            physical_exponent: 3,
            read_only: false,
            provisioning: Provisioning::Thick,
            threshold: None,
            write_cache: false,
            stoppable: false,
            rotational: false,
            identity: Identity {
                vendor: "RISER".into(),
                product: "EXAMPLE".into(),
                revision: "1".into(),
                serial: "0001".into(),
                naa: Naa::LocallyAssigned(0x123_4567_89ab_cdef),
            },
            limits: Limits::default(),
            protection: None,
            protection_format: ProtectionFormat::default(),
            cache_generation: None,
        })?;
        let nexus = Nexus {
            initiator: PortName::Srp([1; 16]),
            target: TargetPort {
                name: PortName::Srp([2; 16]),
                relative_id: 1,
                group: 1,
            },
        };
        unit.add_nexus(NEXUS, nexus);
        Ok(Self {
            unit,
            medium: vec![0; BLOCKS * BLOCK],
        })
    }

    /// Processes a command until it is complete. Returns the response and the Data-In.
    fn execute(&mut self, cdb: &[u8], data_out: &[u8], data_in: u32) -> (Response, Vec<u8>) {
        let request = Request {
            nexus: NEXUS,
            cdb,
            opcode: Opcode::of(cdb),
            expected: Expected {
                data_out: data_out.len() as u32,
                data_in,
            },
            attribute: TaskAttribute::Simple,
            luns: &[LunId::ZERO],
            read_only: false,
        };
        let (mut command, mut step) = self.unit.start(&request);
        let mut buffer = Buffer(vec![0; command.buffer_len() as usize]);
        let mut received = Vec::new();
        loop {
            let result = match step {
                Step::ReceiveData { from, len } => {
                    let start = from as usize;
                    buffer.write(0, &data_out[start..start + len as usize]);
                    StepResult::Done
                }
                Step::SendData { len, .. } => {
                    received.extend(&buffer.0[..len as usize]);
                    StepResult::Done
                }
                Step::Block(op) => self.access_medium(op, &mut buffer),
                Step::Respond(response) => {
                    match &response.data_in {
                        DataIn::None => {}
                        DataIn::Inline(bytes) => received.extend(bytes),
                        DataIn::Buffer { len, .. } => received.extend(&buffer.0[..*len as usize]),
                    }
                    return (response, received);
                }
            };
            step = command.advance(&self.unit, result, &mut buffer);
        }
    }

    fn access_medium(&mut self, op: BlockOp, buffer: &mut Buffer) -> StepResult {
        match op {
            BlockOp::Read {
                offset,
                len,
                buffer_offset,
                ..
            } => {
                let start = offset as usize;
                buffer.write(buffer_offset, &self.medium[start..start + len as usize]);
                StepResult::Done
            }
            BlockOp::Write {
                offset,
                len,
                buffer_offset,
                ..
            } => {
                let start = offset as usize;
                buffer.read(buffer_offset, &mut self.medium[start..start + len as usize]);
                StepResult::Done
            }
            BlockOp::Flush { .. } => StepResult::Done,
            _ => StepResult::Failed(BackendError::Internal),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut disk = Disk::new()?;
    let test_unit_ready = [0; 6];
    let (response, _) = disk.execute(&test_unit_ready, &[], 0);
    println!("first command: {:?}", response.parsed_sense());

    let inquiry = [0x12, 0, 0, 0, 96, 0];
    let (_, data) = disk.execute(&inquiry, &[], 96);
    println!("product: {}", String::from_utf8_lossy(&data[16..32]));

    let lba = 7;
    let write = [0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    let (response, _) = disk.execute(&write, &[0xa5; BLOCK], 0);
    println!("WRITE: {:?}", response.status);

    let read = [0x28, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    let (response, data) = disk.execute(&read, &[], BLOCK as u32);
    println!("READ: {:?}, first byte {:#04x}", response.status, data[0]);
    if response.status != Status::Good || data != [0xa5; BLOCK] {
        return Err("the data read differ from the data written".into());
    }
    Ok(())
}

#[test]
fn example_succeeds() {
    main().unwrap();
}
