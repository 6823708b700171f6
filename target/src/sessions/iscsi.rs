//! Sessions of iSCSI, over TCP and RDMA.
//!
//! A session may have several connections, on any workers: they share its numbers ([`Window`]). It
//! ends with the first of them that is lost; at error recovery level 2 with the last of them, those
//! that are kept for what they had under way included. A session that is replaced stays here until
//! its commands at the devices have ended, and the one that replaces it waits for that (RFC 7143
//! 6.3.5).

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use riser_scsi::iscsi::chap::Credentials;
use riser_scsi::iscsi::login::{Identity, SessionParams};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, Isid, Tsih};
use riser_scsi::nexus::{Nexus, NexusId};

use super::budget::{Bounds, Budget, Permit, counted_address};
use super::catalog::Catalog;
use super::guard::{self, Departure, Left, SessionGuard};
use super::recent::Recent;
use super::unconfirmed::{Unconfirmed, displaceable};
use super::units::UnitEntries;
use super::waits::Waits;
use crate::fabric::{ConnRef, KnownUnits, LunMap};
use crate::iscsi::{Ending, Window};

/// Connections of a session that are lost, and kept for what they had under way.
const MAX_KEPT: usize = 8;

/// Discovery sessions at once. They are no I_T nexuses and have a budget of their own: a host that
/// only lists targets, perhaps without authentication, keeps no other from its disks. At the bound
/// a new session replaces the oldest one of the address with most of them.
const DISCOVERIES: Bounds = Bounds {
    sessions: 64,
    per_address: 16,
};

/// The initiator port and the target of a session. An initiator may have several sessions to one
/// target, with an ISID each.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SessionKey {
    initiator: IscsiName,
    isid: Isid,
    /// None of a discovery session.
    target: Option<IscsiName>,
    /// Where a discovery session comes from. As a rule nothing has been proved in one, so none
    /// takes the place of another address's.
    address: Option<IpAddr>,
}

impl SessionKey {
    /// Returns the key of a session whose first connection comes from `address`.
    pub fn of(identity: &Identity, address: IpAddr) -> Self {
        let target = identity.target.as_ref().filter(|_| !identity.discovery);
        Self {
            initiator: identity.initiator.clone(),
            isid: identity.isid,
            target: target.cloned(),
            address: identity.discovery.then_some(address),
        }
    }
}

/// The session of a connection that has logged in, as its worker knows it.
#[derive(Debug)]
pub struct Membership {
    /// Name that the initiator has given in its login.
    pub initiator: IscsiName,
    /// Initiator part of the session's identifier.
    pub isid: Isid,
    /// CHAP user that it has proved to be.
    pub user: Option<String>,
    /// None in a discovery session.
    pub target: Option<IscsiName>,
    /// The handle of the session.
    pub tsih: Tsih,
    /// Number of the nexus; 0 in a discovery session.
    pub nexus: NexusId,
    /// The connection's part in the session, which it leaves with this.
    pub guard: SessionGuard,
}

/// A session that logs in.
#[derive(Debug)]
pub struct NewSession {
    /// Number of the nexus with its permit; `None` of a discovery session.
    pub nexus: Option<(NexusId, Permit)>,
    /// The units that it sees.
    pub luns: Arc<LunMap>,
    /// Parameters and numbers of the session.
    pub session: Session,
}

/// A session, without its connections.
#[derive(Clone, Debug)]
pub struct Session {
    /// The initiator port and the target.
    pub key: SessionKey,
    /// The address of its first connection. Others have the same rights at theirs.
    pub address: IpAddr,
    /// The name and the secret by which the initiator has proved its identity, if it had to.
    pub credentials: Option<Credentials>,
    /// Ports of the nexus; none of a discovery session, which has no units either.
    pub ports: Option<Nexus>,
    /// Parameters that hold for all its connections.
    pub params: SessionParams,
    /// Numbers that its connections share.
    pub window: Arc<Window>,
}

/// A connection that has entered its session.
#[derive(Debug)]
pub struct SessionGrant {
    /// The handle of the session.
    pub tsih: Tsih,
    /// Number of the nexus; 0 of a discovery session.
    pub nexus: NexusId,
    /// The units that it sees.
    pub luns: Arc<LunMap>,
    /// Parameters and numbers of the session.
    pub session: Session,
    /// Connections that this one replaces.
    pub replaced: Vec<ConnRef>,
    /// It waits for these, or for others that were replaced before.
    pub waits: bool,
}

/// States of a connection in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionStanding {
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
    channel: ConnRef,
    address: IpAddr,
    standing: ConnectionStanding,
}

