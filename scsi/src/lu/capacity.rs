//! Capacity of an LU, and notifications about its used space.

use riser_sync::atomic::Ordering;

use super::LogicalUnit;
use crate::attention::{Attention, AttentionScope};
use crate::config::{Config, ConfigError};

/// The used space must decrease by this percentage of the total before the soft threshold can be
/// reached again.
pub const HYSTERESIS: u8 = 5;

impl LogicalUnit {
    /// Returns the current capacity, in logical blocks.
    #[must_use]
    pub fn capacity_blocks(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Returns the current capacity, in bytes.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_blocks() * u64::from(self.config.block_size.bytes())
    }

    /// Updates the capacity and notifies all nexuses.
    ///
    /// # Errors
    ///
    /// If the new capacity is invalid.
    pub fn set_capacity(&self, blocks: u64) -> Result<(), ConfigError> {
        let config = Config {
            blocks,
            ..self.config.clone()
        };
        config.validate()?;
        // Store this before raising the unit attention, because the initiator will then read the
        // capacity and must get the new value.
        self.capacity.store(blocks, Ordering::Release);
        self.raise(Attention::CapacityChanged, AttentionScope::All);
        if self.threshold().is_some() {
            // THRESHOLD COUNT depends on the capacity.
            self.raise(Attention::ModeChanged, AttentionScope::All);
        }
        Ok(())
    }

    /// Returns the soft threshold as a percentage, if this is thin provisioned and a threshold is
    /// set.
    #[must_use]
    pub fn threshold(&self) -> Option<u8> {
        self.config.threshold.filter(|_| self.config.is_thin())
    }

    /// Updates the number of bytes used and the total space available to this LU. All nexuses are
    /// notified when the threshold is reached (SBC-3 4.7.3.8). They are only notified again if the
    /// used space has decreased by [`HYSTERESIS`] percent of the total in between.
    ///
    /// If the state changes, returns whether the threshold has been reached.
    pub fn note_space(&self, used: u64, space: u64) -> Option<bool> {
        let percent = self.threshold()?;
        // Use more than 64 bits, because multiplying exabytes by a hundred would overflow.
        let is_beyond =
            |percent: u8| u128::from(used) * 100 >= u128::from(space) * u128::from(percent);
        // If there was only a single limit, we would notify all nexuses each time the used space
        // varies around it. The lower limit must be at least 1 %, because we could never reset this
        // state with 0 %.
        let is_filling = match self.is_filling.load(Ordering::Relaxed) {
            true => is_beyond(percent.saturating_sub(HYSTERESIS).max(1)),
            false => is_beyond(percent),
        };
        if self.is_filling.swap(is_filling, Ordering::Relaxed) == is_filling {
            return None;
        }
        if is_filling {
            self.raise(Attention::SoftThreshold, AttentionScope::All);
        }
        Some(is_filling)
    }

    /// Returns whether the soft threshold has been reached.
    #[must_use]
    pub fn is_filling(&self) -> bool {
        self.is_filling.load(Ordering::Relaxed)
    }
}
