//! The provider: a device and its links.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::hello::{self, Listener, ListeningProcess, ShmUsers};
use super::link::{LinkCounters, Links};
use crate::nic::batch::{Offered, TxBatch};
use crate::nic::delegate::{delegate_counters_to_nic, forward_cm_calls, forward_verbs_to_nic};
use crate::nic::{Nic, NicConfig, NicLimits, Wire};
use crate::verbs::{
    CmError, CmEvent, CmEventKind, CmId, EventFds, Gid, Mtu, Provider, QpId, RdmaCm, Verbs,
    VerbsError,
};
use crate::wire::is_link_local;

/// Provider name.
pub const PROVIDER: &str = "shm";

/// Number of bytes to collect before writing them to the rings.
const TX_BUDGET: usize = 256 << 10;
/// Max number of batches sent by a single call to `progress`.
const TX_BATCHES: usize = 8;

/// Max number of in-flight bytes per QP, using the size of packets in a socket buffer
/// ([`packet_cost`](crate::rc::packet_cost)). This is at most half of a ring.
const MAX_INFLIGHT: u32 = 1 << 20;

/// How often to check the sockets while the device is awake, which requires system calls. Packets
/// don't.
const LOOK_INTERVAL: Duration = Duration::from_micros(250);

/// Device configuration.
#[derive(Debug)]
pub struct ShmConfig {
    /// Local address of the device.
    pub addr: IpAddr,
    /// Listener used to accept connections from other processes. If `None`, the device can only
    /// connect.
    pub listener: Option<ShmListener>,
    /// Users allowed to share memory with this device.
    pub users: ShmUsers,
    /// Limits for device objects.
    pub limits: NicLimits,
}

impl ShmConfig {
    /// Creates a configuration for a device at `addr` without a listener.
    #[must_use]
    pub fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            listener: None,
            users: ShmUsers::default(),
            limits: NicLimits::default(),
        }
    }

    /// Creates a configuration for a device at `addr` with a listener.
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

/// Listens on an address for other processes on this host, in the same network namespace.
///
/// A listener can be cloned to share it between the devices of multiple workers: each link and all
/// of its connections belong to the device that has accepted it. The name is released when the last
/// clone is dropped.
#[derive(Clone, Debug)]
pub struct ShmListener(Arc<Listener>);

impl ShmListener {
    /// Starts to listen.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrNotAvailable`] if this is not a local address,
    /// [`io::ErrorKind::AddrInUse`] if the name is in use (the error message contains the other
    /// process), [`io::ErrorKind::ResourceBusy`] if sockets of other users are being closed.
    pub fn bind(addr: IpAddr) -> io::Result<Self> {
        let addr = addr.to_canonical();
        hello::check_local(&[addr])?;
        hello::listen(addr).map(|listener| Self(Arc::new(listener)))
    }
}

/// Checks whether the local process listening on an address shares memory with us. This can block
/// for up to half a second.
///
/// # Errors
/// - [`io::ErrorKind::AddrNotAvailable`] if this is not a local address
/// - [`io::ErrorKind::ConnectionRefused`] if no process is listening
/// - [`io::ErrorKind::PermissionDenied`] if the process is not owned by one of `users`
/// - [`io::ErrorKind::UnexpectedEof`] if the connection is rejected, e.g. because the version is
///   different
/// - [`io::ErrorKind::TimedOut`] if there is no response
/// - [`io::ErrorKind::WouldBlock`] if there are too many pending connections
/// - [`io::ErrorKind::ResourceBusy`] if sockets of other users are being closed
pub fn query_listener(addr: IpAddr, users: &ShmUsers) -> io::Result<()> {
    hello::test_handshake(addr.to_canonical(), users)
}

/// Returns the process listening on an address, if any.
#[must_use]
pub fn listening_process(addr: IpAddr) -> Option<ListeningProcess> {
    hello::holder(addr.to_canonical())
}

/// A device that uses shared memory to send packets. See the [module](super) documentation.
#[derive(Debug)]
pub struct Shm {
    nic: Nic,
    links: Links,
    batch: TxBatch,
    /// Set if wake-ups are enabled for all peers.
    is_armed: bool,
    /// When to check the sockets again.
    look_due: Instant,
}

delegate_counters_to_nic!(Shm);

impl Shm {
    /// Opens a device.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for an IPv6 link-local address,
    /// [`io::ErrorKind::AddrNotAvailable`] if this is not a local address. This will also return an
    /// error if there are no more descriptors available.
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
        self.nic.device.set_now(Instant::now());
    }

    /// Returns the device address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.nic.device.port.addr().ip()
    }

    /// Returns the link counters.
    #[must_use]
    pub fn link_counters(&self) -> LinkCounters {
        self.links.counters()
    }

    /// Returns the address of the remote device for the name of a link, which is the source address
    /// of its datagrams. Any other address is returned unchanged.
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

    /// Checks the sockets if it is time to do so.
    fn poll_sockets(&mut self, now: Instant) -> usize {
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
            .poll_sockets(now, |from, packet| nic.handle_unsealed(now, from, packet))
    }

    /// Releases everything that used a closed link.
    fn lose_peers(&mut self, now: Instant) -> usize {
        let mut lost = 0;
        while let Some(name) = self.links.poll_lost() {
            self.nic.lose_peer(now, name);
            lost += 1;
        }
        lost
    }

    /// Returns the address of a peer to show to the application.
    fn peer(&self, addr: SocketAddr) -> SocketAddr {
        SocketAddr::new(self.links.peer_of(addr.ip()), addr.port())
    }
}

impl Verbs for Shm {
    forward_verbs_to_nic!();

    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError> {
        // Each link connects to a single device, so the NIC does not support any groups.
        self.nic.attach_mcast(qp, mgid, mlid)
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
        let (now, ip) = (self.nic.device.now(), dst.ip().to_canonical());
        let name = self.links.reach(now, ip).unwrap_or_else(|error| {
            debug!(%dst, %error, "cannot share memory");
            // This address is unreachable, which will be reported by the device.
            match ip {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            }
        });
        let name = SocketAddr::new(name, dst.port());
        self.nic.resolve_addr(id, src, name, timeout)
    }

    fn peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.nic.peer_addr(id).map(|addr| self.peer(addr))
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
        self.nic.device.set_now(now);
        let looked = self.poll_sockets(now);
        // Send first, like on a socket (`roce/provider.rs`): if the application has posted work
        // based on the completions of the last call, it is sent with the acknowledgements of that
        // call.
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
        // Don't let the application sleep if there are unread events or packets.
        if self.nic.has_events() || self.links.has_input() {
            return Some(self.nic.device.now());
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
