//! One iSCSI connection on RDMA (RFC 7145): queue pair, receives, message buffers, memory regions.
//!
//! A PDU is one SEND: an iSER header that names the command's buffer, the PDU, and its immediate
//! data, which are gathered from where they lie. Other data move by themselves: the target reads
//! them, or writes them, by the key in the header.
//!
//! # Memory
//! A connection's own buffers are registered for local use only. A command's buffer is one fast
//! registration, posted before the command. Its key ends with the target's answer, where both sides
//! offered that (SEND with invalidate), or else by an invalidation of ours whose completion is
//! awaited; and the SEND itself must have completed too before the buffer is free.
//!
//! # Bounds
//! Commands: the queue size. Receives: that and [`SPARE`] more of [`RING_LEN`] bytes in full-feature
//! phase of a normal session, [`LARGE`] of [`LARGE_LEN`] bytes before and in discovery. Regions: one
//! for each command. Send queue: three entries for each command, and one for each control message.
//! A control message that finds no buffer waits in a queue, whose bound is the session's.

use std::collections::VecDeque;

use arrayvec::ArrayVec;
use riser_memory::{MemSlice, Memory};
use riser_scsi::iscsi::frame::MAX_AHS;
use riser_scsi::iser::{Buffers, CmHeader, RemoteBuffer, Stag, put_control};
use riser_transport::mr_pool::{MrPool, MrState, PooledMr};
use riser_transport::verbs::{
    Access, CmError, CmId, CqId, Mr, PdId, Provider, QpCap, QpId, QpInitAttr, QpType, RKey, RecvWr,
    SendFlags, SendOp, SendWr, Sge, VerbsError, WrId,
};

use crate::iscsi::ISER_RECV;
use crate::iscsi::session::{CommandPdu, ControlPdu, MAX_CONTROLS};
use crate::request::{DataLen, RequestId};

/// Headers before a data segment, in bytes.
const HEADERS: usize = 28 + 48;

/// Longest data segment of a control PDU, sent or received during login and discovery (RFC 7143
/// 13.12: the default of MaxRecvDataSegmentLength).
const LARGE_DATA: usize = 8192;

/// Length of a message buffer for such PDUs.
const LARGE_LEN: usize = HEADERS + LARGE_DATA;

/// How many such receives, and message buffers for sending, there are.
const LARGE: u16 = 4;

/// Length of a receive in full-feature phase.
const RING_LEN: usize = HEADERS + ISER_RECV as usize;

/// Receives beyond those of the commands: pings, task management, and what the target sends unasked.
const SPARE: u16 = 16;

/// Pieces that a command's memory may have: those of its immediate data go into the SEND.
pub(super) const MAX_PIECES: usize = 3;

/// What a work request was, in the top byte of its id; the lowest two are a slot, those before them a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A receive; the first [`LARGE`] are large.
    Recv(u16),
    Command(u16),
    Register(u16),
    /// The key that it invalidates, too: the slot may have another one when it completes.
    Invalidate(u16, RKey),
    Control(u16),
}

impl Work {
    fn id(self) -> WrId {
        let (kind, slot, key) = match self {
            Self::Recv(slot) => (0u64, slot, 0),
            Self::Command(slot) => (1, slot, 0),
            Self::Register(slot) => (2, slot, 0),
            Self::Invalidate(slot, key) => (3, slot, key.0),
            Self::Control(slot) => (4, slot, 0),
        };
        WrId(kind << 56 | u64::from(key) << 16 | u64::from(slot))
    }

    pub(super) fn of(id: WrId) -> Option<Self> {
        let slot = id.0 as u16;
        Some(match id.0 >> 56 {
            0 => Self::Recv(slot),
            1 => Self::Command(slot),
            2 => Self::Register(slot),
            3 => Self::Invalidate(slot, RKey((id.0 >> 16) as u32)),
            4 => Self::Control(slot),
            _ => return None,
        })
    }
}

/// Sizes of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct IserConfig {
    pub(super) queue_size: u16,
    /// Segments of one fast registration.
    pub(super) region_segments: u32,
    /// Whether the session is one of discovery, and large PDUs go on.
    pub(super) discovery: bool,
    /// Whether the device tells which key a SEND has invalidated.
    pub(super) remote_invalidate: bool,
}

impl IserConfig {
    fn receives(self) -> u16 {
        LARGE + self.queue_size + SPARE
    }

    fn send_entries(self) -> u32 {
        u32::from(self.queue_size) * 3 + u32::from(LARGE)
    }

