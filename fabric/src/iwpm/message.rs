//! Netlink messages between the kernel and the port mapper.
//!
//! The kernel sends [`Request`]s and the daemon sends [`Response`]s, some of them unsolicited: the
//! first is [`Response::Hello`], which activates the kernel's client. Some operations have
//! different attributes in each direction.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::attribute::{
    error, hello, manage_mapping, mapinfo, mapinfo_num, mapinfo_req, query_mapping, read_address,
    reg_pid, rmanage_mapping, rquery_mapping, rreg_pid, write_address,
};
use crate::netlink::attribute::{Attribute, Attributes};
use crate::netlink::message::{Header, Kind, REQUEST, Writer};

/// Maximum length of a device or service name, padded with NULs (`IWPM_DEVNAME_SIZE`,
/// `IWPM_ULIBNAME_SIZE`).
pub const NAME: usize = 32;

/// Maximum length of an interface name (`IWPM_IFNAME_SIZE`).
pub const INTERFACE_NAME: usize = 16;

/// Operations (`RDMA_NL_IWPM_…`).
pub mod operation {
    /// The kernel looks up the port mapper.
    pub const REG_PID: u16 = 0;
    /// The kernel adds a listening address.
    pub const ADD_MAPPING: u16 = 1;
    /// The kernel queries the mapping of a remote address.
    pub const QUERY_MAPPING: u16 = 2;
    /// The kernel removes an address.
    pub const REMOVE_MAPPING: u16 = 3;
    /// The daemon announces a connecting peer.
    pub const REMOTE_INFO: u16 = 4;
    /// The daemon rejects a request.
    pub const HANDLE_ERR: u16 = 5;
    /// The daemon requests the kernel's mappings, and the kernel sends one mapping.
    pub const MAPINFO: u16 = 6;
    /// The kernel reports the number of mappings it sent, and the daemon the number it accepted.
    pub const MAPINFO_NUM: u16 = 7;
    /// Version negotiation.
    pub const HELLO: u16 = 8;
}

/// Invalid message: an attribute is missing or has an invalid length or value, or the operation is
/// not valid in this direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid port mapper message")]
pub struct Invalid;

/// Message from the kernel. Version 3 messages have no flags. `echo` is the sequence number of the
/// last message that the kernel received from the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `RDMA_NL_IWPM_REG_PID`: the client is about to use a device.
    RegPid {
        /// See [`Request`].
        echo: u32,
        /// Network interface of the device.
        interface: String,
        /// RDMA device.
        device: String,
        /// Name of the requested service.
        library: String,
    },
    /// `RDMA_NL_IWPM_ADD_MAPPING`: adds a listener.
    AddMapping {
        /// See [`Request`].
        echo: u32,
        /// Address of the listener; its IP address may be unspecified.
        local: SocketAddr,
        /// [`NO_PORT_MAP`](super::NO_PORT_MAP).
        flags: Option<u32>,
    },
    /// `RDMA_NL_IWPM_QUERY_MAPPING`: a new connection.
    QueryMapping {
        /// See [`Request`].
        echo: u32,
        /// Local address.
        local: SocketAddr,
        /// Address to connect to.
        remote: SocketAddr,
        /// [`NO_PORT_MAP`](super::NO_PORT_MAP).
        flags: Option<u32>,
    },
    /// `RDMA_NL_IWPM_REMOVE_MAPPING`: a listener or connection was closed.
    RemoveMapping {
        /// See [`Request`].
        echo: u32,
        /// Local address of the mapping.
        local: SocketAddr,
    },
    /// `RDMA_NL_IWPM_MAPINFO`: a mapping created by a previous daemon.
    MapInfo {
        /// Local address.
        local: SocketAddr,
        /// Mapped address.
        mapped: SocketAddr,
        /// [`NO_PORT_MAP`](super::NO_PORT_MAP).
        flags: Option<u32>,
    },
    /// `RDMA_NL_IWPM_MAPINFO_NUM`: all mappings were sent.
    MapInfoNum {
        /// See [`Request`]; always zero in Linux.
        echo: u32,
        /// Number of mappings that were sent.
        sent: u32,
    },
    /// `RDMA_NL_IWPM_HELLO`, the response to [`Response::Hello`].
    Hello {
        /// Message version selected by the kernel.
        abi: u16,
    },
}

