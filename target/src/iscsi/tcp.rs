//! TCP datamover: Data-In and R2T PDUs, solicited data, and digests. Also contains the channel with
//! framing.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use riser_memory::MemSlice;
use riser_scsi::iscsi::frame::{self, DataDigest, Digests, FrameError, Framer, padding};
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::{
    DataIn, DataInStatus, DataOut, FromTarget, R2t, RejectReason, ScsiResponse, Snack, SnackKind,
};
use riser_scsi::iscsi::{Itt, Numbers, StatSn, Ttt};
use riser_scsi::lun::WireLun;
use riser_scsi::step::{Residual, TransferError};

use super::channel::{Channel, TaskBuffers};
use super::config::ChannelConfig;
use super::context::Cx;
use super::datamover::{Control, Datamover, GetData, Progress, PutData, SolicitedData, Start};
use super::phase::Phase;
use super::recovery::{Recovery, Retransmission};
use crate::fabric::TaskIdx;
use crate::pool::Buffer;
use crate::stats::SessionEvent;

/// Maximum batch size in bytes before adding the last PDU.
const BATCH_BYTES: usize = 512 << 10;

/// Maximum number of chunks in a batch before adding the last PDU, which needs a few more.
const BATCH_CHUNKS: usize = 96;

/// Maximum data segment size during login (default value from RFC 7143 13.12).
const LOGIN_SEGMENT: u32 = 8192;

/// Part of a batch.
#[derive(Clone, Debug)]
pub enum Chunk {
    /// Range in [`Batch::heads`].
    Head(Range<usize>),
    /// Part of a pool buffer.
    Data(MemSlice),
}

/// PDUs to be sent at once.
#[derive(Debug, Default)]
pub struct Batch {
    /// Headers, digests, padding, and data of control-type PDUs.
    pub heads: Vec<u8>,
    /// Chunks in the order to be sent.
    pub chunks: Vec<Chunk>,
    /// Total size of all chunks in bytes.
    pub len: usize,
}

impl Batch {
    fn clear(&mut self) {
        self.heads.clear();
        self.chunks.clear();
        self.len = 0;
    }

    fn is_full(&self) -> bool {
        self.len >= BATCH_BYTES || self.chunks.len() >= BATCH_CHUNKS
    }

    /// Appends a chunk for everything written to `heads` since `start`.
    fn push_head(&mut self, start: usize) {
        let end = self.heads.len();
        self.len += end - start;
        match self.chunks.last_mut() {
            Some(Chunk::Head(last)) if last.end == start => last.end = end,
            _ if start == end => {}
            _ => self.chunks.push(Chunk::Head(start..end)),
        }
    }

    /// Returns all bytes in a single vector, for tests and for senders that copy the data.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.len);
        for chunk in &self.chunks {
            match chunk {
                Chunk::Head(range) => out.extend_from_slice(&self.heads[range.clone()]),
                Chunk::Data(slice) => out.extend(slice.to_vec()),
            }
        }
        out
    }
}

/// Send queue entry.
#[derive(Debug)]
enum Item {
    Control(Control),
    Data(Outgoing),
    /// Changes the digests. The login response must be sent without digests.
    Digests(Digests),
    /// Changes the maximum data segment size in bytes. Previously queued data keeps its PDU size,
    /// because the initiator depends on the number of PDUs.
    Segment(u32),
    /// Retransmission.
    Retransmission(Retransmission),
}

/// Data-In transfer being sent.
#[derive(Debug)]
struct Outgoing {
    put: PutData,
    /// Offset of the next PDU in the command data.
    sent: u32,
    data_sn: u32,
}

impl Outgoing {
    /// Creates a transfer with no PDUs sent.
    fn new(put: PutData) -> Self {
        Self {
            put,
            sent: put.start.offset,
            data_sn: put.start.data_sn,
        }
    }
}

/// Outstanding R2T.
#[derive(Debug)]
struct Open {
    ttt: Ttt,
    task: TaskIdx,
    itt: Itt,
    lun: WireLun,
    r2t_sn: u32,
    offset: u32,
    len: u32,
    got: u32,
    next_sn: u32,
    /// The R2T was added to a batch.
    is_sent: bool,
}

impl Open {
    /// Returns the R2T PDU for this request.
    fn request(&self) -> Item {
        Item::Control(Control {
            pdu: FromTarget::R2t(R2t {
                lun: self.lun,
                itt: self.itt,
                ttt: self.ttt,
                r2t_sn: self.r2t_sn,
                offset: self.offset,
                len: self.len,
            }),
            data: Vec::new(),
            counts: false,
            ends: None,
        })
    }
}

