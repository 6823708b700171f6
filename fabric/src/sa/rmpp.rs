//! Multi-packet transfers (RMPP, IBTA 13.6), for responses that do not fit into one MAD.
//!
//! ```text
//! sender:    segment 1 ──────────▶ (window of one)
//!            ◀──────────── ACK 1, window to 65
//!            segments 2 … 65 ────▶
//!            ◀──────────── ACK 65, window to 129
//!            …
//!            last segment ───────▶
//!            ◀──────────── ACK of it
//! ```
//!
//! A receiver acknowledges segments received in order at the end of its window and at the end of
//! the transfer. A sender retransmits unacknowledged segments a few times. Either side may abort a
//! transfer. An address that has not yet acknowledged anything only receives the first segment, at
//! most four times, so that a forged request cannot be used to amplify traffic to another host.

use std::time::{Duration, Instant};

use riser_transport::wire::Mad;
use riser_transport::wire::mad::{MadHeader, RESPONSE};
use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use super::wire::{
    DATA_LEN, NO_RESPONSE_TIME, RMPP_VERSION, RmppHeader, SA_HEADER_LEN, SaHeader, rmpp_flags,
    rmpp_type,
};

/// Maximum data length of a transfer, in bytes. Both sides reject longer transfers.
pub const MAX_LEN: usize = 64 << 10;

/// Segments received before the receiver must acknowledge them.
const WINDOW: u32 = 64;

/// Time before a sender retransmits, and the maximum number of retransmissions.
const TIMEOUT: Duration = Duration::from_millis(500);
const RETRIES: u8 = 3;

/// Status codes of aborted transfers (IBTA table 33).
pub mod status {
    /// Resources are exhausted.
    pub const NO_RESOURCES: u8 = 1;
    /// Invalid length of the last segment or of the payload.
    pub const BAD_LENGTH: u8 = 119;
    /// The first-segment flag contradicts the segment number.
    pub const BAD_SEGMENT: u8 = 120;
    /// Unknown RMPP type.
    pub const BAD_TYPE: u8 = 121;
    /// Unsupported version.
    pub const BAD_VERSION: u8 = 125;
}

/// State of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Data remains to be acknowledged.
    Going,
    /// All data was acknowledged.
    Done,
    /// The peer aborted the transfer or does not respond.
    Failed,
}

/// Sender of a transfer.
#[derive(Debug)]
pub struct Sender {
    header: SaHeader,
    data: Vec<u8>,
    /// Number of acknowledged segments. Segment numbers start at 1.
    acked: u32,
    /// Last segment within the window.
    window: u32,
    /// Next segment to send.
    next: u32,
    /// Highest segment sent so far.
    sent: u32,
    retries: u8,
    deadline: Instant,
    begun: Instant,
}

impl Sender {
    /// Creates a transfer of at most [`MAX_LEN`] bytes, in MADs with this header.
    #[must_use]
    pub fn new(header: SaHeader, data: Vec<u8>, now: Instant) -> Self {
        debug_assert!(data.len() <= MAX_LEN);
        Self {
            header,
            data,
            acked: 0,
            window: 1,
            next: 1,
            sent: 0,
            retries: 0,
            deadline: now + TIMEOUT,
            begun: now,
        }
    }

    /// Returns the number of segments.
    fn last(&self) -> u32 {
        self.data.len().div_ceil(DATA_LEN).max(1) as u32
    }

    /// Returns the header shared by all segments, apart from the RMPP fields.
    #[must_use]
    pub fn header(&self) -> &SaHeader {
        &self.header
    }

