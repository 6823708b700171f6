//! Scrubs of backends: see [`Scrub`]. Each backend has at most one scrub, which is kept after it has
//! ended.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_admin_api::view::{DefectView, ScrubView};

use super::Server;
use crate::backend::{Defect, Scrub, ScrubProgress, ScrubState, Store};

/// Maximum time for the thread of the last scrub to exit before the next scrub. If the file system does
/// not respond, each scrub would otherwise block another thread. This time blocks the control plane.
const GRACE: Duration = Duration::from_millis(50);

/// Polling interval of this thread.
const POLL: Duration = Duration::from_millis(5);

/// The last scrub of each backend. When this is dropped, all of them are stopped.
#[derive(Debug, Default)]
pub(super) struct Scrubs(BTreeMap<String, Entry>);

/// The last scrub of a backend.
#[derive(Debug)]
struct Entry {
    scrub: Arc<Scrub>,
    /// End time of the last completed scrub before this scrub.
    completed: Option<SystemTime>,
}

impl Entry {
    fn completed(&self, progress: &ScrubProgress) -> Option<SystemTime> {
        match progress.state {
            ScrubState::Completed => progress.ended,
            _ => self.completed,
        }
    }
}

impl Server {
    /// Starts a scrub of a backend, which reads at most `rate` bytes in a second.
    ///
    /// # Errors
    /// Returns the reason if it cannot be started.
    pub fn start_scrub(&mut self, backend: &str, rate: Option<u64>) -> Result<ScrubView, String> {
        let store = self.backends().find(|(name, _)| *name == backend);
        let store = store.map(|(_, store)| Arc::clone(store));
        let store = store.ok_or_else(|| format!("backend `{backend}` is not open"))?;
        let configured = &self.config.backends;
        let is_configured = |name: &str| configured.iter().any(|other| other.name == name);
        self.scrubs.0.retain(|name, _| is_configured(name));
        self.scrubs.start(backend, &store, rate)
    }

    /// Stops a scrub.
    ///
    /// # Errors
    /// Returns the reason if it is not running.
    pub fn stop_scrub(&self, backend: &str) -> Result<ScrubView, String> {
        match self.scrubs.0.get(backend) {
            Some(entry) if entry.scrub.is_running() => {
                entry.scrub.stop();
                Ok(view(backend, entry))
            }
            _ => Err(format!("no scrub of backend `{backend}` is running")),
        }
    }

    /// Returns the last scrub of each backend in the configuration, by name.
    #[must_use]
    pub fn scrubs(&self) -> Vec<ScrubView> {
        let configured = &self.config.backends;
        let is_configured = |name: &str| configured.iter().any(|other| other.name == name);
        let scrubs = self.scrubs.0.iter();
        let scrubs = scrubs.filter(|(name, _)| is_configured(name));
        scrubs.map(|(name, entry)| view(name, entry)).collect()
    }
}

impl Scrubs {
    fn start(
        &mut self,
        backend: &str,
        store: &Arc<Store>,
        rate: Option<u64>,
    ) -> Result<ScrubView, String> {
        let last = self.0.get(backend);
        if last.is_some_and(|last| last.scrub.is_running()) {
            return Err(format!("a scrub of backend `{backend}` is already running"));
        }
        if last.is_some_and(|last| !has_exited(&last.scrub, store)) {
            return Err(format!(
                "cannot scrub backend `{backend}`: its file system has not completed the last read of \
                 the previous scrub"
            ));
        }
        let completed = last.and_then(|last| last.completed(&last.scrub.progress()));
        let scrub = Scrub::start(store, rate).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => {
                format!("backend `{backend}` is not a file with protection information")
            }
            _ => format!("cannot start a thread for backend `{backend}`: {error}"),
        })?;
        let entry = Entry { scrub, completed };
        let view = view(backend, &entry);
        self.0.insert(backend.to_owned(), entry);
        Ok(view)
    }
}

/// Waits until the thread of a scrub that is not running has exited. Returns `false` if it is still
/// reading this store.
fn has_exited(scrub: &Scrub, store: &Arc<Store>) -> bool {
    let until = Instant::now() + GRACE;
    while scrub.is_reading(store) {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(POLL);
    }
    true
}

impl Drop for Scrubs {
    fn drop(&mut self) {
        self.0.values().for_each(|entry| entry.scrub.stop());
    }
}

fn view(backend: &str, entry: &Entry) -> ScrubView {
    let progress = entry.scrub.progress();
    let seconds = |time: SystemTime| {
        let since = time.duration_since(UNIX_EPOCH);
        since.unwrap_or_default().as_secs()
    };
    let (state, error) = match &progress.state {
        ScrubState::Running => ("running", None),
        ScrubState::Completed => ("completed", None),
        ScrubState::Stopped => ("stopped", None),
        ScrubState::Removed => ("removed", None),
        ScrubState::Failed(error) => ("failed", Some(error.clone())),
    };
    let count = |defect: Defect| {
        let blocks = progress.defects.total_of(|other| *other == defect);
        (defect.name().to_owned(), blocks)
    };
    let listed = progress.listed.iter().map(|(lba, defect)| DefectView {
        lba: *lba,
        defect: defect.name().to_owned(),
    });
    ScrubView {
        backend: backend.to_owned(),
        state: state.to_owned(),
        error,
        started: seconds(entry.scrub.started),
        ended: progress.ended.map(seconds),
        completed: entry.completed(&progress).map(seconds),
        rate: entry.scrub.rate,
        blocks: progress.blocks,
        checked: progress.checked,
        defects: Defect::ALL.into_iter().map(count).collect(),
        listed: listed.collect(),
    }
}

#[cfg(test)]
mod tests {
    use riser_config::{Direct, Source, Spec};
    use riser_reactor::simulated::{Disk, Threads};
    use riser_scsi::config::{Protection, ProtectionType};

    use super::*;
    use crate::host::SimulatedHost;

    /// The threads of a simulated host do not run until they are continued.
    #[test]
    fn blocked_thread_prevents_next_scrub() {
        let spec = Spec {
            name: "f".into(),
            source: Source::File {
                path: "/in/memory".into(),
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            protection: Some(Protection::new(ProtectionType::Type1)),
            faults: None,
        };
        let threads = Threads::default();
        let open = || {
            let host = SimulatedHost::new(threads.clone(), Instant::now());
            Store::on_disk(&spec, &Disk::new(0), Arc::new(host)).unwrap()
        };
        let (store, other) = (open(), open());
        let mut scrubs = Scrubs::default();
        scrubs.start("f", &store, None).unwrap();
        scrubs.0["f"].scrub.stop();
        let begin = Instant::now();
        let error = scrubs.start("f", &store, None).unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(2), "it blocks");
        assert_eq!(
            error,
            "cannot scrub backend `f`: its file system has not completed the last read of the \
             previous scrub"
        );
        assert_eq!(threads.runnable().len(), 1);
        scrubs.start("g", &other, None).unwrap();
        threads.step(threads.runnable()[0]);
        assert_eq!(scrubs.start("f", &store, None).unwrap().state, "running");
        // The backend was opened again, perhaps on another file system.
        scrubs.0["f"].scrub.stop();
        assert_eq!(scrubs.start("f", &other, None).unwrap().state, "running");
    }
}
