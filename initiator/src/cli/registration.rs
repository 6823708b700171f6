//! The entry of this process in the list of attachments.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::attachment::{Attachment, Phase};
use super::state_file;
use crate::engine::SessionReport;

/// A written-down attachment; dropping it removes it from the directory.
#[derive(Debug)]
pub struct Registration(Arc<Entry>);

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    temporary: PathBuf,
    /// `None` once the file is final: removed, or left for other processes to read.
    attachment: Mutex<Option<Attachment>>,
}

/// The link of a written-down attachment, to be kept up to date as long as it is there.
#[derive(Debug)]
pub struct LinkEntry(Arc<Entry>);

impl LinkEntry {
    /// Writes down the link's state; returns whether the attachment is still there. As long as it
    /// is, `note` is called first, with the generation of the unit's cache.
    ///
    /// # Errors
    /// The directory cannot be written, or the error of `note`.
    pub fn update(
        &mut self,
        report: SessionReport,
        note: impl FnOnce(Option<[u8; 16]>) -> io::Result<()>,
    ) -> io::Result<bool> {
        let mut attachment = self.0.lock();
        let Some(attachment) = &mut *attachment else {
            return Ok(false);
        };
        attachment.link = Some(report.link);
        attachment.paths = report.paths;
        attachment.cache = report.cache;
        note(report.cache)?;
        self.0.write(attachment)?;
        Ok(true)
    }
}

impl Entry {
    /// Writes the file, which appears at once and whole.
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
    /// Writes an attachment to a file, by way of a temporary one.
    ///
    /// # Errors
    /// The directory cannot be written.
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

    /// The attachment, with its id.
    #[must_use]
    pub fn attachment(&self) -> Attachment {
        let attachment = self.0.lock().clone();
        attachment.expect("the entry is final only when the registration is dropped")
    }

    /// Changes the attachment's phase.
    ///
    /// # Errors
    /// The directory cannot be written.
    ///
    /// # Panics
    /// An attachment in its phase cannot have the next one.
    pub fn enter(&self, phase: Phase, change: impl FnOnce(&mut Attachment)) -> io::Result<()> {
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

    /// Leaves the attachment in the directory with the reason for which it has failed.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn fail(self, reason: String) -> io::Result<()> {
        let written = self.enter(Phase::Failed, |a| a.failure = Some(reason));
        // Even if it could not be written: an entry without its process tells as much.
        *self.0.lock() = None;
        written
    }

    /// A handle with which the state of the link is updated.
    #[must_use]
    pub fn link(&self) -> LinkEntry {
        LinkEntry(self.0.clone())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Held while the file is removed, so that it is not written again.
        let mut attachment = self.0.lock();
        if attachment.take().is_some() {
            let _ = fs::remove_file(&self.0.path);
        }
    }
}
