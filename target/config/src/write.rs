//! From a [`Config`] back to the words of a file, which read back equal. What a file may leave
//! out, and what has its default, is left out.

use std::collections::BTreeMap;
use std::path::Path;

use riser_scsi::data::designator::Naa;
use riser_scsi::iscsi::chap::ALGORITHMS;

use super::io_check;
use super::mapping::{Map, size};
use super::model::{
    Access, Backend, Chap, ChapUser, Config, Limits, LinkFaults, Location, Log, LogFormat, Lun,
    Metrics, Portal, Provider, Redirect, Rule, RuleLuns, Secret, Target, Transport, Workers,
};
use super::source::{Direct, Source};
use super::tree::Tree;

impl Config {
    /// The configuration in a file's words, its secrets included.
    #[must_use]
    pub fn to_tree(&self) -> Tree {
        let backends = self.backends.iter();
        let targets = self.targets.iter().map(|t| target(self, t));
        let mut map = Map::default();
        map.text("identity", self.identity.as_deref());
        map.flag("strict", self.strict, false);
        map.some(
            "backends",
            map_of(backends.map(|b| (b.name.clone(), backend(b)))),
        );
        map.put("targets", Tree::List(targets.collect()));
        map.set("discovery_chap", self.discovery_chap.as_ref().map(chap));
        map.some("workers", workers(&self.workers));
        map.some("limits", limits(&self.limits));
        map.some("transport", transport(&self.transport));
        map.some("admin", location("socket", &self.admin));
        map.some("state", location("directory", &self.state));
        map.set("metrics", self.metrics.as_ref().map(metrics));
        map.some("log", log(&self.log));
        map.tree()
    }

    /// As a file that reads back equal, secrets included.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        self.to_tree().to_yaml()
    }
}

fn map_of(entries: impl Iterator<Item = (String, Tree)>) -> Tree {
    Tree::Map(entries.collect())
}

fn path(path: &Path) -> Tree {
    Tree::Text(path.display().to_string())
}

fn backend(backend: &Backend) -> Tree {
    let mut map = Map::default();
    let (kind, file) = match &backend.spec.source {
        Source::File { path, .. } => ("file", Some(path)),
        Source::Device { path } => ("device", Some(path)),
        Source::Ram { .. } => ("ram", None),
        Source::Null { .. } => ("null", None),
    };
    map.text("kind", Some(kind));
    map.set("path", file.map(|file| path(file)));
    match &backend.spec.source {
        Source::File {
            size: bytes,
            create,
            ..
        } => {
            map.set("size", bytes.map(size));
            map.flag("create", *create, false);
        }
        Source::Ram { size: bytes } | Source::Null { size: bytes } => {
            map.put("size", size(*bytes));
        }
        Source::Device { .. } => {}
    }
    let spec = &backend.spec;
    map.number("block_size", spec.block_size.into(), 512);
    map.text(
        "direct",
        match spec.direct {
            Direct::Auto => None,
            Direct::On => Some("on"),
            Direct::Off => Some("off"),
        },
    );
    map.text("write_cache", (!spec.write_cache).then_some("off"));
    map.flag("read_only", spec.read_only, false);
    map.flag("thin", backend.thin, true);
    map.shown(
        "threshold",
        backend.threshold.map(|percent| format!("{percent}%")),
    );
    map.flag("stoppable", backend.stoppable, false);
    map.set("rotational", backend.rotational.map(Tree::Bool));
    let names = &backend.names;
    map.text("serial", names.serial.as_deref());
    map.shown("naa", names.naa.as_ref().map(naa));
    map.text("vendor", names.vendor.as_deref());
    map.text("product", names.product.as_deref());
    map.text("revision", names.revision.as_deref());
    map.some("limits", io_check::write(&backend.limits));
    map.tree()
}

fn naa(naa: &Naa) -> String {
    naa.bytes().iter().map(|b| format!("{b:02x}")).collect()
}

fn target(config: &Config, target: &Target) -> Tree {
    let mut map = Map::default();
    map.text("name", Some(&target.name));
    map.shown("iqn", target.iqn.as_ref());
    let portals = target.portals.iter().map(portal);
    map.put("portals", Tree::List(portals.collect()));
    map.some("luns", luns(config, &target.luns));
    map.set("chap", target.chap.as_ref().map(chap));
    match &target.access {
        Access::Open => map.text("access", Some("open")),
        Access::Rules(rules) => {
            map.some(
                "access",
                Tree::List(rules.iter().map(|r| rule(config, r)).collect()),
            );
        }
    }
    map.tree()
}

fn portal(portal: &Portal) -> Tree {
    let mut map = Map::default();
    map.shown("protocol", Some(portal.protocol));
    map.shown("listen", Some(portal.listen));
    map.shown("ioc_guid", portal.set_ioc_guid);
    map.shown("service_guid", portal.set_service_guid);
    map.shown("id_ext", portal.set_id_ext);
    map.set("redirect", portal.redirect.as_ref().map(redirect));
    map.tree()
}

fn redirect(redirect: &Redirect) -> Tree {
    let mut map = Map::default();
    map.shown("to", Some(&redirect.to));
    map.flag("permanent", redirect.permanent, false);
    map.tree()
}

fn luns(config: &Config, luns: &BTreeMap<u16, Lun>) -> Tree {
    map_of(
        luns.iter()
            .map(|(number, l)| (number.to_string(), lun(config, l))),
    )
}

