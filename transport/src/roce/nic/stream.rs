//! Connections over streams of bytes ([`RdmapQp`]), for their owner, who moves the bytes.
//!
//! ```text
//! nic.start_stream(qp, &params)                      // when both ends have agreed
//! nic.handle_stream(now, qp, bytes)                  // what came in
//! while let Some(qp) = nic.next_stream() { … }       // has something to send, perhaps:
//!     nic.poll_stream(now, qp, &mut bytes, limit)
//! nic.lose_stream(now, qp)                           // the stream has ended
//! ```

use std::time::Instant;

use riser_memory::fault;

use super::qp::with_env;
use super::{Machine, Nic, Qp};
use crate::rc::Env;
use crate::rdmap::setup::Disagreement;
use crate::rdmap::{RdmapQp, StreamParams};
use crate::verbs::{Access, QpId, QpState, VerbsError};

impl Nic {
    /// Calls `f` with a connection and what it works with, and hands on its events.
    fn with_stream<T>(
        &mut self,
        id: QpId,
        f: impl FnOnce(&mut RdmapQp, &mut Env<'_>) -> T,
    ) -> Option<T> {
        let qp = self.qps.get_mut(id).ok()?;
        with_env!(self, qp, env);
        let Machine::Stream(stream) = &mut qp.machine else {
            return None;
        };
        let result = f(stream, &mut env);
        if !self.out.is_empty() {
            self.settle(id);
        }
        Some(result)
    }

    /// Begins the stream of a queue pair in INIT, whose peer may do what the queue pair was given rights
    /// for.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidState`].
    pub(crate) fn start_stream(
        &mut self,
        id: QpId,
        params: &StreamParams,
    ) -> Result<(), VerbsError> {
        let qp = self.qps.get_mut(id)?;
        let Machine::Stream(stream) = &mut qp.machine else {
            return Err(VerbsError::InvalidState("a queue pair without a stream"));
        };
        if stream.state() != QpState::Init {
            return Err(VerbsError::InvalidState("a queue pair in INIT is needed"));
        }
        let access = qp.attr.access.unwrap_or_default() & Access::REMOTE;
        stream.start(&StreamParams { access, ..*params });
        // The limits of devices are below 256.
        qp.attr.max_rd_atomic = Some(params.agreed.ord.min(255) as u8);
        qp.attr.max_dest_rd_atomic = Some(params.agreed.ird.min(255) as u8);
        self.schedule(id);
        Ok(())
    }

    /// Ends a connection that was just begun, since the reply does not fit.
    pub(crate) fn refuse_stream(&mut self, id: QpId, disagreement: Disagreement) {
        self.with_stream(id, |stream, env| stream.refuse_reply(disagreement, env));
        self.schedule(id);
    }

    /// Takes in bytes of a stream.
    pub(crate) fn handle_stream(&mut self, now: Instant, id: QpId, bytes: &[u8]) {
        self.set_now(now);
        self.counters.rx_bytes += bytes.len() as u64;
        let faults = fault::count();
        self.with_stream(id, |stream, env| stream.handle_input(bytes, env));
        self.fail_where_faulted(id, faults);
        // It may have something to answer.
        self.schedule(id);
    }

    /// Ends a queue pair that has touched memory which was gone, if there was a fault beyond those that
    /// were counted. Nothing is repeated here that could find out which region it was.
    fn fail_where_faulted(&mut self, id: QpId, faults: u64) -> bool {
        let has_faulted = fault::count() != faults;
        if has_faulted {
            self.mrs.page_faulted();
            self.fail_qp(id);
        }
        has_faulted
    }

    /// The stream of a queue pair has ended.
    pub(crate) fn lose_stream(&mut self, now: Instant, id: QpId) {
        self.set_now(now);
        self.fail_qp(id);
    }

    /// The next queue pair that may have something to send, or that was destroyed.
    pub(crate) fn next_stream(&mut self) -> Option<QpId> {
        let id = self.ready.pop_front()?;
        if let Ok(qp) = self.qps.get_mut(id) {
            qp.is_queued = false;
        }
        Some(id)
    }

    /// Queue pairs that wait for their turn.
    pub(crate) fn ready_streams(&self) -> usize {
        self.ready.len()
    }

    /// Gives a queue pair another turn.
    pub(crate) fn wake_stream(&mut self, id: QpId) {
        self.schedule(id);
    }

    /// Appends what a queue pair sends now to `out`, until that has `limit` bytes. Answers whether
    /// there may be more.
    pub(crate) fn poll_stream(
        &mut self,
        now: Instant,
        id: QpId,
        out: &mut Vec<u8>,
        limit: usize,
    ) -> bool {
        self.set_now(now);
        let (before, faults) = (out.len(), fault::count());
        let has_more = self.with_stream(id, |stream, env| stream.poll_output(env, out, limit));
        self.counters.tx_bytes += (out.len() - before) as u64;
        if self.fail_where_faulted(id, faults) {
            out.truncate(before);
            return false;
        }
        has_more == Some(true)
    }

    /// Counts a connection that was refused, since its peer has as many as it may have.
    pub(crate) fn count_refused(&mut self) {
        self.counters.refused_qps += 1;
    }

    /// Whether nothing follows on a stream but the message that ends it, if there is one.
    pub(crate) fn has_stream_ended(&self, id: QpId) -> bool {
        let state = self.qps.get(id).map(Qp::state);
        !matches!(state, Ok(QpState::Rts | QpState::Sqd))
    }

    /// Whether a stream is to be closed when what was made is sent.
    pub(crate) fn is_stream_over(&self, id: QpId) -> bool {
        match self.qps.get(id).map(|qp| &qp.machine) {
            Ok(Machine::Stream(stream)) => stream.is_over(),
            _ => true,
        }
    }
}