    /// Returns whether no segment has been acknowledged yet.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        self.acked == 0
    }

    /// Returns the start time.
    #[must_use]
    pub fn begun(&self) -> Instant {
        self.begun
    }

    /// Returns the time at which [`Self::handle_timeout`] should be called.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns the next segment within the window.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Mad> {
        let last = self.last();
        if self.next > self.window.min(last) {
            return None;
        }
        let segment = self.next;
        self.next += 1;
        self.sent = self.sent.max(segment);
        self.deadline = now + TIMEOUT;
        let (is_first, is_last) = (segment == 1, segment == last);
        let start = (segment as usize - 1) * DATA_LEN;
        let data = &self.data[start..self.data.len().min(start + DATA_LEN)];
        let in_last = self.data.len() - (last as usize - 1) * DATA_LEN + SA_HEADER_LEN;
        let in_all = self.data.len() + last as usize * SA_HEADER_LEN;
        let mut flags = rmpp_flags::ACTIVE;
        let mut length = 0;
        if is_first {
            flags |= rmpp_flags::FIRST;
            length = in_all;
        }
        if is_last {
            flags |= rmpp_flags::LAST;
            length = in_last;
        }
        let rmpp = RmppHeader {
            version: RMPP_VERSION,
            rmpp_type: rmpp_type::DATA,
            time_and_flags: NO_RESPONSE_TIME | flags,
            status: 0,
            segment: U32::new(segment),
            length_or_window: U32::new(length as u32),
        };
        Some(
            SaHeader {
                rmpp,
                ..self.header
            }
            .emit(data),
        )
    }

    /// Handles a packet from the receiver.
    pub fn handle(&mut self, rmpp: &RmppHeader, now: Instant) -> Progress {
        if rmpp.rmpp_type != rmpp_type::ACK {
            return Progress::Failed;
        }
        let (acked, last) = (rmpp.segment.get(), self.last());
        // ACK of an unsent segment, or a window that ends before the ACK.
        if acked > self.sent || rmpp.length_or_window.get() < acked {
            return Progress::Failed;
        }
        // Stale ACK.
        if acked < self.acked {
            return Progress::Going;
        }
        if acked > self.acked {
            self.retries = 0;
            self.deadline = now + TIMEOUT;
        }
        self.acked = acked;
        self.next = self.next.max(acked + 1);
        self.window = rmpp
            .length_or_window
            .get()
            .min(acked.saturating_add(WINDOW));
        if acked == last {
            return Progress::Done;
        }
        Progress::Going
    }

    /// Retransmits unacknowledged segments once the timer has expired.
    pub fn handle_timeout(&mut self, now: Instant) -> Progress {
        if now < self.deadline {
            return Progress::Going;
        }
        if self.retries == RETRIES {
            return Progress::Failed;
        }
        self.retries += 1;
        self.deadline = now + TIMEOUT;
        self.next = self.acked + 1;
        // The receiver may have lost its window state; one segment triggers another ACK.
        self.window = self.window.max(self.next);
        Progress::Going
    }
}

/// Result of a received segment.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// More segments are expected, with an optional MAD for the sender.
    Going(Option<Mad>),
    /// All segments were received, with the final ACK.
    Done(Mad),
    /// The transfer failed, with an ABORT for the sender unless the sender aborted it.
    Failed(Option<Mad>),
}

/// Receiver of a transfer.
#[derive(Debug, Default)]
pub struct Receiver {
    data: Vec<u8>,
    /// Number of segments received in order.
    arrived: u32,
    /// Last segment within the window.
    window: u32,
}

impl Receiver {
    /// Handles a segment with its header.
    pub fn handle(&mut self, header: &SaHeader, data: &[u8; DATA_LEN]) -> Received {
        let rmpp = &header.rmpp;
        let fail = |status| Received::Failed(Some(reply(header, rmpp_type::ABORT, status, 0, 0)));
        if rmpp.version != RMPP_VERSION {
            return fail(status::BAD_VERSION);
        }
        if matches!(rmpp.rmpp_type, rmpp_type::STOP | rmpp_type::ABORT) {
            return Received::Failed(None);
        }
        if rmpp.rmpp_type != rmpp_type::DATA {
            return fail(status::BAD_TYPE);
        }
        let segment = rmpp.segment.get();
        if rmpp.has(rmpp_flags::FIRST) != (segment == 1) {
            return fail(status::BAD_SEGMENT);
        }
        let expected = self.arrived + 1;
        if segment > expected {
            return Received::Going(None);
        }
        if segment < expected {
            // The previous ACK was lost.
            return Received::Going(Some(self.ack(header)));
        }
        let is_last = rmpp.has(rmpp_flags::LAST);
        let length = rmpp.length_or_window.get() as usize;
        let taken = match length.checked_sub(SA_HEADER_LEN) {
            _ if !is_last => DATA_LEN,
            Some(len) if len <= DATA_LEN => len,
            _ => return fail(status::BAD_LENGTH),
        };
        if self.data.len() + taken > MAX_LEN || segment == 1 && length > MAX_LEN * 2 {
            return fail(status::NO_RESOURCES);
        }
        self.data.extend(&data[..taken]);
        self.arrived = segment;
        if is_last {
            return Received::Done(self.ack(header));
        }
        if segment >= self.window {
            return Received::Going(Some(self.ack(header)));
        }
        Received::Going(None)
    }