fn lun(config: &Config, lun: &Lun) -> Tree {
    let name = Tree::Text(config.backend(lun).name.clone());
    if !lun.read_only {
        return name;
    }
    let mut map = Map::default();
    map.put("backend", name);
    map.flag("read_only", true, false);
    map.tree()
}

fn rule(config: &Config, rule: &Rule) -> Tree {
    let mut map = Map::default();
    map.shown("initiator", rule.initiator);
    map.shown("iqn", rule.iqn.as_ref());
    map.shown("address", rule.address);
    let seen = rule.luns.as_ref().map(|seen| match seen {
        RuleLuns::Mask(mask) => {
            let numbers = mask.iter().map(|number| Tree::Number((*number).into()));
            Tree::List(numbers.collect())
        }
        RuleLuns::Map(map) => luns(config, map),
    });
    map.set("luns", seen);
    map.set("chap", rule.chap.as_ref().map(chap));
    map.set("limits", rule.limits.as_ref().map(io_check::write));
    map.tree()
}

fn chap(chap: &Chap) -> Tree {
    let mut map = Map::default();
    let users = chap.users.iter().map(chap_user);
    map.put("users", Tree::List(users.collect()));
    map.set("mutual", chap.mutual.as_ref().map(chap_user));
    let is_other = chap.algorithms != ALGORITHMS;
    let names = chap.algorithms.iter().map(|a| Tree::Text(a.name().into()));
    map.set("algorithms", is_other.then(|| Tree::List(names.collect())));
    map.tree()
}

fn chap_user(user: &ChapUser) -> Tree {
    let mut map = Map::default();
    map.text("name", Some(&user.name));
    match &user.secret {
        Secret::Inline(secret) => map.text("secret", Some(secret)),
        Secret::File(file) => map.put("secret_file", path(file)),
        Secret::Env(name) => map.text("secret_env", Some(name)),
        Secret::Credential(name) => map.text("secret_credential", Some(name)),
    }
    map.tree()
}

fn workers(workers: &Workers) -> Tree {
    let mut map = Map::default();
    map.set("count", workers.count.map(|n| Tree::Number(n as u64)));
    let cpus = workers.cpus.iter();
    map.some(
        "cpus",
        Tree::List(cpus.map(|cpu| Tree::Number(*cpu as u64)).collect()),
    );
    map.tree()
}

fn limits(limits: &Limits) -> Tree {
    let default = Limits::default();
    let mut map = Map::default();
    let numbers = [
        ("max_sessions", limits.max_sessions, default.max_sessions),
        (
            "sessions_per_address",
            limits.sessions_per_address,
            default.sessions_per_address,
        ),
        (
            "channels_per_session",
            limits.channels_per_session,
            default.channels_per_session,
        ),
        (
            "connections_per_session",
            limits.connections_per_session,
            default.connections_per_session,
        ),
        (
            "error_recovery_level",
            limits.error_recovery_level,
            default.error_recovery_level,
        ),
        ("queue_depth", limits.queue_depth, default.queue_depth),
        ("max_iu_size", limits.max_iu_size, default.max_iu_size),
    ];
    for (key, value, default) in numbers {
        map.number(key, value.into(), default.into());
    }
    let transfer = limits.max_transfer;
    let is_other = transfer != default.max_transfer;
    map.set("max_transfer", is_other.then(|| size(transfer.into())));
    let mib = |bytes: usize| (bytes >> 20) as u64;
    map.number(
        "buffer_pool_mib",
        mib(limits.buffer_pool),
        mib(default.buffer_pool),
    );
    map.number(
        "data_out_timeout",
        limits.data_out_timeout.as_secs(),
        default.data_out_timeout.as_secs(),
    );
    map.tree()
}

fn transport(transport: &Transport) -> Tree {
    let mut map = Map::default();
    map.text(
        "provider",
        match transport.provider {
            Provider::Roce => None,
            Provider::RdmaCore => Some("rdma_core"),
            Provider::Auto => Some("auto"),
        },
    );
    map.set("mtu", transport.mtu.map(|mtu| Tree::Number(mtu.into())));
    map.set("on_link", transport.on_link.then_some(Tree::Bool(true)));
    map.set("faults", transport.faults.as_ref().map(faults));
    map.tree()
}

fn faults(faults: &LinkFaults) -> Tree {
    let mut map = Map::default();
    map.shown("loss", Some(faults.loss));
    map.shown("duplicate", Some(faults.duplicate));
    map.shown("reorder", Some(faults.reorder));
    map.shown("corrupt", Some(faults.corrupt));
    map.put("reorder_window", Tree::Number(faults.reorder_window.into()));
    map.put("seed", Tree::Number(faults.seed));
    map.tree()
}

fn metrics(metrics: &Metrics) -> Tree {
    let mut map = Map::default();
    map.shown("listen", Some(metrics.listen));
    map.flag("remote", metrics.remote, false);
    map.tree()
}

fn location(key: &str, location: &Location) -> Tree {
    let mut map = Map::default();
    match location {
        Location::Default => {}
        Location::At(at) => map.put(key, path(at)),
        Location::Off => map.text(key, Some("none")),
    }
    map.tree()
}

fn log(log: &Log) -> Tree {
    let mut map = Map::default();
    let filter = Some(log.filter.as_str()).filter(|filter| *filter != "info");
    map.text("filter", filter);
    map.text("format", (log.format == LogFormat::Json).then_some("json"));
    map.text("audit", (!log.audit).then_some("off"));
    map.tree()
}
