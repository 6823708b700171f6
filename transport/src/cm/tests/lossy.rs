//! Two hosts with two workers each and their users, using a virtual clock and a network that drops,
//! duplicates and reorders packets. In all cases no state should remain, and both sides must agree
//! if there was a connection, with one exception: if all REPs or RTUs within the limit for an
//! unproven address were lost, the passive side may time out before it receives the first data
//! packet. In this case, the active side will detect this since that packet is not acknowledged.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use chacha20::rand_core::Rng;

use super::*;

#[derive(Clone, Copy)]
struct Faults {
    /// Loss in percent.
    loss: u32,
    duplication: u32,
    /// Maximum one-way delay in milliseconds.
    delay: u32,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Deliver {
        host: usize,
        mad: Mad,
    },
    User {
        side: usize,
        id: IbCmId,
        act: Act,
    },
    /// Data packet from the active side, with the number of retries.
    Data {
        side: usize,
        id: IbCmId,
        retries: u8,
    },
    Connect {
        side: usize,
        number: u16,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    Accept,
    Rtu,
    Disconnect,
    Drep,
    LetGo,
}

struct World {
    /// Index is 2·host + worker.
    cms: [Cm; 4],
    start: Instant,
    now: Instant,
    queue: BinaryHeap<Reverse<(Instant, u64, Step)>>,
    order: u64,
    random: ChaCha12Rng,
    faults: Faults,
    /// Connection numbers by side and ID.
    numbers: HashMap<(usize, IbCmId), (u16, bool)>,
    /// IDs that were established. If a duplicate request is received after timewait, it creates a
    /// second passive ID, which should not be established.
    established: HashSet<(usize, IbCmId)>,
    /// IDs that have reported their last event or were released by the user.
    ended: HashSet<(usize, IbCmId)>,
}

const SLOTS: u16 = 40;

impl World {
    fn new(seed: u8, faults: Faults) -> Self {
        let start = Instant::now();
        let mut cms = [0, 1, 2, 3].map(|machine| {
            let config = CmConfig::new(CaGuid(u64::from(machine / 2)));
            Cm::new(
                config,
                machine % 2,
                1,
                [seed.wrapping_add(60 * machine as u8); 32],
            )
        });
        for cm in &mut cms {
            cm.listen(SERVICE, u64::MAX, 1000).unwrap();
        }
        Self {
            cms,
            start,
            now: start,
            queue: BinaryHeap::new(),
            order: 0,
            random: ChaCha12Rng::from_seed([seed ^ 0xa5; 32]),
            faults,
            numbers: HashMap::new(),
            established: HashSet::new(),
            ended: HashSet::new(),
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.next_u32() % 100 < percent
    }

    fn later(&mut self, most: u32, step: Step) {
        let delay = Duration::from_micros(u64::from(self.random.next_u32() % (most * 1000 + 1)));
        self.order += 1;
        self.queue
            .push(Reverse((self.now + delay, self.order, step)));
    }

    fn user(&mut self, side: usize, id: IbCmId, most: u32, act: Act) {
        self.later(most, Step::User { side, id, act });
    }

    fn established(&mut self, side: usize, id: IbCmId) {
        self.established.insert((side, id));
        // Every third connection is closed by both sides at about the same time.
        if !self.random.next_u32().is_multiple_of(3) || self.numbers[&(side, id)].1 {
            self.user(side, id, 3000, Act::Disconnect);
        }
    }

    fn connect(&mut self, side: usize, number: u16) {
        let (from, to) = (side as u8 / 2 + 1, 2 - side as u8 / 2);
        let mut params = req_params(from, to, 0x1000 + u32::from(number));
        params.max_cm_retries = Bits::truncate(15);
        params.private_data = PrivateData::new(&number.to_be_bytes()).unwrap();
        let id = self.cms[side]
            .send_req(self.now, addr(to), &params)
            .unwrap();
        self.numbers.insert((side, id), (number, true));
        if self.chance(5) {
            self.user(side, id, 100, Act::LetGo);
        }
    }

    fn act(&mut self, side: usize, id: IbCmId, act: Act) {
        let now = self.now;
        let cm = &mut self.cms[side];
        // The connection may already have been closed. In this case the call returns an error.
        match act {
            Act::Accept => {
                let (number, _) = self.numbers[&(side, id)];
                let _ = cm.send_rep(now, id, &rep_params(0x8000 + u32::from(number)));
            }
            Act::Rtu => {
                if cm.send_rtu(id, PrivateData::default()).is_ok() {
                    self.established(side, id);
                    // Half of the connections are idle for a while.
                    let idle = if self.chance(50) { 20 } else { 20_000 };
                    let retries = 7;
                    self.later(idle, Step::Data { side, id, retries });
                }
            }
            Act::Disconnect => {
                let _ = cm.send_dreq(now, id, PrivateData::default());
            }
            Act::Drep => {
                let _ = cm.send_drep(now, id, PrivateData::default());
            }
            Act::LetGo => {
                if cm.destroy(now, id).is_ok() {
                    assert!(self.ended.insert((side, id)), "it ends once");
                }
            }
        }
    }

    /// Sends a packet via the QP of a connection. This has the same effect as an RTU (IBTA
    /// 12.9.7.2). The reliable connection will resend it, and fails if it is not acknowledged.
    fn data(&mut self, side: usize, id: IbCmId, retries: u8) {
        if self.cms[side].state(id) != CmState::Established {
            return;
        }
        if !self.chance(self.faults.loss) && self.arrives(side, id) {
            return;
        }
        match retries.checked_sub(1) {
            Some(retries) => {
                self.order += 1;
                let at = self.now + Duration::from_millis(500);
                let step = Step::Data { side, id, retries };
                self.queue.push(Reverse((at, self.order, step)));
            }
            None => self.act(side, id, Act::Disconnect),
        }
    }

    /// Returns whether the peer's QP can receive a packet.
    fn arrives(&mut self, side: usize, id: IbCmId) -> bool {
        let remote = self.cms[side].conns[&id].remote_id.map(IbCmId);
        let to = (2 * (1 - side / 2)..).take(2);
        let mut peers = to.filter_map(|to| Some((to, remote?)));
        let found = peers.find(|(to, peer)| self.cms[*to].conns.contains_key(peer));
        let Some((to, peer)) = found else {
            return false;
        };
        match self.cms[to].state(peer) {
            CmState::RepSent | CmState::MraRepRcvd => {
                self.cms[to].establish(self.now, peer).unwrap();
                self.established(to, peer);
                true
            }
            state => state == CmState::Established,
        }
    }

    fn on_event(&mut self, side: usize, event: IbCmEvent) {
        let id = event.id;
        if event.kind.is_last() {
            assert!(self.ended.insert((side, id)), "it ends once");
        }
        match event.kind {
            IbCmEventKind::ReqReceived { req, .. } => {
                let number = u16::from_be_bytes([req.private_data[0], req.private_data[1]]);
                self.numbers.insert((side, id), (number, false));
                match self.random.next_u32() % 10 {
                    0 => {
                        self.user(side, id, 50, Act::LetGo);
                    }
                    1..=3 => {
                        self.cms[side]
                            .send_mra(id, CmTimeout::new(17), PrivateData::default())
                            .unwrap();
                        self.user(side, id, 800, Act::Accept);
                    }
                    _ => self.user(side, id, 20, Act::Accept),
                }
            }
            IbCmEventKind::RepReceived { .. } => match self.random.next_u32() % 20 {
                0 => self.user(side, id, 50, Act::LetGo),
                1..=4 => {
                    self.cms[side]
                        .send_mra(id, CmTimeout::new(17), PrivateData::default())
                        .unwrap();
                    self.user(side, id, 800, Act::Rtu);
                }
                _ => self.user(side, id, 20, Act::Rtu),
            },
            IbCmEventKind::RtuReceived { .. } => self.established(side, id),
            IbCmEventKind::DreqReceived { .. } => {
                // The peer only sends data when it is established, so the RTU was lost.
                self.established.insert((side, id));
                self.user(side, id, 20, Act::Drep);
            }
            _ => {}
        }
    }

    fn flush(&mut self) {
        for side in 0..self.cms.len() {
            while let Some(event) = self.cms[side].poll_event() {
                self.on_event(side, event);
            }
            while let Some((to, mad)) = self.cms[side].poll_transmit() {
                assert_eq!(to, addr(2 - side as u8 / 2));
                let copies = if self.chance(self.faults.loss) {
                    0
                } else if self.chance(self.faults.duplication) {
                    2
                } else {
                    1
                };
                for _ in 0..copies {
                    self.later(
                        self.faults.delay,
                        Step::Deliver {
                            host: 1 - side / 2,
                            mad,
                        },
                    );
                }
            }
        }
    }

    /// Runs until there is nothing left to do.
    fn run(&mut self) {
        loop {
            self.flush();
            let step = self.queue.peek().map(|Reverse((at, ..))| *at);
            let timers = self.cms.iter().filter_map(Cm::poll_timeout).min();
            let Some(next) = step.into_iter().chain(timers).min() else {
                return;
            };
            self.now = next.max(self.now);
            assert!(
                self.now - self.start < Duration::from_secs(600),
                "it never ends"
            );
            if step == Some(next) {
                let Reverse((_, _, step)) = self.queue.pop().unwrap();
                match step {
                    Step::Deliver { host, mad } => {
                        let worker = worker_of(&mad, 1).unwrap() as usize;
                        let from = addr(2 - host as u8);
                        self.cms[2 * host + worker]
                            .handle_mad(self.now, from, &mad)
                            .unwrap();
                    }
                    Step::User { side, id, act } => self.act(side, id, act),
                    Step::Data { side, id, retries } => self.data(side, id, retries),
                    Step::Connect { side, number } => self.connect(side, number),
                }
            } else {
                for cm in &mut self.cms {
                    cm.handle_timeout(self.now);
                }
            }
        }
    }
}

/// Returns the number of connections established on both sides, and only on the active side.
fn agree_and_leave_nothing(seed: u8, faults: Faults) -> (usize, usize) {
    let mut world = World::new(seed, faults);
    for number in 0..SLOTS {
        let side = usize::from(number % 4);
        world.later(2000, Step::Connect { side, number });
    }
    world.run();
    // Number of established IDs for each connection: active and passive side.
    let mut sides: HashMap<u16, [usize; 2]> = HashMap::new();
    for (&(side, id), &(number, is_active)) in &world.numbers {
        let at = format!("seed {seed}, connection {number}, active {is_active}");
        assert!(world.ended.contains(&(side, id)), "{at}");
        assert_eq!(world.cms[side].state(id), CmState::Idle, "{at}");
        let counts = sides.entry(number).or_default();
        counts[usize::from(!is_active)] += usize::from(world.established.contains(&(side, id)));
    }
    assert_eq!(sides.len(), usize::from(SLOTS));
    let (mut connected, mut alone) = (0, 0);
    for (number, [active, passive]) in sides {
        assert!(passive <= active, "seed {seed}, connection {number}");
        connected += passive;
        alone += active - passive;
    }
    for cm in &world.cms {
        assert_eq!(cm.id_count(), 1, "seed {seed}");
        assert!(
            cm.peers.by_req.is_empty()
                && cm.peers.claims.is_empty()
                && cm.listeners.half_open.is_empty()
        );
        assert_eq!(cm.counters().malformed, 0);
    }
    (connected, alone)
}

/// Returns the totals for multiple seeds.
fn sums(seeds: u8, faults: Faults) -> (usize, usize) {
    let runs = (0..seeds).map(|seed| agree_and_leave_nothing(seed, faults));
    runs.fold((0, 0), |sum, run| (sum.0 + run.0, sum.1 + run.1))
}

#[test]
fn good_network_connects_all_accepted_peers() {
    let faults = Faults {
        loss: 0,
        duplication: 0,
        delay: 1,
    };
    let (connected, alone) = sums(10, faults);
    assert!(connected > 10 * usize::from(SLOTS) * 7 / 10, "{connected}");
    assert_eq!(alone, 0);
}

#[test]
fn lossy_network_leaves_sides_in_agreement() {
    let faults = Faults {
        loss: 20,
        duplication: 10,
        delay: 60,
    };
    let (connected, alone) = sums(60, faults);
    assert!(connected > 60 * usize::from(SLOTS) * 6 / 10, "{connected}");
    // At most one percent. Data is usually received before either side times out.
    assert!(100 * alone < connected, "{alone} of {connected}");
}

#[test]
fn slow_network_leaves_sides_in_agreement() {
    let faults = Faults {
        loss: 5,
        duplication: 30,
        delay: 500,
    };
    let (connected, alone) = sums(30, faults);
    assert!(100 * alone < connected, "{alone} of {connected}");
}
