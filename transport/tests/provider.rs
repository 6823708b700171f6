//! Runs the provider suite on an in-memory wire and on sockets, and tests specific to either.

mod link;
mod marks;
mod over_tcp;
mod shared;
mod software;
mod suite;

mod on_loopback {
    use riser_transport::loopback::FabricConfig;

    use crate::software::Virtual;

    crate::provider_suite!(Virtual::new(FabricConfig::default()));
    crate::hand_made_suite!(Virtual::new(FabricConfig::default()));
}

mod on_full_sockets {
    //! The suite with a socket that accepts only a few packets at a time, so that the rest waits in
    //! its batch.

    use riser_transport::loopback::FabricConfig;
    use riser_transport::verbs::Mtu;

    use crate::software::Virtual;
    use crate::suite::{ops, transfers};

    #[test]
    fn operations() {
        for room in [1, 5] {
            let full = || {
                Virtual::new(FabricConfig {
                    socket_room: room,
                    mtu: Mtu::Mtu1024,
                    ..FabricConfig::default()
                })
            };
            ops::sends_of_every_kind(full());
            ops::writes_and_reads(full());
            ops::mixed_traffic(full());
            transfers::command_registers_transfers_and_invalidates(full());
        }
    }
}

mod on_a_bad_wire {
    //! The suite with one in thirty packets lost, and some packets duplicated, corrupted or
    //! reordered.

    use std::collections::BTreeMap;
    use std::time::Duration;

    use riser_transport::loopback::FabricConfig;
    use riser_transport::roce::fault::FaultConfig;
    use riser_transport::verbs::{Mtu, QpState, SendOp, Verbs as _, WcOpcode};

    use crate::software::Virtual;
    use crate::suite::world::{World as _, pattern};
    use crate::suite::{cm, extended, ops, transfers, unreliable};

    fn bad(seed: u64) -> Virtual {
        Virtual::new(FabricConfig {
            seed,
            mtu: Mtu::Mtu1024,
            faults: FaultConfig::percent(seed, 3.0, 2.0, 2.0, 5.0),
            ..FabricConfig::default()
        })
    }

    #[test]
    fn operations() {
        for seed in 1..6 {
            ops::sends_of_every_kind(bad(seed));
            ops::writes_and_reads(bad(seed));
            ops::atomics(bad(seed));
            ops::fast_registration_and_remote_invalidation(bad(seed));
            ops::inline_unsignaled_and_fenced(bad(seed));
            ops::mixed_traffic(bad(seed));
            transfers::command_registers_transfers_and_invalidates(bad(seed));
        }
    }

    /// Sends messages over a lossy wire: each message arrives either unchanged or not at all, and
    /// most of them arrive.
    fn messages_arrive_whole_or_not_at_all(mut w: Virtual) {
        const SLOT: usize = 8192;
        const ROUNDS: u32 = 200;
        let w = &mut w;
        let (a, b) = unreliable::plain(w);
        let len = |n: u32| 1 + (n as usize * 7919) % (SLOT - 1);
        for slot in 0..8 {
            b.recv(w, slot, slot as usize * SLOT, SLOT);
        }
        let mut arrived = BTreeMap::new();
        let mut out = Vec::new();
        for n in 0..ROUNDS {
            a.memory.write(0, &pattern(n.into(), len(n)));
            let op = match n % 2 {
                0 => SendOp::SendImm(n),
                _ => SendOp::WriteImm(b.remote(16 * SLOT), n),
            };
            a.send(w, n.into(), op, 0, len(n));
            assert!(a.completion(w).status.is_ok());
            w.pass(Duration::from_millis(1));
            w.provider(b.end).poll_cq(b.cq, 16, &mut out).unwrap();
            for c in out.drain(..) {
                assert!(c.status.is_ok(), "{c:?}");
                let n = c.imm.unwrap();
                let at = match c.opcode {
                    WcOpcode::Recv => c.wr_id.0 as usize * SLOT,
                    _ => 16 * SLOT,
                };
                assert_eq!(c.byte_len as usize, len(n));
                assert!(b.bytes(at, len(n)) == pattern(n.into(), len(n)), "{n}");
                *arrived.entry(n).or_insert(0) += 1;
                b.recv(w, c.wr_id.0, c.wr_id.0 as usize * SLOT, SLOT);
            }
        }
        let count = arrived.len() as u32;
        assert!((ROUNDS / 2..ROUNDS).contains(&count), "{count}");
        let state = w.provider(b.end).query_qp(b.qp).unwrap().state;
        assert_eq!(state, Some(QpState::Rts));
    }

