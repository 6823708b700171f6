//! The machine as the surroundings of an engine, and the thread that an engine has there.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_reactor::{Next, Spinner};
use riser_transport::verbs::Provider;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, connect, ipproto, socket_with, sockopt,
};

use super::driver::Driver;
use super::env::Env;

/// A call that opens a device, on the engine's thread.
pub(super) type OpenDevice<P> = Box<dyn FnOnce() -> io::Result<Option<P>> + Send>;

/// The machine that the program runs on.
pub(super) struct System<P> {
    open: Option<OpenDevice<P>>,
}

impl<P> System<P> {
    pub(super) fn new(open: OpenDevice<P>) -> Self {
        Self { open: Some(open) }
    }
}

impl<P: Provider> Env for System<P> {
    type Provider = P;

    fn open_device(&mut self) -> io::Result<Option<P>> {
        self.open.take().map_or(Ok(None), |open| open())
    }

    fn connect_tcp(&mut self, src: Option<SocketAddr>, dst: SocketAddr) -> io::Result<OwnedFd> {
        let family = match dst {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        if let Some(src) = src {
            bind(&socket, &src)?;
        }
        match connect(&socket, &dst) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
            Err(error) => Err(error.into()),
        }
    }

    fn fill_random(&mut self, out: &mut [u8]) -> io::Result<()> {
        Ok(getrandom::fill(out)?)
    }

    fn date(&self) -> Duration {
        let date = SystemTime::now().duration_since(UNIX_EPOCH);
        date.unwrap_or_default()
    }
}

/// Runs an engine until it is shut down and every session has ended. After its last work it polls
/// for `spin`, then it sleeps.
pub(super) fn run<E: Env>(driver: &mut Driver<E>, spin: Duration) {
    let mut spinner = Spinner::new(spin);
    loop {
        let worked = driver.round(Instant::now());
        if driver.is_over() {
            return;
        }
        match spinner.plan(Instant::now(), worked, driver.deadline()) {
            Next::Poll => std::hint::spin_loop(),
            Next::Park(timeout) => driver.park(timeout),
        }
    }
}
