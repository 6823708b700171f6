//! Target checks: portals, logical units and access rules.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;

use riser_scsi::iscsi::name::{IscsiName, TargetAddress};

use super::chap::chap;
use super::names::{is_name, name_mistake};
use crate::error::nearest;
use crate::io_limits::IoLimits;
use crate::listen::Listen;
use crate::mistake::{Checked, Mistake};
use crate::model::{Access, Backend, Lun, Portal, Protocol, Redirect, Rule, RuleLuns, Target};
use crate::yaml::{At, Located};
use crate::{io_check, raw};

/// Maximum number in flat LUN addressing (SAM-5 4.7.7).
const MAX_LUN: u16 = 16_383;

pub(super) fn target(
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
    // Target names are used by the admin API, the log and the metrics.
    if let Some(line) = names.insert(name.clone(), t.name.at.line) {
        let message = format!("duplicate target `{name}`, first defined in line {line}");
        return Err(Mistake::new(t.name.at, format!("{path}.name"), message));
    }
    if t.portals.value.is_empty() {
        let message = "missing portals: a target must listen on at least one address";
        return Err(
            Mistake::new(t.portals.at, format!("{path}.portals"), message)
                .hint("- { protocol: srp, listen: 127.0.0.1 }"),
        );
    }
    let mut listens = Vec::new();
    // We pass the portals of all previous targets, because they share the host's addresses.
    for (i, p) in t.portals.value.into_iter().enumerate() {
        let portal = portal(&format!("{path}.portals[{i}]"), p, &name, portals)?;
        portals.push((portal.protocol, portal.listen, name.clone()));
        listens.push(portal);
    }
    let luns = luns(&format!("{path}.luns"), t.luns.0, backends)?;
    let access = access(&path, t.access, &luns, backends)?;
    let has_iscsi = listens.iter().any(|p| p.protocol.is_iscsi());
    // A name is only required if the target has an iSCSI portal. The target name can be used for
    // this.
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

/// Checks a portal of a target against all previous portals.
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
    // This address is only valid on a specific interface, and a GID cannot contain the interface.
    if protocol != Protocol::Iscsi && is_link_local {
        let ip = listen.ip();
        return Err(mistake(format!(
            "{ip} is a link-local address, which RDMA portals do not support"
        ))
        .hint("use a global or unique local address of the interface"));
    }
    // We report the first conflict, because there is at most one error per file.
    for (known, place, other) in others {
        if let Some(what) = rivalry((protocol, &listen, target), (*known, place, other)) {
            let what = match *place == listen {
                true => format!("{listen} is already {what} of target `{other}`"),
                false => format!(
                    "{listen} overlaps with {place}, which is already {what} of target `{other}`"
                ),
            };
            return Err(mistake(what));
        }
    }
    let redirect = redirect(&format!("{path}.redirect"), protocol, &listen, p.redirect)?;
    Ok(Portal {
        protocol,
        listen,
        set_service_guid: p.service_guid,
        set_ioc_guid: p.ioc_guid,
        set_id_ext: p.id_ext,
        redirect,
    })
}

/// Returns the description of an existing portal if it conflicts with a portal for this protocol
/// and target.
fn rivalry(
    (protocol, listen, target): (Protocol, &Listen, &str),
    (known, place, other): (Protocol, &Listen, &str),
) -> Option<&'static str> {
    let is_same = protocol == known;
    if !is_same {
        // Both use RDMA CM ports.
        let are_rdma = protocol.is_rdma() && known.is_rdma();
        return (are_rdma && listen.meets(place)).then_some("an RDMA portal");
    }
    // An iSCSI login contains the target name, so targets can share a portal. A specific portal
    // overrides a wildcard portal of the same target.
    let shares = match target == other {
        true => listen == place,
        false => protocol == Protocol::Srp && listen.meets(place),
    };
    shares.then_some("a portal")
}

