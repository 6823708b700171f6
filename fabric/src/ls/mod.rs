//! Local services of the kernel's InfiniBand stack (`RDMA_NL_LS` of `<rdma/rdma_netlink.h>`).
//!
//! `ib_sa` requests paths, and `ib_core` the GID of an IP address, from a local program before they
//! use the network, if a program has joined the multicast group
//! [`LS_GROUP`](crate::netlink::LS_GROUP):
//!
//! ```text
//! kernel                                      program
//!   RESOLVE, sequence 7, device, attributes ──▶
//!   ◀── RESOLVE, sequence 7, path records        or flag F_ERR: the kernel queries the administrator
//!   IP_RESOLVE, sequence 8, address ──────────▶
//!   ◀── IP_RESOLVE, sequence 8, GID              or flag F_ERR
//!   ◀── SET_TIMEOUT, milliseconds                the kernel's timeout for these responses
//! ```
//!
//! Numbers are in host byte order, GIDs and addresses in network byte order. Requests have the flag
//! `NLM_F_REQUEST`: all messages from the kernel, and SET_TIMEOUT from the program.

use std::net::IpAddr;
use std::time::Duration;

use bitflags::bitflags;
use riser_transport::verbs::Gid;
use thiserror::Error;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::netlink::attribute::{Attribute, Attributes};
use crate::netlink::message::{self, ACK, Header, Kind, Messages, REQUEST, Writer};
use crate::sa::administrator::Administrator;
use crate::sa::resolver::Resolver;
use crate::sa::wire::path::{PathMask, PathRecord, REVERSIBLE};

/// Number of the local service (`RDMA_NL_LS`).
const CLIENT: u8 = 4;

/// The request failed (`RDMA_NL_LS_F_ERR`).
const F_ERR: u16 = 0x0100;

/// Header lengths before the attributes, including padding: name, port and use of a path; interface
/// index.
const DEVICE_NAME: usize = 64;
const RESOLVE_HEADER: usize = 68;
const IP_RESOLVE_HEADER: usize = 4;

/// The receiver must support the attribute or reject the request (`RDMA_NLA_F_MANDATORY`).
const MANDATORY: u16 = 1 << 13;

/// Timeouts accepted by the kernel (`sa_query.c`), in milliseconds.
pub const TIMEOUTS: std::ops::RangeInclusive<u32> = 100..=200_000;

/// Maximum number of path records in a response, for a connection with an alternate path.
pub const MAX_PATHS: usize = 6;

/// Operations.
mod op {
    pub(super) const RESOLVE: u16 = 0;
    pub(super) const SET_TIMEOUT: u16 = 1;
    pub(super) const IP_RESOLVE: u16 = 2;
}

/// Attribute types (`LS_NLA_TYPE_…`).
mod kind {
    pub(super) const PATH_RECORD: u16 = 1;
    pub(super) const TIMEOUT: u16 = 2;
    pub(super) const SERVICE_ID: u16 = 3;
    pub(super) const DGID: u16 = 4;
    pub(super) const SGID: u16 = 5;
    pub(super) const TCLASS: u16 = 6;
    pub(super) const PKEY: u16 = 7;
    pub(super) const QOS_CLASS: u16 = 8;
    pub(super) const IPV4: u16 = 9;
    pub(super) const IPV6: u16 = 10;
}

/// Intended use of the requested paths (`LS_RESOLVE_PATH_USE_…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PathUse {
    /// Connection: up to six records.
    All = 0,
    /// Datagrams in one direction: one record.
    Unidirectional = 1,
    /// Management datagrams: at least one record with a reversible path.
    Gmp = 2,
}

/// Path request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolve {
    /// Device name, at most 63 bytes.
    pub device: String,
    /// Port number.
    pub port: u8,
    /// Intended use of the path.
    pub path_use: PathUse,
    /// Service that will use the path.
    pub service_id: Option<u64>,
    /// GID of the destination.
    pub dgid: Option<Gid>,
    /// GID of the source.
    pub sgid: Option<Gid>,
    /// Traffic class.
    pub traffic_class: Option<u8>,
    /// Partition.
    pub pkey: Option<u16>,
    /// QoS class, 12 bits.
    pub qos_class: Option<u16>,
}

