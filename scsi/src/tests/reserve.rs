//! Tests for reservations, using two nexuses.

use super::{A, B, Outcome, Rig, srp_nexus};
use crate::lu::Flags;
use crate::lu::UnitState;
use crate::nexus::{Nexus, NexusId, PortName};
use crate::reservation::{
    Action, Keys, MAX_REGISTRANTS_PER_DEVICE, ReservationChange, ReservationType,
};
use crate::sense::SenseFormat;
use crate::step::{BlockOp, Status};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const IGNORE: u8 = 6;

const PREEMPTED: (u8, u8, u8) = (6, 0x2a, 0x03);
const RELEASED: (u8, u8, u8) = (6, 0x2a, 0x04);
const UNREGISTERED: (u8, u8, u8) = (6, 0x2a, 0x05);
const INVALID_RELEASE: (u8, u8, u8) = (5, 0x26, 0x04);

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READY: [u8; 6] = [0; 6];

fn out(rig: &mut Rig, who: NexusId, action: u8, kind: u8, own: u64, key: u64) -> Outcome {
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    let mut list = [0; 24];
    list[..8].copy_from_slice(&own.to_be_bytes());
    list[8..16].copy_from_slice(&key.to_be_bytes());
    rig.run(who, &cdb, &list, 0)
}

#[track_caller]
fn conflict(outcome: &Outcome) {
    assert_eq!(outcome.response.status, Status::ReservationConflict);
    let moves = |op: &BlockOp| !matches!(op, BlockOp::ChangeReservations(_));
    assert!(!outcome.ops.iter().any(moves));
}

fn keys(rig: &mut Rig) -> (u32, Vec<u64>) {
    let data = rig.send(&[0x5e, 0, 0, 0, 0, 0, 0, 2, 0, 0]).good().data;
    let number = |at: usize| u32::from_be_bytes(data[at..at + 4].try_into().unwrap());
    assert_eq!(number(4) as usize, data.len() - 8);
    let keys = data[8..].chunks(8);
    let keys = keys.map(|key| u64::from_be_bytes(key.try_into().unwrap()));
    (number(0), keys.collect())
}

/// Returns the key and type of the reservation.
fn reservation(rig: &mut Rig) -> Option<(u64, u8)> {
    let data = rig.send(&[0x5e, 1, 0, 0, 0, 0, 0, 2, 0, 0]).good().data;
    (data.len() > 8).then(|| {
        assert_eq!(data.len(), 24);
        let key = u64::from_be_bytes(data[8..16].try_into().unwrap());
        (key, data[21])
    })
}

/// Returns whether a nexus can read and write.
fn access(rig: &mut Rig, who: NexusId) -> (bool, bool) {
    let read = rig.run(who, &READ, &[], 512).response.status;
    let write = rig.run(who, &WRITE, &[0; 512], 0).response.status;
    (read == Status::Good, write == Status::Good)
}

fn registered() -> Rig {
    let mut rig = Rig::new();
    out(&mut rig, A, REGISTER, 0, 0, 0xa).good();
    out(&mut rig, B, REGISTER, 0, 0, 0xb).good();
    rig
}

/// Access for other nexuses with and without a registration, for each type (SPC-4 table 40).
#[test]
fn reservation_types_restrict_other_nexuses() {
    let types = [
        (1, (true, false), (true, false)),
        (3, (false, false), (false, false)),
        (5, (true, true), (true, false)),
        (6, (true, true), (false, false)),
        (7, (true, true), (true, false)),
        (8, (true, true), (false, false)),
    ];
    for (kind, others, strangers) in types {
        let mut rig = registered();
        out(&mut rig, A, RESERVE, kind, 0xa, 0).good();
        assert_eq!(access(&mut rig, A), (true, true), "type {kind}");
        assert_eq!(access(&mut rig, B), others, "type {kind}");
        rig.run(B, &READY, &[], 0).good();
        rig.run(B, &[0x12, 0, 0, 0, 36, 0], &[], 36).good();
        let key = if kind < 7 { 0xa } else { 0 };
        assert_eq!(reservation(&mut rig), Some((key, kind)));
        out(&mut rig, B, REGISTER, 0, 0xb, 0).good();
        assert_eq!(access(&mut rig, B), strangers, "type {kind}");
        out(&mut rig, A, RESERVE, kind, 0xa, 0).good();
        out(&mut rig, A, RELEASE, kind, 0xa, 0).good();
        assert_eq!(reservation(&mut rig), None);
        assert_eq!(access(&mut rig, B), (true, true));
    }
}

