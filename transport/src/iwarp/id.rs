//! An identifier of the RDMA CM.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::Socket;

use super::conn::Token;
use crate::roce::nic::rdma_cm::IdState;
use crate::verbs::{CmError, CmOption, ConnParam, QpId, VerbsError};

/// Most that an ACK timeout's exponent may be: it has five bits.
const MAX_ACK_TIMEOUT: u8 = 31;

/// Identifier of the RDMA CM.
#[derive(Debug)]
pub(super) struct Id {
    pub(super) state: IdState,
    pub(super) local: Option<SocketAddr>,
    /// The address that it was bound to by its owner, perhaps an unspecified one.
    pub(super) bound: Option<IpAddr>,
    pub(super) peer: Option<SocketAddr>,
    /// Its socket before it has a connection: bound, or listening.
    pub(super) socket: Option<Socket>,
    /// A listener's socket is known as this.
    pub(super) listening: Option<Token>,
    /// Requests that a listener takes, and those that it has.
    pub(super) backlog: usize,
    pub(super) requests: usize,
    /// The listener of a request that was not answered.
    pub(super) listener: Option<crate::verbs::CmId>,
    pub(super) conn: Option<Token>,
    pub(super) qp: Option<QpId>,
    /// Active: what was asked for.
    pub(super) param: Option<ConnParam>,
    pub(super) was_established: bool,
    /// Others may own its port.
    pub(super) reuse: bool,
    pub(super) family_only: Option<bool>,
    pub(super) tos: Option<u8>,
    /// Time after which the peer is given up, as an exponent.
    pub(super) ack_timeout: Option<u8>,
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
            reuse: false,
            family_only: None,
            tos: None,
            ack_timeout: None,
        }
    }

    /// Whether an identifier that is bound to an address takes what comes to addresses of the other
    /// family as well.
    pub(super) fn is_family_only(&self, bound: IpAddr) -> bool {
        self.family_only.unwrap_or(bound.is_ipv4())
    }

    pub(super) fn set(&mut self, option: CmOption) -> Result<(), CmError> {
        let late = CmError::InvalidState("set_option");
        let state = self.state;
        match option {
            CmOption::TypeOfService(class) => self.tos = Some(class & !0b11),
            CmOption::ReuseAddress(reuse) => {
                let may = state == IdState::Idle || reuse && state != IdState::Listening;
                self.reuse = may.then_some(reuse).ok_or(late)?;
            }
            CmOption::AddressFamilyOnly(only) => {
                let may = matches!(state, IdState::Idle | IdState::Bound);
                self.family_only = Some(may.then_some(only).ok_or(late)?);
            }
            CmOption::AckTimeout(exponent) if exponent > MAX_ACK_TIMEOUT => {
                return Err(VerbsError::InvalidParameter("ACK timeout").into());
            }
            CmOption::AckTimeout(exponent) => {
                let is_over = matches!(
                    state,
                    IdState::Listening
                        | IdState::Connecting
                        | IdState::Responded
                        | IdState::Accepting
                        | IdState::Established
                        | IdState::Disconnecting
                        | IdState::Closed
                );
                self.ack_timeout = Some((!is_over).then_some(exponent).ok_or(late)?);
            }
            CmOption::BareRequests(_) => {
                return Err(VerbsError::Unsupported("AF_IB address").into());
            }
            CmOption::PathMtu(_) => return Err(VerbsError::Unsupported("path MTU").into()),
            CmOption::AlternatePaths(_) => {
                return Err(VerbsError::Unsupported("alternate paths").into());
            }
        }
        Ok(())
    }

    /// Gives a socket the options.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) fn configure(&self, socket: &Socket, peer: SocketAddr) -> std::io::Result<()> {
        if let Some(tos) = self.tos {
            match peer {
                SocketAddr::V4(_) => socket.set_tos_v4(tos.into())?,
                SocketAddr::V6(_) => socket.set_tclass_v6(tos.into())?,
            }
        }
        if let Some(exponent) = self.ack_timeout.filter(|&exponent| exponent > 0) {
            // Its unit is 4.096 µs. The requests of a connection are given up after eight times that,
            // as with seven retries.
            let timeout = Duration::from_nanos(4096 << exponent) * 8;
            socket.set_tcp_user_timeout(Some(timeout.max(Duration::from_millis(1))))?;
        }
        Ok(())
    }
}
