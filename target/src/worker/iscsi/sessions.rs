//! The iSCSI sessions of all workers; touched at login, logout and changes of the configuration only.
//!
//! A session may have several connections, on any workers: they share its numbers
//! ([`Window`]). It ends with the first of them that is lost; at error recovery level 2 with the last of
//! them, those that are kept for what they had under way included. One that is taken over stays here until the devices
//! have let go of its commands; whoever takes its place waits for that.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::iscsi::login::{Identity, SessionParams};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, Isid, Tsih};
use riser_scsi::nexus::{Nexus, NexusId};

use super::super::recent::Recent;
use super::super::registry::ChannelRef;
use super::super::target::Catalog;
use super::super::waits::Waits;
use crate::fabric::{KnownUnits, LunMap};
use crate::iscsi::{Others, Window};

/// Connections of a session that are lost, and kept for what they had under way.
const MAX_KEPT: usize = 8;

/// Discovery sessions at once. They are no I_T nexuses, and take none of the places of those: a
/// host that only lists targets, perhaps without authentication, keeps no other from its disks.
const MAX_DISCOVERIES: u32 = 64;

/// The same from one address.
const DISCOVERIES_PER_ADDRESS: u32 = 16;

/// What makes a session: the initiator port and the target, `None` of a discovery session. An
/// initiator may have several to one target, with an ISID each.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(in crate::worker) struct SessionKey {
    pub(in crate::worker) initiator: IscsiName,
    isid: Isid,
    target: Option<IscsiName>,
    /// Where a discovery session comes from. As a rule nothing has been proved in one, so none takes the
    /// place of another address's.
    address: Option<IpAddr>,
}

impl SessionKey {
    /// Of a session whose first connection comes from `address`.
    pub(super) fn of(identity: &Identity, address: IpAddr) -> Self {
        let target = identity.target.as_ref().filter(|_| !identity.discovery);
        Self {
            initiator: identity.initiator.clone(),
            isid: identity.isid,
            target: target.cloned(),
            address: identity.discovery.then_some(address),
        }
    }
}

/// A connection in its session, as its worker remembers it.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Entered {
    pub(in crate::worker) initiator: IscsiName,
    pub(in crate::worker) isid: Isid,
    /// None in a discovery session.
    pub(in crate::worker) target: Option<IscsiName>,
    pub(in crate::worker) tsih: Tsih,
    pub(in crate::worker) nexus: NexusId,
}

/// What a session is made of.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Session {
    pub(in crate::worker) key: SessionKey,
    pub(in crate::worker) nexus: NexusId,
    /// The address of its first connection. Others have the same rights at theirs.
    pub(in crate::worker) address: IpAddr,
    /// The name under which the initiator has proved its identity, if it had to.
    pub(in crate::worker) chap_name: Option<String>,
    /// Ports of the nexus; none of a discovery session, which has no units either.
    pub(in crate::worker) ports: Option<Nexus>,
    pub(in crate::worker) luns: Arc<LunMap>,
    pub(in crate::worker) params: SessionParams,
    pub(in crate::worker) window: Arc<Window>,
}

/// How a connection is ended by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::worker) enum Ending {
    /// With all that it has under way.
    Terminate,
    /// So that others may have that.
    Detach,
}

impl Ending {
    /// Of a connection whose place is taken by a login (RFC 7143 6.3.4).
    pub(super) fn of_reinstatement(params: &SessionParams) -> Self {
        if params.error_recovery_level > 1 {
            Self::Detach
        } else {
            Self::Terminate
        }
    }
}

/// How much of a connection is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// All, as far as we know.
    Up,
    /// It is lost, and not logged out.
    Lost,
    /// It is logged out, and what it had under way is kept.
    Detached,
}

#[derive(Clone, Copy, Debug)]
struct Connection {
    cid: Cid,
    channel: ChannelRef,
    address: IpAddr,
    link: Link,
}

impl Connection {
    fn new(candidate: &Candidate) -> Self {
        Self {
            cid: candidate.cid,
            channel: candidate.channel,
            address: candidate.address,
            link: Link::Up,
        }
    }
}

/// A connection that is to become one of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) cid: Cid,
    pub(super) channel: ChannelRef,
    /// The initiator's address.
    pub(super) address: IpAddr,
    /// Commands that it can hold.
    pub(super) commands: u16,
}

#[derive(Debug)]
struct Entry {
    session: Session,
    connections: Vec<Connection>,
}

