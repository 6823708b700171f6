//! Runs single attacks on idle sessions. Each attack must be rejected for the expected reason and
//! must be visible in a metric. If a packet contains an incorrect value, the metric must increase
//! by at least the number of packets sent, and the session must not change. If a connection request
//! is sent on behalf of a host, the target will respond, but the host's existing connection must
//! not change. If an on-path attacker sends a packet with all correct values, this closes the
//! session, which must then reconnect without losing data.
//!
//! We use the attacks described in "ReDMArk: Bypassing RDMA Security Mechanisms" (USENIX Security
//! 2021), and other network attacks: ICMP, which is counted by the kernel, and hosts that claim
//! another host's address, for which there is no counter.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::{LinkState, Session};
use riser_initiator::lun::Lun;
use riser_testkit::eventually;
use riser_testkit::programs::{Pair, skip};
use riser_tests::history::BLOCK;
use riser_tests::load::{Chance, Disk};
use riser_transport::verbs::{RKey, RemoteAddr, SendOp};
use riser_transport::wire::{
    Aeth, AethSyndrome, AtomicEth, Bth, ExtHeaders, Ieth, ImmDt, Msn, Opcode, Psn, Qpn, Reth,
    emit_headers,
};

use super::forge::{Forger, Login, Reach, Reached, Sniffer, Trick, roce};
use super::host::Host;
use super::hostile::{self, OTHER_SRP};
use super::net::{HONEST, LATER, SECOND, STRANGER, TARGET, World};
use super::{client, kernel_counter, log_in, metric, serve, visit_other_target};

/// Number of packets for each attack.
const N: u64 = 20;
const SOON: Duration = Duration::from_secs(20);
/// Timeout until a session has reconnected after it was closed by an on-path attacker.
const LATER_ON: Duration = Duration::from_secs(90);
const BLOCKS: usize = 64;

/// Idle SRP and iSER sessions, and the information captured by a sniffer.
struct Scene {
    world: Arc<World>,
    pair: Pair,
    sniffer: Sniffer,
    sessions: Vec<(Session, Lun, Ipv4Addr)>,
    /// Logins of these sessions.
    logins: Vec<Login>,
    chance: Chance,
}

/// Next values expected by the target for a connection.
#[derive(Clone, Copy, Debug)]
struct Next {
    from: SocketAddr,
    qpn: u32,
    psn: u32,
}

impl Scene {
    fn new(world: World) -> Self {
        let world = Arc::new(world);
        let pair = serve(&world, 2);
        let mut sniffer = world.switch.run(Sniffer::new);
        let sessions = [("srp", HONEST), ("iser", SECOND)].map(|(scheme, host)| {
            let (session, lun, _) = world
                .hosts
                .run(move || log_in(&client(scheme, host), scheme));
            (session, lun, host)
        });
        let logins = sniffer.logins();
        assert_eq!(logins.len(), 2, "SRP and iSER");
        let mut scene = Self {
            world,
            pair,
            sniffer,
            sessions: sessions.into(),
            logins,
            chance: Chance::new(0x0dd, 7),
        };
        for at in 0..2 {
            scene.write(at, at as u8 + 1);
        }
        scene
    }

    /// Writes the blocks of a session, so that we can check which session has written the data.
    fn write(&mut self, at: usize, byte: u8) {
        let (_, lun, _) = &mut self.sessions[at];
        let offset = (at * BLOCKS * BLOCK) as u64;
        Disk::write(lun, offset, &[byte; BLOCKS * BLOCK], false).unwrap();
    }

    /// Verifies the data written.
    fn check(&mut self) {
        for at in 0..2 {
            let mut bytes = [0; BLOCKS * BLOCK];
            let (_, lun, _) = &mut self.sessions[at];
            Disk::read(lun, (at * BLOCKS * BLOCK) as u64, &mut bytes).unwrap();
            assert!(bytes.iter().all(|b| *b == at as u8 + 1), "session {at}");
        }
    }

