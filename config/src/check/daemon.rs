//! Checks for daemon-wide settings: workers, limits, transport, log, metrics, directories.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use crate::mistake::{Checked, Mistake};
use crate::model::{
    Limits, LinkFaults, Location, Log, Metrics, Protocol, Provider, Target, Transport, WINDOW,
    Workers,
};
use crate::raw;
use crate::value::Percent;
use crate::yaml::{At, Located};

pub(super) fn workers(raw: raw::Workers) -> Checked<Workers> {
    let count = match &raw.count {
        None => None,
        Some(c) => match c.value.0 {
            None => None,
            Some(n @ 1..=1024) => Some(n as usize),
            Some(n) => {
                let message = format!("must be auto or from 1 to 1024, not {n}");
                return Err(Mistake::new(c.at, "workers.count", message));
            }
        },
    };
    let mut cpus = Vec::new();
    for (i, c) in raw.cpus.iter().flat_map(|l| &l.value).enumerate() {
        let place = format!("workers.cpus[{i}]");
        let cpu = c.value.get() as usize;
        if cpus.contains(&cpu) {
            return Err(Mistake::new(c.at, place, format!("duplicate CPU {cpu}")));
        }
        cpus.push(cpu);
    }
    // Two workers on the same CPU would delay each other, because a busy worker polls.
    if let (Some(list), Some(count)) = (&raw.cpus, count)
        && !cpus.is_empty()
        && cpus.len() < count
    {
        let message = format!("{} CPUs for {count} workers", cpus.len());
        return Err(Mistake::new(list.at, "workers.cpus", message));
    }
    Ok(Workers { count, cpus })
}

/// Uses the default values from the schema.
impl Default for Limits {
    fn default() -> Self {
        limits(raw::Limits::default()).expect("defaults fit each other")
    }
}

pub(super) fn limits(raw: raw::Limits) -> Checked<Limits> {
    let given = raw.max_transfer.as_ref().map(|max| max.value);
    let max_transfer = given.unwrap_or_default().get() as u32;
    let given = raw.buffer_pool_mib.as_ref().map(|pool| pool.value);
    let mib = given.unwrap_or_default().get();
    let buffer_pool = (mib as usize) << 20;
    let given = raw.sessions_per_address.as_ref().map(|most| most.value);
    let queue_depth = raw.queue_depth.get() as u32;
    let limits = Limits {
        max_sessions: raw.max_sessions.get() as u32,
        sessions_per_address: given.unwrap_or_default().get() as u32,
        channels_per_session: raw.channels_per_session.get() as u32,
        connections_per_session: raw.connections_per_session.get() as u32,
        error_recovery_level: raw.error_recovery_level.get() as u32,
        queue_depth,
        max_iu_size: raw.max_iu_size.get() as u32,
        max_transfer,
        window: max_transfer.min(WINDOW),
        send_queue: (4 * queue_depth).max(64),
        buffer_pool,
        data_out_timeout: Duration::from_secs(raw.data_out_timeout.get()),
    };
    // If two keys don't match, report the key that is set.
    if buffer_pool < limits.window as usize * 2
        && let Some(at) = [
            raw.buffer_pool_mib.as_ref().map(|v| v.at),
            raw.max_transfer.as_ref().map(|v| v.at),
        ]
        .into_iter()
        .flatten()
        .next()
    {
        let message = format!("{mib} MiB of buffers are not enough for two commands");
        return Err(Mistake::new(at, "limits.buffer_pool_mib", message));
    }
    if let Some(v) = &raw.sessions_per_address
        && limits.sessions_per_address > limits.max_sessions
    {
        let message = format!(
            "must not exceed max_sessions, which is {}",
            limits.max_sessions
        );
        return Err(Mistake::new(v.at, "limits.sessions_per_address", message));
    }
    Ok(limits)
}

pub(super) fn transport(raw: raw::Transport) -> Checked<Transport> {
    let mtu = match &raw.mtu {
        None => None,
        Some(m) => match m.value.0 {
            None => None,
            Some(n @ (256 | 512 | 1024 | 2048 | 4096)) => Some(n as u16),
            Some(n) => {
                let message = format!("must be auto, 256, 512, 1024, 2048 or 4096, not {n}");
                return Err(Mistake::new(m.at, "transport.mtu", message));
            }
        },
    };
    let is_own_wire = |p: &&Located<Provider>| matches!(p.value, Provider::Shm | Provider::Iwarp);
    if let Some(provider) = raw.provider.as_ref().filter(is_own_wire) {
        let is_iwarp = provider.value == Provider::Iwarp;
        // These keys would have no effect.
        let useless = [
            ("mtu", mtu.is_some()),
            ("on_link", raw.on_link == Some(true)),
            ("administrator", raw.administrator.is_some()),
            ("faults", raw.faults.is_some()),
            ("shm", raw.shm == Some(true) && !is_iwarp),
        ];
        if let Some((key, _)) = useless.into_iter().find(|(_, is_set)| *is_set) {
            let message = match key {
                "shm" => {
                    "provider shm always shares memory; `shm: true` is only for the other providers"
                        .into()
                }
                key if is_iwarp => {
                    format!("provider iwarp uses TCP; `{key}` only applies to RoCE packets")
                }
                key => format!("provider shm does not use a network; `{key}` is not supported"),
            };
            return Err(Mistake::new(provider.at, "transport.provider", message));
        }
    }
    let is_rdma_core = |p: &&Located<Provider>| p.value == Provider::RdmaCore;
    if let (Some(provider), Some(_)) = (
        raw.provider.as_ref().filter(is_rdma_core),
        &raw.administrator,
    ) {
        let message = "provider rdma_core cannot register ports; `administrator` only applies to the software NIC";
        return Err(Mistake::new(provider.at, "transport.provider", message));
    }
    let administrator = raw.administrator.as_ref().map(administrator).transpose()?;
    let share = |share: Option<Percent>| share.unwrap_or(Percent::ZERO);
    let faults = raw.faults.map(|faults| LinkFaults {
        loss: share(faults.loss),
        duplicate: share(faults.duplicate),
        reorder: share(faults.reorder),
        corrupt: share(faults.corrupt),
        reorder_window: faults.reorder_window.get() as u32,
        seed: faults.seed.unwrap_or(1),
    });
    Ok(Transport {
        provider: raw.provider.map_or_else(Provider::default, |p| p.value),
        mtu,
        on_link: raw.on_link.unwrap_or(false),
        shm: raw.shm.unwrap_or(false),
        administrator,
        faults,
    })
}

