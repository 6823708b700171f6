//! Local socket of `ibacm` (`<infiniband/acm.h>`), used by programs to resolve paths.
//!
//! librdmacm and `ib_acme` connect to a Unix socket, send a request and receive a response:
//!
//! | operation | request | response |
//! | --- | --- | --- |
//! | RESOLVE | a path record, or a destination (name or IP address) with an optional source | a path record, and the source unless it was specified |
//! | PERF_QUERY | an optional endpoint | counters |
//! | EP_QUERY | endpoint number | device, port and addresses of the endpoint |
//!
//! RESOLVE uses host byte order, the other operations use network byte order. Path records are
//! always in network byte order. Requests that bypass the cache ([`flags::QUERY_SA`]) are handled
//! like any other request: there is no cache, because paths are computed.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use riser_transport::nic::device_guid;
use riser_transport::verbs::{Gid, PKey};
use zerocopy::IntoBytes as _;

use crate::ls::PathFlags;
use crate::sa::administrator::Administrator;
use crate::sa::resolver::{Resolver, Unresolved};
use crate::sa::wire::Record as _;
use crate::sa::wire::path::{PathMask, PathRecord};

/// Protocol version.
const VERSION: u8 = 1;

/// Length in bytes of the header, of an endpoint in a message, and of an address in an endpoint.
const HEADER: usize = 16;
const ENDPOINT: usize = 72;
const ADDRESS: usize = 64;

/// Maximum message length: eight endpoints.
pub const MAX_MESSAGE: usize = HEADER + 8 * ENDPOINT;

/// Operations (`ACM_OP_…`), and the response bit.
mod op {
    pub(super) const MASK: u8 = 0x0f;
    pub(super) const RESOLVE: u8 = 1;
    pub(super) const PERF_QUERY: u8 = 2;
    pub(super) const EP_QUERY: u8 = 3;
    pub(super) const ACK: u8 = 0x80;
}

/// Endpoint flags of a request (`ACM_EP_FLAG_…`, `ACM_FLAGS_…`).
pub mod flags {
    /// The endpoint is the source.
    pub const SOURCE: u32 = 1;
    /// The endpoint is the destination.
    pub const DEST: u32 = 1 << 1;
    /// Use cached information only, without network requests.
    pub const NODELAY: u32 = 1 << 30;
    /// Query subnet administration.
    pub const QUERY_SA: u32 = 1 << 31;
}

/// Endpoint types (`ACM_EP_INFO_…`).
mod kind {
    pub(super) const NAME: u16 = 1;
    pub(super) const IP: u16 = 2;
    pub(super) const IP6: u16 = 3;
    pub(super) const PATH: u16 = 0x10;
}

/// Result of a request (`ACM_STATUS_…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Success = 0,
    Einval = 2,
    Enodata = 3,
    Esrcaddr = 7,
    Esrctype = 8,
    Edestaddr = 9,
    Edesttype = 10,
}

impl From<Unresolved> for Status {
    fn from(reason: Unresolved) -> Self {
        match reason {
            Unresolved::Source => Self::Esrcaddr,
            Unresolved::Destination => Self::Edestaddr,
            Unresolved::NoPath => Self::Enodata,
        }
    }
}

/// Counters of the service, in the order of `ACM_CNTR_…`: errors, resolutions, resolutions without
/// data, then address queries and address cache hits, route queries and route cache hits.
#[derive(Debug, Default)]
pub struct Counters([AtomicU64; 7]);

impl Counters {
    const ERROR: usize = 0;
    const RESOLVE: usize = 1;
    const NODATA: usize = 2;
    const ROUTE_QUERY: usize = 5;

    fn add(&self, counter: usize) {
        self.0[counter].fetch_add(1, Ordering::Relaxed);
    }
}

/// Handler of requests from programs.
pub struct Service<'a> {
    /// Addresses and names of the host.
    pub resolver: &'a Resolver,
    /// Subnet administration.
    pub administrator: &'a Administrator,
    /// Counters.
    pub counters: &'a Counters,
}

/// Endpoint of a request or response.
#[derive(Clone, Copy)]
struct Endpoint {
    flags: u32,
    kind: u16,
    info: [u8; ADDRESS],
}

impl Endpoint {
    fn parse(bytes: &[u8]) -> Self {
        let mut info = [0; ADDRESS];
        info.copy_from_slice(&bytes[8..ENDPOINT]);
        Self {
            flags: u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            kind: u16::from_ne_bytes([bytes[4], bytes[5]]),
            info,
        }
    }

