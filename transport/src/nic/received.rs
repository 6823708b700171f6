//! Received packets and their source.

use std::net::{IpAddr, SocketAddr};

use super::batch::HOP_LIMIT;
use crate::verbs::RouteHeader;

/// Fields of a received IP header, in addition to the source address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpFields {
    /// Type of service or traffic class: DSCP and ECN.
    pub traffic_class: u8,
    /// Hop limit or TTL of the received packet.
    pub hop_limit: u8,
    /// Destination address, as an index into the GID table.
    pub gid_index: u8,
}

impl Default for IpFields {
    fn default() -> Self {
        Self {
            traffic_class: 0,
            hop_limit: HOP_LIMIT,
            gid_index: 0,
        }
    }
}

impl IpFields {
    /// Returns whether a router has set the congestion mark (RFC 3168, section 5).
    #[must_use]
    pub fn is_marked(self) -> bool {
        self.traffic_class & 0b11 == 0b11
    }
}

/// A received packet.
pub(super) struct Received<'a> {
    pub(super) src: SocketAddr,
    /// Source address to pass to datagram users, which can be used to send a response.
    pub(super) datagram_src: IpAddr,
    /// Destination address.
    pub(super) dst: IpAddr,
    pub(super) bytes: &'a [u8],
    pub(super) ip: IpFields,
    /// Set if this is not the first packet of a train.
    pub(super) follows: bool,
}

impl Received<'_> {
    /// Creates the route header for the receiver of a datagram. The identification was recovered
    /// from the ICRC.
    pub(super) fn route_header(&self, identification: u16) -> RouteHeader {
        RouteHeader {
            source: self.datagram_src,
            destination: self.dst,
            traffic_class: self.ip.traffic_class,
            flow_label: 0,
            hop_limit: self.ip.hop_limit,
            identification,
            // This includes the UDP header.
            payload_len: (self.bytes.len() + 8) as u16,
        }
    }
}

/// Peer on the other side of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkPeer {
    /// Link name.
    pub(crate) name: IpAddr,
    /// Source address for received datagrams, which can be used to reach the peer.
    pub(crate) datagrams: IpAddr,
}
