//! Who is talking: I_T nexuses and the ports at their ends.
//!
//! Every entry point of a logical unit takes a [`NexusId`], because unit
//! attentions, and all else that SAM-5 ties to an I_T nexus, belong to one.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::srp::InitiatorPortId;

/// A number the target hands out for one I_T nexus (SAM-5 4.7).
///
/// It must not be reused while any logical unit still knows the old nexus.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NexusId(pub u64);

/// The name of a SCSI port in the form its transport defines.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PortName {
    /// An SRP port identifier: 16 bytes, identifier extension then GUID
    /// (SRP r16a 4.4, SPC-4 7.6.4 TransportID format for SRP).
    Srp([u8; 16]),
    /// An iSCSI port name as text: `<iSCSI name>,i,0x<ISID>` for an initiator,
    /// `<iSCSI name>,t,0x<tag>` for a target (RFC 7143 4.4.2).
    Iscsi(String),
}

impl PortName {
    /// The PROTOCOL IDENTIFIER of the port's transport (SPC-4 7.6.1).
    #[must_use]
    pub fn protocol_identifier(&self) -> u8 {
        match self {
            Self::Srp(_) => 4,
            Self::Iscsi(_) => 5,
        }
    }
}

/// An SRP port identifier as its two halves in hexadecimal, `<identifier extension>:<GUID>`; an
/// iSCSI port name as it is.
impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Identifiers of both sides are written alike.
            Self::Srp(id) => InitiatorPortId(*id).fmt(f),
            Self::Iscsi(name) => f.write_str(name),
        }
    }
}

/// A port of this target device, as VPD page 83h names it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TargetPort {
    /// The port's own name.
    pub name: PortName,
    /// RELATIVE TARGET PORT IDENTIFIER, from 1 (SPC-4 4.5).
    pub relative_id: u16,
    /// Target port group, for designators and asymmetric access.
    pub group: u16,
}

/// The two ports of an I_T nexus.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Nexus {
    /// The initiator port that logged in.
    pub initiator: PortName,
    /// The target port it logged in to.
    pub target: TargetPort,
}