/// Original and mapped addresses of both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Local address.
    pub local: SocketAddr,
    /// Remote address.
    pub remote: SocketAddr,
    /// Mapped local address.
    pub mapped_local: SocketAddr,
    /// Mapped remote address.
    pub mapped_remote: SocketAddr,
}

/// Message to the kernel. `sequence` is the sequence number of the request. `error` is zero or the
/// number of an [`ErrorCode`](super::ErrorCode).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// `RDMA_NL_IWPM_REG_PID`: confirms the registration.
    RegPid {
        /// See [`Response`].
        sequence: u32,
        /// RDMA device, as in the request.
        device: String,
        /// Name of the service.
        library: String,
        /// Message version.
        version: u16,
        /// See [`Response`].
        error: u16,
    },
    /// `RDMA_NL_IWPM_ADD_MAPPING`: mapped address of a listener.
    AddMapping {
        /// See [`Response`].
        sequence: u32,
        /// Local address, as in the request.
        local: SocketAddr,
        /// Mapped address.
        mapped: SocketAddr,
        /// See [`Response`].
        error: u16,
    },
    /// `RDMA_NL_IWPM_QUERY_MAPPING`: mapped address of a remote host, or its rejection.
    QueryMapping {
        /// See [`Response`].
        sequence: u32,
        /// Addresses of the connection.
        connection: Connection,
        /// See [`Response`].
        error: u16,
    },
    /// `RDMA_NL_IWPM_REMOTE_INFO`: another host is about to connect to a listener.
    RemoteInfo {
        /// Addresses of the connection; its local addresses are the addresses of the listener.
        connection: Connection,
    },
    /// `RDMA_NL_IWPM_HANDLE_ERR`: a request was rejected.
    HandleErr {
        /// See [`Response`].
        sequence: u32,
        /// Number of an [`ErrorCode`](super::ErrorCode).
        code: u16,
    },
    /// `RDMA_NL_IWPM_MAPINFO`: requests the kernel's mappings.
    MapInfo {
        /// Name of the service.
        library: String,
        /// Message version.
        version: u16,
    },
    /// `RDMA_NL_IWPM_MAPINFO_NUM`: number of mappings accepted by the daemon.
    MapInfoNum {
        /// See [`Response`].
        sequence: u32,
        /// Number of mappings that were sent.
        sent: u32,
        /// Number of mappings accepted by the daemon.
        acknowledged: u32,
    },
    /// `RDMA_NL_IWPM_HELLO`: starts the version negotiation.
    Hello {
        /// Latest message version supported by the daemon.
        abi: u16,
    },
}

/// Attributes of a message by type. As in the kernel, a later attribute overrides an earlier one of
/// the same type.
struct Fields<'a>(BTreeMap<u16, Attribute<'a>>);

impl<'a> Fields<'a> {
    fn read(payload: &'a [u8]) -> Result<Self, Invalid> {
        let read = Attributes::new(payload).map(|read| read.map(|field| (field.kind, field)));
        read.collect::<Result<_, _>>()
            .map(Self)
            .map_err(|_malformed| Invalid)
    }

