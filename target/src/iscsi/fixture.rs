//! Test worker for a single channel: pool, disk, gate, and an initiator that sends PDUs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::config::{Config, Limits};
use riser_scsi::iscsi::frame::{self, Digests, Framer};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{Auth, CompletedLogin, Identity, LoginFault, Refusal, Terms};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, LoginFlags, LoginRequest, LoginStatus, ScsiCommand, Stage,
    TmfFunction,
};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Numbers, StatSn, Tsih, Ttt};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::step::{BackendError, BlockOp, StepResult};

use super::{
    Action, Batch, ChannelConfig, Cx, Ending, Gate, LoginGrant, ReassignedTask, SpareTasks,
    TcpChannel, Window,
};
use crate::fabric::{LunMap, Mapping, TaskAction, TaskIdx, TaskRef, Unit, UnitIdx};
use crate::fixture::windowed_unit_config;
use crate::pool::Pool;
use crate::stats::{LunStats, SessionEvent};
use riser_test_peers::pdus::{data_out, nop_out, scsi_command, tmf_request};

pub(crate) const DISK: usize = 1 << 20;
pub(super) const WINDOW: u16 = 8;

/// PDU received by the initiator.
pub(super) type Received = (FromTarget, Numbers, Vec<u8>);

pub(crate) struct FakeGate {
    pub(crate) unit: Arc<Unit>,
    /// Statistics.
    pub(crate) stats: Arc<LunStats>,
    /// Failed logins.
    pub(crate) refused: Vec<LoginStatus>,
    /// Events counted by the target.
    pub(crate) events: Vec<SessionEvent>,
    pub(crate) offer: Offer,
    pub(crate) targets: usize,
    pub(crate) joined: usize,
    /// Set if a login replaces another session.
    pub(crate) waits: bool,
    /// Session to join on login, if set.
    pub(crate) window: Option<Arc<Window>>,
    /// Connections of the session that can be detached.
    pub(crate) others: Vec<Cid>,
}

impl FakeGate {
    pub(crate) fn new(offer: Offer) -> Self {
        Self {
            unit: unit(Limits::default().window),
            stats: Arc::new(LunStats::new("t", 0, None)),
            refused: Vec::new(),
            events: Vec::new(),
            offer,
            targets: 1,
            joined: 0,
            waits: false,
            window: None,
            others: Vec::new(),
        }
    }
}

impl Gate for FakeGate {
    fn admit(&mut self, _: &Identity) -> Result<Terms, Refusal> {
        Ok(Terms {
            offer: self.offer,
            auth: Auth::None,
            portal_group: 1,
        })
    }

    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus> {
        self.joined += 1;
        let mapping = Mapping {
            unit: Arc::clone(&self.unit),
            stats: Arc::clone(&self.stats),
            read_only: false,
        };
        let luns = LunMap::new([(LunId::ZERO, mapping)]);
        Ok(LoginGrant {
            tsih: Tsih(1),
            nexus: (!joined.session.discovery).then(|| (NexusId(7), Arc::new(luns))),
            params: joined.session,
            window: self
                .window
                .get_or_insert_with(|| Arc::new(Window::of(&joined.session, WINDOW, first)))
                .clone(),
            waits: self.waits,
        })
    }

    fn refused(
        &mut self,
        status: LoginStatus,
        _: Option<&Identity>,
        _: Option<&LoginFault>,
        _: Option<&str>,
    ) {
        self.refused.push(status);
    }

    fn count(&mut self, event: SessionEvent) {
        self.events.push(event);
    }

    fn end_other(&mut self, cid: Cid, _: Ending) -> bool {
        self.others.contains(&cid)
    }

    fn stop_waiting(&mut self) {
        self.waits = false;
    }

    fn random(&mut self, out: &mut [u8]) {
        out.fill(4);
    }

    fn targets(&mut self, _: &IscsiName, wanted: Option<&IscsiName>) -> Vec<DiscoveredTarget> {
        (0..self.targets)
            .map(|i| DiscoveredTarget {
                name: IscsiName::new(&format!("iqn.2026-01.a:t{i}")).unwrap(),
                addresses: vec![TargetAddress::parse("10.0.0.1:3260,1").unwrap()],
            })
            .filter(|found| wanted.is_none_or(|name| found.name == *name))
            .collect()
    }
}

