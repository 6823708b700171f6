//! Transmit path: scheduling and timers.

use std::cmp::Reverse;
use std::time::Instant;

use riser_memory::fault;

use super::qp::with_env;
use super::rate::Limiter;
use super::{MAX_LAST_ANSWERS, Machine, Nic, OwnWay, Qp};
use crate::nic::batch::{TxBatch, TxPath, destination};
use crate::rc::Env;
use crate::verbs::{PathMigState, QpId, QpType};
use crate::wire::{Bth, ICRC_LEN, IcrcFlow, Qpn};

/// Selects the batch for a packet.
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
    /// Returns the next time the state machine needs to be called even if nothing is received.
    fn poll_timeout(&self) -> Option<Instant> {
        let machine = match &self.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => rc.poll_timeout(),
            Machine::Uc(uc) => uc.poll_timeout(),
            Machine::Ud(_) | Machine::Stream(_) => None,
        };
        let release = self.limiter.as_deref().and_then(Limiter::release);
        [machine, release].into_iter().flatten().min()
    }

    /// Returns the time of a new timer entry if required by the current deadline.
    fn rearm(&mut self) -> Option<Instant> {
        // If the deadline has been moved back, we keep the earlier entry and add a new one when it
        // fires. If the deadline is now earlier, the old entry becomes invalid.
        let at = self.poll_timeout()?;
        if self.armed.is_some_and(|armed| armed <= at) {
            return None;
        }
        self.armed = Some(at);
        self.armed
    }
}

