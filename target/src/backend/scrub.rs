//! [`Scrub`]: verifies the protection information of all blocks on a backend, in the background.
//!
//! Reads and writes of initiators don't wait for this. An initiator may change a block while it is
//! being read, so a block that fails is read again after some seconds: it is only reported if its
//! bytes are the same as before.
//!
//! The thread only holds the store, and is only listed in [`threads`](super::threads), while it
//! reads a chunk, or a single block if the medium has errors. Therefore, neither the removal of the
//! backend nor an upgrade waits for a scrub.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use riser_scsi::config::Protection;
use riser_scsi::protection::{ProtectionError, Tuple};

use super::errno::is_medium_error;
use super::store::Store;
use crate::log::RateLimit;
use crate::stats::{Tally, check_name};
use crate::warn_limited;

/// Maximum number of bytes that are read at once.
const CHUNK: u64 = 1 << 20;

/// Number of chunks read in a second, if this is less than [`CHUNK`] bytes each.
const CHUNKS_PER_SECOND: u64 = 10;

/// Maximum number of times that a failed block is read again.
const RETRIES: u32 = 3;

/// Time before a failed block is read again. A write that is slower can be reported as a defect.
const RETRY: Duration = Duration::from_secs(5);

/// Number of failed blocks that are read again before the next chunk.
const SUSPECTS: usize = 1 << 16;

/// Maximum number of failed blocks that are listed. All of them are counted and logged.
const LISTED: usize = 64;

/// Defect of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// The block and its protection information do not match.
    Check(ProtectionError),
    /// The medium cannot read the block.
    Unreadable,
}

impl Defect {
    /// All defects.
    pub const ALL: [Self; 4] = [
        Self::Check(ProtectionError::Guard),
        Self::Check(ProtectionError::ApplicationTag),
        Self::Check(ProtectionError::ReferenceTag),
        Self::Unreadable,
    ];

    /// Returns the name, to be used as a label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Check(check) => check_name(check),
            Self::Unreadable => "unreadable",
        }
    }
}

/// State of a scrub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubState {
    /// Some blocks were not read yet.
    Running,
    /// All blocks were read.
    Completed,
    /// Stopped by an administrator, or by an upgrade.
    Stopped,
    /// The backend was removed, or opened again.
    Removed,
    /// The backend cannot be read.
    Failed(String),
}

/// Progress of a scrub.
#[derive(Clone, Debug)]
pub struct ScrubProgress {
    /// Current state.
    pub state: ScrubState,
    /// End time, if it is not running.
    pub ended: Option<SystemTime>,
    /// Number of blocks on the backend.
    pub blocks: u64,
    /// Number of blocks that were verified.
    pub checked: u64,
    /// Number of blocks with each defect.
    pub defects: Tally<Defect>,
    /// The first blocks with a defect, by LBA.
    pub listed: Vec<(u64, Defect)>,
}

/// Verification of all blocks on a backend.
#[derive(Debug)]
pub struct Scrub {
    store: Weak<Store>,
    /// Name in the configuration.
    backend: String,
    /// Start time.
    pub started: SystemTime,
    /// Maximum number of bytes read in a second, or `None` if this is not limited.
    pub rate: Option<u64>,
    progress: Mutex<ScrubProgress>,
    is_stopped: Mutex<bool>,
    stopped: Condvar,
    /// Token owned by the thread.
    thread: Weak<()>,
}

impl Scrub {
    /// Starts a thread that verifies all blocks of a store.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started, or [`io::ErrorKind::Unsupported`] if the
    /// store is not a file with protection information.
    pub fn start(store: &Arc<Store>, rate: Option<u64>) -> io::Result<Arc<Self>> {
        if store.protection().is_none() || store.open_file().is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let token = Arc::new(());
        let scrub = Arc::new(Self {
            store: Arc::downgrade(store),
            backend: store.name().to_owned(),
            started: SystemTime::now(),
            rate,
            progress: Mutex::new(ScrubProgress {
                state: ScrubState::Running,
                ended: None,
                blocks: blocks(store),
                checked: 0,
                defects: Tally::default(),
                listed: Vec::new(),
            }),
            is_stopped: Mutex::new(false),
            stopped: Condvar::new(),
            thread: Arc::downgrade(&token),
        });
        let own = Arc::clone(&scrub);
        let run = move || {
            own.run();
            drop(token);
        };
        store.host().threads().spawn("scrub", Box::new(run))?;
        Ok(scrub)
    }

    /// Returns the current progress.
    #[must_use]
    pub fn progress(&self) -> ScrubProgress {
        self.lock().clone()
    }