    /// Returns the next values that the target expects from a session's host, and the host memory
    /// that was last accessed by the target.
    fn learn(&mut self, at: usize) -> Next {
        self.sniffer.skip();
        // For a command that reads, there is a single packet with a visible sequence number. Larger
        // commands would be sent as a train.
        self.check();
        let host = self.sessions[at].2;
        let sniffer = &mut self.sniffer;
        let mut last = None;
        eventually("a request was seen", SOON, || {
            last = sniffer.last_request(host, TARGET);
            last.is_some()
        });
        let (from, qpn, psn) = last.unwrap();
        Next {
            from,
            qpn,
            psn: psn + 1,
        }
    }

    fn metric(&self, name: &'static str, label: &'static str) -> u64 {
        metric(&self.world, name, label)
    }

    /// Runs an action and checks that a metric has increased by at least this value and that the
    /// sessions are still connected.
    fn counts(
        &mut self,
        what: &str,
        (name, label): (&'static str, &'static str),
        least: u64,
        attack: impl FnOnce(&mut Forger, &mut Chance),
    ) {
        let before = self.metric(name, label);
        let world = self.world.clone();
        let mut forger = world.stranger.run(Forger::from_here);
        attack(&mut forger, &mut self.chance);
        eventually(what, SOON, || self.metric(name, label) >= before + least);
        let grown = self.metric(name, label) - before;
        println!("result: {what}: {grown} counted as {name}, {label}");
        self.check();
        assert_eq!(self.reconnects(), [0; 2], "{what}");
    }

    /// Sends a packet with all correct values to the target. It must be rejected with this type of
    /// NAK, which closes the connection, and the session must then reconnect without losing data.
    fn ends(
        &mut self,
        what: &str,
        at: usize,
        kind: &'static str,
        forged: impl FnOnce(Next) -> Vec<u8>,
    ) {
        let was = self.reconnects()[at];
        let before = self.metric(NAKS, kind);
        let world = self.world.clone();
        let mut forger = world.stranger.run(Forger::from_here);
        let next = self.learn(at);
        forger.send_body(next.from, roce(TARGET), forged(next), true);
        eventually(what, SOON, || self.metric(NAKS, kind) > before);
        println!("result: {what}: counted as {NAKS}, {kind}");
        eventually("the session is made again", LATER_ON, || {
            self.reconnects()[at] > was
        });
        self.wait_recovered(what);
    }

    fn reconnects(&self) -> [u64; 2] {
        [0, 1].map(|at| self.sessions[at].0.status().reconnects())
    }

    /// Waits until both sessions have reconnected.
    fn wait_recovered(&mut self, what: &str) {
        let sessions = &self.sessions;
        let is_live =
            |(session, ..): &(Session, Lun, Ipv4Addr)| session.status().link() == LinkState::Live;
        eventually(what, LATER_ON, || sessions.iter().all(is_live));
        self.check();
    }
}

const DROPPED: &str = "riser_device_dropped_packets_total";
const ODD: &str = "riser_device_odd_packets_total";
const CM: &str = "riser_device_cm_messages_total";
const NAKS: &str = "riser_device_naks_sent_total";

/// Creates a packet for the target with a valid ICRC.
fn body(bth: &Bth, ext: &ExtHeaders, payload: &[u8]) -> Vec<u8> {
    let mut body = emit_headers(bth, ext).to_vec();
    body.extend_from_slice(payload);
    body.extend_from_slice(&[0; 4]);
    body
}

fn bth(opcode: Opcode, next: Next) -> Bth {
    Bth::new(opcode, Qpn::new(next.qpn), Psn::new(next.psn & 0xff_ffff))
}

/// Creates a SEND with random data.
fn send(next: Next) -> Vec<u8> {
    send_of(Opcode::RcSendOnly, next)
}

fn send_of(opcode: Opcode, next: Next) -> Vec<u8> {
    body(&bth(opcode, next), &ExtHeaders::default(), &[0xbd; 64])
}

/// Creates a WRITE with random data and, if the opcode requires it, immediate data.
fn write(opcode: Opcode, next: Next, va: u64, key: u32) -> Vec<u8> {
    let imm = (opcode == Opcode::RcWriteOnlyImm).then(|| ImmDt::new(0xbd));
    let ext = ExtHeaders {
        reth: Some(Reth::new(va, key, 64)),
        imm,
        ..ExtHeaders::default()
    };
    body(&bth(opcode, next), &ext, &[0xbd; 64])
}

