//! `riser-iwpmd`: the iWARP port mapper of a host.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, CommandFactory, Parser, Subcommand};
use riser_fabric::iwpm::{Daemon, ErrorCode, PORT, Refusal, StartError};
use riser_fabric::program;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_no_new_privs};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// Run the iWARP port mapper of this host
///
/// It reserves TCP ports for the kernel's iWARP devices, and queries the port mappers of other
/// hosts (rdma-core's iwpmd or riser-iwpmd) at UDP port 3935. SIGUSR1 logs all mappings.
/// riser-iwpmd drops all root capabilities except CAP_NET_ADMIN, which the kernel interface
/// requires; with --no-kernel it drops all of them.
#[derive(Debug, Parser)]
#[command(name = "riser-iwpmd", version)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    serve: Serve,
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Args)]
struct Serve {
    /// Do not serve the kernel, and respond to other hosts for the addresses of --map only
    ///
    /// This requires neither privileges nor RDMA support in the kernel.
    #[arg(long)]
    no_kernel: bool,
    /// Map a local address and TCP port, such as 192.0.2.1:3260, to another port; can be repeated
    ///
    /// Other hosts reach the listener of the address at the second port. If it is omitted, a port
    /// is reserved. Each mapping is printed with its mapped address.
    #[arg(long, value_name = "ADDRESS[=PORT]")]
    map: Vec<Map>,
    /// Receive datagrams from other hosts on this address, at most one per IP version [default: all
    /// addresses].
    #[arg(long, value_name = "IP")]
    listen: Vec<IpAddr>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Query the port mapper of a remote address, and print the mapped address
    ///
    /// The exit code is 1 if there is no mapping or no response, and 2 if the query cannot be sent.
    Query {
        /// Local address of the connection, with its TCP port.
        local: SocketAddr,
        /// Remote address, with its TCP port.
        remote: SocketAddr,
    },
    /// Print the manual page.
    #[command(hide = true)]
    Man {
        /// Write the pages of all commands to this directory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// Mapping specified on the command line.
#[derive(Clone, Copy, Debug)]
struct Map {
    local: SocketAddr,
    port: Option<NonZeroU16>,
}

impl FromStr for Map {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (local, port) = match text.split_once('=') {
            Some((local, port)) => (local, Some(port)),
            None => (text, None),
        };
        let local = local.parse::<SocketAddr>();
        let local =
            local.map_err(|_error| "invalid address: expected IP:PORT or [IP]:PORT".to_owned())?;
        let port = port.map(str::parse).transpose();
        let wrong = || "invalid port: expected a number from 1 to 65535".to_owned();
        let port = port.map_err(|_error| wrong())?;
        let is_port = local.port() != 0;
        is_port.then_some(Self { local, port }).ok_or_else(wrong)
    }
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    program::start_log();
    let cli = Cli::parse();
    let is_query = cli.verb.is_some();
    let done = match cli.verb {
        None => serve(&cli.serve),
        Some(Verb::Query { local, remote }) => query(local, remote),
        Some(Verb::Man { dir }) => {
            program::write_manual(Cli::command(), dir.as_deref()).map_err(Into::into)
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            match is_query && !error.is::<Refusal>() {
                true => ExitCode::from(2),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Drops all capabilities except `needed`, and prevents acquiring new ones.
fn confine(needed: CapabilitySet) {
    let confined = set_no_new_privs(true).and_then(|()| {
        let mut sets = capabilities(None)?;
        sets.effective &= needed;
        sets.permitted &= needed;
        sets.inheritable &= needed;
        set_capabilities(None, sets)
    });
    if let Err(error) = confined {
        tracing::warn!("cannot drop capabilities: {error}");
    }
}

/// Returns the addresses to bind for datagrams.
fn addresses(listen: &[IpAddr]) -> Result<Vec<SocketAddr>, Failure> {
    let all = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let ips = if listen.is_empty() { &all } else { listen };
    let of_v4 = ips.iter().filter(|ip| ip.is_ipv4()).count();
    if of_v4 > 1 || ips.len() - of_v4 > 1 {
        return Err("--listen accepts at most one address of each IP version".into());
    }
    Ok(ips.iter().map(|ip| SocketAddr::new(*ip, PORT)).collect())
}

/// Opens the port mapper at the configured addresses. Missing IPv6 support is an error only if an
/// IPv6 address is configured.
fn open(options: &Serve) -> Result<Daemon, Failure> {
    let addresses = addresses(&options.listen)?;
    match Daemon::open(!options.no_kernel, &addresses) {
        Err(StartError::Listen(SocketAddr::V6(_), error))
            if options.listen.is_empty() && error.raw_os_error() == Some(libc::EAFNOSUPPORT) =>
        {
            tracing::info!("IPv6 is not available, listening on IPv4 only");
            Ok(Daemon::open(!options.no_kernel, &addresses[..1])?)
        }
        opened => Ok(opened?),
    }
}

fn serve(options: &Serve) -> Result<(), Failure> {
    confine(match options.no_kernel {
        true => CapabilitySet::empty(),
        false => CapabilitySet::NET_ADMIN,
    });
    let mut daemon = open(options)?;
    for map in &options.map {
        let mapped = daemon.add(map.local, map.port.map(NonZeroU16::get));
        let mapped = mapped.map_err(|error| format!("{}: {error}", map.local))?;
        writeln!(io::stdout(), "{} {mapped}", map.local)?;
    }
    let (wake, wakes) = UnixStream::pair()?;
    wake.set_nonblocking(true)?;
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGUSR1] {
        // Must precede the byte that wakes the loop.
        if signal != SIGUSR1 {
            signal_hook::flag::register(signal, Arc::clone(&is_over))?;
        }
        signal_hook::low_level::pipe::register(signal, wakes.try_clone()?)?;
    }
    sd_notify::notify(&[NotifyState::Ready])?;
    tracing::info!(with_kernel = !options.no_kernel, "port mapper is running");
    while !is_over.load(Ordering::Relaxed) {
        // Queries originate from the kernel here, which receives the responses.
        daemon.turn(Some(wake.as_fd()))?;
        let was_woken = (&wake).read(&mut [0; 64]).is_ok();
        if was_woken && !is_over.load(Ordering::Relaxed) {
            tracing::info!("mappings:{}", listed(&daemon));
        }
    }
    Ok(())
}

/// Formats the mappings, one per line.
fn listed(daemon: &Daemon) -> String {
    let mut text = String::new();
    for mapping in daemon.mappings() {
        let _ = write!(text, "\n{} {}", mapping.local, mapping.mapped);
    }
    text
}

fn query(local: SocketAddr, remote: SocketAddr) -> Result<(), Failure> {
    confine(CapabilitySet::empty());
    // The well-known port may be in use by the running port mapper.
    let mut daemon = Daemon::open(false, &[SocketAddr::new(local.ip(), 0)])?;
    daemon
        .query(local, remote)
        .map_err(|error| match error {
            ErrorCode::InvalidMessage => {
                format!("cannot connect {local} to {remote}: different IP versions, or an unspecified address")
            }
            other => other.to_string(),
        })?;
    loop {
        if let Some(response) = daemon.turn(None)? {
            writeln!(io::stdout(), "{}", response.mapped?)?;
            return Ok(());
        }
    }
}
