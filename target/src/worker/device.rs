//! What a worker needs of a network device besides the verbs.

use std::net::SocketAddr;
use std::time::Instant;

use riser_transport::loopback::Endpoint;
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
