//! Channels that wait until others have ended, and their commands with them.
//!
//! A login that replaces a session must not start a command while one of the old session can still
//! reach the disk: the old one would overwrite what the new one has written. So its channels wait
//! for those that they replace, in either protocol (SRP r16a, MULTI-CHANNEL ACTION; RFC 7143
//! 6.3.5).

use crate::fabric::ConnRef;

/// `who` waits until `on` is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    on: ConnRef,
    who: ConnRef,
    /// Or until others of its session may have its commands.
    until_free: bool,
}

/// The channels that wait for others. Bounded by the number of channels: a pair for each.
#[derive(Debug, Default)]
pub(super) struct Waits(Vec<Wait>);

impl Waits {
    /// A channel waits until these are gone, for each of them once, however often that is asked
    /// for.
    pub(super) fn wait_for(&mut self, others: &[ConnRef], who: ConnRef) {
        self.enter(others, who, false);
    }

    /// A channel waits until others may have the commands of these.
    pub(super) fn wait_until_free(&mut self, others: &[ConnRef], who: ConnRef) {
        self.enter(others, who, true);
    }

    fn enter(&mut self, others: &[ConnRef], who: ConnRef, until_free: bool) {
        // Two that wait for each other, as after crossing logouts, would else have the one that is
        // left wait for itself.
        for on in others.iter().copied().filter(|on| *on != who) {
            let mut known = self.0.iter_mut();
            match known.find(|wait| (wait.on, wait.who) == (on, who)) {
                // Gone is more than free.
                Some(wait) => wait.until_free &= until_free,
                None => self.0.push(Wait {
                    on,
                    who,
                    until_free,
                }),
            }
        }
    }

    /// A channel waits for the same channels as another one.
    pub(super) fn wait_like(&mut self, other: ConnRef, who: ConnRef) {
        let same: Vec<_> = self.of(other).collect();
        self.wait_for(&same, who);
    }

    /// Whether a channel waits for another one.
    pub(super) fn is_waiting(&self, who: ConnRef) -> bool {
        self.of(who).next().is_some()
    }

    /// Whether a channel waits for this one.
    pub(super) fn is_awaited(&self, on: ConnRef) -> bool {
        self.0.iter().any(|wait| wait.on == on)
    }

    /// These channels are ending and start nothing more: they wait for none, and none inherits that
    /// of them.
    pub(super) fn forgo(&mut self, who: &[ConnRef]) {
        self.0.retain(|wait| !who.contains(&wait.who));
    }

    /// A channel is gone. Returns those that have nothing left to wait for.
    ///
    /// A channel that waited for it also waits for what it waited for itself, since that is older.
    pub(super) fn end(&mut self, gone: ConnRef) -> Vec<ConnRef> {
        let still: Vec<_> = self.0.extract_if(.., |wait| wait.who == gone).collect();
        let heirs: Vec<_> = self.0.extract_if(.., |wait| wait.on == gone).collect();
        for heir in &heirs {
            for wait in &still {
                let until_free = heir.until_free && wait.until_free;
                self.enter(&[wait.on], heir.who, until_free);
            }
        }
        let heirs = heirs.into_iter().map(|heir| heir.who);
        heirs.filter(|who| !self.is_waiting(*who)).collect()
    }

    /// Others may have the commands of a channel that still is there. Returns those that have nothing
    /// left to wait for.
    pub(super) fn free(&mut self, on: ConnRef) -> Vec<ConnRef> {
        let is_over = |wait: &Wait| wait.on == on && wait.until_free;
        let over: Vec<_> = self.0.extract_if(.., |wait| is_over(wait)).collect();
        let over = over.into_iter().map(|wait| wait.who);
        over.filter(|who| !self.is_waiting(*who)).collect()
    }

    /// The channels that a channel waits for.
    pub(super) fn of(&self, who: ConnRef) -> impl Iterator<Item = ConnRef> + '_ {
        let own = self.0.iter().filter(move |wait| wait.who == who);
        own.map(|wait| wait.on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An initiator may ask for the end of a connection again and again.
    #[test]
    fn a_channel_waits_for_another_one_once() {
        let [first, second, third] = [1, 2, 3].map(|serial| ConnRef { worker: 0, serial });
        let mut waits = Waits::default();
        for _ in 0..100 {
            waits.wait_for(&[first], second);
            waits.wait_for(&[second], third);
        }
        assert_eq!(waits.0.len(), 2);
        assert_eq!(waits.end(second), []);
        assert_eq!(waits.0.len(), 1);
        assert_eq!(waits.end(first), [third]);
        assert_eq!(waits.0.len(), 0);
    }

    #[test]
    fn an_heir_in_the_session_waits_only_until_a_channel_is_free() {
        let [lost, second, third, login] = [1, 2, 3, 4].map(|serial| ConnRef { worker: 0, serial });
        let mut waits = Waits::default();
        waits.wait_until_free(&[lost], second);
        waits.wait_until_free(&[lost, second], third);
        // A new session, until the end.
        waits.wait_for(&[lost, second], login);
        assert_eq!(waits.end(second), []);
        assert_eq!(waits.free(lost), [third]);
        assert_eq!(waits.end(lost), [login]);
    }

    /// Connections of one session end each other, and a login replaces both.
    #[test]
    fn channels_that_wait_for_each_other_leave_no_wait() {
        let [first, second, login] = [1, 2, 3].map(|serial| ConnRef { worker: 0, serial });
        let mut waits = Waits::default();
        waits.wait_for(&[first], second);
        waits.wait_for(&[second], first);
        waits.wait_for(&[first, second], login);
        assert_eq!(waits.end(first), [second]);
        assert_eq!(waits.end(second), [login]);
        assert_eq!(waits.0.len(), 0);
    }
}
