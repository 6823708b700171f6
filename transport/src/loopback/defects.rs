//! Fault injection for the devices of a simulation: rejected posts, failing calls and completions,
//! delayed receives, broken queues.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riser_memory::MemSlice;

use crate::nic::{Breakage, Nic};
use crate::verbs::{
    Access, AhAttr, AhId, CmError, CmId, Completion, ConnParam, CqId, CqInitAttr, LKey, Mr, MrId,
    PdId, PortSpace, PostError, PostReason, QpAttr, QpId, QpInitAttr, QpState, QpType, RdmaCm as _,
    RecvWr, SendOp, SendWr, Sge, Verbs as _, VerbsError, WcOpcode, WcStatus, WrId,
};

/// Posts to be rejected by a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Number of send requests to accept first. Receives are accepted until the last of these
    /// sends.
    pub after: u32,
    /// Number of calls to reject after that.
    pub calls: u32,
}

impl Refusals {
    /// Don't reject anything.
    pub const NONE: Self = Self { after: 0, calls: 0 };
    /// Reject all posts.
    pub const ALL: Self = Self {
        after: 0,
        calls: u32::MAX,
    };

    /// Handles a call that posts `count` send requests. This will return how many of them are
    /// accepted.
    fn take_sends(&mut self, count: usize) -> usize {
        if self.calls == 0 {
            return count;
        }
        let taken = count.min(self.after as usize);
        self.after -= taken as u32;
        if taken < count {
            self.refuses_next();
        }
        taken
    }

    /// Handles a call without send requests. Returns whether it should be rejected.
    fn refuses_next(&mut self) -> bool {
        let refused = self.after == 0 && self.calls > 0;
        // If all calls are rejected, don't decrement the number.
        if refused && self.calls < u32::MAX {
            self.calls -= 1;
        }
        refused
    }
}

fn refused(index: usize) -> PostError {
    PostError {
        index,
        reason: PostReason::Os(libc::EIO),
    }
}

fn no_memory() -> PostError {
    PostError {
        index: 0,
        reason: PostReason::Os(libc::ENOMEM),
    }
}

/// Something that should fail on a device, with its index among all events of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// A call that allocates system memory returns `ENOMEM` and has no effect.
    Call(usize),
    /// A successful completion on a connection is changed to this status, and its QP fails.
    Completion(usize, WcStatus),
}

/// Calls and completions of the devices, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Names of all calls that allocate system memory.
    pub calls: Vec<&'static str>,
    /// Opcodes of all successful completions on connections.
    pub completions: Vec<WcOpcode>,
}

/// A record, and what should fail while it is active.
#[derive(Debug, Default)]
pub(super) struct Recording {
    pub(super) fails: Option<Failing>,
    /// Nothing is recorded after the failure, since the device can continue to run for a long time.
    pub(super) record: Record,
    calls: usize,
    completions: usize,
    /// Queue with the failed completion: the QP, and whether it is the receive queue.
    failed: Option<(QpId, bool)>,
}

impl Recording {
    pub(super) fn new(fails: Option<Failing>) -> Self {
        Self {
            fails,
            ..Self::default()
        }
    }

    /// Returns whether the failure has occurred.
    fn is_over(&self) -> bool {
        match self.fails {
            Some(Failing::Call(at)) => self.calls > at,
            Some(Failing::Completion(at, _)) => self.completions > at,
            None => false,
        }
    }

    /// Records a call. Returns whether it should fail.
    fn fails_call(&mut self, name: &'static str) -> bool {
        if !self.is_over() {
            self.record.calls.push(name);
        }
        self.calls += 1;
        self.fails == Some(Failing::Call(self.calls - 1))
    }

