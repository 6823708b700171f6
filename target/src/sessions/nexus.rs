//! SRP sessions: the channels of each I_T nexus, and their workers.
//!
//! # Replacing a session
//! ```text
//! Requested ──established──→ Current ──newer login established──→ Replaced ──last channel closed─→
//!     └──── dropped for a newer request, or session limit ──→ Displaced ──last channel closed─→
//! ```
//! A connection request is a single datagram, and its source address may be forged. Therefore, it
//! does not affect any existing session: the new session exists in addition to the current session
//! until its connection is established, which is only possible for the owner of the address. Then
//! the channels of older sessions are terminated, and the commands of the new session wait until
//! these channels are closed and their disk operations have completed. It is a new I_T nexus, which
//! receives I_T NEXUS LOSS. A RESERVE of the old nexus is released.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::srp::{InitiatorPortId, LoginReq, MultiChannelAction, TargetPortId};
use riser_sync::{Mutex, MutexGuard};

use super::budget::{Budget, Permit, ReachedBound};
use super::catalog::{Catalog, Entrance, TargetDef};
use super::guard::{Departure, Left, Session, SessionGuard};
use super::recent::Recent;
use super::unconfirmed::{self, Unconfirmed};
use super::units::UnitEntries;
use super::waits::Waits;
use crate::fabric::{ConnRef, LunMap};
use crate::srp::{Admission, LoginOutcome, LoginRefused, LoginView, plan_login};

/// Maximum number of replaced sessions per pair of ports, while their commands are still at a
/// device.
const MAX_REPLACED: usize = 4;

/// Maximum number of channels whose connections are not established yet.
const MAX_UNCONFIRMED: usize = 256;

/// The ports of an I_T nexus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusKey {
    /// Initiator port identifier (16 bytes).
    pub initiator: InitiatorPortId,
    /// Target port identifier (16 bytes).
    pub target: TargetPortId,
}

/// State of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The connection of its first channel is not established yet.
    Requested,
    /// The current session of its I_T nexus.
    Current,
    /// Replaced by a newer session. The channels are being torn down.
    Replaced,
    /// Dropped before it was established. The channels are being torn down.
    Displaced,
}

/// A session, and its channels with their source addresses.
#[derive(Debug)]
struct Entry {
    stage: Stage,
    /// The channel that has requested the session.
    leader: ConnRef,
    address: IpAddr,
    channels: Vec<(ConnRef, IpAddr)>,
    units: UnitEntries,
    /// Set when the session was established.
    permit: Option<Permit>,
}

#[derive(Debug)]
struct Table {
    /// Sessions for each pair of ports, oldest request first.
    nexuses: HashMap<NexusKey, Vec<Entry>>,
    waits: Waits,
    /// Sessions of all protocols.
    budget: Budget,
    /// Channels whose connections are not established, oldest first.
    unconfirmed: Vec<Unconfirmed<(NexusKey, ConnRef)>>,
    /// Closed sessions by address, so that a host which only knows the port identifier cannot block
    /// the owner.
    recent: Recent<(NexusKey, IpAddr)>,
    next_id: u64,
    stopping: bool,
    catalog: Arc<Catalog>,
}

impl Table {
    fn is_unconfirmed(&self, channel: ConnRef) -> bool {
        self.unconfirmed.iter().any(|u| u.what.1 == channel)
    }

    /// Called when these channels were established, or are being closed.
    fn forget_unconfirmed(&mut self, channels: &[ConnRef]) {
        self.unconfirmed.retain(|u| !channels.contains(&u.what.1));
    }

    /// Drops a channel that is not established, and also its session if no other channel can
    /// establish it. Returns the channels to terminate.
    fn displace(&mut self, key: NexusKey, channel: ConnRef) -> Vec<ConnRef> {
        let entries = self.nexuses.get_mut(&key).into_iter().flatten();
        let mut led = entries.filter(|e| e.leader == channel && e.stage == Stage::Requested);
        let ending = match led.next() {
            Some(entry) => {
                entry.stage = Stage::Displaced;
                entry.refs().collect()
            }
            None => vec![channel],
        };
        self.forget_unconfirmed(&ending);
        ending
    }

    /// Returns the sessions for a pair of ports, oldest request first.
    fn entries(&self, key: &NexusKey) -> &[Entry] {
        self.nexuses.get(key).map_or(&[], Vec::as_slice)
    }

    /// Returns the existing session affected by a login. If the login replaces other sessions, this
    /// is the current session. If it adds a channel, this can also be a session whose first channel
    /// is not established yet.
    fn met(&self, request: &Request) -> Option<usize> {
        let known = self.entries(&request.key);
        if request.joins {
            joinable(known, request.address)
        } else {
            known.iter().position(|e| e.stage == Stage::Current)
        }
    }

