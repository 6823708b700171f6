//! Packet captures in the classic pcap file format with link type "raw IP".
//!
//! IP and UDP headers are not available from a UDP socket, so we generate them as the sending
//! kernel would: using the known (or recovered) identification, the DF flag, and valid checksums.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::verbs::{NetworkHeader, RouteHeader};

/// Magic number of a capture with nanosecond timestamps in native byte order.
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
/// Link type for packets that start with an IP header.
const LINKTYPE_RAW: u32 = 101;
const SNAP_LEN: u32 = 0x4_0000;

/// Writes packets to a pcap file.
pub struct PcapWriter<W: Write> {
    out: W,
    start: Instant,
    wall: Duration,
    scratch: Vec<u8>,
}

impl<W: Write> std::fmt::Debug for PcapWriter<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PcapWriter").finish_non_exhaustive()
    }
}

impl PcapWriter<BufWriter<File>> {
    /// Creates a capture file. An existing file will be replaced.
    ///
    /// # Errors
    /// Returns an error if the file can't be created or written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self::new(BufWriter::new(File::create(path)?), Instant::now(), wall)
    }
}

impl<W: Write> PcapWriter<W> {
    /// Starts a capture. `start` is the instant corresponding to `wall`, the time since 1970.
    ///
    /// # Errors
    /// Returns write errors.
    pub fn new(mut out: W, start: Instant, wall: Duration) -> io::Result<Self> {
        let mut head = Vec::with_capacity(24);
        head.extend_from_slice(&MAGIC_NANOSECONDS.to_ne_bytes());
        head.extend_from_slice(&2u16.to_ne_bytes());
        head.extend_from_slice(&4u16.to_ne_bytes());
        head.extend_from_slice(&[0; 8]);
        head.extend_from_slice(&SNAP_LEN.to_ne_bytes());
        head.extend_from_slice(&LINKTYPE_RAW.to_ne_bytes());
        out.write_all(&head)?;
        Ok(Self {
            out,
            start,
            wall,
            scratch: Vec::new(),
        })
    }

    /// Writes a packet, given its UDP payload, addresses and IPv4 identification.
    ///
    /// # Errors
    /// Returns write errors.
    pub fn write(
        &mut self,
        now: Instant,
        src: SocketAddr,
        dst: SocketAddr,
        ip_id: u16,
        payload: &[u8],
    ) -> io::Result<()> {
        self.scratch.clear();
        frame(&mut self.scratch, src, dst, ip_id, payload);
        // An `Instant` doesn't contain a date, so compute it from the start time.
        let time = self.wall + now.saturating_duration_since(self.start);
        let mut head = [0; 16];
        head[..4].copy_from_slice(&(time.as_secs() as u32).to_ne_bytes());
        head[4..8].copy_from_slice(&time.subsec_nanos().to_ne_bytes());
        let len = self.scratch.len() as u32;
        head[8..12].copy_from_slice(&len.to_ne_bytes());
        head[12..].copy_from_slice(&len.to_ne_bytes());
        self.out.write_all(&head)?;
        self.out.write_all(&self.scratch)
    }

    /// Flushes all buffered data to the file.
    ///
    /// # Errors
    /// Returns write errors.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl<W: Write> Drop for PcapWriter<W> {
    fn drop(&mut self) {
        // A truncated capture is still useful, and there is no caller to return an error to.
        let _ = self.out.flush();
    }
}

/// Returns the ones' complement sum of big-endian words. An odd last byte is padded with zero.
fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|c| u32::from(u16::from_be_bytes([c[0], c.get(1).copied().unwrap_or(0)])))
        .fold(0, |a, w| {
            let s = a + w;
            (s & 0xffff) + (s >> 16)
        })
}

fn checksum(parts: u32) -> u16 {
    let mut s = parts;
    while s > 0xffff {
        s = (s & 0xffff) + (s >> 16);
    }
    !(s as u16)
}

fn frame(out: &mut Vec<u8>, src: SocketAddr, dst: SocketAddr, ip_id: u16, payload: &[u8]) {
    let udp_len = (payload.len() + 8) as u16;
    // The sending kernel would use these values.
    let route = RouteHeader {
        source: src.ip(),
        destination: dst.ip(),
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        identification: ip_id,
        payload_len: udp_len,
    };
    let bytes = route.to_bytes();
    let (header, addresses) = match route.network() {
        NetworkHeader::Ipv4 => (&bytes[20..], &bytes[32..]),
        NetworkHeader::Ipv6 => (&bytes[..], &bytes[8..]),
    };
    out.extend_from_slice(header);
    let addresses = sum(addresses);
    let at = out.len();
    out.extend_from_slice(&src.port().to_be_bytes());
    out.extend_from_slice(&dst.port().to_be_bytes());
    out.extend_from_slice(&udp_len.to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(payload);
    let c = match checksum(addresses + 17 + u32::from(udp_len) + sum(&out[at..])) {
        0 => 0xffff,
        c => c,
    };
    out[at + 6..at + 8].copy_from_slice(&c.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capture_contains_valid_headers() {
        let now = Instant::now();
        let mut out = Vec::new();
        {
            let mut w = PcapWriter::new(&mut out, now, Duration::from_secs(5)).unwrap();
            let src = "10.0.0.1:49152".parse().unwrap();
            let dst = "10.0.0.2:4791".parse().unwrap();
            w.write(now + Duration::from_nanos(7), src, dst, 3, &[1, 2, 3, 4])
                .unwrap();
        }
        assert_eq!(out[20..24], 101u32.to_ne_bytes());
        assert_eq!(out[24..28], 5u32.to_ne_bytes());
        assert_eq!(out[28..32], 7u32.to_ne_bytes());
        let packet = &out[40..];
        assert_eq!(
            packet[..20],
            [
                0x45, 0, 0, 32, 0, 3, 0x40, 0, 64, 17, 0x26, 0xc8, 10, 0, 0, 1, 10, 0, 0, 2
            ]
        );
        assert_eq!(packet[20..26], [0xc0, 0, 0x12, 0xb7, 0, 12]);
        // A valid checksum over the pseudo header and the datagram results in all ones.
        let pseudo = sum(&packet[12..20]) + 17 + 12 + sum(&packet[20..]);
        assert_eq!(checksum(pseudo), 0);
    }
}
