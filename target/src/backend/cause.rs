//! Causes for which an open backend needs an operator.

/// Cause for which an open backend needs an operator. Texts, metrics, the admin API and the status
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
    /// Operations do not complete: the file system or device does not respond.
    Hanging,
    /// A flush failed: acknowledged writes may be lost, and flushes fail until it is cleared.
    FlushFailed,
    /// The served file was deleted; its data are lost when it is closed.
    Deleted,
    /// The path leads to another file, which the next start would serve.
    Replaced,
    /// The served file was moved away from its path; the next start would not find it.
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

    /// Name in metrics and in the admin API.
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

    /// State of the backend, as text for people.
    #[must_use]
    pub const fn state(self) -> &'static str {
        match self {
            Self::NotReady => "NOT SERVED",
            Self::Hanging => "HANGING",
            Self::Replaced | Self::Moved => "REPLACED",
            _ => "FAILING",
        }
    }

    /// Returns true if the backend still executes some commands.
    #[must_use]
    pub const fn is_served(self) -> bool {
        !matches!(self, Self::NotReady)
    }

    /// Returns true for faults that an inspection of the medium finds.
    #[must_use]
    pub const fn is_of_medium(self) -> bool {
        matches!(
            self,
            Self::Deleted | Self::Replaced | Self::Moved | Self::Truncated
        )
    }

    /// Returns true if the daemon stays ready. It does not while no command completes, nor if the next
    /// start would serve other data, or none: then every acknowledged write is at risk.
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