    /// Completions that a connection can have outstanding.
    pub(super) fn completions(self) -> u32 {
        self.send_entries() + u32::from(self.receives())
    }

    /// What we offer in the private data.
    pub(super) fn offer(self) -> CmHeader {
        CmHeader {
            zero_based: false,
            remote_invalidate: self.remote_invalidate,
        }
    }
}

/// One command on the wire.
struct Attempt {
    request: RequestId,
    region: Option<PooledMr>,
    /// The SEND has completed.
    sent: bool,
    retiring: bool,
}

impl Attempt {
    fn is_over(&self) -> bool {
        let key_is_gone = self
            .region
            .as_ref()
            .is_none_or(|r| r.state() == MrState::Idle);
        self.retiring && self.sent && key_is_gone
    }
}

struct Rings {
    qp: QpId,
    memory: Memory,
    mr: Mr,
    regions: MrPool,
}

/// A connection, from the first call of the connection manager on.
pub(super) struct IserConn {
    pub(super) id: CmId,
    config: IserConfig,
    /// A request for a connection is under way.
    pub(super) is_connecting: bool,
    /// To be closed when the answer to that request is here, or by then at the latest.
    pub(super) closing_until: Option<std::time::Instant>,
    /// What both sides agreed on in the private data.
    pub(super) agreed: CmHeader,
    rings: Option<Rings>,
    attempts: Vec<Option<Attempt>>,
    /// The slot of a request's attempt, by request. Bound: the session's requests.
    slots: Vec<Option<u16>>,
    free: Vec<u16>,
    control_free: Vec<u16>,
    /// Control PDUs that wait for a buffer. Bound: [`MAX_CONTROLS`].
    waiting: VecDeque<ControlPdu>,
    message: Vec<u8>,
}

impl IserConn {
    pub(super) fn new(id: CmId, config: IserConfig) -> Self {
        Self {
            id,
            config,
            is_connecting: false,
            closing_until: None,
            agreed: CmHeader::default(),
            rings: None,
            attempts: (0..config.queue_size).map(|_| None).collect(),
            slots: Vec::new(),
            free: (0..config.queue_size).rev().collect(),
            control_free: (0..LARGE).rev().collect(),
            waiting: VecDeque::new(),
            message: Vec::new(),
        }
    }

    pub(super) fn qp(&self) -> Option<QpId> {
        self.rings.as_ref().map(|r| r.qp)
    }

    // Layout of the connection's memory: receives, control messages, commands.
    fn recv_place(slot: u16) -> (usize, usize) {
        match slot.checked_sub(LARGE) {
            None => (usize::from(slot) * LARGE_LEN, LARGE_LEN),
            Some(small) => (
                usize::from(LARGE) * LARGE_LEN + usize::from(small) * RING_LEN,
                RING_LEN,
            ),
        }
    }

    fn control_at(&self, slot: u16) -> usize {
        Self::recv_place(self.config.receives()).0 + usize::from(slot) * LARGE_LEN
    }

    fn command_at(&self, slot: u16) -> usize {
        self.control_at(LARGE) + usize::from(slot) * (HEADERS + MAX_AHS)
    }

