//! The local end of path resolution: what `ibacm` is for a host.
//!
//! The kernel asks over netlink ([`crate::ls`]), programs over a local socket ([`crate::acm`]).
//! Both name a destination, and perhaps a source, which must be an address of this host.

use std::collections::BTreeMap;
use std::net::IpAddr;

use riser_transport::verbs::Gid;
use thiserror::Error;

use super::administrator::Administrator;
use super::wire::path::{PathMask, PathRecord};

/// Reason why there is no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unresolved {
    /// The source is no address of this host, or none goes with the destination.
    #[error("no source address of this host")]
    Source,
    /// The destination is no address of a host, or an unknown name.
    #[error("no destination address")]
    Destination,
    /// Subnet administration has no such path.
    #[error("no path")]
    NoPath,
}

/// Addresses and names that a host knows.
#[derive(Clone, Debug, Default)]
pub struct Resolver {
    addrs: Vec<IpAddr>,
    names: BTreeMap<String, IpAddr>,
}

impl Resolver {
    /// A resolver of a host with addresses, and names of others.
    #[must_use]
    pub fn new(addrs: Vec<IpAddr>, names: BTreeMap<String, IpAddr>) -> Self {
        Self { addrs, names }
    }

    /// Addresses of this host.
    #[must_use]
    pub fn addrs(&self) -> &[IpAddr] {
        &self.addrs
    }

    /// Address of a name, which may be an address itself.
    ///
    /// # Errors
    /// [`Unresolved::Destination`].
    pub fn find(&self, name: &str) -> Result<IpAddr, Unresolved> {
        let known = name.parse().ok().or_else(|| self.names.get(name).copied());
        known.ok_or(Unresolved::Destination)
    }

    /// The source for a destination: the one that is given, or the first address of its family.
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

    /// The path that components of a record ask for. Where no source is given it is chosen.
    ///
    /// # Errors
    /// All of [`Unresolved`].
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
