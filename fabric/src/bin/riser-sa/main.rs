//! `riser-sa`: subnet administration for a RoCE address, and path resolution for its host.
//!
//! It replaces `ibacm` and, on a RoCE fabric, provides a subnet administrator:
//! - hosts send requests to queue pair 1 at its address ([`riser_fabric::sa::administrator`]);
//! - the kernel sends requests over netlink ([`riser_fabric::ls`]);
//! - local programs send requests over a Unix socket ([`riser_fabric::acm`]).
//!
//! A single thread serves all of them. A service manager may pass the sockets for netlink and for
//! programs, as it does for `ibacm` (`ibacm.socket`).

mod programs;
mod state;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use listenfd::ListenFd;
use riser_fabric::acm::Counters;
use riser_fabric::ls::{self, TIMEOUTS};
use riser_fabric::netlink::message::{self, Messages};
use riser_fabric::netlink::{LS_GROUP, RdmaNetlink};
use riser_fabric::program;
use riser_fabric::sa::administrator::{Administrator, AdministratorConfig};
use riser_fabric::sa::resolver::Resolver;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{Gid, Provider as _, Verbs as _};
use riser_transport::wire::Mad;
use riser_transport::wire::mad::MadClass;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, sockopt};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::{debug, error, info, warn};

use programs::Programs;
use state::State;

/// Maximum length of a message from the kernel.
const MESSAGE: usize = 4096;

/// Maximum number of consecutive messages from the kernel.
const IN_A_ROW: usize = 64;

/// Minimum interval between warnings about the kernel, since each request may cause a warning.
const QUIET: Duration = Duration::from_secs(60);

/// Serve subnet administration at a RoCE address, and resolve paths for its host
///
/// Hosts query paths, services, multicast groups and notices at queue pair 1 of the address. The
/// kernel sends requests over netlink. Programs, such as ib_acme and users of librdmacm, send
/// requests over a Unix socket, as they do with ibacm.
///
/// A service manager may pass the sockets for programs and for netlink. In this case, riser-sa does
/// not open a netlink socket itself.
#[derive(Parser)]
#[command(name = "riser-sa", version, disable_help_subcommand = true)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(flatten)]
    serve: Option<Serve>,
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Subcommand)]
enum Verb {
    /// Print the manual page
    #[command(hide = true)]
    Man {
        /// Write it to this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

#[derive(Args)]
struct Serve {
    /// Serve at this address of the host
    #[arg(long, value_name = "ADDRESS", value_parser = host_addr)]
    addr: IpAddr,
    /// Accept this additional address of the host as the source of paths; can be repeated
    ///
    /// Use this for addresses of kernel devices, so that the kernel and programs can request paths
    /// from them.
    #[arg(long, value_name = "ADDRESS", value_parser = host_addr)]
    source: Vec<IpAddr>,
    /// Serve programs of all users at this Unix socket [default: none]
    ///
    /// ibacm uses /run/ibacm-unix.sock.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Read host names from this file, which has an address and its names on each line
    ///
    /// Programs may request a path to a name. The file is read at startup.
    #[arg(long, value_name = "FILE", default_value = "/etc/hosts")]
    hosts: PathBuf,
    /// Save registrations of hosts in this file, and restore them after a restart [default: not
    /// saved]
    ///
    /// Hosts do not detect a restart and do not register again. The services, groups and
    /// subscriptions of hosts that still respond are restored.
    #[arg(long, value_name = "FILE", overrides_with = "state")]
    state: Option<PathBuf>,
    /// Do not serve the kernel, which requires CAP_NET_ADMIN and RDMA support in the kernel
    #[arg(long)]
    no_netlink: bool,
    /// Set the time that the kernel waits for a response, 100 to 200000 ms [default: not changed;
    /// the kernel's default is 2000]
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u32).range(
        *TIMEOUTS.start() as i64..=*TIMEOUTS.end() as i64
    ))]
    kernel_timeout: Option<u32>,
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    program::start_log();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            error!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    if let Some(Verb::Man { dir }) = cli.verb {
        return Ok(program::write_manual(Cli::command(), dir.as_deref())?);
    }
    // The argument parser requires one of them.
    let serve = cli.serve.ok_or("missing address (--addr)")?;
    Daemon::open(serve)?.run()
}

