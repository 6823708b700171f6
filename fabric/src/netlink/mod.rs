//! Netlink messages of the kernel's RDMA subsystem (`NETLINK_RDMA`, `rdma/rdma_netlink.h`).
//!
//! A datagram contains one or more messages. Each has a header, followed by attributes or a payload
//! that depends on its type ([`message`]). An attribute has a type and a value ([`attribute`]).
//! [`RdmaNetlink`] is the socket. Numbers are in host byte order unless documented otherwise.

pub mod attribute;
pub mod message;
mod socket;

pub use socket::{IWPM_GROUP, LS_GROUP, RdmaNetlink};

/// Alignment of messages and attributes, in bytes (`NLMSG_ALIGNTO`, `NLA_ALIGNTO`).
const ALIGNMENT: usize = 4;

/// Invalid message or attribute: shorter than its header, or longer than the enclosing buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid netlink length")]
pub struct Malformed;

/// Splits an item of `len` bytes, including padding, from the front of `rest`.
fn split<'a>(rest: &mut &'a [u8], header: usize, len: usize) -> Result<&'a [u8], Malformed> {
    if len < header || len > rest.len() {
        return Err(Malformed);
    }
    let whole = &rest[..len];
    // The last item of a message need not be padded.
    *rest = rest
        .get(len.next_multiple_of(ALIGNMENT)..)
        .unwrap_or_default();
    Ok(whole)
}
