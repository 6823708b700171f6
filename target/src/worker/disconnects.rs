//! Disconnect requests waiting for a reply.
//!
//! We have to keep the connection identifier after the channel is released until there is a reply
//! or a timeout. If it was destroyed before, a lost request could not be sent again.

use std::time::Instant;

use riser_transport::verbs::CmId;

/// Connection identifiers of released channels.
#[derive(Debug, Default)]
pub(super) struct Disconnects(Vec<Disconnect>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Disconnect {
    device: usize,
    cm: CmId,
    until: Instant,
}

impl Disconnects {
    /// Adds an identifier to wait for a reply until `until`.
    pub(super) fn add(&mut self, device: usize, cm: CmId, until: Instant) {
        self.0.push(Disconnect { device, cm, until });
    }

    /// Removes an identifier after a reply. Returns false if it is unknown.
    pub(super) fn remove_completed(&mut self, device: usize, cm: CmId) -> bool {
        let is_this = |one: &Disconnect| one.device == device && one.cm == cm;
        let at = self.0.iter().position(is_this);
        at.map(|at| self.0.swap_remove(at)).is_some()
    }

    /// Removes and returns an identifier after a timeout, with its device.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<(usize, CmId)> {
        let at = self.0.iter().position(|one| one.until <= now)?;
        let Disconnect { device, cm, .. } = self.0.swap_remove(at);
        Some((device, cm))
    }

    /// Removes all identifiers of a removed device.
    pub(super) fn remove_device(&mut self, device: usize) {
        self.0.retain(|one| one.device != device);
    }

    /// Returns true if there are identifiers for this device.
    pub(super) fn uses(&self, device: usize) -> bool {
        self.0.iter().any(|one| one.device == device)
    }

    /// Returns true if there are no identifiers.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the time of the next timeout.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.iter().map(|one| one.until).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use riser_transport::verbs::Handle;

    use super::*;

    #[test]
    fn identifier_is_kept_until_reply_or_timeout() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let [a, b, c] = [1, 2, 3].map(|number| CmId(Handle::new(number, 1)));
        let mut disconnects = Disconnects::default();
        disconnects.add(0, a, later);
        disconnects.add(1, a, later);
        disconnects.add(0, b, now);
        disconnects.add(1, c, later);
        assert_eq!(disconnects.deadline(), Some(now));
        assert_eq!(disconnects.take_expired(now), Some((0, b)));
        assert_eq!(disconnects.take_expired(now), None);
        assert!(
            disconnects.remove_completed(1, a),
            "not the one of device 0"
        );
        assert!(!disconnects.remove_completed(1, a));
        assert!(disconnects.uses(0) && disconnects.uses(1));
        disconnects.remove_device(1);
        assert!(disconnects.uses(0) && !disconnects.uses(1));
        assert_eq!(disconnects.take_expired(later), Some((0, a)));
        assert!(disconnects.is_empty() && disconnects.deadline().is_none());
    }
}
