//! `rping`: client and server for the ping test from rdma-core.
//!
//! This should be the first test on a new network: it verifies address resolution, connection
//! management, SEND, RDMA READ and RDMA WRITE, and compares all data.
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
//! Both sides can use any [`Provider`] and also drive it, so the device must not be used by
//! anything else at the same time. Memory: two buffers for the ping data and two 16-byte buffers,
//! which are registered for each run.
//!
//! Not implemented: the bandwidth and persistent server modes of the original tool.

mod endpoint;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use endpoint::Endpoint;
use riser_transport::verbs::{CmError, Provider, VerbsError, WcStatus};
use thiserror::Error;

/// Port used by the original tool.
pub const DEFAULT_PORT: u16 = 7174;

/// Max ping size in bytes. The original tool supports up to 64 KiB.
pub const MAX_SIZE: usize = 64 << 20;

/// Min ping size in bytes: the length of the text at the start.
pub const MIN_SIZE: usize = 32;

/// Options for a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of pings; 0 means to continue until the peer disconnects.
    pub count: u64,
    /// Ping size in bytes, from [`MIN_SIZE`] to [`MAX_SIZE`].
    pub size: usize,
    /// Timeout for each step.
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
    /// Number of pings with data compared (client) or echoed (server).
    pub pings: u64,
    /// Number of data bytes sent in each direction.
    pub bytes: u64,
    /// Time from the first ping to the last.
    pub elapsed: Duration,
}

/// Error for a failed run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RpingError {
    /// Ping size out of range.
    #[error("invalid ping size of {0} bytes: expected {MIN_SIZE} to {MAX_SIZE}")]
    Size(usize),
    /// Connection manager call failed.
    #[error("{step}: {source}")]
    Cm {
        /// Current step.
        step: &'static str,
        /// Connection manager error.
        source: CmError,
    },
    /// Verbs call failed.
    #[error("{step}: {source}")]
    Verbs {
        /// Current step.
        step: &'static str,
        /// Device error.
        source: VerbsError,
    },
    /// The connection was rejected by the peer.
    #[error("the peer rejected the connection (reason {0})")]
    Rejected(u16),
    /// Work request completed with an error.
    #[error("{step}: {status:?}")]
    Work {
        /// Current step.
        step: &'static str,
        /// Completion status.
        status: WcStatus,
    },
    /// Timeout in this step.
    #[error("{0}: timed out")]
    Timeout(&'static str),
    /// The peer disconnected early.
    #[error("the peer disconnected after {0} pings")]
    Disconnected(u64),
    /// The peer sent an invalid message.
    #[error("the peer sent {0} bytes, expected 16")]
    Protocol(u32),
    /// Received data doesn't match the sent data.
    #[error("ping {ping}: byte {offset} is {found:#04x}, but {sent:#04x} was sent")]
    Mismatch {
        /// Ping number, starting at 0.
        ping: u64,
        /// Data offset in bytes.
        offset: usize,
        /// Byte sent.
        sent: u8,
        /// Byte received.
        found: u8,
    },
}

/// Peer buffer range: this is the only message used by the protocol, 16 bytes in network byte
/// order.
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

/// Returns the data for a ping: the same printable text as in the original tool, terminated by NUL.
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

/// Pings a server and compares the returned data.
///
/// # Errors
/// Returns [`RpingError`] with the failed step and the cause.
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

/// Serves a single client until it disconnects, or until `options.count` pings. `on_ready` is
/// called with the listen address.
///
/// # Errors
/// Returns [`RpingError`] with the failed step and the cause.
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
        end.send_go_ahead()?;
        let sink = end.wait_message("waiting for the client's sink", report.pings)?;
        end.write(sink, source.size.min(sink.size))?;
        let sent = end.send_go_ahead();
        report.pings += 1;
        report.bytes += u64::from(source.size);
        report.elapsed = started.elapsed();
        match sent {
            // A client doesn't need to acknowledge the last message if it disconnects right after
            // it.
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
    fn message_has_16_bytes_in_network_order() {
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

    /// A step can take an hour, so the test will hang if a side waits for a message that is never
    /// sent.
    #[test]
    fn server_exits_after_client_disconnects() {
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
        let (reporter, reports) = std::sync::mpsc::channel();
        let served = std::thread::spawn(move || {
            let listen = SocketAddr::from(([127, 91, 0, 1], DEFAULT_PORT));
            let ready = |at| reporter.send(at).unwrap();
            server(&mut here, listen, &options(0), ready).unwrap().pings
        });
        let at = reports.recv().unwrap();
        let report = client(&mut there, at, &options(20)).unwrap();
        assert_eq!((report.pings, report.bytes), (20, 20 * 4096));
        assert_eq!(served.join().unwrap(), 20);
    }

    #[test]
    fn ping_is_printable_and_nul_terminated() {
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
