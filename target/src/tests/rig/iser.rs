//! iSER connections.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_scsi::config::Config;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, LoginStatus, ScsiCommand};
use riser_scsi::iscsi::{Itt, Numbers, Ttt};
use riser_scsi::iser::{
    Buffers, Header, Hello, HelloReply, Message, RemoteBuffer, Stag, put_control,
};
use riser_scsi::nexus::NexusId;
use riser_test_peers::pdus::{data_out, scsi_command};

use super::iscsi::{IscsiPeer, NAMES, login_request};
use super::script::{Command, Management, Response};
use super::{Peer, Rig, Work, iscsi, script, windowed};
use crate::fabric::task_mgmt::Function;
use crate::fabric::{Direction, TaskAction, TaskIdx};
use crate::iscsi::{Action, Cx, TaskState};
use crate::iser::{
    ChainIdx, ConnState, IserAction, IserChannel, IserConfig, IserParams, Post, RxIdx,
};
use crate::pool::Buffer;
use crate::stats::SessionEvent;
use crate::worker::fabrics::{Input, Machine};

/// Command window.
pub(crate) const WINDOW: u16 = 4;

/// Message received by the initiator.
#[derive(Debug)]
pub(crate) enum Got {
    Pdu {
        pdu: FromTarget,
        numbers: Numbers,
        data: Vec<u8>,
        invalidated: Option<u32>,
    },
    Hello(HelloReply),
}

pub(crate) struct IserPeer {
    pub(crate) conn: IserChannel,
    receives: VecDeque<RxIdx>,
    /// Keys that were invalidated and not advertised again.
    invalidated: HashSet<u32>,
    /// Maximum number of work requests posted at the same time.
    pub(crate) most_posted: usize,
    pub(crate) in_error: bool,
    pub(crate) released: bool,
    pub(crate) notified: bool,
    pub(crate) cmd_sn: u32,
}

pub(crate) fn offer() -> Offer {
    Offer::default()
        .with(Key::RdmaExtensions, 1)
        .with(Key::InitialR2T, 0)
        .with(Key::TargetRecvDataSegmentLength, 8192)
        .with(Key::InitiatorRecvDataSegmentLength, 65536)
        .with(Key::FirstBurstLength, 16384)
        .with(Key::MaxBurstLength, 1 << 20)
}

pub(crate) fn params() -> IserParams {
    IserParams {
        first_burst: 16384,
        send_queue: 33,
        max_sge: 2,
        remote_invalidate: true,
        ..IserParams::new(WINDOW)
    }
}

impl IserPeer {
    fn new(params: IserParams, serial: u64, now: Instant) -> Self {
        let memory = params.memory();
        let config = IserConfig {
            params,
            worker: 0,
            serial,
            receive_ring: Memory::new(memory.receive_ring).unwrap().whole(),
            send_ring: Memory::new(memory.send_ring).unwrap().whole(),
        };
        Self {
            conn: IserChannel::new(config, now),
            receives: VecDeque::new(),
            invalidated: HashSet::new(),
            most_posted: 0,
            in_error: false,
            released: false,
            notified: false,
            cmd_sn: 1,
        }
    }

    /// Removes a posted receive from the queue.
    pub(crate) fn take_receive(&mut self) -> RxIdx {
        self.receives.pop_front().expect("a posted receive")
    }

    /// Returns the number of posted receives.
    pub(crate) fn receives(&self) -> usize {
        self.receives.len()
    }

    /// Returns the size of a receive in bytes.
    pub(crate) fn receive_len(&self) -> usize {
        self.conn.receive_slot(RxIdx(0)).len()
    }

    /// Makes an invalidated key valid again.
    pub(crate) fn advertise(&mut self, key: u32) {
        self.invalidated.remove(&key);
    }

    /// Returns a command that uses its tag as the key of its buffer.
    pub(crate) fn scsi(&mut self, tag: u32, cdb: &[u8], writes: bool, len: u32) -> ScsiCommand {
        let command = scsi_command(tag, self.cmd_sn, cdb, writes, len);
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        command
    }
}

impl Peer for IserPeer {
    type Action = IserAction;
    type Message = Got;
    type Chain = ChainIdx;
    /// Message, and the key that it invalidates.
    type Outgoing = (Vec<u8>, Option<u32>);

    const BASE: u64 = 0xff2e_c96a_1f4e_d000;
    const NEXUS: u64 = 7;
    const SIBLING: u64 = 8;
    const FUNCTIONS: &[Function] = iscsi::FUNCTIONS;
    const TIMEOUT_EVENTS: &[SessionEvent] = &[SessionEvent::TimedOut];
    const CANCELS: bool = true;

