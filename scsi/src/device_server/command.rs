//! One command in flight.
//!
//! ```text
//!            LogicalUnit::start(request)
//!                      |
//!           +----------+-----------+
//!           v          v           v
//!     ReceiveData    Block      Respond  <--- refused, or answered at once
//!     SendData         |           |
//!           |          |           ^
//!           |  Done    |  Done,    |
//!           |          |  Status   |
//!           +--> advance(result) --+     <--- last step done, or Failed
//!                |           ^
//!                +-----------+           <--- further steps
//! ```
//!
//! Data that are longer than the window go through the buffer in pieces: a WRITE alternates between
//! `ReceiveData` and `Block`, a READ between `Block` and `SendData`, and its last piece goes with
//! the response.
//!
//! The target keeps the [`Command`] beside the task and calls
//! [`advance`](Command::advance) once for every step that it carried out. It
//! must have a buffer of [`buffer_len`](Command::buffer_len) bytes before it
//! carries out the first step that is not [`Step::Respond`]. A command may be
//! dropped at any time between two steps: an abort needs nothing else.
//!
//! Reads and writes allocate nothing.

use crate::access::DataAccess;
use crate::commands::machine::Machine;
use crate::commands::plan::{Context, Next, Plan, Reason, Refusal, Steps, Transfer};
use crate::lu::LogicalUnit;
use crate::nexus::NexusId;
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{
    BackendError, BlockOp, DataIn, Expected, Residual, Response, Status, Step, StepResult,
    TransferError,
};

/// A command between two steps.
#[derive(Debug)]
pub struct Command {
    nexus: NexusId,
    expected: Expected,
    transfer: Transfer,
    buffer_len: u32,
    /// Bytes of Data-Out that the initiator has been asked for.
    received: u32,
    /// Bytes of Data-In that were sent before the response.
    sent: u32,
    flight: Flight,
    /// The machine for the next steps; `None` when it is answered.
    machine: Option<Machine>,
}

/// The step being carried out, as far as an error report needs it.
#[derive(Clone, Copy, Debug)]
enum Flight {
    /// Not a block operation.
    Other,
    /// Reads from this byte.
    Reading(u64),
    /// Changes the medium from this byte.
    Writing(u64),
}

impl Flight {
    fn of(op: &BlockOp) -> Self {
        match *op {
            BlockOp::Read { offset, .. } | BlockOp::Status { offset, .. } => Self::Reading(offset),
            BlockOp::Write { offset, .. }
            | BlockOp::Flush { offset, .. }
            | BlockOp::Discard { offset, .. }
            | BlockOp::WriteZeroes { offset, .. } => Self::Writing(offset),
            BlockOp::ChangeReservations(_) => Self::Other,
        }
    }
}

impl Command {
    /// Starts a plan: makes the command in its place, and returns its first step.
    pub(crate) fn begin(
        lu: &LogicalUnit,
        (nexus, expected): (NexusId, Expected),
        plan: Result<Plan<Machine>, Refusal>,
        place: &mut Option<Self>,
    ) -> Step {
        let command = place.insert(Self {
            nexus,
            expected,
            transfer: Transfer::default(),
            buffer_len: 0,
            received: 0,
            sent: 0,
            flight: Flight::Other,
            machine: None,
        });
        match plan {
            Ok(plan) => {
                command.transfer = plan.transfer;
                command.buffer_len = plan.buffer_len;
                command.machine = plan.machine;
                command.emit(plan.first)
            }
            Err(refusal) => {
                // A refused command counts as one that has taken its data, so that the residual is
                // that of the CDB's length, as if it had run.
                command.transfer = refusal.transfer;
                command.received = refusal.transfer.data_out;
                match refusal.reason {
                    Reason::Sense(sense) => command.fail(lu, &sense),
                    Reason::Conflict => command.conflict(),
                }
            }
        }
    }

    /// Bytes of data buffer the command needs before its first step that is
    /// not a response. At most a window plus one segment, or 64 KiB for a
    /// parameter list.
    #[must_use]
    pub fn buffer_len(&self) -> u32 {
        self.buffer_len
    }

    /// The nexus it came from.
    #[must_use]
    pub fn nexus(&self) -> NexusId {
        self.nexus
    }