/// Piece of data that must be acknowledged before we can reuse its buffer (RFC 7143 11.7.2: A bit).
#[derive(Debug)]
struct Unacknowledged {
    ttt: Ttt,
    task: TaskIdx,
    /// DataSN of the PDU after this piece.
    next_sn: u32,
}

/// Data still to be requested for a task. This is kept until all data was received.
#[derive(Debug)]
struct DataRequest {
    get: GetData,
    r2t_sn: u32,
    /// First error in the received data. If set, we don't request more data.
    fault: Option<TransferError>,
}

/// TCP datamover.
#[derive(Debug)]
pub struct Tcp {
    digests: Digests,
    /// Maximum data segment size for PDUs currently being sent, in bytes.
    segment_in_use: u32,
    /// Maximum data segment size for new PDUs, in bytes.
    max_send_segment: u32,
    max_burst: u32,
    max_outstanding_r2t: usize,
    queue: VecDeque<Item>,
    stat_sn: StatSn,
    open: Vec<Open>,
    wanted: Vec<DataRequest>,
    unacknowledged: Vec<Unacknowledged>,
    next_ttt: u32,
    /// Tasks with data in the current batch.
    in_batch: Vec<TaskIdx>,
    /// Tasks with an R2T in the current batch.
    requesting: Vec<TaskIdx>,
    /// Number of requested bytes that may still be received for completed tasks.
    late: u64,
    /// Tasks that complete with the current batch.
    ends: Vec<TaskIdx>,
    /// Tasks with a response in the current batch, which are kept until it's acknowledged.
    unacknowledged_tasks: Vec<TaskIdx>,
    is_sending: bool,
    recovery: Recovery,
}

impl Tcp {
    fn new() -> Self {
        Self {
            digests: Digests::default(),
            segment_in_use: LOGIN_SEGMENT,
            max_send_segment: LOGIN_SEGMENT,
            max_burst: 0,
            max_outstanding_r2t: 1,
            queue: VecDeque::new(),
            stat_sn: StatSn(1),
            open: Vec::new(),
            wanted: Vec::new(),
            unacknowledged: Vec::new(),
            next_ttt: 0,
            in_batch: Vec::new(),
            requesting: Vec::new(),
            late: 0,
            ends: Vec::new(),
            unacknowledged_tasks: Vec::new(),
            is_sending: false,
            recovery: Recovery::default(),
        }
    }

    /// Sends R2Ts up to the limit set by MaxOutstandingR2T.
    fn solicit(&mut self, task: TaskIdx) {
        let Some(at) = self.wanted.iter().position(|w| w.get.task == task) else {
            return;
        };
        let mut open = self.open.iter().filter(|o| o.task == task).count();
        // Each R2T requests up to MaxBurstLength bytes.
        while open < self.max_outstanding_r2t && self.wanted[at].get.len > 0 {
            let wanted = &mut self.wanted[at];
            let part = GetData {
                len: wanted.get.len.min(self.max_burst),
                ..wanted.get
            };
            wanted.get.offset += part.len;
            wanted.get.len -= part.len;
            open += 1;
            self.send_r2t(at, part);
        }
    }

    fn new_ttt(&mut self) -> Ttt {
        // This must never be the reserved value.
        self.next_ttt = (self.next_ttt + 1) & 0x7fff_ffff;
        Ttt(self.next_ttt)
    }

    /// Requests part of the data for the task with index `at`.
    fn send_r2t(&mut self, at: usize, part: GetData) {
        let ttt = self.new_ttt();
        let r2t_sn = self.wanted[at].r2t_sn;
        self.wanted[at].r2t_sn += 1;
        let open = Open {
            ttt,
            task: part.task,
            itt: part.itt,
            lun: part.lun,
            r2t_sn,
            offset: part.offset,
            len: part.len,
            got: 0,
            next_sn: 0,
            is_sent: false,
        };
        self.queue.push_back(open.request());
        self.open.push(open);
    }

    /// Called when an R2T is added to a batch. This might be a retransmission.
    fn note_r2t(&mut self, pdu: &FromTarget) {
        if let FromTarget::R2t(r2t) = pdu
            && let Some(open) = self.open.iter_mut().find(|open| open.ttt == r2t.ttt)
            && !open.is_sent
        {
            open.is_sent = true;
            self.requesting.push(open.task);
        }
    }

