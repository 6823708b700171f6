//! Forges packets in the name of an initiator, with at least one wrong number.
//!
//! A target can only check the contents of a packet, so it must accept a packet from this address
//! if everything is correct. It's protected by communication IDs, QP numbers and PSNs: if any of
//! these is wrong, the packet must not affect a connection, even if all other fields are correct.

use std::net::SocketAddr;
use std::time::Instant;

use fastrand::Rng;
use riser_transport::loopback::Fabric;
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, ExtHeaders, IcrcFlow, Msn, Opcode, Psn, Qpn, ROCE_PORT, Reth,
    emit_headers,
};

use super::sniffer::{COMM_ID, Host, MAD};
use super::{Act, CheatPlan, Pace, Sniffer, Surroundings};

/// Offsets in a MAD: attribute ID, remote communication ID, and remote QPN in a DREQ.
const ATTRIBUTE: usize = MAD + 16;
const REMOTE_ID: usize = MAD + 28;
const REMOTE_QPN: usize = MAD + 32;

/// Offsets in the MAD of a REQ: service ID, and the GUID of the adapter.
const SERVICE: usize = MAD + 32;
const GUID: usize = MAD + 40;

/// A peer that forges packets of an initiator.
#[derive(Debug)]
pub struct Forger {
    pace: Pace,
    fabric: Fabric,
    sniffer: Sniffer,
    victim: u8,
}

impl Forger {
    pub(super) fn new(plan: CheatPlan, world: &Surroundings, rng: Rng) -> Self {
        Self {
            pace: Pace::new(plan, rng, world.fabric.now()),
            fabric: world.fabric.clone(),
            sniffer: world.sniffer.clone(),
            victim: world.host(plan.aim.victim().unwrap_or_default()),
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.pace.next()
    }

    pub(super) fn step(&mut self, now: Instant) -> bool {
        let mut worked = false;
        while let Some(act) = self.pace.act(now) {
            // Uses another initiator if the victim has no RDMA connection.
            let of_rdma = |host: &Host| host.request.is_some().then(|| host.clone());
            if let (Act::Message, Some(host)) = (act, self.sniffer.stolen(self.victim, of_rdma)) {
                self.forge(&host);
            }
            worked = true;
        }
        worked
    }

    fn forge(&mut self, host: &Host) {
        let (Some(address), Some(target)) = (host.address, host.target) else {
            return;
        };
        let from = SocketAddr::new(address, ROCE_PORT);
        let to = SocketAddr::new(target, ROCE_PORT);
        let flow = IcrcFlow::new(from, to).expect("two addresses of IPv4");
        let rng = &mut self.pace.rng;
        let is_spoilt = rng.u8(..8) == 0;
        let packet = match rng.u8(..4) {
            0 => request(host, rng),
            1 => disconnection(host, rng),
            _ => of_connection(host, is_spoilt, rng),
        };
        if let Some(mut packet) = packet {
            let icrc = flow.compute(&packet, 0) ^ u32::from(is_spoilt);
            packet.extend_from_slice(&icrc.to_le_bytes());
            self.fabric.inject(from, to, packet);
        }
    }
}

/// Returns the initiator's own REQ with another communication ID. It has the QPN of the existing
/// connection, which the adapter could therefore drop by mistake.
fn request(host: &Host, rng: &mut Rng) -> Option<Vec<u8>> {
    let mut packet = host.request.clone()?;
    let id = MAD + COMM_ID;
    packet[id..id + 4].copy_from_slice(&rng.u32(1..).to_be_bytes());
    match rng.u8(..4) {
        0 => packet[SERVICE + 7] ^= 1 << rng.u8(..8),
        1 => packet[GUID + 7] ^= 1 << rng.u8(..8),
        _ => {}
    }
    Some(packet)
}

/// Returns a DREQ with a guessed communication ID.
fn disconnection(host: &Host, rng: &mut Rng) -> Option<Vec<u8>> {
    let mut packet = host.request.clone()?;
    packet[ATTRIBUTE + 1] = 0x15;
    packet[REMOTE_ID..REMOTE_ID + 4].copy_from_slice(&rng.u32(..).to_be_bytes());
    let qpn = host.qpns[0]?.value();
    packet[REMOTE_QPN..REMOTE_QPN + 3].copy_from_slice(&qpn.to_be_bytes()[1..]);
    Some(packet)
}

/// Returns a packet to a QP of the target with a wrong QPN, or with a PSN far outside the window.
/// If the packet is corrupted, both may be correct.
fn of_connection(host: &Host, is_spoilt: bool, rng: &mut Rng) -> Option<Vec<u8>> {
    let (qpn, psn) = (host.qpns[0]?, host.psns[1]?);
    let far = rng.u32(1 << 16..(1 << 24) - (1 << 16));
    let (qpn, psn) = match (is_spoilt, rng.bool()) {
        (true, _) => (qpn, psn.wrapping_add(1)),
        (false, true) => (qpn, psn.wrapping_add(far)),
        (false, false) => (
            Qpn::new(qpn.value() ^ 1 << rng.u32(..24)),
            psn.wrapping_add(far),
        ),
    };
    let reth = Reth::new(rng.u64(..), rng.u32(..), rng.u32(..1 << 16));
    let aeth = Aeth::new(
        AethSyndrome::from_wire([0x00, 0x1f, 0x20, 0x60, 0x62][rng.usize(..5)]),
        Msn::new(rng.u32(..1 << 24)),
    );
    let (opcode, reth, aeth) = match rng.u8(..4) {
        0 => (Opcode::RcSendOnly, None, None),
        1 => (Opcode::RcWriteOnly, Some(reth), None),
        2 => (Opcode::RcReadRequest, Some(reth), None),
        _ => (Opcode::RcAcknowledge, None, Some(aeth)),
    };
    let ext = ExtHeaders {
        reth,
        aeth,
        ..ExtHeaders::default()
    };
    let bth = Bth::new(opcode, qpn, Psn::new(psn & 0xff_ffff));
    Some(emit_headers(&bth, &ext).to_vec())
}