fn read(next: Next, va: u64, key: u32) -> Vec<u8> {
    let reth = Some(Reth::new(va, key, 64));
    let ext = ExtHeaders {
        reth,
        ..ExtHeaders::default()
    };
    body(&bth(Opcode::RcReadRequest, next), &ext, &[])
}

/// Runs the attacks with new sessions.
fn attack(name: &str, attacks: &[fn(&mut Scene)]) {
    let world = match World::new() {
        Ok(world) => world,
        Err(why) => return skip(name, &why),
    };
    let mut scene = Scene::new(world);
    for attack in attacks {
        attack(&mut scene);
    }
    scene.pair.terminate();
}

#[test]
fn forged_packets_are_rejected_and_counted() {
    let attacks = [guessed_numbers, spoiled_packets, forged_messages];
    attack("forged_packets_are_rejected_and_counted", &attacks);
}

#[test]
fn icmp_changes_nothing() {
    attack("icmp_changes_nothing", &[icmp]);
}

#[test]
fn foreign_memory_is_rejected_and_counted() {
    let name = "foreign_memory_is_rejected_and_counted";
    attack(name, &[memory_of_others]);
}

#[test]
fn sessions_recover_after_claimed_addresses() {
    attack(
        "sessions_come_back_after_claimed_addresses",
        &[claimed_addresses],
    );
}

#[test]
fn guessed_keys_are_refused_and_counted() {
    let name = "guessed_keys_are_refused_and_counted";
    attack(name, &[many_guessed_keys, guessed_keys]);
}

#[test]
fn illegal_requests_are_rejected_and_counted() {
    let name = "illegal_requests_are_rejected_and_counted";
    attack(name, &[rules_broken]);
}

#[test]
fn initiator_memory_is_not_accessible() {
    let name = "initiator_memory_is_not_accessible";
    attack(name, &[memory_of_initiators]);
}

#[test]
fn connections_without_end_displace_each_other_alone() {
    let name = "connections_without_end_displace_each_other_alone";
    attack(name, &[connections_without_end]);
}

/// Queue pairs, addresses, ports and sequence numbers, with a single incorrect value.
fn guessed_numbers(scene: &mut Scene) {
    let to = roce(TARGET);
    for at in 0..2 {
        let next = scene.learn(at);
        scene.counts(
            "guessed queue pairs",
            (DROPPED, "unknown_qp"),
            N,
            |forger, chance| {
                for _ in 0..N {
                    let qpn = 0x10_0000 | chance.below(0x80_0000) as u32;
                    let qpn = if qpn == next.qpn { qpn ^ 1 } else { qpn };
                    forger.send_body(next.from, to, send(Next { qpn, ..next }), true);
                }
            },
        );
        for other in [STRANGER, LATER, [SECOND, HONEST][at]] {
            let next = scene.learn(at);
            scene.counts(
                "a spoofed address",
                (DROPPED, "wrong_source"),
                N,
                |forger, _| {
                    for n in 0..N {
                        let from = SocketAddr::new(other.into(), 4791 + n as u16);
                        forger.send_body(from, to, send(next), true);
                    }
                },
            );
        }
        // The source port can be any value, because it's chosen by the sender (RoCEv2: entropy of
        // the flow).
        for (far, kind) in [(1 << 20, "out_of_order"), (1 << 23 | 1 << 20, "duplicate")] {
            let next = scene.learn(at);
            scene.counts("guessed PSNs", (ODD, kind), N, |forger, chance| {
                for _ in 0..N {
                    let from = SocketAddr::new(next.from.ip(), chance.below(1 << 16) as u16);
                    let psn = next.psn + far + chance.below(1 << 18) as u32;
                    forger.send_body(from, to, send(Next { psn, ..next }), true);
                }
            });
        }
        let next = scene.learn(at);
        scene.counts(
            "forged acknowledgements",
            (ODD, "stale"),
            N,
            |forger, chance| {
                for n in 0..N {
                    // ACK, RNR NAK, and NAKs for access and operation.
                    let syndrome = [0x1f, 0x20, 0x62, 0x63][n as usize % 4];
                    let psn = chance.below(1 << 24) as u32;
                    let ext = ExtHeaders {
                        aeth: Some(Aeth::new(AethSyndrome::from_wire(syndrome), Msn::new(0))),
                        ..ExtHeaders::default()
                    };
                    let forged = bth(Opcode::RcAcknowledge, Next { psn, ..next });
                    forger.send_body(next.from, to, body(&forged, &ext, &[]), true);
                }
            },
        );
        let host = scene.sessions[at].2;
        let seen = scene.sniffer.bodies_from(host);
        let seen: Vec<_> = seen.into_iter().filter(|body| body[0] <= 5).collect();
        assert!(!seen.is_empty(), "commands were seen");
        scene.counts("replay", (ODD, "duplicate"), N, |forger, _| {
            for n in 0..N {
                let again = seen[n as usize % seen.len()].clone();
                forger.send_body(next.from, to, again, false);
            }
        });
    }
}