    fn ack(&mut self, header: &SaHeader) -> Mad {
        self.window = self.arrived + WINDOW;
        reply(header, rmpp_type::ACK, 0, self.arrived, self.window)
    }

    /// Returns the number of segments received in order. Retransmitted segments do not count as
    /// progress.
    #[must_use]
    pub fn arrived(&self) -> u32 {
        self.arrived
    }

    /// Returns the data after the last segment was received.
    #[must_use]
    pub fn into_data(self) -> Vec<u8> {
        self.data
    }
}

/// A MAD to the other end of the transfer, in the other direction: the response bit of the method is
/// the other one.
fn reply(to: &SaHeader, rmpp_type: u8, status: u8, segment: u32, window: u32) -> Mad {
    const METHOD: usize = 3;
    let mut mad = to.mad;
    mad.as_mut_bytes()[METHOD] ^= RESPONSE;
    let mad = MadHeader::read_from_bytes(mad.as_bytes()).expect("as many bytes");
    let rmpp = RmppHeader {
        version: RMPP_VERSION,
        rmpp_type,
        time_and_flags: NO_RESPONSE_TIME | rmpp_flags::ACTIVE,
        status,
        segment: U32::new(segment),
        length_or_window: U32::new(window),
    };
    SaHeader { mad, rmpp, ..*to }.emit(&[])
}

#[cfg(test)]
mod tests {
    use riser_transport::wire::TransactionId;
    use riser_transport::wire::mad::MadMethod;

    use super::super::wire::attribute;
    use super::*;

    fn header() -> SaHeader {
        let method = MadMethod::GetTableResp;
        SaHeader::new(method, attribute::PATH_RECORD, TransactionId(7), 0)
    }

    fn rmpp(mad: &Mad) -> RmppHeader {
        SaHeader::parse(mad).unwrap().0.rmpp
    }

    /// Runs a transfer that loses the packets with the given numbers. Returns the received data and
    /// the number of packets sent.
    fn carry(len: usize, lost: &[usize]) -> (Vec<u8>, usize) {
        let mut now = Instant::now();
        let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let mut sender = Sender::new(header(), data.clone(), now);
        let mut receiver = Receiver::default();
        let (mut sent, mut is_done) = (0, false);
        for _ in 0..10_000 {
            let Some(mad) = sender.poll_transmit(now) else {
                now = sender.deadline();
                assert_eq!(sender.handle_timeout(now), Progress::Going);
                continue;
            };
            sent += 1;
            if lost.contains(&sent) {
                continue;
            }
            let (header, bytes) = SaHeader::parse(&mad).unwrap();
            let response = match receiver.handle(&header, bytes) {
                Received::Going(response) => response,
                Received::Done(response) => {
                    is_done = true;
                    Some(response)
                }
                Received::Failed(_) => panic!("failed at packet {sent}"),
            };
            if let Some(response) = response
                && sender.handle(&rmpp(&response), now) == Progress::Done
            {
                assert!(is_done);
                assert_eq!(receiver.data, data);
                return (data, sent);
            }
        }
        panic!("no end");
    }

    #[test]
    fn data_arrive_whole_in_windows() {
        for len in [0, 1, 199, 200, 201, 400, 200 * 65, 200 * 65 + 1, MAX_LEN] {
            let (_, sent) = carry(len, &[]);
            assert_eq!(sent, len.div_ceil(200).max(1), "{len}");
        }
    }

    #[test]
    fn lost_segments_are_sent_once_more() {
        for lost in [&[1][..], &[2], &[2, 3], &[30], &[70, 71]] {
            carry(200 * 100, lost);
        }
    }

