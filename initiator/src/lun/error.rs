//! Errors of operations on logical units.

use riser_block::BlockError;
use riser_scsi::protection::ProtectionError;
use riser_scsi::sense::{AdditionalSense, Sense, SenseKey};
use riser_scsi::step::Status;

use crate::engine::{Elapsed, IoCompletion, IoData};
use crate::protection::PiError;
use crate::request::{CommandResponse, RequestError};
use crate::scsi::CapacityError;

/// SCSI status RESERVATION CONFLICT.
const RESERVATION_CONFLICT: u8 = Status::ReservationConflict as u8;

// Additional sense codes for which the qualifier is irrelevant.
const INVALID_OPERATION_CODE: u8 = AdditionalSense::INVALID_OPERATION_CODE.code;
const INVALID_FIELD_IN_CDB: u8 = AdditionalSense::INVALID_FIELD_IN_CDB.code;
const LBA_OUT_OF_RANGE: u8 = AdditionalSense::LBA_OUT_OF_RANGE.code;
const LOGICAL_UNIT_NOT_SUPPORTED: u8 = AdditionalSense::LOGICAL_UNIT_NOT_SUPPORTED.code;

/// SCSI status CHECK CONDITION.
const CHECK_CONDITION: u8 = Status::CheckCondition as u8;

