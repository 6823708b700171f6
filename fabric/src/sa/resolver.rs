//! Local path resolution, the role of `ibacm` on a host.
//!
//! Requests arrive from the kernel over netlink ([`crate::ls`]) and from programs over a local
//! socket ([`crate::acm`]). Both name a destination and optionally a source, which must be an
//! address of this host.

use std::collections::BTreeMap;
use std::net::IpAddr;

use riser_transport::verbs::Gid;
use thiserror::Error;

use super::administrator::Administrator;
use super::wire::path::{PathMask, PathRecord};

/// Reason for a failed resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unresolved {
    /// The source is not an address of this host, or no local address matches the destination's
    /// family.
    #[error("invalid source: not an address of this host")]
    Source,
    /// The destination is an unknown name or not a host address.
    #[error("invalid destination: unknown name, or not a host address")]
    Destination,
    /// Subnet administration knows no such path.
    #[error("no path to the destination")]
    NoPath,
}

/// Known addresses and names of a host.
#[derive(Clone, Debug, Default)]
pub struct Resolver {
    addrs: Vec<IpAddr>,
    names: BTreeMap<String, IpAddr>,
}

impl Resolver {
    /// Creates a resolver for a host with these addresses and names of remote hosts.
    #[must_use]
    pub fn new(addrs: Vec<IpAddr>, names: BTreeMap<String, IpAddr>) -> Self {
        Self { addrs, names }
    }

    /// Returns the addresses of this host.
    #[must_use]
    pub fn addrs(&self) -> &[IpAddr] {
        &self.addrs
    }

    /// Returns the address of a name, or parses it if it is an address.
    ///
    /// # Errors
    /// [`Unresolved::Destination`].
    pub fn find(&self, name: &str) -> Result<IpAddr, Unresolved> {
        let known = name.parse().ok().or_else(|| self.names.get(name).copied());
        known.ok_or(Unresolved::Destination)
    }

    /// Returns the source for a destination: `given` if present, or else the first local address of
    /// the same family.
    ///
    /// # Errors
    /// [`Unresolved::Source`].
    pub fn source(&self, given: Option<IpAddr>, destination: IpAddr) -> Result<IpAddr, Unresolved> {
        let goes = |addr: &&IpAddr| match given {
            Some(given) => **addr == given,
            None => addr.is_ipv4() == destination.is_ipv4(),
        };
        self.addrs
            .iter()
            .find(goes)
            .copied()
            .ok_or(Unresolved::Source)
    }

    /// Returns the path requested by the selected fields of a record. A missing source is chosen.
    ///
    /// # Errors
    /// Any of [`Unresolved`].
    pub fn path(
        &self,
        administrator: &Administrator,
        mask: PathMask,
        wanted: &PathRecord,
    ) -> Result<PathRecord, Unresolved> {
        if !mask.contains(PathMask::DGID) || wanted.dgid == [0; 16] {
            return Err(Unresolved::Destination);
        }
        let given = mask.contains(PathMask::SGID).then(|| wanted.sgid().ip());
        let source = self.source(given, wanted.dgid().ip())?;
        let wanted = PathRecord {
            sgid: Gid::from(source).0,
            ..*wanted
        };
        administrator
            .find_path(mask, &wanted)
            .ok_or(Unresolved::NoPath)
    }
}
