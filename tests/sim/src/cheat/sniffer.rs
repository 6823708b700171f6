//! Information that cheating peers have eavesdropped: names, numbers of connections, and complete
//! requests.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memchr::memmem;
use riser_scsi::srp::{InitiatorPortId, LoginReq};
use riser_transport::wire::{Bth, Qpn};

use super::Names;

/// Offset of a MAD in a packet, after BTH and DETH.
pub(super) const MAD: usize = Bth::LEN + 8;

/// Length of a MAD before the ICRC.
const MAD_LEN: usize = 256;
const ICRC: usize = 4;

/// Offsets in a MAD of a REQ: attribute ID, local communication ID, and private data after the RDMA
/// CM header.
const ATTRIBUTE: usize = 16;
pub(super) const COMM_ID: usize = 24;
const SRP_LOGIN: usize = 164 + 36;

/// Offset of a PDU in the packet of an iSER SEND.
const PDU: usize = Bth::LEN + 28;

/// Information for cheating peers from packets and streams, by the last byte of the initiator's
/// address.
#[derive(Clone, Debug, Default)]
pub struct Sniffer(Arc<Mutex<BTreeMap<u8, Host>>>);

/// An initiator or cheating peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Host {
    /// Source address of its last packet.
    pub(super) address: Option<IpAddr>,
    /// Target address of its last packet.
    pub(super) target: Option<IpAddr>,
    /// QPN of the target, and its own QPN.
    pub(super) qpns: [Option<Qpn>; 2],
    /// PSN of the last packet from the target, and from the initiator.
    pub(super) psns: [Option<u32>; 2],
    /// SRP initiator port.
    pub(super) port: Option<InitiatorPortId>,
    /// Names for iSCSI, with the current session.
    pub(super) names: Option<Names>,
    /// Last packet with a REQ.
    pub(super) request: Option<Vec<u8>>,
}

/// Returns the last byte of an address, which is unique.
pub(super) fn host(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(at) => at.octets()[3],
        IpAddr::V6(_) => 0,
    }
}

/// Returns whether this address belongs to the target.
fn is_target(address: IpAddr) -> bool {
    host(address) < 100 && !is_cheat(address)
}

/// Returns whether this address belongs to a cheating peer.
#[must_use]
pub fn is_cheat(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(at) if at.octets()[2] == 2)
}

impl Sniffer {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u8, Host>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns information about an initiator.
    pub(super) fn of(&self, host: u8) -> Option<Host> {
        self.lock().get(&host).cloned()
    }

    /// Returns the wanted information about a victim, or about another initiator if this is not
    /// available.
    pub(super) fn stolen<T>(&self, victim: u8, wanted: impl Fn(&Host) -> Option<T>) -> Option<T> {
        let all = self.lock();
        let its = all.get(&victim).and_then(&wanted);
        its.or_else(|| all.values().find_map(wanted))
    }

    /// Called when a packet is sent by a device.
    pub fn record_packet(&self, from: IpAddr, to: IpAddr, packet: &[u8]) {
        let Some(bth) = packet.first_chunk::<{ Bth::LEN }>() else {
            return;
        };
        let comes = !is_target(from);
        let peer = if comes { from } else { to };
        let mut all = self.lock();
        let known = all.entry(host(peer)).or_default();
        if comes {
            (known.address, known.target) = (Some(from), Some(to));
        }
        let number = |at: usize| u32::from_be_bytes([0, bth[at], bth[at + 1], bth[at + 2]]);
        let (qpn, psn) = (number(5), number(9));
        // Queue pair 1 is used by the CM.
        if qpn > 1 {
            known.qpns[usize::from(!comes)] = Some(Qpn::new(qpn));
            known.psns[usize::from(comes)] = Some(psn);
        }
        match packet {
            _ if !comes || is_cheat(from) => {}
            _ if qpn == 1 => known.record_request(packet),
            // Only SEND, or the first packet of a SEND.
            [0x00 | 0x04, ..] => known.record_login(packet.get(PDU..).unwrap_or_default()),
            _ => {}
        }
    }

    /// Called when data is sent by an initiator or by the target.
    pub fn record_stream(&self, peer: IpAddr, comes: bool, bytes: &[u8]) {
        if is_cheat(peer) {
            return;
        }
        let mut all = self.lock();
        let known = all.entry(host(peer)).or_default();
        if comes {
            return known.record_login(bytes);
        }
        // Login Response to a request of this initiator.
        if let Some(names) = &mut known.names
            && bytes.len() >= 48
            && bytes[0] & 0x3f == 0x23
            && bytes[8..14] == names.isid
        {
            names.tsih = u16::from_be_bytes([bytes[14], bytes[15]]);
        }
    }
}

impl Host {
    /// Parses a MAD to the target.
    fn record_request(&mut self, packet: &[u8]) {
        let Some(mad) = packet.get(MAD..MAD + MAD_LEN) else {
            return;
        };
        const REQ: [u8; 2] = [0, 0x10];
        if mad[1] != 7 || mad[ATTRIBUTE..ATTRIBUTE + 2] != REQ {
            return;
        }
        self.request = Some(packet[..packet.len() - ICRC].to_vec());
        if let Ok(login) = LoginReq::parse_rdma(&mad[SRP_LOGIN..]) {
            self.port = Some(login.initiator_port);
        }
    }

    /// Parses a PDU that may be a Login Request.
    fn record_login(&mut self, pdu: &[u8]) {
        let key = b"InitiatorName=";
        if pdu.len() < 48 || pdu[0] & 0x3f != 0x03 {
            return;
        }
        let Some(at) = memmem::find(&pdu[48..], key) else {
            return;
        };
        let value = &pdu[48 + at + key.len()..];
        let name = value.split(|byte| *byte == 0).next().unwrap_or_default();
        let isid = pdu[8..14].try_into().expect("six bytes");
        self.names = Some(Names {
            initiator: String::from_utf8_lossy(name).into_owned(),
            isid,
            tsih: u16::from_be_bytes([pdu[14], pdu[15]]),
            cid: 0,
        });
    }
}

#[cfg(test)]
mod tests {
    use riser_test_peers::pdus;

    use super::*;

    #[test]
    fn names_include_session_tsih() {
        let (sniffer, peer) = (Sniffer::default(), IpAddr::from([10, 0, 0, 100]));
        let isid = [0x80, 1, 2, 3, 4, 5];
        let login = pdus::login(isid, "iqn.2026-01.org.example:a", "iqn.x", "");
        sniffer.record_stream(peer, true, &login);
        let mut response = login[..48].to_vec();
        (response[0], response[15]) = (0x23, 7);
        sniffer.record_stream(peer, false, &response);
        let names = sniffer.of(100).unwrap().names.unwrap();
        assert_eq!(names.initiator, "iqn.2026-01.org.example:a");
        assert_eq!((names.isid, names.tsih), (isid, 7));
        // A cheating peer must not be treated as the initiator whose name it uses.
        let cheat = IpAddr::from([10, 0, 2, 100]);
        sniffer.record_stream(cheat, true, &pdus::login(isid, "b", "iqn.x", ""));
        assert_eq!(sniffer.of(100).unwrap().names.unwrap(), names);
    }
}
