//! Accesses to memory that has gone, as errors instead of signals.
//!
//! The owner of a foreign range may unmap it while it is registered, and a file may be made shorter
//! while it is mapped. A copy then ends in SIGSEGV or SIGBUS. Once [`catch`] was called there is a
//! handler for both: where the instruction is one of this crate's copies, it lets the copy return
//! that it has failed, as the kernel does with its own copies from a program's memory. Copies cost
//! nothing more for that.
//!
//! Every other signal is passed on to the action of before. So a program that installed its handler
//! first keeps it. One that does so later replaces this one: if it calls the action that it has
//! found, as handlers of faults should, faults of copies are still caught; if not, they are its own.
//!
//! A failed read gives zeros, and a failed write is lost. [`Memory`](crate::Memory) remembers that
//! ([`Memory::has_faulted`](crate::Memory::has_faulted)), and [`count`] changes.

use std::io;
use std::mem::{MaybeUninit, transmute, zeroed};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy;

/// Signals of accesses that fail.
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// `BUS_MCEERR_AO` of `asm-generic/siginfo.h`: a warning about memory that is not accessed.
const BUS_MCEERR_AO: libc::c_int = 5;

static COUNT: AtomicU64 = AtomicU64::new(0);

/// Actions of before, in the order of [`SIGNALS`].
static PREVIOUS: OnceLock<[libc::sigaction; 2]> = OnceLock::new();

/// Number of accesses of this process to foreign ranges that have failed.
#[inline]
#[must_use]
pub fn count() -> u64 {
    COUNT.load(Ordering::Acquire)
}

/// Counts an access that has failed.
pub(crate) fn note() {
    COUNT.fetch_add(1, Ordering::AcqRel);
}

/// Installs the handlers, once in a process.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] where copies are loops, as on other processors than x86-64; those
/// of `sigaction(2)`.
pub fn catch() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    if !copy::CAN_FAIL {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let installed = INSTALLED
        .get_or_init(|| install().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL)));
    installed.map_err(io::Error::from_raw_os_error)
}

fn install() -> io::Result<()> {
    // Asked before a handler is there, so that it finds them.
    let [first, second] = SIGNALS.map(|signal| exchange(signal, None));
    let _ = PREVIOUS.set([first?, second?]);
    for signal in SIGNALS {
        exchange(signal, Some(&action()))?;
    }
    Ok(())
}

/// The action that catches faults.
fn action() -> libc::sigaction {
    // SAFETY: all zero is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = on_fault as *const () as usize;
    // Another fault of the same copy can come only after the handler has returned. The stack may be
    // what has run out.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    action
}

/// The action of a signal, which is replaced where there is a new one.
fn exchange(signal: libc::c_int, new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    let new = new.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: a new action is the default, or a handler that does only what is allowed in one.
    match unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) } {
        // SAFETY: filled by the call.
        0 => Ok(unsafe { old.assume_init() }),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes valid structures.
    let code = unsafe { (*info).si_code };
    let is_warning = signal == libc::SIGBUS && code == BUS_MCEERR_AO;
    // Others were sent by a process: no instruction has failed.
    let is_fault = code > 0 && !is_warning;
    #[cfg(target_arch = "x86_64")]
    {
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: as above.
        let counter = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
        let landing = is_fault.then(|| copy::landing(*counter as usize)).flatten();
        if let Some(landing) = landing {
            *counter = landing as i64;
            return;
        }
    }
    // SAFETY: all zero is the default action.
    let default = unsafe { zeroed::<libc::sigaction>() };
    let at = SIGNALS.iter().position(|s| *s == signal).unwrap_or(0);
    let previous = PREVIOUS.get().map_or(default, |all| all[at]);
    match previous.sa_sigaction {
        // Nothing that is accessed is missing yet.
        libc::SIG_DFL | libc::SIG_IGN if is_warning => {}
        libc::SIG_IGN if !is_fault => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction is repeated and fails again; a signal that was sent is sent again,
            // and comes when this returns.
            let _ = exchange(signal, Some(&default));
            if !is_fault {
                // SAFETY: no conditions.
                unsafe { libc::raise(signal) };
            }
        }
        _ => {
            // SAFETY: the program has installed it for this signal.
            unsafe { pass_on(&previous, signal, info, context) };
            // That of Rust's runtime gives up the signal, for the instruction to fail again. Here
            // none has failed.
            if is_warning {
                let _ = exchange(signal, Some(&action()));
            }
        }
    }
}

