//! Transmit path: scheduling and timers.

use std::net::SocketAddr;
use std::time::Instant;

use riser_memory::fault;

use super::batch::{ECN_MASK, TxBatch, TxPath, destination};
use super::qp::Machine;
use super::{Nic, OwnPackets, with_env};
use crate::cm::CmRoute;
use crate::rc::{Env, TxPacket};
use crate::verbs::{PathMigState, QpId, QpType};
use crate::wire::mad::{MAD_LEN, Mad};
use crate::wire::{
    Bth, Deth, ExtHeaders, GSI_QKEY, ICRC_LEN, IcrcFlow, Opcode, Qpn, ROCE_PORT, emit_headers,
};

/// Selects the batch for a packet.
#[inline]
fn choose<'a>(
    own: &'a mut Option<Box<OwnPackets>>,
    is_own: bool,
    batch: &'a mut TxBatch,
) -> &'a mut TxBatch {
    match own.as_deref_mut().filter(|_| is_own) {
        Some(own) => &mut own.batch,
        None => batch,
    }
}

impl Nic {
    /// Appends packets to `batch` until it contains `budget` bytes or there is nothing left to
    /// send. The last packet can exceed the budget, and can be followed by an acknowledgement. This
    /// will return the number of packets added.
    pub fn poll_transmit(&mut self, now: Instant, batch: &mut TxBatch, budget: usize) -> usize {
        self.device.set_now(now);
        let has_icrc = self.device.config.has_icrc();
        let known = fault::count();
        let before = self.collected(batch);
        // Send these before the CM message that closes the connection, because the peer won't
        // accept them after that.
        while let Some((peer, headers)) = self.device.schedule.pop_response() {
            self.device.tx.clear();
            self.device.tx.headers = headers;
            let flow = has_icrc.then_some(&peer.flow);
            let batch = choose(&mut self.own, peer.is_own, batch);
            let way = TxPath {
                from: peer.from,
                ..TxPath::to(peer.addr)
            };
            batch.push_packet(flow, &way, &mut self.device.tx);
        }
        // Send CM messages next, since peers are waiting for them with a timeout. Most of the
        // budget is reserved for QPs, even if there are many messages caused by strangers.
        self.transmit_mads(batch, budget / 4);
        while self.collected(batch).1 < budget {
            let Some(id) = self.device.schedule.pop() else {
                break;
            };
            // The QP may have been destroyed while it was scheduled.
            let has_more = match self.device.qps.get(id).map(|qp| qp.qp_type) {
                Ok(QpType::Rc | QpType::XrcIni | QpType::XrcTgt) => {
                    self.take_rc_turn(id, batch, budget)
                }
                Ok(QpType::Uc) => self.take_uc_turn(id, batch, budget),
                Ok(QpType::Ud | QpType::Gsi) => self.take_ud_turn(id, batch, budget),
                Ok(QpType::Smi | QpType::RawPacket) | Err(_) => continue,
            };
            // Schedule it last, so that all the other QPs can send before it continues.
            let Ok(qp) = self.device.qps.get_mut(id) else {
                continue;
            };
            qp.is_queued = has_more;
            let due = qp.rearm();
            if has_more {
                self.device.schedule.push(id);
            }
            if let Some(at) = due {
                self.device.schedule.push_timer(at, id, &self.device.qps);
            }
            if !self.device.out.is_empty() {
                // Sending may have completed or failed requests. If this caused the QP to be
                // closed, its last acknowledgements are sent later.
                self.device.finish_turn(id);
            }
        }
        let after = self.collected(batch);
        let packets = after.0 - before.0;
        self.device.counters.tx_packets += packets as u64;
        self.device.counters.tx_bytes += (after.1 - before.1) as u64;
        if self.device.memory.report_faults() != known {
            self.lose_collected(batch);
        }
        packets
    }

    /// Drops all collected packets because some of the memory used for them was no longer mapped.
    /// When retransmitting, we will find out which region is affected.
    #[cold]
    fn lose_collected(&mut self, batch: &mut TxBatch) {
        batch.clear();
        if let Some(own) = &mut self.own {
            own.batch.clear();
        }
        for id in self.device.qps.ids(|_| true) {
            let machine = self.device.qps.get_mut(id).map(|qp| &mut qp.machine);
            if let Ok(Machine::Rc(rc) | Machine::Xrc(rc)) = machine {
                rc.lose_responses();
            }
        }
    }

