//! Counts the system calls of all threads in a child process and injects a single failure.
//!
//! The kernel notifies us before each of the watched calls (`SECCOMP_RET_USER_NOTIF`). A thread in
//! this process responds: the call is either executed, or it returns an error without being
//! executed. This ensures that exactly one call fails, no matter which thread it's in. Other calls
//! run at normal speed.

#![allow(unsafe_code, reason = "a filter of system calls, and its descriptor")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::thread::{self, JoinHandle};

/// Descriptor in the child for the socket used to send the filter descriptor. No other descriptor
/// will ever use this number.
const SOCKET: RawFd = 900;

/// A type of system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) number: libc::c_long,
    pub(crate) names: Names,
}

/// How a call identifies a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Names {
    /// It doesn't use a file.
    Nothing,
    /// Descriptor in the first argument.
    Descriptor,
    /// Path in the first argument.
    Path,
    /// Descriptor and relative path in the first two arguments.
    At,
}

/// A call to watch. If there is a directory, only calls for files in this directory are counted.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub(crate) call: Call,
    pub(crate) below: Option<PathBuf>,
}

/// Calls to watch in a child process.
pub(crate) struct Watch {
    pub(crate) calls: Vec<Watched>,
    /// Number of the call that should fail, starting at 1, and its error. In this case, only a
    /// single type of call is watched.
    pub(crate) fails: Option<(u64, i32)>,
}

/// Watches a running child process.
pub(crate) struct Watcher {
    thread: JoinHandle<Seen>,
}

/// Result of watching a process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Number of calls by index in the list.
    pub(crate) counts: Vec<u64>,
    /// Same, but only up to the first call of the last type in the list.
    pub(crate) before_last: Vec<u64>,
    /// File used in the call that failed.
    pub(crate) failed: Option<String>,
}

impl Watcher {
    /// Waits until the child has exited.
    pub(crate) fn seen(self) -> Seen {
        self.thread.join().expect("the watch continues")
    }
}

fn cvt(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// Creates a filter that sends a notification for calls with these numbers and allows all other
/// calls, including any call for [`SOCKET`].
fn filter(numbers: &[libc::c_long]) -> Vec<libc::sock_filter> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let one = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let allow = one(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    // The call number is at the start of the data, and the lower half of the first argument has
    // offset 16.
    let mut program = vec![one(LOAD, 16, 0, 0), one(IS, SOCKET as u32, 0, 1), allow];
    program.push(one(LOAD, 0, 0, 0));
    for number in numbers {
        program.push(one(IS, *number as u32, 0, 1));
        program.push(one(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0));
    }
    program.push(allow);
    program
}

/// Installs a filter and returns its notification descriptor.
fn install(program: &[libc::sock_filter]) -> io::Result<RawFd> {
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: all arguments are integers.
    cvt(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // If there is a signal, a notification that was already received must not be sent again (Linux
    // 5.19).
    const WAIT_KILLABLE: libc::c_ulong = 1 << 5;
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE;
    // SAFETY: the program is valid during this call and will be copied.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    Ok(cvt(listener)? as RawFd)
}

/// Creates a message with a single byte and space for a descriptor, which is sent or received by
/// `run`.
fn with_message(
    descriptor: Option<RawFd>,
    run: impl FnOnce(*mut libc::msghdr) -> isize,
) -> io::Result<Option<RawFd>> {
    let mut byte = [0u8; 1];
    let mut part = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = [0u64; 8];
    // SAFETY: zeroes are a valid empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: the argument is an integer.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    if let Some(descriptor) = descriptor {
        // SAFETY: `control` has enough space for a header and a descriptor, with the correct
        // alignment.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            ptr::write_unaligned(libc::CMSG_DATA(header).cast::<RawFd>(), descriptor);
        }
    }
    cvt(run(&raw mut message) as libc::c_long)?;
    // SAFETY: the kernel has initialized `control` up to the size that is now set in the message.
    let received = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (!header.is_null()).then(|| ptr::read_unaligned(libc::CMSG_DATA(header).cast::<RawFd>()))
    };
    Ok(received)
}

