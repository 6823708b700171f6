//! The RDMA device of a node: queue pairs, their buffers, and transfers.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use riser_memory::{MemSlice, Memory};
use riser_transport::loopback::{Endpoint, Fabric};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, PdId, PortSpace, Provider as _,
    QpCap, QpId, QpInitAttr, QpType, RKey, RdmaCm as _, RecvWr, RemoteAddr, SendOp, SendWr, Sge,
    Verbs as _, WrId,
};

/// Receive buffers of a queue pair.
const RECVS: usize = 64;

/// Length of a receive buffer.
pub(super) const RECV_LEN: usize = 9 << 10;

/// Work requests in the send queue of a queue pair.
const SENDS: u32 = 1024;

/// A location in the memory of an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) addr: u64,
    pub(super) key: u32,
}

/// A work request.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Send(Vec<u8>),
    Write(Remote, Vec<u8>),
    /// Reads this number of bytes. The last value identifies the request.
    Read(Remote, usize, u64),
}

/// An event of the device.
#[derive(Debug)]
pub(super) enum Event {
    /// A peer requests a connection, with this private data.
    Request(CmId, Vec<u8>),
    /// A message was received.
    Message(QpId, Vec<u8>),
    /// An RDMA READ has completed.
    Fetched(QpId, u64, Vec<u8>),
    /// The connection is broken or closed.
    Closed(QpId),
}

#[derive(Debug)]
struct QueuePair {
    cm: CmId,
    qp: QpId,
    memory: MemSlice,
    mr: Mr,
}

/// A work request in a send queue, and its memory.
#[derive(Debug)]
struct Transfer {
    qp: QpId,
    memory: MemSlice,
    mr: Mr,
    /// Identifies an RDMA READ, with its length.
    read: Option<(u64, usize)>,
}

#[derive(Debug)]
pub(super) struct Device {
    nic: Endpoint,
    at: SocketAddr,
    pd: PdId,
    cq: CqId,
    listener: Option<CmId>,
    queue_pairs: Vec<QueuePair>,
    transfers: BTreeMap<u64, Transfer>,
    posted: u64,
    events: VecDeque<Event>,
}

impl Device {
    pub(super) fn new(fabric: &Fabric, at: SocketAddr) -> Self {
        let mut nic = fabric.endpoint(at.ip());
        let pd = nic.alloc_pd().expect("a new device");
        let cq = nic.create_cq(16 << 10).expect("a new device");
        let mut device = Self {
            nic,
            at,
            pd,
            cq,
            listener: None,
            queue_pairs: Vec::new(),
            transfers: BTreeMap::new(),
            posted: 0,
            events: VecDeque::new(),
        };
        device.listen(true);
        device
    }

    /// Starts or stops accepting connections.
    pub(super) fn listen(&mut self, is_listening: bool) {
        match (self.listener, is_listening) {
            (None, true) => {
                let listener = self.nic.create_id(PortSpace::Tcp).expect("an identifier");
                self.nic.bind_addr(listener, self.at).expect("a free port");
                self.nic.listen(listener, 8).expect("a listener");
                self.listener = Some(listener);
            }
            (Some(listener), false) => {
                self.listener = None;
                let _ = self.nic.destroy_id(listener);
            }
            _ => {}
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.nic.deadline()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue_pairs.is_empty()
    }

    /// Drives the device, which acknowledges packets even if its node is hanging.
    pub(super) fn progress(&mut self, now: Instant) -> bool {
        self.nic.progress(now) > 0
    }

    /// Returns the next event.
    pub(super) fn poll(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            self.poll_completions();
            self.poll_cm();
        }
        self.events.pop_front()
    }

    fn poll_completions(&mut self) {
        let mut completions: Vec<Completion> = Vec::new();
        self.nic
            .poll_cq(self.cq, 256, &mut completions)
            .expect("a queue");
        for completion in completions {
            let qp = completion.qp;
            if completion.opcode.is_recv() {
                let slot = completion.wr_id.0 as usize;
                if !completion.status.is_ok() || self.find(qp).is_none() {
                    continue;
                }
                let mut message = vec![0; completion.byte_len as usize];
                let pair = &self.queue_pairs[self.find(qp).expect("found above")];
                pair.memory.read(slot * RECV_LEN, &mut message);
                self.post_recv(qp, slot);
                self.events.push_back(Event::Message(qp, message));
                continue;
            }
            let Some(transfer) = self.transfers.remove(&completion.wr_id.0) else {
                continue;
            };
            self.nic.dereg_mr(transfer.mr.id).expect("an unused region");
            if !completion.status.is_ok() {
                self.events.push_back(Event::Closed(qp));
            } else if let Some((token, len)) = transfer.read {
                let mut data = vec![0; len];
                transfer.memory.read(0, &mut data);
                self.events.push_back(Event::Fetched(qp, token, data));
            }
        }
    }

