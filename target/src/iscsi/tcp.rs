//! The datamover on TCP: Data-In PDUs, R2Ts and the data that answer them, digests; and the channel
//! with framing around it.

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

use super::channel::{Channel, ChannelConfig, Cx, Phase, TaskBuffers};
use super::datamover::{Control, Datamover, GetData, Progress, PutData, SolicitedData, Start};
use super::recovery::{Recovery, Retransmission};
use crate::fabric::TaskIdx;
use crate::pool::Buffer;
use crate::stats::SessionEvent;

/// A batch takes no further PDU once it has this many bytes.
const BATCH_BYTES: usize = 512 << 10;

/// A batch takes no further PDU once it has this many chunks; one more PDU adds a few.
const BATCH_CHUNKS: usize = 96;

/// Data segments during login (RFC 7143 13.12: the default).
const LOGIN_SEGMENT: u32 = 8192;

/// A piece of a batch.
#[derive(Clone, Debug)]
pub enum Chunk {
    /// These bytes of [`Batch::heads`].
    Head(Range<usize>),
    /// Bytes of a pool buffer.
    Data(MemSlice),
}

/// Whole PDUs to send in one go.
#[derive(Debug, Default)]
pub struct Batch {
    /// Headers, digests, padding, and the data of control PDUs.
    pub heads: Vec<u8>,
    /// Pieces to send, in order.
    pub chunks: Vec<Chunk>,
    /// Length of all chunks together, in bytes.
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

    /// Appends what was written to the heads from `start` on.
    fn push_head(&mut self, start: usize) {
        let end = self.heads.len();
        self.len += end - start;
        match self.chunks.last_mut() {
            Some(Chunk::Head(last)) if last.end == start => last.end = end,
            _ if start == end => {}
            _ => self.chunks.push(Chunk::Head(start..end)),
        }
    }

    /// All bytes in order: for tests, and for senders that copy.
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

/// An entry of the send queue.
#[derive(Debug)]
enum Item {
    Control(Control),
    Data(Outgoing),
    /// From here on with these digests: the answer to the login goes without.
    Digests(Digests),
    /// The length of data segments from here on, in bytes: what was queued before was counted in
    /// PDUs of another length, which the initiator relies on.
    Segment(u32),
    /// Something that was sent before.
    Retransmission(Retransmission),
}

/// Data on their way to the initiator.
#[derive(Debug)]
struct Outgoing {
    put: PutData,
    /// Offset of the next PDU in the command's data.
    sent: u32,
    data_sn: u32,
}

impl Outgoing {
    /// Data of which no PDU has been sent.
    fn new(put: PutData) -> Self {
        Self {
            put,
            sent: put.start.offset,
            data_sn: put.start.data_sn,
        }
    }
}

/// An R2T that is not fully answered.
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
    /// The R2T was put into a batch.
    is_sent: bool,
}

