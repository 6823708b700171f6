//! Another configuration for a running server.
//!
//! What may change: logical units of targets, the backends they are on, and who may use them. What
//! may not: everything that sessions, workers and devices were made with. A configuration that
//! changes something else is refused whole, so that the file and the server never agree in part.
//!
//! Initiators whose units are others than before get the unit attention REPORTED LUNS DATA HAS
//! CHANGED. A unit that was taken away takes no new commands; those under way end as if nothing had
//! happened, and its backend closes after the last one. Initiators that may not log in any more are
//! logged out.

use std::sync::Arc;

use riser_scsi::srp::TLogoutReason;

use super::{Server, ServerError};
use crate::config::Config;
use crate::worker::mail::Mail;

/// Why a configuration was not applied. The old one stays.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Something changed that cannot while the server runs.
    #[error("{0} changed, which takes a restart; nothing was applied")]
    NeedsRestart(String),
    /// A new backend or unit cannot be made.
    #[error("{0}; nothing was applied")]
    Server(#[from] ServerError),
}

/// Whether one configuration can follow another while the server runs.
///
/// # Errors
/// [`ChangeError::NeedsRestart`] names the first thing that cannot change.
pub fn check(old: &Config, new: &Config) -> Result<(), ChangeError> {
    let parts = [
        ("identity", old.identity == new.identity),
        ("workers", old.workers == new.workers),
        ("limits", old.limits == new.limits),
        ("transport", old.transport == new.transport),
        ("log", old.log == new.log),
        ("admin", old.admin == new.admin),
        ("discovery_chap", old.discovery_chap == new.discovery_chap),
        (
            "the number of targets",
            old.targets.len() == new.targets.len(),
        ),
    ];
    let mut changed = parts.iter().filter(|(_, same)| !same);
    if let Some((name, _)) = changed.next() {
        return Err(ChangeError::NeedsRestart((*name).to_owned()));
    }
    for (old, new) in old.targets.iter().zip(&new.targets) {
        let names = old.name == new.name && old.iqn == new.iqn && old.chap == new.chap;
        if !names || old.portals != new.portals {
            let what = format!("a name, secret or portal of target {}", old.name);
            return Err(ChangeError::NeedsRestart(what));
        }
    }
    let served = |config: &Config, name: &str| {
        let mut luns = config.targets.iter().flat_map(|t| t.luns.values());
        luns.any(|lun| config.backend(lun).name == name)
    };
    for backend in &old.backends {
        let same = new.backends.iter().find(|b| b.name == backend.name);
        if let Some(same) = same
            && same != backend
            && served(old, &backend.name)
            && served(new, &backend.name)
        {
            let what = format!("backend {}, which is in use,", backend.name);
            return Err(ChangeError::NeedsRestart(what));
        }
    }
    Ok(())
}

impl Server {
    /// Applies another configuration: see the module's header.
    ///
    /// # Errors
    /// [`ChangeError`]; everything is as it was then.
    pub fn change(&mut self, config: Config) -> Result<(), ChangeError> {
        check(&self.config, &config)?;
        let mut builder = self.builder.clone();
        let catalog = Arc::new(builder.catalog(&config)?);
        self.builder = builder;
        self.config = config;
        let ended = self.shared.registry.change(Arc::clone(&catalog));
        let of_iscsi = self.shared.iscsi.sessions.change(&catalog);
        for channel in ended.into_iter().chain(of_iscsi) {
            if let Some(sender) = self.senders.get(usize::from(channel.worker)) {
                let _ = sender.send_blocking(Mail::Terminate {
                    serial: channel.serial,
                    reason: TLogoutReason::NoReason,
                });
            }
        }
        for sender in &self.senders {
            // A worker that is gone has no sessions.
            let _ = sender.send_blocking(Mail::Changed);
        }
        // A mailbox keeps its order: a worker that answers this has applied the change.
        let _ = self.snapshot();
        Ok(())
    }
}
