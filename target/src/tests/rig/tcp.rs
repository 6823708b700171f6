//! iSCSI connections over TCP.

use std::convert::Infallible;
use std::time::Instant;

use riser_scsi::config::{Config, Limits};
use riser_scsi::iscsi::frame::{self, Digests, Framer};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, LoginStatus, R2t, RejectReason, ScsiCommand, Snack, SnackKind,
    TmfStatus,
};
use riser_scsi::iscsi::{Itt, Numbers, Ttt};
use riser_scsi::nexus::NexusId;
use riser_test_peers::pdus::{data_out, scsi_command, snack};

use super::iscsi::{IscsiPeer, NAMES, login_request};
use super::script::{Command, Management, Response};
use super::{Peer, Rig, iscsi, script, windowed};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::task_mgmt::Function;
use crate::fabric::{TaskAction, TaskIdx, TaskRef};
use crate::iscsi::{
    Action, Batch, ChannelConfig, Cx, Phase, ReassignedTask, TaskState, TcpChannel,
};
use crate::pool::Buffer;
use crate::stats::SessionEvent;
use crate::worker::fabrics::{Input, Machine};

/// Command window.
pub(crate) const WINDOW: u16 = 8;

/// Longest data segment that the target receives.
const MAX_SEGMENT: usize = 65536;

/// PDU received by the initiator.
pub(crate) type Received = (FromTarget, Numbers, Vec<u8>);

pub(crate) struct TcpPeer {
    pub(crate) channel: TcpChannel,
    framer: Framer,
    pub(crate) digests: Digests,
    pub(crate) cmd_sn: u32,
    /// PDUs that the socket is sending.
    in_socket: Option<Vec<Received>>,
    /// R2Ts without a response, because the data is withheld.
    r2ts: Vec<R2t>,
    /// Bytes that were not read by the channel because its send queue is full.
    pub(crate) unread: Vec<u8>,
    pub(crate) disconnected: bool,
    pub(crate) released: bool,
    /// Actions for other connections of the session.
    pub(crate) elsewhere: Vec<Action>,
    /// Commands to be handed over to other connections.
    pub(crate) reassigned: Vec<(TaskRef, Option<Box<ReassignedTask>>)>,
}