    fn get<T>(
        &self,
        kind: u16,
        read: impl Fn(&Attribute<'a>) -> Option<T>,
    ) -> Result<Option<T>, Invalid> {
        let value = self.0.get(&kind).map(|field| read(field).ok_or(Invalid));
        value.transpose()
    }

    fn short(&self, kind: u16) -> Result<u16, Invalid> {
        self.get(kind, Attribute::u16)?.ok_or(Invalid)
    }

    fn long(&self, kind: u16) -> Result<u32, Invalid> {
        self.get(kind, Attribute::u32)?.ok_or(Invalid)
    }

    fn flags(&self, kind: u16) -> Result<Option<u32>, Invalid> {
        self.get(kind, Attribute::u32)
    }

    fn address(&self, kind: u16) -> Result<SocketAddr, Invalid> {
        self.get(kind, |field| read_address(field.value))?
            .ok_or(Invalid)
    }

    fn name(&self, kind: u16, max: usize) -> Result<String, Invalid> {
        let name = self.get(kind, |field| {
            (field.value.len() <= max).then_some(())?;
            field.text().map(str::to_owned)
        });
        name?.ok_or(Invalid)
    }

    fn connection(&self) -> Result<Connection, Invalid> {
        Ok(Connection {
            local: self.address(rquery_mapping::LOCAL_ADDR)?,
            remote: self.address(rquery_mapping::REMOTE_ADDR)?,
            mapped_local: self.address(rquery_mapping::MAPPED_LOC_ADDR)?,
            mapped_remote: self.address(rquery_mapping::MAPPED_REM_ADDR)?,
        })
    }
}

/// Builder of a message with the value types of this protocol.
struct Output(Writer);

impl Output {
    fn new(client: u8, operation: u16, sequence: u32, port: u32) -> Self {
        Self(Writer::new(Header {
            kind: Kind { client, operation },
            flags: REQUEST,
            sequence,
            port,
        }))
    }

    fn short(self, kind: u16, value: u16) -> Self {
        Self(self.0.attribute(kind, &value.to_ne_bytes()))
    }

    fn long(self, kind: u16, value: u32) -> Self {
        Self(self.0.attribute(kind, &value.to_ne_bytes()))
    }

    fn flags(self, kind: u16, flags: Option<u32>) -> Self {
        match flags {
            Some(flags) => self.long(kind, flags),
            None => self,
        }
    }

    fn address(self, kind: u16, addr: SocketAddr) -> Self {
        Self(self.0.attribute(kind, &write_address(addr)))
    }

    fn text(self, kind: u16, text: &str) -> Self {
        Self(self.0.text(kind, text))
    }

    /// Appends a fixed-size field, as the kernel does.
    fn name(self, kind: u16, size: usize, name: &str) -> Self {
        let mut bytes: Vec<u8> = name.bytes().take(size - 1).collect();
        bytes.resize(size, 0);
        Self(self.0.attribute(kind, &bytes))
    }

    fn connection(self, connection: &Connection) -> Self {
        self.address(rquery_mapping::LOCAL_ADDR, connection.local)
            .address(rquery_mapping::REMOTE_ADDR, connection.remote)
            .address(rquery_mapping::MAPPED_LOC_ADDR, connection.mapped_local)
            .address(rquery_mapping::MAPPED_REM_ADDR, connection.mapped_remote)
    }
}

impl Request {
    /// Returns the operation of the message.
    #[must_use]
    pub fn operation(&self) -> u16 {
        match self {
            Self::RegPid { .. } => operation::REG_PID,
            Self::AddMapping { .. } => operation::ADD_MAPPING,
            Self::QueryMapping { .. } => operation::QUERY_MAPPING,
            Self::RemoveMapping { .. } => operation::REMOVE_MAPPING,
            Self::MapInfo { .. } => operation::MAPINFO,
            Self::MapInfoNum { .. } => operation::MAPINFO_NUM,
            Self::Hello { .. } => operation::HELLO,
        }
    }