    /// Records a successful completion. This will return whether the QP should fail.
    fn fails_completion(&mut self, completion: &mut Completion) -> bool {
        let queue = (completion.qp, completion.opcode.is_recv());
        // The device may have reported more completions before the failure was known. Any requests
        // in the same queue after the failed request were not executed.
        if self.failed == Some(queue) {
            completion.status = WcStatus::WrFlushErr;
            return false;
        }
        if !self.is_over() {
            self.record.completions.push(completion.opcode);
        }
        self.completions += 1;
        match self.fails {
            Some(Failing::Completion(at, status)) if at + 1 == self.completions => {
                completion.status = status;
                self.failed = Some(queue);
                true
            }
            _ => false,
        }
    }
}

const NO_MEMORY: VerbsError = VerbsError::Os(libc::ENOMEM);

/// Implements the methods of [`DefectiveNic`] that allocate system memory. They take precedence
/// over the methods of its [`Nic`].
macro_rules! calls_that_take_memory {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        pub(super) fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            if self.fails_call(stringify!($name)) {
                return Err(NO_MEMORY.into());
            }
            self.nic.$name($($arg),*)
        }
    )*};
}

/// Faults of a device.
#[derive(Debug, Default)]
pub(super) struct Defects {
    pub(super) refusals: Refusals,
    /// Delay before a posted receive is added to its queue.
    pub(super) delay: Duration,
    /// Object that should break.
    pub(super) broken: Option<(Breakage, usize)>,
    /// The socket is full.
    pub(super) is_full: bool,
    /// The route doesn't support segmented sends.
    pub(super) refuses_trains: bool,
    pub(super) recording: Option<Recording>,
}

/// A receive that has not been added to its queue yet.
#[derive(Debug)]
pub(super) struct LateRecv {
    pub(super) at: Instant,
    qp: QpId,
    wr_id: WrId,
    sges: Vec<Sge>,
}

/// NIC of an endpoint. Its post methods take precedence over the methods of the NIC.
#[derive(Debug)]
pub(super) struct DefectiveNic {
    pub(super) nic: Nic,
    pub(super) defects: Arc<Mutex<Defects>>,
    /// Delayed receives in the order they were posted.
    pub(super) late: VecDeque<LateRecv>,
    /// Keys of regions that can be written by peers, if READs require this.
    pub(super) writable: Vec<(LKey, MrId)>,
}

impl DefectiveNic {
    pub(super) fn defects(&self) -> MutexGuard<'_, Defects> {
        self.defects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fails_call(&self, name: &'static str) -> bool {
        let mut defects = self.defects();
        let recording = defects.recording.as_mut();
        recording.is_some_and(|recording| recording.fails_call(name))
    }

