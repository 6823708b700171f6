//! Wireshark's dissectors as judges of the captures that the cases leave.
//!
//! A capture holds both directions, the kernel's packets and ours. It is cut to the first bytes of
//! each packet, which the dissectors tell from a packet that lies about itself: the one is a short
//! frame, the other is malformed.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::{Failure, sh};

/// Packets that are objected to and shown, at most.
const SHOWN: usize = 10;

/// What is asked of each packet.
const FIELDS: [&str; 7] = [
    "frame.number",
    "frame.cap_len",
    "frame.len",
    "_ws.malformed",
    "_ws.expert.severity",
    "_ws.expert.message",
    "_ws.col.Info",
];

/// Dissectors that guess at the payload of any connection, and see in SCSI data what is not there.
const GUESSING: [&str; 4] = ["rpcordma", "smb_direct", "nvme-rdma", "iser"];

/// Data of which an initiator may ask for the beginning only: the dissector of SCSI reads on to the
/// end that the data's own length gives.
const PARTIAL: &str = "(Inquiry Response Data)";

/// What the UDP dissector says of RoCE over IPv6 from the kernel, whose ICRC covers what the
/// checksum would.
const NO_CHECKSUM: &str = "Illegal checksum value (0)";

/// What is wrong inside a payload that the InfiniBand dissector takes for an Ethernet frame: any that it
/// knows no protocol for and whose third and fourth byte are zero.
const GUESSED_FRAME: &str = "[Malformed Packet: Ethertype]";

/// The same of a payload that is taken for a frame with a VLAN tag, as SRP_CRED_REQ is, whose credits
/// are then the frame's length.
const GUESSED_LENGTH: &str = "Length field value goes past the end of the payload";

/// The same where the credits are few enough to be the length of what follows. No packet of the rig has
/// such a header.
const GUESSED_LLC: &str = "[Malformed Packet: LLC]";

/// What is said of a TCP segment that was sent again with other bounds, as after a link was cut.
const SENT_AGAIN: &str = "New fragment overlaps old data (retransmission?)";

/// Expert severity of errors; warnings are less.
const ERROR: u32 = 0x80_0000;

/// Judges every capture in a folder; a failure names what is wrong with the first packets of each.
pub(crate) fn judge(folder: &Path) -> Result<(), Failure> {
    let mut captures: Vec<_> = fs::read_dir(folder)?
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "pcap"))
        .collect();
    captures.sort();
    let mut objections = Vec::new();
    for capture in captures {
        let name = capture.file_name().unwrap_or_default().to_string_lossy();
        let wrong = wrong_packets(&capture)?;
        for line in wrong.iter().take(SHOWN) {
            objections.push(format!("{name}: packet {line}"));
        }
        if wrong.len() > SHOWN {
            objections.push(format!("{name}: {} packets in all", wrong.len()));
        }
    }
    if objections.is_empty() {
        Ok(())
    } else {
        Err(format!("tshark objects to:\n{}", objections.join("\n")).into())
    }
}

/// The packets of a capture that are wrong: number, summary and complaint of each.
fn wrong_packets(capture: &Path) -> Result<Vec<String>, Failure> {
    if fs::metadata(capture)?.len() == 0 {
        return Ok(Vec::new());
    }
    let mut command = sh::cmd("tshark", ["-n", "-r"]);
    command.arg(capture).args(["-T", "fields"]);
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
    Ok(String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter_map(objection)
        .collect())
}

