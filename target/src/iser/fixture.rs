//! A fake worker for a single connection: a pool, a disk, a gate, a device that transfers data, and
//! an initiator with buffers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, LoginFlags, LoginRequest, LoginStatus, LogoutReason, LogoutRequest,
    ScsiCommand, Stage, TmfFunction,
};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Numbers, StatSn, Tsih, Ttt};
use riser_scsi::iser::{
    Buffers, Header, Hello, HelloReply, Message, RemoteBuffer, Stag, put_control,
};
use riser_scsi::step::{BackendError, BlockOp, StepResult};

use super::{ChainIdx, ConnState, IserAction, IserChannel, IserConfig, IserParams, Post, RxIdx};
use crate::fabric::{Direction, RdmaRequest, TaskAction, TaskIdx};
use crate::iscsi::fixture::{DISK, FakeGate, unit};
use crate::iscsi::{Action, Cx, SpareTasks};
use crate::pool::Pool;
use riser_test_peers::pdus::{data_out, nop_out, scsi_command, tmf_request};

/// Command window.
pub(super) const WINDOW: u16 = 4;

/// Start address of the initiator's buffers, as used by its device.
pub(super) const BASE: u64 = 0xff2e_c96a_1f4e_d000;

/// Message received by the initiator.
#[derive(Debug)]
pub(super) enum Got {
    Pdu {
        pdu: FromTarget,
        numbers: Numbers,
        data: Vec<u8>,
        invalidated: Option<u32>,
    },
    Hello(HelloReply),
}

/// A posted chain that the device has not executed yet.
#[derive(Debug)]
pub(super) struct Chain {
    idx: ChainIdx,
    pub(super) requests: Vec<RdmaRequest>,
    send: Option<(Vec<u8>, Option<u32>)>,
}

pub(super) struct Rig {
    pub(super) now: Instant,
    pub(super) pool: Pool,
    pub(super) spare: SpareTasks,
    pub(super) gate: FakeGate,
    pub(super) conn: IserChannel,
    pub(super) disk: Vec<u8>,
    /// Pending block operations.
    pub(super) blocks: Vec<(TaskIdx, BlockOp)>,
    /// Complete block operations automatically.
    pub(super) prompt: bool,
    /// Suspend the device.
    pub(super) stalled: bool,
    pub(super) chains: VecDeque<Chain>,
    receives: VecDeque<RxIdx>,
    /// Initiator buffers by key. Each buffer starts at [`BASE`].
    pub(super) memory: HashMap<u32, Vec<u8>>,
    /// Keys that were invalidated and not advertised again.
    invalidated: HashSet<u32>,
    /// Maximum number of work requests posted at the same time.
    pub(super) most_posted: usize,
    pub(super) in_error: bool,
    pub(super) released: bool,
    pub(super) notified: bool,
    pub(super) cmd_sn: u32,
}

pub(super) fn offer() -> Offer {
    Offer::default()
        .with(Key::RdmaExtensions, 1)
        .with(Key::InitialR2T, 0)
        .with(Key::TargetRecvDataSegmentLength, 8192)
        .with(Key::InitiatorRecvDataSegmentLength, 65536)
        .with(Key::FirstBurstLength, 16384)
        .with(Key::MaxBurstLength, 1 << 20)
}

pub(super) fn params() -> IserParams {
    IserParams {
        first_burst: 16384,
        send_queue: 33,
        max_sge: 2,
        remote_invalidate: true,
        ..IserParams::new(WINDOW)
    }
}

