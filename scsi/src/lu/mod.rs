//! The logical unit: what its commands share.
//!
//! A [`LogicalUnit`] is shared by all workers. The mode bits that commands
//! look at, the stopped state and the capacity are atomics; unit attentions
//! and the nexus table sit behind one mutex. A table of hint bits, indexed by
//! a hash of the nexus, says whether the mutex must be looked behind at all:
//! a READ or WRITE of a nexus without pending attention takes no lock.
//!
//! Invariants: a hint bit is set while any nexus that hashes to it has a
//! pending attention; the mode bits change only under the mutex, so that a
//! change and its unit attentions are one event.

mod state;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bitflags::bitflags;

use crate::attention::{Attention, AttentionScope, Attentions};
use crate::config::{Config, ConfigError};
use crate::flags::CommandFlags;
use crate::nexus::{Nexus, NexusId};
use crate::reservation::{
    Notices, Preemption, Registrations, ReservationChange, ReservationError, ReservationKeeper,
    Reservations, SavedReservations,
};
use crate::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};

pub use state::UnitState;

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

/// Percent of the space by which its use must recede before the soft threshold can be reached again.
pub const HYSTERESIS: u8 = 5;

/// Number of 64-bit words of hint bits.
const HINT_WORDS: usize = 16;

/// A direct-access logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    config: Config,
    has_medium: bool,
    knows_reservations: bool,
    has_names: bool,
    capacity: AtomicU64,
    flags: AtomicU8,
    hints: [AtomicU64; HINT_WORDS],
    nexuses: Mutex<HashMap<NexusId, Known>>,
    reservations: Mutex<Reservations>,
    /// Whether reservations may restrict somebody.
    restricted: AtomicBool,
    /// Keeps reservations through power loss.
    keeper: Option<Arc<dyn ReservationKeeper>>,
    /// Whether the soft threshold has been reached, until the space in use recedes.
    is_filling: AtomicBool,
    /// Held while a change of reservations is saved.
    saving: Mutex<()>,
}

