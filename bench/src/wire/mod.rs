//! Measures the performance limit of a machine or network for RoCEv2 packets. This is an upper
//! bound for all results of the software NIC.
//!
//! - [`measure_loopback`]: two threads in this process.
//! - [`measure`]: this host and a host running [`Responder`].
//! - [`WireReport`]: the results.
//!
//! The requester sends 84-byte commands. For each command, the responder sends RDMA WRITEs and a
//! response, which are the same packets as for a READ from a target. There are no queue pairs,
//! retransmissions or disks. This only leaves the socket driver of the NIC
//! ([`riser_transport::roce::driver`]) and headers. Some cases also include the ICRC on both sides,
//! and copying the data to its destination. Both threads poll without sleeping.
//!
//! A responder sends much more data than it receives, and source addresses can be spoofed. It
//! therefore only responds if the requester has shown that it can receive packets at its address.

mod packets;
mod requester;
mod responder;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use riser_transport::netif::{Interface, interface_mtu};
use riser_transport::roce::driver::{Driver, DriverConfig};
use riser_transport::wire::ROCE_PORT;
use serde::Serialize;
use thiserror::Error;

use self::requester::Requester;
pub use self::responder::Responder;

/// Size requested for each socket buffer in bytes, as in the software NIC.
const SOCKET_BUFFER: usize = 16 << 20;

/// Options for measurements.
#[derive(Clone, Copy, Debug)]
pub struct WireConfig {
    /// Duration of each case, excluding warm-up.
    pub runtime: Duration,
    /// Duration of the warm-up for each case.
    pub warm_up: Duration,
    /// Maximum payload of a packet in bytes. This is an InfiniBand path MTU from 256 to 4096.
    /// `None` uses the largest path MTU supported by the interface.
    pub path_mtu: Option<u16>,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            runtime: Duration::from_secs(2),
            warm_up: Duration::from_millis(200),
            path_mtu: None,
        }
    }
}

/// Errors of a measurement.
#[derive(Debug, Error)]
pub enum WireError {
    /// Failed to open a socket.
    #[error("cannot open a socket at {addr}, UDP port {ROCE_PORT}: {source}")]
    Open {
        /// Local address.
        addr: IpAddr,
        /// Error of the system call.
        source: io::Error,
    },
    /// All addresses are already used by a software NIC.
    #[error("every loopback address from 127.77.0.1 to 127.77.0.254 is in use")]
    NoAddress,
    /// One address is IPv4 and the other is IPv6.
    #[error("{0} and {1} have different address families")]
    Family(IpAddr, IpAddr),
    /// Both addresses are the same.
    #[error("{0} is the local address")]
    SameAddress(IpAddr),
    /// Invalid path MTU.
    #[error("invalid path MTU {0}: expected 256, 512, 1024, 2048 or 4096")]
    PathMtu(u16),
    /// The MTU of the interface is less than the smallest path MTU.
    #[error("the MTU of the interface with {0} is too small for RoCE packets")]
    Interface(IpAddr),
    /// There is no responder.
    #[error("no responder at {0}: run `riser bench wire --listen` there")]
    NoResponse(IpAddr),
    /// No data was received in a case.
    #[error("{0}: no reply received within {1:?}; set --mtu if the path MTU is smaller")]
    Nothing(&'static str, Duration),
    /// A thread couldn't be started or has exited.
    #[error("the responder's thread failed: {0}")]
    Thread(String),
}

/// Latencies in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WireLatency {
    /// Minimum.
    pub min: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p99_9: u64,
    /// Maximum.
    pub max: u64,
}

/// Results of a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WireCase {
    /// Name of the case.
    pub name: &'static str,
    /// Number of commands in flight.
    pub depth: u32,
    /// Amount of data returned for each command, in bytes.
    pub reply_bytes: u32,
    /// Set if ICRCs are generated and verified, and data is copied to its destination.
    pub icrc: bool,
    /// Duration of the measurement in seconds.
    pub seconds: f64,
    /// Number of completed commands.
    pub operations: u64,
    /// Completed commands per second.
    pub operations_per_second: f64,
    /// Bytes of data received per second, excluding headers.
    pub bytes_per_second: f64,
    /// Time between a command and its response.
    pub latency_ns: Option<WireLatency>,
    /// Number of commands without a response. Each was replaced by another command.
    pub lost_commands: u64,
    /// Number of data packets missing from replies.
    pub lost_packets: u64,
    /// Number of packets with an invalid ICRC.
    pub corrupted: u64,
    /// Number of datagrams that don't belong to this measurement.
    pub foreign: u64,
}

/// Results of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WireReport {
    /// Local address.
    pub local: IpAddr,
    /// Address of the responder.
    pub peer: IpAddr,
    /// Set if both sides are threads in this process.
    pub loopback: bool,
    /// Maximum payload of a packet in bytes.
    pub path_mtu: u16,
    /// Number of packets per send (`UDP_SEGMENT`). This is 1 if segmentation is not supported by
    /// the kernel.
    pub packets_per_send: usize,
    /// Size of the local receive buffer in bytes, as used by the kernel for accounting.
    pub receive_buffer: usize,
    /// Results of all cases.
    pub cases: Vec<WireCase>,
}

