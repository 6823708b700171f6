//! Environment of an engine: the host, or a simulation of a host.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use riser_transport::verbs::Provider;

/// Provides all external inputs of an engine except the time, which is passed to each round
/// ([`Engine::step`](super::Engine::step)).
pub trait Env {
    /// RDMA provider.
    type Provider: Provider;

    /// Opens the device, or returns `None` for an engine with TCP sessions only. Called once,
    /// before all other methods.
    ///
    /// # Errors
    /// The device cannot be opened.
    fn open_device(&mut self) -> io::Result<Option<Self::Provider>>;

    /// Creates a non-blocking stream socket and starts to connect it.
    ///
    /// # Errors
    /// The connection attempt cannot be started.
    fn connect_tcp(&mut self, src: Option<SocketAddr>, dst: SocketAddr) -> io::Result<OwnedFd>;

    /// Fills `out` with random bytes that are unpredictable for peers.
    ///
    /// # Errors
    /// No random bytes are available.
    fn fill_random(&mut self, out: &mut [u8]) -> io::Result<()>;

    /// Returns the wall-clock time since 1970.
    fn date(&self) -> Duration;
}
