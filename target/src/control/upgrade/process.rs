//! Replaces the program within a process, and passes open descriptors to it.
//!
//! They are passed in the environment: `RISERD_HANDOVER=PID:STATE,FD,FD…`. We include the process
//! ID so that a child process which inherits the environment does not use them.

use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::execve;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

/// Environment variable for the descriptors.
const VARIABLE: &str = "RISERD_HANDOVER";

/// Variables for descriptors of another program.
const NOT_OURS: [&str; 5] = [
    VARIABLE,
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_FDS_FIRST_FD",
];

/// Descriptors passed by the previous program.
#[derive(Debug)]
pub(super) struct PassedDescriptors {
    /// Open descriptors. If the handover state file is open, it comes first.
    pub(super) fds: Vec<OwnedFd>,
    /// Error in the variable.
    pub(super) problem: Option<String>,
}

/// Takes ownership of the descriptors passed to this process via the environment. Returns `None` if
/// there are none. This must be called before the process opens any files, and only the first call
/// will return anything.
pub(super) fn take_passed() -> Option<PassedDescriptors> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let value = env::var_os(VARIABLE)?;
    let value = value.to_string_lossy();
    let (pid, list) = value.split_once(':')?;
    let is_ours = pid.parse() == Ok(std::process::id());
    // If this was called twice, each descriptor would have two owners, and the first one would
    // close a descriptor still used by the other.
    if !is_ours || TAKEN.swap(true, Ordering::AcqRel) {
        return None;
    }
    let mut passed = PassedDescriptors {
        fds: Vec::new(),
        problem: None,
    };
    let mut seen: Vec<RawFd> = Vec::new();
    for number in list.split(',') {
        let number = number.parse::<RawFd>().ok();
        // We must not close standard streams, and a duplicate number can only have one owner.
        let new = number.filter(|fd| *fd > 2 && !seen.contains(fd));
        match new.and_then(adopt) {
            Some(fd) => {
                seen.push(fd.as_raw_fd());
                passed.fds.push(fd);
            }
            // We still use the remaining descriptors, because they can include sockets with waiting
            // clients.
            None => {
                passed.problem = Some(format!(
                    "{VARIABLE} contains descriptors that are not open: {list}"
                ));
            }
        }
    }
    Some(passed)
}

/// Takes ownership of a descriptor, if it is open.
#[allow(unsafe_code, reason = "descriptors come as numbers")]
fn adopt(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: this call only uses integers.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: the descriptor is open and was passed to this process, which has not opened any files
    // yet. It is only taken once.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Child processes must not inherit the sockets, because they would keep the addresses in use
    // after the daemon exits.
    fcntl_setfd(&fd, FdFlags::CLOEXEC).ok()?;
    Some(fd)
}

/// Creates an anonymous file with these bytes, which cannot be modified.
pub(super) fn sealed(bytes: &[u8]) -> io::Result<File> {
    let fd = memfd_create(
        "riserd-handover",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    // The state contains secrets and reservations, so we must prevent changes by anyone who still
    // has the file open.
    let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, all)?;
    Ok(file)
}

/// Returns the environment for a program that does not get any descriptors.
pub(super) fn environment() -> impl Iterator<Item = (OsString, OsString)> {
    let ours = |name: &OsStr| !NOT_OURS.iter().any(|other| name == *other);
    env::vars_os().filter(move |(name, _)| ours(name))
}

/// Returns the path of this program. We use the path that was used to start it if it is absolute
/// and refers to this program, because a symbolic link may point to a different file later.
pub(in crate::control) fn own_program() -> io::Result<PathBuf> {
    let exe = env::current_exe()?.into_os_string().into_vec();
    // If the file was replaced, the new file has the same path.
    let exe = exe.strip_suffix(b" (deleted)").unwrap_or(&exe);
    let exe = PathBuf::from(OsStr::from_bytes(exe));
    let called = env::args_os().next().map(PathBuf::from);
    let leads_here =
        |path: &PathBuf| path.is_absolute() && path.canonicalize().is_ok_and(|path| path == exe);
    Ok(called.filter(leads_here).unwrap_or(exe))
}

/// Runs a program in this process, with our arguments and these descriptors, where the handover
/// state is first. Only returns if this failed, and nothing has changed.
pub(super) fn become_program(program: &Path, state: &File, fds: &[BorrowedFd<'_>]) -> io::Error {
    let mut all = vec![state.as_fd()];
    all.extend(fds);
    // This is done as late as possible, because a thread that spawns a child process now would leak
    // the descriptors.
    let failed = match set_flags(&all, FdFlags::empty()) {
        Ok(()) => exec(program, &all),
        Err(error) => error,
    };
    // We still need the descriptors.
    let _ = set_flags(&all, FdFlags::CLOEXEC);
    failed
}

fn set_flags(fds: &[BorrowedFd<'_>], flags: FdFlags) -> io::Result<()> {
    for fd in fds {
        fcntl_setfd(fd, flags)?;
    }
    Ok(())
}

fn exec(program: &Path, fds: &[BorrowedFd<'_>]) -> io::Error {
    let numbers: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    let variable = format!("{VARIABLE}={}:{}", std::process::id(), numbers.join(","));
    let args = std::iter::once(program.as_os_str().to_owned()).chain(env::args_os().skip(1));
    let variables = environment().map(|(name, value)| {
        let mut line = name;
        line.push("=");
        line.push(value);
        line
    });
    let variables = variables.chain([OsString::from(variable)]);
    let lists = c_strings(args).and_then(|args| Ok((args, c_strings(variables)?)));
    let (args, variables) = match lists {
        Ok(lists) => lists,
        Err(error) => return error,
    };
    // We can't use exec from the standard library, because it changes the signal mask and handlers
    // first. The first argument is the path.
    let Err(error) = execve(&args[0], &args, &variables);
    error.into()
}

/// Converts strings to C strings.
fn c_strings(strings: impl Iterator<Item = OsString>) -> io::Result<Vec<CString>> {
    let strings = strings.map(|s| CString::new(s.into_vec()));
    Ok(strings.collect::<Result<_, _>>()?)
}
