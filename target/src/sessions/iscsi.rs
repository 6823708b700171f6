//! iSCSI sessions, over TCP and RDMA.
//!
//! A session can have multiple connections on any workers, which share its sequence numbers
//! ([`Window`]). It is closed when any connection is lost, or at error recovery level 2, with the
//! last connection, including lost connections whose commands are kept. A replaced session is kept
//! here until its commands at devices have completed, and the new session waits for it (RFC 7143
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

/// Maximum number of lost connections per session whose commands are kept.
const MAX_KEPT: usize = 8;

/// Limits for discovery sessions. They are not I_T nexuses and have a separate budget, so that a
/// host which only lists targets, perhaps without authentication, cannot prevent other hosts from
/// using their disks. If a limit is reached, a new session replaces the oldest session from the
/// address with the most sessions.
const DISCOVERIES: Bounds = Bounds {
    sessions: 64,
    per_address: 16,
};

/// The initiator port and the target of a session. An initiator can have multiple sessions with a
/// target, using different ISIDs.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SessionKey {
    initiator: IscsiName,
    isid: Isid,
    /// `None` for a discovery session.
    target: Option<IscsiName>,
    /// Source address of a discovery session. These sessions are usually not authenticated, so they
    /// must not replace a session from another address.
    address: Option<IpAddr>,
}

impl SessionKey {
    /// Returns the key for a session whose first connection is from `address`.
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

/// The session of a connection after its login, for the worker of the connection.
#[derive(Debug)]
pub struct Membership {
    /// Initiator name from the login.
    pub initiator: IscsiName,
    /// Initiator part of the session identifier.
    pub isid: Isid,
    /// Authenticated CHAP user.
    pub user: Option<String>,
    /// `None` for a discovery session.
    pub target: Option<IscsiName>,
    /// Session handle.
    pub tsih: Tsih,
    /// Nexus number, or 0 for a discovery session.
    pub nexus: NexusId,
    /// Membership of the connection, which is passed to `remove_channel` when it is closed.
    pub guard: SessionGuard,
}

/// A session to be added.
#[derive(Debug)]
pub struct NewSession {
    /// Nexus number and permit. `None` for a discovery session.
    pub nexus: Option<(NexusId, Permit)>,
    /// Visible units.
    pub luns: Arc<LunMap>,
    /// Session parameters and sequence numbers.
    pub session: Session,
}

/// A session without its connections.
#[derive(Clone, Debug)]
pub struct Session {
    /// The initiator port and the target.
    pub key: SessionKey,
    /// Address of the first connection. Other connections must have the same access from their
    /// addresses.
    pub address: IpAddr,
    /// Name and secret used by the initiator for authentication, if required.
    pub credentials: Option<Credentials>,
    /// Ports of the nexus. `None` for a discovery session, which does not have any units either.
    pub ports: Option<Nexus>,
    /// Parameters of all connections.
    pub params: SessionParams,
    /// Sequence numbers shared by all connections.
    pub window: Arc<Window>,
}

/// A connection that was added to its session.
#[derive(Debug)]
pub struct SessionGrant {
    /// Session handle.
    pub tsih: Tsih,
    /// Nexus number, or 0 for a discovery session.
    pub nexus: NexusId,
    /// Visible units.
    pub luns: Arc<LunMap>,
    /// Session parameters and sequence numbers.
    pub session: Session,
    /// Connections replaced by this connection.
    pub replaced: Vec<ConnRef>,
    /// True if it has to wait for these connections, or for connections replaced earlier.
    pub waits: bool,
}

/// State of a connection in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionStanding {
    /// Up: no loss of the connection was detected.
    Up,
    /// Lost, but not logged out.
    Lost,
    /// Logged out. Its commands are kept.
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

/// A connection to be added to a session.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Connection ID.
    pub cid: Cid,
    /// Channel of the connection, on any worker.
    pub channel: ConnRef,
    /// Source address of the connection.
    pub address: IpAddr,
    /// Maximum number of commands supported by the connection.
    pub commands: u16,
}