    /// Returns the units for the initiator of a login. If there is an existing session, they must
    /// be the same.
    fn admission(
        &mut self,
        request: &Request,
        ends: Endpoints,
        met: Option<usize>,
        now: Instant,
    ) -> Admission {
        let (key, address) = (&request.key, request.address);
        // A target is not available on portals of other targets, which may be on other networks.
        let portal = self
            .catalog
            .portal_at(&key.target, ends.local, ends.entrance);
        let target = portal.and_then(|_| self.catalog.target_of(&key.target));
        let Some(target) = target else {
            return Admission::UnknownTarget;
        };
        let known = self.nexuses.get(key).map_or(&[][..], Vec::as_slice);
        match target.luns_of(&key.initiator, address) {
            // Port identifiers are not secret: if an address has access to different units, knowing
            // the identifiers of a session is not enough to use it.
            Some(mut luns) if met.is_none_or(|at| known[at].units.luns().is_same(&luns)) => {
                // A replaced session that still waits for a command may be older than a session
                // that was closed recently.
                let known_by = |entry: Option<&Entry>| Some(entry?.units.luns().known_units());
                let current = known_by(known.iter().find(|e| e.stage == Stage::Current));
                let recent = || self.recent.find(&(*key, address), now);
                let replaced = || known_by(known.iter().rev().find(|e| e.has_been_current()));
                if let Some(units) = current.or_else(recent).or_else(replaced) {
                    let own = Arc::get_mut(&mut luns);
                    own.expect("made for this nexus").set_known_units(units);
                }
                Admission::Allowed(luns)
            }
            _ => Admission::Denied,
        }
    }

    /// Returns the address to which a login is redirected, if any.
    fn redirect(&self, request: &Request, ends: Endpoints, joins: bool) -> Option<IpAddr> {
        let portal = |addr| {
            let port = &request.key.target;
            self.catalog.portal_at(port, addr, ends.entrance)
        };
        let to = portal(ends.local)?.redirect?;
        // Another server does not know the session that a further channel belongs to.
        (!joins || portal(to).is_some()).then_some(to)
    }

    /// If a session has the maximum number of channels, returns a channel to drop which is not
    /// established.
    fn crowded(&self, key: &NexusKey, at: usize) -> Option<ConnRef> {
        let entry = &self.entries(key)[at];
        let most = self.catalog.limits.login.max_channels as usize;
        if entry.channels.len() < most {
            return None;
        }
        let mut members = entry.refs().filter(|own| *own != entry.leader);
        members.find(|own| self.is_unconfirmed(*own))
    }

    /// Returns the state of the table as required for a login. `gives_way` is set if a channel of
    /// the same session will be dropped for it.
    fn view(&self, request: &Request, met: Option<usize>, gives_way: bool) -> LoginView {
        let known = self.entries(&request.key);
        let has_room = || {
            let replaced = met.map(|at| known[at].address);
            let bounds = self.catalog.limits.bounds();
            self.budget.has_room(bounds, request.address, replaced)
        };
        let is_new = met.is_none() || !request.joins;
        LoginView {
            channels: met.map_or(0, |at| {
                known[at].channels.len() as u32 - u32::from(gives_way)
            }),
            exhausted: is_new && (is_held_up(known) || !has_room()),
            stopping: self.stopping,
        }
    }

    /// Makes room for an accepted login. Returns the channels to terminate.
    fn make_room(
        &mut self,
        key: NexusKey,
        joined: Option<usize>,
        crowded: Option<ConnRef>,
    ) -> Vec<ConnRef> {
        if let (Some(at), Some(crowded)) = (joined, crowded) {
            let entry = &mut self.nexuses.get_mut(&key).expect("just found")[at];
            entry.channels.retain(|(own, _)| *own != crowded);
            self.waits.forgo(&[crowded]);
            self.forget_unconfirmed(&[crowded]);
            return vec![crowded];
        }
        if self.unconfirmed.len() >= MAX_UNCONFIRMED
            && let Some((key, oldest)) = unconfirmed::displaceable(&self.unconfirmed)
        {
            return self.displace(key, oldest);
        }
        Vec::new()
    }

    /// Adds a channel to a session.
    fn join(&mut self, request: &Request, at: usize) -> &Entry {
        let entries = self.nexuses.get_mut(&request.key).expect("just found");
        let requested = entries.iter().filter(|e| e.stage == Stage::Requested);
        let requested: Vec<_> = requested.map(|e| e.leader).collect();
        let entry = &mut entries[at];
        if entry.stage == Stage::Current {
            // If the session is still waiting for a replaced session, none of its channels can
            // start a command.
            self.waits.wait_like(entry.leader, request.channel);
            // Also wait for newer requests: the channel may belong to one of these sessions, which
            // would have to wait for commands of this session first. A forged request times out
            // soon.
            self.waits.wait_for(&requested, request.channel);
        }
        entry.channels.push((request.channel, request.address));
        entry
    }

    /// Adds a session with these units.
    fn add_session(&mut self, request: &Request, luns: Arc<LunMap>) -> NexusId {
        let id = self.next_id();
        let is_loss = self
            .entries(&request.key)
            .iter()
            .any(Entry::has_been_current);
        let ports = ports(request.key, self.catalog.target_of(&request.key.target));
        let units = UnitEntries::add_nexus(id, Some(&ports), luns, is_loss);
        self.nexuses.entry(request.key).or_default().push(Entry {
            stage: Stage::Requested,
            leader: request.channel,
            address: request.address,
            channels: vec![(request.channel, request.address)],
            units,
            permit: None,
        });
        id
    }

    fn next_id(&mut self) -> NexusId {
        let id = NexusId(self.next_id);
        self.next_id += 1;
        id
    }
}

/// All SRP sessions of a server, the current catalog, and the budget for all sessions.
#[derive(Clone, Debug)]
pub struct Registry {
    table: Arc<Mutex<Table>>,
}

/// A session of a nexus, used by the guards of its channels.
struct NexusSession {
    registry: Registry,
    key: NexusKey,
}

