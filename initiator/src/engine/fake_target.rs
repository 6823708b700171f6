//! A small SRP target on a software NIC, for tests: a disk in memory, with configurable
//! misbehaviour.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_scsi::srp::{
    BufferFormats, Cmd, DataBuffer, FromInitiator, ImmediateDataOffset, LoginRej, LoginRejReason,
    LoginReq, LoginRsp, MemDesc, MultiChannelAction, MultiChannelResult, Residual, Rsp, RspCode,
};
use riser_transport::loopback::Endpoint;
use riser_transport::verbs::{
    Access, AhAttr, CmEventKind, CmId, Completion, ConnParam, CqId, Gid, Mr, PdId, PortSpace,
    Provider, QKey, QpCap, QpId, QpInitAttr, QpType, RKey, RdmaCm, RecvWr, RemoteAddr, SendOp,
    SendWr, Sge, UdDest, Verbs, make_gsi_ready,
};
use riser_transport::wire::dm::{
    Attribute, DmHeader, IoUnitInfo, IocProfile, Method, ServiceEntry,
};
use zerocopy::{FromBytes, IntoBytes};

use super::tests::world;

pub(crate) const BLOCK: usize = 512;
const RECVS: usize = 80;
const RECV_LEN: usize = 8400;
const STAGING: usize = RECVS * RECV_LEN;
const REPLY: usize = STAGING + (4 << 20);
const REPLY_LEN: usize = 512;

/// Misbehaviour of the target, and its statistics.
#[derive(Default)]
pub(crate) struct Knobs {
    /// Number of commands to ignore.
    pub(crate) swallow: AtomicU32,
    /// Number of commands to complete with BUSY.
    pub(crate) busy: AtomicU32,
    /// Number of commands to complete with a unit attention.
    pub(crate) attention: AtomicU32,
    /// Number of INQUIRYs for pages to complete with NOT READY, with sense data that does not
    /// suggest a retry.
    pub(crate) no_pages: AtomicU32,
    /// Rejects the next INQUIRY for a page, as without a unit, and closes the connection at the
    /// following command.
    pub(crate) vanishes: AtomicBool,
    /// The list of supported pages contains neither the serial number page nor the designator page.
    pub(crate) unlisted: AtomicBool,
    /// The disk has no volatile cache and does not support flush commands.
    pub(crate) cacheless: AtomicBool,
    /// The disk has protection information of type 1, but does not store it. Reads with protection
    /// information are rejected, except for those without data.
    pub(crate) protected: AtomicBool,
    /// The disk supports UNMAP.
    pub(crate) unmaps: AtomicBool,
    /// WRITE SAME is rejected.
    pub(crate) no_write_same: AtomicBool,
    /// A different disk replaces the first one.
    pub(crate) exchanged: AtomicBool,
    /// The next command closes the connection.
    pub(crate) disconnect: AtomicBool,
    /// The next response is malformed.
    pub(crate) garbage: AtomicBool,
    /// The next response invalidates the key of the last direct descriptor, unsolicited.
    pub(crate) invalidate: AtomicBool,
    /// Logins are rejected.
    pub(crate) refuse: AtomicBool,
    /// Logins are redirected to this address.
    pub(crate) redirect: Mutex<Option<IpAddr>>,
    /// Responses to login requests for further channels are delayed.
    pub(crate) late: AtomicBool,
    /// Task management requests get no response.
    pub(crate) deaf: AtomicBool,
    /// A credit request precedes each response.
    pub(crate) requests_credits: AtomicBool,
    /// Writes to the memory of the last command again, after its response.
    pub(crate) attack: AtomicBool,
    /// Number of attacks, and of failed attacks.
    pub(crate) attacks: (AtomicU32, AtomicU32),
    pub(crate) aborts: AtomicU32,
    /// Tags of ABORT TASK functions on a connection.
    aborted: Mutex<HashSet<u64>>,
    /// Commands received after their own ABORT TASK.
    pub(crate) behind_abort: AtomicU32,
    pub(crate) logins: AtomicU32,
    pub(crate) logouts: AtomicU32,
    pub(crate) refused: AtomicU32,
    /// Connections that the initiator withdrew before or instead of completing them.
    pub(crate) withdrawn: AtomicU32,
    pub(crate) indirect: AtomicU32,
    pub(crate) external: AtomicU32,
    pub(crate) immediate: AtomicU32,
    pub(crate) credit_responses: AtomicU32,
    /// Key and address of the last direct descriptor.
    pub(crate) last: Mutex<Option<MemDesc>>,
}

