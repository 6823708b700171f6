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

/// Name of an operation under way, unique on its ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId(u64);

/// An operation under way.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Its name.
    pub id: OperationId,
    /// Action that it asks for.
    pub op: Op,
    /// File or socket that it is about.
    pub handle: Handle,
    /// Length of its memory in bytes.
    pub len: usize,
    /// The ring has asked for its end.
    pub is_cancelled: bool,
    /// It would end if it were completed now: a receive with nothing to take would not.
    pub is_ready: bool,
    /// It waits for a thread of the kernel. Only its cancellation ends it.
    pub is_queued: bool,
}

impl Operation {
    /// The disk that it is about, if it is one.
    #[must_use]
    pub fn disk(&self) -> Option<&Disk> {
        match self.handle.simulated() {
            Some(Object::File(file)) => Some(file.disk()),
            _ => None,
        }
    }
}

/// The way in which an operation is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// As it was asked for.
    Whole,
    /// A transfer moves at most this many bytes.
    Short(usize),
    /// Nothing is done, and this error number is reported.
    Failed(i32),
    /// All is done, and this error number is reported all the same.
    DoneButFailed(i32),
}

/// The driver's end of a simulated ring. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Kernel(Rc<RefCell<State>>);

/// The ring's end.
#[derive(Debug)]
pub(crate) struct Queue(Rc<RefCell<State>>);

#[derive(Debug, Default)]
struct State {
    /// Operations that the ring has not handed over.
    queued: Vec<Pending>,
    /// Operations under way, in the order in which they were handed over.
    pending: Vec<Pending>,
    /// Completions, with the sockets of accepts.
    completions: VecDeque<(Cqe, Option<Handle>)>,
    is_closed: bool,
    /// Threads for operations that block.
    threads: usize,
}

#[derive(Debug)]
struct Pending {
    user_data: u64,
    op: Op,
    handle: Handle,
    slices: Vec<MemSlice>,
    is_cancelled: bool,
    /// Bytes moved so far, of a transfer that waits for its rest.
    moved: usize,
    /// Arrivals that a poll has reported.
    reported: u64,
    /// Last change of its disk before it was handed over, which is all that a flush is sure to
    /// cover.
    before: u64,
    /// Its bytes on their way to the page cache.
    writing: Option<Writing>,
    execution: Execution,
}

/// What an operation has come to.
enum End {
    /// It waits.
    Waits,
    Result(i32),
    /// One event of a poll that goes on.
    Event(i32),
    Socket(Handle),
}

impl From<Result<usize, i32>> for End {
    fn from(result: Result<usize, i32>) -> Self {
        Self::Result(match result {
            // No transfer of a ring is longer than an `i32` can say.
            Ok(moved) => moved as i32,
            Err(errno) => -errno,
        })
    }
}

impl Kernel {
    /// Makes a kernel for a ring of so many entries, with so many threads for operations that block,
    /// or as many as the kernel has by default.
    pub(crate) fn new(threads: u32, entries: u32) -> (Queue, Self) {
        let state = Rc::new(RefCell::new(State {
            threads: io_wq::limit(threads, entries),
            ..State::default()
        }));
        (Queue(Rc::clone(&state)), Self(state))
    }

    /// Operations under way, in the order in which they were handed over.
    #[must_use]
    pub fn operations(&self) -> Vec<Operation> {
        let state = self.0.borrow();
        state.pending.iter().map(Pending::describe).collect()
    }

    /// As [`Kernel::operations`], without those that cannot end because one of these disks hangs.
    #[must_use]
    pub fn operations_beside(&self, hung: &[Disk]) -> Vec<Operation> {
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

    /// Carries an operation out, and reports its end to the ring; returns the result, or `None` if
    /// there is no such operation, or it still waits for its socket or for a thread.
    pub fn complete(&self, id: OperationId, outcome: Outcome) -> Option<i32> {
        let state = &mut *self.0.borrow_mut();
        let at = state.pending.iter().position(|p| p.user_data == id.0)?;
        let end = state.pending[at].end(outcome);
        let (result, more, socket) = match end {
            End::Waits => return None,
            End::Result(result) => (result, false, None),
            End::Event(result) => (result, true, None),
            End::Socket(socket) => (0, false, Some(socket)),
        };
        // Its handle and its memory go before the ring hears of it, as with the host.
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

    /// Completes all operations that can be, in the order in which they came; returns their number.
    pub fn complete_all(&self) -> usize {
        let ready = self.operations().into_iter().filter(|op| op.is_ready);
        let done = ready.filter_map(|op| self.complete(op.id, Outcome::Whole));
        done.count()
    }

    /// Whether completions wait for the ring to reap them.
    #[must_use]
    pub fn has_completions(&self) -> bool {
        !self.0.borrow().completions.is_empty()
    }

    /// Whether the ring is gone. What it had under way was not done.
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

    /// Forgets all operations; always true, since nothing of them is done any more.
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
    /// Starts operations that wait for a thread, as long as there are some.
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

    /// Whether a hashed operation of the same file blocks a thread.
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
    /// It begins: a flush covers what was written before.
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

    /// Whether its cancellation ends it: a disk that has begun is not interrupted, and its thread is
    /// not freed.
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
            // A disk is ready, and so is an error.
            _ => true,
        }
    }