    /// Requests the remaining data again because a PDU is missing.
    fn request_remaining(&mut self, at: usize) -> SolicitedData {
        // The previous transfer tag is no longer valid, so that data received with this tag isn't
        // processed twice.
        let open = self.open.swap_remove(at);
        // The remaining data might still be in flight.
        self.late += u64::from(open.len - open.got);
        let wanted = self.wanted.iter().position(|w| w.get.task == open.task);
        let part = GetData {
            task: open.task,
            itt: open.itt,
            lun: open.lun,
            r2t_sn: 0,
            base: 0,
            offset: open.offset + open.got,
            len: open.len - open.got,
        };
        self.send_r2t(wanted.expect("what is open is wanted"), part);
        SolicitedData::Again(open.task)
    }

    /// Returns true if the buffer of a task isn't in use. Otherwise the task will complete with the
    /// current batch.
    fn let_go(&mut self, task: TaskIdx) -> bool {
        // The socket uses the buffer until the batch was sent.
        let is_busy = self.is_sending && self.in_batch.contains(&task);
        if is_busy && !self.ends.contains(&task) {
            self.ends.push(task);
        }
        !is_busy
    }

    /// Returns the number of PDUs for data between two offsets, if queued now.
    fn pieces(&self, from: u32, to: u32) -> u32 {
        // Most data fits in a single PDU.
        if from == 0 && to <= self.max_burst.min(self.max_send_segment) {
            return u32::from(to > 0);
        }
        let of = |bytes: u32| bytes.div_ceil(self.max_send_segment);
        let first = (self.max_burst - from % self.max_burst).min(to - from);
        let rest = to - from - first;
        of(first) + rest / self.max_burst * of(self.max_burst) + of(rest % self.max_burst)
    }

    /// Returns the data size for the next PDU, in bytes.
    fn piece(&self, item: &Outgoing) -> u32 {
        let in_burst = self.max_burst - item.sent % self.max_burst;
        let left = item.put.end - item.sent;
        left.min(in_burst).min(self.segment_in_use)
    }

    /// Adds the next PDU of a retransmission. Returns true if it's the last one.
    fn put_again(
        &self,
        again: &mut Retransmission,
        mut numbers: Numbers,
        held: TaskBuffers<'_>,
        batch: &mut Batch,
    ) -> bool {
        let (put, from, until, stat_sn) = match again {
            Retransmission::Control(control, stat_sn) => {
                numbers.stat_sn = *stat_sn;
                self.put_control(control, numbers, batch);
                return true;
            }
            Retransmission::Data {
                put,
                from,
                until,
                stat_sn,
            } => (put, from, until, *stat_sn),
        };
        let mut item = Outgoing::new(*put);
        if let Some(stat_sn) = stat_sn {
            numbers.stat_sn = stat_sn;
        } else {
            item.put.status = None;
        }
        // Skip to the first requested PDU, or to the last PDU if it's past the end.
        let mut len = self.piece(&item);
        while item.data_sn < *from && item.sent + len < put.end {
            item.sent += len;
            item.data_sn += 1;
            len = self.piece(&item);
        }
        let is_last = self.put_data_in(&mut item, numbers, held.buffer(put.task), batch);
        *from = item.data_sn;
        is_last || *from >= *until
    }

    /// Retransmits all data of a task using the current PDU size, and then the response with the
    /// tag from the SNACK.
    fn resend_cut_anew(&mut self, snack: &Snack) -> Result<(), RejectReason> {
        // The response is sent after the data, with the tag from the SNACK (RFC 7143 11.16.3). If
        // the previous response is still queued, it must be removed, including data with the
        // previous PDU size.
        let put = self.recovery.find_all_data(snack)?;
        let task = put.task;
        let mut response = self.recovery.response_of(task);
        self.queue.retain_mut(|item| match item {
            Item::Data(Outgoing { put, .. })
            | Item::Retransmission(Retransmission::Data { put, .. }) => put.task != task,
            Item::Control(control) if control.ends == Some(task) => {
                response = Some(control.clone());
                false
            }
            _ => true,
        });
        let exp_data_sn = put.r2ts + put.start.data_sn + self.pieces(put.start.offset, put.end);
        let mut control = response.unwrap_or_else(|| with_data(&put));
        if let FromTarget::ScsiResponse(response) = &mut control.pdu {
            response.exp_data_sn = exp_data_sn;
            response.snack_tag = snack.ttt.0;
        }
        let put = PutData {
            status: None,
            ..put
        };
        self.queue.push_back(Item::Data(Outgoing::new(put)));
        self.queue
            .push_back(match self.recovery.replace(task, &control) {
                Some(stat_sn) => Item::Retransmission(Retransmission::Control(control, stat_sn)),
                None => Item::Control(control),
            });
        Ok(())
    }