#[derive(Debug)]
struct Entry {
    session: Session,
    units: UnitEntries,
    connections: Vec<Connection>,
    /// Login number, used to sort sessions by age.
    number: u64,
    /// Released with the entry. `None` for a discovery session that was replaced.
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

    /// Returns the grant for a connection that replaces these connections.
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

    /// If too many connections are kept without being up, returns the oldest of them.
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
    /// Number of the last login.
    logins: u64,
    /// Sessions that were closed without a logout by the initiator.
    recent: Recent<Owner>,
}

/// The owner of a session: key, address and authenticated name. A host that only knows the key must
/// not be able to block the owner.
type Owner = (SessionKey, IpAddr, Option<String>);

/// The result of losing a connection whose commands are kept.
#[derive(Debug, Default)]
pub struct Lost {
    /// The channel that will report the loss to the initiator.
    pub reporter: Option<ConnRef>,
    /// Channels whose commands are no longer kept.
    pub terminate: Vec<ConnRef>,
}

/// The iSCSI sessions of all workers. Their number is limited by the permits in the budget.
#[derive(Clone, Debug, Default)]
pub struct IscsiSessions(Arc<Mutex<Table>>);

/// An iSCSI session, used by the guards of its connections.
struct Handle {
    sessions: IscsiSessions,
    tsih: Tsih,
}

impl guard::Session for Handle {
    fn remove_channel(&self, channel: ConnRef, departure: Departure) -> Left {
        self.sessions.remove_channel(self.tsih, channel, departure)
    }
}

impl IscsiSessions {
    /// Checks whether a connection that supports `commands` commands can join a session.
    ///
    /// # Errors
    /// Returns the status for rejecting the login.
    pub fn check_join(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
        commands: u16,
    ) -> Result<(), LoginStatus> {
        self.lock().check_room(key, tsih, cid, commands)
    }

    /// Returns the address of the session that would be replaced by a session with this key.
    pub fn address_of(&self, key: &SessionKey) -> Option<IpAddr> {
        let table = self.lock();
        let entry = table.entries.get(table.current.get(key)?)?;
        Some(entry.session.address)
    }

    /// Returns the units by LUN, as last seen by an initiator that is logging in: either from the
    /// session that it replaces, or from a recently closed session.
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

