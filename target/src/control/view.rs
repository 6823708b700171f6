//! The objects of the daemon: creates the types in [`riser_admin_api`].
//!
//! Each type is created by one function of an [`Inventory`], and everything that users see is
//! rendered from it: text, JSON, the status page, and metrics.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riser_admin_api::live::LiveShare;
use riser_admin_api::upgrade::UpgradeRecord;
use riser_admin_api::view::initiator_name;
pub use riser_admin_api::view::{
    Changes, DriftView, FlushFailureView, HistoryView, LimitsView, LunView, PortNames, PortalView,
    ProblemView, SessionView, Status, TargetView, WorkerView, Written,
};
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};

use super::history::Entry;
use crate::backend::{FlushFailure, Source};
use crate::config::{Backend, Config, Guid, Listen, ObjectPath, Protocol, diff};
use crate::fabric::{ConnRef, Unit};
use crate::iscsi::Phase;
use crate::qos::{IoLimits, Waits};
use crate::server::Server;
use crate::server::problems::{Problem, Problems, Subject};
use crate::sessions::catalog::{Catalog, PortalDef, TargetDef};
use crate::srp::ChannelParams;
use crate::units::bytes;
use crate::worker::SessionInfo;
use crate::worker::mail::{IscsiSession, Snapshot};

/// Difference between the current configuration and the configuration after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The configuration file contains the current configuration.
    Saved,
    /// The file is different but was not edited since it was last read, so a restart will use the
    /// configuration that was applied last.
    Restored,
    /// A restart will use a different configuration, or none.
    Unsaved,
}

/// Returns the view of unsaved changes; `standing` should be `None` if it has not changed.
#[must_use]
pub fn written(drift: Vec<DriftView>, standing: Option<Standing>) -> Written {
    Written {
        drift,
        unsaved: standing == Some(Standing::Unsaved),
        restored: standing == Some(Standing::Restored),
    }
}

/// Returns the backends that are currently larger than configured.
#[must_use]
pub fn drift(server: &Server, config: &Config) -> Vec<DriftView> {
    let view = |backend: &Backend| {
        let Source::File { size, .. } = backend.spec.source else {
            return None;
        };
        let (configured, served) = (size?, server.capacity_of(&backend.name)?);
        (served > configured).then(|| DriftView {
            path: ObjectPath::default()
                .join("backends")
                .join(&backend.name)
                .join("size")
                .to_string(),
            configured,
            served,
        })
    };
    config.backends.iter().filter_map(view).collect()
}

/// Returns warnings for backends that will be larger than the free space on their file system. This
/// is possible with sparse files, but writes will fail once the file system is full.
#[must_use]
pub fn warnings(server: &Server, old: &Config, new: &Config) -> Vec<String> {
    let size = |backend: &Backend| match backend.spec.source {
        Source::File { size, .. } => size,
        Source::Device { .. } | Source::Ram { .. } | Source::Null { .. } => None,
    };
    let warning = |backend: &Backend| {
        let before = old.backends.iter().find(|b| b.name == backend.name);
        let wanted = size(backend).filter(|_| before.and_then(size) != size(backend))?;
        let (_, store) = server.backends().find(|(name, _)| *name == backend.name)?;
        let space = store.space()?;
        let room = space.allocated.saturating_add(space.free);
        (wanted > room).then(|| {
            format!(
                "backend {}: its size is {}, but its file system only has space for {}; writes \
                 will fail when it is full",
                backend.name,
                bytes(wanted),
                bytes(room)
            )
        })
    };
    let mut warnings: Vec<_> = new.backends.iter().filter_map(warning).collect();
    if old.log.filter != new.log.filter && super::logging::is_filter_overridden() {
        warnings
            .push("log.filter has no effect because RUST_LOG is set in the environment".to_owned());
    }
    warnings
}

/// Returns the previous configurations, newest first.
#[must_use]
pub fn history(entries: &[Entry]) -> Vec<HistoryView> {
    // A configuration from an older daemon may not be valid in this version.
    let configs = entries
        .iter()
        .map(|entry| Config::parse(&entry.yaml, "history").ok());
    let configs: Vec<_> = configs.collect();
    let changes = |back: usize| {
        let before = configs.get(back + 1)?.as_ref()?;
        Some(diff(before, configs[back].as_ref()?))
    };
    let entries = entries.iter().enumerate();
    let view = |(back, entry): (usize, &Entry)| HistoryView {
        back,
        time: entry.time,
        who: entry.who.clone(),
        how: entry.how.clone(),
        changes: changes(back).unwrap_or_default(),
    };
    entries.map(view).collect()
}