    fn put_control(&self, control: &Control, numbers: Numbers, batch: &mut Batch) {
        let start = batch.heads.len();
        let header = control.pdu.header(numbers);
        frame::put_pdu(header, &[], &control.data, self.digests, &mut batch.heads);
        batch.push_head(start);
    }

    /// Adds the next data PDU. Returns true if it's the last one.
    fn put_data_in(
        &self,
        item: &mut Outgoing,
        numbers: Numbers,
        buffer: &Buffer,
        batch: &mut Batch,
    ) -> bool {
        // The F bit must be set at the end of each sequence of MaxBurstLength bytes (RFC 7143
        // 13.13, 11.7.1), and a PDU must not cross this limit.
        let put = item.put;
        let in_burst = self.max_burst - item.sent % self.max_burst;
        let len = self.piece(item);
        let is_last = len == put.end - item.sent;
        let is_same_task = |of: &&Unacknowledged| is_last && of.task == put.task;
        let ack = self.unacknowledged.iter().find(is_same_task);
        let pdu = DataIn {
            is_final: is_last || len == in_burst,
            acknowledge: ack.is_some(),
            status: put.status.filter(|_| is_last),
            lun: if ack.is_some() { put.lun } else { [0; 8] },
            itt: put.itt,
            ttt: ack.map_or(Ttt::NONE, |ack| ack.ttt),
            data_sn: item.data_sn,
            offset: item.sent,
        };
        let start = batch.heads.len();
        frame::put_header(
            pdu.header(numbers),
            &[],
            len,
            self.digests,
            &mut batch.heads,
        );
        batch.push_head(start);
        let at = item.sent - put.base;
        let range = at..at + len;
        for slice in buffer.slices(range.clone()) {
            batch.chunks.push(Chunk::Data(slice));
        }
        batch.len += len as usize;
        let pad = &[0; 3][..padding(len as usize)];
        if self.digests.data || !pad.is_empty() {
            let start = batch.heads.len();
            batch.heads.extend_from_slice(pad);
            if self.digests.data {
                batch.heads.extend(digest_of(buffer, range, pad));
            }
            batch.push_head(start);
        }
        item.sent += len;
        item.data_sn += 1;
        is_last
    }

    /// Fills a batch. Returns false if there is nothing to send, or if the previous batch is still
    /// being sent.
    pub(super) fn poll_batch(
        &mut self,
        mut numbers: Numbers,
        held: TaskBuffers<'_>,
        batch: &mut Batch,
    ) -> bool {
        if self.is_sending {
            return false;
        }
        batch.clear();
        while !batch.is_full()
            && let Some(item) = self.queue.pop_front()
        {
            numbers.stat_sn = self.stat_sn;
            match item {
                Item::Control(control) => {
                    self.note_r2t(&control.pdu);
                    self.put_control(&control, numbers, batch);
                    let is_kept =
                        control.counts && self.recovery.keep_control(&control, self.stat_sn);
                    if is_kept {
                        self.unacknowledged_tasks.extend(control.ends);
                    } else {
                        self.ends.extend(control.ends);
                    }
                    if control.counts {
                        self.stat_sn = self.stat_sn.next();
                    }
                }
                Item::Retransmission(mut again) => {
                    if let Retransmission::Data { put, .. } = &again {
                        self.in_batch.push(put.task);
                    }
                    if !self.put_again(&mut again, numbers, held, batch) {
                        self.queue.push_front(Item::Retransmission(again));
                    }
                }
                Item::Digests(digests) => self.digests = digests,
                Item::Segment(bytes) => self.segment_in_use = bytes,
                Item::Data(mut item) => {
                    let task = item.put.task;
                    // PDUs for the same task are consecutive, so this is sufficient to keep the
                    // list short.
                    if self.in_batch.last() != Some(&task) {
                        self.in_batch.push(task);
                    }
                    if !self.put_data_in(&mut item, numbers, held.buffer(task), batch) {
                        self.queue.push_front(Item::Data(item));
                    } else if item.put.more {
                        // Otherwise the task continues when this piece is acknowledged.
                        if !self.recovery.is_on() {
                            self.ends.push(task);
                        }
                    } else if item.put.status.is_some() {
                        if self.recovery.keep_data(item.put, self.stat_sn) {
                            self.unacknowledged_tasks.push(task);
                        } else {
                            self.ends.push(task);
                        }
                        self.stat_sn = self.stat_sn.next();
                    }
                }
            }
        }
        // The queue may only contain changes of digests or sizes, which don't send anything.
        self.is_sending = batch.len > 0;
        self.is_sending
    }

