//! From `raw` to `model`: ranges, references, duplicates, defaults.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use riser_scsi::iscsi::chap::{ALGORITHMS, Algorithm};
use riser_scsi::iscsi::name::{IscsiName, TargetAddress};

use super::error::nearest;
use super::io_limits::IoLimits;
use super::listen::Listen;
use super::mistake::{Checked, Mistake};
use super::model::SECRET_LEN;
use super::model::{
    Access, Backend, Chap, ChapUser, Config, Limits, LinkFaults, Location, Log, Lun, Metrics,
    Names, Portal, Protocol, Redirect, Rule, RuleLuns, Secret, Target, Transport, Workers,
};
use super::source::{Source, Spec};
use super::value::Percent;
use super::yaml::{At, Located};
use super::{io_check, raw};

/// The highest number of flat LUN addressing (SAM-5 4.7.7).
const MAX_LUN: u16 = 16_383;

pub(super) fn check(root: raw::Root) -> Checked<Config> {
    let mut notes = Vec::new();
    if let Some(identity) = &root.identity
        && identity.value.trim().is_empty()
    {
        return Err(Mistake::new(
            identity.at,
            "identity",
            "an identity cannot be empty",
        ));
    }
    let backends = backends(root.backends.0)?;
    // An empty list is meant; a missing one was forgotten.
    let Some(raw_targets) = root.targets else {
        return Err(Mistake::new(At::default(), "targets", "there is no target")
            .hint("`targets:` lists what is served, and where"));
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
                .hint("initiators know a target by its iSCSI name"));
        }
        targets.push(target);
    }
    note_oddities(&backends, &targets, &mut notes);
    let limits = limits(root.limits)?;
    note_slow(&backends, &targets, limits.max_transfer, &mut notes);
    let workers = workers(root.workers)?;
    if let Some(count) = workers.count {
        // Another number of cores does not change it.
        notes.extend(workers.note(count));
    }
    Ok(Config {
        identity: root.identity.map(|i| i.value.trim().to_owned()),
        strict: root.strict,
        backends,
        targets,
        workers,
        limits,
        transport: transport(root.transport)?,
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
        // The default, so that a target is not open to the whole network by an omission. A note
        // and no mistake: a target may be set up before its initiators.
        if t.access == Access::Rules(Vec::new()) {
            notes.push(format!(
                "no initiator may log in to target `{}`: give `access:` rules, or `access: open`",
                t.name
            ));
        }
    }
}

/// Limits by which a single command may take longer than initiators wait.
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

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 64
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':'))
}

fn name_mistake(at: At, path: &str, name: &str) -> Mistake {
    Mistake::new(at, path, format!("`{name}` is not a valid name"))
        .hint("1 to 64 letters, digits, `-`, `_`, `.` or `:`")
}

// --- Backends -----------------------------------------------------------------------------------

fn backends(raw: Vec<(String, Located<raw::Backend>)>) -> Checked<Vec<Backend>> {
    let mut files: HashMap<PathBuf, String> = HashMap::new();
    let mut out = Vec::new();
    for (name, b) in raw {
        let path = format!("backends.{name}");
        if !is_name(&name) {
            return Err(name_mistake(b.at, &path, &name));
        }
        let backend = backend(&name, &path, &b)?;
        if let Source::File { path: file, .. } | Source::Device { path: file } =
            &backend.spec.source
            // By the path's text alone, since a configuration is also checked on other hosts.
            // Links are found when the file is opened: its lock can be had once.
            && let Some(other) = files.insert(normal(file), name.clone())
        {
            let at = b.value.path.as_ref().map_or(b.at, |p| p.at);
            return Err(Mistake::new(
                at,
                format!("{path}.path"),
                format!("{} is already backend `{other}`", file.display()),
            )
            .hint("one backend can be a LUN of several targets"));
        }
        out.push(backend);
    }
    Ok(out)
}

/// A path. Shells replace a `~` that it begins with, and nothing else does.
fn whole_path(text: &str, at: At, path: &str) -> Checked<PathBuf> {
    match text.starts_with('~') {
        true => Err(
            Mistake::new(at, path, "`~` does not stand for a home directory here")
                .hint("write the path in full, or `./~` for a file of such a name"),
        ),
        false => Ok(PathBuf::from(text)),
    }
}