impl Open {
    /// The R2T that asks for it.
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

/// A piece of data that the initiator is to acknowledge before its buffer is used again (RFC 7143
/// 11.7.2: the A bit).
#[derive(Debug)]
struct Unacknowledged {
    ttt: Ttt,
    task: TaskIdx,
    /// Number of the PDU after it.
    next_sn: u32,
}

/// Data that a task still has to ask for; it stays until everything has come.
#[derive(Debug)]
struct DataRequest {
    get: GetData,
    r2t_sn: u32,
    /// The first thing that was wrong with what came. Nothing more is asked for then.
    fault: Option<TransferError>,
}

/// The datamover on TCP.
#[derive(Debug)]
pub struct Tcp {
    digests: Digests,
    /// Longest data segment of what is being sent, in bytes.
    segment_in_use: u32,
    /// The same of what is queued from now on.
    max_send_segment: u32,
    max_burst: u32,
    max_outstanding_r2t: usize,
    queue: VecDeque<Item>,
    stat_sn: StatSn,
    open: Vec<Open>,
    wanted: Vec<DataRequest>,
    unacknowledged: Vec<Unacknowledged>,
    next_ttt: u32,
    /// Tasks with data in the batch that is being sent.
    in_batch: Vec<TaskIdx>,
    /// Tasks that ask for data by that batch.
    asking: Vec<TaskIdx>,
    /// Bytes that were asked for by tasks which have ended since, and may still come.
    late: u64,
    /// Tasks that end with that batch.
    ends: Vec<TaskIdx>,
    /// Tasks whose answer is in the batch, and which are kept until it is acknowledged.
    answered: Vec<TaskIdx>,
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
            asking: Vec::new(),
            late: 0,
            ends: Vec::new(),
            answered: Vec::new(),
            is_sending: false,
            recovery: Recovery::default(),
        }
    }

    /// Sends R2Ts as far as MaxOutstandingR2T allows.
    fn solicit(&mut self, task: TaskIdx) {
        let Some(at) = self.wanted.iter().position(|w| w.get.task == task) else {
            return;
        };
        let mut open = self.open.iter().filter(|o| o.task == task).count();
        // Each R2T asks for one burst at most, of MaxBurstLength.
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
        // Never the reserved value.
        self.next_ttt = (self.next_ttt + 1) & 0x7fff_ffff;
        Ttt(self.next_ttt)
    }

    /// Asks for a part of what the task at a place of the list wants.
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

    /// An R2T is put into a batch, perhaps once more because the initiator wants that.
    fn note_r2t(&mut self, pdu: &FromTarget) {
        if let FromTarget::R2t(r2t) = pdu
            && let Some(open) = self.open.iter_mut().find(|open| open.ttt == r2t.ttt)
            && !open.is_sent
        {
            open.is_sent = true;
            self.asking.push(open.task);
        }
    }

    /// A PDU of what was asked for is missing: asks for the rest once more.
    fn ask_again(&mut self, at: usize) -> SolicitedData {
        // The old transfer tag is void from here on, so that what still comes with it is not taken
        // twice.
        let open = self.open.swap_remove(at);
        // The rest of its data may be on the way.
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

    /// Whether nothing uses the buffer of a task. Otherwise it is among those that end with the
    /// batch that is being sent.
    fn let_go(&mut self, task: TaskIdx) -> bool {
        // The socket reads the buffer until the batch is sent.
        let is_busy = self.is_sending && self.in_batch.contains(&task);
        if is_busy && !self.ends.contains(&task) {
            self.ends.push(task);
        }
        !is_busy
    }

    /// PDUs of the data between two offsets, if they are queued now.
    fn pieces(&self, from: u32, to: u32) -> u32 {
        // Most data are one PDU.
        if from == 0 && to <= self.max_burst.min(self.max_send_segment) {
            return u32::from(to > 0);
        }
        let of = |bytes: u32| bytes.div_ceil(self.max_send_segment);
        let first = (self.max_burst - from % self.max_burst).min(to - from);
        let rest = to - from - first;
        of(first) + rest / self.max_burst * of(self.max_burst) + of(rest % self.max_burst)
    }

    /// Bytes of the next PDU of data.
    fn piece(&self, item: &Outgoing) -> u32 {
        let in_burst = self.max_burst - item.sent % self.max_burst;
        let left = item.put.end - item.sent;
        left.min(in_burst).min(self.segment_in_use)
    }

    /// Writes the next PDU of those that are sent once more; whether it was the last.
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
        // Up to the first one wanted; the last one of all where that is none.
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

    /// Sends all data of a task once more, in PDUs of the present size, then its answer with the
    /// tag of the SNACK that asks for that.
    fn resend_cut_anew(&mut self, snack: &Snack) -> Result<(), RejectReason> {
        // The answer comes after the data once more, with the tag of the SNACK (RFC 7143 11.16.3),
        // so one that still waits to be sent is taken back, as are data in PDUs of the former size.
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
        frame::put(header, &[], &control.data, self.digests, &mut batch.heads);
        batch.push_head(start);
    }

    /// Writes the next PDU of data; whether it was the last.
    fn put_data_in(
        &self,
        item: &mut Outgoing,
        numbers: Numbers,
        buffer: &Buffer,
        batch: &mut Batch,
    ) -> bool {
        // A sequence ends at MaxBurstLength with the F bit (RFC 7143 13.13, 11.7.1), and no PDU
        // crosses that.
        let put = item.put;
        let in_burst = self.max_burst - item.sent % self.max_burst;
        let len = self.piece(item);
        let is_last = len == put.end - item.sent;
        let asks = |of: &&Unacknowledged| is_last && of.task == put.task;
        let ack = self.unacknowledged.iter().find(asks);
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

    /// Fills a batch; `false` when there is nothing to send, or a batch is still being sent.
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
                        self.answered.extend(control.ends);
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
                    // PDUs of a task come in a row, so this is enough to keep the list short.
                    if self.in_batch.last() != Some(&task) {
                        self.in_batch.push(task);
                    }
                    if !self.put_data_in(&mut item, numbers, held.buffer(task), batch) {
                        self.queue.push_front(Item::Data(item));
                    } else if item.put.more {
                        // Otherwise the task goes on when the piece is acknowledged.
                        if !self.recovery.is_on() {
                            self.ends.push(task);
                        }
                    } else if item.put.status.is_some() {
                        if self.recovery.keep_data(item.put, self.stat_sn) {
                            self.answered.push(task);
                        } else {
                            self.ends.push(task);
                        }
                        self.stat_sn = self.stat_sn.next();
                    }
                }
            }
        }
        // Digests and lengths may be all that was queued; these send nothing.
        self.is_sending = batch.len > 0;
        self.is_sending
    }

    /// The batch was sent, or never will be. Swaps two empty lists for those of the tasks that end
    /// with it, and of those whose answers went with it and which are kept.
    fn on_sent(&mut self, ends: &mut Vec<TaskIdx>, answered: &mut Vec<TaskIdx>) {
        self.is_sending = false;
        self.in_batch.clear();
        self.asking.clear();
        std::mem::swap(&mut self.ends, ends);
        std::mem::swap(&mut self.answered, answered);
    }
}

