//! The surroundings of an engine: the machine that it runs on, or a simulation of one.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use riser_transport::verbs::Provider;

/// The source of everything that an engine does not compute itself, but for the time: that comes
/// with each round ([`Engine::step`](super::Engine::step)).
pub trait Env {
    /// The kind of RDMA device.
    type Provider: Provider;

    /// Opens the device; `None` for an engine whose sessions all run on TCP. Called once, before
    /// everything else.
    ///
    /// # Errors
    /// The device cannot be opened.
    fn open_device(&mut self) -> io::Result<Option<Self::Provider>>;

    /// Makes a stream socket that does not block and has begun to connect.
    ///
    /// # Errors
    /// The connection cannot even be begun.
    fn connect_tcp(&mut self, src: Option<SocketAddr>, dst: SocketAddr) -> io::Result<OwnedFd>;

    /// Fills `out` with random bytes that no peer can foresee.
    ///
    /// # Errors
    /// There are none.
    fn fill_random(&mut self, out: &mut [u8]) -> io::Result<()>;

    /// The wall clock, as time since 1970.
    fn date(&self) -> Duration;
}