/// The path without `.` and, where that is certain, without `..`.
fn normal(path: &Path) -> PathBuf {
    path.components()
        .filter(|c| !matches!(c, Component::CurDir))
        .collect()
}

fn backend(name: &str, path: &str, located: &Located<raw::Backend>) -> Checked<Backend> {
    let b = &located.value;
    let at = |key: &str| format!("{path}.{key}");
    let block_size = match &b.block_size {
        None => 512,
        // SCSI allows others, but few operating systems can use such disks.
        Some(v) if matches!(v.value, 512 | 4096) => v.value as u32,
        Some(v) => {
            let message = format!("a block size is 512 or 4096, not {}", v.value);
            return Err(Mistake::new(v.at, at("block_size"), message));
        }
    };
    // Here and not by the type: the length of a block is another key.
    if let Some(size) = &b.size {
        let bytes = size.value.0;
        if bytes == 0 || !bytes.is_multiple_of(u64::from(block_size)) {
            let message = format!("{bytes} bytes are not a number of {block_size}-byte blocks");
            return Err(Mistake::new(size.at, at("size"), message));
        }
    }
    let read_only = b.read_only.unwrap_or(false);
    Ok(Backend {
        name: name.to_owned(),
        spec: Spec {
            source: source(path, located)?,
            block_size,
            direct: b.direct.as_ref().map(|d| d.value).unwrap_or_default(),
            write_cache: b.write_cache.is_none_or(|w| w.0),
            read_only,
            faults: None,
        },
        thin: b.thin.unwrap_or(true),
        threshold: threshold(path, b)?,
        stoppable: b.stoppable.unwrap_or(false),
        rotational: b.rotational,
        names: names(path, b)?,
        limits: io_check::check(path, b.limits.as_ref())?,
    })
}

/// The threshold of a thin file, in percent.
fn threshold(path: &str, b: &raw::Backend) -> Checked<Option<u8>> {
    let Some(located) = &b.threshold else {
        return Ok(None);
    };
    let wrong = |message: &str| {
        let place = format!("{path}.threshold");
        Err(Mistake::new(located.at, place, message.to_owned()))
    };
    if b.kind != raw::Kind::File || b.thin == Some(false) {
        return wrong("only a thin backend of kind file has a `threshold`");
    }
    match located.value.whole() {
        Some(percent @ 1..100) => Ok(Some(percent)),
        _ => wrong("a threshold is a whole number of percent from 1 to 99"),
    }
}

/// The word of a kind.
fn kind_name(kind: raw::Kind) -> &'static str {
    match kind {
        raw::Kind::File => "file",
        raw::Kind::Device => "device",
        raw::Kind::Ram => "ram",
        raw::Kind::Null => "null",
    }
}

/// Refuses keys that a backend of this kind does not have.
fn check_keys(path: &str, b: &raw::Backend) -> Checked<()> {
    use raw::Kind;
    let has_path = matches!(b.kind, Kind::File | Kind::Device);
    let keys = [
        ("path", has_path, b.path.as_ref().map(|v| v.at)),
        ("direct", has_path, b.direct.as_ref().map(|v| v.at)),
        (
            "create",
            b.kind == Kind::File,
            b.create.as_ref().map(|v| v.at),
        ),
        (
            "size",
            b.kind != Kind::Device,
            b.size.as_ref().map(|v| v.at),
        ),
    ];
    let mut alien = keys.into_iter().filter(|(_, belongs, _)| !belongs);
    match alien.find_map(|(key, _, at)| Some((key, at?))) {
        Some((key, at)) => {
            let kind = kind_name(b.kind);
            let message = format!("a backend of kind {kind} has no `{key}`");
            Err(Mistake::new(at, format!("{path}.{key}"), message))
        }
        None => Ok(()),
    }
}

