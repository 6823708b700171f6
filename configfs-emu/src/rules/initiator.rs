//! SRP initiator names.

use std::net::IpAddr;

/// Name of an initiator in `acls`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Initiator {
    /// The full port identifier: 32 digits, with or without `0x`.
    Port(u128),
    /// The second half of the port identifier: four groups of four digits.
    Guid(u64),
    /// Source IP address.
    Address(IpAddr),
}

impl Initiator {
    /// Parses a directory name in `acls`.
    #[must_use]
    pub(crate) fn parse(name: &str) -> Option<Self> {
        if let Ok(address) = name.parse::<IpAddr>() {
            return Some(Self::Address(address));
        }
        if let Some(guid) = guid(name) {
            return Some(Self::Guid(guid));
        }
        let digits = name.strip_prefix("0x").unwrap_or(name);
        let is_id = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
        let id = is_id.then(|| u128::from_str_radix(digits, 16).ok());
        id.flatten().map(Self::Port)
    }
}

/// Parses a GUID that is written as four groups of four digits.
pub(crate) fn guid(name: &str) -> Option<u64> {
    let groups: Vec<&str> = name.split(':').collect();
    let is_guid = groups.len() == 4
        && groups
            .iter()
            .all(|g| g.len() == 4 && g.bytes().all(|b| b.is_ascii_hexdigit()));
    is_guid
        .then(|| u64::from_str_radix(&groups.concat(), 16).ok())
        .flatten()
}
