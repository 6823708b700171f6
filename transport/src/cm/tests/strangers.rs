//! An attacker sends arbitrary messages using forged addresses but cannot see any responses:
//! connections should not be closed, hosts should be able to connect, and the memory used for the
//! attacker should be limited.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use chacha20::rand_core::Rng;

use super::*;
use crate::wire::cm_msg::{CM_CLASS_VERSION, CmAttribute};

/// Creates a REQ from `from` with these values, as it could be forged by an attacker.
fn req_mad(from: PeerAddr, guid: u64, comm_id: u32, qpn: u32, transaction: u64) -> Mad {
    let mut forger = machine(9, 99);
    let mut params = req_params(9, 2, qpn);
    params.primary.local_gid = Gid::from(from);
    forger.send_req(Instant::now(), addr(2), &params).unwrap();
    let (_, mad) = forger.poll_transmit().unwrap();
    let (_, CmMessage::Req(mut req)) = CmMessage::parse(&mad).unwrap() else {
        panic!()
    };
    req.ca_guid = CaGuid(guid);
    req.local_comm_id = CommId(comm_id);
    CmMessage::Req(req).emit(TransactionId(transaction))
}

/// Accepts all requests, like a user that doesn't reject anything.
fn accept_all(cm: &mut Cm, now: Instant) -> Vec<IbCmId> {
    let mut accepted = Vec::new();
    while let Some(event) = cm.poll_event() {
        if let IbCmEventKind::ReqReceived { .. } = event.kind {
            cm.send_rep(now, event.id, &rep_params(7)).unwrap();
            accepted.push(event.id);
        }
    }
    accepted
}

fn rejections(cm: &mut Cm) -> Vec<RejReason> {
    let mut reasons = Vec::new();
    while let Some((_, mad)) = cm.poll_transmit() {
        if let (_, CmMessage::Rej(rej)) = CmMessage::parse(&mad).unwrap() {
            reasons.push(rej.reason);
        }
    }
    reasons
}

#[test]
fn forged_request_closes_nothing() {
    let mut pair = Pair::new();
    let ids = pair.established();
    // First only the service is wrong, then the adapter, then everything.
    let mut wrong = req_mad(addr(1), 1, 5, ACTIVE_QPN, 1);
    wrong[32..40].copy_from_slice(&0xdead_u64.to_be_bytes());
    let theirs = ids.a.comm_id().0;
    for mad in [
        wrong,
        req_mad(addr(3), 1, 5, ACTIVE_QPN, 2),
        req_mad(addr(1), 77, theirs, ACTIVE_QPN, 3),
        req_mad(addr(1), 1, 5, ACTIVE_QPN, 4),
        req_mad(addr(1), 1, theirs, 0x77, 5),
    ] {
        pair.p.handle_mad(pair.now, addr(1), &mad).unwrap();
        assert_eq!(pair.p.state(ids.p), CmState::Established);
    }
    assert_eq!(
        rejections(&mut pair.p),
        [RejReason::InvalidServiceId, RejReason::InvalidGid]
    );
    assert_eq!(accept_all(&mut pair.p, pair.now).len(), 3);
    // They are not confirmed, and the responses are ignored by the host that receives them.
    while let Some((_, mad)) = pair.p.poll_transmit() {
        pair.a.handle_mad(pair.now, addr(2), &mad).unwrap();
    }
    for _ in 0..200 {
        pair.pass(Duration::from_millis(100));
        pair.p_to_a();
        pair.a_to_p();
    }
    assert_eq!(
        pair.states(ids),
        (CmState::Established, CmState::Established)
    );
    assert_eq!(pair.p.id_count(), 2);
}

#[test]
fn silent_peer_is_dropped_after_few_responses() {
    for exponent in [0, 20, 31] {
        let mut pair = Pair::new();
        let mut params = req_params(1, 2, 5);
        params.local_cm_timeout = CmTimeout::new(exponent);
        params.max_cm_retries = Bits::truncate(15);
        pair.a.send_req(pair.now, addr(2), &params).unwrap();
        pair.a_to_p();
        let id = accept_all(&mut pair.p, pair.now)[0];
        let (begin, mut sent) = (pair.now, 0);
        while pair.p.state(id) == CmState::RepSent {
            pair.now = pair.p.poll_timeout().unwrap();
            pair.p.handle_timeout(pair.now);
            while pair.p.poll_transmit().is_some() {
                sent += 1;
            }
        }
        assert!(pair.now - begin <= pair.p.config.max_half_open);
        // REPs, and a REJ at the end.
        assert!(
            sent <= 5,
            "{sent} responses for an interval of 2^{exponent}"
        );
    }
}