impl Connection {
    fn new(candidate: &Candidate) -> Self {
        Self {
            cid: candidate.cid,
            channel: candidate.channel,
            address: candidate.address,
            standing: ConnectionStanding::Up,
        }
    }
}

/// A connection that is to become one of a session.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its number in the session.
    pub cid: Cid,
    /// Channel that carries it, on any worker.
    pub channel: ConnRef,
    /// Address that the connection comes from.
    pub address: IpAddr,
    /// Commands that it can hold.
    pub commands: u16,
}

#[derive(Debug)]
struct Entry {
    session: Session,
    units: UnitEntries,
    connections: Vec<Connection>,
    /// Number of the login, by which older sessions are known.
    number: u64,
    /// Released with the entry. `None` for a discovery session that another one replaces.
    permit: Option<Permit>,
}

impl Entry {
    fn set_standing(&mut self, channel: ConnRef, standing: ConnectionStanding) {
        let mut connections = self.connections.iter_mut();
        if let Some(connection) = connections.find(|c| c.channel == channel) {
            connection.standing = standing;
        }
    }

    fn channels(&self) -> impl Iterator<Item = ConnRef> + '_ {
        self.connections.iter().map(|c| c.channel)
    }

    /// Grants a connection of the session that replaces these.
    fn grant(&self, tsih: Tsih, replaced: Vec<ConnRef>, waits: bool) -> SessionGrant {
        SessionGrant {
            tsih,
            nexus: self.units.nexus(),
            luns: Arc::clone(self.units.luns()),
            session: self.session.clone(),
            replaced,
            waits,
        }
    }

    /// Returns the oldest of the connections that are kept without being up, beyond the bound.
    fn surplus(&self) -> Vec<ConnRef> {
        let kept = self
            .connections
            .iter()
            .filter(|c| c.standing != ConnectionStanding::Up);
        let surplus = kept.clone().count().saturating_sub(MAX_KEPT);
        kept.take(surplus).map(|c| c.channel).collect()
    }
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Tsih, Entry>,
    current: HashMap<SessionKey, Tsih>,
    waits: Waits,
    discoveries: Budget,
    /// Number of the last login of a session.
    logins: u64,
    /// Sessions that have ended without a logout of the initiator's own.
    recent: Recent<Owner>,
}

/// The owner of a session: its key, its address, and the name that was proved. A host that knows
/// only the key must not hold up the owner.
type Owner = (SessionKey, IpAddr, Option<String>);

/// Consequences of the loss of a connection whose commands are kept.
#[derive(Debug, Default)]
pub struct Lost {
    /// The channel that reports the loss to the initiator.
    pub reporter: Option<ConnRef>,
    /// Channels that are kept no longer.
    pub terminate: Vec<ConnRef>,
}

/// Sessions of iSCSI at all workers. There are no more than permits of the budget.
#[derive(Clone, Debug, Default)]
pub struct IscsiSessions(Arc<Mutex<Table>>);

/// A session of iSCSI, for the guards of its connections.
struct Handle {
    sessions: IscsiSessions,
    tsih: Tsih,
}

impl guard::Session for Handle {
    fn leave(&self, channel: ConnRef, departure: Departure) -> Left {
        self.sessions.leave(self.tsih, channel, departure)
    }
}

