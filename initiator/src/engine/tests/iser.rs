//! iSER sessions, with a target played by the test.

use riser_memory::Memory;
use riser_scsi::iscsi::BHS_LEN;
use riser_scsi::iser::{Buffers, HEADER_LEN, put_control};
use riser_transport::loopback::Blocked;
use riser_transport::verbs::{
    Access, CmEventKind, ConnParam, CqId, Mr, PdId, PortSpace, Provider, QpCap, QpId, QpInitAttr,
    QpType, RdmaCm, RecvWr, SendOp, SendWr, Sge, Verbs, WrId,
};

use super::*;
use crate::url::IscsiUrl;

/// Maximum length of a message.
pub(super) const MESSAGE: u32 = 8192;
const PATIENCE: Duration = Duration::from_secs(20);

/// A target's device, with memory for a receive and a message to send.
pub(super) struct Peer {
    pub(super) nic: Endpoint,
    pd: PdId,
    pub(super) cq: CqId,
    pub(super) memory: Memory,
    mr: Mr,
}

impl Peer {
    /// Listens on these ports.
    pub(super) fn new(ports: &[u16]) -> Self {
        let ip = world::address();
        let mut nic = world::fabric().endpoint(ip);
        for port in ports {
            let listener = nic.create_id(PortSpace::Tcp).unwrap();
            nic.bind_addr(listener, (ip, *port).into()).unwrap();
            nic.listen(listener, 4).unwrap();
        }
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(8).unwrap();
        let memory = Memory::new(2 * MESSAGE as usize).unwrap();
        let mr = nic.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE);
        Self {
            mr: mr.unwrap(),
            nic,
            pd,
            cq,
            memory,
        }
    }

    /// Returns a segment: the receive is at 0, the message at [`MESSAGE`].
    pub(super) fn sge(&self, at: u32, length: u32) -> Sge {
        Sge {
            addr: self.mr.addr + u64::from(at),
            length,
            lkey: self.mr.lkey,
        }
    }

    /// Waits until `look` returns a value.
    pub(super) fn wait<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut Self) -> Option<T>,
    ) -> T {
        let until = world::now() + PATIENCE;
        loop {
            self.nic.progress(world::now());
            if let Some(found) = look(self) {
                return found;
            }
            assert!(world::now() < until, "not in time: {what}");
            world::step(self.nic.deadline());
        }
    }

    /// Accepts the next connection and receives its first message.
    pub(super) fn accept(&mut self) -> (QpId, Vec<u8>) {
        let id = self.wait("a request for a connection", |peer| {
            let event = peer.nic.poll_cm_event()?;
            matches!(event.kind, CmEventKind::ConnectRequest { .. }).then_some(event.id)
        });
        let init = QpInitAttr::new(self.pd, self.cq, QpType::Rc, QpCap::new(2, 2));
        let qp = self.nic.create_cm_qp(id, &init).unwrap();
        self.post_recv(qp);
        let param = ConnParam {
            responder_resources: 4,
            initiator_depth: 4,
            ..ConnParam::default()
        };
        self.nic.accept(id, &param).unwrap();
        let message = self.wait("a login request", |peer| peer.poll(qp));
        (qp, message)
    }

    /// Posts the receive.
    pub(super) fn post_recv(&mut self, qp: QpId) {
        let wr = RecvWr {
            wr_id: WrId(0),
            sges: &[self.sge(0, MESSAGE)],
        };
        self.nic.post_recv(qp, &[wr]).unwrap();
    }

    /// Returns a received message, if any.
    pub(super) fn poll(&mut self, qp: QpId) -> Option<Vec<u8>> {
        let mut completions = Vec::new();
        self.nic.poll_cq(self.cq, 8, &mut completions).unwrap();
        let mut received = completions.iter().filter(|c| c.qp == qp);
        let len = received
            .find(|c| c.opcode.is_recv() && c.status.is_ok())
            .map(|c| c.byte_len)?;
        let mut message = vec![0; len as usize];
        self.memory.read(0, &mut message);
        Some(message)
    }

    /// Responds to a login request: the target has moved temporarily (RFC 7143 clause 11.13.5).
    fn redirect(&mut self, qp: QpId, request: &[u8], to: &str) {
        let request = &request[HEADER_LEN..];
        let mut bhs = [0; BHS_LEN];
        bhs[0] = 0x23;
        bhs[8..14].copy_from_slice(&request[8..14]);
        bhs[16..20].copy_from_slice(&request[16..20]);
        (bhs[36], bhs[37]) = (1, 1);
        let text = format!("TargetAddress={to}\0");
        let mut message = Vec::new();
        put_control(Buffers::default(), bhs, &[], text.as_bytes(), &mut message);
        self.memory.write(MESSAGE as usize, &message);
        let sges = [self.sge(MESSAGE, message.len() as u32)];
        let wr = SendWr::new(1, SendOp::Send, &sges);
        self.nic.post_send(qp, &[wr]).unwrap();
    }
}

/// The redirecting response is in a receive of the connection that it closes. The next connection
/// is started while this receive is being handled, and does not have a queue pair to post it to
/// yet.
#[test]
fn iser_redirection_opens_new_connection() {
    let mut peer = Peer::new(&[3260, 3261]);
    let ip = peer.nic.addr();
    let client = client();
    let url = format!("iser://{ip}/iqn.2026-01.com.example:disk/0");
    let url: IscsiUrl = url.parse().unwrap();
    let connecting = begin(client.connect(&url));
    let (qp, request) = peer.accept();
    peer.redirect(qp, &request, &format!("{ip}:3261,1"));
    let (second, request) = peer.accept();
    assert_ne!(second, qp);
    assert_eq!(request[HEADER_LEN] & 0x3f, 0x03, "a login request");
    // Its receives are posted: the session receives the response, and returns to the first portal.
    peer.redirect(second, &request, &format!("{ip}:3260,1"));
    let (third, _) = peer.accept();
    assert_ne!(third, second);
    client.shutdown();
    let ended = block_on(connecting).unwrap_err();
    assert!(matches!(ended, EngineError::Login(Down::Closed)), "{ended}");
}

/// The session probes the target's device while a login waits for its response.
#[test]
fn vanished_target_is_detected() {
    let mut peer = Peer::new(&[3260]);
    let ip = peer.nic.addr();
    let client = client();
    let url = format!("iser://{ip}/iqn.2026-01.com.example:disk/0");
    let url: IscsiUrl = url.parse().unwrap();
    let connecting = begin(client.connect(&url));
    peer.accept();
    let begun = world::now();
    let gone = Blocked {
        inbound: true,
        outbound: true,
    };
    world::fabric().partition(ip, gone);
    assert!(block_on(connecting).is_err());
    let took = world::now() - begun;
    assert!(took < Duration::from_secs(5), "{took:?}");
    client.shutdown();
}
