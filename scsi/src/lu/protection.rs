//! Current protection of an LU, which is changed by FORMAT UNIT.
//!
//! FORMAT UNIT executes alone, so other commands have the same protection from their first step
//! until the response. The only exception is a HEAD OF QUEUE command that reads blocks, which does
//! not wait for a FORMAT UNIT. It uses the protection at its start.

use std::sync::PoisonError;

use riser_sync::MutexGuard;
use riser_sync::atomic::Ordering;

use super::LogicalUnit;
use crate::attention::{Attention, AttentionScope};
use crate::config::{Protection, ProtectionType};
use crate::protection::ProtectionChange;
use crate::step::BackendError;

impl LogicalUnit {
    /// Returns the current protection, or `None` if the medium is formatted without protection.
    #[inline]
    #[must_use]
    pub fn protection(&self) -> Option<Protection> {
        let configured = self.config.protection?;
        let number = self.protection_type.load(Ordering::Relaxed);
        let protection_type = ProtectionType::from_number(number)?;
        Some(Protection {
            protection_type,
            ..configured
        })
    }

    /// Returns the protection used to store blocks, or `None` if the medium has no protection
    /// information.
    ///
    /// On a medium that is formatted without protection, every block is stored with protection
    /// information that disables all checks.
    #[inline]
    pub(crate) fn stored_protection(&self) -> Option<Protection> {
        // The initiator cannot transfer protection information, so all bits of both tags are set in
        // each block.
        const UNCHECKED: Protection = Protection::new(ProtectionType::Type3);
        self.config.protection?;
        Some(self.protection().unwrap_or(UNCHECKED))
    }

    /// Changes the protection type after `save` has stored it on the medium. All other nexuses are
    /// notified.
    ///
    /// This blocks until `save` returns.
    ///
    /// # Errors
    /// The error returned by `save`. [`BackendError::NotReady`] if this LU is being replaced. If
    /// this happens during `save`, the new LU must [restore](Self::restore_protection) the type.
    pub fn save_protection(
        &self,
        change: &ProtectionChange,
        save: impl FnOnce(Option<ProtectionType>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let _turn = self.lock_formatting();
        if self.is_retired() {
            return Err(BackendError::NotReady);
        }
        save(change.protection_type)?;
        if self.is_retired() {
            return Err(BackendError::NotReady);
        }
        self.set_protection_type(change.protection_type, AttentionScope::AllBut(change.nexus));
        Ok(())
    }

    /// Updates the protection type if the medium was formatted via the LU that this LU has replaced.
    /// `current` returns the type of the medium. All nexuses are notified.
    ///
    /// This blocks while [`Self::save_protection`] is running.
    pub fn restore_protection(&self, current: impl FnOnce() -> Option<ProtectionType>) {
        let _turn = self.lock_formatting();
        self.set_protection_type(current(), AttentionScope::All);
    }

    fn lock_formatting(&self) -> MutexGuard<'_, ()> {
        self.formatting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn set_protection_type(&self, protection_type: Option<ProtectionType>, scope: AttentionScope) {
        // Store this before raising the unit attentions, because the initiator will then read the
        // parameter data and must get the new value.
        let number = number(protection_type);
        if self.protection_type.swap(number, Ordering::Relaxed) == number {
            return;
        }
        let mut nexuses = self.lock_nexuses();
        // READ CAPACITY (16) returns the type, and the Extended INQUIRY page the checks.
        for changed in [Attention::CapacityChanged, Attention::InquiryChanged] {
            nexuses.raise(changed, scope);
        }
    }
}

/// Returns the number of a protection type, or zero for a medium without protection.
pub(super) fn number(protection_type: Option<ProtectionType>) -> u8 {
    protection_type.map_or(0, ProtectionType::number)
}
