//! Netlink messages between the kernel and the port mapper.
//!
//! A [`Request`] comes from the kernel, a [`Response`] goes to it, though some of these are not
//! asked for: the daemon begins with a [`Response::Hello`], which wakes the kernel's client. Some
//! operations have other attributes in the one direction than in the other.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::attribute::{
    error, hello, manage_mapping, mapinfo, mapinfo_num, mapinfo_req, query_mapping, read_address,
    reg_pid, rmanage_mapping, rquery_mapping, rreg_pid, write_address,
};
use crate::netlink::attribute::{Attribute, Attributes};
use crate::netlink::message::{Header, Kind, REQUEST, Writer};

/// Bytes of the name of a device or of the service, with a NUL at the end of a shorter one
/// (`IWPM_DEVNAME_SIZE`, `IWPM_ULIBNAME_SIZE`).
pub const NAME: usize = 32;

/// Bytes of the name of an interface (`IWPM_IFNAME_SIZE`).
pub const INTERFACE_NAME: usize = 16;

/// Operations (`RDMA_NL_IWPM_…`).
pub mod operation {
    /// The kernel looks for the port mapper.
    pub const REG_PID: u16 = 0;
    /// The kernel has an address to listen at.
    pub const ADD_MAPPING: u16 = 1;
    /// The kernel has an address to connect to.
    pub const QUERY_MAPPING: u16 = 2;
    /// The kernel no longer uses an address.
    pub const REMOVE_MAPPING: u16 = 3;
    /// The daemon has heard who is about to connect.
    pub const REMOTE_INFO: u16 = 4;
    /// The daemon refuses a request.
    pub const HANDLE_ERR: u16 = 5;
    /// The daemon asks for the kernel's mappings, and the kernel has one.
    pub const MAPINFO: u16 = 6;
    /// The kernel has sent its mappings, and the daemon has some of them.
    pub const MAPINFO_NUM: u16 = 7;
    /// Both say which version of the messages they know.
    pub const HELLO: u16 = 8;
}

/// The message lacks an attribute, or has one of a wrong length or value, or is of an operation
/// that is not sent in this direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("message of the port mapper that is not valid")]
pub struct Invalid;

/// Message from the kernel. Flags are absent in version 3 of the messages. An `echo` is the
/// sequence number of the last message that the kernel has received of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `RDMA_NL_IWPM_REG_PID`: a device of the client is about to be used.
    RegPid {
        /// See [`Request`].
        echo: u32,
        /// Network interface of the device.
        interface: String,
        /// RDMA device.
        device: String,
        /// Name of the service that is looked for.
        library: String,
    },
    /// `RDMA_NL_IWPM_ADD_MAPPING`: a listener.
    AddMapping {
        /// See [`Request`].
        echo: u32,
        /// Address of the listener; its IP address may be unspecified.
        local: SocketAddr,
        /// [`NO_PORT_MAP`](super::NO_PORT_MAP).
        flags: Option<u32>,
    },
    /// `RDMA_NL_IWPM_QUERY_MAPPING`: a connection that is about to be made.
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
    /// `RDMA_NL_IWPM_REMOVE_MAPPING`: the end of a listener or of a connection.
    RemoveMapping {
        /// See [`Request`].
        echo: u32,
        /// Local address of the mapping.
        local: SocketAddr,
    },
    /// `RDMA_NL_IWPM_MAPINFO`: a mapping that the kernel had of an earlier daemon.
    MapInfo {
        /// Local address.
        local: SocketAddr,
        /// The address it is mapped to.
        mapped: SocketAddr,
        /// [`NO_PORT_MAP`](super::NO_PORT_MAP).
        flags: Option<u32>,
    },
    /// `RDMA_NL_IWPM_MAPINFO_NUM`: the end of the mappings.
    MapInfoNum {
        /// See [`Request`]; always zero in Linux.
        echo: u32,
        /// Number of mappings that were sent.
        sent: u32,
    },
    /// `RDMA_NL_IWPM_HELLO`, the answer to [`Response::Hello`].
    Hello {
        /// Version of the messages that the kernel has chosen.
        abi: u16,
    },
}

/// Addresses of a connection, at both ends, before and behind the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Local address.
    pub local: SocketAddr,
    /// Remote address.
    pub remote: SocketAddr,
    /// The address that the local one is mapped to.
    pub mapped_local: SocketAddr,
    /// The address that the remote one is mapped to.
    pub mapped_remote: SocketAddr,
}

/// Message to the kernel. A `sequence` is that of the request. An `error` is zero, or the number of
/// an [`ErrorCode`](super::ErrorCode).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// `RDMA_NL_IWPM_REG_PID`: here is the port mapper.
    RegPid {
        /// See [`Response`].
        sequence: u32,
        /// RDMA device, as in the request.
        device: String,
        /// Name of the service.
        library: String,
        /// Version of the messages.
        version: u16,
        /// See [`Response`].
        error: u16,
    },
    /// `RDMA_NL_IWPM_ADD_MAPPING`: where to listen.
    AddMapping {
        /// See [`Response`].
        sequence: u32,
        /// Local address, as in the request.
        local: SocketAddr,
        /// The address it is mapped to.
        mapped: SocketAddr,
        /// See [`Response`].
        error: u16,
    },
    /// `RDMA_NL_IWPM_QUERY_MAPPING`: what to connect to, or the other host's refusal.
    QueryMapping {
        /// See [`Response`].
        sequence: u32,
        /// The connection.
        connection: Connection,
        /// See [`Response`].
        error: u16,
    },
    /// `RDMA_NL_IWPM_REMOTE_INFO`: another host is about to connect to a listener.
    RemoteInfo {
        /// The connection; its local addresses are those of the listener.
        connection: Connection,
    },
    /// `RDMA_NL_IWPM_HANDLE_ERR`: a request is refused.
    HandleErr {
        /// See [`Response`].
        sequence: u32,
        /// Number of an [`ErrorCode`](super::ErrorCode).
        code: u16,
    },
    /// `RDMA_NL_IWPM_MAPINFO`: asks for the kernel's mappings.
    MapInfo {
        /// Name of the service.
        library: String,
        /// Version of the messages.
        version: u16,
    },
    /// `RDMA_NL_IWPM_MAPINFO_NUM`: how many mappings of the kernel's the daemon has.
    MapInfoNum {
        /// See [`Response`].
        sequence: u32,
        /// Number of mappings that were sent.
        sent: u32,
        /// Number of those that the daemon has.
        acknowledged: u32,
    },
    /// `RDMA_NL_IWPM_HELLO`: the daemon is there.
    Hello {
        /// Newest version of the messages that it knows.
        abi: u16,
    },
}

/// The attributes of a message by their type; a later one of the same type replaces an earlier one,
/// as in the kernel.
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

/// A message that is being written, with the values that this protocol has.
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

    /// A field of a fixed size, as the kernel has them.
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
    /// The operation of the message.
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

    /// Reads what follows the header of a message of the kernel's.
    ///
    /// # Errors
    /// [`Invalid`]. Attributes of types that are not known are no error.
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

    /// The message with its header, as the kernel sends it for a client. Names that are too long
    /// are cut.
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
    /// The operation of the message.
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

    /// Reads what follows the header of a message of the daemon's.
    ///
    /// # Errors
    /// [`Invalid`]. Attributes of types that are not known are no error.
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
                // The kernel insists on both, and uses neither.
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

    /// The message with its header, to a client of the kernel's, from the socket of this port.
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
