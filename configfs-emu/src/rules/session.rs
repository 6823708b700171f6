//! Contents of an initiator's files while it's logged in.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use rustix::io::Errno;

use super::{Attr, Initiator, Kind, Read, Show, Tree};
use crate::tree::NodeId;
use crate::world::Session;

/// Negotiated values, `acls/IQN/param/`.
pub(super) const NODE_PARAM: &[Attr] = &[
    Attr::ro("MaxConnections", Show::With(show_term)),
    Attr::ro("InitialR2T", Show::With(show_term)),
    Attr::ro("ImmediateData", Show::With(show_term)),
    Attr::ro("MaxBurstLength", Show::With(show_term)),
    Attr::ro("FirstBurstLength", Show::With(show_term)),
    Attr::ro("DefaultTime2Wait", Show::With(show_term)),
    Attr::ro("DefaultTime2Retain", Show::With(show_term)),
    Attr::ro("MaxOutstandingR2T", Show::With(show_term)),
    Attr::ro("DataPDUInOrder", Show::With(show_term)),
    Attr::ro("DataSequenceInOrder", Show::With(show_term)),
    Attr::ro("ErrorRecoveryLevel", Show::With(show_term)),
];

/// Returns the sessions of a portal group.
fn sessions(read: &Read<'_>) -> (NodeId, Vec<Session>) {
    let tpg = read
        .tree
        .above(read.dir, |dir| matches!(dir.kind, Kind::Tpg(_)));
    let tpg = tpg.expect("only directories of portal groups ask");
    let name = super::target_name(read.tree, tpg);
    let mut sessions = read.world.sessions();
    sessions.retain(|session| session.target == name);
    (tpg, sessions)
}

/// Returns the session for an initiator directory.
pub(super) fn session_of(read: &Read<'_>) -> Option<Session> {
    let acl = read
        .tree
        .above(read.dir, |dir| matches!(dir.kind, Kind::Acl(_)));
    let entry = &read.tree.dir(acl.expect("only its directories ask")).name;
    let (_, sessions) = sessions(read);
    let is_it = |s: &Session| is_named(entry, &s.initiator, std::slice::from_ref(s));
    sessions.into_iter().find(is_it)
}

/// Returns true if an entry is for this initiator, using the daemon's name for it. If the entry is
/// an address, we need to check the sessions.
pub(super) fn is_named(entry: &str, initiator: &str, sessions: &[Session]) -> bool {
    let port = || {
        let (extension, guid) = initiator.split_once(':')?;
        let half = |digits| u64::from_str_radix(digits, 16).ok();
        Some((half(extension)?, half(guid)?))
    };
    entry == initiator
        || match Initiator::parse(entry) {
            Some(Initiator::Port(id)) => port() == Some(((id >> 64) as u64, id as u64)),
            Some(Initiator::Guid(id)) => port().is_some_and(|(_, guid)| guid == id),
            Some(Initiator::Address(address)) => {
                let of_it = sessions.iter().filter(|s| s.initiator == initiator);
                let mut peers = of_it.flat_map(|s| &s.addresses);
                peers.any(|peer| {
                    let peer = peer.parse::<SocketAddr>();
                    peer.is_ok_and(|peer| peer.ip().to_canonical() == address)
                })
            }
            None => false,
        }
}

/// Returns all initiators that are logged in without an entry, one per line.
pub(super) fn show_dynamic(read: &Read<'_>) -> Result<String, Errno> {
    let (tpg, sessions) = sessions(read);
    let known = names(read.tree, tpg);
    let unknown = sessions.into_iter().map(|s| s.initiator);
    // Use a set, because in LIO an initiator with several sessions is only shown once.
    let unknown: BTreeSet<String> = unknown.filter(|name| !known.contains(name)).collect();
    Ok(unknown.into_iter().map(|name| name + "\n").collect())
}

fn names(tree: &Tree, tpg: NodeId) -> BTreeSet<String> {
    let acls = tree.child(tpg, "acls").expect("it comes with it");
    tree.subdirs(acls)
        .map(|(name, _)| name.to_owned())
        .collect()
}

fn show_term(read: &Read<'_>) -> Result<String, Errno> {
    let Some(session) = session_of(read) else {
        return Ok("No Active iSCSI Session\n".to_owned());
    };
    // Boolean values are shown as numbers.
    let value = session.terms.get(read.attr.name).map(String::as_str);
    Ok(match value {
        Some("Yes") => "1\n".to_owned(),
        Some("No") => "0\n".to_owned(),
        Some(value) => format!("{value}\n"),
        None => String::new(),
    })
}

/// Shows the session of an initiator and its connections. We don't know the sequence numbers, so
/// they are set to zero.
pub(super) fn show_info(read: &Read<'_>) -> Result<String, Errno> {
    let name = &read.tree.dir(read.dir).name;
    let Some(session) = session_of(read) else {
        return Ok(format!(
            "No active iSCSI Session for Initiator Endpoint: {name}\n"
        ));
    };
    let (session_state, connection_state) = if session.is_live {
        ("LOGGED_IN", "LOGGED_IN")
    } else {
        ("ACTIVE", "IN_LOGIN")
    };
    // The daemon doesn't report sequence numbers.
    let zero = "0x00000000";
    let mut text = format!(
        "InitiatorName: {}\nInitiatorAlias: \nLIO Session ID: {}   ISID: 0x{}  TSIH: {}  SessionType: \
         Normal\nSession State: TARG_SESS_STATE_{session_state}\n",
        session.initiator, session.id, session.isid, session.id
    );
    text += "---------------------[iSCSI Session Values]-----------------------\n";
    text += "  CmdSN/WR  :  CmdSN/WC  :  ExpCmdSN  :  MaxCmdSN  :     ITT    :     TTT\n";
    text += &format!(" {zero}   {zero}   {zero}   {zero}   {zero}   {zero}\n");
    text += "----------------------[iSCSI Connections]-------------------------\n";
    for (cid, address) in session.addresses.iter().enumerate() {
        text += &format!(
            "CID: {cid}  Connection State: TARG_CONN_STATE_{connection_state}\n   Address {address} \
             TCP  StatSN: {zero}\n"
        );
    }
    Ok(text)
}
