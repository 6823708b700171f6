//! Reasons for a session to be down.
//!
//! The errors of both protocols are defined here, below their machines: [`Down`] refers to them,
//! and all machines report a [`Down`].

use riser_scsi::iscsi::Itt;
use riser_scsi::iscsi::frame::FrameError;
use riser_scsi::iscsi::login::LoginError as IscsiLoginError;
use riser_scsi::iscsi::pdu::{PduError, RejectReason};
use riser_scsi::iscsi::text::TextError;
use riser_scsi::iser::IserError;
use riser_scsi::srp::{LoginRejReason, Opcode, SrpError, TLogoutReason, Tag};
use riser_transport::verbs::{CmError, VerbsError};

/// Reason for a session to be down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Down {
    /// Connecting failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The target violated SRP.
    #[error(transparent)]
    SrpFault(#[from] SrpFault),
    /// The target violated iSCSI.
    #[error(transparent)]
    IscsiFault(#[from] IscsiFault),
    /// The target logged us out.
    #[error("target logged out: {0}")]
    Logout(TLogoutReason),
    /// The target requested a logout, or announced that it will drop the connection (RFC 7143
    /// clause 11.9.1, events 1 to 3).
    #[error("target requested a logout")]
    LogoutRequested,
    /// The connection was closed by the peer, or broke.
    #[error("connection lost")]
    ConnectionLost,
    /// Commands or pings timed out, and commands could not be aborted.
    #[error("target does not respond")]
    Unresponsive,
    /// The session was closed by us.
    #[error("closed")]
    Closed,
    /// The logical unit is a different one than before, or than on the other paths.
    #[error("the portal leads to another logical unit")]
    OtherUnit,
    /// The logical unit has less capacity than before.
    #[error("the logical unit has shrunk")]
    Shrunk,
    /// The logical unit has no identity or is missing, so it cannot be proven that two paths lead
    /// to the same unit.
    #[error("the target does not present the logical unit, or the unit reports no identity")]
    NoIdentity,
    /// The logical unit did not respond to the identity check.
    #[error("the logical unit does not respond")]
    UnitSilent,
}

/// Reason for a failed connection attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The target's address is not reachable from this device.
    #[error("cannot reach the address: {0}")]
    Address(CmError),
    /// The target did not respond.
    #[error("target does not respond")]
    Unreachable,
    /// The SRP or iSER login was rejected.
    #[error(transparent)]
    Login(SrpLoginError),
    /// The iSCSI login failed.
    #[error(transparent)]
    IscsiLogin(IscsiLoginError),
    /// The target has moved to an address that cannot be used.
    #[error("target redirected to an unusable address")]
    Redirected,
    /// The attempt timed out.
    #[error("connecting timed out")]
    TimedOut,
    /// A local resource is not available.
    #[error("cannot allocate local resources: {0}")]
    Local(VerbsError),
    /// A CM call failed.
    #[error("connection manager: {0}")]
    Cm(CmError),
    /// A TCP connection failed; the value is the operating system's error.
    #[error("TCP connection: {}", std::io::Error::from_raw_os_error(*.0))]
    Tcp(i32),
}

/// Returns a description of a reason of the InfiniBand CM (IBTA 12.6.7.2), or nothing for a reason
/// that suggests no action.
fn cm_reason(reason: u16) -> &'static str {
    match reason {
        24 | 25 => ": redirected to another port, too often or without a usable address",
        _ => "",
    }
}

/// Reason for a failed SRP login.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpLoginError {
    /// The target rejected it with SRP_LOGIN_REJ.
    #[error("login rejected: {0}")]
    Rejected(LoginRejReason),
    /// The connection was rejected without an SRP reason; the value is the CM's.
    #[error("connection rejected (CM reason {0}{text})", text = cm_reason(*.0))]
    Refused(u16),
    /// The target's response is invalid.
    #[error(transparent)]
    Fault(#[from] SrpFault),
}

/// A violation of SRP by the target. Its channel must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpFault {
    /// An information unit is malformed.
    #[error("malformed information unit: {0}")]
    Malformed(#[from] SrpError),
    /// An information unit is not allowed in this state.
    #[error("unexpected {opcode:?} while {state}")]
    Unexpected {
        /// Type of the information unit.
        opcode: Opcode,
        /// State of the channel.
        state: &'static str,
    },
    /// A response has the tag of a request that is not outstanding.
    #[error("response with tag {0}, which is not outstanding")]
    UnknownTag(Tag),
    /// A request-limit delta exceeds all limits.
    #[error("invalid request limit delta {0}")]
    RequestLimit(i32),
    /// A residual exceeds the length of its buffer.
    #[error("invalid residual of {residual} bytes for a buffer of {len} bytes")]
    Residual {
        /// Residual in the response, in bytes.
        residual: u32,
        /// Length of the buffer, in bytes.
        len: u32,
    },
    /// The login response is unusable.
    #[error("invalid login response: {0}")]
    Login(&'static str),
}

/// A violation of iSCSI by the target, or a wrong digest. The connection must be closed: error
/// recovery level 0 only supports session recovery (RFC 7143 clause 7.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IscsiFault {
    /// The framing of the stream is invalid.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The first bytes are not a login response: the server uses another protocol.
    #[error("the peer does not speak iSCSI")]
    NotIscsi,
    /// A PDU is malformed.
    #[error(transparent)]
    Pdu(#[from] PduError),
    /// An iSER message is malformed.
    #[error(transparent)]
    Iser(#[from] IserError),
    /// The text of a negotiation is malformed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Data was corrupted in transit.
    #[error("invalid data digest")]
    DataDigest,
    /// A PDU is not allowed in this state.
    #[error("unexpected PDU: {0}")]
    Unexpected(&'static str),
    /// A PDU has the tag of a task that does not exist.
    #[error("PDU with task tag {:#010x}, which is not outstanding", .0.0)]
    UnknownTask(Itt),
    /// A Data-In has the wrong number, or does not follow the previous data.
    #[error("Data-In out of order")]
    DataOrder,
    /// More data than the command's buffer can hold.
    #[error("data exceeds the command's buffer")]
    DataRange,
    /// An R2T solicits data that must not be solicited.
    #[error("R2T requests data outside of the command's buffer")]
    R2t,
    /// A residual exceeds the length of its buffer.
    #[error("invalid residual of {residual} bytes for a buffer of {len} bytes")]
    Residual {
        /// Residual in the response, in bytes.
        residual: u32,
        /// Length of the buffer, in bytes.
        len: u32,
    },
    /// The target sent more PDUs requiring a response than can be queued.
    #[error("the target does not read the responses it requested")]
    Flood,
    /// The target rejected a PDU other than a command.
    #[error("target rejected a PDU ({0:?})")]
    Rejected(RejectReason),
}
