//! Uses Wireshark's dissectors to check the packet captures of tests with a Linux kernel.
//!
//! The rules are for two hosts, where 10.99.0.1 and fd99::1 use a kernel device.
//!
//! A capture contains packets in both directions, from the kernel and from our NIC. We only capture
//! the first bytes of each packet. The dissectors can tell the difference between a truncated
//! packet (a short frame) and an invalid packet (malformed). If an InfiniBand packet is truncated,
//! they only parse its headers, so if this packet starts a message, we replace the missing data
//! with zeros ([`filled`]).
//!
//! A TCP connection can reuse the ports of an earlier connection, but then the MPA dissector would
//! think that the stream has already started. To avoid this, we assign new ports to each connection
//! ([`Ports`]).
//!
//! We never guess the payload of an RC connection, but use the connection manager messages: if a
//! SEND belongs to a connection to the iSER port, the dissectors must find an iSER message with an
//! iSCSI PDU. There is no SRP dissector, so we can only check the InfiniBand headers.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Command, Stdio};

/// Maximum number of invalid packets to show.
const SHOWN: usize = 10;

/// Packet fields to be printed by tshark.
const FIELDS: [&str; 20] = [
    "frame.number",
    "frame.cap_len",
    "frame.len",
    "frame.protocols",
    "ip.src",
    "ip.dst",
    "ipv6.src",
    "ipv6.dst",
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.cm.req",
    "infiniband.cm.req.serviceid.dport",
    "infiniband.cm.req.localqpn",
    "infiniband.cm.rep.remotecommid",
    "infiniband.cm.rep.localqpn",
    "iscsi.datasegmentlength",
    "_ws.malformed",
    "_ws.expert.severity",
    "_ws.expert.message",
    "_ws.col.Info",
];

/// Dissectors that would try to parse the payload of any connection.
const GUESSING: [&str; 3] = ["rpcordma", "smb_direct", "nvme-rdma"];

/// The iSER port, 3260, in the format used for the connection manager's service ID.
const ISER_PORT: &str = "0x0cbc";

/// Opcodes of the first packet of an upper-layer message: RC SEND First, Only, Only with Immediate,
/// and Only with Invalidate.
const BEGINS_MESSAGE: [&str; 4] = ["0", "4", "5", "23"];

/// An initiator may request just the first part of this data, but the SCSI dissector will always
/// continue up to the length found in the data.
const PARTIAL: &str = "(Inquiry Response Data)";

/// Linux uses these lengths in its first request: the header size of a vital product data page, and
/// the length of SCSI-2 standard INQUIRY data. We don't accept any other length for data sent by
/// us.
const BEGINNINGS: [&str; 2] = ["4", "36"];

/// Reported by the UDP dissector for RoCE packets sent by the kernel over IPv6, which have no
/// checksum because they are already protected by the ICRC. Our packets contain a checksum.
const NO_CHECKSUM: &str = "Illegal checksum value (0)";

/// Addresses used by the kernel. This side always uses a kernel device, and also runs the kernel's
/// target if there is one.
const KERNEL: [&str; 2] = ["10.99.0.1", "fd99::1"];

/// Reported for payloads that the InfiniBand dissector handles as an Ethernet frame. It does this
/// if the protocol is unknown and bytes 2 and 3 are zero.
const GUESSED_FRAME: &str = "[Malformed Packet: Ethertype]";

/// Same, but the payload is handled as a frame with a VLAN tag. This affects SRP_CRED_REQ, because
/// the credits are used as the frame length.
const GUESSED_LENGTH: &str = "Length field value goes past the end of the payload";

/// Same, if the number of credits is small enough to be a valid frame length. No packet in our
/// tests has an LLC header.
const GUESSED_LLC: &str = "[Malformed Packet: LLC]";

/// Reported if a TCP segment is retransmitted with a different size, for example after a link
/// failure. Both sides use the kernel's TCP.
const SENT_AGAIN: &str = "New fragment overlaps old data (retransmission?)";

/// Expert severity of errors. Warnings use lower values.
const ERROR: u32 = 0x80_0000;

