//! SRP channels, and the messages of their initiators.

use std::time::Instant;

use riser_memory::Memory;
use riser_scsi::config::{Config, Limits};
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{NexusId, PortName};
use riser_scsi::srp::{
    Cmd, DataBuffer, FromTarget, ImmediateDataOffset, IndirectTable, LoginReqFlags, MemDesc,
    Residual, Rsp, Tag, TaskAttr, TskMgmt, TskMgmtFunction,
};
use riser_test_peers::pdus::cdb10;

use super::script::{Command, Management, Outcome, Response};
use super::{Peer, Rig, UNITS, Work, windowed};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::task_mgmt::{Function, FunctionResponse};
use crate::fabric::{RdmaRequest, TaskAction, TaskIdx};
use crate::iscsi::TaskState;
use crate::pool::Buffer;
use crate::srp::login::MAX_TI_IU;
use crate::srp::{
    Action, ChState, Channel, ChannelConfig, ChannelParams, Cx, IoctxState, RecvIdx, SendIu,
};
use crate::stats::SessionEvent;
use crate::worker::fabrics::{Input, Machine};

pub(crate) struct SrpPeer {
    pub(crate) channel: Channel,
    /// Posted receives.
    pub(crate) receives: Vec<RecvIdx>,
    pub(crate) released: bool,
    pub(crate) disconnects: usize,
    pub(crate) notified: usize,
}

pub(crate) fn params() -> ChannelParams {
    ChannelParams {
        req_lim: 4,
        max_it_iu_len: 8260,
        max_ti_iu_len: MAX_TI_IU,
        send_queue: 20,
        immediate: ImmediateDataOffset::new(80),
        wants_events: true,
        flags: LoginReqFlags::AESOLNT,
    }
}

impl Peer for SrpPeer {
    type Action = Action;
    type Message = Vec<u8>;
    type Chain = TaskIdx;
    type Outgoing = SendIu;

    const BASE: u64 = 0;
    const NEXUS: u64 = 1;
    const SIBLING: u64 = 1;
    const FUNCTIONS: &[Function] = &[
        Function::AbortTask,
        Function::AbortTaskSet,
        Function::ClearTaskSet,
        Function::LogicalUnitReset,
    ];
    const TIMEOUT_EVENTS: &[SessionEvent] = &[];
    const CANCELS: bool = false;

    fn rig(config: &Config) -> Rig<Self> {
        let mut rig = Rig::of_units(config);
        rig.stalled = true;
        rig.checks_keys = false;
        rig
    }

    fn connect(rig: &mut Rig<Self>, nexus: u64) -> usize {
        let chan = rig.add_channel(params(), nexus);
        rig.establish(chan);
        chan
    }

    fn send_command(rig: &mut Rig<Self>, peer: usize, command: &Command) {
        let attr = match command.is_ordered {
            true => TaskAttr::Ordered,
            false => TaskAttr::Simple,
        };
        let cmd = cmd(&command.cdb).tag(command.tag.into());
        let cmd = cmd.lun(command.lun).attr(attr);
        let data = match command.is_immediate {
            true => Data::Immediate(command.data.clone()),
            false => Data::Direct(MemDesc::new(0, command.tag, command.len())),
        };
        let cmd = match (command.len(), command.writes) {
            (0, _) => cmd,
            (_, true) => cmd.out(data),
            (_, false) => cmd.into(data),
        };
        assert!(rig.send(peer, &cmd.bytes()), "no receive is posted");
    }

    fn send_function(rig: &mut Rig<Self>, peer: usize, management: Management) {
        let Management {
            tag,
            lun,
            function,
            task,
        } = management;
        let function = match function {
            Function::AbortTask => TskMgmtFunction::AbortTask,
            Function::AbortTaskSet => TskMgmtFunction::AbortTaskSet,
            Function::ClearTaskSet => TskMgmtFunction::ClearTaskSet,
            Function::LogicalUnitReset => TskMgmtFunction::LogicalUnitReset,
            other => unreachable!("{other:?} is not in a script"),
        };
        rig.send(peer, &tmf(tag.into(), lun, function, task.into()));
    }

    fn response(message: &Vec<u8>) -> Option<Response> {
        let Ok(FromTarget::Rsp(rsp)) = FromTarget::parse(message) else {
            return None;
        };
        let outcome = match rsp.response.map(u8::from) {
            None => Outcome::of_sense(rsp.status, rsp.sense),
            Some(0) => Outcome::Function(FunctionResponse::Complete),
            Some(2) => Outcome::Function(FunctionResponse::NoSuchLun),
            Some(4) => Outcome::Function(FunctionResponse::NotSupported),
            Some(5) => Outcome::Function(FunctionResponse::NotAuthorized),
            other => panic!("{other:?} is not in a script"),
        };
        let tag = rsp.tag.0 as u32;
        Some(Response { tag, outcome })
    }