struct Daemon {
    device: Roce,
    administrator: Administrator,
    resolver: Resolver,
    counters: Counters,
    kernel: Option<RdmaNetlink>,
    /// Time of the last warning about the kernel, and the number of warnings suppressed since.
    warned: Option<(Instant, u64)>,
    programs: Option<Programs>,
    /// Datagram that did not fit into the device's send queue.
    unsent: Option<(Gid, Mad)>,
    state: Option<State>,
    /// Becomes readable on shutdown.
    end: UnixStream,
}

impl Daemon {
    fn open(cli: Serve) -> Result<Self, Failure> {
        let (mut kernel, mut listener) = inherited()?;
        let is_given = kernel.is_some() || listener.is_some();
        if cli.no_netlink {
            kernel = None;
        } else if !is_given {
            kernel = Some(open_netlink()?);
        }
        if let (None, Some(path)) = (&listener, &cli.socket) {
            let opened = listen(path);
            listener = Some(
                opened.map_err(|e| format!("cannot listen on socket {}: {e}", path.display()))?,
            );
        }
        let mut device =
            Roce::open(&RoceConfig::new(cli.addr)).map_err(|error| explain(cli.addr, &error))?;
        device.register_agent(MadClass::SubnetAdm)?;
        // Hosts respond to probes with this class.
        device.register_agent(MadClass::Performance)?;
        let mtu = device.query_port(1)?.active_mtu;
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        let mut administrator = Administrator::new(AdministratorConfig::new(cli.addr, mtu, secret));
        let state = cli.state.map(|path| {
            let name = path.display().to_string();
            State::open(path, &mut administrator, Instant::now()).map_err(|error| {
                let text = format!("cannot load state file {name}: {error}");
                if error.kind() == io::ErrorKind::InvalidData {
                    // The file is not a state file: restarting the service would not help.
                    Cli::command()
                        .error(clap::error::ErrorKind::ValueValidation, text)
                        .exit()
                }
                text
            })
        });
        let (end, ends) = UnixStream::pair()?;
        for signal in [SIGTERM, SIGINT] {
            signal_hook::low_level::pipe::register(signal, ends.try_clone()?)?;
        }
        end.set_nonblocking(true)?;
        let addrs = [vec![cli.addr], cli.source].concat();
        let mut daemon = Self {
            device,
            administrator,
            resolver: Resolver::new(addrs, read_names(&cli.hosts)),
            counters: Counters::default(),
            kernel,
            warned: None,
            programs: listener.map(Programs::new).transpose()?,
            unsent: None,
            state: state.transpose()?,
            end,
        };
        if let Some(kernel) = &daemon.kernel {
            let timeout = cli.kernel_timeout.map(u64::from).map(Duration::from_millis);
            match kernel.send(&ls::hello(timeout, kernel.port())) {
                // A socket of another protocol, without a kernel listener.
                Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {}
                sent => sent.map_err(|error| format!("cannot use RDMA netlink: {error}"))?,
            }
            // A kernel that does not accept responses has already rejected this one.
            if let Some(refusal) = daemon.serve_kernel(Instant::now()) {
                return Err(refusal.into());
            }
        }
        info!(
            addr = %cli.addr,
            kernel = daemon.kernel.is_some(),
            programs = daemon.programs.is_some(),
            "riser-sa is running"
        );
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        Ok(daemon)
    }

    fn run(mut self) -> Result<(), Failure> {
        loop {
            let now = Instant::now();
            if matches!((&self.end).read(&mut [0]), Ok(1)) {
                if let Some(state) = self.state {
                    state.finish(now, &self.administrator);
                }
                return Ok(());
            }
            let worked = self.turn(now);
            let timeout = if worked || self.device.arm_fds() {
                Some(Duration::ZERO)
            } else {
                let deadlines = [
                    self.device.deadline(),
                    self.administrator.poll_timeout(),
                    self.state.as_ref().and_then(State::deadline),
                    self.programs.as_ref().and_then(Programs::deadline),
                ];
                let next = deadlines.into_iter().flatten().min();
                next.map(|at| at.saturating_duration_since(now))
            };
            self.sleep(timeout)?;
        }
    }

