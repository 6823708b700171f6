//! The RDMA datamover: sends control-type PDUs with SEND, data to the initiator with RDMA WRITE
//! before the response, and reads data from the initiator with RDMA READ.
//!
//! Everything is posted from a single FIFO queue. Its first entry waits for send-queue credits and
//! a transmit descriptor. A transfer that exceeds the send queue is split into portions.

use std::collections::VecDeque;

use riser_memory::MemSlice;
use riser_scsi::iscsi::frame::padding;
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::{DataOut, FromTarget};
use riser_scsi::iscsi::{Numbers, StatSn};
use riser_scsi::iser::{
    Buffers, HEADER_LEN, HEADERS_LEN, Header, HelloReply, RemoteBuffer, Stag, put_control,
};
use riser_transport::verbs::RKey;

use super::IserParams;
use super::ring::{LARGE_SEGMENT, TxIdx, TxRing};
use crate::fabric::{Direction, PortionLimits, RdmaRequest, RemoteRange, TaskIdx, Transfer};
use crate::iscsi::{Control, Datamover, GetData, PutData, SolicitedData, TaskBuffers};

/// Maximum data segment length to send in the full-feature phase of a normal session, in bytes.
/// Linux and libiscsi declare a larger value than their descriptors support, which is this value.
const RESPONSE_SEGMENT: u32 = 128;

/// Index of a posted chain of work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainIdx(pub u16);

/// A message to send.
#[derive(Clone, Debug)]
pub struct SendMessage {
    /// Message in the send ring.
    pub bytes: MemSlice,
    /// STag of the initiator to invalidate, if any.
    pub invalidate: Option<Stag>,
}

/// A chain to post: RDMA requests, followed by an optional message. The last request is signaled.
/// When it completes or fails, call
/// [`IserChannel::handle_post_done`](super::IserChannel::handle_post_done).
#[derive(Debug)]
pub struct Post {
    /// Chain index for the completion.
    pub chain: ChainIdx,
    /// RDMA requests, in order.
    pub requests: Vec<RdmaRequest>,
    /// Message after the requests, if any.
    pub send: Option<SendMessage>,
}

impl Default for Post {
    fn default() -> Self {
        Self {
            chain: ChainIdx(0),
            requests: Vec::new(),
            send: None,
        }
    }
}

/// Last work request of a queued item.
#[derive(Debug)]
enum ItemEnd {
    /// A control-type PDU in a SEND.
    Send(Control),
    /// A HelloReply.
    Hello(HelloReply),
    /// No message. This item receives data, or sends a single piece of data.
    Arrive,
}

impl ItemEnd {
    /// Returns the message length in bytes.
    fn message_len(&self) -> Option<usize> {
        match self {
            Self::Send(control) => {
                let data = control.data.len();
                Some(HEADERS_LEN + data + padding(data))
            }
            Self::Hello(_) => Some(HEADER_LEN),
            Self::Arrive => None,
        }
    }
}

/// A queued transfer, message, or both.
#[derive(Debug)]
struct Item {
    /// Data transfer for a task, with its remote memory range.
    transfer: Option<(TaskIdx, Transfer, RemoteRange)>,
    then: ItemEnd,
}

/// A posted chain.
#[derive(Debug)]
struct Chain {
    wrs: u32,
    /// Task with the buffer used by this chain.
    task: Option<TaskIdx>,
    /// The task waits for the transfer to complete, rather than for its response.
    is_awaited: bool,
    /// This is the last chain of the transfer.
    is_last: bool,
    tx: Option<TxIdx>,
    /// Task that ends with this message.
    ends: Option<TaskIdx>,
}

/// State of a task.
#[derive(Clone, Copy, Debug, Default)]
struct TaskRecord {
    /// Buffers advertised by the command.
    buffers: Buffers,
    /// Offset of the first solicited data.
    solicited_from: Option<u32>,
    /// Number of posted chains using the buffer.
    chains: u16,
    /// The data is no longer required.
    is_forgotten: bool,
}

/// Result of a completed chain for the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChainEnd {
    /// Task with a response that was sent.
    pub(super) completed: Option<TaskIdx>,
    /// Task that has received its data or sent a piece of data, or will not, and whose buffer is no
    /// longer in use.
    pub(super) arrived: Option<TaskIdx>,
}

