//! The initiator port of an export, kept over a crash.
//!
//! A process that was killed leaves a session whose commands may still be queued at the target, and
//! whose clients send theirs again to the process that takes its place. That one logs in as the
//! same initiator port, so that the target ends the old session first.

use std::fs;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::args::ConnectOptions;
use super::state::{StateDir, generation, process_start};
use super::state_file;

/// A number that an initiator port may follow from.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Entry of a port in its file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    /// Path by which the disk shows, and its address.
    path: PathBuf,
    url: String,
    port: u64,
    /// Its GUID, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guid: Option<u64>,
    /// The process that uses it, and when that was started.
    pid: u32,
    started: u64,
    /// The generation of the unit's cache, if it offers one.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "generation")]
    cache: Option<[u8; 16]>,
}

/// A port that is written down.
#[derive(Clone, Debug)]
pub(super) struct PortEntry {
    file: PathBuf,
    entry: Entry,
}

impl PortEntry {
    /// Writes down of which generation the unit's cache is.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(super) fn note_cache(&mut self, generation: Option<[u8; 16]>) -> io::Result<()> {
        let before = std::mem::replace(&mut self.entry.cache, generation);
        if before == generation {
            return Ok(());
        }
        // What could not be written is written the next time.
        self.write().inspect_err(|_| self.entry.cache = before)
    }

    /// Writes the file, which appears at once and whole.
    fn write(&self) -> io::Result<()> {
        let temporary = self.file.with_file_name(format!(
            ".{}-{}.port.tmp",
            self.entry.pid, self.entry.started
        ));
        state_file::write(&self.file, &temporary, &self.entry)
    }
}

/// The initiator port of an export of this process. It stays written down until it is released.
#[derive(Debug)]
pub(super) struct ExportPort {
    entry: Option<PortEntry>,
    port: u64,
    is_inherited: bool,
}

impl ExportPort {
    /// The port of the process that served the same address at the same path and did not end
    /// properly; otherwise a random one.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(super) fn take(dir: &StateDir, path: &Path, url: &str) -> io::Result<Self> {
        let _lock = dir.lock()?;
        let mut hasher = DefaultHasher::new();
        (path, url).hash(&mut hasher);
        let file = dir.path().join(format!("{:016x}.port", hasher.finish()));
        let before = fs::read(&file)
            .ok()
            .and_then(|text| serde_json::from_slice::<Entry>(&text).ok());
        let (port, guid, cache, is_inherited) = match before {
            // Two live processes with one port would end each other's sessions.
            Some(entry) if process_start(entry.pid) == Some(entry.started) => {
                return Ok(Self {
                    entry: None,
                    port: random(),
                    is_inherited: false,
                });
            }
            Some(entry) if entry.path == path && entry.url == url => {
                (entry.port, entry.guid, entry.cache, true)
            }
            _ => (random(), None, None, false),
        };
        let pid = std::process::id();
        let entry = Entry {
            path: path.to_owned(),
            url: url.to_owned(),
            port,
            guid,
            pid,
            started: process_start(pid).unwrap_or(0),
            cache,
        };
        let entry = PortEntry { file, entry };
        entry.write()?;
        Ok(Self {
            entry: Some(entry),
            port,
            is_inherited,
        })
    }

    /// Has a session log in with this port.
    pub(super) fn set_on(&self, link: &mut ConnectOptions) {
        link.port = Some(self.port);
        link.guid = self.noted_guid();
        link.recovers = self.is_inherited;
        link.noted = self.noted_cache();
    }

    /// Number that the initiator port follows from.
    #[cfg(test)]
    fn port(&self) -> u64 {
        self.port
    }

    /// Returns whether a process had it that did not end properly.
    pub(super) fn is_inherited(&self) -> bool {
        self.is_inherited
    }

    /// The GUID of the port that the process before had noted.
    fn noted_guid(&self) -> Option<u64> {
        self.entry.as_ref()?.entry.guid
    }

    /// Writes down which GUID the port has, before the disk is used.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(super) fn note_guid(&mut self, guid: Option<u64>) -> io::Result<()> {
        match &mut self.entry {
            Some(entry) if entry.entry.guid != guid => {
                entry.entry.guid = guid;
                entry.write()
            }
            _ => Ok(()),
        }
    }

    /// The generation of the unit's cache that the process before had noted.
    fn noted_cache(&self) -> Option<[u8; 16]> {
        self.entry.as_ref()?.entry.cache
    }

    /// Entry of the port; `None` if another process has the port of that path.
    pub(super) fn entry(&self) -> Option<PortEntry> {
        self.entry.clone()
    }

    /// Forgets the port, when its session has ended.
    pub(super) fn release(self) {
        if let Some(entry) = self.entry {
            // One that stays is as good: its process is gone.
            let _ = fs::remove_file(entry.file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_killed_hands_on_its_port() {
        let path = std::env::temp_dir().join(format!("riser-state-{}-port", std::process::id()));
        let dir = StateDir::at(path.clone()).unwrap();
        let take = |path: &str, url: &str| ExportPort::take(&dir, Path::new(path), url).unwrap();
        let mut first = take("/run/a", "iscsi://host/iqn.2026-01.com.example:disk/0");
        let port = first.port();
        // While its process lives, no other process gets the port.
        let second = take("/run/a", "iscsi://host/iqn.2026-01.com.example:disk/0");
        assert_ne!(second.port(), port);
        let second_was_inherited = second.is_inherited();
        second.release();
        // Its process was killed.
        first.note_guid(Some(7)).unwrap();
        first.entry().unwrap().note_cache(Some([0xa5; 16])).unwrap();
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
        assert_eq!(first.noted_cache(), None);
        // One that ends properly leaves nothing to hand on.
        third.release();
        assert_ne!(take("/run/a", &entry.url).port(), port);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_generation_that_could_not_be_written_is_written_later() {
        let path = std::env::temp_dir().join(format!("riser-state-{}-full", std::process::id()));
        let dir = StateDir::at(path.clone()).unwrap();
        let port = ExportPort::take(&dir, Path::new("/run/a"), "srp://host/0").unwrap();
        let mut entry = port.entry().unwrap();
        fs::remove_dir_all(&path).unwrap();
        entry.note_cache(Some([0xa5; 16])).unwrap_err();
        fs::create_dir(&path).unwrap();
        entry.note_cache(Some([0xa5; 16])).unwrap();
        let text = fs::read(&entry.file).unwrap();
        let written: Entry = serde_json::from_slice(&text).unwrap();
        assert_eq!(written.cache, Some([0xa5; 16]));
        fs::remove_dir_all(path).unwrap();
    }
}