/// Expected captures of a test case.
#[derive(Clone, Copy)]
pub struct Expected {
    /// Minimum number of packets in all captures. If `None`, there must be no packets.
    pub least: Option<u64>,
    /// Set if this case uses iSER, so the capture must contain iSER PDUs.
    pub is_iser: bool,
    /// Set if both sides use kernel devices, so no packet is sent by our software NIC.
    pub is_kernel_only: bool,
}

/// Result for a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureCounts {
    /// Number of packets that were checked.
    pub packets: u64,
    /// Number of packets that start an iSER message.
    pub iser: u64,
}

/// Checks all captures in a directory. The error contains the first invalid packets of each
/// capture.
pub fn check_captures(
    directory: &Path,
    expected: Expected,
) -> Result<CaptureCounts, Box<dyn Error>> {
    let mut captures: Vec<_> = fs::read_dir(directory)?
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "pcap"))
        .collect();
    captures.sort();
    let mut objections = Vec::new();
    let mut counts = CaptureCounts::default();
    for capture in captures {
        let name = capture.file_name().unwrap_or_default().to_string_lossy();
        let mut reader = Reader::new(expected);
        reader.read(&capture)?;
        counts.packets += reader.counts.packets;
        counts.iser += reader.counts.iser;
        for line in reader.wrong.iter().take(SHOWN) {
            objections.push(format!("{name}: packet {line}"));
        }
        if reader.wrong.len() > SHOWN {
            objections.push(format!("{name}: {} packets in total", reader.wrong.len()));
        }
    }
    let CaptureCounts { packets, iser } = counts;
    // An empty capture has no invalid packets, so we need to check the number of packets as well.
    match expected.least {
        None if packets > 0 => {
            objections.push(format!("{packets} packets, expected none"));
        }
        Some(least) if packets < least => {
            objections.push(format!("only {packets} packets, expected at least {least}"));
        }
        Some(least) if expected.is_iser && iser < least.min(10) => {
            objections.push(format!("{iser} iSER messages among {packets} packets"));
        }
        _ => {}
    }
    if objections.is_empty() {
        Ok(counts)
    } else {
        Err(format!("tshark reports:\n{}", objections.join("\n")).into())
    }
}

/// Returns the capture with changes: if a packet starts an upper-layer message, it's filled to its
/// full length, and TCP connections never use the same ports.
fn filled(capture: &[u8]) -> Vec<u8> {
    const FILE_HEADER: usize = 24;
    const PACKET_HEADER: usize = 16;
    let word = |at: usize| {
        let bytes = capture.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let mut filled = capture[..FILE_HEADER.min(capture.len())].to_vec();
    // The file was written by a guest that may have been killed, so we must check all lengths
    // against the file size.
    let mut at = FILE_HEADER;
    let mut ports = Ports::new();
    while let (Some(kept), Some(length)) = (word(at + 8), word(at + 12)) {
        let start = at + PACKET_HEADER;
        let Some(packet) = capture.get(start..start + kept) else {
            break;
        };
        let missing = length.saturating_sub(kept);
        let missing = if begins_message(packet) { missing } else { 0 };
        // Keep the timestamp, then write the new captured length and the original length.
        filled.extend(&capture[at..at + 8]);
        filled.extend(((kept + missing) as u32).to_le_bytes());
        filled.extend(&capture[at + 12..start]);
        let begin = filled.len();
        filled.extend(packet);
        // Returns `None` if the packet doesn't need to change.
        let _ = ports.separate(&mut filled[begin..]);
        filled.resize(filled.len() + missing, 0);
        at = start + kept;
    }
    // Copy the rest, which is a partial packet if the guest was killed.
    filled.extend(capture.get(at..).unwrap_or_default());
    filled
}

/// Returns true if this Ethernet frame is a RoCE packet with an opcode from [`BEGINS_MESSAGE`].
fn begins_message(frame: &[u8]) -> bool {
    // The opcode is after the Ethernet, IP and UDP headers.
    let opcode = match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(14 + 20 + 8),
        Some([0x86, 0xdd]) => frame.get(14 + 40 + 8),
        _ => None,
    };
    let is_one = |opcode: &u8| BEGINS_MESSAGE.contains(&opcode.to_string().as_str());
    opcode.is_some_and(is_one)
}

