//! A host of the attacker that is allowed to log in. It can use many connections at the same time.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, ConnParam, CqId, Mr, PdId, PortSpace, Provider as _, QpCap, QpId,
    QpInitAttr, QpType, RdmaCm as _, RecvWr, SendOp, SendWr, Sge, Verbs as _, WcStatus, WrId,
};

use super::net::{STRANGER, TARGET};

/// Timeout for responses that are needed to select the next message.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of connections at the same time.
pub(crate) const PARALLEL: usize = 32;

/// Maximum message size in bytes.
const SLOT: usize = 16 << 10;
/// Number of messages in flight on a connection, in each direction.
const SENDS: usize = 4;
const RECEIVES: usize = 16;
const SEND: WrId = WrId(1 << 32);

/// A device, including the memory for messages on its connections.
pub(crate) struct Host {
    dev: Roce,
    pd: PdId,
    memory: MemSlice,
    mr: Mr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Connecting,
    Open,
    /// The target has rejected or closed this connection.
    Ended,
}

/// A connection to the target.
pub(crate) struct Connection {
    pub(crate) state: State,
    /// Number of messages posted, number of these acknowledged by the target's queue pair, and
    /// number of messages received from the target.
    pub(crate) sent: u64,
    pub(crate) acknowledged: u64,
    pub(crate) received: u64,
    /// Index of its memory.
    place: usize,
    private_data: Vec<u8>,
    cm: CmId,
    cq: CqId,
    qp: Option<QpId>,
}

impl Host {
    /// Must be called in the attacker's namespace.
    pub(crate) fn new() -> Self {
        let mut dev = Roce::open(&RoceConfig::new(IpAddr::V4(STRANGER))).unwrap();
        let pd = dev.alloc_pd().unwrap();
        let memory = Memory::new(SLOT * (SENDS + RECEIVES) * PARALLEL);
        let memory = memory.unwrap().whole();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = dev.reg_mr(pd, &memory, access).unwrap();
        Self {
            dev,
            pd,
            memory,
            mr,
        }
    }

    /// Starts to connect, using the memory with this index, which must be less than [`PARALLEL`].
    pub(crate) fn begin(&mut self, place: usize, port: u16, private_data: Vec<u8>) -> Connection {
        let cm = self.dev.create_id(PortSpace::Tcp).unwrap();
        let to = SocketAddr::new(TARGET.into(), port);
        self.dev
            .resolve_addr(cm, None, to, RESPONSE_TIMEOUT)
            .unwrap();
        Connection {
            state: State::Connecting,
            sent: 0,
            acknowledged: 0,
            received: 0,
            place,
            private_data,
            cm,
            cq: self.dev.create_cq(64).unwrap(),
            qp: None,
        }
    }

    /// Tries to connect. There must not be any other connection.
    pub(crate) fn connect(&mut self, port: u16, private_data: Vec<u8>) -> Connection {
        let mut connection = self.begin(0, port, private_data);
        let until = Instant::now() + RESPONSE_TIMEOUT;
        while connection.state == State::Connecting && Instant::now() < until {
            self.drive(&mut [&mut connection]);
        }
        connection
    }

    /// Drives the device and processes events for these connections.
    pub(crate) fn drive(&mut self, connections: &mut [&mut Connection]) {
        if self.dev.progress(Instant::now()) == 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
        while let Some(event) = self.dev.poll_cm_event() {
            // Ignore events for connections that have been closed.
            if let Some(connection) = connections.iter_mut().find(|c| c.cm == event.id) {
                self.heed(connection, &event.kind);
            }
        }
        let mut done = Vec::new();
        for connection in connections {
            done.clear();
            let _ = self.dev.poll_cq(connection.cq, 64, &mut done);
            for completion in &done {
                if !completion.status.is_ok() {
                    connection.state = State::Ended;
                } else if completion.opcode.is_recv() {
                    connection.received += 1;
                    self.post_recv(connection, completion.wr_id.0 as usize);
                } else {
                    connection.acknowledged += 1;
                }
            }
        }
    }

