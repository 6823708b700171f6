//! Initiators blocked by an administrator, independent of the configuration.
//!
//! All catalogs share a single list, so a block takes effect immediately, and is kept when the
//! configuration changes.

use std::fmt::{self, Debug, Display};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riser_admin_api::view::{BlockedView, initiator_name};
use riser_scsi::iscsi::name::IscsiName;
use riser_sync::{Mutex, MutexGuard};

use crate::config::{Guid, InitiatorId};

/// Detail in the audit log for a login rejected because of a block.
pub const BLOCKED: &str = "blocked by an administrator";

/// Maximum number of blocked initiators.
const MAX_BLOCKED: usize = 1024;

/// Stores the list so that it survives a restart.
pub trait BlockKeeper: Debug + Send + Sync {
    /// Loads the stored list.
    ///
    /// # Errors
    /// If it cannot be read.
    fn load(&self) -> io::Result<Vec<BlockedView>>;

    /// Stores a new list.
    ///
    /// # Errors
    /// If it cannot be written. The previous list is kept.
    fn save(&self, blocked: &[BlockedView]) -> io::Result<()>;
}

/// An initiator with all of its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Initiator {
    /// An iSCSI initiator, identified by name.
    Iscsi(IscsiName),
    /// An SRP initiator, identified by GUID.
    Srp(Guid),
}

impl Initiator {
    /// Parses the name of an iSCSI initiator, with or without an ISID, or of an SRP initiator port.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(name) = IscsiName::new(initiator_name(text)) {
            return Some(Self::Iscsi(name));
        }
        match text.parse().ok()? {
            InitiatorId::Guid(guid) => Some(Self::Srp(guid)),
            InitiatorId::Port(port) => Some(Self::Srp(guid_of(&port))),
        }
    }
}

impl Display for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Iscsi(name) => Display::fmt(name, f),
            Self::Srp(guid) => Display::fmt(guid, f),
        }
    }
}

fn guid_of(port: &[u8; 16]) -> Guid {
    let guid = port.last_chunk().expect("it has 16 bytes");
    Guid(u64::from_be_bytes(*guid))
}

/// The list of blocked initiators. See the module documentation.
#[derive(Debug, Default)]
pub struct Blocklist {
    keeper: Option<Arc<dyn BlockKeeper>>,
    blocked: Mutex<Vec<BlockedView>>,
}

