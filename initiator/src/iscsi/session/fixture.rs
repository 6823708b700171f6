//! Test fixtures for sessions.

use std::net::SocketAddr;
use std::time::Duration;

use riser_scsi::iscsi::Isid;
use riser_scsi::iscsi::frame::Digests;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::name::IscsiName;

use super::{IscsiSession, SessionConfig};
use crate::session::Timing;

/// Returns the configuration of a session with a queue of 4 commands and up to 1024 bytes of
/// unsolicited data per write.
pub(crate) fn config() -> SessionConfig {
    SessionConfig {
        name: IscsiName::new("iqn.2026-01.a:i").unwrap(),
        target: Some(IscsiName::new("iqn.2026-01.a:t").unwrap()),
        sought: None,
        isid: Isid([0x80, 1, 2, 3, 4, 5]),
        credentials: None,
        target_credentials: None,
        algorithms: Vec::new(),
        offer: Offer::default()
            .with(Key::InitialR2T, 0)
            .with(Key::FirstBurstLength, 1024)
            .with(Key::MaxBurstLength, 4096)
            .with(Key::DefaultTime2Wait, 0),
        keys: vec![
            Key::InitialR2T,
            Key::FirstBurstLength,
            Key::MaxBurstLength,
            Key::DefaultTime2Wait,
        ],
        digests: Digests::default(),
        queue_size: 4,
        max_requests: 16,
        max_attempts: 4,
        reconnect: true,
        timing: Timing::of_tests(),
        ping: Duration::from_secs(3),
    }
}

/// Assumes that the last login was redirected to another host.
pub(crate) fn redirect(session: &mut IscsiSession) {
    let address = SocketAddr::from(([192, 0, 2, 2], 3260));
    session.fence.set_port(Some(1), Some(address));
}
