//! SRP target ports.

use rustix::io::Errno;

use super::{Attr, Show, Store, Write, iscsi};
use crate::number;

/// Files of the fabric, `srpt/`.
pub(super) const FABRIC: &[Attr] = &[Attr::ro("version", Show::Line)];

/// Files in `srpt/discovery_auth/`, which contain the RDMA CM port.
pub(super) const DISCOVERY: &[Attr] = &[Attr::rw("rdma_cm_port", "0", Store::With(store_port))];

/// Files of a target port, `srpt/PORT/NAME/`.
pub(super) const TPG: &[Attr] = &[iscsi::ENABLE, iscsi::RTPI];

/// Target port parameters, `srpt/PORT/NAME/attrib/`.
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
