//! A minimal SRP initiator for tests. It uses a single channel, supports one or many commands at a
//! time, and doesn't support recovery.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_scsi::srp::{
    AerRsp, BufferFormats, Cmd, DataBuffer, FromTarget, ImmediateDataOffset, InitiatorPortId,
    LoginRej, LoginRejReason, LoginReq, LoginReqFlags, LoginRsp, MemDesc, MultiChannelAction, Tag,
    TargetPortId, TaskAttr, TskMgmt, TskMgmtFunction,
};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, PortSpace, Provider, QpId, RecvWr,
    SendOp, SendWr, Sge, WrId,
};

use crate::dial::{Dialed, Pump, dial, wait_event};
use crate::pdus::cdb10;

pub const RECEIVES: usize = 132;
const RX: usize = 512;
const TX: usize = 8320;
const TX_SLOTS: usize = 32;
pub const DATA: usize = 4 << 20;

/// Creates a login request.
pub fn login_req(initiator: u8, target: TargetPortId) -> LoginReq {
    LoginReq {
        tag: Tag(1),
        req_it_iu_len: 8260,
        formats: BufferFormats::DIRECT | BufferFormats::INDIRECT,
        multi_channel: MultiChannelAction::Single,
        flags: LoginReqFlags::empty(),
        immediate: ImmediateDataOffset::new(80),
        initiator_port: InitiatorPortId([initiator; 16]),
        target_port: target,
    }
}

/// Reason why a connection attempt failed.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    Login(LoginRejReason),
    Other(String),
}

/// Response to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub tag: u64,
    pub delta: i32,
    pub status: u8,
    pub code: Option<u8>,
    pub sense: Vec<u8>,
}

/// Any other message received from the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    Response(Response),
    Credit(i32),
    Logout(u32),
    Event(Vec<u8>),
}

pub struct Mini<P: Provider> {
    pub dev: P,
    cm: CmId,
    qp: QpId,
    cq: CqId,
    rx: MemSlice,
    rx_mr: Mr,
    tx: MemSlice,
    tx_mr: Mr,
    /// Memory that can be read and written by the target.
    pub data: MemSlice,
    pub data_mr: Mr,
    next_tx: usize,
    pub rsp: LoginRsp,
    pub said: VecDeque<Said>,
    pub closed: bool,
    pub failed: bool,
}

impl<P: Provider> Mini<P> {
    /// Connects and logs in using the RDMA CM.
    pub fn connect(
        dev: P,
        dst: SocketAddr,
        req: &LoginReq,
        pump: Pump<'_, P>,
    ) -> Result<Self, (P, Refused)> {
        let mut private_data = vec![0; 56];
        req.emit_rdma(&mut private_data);
        Self::connect_with(dev, dst, PortSpace::Tcp, private_data, pump)
    }

    /// Same as [`Mini::connect`], but the login must succeed.
    pub fn connected(dev: P, dst: SocketAddr, req: &LoginReq, pump: Pump<'_, P>) -> Self {
        let mini = Self::connect(dev, dst, req, pump);
        mini.map_err(|(_, refused)| refused).unwrap()
    }

    /// Connects and logs in using a service ID, as on InfiniBand.
    pub fn connect_service(
        dev: P,
        dst: SocketAddr,
        service_id: u64,
        req: &LoginReq,
        pump: Pump<'_, P>,
    ) -> Result<Self, (P, Refused)> {
        let mut private_data = vec![0; 64];
        req.emit(&mut private_data);
        let mask = u64::MAX;
        let space = PortSpace::Ib { service_id, mask };
        Self::connect_with(dev, dst, space, private_data, pump)
    }

