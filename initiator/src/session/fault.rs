//! Reasons for a session to be down.
//!
//! The faults of both protocols stand here, below their machines: [`Down`] names them, and every
//! machine reports a [`Down`].

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
    /// The connection could not be made.
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
    /// The target asked for a logout, or announced that it drops the connection (RFC 7143 clause
    /// 11.9.1, events 1 to 3).
    #[error("target asked for a logout")]
    LogoutRequested,
    /// The connection was closed by the peer, or broke.
    #[error("connection lost")]
    ConnectionLost,
    /// Commands or pings were not answered, and commands could not be aborted.
    #[error("target does not answer")]
    Unresponsive,
    /// It was closed from this side.
    #[error("closed")]
    Closed,
    /// Another logical unit is there than before, or than on the other paths.
    #[error("the portal leads to another logical unit")]
    OtherUnit,
    /// The logical unit has less capacity than before.
    #[error("the logical unit has become smaller")]
    Shrunk,
    /// The logical unit reports no identity, or is not there, so two paths cannot be proved to lead
    /// to the same one.
    #[error("the target does not present the logical unit, or the unit reports no identity")]
    NoIdentity,
    /// The logical unit did not answer the check of its identity.
    #[error("the logical unit does not answer")]
    UnitSilent,
}

/// Reason for a connection not to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The target's address cannot be reached from this device.
    #[error("address cannot be reached: {0}")]
    Address(CmError),
    /// The target did not answer.
    #[error("target does not answer")]
    Unreachable,
    /// SRP or iSER login refused.
    #[error(transparent)]
    Login(SrpLoginError),
    /// The iSCSI login failed.
    #[error(transparent)]
    IscsiLogin(IscsiLoginError),
    /// The target has moved, to where it cannot be followed.
    #[error("target has moved to an address that cannot be followed")]
    Redirected,
    /// It took too long.
    #[error("connecting timed out")]
    TimedOut,
    /// A local resource could not be had.
    #[error("local resources: {0}")]
    Local(VerbsError),
    /// A CM call failed.
    #[error("connection manager: {0}")]
    Cm(CmError),
    /// A TCP connection could not be made; the value is the operating system's error.
    #[error("TCP connection: {}", std::io::Error::from_raw_os_error(*.0))]
    Tcp(i32),
}

/// Reason for an SRP login to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpLoginError {
    /// The target refused with SRP_LOGIN_REJ.
    #[error("login refused: {0}")]
    Rejected(LoginRejReason),
    /// The connection was refused without an SRP reason; the value is the CM's.
    #[error("connection refused (CM reason {0})")]
    Refused(u16),
    /// The target's answer is not legal.
    #[error(transparent)]
    Fault(#[from] SrpFault),
}

/// A violation of SRP by the target. Its channel is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpFault {
    /// An information unit is malformed.
    #[error("malformed information unit: {0}")]
    Malformed(#[from] SrpError),
    /// An information unit came that this state does not allow.
    #[error("{opcode:?} while {state}")]
    Unexpected {
        /// The information unit's type.
        opcode: Opcode,
        /// State of the channel then.
        state: &'static str,
    },
    /// An answer names a request that is not outstanding.
    #[error("answer with tag {0}, which is not outstanding")]
    UnknownTag(Tag),
    /// A request-limit delta takes the limit out of all bounds.
    #[error("request limit delta {0} is absurd")]
    RequestLimit(i32),
    /// A residual is larger than the buffer it is about.
    #[error("residual of {residual} bytes for a buffer of {len}")]
    Residual {
        /// Residual of the answer, in bytes.
        residual: u32,
        /// Length of the buffer, in bytes.
        len: u32,
    },
    /// The login's answer cannot be worked with.
    #[error("login response: {0}")]
    Login(&'static str),
}

/// A violation of iSCSI by the target, or a wrong digest. The connection is to be closed: error
/// recovery level 0 has session recovery only (RFC 7143 clause 7.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IscsiFault {
    /// The stream cannot be followed.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The first bytes are no answer to a login: a server of something else.
    #[error("the peer does not speak iSCSI")]
    NotIscsi,
    /// A PDU is malformed.
    #[error(transparent)]
    Pdu(#[from] PduError),
    /// A message of iSER is malformed.
    #[error(transparent)]
    Iser(#[from] IserError),
    /// The text of a negotiation is malformed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Data were damaged on their way.
    #[error("the data digest is wrong")]
    DataDigest,
    /// A PDU came that this state does not allow.
    #[error("a PDU that is not expected: {0}")]
    Unexpected(&'static str),
    /// An answer names a task that there is not.
    #[error("a PDU with task tag {:#010x}, which is not outstanding", .0.0)]
    UnknownTask(Itt),
    /// Data-In with the wrong number, or not where the data before it ended.
    #[error("Data-In out of order")]
    DataOrder,
    /// More data than the command has room for.
    #[error("data beyond the command's buffer")]
    DataRange,
    /// An R2T that asks for what it may not ask for.
    #[error("R2T outside the data that the target may ask for")]
    R2t,
    /// A residual larger than the buffer it is about.
    #[error("a residual of {residual} bytes for a buffer of {len}")]
    Residual {
        /// Residual of the answer, in bytes.
        residual: u32,
        /// Length of the buffer, in bytes.
        len: u32,
    },
    /// More PDUs that want an answer than answers can be sent.
    #[error("the target does not read the answers that it asks for")]
    Flood,
    /// The target refused something other than a command.
    #[error("target rejected a PDU ({0:?})")]
    Rejected(RejectReason),
}