    /// Adds a session, if allowed by `check`, which gets the session that would be replaced (RFC
    /// 7143 6.3.5). The handle is `random`, or the next free handle after it. It must be difficult
    /// to guess, because it can be used to join the session of another initiator.
    ///
    /// # Errors
    /// Returns the status for rejecting the login. In this case, the table is not changed, and the
    /// permit is released.
    pub fn add_session(
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
        // Check this while holding the lock. This ensures that we replace the same session that was
        // checked, and that `change` will log out the new session if the initiator loses access
        // after the check.
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
        // After this point, we cannot fail.
        let old = table.current.insert(session.key.clone(), tsih);
        let old = old.and_then(|tsih| table.entries.get(&tsih));
        let mut replaced: Vec<_> = old.map_or_else(Vec::new, |old| old.channels().collect());
        replaced.extend(displaced);
        // Earlier replaced sessions may still have commands at a device, although the session that
        // was waiting for them has been closed because its initiator gave up. Now it logs in again.
        let sessions = table.entries.values();
        let sessions = sessions.filter(|entry| entry.session.key == session.key);
        let (predecessors, others): (Vec<_>, Vec<_>) = sessions
            .map(|entry| (entry.units.nexus(), entry.channels().collect::<Vec<_>>()))
            .unzip();
        let others = others.concat();
        table.waits.wait_for(&others, first.channel);
        let waits = !others.is_empty();
        let ports = session.ports.as_ref();
        let mut units = UnitEntries::add_nexus(nexus, ports, luns, waits);
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

    /// Adds a connection to its session, if allowed by `check`. It replaces a connection with the
    /// same CID (RFC 7143 6.3.4).
    ///
    /// # Errors
    /// Returns the status for rejecting the login. In this case, the table is not changed.
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
        // Repeat the checks of `check_join`, because other connections may have joined since. A
        // login requires several round trips.
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

    /// Returns the other connections of a session, which must be closed. `channel` will wait for
    /// them.
    pub fn end_others(&self, tsih: Tsih, channel: ConnRef) -> Vec<ConnRef> {
        self.wait_for_others(tsih, channel, Ending::Terminate, |_| true)
    }

    /// Returns the other connections of a session with this CID, which must be closed in the given
    /// way. `channel` will wait for them.
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

    /// A connection no longer waits for replaced sessions. While these still have commands, units
    /// will reject commands of its session.
    pub fn stop_waiting(&self, channel: ConnRef) {
        self.lock().waits.forgo(&[channel]);
    }

    /// Returns whether a connection is waiting for other connections.
    pub fn is_waiting(&self, channel: ConnRef) -> bool {
        self.lock().waits.is_waiting(channel)
    }

    /// Called when a connection is lost and its commands are kept.
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

    /// Called when the commands of a connection can be reassigned to other connections of its
    /// session. A session that replaces this one still has to wait, because its writes must not be
    /// overwritten by commands that are already at a device.
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

    /// Called when a connection is closed and all of its resources are released. The last
    /// connection also closes the session.
    fn remove_channel(&self, tsih: Tsih, channel: ConnRef, departure: Departure) -> Left {
        let Departure { logged_out, again } = departure;
        let mut table = self.lock();
        // Check this before the wait is removed below. If a connection was replaced or logged out
        // by another connection, the session is not closed, the same as if it had logged out
        // itself.
        let was_expected = table.waits.is_awaited(channel);
        let mut left = Left {
            notify: table.waits.on_closed(channel),
            ..Left::default()
        };
        let Some(entry) = table.entries.get_mut(&tsih) else {
            return left;
        };
        entry.connections.retain(|c| c.channel != channel);
        if !entry.connections.is_empty() {
            let survives = entry.session.params.error_recovery_level > 1;
            // Below level 2, there is no way to recover the commands of a lost connection, so the
            // session is closed.
            if !logged_out && !was_expected && !survives {
                left.terminate.extend(entry.channels());
            }
            return left;
        }
        let entry = table.entries.remove(&tsih).expect("just found");
        // If the session was replaced, it is not the current session. The new session will then be
        // used for the units.
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
                    None => table.recent.remove(&owner),
                }
            }
        }
        left
    }

    /// Returns the current units of a session.
    pub fn luns(&self, tsih: Tsih) -> Option<Arc<LunMap>> {
        let table = self.lock();
        let entry = table.entries.get(&tsih)?;
        Some(Arc::clone(entry.units.luns()))
    }

    /// Switches to a new catalog, and notifies sessions whose units have changed. Returns the
    /// connections to log out, because the initiator can no longer log in.
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
            // The credentials may have been revoked, or the secret may have changed.
            let is_proved =
                target.is_some_and(|t| t.keeps_session(&key.initiator, address, proved));
            // A connection must have the same access from its address as the first connection, same
            // as for its login.
            let may_stay = |c: &&Connection| {
                is_proved && luns.is_some() && rule_at(c.address) == rule_at(address)
            };
            let others = entry.connections.iter().filter(|c| !may_stay(c));
            ended.extend(others.map(|c| c.channel));
            entry.units.change(luns.unwrap_or_default(), ports);
        }
        ended
    }

    /// Called when all workers have switched to the catalog of the last [`IscsiSessions::change`].
    pub fn remove_former_units(&self) {
        let mut table = self.lock();
        let entries = table.entries.values_mut();
        entries.for_each(|entry| entry.units.remove_former_units());
    }

    fn guard(&self, tsih: Tsih, channel: ConnRef) -> SessionGuard {
        let sessions = self.clone();
        SessionGuard::new(Handle { sessions, tsih }, channel)
    }

    /// We can ignore poison, because a panic elsewhere cannot leave the table inconsistent.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Returns the authenticated name of the initiator.
    #[must_use]
    pub fn chap_name(&self) -> Option<&str> {
        self.credentials.as_ref().map(|proved| proved.name.as_str())
    }

    fn is_discovery(&self) -> bool {
        self.params.discovery
    }
}

