//! [`Scrub`]: verifies the protection information of all blocks on a backend, in the background.
//!
//! Reads and writes of initiators don't wait for this. An initiator may change a block while it is
//! being read, so a block that fails is read again: it is only reported if its bytes are the same as
//! before.
//!
//! The thread only holds the store, and is only listed in [`threads`](super::threads), while it
//! reads a chunk. Therefore, neither the removal of the backend nor an upgrade waits for a scrub.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use riser_scsi::config::Protection;
use riser_scsi::protection::{ProtectionError, Tuple};

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

/// Time before a failed block is read again.
const RETRY: Duration = Duration::from_millis(50);

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
        });
        let own = Arc::clone(&scrub);
        let threads = store.host().threads();
        threads.spawn("scrub", Box::new(move || own.run()))?;
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
        let mut reader = Reader {
            scrub: self,
            lba: 0,
            frames: Vec::new(),
            complaints: RateLimit::default(),
        };
        let state = loop {
            let Some(store) = self.store.upgrade() else {
                break ScrubState::Removed;
            };
            let entry = store.list_thread();
            let read = reader.check_chunk(&store);
            // An entry must outlive its store.
            drop(store);
            drop(entry);
            match read {
                Ok(0) => break ScrubState::Completed,
                Ok(len) if self.pauses(len) => {}
                Ok(_) => break ScrubState::Stopped,
                Err(error) => break ScrubState::Failed(error.to_string()),
            }
        };
        self.finish(state);
    }

    /// Waits after reading this number of bytes. Returns `false` if the scrub was stopped.
    fn pauses(&self, len: u64) -> bool {
        let pause = self.rate.map_or(0.0, |rate| len as f64 / rate as f64);
        let is_stopped = ignore_poison(self.is_stopped.lock());
        let pause = Duration::from_secs_f64(pause);
        let waited = self
            .stopped
            .wait_timeout_while(is_stopped, pause, |is_stopped| !*is_stopped);
        let (is_stopped, _) = ignore_poison(waited);
        !*is_stopped
    }

    /// Sets the final state, unless there is one.
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

/// Reads and verifies one chunk after another.
struct Reader<'a> {
    scrub: &'a Scrub,
    /// Next block.
    lba: u64,
    /// Blocks of the current chunk, each with its tuple.
    frames: Vec<u8>,
    complaints: RateLimit,
}

/// A block that has failed, with its bytes.
struct Suspect {
    lba: u64,
    defect: Defect,
    frame: Vec<u8>,
}

impl Reader<'_> {
    /// Verifies the next blocks, and returns their length in bytes. This is zero at the end.
    fn check_chunk(&mut self, store: &Store) -> io::Result<u64> {
        let block = u64::from(store.geometry().block_size);
        let all = blocks(store);
        let most = self
            .scrub
            .rate
            .map_or(CHUNK, |rate| (rate / CHUNKS_PER_SECOND).clamp(block, CHUNK));
        let count = (most / block).min(all.saturating_sub(self.lba));
        let suspects = self.read(store, self.lba, count)?;
        let defects = self.confirm(store, suspects)?;
        self.lba += count;
        let mut progress = self.scrub.lock();
        progress.blocks = all;
        progress.checked = self.lba;
        for (lba, defect) in defects {
            progress.defects.count(defect);
            if progress.listed.len() < LISTED {
                progress.listed.push((lba, defect));
            }
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
        Ok(count * block)
    }

    /// Reads blocks, and returns the blocks that fail.
    fn read(&mut self, store: &Store, lba: u64, count: u64) -> io::Result<Vec<Suspect>> {
        let frame = store.geometry().block_size as usize + Tuple::LEN;
        self.frames.resize(frame * count as usize, 0);
        match store.read_frames(lba, &mut self.frames) {
            Ok(()) => {}
            // Find the block that cannot be read.
            Err(error) if is_medium_error(&error) && count > 1 => {
                let mut suspects = Vec::new();
                for lba in lba..lba + count {
                    suspects.extend(self.read(store, lba, 1)?);
                }
                return Ok(suspects);
            }
            Err(error) if is_medium_error(&error) => {
                let (defect, frame) = (Defect::Unreadable, Vec::new());
                return Ok(vec![Suspect { lba, defect, frame }]);
            }
            Err(error) => return Err(error),
        }
        // A FORMAT UNIT may have changed the type.
        let protection = store.protection();
        let frames = (lba..).zip(self.frames.chunks(frame));
        let suspects = frames.filter_map(|(lba, frame)| {
            let check = check(protection?, lba, frame).err()?;
            let (defect, frame) = (Defect::Check(check), frame.to_vec());
            Some(Suspect { lba, defect, frame })
        });
        Ok(suspects.collect())
    }

    /// Reads blocks again that have failed, and returns the blocks that have not changed.
    fn confirm(
        &mut self,
        store: &Store,
        mut suspects: Vec<Suspect>,
    ) -> io::Result<Vec<(u64, Defect)>> {
        let mut confirmed = Vec::new();
        for _ in 0..RETRIES {
            if suspects.is_empty() {
                break;
            }
            std::thread::sleep(RETRY);
            let mut changed = Vec::new();
            for suspect in suspects {
                for again in self.read(store, suspect.lba, 1)? {
                    match again.frame == suspect.frame && again.defect == suspect.defect {
                        true => confirmed.push((again.lba, again.defect)),
                        false => changed.push(again),
                    }
                }
            }
            suspects = changed;
        }
        confirmed.sort_unstable_by_key(|(lba, _)| *lba);
        Ok(confirmed)
    }
}

/// Verifies a block that is followed by its tuple.
fn check(protection: Protection, lba: u64, frame: &[u8]) -> Result<(), ProtectionError> {
    let (block, tuple) = frame.split_at(frame.len() - Tuple::LEN);
    let tuple = Tuple::parse(tuple.try_into().expect("the rest is a tuple"));
    tuple.check_stored(protection.protection_type, lba, block)
}

/// Returns whether an error only affects some blocks.
fn is_medium_error(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    [libc::EIO, libc::EILSEQ, libc::ENODATA, libc::EUCLEAN]
        .map(Some)
        .contains(&errno)
}
