//! A device whose connections are those of iWARP: RDMA over TCP.
//!
//! [`Iwarp::open`] opens a device at a local address; it is a [`Provider`](crate::verbs::Provider),
//! to be driven by the thread that owns it. It needs no privilege, and no more of the network than TCP.
//! Linux's `siw` and adapters for iWARP are its peers. It is the [`Nic`] of the software NIC, with its
//! regions, keys, queues and events; its queue pairs are those of [`rdmap`](crate::rdmap), each over a
//! TCP connection of its own.
//!
//! It has reliable connections only, which the connection manager makes: no datagrams, unreliable or
//! extended connections, multicast, and no queue pairs that their owners take to RTS. See
//! [`rdmap`](crate::rdmap) for how its operations differ from those of InfiniBand.
//!
//! | module | what it is |
//! | --- | --- |
//! | `calls` | the calls of the RDMA CM |
//! | `conn` | a TCP connection, and the state that it is in |
//! | `id` | an identifier of the RDMA CM |
//! | `io` | sockets that are ready, bytes in and out, times |
//! | `setup` | requests and replies, and the end of connections |
//!
//! # Connections
//! Port numbers are those of TCP. An MPA request brings the private data of the caller, without an
//! address header: the TCP connection has the addresses. A refusal has no reason beside its private
//! data, and is reported as one of the consumer (28); no listener (8) is a TCP connection that is
//! refused. The number of the peer's queue pair is not known.
//!
//! An error of either side ends the connection. The end of the TCP connection is the event
//! `Disconnected`, and the end of the queue pair, with `TimewaitExit` at once behind it.
//!
//! A peer that does not know revision 2 of MPA closes a connection that asks with it, or answers with
//! revision 1. It is asked once more with that one, on a new TCP connection from the same port. A peer
//! that is full closes connections, too, and should not have twice as many: one that closes after five
//! seconds, or of which another connection says that it knows revision 2, is not asked again. A full one
//! that closes earlier, as this device does, and of which none says so, is asked once more. With
//! revision 1 the ends do not compare their depths: each has those that its user gave.
//!
//! A peer that acknowledges nothing for [`PEER_TIME`], or takes nothing, is given up. One that says
//! nothing is asked by TCP for a sign of life after a third of it, unless its user wants a shorter time.
//!
//! # Bounds
//! A connection that has not sent its request keeps as much as a request has, for [`SETUP_TIME`], and
//! there are [`MAX_STRANGERS`] of them, half as many from one address. A listener has as many requests as
//! its backlog says; others wait in the kernel. What a socket does not take, up to [`TURN`] bytes and a
//! segment, stays with its connection, which makes nothing else meanwhile. A connection that is over has
//! a short time for what it still sends.
//!
//! TCP protects nothing: a host on the way can read and change everything. Keep strangers out of the
//! network, or encrypt it.

mod calls;
mod conn;
mod id;
mod io;
mod setup;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use tracing::info;

use self::conn::{Conn, Token};
use self::id::Id;
use crate::rdmap::Wishes;
use crate::roce::delegate::{delegate_counters_to_nic, delegate_verbs_to_nic};
use crate::roce::nic::{Nic, NicConfig, NicLimits, Wire};
use crate::table::Table;
use crate::verbs::{CmEvent, CmId, QpId, VerbsError};
use crate::wire::is_link_local;

/// Name of the provider.
pub const PROVIDER: &str = "iwarp";

/// Time that an end may take for its part of a connection's set-up.
pub const SETUP_TIME: Duration = Duration::from_secs(10);

/// Time that a peer has for the end of a connection that we have ended.
const CLOSING_TIME: Duration = Duration::from_secs(2);

/// Time after which a peer is given up that does not answer TCP, or takes none of what is sent to it.
/// [`CmOption::AckTimeout`](crate::verbs::CmOption::AckTimeout) changes it.
pub const PEER_TIME: Duration = Duration::from_secs(30);

/// Time within which a peer that does not know revision 2 of MPA closes a connection that asks with it, even if
/// this program stalls. One that has no room may close as early, or later.
const OLDER_TIME: Duration = Duration::from_secs(5);

/// TCP connections that have not sent their request. A newer one takes the place of the oldest, or that
/// of the oldest from its address, which has half of these at most.
pub const MAX_STRANGERS: usize = 64;

/// Bytes that a connection sends before the next one has its turn.
pub const TURN: usize = 256 << 10;