/// Address and port, using the packet format.
type TcpEnd = Vec<u8>;

/// Tracks the TCP connections in a capture.
struct Ports {
    /// Maps the client and server of a connection to the client's initial sequence number and, if
    /// the client's port was already used by an earlier connection, the new port.
    connections: BTreeMap<(TcpEnd, TcpEnd), ([u8; 4], Option<u16>)>,
    /// Available ports. Linux doesn't use these ports for connections.
    free: RangeInclusive<u16>,
}

impl Ports {
    fn new() -> Self {
        Self {
            connections: BTreeMap::new(),
            free: 61_000..=u16::MAX,
        }
    }

    /// If the client's port was already used by an earlier connection, replaces it in this packet.
    /// We don't have to update the checksum, because tshark doesn't verify it.
    fn separate(&mut self, frame: &mut [u8]) -> Option<()> {
        const TCP: u8 = 6;
        const SYN_ACK: u8 = 0x12;
        const SYN: u8 = 0x02;
        let (addresses, tcp) = match frame.get(12..14)? {
            [0x08, 0x00] if frame.get(23) == Some(&TCP) => {
                let words = usize::from(frame[14] & 0x0f);
                (26..34, 14 + 4 * words)
            }
            [0x86, 0xdd] if frame.get(20) == Some(&TCP) => (22..54, 54),
            _ => return None,
        };
        let addresses = frame.get(addresses)?;
        let (from, to) = addresses.split_at(addresses.len() / 2);
        let header = frame.get(tcp..tcp + 14)?;
        let from = [from, &header[..2]].concat();
        let to = [to, &header[2..4]].concat();
        let (forth, back) = ((from.clone(), to.clone()), (to, from));
        if header[13] & SYN_ACK == SYN {
            let number = header[4..8].try_into().ok()?;
            let before = self.connections.get(&forth).copied();
            // If the sequence number is equal, this is a retransmission.
            if before.is_none_or(|(first, _)| first != number) {
                let had = self.connections.remove(&back).is_some() || before.is_some();
                let port = if had { self.free.next() } else { None };
                self.connections.insert(forth.clone(), (number, port));
            }
        }
        let (end, at) = match self.connections.get(&forth) {
            Some(end) => (end, tcp),
            None => (self.connections.get(&back)?, tcp + 2),
        };
        let port = end.1?;
        frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
        Some(())
    }
}

/// One side of an RC connection: address and queue pair, in the format used by tshark.
type End = (String, String);

/// Processes the packets of a capture, in order.
struct Reader {
    expected: Expected,
    counts: CaptureCounts,
    /// Number, summary and error of each invalid packet.
    wrong: Vec<String>,
    /// Connection requests for the iSER port, by the client's communication ID.
    requests: BTreeMap<String, End>,
    /// Connection endpoints that use iSER.
    iser: BTreeSet<End>,
}

impl Reader {
    fn new(expected: Expected) -> Self {
        Self {
            expected,
            counts: CaptureCounts::default(),
            wrong: Vec::new(),
            requests: BTreeMap::new(),
            iser: BTreeSet::new(),
        }
    }

    fn read(&mut self, capture: &Path) -> Result<(), Box<dyn Error>> {
        let bytes = fs::read(capture)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let name = format!(
            "riser-capture-{}-{:p}",
            std::process::id(),
            &raw const bytes
        );
        let whole = std::env::temp_dir().join(name);
        fs::write(&whole, filled(&bytes))?;
        let mut command = Command::new("tshark");
        command
            .args(["-n", "-r"])
            .arg(&whole)
            .args(["-T", "fields"]);
        for field in FIELDS {
            command.args(["-e", field]);
        }
        for name in GUESSING {
            command.args(["--disable-protocol", name]);
        }
        let out = command.stdin(Stdio::null()).output();
        fs::remove_file(&whole)?;
        let out = out?;
        // If a guest is killed, the last packet in the capture may be incomplete.
        let complaint = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() && !complaint.contains("cut short") {
            return Err(format!("tshark {}: {}", capture.display(), complaint.trim()).into());
        }
        for line in String::from_utf8_lossy(&out.stdout).lines() {
            self.counts.packets += 1;
            match Packet::parse(line) {
                Some(packet) => self.packet(&packet),
                None => self.wrong.push(format!("cannot parse line: {line}")),
            }
        }
        Ok(())
    }