impl Entry {
    fn set_link(&mut self, channel: ChannelRef, link: Link) {
        let mut connections = self.connections.iter_mut();
        if let Some(connection) = connections.find(|c| c.channel == channel) {
            connection.link = link;
        }
    }

    fn channels(&self) -> impl Iterator<Item = ChannelRef> + '_ {
        self.connections.iter().map(|c| c.channel)
    }

    /// Connections that are no more than kept, beyond the bound: the oldest ones.
    fn surplus(&self) -> Vec<ChannelRef> {
        let kept = self.connections.iter().filter(|c| c.link != Link::Up);
        let surplus = kept.clone().count().saturating_sub(MAX_KEPT);
        kept.take(surplus).map(|c| c.channel).collect()
    }
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Tsih, Entry>,
    current: HashMap<SessionKey, Tsih>,
    waits: Waits,
    /// Discovery sessions by the addresses that they come from.
    discoveries: HashMap<IpAddr, u32>,
    /// Sessions that have ended without a logout of the initiator's own.
    recent: Recent<Owner>,
}

/// Who a session belongs to: its key, its address, and the name that was proved. Who knows only the first must not
/// hold up the others.
type Owner = (SessionKey, IpAddr, Option<String>);

/// What follows from the end of a connection.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// They wait for nobody any more.
    pub(super) notify: Vec<ChannelRef>,
    /// The session ends with a connection that was lost.
    pub(super) terminate: Vec<ChannelRef>,
    /// Where the nexus came from that has ended; a discovery session is none.
    pub(super) ended: Option<IpAddr>,
}

/// What follows from the loss of a connection whose commands are kept.
#[derive(Debug, Default)]
pub(super) struct Lost {
    /// Tells the initiator.
    pub(super) tell: Option<ChannelRef>,
    /// Kept no longer.
    pub(super) terminate: Vec<ChannelRef>,
}

/// The sessions of all workers. There are no more than the registry of nexuses lets in.
#[derive(Debug, Default)]
pub struct IscsiSessions(Mutex<Table>);

