//! Data that leave for a peer that may not read them.
//!
//! What is written to a unit that only one initiator sees bears the mark of that initiator
//! ([`Port::marked`]). All bytes that the target sends are searched for the marks of others:
//! data, padding, and the unused parts of responses.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use memchr::memmem;
use riser_tests::history::Port;

use crate::initiator;

/// Length of a mark.
const MARK: usize = Port::MARK.len() + size_of::<u16>();

/// Looks for marks; clones share what was found.
#[derive(Clone, Debug, Default)]
pub struct Guard(Arc<Mutex<Option<String>>>);

impl Guard {
    /// Looks at bytes that the target sends to an address.
    pub fn look(&self, to: IpAddr, bytes: &[u8]) {
        for at in memmem::find_iter(bytes, &Port::MARK) {
            let Some(port) = bytes.get(at + Port::MARK.len()..at + MARK) else {
                continue;
            };
            let owner = Port(u16::from_be_bytes([port[0], port[1]]));
            if port_of(to) != Some(owner) {
                let text = || format!("data of marked port {:#x} leave for {to}", owner.0);
                let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                found.get_or_insert_with(text);
            }
        }
    }

    /// What has left, if something has.
    #[must_use]
    pub fn found(&self) -> Option<String> {
        self.0
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
        let guard = Guard::default();
        guard.look(initiator::address(0), &data());
        guard.look(initiator::address(1), &data()[..16]);
        assert_eq!(guard.found(), None);
        // A part of a word and a whole one, at odd places.
        guard.look(initiator::address(1), &data()[99..113]);
        assert!(guard.found().unwrap().contains("10.0.0.101"));
    }

    #[test]
    fn marks_are_found_across_the_parts_of_a_stream() {
        for len in 1..9 {
            let (guard, mut stream) = (Guard::default(), Stream::default());
            for part in data()[19..33].chunks(len) {
                stream.look(&guard, initiator::address(2), part);
            }
            assert!(guard.found().is_some(), "parts of {len}");
        }
    }
}
