//! Addresses of memory that are the same in each run, and mappings that fail.
//!
//! Peers get the addresses of registered memory, so they are in packets, and a run could not be
//! repeated byte by byte with those of the process. A device need not know memory by its virtual
//! address; the software NIC translates what it is given.

use std::cell::Cell;

use crate::PAGE;

/// The first address: none that a process of Linux could have, so that one used as a pointer faults.
const FIRST: u64 = 1 << 56;

thread_local! {
    /// Mappings that this thread may still make before one fails, while that is so; all it makes
    /// count down.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The next address, in a simulation.
    static NEXT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Gives mappings that this thread makes in `run` addresses in the order of their making. Only
/// devices that are simulated as well can use them.
pub fn addresses<T>(run: impl FnOnce() -> T) -> T {
    /// Ends it by a panic as well.
    struct Before(Option<u64>);
    impl Drop for Before {
        fn drop(&mut self) {
            NEXT.set(self.0);
        }
    }
    let _before = Before(NEXT.replace(Some(FIRST)));
    run()
}

/// Has a mapping of this thread fail by `ENOMEM`, once: the one after so many. `None` has none fail.
/// Returns how many the thread would still have made before the one that was to fail until now;
/// `None` if that has failed, or none was to.
pub fn fail_after(mappings: Option<usize>) -> Option<usize> {
    LEFT.replace(mappings)
}

/// Takes a mapping; returns whether it fails.
pub(crate) fn fails() -> bool {
    let Some(left) = LEFT.get() else {
        return false;
    };
    LEFT.set(left.checked_sub(1));
    left == 0
}

/// An address for a mapping, in a simulation.
pub(crate) fn take(len: usize) -> Option<u64> {
    let address = NEXT.get()?;
    // A page between two, which is no one's.
    NEXT.set(Some(address + (len + PAGE) as u64));
    Some(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;

    #[test]
    fn one_mapping_fails_and_those_around_it_do_not() {
        let none = fail_after(Some(1));
        let made: Vec<bool> = (0..3).map(|_| Memory::new(1).is_ok()).collect();
        assert_eq!((none, made), (None, vec![true, false, true]));
        assert_eq!(fail_after(Some(5)), None, "it has failed");
        let _made = Memory::new(1).unwrap();
        assert_eq!(fail_after(None), Some(4), "one of them was made");
        assert!(Memory::new(1).is_ok());
    }

    #[test]
    fn addresses_are_the_same_in_each_run_and_nowhere_else() {
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
