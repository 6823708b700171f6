//! Requests of a channel to its worker, and its counters.

use super::ioctx::RecvIdx;
use crate::fabric::{TaskAction, TaskIdx};

/// An information unit to send: it lies in the send ring, in the place of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendIu {
    /// Length of the message in bytes.
    pub len: u32,
    /// The initiator asked to be notified of it.
    pub solicited: bool,
}

/// A request of a channel to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A request for a command or a function.
    Task(TaskAction),
    /// Post this context of the receive ring.
    PostRecv(RecvIdx),
    /// Post one chain: the RDMA requests of [`Channel::requests`](super::Channel::requests), then
    /// the message if there is one. Its last request is signaled; when it completes, call
    /// [`Channel::handle_post_done`](super::Channel::handle_post_done).
    Post {
        /// Context whose requests and message are posted.
        task: TaskIdx,
        /// Message behind the requests, if there is one.
        send: Option<SendIu>,
    },
    /// Notify the CM that data came before the message that establishes the connection.
    NotifyEstablished,
    /// Call [`Channel::handle_others_gone`](super::Channel::handle_others_gone) if the channel waits
    /// for replaced sessions only.
    StartEarly,
    /// See whether the initiator is there: post a signaled write of no bytes, which its device
    /// answers without looking at the key. When it completes, call
    /// [`Channel::handle_probed`](super::Channel::handle_probed).
    Probe,
    /// Disconnect, which takes the queue pair to the error state, then post the drain marker: a
    /// signaled zero-length write. When it completes, call
    /// [`Channel::handle_drained`](super::Channel::handle_drained).
    Disconnect,
    /// The channel is [`ChState::Disconnected`](super::ChState::Disconnected): destroy its queue
    /// pair, free its rings.
    Release,
}

/// Counters of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// SRP_CMD requests that got a context.
    pub commands: u64,
    /// Task-management requests taken in.
    pub task_management: u64,
    /// Requests whose response was written to the send ring.
    pub answered: u64,
    /// Commands ended by task management.
    pub aborted: u64,
    /// Requests that ended with the channel.
    pub torn_down: u64,
    /// Bytes written to the initiator.
    pub bytes_in: u64,
    /// Bytes taken from the initiator.
    pub bytes_out: u64,
    /// Information units that were not legal.
    pub malformed: u64,
    /// Times a request waited for a context.
    pub context_waits: u64,
    /// Times a command waited for a buffer.
    pub buffer_waits: u64,
    /// Times a chain waited for send-queue credit.
    pub credit_waits: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.task_management += other.task_management;
        self.answered += other.answered;
        self.aborted += other.aborted;
        self.torn_down += other.torn_down;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.malformed += other.malformed;
        self.context_waits += other.context_waits;
        self.buffer_waits += other.buffer_waits;
        self.credit_waits += other.credit_waits;
    }
}
