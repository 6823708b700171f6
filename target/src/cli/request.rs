//! Requests to a running daemon, and printing its responses.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{OsStringValueParser, TypedValueParser};
use hyper::Method;
use riser_admin_api::client::{self, ApiRequest, ClientError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Failure, print};
use crate::control::top::{self, Top, TopError};
use crate::control::{report, socket, state};

/// Maximum number of backups kept by `save`.
const GENERATIONS: u32 = 9;

/// Options for a request to a running daemon.
#[derive(Debug, clap::Args)]
pub(super) struct ClientOptions {
    /// Use this admin socket of the daemon [default for root: /run/riserd/admin.sock].
    // If the environment variable is empty, use the default.
    #[arg(long, value_name = "PATH", env = "RISERD_SOCKET", value_parser = OsStringValueParser::new().map(PathBuf::from))]
    pub(super) socket: Option<PathBuf>,
    /// Select the output format.
    #[arg(long, short, value_enum, default_value_t)]
    pub(super) output: Output,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// Human-readable text.
    #[default]
    #[value(alias = "human")]
    Text,
    /// A single JSON document.
    Json,
}

impl ClientOptions {
    /// Returns the path of the admin socket, either from the options or the default.
    pub(super) fn socket(&self) -> Result<PathBuf, Failure> {
        let named = self.socket.clone();
        let named = named.filter(|path| !path.as_os_str().is_empty());
        let socket = named.or_else(socket::default_path);
        socket.ok_or_else(|| ClientError::Nowhere.into())
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Mistake(_) => Self::mistake(error),
            _ => Self::run_time(error),
        }
    }
}

/// Sends a request to a running daemon, and prints the response.
pub(super) fn run_request<T: Serialize + DeserializeOwned>(
    out: &mut dyn Write,
    options: &ClientOptions,
    question: ApiRequest,
    describe: impl Fn(&T) -> String,
) -> Result<(), Failure> {
    let response: T = client::call(&options.socket()?, question)?;
    show(out, options.output, &response, describe)
}

pub(super) fn show<T: Serialize>(
    out: &mut dyn Write,
    output: Output,
    response: &T,
    describe: impl Fn(&T) -> String,
) -> Result<(), Failure> {
    let text = match output {
        Output::Text => describe(response),
        Output::Json => serde_json::to_string(response).map_err(Failure::run_time)?,
    };
    print(out, &text)
}

/// Parses the interval between two updates.
pub(super) fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "invalid number".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("must be from 0.1 to 3600 seconds".to_owned())
    }
}

