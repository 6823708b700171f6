//! The initiator's side of iSCSI and iSER.
//!
//! - [`session`]: login, commands and their data, task management, pings, reconnection, discovery;
//!   a machine with no I/O in it.
//! - [`plan_session`]: from an address to a session's configuration.

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

/// File in which open-iscsi keeps the name of this host's initiator.
const NAME_FILE: &str = "/etc/iscsi/initiatorname.iscsi";

/// Beginning of the name of a host that has not been given one.
const OWN_NAME: &str = "iqn.2026-01.local.riser:";

/// Longest data segment that we take by default, in bytes.
const MAX_RECV: u32 = 256 << 10;

/// Longest sequence of data PDUs that we offer, in bytes.
const MAX_BURST: u32 = 1 << 20;

/// Unsolicited data that we offer, in bytes.
const FIRST_BURST: u32 = 64 << 10;

/// Longest data segment that we take on iSER, in bytes: sense data and the like.
pub const ISER_RECV: u32 = 512;

/// Longest data segment that we receive on iSER during login and discovery, in bytes: the default of
/// MaxRecvDataSegmentLength (RFC 7143 13.12).
pub const ISER_TEXT: u32 = 8192;

/// Longest data segment that we send on iSER, in bytes: immediate data.
const ISER_SEND: u32 = 8192;

/// PDUs that a target may send unasked on iSER.
const ISER_UNEXPECTED: u32 = 8;

/// Keys that are offered, besides MaxRecvDataSegmentLength.
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

/// Keys that are offered on iSER besides.
const ISER_KEYS: &[Key] = &[
    Key::RdmaExtensions,
    Key::InitiatorRecvDataSegmentLength,
    Key::TargetRecvDataSegmentLength,
    Key::MaxOutstandingUnexpectedPdus,
    Key::TaggedBufferForSolicitedDataOnly,
];

/// Bounds of a session that its address does not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Commands outstanding where the address says nothing else.
    pub queue_size: u16,
    /// Requests taken and not yet completed at most.
    pub max_requests: usize,
    /// Waits and intervals of the session.
    pub timing: Timing,
}

/// A session identifier of the random kind (RFC 7143 11.12.5), made of a random number.
#[must_use]
pub fn isid(random: u64) -> Isid {
    let [a, b, c, d, e, ..] = random.to_be_bytes();
    Isid([0x80, a, b, c, d, e])
}

/// Plans the configuration of a session at an address.
///
/// # Errors
/// The address has users whose passwords are not to be had.
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
        // The larger value of both sides counts, so that the target chooses.
        .with(Key::DefaultTime2Wait, 0)
        .with(Key::DefaultTime2Retain, 0);
    let (offer, keys) = match url.carrier {
        Carrier::Tcp => (offer, TCP_KEYS.to_vec()),
        Carrier::Iser => (
            // What a target wants of a write it reads; nothing is sent unasked but immediate data.
            offer
                .with(Key::InitialR2T, 1)
                // It counts in discovery sessions, whose receives have this length.
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
        // A list of targets that cannot be received once is an error for its user.
        reconnect: url.target.is_some(),
        timing: limits.timing,
        ping: PING,
    })
}

/// The name of this host's initiator: that of open-iscsi, where it has one, otherwise one made of
/// the host's name.
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
    fn a_host_has_a_legal_name_whatever_it_is_called() {
        assert_eq!(
            own_name("My_Host.x").as_str(),
            "iqn.2026-01.local.riser:myhost.x"
        );
        assert_eq!(own_name("").as_str(), "iqn.2026-01.local.riser:host");
        assert_eq!(isid(0x0102_0304_0506_0708).0, [0x80, 1, 2, 3, 4, 5]);
    }
}
