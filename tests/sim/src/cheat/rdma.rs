//! Cheating over RDMA: messages in any order, memory that is registered and invalidated, foreign
//! keys, and acknowledgements for packets that were not sent.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_memory::{MemSlice, Memory};
use riser_scsi::srp::{
    Cmd, DataBuffer, InitiatorPortId, MemDesc, MultiChannelAction, Tag, TargetPortId, TaskAttr,
};
use riser_test_peers::mini::login_req;
use riser_tests::mutator::Mutator;
use riser_transport::loopback::{Endpoint, Fabric};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, PdId, PortSpace, Provider as _,
    QpCap, QpId, QpInitAttr, QpType, RKey, RdmaCm as _, RecvWr, RemoteAddr, SendOp, SendWr, Sge,
    Verbs as _, WrId,
};
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, ExtHeaders, IcrcFlow, Msn, Opcode, Psn, ROCE_PORT, emit_headers,
};

use super::sniffer::Host;
use super::{
    Act, Aim, CheatPlan, HostileCommand, Names, Pace, SILENCES, SRP_PORT, Sniffer, Surroundings,
    address, set_number, sniffer,
};
use crate::plan::Protocol;
use crate::target;

static SRP: LazyLock<Mutator> = LazyLock::new(|| Mutator::of("from_initiator", 0, 0));
static ISER: LazyLock<Mutator> = LazyLock::new(|| Mutator::of("message", 0, 0));

/// Length of the header before a PDU.
const ISER_HEADER: usize = 28;

/// Maximum message length.
const SLOT: usize = 16 << 10;
const SLOTS: usize = 8;
const RECEIVES: usize = 16;

/// Amount of memory that it registers.
const DATA: usize = 256 << 10;

/// Timeout for a login, and the delay before the next one.
const LOGIN: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);

/// Syndromes: ACK, RNR NAK, and NAKs for sequence error, invalid request, remote access error and
/// remote operational error.
const SYNDROMES: [u8; 8] = [0x00, 0x1f, 0x20, 0x2e, 0x60, 0x61, 0x62, 0x63];

/// SRP port of the tested target.
const HONEST_SRP: u16 = 5555;

/// A connection of the peer.
#[derive(Debug)]
struct Connection {
    cm: CmId,
    qp: QpId,
    cq: CqId,
    is_up: bool,
    /// Timeout of the login.
    until: Instant,
}

/// A cheating SRP or iSER peer.
#[derive(Debug)]
pub struct RdmaCheat {
    index: usize,
    pace: Pace,
    mutator: Mutator,
    fabric: Fabric,
    sniffer: Sniffer,
    /// SRP ports of the target for cheating peers, and of the tested target.
    port: TargetPortId,
    honest: TargetPortId,
    /// The initiator that it impersonates.
    victim: Option<u8>,
    device: Endpoint,
    pd: PdId,
    memory: MemSlice,
    mr: Mr,
    data: MemSlice,
    /// Registered memory, while it's valid.
    data_mr: Option<Mr>,
    /// Its last key.
    key: RKey,
    connection: Option<Connection>,
    sent: usize,
    /// CmdSN and tag of the next command.
    number: u32,
    /// The device is inactive until this time.
    silent_until: Instant,
    dials_at: Instant,
}