/// The objects of the daemon at a point in time.
#[derive(Debug)]
pub struct Inventory<'a> {
    pub(super) server: &'a Server,
    pub(super) catalog: Arc<Catalog>,
    problems: OnceCell<Problems>,
    snapshots: OnceCell<Vec<Snapshot>>,
}

impl<'a> Inventory<'a> {
    /// Creates an inventory. Workers are only queried when an object requires their counters or
    /// sessions.
    #[must_use]
    pub fn new(server: &'a Server) -> Self {
        Self {
            server,
            catalog: server.shared().registry.catalog(),
            problems: OnceCell::new(),
            snapshots: OnceCell::new(),
        }
    }

    /// Returns all problems.
    pub(super) fn problems(&self) -> &Problems {
        self.problems.get_or_init(|| self.server.problems())
    }

    /// Returns the counters and sessions of each worker that responds.
    pub(super) fn snapshots(&self) -> &[Snapshot] {
        self.snapshots.get_or_init(|| self.server.snapshot())
    }

    /// Returns the current status.
    #[must_use]
    pub fn status(
        &self,
        uptime: Duration,
        upgrade_record: &UpgradeRecord,
        standing: Standing,
    ) -> Status {
        let drift = drift(self.server, self.server.config());
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime: uptime.as_secs(),
            sessions: self.server.sessions(),
            workers: self.workers(),
            problems: self.problem_views(),
            scrubs: self.server.scrubs(),
            blocked: self.server.blocklist().list(),
            written: written(drift, Some(standing)),
            upgrade_record: upgrade_record.clone(),
        }
    }

    pub(super) fn workers(&self) -> Vec<WorkerView> {
        self.snapshots().iter().map(worker).collect()
    }

    pub(super) fn problem_views(&self) -> Vec<ProblemView> {
        self.problems().iter().map(problem).collect()
    }

    /// Returns the view of a subject's problem.
    pub(super) fn problem_of(&self, subject: &Subject) -> Option<ProblemView> {
        let found = self.problems().of(subject);
        found.map(|found| problem((subject, found)))
    }

    /// Returns the current connections, ordered by target, initiator and nexus.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionView> {
        let (_, mut views): (Vec<_>, Vec<_>) = self.connections().into_iter().unzip();
        let key = |v: &SessionView| (v.target.clone(), v.initiator.clone(), v.nexus, v.worker);
        views.sort_by_cached_key(key);
        views
    }

    /// Returns the connections of an initiator or a session number. `name` can be an initiator port
    /// as returned by [`Inventory::sessions`], an iSCSI name without the ISID, or the number of an
    /// I_T nexus.
    #[must_use]
    pub fn sessions_named(&self, name: &str) -> (Vec<ConnRef>, Vec<SessionView>) {
        let is_named = |(_, view): &(ConnRef, SessionView)| {
            let nexus = view.nexus.map(|nexus| nexus.to_string());
            [&*view.initiator, initiator_name(&view.initiator)].contains(&name)
                || nexus.as_deref() == Some(name)
        };
        let connections = self.connections().into_iter();
        connections.filter(is_named).unzip()
    }

    fn connections(&self) -> Vec<(ConnRef, SessionView)> {
        let mut connections = Vec::new();
        for snapshot in self.snapshots() {
            let worker = snapshot.worker;
            // An initiator with channels on several workers has a separate account on each of them,
            // and every channel reports the whole account of its worker.
            let mut shares: BTreeMap<(&str, &str), LiveShare> = BTreeMap::new();
            for entry in &snapshot.accounts {
                let key = (&*entry.initiator, entry.account.lun().target());
                *shares.entry(key).or_default() += entry.account.share();
            }
            let srp = snapshot.sessions.iter();
            let srp = srp.map(|s| (s.serial, srp_view(s, &self.catalog)));
            let iscsi = snapshot.iscsi_sessions.iter();
            let iscsi = iscsi.map(|s| (s.serial, iscsi_view(worker, s, &self.catalog)));
            connections.extend(srp.chain(iscsi).map(|(serial, mut view)| {
                let share = shares.get(&(&*view.initiator, &*view.target));
                let share = share.copied().unwrap_or_default();
                (view.commands, view.bytes) = (share.commands, share.read + share.written);
                (view.read, view.written) = (share.read, share.written);
                (ConnRef { worker, serial }, view)
            }));
        }
        connections
    }

    /// Returns the active targets.
    #[must_use]
    pub fn targets(&self) -> Vec<TargetView> {
        let view = |target: &TargetDef| TargetView {
            name: target.config.name.clone(),
            iqn: target.config.iqn.as_ref().map(ToString::to_string),
            portals: self.portals(target).map(|(_, portal)| portal).collect(),
            luns: target
                .units
                .iter()
                .map(|(number, unit)| (*number, self.lun(target, *number, unit)))
                .collect(),
        };
        self.catalog.targets.iter().map(view).collect()
    }

    /// Returns the portals of a target with their addresses. This includes wildcards that are not
    /// fully available.
    pub(super) fn portals(
        &self,
        target: &TargetDef,
    ) -> impl Iterator<Item = ((Protocol, Listen), PortalView)> {
        let view = move |protocol: Protocol, listen: Listen, subject: &Subject| PortalView {
            protocol: protocol.to_string(),
            listen: listen.to_string(),
            names: None,
            problem: self.problem_of(subject),
        };
        let served = target.listens.iter().map(move |(protocol, at)| {
            let (key, subject) = ((*protocol, (*at).into()), Subject::portal(*protocol, *at));
            let mut portal = view(key.0, key.1, &subject);
            if *protocol == Protocol::Srp {
                let def = target.portals.iter().find(|def| def.listen == *at);
                portal.names = def.map(port_names);
            }
            (key, portal)
        });
        let wildcards = target.config.portals.iter().map(move |portal| {
            let (protocol, listen) = (portal.protocol, portal.listen);
            let subject = Subject::Wildcard(listen, protocol);
            ((protocol, listen), view(protocol, listen, &subject))
        });
        served.chain(wildcards.filter(|(_, portal)| portal.problem.is_some()))
    }

    /// Returns a logical unit of a target.
    pub(super) fn lun(&self, target: &TargetDef, number: u16, unit: &Unit) -> LunView {
        let (lu, config) = (&unit.lu, unit.lu.config());
        let store = self.catalog.store_of(unit);
        let backend = target.config.luns.get(&number);
        let backend = backend.map(|lun| self.server.config().backend(lun).name.clone());
        let backend = backend.unwrap_or_default();
        LunView {
            serial: config.identity.serial.clone(),
            wwn: lu.has_names().then(|| config.identity.naa.to_string()),
            problem: self.problem_of(&Subject::Backend(backend.clone())),
            backend,
            size: store
                .is_some_and(|store| !store.is_absent())
                .then(|| lu.capacity_bytes()),
            block_size: config.block_size.bytes(),
            read_only: target.is_read_only(number),
            flush_failure: store
                .and_then(|store| store.flush_failure())
                .map(flush_failure_view),
            limits: unit
                .limits
                .is_active()
                .then(|| limits_view(unit.limits.view())),
        }
    }
}