fn source(path: &str, located: &Located<raw::Backend>) -> Checked<Source> {
    let b = &located.value;
    check_keys(path, b)?;
    let at = |key: &str| format!("{path}.{key}");
    let missing = |key: &str| {
        let kind = kind_name(b.kind);
        let message = format!("a backend of kind {kind} needs `{key}`");
        Mistake::new(located.at, path, message)
    };
    let file = || {
        let p = b.path.as_ref().ok_or_else(|| missing("path"))?;
        match p.value.is_empty() || p.value.contains('\0') {
            true => Err(Mistake::new(p.at, at("path"), "an empty path")),
            false => whole_path(&p.value, p.at, &at("path")),
        }
    };
    let size = b.size.as_ref().map(|s| s.value.0);
    match b.kind {
        raw::Kind::File => {
            let create = b.create.as_ref().filter(|c| c.value);
            // A file that is made needs a size, and one that is there has it.
            if let Some(c) = create {
                if size.is_none() {
                    return Err(missing("size").hint("`create: true` must know how large"));
                }
                if b.read_only == Some(true) {
                    let message = "a read-only file cannot be created";
                    return Err(Mistake::new(c.at, at("create"), message));
                }
            }
            Ok(Source::File {
                path: file()?,
                size,
                create: create.is_some(),
            })
        }
        raw::Kind::Device => Ok(Source::Device { path: file()? }),
        raw::Kind::Ram => Ok(Source::Ram {
            size: size.ok_or_else(|| missing("size"))?,
        }),
        raw::Kind::Null => Ok(Source::Null {
            size: size.ok_or_else(|| missing("size"))?,
        }),
    }
}

fn names(path: &str, b: &raw::Backend) -> Checked<Names> {
    let text = |key: &str, value: &Option<Located<String>>, most: usize| match value {
        None => Ok(None),
        Some(v) => {
            // SPC has ASCII data fields consist of these. The last three lengths are those of
            // fields of INQUIRY data.
            let printable = v.value.bytes().all(|c| (0x20..0x7f).contains(&c));
            if !printable || v.value.is_empty() || v.value.len() > most {
                let message = format!("must be 1 to {most} printable ASCII characters");
                return Err(Mistake::new(v.at, format!("{path}.{key}"), message));
            }
            Ok(Some(v.value.clone()))
        }
    };
    Ok(Names {
        serial: text("serial", &b.serial, 64)?,
        naa: b.naa.as_ref().map(|n| n.value.0),
        vendor: text("vendor", &b.vendor, 8)?,
        product: text("product", &b.product, 16)?,
        revision: text("revision", &b.revision, 4)?,
    })
}

// --- Targets ------------------------------------------------------------------------------------

fn target(
    index: usize,
    t: raw::Target,
    backends: &[Backend],
    names: &mut HashMap<String, u64>,
    portals: &mut Vec<(Protocol, Listen, String)>,
) -> Checked<Target> {
    let path = format!("targets[{index}]");
    let name = t.name.value;
    if !is_name(&name) {
        return Err(name_mistake(t.name.at, &format!("{path}.name"), &name));
    }
    // Names are how the admin API, the log and the metrics refer to a target.
    if let Some(line) = names.insert(name.clone(), t.name.at.line) {
        let message = format!("there is already a target `{name}`, in line {line}");
        return Err(Mistake::new(t.name.at, format!("{path}.name"), message));
    }
    if t.portals.value.is_empty() {
        let message = "a target listens somewhere";
        return Err(
            Mistake::new(t.portals.at, format!("{path}.portals"), message)
                .hint("- { protocol: srp, listen: 127.0.0.1 }"),
        );
    }
    let mut listens = Vec::new();
    // Portals of all targets before are known: they share addresses of the host.
    for (i, p) in t.portals.value.into_iter().enumerate() {
        let portal = portal(&format!("{path}.portals[{i}]"), p, &name, portals)?;
        portals.push((portal.protocol, portal.listen, name.clone()));
        listens.push(portal);
    }
    let luns = luns(&format!("{path}.luns"), t.luns.0, backends)?;
    let access = access(&path, t.access, &luns, backends)?;
    let has_iscsi = listens.iter().any(|p| p.protocol.is_iscsi());
    // Only a target with an iSCSI portal needs one, for which its name may do.
    let iqn = iqn(&path, &name, t.name.at, t.iqn, has_iscsi)?;
    let chap = chap(&format!("{path}.chap"), t.chap)?;
    Ok(Target {
        name,
        portals: listens,
        luns,
        access,
        iqn,
        chap,
    })
}

