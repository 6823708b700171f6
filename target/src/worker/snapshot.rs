//! Worker status report.

use std::sync::Arc;

use super::Worker;
use super::conns::{Conn, Connection};
use super::device::Devices;
use super::fabrics::Fabric;
use super::mail::{IscsiSession, SessionAccount, Snapshot};
use crate::config::Protocol;
use crate::stats::Functions;
use crate::{iscsi, srp};

/// Connection counters by protocol.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    srp: srp::Counters,
    iscsi: iscsi::Counters,
    srp_functions: Functions,
    iscsi_functions: Functions,
    iser_functions: Functions,
}

impl Totals {
    /// Adds the counters of a connection.
    pub(super) fn add(&mut self, fabric: &Fabric) {
        let functions = match fabric {
            Fabric::Srp(conn) => {
                self.srp += conn.channel.stats().counters;
                &mut self.srp_functions
            }
            Fabric::Tcp(conn) => {
                self.iscsi += conn.channel.channel().executor().stats().counters;
                &mut self.iscsi_functions
            }
            Fabric::Iser(conn) => {
                self.iscsi += conn.channel.channel().executor().stats().counters;
                &mut self.iser_functions
            }
        };
        functions.merge(fabric.functions());
    }
}

/// Returns the session of an iSCSI connection, if it has logged in.
fn iscsi_session(conn: &Conn<Fabric>, devices: &Devices) -> Option<IscsiSession> {
    let (memory, info) = match &conn.fabric {
        Fabric::Srp(_) => return None,
        Fabric::Tcp(own) => {
            let channel = own.channel.channel();
            let memory = own.socket.memory() + channel.memory();
            (memory, channel.session_info()?)
        }
        Fabric::Iser(own) => {
            let channel = own.channel.channel();
            let memory = own.channel.params().memory().total() + channel.executor().staged_memory();
            (memory, channel.session_info()?)
        }
    };
    Some(IscsiSession {
        serial: conn.serial(),
        peer: conn.peer,
        provider: conn.fabric.rdma().map(|link| devices.provider(link.device)),
        memory,
        info,
    })
}

/// Returns the session statistics of a connection for each unit.
fn accounts(conn: &Conn<Fabric>) -> impl Iterator<Item = SessionAccount> + '_ {
    let protocol = conn.fabric.protocol();
    let (initiator, accounts) = conn.fabric.accounts();
    let initiator: Arc<str> = initiator.into();
    accounts.iter().map(move |account| SessionAccount {
        protocol,
        initiator: Arc::clone(&initiator),
        account: account.clone(),
    })
}

/// Announced heap memory for the connections of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announced {
    /// Number of connections, including those before login.
    pub connections: usize,
    /// Maximum memory in bytes for all contexts, including unused contexts. This doesn't include
    /// rings, which are mapped separately, or queue pairs.
    pub bytes: usize,
}

impl Worker {
    /// Returns the memory for current connections.
    #[must_use]
    pub fn announced(&self) -> Announced {
        let bytes = |fabric: &Fabric| match fabric {
            Fabric::Srp(own) => own.channel.config().params.memory().contexts,
            Fabric::Tcp(own) => own.channel.channel().memory(),
            Fabric::Iser(own) => own.channel.params().memory().contexts,
        };
        let all = self.group.conns.iter();
        let spare = Announced {
            connections: 0,
            bytes: self.group.spares.memory(),
        };
        all.fold(spare, |sum, (_, conn)| Announced {
            connections: sum.connections + 1,
            bytes: sum.bytes + bytes(&conn.fabric),
        })
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        // This includes closed connections, because the totals must not decrease.
        let mut totals = self.group.past.clone();
        let mut sessions = Vec::new();
        let (mut iscsi_sessions, mut session_accounts) = (Vec::new(), Vec::new());
        for (_, conn) in self.group.conns.iter() {
            totals.add(&conn.fabric);
            if let Fabric::Srp(own) = &conn.fabric {
                let provider = self.group.devices.provider(own.rdma.device);
                sessions.push(own.info(conn.peer, provider, self.group.index));
            }
            iscsi_sessions.extend(iscsi_session(conn, &self.group.devices));
            session_accounts.extend(accounts(conn));
        }
        Snapshot {
            worker: self.group.index,
            counters: totals.srp,
            sessions,
            iscsi: totals.iscsi,
            iscsi_sessions,
            accounts: session_accounts,
            functions: vec![
                (Protocol::Srp, totals.srp_functions),
                (Protocol::Iscsi, totals.iscsi_functions),
                (Protocol::Iser, totals.iser_functions),
            ],
            logins: self.group.logins.accepted().clone(),
            rejects: self.group.logins.refused().clone(),
            devices: self.group.devices.info(),
            rdma_listeners: self.group.portals.listeners.ports(&self.group.devices),
            tcp_listeners: self.group.sockets.listening().collect(),
            busy: self.busy,
            ran: self.group.now.saturating_duration_since(self.began),
            pool_size: self.group.pool.size(),
            pool_free: self.group.pool.free(),
            pool_lowest: self.group.pool.lowest_free(),
            pool_is_whole: self.group.pool.is_whole(),
            connections: self.group.conns.iter().count(),
            timers: self.group.conns.timers(),
            waiting_mail: self.group.outbox.waiting(),
            parks: self.parks,
        }
    }
}
