//! Admin API views of the daemon: creates the types in [`riser_admin_api`].

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riser_admin_api::upgrade::UpgradeRecord;
pub use riser_admin_api::view::{
    Changes, DriftView, FlushFailureView, HistoryView, LimitsView, LunView, PortNames, PortalView,
    ProblemView, SessionView, Status, TargetView, WorkerView, Written,
};
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};

use super::history::Entry;
use crate::backend::{FlushFailure, Source};
use crate::config::{Backend, Config, Guid, ObjectPath, Protocol, diff};
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

/// Returns the current status.
#[must_use]
pub fn status(
    server: &Server,
    uptime: u64,
    upgrade_record: &UpgradeRecord,
    standing: Standing,
) -> Status {
    let snapshots = server.snapshot();
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime,
        sessions: server.sessions(),
        workers: snapshots.iter().map(worker).collect(),
        problems: problems(server),
        blocked: server.blocklist().list(),
        written: written(drift(server, server.config()), Some(standing)),
        upgrade_record: upgrade_record.clone(),
    }
}

fn problems(server: &Server) -> Vec<ProblemView> {
    let problems = server.problems();
    problems.iter().map(problem).collect()
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

/// Returns the view of a subject's problem.
fn problem_of(problems: &Problems, subject: &Subject) -> Option<ProblemView> {
    problems.of(subject).map(|found| problem((subject, found)))
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn worker(snapshot: &Snapshot) -> WorkerView {
    WorkerView {
        worker: snapshot.worker,
        logins: snapshot.logins.total(),
        rejects: snapshot.rejects.total(),
        commands: snapshot.counters.commands + snapshot.iscsi.commands,
        pool: snapshot.pool_size,
        pool_free: snapshot.pool_free,
        pool_lowest: snapshot.pool_lowest,
        parks: snapshot.parks,
    }
}

/// Returns the current sessions, ordered by target, initiator and nexus.
#[must_use]
pub fn sessions(server: &Server) -> Vec<SessionView> {
    let catalog = server.shared().registry.catalog();
    sessions_of(&server.snapshot(), &catalog)
}

/// Returns the connections of an initiator or a session number, with their views. `name` can be an
/// initiator port as returned by [`sessions`], an iSCSI name without the ISID, or the number of an
/// I_T nexus.
#[must_use]
pub fn sessions_named(server: &Server, name: &str) -> (Vec<ConnRef>, Vec<SessionView>) {
    let catalog = server.shared().registry.catalog();
    let is_named = |view: &SessionView| {
        let initiator = view.initiator.split_once(',');
        let initiator = initiator.map_or(&*view.initiator, |(name, _)| name);
        let nexus = view.nexus.map(|nexus| nexus.to_string());
        view.initiator == name || initiator == name || nexus.as_deref() == Some(name)
    };
    let mut found = Vec::new();
    for snapshot in server.snapshot() {
        let worker = snapshot.worker;
        let srp_sessions = snapshot.sessions.iter();
        found.extend(srp_sessions.map(|s| (s.serial, srp(s, &catalog))));
        let iscsi_sessions = snapshot.iscsi_sessions.iter();
        found.extend(iscsi_sessions.map(|s| (s.serial, iscsi_view(worker, s, &catalog))));
    }
    found.retain(|(_, view)| is_named(view));
    let channel = |(serial, view): (u64, SessionView)| {
        let worker = view.worker;
        (ConnRef { worker, serial }, view)
    };
    found.into_iter().map(channel).unzip()
}

/// Same, based on worker snapshots.
pub(super) fn sessions_of(snapshots: &[Snapshot], catalog: &Catalog) -> Vec<SessionView> {
    let mut views: Vec<SessionView> = snapshots
        .iter()
        .flat_map(|snapshot| {
            let srp = snapshot.sessions.iter().map(|s| srp(s, catalog));
            let iscsi = snapshot.iscsi_sessions.iter();
            srp.chain(iscsi.map(|s| iscsi_view(snapshot.worker, s, catalog)))
        })
        .collect();
    views.sort_by(|a, b| {
        let key = |v: &SessionView| (v.target.clone(), v.initiator.clone(), v.nexus, v.worker);
        key(a).cmp(&key(b))
    });
    views
}

fn srp(info: &SessionInfo, catalog: &Catalog) -> SessionView {
    SessionView {
        protocol: Protocol::Srp.to_string(),
        target: catalog
            .target_of(&info.target)
            .map_or_else(String::new, |t| t.config.name.clone()),
        initiator: info.initiator.to_string(),
        peer: info.peer.to_string(),
        provider: Some(info.provider.to_owned()),
        worker: info.worker,
        nexus: Some(info.nexus),
        state: format!("{:?}", info.state).to_lowercase(),
        in_flight: info.in_flight,
        digest_errors: 0,
        luns: info.luns,
        memory: info.params.memory().total(),
        negotiated: srp_terms(&info.params),
        limits: info.limits.map(limits_view),
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
    let target = info.identity.target.as_ref();
    let target = target.and_then(|name| catalog.target_named(name));
    SessionView {
        protocol: protocol.to_string(),
        target: target.map_or_else(String::new, |t| t.config.name.clone()),
        initiator: format!("{},{}", info.identity.initiator, info.identity.isid),
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

/// Returns the active targets.
#[must_use]
pub fn targets(server: &Server) -> Vec<TargetView> {
    let catalog = server.shared().registry.catalog();
    let problems = server.problems();
    let view = |t: &TargetDef| TargetView {
        name: t.config.name.clone(),
        iqn: t.config.iqn.as_ref().map(ToString::to_string),
        portals: t
            .listens
            .iter()
            .map(|(protocol, listen)| PortalView {
                protocol: protocol.to_string(),
                listen: listen.to_string(),
                names: (*protocol == Protocol::Srp)
                    .then(|| t.portals.iter().find(|def| def.listen == *listen))
                    .flatten()
                    .map(port_names),
                problem: problem_of(&problems, &Subject::portal(*protocol, *listen)),
            })
            .collect(),
        luns: t
            .units
            .iter()
            .map(|(number, unit)| {
                let backend = backend_of(server, t, *number);
                let view = LunView {
                    backend: backend.to_owned(),
                    problem: problem_of(&problems, &Subject::Backend(backend.to_owned())),
                    ..lun(unit, t.is_read_only(*number), &catalog)
                };
                (*number, view)
            })
            .collect(),
    };
    catalog.targets.iter().map(view).collect()
}

/// Returns the backend name for a target's logical unit.
pub(super) fn backend_of<'a>(server: &'a Server, target: &TargetDef, number: u16) -> &'a str {
    let lun = target.config.luns.get(&number);
    lun.map_or("", |lun| &server.config().backend(lun).name)
}

/// Returns the capacity of a logical unit in bytes, or `None` if its backend is not open.
pub(super) fn size_of(unit: &Unit, catalog: &Catalog) -> Option<u64> {
    let is_open = catalog.store_of(unit).is_some_and(|s| !s.is_absent());
    is_open.then(|| unit.lu.capacity_bytes())
}

fn port_names(def: &PortalDef) -> PortNames {
    PortNames {
        ioc_guid: Guid(def.ioc_guid).to_string(),
        service_guid: Guid(def.service_id).to_string(),
        id_ext: Guid(def.id_ext).to_string(),
    }
}

fn lun(unit: &Unit, read_only: bool, catalog: &Catalog) -> LunView {
    let lu = &unit.lu;
    let config = lu.config();
    let failure = catalog
        .store_of(unit)
        .and_then(|store| store.flush_failure());
    let block_size = config.block_size.bytes();
    LunView {
        backend: String::new(),
        problem: None,
        serial: config.identity.serial.clone(),
        wwn: lu.has_names().then(|| config.identity.naa.to_string()),
        size: size_of(unit, catalog),
        block_size,
        read_only,
        flush_failure: failure.map(flush_failure_view),
        limits: unit
            .limits
            .is_active()
            .then(|| limits_view(unit.limits.view())),
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