pub(super) struct Rig {
    pub(super) now: Instant,
    pub(super) pool: Pool,
    pub(super) spare: SpareTasks,
    pub(super) gate: FakeGate,
    pub(super) channel: TcpChannel,
    pub(super) disk: Vec<u8>,
    /// Pending block operations.
    pub(super) blocks: Vec<(TaskIdx, BlockOp)>,
    pub(super) disconnected: bool,
    pub(super) released: bool,
    /// Set if block operations should complete immediately.
    pub(super) prompt: bool,
    framer: Framer,
    pub(super) digests: Digests,
    pub(super) cmd_sn: u32,
    pub(super) stalled: bool,
    /// Bytes that were not read by the channel because its send queue is full.
    pub(super) unread: Vec<u8>,
    /// Actions for other connections of the session.
    pub(super) elsewhere: Vec<Action>,
    /// Commands to be handed over to other connections.
    pub(super) reassigned: Vec<(TaskRef, Option<Box<ReassignedTask>>)>,
}

/// Creates a unit whose commands can use up to `window` bytes of memory at a time.
pub(crate) fn unit(window: u32) -> Arc<Unit> {
    unit_of(windowed_unit_config((DISK / 512) as u64, window))
}

/// Creates a unit with this configuration and a nexus for the initiator.
pub(super) fn unit_of(config: Config) -> Arc<Unit> {
    let lu = LogicalUnit::new(config).unwrap();
    let port = |name: &str| PortName::Iscsi(name.into());
    let target = TargetPort {
        name: port("iqn.2026-01.a:t0,t,0x0001"),
        relative_id: 1,
        group: 0,
    };
    let initiator = port("iqn.2026-01.a:i,i,0x000000000000");
    lu.add_nexus(NexusId(7), Nexus { initiator, target });
    Arc::new(Unit::new(UnitIdx(0), Arc::new(lu), 64))
}

impl Rig {
    /// Creates a new connection.
    pub(super) fn new() -> Self {
        Self::numbered(1)
    }

    /// Same as [`Rig::new`], but with a channel number.
    pub(super) fn numbered(serial: u64) -> Self {
        let now = Instant::now();
        let config = ChannelConfig {
            worker: 0,
            serial,
            commands: WINDOW,
            data_out_timeout: crate::config::DATA_OUT_TIMEOUT,
        };
        let offer = Offer::default()
            .with(Key::MaxRecvDataSegmentLength, 65536)
            .with(Key::InitialR2T, 0)
            .with(Key::MaxConnections, 4)
            .with(Key::ErrorRecoveryLevel, 2)
            .with(Key::MaxOutstandingR2T, 2)
            .with_list(Key::HeaderDigest, 3)
            .with_list(Key::DataDigest, 3);
        Self {
            now,
            pool: Pool::new(4 << 20).unwrap(),
            spare: SpareTasks::default(),
            gate: FakeGate::new(offer),
            channel: TcpChannel::new(config, now),
            disk: vec![0; DISK],
            blocks: Vec::new(),
            disconnected: false,
            released: false,
            prompt: true,
            framer: Framer::new(1 << 20),
            digests: Digests::default(),
            cmd_sn: 1,
            stalled: false,
            unread: Vec::new(),
            elsewhere: Vec::new(),
            reassigned: Vec::new(),
        }
    }

    /// Creates a connection in full-feature phase and clears its unit attention.
    pub(super) fn logged_in(keys: &str) -> Self {
        let mut rig = Self::new();
        rig.log_in(keys);
        rig.command(100, &[0; 6], false, 0, &[], true);
        rig
    }

    /// Same as [`Rig::logged_in`], but with a window for the unit.
    pub(super) fn with_window(window: u32, keys: &str) -> Self {
        let mut rig = Self::new();
        rig.gate.unit = unit(window);
        rig.log_in(keys);
        rig.command(100, &[0; 6], false, 0, &[], true);
        rig
    }

    /// Adds a connection to the session of `other`.
    pub(super) fn joined(other: &Self, serial: u64, keys: &str) -> Self {
        let mut rig = Self::numbered(serial);
        rig.now = other.now;
        rig.disk.clone_from(&other.disk);
        rig.gate.unit = Arc::clone(&other.gate.unit);
        rig.gate.window.clone_from(&other.gate.window);
        rig.log_in(keys);
        rig.cmd_sn = other.cmd_sn;
        rig
    }

    pub(super) fn log_in(&mut self, keys: &str) {
        let text = format!(
            "InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t0\0InitialR2T=No\0{keys}"
        );
        let answers = self.login(&text);
        assert!(matches!(
            answers[0].0,
            FromTarget::LoginResponse(r) if r.status == LoginStatus::SUCCESS
        ));
        let digest = |key: &str| keys.contains(&format!("{key}=CRC32C"));
        self.digests = Digests {
            header: digest("HeaderDigest"),
            data: digest("DataDigest"),
        };
        self.framer.set(1 << 20, self.digests);
    }

    pub(super) fn login(&mut self, text: &str) -> Vec<Received> {
        let bytes = self.login_bytes(text.as_bytes());
        self.bytes(&bytes)
    }