    /// Makes the queue pair and everything else that the connection needs, and posts the receives of
    /// the login.
    pub(super) fn set_up<P: Provider>(
        &mut self,
        provider: &mut P,
        pd: PdId,
        cq: CqId,
    ) -> Result<(), VerbsError> {
        let os = |e: std::io::Error| VerbsError::Os(e.raw_os_error().unwrap_or(0));
        let memory = Memory::new(self.command_at(self.config.queue_size)).map_err(os)?;
        let init = QpInitAttr {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: self.config.send_entries(),
                max_recv_wr: self.config.receives().into(),
                max_send_sge: 1 + MAX_PIECES as u32,
                max_recv_sge: 1,
                max_inline: 0,
            },
            sq_sig_all: false,
        };
        let count = usize::from(self.config.queue_size);
        let mut regions = MrPool::new(provider, pd, count, self.config.region_segments)?;
        let mr = match provider.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE) {
            Ok(mr) => mr,
            Err(e) => {
                regions.destroy(provider);
                return Err(e);
            }
        };
        let qp = match provider.create_cm_qp(self.id, &init) {
            Ok(qp) => qp,
            Err(e) => {
                let _ = provider.dereg_mr(mr.id);
                regions.destroy(provider);
                return Err(match e {
                    CmError::Verbs(e) => e,
                    _ => VerbsError::InvalidState("identifier takes no queue pair"),
                });
            }
        };
        self.rings = Some(Rings {
            qp,
            memory,
            mr,
            regions,
        });
        self.post_recvs(provider, 0..LARGE)
    }

    /// The login is over: receives for what comes now.
    pub(super) fn enter_full_feature<P: Provider>(
        &mut self,
        provider: &mut P,
    ) -> Result<(), VerbsError> {
        self.post_recvs(provider, LARGE..self.config.receives())
    }

    fn post_recvs<P: Provider>(
        &mut self,
        provider: &mut P,
        slots: std::ops::Range<u16>,
    ) -> Result<(), VerbsError> {
        for slot in slots {
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
        // Windows refer to the queue pair that they were bound on, and Linux waits with its end until
        // they are gone.
        for attempt in self.attempts.iter_mut().filter_map(Option::take) {
            if let Some(region) = attempt.region {
                rings.regions.discard(provider, region);
            }
        }
        rings.regions.destroy(provider);
        let _ = provider.destroy_qp(rings.qp);
        let _ = provider.dereg_mr(rings.mr.id);
    }

    /// Copies a received message out.
    pub(super) fn received(&self, slot: u16, len: u32, out: &mut Vec<u8>) {
        let (at, room) = Self::recv_place(slot);
        out.clear();
        if let Some(rings) = &self.rings {
            out.resize((len as usize).min(room), 0);
            rings.memory.read(at, out);
        }
    }

    /// Posts a receive again, if it is of the kind that is used now; false if the connection is
    /// broken.
    pub(super) fn repost<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
        is_full_feature: bool,
    ) -> bool {
        let is_large = slot < LARGE;
        if is_large && is_full_feature && !self.config.discovery {
            return true;
        }
        self.post_recv(provider, slot)
    }

    fn post_recv<P: Provider>(&mut self, provider: &mut P, slot: u16) -> bool {
        let (at, len) = Self::recv_place(slot);
        let Some(rings) = &self.rings else {
            return false;
        };
        let sge = Sge {
            addr: rings.mr.addr + at as u64,
            length: len as u32,
            lkey: rings.mr.lkey,
        };
        let wr = RecvWr {
            wr_id: Work::Recv(slot).id(),
            sges: &[sge],
        };
        provider.post_recv(rings.qp, &[wr]).is_ok()
    }

    /// Sends a control PDU, or keeps it until there is a buffer; false if the connection is broken, or
    /// too many are kept.
    pub(super) fn send_control<P: Provider>(&mut self, provider: &mut P, pdu: ControlPdu) -> bool {
        if self.waiting.len() == MAX_CONTROLS {
            return false;
        }
        self.waiting.push_back(pdu);
        self.feed_controls(provider)
    }

    fn feed_controls<P: Provider>(&mut self, provider: &mut P) -> bool {
        while !self.waiting.is_empty() {
            let Some(slot) = self.control_free.pop() else {
                return true;
            };
            let pdu = self.waiting.pop_front().expect("not empty");
            let at = self.control_at(slot);
            let Some(rings) = &self.rings else {
                return false;
            };
            if pdu.data.len() > LARGE_DATA {
                return false;
            }
            self.message.clear();
            let data = &pdu.data;
            put_control(Buffers::default(), pdu.bhs, &[], data, &mut self.message);
            rings.memory.write(at, &self.message);
            let wr = SendWr {
                wr_id: Work::Control(slot).id(),
                op: SendOp::Send,
                sges: &[Sge {
                    addr: rings.mr.addr + at as u64,
                    length: self.message.len() as u32,
                    lkey: rings.mr.lkey,
                }],
                flags: SendFlags::SIGNALED,
                ud: None,
            };
            if provider.post_send(rings.qp, &[wr]).is_err() {
                return false;
            }
        }
        true
    }

    /// A control PDU has been sent.
    pub(super) fn on_control_sent<P: Provider>(&mut self, provider: &mut P, slot: u16) -> bool {
        self.control_free.push(slot);
        self.feed_controls(provider)
    }

    /// Starts a command whose data lies in `pieces`, at most [`MAX_PIECES`]; false if the connection is
    /// broken. There is a slot, since the session bounds the commands whose memory is not back.
    pub(super) fn start<P: Provider>(
        &mut self,
        provider: &mut P,
        request: RequestId,
        command: &CommandPdu,
        len: DataLen,
        pieces: &[MemSlice],
        pool: &Mr,
    ) -> bool {
        let slot = self.free.pop().expect("a slot for each command");
        let at = self.command_at(slot);
        let Some(rings) = &mut self.rings else {
            return false;
        };
        let immediate = command.immediate as usize;
        let total: usize = pieces.iter().map(MemSlice::len).sum();
        let mut attempt = Attempt {
            request,
            region: None,
            sent: false,
            retiring: false,
        };
        // Data that all go with the command need no key.
        let has_key = total > immediate || (total > 0 && matches!(len, DataLen::In(_)));
        if has_key {
            let mut region = rings.regions.get().expect("one for each slot");
            let mapped = region.map(provider, pieces);
            attempt.region = Some(region);
            if mapped.is_err() {
                self.attempts[usize::from(slot)] = Some(attempt);
                return false;
            }
        }
        let buffers = advertise(attempt.region.as_ref(), len, immediate);
        self.message.clear();
        // The data segment is behind the header in the gather list, so its length goes in by hand.
        let mut bhs = command.bhs;
        bhs[4] = (command.ahs.len() / 4) as u8;
        bhs[5..8].copy_from_slice(&command.immediate.to_be_bytes()[1..]);
        self.message
            .extend_from_slice(&riser_scsi::iser::Header::Control(buffers).bytes());
        self.message.extend_from_slice(&bhs);
        self.message.extend_from_slice(&command.ahs);
        rings.memory.write(at, &self.message);
        let mut sges: ArrayVec<Sge, { 1 + MAX_PIECES }> = ArrayVec::new();
        sges.push(Sge {
            addr: rings.mr.addr + at as u64,
            length: self.message.len() as u32,
            lkey: rings.mr.lkey,
        });
        let mut left = immediate;
        for piece in pieces {
            let here = left.min(piece.len());
            left -= here;
            if here > 0 {
                sges.push(Sge {
                    addr: piece.addr(),
                    length: here as u32,
                    lkey: pool.lkey,
                });
            }
        }
        let access = match len {
            DataLen::In(_) => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            _ => Access::REMOTE_READ,
        };
        let mut chain: ArrayVec<SendWr<'_>, 2> = ArrayVec::new();
        if let Some(region) = &mut attempt.region {
            chain.push(region.reg_wr(Work::Register(slot).id(), access));
        }
        chain.push(SendWr {
            wr_id: Work::Command(slot).id(),
            op: SendOp::Send,
            sges: &sges,
            flags: SendFlags::SIGNALED,
            ud: None,
        });
        let posted = provider.post_send(rings.qp, &chain).is_ok();
        self.attempts[usize::from(slot)] = Some(attempt);
        self.set_slot(request, Some(slot));
        posted
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
        let Some(slot) = self.slots.get(request.0 as usize).copied().flatten() else {
            return Some(true);
        };
        let qp = self.qp()?;
        let attempt = self.attempts[usize::from(slot)].as_mut()?;
        attempt.retiring = true;
        if let Some(region) = attempt
            .region
            .as_mut()
            .filter(|r| r.state() == MrState::Registered)
        {
            let key = region.rkey();
            let wr = region.inv_wr(Work::Invalidate(slot, key).id());
            provider.post_send(qp, &[wr]).ok()?;
        }
        Some(self.finish(provider, slot).is_some())
    }

    /// The peer has invalidated a key with its answer; `false` if that was none of ours.
    pub(super) fn on_remote_invalidated(&mut self, key: RKey) -> bool {
        self.attempts
            .iter_mut()
            .flatten()
            .filter_map(|attempt| attempt.region.as_mut())
            .any(|region| region.on_invalidated(key))
    }

    /// A command's SEND has completed; gives the request whose memory is back with that.
    pub(super) fn on_command_sent<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
    ) -> Option<RequestId> {
        self.attempts.get_mut(usize::from(slot))?.as_mut()?.sent = true;
        self.finish(provider, slot)
    }

    /// An invalidation has completed; gives the request whose memory is back with that. Where the target has
    /// invalidated the key before, the slot may have another command by now, whose key still works.
    pub(super) fn on_invalidated<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
        key: RKey,
    ) -> Option<RequestId> {
        let attempt = self.attempts.get_mut(usize::from(slot))?.as_mut()?;
        if !attempt.region.as_mut()?.on_invalidated(key) {
            return None;
        }
        self.finish(provider, slot)
    }

    /// Gives a slot back whose command is over in every respect.
    fn finish<P: Provider>(&mut self, provider: &mut P, slot: u16) -> Option<RequestId> {
        let place = self.attempts.get_mut(usize::from(slot))?;
        let attempt = place.take_if(|attempt| attempt.is_over())?;
        self.set_slot(attempt.request, None);
        let rings = self.rings.as_mut()?;
        if let Some(region) = attempt.region {
            let _ = rings.regions.put(provider, region);
        }
        self.free.push(slot);
        Some(attempt.request)
    }
}