impl WireReport {
    /// Formats the results as a table for users.
    #[must_use]
    pub fn table(&self) -> String {
        let place = match self.loopback {
            true => "loopback, two threads".to_owned(),
            false => format!("{} to {}", self.local, self.peer),
        };
        let mut out = format!(
            "{place}: payload {} bytes, {} packets per send, receive buffer {} KiB\n\
             {:<34} {:>5} {:>10} {:>10} {:>8} {:>8} {:>9}\n",
            self.path_mtu,
            self.packets_per_send,
            self.receive_buffer >> 10,
            "case",
            "depth",
            "ops/s",
            "MB/s",
            "p50 us",
            "p99 us",
            "lost"
        );
        for case in &self.cases {
            let us = |of: fn(&WireLatency) -> u64| {
                let latency = case.latency_ns.as_ref();
                latency.map_or("-".into(), |l| format!("{:.1}", of(l) as f64 / 1e3))
            };
            out += &format!(
                "{:<34} {:>5} {:>10.0} {:>10.1} {:>8} {:>8} {:>9}\n",
                case.name,
                case.depth,
                case.operations_per_second,
                case.bytes_per_second / 1e6,
                us(|l| l.p50),
                us(|l| l.p99),
                case.lost_commands + case.lost_packets
            );
            if case.corrupted + case.foreign > 0 {
                out += &format!(
                    "  {} corrupted packets, {} unrelated datagrams\n",
                    case.corrupted, case.foreign
                );
            }
        }
        out
    }
}

fn open(addr: IpAddr) -> io::Result<Driver> {
    Driver::open(&DriverConfig {
        addr,
        other_addrs: Vec::new(),
        worker_bits: 0,
        socket_buffer: SOCKET_BUFFER,
        no_segmentation: false,
        on_link: false,
    })
}

/// Opens a socket with an unused loopback address.
fn open_on_loopback() -> Result<(IpAddr, Driver), WireError> {
    for last in 1..=254 {
        let addr = IpAddr::V4(Ipv4Addr::new(127, 77, 0, last));
        match open(addr) {
            Ok(driver) => return Ok((addr, driver)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(source) => return Err(WireError::Open { addr, source }),
        }
    }
    Err(WireError::NoAddress)
}

/// Measures this machine, using threads for the requester and responder with separate loopback
/// addresses.
///
/// # Errors
/// [`WireError`].
pub fn measure_loopback(config: WireConfig) -> Result<WireReport, WireError> {
    let (peer, driver) = open_on_loopback()?;
    let mut responder = Responder::new(driver)?;
    let (local, driver) = open_on_loopback()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("wire-responder".into());
        let thread = thread
            .spawn_scoped(scope, || responder.run(&stop))
            .map_err(|e| WireError::Thread(e.to_string()))?;
        let report = run(local, peer, driver, config, true);
        stop.store(true, Ordering::Relaxed);
        if thread.join().is_err() {
            return Err(WireError::Thread("panicked".into()));
        }
        report
    })
}

/// Measures the network between a local address and a responder on another host.
///
/// # Errors
/// [`WireError`].
pub fn measure(local: IpAddr, peer: IpAddr, config: WireConfig) -> Result<WireReport, WireError> {
    if local.is_ipv4() != peer.is_ipv4() {
        return Err(WireError::Family(local, peer));
    }
    if local == peer {
        return Err(WireError::SameAddress(local));
    }
    let driver = open(local).map_err(|source| WireError::Open {
        addr: local,
        source,
    })?;
    run(local, peer, driver, config, false)
}

fn run(
    local: IpAddr,
    peer: IpAddr,
    driver: Driver,
    config: WireConfig,
    loopback: bool,
) -> Result<WireReport, WireError> {
    let path_mtu = path_mtu(local, config.path_mtu)?;
    let (packets_per_send, receive_buffer) = (driver.max_segments(), driver.receive_buffer());
    let mut requester = Requester::new(driver, SocketAddr::new(peer, ROCE_PORT), path_mtu)?;
    requester.greet()?;
    let cases = requester.run_all(config)?;
    Ok(WireReport {
        local,
        peer,
        loopback,
        path_mtu,
        packets_per_send,
        receive_buffer,
        cases,
    })
}

fn path_mtu(local: IpAddr, wanted: Option<u16>) -> Result<u16, WireError> {
    match wanted {
        Some(mtu @ (256 | 512 | 1024 | 2048 | 4096)) => Ok(mtu),
        Some(other) => Err(WireError::PathMtu(other)),
        None => {
            let interface = Interface {
                name: String::new(),
                address: local,
                mtu: interface_mtu(local),
            };
            interface.path_mtu().ok_or(WireError::Interface(local))
        }
    }
}
