//! A channel's connection: queue pair, receive ring, information-unit buffers, memory regions.
//!
//! # Memory
//! A connection's own buffers are registered for local use only. Data buffers are made known to the
//! target with a fast registration that is posted before the command, and taken back with an
//! invalidation whose completion is awaited. Requests of a send queue complete in order, so that
//! completion also says that the command's own SEND no longer needs its buffer.
//!
//! # Bounds
//! Commands: the channel's queue size. Receives: that and eight more. Send queue: three entries for
//! each command, as many more as the largest command takes, one for each receive (its answer), and
//! sixteen. Regions: one for each command and eight, and no fewer than the largest command takes. A
//! command that finds entries or regions used up is not started: it waits in its session.

mod start;

use std::time::Instant;

use arrayvec::ArrayVec;
use riser_memory::{MemSlice, Memory};
use riser_scsi::srp::{MemDesc, SHORT_IU_LEN, TSK_MGMT_LEN};
use riser_transport::mr_pool::{MrPool, PooledMr};
use riser_transport::verbs::{
    Access, CmId, CqId, Mr, PdId, Provider, QpCap, QpId, QpInitAttr, QpType, RecvWr, SendFlags,
    SendOp, SendWr, Sge, VerbsError, WrId,
};

use crate::request::RequestId;
use crate::srp::session::{ChannelIndex, Session};

/// Length of a receive, in bytes: the longest information unit that we take. An SRP_RSP with the
/// longest sense data is 292 bytes.
pub(super) const RECV_LEN: usize = 1024;

/// Receives, send-queue entries and regions beyond those of the commands.
const SPARE: u32 = 8;

/// Fast registrations of one command at most.
const MAX_REGIONS: usize = 16;

/// Local segments of a SEND at most: the header, and immediate data.
const MAX_SEND_SGE: usize = 4;

/// Task-management buffers.
const TSK_MGMT_SLOTS: usize = 4;

/// What a work request was, in the top byte of its id; the rest is a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Recv(u16),
    Command(u16),
    Register(u16),
    Invalidate(u16),
    Answer(u16),
    TskMgmt(u16),
    Logout,
}

impl Work {
    fn id(self) -> WrId {
        let (kind, slot) = match self {
            Self::Recv(slot) => (0u64, slot),
            Self::Command(slot) => (1, slot),
            Self::Register(slot) => (2, slot),
            Self::Invalidate(slot) => (3, slot),
            Self::Answer(slot) => (4, slot),
            Self::TskMgmt(slot) => (5, slot),
            Self::Logout => (6, 0),
        };
        WrId(kind << 56 | u64::from(slot))
    }

    pub(super) fn of(id: WrId) -> Option<Self> {
        let slot = id.0 as u16;
        Some(match id.0 >> 56 {
            0 => Self::Recv(slot),
            1 => Self::Command(slot),
            2 => Self::Register(slot),
            3 => Self::Invalidate(slot),
            4 => Self::Answer(slot),
            5 => Self::TskMgmt(slot),
            6 => Self::Logout,
            _ => return None,
        })
    }
}

/// Sizes of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnConfig {
    pub(super) queue_size: u16,
    pub(super) inline_descriptors: u8,
    pub(super) external_descriptors: u32,
    /// Segments of one fast registration.
    pub(super) region_segments: u32,
}

impl ConnConfig {
    fn receives(&self) -> u32 {
        u32::from(self.queue_size) + SPARE
    }

    /// Send-queue entries for commands. The others are for answers, task management and the logout, which
    /// are never refused.
    fn command_entries(&self) -> u32 {
        u32::from(self.queue_size) * 3 + 2 * MAX_REGIONS as u32
    }

    fn send_entries(&self) -> u32 {
        self.command_entries() + self.receives() + 2 * SPARE
    }

    fn regions(&self) -> usize {
        (usize::from(self.queue_size) + SPARE as usize).max(MAX_REGIONS)
    }

    /// Completions that a connection can have outstanding.
    pub(super) fn completions(&self) -> u32 {
        self.send_entries() + self.receives()
    }

    fn iu_len(&self) -> usize {
        let longest = 48 + 16 + 20 + usize::from(self.inline_descriptors) * MemDesc::LEN;
        longest.next_multiple_of(64)
    }

