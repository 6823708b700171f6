//! Initiators that do not provide or receive data in time.

use std::time::Duration;

use super::order::compare_and_write;
use super::rig::script::{read10, scripts};
use super::rig::{Peer, Rig};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::MAX_DATA_TIMEOUTS;
use crate::iscsi::TaskState;

const SECOND: Duration = Duration::from_secs(1);

fn missing_data_closes_connection<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.withholds_data = true;
    rig.submit(0, compare_and_write());
    assert!(rig.pool.free() < rig.pool.size());
    // The initiator is alive.
    for _ in 1..DATA_OUT_TIMEOUT.as_secs() {
        rig.advance(SECOND);
        P::keep_alive(&mut rig, 0);
        assert!(!rig.in_error());
    }
    rig.advance(2 * SECOND);
    rig.check_timed_out();
    rig.complete_all();
    assert_eq!(rig.units[0].tasks(), 0);
    assert_eq!(rig.pool.free(), rig.pool.size());
    rig.close();
}

/// If an initiator never reads, it must not keep response data without limit, even if it's still
/// connected.
fn unread_response_is_not_kept_forever<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.stalled = true;
    rig.submit(0, read10(0, 1));
    rig.complete_blocks();
    assert_eq!(rig.states(0), [TaskState::Sent]);
    let limit = DATA_OUT_TIMEOUT * MAX_DATA_TIMEOUTS;
    for _ in 1..limit.as_secs() {
        rig.advance(SECOND);
        P::keep_alive(&mut rig, 0);
        assert!(!rig.in_error());
    }
    assert!(rig.pool.free() < rig.pool.size());
    rig.advance(SECOND);
    rig.check_timed_out();
    rig.close();
}

scripts! {
    missing_data_closes_connection,
    unread_response_is_not_kept_forever,
}