impl IscsiSessions {
    /// Whether a connection that can hold `commands` commands may join a session.
    pub(super) fn check_join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
        commands: u16,
    ) -> Result<(), LoginStatus> {
        self.lock().check_room(key, tsih, cid, commands)
    }

    /// The address of the session whose place another one with this key takes.
    pub(super) fn address_of(&self, key: &SessionKey) -> Option<IpAddr> {
        let table = self.lock();
        let entry = table.entries.get(table.current.get(key)?)?;
        Some(entry.session.address)
    }

    /// Returns the units that the initiator of a session that logs in takes its LUNs for: from the session whose place it
    /// takes, or which has just ended.
    pub(super) fn known_units(
        &self,
        key: &SessionKey,
        address: IpAddr,
        chap_name: Option<&str>,
        now: Instant,
    ) -> Option<KnownUnits> {
        let mut table = self.lock();
        let there = table.current.get(key);
        if let Some(entry) = there.and_then(|tsih| table.entries.get(tsih)) {
            return Some(entry.session.luns.known_units());
        }
        let owner = (key.clone(), address, chap_name.map(str::to_owned));
        table.recent.find(&owner, now)
    }

    /// Enters a session, if `check` finds nothing against its taking the place of the one that is there
    /// (RFC 7143 6.3.5). Its handle, and the connections of that one. The handle is `random`, or the next
    /// one that is free: a number that can be guessed would help to join another initiator's
    /// session.
    pub(super) fn enter(
        &self,
        session: Session,
        first: &Candidate,
        random: u16,
        check: impl FnOnce(&Session) -> Result<(), LoginStatus>,
    ) -> Result<(Tsih, Vec<ChannelRef>), LoginStatus> {
        let mut table = self.lock();
        if let Some(there) = table.current.get(&session.key) {
            check(&table.entries[there].session)?;
        }
        let tsih = table
            .free_handle(random)
            .ok_or(LoginStatus::OUT_OF_RESOURCES)?;
        if session.is_discovery() && !table.take_discovery(session.address) {
            return Err(LoginStatus::OUT_OF_RESOURCES);
        }
        let old = table.current.insert(session.key.clone(), tsih);
        let old = old.and_then(|tsih| table.entries.get(&tsih));
        let old: Vec<_> = old.map_or_else(Vec::new, |old| old.channels().collect());
        table.waits.wait_for(&old, first.channel);
        let connections = vec![Connection::new(first)];
        table.entries.insert(
            tsih,
            Entry {
                session,
                connections,
            },
        );
        Ok((tsih, old))
    }

    /// Enters a connection into its session if `check` finds nothing against it, and the one whose
    /// place it takes (RFC 7143 6.3.4).
    pub(super) fn join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        new: &Candidate,
        check: impl FnOnce(&Session) -> Result<(), LoginStatus>,
    ) -> Result<(Session, Vec<ChannelRef>), LoginStatus> {
        let mut table = self.lock();
        check(&table.entry_of(key, tsih)?.session)?;
        table.check_room(key, tsih, new.cid, new.commands)?;
        let entry = table.entries.get_mut(&tsih).expect("just found");
        let same = |c: &&Connection| c.cid == new.cid && c.link != Link::Detached;
        let old = entry.connections.iter().filter(same);
        let old: Vec<_> = old.map(|c| c.channel).collect();
        entry.connections.push(Connection::new(new));
        let session = entry.session.clone();
        table.waits.wait_for(&old, new.channel);
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
        let meant = |c: &&Connection| {
            c.channel != channel && (others == Others::All || others == Others::One(c.cid))
        };
        let ending = entry.connections.iter().filter(meant);
        let ending: Vec<_> = ending.map(|c| c.channel).collect();
        table.waits.wait_for(&ending, channel);
        ending
    }

    /// Connections of a session with a number, which are to be detached; `channel` waits for that.
    pub(super) fn detach(&self, tsih: Tsih, channel: ChannelRef, cid: Cid) -> Vec<ChannelRef> {
        let mut table = self.lock();
        let Some(entry) = table.entries.get(&tsih) else {
            return Vec::new();
        };
        let meant =
            |c: &&Connection| c.channel != channel && c.cid == cid && c.link != Link::Detached;
        let found = entry.connections.iter().filter(meant);
        let found: Vec<_> = found.map(|c| c.channel).collect();
        table.waits.wait_for(&found, channel);
        found
    }

    /// A connection is lost, and what it had under way is kept.
    pub(super) fn lose(&self, tsih: Tsih, channel: ChannelRef) -> Lost {
        let mut table = self.lock();
        let Some(entry) = table.entries.get_mut(&tsih) else {
            return Lost::default();
        };
        entry.set_link(channel, Link::Lost);
        let mut up = entry.connections.iter().filter(|c| c.link == Link::Up);
        Lost {
            tell: up.next().map(|c| c.channel),
            terminate: entry.surplus(),
        }
    }

    /// Others may have what a connection had under way.
    pub(super) fn detached(&self, tsih: Tsih, channel: ChannelRef) -> Left {
        let mut table = self.lock();
        let notify = table.waits.end(channel);
        let entry = table.entries.get_mut(&tsih);
        let terminate = entry.map_or_else(Vec::new, |entry| {
            entry.set_link(channel, Link::Detached);
            entry.surplus()
        });
        Left {
            notify,
            terminate,
            ended: None,
        }
    }

    /// A connection is gone, and nothing of it is left. At `again` the initiator may log in again and go on with its
    /// disks: it has not logged out by itself.
    pub(super) fn leave(
        &self,
        tsih: Tsih,
        channel: ChannelRef,
        logged_out: bool,
        again: Option<Instant>,
    ) -> Left {
        let mut table = self.lock();
        let was_expected = table.waits.is_awaited(channel);
        let mut left = Left {
            notify: table.waits.end(channel),
            ..Left::default()
        };
        let Some(entry) = table.entries.get_mut(&tsih) else {
            return left;
        };
        entry.connections.retain(|c| c.channel != channel);
        if !entry.connections.is_empty() {
            let survives = entry.session.params.error_recovery_level > 1;
            if !logged_out && !was_expected && !survives {
                left.terminate.extend(entry.channels());
            }
            return left;
        }
        let entry = table.entries.remove(&tsih).expect("just found");
        if table.current.get(&entry.session.key) == Some(&tsih) {
            table.current.remove(&entry.session.key);
            if !entry.session.is_discovery() {
                let session = &entry.session;
                let owner = (
                    session.key.clone(),
                    session.address,
                    session.chap_name.clone(),
                );
                match again {
                    Some(now) => table.recent.keep(owner, session.luns.known_units(), now),
                    None => table.recent.forget(&owner),
                }
            }
        }
        for (_, unit) in entry.session.luns.iter() {
            unit.lu.remove_nexus(entry.session.nexus);
        }
        if entry.session.is_discovery() {
            table.end_discovery(entry.session.address);
        } else {
            left.ended = Some(entry.session.address);
        }
        left
    }

    /// What a session may use at present.
    pub(in crate::worker) fn luns(&self, tsih: Tsih) -> Option<Arc<LunMap>> {
        let table = self.lock();
        let entry = table.entries.get(&tsih)?;
        Some(Arc::clone(&entry.session.luns))
    }

    /// Another catalog is served: sessions whose units are others now are told so. The connections
    /// to log out, those of initiators that may not log in any more.
    pub(crate) fn change(&self, catalog: &Catalog) -> Vec<ChannelRef> {
        let mut table = self.lock();
        let mut ended = Vec::new();
        for entry in table.entries.values_mut() {
            let Some(ports) = &entry.session.ports else {
                continue;
            };
            let (key, address) = (&entry.session.key, entry.session.address);
            let name = key.target.as_ref();
            let target = name.and_then(|name| catalog.target_named(name));
            let luns = target.and_then(|t| t.luns_of_name(&key.initiator, address));
            let rule_at = |address| target.and_then(|t| t.rule_of(&key.initiator, address));
            let may_stay =
                |c: &&Connection| luns.is_some() && rule_at(c.address) == rule_at(address);
            let others = entry.connections.iter().filter(|c| !may_stay(c));
            ended.extend(others.map(|c| c.channel));
            let mut luns = luns.unwrap_or_default();
            Arc::get_mut(&mut luns)
                .expect("made for this session")
                .follow(&entry.session.luns);
            if entry.session.luns.is_same(&luns) {
                if !entry.session.luns.is_accounted_alike(&luns) {
                    entry.session.luns = luns;
                }
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
        ended
    }

    /// A panic elsewhere cannot have left the table half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    fn is_discovery(&self) -> bool {
        self.params.discovery
    }
}

