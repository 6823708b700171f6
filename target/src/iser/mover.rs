//! The datamover on RDMA: control-type PDUs as SENDs, data to the initiator as RDMA WRITEs in front
//! of the answer, data from it as RDMA READs.
//!
//! Everything that is to be posted waits in one queue, in order; the front waits for send-queue
//! credit and a transmit descriptor. A transfer that is longer than the queue allows goes in
//! portions.

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

/// Longest data segment sent in full-feature phase of a normal session, in bytes. Linux and
/// libiscsi declare more than their descriptors hold, which is this.
const RESPONSE_SEGMENT: u32 = 128;

/// Number of a chain of work requests under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainIdx(pub u16);

/// A message to send.
#[derive(Clone, Debug)]
pub struct SendMessage {
    /// Its bytes, in the send ring.
    pub bytes: MemSlice,
    /// The initiator's key that it invalidates.
    pub invalidate: Option<Stag>,
}

/// One chain to post: RDMA requests, then a message if there is one. Its last request is signaled;
/// when it completes, or fails, call
/// [`IserChannel::handle_post_done`](super::IserChannel::handle_post_done).
#[derive(Debug)]
pub struct Post {
    /// Number that its completion is reported with.
    pub chain: ChainIdx,
    /// The RDMA requests, in order.
    pub requests: Vec<RdmaRequest>,
    /// Message behind the requests, if there is one.
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

/// Work request that ends an item of the queue.
#[derive(Debug)]
enum ItemEnd {
    /// A control-type PDU in a SEND.
    Send(Control),
    /// The answer to a Hello.
    Hello(HelloReply),
    /// Nothing: the data have come, or a piece of them has gone.
    Arrive,
}

impl ItemEnd {
    /// Length of the message, in bytes.
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

/// An entry of the queue: a transfer, a message, or both.
#[derive(Debug)]
struct Item {
    /// The transfer of a task's data, and the initiator's side of it.
    transfer: Option<(TaskIdx, Transfer, RemoteRange)>,
    then: ItemEnd,
}

/// A chain that is posted.
#[derive(Debug)]
struct Chain {
    wrs: u32,
    /// Task whose buffer it touches.
    task: Option<TaskIdx>,
    /// The task waits for the end of the transfer, rather than for that of its answer.
    is_awaited: bool,
    /// The transfer ends with it.
    is_last: bool,
    tx: Option<TxIdx>,
    /// Task that ends with its message.
    ends: Option<TaskIdx>,
}

/// Record of a task.
#[derive(Clone, Copy, Debug, Default)]
struct TaskRecord {
    /// Buffers that its command advertised.
    buffers: Buffers,
    /// Offset of the data that were asked for first.
    solicited_from: Option<u32>,
    /// Chains under way that touch its buffer.
    chains: u16,
    /// Its data are no longer wanted.
    is_forgotten: bool,
}

/// End of a chain, as the channel sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChainEnd {
    /// The task whose answer is sent.
    pub(super) answered: Option<TaskIdx>,
    /// The task whose data have come, or a piece of whose data has gone, or will not, and whose
    /// buffer is free.
    pub(super) arrived: Option<TaskIdx>,
}

/// The datamover on RDMA.
#[derive(Debug)]
pub struct Iser {
    params: IserParams,
    ring: TxRing,
    queue: VecDeque<Item>,
    /// See [`Self::fetched`].
    fetched: Option<TaskIdx>,
    /// Data that wait for the answer that they go with.
    put: Option<(PutData, RemoteBuffer)>,
    /// Records of the tasks, up to the largest number that was in use: small ones are used first.
    known: Vec<TaskRecord>,
    /// The chains, likewise.
    chains: Vec<Option<Chain>>,
    free_chains: Vec<ChainIdx>,
    /// Work requests that the send queue still takes.
    credits: u32,
    max_send_segment: u32,
    /// A write's buffer begins with the first byte of all, not the first solicited one.
    whole_buffers: bool,
    hello_required: Option<bool>,
    stat_sn: StatSn,
    /// Buffers of the PDU that is being looked at.
    arriving: Buffers,
    /// Protocol error of the peer.
    fault: Option<&'static str>,
    scratch: Vec<u8>,
}

impl Iser {
    /// A datamover with this send ring.
    ///
    /// # Panics
    /// If the ring is too short, or the send queue.
    pub(super) fn new(params: IserParams, send_ring: MemSlice, tasks: usize) -> Self {
        assert!(
            params.credits() >= 2,
            "a send queue for a transfer and an answer"
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

    /// The buffers of the PDU that is looked at next.
    pub(super) fn set_arriving(&mut self, buffers: Buffers) {
        self.arriving = buffers;
    }

    /// Returns the peer's protocol error since the last call, if there was one.
    pub(super) fn take_fault(&mut self) -> Option<&'static str> {
        self.fault.take()
    }

    /// Whether full-feature phase begins with a Hello, as far as the initiator has said so.
    pub(super) fn hello_required(&self) -> Option<bool> {
        self.hello_required
    }

    /// Queues the answer to a Hello.
    pub(super) fn send_hello(&mut self, reply: HelloReply) {
        self.queue.push_back(Item {
            transfer: None,
            then: ItemEnd::Hello(reply),
        });
    }

    /// Number of chains under way.
    pub(super) fn outstanding(&self) -> usize {
        self.params.credits() as usize - self.free_chains.len()
    }

    /// Numbers of the chains under way.
    pub(super) fn under_way(&self) -> impl Iterator<Item = ChainIdx> + '_ {
        let chains = self.chains.iter().enumerate();
        chains
            .filter(|(_, chain)| chain.is_some())
            .map(|(i, _)| ChainIdx(i as u16))
    }