    /// Parses the payload of a message from the kernel.
    ///
    /// # Errors
    /// [`Invalid`]. Unknown attribute types are ignored.
    pub fn read(operation: u16, payload: &[u8]) -> Result<Self, Invalid> {
        let fields = Fields::read(payload)?;
        Ok(match operation {
            operation::REG_PID => Self::RegPid {
                echo: fields.long(reg_pid::SEQ)?,
                interface: fields.name(reg_pid::IF_NAME, INTERFACE_NAME)?,
                device: fields.name(reg_pid::IBDEV_NAME, NAME)?,
                library: fields.name(reg_pid::ULIB_NAME, NAME)?,
            },
            operation::ADD_MAPPING => Self::AddMapping {
                echo: fields.long(manage_mapping::SEQ)?,
                local: fields.address(manage_mapping::ADDR)?,
                flags: fields.flags(manage_mapping::FLAGS)?,
            },
            operation::QUERY_MAPPING => Self::QueryMapping {
                echo: fields.long(query_mapping::SEQ)?,
                local: fields.address(query_mapping::LOCAL_ADDR)?,
                remote: fields.address(query_mapping::REMOTE_ADDR)?,
                flags: fields.flags(query_mapping::FLAGS)?,
            },
            operation::REMOVE_MAPPING => Self::RemoveMapping {
                echo: fields.long(manage_mapping::SEQ)?,
                local: fields.address(manage_mapping::ADDR)?,
            },
            operation::MAPINFO => Self::MapInfo {
                local: fields.address(mapinfo::LOCAL_ADDR)?,
                mapped: fields.address(mapinfo::MAPPED_ADDR)?,
                flags: fields.flags(mapinfo::FLAGS)?,
            },
            operation::MAPINFO_NUM => Self::MapInfoNum {
                echo: fields.long(mapinfo_num::SEQ)?,
                sent: fields.long(mapinfo_num::SEND_NUM)?,
            },
            operation::HELLO => Self::Hello {
                abi: fields.short(hello::ABI_VERSION)?,
            },
            _ => return Err(Invalid),
        })
    }

    /// Encodes the message with its header, as the kernel sends it for a client. Names are
    /// truncated if necessary.
    #[must_use]
    pub fn write(&self, client: u8, sequence: u32) -> Vec<u8> {
        let output = Output::new(client, self.operation(), sequence, 0);
        let output = match self {
            Self::RegPid {
                echo,
                interface,
                device,
                library,
            } => output
                .long(reg_pid::SEQ, *echo)
                .name(reg_pid::IF_NAME, INTERFACE_NAME, interface)
                .name(reg_pid::IBDEV_NAME, NAME, device)
                .name(reg_pid::ULIB_NAME, NAME, library),
            Self::AddMapping { echo, local, flags } => output
                .long(manage_mapping::SEQ, *echo)
                .address(manage_mapping::ADDR, *local)
                .flags(manage_mapping::FLAGS, *flags),
            Self::QueryMapping {
                echo,
                local,
                remote,
                flags,
            } => output
                .long(query_mapping::SEQ, *echo)
                .address(query_mapping::LOCAL_ADDR, *local)
                .address(query_mapping::REMOTE_ADDR, *remote)
                .flags(query_mapping::FLAGS, *flags),
            Self::RemoveMapping { echo, local } => output
                .long(manage_mapping::SEQ, *echo)
                .address(manage_mapping::ADDR, *local),
            Self::MapInfo {
                local,
                mapped,
                flags,
            } => output
                .address(mapinfo::LOCAL_ADDR, *local)
                .address(mapinfo::MAPPED_ADDR, *mapped)
                .flags(mapinfo::FLAGS, *flags),
            Self::MapInfoNum { echo, sent } => output
                .long(mapinfo_num::SEQ, *echo)
                .long(mapinfo_num::SEND_NUM, *sent),
            Self::Hello { abi } => output.short(hello::ABI_VERSION, *abi),
        };
        output.0.finish()
    }
}

impl Response {
    /// Returns the operation of the message.
    #[must_use]
    pub fn operation(&self) -> u16 {
        match self {
            Self::RegPid { .. } => operation::REG_PID,
            Self::AddMapping { .. } => operation::ADD_MAPPING,
            Self::QueryMapping { .. } => operation::QUERY_MAPPING,
            Self::RemoteInfo { .. } => operation::REMOTE_INFO,
            Self::HandleErr { .. } => operation::HANDLE_ERR,
            Self::MapInfo { .. } => operation::MAPINFO,
            Self::MapInfoNum { .. } => operation::MAPINFO_NUM,
            Self::Hello { .. } => operation::HELLO,
        }
    }

