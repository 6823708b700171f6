//! Copies of bytes that another thread or a device may be writing.
//!
//! A plain copy of such bytes is a data race, which is undefined behaviour even if every value is
//! acceptable. These copies behave as loops of relaxed loads and stores of single bytes
//! ([`AtomicU8`](std::sync::atomic::AtomicU8)): a byte that is written meanwhile arrives as it was
//! before or after, and nothing is promised about their order.
//!
//! The compiler makes slow code of such loops, so on x86-64 they are the processor's string
//! instructions, which have these semantics and run at the speed of `memcpy`. Elsewhere they go by
//! aligned words. That is stronger than bytes on every machine, but where a range does not begin or
//! end at a word, it mixes accesses of two sizes, about which the language's model is silent.

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use words::{copy, fill, load, store};

/// Copies `len` bytes of shared memory, `src`, to `dst`, which is the caller's own.
///
/// # Safety
/// `src` can be read and `dst` written for `len` bytes, and they do not overlap. Who else accesses
/// `src` meanwhile does so through this module, or is a device.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(src, dst, len) }
}

/// Copies `len` bytes of the caller's own, `src`, to shared memory.
///
/// # Safety
/// As [`load`], with the roles exchanged.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(src, dst, len) }
}

/// Copies `len` bytes of shared memory to shared memory, from the first to the last.
///
/// # Safety
/// As [`load`], on both sides. `dst` is outside of the source or before it.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise; the direction flag is clear by the rules of inline assembly.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") src => _,
            inout("rdi") dst => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Writes `byte` to `len` bytes from `dst` on.
///
/// # Safety
/// As [`store`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) {
    // SAFETY: as in `copy`.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            in("al") byte,
            inout("rdi") dst => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(any(test, not(target_arch = "x86_64")))]
mod words {
    use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

    const WORD: usize = size_of::<usize>();

    /// Whether a word of shared memory lies at `at` and within the next `left` bytes.
    fn is_word(at: *const u8, left: usize) -> bool {
        at.addr().is_multiple_of(WORD) && left >= WORD
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) {
        let mut at = 0;
        while at < len {
            // SAFETY: within both ranges, by the caller's promise; pointers of words are aligned,
            // and the memory is writable for all who share it.
            unsafe {
                let (from, to) = (src.add(at).cast_mut(), dst.add(at));
                if is_word(from, len - at) {
                    let word = AtomicUsize::from_ptr(from.cast()).load(Ordering::Relaxed);
                    to.cast::<usize>().write_unaligned(word);
                    at += WORD;
                } else {
                    to.write(AtomicU8::from_ptr(from).load(Ordering::Relaxed));
                    at += 1;
                }
            }
        }
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) {
        let mut at = 0;
        while at < len {
            // SAFETY: as in `load`.
            unsafe {
                let (from, to) = (src.add(at), dst.add(at));
                if is_word(to, len - at) {
                    let word = from.cast::<usize>().read_unaligned();
                    AtomicUsize::from_ptr(to.cast()).store(word, Ordering::Relaxed);
                    at += WORD;
                } else {
                    AtomicU8::from_ptr(to).store(from.read(), Ordering::Relaxed);
                    at += 1;
                }
            }
        }
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
        let mut at = 0;
        while at < len {
            // SAFETY: as in `load`.
            unsafe {
                let (from, to) = (src.add(at).cast_mut(), dst.add(at));
                if is_word(from, len - at) && is_word(to, len - at) {
                    let word = AtomicUsize::from_ptr(from.cast()).load(Ordering::Relaxed);
                    AtomicUsize::from_ptr(to.cast()).store(word, Ordering::Relaxed);
                    at += WORD;
                } else {
                    let byte = AtomicU8::from_ptr(from).load(Ordering::Relaxed);
                    AtomicU8::from_ptr(to).store(byte, Ordering::Relaxed);
                    at += 1;
                }
            }
        }
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) {
        let word = usize::from_ne_bytes([byte; WORD]);
        let mut at = 0;
        while at < len {
            // SAFETY: as in `load`.
            unsafe {
                let to = dst.add(at);
                if is_word(to, len - at) {
                    AtomicUsize::from_ptr(to.cast()).store(word, Ordering::Relaxed);
                    at += WORD;
                } else {
                    AtomicU8::from_ptr(to).store(byte, Ordering::Relaxed);
                    at += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);
    type Fill = unsafe fn(*mut u8, u8, usize);

    #[test]
    fn every_length_and_alignment_is_copied_and_filled_exactly() {
        let here: [(Copy, Fill); 3] = [(load, fill), (store, fill), (copy, fill)];
        let elsewhere: [(Copy, Fill); 3] = [
            (words::load, words::fill),
            (words::store, words::fill),
            (words::copy, words::fill),
        ];
        let mut src: Vec<u8> = (0..64).collect();
        for (copy, fill) in here.into_iter().chain(elsewhere) {
            for (from, to, len) in
                (0..9).flat_map(|f| (0..9).flat_map(move |t| (0..40).map(move |l| (f, t, l))))
            {
                let mut got = [0xff; 64];
                let mut want = got;
                want[to..to + len].copy_from_slice(&src[from..from + len]);
                // SAFETY: both ranges lie within their arrays.
                unsafe { copy(src[from..].as_mut_ptr(), got[to..].as_mut_ptr(), len) };
                assert_eq!(got, want);
                want[to..to + len].fill(7);
                // SAFETY: as above.
                unsafe { fill(got[to..].as_mut_ptr(), 7, len) };
                assert_eq!(got, want);
            }
        }
    }
}