#[test]
fn registration_requires_valid_key() {
    let mut rig = Rig::new();
    conflict(&out(&mut rig, A, REGISTER, 0, 1, 2));
    conflict(&out(&mut rig, A, RESERVE, 1, 0, 0));
    out(&mut rig, A, REGISTER, 0, 0, 0).good();
    assert_eq!(keys(&mut rig), (0, vec![]));
    out(&mut rig, A, REGISTER, 0, 0, 5).good();
    conflict(&out(&mut rig, A, REGISTER, 0, 4, 6));
    out(&mut rig, A, REGISTER, 0, 5, 6).good();
    assert_eq!(keys(&mut rig), (2, vec![6]));
    out(&mut rig, A, IGNORE, 0, 99, 7).good();
    assert_eq!(keys(&mut rig), (3, vec![7]));
    conflict(&out(&mut rig, A, RESERVE, 1, 6, 0));
    out(&mut rig, A, REGISTER, 0, 7, 0).good();
    assert_eq!(keys(&mut rig), (4, vec![]));
    // The full length of a list should be returned, even if the buffer is small.
    out(&mut rig, A, REGISTER, 0, 0, 5).good();
    let short = rig.send(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0]).good();
    assert_eq!(short.data[4..], [0, 0, 0, 8]);
}

#[test]
fn registration_survives_nexus_removal() {
    let mut rig = registered();
    out(&mut rig, A, RESERVE, 3, 0xa, 0).good();
    rig.lu.remove_nexus(A);
    assert_eq!(access(&mut rig, B), (false, false));
    let again = NexusId(9);
    rig.lu.add_nexus(again, srp_nexus(0xaa));
    rig.lu.take_attention(again);
    assert_eq!(access(&mut rig, again), (true, true));
    out(&mut rig, again, RELEASE, 3, 0xa, 0).good();
}

#[test]
fn registrations_are_limited_per_initiator_device() {
    let mut rig = Rig::new();
    let mut register = |name: &str, isid: usize| {
        let nexus = Nexus {
            initiator: PortName::Iscsi(format!("{name},i,0x{isid:012x}")),
            ..srp_nexus(0)
        };
        let id = NexusId(9);
        rig.lu.add_nexus(id, nexus);
        rig.lu.take_attention(id);
        let outcome = out(&mut rig, id, REGISTER, 0, 0, 5);
        rig.lu.remove_nexus(id);
        outcome
    };
    for isid in 0..MAX_REGISTRANTS_PER_DEVICE {
        register("iqn.2026-01.host:a", isid).good();
    }
    let refused = register("iqn.2026-01.host:a", MAX_REGISTRANTS_PER_DEVICE);
    assert_eq!(refused.check(), (5, 0x55, 0x04));
    register("iqn.2026-01.host:b", 0).good();
}

#[test]
fn releases_notify_registrants() {
    let mut rig = registered();
    out(&mut rig, A, RESERVE, 5, 0xa, 0).good();
    out(&mut rig, B, RELEASE, 5, 0xb, 0).good();
    assert!(
        reservation(&mut rig).is_some(),
        "removed registrant was not the holder"
    );
    let wrong = out(&mut rig, A, RELEASE, 6, 0xa, 0);
    assert_eq!(wrong.check(), INVALID_RELEASE);
    out(&mut rig, A, RELEASE, 5, 0xa, 0).good();
    assert_eq!(rig.run(B, &READY, &[], 0).check(), RELEASED);
    // It's also released if the holder is unregistered.
    out(&mut rig, A, RESERVE, 6, 0xa, 0).good();
    out(&mut rig, A, REGISTER, 0, 0xa, 0).good();
    assert_eq!(reservation(&mut rig), None);
    assert_eq!(rig.run(B, &READY, &[], 0).check(), RELEASED);
    // An "all registrants" reservation is kept until the last registrant is removed.
    let mut rig = registered();
    out(&mut rig, A, RESERVE, 8, 0xa, 0).good();
    out(&mut rig, A, REGISTER, 0, 0xa, 0).good();
    assert_eq!(reservation(&mut rig), Some((0, 8)));
    assert_eq!(access(&mut rig, A), (false, false));
    out(&mut rig, B, REGISTER, 0, 0xb, 0).good();
    assert_eq!(reservation(&mut rig), None);
}

