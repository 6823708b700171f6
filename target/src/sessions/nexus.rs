//! Sessions of SRP: which channels an I_T nexus has, on which workers.
//!
//! # A login that replaces a session
//! ```text
//! Requested ──established──→ Current ──a newer login established──→ Replaced ──last channel gone─→
//!     └──── place given to another, or no place is left ───→ Displaced ──last channel gone─→
//! ```
//! A connection request comes in one datagram, whose source address may be forged. So it ends
//! nothing: the session that it asks for is beside the one that is there until its own connection
//! is established, which only the owner of the address can do. Then the channels of older sessions
//! are terminated, and the new session's commands wait until these channels and their disk
//! operations have ended. It is a new I_T nexus, which receives I_T NEXUS LOSS; RESERVE ends with
//! the old one.

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

/// Replaced sessions of one pair of ports at most, while their commands are still at a device.
const MAX_REPLACED: usize = 4;

/// Channels at once whose connections are not established yet.
const MAX_UNCONFIRMED: usize = 256;

/// The ports of an I_T nexus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusKey {
    /// Initiator port identifier, of 16 bytes.
    pub initiator: InitiatorPortId,
    /// Target port identifier, of 16 bytes.
    pub target: TargetPortId,
}

/// States of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The connection of its first channel is not established yet.
    Requested,
    /// It is the session of its I_T nexus.
    Current,
    /// A newer one has replaced it. Its channels are being torn down.
    Replaced,
    /// It was never established and will not be. Its channels are being torn down.
    Displaced,
}

/// A session, and its channels with the addresses that they come from.
#[derive(Debug)]
struct Entry {
    stage: Stage,
    /// The channel that asked for the session.
    leader: ConnRef,
    address: IpAddr,
    channels: Vec<(ConnRef, IpAddr)>,
    units: UnitEntries,
    /// Of a session that is or was established.
    permit: Option<Permit>,
}

#[derive(Debug)]
struct Table {
    /// Sessions of each pair of ports, in the order of their requests.
    nexuses: HashMap<NexusKey, Vec<Entry>>,
    waits: Waits,
    /// Sessions of all protocols.
    budget: Budget,
    /// Channels whose connections are not established, the oldest first.
    unconfirmed: Vec<Unconfirmed<(NexusKey, ConnRef)>>,
    /// Sessions that have ended, by their addresses: a host that knows a port's identifier must not
    /// hold up its owner.
    recent: Recent<(NexusKey, IpAddr)>,
    next_id: u64,
    stopping: bool,
    catalog: Arc<Catalog>,
}

impl Table {
    fn is_unconfirmed(&self, channel: ConnRef) -> bool {
        self.unconfirmed.iter().any(|u| u.what.1 == channel)
    }

    /// These channels are established, or are ending.
    fn forget_unconfirmed(&mut self, channels: &[ConnRef]) {
        self.unconfirmed.retain(|u| !channels.contains(&u.what.1));
    }

    /// A channel that is not established gives its place away, and the session with it that only
    /// this channel can establish. Returns the channels to terminate.
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

    /// The sessions of a pair of ports, in the order of their requests.
    fn entries(&self, key: &NexusKey) -> &[Entry] {
        self.nexuses.get(key).map_or(&[], Vec::as_slice)
    }

    /// The session that a login concerns. One that ends others concerns the session that is
    /// current. One that adds a channel may be for a session whose first channel is not established
    /// yet.
    fn met(&self, asked: &Request) -> Option<usize> {
        let known = self.entries(&asked.key);
        if asked.joins {
            joinable(known, asked.address)
        } else {
            known.iter().position(|e| e.stage == Stage::Current)
        }
    }

