//! RDMA CM identifier.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::Socket;

use super::PEER_TIME;
use super::conn::Token;
use crate::nic::rdma_cm::{IdState, Options};
use crate::verbs::{CmError, CmOption, ConnParam, QpId, QpType, VerbsError};

/// RDMA CM id.
#[derive(Debug)]
pub(super) struct Id {
    pub(super) state: IdState,
    pub(super) local: Option<SocketAddr>,
    /// Address this id was bound to by the application, which can be unspecified.
    pub(super) bound: Option<IpAddr>,
    pub(super) peer: Option<SocketAddr>,
    /// Bound or listening socket, if not connected yet.
    pub(super) socket: Option<Socket>,
    /// Token used for the socket of a listener.
    pub(super) listening: Option<Token>,
    /// Maximum and current number of pending requests of a listener.
    pub(super) backlog: usize,
    pub(super) requests: usize,
    /// Listener of a pending request.
    pub(super) listener: Option<crate::verbs::CmId>,
    pub(super) conn: Option<Token>,
    pub(super) qp: Option<QpId>,
    /// Active side: parameters of the request.
    pub(super) param: Option<ConnParam>,
    pub(super) was_established: bool,
    pub(super) options: Options,
}

impl Id {
    pub(super) fn new() -> Self {
        Self {
            state: IdState::Idle,
            local: None,
            bound: None,
            peer: None,
            socket: None,
            listening: None,
            backlog: 0,
            requests: 0,
            listener: None,
            conn: None,
            qp: None,
            param: None,
            was_established: false,
            options: Options::default(),
        }
    }

    pub(super) fn set(&mut self, option: CmOption) -> Result<(), CmError> {
        let missing = match option {
            CmOption::BareRequests(_) => "AF_IB address",
            CmOption::PathMtu(_) => "path MTU",
            CmOption::AlternatePaths(_) => "alternate paths",
            CmOption::Redirects(1..) => "redirection",
            option => return self.options.set(option, self.state, QpType::Rc),
        };
        Err(VerbsError::Unsupported(missing).into())
    }

    /// Applies the options to a socket.
    ///
    /// # Errors
    /// Returns socket errors.
    pub(super) fn configure(&self, socket: &Socket, peer: SocketAddr) -> std::io::Result<()> {
        if let Some(tos) = self.options.traffic_class {
            match peer {
                SocketAddr::V4(_) => socket.set_tos_v4(tos.into())?,
                SocketAddr::V6(_) => socket.set_tclass_v6(tos.into())?,
            }
        }
        if let Some(exponent) = self.options.ack_timeout.filter(|&exponent| exponent > 0) {
            // The unit is 4.096 µs. Use eight times this value, which corresponds to seven retries.
            let timeout = Duration::from_nanos(4096 << exponent) * 8;
            socket.set_tcp_user_timeout(Some(timeout.max(Duration::from_millis(1))))?;
            // Linux also uses this option for unanswered keepalive probes, and losing a single
            // probe would close the connection.
            if timeout < PEER_TIME {
                socket.set_keepalive(false)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};

    #[test]
    fn short_ack_timeout_sends_no_keepalive() {
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        // 2.1 s and 34 s.
        for (exponent, has_keepalive) in [(16, false), (20, true)] {
            let mut id = Id::new();
            id.set(CmOption::AckTimeout(exponent)).unwrap();
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_keepalive(true).unwrap();
            id.configure(&socket, peer).unwrap();
            assert_eq!(socket.keepalive().unwrap(), has_keepalive, "{exponent}");
        }
    }
}