    fn emit(&self) -> [u8; ENDPOINT] {
        let mut bytes = [0; ENDPOINT];
        bytes[..4].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.kind.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.info);
        bytes
    }

    fn path(&self) -> PathRecord {
        PathRecord::read(&self.info).expect("an endpoint has room for a record")
    }

    fn of_path(flags: PathFlags, path: &PathRecord) -> Self {
        let mut info = [0; ADDRESS];
        info.copy_from_slice(path.as_bytes());
        Self {
            flags: flags.bits(),
            kind: kind::PATH,
            info,
        }
    }

    fn of_source(addr: IpAddr) -> Self {
        let mut info = [0; ADDRESS];
        let kind = match addr {
            IpAddr::V4(v4) => {
                info[..4].copy_from_slice(&v4.octets());
                kind::IP
            }
            IpAddr::V6(v6) => {
                info[..16].copy_from_slice(&v6.octets());
                kind::IP6
            }
        };
        Self {
            flags: flags::SOURCE,
            kind,
            info,
        }
    }

    /// Returns the address, or `None` if this endpoint type has no address.
    fn addr(&self, resolver: &Resolver) -> Option<Result<IpAddr, Unresolved>> {
        let [a, b, c, d, ..] = self.info;
        Some(match self.kind {
            kind::IP => Ok([a, b, c, d].into()),
            kind::IP6 => {
                let v6: [u8; 16] = std::array::from_fn(|i| self.info[i]);
                Ok(IpAddr::from(v6).to_canonical())
            }
            kind::NAME => {
                let name = self
                    .info
                    .split(|byte| *byte == 0)
                    .next()
                    .unwrap_or_default();
                let name = std::str::from_utf8(name).map_err(|_| Unresolved::Destination);
                name.and_then(|name| resolver.find(name))
            }
            _ => return None,
        })
    }
}

impl Service<'_> {
    /// Returns the response to a message. `None` means that the message is malformed and the
    /// connection must be closed.
    #[must_use]
    pub fn respond_to(&self, message: &[u8]) -> Option<Vec<u8>> {
        let header: [u8; HEADER] = message.get(..HEADER)?.try_into().ok()?;
        let [version, operation, _, out, index, _, a, b, ..] = header;
        let operation = operation & op::MASK;
        let length = match operation {
            op::RESOLVE => u16::from_ne_bytes([a, b]),
            _ => u16::from_be_bytes([a, b]),
        };
        if version != VERSION || usize::from(length) != message.len() || message.len() > MAX_MESSAGE
        {
            return None;
        }
        let endpoints: Vec<Endpoint> = message[HEADER..]
            .chunks_exact(ENDPOINT)
            .map(Endpoint::parse)
            .collect();
        let (status, out, body) = match operation {
            op::RESOLVE => match self.resolve(&endpoints) {
                Ok(body) => (Status::Success, 0, body),
                Err(status) => {
                    let counter = match status {
                        Status::Enodata => Counters::NODATA,
                        _ => Counters::ERROR,
                    };
                    self.counters.add(counter);
                    (status, 0, Vec::new())
                }
            },
            op::PERF_QUERY => self.count(index, &endpoints),
            op::EP_QUERY => match self.endpoint(out) {
                Some(body) => (Status::Success, out, body),
                None => (Status::Einval, out, Vec::new()),
            },
            _ => return None,
        };
        let length = (HEADER + body.len()) as u16;
        let mut response = header.to_vec();
        response[1] = operation | op::ACK;
        response[2..6].copy_from_slice(&[status as u8, out, 0, 0]);
        response[6..8].copy_from_slice(&match operation {
            op::RESOLVE => length.to_ne_bytes(),
            _ => length.to_be_bytes(),
        });
        response.extend(body);
        Some(response)
    }

    fn resolve(&self, endpoints: &[Endpoint]) -> Result<Vec<u8>, Status> {
        self.counters.add(Counters::RESOLVE);
        self.counters.add(Counters::ROUTE_QUERY);
        let flags = PathFlags::GMP | PathFlags::PRIMARY | PathFlags::BIDIRECTIONAL;
        let endpoint_of = |path: &PathRecord| Endpoint::of_path(flags, path).emit().to_vec();
        let first = endpoints.first().ok_or(Status::Edesttype)?;
        if first.kind == kind::PATH {
            let wanted = first.path();
            let mut mask = components(&wanted);
            mask.set(PathMask::NUMB_PATH, false);
            let path = self.resolver.path(self.administrator, mask, &wanted)?;
            return Ok(endpoint_of(&path));
        }
        let the = |flag: u32, twice: Status| {
            let mut all = endpoints.iter().filter(|e| e.flags & flag != 0);
            match (all.next(), all.next()) {
                (_, Some(_)) => Err(twice),
                (one, None) => Ok(one),
            }
        };
        let source = the(flags::SOURCE, Status::Esrcaddr)?;
        let destination = the(flags::DEST, Status::Edestaddr)?.ok_or(Status::Edesttype)?;
        let destination = destination.addr(self.resolver).ok_or(Status::Edesttype)??;
        let given = source
            .map(|s| s.addr(self.resolver).ok_or(Status::Esrctype))
            .transpose()?;
        let given = given.transpose().map_err(|_| Status::Esrcaddr)?;
        let wanted = PathRecord {
            dgid: Gid::from(destination).0,
            sgid: given.map_or([0; 16], |addr| Gid::from(addr).0),
            ..PathRecord::default()
        };
        let path = self
            .resolver
            .path(self.administrator, components(&wanted), &wanted)?;
        let mut body = endpoint_of(&path);
        if given.is_none() {
            body.extend(Endpoint::of_source(path.sgid().ip()).emit());
        }
        Ok(body)
    }

    /// Returns the total counters. An address has a single endpoint with the same counters.
    fn count(&self, index: u8, endpoints: &[Endpoint]) -> (Status, u8, Vec<u8>) {
        let of = endpoints
            .first()
            .filter(|endpoint| endpoint.flags & flags::SOURCE != 0);
        let is_ours = match (of, index) {
            (Some(endpoint), _) => {
                let addr = endpoint.addr(self.resolver).and_then(Result::ok);
                addr.is_some_and(|addr| self.resolver.addrs().contains(&addr))
            }
            (None, 0) => true,
            (None, index) => usize::from(index) <= self.resolver.addrs().len(),
        };
        if !is_ours {
            return (Status::Esrcaddr, 0, Vec::new());
        }
        let values = self.counters.0.iter();
        let body = values.flat_map(|counter| counter.load(Ordering::Relaxed).to_be_bytes());
        (Status::Success, self.counters.0.len() as u8, body.collect())
    }

    /// Returns an endpoint of this host: one address, counted from 1.
    fn endpoint(&self, number: u8) -> Option<Vec<u8>> {
        let addr = self
            .resolver
            .addrs()
            .get(usize::from(number).checked_sub(1)?)?;
        let mut body = device_guid(*addr).to_be_bytes().to_vec();
        // The device has a single port.
        body.extend([1, 1, 0, 0]);
        body.extend(PKey::DEFAULT.0.to_be_bytes());
        body.extend(1u16.to_be_bytes());
        let mut text = |text: &str| {
            let mut place = [0; ADDRESS];
            place[..text.len()].copy_from_slice(text.as_bytes());
            body.extend(place);
        };
        text("riser-sa");
        text(&addr.to_string());
        Some(body)
    }
}

