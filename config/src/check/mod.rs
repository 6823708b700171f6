//! Converts `raw` to `model`: checks ranges, references and duplicates, and applies defaults.

mod backends;
mod chap;
mod daemon;
mod names;
mod paths;
mod targets;

use std::collections::HashMap;

use self::backends::backends;
use self::chap::chap;
use self::daemon::{iwarp, limits, location, log, metrics, transport, workers};
use self::targets::target;
use super::mistake::{Checked, Mistake};
use super::model::{Access, Backend, Config, Target};
use super::yaml::At;
use super::{io_check, raw};

pub(super) fn check(root: raw::Root) -> Checked<Config> {
    let mut notes = Vec::new();
    if let Some(identity) = &root.identity
        && identity.value.trim().is_empty()
    {
        return Err(Mistake::new(
            identity.at,
            "identity",
            "invalid identity: must not be empty",
        ));
    }
    let backends = backends(root.backends.0)?;
    // An empty list is intentional, but a missing list is probably an oversight.
    let Some(raw_targets) = root.targets else {
        return Err(Mistake::new(At::default(), "targets", "missing targets")
            .hint("list the targets with their portals and LUNs in `targets:`"));
    };
    let mut names = HashMap::new();
    let mut portals = Vec::new();
    let mut iqns = HashMap::new();
    let mut targets = Vec::new();
    for (i, t) in raw_targets.into_iter().enumerate() {
        let iqn_at = t.value.iqn.as_ref().map_or(t.value.name.at, |iqn| iqn.at);
        let target = target(i, t.value, &backends, &mut names, &mut portals)?;
        if let Some(iqn) = &target.iqn
            && let Some(other) = iqns.insert(iqn.clone(), target.name.clone())
        {
            let message = format!("target `{other}` already has the iSCSI name {iqn}");
            return Err(Mistake::new(iqn_at, format!("targets[{i}].iqn"), message)
                .hint("initiators identify a target by its iSCSI name"));
        }
        targets.push(target);
    }
    note_oddities(&backends, &targets, &mut notes);
    let limits = limits(root.limits)?;
    note_slow(&backends, &targets, limits.max_transfer, &mut notes);
    let workers = workers(root.workers)?;
    if let Some(count) = workers.count {
        // This does not depend on the actual number of cores.
        notes.extend(workers.note(count));
    }
    let provider = root.transport.provider.as_ref();
    let provider = provider.map(|provider| (provider.at, provider.value));
    let transport = transport(root.transport)?;
    iwarp(provider, &targets)?;
    Ok(Config {
        identity: root.identity.map(|i| i.value.trim().to_owned()),
        strict: root.strict,
        backends,
        targets,
        workers,
        limits,
        transport,
        log: log(root.log)?,
        discovery_chap: chap("discovery_chap", root.discovery_chap)?,
        admin: location(root.admin.socket, "admin.socket")?,
        state: location(root.state.directory, "state.directory")?,
        metrics: metrics(root.metrics)?,
        notes,
    })
}

fn note_oddities(backends: &[Backend], targets: &[Target], notes: &mut Vec<String>) {
    for (i, b) in backends.iter().enumerate() {
        let used = targets
            .iter()
            .any(|t| t.luns.values().any(|l| l.backend == i));
        if !used {
            notes.push(format!("backend `{}` is not a LUN of any target", b.name));
        }
    }
    for t in targets {
        if t.luns.is_empty() {
            notes.push(format!("target `{}` has no LUN", t.name));
        }
        // This is the default, to avoid opening a target to the whole network by omission. We only
        // add a note instead of an error, because a target can be created before its initiators.
        if t.access == Access::Rules(Vec::new()) {
            notes.push(format!(
                "no initiator can log in to target `{}`: add `access:` rules, or set `access: open`",
                t.name
            ));
        }
    }
}

/// Adds notes for limits where a single command could take longer than the initiator's timeout.
fn note_slow(backends: &[Backend], targets: &[Target], longest: u32, notes: &mut Vec<String>) {
    for backend in backends {
        let place = format!("backend `{}`", backend.name);
        notes.extend(io_check::note(&place, &backend.limits, longest));
    }
    for target in targets {
        if let Access::Rules(rules) = &target.access {
            for (n, rule) in rules.iter().enumerate() {
                let place = format!("target `{}`, access rule {n}", target.name);
                let limits = rule.limits.iter();
                notes.extend(limits.filter_map(|limits| io_check::note(&place, limits, longest)));
            }
        }
    }
}