impl IscsiSessions {
    /// Checks that a connection that can hold `commands` commands may join a session.
    ///
    /// # Errors
    /// The status with which its login is refused.
    pub fn check_join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
        commands: u16,
    ) -> Result<(), LoginStatus> {
        self.lock().check_room(key, tsih, cid, commands)
    }

    /// Returns the address of the session that another one with this key replaces.
    pub fn address_of(&self, key: &SessionKey) -> Option<IpAddr> {
        let table = self.lock();
        let entry = table.entries.get(table.current.get(key)?)?;
        Some(entry.session.address)
    }

    /// Returns the units that the initiator of a session that logs in takes its LUNs for: from the
    /// session that it replaces, or that has just ended.
    pub fn known_units(
        &self,
        key: &SessionKey,
        address: IpAddr,
        chap_name: Option<&str>,
        now: Instant,
    ) -> Option<KnownUnits> {
        let mut table = self.lock();
        let there = table.current.get(key);
        if let Some(entry) = there.and_then(|tsih| table.entries.get(tsih)) {
            return Some(entry.units.luns().known_units());
        }
        let owner = (key.clone(), address, chap_name.map(str::to_owned));
        table.recent.find(&owner, now)
    }

    /// Enters a session, if `check` finds nothing against it and against its replacing the one that is
    /// there (RFC 7143 6.3.5). The handle is `random`, or the next one that is free: a number that can be
    /// guessed would help to join another initiator's session.
    ///
    /// # Errors
    /// The status with which the login is refused; nothing was entered, and the permit is given
    /// back.
    pub fn enter(
        &self,
        new: NewSession,
        first: &Candidate,
        random: u16,
        check: impl FnOnce(Option<&Session>) -> Result<(), LoginStatus>,
    ) -> Result<(SessionGrant, SessionGuard), LoginStatus> {
        let NewSession {
            nexus,
            luns,
            session,
        } = new;
        let mut table = self.lock();
        // Under the lock, so that the session that was checked is the one that is replaced, and
        // `change` logs the new one out if its initiator loses its rights after the check.
        let there = table.current.get(&session.key);
        check(there.map(|tsih| &table.entries[tsih].session))?;
        let tsih = table
            .free_handle(random)
            .ok_or(LoginStatus::OUT_OF_RESOURCES)?;
        let (nexus, permit, displaced) = match nexus {
            Some((nexus, permit)) => (nexus, permit, Vec::new()),
            None => {
                let admitted = table.admit_discovery(session.address);
                let (permit, displaced) = admitted.ok_or(LoginStatus::OUT_OF_RESOURCES)?;
                (NexusId(0), permit, displaced)
            }
        };
        // Nothing fails from here on.
        let old = table.current.insert(session.key.clone(), tsih);
        let old = old.and_then(|tsih| table.entries.get(&tsih));
        let mut replaced: Vec<_> = old.map_or_else(Vec::new, |old| old.channels().collect());
        replaced.extend(displaced);
        // Sessions that were replaced before may still have commands at a device, while the one
        // that waited for them has gone: its initiator has given up, and now logs in again.
        let sessions = table.entries.values();
        let sessions = sessions.filter(|entry| entry.session.key == session.key);
        let (predecessors, others): (Vec<_>, Vec<_>) = sessions
            .map(|entry| (entry.units.nexus(), entry.channels().collect::<Vec<_>>()))
            .unzip();
        let others = others.concat();
        table.waits.wait_for(&others, first.channel);
        let waits = !others.is_empty();
        let ports = session.ports.as_ref();
        let mut units = UnitEntries::enter(nexus, ports, luns, waits);
        units.succeed(predecessors);
        table.logins += 1;
        let entry = Entry {
            session,
            units,
            connections: vec![Connection::new(first)],
            number: table.logins,
            permit: Some(permit),
        };
        let grant = entry.grant(tsih, replaced, waits);
        table.entries.insert(tsih, entry);
        Ok((grant, self.guard(tsih, first.channel)))
    }

    /// Enters a connection into its session if `check` finds nothing against it. It replaces the
    /// one with its number (RFC 7143 6.3.4).
    ///
    /// # Errors
    /// The status with which its login is refused; nothing was entered.
    pub fn join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        new: &Candidate,
        check: impl FnOnce(&Session, &LunMap) -> Result<(), LoginStatus>,
    ) -> Result<(SessionGrant, SessionGuard), LoginStatus> {
        let mut table = self.lock();
        let entry = table.entry_of(key, tsih)?;
        check(&entry.session, entry.units.luns())?;
        // As in `check_join`, since when others may have joined: a login takes several round
        // trips.
        table.check_room(key, tsih, new.cid, new.commands)?;
        let entry = table.entries.get_mut(&tsih).expect("just found");
        let same = |c: &&Connection| c.cid == new.cid && c.standing != ConnectionStanding::Detached;
        let old = entry.connections.iter().filter(same);
        let replaced: Vec<_> = old.map(|c| c.channel).collect();
        entry.connections.push(Connection::new(new));
        let waits = !replaced.is_empty();
        let grant = entry.grant(tsih, replaced, waits);
        let ending = Ending::of_reinstatement(&grant.session.params);
        table.wait_for_end(&grant.replaced, new.channel, ending);
        Ok((grant, self.guard(tsih, new.channel)))
    }

    /// Returns the other connections of a session, which are to end; `channel` waits for them.
    pub fn end_others(&self, tsih: Tsih, channel: ConnRef) -> Vec<ConnRef> {
        self.wait_for_others(tsih, channel, Ending::Terminate, |_| true)
    }

    /// Returns the other connections of a session with a number, which are to end in this way;
    /// `channel` waits for that.
    pub fn end_other(
        &self,
        tsih: Tsih,
        channel: ConnRef,
        cid: Cid,
        ending: Ending,
    ) -> Vec<ConnRef> {
        self.wait_for_others(tsih, channel, ending, |c| {
            let is_over = ending == Ending::Detach && c.standing == ConnectionStanding::Detached;
            c.cid == cid && !is_over
        })
    }

    fn wait_for_others(
        &self,
        tsih: Tsih,
        channel: ConnRef,
        ending: Ending,
        is_meant: impl Fn(&Connection) -> bool,
    ) -> Vec<ConnRef> {
        let mut table = self.lock();
        let Some(entry) = table.entries.get(&tsih) else {
            return Vec::new();
        };
        let others = entry.connections.iter().filter(|c| c.channel != channel);
        let found: Vec<_> = others.filter(|c| is_meant(c)).map(|c| c.channel).collect();
        table.wait_for_end(&found, channel, ending);
        found
    }

    /// A connection no longer waits for replaced sessions. Units refuse commands of its session
    /// as long as they have commands of those.
    pub fn stop_waiting(&self, channel: ConnRef) {
        self.lock().waits.forgo(&[channel]);
    }

    /// Whether a connection waits for others.
    pub fn is_waiting(&self, channel: ConnRef) -> bool {
        self.lock().waits.is_waiting(channel)
    }

    /// A connection is lost, and what it had under way is kept.
    pub fn lose(&self, tsih: Tsih, channel: ConnRef) -> Lost {
        let mut table = self.lock();
        let Some(entry) = table.entries.get_mut(&tsih) else {
            return Lost::default();
        };
        entry.set_standing(channel, ConnectionStanding::Lost);
        let mut up = entry
            .connections
            .iter()
            .filter(|c| c.standing == ConnectionStanding::Up);
        Lost {
            reporter: up.next().map(|c| c.channel),
            terminate: entry.surplus(),
        }
    }

    /// Others of its session may have what a connection had under way. A session that replaces
    /// this one waits on: what the connection has at a device would overtake that one's writes.
    pub fn detached(&self, tsih: Tsih, channel: ConnRef) -> Left {
        let mut table = self.lock();
        let Some(entry) = table.entries.get_mut(&tsih) else {
            return Left::default();
        };
        entry.set_standing(channel, ConnectionStanding::Detached);
        let terminate = entry.surplus();
        let notify = table.waits.free(channel);
        Left { notify, terminate }
    }

    /// A connection is gone, and nothing of it is left; with the last one its session ends.
    fn leave(&self, tsih: Tsih, channel: ConnRef, departure: Departure) -> Left {
        let Departure { logged_out, again } = departure;
        let mut table = self.lock();
        // Before the wait ends below. A connection that another one has replaced or logged out
        // takes its session with it as little as one that has logged out by itself.
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
            // Below level 2 nothing makes up for the commands of a lost connection, so the session
            // ends.
            if !logged_out && !was_expected && !survives {
                left.terminate.extend(entry.channels());
            }
            return left;
        }
        let entry = table.entries.remove(&tsih).expect("just found");
        // A session that was replaced is not the current one: the new one knows the units then.
        if table.current.get(&entry.session.key) == Some(&tsih) {
            table.current.remove(&entry.session.key);
            if !entry.session.is_discovery() {
                let session = &entry.session;
                let owner = (
                    session.key.clone(),
                    session.address,
                    session.chap_name().map(str::to_owned),
                );
                match again {
                    Some(now) => {
                        let known = entry.units.luns().known_units();
                        table.recent.keep(owner, known, now);
                    }
                    None => table.recent.forget(&owner),
                }
            }
        }
        left
    }

    /// Returns the units that a session sees at present.
    pub fn luns(&self, tsih: Tsih) -> Option<Arc<LunMap>> {
        let table = self.lock();
        let entry = table.entries.get(&tsih)?;
        Some(Arc::clone(entry.units.luns()))
    }

    /// Another catalog is served: sessions whose units are others now are notified. Returns the
    /// connections to log out, those of initiators that may not log in any longer.
    pub fn change(&self, catalog: &Catalog) -> Vec<ConnRef> {
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
            let proved = entry.session.credentials.as_ref();
            // The credentials may have been revoked, or the secret changed.
            let is_proved =
                target.is_some_and(|t| t.keeps_session(&key.initiator, address, proved));
            // As at its login, a connection needs the rights that hold at the address of the first
            // one.
            let may_stay = |c: &&Connection| {
                is_proved && luns.is_some() && rule_at(c.address) == rule_at(address)
            };
            let others = entry.connections.iter().filter(|c| !may_stay(c));
            ended.extend(others.map(|c| c.channel));
            entry.units.change(luns.unwrap_or_default(), ports);
        }
        ended
    }

    /// All workers have followed the last [`IscsiSessions::change`].
    pub fn settle(&self) {
        let mut table = self.lock();
        let entries = table.entries.values_mut();
        entries.for_each(|entry| entry.units.settle());
    }

    fn guard(&self, tsih: Tsih, channel: ConnRef) -> SessionGuard {
        let sessions = self.clone();
        SessionGuard::new(Handle { sessions, tsih }, channel)
    }

    /// A panic elsewhere cannot have left the table half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// The name under which the initiator has proved its identity.
    #[must_use]
    pub fn chap_name(&self) -> Option<&str> {
        self.credentials.as_ref().map(|proved| proved.name.as_str())
    }

    fn is_discovery(&self) -> bool {
        self.params.discovery
    }
}