    fn rig(config: &Config) -> Rig<Self> {
        let mut rig = Rig::of_units(config);
        rig.prompt = true;
        rig.gate.offer = offer();
        rig.gate.commands = WINDOW;
        rig
    }

    fn connect(rig: &mut Rig<Self>, nexus: u64) -> usize {
        let peer = rig.accept(params());
        rig.gate.nexus = NexusId(nexus);
        rig.gate.window = None;
        rig.step(peer, IserChannel::handle_established);
        rig.log_in_at(peer, "InitialR2T=No\0");
        assert_eq!(rig.peers[peer].conn.state(), ConnState::FullFeature);
        peer
    }

    fn send_command(rig: &mut Rig<Self>, peer: usize, command: &Command) {
        let conn = &mut rig.peers[peer];
        let pdu = FromInitiator::ScsiCommand(command.pdu(conn.cmd_sn));
        conn.cmd_sn += 1;
        let has_buffer = command.len() > 0 && !command.is_immediate;
        let buffer = has_buffer.then(|| remote_buffer(command.tag));
        let buffers = Buffers {
            write: buffer.filter(|_| command.writes),
            read: buffer.filter(|_| !command.writes),
        };
        rig.deliver(peer, buffers, &pdu, command.immediate_data());
    }

    fn send_function(rig: &mut Rig<Self>, peer: usize, management: Management) {
        iscsi::send_function(rig, peer, management);
    }

    fn response(message: &Got) -> Option<Response> {
        match message {
            Got::Pdu { pdu, data, .. } => script::response_of(pdu, data),
            Got::Hello(_) => None,
        }
    }

    fn task_state(&self, tag: u32) -> Option<TaskState> {
        self.conn.channel().executor().task_state(Itt(tag))
    }

    fn deadline(&self) -> Option<Instant> {
        self.conn.deadline()
    }

    fn keep_alive(rig: &mut Rig<Self>, peer: usize) {
        iscsi::keep_alive(rig, peer);
    }

    fn input(rig: &mut Rig<Self>, peer: usize, input: Input) {
        rig.step(peer, |conn, cx| input.apply(Machine::Iser(conn, cx)));
    }

    fn serial(&self) -> u64 {
        self.conn.channel().config().serial
    }

    fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        self.conn.channel().executor().data_buffer(task)
    }

    fn poll_action(&mut self) -> Option<Result<TaskAction, IserAction>> {
        Some(match self.conn.poll_action()? {
            IserAction::Channel(Action::Task(action)) => Ok(action),
            action => Err(action),
        })
    }

    fn carry_out(rig: &mut Rig<Self>, peer: usize, action: IserAction) {
        let conn = &mut rig.peers[peer];
        match action {
            IserAction::PostRecv(rx) => conn.receives.push_back(rx),
            IserAction::NotifyEstablished => conn.notified = true,
            IserAction::Disconnect => {
                assert!(!conn.in_error, "once");
                conn.in_error = true;
                rig.work.push(Work::Drain { peer });
            }
            IserAction::Release => {
                let channel = conn.conn.channel();
                assert_eq!(
                    (channel.executor().in_flight(), conn.conn.outstanding()),
                    (0, 0)
                );
                conn.released = true;
            }
            // The session has no other connections.
            IserAction::Channel(Action::EndOthers) => {}
            IserAction::Channel(action) => panic!("{action:?} is the connection's own affair"),
        }
    }

    fn poll_work(rig: &mut Rig<Self>) -> bool {
        let mut post = Post::default();
        for peer in 0..rig.peers.len() {
            if rig.peers[peer].conn.poll_post(rig.now, &mut post) {
                rig.take_post(peer, &post);
                return true;
            }
        }
        false
    }

    fn transmit(rig: &mut Rig<Self>, ok: bool) -> bool {
        rig.execute_chain(ok)
    }

    fn is_valid(&self, key: u32) -> bool {
        !self.invalidated.contains(&key)
    }

    fn in_error(&self) -> bool {
        self.in_error
    }

    fn complete_chain(
        rig: &mut Rig<Self>,
        peer: usize,
        chain: ChainIdx,
        message: Option<Self::Outgoing>,
        ok: bool,
    ) {
        if let Some((bytes, invalidated)) = message.filter(|_| ok) {
            rig.receive(peer, &bytes, invalidated);
        }
        rig.step(peer, |conn, cx| conn.handle_post_done(cx, chain, ok));
    }

    fn flush_receives(rig: &mut Rig<Self>, peer: usize) {
        for rx in std::mem::take(&mut rig.peers[peer].receives) {
            rig.step(peer, |conn, cx| conn.handle_recv_flushed(cx, rx));
        }
    }

    fn check_released(&self) {
        assert!(self.in_error && self.released);
        assert_eq!(self.conn.state(), ConnState::Down);
        assert_eq!(self.conn.posted_receives(), 0);
    }
}

