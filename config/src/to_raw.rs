//! Converts a checked [`Config`] back to `raw`, the opposite of `check`. Keys with default values
//! are set to `None` to keep files as short as possible.

use std::collections::BTreeMap;
use std::path::Path;

use riser_scsi::config::{Protection, ProtectionType};
use riser_scsi::iscsi::chap::{ALGORITHMS, Algorithm};

use super::bounded::{Bytes, Number};
use super::io_limits::{BURST, IoLimits};
use super::listen::Written;
use super::model::{
    Access, Backend, Chap, ChapUser, Config, Limits, LinkFaults, Location, Log, LogFormat, Lun,
    Metrics, Portal, Provider, Redirect, Rule, RuleLuns, Secret, Target, Transport, Workers,
};
use super::raw;
use super::source::{Direct, Source, TagOwner};
use super::value::{Count, NaaText, OnOff, Size, Span};
use super::yaml::{Entries, Located};

impl From<&Config> for raw::Root {
    fn from(config: &Config) -> Self {
        let backends = config.backends.iter();
        let backends = backends.map(|b| (b.name.clone(), backend(b).into()));
        let targets = config.targets.iter().map(|t| target(config, t).into());
        Self {
            identity: located(config.identity.clone()),
            strict: config.strict,
            backends: Entries(backends.collect()),
            targets: Some(targets.collect()),
            discovery_chap: located(config.discovery_chap.as_ref().map(chap)),
            workers: workers(&config.workers),
            limits: limits(&config.limits),
            transport: transport(&config.transport),
            admin: raw::Admin {
                socket: location(&config.admin),
            },
            state: raw::State {
                directory: location(&config.state),
            },
            metrics: config.metrics.as_ref().map(metrics).unwrap_or_default(),
            log: log(&config.log),
        }
    }
}

fn located<T>(value: Option<T>) -> Option<Located<T>> {
    value.map(Located::from)
}

