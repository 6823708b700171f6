//! Sessions of the engine.

use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::Instant;

use riser_block::oneshot::Sender;
use slab::Slab;

use super::commands::CommandQueue;
use super::link::Link;
use super::message::Reply;
use super::outages::OutageLog;
use super::watched::WatchedUnits;
use super::workloads::Workloads;
use crate::engine::io::SessionKey;
use crate::engine::status::SessionStatus;
use crate::paths::PathIndex;

/// A session in the engine.
pub(super) struct EngineSession {
    serial: u64,
    pub(super) link: Link,
    pub(super) commands: CommandQueue,
    /// We are currently processing outputs of the machine. Some of them may complete requests whose
    /// identifiers the machine would assign to new commands.
    pub(super) is_draining: bool,
    pub(super) workloads: Workloads,
    pub(super) status: Arc<SessionStatus>,
    pub(super) reply: Option<Reply>,
    /// The paths that this session belongs to.
    pub(super) paths: Option<(SessionKey, PathIndex)>,
    pub(super) closers: Vec<Sender<bool>>,
    /// The session was settled when closed; see
    /// [`Machine::is_settled`](crate::session::Machine::is_settled).
    pub(super) was_settled: bool,
    pub(super) closed: bool,
    /// Watched units, which must remain unchanged.
    pub(super) units: WatchedUnits,
    pub(super) outages: OutageLog,
}

impl EngineSession {
    /// Returns whether the session is closed and nothing refers to it.
    fn is_over(&self) -> bool {
        self.closed && !self.commands.has_waiting() && self.workloads.is_empty()
    }
}

/// Sessions of an engine, by index.
#[derive(Default)]
pub(super) struct Sessions {
    slab: Slab<EngineSession>,
    next_serial: u64,
}

impl Sessions {
    /// Returns a number that was not used before.
    pub(super) fn assign_serial(&mut self) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        serial
    }

    /// Adds a session of a caller (`reply`) or of paths.
    pub(super) fn insert(
        &mut self,
        link: Link,
        status: Arc<SessionStatus>,
        reply: Option<Reply>,
        paths: Option<(SessionKey, PathIndex)>,
    ) -> SessionKey {
        let serial = self.assign_serial();
        let index = self.slab.insert(EngineSession {
            serial,
            link,
            commands: CommandQueue::default(),
            is_draining: false,
            workloads: Workloads::default(),
            status,
            reply,
            paths,
            closers: Vec::new(),
            was_settled: false,
            closed: false,
            units: WatchedUnits::default(),
            outages: OutageLog::default(),
        });
        SessionKey { index, serial }
    }

    /// Returns the index of a session, or `None` if it was closed.
    pub(super) fn find(&self, key: SessionKey) -> Option<usize> {
        let session = self.slab.get(key.index)?;
        (session.serial == key.serial).then_some(key.index)
    }

    /// Returns the key of the session at an index.
    pub(super) fn key(&self, index: usize) -> SessionKey {
        let serial = self.slab[index].serial;
        SessionKey { index, serial }
    }

    pub(super) fn get(&self, index: usize) -> Option<&EngineSession> {
        self.slab.get(index)
    }

    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut EngineSession> {
        self.slab.get_mut(index)
    }

    /// Returns an upper bound of the indices.
    pub(super) fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &EngineSession> {
        self.slab.iter().map(|(_, session)| session)
    }

    /// Returns the indices of all sessions.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        self.slab.iter().map(|(index, _)| index)
    }

    /// Returns the number of sessions on RDMA.
    pub(super) fn count_rdma(&self) -> usize {
        self.iter().filter(|session| session.link.is_rdma()).count()
    }

    /// Returns the time of the next timeout or wake-up of a workload.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let links = self.iter().filter_map(|s| s.link.next_deadline());
        let workloads = self.iter().filter_map(|s| s.workloads.next_wakeup());
        links.chain(workloads).min()
    }

    /// Removes the closed sessions.
    pub(super) fn remove_closed(&mut self) -> Vec<EngineSession> {
        // Doesn't allocate if no session is closed.
        let over = self.slab.iter().filter(|(_, session)| session.is_over());
        let over: Vec<usize> = over.map(|(index, _)| index).collect();
        over.into_iter().map(|at| self.slab.remove(at)).collect()
    }
}

impl Index<usize> for Sessions {
    type Output = EngineSession;

    fn index(&self, index: usize) -> &EngineSession {
        &self.slab[index]
    }
}

impl IndexMut<usize> for Sessions {
    fn index_mut(&mut self, index: usize) -> &mut EngineSession {
        &mut self.slab[index]
    }
}