    fn table_len(&self) -> usize {
        self.external_descriptors as usize * MemDesc::LEN
    }
}

/// How data memory is made known to the target.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataKeys {
    /// The pool's registration, for immediate data.
    pub(super) pool: Mr,
    /// Whether the pool's remote key is given to the target, instead of one for each command.
    pub(super) pool_wide: bool,
}

/// One command on the wire.
struct Attempt {
    request: RequestId,
    regions: ArrayVec<PooledMr, MAX_REGIONS>,
    /// Send-queue entries held until it is over.
    entries: u32,
    /// The SEND has completed; only of commands without regions.
    sent: bool,
    retiring: bool,
    /// Invalidations not completed.
    pending: usize,
}

/// What came of an attempt to start a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// It is on its way.
    Sent,
    /// Other commands use the entries or regions that it needs; nothing of it was sent.
    Starved,
    /// It is not to be sent any more.
    Dropped,
    /// It can never be sent.
    Impossible(&'static str),
    /// The connection is broken.
    Broken,
}

/// Buffers and regions of a connection whose queue pair exists.
struct Rings {
    qp: QpId,
    memory: Memory,
    mr: Mr,
    /// Tables of descriptors, readable by the target.
    tables: Option<(Memory, Mr)>,
    regions: MrPool,
}

/// A channel's connection, from the first call of the connection manager on.
pub(super) struct Conn {
    pub(super) id: CmId,
    config: ConnConfig,
    rings: Option<Rings>,
    attempts: Vec<Option<Attempt>>,
    /// The slot of a request's attempt, by request. Bound: the session's requests.
    slots: Vec<Option<u16>>,
    free: Vec<u16>,
    /// Send-queue entries that commands can take.
    entries: u32,
    tsk_mgmt_free: Vec<u16>,
    /// The request for a connection is on its way, and the answer is not here.
    pub(super) is_connecting: bool,
    /// The connection is closed when what is on its way has ended, or then: a logout, or the connection
    /// itself.
    pub(super) closing_until: Option<Instant>,
}

/// Lists that are used again and again.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) slices: Vec<MemSlice>,
    descriptors: Vec<MemDesc>,
    iu: Vec<u8>,
}

/// A command to start.
pub(super) struct StartArgs<'a> {
    pub(super) session: &'a Session,
    pub(super) channel: ChannelIndex,
    pub(super) request: RequestId,
    pub(super) immediate: bool,
    pub(super) keys: &'a DataKeys,
}

impl Conn {
    pub(super) fn new(id: CmId, config: ConnConfig) -> Self {
        Self {
            id,
            config,
            rings: None,
            attempts: (0..config.queue_size).map(|_| None).collect(),
            slots: Vec::new(),
            free: (0..config.queue_size).rev().collect(),
            entries: config.command_entries(),
            tsk_mgmt_free: (0..TSK_MGMT_SLOTS as u16).collect(),
            is_connecting: false,
            closing_until: None,
        }
    }

    pub(super) fn qp(&self) -> Option<QpId> {
        self.rings.as_ref().map(|r| r.qp)
    }

    // Layout of the connection's memory: receives, answers, task management, logout, commands.
    fn recv_at(&self, slot: u16) -> usize {
        usize::from(slot) * RECV_LEN
    }

    fn answer_at(&self, slot: u16) -> usize {
        self.config.receives() as usize * RECV_LEN + usize::from(slot) * SHORT_IU_LEN
    }

    fn tsk_mgmt_at(&self, slot: u16) -> usize {
        self.answer_at(self.config.receives() as u16) + usize::from(slot) * TSK_MGMT_LEN
    }

    fn logout_at(&self) -> usize {
        self.tsk_mgmt_at(TSK_MGMT_SLOTS as u16)
    }

    fn command_at(&self, slot: u16) -> usize {
        let first = (self.logout_at() + SHORT_IU_LEN).next_multiple_of(64);
        first + usize::from(slot) * self.config.iu_len()
    }