impl RdmaCheat {
    pub(super) fn new(index: usize, plan: CheatPlan, world: &Surroundings, mut rng: Rng) -> Self {
        let now = world.fabric.now();
        let mut device = world.fabric.endpoint(address(index));
        let pd = device.alloc_pd().expect("a new device");
        let region = |len| Memory::new(len).expect("memory").whole();
        let (memory, data) = (region(SLOT * (SLOTS + RECEIVES)), region(DATA));
        let remote = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = device.reg_mr(pd, &memory, remote).expect("a new device");
        let mutator = match plan.protocol {
            Protocol::Iser => &ISER,
            _ => &SRP,
        };
        Self {
            index,
            mutator: mutator.with_seed(rng.u64(..), 2),
            pace: Pace::new(plan, rng, now),
            fabric: world.fabric.clone(),
            sniffer: world.sniffer.clone(),
            port: world.port,
            honest: world.honest,
            victim: plan.aim.victim().map(|victim| world.host(victim)),
            device,
            pd,
            memory,
            key: mr.rkey,
            mr,
            data,
            data_mr: None,
            connection: None,
            sent: 0,
            number: 1,
            silent_until: now,
            dials_at: now,
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let own = match &self.connection {
            Some(connection) if connection.is_up => self.pace.next(),
            Some(connection) => Some(connection.until),
            None => self.pace.next().map(|next| next.max(self.dials_at)),
        };
        let next = own.into_iter().chain(self.device.deadline()).min();
        next.map(|next| next.max(self.silent_until))
    }

    pub(super) fn step(&mut self, now: Instant) -> bool {
        if self.silent_until > now {
            return false;
        }
        let mut worked = self.device.progress(now) > 0;
        if worked && self.pace.plan.hasty && self.pace.rng.u8(..4) == 0 {
            self.acknowledge(&[0x00]);
        }
        worked |= self.poll(now);
        match &self.connection {
            None if self.dials_at <= now && self.pace.may_dial(now) => {
                self.dial(now);
                worked = true;
            }
            Some(connection) if !connection.is_up && connection.until <= now => {
                self.leave(now);
                worked = true;
            }
            _ => {}
        }
        while self.silent_until <= now
            && self.connection.as_ref().is_some_and(|c| c.is_up)
            && let Some(act) = self.pace.act(now)
        {
            match act {
                Act::Silence(time) => self.silent_until = now + time,
                Act::Departure => self.leave(now),
                Act::Message => self.cheat(now),
            }
            worked = true;
        }
        worked
    }

    /// Requests a connection, which completes later with an event.
    fn dial(&mut self, now: Instant) {
        let is_srp = self.pace.plan.protocol == Protocol::Srp;
        let port = match self.pace.plan.aim {
            _ if !is_srp => 3260,
            Aim::Own | Aim::Trespass => SRP_PORT,
            _ => HONEST_SRP,
        };
        let to = SocketAddr::new(target::ADDRESS, port);
        let dev = &mut self.device;
        let cm = dev.create_id(PortSpace::Tcp).expect("few identifiers");
        let cq = dev.create_cq(256).expect("few queues");
        dev.resolve_addr(cm, None, to, LOGIN).expect("an address");
        dev.resolve_route(cm, LOGIN).expect("a route");
        let cap = QpCap::new(SLOTS as u32 * 2, RECEIVES as u32);
        let init = QpInitAttr::new(self.pd, cq, QpType::Rc, cap);
        let qp = dev.create_cm_qp(cm, &init).expect("few queue pairs");
        self.number = 1;
        self.connection = Some(Connection {
            cm,
            qp,
            cq,
            is_up: false,
            until: now + LOGIN,
        });
        let receives = if self.pace.plan.deaf { 0 } else { RECEIVES };
        for slot in 0..receives {
            self.post_recv(slot);
        }
        let mut private_data = vec![0; if is_srp { 56 } else { 4 }];
        if is_srp {
            self.emit_login(&mut private_data);
        }
        if self.pace.plan.aim == Aim::Own && self.pace.rng.u8(..6) == 0 {
            self.mutator.change(&mut private_data);
            private_data.truncate(56);
        }
        let param = ConnParam {
            private_data,
            responder_resources: 16,
            initiator_depth: 1,
            ..ConnParam::default()
        };
        if self.device.connect(cm, &param).is_err() {
            self.leave(now);
        }
    }

    /// Writes the SRP login to the buffer.
    fn emit_login(&mut self, out: &mut [u8]) {
        let target = match self.pace.plan.aim {
            Aim::Own => self.port,
            _ => self.honest,
        };
        // Always the same port.
        let mut login = login_req(200 + self.index as u8, target);
        if let Some(port) = self.stolen_port() {
            login.initiator_port = port;
            if self.pace.rng.bool() {
                login.multi_channel = MultiChannelAction::Multi;
            }
        }
        login.emit_rdma(out);
    }

    fn stolen_port(&self) -> Option<InitiatorPortId> {
        self.sniffer.stolen(self.victim?, |host| host.port)
    }

    /// Abandons the connection, with or without a disconnect.
    fn leave(&mut self, now: Instant) {
        self.dials_at = now + AGAIN;
        let Some(Connection { cm, qp, cq, .. }) = self.connection.take() else {
            return;
        };
        if self.pace.rng.bool() {
            let _ = self.device.disconnect(cm);
        }
        let _ = self.device.destroy_qp(qp);
        let _ = self.device.destroy_id(cm);
        let _ = self.device.destroy_cq(cq);
    }

    /// Processes received events and completions. Returns whether there were any.
    fn poll(&mut self, now: Instant) -> bool {
        let mut received = false;
        while let Some(event) = self.device.poll_cm_event() {
            received = true;
            let Some(connection) = self.connection.as_mut().filter(|c| c.cm == event.id) else {
                continue;
            };
            match event.kind {
                CmEventKind::AddrResolved | CmEventKind::RouteResolved => {}
                CmEventKind::Established { .. } => {
                    connection.is_up = true;
                    self.begin();
                }
                _ => self.leave(now),
            }
        }
        let Some(connection) = &self.connection else {
            return received;
        };
        let mut done: Vec<Completion> = Vec::new();
        let _ = self.device.poll_cq(connection.cq, 64, &mut done);
        received |= !done.is_empty();
        for completion in done {
            if !completion.status.is_ok() {
                self.leave(now);
                break;
            }
            // Some receive buffers are not posted again.
            let is_thief = self.pace.plan.aim.is_theft();
            if completion.opcode.is_recv() && (is_thief || self.pace.rng.u8(..8) > 0) {
                self.post_recv(completion.wr_id.0 as usize);
            }
        }
        received
    }

    /// Sends a login, if this is not part of the connection request.
    fn begin(&mut self) {
        if self.pace.plan.protocol == Protocol::Iser && self.pace.rng.u8(..6) > 0 {
            let victim = self.victim;
            let stolen = victim.and_then(|victim| {
                let names = |host: &Host| host.names.clone();
                self.sniffer.stolen(victim, names)
            });
            let mut names = stolen.unwrap_or_else(|| Names::own(self.index));
            names.tsih = 0;
            let login = names.login(self.pace.plan.aim, "RDMAExtensions=Yes\0");
            self.send(&[&iser_header(None), &login[..]].concat());
        }
    }

    /// Does something that is forbidden or unusual.
    fn cheat(&mut self, now: Instant) {
        match self.pace.plan.aim {
            Aim::Own => {}
            Aim::Withhold => {
                self.announce();
                // Sometimes the device doesn't even reject access to the data.
                if self.pace.rng.bool() {
                    let time = SILENCES[self.pace.rng.usize(..SILENCES.len())];
                    self.silent_until = now + time;
                }
                return;
            }
            _ => return self.announce(),
        }
        match self.pace.rng.u8(..16) {
            0..3 => self.announce(),
            3 => self.withdraw(),
            4 => self.access(),
            5 => self.acknowledge(&SYNDROMES),
            _ => {
                let mut message = self.mutator.message();
                if self.pace.plan.protocol == Protocol::Iser
                    && let Some(pdu) = message.get_mut(ISER_HEADER..)
                {
                    set_number(&mut self.pace.rng, pdu, &mut self.number);
                }
                self.send(&message);
            }
        }
    }

    fn sge(&self, slot: usize, len: usize) -> [Sge; 1] {
        [Sge {
            addr: self.memory.addr() + (slot * SLOT) as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }]
    }

    fn post_recv(&mut self, slot: usize) {
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &self.sge(SLOTS + slot, SLOT),
        };
        if let Some(connection) = &self.connection {
            let _ = self.device.post_recv(connection.qp, &[wr]);
        }
    }