#[test]
fn clear_and_preempt_remove_registrations() {
    let mut rig = registered();
    out(&mut rig, A, RESERVE, 3, 0xa, 0).good();
    out(&mut rig, B, CLEAR, 0, 0xb, 0).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), PREEMPTED);
    assert_eq!(keys(&mut rig), (3, vec![]));
    for action in [PREEMPT, PREEMPT_AND_ABORT] {
        let mut rig = registered();
        out(&mut rig, A, RESERVE, 3, 0xa, 0).good();
        conflict(&out(&mut rig, B, RESERVE, 3, 0xb, 0));
        conflict(&out(&mut rig, B, action, 1, 0xb, 0xc));
        out(&mut rig, B, action, 1, 0xb, 0xa).good();
        assert_eq!(rig.run(A, &READY, &[], 0).check(), UNREGISTERED);
        assert_eq!(keys(&mut rig), (3, vec![0xb]));
        assert_eq!(reservation(&mut rig), Some((0xb, 1)));
        assert_eq!(access(&mut rig, A), (true, false));
    }
    // If there is no reservation, this only removes registrations.
    let mut rig = registered();
    out(&mut rig, B, PREEMPT, 3, 0xb, 0xa).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), UNREGISTERED);
    assert_eq!(reservation(&mut rig), None);
    // A key of zero can only be used for an "all registrants" reservation.
    let mut rig = registered();
    assert_eq!(out(&mut rig, B, PREEMPT, 3, 0xb, 0).check(), (5, 0x26, 0));
    out(&mut rig, A, RESERVE, 7, 0xa, 0).good();
    out(&mut rig, B, PREEMPT, 3, 0xb, 0).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), UNREGISTERED);
    assert_eq!(reservation(&mut rig), Some((0xb, 3)));
    assert_eq!(access(&mut rig, A), (false, false));
}

#[test]
fn full_status_reports_ports() {
    let mut rig = registered();
    out(&mut rig, B, RESERVE, 1, 0xb, 0).good();
    let data = rig.send(&[0x5e, 3, 0, 0, 0, 0, 0, 2, 0, 0]).good().data;
    assert_eq!(data.len(), 8 + 2 * 48);
    let second = &data[56..];
    assert_eq!(second[..8], 0xb_u64.to_be_bytes());
    assert_eq!(second[12..14], [1, 1], "the holder, and the type");
    assert_eq!(second[18..24], [0, 1, 0, 0, 0, 24]);
    assert_eq!(second[24], 4, "SRP");
    assert_eq!(second[32..48], [0xbb; 16]);
    let caps = rig.send(&[0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0]).good().data;
    assert_eq!(caps, [0, 8, 0, 0x80, 0xea, 0x01, 0, 0]);
}

#[test]
fn status_output_lists_registrations() {
    let mut rig = registered();
    assert_eq!(rig.lu.registrations().kind, None);
    out(&mut rig, B, RESERVE, 7, 0xb, 0).good();
    out(&mut rig, A, REGISTER, 0, 0xa, 0xaa).good();
    let shown = rig.lu.registrations();
    assert_eq!((shown.generation, shown.kind), (3, Some(7)));
    let registrants = shown.registrants.iter();
    let facts = registrants.map(|r| (r.initiator.to_string(), r.key, r.generation, r.has_reserved));
    let port = |byte: &str| format!("{0}:{0}", byte.repeat(8));
    assert_eq!(
        facts.collect::<Vec<_>>(),
        [(port("aa"), 0xaa, 2, false), (port("bb"), 0xb, 1, true)]
    );
    out(&mut rig, A, CLEAR, 0, 0xaa, 0).good();
    rig.send(&[0x16, 0, 0, 0, 0, 0]).good();
    assert_eq!(rig.lu.registrations().reserved, Some(A));
}

