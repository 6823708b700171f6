//! The logical unit: the state that its commands share.
//!
//! A [`LogicalUnit`] is shared by all workers. The mode bits that commands look at, the stopped
//! state and the capacity are atomics; unit attentions and [nexuses] sit behind one mutex,
//! [reservations] behind another.
//!
//! Invariant: the mode bits change only under the mutex of the nexuses, so that a change and its
//! unit attentions are one event.

mod nexuses;
mod reservations;
mod state;

use std::sync::Arc;

use bitflags::bitflags;
use riser_sync::Mutex;
use riser_sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::attention::{Attention, AttentionScope};
use crate::config::{Config, ConfigError};
use crate::nexus::{Nexus, NexusId};
use crate::reservation::{ReservationKeeper, Reservations};
use crate::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};

pub use state::UnitState;

use nexuses::{NexusTable, Nexuses};

bitflags! {
    /// State that commands read without a lock.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct Flags: u8 {
        /// D_SENSE of the Control mode page.
        const D_SENSE = 1 << 0;
        /// SWP of the Control mode page.
        const SOFTWARE_WRITE_PROTECT = 1 << 1;
        /// WCE of the Caching mode page.
        const WRITE_CACHE = 1 << 2;
        /// START STOP UNIT has stopped the unit.
        const STOPPED = 1 << 3;
    }
}

/// The sense of a unit that START STOP UNIT has stopped.
pub(crate) const STOPPED: Sense = Sense::new(
    SenseKey::NotReady,
    AdditionalSense::INITIALIZING_COMMAND_REQUIRED,
);

/// The sense of a unit without a medium, which an administrator has to bring back.
pub(crate) const NO_MEDIUM: Sense = Sense::new(
    SenseKey::NotReady,
    AdditionalSense::MANUAL_INTERVENTION_REQUIRED,
);

/// The sense of a unit that waits for its medium, or in whose place another one comes: initiators
/// repeat the command.
pub(crate) const BECOMING_READY: Sense =
    Sense::new(SenseKey::NotReady, AdditionalSense::BECOMING_READY);

/// Percent of the space by which its use must recede before the soft threshold can be reached
/// again.
pub const HYSTERESIS: u8 = 5;

/// A direct-access logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    config: Config,
    has_medium: bool,
    /// Without a medium, one is expected within seconds.
    awaits_medium: AtomicBool,
    knows_reservations: bool,
    has_names: bool,
    capacity: AtomicU64,
    flags: AtomicU8,
    nexuses: Nexuses,
    reservations: Mutex<Reservations>,
    /// Reservations may restrict some nexus.
    restricted: AtomicBool,
    /// Keeps reservations through power loss.
    keeper: Option<Arc<dyn ReservationKeeper>>,
    /// Whether the soft threshold has been reached, until the space in use recedes.
    is_filling: AtomicBool,
    /// Held while a change of reservations is saved.
    saving: Mutex<()>,
    /// Another unit takes its place. Set under the mutex of the nexuses, while nothing is saved.
    retired: AtomicBool,
}

