//! The configurations that were applied: the present one and some before it, kept in the state
//! directory where there is one.
//!
//! What one process applies step by step, such as a session of `targetcli`, is one change: its
//! last step takes the place of those before it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::flushes::FlushFiles;
use super::identities::IdentityFile;
use super::ports::PortFile;
use super::reservations::ReservationFiles;
use super::state::{self, StateDir};
use crate::config::Location;
use crate::server::Keepers;

/// Configurations before the present one that are kept.
pub const KEPT: usize = 10;

/// Seconds between two steps of one change at most.
const STEP: u64 = 60;

/// The file in the state directory.
const FILE: &str = "configurations.json";

/// A configuration that was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Seconds since 1970, by the host's clock.
    pub time: u64,
    /// The user and process that asked for it.
    pub who: String,
    /// `start`, `upgrade`, `apply`, `reload`, `rollback 1`: the request that led to it.
    pub how: String,
    /// The configuration, secrets included.
    pub yaml: String,
}

impl Entry {
    /// One that is applied now.
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
    /// Returns true if it is a further step of the change that another one was a step of.
    fn continues(&self, before: &Self) -> bool {
        let is_step = |entry: &Self| entry.how == "apply";
        // A clock that was set back makes this zero, so a change may be taken for a step of one in
        // the future.
        let is_soon = self.time.saturating_sub(before.time) <= STEP;
        is_step(self) && is_step(before) && self.who == before.who && is_soon
    }
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    /// Applied configurations, the newest first.
    configurations: Vec<Entry>,
    /// The configuration file at its last reading, as `Config::to_yaml` writes it.
    #[serde(default)]
    file: Option<String>,
}

/// The version of the file's form.
const VERSION: u32 = 1;

/// Result of moving the file away.
const WITHOUT: &str = "then the configuration file is served, and there is nothing to roll back to";

/// Applied configurations, the newest first.
#[derive(Debug, Default)]
pub struct History {
    entries: Vec<Entry>,
    file: Option<String>,
    dir: Option<Arc<StateDir>>,
}

impl History {
    /// Opens the history that was kept at a location. A default location that cannot be had is no
    /// reason not to serve; one that cannot be read is, since reservations may be kept there.
    ///
    /// # Errors
    /// The location's directory cannot be had, or its file is not one of ours.
    pub fn open(location: &Location) -> io::Result<Self> {
        match location {
            Location::Off => Ok(Self::default()),
            Location::At(path) => Self::open_at(path, false),
            // No configuration asks for this directory, so its absence is no failure.
            Location::Default => {
                let path = state::default_path();
                path.map_or_else(|| Ok(Self::default()), |path| Self::open_at(&path, true))
            }
        }
    }

    fn open_at(path: &Path, is_default: bool) -> io::Result<Self> {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        match StateDir::take(path) {
            Ok(dir) => Self::load(dir),
            Err(error) if is_default => {
                tracing::warn!(directory = %path.display(), %error, "applied configurations, reservations and failed flushes are not kept");
                Ok(Self::default())
            }
            Err(error) => Err(named(error)),
        }
    }

    /// The daemon is ending: the next one waits for it.
    pub fn note_ending(&self) {
        if let Some(dir) = &self.dir
            && let Err(error) = dir.note_ending()
        {
            tracing::warn!(%error, "the next daemon will not know that this one is ending");
        }
    }

    fn load(dir: StateDir) -> io::Result<Self> {
        let kept = dir.load(FILE, VERSION);
        let kept: Option<Kept> = kept.map_err(|error| state::advise(error, WITHOUT))?;
        let (entries, file) =
            kept.map_or_else(Default::default, |kept| (kept.configurations, kept.file));
        let dir = Some(Arc::new(dir));
        Ok(Self { entries, file, dir })
    }

    /// Returns true if a restart finds them.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.dir.is_some()
    }

    /// Goes on with what the program before had, where nothing is kept in a directory.
    pub fn adopt(&mut self, entries: Vec<Entry>) {
        // Otherwise the directory has them, as the program before has written them.
        if self.dir.is_none() {
            self.entries = entries;
        }
    }

    /// Returns the keepers of reservations and failed flushes of logical units, and the numbers of
    /// ports, in the same directory.
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
        }
    }

    /// All that are kept, the newest first.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Enters a configuration as the newest one, durably where there is a directory.
    ///
    /// # Errors
    /// It cannot be kept; it is not entered.
    pub fn record(&mut self, entry: Entry) -> io::Result<()> {
        let last = self.entries.first();
        let replaced = usize::from(last.is_some_and(|last| entry.continues(last)));
        let mut entries = vec![entry];
        // One more than `KEPT` in all: the new one is the present configuration, to which none
        // rolls back.
        entries.extend(self.entries.iter().skip(replaced).take(KEPT).cloned());
        self.keep(entries, self.file.clone())
    }

    /// The configuration file at its last reading; `None` where that is not known.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// The configuration file was read, and says this.
    ///
    /// # Errors
    /// It cannot be kept.
    pub fn see_file(&mut self, yaml: String) -> io::Result<()> {
        // A write is durable and takes its time, and most reloads find the file unchanged.
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
            // Before memory: what a restart would not find must not be shown as kept.
            dir.save(FILE, VERSION, &kept)?;
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
    fn the_last_ones_are_kept_over_a_restart() {
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
        std::fs::write(path.join(FILE), "{").unwrap();
        let error = History::open(&location).unwrap_err().to_string();
        for part in [
            FILE,
            "is damaged",
            "backup",
            "the configuration file is served",
        ] {
            assert!(error.contains(part), "{error}");
        }
        std::fs::write(path.join(FILE), r#"{ "version": 7 }"#).unwrap();
        let error = History::open(&location).unwrap_err().to_string();
        assert!(
            error.contains("of another riserd") && error.contains("version 7"),
            "{error}"
        );
        let error = History::open_at(&path, true).unwrap_err().to_string();
        assert!(error.contains(FILE), "{error}");
        let nowhere = path.join(FILE).join("no directory");
        assert!(History::open_at(&nowhere, true).is_ok());
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn the_steps_of_one_process_are_one_change() {
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
    fn without_a_directory_it_is_kept_in_memory() {
        let mut history = History::open(&Location::Off).unwrap();
        history.record(entry(1)).unwrap();
        assert_eq!(history.entries().len(), 1);
    }
}
