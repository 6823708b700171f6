//! Address components used by all schemes.
//!
//! The grammar is based on existing tools with these schemes, libiscsi and `add_target` in Linux,
//! and not on RFC 3986. We can't use a URL library, because `%` is used to separate user and
//! password and not to escape a character, and a password can contain any character except for a
//! slash or a question mark. With a library, we would use the wrong password.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use riser_scsi::iscsi::name::NameError;

/// Max logical unit number in the simple format (flat space, SAM-5 clause 4.7.7.3).
pub(super) const MAX_LUN: u16 = 0x3fff;

/// Target address, as an IP or a host name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// Literal IP address.
    Ip(IpAddr),
    /// Host name: letters, digits, dots, hyphens and underscores.
    Name(String),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(IpAddr::V4(ip)) => write!(f, "{ip}"),
            Self::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Target address and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portal {
    /// Portal host.
    pub host: Host,
    /// Port number, if set.
    pub port: u16,
}

impl fmt::Display for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl From<SocketAddr> for Portal {
    fn from(addr: SocketAddr) -> Self {
        Self {
            host: Host::Ip(addr.ip()),
            port: addr.port(),
        }
    }
}

/// Max number of portals in an address.
pub const MAX_PORTALS: usize = 16;

/// Checks the portals of an address: the host and port, and the additional portals.
pub(super) fn check_portals(host: &Host, port: u16, others: &[Portal]) -> Result<(), UrlError> {
    if others.len() >= MAX_PORTALS {
        return Err(UrlError::TooManyPortals);
    }
    for (at, portal) in others.iter().enumerate() {
        let is_first = portal.host == *host && portal.port == port;
        if is_first || others[..at].contains(portal) {
            return Err(UrlError::SamePortal(portal.to_string()));
        }
    }
    Ok(())
}

/// Error for an invalid address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Missing or unknown scheme.
    #[error("address must start with `srp://`, `iscsi://` or `iser://`")]
    Scheme,
    /// Missing or malformed host.
    #[error("host `{0}` is not an address or a name")]
    Host(String),
    /// The port isn't a number from 1 to 65535.
    #[error("port `{0}` is not a number from 1 to 65535")]
    Port(String),
    /// The path isn't a valid logical unit number.
    #[error("logical unit `{0}` is not a number from 0 to 16383")]
    Lun(String),
    /// The path isn't a valid iSCSI name.
    #[error("target `{name}`: {why}")]
    Target {
        /// Invalid name.
        name: String,
        /// Reason why the name is invalid.
        why: NameError,
    },
    /// Password without a user.
    #[error("missing user for the password")]
    NoUser,
    /// Unknown key.
    #[error("unknown key `{0}`")]
    UnknownKey(String),
    /// Duplicate key.
    #[error("key `{0}` occurs twice")]
    Repeated(String),
    /// Duplicate portal.
    #[error("duplicate portal `{0}`; each path requires a separate portal")]
    SamePortal(String),
    /// More than [`MAX_PORTALS`] portals.
    #[error("more than {MAX_PORTALS} portals")]
    TooManyPortals,
    /// Key without a value.
    #[error("missing value of key `{0}`")]
    NoValue(String),
    /// Invalid value for this key.
    #[error("value `{value}` of key `{key}` is not {expected}")]
    Value {
        /// Key.
        key: String,
        /// Invalid value.
        value: String,
        /// Values supported for this key.
        expected: &'static str,
    },
}

/// `host[:port]`; a colon in brackets is part of the address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Authority {
    pub(super) host: Host,
    pub(super) port: Option<u16>,
}

impl FromStr for Authority {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (host, port) = split_port(text);
        let number = |port: &str| {
            decimal(port)
                .and_then(|p| u16::try_from(p).ok())
                .filter(|p| *p != 0)
                .ok_or_else(|| UrlError::Port(port.to_owned()))
        };
        Ok(Self {
            host: parse_host(host)?,
            port: port.map(number).transpose()?,
        })
    }
}

/// Query key and value.
pub(super) type Pair<'a> = Result<(&'a str, &'a str), UrlError>;

/// Writes all query parts that are set, then the additional portals.
pub(super) fn write_query<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    parts: [(&str, Option<String>); N],
    portals: &[Portal],
) -> fmt::Result {
    let portals = portals.iter().map(|p| ("portal", Some(p.to_string())));
    let mut separator = '?';
    for (key, value) in parts.into_iter().chain(portals) {
        if let Some(value) = value {
            write!(f, "{separator}{key}={value}")?;
            separator = '&';
        }
    }
    Ok(())
}

/// Splits an address at `?`: `rest[?key=value[&key=value…]]`.
pub(super) fn split_query(text: &str) -> (&str, impl Iterator<Item = Pair<'_>>) {
    let (rest, query) = match text.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (text, None),
    };
    let pairs = query.into_iter().flat_map(|q| q.split('&'));
    let pairs = pairs.map(|part| match part.split_once('=') {
        Some((key, value)) if !value.is_empty() => Ok((key, value)),
        Some((key, _)) => Err(UrlError::NoValue(key.to_owned())),
        None => Err(UrlError::NoValue(part.to_owned())),
    });
    (rest, pairs)
}

