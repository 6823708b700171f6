//! Tests for reservations that persist through power loss (APTPL).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{A, B, Outcome, Rig, config, srp_nexus};
use crate::config::{BlockSize, Config, Identity};
use crate::data::designator::Naa;
use crate::lu::Flags;
use crate::nexus::NexusId;
use crate::reservation::{ReservationKeeper, SavedReservations};
use crate::step::{BlockOp, Status};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const IGNORE: u8 = 6;

const APTPL: u8 = 1;

const READY: [u8; 6] = [0; 6];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Stores the saved state as JSON, in the same way as a file.
#[derive(Debug, Default)]
struct Keeper {
    files: Mutex<HashMap<String, String>>,
    saves: Mutex<u32>,
    /// If set, saving fails, but the new state is stored anyway.
    fails: AtomicBool,
}

fn key(unit: &Identity) -> String {
    format!("{:02x?} {}", unit.naa.bytes(), unit.serial)
}

impl ReservationKeeper for Keeper {
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>> {
        let files = self.files.lock().unwrap();
        let file = files.get(&key(unit));
        Ok(file.map(|text| serde_json::from_str(text)).transpose()?)
    }

    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()> {
        *self.saves.lock().unwrap() += 1;
        let mut files = self.files.lock().unwrap();
        match state {
            Some(state) => files.insert(key(unit), serde_json::to_string(state)?),
            None => files.remove(&key(unit)),
        };
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }
}

/// Returns an LU after a restart, with nexus A and B.
fn started(keeper: &Arc<Keeper>) -> Rig {
    started_as(keeper, config(BlockSize::B512, 128))
}

fn started_as(keeper: &Arc<Keeper>, config: Config) -> Rig {
    let mut rig = Rig::with(config.clone());
    let lu = crate::lu::LogicalUnit::new(config).unwrap();
    let keeper: Arc<dyn ReservationKeeper> = keeper.clone();
    rig.lu = lu.with_keeper(keeper).unwrap();
    for (id, port) in [(A, 0xaa), (B, 0xbb)] {
        rig.lu.add_nexus(id, srp_nexus(port));
        rig.lu.take_attention(id);
    }
    rig
}

struct Out {
    action: u8,
    kind: u8,
    own: u64,
    key: u64,
    flags: u8,
}

fn out(rig: &mut Rig, who: NexusId, out: &Out) -> Outcome {
    let cdb = [0x5f, out.action, out.kind, 0, 0, 0, 0, 0, 24, 0];
    let mut list = [0; 24];
    list[..8].copy_from_slice(&out.own.to_be_bytes());
    list[8..16].copy_from_slice(&out.key.to_be_bytes());
    list[20] = out.flags;
    rig.run(who, &cdb, &list, 0)
}

fn register(rig: &mut Rig, who: NexusId, key: u64, flags: u8) -> Outcome {
    let change = Out {
        action: IGNORE,
        kind: 0,
        own: 0,
        key,
        flags,
    };
    out(rig, who, &change)
}

fn change(rig: &mut Rig, who: NexusId, action: u8, kind: u8, own: u64, key: u64) -> Outcome {
    let change = Out {
        action,
        kind,
        own,
        key,
        flags: 0,
    };
    out(rig, who, &change)
}

fn keys(rig: &mut Rig) -> (u32, Vec<u64>) {
    let data = rig
        .run(A, &[0x5e, 0, 0, 0, 0, 0, 0, 2, 0, 0], &[], 512)
        .data;
    let keys = data[8..].chunks(8);
    let keys = keys.map(|key| u64::from_be_bytes(key.try_into().unwrap()));
    let generation = u32::from_be_bytes(data[..4].try_into().unwrap());
    (generation, keys.collect())
}

fn capabilities(rig: &mut Rig) -> [u8; 2] {
    let data = rig.run(A, &[0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0], &[], 8).data;
    [data[2], data[3]]
}

fn write_status(rig: &mut Rig, who: NexusId) -> Status {
    rig.run(who, &WRITE, &[0; 512], 0).response.status
}

