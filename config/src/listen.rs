//! [`Listen`]: the address of a portal.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use arrayvec::ArrayString;
use serde::{Deserialize, Serialize};

/// Maximum length of an interface name in bytes (`IFNAMSIZ` without the NUL).
const INTERFACE_LEN: usize = 15;

/// The address of a portal: a single address, or all current addresses of the host or an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Listen {
    /// A single address: `192.0.2.1:3260`.
    At(SocketAddr),
    /// All addresses of the host or an interface.
    Wildcard(Wildcard, u16),
}

/// A set of addresses that can change at runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wildcard {
    /// All IPv4 addresses of the host: `0.0.0.0:3260`.
    V4,
    /// All IPv6 addresses of the host, but not IPv4: `[::]:3260`.
    V6,
    /// All addresses of the host: `:3260`.
    All,
    /// All addresses of an interface: `eth0:3260`.
    Interface(ArrayString<INTERFACE_LEN>),
}

impl Wildcard {
    /// Returns true if this includes an address of the given interface.
    #[must_use]
    pub fn covers(&self, interface: &str, address: IpAddr) -> bool {
        match self {
            Self::V4 => address.is_ipv4(),
            Self::V6 => address.is_ipv6(),
            Self::All => true,
            Self::Interface(name) => name.as_str() == interface,
        }
    }

    /// Returns true if this is an interface name.
    #[must_use]
    pub const fn is_interface(&self) -> bool {
        matches!(self, Self::Interface(_))
    }
}

impl Listen {
    /// Returns the TCP or RDMA CM port.
    #[must_use]
    pub fn port(&self) -> u16 {
        match self {
            Self::At(at) => at.port(),
            Self::Wildcard(_, port) => *port,
        }
    }

    /// Returns the address and port, if this is a single address.
    #[must_use]
    pub const fn at(&self) -> Option<SocketAddr> {
        match self {
            Self::At(at) => Some(*at),
            Self::Wildcard(..) => None,
        }
    }

    /// Returns the configured address, or the unspecified address.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        match self {
            Self::At(at) => at.ip(),
            Self::Wildcard(Wildcard::V4, _) => Ipv4Addr::UNSPECIFIED.into(),
            Self::Wildcard(..) => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// Returns true if both always include a common address and port, regardless of the addresses
    /// of an interface.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        use Wildcard::{All, Interface, V4, V6};
        if self.port() != other.port() {
            return false;
        }
        match (self, other) {
            (Self::At(one), Self::At(other)) => one == other,
            (Self::At(at), Self::Wildcard(wildcard, _))
            | (Self::Wildcard(wildcard, _), Self::At(at)) => {
                !wildcard.is_interface() && wildcard.covers("", at.ip())
            }
            (Self::Wildcard(one, _), Self::Wildcard(other, _)) => match (one, other) {
                (V4, V6) | (V6, V4) => false,
                (Interface(one), Interface(other)) => one == other,
                (V4 | V6 | All | Interface(_), _) => true,
            },
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(at) => at.fmt(f),
            Self::Wildcard(Wildcard::V4, port) => write!(f, "0.0.0.0:{port}"),
            Self::Wildcard(Wildcard::V6, port) => write!(f, "[::]:{port}"),
            Self::Wildcard(Wildcard::All, port) => write!(f, ":{port}"),
            Self::Wildcard(Wildcard::Interface(name), port) => write!(f, "{name}:{port}"),
        }
    }
}

impl From<Listen> for String {
    fn from(listen: Listen) -> Self {
        listen.to_string()
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let written: Written = text.parse()?;
        let port = written.port.ok_or("missing port")?;
        Ok(written.with_port(port))
    }
}

impl From<SocketAddr> for Listen {
    fn from(at: SocketAddr) -> Self {
        Self::At(at)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    Address(IpAddr),
    Wildcard(Wildcard),
}

/// [`Listen`] as it is written, with an optional port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    host: Host,
    port: Option<u16>,
}

impl Written {
    /// Uses the protocol's default port if none is set.
    pub(super) fn with_port(self, usual: u16) -> Listen {
        let port = self.port.unwrap_or(usual);
        match self.host {
            Host::Address(ip) => Listen::At((ip, port).into()),
            Host::Wildcard(wildcard) => Listen::Wildcard(wildcard, port),
        }
    }
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.port, self.host) {
            (Some(port), _) => self.with_port(port).fmt(f),
            (None, Host::Address(ip)) => ip.fmt(f),
            (None, Host::Wildcard(Wildcard::V4)) => Ipv4Addr::UNSPECIFIED.fmt(f),
            (None, Host::Wildcard(Wildcard::V6 | Wildcard::All)) => Ipv6Addr::UNSPECIFIED.fmt(f),
            (None, Host::Wildcard(Wildcard::Interface(name))) => name.fmt(f),
        }
    }
}

