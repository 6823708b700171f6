//! The logical unit, with the state that is shared between commands.
//!
//! A [`LogicalUnit`] is shared by all workers. The mode bits, the stopped state, the capacity and the
//! protection type are atomics. Unit attentions and [nexuses] are protected by a mutex, and [reservations] by a
//! second mutex.
//!
//! Invariant: mode bits are only changed while holding the nexus mutex, so that a change and the
//! resulting unit attentions are atomic.

mod capacity;
mod nexuses;
mod protection;
mod reservations;
mod state;
mod write_cache;

use std::sync::Arc;

use bitflags::bitflags;
use riser_sync::Mutex;
use riser_sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::attention::{Attention, AttentionScope};
use crate::config::{Config, ConfigError};
use crate::nexus::{Nexus, NexusId};
use crate::reservation::{ReservationKeeper, Reservations};
use crate::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};

pub use capacity::HYSTERESIS;
pub use state::UnitState;

pub(crate) use write_cache::CacheEpoch;

use nexuses::{NexusTable, Nexuses};
use write_cache::CacheFlushes;

bitflags! {
    /// State that can be read without a lock.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct Flags: u8 {
        /// D_SENSE bit in the Control mode page.
        const D_SENSE = 1 << 0;
        /// SWP bit in the Control mode page.
        const SOFTWARE_WRITE_PROTECT = 1 << 1;
        /// WCE bit in the Caching mode page.
        const WRITE_CACHE = 1 << 2;
        /// Stopped via START STOP UNIT.
        const STOPPED = 1 << 3;
        /// DPICZ bit in the Control mode page.
        const IGNORE_UNREQUESTED_CHECKS = 1 << 4;
    }
}

/// Sense data if the LU was stopped via START STOP UNIT.
pub(crate) const STOPPED: Sense = Sense::new(
    SenseKey::NotReady,
    AdditionalSense::INITIALIZING_COMMAND_REQUIRED,
);

/// Sense data if there is no medium. An administrator needs to fix this.
pub(crate) const NO_MEDIUM: Sense = Sense::new(
    SenseKey::NotReady,
    AdditionalSense::MANUAL_INTERVENTION_REQUIRED,
);

/// Sense data while we wait for the medium, or while this LU is being replaced with a new one.
/// Initiators will retry the command.
pub(crate) const BECOMING_READY: Sense =
    Sense::new(SenseKey::NotReady, AdditionalSense::BECOMING_READY);

/// A direct-access logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    config: Config,
    has_medium: bool,
    /// There is no medium, but we expect it to be available within seconds.
    awaits_medium: AtomicBool,
    knows_reservations: bool,
    has_names: bool,
    capacity: AtomicU64,
    /// Number of the current protection type.
    protection_type: AtomicU8,
    flags: AtomicU8,
    cache_flushes: CacheFlushes,
    nexuses: Nexuses,
    reservations: Mutex<Reservations>,
    /// Set when a reservation may restrict any nexus.
    restricted: AtomicBool,
    /// Used to save reservations across power loss.
    keeper: Option<Arc<dyn ReservationKeeper>>,
    /// Set when the soft threshold has been reached, until the used space decreases.
    is_filling: AtomicBool,
    /// Locked while a reservation change is being saved.
    saving: Mutex<()>,
    /// Locked while a protection type is being saved. [`LogicalUnit::retire`] does not wait for this,
    /// because a file system may not respond.
    formatting: Mutex<()>,
    /// This LU is being replaced with a new one. Only set while holding the nexus mutex, and while
    /// no reservation change is being saved.
    retired: AtomicBool,
}

