//! Copies of bytes that another thread or a device may be writing.
//!
//! A plain copy of such bytes is a data race, which is undefined behaviour even if every value is
//! acceptable. These copies behave as loops of relaxed loads and stores of single bytes
//! ([`AtomicU8`](std::sync::atomic::AtomicU8)): a byte that is written meanwhile arrives as it was
//! before or after, and nothing is promised about their order.
//!
//! The compiler merges no atomic accesses, so it makes slow code of such loops. On x86-64 the copies
//! are therefore the processor's string instructions: inline assembly, which means to the language
//! what the loop means, and runs at the speed of `memcpy`. Elsewhere, and for Miri and
//! ThreadSanitizer, which see no assembly (feature `loops`), they are the loops. Loops over words
//! would be faster, but where two ranges overlap and do not begin at the same word, accesses of
//! different sizes race, which the language's model does not allow ([`std::sync::atomic`], *Memory
//! model for atomic accesses*). Volatile accesses, as in `vm-memory` and crosvm, race as plain ones
//! do by that model. RFC 3301 (`AtomicPerByte`) describes what is here, and is not in the language
//! yet.

#[cfg(any(miri, feature = "loops", not(target_arch = "x86_64")))]
pub(crate) use bytes::{copy, fill, load, store};

/// Copies `len` bytes of shared memory, `src`, to `dst`, which is the caller's own.
///
/// # Safety
/// `src` can be read and `dst` written for `len` bytes, and they do not overlap. Who else accesses
/// `src` meanwhile does so through this module, or is a device.
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(src, dst, len) }
}

/// Copies `len` bytes of the caller's own, `src`, to shared memory.
///
/// # Safety
/// As [`load`], with the roles exchanged.
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(src, dst, len) }
}

/// Copies `len` bytes of shared memory to shared memory, from the first to the last.
///
/// # Safety
/// As [`load`], on both sides. `dst` is outside of the source or before it.
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
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
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
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

#[cfg(any(test, miri, feature = "loops", not(target_arch = "x86_64")))]
mod bytes {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) {
        for at in 0..len {
            // SAFETY: within both ranges, by the caller's promise; the memory is writable for all
            // who share it.
            unsafe { dst.add(at).write(shared(src.add(at)).load(Relaxed)) };
        }
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(src.add(at).read(), Relaxed) };
        }
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(shared(src.add(at)).load(Relaxed), Relaxed) };
        }
    }

    /// As on x86-64.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(byte, Relaxed) };
        }
    }

    /// # Safety
    /// The byte is shared memory, and all access to it is atomic as long as the reference is used.
    unsafe fn shared<'a>(at: *const u8) -> &'a AtomicU8 {
        // SAFETY: the caller's promise.
        unsafe { AtomicU8::from_ptr(at.cast_mut()) }
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
            (bytes::load, bytes::fill),
            (bytes::store, bytes::fill),
            (bytes::copy, bytes::fill),
        ];
        let mut src: Vec<u8> = (0..64).collect();
        for (copy, fill) in here.into_iter().chain(elsewhere) {
            // Interpreted, a few do.
            let step = if cfg!(miri) { 7 } else { 1 };
            let every = |end| (0..end).step_by(step);
            for (from, to, len) in
                every(9).flat_map(|f| every(9).flat_map(move |t| every(40).map(move |l| (f, t, l))))
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
