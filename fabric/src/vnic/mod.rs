//! Virtual Ethernet over the fabric, modeled on Omni-Path VNIC (`opa_vnic` of Linux).
//!
//! ```text
//!  interface ⇄ VirtualPort ⇄ datagrams ⇄ VirtualPort ⇄ interface
//!                   ↑                         ↑
//!                 Vema ⇄ management datagrams ⇄ EthernetManager
//! ```
//!
//! A [`VirtualPort`] is a port of a distributed virtual Ethernet switch (VESW): each port
//! encapsulates its frames and sends them directly to the port that owns the destination MAC
//! address. A single [`EthernetManager`] in the fabric discovers the hosts, assigns addresses
//! (LIDs) to their ports, and distributes the tables. The [`Vema`] is the agent that executes its
//! requests on a host. All three are state machines without I/O: their inputs are bytes and the
//! current time, their outputs bytes and the next deadline.
//!
//! Packet and attribute layouts follow Linux. Omni-Path routes by LID, RoCE routes by GID and
//! queue pair number. Therefore two additional attributes ([`wire::attr::EndPoint`] and
//! [`wire::attr::PathsHeader`]) let the manager learn and distribute the locations of LIDs. Frames
//! longer than the path MTU are fragmented with an additional L4 header ([`wire::packet`]).

pub mod mac_table;
pub mod manager;
pub mod port;
pub mod reassembly;
pub mod stats;
pub mod trap;
pub mod vema;
pub mod wire;

pub use manager::{EthernetManager, ManagerConfig, VeswConfig};
pub use port::{InterfaceConfig, VirtualPort};
pub use vema::{Vema, VemaConfig};

use riser_transport::verbs::Gid;

/// Source or destination of a datagram: a port of the fabric and one of its queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QpAddress {
    /// Address of the port.
    pub gid: Gid,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
}

/// Maximum number of a virtual switch, 12 bits; 0 is invalid.
pub const MAX_VESW_ID: u16 = 0xfff;
/// Maximum Ethernet MTU of a virtual switch, in bytes.
pub const MAX_ETH_MTU: u16 = 9216;
/// Minimum Ethernet MTU of a virtual switch, in bytes, as required by IPv4.
pub const MIN_ETH_MTU: u16 = 68;
/// Maximum frame length in bytes: the MTU, an Ethernet header and a VLAN tag, without FCS.
pub const MAX_FRAME: usize = MAX_ETH_MTU as usize + frame::HEADER + frame::VLAN_TAG;
/// Minimum path MTU required by management datagrams, in bytes.
pub const MIN_PATH_MTU: usize = 1024;

/// Queue key of management datagrams.
pub const MANAGEMENT_QKEY: u32 = 0x5645_4d41;
/// Queue key of encapsulated frames.
pub const DATA_QKEY: u32 = 0x5645_5357;

pub mod frame {
    //! Parser of Ethernet frames (IEEE 802.3, 802.1Q).

    use super::wire::Mac;

    /// Length of an Ethernet header, in bytes.
    pub const HEADER: usize = 14;
    /// Length of a VLAN tag, in bytes.
    pub const VLAN_TAG: usize = 4;
    /// Minimum frame length without FCS, in bytes.
    pub const MIN: usize = 60;
    /// Length of the frame check sequence, in bytes. It is included in statistics but not
    /// transmitted.
    pub const FCS: usize = 4;

    const ETH_P_IP: u16 = 0x0800;
    const ETH_P_IPV6: u16 = 0x86dd;
    const ETH_P_8021Q: u16 = 0x8100;
    const ETH_P_8021AD: u16 = 0x88a8;

