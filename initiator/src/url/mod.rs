//! Addresses of targets: [`SrpUrl`], [`IscsiUrl`], and [`TargetUrl`], any of them.
//!
//! Every error names the part of the address it is about, and never a password.

#![forbid(unsafe_code)]

mod grammar;
mod iscsi;
mod secret;
mod srp;

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

pub use self::grammar::{Host, MAX_PORTALS, Portal, UrlError};
pub use self::iscsi::{Carrier, IscsiUrl};
pub use self::secret::{SECRET_ENV, Secret, SecretError, Secrets, User};
pub use self::srp::SrpUrl;

/// The address of a target, of any protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetUrl {
    /// An SRP address, `srp://…`.
    Srp(SrpUrl),
    /// An address `iscsi://…` or `iser://…`.
    Iscsi(IscsiUrl),
}

impl TargetUrl {
    /// The logical unit, if the address names one.
    #[must_use]
    pub fn lun(&self) -> Option<u16> {
        match self {
            Self::Srp(url) => url.lun,
            Self::Iscsi(url) => url.lun,
        }
    }

    /// The same target with another logical unit, or none.
    #[must_use]
    pub fn with_lun(mut self, lun: Option<u16>) -> Self {
        match &mut self {
            Self::Srp(url) => url.lun = lun,
            Self::Iscsi(url) => url.lun = lun,
        }
        self
    }

    /// The local address to connect from, if the address names one.
    #[must_use]
    pub fn src(&self) -> Option<IpAddr> {
        match self {
            Self::Srp(url) => url.src,
            Self::Iscsi(url) => url.src,
        }
    }

    /// Returns whether an RDMA device is needed to reach it.
    #[must_use]
    pub fn needs_device(&self) -> bool {
        match self {
            Self::Srp(_) => true,
            Self::Iscsi(url) => url.is_iser(),
        }
    }

    /// Portals of the target besides the first.
    #[must_use]
    pub fn portals(&self) -> &[Portal] {
        match self {
            Self::Srp(url) => &url.portals,
            Self::Iscsi(url) => &url.portals,
        }
    }

    /// Returns whether all portals of the target are to be used, not only those in the address.
    #[must_use]
    pub fn wants_all(&self) -> bool {
        match self {
            Self::Srp(_) => false,
            Self::Iscsi(url) => url.all_paths,
        }
    }

    /// Returns whether it is one that several paths lead to.
    #[must_use]
    pub fn is_multipath(&self) -> bool {
        self.wants_all() || !self.portals().is_empty()
    }

    /// The same target by its first portal alone.
    #[must_use]
    pub fn first(&self) -> Self {
        let (host, port) = self.authority();
        self.by(Portal {
            host: host.clone(),
            port,
        })
    }

    /// The same target by one portal alone.
    #[must_use]
    pub fn by(&self, portal: Portal) -> Self {
        let mut url = self.clone();
        match &mut url {
            Self::Srp(url) => {
                (url.host, url.port) = (portal.host, portal.port);
                url.portals.clear();
            }
            Self::Iscsi(url) => {
                (url.host, url.port) = (portal.host, portal.port);
                url.portals.clear();
                url.all_paths = false;
            }
        }
        url
    }

    /// Address or name of the target's host.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.authority().0
    }

    fn authority(&self) -> (&Host, u16) {
        match self {
            Self::Srp(url) => (&url.host, url.port),
            Self::Iscsi(url) => (&url.host, url.port),
        }
    }

    /// The address that it means; a name is looked up, on this thread.
    ///
    /// # Errors
    /// The name has no address, or none of the family of [`Self::src`].
    pub fn resolve(&self) -> std::io::Result<SocketAddr> {
        let found = self.resolve_all()?.into_iter().next();
        found.ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    /// All the addresses that the first portal means, as [`Self::resolve`]; there may be none.
    ///
    /// # Errors
    /// The name cannot be looked up.
    pub fn resolve_all(&self) -> std::io::Result<Vec<SocketAddr>> {
        let (host, port) = self.authority();
        match host {
            Host::Ip(ip) => Ok(vec![SocketAddr::new(*ip, port)]),
            Host::Name(name) => {
                let fits = |a: &SocketAddr| self.src().is_none_or(|s| s.is_ipv4() == a.is_ipv4());
                let found = (name.as_str(), port).to_socket_addrs()?;
                Ok(found.filter(fits).collect())
            }
        }
    }
}

impl From<&SrpUrl> for TargetUrl {
    fn from(url: &SrpUrl) -> Self {
        Self::Srp(url.clone())
    }
}

impl From<&IscsiUrl> for TargetUrl {
    fn from(url: &IscsiUrl) -> Self {
        Self::Iscsi(url.clone())
    }
}

impl From<&TargetUrl> for TargetUrl {
    fn from(url: &TargetUrl) -> Self {
        url.clone()
    }
}

impl FromStr for TargetUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        match text.split_once("://") {
            Some(("srp", _)) => text.parse().map(Self::Srp),
            Some(("iscsi" | "iser", _)) => text.parse().map(Self::Iscsi),
            _ => Err(UrlError::Scheme),
        }
    }
}

/// Text of the address without passwords.
impl fmt::Display for TargetUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Srp(url) => url.fmt(f),
            Self::Iscsi(url) => url.fmt(f),
        }
    }
}