    /// Returns whether some blocks were not read yet.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.lock().state == ScrubState::Running
    }

    /// Returns whether its thread is still reading this store. After the scrub was stopped, this is
    /// the case until the file system completes the current read.
    #[must_use]
    pub fn is_reading(&self, store: &Arc<Store>) -> bool {
        self.store.ptr_eq(&Arc::downgrade(store)) && self.thread.strong_count() > 0
    }

    /// Stops the thread after the current chunk, without waiting for it.
    pub fn stop(&self) {
        *ignore_poison(self.is_stopped.lock()) = true;
        self.stopped.notify_all();
        self.finish(ScrubState::Stopped);
    }

    fn lock(&self) -> MutexGuard<'_, ScrubProgress> {
        ignore_poison(self.progress.lock())
    }

    fn run(&self) {
        let mut reader = Reader::new(self);
        let state = loop {
            let Some(store) = self.store.upgrade() else {
                break ScrubState::Removed;
            };
            let entry = store.list_thread();
            let next = reader.advance(&store);
            // An entry must outlive its store.
            drop(store);
            drop(entry);
            match next {
                Ok(Some(pause)) if self.waits(pause) => {}
                Ok(Some(_)) => break ScrubState::Stopped,
                Ok(None) => break ScrubState::Completed,
                Err(error) => break ScrubState::Failed(error.to_string()),
            }
        };
        self.finish(state);
    }

    /// Waits for this time. Returns `false` if the scrub was stopped.
    fn waits(&self, pause: Duration) -> bool {
        let is_stopped = ignore_poison(self.is_stopped.lock());
        let waited = self
            .stopped
            .wait_timeout_while(is_stopped, pause, |is_stopped| !*is_stopped);
        let (is_stopped, _) = ignore_poison(waited);
        !*is_stopped
    }

    /// Sets the final state, unless the scrub already has a final state.
    fn finish(&self, state: ScrubState) {
        let mut progress = self.lock();
        if progress.state != ScrubState::Running {
            return;
        }
        progress.state = state;
        progress.ended = Some(SystemTime::now());
        let (backend, checked) = (&self.backend, progress.checked);
        match (&progress.state, progress.defects.total()) {
            (ScrubState::Failed(error), defects) => {
                tracing::error!(backend, checked, defects, %error, "cannot scrub the backend");
            }
            (state, 0) => tracing::info!(backend, checked, ?state, "scrub without defects"),
            (state, defects) => {
                tracing::error!(backend, checked, defects, ?state, "scrub with defects");
            }
        }
    }
}

fn ignore_poison<T>(result: Result<T, PoisonError<T>>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of blocks on a store.
fn blocks(store: &Store) -> u64 {
    store.capacity() / u64::from(store.geometry().block_size)
}

/// Reads and verifies all chunks of a store.
struct Reader<'a> {
    scrub: &'a Scrub,
    /// Next block.
    lba: u64,
    /// End of the last chunk with a medium error. Its blocks are read separately.
    damaged: u64,
    /// Blocks of the current chunk, each with its tuple.
    frames: Vec<u8>,
    /// Blocks to be read again, the oldest first.
    suspects: VecDeque<Suspect>,
    complaints: RateLimit,
}

/// A block that has failed.
struct Suspect {
    lba: u64,
    failure: Failure,
    read: Instant,
    retries: u32,
}

/// Result of reading a defective block. This is the same until the block changes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Failure {
    defect: Defect,
    /// Hash of the block with its tuple, or zero if it cannot be read.
    hash: u64,
}

impl<'a> Reader<'a> {
    fn new(scrub: &'a Scrub) -> Self {
        Self {
            scrub,
            lba: 0,
            damaged: 0,
            frames: Vec::new(),
            suspects: VecDeque::new(),
            complaints: RateLimit::default(),
        }
    }

    /// Reads the next chunk, or a failed block again. Returns the time to wait before the next call,
    /// or `None` at the end.
    fn advance(&mut self, store: &Store) -> io::Result<Option<Duration>> {
        let is_end = self.lba >= blocks(store);
        let Some(suspect) = self.suspects.front() else {
            return match is_end {
                true => Ok(None),
                false => self.check_chunk(store).map(Some),
            };
        };
        let left = RETRY.saturating_sub(suspect.read.elapsed());
        let pause = match is_end || self.suspects.len() >= SUSPECTS {
            _ if left.is_zero() => self.check_suspect(store)?,
            true => left,
            false => self.check_chunk(store)?,
        };
        Ok(Some(pause))
    }

    /// Returns the time to wait after reading these bytes because of the rate.
    fn pause(&self, bytes: u64) -> Duration {
        let rate = self.scrub.rate;
        Duration::from_secs_f64(rate.map_or(0.0, |rate| bytes as f64 / rate as f64))
    }

