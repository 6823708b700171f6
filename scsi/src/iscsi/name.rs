//! iSCSI names (RFC 7143 4.2.7) and the SendTargets exchange (appendix C).

use std::fmt;
use std::net::SocketAddr;

use super::text;

/// Maximum length of a name, in bytes.
pub const MAX_NAME: usize = 223;

/// An iSCSI name in lower case, which starts with `iqn.`, `eui.` or `naa.`. Safe to use in paths
/// and logs.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct IscsiName(String);

/// The reason why a name is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// The name is empty or longer than [`MAX_NAME`] bytes.
    #[error("iSCSI name must have 1 to {MAX_NAME} bytes")]
    Length,
    /// The name doesn't start with `iqn.`, `eui.` or `naa.`.
    #[error("iSCSI name must start with iqn., eui. or naa.")]
    Type,
    /// The name contains an invalid character.
    #[error("iSCSI name must only contain letters, digits and . - :")]
    Character,
    /// The part after the type has an invalid format.
    #[error("malformed iSCSI name after the type")]
    Form,
}

impl IscsiName {
    /// Parses a name. Upper case ASCII letters are converted to lower case, as required by the
    /// stringprep profile.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn new(name: &str) -> Result<Self, NameError> {
        if !(1..=MAX_NAME).contains(&name.len()) {
            return Err(NameError::Length);
        }
        // The profile also allows letters of other scripts. These are letters or digits in Unicode,
        // so they can't be control characters or path separators.
        let legal = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | ':');
        if !name.chars().all(legal) {
            return Err(NameError::Character);
        }
        // Names are compared as bytes after this, which is also used for access control. Letters of
        // other scripts are not changed, because we don't implement their profile (RFC 3722).
        let name = name.to_ascii_lowercase();
        let is_hex = |digits: &str| digits.chars().all(|c| c.is_ascii_hexdigit());
        // Use a checked split here, because the fourth byte may be in the middle of a character.
        let is_good = match name.split_at_checked(4) {
            Some(("iqn.", rest)) => is_date_and_domain(rest),
            Some(("eui.", rest)) => rest.len() == 16 && is_hex(rest),
            Some(("naa.", rest)) => matches!(rest.len(), 16 | 32) && is_hex(rest),
            _ => return Err(NameError::Type),
        };
        if !is_good {
            return Err(NameError::Form);
        }
        Ok(Self(name))
    }

    /// Returns the normalized name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Checks for `yyyy-mm.`, which must not be at the end.
fn is_date_and_domain(rest: &str) -> bool {
    let Some((date, domain)) = rest.split_once('.') else {
        return false;
    };
    let digits = |s: &str, n: usize| s.len() == n && s.bytes().all(|b| b.is_ascii_digit());
    let good_date = date
        .split_once('-')
        .is_some_and(|(year, month)| digits(year, 4) && digits(month, 2));
    good_date && !domain.is_empty()
}

impl fmt::Display for IscsiName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A portal of a target, as reported in discovery.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TargetAddress {
    /// Address or domain name. An IPv6 address is in brackets.
    pub host: String,
    /// TCP port, by default 3260.
    pub port: u16,
    /// Portal group tag, if set.
    pub group: Option<u16>,
}

/// Well-known iSCSI port (RFC 7143 15).
pub const PORT: u16 = 3260;

impl TargetAddress {
    /// Creates this from a socket address.
    #[must_use]
    pub fn new(address: SocketAddr, group: u16) -> Self {
        let host = match address {
            SocketAddr::V4(v4) => v4.ip().to_string(),
            SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
        };
        Self {
            host,
            port: address.port(),
            group: Some(group),
        }
    }

    /// Parses `host[:port][,group]`. Returns `None` for any other format.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let (address, group) = match value.split_once(',') {
            None => (value, None),
            Some((address, group)) => (address, Some(group.parse().ok()?)),
        };
        let split = match address.strip_prefix('[') {
            Some(rest) => {
                // Position after the closing bracket, with one for each bracket.
                let end = rest.find(']')? + 2;
                address.split_at(end)
            }
            None => address.split_at(address.find(':').unwrap_or(address.len())),
        };
        let (host, port) = split;
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => PORT,
            None => return None,
            Some(port) => port.parse().ok()?,
        };
        // The address was sent by a target, and is used for logging and for the resolver, so don't
        // allow any other characters.
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '[' | ']');
        (!host.is_empty() && host.len() <= 255 && host.chars().all(legal)).then(|| Self {
            host: host.to_owned(),
            port,
            group,
        })
    }
}

impl fmt::Display for TargetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)?;
        self.group.map_or(Ok(()), |group| write!(f, ",{group}"))
    }
}

/// A target found in discovery.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiscoveredTarget {
    /// Target name.
    pub name: IscsiName,
    /// Portals of the target. If this is empty, use the portal that was used for discovery.
    pub addresses: Vec<TargetAddress>,
}

/// Adds a target to a SendTargets response.
pub fn put_target<'a>(
    out: &mut Vec<u8>,
    name: &IscsiName,
    addresses: impl IntoIterator<Item = &'a TargetAddress>,
) {
    text::put_pair(out, "TargetName", name.as_str());
    for address in addresses {
        text::put_pair(out, "TargetAddress", &address.to_string());
    }
}

/// Parses a SendTargets response. Targets with an invalid name or address are skipped and counted,
/// so that these can never be used in a path or log.
///
/// # Errors
/// If the text is invalid.
pub fn parse_targets(text: &[u8]) -> Result<(Vec<DiscoveredTarget>, usize), text::TextError> {
    let mut found: Vec<DiscoveredTarget> = Vec::new();
    let mut refused = 0;
    // Each address belongs to the previous name, so skip the addresses after an invalid name.
    let mut is_wanted = false;
    for pair in text::pairs(text) {
        match pair? {
            ("TargetName", value) => match IscsiName::new(value) {
                Ok(name) => {
                    is_wanted = true;
                    found.push(DiscoveredTarget {
                        name,
                        addresses: Vec::new(),
                    });
                }
                Err(_) => {
                    is_wanted = false;
                    refused += 1;
                }
            },
            ("TargetAddress", value) if is_wanted => match TargetAddress::parse(value) {
                Some(address) => {
                    let last = found.last_mut().expect("address follows a target name");
                    last.addresses.push(address);
                }
                None => refused += 1,
            },
            _ => {}
        }
    }
    Ok((found, refused))
}