/// Returns the view of a problem.
pub(super) fn problem((subject, problem): (&Subject, &Problem)) -> ProblemView {
    ProblemView {
        kind: subject.kind().to_owned(),
        name: subject.name(),
        error: problem.why.clone(),
        since: seconds(problem.since),
        failing: problem.is_failing(),
        cause: problem.cause.map(|cause| cause.label().to_owned()),
        state: problem.state().to_owned(),
    }
}

/// Returns a time in seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn worker(snapshot: &Snapshot) -> WorkerView {
    let sessions = |srp: fn(&SessionInfo) -> usize, iscsi: fn(&IscsiSession) -> usize| {
        let srp = snapshot.sessions.iter().map(srp);
        srp.chain(snapshot.iscsi_sessions.iter().map(iscsi)).sum()
    };
    WorkerView {
        worker: snapshot.worker,
        logins: snapshot.logins.total(),
        rejects: snapshot.rejects.total(),
        commands: snapshot.counters.commands + snapshot.iscsi.commands,
        pool: snapshot.pool_size,
        pool_free: snapshot.pool_free,
        pool_lowest: snapshot.pool_lowest,
        parks: snapshot.parks,
        busy: snapshot.busy.as_secs_f64(),
        ran: snapshot.ran.as_secs_f64(),
        // For SRP, the limit is the request limit from the login; for iSCSI, it is the number of
        // commands per session.
        contexts: sessions(
            |srp| srp.params.req_lim as usize,
            |iscsi| iscsi.info.commands.into(),
        ),
        contexts_in_use: sessions(|srp| srp.in_flight, |iscsi| iscsi.info.in_flight),
    }
}