impl LogicalUnit {
    /// Creates a new logical unit in the started state, without any nexus.
    ///
    /// # Errors
    ///
    /// If the configuration is invalid.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        let flags = initial_flags(&config);
        Ok(Self {
            capacity: AtomicU64::new(config.blocks),
            protection_type: AtomicU8::new(protection::number(config.initial_protection_type())),
            flags: AtomicU8::new(flags.bits()),
            cache_flushes: CacheFlushes::default(),
            nexuses: Nexuses::new(),
            reservations: Mutex::default(),
            restricted: AtomicBool::new(false),
            keeper: None,
            is_filling: AtomicBool::new(false),
            saving: Mutex::new(()),
            formatting: Mutex::new(()),
            retired: AtomicBool::new(false),
            has_medium: true,
            awaits_medium: AtomicBool::new(false),
            knows_reservations: true,
            has_names: true,
            config,
        })
    }

    /// Removes the medium. Commands that need a medium will fail with NOT READY, MANUAL
    /// INTERVENTION REQUIRED (SPC-4 annex F), but commands for the LU itself still work.
    #[must_use]
    pub fn without_medium(self) -> Self {
        Self {
            has_medium: false,
            ..self
        }
    }

    /// Removes the medium, but expects it to be available within seconds. Commands that need a
    /// medium will fail with NOT READY, LOGICAL UNIT IS IN PROCESS OF BECOMING READY, until
    /// [`Self::stop_awaiting_medium`] is called.
    #[must_use]
    pub fn awaiting_medium(self) -> Self {
        Self {
            awaits_medium: AtomicBool::new(true),
            ..self.without_medium()
        }
    }

    /// Returns whether we are still waiting for the medium.
    #[must_use]
    pub fn awaits_medium(&self) -> bool {
        self.awaits_medium.load(Ordering::Acquire)
    }

    /// Stops waiting for the medium. This has the same effect as [`Self::without_medium`].
    pub fn stop_awaiting_medium(&self) {
        self.awaits_medium.store(false, Ordering::Release);
    }

    /// Removes the medium and the reservations. Commands that use or change reservations will also
    /// be refused, and no reservations are passed on to the LU that replaces this one.
    #[must_use]
    pub fn without_reservations(self) -> Self {
        Self {
            knows_reservations: false,
            ..self.without_medium()
        }
    }

    /// Removes the medium and the names, for which reservations are also unknown. VPD pages that
    /// contain the names will fail with NOT READY (SPC-4 6.6.1: INQUIRY data that cannot be
    /// returned).
    #[must_use]
    pub fn without_names(self) -> Self {
        Self {
            has_names: false,
            ..self.without_reservations()
        }
    }

    /// Returns whether the names in the configuration are valid.
    #[must_use]
    pub fn has_names(&self) -> bool {
        self.has_names
    }

    /// Returns whether the medium is available.
    #[must_use]
    pub fn has_medium(&self) -> bool {
        self.has_medium
    }

    /// Returns the initial configuration. Note that the capacity and the protection type may have
    /// changed since then.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Adds a nexus. The first command will fail with the POWER ON, RESET unit attention (SAM-5
    /// 5.14.1).
    pub fn add_nexus(&self, id: NexusId, nexus: Nexus) {
        self.enter_nexus(id, nexus, Attention::PowerOn);
    }

    /// Adds a nexus to replace a previous one between the same ports. The first command will fail
    /// with the I_T NEXUS LOSS unit attention (SAM-5 6.3.4).
    pub fn add_nexus_after_loss(&self, id: NexusId, nexus: Nexus) {
        self.enter_nexus(id, nexus, Attention::NexusLoss);
    }

    fn enter_nexus(&self, id: NexusId, nexus: Nexus, first: Attention) {
        // Update the port numbers reported in READ FULL STATUS. This must be done before we lock
        // the other mutex.
        self.update_reservations(|all| all.renumber_port(&nexus.target));
        let mut nexuses = self.lock_nexuses();
        // Check this with the lock held, so that this nexus is also notified if the threshold is
        // reached after this point.
        match self.is_filling() {
            true => nexuses.insert(id, nexus, &[first, Attention::SoftThreshold]),
            false => nexuses.insert(id, nexus, &[first]),
        }
    }

    /// Removes a nexus and all pending unit attentions (I_T nexus loss). If this was the last
    /// nexus, the LU is started if it was stopped, because the next initiator to log in does not
    /// expect this.
    pub fn remove_nexus(&self, id: NexusId) {
        let mut nexuses = self.lock_nexuses();
        nexuses.remove(id);
        if nexuses.is_empty() {
            self.store_flags(self.flags() - Flags::STOPPED);
        }
        drop(nexuses);
        // A RESERVE is released with the nexus, but a persistent reservation is not. Do this last,
        // in case a concurrent RESERVE has still found the nexus.
        self.release_unit(id);
    }

    /// Returns the ports of a nexus.
    #[must_use]
    pub fn nexus(&self, id: NexusId) -> Option<Arc<Nexus>> {
        self.lock_nexuses().nexus(id)
    }

    /// Returns the number of nexuses.
    #[must_use]
    pub fn nexuses(&self) -> usize {
        self.lock_nexuses().len()
    }

    /// Establishes a unit attention condition.
    pub fn raise(&self, attention: Attention, scope: AttentionScope) {
        self.lock_nexuses().raise(attention, scope);
    }

    /// Resets the LU itself, as required for LOGICAL UNIT RESET (SAM-5 6.3.3): mode parameters are
    /// reset to their defaults, the LU is started if it was stopped, and all nexuses are notified.
    /// Tasks are aborted by the task set.
    ///
    /// If the write cache is disabled, it stays disabled. Initiators only read WCE when they
    /// discover the LU, and an initiator that has disabled the cache will not send a flush, so a
    /// reset from any other initiator would make its writes volatile. If the cache was enabled via
    /// MODE SELECT, using the default is safe.
    pub fn reset(&self) {
        self.update_reservations(Reservations::reset);
        // Use a single lock for both the modes and the unit attention, as in `change_mode`, so that
        // a MODE SELECT is either before or after both.
        let mut nexuses = self.lock_nexuses();
        let before = self.flags();
        let mut after = initial_flags(&self.config);
        after.set(
            Flags::WRITE_CACHE,
            (after & before).contains(Flags::WRITE_CACHE),
        );
        self.change_flags(before, after);
        nexuses.raise(Attention::DeviceReset, AttentionScope::All);
    }

    /// Returns the sense data for commands that change the medium, if it is write protected.
    pub(crate) fn write_protection(&self) -> Option<Sense> {
        let protected = if self.config.read_only {
            AdditionalSense::WRITE_PROTECTED
        } else if self.flags().contains(Flags::SOFTWARE_WRITE_PROTECT) {
            AdditionalSense::SOFTWARE_WRITE_PROTECTED
        } else {
            return None;
        };
        Some(Sense::new(SenseKey::DataProtect, protected))
    }

    /// Returns whether this was stopped via START STOP UNIT.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.flags().contains(Flags::STOPPED)
    }

    /// Returns the sense data for commands that need the medium, if there is no medium.
    pub(crate) fn no_medium(&self) -> Option<Sense> {
        match self.awaits_medium() {
            _ if self.has_medium => None,
            true => Some(BECOMING_READY),
            false => Some(NO_MEDIUM),
        }
    }

    /// Returns the sense data for commands that need the medium, if it cannot be accessed.
    pub(crate) fn not_ready(&self) -> Option<Sense> {
        // Check this first: an initiator could start a stopped unit, but this would not help if
        // there is no medium.
        self.no_medium()
            .or_else(|| self.is_stopped().then_some(STOPPED))
    }

    /// Returns whether data can be stored in a volatile cache (WCE bit).
    #[must_use]
    pub fn is_write_cache_enabled(&self) -> bool {
        self.flags().contains(Flags::WRITE_CACHE)
    }

    /// Returns whether protection information is only checked if this is requested in the CDB (DPICZ
    /// bit).
    pub(crate) fn ignores_unrequested_checks(&self) -> bool {
        self.flags().contains(Flags::IGNORE_UNREQUESTED_CHECKS)
    }

    /// Returns the sense data format selected with the D_SENSE bit.
    #[must_use]
    pub fn sense_format(&self) -> SenseFormat {
        if self.flags().contains(Flags::D_SENSE) {
            SenseFormat::Descriptor
        } else {
            SenseFormat::Fixed
        }
    }

    pub(crate) fn lba_of(&self, offset: u64) -> u64 {
        offset / u64::from(self.config.block_size.bytes())
    }

    pub(crate) fn flags(&self) -> Flags {
        Flags::from_bits_retain(self.flags.load(Ordering::Acquire))
    }

    fn store_flags(&self, flags: Flags) {
        self.flags.store(flags.bits(), Ordering::Release);
    }

    /// Updates the flags. If this disables the write cache, a flush is now required.
    fn change_flags(&self, before: Flags, after: Flags) {
        if (before - after).contains(Flags::WRITE_CACHE) {
            self.cache_flushes.disable();
        }
        self.store_flags(after);
    }

    /// Restores the flags from the previous LU.
    pub(crate) fn restore_flags(&self, flags: Flags) {
        let _guard = self.lock_nexuses();
        self.store_flags(flags);
    }

    /// Returns the state of flushes that are required after the write cache was disabled.
    pub(crate) fn cache_flushes(&self) -> &CacheFlushes {
        &self.cache_flushes
    }

    /// Starts or stops the LU.
    ///
    /// # Errors
    /// If this LU is being replaced, because the new one would not see the change.
    pub(crate) fn set_stopped(&self, stopped: bool) -> Result<(), Sense> {
        let _guard = self.lock_nexuses();
        if self.is_retired() {
            return Err(BECOMING_READY);
        }
        let mut flags = self.flags();
        flags.set(Flags::STOPPED, stopped);
        self.store_flags(flags);
        Ok(())
    }

    /// Updates the bits in `mask` to the given `values`, for MODE SELECT. If there was a change,
    /// all other nexuses are notified.
    ///
    /// # Errors
    /// If this LU is being replaced, because the new one would not see the change.
    pub(crate) fn change_mode(&self, mask: Flags, values: Flags, by: NexusId) -> Result<(), Sense> {
        let mut nexuses = self.lock_nexuses();
        if self.is_retired() {
            return Err(BECOMING_READY);
        }
        let before = self.flags();
        let after = (before - mask) | (values & mask);
        // If the new value is the same as the current value, don't notify any nexus.
        if before != after {
            self.change_flags(before, after);
            nexuses.raise(Attention::ModeChanged, AttentionScope::AllBut(by));
        }
        Ok(())
    }

    /// Returns the default state of the mode bits.
    pub(crate) fn default_flags(&self) -> Flags {
        initial_flags(&self.config)
    }

    /// Removes and returns the next pending unit attention for a nexus.
    pub(crate) fn take_attention(&self, id: NexusId) -> Option<Attention> {
        self.nexuses.take_attention(id)
    }

    /// Clears the unit attention that notifies a nexus to send REPORT LUNS (SPC-4 6.33).
    pub(crate) fn acknowledge_luns(&self, id: NexusId) {
        self.nexuses.clear_attention(id, Attention::LunsChanged);
    }

    /// Locks the nexus table.
    pub(crate) fn lock_nexuses(&self) -> NexusTable<'_> {
        self.nexuses.lock()
    }
}

fn initial_flags(config: &Config) -> Flags {
    let mut flags = Flags::empty();
    flags.set(Flags::WRITE_CACHE, config.write_cache);
    flags
}