impl Table {
    /// A connection waits for the end of others.
    fn wait_for_end(&mut self, others: &[ConnRef], who: ConnRef, ending: Ending) {
        match ending {
            Ending::Terminate => self.waits.wait_for(others, who),
            Ending::Detach => self.waits.wait_until_free(others, who),
        }
    }

    /// Returns a permit for a discovery session, and the channels of the session that it replaces, if
    /// any.
    fn admit_discovery(&mut self, address: IpAddr) -> Option<(Permit, Vec<ConnRef>)> {
        let acquire = |table: &Self| table.discoveries.acquire(DISCOVERIES, address, None);
        if let Some(permit) = acquire(self) {
            return Some((permit, Vec::new()));
        }
        let entries = self.entries.iter();
        let mut all: Vec<_> = entries
            .filter(|(_, entry)| entry.session.is_discovery() && entry.permit.is_some())
            .map(|(tsih, entry)| {
                let (what, address) = (*tsih, entry.session.address);
                (entry.number, Unconfirmed { address, what })
            })
            .collect();
        all.sort_by_key(|(number, _)| *number);
        let mut all: Vec<_> = all.into_iter().map(|(_, session)| session).collect();
        let is_from_there = |session: &Unconfirmed<Tsih>| {
            counted_address(session.address) == counted_address(address)
        };
        // An address with too many sessions replaces one of them.
        let there = all.iter().filter(|session| is_from_there(session)).count();
        if there >= DISCOVERIES.per_address as usize {
            all.retain(is_from_there);
        }
        let oldest = displaceable(&all)?;
        let entry = self.entries.get_mut(&oldest).expect("one of the table");
        entry.permit = None;
        let channels = entry.channels().collect();
        Some((acquire(self)?, channels))
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
        // The initiator may send the whole window of the session on any of its connections. It was
        // fixed by an earlier configuration, perhaps for more commands than this one can hold.
        if entry.session.window.commands() > commands {
            return Err(LoginStatus::OUT_OF_RESOURCES);
        }
        let is_other = |c: &&Connection| c.cid != cid && c.standing == ConnectionStanding::Up;
        let others = entry.connections.iter().filter(is_other).count();
        let params = &entry.session.params;
        // At level 2 there may be a second one in any case, to log the first one out (RFC 7143
        // 6.3.4).
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

    fn channel(serial: u64) -> ConnRef {
        ConnRef { worker: 0, serial }
    }

    fn new(cid: u16, serial: u64) -> Candidate {
        Candidate {
            cid: Cid(cid),
            channel: channel(serial),
            address: HERE,
            commands: 4,
        }
    }

    fn fits(_: Option<&Session>) -> Result<(), LoginStatus> {
        Ok(())
    }

    fn joins(_: &Session, _: &LunMap) -> Result<(), LoginStatus> {
        Ok(())
    }

    type Granted = Result<(SessionGrant, SessionGuard), LoginStatus>;

    fn entered(granted: Granted) -> (Tsih, SessionGuard, Vec<ConnRef>) {
        let (grant, guard) = granted.unwrap();
        (grant.tsih, guard, grant.replaced)
    }

    fn joined(granted: Granted) -> (SessionGuard, Vec<ConnRef>) {
        let (grant, guard) = granted.unwrap();
        (guard, grant.replaced)
    }

    /// Leaves without a logout.
    fn lose(guard: SessionGuard) -> Left {
        guard.leave(Departure::default())
    }

    fn log_out(guard: SessionGuard) -> Left {
        guard.leave(Departure {
            logged_out: true,
            again: None,
        })
    }

    fn is_empty(sessions: &IscsiSessions) -> bool {
        let table = sessions.lock();
        table.entries.is_empty() && table.current.is_empty()
    }

    /// Whichever way a connection ends, nothing of its session is left.
    #[test]
    fn a_connection_leaves_nothing_behind() {
        type Way = fn(&IscsiSessions, Tsih, SessionGuard);
        let ways: [(&str, Way); 4] = [
            ("the connection is lost", |sessions, tsih, guard| {
                sessions.lose(tsih, channel(1));
                let again = Some(Instant::now());
                let logged_out = false;
                let left = guard.leave(Departure { logged_out, again });
                assert!(left.notify.is_empty() && left.terminate.is_empty());
            }),
            ("its commands go to others", |sessions, tsih, guard| {
                let _ = sessions.detached(tsih, channel(1));
                let _ = lose(guard);
            }),
            ("the initiator logs out", |_, _, guard| {
                let _ = log_out(guard);
            }),
            ("another login takes its place", |sessions, _, guard| {
                let budget = Budget::default();
                let newer = sessions.enter(recoverable(&budget), &new(0, 2), 9, fits);
                let (_, newer, replaced) = entered(newer);
                assert_eq!(replaced, [channel(1)]);
                assert_eq!(lose(guard).notify, [channel(2)]);
                let _ = lose(newer);
                assert_eq!(budget.sessions(), 0);
            }),
        ];
        for (way, end) in ways {
            let (sessions, budget) = (IscsiSessions::default(), Budget::default());
            let (tsih, guard, _) =
                entered(sessions.enter(recoverable(&budget), &new(0, 1), 7, fits));
            assert_eq!(budget.sessions(), 1, "{way}");
            end(&sessions, tsih, guard);
            assert_eq!(budget.sessions(), 0, "{way}");
            assert!(is_empty(&sessions), "{way}");
        }
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
            hello_required: None,
            protocol_level: 1,
        }
    }