    /// Called when the batch was sent, or can't be sent. Swaps the two empty lists with the tasks
    /// completed by this batch and the tasks that are kept until their response is acknowledged.
    fn on_sent(&mut self, ends: &mut Vec<TaskIdx>, kept: &mut Vec<TaskIdx>) {
        self.is_sending = false;
        self.in_batch.clear();
        self.requesting.clear();
        std::mem::swap(&mut self.ends, ends);
        std::mem::swap(&mut self.unacknowledged_tasks, kept);
    }
}

impl Datamover for Tcp {
    const RECOVERS: bool = true;

    fn enable(&mut self, session: &SessionParams, connection: &ConnectionParams) {
        self.segment_in_use = connection.max_send_segment;
        self.max_send_segment = connection.max_send_segment;
        self.max_burst = session.max_burst;
        self.max_outstanding_r2t = usize::from(session.max_outstanding_r2t);
        // This is added after the login response, which is already in the queue.
        self.queue.push_back(Item::Digests(connection.digests));
        if session.error_recovery_level > 0 {
            self.recovery.turn_on();
        }
    }

    fn set_max_send_segment(&mut self, bytes: u32) {
        self.max_send_segment = bytes;
        self.queue.push_back(Item::Segment(bytes));
    }

    fn max_send_segment(&self) -> u32 {
        self.max_send_segment
    }

    fn on_context_allocated(&mut self, _: TaskIdx) {}

    fn send_control(&mut self, control: Control) {
        self.queue.push_back(Item::Control(control));
    }

    fn put_data(&mut self, put: PutData) -> u32 {
        self.recovery.on_data(put);
        self.queue.push_back(Item::Data(Outgoing::new(put)));
        let next_sn = put.start.data_sn + self.pieces(put.start.offset, put.end);
        if put.more && self.recovery.is_on() {
            let ttt = self.new_ttt();
            self.unacknowledged.push(Unacknowledged {
                ttt,
                task: put.task,
                next_sn,
            });
        }
        next_sn
    }

    fn carries_status(&self) -> bool {
        true
    }

    fn get_data(&mut self, get: GetData) -> u32 {
        let r2t_sn = get.r2t_sn;
        self.wanted.push(DataRequest {
            get,
            r2t_sn,
            fault: None,
        });
        self.solicit(get.task);
        r2t_sn + get.len.div_ceil(self.max_burst)
    }