/// A portal of a target, beside all portals that were before it.
fn portal(
    path: &str,
    p: raw::Portal,
    target: &str,
    others: &[(Protocol, Listen, String)],
) -> Checked<Portal> {
    let protocol = p.protocol;
    let listen = p.listen.value.with_port(match protocol {
        Protocol::Srp => 5555,
        Protocol::Iscsi => riser_scsi::iscsi::name::PORT,
        Protocol::Iser => riser_scsi::iser::DEFAULT_PORT,
    });
    let mistake = |message: String| Mistake::new(p.listen.at, format!("{path}.listen"), message);
    let is_link_local = match listen.ip() {
        std::net::IpAddr::V6(ip) => ip.is_unicast_link_local(),
        std::net::IpAddr::V4(_) => false,
    };
    // The address means something on one interface only, and a GID has no room to name that.
    if protocol != Protocol::Iscsi && is_link_local {
        let ip = listen.ip();
        return Err(mistake(format!(
            "{ip} is a link-local address, which RDMA portals cannot have"
        ))
        .hint("use a global or unique local address of the interface"));
    }
    // The first rival is named; there is at most one error of a file.
    for (known, place, other) in others {
        if let Some(what) = rivalry((protocol, &listen, target), (*known, place, other)) {
            let what = match *place == listen {
                true => format!("{listen} is already {what} of target `{other}`"),
                false => format!(
                    "{listen} includes or is part of {place}, which is already {what} of target `{other}`"
                ),
            };
            return Err(mistake(what));
        }
    }
    Ok(Portal {
        protocol,
        listen,
        set_service_guid: p.service_guid,
        set_ioc_guid: p.ioc_guid,
        set_id_ext: p.id_ext,
        redirect: redirect(&format!("{path}.redirect"), protocol, p.redirect)?,
    })
}

/// The portal that is there already, in words, if another one of this protocol and target cannot
/// be beside it.
fn rivalry(
    (protocol, listen, target): (Protocol, &Listen, &str),
    (known, place, other): (Protocol, &Listen, &str),
) -> Option<&'static str> {
    let is_same = protocol == known;
    if !is_same {
        // Both are ports of the RDMA CM.
        let are_rdma = protocol.is_rdma() && known.is_rdma();
        return (are_rdma && listen.meets(place)).then_some("an RDMA portal");
    }
    // An iSCSI login names its target, so several can share a portal. A target's own portals that
    // a wildcard includes are exceptions from it.
    let shares = match target == other {
        true => listen == place,
        false => protocol == Protocol::Srp && listen.meets(place),
    };
    shares.then_some("a portal")
}

/// Checks the place to which a portal sends initiators that log in.
fn redirect(
    path: &str,
    protocol: Protocol,
    raw: Option<Located<raw::Redirect>>,
) -> Checked<Option<Redirect>> {
    let Some(raw) = raw else {
        return Ok(None);
    };
    if protocol != Protocol::Iscsi {
        let message = "only iSCSI initiators can be sent elsewhere";
        return Err(Mistake::new(raw.at, path, message));
    }
    let to = TargetAddress::parse(&raw.value.to).ok_or_else(|| {
        Mistake::new(
            raw.at,
            format!("{path}.to"),
            "an address or host name, and a port if it is not 3260",
        )
        .hint("redirect: { to: \"192.0.2.20:3260\" }")
    })?;
    Ok(Some(Redirect {
        to,
        permanent: raw.value.permanent,
    }))
}

/// The iSCSI name of a target: `iqn`, else its own name if that is one.
fn iqn(
    path: &str,
    name: &str,
    at: At,
    iqn: Option<Located<String>>,
    has_iscsi: bool,
) -> Checked<Option<IscsiName>> {
    match iqn {
        Some(iqn) => iscsi_name(&format!("{path}.iqn"), &iqn).map(Some),
        None if !has_iscsi => Ok(None),
        None => IscsiName::new(name).map(Some).map_err(|_| {
            let message = "a target with an iSCSI or iSER portal needs `iqn`";
            Mistake::new(at, path, message).hint("iqn: iqn.2026-01.com.example:disk1")
        }),
    }
}

fn iscsi_name(path: &str, name: &Located<String>) -> Checked<IscsiName> {
    IscsiName::new(&name.value).map_err(|error| Mistake::new(name.at, path, error.to_string()))
}

