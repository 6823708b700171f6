//! Tests that run commands on a simulated disk.
//!
//! [`Rig`] is used as both transport and backend: it starts a command, executes the steps using a
//! byte array and a scattered data buffer, and checks that each step is valid.

mod atomic;
mod identity;
mod interleavings;
mod lengths;
mod linux;
mod medium;
mod modes;
mod persist;
mod properties;
mod protection;
mod reporting;
mod reserve;
mod state;
mod stream;

use crate::access::DataAccess;
use crate::config::{BlockSize, Config, Identity, Limits, ProtectionFormat, Provisioning};
use crate::data::designator::Naa;
use crate::device_server::Request;
use crate::lu::LogicalUnit;
use crate::lun::LunId;
use crate::nexus::{Nexus, NexusId, PortName, TargetPort};
use crate::opcode::Opcode;
use crate::sense::Sense;
use crate::step::{
    Allocation, BackendError, BlockOp, DataIn, Expected, Residual, Response, Status, Step,
    StepResult, TaskAttribute,
};

pub(crate) const A: NexusId = NexusId(1);
pub(crate) const B: NexusId = NexusId(2);

/// A buffer split into pieces of 1000 bytes, so that a block can be in more than one segment.
struct Scatter {
    pieces: Vec<Vec<u8>>,
    len: u32,
}

const PIECE: usize = 1000;

impl Scatter {
    fn new(len: u32) -> Self {
        let mut pieces = vec![vec![0xee; PIECE]; len as usize / PIECE];
        pieces.push(vec![0xee; len as usize % PIECE]);
        Self { pieces, len }
    }
}

impl DataAccess for Scatter {
    fn len(&self) -> u32 {
        self.len
    }
    fn read(&self, offset: u32, into: &mut [u8]) {
        for (at, byte) in (offset as usize..).zip(into) {
            *byte = self.pieces[at / PIECE][at % PIECE];
        }
    }
    fn write(&mut self, offset: u32, from: &[u8]) {
        for (at, byte) in (offset as usize..).zip(from) {
            self.pieces[at / PIECE][at % PIECE] = *byte;
        }
    }
}

/// Result of a command.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) response: Response,
    pub(crate) data: Vec<u8>,
    pub(crate) ops: Vec<BlockOp>,
}

impl Outcome {
    #[track_caller]
    pub(crate) fn good(self) -> Self {
        assert_eq!(
            self.response.status,
            Status::Good,
            "{:?}",
            self.response.parsed_sense()
        );
        assert!(self.response.sense.is_empty());
        self
    }

    /// Checks that the status is CHECK CONDITION, and returns the key, code and qualifier.
    #[track_caller]
    pub(crate) fn check(&self) -> (u8, u8, u8) {
        assert_eq!(self.response.status, Status::CheckCondition);
        let sense = self.sense();
        (
            sense.key as u8,
            sense.additional.code,
            sense.additional.qualifier,
        )
    }

    #[track_caller]
    pub(crate) fn sense(&self) -> Sense {
        self.response.parsed_sense().expect("sense data")
    }

    /// Returns the byte and bit in the CDB from the sense data.
    #[track_caller]
    pub(crate) fn cdb_pointer(&self) -> (u16, Option<u8>) {
        let field = self.sense().field.expect("field pointer");
        assert!(field.in_cdb);
        (field.byte, field.bit)
    }
}

pub(crate) struct Rig {
    pub(crate) lu: LogicalUnit,
    pub(crate) disk: Vec<u8>,
    /// Protection information of each block. Only used if the LU is protected.
    pub(crate) tags: Vec<[u8; 8]>,
    /// Whether space is allocated, for every block.
    pub(crate) mapped: Vec<bool>,
    pub(crate) luns: Vec<LunId>,
    /// Let a block operation fail with this error.
    pub(crate) fail: Option<BackendError>,
    /// Number of block operations that are successful before this.
    pub(crate) passes: usize,
    pub(crate) attribute: TaskAttribute,
    /// Use a read-only LUN for all commands.
    pub(crate) read_only: bool,
}

pub(crate) fn config(block_size: BlockSize, blocks: u64) -> Config {
    Config {
        blocks,
        block_size,
        protection: None,
        protection_format: ProtectionFormat::default(),
        physical_exponent: if block_size == BlockSize::B512 { 3 } else { 0 },
        read_only: false,
        provisioning: Provisioning::Thin { granularity: 1 },
        threshold: None,
        write_cache: true,
        stoppable: false,
        rotational: false,
        identity: Identity {
            vendor: "RISER".into(),
            product: "DISK".into(),
            revision: "0001".into(),
            serial: "S1".into(),
            naa: Naa::LocallyAssigned(0x123_4567_89ab_cdef),
        },
        limits: Limits {
            max_transfer: 64 << 10,
            window: 64 << 10,
            segment: 8192,
            max_write_same_blocks: 64,
            max_unmap_blocks: 100,
            max_unmap_descriptors: 4,
            ..Limits::default()
        },
        cache_generation: None,
    }
}

