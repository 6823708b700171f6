//! Connections over byte streams ([`RdmapQp`]). The owner of the device transfers the data.
//!
//! ```text
//! device.start_stream(qp, &params)                      // when both sides have agreed
//! device.handle_stream(now, qp, bytes)                  // received data
//! while let Some(qp) = device.next_stream() { … }       // may have something to send:
//!     device.poll_stream(now, qp, &mut bytes, limit)
//! device.fail_qp(qp)                                    // the stream was closed
//! ```

use std::time::Instant;

use riser_memory::fault;

use super::Device;
use crate::nic::qp::{Machine, Qp};
use crate::nic::with_env;
use crate::rc::Env;
use crate::rdmap::setup::Disagreement;
use crate::rdmap::{RdmapQp, StreamParams};
use crate::verbs::{Access, QpId, QpState, VerbsError};

impl Device {
    /// Calls `f` with a connection and its environment, then passes on the events.
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
            self.finish_turn(id);
        }
        Some(result)
    }

    /// Starts the stream of a QP in the INIT state. The peer gets the access rights set for this
    /// QP.
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
            return Err(VerbsError::InvalidState("queue pair without a stream"));
        };
        if stream.state() != QpState::Init {
            return Err(VerbsError::InvalidState("queue pair is not in INIT"));
        }
        let access = qp.attr.access.unwrap_or_default() & Access::REMOTE;
        stream.start(&StreamParams { access, ..*params });
        // Device limits are less than 256.
        qp.attr.max_rd_atomic = Some(params.agreed.ord.min(255) as u8);
        qp.attr.max_dest_rd_atomic = Some(params.agreed.ird.min(255) as u8);
        self.schedule_qp(id);
        Ok(())
    }

    /// Closes a new connection because the reply is not compatible.
    pub(crate) fn refuse_stream(&mut self, id: QpId, disagreement: Disagreement) {
        self.with_stream(id, |stream, env| stream.refuse_reply(disagreement, env));
        self.schedule_qp(id);
    }

    /// Handles data received from a stream.
    pub(crate) fn handle_stream(&mut self, now: Instant, id: QpId, bytes: &[u8]) {
        self.set_now(now);
        self.counters.rx_bytes += bytes.len() as u64;
        let faults = fault::count();
        self.with_stream(id, |stream, env| stream.handle_input(bytes, env));
        self.fail_where_faulted(id, faults);
        // The connection may need to send a response.
        self.schedule_qp(id);
    }

    /// Fails a QP if there were new memory faults while it was running, which means it has accessed
    /// unmapped memory. Streams don't retransmit, so we can't find out which region was affected.
    fn fail_where_faulted(&mut self, id: QpId, faults: u64) -> bool {
        let has_faulted = fault::count() != faults;
        if has_faulted {
            self.memory.mrs.page_faulted();
            self.fail_qp(id);
        }
        has_faulted
    }

    /// Returns the next QP that may have something to send, or has been destroyed.
    pub(crate) fn next_stream(&mut self) -> Option<QpId> {
        let id = self.schedule.pop()?;
        if let Ok(qp) = self.qps.get_mut(id) {
            qp.is_queued = false;
        }
        Some(id)
    }

    /// Appends data to be sent by a QP to `out`, until it contains `limit` bytes. Returns whether
    /// more data may be available.
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

    /// Returns whether nothing more will be sent on this stream, except for a terminate message if
    /// needed.
    pub(crate) fn has_stream_ended(&self, id: QpId) -> bool {
        let state = self.qps.get(id).map(Qp::state);
        !matches!(state, Ok(QpState::Rts | QpState::Sqd))
    }

    /// Returns whether the stream should be closed after sending the remaining data.
    pub(crate) fn is_stream_over(&self, id: QpId) -> bool {
        match self.qps.get(id).map(|qp| &qp.machine) {
            Ok(Machine::Stream(stream)) => stream.is_over(),
            _ => true,
        }
    }
}