/// Checks the redirect address of a portal.
fn redirect(
    path: &str,
    protocol: Protocol,
    listen: &Listen,
    raw: Option<Located<raw::Redirect>>,
) -> Checked<Option<Redirect>> {
    let Some(raw) = raw else {
        return Ok(None);
    };
    let mistake = |key: &str, message: &str| Mistake::new(raw.at, format!("{path}{key}"), message);
    let permanent = raw.value.permanent;
    let to = match protocol {
        Protocol::Iscsi => TargetAddress::parse(&raw.value.to).ok_or_else(|| {
            mistake(
                ".to",
                "must be an address or host name, with a port if it is not 3260",
            )
            .hint("redirect: { to: \"192.0.2.20:3260\" }")
        })?,
        Protocol::Srp if permanent => {
            let message = "a redirect of an SRP portal is always temporary";
            return Err(mistake(".permanent", message));
        }
        // A message of the CM contains the address of the other port, but no port number.
        Protocol::Srp => srp_redirect(&raw.value.to, listen.port()).ok_or_else(|| {
            mistake(
                ".to",
                "must be an IP address, with the same port as the portal",
            )
            .hint("redirect: { to: \"192.0.2.20\" }")
        })?,
        Protocol::Iser => {
            let message = "redirects are only supported for iSCSI and SRP portals";
            return Err(mistake("", message));
        }
    };
    Ok(Some(Redirect { to, permanent }))
}

/// Parses the redirect address of an SRP portal that listens on `port`.
fn srp_redirect(to: &str, port: u16) -> Option<TargetAddress> {
    let (ip, given) = match to.parse::<SocketAddr>() {
        Ok(at) => (at.ip(), at.port()),
        Err(_) => (to.parse().ok()?, port),
    };
    let is_host = !ip.is_unspecified() && !ip.is_multicast();
    (is_host && given == port).then(|| TargetAddress {
        group: None,
        ..TargetAddress::new(SocketAddr::new(ip, port), 0)
    })
}

/// Returns the iSCSI name of a target: `iqn`, or the target name if it is a valid iSCSI name.
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
            let message =
                "missing `iqn`, which is required for targets with an iSCSI or iSER portal";
            Mistake::new(at, path, message).hint("iqn: iqn.2026-01.com.example:disk1")
        }),
    }
}

fn iscsi_name(path: &str, name: &Located<String>) -> Checked<IscsiName> {
    IscsiName::new(&name.value).map_err(|error| Mistake::new(name.at, path, error.to_string()))
}

/// Checks the units of a target or a rule; `path` is the mapping's path.
fn luns(
    path: &str,
    raw: Vec<(u64, Located<raw::Lun>)>,
    backends: &[Backend],
) -> Checked<BTreeMap<u16, Lun>> {
    let mut luns = BTreeMap::new();
    for (number, l) in raw {
        let place = format!("{path}.{number}");
        let Some(number) = u16::try_from(number).ok().filter(|n| *n <= MAX_LUN) else {
            let message = format!("a LUN must be from 0 to {MAX_LUN}, not {number}");
            return Err(Mistake::new(l.at, place, message));
        };
        let wanted = &l.value.backend;
        let Some(backend) = backends.iter().position(|b| b.name == *wanted) else {
            let mistake = Mistake::new(l.at, place, format!("unknown backend `{wanted}`"));
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
        // The parser rejects exact duplicates of a key, but we need to check for `1` and `0x1`
        // here.
        if luns.insert(number, lun).is_some() {
            let message = format!("duplicate LUN {number}");
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
            return Err(
                Mistake::new(r.at, place, "missing initiator in access rule").hint(
                    "set at least one of `initiator`, `iqn` and `address`; `access: open` admits \
                       all initiators",
                ),
            );
        }
        let seen = rule.luns.map(|seen| {
            let place = format!("{place}.luns");
            rule_luns(&place, seen, luns, backends)
        });
        // SRP does not support authentication, so a rule with credentials could never match.
        let place_of_chap = format!("{place}.chap");
        if let (Some(chap), Some(_)) = (&rule.chap, &rule.initiator) {
            let message = "CHAP is not supported for SRP initiators";
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

/// Checks the units in a rule against the units of the target.
fn rule_luns(
    path: &str,
    raw: raw::RuleLuns,
    target: &BTreeMap<u16, Lun>,
    backends: &[Backend],
) -> Checked<RuleLuns> {
    let numbers = match raw {
        raw::RuleLuns::Mask(numbers) => numbers,
        raw::RuleLuns::Map(entries) => {
            // The check consumes the entries, but errors below need their positions.
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
                .hint(
                    "add it to the `luns` of the target; a rule only assigns a different number",
                ));
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
