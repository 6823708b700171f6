//! Tests with random messages from the peer and random calls from the user.

use proptest::prelude::*;
use riser_testkit::{fuzz, one_of};

use super::*;
use crate::wire::cm_msg::{AprStatus, CM_CLASS_VERSION};

#[derive(Clone, Debug)]
enum Action {
    /// CM MAD using IDs that exist.
    Mad {
        from: u8,
        attribute: u8,
        ours: usize,
        theirs: u8,
        body: Vec<u8>,
    },
    /// Valid request.
    Req {
        from: u8,
        qpn: u8,
        transaction: u8,
    },
    Listen(u8),
    Connect(u8),
    User {
        which: usize,
        call: u8,
    },
    Pass(u32),
}

fn action() -> impl Strategy<Value = Action> {
    one_of![
        4 => (1u8..4, 0x10u8..0x1b, any::<usize>(), 0u8..4, proptest::collection::vec(any::<u8>(), 0..40)).prop_map(
            |(from, attribute, ours, theirs, body)| Action::Mad { from, attribute, ours, theirs, body }
        ),
        3 => (1u8..4, 2u8..6, 0u8..3).prop_map(|(from, qpn, transaction)| Action::Req { from, qpn, transaction }),
        1 => (0u8..4).prop_map(Action::Listen),
        2 => (1u8..4).prop_map(Action::Connect),
        5 => (any::<usize>(), 0u8..12).prop_map(|(which, call)| Action::User { which, call }),
        2 => (0u32..2_000_000).prop_map(Action::Pass),
    ]
}

fn all_ids(cm: &Cm) -> Vec<IbCmId> {
    cm.conns
        .keys()
        .chain(cm.listeners.by_id.keys())
        .copied()
        .collect()
}

fn call(cm: &mut Cm, now: Instant, id: IbCmId, which: u8) {
    let info = AdditionalInfo::default();
    let _ = match which {
        0 => cm.send_rep(now, id, &rep_params(9)),
        1 => cm.send_rtu(id, PrivateData::default()),
        2 => cm.send_mra(id, CmTimeout::new(18), PrivateData::default()),
        3 => cm.send_rej(
            now,
            id,
            RejReason::ConsumerDefined,
            info,
            PrivateData::default(),
        ),
        4 => cm.send_dreq(now, id, PrivateData::default()),
        5 => cm.send_drep(now, id, PrivateData::default()),
        6 => cm.destroy(now, id),
        7 => cm.establish(now, id),
        8 => cm.send_lap(now, id, CmPath::default(), PrivateData::default()),
        9 => cm.send_apr(id, AprStatus::Success, info, PrivateData::default()),
        10 => cm.send_sidr_rep(
            id,
            &SidrRepParams {
                status: SidrStatus::Success,
                qpn: Qpn::new(3),
                qkey: 0,
                info,
                private_data: PrivateData::default(),
            },
        ),
        _ => Ok(()),
    };
}

fn forged(attribute: u8, ours: CommId, theirs: u8, body: &[u8]) -> Mad {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 7, CM_CLASS_VERSION, 3]);
    mad[17] = attribute;
    mad[24..28].copy_from_slice(&u32::from(theirs).to_be_bytes());
    mad[28..32].copy_from_slice(&ours.0.to_be_bytes());
    mad[32..32 + body.len()].copy_from_slice(body);
    if attribute == 0x18 {
        mad[24..28].copy_from_slice(&ours.0.to_be_bytes());
    }
    if attribute == 0x15 && theirs.is_multiple_of(2) {
        mad[32..35].copy_from_slice(&[0, 0, 9]);
    }
    mad
}

/// There should be no panic, all limits should be respected, and no state should remain after
/// releasing everything.
fn run(actions: Vec<Action>, paths: bool) {
    let mut config = CmConfig::new(CaGuid(2));
    (
        config.max_ids,
        config.max_half_open_per_peer,
        config.max_outbox,
    ) = (24, 6, 64);
    config.alternate_paths = paths;
    let mut cm = Cm::new(config, 1, 1, [3; 32]);
    cm.listen(SERVICE, u64::MAX, 10).unwrap();
    let mut now = Instant::now();
    for action in actions {
        match action {
            Action::Mad {
                from,
                attribute,
                ours,
                theirs,
                body,
            } => {
                let ids = all_ids(&cm);
                let ours = ids
                    .get(ours % (ids.len() + 1))
                    .map_or(CommId(0), |id| id.comm_id());
                let _ = cm.handle_mad(now, addr(from), &forged(attribute, ours, theirs, &body));
            }
            Action::Req {
                from,
                qpn,
                transaction,
            } => {
                let mut peer = machine(from, 1);
                peer.send_req(now, addr(2), &req_params(from, 2, u32::from(qpn)))
                    .unwrap();
                let (_, mad) = peer.poll_transmit().unwrap();
                let (_, CmMessage::Req(mut req)) = CmMessage::parse(&mad).unwrap() else {
                    panic!()
                };
                req.local_comm_id = CommId(u32::from(qpn % 4));
                let mad = CmMessage::Req(req).emit(TransactionId(u64::from(transaction)));
                cm.handle_mad(now, addr(from), &mad).unwrap();
            }
            Action::Listen(n) => {
                let _ = cm.listen(ServiceId(u64::from(n)), u64::MAX, 2);
            }
            Action::Connect(to) => {
                let _ = cm.send_req(now, addr(to), &req_params(2, to, u32::from(to)));
            }
            Action::User {
                which,
                call: number,
            } => {
                let ids = all_ids(&cm);
                if let Some(&id) = ids.get(which % (ids.len() + 1)) {
                    call(&mut cm, now, id, number);
                }
            }
            Action::Pass(micros) => {
                now += Duration::from_micros(u64::from(micros));
                cm.handle_timeout(now);
            }
        }
        assert!(cm.id_count() <= 24);
        assert!(cm.outbox.len() <= 64);
        assert!(
            cm.listeners
                .half_open
                .values()
                .all(|&count| count > 0 && count <= 6)
        );
        assert!(cm.conns.keys().all(|id| id.comm_id().0 & 1 == 1));
        let armed = cm.conns.values().filter(|c| c.deadline.is_some()).count();
        assert_eq!(armed, cm.timers.len());
    }
    // All IDs can be released in any state, and nothing should remain.
    for id in all_ids(&cm) {
        let _ = cm.destroy(now, id);
    }
    for _ in 0..200 {
        now += Duration::from_secs(20);
        cm.handle_timeout(now);
    }
    assert_eq!(cm.id_count(), 0);
    assert!(
        cm.peers.by_req.is_empty() && cm.peers.claims.is_empty() && cm.peers.by_sidr.is_empty()
    );
    assert!(cm.listeners.half_open.is_empty() && cm.timers.is_empty());
    assert!(cm.listeners.unconfirmed.is_empty() && cm.proven.is_empty() && cm.finished.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn hostile_messages_respect_limits(
        actions in proptest::collection::vec(action(), 1..150),
        paths: bool,
    ) {
        run(actions, paths);
    }
}

#[test]
fn connection_manager() {
    bolero::check!(name = "connection_manager").for_each(|bytes: &[u8]| {
        if let Some((paths, actions)) = fuzz::history(&any::<bool>(), &action(), bytes) {
            run(actions, paths);
        }
    });
}
