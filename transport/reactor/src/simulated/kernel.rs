//! [`Kernel`]: the operations of a ring, until their driver completes them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use riser_memory::MemSlice;

use super::io_wq::{self, Execution};
use super::{Disk, File, Object, Socket};
use crate::handle::Handle;
use crate::objects::Writing;
use crate::op::{Cqe, Durability, Fallocate, Op, Receive};
use crate::slot::Slot;

/// Identifies a pending operation. Unique within a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId(u64);

/// A pending operation.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Identifies the operation.
    pub id: OperationId,
    /// The requested operation.
    pub op: Op,
    /// The file or socket that it uses.
    pub handle: Handle,
    /// Length of its memory in bytes.
    pub len: usize,
    /// Set if the ring has requested its cancellation.
    pub is_cancelled: bool,
    /// Set if it would complete now. A receive without any data would not.
    pub is_ready: bool,
    /// Set if it is waiting for a kernel thread. It can only be completed by cancelling it.
    pub is_queued: bool,
}

impl Operation {
    /// Returns the disk, if it is an operation on a disk.
    #[must_use]
    pub fn disk(&self) -> Option<&Disk> {
        match self.handle.simulated() {
            Some(Object::File(file)) => Some(file.disk()),
            _ => None,
        }
    }
}

/// How an operation should complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// As requested.
    Whole,
    /// A transfer moves at most this many bytes.
    Short(usize),
    /// The operation has no effect, and this error number is reported.
    Failed(i32),
    /// The operation has its full effect, but this error number is reported.
    DoneButFailed(i32),
}

/// The driver's end of a simulated ring. Clones refer to the same ring.
#[derive(Debug, Clone)]
pub struct Kernel(Rc<RefCell<State>>);

/// The ring's end.
#[derive(Debug)]
pub(crate) struct Queue(Rc<RefCell<State>>);

#[derive(Debug, Default)]
struct State {
    /// Operations that the ring has not submitted yet.
    queued: Vec<Pending>,
    /// Pending operations, in submission order.
    pending: Vec<Pending>,
    /// Completions, with the sockets of accepts.
    completions: VecDeque<(Cqe, Option<Handle>)>,
    is_closed: bool,
    /// Threads for blocking operations.
    threads: usize,
}

#[derive(Debug)]
struct Pending {
    user_data: u64,
    op: Op,
    handle: Handle,
    slices: Vec<MemSlice>,
    is_cancelled: bool,
    /// Bytes transferred so far, if a transfer is waiting for its remaining bytes.
    moved: usize,
    /// Number of arrivals that a poll has reported.
    reported: u64,
    /// The last change of the disk before this was submitted. A flush is only guaranteed to cover
    /// changes up to this one.
    before: u64,
    /// Bytes that are being written to the page cache.
    writing: Option<Writing>,
    execution: Execution,
}

/// Result of trying to complete an operation.
enum OperationResult {
    /// The operation is still waiting.
    Waits,
    Result(i32),
    /// One event of a multishot poll.
    Event(i32),
    Socket(Handle),
}

impl From<Result<usize, i32>> for OperationResult {
    fn from(result: Result<usize, i32>) -> Self {
        Self::Result(match result {
            // The length of a transfer always fits in an `i32`.
            Ok(moved) => moved as i32,
            Err(errno) => -errno,
        })
    }
}

impl Kernel {
    /// Creates a kernel for a ring with this number of entries. It has `threads` threads for
    /// blocking operations, or the kernel's default if this is 0.
    pub(crate) fn new(threads: u32, entries: u32) -> (Queue, Self) {
        let state = Rc::new(RefCell::new(State {
            threads: io_wq::limit(threads, entries),
            ..State::default()
        }));
        (Queue(Rc::clone(&state)), Self(state))
    }

    /// Returns pending operations, in submission order.
    #[must_use]
    pub fn operations(&self) -> Vec<Operation> {
        let state = self.0.borrow();
        state.pending.iter().map(Pending::describe).collect()
    }

    /// Like [`Kernel::operations`], but without operations that cannot complete because one of
    /// these disks hangs.
    #[must_use]
    pub fn operations_except(&self, hung: &[Disk]) -> Vec<Operation> {
        let state = self.0.borrow();
        let hangs = |pending: &&Pending| match pending.handle.simulated() {
            Some(Object::File(file)) => {
                !pending.is_ended() && hung.iter().any(|disk| disk.is_same(file.disk()))
            }
            _ => false,
        };
        let able = state.pending.iter().filter(|pending| !hangs(pending));
        able.map(Pending::describe).collect()
    }

