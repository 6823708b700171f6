//! Login decisions for iSCSI: access control, authentication, parameters, and visible targets.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::frame::MAX_AHS;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{CompletedLogin, Identity, LoginFault, Refusal, Terms};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, CmdSn};
use riser_scsi::nexus::{Nexus, PortName, TargetPort};

use super::login_log::{LoginLog, Reason};
use super::{Env, Shared};
use crate::audit::Who;
use crate::config::Protocol;
use crate::fabric::{ConnRef, LunMap, Unit};
use crate::iscsi::{Ending, Gate, LoginGrant, TIME2RETAIN, Window, port_name};
use crate::iser::IserParams;
use crate::sessions::blocklist::BLOCKED;
use crate::sessions::catalog::{Catalog, IscsiDef, TargetDef, is_proof};
use crate::sessions::guard::SessionGuard;
use crate::sessions::iscsi::{
    Candidate, Membership, NewSession, Session, SessionGrant, SessionKey,
};
use crate::stats::{Refused, SessionEvent};

/// Maximum data segment size we can receive, in bytes.
const MAX_RECV_SEGMENT: u32 = 256 << 10;

/// Maximum burst size, in bytes.
const MAX_BURST: u32 = 1 << 20;

/// Maximum size of unsolicited data for a command, in bytes.
const FIRST_BURST: u32 = 64 << 10;

/// Maximum number of outstanding R2Ts for a command.
const MAX_OUTSTANDING_R2T: u32 = 8;

/// Maximum data segment size we can receive in a discovery session, in bytes.
const DISCOVERY_SEGMENT: u32 = 8 << 10;

/// Transport of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::worker) enum Transport {
    /// PDUs in a TCP stream.
    Tcp,
    /// iSER messages on a queue pair.
    Iser,
}

/// Login decisions for a connection.
pub(in crate::worker) struct WorkerGate<'a> {
    pub(in crate::worker) shared: &'a Shared,
    pub(in crate::worker) env: &'a mut dyn Env,
    pub(in crate::worker) catalog: &'a Catalog,
    pub(in crate::worker) now: Instant,
    pub(in crate::worker) transport: Transport,
    /// Local portal of the connection.
    pub(in crate::worker) listen: SocketAddr,
    pub(in crate::worker) peer: SocketAddr,
    pub(in crate::worker) channel: ConnRef,
    /// Maximum number of commands, as set when the channel was created.
    pub(in crate::worker) commands: u16,
    pub(in crate::worker) membership: &'a mut Option<Membership>,
    /// Channels to terminate, because they are replaced or were logged out.
    pub(in crate::worker) ending: &'a mut Vec<(ConnRef, Ending)>,
    /// Log of accepted and refused logins.
    pub(in crate::worker) logins: &'a mut LoginLog,
    /// Details for a failed login. Only used in the log and not sent to the initiator.
    pub(in crate::worker) detail: Option<String>,
}

/// Returns the parameters offered for all transports.
fn offer() -> Offer {
    Offer::default()
        .with(Key::MaxBurstLength, MAX_BURST)
        .with(Key::MaxOutstandingR2T, MAX_OUTSTANDING_R2T)
        .with(Key::InitialR2T, 0)
        .with(Key::DefaultTime2Wait, 0)
        .with(Key::DefaultTime2Retain, TIME2RETAIN)
}

impl Transport {
    /// Returns the parameters offered for this transport.
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
                // We don't offer the keys for digests, multiple connections and recovery, so the
                // defaults are used. An RDMA connection already has checksums, is the only
                // connection of its session, and does not support recovery.
                let params = IserParams::new(commands);
                offer()
                    .with(Key::RdmaExtensions, 1)
                    // Used in discovery sessions, where the other keys have no effect.
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

    /// Returns the portals of a target for this transport.
    fn portals(self, iscsi: &IscsiDef) -> &[SocketAddr] {
        match self {
            Self::Tcp => &iscsi.portals,
            Self::Iser => &iscsi.iser,
        }
    }
}

