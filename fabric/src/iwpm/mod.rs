//! iWARP port mapper.
//!
//! An iWARP device (RDMA over TCP) has a TCP stack separate from the host's, at the same IP
//! address. To prevent both stacks from using the same TCP port, a listener of the device is mapped
//! to another port, which a socket of the host reserves, and a client must query the remote host
//! for that port. The kernel's connection manager (`iw_cm`) delegates both tasks to a daemon via
//! netlink. The daemons of two hosts exchange datagrams.
//!
//! - [`message`]: netlink messages between kernel and daemon, and [`attribute`]: their attributes;
//! - [`wire`]: datagrams between two daemons;
//! - [`Mapper`]: the state machine, without I/O;
//! - [`Daemon`]: the state machine with its sockets, which the program `riser-iwpmd` runs.
//!
//! A device that uses the host's TCP stack, such as `siw`, registers its addresses without mapping
//! them. Its clients still send queries, because the remote host may have a device that requires a
//! mapping.

pub mod attribute;
mod daemon;
mod mapper;
mod mappings;
pub mod message;
pub mod wire;

use std::net::SocketAddr;

pub use daemon::{Daemon, ReservedPort, StartError, ThisHost};
pub use mapper::{
    ACCEPTED_LIFETIME, ASSOCIATION_LIFETIME, Host, MAX_ASSOCIATIONS, MAX_PEER_ASSOCIATIONS,
    MAX_QUERIES, Mapper, Output, QUERY_INTERVAL, QUERY_TRIES, QueryResult, Refusal,
};
pub use mappings::{MAX_MAPPINGS, Mapping};

/// UDP port of port mappers.
pub const PORT: u16 = 3935;

/// Service name that kernel and daemon must agree on.
pub const LIBRARY: &str = "iWarpPortMapperUser";

/// Minimum netlink message version, in which addresses have no flags (`IWPM_UABI_VERSION_MIN`).
pub const ABI_MIN: u16 = 3;

/// Latest netlink message version (`IWPM_UABI_VERSION`).
pub const ABI: u16 = 4;

/// Flag of an address to register without mapping its port (`IWPM_FLAGS_NO_PORT_MAP`).
pub const NO_PORT_MAP: u32 = 1;

/// Error code of a failed kernel request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum ErrorCode {
    /// An attribute is missing or has an invalid length or value.
    #[error("invalid message")]
    InvalidMessage = 10,
    /// No free port is available, or there are too many mappings.
    #[error("cannot create a mapping")]
    CreateMapping,
    /// Another mapping uses the address.
    #[error("mapping for this address already exists")]
    DuplicateMapping,
    /// The remote host did not respond.
    #[error("unknown mapping of the remote address")]
    UnknownMapping,
    /// The client is not registered.
    #[error("unregistered client")]
    ClientDeviceInfo,
    /// Unknown service name or version.
    #[error("unsupported name or version of the port mapper")]
    UserLibraryInfo,
    /// The remote host has no mapping of the address.
    #[error("the remote host has no mapping for the address")]
    RemoteQueryReject,
    /// The kernel uses an unsupported message version.
    #[error("unsupported message version")]
    VersionMismatch,
}

impl ErrorCode {
    /// Returns the wire representation.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }
}

/// Returns whether TCP treats two addresses as equal. The scope and flow label of IPv6 are ignored.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    a.ip() == b.ip() && a.port() == b.port()
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_golden;
