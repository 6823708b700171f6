//! Data that leave for a peer that may not read them.
//!
//! All that is written bears the mark of who wrote it ([`Port::marked`]): what is in a unit that
//! only one initiator sees may go to that one, and what is in the unit that honest ones share to
//! them all, but not to peers that cheat. All bytes that the target sends are searched for marks:
//! data, padding, and the unused parts of responses.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use memchr::memmem;
use riser_tests::history::Port;
use riser_transport::wire::IcrcFlow;

use crate::cheat;
use crate::initiator;

/// Length of a mark.
const MARK: usize = Port::MARK.len() + size_of::<u16>();

/// First number of the ports of those who write to the unit that honest ones share.
const SHARED: u16 = 0x100;

/// Looks for marks; clones share what was found.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// There are units that one initiator sees each.
    has_private: bool,
    found: Arc<Mutex<Option<String>>>,
}

impl Guard {
    /// A guard of units that honest initiators share, and of private ones if there are some.
    #[must_use]
    pub fn new(has_private: bool) -> Self {
        Self {
            has_private,
            found: Arc::default(),
        }
    }

    /// Looks at bytes that the target sends to an address.
    pub fn look(&self, to: IpAddr, bytes: &[u8]) {
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
                self.report(|| format!("data of marked port {:#x} leave for {to}", owner.0));
            }
        }
    }

    /// Looks at a packet that a device of the target sends, as it leaves it.
    pub fn look_at_packet(&self, from: SocketAddr, to: SocketAddr, packet: &[u8]) {
        self.look(to.ip(), packet);
        let is_whole = IcrcFlow::new(from, to).is_some_and(|flow| flow.check(packet, 0).is_ok());
        if !is_whole {
            self.report(|| format!("a packet with a wrong ICRC leaves for {to}"));
        }
    }

    fn report(&self, what: impl FnOnce() -> String) {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.get_or_insert_with(what);
    }

    /// What has left, if something has.
    #[must_use]
    pub fn found(&self) -> Option<String> {
        self.found
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// The port whose data may go to an address.
fn port_of(address: IpAddr) -> Option<Port> {
    let IpAddr::V4(at) = address else {
        return None;
    };
    let index = usize::from(at.octets()[3].checked_sub(100)?);
    let mut own = (0..initiator::ADDRESSES).map(|n| initiator::address_after(index, n as u8));
    own.any(|own| own == address).then(|| private_port(index))
}

/// The port of an initiator that writes to a unit of its own.
#[must_use]
pub fn private_port(index: usize) -> Port {
    Port::marked(1 + index as u16)
}

/// The port of an initiator or a rival that writes to the unit that honest ones share.
#[must_use]
pub fn shared_port(number: u16) -> Port {
    Port::marked(SHARED | number)
}

/// A stream of bytes to an address, of which marks may be divided between its parts.
#[derive(Debug, Default)]
pub struct Stream {
    /// The last bytes before.
    tail: Vec<u8>,
}

impl Stream {
    /// Looks at more bytes.
    pub fn look(&mut self, guard: &Guard, to: IpAddr, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        guard.look(to, &self.tail);
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
        guard.look(initiator::address(0), &data());
        guard.look(initiator::address(1), &data()[..16]);
        assert_eq!(guard.found(), None);
        // A part of a word and a whole one, at odd places.
        guard.look(initiator::address(1), &data()[99..113]);
        assert!(guard.found().unwrap().contains("10.0.0.101"));
    }

    #[test]
    fn data_that_all_share_are_not_for_those_that_cheat() {
        let mut block = [0; BLOCK];
        Version::new(1, shared_port(1)).fill(3, &mut block);
        for has_private in [false, true] {
            let guard = Guard::new(has_private);
            guard.look(initiator::address(1), &block);
            assert_eq!(guard.found(), None);
            guard.look(cheat::address(0), &block[16..24]);
            assert!(guard.found().unwrap().contains("10.0.2.1"));
        }
    }

    #[test]
    fn marks_are_found_across_the_parts_of_a_stream() {
        for len in 1..9 {
            let (guard, mut stream) = (Guard::new(true), Stream::default());
            for part in data()[19..33].chunks(len) {
                stream.look(&guard, initiator::address(2), part);
            }
            assert!(guard.found().is_some(), "parts of {len}");
        }
    }
}