fn chap(path: &str, raw: Option<Located<raw::Chap>>) -> Checked<Option<Chap>> {
    let Some(raw) = raw else {
        return Ok(None);
    };
    if raw.value.users.is_empty() {
        let message = "with `chap` and no users, no initiator can log in";
        return Err(Mistake::new(raw.at, path, message));
    }
    let users = raw.value.users.into_iter().enumerate();
    let users = users
        .map(|(i, user)| chap_user(&format!("{path}.users[{i}]"), user))
        .collect::<Checked<Vec<_>>>()?;
    let own_path = format!("{path}.mutual");
    let own_at = raw.value.mutual.as_ref().map(|own| own.at);
    let own = raw.value.mutual.map(|own| chap_user(&own_path, own));
    let mutual = own.transpose()?;
    if let (Some(own), Some(at)) = (&mutual, own_at)
        && users.iter().any(|user| user.secret == own.secret)
    {
        let message = "both sides have one secret: each could play the other";
        return Err(Mistake::new(at, own_path, message));
    }
    let algorithms = chap_algorithms(&format!("{path}.algorithms"), raw.value.algorithms)?;
    Ok(Some(Chap {
        users,
        mutual,
        algorithms,
    }))
}

fn chap_algorithms(
    path: &str,
    raw: Option<Located<Vec<Located<String>>>>,
) -> Checked<Vec<Algorithm>> {
    let Some(list) = raw else {
        return Ok(ALGORITHMS.to_vec());
    };
    if list.value.is_empty() {
        let message = "without an algorithm no initiator can log in";
        return Err(Mistake::new(list.at, path, message));
    }
    let named = list.value.iter().map(|name| {
        let found = ALGORITHMS.into_iter().find(|a| a.name() == name.value);
        found.ok_or_else(|| {
            let names = ALGORITHMS.map(Algorithm::name).join(", ");
            Mistake::new(name.at, path, format!("must be one of {names}"))
        })
    });
    named.collect()
}

fn chap_user(path: &str, raw: Located<raw::ChapUser>) -> Checked<ChapUser> {
    let user = raw.value;
    let wrong = |message: &str| Mistake::new(raw.at, path, message);
    if user.name.is_empty() || user.name.len() > 255 || user.name.chars().any(char::is_control) {
        return Err(wrong("a CHAP name has 1 to 255 characters"));
    }
    let credential = user.secret_credential.map(Secret::Credential);
    let mut given = [
        user.secret.map(Secret::Inline),
        user.secret_file.map(|file| Secret::File(file.into())),
        user.secret_env.map(Secret::Env),
        credential,
    ]
    .into_iter()
    .flatten();
    let (Some(secret), None) = (given.next(), given.next()) else {
        let ways = "`secret`, `secret_file`, `secret_env` or `secret_credential`";
        return Err(wrong(&format!("give one of {ways}")));
    };
    let is_env = |name: &str| !name.is_empty() && !name.contains(['=', '\0']);
    // As systemd names them: one part of a path.
    let is_file = |name: &str| is_env(name) && !name.contains('/') && name != "." && name != "..";
    match &secret {
        Secret::Inline(secret) if !SECRET_LEN.contains(&secret.len()) => {
            return Err(wrong("a secret has 12 to 255 bytes"));
        }
        Secret::File(file) if file.as_os_str().is_empty() => {
            return Err(wrong("`secret_file` is a path"));
        }
        Secret::File(file) => {
            whole_path(&file.to_string_lossy(), raw.at, path)?;
        }
        Secret::Env(name) if !is_env(name) => {
            return Err(wrong("`secret_env` names a variable of the environment"));
        }
        Secret::Credential(name) if !is_file(name) => {
            return Err(wrong("`secret_credential` is a name without `/`"));
        }
        _ => {}
    }
    Ok(ChapUser {
        name: user.name,
        secret,
    })
}

