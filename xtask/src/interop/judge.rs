//! Wireshark's dissectors as judges of the captures that the cases leave.
//!
//! A capture holds both directions, the kernel's packets and ours. It is cut to the first bytes of
//! each packet, which the dissectors distinguish from a packet that lies about itself: the one is a
//! short frame, the other is malformed. Of a packet of InfiniBand that is cut they read the headers
//! only, so one that begins a message gets zeros in the place of what was cut off ([`filled`]).
//!
//! A connection of TCP may have the ports of an earlier one, of which the dissector of MPA still knows
//! that its stream has begun. So each gets ports of its own ([`Ports`]).
//!
//! What an RC connection carries is known from the connection manager's messages and not guessed: a
//! SEND on a connection to the port of iSER must be read as an iSER message with an iSCSI PDU in
//! it. The dissectors have none for SRP; there the headers of InfiniBand are judged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Stdio;

use super::case::Case;
use crate::{Failure, sh};

/// Packets that are objected to and shown, at most.
const SHOWN: usize = 10;

/// Fields that tshark prints of each packet.
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

/// Dissectors that guess at the payload of any connection.
const GUESSING: [&str; 3] = ["rpcordma", "smb_direct", "nvme-rdma"];

/// The port of iSER, 3260, as the service identifier of the connection manager has it.
const ISER_PORT: &str = "0x0cbc";

/// Opcodes of packets that a message of the upper protocol begins with: RC SEND First, Only, Only
/// with immediate data, and Only with Invalidate.
const BEGINS_MESSAGE: [&str; 4] = ["0", "4", "5", "23"];

/// Data of which an initiator may ask for the beginning only: the dissector of SCSI reads on to the
/// end that the data's own length gives.
const PARTIAL: &str = "(Inquiry Response Data)";

/// Lengths that Linux asks for first: the header of a page of vital product data, and the length
/// of standard INQUIRY data in SCSI-2. Of data that we send nothing else is taken for a beginning.
const BEGINNINGS: [&str; 2] = ["4", "36"];

/// Complaint of the UDP dissector about RoCE over IPv6 from the kernel, whose ICRC covers what the
/// checksum would. Our packets have one.
const NO_CHECKSUM: &str = "Illegal checksum value (0)";

/// Addresses of the end where the kernel's device always is, and the kernel's target where there is
/// one.
const KERNEL: [&str; 2] = ["10.99.0.1", "fd99::1"];

/// Complaint about the inside of a payload that the InfiniBand dissector takes for an Ethernet
/// frame: any that it knows no protocol for and whose third and fourth byte are zero.
const GUESSED_FRAME: &str = "[Malformed Packet: Ethertype]";

/// The same of a payload that is taken for a frame with a VLAN tag, as SRP_CRED_REQ is, whose
/// credits are then the frame's length.
const GUESSED_LENGTH: &str = "Length field value goes past the end of the payload";

/// The same where the credits are few enough to be the length of what follows. No packet of the rig
/// has such a header.
const GUESSED_LLC: &str = "[Malformed Packet: LLC]";

/// Complaint about a TCP segment that was sent again with other bounds, as after a link was cut.
/// TCP is the kernel's at both ends.
const SENT_AGAIN: &str = "New fragment overlaps old data (retransmission?)";

/// Expert severity of errors; warnings are less.
const ERROR: u32 = 0x80_0000;

/// Expectations of a case's captures.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    /// Packets that there must be at least, in all captures together; without a number, there must
    /// be none.
    pub(crate) least: Option<u64>,
    /// Whether the case is about iSER, so that there must be PDUs of it.
    pub(crate) is_iser: bool,
    /// Whether both ends are devices of the kernel, so that no packet is made by our software NIC.
    pub(crate) is_kernel_only: bool,
}

impl Expected {
    /// Expectations from the head and the words of a case.
    pub(crate) fn of(case: &Case) -> Self {
        Self {
            least: case.packets,
            // Over iWARP the messages are in a stream, of which a capture has too little.
            is_iser: case.name.contains("iser") && case.group != "iwarp",
            is_kernel_only: case.text.contains("CORE=yes"),
        }
    }
}

/// Result for a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Judged {
    /// Number of packets judged.
    pub(crate) packets: u64,
    /// Packets that begin an iSER message.
    pub(crate) iser: u64,
}