impl IscsiPeer for IserPeer {
    fn cmd_sn(&self) -> u32 {
        self.cmd_sn
    }

    fn send_pdu(rig: &mut Rig<Self>, peer: usize, pdu: &FromInitiator, data: &[u8]) {
        rig.deliver(peer, Buffers::default(), pdu, data);
    }
}

impl Rig<IserPeer> {
    /// Returns an accepted connection that is not established yet.
    pub(crate) fn accepted(params: IserParams) -> Self {
        Self::of(params, 1 << 20)
    }

    fn of(params: IserParams, window: u32) -> Self {
        let mut rig = IserPeer::rig(&windowed(window));
        rig.accept(params);
        rig
    }

    fn accept(&mut self, params: IserParams) -> usize {
        let peer = self.peers.len();
        let conn = IserPeer::new(params, peer as u64 + 1, self.now);
        self.peers.push(conn);
        assert!(self.run_actions().is_empty());
        peer
    }

    /// Returns an established connection before its first message.
    pub(crate) fn up() -> Self {
        Self::up_with(params(), 1 << 20)
    }

    pub(crate) fn up_with(params: IserParams, window: u32) -> Self {
        let mut rig = Self::of(params, window);
        rig.with(IserChannel::handle_established);
        rig
    }

    /// Returns a connection in the full-feature phase, with a cleared unit attention.
    pub(crate) fn logged_in(keys: &str) -> Self {
        Self::with_window(1 << 20, keys)
    }

    /// Same as [`Rig::logged_in`], with units of this window.
    pub(crate) fn with_window(window: u32, keys: &str) -> Self {
        let mut rig = Self::in_full_feature(window, keys);
        if !keys.contains("iSERHelloRequired=Yes") {
            rig.clear_attention();
        }
        rig
    }

    /// Same as [`Rig::logged_in`], with these limits.
    pub(crate) fn with_params(params: IserParams) -> Self {
        let mut rig = Self::up_with(params, 1 << 20);
        rig.login("InitialR2T=No\0");
        rig.clear_attention();
        rig
    }

    /// Returns a connection that has logged in and has not sent any requests yet.
    pub(crate) fn in_full_feature(window: u32, keys: &str) -> Self {
        let mut rig = Self::up_with(params(), window);
        let got = rig.login(&format!("InitialR2T=No\0{keys}"));
        assert!(matches!(
            &got[..],
            [Got::Pdu { pdu: FromTarget::LoginResponse(r), .. }] if r.status == LoginStatus::SUCCESS
        ));
        assert_eq!(rig.conn.state(), ConnState::FullFeature);
        rig
    }

    fn clear_attention(&mut self) {
        self.command(100, &[0; 6], None, 0, &[], true);
    }

    pub(crate) fn login(&mut self, keys: &str) -> Vec<Got> {
        self.log_in_at(0, keys);
        self.take_received()
    }

    fn log_in_at(&mut self, peer: usize, keys: &str) {
        let text = format!(
            "{NAMES}RDMAExtensions=Yes\0InitiatorRecvDataSegmentLength=262144\0\
             TargetRecvDataSegmentLength=8192\0{keys}"
        );
        let request = login_request(self.peers[peer].cmd_sn);
        IserPeer::send_pdu(self, peer, &request, text.as_bytes());
    }

    /// Passes an input to a connection, without executing its actions.
    fn step(&mut self, peer: usize, input: impl FnOnce(&mut IserChannel, &mut Cx<'_>)) {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spares.iscsi,
            gate: &mut self.gate,
        };
        input(&mut self.peers[peer].conn, &mut cx);
    }

    /// Passes an input to the connection. Returns the messages received by the initiator.
    pub(crate) fn with(&mut self, input: impl FnOnce(&mut IserChannel, &mut Cx<'_>)) -> Vec<Got> {
        self.step(0, input);
        self.run_actions()
    }

    fn take_post(&mut self, peer: usize, post: &Post) {
        let requests = post.requests.clone();
        let send = post.send.as_ref();
        let message = send.map(|send| (send.bytes.to_vec(), send.invalidate.map(|stag| stag.0)));
        assert!(!requests.is_empty() || message.is_some(), "an empty chain");
        self.work.push(Work::Chain {
            peer,
            chain: post.chain,
            requests,
            message,
        });
        let posted = self.work.iter().map(|work| match work {
            Work::Chain {
                peer: of,
                requests,
                message,
                ..
            } if *of == peer => requests.len() + usize::from(message.is_some()),
            _ => 0,
        });
        let posted = posted.sum();
        let peer = &mut self.peers[peer];
        let params = peer.conn.params();
        assert!(
            post.requests
                .iter()
                .all(|r| r.local.len() <= params.max_sge)
        );
        assert!(posted <= params.credits() as usize);
        peer.most_posted = peer.most_posted.max(posted);
    }

    fn receive(&mut self, peer: usize, bytes: &[u8], invalidated: Option<u32>) {
        if let Some(key) = invalidated {
            let is_new = self.peers[peer].invalidated.insert(key);
            let is_valid = is_new && self.memory.contains_key(&key);
            assert!(is_valid || !self.checks_keys, "an invalid key");
        }
        let got = match Message::parse(bytes).unwrap() {
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
        };
        self.received.push((peer, got));
    }

    /// Sends bytes as a single message. The target must always have a posted receive for it.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) -> Vec<Got> {
        self.deliver_bytes(0, bytes);
        self.take_received()
    }