    /// What the initiator of a login may see; of a session that the login has met, nothing else.
    fn admission(
        &mut self,
        asked: &Request,
        ends: Endpoints,
        met: Option<usize>,
        now: Instant,
    ) -> Admission {
        let (key, address) = (&asked.key, asked.address);
        // By the portals of other targets a target does not exist: they may lead to other networks.
        let is_served = self
            .catalog
            .has_entrance(&key.target, ends.local, ends.entrance);
        let Some(target) = self.catalog.target_of(&key.target).filter(|_| is_served) else {
            return Admission::UnknownTarget;
        };
        let known = self.nexuses.get(key).map_or(&[][..], Vec::as_slice);
        match target.luns_of(&key.initiator, address) {
            // Port identifiers are no secret: an address that sees other units does not get at this
            // session by its identifiers.
            Some(mut luns) if met.is_none_or(|at| known[at].units.luns().is_same(&luns)) => {
                let latest = known.iter().rev().find(|e| e.has_been_current());
                let latest = latest.map(|entry| entry.units.luns().known_units());
                if let Some(units) = latest.or_else(|| self.recent.find(&(*key, address), now)) {
                    let own = Arc::get_mut(&mut luns);
                    own.expect("made for this nexus").set_known_units(units);
                }
                Admission::Allowed(luns)
            }
            _ => Admission::Denied,
        }
    }

    /// Of a session whose channels are all taken, one that is not established gives way.
    fn crowded(&self, key: &NexusKey, at: usize) -> Option<ConnRef> {
        let entry = &self.entries(key)[at];
        let most = self.catalog.limits.login.max_channels as usize;
        if entry.channels.len() < most {
            return None;
        }
        let mut members = entry.refs().filter(|own| *own != entry.leader);
        members.find(|own| self.is_unconfirmed(*own))
    }

    /// The state of the table as far as a login depends on it; `gives_way` if a channel of the
    /// session that it joins makes room for it.
    fn view(&self, asked: &Request, met: Option<usize>, gives_way: bool) -> LoginView {
        let known = self.entries(&asked.key);
        let has_room = || {
            let replaced = met.map(|at| known[at].address);
            let bounds = self.catalog.limits.bounds();
            self.budget.has_room(bounds, asked.address, replaced)
        };
        let is_new = met.is_none() || !asked.joins;
        LoginView {
            channels: met.map_or(0, |at| {
                known[at].channels.len() as u32 - u32::from(gives_way)
            }),
            exhausted: is_new && (is_held_up(known) || !has_room()),
            stopping: self.stopping,
        }
    }

    /// Makes room for a login that is granted. Returns the channels to terminate.
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

    /// Enters another channel into a session.
    fn join(&mut self, asked: &Request, at: usize) -> &Entry {
        let entries = self.nexuses.get_mut(&asked.key).expect("just found");
        let requested = entries.iter().filter(|e| e.stage == Stage::Requested);
        let requested: Vec<_> = requested.map(|e| e.leader).collect();
        let entry = &mut entries[at];
        if entry.stage == Stage::Current {
            // The session may still wait for the one that it replaces: no channel of it may start a
            // command before that.
            self.waits.wait_like(entry.leader, asked.channel);
            // Nor before it is known that the channel is not of a session that was requested since:
            // that would wait for this one's commands. A forged request is given up soon.
            self.waits.wait_for(&requested, asked.channel);
        }
        entry.channels.push((asked.channel, asked.address));
        entry
    }