    fn send(&mut self, message: &[u8]) {
        let message = &message[..message.len().min(SLOT)];
        let slot = self.sent % SLOTS;
        self.sent += 1;
        self.memory.write(slot * SLOT, message);
        self.post(SendOp::Send, &self.sge(slot, message.len()));
    }

    /// Posts a work request, or drops it if the queue is full.
    fn post(&mut self, op: SendOp, sges: &[Sge]) {
        if let Some(connection) = &self.connection {
            let wr = SendWr::new(1 << 32, op, sges);
            let _ = self.device.post_send(connection.qp, &[wr]);
        }
    }

    /// Sends a command with memory, which may be invalid when the target accesses it.
    fn announce(&mut self) {
        let remote = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = match self.data_mr {
            Some(mr) => mr,
            None => self
                .device
                .reg_mr(self.pd, &self.data, remote)
                .expect("few regions"),
        };
        (self.data_mr, self.key) = (Some(mr), mr.rkey);
        self.number += 1;
        let (number, aim) = (self.number - 1, self.pace.plan.aim);
        let wish = HostileCommand::draw(aim, &mut self.pace.rng);
        // If data must not be sent, use an invalid key.
        let key = match aim {
            Aim::Withhold => mr.rkey.0 ^ 0x8000_0000,
            _ => mr.rkey.0,
        };
        let message = match self.pace.plan.protocol {
            Protocol::Iser => {
                let header = iser_header(Some((key, mr.addr)));
                [&header[..], &wish.pdu(number)].concat()
            }
            _ => srp_command(number, wish, MemDesc::new(mr.addr, key, wish.len)),
        };
        self.send(&message);
        if !aim.is_theft() && self.pace.rng.bool() {
            self.withdraw();
        }
    }

