//! Target ports of SRP.

use std::net::IpAddr;

use rustix::io::Errno;

use super::{Attr, Show, Store, Write, iscsi};
use crate::number;

/// `srpt/`.
pub(super) const FABRIC: &[Attr] = &[Attr::ro("version", Show::Line)];

/// `srpt/discovery_auth/`.
pub(super) const DISCOVERY: &[Attr] = &[Attr::rw("rdma_cm_port", "0", Store::With(store_port))];

/// `srpt/PORT/NAME/`.
pub(super) const TPG: &[Attr] = &[iscsi::ENABLE, iscsi::RTPI];

/// `srpt/PORT/NAME/attrib/`.
pub(super) const TPG_ATTRIB: &[Attr] = &[
    Attr::rw("srp_max_rdma_size", "65536", Store::Long(65_536..=1 << 24)),
    Attr::rw("srp_max_rsp_size", "256", Store::Long(112..=1024)),
    Attr::rw("srp_sq_size", "4096", Store::Long(16..=65_535)),
    Attr::rw("use_srq", "0", Store::Long(0..=1)),
];

fn store_port(write: &mut Write<'_>) -> Result<(), Errno> {
    let port = number::unsigned(write.text, u64::from(u16::MAX))?;
    write.keep(port.to_string());
    Ok(())
}

/// How an initiator is named in `acls`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Initiator {
    /// All of its port identifier: 32 digits, with or without `0x`.
    Port(u128),
    /// The second half: four groups of four digits.
    Guid(u64),
    /// Its address.
    Address(IpAddr),
}

impl Initiator {
    /// Reads a name.
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

/// A GUID in four groups of four digits.
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
