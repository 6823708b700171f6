//! The provider: a device and its links.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::hello::{self, Listener, ListeningProcess, ShmUsers};
use super::link::{LinkCounters, Links};
use crate::roce::batch::{Offered, TxBatch};
use crate::roce::delegate::{delegate_counters_to_nic, delegate_verbs_to_nic, forward_cm_calls};
use crate::roce::nic::{Nic, NicConfig, NicLimits, Wire};
use crate::verbs::{
    CmError, CmEvent, CmEventKind, CmId, EventFds, Mtu, Provider, RdmaCm, VerbsError,
};
use crate::wire::is_link_local;

/// Name of the provider.
pub const PROVIDER: &str = "shm";

/// Bytes collected before they are put into rings.
const TX_BUDGET: usize = 256 << 10;
/// Batches sent by one call of `progress`.
const TX_BATCHES: usize = 8;

/// Most bytes that a queue pair has on the way, as they would count in a socket buffer
/// ([`packet_cost`](crate::rc::packet_cost)): half of a ring, at most.
const MAX_INFLIGHT: u32 = 1 << 20;

/// Interval at which a device that does not sleep looks at its sockets, for which it needs system
/// calls. Packets need none.
const LOOK_INTERVAL: Duration = Duration::from_micros(250);

/// Configuration of a device.
#[derive(Debug)]
pub struct ShmConfig {
    /// Its address: one of this host's.
    pub addr: IpAddr,
    /// Accepts connections of other processes. Without it the device can only connect.
    pub listener: Option<ShmListener>,
    /// Users whose processes it shares memory with.
    pub users: ShmUsers,
    /// Limits on the objects of the device.
    pub limits: NicLimits,
}

impl ShmConfig {
    /// A device at `addr` that does not listen.
    #[must_use]
    pub fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            listener: None,
            users: ShmUsers::default(),
            limits: NicLimits::default(),
        }
    }

    /// A device at `addr` that listens.
    ///
    /// # Errors
    /// See [`ShmListener::bind`].
    pub fn listening(addr: IpAddr) -> io::Result<Self> {
        Ok(Self {
            listener: Some(ShmListener::bind(addr)?),
            ..Self::new(addr)
        })
    }
}

/// Listens at an address for other processes of this host, in this network namespace.
///
/// Several devices, one of each worker, may have clones of one: each link belongs to the device that
/// accepts it, with all its connections. The name is free when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct ShmListener(Arc<Listener>);

impl ShmListener {
    /// Listens from now on.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrNotAvailable`] for an address that no interface of this host has,
    /// [`io::ErrorKind::AddrInUse`] where another process listens at the address, which the text
    /// names, and [`io::ErrorKind::ResourceBusy`] while sockets of other users are being closed.
    pub fn bind(addr: IpAddr) -> io::Result<Self> {
        let addr = addr.to_canonical();
        hello::check_local(&[addr])?;
        hello::listen(addr).map(|listener| Self(Arc::new(listener)))
    }
}

/// Asks the process of this host that listens at an address whether it shares memory with us, and
/// waits for half a second at most.
///
/// # Errors
/// The reason why not: [`io::ErrorKind::AddrNotAvailable`] where the address is not of this host,
/// [`io::ErrorKind::ConnectionRefused`] where no process listens,
/// [`io::ErrorKind::PermissionDenied`] where it is not of one of `users`,
/// [`io::ErrorKind::UnexpectedEof`] where it refuses, as it does where its version is another one,
/// [`io::ErrorKind::TimedOut`] where it does not answer, [`io::ErrorKind::WouldBlock`] where too many
/// processes wait, and [`io::ErrorKind::ResourceBusy`] while sockets of other users are being closed.
pub fn ask_listener(addr: IpAddr, users: &ShmUsers) -> io::Result<()> {
    hello::ask(addr.to_canonical(), users)
}

/// The process that listens at an address; `None` if there is none.
#[must_use]
pub fn listening_process(addr: IpAddr) -> Option<ListeningProcess> {
    hello::holder(addr.to_canonical())
}

/// A device whose packets go through shared memory. See the [module](super).
#[derive(Debug)]
pub struct Shm {
    nic: Nic,
    links: Links,
    batch: TxBatch,
    /// Peers were asked for wake-ups.
    is_armed: bool,
    /// When the sockets are looked at next.
    look_due: Instant,
}

delegate_verbs_to_nic!(Shm);
delegate_counters_to_nic!(Shm);

