//! Creates almost valid messages from valid messages: sets fields to boundary values, truncates or
//! extends them, or joins two messages.

use std::sync::Arc;

use crate::load::Chance;
use crate::seeds;

/// A set of valid messages, and a generator to modify them. This is cheap to clone.
#[derive(Clone, Debug)]
pub struct Mutator {
    valid: Arc<[Vec<u8>]>,
    pub chance: Chance,
}

impl Mutator {
    /// Creates a mutator with a separate stream of random numbers.
    ///
    /// # Panics
    /// Panics if there are no valid messages.
    pub fn new(valid: impl IntoIterator<Item = Vec<u8>>, seed: u64, stream: u64) -> Self {
        let valid: Arc<[_]> = valid.into_iter().filter(|m| !m.is_empty()).collect();
        assert!(!valid.is_empty(), "there are valid messages");
        let chance = Chance::new(seed, stream);
        Self { valid, chance }
    }

    /// Creates a mutator using the messages of a fuzz target.
    pub fn of(seeds: &str, seed: u64, stream: u64) -> Self {
        let valid = seeds::corpus(seeds).into_iter().map(|(_, message)| message);
        Self::new(valid, seed, stream)
    }

    /// Creates a mutator for iSCSI PDUs. For this fuzz target, the first byte is used to select the
    /// digests and how the stream is split.
    pub fn of_pdus(seed: u64, stream: u64) -> Self {
        let messages = seeds::corpus("stream").into_iter();
        let pdus = messages.map(|(_, mut message)| match message.is_empty() {
            true => message,
            false => message.split_off(1),
        });
        Self::new(pdus, seed, stream)
    }

    /// Returns a copy that uses random numbers with another seed.
    #[must_use]
    pub fn with_seed(&self, seed: u64, stream: u64) -> Self {
        let chance = Chance::new(seed, stream);
        Self {
            valid: Arc::clone(&self.valid),
            chance,
        }
    }

    /// Returns a valid message.
    pub fn valid(&mut self) -> Vec<u8> {
        let at = self.chance.below(self.valid.len() as u64) as usize;
        self.valid[at].clone()
    }

    /// Returns the next message.
    pub fn message(&mut self) -> Vec<u8> {
        let mut message = self.valid();
        for _ in 0..self.chance.below(4) {
            self.change(&mut message);
        }
        message
    }

    /// Changes a part of a message.
    pub fn change(&mut self, message: &mut Vec<u8>) {
        if message.is_empty() {
            return;
        }
        let at = self.chance.below(message.len() as u64) as usize;
        match self.chance.below(12) {
            // Set a number to a boundary value, or to a value close to the original.
            0..6 => {
                let width = 1 << self.chance.below(4);
                let at = at - at % width;
                let len = message.len() as u64;
                let ones = u64::MAX >> (64 - 8 * width);
                let values = [
                    0,
                    1,
                    ones,
                    ones - 1,
                    ones >> 1,
                    (ones >> 1) + 1,
                    len,
                    len + 1,
                    len - 1,
                ];
                let value = values[self.chance.below(9) as usize].to_be_bytes();
                if let Some(field) = message.get_mut(at..at + width) {
                    field.copy_from_slice(&value[8 - width..]);
                }
            }
            6 | 7 => message[at] ^= 1 << self.chance.below(8),
            8 => message.truncate(at),
            9 => message.extend(std::iter::repeat_n(0xa5, 1 + at % 300)),
            // Join the start of this message with the end of another message.
            10 => {
                let other = self.valid();
                message.truncate(at);
                message.extend(other.into_iter().skip(at));
            }
            _ => message[0] = self.chance.below(256) as u8,
        }
    }

    /// Returns true with probability 1/n.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.chance.below(n) == 0
    }
}