impl Session for NexusSession {
    fn remove_channel(&self, channel: ConnRef, departure: Departure) -> Left {
        self.registry
            .remove_channel(self.key, channel, departure.again)
    }
}

/// A login request.
#[derive(Clone, Copy, Debug)]
struct Request {
    key: NexusKey,
    address: IpAddr,
    channel: ConnRef,
    /// True if it adds a channel to a session, without replacing other channels.
    joins: bool,
}

/// Both ends of the connection used for a login.
#[derive(Clone, Copy, Debug)]
pub struct Endpoints {
    /// Address of the initiator, which may be forged until the connection is established.
    pub peer: SocketAddr,
    /// Local address of the device.
    pub local: IpAddr,
    /// The entrance that the request was received on.
    pub entrance: Entrance,
}

/// An accepted login with its nexus.
#[derive(Debug)]
pub struct SessionGrant {
    /// Nexus number.
    pub nexus: NexusId,
    /// Parameters of the channel, the login response, and the units.
    pub outcome: LoginOutcome,
    /// Channels to terminate. They were not established, and are dropped for this login.
    pub displaced: Vec<ConnRef>,
}

/// The result of establishing a channel.
#[derive(Debug, Default)]
pub struct Established {
    /// True if the channel can start commands now. Otherwise, it will be notified.
    pub may_start: bool,
    /// Other channels of the session that can also start now.
    pub start: Vec<ConnRef>,
    /// Channels to terminate: channels of older sessions, or of this session if there is no permit.
    pub terminate: Vec<ConnRef>,
}

impl Registry {
    /// Creates a registry without sessions.
    #[must_use]
    pub fn new(catalog: Catalog) -> Self {
        catalog.set_limits();
        Self {
            table: Arc::new(Mutex::new(Table {
                nexuses: HashMap::new(),
                waits: Waits::default(),
                budget: Budget::default(),
                unconfirmed: Vec::new(),
                recent: Recent::default(),
                next_id: 1,
                stopping: false,
                catalog: Arc::new(catalog),
            })),
        }
    }