    calls_that_take_memory! {
        alloc_pd() -> Result<PdId, VerbsError>;
        reg_mr_iova(pd: PdId, range: &MemSlice, iova: u64, access: Access) -> Result<Mr, VerbsError>;
        alloc_fast_mr(pd: PdId, max_segments: u32) -> Result<Mr, VerbsError>;
        map_mr_sg(mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError>;
        create_cq_with(init: &CqInitAttr) -> Result<CqId, VerbsError>;
        create_qp(init: &QpInitAttr) -> Result<QpId, VerbsError>;
        modify_qp(qp: QpId, attr: &QpAttr) -> Result<(), VerbsError>;
        create_ah(pd: PdId, attr: AhAttr) -> Result<AhId, VerbsError>;
        create_id_for(space: PortSpace, qp_type: QpType) -> Result<CmId, CmError>;
        bind_addr(id: CmId, addr: SocketAddr) -> Result<(), CmError>;
        resolve_addr(id: CmId, src: Option<SocketAddr>, dst: SocketAddr, timeout: Duration) -> Result<(), CmError>;
        resolve_route(id: CmId, timeout: Duration) -> Result<(), CmError>;
        create_cm_qp(id: CmId, init: &QpInitAttr) -> Result<QpId, CmError>;
        listen(id: CmId, backlog: u32) -> Result<(), CmError>;
        connect(id: CmId, param: &ConnParam) -> Result<(), CmError>;
        accept(id: CmId, param: &ConnParam) -> Result<(), CmError>;
        reject(id: CmId, private_data: &[u8]) -> Result<(), CmError>;
        disconnect(id: CmId) -> Result<(), CmError>;
    }

    pub(super) fn reg_mr(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        if self.fails_call("reg_mr") {
            return Err(NO_MEMORY);
        }
        let mr = self.nic.reg_mr(pd, range, access)?;
        if self.nic.device_attr().registered_reads && access.contains(Access::REMOTE_WRITE) {
            self.writable.push((mr.lkey, mr.id));
        }
        Ok(mr)
    }

    pub(super) fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError> {
        self.nic.dereg_mr(mr)?;
        self.writable.retain(|(_, writable)| *writable != mr);
        Ok(())
    }

    /// Returns whether an iWARP adapter would reject a request.
    fn is_unregistered_read(&self, wr: &SendWr<'_>) -> bool {
        let is_writable = |sink: &Sge| self.writable.iter().any(|(key, _)| *key == sink.lkey);
        self.nic.device_attr().registered_reads
            && matches!(wr.op, SendOp::Read(_))
            && !matches!(wr.sges, [sink] if is_writable(sink))
    }

    pub(super) fn poll_cq(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError> {
        let before = out.len();
        let count = self.nic.poll_cq(cq, max, out)?;
        let mut defects = self.defects.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recording) = &mut defects.recording else {
            return Ok(count);
        };
        for completion in &mut out[before..] {
            // Datagrams are not acknowledged, so they can't fail unless the entire device fails.
            let is_connected = self.nic.device.is_connection(completion.qp);
            if is_connected && completion.status.is_ok() && recording.fails_completion(completion) {
                // We can ignore the error if it has already been destroyed.
                let failed = QpAttr::to(QpState::Error);
                let _ = self.nic.modify_qp(completion.qp, &failed);
            }
        }
        Ok(count)
    }

    pub(super) fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        if self.fails_call("post_send") {
            return Err(no_memory());
        }
        if let Some(index) = wrs.iter().position(|wr| self.is_unregistered_read(wr)) {
            let reason = PostReason::InvalidKey;
            return Err(PostError { index, reason });
        }
        let taken = self.defects().refusals.take_sends(wrs.len());
        self.nic.post_send(qp, &wrs[..taken])?;
        if taken < wrs.len() {
            return Err(refused(taken));
        }
        Ok(())
    }

    pub(super) fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        if self.fails_call("post_recv") {
            return Err(no_memory());
        }
        let mut defects = self.defects();
        if defects.refusals.refuses_next() {
            return Err(refused(0));
        }
        let delay = defects.delay;
        drop(defects);
        if delay.is_zero() && self.late.is_empty() {
            return self.nic.post_recv(qp, wrs);
        }
        let at = self.nic.device.now() + delay;
        self.late.extend(wrs.iter().map(|wr| LateRecv {
            at,
            qp,
            wr_id: wr.wr_id,
            sges: wr.sges.to_vec(),
        }));
        Ok(())
    }

    /// Executes all faults that are due. Returns their number.
    pub(super) fn suffer(&mut self, now: Instant) -> usize {
        let mut done = 0;
        while self.late.front().is_some_and(|late| late.at <= now)
            && let Some(LateRecv {
                qp, wr_id, sges, ..
            }) = self.late.pop_front()
        {
            let sges = &sges;
            // If the QP has been destroyed since, the receive is dropped.
            let _ = self.nic.post_recv(qp, &[RecvWr { wr_id, sges }]);
            done += 1;
        }
        let broken = self.defects().broken;
        if let Some((what, nth)) = broken
            && self.nic.device.break_one(what, nth)
        {
            self.defects().broken = None;
            done += 1;
        }
        done
    }
}

impl Deref for DefectiveNic {
    type Target = Nic;

    fn deref(&self) -> &Nic {
        &self.nic
    }
}

impl DerefMut for DefectiveNic {
    fn deref_mut(&mut self) -> &mut Nic {
        &mut self.nic
    }
}