/// The units of a target, or of a rule; `path` is that of the mapping.
fn luns(
    path: &str,
    raw: Vec<(u64, Located<raw::Lun>)>,
    backends: &[Backend],
) -> Checked<BTreeMap<u16, Lun>> {
    let mut luns = BTreeMap::new();
    for (number, l) in raw {
        let place = format!("{path}.{number}");
        let Some(number) = u16::try_from(number).ok().filter(|n| *n <= MAX_LUN) else {
            let message = format!("a LUN is from 0 to {MAX_LUN}, not {number}");
            return Err(Mistake::new(l.at, place, message));
        };
        let wanted = &l.value.backend;
        let Some(backend) = backends.iter().position(|b| b.name == *wanted) else {
            let mistake = Mistake::new(l.at, place, format!("there is no backend `{wanted}`"));
            let near = nearest(wanted, backends.iter().map(|b| b.name.as_str()));
            return Err(match near {
                Some(near) => mistake.hint(format!("did you mean `{near}`?")),
                None => mistake,
            });
        };
        let lun = Lun {
            backend,
            read_only: l.value.read_only,
        };
        // The reader refuses a key written twice alike; `1` and `0x1` are caught here.
        if luns.insert(number, lun).is_some() {
            let message = format!("LUN {number} is there twice");
            return Err(Mistake::new(l.at, place, message));
        }
    }
    Ok(luns)
}

fn access(
    path: &str,
    raw: raw::Access,
    luns: &BTreeMap<u16, Lun>,
    backends: &[Backend],
) -> Checked<Access> {
    let rules = match raw {
        raw::Access::Open => return Ok(Access::Open),
        raw::Access::Rules(rules) => rules,
    };
    let mut out = Vec::new();
    for (i, r) in rules.into_iter().enumerate() {
        let place = format!("{path}.access[{i}]");
        let rule = r.value;
        if rule.initiator.is_none() && rule.address.is_none() && rule.iqn.is_none() {
            return Err(Mistake::new(r.at, place, "a rule that names no initiator")
                .hint("give `initiator`, `iqn`, `address` or several; `access: open` admits all"));
        }
        let seen = rule.luns.map(|seen| {
            let place = format!("{place}.luns");
            rule_luns(&place, seen, luns, backends)
        });
        // SRP has no authentication, so a rule that demands it could only ever refuse.
        let place_of_chap = format!("{place}.chap");
        if let (Some(chap), Some(_)) = (&rule.chap, &rule.initiator) {
            let message = "an SRP initiator has nothing to prove who it is with";
            return Err(Mistake::new(chap.at, place_of_chap, message));
        }
        out.push(Rule {
            initiator: rule.initiator,
            iqn: match &rule.iqn {
                Some(name) => Some(iscsi_name(&format!("{place}.iqn"), name)?),
                None => None,
            },
            address: rule.address,
            luns: seen.transpose()?,
            chap: chap(&place_of_chap, rule.chap)?,
            limits: Some(io_check::check(&place, rule.limits.as_ref())?).filter(IoLimits::is_any),
        });
    }
    Ok(Access::Rules(out))
}

/// The units that a rule shows, of those that the target has.
fn rule_luns(
    path: &str,
    raw: raw::RuleLuns,
    target: &BTreeMap<u16, Lun>,
    backends: &[Backend],
) -> Checked<RuleLuns> {
    let numbers = match raw {
        raw::RuleLuns::Mask(numbers) => numbers,
        raw::RuleLuns::Map(entries) => {
            // Checking consumes the entries, whose places a mistake below needs.
            let places: BTreeMap<u64, At> = entries.0.iter().map(|(n, l)| (*n, l.at)).collect();
            let map = luns(path, entries.0, backends)?;
            let is_served = |lun: &Lun| target.values().any(|own| own.backend == lun.backend);
            if let Some((number, lun)) = map.iter().find(|(_, lun)| !is_served(lun)) {
                let name = &backends[lun.backend].name;
                let message = format!("backend `{name}` is not a LUN of this target");
                return Err(Mistake::new(
                    places[&u64::from(*number)],
                    format!("{path}.{number}"),
                    message,
                )
                .hint("add it to the `luns` of the target; a rule gives it another number"));
            }
            return Ok(RuleLuns::Map(map));
        }
    };
    let numbers = numbers.into_iter().enumerate();
    let checked = numbers.map(|(i, number)| match u16::try_from(number.value) {
        Ok(lun) if target.contains_key(&lun) => Ok(lun),
        _ => Err(Mistake::new(
            number.at,
            format!("{path}[{i}]"),
            format!("this target has no LUN {}", number.value),
        )),
    });
    Ok(RuleLuns::Mask(checked.collect::<Checked<_>>()?))
}

// --- The rest -----------------------------------------------------------------------------------