    fn poll_cm(&mut self) {
        while let Some(event) = self.nic.poll_cm_event() {
            match event.kind {
                CmEventKind::ConnectRequest { param, .. } => {
                    let request = Event::Request(event.id, param.private_data);
                    self.events.push_back(request);
                }
                CmEventKind::Established { .. } => {}
                _ => {
                    let mut pairs = self.queue_pairs.iter();
                    match pairs.find(|pair| pair.cm == event.id) {
                        Some(pair) => self.events.push_back(Event::Closed(pair.qp)),
                        None if self.listener != Some(event.id) => {
                            let _ = self.nic.destroy_id(event.id);
                        }
                        None => {}
                    }
                }
            }
        }
    }

    fn find(&self, qp: QpId) -> Option<usize> {
        self.queue_pairs.iter().position(|pair| pair.qp == qp)
    }

    /// Returns whether the peer has closed a connection, even if its node has not processed this
    /// yet.
    pub(super) fn is_closed(&mut self, qp: QpId) -> bool {
        self.poll_completions();
        self.poll_cm();
        let is_notice = |event: &Event| matches!(event, Event::Closed(at) if *at == qp);
        self.events.iter().any(is_notice)
    }

    /// Creates the queue pair of a requested connection and accepts it.
    pub(super) fn accept(&mut self, cm: CmId, private_data: Vec<u8>) -> Option<QpId> {
        let cap = QpCap::new(SENDS, RECVS as u32);
        let init = QpInitAttr {
            sq_sig_all: true,
            ..QpInitAttr::new(self.pd, self.cq, QpType::Rc, cap)
        };
        // The initiator may have withdrawn its request.
        let Ok(qp) = self.nic.create_cm_qp(cm, &init) else {
            let _ = self.nic.destroy_id(cm);
            return None;
        };
        let (memory, mr) = self.region(RECVS * RECV_LEN);
        self.queue_pairs.push(QueuePair { cm, qp, memory, mr });
        for slot in 0..RECVS {
            self.post_recv(qp, slot);
        }
        let param = ConnParam {
            private_data,
            ..ConnParam::default()
        };
        if self.nic.accept(cm, &param).is_err() {
            self.close(qp, false);
            return None;
        }
        Some(qp)
    }

    /// Refuses a requested connection.
    pub(super) fn reject(&mut self, cm: CmId) {
        let _ = self.nic.reject(cm, &[]);
        let _ = self.nic.destroy_id(cm);
    }

    /// Closes a connection, with or without a notice to the peer.
    pub(super) fn close(&mut self, qp: QpId, is_announced: bool) {
        let Some(index) = self.find(qp) else {
            return;
        };
        let pair = self.queue_pairs.remove(index);
        if is_announced {
            let _ = self.nic.disconnect(pair.cm);
        }
        self.nic.destroy_qp(qp).expect("a queue pair");
        let _ = self.nic.destroy_id(pair.cm);
        self.nic.dereg_mr(pair.mr.id).expect("an unused region");
        let is_its = |_: &u64, transfer: &mut Transfer| transfer.qp == qp;
        for (_, transfer) in self.transfers.extract_if(.., is_its) {
            self.nic.dereg_mr(transfer.mr.id).expect("an unused region");
        }
        self.events.retain(|event| match event {
            Event::Request(..) => true,
            Event::Message(at, _) | Event::Fetched(at, ..) | Event::Closed(at) => *at != qp,
        });
    }

    fn region(&mut self, len: usize) -> (MemSlice, Mr) {
        let memory = Memory::new(len).expect("memory").whole();
        let mr = self.nic.reg_mr(self.pd, &memory, Access::LOCAL_WRITE);
        (memory, mr.expect("a region"))
    }

    fn post_recv(&mut self, qp: QpId, slot: usize) {
        let Some(index) = self.find(qp) else {
            return;
        };
        let pair = &self.queue_pairs[index];
        let sges = [Sge {
            addr: pair.mr.addr + (slot * RECV_LEN) as u64,
            length: RECV_LEN as u32,
            lkey: pair.mr.lkey,
        }];
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &sges,
        };
        let _ = self.nic.post_recv(qp, &[wr]);
    }

    /// Posts a work request, which is not executed if the connection is broken.
    pub(super) fn post(&mut self, qp: QpId, work: Work) {
        let remote = |remote: Remote| RemoteAddr {
            addr: remote.addr,
            rkey: RKey(remote.key),
        };
        let (op, data, read) = match work {
            Work::Send(data) => (SendOp::Send, data, None),
            Work::Write(to, data) => (SendOp::Write(remote(to)), data, None),
            Work::Read(from, len, token) => {
                (SendOp::Read(remote(from)), vec![0; len], Some((token, len)))
            }
        };
        let (memory, mr) = self.region(data.len().max(1));
        memory.write(0, &data);
        let sges = [Sge {
            addr: mr.addr,
            length: data.len() as u32,
            lkey: mr.lkey,
        }];
        self.posted += 1;
        match self
            .nic
            .post_send(qp, &[SendWr::new(self.posted, op, &sges)])
        {
            Ok(()) => {
                let transfer = Transfer {
                    qp,
                    memory,
                    mr,
                    read,
                };
                self.transfers.insert(self.posted, transfer);
            }
            Err(_) => self.nic.dereg_mr(mr.id).expect("an unused region"),
        }
    }
}
