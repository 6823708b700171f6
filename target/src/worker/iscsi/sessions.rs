//! The iSCSI sessions of all workers; touched at login, logout and changes of the configuration only.
//!
//! A session may have several connections, on any workers: they share its numbers
//! ([`Window`]). It ends with the last of them. One that is taken over stays here until the devices
//! have let go of its commands; whoever takes its place waits for that.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::iscsi::login::{Identity, SessionParams};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, Isid, Tsih};
use riser_scsi::nexus::{Nexus, NexusId};

use super::super::registry::ChannelRef;
use super::super::target::Catalog;
use crate::iscsi::{Others, Window};
use crate::srp::LunMap;

/// What makes a session: the initiator port and the target. An initiator may have several to one
/// target, with an ISID each.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(in crate::worker) struct SessionKey {
    pub(in crate::worker) initiator: IscsiName,
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

/// A connection in its session, as its worker remembers it.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Entered {
    pub(in crate::worker) initiator: IscsiName,
    pub(in crate::worker) tsih: Tsih,
    pub(in crate::worker) nexus: NexusId,
}

/// What a session is made of.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Session {
    pub(in crate::worker) key: SessionKey,
    pub(in crate::worker) nexus: NexusId,
    pub(in crate::worker) address: IpAddr,
    /// Ports of the nexus; none of a discovery session, which has no units either.
    pub(in crate::worker) ports: Option<Nexus>,
    pub(in crate::worker) luns: Arc<LunMap>,
    pub(in crate::worker) params: SessionParams,
    pub(in crate::worker) window: Arc<Window>,
}

#[derive(Debug)]
struct Entry {
    session: Session,
    connections: Vec<(Cid, ChannelRef)>,
}

/// Somebody waits until a connection is gone.
#[derive(Clone, Copy, Debug)]
struct Wait {
    on: ChannelRef,
    who: ChannelRef,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Tsih, Entry>,
    current: HashMap<SessionKey, Tsih>,
    next: u16,
    waits: Vec<Wait>,
}

/// What follows from the end of a connection.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// They wait for nobody any more.
    pub(super) notify: Vec<ChannelRef>,
    /// The session ends with a connection that was lost.
    pub(super) terminate: Vec<ChannelRef>,
    /// Where the nexus came from that has ended.
    pub(super) ended: Option<IpAddr>,
}

/// The sessions of all workers. There are no more than the registry of nexuses lets in.
#[derive(Debug, Default)]
pub struct IscsiSessions(Mutex<Table>);