fn workers(raw: raw::Workers) -> Checked<Workers> {
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
            return Err(Mistake::new(
                c.at,
                place,
                format!("CPU {cpu} is there twice"),
            ));
        }
        cpus.push(cpu);
    }
    // Two workers on one CPU would delay each other: each polls while it is busy.
    if let (Some(list), Some(count)) = (&raw.cpus, count)
        && !cpus.is_empty()
        && cpus.len() < count
    {
        let message = format!("{} CPUs for {count} workers", cpus.len());
        return Err(Mistake::new(list.at, "workers.cpus", message));
    }
    Ok(Workers { count, cpus })
}

/// The defaults of the schema's keys.
impl Default for Limits {
    fn default() -> Self {
        limits(raw::Limits::default()).expect("defaults fit each other")
    }
}

fn limits(raw: raw::Limits) -> Checked<Limits> {
    let given = raw.max_transfer.as_ref().map(|max| max.value);
    let max_transfer = given.unwrap_or_default().get() as u32;
    let given = raw.buffer_pool_mib.as_ref().map(|pool| pool.value);
    let mib = given.unwrap_or_default().get();
    let buffer_pool = (mib as usize) << 20;
    let given = raw.sessions_per_address.as_ref().map(|most| most.value);
    let limits = Limits {
        max_sessions: raw.max_sessions.get() as u32,
        sessions_per_address: given.unwrap_or_default().get() as u32,
        channels_per_session: raw.channels_per_session.get() as u32,
        connections_per_session: raw.connections_per_session.get() as u32,
        error_recovery_level: raw.error_recovery_level.get() as u32,
        queue_depth: raw.queue_depth.get() as u32,
        max_iu_size: raw.max_iu_size.get() as u32,
        max_transfer,
        buffer_pool,
        data_out_timeout: Duration::from_secs(raw.data_out_timeout.get()),
    };
    // Of two keys that do not fit each other, the one that is given is wrong.
    if buffer_pool < limits.window() as usize * 2
        && let Some(at) = [
            raw.buffer_pool_mib.as_ref().map(|v| v.at),
            raw.max_transfer.as_ref().map(|v| v.at),
        ]
        .into_iter()
        .flatten()
        .next()
    {
        let message = format!("{mib} MiB of buffers are less than two commands may need");
        return Err(Mistake::new(at, "limits.buffer_pool_mib", message));
    }
    if let Some(v) = &raw.sessions_per_address
        && limits.sessions_per_address > limits.max_sessions
    {
        let message = format!("more than max_sessions, which is {}", limits.max_sessions);
        return Err(Mistake::new(v.at, "limits.sessions_per_address", message));
    }
    Ok(limits)
}

fn transport(raw: raw::Transport) -> Checked<Transport> {
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
        provider: raw.provider.unwrap_or_default(),
        mtu,
        on_link: raw.on_link.unwrap_or(false),
        faults,
    })
}

fn log(raw: raw::Log) -> Checked<Log> {
    let filter = match raw.filter {
        None => "info".to_owned(),
        Some(f) => match f.value.parse::<tracing_subscriber::EnvFilter>() {
            Ok(_) => f.value,
            Err(_) => {
                let message = format!("`{}` is not a log filter", f.value);
                return Err(Mistake::new(f.at, "log.filter", message)
                    .hint("a level such as `info`, or `info,riser_target=debug`"));
            }
        },
    };
    Ok(Log {
        filter,
        format: raw.format.unwrap_or_default(),
        audit: raw.audit.is_none_or(|audit| audit.0),
    })
}

fn metrics(raw: raw::Metrics) -> Checked<Option<Metrics>> {
    let Some(listen) = raw.listen else {
        return Ok(None);
    };
    let mistake = |message| Err(Mistake::new(listen.at, "metrics.listen", message));
    let text = &listen.value;
    let address = match text.parse::<SocketAddr>() {
        Ok(address) if address.port() != 0 => address,
        _ => {
            return mistake(format!(
                "`{text}` is not an address with a port, such as 127.0.0.1:9909"
            ));
        }
    };
    let remote = raw.remote;
    if !address.ip().is_loopback() && !remote {
        let message = format!("other hosts reach {address}, and need no password");
        return mistake(message).map_err(|m| m.hint("`remote: true` beside it, if that is meant"));
    }
    let listen = address;
    Ok(Some(Metrics { listen, remote }))
}

fn location(raw: Option<Located<String>>, key: &str) -> Checked<Location> {
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
