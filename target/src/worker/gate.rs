//! Decisions about logins of iSCSI: access, identity, parameters, and the targets to be seen.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::frame::MAX_AHS;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{CompletedLogin, Identity, Refusal, Terms};
use riser_scsi::iscsi::name::{Found, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, CmdSn, Isid};
use riser_scsi::nexus::{Nexus, PortName, TargetPort};

use super::login_log::{LoginLog, Reason};
use super::{Env, Shared};
use crate::audit::Who;
use crate::config::Protocol;
use crate::fabric::{ConnRef, LunMap, Unit};
use crate::iscsi::{Ending, Gate, LoginGrant, TIME2RETAIN, Window};
use crate::iser::IserParams;
use crate::sessions::catalog::{Catalog, IscsiDef, TargetDef, is_proof};
use crate::sessions::guard::SessionGuard;
use crate::sessions::iscsi::{
    Candidate, Membership, NewSession, Session, SessionGrant, SessionKey,
};
use crate::stats::{Refused, SessionEvent};

/// Longest data segment that we take, in bytes.
const MAX_RECV_SEGMENT: u32 = 256 << 10;

/// Longest burst, in bytes.
const MAX_BURST: u32 = 1 << 20;

/// Unsolicited data of a command at most, in bytes.
const FIRST_BURST: u32 = 64 << 10;

/// R2Ts of a command at once.
const MAX_OUTSTANDING_R2T: u32 = 8;

/// Longest data segment that we take in a discovery session, in bytes.
const DISCOVERY_SEGMENT: u32 = 8 << 10;

/// Transport that carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::worker) enum Transport {
    /// PDUs in a TCP stream.
    Tcp,
    /// iSER messages on a queue pair.
    Iser,
}

/// Decides about the logins of one connection.
pub(in crate::worker) struct WorkerGate<'a> {
    pub(in crate::worker) shared: &'a Shared,
    pub(in crate::worker) env: &'a mut dyn Env,
    pub(in crate::worker) catalog: &'a Catalog,
    pub(in crate::worker) now: Instant,
    pub(in crate::worker) transport: Transport,
    /// Portal that the connection has come to.
    pub(in crate::worker) listen: SocketAddr,
    pub(in crate::worker) peer: SocketAddr,
    pub(in crate::worker) channel: ConnRef,
    /// Commands that the channel can hold, which were fixed when it was made.
    pub(in crate::worker) commands: u16,
    pub(in crate::worker) membership: &'a mut Option<Membership>,
    /// Channels whose place has been taken, or that were logged out.
    pub(in crate::worker) ending: &'a mut Vec<(ConnRef, Ending)>,
    /// Logins that succeeded or failed.
    pub(in crate::worker) logins: &'a mut LoginLog,
    /// Why the login failed, beyond its status. For the log, not for the initiator.
    pub(in crate::worker) detail: Option<String>,
}

/// Parameters that are offered over either transport.
fn offer() -> Offer {
    Offer::default()
        .with(Key::MaxBurstLength, MAX_BURST)
        .with(Key::MaxOutstandingR2T, MAX_OUTSTANDING_R2T)
        .with(Key::InitialR2T, 0)
        .with(Key::DefaultTime2Wait, 0)
        .with(Key::DefaultTime2Retain, TIME2RETAIN)
}

impl Transport {
    /// Parameters that are offered over it.
    fn offer(self, catalog: &Catalog, commands: u16, discovery: bool) -> Offer {
        // There are no commands in a discovery session, only short texts.
        let (recv_segment, recovery_level) = match discovery {
            true => (DISCOVERY_SEGMENT, 0),
            false => (MAX_RECV_SEGMENT, catalog.recovery_level),
        };
        match self {
            Self::Tcp => offer()
                .with(Key::MaxConnections, catalog.connections)
                .with(Key::ErrorRecoveryLevel, recovery_level)
                .with(Key::MaxRecvDataSegmentLength, recv_segment)
                .with(Key::FirstBurstLength, FIRST_BURST)
                .with_list(Key::HeaderDigest, 0b11)
                .with_list(Key::DataDigest, 0b11),
            Self::Iser => {
                // Without the keys for digests, connections and recovery: their defaults hold. An
                // RDMA connection has checksums of its own, is the only one of its session, and
                // does not recover.
                let params = IserParams::new(commands);
                offer()
                    .with(Key::RdmaExtensions, 1)
                    // In discovery sessions, where the others have no meaning.
                    .with(Key::MaxRecvDataSegmentLength, params.recv_segment)
                    .with(Key::TargetRecvDataSegmentLength, params.recv_segment)
                    .with(Key::InitiatorRecvDataSegmentLength, MAX_RECV_SEGMENT)
                    .with(Key::FirstBurstLength, params.first_burst)
                    .with(Key::MaxOutstandingUnexpectedPdus, params.unexpected())
                    .with(Key::MaxAhsLength, MAX_AHS as u32)
            }
        }
    }

