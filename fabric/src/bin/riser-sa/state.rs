//! State file with the registrations of hosts, used to restore them after a restart.
//!
//! The first line identifies the version. It is followed by the GID of the host and the MAD of each
//! request. Changes are written with a delay of a few seconds, and on shutdown. The file is not a
//! database: hosts set outdated or lost records again when they renew their leases.

use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use riser_fabric::sa::administrator::Administrator;
use riser_transport::verbs::Gid;
use riser_transport::wire::{MAD_LEN, Mad};
use tracing::{info, warn};

const VERSION: &[u8] = b"riser-sa 1\n";

/// Length of a request with its host, in bytes.
const ENTRY: usize = 16 + MAD_LEN;

/// Maximum number of requests to read, which exceeds the limits of an administrator.
const MAX_ENTRIES: usize = 4096;

/// Delay between a change and its write, so that subsequent changes are written together.
const PAUSE: Duration = Duration::from_secs(5);

/// Delay before a failed write is retried.
const RETRY: Duration = Duration::from_secs(60);

/// State file.
pub(super) struct State {
    path: PathBuf,
    /// Change counter of the administrator at the last write.
    written: u64,
    /// Time of the next write, if there are unwritten changes.
    due: Option<Instant>,
    /// The last write failed.
    has_failed: bool,
}

impl State {
    /// Restores the registrations from the file into the administrator. A missing file is empty. A
    /// file damaged by a power failure is renamed.
    ///
    /// # Errors
    /// Returns read and rename errors, and `InvalidData` for a file of another program or version,
    /// which is not modified.
    pub(super) fn open(
        path: PathBuf,
        administrator: &mut Administrator,
        now: Instant,
    ) -> io::Result<Self> {
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => VERSION.to_vec(),
            Err(error) => return Err(error),
        };
        let entries = match bytes.strip_prefix(VERSION) {
            None if is_damaged(&bytes) => {
                let aside = with_suffix(&path, ".bad");
                std::fs::rename(&path, &aside)?;
                warn!(
                    "damaged state file: the registrations of hosts are lost; renamed it to {}",
                    aside.display()
                );
                [].chunks_exact(ENTRY)
            }
            None if !bytes.is_empty() => {
                let what = "not a state file of riser-sa, or unsupported version";
                return Err(io::Error::new(ErrorKind::InvalidData, what));
            }
            entries => entries.unwrap_or_default().chunks_exact(ENTRY),
        };
        let mut count = 0;
        for entry in entries.take(MAX_ENTRIES) {
            let (host, mad) = entry.split_at(16);
            let host = Gid(host.try_into().expect("16 bytes"));
            let mad: &Mad = mad.try_into().expect("a MAD");
            administrator.restore(now, host, mad);
            count += 1;
        }
        info!(
            requests = count,
            "loaded registrations, verifying that their hosts are reachable: {}",
            path.display()
        );
        Ok(Self {
            path,
            written: administrator.changes(),
            due: None,
            has_failed: false,
        })
    }

    /// Returns the time at which [`Self::turn`] should be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Writes pending changes when they are due.
    pub(super) fn turn(&mut self, now: Instant, administrator: &Administrator) {
        if administrator.changes() != self.written && self.due.is_none() {
            self.due = Some(now + PAUSE);
        }
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        let result = self.write(now, administrator);
        match &result {
            Err(error) if !self.has_failed => self.warn(error),
            Ok(()) if self.has_failed => info!(
                "registrations of hosts are saved again: {}",
                self.path.display()
            ),
            _ => {}
        }
        self.has_failed = result.is_err();
        self.due = self.has_failed.then_some(now + RETRY);
    }

    /// Writes all changes on shutdown.
    pub(super) fn finish(mut self, now: Instant, administrator: &Administrator) {
        if let Err(error) = self.write(now, administrator) {
            self.warn(&error);
        }
    }

    fn write(&mut self, now: Instant, administrator: &Administrator) -> io::Result<()> {
        let mut bytes = VERSION.to_vec();
        for (host, mad) in administrator.requests(now) {
            bytes.extend(host.0);
            bytes.extend(mad);
        }
        replace(&self.path, &bytes)?;
        self.written = administrator.changes();
        Ok(())
    }

    fn warn(&self, error: &io::Error) {
        warn!(
            %error,
            "cannot save the registrations of hosts, a restart will lose them: {}",
            self.path.display()
        );
    }
}