#[test]
fn unsupported_reservation_features_are_refused() {
    let mut rig = registered();
    for kind in [0, 2, 4, 9, 0x11] {
        let outcome = out(&mut rig, A, RESERVE, kind, 0xa, 0);
        assert_eq!(outcome.check(), (5, 0x24, 0), "type {kind:#x}");
    }
    assert_eq!(
        rig.send(&[0x5e, 4, 0, 0, 0, 0, 0, 0, 8, 0]).check(),
        (5, 0x24, 0)
    );
    assert_eq!(out(&mut rig, A, 7, 0, 0xa, 0).check(), (5, 0x24, 0));
    let short = rig.send_out(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 16, 0], &[0; 16]);
    assert_eq!(short.check(), (5, 0x1a, 0));
    for bit in [1, 4, 8] {
        let mut list = [0; 24];
        list[20] = bit;
        let outcome = rig.send_out(&[0x5f, IGNORE, 0, 0, 0, 0, 0, 0, 24, 0], &list);
        assert_eq!(outcome.check(), (5, 0x26, 0));
    }
}

/// SPC-4 5.13.11.2.4: if PREEMPT changes the type, the remaining registrants are notified, for any
/// combination of types.
#[test]
fn preempt_notifies_type_change() {
    for (old, new, notified) in [
        (1, 3, true),
        (3, 1, true),
        (1, 5, true),
        (5, 3, true),
        (1, 1, false),
    ] {
        let mut rig = registered();
        let third = NexusId(3);
        rig.lu.add_nexus(third, srp_nexus(0xcc));
        rig.lu.take_attention(third);
        out(&mut rig, third, REGISTER, 0, 0, 0xc).good();
        out(&mut rig, A, RESERVE, old, 0xa, 0).good();
        out(&mut rig, B, PREEMPT, new, 0xb, 0xa).good();
        let third = rig.run(third, &READY, &[], 0);
        if notified {
            assert_eq!(third.check(), RELEASED, "{old} becomes {new}");
        } else {
            third.good();
        }
    }
}

/// SPC-4 table 51.
#[test]
fn reserved_unit_may_be_started() {
    let mut rig = registered();
    out(&mut rig, A, RESERVE, 3, 0xa, 0).good();
    rig.run(B, &[0x1b, 0, 0, 0, 0x01, 0], &[], 0).good();
    for other in [0x00, 0x10, 0x11] {
        conflict(&rig.run(B, &[0x1b, 0, 0, 0, other, 0], &[], 0));
    }
}

