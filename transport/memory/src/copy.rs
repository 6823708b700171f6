//! Copying of bytes that may be written concurrently by another thread or a device.
//!
//! A plain copy of such bytes is a data race, which is undefined behavior even if any value would
//! be acceptable. These copies behave like loops of relaxed loads and stores of single bytes
//! ([`AtomicU8`](std::sync::atomic::AtomicU8)): for a byte that is written concurrently, either the
//! old or the new value is copied, and there are no guarantees about the order of bytes.
//!
//! The compiler does not merge atomic accesses, so such loops are slow. On x86-64, we use assembly
//! instead. It has the semantics of the loop, but is as fast as `memcpy`: for ranges of at least
//! one block it uses long vector registers if AVX is available, otherwise the short vector
//! registers that every x86-64 processor has. It's a single block of code, so that a signal handler
//! can tell from the address of an instruction that a copy has failed (`fault`). On other
//! architectures, and for Miri and ThreadSanitizer, which don't support assembly (feature `loops`),
//! we use loops. Loops over words would be faster, but if two ranges overlap with different
//! alignment, accesses of different sizes would race, which the language's memory model does not
//! allow ([`std::sync::atomic`], *Memory model for atomic accesses*). According to this model,
//! volatile accesses, as used by `vm-memory` and crosvm, are data races like plain accesses. RFC
//! 3301 (`AtomicPerByte`) proposes these semantics, but is not part of the language yet.

#[cfg(any(miri, feature = "loops", not(target_arch = "x86_64")))]
pub(crate) use bytes::{copy, fill, load, store};

#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
pub(crate) use assembly::{copy, fill, landing, load, store};

/// Whether copies can return an error if faults are caught (`fault`).
pub(crate) const CAN_FAIL: bool = cfg!(all(
    target_arch = "x86_64",
    not(miri),
    not(feature = "loops")
));

/// Returns where to continue after a copy has failed at this address. Loops never fail in this way.
#[cfg(all(target_arch = "x86_64", any(miri, feature = "loops")))]
pub(crate) fn landing(_: usize) -> Option<usize> {
    None
}

#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
mod assembly {
    /// Size of four vector registers in bytes.
    const BLOCK: usize = 128;

