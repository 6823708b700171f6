//! Protocol data units as values that hold only what is legal (RFC 7143 chapter 11).
//!
//! A value is made from a [`Frame`] with `parse` and gives its basic header segment with `header`;
//! the data segment stays apart, because block data lie in a command's buffer. Lengths in the header
//! are the business of [`frame`](super::frame).

mod initiator;
mod target;

pub use initiator::{
    DataOut, FromInitiator, LoginRequest, LogoutReason, LogoutRequest, MAX_CDB, NopOut,
    ScsiCommand, Snack, SnackKind, TaskAttr, TextRequest, TmfFunction, TmfRequest,
};
pub use target::{
    AsyncEvent, AsyncMessage, DataIn, DataInStatus, FromTarget, LoginResponse, LoginStatus,
    LogoutResponse, LogoutStatus, NopIn, R2t, Reject, RejectReason, ScsiResponse, TextResponse,
    TmfResponse, TmfStatus,
};

use super::frame::Frame;

/// The I bit: deliver at once, do not count.
pub(super) const IMMEDIATE: u8 = 0x40;
/// The F, and in login PDUs the T, bit.
pub(super) const FINAL: u8 = 0x80;
/// The C bit of text and login PDUs.
pub(super) const CONTINUE: u8 = 0x40;

/// Why a PDU is not legal. A target answers with a [`Reject`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PduError {
    /// No such opcode, or not one that this side receives.
    #[error("opcode {0:#04x} is not expected here")]
    Opcode(u8),
    /// A field has a value that it cannot have.
    #[error("{field} is {value:#x}")]
    Field {
        /// Its name.
        field: &'static str,
        /// What it holds.
        value: u32,
    },
    /// An additional header segment runs over the end, comes twice, or has a wrong length.
    #[error("the additional header segments are malformed")]
    Ahs,
    /// Fewer bytes of data than the PDU needs.
    #[error("{field} needs {need} bytes of data, there are {have}")]
    Data {
        /// What is missing.
        field: &'static str,
        /// Bytes that it needs.
        need: usize,
        /// Bytes that there are.
        have: usize,
    },
}

/// Whether the data are a command's, and not to be looked at as text or parameters.
#[must_use]
pub fn opcode(frame: &Frame<'_>) -> u8 {
    frame.bhs[0] & 0x3f
}

/// Stage of a login (RFC 7143 11.12.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// 0: SecurityNegotiation.
    Security,
    /// 1: LoginOperationalNegotiation.
    Operational,
    /// 3: FullFeaturePhase.
    FullFeature,
}

impl Stage {
    /// The code on the wire.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Security => 0,
            Self::Operational => 1,
            Self::FullFeature => 3,
        }
    }

    fn parse(field: &'static str, code: u8) -> Result<Self, PduError> {
        match code & 3 {
            0 => Ok(Self::Security),
            1 => Ok(Self::Operational),
            3 => Ok(Self::FullFeature),
            other => Err(PduError::Field {
                field,
                value: u32::from(other),
            }),
        }
    }
}

/// T, C, CSG and NSG of a login PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginFlags {
    /// The current stage.
    pub current: Stage,
    /// T with NSG: the stage that the sender wants to go to, or agrees to.
    pub transit: Option<Stage>,
    /// C: the text goes on in the next PDU.
    pub continues: bool,
}

impl LoginFlags {
    fn parse(byte: u8) -> Result<Self, PduError> {
        let current = Stage::parse("CSG", byte >> 2)?;
        let transit = match byte & FINAL {
            0 => None,
            _ => Some(Stage::parse("NSG", byte)?),
        };
        let continues = byte & CONTINUE != 0;
        if current == Stage::FullFeature || transit.is_some_and(|next| next <= current) {
            return Err(PduError::Field {
                field: "CSG and NSG",
                value: u32::from(byte),
            });
        }
        if continues && transit.is_some() {
            return Err(PduError::Field {
                field: "T and C",
                value: u32::from(byte),
            });
        }
        Ok(Self {
            current,
            transit,
            continues,
        })
    }

    fn byte(self) -> u8 {
        let transit = self.transit.map_or(0, |next| FINAL | next.code());
        transit | if self.continues { CONTINUE } else { 0 } | self.current.code() << 2
    }
}
