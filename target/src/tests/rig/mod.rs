//! A test rig for the connections of a protocol: [`TcpPeer`](tcp::TcpPeer),
//! [`IserPeer`](iser::IserPeer) or [`SrpPeer`](srp::SrpPeer). It is their worker, with a pool, disks
//! and devices, and their initiators. The test decides when the work of disks and devices
//! completes.

mod gate;
pub(crate) mod iscsi;
pub(crate) mod iser;
pub(crate) mod script;
pub(crate) mod srp;
pub(crate) mod tcp;

use std::collections::HashMap;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::config::Config;
use riser_scsi::lu::LogicalUnit;
use riser_scsi::step::{BackendError, BlockOp, StepResult};

pub(crate) use self::gate::FakeGate;
use self::script::{Command, Management, Response};
use crate::fabric::task_mgmt::Function;
use crate::fabric::{Direction, Mapping, RdmaRequest, TaskAction, TaskIdx, TaskRef, Unit, UnitIdx};
use crate::fixture::windowed_unit_config;
use crate::iscsi::TaskState;
use crate::pool::{Buffer, Pool};
use crate::stats::{LunStats, SessionEvent};
use crate::worker::fabrics::{Input, Spares};

/// Size of a disk in bytes.
pub(crate) const DISK: usize = 1 << 20;

/// Number of units, which are LUN 0 and 1.
pub(crate) const UNITS: u16 = 2;

/// A unit whose commands can have `window` bytes of data in memory at a time.
pub(crate) fn windowed(window: u32) -> Config {
    windowed_unit_config((DISK / 512) as u64, window)
}

/// A connection with the initiator at its other end.
pub(crate) trait Peer: Sized {
    /// Request to the worker, other than a [`TaskAction`].
    type Action;
    /// Message received by the initiator.
    type Message: Debug;
    /// Index of a chain of work requests.
    type Chain: Copy + Debug;
    /// Message at the end of a chain.
    type Outgoing: Debug;

    /// Start address of the initiator's memory for each key.
    const BASE: u64;

    /// Nexus of the first connection of a script.
    const NEXUS: u64;

    /// Nexus of the next connection of the same initiator.
    const SIBLING: u64;

    /// Task management functions that abort tasks without closing the session.
    const FUNCTIONS: &[Function];

    /// Events that are counted for a connection that timed out.
    const TIMEOUT_EVENTS: &[SessionEvent];

    /// The disk cancels an aborted operation immediately, instead of when the test completes it.
    const CANCELS: bool;

    /// Creates units without a connection.
    fn rig(config: &Config) -> Rig<Self>;

    /// Creates a connection that is ready for commands.
    fn connect(rig: &mut Rig<Self>, nexus: u64) -> usize;

    fn send_command(rig: &mut Rig<Self>, peer: usize, command: &Command);

    fn send_function(rig: &mut Rig<Self>, peer: usize, management: Management);

    /// Returns the response in a message, if any.
    fn response(message: &Self::Message) -> Option<Response>;

    /// Returns the state of a request.
    fn task_state(&self, tag: u32) -> Option<TaskState>;

    fn deadline(&self) -> Option<Instant>;

    /// Shows that the initiator is alive.
    fn keep_alive(rig: &mut Rig<Self>, peer: usize);

    /// Passes an input to a connection, without executing its actions.
    fn input(rig: &mut Rig<Self>, peer: usize, input: Input);

    /// Returns the connection number.
    fn serial(&self) -> u64;

    fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer>;

    fn poll_action(&mut self) -> Option<Result<TaskAction, Self::Action>>;

    fn carry_out(rig: &mut Rig<Self>, peer: usize, action: Self::Action);

    /// Handles a request for the task of another connection, which is not in the rig.
    fn forward(&mut self, action: TaskAction) {
        panic!("unknown connection: {action:?}");
    }

    /// Collects more work from the connections. Returns whether there was any.
    fn poll_work(_: &mut Rig<Self>) -> bool {
        false
    }

    /// Sends the oldest messages to the initiators, or fails. Returns whether there were any.
    fn transmit(rig: &mut Rig<Self>, ok: bool) -> bool;

    /// Passes the oldest messages to the device or socket, which does not send them yet. Returns
    /// whether there are any.
    fn hold(rig: &mut Rig<Self>) -> bool {
        rig.work.iter().any(Work::is_chain)
    }

    /// Fails the messages that are held by a socket.
    fn drop_messages(_: &mut Rig<Self>) {}

    /// Provides the data that was requested while [`Rig::withholds_data`] was set.
    fn provide_data(_: &mut Rig<Self>) {}

    /// Returns whether the initiator has not invalidated this key.
    fn is_valid(&self, _: u32) -> bool {
        true
    }

    /// The queue pair is in the error state.
    fn in_error(&self) -> bool;