impl LogicalUnit {
    /// Makes a logical unit that is started and knows no nexus.
    ///
    /// # Errors
    ///
    /// The configuration breaks one of its rules.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        let flags = initial_flags(&config);
        Ok(Self {
            capacity: AtomicU64::new(config.blocks),
            flags: AtomicU8::new(flags.bits()),
            nexuses: Nexuses::new(),
            reservations: Mutex::default(),
            restricted: AtomicBool::new(false),
            keeper: None,
            is_filling: AtomicBool::new(false),
            saving: Mutex::new(()),
            retired: AtomicBool::new(false),
            has_medium: true,
            awaits_medium: AtomicBool::new(false),
            knows_reservations: true,
            has_names: true,
            config,
        })
    }

    /// The same unit without a medium: commands that need one end with NOT READY, MANUAL
    /// INTERVENTION REQUIRED (SPC-4 annex F), and those about the unit itself work.
    #[must_use]
    pub fn without_medium(self) -> Self {
        Self {
            has_medium: false,
            ..self
        }
    }

    /// The same unit without a medium, which is expected within seconds: commands that need one end
    /// with NOT READY, LOGICAL UNIT IS IN PROCESS OF BECOMING READY, until
    /// [`Self::stop_awaiting_medium`].
    #[must_use]
    pub fn awaiting_medium(self) -> Self {
        Self {
            awaits_medium: AtomicBool::new(true),
            ..self.without_medium()
        }
    }

    /// Returns whether it has no medium and expects one.
    #[must_use]
    pub fn awaits_medium(&self) -> bool {
        self.awaits_medium.load(Ordering::Acquire)
    }

    /// From now on, it is as after [`Self::without_medium`].
    pub fn stop_awaiting_medium(&self) {
        self.awaits_medium.store(false, Ordering::Release);
    }

    /// The same unit without a medium, whose reservations are not known: commands that read or
    /// change them are refused, too, and it leaves none to the unit that takes its place.
    #[must_use]
    pub fn without_reservations(self) -> Self {
        Self {
            knows_reservations: false,
            ..self.without_medium()
        }
    }

    /// The same unit without a medium, whose names are not known, so neither are its reservations:
    /// the VPD pages that would have the names are refused as NOT READY (SPC-4 6.6.1: INQUIRY data
    /// that cannot be returned).
    #[must_use]
    pub fn without_names(self) -> Self {
        Self {
            has_names: false,
            ..self.without_reservations()
        }
    }

    /// Returns whether the names in its configuration are its own.
    #[must_use]
    pub fn has_names(&self) -> bool {
        self.has_names
    }

    /// Returns whether it has a medium.
    #[must_use]
    pub fn has_medium(&self) -> bool {
        self.has_medium
    }

    /// The configuration it was made of. The capacity may have changed since.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Capacity in logical blocks.
    #[must_use]
    pub fn capacity_blocks(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Capacity of the medium in bytes.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_blocks() * u64::from(self.config.block_size.bytes())
    }

    /// Changes the capacity and notifies every nexus.
    ///
    /// # Errors
    ///
    /// The new capacity is not one a unit can have.
    pub fn set_capacity(&self, blocks: u64) -> Result<(), ConfigError> {
        let config = Config {
            blocks,
            ..self.config.clone()
        };
        config.validate()?;
        // Before the attention: an initiator that meets it asks for the capacity, and must get the
        // new one.
        self.capacity.store(blocks, Ordering::Release);
        self.raise(Attention::CapacityChanged, AttentionScope::All);
        if self.threshold().is_some() {
            // THRESHOLD COUNT goes with the capacity.
            self.raise(Attention::ModeChanged, AttentionScope::All);
        }
        Ok(())
    }

    /// The soft threshold in percent, of a thin unit that has one.
    #[must_use]
    pub fn threshold(&self) -> Option<u8> {
        self.config.threshold.filter(|_| self.config.is_thin())
    }

    /// Takes the bytes in use of the space that is available to the unit. Every nexus is notified
    /// when these reach the threshold (SBC-3 4.7.3.8), and again only after they have receded by
    /// [`HYSTERESIS`] percent of the space.
    ///
    /// Returns the new state, if it has changed: whether the threshold is reached.
    pub fn note_space(&self, used: u64, space: u64) -> Option<bool> {
        let percent = self.threshold()?;
        // Wider than 64 bits: a space of exabytes times a hundred does not fit.
        let is_beyond =
            |percent: u8| u128::from(used) * 100 >= u128::from(space) * u128::from(percent);
        // Use that goes to and fro about the threshold would notify every nexus each time, hence
        // two marks. The lower one is 1 % at least: with 0 % the state could never end.
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

    /// Whether the soft threshold has been reached.
    #[must_use]
    pub fn is_filling(&self) -> bool {
        self.is_filling.load(Ordering::Relaxed)
    }

    /// Makes a nexus known. Its first command meets the POWER ON, RESET unit
    /// attention (SAM-5 5.14.1).
    pub fn add_nexus(&self, id: NexusId, nexus: Nexus) {
        self.enter_nexus(id, nexus, Attention::PowerOn);
    }

    /// Makes a nexus known that takes the place of one between the same ports. Its first command
    /// meets the I_T NEXUS LOSS unit attention (SAM-5 6.3.4).
    pub fn add_nexus_after_loss(&self, id: NexusId, nexus: Nexus) {
        self.enter_nexus(id, nexus, Attention::NexusLoss);
    }

    fn enter_nexus(&self, id: NexusId, nexus: Nexus, first: Attention) {
        let mut nexuses = self.lock_nexuses();
        // Under the lock: a crossing from here on raises it for this nexus too.
        match self.is_filling() {
            true => nexuses.insert(id, nexus, &[first, Attention::SoftThreshold]),
            false => nexuses.insert(id, nexus, &[first]),
        }
    }

    /// Forgets a nexus and what was pending for it (I_T nexus loss). The last one starts a unit
    /// that was stopped: the next initiator to log in has not stopped it.
    pub fn remove_nexus(&self, id: NexusId) {
        let mut nexuses = self.lock_nexuses();
        nexuses.remove(id);
        if nexuses.is_empty() {
            self.store_flags(self.flags() - Flags::STOPPED);
        }
        drop(nexuses);
        // RESERVE ends with its nexus, a persistent reservation does not. Last, for a RESERVE that
        // has met the nexus.
        self.release_unit(id);
    }

    /// The ports of a nexus that was added.
    #[must_use]
    pub fn nexus(&self, id: NexusId) -> Option<Arc<Nexus>> {
        self.lock_nexuses().nexus(id)
    }

    /// Returns the number of nexuses that are known.
    #[must_use]
    pub fn nexuses(&self) -> usize {
        self.lock_nexuses().len()
    }

    /// Establishes a unit attention condition.
    pub fn raise(&self, attention: Attention, scope: AttentionScope) {
        self.lock_nexuses().raise(attention, scope);
    }

    /// Does to the unit itself what a LOGICAL UNIT RESET does (SAM-5 6.3.3): mode parameters return
    /// to their defaults, a stopped unit starts, and every nexus is notified. Aborting the tasks is
    /// the task set's part.
    pub fn reset(&self) {
        self.update_reservations(Reservations::reset);
        // One lock for the modes and the attention, as in `change_mode`: a MODE SELECT comes
        // before both or after both.
        let mut nexuses = self.lock_nexuses();
        self.store_flags(initial_flags(&self.config));
        nexuses.raise(Attention::DeviceReset, AttentionScope::All);
    }

    /// The sense of commands that change the medium, where it is write protected.
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

    /// Whether START STOP UNIT has stopped the unit.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.flags().contains(Flags::STOPPED)
    }

    /// The sense of commands that need the medium, where there is none.
    pub(crate) fn no_medium(&self) -> Option<Sense> {
        match self.awaits_medium() {
            _ if self.has_medium => None,
            true => Some(BECOMING_READY),
            false => Some(NO_MEDIUM),
        }
    }

    /// The sense of commands that need the medium, where they are refused.
    pub(crate) fn not_ready(&self) -> Option<Sense> {
        // An initiator could start a stopped unit, and would try in vain without a medium, so that
        // comes first.
        self.no_medium()
            .or_else(|| self.is_stopped().then_some(STOPPED))
    }

    /// Whether writes may stay in a volatile cache (WCE).
    #[must_use]
    pub fn is_write_cache_enabled(&self) -> bool {
        self.flags().contains(Flags::WRITE_CACHE)
    }

    /// The sense format that D_SENSE asks for.
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

    /// Takes over the flags of the unit before.
    pub(crate) fn restore_flags(&self, flags: Flags) {
        let _guard = self.lock_nexuses();
        self.store_flags(flags);
    }

    pub(crate) fn set_stopped(&self, stopped: bool) {
        let _guard = self.lock_nexuses();
        let mut flags = self.flags();
        flags.set(Flags::STOPPED, stopped);
        self.store_flags(flags);
    }

    /// Applies MODE SELECT: the bits of `mask` take their values from `values`.
    /// Other nexuses are notified when anything changed.
    ///
    /// # Errors
    /// Another unit takes its place, which would not know of the change.
    pub(crate) fn change_mode(&self, mask: Flags, values: Flags, by: NexusId) -> Result<(), Sense> {
        let mut nexuses = self.lock_nexuses();
        if self.is_retired() {
            return Err(BECOMING_READY);
        }
        let before = self.flags();
        let after = (before - mask) | (values & mask);
        // Writing the value that is there already is no change, and notifies no nexus.
        if before != after {
            self.store_flags(after);
            nexuses.raise(Attention::ModeChanged, AttentionScope::AllBut(by));
        }
        Ok(())
    }

    /// The state the mode bits return to.
    pub(crate) fn default_flags(&self) -> Flags {
        initial_flags(&self.config)
    }

    /// Takes the next pending unit attention of a nexus.
    pub(crate) fn take_attention(&self, id: NexusId) -> Option<Attention> {
        self.nexuses.take_attention(id)
    }

    /// REPORT LUNS was answered, and with it the unit attention that asks for it (SPC-4 6.33).
    pub(crate) fn acknowledge_luns(&self, id: NexusId) {
        self.nexuses.clear_attention(id, Attention::LunsChanged);
    }

    /// Locks the table of nexuses.
    pub(crate) fn lock_nexuses(&self) -> NexusTable<'_> {
        self.nexuses.lock()
    }
}

fn initial_flags(config: &Config) -> Flags {
    let mut flags = Flags::empty();
    flags.set(Flags::WRITE_CACHE, config.write_cache);
    flags
}
