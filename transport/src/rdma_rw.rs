//! RDMA READs and WRITEs of a target, like Linux `rdma/rw.h`: READs on iWARP adapters, and transfers
//! with protection information.
//!
//! # iWARP adapters
//! The response to a READ names its local memory, the *sink*, by a key. An iWARP adapter processes it
//! like a WRITE of the peer, so the sink needs the right for remote writes. The memory of a target
//! must not have this right as a whole. [`ReadSinks`] therefore registers the sink of each READ, and
//! deregisters it before the target uses the data. [`mr_factor`] returns the number of sinks.
//!
//! # Protection information
//! A target transfers the blocks of a command between its memory and a range of the initiator's
//! memory. Its device checks, inserts or strips the tuples, using an integrity region for the local
//! side:
//!
//! ```text
//!  SignatureContext::init ──▶ wrs: REG_MR, READ or WRITE, LOCAL_INV ──▶ post
//!     (maps the memory)                                                  │ last completion
//!  destroy: error of the checks ◀── on_completed ◀───────────────────────┘
//! ```
//!
//! A [`SignatureContext`] is currently not used.

mod sinks;

use riser_memory::MemSlice;

pub use sinks::{ReadSinks, mr_factor};

use crate::mr_pool::{MrPool, PooledMr};
use crate::verbs::{
    Access, RemoteAddr, SendFlags, SendOp, SendWr, Sge, SigAttrs, SigError, Verbs, VerbsError, WrId,
};

/// Direction of a transfer, as seen by the device that starts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// RDMA READ: the peer's memory is the wire domain from which data is received.
    FromPeer,
    /// RDMA WRITE: the peer's memory is the wire domain to which data is sent.
    ToPeer,
}

/// Local memory of a transfer, as in [`Verbs::map_mr_sg_pi`].
#[derive(Clone, Copy, Debug)]
pub struct ProtectedMemory<'a> {
    /// Blocks.
    pub data: &'a [MemSlice],
    /// Tuples, unless they are interleaved or there are none.
    pub protection: &'a [MemSlice],
}

/// A transfer with protection information.
#[derive(Debug)]
#[must_use = "the context has a region of the pool"]
pub struct SignatureContext {
    mr: PooledMr,
    op: SendOp,
    sges: [Sge; 1],
}

impl SignatureContext {
    /// Number of work requests, which need as many entries of the send queue.
    pub const WRS: usize = 3;

    /// Allocates a region of the pool and maps the memory (Linux `rdma_rw_ctx_signature_init`). The
    /// wire layout is transferred from or to consecutive bytes at `remote`.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if the pool is empty, or an error from
    /// [`Verbs::map_mr_sg_pi`].
    pub fn init<V: Verbs + ?Sized>(
        verbs: &mut V,
        pool: &mut MrPool,
        memory: ProtectedMemory<'_>,
        attrs: &SigAttrs,
        remote: RemoteAddr,
        direction: Direction,
    ) -> Result<Self, VerbsError> {
        let Some(mut mr) = pool.get() else {
            return Err(VerbsError::InsufficientResources("integrity regions"));
        };
        if let Err(e) = mr.map_pi(verbs, memory.data, memory.protection, attrs) {
            pool.release(verbs, mr)?;
            return Err(e);
        }
        Ok(Self {
            op: match direction {
                Direction::FromPeer => SendOp::Read(remote),
                Direction::ToPeer => SendOp::Write(remote),
            },
            sges: [mr.sge()],
            mr,
        })
    }

    /// Returns the number of bytes transferred, which is the size of the wire layout.
    #[must_use]
    pub fn wire_len(&self) -> u32 {
        self.mr.remote().len
    }

    /// Returns the work requests, to be posted as a chain. Only the last one is signaled (Linux
    /// `rdma_rw_ctx_wrs`).
    ///
    /// # Panics
    /// Panics if called twice.
    pub fn wrs(&mut self, wr_id: WrId) -> [SendWr<'_>; Self::WRS] {
        let register = self.mr.reg_wr(wr_id, Access::LOCAL_WRITE);
        let invalidate = self.mr.inv_wr(wr_id);
        let transfer = SendWr {
            wr_id,
            ..SendWr::new(0, self.op, &self.sges).flags(SendFlags::empty())
        };
        [register, transfer, invalidate]
    }

    /// Called when the last work request has completed successfully.
    pub fn on_completed(&mut self) {
        self.mr.on_invalidated(self.mr.rkey());
    }

    /// Returns the region to the pool (Linux `rdma_rw_ctx_destroy_signature`). If the transfer has
    /// completed, returns the first failed check.
    ///
    /// # Errors
    /// An error from [`Verbs::check_mr_status`] or [`MrPool::release`].
    pub fn destroy<V: Verbs + ?Sized>(
        self,
        verbs: &mut V,
        pool: &mut MrPool,
    ) -> Result<Option<SigError>, VerbsError> {
        // The region of a failed transfer may be deregistered, so get the error first.
        let status = verbs.check_mr_status(self.mr.id());
        pool.release(verbs, self.mr)?;
        status
    }
}
