//! Requests of a channel to its worker, and its counters.

use super::ioctx::RecvIdx;
use crate::fabric::{TaskAction, TaskIdx};

/// An information unit to send. It is stored in the send ring, in the slot of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendIu {
    /// Length of the message in bytes.
    pub len: u32,
    /// True if the initiator has requested a notification for this message.
    pub solicited: bool,
}

/// A request of a channel to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A request for a command or a task management function.
    Task(TaskAction),
    /// Post this context of the receive ring.
    PostRecv(RecvIdx),
    /// Post a chain: the RDMA requests returned by [`Channel::requests`](super::Channel::requests),
    /// followed by the message, if any. The last request is signaled. When it completes, call
    /// [`Channel::handle_post_done`](super::Channel::handle_post_done).
    Post {
        /// The context to post.
        task: TaskIdx,
        /// The message to post after the requests, if any.
        send: Option<SendIu>,
    },
    /// Notify the CM that data was received before the message that establishes the connection.
    NotifyEstablished,
    /// Call [`Channel::handle_others_gone`](super::Channel::handle_others_gone) if the channel is
    /// only waiting for replaced sessions.
    StartEarly,
    /// Check whether the initiator is still reachable: post a signaled zero-length write, which its
    /// device acknowledges without checking the key. When it completes, call
    /// [`Channel::handle_probed`](super::Channel::handle_probed).
    Probe,
    /// Disconnect, which moves the queue pair to the error state, then post the drain marker: a
    /// signaled zero-length write. When it completes, call
    /// [`Channel::handle_drained`](super::Channel::handle_drained).
    Disconnect,
    /// The channel is [`ChState::Disconnected`](super::ChState::Disconnected): destroy the queue
    /// pair and free the rings.
    Release,
}

/// Counters of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// SRP_CMD requests for which a context was allocated.
    pub commands: u64,
    /// Task management requests received.
    pub task_management: u64,
    /// Requests for which a response was written to the send ring.
    pub responded: u64,
    /// Commands aborted by task management.
    pub aborted: u64,
    /// Requests torn down with the channel.
    pub torn_down: u64,
    /// Bytes written to the initiator.
    pub bytes_in: u64,
    /// Bytes read from the initiator.
    pub bytes_out: u64,
    /// Malformed information units.
    pub malformed: u64,
    /// Number of times a request waited for a context.
    pub context_waits: u64,
    /// Number of times a command waited for a buffer.
    pub buffer_waits: u64,
    /// Number of times a chain waited for send-queue credit.
    pub credit_waits: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.task_management += other.task_management;
        self.responded += other.responded;
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