#[test]
fn registrations_persist_through_power_loss() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    assert_eq!(capabilities(&mut rig), [1, 0x80]);
    let first = register(&mut rig, A, 0xa, APTPL).good();
    assert!(
        matches!(first.ops[..], [BlockOp::ChangeReservations(_)]),
        "saved before the response"
    );
    register(&mut rig, B, 0xb, APTPL).good();
    change(&mut rig, A, RESERVE, 5, 0xa, 0).good();
    assert_eq!(capabilities(&mut rig), [1, 0x81]);
    let mut rig = started(&keeper);
    assert_eq!(capabilities(&mut rig), [1, 0x81]);
    assert_eq!(keys(&mut rig), (0, vec![0xa, 0xb]), "PRGENERATION is zero");
    assert_eq!(rig.lu.registrations().kind, Some(5));
    let stranger = NexusId(3);
    rig.lu.add_nexus(stranger, srp_nexus(0xcc));
    rig.lu.take_attention(stranger);
    let status = write_status(&mut rig, stranger);
    assert_eq!(status, Status::ReservationConflict);
    assert_eq!(write_status(&mut rig, B), Status::Good);
    // The holder can be preempted by a nexus that was already registered.
    change(&mut rig, B, PREEMPT, 5, 0xb, 0xa).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), (6, 0x2a, 0x05));
    let mut rig = started(&keeper);
    assert_eq!(keys(&mut rig).1, [0xb]);
    let status = write_status(&mut rig, A);
    assert_eq!(status, Status::ReservationConflict);
    change(&mut rig, B, RELEASE, 5, 0xb, 0).good();
    change(&mut rig, B, CLEAR, 0, 0xb, 0).good();
    let mut rig = started(&keeper);
    assert_eq!(keys(&mut rig).1, [] as [u64; 0]);
    assert_eq!(rig.lu.registrations().kind, None);
}

/// The relative port identifier is not part of the name, because it may be different in a
/// configuration with other portals.
#[test]
fn holder_is_identified_by_port_names() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, A, 0xa, APTPL).good();
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
    let mut rig = started(&keeper);
    let mut nexus = srp_nexus(0xaa);
    nexus.target.relative_id += 1;
    rig.lu.add_nexus(A, nexus);
    rig.lu.take_attention(A);
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
    change(&mut rig, A, RELEASE, 1, 0xa, 0).good();
    assert_eq!(rig.lu.registrations().kind, None, "GOOD means released");
    assert_eq!(write_status(&mut rig, B), Status::Good);
}

#[test]
fn full_status_reports_current_port_identifier() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, A, 0xa, APTPL).good();
    let mut rig = started(&keeper);
    let mut nexus = srp_nexus(0xaa);
    nexus.target.relative_id = 7;
    rig.lu.add_nexus(A, nexus);
    rig.lu.take_attention(A);
    let status = rig.run(A, &[0x5e, 3, 0, 0, 0, 0, 0, 0, 0xff, 0], &[], 255);
    // RELATIVE TARGET PORT IDENTIFIER in the only descriptor (SPC-4 6.15.5).
    assert_eq!(status.good().data[8 + 18..8 + 20], [0, 7]);
}

/// If the previous process didn't support persistence, its state is newer than the saved state.
#[test]
fn imported_state_replaces_saved_state() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, A, 0xa, APTPL).good();
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
    let mut older = Rig::new();
    older.lu.add_nexus(B, srp_nexus(0xbb));
    older.lu.take_attention(B);
    register(&mut older, B, 0xb, 0).good();
    started(&keeper).lu.import_state(&older.lu.export_state());
    let mut rig = started(&keeper);
    assert_eq!(rig.lu.registrations().registrants, []);
    assert_eq!(write_status(&mut rig, B), Status::Good);
}

/// SPC-4 5.13.5: persistence is set by the last registration.
#[test]
fn last_registration_disables_persistence() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, B, 0, APTPL).good();
    assert_eq!(capabilities(&mut rig), [1, 0x80]);
    register(&mut rig, A, 0xa, APTPL).good();
    // This bit should be ignored for any other service action.
    change(&mut rig, A, RESERVE, 3, 0xa, 0).good();
    assert_eq!(capabilities(&mut rig), [1, 0x81]);
    // It should also be ignored if the registration has failed.
    let refused = change(&mut rig, B, REGISTER, 0, 0xbad, 0xb);
    assert_eq!(refused.response.status, Status::ReservationConflict);
    assert_eq!(capabilities(&mut rig), [1, 0x81]);
    // It should also be ignored if a nexus that is not registered tries to remove its registration,
    // because nothing is changed in this case (SPC-4 5.13.7).
    for action in [REGISTER, IGNORE] {
        change(&mut rig, B, action, 0, 0, 0).good();
        assert_eq!(capabilities(&mut rig), [1, 0x81], "service action {action}");
    }
    register(&mut rig, B, 0xb, 0).good();
    assert_eq!(capabilities(&mut rig), [1, 0x80]);
    let ops = register(&mut rig, B, 0xbb, 0).good().ops;
    assert!(ops.is_empty(), "no longer persistent");
    let mut rig = started(&keeper);
    assert_eq!(keys(&mut rig).1, [] as [u64; 0]);
    assert_eq!(write_status(&mut rig, B), Status::Good);
}