fn srp_view(info: &SessionInfo, catalog: &Catalog) -> SessionView {
    SessionView {
        protocol: Protocol::Srp.to_string(),
        target: catalog
            .target_of(&info.target)
            .map_or_else(|| info.target.to_string(), |t| t.config.name.clone()),
        initiator: info.initiator.to_string(),
        peer: info.peer.to_string(),
        provider: Some(info.provider.to_owned()),
        worker: info.worker,
        nexus: Some(info.nexus),
        state: format!("{:?}", info.state).to_lowercase(),
        in_flight: info.in_flight,
        luns: info.luns,
        memory: info.params.memory().total(),
        negotiated: srp_terms(&info.params),
        limits: info.limits.map(limits_view),
        ..SessionView::default()
    }
}

fn srp_terms(params: &ChannelParams) -> BTreeMap<String, String> {
    let immediate = params.immediate.is_some();
    named([
        ("request_limit", params.req_lim.to_string()),
        ("max_it_iu_len", params.max_it_iu_len.to_string()),
        ("max_ti_iu_len", params.max_ti_iu_len.to_string()),
        ("immediate_data", yes(immediate)),
    ])
}

fn iscsi_view(worker: u16, session: &IscsiSession, catalog: &Catalog) -> SessionView {
    let info = &session.info;
    let protocol = match session.provider {
        Some(_) => Protocol::Iser,
        None => Protocol::Iscsi,
    };
    // An initiator may send a target name in a discovery session as well.
    let target = info.identity.target.as_ref();
    let target = target.filter(|_| !info.params.discovery).map(|name| {
        let target = catalog.target_named(name);
        target.map_or_else(|| name.to_string(), |t| t.config.name.clone())
    });
    SessionView {
        protocol: protocol.to_string(),
        target: target.unwrap_or_default(),
        initiator: info.initiator(),
        peer: session.peer.to_string(),
        provider: session.provider.map(str::to_owned),
        worker,
        nexus: (!info.params.discovery).then_some(info.nexus.0),
        state: phase(info.phase).to_owned(),
        in_flight: info.in_flight,
        digest_errors: info.digest_errors,
        luns: info.luns,
        memory: session.memory,
        negotiated: iscsi_terms(&info.params, &info.connection),
        limits: info.limits.map(limits_view),
        ..SessionView::default()
    }
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Login | Phase::Joining => "login",
        Phase::FullFeature => "live",
        Phase::LoggingOut(_) => "logging out",
        Phase::Closing => "closing",
        Phase::CleanupWait => "lost",
        Phase::Retaining => "recovering",
        Phase::Closed => "closed",
    }
}

/// Returns the login keys of RFC 7143 chapter 13 and RFC 7145 chapter 6 with their values.
fn iscsi_terms(session: &SessionParams, connection: &ConnectionParams) -> BTreeMap<String, String> {
    // iSER has a separate key for each direction. Without iSER, each side declares the same key, so
    // we need to add the side to the name.
    let (to_initiator, to_target) = if session.rdma_extensions && !session.discovery {
        (
            "InitiatorRecvDataSegmentLength",
            "TargetRecvDataSegmentLength",
        )
    } else {
        (
            "MaxRecvDataSegmentLength (initiator)",
            "MaxRecvDataSegmentLength (target)",
        )
    };
    let digest = |on: bool| if on { "CRC32C" } else { "None" }.to_owned();
    named([
        (
            "SessionType",
            if session.discovery {
                "Discovery"
            } else {
                "Normal"
            }
            .to_owned(),
        ),
        ("MaxConnections", session.max_connections.to_string()),
        ("InitialR2T", yes(session.initial_r2t)),
        ("ImmediateData", yes(session.immediate_data)),
        ("MaxBurstLength", session.max_burst.to_string()),
        ("FirstBurstLength", session.first_burst.to_string()),
        ("MaxOutstandingR2T", session.max_outstanding_r2t.to_string()),
        ("DefaultTime2Wait", session.time2wait.to_string()),
        ("DefaultTime2Retain", session.time2retain.to_string()),
        (
            "ErrorRecoveryLevel",
            session.error_recovery_level.to_string(),
        ),
        ("DataPDUInOrder", yes(session.data_pdu_in_order)),
        ("DataSequenceInOrder", yes(session.data_sequence_in_order)),
        ("RDMAExtensions", yes(session.rdma_extensions)),
        ("iSCSIProtocolLevel", session.protocol_level.to_string()),
        ("HeaderDigest", digest(connection.digests.header)),
        ("DataDigest", digest(connection.digests.data)),
        (to_initiator, connection.max_send_segment.to_string()),
        (to_target, connection.max_recv_segment.to_string()),
    ])
}