impl TcpPeer {
    fn new(serial: u64, now: Instant) -> Self {
        let config = ChannelConfig {
            worker: 0,
            serial,
            commands: WINDOW,
            data_out_timeout: DATA_OUT_TIMEOUT,
        };
        Self {
            channel: TcpChannel::new(config, now),
            framer: Framer::new(1 << 20),
            digests: Digests::default(),
            cmd_sn: 1,
            in_socket: None,
            r2ts: Vec::new(),
            unread: Vec::new(),
            disconnected: false,
            released: false,
            elsewhere: Vec::new(),
            reassigned: Vec::new(),
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

    /// Returns the PDUs of the next batch, without completing it.
    fn poll_batch(&mut self) -> Option<Vec<Received>> {
        let mut batch = Batch::default();
        self.channel.poll_batch(&mut batch).then(|| {
            let bytes = batch.to_vec();
            assert_eq!(bytes.len(), batch.len);
            self.parse(&bytes)
        })
    }

    pub(crate) fn bytes_of(&self, pdu: &FromInitiator, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame::put_pdu(pdu.header(), &pdu.ahs(), data, self.digests, &mut bytes);
        bytes
    }

    pub(crate) fn login_bytes(&self, text: &[u8]) -> Vec<u8> {
        self.bytes_of(&login_request(self.cmd_sn), text)
    }
}

impl Peer for TcpPeer {
    type Action = Action;
    type Message = Received;
    type Chain = Infallible;
    type Outgoing = Infallible;

    const BASE: u64 = 0;
    const NEXUS: u64 = 7;
    const SIBLING: u64 = 8;
    const FUNCTIONS: &[Function] = iscsi::FUNCTIONS;
    const TIMEOUT_EVENTS: &[SessionEvent] = &[SessionEvent::TimedOut];
    const CANCELS: bool = true;

    fn rig(config: &Config) -> Rig<Self> {
        let mut rig = Rig::of_units(config);
        rig.prompt = true;
        rig.gate.commands = WINDOW;
        rig.gate.offer = Offer::default()
            .with(Key::MaxRecvDataSegmentLength, MAX_SEGMENT as u32)
            .with(Key::InitialR2T, 0)
            .with(Key::MaxConnections, 4)
            .with(Key::ErrorRecoveryLevel, 2)
            .with(Key::MaxOutstandingR2T, 2)
            .with_list(Key::HeaderDigest, 3)
            .with_list(Key::DataDigest, 3);
        rig
    }

    fn connect(rig: &mut Rig<Self>, nexus: u64) -> usize {
        let peer = rig.peers.len();
        rig.gate.nexus = NexusId(nexus);
        rig.gate.window = None;
        rig.peers.push(TcpPeer::new(peer as u64 + 1, rig.now));
        rig.log_in_at(peer, "");
        peer
    }

    fn send_command(rig: &mut Rig<Self>, peer: usize, command: &Command) {
        let cmd_sn = rig.peers[peer].cmd_sn;
        rig.peers[peer].cmd_sn += 1;
        let pdu = FromInitiator::ScsiCommand(command.pdu(cmd_sn));
        Self::send_pdu(rig, peer, &pdu, command.immediate_data());
    }

    fn send_function(rig: &mut Rig<Self>, peer: usize, management: Management) {
        iscsi::send_function(rig, peer, management);
    }

    fn response((pdu, _, data): &Received) -> Option<Response> {
        script::response_of(pdu, data)
    }

    fn task_state(&self, tag: u32) -> Option<TaskState> {
        self.channel.channel().executor().task_state(Itt(tag))
    }

    fn deadline(&self) -> Option<Instant> {
        self.channel.channel().deadline()
    }

    fn keep_alive(rig: &mut Rig<Self>, peer: usize) {
        iscsi::keep_alive(rig, peer);
    }

    fn input(rig: &mut Rig<Self>, peer: usize, input: Input) {
        rig.step(peer, |ch, cx| input.apply(Machine::Tcp(ch, cx)));
    }

    fn serial(&self) -> u64 {
        self.channel.channel().config().serial
    }

    fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        self.channel.channel().executor().data_buffer(task)
    }

    fn poll_action(&mut self) -> Option<Result<TaskAction, Action>> {
        Some(match self.channel.channel_mut().poll_action()? {
            Action::Task(action) => Ok(action),
            action => Err(action),
        })
    }

    fn carry_out(rig: &mut Rig<Self>, peer: usize, action: Action) {
        let conn = &mut rig.peers[peer];
        match action {
            Action::DeliverTask => {
                let moved = conn.channel.channel_mut().take_reassigned();
                conn.reassigned.push(moved);
            }
            Action::Disconnect => {
                conn.disconnected = true;
                Self::input(rig, peer, Input::Disconnected);
            }
            Action::Release => conn.released = true,
            action => conn.elsewhere.push(action),
        }
    }

    fn forward(&mut self, action: TaskAction) {
        self.elsewhere.push(Action::Task(action));
    }

    fn transmit(rig: &mut Rig<Self>, ok: bool) -> bool {
        for peer in 0..rig.peers.len() {
            let conn = &mut rig.peers[peer];
            let pdus = conn.in_socket.take().or_else(|| conn.poll_batch());
            if let Some(pdus) = pdus {
                rig.step(peer, |ch, cx| ch.handle_sent(cx, ok));
                for pdu in pdus.into_iter().filter(|_| ok) {
                    rig.exchange_data(peer, &pdu);
                    rig.received.push((peer, pdu));
                }
                return true;
            }
        }
        false
    }

    fn hold(rig: &mut Rig<Self>) -> bool {
        rig.in_socket = rig.poll_batch();
        rig.in_socket.is_some()
    }

    fn drop_messages(rig: &mut Rig<Self>) {
        if rig.in_socket.is_some() {
            Self::transmit(rig, false);
            rig.pump();
        }
    }

    fn provide_data(rig: &mut Rig<Self>) {
        for peer in 0..rig.peers.len() {
            for r2t in std::mem::take(&mut rig.peers[peer].r2ts) {
                rig.send_solicited(peer, r2t);
            }
        }
    }

    fn in_error(&self) -> bool {
        self.disconnected || self.channel.channel().phase() == Phase::Closed
    }

    fn complete_chain(
        _: &mut Rig<Self>,
        _: usize,
        chain: Infallible,
        _: Option<Infallible>,
        _: bool,
    ) {
        match chain {}
    }

    fn check_released(&self) {
        assert!(self.released);
        assert_eq!(self.channel.channel().executor().in_flight(), 0);
    }
}

impl IscsiPeer for TcpPeer {
    fn cmd_sn(&self) -> u32 {
        self.cmd_sn
    }

    fn send_pdu(rig: &mut Rig<Self>, peer: usize, pdu: &FromInitiator, data: &[u8]) {
        let bytes = rig.peers[peer].bytes_of(pdu, data);
        rig.deliver(peer, &bytes);
    }
}

impl Rig<TcpPeer> {
    /// Creates a connection.
    pub(crate) fn new() -> Self {
        Self::numbered(1)
    }

    /// Same as [`Rig::new`], but with a connection number.
    pub(crate) fn numbered(serial: u64) -> Self {
        Self::of(serial, &windowed(Limits::default().window))
    }