    /// Returns the number of collected packets and bytes, including looped back packets.
    pub(super) fn collected(&self, batch: &TxBatch) -> (usize, usize) {
        let own = self.own_packets();
        let own = own.map_or((0, 0), |own| (own.packets(), own.total_bytes()));
        (batch.packets() + own.0, batch.total_bytes() + own.1)
    }

    /// Sends packets of a connection. Returns whether it may have more to send.
    fn take_rc_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (now, to_strangers) = (self.device.now(), self.to_strangers);
        let (has_icrc, mtu) = (
            self.device.config.has_icrc(),
            self.device.config.mtu.bytes(),
        );
        let Ok(qp) = self.device.qps.get_mut(id) else {
            return false;
        };
        let peer = qp.peer;
        let is_own = peer.is_some_and(|peer| peer.is_own);
        let batch = choose(&mut self.own, is_own, batch);
        let (turn, before) = (qp.turn_budget(now, mtu), batch.total_bytes());
        // Extended connections don't support congestion notification.
        let is_markable = qp.qp_type == QpType::Rc;
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        with_env!(self.device, qp, env);
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
            if !rc.poll_transmit(now, &mut env, &mut self.device.tx) {
                has_more = false;
                break;
            }
            if !is_migrated {
                Bth::clear_migrated(&mut self.device.tx.headers);
            }
            // Only data should be reduced when a router is congested.
            way = way.markable(is_markable && self.device.tx.payload_len > 0);
            batch.push_packet(flow, &way, &mut self.device.tx);
            // There may be more to send. The next call will find out.
            if batch.total_bytes() >= budget {
                break;
            }
        }
        // It can take some time until all other QPs have sent their packets, and the peer could run
        // into a timeout.
        if has_more && rc.poll_waiting_ack(now, &mut env, &mut self.device.tx) {
            if !is_migrated {
                Bth::clear_migrated(&mut self.device.tx.headers);
            }
            way = way.markable(false);
            batch.push_packet(flow, &way, &mut self.device.tx);
        }
        qp.on_sent(now, batch.total_bytes() - before);
        has_more && turn > 0
    }

    /// Same as [`Nic::take_rc_turn`], for an unreliable connection.
    fn take_uc_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (now, has_icrc) = (self.device.now(), self.device.config.has_icrc());
        let mtu = self.device.config.mtu.bytes();
        let Ok(qp) = self.device.qps.get_mut(id) else {
            return false;
        };
        let peer = qp.peer;
        let is_own = peer.is_some_and(|peer| peer.is_own);
        let batch = choose(&mut self.own, is_own, batch);
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        let (turn, before) = (qp.turn_budget(now, mtu), batch.total_bytes());
        with_env!(self.device, qp, env);
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
            if !uc.poll_transmit(now, &mut env, &mut self.device.tx) {
                has_more = false;
                break;
            }
            if !is_migrated {
                Bth::clear_migrated(&mut self.device.tx.headers);
            }
            batch.push_packet(flow, &way, &mut self.device.tx);
            if batch.total_bytes() >= budget {
                break;
            }
        }
        qp.on_sent(now, batch.total_bytes() - before);
        has_more
    }

    /// Same as [`Nic::take_rc_turn`], for a datagram QP.
    fn take_ud_turn(&mut self, id: QpId, batch: &mut TxBatch, budget: usize) -> bool {
        let (to_strangers, cm) = (self.to_strangers, self.cm.machine());
        let (now, has_icrc) = (self.device.now(), self.device.config.has_icrc());
        let mtu = self.device.config.mtu.bytes();
        let Ok(qp) = self.device.qps.get_mut(id) else {
            return false;
        };
        let turn = qp.turn_budget(now, mtu);
        with_env!(self.device, qp, env);
        let Machine::Ud(ud) = &mut qp.machine else {
            return false;
        };
        let (mut has_more, mut sent) = (turn > 0, 0);
        for _ in 0..turn {
            let Some(mut way) = ud.poll_transmit(env.mrs, env.out, &mut self.device.tx) else {
                has_more = false;
                break;
            };
            sent += self.device.tx.len() + ICRC_LEN;
            let dst = way.dst;
            // A request on QP1 can have a spoofed source address.
            let qpn = destination(&self.device.tx.headers);
            let own_path = self.device.own_path.as_ref();
            let is_own = own_path.is_some_and(|own| own.accepts(dst, qpn));
            let local = self.device.port.addrs()[usize::from(way.from)];
            let is_stranger =
                qpn == Qpn::GSI && !is_own && way.from == 0 && !cm.is_proven(dst.ip());
            let from = if is_stranger { to_strangers } else { local };
            // The address family was checked when the address handle was created.
            if let Some(flow) = IcrcFlow::new(from, dst) {
                way.is_to_stranger = is_stranger;
                let batch = choose(&mut self.own, is_own, batch);
                batch.push_packet(has_icrc.then_some(&flow), &way, &mut self.device.tx);
                self.device.counters.tx_multicast += u64::from(dst.ip().is_multicast());
            }
            if batch.total_bytes() >= budget {
                break;
            }
        }
        qp.on_sent(now, sent);
        has_more
    }

    /// Returns whether there may be a MAD to send.
    fn has_mads(&self) -> bool {
        self.cm.may_send() || self.agents.has_responses()
    }

    /// Returns the next MAD to send and its route.
    fn poll_outgoing(&mut self) -> Option<(CmRoute, Mad)> {
        self.cm.poll_transmit().or_else(|| {
            let (peer, mad) = self.agents.poll_response()?;
            let route = CmRoute {
                peer,
                gid_index: 0,
                traffic_class: 0,
            };
            Some((route, mad))
        })
    }

    /// Appends MADs from the CM and the agents to a batch until it contains `budget` bytes.
    fn transmit_mads(&mut self, batch: &mut TxBatch, budget: usize) {
        while self.has_mads() && self.collected(batch).1 < budget {
            let Some((route, mad)) = self.poll_outgoing() else {
                break;
            };
            let dst = SocketAddr::new(route.peer, ROCE_PORT);
            // A message to an unverified address can be blocked by neighbor resolution, so it must
            // use a separate socket.
            let is_own = self.device.keeps(dst, Qpn::GSI);
            let is_stranger =
                !is_own && route.gid_index == 0 && !self.cm.machine().is_proven(route.peer);
            let from = match is_stranger {
                true => self.to_strangers,
                false => self.device.port.addrs()[usize::from(route.gid_index)],
            };
            // We cannot send to an address of the other family.
            let Some(flow) = IcrcFlow::new(from, dst) else {
                continue;
            };
            let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, self.cm.next_psn());
            let ext = ExtHeaders {
                deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
                ..ExtHeaders::default()
            };
            let mut tx = TxPacket {
                headers: emit_headers(&bth, &ext),
                inline: mad.to_vec(),
                payload_len: MAD_LEN,
                ..TxPacket::default()
            };
            let way = TxPath {
                from: route.gid_index,
                tos: route.traffic_class & !ECN_MASK,
                is_to_stranger: is_stranger,
                ..TxPath::to(dst)
            };
            let flow = self.device.config.has_icrc().then_some(&flow);
            choose(&mut self.own, is_own, batch).push_packet(flow, &way, &mut tx);
        }
    }

    /// Fires all expired timers and returns how many have fired.
    pub fn handle_timeouts(&mut self, now: Instant) -> usize {
        self.device.set_now(now);
        let fired = self.cm.handle_timeouts(&mut self.device);
        let fired = fired + self.device.handle_timeouts(now);
        self.follow_migrations();
        fired
    }

    /// Returns the next time when the device needs to be called even if nothing is received. This
    /// is the current time if there is something to send.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if self.has_output() {
            return Some(self.device.now());
        }
        self.timer_deadline()
    }

    /// Returns when the next timer expires, ignoring packets that are ready to be sent.
    #[must_use]
    pub fn timer_deadline(&self) -> Option<Instant> {
        let all = [
            self.device.timer_deadline(),
            self.cm.deadline(self.device.now()),
        ];
        all.into_iter().flatten().min()
    }

    /// Returns whether [`Nic::poll_transmit`] may return packets now.
    #[must_use]
    pub fn has_output(&self) -> bool {
        self.device.schedule.has_output() || self.has_mads()
    }
}
