//! A stream: the state machine of a connected rsocket.
//!
//! Data are written by RDMA into the receiver's buffer, a ring of two halves. The receiver names
//! each half, once the program has read it empty, in the sender's target list; a sender fills the
//! current segment of that list before it goes on to the next. Each write carries a message in its
//! immediate data, which takes a receive of the other end's: data and iomaps are paid for with
//! credits. A few messages are free, so that ends without credits can give each other some; these
//! rely on the queue pair's retries where the other end has no receive.
//!
//! ```text
//!        shut_write, Shutdown out        Shutdown in, or shut_read
//! Open ------------------------> Open --------------------------> Disconnect goes out
//!   |  Disconnect in, or its completion                                |
//!   +----------------------------------> Disconnected <----------------+
//!   |  a message that the protocol forbids, an error of the queue pair
//!   +----------------------------------> Failed
//! ```
//!
//! The machine owns no memory, queue pair or clock. It answers with places in the send buffer and
//! with [`Control`] messages; its driver posts them and reports their completions.

use std::collections::VecDeque;
use std::ops::Range;

use super::wire::{ConnData, Iomap, MAX_DATA, Message, SEGMENT_LEN, Segment};

/// Entries of our target list: the halves of a buffer.
pub(super) const TARGETS: usize = 2;

/// Control messages that may be under way, for which no credits are needed.
const CONTROLS: u16 = 4;

/// Room in the send buffer, in bytes, from which on a stream is writable.
pub(super) const LOW_WATER: u32 = 2048;

/// Most bytes of one write: longer ones would delay the first bytes at the receiver.
const MAX_TRANSFER: u32 = 65536;

/// Sizes of a stream, which do not change once it is connected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Work requests of the send queue.
    pub(super) send_queue: u16,
    /// Work requests of the receive queue.
    pub(super) recv_queue: u16,
    /// Most bytes that are sent inline.
    pub(super) inline: u32,
    /// Bytes of the send buffer.
    pub(super) send_buffer: u32,
    /// Bytes of the receive buffer, an even number.
    pub(super) recv_buffer: u32,
    /// Iomaps of the other end's that have a place here.
    pub(super) iomaps: u16,
}

/// State of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum State {
    /// Connected: at least one direction is open, or the disconnection is on its way.
    Open,
    /// One end has disconnected. What has been received can still be read.
    Disconnected,
    /// Broken, with an error number of the operating system.
    Failed(i32),
}

/// Kind of a work request, which its identifier names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    /// A receive.
    Receive,
    /// A write of data, with its bytes in the send buffer.
    Data(u32),
    /// A control message.
    Control,
    /// The control message that disconnects.
    Disconnect,
}

impl Work {
    /// Identifier of a work request of this kind.
    pub(super) fn id(self) -> u64 {
        match self {
            Self::Receive => 0,
            Self::Control => 1 << 32,
            Self::Disconnect => 2 << 32,
            Self::Data(bytes) => 3 << 32 | u64::from(bytes),
        }
    }

    /// The kind that an identifier of ours names.
    pub(super) fn of(id: u64) -> Self {
        match id >> 32 {
            0 => Self::Receive,
            1 => Self::Control,
            2 => Self::Disconnect,
            _ => Self::Data(id as u32),
        }
    }
}

/// Memory of the other end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Remote {
    pub(super) addr: u64,
    pub(super) key: u32,
}

/// Where the bytes of a write are.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Place {
    /// In the work request.
    Inline,
    /// In the send buffer, in up to two pieces.
    Buffer([Range<usize>; 2]),
}

/// A write that the driver posts, with its bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Write {
    pub(super) length: u32,
    pub(super) place: Place,
    pub(super) remote: Remote,
    /// Immediate data; without, the other end does not notice the write.
    pub(super) message: Option<Message>,
    pub(super) work: Work,
}

/// A control message that the driver posts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Control {
    pub(super) message: Message,
    /// An entry of the other end's target list.
    pub(super) entry: Option<(Remote, [u8; SEGMENT_LEN])>,
    pub(super) work: Work,
}

/// Our target list, which the other end writes.
pub(super) trait Targets {
    /// Takes the segment of an entry, whose length is 0 afterwards.
    fn take(&mut self, index: usize) -> Segment;
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    sizes: Sizes,
    state: State,
    /// The other end may send.
    reads: bool,
    /// This end may send.
    writes: bool,
    /// Shutdown or disconnect, which waits for room in the send queue.
    goodbye: Option<Message>,