    fn on_solicited(&mut self, pdu: &DataOut, len: u32, is_intact: bool) -> SolicitedData {
        let at = self
            .open
            .iter()
            .position(|open| open.ttt == pdu.ttt && open.itt == pdu.itt);
        // Data can be received after its command has completed and the R2T was removed.
        let Some(at) = at else {
            let was_solicited = self.late > 0;
            self.late = self.late.saturating_sub(len.into());
            return SolicitedData::Stale { was_solicited };
        };
        let open = &mut self.open[at];
        let task = open.task;
        let fits = open.got.checked_add(len).is_some_and(|got| got <= open.len);
        // DataSN starts at zero for each R2T (RFC 7143 11.7.5), and DataPDUInOrder is always Yes.
        let in_order = pdu.data_sn == open.next_sn && pdu.offset == open.offset + open.got;
        let ends = fits && open.got + len == open.len;
        let is_lost = !is_intact || (fits && pdu.data_sn > open.next_sn);
        if is_lost && self.recovery.is_on() {
            return self.request_remaining(at);
        }
        // The data doesn't match this R2T, or can't be requested again.
        let fault = match () {
            () if !is_intact || pdu.data_sn > open.next_sn => Some(TransferError::Crc),
            () if !fits || ends != pdu.is_final => Some(TransferError::Amount),
            () if !in_order => Some(TransferError::Failed),
            () => None,
        };
        let from = open.offset + open.got;
        if fault.is_none() {
            open.got += len;
            open.next_sn = open.next_sn.wrapping_add(1);
        }
        let mut wanted = self.wanted.iter_mut();
        let wanted = wanted.find(|wanted| wanted.get.task == task);
        let wanted = wanted.expect("what is open is wanted");
        wanted.fault = wanted.fault.or(fault);
        if wanted.fault.is_some() {
            // No more data is requested. If the command is reassigned, the other connection must
            // request this data again. Data after a previous error was dropped, so it must be
            // requested as well, even if it was counted for its R2T.
            wanted.get.offset = wanted.get.offset.min(from);
            wanted.get.len = 0;
        }
        let failed = wanted.fault;
        if pdu.is_final {
            self.open.swap_remove(at);
            if failed.is_none() {
                self.solicit(task);
            }
        }
        let is_last = pdu.is_final && !self.open.iter().any(|open| open.task == task);
        // We must not respond before receiving the F bit for each R2T (RFC 7143 7.8): the initiator
        // continues to send data until then, which could be used for the next command with the same
        // tag.
        if let Some(error) = failed {
            if !is_last {
                return SolicitedData::Stale {
                    was_solicited: true,
                };
            }
            self.cancel_transfers(task);
            return SolicitedData::Failed(task, error);
        }
        if is_last {
            self.wanted.retain(|wanted| wanted.get.task != task);
        }
        SolicitedData::Data {
            task,
            offset: pdu.offset,
            complete: is_last,
        }
    }

    fn acknowledge(&mut self, exp: Option<StatSn>) -> Vec<TaskIdx> {
        let mut ended = self.recovery.acknowledge(exp);
        if exp.is_none() {
            // A completed task ends when the batch with its response was sent. The queue may
            // contain retransmitted data after this response.
            self.queue
                .retain(|item| !matches!(item, Item::Retransmission(Retransmission::Data { .. })));
        }
        if ended.is_empty() {
            return ended;
        }
        // This data is requested again, with the same or a different PDU size. It's acknowledged,
        // so we don't have to send it.
        self.queue.retain(|item| match item {
            Item::Data(Outgoing { put, .. })
            | Item::Retransmission(Retransmission::Data { put, .. }) => !ended.contains(&put.task),
            _ => true,
        });
        // The context may be used by another command when the batch with this response was sent.
        self.unacknowledged_tasks
            .retain(|task| !ended.contains(task));
        // If data is being retransmitted, the buffer can't be released until it was sent.
        ended.retain(|task| self.let_go(*task));
        ended
    }

    fn acknowledge_data(&mut self, snack: &Snack) -> Result<Option<TaskIdx>, RejectReason> {
        let named = |of: &Unacknowledged| of.ttt == snack.ttt;
        let Some(at) = self.unacknowledged.iter().position(named) else {
            // It was already acknowledged, or its task has completed.
            let was_solicited = (1..=self.next_ttt).contains(&snack.ttt.0);
            return was_solicited
                .then_some(None)
                .ok_or(RejectReason::InvalidDataAck);
        };
        if self.unacknowledged[at].next_sn != snack.begin {
            return Err(RejectReason::InvalidDataAck);
        }
        let is_queued = |item: &Item| match item {
            Item::Data(Outgoing { put, .. }) => put.task == self.unacknowledged[at].task,
            _ => false,
        };
        if self.queue.iter().any(is_queued) {
            // We never sent this data.
            return Err(RejectReason::InvalidDataAck);
        }
        let task = self.unacknowledged.swap_remove(at).task;
        // The buffer can be used for the next piece or by another command.
        self.recovery.discard_data(task);
        self.queue.retain(
            |item| !matches!(item, Item::Retransmission(Retransmission::Data { put, .. }) if put.task == task),
        );
        Ok(self.let_go(task).then_some(task))
    }

    fn resend(&mut self, snack: &Snack) -> Result<(), RejectReason> {
        let is_affected = |open: &&Open| {
            let steps = open.r2t_sn.checked_sub(snack.begin);
            open.itt == snack.itt && steps.is_some_and(|n| snack.run == 0 || n < snack.run)
        };
        if snack.kind == SnackKind::RData && self.recovery.is_on() {
            return self.resend_cut_anew(snack);
        }
        let r2ts: Vec<Item> = match snack.kind {
            SnackKind::DataOrR2t if self.recovery.is_on() => self
                .open
                .iter()
                .filter(is_affected)
                .map(Open::request)
                .collect(),
            _ => Vec::new(),
        };
        if !r2ts.is_empty() {
            self.queue.extend(r2ts);
            return Ok(());
        }
        let again = self.recovery.find(snack)?;
        self.queue
            .extend(again.into_iter().map(Item::Retransmission));
        Ok(())
    }

