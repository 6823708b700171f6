//! The RDMA CM's calls over the IB CM: identifiers, ports, addresses, and queue pairs that follow
//! their connection.
//!
//! The IB CM ([`crate::cm::Cm`]) speaks of service ids and MADs. This layer gives it addresses and
//! ports, puts the address header into a request's private data as Linux does, and takes queue
//! pairs through their states as a connection comes and goes. A device has one [`CmAgent`]; the
//! calls are methods of [`Nic`](super::Nic), since they change queue pairs.
//!
//! | module | what it does |
//! | --- | --- |
//! | `calls` | identifiers, addresses, listeners |
//! | `connect` | connecting, accepting, refusing, disconnecting |
//! | `datagram` | identifiers for datagrams: which queue pair is behind a port |
//! | `events` | events of the IB CM, and MADs in and out |
//! | `groups` | multicast groups |
//! | `qp_attr` | attributes of a connection's queue pair, by which it goes through its states |
//! | `options` | what is set before a connection is made |
//! | `paths` | alternate paths of connections |
//! | `ports` | local ports and who may share them |
//! | `state` | the states of an identifier |
//!
//! # Choices
//! - A device has one address, so resolving one is a check, and a route is the path MTU. Both calls
//!   have answered by the time their event is polled.
//! - `ConnParam` in an event speaks from the receiver's point of view, as librdmacm's does: the
//!   peer's initiator depth comes as our responder resources, and the other way round.
//! - A peer whose interface carries less refuses our path MTU and says what it takes (IBTA
//!   12.6.7.2, reason 26). The request is then sent again with that, without a word to the user.
//! - A connection is established when the RTU arrives or, without being asked, when the first
//!   packet does.
//!
//! # Bounds
//! Identifiers: [`NicLimits::max_cm_ids`](super::NicLimits). An identifier has few events under
//! way, and a listener at most its backlog of requests.
//!
//! Messages of strangers (all that name no connection of ours with their sender) take turns with
//! data: [`MADS_PER_ROUND`] of them are handled in a round of the device, [`MAX_WAITING_MADS`] more
//! wait for the next ones, and beyond that they are lost, which their senders must expect. A round
//! takes a limited number of packets out of the socket. If that leaves some there, the device is
//! behind, and one message is handled in [`ROUNDS_PER_MAD`] rounds until the socket is empty: they
//! cost far more than the packets that are dropped, and data would wait in the socket behind all
//! of them, however few are handled. So a flood of requests neither delays the packets of
//! connections nor the messages of those being made.

mod calls;
mod connect;
mod datagram;
mod events;
mod groups;
mod options;
mod paths;
mod ports;
mod qp_attr;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub use self::calls::port_space;
pub(crate) use self::calls::{check_destination, forget_events, unspecified};
pub(crate) use self::options::Options;
pub(crate) use self::state::IdState;
use crate::cm::{Cm, CmConfig, IbCmId, QpPeer};
use crate::table::Table;
use crate::verbs::{AltPath, CmEvent, CmId, ConnParam, PortSpace, QpId, QpType};
use crate::wire::cm_msg::CaGuid;
use crate::wire::cma::RdmaPortSpace;
use crate::wire::mad::Mad;
use crate::wire::{Psn, Qpn};

/// Messages of strangers that are handled in a round. The user may make a whole channel for each.
const MADS_PER_ROUND: u32 = 16;
/// Messages of strangers that wait for a later round.
const MAX_WAITING_MADS: usize = 512;
/// Rounds for each message of a stranger while packets stay behind in the socket. Not without end:
/// data alone may keep it from ever being empty, and hosts log in beside them.
const ROUNDS_PER_MAD: u32 = 8;

