//! Previous configurations: the current configuration and some older ones, stored in the state
//! directory if available.
//!
//! Changes made step by step by the same process, such as a `targetcli` session, are treated as a
//! single change: the last step replaces the previous steps.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::blocked::BlockFile;
use super::flushes::FlushFiles;
use super::identities::IdentityFile;
use super::ports::PortFile;
use super::reservations::ReservationFiles;
use super::state::{self, Generation, StateDir};
use crate::config::Location;
use crate::server::Keepers;

/// Number of older configurations to keep.
pub const KEPT: usize = 10;

/// Maximum time in seconds between two steps of the same change.
const STEP: u64 = 60;

/// File name in the state directory.
const FILE: &str = "configurations.json";

/// A configuration that was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Seconds since 1970, using the host's clock.
    pub time: u64,
    /// User and process that requested it.
    pub who: String,
    /// Type of request: `start`, `upgrade`, `apply`, `reload`, `rollback 1`.
    pub how: String,
    /// The configuration, including secrets.
    pub yaml: String,
}

impl Entry {
    /// Creates an entry with the current time.
    #[must_use]
    pub fn now(who: &str, how: &str, yaml: String) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            time: time.map_or(0, |time| time.as_secs()),
            who: who.to_owned(),
            how: how.to_owned(),
            yaml,
        }
    }
}

impl Entry {
    /// Returns true if this is the next step of the same change as `before`.
    fn continues(&self, before: &Self) -> bool {
        let is_step = |entry: &Self| entry.how == "apply";
        // If the clock was set back, this is zero, so the change can be treated as a step of a
        // future change.
        let is_soon = self.time.saturating_sub(before.time) <= STEP;
        is_step(self) && is_step(before) && self.who == before.who && is_soon
    }
}

/// Contents of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    /// Applied configurations, newest first.
    configurations: Vec<Entry>,
    /// The configuration file when it was last read, as written by `Config::to_yaml`.
    #[serde(default)]
    file: Option<String>,
}

/// Version of the file format.
const VERSION: u32 = 1;

/// Result of moving the file away.
const WITHOUT: &str =
    "without the file, the configuration file is served and rollbacks are not possible";

/// Applied configurations, newest first.
#[derive(Debug, Default)]
pub struct History {
    entries: Vec<Entry>,
    file: Option<String>,
    dir: Option<Arc<StateDir>>,
    /// The file was damaged, so the last entry could be missing.
    was_damaged: bool,
}

impl History {
    /// Opens the history at a location. If the default location does not exist, we continue without
    /// a history, but an unreadable directory is an error because it could contain reservations. If
    /// the file is damaged, we use its previous generation, or an empty history.
    ///
    /// # Errors
    /// Fails if the directory is not available, or if the file version is not supported.
    pub fn open(location: &Location) -> io::Result<Self> {
        match location {
            Location::Off => Ok(Self::default()),
            Location::At(path) => Self::open_at(path, false),
            // This directory was not configured explicitly, so it is not an error if it is missing.
            Location::Default => {
                let path = state::default_path();
                path.map_or_else(|| Ok(Self::default()), |path| Self::open_at(&path, true))
            }
        }
    }

    fn open_at(path: &Path, is_default: bool) -> io::Result<Self> {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        match StateDir::lock(path) {
            Ok(dir) => Self::load(dir),
            Err(error) if is_default => {
                tracing::warn!(directory = %path.display(), %error, "cannot use the state \
                                                                     directory: applied \
                                                                     configurations, reservations \
                                                                     and failed flushes will not \
                                                                     be persisted");
                Ok(Self::default())
            }
            Err(error) => Err(named(error)),
        }
    }

    /// Notes that the daemon is terminating, so that the next daemon waits for it.
    pub fn note_ending(&self) {
        if let Some(dir) = &self.dir
            && let Err(error) = dir.note_ending()
        {
            tracing::warn!(%error, "cannot record that this daemon is terminating: the next daemon \
                                    may fail to start instead of waiting");
        }
    }

    fn load(dir: StateDir) -> io::Result<Self> {
        let (kept, was_damaged) = match dir.load_generation::<Kept>(FILE, VERSION) {
            Ok(Generation::Current(kept)) => (kept, false),
            Ok(Generation::Previous(kept)) => (Some(kept), true),
            // The history is only needed for rollbacks.
            Err(error) if state::is_damaged(&error) => {
                tracing::error!(%error, "cannot read the history of configurations; starting with \
                                         an empty history");
                dir.set_aside(FILE);
                (None, true)
            }
            Err(error) => return Err(state::advise(error, WITHOUT)),
        };
        let (entries, file) =
            kept.map_or_else(Default::default, |kept| (kept.configurations, kept.file));
        let dir = Some(Arc::new(dir));
        Ok(Self {
            entries,
            file,
            dir,
            was_damaged,
        })
    }

    /// Returns true if the file was damaged when it was read. In this case, the configuration that
    /// was applied last may be missing.
    #[must_use]
    pub fn was_damaged(&self) -> bool {
        self.was_damaged
    }

