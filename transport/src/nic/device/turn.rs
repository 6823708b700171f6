//! Completions, events and timers of queue pairs.

use std::time::Instant;

use super::Device;
use crate::nic::qp::Machine;
use crate::nic::with_env;
use crate::rc::{Env, RcEvent};
use crate::verbs::{AsyncEvent, Completion, CqId, PathMigState, QpId, QpType};
use crate::wire::Bth;

impl Device {
    /// Must be called after using a QP: passes on its events, schedules it and updates the timer.
    #[inline]
    pub(in crate::nic) fn finish_turn(&mut self, id: QpId) {
        if !self.out.is_empty() {
            self.drain(id);
        }
        self.schedule_qp(id);
    }

    fn drain(&mut self, id: QpId) {
        // We need to take this because passing on events requires `self`. It is put back afterwards
        // to reuse the memory.
        let mut out = std::mem::take(&mut self.out);
        let mut broken: Vec<CqId> = Vec::new();
        let mut shared = None;
        if let Ok(qp) = self.qps.get(id) {
            let (send_cq, notifies_drain) = (qp.send_cq, qp.notifies_drain);
            let recv_cq = match qp.qp_type {
                QpType::XrcTgt => qp.srq.and_then(|srq| self.srqs.xrc_cq(srq)),
                _ => Some(qp.recv_cq),
            };
            shared = qp.srq;
            for event in out.drain(..) {
                let (cq, completion) = match event {
                    RcEvent::Send(c) => (send_cq, c),
                    RcEvent::Recv(c) => match recv_cq {
                        Some(cq) => (cq, c),
                        // The queue was destroyed while receiving the message.
                        None => continue,
                    },
                    // The application didn't request this event.
                    RcEvent::Async(AsyncEvent::SqDrained(_)) if !notifies_drain => continue,
                    RcEvent::Async(e) => {
                        self.events.raise(e);
                        continue;
                    }
                };
                if self.complete(cq, completion) {
                    broken.push(cq);
                }
            }
        }
        out.clear();
        self.out = out;
        // Check this after using receives.
        if let Some(srq) = shared {
            self.check_srq_limit(srq);
        }
        for cq in broken {
            self.fail_users(cq);
        }
    }

    /// Adds a completion to its queue. This will return `true` if this caused an overrun.
    #[inline]
    fn complete(&mut self, cq: CqId, completion: Completion) -> bool {
        let is_lost = self.cqs.complete(cq, completion, &self.clock);
        if is_lost {
            self.on_overrun(cq);
        }
        is_lost
    }

    /// Called when a CQ has lost a completion.
    pub(super) fn on_overrun(&mut self, cq: CqId) {
        self.counters.cq_overruns += 1;
        self.events.raise(AsyncEvent::CqError(cq));
    }

    /// If a CQ overruns, completions are lost, so all QPs using it must fail.
    pub(super) fn fail_users(&mut self, cq: CqId) {
        let users = self.qps.ids(|qp| qp.send_cq == cq || qp.recv_cq == cq);
        // Flushing a QP can overrun additional queues, but each queue can only overrun once, so the
        // recursion terminates.
        for user in users {
            self.fail_qp(user);
        }
    }

    /// Moves a QP to the ERROR state due to an internal error of the device, or because its stream
    /// was closed.
    pub(crate) fn fail_qp(&mut self, id: QpId) {
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        with_env!(self, qp, env);
        qp.machine.fail(&mut env);
        self.finish_turn(id);
    }

    /// Schedules a QP and updates the timer.
    #[inline]
    pub(crate) fn schedule_qp(&mut self, id: QpId) {
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        let due = qp.rearm();
        if !std::mem::replace(&mut qp.is_queued, true) {
            self.schedule.push(id);
        }
        if let Some(at) = due {
            self.schedule.push_timer(at, id, &self.qps);
        }
    }

    /// Saves the pending acknowledgements of a QP before it is destroyed. A hardware adapter would
    /// have sent them immediately, but our owner can close a connection or destroy its QP while it
    /// is still handling received packets.
    pub(super) fn keep_last_responses(&mut self, id: QpId) {
        let now = self.clock.now();
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        let peer = qp.peer;
        let is_migrated = qp.mig_state == PathMigState::Migrated;
        with_env!(self, qp, env);
        let (Machine::Rc(rc) | Machine::Xrc(rc), Some(peer)) = (&mut qp.machine, peer) else {
            return;
        };
        while self.schedule.has_room_for_response()
            && rc.poll_last_response(now, &mut env, &mut self.tx)
        {
            if !is_migrated {
                Bth::clear_migrated(&mut self.tx.headers);
            }
            self.schedule.push_response(peer, self.tx.headers.clone());
        }
    }

    /// Fires all expired timers and returns how many have fired.
    pub(crate) fn handle_timeouts(&mut self, now: Instant) -> usize {
        self.set_now(now);
        let mut fired = 0;
        while let Some((at, id)) = self.schedule.pop_expired(now) {
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
                self.schedule.push_timer(at, id, &self.qps);
            }
        }
        // Call this last, because QP timers can add completions which a delayed event is waiting
        // for.
        fired + self.cqs.handle_timeouts(now)
    }

    /// Returns when the next timer expires, ignoring QPs that are ready to send.
    pub(crate) fn timer_deadline(&self) -> Option<Instant> {
        let all = [self.schedule.next_timer(), self.cqs.deadline()];
        all.into_iter().flatten().min()
    }
}
