//! Error types.

use thiserror::Error;

use super::QpState;

/// Error returned by a verb (IBTA 11.2, "verb results").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum VerbsError {
    /// The handle is invalid or the object has been removed.
    #[error("invalid {0} handle")]
    InvalidHandle(&'static str),
    /// The object is still used by other objects.
    #[error("{0} is busy")]
    ResourceBusy(&'static str),
    /// The device limit for this type of object is exceeded.
    #[error("the device has reached its limit: {0}")]
    InsufficientResources(&'static str),
    /// The value is not supported by the device or not allowed by the standard.
    #[error("invalid {0}")]
    InvalidParameter(&'static str),
    /// This combination of access flags is not allowed by the standard.
    #[error("invalid access flags: {0}")]
    InvalidAccess(&'static str),
    /// The operation is not valid in the current state.
    #[error("{0}")]
    InvalidState(&'static str),
    /// The port does not exist.
    #[error("no port {0}")]
    InvalidPort(u8),
    /// The entry does not exist in the GID or P_Key table.
    #[error("no table entry {0}")]
    InvalidIndex(u16),
    /// The transition is not in the queue pair state table.
    #[error("no transition from {from:?} to {to:?}")]
    InvalidTransition {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
    },
    /// An attribute required by the transition is missing.
    #[error("transition to {to:?} requires {attribute}")]
    MissingAttribute {
        /// Requested state.
        to: QpState,
        /// Attribute name.
        attribute: &'static str,
    },
    /// An attribute is not allowed for the transition.
    #[error("transition to {to:?} does not allow {attribute}")]
    ForbiddenAttribute {
        /// Requested state.
        to: QpState,
        /// Attribute name.
        attribute: &'static str,
    },
    /// The operation is not supported for this queue pair type.
    #[error("not supported on this queue pair type: {0}")]
    WrongQpType(&'static str),
    /// A completion was lost because the queue was full. The queue cannot be used anymore.
    #[error("completion queue overrun")]
    CqOverrun,
    /// The device does not support these objects or operations.
    #[error("the device does not support {0}")]
    Unsupported(&'static str),
    /// The device has been removed or never existed.
    #[error("device is not available")]
    DeviceGone,
    /// Error from the operating system; the value is `errno`.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

/// Error returned when posting. Requests before `index` have been posted, and the rest have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("work request {index}: {reason}")]
pub struct PostError {
    /// Position in the chain, starting at 0.
    pub index: usize,
    /// Reason.
    pub reason: PostReason,
}

/// Reason why a work request could not be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PostReason {
    /// The handle is invalid.
    #[error("invalid handle")]
    InvalidHandle,
    /// The request is not valid in the current queue pair state.
    #[error("work request not allowed in queue pair state {0:?}")]
    InvalidState(QpState),
    /// The queue is full.
    #[error("queue full")]
    QueueFull,
    /// The number of scatter/gather entries exceeds the queue limit.
    #[error("too many scatter-gather entries")]
    TooManySges,
    /// The size of the scatter list exceeds the maximum message size or overflows.
    #[error("message too long")]
    MessageTooLong,
    /// Inline data exceeds the queue limit, is used together with a scatter list, or is not
    /// supported for this operation.
    #[error("inline data too long or not allowed")]
    InvalidInline,
    /// The operation is not supported for this queue pair type.
    #[error("operation not supported on this queue pair")]
    InvalidOpcode,
    /// A key, region or address handle in the request is invalid.
    #[error("invalid key, region or address handle")]
    InvalidKey,
    /// A value in the request is invalid (for example the alignment or length of an atomic).
    #[error("invalid request: {0}")]
    InvalidRequest(&'static str),
    /// Error from the operating system; the value is `errno`.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn os_errors_include_name() {
        let text = "No such device (os error 19)";
        assert_eq!(VerbsError::Os(19).to_string(), text);
        assert_eq!(PostReason::Os(19).to_string(), text);
    }
}