#[test]
fn half_open_lifetime_ignores_requested_timeout() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    pair.a
        .send_mra(ids.a, CmTimeout::new(31), PrivateData::default())
        .unwrap();
    pair.a_to_p();
    assert_eq!(pair.p.state(ids.p), CmState::MraRepRcvd);
    pair.pass(pair.p.config.max_half_open);
    assert_eq!(pair.p.state(ids.p), CmState::Timewait);
}

#[test]
fn proven_address_gets_all_requested_retries() {
    let mut pair = Pair::new();
    pair.established();
    let mut params = req_params(1, 2, 5);
    params.max_cm_retries = Bits::truncate(9);
    pair.a.send_req(pair.now, addr(2), &params).unwrap();
    pair.a_to_p();
    let id = accept_all(&mut pair.p, pair.now)[0];
    let mut sent = 0;
    while pair.p.state(id) == CmState::RepSent {
        while pair.p.poll_transmit().is_some() {
            sent += 1;
        }
        let at = pair.p.poll_timeout().unwrap();
        pair.p.handle_timeout(at);
    }
    assert_eq!(sent, 10);
}

#[test]
fn full_backlog_displaces_oldest_connection() {
    let mut pair = Pair::new();
    let req = |n: u8| req_mad(addr(100 + n), 5, 1, 9, 1);
    for n in 0..8 {
        pair.p.handle_mad(pair.now, addr(100 + n), &req(n)).unwrap();
        pair.now += Duration::from_millis(1);
    }
    // Requests the user has not yet responded to should not be displaced.
    let more = req(8);
    pair.pass(Duration::from_secs(1));
    pair.p.handle_mad(pair.now, addr(108), &more).unwrap();
    assert_eq!(pair.p.counters().dropped, 1);
    let ids = accept_all(&mut pair.p, pair.now);
    assert_eq!(ids.len(), 8);
    // The same is true if the peer had no time to confirm.
    pair.now += Duration::from_millis(19);
    pair.p.handle_mad(pair.now, addr(108), &more).unwrap();
    assert_eq!(pair.p.counters().dropped, 2);
    pair.now += Duration::from_millis(1);
    pair.p.handle_mad(pair.now, addr(108), &more).unwrap();
    assert_eq!(pair.p.state(ids[0]), CmState::Timewait);
    assert!(
        ids[1..]
            .iter()
            .all(|id| pair.p.state(*id) == CmState::RepSent)
    );
    let c = pair.p.counters();
    assert_eq!((c.dropped, c.displaced), (2, 1));
    assert_eq!(accept_all(&mut pair.p, pair.now).len(), 1);
}

/// While the socket is blocked, responses to duplicates are limited, and their memory is released
/// later.
#[test]
fn full_socket_releases_outbox_memory() {
    let mut pair = Pair::new();
    let req = req_mad(addr(100), 5, 1, 9, 1);
    for _ in 0..10_000 {
        pair.p.handle_mad(pair.now, addr(100), &req).unwrap();
        accept_all(&mut pair.p, pair.now);
    }
    assert_eq!(pair.p.outbox.len(), pair.p.config.max_outbox);
    while pair.p.poll_transmit().is_some() {}
    let kept = pair.p.outbox.capacity();
    assert!(kept <= KEPT_OUTBOX, "{kept}");
}

#[test]
fn single_address_cannot_fill_backlog() {
    let mut cm = machine(2, 2);
    let listener = cm.listen(SERVICE, u64::MAX, 256).unwrap();
    let mut now = Instant::now();
    for n in 0..2000 {
        let mad = req_mad(addr(1), 1, n + 1, n + 17, 1);
        cm.handle_mad(now, addr(1), &mad).unwrap();
        accept_all(&mut cm, now);
        now += Duration::from_micros(100);
        cm.handle_timeout(now);
    }
    assert_eq!(cm.listeners.half_open[&(listener, addr(1))], 192);
    for n in 0..64 {
        let mad = req_mad(addr(3), 3, n + 1, n + 17, 1);
        cm.handle_mad(now, addr(3), &mad).unwrap();
    }
    assert_eq!(accept_all(&mut cm, now).len(), 64);
}