    /// Returns true if the history is available after a restart.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.dir.is_some()
    }

    /// Uses the entries of the previous program, unless there is a state directory.
    pub fn adopt(&mut self, entries: Vec<Entry>) {
        // If there is a directory, the previous program has stored its entries there.
        if self.dir.is_none() {
            self.entries = entries;
        }
    }

    /// Returns the stores for reservations, failed flushes and port numbers in the same directory.
    #[must_use]
    pub fn keepers(&self) -> Keepers {
        let Some(dir) = &self.dir else {
            return Keepers::default();
        };
        Keepers {
            reservations: Some(Arc::new(ReservationFiles::new(Arc::clone(dir)))),
            ports: Some(Arc::new(PortFile::new(Arc::clone(dir)))),
            flushes: Some(Arc::new(FlushFiles::new(Arc::clone(dir)))),
            identities: Some(Arc::new(IdentityFile::new(Arc::clone(dir)))),
            blocklist: Some(Arc::new(BlockFile::new(Arc::clone(dir)))),
        }
    }

    /// Returns all entries, newest first.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Adds a configuration as the newest entry. If there is a directory, the entry is written
    /// durably.
    ///
    /// # Errors
    /// Fails if the entry cannot be stored. In this case, it is not added.
    pub fn record(&mut self, entry: Entry) -> io::Result<()> {
        let last = self.entries.first();
        let replaced = usize::from(last.is_some_and(|last| entry.continues(last)));
        let mut entries = vec![entry];
        // We store `KEPT` + 1 entries, because the new entry is the current configuration, which is
        // not used for a rollback.
        entries.extend(self.entries.iter().skip(replaced).take(KEPT).cloned());
        self.keep(entries, self.file.clone())
    }

    /// Returns the configuration file as it was last read, if known.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Updates the contents of the configuration file after it has been read.
    ///
    /// # Errors
    /// Fails if it cannot be stored.
    pub fn see_file(&mut self, yaml: String) -> io::Result<()> {
        // A durable write takes time, and the file is usually unchanged on reload.
        if self.file.as_ref() == Some(&yaml) {
            return Ok(());
        }
        self.keep(self.entries.clone(), Some(yaml))
    }

    fn keep(&mut self, entries: Vec<Entry>, file: Option<String>) -> io::Result<()> {
        let kept = Kept {
            configurations: entries,
            file,
        };
        if let Some(dir) = &self.dir {
            // This must be done before updating memory, because we should not show an entry that
            // would be lost on restart.
            dir.save_generation(FILE, VERSION, &kept)?;
        }
        (self.entries, self.file) = (kept.configurations, kept.file);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: usize) -> Entry {
        Entry::now(&format!("process {n}"), "apply", format!("number {n}"))
    }

    #[test]
    fn latest_entries_survive_restart() {
        let name = format!("riserd-history-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        let location = Location::At(path.clone());
        let mut history = History::open(&location).unwrap();
        assert!(history.entries().is_empty());
        for n in 0..KEPT + 5 {
            history.record(entry(n)).unwrap();
        }
        let before = history.entries().to_vec();
        assert_eq!(before.len(), KEPT + 1);
        assert_eq!(before[0].yaml, format!("number {}", KEPT + 4));
        assert!(History::open(&location).is_err(), "one has it");
        drop(history);
        assert_eq!(History::open(&location).unwrap().entries(), before);
        // A damaged file is replaced by the previous generation, or else by an empty history.
        std::fs::write(path.join(FILE), "{").unwrap();
        let history = History::open(&location).unwrap();
        assert_eq!(history.entries()[..KEPT], before[1..]);
        assert!(history.was_damaged());
        drop(history);
        assert!(!History::open(&location).unwrap().was_damaged(), "repaired");
        for name in [FILE.to_owned(), format!("{FILE}~")] {
            std::fs::write(path.join(name), "{").unwrap();
        }
        let history = History::open(&location).unwrap();
        assert!(history.was_damaged() && history.entries().is_empty());
        drop(history);
        std::fs::write(path.join(FILE), r#"{ "version": 7 }"#).unwrap();
        let error = History::open(&location).unwrap_err().to_string();
        assert!(error.contains("unsupported file version 7"), "{error}");
        let error = History::open_at(&path, true).unwrap_err().to_string();
        assert!(error.contains(FILE), "{error}");
        let nowhere = path.join(FILE).join("no directory");
        assert!(History::open_at(&nowhere, true).is_ok());
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn steps_of_process_form_single_change() {
        let mut history = History::open(&Location::Off).unwrap();
        for (time, who, how) in [
            (0, "riserd", "start"),
            (100, "me", "apply"),
            (100 + STEP, "me", "apply"),
            (100 + 2 * STEP, "me", "apply"),
            (100 + 2 * STEP, "you", "apply"),
            (101 + 2 * STEP, "me", "apply"),
            (102 + 3 * STEP, "me", "apply"),
            (102 + 3 * STEP, "me", "rollback 1"),
            (102 + 3 * STEP, "me", "apply"),
        ] {
            let entry = Entry {
                time,
                ..Entry::now(who, how, format!("{time}"))
            };
            history.record(entry).unwrap();
        }
        let kept: Vec<_> = history
            .entries()
            .iter()
            .rev()
            .map(|e| (e.time, e.who.as_str()))
            .collect();
        assert_eq!(
            kept,
            [
                (0, "riserd"),
                (100 + 2 * STEP, "me"),
                (100 + 2 * STEP, "you"),
                (101 + 2 * STEP, "me"),
                (102 + 3 * STEP, "me"),
                (102 + 3 * STEP, "me"),
                (102 + 3 * STEP, "me"),
            ]
        );
    }

    #[test]
    fn history_without_directory_is_kept_in_memory() {
        let mut history = History::open(&Location::Off).unwrap();
        history.record(entry(1)).unwrap();
        assert_eq!(history.entries().len(), 1);
    }
}