/// Judges every capture in a folder; a failure names what is wrong with the first packets of each.
pub(crate) fn judge(folder: &Path, expected: Expected) -> Result<Judged, Failure> {
    let mut captures: Vec<_> = fs::read_dir(folder)?
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "pcap"))
        .collect();
    captures.sort();
    let mut objections = Vec::new();
    let mut judged = Judged::default();
    for capture in captures {
        let name = capture.file_name().unwrap_or_default().to_string_lossy();
        let mut reader = Reader::new(expected);
        reader.read(&capture)?;
        judged.packets += reader.judged.packets;
        judged.iser += reader.judged.iser;
        for line in reader.wrong.iter().take(SHOWN) {
            objections.push(format!("{name}: packet {line}"));
        }
        if reader.wrong.len() > SHOWN {
            objections.push(format!("{name}: {} packets in all", reader.wrong.len()));
        }
    }
    let Judged { packets, iser } = judged;
    // An empty capture has nothing to object to, so too few packets are a failure of their own.
    match expected.least {
        None if packets > 0 => {
            objections.push(format!("{packets} packets, and none were expected"));
        }
        Some(least) if packets < least => {
            objections.push(format!("{packets} packets, fewer than {least}"));
        }
        Some(least) if expected.is_iser && iser < least.min(10) => {
            objections.push(format!("{iser} iSER messages among {packets} packets"));
        }
        _ => {}
    }
    if objections.is_empty() {
        Ok(judged)
    } else {
        Err(format!("tshark objects to:\n{}", objections.join("\n")).into())
    }
}

/// A capture in which packets that begin a message of the upper protocol have their whole length, and no
/// two connections of TCP the same ports.
fn filled(capture: &[u8]) -> Vec<u8> {
    const FILE_HEADER: usize = 24;
    const PACKET_HEADER: usize = 16;
    let word = |at: usize| {
        let bytes = capture.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let mut filled = capture[..FILE_HEADER.min(capture.len())].to_vec();
    // The file is cut by its own lengths. It comes from a guest that may have been killed, so each
    // of them may lead beyond the end.
    let mut at = FILE_HEADER;
    let mut ports = Ports::new();
    while let (Some(kept), Some(length)) = (word(at + 8), word(at + 12)) {
        let start = at + PACKET_HEADER;
        let Some(packet) = capture.get(start..start + kept) else {
            break;
        };
        let missing = length.saturating_sub(kept);
        let missing = if begins_message(packet) { missing } else { 0 };
        // The time stamps stay, then the new number of bytes that are there, then the length on
        // the wire.
        filled.extend(&capture[at..at + 8]);
        filled.extend(((kept + missing) as u32).to_le_bytes());
        filled.extend(&capture[at + 12..start]);
        let begin = filled.len();
        filled.extend(packet);
        // `None` where there is nothing to change.
        let _ = ports.separate(&mut filled[begin..]);
        filled.resize(filled.len() + missing, 0);
        at = start + kept;
    }
    // What remains is a packet that the end of the guest has left unfinished.
    filled.extend(capture.get(at..).unwrap_or_default());
    filled
}

/// Returns whether an Ethernet frame is a packet of RoCE with one of the opcodes in
/// [`BEGINS_MESSAGE`].
fn begins_message(frame: &[u8]) -> bool {
    // The opcode follows the headers of Ethernet, IP and UDP.
    let opcode = match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(14 + 20 + 8),
        Some([0x86, 0xdd]) => frame.get(14 + 40 + 8),
        _ => None,
    };
    let is_one = |opcode: &u8| BEGINS_MESSAGE.contains(&opcode.to_string().as_str());
    opcode.is_some_and(is_one)
}

/// An address and a port, as they are in a packet.
type TcpEnd = Vec<u8>;

/// The connections of TCP in a capture.
struct Ports {
    /// By the end that asks and the other one: the number with which the first of them begins, and the
    /// port that stands for that end's, if an earlier connection had it.
    connections: BTreeMap<(TcpEnd, TcpEnd), ([u8; 4], Option<u16>)>,
    /// Ports that are left. Linux chooses none of them for a connection.
    free: RangeInclusive<u16>,
}

impl Ports {
    fn new() -> Self {
        Self {
            connections: BTreeMap::new(),
            free: 61_000..=u16::MAX,
        }
    }

