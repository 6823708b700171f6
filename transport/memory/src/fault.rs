//! Makes accesses to unmapped memory return errors instead of raising signals.
//!
//! The owner of a foreign range may unmap it while it is registered, and a file may be truncated
//! while it is mapped. A copy will then raise SIGSEGV or SIGBUS. After [`catch`] was called, there
//! is a handler for both signals. If the instruction belongs to one of this crate's copies, the
//! handler makes the copy return an error, like the kernel does if it copies from a program's
//! memory and fails. This adds no overhead to copies.
//!
//! Other signals are passed on to the previous action, so a program that has installed its handler
//! first keeps it. If a program installs a handler later, it replaces ours. If this handler calls
//! the previous action, as fault handlers should, faults of copies are still caught. Otherwise it
//! has to handle them itself.
//!
//! A failed read returns zeros, and a failed write is lost. In both cases the
//! [`Memory`](crate::Memory) is marked ([`Memory::has_faulted`](crate::Memory::has_faulted)) and
//! [`count`] is incremented.

use std::io;
use std::mem::{MaybeUninit, transmute, zeroed};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy;

/// Signals raised by failed accesses.
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// `BUS_MCEERR_AO` of `asm-generic/siginfo.h`: a warning about memory that is not being accessed.
const BUS_MCEERR_AO: libc::c_int = 5;

static COUNT: AtomicU64 = AtomicU64::new(0);

/// Previous actions, in the order of [`SIGNALS`].
static PREVIOUS: OnceLock<[libc::sigaction; 2]> = OnceLock::new();

/// Returns the number of failed accesses to foreign ranges in this process.
#[inline]
#[must_use]
pub fn count() -> u64 {
    COUNT.load(Ordering::Acquire)
}

/// Counts a failed access.
pub(crate) fn note() {
    COUNT.fetch_add(1, Ordering::AcqRel);
}

/// Installs the handlers, once per process.
///
/// # Errors
/// Returns [`io::ErrorKind::Unsupported`] if copies are loops, for example on other processors than
/// x86-64, and errors of `sigaction(2)`.
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
    // The previous actions must be stored before a handler is installed, because it uses them.
    let [first, second] = SIGNALS.map(|signal| exchange(signal, None));
    let _ = PREVIOUS.set([first?, second?]);
    for signal in SIGNALS {
        exchange(signal, Some(&action()))?;
    }
    Ok(())
}

/// Returns the action that catches faults.
fn action() -> libc::sigaction {
    // SAFETY: all zeroes is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = on_fault as *const () as usize;
    // Another fault of the same copy can only happen after the handler has returned. We need a
    // separate stack, because the fault may be a stack overflow.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    action
}

/// Returns the action of a signal, and replaces it if there is a new action.
fn exchange(signal: libc::c_int, new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    let new = new.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: a new action is either the default or a handler that is async-signal-safe.
    match unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) } {
        // SAFETY: initialized by the call.
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
    // Otherwise the signal was sent by a process, and no instruction has failed.
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
    // SAFETY: all zeroes is the default action.
    let default = unsafe { zeroed::<libc::sigaction>() };
    let at = SIGNALS.iter().position(|s| *s == signal).unwrap_or(0);
    let previous = PREVIOUS.get().map_or(default, |all| all[at]);
    match previous.sa_sigaction {
        // The missing memory has not been accessed yet.
        libc::SIG_DFL | libc::SIG_IGN if is_warning => {}
        libc::SIG_IGN if !is_fault => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction is executed again and fails again. A signal that was sent is sent
            // again, and is delivered when this handler returns.
            let _ = exchange(signal, Some(&default));
            if !is_fault {
                // SAFETY: no preconditions.
                unsafe { libc::raise(signal) };
            }
        }
        _ => {
            // SAFETY: the program has installed it for this signal.
            unsafe { pass_on(&previous, signal, info, context) };
            // The handler of Rust's runtime restores the default action, so that the instruction
            // fails again. But in this case no instruction has failed, so we install our handler
            // again.
            if is_warning {
                let _ = exchange(signal, Some(&action()));
            }
        }
    }
}