/// Calls a handler as the kernel would.
///
/// # Safety
/// `action` is a handler's, for this signal, and the others are what the kernel has passed.
unsafe fn pass_on(
    action: &libc::sigaction,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let has = |flag| action.sa_flags & flag != 0;
    // SAFETY: the sets are valid; the mask of before comes back when the handler of the kernel's
    // choice, this one, returns. The address is that of a function of the type that the flag says.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const action.sa_mask, ptr::null_mut());
        if has(libc::SA_NODEFER) {
            let mut own = zeroed();
            libc::sigemptyset(&raw mut own);
            libc::sigaddset(&raw mut own, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const own, ptr::null_mut());
        }
        if has(libc::SA_RESETHAND) {
            let _ = exchange(signal, Some(&zeroed()));
        }
        if has(libc::SA_SIGINFO) {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            transmute::<usize, Handler>(action.sa_sigaction)(signal, info, context);
        } else {
            type Handler = extern "C" fn(libc::c_int);
            transmute::<usize, Handler>(action.sa_sigaction)(signal);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", not(miri), not(feature = "loops")))]
mod tests {
    use std::io::Write;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    use super::*;
    use crate::{Memory, PAGE};

    /// Names the part of a test that runs in a process of its own.
    const CHILD: &str = "RISER_TEST_FAULT_CHILD";

    /// A foreign range of a readable and writable page and one without `protection`, or none.
    fn torn(second: Option<libc::c_int>) -> Memory {
        catch().unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let all = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, of whose second page nothing is used.
        unsafe {
            let base = libc::mmap(ptr::null_mut(), 2 * PAGE, all, flags, -1, 0).cast::<u8>();
            assert_ne!(base.cast(), libc::MAP_FAILED);
            base.write_bytes(7, 2 * PAGE);
            let page = base.add(PAGE).cast();
            let done = match second {
                // A hole that nothing else is mapped to.
                None => libc::mmap(page, PAGE, libc::PROT_NONE, flags | libc::MAP_FIXED, -1, 0),
                Some(protection) => {
                    assert_eq!(libc::mprotect(page, PAGE, protection), 0);
                    page
                }
            };
            assert_eq!(done, page);
            Memory::foreign(base, 2 * PAGE)
        }
    }

    #[test]
    fn a_read_of_what_is_gone_gives_zeros_and_is_counted() {
        for len in (1..300).chain([PAGE - 1]) {
            for before in [0, 1, 16, 31, 130, len].map(|n: usize| n.min(len)) {
                let memory = torn(None);
                let counted = count();
                let mut out = vec![9; len];
                memory.read(PAGE - before, &mut out);
                let is_gone = before < len;
                assert_eq!(memory.has_faulted(), is_gone, "{len} {before}");
                assert_eq!(out, vec![if is_gone { 0 } else { 7 }; len]);
                assert!(!is_gone || count() > counted);
            }
        }
    }

    #[test]
    fn a_write_of_what_is_gone_is_lost_and_all_else_goes_on() {
        let memory = torn(Some(libc::PROT_READ));
        memory.write(0, &[1; 300]);
        assert!(!memory.has_faulted());
        memory.write(PAGE - 5, &[2; 300]);
        assert!(memory.has_faulted(), "it may only be read");
        let mut out = [0; 300];
        memory.read(PAGE, &mut out);
        assert_eq!(out, [7; 300]);
        memory.write(0, &[3; 300]);
        memory.read(0, &mut out);
        assert_eq!(out, [3; 300]);
        memory.fill(PAGE - 1, 2, 4);
        let own = Memory::new(PAGE).unwrap();
        Memory::copy(&own, 0, &memory, PAGE, 200);
        Memory::copy(&torn(None), PAGE - 100, &own, 0, 200);
        let mut sum = 0;
        torn(None)
            .whole()
            .for_each_chunk(|bytes| sum += bytes.len());
        assert_eq!(sum, 2 * PAGE);
    }

    #[test]
    fn threads_that_copy_at_once_all_go_on() {
        let memory = torn(None);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let mut out = [1; 200];
                        memory.read(PAGE - 100, &mut out);
                        assert_eq!(out, [0; 200]);
                    }
                });
            }
        });
    }

    /// Runs a test of this module in a process of its own, for part `part`.
    fn run(test: &str, part: &str) -> Output {
        Command::new(std::env::current_exe().unwrap())
            .args([&format!("fault::tests::{test}"), "--exact", "--nocapture"])
            .env(CHILD, part)
            .output()
            .unwrap()
    }

    fn part() -> Option<String> {
        std::env::var(CHILD).ok()
    }

    /// An access of the program's own to what is not mapped.
    fn fault() {
        let memory = torn(None);
        // SAFETY: it ends in a signal.
        unsafe { memory.ptr(PAGE).read_volatile() };
    }

    #[test]
    fn other_faults_and_signals_that_are_sent_end_the_process_as_before() {
        let name = "other_faults_and_signals_that_are_sent_end_the_process_as_before";
        match part().as_deref() {
            None => {
                for (part, signal) in [
                    ("fault", libc::SIGSEGV),
                    ("11", libc::SIGSEGV),
                    ("7", libc::SIGBUS),
                ] {
                    let output = run(name, part);
                    assert_eq!(output.status.signal(), Some(signal), "{part}: {output:?}");
                }
            }
            Some(part) => {
                // Rust's runtime has handlers of its own.
                for signal in SIGNALS {
                    // SAFETY: all zero is the default action.
                    exchange(signal, Some(&unsafe { zeroed() })).unwrap();
                }
                catch().unwrap();
                match part.parse() {
                    // SAFETY: no conditions.
                    Ok(signal) => drop(unsafe { libc::raise(signal) }),
                    Err(_) => fault(),
                }
            }
        }
    }

    extern "C" fn says(signal: libc::c_int) {
        let _ = writeln!(io::stderr(), "handler of {signal}");
        // SAFETY: no conditions.
        unsafe { libc::_exit(3) };
    }

    extern "C" fn says_where(
        signal: libc::c_int,
        info: *mut libc::siginfo_t,
        _: *mut libc::c_void,
    ) {
        // SAFETY: the kernel's structure.
        assert_ne!(unsafe { (*info).si_addr() }, ptr::null_mut());
        says(signal);
    }

    #[test]
    fn a_handler_that_was_there_before_gets_all_other_faults() {
        let name = "a_handler_that_was_there_before_gets_all_other_faults";
        // SAFETY: all zero is a valid action.
        let mut action: libc::sigaction = unsafe { zeroed() };
        match part().as_deref() {
            None => {
                for part in ["plain", "info"] {
                    let output = run(name, part);
                    assert_eq!(output.status.code(), Some(3), "{output:?}");
                    let said = String::from_utf8_lossy(&output.stderr);
                    assert!(said.contains("handler of 11"), "{said}");
                }
                return;
            }
            Some("plain") => action.sa_sigaction = says as *const () as usize,
            Some(_) => {
                action.sa_sigaction = says_where as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
            }
        }
        exchange(libc::SIGSEGV, Some(&action)).unwrap();
        let memory = torn(None);
        memory.read(PAGE, &mut [0; 8]);
        assert!(memory.has_faulted(), "and not the copies'");
        fault();
    }

    #[test]
    fn a_later_handler_that_calls_the_one_it_has_found_keeps_copies_safe() {
        static FOUND: OnceLock<libc::sigaction> = OnceLock::new();
        extern "C" fn chains(s: libc::c_int, i: *mut libc::siginfo_t, c: *mut libc::c_void) {
            // SAFETY: as the kernel would call it.
            unsafe { pass_on(FOUND.get().unwrap(), s, i, c) };
        }
        let name = "a_later_handler_that_calls_the_one_it_has_found_keeps_copies_safe";
        if part().is_none() {
            let output = run(name, "later");
            return assert!(output.status.success(), "{output:?}");
        }
        let memory = torn(None);
        // SAFETY: all zero is a valid action.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = chains as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let _ = FOUND.set(exchange(libc::SIGSEGV, Some(&action)).unwrap());
        memory.read(PAGE, &mut [0; 8]);
        assert!(memory.has_faulted());
    }

    #[test]
    fn a_warning_about_memory_changes_nothing() {
        catch().unwrap();
        // SAFETY: all zero is valid; a process may send itself any signal.
        unsafe {
            let mut info: libc::siginfo_t = zeroed();
            info.si_signo = libc::SIGBUS;
            info.si_code = BUS_MCEERR_AO;
            let (pid, tid) = (libc::getpid(), libc::gettid());
            let number = libc::SYS_rt_tgsigqueueinfo;
            let sent = libc::syscall(number, pid, tid, libc::SIGBUS, &raw const info);
            assert_eq!(sent, 0);
        }
        let memory = torn(None);
        memory.read(PAGE, &mut [0; 8]);
        assert!(memory.has_faulted());
    }
}
