//! Connects two software NICs of this host over UDP, sends messages back and forth with SEND, and
//! prints the round-trip time.
//!
//! ```sh
//! cargo run --release -p riser-transport --example ping
//! ```
//!
//! A thread usually drives a single device. Here, both are driven by one loop, so the program needs
//! no synchronization.

#![allow(clippy::print_stdout, reason = "the result is printed")]

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    Access, CmEvent, CmEventKind, CmId, ConnParam, CqId, Mr, PdId, PortSpace, Provider, QpCap,
    QpId, QpInitAttr, QpType, RdmaCm, RecvOrder, RecvWr, SendOp, SendWr, Verbs, WcOpcode, WcStatus,
    WrId,
};

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const PORT: u16 = 7471;
const LEN: usize = 64;
const ROUNDS: u32 = 10_000;
const TIMEOUT: Duration = Duration::from_secs(2);

/// A device with its objects.
struct Host {
    nic: Roce,
    pd: PdId,
    cq: CqId,
    /// Received messages are stored in the first half, and sent from the second half.
    memory: Memory,
    mr: Mr,
}

impl Host {
    fn open(addr: IpAddr) -> Result<Self, Box<dyn Error>> {
        let mut nic = Roce::open(&RoceConfig::new(addr))?;
        let pd = nic.alloc_pd()?;
        let cq = nic.create_cq(16)?;
        let memory = Memory::new(2 * LEN)?;
        let mr = nic.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE)?;
        Ok(Self {
            nic,
            pd,
            cq,
            memory,
            mr,
        })
    }

    /// Creates a queue pair, which will be connected by the connection manager, and posts a receive
    /// before the peer can send.
    fn create_qp(&mut self, id: CmId) -> Result<QpId, Box<dyn Error>> {
        let init = QpInitAttr {
            pd: self.pd,
            send_cq: self.cq,
            recv_cq: self.cq,
            srq: None,
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
            },
            sq_sig_all: true,
            xrcd: None,
            recv_order: RecvOrder::OldestFirst,
            block_self_mcast: false,
        };
        let qp = self.nic.create_cm_qp(id, &init)?;
        self.post_receive(qp)?;
        Ok(qp)
    }

    fn post_receive(&mut self, qp: QpId) -> Result<(), Box<dyn Error>> {
        let sges = [self.mr.sge(0, LEN)];
        let wr = RecvWr {
            wr_id: WrId(0),
            sges: &sges,
        };
        Ok(self.nic.post_recv(qp, &[wr])?)
    }

    fn send(&mut self, qp: QpId, message: &[u8; LEN]) -> Result<(), Box<dyn Error>> {
        self.memory.write(LEN, message);
        let sges = [self.mr.sge(LEN, LEN)];
        let wr = SendWr::new(1, SendOp::Send, &sges);
        Ok(self.nic.post_send(qp, &[wr])?)
    }
}

/// Drives both devices until one of them returns an event, and checks its type.
fn wait_for_event(
    hosts: [&mut Host; 2],
    is_expected: impl Fn(&CmEventKind) -> bool,
) -> Result<CmEvent, Box<dyn Error>> {
    let [host, peer] = hosts;
    let limit = Instant::now() + TIMEOUT;
    loop {
        let now = Instant::now();
        host.nic.progress(now);
        peer.nic.progress(now);
        match host.nic.poll_cm_event() {
            Some(event) if is_expected(&event.kind) => return Ok(event),
            Some(event) => return Err(format!("unexpected event: {:?}", event.kind).into()),
            None if now > limit => return Err("timed out waiting for an event".into()),
            None => {}
        }
    }
}

/// Drives both devices until the first has received a message.
fn receive(hosts: [&mut Host; 2]) -> Result<[u8; LEN], Box<dyn Error>> {
    let [host, peer] = hosts;
    let limit = Instant::now() + TIMEOUT;
    let mut completions = Vec::new();
    loop {
        let now = Instant::now();
        host.nic.progress(now);
        peer.nic.progress(now);
        host.nic.poll_cq(host.cq, 4, &mut completions)?;
        for completion in completions.drain(..) {
            if completion.status != WcStatus::Success {
                return Err(format!("failed work request: {:?}", completion.status).into());
            }
            if completion.opcode == WcOpcode::Recv {
                let mut message = [0; LEN];
                host.memory.read(0, &mut message);
                return Ok(message);
            }
        }
        if now > limit {
            return Err("timed out waiting for a message".into());
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut client, mut server) = (Host::open(CLIENT)?, Host::open(SERVER)?);

    let listener = server.nic.create_id(PortSpace::Tcp)?;
    server
        .nic
        .bind_addr(listener, SocketAddr::new(SERVER, PORT))?;
    server.nic.listen(listener, 1)?;

    let id = client.nic.create_id(PortSpace::Tcp)?;
    client
        .nic
        .resolve_addr(id, None, SocketAddr::new(SERVER, PORT), TIMEOUT)?;
    wait_for_event([&mut client, &mut server], |kind| {
        *kind == CmEventKind::AddrResolved
    })?;
    client.nic.resolve_route(id, TIMEOUT)?;
    wait_for_event([&mut client, &mut server], |kind| {
        *kind == CmEventKind::RouteResolved
    })?;
    let client_qp = client.create_qp(id)?;
    client.nic.connect(id, &ConnParam::default())?;

    let request = wait_for_event([&mut server, &mut client], |kind| {
        matches!(kind, CmEventKind::ConnectRequest { .. })
    })?;
    let server_qp = server.create_qp(request.id)?;
    server.nic.accept(request.id, &ConnParam::default())?;
    let is_established = |kind: &CmEventKind| matches!(kind, CmEventKind::Established { .. });
    wait_for_event([&mut client, &mut server], is_established)?;
    wait_for_event([&mut server, &mut client], is_established)?;

    let start = Instant::now();
    for round in 0..ROUNDS {
        let mut message = [0; LEN];
        message[..4].copy_from_slice(&round.to_be_bytes());
        client.send(client_qp, &message)?;
        let request = receive([&mut server, &mut client])?;
        server.post_receive(server_qp)?;
        server.send(server_qp, &request)?;
        let reply = receive([&mut client, &mut server])?;
        client.post_receive(client_qp)?;
        if reply != message {
            return Err(format!("reply {round} differs from the message").into());
        }
    }
    let mean = start.elapsed() / ROUNDS;
    println!("{ROUNDS} round trips of {LEN} bytes, mean {mean:?}");
    client.nic.disconnect(id)?;
    Ok(())
}