#[test]
fn failed_save_changes_nothing() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, A, 0xa, APTPL).good();
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
    keeper.fails.store(true, Ordering::Relaxed);
    let before = rig.lu.registrations();
    for (action, own, key, sense) in [
        (IGNORE, 0, 0xaa, (5, 0x55, 0x04)),
        (PREEMPT, 0xa, 0xa, (5, 0x55, 0x02)),
        (RELEASE, 0xa, 0, (4, 0x44, 0x00)),
        (CLEAR, 0xa, 0, (4, 0x44, 0x00)),
    ] {
        let kind = if action == PREEMPT { 3 } else { 1 };
        let refused = out(
            &mut rig,
            A,
            &Out {
                action,
                kind,
                own,
                key,
                flags: APTPL,
            },
        );
        assert_eq!(refused.check(), sense, "service action {action}");
        assert_eq!(rig.lu.registrations(), before);
        // It should not be restored after the next start either.
        let next = started(&keeper);
        assert_eq!(next.lu.registrations().kind, Some(1));
        assert_eq!(next.lu.registrations().registrants[0].key, 0xa);
    }
    keeper.fails.store(false, Ordering::Relaxed);
    change(&mut rig, A, RELEASE, 1, 0xa, 0).good();
}

#[test]
fn unchanged_state_is_not_saved() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, A, 0xa, APTPL).good();
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
    let saves = *keeper.saves.lock().unwrap();
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
    let refused = change(&mut rig, B, RESERVE, 1, 0xb, 0);
    assert_eq!(refused.response.status, Status::ReservationConflict);
    assert_eq!(*keeper.saves.lock().unwrap(), saves);
}

#[test]
fn renamed_unit_does_not_inherit_reservations() {
    let keeper = Arc::new(Keeper::default());
    let mut rig = started(&keeper);
    register(&mut rig, A, 0xa, APTPL).good();
    for change in [
        |identity: &mut Identity| identity.serial = "S2".into(),
        |identity: &mut Identity| identity.naa = Naa::LocallyAssigned(7),
    ] {
        let mut other = config(BlockSize::B512, 128);
        change(&mut other.identity);
        let mut other = started_as(&keeper, other);
        assert_eq!(keys(&mut other).1, [] as [u64; 0]);
    }
}

#[test]
fn persistence_requires_keeper() {
    let mut rig = Rig::new();
    assert_eq!(capabilities(&mut rig), [0, 0x80]);
    let refused = register(&mut rig, A, 0xa, APTPL);
    assert_eq!(refused.check(), (5, 0x26, 0));
    assert_eq!(keys(&mut rig).1, [] as [u64; 0]);
    // If there is no keeper, the state saved by a previous process is no longer persistent.
    let keeper = Arc::new(Keeper::default());
    let mut kept = started(&keeper);
    register(&mut kept, A, 0xa, APTPL).good();
    rig.lu.import_state(&kept.lu.export_state());
    assert_eq!(capabilities(&mut rig), [0, 0x80]);
    assert_eq!(keys(&mut rig).1, [0xa]);
    change(&mut rig, A, RESERVE, 1, 0xa, 0).good();
}

/// For two changes at the same time, each should be based on the result of the other.
#[test]
fn concurrent_changes_are_saved_in_order() {
    let keeper = Arc::new(Keeper::default());
    let rig = started(&keeper);
    let ids: Vec<_> = (10..26).map(NexusId).collect();
    for id in &ids {
        rig.lu.add_nexus(*id, srp_nexus(id.0 as u8));
    }
    let lu = &rig.lu;
    std::thread::scope(|scope| {
        for id in &ids {
            scope.spawn(move || {
                let change = crate::reservation::ReservationChange {
                    nexus: *id,
                    action: crate::reservation::Action::Register {
                        ignore: true,
                        persists: true,
                    },
                    keys: crate::reservation::Keys {
                        own: 0,
                        action: id.0,
                    },
                };
                lu.save_reservations(&change).unwrap();
            });
        }
    });
    assert_eq!(rig.lu.registrations().registrants.len(), ids.len());
    let again = started(&keeper).lu.registrations();
    assert_eq!(again.registrants.len(), ids.len());
}

/// If an LU has been replaced, it must not accept any change, because the new LU would not see it.
#[test]
fn retired_unit_refuses_changes() {
    for persists in [0, APTPL] {
        let keeper = Arc::new(Keeper::default());
        let mut rig = started(&keeper);
        register(&mut rig, A, 0xa, persists).good();
        let left = rig.lu.retire();
        let saves = *keeper.saves.lock().unwrap();
        let not_ready = (2, 0x04, 0x01);
        assert_eq!(register(&mut rig, B, 0xb, persists).check(), not_ready);
        let stop_caching = rig.lu.change_mode(Flags::WRITE_CACHE, Flags::empty(), A);
        assert!(stop_caching.is_err());
        assert_eq!(*keeper.saves.lock().unwrap(), saves);
        let next = started(&keeper);
        next.lu.import_state(&left);
        assert_eq!(next.lu.registrations().registrants.len(), 1);
        assert!(next.lu.is_write_cache_enabled());
    }
}
