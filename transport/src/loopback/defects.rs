//! What is wrong with the devices of a simulation: posts that are refused, calls and completions
//! that fail, receives that come late, queues that break.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riser_memory::MemSlice;

use crate::roce::nic::{Breakage, Nic};
use crate::verbs::{
    Access, AhAttr, AhId, CmError, CmId, Completion, ConnParam, CqId, CqInitAttr, Mr, MrId, PdId,
    PortSpace, PostError, PostReason, QpAttr, QpId, QpInitAttr, QpState, QpType, RecvWr, SendWr,
    Sge, VerbsError, WcOpcode, WcStatus, WrId,
};

/// Posts that a device refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Send requests that it takes before; receives that come before the last of these as well.
    pub after: u32,
    /// Number of calls that are refused from there on.
    pub calls: u32,
}

impl Refusals {
    /// None.
    pub const NONE: Self = Self { after: 0, calls: 0 };
    /// All posts.
    pub const ALL: Self = Self {
        after: 0,
        calls: u32::MAX,
    };

    /// Takes a call that posts `count` send requests; returns how many of them are taken.
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

    /// Takes a call without send requests; returns whether it is refused.
    fn refuses_next(&mut self) -> bool {
        let refused = self.after == 0 && self.calls > 0;
        // All of them stay all of them.
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

/// One thing that fails at a device, by its number among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// A call that takes memory of the system: it is refused by `ENOMEM`, and changes nothing.
    Call(usize),
    /// A completion of a connection that would report success: it reports this status, and its queue
    /// pair fails.
    Completion(usize, WcStatus),
}

/// What devices were asked for, and what they reported, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Calls that take memory of the system, by their names.
    pub calls: Vec<&'static str>,
    /// Completions of connections that report success, by what has completed.
    pub completions: Vec<WcOpcode>,
}

/// A record, and what fails meanwhile.
#[derive(Debug, Default)]
pub(super) struct Recording {
    pub(super) fails: Option<Failing>,
    /// It ends with what fails: the device may go on for long after that.
    pub(super) record: Record,
    calls: usize,
    completions: usize,
    /// The queue whose completion has failed: of a queue pair, and whether that of its receives.
    failed: Option<(QpId, bool)>,
}

impl Recording {
    pub(super) fn new(fails: Option<Failing>) -> Self {
        Self {
            fails,
            ..Self::default()
        }
    }

    /// Whether what is to fail has failed.
    fn is_over(&self) -> bool {
        match self.fails {
            Some(Failing::Call(at)) => self.calls > at,
            Some(Failing::Completion(at, _)) => self.completions > at,
            None => false,
        }
    }

    /// Takes a call; returns whether it fails.
    fn fails_call(&mut self, name: &'static str) -> bool {
        if !self.is_over() {
            self.record.calls.push(name);
        }
        self.calls += 1;
        self.fails == Some(Failing::Call(self.calls - 1))
    }

    /// Takes a completion that reports success; returns whether its queue pair fails by it.
    fn fails_completion(&mut self, completion: &mut Completion) -> bool {
        let queue = (completion.qp, completion.opcode.is_recv());
        // The device had reported more before it was known that one has failed: what comes behind
        // that in the same queue was not carried out.
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

/// Calls of a [`DefectiveNic`] that take memory of the system, before those of its [`Nic`].
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

/// What is wrong with a device.
#[derive(Debug, Default)]
pub(super) struct Defects {
    pub(super) refusals: Refusals,
    /// Time until a receive that was posted is in its queue.
    pub(super) delay: Duration,
    /// What is to break.
    pub(super) broken: Option<(Breakage, usize)>,
    /// The socket takes nothing.
    pub(super) is_full: bool,
    /// A route cannot segment trains.
    pub(super) refuses_trains: bool,
    pub(super) recording: Option<Recording>,
}

/// A receive that is not in its queue yet.
#[derive(Debug)]
pub(super) struct LateRecv {
    pub(super) at: Instant,
    qp: QpId,
    wr_id: WrId,
    sges: Vec<Sge>,
}

/// The NIC of an endpoint, whose methods for posts come before those of the NIC.
#[derive(Debug)]
pub(super) struct DefectiveNic {
    pub(super) nic: Nic,
    pub(super) defects: Arc<Mutex<Defects>>,
    /// In the order of their posts.
    pub(super) late: VecDeque<LateRecv>,
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
        reg_mr(pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError>;
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
            // A datagram is not acknowledged, so nothing can fail at it but the device as a whole.
            let is_connected = self.nic.is_connection(completion.qp);
            if is_connected && completion.status.is_ok() && recording.fails_completion(completion) {
                // It may have been destroyed, and then nothing is left to fail.
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
        let at = self.nic.now() + delay;
        self.late.extend(wrs.iter().map(|wr| LateRecv {
            at,
            qp,
            wr_id: wr.wr_id,
            sges: wr.sges.to_vec(),
        }));
        Ok(())
    }

    /// Does what is due of what is wrong; returns how much that was.
    pub(super) fn suffer(&mut self, now: Instant) -> usize {
        let mut done = 0;
        while self.late.front().is_some_and(|late| late.at <= now)
            && let Some(LateRecv {
                qp, wr_id, sges, ..
            }) = self.late.pop_front()
        {
            let sges = &sges;
            // If its queue pair was destroyed meanwhile, the receive is dropped.
            let _ = self.nic.post_recv(qp, &[RecvWr { wr_id, sges }]);
            done += 1;
        }
        let broken = self.defects().broken;
        if let Some((what, nth)) = broken
            && self.nic.break_one(what, nth)
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