bitflags! {
    /// Type and direction of a path (`IB_PATH_…` of `<rdma/ib_user_sa.h>`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PathFlags: u32 {
        /// For management datagrams.
        const GMP = 1;
        /// Primary path.
        const PRIMARY = 1 << 1;
        /// Alternate path for migration.
        const ALTERNATE = 1 << 2;
        /// To the destination.
        const OUTBOUND = 1 << 3;
        /// From the destination.
        const INBOUND = 1 << 4;
        /// From the destination, via the same path.
        const INBOUND_REVERSE = 1 << 5;
        /// Both directions.
        const BIDIRECTIONAL = Self::OUTBOUND.bits() | Self::INBOUND_REVERSE.bits();
        /// Flags of later versions.
        const _ = !0;
    }
}

/// Path record with its type (`struct ib_path_rec_data`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathData {
    /// Type and direction.
    pub flags: PathFlags,
    /// Path record, as in subnet administration.
    pub record: PathRecord,
}

/// The peer could not execute the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the peer rejected the request")]
pub struct Refused;

/// Message body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Path request from the kernel.
    Resolve(Resolve),
    /// Path response.
    Resolved(Result<Vec<PathData>, Refused>),
    /// Sets the kernel's response timeout ([`TIMEOUTS`]), in whole milliseconds.
    SetTimeout(Duration),
    /// Request from the kernel for the GID of an address.
    IpResolve {
        /// Index of the outgoing interface.
        interface: u32,
        /// Address to resolve.
        addr: IpAddr,
    },
    /// GID response.
    IpResolved(Result<Gid, Refused>),
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Sequence number, which matches a response to its request.
    pub sequence: u32,
    /// Netlink port of the sender; the kernel uses 0.
    pub port: u32,
    /// Message body.
    pub body: Body,
}

/// Parse error.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LsError {
    /// The header or an attribute is truncated.
    #[error("truncated netlink message")]
    Truncated,
    /// The message type belongs to another service.
    #[error("unsupported netlink message type {0:#06x}: another service")]
    Service(u16),
    /// Unknown operation.
    #[error("unknown local service operation {0}")]
    Operation(u16),
    /// Unknown path use.
    #[error("unknown path use {0}")]
    PathUse(u8),
    /// Invalid attribute length.
    #[error("invalid length of local service attribute {0}")]
    Length(u16),
    /// Mandatory attribute that is unknown or not valid for this operation.
    #[error("unknown mandatory local service attribute {0}")]
    Mandatory(u16),
    /// A required attribute is missing.
    #[error("missing local service attribute {0}")]
    Missing(u16),
}

/// Splits a message of this service into header and payload.
fn split(bytes: &[u8]) -> Result<(Header, &[u8]), LsError> {
    match Messages::new(bytes).next() {
        Some(Ok(message::Message::Client { header, payload })) => {
            if header.kind.client != CLIENT {
                return Err(LsError::Service(header.kind.bits()));
            }
            Ok((header, payload))
        }
        Some(Ok(_)) => Err(LsError::Service(0)),
        Some(Err(_)) | None => Err(LsError::Truncated),
    }
}

fn is_request(header: &Header) -> bool {
    header.flags & REQUEST != 0
}

fn result<T>(
    header: &Header,
    value: impl FnOnce() -> Result<T, LsError>,
) -> Result<Result<T, Refused>, LsError> {
    if header.flags & F_ERR != 0 {
        return Ok(Err(Refused));
    }
    value().map(Ok)
}

fn attributes(bytes: &[u8]) -> impl Iterator<Item = Result<Attribute<'_>, LsError>> {
    Attributes::new(bytes).map(|found| found.map_err(|_| LsError::Truncated))
}

/// Returns the attribute type without the mandatory flag.
fn kind_of(attribute: &Attribute<'_>) -> u16 {
    attribute.kind & !MANDATORY
}

fn bytes_of<const N: usize>(attribute: &Attribute<'_>) -> Result<[u8; N], LsError> {
    let error = LsError::Length(kind_of(attribute));
    attribute.value.try_into().map_err(|_| error)
}

fn gid_of(attribute: &Attribute<'_>) -> Result<Gid, LsError> {
    bytes_of(attribute).map(Gid)
}

/// Ignores an unknown attribute unless it is mandatory.
fn pass_over(attribute: &Attribute<'_>) -> Result<(), LsError> {
    if attribute.kind & MANDATORY != 0 {
        return Err(LsError::Mandatory(kind_of(attribute)));
    }
    Ok(())
}

