//! Tests for a logical unit that is shared between workers, using many different interleavings.

use std::sync::Arc;

use riser_sync::atomic::{AtomicBool, Ordering};
use riser_sync::testing::explore;
use riser_sync::thread;

use super::{A, B, config, srp_nexus};
use crate::attention::Attention;
use crate::config::{BlockSize, Config};
use crate::lu::LogicalUnit;
use crate::nexus::NexusId;
use crate::reservation::Reservations;

/// Runs two functions at the same time.
fn both(
    lu: &Arc<LogicalUnit>,
    one: impl FnOnce(&LogicalUnit) + Send + 'static,
    other: impl FnOnce(&LogicalUnit) + Send + 'static,
) {
    let (first, second) = (Arc::clone(lu), Arc::clone(lu));
    let threads = [
        thread::spawn(move || one(&first)),
        thread::spawn(move || other(&second)),
    ];
    threads.into_iter().for_each(|one| one.join().unwrap());
}

fn pending(lu: &LogicalUnit, id: NexusId) -> Vec<Attention> {
    std::iter::from_fn(|| lu.take_attention(id)).collect()
}

#[test]
fn concurrent_reserve_and_release_update_flag() {
    explore(|| {
        let lu = Arc::new(LogicalUnit::new(config(BlockSize::B512, 128)).unwrap());
        lu.add_nexus(A, srp_nexus(1));
        lu.add_nexus(B, srp_nexus(2));
        let visit = |id| {
            move |lu: &LogicalUnit| {
                if lu.reserve_unit(id) {
                    assert!(lu.is_restricted(), "other nexuses must check reservations");
                    lu.release_unit(id);
                }
            }
        };
        both(&lu, visit(A), visit(B));
        let restricts = lu.with_reservations(Reservations::restricts);
        assert_eq!(lu.is_restricted(), restricts);
        assert!(!restricts);
    });
}

#[test]
fn concurrent_nexus_removal_releases_reserve() {
    explore(|| {
        let lu = Arc::new(LogicalUnit::new(config(BlockSize::B512, 128)).unwrap());
        lu.add_nexus(A, srp_nexus(1));
        both(
            &lu,
            |lu| {
                lu.reserve_unit(A);
            },
            |lu| lu.remove_nexus(A),
        );
        assert!(!lu.is_restricted());
    });
}

#[test]
fn concurrent_login_gets_threshold_attention() {
    explore(|| {
        let thin = Config {
            threshold: Some(80),
            ..config(BlockSize::B512, 128)
        };
        let lu = Arc::new(LogicalUnit::new(thin).unwrap());
        both(
            &lu,
            |lu| assert_eq!(lu.note_space(90, 100), Some(true)),
            |lu| lu.add_nexus(A, srp_nexus(1)),
        );
        let expected = [Attention::PowerOn, Attention::SoftThreshold];
        assert_eq!(pending(&lu, A), expected);
    });
}

#[test]
fn concurrent_capacity_changes_report_latest() {
    explore(|| {
        let lu = Arc::new(LogicalUnit::new(config(BlockSize::B512, 128)).unwrap());
        lu.add_nexus(A, srp_nexus(1));
        assert_eq!(pending(&lu, A), [Attention::PowerOn]);
        let is_met = Arc::new(AtomicBool::new(false));
        let meets = Arc::clone(&is_met);
        both(
            &lu,
            |lu| lu.set_capacity(256).unwrap(),
            move |lu| {
                // When an initiator gets the unit attention, it should be able to read the new
                // capacity.
                if lu.take_attention(A) == Some(Attention::CapacityChanged) {
                    assert_eq!(lu.capacity_blocks(), 256);
                    meets.store(true, Ordering::Relaxed);
                }
            },
        );
        assert_eq!(lu.capacity_blocks(), 256);
        let is_late = pending(&lu, A).contains(&Attention::CapacityChanged);
        assert_ne!(is_late, is_met.load(Ordering::Relaxed), "notified once");
    });
}