    #[test]
    fn extended_connections() {
        for seed in 1..6 {
            extended::xrc_messages_select_their_srq(bad(seed));
            extended::xrc_reads_writes_and_atomics(bad(seed));
            extended::xrc_connections_share_srq(bad(seed));
        }
    }

    #[test]
    fn unreliable_connections() {
        for seed in 1..6 {
            messages_arrive_whole_or_not_at_all(bad(seed));
        }
    }

    #[test]
    fn connections() {
        for seed in 1..6 {
            cm::connection_exchanges_private_data(bad(seed));
            cm::rejection_contains_reason(bad(seed));
            cm::connections_come_and_go(bad(seed));
            cm::data_before_rtu_establishes(bad(seed));
        }
    }
}

mod on_sockets {
    use crate::software::Real;

    crate::provider_suite!(Real::new());
    crate::hand_made_suite!(Real::new());
}

mod on_several_addresses {
    use std::cell::RefCell;

    use crate::software::{Real, addresses};

    fn devices() -> Real {
        let others = addresses();
        let others = RefCell::new([others.0, others.1].into_iter());
        Real::with(|c| c.other_addrs = others.borrow_mut().next().into_iter().collect())
    }

    crate::two_address_names! { suite_tests, (devices()) }
}

mod on_several_addresses_of_a_wire {
    use std::net::IpAddr;

    use riser_transport::loopback::{Fabric, FabricConfig, Pair};

    use crate::software::Virtual;

    fn devices() -> Virtual {
        let fabric = Fabric::new(FabricConfig::default());
        let device = |n: u8| {
            let addr = |path: u8| IpAddr::from([127, 0, path, n]);
            fabric.endpoint_with(&[addr(0), addr(1)])
        };
        let (a, b) = (device(1), device(2));
        Virtual(Pair { a, b, fabric })
    }

    crate::two_address_names! { suite_tests, (devices()) }
}

mod in_shared_memory {
    use crate::software::Shared;

    crate::provider_suite!(Shared::new());
}

mod on_streams {
    use crate::software::Streams;

    use crate::suite::{cm, ops, transfers};

    crate::stream_suite!(Streams::new());

    #[test]
    fn with_markers_and_revision_1() {
        let old = || {
            Streams::with(|config| {
                config.markers = true;
                config.crc = false;
                config.revision = 1;
            })
        };
        ops::sends_of_every_kind(old());
        ops::writes_and_reads(old());
        ops::mixed_traffic(old());
        cm::rejection_contains_reason(old());
        cm::connections_come_and_go(old());
        transfers::command_registers_transfers_and_invalidates(old());
    }
}

mod with_itself {
    //! The suite with a device that is its own peer.

    use riser_transport::roce::fault::FaultConfig;
    use riser_transport::verbs::{Mtu, PortSpace, RdmaCm as _, SendOp, Verbs as _};

    use crate::software::{Itself, connected_steps, device};
    use crate::suite::world::{
        End, Side, Wants, World as _, connected, init_attr, objects, pattern,
    };

    crate::provider_suite!(Itself::new(device(|_| {})));

    #[test]
    fn own_packets_bypass_socket() {
        let mut w = Itself::new(device(|_| {}));
        let (a, b) = connected(&mut w);
        for side in [&a, &b] {
            side.recv(&mut w, 1, 0, 300_000);
        }
        for (from, to) in [(&a, &b), (&b, &a)] {
            from.send(&mut w, 2, SendOp::Send, 300_000, 300_000);
            assert!(from.completion(&mut w).status.is_ok());
            assert!(to.completion(&mut w).status.is_ok());
        }
        let counters = w.provider(End::A).driver_counters();
        assert_eq!((counters.send_calls, counters.trains), (0, 0));
        let counters = *w.provider(End::A).counters();
        assert_eq!(counters.rx_packets, counters.tx_packets);
        assert_eq!(counters.rx_icrc_errors, 0);
    }