impl Message {
    /// Parses a message.
    ///
    /// # Errors
    /// Any of [`LsError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, LsError> {
        let (header, rest) = split(bytes)?;
        let body = match (header.kind.operation, is_request(&header)) {
            (op::RESOLVE, true) => Body::Resolve(parse_resolve(rest)?),
            (op::RESOLVE, false) => Body::Resolved(result(&header, || parse_paths(rest))?),
            (op::SET_TIMEOUT, _) => Body::SetTimeout(parse_timeout(rest)?),
            (op::IP_RESOLVE, true) => parse_ip_resolve(rest)?,
            (op::IP_RESOLVE, false) => Body::IpResolved(result(&header, || parse_gid(rest))?),
            (other, _) => return Err(LsError::Operation(other)),
        };
        Ok(Self {
            sequence: header.sequence,
            port: header.port,
            body,
        })
    }

    /// Returns the encoded message.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        self.emit_with(0)
    }

    fn emit_with(&self, more: u16) -> Vec<u8> {
        let refused = |is: bool| if is { F_ERR } else { 0 };
        let begin = |operation, flags| begin(operation, flags | more, self.sequence, self.port);
        let writer = match &self.body {
            Body::Resolve(resolve) => resolve.write(begin(op::RESOLVE, REQUEST)),
            Body::Resolved(result) => {
                let writer = begin(op::RESOLVE, refused(result.is_err()));
                result
                    .iter()
                    .flatten()
                    .fold(writer, |writer, path| path.write(writer))
            }
            Body::SetTimeout(time) => {
                let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
                let writer = begin(op::SET_TIMEOUT, REQUEST);
                writer.attribute(kind::TIMEOUT, &milliseconds.to_ne_bytes())
            }
            Body::IpResolve { interface, addr } => {
                let writer = begin(op::IP_RESOLVE, REQUEST).raw(&interface.to_ne_bytes());
                match addr {
                    IpAddr::V4(v4) => writer.attribute(kind::IPV4 | MANDATORY, &v4.octets()),
                    IpAddr::V6(v6) => writer.attribute(kind::IPV6 | MANDATORY, &v6.octets()),
                }
            }
            Body::IpResolved(result) => {
                let writer = begin(op::IP_RESOLVE, refused(result.is_err()));
                result
                    .iter()
                    .fold(writer, |writer, gid| writer.attribute(kind::DGID, &gid.0))
            }
        };
        writer.finish()
    }
}

fn begin(operation: u16, flags: u16, sequence: u32, port: u32) -> Writer {
    let kind = Kind {
        client: CLIENT,
        operation,
    };
    Writer::new(Header {
        kind,
        flags,
        sequence,
        port,
    })
}

impl Resolve {
    fn head(&self) -> Vec<u8> {
        let mut head = vec![0; RESOLVE_HEADER];
        let len = self.device.floor_char_boundary(DEVICE_NAME - 1);
        head[..len].copy_from_slice(&self.device.as_bytes()[..len]);
        head[DEVICE_NAME] = self.port;
        head[DEVICE_NAME + 1] = self.path_use as u8;
        head
    }

    /// Writes header and attributes in the kernel's order.
    fn write(&self, writer: Writer) -> Writer {
        let gid = |gid: Option<Gid>| gid.map(|gid| gid.0.to_vec());
        let word = |word: Option<u16>| word.map(|word| word.to_ne_bytes().to_vec());
        let id = self.service_id.map(|id| id.to_ne_bytes().to_vec());
        let all = [
            (kind::SERVICE_ID | MANDATORY, id),
            (kind::DGID | MANDATORY, gid(self.dgid)),
            (kind::SGID | MANDATORY, gid(self.sgid)),
            (kind::TCLASS, self.traffic_class.map(|class| vec![class])),
            (kind::PKEY | MANDATORY, word(self.pkey)),
            (kind::QOS_CLASS, word(self.qos_class)),
        ];
        let writer = writer.raw(&self.head());
        all.into_iter()
            .fold(writer, |writer, (kind, value)| match value {
                Some(value) => writer.attribute(kind, &value),
                None => writer,
            })
    }

