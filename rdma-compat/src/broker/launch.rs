//! Starting a broker.
//!
//! The library is loaded into programs that may have any number of threads, so after a `fork` in
//! such a program, it is only safe to call `execve`. The broker's program is the library itself,
//! which has an entry point (`riser_broker`) and is executed by the dynamic loader. This allows us
//! to avoid a search for other files, and ensures that the broker has the version of the process
//! that starts it.
//!
//! The program must not notice the new process: it might have a handler for SIGCHLD, or wait for
//! any of its children. So the broker is a child of an intermediate process that exits immediately
//! and does not send a signal. Afterwards, init or another process adopts it.

#[cfg(not(test))]
pub(super) use process::launch;

/// Starts a broker in a thread, because the executable of unit tests is not the library.
#[cfg(test)]
pub(super) fn launch(_: std::net::IpAddr, connection: std::os::fd::OwnedFd) -> std::io::Result<()> {
    crate::thread::spawn("riser-broker".into(), move || {
        super::serve::serve(connection);
    })
}

#[cfg(not(test))]
mod process {
    use std::cell::Cell;
    use std::ffi::{CStr, CString, c_char, c_int, c_long, c_ulong, c_void};
    use std::mem::zeroed;
    use std::net::IpAddr;
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
    use std::{io, ptr};

    use rustix::fs::{Mode, OFlags, open};
    use rustix::io::fcntl_dupfd_cloexec;

    use crate::broker::serve::serve;

    /// Name of the process in lists of processes.
    const NAME: &CStr = c"riser-broker";

    /// Size of a stack in units of 16 bytes.
    const STACK: usize = 1024;

    /// First descriptor after those of the standard streams.
    const FIRST: RawFd = 3;

    /// Limit of the descriptors that are closed individually.
    const MAX_DESCRIPTORS: RawFd = 1 << 16;

    /// Arguments of the new process. It uses the memory of this process until it executes the
    /// loader, while this thread is suspended.
    struct Broker {
        loader: CString,
        arguments: [*const c_char; 4],
        /// The broker's end of the connection, which becomes its standard input.
        connection: RawFd,
        /// Descriptor for its other standard streams.
        null: RawFd,
        /// End of its stack.
        stack: *mut c_void,
        /// Error number of a failed call.
        error: Cell<c_int>,
    }