    fn task_state(&self, tag: u32) -> Option<TaskState> {
        Some(match self.channel.requests().task_state(tag.into())? {
            IoctxState::Done => TaskState::Idle,
            IoctxState::New => TaskState::New,
            IoctxState::AwaitLimit => TaskState::AwaitLimit,
            IoctxState::AwaitTask => TaskState::AwaitTask,
            IoctxState::AwaitBuffer => TaskState::AwaitBuffer,
            IoctxState::FetchTable | IoctxState::NeedData => TaskState::Receive,
            IoctxState::DataIn => TaskState::Block,
            IoctxState::SendData | IoctxState::WriteData | IoctxState::AwaitCredit(_) => {
                TaskState::Send
            }
            IoctxState::Mgmt => TaskState::Mgmt,
            IoctxState::CmdRspSent | IoctxState::MgmtRspSent => TaskState::Sent,
        })
    }

    fn deadline(&self) -> Option<Instant> {
        self.channel.deadline()
    }

    fn keep_alive(_: &mut Rig<Self>, _: usize) {}

    fn input(rig: &mut Rig<Self>, peer: usize, input: Input) {
        rig.step(peer, |ch, cx| input.apply(Machine::Srp(ch, cx)));
    }

    fn serial(&self) -> u64 {
        self.channel.config().serial
    }

    fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        self.channel.requests().data_buffer(task)
    }

    fn poll_action(&mut self) -> Option<Result<TaskAction, Action>> {
        Some(match self.channel.poll_action()? {
            Action::Task(action) => Ok(action),
            action => Err(action),
        })
    }

    fn carry_out(rig: &mut Rig<Self>, peer: usize, action: Action) {
        let conn = &mut rig.peers[peer];
        match action {
            Action::PostRecv(recv) => conn.receives.push(recv),
            Action::Post { task, send } => {
                let requests = conn.channel.requests().rdma_requests(task);
                rig.work.push(Work::Chain {
                    peer,
                    chain: task,
                    requests: requests.map(RdmaRequest::to_list).collect(),
                    message: send,
                });
            }
            Action::NotifyEstablished => conn.notified += 1,
            // In these tests, replaced sessions are closed first.
            Action::StartEarly => {}
            Action::Probe => rig.work.push(Work::Probe { peer }),
            Action::Disconnect => {
                conn.disconnects += 1;
                rig.work.push(Work::Drain { peer });
            }
            Action::Release => conn.released = true,
            Action::Task(_) => unreachable!("handled for all protocols"),
        }
    }

    /// Offers memory to commands that are waiting.
    fn poll_work(rig: &mut Rig<Self>) -> bool {
        let mut any = false;
        for peer in 0..rig.peers.len() {
            if rig.peers[peer].channel.pool_waits() > 0 {
                Self::input(rig, peer, Input::Pool);
                any |= rig.poll_actions();
            }
        }
        any
    }

    fn transmit(rig: &mut Rig<Self>, ok: bool) -> bool {
        rig.execute_chain(ok)
    }

    fn in_error(&self) -> bool {
        matches!(
            self.channel.state(),
            ChState::Draining | ChState::Disconnected
        )
    }

    fn complete_chain(
        rig: &mut Rig<Self>,
        peer: usize,
        chain: TaskIdx,
        message: Option<SendIu>,
        ok: bool,
    ) {
        if let Some(message) = message.filter(|_| ok) {
            let slot = rig.peers[peer].channel.sender().ring().slot(chain);
            let bytes = slot.slice(0..message.len as usize).unwrap().to_vec();
            rig.received.push((peer, bytes));
        }
        rig.step(peer, |ch, cx| ch.handle_post_done(cx, chain, ok));
    }

    fn complete_probe(rig: &mut Rig<Self>, peer: usize, ok: bool) {
        rig.step(peer, |ch, cx| ch.handle_probed(cx, ok));
    }

    fn flush_receives(rig: &mut Rig<Self>, peer: usize) {
        for recv in std::mem::take(&mut rig.peers[peer].receives) {
            rig.step(peer, |ch, cx| ch.handle_recv_flushed(cx, recv));
        }
    }

    fn check_released(&self) {
        assert_eq!(self.channel.state(), ChState::Disconnected);
        assert!(self.released);
        let c = self.channel.stats().counters;
        let ended = c.responded + c.aborted + c.torn_down;
        assert!(ended >= c.commands + c.task_management);
        assert_eq!(self.channel.requests().len(), 0);
        assert!(self.channel.sender().queue.is_idle());
    }
}

