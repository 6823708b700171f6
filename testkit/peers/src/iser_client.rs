//! A minimal iSER initiator for tests. It uses a single connection and our own login state machine,
//! and doesn't support recovery.

use std::collections::VecDeque;
use std::net::SocketAddr;

use riser_memory::{MemSlice, Memory};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{
    ConnectionParams, InitiatorConfig, InitiatorLogin, LoginError, LoginStep, SessionParams,
};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{
    DataOut, FromInitiator, FromTarget, LogoutReason, LogoutRequest, ScsiCommand, TmfFunction,
    TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, StatSn, Tsih, Ttt};
use riser_scsi::iser::{Buffers, CmHeader, Message, RemoteBuffer, Stag, put_control};
use riser_transport::mr_pool::{MrPool, PooledMr};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, PortSpace, Provider, QpId, RecvWr,
    SendOp, SendWr, Sge, WrId,
};

use crate::dial::{Dialed, Pump, dial, wait_event};
use crate::pdus::{cdb10, scsi_command};

const RECEIVES: usize = 160;
const RX: usize = 8448;
const TX: usize = 8448;
const TX_SLOTS: usize = 32;
const DATA: usize = 72 << 20;
/// Offset of the buffer for data written by the target.
const READ_AT: usize = 36 << 20;

pub struct Client<P: Provider> {
    pub dev: P,
    cm: CmId,
    qp: QpId,
    cq: CqId,
    rx: MemSlice,
    rx_mr: Mr,
    tx: MemSlice,
    tx_mr: Mr,
    data: MemSlice,
    /// Used if the target doesn't invalidate keys.
    data_mr: Mr,
    /// Used if the target does invalidate keys; this needs a separate region for each command.
    pool: Option<MrPool>,
    regions: Vec<PooledMr>,
    next_tx: usize,
    cmd_sn: u32,
    said: VecDeque<(FromTarget, Vec<u8>)>,
    /// Private data received from the target.
    pub reply: CmHeader,
    pub session: Option<SessionParams>,
    connection: Option<ConnectionParams>,
    /// Number of responses that requested to invalidate a key.
    pub invalidated: usize,
    closed: bool,
}

impl<P: Provider> Client<P> {
    /// Connects to the target. The private data indicates whether remote invalidation is supported.
    pub fn connect(
        dev: P,
        dst: SocketAddr,
        remote_invalidate: bool,
        pump: Pump<'_, P>,
    ) -> Result<Self, String> {
        match Self::try_connect(dev, dst, remote_invalidate, pump) {
            (client, None) => Ok(client),
            (_, Some(error)) => Err(error),
        }
    }

    /// Same as [`Client::connect`], but returns the device along with the error.
    pub fn try_connect(
        mut dev: P,
        dst: SocketAddr,
        remote_invalidate: bool,
        pump: Pump<'_, P>,
    ) -> (Self, Option<String>) {
        let wrs = (256, RECEIVES as u32);
        let Dialed { pd, cq, cm, qp } = dial(&mut dev, PortSpace::Tcp, dst, wrs, pump);
        let region = |len| Memory::new(len).unwrap().whole();
        let (rx, tx, data) = (region(RECEIVES * RX), region(TX_SLOTS * TX), region(DATA));
        let local = Access::LOCAL_WRITE;
        let remote = local | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let rx_mr = dev.reg_mr(pd, &rx, local).unwrap();
        let tx_mr = dev.reg_mr(pd, &tx, local).unwrap();
        let data_mr = dev.reg_mr(pd, &data, remote).unwrap();
        let mut client = Self {
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
            pool: None,
            regions: Vec::new(),
            next_tx: 0,
            cmd_sn: 1,
            said: VecDeque::new(),
            reply: CmHeader::default(),
            session: None,
            connection: None,
            invalidated: 0,
            closed: false,
        };
        (0..RECEIVES).for_each(|slot| client.post_recv(slot));
        let offer = CmHeader {
            zero_based: false,
            remote_invalidate,
        };
        let param = ConnParam {
            private_data: offer.bytes().to_vec(),
            responder_resources: 16,
            initiator_depth: 1,
            ..ConnParam::default()
        };
        client.dev.connect(cm, &param).unwrap();
        match wait_event(&mut client.dev, pump).kind {
            CmEventKind::Established { param } => {
                client.reply = CmHeader::parse(&param.private_data);
                if client.reply.remote_invalidate {
                    client.pool = Some(MrPool::new(&mut client.dev, pd, 16, 1).unwrap());
                }
                (client, None)
            }
            other => (client, Some(format!("{other:?}"))),
        }
    }

    /// Returns the device without closing the connection.
    pub fn leave_open(self) -> P {
        self.dev
    }

