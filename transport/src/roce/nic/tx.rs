//! Transmission: turns and timers.

use std::cmp::Reverse;
use std::time::Instant;

use riser_memory::fault;

use super::qp::with_env;
use super::rate::Limiter;
use super::{MAX_LAST_ANSWERS, Machine, Nic, OwnWay, Qp};
use crate::rc::Env;
use crate::roce::batch::{TxBatch, Way, destination};
use crate::verbs::{PathMigState, QpId, QpType};
use crate::wire::{Bth, ICRC_LEN, IcrcFlow, Qpn};

/// The batch that a packet goes to.
fn choose<'a>(
    own_way: &'a mut Option<OwnWay>,
    is_own: bool,
    batch: &'a mut TxBatch,
) -> &'a mut TxBatch {
    match own_way.as_mut().filter(|_| is_own) {
        Some(OwnWay {
            packets: Some(own), ..
        }) => &mut own.batch,
        _ => batch,
    }
}

impl Qp {
    /// Next time at which its machine has something to do though nothing comes in.
    fn poll_timeout(&self) -> Option<Instant> {
        let machine = match &self.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => rc.poll_timeout(),
            Machine::Uc(uc) => uc.poll_timeout(),
            Machine::Ud(_) | Machine::Stream(_) => None,
        };
        let release = self.limiter.as_deref().and_then(Limiter::release);
        [machine, release].into_iter().flatten().min()
    }

    /// The time of a timer that is to be added, if its deadline needs one.
    fn rearm(&mut self) -> Option<Instant> {
        // A deadline that moved away keeps its early entry, which then does nothing but arm again.
        // One that came nearer leaves the later entry behind.
        let at = self.poll_timeout()?;
        if self.armed.is_some_and(|armed| armed <= at) {
            return None;
        }
        self.armed = Some(at);
        self.armed
    }
}

impl Nic {
    /// Appends what is to be sent to `batch`, until it has `budget` bytes or nothing is left. The
    /// last packet may be longer than what is left of the budget, and bring an acknowledgement.
    /// Answers how many packets were added.
    pub fn poll_transmit(&mut self, now: Instant, batch: &mut TxBatch, budget: usize) -> usize {
        self.set_now(now);
        let has_icrc = self.config.has_icrc();
        let known = fault::count();
        let before = self.collected(batch);
        // Before the message of the CM that ends the connection: the peer would not take them after
        // it.
        while let Some((peer, headers)) = self.last_answers.pop_front() {
            self.tx.clear();
            self.tx.headers = headers;
            let flow = has_icrc.then_some(&peer.flow);
            let batch = choose(&mut self.own_way, peer.is_own, batch);
            let way = Way {
                from: peer.from,
                ..Way::to(peer.addr)
            };
            batch.push_packet(flow, &way, &mut self.tx);
        }
        // Then the messages of the CM, whose peers wait by timers. However many a stranger causes,
        // queue pairs share most of the budget.
        self.transmit_mads(batch, budget / 4);
        while self.collected(batch).1 < budget {
            let Some(id) = self.ready.pop_front() else {
                break;
            };
            // A queue pair that was destroyed while it waited for its turn.
            let has_more = match self.qps.get(id).map(|qp| qp.qp_type) {
                Ok(QpType::Rc | QpType::XrcIni | QpType::XrcTgt) => {
                    self.take_rc_turn(id, batch, budget)
                }
                Ok(QpType::Uc) => self.take_uc_turn(id, batch, budget),
                Ok(QpType::Ud | QpType::Gsi) => self.take_ud_turn(id, batch, budget),
                Ok(QpType::Smi | QpType::RawPacket) | Err(_) => continue,
            };
            // At the end of the line: a queue pair that has much to send waits for all others.
            let Ok(qp) = self.qps.get_mut(id) else {
                continue;
            };
            qp.is_queued = has_more;
            let due = qp.rearm();
            if has_more {
                self.ready.push_back(id);
            }
            if let Some(at) = due {
                self.push_timer(at, id);
            }
            if !self.out.is_empty() {
                // A turn may have completed or failed requests. Where that ends the queue pair, its
                // last answers leave in another turn.
                self.settle(id);
            }
        }
        let after = self.collected(batch);
        let packets = after.0 - before.0;
        self.counters.tx_packets += packets as u64;
        self.counters.tx_bytes += (after.1 - before.1) as u64;
        let faults = fault::count();
        if faults != self.faults {
            // Those that it knows of from here on.
            self.faults = faults;
            self.mrs.page_faulted();
            if faults != known {
                self.lose_collected(batch);
            }
        }
        packets
    }

    /// Loses what was collected, since memory was gone that some of it was read from. What is repeated
    /// finds out which region that was.
    #[cold]
    fn lose_collected(&mut self, batch: &mut TxBatch) {
        batch.clear();
        let own = self.own_way.as_mut().and_then(|own| own.packets.as_mut());
        if let Some(own) = own {
            own.batch.clear();
        }
        let all: Vec<QpId> = self.qps.iter().map(|(id, _)| id).collect();
        for id in all {
            let machine = self.qps.get_mut(id).map(|qp| &mut qp.machine);
            if let Ok(Machine::Rc(rc) | Machine::Xrc(rc)) = machine {
                rc.lose_answers();
            }
        }
    }