/// Watches the command from its start.
pub(crate) fn watch(command: &mut Command, watch: Watch) -> Watcher {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let numbers: Vec<_> = watch.calls.iter().map(|one| one.call.number).collect();
    let program = filter(&numbers);
    let send = move || {
        // SAFETY: both are descriptors in this process.
        cvt(unsafe { libc::dup3(theirs.as_raw_fd(), SOCKET, libc::O_CLOEXEC) }.into())?;
        let listener = install(&program)?;
        with_message(Some(listener), |message| {
            // SAFETY: the message and its buffers are valid during this call.
            unsafe { libc::sendmsg(SOCKET, message, 0) }
        })?;
        Ok(())
    };
    // SAFETY: between fork and exec, this only uses system calls and doesn't allocate.
    unsafe { command.pre_exec(send) };
    let thread = thread::spawn(move || {
        let listener = with_message(None, |message| {
            // SAFETY: see above.
            unsafe { libc::recvmsg(ours.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC) }
        });
        let listener = listener.unwrap().expect("a filter's descriptor");
        // SAFETY: this descriptor was just created by the kernel for us.
        let listener = unsafe { OwnedFd::from_raw_fd(listener) };
        respond_to_all(&listener, &watch)
    });
    Watcher { thread }
}

/// Responds to all notifications until all processes have exited.
fn respond_to_all(listener: &OwnedFd, watch: &Watch) -> Seen {
    let mut seen = Seen {
        counts: vec![0; watch.calls.len()],
        ..Seen::default()
    };
    let mut has_begun = false;
    loop {
        let mut ready = libc::pollfd {
            fd: listener.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: there is a single descriptor, which is valid during this call.
        let count = unsafe { libc::poll(&raw mut ready, 1, -1) };
        if count < 0 {
            let error = io::Error::last_os_error();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "poll: {error}");
            continue;
        }
        if ready.revents & libc::POLLIN == 0 {
            return seen;
        }
        // SAFETY: the kernel requires that this is set to zero.
        let mut question: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        let fd = listener.as_raw_fd();
        // SAFETY: the kernel writes the notification, which is valid during this call.
        let result = unsafe { libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut question) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // Either the caller has exited (ENOENT), or we received a signal.
            let is_expected = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR));
            assert!(is_expected, "a question cannot be read: {error}");
            continue;
        }
        // Ignore calls made before this, because the process has not executed the program yet.
        has_begun |= is_program(question.pid);
        let errno = has_begun
            .then(|| seen.count_call(watch, &question))
            .flatten();
        let mut response = libc::seccomp_notif_resp {
            id: question.id,
            val: 0,
            error: errno.map_or(0, |errno| -errno),
            flags: match errno {
                Some(_) => 0,
                None => libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
            },
        };
        // SAFETY: the response is valid during this call. If the caller has exited, this returns an
        // error.
        unsafe { libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response) };
    }
}

fn is_program(process: u32) -> bool {
    let own = fs::read_link("/proc/self/exe").ok();
    let its = fs::read_link(format!("/proc/{process}/exe")).ok();
    its.is_some() && its != own
}

impl Seen {
    /// Counts a call. If it should fail, returns the error.
    fn count_call(&mut self, watch: &Watch, question: &libc::seccomp_notif) -> Option<i32> {
        let mut errno = None;
        for (at, Watched { call, below }) in watch.calls.iter().enumerate() {
            if call.number != libc::c_long::from(question.data.nr) {
                continue;
            }
            let named = named(call.names, question);
            let is_below = below.as_ref().is_none_or(|directory| {
                named
                    .as_deref()
                    .is_some_and(|path| Path::new(path).starts_with(directory))
            });
            if !is_below {
                continue;
            }
            self.counts[at] += 1;
            if at + 1 == watch.calls.len() && self.before_last.is_empty() {
                self.before_last = self.counts.clone();
            }
            if let Some((number, error)) = watch.fails
                && number == self.counts[at]
            {
                self.failed = Some(named.unwrap_or_default());
                errno = Some(error);
            }
        }
        errno
    }
}

/// Returns the path used by a call.
fn named(names: Names, question: &libc::seccomp_notif) -> Option<String> {
    let libc::seccomp_notif { pid, data, .. } = question;
    let descriptor = |fd: u64| {
        let link = format!("/proc/{pid}/fd/{}", fd as i32);
        Some(fs::read_link(link).ok()?.to_string_lossy().into_owned())
    };
    let text = |at: u64| {
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        let mut bytes = [0; 256];
        // The path may be close to the end of a page, and the next page may not be mapped.
        let len = memory.read_at(&mut bytes, at).or_else(|_| {
            let len = 4096 - (at % 4096) as usize;
            memory.read_at(&mut bytes[..len.min(256)], at)
        });
        let bytes = &bytes[..len.ok()?];
        let end = bytes.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    };
    match names {
        Names::Nothing => None,
        Names::Descriptor => descriptor(data.args[0]),
        Names::Path => text(data.args[0]),
        Names::At => {
            let path = text(data.args[1])?;
            match path.as_str() {
                // Use the path of the descriptor (AT_EMPTY_PATH).
                "" => descriptor(data.args[0]),
                _ if path.starts_with('/') => Some(path),
                _ => Some(format!("{}/{path}", descriptor(data.args[0])?)),
            }
        }
    }
}