    /// Bytes that a receive waits for.
    fn least(&self, mode: Receive) -> usize {
        match mode {
            Receive::Some => 1,
            Receive::All => (self.len() - self.moved).max(1),
        }
    }

    /// Does what it asks for, as far as the outcome says.
    fn end(&mut self, outcome: Outcome) -> End {
        match outcome {
            _ if self.is_queued() && !self.is_ended() => End::Waits,
            Outcome::Failed(errno) => End::Result(-errno),
            _ if self.is_ended() => End::Result(-libc::ECANCELED),
            Outcome::Whole => self.carry_out(usize::MAX),
            Outcome::Short(most) => self.carry_out(most),
            Outcome::DoneButFailed(errno) => match self.carry_out(usize::MAX) {
                End::Waits => End::Waits,
                _ => End::Result(-errno),
            },
        }
    }

    fn carry_out(&mut self, most: usize) -> End {
        let handle = self.handle.clone();
        match handle.simulated() {
            Some(Object::File(file)) => self.on_file(file, most),
            Some(Object::Socket(socket)) => self.on_socket(socket, most),
            Some(Object::Listener(listener)) => match self.op {
                Op::Accept => listener
                    .accept()
                    .map_or(End::Waits, |socket| End::Socket(socket.into())),
                Op::Poll { .. } if !listener.is_waiting() => End::Waits,
                Op::Poll { .. } => End::Result(i32::from(libc::POLLIN)),
                _ => End::Result(-libc::EINVAL),
            },
            // A descriptor means nothing in memory.
            None => End::Result(-libc::EBADF),
        }
    }

    fn on_file(&self, file: &File, most: usize) -> End {
        let disk = file.disk();
        let done = match self.op {
            Op::Read { offset } => {
                let mut bytes = vec![0; self.len().min(most)];
                let len = file.read(offset, &mut bytes);
                self.scatter(0, &bytes[..len]);
                Ok(len)
            }
            Op::Write { offset, durability } => {
                let mut bytes = self.gather(0);
                bytes.truncate(most);
                disk.write(offset, &bytes);
                match durability {
                    // It may still be lost in a crash, as in the page cache of a host. So its fault
                    // shows with the next flush, not here.
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
        End::from(done)
    }

    fn on_socket(&mut self, socket: &Socket, most: usize) -> End {
        match self.op {
            Op::Receive(mode) => {
                let is_over = socket.is_readable(self.least(mode));
                let room = (self.len() - self.moved).min(most);
                match socket.receive(room) {
                    Ok(bytes) => {
                        self.scatter(self.moved, &bytes);
                        self.moved += bytes.len();
                        // A part of what a receive of all bytes waits for stays with it.
                        match is_over || most < usize::MAX && self.moved > 0 {
                            true => End::from(Ok(self.moved)),
                            false => End::Waits,
                        }
                    }
                    Err(_) if self.moved > 0 => End::from(Ok(self.moved)),
                    Err(errno) => End::from(Err(errno)),
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
                            true => End::from(Ok(self.moved)),
                            false => End::Waits,
                        }
                    }
                    Err(_) if self.moved > 0 => End::from(Ok(self.moved)),
                    Err(errno) => End::from(Err(errno)),
                }
            }
            Op::Poll { is_multi, .. } => {
                if !self.is_ready() {
                    return End::Waits;
                }
                self.reported = socket.arrivals();
                match is_multi {
                    true => End::Event(i32::from(libc::POLLIN)),
                    false => End::Result(i32::from(libc::POLLIN)),
                }
            }
            Op::Read { .. } | Op::Write { .. } | Op::Sync(_) | Op::Fallocate { .. } => {
                End::Result(-libc::ESPIPE)
            }
            Op::Accept => End::Result(-libc::EINVAL),
        }
    }

    /// Copies bytes into its memory, from `from` on.
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

    /// The bytes of its memory, from `from` on.
    fn gather(&self, from: usize) -> Vec<u8> {
        let mut all: Vec<u8> = self.slices.iter().flat_map(MemSlice::to_vec).collect();
        all.drain(..from);
        all
    }
}
