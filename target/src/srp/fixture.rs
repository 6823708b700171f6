//! A fake worker for channels, with a pool, disks, the initiator's memory, and devices. Each test
//! decides when their work completes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_scsi::config::{Config, Limits};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::srp::{
    Cmd, DataBuffer, FromTarget, ImmediateDataOffset, LoginReqFlags, MemDesc, Rsp, Tag, TaskAttr,
    TskMgmt, TskMgmtFunction,
};
use riser_scsi::step::{BackendError, BlockOp, StepResult};

use super::action::{Action, SendIu};
use super::channel::{ChState, Channel, Cx};
use super::config::ChannelConfig;
use super::ioctx::{RecvIdx, SendIoctx};
use super::login::{ChannelParams, MAX_TI_IU};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::{
    Direction, LunMap, Mapping, RdmaRequest, Spare, TaskAction, TaskIdx, Unit, UnitIdx,
};
use crate::fixture::windowed_unit_config;
use crate::pool::Pool;
use crate::stats::LunStats;

pub(super) const DISK: usize = 1 << 20;

/// Outstanding work of a device.
#[derive(Debug)]
pub(super) enum Pending {
    Chain {
        chan: usize,
        ioctx: TaskIdx,
        requests: Vec<RdmaRequest>,
        send: Option<SendIu>,
    },
    Block {
        chan: usize,
        ioctx: TaskIdx,
        unit: UnitIdx,
        op: BlockOp,
        aborted: bool,
    },
    Drain {
        chan: usize,
    },
    Probe {
        chan: usize,
    },
}

pub(super) struct Rig {
    pub(super) now: Instant,
    pub(super) pool: Pool,
    pub(super) spare: Spare<SendIoctx>,
    pub(super) units: Vec<Arc<Unit>>,
    /// Command statistics.
    pub(super) stats: Vec<Arc<LunStats>>,
    pub(super) disks: Vec<Vec<u8>>,
    /// The initiator's registered memory, by key. Addresses start at 0.
    pub(super) remote: HashMap<u32, Vec<u8>>,
    pub(super) channels: Vec<Channel>,
    /// Posted receives, by channel.
    pub(super) receives: Vec<Vec<RecvIdx>>,
    pub(super) pending: Vec<Pending>,
    /// Messages received by the initiator.
    pub(super) sent: Vec<(usize, Vec<u8>)>,
    pub(super) released: Vec<bool>,
    pub(super) disconnects: usize,
    pub(super) notified: usize,
}

