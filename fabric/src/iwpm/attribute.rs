//! Netlink attributes of the port mapper: their types, and address values.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Attribute types of `RDMA_NL_IWPM_REG_PID` from the kernel (`IWPM_NLA_REG_…`).
pub mod reg_pid {
    /// Sequence number of the last message that the kernel received; 32 bits.
    pub const SEQ: u16 = 1;
    /// Network interface; text in 16 bytes.
    pub const IF_NAME: u16 = 2;
    /// RDMA device; text in 32 bytes.
    pub const IBDEV_NAME: u16 = 3;
    /// Name of the service; text in 32 bytes.
    pub const ULIB_NAME: u16 = 4;
}

/// Attribute types of the response to `RDMA_NL_IWPM_REG_PID` (`IWPM_NLA_RREG_…`).
pub mod rreg_pid {
    /// Sequence number of the request; 32 bits.
    pub const SEQ: u16 = 1;
    /// RDMA device, as in the request.
    pub const IBDEV_NAME: u16 = 2;
    /// Name of the service; text.
    pub const ULIB_NAME: u16 = 3;
    /// Message version; 16 bits.
    pub const ULIB_VER: u16 = 4;
    /// Zero, or an error code; 16 bits.
    pub const ERR: u16 = 5;
}

/// Attribute types of `RDMA_NL_IWPM_ADD_MAPPING` and `RDMA_NL_IWPM_REMOVE_MAPPING` from the kernel
/// (`IWPM_NLA_MANAGE_…`).
pub mod manage_mapping {
    /// Sequence number of the last message that the kernel received; 32 bits.
    pub const SEQ: u16 = 1;
    /// Local address; a `struct sockaddr_storage`.
    pub const ADDR: u16 = 2;
    /// Flags; 32 bits. Since version 4, and not for a removal.
    pub const FLAGS: u16 = 3;
}

/// Attribute types of the response to `RDMA_NL_IWPM_ADD_MAPPING` (`IWPM_NLA_RMANAGE_…`).
pub mod rmanage_mapping {
    /// Sequence number of the request; 32 bits.
    pub const SEQ: u16 = 1;
    /// Local address, as in the request.
    pub const ADDR: u16 = 2;
    /// Mapped local address.
    pub const MAPPED_LOC_ADDR: u16 = 3;
    /// Zero, or an error code; 16 bits.
    pub const ERR: u16 = 4;
}

/// Attribute types of `RDMA_NL_IWPM_QUERY_MAPPING` from the kernel (`IWPM_NLA_QUERY_…`).
pub mod query_mapping {
    /// Sequence number of the last message that the kernel received; 32 bits.
    pub const SEQ: u16 = 1;
    /// Local address; a `struct sockaddr_storage`.
    pub const LOCAL_ADDR: u16 = 2;
    /// Remote address; a `struct sockaddr_storage`.
    pub const REMOTE_ADDR: u16 = 3;
    /// Flags; 32 bits. Since version 4.
    pub const FLAGS: u16 = 4;
}

/// Attribute types of the response to `RDMA_NL_IWPM_QUERY_MAPPING`, and of
/// `RDMA_NL_IWPM_REMOTE_INFO` (`IWPM_NLA_RQUERY_…`).
pub mod rquery_mapping {
    /// Sequence number of the request, or zero if there was no request; 32 bits.
    pub const SEQ: u16 = 1;
    /// Local address.
    pub const LOCAL_ADDR: u16 = 2;
    /// Remote address.
    pub const REMOTE_ADDR: u16 = 3;
    /// Mapped local address.
    pub const MAPPED_LOC_ADDR: u16 = 4;
    /// Mapped remote address.
    pub const MAPPED_REM_ADDR: u16 = 5;
    /// Zero, or an error code; 16 bits.
    pub const ERR: u16 = 6;
}

/// Attribute types of `RDMA_NL_IWPM_MAPINFO` from the daemon, which requests the kernel's mappings
/// (`IWPM_NLA_MAPINFO_ULIB_…`).
pub mod mapinfo_req {
    /// Name of the service; text.
    pub const ULIB_NAME: u16 = 1;
    /// Message version; 16 bits.
    pub const ULIB_VER: u16 = 2;
}

/// Attribute types of `RDMA_NL_IWPM_MAPINFO` from the kernel (`IWPM_NLA_MAPINFO_…`).
pub mod mapinfo {
    /// Local address; a `struct sockaddr_storage`.
    pub const LOCAL_ADDR: u16 = 1;
    /// Mapped address; a `struct sockaddr_storage`.
    pub const MAPPED_ADDR: u16 = 2;
    /// Flags; 32 bits. Since version 4.
    pub const FLAGS: u16 = 3;
}