    fn recovers(&self) -> bool {
        self.recovery.is_on()
    }

    fn cancel_transfers(&mut self, task: TaskIdx) -> bool {
        let open = &mut self.open;
        self.queue.retain(|item| match item {
            Item::Digests(_)
            | Item::Segment(_)
            | Item::Retransmission(Retransmission::Control(..)) => true,
            Item::Data(Outgoing { put, .. })
            | Item::Retransmission(Retransmission::Data { put, .. }) => put.task != task,
            Item::Control(control) => {
                let is_requested = open
                    .iter()
                    .any(|open| open.task == task && is_r2t_of(&control.pdu, open));
                !is_requested && control.ends != Some(task)
            }
        });
        for ended in open.extract_if(.., |open| open.task == task) {
            if ended.is_sent {
                self.late += u64::from(ended.len - ended.got);
            }
        }
        self.wanted.retain(|wanted| wanted.get.task != task);
        self.unacknowledged.retain(|of| of.task != task);
        self.requesting.retain(|of| *of != task);
        self.recovery.discard_data(task);
        !self.let_go(task)
    }

    fn progress(&self, task: TaskIdx) -> Progress {
        let wanted = self.wanted.iter().find(|wanted| wanted.get.task == task);
        let wanted = wanted.expect("the task has requested data");
        let open = self.open.iter().filter(|open| open.task == task);
        Progress {
            got: open
                .map(|open| open.offset + open.got)
                .fold(wanted.get.offset, u32::min),
            r2ts: wanted.r2t_sn,
        }
    }

    fn start_of(&self, start: Start, len: u32, data_sn: u32) -> Option<Start> {
        let mut at = start;
        while at.data_sn < data_sn && at.offset < len {
            let in_burst = self.max_burst - at.offset % self.max_burst;
            at.offset += (len - at.offset).min(in_burst).min(self.segment_in_use);
            at.data_sn += 1;
        }
        (at.data_sn == data_sn).then_some(at)
    }

    fn clear(&mut self) {
        self.queue
            .retain(|item| matches!(item, Item::Digests(_) | Item::Segment(_)));
        self.recovery = Recovery::default();
    }

    fn queued(&self) -> usize {
        self.queue.len() + self.recovery.others()
    }

    fn is_requesting(&self, task: TaskIdx) -> bool {
        let mut open = self.open.iter();
        self.requesting.contains(&task) || open.any(|open| open.task == task && !open.is_sent)
    }

    fn is_sending_data(&self, task: TaskIdx) -> bool {
        self.in_batch.contains(&task)
    }

    fn queued_bytes(&self) -> usize {
        let bytes = |item: &Item| match item {
            Item::Control(control) | Item::Retransmission(Retransmission::Control(control, _)) => {
                control.data.len()
            }
            Item::Data(_) | Item::Retransmission(Retransmission::Data { .. }) => 0,
            Item::Digests(_) | Item::Segment(_) => 0,
        };
        self.queue.iter().map(bytes).sum::<usize>() + self.recovery.bytes_of_others()
    }
}

/// Updates the digest for data that is about to be sent, including its padding.
#[allow(
    unsafe_code,
    reason = "a copy for the digest would be one of three that the data see"
)]
fn digest_of(buffer: &Buffer, data: Range<u32>, pad: &[u8]) -> [u8; 4] {
    let mut digest = DataDigest::new();
    // SAFETY: data is only sent after all operations that write to this part of the buffer have
    // completed, and the command doesn't start another operation until it was sent. The pool is
    // also accessible to devices, but for TCP there are no device requests that use this buffer.
    unsafe { buffer.for_each_piece(data, |piece| digest.update(piece)) };
    digest.update(pad);
    digest.finish()
}

/// Returns the response that was or would be sent with the last data PDU.
fn with_data(put: &PutData) -> Control {
    let status = put
        .status
        .expect("data has a separate or combined response");
    let pdu = ScsiResponse {
        itt: put.itt,
        response: 0,
        status: status.status,
        residual: status.residual,
        bidi_residual: Residual::None,
        exp_data_sn: 0,
        snack_tag: 0,
    };
    Control {
        pdu: FromTarget::ScsiResponse(pdu),
        data: Vec::new(),
        counts: true,
        ends: Some(put.task),
    }
}