    fn session(isid: u8) -> NewSession {
        counted(&Budget::default(), isid)
    }

    /// A session with a permit of a budget.
    fn counted(budget: &Budget, isid: u8) -> NewSession {
        let bounds = Bounds {
            sessions: 100,
            per_address: 100,
        };
        let permit = budget.acquire(bounds, HERE, None).unwrap();
        NewSession {
            nexus: Some((NexusId(1), permit)),
            luns: Arc::default(),
            session: bare(isid),
        }
    }

    fn bare(isid: u8) -> Session {
        Session {
            key: SessionKey {
                initiator: IscsiName::new("iqn.2026-01.a:i").unwrap(),
                isid: Isid([isid; 6]),
                target: None,
                address: None,
            },
            address: HERE,
            credentials: None,
            ports: None,
            params: params(2),
            window: Arc::new(Window::new(4, CmdSn(1), true)),
        }
    }

    #[test]
    fn a_session_that_takes_another_s_place_waits_for_its_end() {
        let sessions = IscsiSessions::default();
        let (first, one, old) = entered(sessions.enter(session(1), &new(0, 1), 7, fits));
        assert!(old.is_empty());
        let (_, two, old) = entered(sessions.enter(session(1), &new(0, 2), 7, fits));
        assert_eq!(old, [channel(1)]);
        // A third one comes while the second still waits, whose client gives up.
        let (third, _three, old) = entered(sessions.enter(session(1), &new(0, 3), 7, fits));
        assert_eq!(old, [channel(2)]);
        let left = lose(two);
        assert!(left.notify.is_empty(), "the first is still there");
        let left = lose(one);
        assert_eq!(left.notify, [channel(3)]);
        assert!(left.terminate.is_empty());
        let key = bare(1).key;
        assert_eq!(sessions.check_join(&key, third, Cid(1), 4), Ok(()));
        let stranger = sessions.check_join(&key, first, Cid(1), 4);
        assert_eq!(stranger, Err(LoginStatus::NO_SUCH_SESSION));
    }

