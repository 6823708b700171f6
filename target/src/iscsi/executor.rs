//! Executor: session, datamover and requests of a connection. It executes commands and functions,
//! and the [`Channel`](super::Channel) decides which PDUs it receives, and when the connection is
//! closed.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::login::{ConnectionParams, Identity, SessionParams};
use riser_scsi::iscsi::pdu::{
    FromTarget, LogoutResponse, LogoutStatus, NopIn, NopOut, Reject, RejectReason,
};
use riser_scsi::iscsi::{Itt, StatSn, Tsih, Ttt};
use riser_scsi::nexus::NexusId;

use super::action::Action;
use super::config::ChannelConfig;
use super::context::Cx;
use super::counters::Counters;
use super::datamover::{Control, Datamover};
use super::phase::Phase;
use super::reassigned::Allegiance;
use super::tasks::TaskTable;
use super::timers::Timers;
use super::window::Window;
use crate::audit::CloseReason;
use crate::fabric::{Backlog, LunMap, Statistics, TaskIdx};
use crate::log::RateLimit;
use crate::pool::Buffer;
use crate::stats::SessionEvent;
use crate::warn_limited;

/// Session state, available after login.
#[derive(Debug)]
pub(super) struct SessionContext {
    pub(super) identity: Identity,
    pub(super) tsih: Tsih,
    pub(super) params: SessionParams,
    pub(super) connection: ConnectionParams,
    pub(super) nexus: NexusId,
    pub(super) luns: Arc<LunMap>,
    pub(super) window: Arc<Window>,
}

/// Memory for immediate data when not in use by a command. FirstBurstLength at most.
#[derive(Debug, Default)]
pub(super) struct Staging(Vec<u8>);

impl Staging {
    /// Returns a copy of immediate data.
    pub(super) fn stage(&mut self, data: &[u8]) -> Vec<u8> {
        if data.is_empty() {
            return Vec::new();
        }
        let mut staged = std::mem::take(&mut self.0);
        staged.reserve_exact(data.len());
        staged.extend_from_slice(data);
        staged
    }

    /// Keeps a buffer for the next command with immediate data. A single buffer is usually enough
    /// because most commands start immediately. We release memory that exceeds the first burst.
    pub(super) fn keep(&mut self, mut list: Vec<u8>, first_burst: u32) {
        list.clear();
        if list.capacity() > self.0.capacity() && list.capacity() <= first_burst as usize {
            self.0 = list;
        }
    }

    fn memory(&self, most: usize) -> usize {
        self.0.capacity().min(most)
    }
}

/// Session, datamover and requests of a connection.
#[derive(Debug)]
pub struct Executor<D> {
    pub(super) config: ChannelConfig,
    pub(super) phase: Phase,
    pub(super) session: Option<SessionContext>,
    pub(super) mover: D,
    pub(super) tasks: TaskTable,
    pub(super) staging: Staging,
    /// Number of bytes of unsolicited data that were announced by commands but not received yet.
    pub(super) unsolicited: u64,
    pub(super) allegiance: Allegiance,
    /// Commands waiting for memory or for rate limits.
    pub(super) backlog: Backlog,
    pub(super) timers: Timers,
    /// An I_T NEXUS RESET was received and the session will be closed.
    pub(super) is_reset: bool,
    /// Reason for closing the connection, if known.
    pub(super) ended: Option<CloseReason>,
    pub(super) actions: VecDeque<Action>,
    pub(super) stats: Statistics<Counters>,
    pub(super) complaints: RateLimit,
}

impl<D: Datamover> Executor<D> {
    pub(super) fn new(config: ChannelConfig, mover: D, now: Instant) -> Self {
        Self {
            phase: Phase::Login,
            session: None,
            mover,
            tasks: TaskTable::new(&config),
            staging: Staging::default(),
            unsolicited: 0,
            allegiance: Allegiance::default(),
            backlog: Backlog::new(config.serial, config.commands.into()),
            timers: Timers::new(now, config.data_out_timeout, config.commands),
            is_reset: false,
            ended: None,
            actions: VecDeque::new(),
            stats: Statistics::default(),
            complaints: RateLimit::default(),
            config,
        }
    }

    /// Returns the memory in bytes used by unsolicited data without a buffer. Each command can have
    /// up to FirstBurstLength, in a vector whose capacity might have doubled.
    #[must_use]
    pub fn staged_memory(&self) -> usize {
        let most = self.first_burst() as usize * 2;
        self.tasks.staged_memory(most) + self.staging.memory(most)
    }