impl Rig<SrpPeer> {
    /// Creates units without a channel.
    pub(crate) fn new() -> Self {
        Self::of(&windowed(Limits::default().window))
    }

    /// Creates copies of this unit without a channel.
    pub(crate) fn of(config: &Config) -> Self {
        SrpPeer::rig(config)
    }

    /// Creates a live channel of nexus 1 without pending unit attentions.
    pub(crate) fn live() -> Self {
        Self::with_window(Limits::default().window)
    }

    /// Same as [`Rig::live`], with units of this window.
    pub(crate) fn with_window(window: u32) -> Self {
        let mut rig = Self::of(&windowed(window));
        rig.add_live_channel(params(), 1);
        rig
    }

    /// Adds a channel without pending unit attentions.
    pub(crate) fn add_live_channel(&mut self, params: ChannelParams, nexus: u64) -> usize {
        let chan = self.add_channel(params, nexus);
        self.establish(chan);
        for lun in 0..UNITS {
            self.send(chan, &cmd(&[0; 6]).lun(lun.into()).bytes());
            self.complete_all();
        }
        self.received.clear();
        chan
    }

    pub(crate) fn add_channel(&mut self, params: ChannelParams, nexus: u64) -> usize {
        let chan = self.peers.len();
        let initiator = PortName::Srp([nexus as u8; 16]);
        let nexus = NexusId(nexus);
        self.gate
            .add_nexus(nexus, &initiator, &PortName::Srp([9; 16]));
        let memory = |len| Memory::new(len).unwrap().whole();
        let config = ChannelConfig {
            worker: 0,
            serial: chan as u64,
            nexus,
            luns: self.gate.luns(false).into(),
            receive_ring: memory(params.memory().receive_ring),
            send_ring: memory(params.memory().send_ring),
            max_sge: 4,
            data_out_timeout: DATA_OUT_TIMEOUT,
            params,
        };
        self.peers.push(SrpPeer {
            channel: Channel::new(config, self.now),
            receives: Vec::new(),
            released: false,
            disconnects: 0,
            notified: 0,
        });
        self.pump();
        chan
    }

    /// Passes an input to a channel, without executing its actions.
    fn step<R>(&mut self, chan: usize, input: impl FnOnce(&mut Channel, &mut Cx<'_>) -> R) -> R {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spares.srp,
        };
        input(&mut self.peers[chan].channel, &mut cx)
    }

    pub(crate) fn with<R>(
        &mut self,
        chan: usize,
        input: impl FnOnce(&mut Channel, &mut Cx<'_>) -> R,
    ) -> R {
        let result = self.step(chan, input);
        self.pump();
        result
    }

    pub(crate) fn establish(&mut self, chan: usize) {
        self.with(chan, |ch, cx| ch.handle_established(cx, true));
    }

    /// Sends an information unit to the channel. Returns `false` if no receive is posted.
    pub(crate) fn send(&mut self, chan: usize, iu: &[u8]) -> bool {
        let peer = &mut self.peers[chan];
        if peer.receives.is_empty() {
            return false;
        }
        let recv = peer.receives.remove(0);
        let slot = peer.channel.receives().slot(recv);
        let len = iu.len().min(slot.len());
        slot.write(0, &iu[..len]);
        self.with(chan, |ch, cx| ch.handle_recv(cx, recv, &iu[..len]));
        true
    }

    /// Returns the only response that was received.
    pub(crate) fn rsp(&mut self) -> SrpResponse {
        assert_eq!(self.received.len(), 1, "one message: {:?}", self.received);
        let (_, bytes) = self.received.remove(0);
        SrpResponse::of(&bytes)
    }

    pub(crate) fn srp_responses(&mut self) -> Vec<SrpResponse> {
        std::mem::take(&mut self.received)
            .iter()
            .filter(|(_, b)| b[0] == 0xc1)
            .map(|(_, b)| SrpResponse::of(b))
            .collect()
    }
}

/// An SRP_RSP with owned data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SrpResponse {
    pub(crate) tag: u64,
    pub(crate) delta: i32,
    pub(crate) status: u8,
    pub(crate) code: Option<u8>,
    pub(crate) key: Option<u8>,
    pub(crate) data_in: Residual,
    pub(crate) data_out: Residual,
}

impl SrpResponse {
    fn of(bytes: &[u8]) -> Self {
        let FromTarget::Rsp(Rsp {
            req_lim_delta,
            tag,
            status,
            data_out,
            data_in,
            response,
            sense,
            ..
        }) = FromTarget::parse(bytes).unwrap()
        else {
            panic!("an SRP_RSP: {bytes:02x?}");
        };
        Self {
            tag: tag.0,
            delta: req_lim_delta,
            status,
            code: response.map(u8::from),
            key: sense.map(|s| s[2] & 0xf),
            data_in,
            data_out,
        }
    }
}

