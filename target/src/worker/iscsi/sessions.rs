//! The iSCSI sessions of all workers; touched at login and logout only.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_scsi::iscsi::login::Identity;
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::{Isid, Tsih};
use riser_scsi::nexus::NexusId;

use super::super::registry::ChannelRef;
use crate::srp::LunMap;

/// What makes a session: the initiator port and the target. An initiator may have several to one
/// target, with an ISID each.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct SessionKey {
    pub(super) initiator: IscsiName,
    isid: Isid,
    target: usize,
}

impl SessionKey {
    pub(super) fn of(identity: &Identity, target: usize) -> Self {
        Self {
            initiator: identity.initiator.clone(),
            isid: identity.isid,
            target,
        }
    }
}

/// A session that was entered, as its channel remembers it.
#[derive(Clone, Debug)]
pub(super) struct Entered {
    pub(super) key: SessionKey,
    pub(super) channel: ChannelRef,
    pub(super) nexus: NexusId,
    pub(super) address: IpAddr,
    pub(super) luns: Option<Arc<LunMap>>,
}

#[derive(Debug, Default)]
struct Table {
    sessions: HashMap<SessionKey, (Tsih, ChannelRef)>,
    handles: HashSet<Tsih>,
    next: u16,
}

/// The sessions of all workers. There are no more than the registry of nexuses lets in.
#[derive(Debug, Default)]
pub struct IscsiSessions(Mutex<Table>);

impl IscsiSessions {
    /// Whether a session has this handle.
    pub(super) fn is_known(&self, key: &SessionKey, tsih: Tsih) -> bool {
        let table = self.lock();
        table
            .sessions
            .get(key)
            .is_some_and(|(known, _)| *known == tsih)
    }

    /// Enters a session. The channel whose session it takes over, if there is one (RFC 7143 6.3.5).
    pub(super) fn enter(&self, entered: &Entered) -> (Tsih, Option<ChannelRef>) {
        let mut table = self.lock();
        let tsih = loop {
            table.next = table.next.wrapping_add(1);
            let tsih = Tsih(table.next);
            if table.next != 0 && table.handles.insert(tsih) {
                break tsih;
            }
        };
        let old = table
            .sessions
            .insert(entered.key.clone(), (tsih, entered.channel));
        if let Some((handle, _)) = old {
            table.handles.remove(&handle);
        }
        (tsih, old.map(|(_, channel)| channel))
    }

    /// A session's channel is gone.
    pub(super) fn leave(&self, entered: &Entered) {
        let mut table = self.lock();
        let known = table.sessions.get(&entered.key).copied();
        if let Some((tsih, channel)) = known
            && channel == entered.channel
        {
            table.sessions.remove(&entered.key);
            table.handles.remove(&tsih);
        }
        for (_, unit) in entered.luns.iter().flat_map(|luns| luns.iter()) {
            unit.lu.remove_nexus(entered.nexus);
        }
    }

    /// A panic elsewhere cannot have left the table half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