/// What a command's header says of its buffer: of a write, from the first byte on that does not go
/// with the command (TaggedBufferForSolicitedDataOnly).
fn advertise(region: Option<&PooledMr>, len: DataLen, immediate: usize) -> Buffers {
    let Some(remote) = region.map(PooledMr::remote) else {
        return Buffers::default();
    };
    let buffer = |skip: usize| {
        Some(RemoteBuffer {
            stag: Stag(remote.rkey.0),
            base: remote.addr + skip as u64,
        })
    };
    match len {
        DataLen::None => Buffers::default(),
        DataLen::In(_) => Buffers {
            read: buffer(0),
            write: None,
        },
        DataLen::Out(_) => Buffers {
            write: buffer(immediate),
            read: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use riser_transport::loopback::{Endpoint, FabricConfig, Pair};
    use riser_transport::verbs::{PortSpace, RdmaCm, Verbs};

    use super::*;

    const CONFIG: IserConfig = IserConfig {
        queue_size: 2,
        region_segments: 4,
        discovery: false,
        remote_invalidate: true,
    };

    /// The key of the region that a slot's command has, and whether it may work.
    fn key_of(conn: &IserConn, slot: u16) -> (RKey, MrState) {
        let attempt = conn.attempts[usize::from(slot)].as_ref();
        let region = attempt.expect("a command").region.as_ref();
        let region = region.expect("a command with data");
        (region.rkey(), region.state())
    }

    /// Starts a READ. Its queue pair takes nothing, which is not what this is about.
    fn read(conn: &mut IserConn, nic: &mut Endpoint, request: u32, buffer: &Memory, pool: &Mr) {
        let command = CommandPdu {
            bhs: [0; 48],
            ahs: Vec::new(),
            immediate: 0,
            unsolicited: None,
        };
        let len = DataLen::In(4096);
        let pieces = [buffer.whole()];
        conn.start(nic, RequestId(request), &command, len, &pieces, pool);
    }

    #[test]
    fn work_requests_keep_their_names() {
        let key = RKey(0xfedc_ba98);
        for work in [
            Work::Invalidate(0xffff, key),
            Work::Command(3),
            Work::Control(0),
        ] {
            assert_eq!(Work::of(work.id()), Some(work));
        }
    }

    /// The target may invalidate a key while an invalidation of ours is under way, and the slot have another
    /// command when that completes.
    #[test]
    fn an_invalidation_ends_only_the_key_that_it_is_about() {
        let mut pair = Pair::new(FabricConfig::default());
        let nic = &mut pair.a;
        let id = nic.create_id(PortSpace::Tcp).unwrap();
        let addr = (nic.addr(), 0).into();
        nic.bind_addr(id, addr).unwrap();
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(64).unwrap();
        let mut conn = IserConn::new(id, CONFIG);
        // Its receives are not taken, either.
        let _ = conn.set_up(nic, pd, cq);
        assert!(conn.qp().is_some());
        let buffer = Memory::new(4096).unwrap();
        let pool = nic.reg_mr(pd, &buffer.whole(), Access::LOCAL_WRITE);
        let pool = pool.unwrap();

        read(&mut conn, nic, 1, &buffer, &pool);
        let slot = 0;
        let (first, _) = key_of(&conn, slot);
        conn.retire(nic, RequestId(1));
        assert_eq!(key_of(&conn, slot), (first, MrState::Invalidating));
        assert!(conn.on_remote_invalidated(first));
        assert_eq!(conn.on_command_sent(nic, slot), Some(RequestId(1)));

        read(&mut conn, nic, 2, &buffer, &pool);
        let (second, state) = key_of(&conn, slot);
        assert_eq!(state, MrState::Registered);
        assert_ne!(second, first);
        assert_eq!(conn.on_invalidated(nic, slot, first), None);
        assert_eq!(key_of(&conn, slot), (second, MrState::Registered));
        conn.retire(nic, RequestId(2));
        assert_eq!(conn.on_command_sent(nic, slot), None, "its key works");
        let back = conn.on_invalidated(nic, slot, second);
        assert_eq!(back, Some(RequestId(2)));
    }
}
