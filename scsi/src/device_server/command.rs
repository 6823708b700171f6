//! A single command in flight.
//!
//! ```text
//!            LogicalUnit::start(request)
//!                      |
//!           +----------+-----------+
//!           v          v           v
//!     ReceiveData    Block      Respond  <--- refused or completed immediately
//!     SendData         |           |
//!           |          |           ^
//!           |  Done    |  Done,    |
//!           |          |  Status   |
//!           +--> advance(result) --+     <--- after the last step, or Failed
//!                |           ^
//!                +-----------+           <--- next step
//! ```
//!
//! If the data is longer than the window, it is transferred via the buffer in pieces: a WRITE will
//! alternate between `ReceiveData` and `Block`, and a READ between `Block` and `SendData`. The last
//! piece of a READ is sent with the response.
//!
//! The target stores the [`Command`] with the task and must call [`advance`](Command::advance) once
//! for each completed step. A buffer with a size of [`buffer_len`](Command::buffer_len) bytes must
//! be available before the first step that is not [`Step::Respond`]. To abort a command, just drop
//! it between two steps.
//!
//! We don't allocate any memory for READ and WRITE commands if the LU does not have protection
//! information.

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

/// A command. It must be advanced after each step.
#[derive(Debug)]
pub struct Command {
    nexus: NexusId,
    expected: Expected,
    transfer: Transfer,
    buffer_len: u32,
    /// Number of Data-Out bytes that have been requested from the initiator.
    received: u32,
    /// Number of Data-In bytes that have been sent before the response.
    sent: u32,
    flight: Flight,
    /// State machine for the next steps, or `None` after the response.
    machine: Option<Machine>,
}

/// The current step, with the information needed to report errors.
#[derive(Clone, Copy, Debug)]
enum Flight {
    /// Not a block operation.
    Other,
    /// Reading from the medium at this byte offset.
    Reading(u64),
    /// Writing to the medium at this byte offset.
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
            BlockOp::ChangeReservations(_) | BlockOp::ChangeProtection(_) => Self::Other,
        }
    }
}

impl Command {
    /// Starts a plan. This creates the command in place and returns the first step.
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
                // If a command is refused, assume that it has received all data, so that the
                // residual is based on the length in the CDB, as if the command had been executed.
                command.transfer = refusal.transfer;
                command.received = refusal.transfer.data_out;
                match refusal.reason {
                    Reason::Sense(sense) => command.fail(lu, &sense),
                    Reason::Conflict => command.conflict(),
                }
            }
        }
    }

    /// Returns the buffer size that is needed before the first step other than a response, in
    /// bytes. This is at most a window plus a segment, or 64 KiB for a parameter list.
    #[must_use]
    pub fn buffer_len(&self) -> u32 {
        self.buffer_len
    }

    /// Returns the nexus that sent this command.
    #[must_use]
    pub fn nexus(&self) -> NexusId {
        self.nexus
    }

    /// Handles the result of the previous step and returns the next step.
    ///
    /// `data` is the command buffer. This must not be called again after [`Step::Respond`].
    ///
    /// # Panics
    ///
    /// If this is called after the response, or if the buffer is smaller than
    /// [`buffer_len`](Self::buffer_len). Both are bugs in the caller.
    pub fn advance(
        &mut self,
        lu: &LogicalUnit,
        result: StepResult,
        data: &mut dyn DataAccess,
    ) -> Step {
        // Failed steps are not passed to the state machines. For all commands, we just return a
        // response with the sense data for the current step.
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
            .expect("command has already been completed");
        match machine.advance(&mut context, result) {
            // The capacity may have been reduced since the command was planned.
            Ok(Next::Block(op)) if op.end().is_some_and(|end| end > lu.capacity_bytes()) => {
                self.fail(lu, &Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE))
            }
            Ok(next) => self.emit(next),
            Err(sense) => self.fail(lu, &sense),
        }
    }

    /// Returns the response for a task that is aborted with TASK ABORTED status (TAS), or for a
    /// command that the target needs to complete without running it.
    pub fn abandon(&mut self, status: Status) -> Response {
        self.machine = None;
        Response::status_only(status, self.expected)
    }

    fn emit(&mut self, next: Next) -> Step {
        match next {
            Next::Receive { from, len } => {
                self.received = from + len;
                // If this step fails, it's a transport error, which doesn't have an offset on the
                // medium.
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
            Next::Respond(data_in) => Step::Respond(self.build_response(data_in)),
            Next::Conflict => self.conflict(),
        }
    }

    fn build_response(&mut self, data_in: DataIn) -> Response {
        self.machine = None;
        let expected = self.expected;
        let (data_in, wanted) = match data_in {
            // Parameter data has already been truncated to the ALLOCATION LENGTH, so this is the
            // length that the command should transfer.
            DataIn::Inline(mut bytes) => {
                let wanted = bytes.len() as u32;
                bytes.truncate(expected.data_in as usize);
                (DataIn::Inline(bytes), wanted)
            }
            // The residual must be based on the entire transfer instead of just the last piece.
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
        // If the initiator's buffer is too small, add the rest of the data once everything in the
        // buffer has been received.
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
            // Any data that was sent before the failure has been transferred.
            residual_in: Residual::between(self.sent, self.expected.data_in),
            residual_out: Residual::between(out, self.expected.data_out),
        })
    }

    /// Converts a backend error to sense data. This should not be done anywhere else.
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
            // Unlike with HARDWARE ERROR, there is nothing wrong with the LU, so the command can be
            // retried.
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