    /// Completes a chain. The initiator receives its message if `ok` is set.
    fn complete_chain(
        rig: &mut Rig<Self>,
        peer: usize,
        chain: Self::Chain,
        message: Option<Self::Outgoing>,
        ok: bool,
    );

    fn complete_probe(_: &mut Rig<Self>, _: usize, _: bool) {
        unreachable!("only SRP probes its initiator");
    }

    /// Flushes all posted receives.
    fn flush_receives(_: &mut Rig<Self>, _: usize) {}

    /// Checks that the resources of a connection are released.
    fn check_released(&self);
}

/// Work that a disk or a device has not completed yet.
#[derive(Debug)]
pub(crate) enum Work<C, M> {
    Block {
        peer: usize,
        task: TaskIdx,
        unit: UnitIdx,
        op: BlockOp,
        aborted: bool,
    },
    /// RDMA requests, followed by a message.
    Chain {
        peer: usize,
        chain: C,
        requests: Vec<RdmaRequest>,
        message: Option<M>,
    },
    /// A signaled write of zero bytes.
    Probe { peer: usize },
    /// The drain marker of a queue pair in the error state.
    Drain { peer: usize },
}

impl<C, M> Work<C, M> {
    pub(crate) fn is_block(&self) -> bool {
        matches!(self, Self::Block { .. })
    }

    pub(crate) fn is_chain(&self) -> bool {
        matches!(self, Self::Chain { .. })
    }

    /// Returns the peer if this is work of its queue pair, which completes in order.
    fn queue(&self) -> Option<usize> {
        match self {
            Self::Chain { peer, .. } | Self::Probe { peer } | Self::Drain { peer } => Some(*peer),
            Self::Block { .. } => None,
        }
    }
}

/// Dereferences to its first connection.
pub(crate) struct Rig<P: Peer> {
    pub(crate) now: Instant,
    pub(crate) pool: Pool,
    pub(crate) spares: Spares,
    pub(crate) gate: FakeGate,
    pub(crate) units: Vec<Arc<Unit>>,
    /// Command statistics.
    pub(crate) stats: Vec<Arc<LunStats>>,
    pub(crate) disks: Vec<Vec<u8>>,
    /// Memory of all initiators, by key.
    pub(crate) memory: HashMap<u32, Vec<u8>>,
    pub(crate) peers: Vec<P>,
    pub(crate) work: Vec<Work<P::Chain, P::Outgoing>>,
    /// Messages received by the initiators.
    pub(crate) received: Vec<(usize, P::Message)>,
    /// Block operations complete immediately.
    pub(crate) prompt: bool,
    /// Messages are only sent, and chains are only executed, when the test completes them.
    pub(crate) stalled: bool,
    /// The target may only access valid ranges. Otherwise, the initiator's device refuses this.
    pub(crate) checks_keys: bool,
    /// The initiators do not provide the data of commands.
    pub(crate) withholds_data: bool,
}

impl<P: Peer> Deref for Rig<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.peers[0]
    }
}

impl<P: Peer> DerefMut for Rig<P> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.peers[0]
    }
}

impl<P: Peer> Rig<P> {
    /// Creates units without a connection.
    pub(crate) fn of_units(config: &Config) -> Self {
        let unit = |index: u16| {
            let lu = Arc::new(LogicalUnit::new(config.clone()).unwrap());
            Arc::new(Unit::new(UnitIdx(index.into()), lu, 64))
        };
        let units: Vec<_> = (0..UNITS).map(unit).collect();
        let stats = (0..UNITS).map(|lun| Arc::new(LunStats::new("t", lun, None)));
        let stats: Vec<_> = stats.collect();
        let mapping = |(unit, stats): (&Arc<Unit>, &Arc<LunStats>)| Mapping {
            unit: Arc::clone(unit),
            stats: Arc::clone(stats),
            read_only: false,
        };
        Self {
            now: Instant::now(),
            pool: Pool::new(4 << 20).unwrap(),
            spares: Spares::default(),
            gate: FakeGate::new(units.iter().zip(&stats).map(mapping).collect()),
            disks: vec![vec![0; DISK]; units.len()],
            units,
            stats,
            memory: HashMap::new(),
            peers: Vec::new(),
            work: Vec::new(),
            received: Vec::new(),
            prompt: false,
            stalled: false,
            checks_keys: true,
            withholds_data: false,
        }
    }

    /// Executes all actions, and completes the work that does not wait for the test.
    pub(crate) fn pump(&mut self) {
        while self.poll_actions() || P::poll_work(self) || self.complete_ready() {}
    }

    /// Executes the actions of all connections. Returns whether there were any.
    fn poll_actions(&mut self) -> bool {
        let mut any = false;
        for peer in 0..self.peers.len() {
            while let Some(action) = self.peers[peer].poll_action() {
                any = true;
                match action {
                    Ok(action) => self.carry_out(peer, action),
                    Err(action) => P::carry_out(self, peer, action),
                }
            }
        }
        any
    }

