//! A device for iWARP connections, i.e. RDMA over TCP.
//!
//! [`Iwarp::open`] opens a device using a local address. The device implements
//! [`Provider`](crate::verbs::Provider) and must be driven by the thread that owns it. It only
//! requires TCP, and no privileges. Peers can use Linux `siw` or an iWARP adapter. The regions,
//! keys, queues and events are implemented by the [`Device`] of the software NIC, and its queue
//! pairs by [`rdmap`](crate::rdmap). Each queue pair uses a separate TCP connection.
//!
//! Only reliable connections set up by the connection manager are supported: no datagrams, no
//! unreliable or extended connections, no multicast, and queue pairs can't be moved to RTS by the
//! application. See [`rdmap`](crate::rdmap) for how operations differ from InfiniBand.
//!
//! | module | description |
//! | --- | --- |
//! | `calls` | RDMA CM calls |
//! | `conn` | TCP connections and their state |
//! | `id` | RDMA CM identifiers |
//! | `io` | socket events, data transfer and timeouts |
//! | `setup` | requests and replies, closing connections |
//!
//! # Connections
//! We use TCP port numbers. An MPA request contains the private data of the application without an
//! address header, because the addresses are known from the TCP connection. A reject only contains
//! private data and no reason, so we report it as rejected by the consumer (28). If there is no
//! listener (8), the TCP connection is refused. The queue pair number of the peer is not available.
//!
//! A connection is closed if there is an error on either side. When the TCP connection is closed,
//! we report `Disconnected`, the queue pair fails, and `TimewaitExit` is reported immediately after
//! that.
//!
//! If a peer does not support MPA revision 2, it closes the connection when it receives our
//! request, or sends a reply with revision 1. We then retry once with this revision, using a new
//! TCP connection from the same port. However, a peer that is busy may also close connections, and
//! we don't want to cause twice the load. We don't retry if the connection was closed after more
//! than five seconds, or if the peer has used revision 2 on another connection. There will be a
//! retry if a busy peer closes it earlier, as this device does, and no other connection has used
//! revision 2. In revision 1, peers don't exchange their queue depths: each side uses the values
//! set by its user.
//!
//! If a peer does not acknowledge or read any data for [`PEER_TIME`], the connection is closed. If
//! it doesn't send anything, a TCP keepalive probe is sent after a third of this time, unless the
//! application has set a shorter timeout.
//!
//! # Bounds
//! A connection without a request can store up to the maximum size of a request, for up to
//! [`SETUP_TIME`]. There can be [`MAX_STRANGERS`] such connections, and half of this from a single
//! address. A listener accepts requests up to its backlog; any more must wait in the kernel. If a
//! socket is full, up to [`TURN`] bytes plus a segment are buffered, and the connection does not
//! create any more data until they have been sent. After a connection is finished, there is a short
//! timeout for sending the remaining data.
//!
//! TCP doesn't provide any protection: a host on the path can read and modify everything. Use a
//! network without untrusted hosts, or encryption.

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
use crate::forward::forward;
use crate::nic::delegate::{delegate_counters, forward_verbs};
use crate::nic::{Device, NicConfig, NicLimits, Wire};
use crate::rdmap::Wishes;
use crate::table::Table;
use crate::verbs::{CmEvent, CmId, Gid, QpAttr, QpId, Verbs, VerbsError};
use crate::wire::is_link_local;

/// Provider name.
pub const PROVIDER: &str = "iwarp";

/// Timeout for each side when a connection is set up.
pub const SETUP_TIME: Duration = Duration::from_secs(10);

/// Timeout for a peer to close the connection after we have closed it.
const CLOSING_TIME: Duration = Duration::from_secs(2);

/// Timeout for peers which don't respond to TCP or don't read any data. It can be changed using
/// [`CmOption::AckTimeout`](crate::verbs::CmOption::AckTimeout).
pub const PEER_TIME: Duration = Duration::from_secs(30);

/// If a peer does not support MPA revision 2, it should close the connection within this time after
/// receiving a request, even if our program is delayed. A busy peer may close it earlier or later.
const OLDER_TIME: Duration = Duration::from_secs(5);