    /// Returns the memory of a pending operation, which the driver may change.
    #[must_use]
    pub fn memory(&self, id: OperationId) -> Vec<MemSlice> {
        let state = self.0.borrow();
        let pending = state.pending.iter().find(|p| p.user_data == id.0);
        pending.map_or_else(Vec::new, |pending| pending.slices.clone())
    }

    /// Executes an operation and reports its completion to the ring. Returns the result, or `None`
    /// if there is no such operation, or if it is still waiting for its socket or for a thread.
    pub fn complete(&self, id: OperationId, outcome: Outcome) -> Option<i32> {
        let state = &mut *self.0.borrow_mut();
        let at = state.pending.iter().position(|p| p.user_data == id.0)?;
        let end = state.pending[at].execute(outcome);
        let (result, more, socket) = match end {
            OperationResult::Waits => return None,
            OperationResult::Result(result) => (result, false, None),
            OperationResult::Event(result) => (result, true, None),
            OperationResult::Socket(socket) => (0, false, Some(socket)),
        };
        // Its handle and memory are released before the ring sees the completion, like on the host.
        if !more {
            state.pending.remove(at);
            state.start_queued();
        }
        let user_data = id.0;
        let cqe = Cqe {
            user_data,
            result,
            more,
        };
        state.completions.push_back((cqe, socket));
        Some(result)
    }

    /// Completes all operations that are ready, in submission order. Returns their number.
    pub fn complete_all(&self) -> usize {
        let ready = self.operations().into_iter().filter(|op| op.is_ready);
        let done = ready.filter_map(|op| self.complete(op.id, Outcome::Whole));
        done.count()
    }

    /// Returns whether there are completions that the ring has not reaped.
    #[must_use]
    pub fn has_completions(&self) -> bool {
        !self.0.borrow().completions.is_empty()
    }

    /// Returns whether the ring was dropped. Operations that were pending at that time were not
    /// executed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.borrow().is_closed
    }
}

impl Queue {
    pub(crate) fn submit(&mut self, op: Op, user_data: u64, file: &Handle, slot: &Slot) {
        let reported = 0;
        self.0.borrow_mut().queued.push(Pending {
            user_data,
            op,
            handle: file.clone(),
            slices: slot.keep.clone(),
            is_cancelled: false,
            moved: 0,
            reported,
            before: 0,
            writing: None,
            execution: match file.simulated() {
                Some(Object::File(file)) => Execution::of(op, file),
                _ => Execution::Inline,
            },
        });
    }

    pub(crate) fn cancel(&mut self, user_data: u64) {
        let state = &mut *self.0.borrow_mut();
        let all = state.queued.iter_mut().chain(&mut state.pending);
        for pending in all.filter(|pending| pending.user_data == user_data) {
            pending.is_cancelled = true;
        }
    }

    pub(crate) fn enter(&mut self) {
        let state = &mut *self.0.borrow_mut();
        for pending in &mut state.queued {
            if pending.execution == Execution::Inline {
                pending.start();
            }
        }
        state.pending.append(&mut state.queued);
        state.start_queued();
    }

    pub(crate) fn take_completion(&mut self) -> Option<(Cqe, Option<Handle>)> {
        self.0.borrow_mut().completions.pop_front()
    }

    /// Drops all operations. Always returns true, because none of them will be executed anymore.
    pub(crate) fn close(&mut self) -> bool {
        let old = self.0.replace(State {
            is_closed: true,
            ..State::default()
        });
        drop(old);
        true
    }
}

impl State {
    /// Starts queued operations while threads are available.
    fn start_queued(&mut self) {
        let is_busy = |pending: &&Pending| matches!(pending.execution, Execution::Running { .. });
        let busy = self.pending.iter().filter(is_busy);
        let mut free = self.threads.saturating_sub(busy.count());
        for at in 0..self.pending.len() {
            let Execution::Queued { hashed } = self.pending[at].execution else {
                continue;
            };
            if free == 0 {
                break;
            }
            let is_hash_busy = hashed && self.is_hash_busy(at);
            if !self.pending[at].is_cancelled && !is_hash_busy {
                self.pending[at].execution = Execution::Running { hashed };
                self.pending[at].start();
                free -= 1;
            }
        }
    }

