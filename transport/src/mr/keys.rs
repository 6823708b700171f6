//! Unguessable keys: a keyed stream of numbers, and a secret permutation of the indexes.

/// Number of bits used for the key index.
pub(super) const INDEX_BITS: u32 = 24;

/// Secret permutation for the index of a key: a four-round Feistel network on two halves of 12
/// bits, using tables of random numbers as round functions.
pub(super) struct Permutation {
    // The size is fixed, so there is no bounds check for a masked index.
    rounds: Box<[Round; 4]>,
}

type Round = [u16; 1 << HALF_BITS];

const HALF_BITS: u32 = INDEX_BITS / 2;
const HALF_MASK: u32 = (1 << HALF_BITS) - 1;

impl Permutation {
    pub(super) fn new(random: &mut Prf) -> Self {
        let mut rounds = vec![[0u16; 1 << HALF_BITS]; 4];
        for four in rounds.as_flattened_mut().chunks_exact_mut(4) {
            let bits = random.next();
            for (i, word) in four.iter_mut().enumerate() {
                *word = (bits >> (16 * i)) as u16 & HALF_MASK as u16;
            }
        }
        let rounds = <Box<[Round; 4]>>::try_from(rounds).expect("four rounds");
        Self { rounds }
    }

    pub(super) fn forward(&self, value: u32) -> u32 {
        let (mut left, mut right) = (value >> HALF_BITS & HALF_MASK, value & HALF_MASK);
        for round in self.rounds.iter() {
            (left, right) = (right, left ^ look_up(round, right));
        }
        left << HALF_BITS | right
    }

    pub(super) fn backward(&self, value: u32) -> u32 {
        let (mut left, mut right) = (value >> HALF_BITS & HALF_MASK, value & HALF_MASK);
        for round in self.rounds.iter().rev() {
            (left, right) = (right ^ look_up(round, left), left);
        }
        left << HALF_BITS | right
    }
}

fn look_up(round: &Round, half: u32) -> u32 {
    u32::from(round[(half & HALF_MASK) as usize])
}

/// Stream of numbers that can't be distinguished from random numbers without the seed: SipHash-2-4
/// of a counter.
pub(super) struct Prf {
    key: [u64; 2],
    counter: u64,
}

impl Prf {
    pub(super) fn new(seed: [u8; 16]) -> Self {
        let (low, high) = seed.split_at(8);
        // SipHash uses little-endian words for its key.
        let word = |b: &[u8]| b.iter().rev().fold(0, |w, &b| w << 8 | u64::from(b));
        Self {
            key: [word(low), word(high)],
            counter: 0,
        }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.counter += 1;
        let [k0, k1] = self.key;
        let mut v = [
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ];
        // The counter is an eight-byte message. The highest byte of the last block contains the
        // length, as required by SipHash.
        for block in [self.counter, 8 << 56] {
            v[3] ^= block;
            sip_round(&mut v);
            sip_round(&mut v);
            v[0] ^= block;
        }
        v[2] ^= 0xff;
        for _ in 0..4 {
            sip_round(&mut v);
        }
        v[0] ^ v[1] ^ v[2] ^ v[3]
    }
}

fn sip_round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn random_stream_is_siphash() {
        // Published test vector for key 00 01 … 0f and message 00 01 … 07.
        let mut prf = Prf::new(std::array::from_fn(|i| i as u8));
        prf.counter = 0x0706_0504_0302_0100 - 1;
        assert_eq!(prf.next(), 0x93f5_f579_9a93_2462);
    }

    proptest! {
        #[test]
        fn permutation_is_bijective(value in 0u32..1 << 24, seed: [u8; 16]) {
            let p = Permutation::new(&mut Prf::new(seed));
            prop_assert!(p.forward(value) < 1 << 24);
            prop_assert_eq!(p.backward(p.forward(value)), value);
        }
    }
}
