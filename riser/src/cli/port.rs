//! Initiator ports of exports, which are stored to handle crashes.
//!
//! After a process is killed, its session may still have commands queued at the target, and clients
//! send their requests again to the next process. This uses the same initiator port for its login,
//! so the target first closes the previous session.

use std::fs;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use riser_initiator::engine::SessionReport;
use serde::{Deserialize, Serialize};

use super::args::ConnectOptions;
use super::state::{StateDir, generation, process_start};
use super::state_file;

/// Generates a random number for an initiator port.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Contents of the file for a port.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    /// Path of the export, and address of the disk.
    path: PathBuf,
    url: String,
    port: u64,
    /// GUID of the port, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guid: Option<u64>,
    /// Process using the port, and its start time.
    pid: u32,
    started: u64,
    /// Cache generation of the unit, if supported.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "generation")]
    cache: Option<[u8; 16]>,
    /// A login was redirected to another port.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    was_redirected: bool,
}

/// A port and its file.
#[derive(Clone, Debug)]
pub(super) struct PortEntry {
    file: PathBuf,
    entry: Entry,
}

impl PortEntry {
    /// Records the cache generation of the unit, and whether a login was redirected.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
    pub(super) fn note_session(&mut self, report: &SessionReport) -> io::Result<()> {
        let before = (self.entry.cache, self.entry.was_redirected);
        let noted = (report.cache, report.is_redirected);
        if before == noted {
            return Ok(());
        }
        (self.entry.cache, self.entry.was_redirected) = noted;
        // If this fails, try again next time.
        self.write()
            .inspect_err(|_| (self.entry.cache, self.entry.was_redirected) = before)
    }

    /// Writes the file atomically.
    fn write(&self) -> io::Result<()> {
        let temporary = self.file.with_file_name(format!(
            ".{}-{}.port.tmp",
            self.entry.pid, self.entry.started
        ));
        state_file::write(&self.file, &temporary, &self.entry)
    }
}

/// Initiator port for an export of this process. It's stored until it is released.
#[derive(Debug)]
pub(super) struct ExportPort {
    entry: Option<PortEntry>,
    port: u64,
    is_inherited: bool,
}

impl ExportPort {
    /// Allocates an initiator port. If a previous process served the same address at the same path
    /// and was not stopped cleanly, its port is used. Otherwise the port is random.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
    pub(super) fn allocate_port(dir: &StateDir, path: &Path, url: &str) -> io::Result<Self> {
        let _lock = dir.lock()?;
        let mut hasher = DefaultHasher::new();
        (path, url).hash(&mut hasher);
        let file = dir.path().join(format!("{:016x}.port", hasher.finish()));
        let before = fs::read(&file)
            .ok()
            .and_then(|text| serde_json::from_slice::<Entry>(&text).ok());
        let (before, is_inherited) = match before {
            // If two processes used the same port, they would close each other's sessions.
            Some(entry) if process_start(entry.pid) == Some(entry.started) => {
                return Ok(Self {
                    entry: None,
                    port: random(),
                    is_inherited: false,
                });
            }
            Some(entry) if entry.path == path && entry.url == url => (Some(entry), true),
            _ => (None, false),
        };
        let port = before.as_ref().map_or_else(random, |before| before.port);
        let pid = std::process::id();
        let entry = Entry {
            path: path.to_owned(),
            url: url.to_owned(),
            port,
            guid: before.as_ref().and_then(|before| before.guid),
            pid,
            started: process_start(pid).unwrap_or(0),
            cache: before.as_ref().and_then(|before| before.cache),
            was_redirected: before.is_some_and(|before| before.was_redirected),
        };
        let entry = PortEntry { file, entry };
        entry.write()?;
        Ok(Self {
            entry: Some(entry),
            port,
            is_inherited,
        })
    }

    /// Configures a session to use this port.
    pub(super) fn set_on(&self, link: &mut ConnectOptions) {
        link.port = Some(self.port);
        link.guid = self.noted_guid();
        link.recovers = self.is_inherited;
        link.noted = self.noted_cache();
        link.was_redirected = self.was_redirected();
    }

    /// Returns the number used to generate the initiator port.
    #[cfg(test)]
    fn port(&self) -> u64 {
        self.port
    }

    /// Returns whether the port is from a process that was not stopped cleanly.
    pub(super) fn is_inherited(&self) -> bool {
        self.is_inherited
    }

    /// Returns the GUID recorded by the previous process.
    fn noted_guid(&self) -> Option<u64> {
        self.entry.as_ref()?.entry.guid
    }

