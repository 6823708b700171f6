//! iSCSI names (RFC 7143 4.2.7) and the SendTargets exchange (appendix C).

use std::fmt;
use std::net::SocketAddr;

use super::text;

/// Longest name, in bytes.
pub const MAX_NAME: usize = 223;

/// An iSCSI name: `iqn.`, `eui.` or `naa.`, in lower case, and safe in paths and logs.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct IscsiName(String);

/// Reason for which a name is illegal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// Empty, or longer than [`MAX_NAME`] bytes.
    #[error("an iSCSI name has 1 to {MAX_NAME} bytes")]
    Length,
    /// Neither `iqn.`, `eui.` nor `naa.`.
    #[error("an iSCSI name begins with iqn., eui. or naa.")]
    Type,
    /// A character that names do not have.
    #[error("an iSCSI name has letters, digits and . - : only")]
    Character,
    /// The part after the type is not as the type demands.
    #[error("what follows the type is malformed")]
    Form,
}

impl IscsiName {
    /// Checks a name. Capital ASCII letters become small ones, as the stringprep profile wants.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn new(name: &str) -> Result<Self, NameError> {
        if !(1..=MAX_NAME).contains(&name.len()) {
            return Err(NameError::Length);
        }
        // The profile also passes other scripts' letters. They are letters or digits for Unicode,
        // and so neither control characters nor separators of a path.
        let legal = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | ':');
        if !name.chars().all(legal) {
            return Err(NameError::Character);
        }
        // Names are compared byte for byte after this, and access rules depend on it. Letters of
        // other scripts are left as they are: their profile (RFC 3722) is not implemented.
        let name = name.to_ascii_lowercase();
        let is_hex = |digits: &str| digits.chars().all(|c| c.is_ascii_hexdigit());
        // By checked splitting: the fourth byte may lie within a character of another script.
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

    /// Name as text, normalized.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// `yyyy-mm.` and something after it.
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

/// A portal of a target, as discovery reports it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TargetAddress {
    /// Address or domain name; IPv6 in brackets.
    pub host: String,
    /// TCP port, 3260 by default.
    pub port: u16,
    /// Portal group tag, if the address has one.
    pub group: Option<u16>,
}

/// Well-known port of iSCSI (RFC 7143 15).
pub const PORT: u16 = 3260;

impl TargetAddress {
    /// Of a socket address.
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

    /// Reads `host[:port][,group]`; `None` for anything else.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let (address, group) = match value.split_once(',') {
            None => (value, None),
            Some((address, group)) => (address, Some(group.parse().ok()?)),
        };
        let split = match address.strip_prefix('[') {
            Some(rest) => {
                // Behind the bracket: one for the one that was stripped, one for the bracket
                // itself.
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
        // The address comes from a target and reaches logs and the resolver, so nothing else may
        // be in it.
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

/// A target that discovery found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Name of the target.
    pub name: IscsiName,
    /// Its portals; empty stands for the one that was asked.
    pub addresses: Vec<TargetAddress>,
}

/// Writes a target into an answer to SendTargets.
pub fn put_target<'a>(
    out: &mut Vec<u8>,
    name: &IscsiName,
    addresses: impl IntoIterator<Item = &'a TargetAddress>,
) {
    text::put(out, "TargetName", name.as_str());
    for address in addresses {
        text::put(out, "TargetAddress", &address.to_string());
    }
}

/// Reads an answer to SendTargets. Targets whose names or addresses are not legal are left out, and
/// counted: nothing of them reaches a path or a log.
///
/// # Errors
/// The text is malformed.
pub fn parse_targets(answer: &[u8]) -> Result<(Vec<Found>, usize), text::TextError> {
    let mut found: Vec<Found> = Vec::new();
    let mut refused = 0;
    // Addresses belong to the name before them, so those of a refused name are skipped.
    let mut is_wanted = false;
    for pair in text::pairs(answer) {
        match pair? {
            ("TargetName", value) => match IscsiName::new(value) {
                Ok(name) => {
                    is_wanted = true;
                    found.push(Found {
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
                    let last = found.last_mut().expect("a target is wanted");
                    last.addresses.push(address);
                }
                None => refused += 1,
            },
            _ => {}
        }
    }
    Ok((found, refused))
}