/// What is wrong with a packet, from the line of its [`FIELDS`].
fn objection(line: &str) -> Option<String> {
    let columns: Vec<&str> = line.split('\t').collect();
    let [number, captured, length, malformed, severity, message, info] = columns[..] else {
        return Some(format!("not told: {line}"));
    };
    let is_error = message != NO_CHECKSUM
        && severity
            .split(',')
            .filter_map(|s| s.parse::<u32>().ok())
            .any(|s| s >= ERROR);
    // Several PDUs may be in one packet; reading ends with the one that is complained of.
    let is_partial = info
        .split_once(" [Malformed Packet]")
        .is_some_and(|(read, _)| read.ends_with(PARTIAL));
    let is_no_fault = [GUESSED_FRAME, GUESSED_LLC, SENT_AGAIN]
        .iter()
        .any(|words| malformed.contains(words));
    if is_partial || is_no_fault || message == GUESSED_LENGTH {
        return None;
    }
    // The InfiniBand dissector says it in words where the length of a packet is not that of its
    // headers; of a packet that is cut it always does.
    let is_wrong_length = captured == length && info.contains("[Malformed Packet]");
    (!malformed.is_empty() || is_error || is_wrong_length)
        .then(|| format!("{number}: {info} {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A capture of one Ethernet frame with an IPv4 UDP packet of `udp` to RoCE's port.
    fn capture_of(udp: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        let total = (28 + udp.len()) as u16;
        frame.extend([0x45, 0]);
        frame.extend(total.to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 99, 0, 2, 10, 99, 0, 1]);
        frame.extend([0xc0, 0, 0x12, 0xb7]);
        frame.extend((total - 20).to_be_bytes());
        frame.extend([0, 0]);
        frame.extend(udp);
        let mut pcap = Vec::new();
        for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 1, 0, 0] {
            pcap.extend(word.to_le_bytes());
        }
        for _ in 0..2 {
            pcap.extend((frame.len() as u32).to_le_bytes());
        }
        pcap.extend(frame);
        pcap
    }

    #[test]
    fn data_that_only_begin_are_no_fault_and_others_are() {
        let line = |info: &str| {
            format!("7\t118\t118\t[Malformed Packet: SCSI]\t8388608\tMalformed Packet\t{info}")
        };
        let inquiry = "SCSI: Data In LUN: 0x01 (Inquiry Response Data)";
        let end = "[Malformed Packet]";
        assert_eq!(objection(&line(&format!("{inquiry} {end}"))), None);
        let second = format!("SCSI: Response LUN: 0x00 (Test Unit Ready) (Good){inquiry} {end}");
        assert_eq!(objection(&line(&second)), None);
        let other = format!("{inquiry} SCSI: Data In LUN: 0x00 (Read(10) Response Data) {end}");
        assert!(objection(&line(&other)).is_some());
    }

    #[test]
    fn a_segment_that_was_sent_again_is_no_fault() {
        let line = |malformed: &str| {
            format!("7\t118\t118\t{malformed},_ws.malformed\t6291456,8388608\tof its order\tTCP")
        };
        let again = line(&format!("[Reassembly error, protocol TCP: {SENT_AGAIN}]"));
        assert_eq!(objection(&again), None);
        assert!(objection(&line("[Malformed Packet: iSCSI]")).is_some());
    }

    #[test]
    fn a_packet_that_ends_too_early_is_objected_to() {
        if sh::which("tshark").is_none() {
            crate::skip::skip("tshark", "it is not installed");
            return;
        }
        let scratch = sh::Scratch::new("judge").unwrap();
        // An acknowledgement: BTH, AETH, ICRC.
        let mut ack = vec![0x11, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
        ack.extend([0x1f, 0, 0, 1]);
        ack.extend([0; 4]);
        fs::write(scratch.join("a.pcap"), capture_of(&ack)).unwrap();
        // A SEND whose data could be a frame of Ethernet's loop-back protocol.
        let mut send = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
        send.extend([0x90, 0, 0, 0]);
        send.extend([0; 4]);
        fs::write(scratch.join("guess.pcap"), capture_of(&send)).unwrap();
        // SRP_CRED_REQs, which could be frames with a VLAN tag and a length.
        for credits in [3, 16] {
            let mut request = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 9];
            request.extend([0x81, 0, 0, 0, 0, 0, 0, credits, 0, 0, 0, 0, 0, 0, 0, 1]);
            request.extend([0; 4]);
            let capture = scratch.join(&format!("tag{credits}.pcap"));
            fs::write(capture, capture_of(&request)).unwrap();
        }
        fs::write(scratch.join("empty.pcap"), "").unwrap();
        judge(scratch.path()).unwrap();
        fs::write(scratch.join("b.pcap"), capture_of(&ack[..7])).unwrap();
        let objection = judge(scratch.path()).unwrap_err().to_string();
        assert!(objection.contains("b.pcap: packet 1"), "{objection}");
        assert!(!objection.contains("a.pcap"), "{objection}");
    }
}
