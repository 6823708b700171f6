//! I_T nexuses, and the initiator and target ports used to create them.
//!
//! All public functions of a logical unit need a [`NexusId`], because unit attentions and some
//! other state are defined per I_T nexus in SAM-5.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::srp::InitiatorPortId;

/// An ID assigned to an I_T nexus by the target (SAM-5 4.7).
///
/// This must not be reused as long as the old nexus is known to any logical unit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NexusId(pub u64);

/// The name of a SCSI port, in the format used by the transport.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PortName {
    /// A 16-byte SRP port identifier: identifier extension, then GUID (SRP r16a 4.4, or SPC-4 7.6.4
    /// for the TransportID format).
    Srp([u8; 16]),
    /// An iSCSI port name: `<iSCSI name>,i,0x<ISID>` for an initiator, or `<iSCSI name>,t,0x<tag>`
    /// for a target (RFC 7143 4.4.2).
    Iscsi(String),
}

impl PortName {
    /// Returns the PROTOCOL IDENTIFIER for the transport (SPC-4 7.6.1).
    #[must_use]
    pub fn protocol_identifier(&self) -> u8 {
        match self {
            Self::Srp(_) => 4,
            Self::Iscsi(_) => 5,
        }
    }

    /// Returns the part of the name that identifies the device of this port: the GUID of SRP, or the
    /// iSCSI name.
    pub(crate) fn device(&self) -> &[u8] {
        match self {
            Self::Srp(id) => &id[8..],
            Self::Iscsi(name) => name.split(',').next().unwrap_or(name).as_bytes(),
        }
    }
}

/// An SRP port identifier is formatted as two hex values, `<identifier extension>:<GUID>`. An iSCSI
/// port name is not changed.
impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The same format is used for both initiator and target.
            Self::Srp(id) => InitiatorPortId(*id).fmt(f),
            Self::Iscsi(name) => f.write_str(name),
        }
    }
}

/// A port of the target, used in VPD page 83h.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TargetPort {
    /// The name of this port.
    pub name: PortName,
    /// RELATIVE TARGET PORT IDENTIFIER, starting at 1 (SPC-4 4.5).
    pub relative_id: u16,
    /// Target port group, used for designators and asymmetric access.
    pub group: u16,
}

/// The initiator and target port of an I_T nexus.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Nexus {
    /// The initiator port.
    pub initiator: PortName,
    /// The target port used for the login.
    pub target: TargetPort,
}