    /// Starts the broker of an address, with its end of the first connection.
    ///
    /// # Errors
    /// Returns errors of `clone(2)` and `execve(2)`.
    pub(in crate::broker) fn launch(addr: IpAddr, connection: OwnedFd) -> io::Result<()> {
        // SAFETY: this only reads a value that was set by the kernel.
        let loader = file_at(unsafe { libc::getauxval(libc::AT_BASE) } as *const c_void)?;
        let library = file_at(execute as *const c_void)?;
        let addr = CString::new(addr.to_string())?;
        // The numbers of the standard streams may be unused in this process.
        let connection = fcntl_dupfd_cloexec(connection, FIRST)?;
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let null = fcntl_dupfd_cloexec(null, FIRST)?;
        let (mut stack, mut child_stack) = (vec![0u128; STACK], vec![0u128; STACK]);
        // SAFETY: this is the end of the allocation.
        let end = |stack: &mut Vec<u128>| unsafe { stack.as_mut_ptr().add(STACK) }.cast();
        let broker = Broker {
            loader,
            arguments: [NAME.as_ptr(), library.as_ptr(), addr.as_ptr(), ptr::null()],
            connection: connection.as_raw_fd(),
            null: null.as_raw_fd(),
            stack: end(&mut stack),
            error: Cell::new(0),
        };
        // SAFETY: all zeroes are valid sets, which are initialized by the calls. The new process
        // only accesses these arguments and its stack, until this call returns. Handlers of signals
        // must not run in it, because it shares our memory.
        unsafe {
            let (mut all, mut old) = (zeroed(), zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
            // This process must not adopt the broker, which it might wait for.
            let mut adopts: c_int = 0;
            libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut adopts);
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0 as c_ulong);
            let child = libc::clone(
                start_child,
                end(&mut child_stack),
                libc::CLONE_VM | libc::CLONE_VFORK,
                ptr::from_ref(&broker).cast_mut().cast(),
            );
            if child < 0 {
                broker.error.set(*libc::__errno_location());
            } else {
                // It does not send a signal, so only this wait includes it.
                libc::waitpid(child, ptr::null_mut(), libc::__WCLONE);
            }
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, adopts as c_ulong);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut());
        }
        match broker.error.get() {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Returns the file that contains a loaded address.
    fn file_at(address: *const c_void) -> io::Result<CString> {
        // SAFETY: all zeroes is valid, and is initialized by the call, whose strings exist as long
        // as the file is loaded.
        unsafe {
            let mut info: libc::Dl_info = zeroed();
            if libc::dladdr(address, &raw mut info) == 0 || info.dli_fname.is_null() {
                let why = "cannot find the files of the library and the dynamic loader";
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            }
            Ok(CStr::from_ptr(info.dli_fname).to_owned())
        }
    }

    /// Entry point of the intermediate process.
    extern "C" fn start_child(broker: *mut c_void) -> c_int {
        // SAFETY: this is the argument of `launch`, which is suspended. The stack belongs to the
        // new process.
        unsafe {
            let Broker { stack, error, .. } = &*broker.cast::<Broker>();
            if libc::clone(execute, *stack, libc::CLONE_VM | libc::CLONE_VFORK, broker) < 0 {
                error.set(*libc::__errno_location());
            }
        }
        0
    }

    /// Entry point of the broker's process, which executes the loader.
    extern "C" fn execute(broker: *mut c_void) -> c_int {
        let environment = [ptr::null::<c_char>()];
        // SAFETY: as above. The descriptors belong to this process, and its memory is replaced.
        unsafe {
            let broker = &*broker.cast::<Broker>();
            // It must not receive the signals of a terminal.
            libc::setsid();
            libc::dup2(broker.connection, 0);
            libc::dup2(broker.null, 1);
            libc::dup2(broker.null, 2);
            libc::execve(
                broker.loader.as_ptr(),
                broker.arguments.as_ptr(),
                environment.as_ptr(),
            );
            broker.error.set(*libc::__errno_location());
        }
        127
    }

    /// The broker, after the dynamic loader has loaded the library as a program.
    extern "C" fn run() -> ! {
        // SAFETY: this process has a single thread, and only uses the descriptor of its standard
        // input.
        let connection = unsafe {
            let mut none = zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
            // It exits after its processes. If a service manager terminates all of them, it must
            // not remove their device while they still use it.
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_IGN);
            }
            // The program may have a real-time priority and a processor for itself.
            let normal: libc::sched_param = zeroed();
            libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const normal);
            let mut processors: libc::cpu_set_t = zeroed();
            ptr::write_bytes(&raw mut processors, 0xff, 1);
            libc::sched_setaffinity(0, size_of_val(&processors), &raw const processors);
            // Descriptors that the program has opened without CLOEXEC.
            let (first, last) = (c_long::from(FIRST), c_long::from(u32::MAX));
            if libc::syscall(libc::SYS_close_range, first, last, 0 as c_long) != 0 {
                // A sandbox may not allow the call.
                for descriptor in FIRST..MAX_DESCRIPTORS {
                    libc::close(descriptor);
                }
            }
            libc::chdir(c"/".as_ptr());
            libc::prctl(libc::PR_SET_NAME, NAME.as_ptr() as c_ulong, 0, 0, 0);
            // It needs a descriptor for each slot and for each process.
            let mut limit: libc::rlimit = zeroed();
            if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
            }
            OwnedFd::from_raw_fd(0)
        };
        serve(connection);
        // SAFETY: nothing has to be done when the process exits.
        unsafe { libc::_exit(0) }
    }

    // The entry point of the shared object, whose stack begins with the arguments. The build script
    // passes its name to the linker.
    #[cfg(target_arch = "x86_64")]
    std::arch::global_asm!(
        ".text",
        ".globl riser_broker",
        ".hidden riser_broker",
        ".type riser_broker,@function",
        "riser_broker:",
        "xor ebp, ebp",
        "and rsp, -16",
        "call {run}",
        "ud2",
        ".size riser_broker, . - riser_broker",
        run = sym run,
    );
    #[cfg(target_arch = "aarch64")]
    std::arch::global_asm!(
        ".text",
        ".globl riser_broker",
        ".hidden riser_broker",
        ".type riser_broker,@function",
        "riser_broker:",
        "mov x29, #0",
        "mov x30, #0",
        "bl {run}",
        "brk #1",
        ".size riser_broker, . - riser_broker",
        run = sym run,
    );
}