    #[test]
    fn a_session_waits_for_those_that_one_before_it_has_waited_for_in_vain() {
        let sessions = IscsiSessions::default();
        let (_, first, _) = entered(sessions.enter(session(1), &new(0, 1), 7, fits));
        let (_, second, _) = entered(sessions.enter(session(1), &new(0, 2), 7, fits));
        // A device still has commands of the first when the second has waited for too long.
        let _ = lose(second);
        let (other, _other) = sessions.enter(session(2), &new(0, 3), 7, fits).unwrap();
        assert!(!other.waits, "of another initiator port");
        let (third, _third) = sessions.enter(session(1), &new(0, 4), 7, fits).unwrap();
        assert!(third.waits);
        assert!(third.replaced.is_empty(), "they are ending already");
        assert_eq!(lose(first).notify, [channel(4)]);
        // The one that has waited is the session of the port.
        let (fourth, _fourth) = sessions.enter(session(1), &new(0, 5), 7, fits).unwrap();
        assert_eq!(fourth.replaced, [channel(4)]);
    }

    #[test]
    fn a_session_that_may_not_take_another_s_place_leaves_it_alone() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let (first, _guard, _) = entered(sessions.enter(counted(&budget, 1), &new(0, 1), 7, fits));
        let refuse = |there: Option<&Session>| match there {
            Some(_) => Err(LoginStatus::AUTHORIZATION_FAILURE),
            None => Ok(()),
        };
        let refused = sessions.enter(counted(&budget, 1), &new(0, 2), 7, refuse);
        assert_eq!(refused.unwrap_err(), LoginStatus::AUTHORIZATION_FAILURE);
        assert_eq!(budget.sessions(), 1, "its permit is given back");
        let key = bare(1).key;
        assert_eq!(sessions.check_join(&key, first, Cid(1), 4), Ok(()));
        // Another port may log in.
        drop(sessions.enter(session(2), &new(0, 3), 7, refuse).unwrap());
    }

    /// Hosts without a login cannot keep other hosts from discovery: the oldest session of the address
    /// with most of them ends.
    #[test]
    fn oldest_discovery_session_gives_way() {
        let sessions = IscsiSessions::default();
        let mut serial = 0;
        let mut enter = |host: u8| {
            serial += 1;
            let mut session = bare(0);
            session.key.isid = Isid([0, 0, 0, 0, host, serial as u8]);
            session.address = IpAddr::from([10, 0, 0, host]);
            session.params.discovery = true;
            let new_session = NewSession {
                nexus: None,
                luns: Arc::default(),
                session,
            };
            let (_, guard, replaced) =
                entered(sessions.enter(new_session, &new(0, serial), 7, fits));
            (guard, replaced)
        };
        let mut held = Vec::new();
        for _ in 0..DISCOVERIES.per_address {
            let (guard, replaced) = enter(1);
            assert_eq!(replaced, []);
            held.push(guard);
        }
        let (guard, replaced) = enter(1);
        assert_eq!(replaced, [channel(1)], "the oldest of this address");
        held.push(guard);
        for host in 2..=(DISCOVERIES.sessions / DISCOVERIES.per_address) as u8 {
            for _ in 0..DISCOVERIES.per_address {
                held.push(enter(host).0);
            }
        }
        let (guard, replaced) = enter(99);
        assert_eq!(replaced, [channel(2)], "the oldest of all");
        // A replaced session ends no other one.
        let left = lose(held.remove(0));
        assert!(left.notify.is_empty() && left.terminate.is_empty());
        let left = log_out(guard);
        assert!(left.notify.is_empty() && left.terminate.is_empty());
        let (_guard, replaced) = enter(99);
        assert_eq!(replaced, [], "room of the one that logged out");
    }

    #[test]
    fn connections_join_up_to_the_limit_and_replace_each_other() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) = entered(sessions.enter(counted(&budget, 1), &new(0, 1), 7, fits));
        let (two, old) = joined(sessions.join(&key, tsih, &new(1, 2), joins));
        assert!(old.is_empty());
        let third = sessions.join(&key, tsih, &new(2, 3), joins);
        assert_eq!(third.unwrap_err(), LoginStatus::TOO_MANY_CONNECTIONS);
        let small = sessions.join(
            &key,
            tsih,
            &Candidate {
                commands: 3,
                ..new(1, 3)
            },
            joins,
        );
        assert_eq!(small.unwrap_err(), LoginStatus::OUT_OF_RESOURCES);
        let (four, old) = joined(sessions.join(&key, tsih, &new(1, 4), joins));
        assert_eq!(old, [channel(2)]);
        let left = lose(two);
        assert_eq!(left.notify, [channel(4)]);
        assert!(left.terminate.is_empty(), "its place was taken");
        // The session does not survive the loss of a connection.
        let left = lose(one);
        assert_eq!(left.terminate, [channel(4)]);
        assert_eq!(budget.sessions(), 1);
        let _ = lose(four);
        assert_eq!(budget.sessions(), 0);
    }

    #[test]
    fn handles_are_random_and_free() {
        let sessions = IscsiSessions::default();
        let mut guards = Vec::new();
        let mut enter = |isid, random| {
            let serial = guards.len() as u64;
            let entered = sessions.enter(session(isid), &new(0, serial), random, fits);
            let (grant, guard) = entered.unwrap();
            guards.push(guard);
            grant.tsih
        };
        assert_eq!(enter(1, 0x5a5a), Tsih(0x5a5a));
        assert_eq!(enter(2, 0x5a5a), Tsih(0x5a5b));
        assert_eq!(enter(3, u16::MAX), Tsih(u16::MAX));
        assert_eq!(enter(4, u16::MAX), Tsih(1), "zero stands for a new session");
    }

    #[test]
    fn a_logout_of_the_session_ends_the_others() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) = entered(sessions.enter(counted(&budget, 1), &new(0, 1), 7, fits));
        let (two, _) = joined(sessions.join(&key, tsih, &new(1, 2), joins));
        let none = sessions.end_other(tsih, channel(1), Cid(7), Ending::Terminate);
        assert!(none.is_empty());
        assert!(!sessions.is_waiting(channel(1)));
        assert_eq!(sessions.end_others(tsih, channel(1)), [channel(2)]);
        assert!(sessions.is_waiting(channel(1)));
        let left = lose(two);
        assert_eq!(left.notify, [channel(1)]);
        assert_eq!(budget.sessions(), 1);
        let _ = log_out(one);
        assert_eq!(budget.sessions(), 0);
    }

    /// What it has at a device must not overtake what follows the answer.
    #[test]
    fn a_logout_of_the_session_waits_on_for_a_connection_that_is_detached_meanwhile() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) = entered(sessions.enter(recoverable(&budget), &new(0, 1), 7, fits));
        let (two, _) = joined(sessions.join(&key, tsih, &new(1, 2), joins));
        sessions.lose(tsih, channel(1));
        let removed = sessions.end_other(tsih, channel(2), Cid(0), Ending::Detach);
        assert_eq!(removed, [channel(1)]);
        assert_eq!(sessions.end_others(tsih, channel(2)), [channel(1)]);
        let detached = sessions.detached(tsih, channel(1));
        assert!(detached.notify.is_empty(), "its commands are there still");
        assert_eq!(lose(one).notify, [channel(2)]);
        let _ = log_out(two);
    }

    /// A connection may become free for others of its session before it hears that a newer login has
    /// taken that session's place. What it has at a device must not overtake the new session.
    #[test]
    fn a_newer_session_waits_on_for_a_connection_that_is_detached_meanwhile() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let (tsih, old, _) = entered(sessions.enter(recoverable(&budget), &new(0, 1), 7, fits));
        let (newer, _newer) = sessions
            .enter(recoverable(&budget), &new(0, 2), 9, fits)
            .unwrap();
        assert!(newer.waits);
        assert_eq!(newer.replaced, [channel(1)]);
        let detached = sessions.detached(tsih, channel(1));
        assert!(detached.notify.is_empty(), "its commands are there still");
        assert_eq!(lose(old).notify, [channel(2)]);
    }

    /// A session at error recovery level 2, of one connection at most.
    fn recoverable(budget: &Budget) -> NewSession {
        let mut new = counted(budget, 1);
        new.session.params.error_recovery_level = 2;
        new.session.params.max_connections = 1;
        new
    }

    #[test]
    fn a_session_of_level_2_survives_a_connection_that_is_lost() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) = entered(sessions.enter(recoverable(&budget), &new(0, 1), 7, fits));
        // Another one may come in any case, to log it out (RFC 7143 6.3.4); not a third.
        let (two, _) = joined(sessions.join(&key, tsih, &new(1, 2), joins));
        let third = sessions.check_join(&key, tsih, Cid(2), 4);
        assert_eq!(third, Err(LoginStatus::TOO_MANY_CONNECTIONS));
        let lost = sessions.lose(tsih, channel(1));
        assert_eq!(
            (lost.reporter, lost.terminate),
            (Some(channel(2)), Vec::new())
        );
        let detach = |cid| sessions.end_other(tsih, channel(2), Cid(cid), Ending::Detach);
        assert!(detach(7).is_empty());
        assert_eq!(detach(0), [channel(1)]);
        assert_eq!(sessions.detached(tsih, channel(1)).notify, [channel(2)]);
        assert!(detach(0).is_empty(), "it is logged out already");
        let left = lose(one);
        assert!(left.terminate.is_empty() && budget.sessions() == 1);
        let _ = log_out(two);
        assert_eq!(budget.sessions(), 0);
    }

    #[test]
    fn connections_that_are_kept_are_bounded_and_end_with_their_session() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, first, _) = entered(sessions.enter(recoverable(&budget), &new(0, 0), 7, fits));
        let most = MAX_KEPT as u64;
        let mut guards = vec![first];
        for serial in 1..=most {
            let (grant, guard) = sessions.join(&key, tsih, &new(0, serial), joins).unwrap();
            guards.push(guard);
            assert_eq!(grant.replaced, [channel(serial - 1)]);
            let ending = Ending::of_reinstatement(&grant.session.params);
            assert_eq!(ending, Ending::Detach);
            let left = sessions.detached(tsih, channel(serial - 1));
            assert_eq!(left.notify, [channel(serial)]);
            assert!(left.terminate.is_empty());
        }
        let lost = sessions.lose(tsih, channel(most));
        assert_eq!((lost.reporter, lost.terminate), (None, vec![channel(0)]));
        let (_, _guard, old) = entered(sessions.enter(recoverable(&budget), &new(0, 50), 7, fits));
        assert_eq!(old.len(), MAX_KEPT + 1);
    }
}