    fn packet(&mut self, packet: &Packet<'_>) {
        self.record_connection(packet);
        let opcode = packet.field("infiniband.bth.opcode");
        let begins = packet.is_rc() && BEGINS_MESSAGE.contains(&opcode);
        let is_iser = begins && self.iser.contains(&packet.to());
        // If the iSER dissector has parsed this payload, the protocol list ends with these names,
        // or they are followed by SCSI.
        let protocols = packet.field("frame.protocols");
        let is_read = protocols.ends_with(":iser:iscsi") || protocols.contains(":iscsi:");
        if is_iser {
            self.counts.iser += 1;
        }
        if let Some(wrong) = packet.objection(self.expected, begins, is_iser) {
            self.wrong.push(wrong);
        } else if is_iser && !is_read {
            let (number, info) = packet.number_and_info();
            self.wrong.push(format!(
                "{number}: no iSCSI PDU on a connection of iSER: {info}"
            ));
        }
    }

    /// Updates the set of iSER connections using a connection manager message.
    fn record_connection(&mut self, packet: &Packet<'_>) {
        // The client's communication ID in a request, and the same ID in the reply.
        let request_id = packet.field("infiniband.cm.req");
        let reply_id = packet.field("infiniband.cm.rep.remotecommid");
        let end = |qp| (packet.src().to_owned(), packet.field(qp).to_owned());
        // A queue pair can be reused within a capture, so a new request must reset its state.
        if !request_id.is_empty() {
            let end = end("infiniband.cm.req.localqpn");
            self.iser.remove(&end);
            self.requests.remove(request_id);
            if packet.field("infiniband.cm.req.serviceid.dport") == ISER_PORT {
                self.requests.insert(request_id.to_owned(), end);
            }
        } else if !reply_id.is_empty() {
            let end = end("infiniband.cm.rep.localqpn");
            self.iser.remove(&end);
            if let Some(requester_end) = self.requests.get(reply_id) {
                self.iser.insert(requester_end.clone());
                self.iser.insert(end);
            }
        }
    }
}

/// tshark output for a packet, with a column for each of [`FIELDS`].
struct Packet<'a>(Vec<&'a str>);

impl<'a> Packet<'a> {
    /// Returns `None` for a line with a different number of columns, because all values would be in
    /// the wrong field.
    fn parse(line: &'a str) -> Option<Self> {
        let columns: Vec<_> = line.split('\t').collect();
        (columns.len() == FIELDS.len()).then_some(Self(columns))
    }