impl Rig {
    /// Returns an accepted connection that is not established yet.
    pub(super) fn accepted(params: IserParams) -> Self {
        let now = Instant::now();
        let memory = params.memory();
        let conn = IserChannel::new(
            IserConfig {
                params,
                worker: 0,
                serial: 1,
                receive_ring: Memory::new(memory.receive_ring).unwrap().whole(),
                send_ring: Memory::new(memory.send_ring).unwrap().whole(),
            },
            now,
        );
        let mut rig = Self {
            now,
            pool: Pool::new(4 << 20).unwrap(),
            spare: SpareTasks::default(),
            gate: FakeGate::new(offer()),
            conn,
            disk: vec![0; DISK],
            blocks: Vec::new(),
            prompt: true,
            stalled: false,
            chains: VecDeque::new(),
            receives: VecDeque::new(),
            memory: HashMap::new(),
            invalidated: HashSet::new(),
            most_posted: 0,
            in_error: false,
            released: false,
            notified: false,
            cmd_sn: 1,
        };
        assert!(rig.run_actions().is_empty());
        rig
    }

    /// Returns an established connection before its first message.
    pub(super) fn up() -> Self {
        let mut rig = Self::accepted(params());
        rig.with(IserChannel::handle_established);
        rig
    }

    /// Returns a connection in the full-feature phase, with a cleared unit attention.
    pub(super) fn logged_in(keys: &str) -> Self {
        Self::with_window(1 << 20, keys)
    }

    /// Same as `logged_in`, using a unit with this window.
    pub(super) fn with_window(window: u32, keys: &str) -> Self {
        let mut rig = Self::in_full_feature(window, keys);
        if !keys.contains("iSERHelloRequired=Yes") {
            rig.command(100, &[0; 6], None, 0, &[], true);
        }
        rig
    }

    /// Returns a connection that has logged in and has not sent any requests yet.
    pub(super) fn in_full_feature(window: u32, keys: &str) -> Self {
        let mut rig = Self::up();
        rig.gate.unit = unit(window);
        let got = rig.login(&format!("InitialR2T=No\0{keys}"));
        assert!(matches!(
            &got[..],
            [Got::Pdu { pdu: FromTarget::LoginResponse(r), .. }] if r.status == LoginStatus::SUCCESS
        ));
        assert_eq!(rig.conn.state(), ConnState::FullFeature);
        rig
    }

    pub(super) fn login(&mut self, keys: &str) -> Vec<Got> {
        let text = format!(
            "InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t0\0RDMAExtensions=Yes\0\
             InitiatorRecvDataSegmentLength=262144\0TargetRecvDataSegmentLength=8192\0{keys}"
        );
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
        self.send(&FromInitiator::LoginRequest(request), text.as_bytes())
    }

