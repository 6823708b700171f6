//! Keys that are negotiated for a portal group (RFC 7143 chapter 13) and their valid values.

use rustix::io::Errno;

use super::{Attr, Store, Write};
use crate::number;

/// Values must be shorter than this number of bytes.
const MAX_TEXT: usize = 256;

/// Valid values of a key.
#[derive(Clone, Copy)]
enum Legal {
    /// Boolean: `Yes` or `No`.
    Boolean,
    /// Number with a minimum and maximum. As in the kernel, we only use the number at the start of
    /// the text, and any other text is 0.
    Number(u32, u32),
    /// One or more of these words, separated by commas.
    Words(&'static [&'static str]),
    /// Text of up to 255 bytes.
    Text,
}

/// `param/` of a portal group.
pub(super) const TPG_PARAM: &[Attr] = &[
    key("AuthMethod", "CHAP"),
    key("HeaderDigest", "CRC32C,None"),
    key("DataDigest", "CRC32C,None"),
    key("MaxConnections", "1"),
    key("TargetAlias", "LIO Target"),
    key("InitialR2T", "Yes"),
    key("ImmediateData", "Yes"),
    key("MaxRecvDataSegmentLength", "8192"),
    key("MaxXmitDataSegmentLength", "262144"),
    key("MaxBurstLength", "262144"),
    key("FirstBurstLength", "65536"),
    key("DefaultTime2Wait", "2"),
    key("DefaultTime2Retain", "20"),
    key("MaxOutstandingR2T", "1"),
    key("DataPDUInOrder", "Yes"),
    key("DataSequenceInOrder", "Yes"),
    key("ErrorRecoveryLevel", "0"),
    key("IFMarker", "No"),
    key("OFMarker", "No"),
    key("IFMarkInt", "Reject"),
    key("OFMarkInt", "Reject"),
];

const fn key(name: &'static str, initial: &'static str) -> Attr {
    Attr::rw(name, initial, Store::With(store))
}

fn legal(name: &str) -> Legal {
    match name {
        "AuthMethod" => Legal::Words(&["CHAP", "None"]),
        "HeaderDigest" | "DataDigest" => Legal::Words(&["CRC32C", "None"]),
        // Initiators never negotiate markers, so we don't need to check their intervals.
        "TargetAlias" | "IFMarkInt" | "OFMarkInt" => Legal::Text,
        "MaxConnections" | "MaxOutstandingR2T" => Legal::Number(1, 65_535),
        "MaxRecvDataSegmentLength"
        | "MaxXmitDataSegmentLength"
        | "MaxBurstLength"
        | "FirstBurstLength" => Legal::Number(512, 16_777_215),
        "DefaultTime2Wait" | "DefaultTime2Retain" => Legal::Number(0, 3600),
        "ErrorRecoveryLevel" => Legal::Number(0, 2),
        _ => Legal::Boolean,
    }
}

fn store(write: &mut Write<'_>) -> Result<(), Errno> {
    let text = write.text.trim();
    let is_legal = match legal(write.attr.name) {
        Legal::Boolean => matches!(text, "Yes" | "No"),
        Legal::Number(from, to) => {
            text.len() < MAX_TEXT && (from..=to).contains(&number::leading(text))
        }
        Legal::Words(words) => text.split(',').all(|word| words.contains(&word)),
        Legal::Text => !text.is_empty() && text.len() < MAX_TEXT,
    };
    if !is_legal {
        return Err(Errno::INVAL);
    }
    write.keep(text);
    Ok(())
}
