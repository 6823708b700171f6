//! Counters for iSCSI targets and sessions in `fabric_statistics`, based on the iSCSI MIB (RFC
//! 4544).

use std::collections::BTreeSet;

use riser_admin_api::live::LiveTarget;
use riser_admin_api::view::initiator_name;
use rustix::io::Errno;

use super::statistics::{files, hundredths, index, line};
use super::{Attr, Kind, Read, Show, Tree, session};
use crate::tree::NodeId;

/// Session counters, `iscsi/IQN/fabric_statistics/iscsi_instance/`.
pub(super) const INSTANCE: &[Attr] = files!(show_instance;
    "inst" "min_ver" "max_ver" "portals" "nodes" "sessions" "fail_sess" "fail_type" "fail_rem_name"
    "disc_time" "description" "vendor" "version");

/// Error counters, `iscsi/IQN/fabric_statistics/iscsi_sess_err/`.
pub(super) const SESS_ERR: &[Attr] =
    files!(show_errors; "inst" "digest_errors" "cxn_errors" "format_errors");

/// Counters for failed logins, `iscsi/IQN/fabric_statistics/iscsi_tgt_attr/`.
pub(super) const TGT_ATTR: &[Attr] = files!(show_target;
    "inst" "indx" "login_fails" "last_fail_time" "last_fail_type" "fail_intr_name"
    "fail_intr_addr_type" "fail_intr_addr");

/// Login counters, `iscsi/IQN/fabric_statistics/iscsi_login_stats/`.
pub(super) const LOGIN_STATS: &[Attr] = files!(show_logins;
    "inst" "indx" "accepts" "other_fails" "redirects" "authorize_fails" "authenticate_fails"
    "negotiate_fails");

/// Logout counters, `iscsi/IQN/fabric_statistics/iscsi_logout_stats/`.
pub(super) const LOGOUT_STATS: &[Attr] =
    files!(show_logouts; "inst" "indx" "normal_logouts" "abnormal_logouts");

/// Counters of a single session, `acls/IQN/fabric_statistics/iscsi_sess_stats/`.
pub(super) const SESS_STATS: &[Attr] = files!(show_session;
    "inst" "node" "indx" "cmd_pdus" "rsp_pdus" "txdata_octs" "rxdata_octs" "conn_digest_errors"
    "conn_timeout_errors");

/// Reason for a login failure, if it has a separate counter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Failure {
    Other = 2,
    Redirect = 3,
    Authorize = 4,
    Authenticate = 5,
    Negotiate = 6,
}

impl Failure {
    /// Returns the reason for a login response.
    fn of(status: &str) -> Self {
        match status {
            "moved_temporarily" | "moved_permanently" => Self::Redirect,
            "authorization_failure" => Self::Authorize,
            "authentication_failure" => Self::Authenticate,
            "initiator_error" => Self::Negotiate,
            _ => Self::Other,
        }
    }
}

/// Returns the target for a statistics directory.
fn target(read: &Read<'_>) -> Result<NodeId, Errno> {
    let is_it = |kind| matches!(kind, Kind::Wwpn(_));
    let target = read.tree.above(read.dir, |dir| is_it(dir.kind));
    target.ok_or(Errno::NODEV)
}

fn tpgs(tree: &Tree, target: NodeId) -> impl Iterator<Item = NodeId> + '_ {
    let all = tree.subdirs(target).map(|(_, id)| id);
    all.filter(move |id| matches!(tree.dir(*id).kind, Kind::Tpg(_)))
}

/// Returns the names used for a target in the daemon's configuration.
fn names(tree: &Tree, target: NodeId) -> BTreeSet<String> {
    tpgs(tree, target)
        .map(|tpg| super::target_name(tree, tpg))
        .collect()
}

/// Returns the daemon's counters for a target.
fn counted(read: &Read<'_>, target: NodeId) -> LiveTarget {
    let names = names(read.tree, target);
    let mut all = read.world.live().targets.into_iter();
    all.find(|counted| names.contains(&counted.target))
        .unwrap_or_default()
}

fn events(counted: &LiveTarget, names: &[&str]) -> u64 {
    let count = |name: &&str| counted.events.get(*name).copied();
    names.iter().filter_map(count).sum()
}

fn failures(counted: &LiveTarget, of: impl Fn(Failure) -> bool) -> u64 {
    let refused = counted.refused.iter();
    let refused = refused.filter(|(status, _)| of(Failure::of(status)));
    refused.map(|(_, n)| n).sum()
}