/// Packets that are not valid, but use the correct numbers.
fn spoiled_packets(scene: &mut Scene) {
    let to = roce(TARGET);
    let next = scene.learn(0);
    scene.counts(
        "a wrong ICRC",
        ("riser_device_icrc_errors_total", ""),
        N,
        |forger, _| {
            for _ in 0..N {
                forger.send_body(next.from, to, send(next), false);
            }
        },
    );
    scene.counts(
        "truncated packets",
        (DROPPED, "malformed"),
        N,
        |forger, _| {
            for n in 0..N {
                let mut short = read(next, 0, 0);
                short.truncate(8 + n as usize % 16);
                forger.send_body(next.from, to, short, true);
            }
        },
    );
    scene.counts(
        "another partition",
        (DROPPED, "wrong_pkey"),
        N,
        |forger, _| {
            for _ in 0..N {
                let mut foreign = send(next);
                foreign[2..4].copy_from_slice(&0x8123_u16.to_be_bytes());
                forger.send_body(next.from, to, foreign, true);
            }
        },
    );
    scene.counts(
        "another service",
        (DROPPED, "unknown_qp"),
        N,
        |forger, _| {
            for _ in 0..N {
                let mut datagram = send(next);
                // UD SEND only.
                datagram[0] = 0x64;
                forger.send_body(next.from, to, datagram, true);
            }
        },
    );
}

/// Connection manager messages for connections that belong to other hosts.
fn forged_messages(scene: &mut Scene) {
    scene.counts(
        "forged disconnects",
        (CM, "unknown"),
        N,
        |forger, chance| {
            for _ in 0..N {
                // DREQ.
                let mut mad = [0; 256];
                mad[..4].copy_from_slice(&[1, 7, 2, 3]);
                mad[17] = 0x15;
                for byte in &mut mad[24..35] {
                    *byte = chance.below(256) as u8;
                }
                forger.send_mad(HONEST, TARGET, &mad);
            }
        },
    );
    scene.counts("garbled messages", (CM, "malformed"), N, |forger, _| {
        for _ in 0..N {
            let mut mad = [0xff; 256];
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            forger.send_mad(HONEST, TARGET, &mad);
        }
    });
    // For existing connections.
    let logins = scene.logins.clone();
    let refused = |scene: &Scene| scene.metric(CM, "illegal") + scene.metric(CM, "unknown");
    let before = refused(scene);
    let known = logins.clone();
    let what = "messages with one number that is wrong";
    scene.counts(what, (CM, "received"), N, |forger, _| {
        forger.know(known);
        let mut sent = 0;
        while sent < N {
            sent += u64::from(forger.manage_known() == TARGET);
        }
    });
    eventually(what, SOON, || refused(scene) >= before + N);
    // A host may have lost its connection, so this is not rejected: the target sends a response
    // which the host doesn't expect. The connection must not be closed.
    let what = "requests with the queue pair of a connection";
    scene.counts(what, (CM, "received"), N, |forger, _| {
        forger.know(logins);
        for _ in 0..N {
            forger.request_again();
        }
    });
}