fn yes(on: bool) -> String {
    if on { "Yes" } else { "No" }.to_owned()
}

fn named<const N: usize>(terms: [(&str, String); N]) -> BTreeMap<String, String> {
    terms.map(|(name, value)| (name.to_owned(), value)).into()
}

fn port_names(def: &PortalDef) -> PortNames {
    PortNames {
        ioc_guid: Guid(def.ioc_guid).to_string(),
        service_guid: Guid(def.service_id).to_string(),
        id_ext: Guid(def.id_ext).to_string(),
    }
}

/// Returns the view of rate limits with their wait times.
fn limits_view((limits, waits): (IoLimits, Waits)) -> LimitsView {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let rates = limits.named().into_iter();
    let rates = rates.filter_map(|(name, rate)| Some((name.to_owned(), rate?)));
    LimitsView {
        rates: rates.collect(),
        burst_ms: millis(limits.burst),
        waits: waits.commands,
        waited_ms: millis(waits.time),
    }
}

/// Returns the view of a failed flush.
fn flush_failure_view(failure: FlushFailure) -> FlushFailureView {
    FlushFailureView {
        error: io::Error::from_raw_os_error(failure.errno).to_string(),
        at: seconds(failure.at),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use riser_admin_api::view::count_nexuses;

    use super::*;

    /// RFC 7143 6.3 does not forbid a target name in a discovery session.
    #[test]
    fn discovery_session_has_no_target() {
        let config = Config::parse(
            "backends: { a: { kind: ram, size: 1MiB } }\n\
             targets:\n\
             - name: iqn.2026-01.com.example:t\n\
             \x20 portals: [{ protocol: iscsi, listen: \"127.97.8.10:3290\" }]\n\
             \x20 luns: { 0: a }\n\
             \x20 access: open\n\
             workers: { count: 1 }\n",
            "test.yaml",
        );
        let server = Server::start(&config.unwrap()).unwrap();
        let keys = "InitiatorName=iqn.2026-01.com.example:me\0SessionType=Discovery\0\
                    TargetName=iqn.2026-01.com.example:t\0";
        let mut pdu = vec![0u8; 48];
        (pdu[0], pdu[1], pdu[7], pdu[8]) = (0x43, 0x87, keys.len() as u8, 0x80);
        pdu.extend(keys.as_bytes());
        pdu.resize(pdu.len().next_multiple_of(4), 0);
        let mut stream = std::net::TcpStream::connect("127.97.8.10:3290").unwrap();
        stream.write_all(&pdu).unwrap();
        let mut bhs = [0; 48];
        stream.read_exact(&mut bhs).unwrap();
        assert_eq!((bhs[0], bhs[36]), (0x23, 0), "the login succeeds");
        let sessions = Inventory::new(&server).sessions();
        assert_eq!((sessions.len(), &*sessions[0].target), (1, ""));
        assert_eq!(count_nexuses(&sessions), server.sessions());
        server.shutdown().unwrap();
    }

    #[test]
    fn wildcard_without_address_is_listed() {
        let config = Config::parse(
            "backends: { a: { kind: ram, size: 1MiB } }\n\
             targets:\n\
             - name: t\n\
             \x20 iqn: iqn.2026-01.com.example:t\n\
             \x20 portals:\n\
             \x20 - { protocol: iscsi, listen: \"127.97.8.7:3290\" }\n\
             \x20 - { protocol: iscsi, listen: \"none0:3290\" }\n\
             \x20 luns: { 0: a }\n\
             \x20 access: open\n\
             workers: { count: 1 }\n",
            "test.yaml",
        );
        let server = Server::start(&config.unwrap()).unwrap();
        let inventory = Inventory::new(&server);
        let targets = inventory.targets();
        let portals = targets[0].portals.iter();
        let found: Vec<_> = portals
            .map(|portal| (&*portal.listen, portal.problem.is_some()))
            .collect();
        assert_eq!(found, [("127.97.8.7:3290", false), ("none0:3290", true)]);
        let live = inventory.live(Duration::ZERO, Standing::Saved);
        let found = live.portals.iter();
        let found: Vec<_> = found
            .map(|live| (&*live.portal.listen, live.is_listening))
            .collect();
        assert_eq!(found, [("127.97.8.7:3290", true), ("none0:3290", false)]);
        assert_eq!(live.luns[0].unit, targets[0].luns[&0]);
        drop(inventory);
        server.shutdown().unwrap();
    }
}