    /// Returns the current catalog.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.lock().catalog)
    }

    /// Returns the current units of a nexus, or `None` if it does not exist.
    #[must_use]
    pub fn luns(&self, key: &NexusKey, nexus: NexusId) -> Option<Arc<LunMap>> {
        let table = self.lock();
        let mut entries = table.nexuses.get(key)?.iter();
        let entry = entries.find(|e| e.units.nexus() == nexus)?;
        Some(Arc::clone(entry.units.luns()))
    }

    /// Switches to a new catalog, and notifies nexuses whose units have changed. Returns the
    /// channels to log out: either the initiator can no longer log in, or the address of the
    /// channel no longer has access to the same units as its session.
    pub fn change(&self, catalog: Arc<Catalog>) -> Vec<ConnRef> {
        let mut table = self.lock();
        let mut ended = Vec::new();
        catalog.set_limits();
        for (key, entries) in &mut table.nexuses {
            let target = catalog.target_of(&key.target);
            let luns_at = |address| target?.luns_of(&key.initiator, address);
            for entry in entries {
                let luns = luns_at(entry.address);
                let may_stay = |address| {
                    let own = luns_at(address);
                    own.zip(luns.as_ref()).is_some_and(|(a, b)| a.is_same(b))
                };
                let channels = entry.channels.iter();
                let others = channels.filter(|(_, address)| !may_stay(*address));
                ended.extend(others.map(|(channel, _)| *channel));
                entry
                    .units
                    .change(luns.unwrap_or_default(), &ports(*key, target));
            }
        }
        table.catalog = catalog;
        ended
    }

    /// Called when all workers have switched to the catalog of the last [`Registry::change`].
    pub fn remove_former_units(&self) {
        let mut table = self.lock();
        let entries = table.nexuses.values_mut().flatten();
        entries.for_each(|entry| entry.units.remove_former_units());
    }

    /// Rejects all further logins.
    pub fn stop(&self) {
        self.lock().stopping = true;
    }

    /// Accepts logins again.
    pub fn resume(&self) {
        self.lock().stopping = false;
    }

    /// Returns the current number of sessions, not including sessions that were never established.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.lock().budget.sessions() as usize
    }

    /// Returns the limit that prevents another session from an address, for the log.
    #[must_use]
    pub fn reached_bound(&self, address: IpAddr) -> Option<ReachedBound> {
        let table = self.lock();
        let bounds = table.catalog.limits.bounds();
        table.budget.reached(bounds, address)
    }

    /// Returns the largest number of sessions from one address.
    #[must_use]
    pub fn most_per_address(&self) -> u32 {
        self.lock().budget.most_per_address()
    }

    /// Returns the current number of channels that are not established.
    #[must_use]
    pub fn unconfirmed(&self) -> usize {
        self.lock().unconfirmed.len()
    }

    /// Decides whether to accept a login, and adds its channel. Established channels are not
    /// affected until [`Registry::establish`], but other channels may be dropped.
    ///
    /// # Errors
    /// Returns the reason for the rejection. In this case, the table is not changed.
    pub fn login(
        &self,
        req: &LoginReq,
        ends: Endpoints,
        channel: ConnRef,
        now: Instant,
    ) -> Result<(SessionGrant, SessionGuard), LoginRefused> {
        let request = Request {
            key: NexusKey {
                initiator: req.initiator_port,
                target: req.target_port,
            },
            // An IPv4-mapped IPv6 address is the same host, both for limits and for access rules.
            address: ends.peer.ip().to_canonical(),
            channel,
            joins: req.multi_channel == MultiChannelAction::Multi,
        };
        let mut table = self.lock();
        let met = table.met(&request);
        let admission = table.admission(&request, ends, met, now);
        let joined = met.filter(|_| request.joins);
        let crowded = joined.and_then(|at| table.crowded(&request.key, at));
        let view = table.view(&request, met, crowded.is_some());
        let planned = plan_login(req, &table.catalog.limits.login, &admission, view);
        let mut outcome = planned.map_err(|reason| LoginRefused::new(reason, &admission))?;
        // An initiator that is not allowed to log in should not receive any other address.
        if let Some(to) = table.redirect(&request, ends, joined.is_some()) {
            return Err(LoginRefused::redirected(to));
        }
        // The login is accepted, so the table can be changed now.
        let displaced = table.make_room(request.key, joined, crowded);
        table.unconfirmed.push(Unconfirmed {
            address: request.address,
            what: (request.key, channel),
        });
        let nexus = match joined {
            Some(at) => {
                let entry = table.join(&request, at);
                outcome.luns = Arc::clone(entry.units.luns());
                entry.units.nexus()
            }
            None => table.add_session(&request, Arc::clone(&outcome.luns)),
        };
        let session = NexusSession {
            registry: self.clone(),
            key: request.key,
        };
        let grant = SessionGrant {
            nexus,
            outcome,
            displaced,
        };
        Ok((grant, SessionGuard::new(session, channel)))
    }

    /// Called when the connection of a channel is established. If the channel has requested a
    /// session, this becomes the current session of its nexus, unless the session limit was reached
    /// in the meantime.
    pub fn establish(&self, key: NexusKey, channel: ConnRef) -> Established {
        let mut table = self.lock();
        let limits = table.catalog.limits;
        table.forget_unconfirmed(&[channel]);
        let Table {
            nexuses,
            waits,
            budget,
            ..
        } = &mut *table;
        let entries = nexuses.get_mut(&key).map_or(&mut [][..], Vec::as_mut_slice);
        let mut done = Established::default();
        let Some(at) = entries.iter().position(|e| e.has(channel)) else {
            // The session was closed, or the channel was dropped for another one.
            done.terminate = vec![channel];
            return done;
        };
        let (older, rest) = entries.split_at_mut(at);
        let entry = &mut rest[0];
        // A request older than the current session was already displaced.
        if entry.stage == Stage::Requested && entry.leader == channel {
            let replaced = older.iter().find(|e| e.stage == Stage::Current);
            let replaced = replaced.map(|e| e.address);
            // We don't do this for the request, which may be forged: only hosts with a verified
            // address should use up the session limit.
            entry.permit = budget.acquire(limits.bounds(), entry.address, replaced);
            if entry.permit.is_none() {
                entry.stage = Stage::Displaced;
                done.terminate = entry.refs().collect();
                table.forget_unconfirmed(&done.terminate);
                return done;
            }
            entry.stage = Stage::Current;
            // This includes older requests, because the initiator has used this session instead.
            done.terminate = older.iter().flat_map(Entry::refs).collect();
            older.iter_mut().for_each(Entry::give_way);
            // They may have been waiting for this session, and for newer requests.
            waits.forgo(&done.terminate);
            for own in entry.refs() {
                waits.wait_for(&done.terminate, own);
            }
            let older = older.iter().filter(|e| e.has_been_current());
            entry.units.succeed(older.map(|e| e.units.nexus()));
            let is_ready = |own: &ConnRef| *own != channel && !waits.is_waiting(*own);
            done.start = entry.refs().filter(is_ready).collect();
        }
        done.may_start = entry.stage == Stage::Current && !waits.is_waiting(channel);
        table.forget_unconfirmed(&done.terminate);
        done
    }

    /// Starts a channel although other channels that it is waiting for still have commands at a
    /// device, provided that they all belong to sessions replaced by this one. Units with such
    /// commands will reject commands of this channel. Returns false if it has to wait for any other
    /// channel.
    pub fn start_early(&self, key: NexusKey, channel: ConnRef) -> bool {
        let mut table = self.lock();
        let is_replaced = |on: ConnRef| {
            let mut entries = table.entries(&key).iter();
            entries.any(|e| e.has(on) && matches!(e.stage, Stage::Replaced | Stage::Displaced))
        };
        let mut entries = table.entries(&key).iter();
        let is_current = entries.any(|e| e.has(channel) && e.stage == Stage::Current);
        let may_start = is_current && table.waits.of(channel).all(is_replaced);
        if may_start {
            table.waits.forgo(&[channel]);
        }
        may_start
    }

    /// Allocates an I_T nexus for another protocol, within the same limits. Returns `None` if a
    /// limit is reached, or if the server is stopping. `replaced` is the address of the session to
    /// be replaced.
    pub fn open_nexus(
        &self,
        address: IpAddr,
        replaced: Option<IpAddr>,
    ) -> Option<(NexusId, Permit)> {
        let mut table = self.lock();
        if table.stopping {
            return None;
        }
        let bounds = table.catalog.limits.bounds();
        let permit = table.budget.acquire(bounds, address, replaced)?;
        Some((table.next_id(), permit))
    }

    /// Called when a channel is closed. The last channel also closes the session. `again` is set if
    /// the initiator may log in again and continue to use its disks, because it did not log out
    /// itself.
    fn remove_channel(&self, key: NexusKey, channel: ConnRef, again: Option<Instant>) -> Left {
        let mut table = self.lock();
        table.forget_unconfirmed(&[channel]);
        let Table {
            nexuses,
            waits,
            recent,
            unconfirmed,
            ..
        } = &mut *table;
        let mut left = Left::default();
        let Some(entries) = nexuses.get_mut(&key) else {
            left.notify = waits.on_closed(channel);
            return left;
        };
        if let Some(at) = entries.iter().position(|e| e.has(channel)) {
            let entry = &mut entries[at];
            entry.channels.retain(|(c, _)| *c != channel);
            // A request for another channel may be forged, so it must not keep a session, its
            // permit and its reservations.
            let is_unconfirmed = |own| unconfirmed.iter().any(|u| u.what.1 == own);
            let is_over = entry.channels.is_empty()
                || entry.has_been_current() && entry.refs().all(is_unconfirmed);
            if is_over {
                let entry = entries.remove(at);
                left.terminate = entry.refs().collect();
                waits.forgo(&left.terminate);
                if entry.stage == Stage::Current {
                    let owner = (key, entry.address);
                    match again {
                        Some(now) => recent.keep(owner, entry.units.luns().known_units(), now),
                        None => recent.remove(&owner),
                    }
                }
            } else if entry.leader == channel {
                match entry.stage {
                    // No other channel can establish the session.
                    Stage::Requested | Stage::Displaced => {
                        entry.stage = Stage::Displaced;
                        left.terminate = entry.refs().collect();
                    }
                    // There must always be a leader, because channels that join later will wait for
                    // the same channels.
                    _ => entry.leader = entry.channels[0].0,
                }
            }
        }
        if entries.is_empty() {
            nexuses.remove(&key);
        }
        // Do this last, so that the channels which start now will not find the old nexus at the
        // units.
        left.notify = waits.on_closed(channel);
        left
    }

    /// We can ignore poison, because a panic elsewhere cannot leave the table inconsistent.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the session to be joined by a channel from an address: the current session, or else the
