//! One attack after another, on sessions at rest: each is refused for what is wrong with it, shows
//! in a metric by as many packets as were sent, and changes nothing for a session. They are those
//! of "ReDMArk: Bypassing RDMA Security Mechanisms" (USENIX Security 2021), and what a network has
//! besides: ICMP, and hosts that claim the address of another one.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use riser_initiator::engine::{LinkState, Session};
use riser_initiator::lun::Lun;
use riser_testkit::eventually;
use riser_testkit::programs::{Pair, skip};
use riser_tests::history::BLOCK;
use riser_tests::load::{Chance, Disk};
use riser_transport::verbs::{RKey, RemoteAddr, SendOp};
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, ExtHeaders, Msn, Opcode, Psn, Qpn, Reth, emit_headers,
};

use super::forge::{Forger, Sniffer, roce};
use super::host::Host;
use super::hostile::{self, OTHER_SRP};
use super::net::{HONEST, LATER, SECOND, STRANGER, TARGET, World};
use super::{client, kernel_counter, log_in, metric, serve, visit_other_target};

/// Packets of each attack.
const N: u64 = 20;
const SOON: Duration = Duration::from_secs(20);
/// Until a session that an attacker on path has ended is back.
const LATER_ON: Duration = Duration::from_secs(90);
const BLOCKS: usize = 64;

/// Sessions at rest, over SRP and iSER, and what a sniffer knows of them.
struct Scene {
    world: Arc<World>,
    pair: Pair,
    sniffer: Sniffer,
    sessions: Vec<(Session, Lun, Ipv4Addr)>,
    chance: Chance,
}

/// What comes next to the target on a connection.
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
        let sniffer = world.switch.run(Sniffer::new);
        let sessions = [("srp", HONEST), ("iser", SECOND)].map(|(scheme, host)| {
            let (session, lun, _) = world
                .hosts
                .run(move || log_in(&client(scheme, host), scheme));
            (session, lun, host)
        });
        let mut scene = Self {
            world,
            pair,
            sniffer,
            sessions: sessions.into(),
            chance: Chance::new(0x0dd, 7),
        };
        for at in 0..2 {
            scene.write(at, at as u8 + 1);
        }
        scene
    }

    /// Blocks of a session's own, which show who has written what.
    fn write(&mut self, at: usize, byte: u8) {
        let (_, lun, _) = &mut self.sessions[at];
        let offset = (at * BLOCKS * BLOCK) as u64;
        Disk::write(lun, offset, &[byte; BLOCKS * BLOCK], false).unwrap();
    }

    /// What was written is there.
    fn check(&mut self) {
        for at in 0..2 {
            let mut bytes = [0; BLOCKS * BLOCK];
            let (_, lun, _) = &mut self.sessions[at];
            Disk::read(lun, (at * BLOCKS * BLOCK) as u64, &mut bytes).unwrap();
            assert!(bytes.iter().all(|b| *b == at as u8 + 1), "session {at}");
        }
    }

    /// What the target expects next from a session's host, and the memory of the host's that the
    /// target has reached last.
    fn learn(&mut self, at: usize) -> Next {
        self.sniffer.skip();
        // A command that reads is one packet, whose number can be seen; longer ones go in trains.
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

    /// Does something, after which a metric has grown by at least so much; the sessions stay.
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
        println!("figure: {what}: {grown} counted as {name}, {label}");
        self.check();
        assert_eq!(self.reconnects(), [0; 2], "{what}");
    }

    fn reconnects(&self) -> [u64; 2] {
        [0, 1].map(|at| self.sessions[at].0.status().reconnects())
    }

    /// Waits until both sessions are there again.
    fn come_back(&mut self, what: &str) {
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

/// A packet to the target with a right ICRC.
fn body(bth: &Bth, ext: &ExtHeaders, payload: &[u8]) -> Vec<u8> {
    let mut body = emit_headers(bth, ext).to_vec();
    body.extend_from_slice(payload);
    body.extend_from_slice(&[0; 4]);
    body
}

fn bth(opcode: Opcode, next: Next) -> Bth {
    Bth::new(opcode, Qpn::new(next.qpn), Psn::new(next.psn & 0xff_ffff))
}

/// A SEND of nonsense.
fn send(next: Next) -> Vec<u8> {
    body(
        &bth(Opcode::RcSendOnly, next),
        &ExtHeaders::default(),
        &[0xbd; 64],
    )
}

fn read(next: Next, va: u64, key: u32) -> Vec<u8> {
    let reth = Some(Reth::new(va, key, 64));
    let ext = ExtHeaders {
        reth,
        ..ExtHeaders::default()
    };
    body(&bth(Opcode::RcReadRequest, next), &ext, &[])
}

/// Carries attacks out on sessions of their own.
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
fn forged_packets_and_messages_are_refused_and_counted() {
    let attacks = [guessed_numbers, spoiled_packets, forged_messages];
    attack(
        "forged_packets_and_messages_are_refused_and_counted",
        &attacks,
    );
}

#[test]
fn icmp_changes_nothing() {
    attack("icmp_changes_nothing", &[icmp]);
}

#[test]
fn memory_of_other_sessions_is_refused_and_counted() {
    let name = "memory_of_other_sessions_is_refused_and_counted";
    attack(name, &[memory_of_others]);
}

#[test]
fn sessions_come_back_after_claimed_addresses() {
    attack(
        "sessions_come_back_after_claimed_addresses",
        &[claimed_addresses],
    );
}

#[test]
fn guessed_keys_are_refused_and_counted() {
    attack("guessed_keys_are_refused_and_counted", &[guessed_keys]);
}

/// Queue pairs, addresses, ports and sequence numbers, one of them wrong.
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
        // From any port, since that is the sender's choice (RoCEv2: entropy of the flow).
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

/// Packets with the right numbers that are none.
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

/// Messages of the connection manager about connections that others have.
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
}