impl IscsiSessions {
    /// Whether a connection may join a session.
    pub(super) fn check_join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
    ) -> Result<(), LoginStatus> {
        let table = self.lock();
        let entry = table.entry_of(key, tsih)?;
        let others = entry.connections.iter().filter(|(c, _)| *c != cid).count();
        if others < usize::from(entry.session.params.max_connections) {
            Ok(())
        } else {
            Err(LoginStatus::TOO_MANY_CONNECTIONS)
        }
    }

    /// Enters a session. Its handle, and the connections of the session whose place it takes
    /// (RFC 7143 6.3.5).
    pub(super) fn enter(
        &self,
        session: Session,
        cid: Cid,
        channel: ChannelRef,
    ) -> Option<(Tsih, Vec<ChannelRef>)> {
        let mut table = self.lock();
        let tsih = table.free_handle()?;
        let old = table.current.insert(session.key.clone(), tsih);
        let old = old.and_then(|tsih| table.entries.get(&tsih));
        let old: Vec<_> = old.map_or_else(Vec::new, |old| {
            old.connections.iter().map(|(_, c)| *c).collect()
        });
        table.wait_for(&old, channel);
        let connections = vec![(cid, channel)];
        table.entries.insert(
            tsih,
            Entry {
                session,
                connections,
            },
        );
        Some((tsih, old))
    }

    /// Enters a connection into its session, and the one whose place it takes (RFC 7143 6.3.4).
    pub(super) fn join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
        channel: ChannelRef,
    ) -> Result<(Session, Vec<ChannelRef>), LoginStatus> {
        self.check_join(key, tsih, cid)?;
        let mut table = self.lock();
        table.entry_of(key, tsih)?;
        let entry = table.entries.get_mut(&tsih).expect("just found");
        let same = |(c, _): &&(Cid, ChannelRef)| *c == cid;
        let old: Vec<_> = entry.connections.iter().filter(same).map(|c| c.1).collect();
        entry.connections.push((cid, channel));
        let session = entry.session.clone();
        table.wait_for(&old, channel);
        Ok((session, old))
    }

    /// Other connections of a session that are to end; `channel` waits for them.
    pub(super) fn end_others(
        &self,
        tsih: Tsih,
        channel: ChannelRef,
        others: Others,
    ) -> Vec<ChannelRef> {
        let mut table = self.lock();
        let Some(entry) = table.entries.get(&tsih) else {
            return Vec::new();
        };
        let meant = |(cid, c): &&(Cid, ChannelRef)| {
            *c != channel && (others == Others::All || others == Others::One(*cid))
        };
        let ending: Vec<_> = entry
            .connections
            .iter()
            .filter(meant)
            .map(|c| c.1)
            .collect();
        table.wait_for(&ending, channel);
        ending
    }

    /// A connection is gone, and nothing of it is left.
    pub(super) fn leave(&self, tsih: Tsih, channel: ChannelRef, logged_out: bool) -> Left {
        let mut table = self.lock();
        let was_expected = table.waits.iter().any(|wait| wait.on == channel);
        let mut left = Left {
            notify: table.end_waits(channel),
            ..Left::default()
        };
        let Some(entry) = table.entries.get_mut(&tsih) else {
            return left;
        };
        entry.connections.retain(|(_, c)| *c != channel);
        if !entry.connections.is_empty() {
            if !logged_out && !was_expected {
                left.terminate
                    .extend(entry.connections.iter().map(|(_, c)| *c));
            }
            return left;
        }
        let entry = table.entries.remove(&tsih).expect("just found");
        if table.current.get(&entry.session.key) == Some(&tsih) {
            table.current.remove(&entry.session.key);
        }
        for (_, unit) in entry.session.luns.iter() {
            unit.lu.remove_nexus(entry.session.nexus);
        }
        left.ended = Some(entry.session.address);
        left
    }

    /// What a session may use at present.
    pub(in crate::worker) fn luns(&self, tsih: Tsih) -> Option<Arc<LunMap>> {
        let table = self.lock();
        let entry = table.entries.get(&tsih)?;
        Some(Arc::clone(&entry.session.luns))
    }

    /// Another catalog is served: sessions whose units are others now are told so. The connections
    /// of initiators that may not log in any more.
    pub(crate) fn change(&self, catalog: &Catalog) -> Vec<ChannelRef> {
        let mut table = self.lock();
        let mut terminate = Vec::new();
        for entry in table.entries.values_mut() {
            let Some(ports) = &entry.session.ports else {
                continue;
            };
            let (key, address) = (&entry.session.key, entry.session.address);
            let target = catalog.targets.get(key.target);
            let luns = target.and_then(|t| t.luns_of_name(&key.initiator, address));
            if luns.is_none() {
                terminate.extend(entry.connections.iter().map(|(_, c)| *c));
            }
            let luns = luns.unwrap_or_default();
            if entry.session.luns.is_same(&luns) {
                continue;
            }
            let nexus = entry.session.nexus;
            for (_, unit) in entry.session.luns.iter().filter(|(_, u)| !luns.has(u)) {
                unit.lu.remove_nexus(nexus);
            }
            for (_, unit) in luns.iter() {
                if unit.lu.nexus(nexus).is_none() {
                    unit.lu.add_nexus(nexus, ports.clone());
                }
                let scope = AttentionScope::One(nexus);
                unit.lu.raise(Attention::LunsChanged, scope);
            }
            entry.session.luns = luns;
        }
        terminate
    }

    /// A panic elsewhere cannot have left the table half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn entry_of(&self, key: &SessionKey, tsih: Tsih) -> Result<&Entry, LoginStatus> {
        let current = self.current.get(key).filter(|known| **known == tsih);
        let entry = current.and_then(|tsih| self.entries.get(tsih));
        entry.ok_or(LoginStatus::NO_SUCH_SESSION)
    }

    fn free_handle(&mut self) -> Option<Tsih> {
        (0..u16::MAX).find_map(|_| {
            self.next = self.next.wrapping_add(1);
            let tsih = Tsih(self.next);
            (self.next != 0 && !self.entries.contains_key(&tsih)).then_some(tsih)
        })
    }

    fn wait_for(&mut self, others: &[ChannelRef], who: ChannelRef) {
        self.waits
            .extend(others.iter().map(|on| Wait { on: *on, who }));
    }

    /// Nobody waits for a connection any more, and it waits for nobody: who waited for it now waits
    /// for what it waited for. Those that have nothing left to wait for.
    fn end_waits(&mut self, gone: ChannelRef) -> Vec<ChannelRef> {
        let heirs: Vec<_> = self
            .waits
            .iter()
            .filter(|w| w.on == gone)
            .map(|w| w.who)
            .collect();
        let still: Vec<_> = self
            .waits
            .iter()
            .filter(|w| w.who == gone)
            .map(|w| w.on)
            .collect();
        self.waits.retain(|w| w.on != gone && w.who != gone);
        for heir in &heirs {
            self.wait_for(&still, *heir);
        }
        let waits = &self.waits;
        let is_free = |heir: &ChannelRef| !waits.iter().any(|w| w.who == *heir);
        heirs.into_iter().filter(is_free).collect()
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::iscsi::CmdSn;

    use super::*;

    fn channel(serial: u32) -> ChannelRef {
        ChannelRef { worker: 0, serial }
    }

    fn params(max_connections: u16) -> SessionParams {
        SessionParams {
            discovery: false,
            max_connections,
            initial_r2t: true,
            immediate_data: true,
            max_burst: 65536,
            first_burst: 65536,
            max_outstanding_r2t: 1,
            time2wait: 0,
            time2retain: 0,
            error_recovery_level: 0,
            data_pdu_in_order: true,
            data_sequence_in_order: true,
            rdma_extensions: false,
            tagged_solicited_only: None,
            hello_required: false,
            protocol_level: 1,
        }
    }

    fn session(isid: u8) -> Session {
        Session {
            key: SessionKey {
                initiator: IscsiName::new("iqn.2026-01.a:i").unwrap(),
                isid: Isid([isid; 6]),
                target: 0,
            },
            nexus: NexusId(1),
            address: IpAddr::from([127, 0, 0, 1]),
            ports: None,
            luns: Arc::default(),
            params: params(2),
            window: Arc::new(Window::new(4, CmdSn(1), true)),
        }
    }

    #[test]
    fn a_session_that_takes_another_s_place_waits_for_its_end() {
        let sessions = IscsiSessions::default();
        let (first, old) = sessions.enter(session(1), Cid(0), channel(1)).unwrap();
        assert!(old.is_empty());
        let (second, old) = sessions.enter(session(1), Cid(0), channel(2)).unwrap();
        assert_eq!(old, [channel(1)]);
        // A third one comes while the second still waits, whose client gives up.
        let (third, old) = sessions.enter(session(1), Cid(0), channel(3)).unwrap();
        assert_eq!(old, [channel(2)]);
        let left = sessions.leave(second, channel(2), false);
        assert!(left.notify.is_empty(), "the first is still there");
        let left = sessions.leave(first, channel(1), false);
        assert_eq!(left.notify, [channel(3)]);
        assert!(left.terminate.is_empty());
        let key = session(1).key;
        assert_eq!(sessions.check_join(&key, third, Cid(1)), Ok(()));
        let stranger = sessions.check_join(&key, first, Cid(1));
        assert_eq!(stranger, Err(LoginStatus::NO_SUCH_SESSION));
    }

    #[test]
    fn connections_join_up_to_the_limit_and_replace_each_other() {
        let sessions = IscsiSessions::default();
        let key = session(1).key;
        let (tsih, _) = sessions.enter(session(1), Cid(0), channel(1)).unwrap();
        let (_, old) = sessions.join(&key, tsih, Cid(1), channel(2)).unwrap();
        assert!(old.is_empty());
        let third = sessions.join(&key, tsih, Cid(2), channel(3)).map(|_| ());
        assert_eq!(third, Err(LoginStatus::TOO_MANY_CONNECTIONS));
        let (_, old) = sessions.join(&key, tsih, Cid(1), channel(4)).unwrap();
        assert_eq!(old, [channel(2)]);
        let left = sessions.leave(tsih, channel(2), false);
        assert_eq!(left.notify, [channel(4)]);
        assert!(left.terminate.is_empty(), "its place was taken");
        // The session does not survive the loss of a connection.
        let left = sessions.leave(tsih, channel(1), false);
        assert_eq!(left.terminate, [channel(4)]);
        let left = sessions.leave(tsih, channel(4), false);
        assert!(left.ended.is_some());
    }

    #[test]
    fn a_logout_of_the_session_ends_the_others() {
        let sessions = IscsiSessions::default();
        let key = session(1).key;
        let (tsih, _) = sessions.enter(session(1), Cid(0), channel(1)).unwrap();
        sessions.join(&key, tsih, Cid(1), channel(2)).unwrap();
        let one = sessions.end_others(tsih, channel(1), Others::One(Cid(7)));
        assert!(one.is_empty());
        assert_eq!(
            sessions.end_others(tsih, channel(1), Others::All),
            [channel(2)]
        );
        let left = sessions.leave(tsih, channel(2), false);
        assert_eq!(left.notify, [channel(1)]);
        assert!(sessions.leave(tsih, channel(1), true).ended.is_some());
    }
}
