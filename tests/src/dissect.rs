//! Uses Wireshark's dissectors to parse captures.

use std::path::Path;

use riser_testkit::programs::tool;

/// Dissector output for a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Protocols found in the packet, starting with the outermost and separated by colons.
    pub protocols: String,
    /// Summary of the packet.
    pub info: String,
    /// Opcode in the base transport header, in decimal.
    pub opcode: String,
}

/// Dissects a RoCE capture with these protocols disabled.
///
/// # Panics
/// Panics if a packet is not RoCE, is malformed, or has an expert severity that indicates an error.
#[must_use]
pub fn dissect(capture: &Path, without: &[&str]) -> Vec<Row> {
    let fields = [
        "frame.number",
        "frame.protocols",
        "_ws.col.Info",
        "_ws.malformed",
        "_ws.expert.severity",
        "_ws.expert.message",
        "infiniband.bth.opcode",
    ];
    let mut args = vec!["-r".to_owned(), capture.display().to_string()];
    args.extend(["-T", "fields", "-E", "separator=;"].map(str::to_owned));
    let fields = fields
        .iter()
        .flat_map(|f| ["-e".to_owned(), (*f).to_owned()]);
    args.extend(fields);
    for protocol in without {
        args.extend(["--disable-protocol".to_owned(), (*protocol).to_owned()]);
    }
    tool("tshark", &args).lines().map(row).collect()
}

fn row(line: &str) -> Row {
    let columns: Vec<&str> = line.split(';').collect();
    let [_, protocols, info, malformed, severities, _, opcode, ..] = columns[..] else {
        panic!("{line}");
    };
    assert!(protocols.contains("infiniband"), "not dissected: {line}");
    assert_eq!(malformed, "", "malformed: {line}");
    // Expert severities: 0x200000 is a chat, 0x400000 is a note, and higher values indicate an
    // error.
    let is_wrong = severities
        .split(',')
        .filter_map(|n| n.parse::<u32>().ok())
        .any(|n| n > 0x40_0000);
    assert!(!is_wrong, "{line}");
    Row {
        protocols: protocols.to_owned(),
        info: info.to_owned(),
        opcode: opcode.to_owned(),
    }
}