/// Returns true if the portal of a connection belongs to its target. In a discovery session and
/// before login, this can be any target.
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

    /// Returns the target with this name and its portal group, if it uses this portal.
    fn target(&self, name: &IscsiName) -> Option<(&'a TargetDef, u16)> {
        let target = self.catalog.target_named(name)?;
        let iscsi = target.iscsi.as_ref()?;
        let is_here = self.transport.portals(iscsi).contains(&self.listen);
        is_here.then_some((target, iscsi.group))
    }
}

impl WorkerGate<'_> {
    /// Creates a new session within the session limits.
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
        let chap_name = joined.chap_name();
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
        // The session being replaced is not counted. Otherwise, an initiator at its limit could not
        // log in again.
        let replaced = self.shared.iscsi.address_of(&key);
        // A discovery session has no I_T nexus, and uses a separate limit.
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
            credentials: joined.credentials.clone(),
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

    /// Checks if an initiator is still allowed to log in, given its authentication. This was
    /// already checked by `admit` at the start of the login, but the catalog may have changed. If
    /// the rule for this host was removed or now requires authentication, the login should fail.
    fn check_rights(&self, joined: &CompletedLogin) -> Result<(), LoginStatus> {
        let (identity, address) = (&joined.identity, self.address());
        let proved = joined.credentials.as_ref();
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

    /// Creates a session or adds a connection to it. On failure, this logs the reason.
    fn join_session(
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
            // This is called while the table is locked, with the session to be replaced. The
            // initiator may have been blocked since its rights were checked.
            let check = |there: Option<&Session>| {
                self.check_rights(joined)?;
                there.map_or(Ok(()), |there| {
                    self.check_reinstatement(joined, there)
                        .inspect_err(|_| conflict = Some(self.conflict(joined, there)))
                })
            };
            sessions.add_session(session, &candidate, u16::from_ne_bytes(random), check)
        } else {
            let check = |session: &Session, luns: &LunMap| {
                self.check_rights(joined)?;
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
    /// Checks if an initiator has the same rights here as at the address `there` of its existing
    /// session. Names are not secret, so an initiator must not access this session using an address
    /// with different rights.
    fn has_rights_of(&self, target: &TargetDef, initiator: &IscsiName, there: IpAddr) -> bool {
        target.rule_of(initiator, self.address()) == target.rule_of(initiator, there)
    }

    /// Checks if a session with the authentication in `joined` can replace an existing session. The
    /// authentication must be the same: names are not secret, and an initiator with its own CHAP
    /// user could use any initiator name.
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
        // A session can be replaced if its initiator is no longer allowed to log in, because it
        // will be closed soon. The same is true if its CHAP user is no longer accepted.
        let is_allowed = target.luns_of_name(initiator, there.address).is_some()
            && target.is_accepted(initiator, there.address, there.credentials.as_ref());
        let is_same = there.chap_name() == joined.chap_name()
            && self.has_rights_of(target, initiator, there.address);
        if is_allowed && !is_same {
            return Err(LoginStatus::AUTHORIZATION_FAILURE);
        }
        Ok(())
    }

    /// Returns a description of the conflict between a refused login and the existing session for
    /// the same initiator port.
    fn conflict(&self, joined: &CompletedLogin, there: &Session) -> String {
        let identity = |name: Option<&str>| match name {
            Some(name) => format!("CHAP name {name:?}"),
            None => "no CHAP name".to_owned(),
        };
        if there.chap_name() == joined.chap_name() {
            let (here, there) = (self.address(), there.address);
            return format!(
                "the access rule for {here} differs from the rule for {there}, the address of the \
                 existing session"
            );
        }
        let (proved, held) = (identity(joined.chap_name()), identity(there.chap_name()));
        format!(
            "authenticated with {proved}, but the existing session of this initiator port has {held}"
        )
    }

    /// Checks if a connection with the authentication in `joined` can be added to a session.
    fn check_session(
        &self,
        joined: &CompletedLogin,
        session: &Session,
        luns: &LunMap,
    ) -> Result<(), LoginStatus> {
        let initiator = &joined.identity.initiator;
        if let Some(name) = session.ports.as_ref().and(joined.identity.target.as_ref()) {
            // The portal used for this connection may not belong to the target of the session.
            let (target, _) = self.target(name).ok_or(LoginStatus::NOT_FOUND)?;
            if !self.has_rights_of(target, initiator, session.address)
                || session.chap_name() != joined.chap_name()
            {
                return Err(LoginStatus::AUTHORIZATION_FAILURE);
            }
        }
        // The session may have units from a newer catalog, which this worker will use soon.
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
        // Discovery sessions (RFC 7143 13.2) and iSER sessions have a single connection. We also
        // can't mix transports in a session, because the negotiated parameters are different.
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
            let is_blocked = target.blocklist.has_name(initiator);
            self.detail = is_blocked.then(|| BLOCKED.to_owned());
            return refuse(LoginStatus::AUTHORIZATION_FAILURE);
        }
        let iscsi = target.iscsi.as_ref().expect("found by its name");
        let auth = target.auth_of_name(initiator, address);
        let auth = auth.expect("found by its name").clone();
        // This has to be done after checking access. An initiator that is not allowed to log in
        // should not receive any other address.
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
        let (grant, guard) = self.join_session(joined, first)?;
        let SessionGrant { session, .. } = grant;
        // A new session aborts all commands of the session it replaces. A new connection can keep
        // them for reassignment (RFC 7143 6.3.4).
        let how = match identity.tsih.0 {
            0 => Ending::Terminate,
            _ => Ending::of_reinstatement(&session.params),
        };
        let entered = Membership {
            initiator: identity.initiator.clone(),
            isid: identity.isid,
            user: joined.chap_name().map(str::to_owned),
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

    fn refused(
        &mut self,
        status: LoginStatus,
        identity: Option<&Identity>,
        fault: Option<&LoginFault>,
        user: Option<&str>,
    ) {
        let mut who = self.place().nobody();
        who.user = user.map(str::to_owned);
        if let Some(identity) = identity {
            let name = identity.target.as_ref().filter(|_| !identity.discovery);
            who.initiator = Some(port_name(&identity.initiator, identity.isid));
            who.target = name.map(|name| target_name(self.catalog, name));
        }
        let bound = || {
            let is_full = status == LoginStatus::OUT_OF_RESOURCES;
            is_full.then(|| self.shared.registry.reached_bound(self.address()))?
        };
        let detail = self.detail.clone().or(fault.map(LoginFault::to_string));
        let detail = detail.or_else(|| Some(bound()?.to_string()));
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

    fn stop_waiting(&mut self) {
        self.shared.iscsi.stop_waiting(self.channel);
    }

    fn random(&mut self, out: &mut [u8]) {
        self.env.fill_random(out);
    }

    fn targets(
        &mut self,
        initiator: &IscsiName,
        wanted: Option<&IscsiName>,
    ) -> Vec<DiscoveredTarget> {
        let address = self.address();
        let targets = self.catalog.targets.iter();
        let visible = targets.filter_map(|target| {
            let iscsi = target.iscsi.as_ref()?;
            // Don't show targets that the initiator can't use.
            target.luns_of_name(initiator, address)?;
            // Only show targets that use this portal, but include all their portals.
            iscsi.addresses().find(|portal| *portal == self.listen)?;
            wanted
                .is_none_or(|name| iscsi.name == *name)
                .then(|| DiscoveredTarget {
                    name: iscsi.name.clone(),
                    addresses: iscsi
                        .shown_to(self.listen)
                        .map(|listen| TargetAddress::new(listen, iscsi.group))
                        .collect(),
                })
        });
        let visible: Vec<DiscoveredTarget> = visible.collect();
        let place = self.place();
        let who = match self.membership.as_ref() {
            Some(entered) => place.who(self.catalog, entered),
            None => place.nobody(),
        };
        self.logins.audit.discovery(self.now, &who, visible.len());
        visible
    }
}

/// Local and remote address of a connection, for the audit log.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct ConnAddrs {
    pub(in crate::worker) transport: Transport,
    pub(in crate::worker) listen: SocketAddr,
    pub(in crate::worker) peer: SocketAddr,
}

impl ConnAddrs {
    /// Returns the log identity of a peer before login.
    pub(in crate::worker) fn nobody(self) -> Who {
        Who {
            protocol: self.transport.protocol(),
            peer: self.peer.to_string(),
            portal: self.listen.to_string(),
            initiator: None,
            user: None,
            target: None,
            nexus: None,
        }
    }

    /// Returns the log identity of a peer after login.
    pub(in crate::worker) fn who(self, catalog: &Catalog, entered: &Membership) -> Who {
        let target = entered.target.as_ref();
        Who {
            initiator: Some(port_name(&entered.initiator, entered.isid)),
            user: entered.user.clone(),
            target: target.map(|name| target_name(catalog, name)),
            nexus: target.map(|_| entered.nexus.0),
            ..self.nobody()
        }
    }
}

/// Returns the configured name of a target, or the name used by the initiator if it is unknown.
fn target_name(catalog: &Catalog, name: &IscsiName) -> String {
    match catalog.target_named(name) {
        Some(target) => target.config.name.clone(),
        None => name.to_string(),
    }
}

/// Returns the ports of a nexus (RFC 7143 4.4.2).
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

#[cfg(test)]
mod tests {
    use riser_scsi::iscsi::frame::Digests;
    use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
    use riser_scsi::iscsi::{Cid, Isid, Tsih};

    use super::*;
    use crate::config::Config;
    use crate::host::{Host, SystemHost};
    use crate::sessions::blocklist::Initiator;
    use crate::sessions::iscsi::IscsiSessions;

    const NAME: &str = "iqn.2026-01.org.example:host";

    /// An administrator blocks the initiator when its login needs random bytes.
    struct Blocking {
        catalog: Arc<Catalog>,
        sessions: IscsiSessions,
    }

    impl Env for Blocking {
        fn fill_random(&mut self, _: &mut [u8]) {
            let initiator = Initiator::parse(NAME).unwrap();
            let blocklist = &self.catalog.targets[0].blocklist;
            blocklist.block(&[initiator], None, "root").unwrap();
            assert!(self.sessions.change(&self.catalog).is_empty());
        }

        fn host(&self) -> Arc<dyn Host> {
            Arc::new(SystemHost)
        }
    }

    fn completed(target: IscsiName) -> CompletedLogin {
        CompletedLogin {
            identity: Identity {
                initiator: IscsiName::new(NAME).unwrap(),
                target: Some(target),
                discovery: false,
                isid: Isid([0; 6]),
                tsih: Tsih(0),
                cid: Cid(0),
            },
            credentials: None,
            session: SessionParams {
                discovery: false,
                max_connections: 1,
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
            },
            connection: ConnectionParams {
                digests: Digests::default(),
                max_send_segment: 8192,
                max_recv_segment: 8192,
                max_unexpected_pdus: 0,
            },
        }
    }

    /// Nothing would log the session out: the administrator has looked for sessions already.
    #[test]
    fn initiator_blocked_during_login_is_refused() {
        let text = "backends: { a: { kind: ram, size: 1MiB } }\n\
             targets: [{ name: t, iqn: iqn.2026-01.org.example:t, portals: [{ protocol: iscsi, listen: 127.0.0.1 }], luns: { 0: a }, \
             access: open }]\nworkers: { count: 1 }\n";
        let config = Config::parse(text, "test.yaml").unwrap();
        let shared = crate::server::build_shared(&config, None).unwrap();
        let catalog = shared.registry.catalog();
        let iscsi = catalog.targets[0].iscsi.as_ref().unwrap();
        let joined = completed(iscsi.name.clone());
        let mut gate = WorkerGate {
            shared: &shared,
            env: &mut Blocking {
                catalog: Arc::clone(&catalog),
                sessions: shared.iscsi.clone(),
            },
            catalog: &catalog,
            now: Instant::now(),
            transport: Transport::Tcp,
            listen: iscsi.portals[0],
            peer: "127.0.0.1:1".parse().unwrap(),
            channel: ConnRef {
                worker: 0,
                serial: 1,
            },
            commands: 8,
            membership: &mut None,
            ending: &mut Vec::new(),
            logins: &mut LoginLog::default(),
            detail: None,
        };
        let refused = gate.join_session(&joined, CmdSn(1)).err();
        assert_eq!(refused, Some(LoginStatus::AUTHORIZATION_FAILURE));
        assert_eq!(shared.registry.sessions(), 0);
    }
}