pub(super) fn params() -> ChannelParams {
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

/// Units whose commands can have `window` bytes of data in memory at a time.
pub(super) fn windowed(window: u32) -> Config {
    windowed_unit_config((DISK / 512) as u64, window)
}

impl Rig {
    /// Creates two units, LUN 0 and 1, without a channel.
    pub(super) fn new() -> Self {
        Self::of_units(&windowed(Limits::default().window))
    }

    /// Creates two copies of this unit, without a channel.
    pub(super) fn of_units(config: &Config) -> Self {
        let lu = || Arc::new(LogicalUnit::new(config.clone()).unwrap());
        let units: Vec<_> = (0..2)
            .map(|i| Arc::new(Unit::new(UnitIdx(i), lu(), 64)))
            .collect();
        Self {
            now: Instant::now(),
            pool: Pool::new(4 << 20).unwrap(),
            spare: Spare::default(),
            units,
            stats: (0..2)
                .map(|i| Arc::new(LunStats::new("t", i, None)))
                .collect(),
            disks: vec![vec![0; DISK]; 2],
            remote: HashMap::new(),
            channels: Vec::new(),
            receives: Vec::new(),
            pending: Vec::new(),
            sent: Vec::new(),
            released: Vec::new(),
            disconnects: 0,
            notified: 0,
        }
    }

    /// Creates a live channel of nexus 1 without pending unit attentions.
    pub(super) fn live() -> Self {
        Self::with_window(Limits::default().window)
    }

    /// The same with units whose commands can have `window` bytes of data in memory at a time.
    pub(super) fn with_window(window: u32) -> Self {
        let mut rig = Self::of_units(&windowed(window));
        rig.add_channel(params(), 1);
        rig.establish(0);
        for lun in 0..2 {
            rig.send(0, &cmd(&[0; 6]).lun(lun).bytes());
            rig.run_actions();
        }
        rig.sent.clear();
        rig
    }

    pub(super) fn add_channel(&mut self, params: ChannelParams, nexus: u64) -> usize {
        let chan = self.channels.len();
        let nexus = NexusId(nexus);
        for unit in &self.units {
            if unit.lu.nexus(nexus).is_none() {
                let ports = Nexus {
                    initiator: PortName::Srp([nexus.0 as u8; 16]),
                    target: TargetPort {
                        name: PortName::Srp([9; 16]),
                        relative_id: 1,
                        group: 0,
                    },
                };
                unit.lu.add_nexus(nexus, ports);
            }
        }
        let memory = |len| Memory::new(len).unwrap().whole();
        let map = (0..2).map(|i| {
            let mapping = Mapping {
                unit: self.units[i as usize].clone(),
                stats: self.stats[i as usize].clone(),
                read_only: false,
            };
            (LunId::new(i).unwrap(), mapping)
        });
        let config = ChannelConfig {
            worker: 0,
            serial: chan as u64,
            nexus,
            luns: Arc::new(LunMap::new(map)),
            receive_ring: memory(params.memory().receive_ring),
            send_ring: memory(params.memory().send_ring),
            max_sge: 4,
            data_out_timeout: DATA_OUT_TIMEOUT,
            params,
        };
        self.channels.push(Channel::new(config, self.now));
        self.receives.push(Vec::new());
        self.released.push(false);
        self.pump();
        chan
    }

    pub(super) fn with<R>(
        &mut self,
        chan: usize,
        f: impl FnOnce(&mut Channel, &mut Cx<'_>) -> R,
    ) -> R {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spare,
        };
        let result = f(&mut self.channels[chan], &mut cx);
        self.pump();
        result
    }

    pub(super) fn establish(&mut self, chan: usize) {
        self.with(chan, |ch, cx| ch.handle_established(cx, true));
    }

    /// Sends an information unit to the channel. Returns `false` if no receive is posted.
    pub(super) fn send(&mut self, chan: usize, iu: &[u8]) -> bool {
        if self.receives[chan].is_empty() {
            return false;
        }
        let recv = self.receives[chan].remove(0);
        let slot = self.channels[chan].receives().slot(recv);
        let len = iu.len().min(slot.len());
        slot.write(0, &iu[..len]);
        self.with(chan, |ch, cx| ch.handle_recv(cx, recv, &iu[..len]));
        true
    }

    /// Executes the actions of all channels.
    pub(super) fn pump(&mut self) {
        let mut again = true;
        while std::mem::take(&mut again) {
            for chan in 0..self.channels.len() {
                while let Some(action) = self.channels[chan].poll_action() {
                    again = true;
                    self.act(chan, action);
                }
            }
            for chan in 0..self.channels.len() {
                if self.channels[chan].backlog.memory_waits() > 0 {
                    let mut cx = Cx {
                        now: self.now,
                        pool: &mut self.pool,
                        spare: &mut self.spare,
                    };
                    self.channels[chan].handle_pool(&mut cx);
                    while let Some(action) = self.channels[chan].poll_action() {
                        again = true;
                        self.act(chan, action);
                    }
                }
            }
        }
    }

    fn act(&mut self, chan: usize, action: Action) {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spare,
        };
        match action {
            Action::PostRecv(recv) => self.receives[chan].push(recv),
            Action::Post { task, send } => {
                let requests = self.channels[chan].requests().rdma_requests(task);
                let requests = requests.map(RdmaRequest::to_list).collect();
                self.pending.push(Pending::Chain {
                    chan,
                    ioctx: task,
                    requests,
                    send,
                });
            }
            Action::Task(TaskAction::SubmitBlock { task, unit, op }) => {
                self.pending.push(Pending::Block {
                    chan,
                    ioctx: task,
                    unit,
                    op,
                    aborted: false,
                });
            }
            Action::Task(TaskAction::AbortBlock(idx)) => {
                for p in &mut self.pending {
                    if let Pending::Block {
                        chan: c,
                        ioctx,
                        aborted,
                        ..
                    } = p
                        && (*c, *ioctx) == (chan, idx)
                    {
                        *aborted = true;
                    }
                }
            }
            Action::Task(TaskAction::StartTask(task)) => {
                self.channels[task.channel as usize].handle_task_start(&mut cx, task);
            }
            Action::Task(TaskAction::AbortTask { task, watcher }) => {
                self.channels[task.channel as usize].handle_abort(&mut cx, task, watcher);
            }
            Action::Task(TaskAction::TaskGone(watcher)) => {
                self.channels[watcher.channel as usize].handle_task_gone(&mut cx, watcher);
            }
            Action::Task(TaskAction::UnitEvent { unit, attention }) => {
                for channel in &mut self.channels {
                    channel.handle_event(&mut cx, unit, attention);
                }
            }
            Action::NotifyEstablished => self.notified += 1,
            // In these tests, replaced sessions are closed first.
            Action::StartEarly => {}
            Action::Probe => self.pending.push(Pending::Probe { chan }),
            Action::Disconnect => {
                self.disconnects += 1;
                self.pending.push(Pending::Drain { chan });
            }
            Action::Release => self.released[chan] = true,
        }
    }

    /// Completes the oldest work of a device.
    pub(super) fn complete(&mut self) {
        self.complete_nth(0, true);
    }

    /// Completes some work. For the queue pair of a channel, this is always the oldest.
    pub(super) fn complete_nth(&mut self, n: usize, ok: bool) {
        let queue = |p: &Pending| match p {
            Pending::Chain { chan, .. } | Pending::Drain { chan } | Pending::Probe { chan } => {
                Some(*chan)
            }
            Pending::Block { .. } => None,
        };
        let mut n = n;
        if let Some(chan) = queue(&self.pending[n]) {
            n = self
                .pending
                .iter()
                .position(|p| queue(p) == Some(chan))
                .unwrap();
        }
        match self.pending.remove(n) {
            Pending::Chain {
                chan,
                ioctx,
                requests,
                send,
            } => {
                let ok = ok
                    && self.channels[chan].state() != ChState::Draining
                    && self.allows(&requests);
                if ok {
                    self.move_data(&requests);
                    if let Some(iu) = send {
                        let slot = self.channels[chan].sender().ring().slot(ioctx);
                        let bytes = slot.slice(0..iu.len as usize).unwrap().to_vec();
                        self.sent.push((chan, bytes));
                    }
                }
                self.with(chan, |ch, cx| ch.handle_post_done(cx, ioctx, ok));
            }
            Pending::Block {
                chan,
                ioctx,
                unit,
                op,
                aborted,
            } => {
                let result = if aborted {
                    StepResult::Failed(BackendError::Aborted)
                } else if ok {
                    self.do_block(chan, ioctx, unit, op)
                } else {
                    StepResult::Failed(BackendError::Medium { offset: None })
                };
                self.with(chan, |ch, cx| ch.handle_block_done(cx, ioctx, result));
            }
            Pending::Probe { chan } => {
                let ok = ok && self.channels[chan].state() != ChState::Draining;
                self.with(chan, |ch, cx| ch.handle_probed(cx, ok));
            }
            Pending::Drain { chan } => {
                for recv in std::mem::take(&mut self.receives[chan]) {
                    self.with(chan, |ch, cx| ch.handle_recv_flushed(cx, recv));
                }
                self.with(chan, Channel::handle_drained);
            }
        }
    }

    /// Completes all outstanding work.
    pub(super) fn run_actions(&mut self) {
        while !self.pending.is_empty() {
            self.complete();
        }
    }

    /// Returns whether the initiator's device allows access to all of this range.
    fn allows(&self, requests: &[RdmaRequest]) -> bool {
        requests.iter().all(|wr| {
            let len = wr.bytes() as usize;
            let end = usize::try_from(wr.remote.addr)
                .ok()
                .and_then(|a| a.checked_add(len));
            let memory = self.remote.get(&wr.remote.rkey.0);
            memory.zip(end).is_some_and(|(m, end)| end <= m.len())
        })
    }

    fn move_data(&mut self, requests: &[RdmaRequest]) {
        for wr in requests {
            let mut at = wr.remote.addr as usize;
            let remote = self.remote.get_mut(&wr.remote.rkey.0).expect("a key");
            for local in &wr.local {
                let remote = &mut remote[at..at + local.len()];
                match wr.direction {
                    Direction::FromInitiator => self.pool.memory().write(local.start, remote),
                    Direction::ToInitiator => self.pool.memory().read(local.start, remote),
                }
                at += local.len();
            }
        }
    }

    fn do_block(&mut self, chan: usize, ioctx: TaskIdx, unit: UnitIdx, op: BlockOp) -> StepResult {
        let disk = &mut self.disks[unit.0 as usize];
        match op {
            BlockOp::Read {
                offset,
                len,
                buffer_offset,
                ..
            } => {
                let mut at = offset as usize;
                let buffer = self.channels[chan]
                    .requests()
                    .data_buffer(ioctx)
                    .expect("a buffer");
                for s in buffer.slices(buffer_offset..buffer_offset + len) {
                    s.write(0, &disk[at..at + s.len()]);
                    at += s.len();
                }
            }
            BlockOp::Write {
                offset,
                len,
                buffer_offset,
                ..
            } => {
                let mut at = offset as usize;
                let buffer = self.channels[chan]
                    .requests()
                    .data_buffer(ioctx)
                    .expect("a buffer");
                for s in buffer.slices(buffer_offset..buffer_offset + len) {
                    s.read(0, &mut disk[at..at + s.len()]);
                    at += s.len();
                }
            }
            BlockOp::Discard { offset, len } | BlockOp::WriteZeroes { offset, len, .. } => {
                disk[offset as usize..][..len as usize].fill(0);
            }
            BlockOp::Flush { .. } | BlockOp::Status { .. } | BlockOp::ChangeReservations(_) => {}
        }
        StepResult::Done
    }

    pub(super) fn advance(&mut self, by: Duration) {
        self.now += by;
        for chan in 0..self.channels.len() {
            self.with(chan, Channel::handle_timeout);
        }
    }

    /// Returns the only response that was received.
    pub(super) fn rsp(&mut self) -> Answer {
        assert_eq!(self.sent.len(), 1, "one message: {:?}", self.sent);
        let (_, bytes) = self.sent.remove(0);
        Answer::of(&bytes)
    }

    pub(super) fn answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.sent)
            .iter()
            .filter(|(_, b)| b[0] == 0xc1)
            .map(|(_, b)| Answer::of(b))
            .collect()
    }

    /// Closes a channel and checks that no resources are left.
    pub(super) fn close(&mut self) {
        for chan in 0..self.channels.len() {
            self.with(chan, Channel::handle_disconnected);
        }
        self.run_actions();
        for (chan, channel) in self.channels.iter().enumerate() {
            assert_eq!(channel.state(), ChState::Disconnected);
            assert!(self.released[chan]);
            let c = channel.stats().counters;
            let ended = c.answered + c.aborted + c.torn_down;
            assert!(ended >= c.commands + c.task_management);
            assert_eq!(channel.requests().len(), 0);
            assert!(channel.sender().queue.is_idle());
        }
        assert_eq!(self.pool.free(), self.pool.size(), "every buffer is back");
        for unit in &self.units {
            assert_eq!(unit.tasks(), 0, "every task left its set");
            assert_eq!(unit.limited(), 0, "none waits for limits");
        }
    }
}

