//! Target addresses: [`SrpUrl`], [`IscsiUrl`], and [`TargetUrl`] for either type.
//!
//! All errors contain the invalid part of the address, but never a password.

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

/// Target address for any protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetUrl {
    /// SRP address, `srp://…`.
    Srp(SrpUrl),
    /// iSCSI or iSER address, `iscsi://…` or `iser://…`.
    Iscsi(IscsiUrl),
}

impl TargetUrl {
    /// Logical unit number, if set.
    #[must_use]
    pub fn lun(&self) -> Option<u16> {
        match self {
            Self::Srp(url) => url.lun,
            Self::Iscsi(url) => url.lun,
        }
    }

    /// Sets or removes the logical unit number.
    #[must_use]
    pub fn with_lun(mut self, lun: Option<u16>) -> Self {
        match &mut self {
            Self::Srp(url) => url.lun = lun,
            Self::Iscsi(url) => url.lun = lun,
        }
        self
    }

    /// Local address to use for the connection, if set.
    #[must_use]
    pub fn src(&self) -> Option<IpAddr> {
        match self {
            Self::Srp(url) => url.src,
            Self::Iscsi(url) => url.src,
        }
    }

    /// Returns whether this address requires an RDMA device.
    #[must_use]
    pub fn needs_device(&self) -> bool {
        match self {
            Self::Srp(_) => true,
            Self::Iscsi(url) => url.is_iser(),
        }
    }

    /// Returns whether both addresses use the same logical unit. For iSCSI we compare the target
    /// name, because it's unique, and for SRP the first portal.
    #[must_use]
    pub fn is_same_unit(&self, other: &Self) -> bool {
        let is_same_target = match (self, other) {
            (Self::Iscsi(one), Self::Iscsi(other)) => one.target == other.target,
            (Self::Srp(one), Self::Srp(other)) => {
                let ids = |url: &SrpUrl| (url.id_ext, url.ioc_guid);
                (&one.host, one.port, ids(one)) == (&other.host, other.port, ids(other))
            }
            _ => false,
        };
        is_same_target && self.lun().unwrap_or(0) == other.lun().unwrap_or(0)
    }

    /// Additional target portals.
    #[must_use]
    pub fn portals(&self) -> &[Portal] {
        match self {
            Self::Srp(url) => &url.portals,
            Self::Iscsi(url) => &url.portals,
        }
    }

    /// Returns whether all portals of the target should be used, not just the portals in the
    /// address.
    #[must_use]
    pub fn wants_all(&self) -> bool {
        match self {
            Self::Srp(_) => false,
            Self::Iscsi(url) => url.all_paths,
        }
    }

    /// Returns whether there can be multiple paths.
    #[must_use]
    pub fn is_multipath(&self) -> bool {
        self.wants_all() || !self.portals().is_empty()
    }

    /// Returns the same target, using only the first portal.
    #[must_use]
    pub fn first(&self) -> Self {
        let (host, port) = self.authority();
        self.by(Portal {
            host: host.clone(),
            port,
        })
    }

    /// Returns the same target, using only this portal.
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

    /// Target address or host name.
    #[must_use]
    pub fn host(&self) -> &Host {
        self.authority().0
    }

    pub(crate) fn authority(&self) -> (&Host, u16) {
        match self {
            Self::Srp(url) => (&url.host, url.port),
            Self::Iscsi(url) => (&url.host, url.port),
        }
    }

    /// Resolves the host name, on the current thread.
    ///
    /// # Errors
    /// Returns an error if the name has no address, or no address in the same family as
    /// [`Self::src`].
    pub fn resolve(&self) -> std::io::Result<SocketAddr> {
        let found = self.resolve_all()?.into_iter().next();
        found.ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    /// Returns all addresses for the first portal, see [`Self::resolve`]; can be empty.
    ///
    /// # Errors
    /// Returns an error if the lookup failed.
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

/// Formats the address without passwords.
impl fmt::Display for TargetUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Srp(url) => url.fmt(f),
            Self::Iscsi(url) => url.fmt(f),
        }
    }
}