    // Only the return address is on the stack, so a fault at any instruction can return directly to
    // the caller. Each step loads all of its bytes before it stores them.
    std::arch::global_asm!(
        ".pushsection .text.riser_memory_copy, \"ax\", @progbits",
        ".hidden riser_memory_copy_avx",
        ".hidden riser_memory_copy",
        ".hidden riser_memory_fill",
        ".hidden riser_memory_fault_avx",
        ".hidden riser_memory_fault",
        ".globl riser_memory_copy_avx",
        ".globl riser_memory_copy",
        ".globl riser_memory_fill",
        ".globl riser_memory_fault_avx",
        ".globl riser_memory_fault",
        ".balign 64",
        "riser_memory_copy_avx:",
        ".cfi_startproc",
        "mov rax, rdx",
        "and rax, -{block}",
        "add rdi, rax",
        "add rsi, rax",
        // One index for both ranges counts from minus the length to zero.
        "neg rax",
        ".balign 16",
        "2:",
        "vmovdqu ymm0, ymmword ptr [rsi + rax]",
        "vmovdqu ymm1, ymmword ptr [rsi + rax + 32]",
        "vmovdqu ymm2, ymmword ptr [rsi + rax + 64]",
        "vmovdqu ymm3, ymmword ptr [rsi + rax + 96]",
        "vmovdqu ymmword ptr [rdi + rax], ymm0",
        "vmovdqu ymmword ptr [rdi + rax + 32], ymm1",
        "vmovdqu ymmword ptr [rdi + rax + 64], ymm2",
        "vmovdqu ymmword ptr [rdi + rax + 96], ymm3",
        "add rax, {block}",
        "jnz 2b",
        // The code that runs next may not use AVX, and would be slowed down.
        "vzeroupper",
        "and edx, {block} - 1",
        ".cfi_endproc",
        // The remaining bytes, and short ranges.
        "riser_memory_copy:",
        ".cfi_startproc",
        "3:",
        "cmp rdx, 32",
        "jb 4f",
        "movups xmm0, xmmword ptr [rsi]",
        "movups xmm1, xmmword ptr [rsi + 16]",
        "movups xmmword ptr [rdi], xmm0",
        "movups xmmword ptr [rdi + 16], xmm1",
        "add rsi, 32",
        "add rdi, 32",
        "sub rdx, 32",
        "jmp 3b",
        // One step for each bit of the remaining length, from the largest.
        "4:",
        "test dl, 16",
        "jz 5f",
        "movups xmm0, xmmword ptr [rsi]",
        "movups xmmword ptr [rdi], xmm0",
        "add rsi, 16",
        "add rdi, 16",
        "5:",
        "test dl, 8",
        "jz 6f",
        "mov rax, qword ptr [rsi]",
        "mov qword ptr [rdi], rax",
        "add rsi, 8",
        "add rdi, 8",
        "6:",
        "test dl, 4",
        "jz 7f",
        "mov eax, dword ptr [rsi]",
        "mov dword ptr [rdi], eax",
        "add rsi, 4",
        "add rdi, 4",
        "7:",
        "test dl, 2",
        "jz 8f",
        "movzx eax, word ptr [rsi]",
        "mov word ptr [rdi], ax",
        "add rsi, 2",
        "add rdi, 2",
        "8:",
        "test dl, 1",
        "jz 9f",
        "movzx eax, byte ptr [rsi]",
        "mov byte ptr [rdi], al",
        "9:",
        "mov eax, 1",
        "ret",
        ".cfi_endproc",
        "riser_memory_fill:",
        ".cfi_startproc",
        "mov eax, esi",
        "mov rcx, rdx",
        "rep stosb",
        "mov eax, 1",
        "ret",
        ".cfi_endproc",
        "riser_memory_fault_avx:",
        ".cfi_startproc",
        "vzeroupper",
        ".cfi_endproc",
        "riser_memory_fault:",
        ".cfi_startproc",
        "xor eax, eax",
        "ret",
        ".cfi_endproc",
        ".popsection",
        block = const BLOCK,
    );

    // SAFETY: defined above.
    unsafe extern "C" {
        /// Copies at least [`BLOCK`] bytes using AVX.
        fn riser_memory_copy_avx(dst: *mut u8, src: *const u8, len: usize) -> bool;
        /// Copies any number of bytes.
        fn riser_memory_copy(dst: *mut u8, src: *const u8, len: usize) -> bool;
        fn riser_memory_fill(dst: *mut u8, byte: u8, len: usize) -> bool;
        /// Where execution continues after a fault in the first function, or in the other
        /// functions. They return `false`.
        fn riser_memory_fault_avx() -> bool;
        fn riser_memory_fault() -> bool;
    }

    /// Returns where to continue after a copy has failed at this address, or `None` if it is not
    /// part of a copy.
    pub(crate) fn landing(at: usize) -> Option<usize> {
        let avx = riser_memory_copy_avx as *const () as usize;
        let copy = riser_memory_copy as *const () as usize;
        let fault_avx = riser_memory_fault_avx as *const () as usize;
        if (avx..copy).contains(&at) {
            Some(fault_avx)
        } else if (copy..fault_avx).contains(&at) {
            Some(riser_memory_fault as *const () as usize)
        } else {
            None
        }
    }