/// Single `key=value` pair to write.
pub(super) struct Part<'a> {
    pub(super) key: &'a str,
    pub(super) value: &'a str,
}

impl Part<'_> {
    pub(super) fn once<T>(
        &self,
        field: &mut Option<T>,
        parse: impl FnOnce(&Self) -> Result<T, UrlError>,
    ) -> Result<(), UrlError> {
        if field.is_some() {
            return Err(UrlError::Repeated(self.key.to_owned()));
        }
        *field = Some(parse(self)?);
        Ok(())
    }

    pub(super) fn bad(&self, expected: &'static str) -> UrlError {
        UrlError::Value {
            key: self.key.to_owned(),
            value: self.value.to_owned(),
            expected,
        }
    }

    pub(super) fn hex64(&self) -> Result<u64, UrlError> {
        self.hex(16, "a hexadecimal number of at most 16 digits")
    }

    pub(super) fn hex16(&self) -> Result<u16, UrlError> {
        let value = self.hex(4, "a hexadecimal number of at most 4 digits")?;
        Ok(u16::try_from(value).expect("at most four digits"))
    }

    fn hex(&self, digits: usize, expected: &'static str) -> Result<u64, UrlError> {
        let text = self.value.strip_prefix("0x").unwrap_or(self.value);
        let legal =
            (1..=digits).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
        if !legal {
            return Err(self.bad(expected));
        }
        u64::from_str_radix(text, 16).map_err(|_| self.bad(expected))
    }

    pub(super) fn number<T>(
        &self,
        range: std::ops::RangeInclusive<u32>,
        expected: &'static str,
    ) -> Result<T, UrlError>
    where
        T: TryFrom<u32>,
    {
        decimal(self.value)
            .filter(|n| range.contains(n))
            .and_then(|n| T::try_from(n).ok())
            .ok_or_else(|| self.bad(expected))
    }

    pub(super) fn flag(&self) -> Result<bool, UrlError> {
        match self.value {
            "1" | "yes" | "on" => Ok(true),
            "0" | "no" | "off" => Ok(false),
            _ => Err(self.bad("`1` or `0`")),
        }
    }

    /// Parses an additional portal; `port` is the default port.
    pub(super) fn portal(&self, port: u16) -> Result<Portal, UrlError> {
        let authority: Authority = self
            .value
            .parse()
            .map_err(|_| self.bad("HOST or HOST:PORT, with an IPv6 address in brackets"))?;
        Ok(Portal {
            host: authority.host,
            port: authority.port.unwrap_or(port),
        })
    }

    pub(super) fn ip(&self) -> Result<IpAddr, UrlError> {
        let text = self.value.trim_start_matches('[').trim_end_matches(']');
        text.parse().map_err(|_| self.bad("an IP address"))
    }
}

/// Parses a logical unit number.
pub(super) fn parse_lun(text: &str) -> Result<u16, UrlError> {
    decimal(text)
        .and_then(|lun| u16::try_from(lun).ok())
        .filter(|lun| *lun <= MAX_LUN)
        .ok_or_else(|| UrlError::Lun(text.to_owned()))
}

/// Only allows digits: no sign, no spaces.
fn decimal(text: &str) -> Option<u32> {
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok())?
}

fn parse_host(text: &str) -> Result<Host, UrlError> {
    let bad = || UrlError::Host(text.to_owned());
    if let Some(inner) = text.strip_prefix('[') {
        let inner = inner.strip_suffix(']').ok_or_else(bad)?;
        let ip: Ipv6Addr = inner.parse().map_err(|_| bad())?;
        return Ok(Host::Ip(ip.into()));
    }
    if let Ok(ip) = text.parse::<std::net::Ipv4Addr>() {
        return Ok(Host::Ip(ip.into()));
    }
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    // If the last label of a name only contains digits, it's most likely a mistyped IPv4 address.
    let numeric = text
        .rsplit('.')
        .next()
        .is_some_and(|l| l.bytes().all(|b| b.is_ascii_digit()));
    if text.is_empty() || text.len() > 253 || numeric || !text.bytes().all(legal) {
        return Err(bad());
    }
    Ok(Host::Name(text.to_owned()))
}

/// Splits `host[:port]`; a colon in brackets is part of the address.
fn split_port(authority: &str) -> (&str, Option<&str>) {
    let after_bracket = match authority.rfind(']') {
        Some(at) => at,
        None if authority.starts_with('[') => return (authority, None),
        None => 0,
    };
    match authority[after_bracket..].rfind(':') {
        Some(at) => {
            let at = after_bracket + at;
            (&authority[..at], Some(&authority[at + 1..]))
        }
        None => (authority, None),
    }
}