    // What this end sends.
    /// Requests that fit into the send queue beside the control messages.
    slots: u16,
    /// Control messages that fit.
    controls: u16,
    /// Where the next byte goes in the send buffer.
    send_at: u32,
    /// Free bytes of the send buffer.
    send_free: u32,
    /// Messages sent, and how many may be.
    sent: u16,
    send_limit: u16,
    /// Segment that is being filled, and the entry of the list that comes after it.
    segment: Segment,
    next_target: usize,

    // What this end receives.
    /// Address and key of the receive buffer.
    buffer: Remote,
    /// Lengths of the messages that have not been read.
    unread: VecDeque<u32>,
    unread_bytes: u32,
    /// Where the next unread byte is.
    read_at: u32,
    /// Bytes that the other end may still fill.
    announced: u32,
    /// Bytes that have been read and not been announced again, and where they begin.
    read_bytes: u32,
    announce_at: u32,
    /// Messages that have been read, and how many of them credits were given for.
    received: u16,
    credited: u16,
    /// The other end's target list, its byte order, and the entry that is written next.
    peer: ConnData,
    next_entry: u32,
}

impl Stream {
    /// A stream whose ends have each other's connection data. `buffer` is this end's receive
    /// buffer, of which the first half was announced with them.
    pub(super) fn new(sizes: Sizes, buffer: Remote, peer: ConnData) -> Self {
        let half = sizes.recv_buffer / 2;
        Self {
            sizes,
            state: State::Open,
            reads: true,
            writes: true,
            goodbye: None,
            slots: sizes.send_queue.saturating_sub(CONTROLS),
            controls: CONTROLS,
            send_at: 0,
            send_free: sizes.send_buffer,
            sent: 0,
            send_limit: peer.credits,
            segment: peer.data,
            next_target: 1,
            buffer,
            unread: VecDeque::new(),
            unread_bytes: 0,
            read_at: 0,
            announced: half,
            read_bytes: half,
            announce_at: half,
            received: 0,
            credited: 0,
            peer,
            next_entry: 1 % peer.targets.length.max(1),
        }
    }

    /// State of the stream.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Ends the stream with an error, unless it has ended.
    pub(super) fn fail(&mut self, errno: i32) {
        if self.state == State::Open {
            self.state = State::Failed(errno);
        }
    }

    /// Ends the stream as the queue pair has ended.
    pub(super) fn handle_flushed(&mut self) {
        if self.state == State::Open {
            self.state = State::Disconnected;
        }
    }

    /// Takes a message of the other end's. One that the protocol forbids ends the stream.
    pub(super) fn handle_message(&mut self, message: Message) {
        if self.state != State::Open {
            return;
        }
        match message {
            Message::Data(length) => self.on_data(length),
            Message::Credits(limit) => self.send_limit = limit,
            // It was paid for, and is read at once.
            Message::Iomap(_) => self.received = self.received.wrapping_add(1),
            Message::Disconnect => self.state = State::Disconnected,
            Message::Shutdown if self.writes => self.reads = false,
            Message::Shutdown => self.state = State::Disconnected,
            // Reserved kinds are for later versions, which older ends are to ignore.
            Message::KeepAlive | Message::Reserved => {}
        }
    }

    fn on_data(&mut self, length: u32) {
        let has_room = self.unread.len() < usize::from(self.sizes.recv_queue);
        if length == 0 || length > self.announced || !has_room {
            self.fail(libc::EPROTO);
            return;
        }
        self.announced -= length;
        self.unread_bytes += length;
        self.unread.push_back(length);
    }

    /// Takes the completion of a request that was sent.
    pub(super) fn handle_sent(&mut self, work: Work) {
        match work {
            Work::Receive => {}
            Work::Data(bytes) => {
                self.slots += 1;
                self.send_free += bytes;
            }
            Work::Control => self.controls += 1,
            Work::Disconnect => {
                self.controls += 1;
                self.handle_flushed();
            }
        }
    }

    /// All that was sent has arrived, or nothing more will.
    pub(super) fn is_flushed(&self) -> bool {
        let all = self.sizes.send_queue.saturating_sub(CONTROLS);
        let is_idle = self.slots == all && self.controls == CONTROLS && self.goodbye.is_none();
        is_idle || self.state != State::Open
    }