    /// Protocol of a frame, as distinguished by routing control.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Protocol {
        /// TCP over IPv4.
        Ipv4Tcp,
        /// UDP over IPv4.
        Ipv4Udp,
        /// Another protocol over IPv4.
        Ipv4,
        /// TCP over IPv6.
        Ipv6Tcp,
        /// UDP over IPv6.
        Ipv6Udp,
        /// Another protocol over IPv6.
        Ipv6,
        /// Any other protocol.
        Other,
    }

    /// A frame of at least [`HEADER`] bytes.
    #[derive(Clone, Copy, Debug)]
    pub struct Frame<'a>(&'a [u8]);

    impl<'a> Frame<'a> {
        /// Creates a frame, or returns `None` if the bytes are shorter than the header.
        #[must_use]
        pub fn new(bytes: &'a [u8]) -> Option<Self> {
            (bytes.len() >= HEADER).then_some(Self(bytes))
        }

        /// Returns the bytes of the frame.
        #[must_use]
        pub fn bytes(&self) -> &'a [u8] {
            self.0
        }

        /// Returns the length in bytes, without FCS.
        #[must_use]
        pub fn len(&self) -> usize {
            self.0.len()
        }

        /// Returns `false`, because a frame always has a header.
        #[must_use]
        pub fn is_empty(&self) -> bool {
            self.0.is_empty()
        }

        /// Returns the destination address.
        #[must_use]
        pub fn dest(&self) -> Mac {
            self.mac(0)
        }

        /// Returns the source address.
        #[must_use]
        pub fn source(&self) -> Mac {
            self.mac(6)
        }

        fn mac(&self, at: usize) -> Mac {
            let mut mac = [0; 6];
            mac.copy_from_slice(&self.0[at..at + 6]);
            Mac(mac)
        }

        fn word(&self, at: usize) -> Option<u16> {
            let bytes = self.0.get(at..at + 2)?;
            Some(u16::from_be_bytes([bytes[0], bytes[1]]))
        }

        /// Returns the priority of the VLAN tag (PCP, 0 to 7), or `None` without a tag.
        #[must_use]
        pub fn priority(&self) -> Option<usize> {
            let is_tag = matches!(self.word(12), Some(ETH_P_8021Q | ETH_P_8021AD));
            let tci = self.word(14).filter(|_| is_tag)?;
            Some(usize::from(tci >> 13))
        }

        /// Returns the EtherType after up to two VLAN tags, and the offset of the payload.
        fn ether_type(&self) -> (u16, usize) {
            let mut at = 12;
            for _ in 0..2 {
                match self.word(at) {
                    Some(ETH_P_8021Q | ETH_P_8021AD) => at += VLAN_TAG,
                    _ => break,
                }
            }
            (self.word(at).unwrap_or(0), at + 2)
        }

        /// Returns the protocol of the payload.
        #[must_use]
        pub fn protocol(&self) -> Protocol {
            let (ether_type, payload) = self.ether_type();
            let next = |offset: usize| self.0.get(payload + offset).copied();
            match (ether_type, next(9), next(6)) {
                (ETH_P_IP, Some(6), _) => Protocol::Ipv4Tcp,
                (ETH_P_IP, Some(17), _) => Protocol::Ipv4Udp,
                (ETH_P_IP, ..) => Protocol::Ipv4,
                (ETH_P_IPV6, _, Some(6)) => Protocol::Ipv6Tcp,
                (ETH_P_IPV6, _, Some(17)) => Protocol::Ipv6Udp,
                (ETH_P_IPV6, ..) => Protocol::Ipv6,
                _ => Protocol::Other,
            }
        }

        /// Returns 8 bits of flow entropy, which is equal for frames that must not be reordered.
        /// The hash is folded as in Linux.
        #[must_use]
        pub fn entropy(&self) -> u8 {
            let (_, payload) = self.ether_type();
            let part = |from: usize, to: usize| {
                let end = self.0.len();
                &self.0[(payload + from).min(end)..(payload + to).min(end)]
            };
            // Addresses and ports. IP options move the ports, which are then only partially hashed.
            let flow = match self.protocol() {
                Protocol::Ipv4Tcp | Protocol::Ipv4Udp => part(12, 24),
                Protocol::Ipv4 => part(12, 20),
                Protocol::Ipv6Tcp | Protocol::Ipv6Udp => part(8, 44),
                Protocol::Ipv6 => part(8, 40),
                Protocol::Other => &[],
            };
            let mut hash = super::wire::fnv1a(self.0[..12].iter().chain(flow));
            hash ^= hash >> 8;
            hash ^= hash >> 16;
            hash as u8
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn frame(rest: &[u8]) -> Vec<u8> {
            let mut bytes = vec![2, 0, 0, 1, 0, 0, 2, 0, 0, 2, 0, 0];
            bytes.extend_from_slice(rest);
            bytes
        }

        #[test]
        fn vlan_tag_yields_priority_and_inner_protocol() {
            let mut ip = vec![0x08, 0x00, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
            ip.extend([10, 0, 0, 1, 10, 0, 0, 2, 0x12, 0x34, 0, 80]);
            let plain = frame(&ip);
            let tagged = frame(&[&[0x81, 0x00, 0xa0, 0x07], &ip[..]].concat());
            let twice = [&[0x88, 0xa8, 0x60, 1, 0x81, 0, 0xe0, 2], &ip[..]].concat();
            let twice = frame(&twice);
            for (bytes, priority) in [(&plain, None), (&tagged, Some(5)), (&twice, Some(3))] {
                let frame = Frame::new(bytes).unwrap();
                assert_eq!(frame.priority(), priority);
                assert_eq!(frame.protocol(), Protocol::Ipv4Tcp);
                assert_eq!(frame.entropy(), Frame::new(&plain).unwrap().entropy());
            }
            let mut other = plain.clone();
            *other.last_mut().unwrap() = 81;
            let entropy = |bytes: &[u8]| Frame::new(bytes).unwrap().entropy();
            assert_ne!(entropy(&plain), entropy(&other), "another flow");
        }

        #[test]
        fn short_frames_have_no_protocol() {
            assert!(Frame::new(&[0; 13]).is_none());
            for rest in [
                &[0x81, 0x00][..],
                &[0x81, 0x00, 0xe0],
                &[0x08, 0x00],
                &[0x86, 0xdd, 0x60],
                &[0x88, 0xa8, 0, 0, 0x81, 0],
            ] {
                let bytes = frame(rest);
                let frame = Frame::new(&bytes).unwrap();
                let _ = (frame.entropy(), frame.priority());
                assert_ne!(frame.protocol(), Protocol::Ipv4Tcp);
            }
        }
    }
}