    fn deliver_bytes(&mut self, peer: usize, bytes: &[u8]) {
        let rx = self.peers[peer].take_receive();
        let slot = self.peers[peer].conn.receive_slot(rx);
        assert!(bytes.len() <= slot.len(), "a message fits its receive");
        slot.write(0, bytes);
        self.step(peer, |conn, cx| conn.handle_recv(cx, rx, bytes));
        self.pump();
    }

    fn deliver(&mut self, peer: usize, buffers: Buffers, pdu: &FromInitiator, data: &[u8]) {
        for buffer in [buffers.read, buffers.write].into_iter().flatten() {
            self.peers[peer].invalidated.remove(&buffer.stag.0);
        }
        let mut bytes = Vec::new();
        put_control(buffers, pdu.header(), &pdu.ahs(), data, &mut bytes);
        self.deliver_bytes(peer, &bytes);
    }

    pub(crate) fn send_with(
        &mut self,
        buffers: Buffers,
        pdu: &FromInitiator,
        data: &[u8],
    ) -> Vec<Got> {
        self.deliver(0, buffers, pdu, data);
        self.take_received()
    }

    pub(crate) fn hello(&mut self, hello: Hello) -> Vec<Got> {
        self.send_bytes(&Header::Hello(hello).bytes())
    }

    /// Sends a command with immediate data. `writes` is the direction of `len` bytes, if any.
    pub(crate) fn command(
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
        let buffer = self.memory.contains_key(&tag).then(|| remote_buffer(tag));
        let buffers = Buffers {
            write: buffer.filter(|_| writes == Some(true)),
            read: buffer.filter(|_| writes == Some(false)),
        };
        self.send_with(buffers, &FromInitiator::ScsiCommand(command), data)
    }

    pub(crate) fn read(&mut self, tag: u32, lba: u8, blocks: u16) -> Vec<Got> {
        let [high, low] = blocks.to_be_bytes();
        let len = u32::from(blocks) * 512;
        self.memory.insert(tag, vec![0xee; len as usize]);
        let cdb = [0x28, 0, 0, 0, 0, lba, 0, high, low, 0];
        self.command(tag, &cdb, Some(false), len, &[], true)
    }

    /// Sends a write of `data`. The first `immediate` bytes are sent with the command, and the
    /// bytes starting at `solicited` are advertised.
    pub(crate) fn write(
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

    pub(crate) fn data_out(
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

    /// Fails the oldest chain.
    pub(crate) fn fail_chain(&mut self) {
        assert!(self.finish_chain(false), "a chain is posted");
        self.pump();
    }

    /// Returns whether the initiator's data is being read.
    pub(crate) fn is_fetching(&self) -> bool {
        let mut requests = self.work.iter().flat_map(|work| match work {
            Work::Chain { requests, .. } => &requests[..],
            _ => &[],
        });
        requests.any(|request| request.direction == Direction::FromInitiator)
    }

    /// Called when the last message was sent. Checks that the initiator has time to disconnect, and
    /// that the connection is terminated if it does not.
    pub(crate) fn check_parting(&mut self) {
        assert!(!self.in_error && !self.released);
        let until = self.conn.deadline().expect("patience ends");
        assert!(until <= self.now + Duration::from_secs(1));
        self.wait(until - self.now);
        self.check_gone();
    }
}

/// Returns the buffer of a command with this tag.
pub(crate) fn remote_buffer(tag: u32) -> RemoteBuffer {
    RemoteBuffer {
        stag: Stag(tag),
        base: IserPeer::BASE,
    }
}

/// Returns the single received PDU.
pub(crate) fn only(got: &[Got]) -> (&FromTarget, &[u8], Option<u32>) {
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
pub(crate) fn is_good(got: &[Got], tag: u32) -> bool {
    matches!(only(got).0, FromTarget::ScsiResponse(r) if r.itt == Itt(tag) && r.status == 0)
}