    /// Passes an input to the connection and executes the resulting actions. Returns the messages
    /// received by the initiator.
    pub(super) fn with(&mut self, input: impl FnOnce(&mut IserChannel, &mut Cx<'_>)) -> Vec<Got> {
        self.step(input);
        self.run_actions()
    }

    fn step(&mut self, input: impl FnOnce(&mut IserChannel, &mut Cx<'_>)) {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spare,
            gate: &mut self.gate,
        };
        input(&mut self.conn, &mut cx);
    }

    pub(super) fn run_actions(&mut self) -> Vec<Got> {
        let mut got = Vec::new();
        let mut post = Post::default();
        loop {
            if let Some(action) = self.conn.poll_action() {
                self.carry_out(action);
            } else if self.conn.poll_post(self.now, &mut post) {
                self.take_post(&post);
            } else if self.prompt && !self.blocks.is_empty() {
                self.finish_block(0);
            } else if !self.stalled && !self.chains.is_empty() {
                got.extend(self.finish_chain());
            } else {
                return got;
            }
        }
    }

    fn take_post(&mut self, post: &Post) {
        let requests = post.requests.clone();
        let max_sge = self.conn.params().max_sge;
        assert!(requests.iter().all(|r| r.local.len() <= max_sge));
        let send = post
            .send
            .as_ref()
            .map(|send| (send.bytes.to_vec(), send.invalidate.map(|stag| stag.0)));
        assert!(
            !requests.is_empty() || send.is_some(),
            "a chain does something"
        );
        self.chains.push_back(Chain {
            idx: post.chain,
            requests,
            send,
        });
        let posted = self
            .chains
            .iter()
            .map(|c| c.requests.len() + usize::from(c.send.is_some()));
        self.most_posted = self.most_posted.max(posted.sum());
        assert!(self.most_posted <= self.conn.params().credits() as usize);
    }

    /// Executes the oldest chain. Returns the message received by the initiator, if any.
    pub(super) fn finish_chain(&mut self) -> Option<Got> {
        let chain = self.chains.pop_front()?;
        if self.in_error {
            self.step(|conn, cx| conn.handle_post_done(cx, chain.idx, false));
            return None;
        }
        let pool = self.pool.memory().whole();
        for request in chain.requests {
            let key = request.remote.rkey.0;
            assert!(!self.invalidated.contains(&key), "a key that works");
            let buffer = self.memory.get_mut(&key).expect("a key of the initiator's");
            let mut at = (request.remote.addr - BASE) as usize;
            for range in request.local {
                let slice = pool.slice(range).unwrap();
                let remote = &mut buffer[at..at + slice.len()];
                match request.direction {
                    Direction::FromInitiator => slice.write(0, remote),
                    Direction::ToInitiator => slice.read(0, remote),
                }
                at += slice.len();
            }
        }
        let got = chain.send.map(|(bytes, invalidated)| {
            if let Some(key) = invalidated {
                assert!(self.memory.contains_key(&key), "a key of the initiator's");
                assert!(self.invalidated.insert(key), "a key that works");
            }
            match Message::parse(&bytes).unwrap() {
                Message::Control { buffers, frame } => {
                    assert_eq!(buffers, Buffers::default());
                    let (pdu, numbers) = FromTarget::parse(&frame).unwrap();
                    Got::Pdu {
                        pdu,
                        numbers,
                        data: frame.data.to_vec(),
                        invalidated,
                    }
                }
                Message::HelloReply(reply) => Got::Hello(reply),
                Message::Hello(_) => panic!("a target does not say hello"),
            }
        });
        self.step(|conn, cx| conn.handle_post_done(cx, chain.idx, true));
        got
    }

    fn carry_out(&mut self, action: IserAction) {
        let action = match action {
            IserAction::PostRecv(rx) => return self.receives.push_back(rx),
            IserAction::NotifyEstablished => return self.notified = true,
            IserAction::Disconnect => {
                assert!(!self.in_error, "once");
                self.in_error = true;
                return;
            }
            IserAction::Release => return self.released = true,
            IserAction::Channel(action) => action,
        };
        match action {
            Action::Task(TaskAction::SubmitBlock { task, op, .. }) => self.blocks.push((task, op)),
            Action::Task(TaskAction::AbortBlock(task)) => {
                let at = self.blocks.iter().position(|(t, _)| *t == task).unwrap();
                self.blocks.remove(at);
                let result = StepResult::Failed(BackendError::Aborted);
                self.step(|conn, cx| {
                    conn.input(cx, |ch, cx| ch.handle_block_done(cx, task, result));
                });
            }
            Action::Task(TaskAction::StartTask(name)) => {
                self.step(|conn, cx| conn.input(cx, |ch, cx| ch.handle_task_start(cx, name)));
            }
            Action::Task(TaskAction::AbortTask { task, watcher }) => {
                self.step(|conn, cx| conn.input(cx, |ch, cx| ch.handle_abort(cx, task, watcher)));
            }
            Action::Task(TaskAction::TaskGone(name)) => {
                self.step(|conn, cx| conn.input(cx, |ch, cx| ch.handle_task_gone(cx, name)));
            }
            Action::Task(TaskAction::UnitEvent { .. }) => {}
            other => panic!("{other:?} is the connection's own affair"),
        }
    }

    /// Completes a block operation like a disk.
    pub(super) fn finish_block(&mut self, at: usize) {
        let (task, op) = self.blocks.remove(at);
        let from = match op {
            BlockOp::Read { buffer_offset, .. } | BlockOp::Write { buffer_offset, .. } => {
                buffer_offset
            }
            _ => 0,
        };
        let buffer = self.conn.channel().executor().data_buffer(task).into_iter();
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
        self.step(|conn, cx| {
            conn.input(cx, |ch, cx| {
                ch.handle_block_done(cx, task, StepResult::Done);
            });
        });
    }

    /// Sends bytes as a single message. The target must always have a posted receive for it.
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> Vec<Got> {
        let rx = self.receives.pop_front().expect("a posted receive");
        let slot = self.conn.receive_slot(rx);
        assert!(bytes.len() <= slot.len(), "a message fits its receive");
        slot.write(0, bytes);
        self.with(|conn, cx| conn.handle_recv(cx, rx, bytes))
    }

    pub(super) fn send_with(
        &mut self,
        buffers: Buffers,
        pdu: &FromInitiator,
        data: &[u8],
    ) -> Vec<Got> {
        for buffer in [buffers.read, buffers.write].into_iter().flatten() {
            self.invalidated.remove(&buffer.stag.0);
        }
        let mut bytes = Vec::new();
        put_control(buffers, pdu.header(), &pdu.ahs(), data, &mut bytes);
        self.send_bytes(&bytes)
    }

    pub(super) fn send(&mut self, pdu: &FromInitiator, data: &[u8]) -> Vec<Got> {
        self.send_with(Buffers::default(), pdu, data)
    }

    pub(super) fn hello(&mut self, hello: Hello) -> Vec<Got> {
        self.send_bytes(&Header::Hello(hello).bytes())
    }

    /// Returns a command that uses its tag as the key of its buffer.
    pub(super) fn scsi(&mut self, tag: u32, cdb: &[u8], writes: bool, len: u32) -> ScsiCommand {
        let command = scsi_command(tag, self.cmd_sn, cdb, writes, len);
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        command
    }

    /// Sends a command with immediate data. `writes` is the direction of `len` bytes, if any.
    pub(super) fn command(
        &mut self,
        tag: u32,
        cdb: &[u8],
        writes: Option<bool>,
        len: u32,
        data: &[u8],
        is_final: bool,
    ) -> Vec<Got> {
        let mut command = self.scsi(tag, cdb, writes == Some(true), len);
        command.is_final = is_final;
        let buffer = self.memory.contains_key(&tag).then_some(RemoteBuffer {
            stag: Stag(tag),
            base: BASE,
        });
        let buffers = match writes {
            Some(true) => Buffers {
                write: buffer,
                read: None,
            },
            Some(false) => Buffers {
                write: None,
                read: buffer,
            },
            None => Buffers::default(),
        };
        self.send_with(buffers, &FromInitiator::ScsiCommand(command), data)
    }

    pub(super) fn read(&mut self, tag: u32, lba: u8, blocks: u16) -> Vec<Got> {
        let [high, low] = blocks.to_be_bytes();
        let len = u32::from(blocks) * 512;
        self.memory.insert(tag, vec![0xee; len as usize]);
        let cdb = [0x28, 0, 0, 0, 0, lba, 0, high, low, 0];
        self.command(tag, &cdb, Some(false), len, &[], true)
    }

    /// Sends a write of `data`. The first `immediate` bytes are sent with the command, and the
    /// bytes starting at `solicited` are advertised.
    pub(super) fn write(
        &mut self,
        tag: u32,
        data: &[u8],
        immediate: usize,
        solicited: usize,
    ) -> Vec<Got> {
        let [high, low] = ((data.len() / 512) as u16).to_be_bytes();
        if solicited < data.len() {
            self.memory.insert(tag, data[solicited..].to_vec());
        }
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, high, low, 0];
        let is_final = solicited <= immediate;
        let len = data.len() as u32;
        self.command(tag, &cdb, Some(true), len, &data[..immediate], is_final)
    }