/// Creates an instance with the maximum number of half-open connections, all of which can be
/// displaced.
fn full_of_half_open(mut change: impl FnMut(&mut CmConfig)) -> (Cm, Vec<IbCmId>, Instant) {
    let mut config = CmConfig::new(CaGuid(2));
    change(&mut config);
    let mut cm = Cm::new(config, 0, 0, [2; 32]);
    cm.listen(SERVICE, u64::MAX, 8).unwrap();
    let now = Instant::now();
    for n in 0..8 {
        let mad = req_mad(addr(100 + n), 5, 1, 9, 1);
        cm.handle_mad(now, addr(100 + n), &mad).unwrap();
    }
    let ids = accept_all(&mut cm, now);
    assert_eq!(ids.len(), 8);
    (cm, ids, now + Duration::from_secs(1))
}

#[test]
fn rejected_request_displaces_nothing() {
    let kept = |cm: &Cm, ids: &[IbCmId]| {
        assert!(ids.iter().all(|id| cm.state(*id) == CmState::RepSent));
        assert_eq!(cm.counters().displaced, 0);
    };
    let req = req_mad(addr(1), 5, 1, 9, 1);
    // There is no ID available.
    let (mut cm, ids, now) = full_of_half_open(|config| config.max_ids = 9);
    rejections(&mut cm);
    cm.handle_mad(now, addr(1), &req).unwrap();
    assert_eq!(rejections(&mut cm), [RejReason::NoResources]);
    kept(&cm, &ids);
    // There is no space for the event, since eight are pending.
    let (mut cm, ids, now) = full_of_half_open(|config| config.max_events = 8);
    for n in 0..8 {
        let id = cm.listen(ServiceId(n), u64::MAX, 1).unwrap();
        let mad = req_mad(addr(50), 5, 1 + n as u32, 9, 1);
        let (transaction, CmMessage::Req(mut req)) = CmMessage::parse(&mad).unwrap() else {
            panic!()
        };
        req.service_id = ServiceId(n);
        let mad = CmMessage::Req(req).emit(transaction);
        cm.handle_mad(now, addr(50), &mad).unwrap();
        assert_eq!(cm.listeners.by_id[&id].half_open, 1);
    }
    cm.handle_mad(now, addr(1), &req).unwrap();
    assert_eq!(cm.counters().dropped, 1);
    kept(&cm, &ids);
}

/// A host has used the rest of an empty backlog, followed by requests from other hosts. A new
/// request must displace its own oldest connection, even if it doesn't exceed its share.
#[test]
fn new_request_displaces_own_oldest_connection() {
    let mut cm = machine(2, 2);
    let listener = cm.listen(SERVICE, u64::MAX, 256).unwrap();
    let mut now = Instant::now();
    let send_request = |cm: &mut Cm, now, host, n: u32| {
        let mad = req_mad(addr(host), 1, n + 1, n + 17, 1);
        cm.handle_mad(now, addr(host), &mad).unwrap();
        accept_all(cm, now).len()
    };
    let first: usize = (0..192).map(|n| send_request(&mut cm, now, 1, n)).sum();
    let others: usize = (0..60).map(|n| send_request(&mut cm, now, 3, n)).sum();
    assert_eq!((first, others), (192, 60));
    now += Duration::from_millis(20);
    for n in 1..=10 {
        assert_eq!(send_request(&mut cm, now, 1, 1000 + n), 1, "request {n}");
        assert_eq!(cm.counters().displaced, u64::from(n));
        assert_eq!(cm.listeners.half_open[&(listener, addr(1))], 192);
    }
}