/// Returns the fields that a program's record specifies: all nonzero fields.
fn components(wanted: &PathRecord) -> PathMask {
    let given = [
        (PathMask::SERVICE_ID, wanted.service_id.get() != 0),
        (PathMask::DGID, wanted.dgid != [0; 16]),
        (PathMask::SGID, wanted.sgid != [0; 16]),
        (PathMask::DLID, wanted.dlid.get() != 0),
        (PathMask::SLID, wanted.slid.get() != 0),
        (PathMask::FLOW_LABEL, wanted.flow_label() != 0),
        (PathMask::TRAFFIC_CLASS, wanted.traffic_class != 0),
        (PathMask::REVERSIBLE, wanted.is_reversible()),
        (PathMask::PKEY, wanted.pkey.get() != 0),
        (PathMask::QOS_CLASS, wanted.qos_class() != 0),
        (PathMask::SL, wanted.sl() != 0),
        (PathMask::MTU | PathMask::MTU_SELECTOR, wanted.mtu.0 != 0),
        (PathMask::RATE | PathMask::RATE_SELECTOR, wanted.rate.0 != 0),
        (
            PathMask::PACKET_LIFE_TIME | PathMask::PACKET_LIFE_TIME_SELECTOR,
            wanted.packet_life_time.0 != 0,
        ),
    ];
    let given = given.into_iter().filter(|(_, is)| *is);
    given.map(|(bit, _)| bit).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use riser_transport::verbs::Mtu;

    use super::*;
    use crate::sa::administrator::AdministratorConfig;

    fn with<T>(serve: impl FnOnce(&Service<'_>) -> T) -> T {
        let addrs = vec![IpAddr::from([10, 0, 0, 1]), "fd00::1".parse().unwrap()];
        let names = BTreeMap::from([("other".to_owned(), IpAddr::from([10, 0, 0, 2]))]);
        let config = AdministratorConfig::new(addrs[0], Mtu::Mtu4096, [1; 16]);
        serve(&Service {
            resolver: &Resolver::new(addrs, names),
            administrator: &Administrator::new(config),
            counters: &Counters::default(),
        })
    }

    /// Builds a request as libibacm sends it on a little-endian host.
    fn question(endpoints: &[(u32, u16, &[u8])]) -> Vec<u8> {
        let len = 16 + 72 * endpoints.len() as u16;
        let mut bytes = vec![1, 1, 0, 0, 0, 0, len as u8, (len >> 8) as u8];
        bytes.extend([9, 8, 7, 6, 5, 4, 3, 2]);
        for (flags, kind, info) in endpoints {
            bytes.extend(flags.to_le_bytes());
            bytes.extend([*kind as u8, 0, 0, 0]);
            bytes.extend(*info);
            bytes.resize(bytes.len() + 64 - info.len(), 0);
        }
        bytes
    }

    #[test]
    fn resolve_returns_path_and_source() {
        let response = with(|s| s.respond_to(&question(&[(2, 2, &[10, 0, 0, 2])]))).unwrap();
        let mut expected = vec![1, 0x81, 0, 0, 0, 0, 160, 0, 9, 8, 7, 6, 5, 4, 3, 2];
        expected.extend([0x2b, 0, 0, 0, 0x10, 0, 0, 0]);
        expected.extend([0; 8]);
        expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]);
        expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
        expected.extend([0, 0, 0, 0, 0, 0, 0, 64, 0, 0x80, 0xff, 0xff, 0, 0]);
        expected.extend([0x85, 0x82, 0x92, 0, 0, 0, 0, 0, 0, 0]);
        // The selected source.
        expected.extend([1, 0, 0, 0, 2, 0, 0, 0, 10, 0, 0, 1]);
        expected.resize(160, 0);
        assert_eq!(response, expected);
        // By name, with a source, and for IPv6.
        for endpoints in [
            &[(2, 1, &b"other"[..])][..],
            &[(2, 1, b"10.0.0.2")],
            &[(1, 2, &[10, 0, 0, 1]), (2 | 1 << 31, 2, &[10, 0, 0, 2])],
            &[(2, 3, &[0xfd; 16])],
        ] {
            let response = with(|s| s.respond_to(&question(endpoints))).unwrap();
            assert_eq!(response[2], 0, "{endpoints:?}");
        }
        // The returned record can be used as a request for the same path.
        let path = &response[24..88];
        let again = with(|s| s.respond_to(&question(&[(1 << 31, 16, path)]))).unwrap();
        assert_eq!(again[16..], response[16..88]);
    }

    #[test]
    fn invalid_requests_return_status() {
        let ours = (1, 2, &[10, 0, 0, 1][..]);
        let other = (2, 2, &[10, 0, 0, 2][..]);
        for (endpoints, status) in [
            (&[][..], 10),
            (&[ours], 10),
            (&[other, other], 9),
            (&[ours, ours, other], 7),
            (&[(1, 2, &[10, 0, 0, 9]), other], 7),
            (&[(1, 5, &[]), other], 8),
            (&[(2, 5, &[])], 10),
            (&[(2, 1, b"unknown")], 9),
            (&[(2, 2, &[224, 0, 0, 1])], 3),
            (&[(0, 16, &[])], 9),
        ] {
            let response = with(|s| s.respond_to(&question(endpoints))).unwrap();
            assert_eq!((response[2], response.len()), (status, 16), "{endpoints:?}");
        }
        // Unsupported version, length and operation.
        for at in [0, 1, 6] {
            let mut bytes = question(&[other]);
            bytes[at] = 7;
            assert_eq!(with(|s| s.respond_to(&bytes)), None, "{at}");
        }
    }

    #[test]
    fn endpoints_and_counters_use_network_order() {
        let request = |operation, out| [1, operation, 0, out, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0];
        let endpoint = with(|s| s.respond_to(&request(3, 2))).unwrap();
        assert_eq!(endpoint[..8], [1, 0x83, 0, 2, 0, 0, 0, 16 + 16 + 128]);
        assert_eq!(endpoint[24..32], [1, 1, 0, 0, 0xff, 0xff, 0, 1]);
        assert_eq!(endpoint[32..40], *b"riser-sa");
        assert_eq!(endpoint[96..104], *b"fd00::1\0");
        for number in [0, 3] {
            assert_eq!(with(|s| s.respond_to(&request(3, number))).unwrap()[2], 2);
        }
        let counters = with(|s| {
            s.respond_to(&question(&[(2, 2, &[10, 0, 0, 2])])).unwrap();
            s.respond_to(&request(2, 0)).unwrap()
        });
        assert_eq!(counters[..8], [1, 0x82, 0, 7, 0, 0, 0, 72]);
        assert_eq!(counters[24..32], [0, 0, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn acm_message() {
        with(|service| {
            bolero::check!(name = "acm_message").for_each(|input: &[u8]| {
                let mut message = vec![1, 1, 0, 0, 0, 0, 0, 0];
                message.extend(input);
                let [low, high] = (message.len() as u16).to_ne_bytes();
                message[6..8].copy_from_slice(&[low, high]);
                for message in [input, &message] {
                    if let Some(response) = service.respond_to(message) {
                        assert!(response.len() <= MAX_MESSAGE && response[1] & 0x80 != 0);
                    }
                }
            });
        });
    }
}