impl Blocklist {
    /// Loads the stored list, or creates an empty list without a keeper.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn open(keeper: Option<Arc<dyn BlockKeeper>>) -> io::Result<Self> {
        let blocked = keeper.as_ref().map(|keeper| keeper.load()).transpose()?;
        Ok(Self {
            keeper,
            blocked: Mutex::new(blocked.unwrap_or_default()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<BlockedView>> {
        self.blocked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether an initiator is blocked.
    #[must_use]
    pub fn has(&self, initiator: &Initiator) -> bool {
        let blocked = self.lock();
        if blocked.is_empty() {
            return false;
        }
        let (name, now) = (initiator.to_string(), seconds());
        blocked
            .iter()
            .any(|b| b.initiator == name && is_in_force(b, now))
    }

    /// Same as [`Blocklist::has`], for an SRP initiator port identifier.
    #[must_use]
    pub fn has_port(&self, port: &[u8; 16]) -> bool {
        self.has(&Initiator::Srp(guid_of(port)))
    }

    /// Same as [`Blocklist::has`], for an iSCSI initiator name.
    #[must_use]
    pub fn has_name(&self, name: &IscsiName) -> bool {
        self.has(&Initiator::Iscsi(name.clone()))
    }

    /// Returns the currently blocked initiators.
    #[must_use]
    pub fn list(&self) -> Vec<BlockedView> {
        let now = seconds();
        let blocked = self.lock();
        let in_force = blocked.iter().filter(|b| is_in_force(b, now));
        in_force.cloned().collect()
    }

    /// Blocks initiators for some time, or indefinitely. This replaces any earlier block of the
    /// same initiators.
    ///
    /// # Errors
    /// If the list is full or cannot be stored. It is not changed in this case.
    pub fn block(
        &self,
        initiators: &[Initiator],
        duration: Option<Duration>,
        who: &str,
    ) -> io::Result<()> {
        let since = seconds();
        let until = duration.map(|duration| since.saturating_add(duration.as_secs().max(1)));
        let entry = |initiator: &Initiator| BlockedView {
            initiator: initiator.to_string(),
            since,
            until,
            who: who.to_owned(),
        };
        self.update(|blocked| {
            let new: Vec<_> = initiators.iter().map(entry).collect();
            blocked.retain(|old| !new.iter().any(|new| new.initiator == old.initiator));
            blocked.extend(new);
        })
    }

    /// Unblocks an initiator. Returns whether it was blocked.
    ///
    /// # Errors
    /// If the list cannot be stored. It is not changed in this case.
    pub fn unblock(&self, initiator: &Initiator) -> io::Result<bool> {
        if !self.has(initiator) {
            return Ok(false);
        }
        let name = initiator.to_string();
        self.update(|blocked| blocked.retain(|b| b.initiator != name))?;
        Ok(true)
    }

    fn update(&self, change: impl FnOnce(&mut Vec<BlockedView>)) -> io::Result<()> {
        let now = seconds();
        let mut blocked = self.lock();
        let mut next = blocked.clone();
        next.retain(|b| is_in_force(b, now));
        change(&mut next);
        if next.len() > MAX_BLOCKED {
            let why = format!("maximum of {MAX_BLOCKED} blocked initiators reached");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
        }
        if let Some(keeper) = &self.keeper {
            keeper.save(&next)?;
        }
        *blocked = next;
        Ok(())
    }
}

fn is_in_force(blocked: &BlockedView, now: u64) -> bool {
    blocked.until.is_none_or(|until| now < until)
}

/// Returns the current time in seconds since 1970.
fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "iqn.2026-01.org.example:host";

    fn initiator(text: &str) -> Initiator {
        Initiator::parse(text).unwrap()
    }

    #[test]
    fn initiator_names_cover_all_ports() {
        let host = initiator(NAME);
        assert_eq!(initiator("IQN.2026-01.org.example:host"), host);
        assert_eq!(initiator(&format!("{NAME},i,0x00023d000001")), host);
        let port = "0x00000000000000070002c90300a1b2c4";
        assert_eq!(initiator(port), initiator("0002:c903:00a1:b2c4"));
        assert_eq!(Initiator::parse("17"), None);
        assert_eq!(Initiator::parse("host"), None);
    }

    #[test]
    fn blocks_expire_or_are_removed() {
        let list = Blocklist::default();
        let (host, srp) = (initiator(NAME), initiator("0x0002c90300a1b2c4"));
        list.block(&[host.clone(), srp.clone()], None, "root")
            .unwrap();
        assert!(list.has(&host) && list.has(&srp));
        let mut port = [0xff; 16];
        port[8..].copy_from_slice(&0x0002_c903_00a1_b2c4_u64.to_be_bytes());
        assert!(list.has_port(&port));
        assert!(!list.has(&initiator("iqn.2026-01.org.example:other")));
        assert!(list.unblock(&host).unwrap());
        assert!(!list.unblock(&host).unwrap());
        assert!(!list.has(&host) && list.has(&srp));
        list.block(
            std::slice::from_ref(&srp),
            Some(Duration::from_secs(60)),
            "root",
        )
        .unwrap();
        assert_eq!(list.list().len(), 1, "it was replaced");
        let until = list.list()[0].until.unwrap();
        assert!(is_in_force(&list.list()[0], until - 1));
        assert!(!is_in_force(&list.list()[0], until));
    }

    #[derive(Debug, Default)]
    struct Full(Mutex<Vec<BlockedView>>);

    impl BlockKeeper for Full {
        fn load(&self) -> io::Result<Vec<BlockedView>> {
            Ok(self.0.lock().unwrap().clone())
        }

        fn save(&self, blocked: &[BlockedView]) -> io::Result<()> {
            match blocked.len() {
                0 | 1 => *self.0.lock().unwrap() = blocked.to_vec(),
                _ => return Err(io::ErrorKind::StorageFull.into()),
            }
            Ok(())
        }
    }

    #[test]
    fn unsaved_block_is_not_applied() {
        let keeper: Arc<dyn BlockKeeper> = Arc::new(Full::default());
        let list = Blocklist::open(Some(Arc::clone(&keeper))).unwrap();
        let (first, second) = (initiator(NAME), initiator("0x0002c90300a1b2c4"));
        list.block(std::slice::from_ref(&first), None, "root")
            .unwrap();
        let failed = list.block(std::slice::from_ref(&second), None, "root");
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(!list.has(&second));
        // Simulate a restart.
        let again = Blocklist::open(Some(keeper)).unwrap();
        assert!(again.has(&first) && !again.has(&second));
    }
}
