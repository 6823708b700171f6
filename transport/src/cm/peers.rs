//! Index of connections by peer.

use std::collections::{BTreeMap, BTreeSet};

use super::conn::{Claim, Conn, ReqIdentity};
use super::{IbCmId, PeerAddr};
use crate::wire::cm_msg::{CaGuid, CommId};

/// Connections by the requests and resources of their peers.
#[derive(Debug, Default)]
pub(super) struct PeerIndex {
    /// Passive connections by peer and request, including timewait.
    pub(super) by_req: BTreeMap<(PeerAddr, ReqIdentity), IbCmId>,
    /// Resources used at the peers, without connections in timewait. A forged request can use the
    /// same resource as an existing connection.
    pub(super) claims: BTreeSet<(PeerAddr, CaGuid, Claim, IbCmId)>,
    /// SIDR requests by peer and request ID.
    pub(super) by_sidr: BTreeMap<(PeerAddr, CommId), IbCmId>,
}

impl PeerIndex {
    /// Adds the peer's ID and QP number.
    pub(super) fn insert(&mut self, id: IbCmId, conn: &Conn) {
        for (peer, guid, claim) in conn.claims() {
            self.claims.insert((peer, guid, claim, id));
        }
        if let Some(identity) = conn.identity {
            self.by_req.insert((conn.peer, identity), id);
        }
    }

    /// Removes the peer's ID and QP number, which it can use for a new connection.
    pub(super) fn remove_claims(&mut self, id: IbCmId, conn: &Conn) {
        for (peer, guid, claim) in conn.claims() {
            self.claims.remove(&(peer, guid, claim, id));
        }
    }

    /// Removes the request that created the connection.
    pub(super) fn remove_request(&mut self, conn: &Conn) {
        if let Some(identity) = conn.identity {
            self.by_req.remove(&(conn.peer, identity));
        }
    }

    /// Returns all connections that use the same communication ID or QP of the peer's adapter.
    pub(super) fn claimants(&self, conn: &Conn) -> Vec<IbCmId> {
        let mut all = Vec::new();
        for (peer, guid, claim) in conn.claims() {
            let with = |id| (peer, guid, claim, IbCmId(CommId(id)));
            let claimants = self.claims.range(with(0)..=with(u32::MAX));
            all.extend(claimants.map(|(.., other)| *other));
        }
        all
    }
}