    /// Invalidates the registered memory.
    fn withdraw(&mut self) {
        if let Some(mr) = self.data_mr.take() {
            let _ = self.device.dereg_mr(mr.id);
        }
    }

    /// Tries to access memory of the target with a guessed key.
    fn access(&mut self) {
        let rng = &mut self.pace.rng;
        let rkey = RKey(self.key.0 ^ 1 << rng.u32(..32));
        let addr = self.mr.addr.wrapping_add(rng.u64(..1 << 24));
        let remote = RemoteAddr { addr, rkey };
        let op = match rng.bool() {
            true => SendOp::Read(remote),
            false => SendOp::Write(remote),
        };
        self.post(op, &self.sge(0, 512));
    }

    /// Sends an ACK or NAK for a packet that the target has not sent yet.
    fn acknowledge(&mut self, syndromes: &[u8]) {
        let from = SocketAddr::new(address(self.index), ROCE_PORT);
        let to = SocketAddr::new(target::ADDRESS, ROCE_PORT);
        let Some(known) = self.sniffer.of(sniffer::host(from.ip())) else {
            return;
        };
        let (Some(qpn), Some(psn)) = (known.qpns[0], known.psns[0]) else {
            return;
        };
        let rng = &mut self.pace.rng;
        // Within the target's socket buffer, or within its window.
        let most = [4, 64, 3000][rng.usize(..3)];
        let psn = Psn::new(psn.wrapping_add(rng.u32(..most)) & 0xff_ffff);
        let syndrome = AethSyndrome::from_wire(syndromes[rng.usize(..syndromes.len())]);
        let ext = ExtHeaders {
            aeth: Some(Aeth::new(syndrome, Msn::new(rng.u32(..1 << 24)))),
            ..ExtHeaders::default()
        };
        let bth = Bth::new(Opcode::RcAcknowledge, qpn, psn);
        let mut packet = emit_headers(&bth, &ext).to_vec();
        let flow = IcrcFlow::new(from, to).expect("two addresses of IPv4");
        let icrc = flow.compute(&packet, 0).to_le_bytes();
        packet.extend_from_slice(&icrc);
        self.fabric.inject(from, to, packet);
    }
}

/// Encodes an SRP command with memory.
fn srp_command(number: u32, wish: HostileCommand, memory: MemDesc) -> Vec<u8> {
    let buffer = DataBuffer::Direct(memory);
    let mut lun = [0; 8];
    lun[..2].copy_from_slice(&wish.lun.to_be_bytes());
    let command = Cmd {
        tag: Tag(u64::from(number)),
        lun,
        task_attr: match wish.is_ordered {
            true => TaskAttr::Ordered,
            false => TaskAttr::Simple,
        },
        notify_success: false,
        notify_failure: false,
        cdb: wish.cdb,
        additional_cdb: &[],
        data_out: if wish.writes {
            buffer
        } else {
            DataBuffer::None
        },
        data_in: if wish.writes {
            DataBuffer::None
        } else {
            buffer
        },
    };
    let mut iu = vec![0; command.wire_len()];
    command.emit(&mut iu);
    iu
}

/// Encodes an iSER header, with memory to read and write, if any.
fn iser_header(memory: Option<(u32, u64)>) -> [u8; ISER_HEADER] {
    let mut header = [0; ISER_HEADER];
    header[0] = 0x10;
    if let Some((key, at)) = memory {
        header[0] |= 0x0c;
        header[4..8].copy_from_slice(&key.to_be_bytes());
        header[8..16].copy_from_slice(&at.to_be_bytes());
        header[16..20].copy_from_slice(&key.to_be_bytes());
        header[20..28].copy_from_slice(&at.to_be_bytes());
    }
    header
}