    /// Returns the equivalent subnet-administration query: the record and its specified fields.
    #[must_use]
    pub fn question(&self) -> (PathMask, PathRecord) {
        let reversible = match self.path_use {
            PathUse::Unidirectional => 0,
            PathUse::All | PathUse::Gmp => REVERSIBLE,
        };
        let record = PathRecord {
            service_id: U64::new(self.service_id.unwrap_or_default()),
            dgid: self.dgid.map_or([0; 16], |gid| gid.0),
            sgid: self.sgid.map_or([0; 16], |gid| gid.0),
            traffic_class: self.traffic_class.unwrap_or_default(),
            reversible_and_count: reversible | 1,
            pkey: U16::new(self.pkey.unwrap_or_default()),
            qos_class_and_sl: U16::new(self.qos_class.unwrap_or_default() << 4),
            flow_label_and_hop_limit: U32::ZERO,
            ..PathRecord::default()
        };
        let given = [
            (PathMask::SERVICE_ID, self.service_id.is_some()),
            (PathMask::DGID, self.dgid.is_some()),
            (PathMask::SGID, self.sgid.is_some()),
            (PathMask::TRAFFIC_CLASS, self.traffic_class.is_some()),
            (PathMask::PKEY, self.pkey.is_some()),
            (PathMask::QOS_CLASS, self.qos_class.is_some()),
            (PathMask::REVERSIBLE | PathMask::NUMB_PATH, true),
        ];
        let given = given.into_iter().filter(|(_, is)| *is);
        (given.map(|(bit, _)| bit).collect(), record)
    }

    /// Returns the type and direction of the path in the response.
    #[must_use]
    pub fn flags(&self) -> PathFlags {
        match self.path_use {
            PathUse::Unidirectional => PathFlags::PRIMARY | PathFlags::OUTBOUND,
            PathUse::All | PathUse::Gmp => {
                PathFlags::PRIMARY | PathFlags::GMP | PathFlags::BIDIRECTIONAL
            }
        }
    }
}

impl PathData {
    /// Writes flags, a reserved word, and the record.
    fn write(&self, writer: Writer) -> Writer {
        let mut value = self.flags.bits().to_ne_bytes().to_vec();
        value.extend([0; 4]);
        value.extend(self.record.as_bytes());
        writer.attribute(kind::PATH_RECORD, &value)
    }

    fn parse(attribute: &Attribute<'_>) -> Result<Self, LsError> {
        let bytes: [u8; 72] = bytes_of(attribute)?;
        let [a, b, c, d, _, _, _, _, record @ ..] = bytes;
        Ok(Self {
            flags: PathFlags::from_bits_retain(u32::from_ne_bytes([a, b, c, d])),
            record: PathRecord::read_from_bytes(&record).expect("as many bytes"),
        })
    }
}

fn parse_resolve(bytes: &[u8]) -> Result<Resolve, LsError> {
    let (head, rest) = bytes
        .split_at_checked(RESOLVE_HEADER)
        .ok_or(LsError::Truncated)?;
    let name = head[..DEVICE_NAME].split(|byte| *byte == 0).next();
    let path_use = match head[DEVICE_NAME + 1] {
        0 => PathUse::All,
        1 => PathUse::Unidirectional,
        2 => PathUse::Gmp,
        other => return Err(LsError::PathUse(other)),
    };
    let mut resolve = Resolve {
        device: String::from_utf8_lossy(name.unwrap_or_default()).into_owned(),
        port: head[DEVICE_NAME],
        path_use,
        service_id: None,
        dgid: None,
        sgid: None,
        traffic_class: None,
        pkey: None,
        qos_class: None,
    };
    for attribute in attributes(rest) {
        let attribute = attribute?;
        match kind_of(&attribute) {
            kind::SERVICE_ID => {
                resolve.service_id = Some(u64::from_ne_bytes(bytes_of(&attribute)?));
            }
            kind::DGID => resolve.dgid = Some(gid_of(&attribute)?),
            kind::SGID => resolve.sgid = Some(gid_of(&attribute)?),
            kind::TCLASS => resolve.traffic_class = Some(bytes_of::<1>(&attribute)?[0]),
            kind::PKEY => resolve.pkey = Some(u16::from_ne_bytes(bytes_of(&attribute)?)),
            kind::QOS_CLASS => {
                resolve.qos_class = Some(u16::from_ne_bytes(bytes_of(&attribute)?));
            }
            _ => pass_over(&attribute)?,
        }
    }
    Ok(resolve)
}