    /// Records the GUID of the port, and whether its first login was redirected, before using the
    /// disk.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
    pub(super) fn note_login(&mut self, guid: Option<u64>, is_redirected: bool) -> io::Result<()> {
        let Some(noted) = &mut self.entry else {
            return Ok(());
        };
        let entry = &mut noted.entry;
        let before = (entry.guid, entry.was_redirected);
        entry.guid = guid;
        entry.was_redirected |= is_redirected;
        if before == (entry.guid, entry.was_redirected) {
            return Ok(());
        }
        noted.write()
    }

    /// Returns the cache generation recorded by the previous process.
    fn noted_cache(&self) -> Option<[u8; 16]> {
        self.entry.as_ref()?.entry.cache
    }

    /// Returns whether a login of the previous process was redirected.
    fn was_redirected(&self) -> bool {
        let entry = self.entry.as_ref();
        entry.is_some_and(|entry| entry.entry.was_redirected)
    }

    /// Returns the file of the port, or `None` if the port for this path is used by another
    /// process.
    pub(super) fn entry(&self) -> Option<PortEntry> {
        self.entry.clone()
    }

    /// Removes the file of the port after closing its session.
    pub(super) fn release(self) {
        if let Some(entry) = self.entry {
            // This may fail: the file is ignored because its process has exited.
            let _ = fs::remove_file(entry.file);
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_initiator::engine::SessionStatus;

    use super::*;

    /// Report of a session whose login was redirected.
    fn report() -> SessionReport {
        SessionReport {
            cache: Some([0xa5; 16]),
            is_redirected: true,
            ..SessionStatus::default().report()
        }
    }

    #[test]
    fn redirected_login_is_noted() {
        let path = std::env::temp_dir().join(format!("riser-state-{}-moved", std::process::id()));
        let dir = StateDir::at(path.clone()).unwrap();
        let mut port = ExportPort::allocate_port(&dir, Path::new("/a"), "srp://host/0").unwrap();
        for (is_redirected, expected) in [(false, false), (true, true), (false, true)] {
            port.note_login(Some(7), is_redirected).unwrap();
            let text = fs::read(port.entry().unwrap().file).unwrap();
            let written: Entry = serde_json::from_slice(&text).unwrap();
            assert_eq!((written.guid, written.was_redirected), (Some(7), expected));
        }
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn killed_process_passes_on_port() {
        let path = std::env::temp_dir().join(format!("riser-state-{}-port", std::process::id()));
        let dir = StateDir::at(path.clone()).unwrap();
        let take =
            |path: &str, url: &str| ExportPort::allocate_port(&dir, Path::new(path), url).unwrap();
        let mut first = take("/run/a", "iscsi://host/iqn.2026-01.com.example:disk/0");
        let port = first.port();
        // The port isn't used by another process while its own process is alive.
        let second = take("/run/a", "iscsi://host/iqn.2026-01.com.example:disk/0");
        assert_ne!(second.port(), port);
        let second_was_inherited = second.is_inherited();
        second.release();
        // Assume that the process was killed.
        first.note_login(Some(7), false).unwrap();
        first.entry().unwrap().note_session(&report()).unwrap();
        let file = first.entry().unwrap().file;
        let mut entry: Entry = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        entry.started += 1;
        fs::write(&file, serde_json::to_vec(&entry).unwrap()).unwrap();
        assert_ne!(take("/run/b", &entry.url).port(), port);
        let third = take("/run/a", &entry.url);
        assert_eq!(third.port(), port);
        assert!(third.is_inherited() && !second_was_inherited);
        assert_eq!(third.noted_cache(), Some([0xa5; 16]));
        assert_eq!(third.noted_guid(), Some(7));
        assert!(third.was_redirected() && !first.was_redirected());
        assert_eq!(first.noted_cache(), None);
        // If the port was released, it isn't used again.
        third.release();
        assert_ne!(take("/run/a", &entry.url).port(), port);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn failed_generation_write_is_retried() {
        let path = std::env::temp_dir().join(format!("riser-state-{}-full", std::process::id()));
        let dir = StateDir::at(path.clone()).unwrap();
        let port = ExportPort::allocate_port(&dir, Path::new("/run/a"), "srp://host/0").unwrap();
        let mut entry = port.entry().unwrap();
        fs::remove_dir_all(&path).unwrap();
        entry.note_session(&report()).unwrap_err();
        fs::create_dir(&path).unwrap();
        entry.note_session(&report()).unwrap();
        let text = fs::read(&entry.file).unwrap();
        let written: Entry = serde_json::from_slice(&text).unwrap();
        assert_eq!(written.cache, Some([0xa5; 16]));
        assert!(written.was_redirected);
        fs::remove_dir_all(path).unwrap();
    }
}