    fn protocol(self) -> Protocol {
        match self {
            Self::Tcp => Protocol::Iscsi,
            Self::Iser => Protocol::Iser,
        }
    }

    /// The portals that a target has on it.
    fn portals(self, iscsi: &IscsiDef) -> &[SocketAddr] {
        match self {
            Self::Tcp => &iscsi.portals,
            Self::Iser => &iscsi.iser,
        }
    }
}

/// Whether a connection's portal is one of its target's; in a discovery session and before the
/// login, of any target's.
pub(in crate::worker) fn is_served(
    catalog: &Catalog,
    transport: Transport,
    listen: SocketAddr,
    entered: Option<&Membership>,
) -> bool {
    let name = entered.and_then(|entered| entered.target.as_ref());
    let targets = catalog.targets.iter().filter_map(|t| t.iscsi.as_ref());
    let mut meant = targets.filter(|iscsi| name.is_none_or(|name| iscsi.name == *name));
    meant.any(|iscsi| transport.portals(iscsi).contains(&listen))
}

impl<'a> WorkerGate<'a> {
    fn address(&self) -> IpAddr {
        self.peer.ip().to_canonical()
    }

    fn offer(&self, identity: &Identity) -> Offer {
        self.transport
            .offer(self.catalog, self.commands, identity.discovery)
    }

    fn place(&self) -> ConnAddrs {
        ConnAddrs {
            transport: self.transport,
            listen: self.listen,
            peer: self.peer,
        }
    }

    fn candidate(&self, cid: Cid) -> Candidate {
        Candidate {
            cid,
            channel: self.channel,
            address: self.address(),
            commands: self.commands,
        }
    }

    /// The target that listens here under a name, and its portal group.
    fn target(&self, name: &IscsiName) -> Option<(&'a TargetDef, u16)> {
        let target = self.catalog.target_named(name)?;
        let iscsi = target.iscsi.as_ref()?;
        let is_here = self.transport.portals(iscsi).contains(&self.listen);
        is_here.then_some((target, iscsi.group))
    }
}