/// Configuration of a device.
#[derive(Clone, Debug)]
pub struct IwarpConfig {
    /// Its address: one of this host's.
    pub addr: IpAddr,
    /// Markers in what it receives, which let an adapter find messages in the middle of the stream.
    pub markers: bool,
    /// CRCs in both directions. They are there as well if a peer wants them.
    pub crc: bool,
    /// Its listeners share their ports with those of other devices of this user that say so: connections
    /// are divided among them.
    pub shares_ports: bool,
    /// Revision of MPA that it asks with: 2, and then 1 where the peer does not know it, or only 1.
    pub revision: u8,
    /// Limits on the objects of the device.
    pub limits: NicLimits,
}

impl IwarpConfig {
    /// A device at `addr` that wants CRCs and no markers, and asks with revision 2.
    #[must_use]
    pub fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            markers: false,
            crc: true,
            shares_ports: false,
            revision: 2,
            limits: NicLimits::default(),
        }
    }
}

/// A host to which there are connections.
#[derive(Debug, Default)]
struct Peer {
    /// Number of these.
    conns: u32,
    /// It has said something of revision 2 of MPA on one of them.
    knows_2: bool,
}

/// A device whose connections are those of iWARP. See the [module](self).
#[derive(Debug)]
pub struct Iwarp {
    nic: Nic,
    config: IwarpConfig,
    /// The sockets.
    set: OwnedFd,
    ids: Table<CmId, Id>,
    conns: HashMap<Token, Conn>,
    /// Listeners by what their sockets are known as.
    listeners: HashMap<Token, CmId>,
    by_qp: HashMap<QpId, Token>,
    per_peer: HashMap<IpAddr, Peer>,
    /// Connections without a request, the oldest first.
    strangers: VecDeque<Token>,
    /// Times at which connections, or listeners that rest, have something to do.
    timers: BTreeSet<(Instant, Token)>,
    events: VecDeque<CmEvent>,
    next_token: u64,
    /// Reused for what is read and sent.
    input: Box<[u8]>,
    output: Vec<u8>,
}

delegate_verbs_to_nic!(Iwarp);
delegate_counters_to_nic!(Iwarp);

impl Iwarp {
    /// Opens a device.
    ///
    /// # Errors
    /// [`std::io::ErrorKind::Unsupported`] for an IPv6 link-local address,
    /// [`std::io::ErrorKind::AddrNotAvailable`] for one that no interface of this host has,
    /// [`std::io::ErrorKind::InvalidInput`] for another revision than 1 and 2, and no descriptor is
    /// left.
    pub fn open(config: IwarpConfig) -> std::io::Result<Self> {
        use std::io::{Error, ErrorKind};
        let addr = config.addr.to_canonical();
        if is_link_local(addr) {
            let text = format!("{addr} is a link-local address: use a global or unique local one");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if !matches!(config.revision, 1 | 2) {
            let text = format!("there is no revision {} of MPA", config.revision);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        if !crate::netif::is_local(addr)? {
            let text = format!("no interface has {addr}");
            return Err(Error::new(ErrorKind::AddrNotAvailable, text));
        }
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(Error::other)?;
        let nic = NicConfig {
            provider: PROVIDER,
            wire: Wire::Streams,
            limits: config.limits,
            ..NicConfig::new(addr, seed)
        };
        info!(%addr, "iWARP device");
        Ok(Self {
            nic: Nic::new(nic, Instant::now()),
            set: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            ids: Table::new("connection identifier", config.limits.max_cm_ids),
            conns: HashMap::new(),
            listeners: HashMap::new(),
            by_qp: HashMap::new(),
            per_peer: HashMap::new(),
            strangers: VecDeque::new(),
            timers: BTreeSet::new(),
            events: VecDeque::new(),
            next_token: 0,
            input: vec![0; TURN].into(),
            output: Vec::new(),
            config: IwarpConfig { addr, ..config },
        })
    }

    /// Its address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.config.addr
    }

    fn tick(&mut self) {
        self.nic.set_now(Instant::now());
    }

    /// What the device wants of a connection with these depths.
    fn wishes(&self, responder_resources: u8, initiator_depth: u8) -> Wishes {
        let limits = &self.config.limits;
        Wishes {
            markers: self.config.markers,
            crc: self.config.crc,
            revision: self.config.revision,
            ird: responder_resources.min(limits.max_qp_rd_atom).into(),
            ord: initiator_depth.min(limits.max_qp_init_rd_atom).into(),
        }
    }

    /// There are no groups, and the NIC attaches no queue pair to one.
    #[allow(
        clippy::unused_self,
        clippy::needless_pass_by_ref_mut,
        reason = "the method of those that join"
    )]
    fn join_group(&mut self, _group: IpAddr) -> Result<(), VerbsError> {
        Err(VerbsError::Unsupported("multicast groups"))
    }
}