impl Shm {
    /// Opens a device.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for an IPv6 link-local address,
    /// [`io::ErrorKind::AddrNotAvailable`] for one that no interface of this host has, and no
    /// descriptor is left.
    pub fn open(config: ShmConfig) -> io::Result<Self> {
        let addr = config.addr.to_canonical();
        if is_link_local(addr) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{addr} is a link-local address: use a global or unique local one"),
            ));
        }
        hello::check_local(&[addr])?;
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(io::Error::other)?;
        let now = Instant::now();
        let nic = NicConfig {
            provider: PROVIDER,
            mtu: Mtu::Mtu4096,
            max_inflight_bytes: MAX_INFLIGHT,
            wire: Wire::Links,
            limits: config.limits,
            ..NicConfig::new(addr, seed)
        };
        info!(%addr, listens = config.listener.is_some(), "shared-memory device");
        Ok(Self {
            nic: Nic::new(nic, now),
            links: Links::new(addr, config.users, config.listener.map(|it| it.0))?,
            batch: TxBatch::new(1),
            is_armed: false,
            look_due: now,
        })
    }

    fn tick(&mut self) {
        self.nic.set_now(Instant::now());
    }

    /// Its address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.nic.local_addr().ip()
    }

    /// Counters of the links.
    #[must_use]
    pub fn link_counters(&self) -> LinkCounters {
        self.links.counters()
    }

    /// The address of the device at the other end of a link, by the link's name, from which its
    /// datagrams come; another address as it is.
    #[must_use]
    pub fn peer_of(&self, source: IpAddr) -> IpAddr {
        self.links.peer_of(source)
    }

    fn transmit(&mut self, now: Instant) -> usize {
        let mut sent = 0;
        for _ in 0..TX_BATCHES {
            let made = self.nic.poll_transmit(now, &mut self.batch, TX_BUDGET);
            if made == 0 {
                break;
            }
            sent += made;
            let links = &mut self.links;
            self.batch.drain(now, |batch, groups| {
                links.send(now, batch, groups);
                Offered::Taken(groups.len())
            });
        }
        if sent > 0 {
            self.links.publish();
        }
        sent
    }

    /// Looks at the sockets, where that is due.
    fn look(&mut self, now: Instant) -> usize {
        let was_armed = std::mem::take(&mut self.is_armed);
        if was_armed {
            self.links.wake();
        }
        if !was_armed && now < self.look_due {
            return 0;
        }
        self.look_due = now + LOOK_INTERVAL;
        self.links.expire(now);
        let nic = &mut self.nic;
        self.links
            .look(now, |from, packet| nic.handle_unsealed(now, from, packet))
    }

    /// Ends what belongs to links that have ended.
    fn lose_peers(&mut self, now: Instant) -> usize {
        let mut lost = 0;
        while let Some(name) = self.links.poll_lost() {
            self.nic.lose_peer(now, name);
            lost += 1;
        }
        lost
    }

    /// Links lead to one device each, and the NIC attaches no queue pair to a group on them.
    #[allow(
        clippy::unused_self,
        clippy::needless_pass_by_ref_mut,
        reason = "the method of those that join"
    )]
    fn join_group(&mut self, _group: IpAddr) -> Result<(), VerbsError> {
        Err(VerbsError::InvalidParameter("multicast group"))
    }

    /// The address that a user knows a peer by.
    fn peer(&self, addr: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.links.peer_of(addr.ip()), addr.port())
    }
}

impl RdmaCm for Shm {
    forward_cm_calls!(tick);

    fn resolve_addr(
        &mut self,
        id: CmId,
        src: Option<SocketAddr>,
        dst: SocketAddr,
        timeout: Duration,
    ) -> Result<(), CmError> {
        self.tick();
        let (now, ip) = (self.nic.now(), dst.ip().to_canonical());
        let name = self.links.reach(now, ip).unwrap_or_else(|error| {
            debug!(%dst, %error, "no memory can be shared");
            // An address that cannot be reached, which the device reports as such.
            match ip {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            }
        });
        let name = SocketAddr::new(name, dst.port());
        self.nic.resolve_addr(id, src, name, timeout)
    }

    fn peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.nic.cm_peer_addr(id).map(|addr| self.peer(addr))
    }

    fn poll_cm_event(&mut self) -> Option<CmEvent> {
        let mut event = self.nic.poll_cm_event()?;
        if let CmEventKind::ConnectRequest { peer, .. } = &mut event.kind {
            *peer = self.peer(*peer);
        }
        Some(event)
    }
}

impl Provider for Shm {
    fn progress(&mut self, now: Instant) -> usize {
        self.nic.set_now(now);
        let looked = self.look(now);
        // Sending comes first, as with the socket (`roce/provider.rs`): what the user posted in
        // answer to the last call's completions leaves with the acknowledgements of that call.
        let sent = self.transmit(now);
        let nic = &mut self.nic;
        let received = self
            .links
            .receive(|from, packet| nic.handle_unsealed(now, from, packet));
        let lost = self.lose_peers(now);
        let fired = self.nic.handle_timeouts(now);
        looked + sent + received + lost + fired
    }

    fn deadline(&self) -> Option<Instant> {
        // A user that has not taken its events yet is not to sleep, nor one whose packets wait.
        if self.nic.has_events() || self.links.has_input() {
            return Some(self.nic.now());
        }
        let due = [self.nic.deadline(), self.links.deadline()];
        due.into_iter().flatten().min()
    }

    fn event_fds(&self) -> EventFds<'_> {
        EventFds::from_iter([self.links.fd()])
    }

    fn arm_fds(&mut self) -> bool {
        self.is_armed = true;
        self.links.sleep();
        false
    }
}