/// Shows the activity of a running daemon.
pub(super) fn show_top(
    out: &mut dyn Write,
    interval: f64,
    once: bool,
    options: &ClientOptions,
) -> Result<(), Failure> {
    let stdout = io::stdout();
    let size = rustix::termios::tcgetwinsize(&stdout).ok();
    let size = size.filter(|_| stdout.is_terminal());
    let top = Top {
        every: Duration::from_secs_f64(interval),
        once,
        json: matches!(options.output, Output::Json),
        terminal: size.map(|size| (size.ws_col.into(), size.ws_row.into())),
    };
    match top::run(&options.socket()?, &top, out) {
        Err(TopError::Client(error)) => Err(error.into()),
        // The reader has exited, for example `head`.
        Err(TopError::Output(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Failure::run_time),
    }
}

/// Saves the configuration of a running daemon.
pub(super) fn save(
    out: &mut dyn Write,
    file: Option<&Path>,
    options: &ClientOptions,
) -> Result<(), Failure> {
    let accept = match options.output {
        Output::Text => None,
        Output::Json => Some("application/json"),
    };
    let question = ApiRequest {
        accept,
        ..ApiRequest::new(Method::GET, "/v1/config")
    };
    let text = client::fetch(&options.socket()?, question)?.body;
    match file {
        Some(file) => match replace(file, &text) {
            Ok(None) => Ok(()),
            Ok(Some(old)) => {
                let (file, old) = (file.display(), old.display());
                let note = format!(
                    "riserd: saved the previous contents of {file}, including comments, to {old}"
                );
                // This is only a note, so ignore errors.
                let _ = writeln!(io::stderr(), "{note}");
                Ok(())
            }
            Err(e) => Err(Failure::run_time(format!("{}: {e}", file.display()))),
        },
        None => print(out, String::from_utf8_lossy(&text).trim_end()),
    }
}

/// Replaces a file, or the target of a symbolic link. If the contents have changed, returns the
/// path of the backup.
fn replace(file: &Path, text: &[u8]) -> io::Result<Option<PathBuf>> {
    let was = match fs::metadata(file) {
        Ok(was) if was.is_file() => was,
        // A pipe or a terminal.
        Ok(_) => return fs::write(file, text).map(|()| None),
        // If it is a dangling link, we fail.
        Err(e) if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(file).is_err() => {
            return state::replace(file, text).map(|()| None);
        }
        Err(e) => return Err(e),
    };
    let file = fs::canonicalize(file)?;
    let old = fs::read(&file)?;
    if old == text {
        return Ok(None);
    }
    let kept = backup_path(&file);
    // The contents may include secrets.
    state::replace(&kept, &old)?;
    // In a world-writable directory, the file may belong to another user who is waiting for
    // secrets.
    let dir = file.parent().unwrap_or(Path::new("/"));
    if fs::metadata(dir)?.mode() & 0o002 != 0 {
        state::replace(&file, text)?;
        return Ok(Some(kept));
    }
    // The service runs as a different user than the administrator, and must still be able to read
    // its file. But the new contents may include secrets, so the file must not be readable by all
    // users.
    let access = state::Access {
        owner: (was.uid(), was.gid()),
        mode: was.permissions().mode() & 0o660,
    };
    state::replace_as(&file, text, &access)?;
    Ok(Some(kept))
}

/// Returns an unused path for a backup: `FILE~`, `FILE~2`, and so on.
fn backup_path(file: &Path) -> PathBuf {
    let name = |end: String| {
        let mut name = file.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let numbered = (2..=GENERATIONS).map(|n| name(format!("~{n}")));
    let mut names = std::iter::once(name("~".into())).chain(numbered);
    let is_free = |name: &PathBuf| fs::symlink_metadata(name).is_err();
    // If all paths are used, reuse the last, because the first backup contains the comments.
    names
        .find(is_free)
        .unwrap_or_else(|| name(format!("~{GENERATIONS}")))
}

/// Lets a running daemon hand over to another program.
pub(super) fn upgrade(
    out: &mut dyn Write,
    binary: Option<&Path>,
    options: &ClientOptions,
) -> Result<(), Failure> {
    let binary = binary.map(whole).transpose()?;
    let done = client::upgrade(&options.socket()?, binary.as_deref())?;
    show(out, options.output, &done, report::upgraded)
}

/// Returns an absolute path, which is valid for any process.
fn whole(path: &Path) -> Result<String, Failure> {
    let failure =
        |why: &dyn std::fmt::Display| Failure::mistake(format!("{}: {why}", path.display()));
    let whole = std::path::absolute(path).map_err(|e| failure(&e))?;
    let text = whole.into_os_string().into_string();
    text.map_err(|_| failure(&"not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let name = format!("riserd-save-{}-{name}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn replaced_file_is_backed_up() {
        let dir = Dir::new("kept");
        let file = dir.0.join("riserd.yaml");
        assert_eq!(replace(&file, b"one").unwrap(), None);
        assert_eq!(replace(&file, b"one").unwrap(), None, "the same");
        let kept = replace(&file, b"two").unwrap().unwrap();
        assert_eq!(kept, dir.0.join("riserd.yaml~"));
        assert_eq!((read(&file), read(&kept)), ("two".into(), "one".into()));
        // The first backup contains the comments, so it is kept.
        let second = replace(&file, b"three").unwrap().unwrap();
        assert_eq!((read(&second), read(&kept)), ("two".into(), "one".into()));
        for n in 0..2 * GENERATIONS {
            replace(&file, n.to_string().as_bytes()).unwrap();
        }
        assert_eq!((read(&second), read(&kept)), ("two".into(), "one".into()));
        let files = fs::read_dir(&dir.0).unwrap().count();
        assert_eq!(files, 1 + GENERATIONS as usize);
    }

    /// For example, the configuration file of the package is replaced by root and read by the
    /// service.
    #[test]
    fn replaced_file_keeps_owner_and_mode() {
        let dir = Dir::new("owner");
        let file = dir.0.join("riserd.yaml");
        let access = |path: &Path| {
            let now = fs::metadata(path).unwrap();
            (now.uid(), now.gid(), now.mode() & 0o777)
        };
        replace(&file, b"new").unwrap();
        let (uid, gid, mode) = access(&file);
        assert_eq!(mode, 0o600);
        // Only root can change the owner of a file.
        let group = if uid == 0 { 1 } else { gid };
        for (before, after) in [(0o640, 0o640), (0o644, 0o640), (0o600, 0o600)] {
            std::os::unix::fs::chown(&file, None, Some(group)).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(before)).unwrap();
            let kept = replace(&file, format!("{before}").as_bytes()).unwrap();
            assert_eq!(access(&file), (uid, group, after));
            assert_eq!(access(&kept.unwrap()), (uid, gid, 0o600));
        }
    }

    #[test]
    fn file_in_shared_directory_is_private() {
        let dir = Dir::new("shared");
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o1777)).unwrap();
        let file = dir.0.join("now.yaml");
        fs::write(&file, "one").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o660)).unwrap();
        replace(&file, b"two").unwrap().unwrap();
        assert_eq!(read(&file), "two");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn symbolic_link_is_preserved() {
        let dir = Dir::new("link");
        let (file, link) = (dir.0.join("real.yaml"), dir.0.join("riserd.yaml"));
        std::os::unix::fs::symlink("real.yaml", &link).unwrap();
        let dangling = replace(&link, b"one").unwrap_err();
        assert_eq!(dangling.kind(), io::ErrorKind::NotFound);
        fs::write(&file, "one").unwrap();
        let kept = replace(&link, b"two").unwrap().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!((read(&file), read(&kept)), ("two".into(), "one".into()));
        assert_eq!(kept.file_name().unwrap(), "real.yaml~");
    }
}
