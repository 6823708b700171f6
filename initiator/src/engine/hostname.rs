//! Host names of targets, resolved again for every connection attempt.
//!
//! A lookup blocks, so a separate thread performs it and the engine never waits: the engine
//! connects to the last known address, and the next attempt uses the result. An unresponsive DNS
//! server doesn't delay a connection. Only a redirection to a host name waits for the address.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, thread};

/// Host name with a port.
#[derive(Debug)]
pub(super) struct HostName {
    name: String,
    port: u16,
    /// Required address family, that of this address.
    family: Option<SocketAddr>,
    lookup: Mutex<Lookup>,
}

#[derive(Debug)]
struct Lookup {
    /// Last known address.
    dst: Option<SocketAddr>,
    state: LookupState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LookupState {
    /// The address was just resolved.
    Fresh,
    /// A thread is resolving the name.
    Running,
    Idle,
}

impl HostName {
    /// Creates an entry for a name that was just resolved.
    pub(super) fn new(
        name: &str,
        port: u16,
        family: Option<SocketAddr>,
        dst: SocketAddr,
    ) -> Arc<Self> {
        Self::with(name, port, family, Some(dst), LookupState::Fresh)
    }

    /// Creates an entry and starts the lookup; see [`Self::poll`].
    pub(super) fn look_up(name: &str, port: u16, family: Option<SocketAddr>) -> Arc<Self> {
        let host = Self::with(name, port, family, None, LookupState::Idle);
        host.refresh();
        host
    }

    fn with(
        name: &str,
        port: u16,
        family: Option<SocketAddr>,
        dst: Option<SocketAddr>,
        state: LookupState,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            port,
            family,
            lookup: Mutex::new(Lookup { dst, state }),
        })
    }

    /// Returns the last known address and starts a lookup for the next call, unless this is the
    /// first call.
    pub(super) fn renew(self: &Arc<Self>) -> Option<SocketAddr> {
        self.refresh();
        self.lock().dst
    }

    /// Returns the address once the lookup has completed; the inner `Option` is `None` if it
    /// failed.
    pub(super) fn poll(&self) -> Option<Option<SocketAddr>> {
        let lookup = self.lock();
        (lookup.state != LookupState::Running).then_some(lookup.dst)
    }

    fn refresh(self: &Arc<Self>) {
        let mut lookup = self.lock();
        match lookup.state {
            LookupState::Running => return,
            LookupState::Fresh => {
                lookup.state = LookupState::Idle;
                return;
            }
            LookupState::Idle => lookup.state = LookupState::Running,
        }
        drop(lookup);
        let host = self.clone();
        let thread = thread::Builder::new().name("riser-resolver".into());
        let begun = thread.spawn(move || {
            let found = (host.name.as_str(), host.port).to_socket_addrs();
            host.finish(found);
        });
        if let Err(error) = begun {
            self.finish(Err::<std::iter::Empty<_>, _>(error));
        }
    }

    /// Stores the result of a lookup. Keeps the current address if it is still listed.
    fn finish(&self, found: io::Result<impl Iterator<Item = SocketAddr>>) {
        let mut lookup = self.lock();
        lookup.state = LookupState::Idle;
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(host = self.name, "cannot resolve host name: {error}");
                return;
            }
        };
        let is_fit = |dst: &SocketAddr| self.family.is_none_or(|a| a.is_ipv4() == dst.is_ipv4());
        let found: Vec<_> = found.filter(is_fit).collect();
        if !lookup.dst.is_some_and(|dst| found.contains(&dst))
            && let Some(dst) = found.first()
        {
            if lookup.dst.is_some() {
                tracing::info!(host = self.name, "host name now resolves to {dst}");
            }
            lookup.dst = Some(*dst);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lookup> {
        self.lookup.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, last], 3260))
    }

    #[test]
    fn listed_address_stays_in_use() {
        let host = HostName::new("disk.example", 3260, None, address(1));
        host.finish(Ok([address(2), address(1)].into_iter()));
        assert_eq!(host.lock().dst, Some(address(1)));
        host.finish(Ok([address(3), address(2)].into_iter()));
        assert_eq!(host.lock().dst, Some(address(3)));
        host.finish(Err::<std::iter::Empty<_>, _>(
            io::ErrorKind::NotFound.into(),
        ));
        host.finish(Ok(std::iter::empty()));
        assert_eq!(host.lock().dst, Some(address(3)));
    }

    #[test]
    fn address_has_family_of_source() {
        let src = Some(SocketAddr::from(([192, 0, 2, 9], 0)));
        let host = HostName::new("disk.example", 3260, src, address(1));
        let v6 = "[2001:db8::1]:3260".parse().unwrap();
        host.finish(Ok([v6, address(2)].into_iter()));
        assert_eq!(host.lock().dst, Some(address(2)));
    }

    #[test]
    fn name_is_looked_up_from_second_attempt() {
        let old = SocketAddr::from(([192, 0, 2, 1], 3260));
        let host = HostName::new("127.0.0.1", 3260, None, old);
        assert_eq!(host.renew(), Some(old));
        assert_eq!(host.poll(), Some(Some(old)));
        host.renew();
        while host.poll().is_none() {
            thread::yield_now();
        }
        let new = SocketAddr::from(([127, 0, 0, 1], 3260));
        assert_eq!(host.poll(), Some(Some(new)));
    }
}