/// Calls a handler like the kernel does.
///
/// # Safety
/// `action` must contain a handler for this signal, and the other arguments must have been passed
/// by the kernel.
unsafe fn pass_on(
    action: &libc::sigaction,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let has = |flag| action.sa_flags & flag != 0;
    // SAFETY: the sets are valid. The kernel restores the previous mask when its handler, which is
    // ours, returns. The address is that of a function with the type indicated by the flag.
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

    /// Selects the part of a test that runs in a separate process.
    const CHILD: &str = "RISER_TEST_FAULT_CHILD";

    /// Returns a foreign range of two pages. The first page can be read and written. The second
    /// page has the given protection, or is a hole.
    fn torn(second: Option<libc::c_int>) -> Memory {
        catch().unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let all = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: this is a new mapping, and its second page is not used.
        unsafe {
            let base = libc::mmap(ptr::null_mut(), 2 * PAGE, all, flags, -1, 0).cast::<u8>();
            assert_ne!(base.cast(), libc::MAP_FAILED);
            base.write_bytes(7, 2 * PAGE);
            let page = base.add(PAGE).cast();
            let done = match second {
                // A hole that won't be used by other mappings.
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
    fn read_of_unmapped_page_returns_zeros() {
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
    fn write_to_unmapped_page_is_lost() {
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
    fn concurrent_copies_recover_from_faults() {
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

    /// Runs part `part` of a test of this module in a separate process.
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

    /// Accesses unmapped memory without using a copy.
    fn fault() {
        let memory = torn(None);
        // SAFETY: this raises a signal.
        unsafe { memory.ptr(PAGE).read_volatile() };
    }

    #[test]
    fn other_faults_terminate_process() {
        let name = "other_faults_terminate_process";
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
                // Rust's runtime has its own handlers.
                for signal in SIGNALS {
                    // SAFETY: all zeroes is the default action.
                    exchange(signal, Some(&unsafe { zeroed() })).unwrap();
                }
                catch().unwrap();
                match part.parse() {
                    // SAFETY: no preconditions.
                    Ok(signal) => drop(unsafe { libc::raise(signal) }),
                    Err(_) => fault(),
                }
            }
        }
    }

    extern "C" fn print_signal(signal: libc::c_int) {
        let _ = writeln!(io::stderr(), "handler of {signal}");
        // SAFETY: no preconditions.
        unsafe { libc::_exit(3) };
    }

    extern "C" fn says_where(
        signal: libc::c_int,
        info: *mut libc::siginfo_t,
        _: *mut libc::c_void,
    ) {
        // SAFETY: the structure is passed by the kernel.
        assert_ne!(unsafe { (*info).si_addr() }, ptr::null_mut());
        print_signal(signal);
    }

    #[test]
    fn previous_handler_receives_other_faults() {
        let name = "previous_handler_receives_other_faults";
        // SAFETY: all zeroes is a valid action.
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
            Some("plain") => action.sa_sigaction = print_signal as *const () as usize,
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
    fn chained_handler_keeps_copies_safe() {
        static FOUND: OnceLock<libc::sigaction> = OnceLock::new();
        extern "C" fn chains(s: libc::c_int, i: *mut libc::siginfo_t, c: *mut libc::c_void) {
            // SAFETY: this is called like the kernel would call it.
            unsafe { pass_on(FOUND.get().unwrap(), s, i, c) };
        }
        let name = "chained_handler_keeps_copies_safe";
        if part().is_none() {
            let output = run(name, "later");
            return assert!(output.status.success(), "{output:?}");
        }
        let memory = torn(None);
        // SAFETY: all zeroes is a valid action.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = chains as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let _ = FOUND.set(exchange(libc::SIGSEGV, Some(&action)).unwrap());
        memory.read(PAGE, &mut [0; 8]);
        assert!(memory.has_faulted());
    }

    #[test]
    fn memory_warning_is_ignored() {
        catch().unwrap();
        // SAFETY: all zeroes is valid, and a process may send any signal to itself.
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