    /// Connects using this private data.
    pub fn connect_with(
        mut dev: P,
        dst: SocketAddr,
        space: PortSpace,
        private_data: Vec<u8>,
        pump: Pump<'_, P>,
    ) -> Result<Self, (P, Refused)> {
        let wrs = (256, RECEIVES as u32);
        let Dialed { pd, cq, cm, qp } = dial(&mut dev, space, dst, wrs, pump);
        let region = |len| Memory::new(len).unwrap().whole();
        let (rx, tx, data) = (region(RECEIVES * RX), region(TX_SLOTS * TX), region(DATA));
        let local = Access::LOCAL_WRITE;
        let remote = local | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let rx_mr = dev.reg_mr(pd, &rx, local).unwrap();
        let tx_mr = dev.reg_mr(pd, &tx, local).unwrap();
        let data_mr = dev.reg_mr(pd, &data, remote).unwrap();
        let mut mini = Self {
            dev,
            cm,
            qp,
            cq,
            rx,
            rx_mr,
            tx,
            tx_mr,
            data,
            data_mr,
            next_tx: 0,
            rsp: LoginRsp {
                req_lim_delta: 0,
                tag: Tag(0),
                max_it_iu_len: 0,
                max_ti_iu_len: 0,
                formats: BufferFormats::empty(),
                multi_channel: riser_scsi::srp::MultiChannelResult::NoChannels,
                solicited_notification: false,
                immediate: false,
            },
            said: VecDeque::new(),
            closed: false,
            failed: false,
        };
        for slot in 0..RECEIVES {
            mini.post_recv(slot);
        }
        let param = ConnParam {
            private_data,
            responder_resources: 16,
            initiator_depth: 1,
            ..ConnParam::default()
        };
        mini.dev.connect(cm, &param).unwrap();
        match wait_event(&mut mini.dev, pump).kind {
            CmEventKind::Established { param } => {
                mini.rsp = LoginRsp::parse(&param.private_data).unwrap();
                // Send the message that is needed to establish the connection on the target.
                pump(&mut mini.dev);
                Ok(mini)
            }
            CmEventKind::Rejected { private_data, .. } => {
                mini.clean();
                let refused = match LoginRej::parse(&private_data) {
                    Ok(rej) => Refused::Login(rej.reason),
                    Err(error) => Refused::Other(error.to_string()),
                };
                Err((mini.dev, refused))
            }
            other => {
                mini.clean();
                Err((mini.dev, Refused::Other(format!("{other:?}"))))
            }
        }
    }

    /// Sends a connection request and ignores the response.
    pub fn request(dev: &mut P, dst: SocketAddr, private_data: Vec<u8>, pump: Pump<'_, P>) {
        let Dialed { cm, .. } = dial(dev, PortSpace::Tcp, dst, (4, 4), pump);
        let param = ConnParam {
            private_data,
            ..ConnParam::default()
        };
        dev.connect(cm, &param).unwrap();
        // Send the request now.
        pump(dev);
    }

    fn clean(&mut self) {
        let _ = self.dev.destroy_qp(self.qp);
        let _ = self.dev.destroy_id(self.cm);
        let _ = self.dev.destroy_cq(self.cq);
    }

    /// Disconnects and returns the device.
    pub fn disconnect(mut self, pump: Pump<'_, P>) -> P {
        let _ = self.dev.disconnect(self.cm);
        for _ in 0..100_000 {
            self.poll();
            if self.closed {
                break;
            }
            pump(&mut self.dev);
        }
        self.clean();
        self.dev
    }

