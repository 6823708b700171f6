//! Unit attention conditions (SAM-5 5.14).
//!
//! For each I_T nexus we keep a set of pending conditions instead of a queue. A condition that is
//! already pending is not added again, and conditions are reported in the order of [`Attention`].
//! This only needs two bytes per nexus, even if it never sends a command.

use crate::data::mode::provisioning;
use crate::nexus::NexusId;
use crate::sense::{AdditionalSense, Sense, SenseKey};

/// A unit attention condition, sorted by the order in which they are reported.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Attention {
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED: this is a new nexus.
    PowerOn,
    /// BUS DEVICE RESET FUNCTION OCCURRED: a logical unit reset.
    DeviceReset,
    /// I_T NEXUS LOSS OCCURRED.
    NexusLoss,
    /// COMMANDS CLEARED BY ANOTHER INITIATOR.
    CommandsCleared,
    /// RESERVATIONS PREEMPTED (2Ah/03h), for all registrants that were removed by CLEAR.
    ReservationsPreempted,
    /// RESERVATIONS RELEASED (2Ah/04h), for all registrants when a reservation is released.
    ReservationsReleased,
    /// REGISTRATIONS PREEMPTED (2Ah/05h), for a registrant that was removed by another nexus.
    RegistrationsPreempted,
    /// REPORTED LUNS DATA HAS CHANGED.
    LunsChanged,
    /// INQUIRY DATA HAS CHANGED.
    InquiryChanged,
    /// CAPACITY DATA HAS CHANGED.
    CapacityChanged,
    /// MODE PARAMETERS CHANGED (2Ah/01h), for all nexuses except the one which made the change.
    ModeChanged,
    /// THIN PROVISIONING SOFT THRESHOLD REACHED (SBC-3 4.7.3.8).
    SoftThreshold,
}

impl Attention {
    const ALL: [Self; 12] = [
        Self::PowerOn,
        Self::DeviceReset,
        Self::NexusLoss,
        Self::CommandsCleared,
        Self::ReservationsPreempted,
        Self::ReservationsReleased,
        Self::RegistrationsPreempted,
        Self::LunsChanged,
        Self::InquiryChanged,
        Self::CapacityChanged,
        Self::ModeChanged,
        Self::SoftThreshold,
    ];

    /// Returns the sense data used to report this condition.
    #[must_use]
    pub const fn sense(self) -> Sense {
        let sense = Sense::new(
            SenseKey::UnitAttention,
            match self {
                Self::PowerOn => AdditionalSense::POWER_ON_OR_RESET,
                Self::DeviceReset => AdditionalSense::DEVICE_RESET,
                Self::NexusLoss => AdditionalSense::NEXUS_LOSS,
                Self::CommandsCleared => AdditionalSense::COMMANDS_CLEARED,
                Self::ReservationsPreempted => AdditionalSense::RESERVATIONS_PREEMPTED,
                Self::ReservationsReleased => AdditionalSense::RESERVATIONS_RELEASED,
                Self::RegistrationsPreempted => AdditionalSense::REGISTRATIONS_PREEMPTED,
                Self::LunsChanged => AdditionalSense::REPORTED_LUNS_CHANGED,
                Self::InquiryChanged => AdditionalSense::INQUIRY_CHANGED,
                Self::CapacityChanged => AdditionalSense::CAPACITY_CHANGED,
                Self::ModeChanged => AdditionalSense::MODE_PARAMETERS_CHANGED,
                Self::SoftThreshold => AdditionalSense::SOFT_THRESHOLD_REACHED,
            },
        );
        match self {
            Self::SoftThreshold => sense.with_information(provisioning::DESCRIPTOR as u64),
            _ => sense,
        }
    }
}

/// The nexuses for which a condition is established.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionScope {
    /// All nexuses of the LU.
    All,
    /// All nexuses except for this one, which was the cause.
    AllBut(NexusId),
    /// A single nexus.
    One(NexusId),
}

impl AttentionScope {
    pub(crate) fn covers(self, nexus: NexusId) -> bool {
        match self {
            Self::All => true,
            Self::AllBut(cause) => cause != nexus,
            Self::One(one) => one == nexus,
        }
    }
}

/// The pending conditions of a nexus.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Attentions(u16);

impl Attentions {
    /// Adds a condition. A power on or reset already includes all lesser conditions, so it will
    /// replace these (SAM-5 5.14.2).
    pub(crate) fn raise(&mut self, attention: Attention) {
        // The first two variants are power on and reset, so we only need a single comparison.
        if attention <= Attention::DeviceReset {
            self.0 = 0;
        }
        self.0 |= 1 << attention as u8;
    }

    pub(crate) fn clear(&mut self, attention: Attention) {
        self.0 &= !(1 << attention as u8);
    }

    /// Removes and returns the next condition to report.
    pub(crate) fn take_next(&mut self) -> Option<Attention> {
        let next = Attention::ALL
            .into_iter()
            .find(|&attention| self.0 & (1 << attention as u8) != 0)?;
        self.clear(next);
        Some(next)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_report_once_and_in_order() {
        let mut set = Attentions::default();
        set.raise(Attention::ModeChanged);
        set.raise(Attention::CapacityChanged);
        set.raise(Attention::ModeChanged);
        assert_eq!(set.take_next(), Some(Attention::CapacityChanged));
        assert_eq!(set.take_next(), Some(Attention::ModeChanged));
        assert_eq!(set.take_next(), None);
    }

    #[test]
    fn reset_replaces_earlier_conditions() {
        let mut set = Attentions::default();
        set.raise(Attention::ModeChanged);
        set.raise(Attention::DeviceReset);
        set.raise(Attention::CapacityChanged);
        assert_eq!(set.take_next(), Some(Attention::DeviceReset));
        assert_eq!(set.take_next(), Some(Attention::CapacityChanged));
        assert!(set.is_empty());
    }
}
