//! `riser run`: runs an unmodified RDMA program on our software NIC.
//!
//! The dynamic loader searches for libraries in the directories from `LD_LIBRARY_PATH` before those
//! from the system. We therefore use a directory with links from all library names to a single
//! file, which provides all of them. The loader identifies the file by its inode and only maps it
//! once. The library is configured by environment variables, which are inherited by child
//! processes.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crc_fast::{CrcAlgorithm, checksum};

use super::args::Global;
use super::executable;
use super::exit::{CliError, Exit};
use super::run_args::{Device, RunArgs, parse_devices};

/// File name of the library.
const LIBRARY: &str = "libriser_drop_in.so";

/// Library names used by programs.
const NAMES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libibumad.so.3"];

/// Directories searched by the loader before those from the system.
const LOADER_PATH: &str = "LD_LIBRARY_PATH";

/// Devices of the library, `NAME=IP,…`.
const DEVICES: &str = "RISER_DEVICES";

/// Path of the library, if it isn't at one of the default locations.
const DROP_IN: &str = "RISER_DROP_IN";

/// Executes the program in this process, so that its exit status is returned and it receives all
/// signals.
pub(super) fn run(args: &RunArgs, global: &Global) -> Result<(), CliError> {
    let Some((program, rest)) = args.command.split_first() else {
        return Err(CliError::new(Exit::Usage, "no command to run"));
    };
    let inherited = std::env::var_os(DEVICES).map(OsString::into_string);
    let inherited = inherited.transpose().map_err(|text| {
        let what = format!("{DEVICES} in the environment: {text:?} is not UTF-8");
        CliError::new(Exit::Usage, what)
    })?;
    let devices = devices(args, inherited.as_deref())?;
    for device in &devices {
        check_addresses(device)?;
    }
    // The program may change its working directory before the library opens this file.
    let pcap = args.pcap.as_deref().map(capture_file).transpose()?;
    let library = find_library(std::env::var_os(DROP_IN).as_deref(), own_directory)?;
    let directory = directory_of(&library)?;
    if let Some(path) = search(program) {
        if gains_rights(&path) {
            let error = CliError::new(
                Exit::NotExecutable,
                format!(
                    "{} is setuid or setgid, or has capabilities: the loader ignores \
                     {LOADER_PATH}, so it would load the system's libraries",
                    path.display()
                ),
            );
            return Err(error.help(
                "run riser as the program's user, or a copy of the program without these rights",
            ));
        }
        // This is only a warning, because the program may start other programs that can load the
        // library.
        if let Some(why) = executable::obstacle(&path, &library) {
            tracing::warn!("{} {why}", path.display());
        }
    }
    let mut command = Command::new(program);
    command.args(rest);
    command.env(
        LOADER_PATH,
        in_front(&directory, std::env::var_os(LOADER_PATH)),
    );
    let devices: Vec<_> = devices.iter().map(Device::to_string).collect();
    command.env(DEVICES, devices.join(","));
    if let Some(faults) = &args.inject {
        command.env("RISER_INJECT", faults);
    }
    if let Some(file) = pcap {
        command.env("RISER_PCAP", file);
    }
    if let Some(filter) = super::log::chosen_filter(global) {
        command.env("RISER_LOG", filter);
    }
    tracing::info!(library = %library.display(), devices = devices.join(","), "starting");
    Err(not_run(program, command.exec()))
}

/// Returns the error for a program that can't be executed.
fn not_run(program: &OsStr, failed: io::Error) -> CliError {
    let is_missing = failed.kind() == io::ErrorKind::NotFound;
    let exit = match is_missing {
        true => Exit::CommandNotFound,
        false => Exit::NotExecutable,
    };
    let what = format!("cannot run {}", Path::new(program).display());
    let error = CliError::new(exit, what).because(failed);
    match search(program) {
        None if is_missing => {
            error.help("no such program in PATH: install it, or specify its path")
        }
        Some(file) if is_missing && file.exists() => {
            error.help("the file exists, but its loader, or the interpreter of a script, does not")
        }
        _ => error,
    }
}