pub(crate) struct FakeTarget {
    pub(crate) addr: SocketAddr,
    pub(crate) knobs: Arc<Knobs>,
    pub(crate) disk: Arc<Mutex<Vec<u8>>>,
}

struct Channel {
    id: CmId,
    qp: QpId,
    memory: Memory,
    mr: Mr,
    immediate: Option<ImmediateDataOffset>,
    replies: usize,
}

/// Queue pair 1: responds to port queries with a single port.
struct Gsi {
    qp: QpId,
    cq: CqId,
    memory: Memory,
    mr: Mr,
}

impl Gsi {
    fn new(nic: &mut Endpoint, pd: PdId) -> Self {
        let memory = Memory::new(4096).unwrap();
        let mr = nic
            .reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE)
            .unwrap();
        let cq = nic.create_cq(16).unwrap();
        let init = QpInitAttr {
            sq_sig_all: true,
            ..QpInitAttr::new(pd, cq, QpType::Gsi, QpCap::new(4, 4))
        };
        let qp = nic.create_qp(&init).unwrap();
        make_gsi_ready(nic, qp).unwrap();
        let gsi = Self { qp, cq, memory, mr };
        gsi.post_recv(nic);
        gsi
    }

    fn sge(&self, at: u64, length: u32) -> Sge {
        Sge {
            addr: self.mr.addr + at,
            length,
            lkey: self.mr.lkey,
        }
    }

    fn post_recv(&self, nic: &mut Endpoint) {
        let sges = [self.sge(0, 40 + 256)];
        let wr = RecvWr {
            wr_id: riser_transport::verbs::WrId(1),
            sges: &sges,
        };
        nic.post_recv(self.qp, &[wr]).unwrap();
    }

    fn turn(&self, nic: &mut Endpoint, pd: PdId) {
        let mut completions = Vec::new();
        nic.poll_cq(self.cq, 4, &mut completions).unwrap();
        for completion in completions.iter().filter(|c| c.opcode.is_recv()) {
            let mut bytes = [0; 40 + 256];
            self.memory.read(0, &mut bytes);
            self.post_recv(nic);
            let (header, _) = DmHeader::parse(&bytes[40..]).unwrap();
            let data = match header.attribute {
                Attribute::IoUnitInfo => IoUnitInfo::new(1, 4, 1).emit().to_vec(),
                Attribute::IocProfile { .. } => IocProfile {
                    guid: 0x51,
                    send_queue_depth: 64,
                    read_depth: 16,
                    send_size: 8260,
                    rdma_size: u32::MAX,
                    services: 1,
                    name: "fake".to_owned(),
                }
                .emit()
                .to_vec(),
                _ => ServiceEntry::emit_list(&[ServiceEntry::srp_at_port(0x52, 5555)]).to_vec(),
            };
            let reply = DmHeader {
                method: Method::GetResp,
                ..header
            };
            self.memory.write(1024, &reply.emit(&data));
            let v4: [u8; 4] = bytes[32..36].try_into().unwrap();
            let attr = AhAttr::new(Gid::from(IpAddr::from(v4)));
            let ah = nic.create_ah(pd, attr).unwrap();
            let sges = [self.sge(1024, 256)];
            let wr = SendWr {
                ud: Some(UdDest {
                    ah,
                    qpn: completion.src_qp,
                    qkey: QKey::GSI,
                }),
                ..SendWr::new(0, SendOp::Send, &sges)
            };
            nic.post_send(self.qp, &[wr]).unwrap();
        }
    }
}