/// Fragmentation needed and unreachable: the kernel counts them, and neither packets nor sessions
/// change.
fn icmp(scene: &mut Scene) {
    let counted = |scene: &Scene| {
        let target = &scene.world.target;
        target.run(|| kernel_counter("Icmp:", "InDestUnreachs"))
    };
    // Packets that the same reads take: shorter ones would be more.
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
        "figure: ICMP: {} counted by the kernel",
        counted(scene) - before
    );
    let now = packets(scene);
    assert!(now < few + few / 2, "{now} packets, and {few} before");
    let now = scene.metric("riser_device_socket_errors_total", "send");
    assert_eq!(now, errors);
    assert_eq!(scene.reconnects(), [0; 2]);
}

/// A host that may log in asks for the memory of another one's session, by the keys that it has
/// seen there, and for memory of the target. There is none that it may reach: the target exposes
/// no memory at all.
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

/// Gratuitous ARP in the names of the target and of hosts: what a switch without address checks
/// lets a stranger do. Sessions may stop; when it is over they go on, or come back.
fn claimed_addresses(scene: &mut Scene) {
    let world = scene.world.clone();
    world.stranger.run(|| {
        for _ in 0..5 {
            for host in [TARGET, HONEST, SECOND] {
                super::forge::claim(host);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    // Hosts that have moved away ask again at last; here at once.
    for network in [&world.target, &world.hosts] {
        network
            .run(|| super::net::sh("ip neigh flush all"))
            .unwrap();
    }
    scene.come_back("sessions after claimed addresses");
}

/// On path, with all the right numbers but the key. The connection ends (IBTA 9.7.5.2.4), nothing
/// is answered, and the session comes back.
fn guessed_keys(scene: &mut Scene) {
    for at in 0..2 {
        let was = scene.reconnects()[at];
        let before = scene.metric(NAKS, "");
        let world = scene.world.clone();
        let mut forger = world.stranger.run(Forger::from_here);
        let next = scene.learn(at);
        let va = scene.chance.below(1 << 47);
        let key = scene.chance.below(1 << 32) as u32;
        forger.send_body(next.from, roce(TARGET), read(next, va, key), true);
        eventually("a guessed key is counted", SOON, || {
            scene.metric(NAKS, "") > before
        });
        eventually("the session is made again", LATER_ON, || {
            scene.reconnects()[at] > was
        });
        scene.come_back("sessions after guessed keys");
        let answers = scene.sniffer.bodies_from(TARGET);
        // READ responses of 64 bytes.
        assert!(
            answers
                .iter()
                .all(|b| b[0] != 0x10 || b.len() != 12 + 4 + 64 + 4)
        );
    }
}