    pub(super) fn data_out(
        &mut self,
        tag: u32,
        sn: u32,
        offset: u32,
        data: &[u8],
        is_final: bool,
    ) -> Vec<Got> {
        let pdu = data_out(tag, Ttt::NONE, sn, offset, is_final);
        self.send(&FromInitiator::DataOut(pdu), data)
    }

    pub(super) fn tmf(&mut self, tag: u32, function: TmfFunction, referenced: u32) -> Vec<Got> {
        let request = tmf_request(tag, self.cmd_sn, function, referenced);
        self.send(&FromInitiator::TmfRequest(request), &[])
    }

    pub(super) fn nop(&mut self, tag: u32, data: &[u8]) -> Vec<Got> {
        let nop = nop_out(tag, self.cmd_sn);
        self.send(&FromInitiator::NopOut(nop), data)
    }

    pub(super) fn logout(&mut self, tag: u32) -> Vec<Got> {
        let request = LogoutRequest {
            immediate: true,
            reason: LogoutReason::CloseSession,
            itt: Itt(tag),
            cid: Cid(0),
            cmd_sn: CmdSn(self.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        self.send(&FromInitiator::LogoutRequest(request), &[])
    }

    /// Advances the time.
    pub(super) fn wait(&mut self, time: Duration) -> Vec<Got> {
        self.now += time;
        self.with(IserChannel::handle_timeout)
    }

    /// Removes a posted receive from the queue.
    pub(super) fn take_receive(&mut self) -> RxIdx {
        self.receives.pop_front().expect("a posted receive")
    }

    /// Fails the oldest chain.
    pub(super) fn fail_chain(&mut self) -> Vec<Got> {
        let chain = self.chains.pop_front().expect("a chain is posted");
        self.with(|conn, cx| conn.handle_post_done(cx, chain.idx, false))
    }

    /// Returns the number of posted receives.
    pub(super) fn receives(&self) -> usize {
        self.receives.len()
    }

    /// Flushes a queue pair in the error state: chains, receives, and the drain marker.
    pub(super) fn flush(&mut self) {
        assert!(self.in_error);
        while self.finish_chain().is_some() || !self.chains.is_empty() {}
        while let Some(rx) = self.receives.pop_front() {
            self.step(|conn, cx| conn.handle_recv_flushed(cx, rx));
        }
        self.with(IserChannel::handle_drained);
    }

    /// Completes the termination of a connection with a queue pair in the error state, and checks
    /// that all resources are released.
    pub(super) fn check_gone(mut self) {
        assert!(self.in_error, "it disconnects");
        assert_eq!(self.conn.state(), ConnState::Terminating);
        assert!(!self.released, "not before everything is back");
        self.stalled = false;
        self.flush();
        while !self.blocks.is_empty() {
            self.finish_block(0);
        }
        self.run_actions();
        assert!(self.released);
        assert_eq!(self.conn.state(), ConnState::Down);
        assert_eq!(self.pool.free(), self.pool.size());
        assert_eq!(self.gate.unit.tasks(), 0);
        assert_eq!(self.conn.channel().executor().in_flight(), 0);
        assert_eq!(
            (self.conn.outstanding(), self.conn.posted_receives()),
            (0, 0)
        );
    }

    /// Called when the last message was sent. Checks that the initiator has time to disconnect, and
    /// that the connection is terminated if it does not.
    pub(super) fn check_parting(mut self) {
        assert!(!self.in_error && !self.released);
        let until = self.conn.deadline().expect("patience ends");
        assert!(until <= self.now + Duration::from_secs(1));
        self.wait(until - self.now);
        self.check_gone();
    }

    /// Disconnects the peer and checks that all resources are released.
    pub(super) fn close(mut self) {
        self.with(IserChannel::handle_disconnected);
        self.check_gone();
    }
}

/// Returns the single received PDU.
pub(super) fn only(got: &[Got]) -> (&FromTarget, &[u8], Option<u32>) {
    match got {
        [
            Got::Pdu {
                pdu,
                data,
                invalidated,
                ..
            },
        ] => (pdu, data, *invalidated),
        other => panic!("{other:?}"),
    }
}

/// Returns whether the single received PDU is a successful response to a command.
pub(super) fn is_good(got: &[Got], tag: u32) -> bool {
    matches!(only(got).0, FromTarget::ScsiResponse(r) if r.itt == Itt(tag) && r.status == 0)
}