    /// Changes the port of the end that has asked for a connection in a packet of it, if an earlier one
    /// had that port. tshark does not compare checksums with it.
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
            // Otherwise it is the same packet, sent again.
            if before.is_none_or(|(first, _)| first != number) {
                let had = self.connections.remove(&back).is_some() || before.is_some();
                let port = if had { self.free.next() } else { None };
                self.connections.insert(forth.clone(), (number, port));
            }
        }
        let (asked, at) = match self.connections.get(&forth) {
            Some(asked) => (asked, tcp),
            None => (self.connections.get(&back)?, tcp + 2),
        };
        let port = asked.1?;
        frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
        Some(())
    }
}

/// One end of an RC connection: an address and a queue pair, as tshark writes them.
type End = (String, String);

/// Reads a capture, in the order of its packets.
struct Reader {
    expected: Expected,
    judged: Judged,
    /// Number, summary and complaint of each packet that is wrong.
    wrong: Vec<String>,
    /// Requests for connections to the port of iSER, by the communication ID of the end that asked.
    asked: BTreeMap<String, End>,
    /// Ends of connections that carry iSER.
    iser: BTreeSet<End>,
}

impl Reader {
    fn new(expected: Expected) -> Self {
        Self {
            expected,
            judged: Judged::default(),
            wrong: Vec::new(),
            asked: BTreeMap::new(),
            iser: BTreeSet::new(),
        }
    }

    fn read(&mut self, capture: &Path) -> Result<(), Failure> {
        let bytes = fs::read(capture)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let scratch = sh::Scratch::new(&format!("capture-{:p}", &raw const bytes))?;
        let whole = scratch.join("filled.pcap");
        fs::write(&whole, filled(&bytes))?;
        let mut command = sh::cmd("tshark", ["-n", "-r"]);
        command.arg(&whole).args(["-T", "fields"]);
        for field in FIELDS {
            command.args(["-e", field]);
        }
        for name in GUESSING {
            command.args(["--disable-protocol", name]);
        }
        let out = command.stdin(Stdio::null()).output()?;
        // A guest that was ended in the middle leaves the last packet unfinished.
        let complaint = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() && !complaint.contains("cut short") {
            return Err(format!("tshark {}: {}", capture.display(), complaint.trim()).into());
        }
        for line in String::from_utf8_lossy(&out.stdout).lines() {
            self.judged.packets += 1;
            match Packet::parse(line) {
                Some(packet) => self.packet(&packet),
                None => self.wrong.push(format!("not understood: {line}")),
            }
        }
        Ok(())
    }

    fn packet(&mut self, packet: &Packet<'_>) {
        self.learn(packet);
        let begins = packet.is_rc() && BEGINS_MESSAGE.contains(&packet.opcode);
        let is_iser = begins && self.iser.contains(&packet.to());
        // A payload that the dissector of iSER has read ends in these names, or has SCSI behind
        // them.
        let is_read =
            packet.protocols.ends_with(":iser:iscsi") || packet.protocols.contains(":iscsi:");
        if is_iser {
            self.judged.iser += 1;
        }
        if let Some(wrong) = packet.objection(self.expected, begins, is_iser) {
            self.wrong.push(wrong);
        } else if is_iser && !is_read {
            let (number, info) = (packet.number, packet.info);
            self.wrong.push(format!(
                "{number}: no iSCSI PDU on a connection of iSER: {info}"
            ));
        }
    }

    /// Learns from the connection manager's messages which connections carry iSER.
    fn learn(&mut self, packet: &Packet<'_>) {
        // Queue pairs are used again within a capture. A new request for one ends what was known
        // of it.
        if !packet.asks.is_empty() {
            let end = (packet.src().to_owned(), packet.asking_qp.to_owned());
            self.iser.remove(&end);
            self.asked.remove(packet.asks);
            if packet.port == ISER_PORT {
                self.asked.insert(packet.asks.to_owned(), end);
            }
        } else if !packet.answers.is_empty() {
            let end = (packet.src().to_owned(), packet.answering_qp.to_owned());
            self.iser.remove(&end);
            if let Some(asking) = self.asked.get(packet.answers) {
                self.iser.insert(asking.clone());
                self.iser.insert(end);
            }
        }
    }
}