impl WorkerGate<'_> {
    /// A session of its own, within the bounds on sessions.
    fn new_session(
        &self,
        joined: &CompletedLogin,
        key: SessionKey,
        first: CmdSn,
    ) -> Result<NewSession, LoginStatus> {
        let identity = &joined.identity;
        let address = self.address();
        let name = identity.target.as_ref().filter(|_| !identity.discovery);
        let found = name.and_then(|name| self.target(name));
        let mut allowed = found
            .as_ref()
            .and_then(|(target, _)| target.luns_of_name(&identity.initiator, address));
        let chap_name = joined.chap_name.as_deref();
        if let Some(luns) = &mut allowed
            && let Some(units) = self
                .shared
                .iscsi
                .known_units(&key, address, chap_name, self.now)
        {
            let own = Arc::get_mut(luns);
            own.expect("made for this session").set_known_units(units);
        }
        let ports = found.filter(|_| allowed.is_some()).map(|(target, group)| {
            let iscsi = target.iscsi.as_ref().expect("found by its name");
            ports(identity, iscsi, group)
        });
        // The session that is replaced counts as room, or an initiator at its bound could never
        // log in again.
        let replaced = self.shared.iscsi.address_of(&key);
        // A discovery session is no I_T nexus, and has a budget of its own.
        let nexus = match identity.discovery {
            true => None,
            false => {
                let nexus = self.shared.registry.open_nexus(address, replaced);
                Some(nexus.ok_or(LoginStatus::OUT_OF_RESOURCES)?)
            }
        };
        let session = Session {
            key,
            address,
            chap_name: joined.chap_name.clone(),
            ports,
            params: joined.session,
            window: Arc::new(Window::of(&joined.session, self.commands, first)),
        };
        Ok(NewSession {
            nexus,
            luns: allowed.unwrap_or_default(),
            session,
        })
    }

    /// Whether an initiator may log in with what it has proved. `admit` has checked its rights when
    /// the login began, but another catalog may be served by now: a host whose rule was taken away
    /// in between must not get in, nor one that has to prove its identity from now on.
    fn check_rights(&self, joined: &CompletedLogin) -> Result<(), LoginStatus> {
        let (identity, address) = (&joined.identity, self.address());
        let proved = joined.chap_name.as_deref();
        let is_allowed = match identity.target.as_ref().filter(|_| !identity.discovery) {
            None => is_proof(&self.catalog.discovery, proved),
            Some(name) => {
                let (target, _) = self.target(name).ok_or(LoginStatus::NOT_FOUND)?;
                target.luns_of_name(&identity.initiator, address).is_some()
                    && target.is_accepted(&identity.initiator, address, proved)
            }
        };
        is_allowed
            .then_some(())
            .ok_or(LoginStatus::AUTHORIZATION_FAILURE)
    }

    /// Enters a session, or the connection in its session, and notes why that was refused.
    fn enter(
        &mut self,
        joined: &CompletedLogin,
        first: CmdSn,
    ) -> Result<(SessionGrant, SessionGuard), LoginStatus> {
        self.check_rights(joined)?;
        let identity = &joined.identity;
        let sessions = &self.shared.iscsi;
        let key = SessionKey::of(identity, self.address());
        let candidate = self.candidate(identity.cid);
        let mut conflict = None;
        let granted = if identity.tsih.0 == 0 {
            let session = self.new_session(joined, key, first)?;
            let mut random = [0; 2];
            self.random(&mut random);
            // The table calls it under its lock, with the session that is going to be replaced.
            let check = |there: &Session| {
                self.check_reinstatement(joined, there)
                    .inspect_err(|_| conflict = Some(self.conflict(joined, there)))
            };
            sessions.enter(session, &candidate, u16::from_ne_bytes(random), check)
        } else {
            let check = |session: &Session, luns: &LunMap| {
                self.check_session(joined, session, luns)
                    .inspect_err(|status| {
                        let is_conflict = *status == LoginStatus::AUTHORIZATION_FAILURE;
                        conflict = is_conflict.then(|| self.conflict(joined, session));
                    })
            };
            sessions.join(&key, identity.tsih, &candidate, check)
        };
        self.detail = conflict;
        granted
    }
}

impl WorkerGate<'_> {
    /// Whether an initiator has the same rights here as at the address `there` of a session of its
    /// name. Names are no secret: an address with other rights must not reach that session.
    fn has_rights_of(&self, target: &TargetDef, initiator: &IscsiName, there: IpAddr) -> bool {
        target.rule_of(initiator, self.address()) == target.rule_of(initiator, there)
    }

    /// Whether a session of an initiator that has proved its identity as `joined` says may take the
    /// place of another one. It must have proved the same: names are no secret, and an initiator
    /// with a CHAP name of its own may claim any initiator name.
    fn check_reinstatement(
        &self,
        joined: &CompletedLogin,
        there: &Session,
    ) -> Result<(), LoginStatus> {
        let initiator = &joined.identity.initiator;
        let name = there.ports.as_ref().and(joined.identity.target.as_ref());
        let Some((target, _)) = name.and_then(|name| self.target(name)) else {
            return Ok(());
        };
        // A session whose initiator may no longer log in is about to end, and may be replaced; so
        // may one whose name is not accepted any longer.
        let is_allowed = target.luns_of_name(initiator, there.address).is_some()
            && target.is_accepted(initiator, there.address, there.chap_name.as_deref());
        let is_same = there.chap_name == joined.chap_name
            && self.has_rights_of(target, initiator, there.address);
        if is_allowed && !is_same {
            return Err(LoginStatus::AUTHORIZATION_FAILURE);
        }
        Ok(())
    }

    /// In which respect a login, refused by a check against a session of its initiator port,
    /// differs from it.
    fn conflict(&self, joined: &CompletedLogin, there: &Session) -> String {
        let identity = |name: &Option<String>| match name {
            Some(name) => format!("CHAP name {name:?}"),
            None => "no CHAP name".to_owned(),
        };
        if there.chap_name == joined.chap_name {
            let (here, there) = (self.address(), there.address);
            return format!(
                "the access rule of {here} is not that of {there}, where the session is"
            );
        }
        let (proved, held) = (identity(&joined.chap_name), identity(&there.chap_name));
        format!("proved {proved}, and the session of this initiator port has proved {held}")
    }

    /// Whether a connection that has proved its identity as `joined` says may join a session.
    fn check_session(
        &self,
        joined: &CompletedLogin,
        session: &Session,
        luns: &LunMap,
    ) -> Result<(), LoginStatus> {
        let initiator = &joined.identity.initiator;
        if let Some(name) = session.ports.as_ref().and(joined.identity.target.as_ref()) {
            // The connection may have come by a portal that the session's target does not have.
            let (target, _) = self.target(name).ok_or(LoginStatus::NOT_FOUND)?;
            if !self.has_rights_of(target, initiator, session.address)
                || session.chap_name != joined.chap_name
            {
                return Err(LoginStatus::AUTHORIZATION_FAILURE);
            }
        }
        // The session may have units of a catalog that this worker follows in a moment.
        let known = self.catalog.unit_stores.len();
        let is_known = |unit: &Arc<Unit>| (unit.index.0 as usize) < known;
        if luns.iter().all(|(_, unit)| is_known(unit)) {
            Ok(())
        } else {
            Err(LoginStatus::SERVICE_UNAVAILABLE)
        }
    }
}