    /// The next chain; `false` when there is nothing to post, or no room to post it.
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

    /// The task whose data the chain posted last fetches, or a piece of whose data it writes.
    pub(super) fn fetched(&self) -> &[TaskIdx] {
        self.fetched.as_slice()
    }

    /// Posts what there is room for of an item: whether that was the rest of it, if anything.
    fn post_item(
        &mut self,
        item: &mut Item,
        numbers: Numbers,
        held: TaskBuffers<'_>,
        post: &mut Post,
    ) -> Option<bool> {
        // The message of an item needs a work request of its own behind the data, so one is kept
        // back from these.
        let len = item.then.message_len();
        let reserve = u32::from(len.is_some());
        if self.credits < reserve + u32::from(item.transfer.is_some()) {
            return None;
        }
        let tx = match len {
            Some(len) => Some((self.ring.take(len)?, len)),
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
                self.ring.put(tx);
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

    /// Bounds of the next portion, with `reserve` work requests left for the message. Half the
    /// queue at most, so that a long transfer and a short one go side by side.
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
                // Only a command advertises a buffer. What is known of the context of any other
                // request is what an earlier command left there, and that key may be another
                // command's by now.
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

    /// The key that a command's answer invalidates, where that was agreed on.
    fn advertised(&self, task: TaskIdx) -> Option<Stag> {
        // A function is a task without buffers.
        let buffers = self.known.get(usize::from(task.0))?.buffers;
        let buffer = buffers.read.or(buffers.write);
        buffer
            .filter(|_| self.params.remote_invalidate)
            .map(|buffer| buffer.stag)
    }

    /// A chain has completed, or failed.
    ///
    /// # Panics
    /// If it is not under way.
    pub(super) fn complete(&mut self, idx: ChainIdx) -> ChainEnd {
        let chain = self.chains[usize::from(idx.0)]
            .take()
            .expect("the chain was posted");
        self.free_chains.push(idx);
        self.credits += chain.wrs;
        if let Some(tx) = chain.tx {
            self.ring.put(tx);
        }
        let mut arrived = None;
        if let Some(task) = chain.task {
            let known = &mut self.known[usize::from(task.0)];
            known.chains -= 1;
            if chain.is_awaited {
                // What was forgotten has no further portion in the queue, so its last chain under
                // way is the end.
                let is_over = if known.is_forgotten {
                    known.chains == 0
                } else {
                    chain.is_last
                };
                arrived = is_over.then_some(task);
            }
        }
        ChainEnd {
            answered: chain.ends,
            arrived,
        }
    }
}

/// The `len` bytes from `at` on of a buffer that the initiator has advertised. The address may wrap
/// if it says so: such a chain is not posted, and the connection ends.
fn remote(buffer: RemoteBuffer, at: u32, len: u32) -> RemoteRange {
    RemoteRange {
        addr: buffer.base.wrapping_add(u64::from(at)),
        rkey: RKey(buffer.stag.0),
        len,
    }
}

/// A piece of a read, and its place in the initiator's memory.
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
        // The default is No: the buffer has all data of the command (RFC 7145 6.9). But Linux, the
        // initiator that is known to send unsolicited data, says nothing, and its buffers begin
        // with the first solicited byte; LIO reads all of them so. For commands without unsolicited
        // data there is no difference, so silence is taken as Linux means it, and only a No that is
        // said as No.
        self.whole_buffers = session.tagged_solicited_only == Some(false);
        self.hello_required = session.hello_required;
    }

    /// The key means nothing over RDMA (RFC 7145 6.2).
    fn set_max_send_segment(&mut self, _: u32) {}

    fn max_send_segment(&self) -> u32 {
        self.max_send_segment
    }

    fn begin(&mut self, task: TaskIdx) {
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
            assert_eq!(control.ends, Some(put.task), "an answer follows its data");
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
        // The buffer of a long command holds one piece of the data at a time.
        let start = get.offset - get.base;
        let transfer = Transfer::of_range(Direction::FromInitiator, start..start + get.len);
        self.queue.push_back(Item {
            transfer: Some((get.task, transfer, remote(buffer, at, get.len))),
            then: ItemEnd::Arrive,
        });
        0
    }

    /// There are no R2Ts, so nothing comes in answer to one.
    fn take_solicited(&mut self, _: &DataOut, _: u32, _: bool) -> SolicitedData {
        self.fault = Some("data that answer an R2T");
        SolicitedData::Stale { was_asked: false }
    }

    fn forget(&mut self, task: TaskIdx) -> bool {
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

    fn is_asking(&self, task: TaskIdx) -> bool {
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