/// The RDMA datamover.
#[derive(Debug)]
pub struct Iser {
    params: IserParams,
    ring: TxRing,
    queue: VecDeque<Item>,
    /// See [`Self::fetched`].
    fetched: Option<TaskIdx>,
    /// Data to send with the following response.
    put: Option<(PutData, RemoteBuffer)>,
    /// State by task index. Low indices are used first, so the length is the maximum number of
    /// tasks so far.
    known: Vec<TaskRecord>,
    /// Chains by index, with the same kind of length.
    chains: Vec<Option<Chain>>,
    free_chains: Vec<ChainIdx>,
    /// Number of work requests available in the send queue.
    credits: u32,
    max_send_segment: u32,
    /// Tagged write buffers start with the first byte of the command, not with the first solicited
    /// byte.
    whole_buffers: bool,
    hello_required: Option<bool>,
    stat_sn: StatSn,
    /// Buffers of the PDU being processed.
    arriving: Buffers,
    /// Protocol error of the peer.
    fault: Option<&'static str>,
    scratch: Vec<u8>,
}

impl Iser {
    /// Creates a datamover with this send ring.
    ///
    /// # Panics
    /// Panics if the ring or the send queue is too short.
    pub(super) fn new(params: IserParams, send_ring: MemSlice, tasks: usize) -> Self {
        assert!(
            params.credits() >= 2,
            "a send queue for a transfer and a response"
        );
        let chains = params.credits() as u16;
        Self {
            ring: TxRing::new(send_ring, params.sends() as u16),
            queue: VecDeque::new(),
            fetched: None,
            put: None,
            known: Vec::with_capacity(tasks),
            chains: Vec::with_capacity(usize::from(chains)),
            free_chains: (0..chains).rev().map(ChainIdx).collect(),
            credits: params.credits(),
            max_send_segment: LARGE_SEGMENT,
            whole_buffers: false,
            hello_required: None,
            stat_sn: StatSn(1),
            arriving: Buffers::default(),
            fault: None,
            scratch: Vec::with_capacity(super::ring::LARGE),
            params,
        }
    }

    /// Sets the buffers of the PDU to be processed next.
    pub(super) fn set_arriving(&mut self, buffers: Buffers) {
        self.arriving = buffers;
    }

