//! Copies of bytes that another thread or a device may be writing.
//!
//! A plain copy of such bytes is a data race, which is undefined behaviour even if every value is
//! acceptable. These copies behave as loops of relaxed loads and stores of single bytes
//! ([`AtomicU8`](std::sync::atomic::AtomicU8)): a byte that is written meanwhile arrives as it was
//! before or after, and nothing is promised about their order.
//!
//! The compiler merges no atomic accesses, so it makes slow code of such loops. On x86-64 the copies
//! are therefore assembly, which means to the language what the loop means, and runs at the speed of
//! `memcpy`: long vector registers where there are blocks to fill them with and AVX, the short ones
//! that every such processor has otherwise. It is in one piece, so that a handler of signals knows
//! by the address of an instruction that a copy has failed (`fault`). Elsewhere, and for Miri and
//! ThreadSanitizer, which see no assembly (feature `loops`), they are the loops. Loops over words
//! would be faster, but where two ranges overlap and do not begin at the same word, accesses of
//! different sizes race, which the language's model does not allow ([`std::sync::atomic`], *Memory
//! model for atomic accesses*). Volatile accesses, as in `vm-memory` and crosvm, race as plain ones
//! do by that model. RFC 3301 (`AtomicPerByte`) describes what is here, and is not in the language
//! yet.

#[cfg(any(miri, feature = "loops", not(target_arch = "x86_64")))]
pub(crate) use bytes::{copy, fill, load, store};

#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
pub(crate) use assembly::{copy, fill, landing, load, store};

/// Whether copies return that they have failed, where faults are caught (`fault`).
pub(crate) const CAN_FAIL: bool = cfg!(all(
    target_arch = "x86_64",
    not(miri),
    not(feature = "loops")
));

/// Where a copy goes on that failed at an instruction, as no loop does.
#[cfg(all(target_arch = "x86_64", any(miri, feature = "loops")))]
pub(crate) fn landing(_: usize) -> Option<usize> {
    None
}

#[cfg(all(target_arch = "x86_64", not(miri), not(feature = "loops")))]
mod assembly {
    /// Bytes that four vector registers hold.
    const BLOCK: usize = 128;

    // Nothing is on the stack but the return address, so that a fault at any instruction may return
    // to the caller. Every step loads what it moves before it stores that.
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
        // One register counts from minus the length to zero for both sides.
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
        // Code that knows nothing of AVX runs next, and would be slowed down.
        "vzeroupper",
        "and edx, {block} - 1",
        ".cfi_endproc",
        // The rest, and what is short.
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
        // One step for each bit of what is left, from the largest.
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
        /// Copies at least [`BLOCK`] bytes, with AVX.
        fn riser_memory_copy_avx(dst: *mut u8, src: *const u8, len: usize) -> bool;
        /// Copies any number of bytes.
        fn riser_memory_copy(dst: *mut u8, src: *const u8, len: usize) -> bool;
        fn riser_memory_fill(dst: *mut u8, byte: u8, len: usize) -> bool;
        /// Where a fault of the first, and of the others, goes on: at what returns `false`.
        fn riser_memory_fault_avx() -> bool;
        fn riser_memory_fault() -> bool;
    }

    /// Where a copy goes on that failed at the instruction at an address; `None` if that is of no
    /// copy.
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

    /// Copies `len` bytes of shared memory, `src`, to `dst`, which is the caller's own. `false` if a
    /// byte is not mapped, where faults are caught ([`crate::fault`]): part of `dst` may have been
    /// written then.
    ///
    /// # Safety
    /// `src` can be read and `dst` written for `len` bytes, or faults are caught, and they do not
    /// overlap. Who else accesses `src` meanwhile does so through this module, or is a device.
    #[must_use]
    pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { copy(src, dst, len) }
    }

    /// Copies `len` bytes of the caller's own, `src`, to shared memory. `false` as of [`load`].
    ///
    /// # Safety
    /// As [`load`], with the roles exchanged.
    #[must_use]
    pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { copy(src, dst, len) }
    }

    /// Copies `len` bytes of shared memory to shared memory, from the first to the last. `false` as
    /// of [`load`].
    ///
    /// # Safety
    /// As [`load`], on both sides. `dst` is outside of the source or before it.
    #[must_use]
    pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) -> bool {
        if len >= BLOCK && std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the caller's promise; there is AVX, and a block.
            unsafe { riser_memory_copy_avx(dst, src, len) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { riser_memory_copy(dst, src, len) }
        }
    }

    /// Writes `byte` to `len` bytes from `dst` on. `false` as of [`load`].
    ///
    /// # Safety
    /// As [`store`].
    #[must_use]
    pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { riser_memory_fill(dst, byte, len) }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn what_processors_without_avx_run_is_exact_too() {
            let src: Vec<u8> = (0..200).collect();
            let mut got = vec![0; 200];
            // SAFETY: both ranges lie within their arrays.
            assert!(unsafe { riser_memory_copy(got.as_mut_ptr(), src.as_ptr(), 199) });
            assert_eq!((&got[..199], got[199]), (&src[..199], 0));
        }
    }
}

#[cfg(any(test, miri, feature = "loops", not(target_arch = "x86_64")))]
mod bytes {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// As on x86-64, but that no fault is caught.
    ///
    /// # Safety
    /// As there.
    #[must_use]
    pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: within both ranges, by the caller's promise; the memory is writable for all
            // who share it.
            unsafe { dst.add(at).write(shared(src.add(at)).load(Relaxed)) };
        }
        true
    }

    /// As on x86-64, but that no fault is caught.
    ///
    /// # Safety
    /// As there.
    #[must_use]
    pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(src.add(at).read(), Relaxed) };
        }
        true
    }

    /// As on x86-64, but that no fault is caught.
    ///
    /// # Safety
    /// As there.
    #[must_use]
    pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(shared(src.add(at)).load(Relaxed), Relaxed) };
        }
        true
    }

    /// As on x86-64, but that no fault is caught.
    ///
    /// # Safety
    /// As there.
    #[must_use]
    pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) -> bool {
        for at in 0..len {
            // SAFETY: as in `load`.
            unsafe { shared(dst.add(at)).store(byte, Relaxed) };
        }
        true
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

    type Copy = unsafe fn(*const u8, *mut u8, usize) -> bool;
    type Fill = unsafe fn(*mut u8, u8, usize) -> bool;

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
                let copied = unsafe { copy(at.add(3 + ahead), at.add(3), len) };
                assert!(copied && got == want, "{ahead} {len}");
            }
        }
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
