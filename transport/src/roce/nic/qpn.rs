//! Queue-pair numbers: random, so that a stranger cannot guess one, and not soon used again, so
//! that a packet that was long on its way meets no queue pair.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::Rng;

/// Numbers that rest before they may be used again.
const RESTING: usize = 1 << 15;

/// Numbers below this are never given out: 0 and 1 are reserved, and small ones look like mistakes.
const FIRST: u32 = 0x10;
const LAST: u32 = 0xff_fffe;

/// Hashes a number that is random already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QpnHasher(u64);

impl Hasher for QpnHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u32(u32::from(b));
        }
    }

    fn write_u32(&mut self, n: u32) {
        // The numbers of a worker agree in their low bits, by which a table would put them all
        // together. The product spreads the others upwards, and `finish` folds them down.
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Something for each queue-pair number.
pub(super) type QpnMap<T> = HashMap<u32, T, BuildHasherDefault<QpnHasher>>;

/// Allocator of queue pair numbers.
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

    /// A number that is neither in use nor resting.
    pub(super) fn take(&mut self, random: &mut ChaCha20Rng) -> u32 {
        // Far more numbers exist than queue pairs and resting numbers, so a few draws do.
        loop {
            // The low bits name the worker: by them the kernel picks its socket (`steer.rs`).
            let n = random.next_u32() & 0x00ff_ffff & !self.worker_mask | self.worker_index;
            if (FIRST..=LAST).contains(&n) && self.taken.insert(n) {
                return n;
            }
        }
    }

    /// Gives a number back, to rest.
    pub(super) fn give_back(&mut self, qpn: u32) {
        self.resting.push_back(qpn);
        // A quarter of a worker's numbers at most, so that draws stay few where many workers
        // share them.
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
    fn numbers_name_their_worker_and_are_not_soon_used_again() {
        let mut random = ChaCha20Rng::from_seed([1; 32]);
        let mut a = QpnAllocator::new(5, 3);
        let mut seen = HashSet::new();
        for _ in 0..RESTING {
            let n = a.take(&mut random);
            assert!(n & 7 == 5 && (FIRST..=LAST).contains(&n));
            assert!(seen.insert(n), "{n:#x} came back");
            a.give_back(n);
        }
    }
}