fn administrator(raw: &Located<String>) -> Checked<IpAddr> {
    let mistake = |what| {
        let message = format!("`{}` is not {what}", raw.value);
        Mistake::new(raw.at, "transport.administrator", message)
    };
    let addr: IpAddr = raw.value.parse().map_err(|_| mistake("an IP address"))?;
    let is_broadcast = addr == IpAddr::from(Ipv4Addr::BROADCAST);
    if addr.is_unspecified() || addr.is_multicast() || is_broadcast {
        return Err(mistake("the address of a host"));
    }
    Ok(addr)
}

/// Checks RDMA portals whose port numbers are also used for TCP.
pub(super) fn iwarp(provider: Option<(At, Provider)>, targets: &[Target]) -> Checked<()> {
    let Some((at, Provider::Iwarp)) = provider else {
        return Ok(());
    };
    let mistake = |message: String| Mistake::new(at, "transport.provider", message);
    let portals = || {
        let all = targets.iter();
        all.flat_map(|target| target.portals.iter().map(move |portal| (target, portal)))
    };
    if let Some((target, _)) = portals().find(|(_, p)| p.protocol == Protocol::Srp) {
        let message = format!(
            "target `{}` has an SRP portal, but SRP is not supported over iWARP",
            target.name
        );
        return Err(mistake(message).hint("use iSER: `protocol: iser`"));
    }
    let of = |protocol| portals().filter(move |(_, portal)| portal.protocol == protocol);
    for (target, iser) in of(Protocol::Iser) {
        if of(Protocol::Iscsi).any(|(_, iscsi)| iscsi.listen.meets(&iser.listen)) {
            let message = format!(
                "{} of target `{}` is a TCP port that is already used by an iSCSI portal",
                iser.listen, target.name
            );
            return Err(mistake(message).hint("use a different port for one of them"));
        }
    }
    Ok(())
}

pub(super) fn log(raw: raw::Log) -> Checked<Log> {
    let filter = match raw.filter {
        None => "info".to_owned(),
        Some(f) => match f.value.parse::<tracing_subscriber::EnvFilter>() {
            Ok(_) => f.value,
            Err(_) => {
                let message = format!("invalid log filter `{}`", f.value);
                return Err(Mistake::new(f.at, "log.filter", message)
                    .hint("use a level such as `info`, or `info,riser_target=debug`"));
            }
        },
    };
    Ok(Log {
        filter,
        format: raw.format.unwrap_or_default(),
        audit: raw.audit.is_none_or(|audit| audit.0),
    })
}

pub(super) fn metrics(raw: raw::Metrics) -> Checked<Option<Metrics>> {
    let Some(listen) = raw.listen else {
        return Ok(None);
    };
    let mistake = |message| Err(Mistake::new(listen.at, "metrics.listen", message));
    let text = &listen.value;
    let address = match text.parse::<SocketAddr>() {
        Ok(address) if address.port() != 0 => address,
        _ => {
            return mistake(format!(
                "`{text}` is not an IP address with a port, such as 127.0.0.1:9909"
            ));
        }
    };
    let remote = raw.remote;
    if !address.ip().is_loopback() && !remote {
        let message = format!("{address} is accessible from other hosts without a password");
        return mistake(message).map_err(|m| m.hint("add `remote: true` if this is intended"));
    }
    let listen = address;
    Ok(Some(Metrics { listen, remote }))
}

pub(super) fn location(raw: Option<Located<String>>, key: &str) -> Checked<Location> {
    let Some(place) = raw else {
        return Ok(Location::Default);
    };
    match place.value.as_str() {
        "none" => Ok(Location::Off),
        path if Path::new(path).is_absolute() => Ok(Location::At(path.into())),
        path => {
            let message = format!("`{path}` is neither an absolute path nor `none`");
            Err(Mistake::new(place.at, key, message))
        }
    }
}