/// Returns the absolute path of the capture file. The directory must exist and be writable by this
/// user.
fn capture_file(file: &Path) -> Result<PathBuf, CliError> {
    let refused = |why: io::Error| {
        let what = format!("cannot capture to {}", file.display());
        CliError::new(Exit::Usage, what).because(why)
    };
    let absolute = std::path::absolute(file).map_err(refused)?;
    let directory = absolute.parent().unwrap_or(Path::new("/"));
    let may_write = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    if !fs::metadata(directory).map_err(refused)?.is_dir() {
        return Err(refused(io::ErrorKind::NotADirectory.into()));
    }
    rustix::fs::access(directory, may_write).map_err(|why| refused(why.into()))?;
    Ok(absolute)
}

/// Returns the devices from the command line, otherwise from the environment, otherwise a single
/// device at 127.0.0.1.
fn devices(args: &RunArgs, inherited: Option<&str>) -> Result<Vec<Device>, CliError> {
    let numbered = args.addr.iter().enumerate().map(|(n, addr)| Device {
        name: format!("riser{n}"),
        addrs: vec![*addr],
    });
    let mut devices: Vec<_> = numbered.chain(args.device.iter().cloned()).collect();
    if devices.is_empty() {
        let read = parse_devices(inherited.unwrap_or_default());
        devices = read.map_err(|why| {
            CliError::new(Exit::Usage, format!("{DEVICES} in the environment: {why}"))
        })?;
    }
    if devices.is_empty() {
        devices.push(Device {
            name: "riser0".to_owned(),
            addrs: vec![Ipv4Addr::LOCALHOST.into()],
        });
    }
    let (mut names, mut addrs) = (BTreeSet::new(), BTreeSet::new());
    for device in &devices {
        if !names.insert(device.name.as_str()) {
            let what = format!("duplicate device name {}", device.name);
            return Err(CliError::new(Exit::Usage, what));
        }
        let mut own = BTreeSet::new();
        for addr in &device.addrs {
            let what = match (own.insert(addr), addrs.insert(*addr)) {
                (false, _) => format!("duplicate address {addr} of {}", device.name),
                (true, false) => format!("two devices have the address {addr}"),
                (true, true) => continue,
            };
            return Err(CliError::new(Exit::Usage, what));
        }
    }
    Ok(devices)
}

/// Checks the addresses of a device. Otherwise a program would only fail with "no devices".
fn check_addresses(device: &Device) -> Result<(), CliError> {
    device
        .addrs
        .iter()
        .try_for_each(|addr| check_address(&device.name, addr))
}

fn check_address(name: &str, addr: &IpAddr) -> Result<(), CliError> {
    let is_broadcast = matches!(addr, IpAddr::V4(addr) if addr.is_broadcast());
    if addr.is_unspecified() || addr.is_multicast() || is_broadcast {
        let what = format!("invalid address {addr} of {name}: not the address of an interface");
        return Err(CliError::new(Exit::Usage, what));
    }
    // The kernel allows a socket to use all local addresses, including loopback addresses that are
    // not listed.
    if let Err(error) = UdpSocket::bind((*addr, 0)) {
        let what = format!("{name} cannot use {addr}, which is not an address of this host");
        let error = CliError::new(Exit::Usage, what).because(error);
        return Err(error.help("use `riser devices` to list the addresses"));
    }
    Ok(())
}

/// Returns the directory of this executable.
fn own_directory() -> Result<PathBuf, CliError> {
    let own = std::env::current_exe();
    let own = own.map_err(|e| CliError::io("cannot find the path of this program", e))?;
    Ok(own.parent().map(Path::to_owned).unwrap_or_default())
}