impl Gate for WorkerGate<'_> {
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal> {
        let refuse = |status| Err(Refusal::Status(status));
        // One of discovery has one connection (RFC 7143 13.2), as has one of iSER; and what
        // connections of different transports agree on means nothing to each other.
        let is_single = identity.discovery || self.transport == Transport::Iser;
        if identity.tsih.0 != 0 && is_single {
            return refuse(LoginStatus::TOO_MANY_CONNECTIONS);
        }
        let Some(name) = identity.target.as_ref().filter(|_| !identity.discovery) else {
            return Ok(Terms {
                offer: self.offer(identity),
                auth: self.catalog.discovery.clone(),
                portal_group: 1,
            });
        };
        let Some((target, group)) = self.target(name) else {
            return refuse(LoginStatus::NOT_FOUND);
        };
        let (initiator, address) = (&identity.initiator, self.address());
        if target.luns_of_name(initiator, address).is_none() {
            return refuse(LoginStatus::AUTHORIZATION_FAILURE);
        }
        let iscsi = target.iscsi.as_ref().expect("found by its name");
        let auth = target.auth_of_name(initiator, address);
        let auth = auth.expect("found by its name").clone();
        // After the check of access: an initiator that may not log in learns of no other address.
        let mut redirects = iscsi.redirects.iter();
        if let Some((_, redirect)) = redirects.find(|(listen, _)| *listen == self.listen) {
            return Err(Refusal::Redirect {
                to: redirect.to.clone(),
                permanent: redirect.permanent,
            });
        }
        if identity.tsih.0 != 0 {
            let key = SessionKey::of(identity, self.address());
            let sessions = &self.shared.iscsi;
            sessions
                .check_join(&key, identity.tsih, identity.cid, self.commands)
                .map_err(Refusal::Status)?;
        }
        Ok(Terms {
            offer: self.offer(identity),
            auth,
            portal_group: group,
        })
    }

    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus> {
        let identity = &joined.identity;
        let name = identity.target.as_ref().filter(|_| !identity.discovery);
        let (grant, guard) = self.enter(joined, first)?;
        let SessionGrant { session, .. } = grant;
        // A new session ends the one that it replaces with all its commands; a connection may leave
        // them to others (RFC 7143 6.3.4).
        let how = match identity.tsih.0 {
            0 => Ending::Terminate,
            _ => Ending::of_reinstatement(&session.params),
        };
        let entered = Membership {
            initiator: identity.initiator.clone(),
            isid: identity.isid,
            target: name.cloned(),
            tsih: grant.tsih,
            nexus: grant.nexus,
            guard,
        };
        let who = self.place().who(self.catalog, &entered);
        self.logins.accept(self.now, &who);
        *self.membership = Some(entered);
        if let Some(target) = name.and_then(|name| self.catalog.target_named(name)) {
            target.counts.count_login();
        }
        let replaced = grant.replaced.into_iter();
        self.ending.extend(replaced.map(|old| (old, how)));
        Ok(LoginGrant {
            tsih: grant.tsih,
            nexus: session.ports.map(|_| (grant.nexus, grant.luns)),
            params: session.params,
            window: session.window,
            waits: grant.waits,
        })
    }

    fn refused(&mut self, status: LoginStatus, identity: Option<&Identity>) {
        let mut who = self.place().nobody();
        if let Some(identity) = identity {
            let name = identity.target.as_ref().filter(|_| !identity.discovery);
            who.initiator = Some(port_name(&identity.initiator, identity.isid));
            who.target = name.map(|name| target_name(self.catalog, name));
        }
        let detail = self.detail.take();
        let detail = detail.as_ref().map(|detail| detail as &dyn Display);
        let reason = Reason::of(status.name());
        self.logins.refuse(self.now, &who, reason, detail);
        let Some(identity) = identity.filter(|identity| !identity.discovery) else {
            return;
        };
        let name = identity.target.as_ref();
        if let Some(target) = name.and_then(|name| self.catalog.target_named(name)) {
            target.counts.count_refused(Refused {
                status,
                initiator: identity.initiator.to_string(),
                address: self.address(),
                at: self.now,
            });
        }
    }

    fn count(&mut self, event: SessionEvent) {
        let Some(entered) = self.membership.as_ref() else {
            return;
        };
        let name = entered.target.as_ref();
        if let Some(target) = name.and_then(|name| self.catalog.target_named(name)) {
            let initiator = entered.initiator.as_str();
            target.counts.count_event(event, initiator);
        }
    }

    fn end_other(&mut self, cid: Cid, ending: Ending) -> bool {
        let sessions = &self.shared.iscsi;
        let entered = self.membership.as_ref();
        let found = entered.map_or_else(Vec::new, |entered| {
            sessions.end_other(entered.tsih, self.channel, cid, ending)
        });
        let is_there = !found.is_empty();
        let found = found.into_iter().map(|old| (old, ending));
        self.ending.extend(found);
        is_there
    }

    fn random(&mut self, out: &mut [u8]) {
        self.env.fill_random(out);
    }

    fn targets(&mut self, initiator: &IscsiName, wanted: Option<&IscsiName>) -> Vec<Found> {
        let address = self.address();
        let targets = self.catalog.targets.iter();
        let visible = targets.filter_map(|target| {
            let iscsi = target.iscsi.as_ref()?;
            // A target that the initiator may not use does not exist for it.
            target.luns_of_name(initiator, address)?;
            // A portal shows the targets that it leads to, with all their portals.
            iscsi.addresses().find(|portal| *portal == self.listen)?;
            wanted
                .is_none_or(|name| iscsi.name == *name)
                .then(|| Found {
                    name: iscsi.name.clone(),
                    addresses: iscsi
                        .shown_to(self.listen)
                        .map(|listen| TargetAddress::new(listen, iscsi.group))
                        .collect(),
                })
        });
        let visible: Vec<Found> = visible.collect();
        let place = self.place();
        let who = match self.membership.as_ref() {
            Some(entered) => place.who(self.catalog, entered),
            None => place.nobody(),
        };
        self.logins.audit.discovery(self.now, &who, visible.len());
        visible
    }
}