    /// Ends one direction or both, for this end. A last message tells the other end.
    pub(super) fn shut(&mut self, reads: bool, writes: bool) {
        if self.state != State::Open || self.goodbye == Some(Message::Disconnect) {
            return;
        }
        let did_write = self.writes;
        self.reads &= !reads;
        self.writes &= !writes;
        match (self.reads, self.writes) {
            (false, false) => self.goodbye = Some(Message::Disconnect),
            (true, false) if did_write => self.goodbye = Some(Message::Shutdown),
            _ => {}
        }
    }

    /// Next control message, which the driver posts.
    pub(super) fn poll_control(&mut self) -> Option<Control> {
        if self.state != State::Open || self.controls == 0 {
            return None;
        }
        if let Some(message) = self.goodbye.take() {
            self.controls -= 1;
            let work = match message {
                Message::Disconnect => Work::Disconnect,
                _ => Work::Control,
            };
            let entry = None;
            return Some(Control {
                message,
                entry,
                work,
            });
        }
        let half = self.sizes.recv_buffer / 2;
        let is_half_read = self.read_bytes >= half;
        // Half of the receives are enough for the other end to go on with until it hears of more.
        let uncredited = self.received.wrapping_sub(self.credited);
        if !is_half_read && uncredited < self.sizes.recv_queue / 2 {
            return None;
        }
        self.controls -= 1;
        self.credited = self.received;
        let limit = self.received.wrapping_add(self.sizes.recv_queue);
        let entry = is_half_read.then(|| self.announce(half));
        Some(Control {
            message: Message::Credits(limit),
            entry,
            work: Work::Control,
        })
    }

    /// Announces the half of the receive buffer that has been read.
    fn announce(&mut self, half: u32) -> (Remote, [u8; SEGMENT_LEN]) {
        let segment = Segment {
            addr: self.buffer.addr.wrapping_add(self.announce_at.into()),
            key: self.buffer.key,
            length: half,
        };
        self.read_bytes -= half;
        self.announced += half;
        self.announce_at = (self.announce_at + half) % (2 * half);
        let offset = u64::from(self.next_entry) * SEGMENT_LEN as u64;
        let remote = Remote {
            addr: self.peer.targets.addr.wrapping_add(offset),
            key: self.peer.targets.key,
        };
        self.next_entry = (self.next_entry + 1) % self.peer.targets.length.max(1);
        (remote, segment.to_entry(self.peer.is_big_endian))
    }

    /// Takes a control message's place for a write without bytes, by which an idle end notices
    /// that the other is gone.
    pub(super) fn plan_keep_alive(&mut self) -> Option<Work> {
        if self.state != State::Open || self.controls == 0 {
            return None;
        }
        self.controls -= 1;
        Some(Work::Control)
    }

    /// The other end may send more, or there is something to read.
    pub(super) fn can_read(&self) -> bool {
        self.unread_bytes > 0 || !self.is_read_open()
    }

    /// The other end may still send.
    pub(super) fn is_read_open(&self) -> bool {
        self.reads && self.state == State::Open
    }

    /// This end may still send.
    pub(super) fn is_write_open(&self) -> bool {
        self.writes && self.state == State::Open
    }

    /// Bytes that can be read.
    pub(super) fn unread(&self) -> u32 {
        self.unread_bytes
    }

    /// Places in the receive buffer of the first `max` unread bytes, or of all.
    pub(super) fn plan_read(&self, max: usize) -> [Range<usize>; 2] {
        let length = max.min(self.unread_bytes as usize);
        ring(self.read_at, length, self.sizes.recv_buffer)
    }

