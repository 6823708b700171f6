//! The iWARP port mapper.
//!
//! An RDMA device that speaks iWARP (RDMA over TCP) has a TCP stack of its own beside the host's,
//! at the same IP address. So that both do not use one TCP port for different things, a listener of
//! the device is given another port, which a socket of the host reserves, and a client has to ask
//! the other host which port that is. The kernel's connection manager (`iw_cm`) asks a daemon to do
//! both, over netlink, and the daemons of two hosts ask each other, in datagrams.
//!
//! - [`message`]: the netlink messages between the kernel and the daemon, and [`attribute`]: their
//!   attributes;
//! - [`wire`]: the datagrams between two daemons;
//! - [`Mapper`]: the machine between them, without I/O;
//! - [`Daemon`]: the machine with its sockets, which the program `riser-iwpmd` runs.
//!
//! A device that uses the host's TCP stack, as `siw` does, has its addresses registered without
//! another port. Its clients still ask, since the other host may have a device that maps.

pub mod attribute;
mod daemon;
mod mapper;
mod mappings;
pub mod message;
pub mod wire;

use std::net::SocketAddr;

pub use daemon::{Daemon, ReservedPort, StartError, ThisHost};
pub use mapper::{
    ANSWERED_LIFETIME, ASSOCIATION_LIFETIME, Answer, Host, MAX_ASSOCIATIONS, MAX_PEER_ASSOCIATIONS,
    MAX_QUERIES, Mapper, Output, QUERY_INTERVAL, QUERY_TRIES, Refusal,
};
pub use mappings::{MAX_MAPPINGS, Mapping};

/// UDP port of a port mapper.
pub const PORT: u16 = 3935;

/// Name by which kernel and daemon know that they mean the same service.
pub const LIBRARY: &str = "iWarpPortMapperUser";

/// Oldest version of the netlink messages: addresses have no flags (`IWPM_UABI_VERSION_MIN`).
pub const ABI_MIN: u16 = 3;

/// Newest version of the netlink messages (`IWPM_UABI_VERSION`).
pub const ABI: u16 = 4;

/// Flag of an address that is registered, but not given another port (`IWPM_FLAGS_NO_PORT_MAP`).
pub const NO_PORT_MAP: u32 = 1;

/// Reason why a request of the kernel fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum ErrorCode {
    /// A message lacks an attribute, or has one of a wrong length or value.
    #[error("invalid message")]
    InvalidMessage = 10,
    /// No port is free, or there are too many mappings.
    #[error("no mapping could be made")]
    CreateMapping,
    /// The address is in use by another mapping.
    #[error("there is a mapping of this address")]
    DuplicateMapping,
    /// The other host has not answered.
    #[error("the mapping of the remote address is unknown")]
    UnknownMapping,
    /// The client has not registered.
    #[error("the client is not registered")]
    ClientDeviceInfo,
    /// The name or the version of the service is not ours.
    #[error("another name or version of the port mapper")]
    UserLibraryInfo,
    /// The other host has no mapping of the address.
    #[error("the other host has no mapping of the address")]
    RemoteQueryReject,
    /// The kernel has a version of the messages that we do not know.
    #[error("unknown version of the messages")]
    VersionMismatch,
}

impl ErrorCode {
    /// The number that messages have for it.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }
}

/// Whether two addresses are the same to TCP. Scope and flow label of IPv6 do not distinguish them.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    a.ip() == b.ip() && a.port() == b.port()
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_golden;
