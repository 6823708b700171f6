//! The initiator for iSCSI and iSER.
//!
//! - [`session`]: login, commands and their data, task management, pings, reconnection, discovery;
//!   a state machine without I/O.
//! - [`plan_session`]: returns the configuration of a session for an address.

#![forbid(unsafe_code)]

pub mod session;

use riser_scsi::iscsi::Isid;
use riser_scsi::iscsi::chap::ALGORITHMS;
use riser_scsi::iscsi::frame::Digests;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::name::IscsiName;

use self::session::SessionConfig;
use crate::session::{PING, Timing};
use crate::url::{Carrier, IscsiUrl, SecretError};

/// File with open-iscsi's initiator name for this host.
const NAME_FILE: &str = "/etc/iscsi/initiatorname.iscsi";

/// Prefix of the initiator name for a host without a configured name.
const OWN_NAME: &str = "iqn.2026-01.local.riser:";

/// Default for the maximum data segment we receive, in bytes.
const MAX_RECV: u32 = 256 << 10;

/// Maximum sequence of data PDUs that we offer, in bytes.
const MAX_BURST: u32 = 1 << 20;

/// Unsolicited data that we offer, in bytes.
const FIRST_BURST: u32 = 64 << 10;

/// Maximum data segment that we receive on iSER, in bytes, for sense data etc.
pub const ISER_RECV: u32 = 512;

/// Maximum data segment that we receive on iSER during login and discovery, in bytes: the default
/// of MaxRecvDataSegmentLength (RFC 7143 13.12).
pub const ISER_TEXT: u32 = 8192;

/// Maximum data segment that we send on iSER, in bytes: immediate data.
const ISER_SEND: u32 = 8192;

/// Maximum number of unsolicited PDUs from a target on iSER.
const ISER_UNEXPECTED: u32 = 8;

/// Keys that we offer in addition to MaxRecvDataSegmentLength.
const TCP_KEYS: &[Key] = &[
    Key::HeaderDigest,
    Key::DataDigest,
    Key::InitialR2T,
    Key::ImmediateData,
    Key::MaxBurstLength,
    Key::FirstBurstLength,
    Key::MaxOutstandingR2T,
    Key::MaxConnections,
    Key::DataPduInOrder,
    Key::DataSequenceInOrder,
    Key::DefaultTime2Wait,
    Key::DefaultTime2Retain,
    Key::ErrorRecoveryLevel,
];

/// Additional keys that we offer on iSER.
const ISER_KEYS: &[Key] = &[
    Key::RdmaExtensions,
    Key::InitiatorRecvDataSegmentLength,
    Key::TargetRecvDataSegmentLength,
    Key::MaxOutstandingUnexpectedPdus,
    Key::TaggedBufferForSolicitedDataOnly,
];

/// Limits of a session that are not part of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Default for the number of outstanding commands.
    pub queue_size: u16,
    /// Maximum number of accepted, incomplete requests.
    pub max_requests: usize,
    /// Timeouts and intervals of the session.
    pub timing: Timing,
}

/// Creates a random session identifier (RFC 7143 11.12.5) from a random number.
#[must_use]
pub fn isid(random: u64) -> Isid {
    let [a, b, c, d, e, ..] = random.to_be_bytes();
    Isid([0x80, a, b, c, d, e])
}

/// Creates the configuration of a session for an address.
///
/// # Errors
/// The address contains users whose passwords are not available.
pub fn plan_session(
    url: &IscsiUrl,
    isid: Isid,
    limits: Limits,
) -> Result<SessionConfig, SecretError> {
    let (credentials, target_credentials) = url.credentials()?;
    let is_on = |wish: Option<bool>| u32::from(wish != Some(false));
    let digests = Digests {
        header: url.header_digest == Some(true),
        data: url.data_digest == Some(true),
    };
    let choices = |on: bool| if on { 2 } else { 1 };
    let max_burst = url.max_burst.unwrap_or(MAX_BURST);
    let offer = Offer::default()
        .with_list(Key::HeaderDigest, choices(digests.header))
        .with_list(Key::DataDigest, choices(digests.data))
        .with(
            Key::MaxRecvDataSegmentLength,
            url.max_recv.unwrap_or(MAX_RECV),
        )
        .with(Key::ImmediateData, is_on(url.immediate_data))
        .with(Key::InitialR2T, u32::from(url.initial_r2t == Some(true)))
        .with(Key::MaxBurstLength, max_burst)
        .with(
            Key::FirstBurstLength,
            url.first_burst.unwrap_or(FIRST_BURST).min(max_burst),
        )
        .with(Key::MaxOutstandingR2T, 1)
        // The result is the larger value of both sides, so this leaves the choice to the target.
        .with(Key::DefaultTime2Wait, 0)
        .with(Key::DefaultTime2Retain, 0);
    let (offer, keys) = match url.carrier {
        Carrier::Tcp => (offer, TCP_KEYS.to_vec()),
        Carrier::Iser => (
            // The target reads the data of a write with RDMA. Only immediate data is sent
            // unsolicited.
            offer
                .with(Key::InitialR2T, 1)
                // Used in discovery sessions, whose receives have this length.
                .with(Key::MaxRecvDataSegmentLength, ISER_TEXT)
                .with(Key::RdmaExtensions, 1)
                .with(Key::InitiatorRecvDataSegmentLength, ISER_RECV)
                .with(Key::TargetRecvDataSegmentLength, ISER_SEND)
                .with(Key::MaxOutstandingUnexpectedPdus, ISER_UNEXPECTED)
                .with(Key::TaggedBufferForSolicitedDataOnly, 1),
            [TCP_KEYS, ISER_KEYS].concat(),
        ),
    };
    let queue_size = url.queue_size.unwrap_or(limits.queue_size).clamp(1, 4096);
    Ok(SessionConfig {
        name: url.initiator.clone().unwrap_or_else(initiator_name),
        target: url.target.clone(),
        sought: None,
        isid,
        credentials,
        target_credentials,
        algorithms: url.chap.clone().unwrap_or_else(|| ALGORITHMS.to_vec()),
        offer,
        keys,
        digests,
        queue_size,
        max_requests: limits.max_requests.max(queue_size.into()),
        max_attempts: 32,
        // If the list of targets cannot be received, the user gets an error.
        reconnect: url.target.is_some(),
        timing: limits.timing,
        ping: PING,
    })
}

/// Returns the initiator name of this host: the name configured for open-iscsi, or otherwise a name
/// based on the host name.
#[must_use]
pub fn initiator_name() -> IscsiName {
    let file = std::fs::read_to_string(NAME_FILE).unwrap_or_default();
    let given = file
        .lines()
        .find_map(|line| line.trim().strip_prefix("InitiatorName="))
        .and_then(|name| IscsiName::new(name.trim()).ok());
    given.unwrap_or_else(|| {
        let host = rustix::system::uname();
        own_name(host.nodename().to_str().unwrap_or_default())
    })
}

fn own_name(host: &str) -> IscsiName {
    let legal = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let host: String = host.chars().filter(legal).take(64).collect();
    let host = if host.is_empty() { "host" } else { &host };
    IscsiName::new(&format!("{OWN_NAME}{host}")).expect("a legal name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initiator_name_is_valid_for_any_hostname() {
        assert_eq!(
            own_name("My_Host.x").as_str(),
            "iqn.2026-01.local.riser:myhost.x"
        );
        assert_eq!(own_name("").as_str(), "iqn.2026-01.local.riser:host");
        assert_eq!(isid(0x0102_0304_0506_0708).0, [0x80, 1, 2, 3, 4, 5]);
    }
}
