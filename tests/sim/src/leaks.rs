//! Detects data sent to a peer that may not read it.
//!
//! All data is marked with the port that has written it ([`Port::marked`]). Data from a private
//! unit may only be sent to its initiator. Data from the shared unit may be sent to all honest
//! initiators, but not to cheating peers. All bytes sent by the target are checked: data, padding,
//! and unused parts of responses.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use memchr::memmem;
use riser_tests::history::Port;
use riser_transport::wire::IcrcFlow;

use crate::cheat;
use crate::initiator;

/// Length of a mark.
const MARK: usize = Port::MARK.len() + size_of::<u16>();

/// First port number for initiators that write to the shared unit of honest initiators.
const SHARED: u16 = 0x100;

/// Checks for marks. Clones share the result.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// Set if there are private units.
    has_private: bool,
    found: Arc<Mutex<Option<String>>>,
}

impl Guard {
    /// Creates a guard for the shared unit, and for private units if there are any.
    #[must_use]
    pub fn new(has_private: bool) -> Self {
        Self {
            has_private,
            found: Arc::default(),
        }
    }

    /// Checks bytes sent by the target to this address.
    pub fn check_bytes(&self, to: IpAddr, bytes: &[u8]) {
        let may_share = !cheat::is_cheat(to);
        if may_share && !self.has_private {
            return;
        }
        for at in memmem::find_iter(bytes, &Port::MARK) {
            let Some(port) = bytes.get(at + Port::MARK.len()..at + MARK) else {
                continue;
            };
            let owner = Port(u16::from_be_bytes([port[0], port[1]]));
            let is_shared = owner.0 & SHARED != 0;
            if !(is_shared && may_share) && port_of(to) != Some(owner) {
                self.report(|| format!("data of marked port {:#x} are sent to {to}", owner.0));
            }
        }
    }

    /// Checks a packet at the time when it's sent by a device of the target.
    pub fn look_at_packet(&self, from: SocketAddr, to: SocketAddr, packet: &[u8]) {
        self.check_bytes(to.ip(), packet);
        let is_whole = IcrcFlow::new(from, to).is_some_and(|flow| flow.check(packet, 0).is_ok());
        if !is_whole {
            self.report(|| format!("a packet with a wrong ICRC is sent to {to}"));
        }
    }

    fn report(&self, what: impl FnOnce() -> String) {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.get_or_insert_with(what);
    }

    /// Returns a description of leaked data, if any.
    #[must_use]
    pub fn found(&self) -> Option<String> {
        self.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Returns the port whose data may be sent to this address.
fn port_of(address: IpAddr) -> Option<Port> {
    let IpAddr::V4(at) = address else {
        return None;
    };
    let index = usize::from(at.octets()[3].checked_sub(100)?);
    let mut own = (0..initiator::ADDRESSES).map(|n| initiator::address_after(index, n as u8));
    own.any(|own| own == address).then(|| private_port(index))
}

/// Returns the port of an initiator for its private unit.
#[must_use]
pub fn private_port(index: usize) -> Port {
    Port::marked(1 + index as u16)
}

/// Returns the port of an initiator or rival for the shared unit of honest initiators.
#[must_use]
pub fn shared_port(number: u16) -> Port {
    Port::marked(SHARED | number)
}

/// A byte stream to an address. Marks may be split across multiple parts.
#[derive(Debug, Default)]
pub struct Stream {
    /// The last bytes of the previous part.
    tail: Vec<u8>,
}

impl Stream {
    /// Checks the next part.
    pub fn check_bytes(&mut self, guard: &Guard, to: IpAddr, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        guard.check_bytes(to, &self.tail);
        let seen = self.tail.len().saturating_sub(MARK - 1);
        self.tail.drain(..seen);
    }
}

#[cfg(test)]
mod tests {
    use riser_tests::history::{BLOCK, Version};

    use super::*;

    fn data() -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        Version::new(1, private_port(0)).fill(3, &mut block);
        block
    }

    #[test]
    fn marks_are_found_at_others_only() {
        let guard = Guard::new(true);
        guard.check_bytes(initiator::address(0), &data());
        guard.check_bytes(initiator::address(1), &data()[..16]);
        assert_eq!(guard.found(), None);
        // A partial and a complete mark at unaligned offsets.
        guard.check_bytes(initiator::address(1), &data()[99..113]);
        assert!(guard.found().unwrap().contains("10.0.0.101"));
    }

    #[test]
    fn shared_data_is_hidden_from_cheats() {
        let mut block = [0; BLOCK];
        Version::new(1, shared_port(1)).fill(3, &mut block);
        for has_private in [false, true] {
            let guard = Guard::new(has_private);
            guard.check_bytes(initiator::address(1), &block);
            assert_eq!(guard.found(), None);
            guard.check_bytes(cheat::address(0), &block[16..24]);
            assert!(guard.found().unwrap().contains("10.0.2.1"));
        }
    }

    #[test]
    fn marks_are_found_across_stream_parts() {
        for len in 1..9 {
            let (guard, mut stream) = (Guard::new(true), Stream::default());
            for part in data()[19..33].chunks(len) {
                stream.check_bytes(&guard, initiator::address(2), part);
            }
            assert!(guard.found().is_some(), "parts of {len}");
        }
    }
}
