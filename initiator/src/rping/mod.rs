//! `rping`: the ping-pong of rdma-core's tool of that name, as client and as server.
//!
//! It is what one runs first on a new network: it proves address resolution, connection management,
//! SEND, RDMA READ and RDMA WRITE, and compares every byte.
//!
//! ```text
//! client                                   server
//!   SEND  address of its source     ──▶
//!                                          RDMA READ the source
//!                                   ◀──    SEND "go on"
//!   SEND  address of its sink       ──▶
//!                                          RDMA WRITE what was read
//!                                   ◀──    SEND "go on"
//!   compare source and sink
//! ```
//!
//! Both sides run on any [`Provider`] and drive it themselves; nothing else uses the device
//! meanwhile. Memory: two buffers of the ping's size and two of 16 bytes, registered for the run.
//!
//! Not implemented: the original's bandwidth and persistent-server modes.

mod endpoint;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use endpoint::Endpoint;
use riser_transport::verbs::{CmError, Provider, VerbsError, WcStatus};
use thiserror::Error;

/// The port that the original listens on.
pub const DEFAULT_PORT: u16 = 7174;

/// Largest ping, in bytes. The original stops at 64 KiB.
pub const MAX_SIZE: usize = 64 << 20;

/// Smallest ping, in bytes: the text that it begins with.
pub const MIN_SIZE: usize = 32;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Pings; 0 goes on until the peer leaves.
    pub count: u64,
    /// Bytes of a ping, from [`MIN_SIZE`] to [`MAX_SIZE`].
    pub size: usize,
    /// Longest time for any one step.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            count: 10,
            size: 64,
            timeout: Duration::from_secs(10),
        }
    }
}

/// Result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pings whose data was compared (client) or echoed (server).
    pub pings: u64,
    /// Bytes of data that went each way.
    pub bytes: u64,
    /// From the first ping to the last.
    pub elapsed: Duration,
}

/// Reason why a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RpingError {
    /// The ping's size is out of range.
    #[error("a ping is {MIN_SIZE} to {MAX_SIZE} bytes, not {0}")]
    Size(usize),
    /// A connection call failed.
    #[error("{step}: {source}")]
    Cm {
        /// Step that was under way.
        step: &'static str,
        /// Error of the connection manager.
        source: CmError,
    },
    /// A call of the verbs failed.
    #[error("{step}: {source}")]
    Verbs {
        /// Step that was under way.
        step: &'static str,
        /// Error of the device.
        source: VerbsError,
    },
    /// The peer refused the connection.
    #[error("the peer refused the connection (reason {0})")]
    Rejected(u16),
    /// A request ended badly.
    #[error("{step}: {status:?}")]
    Work {
        /// Step that was under way.
        step: &'static str,
        /// Status of the completion.
        status: WcStatus,
    },
    /// A step took too long.
    #[error("{0}: no answer in time")]
    Timeout(&'static str),
    /// The peer left before the end.
    #[error("the peer disconnected after {0} pings")]
    Disconnected(u64),
    /// The peer said something that is not the protocol.
    #[error("the peer sent {0} bytes where 16 were due")]
    Protocol(u32),
    /// Data that came back differ from those sent.
    #[error("ping {ping}: byte {offset} came back as {found:#04x}, sent as {sent:#04x}")]
    Mismatch {
        /// Number of the ping, from 0.
        ping: u64,
        /// Offset in the data, in bytes.
        offset: usize,
        /// Byte that was sent.
        sent: u8,
        /// Byte that came back.
        found: u8,
    },
}

/// Range of a peer's buffer: the protocol's only message, 16 bytes in network byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RdmaInfo {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
    pub(crate) size: u32,
}

impl RdmaInfo {
    pub(crate) const LEN: usize = 16;

    pub(crate) fn parse(bytes: [u8; Self::LEN]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Self {
            addr: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            rkey: u32::from_be_bytes([i, j, k, l]),
            size: u32::from_be_bytes([m, n, o, p]),
        }
    }

    pub(crate) fn emit(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..].copy_from_slice(&self.size.to_be_bytes());
        out
    }
}

/// The data of a ping: the text that the original writes, printable, with a NUL at its end.
fn ping_data(ping: u64, size: usize) -> Vec<u8> {
    let mut data = format!("rdma-ping-{ping}: ").into_bytes();
    data.truncate(size - 1);
    let start = 65 + (ping % 58) as u8;
    let text = (0..).map(|i: usize| 65 + ((usize::from(start) - 65 + i) % 58) as u8);
    let rest = size - 1 - data.len();
    data.extend(text.take(rest));
    data.push(0);
    data
}

