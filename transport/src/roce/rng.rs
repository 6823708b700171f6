//! The device's random numbers: ChaCha20 (RFC 8439, section 2.3) run as a generator.
//!
//! Queue-pair numbers, starting PSNs and communication ids must not be guessed by somebody who cannot
//! see the traffic, so they come from a cipher; and a device must be replayable, so the cipher's key is
//! a seed that is handed in. Drivers take it from the operating system, tests choose it.

/// A generator of unpredictable numbers.
pub struct ChaCha {
    state: [u32; 16],
    block: [u32; 16],
    used: usize,
}

impl std::fmt::Debug for ChaCha {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The state is the secret.
        f.debug_struct("ChaCha").finish_non_exhaustive()
    }
}

fn quarter(s: &mut [u32; 16], a: usize, b: usize, c: usize, d: usize) {
    for (x, y, z, turn) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
        s[x] = s[x].wrapping_add(s[y]);
        s[z] = (s[z] ^ s[x]).rotate_left(turn);
    }
}

impl ChaCha {
    /// The generator of a seed.
    #[must_use]
    pub fn new(seed: &[u8; 32]) -> Self {
        Self::with_nonce(seed, 0, [0; 12])
    }

    fn with_nonce(key: &[u8; 32], counter: u32, nonce: [u8; 12]) -> Self {
        let mut state = [0; 16];
        state[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
        let words = key.chunks_exact(4).chain(nonce.chunks_exact(4));
        let slots = (4..12).chain(13..16);
        for (slot, word) in slots.zip(words) {
            state[slot] = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        }
        state[12] = counter;
        Self {
            state,
            block: [0; 16],
            used: 16,
        }
    }

    fn refill(&mut self) {
        let mut s = self.state;
        for _ in 0..10 {
            quarter(&mut s, 0, 4, 8, 12);
            quarter(&mut s, 1, 5, 9, 13);
            quarter(&mut s, 2, 6, 10, 14);
            quarter(&mut s, 3, 7, 11, 15);
            quarter(&mut s, 0, 5, 10, 15);
            quarter(&mut s, 1, 6, 11, 12);
            quarter(&mut s, 2, 7, 8, 13);
            quarter(&mut s, 3, 4, 9, 14);
        }
        for (out, (a, b)) in self.block.iter_mut().zip(s.into_iter().zip(self.state)) {
            *out = a.wrapping_add(b);
        }
        // The counter has 2³² blocks; the nonce counts on where it ends.
        let (next, carried) = self.state[12].overflowing_add(1);
        self.state[12] = next;
        if carried {
            self.state[13] = self.state[13].wrapping_add(1);
        }
        self.used = 0;
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == self.block.len() {
            self.refill();
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// Sixteen bytes, for seeding something else.
    pub fn next_seed(&mut self) -> [u8; 16] {
        let mut seed = [0; 16];
        for word in seed.chunks_exact_mut(4) {
            word.copy_from_slice(&self.next_u32().to_le_bytes());
        }
        seed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_function_is_that_of_the_rfc() {
        // RFC 8439, section 2.3.2.
        let key = std::array::from_fn(|i| i as u8);
        let nonce = [0, 0, 0, 9, 0, 0, 0, 0x4a, 0, 0, 0, 0];
        let mut c = ChaCha::with_nonce(&key, 1, nonce);
        let words: Vec<u32> = (0..16).map(|_| c.next_u32()).collect();
        assert_eq!(
            words,
            [
                0xe4e7_f110, 0x1559_3bd1, 0x1fdd_0f50, 0xc471_20a3, 0xc7f4_d1c7, 0x0368_c033,
                0x9aaa_2204, 0x4e6c_d4c3, 0x4664_82d2, 0x09aa_9f07, 0x05d7_c214, 0xa202_8bd9,
                0xd19c_12b5, 0xb94e_16de, 0xe883_d0cb, 0x4e3c_50a2,
            ]
        );
    }

    #[test]
    fn one_seed_gives_one_stream() {
        let take = |seed: u8| {
            let mut c = ChaCha::new(&[seed; 32]);
            (0..40).map(|_| c.next_u32()).collect::<Vec<_>>()
        };
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
    }
}