pub(crate) fn srp_nexus(initiator: u8) -> Nexus {
    Nexus {
        initiator: PortName::Srp([initiator; 16]),
        target: TargetPort {
            name: PortName::Srp(*b"target-port-name"),
            relative_id: 1,
            group: 2,
        },
    }
}

impl Rig {
    /// Creates a new thin provisioned LU with 128 blocks of 512 bytes and a write cache. The
    /// initial unit attentions of nexus A and B have already been cleared.
    pub(crate) fn new() -> Self {
        Self::with(config(BlockSize::B512, 128))
    }

    pub(crate) fn with(config: Config) -> Self {
        let rig = Self::raw(config);
        for id in [A, B] {
            assert!(rig.lu.take_attention(id).is_some());
        }
        rig
    }

    /// Same as `with`, but the initial unit attentions are still pending.
    pub(crate) fn raw(config: Config) -> Self {
        Self::of(LogicalUnit::new(config).expect("valid configuration"))
    }

    /// Uses this LU. The initial unit attentions are still pending.
    pub(crate) fn of(lu: LogicalUnit) -> Self {
        let config = lu.config();
        let blocks = config.blocks as usize;
        let block = config.block_size.bytes() as usize;
        // For a large disk, we only fill the start of it because no test reads the rest.
        let mut disk = vec![0; blocks * block];
        for (at, byte) in disk.iter_mut().enumerate().take(1 << 20) {
            *byte = (at / block + at % 251) as u8;
        }
        lu.add_nexus(A, srp_nexus(0xaa));
        lu.add_nexus(B, srp_nexus(0xbb));
        Self {
            lu,
            disk,
            tags: vec![[0xff; 8]; blocks],
            mapped: vec![true; blocks],
            luns: vec![LunId::ZERO],
            fail: None,
            passes: 0,
            attribute: TaskAttribute::Simple,
            read_only: false,
        }
    }

    pub(crate) fn block(&self) -> usize {
        self.lu.config().block_size.bytes() as usize
    }

    /// Sends a command without Data-Out, with enough space for any Data-In.
    pub(crate) fn send(&mut self, cdb: &[u8]) -> Outcome {
        self.run(A, cdb, &[], 1 << 20)
    }

    /// Sends a command with Data-Out.
    pub(crate) fn send_out(&mut self, cdb: &[u8], data_out: &[u8]) -> Outcome {
        self.run(A, cdb, data_out, 0)
    }

    /// Runs a command until the response.
    pub(crate) fn run(&mut self, nexus: NexusId, cdb: &[u8], out: &[u8], data_in: u32) -> Outcome {
        let expected = Expected {
            data_out: out.len() as u32,
            data_in,
        };
        let luns = self.luns.clone();
        let attribute = self.attribute;
        let request = Request {
            nexus,
            cdb,
            opcode: Opcode::of(cdb),
            expected,
            attribute,
            luns: &luns,
            read_only: self.read_only,
        };
        let (mut command, mut step) = self.lu.start(&request);
        let limits = self.lu.config().limits;
        assert!(command.buffer_len() <= limits.window + limits.segment);
        let mut sent = Vec::new();
        let mut received = 0;
        let mut buffer = Scatter::new(command.buffer_len());
        let mut ops = Vec::new();
        for _ in 0..10_000 {
            let result = match step {
                Step::Respond(response) => {
                    return finish(response, sent, &buffer, ops, expected);
                }
                Step::ReceiveData { from, len } => {
                    assert_eq!(from, received, "pieces are received in order");
                    received += len;
                    buffer.write(0, &out[from as usize..received as usize]);
                    StepResult::Done
                }
                Step::SendData { from, len } => {
                    assert_eq!(from as usize, sent.len(), "pieces are sent in order");
                    let mut bytes = vec![0; len as usize];
                    buffer.read(0, &mut bytes);
                    sent.extend(bytes);
                    StepResult::Done
                }
                Step::Block(op) => {
                    ops.push(op);
                    let is_due = self.passes == 0;
                    self.passes = self.passes.saturating_sub(1);
                    match self.fail.take_if(|_| is_due) {
                        Some(error) => StepResult::Failed(error),
                        None => self.execute(op, &mut buffer),
                    }
                }
            };
            step = command.advance(&self.lu, result, &mut buffer);
        }
        panic!("the command {cdb:02x?} does not end");
    }