    /// Makes the queue pair and everything else that the connection needs, and posts its receives.
    pub(super) fn set_up<P: Provider>(
        &mut self,
        provider: &mut P,
        pd: PdId,
        cq: CqId,
    ) -> Result<(), VerbsError> {
        let os = |e: std::io::Error| VerbsError::Os(e.raw_os_error().unwrap_or(0));
        let memory = Memory::new(self.command_at(self.config.queue_size)).map_err(os)?;
        let tables = match self.config.table_len() * usize::from(self.config.queue_size) {
            0 => None,
            len => Some(Memory::new(len).map_err(os)?),
        };
        let cap = QpCap {
            max_send_wr: self.config.send_entries(),
            max_recv_wr: self.config.receives(),
            max_send_sge: MAX_SEND_SGE as u32,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let init = QpInitAttr {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: false,
        };
        let (regions, segments) = (self.config.regions(), self.config.region_segments);
        let mut pool = MrPool::new(provider, pd, regions, segments)?;
        let made = (|| {
            let mr = provider.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE)?;
            let tables = match tables {
                Some(memory) => {
                    let access = Access::REMOTE_READ;
                    let mr = provider.reg_mr(pd, &memory.whole(), access)?;
                    Some((memory, mr))
                }
                None => None,
            };
            match provider.create_cm_qp(self.id, &init) {
                Ok(qp) => Ok((mr, tables, qp)),
                Err(e) => {
                    let _ = provider.dereg_mr(mr.id);
                    if let Some((_, mr)) = tables {
                        let _ = provider.dereg_mr(mr.id);
                    }
                    Err(match e {
                        riser_transport::verbs::CmError::Verbs(e) => e,
                        _ => VerbsError::InvalidState("identifier takes no queue pair"),
                    })
                }
            }
        })();
        let (mr, tables, qp) = match made {
            Ok(made) => made,
            Err(e) => {
                pool.destroy(provider);
                return Err(e);
            }
        };
        self.rings = Some(Rings {
            qp,
            memory,
            mr,
            tables,
            regions: pool,
        });
        for slot in 0..self.config.receives() as u16 {
            if !self.post_recv(provider, slot) {
                return Err(VerbsError::InvalidState("queue pair takes no receives"));
            }
        }
        Ok(())
    }

    /// Releases everything but the connection identifier. From now on nothing that the peer sends
    /// reaches memory, and no key given to it works.
    pub(super) fn release<P: Provider>(&mut self, provider: &mut P) {
        let Some(mut rings) = self.rings.take() else {
            return;
        };
        // Regions that are memory windows refer to the queue pair that they were bound on, and Linux
        // waits with its end until they are gone.
        for attempt in self.attempts.iter_mut().filter_map(Option::take) {
            for region in attempt.regions {
                let _ = provider.dereg_mr(region.id());
            }
        }
        rings.regions.destroy(provider);
        let _ = provider.destroy_qp(rings.qp);
        let _ = provider.dereg_mr(rings.mr.id);
        if let Some((_, mr)) = rings.tables {
            let _ = provider.dereg_mr(mr.id);
        }
    }

    /// Copies a received information unit out.
    pub(super) fn received(&self, slot: u16, out: &mut [u8]) {
        if let Some(rings) = &self.rings {
            rings.memory.read(self.recv_at(slot), out);
        }
    }

    /// Posts a receive; false if the connection is broken.
    pub(super) fn post_recv<P: Provider>(&mut self, provider: &mut P, slot: u16) -> bool {
        let at = self.recv_at(slot);
        let Some(rings) = &self.rings else {
            return false;
        };
        let sge = Sge {
            addr: rings.mr.addr + at as u64,
            length: RECV_LEN as u32,
            lkey: rings.mr.lkey,
        };
        let wr = RecvWr {
            wr_id: Work::Recv(slot).id(),
            sges: &[sge],
        };
        provider.post_recv(rings.qp, &[wr]).is_ok()
    }

