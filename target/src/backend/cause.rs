//! Reasons why an open backend requires an operator.

/// Reason why an open backend requires an operator. Messages, metrics, the admin API and the status
/// page all use [`Cause::label`] and [`Cause::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// Operations fail with a medium error.
    Medium,
    /// Operations fail because the file system is full.
    NoSpace,
    /// Operations fail because the file system or device is read-only.
    ReadOnly,
    /// Operations fail because the device was removed.
    NotReady,
    /// Operations fail for another reason.
    Internal,
    /// Operations do not complete, because the file system or device is not responding.
    Hanging,
    /// A flush failed. Acknowledged writes may be lost, and flushes fail until this is cleared.
    FlushFailed,
    /// The served file was deleted. Its data will be lost when it is closed.
    Deleted,
    /// The path refers to a different file, which would be served after a restart.
    Replaced,
    /// The served file was renamed, and would not be found after a restart.
    Moved,
    /// The file or device is smaller than it should be.
    Truncated,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 11] = [
        Self::Medium,
        Self::NoSpace,
        Self::ReadOnly,
        Self::NotReady,
        Self::Internal,
        Self::Hanging,
        Self::FlushFailed,
        Self::Deleted,
        Self::Replaced,
        Self::Moved,
        Self::Truncated,
    ];

    /// Returns the name in metrics and in the admin API.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Medium => "medium",
            Self::NoSpace => "no_space",
            Self::ReadOnly => "read_only",
            Self::NotReady => "not_ready",
            Self::Internal => "internal",
            Self::Hanging => "hanging",
            Self::FlushFailed => "flush_failed",
            Self::Deleted => "deleted",
            Self::Replaced => "replaced",
            Self::Moved => "moved",
            Self::Truncated => "truncated",
        }
    }

    /// Returns the state of the backend, as text for users.
    #[must_use]
    pub const fn state(self) -> &'static str {
        match self {
            Self::NotReady => "NOT SERVED",
            Self::Hanging => "HANGING",
            Self::Replaced | Self::Moved => "REPLACED",
            _ => "FAILING",
        }
    }

    /// Returns true if the backend can still execute some commands.
    #[must_use]
    pub const fn is_served(self) -> bool {
        !matches!(self, Self::NotReady)
    }

    /// Returns true for faults detected by inspecting the medium.
    #[must_use]
    pub const fn is_of_medium(self) -> bool {
        matches!(
            self,
            Self::Deleted | Self::Replaced | Self::Moved | Self::Truncated
        )
    }

    /// Returns true if the daemon is still ready. It is not ready if no commands can complete. This
    /// also applies if different data or no data would be served after a restart, because all
    /// acknowledged writes are at risk.
    #[must_use]
    pub const fn is_ready(self) -> bool {
        match self {
            Self::Medium | Self::NoSpace | Self::ReadOnly | Self::Internal | Self::FlushFailed => {
                true
            }
            Self::NotReady
            | Self::Hanging
            | Self::Deleted
            | Self::Replaced
            | Self::Moved
            | Self::Truncated => false,
        }
    }
}