    fn carry_out(&mut self, peer: usize, action: TaskAction) {
        let (owner, input) = match action {
            TaskAction::SubmitBlock { task, unit, op } => {
                return self.work.push(Work::Block {
                    peer,
                    task,
                    unit,
                    op,
                    aborted: false,
                });
            }
            TaskAction::AbortBlock(task) => return self.abort_block(peer, task),
            TaskAction::UnitEvent { unit, attention } => {
                for peer in 0..self.peers.len() {
                    P::input(self, peer, Input::Event { unit, attention });
                }
                return;
            }
            TaskAction::StartTask(task) => (task, Input::StartTask(task)),
            TaskAction::AbortTask { task, watcher } => (task, Input::AbortTask { task, watcher }),
            TaskAction::TaskGone(watcher) => (watcher, Input::TaskGone(watcher)),
        };
        match self.peer_of(owner) {
            Some(owner) => P::input(self, owner, input),
            // The worker of the task is not in the rig.
            None if owner.worker != 0 => {}
            None => self.peers[peer].forward(action),
        }
    }

    fn peer_of(&self, task: TaskRef) -> Option<usize> {
        let mut peers = self.peers.iter();
        peers.position(|peer| peer.serial() == task.channel)
    }

    fn abort_block(&mut self, peer: usize, task: TaskIdx) {
        let is_it = |work: &Work<P::Chain, P::Outgoing>| matches!(work, Work::Block { peer: p, task: t, .. } if (*p, *t) == (peer, task));
        let at = self.work.iter().position(is_it).expect("a block operation");
        if P::CANCELS {
            self.work.remove(at);
            let result = StepResult::Failed(BackendError::Aborted);
            P::input(self, peer, Input::BlockDone(task, result));
        } else if let Work::Block { aborted, .. } = &mut self.work[at] {
            *aborted = true;
        }
    }

    fn complete_ready(&mut self) -> bool {
        let block = self.work.iter().position(Work::is_block);
        if let Some(at) = block.filter(|_| self.prompt) {
            self.finish_work(at, true);
            return true;
        }
        !self.stalled && P::transmit(self, true)
    }

    /// Returns the pending block operations.
    pub(crate) fn blocks(&self) -> Vec<BlockOp> {
        let ops = self.work.iter().filter_map(|work| match work {
            Work::Block { op, .. } => Some(*op),
            _ => None,
        });
        ops.collect()
    }

    fn block_at(&self, n: usize) -> usize {
        let mut work = self.work.iter().enumerate();
        let mut blocks = work.by_ref().filter(|(_, work)| work.is_block());
        blocks.nth(n).expect("a block operation").0
    }

    /// Completes a block operation, without executing the resulting actions.
    pub(crate) fn finish_block(&mut self, n: usize) {
        self.finish_work(self.block_at(n), true);
    }

    /// Same as [`Rig::finish_block`], but with an error.
    pub(crate) fn fail_block(&mut self, n: usize, error: BackendError) {
        let Work::Block { peer, task, .. } = self.work.remove(self.block_at(n)) else {
            unreachable!("a block operation");
        };
        P::input(
            self,
            peer,
            Input::BlockDone(task, StepResult::Failed(error)),
        );
    }

    /// Completes the oldest chain, without executing the resulting actions. Returns whether there
    /// is one.
    pub(crate) fn finish_chain(&mut self, ok: bool) -> bool {
        let chain = self.work.iter().position(Work::is_chain);
        chain.map(|at| self.finish_work(at, ok)).is_some()
    }

    /// Executes the oldest chain of a queue pair, without executing the resulting actions. Returns
    /// whether there is one.
    fn execute_chain(&mut self, ok: bool) -> bool {
        let is_next = |at: &usize| {
            let work = &self.work[*at];
            let mut older = self.work[..*at].iter();
            let reads = |requests: &[RdmaRequest]| {
                let mut requests = requests.iter();
                requests.any(|request| request.direction == Direction::FromInitiator)
            };
            let is_ready = match work {
                Work::Chain { requests, .. } => !self.withholds_data || !reads(requests),
                _ => false,
            };
            is_ready && older.all(|older| older.queue() != work.queue())
        };
        let chain = (0..self.work.len()).find(is_next);
        chain.map(|at| self.finish_work(at, ok)).is_some()
    }

    /// Completes all block operations.
    pub(crate) fn complete_blocks(&mut self) {
        while let Some(at) = self.work.iter().position(Work::is_block) {
            self.complete_nth(at, true);
        }
    }

    /// Completes the oldest work.
    pub(crate) fn complete(&mut self) {
        self.complete_nth(0, true);
    }

