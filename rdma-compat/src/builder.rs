//! Batches of work requests that programs build using function calls.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use arrayvec::ArrayVec;
use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::{QpCap, QpType, SendFlags, SendOp, SendWr, Sge, UdDest, WrId};

use crate::errno::Errno;
use crate::lock::unpoisoned;
use crate::turn::Turn;

/// Operations of datagram queue pairs.
const DATAGRAM: u32 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;

/// Operations of unreliable connections.
const UNRELIABLE: u32 = DATAGRAM
    | IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW;

/// Operations of reliable connections.
const RELIABLE: u32 = UNRELIABLE
    | IBV_QP_EX_WITH_SEND_WITH_INV
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

/// The part of a queue pair that builds requests.
pub(crate) struct Builder {
    /// Operations that were requested when the queue pair was created.
    pub(crate) ops: u32,
    pub(crate) cap: QpCap,
    /// Held from the start of a batch to its end.
    pub(crate) turn: Turn,
    batch: Mutex<Batch>,
}

/// Requests between `wr_start` and `wr_complete`.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) requests: Vec<Request>,
    /// Scatter lists of the requests.
    pub(crate) sges: Vec<Sge>,
    /// Inline data of the requests.
    pub(crate) inline: Vec<u8>,
    /// The first error of the program in this batch.
    pub(crate) mistake: Option<Errno>,
}

/// A request of a batch.
pub(crate) struct Request {
    pub(crate) wr_id: WrId,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) data: Data,
    pub(crate) ud: Option<UdDest>,
    pub(crate) remote_srqn: Option<u32>,
}

/// Data of a request, as a range in the data of the batch.
pub(crate) enum Data {
    None,
    Sges(Range<usize>),
    Inline(Range<usize>),
}

impl Builder {
    /// Creates a builder for a queue pair.
    ///
    /// # Errors
    /// Returns `EOPNOTSUPP` if this type of queue pair does not support one of the operations.
    pub(crate) fn new(qp_type: QpType, cap: QpCap, ops: u64) -> Result<Self, Errno> {
        let known = match qp_type {
            QpType::Rc | QpType::XrcIni => RELIABLE,
            QpType::Uc => UNRELIABLE,
            QpType::Ud | QpType::Gsi | QpType::Smi => DATAGRAM,
            // These have no send queue.
            QpType::XrcTgt | QpType::RawPacket => 0,
        };
        let ops = u32::try_from(ops).map_err(|_| Errno::UNSUPPORTED)?;
        if ops & !known != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        Ok(Self {
            ops,
            cap,
            turn: Turn::default(),
            batch: Mutex::default(),
        })
    }

    /// Returns the current batch.
    pub(crate) fn batch(&self) -> MutexGuard<'_, Batch> {
        unpoisoned(self.batch.lock())
    }
}

impl Batch {
    /// Removes all requests.
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.mistake = None;
    }

    /// Returns the request that setters modify.
    ///
    /// # Errors
    /// Returns `EINVAL` if no request was started.
    pub(crate) fn last(&mut self) -> Result<&mut Request, Errno> {
        self.requests.last_mut().ok_or(Errno::INVALID)
    }

    /// Sets the data of the last request.
    ///
    /// # Errors
    /// Returns `EINVAL` if the data was already set, or if the request does not support data of
    /// this kind.
    pub(crate) fn set_data(&mut self, data: Data) -> Result<(), Errno> {
        let request = self.last()?;
        let is_allowed = match request.op {
            SendOp::LocalInv(_) | SendOp::RegMr { .. } => false,
            SendOp::Read(_) | SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. } => {
                matches!(data, Data::Sges(_))
            }
            _ => true,
        };
        if !is_allowed || !matches!(request.data, Data::None) {
            return Err(Errno::INVALID);
        }
        request.data = data;
        Ok(())
    }

    /// Converts requests to the form in which they are posted.
    pub(crate) fn posts<const N: usize>(&self, requests: &[Request]) -> ArrayVec<SendWr<'_>, N> {
        let posts = requests.iter().map(|request| {
            let (sges, inline) = match &request.data {
                Data::None => (&[][..], None),
                Data::Sges(range) => (&self.sges[range.clone()], None),
                Data::Inline(range) => (&[][..], Some(&self.inline[range.clone()])),
            };
            SendWr {
                wr_id: request.wr_id,
                op: request.op,
                sges,
                inline,
                flags: request.flags,
                ud: request.ud,
                remote_srqn: request.remote_srqn,
            }
        });
        posts.collect()
    }
}
