//! The RoCEv2 wire format: everything between the UDP header and the ICRC, and what is before it in
//! a datagram.
//!
//! | module | what it names |
//! | --- | --- |
//! | [`ids`] | [`Psn`], [`Qpn`], [`Msn`] and their 24-bit arithmetic |
//! | [`bth`] | the base transport header |
//! | [`ext`] | the extended headers and the AETH syndromes |
//! | [`opcode`] | the one table of operation codes |
//! | [`packet`] | parsing a datagram, emitting the headers of one |
//! | [`ud`] | all headers of a datagram, from the link's on |
//! | [`dm`] | device-management MADs: discovery of I/O controllers |
//! | [`icrc`] | the invariant CRC, with and without knowledge of the IPv4 identification |
//! | [`peer_ids`] | what is known of a peer's IPv4 identifications |
//! | [`mad`] | the header of management datagrams |
//! | [`smp`] | attributes of subnet management |
//! | [`perf`] | attributes of performance management: the counters of a port |
//! | [`cm_msg`] | every message of the InfiniBand CM |
//! | [`cma`] | service ids and address header of the RDMA CM |
//!
//! Nothing here keeps protocol state, and nothing panics on a peer's bytes:
//! the received length is the only authority.

#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

pub mod bth;
pub mod cm_msg;
pub mod cma;
pub mod dm;
pub mod ext;
pub mod icrc;
pub mod ids;
pub mod mad;
pub mod opcode;
pub mod packet;
pub mod peer_ids;
pub mod perf;
pub mod smp;
pub mod ud;

pub use bth::{Bth, DEFAULT_PKEY, pad_len};
pub use cm_msg::{CmMessage, CmMsgError, CmPath, CmTimeout, CommId, RejReason, ServiceId};
pub use cma::{CmaAddrs, CmaHeader, RdmaPortSpace};
pub use ext::{
    Aeth, AethSyndrome, AtomicAckEth, AtomicEth, Credit, Deth, GSI_QKEY, Ieth, ImmDt, NakCode,
    Reth, RnrTimer, XrcEth,
};
pub use icrc::{ICRC_LEN, Icrc, IcrcError, IcrcFlow, MAX_DATAGRAM};
pub use ids::{Msn, Psn, Qpn};
pub use mad::{MAD_LEN, Mad, MadHeader, TransactionId};
pub use opcode::{ExtHeader, Opcode, OpcodeInfo, Operation, PayloadRule, Position, Service};
pub use packet::{
    ExtHeaders, HeaderBuf, MAX_HEADER_LEN, Packet, PacketError, ROCE_PORT, emit_headers,
    push_header,
};
/// Whether an address is an IPv6 link-local one. It names a host only together with an interface,
/// for which neither a GID nor [`std::net::IpAddr`] has room, so RoCE here does without such
/// addresses.
#[must_use]
pub fn is_link_local(addr: std::net::IpAddr) -> bool {
    matches!(addr, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local())
}

pub use peer_ids::{IcrcVerifier, IdPattern, PeerIds};
