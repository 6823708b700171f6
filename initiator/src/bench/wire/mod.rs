//! Measures what a machine, or a network between two, carries in packets of RoCEv2: the limit of
//! every figure of the software NIC.
//!
//! - [`measure_loopback`]: two threads of this process.
//! - [`measure`]: against a host that runs [`Responder`].
//! - [`WireReport`]: the figures.
//!
//! A requester sends commands of 84 bytes and a responder answers each with RDMA WRITEs and a
//! response, the packets of one READ of a target. There are no queue pairs, no retransmission and
//! no disk: what is left is the NIC's socket driver ([`riser_transport::roce::driver`]), headers,
//! and in some cases the ICRC at both ends and the copy to the data's place. Both threads poll
//! without sleeping.
//!
//! The responder answers only requesters that have shown that they receive at their address: it
//! sends much more than it receives, to an address that a packet could forge.

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

/// Size that is asked for each buffer of a socket, in bytes, as the software NIC does.
const SOCKET_BUFFER: usize = 16 << 20;

/// Duration and shape of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct WireConfig {
    /// Time of each case, without its warm-up.
    pub runtime: Duration,
    /// Time of each case before it is measured.
    pub warm_up: Duration,
    /// Longest payload of a packet in bytes: a path MTU of InfiniBand, 256 to 4096. `None` for the
    /// largest one that the interface carries.
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

/// Reason why nothing was measured.
#[derive(Debug, Error)]
pub enum WireError {
    /// The socket could not be had.
    #[error("cannot open a socket at {addr}, UDP port {ROCE_PORT}: {source}")]
    Open {
        /// Local address.
        addr: IpAddr,
        /// Error of the system call.
        source: io::Error,
    },
    /// Every address that was tried has a software NIC already.
    #[error("every loopback address from 127.77.0.1 to 127.77.0.254 is in use")]
    NoAddress,
    /// One address is IPv4 and the other IPv6.
    #[error("{0} and {1} are not of one address family")]
    Family(IpAddr, IpAddr),
    /// The addresses of both ends are the same.
    #[error("{0} is this end's own address")]
    SameAddress(IpAddr),
    /// A path MTU that does not exist.
    #[error("path MTU {0} is none of 256, 512, 1024, 2048 and 4096")]
    PathMtu(u16),
    /// The interface carries less than the smallest path MTU.
    #[error("the interface with {0} carries no RoCE packets: its MTU is too small")]
    Interface(IpAddr),
    /// No responder.
    #[error("no responder answers at {0}: does `riser bench wire --listen` run there?")]
    NoAnswer(IpAddr),
    /// Nothing came through in a case.
    #[error("{0}: no reply came within {1:?}; a path that carries smaller packets needs --mtu")]
    Nothing(&'static str, Duration),
    /// A thread could not be started, or has ended early.
    #[error("the responder's thread failed: {0}")]
    Thread(String),
}

/// Latencies in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WireLatency {
    /// Shortest time.
    pub min: u64,
    /// Half took no longer.
    pub p50: u64,
    /// 99 % took no longer.
    pub p99: u64,
    /// 99.9 % took no longer.
    pub p99_9: u64,
    /// Longest time.
    pub max: u64,
}

/// Figures of one case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WireCase {
    /// Name of the case.
    pub name: &'static str,
    /// Commands outstanding.
    pub depth: u32,
    /// Data in the reply to a command, in bytes.
    pub reply_bytes: u32,
    /// ICRCs were made and verified, and data copied to their place.
    pub icrc: bool,
    /// Time measured, in seconds.
    pub seconds: f64,
    /// Commands that were answered.
    pub operations: u64,
    /// Commands answered per second.
    pub operations_per_second: f64,
    /// Data received per second, in bytes, without headers.
    pub bytes_per_second: f64,
    /// Times from a command to its response.
    pub latency_ns: Option<WireLatency>,
    /// Commands without a reply, in whose places others were sent.
    pub lost_commands: u64,
    /// Packets of data missing from replies.
    pub lost_packets: u64,
    /// Packets whose ICRC was wrong.
    pub corrupted: u64,
    /// Datagrams that were no packets of this measurement.
    pub foreign: u64,
}

/// Figures of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WireReport {
    /// Address of this end.
    pub local: IpAddr,
    /// Address of the responder.
    pub peer: IpAddr,
    /// Both ends are threads of this process.
    pub loopback: bool,
    /// Longest payload of a packet, in bytes.
    pub path_mtu: u16,
    /// Packets that one send takes (`UDP_SEGMENT`); 1 where the kernel does not segment.
    pub packets_per_send: usize,
    /// Receive buffer of this end's socket in bytes, as the kernel accounts it.
    pub receive_buffer: usize,
    /// Figures by case.
    pub cases: Vec<WireCase>,
}

impl WireReport {
    /// The figures as a table for people; lines end with a line feed.
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
                    "  {} corrupted packets, {} datagrams of others\n",
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

/// Opens a socket at a loopback address that no other program has.
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

/// Measures this machine: requester and responder are two threads, at two loopback addresses.
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
            return Err(WireError::Thread("it panicked".into()));
        }
        report
    })
}

/// Measures the way to a responder on another host, from a local address.
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