/// Output of tshark for a packet; see [`FIELDS`].
struct Packet<'a> {
    number: &'a str,
    captured: &'a str,
    length: &'a str,
    protocols: &'a str,
    v4: (&'a str, &'a str),
    v6: (&'a str, &'a str),
    opcode: &'a str,
    to_qp: &'a str,
    /// The communication ID and queue pair of the end that asks for a connection, and to which
    /// port.
    asks: &'a str,
    port: &'a str,
    asking_qp: &'a str,
    /// The communication ID that is answered, and the queue pair of the end that answers.
    answers: &'a str,
    answering_qp: &'a str,
    data_length: &'a str,
    malformed: &'a str,
    severity: &'a str,
    message: &'a str,
    info: &'a str,
}

impl<'a> Packet<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let columns: Vec<&str> = line.split('\t').collect();
        let [
            number,
            captured,
            length,
            protocols,
            v4_src,
            v4_dst,
            v6_src,
            v6_dst,
            opcode,
            to_qp,
            asks,
            port,
            asking_qp,
            answers,
            answering_qp,
            data_length,
            malformed,
            severity,
            message,
            info,
            // In the order of [`FIELDS`]. A line with another number of columns is refused, since
            // each would have the meaning of its neighbour.
        ] = columns[..]
        else {
            return None;
        };
        Some(Self {
            number,
            captured,
            length,
            protocols,
            v4: (v4_src, v4_dst),
            v6: (v6_src, v6_dst),
            opcode,
            to_qp,
            asks,
            port,
            asking_qp,
            answers,
            answering_qp,
            data_length,
            malformed,
            severity,
            message,
            info,
        })
    }

    fn src(&self) -> &'a str {
        if self.v6.0.is_empty() {
            self.v4.0
        } else {
            self.v6.0
        }
    }

    fn to(&self) -> End {
        let to = if self.v6.1.is_empty() {
            self.v4.1
        } else {
            self.v6.1
        };
        (to.to_owned(), self.to_qp.to_owned())
    }

    /// Whether it is a packet of a reliable connection, whose opcodes begin with three zero bits.
    fn is_rc(&self) -> bool {
        self.opcode.parse::<u8>().is_ok_and(|opcode| opcode < 0x20)
    }

    /// Number, summary and complaint, if something is wrong with it. Data of RDMA, and the rest of
    /// a message in several packets, are no PDUs, and may look as a bad one.
    fn objection(&self, expected: Expected, begins: bool, is_iser: bool) -> Option<String> {
        let Self {
            number,
            malformed,
            message,
            info,
            ..
        } = self;
        let is_kernels = KERNEL.contains(&self.src());
        let has_no_checksum = *message == NO_CHECKSUM
            && !self.v6.0.is_empty()
            && (is_kernels || expected.is_kernel_only);
        let is_error = !has_no_checksum
            && self
                .severity
                .split(',')
                .filter_map(|s| s.parse::<u32>().ok())
                // A packet may have several complaints, separated by commas. The worst of them
                // decides.
                .any(|s| s >= ERROR);
        // Several PDUs may be in one packet; reading ends with the one that is complained of.
        let last_length = self.data_length.rsplit(',').next().unwrap_or_default();
        let is_partial = (is_kernels || BEGINNINGS.contains(&last_length))
            && info
                .split_once(" [Malformed Packet]")
                .is_some_and(|(read, _)| read.ends_with(PARTIAL));
        let is_no_fault = !is_iser
            && ([GUESSED_FRAME, GUESSED_LLC, SENT_AGAIN]
                .iter()
                .any(|words| malformed.contains(words))
                || *message == GUESSED_LENGTH);
        let is_data = self.is_rc() && !begins && self.protocols.contains(":iser");
        if is_partial || is_no_fault || is_data {
            return None;
        }
        // The InfiniBand dissector says it in words where the length of a packet is not that of its
        // headers; of a packet that is cut it always does.
        let is_wrong_length = self.captured == self.length && info.contains("[Malformed Packet]");
        (!malformed.is_empty() || is_error || is_wrong_length)
            .then(|| format!("{number}: {info} {message}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A case with few packets, at one end of which our NIC is.
    const ANY: Expected = Expected {
        least: Some(1),
        is_iser: false,
        is_kernel_only: false,
    };

    /// A capture of Ethernet frames.
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

    /// An Ethernet frame with an IPv4 UDP packet of `udp` to RoCE's port.
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

    /// The same over IPv6 and without a checksum, from this host of fd99::/64.
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

    /// An acknowledgement: BTH, AETH, ICRC.
    fn ack() -> Vec<u8> {
        let mut ack = vec![0x11, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
        ack.extend([0x1f, 0, 0, 1]);
        ack.extend([0; 4]);
        ack
    }

    /// An Ethernet frame with a segment of TCP over IPv4, whose header has 20 bytes: `from_first` from
    /// 10.99.0.1:40000 to 10.99.0.2:4000, else back.
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

    /// A connection of iWARP whose ends begin with these numbers: what MPA begins with, and one FPDU.
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
        let is_there = sh::which("tshark").is_some();
        if !is_there {
            crate::skip::skip(test, "tshark is not installed");
        }
        is_there
    }

    /// A capture with the first bytes of each packet, as many as given.
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

    /// What is said of one capture.
    fn judged(bytes: &[u8], expected: Expected) -> Result<Judged, String> {
        let scratch = sh::Scratch::new(&format!("judge-{bytes:p}")).unwrap();
        fs::write(scratch.join("a.pcap"), bytes).unwrap();
        judge(scratch.path(), expected).map_err(|e| e.to_string())
    }

    /// A line of tshark's about a packet of TCP.
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
    fn data_that_only_begin_are_no_fault_and_others_are() {
        let malformed = |length: &str, info: &str| {
            let words = "[Malformed Packet: SCSI]";
            line(length, words, "8388608", "Malformed Packet", info)
        };
        let inquiry = "SCSI: Data In LUN: 0x01 (Inquiry Response Data)";
        let end = "[Malformed Packet]";
        let one = format!("{inquiry} {end}");
        assert_eq!(objection(&malformed("36", &one)), None);
        // Data that were asked for as a whole; the same of the kernel's target.
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
    fn a_segment_that_was_sent_again_is_no_fault() {
        let line = |malformed: &str| {
            let malformed = format!("{malformed},_ws.malformed");
            line("", &malformed, "6291456,8388608", "of its order", "TCP")
        };
        let again = line(&format!("[Reassembly error, protocol TCP: {SENT_AGAIN}]"));
        assert_eq!(objection(&again), None);
        assert!(objection(&line("[Malformed Packet: iSCSI]")).is_some());
    }

    #[test]
    fn a_packet_that_ends_too_early_is_objected_to() {
        if !has_tshark("a packet that ends too early") {
            return;
        }
        let scratch = sh::Scratch::new("judge").unwrap();
        let ack = ack();
        fs::write(scratch.join("a.pcap"), capture(&[frame(&ack)])).unwrap();
        // A SEND whose data could be a frame of Ethernet's loop-back protocol.
        let mut send = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
        send.extend([0x90, 0, 0, 0]);
        send.extend([0; 4]);
        fs::write(scratch.join("guess.pcap"), capture(&[frame(&send)])).unwrap();
        // SRP_CRED_REQs, which could be frames with a VLAN tag and a length.
        for credits in [3, 16] {
            let mut request = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
            request.extend([0x81, 0, 0, 0, 0, 0, 0, credits, 0, 0, 0, 0, 0, 0, 0, 1]);
            request.extend([0; 4]);
            let name = scratch.join(&format!("tag{credits}.pcap"));
            fs::write(name, capture(&[frame(&request)])).unwrap();
        }
        fs::write(scratch.join("empty.pcap"), "").unwrap();
        assert_eq!(judge(scratch.path(), ANY).unwrap().packets, 4);
        fs::write(scratch.join("b.pcap"), capture(&[frame(&ack[..7])])).unwrap();
        let objection = judge(scratch.path(), ANY).unwrap_err().to_string();
        assert!(objection.contains("b.pcap: packet 1"), "{objection}");
        assert!(!objection.contains("a.pcap"), "{objection}");
    }

    #[test]
    fn a_capture_has_as_many_packets_as_its_case_says() {
        if !has_tshark("the number of packets") {
            return;
        }
        let none = Expected { least: None, ..ANY };
        for empty in [capture(&[]), Vec::new()] {
            assert!(judged(&empty, none).is_ok());
            assert!(judged(&empty, ANY).unwrap_err().contains("fewer than 1"));
        }
        let one = capture(&[frame(&ack())]);
        assert!(judged(&one, ANY).is_ok());
        assert!(
            judged(&one, none)
                .unwrap_err()
                .contains("none were expected")
        );
    }

    #[test]
    fn only_the_kernel_may_leave_out_the_checksum() {
        if !has_tshark("the checksum over IPv6") {
            return;
        }
        let (kernels, ours) = ([1, 2])
            .map(|host| capture(&[frame_v6(host, &ack())]))
            .into();
        assert!(judged(&kernels, ANY).is_ok());
        assert!(judged(&ours, ANY).unwrap_err().contains(NO_CHECKSUM));
        let is_kernel_only = Expected {
            is_kernel_only: true,
            ..ANY
        };
        assert!(judged(&ours, is_kernel_only).is_ok());
    }

    #[test]
    fn a_second_connection_with_the_same_ports_is_judged_by_itself() {
        if !has_tshark("ports of an earlier connection") {
            return;
        }
        // An RDMA SEND without data: length, DDP's and RDMAP's control, key, queue, numbers.
        let mut fpdu = vec![0, 18, 0x41, 0x43, 0, 0, 0, 0];
        fpdu.extend([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        fpdu.extend(0_u32.to_be_bytes());
        let all = [
            iwarp(7, 9, &fpdu),
            iwarp(70_000, 90_000, &fpdu),
            iwarp(1, 2, &fpdu),
        ];
        let all = all.as_flattened();
        assert_eq!(judged(&capture(all), ANY).unwrap().packets, 18);
        // Of the second one, the FPDU is a READ request that ends behind its header.
        fpdu[3] = 0x41;
        let mut all = all.to_vec();
        all[11] = iwarp(70_000, 90_000, &fpdu)[5].clone();
        let objection = judged(&capture(&all), ANY).unwrap_err();
        assert!(objection.contains("packet 12"), "{objection}");
    }

    #[test]
    fn ports_are_changed_where_others_had_them() {
        let mut ports = Ports::new();
        let mut after = |mut frame: Vec<u8>| {
            let _ = ports.separate(&mut frame);
            [34, 36].map(|at| u16::from_be_bytes([frame[at], frame[at + 1]]))
        };
        assert_eq!(after(segment(true, 0x02, (5, 0), &[])), [40_000, 4000]);
        // The same once more, and the answer.
        assert_eq!(after(segment(true, 0x02, (5, 0), &[])), [40_000, 4000]);
        assert_eq!(after(segment(false, 0x12, (8, 6), &[])), [4000, 40_000]);
        assert_eq!(after(segment(true, 0x02, (50, 0), &[])), [61_000, 4000]);
        assert_eq!(after(segment(false, 0x12, (80, 51), &[])), [4000, 61_000]);
        assert_eq!(after(segment(true, 0x11, (51, 81), b"x")), [61_000, 4000]);
        // The other end asks.
        assert_eq!(after(segment(false, 0x02, (90, 0), &[])), [61_001, 40_000]);
        assert_eq!(after(segment(true, 0x12, (60, 91), &[])), [40_000, 61_001]);
    }

    /// A session of the kernel's initiator and target over iSER, and the same with a fault in one
    /// PDU.
    #[test]
    fn what_iser_carries_is_judged() {
        if !has_tshark("iSER") {
            return;
        }
        let iser = Expected {
            least: Some(100),
            is_iser: true,
            is_kernel_only: true,
        };
        let golden = fs::read(crate::root().join("tests/data/golden_iser.pcap")).unwrap();
        let sound = judged(&golden, iser).unwrap();
        assert_eq!(sound.iser, 84);
        // The first command, INQUIRY: SCSI Command (01h), final and read, in an iSCSI control-type
        // PDU with a read STag. The session's logins are before it.
        let command = golden
            .windows(30)
            .position(|w| w[0] == 0x14 && w[28..] == [0x01, 0xc1])
            .expect("a command");
        // Not an iSER message; a message of another kind; an opcode that is reserved.
        for (at, byte) in [(0, 0x44), (0, 0x24), (28, 0x0f)] {
            let mut broken = golden.clone();
            broken[command + at] = byte;
            let objection = judged(&broken, iser);
            assert!(objection.is_err(), "{at}: {byte:#x}: {objection:?}");
        }
        // Cut, as immediate data are in a case, commands and answers are read all the same.
        let cut = cut_to(&golden, 700);
        assert!(cut.len() < golden.len() / 2);
        assert_eq!(judged(&cut, iser).unwrap().iser, 84);
        // A capture without the connection manager's messages says nothing of iSER.
        let srp = fs::read(crate::root().join("tests/data/golden_srp.pcap")).unwrap();
        let objection = judged(&srp, iser).unwrap_err();
        assert!(objection.contains("0 iSER messages"), "{objection}");
    }
}