/// A busy host restores 150 sessions at once.
#[test]
fn slow_host_establishes_many_connections_at_once() {
    let (mut a, mut p) = (machine(1, 1), machine(2, 2));
    p.listen(SERVICE, u64::MAX, 256).unwrap();
    let mut now = Instant::now();
    let (mut accepted, mut replies) = (Vec::new(), Vec::new());
    for n in 0..150 {
        let params = req_params(1, 2, n + 17);
        a.send_req(now, addr(2), &params).unwrap();
        let (_, req) = a.poll_transmit().unwrap();
        p.handle_mad(now, addr(1), &req).unwrap();
        while let Some(IbCmEvent { id, kind }) = p.poll_event() {
            if let IbCmEventKind::ReqReceived { .. } = kind {
                p.send_rep(now, id, &rep_params(0x1000 + n)).unwrap();
                accepted.push(id);
            }
        }
        replies.extend(std::iter::from_fn(|| p.poll_transmit()));
        now += Duration::from_millis(1);
        p.handle_timeout(now);
    }
    for (_, rep) in replies {
        a.handle_mad(now, addr(2), &rep).unwrap();
        while let Some(IbCmEvent { id, kind }) = a.poll_event() {
            assert!(
                matches!(kind, IbCmEventKind::RepReceived { .. }),
                "{kind:?}"
            );
            a.send_rtu(id, PrivateData::default()).unwrap();
        }
        while let Some((_, rtu)) = a.poll_transmit() {
            p.handle_mad(now, addr(1), &rtu).unwrap();
        }
    }
    let is_up = |id: &&IbCmId| p.state(**id) == CmState::Established;
    assert_eq!(accepted.iter().filter(is_up).count(), 150);
}

/// This also tests the cost of a REJ: the oldest one should be found without a search.
#[test]
fn oldest_kept_rej_is_removed_first() {
    let mut config = CmConfig::new(CaGuid(2));
    config.max_ids = 100;
    let mut cm = Cm::new(config, 0, 0, [2; 32]);
    cm.listen(SERVICE, u64::MAX, 8).unwrap();
    let mut now = Instant::now();
    let mut refused = Vec::new();
    for n in 0..1000 {
        let mad = req_mad(addr(1), 1, n + 1, n + 17, 1);
        cm.handle_mad(now, addr(1), &mad).unwrap();
        let id = cm.poll_event().unwrap().id;
        let (info, data) = (AdditionalInfo::default(), PrivateData::default());
        cm.send_rej(now, id, RejReason::ConsumerDefined, info, data)
            .unwrap();
        refused.push(id);
        now += Duration::from_micros(10);
        cm.outbox.clear();
        assert_eq!(cm.finished.len(), refused.len().min(99));
        assert!(cm.id_count() <= 100 && cm.peers.by_req.len() <= 100 && cm.timers.len() <= 100);
    }
    let kept = |id: &IbCmId| cm.conns.contains_key(id);
    assert!(!refused[..901].iter().any(kept) && refused[901..].iter().all(kept));
}

/// State of a connection attempt by a valid host.
#[derive(Clone, Copy)]
struct Attempt {
    began: Instant,
    /// Set if the active side has sent its RTU, and if the passive side has received it.
    is_up: [bool; 2],
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// A MAD is received by the server (0) or by a host.
    Deliver { to: u8, from: PeerAddr, mad: Mad },
    /// A host sends a connection request.
    Connect { host: u8 },
    /// The attacker sends a message.
    Stranger,
}

/// A server (host 2), valid hosts that connect to it and stay connected, and an attacker.
struct World {
    cms: HashMap<u8, Cm>,
    now: Instant,
    queue: BinaryHeap<Reverse<(Instant, u64, Step)>>,
    order: u64,
    random: ChaCha12Rng,
    attempts: HashMap<(u8, u32), Attempt>,
    /// Last QP number assigned by the server.
    server_qpn: u32,
    /// Requests from valid hosts, by their ID on the server.
    served: HashMap<IbCmId, (u8, u32)>,
}

const SERVER: u8 = 2;
const HOSTS: std::ops::Range<u8> = 10..14;
const ONE_WAY: Duration = Duration::from_micros(250);
const BACKLOG: usize = 64;