/// newest request from this address, or else the newest request.
///
/// If there is a current session, a newer request may be forged, and a channel that has joined it
/// would be closed with it. It may also be from the same initiator, if the message that establishes
/// it is delayed. In this case, the channel is closed with the current session, and does not start
/// any commands before that ([`Table::join`]).
fn joinable(entries: &[Entry], address: IpAddr) -> Option<usize> {
    let rank = |(at, entry): (usize, &Entry)| match entry.stage {
        Stage::Current => Some((true, true, at)),
        Stage::Requested => Some((false, entry.address == address, at)),
        Stage::Replaced | Stage::Displaced => None,
    };
    let best = entries.iter().enumerate().filter_map(rank).max();
    best.map(|(.., at)| at)
}

/// Returns whether there are too many replaced sessions with commands at a device.
fn is_held_up(entries: &[Entry]) -> bool {
    let replaced = entries.iter().filter(|e| e.stage == Stage::Replaced);
    replaced.count() >= MAX_REPLACED
}

impl Entry {
    fn has(&self, channel: ConnRef) -> bool {
        self.refs().any(|own| own == channel)
    }

    fn refs(&self) -> impl Iterator<Item = ConnRef> + '_ {
        self.channels.iter().map(|(channel, _)| *channel)
    }

    /// Returns whether this was ever established. If so, it counts as a session until its last
    /// channel is closed.
    fn has_been_current(&self) -> bool {
        self.permit.is_some()
    }

    /// Called when a newer session is established.
    fn give_way(&mut self) {
        self.stage = match self.stage {
            Stage::Requested | Stage::Displaced => Stage::Displaced,
            Stage::Current | Stage::Replaced => Stage::Replaced,
        };
    }
}