    /// Returns the range of a block operation. This must be whole blocks within the capacity.
    fn blocks(&self, offset: u64, len: u64) -> std::ops::Range<usize> {
        let block = self.block() as u64;
        assert!(len > 0 && offset.is_multiple_of(block) && len.is_multiple_of(block));
        assert!(offset + len <= self.lu.capacity_bytes());
        (offset / block) as usize..((offset + len) / block) as usize
    }

    /// Returns the offset of every tuple in the buffer, or no offsets if the LU is not protected.
    fn tag_offsets(&self, tags: Option<u32>, blocks: usize) -> impl Iterator<Item = u32> + use<> {
        assert_eq!(tags.is_some(), self.lu.config().protection.is_some());
        let blocks = tags.map_or(0, |_| blocks as u32);
        (0..blocks).map(move |block| tags.unwrap_or(0) + 8 * block)
    }

    fn execute(&mut self, op: BlockOp, buffer: &mut Scatter) -> StepResult {
        let size = self.block();
        match op {
            BlockOp::Read {
                offset,
                len,
                buffer_offset,
                tags,
                ..
            } => {
                let blocks = self.blocks(offset, len.into());
                let bytes = &self.disk[blocks.start * size..blocks.end * size];
                buffer.write(buffer_offset, bytes);
                let to = self.tag_offsets(tags, blocks.len());
                for (at, tuple) in to.zip(&self.tags[blocks]) {
                    buffer.write(at, tuple);
                }
            }
            BlockOp::Write {
                offset,
                len,
                buffer_offset,
                tags,
                ..
            } => {
                let blocks = self.blocks(offset, len.into());
                self.mapped[blocks.clone()].fill(true);
                let bytes = &mut self.disk[blocks.start * size..blocks.end * size];
                buffer.read(buffer_offset, bytes);
                let from = self.tag_offsets(tags, blocks.len());
                for (at, tuple) in from.zip(&mut self.tags[blocks]) {
                    buffer.read(at, tuple);
                }
            }
            BlockOp::Flush { offset, len } => {
                self.blocks(offset, len);
            }
            BlockOp::Discard { offset, len } | BlockOp::WriteZeroes { offset, len, .. } => {
                let blocks = self.blocks(offset, len);
                self.disk[blocks.start * size..blocks.end * size].fill(0);
                self.tags[blocks.clone()].fill([0xff; 8]);
                let deallocates = !matches!(op, BlockOp::WriteZeroes { unmap: false, .. });
                self.mapped[blocks].fill(!deallocates);
            }
            BlockOp::ChangeReservations(change) => {
                return StepResult::Reservations(self.lu.save_reservations(&change).map(drop));
            }
            BlockOp::ChangeProtection(change) => {
                if let Err(error) = self.lu.save_protection(&change, |_| Ok(())) {
                    return StepResult::Failed(error);
                }
            }
            BlockOp::Status { offset, len } => {
                let blocks = self.blocks(offset, len);
                let first = self.mapped[blocks.start];
                let alike = self.mapped[blocks]
                    .iter()
                    .take_while(|&&m| m == first)
                    .count();
                let allocation = if first {
                    Allocation::Mapped
                } else {
                    Allocation::Deallocated
                };
                return StepResult::Status {
                    allocation,
                    len: (alike * size) as u64,
                };
            }
        }
        StepResult::Done
    }
}

/// Collects the Data-In and checks that the response is valid.
fn finish(
    response: Response,
    mut data: Vec<u8>,
    buffer: &Scatter,
    ops: Vec<BlockOp>,
    expected: Expected,
) -> Outcome {
    match &response.data_in {
        DataIn::None => {}
        DataIn::Inline(bytes) => data.extend(bytes),
        DataIn::Buffer { from, len } => {
            assert_eq!(*from as usize, data.len(), "pieces are sent in order");
            let mut bytes = vec![0; *len as usize];
            buffer.read(0, &mut bytes);
            data.extend(bytes);
        }
    }
    assert!(data.len() <= expected.data_in as usize);
    assert_eq!(
        response.sense.is_empty(),
        response.status != Status::CheckCondition
    );
    let moved = data.len() as u32;
    match response.residual_in {
        Residual::None | Residual::Overflow(_) => assert_eq!(moved, expected.data_in),
        Residual::Underflow(less) => assert_eq!(moved + less, expected.data_in),
    }
    Outcome {
        response,
        data,
        ops,
    }
}