impl Table {
    /// One more discovery session from an address; whether there is room for it.
    fn take_discovery(&mut self, address: IpAddr) -> bool {
        let all: u32 = self.discoveries.values().sum();
        let from_there = self.discoveries.get(&address).copied().unwrap_or(0);
        let has_room = all < MAX_DISCOVERIES && from_there < DISCOVERIES_PER_ADDRESS;
        if has_room {
            self.discoveries.insert(address, from_there + 1);
        }
        has_room
    }

    fn end_discovery(&mut self, address: IpAddr) {
        if let Some(n) = self.discoveries.get_mut(&address) {
            *n -= 1;
            if *n == 0 {
                self.discoveries.remove(&address);
            }
        }
    }

    fn entry_of(&self, key: &SessionKey, tsih: Tsih) -> Result<&Entry, LoginStatus> {
        let current = self.current.get(key).filter(|known| **known == tsih);
        let entry = current.and_then(|tsih| self.entries.get(tsih));
        entry.ok_or(LoginStatus::NO_SUCH_SESSION)
    }

    /// Whether a session has room for a connection that can hold `commands` commands.
    fn check_room(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
        commands: u16,
    ) -> Result<(), LoginStatus> {
        let entry = self.entry_of(key, tsih)?;
        if entry.session.params.rdma_extensions {
            // It has one connection, of another transport.
            return Err(LoginStatus::TOO_MANY_CONNECTIONS);
        }
        if entry.session.window.commands() > commands {
            return Err(LoginStatus::OUT_OF_RESOURCES);
        }
        let is_other = |c: &&Connection| c.cid != cid && c.link == Link::Up;
        let others = entry.connections.iter().filter(is_other).count();
        let params = &entry.session.params;
        // At level 2 there may be a second one in any case, to log the first one out (RFC 7143 6.3.4).
        let least = if params.error_recovery_level > 1 {
            2
        } else {
            1
        };
        if others < usize::from(params.max_connections).max(least) {
            Ok(())
        } else {
            Err(LoginStatus::TOO_MANY_CONNECTIONS)
        }
    }