/// Returns whether a power failure during replacement may have left these bytes: a valid length
/// with zeros at least up to the end of the first request, or a prefix of a valid file.
fn is_damaged(bytes: &[u8]) -> bool {
    let len = bytes.len().checked_sub(VERSION.len());
    let has_length = len.is_some_and(|len| len.is_multiple_of(ENTRY));
    let mut head = bytes.iter().take(VERSION.len() + ENTRY);
    let is_zero = has_length && head.all(|byte| *byte == 0);
    !bytes.is_empty() && (is_zero || VERSION.starts_with(bytes))
}

/// Appends a suffix to the file name.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Replaces a file atomically. Only the owner may read it, because services may have keys.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = with_suffix(path, ".new");
    // An existing file would keep its mode, and might be a link to another file.
    match std::fs::remove_file(&name) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&name)?;
    file.write_all(bytes)?;
    // Otherwise a power failure could persist the new name without the data.
    file.sync_all()?;
    std::fs::rename(&name, path)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use riser_fabric::sa::administrator::AdministratorConfig;
    use riser_fabric::sa::client::Request;
    use riser_fabric::sa::wire::service::ServiceRecord;
    use riser_transport::verbs::Mtu;
    use riser_transport::wire::TransactionId;

    use super::*;

    const ADDR: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

    fn administrator() -> Administrator {
        Administrator::new(AdministratorConfig::new(ADDR, Mtu::Mtu1024, [1; 16]))
    }

    /// Path of a temporary directory that is removed after the test.
    struct TempDirectory(PathBuf);

    impl TempDirectory {
        fn new(name: &str) -> Self {
            let name = format!("riser-sa-state-{}-{name}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }
    }

    impl Drop for TempDirectory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn failed_state_write_is_retried() {
        let directory = TempDirectory::new("later");
        let path = directory.0.join("state");
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut administrator = administrator();
        let mut state = State::open(path.clone(), &mut administrator, now).unwrap();
        let set = Request::set_service(&ServiceRecord::new(0x1234, ADDR.into()));
        let mad = set.emit(TransactionId(1));
        administrator.restore(now, ADDR.into(), &mad);
        state.turn(now, &administrator);
        state.turn(now + PAUSE, &administrator);
        assert!(state.has_failed);
        // The write is retried without another change, but not immediately.
        state.turn(now + PAUSE, &administrator);
        let due = state.deadline().unwrap();
        assert_eq!(due, now + PAUSE + second * 60);
        std::fs::create_dir(&directory.0).unwrap();
        state.turn(due - second, &administrator);
        assert!(!path.exists());
        state.turn(now + second * 70, &administrator);
        assert!(!state.has_failed && state.deadline().is_none());
        let written = std::fs::metadata(&path).unwrap().len();
        assert_eq!(written, (VERSION.len() + ENTRY) as u64);
    }

    #[test]
    fn foreign_file_is_not_treated_as_damaged() {
        let directory = TempDirectory::new("damaged");
        std::fs::create_dir(&directory.0).unwrap();
        let path = directory.0.join("state");
        let (one, now) = (VERSION.len() + ENTRY, Instant::now());
        let open = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let opened = State::open(path.clone(), &mut administrator(), now);
            (opened.map_err(|error| error.kind()).err(), path.exists())
        };
        // The start of a disk image, an image with the length of a state file, and zeros of other
        // lengths.
        let image = [&[0; 32 << 10][..], b"\x01CD001\x01"].concat();
        let mut other = vec![0; one + ENTRY];
        other[one - 1] = 1;
        for bytes in [&image[..], &other, &[0; 300], &[0; 5], b"riser-sa 2\n"] {
            let refused = (Some(ErrorKind::InvalidData), true);
            assert_eq!(open(bytes), refused, "{} bytes", bytes.len());
        }
        // Requests after the first one may have been written.
        let mut several = vec![0; one + ENTRY];
        several[one] = 1;
        for bytes in [&vec![0; one][..], &several, &VERSION[..5]] {
            assert_eq!(open(bytes), (None, false), "{} bytes", bytes.len());
            assert_eq!(std::fs::read(with_suffix(&path, ".bad")).unwrap(), bytes);
        }
        assert_eq!(open(b""), (None, true));
    }
}