    #[test]
    fn segment_lengths_match_linux() {
        let now = Instant::now();
        let mut sender = Sender::new(header(), vec![0x5a; 300], now);
        let first = sender.poll_transmit(now).unwrap();
        // Version, type, flags, status; segment 1; 300 bytes and two headers of 20.
        assert_eq!(first[24..36], [1, 1, 0xfb, 0, 0, 0, 0, 1, 0, 0, 1, 0x54]);
        assert_eq!(sender.poll_transmit(now), None);
        let mut receiver = Receiver::default();
        let (parsed, data) = SaHeader::parse(&first).unwrap();
        let Received::Going(Some(ack)) = receiver.handle(&parsed, data) else {
            panic!("no ACK");
        };
        // SubnAdmGetTable() with the response bit inverted, as Linux does.
        assert_eq!(ack[3], 0x12);
        assert_eq!(ack[24..36], [1, 2, 0xf9, 0, 0, 0, 0, 1, 0, 0, 0, 65]);
        assert_eq!(sender.handle(&rmpp(&ack), now), Progress::Going);
        let last = sender.poll_transmit(now).unwrap();
        assert_eq!(last[24..36], [1, 1, 0xfd, 0, 0, 0, 0, 2, 0, 0, 0, 120]);
        let (parsed, data) = SaHeader::parse(&last).unwrap();
        assert!(matches!(receiver.handle(&parsed, data), Received::Done(_)));
        assert_eq!(receiver.into_data(), [0x5a; 300]);
    }

    #[test]
    fn sender_fails_on_timeout_or_invalid_ack() {
        let now = Instant::now();
        let mut sender = Sender::new(header(), vec![0; 1000], now);
        let ack = |segment, window| RmppHeader {
            rmpp_type: rmpp_type::ACK,
            segment: U32::new(segment),
            length_or_window: U32::new(window),
            ..RmppHeader::default()
        };
        sender.poll_transmit(now).unwrap();
        assert_eq!(sender.handle(&ack(2, 64), now), Progress::Failed);
        assert_eq!(sender.handle(&ack(1, 0), now), Progress::Failed);
        assert_eq!(sender.handle(&ack(1, u32::MAX), now), Progress::Going);
        let mut at = now;
        for _ in 0..RETRIES {
            at = sender.deadline();
            assert_eq!(sender.handle_timeout(at), Progress::Going);
            assert!(sender.poll_transmit(at).is_some());
        }
        assert_eq!(sender.handle_timeout(at + TIMEOUT), Progress::Failed);
        let stop = RmppHeader {
            rmpp_type: rmpp_type::STOP,
            ..RmppHeader::default()
        };
        assert_eq!(sender.handle(&stop, now), Progress::Failed);
    }

    #[test]
    fn receiver_rejects_invalid_segments() {
        let segment = |segment: u32, flags: u8, length: u32| SaHeader {
            rmpp: RmppHeader {
                version: 1,
                rmpp_type: rmpp_type::DATA,
                time_and_flags: flags | rmpp_flags::ACTIVE,
                status: 0,
                segment: U32::new(segment),
                length_or_window: U32::new(length),
            },
            ..header()
        };
        let (first, last) = (rmpp_flags::FIRST, rmpp_flags::LAST);
        for (header, status) in [
            (segment(1, 0, 0), 120),
            (segment(2, first, 0), 120),
            (segment(1, first | last, 19), 119),
            (segment(1, first | last, 221), 119),
            (segment(1, first, 1 << 20), 1),
        ] {
            let Received::Failed(Some(mad)) = Receiver::default().handle(&header, &[0; 200]) else {
                panic!("taken: {header:?}");
            };
            assert_eq!(mad[25..28], [4, 0xf9, status]);
        }
        // The transfer must continue.
        let mut receiver = Receiver::default();
        receiver.handle(&segment(1, first, 0), &[0; 200]);
        for number in 2..=MAX_LEN as u32 / 200 {
            let got = receiver.handle(&segment(number, 0, 0), &[0; 200]);
            assert!(!matches!(got, Received::Failed(_)), "{number}");
        }
        let beyond = segment(MAX_LEN as u32 / 200 + 1, 0, 0);
        assert!(matches!(
            receiver.handle(&beyond, &[0; 200]),
            Received::Failed(_)
        ));
    }
}