/// Max number of TCP connections that have not sent a request. If exceeded, the oldest one is
/// closed, or the oldest with the same address if this address uses more than half of them.
pub const MAX_STRANGERS: usize = 64;

/// Max number of bytes sent on a connection before the next connection is handled.
pub const TURN: usize = 256 << 10;

/// Device configuration.
#[derive(Clone, Debug)]
pub struct IwarpConfig {
    /// Local address of the device.
    pub addr: IpAddr,
    /// Request markers in received data, which allow an adapter to find messages in the middle of
    /// the stream.
    pub markers: bool,
    /// Use a CRC in both directions. It is always used if requested by the peer.
    pub crc: bool,
    /// Listeners share their ports with other devices of the same user that have this option set.
    /// Connections are distributed between all of them.
    pub shares_ports: bool,
    /// MPA revision to use for requests. If set to 2, we fall back to 1 if not supported by the
    /// peer.
    pub revision: u8,
    /// Limits for device objects.
    pub limits: NicLimits,
}

impl IwarpConfig {
    /// Creates a configuration for a device at `addr`, with CRCs, without markers, and using
    /// revision 2.
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

/// A host that we have connections with.
#[derive(Debug, Default)]
struct Peer {
    /// Number of connections.
    conns: u32,
    /// Set if the peer has used MPA revision 2 on one of these connections.
    knows_2: bool,
}

/// A device for iWARP connections. See the [module](self) documentation.
#[derive(Debug)]
pub struct Iwarp {
    device: Device,
    config: IwarpConfig,
    /// Epoll set containing all sockets.
    set: OwnedFd,
    ids: Table<CmId, Id>,
    conns: HashMap<Token, Conn>,
    /// Listeners by the token of their socket.
    listeners: HashMap<Token, CmId>,
    by_qp: HashMap<QpId, Token>,
    per_peer: HashMap<IpAddr, Peer>,
    /// Connections without a request, oldest first.
    strangers: VecDeque<Token>,
    /// Timeouts of connections and of listeners waiting after an error.
    timers: BTreeSet<(Instant, Token)>,
    events: VecDeque<CmEvent>,
    next_token: u64,
    /// Buffer reused for receiving and sending.
    input: Box<[u8]>,
    output: Vec<u8>,
}

delegate_counters!(Iwarp, device, device);

impl Verbs for Iwarp {
    forward_verbs!(device device);
    forward! {
        device device;
        @live mut modify_qp [modify_qp] (qp: QpId, attr: &QpAttr) -> Result<(), VerbsError>;
        mut destroy_qp [destroy_qp] (qp: QpId) -> Result<(), VerbsError>;
    }

    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, _mlid: u16) -> Result<(), VerbsError> {
        // There are no datagram QPs, so this always fails.
        self.device.attach_group(qp, mgid).map(drop)
    }

    fn detach_mcast(&mut self, qp: QpId, mgid: Gid, _mlid: u16) -> Result<(), VerbsError> {
        self.device.detach_group(qp, mgid)
    }
}

impl Iwarp {
    /// Opens a device.
    ///
    /// # Errors
    /// [`std::io::ErrorKind::Unsupported`] for an IPv6 link-local address,
    /// [`std::io::ErrorKind::AddrNotAvailable`] if this is not a local address,
    /// [`std::io::ErrorKind::InvalidInput`] if the revision is not 1 or 2. This will also return an
    /// error if there are no more descriptors available.
    pub fn open(config: IwarpConfig) -> std::io::Result<Self> {
        use std::io::{Error, ErrorKind};
        let addr = config.addr.to_canonical();
        if is_link_local(addr) {
            let text = format!("{addr} is a link-local address: use a global or unique local one");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if !matches!(config.revision, 1 | 2) {
            let text = format!("unsupported MPA revision {}", config.revision);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        if !crate::netif::is_local(addr)? {
            let text = format!("{addr} is not an address of this host");
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
            device: Device::new(nic, Instant::now()),
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

    /// Returns the device address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.config.addr
    }

    fn tick(&mut self) {
        self.device.set_now(Instant::now());
    }

    /// Returns the parameters to propose for a connection with these depths.
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
}
