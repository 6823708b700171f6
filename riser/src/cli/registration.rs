//! Entry of this process in the list of attachments.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_initiator::engine::SessionReport;

use super::attachment::{Attachment, Phase};
use super::state_file;

/// An attachment in the state directory, which is removed on drop.
#[derive(Debug)]
pub struct Registration(Arc<Entry>);

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    temporary: PathBuf,
    /// Set to `None` when the file is no longer modified, because it was removed or is kept for
    /// other processes.
    attachment: Mutex<Option<Attachment>>,
}

/// Updates the session state of an attachment while it is in the list.
#[derive(Debug)]
pub struct LinkEntry(Arc<Entry>);

impl LinkEntry {
    /// Records the state of the session, and returns whether the attachment is still in the list.
    /// In this case, `note` is called first to record the report for a process that takes over.
    ///
    /// # Errors
    /// Fails if the directory can't be written. Also returns errors from `note`.
    pub fn update(
        &mut self,
        report: SessionReport,
        note: impl FnOnce(&SessionReport) -> io::Result<()>,
    ) -> io::Result<bool> {
        let mut attachment = self.0.lock();
        let Some(attachment) = &mut *attachment else {
            return Ok(false);
        };
        let noted = note(&report);
        attachment.cache = report.cache;
        attachment.was_redirected = report.is_redirected;
        attachment.link = Some(report.link);
        attachment.paths = report.paths;
        noted?;
        self.0.write(attachment)?;
        Ok(true)
    }
}

impl Entry {
    /// Writes the file atomically.
    fn write(&self, attachment: &Attachment) -> io::Result<()> {
        state_file::write(&self.path, &self.temporary, attachment)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Attachment>> {
        self.attachment
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    /// Writes an attachment to a file, using a temporary file.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
    pub(super) fn create(
        path: PathBuf,
        temporary: PathBuf,
        attachment: Attachment,
    ) -> io::Result<Self> {
        let entry = Entry {
            path,
            temporary,
            attachment: Mutex::new(None),
        };
        entry.write(&attachment)?;
        *entry.lock() = Some(attachment);
        Ok(Self(Arc::new(entry)))
    }

    /// Returns the attachment, including its ID.
    #[must_use]
    pub fn attachment(&self) -> Attachment {
        let attachment = self.0.lock().clone();
        attachment.expect("the entry is final only when the registration is dropped")
    }

    /// Changes the phase of the attachment.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
    ///
    /// # Panics
    /// Panics if this transition is not allowed.
    pub fn change_phase(
        &self,
        phase: Phase,
        change: impl FnOnce(&mut Attachment),
    ) -> io::Result<()> {
        let mut attachment = self.0.lock();
        let Some(attachment) = &mut *attachment else {
            return Ok(());
        };
        let before = attachment.phase;
        assert!(before.may_become(phase), "{before:?} became {phase:?}");
        attachment.phase = phase;
        change(attachment);
        self.0.write(attachment)
    }

    /// Keeps the attachment in the directory and records the reason for its failure.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
    pub fn fail(self, reason: String) -> io::Result<()> {
        let written = self.change_phase(Phase::Failed, |a| a.failure = Some(reason));
        // Even if this wasn't recorded, an entry without its process is treated as a failure.
        *self.0.lock() = None;
        written
    }

    /// Returns a handle for updating the session state.
    #[must_use]
    pub fn link(&self) -> LinkEntry {
        LinkEntry(self.0.clone())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Hold the lock while removing the file, so that it can't be written again.
        let mut attachment = self.0.lock();
        if attachment.take().is_some() {
            let _ = fs::remove_file(&self.0.path);
        }
    }
}