/// Fragmentation needed and destination unreachable: the kernel counts these, and they must not
/// affect any packets or sessions.
fn icmp(scene: &mut Scene) {
    let counted = |scene: &Scene| {
        let target = &scene.world.target;
        target.run(|| kernel_counter("Icmp:", "InDestUnreachs"))
    };
    // Returns the number of packets used for the same reads. If the packets were smaller, it would
    // be higher.
    let packets = |scene: &mut Scene| {
        let sent = scene.metric("riser_device_packets_total", "out");
        scene.check();
        scene.metric("riser_device_packets_total", "out") - sent
    };
    let (before, few) = (counted(scene), packets(scene));
    let errors = scene.metric("riser_device_socket_errors_total", "send");
    let world = scene.world.clone();
    let mut forger = world.stranger.run(Forger::from_here);
    for _ in 0..10 * N {
        forger.send_icmp();
    }
    let arrived = || counted(scene) > before + N;
    eventually("ICMP has arrived", SOON, arrived);
    println!(
        "result: ICMP: {} counted by the kernel",
        counted(scene) - before
    );
    let now = packets(scene);
    assert!(now < few + few / 2, "{now} packets, and {few} before");
    let now = scene.metric("riser_device_socket_errors_total", "send");
    assert_eq!(now, errors);
    assert_eq!(scene.reconnects(), [0; 2]);
}

/// A host that is allowed to log in tries to access the memory of another session, using the keys
/// seen there, and the memory of the target. None of this must be possible, because the target
/// doesn't expose any memory.
fn memory_of_others(scene: &mut Scene) {
    let world = scene.world.clone();
    world.hosts.run(visit_other_target);
    let mut places = vec![(0, 1), (1 << 20, 0x100)];
    for at in 0..2 {
        scene.sniffer.skip();
        scene.write(at, at as u8 + 1);
        places.extend(scene.sniffer.memory_at(scene.sessions[at].2));
    }
    assert!(places.len() > 2, "the target has reached memory of hosts");
    let mut sniffer = world.switch.run(Sniffer::new);
    world.hosts.run(visit_other_target);
    let requests: Vec<_> = sniffer.logins().into_iter().map(|l| l.req).collect();
    for (va, key) in places {
        let remote = RemoteAddr {
            addr: va,
            rkey: RKey(key),
        };
        let requests = requests.clone();
        for op in [SendOp::Read(remote), SendOp::Write(remote)] {
            let requests = requests.clone();
            scene.counts("memory of others", (NAKS, "access"), 1, |_, _| {
                let refused = world.stranger.run(move || {
                    let mut host = Host::new();
                    let data = hostile::srp_login(&requests);
                    host.is_refused(OTHER_SRP, data, op)
                });
                assert!(refused, "{op:?}");
            });
        }
    }
}

/// Sends gratuitous ARP on behalf of the target and the hosts, which is possible if the switch
/// doesn't check addresses. This redirects the packets to the attacker. An endpoint can't prevent
/// this, and only the kernel has metrics for it. The sessions may stall. After the attack, they
/// must continue or reconnect without losing acknowledged data.
fn claimed_addresses(scene: &mut Scene) {
    let world = scene.world.clone();
    let neighbours = || std::fs::read_to_string("/proc/thread-self/net/arp").unwrap();
    let mac = world.stranger.run(super::forge::own_mac);
    let is_claimed = |table: &str| {
        let mut words = table.lines().map(|line| line.split_whitespace());
        words.any(|mut line| {
            line.next() == Some(&TARGET.to_string()) && line.any(|word| word == mac)
        })
    };
    // The kernel ignores a gratuitous ARP within one second of the previous one.
    eventually("the target's address is the stranger's", SOON, || {
        world.stranger.run(|| {
            for host in [TARGET, HONEST, SECOND] {
                super::forge::claim(host);
            }
        });
        is_claimed(&world.hosts.run(neighbours))
    });
    // A host with a stale entry will send another ARP request after some time. To speed this up, we
    // clear the entries.
    for network in [&world.target, &world.hosts] {
        network
            .run(|| super::net::sh("ip neigh flush all"))
            .unwrap();
    }
    scene.wait_recovered("sessions after claimed addresses");
}