    /// Verifies the next blocks. Returns the time to wait because of the rate.
    fn check_chunk(&mut self, store: &Store) -> io::Result<Duration> {
        let block = u64::from(store.geometry().block_size);
        let all = blocks(store);
        let rate = self.scrub.rate;
        let most = rate.map_or(CHUNK, |rate| (rate / CHUNKS_PER_SECOND).clamp(block, CHUNK));
        let count = match self.lba < self.damaged {
            true => 1,
            false => (most / block).min(all.saturating_sub(self.lba)),
        };
        match self.read(store, self.lba, count) {
            // Find the block that cannot be read.
            Err(error) if is_medium_error(&error) && count > 1 => {
                self.damaged = self.lba + count;
                return Ok(Duration::ZERO);
            }
            result => {
                for (lba, failure) in failures(self.lba, result)? {
                    self.suspects.push_back(Suspect::new(lba, failure, 0));
                }
            }
        }
        self.lba += count;
        let mut progress = self.scrub.lock();
        progress.blocks = all;
        progress.checked = self.lba;
        drop(progress);
        Ok(self.pause(count * block))
    }

    /// Reads the oldest suspect again, and reports it if it has not changed. Returns the time to wait
    /// because of the rate.
    fn check_suspect(&mut self, store: &Store) -> io::Result<Duration> {
        let Some(suspect) = self.suspects.pop_front() else {
            return Ok(Duration::ZERO);
        };
        let (lba, retries) = (suspect.lba, suspect.retries + 1);
        for (_, failure) in failures(lba, self.read(store, lba, 1))? {
            if failure == suspect.failure {
                self.report(lba, failure.defect);
            } else if retries < RETRIES {
                self.suspects.push_back(Suspect::new(lba, failure, retries));
            }
        }
        Ok(self.pause(u64::from(store.geometry().block_size)))
    }

    fn report(&mut self, lba: u64, defect: Defect) {
        let mut progress = self.scrub.lock();
        progress.defects.count(defect);
        if progress.listed.len() < LISTED {
            progress.listed.push((lba, defect));
            progress.listed.sort_unstable_by_key(|(lba, _)| *lba);
        }
        drop(progress);
        let (backend, defect) = (&self.scrub.backend, defect.name());
        let now = Instant::now();
        warn_limited!(
            self.complaints,
            now,
            backend,
            lba,
            defect,
            "defective block"
        );
    }

    /// Reads blocks, and returns the blocks that fail their checks.
    fn read(&mut self, store: &Store, lba: u64, count: u64) -> io::Result<Vec<(u64, Failure)>> {
        let frame = store.geometry().block_size as usize + Tuple::LEN;
        self.frames.resize(frame * count as usize, 0);
        store.read_frames(lba, &mut self.frames)?;
        // A FORMAT UNIT may have changed the type.
        let protection = store.protection();
        let frames = (lba..).zip(self.frames.chunks(frame));
        let failed = frames.filter_map(|(lba, frame)| {
            let check = check(protection?, lba, frame).err()?;
            let mut hasher = DefaultHasher::new();
            frame.hash(&mut hasher);
            let (defect, hash) = (Defect::Check(check), hasher.finish());
            Some((lba, Failure { defect, hash }))
        });
        Ok(failed.collect())
    }
}

impl Suspect {
    fn new(lba: u64, failure: Failure, retries: u32) -> Self {
        Self {
            lba,
            failure,
            read: Instant::now(),
            retries,
        }
    }
}

/// Converts a medium error to the failure of this block.
fn failures(lba: u64, result: io::Result<Vec<(u64, Failure)>>) -> io::Result<Vec<(u64, Failure)>> {
    match result {
        Err(error) if is_medium_error(&error) => {
            let (defect, hash) = (Defect::Unreadable, 0);
            Ok(vec![(lba, Failure { defect, hash })])
        }
        result => result,
    }
}

/// Verifies a block that is followed by its tuple.
fn check(protection: Protection, lba: u64, frame: &[u8]) -> Result<(), ProtectionError> {
    let (block, tuple) = frame.split_at(frame.len() - Tuple::LEN);
    let tuple = Tuple::parse(tuple.try_into().expect("the rest is a tuple"));
    tuple.check_stored(protection.protection_type, lba, block)
}

#[cfg(test)]
mod tests {
    use riser_config::{Direct, Source, Spec};
    use riser_reactor::simulated::{Disk, Threads};
    use riser_scsi::config::ProtectionType;

    use super::*;
    use crate::host::SimulatedHost;

    #[test]
    fn repeated_read_is_limited_by_rate() {
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
        let host = SimulatedHost::new(Threads::default(), Instant::now());
        let store = Store::on_disk(&spec, &Disk::new(0), Arc::new(host)).unwrap();
        let scrub = Scrub::start(&store, Some(1024)).unwrap();
        let mut reader = Reader::new(&scrub);
        let (defect, hash) = (Defect::Unreadable, 0);
        let read = Instant::now().checked_sub(RETRY).unwrap();
        reader.suspects.push_back(Suspect {
            read,
            ..Suspect::new(7, Failure { defect, hash }, 0)
        });
        let pause = reader.advance(&store).unwrap();
        assert_eq!(pause, Some(Duration::from_millis(500)));
        assert!(reader.suspects.is_empty() && reader.lba == 0);
    }
}