    /// Parses the payload of a message from the daemon.
    ///
    /// # Errors
    /// [`Invalid`]. Unknown attribute types are ignored.
    pub fn read(operation: u16, payload: &[u8]) -> Result<Self, Invalid> {
        let fields = Fields::read(payload)?;
        Ok(match operation {
            operation::REG_PID => Self::RegPid {
                sequence: fields.long(rreg_pid::SEQ)?,
                device: fields.name(rreg_pid::IBDEV_NAME, NAME)?,
                library: fields.name(rreg_pid::ULIB_NAME, NAME)?,
                version: fields.short(rreg_pid::ULIB_VER)?,
                error: fields.short(rreg_pid::ERR)?,
            },
            operation::ADD_MAPPING => Self::AddMapping {
                sequence: fields.long(rmanage_mapping::SEQ)?,
                local: fields.address(rmanage_mapping::ADDR)?,
                mapped: fields.address(rmanage_mapping::MAPPED_LOC_ADDR)?,
                error: fields.short(rmanage_mapping::ERR)?,
            },
            operation::QUERY_MAPPING => Self::QueryMapping {
                sequence: fields.long(rquery_mapping::SEQ)?,
                connection: fields.connection()?,
                error: fields.short(rquery_mapping::ERR)?,
            },
            operation::REMOTE_INFO => {
                // The kernel requires both attributes and uses neither.
                fields.long(rquery_mapping::SEQ)?;
                fields.short(rquery_mapping::ERR)?;
                Self::RemoteInfo {
                    connection: fields.connection()?,
                }
            }
            operation::HANDLE_ERR => Self::HandleErr {
                sequence: fields.long(error::SEQ)?,
                code: fields.short(error::CODE)?,
            },
            operation::MAPINFO => Self::MapInfo {
                library: fields.name(mapinfo_req::ULIB_NAME, NAME)?,
                version: fields.short(mapinfo_req::ULIB_VER)?,
            },
            operation::MAPINFO_NUM => Self::MapInfoNum {
                sequence: fields.long(mapinfo_num::SEQ)?,
                sent: fields.long(mapinfo_num::SEND_NUM)?,
                acknowledged: fields.long(mapinfo_num::ACK_NUM)?,
            },
            operation::HELLO => Self::Hello {
                abi: fields.short(hello::ABI_VERSION)?,
            },
            _ => return Err(Invalid),
        })
    }

    /// Encodes the message with its header, for a kernel client, from the socket with this port.
    #[must_use]
    pub fn write(&self, client: u8, sequence: u32, port: u32) -> Vec<u8> {
        let output = Output::new(client, self.operation(), sequence, port);
        let output = match self {
            Self::RegPid {
                sequence,
                device,
                library,
                version,
                error,
            } => output
                .long(rreg_pid::SEQ, *sequence)
                .text(rreg_pid::IBDEV_NAME, device)
                .text(rreg_pid::ULIB_NAME, library)
                .short(rreg_pid::ULIB_VER, *version)
                .short(rreg_pid::ERR, *error),
            Self::AddMapping {
                sequence,
                local,
                mapped,
                error,
            } => output
                .long(rmanage_mapping::SEQ, *sequence)
                .address(rmanage_mapping::ADDR, *local)
                .address(rmanage_mapping::MAPPED_LOC_ADDR, *mapped)
                .short(rmanage_mapping::ERR, *error),
            Self::QueryMapping {
                sequence,
                connection,
                error,
            } => output
                .long(rquery_mapping::SEQ, *sequence)
                .connection(connection)
                .short(rquery_mapping::ERR, *error),
            Self::RemoteInfo { connection } => output
                .long(rquery_mapping::SEQ, 0)
                .connection(connection)
                .short(rquery_mapping::ERR, 0),
            Self::HandleErr { sequence, code } => {
                output.long(error::SEQ, *sequence).short(error::CODE, *code)
            }
            Self::MapInfo { library, version } => output
                .text(mapinfo_req::ULIB_NAME, library)
                .short(mapinfo_req::ULIB_VER, *version),
            Self::MapInfoNum {
                sequence,
                sent,
                acknowledged,
            } => output
                .long(mapinfo_num::SEQ, *sequence)
                .long(mapinfo_num::SEND_NUM, *sent)
                .long(mapinfo_num::ACK_NUM, *acknowledged),
            Self::Hello { abi } => output.short(hello::ABI_VERSION, *abi),
        };
        output.0.finish()
    }
}
