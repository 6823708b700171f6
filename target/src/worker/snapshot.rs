//! What a worker tells of itself.

use super::Worker;
use super::mail::{SessionAccount, Snapshot};
use super::target::Entrance;
use crate::config::Protocol;
use crate::fabric::Accounts;
use crate::stats::Functions;

/// The accounts of a session, for whoever wants to know.
pub(super) fn accounts<'a>(
    protocol: Protocol,
    initiator: String,
    accounts: &'a Accounts,
) -> impl Iterator<Item = SessionAccount> + 'a {
    accounts.iter().map(move |account| SessionAccount {
        protocol,
        initiator: initiator.clone(),
        account: account.clone(),
    })
}

impl Worker {
    pub(super) fn snapshot(&self) -> Snapshot {
        let mut counters = self.past;
        let mut functions = self.past_functions.clone();
        for (_, session) in &self.sessions {
            counters += session.channel.counters();
            functions.merge(session.channel.functions());
        }
        let srp = self.sessions.iter().flat_map(|(_, session)| {
            let initiator = session.key.initiator.to_string();
            accounts(Protocol::Srp, initiator, session.channel.accounts())
        });
        Snapshot {
            worker: self.index,
            counters,
            sessions: self
                .sessions
                .iter()
                .map(|(_, s)| s.info(self.index))
                .collect(),
            iscsi: self.iscsi.counters() + self.isers.counters(),
            iscsi_sessions: self.iscsi.sessions().chain(self.isers.sessions()).collect(),
            accounts: srp
                .chain(self.iscsi.accounts())
                .chain(self.isers.accounts())
                .collect(),
            functions: self.functions(functions).into(),
            logins: self.logins.clone(),
            rejects: self.rejects.clone(),
            devices: self.devices.info(),
            rdma_listeners: self.rdma_listeners(),
            tcp_listeners: self.iscsi.listening().collect(),
            busy: self.busy,
            ran: self.now.saturating_duration_since(self.began),
            pool_size: self.pool.size(),
            pool_free: self.pool.free(),
            pool_lowest: self.pool.lowest_free(),
            parks: self.parks,
        }
    }

    fn functions(&self, srp: Functions) -> [(Protocol, Functions); 3] {
        [
            (Protocol::Srp, srp),
            (Protocol::Iscsi, self.iscsi.functions()),
            (Protocol::Iser, self.isers.functions()),
        ]
    }

    /// Ports of the RDMA CM on devices that work.
    fn rdma_listeners(&self) -> Vec<std::net::SocketAddr> {
        let listeners = self.listeners.iter();
        let open = listeners.filter(|((device, _), _)| self.devices.is_open(*device));
        open.filter_map(|((device, _), listener)| match listener.entrance {
            Entrance::Port(port) => Some((self.devices.addr(*device), port).into()),
            Entrance::Service(_) => None,
        })
        .collect()
    }
}
