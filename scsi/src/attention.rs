//! Unit attention conditions (SAM-5 5.14).
//!
//! Each I_T nexus has a set of pending conditions, not a queue: a condition
//! that is already pending is not established twice, and the set reports in
//! the order of [`Attention`], so a nexus that never asks costs a fixed two
//! bytes.

use crate::data::mode::provisioning;
use crate::nexus::NexusId;
use crate::sense::{AdditionalSense, Sense, SenseKey};

/// A unit attention condition, in the order of reporting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Attention {
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED: the nexus is new.
    PowerOn,
    /// BUS DEVICE RESET FUNCTION OCCURRED: a logical unit reset.
    DeviceReset,
    /// I_T NEXUS LOSS OCCURRED.
    NexusLoss,
    /// COMMANDS CLEARED BY ANOTHER INITIATOR.
    CommandsCleared,
    /// RESERVATIONS PREEMPTED (2Ah/03h), for the registrants that CLEAR removed.
    ReservationsPreempted,
    /// RESERVATIONS RELEASED (2Ah/04h), for registrants, of a reservation that ended.
    ReservationsReleased,
    /// REGISTRATIONS PREEMPTED (2Ah/05h), for a registrant that another one removed.
    RegistrationsPreempted,
    /// REPORTED LUNS DATA HAS CHANGED.
    LunsChanged,
    /// INQUIRY DATA HAS CHANGED.
    InquiryChanged,
    /// CAPACITY DATA HAS CHANGED.
    CapacityChanged,
    /// MODE PARAMETERS CHANGED (2Ah/01h), for the nexuses that did not change them.
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

    /// The sense data that report it.
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

/// The nexuses that a condition is established for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionScope {
    /// Every nexus of the unit.
    All,
    /// Every nexus but the one that caused it.
    AllBut(NexusId),
    /// One nexus of the unit.
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

/// The pending conditions of one nexus.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Attentions(u16);

impl Attentions {
    /// Establishes a condition. A power on or reset says everything that the
    /// lesser conditions would, and replaces them (SAM-5 5.14.2).
    pub(crate) fn raise(&mut self, attention: Attention) {
        // Power on and reset are the first two variants, so one comparison names both.
        if attention <= Attention::DeviceReset {
            self.0 = 0;
        }
        self.0 |= 1 << attention as u8;
    }

    pub(crate) fn clear(&mut self, attention: Attention) {
        self.0 &= !(1 << attention as u8);
    }

    /// Takes the condition to report next.
    pub(crate) fn take(&mut self) -> Option<Attention> {
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
        assert_eq!(set.take(), Some(Attention::CapacityChanged));
        assert_eq!(set.take(), Some(Attention::ModeChanged));
        assert_eq!(set.take(), None);
    }

    #[test]
    fn a_reset_replaces_what_came_before() {
        let mut set = Attentions::default();
        set.raise(Attention::ModeChanged);
        set.raise(Attention::DeviceReset);
        set.raise(Attention::CapacityChanged);
        assert_eq!(set.take(), Some(Attention::DeviceReset));
        assert_eq!(set.take(), Some(Attention::CapacityChanged));
        assert!(set.is_empty());
    }
}