/// On-path, with all correct values except for the key. The connection must be closed (IBTA
/// 9.7.5.2.4) without returning data, and the session must reconnect.
fn guessed_keys(scene: &mut Scene) {
    for turn in 0..6 {
        let at = turn % 2;
        let va = scene.chance.below(1 << 47);
        let key = scene.chance.below(1 << 32) as u32;
        scene.ends("a guessed key", at, "access", |next| match turn < 3 {
            true => read(next, va, key),
            false => write(Opcode::RcWriteOnly, next, va, key),
        });
        let responses = scene.sniffer.bodies_from(TARGET);
        // READ responses with 64 bytes.
        assert!(
            responses
                .iter()
                .all(|b| b[0] != 0x10 || b.len() != 12 + 4 + 64 + 4)
        );
    }
}

/// Same, but uses the attacker's own connections. Each guess will close a connection.
fn many_guessed_keys(scene: &mut Scene) {
    const GUESSES: u64 = 64;
    let world = scene.world.clone();
    let mut sniffer = world.switch.run(Sniffer::new);
    world.hosts.run(visit_other_target);
    let requests: Vec<_> = sniffer.logins().into_iter().map(|l| l.req).collect();
    scene.counts(
        "many guessed keys",
        (NAKS, "access"),
        2 * GUESSES,
        |_, chance| {
            let mut places = Vec::new();
            for guess in 0..GUESSES {
                // Use both small and random keys with random addresses.
                let bits = [8, 16, 32][guess as usize % 3];
                let rkey = RKey(chance.below(1 << bits) as u32);
                let addr = chance.below(1 << 47) & !0xfff;
                places.push(RemoteAddr { addr, rkey });
            }
            let refused = world.stranger.run(move || {
                let mut host = Host::new();
                let data = hostile::srp_login(&requests);
                let ops = places
                    .into_iter()
                    .flat_map(|place| [SendOp::Read(place), SendOp::Write(place)]);
                let refused = |op: &SendOp| host.is_refused(OTHER_SRP, data.clone(), *op);
                ops.filter(refused).count()
            });
            assert_eq!(refused, 2 * GUESSES as usize);
        },
    );
}

/// On-path, with all correct values, but with requests that are never sent by a valid peer: atomics
/// on memory that doesn't exist, invalidating keys that don't belong to the sender, and message
/// packets in the wrong order. Each must be rejected with the correct error, and will close the
/// connection.
fn rules_broken(scene: &mut Scene) {
    let va = 0x1000;
    let key = scene.chance.below(1 << 32) as u32;
    let atomic = |opcode, next, eth| {
        let ext = ExtHeaders {
            atomic_eth: Some(eth),
            ..ExtHeaders::default()
        };
        body(&bth(opcode, next), &ext, &[])
    };
    let piece = |opcode, next| body(&bth(opcode, next), &ExtHeaders::default(), &[0xbd; 1024]);
    type Attack<'a> = (&'a str, &'static str, &'a dyn Fn(Next) -> Vec<u8>);
    let attacks: &[Attack<'_>] = &[
        ("FETCH AND ADD", "access", &|next| {
            atomic(Opcode::RcFetchAdd, next, AtomicEth::fetch_add(va, key, 1))
        }),
        ("COMPARE AND SWAP", "access", &|next| {
            let eth = AtomicEth::compare_swap(va, key, 0, 1);
            atomic(Opcode::RcCmpSwap, next, eth)
        }),
        ("SEND with invalidate", "access", &|next| {
            let ext = ExtHeaders {
                ieth: Some(Ieth::new(key)),
                ..ExtHeaders::default()
            };
            body(&bth(Opcode::RcSendOnlyInvalidate, next), &ext, &[0xbd; 64])
        }),
        ("WRITE with immediate data", "access", &|next| {
            write(Opcode::RcWriteOnlyImm, next, va, key)
        }),
        ("a middle of a SEND", "invalid", &|next| {
            piece(Opcode::RcSendMiddle, next)
        }),
        ("an end of a SEND", "invalid", &|next| {
            piece(Opcode::RcSendLast, next)
        }),
        ("a middle of a WRITE", "invalid", &|next| {
            piece(Opcode::RcWriteMiddle, next)
        }),
        ("an end of a WRITE", "invalid", &|next| {
            piece(Opcode::RcWriteLast, next)
        }),
        ("a beginning that is too short", "invalid", &|next| {
            send_of(Opcode::RcSendFirst, next)
        }),
    ];
    for (turn, (what, kind, forged)) in attacks.iter().enumerate() {
        scene.ends(what, turn % 2, kind, *forged);
    }
}