/// Identifier of the RDMA CM.
#[derive(Debug)]
struct Id {
    space: PortSpace,
    /// Type of its queue pairs; a datagram one asks for a queue pair instead of a connection.
    qp_type: QpType,
    state: IdState,
    options: Options,
    local: Option<SocketAddr>,
    /// The address that it was bound to by its owner, perhaps an unspecified one. The local port is
    /// entered in the table of ports as its own.
    bound: Option<IpAddr>,
    peer: Option<SocketAddr>,
    qp: Option<QpId>,
    ib: Option<IbCmId>,
    /// What the peer's request or answer says about our queue pair.
    said: Option<Box<QpPeer>>,
    /// Number of the queue pair that its owner takes through its states without us.
    external: Option<Qpn>,
    /// READs and atomics that our queue pair holds, and sends, at once; `None` before we have said
    /// so to the peer.
    depths: Option<(u8, u8)>,
    /// The PSN that the peer begins with.
    rq_psn: Psn,
    /// The alternate path: that of the request, or one that was agreed on or is proposed.
    alternate: Option<AltPath>,
    /// Active: what was asked for.
    param: Option<Box<ConnParam>>,
    /// Active: whether the request was sent again with a smaller path MTU.
    retried: bool,
    /// Multicast groups that it has joined.
    groups: Vec<IpAddr>,
    /// It has been connected, so there is a timewait whose end the user waits for.
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
            groups: Vec::new(),
            was_established: false,
        }
    }
}

/// The connection manager of a device.
#[derive(Debug)]
pub struct CmAgent {
    cm: Cm,
    ids: Table<CmId, Id>,
    by_ib: HashMap<IbCmId, CmId>,
    by_qp: HashMap<QpId, CmId>,
    /// Owners of local ports.
    ports: HashMap<(RdmaPortSpace, u16), Vec<CmId>>,
    events: VecDeque<CmEvent>,
    /// Messages of strangers that wait for a later round.
    waiting: VecDeque<(IpAddr, Mad)>,
    /// Messages of strangers that may still be handled in this round.
    turns: u32,
    /// Packets stayed behind in the socket when it was last read, and rounds since a stranger had
    /// its turn.
    is_behind: bool,
    rounds: u32,
    /// The IB CM may have a MAD to send.
    may_send: bool,
    /// PSN of the next MAD.
    psn: Psn,
}

impl CmAgent {
    /// The CM as a machine.
    pub(in crate::roce) fn machine(&self) -> &Cm {
        &self.cm
    }

    /// Identifiers in use.
    pub(in crate::roce) fn id_count(&self) -> usize {
        self.ids.len()
    }

    /// Configuration of the IB CM for a device with this GUID and number of identifiers.
    #[must_use]
    pub fn cm_config(guid: u64, max_ids: u32) -> CmConfig {
        CmConfig {
            // Twice, since ids of the IB CM stay in timewait after their identifiers are
            // destroyed.
            max_ids: max_ids as usize * 2,
            // On a network that suits RoCE, connecting does not take long.
            max_timewait: Duration::from_secs(2),
            // Whether one is accepted, its identifier says.
            alternate_paths: true,
            ..CmConfig::new(CaGuid(guid))
        }
    }

    /// An agent with a worker and a secret seed.
    #[must_use]
    pub fn new(config: CmConfig, max_ids: u32, worker: (u32, u8), seed: [u8; 32]) -> Self {
        Self {
            cm: Cm::new(config, worker.0, worker.1.into(), seed),
            ids: Table::new("connection identifier", max_ids),
            by_ib: HashMap::new(),
            by_qp: HashMap::new(),
            ports: HashMap::new(),
            events: VecDeque::new(),
            waiting: VecDeque::new(),
            turns: MADS_PER_ROUND,
            is_behind: false,
            rounds: 0,
            may_send: false,
            psn: Psn::new(0),
        }
    }

    /// Gives strangers their turns of another round.
    fn begin_round(&mut self) {
        self.rounds += 1;
        self.turns = match (self.is_behind, self.rounds >= ROUNDS_PER_MAD) {
            (false, _) => MADS_PER_ROUND,
            (true, is_due) => u32::from(is_due),
        };
        if self.turns > 0 {
            self.rounds = 0;
        }
    }

    /// Returns whether a message may be handled in this round.
    fn takes_now(&mut self, from: IpAddr, mad: &[u8]) -> bool {
        // Who names a connection has been sent a message of ours, so it is no flood of forged
        // requests.
        if self.cm.knows(from, mad) {
            return true;
        }
        // A message may not overtake those that wait: they are handled in the order of their
        // arrival.
        let takes = self.turns > 0 && self.waiting.is_empty();
        self.turns -= u32::from(takes);
        takes
    }

    /// Counters of the IB CM.
    #[must_use]
    pub fn counters(&self) -> crate::cm::CmCounters {
        self.cm.counters()
    }
}