/// Finds the library using the environment, in the directory of this executable, or in the
/// directory used by a package.
///
/// Without `/proc`, we can't determine the directory of this executable, so the library must be in
/// the environment.
fn find_library(
    named: Option<&OsStr>,
    own_directory: impl FnOnce() -> Result<PathBuf, CliError>,
) -> Result<PathBuf, CliError> {
    let places = match named {
        // If the path was specified explicitly, don't try any other paths.
        Some(path) => vec![PathBuf::from(path)],
        None => {
            let own = own_directory().map_err(|e| e.help(format!("set {DROP_IN}")))?;
            vec![own.join(LIBRARY), own.join("../lib/riser").join(LIBRARY)]
        }
    };
    let found = places.iter().find(|place| place.is_file());
    if let Some(found) = found {
        let canonical = fs::canonicalize(found);
        return canonical.map_err(|e| CliError::io(format!("cannot use {}", found.display()), e));
    }
    let places: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
    let what = format!("cannot find {LIBRARY} at {}", places.join(" or "));
    let help = format!(
        "build it with `cargo build --release -p riser-rdma-compat`, or set {DROP_IN} to its path"
    );
    Err(CliError::new(Exit::NotFound, what).help(help))
}

/// Returns a directory with links from all library names to the library.
///
/// A package includes links in the same directory. Otherwise they are created in a directory of
/// this user, which is separate for each library. It's shared by all runs, and is not removed
/// because processes may outlive this one.
fn directory_of(library: &Path) -> Result<PathBuf, CliError> {
    let is_library = |link: PathBuf| fs::canonicalize(link).is_ok_and(|path| path == library);
    if let Some(directory) = library.parent()
        && is_path_of_loader(directory)
        && NAMES.iter().all(|name| is_library(directory.join(name)))
    {
        return Ok(directory.to_owned());
    }
    let uid = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|dir| dir.is_absolute());
    let parents = runtime.into_iter().chain([std::env::temp_dir()]);
    let mut refused = None;
    for parent in parents.filter(|parent| is_path_of_loader(parent)) {
        let directory = parent.join(format!("riser-libraries-{uid}"));
        match links_in(&parent, &directory, library, uid) {
            Ok(directory) => return Ok(directory),
            Err(why) => refused = Some(CliError::io(directory.display().to_string(), why)),
        }
    }
    let what = "cannot create links to the library";
    let error = CliError::new(Exit::Failure, what).help(
        "set TMPDIR to a directory that other users cannot modify, without `:`, `;` and `$` in \
         its path",
    );
    Err(match refused {
        Some(why) => error.because(why),
        None => error,
    })
}

/// Returns whether the loader supports a path without escaping.
fn is_path_of_loader(path: &Path) -> bool {
    !path
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| b":;$".contains(b))
}

/// Creates the directory with links to a library, in a directory of this user.
///
/// # Errors
/// Fails if a directory could be replaced by another user, because the program would execute code
/// from this user.
fn links_in(parent: &Path, directory: &Path, library: &Path, uid: u32) -> io::Result<PathBuf> {
    let above = fs::metadata(parent)?;
    let is_kept = !is_writable_by_others(&above) || above.mode() & libc::S_ISVTX != 0;
    if !is_kept || ![0, uid].contains(&above.uid()) {
        let why = format!("other users can modify {}", parent.display());
        return Err(io::Error::other(why));
    }
    own_dir(directory, uid)?;
    let sum = checksum(CrcAlgorithm::Crc64Nvme, library.as_os_str().as_bytes());
    let directory = directory.join(format!("{sum:016x}"));
    own_dir(&directory, uid)?;
    for name in NAMES {
        let link = directory.join(name);
        if fs::read_link(&link).is_ok_and(|to| to == library) {
            continue;
        }
        // Another run may use the directory at the same time, so replace the link atomically.
        let new = directory.join(format!(".{name}.{}", std::process::id()));
        // This may be left from a killed run, if it used the same process ID in another container.
        let _ = fs::remove_file(&new);
        symlink(library, &new)?;
        fs::rename(&new, &link).inspect_err(|_| {
            let _ = fs::remove_file(&new);
        })?;
    }
    Ok(directory)
}

/// Creates a directory that can only be modified by this user. Also checks an existing directory.
fn own_dir(directory: &Path, uid: u32) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let is = fs::symlink_metadata(directory)?;
    if !is.is_dir() || is.uid() != uid || is_writable_by_others(&is) {
        let why = "not a directory that is only writable by this user";
        return Err(io::Error::other(why));
    }
    Ok(())
}

fn is_writable_by_others(file: &Metadata) -> bool {
    file.mode() & 0o022 != 0
}