    /// Takes the result of the last step and says the next one.
    ///
    /// `data` is the command's buffer. After [`Step::Respond`] the command
    /// must not be advanced again.
    ///
    /// # Panics
    ///
    /// When a command is advanced after its response, or the buffer is shorter
    /// than [`buffer_len`](Self::buffer_len): both are bugs of the caller.
    pub fn advance(
        &mut self,
        lu: &LogicalUnit,
        result: StepResult,
        data: &mut dyn DataAccess,
    ) -> Step {
        // The machines see no failed steps. All commands end alike then, with the sense of the
        // step that was under way.
        if let StepResult::Failed(error) = result {
            let sense = self.failure_sense(lu, error);
            return self.fail(lu, &sense);
        }
        let mut context = Context {
            lu,
            nexus: self.nexus,
            data,
        };
        let machine = self
            .machine
            .as_mut()
            .expect("an answered command has no further steps");
        match machine.advance(&mut context, result) {
            // The capacity may have shrunk since the command was planned.
            Ok(Next::Block(op)) if op.end().is_some_and(|end| end > lu.capacity_bytes()) => {
                self.fail(lu, &Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE))
            }
            Ok(next) => self.emit(next),
            Err(sense) => self.fail(lu, &sense),
        }
    }

    /// The response to a command whose task is aborted with TASK ABORTED
    /// status (TAS), or that the target must answer without running it.
    pub fn abandon(&mut self, status: Status) -> Response {
        self.machine = None;
        Response::status_only(status, self.expected)
    }

    fn emit(&mut self, next: Next) -> Step {
        match next {
            Next::Receive { from, len } => {
                self.received = from + len;
                // A failure of this step is one of the transport, and says nothing of a place on
                // the medium.
                self.flight = Flight::Other;
                Step::ReceiveData { from, len }
            }
            Next::Send { from, len } => {
                self.sent = from + len;
                self.flight = Flight::Other;
                Step::SendData { from, len }
            }
            Next::Block(op) => {
                self.flight = Flight::of(&op);
                Step::Block(op)
            }
            Next::Answer(data_in) => Step::Respond(self.answer(data_in)),
            Next::Conflict => self.conflict(),
        }
    }

    fn answer(&mut self, data_in: DataIn) -> Response {
        self.machine = None;
        let expected = self.expected;
        let (data_in, wanted) = match data_in {
            // Parameter data were cut to the ALLOCATION LENGTH when they were made, so their
            // length is what the command wants to move.
            DataIn::Inline(mut bytes) => {
                let wanted = bytes.len() as u32;
                bytes.truncate(expected.data_in as usize);
                (DataIn::Inline(bytes), wanted)
            }
            // The residual is that of the whole transfer, and not of this last piece.
            DataIn::Buffer { from, len } => {
                let len = len.min(expected.data_in.saturating_sub(from));
                (DataIn::Buffer { from, len }, self.transfer.data_in)
            }
            DataIn::None => (DataIn::None, self.transfer.data_in),
        };
        Response {
            status: Status::Good,
            sense: Default::default(),
            data_in,
            residual_in: Residual::between(wanted, expected.data_in),
            residual_out: Residual::between(self.transfer.data_out, expected.data_out),
        }
    }

    fn conflict(&mut self) -> Step {
        Step::Respond(self.abandon(Status::ReservationConflict))
    }

    fn fail(&mut self, lu: &LogicalUnit, sense: &Sense) -> Step {
        self.machine = None;
        // Data beyond the initiator's buffer count once everything in the buffer has been received.
        let offered = self.transfer.data_out.min(self.expected.data_out);
        let out = if self.received > 0 && self.received >= offered {
            self.transfer.data_out
        } else {
            self.received
        };
        Step::Respond(Response {
            status: Status::CheckCondition,
            sense: sense.encode(lu.sense_format()),
            data_in: DataIn::None,
            // Pieces that were sent before the failure count as transferred.
            residual_in: Residual::between(self.sent, self.expected.data_in),
            residual_out: Residual::between(out, self.expected.data_out),
        })
    }

    /// The one place where backend errors become sense data.
    fn failure_sense(&self, lu: &LogicalUnit, error: BackendError) -> Sense {
        use AdditionalSense as Code;
        match (error, self.flight) {
            (BackendError::Medium { offset }, Flight::Writing(start)) => {
                Sense::new(SenseKey::MediumError, Code::WRITE_ERROR)
                    .with_information(lu.lba_of(offset.unwrap_or(start)))
            }
            (BackendError::Medium { offset }, Flight::Reading(start)) => {
                Sense::new(SenseKey::MediumError, Code::UNRECOVERED_READ_ERROR)
                    .with_information(lu.lba_of(offset.unwrap_or(start)))
            }
            (BackendError::NoSpace, _) => {
                Sense::new(SenseKey::DataProtect, Code::SPACE_ALLOCATION_FAILED)
            }
            (BackendError::ReadOnly, _) => Sense::new(SenseKey::DataProtect, Code::WRITE_PROTECTED),
            (BackendError::NotReady, _) => Sense::new(SenseKey::NotReady, Code::NOT_READY),
            (BackendError::Aborted, _) => Sense::new(SenseKey::AbortedCommand, Code::NONE),
            // The command may be tried again: unlike with HARDWARE ERROR, nothing of the unit is
            // broken.
            (BackendError::Transfer(error), _) => {
                let code = match error {
                    TransferError::Failed => Code::DATA_PHASE_ERROR,
                    TransferError::Crc => Code::PROTOCOL_SERVICE_CRC_ERROR,
                    TransferError::Unsolicited => Code::UNEXPECTED_UNSOLICITED_DATA,
                    TransferError::Amount => Code::NOT_ENOUGH_UNSOLICITED_DATA,
                    TransferError::SnackRejected => Code::FAILED_RETRANSMISSION_REQUEST,
                };
                Sense::new(SenseKey::AbortedCommand, code)
            }
            (BackendError::Internal | BackendError::Medium { .. }, _) => {
                Sense::new(SenseKey::HardwareError, Code::INTERNAL_TARGET_FAILURE)
            }
        }
    }
}
