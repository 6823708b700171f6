//! The RoCEv2 wire format: the data between the UDP header and the ICRC.
//!
//! | module | contents |
//! | --- | --- |
//! | [`ids`] | [`Psn`], [`Qpn`], [`Msn`] and their 24-bit arithmetic |
//! | [`bth`] | base transport header |
//! | [`ext`] | extended headers and AETH syndromes |
//! | [`opcode`] | opcode table |
//! | [`packet`] | parsing a datagram and emitting its headers |
//! | [`dm`] | device-management MADs, used to discover I/O controllers |
//! | [`icrc`] | invariant CRC, for known and unknown IPv4 identifications |
//! | [`peer_ids`] | tracking the IPv4 identifications used by a peer |
//! | [`mad`] | management datagram header |
//! | [`smp`] | subnet management attributes |
//! | [`perf`] | performance management attributes: port counters |
//! | [`cm_msg`] | InfiniBand CM messages |
//! | [`cma`] | service IDs and address header used by the RDMA CM |
//!
//! This module does not keep any protocol state. The parsers only rely on the received length, so
//! that invalid data from a peer cannot cause a panic.

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
    gsi_datagram, push_header,
};
/// Returns true for an IPv6 link-local address. These addresses are only valid together with an
/// interface, which can't be stored in a GID or in [`std::net::IpAddr`], so they are not supported
/// for RoCE.
#[must_use]
pub fn is_link_local(addr: std::net::IpAddr) -> bool {
    matches!(addr, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local())
}

pub use peer_ids::{IcrcVerifier, IdPattern, PeerIds};