    fn heed(&mut self, connection: &mut Connection, event: &CmEventKind) {
        match event {
            CmEventKind::AddrResolved => self
                .dev
                .resolve_route(connection.cm, RESPONSE_TIMEOUT)
                .unwrap(),
            CmEventKind::RouteResolved => self.send_request(connection),
            CmEventKind::Established { .. } => connection.state = State::Open,
            CmEventKind::TimewaitExit => {}
            _ => connection.state = State::Ended,
        }
    }

    /// Sends the connection request.
    fn send_request(&mut self, connection: &mut Connection) {
        let cap = QpCap::new(SENDS as u32, RECEIVES as u32);
        let init = QpInitAttr::new(self.pd, connection.cq, QpType::Rc, cap);
        connection.qp = Some(self.dev.create_cm_qp(connection.cm, &init).unwrap());
        for slot in 0..RECEIVES {
            self.post_recv(connection, slot);
        }
        let param = ConnParam {
            private_data: std::mem::take(&mut connection.private_data),
            initiator_depth: 1,
            ..ConnParam::default()
        };
        self.dev.connect(connection.cm, &param).unwrap();
    }

    /// Returns the offset of a message in memory. The send buffers are first, followed by the
    /// receive buffers.
    fn offset(connection: &Connection, slot: usize) -> usize {
        (connection.place * (SENDS + RECEIVES) + slot) * SLOT
    }

    fn sge(&self, connection: &Connection, slot: usize, len: usize) -> [Sge; 1] {
        [Sge {
            addr: self.memory.addr() + Self::offset(connection, slot) as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }]
    }

    fn post_recv(&mut self, connection: &Connection, slot: usize) {
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &self.sge(connection, SENDS + slot, SLOT),
        };
        // A queue pair in the error state will reject this.
        let _ = self
            .dev
            .post_recv(connection.qp.expect("a queue pair"), &[wr]);
    }

    /// Posts a message on an open connection, where other messages may be in flight.
    pub(crate) fn send(&mut self, connection: &mut Connection, message: &[u8]) {
        let message = &message[..message.len().min(SLOT)];
        let slot = connection.sent as usize % SENDS;
        self.memory.write(Self::offset(connection, slot), message);
        let sge = self.sge(connection, slot, message.len());
        let wr = SendWr::new(SEND.0, SendOp::Send, &sge);
        match self
            .dev
            .post_send(connection.qp.expect("a queue pair"), &[wr])
        {
            Ok(()) => connection.sent += 1,
            Err(_) => connection.state = State::Ended,
        }
    }

    /// Opens a new connection and returns true if a request was rejected because of an invalid
    /// access.
    pub(crate) fn is_refused(&mut self, port: u16, private_data: Vec<u8>, op: SendOp) -> bool {
        let connection = self.connect(port, private_data);
        assert_eq!(connection.state, State::Open, "a login that is right");
        let sge = self.sge(&connection, 0, 64);
        let request = SendWr::new(7, op, &sge);
        let qp = connection.qp.expect("a queue pair");
        self.dev.post_send(qp, &[request]).unwrap();
        let until = Instant::now() + RESPONSE_TIMEOUT;
        let mut done = Vec::new();
        while done.is_empty() && Instant::now() < until {
            self.drive(&mut []);
            let _ = self.dev.poll_cq(connection.cq, 64, &mut done);
        }
        self.close(connection);
        done.iter()
            .any(|c| c.wr_id == WrId(7) && c.status == WcStatus::RemAccessErr)
    }

    pub(crate) fn close(&mut self, connection: Connection) {
        let _ = self.dev.disconnect(connection.cm);
        self.dev.progress(Instant::now());
        if let Some(qp) = connection.qp {
            let _ = self.dev.destroy_qp(qp);
        }
        let _ = self.dev.destroy_id(connection.cm);
        let _ = self.dev.destroy_cq(connection.cq);
    }
}