/// Prepends a path to the list of paths for the loader.
fn in_front(path: &Path, rest: Option<OsString>) -> OsString {
    let mut list = path.as_os_str().to_owned();
    // An empty entry would be the working directory.
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        list.push(":");
        list.push(rest);
    }
    list
}

/// Finds an executable by its path or in `PATH`.
fn search(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    let files = std::env::split_paths(&path).map(|dir| dir.join(program));
    let is_program =
        |file: &PathBuf| fs::metadata(file).is_ok_and(|is| is.is_file() && is.mode() & 0o111 != 0);
    files.into_iter().find(is_program)
}

/// Returns whether the program gains additional privileges when it is executed (`AT_SECURE`).
fn gains_rights(program: &Path) -> bool {
    let Ok(is) = fs::metadata(program) else {
        return false;
    };
    // If this process can't gain privileges, the program is treated like any other.
    if rustix::thread::no_new_privs().unwrap_or(false) {
        return false;
    }
    let euid = rustix::process::geteuid();
    let (setuid, setgid) = (libc::S_ISUID, libc::S_ISGID);
    let is_other_user = is.mode() & setuid != 0 && is.uid() != euid.as_raw();
    // If the group can't execute the file, this bit has a different meaning.
    let is_other_group = is.mode() & setgid != 0
        && is.mode() & libc::S_IXGRP != 0
        && is.gid() != rustix::process::getegid().as_raw();
    let has_capabilities = || {
        let mut room = [0_u8; 64];
        rustix::fs::getxattr(program, "security.capability", &mut room).is_ok()
    };
    is_other_user || is_other_group || (!euid.is_root() && has_capabilities())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use clap::Parser;

    use super::super::args::{Args, Verb};
    use super::*;

    /// A directory used by a test.
    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("riser-run-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            Self(fs::canonicalize(path).unwrap())
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn own_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn args(words: &[&str]) -> RunArgs {
        let all = ["riser", "run"].iter().chain(words).chain(&["true"]);
        match Args::try_parse_from(all).unwrap().verb {
            Verb::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn shown(words: &[&str], inherited: Option<&str>) -> String {
        match devices(&args(words), inherited) {
            Ok(devices) => {
                let devices: Vec<_> = devices.iter().map(Device::to_string).collect();
                devices.join(",")
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn devices_are_numbered_or_named() {
        for (words, inherited, want) in [
            (&[] as &[&str], None, "riser0=127.0.0.1"),
            (&[], Some(""), "riser0=127.0.0.1"),
            (&[], Some("a=::1, b=127.0.0.2"), "a=::1,b=127.0.0.2"),
            (
                &["--device", "a=127.0.0.1,127.0.1.1", "--device", "b=::1"],
                None,
                "a=127.0.0.1,127.0.1.1,b=::1",
            ),
            (
                &[],
                Some("a=127.0.0.1,127.0.1.1,b=::1"),
                "a=127.0.0.1,127.0.1.1,b=::1",
            ),
            (
                &["--device", "a=127.0.0.1,127.0.0.1"],
                None,
                "duplicate address 127.0.0.1 of a",
            ),
            (
                &["--device", "a=::1,127.0.0.1", "--device", "b=127.0.0.1"],
                None,
                "two devices have the address 127.0.0.1",
            ),
            (&["--addr", "127.0.0.2"], Some("a=::1"), "riser0=127.0.0.2"),
            (
                &["--addr", "127.0.0.2,127.0.0.3", "--device", "mlx5_0=::1"],
                None,
                "riser0=127.0.0.2,riser1=127.0.0.3,mlx5_0=::1",
            ),
            (
                &["--addr", "::1", "--device", "riser0=127.0.0.1"],
                None,
                "duplicate device name riser0",
            ),
            (
                &["--addr", "::1,::1"],
                None,
                "two devices have the address ::1",
            ),
            (
                &[],
                Some("a"),
                "RISER_DEVICES in the environment: `a` is not NAME=IP",
            ),
        ] {
            assert_eq!(shown(words, inherited), want, "{words:?}");
        }
    }

    #[test]
    fn addresses_are_checked() {
        let at = |text: &str| check_addresses(&text.parse().unwrap());
        assert!(at("a=127.1.2.3").is_ok());
        assert!(at("a=127.1.2.3,127.1.2.4").is_ok());
        assert!(at("a=127.1.2.3,192.0.2.1").is_err());
        for other in [
            "192.0.2.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "ff02::1",
        ] {
            let error = at(&format!("a={other}")).unwrap_err();
            assert_eq!(error.exit, Exit::Usage);
            assert!(error.to_string().contains(other), "{error}");
        }
    }

    #[test]
    fn library_is_searched_in_order() {
        let dir = Dir::new("find");
        let bin = dir.0.join("bin");
        fs::create_dir_all(dir.0.join("lib/riser")).unwrap();
        fs::create_dir(&bin).unwrap();
        let own = || Ok(bin.clone());
        let error = find_library(None, own).unwrap_err();
        assert_eq!(error.exit, Exit::NotFound);
        let adjacent = bin.join(LIBRARY);
        assert!(
            error.to_string().contains(adjacent.to_str().unwrap()),
            "{error}"
        );
        assert!(error.to_string().contains("../lib/riser"), "{error}");
        assert!(error.help.unwrap().contains("cargo build --release"));
        let packaged = dir.0.join("lib/riser").join(LIBRARY);
        fs::write(&packaged, "").unwrap();
        assert_eq!(find_library(None, own).unwrap(), packaged);
        fs::write(&adjacent, "").unwrap();
        assert_eq!(find_library(None, own).unwrap(), adjacent);
        let named = find_library(Some(packaged.as_os_str()), own).unwrap();
        assert_eq!(named, packaged);
        // If the path was specified but the file is missing, don't use another path.
        assert!(find_library(Some(OsStr::new("/does/not/exist")), own).is_err());
        // The directory of this executable is determined using `/proc`, which isn't always
        // available.
        let no_proc = || Err(CliError::new(Exit::Failure, "no /proc"));
        let named = find_library(Some(packaged.as_os_str()), no_proc).unwrap();
        assert_eq!(named, packaged);
        let error = find_library(None, no_proc).unwrap_err();
        assert_eq!(error.help.as_deref(), Some("set RISER_DROP_IN"));
    }

    #[test]
    fn links_are_reused_for_same_library() {
        let dir = Dir::new("links");
        let (library, directory) = (dir.0.join("a.so"), dir.0.join("own"));
        let made = links_in(&dir.0, &directory, &library, own_uid()).unwrap();
        let inode = |name| fs::symlink_metadata(made.join(name)).unwrap().ino();
        let before = NAMES.map(inode);
        assert_eq!(
            links_in(&dir.0, &directory, &library, own_uid()).unwrap(),
            made
        );
        assert_eq!(NAMES.map(inode), before);
        // Incorrect links are replaced, and temporary files are removed.
        fs::remove_file(made.join(NAMES[0])).unwrap();
        symlink("/dev/null", made.join(NAMES[0])).unwrap();
        let left = format!(".{}.{}", NAMES[0], std::process::id());
        symlink("/dev/null", made.join(left)).unwrap();
        links_in(&dir.0, &directory, &library, own_uid()).unwrap();
        for name in NAMES {
            assert_eq!(fs::read_link(made.join(name)).unwrap(), library);
        }
        assert_eq!(fs::read_dir(&made).unwrap().count(), NAMES.len());
        let other = links_in(&dir.0, &directory, &dir.0.join("b.so"), own_uid()).unwrap();
        assert_ne!(other, made);
    }

    #[test]
    fn packaged_links_are_used() {
        let dir = Dir::new("package");
        let library = dir.0.join(LIBRARY);
        fs::write(&library, "").unwrap();
        assert_ne!(directory_of(&library).unwrap(), dir.0);
        for name in NAMES {
            symlink(LIBRARY, dir.0.join(name)).unwrap();
        }
        assert_eq!(directory_of(&library).unwrap(), dir.0);
    }

    #[test]
    fn missing_interpreter_differs_from_missing_program() {
        let dir = Dir::new("programs");
        let script = dir.0.join("script");
        fs::write(&script, "#!/no/such/interpreter\n").unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        for (program, help) in [
            (OsStr::new("no-such-program-anywhere"), Some("PATH")),
            (script.as_os_str(), Some("interpreter")),
            (OsStr::new("/no/such/program"), None),
        ] {
            let error = not_run(program, Command::new(program).exec());
            assert_eq!(error.exit, Exit::CommandNotFound);
            let words = error.help.unwrap_or_default();
            assert_eq!(words.is_empty(), help.is_none(), "{words}");
            assert!(words.contains(help.unwrap_or_default()), "{words}");
        }
    }

    #[test]
    fn invalid_capture_path_fails() {
        let dir = Dir::new("pcap");
        assert_eq!(capture_file(&dir.0.join("a")).unwrap(), dir.0.join("a"));
        assert!(capture_file(Path::new("a")).unwrap().is_absolute());
        fs::write(dir.0.join("file"), "").unwrap();
        for path in ["gone/a", "file/a"] {
            let error = capture_file(&dir.0.join(path)).unwrap_err();
            assert_eq!(error.exit, Exit::Usage);
            assert!(error.to_string().contains(path), "{error}");
        }
        // Root can write to all directories.
        if own_uid() != 0 {
            fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o500)).unwrap();
            assert!(capture_file(&dir.0.join("a")).is_err());
        }
    }

    #[test]
    fn directories_writable_by_others_are_rejected() {
        let dir = Dir::new("others");
        let (library, directory) = (dir.0.join("a.so"), dir.0.join("own"));
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let refused = || links_in(&dir.0, &directory, &library, own_uid()).unwrap_err();
        // If the parent is writable, anyone could rename the directory, unless the sticky bit is
        // set.
        mode(&dir.0, 0o777);
        assert!(refused().to_string().contains("other users can modify"));
        mode(&dir.0, 0o1777);
        links_in(&dir.0, &directory, &library, own_uid()).unwrap();
        mode(&directory, 0o770);
        assert!(refused().to_string().contains("by this user"));
        // Links to our directories are not accepted.
        fs::remove_dir_all(&directory).unwrap();
        fs::create_dir(dir.0.join("real")).unwrap();
        symlink(dir.0.join("real"), &directory).unwrap();
        assert!(refused().to_string().contains("by this user"));
        // Directory of another user.
        let other = links_in(&dir.0, &dir.0.join("b"), &library, own_uid() + 1);
        assert!(other.is_err());
    }

    #[test]
    fn links_precede_inherited_library_path() {
        let list = |rest: Option<&str>| in_front(Path::new("/a"), rest.map(OsString::from));
        assert_eq!(list(None), "/a");
        assert_eq!(list(Some("")), "/a");
        assert_eq!(list(Some("/b:/c")), "/a:/b:/c");
        assert!(!is_path_of_loader(Path::new("/a:b")));
        assert!(!is_path_of_loader(Path::new("/$ORIGIN")));
        assert!(is_path_of_loader(Path::new("/run/user/1000")));
    }

    #[test]
    fn privileged_programs_are_detected() {
        let dir = Dir::new("rights");
        let program = dir.0.join("program");
        fs::write(&program, "").unwrap();
        let mode = |mode| {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(0o755);
        assert!(!gains_rights(&program));
        // No privileges are gained if the user is the same, or if the group can't execute the file.
        mode(0o4755);
        assert!(!gains_rights(&program));
        assert!(!gains_rights(Path::new("/does/not/exist")));
        assert_eq!(search(OsStr::new("/a/b")), Some("/a/b".into()));
        assert!(search(OsStr::new("sh")).is_some());
        assert_eq!(search(OsStr::new("no-such-program-anywhere")), None);
        // Root can change the owner of the file.
        if own_uid() == 0 && !rustix::thread::no_new_privs().unwrap() {
            std::os::unix::fs::chown(&program, Some(1), None).unwrap();
            mode(0o4755);
            assert!(gains_rights(&program));
            std::os::unix::fs::chown(&program, Some(0), Some(1)).unwrap();
            mode(0o2755);
            assert!(gains_rights(&program));
            mode(0o2745);
            assert!(!gains_rights(&program));
        }
    }
}
