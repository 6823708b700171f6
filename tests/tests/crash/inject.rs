//! System calls of a child process, counted over all its threads, of which one fails.
//!
//! The kernel asks before each call of the kinds that are watched (`SECCOMP_RET_USER_NOTIF`). A
//! thread here answers: the call goes on, or it ends with an error and is not made. So exactly one
//! call fails in a run, whichever thread makes it. Calls of other kinds run at normal speed.

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

/// Where the child has the socket for its filter's descriptor: no other descriptor gets there.
const SOCKET: RawFd = 900;

/// A kind of system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) number: libc::c_long,
    pub(crate) names: Names,
}

/// What a call names a file by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Names {
    /// None.
    Nothing,
    /// A descriptor, the first argument.
    Descriptor,
    /// A path, the first argument.
    Path,
    /// A descriptor and a path below it, the first two.
    At,
}

/// A call that is watched, those on files below a folder only if one is named.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub(crate) call: Call,
    pub(crate) below: Option<PathBuf>,
}

/// What a child does, of the calls that are watched.
pub(crate) struct Watch {
    pub(crate) calls: Vec<Watched>,
    /// The one to fail, counted from 1, of the only kind that is watched then; and its error.
    pub(crate) fails: Option<(u64, i32)>,
}

/// The watch of a child that runs.
pub(crate) struct Watcher {
    thread: JoinHandle<Seen>,
}

/// What a watch has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// How often each was called, by its place in the list.
    pub(crate) counts: Vec<u64>,
    /// The same until the first call of the last in the list.
    pub(crate) before_last: Vec<u64>,
    /// The call that has failed: what it named.
    pub(crate) failed: Option<String>,
}

impl Watcher {
    /// Waits until the child has ended.
    pub(crate) fn seen(self) -> Seen {
        self.thread.join().expect("the watch goes on")
    }
}

fn cvt(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// The program of a filter that asks about calls with these numbers, and lets others pass, as well
/// as all on [`SOCKET`].
fn filter(numbers: &[libc::c_long]) -> Vec<libc::sock_filter> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let one = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let allow = one(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    // The number of a call is first in its data, the lower half of its first argument at 16.
    let mut program = vec![one(LOAD, 16, 0, 0), one(IS, SOCKET as u32, 0, 1), allow];
    program.push(one(LOAD, 0, 0, 0));
    for number in numbers {
        program.push(one(IS, *number as u32, 0, 1));
        program.push(one(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0));
    }
    program.push(allow);
    program
}

/// Installs a filter, and returns the descriptor from which its questions come.
fn install(program: &[libc::sock_filter]) -> io::Result<RawFd> {
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: numbers only.
    cvt(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // A question that was asked is not asked again when a signal comes (Linux 5.19).
    const WAIT_KILLABLE: libc::c_ulong = 1 << 5;
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE;
    // SAFETY: the program outlives the call, which copies it.
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

/// A message of one byte with room for one descriptor; `run` sends or receives it.
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
    // SAFETY: a message of zeroes is an empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: numbers only.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    if let Some(descriptor) = descriptor {
        // SAFETY: `control` has room for a header and one descriptor, and is aligned for it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            ptr::write_unaligned(libc::CMSG_DATA(header).cast::<RawFd>(), descriptor);
        }
    }
    cvt(run(&raw mut message) as libc::c_long)?;
    // SAFETY: the kernel has filled as much of `control` as the message now says.
    let received = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (!header.is_null()).then(|| ptr::read_unaligned(libc::CMSG_DATA(header).cast::<RawFd>()))
    };
    Ok(received)
}

/// Has a command be watched from its start on.
pub(crate) fn watch(command: &mut Command, watch: Watch) -> Watcher {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let numbers: Vec<_> = watch.calls.iter().map(|one| one.call.number).collect();
    let program = filter(&numbers);
    let send = move || {
        // SAFETY: both are descriptors of this process.
        cvt(unsafe { libc::dup3(theirs.as_raw_fd(), SOCKET, libc::O_CLOEXEC) }.into())?;
        let listener = install(&program)?;
        with_message(Some(listener), |message| {
            // SAFETY: the message and what it names outlive the call.
            unsafe { libc::sendmsg(SOCKET, message, 0) }
        })?;
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(send) };
    let thread = thread::spawn(move || {
        let listener = with_message(None, |message| {
            // SAFETY: as above.
            unsafe { libc::recvmsg(ours.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC) }
        });
        let listener = listener.unwrap().expect("a filter's descriptor");
        // SAFETY: the kernel has made it for us.
        let listener = unsafe { OwnedFd::from_raw_fd(listener) };
        answer_all(&listener, &watch)
    });
    Watcher { thread }
}

/// Answers all questions, until no process is left that asks.
fn answer_all(listener: &OwnedFd, watch: &Watch) -> Seen {
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
        // SAFETY: one descriptor, which outlives the call.
        let count = unsafe { libc::poll(&raw mut ready, 1, -1) };
        if count < 0 {
            let error = io::Error::last_os_error();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "poll: {error}");
            continue;
        }
        if ready.revents & libc::POLLIN == 0 {
            return seen;
        }
        // SAFETY: zeroes are what the kernel asks for.
        let mut question: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        let fd = listener.as_raw_fd();
        // SAFETY: the kernel fills the question, which outlives the call.
        let result = unsafe { libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut question) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // The caller has exited (ENOENT), or a signal came here.
            let is_expected = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR));
            assert!(is_expected, "a question cannot be read: {error}");
            continue;
        }
        // What is before belongs to this process: it has not become the program yet.
        has_begun |= is_program(question.pid);
        let errno = has_begun.then(|| seen.judge(watch, &question)).flatten();
        let mut answer = libc::seccomp_notif_resp {
            id: question.id,
            val: 0,
            error: errno.map_or(0, |errno| -errno),
            flags: match errno {
                Some(_) => 0,
                None => libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
            },
        };
        // SAFETY: the answer outlives the call. It fails where the caller has exited.
        unsafe { libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
    }
}

fn is_program(process: u32) -> bool {
    let own = fs::read_link("/proc/self/exe").ok();
    let its = fs::read_link(format!("/proc/{process}/exe")).ok();
    its.is_some() && its != own
}

impl Seen {
    /// Counts a call; returns the error with which it ends, if it is to fail.
    fn judge(&mut self, watch: &Watch, question: &libc::seccomp_notif) -> Option<i32> {
        let mut errno = None;
        for (at, Watched { call, below }) in watch.calls.iter().enumerate() {
            if call.number != libc::c_long::from(question.data.nr) {
                continue;
            }
            let named = named(call.names, question);
            let is_below = below.as_ref().is_none_or(|folder| {
                named
                    .as_deref()
                    .is_some_and(|path| Path::new(path).starts_with(folder))
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

/// The path that a call names.
fn named(names: Names, question: &libc::seccomp_notif) -> Option<String> {
    let libc::seccomp_notif { pid, data, .. } = question;
    let descriptor = |fd: u64| {
        let link = format!("/proc/{pid}/fd/{}", fd as i32);
        Some(fs::read_link(link).ok()?.to_string_lossy().into_owned())
    };
    let text = |at: u64| {
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        let mut bytes = [0; 256];
        // It may end where the next page is no one's.
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
                // What the descriptor names (AT_EMPTY_PATH).
                "" => descriptor(data.args[0]),
                _ if path.starts_with('/') => Some(path),
                _ => Some(format!("{}/{path}", descriptor(data.args[0])?)),
            }
        }
    }
}