/// The target, driven by the world.
pub(super) struct Target {
    gsi: Gsi,
    nic: Endpoint,
    pd: PdId,
    cq: CqId,
    knobs: Arc<Knobs>,
    disk: Arc<Mutex<Vec<u8>>>,
    channels: HashMap<QpId, Channel>,
    ids: HashMap<CmId, QpId>,
    /// Connection requests with their private data and the time of the response.
    waiting: Vec<(Instant, CmId, Vec<u8>)>,
    received: VecDeque<Completion>,
    sent: Vec<Completion>,
}

fn decrement(counter: &AtomicU32) -> bool {
    counter
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
        .is_ok()
}

fn count(counter: &AtomicU32) {
    counter.fetch_add(1, Ordering::SeqCst);
}

impl FakeTarget {
    /// Starts a target with a disk of `blocks` at a new address.
    pub(crate) fn start(blocks: usize) -> Self {
        let knobs = Arc::new(Knobs::default());
        let disk = Arc::new(Mutex::new(vec![0; blocks * BLOCK]));
        let mut nic = world::fabric().endpoint(world::address());
        let addr = SocketAddr::new(nic.addr(), 5555);
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(4096).unwrap();
        let listener = nic.create_id(PortSpace::Tcp).unwrap();
        nic.bind_addr(listener, addr).unwrap();
        nic.listen(listener, 8).unwrap();
        world::add_target(Target {
            gsi: Gsi::new(&mut nic, pd),
            nic,
            pd,
            cq,
            knobs: knobs.clone(),
            disk: disk.clone(),
            channels: HashMap::new(),
            ids: HashMap::new(),
            waiting: Vec::new(),
            received: VecDeque::new(),
            sent: Vec::new(),
        });
        Self { addr, knobs, disk }
    }
}

impl Target {
    /// Processes all pending work; returns whether there was any.
    pub(super) fn turn(&mut self) -> bool {
        let mut worked = self.poll();
        self.gsi.turn(&mut self.nic, self.pd);
        if self.knobs.attack.swap(false, Ordering::SeqCst) {
            let desc = self.knobs.last.lock().unwrap().unwrap();
            let qp = *self.channels.keys().next().unwrap();
            if !self.transfer(qp, desc, 0, true) {
                count(&self.knobs.attacks.1);
            }
            count(&self.knobs.attacks.0);
            worked = true;
        }
        // Completions received before a disconnect are processed before it.
        while let Some(completion) = self.received.pop_front() {
            worked = true;
            if self.channels.contains_key(&completion.qp) && completion.status.is_ok() {
                self.handle(&completion);
            }
        }
        while let Some(event) = self.nic.poll_cm_event() {
            worked = true;
            match event.kind {
                CmEventKind::ConnectRequest { param, .. } => {
                    let is_late = !self.ids.is_empty() && self.knobs.late.load(Ordering::SeqCst);
                    let patience = Duration::from_millis(if is_late { 50 } else { 0 });
                    let due = world::now() + patience;
                    self.waiting.push((due, event.id, param.private_data));
                }
                CmEventKind::Rejected { .. } => {
                    count(&self.knobs.withdrawn);
                    self.waiting.retain(|(_, id, _)| *id != event.id);
                    self.remove_connection(event.id);
                }
                CmEventKind::Disconnected => self.remove_connection(event.id),
                _ => {}
            }
        }
        let now = world::now();
        while let Some(at) = self.waiting.iter().position(|(due, ..)| *due <= now) {
            let (_, id, private_data) = self.waiting.remove(at);
            self.log_in(id, &private_data);
            worked = true;
        }
        worked
    }