    /// Handles all pending work; returns whether more may be pending.
    fn turn(&mut self, now: Instant) -> bool {
        let mut worked = self.device.progress(now) > 0;
        // The interface MTU may have changed.
        if let Ok(port) = self.device.query_port(1) {
            self.administrator.set_mtu(port.active_mtu);
        }
        // Drain the bounded receive queue completely: packets of a flood left in it would block
        // other hosts.
        while let Some((from, mad)) = self.device.poll_mad() {
            worked = true;
            self.administrator.handle_mad(now, from.into(), &mad);
        }
        if self
            .administrator
            .poll_timeout()
            .is_some_and(|at| at <= now)
        {
            self.administrator.handle_timeout(now);
        }
        worked |= self.transmit(now);
        if let Some(state) = &mut self.state {
            state.turn(now, &self.administrator);
        }
        if let Some(refusal) = self.serve_kernel(now) {
            self.warn(now, &refusal);
        }
        if let Some(programs) = &mut self.programs {
            programs.turn(now, &self.resolver, &self.administrator, &self.counters);
        }
        worked
    }

    /// Passes queued datagrams to the device; returns whether there were any.
    fn transmit(&mut self, now: Instant) -> bool {
        let mut worked = false;
        while let Some((to, mad)) = self
            .unsent
            .take()
            .or_else(|| self.administrator.poll_transmit(now))
        {
            if self.device.send_mad(to.ip(), &mad).is_err() {
                // It is retried first when the device has free slots.
                self.unsent = Some((to, mad));
                break;
            }
            worked = true;
        }
        worked
    }

    /// Serves kernel requests; returns the error if the kernel rejects a response.
    fn serve_kernel(&mut self, now: Instant) -> Option<String> {
        let mut buffer = [0; MESSAGE];
        for _ in 0..IN_A_ROW {
            let kernel = self.kernel.as_ref()?;
            let (len, from) = match kernel.receive_from(&mut buffer) {
                Ok(received) => received?,
                Err(error) => {
                    // ENOBUFS: messages were lost, and the kernel will continue after a timeout.
                    self.warn(now, &format_args!("kernel requests were lost: {error}"));
                    return None;
                }
            };
            let (bytes, port) = (&buffer[..len], kernel.port());
            if let Some(Ok(message::Message::Error { errno, .. })) = Messages::new(bytes).next() {
                if from == 0 && errno != 0 {
                    return Some(refusal(errno));
                }
                continue;
            }
            let Some(response) = ls::respond(bytes, port, &self.resolver, &self.administrator)
            else {
                continue;
            };
            debug!(from, "received a kernel request");
            if let Err(error) = kernel.send_to(from, &response) {
                self.warn(
                    now,
                    &format_args!("cannot send a response to the kernel: {error}"),
                );
            }
        }
        None
    }

    /// Logs a rate-limited warning about the kernel.
    fn warn(&mut self, now: Instant, what: &dyn fmt::Display) {
        match &mut self.warned {
            Some((last, left_out)) if now < *last + QUIET => *left_out += 1,
            warned => {
                let left_out = warned.map_or(0, |(_, left_out)| left_out);
                warn!(left_out, "{what}");
                *warned = Some((now, 0));
            }
        }
    }