impl Table {
    /// Waits for other connections to be closed.
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
        // If there are too many sessions from this address, replace one of them.
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

    /// Checks whether a connection that supports `commands` commands can be added to a session.
    fn check_room(
        &self,
        key: &SessionKey,
        tsih: Tsih,
        cid: Cid,
        commands: u16,
    ) -> Result<(), LoginStatus> {
        let entry = self.entry_of(key, tsih)?;
        if entry.session.params.rdma_extensions {
            // It has a single connection, which uses a different transport.
            return Err(LoginStatus::TOO_MANY_CONNECTIONS);
        }
        // The initiator can use the whole window of the session on any of its connections. The
        // window may be from an earlier configuration, with more commands than this connection
        // supports.
        if entry.session.window.commands() > commands {
            return Err(LoginStatus::OUT_OF_RESOURCES);
        }
        let is_other = |c: &&Connection| c.cid != cid && c.standing == ConnectionStanding::Up;
        let others = entry.connections.iter().filter(is_other).count();
        let params = &entry.session.params;
        // At level 2, a second connection is always allowed, so that it can log out the first one
        // (RFC 7143 6.3.4).
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
        guard.leave_session(Departure::default())
    }

    fn log_out(guard: SessionGuard) -> Left {
        guard.leave_session(Departure {
            logged_out: true,
            again: None,
        })
    }

    fn is_empty(sessions: &IscsiSessions) -> bool {
        let table = sessions.lock();
        table.entries.is_empty() && table.current.is_empty()
    }