    /// Same as [`Rig::new`], but with units of this configuration.
    pub(crate) fn of(serial: u64, config: &Config) -> Self {
        let mut rig = TcpPeer::rig(config);
        rig.peers.push(TcpPeer::new(serial, rig.now));
        rig
    }

    /// Creates a connection in full-feature phase and clears its unit attention.
    pub(crate) fn logged_in(keys: &str) -> Self {
        Self::with_window(Limits::default().window, keys)
    }

    /// Same as [`Rig::logged_in`], but with a window for the unit.
    pub(crate) fn with_window(window: u32, keys: &str) -> Self {
        let mut rig = Self::of(1, &windowed(window));
        rig.log_in(keys);
        rig.command(100, &[0; 6], false, 0, &[], true);
        rig
    }

    /// Adds a connection to the session of `other`.
    pub(crate) fn joined(other: &Self, serial: u64, keys: &str) -> Self {
        let mut rig = Self::numbered(serial);
        rig.now = other.now;
        rig.disks.clone_from(&other.disks);
        rig.units.clone_from(&other.units);
        rig.gate.mappings.clone_from(&other.gate.mappings);
        rig.gate.window.clone_from(&other.gate.window);
        rig.log_in(keys);
        rig.cmd_sn = other.cmd_sn;
        rig
    }

    pub(crate) fn log_in(&mut self, keys: &str) {
        self.log_in_at(0, keys);
    }

    fn log_in_at(&mut self, peer: usize, keys: &str) {
        let text = format!("{NAMES}InitialR2T=No\0{keys}");
        let bytes = self.peers[peer].login_bytes(text.as_bytes());
        self.deliver(peer, &bytes);
        assert!(matches!(
            self.take_received()[..],
            [(FromTarget::LoginResponse(r), ..)] if r.status == LoginStatus::SUCCESS
        ));
        let digest = |key: &str| keys.contains(&format!("{key}=CRC32C"));
        let digests = Digests {
            header: digest("HeaderDigest"),
            data: digest("DataDigest"),
        };
        let peer = &mut self.peers[peer];
        peer.digests = digests;
        peer.framer.set(1 << 20, digests);
    }

    pub(crate) fn login(&mut self, text: &str) -> Vec<Received> {
        let bytes = self.login_bytes(text.as_bytes());
        self.bytes(&bytes)
    }

    /// Passes an input to a channel, without executing its actions.
    fn step<R>(&mut self, peer: usize, input: impl FnOnce(&mut TcpChannel, &mut Cx<'_>) -> R) -> R {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spares.iscsi,
            gate: &mut self.gate,
        };
        input(&mut self.peers[peer].channel, &mut cx)
    }

    /// Passes an input to the channel. Returns the PDUs received by the initiator.
    pub(crate) fn with<R>(
        &mut self,
        input: impl FnOnce(&mut TcpChannel, &mut Cx<'_>) -> R,
    ) -> Vec<Received> {
        self.step(0, input);
        self.run_actions()
    }

    /// Same as [`Rig::with`] for received bytes, repeated until the channel stops reading.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Vec<Received> {
        self.deliver(0, bytes);
        self.take_received()
    }

    fn deliver(&mut self, peer: usize, bytes: &[u8]) {
        self.peers[peer].unread.extend_from_slice(bytes);
        loop {
            let unread = std::mem::take(&mut self.peers[peer].unread);
            let taken = self.step(peer, |ch, cx| ch.handle_bytes(cx, &unread));
            self.peers[peer].unread = unread[taken..].to_vec();
            self.pump();
            let peer = &self.peers[peer];
            let is_stuck = taken == 0 && !peer.channel.channel().wants_input();
            if peer.unread.is_empty() || is_stuck {
                return;
            }
        }
    }