/// Builds an SRP_CMD.
#[derive(Clone)]
pub(crate) struct CmdBuilder {
    tag: u64,
    lun: u32,
    attr: TaskAttr,
    cdb: [u8; 16],
    out: Data,
    into: Data,
}

#[derive(Clone)]
pub(crate) enum Data {
    None,
    Direct(MemDesc),
    Indirect {
        table: MemDesc,
        len: u32,
        inline: Vec<MemDesc>,
    },
    Immediate(Vec<u8>),
}

impl Data {
    /// Returns the first bytes of memory [`KEY`].
    pub(crate) fn direct(len: u32) -> Self {
        Self::Direct(MemDesc::new(0, KEY, len))
    }

    fn buffer(&self) -> DataBuffer<'_> {
        match self {
            Self::None => DataBuffer::None,
            Self::Direct(desc) => DataBuffer::Direct(*desc),
            Self::Indirect { table, len, inline } => DataBuffer::Indirect(IndirectTable {
                table: *table,
                len: *len,
                inline,
            }),
            Self::Immediate(data) => DataBuffer::Immediate {
                offset: ImmediateDataOffset::new(80).unwrap(),
                len: data.len() as u32,
                data,
            },
        }
    }
}

pub(crate) fn cmd(cdb: &[u8]) -> CmdBuilder {
    let mut full = [0; 16];
    full[..cdb.len()].copy_from_slice(cdb);
    CmdBuilder {
        tag: 1,
        lun: 0,
        attr: TaskAttr::Simple,
        cdb: full,
        out: Data::None,
        into: Data::None,
    }
}

/// READ (10).
pub(crate) fn read10(lba: u32, blocks: u16) -> CmdBuilder {
    cmd(&cdb10(0x28, lba, blocks))
}

/// WRITE (10).
pub(crate) fn write10(lba: u32, blocks: u16) -> CmdBuilder {
    cmd(&cdb10(0x2a, lba, blocks))
}

impl CmdBuilder {
    pub(crate) fn tag(self, tag: u64) -> Self {
        Self { tag, ..self }
    }
    pub(crate) fn lun(self, lun: u32) -> Self {
        Self { lun, ..self }
    }
    pub(crate) fn attr(self, attr: TaskAttr) -> Self {
        Self { attr, ..self }
    }
    pub(crate) fn out(self, out: Data) -> Self {
        Self { out, ..self }
    }
    pub(crate) fn into(self, into: Data) -> Self {
        Self { into, ..self }
    }
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let cmd = Cmd {
            tag: Tag(self.tag),
            lun: LunId::new(self.lun).unwrap().encode(),
            task_attr: self.attr,
            notify_success: false,
            notify_failure: false,
            cdb: self.cdb,
            additional_cdb: &[],
            data_out: self.out.buffer(),
            data_in: self.into.buffer(),
        };
        let mut out = vec![0; cmd.wire_len()];
        cmd.emit(&mut out);
        out
    }
}

pub(crate) fn tmf(tag: u64, lun: u32, function: TskMgmtFunction, task: u64) -> Vec<u8> {
    let mut out = vec![0; 48];
    TskMgmt {
        tag: Tag(tag),
        notify_success: false,
        notify_failure: false,
        lun: LunId::new(lun).unwrap().encode(),
        function,
        task_tag: Tag(task),
    }
    .emit(&mut out);
    out
}

/// Key of the initiator's memory used in [`blocks`].
pub(crate) const KEY: u32 = 7;

/// Key of the initiator's memory with the descriptor table for [`indirect`].
pub(crate) const TABLE: u32 = 3;

/// Returns a descriptor for each of the first `count` blocks of 512 bytes in memory [`KEY`].
pub(crate) fn blocks(count: u32) -> Vec<MemDesc> {
    (0..count)
        .map(|i| MemDesc::new(u64::from(i) * 512, KEY, 512))
        .collect()
}

/// Returns an indirect table for `descs`: the first `inline` descriptors are in the command, and
/// the full table is in memory [`TABLE`].
pub(crate) fn indirect(descs: &[MemDesc], inline: usize) -> Data {
    Data::Indirect {
        table: MemDesc::new(0, TABLE, descs.len() as u32 * 16),
        len: descs.iter().map(MemDesc::data_len).sum(),
        inline: descs[..inline].to_vec(),
    }
}

/// Returns the bytes of a descriptor table, as stored in the initiator's memory.
pub(crate) fn table_bytes(descs: &[MemDesc]) -> Vec<u8> {
    let mut out = Vec::new();
    for d in descs {
        out.extend(d.va().to_be_bytes());
        out.extend(d.key().to_be_bytes());
        out.extend(d.data_len().to_be_bytes());
    }
    out
}
