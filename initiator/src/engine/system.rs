//! The host as the environment of an engine, and the engine's thread.

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

/// Opens a device on the engine's thread.
pub(super) type OpenDevice<P> = Box<dyn FnOnce() -> io::Result<Option<P>> + Send>;

/// The host that runs the program.
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
        // When a process is killed, its unsent data must be discarded. Otherwise the kernel would
        // retransmit its writes for minutes, even after another process has taken over. So each
        // close resets the connection; the response to a logout is received first.
        sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
        // If the peer's host vanishes, an idle connection fails after four seconds. TCP doesn't
        // send keep-alive probes while data is in flight: `TcpConn::check` monitors the
        // acknowledgements instead.
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, Duration::from_secs(1))?;
        sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(1))?;
        sockopt::set_tcp_keepcnt(&socket, 3)?;
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

/// Runs an engine until it is shut down and all sessions have closed. Polls for `spin` after the
/// last work, then sleeps.
pub(super) fn run<E: Env>(driver: &mut Driver<E>, spin: Duration) {
    let mut spinner = Spinner::new(spin);
    loop {
        let worked = driver.round(Instant::now());
        if driver.is_over() {
            // Deliver the responses of the last commands to the clients.
            driver.run_services();
            return;
        }
        match spinner.plan(Instant::now(), worked, driver.deadline()) {
            Next::Poll => std::hint::spin_loop(),
            Next::Park(timeout) => driver.park(timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::TcpListener;

    use riser_transport::loopback::Endpoint;
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::io::write;

    use super::*;

    #[test]
    fn close_discards_unsent_data() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut system: System<Endpoint> = System::new(Box::new(|| Ok(None)));
        let socket = system.connect_tcp(None, listener.local_addr().unwrap());
        let socket = socket.unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let mut set = [PollFd::new(&socket, PollFlags::OUT)];
        poll(&mut set, None).unwrap();
        let mut sent = 0;
        while let Ok(len) = write(&socket, &[1; 1 << 16]) {
            sent += len;
        }
        drop(socket);
        let mut received = Vec::new();
        let end = peer.read_to_end(&mut received);
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        assert!(received.len() < sent, "{} of {sent}", received.len());
    }
}
