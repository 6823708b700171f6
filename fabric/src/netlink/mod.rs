//! Netlink messages of the kernel's RDMA subsystem (`NETLINK_RDMA`, `rdma/rdma_netlink.h`).
//!
//! A datagram has one message or more, each a header, and behind it attributes or what its type
//! says ([`message`]). An attribute has a type and a value ([`attribute`]). [`RdmaNetlink`] is the
//! socket. Numbers are in the byte order of the host unless a value says otherwise.

pub mod attribute;
pub mod message;
mod socket;

pub use socket::{IWPM_GROUP, LS_GROUP, RdmaNetlink};

/// Alignment of messages and attributes, in bytes (`NLMSG_ALIGNTO`, `NLA_ALIGNTO`).
const ALIGNMENT: usize = 4;

/// Bytes that cannot be a message or an attribute: one is shorter than its header, or longer than
/// what holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("netlink bytes with a length that is wrong")]
pub struct Malformed;

/// Takes what begins with a length from the front of `rest`, with the bytes that fill it up to the
/// alignment.
fn split<'a>(rest: &mut &'a [u8], header: usize, len: usize) -> Result<&'a [u8], Malformed> {
    if len < header || len > rest.len() {
        return Err(Malformed);
    }
    let whole = &rest[..len];
    // The last of a message need not be filled up.
    *rest = rest
        .get(len.next_multiple_of(ALIGNMENT)..)
        .unwrap_or_default();
    Ok(whole)
}
