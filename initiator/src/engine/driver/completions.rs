//! Completions and asynchronous events.

use std::time::Instant;

use riser_transport::verbs::{AsyncEvent, Completion, CqId, Provider};

use super::link::{Link, srp};
use super::{BATCH, Driver, MAX_RDMA};
use crate::engine::conn::{RECV_LEN, Work};
use crate::srp::session::ChannelIndex;

impl<P: Provider> Driver<P> {
    pub(super) fn poll_completions(&mut self, now: Instant) -> bool {
        let mut worked = false;
        let all = self.sessions.iter();
        let queues = all.filter_map(|(index, s)| s.link.cq().map(|cq| (index, cq)));
        let mut queues = queues.collect::<arrayvec::ArrayVec<(usize, CqId), MAX_RDMA>>();
        for (index, cq) in queues.drain(..) {
            worked |= self.poll_session(index, cq, now);
        }
        worked
    }

    pub(super) fn poll_session(&mut self, index: usize, cq: CqId, now: Instant) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = self.provider.poll_cq(cq, BATCH, &mut completions);
        for completion in completions.drain(..) {
            self.handle_completion(index, &completion, now);
        }
        self.completions = completions;
        match polled {
            Ok(n) => n > 0,
            Err(_) => {
                self.break_session(index, now);
                true
            }
        }
    }

    pub(super) fn break_session(&mut self, index: usize, now: Instant) {
        self.break_channel(index, 0, now);
    }

    pub(super) fn break_channel(&mut self, index: usize, channel: u8, now: Instant) {
        match &mut self.sessions[index].link {
            Link::Srp(link) => link
                .machine
                .handle_channel_error(ChannelIndex(channel), now),
            Link::Iser(link) => link.machine.handle_broken(now),
            Link::Tcp(link) => link.machine.handle_broken(now),
            Link::Paths(_) => {}
        }
        self.drain(index, now);
    }

    pub(super) fn handle_completion(
        &mut self,
        index: usize,
        completion: &Completion,
        now: Instant,
    ) {
        let Some(&(owner, channel)) = self.qps.get(&completion.qp) else {
            return;
        };
        debug_assert_eq!(owner, index);
        if let Link::Iser(_) = self.sessions[index].link {
            self.handle_iser_completion(index, completion, now);
            return;
        }
        let Some(work) = Work::of(completion.wr_id) else {
            return;
        };
        if !completion.status.is_ok() {
            self.handle_failed_work(index, channel, work, completion, now);
            return;
        }
        match work {
            Work::Recv(slot) => self.handle_recv(index, channel, slot, completion.byte_len, now),
            Work::Command(slot) | Work::Invalidate(slot) => {
                let Some(conn) =
                    srp(&mut self.sessions, index).conns[usize::from(channel)].as_mut()
                else {
                    return;
                };
                let back = match work {
                    Work::Command(_) => conn.on_command_sent(&mut self.provider, slot),
                    _ => conn.on_invalidated(&mut self.provider, slot),
                };
                if let Some(request) = back {
                    srp(&mut self.sessions, index)
                        .machine
                        .handle_retired(request, now);
                    self.drain(index, now);
                }
            }
            Work::Register(_) => {}
            Work::Answer(slot) => {
                if let Some(conn) =
                    srp(&mut self.sessions, index).conns[usize::from(channel)].as_mut()
                    && !conn.post_recv(&mut self.provider, slot)
                {
                    self.break_channel(index, channel, now);
                }
            }
            Work::TskMgmt(slot) => {
                if let Some(conn) =
                    srp(&mut self.sessions, index).conns[usize::from(channel)].as_mut()
                {
                    conn.on_tsk_mgmt_sent(slot);
                }
            }
            Work::Logout => self.tear_down(index, ChannelIndex(channel), now),
        }
    }

    pub(super) fn handle_failed_work(
        &mut self,
        index: usize,
        channel: u8,
        work: Work,
        completion: &Completion,
        now: Instant,
    ) {
        let closing = srp(&mut self.sessions, index).conns[usize::from(channel)]
            .as_ref()
            .is_some_and(|c| c.closing_until.is_some());
        if closing || work == Work::Logout {
            self.tear_down(index, ChannelIndex(channel), now);
            return;
        }
        tracing::debug!(?work, status = ?completion.status, channel, "work request failed");
        self.break_channel(index, channel, now);
    }

    pub(super) fn handle_recv(
        &mut self,
        index: usize,
        channel: u8,
        slot: u16,
        len: u32,
        now: Instant,
    ) {
        let mut iu = [0; RECV_LEN];
        let len = (len as usize).min(RECV_LEN);
        let session = srp(&mut self.sessions, index);
        let Some(conn) = &session.conns[usize::from(channel)] else {
            return;
        };
        conn.received(slot, &mut iu[..len]);
        let channel = ChannelIndex(channel);
        session.receiving = Some((channel, slot));
        session.machine.handle_iu(channel, &iu[..len], now);
        self.drain(index, now);
        // Unless an answer took it over, the receive is posted again at once.
        if let Some((channel, slot)) = srp(&mut self.sessions, index).receiving.take()
            && let Some(conn) =
                srp(&mut self.sessions, index).conns[usize::from(channel.0)].as_mut()
            && !conn.post_recv(&mut self.provider, slot)
        {
            self.break_channel(index, channel.0, now);
        }
    }

    pub(super) fn handle_async_event(&mut self, event: AsyncEvent, now: Instant) {
        match event {
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpReqError(qp)
            | AsyncEvent::QpAccessError(qp) => {
                if let Some(&(index, channel)) = self.qps.get(&qp) {
                    self.break_channel(index, channel, now);
                }
            }
            AsyncEvent::CqError(cq) => {
                let found = self.sessions.iter().find(|(_, s)| s.link.cq() == Some(cq));
                if let Some((index, _)) = found {
                    self.break_session(index, now);
                }
            }
            AsyncEvent::DeviceFatal => {
                let rdma = self.sessions.iter().filter(|(_, s)| s.link.cq().is_some());
                let all: Vec<usize> = rdma.map(|(i, _)| i).collect();
                for index in all {
                    self.break_session(index, now);
                }
            }
            _ => {}
        }
    }
}
