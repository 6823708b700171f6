//! Captures as Wireshark's dissectors see them.

use std::path::Path;

use riser_testkit::programs::tool;

/// What the dissectors say of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The protocols found in it, outermost first, with colons between them.
    pub protocols: String,
    /// The summary.
    pub info: String,
    /// Opcode of the base transport header, in decimal.
    pub opcode: String,
}

/// Dissects a capture of RoCE, without these protocols.
///
/// # Panics
/// If a packet is not RoCE, is malformed, or has something that an expert would call wrong.
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
    // Expert severities: 0x200000 is a chat, 0x400000 a note, beyond that something is wrong.
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