impl Nic {
    /// Appends packets to `batch` until it contains `budget` bytes or there is nothing left to
    /// send. The last packet can exceed the budget, and can be followed by an acknowledgement. This
    /// will return the number of packets added.
    pub fn poll_transmit(&mut self, now: Instant, batch: &mut TxBatch, budget: usize) -> usize {
        self.set_now(now);
        let has_icrc = self.config.has_icrc();
        let known = fault::count();
        let before = self.collected(batch);
        // Send these before the CM message that closes the connection, because the peer won't
        // accept them after that.
        while let Some((peer, headers)) = self.last_answers.pop_front() {
            self.tx.clear();
            self.tx.headers = headers;
            let flow = has_icrc.then_some(&peer.flow);
            let batch = choose(&mut self.own_way, peer.is_own, batch);
            let way = TxPath {
                from: peer.from,
                ..TxPath::to(peer.addr)
            };
            batch.push_packet(flow, &way, &mut self.tx);
        }
        // Send CM messages next, since peers are waiting for them with a timeout. Most of the
        // budget is reserved for QPs, even if there are many messages caused by strangers.
        self.transmit_mads(batch, budget / 4);
        while self.collected(batch).1 < budget {
            let Some(id) = self.ready.pop_front() else {
                break;
            };
            // The QP may have been destroyed while it was scheduled.
            let has_more = match self.qps.get(id).map(|qp| qp.qp_type) {
                Ok(QpType::Rc | QpType::XrcIni | QpType::XrcTgt) => {
                    self.take_rc_turn(id, batch, budget)
                }
                Ok(QpType::Uc) => self.take_uc_turn(id, batch, budget),
                Ok(QpType::Ud | QpType::Gsi) => self.take_ud_turn(id, batch, budget),
                Ok(QpType::Smi | QpType::RawPacket) | Err(_) => continue,
            };
            // Schedule it last, so that all the other QPs can send before it continues.
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
                // Sending may have completed or failed requests. If this caused the QP to be
                // closed, its last acknowledgements are sent later.
                self.finish_turn(id);
            }
        }
        let after = self.collected(batch);
        let packets = after.0 - before.0;
        self.counters.tx_packets += packets as u64;
        self.counters.tx_bytes += (after.1 - before.1) as u64;
        let faults = fault::count();
        if faults != self.faults {
            // The number of faults that have been handled.
            self.faults = faults;
            self.mrs.page_faulted();
            if faults != known {
                self.lose_collected(batch);
            }
        }
        packets
    }

    /// Drops all collected packets because some of the memory used for them was no longer mapped.
    /// When retransmitting, we will find out which region is affected.
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

    /// Returns the batch for a packet.
    pub(super) fn batch_for<'a>(
        &'a mut self,
        is_own: bool,
        batch: &'a mut TxBatch,
    ) -> &'a mut TxBatch {
        choose(&mut self.own_way, is_own, batch)
    }

    /// Returns the number of collected packets and bytes, including looped back packets.
    pub(super) fn collected(&self, batch: &TxBatch) -> (usize, usize) {
        let own = self.own_packets();
        let own = own.map_or((0, 0), |own| (own.packets(), own.total_bytes()));
        (batch.packets() + own.0, batch.total_bytes() + own.1)
    }

    /// Sends packets of a connection. Returns whether it may have more to send.
    fn take_rc_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (now, to_strangers) = (self.now, self.to_strangers);
        let (has_icrc, mtu) = (self.config.has_icrc(), self.config.mtu.bytes());
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        let peer = qp.peer;
        let is_own = peer.is_some_and(|peer| peer.is_own);
        let batch = choose(&mut self.own_way, is_own, batch);
        let (turn, before) = (qp.turn_budget(now, mtu), batch.total_bytes());
        // Extended connections don't support congestion notification.
        let is_markable = qp.qp_type == QpType::Rc;
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        with_env!(self, qp, env);
        // The peer is unknown if the QP was reset after being scheduled.
        let (Machine::Rc(rc) | Machine::Xrc(rc), Some(peer)) = (&mut qp.machine, peer) else {
            return false;
        };
        // Retransmissions to a dead peer can be stuck in the socket while waiting for neighbor
        // resolution. Use a separate socket, so they don't block packets for other peers.
        let is_silent = !is_own && peer.from == 0 && rc.is_peer_silent(now);
        let flow = match is_silent {
            true => IcrcFlow::new(to_strangers, peer.addr),
            false => Some(peer.flow),
        };
        let flow = flow.expect("addresses of one family");
        let flow = has_icrc.then_some(&flow);
        let mut way = TxPath {
            from: peer.from,
            tos: peer.tos,
            is_to_stranger: is_silent,
            ..TxPath::to(peer.addr)
        };
        let mut has_more = true;
        // This limits the time before other QPs can send even if packets are small.
        for _ in 0..turn {
            if !rc.poll_transmit(now, &mut env, &mut self.tx) {
                has_more = false;
                break;
            }
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            // Only data should be reduced when a router is congested.
            way = way.markable(is_markable && self.tx.payload_len > 0);
            batch.push_packet(flow, &way, &mut self.tx);
            // There may be more to send. The next call will find out.
            if batch.total_bytes() >= budget {
                break;
            }
        }
        // It can take some time until all other QPs have sent their packets, and the peer could run
        // into a timeout.
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

    /// Same as [`Nic::take_rc_turn`], for an unreliable connection.
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
        let (turn, before) = (qp.turn_budget(now, mtu), batch.total_bytes());
        with_env!(self, qp, env);
        let (Machine::Uc(uc), Some(peer)) = (&mut qp.machine, peer) else {
            return false;
        };
        let flow = has_icrc.then_some(&peer.flow);
        let way = TxPath {
            from: peer.from,
            tos: peer.tos,
            ..TxPath::to(peer.addr)
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

    /// Same as [`Nic::take_rc_turn`], for a datagram QP.
    fn take_ud_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (locals, to_strangers, cm) = (&self.locals, self.to_strangers, self.cm.machine());
        let (now, has_icrc) = (self.now, self.config.has_icrc());
        let mtu = self.config.mtu.bytes();
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        let turn = qp.turn_budget(now, mtu);
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
            // A request on QP1 can have a spoofed source address.
            let qpn = destination(&self.tx.headers);
            let own_way = self.own_way.as_ref();
            let is_own = own_way.is_some_and(|own| own.accepts(dst, qpn));
            let local = locals[usize::from(way.from)];
            let is_stranger =
                qpn == Qpn::GSI && !is_own && way.from == 0 && !cm.is_proven(dst.ip());
            let from = if is_stranger { to_strangers } else { local };
            // The address family was checked when the address handle was created.
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

    /// Saves the pending acknowledgements of a QP before it is destroyed. A hardware adapter would
    /// have sent them immediately, but our owner can close a connection or destroy its QP while it
    /// is still handling received packets.
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
        // This must be bounded, because a peer can close many connections at once.
        while self.last_answers.len() < MAX_LAST_ANSWERS
            && rc.poll_last_answer(now, &mut env, &mut self.tx)
        {
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            self.last_answers.push_back((peer, self.tx.headers.clone()));
        }
    }

    /// Schedules a QP and updates the timer.
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

    /// Adds a timer. We remove invalid entries before the heap needs to grow, so its size depends
    /// on the number of QPs and not on the number of packets.
    fn push_timer(&mut self, at: Instant, id: QpId) {
        if self.timers.len() == self.timers.capacity() {
            let qps = &self.qps;
            self.timers
                .retain(|Reverse((at, id))| qps.get(*id).is_ok_and(|qp| qp.armed == Some(*at)));
            self.timers.reserve(self.timers.len().max(8));
        }
        self.timers.push(Reverse((at, id)));
    }

    /// Fires all expired timers and returns how many have fired.
    pub fn handle_timeouts(&mut self, now: Instant) -> usize {
        self.set_now(now);
        let mut fired = self.handle_waiting_mads() + self.handle_cm_timeouts();
        while let Some(&Reverse((at, id))) = self.timers.peek() {
            if at > now {
                break;
            }
            self.timers.pop();
            // The handle contains a generation, so a destroyed QP will not be found.
            let Ok(qp) = self.qps.get_mut(id) else {
                continue;
            };
            // This entry has been replaced by an earlier or later one.
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
                self.finish_turn(id);
            } else if let Some(at) = qp.rearm() {
                // The deadline has been moved back since then, as happens with each
                // acknowledgement.
                self.push_timer(at, id);
            }
        }
        // Call this last, because QP timers can add completions which a delayed event is waiting
        // for.
        fired + self.handle_moderated(now)
    }

    /// Returns the next time when the device needs to be called even if nothing is received. This
    /// is the current time if there is something to send.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if self.has_output() {
            return Some(self.now);
        }
        self.timer_deadline()
    }

    /// Returns when the next timer expires, ignoring packets that are ready to be sent.
    #[must_use]
    pub fn timer_deadline(&self) -> Option<Instant> {
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        let moderated = self.moderated.first().map(|(at, _)| *at);
        let all = [timer, self.cm_deadline(), moderated];
        all.into_iter().flatten().min()
    }

    /// Returns whether [`Nic::poll_transmit`] may return packets now.
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.ready.is_empty() || self.has_mads() || !self.last_answers.is_empty()
    }
}
