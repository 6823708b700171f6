//! Errors of the verbs.

use thiserror::Error;

use super::QpState;

/// Reason why a verb refused (IBTA 11.2's "verb results").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum VerbsError {
    /// The id names nothing, or something that is gone.
    #[error("invalid {0} handle")]
    InvalidHandle(&'static str),
    /// Other objects still use this one.
    #[error("{0} is busy")]
    ResourceBusy(&'static str),
    /// The device's limit for this kind of object is reached.
    #[error("the device has reached its limit: {0}")]
    InsufficientResources(&'static str),
    /// A value outside what the device or the standard allows.
    #[error("invalid {0}")]
    InvalidParameter(&'static str),
    /// An access-flag combination that the standard forbids.
    #[error("invalid access flags: {0}")]
    InvalidAccess(&'static str),
    /// The object is not in a state that allows this.
    #[error("{0}")]
    InvalidState(&'static str),
    /// There is no such port.
    #[error("no port {0}")]
    InvalidPort(u8),
    /// There is no such entry in a GID or P_Key table.
    #[error("no table entry {0}")]
    InvalidIndex(u16),
    /// The queue pair state table has no such transition.
    #[error("no transition from {from:?} to {to:?}")]
    InvalidTransition {
        /// The state it is in.
        from: QpState,
        /// The state that was asked for.
        to: QpState,
    },
    /// The transition needs an attribute that was not given.
    #[error("transition to {to:?} requires {attribute}")]
    MissingAttribute {
        /// The state that was asked for.
        to: QpState,
        /// Name of the attribute.
        attribute: &'static str,
    },
    /// The transition does not allow an attribute that was given.
    #[error("transition to {to:?} does not allow {attribute}")]
    ForbiddenAttribute {
        /// The state that was asked for.
        to: QpState,
        /// Name of the attribute.
        attribute: &'static str,
    },
    /// The queue pair's type has no such operation.
    #[error("not supported on this queue pair type: {0}")]
    WrongQpType(&'static str),
    /// A completion was lost because the queue was full; it takes no others.
    #[error("completion queue overrun")]
    CqOverrun,
    /// The device has no such objects or operations.
    #[error("the device does not support {0}")]
    Unsupported(&'static str),
    /// The device is gone or never was.
    #[error("device is not available")]
    DeviceGone,
    /// The operating system refused; the value is `errno`.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

/// A post that stopped at a request: those before `index` are posted, it and those after are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("work request {index}: {reason}")]
pub struct PostError {
    /// Position in the chain, from 0.
    pub index: usize,
    /// Reason of the refusal.
    pub reason: PostReason,
}

/// Reason why a work request was refused at the post.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PostReason {
    /// The id names nothing.
    #[error("invalid handle")]
    InvalidHandle,
    /// The queue pair's state takes no such request.
    #[error("queue pair state {0:?} takes no such request")]
    InvalidState(QpState),
    /// The queue is full.
    #[error("queue full")]
    QueueFull,
    /// More scatter-gather entries than the queue was created for.
    #[error("too many scatter-gather entries")]
    TooManySges,
    /// The scatter list is longer than a message may be, or its sum overflows.
    #[error("message too long")]
    MessageTooLong,
    /// Inline data longer than the queue was created for, beside a scatter list, or of an operation
    /// that has no data of its own.
    #[error("inline data too long or not allowed")]
    InvalidInline,
    /// The operation does not exist on this kind of queue pair.
    #[error("operation not supported on this queue pair")]
    InvalidOpcode,
    /// A key, region or address handle that the request names is not usable.
    #[error("invalid key, region or address handle")]
    InvalidKey,
    /// A value of the request is against the rules (alignment, length of an atomic, and so on).
    #[error("invalid request: {0}")]
    InvalidRequest(&'static str),
    /// The operating system refused; the value is `errno`.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_operating_system_are_named() {
        let text = "No such device (os error 19)";
        assert_eq!(VerbsError::Os(19).to_string(), text);
        assert_eq!(PostReason::Os(19).to_string(), text);
    }
}