/// Requests on behalf of the target with all correct values, using initiator keys that were
/// previously used by the target. After a command has completed, its keys must not be valid.
fn memory_of_initiators(scene: &mut Scene) {
    let is_refusal = |body: &Vec<u8>| body[0] == 0x11 && body[12] == 0x62;
    for turn in 0..4 {
        let at = turn % 2;
        let was = scene.reconnects()[at];
        scene.sniffer.skip();
        // Blocks that are written to the initiator's memory by the target, and then read from it.
        scene.write(at, at as u8 + 1);
        scene.check();
        let host = scene.sessions[at].2;
        let sniffer = &mut scene.sniffer;
        let mut reached = Reached::default();
        // The next value that the host expects is based on its acknowledgements.
        eventually("the host has acknowledged all", SOON, || {
            sniffer.follow(host, &mut reached);
            let (last, acknowledged) = (reached.last, reached.acknowledged);
            let distance = last
                .zip(acknowledged)
                .map(|((_, _, last), psn)| psn.wrapping_sub(last) & 0xff_ffff);
            distance.is_some_and(|distance| distance < 128) && !reached.places.is_empty()
        });
        let (from, qpn, _) = reached.last.unwrap();
        let psn = reached.acknowledged.unwrap() + 1;
        let places = reached.places;
        let world = scene.world.clone();
        let mut forger = world.stranger.run(Forger::from_here);
        let (va, key) = places[scene.chance.below(places.len() as u64) as usize];
        let next = Next { from, qpn, psn };
        let forged = match turn < 2 {
            true => read(next, va, key),
            false => write(Opcode::RcWriteOnly, next, va, key),
        };
        forger.send_body(from, roce(host), forged, true);
        let mut refused = 0;
        eventually("the host refuses it", SOON, || {
            let bodies = scene.sniffer.bodies_from(host);
            refused += bodies.iter().filter(|body| is_refusal(body)).count();
            refused > 0
        });
        println!("result: a key of the initiator's that is over: refused {refused} times");
        eventually("the session is made again", LATER_ON, || {
            scene.reconnects()[at] > was
        });
        scene.wait_recovered("sessions after forged accesses");
    }
}

/// Connection requests from many different hosts that never complete the handshake. If there is no
/// more space, new requests are dropped until the oldest can be replaced. A host that does complete
/// the handshake must still be able to connect.
fn connections_without_end(scene: &mut Scene) {
    let world = scene.world.clone();
    let mut sniffer = world.switch.run(Sniffer::new);
    world.hosts.run(visit_other_target);
    let requests: Vec<_> = sniffer.logins().into_iter().map(|l| l.req).collect();
    let now = |scene: &Scene| ["dropped", "displaced"].map(|kind| scene.metric(CM, kind));
    let was = now(scene);
    let mut forger = world
        .stranger
        .run(move || Forger::new(5, Reach::OffPath, requests, Vec::new()));
    eventually("requests displace each other", LATER_ON, || {
        for n in 0..8192 {
            forger.play(Trick::Requests);
            if n % 16 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        now(scene).iter().zip(was).all(|(now, was)| *now > was)
    });
    let counted = now(scene);
    println!(
        "result: connections without end: of {} dropped {}, displaced by newer ones {}",
        forger.sent,
        counted[0] - was[0],
        counted[1] - was[1]
    );
    let (session, _, took) = world.hosts.run(|| log_in(&client("srp", LATER), "srp"));
    println!("result: a login took {took:?} then");
    block_on(session.close());
    scene.check();
    assert_eq!(scene.reconnects(), [0; 2]);
}
