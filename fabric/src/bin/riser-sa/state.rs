//! A file with what hosts have registered, for the time after a restart.
//!
//! It has a line that names its version, and then for each request the GID of its host and the MAD. What
//! hosts change is written some seconds later, and at the end. It is no database: a record that is a
//! little too old, or lost with a crash, is set again by its host when its lease is renewed.

use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use riser_fabric::sa::administrator::Administrator;
use riser_transport::verbs::Gid;
use riser_transport::wire::{MAD_LEN, Mad};
use tracing::{info, warn};

const VERSION: &[u8] = b"riser-sa 1\n";

/// Bytes of a request with its host.
const ENTRY: usize = 16 + MAD_LEN;

/// Most requests that are read: more than an administrator keeps.
const MAX_ENTRIES: usize = 4096;

/// Time from a change until it is written, with those that come meanwhile.
const PAUSE: Duration = Duration::from_secs(5);

/// Time after which a file that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(60);

/// The file.
pub(super) struct State {
    path: PathBuf,
    /// Changes that it has.
    written: u64,
    /// Time at which others are written.
    due: Option<Instant>,
    /// It could not be written the last time.
    has_failed: bool,
}

impl State {
    /// Gives the administrator what the file has; a file that is not there has nothing, and one that a
    /// power cut has damaged is put aside.
    ///
    /// # Errors
    /// Those of reading and of putting aside, and `InvalidData` for a file of another program or version:
    /// it is left as it is.
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
                    "the state is damaged, and what hosts have registered is lost: it is now {}",
                    aside.display()
                );
                [].chunks_exact(ENTRY)
            }
            None if !bytes.is_empty() => {
                let what = "it is no file of riser-sa, or one of another version";
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
            "hosts are asked whether they are still there: {}",
            path.display()
        );
        Ok(Self {
            path,
            written: administrator.changes(),
            due: None,
            has_failed: false,
        })
    }

    /// Time at which [`Self::turn`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Writes what has changed when its time has come.
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
                "what hosts have registered is written again: {}",
                self.path.display()
            ),
            _ => {}
        }
        self.has_failed = result.is_err();
        self.due = self.has_failed.then_some(now + RETRY);
    }

    /// Writes all there is, before the program ends.
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
            "a restart will forget what hosts have registered: {}",
            self.path.display()
        );
    }
}

/// Whether a power cut may have made this of a file that was being replaced: it has its length, and zeros
/// up to the end of its first request at least, or it has its first bytes.
fn is_damaged(bytes: &[u8]) -> bool {
    let len = bytes.len().checked_sub(VERSION.len());
    let has_length = len.is_some_and(|len| len.is_multiple_of(ENTRY));
    let mut head = bytes.iter().take(VERSION.len() + ENTRY);
    let is_zero = has_length && head.all(|byte| *byte == 0);
    !bytes.is_empty() && (is_zero || VERSION.starts_with(bytes))
}

/// Path of a file beside another one.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Replaces a file as a whole. Only its owner reads it: services may have keys.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = with_suffix(path, ".new");
    // One that is there keeps its mode, and may be another file's name.
    match std::fs::remove_file(&name) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&name)?;
    file.write_all(bytes)?;
    // Or a power cut may leave the new name and none of the bytes.
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

    /// A folder that is not there yet, for the time of a test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("riser-sa-state-{}-{name}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_state_that_could_not_be_written_is_written_later() {
        let folder = Folder::new("later");
        let path = folder.0.join("state");
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut administrator = administrator();
        let mut state = State::open(path.clone(), &mut administrator, now).unwrap();
        let set = Request::set_service(&ServiceRecord::new(0x1234, ADDR.into()));
        let mad = set.emit(TransactionId(1));
        administrator.restore(now, ADDR.into(), &mad);
        state.turn(now, &administrator);
        state.turn(now + PAUSE, &administrator);
        assert!(state.has_failed);
        // It is tried again, but not all the time, without another change.
        state.turn(now + PAUSE, &administrator);
        let due = state.deadline().unwrap();
        assert_eq!(due, now + PAUSE + second * 60);
        std::fs::create_dir(&folder.0).unwrap();
        state.turn(due - second, &administrator);
        assert!(!path.exists());
        state.turn(now + second * 70, &administrator);
        assert!(!state.has_failed && state.deadline().is_none());
        let written = std::fs::metadata(&path).unwrap().len();
        assert_eq!(written, (VERSION.len() + ENTRY) as u64);
    }

    #[test]
    fn what_no_power_cut_leaves_is_another_programs() {
        let folder = Folder::new("damaged");
        std::fs::create_dir(&folder.0).unwrap();
        let path = folder.0.join("state");
        let (one, now) = (VERSION.len() + ENTRY, Instant::now());
        let open = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let opened = State::open(path.clone(), &mut administrator(), now);
            (opened.map_err(|error| error.kind()).err(), path.exists())
        };
        // The begin of an image of a disk, one that ends where a state may, and zeros of other lengths.
        let image = [&[0; 32 << 10][..], b"\x01CD001\x01"].concat();
        let mut other = vec![0; one + ENTRY];
        other[one - 1] = 1;
        for bytes in [&image[..], &other, &[0; 300], &[0; 5], b"riser-sa 2\n"] {
            let refused = (Some(ErrorKind::InvalidData), true);
            assert_eq!(open(bytes), refused, "{} bytes", bytes.len());
        }
        // What is behind the first of several may have been written.
        let mut several = vec![0; one + ENTRY];
        several[one] = 1;
        for bytes in [&vec![0; one][..], &several, &VERSION[..5]] {
            assert_eq!(open(bytes), (None, false), "{} bytes", bytes.len());
            assert_eq!(std::fs::read(with_suffix(&path, ".bad")).unwrap(), bytes);
        }
        assert_eq!(open(b""), (None, true));
    }
}