    /// Sends a short information unit from its own place; false if the connection is broken.
    fn post_short<P: Provider>(
        &mut self,
        provider: &mut P,
        work: Work,
        at: usize,
        iu: &[u8],
    ) -> bool {
        let Some(rings) = &self.rings else {
            return false;
        };
        rings.memory.write(at, iu);
        let sge = Sge {
            addr: rings.mr.addr + at as u64,
            length: iu.len() as u32,
            lkey: rings.mr.lkey,
        };
        let wr = SendWr {
            wr_id: work.id(),
            op: SendOp::Send,
            sges: &[sge],
            flags: SendFlags::SIGNALED,
            ud: None,
        };
        provider.post_send(rings.qp, &[wr]).is_ok()
    }

    /// Sends the answer to what receive `slot` brought; its completion posts the receive again.
    pub(super) fn post_answer<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
        iu: &[u8],
    ) -> bool {
        let at = self.answer_at(slot);
        self.post_short(provider, Work::Answer(slot), at, iu)
    }

    /// Sends a task-management request.
    pub(super) fn post_tsk_mgmt<P: Provider>(&mut self, provider: &mut P, iu: &[u8]) -> bool {
        let Some(slot) = self.tsk_mgmt_free.pop() else {
            return false;
        };
        let at = self.tsk_mgmt_at(slot);
        self.post_short(provider, Work::TskMgmt(slot), at, iu)
    }

    /// Sends the logout.
    pub(super) fn post_logout<P: Provider>(&mut self, provider: &mut P, iu: &[u8]) -> bool {
        let at = self.logout_at();
        self.post_short(provider, Work::Logout, at, iu)
    }

    /// The SEND of a task-management request has completed.
    pub(super) fn on_tsk_mgmt_sent(&mut self, slot: u16) {
        self.tsk_mgmt_free.push(slot);
    }

    fn slot_of(&self, request: RequestId) -> Option<u16> {
        *self.slots.get(request.0 as usize)?
    }

    fn set_slot(&mut self, request: RequestId, slot: Option<u16>) {
        let index = request.0 as usize;
        if index >= self.slots.len() {
            self.slots.resize(index + 1, None);
        }
        self.slots[index] = slot;
    }

    /// Begins to take a request's memory back. `Some(true)`: it is back already; `Some(false)`: a
    /// completion will tell; `None`: the connection is broken.
    pub(super) fn retire<P: Provider>(
        &mut self,
        provider: &mut P,
        request: RequestId,
    ) -> Option<bool> {
        let Some(slot) = self.slot_of(request) else {
            return Some(true);
        };
        let qp = self.qp()?;
        let attempt = self.attempts[usize::from(slot)].as_mut()?;
        attempt.retiring = true;
        if attempt.regions.is_empty() {
            let sent = attempt.sent;
            if sent {
                self.finish(provider, slot);
            }
            return Some(sent);
        }
        let id = Work::Invalidate(slot).id();
        let chain: ArrayVec<SendWr<'_>, MAX_REGIONS> =
            attempt.regions.iter_mut().map(|r| r.inv_wr(id)).collect();
        attempt.pending = chain.len();
        provider.post_send(qp, &chain).ok().map(|()| false)
    }

    /// A command's SEND has completed; gives the request whose memory is back with that.
    pub(super) fn on_command_sent<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
    ) -> Option<RequestId> {
        let attempt = self.attempts.get_mut(usize::from(slot))?.as_mut()?;
        attempt.sent = true;
        if !attempt.retiring {
            return None;
        }
        self.finish(provider, slot)
    }

    /// An invalidation has completed; gives the request whose memory is back with that.
    pub(super) fn on_invalidated<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
    ) -> Option<RequestId> {
        let attempt = self.attempts.get_mut(usize::from(slot))?.as_mut()?;
        attempt.pending = attempt.pending.checked_sub(1)?;
        if attempt.pending > 0 {
            return None;
        }
        for region in &mut attempt.regions {
            let key = region.rkey();
            region.on_invalidated(key);
        }
        self.finish(provider, slot)
    }

    fn finish<P: Provider>(&mut self, provider: &mut P, slot: u16) -> Option<RequestId> {
        let attempt = self.attempts[usize::from(slot)].take()?;
        self.set_slot(attempt.request, None);
        let rings = self.rings.as_mut()?;
        for region in attempt.regions {
            let _ = rings.regions.put(provider, region);
        }
        self.entries += attempt.entries;
        self.free.push(slot);
        Some(attempt.request)
    }
}