    /// Enters a session that sees these units.
    fn enter(&mut self, asked: &Request, luns: Arc<LunMap>) -> NexusId {
        let id = self.next_id();
        let is_loss = self.entries(&asked.key).iter().any(Entry::has_been_current);
        let ports = ports(asked.key, self.catalog.target_of(&asked.key.target));
        let units = UnitEntries::enter(id, Some(&ports), luns, is_loss);
        self.nexuses.entry(asked.key).or_default().push(Entry {
            stage: Stage::Requested,
            leader: asked.channel,
            address: asked.address,
            channels: vec![(asked.channel, asked.address)],
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

/// All sessions of SRP at a server, the catalog that is served, and the budget of all sessions.
#[derive(Clone, Debug)]
pub struct Registry {
    table: Arc<Mutex<Table>>,
}

/// A session of one nexus, for the guards of its channels.
struct NexusSession {
    registry: Registry,
    key: NexusKey,
}

impl Session for NexusSession {
    fn leave(&self, channel: ConnRef, departure: Departure) -> Left {
        self.registry.leave(self.key, channel, departure.again)
    }
}

/// A login that is being decided on.
#[derive(Clone, Copy, Debug)]
struct Request {
    key: NexusKey,
    address: IpAddr,
    channel: ConnRef,
    /// It adds its channel to a session, and ends no other.
    joins: bool,
}

/// Both ends of the connection that a login comes by.
#[derive(Clone, Copy, Debug)]
pub struct Endpoints {
    /// Address of the initiator, which may be forged until the connection is established.
    pub peer: SocketAddr,
    /// The address of the device that it has reached.
    pub local: IpAddr,
    /// Listener of the device that it came by.
    pub entrance: Entrance,
}

/// A login that was accepted, and its nexus.
#[derive(Debug)]
pub struct SessionGrant {
    /// Number of the nexus.
    pub nexus: NexusId,
    /// Parameters of the channel, the login response, and the units.
    pub outcome: LoginOutcome,
    /// Channels to terminate: they were not established, and give way to this one.
    pub displaced: Vec<ConnRef>,
}

/// Consequences of the establishment of a channel.
#[derive(Debug, Default)]
pub struct Established {
    /// Whether the channel may take commands now; otherwise it is notified when it may.
    pub may_start: bool,
    /// Other channels of the session that may, too.
    pub start: Vec<ConnRef>,
    /// Channels to terminate: of older sessions, or of this one where it got no permit.
    pub terminate: Vec<ConnRef>,
}

impl Registry {
    /// Makes a registry without sessions.
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

    /// Returns what is served at present.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.lock().catalog)
    }

    /// Returns what a nexus sees at present; `None` without such a nexus.
    #[must_use]
    pub fn luns(&self, key: &NexusKey, nexus: NexusId) -> Option<Arc<LunMap>> {
        let table = self.lock();
        let mut entries = table.nexuses.get(key)?.iter();
        let entry = entries.find(|e| e.units.nexus() == nexus)?;
        Some(Arc::clone(entry.units.luns()))
    }

    /// Serves something else from now on: nexuses whose units are others now are notified. Returns
    /// the channels to log out: those of initiators that may not log in any longer, and those whose
    /// address may no longer see what their session sees.
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

    /// All workers have followed the last [`Registry::change`].
    pub fn settle(&self) {
        let mut table = self.lock();
        let entries = table.nexuses.values_mut().flatten();
        entries.for_each(|entry| entry.units.settle());
    }

    /// Refuses every login from now on.
    pub fn stop(&self) {
        self.lock().stopping = true;
    }

    /// Accepts logins again.
    pub fn resume(&self) {
        self.lock().stopping = false;
    }

    /// Sessions at present that are or were established.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.lock().budget.sessions() as usize
    }

    /// Returns the bound that keeps another session from an address out, for the log.
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

    /// Channels at present whose connections are not established.
    #[must_use]
    pub fn unconfirmed(&self) -> usize {
        self.lock().unconfirmed.len()
    }

    /// Decides on a login and enters its channel. Channels that are established are not concerned
    /// before [`Registry::establish`]; others may have to give their places to this one.
    ///
    /// # Errors
    /// Why it is refused; nothing was entered.
    pub fn login(
        &self,
        req: &LoginReq,
        ends: Endpoints,
        channel: ConnRef,
        now: Instant,
    ) -> Result<(SessionGrant, SessionGuard), LoginRefused> {
        let asked = Request {
            key: NexusKey {
                initiator: req.initiator_port,
                target: req.target_port,
            },
            // An IPv4 address in the form of IPv6 is the same host, for bounds and for rules.
            address: ends.peer.ip().to_canonical(),
            channel,
            joins: req.multi_channel == MultiChannelAction::Multi,
        };
        let mut table = self.lock();
        let met = table.met(&asked);
        let admission = table.admission(&asked, ends, met, now);
        let joined = met.filter(|_| asked.joins);
        let crowded = joined.and_then(|at| table.crowded(&asked.key, at));
        let view = table.view(&asked, met, crowded.is_some());
        let planned = plan_login(req, &table.catalog.limits.login, &admission, view);
        let mut outcome = planned.map_err(|reason| LoginRefused::new(reason, &admission))?;
        // From here on the login is granted, and the table changes.
        let displaced = table.make_room(asked.key, joined, crowded);
        table.unconfirmed.push(Unconfirmed {
            address: asked.address,
            what: (asked.key, channel),
        });
        let nexus = match joined {
            Some(at) => {
                let entry = table.join(&asked, at);
                outcome.luns = Arc::clone(entry.units.luns());
                entry.units.nexus()
            }
            None => table.enter(&asked, Arc::clone(&outcome.luns)),
        };
        let session = NexusSession {
            registry: self.clone(),
            key: asked.key,
        };
        let grant = SessionGrant {
            nexus,
            outcome,
            displaced,
        };
        Ok((grant, SessionGuard::new(session, channel)))
    }

    /// A channel's connection is established: if the channel has asked for a session, that is the
    /// session of its nexus from now on, unless others have taken the last place meanwhile.
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
            // Its session is over, or has given its place to another channel.
            done.terminate = vec![channel];
            return done;
        };
        let (older, rest) = entries.split_at_mut(at);
        let entry = &mut rest[0];
        // A request that is older than the present session has been displaced.
        if entry.stage == Stage::Requested && entry.leader == channel {
            let replaced = older.iter().find(|e| e.stage == Stage::Current);
            let replaced = replaced.map(|e| e.address);
            // Not with the request, which may be forged: the places of sessions are for hosts that
            // have proved their address.
            entry.permit = budget.acquire(limits.bounds(), entry.address, replaced);
            if entry.permit.is_none() {
                entry.stage = Stage::Displaced;
                done.terminate = entry.refs().collect();
                table.forget_unconfirmed(&done.terminate);
                return done;
            }
            entry.stage = Stage::Current;
            // Requests that are older go with the sessions: their initiator has come by this one.
            done.terminate = older.iter().flat_map(Entry::refs).collect();
            older.iter_mut().for_each(Entry::give_way);
            // They may have waited for this one, and for requests that are newer.
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

    /// Starts a channel although channels that it waits for still have commands at a device, if all of
    /// these belong to sessions that its session has replaced: units with such commands refuse
    /// commands of this channel. Returns false if it has to wait for other channels.
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

    /// Numbers an I_T nexus of another protocol, within the same bounds; `None` where they are
    /// reached, or the server is stopping. `replaced` is the address of the session that it
    /// replaces.
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

    /// A channel is gone; with the last one its session ends. At `again` the initiator may log in
    /// again and go on with its disks: it has not logged out by itself.
    fn leave(&self, key: NexusKey, channel: ConnRef, again: Option<Instant>) -> Left {
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
            left.notify = waits.end(channel);
            return left;
        };
        if let Some(at) = entries.iter().position(|e| e.has(channel)) {
            let entry = &mut entries[at];
            entry.channels.retain(|(c, _)| *c != channel);
            // A request for another channel may be forged: it keeps no session that has ended, nor
            // its place and its reservations.
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
                        None => recent.forget(&owner),
                    }
                }
            } else if entry.leader == channel {
                match entry.stage {
                    // No other channel can establish the session.
                    Stage::Requested | Stage::Displaced => {
                        entry.stage = Stage::Displaced;
                        left.terminate = entry.refs().collect();
                    }
                    // Channels that join later wait for what the leader waits for, so there has to
                    // be one.
                    _ => entry.leader = entry.channels[0].0,
                }
            }
        }
        if entries.is_empty() {
            nexuses.remove(&key);
        }
        // Last, so that the channels that start now find the units without the old nexus.
        left.notify = waits.end(channel);
        left
    }

    /// A panic elsewhere cannot have left the table half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The session that another channel from an address joins: the current one, or else the newest that