    #[test]
    fn qp_connects_to_itself() {
        let mut w = Itself::new(device(|_| {}));
        let wants = Wants::default();
        let (pd, cq, memory, mr) = objects(&mut w, End::A, &wants);
        let addr = w.addr(End::A);
        let p = w.provider(End::A);
        let qp = p.create_qp(&init_attr(pd, cq, &wants)).unwrap();
        let number = p.qp_num(qp).unwrap();
        for step in connected_steps(addr, number) {
            p.modify_qp(qp, &step).unwrap();
        }
        let side = Side {
            end: End::A,
            pd,
            cq,
            memory,
            mr,
            qp,
            id: p.create_id(PortSpace::Tcp).unwrap(),
        };
        let data = pattern(3, 200_000);
        side.memory.write(0, &data);
        side.recv(&mut w, 1, 300_000, 200_000);
        side.send(&mut w, 2, SendOp::Send, 0, 200_000);
        side.send(&mut w, 3, SendOp::Read(side.remote(0)), 600_000, 200_000);
        let done = side.completions(&mut w, 3);
        assert!(done.iter().all(|c| c.status.is_ok()), "{done:?}");
        assert_eq!(side.bytes(300_000, 200_000), data);
        assert_eq!(side.bytes(600_000, 200_000), data);
    }

    #[test]
    fn faults_apply_to_own_packets() {
        let mut w = Itself::new(device(|c| {
            c.mtu = Some(Mtu::Mtu1024);
            c.faults.transmit = Some(FaultConfig::percent(3, 3.0, 2.0, 2.0, 5.0));
        }));
        let (a, b) = connected(&mut w);
        let data = pattern(4, 500_000);
        a.memory.write(0, &data);
        a.send(&mut w, 1, SendOp::Write(b.remote(0)), 0, data.len());
        assert!(a.completion(&mut w).status.is_ok());
        assert_eq!(b.bytes(0, data.len()), data);
        assert!(w.provider(End::A).fault_counters().0.lost > 0);
    }

    #[test]
    fn capture_contains_own_packets_once() {
        let name = format!("riser-own-{}.pcap", std::process::id());
        let file = std::env::temp_dir().join(name);
        let mut w = Itself::new(device(|c| c.capture = Some(file.clone())));
        let (a, b) = connected(&mut w);
        b.recv(&mut w, 1, 0, 64);
        a.memory.write(0, b"only once in all of the file");
        a.send(&mut w, 2, SendOp::Send, 0, 28);
        assert!(b.completion(&mut w).status.is_ok());
        w.provider(End::A).flush_capture();
        let bytes = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let found = bytes
            .windows(28)
            .filter(|w| w == b"only once in all of the file");
        assert_eq!(found.count(), 1);
    }
}

mod with_itself_on_a_wire {
    use riser_transport::loopback::{FabricConfig, Pair};

    use crate::software::Itself;

    crate::provider_suite!(Itself::new(Pair::new(FabricConfig::default())));
}

mod on_sockets_without_segmentation {
    use riser_transport::verbs::Mtu;

    use crate::software::Real;
    use crate::suite::{ops, unreliable};

    #[test]
    fn operations() {
        let plain = || {
            Real::with(|c| {
                c.no_segmentation = true;
                c.mtu = Some(Mtu::Mtu256);
            })
        };
        ops::sends_of_every_kind(plain());
        ops::writes_and_reads(plain());
        ops::mixed_traffic(plain());
        unreliable::uc_sends_and_writes(plain());
    }
}

mod only {
    //! Tests that require a specific world.

