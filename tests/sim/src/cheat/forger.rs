//! Packets in the name of an initiator, with one number or more that its own do not have.
//!
//! A target can only look at what is in a packet, so a packet that is right in all must be taken
//! for the initiator's: ids, queue pairs and sequence numbers are its protection. With any of them
//! wrong, a packet may have no effect on a connection, even if all else is right.

use std::net::SocketAddr;
use std::time::Instant;

use fastrand::Rng;
use riser_transport::loopback::Fabric;
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, ExtHeaders, IcrcFlow, Msn, Opcode, Psn, Qpn, ROCE_PORT, Reth,
    emit_headers,
};

use super::overheard::{COMM_ID, Host, MAD};
use super::{Act, CheatPlan, Overheard, Pace, Surroundings};

/// Places in a MAD: the attribute, the receiver's id, and the queue pair of a DREQ's receiver.
const ATTRIBUTE: usize = MAD + 16;
const REMOTE_ID: usize = MAD + 28;
const REMOTE_QPN: usize = MAD + 32;

/// Places in the MAD of a REQ: the service, and the GUID of the adapter.
const SERVICE: usize = MAD + 32;
const GUID: usize = MAD + 40;

/// A peer that forges packets of another.
#[derive(Debug)]
pub struct Forger {
    pace: Pace,
    fabric: Fabric,
    overheard: Overheard,
    victim: u8,
}

impl Forger {
    pub(super) fn new(plan: CheatPlan, world: &Surroundings, rng: Rng) -> Self {
        Self {
            pace: Pace::new(plan, rng, world.fabric.now()),
            fabric: world.fabric.clone(),
            overheard: world.overheard.clone(),
            victim: world.host(plan.aim.victim().unwrap_or_default()),
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.pace.next()
    }

    pub(super) fn step(&mut self, now: Instant) -> bool {
        let mut worked = false;
        while let Some(act) = self.pace.act(now) {
            // Of another that uses RDMA, if its victim does not.
            let of_rdma = |host: &Host| host.request.is_some().then(|| host.clone());
            if let (Act::Message, Some(host)) = (act, self.overheard.stolen(self.victim, of_rdma)) {
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

/// The initiator's own request with another id. The queue pair is that of its connection, so its
/// adapter could have forgotten that one.
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

/// The end of a connection, of which an id is a guess.
fn disconnection(host: &Host, rng: &mut Rng) -> Option<Vec<u8>> {
    let mut packet = host.request.clone()?;
    packet[ATTRIBUTE + 1] = 0x15;
    packet[REMOTE_ID..REMOTE_ID + 4].copy_from_slice(&rng.u32(..).to_be_bytes());
    let qpn = host.qpns[0]?.value();
    packet[REMOTE_QPN..REMOTE_QPN + 3].copy_from_slice(&qpn.to_be_bytes()[1..]);
    Some(packet)
}

/// A packet to a queue pair of the target, which is not the initiator's, or whose sequence number
/// is far from those that it could have. One that is spoilt may have the right ones.
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