impl World {
    fn new(seed: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_be_bytes());
        let mut random = ChaCha12Rng::from_seed(bytes);
        let mut cms = HashMap::new();
        for host in HOSTS.chain([SERVER]) {
            random.fill_bytes(&mut bytes);
            let mut config = CmConfig::new(CaGuid(host.into()));
            config.max_half_open_per_peer = BACKLOG / 4;
            config.max_ids = 400;
            cms.insert(host, Cm::new(config, 0, 0, bytes));
        }
        let server = cms.get_mut(&SERVER).unwrap();
        server.listen(SERVICE, u64::MAX, BACKLOG).unwrap();
        Self {
            cms,
            now: Instant::now(),
            queue: BinaryHeap::new(),
            order: 0,
            random,
            attempts: HashMap::new(),
            server_qpn: 0x1000,
            served: HashMap::new(),
        }
    }

    fn below(&mut self, bound: u32) -> u32 {
        self.random.next_u32() % bound
    }

    fn at(&mut self, at: Instant, step: Step) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, step)));
    }

    /// Returns an existing host or a random address.
    fn anybody(&mut self) -> PeerAddr {
        match self.below(3) {
            0 => addr(HOSTS.start + self.below(HOSTS.len() as u32) as u8),
            _ => Ipv4Addr::from(self.random.next_u32()).into(),
        }
    }

    fn connect(&mut self, host: u8) {
        // QP numbers are assigned like in `rdma_rxe` and known to the attacker.
        let qpn = 17 + self.attempts.len() as u32;
        let mut params = req_params(host, SERVER, qpn);
        params.max_cm_retries = Bits::truncate(15);
        let cm = self.cms.get_mut(&host).unwrap();
        cm.send_req(self.now, addr(SERVER), &params).unwrap();
        let attempt = Attempt {
            began: self.now,
            is_up: [false; 2],
        };
        self.attempts.insert((host, qpn), attempt);
    }

    /// Processes events and sends MADs until nothing is left.
    fn flush(&mut self, host: u8) {
        let now = self.now;
        let cm = self.cms.get_mut(&host).unwrap();
        while let Some(event) = cm.poll_event() {
            let id = event.id;
            match event.kind {
                IbCmEventKind::ReqReceived { peer, req, .. } => {
                    self.server_qpn += 1;
                    let params = rep_params(self.server_qpn);
                    cm.send_rep(now, id, &params).unwrap();
                    if let Some(host) = HOSTS.clone().find(|host| addr(*host) == peer) {
                        self.served.insert(id, (host, req.qpn.value()));
                    }
                }
                IbCmEventKind::RepReceived { .. } => {
                    cm.send_rtu(id, PrivateData::default()).unwrap();
                    let qpn = cm.conns[&id].local_qpn.value();
                    self.attempts.get_mut(&(host, qpn)).unwrap().is_up[0] = true;
                }
                IbCmEventKind::RtuReceived { .. } => {
                    let attempt = self.attempts.get_mut(&self.served[&id]).unwrap();
                    attempt.is_up[1] = true;
                }
                kind => assert!(
                    host == SERVER && cm.state(id) != CmState::Established,
                    "an honest host got {kind:?}"
                ),
            }
        }
        let from = addr(host);
        while let Some((to, mad)) = self.cms.get_mut(&host).unwrap().poll_transmit() {
            let to = HOSTS.chain([SERVER]).find(|host| addr(*host) == to);
            if let Some(to) = to {
                let at = self.now + ONE_WAY;
                self.at(at, Step::Deliver { to, from, mad });
            }
        }
    }

    /// Sends a random message using IDs and numbers that are public or can be guessed.
    fn strange(&mut self) {
        let from = self.anybody();
        let host = (self.below(4) == 0).then(|| HOSTS.start + self.below(4) as u8);
        let to = host.unwrap_or(SERVER);
        let from = if host.is_some() { addr(SERVER) } else { from };
        let guid = u64::from(HOSTS.start) + u64::from(self.below(5));
        let (qpn, transaction) = (17 + self.below(80), u64::from(self.below(8)));
        let mad = match self.below(2) {
            0 => {
                let id = 1 + self.below(20);
                req_mad(from, guid, id, qpn, transaction)
            }
            _ => {
                let mut mad = [0; 256];
                mad[..4].copy_from_slice(&[1, 7, CM_CLASS_VERSION, 3]);
                self.random.fill_bytes(&mut mad[24..]);
                mad[17] = CmAttribute::Req as u8 + self.below(11) as u8;
                if self.below(2) == 0 {
                    // For example, the REJ of a peer that timed out without receiving a response.
                    mad[28..32].fill(0);
                    mad[33] = (u16::from(RejReason::Timeout) as u8) << 1;
                    mad[34..36].copy_from_slice(&u16::from(RejReason::Timeout).to_be_bytes());
                    mad[36..44].copy_from_slice(&guid.to_be_bytes());
                }
                mad
            }
        };
        let cm = self.cms.get_mut(&to).unwrap();
        // Invalid messages must have no effect.
        let _ = cm.handle_mad(self.now, from, &mad);
    }

    fn assert_bounded(&self) {
        for cm in self.cms.values() {
            let half_open: usize = cm.listeners.half_open.values().sum();
            let most = BACKLOG - BACKLOG / 4;
            assert!(half_open <= BACKLOG && cm.listeners.half_open.values().all(|n| *n <= most));
            assert!(cm.id_count() <= 400 && cm.peers.by_req.len() <= cm.conns.len());
            assert!(cm.peers.claims.len() <= 2 * cm.conns.len());
            assert!(cm.listeners.unconfirmed.len() <= 2 * half_open);
            assert!(cm.finished.len() <= cm.conns.len());
            assert!(cm.timers.len() <= cm.conns.len());
            assert!(cm.outbox.len() <= cm.config.max_outbox);
        }
    }

    /// Runs for `time`. The attacker sends `per_step` messages every `pause`.
    fn run(&mut self, time: Duration, pause: Duration, per_step: u32) {
        let end = self.now + time;
        self.at(self.now, Step::Stranger);
        loop {
            let timers = self.cms.values().filter_map(Cm::poll_timeout);
            let step = self.queue.peek().map(|Reverse((at, ..))| *at);
            let Some(next) = timers.chain(step).min().filter(|at| *at < end) else {
                return;
            };
            self.now = next.max(self.now);
            if step == Some(next) {
                let Reverse((_, _, step)) = self.queue.pop().unwrap();
                match step {
                    Step::Deliver { to, from, mad } => {
                        let cm = self.cms.get_mut(&to).unwrap();
                        cm.handle_mad(self.now, from, &mad).unwrap();
                    }
                    Step::Connect { host } => self.connect(host),
                    Step::Stranger => {
                        for _ in 0..per_step {
                            self.strange();
                        }
                        self.assert_bounded();
                        self.at(self.now + pause, Step::Stranger);
                    }
                }
            } else {
                for cm in self.cms.values_mut() {
                    cm.handle_timeout(self.now);
                }
            }
            for host in HOSTS.chain([SERVER]) {
                self.flush(host);
            }
            for ((host, qpn), attempt) in &self.attempts {
                let is_up = attempt.is_up == [true; 2];
                let patience = Duration::from_secs(3);
                assert!(
                    is_up || self.now < attempt.began + patience,
                    "host {host} could not connect queue pair {qpn}"
                );
            }
        }
    }

    fn connect_over(&mut self, time: Duration, count: u32) {
        for _ in 0..count {
            let host = HOSTS.start + self.below(HOSTS.len() as u32) as u8;
            let at = self.now + time * self.below(1000) / 1000;
            self.at(at, Step::Connect { host });
        }
    }

    /// Checks that all peers are still connected.
    fn assert_connected(&self, count: usize) {
        assert_eq!(self.attempts.len(), count);
        let server = &self.cms[&SERVER];
        let up = |(id, conn): (&IbCmId, &Conn)| {
            let is_honest = self.served.contains_key(id);
            is_honest && conn.state == CmState::Established
        };
        let served = server.conns.iter().filter(|conn| up(*conn)).count();
        assert_eq!(served, count);
        for host in HOSTS {
            for conn in self.cms[&host].conns.values() {
                assert!(conn.identity.is_some() || conn.state == CmState::Established);
            }
        }
    }
}

#[test]
fn valid_hosts_connect_during_forged_flood() {
    let mut world = World::new(1);
    world.connect_over(Duration::from_secs(1), 20);
    // Ten thousand messages per second, half of them requests.
    world.run(Duration::from_secs(4), Duration::from_millis(1), 10);
    world.assert_connected(20);
    assert!(world.cms[&SERVER].counters().displaced > 1000);
}

/// `RISER_CM_SEEDS` sets the number of seeds, each running for a minute of virtual time.
#[test]
fn attacker_neither_closes_nor_prevents_connections() {
    let seeds = std::env::var("RISER_CM_SEEDS").map_or(2, |n| n.parse().unwrap());
    for seed in 0..seeds {
        let mut world = World::new(1000 + seed);
        world.connect_over(Duration::from_secs(50), 60);
        let (pause, per_step) = (1 + world.below(200), 1 + world.below(40));
        let pause = Duration::from_millis(pause.into());
        world.run(Duration::from_secs(60), pause, per_step);
        world.assert_connected(60);
    }
}