    fn post_recv(&mut self, slot: usize) {
        let sge = [Sge {
            addr: self.rx.addr() + (slot * RX) as u64,
            length: RX as u32,
            lkey: self.rx_mr.lkey,
        }];
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &sge,
        };
        let _ = self.dev.post_recv(self.qp, &[wr]);
    }

    /// Sends a single message with these bytes.
    pub fn send(&mut self, iu: &[u8]) {
        let slot = self.next_tx % TX_SLOTS;
        self.next_tx += 1;
        self.tx.write(slot * TX, iu);
        let sge = [Sge {
            addr: self.tx.addr() + (slot * TX) as u64,
            length: iu.len() as u32,
            lkey: self.tx_mr.lkey,
        }];
        self.dev
            .post_send(self.qp, &[SendWr::new(1 << 32, SendOp::Send, &sge)])
            .unwrap();
    }

    /// Creates a descriptor for a part of the data buffer.
    pub fn desc(&self, offset: usize, len: u32) -> MemDesc {
        MemDesc::new(self.data_mr.addr + offset as u64, self.data_mr.rkey.0, len)
    }

    /// Sends a command to a logical unit.
    pub fn send_cmd(
        &mut self,
        tag: u64,
        lun: u8,
        cdb: &[u8],
        out: DataBuffer<'_>,
        into: DataBuffer<'_>,
    ) {
        let mut full = [0; 16];
        full[..cdb.len()].copy_from_slice(cdb);
        let cmd = Cmd {
            tag: Tag(tag),
            lun: [0, lun, 0, 0, 0, 0, 0, 0],
            task_attr: TaskAttr::Simple,
            notify_success: false,
            notify_failure: false,
            cdb: full,
            additional_cdb: &[],
            data_out: out,
            data_in: into,
        };
        let mut iu = vec![0; cmd.wire_len()];
        cmd.emit(&mut iu);
        self.send(&iu);
    }

    /// Sends a task management request.
    pub fn send_tmf(&mut self, tag: u64, function: TskMgmtFunction, task: u64) {
        self.send_tmf_to(tag, 0, function, task);
    }

    /// Sends a task management request for a logical unit.
    pub fn send_tmf_to(&mut self, tag: u64, lun: u8, function: TskMgmtFunction, task: u64) {
        let mut iu = [0; 48];
        TskMgmt {
            tag: Tag(tag),
            notify_success: false,
            notify_failure: false,
            lun: [0, lun, 0, 0, 0, 0, 0, 0],
            function,
            task_tag: Tag(task),
        }
        .emit(&mut iu);
        self.send(&iu);
    }

    /// Processes everything received so far.
    pub fn poll(&mut self) {
        let mut completions: Vec<Completion> = Vec::new();
        let _ = self.dev.poll_cq(self.cq, 64, &mut completions);
        for c in completions {
            if !c.status.is_ok() {
                self.failed = true;
                continue;
            }
            if !c.opcode.is_recv() {
                continue;
            }
            let slot = c.wr_id.0 as usize;
            let mut bytes = vec![0; c.byte_len as usize];
            self.rx.read(slot * RX, &mut bytes);
            let said = match FromTarget::parse(&bytes).unwrap() {
                FromTarget::Rsp(rsp) => Said::Response(Response {
                    tag: rsp.tag.0,
                    delta: rsp.req_lim_delta,
                    status: rsp.status,
                    code: rsp.response.map(u8::from),
                    sense: rsp.sense.unwrap_or_default().to_vec(),
                }),
                FromTarget::CredReq(req) => Said::Credit(req.req_lim_delta),
                FromTarget::TLogout(iu) => Said::Logout(iu.reason.into()),
                FromTarget::AerReq(req) => {
                    // The target will not send another event before it has received this response.
                    let mut rsp = [0; 16];
                    AerRsp { tag: req.tag }.emit(&mut rsp);
                    self.send(&rsp);
                    Said::Event(req.sense.to_vec())
                }
                other => panic!("unexpected {other:?}"),
            };
            self.said.push_back(said);
            self.post_recv(slot);
        }
        while let Some(event) = self.dev.poll_cm_event() {
            if event.kind == CmEventKind::Disconnected && event.id == self.cm {
                self.closed = true;
            }
        }
    }

    /// Waits until the next message is received from the target.
    pub fn next(&mut self, pump: Pump<'_, P>) -> Said {
        for _ in 0..2_000_000 {
            self.poll();
            if let Some(said) = self.said.pop_front() {
                // Send any pending acknowledgements now, because this device may not be driven
                // again for some time.
                pump(&mut self.dev);
                return said;
            }
            assert!(!self.closed && !self.failed, "the connection ended");
            pump(&mut self.dev);
        }
        panic!("nothing was said");
    }

    /// Waits until the connection is closed.
    pub fn wait_closed(&mut self, pump: Pump<'_, P>) {
        for _ in 0..2_000_000 {
            self.poll();
            if self.closed || self.failed {
                return;
            }
            pump(&mut self.dev);
        }
        panic!("the connection did not end");
    }

    /// Waits for a response.
    pub fn receive_response(&mut self, pump: Pump<'_, P>) -> Response {
        match self.next(pump) {
            Said::Response(response) => response,
            other => panic!("expected a response, not {other:?}"),
        }
    }

    /// Sends a command and waits for the response.
    pub fn command(
        &mut self,
        cdb: &[u8],
        out: DataBuffer<'_>,
        into: DataBuffer<'_>,
        pump: Pump<'_, P>,
    ) -> Response {
        self.send_cmd(77, 0, cdb, out, into);
        self.receive_response(pump)
    }

    /// Clears the unit attention of a new nexus.
    pub fn clear_unit_attention(&mut self, pump: Pump<'_, P>) {
        let first = self.command(&[0; 6], DataBuffer::None, DataBuffer::None, pump);
        assert_eq!(first.status, 2, "power on");
        let second = self.command(&[0; 6], DataBuffer::None, DataBuffer::None, pump);
        assert_eq!(second.status, 0);
    }

    pub fn read(&mut self, lba: u32, blocks: u16, at: usize, pump: Pump<'_, P>) -> Response {
        let desc = self.desc(at, u32::from(blocks) * 512);
        let cdb = cdb10(0x28, lba, blocks);
        self.command(&cdb, DataBuffer::None, DataBuffer::Direct(desc), pump)
    }

    pub fn write(&mut self, lba: u32, blocks: u16, at: usize, pump: Pump<'_, P>) -> Response {
        let desc = self.desc(at, u32::from(blocks) * 512);
        let cdb = cdb10(0x2a, lba, blocks);
        self.command(&cdb, DataBuffer::Direct(desc), DataBuffer::None, pump)
    }
}

/// Drives a device in real time.
pub fn real<P: Provider>(dev: &mut P) {
    if dev.progress(Instant::now()) == 0 {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Creates a configuration with a single 16 MiB RAM disk.
pub fn config(addr: IpAddr, workers: usize, rest: &str) -> String {
    format!(
        "backends:\n  d: {{ kind: ram, size: 16MiB }}\n\
         targets:\n  - name: t\n    portals: [{{ protocol: srp, listen: \"{}\" }}]\n    \
         luns: {{ 0: {{ backend: d }} }}\n    access: open\nworkers: {{ count: {workers} }}\n{rest}",
        SocketAddr::new(addr, 5555)
    )
}