    /// Returns the statistics of the connection.
    #[must_use]
    pub fn stats(&self) -> &Statistics<Counters> {
        &self.stats
    }

    /// Returns the number of requests with a context.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the total number of waits for pool memory, counted for each unit.
    #[must_use]
    pub fn pool_waits_begun(&self) -> u64 {
        self.backlog.waits_begun()
    }

    /// Returns the number of units with commands waiting for pool memory.
    #[must_use]
    pub fn pool_waits(&self) -> usize {
        self.backlog.memory_waits()
    }

    /// Returns the data buffer of a task for its block operation, if it's required.
    #[must_use]
    pub fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        self.tasks[task].exec.buffer.as_ref()
    }

    /// Returns the data transfer pace.
    #[cfg(test)]
    pub(crate) fn pace(&self) -> &crate::fabric::Pace {
        &self.timers.pace
    }

    /// Returns the state of the request with this tag, if it exists.
    #[cfg(test)]
    pub(crate) fn task_state(&self, itt: Itt) -> Option<super::TaskState> {
        self.tasks.state(itt)
    }

    /// Returns the command window of the session.
    pub(super) fn window(&self) -> &Arc<Window> {
        let session = self.session.as_ref().expect("full-feature phase");
        &session.window
    }

    /// Returns true for a discovery session.
    pub(super) fn is_discovery(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.params.discovery)
    }

    /// Returns FirstBurstLength, or zero before login.
    pub(super) fn first_burst(&self) -> u32 {
        self.session.as_ref().map_or(0, |s| s.params.first_burst)
    }

    /// Called when a response is passed to the datamover, which frees a slot in the window.
    pub(super) fn mark_sent(&mut self, idx: TaskIdx) {
        let session = self.session.as_ref().expect("full-feature phase");
        self.tasks.mark_sent(idx, &session.window);
        self.stats.counters.responded += 1;
    }

    pub(super) fn send(&mut self, pdu: FromTarget, data: Vec<u8>, counts: bool) {
        self.mover.send_control(Control {
            pdu,
            data,
            counts,
            ends: None,
        });
    }

    pub(super) fn reject(
        &mut self,
        cx: &Cx<'_>,
        frame: &Frame<'_>,
        reason: RejectReason,
        why: &dyn Display,
    ) {
        self.stats.counters.rejected += 1;
        warn_limited!(
            self.complaints, cx.now,
            opcode = frame.bhs[0] & 0x3f, ?reason, %why, "PDU rejected"
        );
        let header = frame.bhs.to_vec();
        self.send(FromTarget::Reject(Reject { reason }), header, true);
    }

    /// Counts a PDU with a digest error.
    pub(super) fn on_digest_error(&mut self, cx: &mut Cx<'_>) {
        self.stats.counters.digest_errors += 1;
        cx.gate.count(SessionEvent::DigestError);
    }

    pub(super) fn on_acknowledged(&mut self, cx: &mut Cx<'_>, exp: Option<StatSn>) {
        for task in self.mover.acknowledge(exp) {
            self.finish_with_response(cx, task, exp.is_some());
        }
    }

    pub(super) fn on_nop(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, nop: &NopOut) {
        if nop.itt == Itt::NONE && !nop.immediate {
            return self.reject(
                cx,
                frame,
                RejectReason::ProtocolError,
                &"no tag, not immediate",
            );
        }
        // This is a ping response or only an acknowledgment, so we must not respond.
        if nop.itt == Itt::NONE {
            return;
        }
        // Return as much of the ping data as the initiator can receive in a segment.
        let limit = self.mover.max_send_segment() as usize;
        let data = frame.data[..frame.data.len().min(limit)].to_vec();
        let response = NopIn {
            lun: nop.lun,
            itt: nop.itt,
            ttt: Ttt::NONE,
        };
        self.send(FromTarget::NopIn(response), data, true);
    }

    pub(super) fn send_ping(&mut self, now: Instant) {
        let ping = NopIn {
            lun: [0; 8],
            itt: Itt::NONE,
            ttt: self.timers.start_ping(now),
        };
        self.send(FromTarget::NopIn(ping), Vec::new(), false);
    }

    /// Responds to a logout.
    pub(super) fn respond_logout(&mut self, itt: Itt, status: LogoutStatus) {
        let params = self.session.as_ref().map(|s| s.params);
        let response = LogoutResponse {
            itt,
            status,
            time2wait: params.map_or(0, |p| p.time2wait),
            time2retain: params.map_or(0, |p| p.time2retain),
        };
        self.send(FromTarget::LogoutResponse(response), Vec::new(), true);
    }
}