    use std::collections::BTreeSet;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};
    use std::time::{Duration, Instant};

    use riser_transport::loopback::FabricConfig;
    use riser_transport::netif::Interface;
    use riser_transport::nic::NicLimits;
    use riser_transport::roce::fault::FaultConfig;
    use riser_transport::roce::{Roce, RoceConfig, RoceFaults};
    use riser_transport::verbs::{
        AsyncEvent, CmEventKind, ConnParam, Mtu, PortSpace, Provider, QpAttr, QpState, RdmaCm,
        SendOp, Verbs, WcStatus,
    };

    use crate::software::{Real, Virtual, addresses};
    use crate::suite::world::{
        End, Side, Wants, World, cm_event, connect_on, connected, init_attr, objects, resolve,
    };
    use crate::suite::{objects as suite_objects, ops};
    use riser_testkit::skip::skip;

    #[test]
    fn seed_determines_trace() {
        let trace = |seed| {
            let w = Virtual::new(FabricConfig {
                seed,
                faults: FaultConfig::percent(3, 2.0, 1.0, 1.0, 3.0),
                ..FabricConfig::default()
            });
            let fabric = w.0.fabric.clone();
            // Memory addresses differ between runs, so this test only uses SENDs.
            let mut w = w;
            let (a, b) = connected(&mut w);
            for n in 0..50 {
                b.recv(&mut w, n, 0, 20_000);
            }
            for n in 0..50 {
                a.send(&mut w, n, SendOp::Send, 0, 300 * n as usize);
            }
            a.completions(&mut w, 50);
            (fabric.trace(), fabric.elapsed())
        };
        assert_eq!(trace(1), trace(1));
        assert_ne!(trace(1), trace(2));
    }

    /// The owner closes a connection in the same round in which the peer's request fails, like an
    /// appliance does. The peer must still receive the reason.
    fn a_remote_access_error_is_reported<W: World>(mut w: W) {
        let w = &mut w;
        let (a, b) = connected(w);
        let mut wrong = b.remote(0);
        wrong.rkey.0 ^= 0x100;
        a.send(w, 1, SendOp::Write(wrong), 0, 8);
        assert!(matches!(b.event(w), AsyncEvent::QpAccessError(qp) if qp == b.qp));
        w.provider(End::B).disconnect(b.id).unwrap();
        w.provider(End::B).destroy_qp(b.qp).unwrap();
        assert_eq!(a.completion(w).status, WcStatus::RemAccessErr);
    }

    #[test]
    fn remote_access_error_survives_owner_disconnect() {
        a_remote_access_error_is_reported(Virtual::new(FabricConfig::default()));
        a_remote_access_error_is_reported(Real::new());
    }

    /// A received message completes at the sender, no matter how the receiver exits.
    #[test]
    fn received_send_completes_despite_receiver_exit() {
        type Ending = fn(&mut Real, &Side);
        let endings: [Ending; 4] = [
            |w, b| w.provider(End::B).disconnect(b.id).unwrap(),
            |w, b| w.provider(End::B).destroy_qp(b.qp).unwrap(),
            |w, b| {
                let error = QpAttr::to(QpState::Error);
                w.provider(End::B).modify_qp(b.qp, &error).unwrap();
            },
            |w, b| {
                w.provider(End::B).disconnect(b.id).unwrap();
                w.provider(End::B).destroy_qp(b.qp).unwrap();
                w.provider(End::B).destroy_id(b.id).unwrap();
            },
        ];
        for end in endings {
            let mut w = Real::new();
            let (a, b) = connected(&mut w);
            b.recv(&mut w, 1, 0, 64);
            a.send(&mut w, 2, SendOp::Send, 0, 64);
            b.completion(&mut w);
            end(&mut w, &b);
            assert_eq!(a.completion(&mut w).status, WcStatus::Success);
        }
    }

    #[test]
    fn silent_peer_times_out() {
        let mut w = Virtual::new(FabricConfig::default());
        let (a, b) = connected(&mut w);
        w.0.fabric.set_faults(FaultConfig {
            loss: 1_000_000,
            ..FaultConfig::default()
        });
        a.send(&mut w, 1, SendOp::Write(b.remote(0)), 0, 8);
        assert_eq!(a.completion(&mut w).status, WcStatus::RetryExcErr);
        // An unanswered disconnect and an unanswered request time out as well.
        w.provider(End::A).disconnect(a.id).unwrap();
        assert_eq!(cm_event(&mut w, End::A).kind, CmEventKind::Disconnected);
        assert_eq!(cm_event(&mut w, End::A).kind, CmEventKind::TimewaitExit);
        let id = resolve(&mut w, 4000);
        let (pd, cq, _m, _) = objects(&mut w, End::A, &Wants::default());
        let init = init_attr(pd, cq, &Wants::default());
        w.provider(End::A).create_cm_qp(id, &init).unwrap();
        w.provider(End::A)
            .connect(id, &ConnParam::default())
            .unwrap();
        assert_eq!(cm_event(&mut w, End::A).kind, CmEventKind::Unreachable);
    }

    #[test]
    fn peer_qps_are_limited() {
        let mut w = Virtual::new(FabricConfig {
            limits: NicLimits {
                max_qps_per_peer: 1,
                ..NicLimits::default()
            },
            ..FabricConfig::default()
        });
        let (a, _b) = connected(&mut w);
        let listener = crate::suite::world::listen(&mut w, End::B, 4000);
        let id = resolve(&mut w, 4000);
        let (pd, cq, _m, _) = objects(&mut w, End::A, &Wants::default());
        let init = init_attr(pd, cq, &Wants::default());
        w.provider(End::A).create_cm_qp(id, &init).unwrap();
        w.provider(End::A)
            .connect(id, &ConnParam::default())
            .unwrap();
        let request = cm_event(&mut w, End::B).id;
        let (pd, cq, _m, _) = objects(&mut w, End::B, &Wants::default());
        let init = init_attr(pd, cq, &Wants::default());
        w.provider(End::B).create_cm_qp(request, &init).unwrap();
        w.provider(End::B)
            .accept(request, &ConnParam::default())
            .unwrap_err();
        assert_eq!(w.0.b.counters().refused_qps, 1);
        w.provider(End::B).destroy_id(request).unwrap();
        w.provider(End::B).destroy_id(listener).unwrap();
        w.provider(End::A).destroy_qp(a.qp).unwrap();
    }

    #[test]
    fn smaller_path_mtu_is_negotiated() {
        let (here, there) = addresses();
        for (large, small) in [(here, there), (there, here)] {
            let mut w = Real::at(here, there, |c| {
                c.mtu = Some(if c.addr == large {
                    Mtu::Mtu4096
                } else {
                    Mtu::Mtu512
                });
            })
            .unwrap();
            let (a, b) = connected(&mut w);
            for side in [&a, &b] {
                let attr = w.provider(side.end).query_qp(side.qp).unwrap();
                assert_eq!(attr.path_mtu, Some(Mtu::Mtu512), "{large} and {small}");
            }
            a.send(&mut w, 1, SendOp::Read(b.remote(0)), 0, 10_000);
            assert!(a.completion(&mut w).status.is_ok());
        }
    }

    #[test]
    fn unsignalled_event_sets_deadline() {
        let (here, there) = addresses();
        let mut nic = Roce::open(&RoceConfig::new(here)).unwrap();
        nic.progress(Instant::now());
        assert_eq!(nic.deadline(), None);
        let id = nic.create_id(PortSpace::Tcp).unwrap();
        let dst = SocketAddr::new(there, 7);
        nic.resolve_addr(id, None, dst, Duration::from_secs(1))
            .unwrap();
        assert!(nic.deadline().is_some_and(|at| at <= Instant::now()));
        let event = nic.poll_cm_event().unwrap();
        assert_eq!((event.id, event.kind), (id, CmEventKind::AddrResolved));
        assert_eq!(nic.deadline(), None);
    }

    #[test]
    fn unknown_worker_is_rejected() {
        for (index, bits) in [(1, 0), (4, 2), (0, 9)] {
            let error = Roce::open(&RoceConfig {
                worker_index: index,
                worker_bits: bits,
                ..RoceConfig::new(addresses().0)
            })
            .unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn packets_from_elsewhere_change_nothing() {
        let mut w = Virtual::new(FabricConfig::default());
        let (a, b) = connected(&mut w);
        // A third device has all information, but a different address.
        let stranger: IpAddr = Ipv4Addr::new(127, 0, 0, 3).into();
        let mut third = w.0.fabric.endpoint(stranger);
        let pd = third.alloc_pd().unwrap();
        let cq = third.create_cq(4).unwrap();
        let qp = third
            .create_qp(&init_attr(pd, cq, &Wants::default()))
            .unwrap();
        let know = w.provider(End::A).query_qp(a.qp).unwrap();
        for state in [
            riser_transport::verbs::QpState::Init,
            riser_transport::verbs::QpState::Rtr,
            riser_transport::verbs::QpState::Rts,
        ] {
            use riser_transport::verbs::{QpAttr, QpState};
            let none = QpAttr::default();
            let attr = match state {
                QpState::Init => QpAttr {
                    pkey_index: Some(0),
                    port: Some(1),
                    access: know.access,
                    ..none
                },
                QpState::Rtr => QpAttr {
                    ah: know.ah,
                    path_mtu: know.path_mtu,
                    dest_qp: know.dest_qp,
                    rq_psn: know.rq_psn,
                    max_dest_rd_atomic: Some(1),
                    min_rnr_timer: Some(1),
                    ..none
                },
                _ => QpAttr {
                    sq_psn: know.sq_psn,
                    max_rd_atomic: Some(1),
                    timeout: Some(14),
                    retry_cnt: Some(0),
                    rnr_retry: Some(0),
                    ..none
                },
            };
            third
                .modify_qp(
                    qp,
                    &QpAttr {
                        state: Some(state),
                        ..attr
                    },
                )
                .unwrap();
        }
        let wr = riser_transport::verbs::SendWr::new(1, SendOp::Write(b.remote(0)), &[]);
        third.post_send(qp, &[wr]).unwrap();
        let now = w.now();
        third.progress(now);
        w.pass(Duration::from_millis(1));
        assert!(w.0.b.counters().rx_wrong_source > 0);
        assert_eq!(w.0.b.qp_counters(b.qp).unwrap().rc.rx_packets, 0);
        a.send(&mut w, 2, SendOp::Write(b.remote(0)), 0, 100);
        assert!(a.completion(&mut w).status.is_ok());
    }

    #[test]
    fn lossy_socket_delivers_all_data() {
        let faults = RoceFaults {
            transmit: Some(FaultConfig::percent(5, 2.0, 1.0, 1.0, 3.0)),
            receive: Some(FaultConfig::percent(6, 1.0, 0.0, 0.0, 2.0)),
        };
        ops::mixed_traffic(Real::with(|c| c.faults = faults));
    }

    #[test]
    fn small_socket_buffer_serves_many_connections() {
        // The limit for unprivileged programs on a typical host.
        ops::many_connections(Real::with(|c| c.socket_buffer = 208 << 10));
    }

    #[test]
    fn ipv6_sockets_talk() {
        // A host has ::1 on its loopback interface. Its other addresses may be on any interface,
        // which may have a smaller MTU.
        let mut own = riser_transport::netif::interfaces().unwrap();
        own.retain(|interface| interface.address.is_ipv6());
        let pairs = || own.windows(2).map(|pair| (&pair[0], &pair[1]));
        let is_one = |(a, b): &(&Interface, &Interface)| a.name == b.name;
        let of_one = pairs().find(is_one);
        let Some((a, b)) = of_one.or(pairs().next()) else {
            return skip(
                "ipv6_sockets_talk",
                "this host has fewer than two IPv6 addresses",
            );
        };
        let (a, b) = (a.address, b.address);
        let open = || Real::at(a, b, |c| c.mtu = Some(Mtu::Mtu1024));
        match open() {
            Ok(w) => ops::mixed_traffic(w),
            Err(e) => return skip("ipv6_sockets_talk", &format!("{a} or {b} is taken: {e}")),
        }
        suite_objects::datagrams(open().unwrap());
        // Joining a group requires an interface.
        if of_one.is_some() {
            suite_objects::multicast(open().unwrap());
        }
    }

    #[test]
    fn ipv6_in_memory() {
        let pair = || {
            let fabric = riser_transport::loopback::Fabric::new(FabricConfig::default());
            Virtual(riser_transport::loopback::Pair {
                a: fabric.endpoint("fd00::1".parse().unwrap()),
                b: fabric.endpoint("fd00::2".parse().unwrap()),
                fabric,
            })
        };
        ops::mixed_traffic(pair());
        suite_objects::datagrams(pair());
        suite_objects::multicast(pair());
    }

    /// Opens all workers of a device.
    fn workers(addr: IpAddr, bits: u8) -> Vec<Roce> {
        (0..1 << bits)
            .map(|index| {
                Roce::open(&RoceConfig {
                    worker_index: index,
                    worker_bits: bits,
                    ..RoceConfig::new(addr)
                })
                .unwrap()
            })
            .collect()
    }

    #[test]
    fn workers_share_port() {
        let (here, there) = addresses();
        let mut server = workers(here, 2);
        let mut client = Roce::open(&RoceConfig::new(there)).unwrap();
        for worker in &mut server {
            let listener = worker.create_id(PortSpace::Tcp).unwrap();
            worker
                .bind_addr(listener, SocketAddr::new(here, 4000))
                .unwrap();
            worker.listen(listener, 64).unwrap();
        }
        let pd = client.alloc_pd().unwrap();
        let cq = client.create_cq(256).unwrap();
        let mut ids = Vec::new();
        for _ in 0..24 {
            let id = client.create_id(PortSpace::Tcp).unwrap();
            let dst = SocketAddr::new(here, 4000);
            client.resolve_addr(id, None, dst, Duration::ZERO).unwrap();
            client.resolve_route(id, Duration::ZERO).unwrap();
            let qp = client
                .create_cm_qp(id, &init_attr(pd, cq, &Wants::default()))
                .unwrap();
            client.connect(id, &ConnParam::default()).unwrap();
            ids.push((id, qp));
        }
        let mut up = [0; 4];
        let mut established = 0;
        let mut forwarded = 0;
        let end = Instant::now() + Duration::from_secs(30);
        while established < ids.len() || up.iter().sum::<usize>() < ids.len() {
            assert!(Instant::now() < end, "{established} {up:?}");
            client.progress(Instant::now());
            while let Some(e) = client.poll_cm_event() {
                established += usize::from(matches!(e.kind, CmEventKind::Established { .. }));
            }
            let mut forward = Vec::new();
            for (index, worker) in server.iter_mut().enumerate() {
                worker.progress(Instant::now());
                while let Some(m) = worker.poll_forwarded() {
                    forward.push(m);
                }
                while let Some(e) = worker.poll_cm_event() {
                    match e.kind {
                        CmEventKind::ConnectRequest { .. } => {
                            let pd = worker.alloc_pd().unwrap();
                            let cq = worker.create_cq(16).unwrap();
                            let init = init_attr(pd, cq, &Wants::default());
                            let qp = worker.create_cm_qp(e.id, &init).unwrap();
                            assert_eq!(worker.qp_num(qp).unwrap() & 3, index as u32);
                            worker.accept(e.id, &ConnParam::default()).unwrap();
                        }
                        CmEventKind::Established { .. } => up[index] += 1,
                        _ => {}
                    }
                }
            }
            forwarded += forward.len();
            for m in forward {
                server[m.worker as usize].handle_forwarded(Instant::now(), &m);
            }
        }
        assert!(
            up.iter().all(|&n| n > 0),
            "every worker has connections: {up:?}"
        );
        assert_eq!(
            forwarded, 0,
            "the kernel brought every packet to its worker"
        );
    }

    #[test]
    fn capture_contains_wire_packets() {
        let path = std::env::temp_dir().join(format!("riser-capture-{}.pcap", std::process::id()));
        let mut w = Real::with(|c| {
            c.capture = Some(path.with_extension(c.addr.to_string()));
        });
        let files: Vec<_> = [End::A, End::B]
            .map(|e| path.with_extension(w.addr(e).to_string()))
            .into();
        let (a, b) = connect_on(&mut w, 5000, &Wants::default(), &Wants::default());
        a.send(&mut w, 1, SendOp::Write(b.remote(0)), 0, 50_000);
        assert!(a.completion(&mut w).status.is_ok());
        drop(w);
        let mut seen = Vec::new();
        for file in &files {
            let bytes = std::fs::read(file).unwrap();
            std::fs::remove_file(file).unwrap();
            let (mut at, mut writes) = (24, BTreeSet::new());
            while at < bytes.len() {
                let len = u32::from_ne_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
                let packet = &bytes[at + 16..][..len];
                let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
                let src =
                    SocketAddr::from(([packet[12], packet[13], packet[14], packet[15]], port(20)));
                let dst =
                    SocketAddr::from(([packet[16], packet[17], packet[18], packet[19]], port(22)));
                let flow = riser_transport::wire::IcrcFlow::new(src, dst).unwrap();
                flow.check_exact(&packet[28..], port(4)).unwrap();
                // On a busy machine, some packets are retransmitted.
                if (6..=0x0a).contains(&packet[28]) {
                    writes.insert(packet[28 + 9..28 + 12].to_vec());
                }
                at += 16 + len;
            }
            assert_eq!(writes.len(), 13);
            seen.push(writes);
        }
        assert_eq!(seen[0], seen[1], "both ends saw the same");
    }

    #[test]
    fn tshark_reads_capture() {
        use crate::suite::{cm, transfers, unreliable};

        let dir = std::env::temp_dir().join(format!("riser-tshark-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        // Capture at one end of each pair, which sees both directions.
        let opened = std::cell::Cell::new(0);
        let world = || {
            Real::with(|c| {
                let is_first = opened.replace(opened.get() + 1) % 2 == 0;
                c.capture = is_first.then(|| dir.join(format!("{}.pcap", c.addr)));
            })
        };
        ops::sends_of_every_kind(world());
        ops::writes_and_reads(world());
        ops::atomics(world());
        ops::fast_registration_and_remote_invalidation(world());
        cm::rejection_contains_reason(world());
        cm::disconnect_reaches_both_sides(world());
        cm::destroying_listener_rejects_pending_requests(world());
        transfers::command_registers_transfers_and_invalidates(world());
        unreliable::uc_sends_and_writes(world());
        let mut opcodes = std::collections::BTreeSet::new();
        for file in std::fs::read_dir(&dir).unwrap() {
            let file = file.unwrap().path();
            let fields = [
                "infiniband.bth.opcode",
                "_ws.malformed",
                "_ws.expert.severity",
            ];
            let mut command = std::process::Command::new("tshark");
            command
                .arg("-r")
                .arg(&file)
                .args(["-T", "fields", "-E", "separator=;"]);
            for field in fields {
                command.args(["-e", field]);
            }
            // Our payloads are random, so heuristic dissectors would find protocols that are not
            // there.
            for guess in ["rpcordma", "smb_direct", "nvme-rdma", "iser"] {
                command.args(["--disable-protocol", guess]);
            }
            let Ok(output) = command.output() else {
                skip("captures_of_a_suite", "tshark is not installed");
                break;
            };
            assert!(output.status.success(), "{output:?}");
            let text = String::from_utf8(output.stdout).unwrap();
            for line in text.lines() {
                let mut columns = line.split(';');
                let opcode = columns.next().unwrap();
                assert!(!opcode.is_empty(), "not taken for RoCE: {line}");
                opcodes.insert(opcode.to_owned());
                assert_eq!(columns.next(), Some(""), "malformed: {line}");
                // Expert severities: 0x200000 is a chat, 0x400000 a note, and higher values are
                // errors.
                let severe = columns
                    .next()
                    .unwrap_or("")
                    .split(',')
                    .filter_map(|n| n.parse::<u32>().ok())
                    .any(|n| n > 0x40_0000);
                assert!(!severe, "{line}");
            }
        }
        assert!(opcodes.is_empty() || opcodes.len() > 15, "{opcodes:?}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// Tests the received hop limit, in a network without routers. We treat packets that were sent with
/// a smaller hop limit as forwarded by routers.
#[test]
fn on_link_device_rejects_routed_packets() {
    use std::net::{IpAddr, UdpSocket};
    use std::time::{Duration, Instant};

    use riser_transport::roce::{Roce, RoceConfig};
    use riser_transport::verbs::Provider;

    let addr = IpAddr::from([127, 97, 0, 1]);
    let mut device = Roce::open(&RoceConfig {
        on_link: true,
        ..RoceConfig::new(addr)
    })
    .unwrap();
    let peer = UdpSocket::bind("127.97.0.2:0").unwrap();
    for ttl in [64, 254, 255] {
        peer.set_ttl(ttl).unwrap();
        peer.send_to(&[0; 64], (addr, 4791)).unwrap();
    }
    let until = Instant::now() + Duration::from_secs(10);
    while device.driver_counters().trains < 3 && Instant::now() < until {
        device.progress(Instant::now());
    }
    assert_eq!(device.driver_counters().off_link, 2);
    assert_eq!(device.counters().rx_packets, 1);
}

#[test]
fn link_local_address_is_rejected() {
    use riser_transport::roce::{Roce, RoceConfig};

    let error = Roce::open(&RoceConfig::new("fe80::1".parse().unwrap())).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
    assert!(error.to_string().contains("link-local"), "{error}");
}
