//! One program in the place of another within a process, and the descriptors that stay open.
//!
//! The environment names them: `RISERD_HANDOVER=PID:STATE,FD,FD…`. The process id is part of it, so
//! that a child with a copy of the environment does not take them for its own.

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

/// Variable that names the descriptors.
const VARIABLE: &str = "RISERD_HANDOVER";

/// Variables that are about descriptors of another program.
const NOT_OURS: [&str; 5] = [
    VARIABLE,
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_FDS_FIRST_FD",
];

/// Descriptors that the program before has passed on.
#[derive(Debug)]
pub(super) struct PassedDescriptors {
    /// Those that are open, the file of the handover state first if it is.
    pub(super) fds: Vec<OwnedFd>,
    /// Fault of the variable.
    pub(super) problem: Option<String>,
}

/// Takes the descriptors that the environment names to this process; `None` where it names none. To
/// be called before the process opens anything, and only the first call finds something.
pub(super) fn take_passed() -> Option<PassedDescriptors> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let value = env::var_os(VARIABLE)?;
    let value = value.to_string_lossy();
    let (pid, list) = value.split_once(':')?;
    let is_ours = pid.parse() == Ok(std::process::id());
    // Twice would be two owners of each descriptor: the first to close it closes what the other
    // one uses.
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
        // Standard streams are not ours to close, and a number that is named twice has one owner
        // only.
        let new = number.filter(|fd| *fd > 2 && !seen.contains(fd));
        match new.and_then(adopt) {
            Some(fd) => {
                seen.push(fd.as_raw_fd());
                passed.fds.push(fd);
            }
            // The others are taken all the same: sockets among them have clients that wait.
            None => passed.problem = Some(format!("{VARIABLE} names what is not open: {list}")),
        }
    }
    Some(passed)
}

/// Owns a descriptor, if it is open.
#[allow(unsafe_code, reason = "descriptors come as numbers")]
fn adopt(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: the call takes and gives integers.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, it was passed to this process, which has opened nothing itself yet, and
    // it is taken once.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Children must not get the sockets: they would hold the addresses after the daemon's end.
    fcntl_setfd(&fd, FdFlags::CLOEXEC).ok()?;
    Some(fd)
}

/// An anonymous file with these bytes, which cannot be changed.
pub(super) fn sealed(bytes: &[u8]) -> io::Result<File> {
    let fd = memfd_create(
        "riserd-handover",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    // The state has secrets and reservations: nothing that still has the file open can change them
    // later.
    let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, all)?;
    Ok(file)
}

/// Environment for a program that gets no descriptors.
pub(super) fn environment() -> impl Iterator<Item = (OsString, OsString)> {
    let ours = |name: &OsStr| !NOT_OURS.iter().any(|other| name == *other);
    env::vars_os().filter(move |(name, _)| ours(name))
}

/// The path of this program: as it was called, if that is a whole path that leads to it, since a
/// link may lead elsewhere later.
pub(in crate::control) fn own_program() -> io::Result<PathBuf> {
    let exe = env::current_exe()?.into_os_string().into_vec();
    // What was replaced meanwhile is at the same place.
    let exe = exe.strip_suffix(b" (deleted)").unwrap_or(&exe);
    let exe = PathBuf::from(OsStr::from_bytes(exe));
    let called = env::args_os().next().map(PathBuf::from);
    let leads_here =
        |path: &PathBuf| path.is_absolute() && path.canonicalize().is_ok_and(|path| path == exe);
    Ok(called.filter(leads_here).unwrap_or(exe))
}

/// Runs a program in this process, with this program's arguments and these descriptors, the
/// handover state first. Returns only if that was not possible, with nothing changed.
pub(super) fn become_program(program: &Path, state: &File, fds: &[BorrowedFd<'_>]) -> io::Error {
    let mut all = vec![state.as_fd()];
    all.extend(fds);
    // As late as can be: a thread that starts a child now would leave it the descriptors.
    let failed = match set_flags(&all, FdFlags::empty()) {
        Ok(()) => exec(program, &all),
        Err(error) => error,
    };
    // They stay here.
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
    // Not the standard library's exec, which changes the handling of signals first. The path is the
    // first argument.
    let Err(error) = execve(&args[0], &args, &variables);
    error.into()
}

/// Strings as C takes them.
fn c_strings(strings: impl Iterator<Item = OsString>) -> io::Result<Vec<CString>> {
    let strings = strings.map(|s| CString::new(s.into_vec()));
    Ok(strings.collect::<Result<_, _>>()?)
}