/// What is kept per nexus.
#[derive(Debug)]
pub(crate) struct Known {
    nexus: Arc<Nexus>,
    pending: Attentions,
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
            hints: [const { AtomicU64::new(0) }; HINT_WORDS],
            nexuses: Mutex::new(HashMap::new()),
            reservations: Mutex::default(),
            restricted: AtomicBool::new(false),
            keeper: None,
            is_filling: AtomicBool::new(false),
            saving: Mutex::new(()),
            has_medium: true,
            knows_reservations: true,
            has_names: true,
            config,
        })
    }

    /// The same unit without a medium: commands that need one end with NOT READY, MANUAL INTERVENTION
    /// REQUIRED (SPC-4 annex F), and those about the unit itself work.
    #[must_use]
    pub fn without_medium(self) -> Self {
        Self {
            has_medium: false,
            ..self
        }
    }

    /// The same unit without a medium, whose reservations are not known: commands that read or change them are
    /// refused, too, and it leaves none to the unit that takes its place.
    #[must_use]
    pub fn without_reservations(self) -> Self {
        Self {
            knows_reservations: false,
            ..self.without_medium()
        }
    }

    /// The same unit without a medium, whose names are not known, so neither are its reservations: the VPD pages
    /// that would have the names are refused as NOT READY (SPC-4 6.6.1: INQUIRY data that cannot be returned).
    #[must_use]
    pub fn without_names(self) -> Self {
        Self {
            has_names: false,
            ..self.without_reservations()
        }
    }

    /// Whether the names in its configuration are its own.
    #[must_use]
    pub fn has_names(&self) -> bool {
        self.has_names
    }

    /// Whether it has a medium.
    #[must_use]
    pub fn has_medium(&self) -> bool {
        self.has_medium
    }

    /// The same unit with the reservations that `keeper` has of it, which also keeps those to come if
    /// initiators ask for it. Without a keeper, APTPL is refused.
    ///
    /// # Errors
    /// The keeper cannot read the saved reservations.
    pub fn with_keeper(mut self, keeper: Arc<dyn ReservationKeeper>) -> io::Result<Self> {
        if let Some(saved) = keeper.load(&self.config.identity)? {
            self.update_reservations(|all| *all = Reservations::restored(saved));
        }
        self.keeper = Some(keeper);
        Ok(self)
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

    /// Capacity in bytes.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_blocks() * u64::from(self.config.block_size.bytes())
    }

    /// Changes the capacity and tells every nexus.
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

    /// So many bytes of the space available to the unit are in use. Every nexus is notified when that reaches the
    /// threshold (SBC-3 4.7.3.8), and again only after it has receded by [`HYSTERESIS`] percent of the space.
    ///
    /// Returns the new state, if it has changed: whether the threshold is reached.
    pub fn note_space(&self, used: u64, space: u64) -> Option<bool> {
        let percent = self.threshold()?;
        let is_beyond =
            |percent: u8| u128::from(used) * 100 >= u128::from(space) * u128::from(percent);
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
        let mut pending = Attentions::default();
        pending.raise(first);
        let mut nexuses = self.lock();
        // Under the lock: a crossing from here on raises it for this nexus too.
        if self.is_filling() {
            pending.raise(Attention::SoftThreshold);
        }
        nexuses.insert(
            id,
            Known {
                nexus: Arc::new(nexus),
                pending,
            },
        );
        self.set_hint(id);
    }

    /// Forgets a nexus and what was pending for it (I_T nexus loss). The last one starts a unit
    /// that was stopped: the next initiator to log in has not stopped it.
    pub fn remove_nexus(&self, id: NexusId) {
        self.release_unit(id);
        let mut nexuses = self.lock();
        nexuses.remove(&id);
        self.rebuild_hint(&nexuses, id);
        if nexuses.is_empty() {
            self.store_flags(self.flags() - Flags::STOPPED);
        }
    }

    /// The ports of a nexus that was added.
    #[must_use]
    pub fn nexus(&self, id: NexusId) -> Option<Arc<Nexus>> {
        self.lock().get(&id).map(|known| Arc::clone(&known.nexus))
    }

    /// Who is registered with the unit, and who has reserved it.
    #[must_use]
    pub fn registrations(&self) -> Registrations {
        self.with_reservations(Reservations::shown)
    }

    /// Establishes a unit attention condition.
    pub fn raise(&self, attention: Attention, scope: AttentionScope) {
        self.raise_locked(&mut self.lock(), attention, scope);
    }

    /// What a LOGICAL UNIT RESET does to the unit itself (SAM-5 6.3.3): mode
    /// parameters return to their defaults, a stopped unit starts, and every
    /// nexus is notified. Aborting the tasks is the task set's part.
    pub fn reset(&self) {
        self.update_reservations(Reservations::reset);
        let mut nexuses = self.lock();
        self.store_flags(initial_flags(&self.config));
        self.raise_locked(&mut nexuses, Attention::DeviceReset, AttentionScope::All);
    }

    /// Whether reservations may restrict anyone.
    pub(crate) fn is_restricted(&self) -> bool {
        self.restricted.load(Ordering::Acquire)
    }

    /// Whether the reservation of another nexus forbids a command with these flags.
    pub(crate) fn conflicts(&self, id: NexusId, flags: CommandFlags) -> bool {
        let nexus = self.nexus(id);
        self.with_reservations(|all| all.conflicts(id, nexus.as_ref(), flags))
    }

    pub(crate) fn with_reservations<T>(&self, look: impl FnOnce(&Reservations) -> T) -> T {
        look(&self.lock_reservations())
    }

    pub(crate) fn update_reservations<T>(&self, change: impl FnOnce(&mut Reservations) -> T) -> T {
        let mut all = self.lock_reservations();
        let result = change(&mut all);
        self.restricted.store(all.restricts(), Ordering::Release);
        result
    }

    /// Whether reservations can persist through power loss (PTPL_C).
    pub(crate) fn can_persist(&self) -> bool {
        self.keeper.is_some()
    }

    /// Carries out a PERSISTENT RESERVE OUT. `None` if the change has to be saved first or aborts
    /// commands, which begins with [`LogicalUnit::save_reservations`].
    pub(crate) fn change_reservations(
        &self,
        change: &ReservationChange,
    ) -> Option<Result<(), ReservationError>> {
        let nexus = self.nexus(change.nexus);
        let outcome = self.update_reservations(|all| {
            if all.is_step(change) {
                return None;
            }
            let nexus = nexus.ok_or(ReservationError::Conflict);
            Some(nexus.and_then(|nexus| all.change(&nexus, change)))
        })?;
        Some(outcome.map(|notices| self.notify(&notices)))
    }

    /// Carries out a change of reservations that is a step of its own: saves it where it must persist
    /// through power loss, lets it take effect when it is durable, and notifies the nexuses concerned.
    /// Changes are saved one after another. What was begun so takes effect although its command is
    /// aborted meanwhile.
    ///
    /// Returns whose commands are to be aborted, which the caller does before the command is answered:
    /// those in the task set now may have been let through before, and later ones are not.
    ///
    /// Blocks as long as the [`ReservationKeeper`] does.
    ///
    /// # Errors
    /// [`ReservationError`]; nothing has changed.
    pub fn save_reservations(
        &self,
        change: &ReservationChange,
    ) -> Result<Option<Preemption>, ReservationError> {
        let _turn = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let nexus = self.nexus(change.nexus).ok_or(ReservationError::Conflict)?;
        let mut after = self.update_reservations(Reservations::begin_saving);
        let before = after.saved();
        let outcome = after.change(&nexus, change).and_then(|notices| {
            let is_new = after.saved() != before;
            let saved = !is_new || self.keep(&before, &after);
            saved.then_some(notices).ok_or(ReservationError::NotSaved)
        });
        let saved = outcome.is_ok().then_some(after);
        self.update_reservations(|all| all.end_saving(saved));
        let notices = outcome?;
        self.notify(&notices);
        Ok(change.aborts().then_some(Preemption {
            by: change.nexus,
            ports: notices.registrations_preempted,
        }))
    }

    /// Whether a PREEMPT AND ABORT aborts the commands of a nexus. Those of sessions that have ended
    /// are among them: a preempted nexus may have logged out while a device held its commands.
    #[must_use]
    pub fn is_preempted(&self, preempted: &Preemption, id: NexusId) -> bool {
        let is_meant = |nexus: Arc<Nexus>| preempted.ports.iter().any(|ports| ports.is_of(&nexus));
        id != preempted.by && self.nexus(id).is_none_or(is_meant)
    }

    /// Saves a state in the place of another one; `false` if it could not.
    fn keep(&self, before: &Option<SavedReservations>, after: &Reservations) -> bool {
        let saved = self.save(after.saved().as_ref());
        if !saved {
            // The new state may be there all the same, and must not come back after a power loss.
            self.save(before.as_ref());
        }
        saved
    }

    /// Makes the keeper keep a state; `false` if it could not.
    pub(crate) fn save(&self, state: Option<&SavedReservations>) -> bool {
        let keeper = self.keeper.as_ref();
        keeper.is_some_and(|keeper| keeper.save(&self.config.identity, state).is_ok())
    }

    /// Raises the unit attentions of a change of reservations.
    fn notify(&self, notices: &Notices) {
        let mut nexuses = self.lock();
        let parts = [
            (
                Attention::ReservationsPreempted,
                &notices.reservations_preempted,
            ),
            (
                Attention::ReservationsReleased,
                &notices.reservations_released,
            ),
            (
                Attention::RegistrationsPreempted,
                &notices.registrations_preempted,
            ),
        ];
        for (attention, concerned) in parts {
            let meant = nexuses
                .iter_mut()
                .filter(|(_, known)| concerned.iter().any(|ports| ports.is_of(&known.nexus)));
            for (&id, known) in meant {
                known.pending.raise(attention);
                self.set_hint(id);
            }
        }
    }

    /// RESERVE. `false` where it conflicts.
    pub(crate) fn reserve_unit(&self, id: NexusId) -> bool {
        self.update_reservations(|all| all.reserve_unit(id))
    }

    /// RELEASE, or the end of a nexus.
    pub(crate) fn release_unit(&self, id: NexusId) {
        self.update_reservations(|all| all.release_unit(id));
    }

    fn lock_reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
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

    /// Whether its reservations are what initiators have made them.
    pub(crate) fn knows_reservations(&self) -> bool {
        self.knows_reservations
    }

    /// Why commands that need the medium are refused, if they are.
    pub(crate) fn not_ready(&self) -> Option<Sense> {
        match self.has_medium {
            false => Some(NO_MEDIUM),
            true => self.is_stopped().then_some(STOPPED),
        }
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
        let _guard = self.lock();
        self.store_flags(flags);
    }

    pub(crate) fn set_stopped(&self, stopped: bool) {
        let _guard = self.lock();
        let mut flags = self.flags();
        flags.set(Flags::STOPPED, stopped);
        self.store_flags(flags);
    }

    /// Applies MODE SELECT: the bits of `mask` take their values from `values`.
    /// Other nexuses are notified when anything changed.
    pub(crate) fn change_mode(&self, mask: Flags, values: Flags, by: NexusId) {
        let mut nexuses = self.lock();
        let before = self.flags();
        let after = (before - mask) | (values & mask);
        if before != after {
            self.store_flags(after);
            self.raise_locked(
                &mut nexuses,
                Attention::ModeChanged,
                AttentionScope::AllBut(by),
            );
        }
    }

    /// The state the mode bits return to.
    pub(crate) fn default_flags(&self) -> Flags {
        initial_flags(&self.config)
    }

    /// Takes the next pending unit attention of a nexus.
    pub(crate) fn take_attention(&self, id: NexusId) -> Option<Attention> {
        let (word, bit) = hint_of(id);
        if self.hints[word].load(Ordering::Acquire) & bit == 0 {
            return None;
        }
        let mut nexuses = self.lock();
        let taken = nexuses.get_mut(&id)?.pending.take();
        self.rebuild_hint(&nexuses, id);
        taken
    }

    /// REPORT LUNS was answered: its unit attention is moot.
    pub(crate) fn acknowledge_luns(&self, id: NexusId) {
        let (word, bit) = hint_of(id);
        if self.hints[word].load(Ordering::Acquire) & bit == 0 {
            return;
        }
        let mut nexuses = self.lock();
        if let Some(known) = nexuses.get_mut(&id) {
            known.pending.clear(Attention::LunsChanged);
        }
        self.rebuild_hint(&nexuses, id);
    }

    fn raise_locked(
        &self,
        nexuses: &mut HashMap<NexusId, Known>,
        attention: Attention,
        scope: AttentionScope,
    ) {
        for (&id, known) in nexuses.iter_mut().filter(|(id, _)| scope.covers(**id)) {
            known.pending.raise(attention);
            self.set_hint(id);
        }
    }

    fn set_hint(&self, id: NexusId) {
        let (word, bit) = hint_of(id);
        self.hints[word].fetch_or(bit, Ordering::AcqRel);
    }

    /// Clears the hint of a nexus unless somebody who shares it has something
    /// pending. Only called under the mutex, so no raise can come between.
    fn rebuild_hint(&self, nexuses: &HashMap<NexusId, Known>, id: NexusId) {
        let hint = hint_of(id);
        let needed = nexuses
            .iter()
            .any(|(&other, known)| hint_of(other) == hint && !known.pending.is_empty());
        if !needed {
            self.hints[hint.0].fetch_and(!hint.1, Ordering::AcqRel);
        }
    }

    /// The table behind the mutex. A panic elsewhere cannot have left it half
    /// changed, so poison is ignored.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<NexusId, Known>> {
        self.nexuses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hint_of(id: NexusId) -> (usize, u64) {
    let index = id.0 as usize % (HINT_WORDS * 64);
    (index / 64, 1 << (index % 64))
}

fn initial_flags(config: &Config) -> Flags {
    let mut flags = Flags::empty();
    flags.set(Flags::WRITE_CACHE, config.write_cache);
    flags
}