    fn sleep(&self, timeout: Option<Duration>) -> io::Result<()> {
        let device = self.device.event_fds().into_iter();
        let kernel = self.kernel.iter().map(RdmaNetlink::fd);
        let programs = self.programs.iter().flat_map(Programs::fds);
        let fds = device
            .chain(kernel)
            .chain(programs)
            .chain([self.end.as_fd()]);
        let mut fds: Vec<PollFd<'_>> = fds
            .map(|fd: BorrowedFd<'_>| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let timeout = timeout.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Parses a unicast host address.
fn host_addr(text: &str) -> Result<IpAddr, String> {
    let addr: IpAddr = text.parse().map_err(|_| "invalid IP address".to_owned())?;
    let is_broadcast = matches!(addr, IpAddr::V4(v4) if v4.is_broadcast());
    if addr.is_unspecified() || addr.is_multicast() || is_broadcast {
        return Err("invalid address: expected the unicast address of this host".to_owned());
    }
    Ok(addr)
}

/// Explains why no device can be opened at an address, and suggests a remedy.
fn explain(addr: IpAddr, error: &io::Error) -> String {
    let hint = match error.kind() {
        io::ErrorKind::AddrNotAvailable => ": no interface of this host has the address",
        io::ErrorKind::AddrInUse => {
            ": UDP port 4791 is in use by another program, such as riserd or another riser-sa, \
             or by rdma_rxe, which uses all addresses; use a separate address for riser-sa, and with \
             rdma_rxe a separate network namespace"
        }
        _ => "",
    };
    format!("cannot open a device at {addr}: {error}{hint}")
}

/// Returns the sockets passed by the service manager: for netlink and for programs.
fn inherited() -> Result<(Option<RdmaNetlink>, Option<UnixListener>), Failure> {
    let mut given = ListenFd::from_env();
    let (mut kernel, mut listener) = (None, None);
    for at in 0..given.len() {
        let Some(fd) = given.take_raw_fd(at)? else {
            continue;
        };
        // SAFETY: the service manager opened it for this process, and it is adopted only once.
        #[expect(unsafe_code, reason = "a descriptor is inherited by its number")]
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        match sockopt::socket_domain(&fd)? {
            AddressFamily::NETLINK if kernel.is_none() => kernel = Some(RdmaNetlink::adopt(fd)?),
            AddressFamily::UNIX if listener.is_none() && sockopt::socket_acceptconn(&fd)? => {
                listener = Some(fd.into());
            }
            _ => {
                return Err(format!(
                    "unsupported socket {at} of the service manager: expected one netlink socket (ListenNetlink) \
             and one for programs (ListenStream, with a path)"
                )
                .into());
            }
        }
    }
    Ok((kernel, listener))
}

/// Opens a socket that receives requests from the kernel.
fn open_netlink() -> Result<RdmaNetlink, Failure> {
    let opened = RdmaNetlink::open(LS_GROUP);
    opened.map_err(|error| match error.raw_os_error() {
        Some(errno) => refusal(errno).into(),
        None => error.into(),
    })
}

/// Describes an error of the RDMA netlink interface.
fn refusal(errno: i32) -> String {
    match errno {
        libc::EPROTONOSUPPORT => {
            "the kernel does not support RDMA netlink (NETLINK_RDMA): load its module \
             ib_core, or use --no-netlink"
                .to_owned()
        }
        libc::EPERM => "responding to the kernel requires CAP_NET_ADMIN: run as root, or use \
             --no-netlink"
            .to_owned(),
        libc::EINVAL => {
            "the kernel accepts responses only from the initial network namespace: run \
             there, or use --no-netlink"
                .to_owned()
        }
        _ => format!(
            "cannot use RDMA netlink: {}",
            io::Error::from_raw_os_error(errno)
        ),
    }
}

/// Listens at a path that all users may access, as ibacm does. A stale socket of a previous process
/// is removed.
fn listen(path: &PathBuf) -> io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};

    let in_use = |what| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    match std::fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => {
            return in_use("the path exists and is not a socket");
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return in_use(
                "the socket is in use by another program, such as ibacm or another riser-sa",
            );
        }
        Ok(_) => std::fs::remove_file(path)?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Reads host names, each with its first address. Returns an empty map if the file cannot be read.
fn read_names(file: &PathBuf) -> BTreeMap<String, IpAddr> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| {
        info!(%error, "cannot read host names from {}", file.display());
        String::new()
    });
    let mut names = BTreeMap::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let Some(addr) = words.next().and_then(|word| word.parse().ok()) else {
            continue;
        };
        for name in words {
            names.entry(name.to_owned()).or_insert(addr);
        }
    }
    names
}