    pub(super) fn login_bytes(&self, text: &[u8]) -> Vec<u8> {
        let request = LoginRequest {
            flags: LoginFlags {
                current: Stage::Operational,
                transit: Some(Stage::FullFeature),
                continues: false,
            },
            version_max: 0,
            version_min: 0,
            isid: Isid([0; 6]),
            tsih: Tsih(0),
            itt: Itt(0),
            cid: Cid(0),
            cmd_sn: CmdSn(self.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        self.bytes_of(&FromInitiator::LoginRequest(request), text)
    }

    /// Passes an input to the channel, executes its actions, and returns the PDUs sent.
    pub(super) fn with<R>(
        &mut self,
        input: impl FnOnce(&mut TcpChannel, &mut Cx<'_>) -> R,
    ) -> Vec<Received> {
        self.step(input);
        self.run_actions()
    }

    /// Same as [`Rig::with`] for received bytes, repeated until the channel stops reading.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Vec<Received> {
        self.unread.extend_from_slice(bytes);
        let mut received = Vec::new();
        loop {
            let unread = std::mem::take(&mut self.unread);
            let taken = self.step(|ch, cx| ch.handle_bytes(cx, &unread));
            self.unread = unread[taken..].to_vec();
            received.extend(self.run_actions());
            let is_stuck = taken == 0 && !self.channel.channel().wants_input();
            if self.unread.is_empty() || is_stuck {
                return received;
            }
        }
    }

    /// Returns the PDUs sent by the channel, without completing the send.
    pub(super) fn poll_sent(&mut self) -> Vec<Received> {
        let mut batch = Batch::default();
        assert!(self.channel.poll_batch(&mut batch), "it has something");
        self.parse(&batch.to_vec())
    }

    fn step<R>(&mut self, input: impl FnOnce(&mut TcpChannel, &mut Cx<'_>) -> R) -> R {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spare,
            gate: &mut self.gate,
        };
        input(&mut self.channel, &mut cx)
    }

    fn run_actions(&mut self) -> Vec<Received> {
        let mut received = Vec::new();
        let mut batch = Batch::default();
        loop {
            if let Some(action) = self.channel.channel_mut().poll_action() {
                self.carry_out(action);
            } else if self.prompt && !self.blocks.is_empty() {
                self.finish_block(0);
            } else if !self.stalled && self.channel.poll_batch(&mut batch) {
                let bytes = batch.to_vec();
                assert_eq!(bytes.len(), batch.len);
                received.extend(self.parse(&bytes));
                self.step(|ch, cx| ch.handle_sent(cx, true));
            } else {
                return received;
            }
        }
    }

    fn parse(&mut self, bytes: &[u8]) -> Vec<Received> {
        let (mut received, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            let (used, frame) = self.framer.next(&bytes[at..]).unwrap();
            let frame = frame.expect("batches hold whole PDUs");
            assert!(frame.is_intact);
            let (pdu, numbers) = FromTarget::parse(&frame).unwrap();
            received.push((pdu, numbers, frame.data.to_vec()));
            at += used;
        }
        received
    }

    fn carry_out(&mut self, action: Action) {
        let own = self.channel.channel().config().serial;
        match action {
            Action::Task(
                TaskAction::StartTask(name)
                | TaskAction::AbortTask { task: name, .. }
                | TaskAction::TaskGone(name),
            ) if name.channel != own => {
                self.elsewhere.push(action);
            }
            Action::DeliverTask => {
                let moved = self.channel.channel_mut().take_reassigned();
                self.reassigned.push(moved);
            }
            Action::Task(TaskAction::SubmitBlock { task, op, .. }) => self.blocks.push((task, op)),
            Action::Task(TaskAction::AbortBlock(task)) => {
                let at = self.blocks.iter().position(|(t, _)| *t == task).unwrap();
                let (task, _) = self.blocks.remove(at);
                let result = StepResult::Failed(BackendError::Aborted);
                self.step(|ch, cx| ch.channel_mut().handle_block_done(cx, task, result));
            }
            Action::Task(TaskAction::StartTask(name)) => {
                self.step(|ch, cx| ch.channel_mut().handle_task_start(cx, name));
            }
            Action::Task(TaskAction::AbortTask { task, watcher }) => {
                self.step(|ch, cx| ch.channel_mut().handle_abort(cx, task, watcher));
            }
            Action::Task(TaskAction::TaskGone(name)) => {
                self.step(|ch, cx| ch.channel_mut().handle_task_gone(cx, name));
            }
            Action::Disconnect => {
                self.disconnected = true;
                self.step(|ch, cx| ch.channel_mut().handle_disconnected(cx));
            }
            Action::Task(TaskAction::UnitEvent { .. }) => {}
            Action::TakeTurn(_)
            | Action::EndOthers
            | Action::Lost
            | Action::Detached
            | Action::Reassign(_) => self.elsewhere.push(action),
            Action::Release => self.released = true,
        }
    }

    /// Completes a block operation with an error.
    pub(super) fn fail_block(&mut self, at: usize, error: BackendError) -> Vec<Received> {
        let (task, _) = self.blocks.remove(at);
        let result = StepResult::Failed(error);
        self.with(|ch, cx| ch.channel_mut().handle_block_done(cx, task, result))
    }

    /// Completes a block operation.
    pub(super) fn finish_block(&mut self, at: usize) {
        let (task, op) = self.blocks.remove(at);
        let from = match op {
            BlockOp::Read { buffer_offset, .. } | BlockOp::Write { buffer_offset, .. } => {
                buffer_offset
            }
            _ => 0,
        };
        let buffer = self
            .channel
            .channel()
            .executor()
            .data_buffer(task)
            .into_iter();
        let slices = buffer.flat_map(|buffer| buffer.slices(from..u32::MAX));
        let slices: Vec<_> = slices.collect();
        let mut done = 0;
        match op {
            BlockOp::Read { offset, len, .. } => {
                for slice in slices {
                    let n = slice.len().min(len as usize - done);
                    let from = offset as usize + done;
                    slice.write(0, &self.disk[from..from + n]);
                    done += n;
                }
            }
            BlockOp::Write { offset, len, .. } => {
                for slice in slices {
                    let n = slice.len().min(len as usize - done);
                    let to = offset as usize + done;
                    slice.read(0, &mut self.disk[to..to + n]);
                    done += n;
                }
            }
            _ => {}
        }
        self.step(|ch, cx| {
            ch.channel_mut()
                .handle_block_done(cx, task, StepResult::Done);
        });
    }

    pub(super) fn finish_all_blocks(&mut self) -> Vec<Received> {
        while !self.blocks.is_empty() {
            self.finish_block(0);
        }
        self.run_actions()
    }

    pub(super) fn bytes_of(&self, pdu: &FromInitiator, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame::put_pdu(pdu.header(), &pdu.ahs(), data, self.digests, &mut bytes);
        bytes
    }

    pub(super) fn send(&mut self, pdu: &FromInitiator, data: &[u8]) -> Vec<Received> {
        let bytes = self.bytes_of(pdu, data);
        self.bytes(&bytes)
    }

    /// Sends a command with immediate data.
    pub(super) fn command(
        &mut self,
        tag: u32,
        cdb: &[u8],
        writes: bool,
        len: u32,
        data: &[u8],
        is_final: bool,
    ) -> Vec<Received> {
        let command = ScsiCommand {
            is_final,
            ..scsi_command(tag, self.cmd_sn, cdb, writes, len)
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        self.send(&FromInitiator::ScsiCommand(command), data)
    }

    pub(super) fn read(&mut self, tag: u32, lba: u8, blocks: u8) -> Vec<Received> {
        let cdb = [0x28, 0, 0, 0, 0, lba, 0, 0, blocks, 0];
        self.command(tag, &cdb, false, u32::from(blocks) * 512, &[], true)
    }

    pub(super) fn write(
        &mut self,
        tag: u32,
        blocks: u8,
        data: &[u8],
        is_final: bool,
    ) -> Vec<Received> {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, blocks, 0];
        self.command(tag, &cdb, true, u32::from(blocks) * 512, data, is_final)
    }

    pub(super) fn data_out(
        &mut self,
        tag: u32,
        ttt: Ttt,
        sn: u32,
        offset: u32,
        data: &[u8],
        is_final: bool,
    ) -> Vec<Received> {
        let pdu = data_out(tag, ttt, sn, offset, is_final);
        self.send(&FromInitiator::DataOut(pdu), data)
    }

    pub(super) fn tmf(
        &mut self,
        tag: u32,
        function: TmfFunction,
        referenced: u32,
    ) -> Vec<Received> {
        let request = tmf_request(tag, self.cmd_sn, function, referenced);
        self.send(&FromInitiator::TmfRequest(request), &[])
    }

    pub(super) fn nop(&mut self, tag: u32, data: &[u8]) -> Vec<Received> {
        let nop = nop_out(tag, self.cmd_sn);
        self.send(&FromInitiator::NopOut(nop), data)
    }

    /// Advances the time.
    pub(super) fn wait(&mut self, time: Duration) -> Vec<Received> {
        self.now += time;
        self.with(TcpChannel::handle_timeout)
    }

    /// Closes the connection and verifies that all resources were released.
    pub(super) fn close(mut self) {
        self.with(|ch, cx| ch.channel_mut().handle_disconnected(cx));
        self.finish_all_blocks();
        assert!(self.released);
        assert_eq!(self.pool.free(), self.pool.size());
        assert_eq!(self.gate.unit.tasks(), 0);
        assert_eq!(self.gate.unit.limited(), 0);
        assert_eq!(self.channel.channel().executor().in_flight(), 0);
    }
}