    fn field(&self, name: &str) -> &'a str {
        let at = FIELDS.iter().position(|field| *field == name);
        self.0[at.expect("a field that tshark prints")]
    }

    fn number_and_info(&self) -> (&'a str, &'a str) {
        (self.field("frame.number"), self.field("_ws.col.Info"))
    }

    fn is_v6(&self) -> bool {
        !self.field("ipv6.src").is_empty()
    }

    fn src(&self) -> &'a str {
        self.field(if self.is_v6() { "ipv6.src" } else { "ip.src" })
    }

    fn to(&self) -> End {
        let to = self.field(if self.is_v6() { "ipv6.dst" } else { "ip.dst" });
        (
            to.to_owned(),
            self.field("infiniband.bth.destqp").to_owned(),
        )
    }

    /// Returns true for packets of a reliable connection, where the first three opcode bits are
    /// zero.
    fn is_rc(&self) -> bool {
        self.field("infiniband.bth.opcode")
            .parse::<u8>()
            .is_ok_and(|opcode| opcode < 0x20)
    }

    /// Returns the number, summary and error if this packet is invalid. RDMA data, or data that
    /// continues a message from a previous packet, is not a PDU and could look like an invalid PDU.
    fn objection(&self, expected: Expected, begins: bool, is_iser: bool) -> Option<String> {
        let (number, info) = self.number_and_info();
        let [malformed, severity, message] =
            ["_ws.malformed", "_ws.expert.severity", "_ws.expert.message"].map(|f| self.field(f));
        let is_kernels = KERNEL.contains(&self.src());
        let has_no_checksum =
            message == NO_CHECKSUM && self.is_v6() && (is_kernels || expected.is_kernel_only);
        let is_error = !has_no_checksum
            && severity
                .split(',')
                .filter_map(|s| s.parse::<u32>().ok())
                // There can be several errors in a packet, separated by commas. We use the highest
                // severity.
                .any(|s| s >= ERROR);
        // There can be several PDUs in a packet. The dissector stops at the invalid PDU.
        let last_length = self
            .field("iscsi.datasegmentlength")
            .rsplit(',')
            .next()
            .unwrap_or_default();
        let is_partial = (is_kernels || BEGINNINGS.contains(&last_length))
            && info
                .split_once(" [Malformed Packet]")
                .is_some_and(|(read, _)| read.ends_with(PARTIAL));
        let is_no_fault = !is_iser
            && ([GUESSED_FRAME, GUESSED_LLC, SENT_AGAIN]
                .iter()
                .any(|words| malformed.contains(words))
                || message == GUESSED_LENGTH);
        let is_data = self.is_rc() && !begins && self.field("frame.protocols").contains(":iser");
        if is_partial || is_no_fault || is_data {
            return None;
        }
        // If the packet length doesn't match its headers, the InfiniBand dissector reports this as
        // text. For a truncated packet, it always does so.
        let is_wrong_length = self.field("frame.cap_len") == self.field("frame.len")
            && info.contains("[Malformed Packet]");
        (!malformed.is_empty() || is_error || is_wrong_length)
            .then(|| format!("{number}: {info} {message}"))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::programs::missing;

    /// A case with a few packets where one side uses our NIC.
    const ANY: Expected = Expected {
        least: Some(1),
        is_iser: false,
        is_kernel_only: false,
    };

    /// Creates a capture of Ethernet frames.
    fn capture(frames: &[Vec<u8>]) -> Vec<u8> {
        let mut pcap = Vec::new();
        for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 1] {
            pcap.extend(word.to_le_bytes());
        }
        for frame in frames {
            pcap.extend([0; 8]);
            for _ in 0..2 {
                pcap.extend((frame.len() as u32).to_le_bytes());
            }
            pcap.extend(frame);
        }
        pcap
    }

    /// Creates an Ethernet frame with an IPv4 UDP packet to the RoCE port.
    fn frame(udp: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        let total = (28 + udp.len()) as u16;
        frame.extend([0x45, 0]);
        frame.extend(total.to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 99, 0, 2, 10, 99, 0, 1]);
        frame.extend([0xc0, 0, 0x12, 0xb7]);
        frame.extend((total - 20).to_be_bytes());
        frame.extend([0, 0]);
        frame.extend(udp);
        frame
    }

    /// Creates the same frame over IPv6, without a checksum, from the given host in fd99::/64.
    fn frame_v6(host: u8, udp: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd];
        let length = (8 + udp.len()) as u16;
        frame.extend([0x60, 0, 0, 0]);
        frame.extend(length.to_be_bytes());
        frame.extend([17, 64]);
        for host in [host, 3 - host] {
            frame.extend([0xfd, 0x99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]);
        }
        frame.extend([0xc0, 0, 0x12, 0xb7]);
        frame.extend(length.to_be_bytes());
        frame.extend([0, 0]);
        frame.extend(udp);
        frame
    }

    /// Creates an acknowledgement: BTH, AETH, ICRC.
    fn ack() -> Vec<u8> {
        let mut ack = vec![0x11, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
        ack.extend([0x1f, 0, 0, 1]);
        ack.extend([0; 4]);
        ack
    }

    /// Creates an Ethernet frame with a TCP segment over IPv4 and a 20-byte header. If `from_first`
    /// is set, it's sent from 10.99.0.1:40000 to 10.99.0.2:4000, otherwise in the other direction.
    fn segment(from_first: bool, flags: u8, (seq, ack): (u32, u32), data: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        frame.extend([0x45, 0]);
        frame.extend((40 + data.len() as u16).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        let (from, to) = if from_first { (1, 2) } else { (2, 1) };
        frame.extend([10, 99, 0, from, 10, 99, 0, to]);
        let (first, second) = (40_000_u16.to_be_bytes(), 4000_u16.to_be_bytes());
        let ports = if from_first {
            [first, second]
        } else {
            [second, first]
        };
        frame.extend(ports.as_flattened());
        frame.extend(seq.to_be_bytes());
        frame.extend(ack.to_be_bytes());
        frame.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(data);
        frame
    }

    /// Creates an iWARP connection with these initial sequence numbers. It contains the start of
    /// MPA and a single FPDU.
    fn iwarp(first: u32, second: u32, fpdu: &[u8]) -> [Vec<u8>; 6] {
        let begins = (first.wrapping_add(1), second.wrapping_add(1));
        let behind = (begins.0.wrapping_add(24), begins.1.wrapping_add(24));
        let back = |(first, second): (u32, u32)| (second, first);
        let request = b"MPA ID Req Frame\x10\x02\0\x04\0\x10\0\x10";
        let reply = b"MPA ID Rep Frame\x10\x02\0\x04\0\x10\0\x10";
        [
            segment(true, 0x02, (first, 0), &[]),
            segment(false, 0x12, (second, begins.0), &[]),
            segment(true, 0x10, begins, &[]),
            segment(true, 0x18, begins, request),
            segment(false, 0x18, back((behind.0, begins.1)), reply),
            segment(true, 0x18, behind, fpdu),
        ]
    }

    fn has_tshark(test: &str) -> bool {
        let is_there = missing(&["tshark"]).is_none();
        if !is_there {
            crate::skip::skip(test, "tshark is not installed");
        }
        is_there
    }

    /// Directory that is removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("riser-captures-{}-{name}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            fs::create_dir_all(&directory).unwrap();
            Self(directory)
        }

        fn write(&self, name: &str, capture: &[u8]) {
            fs::write(self.0.join(name), capture).unwrap();
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Reads a file of the end-to-end tests.
    fn data(name: &str) -> Vec<u8> {
        fs::read(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../tests/data")
                .join(name),
        )
        .unwrap()
    }

    /// Truncates all packets in a capture to the given size.
    fn cut_to(capture: &[u8], most: usize) -> Vec<u8> {
        let mut cut = capture[..24].to_vec();
        let mut at = 24;
        while at < capture.len() {
            let kept = u32::from_le_bytes(capture[at + 8..at + 12].try_into().unwrap()) as usize;
            cut.extend(&capture[at..at + 8]);
            cut.extend((kept.min(most) as u32).to_le_bytes());
            cut.extend(&capture[at + 12..at + 16 + kept.min(most)]);
            at += 16 + kept;
        }
        cut
    }

    /// Checks a single capture.
    fn check_capture(bytes: &[u8], expected: Expected) -> Result<CaptureCounts, String> {
        let scratch = Scratch::new(&format!("{bytes:p}"));
        scratch.write("a.pcap", bytes);
        check_captures(&scratch.0, expected).map_err(|e| e.to_string())
    }

    /// Creates a line of tshark output for a TCP packet.
    fn line(
        data_length: &str,
        malformed: &str,
        severity: &str,
        message: &str,
        info: &str,
    ) -> String {
        format!(
            "7\t118\t118\teth:iscsi\t10.99.0.2\t10.99.0.1{}\t{data_length}\t{malformed}\t\
             {severity}\t{message}\t{info}",
            "\t".repeat(9)
        )
    }

    fn objection(line: &str) -> Option<String> {
        Packet::parse(line).unwrap().objection(ANY, false, false)
    }

    #[test]
    fn only_truncated_data_is_accepted() {
        let malformed = |length: &str, info: &str| {
            let words = "[Malformed Packet: SCSI]";
            line(length, words, "8388608", "Malformed Packet", info)
        };
        let inquiry = "SCSI: Data In LUN: 0x01 (Inquiry Response Data)";
        let end = "[Malformed Packet]";
        let one = format!("{inquiry} {end}");
        assert_eq!(objection(&malformed("36", &one)), None);
        // The initiator requested all of the data. We also test this with the kernel's target.
        let whole = malformed("96", &one);
        assert!(objection(&whole).is_some());
        let kernels = whole.replace("10.99.0.2\t10.99.0.1", "10.99.0.1\t10.99.0.2");
        assert_eq!(objection(&kernels), None);
        let second = format!("SCSI: Response LUN: 0x00 (Test Unit Ready) (Good){inquiry} {end}");
        assert_eq!(objection(&malformed("0,36", &second)), None);
        let other = format!("{inquiry} SCSI: Data In LUN: 0x00 (Read(10) Response Data) {end}");
        assert!(objection(&malformed("36,36", &other)).is_some());
    }

    #[test]
    fn retransmitted_segment_is_accepted() {
        let line = |malformed: &str| {
            let malformed = format!("{malformed},_ws.malformed");
            line("", &malformed, "6291456,8388608", "of its order", "TCP")
        };
        let again = line(&format!("[Reassembly error, protocol TCP: {SENT_AGAIN}]"));
        assert_eq!(objection(&again), None);
        assert!(objection(&line("[Malformed Packet: iSCSI]")).is_some());
    }

    #[test]
    fn truncated_packet_is_reported() {
        if !has_tshark("a packet that ends too early") {
            return;
        }
        let scratch = Scratch::new("truncated");
        let ack = ack();
        scratch.write("a.pcap", &capture(&[frame(&ack)]));
        // A SEND with data that looks like a frame of the Ethernet loopback protocol.
        let mut send = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
        send.extend([0x90, 0, 0, 0]);
        send.extend([0; 4]);
        scratch.write("guess.pcap", &capture(&[frame(&send)]));
        // SRP_CRED_REQ packets that look like frames with a VLAN tag and a length.
        for credits in [3, 16] {
            let mut request = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
            request.extend([0x81, 0, 0, 0, 0, 0, 0, credits, 0, 0, 0, 0, 0, 0, 0, 1]);
            request.extend([0; 4]);
            let name = format!("tag{credits}.pcap");
            scratch.write(&name, &capture(&[frame(&request)]));
        }
        scratch.write("empty.pcap", &[]);
        assert_eq!(check_captures(&scratch.0, ANY).unwrap().packets, 4);
        scratch.write("b.pcap", &capture(&[frame(&ack[..7])]));
        let objection = check_captures(&scratch.0, ANY).unwrap_err().to_string();
        assert!(objection.contains("b.pcap: packet 1"), "{objection}");
        assert!(!objection.contains("a.pcap"), "{objection}");
    }

    #[test]
    fn capture_packet_count_is_checked() {
        if !has_tshark("the number of packets") {
            return;
        }
        let none = Expected { least: None, ..ANY };
        for empty in [capture(&[]), Vec::new()] {
            assert!(check_capture(&empty, none).is_ok());
            assert!(
                check_capture(&empty, ANY)
                    .unwrap_err()
                    .contains("at least 1")
            );
        }
        let one = capture(&[frame(&ack())]);
        assert!(check_capture(&one, ANY).is_ok());
        assert!(
            check_capture(&one, none)
                .unwrap_err()
                .contains("expected none")
        );
    }

    #[test]
    fn missing_checksum_requires_kernel_sender() {
        if !has_tshark("the checksum over IPv6") {
            return;
        }
        let (kernels, ours) = ([1, 2])
            .map(|host| capture(&[frame_v6(host, &ack())]))
            .into();
        assert!(check_capture(&kernels, ANY).is_ok());
        assert!(check_capture(&ours, ANY).unwrap_err().contains(NO_CHECKSUM));
        let is_kernel_only = Expected {
            is_kernel_only: true,
            ..ANY
        };
        assert!(check_capture(&ours, is_kernel_only).is_ok());
    }

    #[test]
    fn reused_ports_are_separate_connections() {
        if !has_tshark("ports of an earlier connection") {
            return;
        }
        // An RDMA SEND without data, with fields for length, DDP and RDMAP control, key, queue and
        // numbers.
        let mut fpdu = vec![0, 18, 0x41, 0x43, 0, 0, 0, 0];
        fpdu.extend([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        fpdu.extend(0_u32.to_be_bytes());
        let all = [
            iwarp(7, 9, &fpdu),
            iwarp(70_000, 90_000, &fpdu),
            iwarp(1, 2, &fpdu),
        ];
        let all = all.as_flattened();
        assert_eq!(check_capture(&capture(all), ANY).unwrap().packets, 18);
        // In the second connection, the FPDU is a READ request that is truncated after its header.
        fpdu[3] = 0x41;
        let mut all = all.to_vec();
        all[11] = iwarp(70_000, 90_000, &fpdu)[5].clone();
        let objection = check_capture(&capture(&all), ANY).unwrap_err();
        assert!(objection.contains("packet 12"), "{objection}");
    }

    #[test]
    fn reused_ports_are_replaced() {
        let mut ports = Ports::new();
        let mut after = |mut frame: Vec<u8>| {
            let _ = ports.separate(&mut frame);
            [34, 36].map(|at| u16::from_be_bytes([frame[at], frame[at + 1]]))
        };
        assert_eq!(after(segment(true, 0x02, (5, 0), &[])), [40_000, 4000]);
        // The same packet again, and the response.
        assert_eq!(after(segment(true, 0x02, (5, 0), &[])), [40_000, 4000]);
        assert_eq!(after(segment(false, 0x12, (8, 6), &[])), [4000, 40_000]);
        assert_eq!(after(segment(true, 0x02, (50, 0), &[])), [61_000, 4000]);
        assert_eq!(after(segment(false, 0x12, (80, 51), &[])), [4000, 61_000]);
        assert_eq!(after(segment(true, 0x11, (51, 81), b"x")), [61_000, 4000]);
        // The other side sends a request.
        assert_eq!(after(segment(false, 0x02, (90, 0), &[])), [61_001, 40_000]);
        assert_eq!(after(segment(true, 0x12, (60, 91), &[])), [40_000, 61_001]);
    }

    /// Uses an iSER session between the kernel's initiator and target, then adds an error to a PDU.
    #[test]
    fn iser_payload_is_checked() {
        if !has_tshark("iSER") {
            return;
        }
        let iser = Expected {
            least: Some(100),
            is_iser: true,
            is_kernel_only: true,
        };
        let golden = data("golden_iser.pcap");
        let sound = check_capture(&golden, iser).unwrap();
        assert_eq!(sound.iser, 84);
        // The first command, which is an INQUIRY: SCSI Command (01h) with the final and read bits
        // set, in an iSCSI control-type PDU with a read STag. The session's login is before this
        // packet.
        let command = golden
            .windows(30)
            .position(|w| w[0] == 0x14 && w[28..] == [0x01, 0xc1])
            .expect("a command");
        // Test a packet that is not iSER, a different message type, and a reserved opcode.
        for (at, byte) in [(0, 0x44), (0, 0x24), (28, 0x0f)] {
            let mut broken = golden.clone();
            broken[command + at] = byte;
            let objection = check_capture(&broken, iser);
            assert!(objection.is_err(), "{at}: {byte:#x}: {objection:?}");
        }
        // Commands and responses can still be parsed if the packets are truncated, as with
        // immediate data in a test case.
        let cut = cut_to(&golden, 700);
        assert!(cut.len() < golden.len() / 2);
        assert_eq!(check_capture(&cut, iser).unwrap().iser, 84);
        // If a capture has no connection manager messages, we can't find any iSER connections.
        let srp = data("golden_srp.pcap");
        let objection = check_capture(&srp, iser).unwrap_err();
        assert!(objection.contains("0 iSER messages"), "{objection}");
    }
}
