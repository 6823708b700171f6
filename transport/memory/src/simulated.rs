//! Reproducible memory addresses, and mappings that fail.
//!
//! Addresses of registered memory are sent to peers, so packets contain them. With the virtual
//! addresses of the process, a simulation could not be reproduced byte by byte. Devices don't need
//! virtual addresses, and the software NIC translates the addresses that it receives.

use std::cell::Cell;

use crate::PAGE;

/// The first address. No Linux process has mappings there, so using it as a pointer causes a fault.
const FIRST: u64 = 1 << 56;

thread_local! {
    /// Number of mappings that this thread can create before one fails, if any. Decremented for
    /// each mapping.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The next address, in a simulation.
    static NEXT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Assigns reproducible addresses, in creation order, to mappings that this thread creates in
/// `run`. Only simulated devices can use them.
pub fn addresses<T>(run: impl FnOnce() -> T) -> T {
    /// Restores the previous state, even on panic.
    struct Before(Option<u64>);
    impl Drop for Before {
        fn drop(&mut self) {
            NEXT.set(self.0);
        }
    }
    let _before = Before(NEXT.replace(Some(FIRST)));
    run()
}

/// Makes a mapping of this thread fail once with `ENOMEM`, after this number of successful
/// mappings. `None` disables this. Returns the remaining number of mappings before the failure that
/// was previously set, or `None` if it has already failed or was not set.
pub fn fail_after(mappings: Option<usize>) -> Option<usize> {
    LEFT.replace(mappings)
}

/// Counts a mapping. Returns whether it should fail.
pub(crate) fn fails() -> bool {
    let Some(left) = LEFT.get() else {
        return false;
    };
    LEFT.set(left.checked_sub(1));
    left == 0
}

/// Allocates an address for a mapping, in a simulation.
pub(crate) fn allocate_range(len: usize) -> Option<u64> {
    let address = NEXT.get()?;
    // Leave a guard page between mappings.
    NEXT.set(Some(address + (len + PAGE) as u64));
    Some(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    #[test]
    fn single_mapping_fails() {
        let none = fail_after(Some(1));
        let made: Vec<bool> = (0..3).map(|_| Memory::new(1).is_ok()).collect();
        assert_eq!((none, made), (None, vec![true, false, true]));
        assert_eq!(fail_after(Some(5)), None, "it has failed");
        let _made = Memory::new(1).unwrap();
        assert_eq!(fail_after(None), Some(4), "one of them was made");
        assert!(Memory::new(1).is_ok());
    }

    #[test]
    fn simulated_addresses_are_reproducible() {
        let run = || {
            addresses(|| {
                let made = [5000, 1].map(|len| Memory::new(len).unwrap());
                made[1].write(0, &[7]);
                assert_eq!(made[1].slice(0..1).unwrap().to_vec(), [7]);
                made.map(|memory| memory.addr())
            })
        };
        assert_eq!(run(), [FIRST, FIRST + 3 * PAGE as u64]);
        assert_eq!(run(), run());
        let memory = Memory::new(1).unwrap();
        assert_eq!(memory.addr(), memory.ptr(0) as u64);
    }
}
