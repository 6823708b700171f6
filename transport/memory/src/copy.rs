//! Copies of bytes that another thread or a device may be writing.
//!
//! A plain copy of such bytes is a data race, which is undefined behaviour even if every value is
//! acceptable. These copies behave as loops of relaxed loads and stores of single bytes
//! ([`AtomicU8`](std::sync::atomic::AtomicU8)): a byte that is written meanwhile arrives as it was
//! before or after, and nothing is promised about their order.
//!
//! The compiler merges no atomic accesses, so it makes slow code of such loops. On x86-64 the copies
//! are therefore inline assembly, which means to the language what the loop means, and runs at the
//! speed of `memcpy`: vector registers where there are blocks to fill them with and AVX, the
//! processor's string instructions where there is none, which begin slowly, and the vector
//! registers that every such processor has for what is short. Elsewhere, and for Miri and
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

/// Bytes that four vector registers hold.
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
const BLOCK: usize = 128;

/// Copies `len` bytes of shared memory to shared memory, from the first to the last.
///
/// # Safety
/// As [`load`], on both sides. `dst` is outside of the source or before it.
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    let mut done = 0;
    if len >= BLOCK {
        if !std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the caller's promise.
            return unsafe { copy_string(src, dst, len) };
        }
        done = len / BLOCK * BLOCK;
        // SAFETY: within both ranges, which are not empty; there is AVX.
        unsafe { copy_blocks(src, dst, done) };
    }
    while len - done >= 32 {
        // SAFETY: within both ranges. Both parts are loaded before they are stored.
        unsafe {
            std::arch::asm!(
                "movups {low}, xmmword ptr [{src}]",
                "movups {high}, xmmword ptr [{src} + 16]",
                "movups xmmword ptr [{dst}], {low}",
                "movups xmmword ptr [{dst} + 16], {high}",
                src = in(reg) src.add(done),
                dst = in(reg) dst.add(done),
                low = out(xmm_reg) _,
                high = out(xmm_reg) _,
                options(nostack, preserves_flags)
            );
        }
        done += 32;
    }
    // SAFETY: within both ranges, of which less than 32 bytes are left.
    unsafe { copy_rest(src.add(done), dst.add(done), len - done) };
}

/// [`copy`] of less than 32 bytes: one step for each bit of the length, from the largest.
///
/// # Safety
/// As [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
#[inline]
unsafe fn copy_rest(src: *const u8, dst: *mut u8, len: usize) {
    // Each step loads what it moves before it stores that.
    macro_rules! step {
        ($bytes:literal, $class:ident, $load:literal, $store:literal) => {
            if len & $bytes != 0 {
                let done = len & !(2 * $bytes - 1);
                // SAFETY: the caller's promise: the steps before this one have moved `done` bytes.
                unsafe {
                    std::arch::asm!(
                        $load,
                        $store,
                        src = in(reg) src.add(done),
                        dst = in(reg) dst.add(done),
                        part = out($class) _,
                        options(nostack, preserves_flags)
                    );
                }
            }
        };
    }
    step!(
        16,
        xmm_reg,
        "movups {part}, xmmword ptr [{src}]",
        "movups xmmword ptr [{dst}], {part}"
    );
    step!(
        8,
        reg,
        "mov {part}, qword ptr [{src}]",
        "mov qword ptr [{dst}], {part}"
    );
    step!(
        4,
        reg,
        "mov {part:e}, dword ptr [{src}]",
        "mov dword ptr [{dst}], {part:e}"
    );
    step!(
        2,
        reg,
        "mov {part:x}, word ptr [{src}]",
        "mov word ptr [{dst}], {part:x}"
    );
    step!(
        1,
        reg_byte,
        "mov {part}, byte ptr [{src}]",
        "mov byte ptr [{dst}], {part}"
    );
}

/// [`copy`] with the string instruction.
///
/// # Safety
/// As [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
unsafe fn copy_string(src: *const u8, dst: *mut u8, len: usize) {
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

/// [`copy`] of whole blocks, each of which is loaded before it is stored.
///
/// # Safety
/// As [`copy`]. `len` is a multiple of [`BLOCK`] and not 0, and the processor has AVX.
#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
unsafe fn copy_blocks(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise; both pointers stay within their ranges or at their ends, and
    // the loop ends after `len` bytes.
    unsafe {
        std::arch::asm!(
            // One register counts from minus the length to zero for both sides.
            "2:",
            "vmovdqu ymm0, ymmword ptr [{src} + {at}]",
            "vmovdqu ymm1, ymmword ptr [{src} + {at} + 32]",
            "vmovdqu ymm2, ymmword ptr [{src} + {at} + 64]",
            "vmovdqu ymm3, ymmword ptr [{src} + {at} + 96]",
            "vmovdqu ymmword ptr [{dst} + {at}], ymm0",
            "vmovdqu ymmword ptr [{dst} + {at} + 32], ymm1",
            "vmovdqu ymmword ptr [{dst} + {at} + 64], ymm2",
            "vmovdqu ymmword ptr [{dst} + {at} + 96], ymm3",
            "add {at}, {block}",
            "jnz 2b",
            // Code that knows nothing of AVX runs next, and would be slowed down.
            "vzeroupper",
            src = in(reg) src.add(len),
            dst = in(reg) dst.add(len),
            at = inout(reg) len.wrapping_neg() => _,
            block = const BLOCK,
            out("ymm0") _,
            out("ymm1") _,
            out("ymm2") _,
            out("ymm3") _,
            // The upper halves of these are cleared, too.
            out("ymm4") _,
            out("ymm5") _,
            out("ymm6") _,
            out("ymm7") _,
            out("ymm8") _,
            out("ymm9") _,
            out("ymm10") _,
            out("ymm11") _,
            out("ymm12") _,
            out("ymm13") _,
            out("ymm14") _,
            out("ymm15") _,
            options(nostack)
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
    fn long_ranges_are_copied_exactly_also_where_they_overlap() {
        let copies: [Copy; 2] = [copy, bytes::copy];
        let src: Vec<u8> = (0..1024u32).map(|i| (i * i + i / 7) as u8).collect();
        for copy in copies {
            for (ahead, len) in [0, 1, 7, 8, 33, 127, 128, 129, 400]
                .into_iter()
                .flat_map(|ahead| (100..=600).step_by(31).map(move |len| (ahead, len)))
            {
                let mut got = src.clone();
                let mut want = src.clone();
                want.copy_within(3 + ahead..3 + ahead + len, 3);
                let at = got.as_mut_ptr();
                // SAFETY: both ranges lie within the array, the destination before the source.
                unsafe { copy(at.add(3 + ahead), at.add(3), len) };
                assert!(got == want, "{ahead} {len}");
            }
        }
    }

    #[test]
    #[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
    fn what_processors_without_avx_run_is_exact_too() {
        let src: Vec<u8> = (0..200).collect();
        let mut got = vec![0; 200];
        // SAFETY: both ranges lie within their arrays.
        unsafe { copy_string(src.as_ptr(), got.as_mut_ptr(), 199) };
        assert_eq!((&got[..199], got[199]), (&src[..199], 0));
    }

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