    /// Returns whether a hashed operation of the same file blocks a thread.
    fn is_hash_busy(&self, at: usize) -> bool {
        let disk = |pending: &Pending| match pending.handle.simulated() {
            Some(Object::File(file)) => Some(file.disk().clone()),
            _ => None,
        };
        let own = disk(&self.pending[at]);
        let mut hashed = self
            .pending
            .iter()
            .filter(|pending| pending.execution == Execution::Running { hashed: true });
        hashed.any(|other| match (&own, disk(other)) {
            (Some(own), Some(other)) => own.is_same(&other),
            _ => false,
        })
    }
}

impl Pending {
    /// Starts the operation. A flush covers earlier writes.
    fn start(&mut self) {
        if let Some(Object::File(file)) = self.handle.simulated() {
            self.before = file.disk().changes();
            if let Op::Write { offset, .. } = self.op {
                self.writing = file.begin_write(offset, || self.gather(0));
            }
        }
    }

    fn describe(&self) -> Operation {
        Operation {
            id: OperationId(self.user_data),
            op: self.op,
            handle: self.handle.clone(),
            len: self.len(),
            is_cancelled: self.is_cancelled,
            is_ready: self.is_ready(),
            is_queued: self.is_queued(),
        }
    }

    fn is_queued(&self) -> bool {
        matches!(self.execution, Execution::Queued { .. })
    }

    fn len(&self) -> usize {
        self.slices.iter().map(MemSlice::len).sum()
    }

    /// Returns whether its cancellation completes it. An operation that the disk has started is not
    /// interrupted, and its thread is not freed.
    fn is_ended(&self) -> bool {
        let is_disk = matches!(self.handle.simulated(), Some(Object::File(_)));
        self.is_cancelled && (!is_disk || self.is_queued())
    }

    fn is_ready(&self) -> bool {
        if self.is_ended() || self.is_queued() {
            return self.is_ended();
        }
        match (self.op, self.handle.simulated()) {
            (Op::Receive(mode), Some(Object::Socket(socket))) => {
                socket.is_readable(self.least(mode))
            }
            (Op::Send, Some(Object::Socket(socket))) => socket.is_writable(),
            (Op::Poll { .. }, Some(Object::Socket(socket))) => {
                socket.is_readable(1) && socket.arrivals() > self.reported
            }
            (Op::Accept | Op::Poll { .. }, Some(Object::Listener(listener))) => {
                listener.is_waiting()
            }
            // Disks are always ready, and so are errors.
            _ => true,
        }
    }

    /// Returns the number of bytes that a receive waits for.
    fn least(&self, mode: Receive) -> usize {
        match mode {
            Receive::Some => 1,
            Receive::All => (self.len() - self.moved).max(1),
        }
    }

    /// Executes the operation, subject to the outcome.
    fn execute(&mut self, outcome: Outcome) -> OperationResult {
        match outcome {
            _ if self.is_queued() && !self.is_ended() => OperationResult::Waits,
            Outcome::Failed(errno) => OperationResult::Result(-errno),
            _ if self.is_ended() => OperationResult::Result(-libc::ECANCELED),
            Outcome::Whole => self.carry_out(usize::MAX),
            Outcome::Short(most) => self.carry_out(most),
            Outcome::DoneButFailed(errno) => match self.carry_out(usize::MAX) {
                OperationResult::Waits => OperationResult::Waits,
                _ => OperationResult::Result(-errno),
            },
        }
    }

    fn carry_out(&mut self, most: usize) -> OperationResult {
        let handle = self.handle.clone();
        match handle.simulated() {
            Some(Object::File(file)) => self.on_file(file, most),
            Some(Object::Socket(socket)) => self.on_socket(socket, most),
            Some(Object::Listener(listener)) => match self.op {
                Op::Accept => listener.accept().map_or(OperationResult::Waits, |socket| {
                    OperationResult::Socket(socket.into())
                }),
                Op::Poll { .. } if !listener.is_waiting() => OperationResult::Waits,
                Op::Poll { .. } => OperationResult::Result(i32::from(libc::POLLIN)),
                _ => OperationResult::Result(-libc::EINVAL),
            },
            // Real descriptors do not work on the simulated kernel.
            None => OperationResult::Result(-libc::EBADF),
        }
    }