fn show_instance(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let target = target(read)?;
    match read.attr.name {
        "inst" => line(index(tree, target)),
        "portals" => {
            let portals = tpgs(tree, target).filter_map(|tpg| tree.child(tpg, "np"));
            let portals = portals.flat_map(|np| tree.subdirs(np).map(|(_, portal)| portal));
            // With RDMA, there is an additional portal.
            line(
                portals
                    .map(|id| 1 + u32::from(tree.value(id, "iser") == "1"))
                    .sum::<u32>(),
            )
        }
        "nodes" => line(1),
        "sessions" => {
            let names = names(tree, target);
            let sessions = read.world.sessions().into_iter();
            line(sessions.filter(|s| names.contains(&s.target)).count())
        }
        "fail_sess" => line(events(
            &counted(read, target),
            &["digest_error", "timeout", "format_error"],
        )),
        "fail_type" => {
            let last = counted(read, target).last_error;
            line(match last.map(|error| error.event).as_deref() {
                Some("digest_error") => 1,
                Some("timeout") => 2,
                Some("format_error") => 3,
                _ => 0,
            })
        }
        "fail_rem_name" => {
            let last = counted(read, target).last_error;
            line(last.map_or_else(|| "None".to_owned(), |error| error.initiator))
        }
        "description" => line("Storage Engine Target"),
        "vendor" => line("Datera, Inc. iSCSI-Target"),
        "version" => line("v4.1.0"),
        // Protocol versions, and the time of the last counter discontinuity.
        _ => line(0),
    }
}

fn show_errors(read: &Read<'_>) -> Result<String, Errno> {
    let target = target(read)?;
    let event = match read.attr.name {
        "inst" => return line(index(read.tree, target)),
        "digest_errors" => "digest_error",
        "cxn_errors" => "timeout",
        _ => "format_error",
    };
    line(events(&counted(read, target), &[event]))
}

fn show_target(read: &Read<'_>) -> Result<String, Errno> {
    let target = target(read)?;
    match read.attr.name {
        "inst" => return line(index(read.tree, target)),
        "indx" => return line(1),
        _ => {}
    }
    let counted = counted(read, target);
    if read.attr.name == "login_fails" {
        return line(failures(&counted, |_| true));
    }
    let last = counted.last_refused;
    match read.attr.name {
        "last_fail_time" => line(last.map_or_else(
            || "0".to_owned(),
            |last| hundredths(read.world.uptime().as_secs_f64() - last.ago),
        )),
        "last_fail_type" => line(last.map_or(0, |last| Failure::of(&last.answer) as u8)),
        "fail_intr_name" => line(last.map_or_else(|| "None".to_owned(), |last| last.initiator)),
        "fail_intr_addr_type" => line(match last {
            Some(last) if last.address.contains(':') => "ipv6",
            _ => "ipv4",
        }),
        // The kernel prints this for an invalid address.
        _ => line(last.map_or_else(|| "(einval)".to_owned(), |last| last.address)),
    }
}

fn show_logins(read: &Read<'_>) -> Result<String, Errno> {
    let target = target(read)?;
    let wanted = match read.attr.name {
        "inst" => return line(index(read.tree, target)),
        "indx" => return line(1),
        "accepts" => return line(counted(read, target).logins),
        "redirects" => Failure::Redirect,
        "authorize_fails" => Failure::Authorize,
        "authenticate_fails" => Failure::Authenticate,
        "negotiate_fails" => Failure::Negotiate,
        _ => Failure::Other,
    };
    line(failures(&counted(read, target), |failure| {
        failure == wanted
    }))
}

fn show_logouts(read: &Read<'_>) -> Result<String, Errno> {
    let target = target(read)?;
    match read.attr.name {
        "inst" => line(index(read.tree, target)),
        "indx" => line(1),
        "normal_logouts" => line(events(&counted(read, target), &["logout"])),
        _ => line(events(&counted(read, target), &["partial_logout"])),
    }
}

fn show_session(read: &Read<'_>) -> Result<String, Errno> {
    if read.attr.name == "inst" {
        return line(index(read.tree, target(read)?));
    }
    let Some(session) = session::session_of(read) else {
        return Ok(String::new());
    };
    match read.attr.name {
        "node" => return line(1),
        "indx" => return line(session.id),
        _ => {}
    }
    let mut connections = read.world.live().sessions;
    connections.retain(|connection| {
        let name = initiator_name(&connection.initiator);
        connection.target == session.target && name == session.initiator
    });
    let connections = connections.iter();
    line(match read.attr.name {
        "cmd_pdus" => connections
            .map(|c| c.commands + c.in_flight as u64)
            .sum::<u64>(),
        "rsp_pdus" => connections.map(|c| c.commands).sum(),
        "txdata_octs" => connections.map(|c| c.read).sum(),
        "rxdata_octs" => connections.map(|c| c.written).sum(),
        "conn_digest_errors" => connections.map(|c| c.digest_errors).sum(),
        // If a connection times out, it's removed from its session.
        _ => 0u64,
    })
}