/// was requested from there, or of all.
///
/// A request beside a current session may be forged, and would take the channel along when it is
/// given up. It may be the initiator's own as well, whose message that establishes it is late: then
/// the channel ends with the current session, and starts nothing before ([`Table::join`]).
fn joinable(entries: &[Entry], address: IpAddr) -> Option<usize> {
    let rank = |(at, entry): (usize, &Entry)| match entry.stage {
        Stage::Current => Some((true, true, at)),
        Stage::Requested => Some((false, entry.address == address, at)),
        Stage::Replaced | Stage::Displaced => None,
    };
    let best = entries.iter().enumerate().filter_map(rank).max();
    best.map(|(.., at)| at)
}

/// Whether too many replaced sessions are still there, because devices hold their commands.
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

    /// Whether it was established, which makes it count as a session until its last channel is
    /// gone.
    fn has_been_current(&self) -> bool {
        self.permit.is_some()
    }

    /// A newer session is established.
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

        fn leave(&self, serial: u64) -> Left {
            let guard = self.guards.borrow_mut().remove(&serial).unwrap();
            guard.leave(Departure::default())
        }
    }

    /// Whichever way a channel ends, nothing of its session is left.
    #[test]
    fn a_channel_leaves_nothing_behind() {
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
                let left = guard.leave(Departure {
                    logged_out: false,
                    again,
                });
                assert!(left.notify.is_empty() && left.terminate.is_empty());
            }),
            ("the initiator logs out", |host| {
                host.log_in(1);
                let left = host.leave(1);
                assert!(left.notify.is_empty() && left.terminate.is_empty());
            }),
            ("another login takes its place", |host| {
                host.log_in(1);
                host.log_in(2);
                assert_eq!(host.registry.sessions(), 2);
                assert_eq!(host.leave(1).notify, [channel(2)]);
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
                let _ = guard.leave(Departure::default());
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
    fn a_newer_session_waits_for_every_channel_of_older_ones() {
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
        // Another channel of the new session waits as well.
        host.request(A, multi, 4).unwrap();
        assert!(!host.establish(4).may_start);
        assert!(host.leave(1).notify.is_empty());
        assert_eq!(host.leave(2).notify, [channel(3), channel(4)]);
    }

    #[test]
    fn a_second_channel_may_be_established_before_the_first_one() {
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
        // Without its first channel a session would never be established.
        let host = Host::new(&registry, 2);
        host.single(4).unwrap();
        host.request(A, MultiChannelAction::Multi, 5).unwrap();
        assert_eq!(host.leave(4).terminate, [channel(5)]);
    }

    #[test]
    fn a_request_in_anothers_name_takes_no_channel_along() {
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
        let left = host.leave(2);
        assert!(left.terminate.is_empty() && left.notify.is_empty());
        let left = host.leave(3);
        assert!(left.terminate.is_empty());
        assert_eq!(left.notify, [channel(4), channel(5)]);
    }

    #[test]
    fn a_request_in_anothers_name_keeps_no_session_that_has_ended() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        host.request(A, MultiChannelAction::Multi, 2).unwrap();
        host.establish(2);
        host.request(B, MultiChannelAction::Multi, 3).unwrap();
        assert!(host.leave(1).terminate.is_empty(), "there is another");
        assert_eq!(registry.sessions(), 1);
        assert_eq!(host.leave(2).terminate, [channel(3)]);
        assert_eq!((registry.sessions(), registry.unconfirmed()), (0, 1));
        let late = host.establish(3);
        assert!(!late.may_start);
        assert_eq!(late.terminate, [channel(3)]);
        assert!(host.leave(3).terminate.is_empty());
    }

    /// Its worker may hear of the end of what it waited for before it hears of its own.
    #[test]
    fn a_channel_without_its_session_is_not_started() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        host.request(B, MultiChannelAction::Single, 2).unwrap();
        host.request(A, MultiChannelAction::Multi, 3).unwrap();
        assert_eq!(host.leave(1).terminate, [channel(3)]);
        assert_eq!(host.establish(3).terminate, [channel(3)]);
        assert!(host.leave(2).notify.is_empty());
    }

    #[test]
    fn a_session_does_not_wait_for_requests_newer_than_itself() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.log_in(1);
        host.single(2).unwrap();
        host.request(B, MultiChannelAction::Single, 3).unwrap();
        host.request(A, MultiChannelAction::Multi, 4).unwrap();
        assert_eq!(host.establish(2).terminate, [channel(1), channel(4)]);
        assert!(host.leave(1).notify.is_empty());
        assert_eq!(host.leave(4).notify, [channel(2)]);
    }

    /// The old session may still have writes at a device, which a channel of the new one must not
    /// overtake.
    #[test]
    fn a_channel_of_a_login_that_is_established_late_starts_nothing() {
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
        assert!(host.leave(3).notify.is_empty());
        assert_eq!(host.leave(1).notify, [channel(2), channel(4)]);
    }

    #[test]
    fn of_two_requests_the_later_one_counts() {
        let registry = open();
        let host = Host::new(&registry, 1);
        host.single(1).unwrap();
        host.single(2).unwrap();
        assert_eq!(host.establish(2).terminate, [channel(1)]);
        let late = host.establish(1);
        assert!(!late.may_start && late.terminate.is_empty());
    }

    #[test]
    fn channel_starts_early_beside_replaced_session() {
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
        let left = host.leave(1);
        assert!(left.notify.is_empty(), "it does not wait any more");
        // A channel that waits for a requested session may belong to that one.
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
        host.leave(2);
        host.leave(3);
        // A device holds the commands of the first one, however long.
        host.now += Duration::from_secs(1000);
        host.log_in(4);
        host.leave(4);
        host.leave(1);
        host.log_in(6);
        assert_eq!(registry.sessions(), 1);
    }

    #[test]
    fn an_address_that_sees_other_units_neither_joins_nor_replaces_a_session() {
        let rules = "luns: { 0: a, 1: b }, \
            access: [{ address: 10.0.0.2 }, { address: 10.0.0.3, luns: [0] }]";
        let registry = registry(rules);
        let host = Host::new(&registry, 1);
        host.log_in(1);
        let denied = Some(LoginRejReason::UnableToAssociateChannel);
        for action in [MultiChannelAction::Multi, MultiChannelAction::Single] {
            assert_eq!(host.request(B, action, 2).err(), denied);
        }
        host.leave(1);
        let luns = &host.request(B, MultiChannelAction::Single, 3).unwrap();
        assert_eq!(luns.outcome.luns.luns().len(), 1);
    }

    #[test]
    fn sessions_that_are_never_established_give_their_places_to_others() {
        let registry = open();
        let host = Host::new(&registry, 1);
        // Each in another host's name, from another address.
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
        // An honest host gets a place, and the forgers have to fill all others before they can take
        // it.
        host.single(1).unwrap();
        for _ in 1..most {
            assert_ne!(forge(), [channel(1)]);
        }
        assert!(host.establish(1).may_start);
        for _ in 0..2 * most {
            assert_ne!(forge(), [channel(1)], "an established one stays");
        }
        assert_eq!(registry.sessions(), 1);
        // What ends leaves nothing behind.
        for n in 1..=forged {
            forger(n).leave(1000 + n);
        }
        assert!(registry.lock().unconfirmed.is_empty());
        assert_eq!(registry.sessions(), 1);
        host.leave(1);
        assert_eq!(registry.sessions(), 0);
        assert!(registry.lock().nexuses.is_empty());
    }

    #[test]
    fn requests_in_a_host_s_name_take_the_oldest_of_that_host_only() {
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
    fn a_request_that_finds_no_place_when_it_is_established_ends() {
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
        hosts[2].leave(3);
        hosts[0].leave(1);
        hosts[2].log_in(5);
        assert_eq!(registry.sessions(), 2);
    }

    #[test]
    fn channels_that_are_never_established_leave_their_session_to_others() {
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
    fn sessions_of_all_protocols_have_one_budget() {
        let registry = open();
        let (one, two) = (Host::new(&registry, 1), Host::new(&registry, 2));
        one.log_in(1);
        let other = registry.open_nexus(B, None).unwrap();
        let full = Some(LoginRejReason::InsufficientResources);
        assert_eq!(two.single(2).err(), full);
        assert!(registry.open_nexus(B, None).is_none());
        // An initiator with a session may replace it.
        one.log_in(3);
        one.leave(1);
        assert!(registry.open_nexus(B, Some(B)).is_some());
        drop(other);
        assert_eq!(registry.sessions(), 1);
    }
}