    /// Moves data between a PDU and the memory of its command, if there is any.
    fn exchange_data(&mut self, peer: usize, (pdu, _, bytes): &Received) {
        match pdu {
            FromTarget::DataIn(pdu) => {
                if let Some(memory) = self.memory.get_mut(&pdu.itt.0) {
                    memory[pdu.offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
            }
            FromTarget::R2t(r2t) if self.withholds_data => self.peers[peer].r2ts.push(*r2t),
            FromTarget::R2t(r2t) => self.send_solicited(peer, *r2t),
            _ => {}
        }
    }

    /// Sends the requested part of a command's memory, if there is any.
    fn send_solicited(&mut self, peer: usize, r2t: R2t) {
        let Some(memory) = self.memory.get(&r2t.itt.0) else {
            return;
        };
        let data = memory[r2t.offset as usize..][..r2t.len as usize].to_vec();
        for (sn, part) in data.chunks(MAX_SEGMENT).enumerate() {
            let at = sn * MAX_SEGMENT;
            let is_final = at + part.len() == data.len();
            let offset = r2t.offset + at as u32;
            let pdu = data_out(r2t.itt.0, r2t.ttt, sn as u32, offset, is_final);
            TcpPeer::send_pdu(self, peer, &FromInitiator::DataOut(pdu), part);
        }
    }

    /// Returns the PDUs sent by the channel, without completing the send.
    pub(crate) fn poll_sent(&mut self) -> Vec<Received> {
        self.poll_batch().expect("a batch")
    }

    /// Sends a command with immediate data.
    pub(crate) fn command(
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

    pub(crate) fn read(&mut self, tag: u32, lba: u8, blocks: u8) -> Vec<Received> {
        let cdb = [0x28, 0, 0, 0, 0, lba, 0, 0, blocks, 0];
        self.command(tag, &cdb, false, u32::from(blocks) * 512, &[], true)
    }

    pub(crate) fn write(
        &mut self,
        tag: u32,
        blocks: u8,
        data: &[u8],
        is_final: bool,
    ) -> Vec<Received> {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, blocks, 0];
        self.command(tag, &cdb, true, u32::from(blocks) * 512, data, is_final)
    }

    pub(crate) fn data_out(
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
}

/// Returns status and sense key of the response.
pub(crate) fn status(received: &[Received]) -> (u8, Option<u8>) {
    received
        .iter()
        .find_map(|(pdu, _, data)| match pdu {
            FromTarget::ScsiResponse(response) => {
                Some((response.status, data.get(4).map(|key| key & 15)))
            }
            FromTarget::DataIn(data_in) => data_in.status.map(|s| (s.status, None)),
            _ => None,
        })
        .unwrap_or_else(|| panic!("no status in {received:?}"))
}

/// Returns the sense key, additional sense code and qualifier.
pub(crate) fn sense(received: &[Received]) -> (u8, u8, u8) {
    let found = received.iter().find_map(|(pdu, _, data)| match pdu {
        FromTarget::ScsiResponse(_) => data.get(2..),
        _ => None,
    });
    let sense = found.unwrap_or_else(|| panic!("no response in {received:?}"));
    (sense[2] & 15, sense[12], sense[13])
}

pub(crate) fn rejected(received: &[Received]) -> RejectReason {
    match received {
        [(FromTarget::Reject(reject), ..)] => reject.reason,
        other => panic!("a reject, not {other:?}"),
    }
}

pub(crate) fn tmf_status(received: &[Received]) -> TmfStatus {
    let found = received.iter().find_map(|(pdu, ..)| match pdu {
        FromTarget::TmfResponse(response) => Some(response.status),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no response in {received:?}"))
}

/// Returns an R-Data SNACK for all data of a command starting at `begin`.
pub(crate) fn rdata(tag: u32, ttt: u32, begin: u32) -> FromInitiator {
    FromInitiator::Snack(Snack {
        ttt: Ttt(ttt),
        ..snack(SnackKind::RData, tag, begin, 0)
    })
}

/// Returns a SNACK for data or an R2T.
pub(crate) fn resend_data(tag: u32, begin: u32, run: u32) -> FromInitiator {
    FromInitiator::Snack(snack(SnackKind::DataOrR2t, tag, begin, run))
}

pub(crate) fn resend_status(begin: u32, run: u32) -> FromInitiator {
    FromInitiator::Snack(snack(SnackKind::Status, Itt::NONE.0, begin, run))
}

/// Acknowledges the data before `begin`.
pub(crate) fn data_ack(ttt: Ttt, begin: u32) -> FromInitiator {
    FromInitiator::Snack(Snack {
        ttt,
        ..snack(SnackKind::DataAck, Itt::NONE.0, begin, 0)
    })
}

/// Returns the DataSN of each Data-In PDU, and the StatSN of the last PDU if it contains the
/// status.
pub(crate) fn data_in(received: &[Received]) -> (Vec<u32>, Option<u32>) {
    let mut status = None;
    let sns = received.iter().map(|(pdu, numbers, data)| match pdu {
        FromTarget::DataIn(pdu) => {
            assert_eq!(data.len(), 512);
            assert!(data.iter().all(|byte| *byte == pdu.data_sn as u8 + 1));
            if pdu.status.is_some() {
                status = Some(numbers.stat_sn.0);
            }
            pdu.data_sn
        }
        other => panic!("{other:?}"),
    });
    (sns.collect(), status)
}

pub(crate) fn r2t(received: &[Received]) -> R2t {
    let found = received.iter().find_map(|(pdu, ..)| match pdu {
        FromTarget::R2t(r2t) => Some(*r2t),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no R2T in {received:?}"))
}
