//! The intent log of an open store: its recovery, and the thread that writes its pages.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use riser_block::FlushDescriptor;
use riser_reactor::{Handle, Waker};

use super::lost_flushes;
use super::open_error::{OpenError, io_error};
use super::protected::{self, Begin, BitmapPage, IntentLog, Intents};
use super::store::Store;
use super::sys;

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl Store {
    /// Repairs torn frames of a protected file, and creates its log.
    ///
    /// # Errors
    /// Returns [`OpenError::Io`].
    pub(super) fn open_intents(&mut self) -> Result<(), OpenError> {
        if self.geometry.read_only {
            return Ok(());
        }
        let (Some(protection), Some(file)) = (self.geometry.protection, self.open_file()) else {
            return Ok(());
        };
        let path = self.path().unwrap_or(Path::new(""));
        let error = |action| io_error(path, action);
        // Do this first: after a failed flush, the file must be opened successfully.
        let own = file.reopen().map_err(error("open it again"))?;
        let header = protected::read_header(&file.handle, self.geometry.block_size)
            .map_err(error("read its header"))?;
        let mut recovered = protected::recover(&file.handle, &header, protection)
            .map_err(error("repair its protection information"))?;
        if let Some(id) = self.file() {
            recovered.flush_failed = lost_flushes::add(id, path, recovered.flush_failed);
        }
        if recovered.regions > 0 {
            tracing::info!(
                backend = self.name(),
                regions = recovered.regions,
                repaired = recovered.repaired,
                unreadable = recovered.unreadable,
                "checked the protection information of interrupted writes"
            );
        }
        if recovered.repaired > 0 {
            tracing::warn!(
                backend = self.name(),
                blocks = recovered.repaired,
                first = ?recovered.listed,
                "replaced protection information that did not match its block"
            );
        }
        if let Some(errno) = recovered.flush_failed {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(
                backend = self.name(),
                %error,
                "a flush failed when the backend was opened: acknowledged writes may be lost; flushes \
                 fail until an administrator clears the failure (riserd clear-flush-failure)"
            );
            // This descriptor would report the error again, and fail the first write.
            let _ = sys::sync_data(&own);
        }
        let log = IntentLog::new(header.region_size, &recovered.kept);
        // The record of failures is not available yet, so the descriptor may be renewed once without
        // a reason.
        let file = Mutex::new(FlushDescriptor::new(Some(own), false, 0));
        self.intents = Some(Intents { log, file });
        self.recovery_failure = recovered.flush_failed;
        Ok(())
    }

    /// Starts a change of these bytes of the medium: see
    /// [`Storage::begin_change`](riser_file::Storage::begin_change).
    pub(super) fn begin_change(
        self: &Arc<Self>,
        bytes: &Range<u64>,
        waited: Option<u64>,
        waker: impl FnOnce() -> Waker,
        now: Instant,
    ) -> Result<Option<u64>, i32> {
        let Some(intents) = &self.intents else {
            return Ok(None);
        };
        match intents.log.begin(bytes, waited, waker) {
            Begin::Started => Ok(None),
            Begin::Failed(errno) => Err(errno),
            Begin::Waiting {
                attempt,
                needs_thread,
            } => {
                if needs_thread {
                    self.start_intent_thread(intents, now);
                }
                Ok(Some(attempt))
            }
        }
    }

    /// Clears the bits of regions without recent changes on a separate thread. A crash after this
    /// does not require a recovery of these regions.
    pub fn rest(self: &Arc<Self>, now: Instant) {
        if let Some(intents) = &self.intents
            && intents.log.begin_clear(Some(now))
        {
            self.start_intent_thread(intents, now);
        }
    }

    /// Keeps all bits until a recovery has checked the frames on the medium.
    pub(super) fn keep_intents(&self) {
        if let Some(intents) = &self.intents {
            intents.log.keep_all();
        }
    }

    /// Same as [`Store::rest`] for all regions without active changes. Called when the backend was
    /// removed, so that opening it again does not require a recovery. Until then, the thread keeps
    /// it open.
    pub(super) fn release_intents(self: &Arc<Self>, now: Instant) {
        if !self.may_hang() {
            // A disk in memory responds immediately.
            self.close_intents(now);
        } else if let Some(intents) = &self.intents
            && intents.log.begin_clear(None)
        {
            self.start_intent_thread(intents, now);
        }
    }

    /// Clears the bits of all regions without active changes, after the last flush. Blocks if the
    /// file system does not respond.
    pub(super) fn close_intents(&self, now: Instant) {
        if let Some(intents) = &self.intents
            && intents.log.begin_clear(None)
        {
            intents.update(self, now);
        }
    }

    /// Performs attempts on a thread. It keeps the store open, because another process could
    /// otherwise lock and change the file before the thread writes to it.
    fn start_intent_thread(self: &Arc<Self>, intents: &Intents, now: Instant) {
        let (store, entry) = (Arc::clone(self), self.list_thread());
        let run = move || {
            if let Some(intents) = &store.intents {
                intents.update(&store, now);
            }
            drop(store);
            drop(entry);
        };
        if let Err(error) = self.host().threads().spawn("intent", Box::new(run)) {
            tracing::warn!(backend = self.name(), %error, "cannot start a thread for the intent log");
            intents.perform_attempts(|_| Err(errno(&error)), |_| ());
        }
    }
}

impl Intents {
    /// Performs all attempts for this store. Blocks if the file system does not respond.
    fn update(&self, store: &Store, now: Instant) {
        let attempt = |pages: &[BitmapPage]| self.record(store, pages, now);
        let clear = |pages: &[BitmapPage]| {
            // If this fails, the next recovery checks more frames than necessary.
            if let Err(error) = write_pages(&self.current_file(store, now), pages) {
                tracing::debug!(backend = store.name(), %error, "cannot clear the intent log");
            }
        };
        self.perform_attempts(attempt, clear);
    }

    /// Writes pages and flushes the file. Returns whether all data that was written before is
    /// durable as well. A failed flush may be due to data of initiators.
    fn record(&self, store: &Store, pages: &[BitmapPage], now: Instant) -> Result<bool, i32> {
        let file = self.current_file(store, now);
        write_pages(&file, pages).map_err(|error| errno(&error))?;
        sys::sync_data(&file).map_err(|error| {
            store.on_flush_failed(errno(&error), now);
            errno(&error)
        })?;
        Ok(store.flush_failure().is_none())
    }

    /// Returns the descriptor of the log. After a flush failure was cleared, the previous descriptor
    /// may still report it.
    fn current_file(&self, store: &Store, now: Instant) -> Handle {
        // The value is replaced as a whole, so ignore poisoning.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let clears = store.flush_clears();
        if file.is_outdated(clears)
            && let Some(open) = store.open_file()
            && let Ok(renewed) = open.reopen()
        {
            drop(file.renew(Some(renewed), false, clears));
            // A durable write has received an error that the kernel may not report to the new
            // descriptor, so a flush by this thread would succeed before the error is recorded.
            if open.flush_checks.is_active() {
                store.on_flush_failed(libc::EIO, now);
            }
        }
        file.handle().expect("the file is open").clone()
    }
}

fn write_pages(file: &Handle, pages: &[BitmapPage]) -> io::Result<()> {
    let mut pages = pages.iter();
    pages.try_for_each(|page| sys::write_at(file, &page.bytes, page.offset))
}