    /// The batch that a packet goes to.
    pub(super) fn batch_for<'a>(
        &'a mut self,
        is_own: bool,
        batch: &'a mut TxBatch,
    ) -> &'a mut TxBatch {
        choose(&mut self.own_way, is_own, batch)
    }

    /// Packets and bytes that were collected, those that the device keeps included.
    pub(super) fn collected(&self, batch: &TxBatch) -> (usize, usize) {
        let own = self.own_packets();
        let own = own.map_or((0, 0), |own| (own.packets(), own.total_bytes()));
        (batch.packets() + own.0, batch.total_bytes() + own.1)
    }

    /// Lets a connection send; answers whether it was stopped before it had nothing left.
    fn take_rc_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (now, to_strangers) = (self.now, self.to_strangers);
        let (has_icrc, mtu) = (self.config.has_icrc(), self.config.mtu.bytes());
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        let peer = qp.peer;
        let is_own = peer.is_some_and(|peer| peer.is_own);
        let batch = choose(&mut self.own_way, is_own, batch);
        let (turn, before) = (qp.turn(now, mtu), batch.total_bytes());
        // An extended connection takes no notifications of congestion.
        let is_markable = qp.qp_type == QpType::Rc;
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        with_env!(self, qp, env);
        // RESET forgets the peer; the turn was asked for before.
        let (Machine::Rc(rc) | Machine::Xrc(rc), Some(peer)) = (&mut qp.machine, peer) else {
            return false;
        };
        // What is repeated for a peer that is gone may wait in the socket for its neighbour entry.
        // By a socket of its own it holds up no other peer's packets.
        let is_silent = !is_own && peer.from == 0 && rc.is_peer_silent(now);
        let flow = match is_silent {
            true => IcrcFlow::new(to_strangers, peer.addr),
            false => Some(peer.flow),
        };
        let flow = flow.expect("addresses of one family");
        let flow = has_icrc.then_some(&flow);
        let mut way = Way {
            from: peer.from,
            tos: peer.tos,
            is_to_stranger: is_silent,
            ..Way::to(peer.addr)
        };
        let mut has_more = true;
        // Bounded also where the packets are small, so that a turn is short for those that wait.
        for _ in 0..turn {
            if !rc.poll_transmit(now, &mut env, &mut self.tx) {
                has_more = false;
                break;
            }
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            // What a congested router should make rarer is data.
            way = way.markable(is_markable && self.tx.payload_len > 0);
            batch.push_packet(flow, &way, &mut self.tx);
            // It has more, for all that is known: the next turn finds out.
            if batch.total_bytes() >= budget {
                break;
            }
        }
        // All other queue pairs may have their turns before the next, and the peer's timer fires
        // where that takes long.
        if has_more && rc.poll_waiting_ack(now, &mut env, &mut self.tx) {
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            way = way.markable(false);
            batch.push_packet(flow, &way, &mut self.tx);
        }
        qp.on_sent(now, batch.total_bytes() - before);
        has_more && turn > 0
    }

    /// The same for an unreliable connection.
    fn take_uc_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (now, has_icrc) = (self.now, self.config.has_icrc());
        let mtu = self.config.mtu.bytes();
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        let peer = qp.peer;
        let is_own = peer.is_some_and(|peer| peer.is_own);
        let batch = choose(&mut self.own_way, is_own, batch);
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        let (turn, before) = (qp.turn(now, mtu), batch.total_bytes());
        with_env!(self, qp, env);
        let (Machine::Uc(uc), Some(peer)) = (&mut qp.machine, peer) else {
            return false;
        };
        let flow = has_icrc.then_some(&peer.flow);
        let way = Way {
            from: peer.from,
            tos: peer.tos,
            ..Way::to(peer.addr)
        };
        let mut has_more = turn > 0;
        for _ in 0..turn {
            if !uc.poll_transmit(now, &mut env, &mut self.tx) {
                has_more = false;
                break;
            }
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            batch.push_packet(flow, &way, &mut self.tx);
            if batch.total_bytes() >= budget {
                break;
            }
        }
        qp.on_sent(now, batch.total_bytes() - before);
        has_more
    }

    /// The same for a datagram queue pair.
    fn take_ud_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (locals, to_strangers, cm) = (&self.locals, self.to_strangers, self.cm.machine());
        let (now, has_icrc) = (self.now, self.config.has_icrc());
        let mtu = self.config.mtu.bytes();
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        let turn = qp.turn(now, mtu);
        with_env!(self, qp, env);
        let Machine::Ud(ud) = &mut qp.machine else {
            return false;
        };
        let (mut has_more, mut sent) = (turn > 0, 0);
        for _ in 0..turn {
            let Some(mut way) = ud.poll_transmit(env.mrs, env.out, &mut self.tx) else {
                has_more = false;
                break;
            };
            sent += self.tx.len() + ICRC_LEN;
            let dst = way.dst;
            // A question on queue pair 1 may bear a forged address.
            let qpn = destination(&self.tx.headers);
            let own_way = self.own_way.as_ref();
            let is_own = own_way.is_some_and(|own| own.takes(dst, qpn));
            let local = locals[usize::from(way.from)];
            let is_stranger =
                qpn == Qpn::GSI && !is_own && way.from == 0 && !cm.is_proven(dst.ip());
            let from = if is_stranger { to_strangers } else { local };
            // An address handle is checked for its family when it is made.
            if let Some(flow) = IcrcFlow::new(from, dst) {
                way.is_to_stranger = is_stranger;
                let batch = choose(&mut self.own_way, is_own, batch);
                batch.push_packet(has_icrc.then_some(&flow), &way, &mut self.tx);
                self.counters.tx_multicast += u64::from(dst.ip().is_multicast());
            }
            if batch.total_bytes() >= budget {
                break;
            }
        }
        qp.on_sent(now, sent);
        has_more
    }

    /// A queue pair ends: keeps what it still has to answer. An adapter would have answered at
    /// once; here the owner may close a connection, or destroy its queue pair, in the round in
    /// which a packet came in.
    pub(super) fn keep_last_answers(&mut self, id: QpId) {
        let now = self.now;
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        let peer = qp.peer;
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        with_env!(self, qp, env);
        let (Machine::Rc(rc) | Machine::Xrc(rc), Some(peer)) = (&mut qp.machine, peer) else {
            return;
        };
        // Bounded, since a peer decides how many connections end at once.
        while self.last_answers.len() < MAX_LAST_ANSWERS
            && rc.poll_last_answer(now, &mut env, &mut self.tx)
        {
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            self.last_answers.push_back((peer, self.tx.headers.clone()));
        }
    }

    /// Gives a queue pair a turn, and arms its timer.
    pub(super) fn schedule(&mut self, id: QpId) {
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        let due = qp.rearm();
        if !std::mem::replace(&mut qp.is_queued, true) {
            self.ready.push_back(id);
        }
        if let Some(at) = due {
            self.push_timer(at, id);
        }
    }

    /// Adds a timer. Entries that were left behind go before the heap grows, so its size follows
    /// from the number of queue pairs and not from that of packets.
    fn push_timer(&mut self, at: Instant, id: QpId) {
        if self.timers.len() == self.timers.capacity() {
            let qps = &self.qps;
            self.timers
                .retain(|Reverse((at, id))| qps.get(*id).is_ok_and(|qp| qp.armed == Some(*at)));
            self.timers.reserve(self.timers.len().max(8));
        }
        self.timers.push(Reverse((at, id)));
    }

    /// Fires the timers that are due. Answers how many.
    pub fn handle_timeouts(&mut self, now: Instant) -> usize {
        self.set_now(now);
        let mut fired = self.handle_waiting_mads() + self.handle_cm_timeouts();
        while let Some(&Reverse((at, id))) = self.timers.peek() {
            if at > now {
                break;
            }
            self.timers.pop();
            // The handle has a generation: a queue pair that is gone is not found.
            let Ok(qp) = self.qps.get_mut(id) else {
                continue;
            };
            // Another entry has taken its place, and comes later or came earlier.
            if qp.armed != Some(at) {
                continue;
            }
            qp.armed = None;
            if qp.poll_timeout().is_some_and(|t| t <= now) {
                if let Some(limiter) = &mut qp.limiter {
                    limiter.handle_timeout(now);
                }
                match &mut qp.machine {
                    Machine::Rc(_) | Machine::Xrc(_) => self.fire_rc_timer(id),
                    Machine::Uc(uc) => uc.handle_timeout(now),
                    Machine::Ud(_) | Machine::Stream(_) => {}
                }
                fired += 1;
                self.settle(id);
            } else if let Some(at) = qp.rearm() {
                // The deadline has moved away since, with every acknowledgement that arrived.
                self.push_timer(at, id);
            }
        }
        // After the queue pairs, whose timers may complete what an event waits for.
        fired + self.handle_moderated(now)
    }

    /// Next time at which something is to be done though nothing comes in; the present if
    /// something is ready now.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if self.has_output() {
            return Some(self.now);
        }
        self.timer_deadline()
    }

    /// Time at which the next timer fires, without regard to output that is ready.
    #[must_use]
    pub fn timer_deadline(&self) -> Option<Instant> {
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        let moderated = self.moderated.first().map(|(at, _)| *at);
        let all = [timer, self.cm_deadline(), moderated];
        all.into_iter().flatten().min()
    }

    /// Returns whether [`Nic::poll_transmit`] may have something now.
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.ready.is_empty() || self.has_mads() || !self.last_answers.is_empty()
    }
}