    /// Copies `len` bytes of shared memory at `src` to private memory at `dst`. If faults are
    /// caught ([`crate::fault`]), this returns `false` if a byte is not mapped. In this case a part
    /// of `dst` may have been written.
    ///
    /// # Safety
    /// `src` must be readable and `dst` writable for `len` bytes, unless faults are caught, and
    /// they must not overlap. Concurrent accesses to `src` must use this module or come from a
    /// device.
    #[must_use]
    pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { copy(src, dst, len) }
    }

    /// Copies `len` bytes of private memory at `src` to shared memory. Returns `false` like
    /// [`load`].
    ///
    /// # Safety
    /// Same as for [`load`], with the roles swapped.
    #[must_use]
    pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { copy(src, dst, len) }
    }

    /// Copies `len` bytes from shared memory to shared memory, from first to last. Returns `false`
    /// like [`load`].
    ///
    /// # Safety
    /// Same as for [`load`], on both sides. `dst` must be outside of the source or before it.
    #[must_use]
    pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) -> bool {
        if len >= BLOCK && std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: guaranteed by the caller. AVX is available, and there is at least one block.
            unsafe { riser_memory_copy_avx(dst, src, len) }
        } else {
            // SAFETY: guaranteed by the caller.
            unsafe { riser_memory_copy(dst, src, len) }
        }
    }

    /// Sets `len` bytes starting at `dst` to `byte`. Returns `false` like [`load`].
    ///
    /// # Safety
    /// Same as for [`store`].
    #[must_use]
    pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { riser_memory_fill(dst, byte, len) }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn copy_without_avx_is_exact() {
            let src: Vec<u8> = (0..200).collect();
            let mut got = vec![0; 200];
            // SAFETY: both ranges are within their arrays.
            assert!(unsafe { riser_memory_copy(got.as_mut_ptr(), src.as_ptr(), 199) });
            assert_eq!((&got[..199], got[199]), (&src[..199], 0));
        }
    }
}

#[cfg(any(test, miri, feature = "loops", not(target_arch = "x86_64")))]
mod bytes {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// Same as on x86-64, but does not catch faults.
    ///
    /// # Safety
    /// Same as on x86-64.
    #[must_use]
    pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: the bytes are within both ranges, as guaranteed by the caller. Shared memory
            // is always writable.
            unsafe { dst.add(at).write(shared(src.add(at)).load(Relaxed)) };
        }
        true
    }

    /// Same as on x86-64, but does not catch faults.
    ///
    /// # Safety
    /// Same as on x86-64.
    #[must_use]
    pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(src.add(at).read(), Relaxed) };
        }
        true
    }

    /// Same as on x86-64, but does not catch faults.
    ///
    /// # Safety
    /// Same as on x86-64.
    #[must_use]
    pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(shared(src.add(at)).load(Relaxed), Relaxed) };
        }
        true
    }

    /// Same as on x86-64, but does not catch faults.
    ///
    /// # Safety
    /// Same as on x86-64.
    #[must_use]
    pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(byte, Relaxed) };
        }
        true
    }

    /// # Safety
    /// The byte must be shared memory, and all accesses to it must be atomic while the reference is
    /// in use.
    unsafe fn shared<'a>(at: *const u8) -> &'a AtomicU8 {
        // SAFETY: guaranteed by the caller.
        unsafe { AtomicU8::from_ptr(at.cast_mut()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize) -> bool;
    type Fill = unsafe fn(*mut u8, u8, usize) -> bool;

    #[test]
    fn long_and_overlapping_ranges_are_copied_exactly() {
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
                // SAFETY: both ranges are within the array, the destination before the source.
                let copied = unsafe { copy(at.add(3 + ahead), at.add(3), len) };
                assert!(copied && got == want, "{ahead} {len}");
            }
        }
    }

    #[test]
    fn copy_and_fill_support_any_alignment() {
        let here: [(Copy, Fill); 3] = [(load, fill), (store, fill), (copy, fill)];
        let elsewhere: [(Copy, Fill); 3] = [
            (bytes::load, bytes::fill),
            (bytes::store, bytes::fill),
            (bytes::copy, bytes::fill),
        ];
        let mut src: Vec<u8> = (0..64).collect();
        for (copy, fill) in here.into_iter().chain(elsewhere) {
            // Miri is slow, so we only test some of them.
            let step = if cfg!(miri) { 7 } else { 1 };
            let every = |end| (0..end).step_by(step);
            for (from, to, len) in
                every(9).flat_map(|f| every(9).flat_map(move |t| every(40).map(move |l| (f, t, l))))
            {
                let mut got = [0xff; 64];
                let mut want = got;
                want[to..to + len].copy_from_slice(&src[from..from + len]);
                // SAFETY: both ranges are within their arrays.
                let copied = unsafe { copy(src[from..].as_mut_ptr(), got[to..].as_mut_ptr(), len) };
                assert_eq!((copied, got), (true, want));
                want[to..to + len].fill(7);
                // SAFETY: as above.
                let filled = unsafe { fill(got[to..].as_mut_ptr(), 7, len) };
                assert_eq!((filled, got), (true, want));
            }
        }
    }
}