impl From<Listen> for Written {
    fn from(listen: Listen) -> Self {
        let host = match listen {
            Listen::At(at) => Host::Address(at.ip()),
            Listen::Wildcard(wildcard, _) => Host::Wildcard(wildcard),
        };
        let port = Some(listen.port());
        Self { host, port }
    }
}

impl FromStr for Written {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not an address; use 192.0.2.1, 192.0.2.1:5555 or [2001:db8::1]:5555, \
                 or for all addresses 0.0.0.0, [::], an interface such as eth0:5555, or :5555"
            )
        };
        let (host, port) = parts(text).ok_or_else(wrong)?;
        if port == Some(0) {
            return Err("a portal cannot listen on port 0".to_owned());
        }
        if let Host::Address(ip) = host
            && ip.is_multicast()
        {
            return Err(format!(
                "a portal cannot listen on {ip}: this is a multicast address"
            ));
        }
        Ok(Self { host, port })
    }
}

/// Splits an address into host and port, without checking them.
fn parts(text: &str) -> Option<(Host, Option<u16>)> {
    let of_address = |ip: IpAddr| match ip {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Host::Wildcard(Wildcard::V4),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Host::Wildcard(Wildcard::V6),
        ip => Host::Address(ip),
    };
    if let Ok(at) = text.parse::<SocketAddr>() {
        return Some((of_address(at.ip()), Some(at.port())));
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Some((of_address(ip), None));
    }
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port.parse().ok()?)),
        None => (text, None),
    };
    if name.is_empty() {
        return port.map(|port| (Host::Wildcard(Wildcard::All), Some(port)));
    }
    // If it starts with a digit, the user meant an address.
    let is_letter = name.starts_with(|c: char| c.is_ascii_alphabetic());
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@');
    if !is_letter || !name.chars().all(is_good) {
        return None;
    }
    let name = ArrayString::from(name).ok()?;
    Some((Host::Wildcard(Wildcard::Interface(name)), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(text: &str) -> Result<Listen, String> {
        text.parse::<Written>()
            .map(|written| written.with_port(5555))
    }

    #[test]
    fn portals_listen_at_addresses_or_wildcards() {
        for (text, shown) in [
            ("127.0.0.1", "127.0.0.1:5555"),
            ("127.0.0.1:77", "127.0.0.1:77"),
            ("::1", "[::1]:5555"),
            ("[::1]:9", "[::1]:9"),
            ("0.0.0.0", "0.0.0.0:5555"),
            ("0.0.0.0:3260", "0.0.0.0:3260"),
            ("::", "[::]:5555"),
            ("[::]:3260", "[::]:3260"),
            (":3260", ":3260"),
            ("eth0", "eth0:5555"),
            ("bond0.100:3260", "bond0.100:3260"),
        ] {
            let listen = listen(text).unwrap();
            assert_eq!(listen.to_string(), shown, "{text}");
            assert_eq!(Listen::try_from(shown.to_owned()), Ok(listen));
            assert_eq!(
                listen.at().is_some(),
                text.contains('1') && !text.contains("bond")
            );
        }
        for text in [
            "",
            ":",
            "1.2.3.4:0",
            "0.0.0.0:0",
            "eth0:0",
            "192.0.2.1000",
            "eth0:port",
            "eth0:1:2",
            "a-name-too-long-for-one",
            "eth/0",
            "224.0.0.1",
        ] {
            assert!(listen(text).is_err(), "{text}");
        }
    }

    #[test]
    fn wildcards_overlap_included_addresses() {
        let meets = |one: &str, other: &str| {
            let (one, other) = (listen(one).unwrap(), listen(other).unwrap());
            assert_eq!(one.meets(&other), other.meets(&one));
            one.meets(&other)
        };
        assert!(meets("0.0.0.0", "192.0.2.1"));
        assert!(meets("0.0.0.0", ":5555"));
        assert!(meets("eth0", "0.0.0.0"));
        assert!(meets("eth0", "eth0"));
        assert!(!meets("0.0.0.0", "[::]"));
        assert!(!meets("0.0.0.0", "192.0.2.1:5556"));
        assert!(!meets("eth0", "eth1"));
        // The interface may or may not have this address.
        assert!(!meets("eth0", "192.0.2.1"));
    }
}