    /// Returns the latest time of the next turn.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|(due, ..)| *due);
        waiting.chain(self.nic.deadline()).min()
    }

    fn poll(&mut self) -> bool {
        let worked = self.nic.progress(world::now()) > 0;
        let mut completions = Vec::new();
        self.nic.poll_cq(self.cq, 64, &mut completions).unwrap();
        for completion in completions {
            if completion.opcode.is_recv() {
                self.received.push_back(completion);
            } else {
                self.sent.push(completion);
            }
        }
        worked
    }

    fn remove_connection(&mut self, id: CmId) {
        if let Some(qp) = self.ids.remove(&id)
            && let Some(channel) = self.channels.remove(&qp)
        {
            let _ = self.nic.disconnect(id);
            self.nic.destroy_qp(qp).unwrap();
            self.nic.dereg_mr(channel.mr.id).unwrap();
        }
        let _ = self.nic.destroy_id(id);
    }

    fn log_in(&mut self, id: CmId, private_data: &[u8]) {
        let login = LoginReq::parse_rdma(private_data).unwrap();
        if let Some(to) = *self.knobs.redirect.lock().unwrap() {
            count(&self.knobs.refused);
            self.nic.redirect(id, to).unwrap();
            let _ = self.nic.destroy_id(id);
            return;
        }
        if self.knobs.refuse.load(Ordering::SeqCst) {
            self.knobs.refused.fetch_add(1, Ordering::SeqCst);
            let mut rej = [0; 32];
            LoginRej {
                reason: LoginRejReason::InsufficientResources,
                tag: login.tag,
                formats: BufferFormats::all(),
            }
            .emit(&mut rej);
            let _ = self.nic.reject(id, &rej);
            let _ = self.nic.destroy_id(id);
            return;
        }
        if login.multi_channel == MultiChannelAction::Single {
            for old in self.ids.keys().copied().collect::<Vec<_>>() {
                self.remove_connection(old);
            }
        }
        let memory = Memory::new(REPLY + 64 * REPLY_LEN).unwrap();
        let mr = self
            .nic
            .reg_mr(self.pd, &memory.whole(), Access::LOCAL_WRITE)
            .unwrap();
        let cap = QpCap {
            max_send_wr: 512,
            max_recv_wr: RECVS as u32,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let init = QpInitAttr {
            sq_sig_all: true,
            ..QpInitAttr::new(self.pd, self.cq, QpType::Rc, cap)
        };
        // The initiator may have abandoned the connection already.
        let Ok(qp) = self.nic.create_cm_qp(id, &init) else {
            self.nic.dereg_mr(mr.id).unwrap();
            let _ = self.nic.destroy_id(id);
            return;
        };
        let channel = Channel {
            id,
            qp,
            memory,
            mr,
            immediate: login.immediate,
            replies: 0,
        };
        for slot in 0..RECVS {
            post_recv(&mut self.nic, &channel, slot as u64);
        }
        let mut rsp = [0; 52];
        LoginRsp {
            req_lim_delta: 64,
            tag: login.tag,
            max_it_iu_len: RECV_LEN as u32,
            max_ti_iu_len: 1024,
            formats: BufferFormats::all(),
            multi_channel: MultiChannelResult::NoChannels,
            solicited_notification: false,
            immediate: login.immediate.is_some(),
        }
        .emit(&mut rsp);
        let param = ConnParam {
            private_data: rsp.to_vec(),
            ..ConnParam::default()
        };
        let accepted = self.nic.accept(id, &param).is_ok();
        self.knobs.aborted.lock().unwrap().clear();
        self.ids.insert(id, qp);
        self.channels.insert(qp, channel);
        if accepted {
            count(&self.knobs.logins);
        } else {
            self.remove_connection(id);
        }
    }

    fn handle(&mut self, completion: &Completion) {
        let channel = &self.channels[&completion.qp];
        let slot = completion.wr_id.0;
        let mut iu = vec![0; completion.byte_len as usize];
        channel.memory.read(slot as usize * RECV_LEN, &mut iu);
        let immediate = channel.immediate;
        post_recv(&mut self.nic, channel, slot);
        match FromInitiator::parse(&iu, immediate).unwrap() {
            FromInitiator::Cmd(cmd) => self.command(completion.qp, &cmd),
            FromInitiator::TskMgmt(tmf) => {
                count(&self.knobs.aborts);
                self.knobs.aborted.lock().unwrap().insert(tmf.task_tag.0);
                if !self.knobs.deaf.load(Ordering::SeqCst) {
                    self.reply(
                        completion.qp,
                        &Rsp {
                            solicited: false,
                            // This also returns the credit of the aborted command.
                            req_lim_delta: 2,
                            tag: tmf.tag,
                            status: 0,
                            data_out: Residual::None,
                            data_in: Residual::None,
                            response: Some(RspCode::Complete),
                            sense: None,
                        },
                    );
                }
            }
            FromInitiator::ILogout(_) => count(&self.knobs.logouts),
            FromInitiator::CredRsp(_) => count(&self.knobs.credit_responses),
            other => panic!("{other:?}"),
        }
    }

    fn reply(&mut self, qp: QpId, rsp: &Rsp<'_>) {
        let mut iu = [0; REPLY_LEN];
        let len = rsp.emit(&mut iu);
        if self.knobs.garbage.swap(false, Ordering::SeqCst) {
            iu[0] = 0x99;
        }
        self.send(qp, &iu[..len]);
    }

    fn send(&mut self, qp: QpId, iu: &[u8]) {
        let Some(channel) = self.channels.get_mut(&qp) else {
            return;
        };
        let at = REPLY + channel.replies % 64 * REPLY_LEN;
        channel.replies += 1;
        channel.memory.write(at, iu);
        let sge = Sge {
            addr: channel.mr.addr + at as u64,
            length: iu.len() as u32,
            lkey: channel.mr.lkey,
        };
        let sges = [sge];
        let op = match self.knobs.invalidate.swap(false, Ordering::SeqCst) {
            true => {
                let desc = self
                    .knobs
                    .last
                    .lock()
                    .unwrap()
                    .expect("a command with data");
                SendOp::SendInv(RKey(desc.key()))
            }
            false => SendOp::Send,
        };
        let wr = SendWr::new(0, op, &sges);
        // If the connection broke in the meantime, there is no receiver.
        let _ = self.nic.post_send(qp, &[wr]);
    }

    /// Performs an RDMA transfer between the staging memory and a range of the initiator's memory,
    /// and waits for its completion.
    fn transfer(&mut self, qp: QpId, desc: MemDesc, at: usize, to_initiator: bool) -> bool {
        let Some(channel) = self.channels.get(&qp) else {
            return false;
        };
        let remote = RemoteAddr {
            addr: desc.va(),
            rkey: RKey(desc.key()),
        };
        let op = if to_initiator {
            SendOp::Write(remote)
        } else {
            SendOp::Read(remote)
        };
        let sge = Sge {
            addr: channel.mr.addr + (STAGING + at) as u64,
            length: desc.data_len(),
            lkey: channel.mr.lkey,
        };
        if self
            .nic
            .post_send(qp, &[SendWr::new(77, op, &[sge])])
            .is_err()
        {
            return false;
        }
        let until = world::now() + Duration::from_secs(5);
        loop {
            self.poll();
            let done = self.sent.drain(..).find(|c| c.wr_id.0 == 77 && c.qp == qp);
            match done {
                Some(done) => return done.status.is_ok(),
                None => assert!(world::now() < until, "transfer hangs"),
            }
            world::step(self.nic.deadline());
        }
    }

    /// Transfers the data of a buffer in the order of its descriptors.
    fn move_data(&mut self, qp: QpId, buffer: &DataBuffer<'_>, to_initiator: bool) -> bool {
        let descs = match buffer {
            DataBuffer::None => Vec::new(),
            DataBuffer::Direct(desc) => {
                *self.knobs.last.lock().unwrap() = Some(*desc);
                vec![*desc]
            }
            DataBuffer::Indirect(table) if table.is_complete() => {
                count(&self.knobs.indirect);
                table.inline.to_vec()
            }
            DataBuffer::Indirect(table) => {
                count(&self.knobs.external);
                if !self.transfer(qp, table.table, 3 << 20, false) {
                    return false;
                }
                let mut bytes = vec![0; table.table.data_len() as usize];
                let channel = &self.channels[&qp];
                channel.memory.read(STAGING + (3 << 20), &mut bytes);
                let table = <[MemDesc]>::ref_from_bytes(&bytes).unwrap();
                assert_eq!(table[..3].as_bytes(), &bytes[..48]);
                table.to_vec()
            }
            DataBuffer::Immediate { data, .. } => {
                count(&self.knobs.immediate);
                self.channels[&qp].memory.write(STAGING, data);
                Vec::new()
            }
        };
        let mut at = 0;
        for desc in descs {
            if !self.transfer(qp, desc, at, to_initiator) {
                return false;
            }
            at += desc.data_len() as usize;
        }
        true
    }

    fn command(&mut self, qp: QpId, cmd: &Cmd<'_>) {
        if self.knobs.aborted.lock().unwrap().contains(&cmd.tag.0) {
            count(&self.knobs.behind_abort);
        }
        if decrement(&self.knobs.swallow) {
            return;
        }
        if self.knobs.disconnect.swap(false, Ordering::SeqCst) {
            let id = self.channels[&qp].id;
            return self.remove_connection(id);
        }
        let attention = [0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0, 0, 0, 0, 0];
        let not_ready = [0x70, 0, 2, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x04, 0, 0, 0, 0, 0];
        let illegal = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0];
        let mut rsp = Rsp {
            solicited: false,
            req_lim_delta: 1,
            tag: cmd.tag,
            status: 0,
            data_out: Residual::None,
            data_in: Residual::None,
            response: None,
            sense: None,
        };
        if decrement(&self.knobs.busy) {
            rsp.status = 8;
        } else if decrement(&self.knobs.attention) {
            (rsp.status, rsp.sense) = (2, Some(&attention[..]));
        } else if cmd.cdb[..2] == [0x12, 1] && decrement(&self.knobs.no_pages) {
            (rsp.status, rsp.sense) = (2, Some(&not_ready[..]));
        } else if cmd.cdb[..2] == [0x12, 1] && self.knobs.vanishes.swap(false, Ordering::SeqCst) {
            (rsp.status, rsp.sense) = (2, Some(&illegal[..]));
            self.knobs.disconnect.store(true, Ordering::SeqCst);
        } else if !self.move_data(qp, &cmd.data_out, false) {
            return;
        } else {
            match self.execute(qp, cmd) {
                Some(data) => {
                    let want = cmd.data_in.data_len();
                    self.channels[&qp].memory.write(STAGING, &data);
                    if want as usize > data.len() {
                        rsp.data_in = Residual::Under(want - data.len() as u32);
                    }
                    if !self.move_data(qp, &cmd.data_in, true) {
                        return;
                    }
                }
                None => (rsp.status, rsp.sense) = (2, Some(&illegal[..])),
            }
        }
        if self.knobs.requests_credits.load(Ordering::SeqCst) {
            // Requests credit first; the initiator must acknowledge this.
            let mut req = [0; 16];
            (req[0], req[15]) = (0x81, 9);
            self.send(qp, &req);
        }
        self.reply(qp, &rsp);
    }

    /// Executes a command and returns its Data-In. Data-Out is in the staging memory.
    fn execute(&mut self, qp: QpId, cmd: &Cmd<'_>) -> Option<Vec<u8>> {
        let mut disk = self.disk.lock().unwrap();
        let cdb = &cmd.cdb;
        let word = |at: usize| u32::from_be_bytes(cdb[at..at + 4].try_into().unwrap());
        let start = word(6) as usize * BLOCK;
        let len = word(10) as usize * BLOCK;
        let mut staged = vec![0; cmd.data_out.data_len() as usize];
        self.channels[&qp].memory.read(STAGING, &mut staged);
        let blocks = (disk.len() / BLOCK) as u64;
        let unmaps = self.knobs.unmaps.load(Ordering::SeqCst);
        Some(match (cdb[0], cdb[1], cdb[2]) {
            (0x35, ..) if self.knobs.cacheless.load(Ordering::SeqCst) => return None,
            (0x1a, ..) if self.knobs.cacheless.load(Ordering::SeqCst) => vec![3, 0, 0, 0],
            (0x00 | 0x35, ..) => Vec::new(),
            (0x12, 0, _) => {
                let mut data = vec![b' '; 36];
                data[..8].copy_from_slice(&[0, 0, 6, 2, 31, 0, 0, 2]);
                data[8..12].copy_from_slice(b"FAKE");
                data[5] = self.knobs.protected.load(Ordering::SeqCst).into();
                data
            }
            (0x12, 1, 0x00) => match self.knobs.unlisted.load(Ordering::SeqCst) {
                true => vec![0, 0, 0, 2, 0, 0xb2],
                false if unmaps => vec![0, 0, 0, 5, 0, 0x80, 0x83, 0xb0, 0xb2],
                false => vec![0, 0, 0, 4, 0, 0x80, 0x83, 0xb2],
            },
            (0x12, 1, 0x80) => match self.knobs.exchanged.load(Ordering::SeqCst) {
                true => b"\0\x80\0\x02S2".to_vec(),
                false => b"\0\x80\0\x02S1".to_vec(),
            },
            (0x12, 1, 0x83) => vec![0, 0x83, 0, 8, 1, 3, 0, 4, 0x61, 2, 3, 4],
            (0x12, 1, 0xb0) if unmaps => {
                let mut data = vec![0; 64];
                (data[1], data[3]) = (0xb0, 60);
                // MAXIMUM UNMAP LBA COUNT and MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT
                (data[22], data[27]) = (1, 1);
                data
            }
            (0x12, 1, 0xb2) if unmaps => vec![0, 0xb2, 0, 4, 0, 0x80, 0, 0],
            (0x12, 1, 0xb2) => vec![0, 0xb2, 0, 4, 0, 0x40, 0, 0],
            (0x1a, ..) => vec![15, 0, 0, 0, 8, 10, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            (0xa0, ..) => [&[0, 0, 0, 8, 0, 0, 0, 0][..], &[0; 8]].concat(),
            (0x9e, 0x10, _) => {
                let mut data = vec![0; 32];
                data[..8].copy_from_slice(&(blocks - 1).to_be_bytes());
                data[8..12].copy_from_slice(&(BLOCK as u32).to_be_bytes());
                data[12] = self.knobs.protected.load(Ordering::SeqCst).into();
                data
            }
            (0x88, protect, _) if protect & 0xe0 != 0 && len > 0 => return None,
            (0x88, ..) => disk.get(start..start + len)?.to_vec(),
            (0x8a, protect, _) => {
                let received = match protect & 0xe0 {
                    0 => BLOCK,
                    _ => BLOCK + 8,
                };
                assert_eq!(staged.len(), len / BLOCK * received);
                let blocks = disk.get_mut(start..start + len)?.chunks_mut(BLOCK);
                for (block, data) in blocks.zip(staged.chunks(received)) {
                    block.copy_from_slice(&data[..BLOCK]);
                }
                Vec::new()
            }
            (0x42, ..) if unmaps => {
                let start = u64::from_be_bytes(staged[8..16].try_into().unwrap()) as usize * BLOCK;
                let blocks = u32::from_be_bytes(staged[16..20].try_into().unwrap()) as usize;
                disk.get_mut(start..start + blocks * BLOCK)?.fill(0);
                Vec::new()
            }
            (0x93, ..) if self.knobs.no_write_same.load(Ordering::SeqCst) => return None,
            (0x93, ..) => {
                for block in disk.get_mut(start..start + len)?.chunks_mut(BLOCK) {
                    block.copy_from_slice(&staged);
                }
                Vec::new()
            }
            _ => return None,
        })
    }
}

fn post_recv(nic: &mut Endpoint, channel: &Channel, slot: u64) {
    let sge = Sge {
        addr: channel.mr.addr + slot * RECV_LEN as u64,
        length: RECV_LEN as u32,
        lkey: channel.mr.lkey,
    };
    let wr = RecvWr {
        wr_id: riser_transport::verbs::WrId(slot),
        sges: &[sge],
    };
    let _ = nic.post_recv(channel.qp, &[wr]);
}