    /// Gives back the first `bytes` unread bytes.
    ///
    /// # Panics
    /// For more than there are.
    pub(super) fn consume(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).expect("a buffer is shorter");
        self.unread_bytes -= bytes;
        self.read_bytes += bytes;
        let at = u64::from(self.read_at) + u64::from(bytes);
        self.read_at = (at % u64::from(self.sizes.recv_buffer)) as u32;
        let mut left = bytes;
        while let Some(first) = self.unread.front_mut() {
            if left < *first {
                *first -= left;
                return;
            }
            left -= *first;
            self.unread.pop_front();
            self.received = self.received.wrapping_add(1);
        }
    }

    /// There is room for a write of the least size.
    fn has_room(&self) -> bool {
        self.is_write_open() && self.slots > 0 && self.send_free >= LOW_WATER
    }

    fn has_credit(&self) -> bool {
        self.sent != self.send_limit
    }

    /// Data can be sent now.
    pub(super) fn can_write(&mut self, targets: &mut impl Targets) -> bool {
        if self.segment.length == 0 {
            self.segment = targets.take(self.next_target);
            if self.segment.length > 0 {
                self.next_target = (self.next_target + 1) % TARGETS;
            }
        }
        self.has_room() && self.has_credit() && self.segment.length > 0
    }

    /// Plans a write of up to `max` bytes of data. `None` where it has to wait.
    pub(super) fn plan_write(&mut self, max: usize, targets: &mut impl Targets) -> Option<Write> {
        if max == 0 || !self.can_write(targets) {
            return None;
        }
        let limit = self.send_free.min(self.segment.length).min(MAX_TRANSFER);
        let length = u32::try_from(max).unwrap_or(MAX_DATA).min(limit);
        let remote = Remote {
            addr: self.segment.addr,
            key: self.segment.key,
        };
        self.segment.addr = self.segment.addr.wrapping_add(length.into());
        self.segment.length -= length;
        self.sent = self.sent.wrapping_add(1);
        Some(self.write(length, remote, Some(Message::Data(length))))
    }

    /// An iomap of the other end's can be written to now.
    pub(super) fn can_write_direct(&self) -> bool {
        self.has_room()
    }

    /// Plans a write of up to `max` bytes into an iomap of the other end's.
    pub(super) fn plan_direct(&mut self, max: usize, remote: Remote) -> Option<Write> {
        if max == 0 || !self.can_write_direct() {
            return None;
        }
        let limit = self.send_free.min(MAX_TRANSFER);
        let length = u32::try_from(max).unwrap_or(MAX_DATA).min(limit);
        Some(self.write(length, remote, None))
    }

    /// Iomaps that the other end has places for.
    pub(super) fn peer_iomaps(&self) -> u16 {
        self.peer.iomaps
    }

    /// An iomap can be announced now.
    pub(super) fn can_write_iomap(&self) -> bool {
        self.has_room() && self.has_credit()
    }

    /// Plans the announcement of an iomap in an entry of the other end's list, with its bytes.
    pub(super) fn plan_iomap(&mut self, index: u16, map: Iomap) -> Option<(Write, Vec<u8>)> {
        if !self.can_write_iomap() {
            return None;
        }
        let bytes = map.to_entry(self.peer.is_big_endian).to_vec();
        let targets = self.peer.targets;
        let list = u64::from(targets.length) * SEGMENT_LEN as u64;
        let offset = u64::from(index) * bytes.len() as u64;
        let remote = Remote {
            addr: targets.addr.wrapping_add(list).wrapping_add(offset),
            key: targets.key,
        };
        self.sent = self.sent.wrapping_add(1);
        let write = self.write(bytes.len() as u32, remote, Some(Message::Iomap(index)));
        Some((write, bytes))
    }

    fn write(&mut self, length: u32, remote: Remote, message: Option<Message>) -> Write {
        self.slots -= 1;
        let (place, work) = if length <= self.sizes.inline {
            (Place::Inline, Work::Data(0))
        } else {
            let place = ring(self.send_at, length as usize, self.sizes.send_buffer);
            self.send_free -= length;
            let at = u64::from(self.send_at) + u64::from(length);
            self.send_at = (at % u64::from(self.sizes.send_buffer)) as u32;
            (Place::Buffer(place), Work::Data(length))
        };
        Write {
            length,
            place,
            remote,
            message,
            work,
        }
    }
}

