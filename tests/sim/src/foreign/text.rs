//! Login negotiation of a foreign target.

use super::Traits;

/// MaxRecvDataSegmentLength of the target in bytes.
const MAX_RECV: u32 = 262_144;

/// TargetRecvDataSegmentLength of the target over iSER in bytes.
const MAX_RECV_ISER: u32 = 8192;

/// Values from a Login Request that the target uses.
#[derive(Debug, Default)]
pub(super) struct Offer {
    /// MaxRecvDataSegmentLength of the initiator in bytes.
    pub(super) max_recv: Option<usize>,
    pub(super) max_burst: Option<usize>,
    pub(super) first_burst: Option<usize>,
    pub(super) is_discovery: bool,
}

/// Returns the keys in the text of a Login Request.
fn keys(text: &[u8]) -> impl Iterator<Item = (&str, &str)> {
    let pairs = text.split(|byte| *byte == 0);
    pairs.filter_map(|pair| std::str::from_utf8(pair).ok()?.split_once('='))
}

/// Negotiates a Login Request. Returns the text of the response and the values that the target must
/// use. The first response of a login declares the portal group.
pub(super) fn negotiate(text: &[u8], traits: &Traits, group: Option<u16>) -> (Vec<u8>, Offer) {
    let (mut out, mut offer) = (Vec::new(), Offer::default());
    let mut reply = |key: &str, value: &str| out.extend(format!("{key}={value}\0").into_bytes());
    if let Some(group) = group {
        reply("TargetPortalGroupTag", &group.to_string());
    }
    for (key, value) in keys(text) {
        let number = value.parse::<u32>().unwrap_or_default();
        let yes_or_no = |wanted| if wanted { "Yes" } else { "No" };
        match key {
            "SessionType" => offer.is_discovery = value == "Discovery",
            "InitiatorName" | "TargetName" | "InitiatorAlias" => {}
            "MaxOutstandingUnexpectedPDUs" | "iSERHelloRequired" => {}
            "TaggedBufferForSolicitedDataOnly" => {}
            "RDMAExtensions" => reply(key, "Yes"),
            "InitiatorRecvDataSegmentLength" => {
                offer.max_recv = Some(number as usize);
                reply(key, value);
            }
            "TargetRecvDataSegmentLength" => {
                reply(key, &number.min(MAX_RECV_ISER).to_string());
            }
            "AuthMethod" | "HeaderDigest" | "DataDigest" => reply(key, "None"),
            "MaxRecvDataSegmentLength" => {
                offer.max_recv = Some(number as usize);
                reply(key, &MAX_RECV.to_string());
            }
            "MaxBurstLength" => {
                let burst = number.min(traits.max_burst);
                offer.max_burst = Some(burst as usize);
                reply(key, &burst.to_string());
            }
            "FirstBurstLength" => {
                let burst = number.min(traits.first_burst);
                offer.first_burst = Some(burst as usize);
                reply(key, &burst.to_string());
            }
            // The result is the larger value (RFC 7143 13.15).
            "DefaultTime2Wait" => reply(key, &number.max(traits.time2wait.into()).to_string()),
            "DefaultTime2Retain" | "ErrorRecoveryLevel" => reply(key, "0"),
            "MaxConnections" | "MaxOutstandingR2T" => reply(key, "1"),
            // The result is Yes if either side wants this (RFC 7143 13.10).
            "InitialR2T" => reply(key, yes_or_no(traits.initial_r2t || value == "Yes")),
            // The result is Yes if both sides want this (RFC 7143 13.11).
            "ImmediateData" => reply(key, yes_or_no(traits.immediate && value == "Yes")),
            "DataPDUInOrder" | "DataSequenceInOrder" => reply(key, "Yes"),
            _ => reply(key, "NotUnderstood"),
        }
    }
    (out, offer)
}