/// An SRP_RSP with owned data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) tag: u64,
    pub(super) delta: i32,
    pub(super) status: u8,
    pub(super) code: Option<u8>,
    pub(super) key: Option<u8>,
    pub(super) data_in: riser_scsi::srp::Residual,
    pub(super) data_out: riser_scsi::srp::Residual,
}

impl Answer {
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
pub(super) struct CmdBuilder {
    tag: u64,
    lun: u32,
    attr: TaskAttr,
    cdb: [u8; 16],
    out: Data,
    into: Data,
}

#[derive(Clone)]
pub(super) enum Data {
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
    fn buffer(&self) -> DataBuffer<'_> {
        match self {
            Self::None => DataBuffer::None,
            Self::Direct(desc) => DataBuffer::Direct(*desc),
            Self::Indirect { table, len, inline } => {
                DataBuffer::Indirect(riser_scsi::srp::IndirectTable {
                    table: *table,
                    len: *len,
                    inline,
                })
            }
            Self::Immediate(data) => DataBuffer::Immediate {
                offset: ImmediateDataOffset::new(80).unwrap(),
                len: data.len() as u32,
                data,
            },
        }
    }
}

pub(super) fn cmd(cdb: &[u8]) -> CmdBuilder {
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
pub(super) fn read10(lba: u32, blocks: u16) -> CmdBuilder {
    cmd(&cdb10(0x28, lba, blocks))
}

/// WRITE (10).
pub(super) fn write10(lba: u32, blocks: u16) -> CmdBuilder {
    cmd(&cdb10(0x2a, lba, blocks))
}

fn cdb10(op: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let [a, b, c, d] = lba.to_be_bytes();
    let [e, f] = blocks.to_be_bytes();
    [op, 0, a, b, c, d, 0, e, f, 0]
}

impl CmdBuilder {
    pub(super) fn tag(self, tag: u64) -> Self {
        Self { tag, ..self }
    }
    pub(super) fn lun(self, lun: u32) -> Self {
        Self { lun, ..self }
    }
    pub(super) fn attr(self, attr: TaskAttr) -> Self {
        Self { attr, ..self }
    }
    pub(super) fn out(self, out: Data) -> Self {
        Self { out, ..self }
    }
    pub(super) fn into(self, into: Data) -> Self {
        Self { into, ..self }
    }
    pub(super) fn bytes(&self) -> Vec<u8> {
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

pub(super) fn tmf(tag: u64, lun: u32, function: TskMgmtFunction, task: u64) -> Vec<u8> {
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
pub(super) const KEY: u32 = 7;

/// Key of the initiator's memory with the descriptor table for [`indirect`].
pub(super) const TABLE: u32 = 3;

/// Returns a descriptor for each of the first `count` blocks of 512 bytes in memory [`KEY`].
pub(super) fn blocks(count: u32) -> Vec<MemDesc> {
    (0..count)
        .map(|i| MemDesc::new(u64::from(i) * 512, KEY, 512))
        .collect()
}

/// Returns an indirect table for `descs`: the first `inline` descriptors are in the command, and
/// the full table is in memory [`TABLE`].
pub(super) fn indirect(descs: &[MemDesc], inline: usize) -> Data {
    Data::Indirect {
        table: MemDesc::new(0, TABLE, descs.len() as u32 * 16),
        len: descs.iter().map(MemDesc::data_len).sum(),
        inline: descs[..inline].to_vec(),
    }
}

/// Returns the bytes of a descriptor table, as stored in the initiator's memory.
pub(super) fn table_bytes(descs: &[MemDesc]) -> Vec<u8> {
    let mut out = Vec::new();
    for d in descs {
        out.extend(d.va().to_be_bytes());
        out.extend(d.key().to_be_bytes());
        out.extend(d.data_len().to_be_bytes());
    }
    out
}