/// Both ends of a connection, for the audit log.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct ConnAddrs {
    pub(in crate::worker) transport: Transport,
    pub(in crate::worker) listen: SocketAddr,
    pub(in crate::worker) peer: SocketAddr,
}

impl ConnAddrs {
    /// Names a peer that has not logged in.
    pub(in crate::worker) fn nobody(self) -> Who {
        Who {
            protocol: self.transport.protocol(),
            peer: self.peer.to_string(),
            portal: self.listen.to_string(),
            initiator: None,
            target: None,
            nexus: None,
        }
    }

    /// Names a peer that has logged in.
    pub(in crate::worker) fn who(self, catalog: &Catalog, entered: &Membership) -> Who {
        let target = entered.target.as_ref();
        Who {
            initiator: Some(port_name(&entered.initiator, entered.isid)),
            target: target.map(|name| target_name(catalog, name)),
            nexus: target.map(|_| entered.nexus.0),
            ..self.nobody()
        }
    }
}

/// An initiator port as `riserd sessions` has it.
fn port_name(initiator: &IscsiName, isid: Isid) -> String {
    format!("{initiator},{isid}")
}

/// A target's name in the configuration, or what an initiator calls it.
fn target_name(catalog: &Catalog, name: &IscsiName) -> String {
    match catalog.target_named(name) {
        Some(target) => target.config.name.clone(),
        None => name.to_string(),
    }
}

/// The ports of a nexus, with their names (RFC 7143 4.4.2).
fn ports(identity: &Identity, iscsi: &IscsiDef, group: u16) -> Nexus {
    Nexus {
        initiator: PortName::Iscsi(format!("{},i,{}", identity.initiator, identity.isid)),
        target: TargetPort {
            name: PortName::Iscsi(format!("{},t,0x{group:04x}", iscsi.name)),
            relative_id: group,
            group: 0,
        },
    }
}