    /// Returns the protocol error of the peer since the last call, if any.
    pub(super) fn take_fault(&mut self) -> Option<&'static str> {
        self.fault.take()
    }

    /// Returns whether the full-feature phase starts with a Hello, or `None` if the initiator did
    /// not specify this.
    pub(super) fn hello_required(&self) -> Option<bool> {
        self.hello_required
    }

    /// Queues a HelloReply.
    pub(super) fn send_hello(&mut self, reply: HelloReply) {
        self.queue.push_back(Item {
            transfer: None,
            then: ItemEnd::Hello(reply),
        });
    }

    /// Returns the number of posted chains.
    pub(super) fn outstanding(&self) -> usize {
        self.params.credits() as usize - self.free_chains.len()
    }

    /// Returns the indices of posted chains.
    pub(super) fn under_way(&self) -> impl Iterator<Item = ChainIdx> + '_ {
        let chains = self.chains.iter().enumerate();
        chains
            .filter(|(_, chain)| chain.is_some())
            .map(|(i, _)| ChainIdx(i as u16))
    }

    /// Sets `post` to the next chain. Returns `false` if there is nothing to post, or not enough
    /// space to post it.
    pub(super) fn poll_post(
        &mut self,
        numbers: Numbers,
        held: TaskBuffers<'_>,
        post: &mut Post,
    ) -> bool {
        post.requests.clear();
        post.send = None;
        self.fetched = None;
        let Some(mut item) = self.queue.pop_front() else {
            return false;
        };
        let posted = self.post_item(&mut item, numbers, held, post);
        if posted != Some(true) {
            self.queue.push_front(item);
        }
        posted.is_some()
    }

    /// Returns the task for which the last posted chain reads data, or writes a piece of data.
    pub(super) fn fetched(&self) -> &[TaskIdx] {
        self.fetched.as_slice()
    }

    /// Posts as much of an item as possible. Returns true if this is the last part, false if more
    /// parts remain, and `None` if nothing can be posted.
    fn post_item(
        &mut self,
        item: &mut Item,
        numbers: Numbers,
        held: TaskBuffers<'_>,
        post: &mut Post,
    ) -> Option<bool> {
        // The message of an item requires another work request after the data, so reserve one.
        let len = item.then.message_len();
        let reserve = u32::from(len.is_some());
        if self.credits < reserve + u32::from(item.transfer.is_some()) {
            return None;
        }
        let tx = match len {
            Some(len) => Some((self.ring.take_slot(len)?, len)),
            None => None,
        };
        let mut chain = Chain {
            wrs: 0,
            task: None,
            is_awaited: matches!(item.then, ItemEnd::Arrive),
            is_last: true,
            tx: None,
            ends: None,
        };
        if let Some((task, transfer, remote)) = &mut item.transfer {
            let limits = self.portion(reserve);
            let buffer = held.buffer(*task);
            chain.wrs = transfer.plan(remote, buffer, limits);
            let requests = transfer.requests(remote, buffer);
            post.requests.extend(requests.map(RdmaRequest::to_list));
            chain.task = Some(*task);
            self.fetched = chain.task.filter(|_| chain.is_awaited);
            chain.is_last = transfer.is_last();
            transfer.portion_done();
            self.known[usize::from(task.0)].chains += 1;
        }
        if let Some((tx, len)) = tx {
            if chain.is_last {
                post.send = Some(self.write_message(&item.then, numbers, (tx, len), &mut chain));
            } else {
                self.ring.release_slot(tx);
            }
        }
        let is_last = chain.is_last;
        self.credits -= chain.wrs;
        let idx = self.free_chains.pop().expect("a chain takes credit");
        post.chain = idx;
        let at = usize::from(idx.0);
        if at >= self.chains.len() {
            self.chains.resize_with(at + 1, || None);
        }
        self.chains[at] = Some(chain);
        Some(is_last)
    }

    /// Returns the limits for the next portion, excluding `reserve` work requests for the message.
    /// A portion cannot exceed half of the queue, so that long and short transfers can be in flight
    /// concurrently.
    fn portion(&self, reserve: u32) -> PortionLimits {
        let half = (self.params.credits() / 2).max(1);
        PortionLimits {
            wrs: half.min(self.credits - reserve),
            sges: self.params.max_sge,
        }
    }

    /// Writes a message into its slot.
    fn write_message(
        &mut self,
        then: &ItemEnd,
        mut numbers: Numbers,
        (tx, len): (TxIdx, usize),
        chain: &mut Chain,
    ) -> SendMessage {
        chain.wrs += 1;
        chain.tx = Some(tx);
        let mut invalidate = None;
        self.scratch.clear();
        match then {
            ItemEnd::Send(control) => {
                numbers.stat_sn = self.stat_sn;
                let header = control.pdu.header(numbers);
                let none = Buffers::default();
                put_control(none, header, &[], &control.data, &mut self.scratch);
                if control.counts {
                    self.stat_sn = self.stat_sn.next();
                }
                chain.ends = control.ends;
                // Only commands advertise a buffer. For other requests, the state of this context
                // is from a previous command, and its STag may already be used by another command.
                let is_command = matches!(control.pdu, FromTarget::ScsiResponse(_));
                let command = control.ends.filter(|_| is_command);
                invalidate = command.and_then(|task| self.advertised(task));
            }
            ItemEnd::Hello(reply) => {
                let header = Header::HelloReply(*reply).bytes();
                self.scratch.extend_from_slice(&header);
            }
            ItemEnd::Arrive => unreachable!("it has no message"),
        }
        assert_eq!(self.scratch.len(), len, "a message is as long as planned");
        let bytes = self.ring.slot(tx, len);
        bytes.write(0, &self.scratch);
        SendMessage { bytes, invalidate }
    }

    /// Returns the STag to be invalidated by the response to a command, if this was negotiated.
    fn advertised(&self, task: TaskIdx) -> Option<Stag> {
        // A task management function doesn't have any buffers.
        let buffers = self.known.get(usize::from(task.0))?.buffers;
        let buffer = buffers.read.or(buffers.write);
        buffer
            .filter(|_| self.params.remote_invalidate)
            .map(|buffer| buffer.stag)
    }

    /// Called when a chain has completed or failed.
    ///
    /// # Panics
    /// Panics if the chain was not posted.
    pub(super) fn complete(&mut self, idx: ChainIdx) -> ChainEnd {
        let chain = self.chains[usize::from(idx.0)]
            .take()
            .expect("the chain was posted");
        self.free_chains.push(idx);
        self.credits += chain.wrs;
        if let Some(tx) = chain.tx {
            self.ring.release_slot(tx);
        }
        let mut arrived = None;
        if let Some(task) = chain.task {
            let known = &mut self.known[usize::from(task.0)];
            known.chains -= 1;
            if chain.is_awaited {
                // If the data isn't required, all remaining portions were removed from the queue,
                // so the last posted chain completes the transfer.
                let is_over = if known.is_forgotten {
                    known.chains == 0
                } else {
                    chain.is_last
                };
                arrived = is_over.then_some(task);
            }
        }
        ChainEnd {
            completed: chain.ends,
            arrived,
        }
    }
}

/// Returns the remote range with `len` bytes at offset `at` of a buffer advertised by the
/// initiator. The address may wrap if the initiator sent an invalid buffer. In this case posting
/// the chain fails and the connection is closed.
fn remote(buffer: RemoteBuffer, at: u32, len: u32) -> RemoteRange {
    RemoteRange {
        addr: buffer.base.wrapping_add(u64::from(at)),
        rkey: RKey(buffer.stag.0),
        len,
    }
}