fn is_r2t_of(pdu: &FromTarget, open: &Open) -> bool {
    matches!(pdu, FromTarget::R2t(r2t) if r2t.ttt == open.ttt)
}

/// Channel using a TCP connection.
#[derive(Debug)]
pub struct TcpChannel {
    channel: Channel<Tcp>,
    framer: Framer,
    /// Empty lists for tasks of the next batch, used to avoid allocations.
    spare: (Vec<TaskIdx>, Vec<TaskIdx>),
}

impl TcpChannel {
    /// Creates a channel for a new connection.
    #[must_use]
    pub fn new(config: ChannelConfig, now: Instant) -> Self {
        Self {
            channel: Channel::new(config, Tcp::new(), now),
            framer: Framer::new(LOGIN_SEGMENT),
            spare: Default::default(),
        }
    }

    /// Returns the channel to read its state.
    #[must_use]
    pub fn channel(&self) -> &Channel<Tcp> {
        &self.channel
    }

    /// Returns the channel for inputs other than received bytes.
    pub fn channel_mut(&mut self) -> &mut Channel<Tcp> {
        &mut self.channel
    }

    /// Handles received bytes. Returns the number of bytes processed. The remaining bytes must be
    /// passed again when [`Channel::wants_input`] returns true.
    pub fn handle_bytes(&mut self, cx: &mut Cx<'_>, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while self.channel.wants_input() {
            match self.framer.next(rest) {
                Ok((used, Some(frame))) => {
                    self.channel.handle_frame(cx, &frame);
                    rest = &rest[used..];
                }
                Ok((_, None)) => return bytes.len(),
                // We don't know the PDU size or where the next PDU starts, so we can't continue to
                // use this stream.
                Err(error) => {
                    let event = match error {
                        FrameError::HeaderDigest => SessionEvent::DigestError,
                        _ => SessionEvent::FormatError,
                    };
                    self.channel.handle_broken(cx, event, error);
                    return bytes.len();
                }
            }
            self.follow_params();
        }
        if self.channel.is_receiving() {
            return bytes.len() - rest.len();
        }
        if !rest.is_empty() && self.channel.phase() == Phase::Joining {
            // During login, an initiator must not send anything before it receives the response,
            // because this may change how the next PDU is parsed.
            let event = SessionEvent::FormatError;
            self.channel
                .handle_broken(cx, event, "data before the login response");
        }
        bytes.len()
    }

    fn follow_params(&mut self) {
        if let Some(params) = self.channel.take_new_params() {
            self.framer.set(params.max_recv_segment, params.digests);
        }
    }

    /// Same as [`Channel::handle_others_gone`]. After this, PDUs can have digests.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_others_gone(cx);
        self.follow_params();
    }

    /// Same as [`Channel::handle_timeout`], which may complete a login.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_timeout(cx);
        self.follow_params();
    }

    /// Fills the next batch. Returns false if there is nothing to send, or if the previous batch is
    /// still being sent.
    pub fn poll_batch(&mut self, batch: &mut Batch) -> bool {
        self.channel
            .poll_mover(|mover, numbers, held| mover.poll_batch(numbers, held, batch))
    }

    /// Called when the batch was sent, or has failed.
    pub fn handle_sent(&mut self, cx: &mut Cx<'_>, ok: bool) {
        if ok && !self.channel.mover().in_batch.is_empty() {
            self.channel.executor.timers.last_taken = cx.now;
        }
        if ok {
            self.channel
                .executor
                .note_requested(cx.now, |mover| &mover.requesting);
        }
        let (mut ended, mut kept) = std::mem::take(&mut self.spare);
        self.channel.mover_mut().on_sent(&mut ended, &mut kept);
        for task in kept.drain(..) {
            self.channel.executor.note_response(cx, task);
        }
        for task in ended.drain(..) {
            self.channel.handle_done(cx, task, ok);
        }
        self.spare = (ended, kept);
        self.channel.handle_flushed(cx, ok);
    }

    /// Returns the buffer size for a partial PDU, in bytes.
    #[must_use]
    pub fn held(&self) -> usize {
        self.framer.buffered_len()
    }
}

/// Returns a good status to be sent with the data.
pub(super) fn good(residual: Residual) -> DataInStatus {
    DataInStatus {
        status: 0,
        residual,
    }
}