/// Returns the value unless it is the default.
fn unless<T: PartialEq>(value: T, default: T) -> Option<T> {
    (value != default).then_some(value)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn backend(backend: &Backend) -> raw::Backend {
    let (spec, names) = (&backend.spec, &backend.names);
    let (kind, size, create) = match spec.source {
        Source::File { size, create, .. } => (raw::Kind::File, size, create),
        Source::Device { .. } => (raw::Kind::Device, None, false),
        Source::Ram { size } => (raw::Kind::Ram, Some(size), false),
        Source::Null { size } => (raw::Kind::Null, Some(size), false),
    };
    raw::Backend {
        kind,
        path: located(spec.source.path().map(text)),
        size: located(size.map(Size)),
        create: located(unless(create, false)),
        block_size: located(unless(spec.block_size.into(), 512)),
        protection: located(spec.protection.map(protection)),
        direct: located(unless(spec.direct, Direct::Auto)),
        write_cache: unless(spec.write_cache, true).map(OnOff),
        read_only: unless(spec.read_only, false),
        thin: unless(backend.thin, true),
        threshold: located(backend.threshold.map(Into::into)),
        stoppable: unless(backend.stoppable, false),
        rotational: backend.rotational,
        serial: located(names.serial.clone()),
        naa: located(names.naa.map(NaaText)),
        vendor: located(names.vendor.clone()),
        product: located(names.product.clone()),
        revision: located(names.revision.clone()),
        limits: located(unless(backend.limits, IoLimits::default()).map(io_limits)),
    }
}

fn protection(protection: Protection) -> raw::Protection {
    let protection_type = match protection.protection_type {
        ProtectionType::Type1 => 1,
        ProtectionType::Type2 => 2,
        ProtectionType::Type3 => 3,
    };
    raw::Protection {
        protection_type: Located::from(protection_type),
        owner: protection.client_owns_tag.then_some(TagOwner::Client),
    }
}

fn io_limits(limits: IoLimits) -> raw::IoLimits {
    raw::IoLimits {
        iops: limits.iops.map(Number::of),
        read_iops: limits.read_iops.map(Number::of),
        write_iops: limits.write_iops.map(Number::of),
        bandwidth: limits.bandwidth.map(Bytes::of),
        read_bandwidth: limits.read_bandwidth.map(Bytes::of),
        write_bandwidth: limits.write_bandwidth.map(Bytes::of),
        burst: located(unless(limits.burst, BURST).map(Span)),
    }
}

fn target(config: &Config, target: &Target) -> raw::Target {
    let portals: Vec<_> = target.portals.iter().map(portal).collect();
    raw::Target {
        name: target.name.clone().into(),
        iqn: located(target.iqn.as_ref().map(ToString::to_string)),
        portals: portals.into(),
        luns: luns(config, &target.luns),
        chap: located(target.chap.as_ref().map(chap)),
        access: match &target.access {
            Access::Open => raw::Access::Open,
            Access::Rules(rules) => {
                let rules = rules.iter().map(|r| rule(config, r).into());
                raw::Access::Rules(rules.collect())
            }
        },
    }
}

fn portal(portal: &Portal) -> raw::Portal {
    raw::Portal {
        protocol: portal.protocol,
        listen: Written::from(portal.listen).into(),
        ioc_guid: portal.set_ioc_guid,
        service_guid: portal.set_service_guid,
        id_ext: portal.set_id_ext,
        redirect: located(portal.redirect.as_ref().map(redirect)),
    }
}

fn redirect(redirect: &Redirect) -> raw::Redirect {
    raw::Redirect {
        to: redirect.to.to_string(),
        permanent: redirect.permanent,
    }
}

fn luns(config: &Config, luns: &BTreeMap<u16, Lun>) -> Entries<u64, Located<raw::Lun>> {
    let luns = luns.iter().map(|(number, lun)| {
        let lun = raw::Lun {
            backend: config.backend(lun).name.clone(),
            read_only: lun.read_only,
        };
        ((*number).into(), lun.into())
    });
    Entries(luns.collect())
}

fn rule(config: &Config, rule: &Rule) -> raw::Rule {
    let luns = rule.luns.as_ref().map(|seen| match seen {
        RuleLuns::Mask(mask) => {
            let numbers = mask.iter().map(|number| u64::from(*number).into());
            raw::RuleLuns::Mask(numbers.collect())
        }
        RuleLuns::Map(map) => raw::RuleLuns::Map(luns(config, map)),
    });
    raw::Rule {
        initiator: rule.initiator,
        iqn: located(rule.iqn.as_ref().map(ToString::to_string)),
        address: rule.address,
        luns,
        chap: located(rule.chap.as_ref().map(chap)),
        limits: located(rule.limits.map(io_limits)),
    }
}

fn chap(chap: &Chap) -> raw::Chap {
    let algorithms = (chap.algorithms != ALGORITHMS).then(|| {
        let names = chap
            .algorithms
            .iter()
            .map(|a: &Algorithm| a.name().to_owned());
        names.map(Located::from).collect::<Vec<_>>()
    });
    raw::Chap {
        users: chap
            .users
            .iter()
            .map(|user| chap_user(user).into())
            .collect(),
        mutual: located(chap.mutual.as_ref().map(chap_user)),
        algorithms: located(algorithms),
    }
}

fn chap_user(user: &ChapUser) -> raw::ChapUser {
    let mut raw = raw::ChapUser {
        name: user.name.clone(),
        secret: None,
        secret_file: None,
        secret_env: None,
        secret_credential: None,
    };
    match &user.secret {
        Secret::Inline(secret) => raw.secret = Some(secret.clone()),
        Secret::File(file) => raw.secret_file = Some(text(file)),
        Secret::Env(name) => raw.secret_env = Some(name.clone()),
        Secret::Credential(name) => raw.secret_credential = Some(name.clone()),
    }
    raw
}

fn workers(workers: &Workers) -> raw::Workers {
    let cpus = workers
        .cpus
        .iter()
        .map(|cpu| Number::of(*cpu as u64).into());
    let cpus = unless(cpus.collect(), Vec::new());
    raw::Workers {
        count: located(workers.count.map(|n| Count(Some(n as u32)))),
        cpus: located(cpus),
    }
}

fn limits(limits: &Limits) -> raw::Limits {
    let default = Limits::default();
    let per_address = unless(limits.sessions_per_address, default.sessions_per_address);
    let transfer = unless(limits.max_transfer, default.max_transfer);
    let pool = unless(limits.buffer_pool >> 20, default.buffer_pool >> 20);
    raw::Limits {
        max_sessions: Number::of(limits.max_sessions.into()),
        sessions_per_address: located(per_address.map(|n| Number::of(n.into()))),
        channels_per_session: Number::of(limits.channels_per_session.into()),
        connections_per_session: Number::of(limits.connections_per_session.into()),
        error_recovery_level: Number::of(limits.error_recovery_level.into()),
        queue_depth: Number::of(limits.queue_depth.into()),
        max_iu_size: Number::of(limits.max_iu_size.into()),
        max_transfer: located(transfer.map(|bytes| Bytes::of(bytes.into()))),
        buffer_pool_mib: located(pool.map(|mib| Number::of(mib as u64))),
        data_out_timeout: Number::of(limits.data_out_timeout.as_secs()),
    }
}

fn transport(transport: &Transport) -> raw::Transport {
    raw::Transport {
        provider: located(unless(transport.provider, Provider::Roce)),
        mtu: located(transport.mtu.map(|mtu| Count(Some(mtu.into())))),
        on_link: unless(transport.on_link, false),
        shm: unless(transport.shm, false),
        administrator: located(transport.administrator.map(|addr| addr.to_string())),
        faults: transport.faults.as_ref().map(faults),
    }
}

/// Faults are written in full, including defaults.
fn faults(faults: &LinkFaults) -> raw::Faults {
    raw::Faults {
        loss: Some(faults.loss),
        duplicate: Some(faults.duplicate),
        reorder: Some(faults.reorder),
        corrupt: Some(faults.corrupt),
        reorder_window: Number::of(faults.reorder_window.into()),
        seed: Some(faults.seed),
    }
}

fn metrics(metrics: &Metrics) -> raw::Metrics {
    raw::Metrics {
        listen: Some(metrics.listen.to_string().into()),
        remote: metrics.remote,
    }
}

fn location(location: &Location) -> Option<Located<String>> {
    match location {
        Location::Default => None,
        Location::At(path) => Some(text(path).into()),
        Location::Off => Some("none".to_owned().into()),
    }
}

fn log(log: &Log) -> raw::Log {
    raw::Log {
        filter: located(unless(log.filter.clone(), "info".to_owned())),
        format: unless(log.format, LogFormat::Text),
        audit: unless(log.audit, true).map(OnOff),
    }
}