    fn on_file(&self, file: &File, most: usize) -> OperationResult {
        let disk = file.disk();
        let done = match self.op {
            Op::Read { offset } => {
                let mut bytes = vec![0; self.len().min(most)];
                let read = file.read(offset, &mut bytes);
                if let Ok(len) = read {
                    self.scatter(0, &bytes[..len]);
                }
                read
            }
            Op::Write { offset, durability } => {
                let mut bytes = self.gather(0);
                bytes.truncate(most);
                disk.write(offset, &bytes);
                match durability {
                    // The data may still be lost in a crash, like data in the page cache of a host.
                    // So a failed write-back is reported by the next flush, not here.
                    Durability::Cached => Ok(bytes.len()),
                    Durability::Durable => {
                        disk.flush_range(offset, bytes.len() as u64);
                        file.check_write_back().map(|()| bytes.len())
                    }
                }
            }
            Op::Sync(_) => {
                disk.flush_until(self.before);
                file.check_write_back().map(|()| 0)
            }
            Op::Fallocate { what, offset, len } => {
                match what {
                    Fallocate::Allocate => disk.allocate(offset, len),
                    Fallocate::PunchHole => disk.zero(offset, len, false),
                    Fallocate::ZeroRange => disk.zero(offset, len, true),
                }
                Ok(0)
            }
            Op::Poll { .. } => Ok(libc::POLLIN as usize),
            Op::Accept | Op::Receive(_) | Op::Send => Err(libc::ENOTSOCK),
        };
        OperationResult::from(done)
    }

    fn on_socket(&mut self, socket: &Socket, most: usize) -> OperationResult {
        match self.op {
            Op::Receive(mode) => {
                let is_over = socket.is_readable(self.least(mode));
                let room = (self.len() - self.moved).min(most);
                match socket.receive(room) {
                    Ok(bytes) => {
                        self.scatter(self.moved, &bytes);
                        self.moved += bytes.len();
                        // A receive that waits for all bytes keeps the part received so far.
                        match is_over || most < usize::MAX && self.moved > 0 {
                            true => OperationResult::from(Ok(self.moved)),
                            false => OperationResult::Waits,
                        }
                    }
                    Err(_) if self.moved > 0 => OperationResult::from(Ok(self.moved)),
                    Err(errno) => OperationResult::from(Err(errno)),
                }
            }
            Op::Send => {
                let mut rest = self.gather(self.moved);
                let left = rest.len();
                rest.truncate(most);
                match socket.send(&rest) {
                    Ok(sent) => {
                        self.moved += sent;
                        match sent == left || most < usize::MAX && self.moved > 0 {
                            true => OperationResult::from(Ok(self.moved)),
                            false => OperationResult::Waits,
                        }
                    }
                    Err(_) if self.moved > 0 => OperationResult::from(Ok(self.moved)),
                    Err(errno) => OperationResult::from(Err(errno)),
                }
            }
            Op::Poll { is_multi, .. } => {
                if !self.is_ready() {
                    return OperationResult::Waits;
                }
                self.reported = socket.arrivals();
                match is_multi {
                    true => OperationResult::Event(i32::from(libc::POLLIN)),
                    false => OperationResult::Result(i32::from(libc::POLLIN)),
                }
            }
            Op::Read { .. } | Op::Write { .. } | Op::Sync(_) | Op::Fallocate { .. } => {
                OperationResult::Result(-libc::ESPIPE)
            }
            Op::Accept => OperationResult::Result(-libc::EINVAL),
        }
    }

    /// Copies bytes into its memory, starting at offset `from`.
    fn scatter(&self, from: usize, bytes: &[u8]) {
        let (mut skip, mut rest) = (from, bytes);
        for slice in &self.slices {
            let start = skip.min(slice.len());
            skip -= start;
            let part = rest.len().min(slice.len() - start);
            slice.write(start, &rest[..part]);
            rest = &rest[part..];
        }
    }

    /// Returns the bytes of its memory, starting at offset `from`.
    fn gather(&self, from: usize) -> Vec<u8> {
        let slices: Vec<_> = self.slices.iter().map(MemSlice::to_vec).collect();
        let mut all = slices.concat();
        all.drain(..from);
        all
    }
}