impl Datamover for Tcp {
    const RECOVERS: bool = true;

    fn enable(&mut self, session: &SessionParams, connection: &ConnectionParams) {
        self.segment_in_use = connection.max_send_segment;
        self.max_send_segment = connection.max_send_segment;
        self.max_burst = session.max_burst;
        self.max_outstanding_r2t = usize::from(session.max_outstanding_r2t);
        // Behind the answer to the login, which is in the queue already.
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

    fn begin(&mut self, _: TaskIdx) {}

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

    fn take_solicited(&mut self, pdu: &DataOut, len: u32, is_intact: bool) -> SolicitedData {
        let at = self
            .open
            .iter()
            .position(|open| open.ttt == pdu.ttt && open.itt == pdu.itt);
        // Data may follow the end of their command, whose R2T is forgotten then.
        let Some(at) = at else {
            let was_asked = self.late > 0;
            self.late = self.late.saturating_sub(len.into());
            return SolicitedData::Stale { was_asked };
        };
        let open = &mut self.open[at];
        let task = open.task;
        let fits = open.got.checked_add(len).is_some_and(|got| got <= open.len);
        // DataSN begins with zero for each R2T (RFC 7143 11.7.5), and DataPDUInOrder is always Yes.
        let in_order = pdu.data_sn == open.next_sn && pdu.offset == open.offset + open.got;
        let ends = fits && open.got + len == open.len;
        let is_lost = !is_intact || (fits && pdu.data_sn > open.next_sn);
        if is_lost && self.recovery.is_on() {
            return self.ask_again(at);
        }
        // Data that do not belong to this R2T, or some that cannot be asked for once more.
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
            // Nothing more is asked for, and another connection that takes the command over has to
            // ask for this again. Data behind an earlier fault are dropped, so they have not come
            // either, though they count for their R2T.
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
        // The command is answered when the F bit of each R2T has come (RFC 7143 7.8): until then
        // the initiator sends data, which could be taken for those of the next command with this
        // tag.
        if let Some(error) = failed {
            if !is_last {
                return SolicitedData::Stale { was_asked: true };
            }
            self.forget(task);
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
            // From here on a task ends with the batch that its answer is in, and data requested
            // again may be behind that.
            self.queue
                .retain(|item| !matches!(item, Item::Retransmission(Retransmission::Data { .. })));
        }
        if ended.is_empty() {
            return ended;
        }
        // Data requested again, in the same PDUs or in others: acknowledged, so not needed any more.
        self.queue.retain(|item| match item {
            Item::Data(Outgoing { put, .. })
            | Item::Retransmission(Retransmission::Data { put, .. }) => !ended.contains(&put.task),
            _ => true,
        });
        // Its number may be another command's when the batch that its answer is in has been sent.
        self.answered.retain(|task| !ended.contains(task));
        // The buffer of one whose data are being sent once more is in use until they are sent.
        ended.retain(|task| self.let_go(*task));
        ended
    }

    fn acknowledge_data(&mut self, snack: &Snack) -> Result<Option<TaskIdx>, RejectReason> {
        let named = |of: &Unacknowledged| of.ttt == snack.ttt;
        let Some(at) = self.unacknowledged.iter().position(named) else {
            // It was acknowledged before, or its task is over.
            let was_asked = (1..=self.next_ttt).contains(&snack.ttt.0);
            return was_asked
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
            // It cannot have what was not sent.
            return Err(RejectReason::InvalidDataAck);
        }
        let task = self.unacknowledged.swap_remove(at).task;
        // The buffer is for the next piece, or for another command.
        self.recovery.forget(task);
        self.queue.retain(
            |item| !matches!(item, Item::Retransmission(Retransmission::Data { put, .. }) if put.task == task),
        );
        Ok(self.let_go(task).then_some(task))
    }

    fn resend(&mut self, snack: &Snack) -> Result<(), RejectReason> {
        let asked = |open: &&Open| {
            let steps = open.r2t_sn.checked_sub(snack.begin);
            open.itt == snack.itt && steps.is_some_and(|n| snack.run == 0 || n < snack.run)
        };
        if snack.kind == SnackKind::RData && self.recovery.is_on() {
            return self.resend_cut_anew(snack);
        }
        let r2ts: Vec<Item> = match snack.kind {
            SnackKind::DataOrR2t if self.recovery.is_on() => {
                self.open.iter().filter(asked).map(Open::request).collect()
            }
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

    fn forget(&mut self, task: TaskIdx) -> bool {
        let open = &mut self.open;
        self.queue.retain(|item| match item {
            Item::Digests(_)
            | Item::Segment(_)
            | Item::Retransmission(Retransmission::Control(..)) => true,
            Item::Data(Outgoing { put, .. })
            | Item::Retransmission(Retransmission::Data { put, .. }) => put.task != task,
            Item::Control(control) => {
                let asks = open
                    .iter()
                    .any(|open| open.task == task && is_r2t_of(&control.pdu, open));
                !asks && control.ends != Some(task)
            }
        });
        for ended in open.extract_if(.., |open| open.task == task) {
            if ended.is_sent {
                self.late += u64::from(ended.len - ended.got);
            }
        }
        self.wanted.retain(|wanted| wanted.get.task != task);
        self.unacknowledged.retain(|of| of.task != task);
        self.asking.retain(|of| *of != task);
        self.recovery.forget(task);
        !self.let_go(task)
    }

    fn progress(&self, task: TaskIdx) -> Progress {
        let wanted = self.wanted.iter().find(|wanted| wanted.get.task == task);
        let wanted = wanted.expect("the task has asked for data");
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

    fn is_asking(&self, task: TaskIdx) -> bool {
        let mut open = self.open.iter();
        self.asking.contains(&task) || open.any(|open| open.task == task && !open.is_sent)
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

/// The digest of data that are about to be sent, and of their padding.
#[allow(
    unsafe_code,
    reason = "a copy for the digest would be one of three that the data see"
)]
fn digest_of(buffer: &Buffer, data: Range<u32>, pad: &[u8]) -> [u8; 4] {
    let mut digest = DataDigest::new();
    // SAFETY: data are put out when the operations that fill that part of the buffer have ended,
    // and the command starts no other before they are sent. The pool is the devices', too, but on
    // TCP no request to one names this buffer.
    unsafe { buffer.for_each_piece(data, |piece| digest.update(piece)) };
    digest.update(pad);
    digest.finish()
}

/// The answer that went, or was to go, with the last of the data.
fn with_data(put: &PutData) -> Control {
    let status = put
        .status
        .expect("data have an answer of their own or with them");
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

/// A channel on a TCP connection.
#[derive(Debug)]
pub struct TcpChannel {
    channel: Channel<Tcp>,
    framer: Framer,
    /// Empty lists with their memory, for tasks whose batch was sent.
    spare: (Vec<TaskIdx>, Vec<TaskIdx>),
}

impl TcpChannel {
    /// A connection on which nothing has come yet.
    #[must_use]
    pub fn new(config: ChannelConfig, now: Instant) -> Self {
        Self {
            channel: Channel::new(config, Tcp::new(), now),
            framer: Framer::new(LOGIN_SEGMENT),
            spare: Default::default(),
        }
    }

    /// Returns the channel, for looks at its state.
    #[must_use]
    pub fn channel(&self) -> &Channel<Tcp> {
        &self.channel
    }

    /// The channel, for inputs that are not bytes.
    pub fn channel_mut(&mut self) -> &mut Channel<Tcp> {
        &mut self.channel
    }

    /// Bytes arrived: how many of them were taken. The rest is to come again when
    /// [`Channel::wants_input`] says so.
    pub fn handle_bytes(&mut self, cx: &mut Cx<'_>, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while self.channel.wants_input() {
            match self.framer.next(rest) {
                Ok((used, Some(frame))) => {
                    self.channel.handle_frame(cx, &frame);
                    rest = &rest[used..];
                }
                Ok((_, None)) => return bytes.len(),
                // The length of the PDU is not known, nor where the next one begins: the stream is
                // of no further use.
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
            // An initiator that logs in sends nothing before the answer, on which the meaning of it
            // depends.
            let event = SessionEvent::FormatError;
            self.channel
                .handle_broken(cx, event, "data before the login is answered");
        }
        bytes.len()
    }

    fn follow_params(&mut self) {
        if let Some(params) = self.channel.take_new_params() {
            self.framer.set(params.max_recv_segment, params.digests);
        }
    }

    /// As [`Channel::handle_others_gone`]; PDUs that follow may have digests.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_others_gone(cx);
        self.follow_params();
    }

    /// Fills the next batch; `false` when there is nothing to send, or the last one is not yet
    /// sent.
    pub fn poll_batch(&mut self, batch: &mut Batch) -> bool {
        self.channel
            .poll_mover(|mover, numbers, held| mover.poll_batch(numbers, held, batch))
    }

    /// The batch was sent, or failed to be.
    pub fn handle_sent(&mut self, cx: &mut Cx<'_>, ok: bool) {
        if ok && !self.channel.mover().in_batch.is_empty() {
            self.channel.last_taken = cx.now;
        }
        if ok {
            self.channel.note_asked(cx.now, |mover| &mover.asking);
        }
        let (mut ended, mut answered) = std::mem::take(&mut self.spare);
        self.channel.mover_mut().on_sent(&mut ended, &mut answered);
        for task in answered.drain(..) {
            self.channel.note_answered(cx, task);
        }
        for task in ended.drain(..) {
            self.channel.handle_done(cx, task);
        }
        self.spare = (ended, answered);
        self.channel.handle_flushed(cx, ok);
    }

    /// Bytes kept of a PDU that is not whole.
    #[must_use]
    pub fn held(&self) -> usize {
        self.framer.held()
    }
}

/// The status that may go with data: a good one.
pub(super) fn good(residual: Residual) -> DataInStatus {
    DataInStatus {
        status: 0,
        residual,
    }
}
