//! The address to connect to, for a target that might move.

use riser_scsi::iscsi::name::TargetAddress;

/// Maximum number of successive redirections.
const MAX_REDIRECTIONS: u8 = 4;

/// Redirections of a target (RFC 7143 clause 11.13.5).
#[derive(Debug, Default)]
pub(super) struct Redirection {
    /// Address that the target moved to, or `None` for the original one.
    current: Option<TargetAddress>,
    /// Address that the target moved to permanently.
    home: Option<TargetAddress>,
    /// Number of successive redirections.
    moves: u8,
}

impl Redirection {
    /// Returns the address for the next connection, or `None` for the original one.
    pub(super) fn address(&self) -> Option<&TargetAddress> {
        self.current.as_ref()
    }

    /// Called when a portal redirects to another one. Returns false if there were too many
    /// successive redirections, because two portals might redirect to each other in an endless
    /// loop.
    pub(super) fn on_redirect(&mut self, to: TargetAddress, is_permanent: bool) -> bool {
        self.moves += 1;
        if is_permanent && (self.current.is_none() || self.current == self.home) {
            self.home = Some(to.clone());
        }
        if self.moves > MAX_REDIRECTIONS {
            return false;
        }
        self.current = Some(to);
        true
    }

    /// Called when a login has succeeded.
    pub(super) fn on_login(&mut self) {
        self.moves = 0;
        // The portal that had moved serves the target again.
        self.home = self.home.take().filter(|_| self.current.is_some());
    }

    /// Resets redirections, to make sure that the next attempt will start at the target's original
    /// address. If the target has moved permanently, attempts alternate between the new and the old
    /// address. `was_logged_in` is set if the last connection was in full-feature phase.
    pub(super) fn reset(&mut self, was_logged_in: bool) {
        let was_home = self.current.is_some() && self.current == self.home;
        self.current = self.home.clone().filter(|_| was_logged_in || !was_home);
        self.moves = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str) -> TargetAddress {
        TargetAddress {
            host: host.to_owned(),
            port: 3260,
            group: None,
        }
    }

    fn host(redirection: &Redirection) -> Option<&str> {
        redirection.address().map(|to| &*to.host)
    }

    #[test]
    fn successive_redirections_are_limited() {
        let mut redirection = Redirection::default();
        for _ in 0..MAX_REDIRECTIONS {
            assert!(redirection.on_redirect(address("b"), false));
            assert_eq!(host(&redirection), Some("b"));
        }
        assert!(!redirection.on_redirect(address("b"), false));
        redirection.reset(false);
        assert_eq!(host(&redirection), None);
        assert!(redirection.on_redirect(address("b"), false));
    }

    #[test]
    fn failed_attempts_alternate_after_permanent_move() {
        let mut redirection = Redirection::default();
        redirection.on_redirect(address("b"), true);
        redirection.on_login();
        redirection.reset(true);
        for expected in [Some("b"), None, Some("b"), None] {
            assert_eq!(host(&redirection), expected);
            redirection.reset(false);
        }
        // The original portal serves the target again.
        redirection.reset(false);
        assert_eq!(host(&redirection), None);
        redirection.on_login();
        redirection.reset(true);
        assert_eq!(host(&redirection), None);
    }
}
