//! Hosts with connected queue pairs.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use foldhash::fast::RandomState;

use crate::verbs::QpId;
use crate::wire::IcrcVerifier;

/// Source port of the peer in the lower half, and index of the local address in the upper half. The
/// ICRC depends on both.
pub(in crate::nic) type FlowPort = u32;

/// Number of source ports per connected QP for which we store the identification pattern. Linux
/// uses one port per QP.
pub(in crate::nic) const PORTS_PER_QP: usize = 4;

/// Map with a key chosen by peers, with a lookup for each packet. The seed of the hash function is
/// different in each process, so that collisions cannot be prepared, and the number of entries is
/// limited by the number of connected QPs.
type PeerMap<K, T> = HashMap<K, T, RandomState>;

/// Hosts with connected QPs, and the packet numbering of their source ports. Nothing is stored for
/// strangers.
#[derive(Debug, Default)]
pub(in crate::nic) struct Peers {
    /// QPs connected to each address.
    qps: PeerMap<IpAddr, Vec<QpId>>,
    /// Packet numbering by address and source port.
    verifiers: PeerMap<(IpAddr, FlowPort), IcrcVerifier>,
    /// Source ports of each peer in this map, oldest first.
    ports: PeerMap<IpAddr, VecDeque<FlowPort>>,
}

impl Peers {
    /// Returns the QPs connected to an address.
    pub(in crate::nic) fn qps(&self, ip: IpAddr) -> &[QpId] {
        self.qps.get(&ip).map_or(&[], Vec::as_slice)
    }

    /// Adds a connected QP.
    pub(in crate::nic) fn add(&mut self, ip: IpAddr, qp: QpId) {
        self.qps.entry(ip).or_default().push(qp);
    }

    /// Removes a QP, and the oldest entries of its peer if it has too many without this QP. If there
    /// are no more QPs with this peer, its packets will not be verified, so all state about it is
    /// discarded.
    pub(in crate::nic) fn remove(&mut self, ip: IpAddr, qp: QpId) {
        let Some(qps) = self.qps.get_mut(&ip) else {
            return;
        };
        qps.retain(|&other| other != qp);
        if qps.is_empty() {
            self.qps.remove(&ip);
        }
        self.evict(ip);
    }

    /// Returns the packet numbering of a peer, if known.
    #[inline]
    pub(in crate::nic) fn verifier(&self, key: (IpAddr, FlowPort)) -> Option<IcrcVerifier> {
        self.verifiers.get(&key).copied()
    }

    /// Stores the packet numbering of a peer. If it uses too many ports, its oldest entry is
    /// removed, so that a peer can't evict the entries of another peer.
    pub(in crate::nic) fn remember(&mut self, key: (IpAddr, FlowPort), verifier: IcrcVerifier) {
        if self.verifiers.insert(key, verifier).is_some() {
            return;
        }
        let (ip, port) = key;
        self.ports.entry(ip).or_default().push_back(port);
        self.evict(ip);
    }

    /// Removes the oldest entries of a peer, if it has too many for the number of its QPs.
    fn evict(&mut self, ip: IpAddr) {
        let limit = self.qps(ip).len() * PORTS_PER_QP;
        let Some(ports) = self.ports.get_mut(&ip) else {
            return;
        };
        let excess = ports.len().saturating_sub(limit);
        for port in ports.drain(..excess) {
            self.verifiers.remove(&(ip, port));
        }
        if ports.is_empty() {
            self.ports.remove(&ip);
        }
    }

    /// Returns the number of stored entries: packet numberings, and peers with any.
    #[cfg(test)]
    pub(in crate::nic) fn verifier_count(&self) -> (usize, usize) {
        (self.verifiers.len(), self.ports.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Handle;
    use crate::wire::IcrcFlow;

    fn verifier(port: u16) -> IcrcVerifier {
        let src = ([10, 0, 0, 2], port).into();
        let flow = IcrcFlow::new(src, ([10, 0, 0, 1], 4791).into());
        IcrcVerifier::new(flow.unwrap())
    }

    #[test]
    fn oldest_port_of_peer_is_evicted() {
        let [ip, other] = [2, 3].map(|host| IpAddr::from([10, 0, 0, host]));
        let [qp, last] = [1, 2].map(|index| QpId(Handle::new(index, 1)));
        let mut peers = Peers::default();
        peers.add(ip, qp);
        peers.add(other, last);
        peers.remember((other, 1), verifier(1));
        for port in 0..=PORTS_PER_QP as u16 {
            peers.remember((ip, port.into()), verifier(port));
        }
        assert!(peers.verifier((ip, 0)).is_none());
        assert!(peers.verifier((ip, 1)).is_some());
        assert!(peers.verifier((other, 1)).is_some());
        peers.add(ip, last);
        peers.remove(ip, qp);
        assert_eq!(peers.verifier_count(), (1 + PORTS_PER_QP, 2));
        peers.remove(ip, last);
        assert_eq!(peers.verifier_count(), (1, 1));
        assert!(peers.qps(ip).is_empty());
    }

    #[test]
    fn removed_qp_releases_its_ports() {
        let ip = IpAddr::from([10, 0, 0, 2]);
        let [first, second] = [1, 2].map(|index| QpId(Handle::new(index, 1)));
        let mut peers = Peers::default();
        peers.add(ip, first);
        peers.add(ip, second);
        for port in 0..2 * PORTS_PER_QP as u16 {
            peers.remember((ip, port.into()), verifier(port));
        }
        peers.remove(ip, second);
        assert_eq!(peers.verifier_count(), (PORTS_PER_QP, 1));
        assert!(peers.verifier((ip, 0)).is_none());
    }
}