/// Returns the transfer and the remote range for a piece of a read.
fn outgoing(put: &PutData, buffer: RemoteBuffer) -> (TaskIdx, Transfer, RemoteRange) {
    let len = put.end - put.base;
    let transfer = Transfer::new(Direction::ToInitiator, len);
    (put.task, transfer, remote(buffer, put.base, len))
}

impl Datamover for Iser {
    const RECOVERS: bool = false;

    fn enable(&mut self, session: &SessionParams, connection: &ConnectionParams) {
        let limit = if session.discovery {
            LARGE_SEGMENT
        } else {
            RESPONSE_SEGMENT
        };
        self.max_send_segment = connection.max_send_segment.min(limit);
        // The default is No: the buffer contains all data of the command (RFC 7145 6.9). However,
        // Linux, which is known to send unsolicited data, doesn't send this key, and its buffers
        // start with the first solicited byte. LIO always uses this interpretation. There is no
        // difference for commands without unsolicited data. Therefore we use the Linux
        // interpretation if the key wasn't sent, and No only if it was sent explicitly.
        self.whole_buffers = session.tagged_solicited_only == Some(false);
        self.hello_required = session.hello_required;
    }

    /// This key is not used for RDMA (RFC 7145 6.2).
    fn set_max_send_segment(&mut self, _: u32) {}

    fn max_send_segment(&self) -> u32 {
        self.max_send_segment
    }

    fn on_context_allocated(&mut self, task: TaskIdx) {
        let at = usize::from(task.0);
        if at >= self.known.len() {
            self.known.resize(at + 1, TaskRecord::default());
        }
        let known = &mut self.known[at];
        debug_assert_eq!(
            known.chains, 0,
            "nothing touches the buffer of an idle task"
        );
        *known = TaskRecord {
            buffers: std::mem::take(&mut self.arriving),
            ..TaskRecord::default()
        };
    }

    fn send_control(&mut self, control: Control) {
        let put = self.put.take();
        let transfer = put.map(|(put, buffer)| {
            assert_eq!(
                control.ends,
                Some(put.task),
                "the response follows the data"
            );
            outgoing(&put, buffer)
        });
        self.queue.push_back(Item {
            transfer,
            then: ItemEnd::Send(control),
        });
    }

    fn put_data(&mut self, put: PutData) -> u32 {
        match self.known[usize::from(put.task.0)].buffers.read {
            Some(buffer) if put.more => self.queue.push_back(Item {
                transfer: Some(outgoing(&put, buffer)),
                then: ItemEnd::Arrive,
            }),
            Some(buffer) => self.put = Some((put, buffer)),
            None => self.fault = Some("a read that names no buffer"),
        }
        0
    }

    fn carries_status(&self) -> bool {
        false
    }

    fn get_data(&mut self, get: GetData) -> u32 {
        let known = &mut self.known[usize::from(get.task.0)];
        let Some(buffer) = known.buffers.write else {
            self.fault = Some("a write that names no buffer");
            return 0;
        };
        let first = *known.solicited_from.get_or_insert(get.offset);
        let at = if self.whole_buffers {
            get.offset
        } else {
            get.offset - first
        };
        // The buffer of a long command contains a single piece of the data at a time.
        let start = get.offset - get.base;
        let transfer = Transfer::of_range(Direction::FromInitiator, start..start + get.len);
        self.queue.push_back(Item {
            transfer: Some((get.task, transfer, remote(buffer, at, get.len))),
            then: ItemEnd::Arrive,
        });
        0
    }

    /// R2Ts are not used, so solicited Data-Out is a protocol error.
    fn on_solicited(&mut self, _: &DataOut, _: u32, _: bool) -> SolicitedData {
        self.fault = Some("data for an R2T");
        SolicitedData::Stale {
            was_solicited: false,
        }
    }

    fn cancel_transfers(&mut self, task: TaskIdx) -> bool {
        self.queue.retain(|item| {
            let is_its = item.transfer.as_ref().is_some_and(|(t, ..)| *t == task);
            !(is_its && matches!(item.then, ItemEnd::Arrive))
        });
        let known = &mut self.known[usize::from(task.0)];
        known.is_forgotten = known.chains > 0;
        known.is_forgotten
    }

    fn queued(&self) -> usize {
        self.queue.len()
    }

    fn is_requesting(&self, task: TaskIdx) -> bool {
        let is_its = |item: &Item| item.transfer.as_ref().is_some_and(|(of, ..)| *of == task);
        let mut arriving = self.queue.iter();
        arriving.any(|item| matches!(item.then, ItemEnd::Arrive) && is_its(item))
    }

    fn queued_bytes(&self) -> usize {
        let bytes = |item: &Item| match &item.then {
            ItemEnd::Send(control) => control.data.len(),
            ItemEnd::Hello(_) | ItemEnd::Arrive => 0,
        };
        self.queue.iter().map(bytes).sum()
    }
}