/// Attribute types of `RDMA_NL_IWPM_MAPINFO_NUM`, in both directions (`IWPM_NLA_MAPINFO_…`).
pub mod mapinfo_num {
    /// Zero from the kernel, or the sequence number of the request from the daemon; 32 bits.
    pub const SEQ: u16 = 1;
    /// Number of mappings sent by the kernel; 32 bits.
    pub const SEND_NUM: u16 = 2;
    /// Number of mappings accepted by the daemon; 32 bits. Only from the daemon.
    pub const ACK_NUM: u16 = 3;
}

/// Attribute types of `RDMA_NL_IWPM_HANDLE_ERR` from the daemon (`IWPM_NLA_ERR_…`).
pub mod error {
    /// Sequence number of the request; 32 bits.
    pub const SEQ: u16 = 1;
    /// Error code; 16 bits.
    pub const CODE: u16 = 2;
}

/// Attribute types of `RDMA_NL_IWPM_HELLO`, in both directions (`IWPM_NLA_HELLO_…`).
pub mod hello {
    /// Latest message version supported by the sender; 16 bits.
    pub const ABI_VERSION: u16 = 1;
}

/// Size of `struct sockaddr_storage`, in bytes.
pub const SOCKADDR_STORAGE: usize = 128;

/// Address families of `struct sockaddr`.
const AF_INET: u16 = libc::AF_INET as u16;
const AF_INET6: u16 = libc::AF_INET6 as u16;

/// Encodes an address as a `struct sockaddr_storage`. Family, flow label and scope are in host byte
/// order, port and address in network byte order.
#[must_use]
pub fn write_address(addr: SocketAddr) -> [u8; SOCKADDR_STORAGE] {
    let mut bytes = [0; SOCKADDR_STORAGE];
    bytes[2..4].copy_from_slice(&addr.port().to_be_bytes());
    match addr {
        SocketAddr::V4(addr) => {
            bytes[..2].copy_from_slice(&AF_INET.to_ne_bytes());
            bytes[4..8].copy_from_slice(&addr.ip().octets());
        }
        SocketAddr::V6(addr) => {
            bytes[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            bytes[4..8].copy_from_slice(&addr.flowinfo().to_ne_bytes());
            bytes[8..24].copy_from_slice(&addr.ip().octets());
            bytes[24..28].copy_from_slice(&addr.scope_id().to_ne_bytes());
        }
    }
    bytes
}

/// Decodes a `struct sockaddr_storage`. Returns `None` if it is truncated or neither IPv4 nor IPv6.
#[must_use]
pub fn read_address(bytes: &[u8]) -> Option<SocketAddr> {
    let (bytes, _) = bytes.split_first_chunk::<SOCKADDR_STORAGE>()?;
    let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match u16::from_ne_bytes([bytes[0], bytes[1]]) {
        AF_INET => Some(SocketAddrV4::new(Ipv4Addr::from(four(4)), port).into()),
        AF_INET6 => {
            let (ip, _) = bytes[8..].split_first_chunk::<16>()?;
            let flow = u32::from_ne_bytes(four(4));
            let scope = u32::from_ne_bytes(four(24));
            Some(SocketAddrV6::new(Ipv6Addr::from(*ip), port, flow, scope).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // As on a little-endian host.
    #[cfg(target_endian = "little")]
    #[test]
    fn addresses_match_sockaddr_storage() {
        let mut golden = [0; 128];
        golden[..8].copy_from_slice(&[2, 0, 0x0C, 0xBC, 10, 99, 0, 1]);
        let addr = "10.99.0.1:3260".parse().unwrap();
        assert_eq!(write_address(addr), golden);
        assert_eq!(read_address(&golden), Some(addr));

        let mut golden = [0; 128];
        golden[..8].copy_from_slice(&[10, 0, 0x0C, 0xBC, 0, 0, 0, 0]);
        golden[8..24].copy_from_slice(&[0xFE, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        golden[24] = 3;
        let addr = "[fe80::1%3]:3260".parse().unwrap();
        assert_eq!(write_address(addr), golden);
        assert_eq!(read_address(&golden), Some(addr));
    }

    #[test]
    fn other_values_are_no_address() {
        let whole = write_address("10.99.0.1:3260".parse().unwrap());
        assert_eq!(read_address(&whole[..127]), None);
        // The address of a Unix socket.
        assert_eq!(read_address(&[1; 128]), None);
        assert_eq!(read_address(&[]), None);
    }
}