/// The one or two pieces of `length` bytes of a ring, from `at` on.
fn ring(at: u32, length: usize, size: u32) -> [Range<usize>; 2] {
    let (at, size) = (at as usize, size as usize);
    let first = length.min(size - at);
    [at..at + first, 0..length - first]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes {
        send_queue: 20,
        recv_queue: 16,
        inline: 8,
        send_buffer: 4096,
        recv_buffer: 200,
        iomaps: 0,
    };

    /// An end with its memory; the network between two of them is [`carry`].
    struct End {
        stream: Stream,
        send: Vec<u8>,
        recv: Vec<u8>,
        list: [Segment; TARGETS],
        out: VecDeque<(Option<Message>, Remote, Vec<u8>, Work)>,
    }

    struct TargetList<'a>(&'a mut [Segment; TARGETS]);

    impl Targets for TargetList<'_> {
        fn take(&mut self, index: usize) -> Segment {
            std::mem::take(&mut self.0[index])
        }
    }

    /// Addresses of an end's memory.
    const LIST: u64 = 0x1000;
    const BUFFER: u64 = 0x8000;

    fn data(sizes: &Sizes) -> ConnData {
        ConnData {
            is_big_endian: cfg!(target_endian = "big"),
            credits: sizes.recv_queue,
            iomaps: sizes.iomaps,
            targets: Segment {
                addr: LIST,
                key: 1,
                length: TARGETS as u32,
            },
            data: Segment {
                addr: BUFFER,
                key: 2,
                length: sizes.recv_buffer / 2,
            },
        }
    }

    fn end() -> End {
        let buffer = Remote {
            addr: BUFFER,
            key: 2,
        };
        End {
            stream: Stream::new(SIZES, buffer, data(&SIZES)),
            send: vec![0; SIZES.send_buffer as usize],
            recv: vec![0; SIZES.recv_buffer as usize],
            list: [Segment::default(); TARGETS],
            out: VecDeque::new(),
        }
    }

    impl End {
        fn send(&mut self, bytes: &[u8]) -> usize {
            let list = &mut TargetList(&mut self.list);
            let Some(write) = self.stream.plan_write(bytes.len(), list) else {
                return 0;
            };
            let length = write.length as usize;
            let mut sent = bytes[..length].to_vec();
            if let Place::Buffer([first, second]) = write.place {
                self.send[first.clone()].copy_from_slice(&bytes[..first.len()]);
                self.send[second.clone()].copy_from_slice(&bytes[first.len()..length]);
                sent = [&self.send[first], &self.send[second]].concat();
            }
            self.out
                .push_back((write.message, write.remote, sent, write.work));
            length
        }

        fn post_controls(&mut self) {
            while let Some(control) = self.stream.poll_control() {
                let none = Remote { addr: 0, key: 0 };
                let (remote, bytes) = control
                    .entry
                    .map_or((none, vec![]), |e| (e.0, e.1.to_vec()));
                self.out
                    .push_back((Some(control.message), remote, bytes, control.work));
            }
        }

        fn receive(&mut self, max: usize) -> Vec<u8> {
            let [first, second] = self.stream.plan_read(max);
            let bytes = [&self.recv[first], &self.recv[second]].concat();
            self.stream.consume(bytes.len());
            bytes
        }
    }

    /// Carries what one end has sent to the other. Checks that it may be written there.
    fn carry(from: &mut End, to: &mut End) {
        from.post_controls();
        while let Some((message, remote, bytes, work)) = from.out.pop_front() {
            match remote.key {
                1 => {
                    let index = (remote.addr - LIST) as usize / SEGMENT_LEN;
                    let entry: [u8; SEGMENT_LEN] = bytes.try_into().unwrap();
                    assert_eq!(to.list[index].length, 0, "a segment in use is overwritten");
                    to.list[index] = Segment::from_entry(&entry);
                }
                2 => {
                    let at = (remote.addr - BUFFER) as usize;
                    to.recv[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                _ => assert!(bytes.is_empty()),
            }
            if let Some(message) = message {
                to.stream.handle_message(Message::decode(message.encode()));
            }
            from.stream.handle_sent(work);
        }
    }

    #[test]
    fn bytes_arrive_in_order_through_many_rounds_of_the_buffers() {
        let (mut a, mut b) = (end(), end());
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let (mut sent, mut got) = (0, Vec::new());
        let mut rounds = 0;
        while got.len() < bytes.len() {
            rounds += 1;
            assert!(rounds < 10_000, "the stream is stuck at byte {}", got.len());
            // Sizes that fit neither the halves nor the rings.
            let step = 1 + rounds % 37;
            let until = bytes.len().min(sent + step);
            sent += a.send(&bytes[sent..until]);
            carry(&mut a, &mut b);
            if rounds % 3 != 0 {
                got.extend(b.receive(1 + rounds % 29));
            }
            carry(&mut b, &mut a);
        }
        assert_eq!(got, bytes);
        assert_eq!(a.stream.state(), State::Open);
        assert!(a.stream.is_flushed());
    }

    #[test]
    fn a_sender_stops_where_the_receiver_has_no_room_and_goes_on_when_it_reads() {
        let (mut a, mut b) = (end(), end());
        carry(&mut b, &mut a);
        let bytes = [7; 300];
        let mut sent = 0;
        loop {
            let n = a.send(&bytes[sent..]);
            carry(&mut a, &mut b);
            sent += n;
            if n == 0 {
                break;
            }
        }
        assert_eq!(sent, 200, "both halves");
        assert!(!a.stream.can_write(&mut TargetList(&mut a.list)));
        b.receive(99);
        carry(&mut b, &mut a);
        assert_eq!(a.send(&bytes), 0, "no half has been read");
        b.receive(1);
        carry(&mut b, &mut a);
        assert_eq!(a.send(&bytes), 100);
    }

    #[test]
    fn a_sender_stops_without_credits() {
        let (mut a, mut b) = (end(), end());
        for _ in 0..16 {
            assert_eq!(a.send(&[1]), 1);
            carry(&mut a, &mut b);
        }
        assert_eq!(a.send(&[1]), 0, "one message for each receive");
        b.receive(8);
        carry(&mut b, &mut a);
        assert_eq!(a.send(&[1]), 1);
    }

    #[test]
    fn messages_that_are_under_way_fill_the_send_queue() {
        let mut a = end();
        a.stream.send_limit = 1000;
        for _ in 0..16 {
            assert_eq!(a.send(&[1]), 1);
        }
        assert_eq!(a.send(&[1]), 0, "four places are left for control messages");
        let (_, _, _, work) = a.out.pop_front().unwrap();
        a.stream.handle_sent(work);
        assert_eq!(a.send(&[1]), 1);
    }

    #[test]
    fn a_peer_that_sends_more_than_it_may_loses_the_connection() {
        for message in [Message::Data(101), Message::Data(0)] {
            let mut b = end();
            b.stream.handle_message(message);
            assert_eq!(b.stream.state(), State::Failed(libc::EPROTO));
        }
        let mut b = end();
        for _ in 0..16 {
            b.stream.handle_message(Message::Data(1));
        }
        assert_eq!(b.stream.state(), State::Open);
        b.stream.handle_message(Message::Data(1));
        assert_eq!(b.stream.state(), State::Failed(libc::EPROTO));
        assert_eq!(b.stream.unread(), 16, "what came before can be read");
    }

    #[test]
    fn each_direction_ends_by_itself() {
        let (mut a, mut b) = (end(), end());
        a.send(&[1, 2, 3]);
        a.stream.shut(false, true);
        carry(&mut a, &mut b);
        assert_eq!(a.send(&[4]), 0);
        assert!(b.stream.can_read() && !b.stream.is_read_open());
        assert_eq!(b.receive(10), [1, 2, 3]);
        // The other direction is still open.
        assert_eq!(b.send(&[5]), 1);
        carry(&mut b, &mut a);
        assert_eq!(a.receive(10), [5]);
        b.stream.shut(false, true);
        carry(&mut b, &mut a);
        assert_eq!(a.stream.state(), State::Disconnected);
        assert_eq!(b.stream.state(), State::Disconnected);
    }

    #[test]
    fn a_disconnection_ends_both_ends_and_leaves_what_has_come() {
        let (mut a, mut b) = (end(), end());
        a.send(&[1, 2, 3]);
        a.stream.shut(true, true);
        assert!(!a.stream.is_flushed());
        carry(&mut a, &mut b);
        assert!(a.stream.is_flushed());
        assert_eq!(a.stream.state(), State::Disconnected);
        assert_eq!(b.stream.state(), State::Disconnected);
        assert_eq!(b.receive(10), [1, 2, 3]);
        assert!(b.stream.can_read(), "the end of the stream can be read");
    }

    #[test]
    fn an_iomap_takes_a_credit_that_is_given_back() {
        let mut a = end();
        let mut peer = data(&SIZES);
        peer.iomaps = 2;
        peer.credits = 1;
        a.stream = Stream::new(SIZES, Remote { addr: 0, key: 0 }, peer);
        let map = Iomap::default();
        let (write, bytes) = a.stream.plan_iomap(1, map).unwrap();
        assert_eq!(write.message, Some(Message::Iomap(1)));
        // Behind the two entries of the target list, and the first iomap.
        assert_eq!(write.remote.addr, LIST + 32 + 24);
        assert_eq!(bytes.len(), 24);
        assert!(a.stream.plan_iomap(0, map).is_none(), "no credit");
        let mut b = end();
        for _ in 0..8 {
            b.stream.handle_message(Message::Iomap(0));
        }
        // The first control message announces the second half, which is read from the beginning.
        let control = b.stream.poll_control().unwrap();
        assert_eq!(control.message, Message::Credits(8 + 16));
    }
}
