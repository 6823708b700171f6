//! What a worker needs of a network device besides the verbs.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use riser_transport::loopback::Endpoint;
use riser_transport::rdma_core::{RdmaCoreDevice, has_device};
use riser_transport::roce::{Misdirected, Roce};
use riser_transport::verbs::Provider;

/// A provider that a worker drives. Where several workers share one address, packets may reach the
/// wrong one; it hands them on.
pub trait Device: Provider {
    /// The next packet that is another worker's.
    fn poll_misdirected(&mut self) -> Option<Misdirected> {
        None
    }

    /// A packet that another worker received for this one.
    fn handle_forwarded(&mut self, _now: Instant, _src: SocketAddr, _bytes: &[u8]) {}

    /// Whether it has InfiniBand service ids to listen on, and datagrams to answer on queue pair 1.
    fn has_services(&self) -> bool {
        true
    }

    /// Whether it has been taken away. What was in it never completes.
    fn is_gone(&self) -> bool {
        false
    }

    /// Opens it once more at its address; `None` where it is not there.
    fn reopen(&self, _addr: IpAddr) -> Option<Box<dyn Device>> {
        None
    }
}

impl Device for Roce {
    fn poll_misdirected(&mut self) -> Option<Misdirected> {
        Roce::poll_misdirected(self)
    }

    fn handle_forwarded(&mut self, now: Instant, src: SocketAddr, bytes: &[u8]) {
        Roce::handle_forwarded(self, now, src, bytes);
    }
}

impl Device for Endpoint {}

impl Device for RdmaCoreDevice {
    fn has_services(&self) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        RdmaCoreDevice::is_gone(self)
    }

    fn reopen(&self, addr: IpAddr) -> Option<Box<dyn Device>> {
        if !has_device(addr) {
            return None;
        }
        let opened = Self::open(addr)
            .inspect_err(|error| tracing::debug!(%addr, %error, "the device is not usable yet"));
        Some(Box::new(opened.ok()?))
    }
}