fn ports(key: NexusKey, target: Option<&TargetDef>) -> Nexus {
    Nexus {
        initiator: PortName::Srp(key.initiator.0),
        target: TargetPort {
            name: PortName::Srp(key.target.0),
            relative_id: target.map_or(1, |t| t.relative_port(&key.target)),
            group: 0,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use riser_scsi::srp::{BufferFormats, LoginRejReason, LoginReqFlags, Tag};

    use super::*;
    use crate::config::Config;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3));

    fn registry(rest: &str) -> Registry {
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }}, b: {{ kind: ram, size: 1MiB }} }}\n\
             targets: [{{ name: t, portals: [{{ protocol: srp, listen: 10.0.0.1 }}], {rest} }}]\n\
             limits: {{ max_sessions: 2 }}\nworkers: {{ count: 1 }}\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap();
        crate::server::build_shared(&config, None).unwrap().registry
    }

    fn open() -> Registry {
        registry("luns: { 0: a }, access: open")
    }

    fn channel(serial: u64) -> ConnRef {
        ConnRef { worker: 0, serial }
    }

    struct Host<'a> {
        registry: &'a Registry,
        key: NexusKey,
        now: Instant,
        guards: RefCell<HashMap<u64, SessionGuard>>,
    }

    impl<'a> Host<'a> {
        fn new(registry: &'a Registry, initiator: u8) -> Self {
            let target = registry.catalog().targets[0].portals[0].target_port();
            let initiator = InitiatorPortId([initiator; 16]);
            Self {
                registry,
                key: NexusKey { initiator, target },
                now: Instant::now(),
                guards: RefCell::default(),
            }
        }

        fn request(
            &self,
            address: IpAddr,
            multi_channel: MultiChannelAction,
            serial: u64,
        ) -> Result<SessionGrant, LoginRejReason> {
            let req = LoginReq {
                tag: Tag(1),
                req_it_iu_len: 8260,
                formats: BufferFormats::DIRECT,
                multi_channel,
                flags: LoginReqFlags::empty(),
                immediate: None,
                initiator_port: self.key.initiator,
                target_port: self.key.target,
            };
            let portal = self.registry.catalog().targets[0].portals[0].listen;
            let ends = Endpoints {
                peer: SocketAddr::new(address, 1),
                local: portal.ip(),
                entrance: Entrance::Port(portal.port()),
            };
            let entered = self.registry.login(&req, ends, channel(serial), self.now);
            let (grant, guard) = entered.map_err(|refused| refused.reason)?;
            self.guards.borrow_mut().insert(serial, guard);
            Ok(grant)
        }

        fn single(&self, serial: u64) -> Result<SessionGrant, LoginRejReason> {
            self.request(A, MultiChannelAction::Single, serial)
        }

        fn establish(&self, serial: u64) -> Established {
            self.registry.establish(self.key, channel(serial))
        }

        fn log_in(&self, serial: u64) -> NexusId {
            let entered = self.single(serial).unwrap();
            self.establish(serial);
            entered.nexus
        }

        fn close(&self, serial: u64) -> Left {
            let guard = self.guards.borrow_mut().remove(&serial).unwrap();
            guard.leave_session(Departure::default())
        }
    }

    /// A replaced session that waits for a command can outlast its successor.
    #[test]
    fn closed_session_is_newer_than_replaced_session() {
        let registry = open();
        let first = registry.catalog();
        let other = self::registry("luns: { 0: b }, access: open");
        let mut second = Catalog::clone(&first);
        second.targets[0].units = other.catalog().targets[0].units.clone();
        let host = Host::new(&registry, 1);
        let luns = || {
            Arc::clone(
                registry
                    .lock()
                    .entries(&host.key)
                    .last()
                    .unwrap()
                    .units
                    .luns(),
            )
        };
        host.log_in(1);
        host.log_in(2);
        registry.change(Arc::new(second));
        assert!(luns().expected(0).is_stale());
        luns().expected(0).complete_identification();
        let guard = host.guards.borrow_mut().remove(&2).unwrap();
        let _ = guard.leave_session(Departure {
            logged_out: false,
            again: Some(host.now),
        });
        registry.change(first);
        host.single(3).unwrap();
        assert!(luns().expected(0).is_stale());
    }

    /// All state of a session should be removed, regardless of how its channel is closed.
    #[test]
    fn closed_channel_releases_all_state() {
        type Way = fn(&Host<'_>);
        let ways: [(&str, Way); 5] = [
            ("its login fails after it was entered", |host| {
                host.single(1).unwrap();
                assert_eq!(host.registry.unconfirmed(), 1);
            }),
            ("the connection is lost", |host| {
                host.log_in(1);
                let again = Some(host.now);
                let guard = host.guards.borrow_mut().remove(&1).unwrap();
                let left = guard.leave_session(Departure {
                    logged_out: false,
                    again,
                });
                assert!(left.notify.is_empty() && left.terminate.is_empty());
            }),
            ("the initiator logs out", |host| {
                host.log_in(1);
                let left = host.close(1);
                assert!(left.notify.is_empty() && left.terminate.is_empty());
            }),
            ("another login takes its place", |host| {
                host.log_in(1);
                host.log_in(2);
                assert_eq!(host.registry.sessions(), 2);
                assert_eq!(host.close(1).notify, [channel(2)]);
            }),
            ("its target goes", |host| {
                host.log_in(1);
                let mut catalog = Catalog::clone(&host.registry.catalog());
                catalog.targets.clear();
                let ended = host.registry.change(Arc::new(catalog));
                assert_eq!(ended, [channel(1)]);
            }),
        ];
        for (way, end) in ways {
            let registry = open();
            let units = registry.catalog().targets[0].units.clone();
            let host = Host::new(&registry, 1);
            end(&host);
            for guard in host.guards.take().into_values() {
                let _ = guard.leave_session(Departure::default());
            }
            assert_eq!(
                (registry.sessions(), registry.unconfirmed()),
                (0, 0),
                "{way}"
            );
            let table = registry.lock();
            assert!(table.nexuses.is_empty(), "{way}");
            let was_there = |id: u64| units.iter().any(|(_, u)| u.lu.nexus(NexusId(id)).is_some());
            assert!(!(0..table.next_id).any(was_there), "{way}");
            let waits = |serial| {
                let channel = channel(serial);
                table.waits.is_waiting(channel) || table.waits.is_awaited(channel)
            };
            assert!(![1, 2].into_iter().any(waits), "{way}");
        }
    }

    #[test]
    fn newer_session_waits_for_older_channels() {
        let registry = open();
        let host = Host::new(&registry, 1);
        let first = host.log_in(1);
        let multi = MultiChannelAction::Multi;
        assert_eq!(host.request(A, multi, 2).unwrap().nexus, first);
        assert!(host.establish(2).may_start);
        assert_ne!(host.single(3).unwrap().nexus, first);
        let done = host.establish(3);
        assert_eq!(done.terminate, [channel(1), channel(2)]);
        assert!(!done.may_start);
        // Another channel of the new session also has to wait.
        host.request(A, multi, 4).unwrap();
        assert!(!host.establish(4).may_start);
        assert!(host.close(1).notify.is_empty());
        assert_eq!(host.close(2).notify, [channel(3), channel(4)]);
    }

    #[test]
    fn second_channel_can_be_established_first() {
        let registry = open();
        let host = Host::new(&registry, 1);
        let new = host.single(2).unwrap().nexus;
        let joined = host.request(A, MultiChannelAction::Multi, 3).unwrap();
        assert_eq!(joined.nexus, new, "the login that is under way");
        let done = host.establish(3);
        assert!(
            !done.may_start && done.terminate.is_empty(),
            "it replaces nothing"
        );
        let done = host.establish(2);
        assert!(done.may_start);
        assert_eq!(done.start, [channel(3)]);
        // Without its first channel, a session could never be established.
        let host = Host::new(&registry, 2);
        host.single(4).unwrap();
        host.request(A, MultiChannelAction::Multi, 5).unwrap();
        assert_eq!(host.close(4).terminate, [channel(5)]);
    }

    #[test]
    fn forged_request_closes_no_channel() {
        let registry = open();
        let host = Host::new(&registry, 1);
        let current = host.log_in(1);
        for (address, serial) in [(A, 2), (B, 3)] {
            let forged = host.request(address, MultiChannelAction::Single, serial);
            assert_ne!(forged.unwrap().nexus, current);
        }
        for (address, serial) in [(A, 4), (B, 5)] {
            let joined = host.request(address, MultiChannelAction::Multi, serial);
            assert_eq!(joined.unwrap().nexus, current);
            assert!(!host.establish(serial).may_start, "it may be another's");
        }
        let left = host.close(2);
        assert!(left.terminate.is_empty() && left.notify.is_empty());
        let left = host.close(3);
        assert!(left.terminate.is_empty());
        assert_eq!(left.notify, [channel(4), channel(5)]);
    }

    #[test]
    fn forged_request_keeps_no_closed_session() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        host.request(A, MultiChannelAction::Multi, 2).unwrap();
        host.establish(2);
        host.request(B, MultiChannelAction::Multi, 3).unwrap();
        assert!(host.close(1).terminate.is_empty(), "there is another");
        assert_eq!(registry.sessions(), 1);
        assert_eq!(host.close(2).terminate, [channel(3)]);
        assert_eq!((registry.sessions(), registry.unconfirmed()), (0, 1));
        let late = host.establish(3);
        assert!(!late.may_start);
        assert_eq!(late.terminate, [channel(3)]);
        assert!(host.close(3).terminate.is_empty());
    }

    /// Its worker may be notified that the wait is over before the channel is terminated.
    #[test]
    fn channel_of_closed_session_never_starts() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        host.request(B, MultiChannelAction::Single, 2).unwrap();
        host.request(A, MultiChannelAction::Multi, 3).unwrap();
        assert_eq!(host.close(1).terminate, [channel(3)]);
        assert_eq!(host.establish(3).terminate, [channel(3)]);
        assert!(host.close(2).notify.is_empty());
    }

    #[test]
    fn session_does_not_wait_for_newer_requests() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        host.single(2).unwrap();
        host.request(B, MultiChannelAction::Single, 3).unwrap();
        host.request(A, MultiChannelAction::Multi, 4).unwrap();
        assert_eq!(host.establish(2).terminate, [channel(1), channel(4)]);
        assert!(host.close(1).notify.is_empty());
        assert_eq!(host.close(4).notify, [channel(2)]);
    }

    /// The old session may still have writes at a device, which must not be overtaken by a channel
    /// of the new session.
    #[test]
    fn channel_of_late_login_never_starts() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        let new = host.single(2).unwrap().nexus;
        host.request(A, MultiChannelAction::Multi, 3).unwrap();
        assert!(!host.establish(3).may_start);
        let done = host.establish(2);
        assert!(!done.may_start && done.start.is_empty());
        assert_eq!(done.terminate, [channel(1), channel(3)]);
        let joined = host.request(A, MultiChannelAction::Multi, 4).unwrap();
        assert_eq!(joined.nexus, new);
        assert!(!host.establish(4).may_start);
        assert!(host.close(3).notify.is_empty());
        assert_eq!(host.close(1).notify, [channel(2), channel(4)]);
    }

    #[test]
    fn later_request_wins() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.single(1).unwrap();
        host.single(2).unwrap();
        assert_eq!(host.establish(2).terminate, [channel(1)]);
        let late = host.establish(1);
        assert!(!late.may_start && late.terminate.is_empty());
    }

    #[test]
    fn channel_starts_early_despite_replaced_session() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.single(1).unwrap();
        assert!(host.establish(1).may_start);
        host.single(2).unwrap();
        assert!(
            !host.establish(2).may_start,
            "the first one may have commands"
        );
        assert!(registry.start_early(host.key, channel(2)));
        let left = host.close(1);
        assert!(left.notify.is_empty(), "it does not wait any more");
        // A channel that is waiting for a requested session may belong to it.
        host.single(3).unwrap();
        host.request(A, MultiChannelAction::Multi, 4).unwrap();
        host.establish(4);
        assert!(!registry.start_early(host.key, channel(4)));
    }

    #[test]
    fn replaced_sessions_count_until_they_end() {
        let registry = open();
        let mut host = Host::new(&registry, 1);
        for serial in 1..=3 {
            host.log_in(serial);
        }
        let full = Some(LoginRejReason::InsufficientResources);
        assert_eq!(host.single(4).err(), full, "they count as sessions");
        host.close(2);
        host.close(3);
        // A device keeps the commands of the first session for a long time.
        host.now += Duration::from_secs(1000);
        host.log_in(4);
        host.close(4);
        host.close(1);
        host.log_in(6);
        assert_eq!(registry.sessions(), 1);
    }

    #[test]
    fn address_with_other_units_is_denied() {
        let rules = "luns: { 0: a, 1: b }, \
            access: [{ address: 10.0.0.2 }, { address: 10.0.0.3, luns: [0] }]";
        let registry = registry(rules);
        let host = Host::new(&registry, 1);
        host.log_in(1);
        let denied = Some(LoginRejReason::UnableToAssociateChannel);
        for action in [MultiChannelAction::Multi, MultiChannelAction::Single] {
            assert_eq!(host.request(B, action, 2).err(), denied);
        }
        host.close(1);
        let luns = &host.request(B, MultiChannelAction::Single, 3).unwrap();
        assert_eq!(luns.outcome.luns.luns().len(), 1);
    }

    #[test]
    fn unestablished_sessions_make_room() {
        let registry = open();
        let host = Host::new(&registry, 1);
        // Each of them uses the name and address of a different host.
        let address = |n: u64| IpAddr::from([10, 1, (n >> 8) as u8, n as u8]);
        let forgers: Vec<_> = (100..200).map(|n| Host::new(&registry, n)).collect();
        let forger = |n: u64| &forgers[(n % 100) as usize];
        let mut forged = 0;
        let mut forge = || {
            forged += 1;
            let (action, serial) = (MultiChannelAction::Single, 1000 + forged);
            let entered = forger(forged).request(address(forged), action, serial);
            entered.unwrap().displaced
        };
        let most = MAX_UNCONFIRMED as u64;
        assert!((0..most).all(|_| forge().is_empty()));
        assert_eq!(forge(), [channel(1001)], "the oldest");
        // A genuine host is accepted, and its request is only dropped when forged requests have
        // replaced all other entries.
        host.single(1).unwrap();
        for _ in 1..most {
            assert_ne!(forge(), [channel(1)]);
        }
        assert!(host.establish(1).may_start);
        for _ in 0..2 * most {
            assert_ne!(forge(), [channel(1)], "an established one stays");
        }
        assert_eq!(registry.sessions(), 1);
        // All state should be removed on close.
        for n in 1..=forged {
            forger(n).close(1000 + n);
        }
        assert!(registry.lock().unconfirmed.is_empty());
        assert_eq!(registry.sessions(), 1);
        host.close(1);
        assert_eq!(registry.sessions(), 0);
        assert!(registry.lock().nexuses.is_empty());
    }

    #[test]
    fn flood_drops_oldest_request_of_host() {
        let registry = open();
        let (one, two) = (Host::new(&registry, 1), Host::new(&registry, 2));
        two.request(B, MultiChannelAction::Single, 1).unwrap();
        for n in 1..MAX_UNCONFIRMED as u64 {
            one.single(100 + n).unwrap();
        }
        let entered = one.single(999).unwrap();
        assert_eq!(entered.displaced, [channel(101)]);
        assert!(two.establish(1).may_start);
        let late = one.establish(101);
        assert!(
            !late.may_start && late.terminate.is_empty(),
            "its place is taken"
        );
    }

    #[test]
    fn request_over_session_limit_is_dropped() {
        let registry = open();
        let hosts = [1, 2, 3].map(|n| Host::new(&registry, n));
        for (host, serial) in hosts.iter().zip(1..) {
            host.single(serial).unwrap();
        }
        assert!(hosts[0].establish(1).may_start && hosts[1].establish(2).may_start);
        let late = hosts[2].establish(3);
        assert!(!late.may_start);
        assert_eq!(late.terminate, [channel(3)]);
        let full = Some(LoginRejReason::InsufficientResources);
        assert_eq!(hosts[2].single(4).err(), full);
        hosts[2].close(3);
        hosts[0].close(1);
        hosts[2].log_in(5);
        assert_eq!(registry.sessions(), 2);
    }

    #[test]
    fn unestablished_channels_make_room() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        let most = u64::from(registry.catalog().limits.login.max_channels);
        let multi = MultiChannelAction::Multi;
        for serial in 2..=most {
            host.request(A, multi, serial).unwrap();
        }
        assert!(host.establish(2).may_start);
        let entered = host.request(A, multi, 100).unwrap();
        assert_eq!(entered.displaced, [channel(3)]);
        for serial in 4..=most {
            host.establish(serial);
        }
        host.establish(100);
        let full = Some(LoginRejReason::ChannelLimitReached);
        assert_eq!(host.request(A, multi, 101).err(), full);
        assert!(!host.establish(3).may_start);
    }

    #[test]
    fn protocols_share_session_budget() {
        let registry = open();
        let (one, two) = (Host::new(&registry, 1), Host::new(&registry, 2));
        one.log_in(1);
        let other = registry.open_nexus(B, None).unwrap();
        let full = Some(LoginRejReason::InsufficientResources);
        assert_eq!(two.single(2).err(), full);
        assert!(registry.open_nexus(B, None).is_none());
        // An initiator can replace its own session.
        one.log_in(3);
        one.close(1);
        assert!(registry.open_nexus(B, Some(B)).is_some());
        drop(other);
        assert_eq!(registry.sessions(), 1);
    }
}