    /// All state of a session should be removed, regardless of how its connection is closed.
    #[test]
    fn closed_connection_releases_all_state() {
        type Way = fn(&IscsiSessions, Tsih, SessionGuard);
        let ways: [(&str, Way); 4] = [
            ("the connection is lost", |sessions, tsih, guard| {
                sessions.lose(tsih, channel(1));
                let again = Some(Instant::now());
                let logged_out = false;
                let left = guard.leave_session(Departure { logged_out, again });
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
                let newer = sessions.add_session(recoverable(&budget), &new(0, 2), 9, fits);
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
                entered(sessions.add_session(recoverable(&budget), &new(0, 1), 7, fits));
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

    /// Returns a session with a permit of this budget.
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
    fn new_session_waits_for_replaced_session() {
        let sessions = IscsiSessions::default();
        let (first, one, old) = entered(sessions.add_session(session(1), &new(0, 1), 7, fits));
        assert!(old.is_empty());
        let (_, two, old) = entered(sessions.add_session(session(1), &new(0, 2), 7, fits));
        assert_eq!(old, [channel(1)]);
        // A third session logs in while the second is still waiting. Then the second client
        // disconnects.
        let (third, _three, old) = entered(sessions.add_session(session(1), &new(0, 3), 7, fits));
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
    fn session_inherits_waits_of_failed_login() {
        let sessions = IscsiSessions::default();
        let (_, first, _) = entered(sessions.add_session(session(1), &new(0, 1), 7, fits));
        let (_, second, _) = entered(sessions.add_session(session(1), &new(0, 2), 7, fits));
        // The second session has timed out, but the first still has commands at a device.
        let _ = lose(second);
        let (other, _other) = sessions
            .add_session(session(2), &new(0, 3), 7, fits)
            .unwrap();
        assert!(!other.waits, "of another initiator port");
        let (third, _third) = sessions
            .add_session(session(1), &new(0, 4), 7, fits)
            .unwrap();
        assert!(third.waits);
        assert!(third.replaced.is_empty(), "they are ending already");
        assert_eq!(lose(first).notify, [channel(4)]);
        // The third session is still waiting, but it is the current session of the port.
        let (fourth, _fourth) = sessions
            .add_session(session(1), &new(0, 5), 7, fits)
            .unwrap();
        assert_eq!(fourth.replaced, [channel(4)]);
    }

    #[test]
    fn rejected_login_does_not_replace_session() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let (first, _guard, _) =
            entered(sessions.add_session(counted(&budget, 1), &new(0, 1), 7, fits));
        let refuse = |there: Option<&Session>| match there {
            Some(_) => Err(LoginStatus::AUTHORIZATION_FAILURE),
            None => Ok(()),
        };
        let refused = sessions.add_session(counted(&budget, 1), &new(0, 2), 7, refuse);
        assert_eq!(refused.unwrap_err(), LoginStatus::AUTHORIZATION_FAILURE);
        assert_eq!(budget.sessions(), 1, "its permit is given back");
        let key = bare(1).key;
        assert_eq!(sessions.check_join(&key, first, Cid(1), 4), Ok(()));
        // Another port can log in.
        drop(
            sessions
                .add_session(session(2), &new(0, 3), 7, refuse)
                .unwrap(),
        );
    }

    /// Hosts without a login must not prevent other hosts from discovery: the oldest session from
    /// the address with the most sessions is closed.
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
                entered(sessions.add_session(new_session, &new(0, serial), 7, fits));
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
        // A replaced session does not close any other session.
        let left = lose(held.remove(0));
        assert!(left.notify.is_empty() && left.terminate.is_empty());
        let left = log_out(guard);
        assert!(left.notify.is_empty() && left.terminate.is_empty());
        let (_guard, replaced) = enter(99);
        assert_eq!(replaced, [], "room of the one that logged out");
    }

    #[test]
    fn connections_are_limited_and_replaceable() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) =
            entered(sessions.add_session(counted(&budget, 1), &new(0, 1), 7, fits));
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
        // The loss of a connection closes the session.
        let left = lose(one);
        assert_eq!(left.terminate, [channel(4)]);
        assert_eq!(budget.sessions(), 1);
        let _ = lose(four);
        assert_eq!(budget.sessions(), 0);
    }

    #[test]
    fn handles_are_random_and_unused() {
        let sessions = IscsiSessions::default();
        let mut guards = Vec::new();
        let mut enter = |isid, random| {
            let serial = guards.len() as u64;
            let entered = sessions.add_session(session(isid), &new(0, serial), random, fits);
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
    fn session_logout_closes_other_connections() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) =
            entered(sessions.add_session(counted(&budget, 1), &new(0, 1), 7, fits));
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

    /// Its commands at a device must not overtake commands sent after the response.
    #[test]
    fn session_logout_waits_for_detached_connection() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) =
            entered(sessions.add_session(recoverable(&budget), &new(0, 1), 7, fits));
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

    /// The commands of a connection may be released for reassignment before it is notified that its
    /// session was replaced by a newer login. Its commands at a device must not overtake the new
    /// session.
    #[test]
    fn newer_session_waits_for_detached_connection() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let (tsih, old, _) =
            entered(sessions.add_session(recoverable(&budget), &new(0, 1), 7, fits));
        let (newer, _newer) = sessions
            .add_session(recoverable(&budget), &new(0, 2), 9, fits)
            .unwrap();
        assert!(newer.waits);
        assert_eq!(newer.replaced, [channel(1)]);
        let detached = sessions.detached(tsih, channel(1));
        assert!(detached.notify.is_empty(), "its commands are there still");
        assert_eq!(lose(old).notify, [channel(2)]);
    }

    /// Returns a session at error recovery level 2, with at most one connection.
    fn recoverable(budget: &Budget) -> NewSession {
        let mut new = counted(budget, 1);
        new.session.params.error_recovery_level = 2;
        new.session.params.max_connections = 1;
        new
    }

    #[test]
    fn level_2_session_survives_lost_connection() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, one, _) =
            entered(sessions.add_session(recoverable(&budget), &new(0, 1), 7, fits));
        // A second connection is always allowed, to log out the first one (RFC 7143 6.3.4), but not
        // a third.
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
    fn kept_connections_are_limited() {
        let (sessions, budget) = (IscsiSessions::default(), Budget::default());
        let key = bare(1).key;
        let (tsih, first, _) =
            entered(sessions.add_session(recoverable(&budget), &new(0, 0), 7, fits));
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
        let (_, _guard, old) =
            entered(sessions.add_session(recoverable(&budget), &new(0, 50), 7, fits));
        assert_eq!(old.len(), MAX_KEPT + 1);
    }
}