    /// Logs in to a target or to a discovery session.
    pub fn login(
        &mut self,
        target: Option<&str>,
        isid: u8,
        keys: &[(Key, u32)],
        pump: Pump<'_, P>,
    ) -> Result<(), LoginError> {
        let mut offer = Offer::default()
            .with(Key::RdmaExtensions, 1)
            .with(Key::TargetRecvDataSegmentLength, 8192)
            .with(Key::InitiatorRecvDataSegmentLength, 8192);
        let mut said = vec![
            Key::RdmaExtensions,
            Key::TargetRecvDataSegmentLength,
            Key::InitiatorRecvDataSegmentLength,
        ];
        for (key, value) in keys {
            offer = offer.with(*key, *value);
            said.push(*key);
        }
        let config = InitiatorConfig {
            name: IscsiName::new("iqn.2026-01.org.example:client").unwrap(),
            target: target.map(|name| IscsiName::new(name).unwrap()),
            isid: Isid([0x80, 0, 0, 0, 0, isid]),
            tsih: Tsih(0),
            cid: Cid(0),
            cmd_sn: CmdSn(1),
            credentials: None,
            target_credentials: None,
            offer,
            keys: said,
        };
        let mut login = InitiatorLogin::new(config, [9; 33]);
        loop {
            if let Some((request, text)) = login.poll_request() {
                self.send(
                    Buffers::default(),
                    &FromInitiator::LoginRequest(request),
                    &text,
                );
            }
            let (FromTarget::LoginResponse(response), text) = self.next(pump) else {
                panic!("expected a login response");
            };
            match login.handle_response(&response, &text)? {
                LoginStep::Send => {}
                LoginStep::FullFeature {
                    session,
                    connection,
                    ..
                } => {
                    self.session = Some(session);
                    self.connection = Some(connection);
                    return Ok(());
                }
                LoginStep::Redirect { .. } => panic!("nowhere to go"),
            }
        }
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

    fn send(&mut self, buffers: Buffers, pdu: &FromInitiator, data: &[u8]) {
        let mut bytes = Vec::new();
        put_control(buffers, pdu.header(), &pdu.ahs(), data, &mut bytes);
        self.post(&bytes);
    }

    /// Sends the first login request and waits for the response.
    pub fn begin_login(&mut self, pdu: &[u8], pump: Pump<'_, P>) {
        let mut header = [0; 28];
        header[0] = 0x10;
        self.post(&[&header[..], pdu].concat());
        let (reply, _) = self.next(pump);
        assert!(matches!(reply, FromTarget::LoginResponse(_)), "{reply:?}");
    }

    /// Posts a message to the send queue.
    fn post(&mut self, bytes: &[u8]) {
        let slot = self.next_tx % TX_SLOTS;
        self.next_tx += 1;
        self.tx.write(slot * TX, bytes);
        let sge = [Sge {
            addr: self.tx.addr() + (slot * TX) as u64,
            length: bytes.len() as u32,
            lkey: self.tx_mr.lkey,
        }];
        self.dev
            .post_send(self.qp, &[SendWr::new(1 << 32, SendOp::Send, &sge)])
            .unwrap();
    }

    /// Processes everything received so far.
    fn poll(&mut self) {
        let mut completions: Vec<Completion> = Vec::new();
        let _ = self.dev.poll_cq(self.cq, 64, &mut completions);
        for c in completions {
            if !c.status.is_ok() {
                self.closed = true;
                continue;
            }
            if !c.opcode.is_recv() {
                continue;
            }
            let slot = c.wr_id.0 as usize;
            let mut bytes = vec![0; c.byte_len as usize];
            self.rx.read(slot * RX, &mut bytes);
            if let Some(key) = c.invalidated {
                let at = self.regions.iter().position(|mr| mr.rkey() == key);
                let mut mr = self.regions.swap_remove(at.expect("a key of ours"));
                mr.on_invalidated(key);
                self.put(mr);
                self.invalidated += 1;
            }
            let Ok(Message::Control { frame, .. }) = Message::parse(&bytes) else {
                panic!("{bytes:x?}");
            };
            let (pdu, _) = FromTarget::parse(&frame).unwrap();
            let data = frame.data.to_vec();
            self.post_recv(slot);
            match pdu {
                // The target checks whether the initiator is still alive.
                FromTarget::NopIn(ping) if ping.ttt != Ttt::NONE => {
                    let reply = FromInitiator::NopOut(crate::pdus::pong(&ping, self.cmd_sn));
                    self.send(Buffers::default(), &reply, &[]);
                }
                pdu => self.said.push_back((pdu, data)),
            }
        }
        while let Some(event) = self.dev.poll_cm_event() {
            self.closed |= event.kind == CmEventKind::Disconnected;
        }
    }

    fn put(&mut self, mr: PooledMr) {
        let pool = self.pool.as_mut().expect("it was received from there");
        pool.release(&mut self.dev, mr).unwrap();
    }

    /// Waits until the next PDU is received.
    fn next(&mut self, pump: Pump<'_, P>) -> (FromTarget, Vec<u8>) {
        for _ in 0..2_000_000 {
            self.poll();
            if let Some(said) = self.said.pop_front() {
                // Send any pending acknowledgements now, because this device may not be driven
                // again for some time.
                pump(&mut self.dev);
                return said;
            }
            assert!(!self.closed, "the connection ended");
            pump(&mut self.dev);
        }
        panic!("nothing was said");
    }

    fn status(&mut self, tag: u32, pump: Pump<'_, P>) -> u8 {
        match self.next(pump).0 {
            FromTarget::ScsiResponse(response) => {
                assert_eq!(response.itt, Itt(tag));
                response.status
            }
            other => panic!("{other:?}"),
        }
    }

    fn scsi(&mut self, tag: u32, cdb: &[u8], writes: bool, len: u32) -> ScsiCommand {
        self.cmd_sn += 1;
        scsi_command(tag, self.cmd_sn - 1, cdb, writes, len)
    }

    /// Advertises the data buffer, starting at this offset.
    fn buffer(&mut self, at: usize) -> Option<RemoteBuffer> {
        let Some(pool) = &mut self.pool else {
            return Some(RemoteBuffer {
                stag: Stag(self.data_mr.rkey.0),
                base: self.data_mr.addr + at as u64,
            });
        };
        let mut mr = pool.get().expect("few commands at once");
        let rest = self.data.slice(at..DATA).unwrap();
        mr.map(&mut self.dev, &[rest]).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let wr = mr.reg_wr(WrId(2 << 32), access);
        self.dev.post_send(self.qp, &[wr]).unwrap();
        let remote = mr.remote();
        self.regions.push(mr);
        Some(RemoteBuffer {
            stag: Stag(remote.rkey.0),
            base: remote.addr,
        })
    }

    /// Sends a write command with `immediate` bytes of immediate data. More data is sent as
    /// unsolicited data up to `first_burst`, and the target will fetch the rest.
    pub fn send_write(
        &mut self,
        tag: u32,
        lba: u32,
        data: &[u8],
        immediate: usize,
        first_burst: usize,
    ) {
        let immediate = immediate.min(data.len());
        let unsolicited = first_burst.min(data.len()).max(immediate);
        let cdb = cdb10(0x2a, lba, (data.len() / 512) as u16);
        let mut command = self.scsi(tag, &cdb, true, data.len() as u32);
        command.is_final = unsolicited == immediate;
        self.data.write(0, data);
        let buffers = Buffers {
            write: match unsolicited < data.len() {
                true => self.buffer(unsolicited),
                false => None,
            },
            read: None,
        };
        let pdu = FromInitiator::ScsiCommand(command);
        self.send(buffers, &pdu, &data[..immediate]);
        let (mut at, mut sn) = (immediate, 0);
        while at < unsolicited {
            // Use an arbitrary size for each packet.
            let end = (at + 3001).min(unsolicited);
            let pdu = DataOut {
                is_final: end == unsolicited,
                lun: [0; 8],
                itt: Itt(tag),
                ttt: Ttt::NONE,
                exp_stat_sn: StatSn(0),
                data_sn: sn,
                offset: at as u32,
            };
            let pdu = FromInitiator::DataOut(pdu);
            self.send(Buffers::default(), &pdu, &data[at..end]);
            (at, sn) = (end, sn + 1);
        }
    }

    /// Same as [`Client::send_write`], but waits for the response.
    pub fn write(
        &mut self,
        lba: u32,
        data: &[u8],
        immediate: usize,
        first_burst: usize,
        pump: Pump<'_, P>,
    ) -> u8 {
        self.send_write(77, lba, data, immediate, first_burst);
        self.status(77, pump)
    }

    /// Sends a read command.
    pub fn send_read(&mut self, tag: u32, lba: u32, blocks: u16) {
        let len = u32::from(blocks) * 512;
        let command = self.scsi(tag, &cdb10(0x28, lba, blocks), false, len);
        let buffers = Buffers {
            write: None,
            read: self.buffer(READ_AT),
        };
        self.send(buffers, &FromInitiator::ScsiCommand(command), &[]);
    }

    /// Reads blocks and returns the status and data.
    pub fn read(&mut self, lba: u32, blocks: u16, pump: Pump<'_, P>) -> (u8, Vec<u8>) {
        let len = usize::from(blocks) * 512;
        self.send_read(78, lba, blocks);
        let status = self.status(78, pump);
        let read = self.data.slice(READ_AT..READ_AT + len).unwrap();
        (status, read.to_vec())
    }

    /// Sends a command with the given CDB. The target either fetches the data in `out` or returns
    /// up to `len` bytes. Returns the status and the data, or the sense data.
    pub fn command(
        &mut self,
        cdb: &[u8],
        out: &[u8],
        len: u32,
        pump: Pump<'_, P>,
    ) -> (u8, Vec<u8>) {
        let moved = len + out.len() as u32;
        let command = self.scsi(76, cdb, !out.is_empty(), moved);
        self.data.write(0, out);
        let buffers = match (out.len(), len) {
            (0, 0) => Buffers::default(),
            (0, _) => Buffers {
                write: None,
                read: self.buffer(READ_AT),
            },
            _ => Buffers {
                write: self.buffer(0),
                read: None,
            },
        };
        self.send(buffers, &FromInitiator::ScsiCommand(command), &[]);
        match self.next(pump) {
            (FromTarget::ScsiResponse(response), _) if response.status == 0 => {
                let read = self.data.slice(READ_AT..READ_AT + len as usize);
                (0, read.expect("within the memory").to_vec())
            }
            // Sense data is sent after its length (RFC 7143 11.4.7.2).
            (FromTarget::ScsiResponse(response), data) => {
                (response.status, data.get(2..).unwrap_or_default().to_vec())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Clears the unit attention of a new nexus.
    pub fn clear_unit_attention(&mut self, pump: Pump<'_, P>) {
        for status in [2, 0] {
            let command = self.scsi(79, &[0; 6], false, 0);
            let pdu = FromInitiator::ScsiCommand(command);
            self.send(Buffers::default(), &pdu, &[]);
            assert_eq!(self.status(79, pump), status);
        }
    }

    /// Requests a list of all targets in a discovery session.
    pub fn send_targets(&mut self, pump: Pump<'_, P>) -> Vec<u8> {
        let (request, out) = crate::pdus::send_targets(self.cmd_sn);
        let pdu = FromInitiator::TextRequest(request);
        self.send(Buffers::default(), &pdu, &out);
        match self.next(pump) {
            (FromTarget::TextResponse(_), text) => text,
            other => panic!("{other:?}"),
        }
    }

    /// Resets LUN 0.
    pub fn reset_unit(&mut self, pump: Pump<'_, P>) -> TmfStatus {
        let request = TmfRequest {
            immediate: true,
            function: TmfFunction::LogicalUnitReset,
            lun: [0; 8],
            itt: Itt(82),
            referenced: Itt::NONE,
            cmd_sn: CmdSn(self.cmd_sn),
            exp_stat_sn: StatSn(0),
            ref_cmd_sn: CmdSn(0),
            exp_data_sn: 0,
        };
        let pdu = FromInitiator::TmfRequest(request);
        self.send(Buffers::default(), &pdu, &[]);
        match self.next(pump).0 {
            FromTarget::TmfResponse(response) => response.status,
            other => panic!("expected a function response, not {other:?}"),
        }
    }

    /// Logs out and waits until the connection is closed.
    pub fn logout(&mut self, pump: Pump<'_, P>) {
        self.begin_logout(pump);
        self.wait_closed(pump);
    }

    /// Logs out, but doesn't disconnect. This must be done by the caller.
    pub fn begin_logout(&mut self, pump: Pump<'_, P>) {
        let request = LogoutRequest {
            immediate: true,
            reason: LogoutReason::CloseSession,
            itt: Itt(81),
            cid: Cid(0),
            cmd_sn: CmdSn(self.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        let pdu = FromInitiator::LogoutRequest(request);
        self.send(Buffers::default(), &pdu, &[]);
        let (FromTarget::LogoutResponse(_), _) = self.next(pump) else {
            panic!("expected a logout response");
        };
    }

    /// Waits until the connection is closed.
    pub fn wait_closed(&mut self, pump: Pump<'_, P>) {
        for _ in 0..2_000_000 {
            self.poll();
            if self.closed {
                return;
            }
            pump(&mut self.dev);
        }
        panic!("the connection did not end");
    }

    /// Disconnects and releases the device.
    pub fn disconnect(mut self, pump: Pump<'_, P>) {
        let _ = self.dev.disconnect(self.cm);
        for _ in 0..100_000 {
            self.poll();
            if self.closed {
                break;
            }
            pump(&mut self.dev);
        }
        // Until now, a late response may invalidate a region.
        for mr in std::mem::take(&mut self.regions) {
            self.put(mr);
        }
        let _ = self.dev.destroy_qp(self.qp);
        let _ = self.dev.destroy_id(self.cm);
        let _ = self.dev.destroy_cq(self.cq);
        for _ in 0..100 {
            pump(&mut self.dev);
        }
    }
}