/// Error of an operation on a logical unit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LunError {
    /// No response was received.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The unit returned CHECK CONDITION.
    #[error("{key}: {additional}")]
    Check {
        /// Sense key of the response.
        key: SenseKey,
        /// Additional sense code and qualifier.
        additional: AdditionalSense,
    },
    /// A check of protection information failed.
    #[error(transparent)]
    Protection(#[from] PiError),
    /// Protection information is required, but is not available.
    #[error("cannot use protection information: {0}")]
    Unprotected(&'static str),
    /// A status other than GOOD, or CHECK CONDITION without sense data.
    #[error("status {0:#04x}")]
    Status(u8),
    /// The command transferred less data than expected.
    #[error("{got} of {want} bytes transferred")]
    Short {
        /// Number of requested bytes.
        want: u32,
        /// Number of transferred bytes.
        got: u32,
    },
    /// The target reported an impossible property of the unit.
    #[error("invalid {0} from the target")]
    Malformed(&'static str),
    /// The unit's capacity is not supported.
    #[error("unsupported {0}")]
    Capacity(#[from] CapacityError),
    /// The target has no logical unit with this number: LOGICAL UNIT NOT SUPPORTED (SPC-4 annex D).
    #[error("no such logical unit")]
    NoUnit,
    /// There is no disk with this number.
    #[error("logical unit {0} does not exist or is not a disk")]
    NotADisk(u32),
    /// The number exceeds the maximum for logical units.
    #[error("invalid logical unit number {0}")]
    Number(u32),
    /// Offset or length is not a multiple of the block size, exceeds the disk, or is too long.
    #[error("range exceeds the disk's bounds")]
    OutOfRange,
    /// The client has no free buffer for the parameters of a command.
    #[error("no buffer available")]
    NoMemory,
    /// The logical unit does not support the operation.
    #[error("not supported by the logical unit")]
    Unsupported,
}

impl LunError {
    /// Returns whether the unit rejected the command as an ILLEGAL REQUEST.
    pub(super) fn is_illegal_request(&self) -> bool {
        matches!(
            self,
            Self::Check {
                key: SenseKey::IllegalRequest,
                ..
            }
        )
    }

    /// Returns whether the unit does not support the command: INVALID COMMAND OPERATION CODE.
    pub(super) fn is_unknown_command(&self) -> bool {
        matches!(
            self,
            Self::Check {
                key: SenseKey::IllegalRequest,
                additional: AdditionalSense {
                    code: INVALID_OPERATION_CODE,
                    ..
                }
            }
        )
    }

    /// Returns whether the unit does not support the command, or only supports another form of it.
    pub(super) fn is_unsupported(&self) -> bool {
        matches!(
            self,
            Self::Check {
                key: SenseKey::IllegalRequest,
                additional: AdditionalSense {
                    code: INVALID_OPERATION_CODE | INVALID_FIELD_IN_CDB,
                    ..
                }
            }
        )
    }
}

impl From<Elapsed> for LunError {
    fn from(_: Elapsed) -> Self {
        Self::Request(RequestError::TimedOut)
    }
}

impl From<LunError> for BlockError {
    fn from(error: LunError) -> Self {
        let text = error.to_string();
        match error {
            LunError::Request(RequestError::TimedOut) => Self::TimedOut,
            LunError::Request(RequestError::CacheLost) => Self::WritesLost,
            LunError::Request(RequestError::ConnectionLost | RequestError::Closed) => {
                Self::Disconnected(text)
            }
            LunError::Check { key, additional } => match (key, additional.code) {
                (SenseKey::MediumError, _) => Self::Medium(additional.to_string()),
                (SenseKey::DataProtect, _)
                    if additional == AdditionalSense::SPACE_ALLOCATION_FAILED =>
                {
                    Self::NoSpace
                }
                (SenseKey::DataProtect, _) => Self::ReadOnly,
                (SenseKey::IllegalRequest, INVALID_OPERATION_CODE | INVALID_FIELD_IN_CDB) => {
                    Self::Unsupported
                }
                (SenseKey::IllegalRequest, LBA_OUT_OF_RANGE) => Self::OutOfRange,
                _ => Self::Io(text),
            },
            LunError::Protection(error) => Self::Protection(error.to_string()),
            LunError::Status(RESERVATION_CONFLICT) => Self::ReservationConflict,
            LunError::OutOfRange => Self::OutOfRange,
            LunError::Unsupported => Self::Unsupported,
            _ => Self::Io(text),
        }
    }
}

/// Checks a response: returns an error unless it is GOOD.
pub(super) fn check_response(response: &CommandResponse) -> Result<(), LunError> {
    if response.is_success() {
        return Ok(());
    }
    match response.sense() {
        Some(sense) if response.status == CHECK_CONDITION => Err(check_error(&sense)),
        _ => Err(LunError::Status(response.status)),
    }
}

/// Returns the error for the sense data of a CHECK CONDITION.
fn check_error(sense: &Sense) -> LunError {
    let (key, additional) = (sense.key, sense.additional);
    if let Some(check) = ProtectionError::from_additional_sense(additional) {
        return LunError::Protection(PiError {
            check,
            lba: sense.information,
            is_by_target: true,
        });
    }
    match (key, additional.code) {
        (SenseKey::IllegalRequest, LOGICAL_UNIT_NOT_SUPPORTED) => LunError::NoUnit,
        _ => LunError::Check { key, additional },
    }
}

/// Checks the completion of a command that must have transferred all of its data, and returns its
/// memory.
pub(super) fn check_whole(end: IoCompletion) -> Result<IoData, LunError> {
    let response = end.result?;
    check_response(&response)?;
    let want = end.data.len() as u32;
    if response.transferred == want {
        Ok(end.data)
    } else {
        let got = response.transferred;
        Err(LunError::Short { want, got })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_unit_differs_from_other_errors() {
        // Response of the Linux kernel's target to an INQUIRY for a missing logical unit.
        let mut sense = [0u8; 18];
        (sense[0], sense[2], sense[7]) = (0x70, 0x05, 10);
        (sense[12], sense[13]) = (0x25, 0x00);
        let mut response = CommandResponse {
            status: 0x02,
            sense: Some(sense.into()),
            transferred: 0,
            overflow: 0,
        };
        assert_eq!(check_response(&response), Err(LunError::NoUnit));
        sense[12] = 0x24;
        response.sense = Some(sense.into());
        assert!(matches!(
            check_response(&response),
            Err(LunError::Check { .. })
        ));
    }

    #[test]
    fn sense_names_failed_check_and_block() {
        // Fixed format with VALID: ABORTED COMMAND, LOGICAL BLOCK REFERENCE TAG CHECK FAILED.
        let mut sense = [0u8; 18];
        (sense[0], sense[2], sense[7]) = (0xf0, 0x0b, 10);
        sense[3..7].copy_from_slice(&[0, 1, 2, 3]);
        for (qualifier, check) in [
            (1, ProtectionError::Guard),
            (2, ProtectionError::ApplicationTag),
            (3, ProtectionError::ReferenceTag),
        ] {
            (sense[12], sense[13]) = (0x10, qualifier);
            let response = CommandResponse {
                status: 0x02,
                sense: Some(sense.into()),
                transferred: 0,
                overflow: 0,
            };
            let error = PiError {
                check,
                lba: Some(0x01_0203),
                is_by_target: true,
            };
            let found = check_response(&response).unwrap_err();
            assert_eq!(found, LunError::Protection(error));
            let error = BlockError::from(found);
            assert!(error.to_string().contains("at LBA 66051"), "{error}");
            assert_eq!(error.errno(), libc::EILSEQ);
        }
    }

    #[test]
    fn medium_error_is_named_once() {
        let (code, qualifier) = (0x0c, 0x00);
        let error = LunError::Check {
            key: SenseKey::MediumError,
            additional: AdditionalSense { code, qualifier },
        };
        let text = BlockError::from(error).to_string();
        assert_eq!(text.matches("medium error").count(), 1, "{text}");
    }
}