fn parse_paths(bytes: &[u8]) -> Result<Vec<PathData>, LsError> {
    let mut paths = Vec::new();
    for attribute in attributes(bytes) {
        let attribute = attribute?;
        match kind_of(&attribute) {
            kind::PATH_RECORD if paths.len() < MAX_PATHS => {
                paths.push(PathData::parse(&attribute)?);
            }
            _ => pass_over(&attribute)?,
        }
    }
    if paths.is_empty() {
        return Err(LsError::Missing(kind::PATH_RECORD));
    }
    Ok(paths)
}

fn parse_timeout(bytes: &[u8]) -> Result<Duration, LsError> {
    let mut found = Err(LsError::Missing(kind::TIMEOUT));
    for attribute in attributes(bytes) {
        let attribute = attribute?;
        match kind_of(&attribute) {
            kind::TIMEOUT => found = Ok(u32::from_ne_bytes(bytes_of(&attribute)?)),
            _ => pass_over(&attribute)?,
        }
    }
    found.map(|milliseconds| Duration::from_millis(milliseconds.into()))
}

fn parse_ip_resolve(bytes: &[u8]) -> Result<Body, LsError> {
    let (head, rest) = bytes
        .split_at_checked(IP_RESOLVE_HEADER)
        .ok_or(LsError::Truncated)?;
    let interface = u32::from_ne_bytes(head.try_into().map_err(|_| LsError::Truncated)?);
    let mut found = Err(LsError::Missing(kind::IPV4));
    for attribute in attributes(rest) {
        let attribute = attribute?;
        match kind_of(&attribute) {
            kind::IPV4 => found = Ok(IpAddr::from(bytes_of::<4>(&attribute)?)),
            kind::IPV6 => found = Ok(IpAddr::from(bytes_of::<16>(&attribute)?)),
            _ => pass_over(&attribute)?,
        }
    }
    found.map(|addr| Body::IpResolve { interface, addr })
}

fn parse_gid(bytes: &[u8]) -> Result<Gid, LsError> {
    let mut found = Err(LsError::Missing(kind::DGID));
    for attribute in attributes(bytes) {
        let attribute = attribute?;
        match kind_of(&attribute) {
            kind::DGID => found = gid_of(&attribute),
            _ => pass_over(&attribute)?,
        }
    }
    found
}

/// Builds the first message to the kernel, which the kernel acknowledges. It sets the timeout, or
/// without one is a response to a nonexistent request. An error indicates that the kernel does not
/// accept responses from this program.
#[must_use]
pub fn hello(timeout: Option<Duration>, port: u32) -> Vec<u8> {
    let message = Message {
        // The kernel numbers its requests from 1.
        sequence: 0,
        port,
        body: timeout.map_or(Body::Resolved(Err(Refused)), Body::SetTimeout),
    };
    message.emit_with(ACK)
}

/// Builds the response to a message from the kernel. `port` is the netlink port of the program.
/// Returns `None` if the message is not a request for this service. A malformed request is
/// rejected, so that the kernel does not have to wait for a timeout.
#[must_use]
pub fn respond(
    bytes: &[u8],
    port: u32,
    resolver: &Resolver,
    administrator: &Administrator,
) -> Option<Vec<u8>> {
    let (header, _) = split(bytes).ok()?;
    if !is_request(&header) || header.flags & F_ERR != 0 {
        return None;
    }
    let reply = |body| {
        let sequence = header.sequence;
        Some(
            Message {
                sequence,
                port,
                body,
            }
            .emit(),
        )
    };
    match Message::parse(bytes).map(|message| message.body) {
        Ok(Body::Resolve(resolve)) => {
            let (mask, wanted) = resolve.question();
            let flags = resolve.flags();
            let path = resolver.path(administrator, mask, &wanted);
            let path = path.map(|record| vec![PathData { flags, record }]);
            reply(Body::Resolved(path.map_err(|_| Refused)))
        }
        Ok(Body::IpResolve { addr, .. }) => {
            let is_host = !addr.is_unspecified() && !addr.is_multicast();
            reply(Body::IpResolved(
                is_host.then(|| addr.into()).ok_or(Refused),
            ))
        }
        Ok(_) => None,
        Err(_) => {
            let operation = header.kind.operation;
            Some(begin(operation, F_ERR, header.sequence, port).finish())
        }
    }
}

#[cfg(test)]
mod tests;
