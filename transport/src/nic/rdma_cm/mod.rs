//! RDMA CM calls based on the IB CM: identifiers, ports, addresses, and the state of connected
//! queue pairs.
//!
//! The IB CM ([`crate::cm::Cm`]) uses service ids and MADs. This layer adds addresses and ports,
//! inserts the address header into the private data of requests like Linux does, and changes the
//! state of queue pairs when a connection is established or closed. Each device has a [`CmAgent`].
//! Calls
//! that modify queue pairs have the device as a parameter.
//!
//! | module | description |
//! | --- | --- |
//! | `backlog` | messages from strangers |
//! | `calls` | identifiers, addresses, listeners |
//! | `connect` | connect, accept, reject, disconnect |
//! | `datagram` | datagram identifiers, which look up the queue pair for a port |
//! | `events` | IB CM events, sending and receiving MADs |
//! | `groups` | multicast groups |
//! | `qp_attr` | attributes used to change the state of a connected queue pair |
//! | `options` | options that must be set before connecting |
//! | `paths` | alternate paths of connections |
//! | `ports` | local ports, and rules for sharing them |
//! | `retry` | new requests after a rejection |
//! | `state` | identifier states |
//!
//! # Design
//! - The device has a single address, so resolving an address only checks it, and the route is only
//!   a path MTU. For both calls, the result is available when their event is polled.
//! - As in librdmacm, `ConnParam` in an event is from the receiver's perspective: the peer's
//!   initiator depth is reported as our responder resources, and vice versa.
//! - If the peer's interface has a smaller MTU, it rejects our path MTU and sends the supported
//!   value (IBTA 12.6.7.2, reason 26). We then send a new request using this value, without
//!   notifying the application.
//! - If the peer redirects the request to another port
//!   ([`CmOption::Redirects`](crate::verbs::CmOption::Redirects)), we send it there, without
//!   notifying the application. The number of redirections is limited, because ports could refer to
//!   each other.
//! - A connection is established when we receive the RTU or the first data packet, whichever is
//!   first. The application does not need to call anything for this.
//!
//! # Bounds
//! The number of identifiers is limited by [`NicLimits::max_cm_ids`](super::NicLimits). An
//! identifier only has a few pending events, and a listener has no more requests than its backlog.
//!
//! Messages from strangers (i.e. if they don't match a connection with this sender) share the CPU
//! with data: 16 messages are handled per round, and up to 512 are
//! queued for the following rounds. Any more are dropped, which the sender should be prepared for.
//! In each round, the device receives a limited number of packets from the socket. If there are any
//! packets left, we only handle a single message every eight rounds until the socket
//! is empty, since they are far more expensive than dropping them, and received data would have to
//! wait behind all of them. As a result, a flood of requests doesn't block packets of connections,
//! or messages of new connections.

mod backlog;
mod calls;
mod connect;
mod datagram;
mod events;
mod groups;
mod options;
mod paths;
mod ports;
mod qp_attr;
mod retry;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use self::backlog::Backlog;
pub use self::calls::port_space;
pub(crate) use self::calls::{check_destination, forget_events, unspecified};
pub(crate) use self::options::Options;
pub(crate) use self::state::IdState;
use crate::cm::{Cm, CmConfig, IbCmId, QpPeer};
use crate::table::Table;
use crate::verbs::{AltPath, CmEvent, CmId, ConnParam, PortSpace, QpId, QpType};
use crate::wire::cm_msg::CaGuid;
use crate::wire::cma::RdmaPortSpace;
use crate::wire::{Psn, Qpn};

/// RDMA CM id.
#[derive(Debug)]
struct Id {
    space: PortSpace,
    /// QP type. A datagram id looks up a QP instead of connecting to it.
    qp_type: QpType,
    state: IdState,
    options: Options,
    local: Option<SocketAddr>,
    /// Address this id was bound to by the application, which can be unspecified. It is used to
    /// check for port conflicts.
    bound: Option<IpAddr>,
    peer: Option<SocketAddr>,
    qp: Option<QpId>,
    ib: Option<IbCmId>,
    /// QP parameters from the peer's request or reply.
    said: Option<Box<QpPeer>>,
    /// QP number, if the state of the QP is managed by the application.
    external: Option<Qpn>,
    /// Number of incoming and outgoing READs and atomics of our QP; `None` until they have been
    /// sent to the peer.
    depths: Option<(u8, u8)>,
    /// First PSN used by the peer.
    rq_psn: Psn,
    /// Alternate path from the request, or the path that has been proposed or accepted since.
    alternate: Option<AltPath>,
    /// Active side: parameters of the request.
    param: Option<Box<ConnParam>>,
    /// Active side: set if we have retried with a smaller path MTU.
    retried: bool,
    /// Active side: number of redirections followed.
    redirects: u8,
    /// Joined multicast groups.
    groups: Vec<IpAddr>,
    /// Set once the connection has been established, so the application must be notified when the
    /// timewait state is over.
    was_established: bool,
}

impl Id {
    fn new(space: PortSpace, qp_type: QpType, rq_psn: Psn) -> Self {
        Self {
            space,
            qp_type,
            state: IdState::Idle,
            options: Options::default(),
            local: None,
            bound: None,
            peer: None,
            qp: None,
            ib: None,
            said: None,
            external: None,
            depths: None,
            rq_psn,
            alternate: None,
            param: None,
            retried: false,
            redirects: 0,
            groups: Vec::new(),
            was_established: false,
        }
    }
}

/// Connection manager of a device.
#[derive(Debug)]
pub struct CmAgent {
    cm: Cm,
    ids: Table<CmId, Id>,
    by_ib: HashMap<IbCmId, CmId>,
    by_qp: HashMap<QpId, CmId>,
    /// Identifiers using each local port.
    ports: HashMap<(RdmaPortSpace, u16), Vec<CmId>>,
    events: VecDeque<CmEvent>,
    backlog: Backlog,
    /// Set if the IB CM may have a MAD to send.
    may_send: bool,
    /// PSN of the next MAD.
    psn: Psn,
}

impl CmAgent {
    /// Returns the CM state machine.
    pub(crate) fn machine(&self) -> &Cm {
        &self.cm
    }

    /// Returns the current number of ids.
    pub(crate) fn id_count(&self) -> usize {
        self.ids.len()
    }

    /// Returns the IB CM configuration for a device with this GUID and maximum number of ids.
    #[must_use]
    pub fn cm_config(guid: u64, max_ids: u32) -> CmConfig {
        CmConfig {
            // We need twice the number because IB CM ids remain in timewait after their id has been
            // destroyed.
            max_ids: max_ids as usize * 2,
            // On a network suitable for RoCE, establishing a connection does not take long.
            max_timewait: Duration::from_secs(2),
            // This can be disabled for each id.
            alternate_paths: true,
            ..CmConfig::new(CaGuid(guid))
        }
    }

    /// Creates an agent for a worker using a secret seed.
    #[must_use]
    pub fn new(config: CmConfig, max_ids: u32, worker: (u32, u8), seed: [u8; 32]) -> Self {
        Self {
            cm: Cm::new(config, worker.0, worker.1.into(), seed),
            ids: Table::new("connection identifier", max_ids),
            by_ib: HashMap::new(),
            by_qp: HashMap::new(),
            ports: HashMap::new(),
            events: VecDeque::new(),
            backlog: Backlog::new(),
            may_send: false,
            psn: Psn::new(0),
        }
    }

    /// Returns the IB CM counters.
    #[must_use]
    pub fn counters(&self) -> crate::cm::CmCounters {
        self.cm.counters()
    }
}