    fn free_handle(&self, random: u16) -> Option<Tsih> {
        let mut handles = (0..=u16::MAX).map(|n| Tsih(random.wrapping_add(n)));
        handles.find(|tsih| tsih.0 != 0 && !self.entries.contains_key(tsih))
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::iscsi::CmdSn;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn channel(serial: u64) -> ChannelRef {
        ChannelRef { worker: 0, serial }
    }

    fn new(cid: u16, serial: u64) -> Candidate {
        Candidate {
            cid: Cid(cid),
            channel: channel(serial),
            address: HERE,
            commands: 4,
        }
    }

    fn fits(_: &Session) -> Result<(), LoginStatus> {
        Ok(())
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
                target: None,
                address: None,
            },
            nexus: NexusId(1),
            address: HERE,
            chap_name: None,
            ports: None,
            luns: Arc::default(),
            params: params(2),
            window: Arc::new(Window::new(4, CmdSn(1), true)),
        }
    }

    #[test]
    fn a_session_that_takes_another_s_place_waits_for_its_end() {
        let sessions = IscsiSessions::default();
        let (first, old) = sessions.enter(session(1), &new(0, 1), 7, fits).unwrap();
        assert!(old.is_empty());
        let (second, old) = sessions.enter(session(1), &new(0, 2), 7, fits).unwrap();
        assert_eq!(old, [channel(1)]);
        // A third one comes while the second still waits, whose client gives up.
        let (third, old) = sessions.enter(session(1), &new(0, 3), 7, fits).unwrap();
        assert_eq!(old, [channel(2)]);
        let left = sessions.leave(second, channel(2), false, None);
        assert!(left.notify.is_empty(), "the first is still there");
        let left = sessions.leave(first, channel(1), false, None);
        assert_eq!(left.notify, [channel(3)]);
        assert!(left.terminate.is_empty());
        let key = session(1).key;
        assert_eq!(sessions.check_join(&key, third, Cid(1), 4), Ok(()));
        let stranger = sessions.check_join(&key, first, Cid(1), 4);
        assert_eq!(stranger, Err(LoginStatus::NO_SUCH_SESSION));
    }

    #[test]
    fn a_session_that_may_not_take_another_s_place_leaves_it_alone() {
        let sessions = IscsiSessions::default();
        let (first, _) = sessions.enter(session(1), &new(0, 1), 7, fits).unwrap();
        let refuse = |_: &Session| Err(LoginStatus::AUTHORIZATION_FAILURE);
        let refused = sessions.enter(session(1), &new(0, 2), 7, refuse);
        assert_eq!(refused.unwrap_err(), LoginStatus::AUTHORIZATION_FAILURE);
        let key = session(1).key;
        assert_eq!(sessions.check_join(&key, first, Cid(1), 4), Ok(()));
        // Without one to replace nothing is asked.
        sessions.enter(session(2), &new(0, 3), 7, refuse).unwrap();
    }

    #[test]
    fn discovery_sessions_are_bounded_by_address_and_in_all() {
        let sessions = IscsiSessions::default();
        let mut serial = 0;
        let mut enter = |host: u8| {
            serial += 1;
            let mut session = session(0);
            session.key.isid = Isid([0, 0, 0, 0, host, serial as u8]);
            session.address = IpAddr::from([10, 0, 0, host]);
            session.params.discovery = true;
            let entered = sessions.enter(session, &new(0, serial), 7, fits);
            entered.ok().map(|(tsih, _)| (tsih, channel(serial)))
        };
        let first = enter(1).unwrap();
        for _ in 1..DISCOVERIES_PER_ADDRESS {
            enter(1).unwrap();
        }
        assert!(enter(1).is_none());
        for host in 2..=(MAX_DISCOVERIES / DISCOVERIES_PER_ADDRESS) as u8 {
            for _ in 0..DISCOVERIES_PER_ADDRESS {
                enter(host).unwrap();
            }
        }
        assert!(enter(99).is_none());
        let left = sessions.leave(first.0, first.1, true, None);
        assert!(left.ended.is_none(), "it was no nexus");
        assert!(enter(99).is_some());
    }

    #[test]
    fn connections_join_up_to_the_limit_and_replace_each_other() {
        let sessions = IscsiSessions::default();
        let key = session(1).key;
        let (tsih, _) = sessions.enter(session(1), &new(0, 1), 7, fits).unwrap();
        let (_, old) = sessions.join(&key, tsih, &new(1, 2), fits).unwrap();
        assert!(old.is_empty());
        let third = sessions.join(&key, tsih, &new(2, 3), fits);
        assert_eq!(third.unwrap_err(), LoginStatus::TOO_MANY_CONNECTIONS);
        let small = sessions.join(
            &key,
            tsih,
            &Candidate {
                commands: 3,
                ..new(1, 3)
            },
            fits,
        );
        assert_eq!(small.unwrap_err(), LoginStatus::OUT_OF_RESOURCES);
        let (_, old) = sessions.join(&key, tsih, &new(1, 4), fits).unwrap();
        assert_eq!(old, [channel(2)]);
        let left = sessions.leave(tsih, channel(2), false, None);
        assert_eq!(left.notify, [channel(4)]);
        assert!(left.terminate.is_empty(), "its place was taken");
        // The session does not survive the loss of a connection.
        let left = sessions.leave(tsih, channel(1), false, None);
        assert_eq!(left.terminate, [channel(4)]);
        let left = sessions.leave(tsih, channel(4), false, None);
        assert!(left.ended.is_some());
    }

    #[test]
    fn handles_are_random_and_free() {
        let sessions = IscsiSessions::default();
        let mut serial = 0;
        let mut enter = |isid, random| {
            serial += 1;
            let entered = sessions.enter(session(isid), &new(0, serial), random, fits);
            entered.unwrap().0
        };
        assert_eq!(enter(1, 0x5a5a), Tsih(0x5a5a));
        assert_eq!(enter(2, 0x5a5a), Tsih(0x5a5b));
        assert_eq!(enter(3, u16::MAX), Tsih(u16::MAX));
        assert_eq!(enter(4, u16::MAX), Tsih(1), "zero stands for a new session");
    }

    #[test]
    fn a_logout_of_the_session_ends_the_others() {
        let sessions = IscsiSessions::default();
        let key = session(1).key;
        let (tsih, _) = sessions.enter(session(1), &new(0, 1), 7, fits).unwrap();
        sessions.join(&key, tsih, &new(1, 2), fits).unwrap();
        let one = sessions.end_others(tsih, channel(1), Others::One(Cid(7)));
        assert!(one.is_empty());
        assert_eq!(
            sessions.end_others(tsih, channel(1), Others::All),
            [channel(2)]
        );
        let left = sessions.leave(tsih, channel(2), false, None);
        assert_eq!(left.notify, [channel(1)]);
        assert!(sessions.leave(tsih, channel(1), true, None).ended.is_some());
    }

    /// A session at error recovery level 2, of one connection at most.
    fn recoverable() -> Session {
        let mut session = session(1);
        session.params.error_recovery_level = 2;
        session.params.max_connections = 1;
        session
    }

    #[test]
    fn a_session_of_level_2_survives_a_connection_that_is_lost() {
        let sessions = IscsiSessions::default();
        let key = session(1).key;
        let (tsih, _) = sessions.enter(recoverable(), &new(0, 1), 7, fits).unwrap();
        // Another one may come in any case, to log it out (RFC 7143 6.3.4); not a third.
        sessions.join(&key, tsih, &new(1, 2), fits).unwrap();
        let third = sessions.check_join(&key, tsih, Cid(2), 4);
        assert_eq!(third, Err(LoginStatus::TOO_MANY_CONNECTIONS));
        let lost = sessions.lose(tsih, channel(1));
        assert_eq!((lost.tell, lost.terminate), (Some(channel(2)), Vec::new()));
        assert!(sessions.detach(tsih, channel(2), Cid(7)).is_empty());
        assert_eq!(sessions.detach(tsih, channel(2), Cid(0)), [channel(1)]);
        assert_eq!(sessions.detached(tsih, channel(1)).notify, [channel(2)]);
        let twice = sessions.detach(tsih, channel(2), Cid(0));
        assert!(twice.is_empty(), "it is logged out already");
        let left = sessions.leave(tsih, channel(1), false, None);
        assert!(left.terminate.is_empty() && left.ended.is_none());
        assert!(sessions.leave(tsih, channel(2), true, None).ended.is_some());
    }

    #[test]
    fn connections_that_are_kept_are_bounded_and_end_with_their_session() {
        let sessions = IscsiSessions::default();
        let key = session(1).key;
        let (tsih, _) = sessions.enter(recoverable(), &new(0, 0), 7, fits).unwrap();
        let most = MAX_KEPT as u64;
        for serial in 1..=most {
            let (session, old) = sessions.join(&key, tsih, &new(0, serial), fits).unwrap();
            assert_eq!(old, [channel(serial - 1)]);
            assert_eq!(Ending::of_reinstatement(&session.params), Ending::Detach);
            let left = sessions.detached(tsih, channel(serial - 1));
            assert_eq!(left.notify, [channel(serial)]);
            assert!(left.terminate.is_empty());
        }
        let lost = sessions.lose(tsih, channel(most));
        assert_eq!((lost.tell, lost.terminate), (None, vec![channel(0)]));
        let (_, old) = sessions.enter(recoverable(), &new(0, 50), 7, fits).unwrap();
        assert_eq!(old.len(), MAX_KEPT + 1);
    }
}
