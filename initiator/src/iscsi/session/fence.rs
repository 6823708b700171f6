//! Commands of lost sessions that may still modify the medium.

use std::net::SocketAddr;
use std::time::Instant;

/// Target port of a login. Hosts to which a target redirects logins may use the same portal groups,
/// without knowledge of each other's sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LoginPort {
    /// Portal group, if reported by the target.
    group: Option<u16>,
    /// Address to which the login was redirected, if any.
    redirect: Option<SocketAddr>,
}

/// Target ports of the current and of a lost session. A login only terminates the commands of an
/// old session in the same portal group (RFC 7143 clause 6.3.5); commands in another portal group,
/// or at another host, need time to complete.
#[derive(Debug, Default)]
pub(super) struct PortalGroupFence {
    /// Port of the last login.
    port: LoginPort,
    /// Port of a lost session with changes that may still reach the medium, if any. No request is
    /// started before these have completed, so there is at most one.
    unfenced: Option<LoginPort>,
}

impl PortalGroupFence {
    /// Returns the portal group of the last login, if reported by the target, and the address to
    /// which the login was redirected, if any.
    pub(super) fn port(&self) -> (Option<u16>, Option<SocketAddr>) {
        (self.port.group, self.port.redirect)
    }

    pub(super) fn set_port(&mut self, group: Option<u16>, redirect: Option<SocketAddr>) {
        self.port = LoginPort { group, redirect };
    }

    /// Returns whether no commands of a lost session may modify the medium.
    pub(super) fn is_clear(&self) -> bool {
        self.unfenced.is_none()
    }

    /// Called when the session was lost with commands that modify the medium.
    pub(super) fn on_changes_lost(&mut self) {
        self.unfenced.get_or_insert(self.port);
    }

    /// Called when a login has succeeded. Returns the time at which commands may start, or `None`
    /// for immediately. `pending` is this time before the login, and `settle_at` the time at which
    /// all old commands have completed.
    pub(super) fn on_login(
        &mut self,
        pending: Option<Instant>,
        settle_at: Instant,
    ) -> Option<Instant> {
        match self.unfenced {
            Some(port) if port == self.port => {
                self.unfenced = None;
                None
            }
            Some(_) => pending.or(Some(settle_at)),
            None => pending,
        }
    }

    /// Called when the commands of lost sessions have had time to complete.
    pub(super) fn on_settled(&mut self) {
        self.unfenced = None;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn login_to_other_group_waits_once() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut fence = PortalGroupFence::default();
        fence.set_port(Some(1), None);
        assert_eq!(fence.on_login(None, at(15)), None);
        fence.on_changes_lost();
        fence.set_port(Some(2), None);
        assert_eq!(fence.on_login(None, at(15)), Some(at(15)));
        assert_eq!(fence.on_login(Some(at(15)), at(20)), Some(at(15)));
        assert!(!fence.is_clear());
        // A later loss does not change the portal group of the old commands.
        fence.on_changes_lost();
        fence.set_port(Some(1), None);
        assert_eq!(fence.on_login(Some(at(15)), at(20)), None);
        assert!(fence.is_clear());
        // Commands of an earlier process are in an unknown portal group.
        assert_eq!(fence.on_login(Some(at(15)), at(20)), Some(at(15)));
        fence.on_changes_lost();
        fence.on_settled();
        assert!(fence.is_clear());
    }
}