/// Pings a server and compares what comes back.
///
/// # Errors
/// [`RpingError`] names the step and what went wrong.
pub fn client(
    provider: &mut dyn Provider,
    server: SocketAddr,
    options: &Options,
) -> Result<Report, RpingError> {
    let mut end = Endpoint::new(provider, options)?;
    end.connect(server)?;
    let (started, mut report) = (Instant::now(), Report::default());
    while options.count == 0 || report.pings < options.count {
        let sent = ping_data(report.pings, options.size);
        end.fill_source(&sent);
        end.advertise_source()?;
        end.wait_message("waiting for the server's read", report.pings)?;
        end.advertise_sink()?;
        end.wait_message("waiting for the server's write", report.pings)?;
        compare(&sent, &end.sink(), report.pings)?;
        report.pings += 1;
        report.bytes += options.size as u64;
    }
    report.elapsed = started.elapsed();
    end.disconnect();
    Ok(report)
}

fn compare(sent: &[u8], found: &[u8], ping: u64) -> Result<(), RpingError> {
    match sent.iter().zip(found).position(|(s, f)| s != f) {
        Some(offset) => Err(RpingError::Mismatch {
            ping,
            offset,
            sent: sent[offset],
            found: found[offset],
        }),
        None => Ok(()),
    }
}

/// Serves one client until it leaves, or until `options.count` pings. `on_ready` learns the address
/// that it listens on.
///
/// # Errors
/// [`RpingError`] names the step and what went wrong.
pub fn server(
    provider: &mut dyn Provider,
    listen: SocketAddr,
    options: &Options,
    on_ready: impl FnOnce(SocketAddr),
) -> Result<Report, RpingError> {
    let mut end = Endpoint::new(provider, options)?;
    end.accept(listen, on_ready)?;
    let (started, mut report) = (Instant::now(), Report::default());
    while options.count == 0 || report.pings < options.count {
        let source = match end.wait_message("waiting for a ping", report.pings) {
            Err(RpingError::Disconnected(_)) => break,
            other => other?,
        };
        end.read(source)?;
        end.go_on()?;
        let sink = end.wait_message("waiting for the client's sink", report.pings)?;
        end.write(sink, source.size.min(sink.size))?;
        let told = end.go_on();
        report.pings += 1;
        report.bytes += u64::from(source.size);
        report.elapsed = started.elapsed();
        match told {
            // A client that leaves as soon as it has its last answer need not acknowledge it.
            Err(RpingError::Work { .. } | RpingError::Disconnected(_)) => break,
            other => other?,
        }
    }
    end.disconnect();
    Ok(report)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use riser_transport::roce::{Roce, RoceConfig};

    use super::*;

    #[test]
    fn the_message_is_sixteen_bytes_in_network_order() {
        let bytes = [0, 0, 0x7f, 0xaa, 1, 2, 3, 4, 0, 0, 0x0b, 0x2c, 0, 0, 0, 64];
        let info = RdmaInfo::parse(bytes);
        assert_eq!(
            info,
            RdmaInfo {
                addr: 0x7faa_0102_0304,
                rkey: 0xb2c,
                size: 64
            }
        );
        assert_eq!(info.emit(), bytes);
    }

    /// A step may take an hour, so a side that waited for something that does not come would show.
    #[test]
    fn a_server_ends_when_its_client_has_left() {
        let open = |n: u8| {
            let config = RoceConfig::new(IpAddr::from([127, 91, 0, n]));
            Roce::open(&config).unwrap()
        };
        let (mut here, mut there) = (open(1), open(2));
        let options = |count| Options {
            count,
            size: 4096,
            timeout: Duration::from_secs(3600),
        };
        let (tell, told) = std::sync::mpsc::channel();
        let served = std::thread::spawn(move || {
            let listen = SocketAddr::from(([127, 91, 0, 1], DEFAULT_PORT));
            let ready = |at| tell.send(at).unwrap();
            server(&mut here, listen, &options(0), ready).unwrap().pings
        });
        let at = told.recv().unwrap();
        let report = client(&mut there, at, &options(20)).unwrap();
        assert_eq!((report.pings, report.bytes), (20, 20 * 4096));
        assert_eq!(served.join().unwrap(), 20);
    }

    #[test]
    fn a_ping_is_printable_and_ends_in_nul() {
        for size in [MIN_SIZE, 64, 4096] {
            for ping in [0, 57, 58, 1_000_000] {
                let data = ping_data(ping, size);
                assert_eq!(data.len(), size);
                assert_eq!(data.iter().position(|b| *b == 0), Some(size - 1));
                assert!(data.starts_with(format!("rdma-ping-{ping}: ").as_bytes()));
            }
        }
        assert_ne!(ping_data(1, 64), ping_data(2, 64));
    }
}