    /// Completes some work. For a queue pair, this is always the oldest.
    pub(crate) fn complete_nth(&mut self, n: usize, ok: bool) {
        self.finish_work(n, ok);
        self.pump();
    }

    /// Completes all work.
    pub(crate) fn complete_all(&mut self) {
        self.pump();
        while !self.work.is_empty() {
            self.complete();
        }
    }

    fn finish_work(&mut self, n: usize, ok: bool) {
        let queue = self.work[n].queue();
        let oldest = self.work.iter().position(|work| work.queue() == queue);
        match self.work.remove(queue.and(oldest).unwrap_or(n)) {
            Work::Block {
                peer,
                task,
                unit,
                op,
                aborted,
            } => {
                let result = if aborted {
                    StepResult::Failed(BackendError::Aborted)
                } else if ok {
                    self.access_disk(peer, task, unit, op);
                    StepResult::Done
                } else {
                    StepResult::Failed(BackendError::Medium { offset: None })
                };
                P::input(self, peer, Input::BlockDone(task, result));
            }
            Work::Chain {
                peer,
                chain,
                requests,
                message,
            } => {
                let ok = ok && !self.peers[peer].in_error() && self.allows(peer, &requests);
                if ok {
                    self.move_data(&requests);
                }
                P::complete_chain(self, peer, chain, message, ok);
            }
            Work::Probe { peer } => {
                let ok = ok && !self.peers[peer].in_error();
                P::complete_probe(self, peer, ok);
            }
            Work::Drain { peer } => {
                P::flush_receives(self, peer);
                P::input(self, peer, Input::Drained);
            }
        }
    }

    fn access_disk(&mut self, peer: usize, task: TaskIdx, unit: UnitIdx, op: BlockOp) {
        let disk = &mut self.disks[unit.0 as usize];
        let (BlockOp::Read {
            offset,
            len,
            buffer_offset,
            ..
        }
        | BlockOp::Write {
            offset,
            len,
            buffer_offset,
            ..
        }) = op
        else {
            if let BlockOp::Discard { offset, len } | BlockOp::WriteZeroes { offset, len, .. } = op
            {
                disk[offset as usize..][..len as usize].fill(0);
            }
            return;
        };
        let mut at = offset as usize;
        let buffer = self.peers[peer].data_buffer(task).expect("a buffer");
        for slice in buffer.slices(buffer_offset..buffer_offset + len) {
            let blocks = &mut disk[at..at + slice.len()];
            match op {
                BlockOp::Read { .. } => slice.write(0, blocks),
                _ => slice.read(0, blocks),
            }
            at += slice.len();
        }
    }

    /// Returns whether the initiator's device allows access to all of these ranges.
    fn allows(&self, peer: usize, requests: &[RdmaRequest]) -> bool {
        let mut requests = requests.iter();
        let are_valid = requests.all(|request| {
            let key = request.remote.rkey.0;
            let start = request.remote.addr.checked_sub(P::BASE);
            let end = start.and_then(|start| start.checked_add(request.bytes().into()));
            let memory = self
                .memory
                .get(&key)
                .filter(|_| self.peers[peer].is_valid(key));
            let range = memory.zip(end);
            range.is_some_and(|(memory, end)| end <= memory.len() as u64)
        });
        assert!(are_valid || !self.checks_keys, "an invalid range");
        are_valid
    }

    fn move_data(&mut self, requests: &[RdmaRequest]) {
        for request in requests {
            let mut at = (request.remote.addr - P::BASE) as usize;
            let memory = self.memory.get_mut(&request.remote.rkey.0);
            let memory = memory.expect("a valid key");
            for local in &request.local {
                let remote = &mut memory[at..at + local.len()];
                match request.direction {
                    Direction::FromInitiator => self.pool.memory().write(local.start, remote),
                    Direction::ToInitiator => self.pool.memory().read(local.start, remote),
                }
                at += local.len();
            }
        }
    }

    /// Advances the time.
    pub(crate) fn advance(&mut self, by: Duration) {
        self.now += by;
        for peer in 0..self.peers.len() {
            P::input(self, peer, Input::Timeout);
            self.pump();
        }
    }

    /// Closes all connections, and checks that nothing is left.
    pub(crate) fn close(&mut self) {
        for peer in 0..self.peers.len() {
            P::input(self, peer, Input::Disconnected);
            self.pump();
        }
        P::drop_messages(self);
        self.check_gone();
    }

    /// Completes all work of connections that were closed, and checks that nothing is left.
    pub(crate) fn check_gone(&mut self) {
        self.complete_all();
        self.peers.iter().for_each(P::check_released);
        assert_eq!(self.pool.free(), self.pool.size());
        for unit in &self.units {
            assert_eq!((unit.tasks(), unit.limited()), (0, 0));
        }
    }
}
