//! Queue pair numbers. They are random, so that strangers cannot guess them, and they are not
//! reused for some time, so that a delayed packet can't be received by a new queue pair.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::Rng;

/// How many numbers must be released before a number can be reused.
const RESTING: usize = 1 << 15;

/// We never use numbers below this value: 0 and 1 are reserved, and small numbers look like a bug.
const FIRST: u32 = 0x10;
const LAST: u32 = 0xff_fffe;

/// Hashes a number that is already random.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QpnHasher(u64);

impl Hasher for QpnHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u32(u32::from(b));
        }
    }

    fn write_u32(&mut self, n: u32) {
        // All numbers of a worker have the same low bits, so they would end up in the same part of
        // a hash table. The multiplication spreads the remaining bits upwards, and `finish` folds
        // them down.
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Map using the QP number as the key.
pub(super) type QpnMap<T> = HashMap<u32, T, BuildHasherDefault<QpnHasher>>;

/// QP number allocator.
#[derive(Debug)]
pub(super) struct QpnAllocator {
    worker_index: u32,
    worker_mask: u32,
    taken: HashSet<u32, BuildHasherDefault<QpnHasher>>,
    resting: VecDeque<u32>,
}

impl QpnAllocator {
    pub(super) fn new(worker_index: u32, worker_bits: u8) -> Self {
        let worker_mask = (1u32 << worker_bits) - 1;
        assert!(
            worker_index <= worker_mask,
            "a worker index within its bits"
        );
        Self {
            worker_index,
            worker_mask,
            taken: HashSet::default(),
            resting: VecDeque::new(),
        }
    }

    /// Allocates a number which is neither in use nor recently released.
    pub(super) fn allocate(&mut self, random: &mut ChaCha20Rng) -> u32 {
        // There are far more valid numbers than this, so we only need a few tries.
        loop {
            // The low bits contain the worker index, which is used by the kernel to select the
            // socket (`steer.rs`).
            let n = random.next_u32() & 0x00ff_ffff & !self.worker_mask | self.worker_index;
            if (FIRST..=LAST).contains(&n) && self.taken.insert(n) {
                return n;
            }
        }
    }

    /// Releases a number.
    pub(super) fn release(&mut self, qpn: u32) {
        self.resting.push_back(qpn);
        // Use at most a quarter of the worker's range, so that we only need a few tries even if
        // there are many workers.
        let most = RESTING.min((0x00ff_ffff / (self.worker_mask as usize + 1)) / 4);
        while self.resting.len() > most {
            if let Some(n) = self.resting.pop_front() {
                self.taken.remove(&n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use chacha20::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn qpns_contain_worker_and_are_not_reused() {
        let mut random = ChaCha20Rng::from_seed([1; 32]);
        let mut a = QpnAllocator::new(5, 3);
        let mut seen = HashSet::new();
        for _ in 0..RESTING {
            let n = a.allocate(&mut random);
            assert!(n & 7 == 5 && (FIRST..=LAST).contains(&n));
            assert!(seen.insert(n), "{n:#x} was reused");
            a.release(n);
        }
    }
}