#[test]
fn spc2_reserve_and_release() {
    let reserve = [0x16, 0, 0, 0, 0, 0];
    let release = [0x17, 0, 0, 0, 0, 0];
    let sense = [0x1a, 0, 0x3f, 0, 255, 0];
    let mut rig = Rig::new();
    rig.send(&reserve).good();
    rig.send(&reserve).good();
    conflict(&rig.run(B, &reserve, &[], 0));
    rig.run(B, &release, &[], 0).good();
    conflict(&rig.run(B, &sense, &[], 255));
    conflict(&rig.run(B, &READY, &[], 0));
    // In this state, commands for persistent reservations conflict, even if sent by the holder
    // (SPC-2 5.5.1).
    for who in [A, B] {
        conflict(&out(&mut rig, who, REGISTER, 0, 0, 1));
        for action in 0..4 {
            conflict(&rig.run(who, &[0x5e, action, 0, 0, 0, 0, 0, 0, 8, 0], &[], 8));
        }
    }
    rig.run(B, &[0x12, 0, 0, 0, 36, 0], &[], 36).good();
    rig.run(B, &[0x03, 0, 0, 0, 18, 0], &[], 18).good();
    rig.send(&[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    rig.run(B, &sense, &[], 255).good();
    // This should be released when the nexus is removed, and by a reset.
    rig.run(B, &reserve, &[], 0).good();
    rig.lu.remove_nexus(B);
    rig.send(&reserve).good();
    rig.lu.reset();
    rig.lu.add_nexus(B, srp_nexus(0xbb));
    rig.lu.take_attention(A);
    rig.lu.take_attention(B);
    rig.run(B, &[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0)
        .good();
    rig.run(B, &release, &[], 0).good();
    // Both types of reservation can't be used at the same time.
    out(&mut rig, A, REGISTER, 0, 0, 1).good();
    conflict(&rig.run(B, &reserve, &[], 0));
    conflict(&rig.run(B, &release, &[], 0));
    conflict(&rig.send(&release));
}

/// Returns the state that would be passed to a new LU, after encoding and decoding it.
fn left_by(rig: &Rig) -> UnitState {
    let written = serde_json::to_string(&rig.lu.export_state()).unwrap();
    serde_json::from_str(&written).unwrap()
}

#[test]
fn replacement_unit_keeps_port_reservations() {
    let mut rig = registered();
    out(&mut rig, B, RESERVE, 5, 0xb, 0).good();
    rig.lu
        .change_mode(Flags::WRITE_CACHE | Flags::D_SENSE, Flags::D_SENSE, A)
        .unwrap();
    let mut next = Rig::new();
    next.lu.import_state(&left_by(&rig));
    assert_eq!(keys(&mut next), (2, vec![0xa, 0xb]));
    assert_eq!(reservation(&mut next), Some((0xb, 5)));
    assert!(!next.lu.is_write_cache_enabled());
    assert_eq!(next.lu.sense_format(), SenseFormat::Descriptor);
    let stranger = NexusId(3);
    next.lu.add_nexus(stranger, srp_nexus(0xcc));
    next.lu.take_attention(stranger);
    assert_eq!(access(&mut next, stranger), (true, false));
    assert_eq!(access(&mut next, A), (true, true));
    out(&mut next, B, RELEASE, 5, 0xb, 0).good();
    assert_eq!(next.run(A, &READY, &[], 0).check(), RELEASED);
    assert_eq!(reservation(&mut next), None);
}

#[test]
fn removed_nexus_cannot_reserve() {
    let rig = Rig::new();
    rig.lu.remove_nexus(A);
    assert!(!rig.lu.reserve_unit(A));
    assert!(rig.lu.reserve_unit(B));
}

#[test]
fn reserve_is_not_exported() {
    let rig = Rig::new();
    assert!(rig.lu.reserve_unit(A));
    let mut next = Rig::new();
    next.lu.import_state(&left_by(&rig));
    assert_eq!(access(&mut next, B), (true, true));
}

/// A PREEMPT AND ABORT should abort commands from nexuses whose registration it has removed, and
/// from nexuses that have been removed and may have been registered.
#[test]
fn preempt_and_abort_returns_preempted_nexuses() {
    let mut rig = Rig::new();
    let (c, gone) = (NexusId(3), NexusId(4));
    rig.lu.add_nexus(c, srp_nexus(0xcc));
    for (who, key) in [(A, 0xa), (B, 0xb), (c, 0xc)] {
        rig.lu.take_attention(who);
        out(&mut rig, who, IGNORE, 0, 0, key).good();
    }
    let preempt = |aborts| ReservationChange {
        nexus: A,
        action: Action::Preempt {
            kind: ReservationType::WriteExclusiveRegistrantsOnly,
            aborts,
        },
        keys: Keys {
            own: 0xa,
            action: if aborts { 0xb } else { 0xc },
        },
    };
    let preempted = rig.lu.save_reservations(&preempt(true)).unwrap().unwrap();
    let named = [A, B, c, gone].map(|id| rig.lu.is_preempted(&preempted, id));
    assert_eq!(named, [false, true, false, true]);
    assert_eq!(rig.lu.save_reservations(&preempt(false)), Ok(None));
}
