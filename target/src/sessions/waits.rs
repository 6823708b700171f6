//! Channels waiting for other channels and their commands.
//!
//! A login that replaces a session must not start any command while a command of the old session
//! could still reach the disk, because the old command could then overwrite the new data.
//! Therefore, its channels wait for the channels that they replace, with either protocol (SRP r16a,
//! MULTI-CHANNEL ACTION; RFC 7143 6.3.5).

use crate::fabric::ConnRef;

/// `who` waits until `on` is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    on: ConnRef,
    who: ConnRef,
    /// If set, only wait until its commands can be reassigned to other connections of its session.
    until_free: bool,
}

/// The waiting channels, at most one entry for each pair of channels.
#[derive(Debug, Default)]
pub(super) struct Waits(Vec<Wait>);

impl Waits {
    /// Waits until these channels are closed. Each is only added once, even if this is called
    /// again.
    pub(super) fn wait_for(&mut self, others: &[ConnRef], who: ConnRef) {
        self.add_waits(others, who, false);
    }

    /// Waits until the commands of these channels can be reassigned.
    pub(super) fn wait_until_free(&mut self, others: &[ConnRef], who: ConnRef) {
        self.add_waits(others, who, true);
    }

    fn add_waits(&mut self, others: &[ConnRef], who: ConnRef, until_free: bool) {
        // If two channels wait for each other, for example after crossed logouts, the remaining
        // channel would otherwise wait for itself.
        for on in others.iter().copied().filter(|on| *on != who) {
            let mut known = self.0.iter_mut();
            match known.find(|wait| (wait.on, wait.who) == (on, who)) {
                // If the channel is closed, its commands can also be reassigned.
                Some(wait) => wait.until_free &= until_free,
                None => self.0.push(Wait {
                    on,
                    who,
                    until_free,
                }),
            }
        }
    }

    /// Waits for the same channels as another channel.
    pub(super) fn wait_like(&mut self, other: ConnRef, who: ConnRef) {
        let same: Vec<_> = self.of(other).collect();
        self.wait_for(&same, who);
    }

    /// Returns whether a channel is waiting.
    pub(super) fn is_waiting(&self, who: ConnRef) -> bool {
        self.of(who).next().is_some()
    }

    /// Returns whether another channel is waiting for this one.
    pub(super) fn is_awaited(&self, on: ConnRef) -> bool {
        self.0.iter().any(|wait| wait.on == on)
    }

    /// Stops waiting. These channels are being closed and will not start any more commands.
    /// Channels waiting for them do not inherit their waits.
    pub(super) fn forgo(&mut self, who: &[ConnRef]) {
        self.0.retain(|wait| !who.contains(&wait.who));
    }

    /// Called when a channel is closed. Returns the channels that no longer have to wait.
    ///
    /// A channel that was waiting for it inherits its waits, because these are for older channels.
    pub(super) fn on_closed(&mut self, gone: ConnRef) -> Vec<ConnRef> {
        let still: Vec<_> = self.0.extract_if(.., |wait| wait.who == gone).collect();
        let heirs: Vec<_> = self.0.extract_if(.., |wait| wait.on == gone).collect();
        for heir in &heirs {
            for wait in &still {
                let until_free = heir.until_free && wait.until_free;
                self.add_waits(&[wait.on], heir.who, until_free);
            }
        }
        let heirs = heirs.into_iter().map(|heir| heir.who);
        heirs.filter(|who| !self.is_waiting(*who)).collect()
    }

    /// Called when the commands of a channel can be reassigned, while it is still open. Returns the
    /// channels that no longer have to wait.
    pub(super) fn free(&mut self, on: ConnRef) -> Vec<ConnRef> {
        let is_over = |wait: &Wait| wait.on == on && wait.until_free;
        let over: Vec<_> = self.0.extract_if(.., |wait| is_over(wait)).collect();
        let over = over.into_iter().map(|wait| wait.who);
        over.filter(|who| !self.is_waiting(*who)).collect()
    }

    /// Returns the channels that a channel is waiting for.
    pub(super) fn of(&self, who: ConnRef) -> impl Iterator<Item = ConnRef> + '_ {
        let own = self.0.iter().filter(move |wait| wait.who == who);
        own.map(|wait| wait.on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An initiator may request to close a connection repeatedly.
    #[test]
    fn repeated_wait_is_added_once() {
        let [first, second, third] = [1, 2, 3].map(|serial| ConnRef { worker: 0, serial });
        let mut waits = Waits::default();
        for _ in 0..100 {
            waits.wait_for(&[first], second);
            waits.wait_for(&[second], third);
        }
        assert_eq!(waits.0.len(), 2);
        assert_eq!(waits.on_closed(second), []);
        assert_eq!(waits.0.len(), 1);
        assert_eq!(waits.on_closed(first), [third]);
        assert_eq!(waits.0.len(), 0);
    }

    #[test]
    fn inherited_wait_lasts_until_free() {
        let [lost, second, third, login] = [1, 2, 3, 4].map(|serial| ConnRef { worker: 0, serial });
        let mut waits = Waits::default();
        waits.wait_until_free(&[lost], second);
        waits.wait_until_free(&[lost, second], third);
        // A new session has to wait until it is closed.
        waits.wait_for(&[lost, second], login);
        assert_eq!(waits.on_closed(second), []);
        assert_eq!(waits.free(lost), [third]);
        assert_eq!(waits.on_closed(lost), [login]);
    }

    /// Two connections of a session close each other, and both are replaced by a login.
    #[test]
    fn mutual_waits_are_removed() {
        let [first, second, login] = [1, 2, 3].map(|serial| ConnRef { worker: 0, serial });
        let mut waits = Waits::default();
        waits.wait_for(&[first], second);
        waits.wait_for(&[second], first);
        waits.wait_for(&[first, second], login);
        assert_eq!(waits.on_closed(first), [second]);
        assert_eq!(waits.on_closed(second), [login]);
        assert_eq!(waits.0.len(), 0);
    }
}
