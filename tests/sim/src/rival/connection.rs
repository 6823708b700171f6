//! An iSCSI/TCP connection: its login, and PDUs to and from a nonblocking stream.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::time::Instant;

use riser_scsi::iscsi::frame::{self, Digests, Framer};
use riser_scsi::iscsi::login::{InitiatorConfig, InitiatorLogin, LoginStep, SessionParams};
use riser_scsi::iscsi::pdu::FromTarget;
use riser_scsi::iscsi::{BHS_LEN, Itt, Numbers, StatSn, Tsih};

use crate::stream::Stream;

/// MaxRecvDataSegmentLength in bytes.
pub(crate) const MAX_RECV: u32 = 1 << 20;

/// An event of a connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// The login was successful.
    Ready(Tsih, SessionParams),
    /// A PDU was received in full feature phase, with its data.
    Pdu(FromTarget, Numbers, Vec<u8>),
    /// The target has rejected the login or closed the connection.
    Ended,
    /// The target has violated the protocol.
    Fault(String),
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    login: Option<InitiatorLogin>,
    framer: Framer,
    arrived: Vec<u8>,
    scratch: Vec<u8>,
    /// Encoded PDUs, each with the earliest time when it may be sent.
    leaving: VecDeque<(Instant, Vec<u8>)>,
    digests: Digests,
    /// MaxRecvDataSegmentLength of the target in bytes.
    pub(crate) max_send: u32,
    exp_stat_sn: StatSn,
    is_ended: bool,
    /// The end of the connection was reported, which is the last event.
    is_reported: bool,
    /// No more events are reported.
    is_retired: bool,
    /// The stream doesn't accept more data.
    is_blocked: bool,
    /// The stream is not read.
    pub(crate) is_deaf: bool,
    pub(crate) last_received: Instant,
}

impl Connection {
    /// Creates a connection that will log in.
    pub(crate) fn new(
        stream: Stream,
        config: InitiatorConfig,
        random: [u8; 33],
        now: Instant,
    ) -> Self {
        Self {
            stream,
            login: Some(InitiatorLogin::new(config, random)),
            framer: Framer::new(MAX_RECV),
            arrived: Vec::new(),
            scratch: vec![0; 16 << 10],
            is_blocked: false,
            is_deaf: false,
            leaving: VecDeque::new(),
            digests: Digests::default(),
            max_send: 8192,
            exp_stat_sn: StatSn(0),
            is_ended: false,
            is_reported: false,
            is_retired: false,
            last_received: now,
        }
    }

    /// Returns whether the login is complete.
    pub(crate) fn is_ready(&self) -> bool {
        self.login.is_none() && !self.is_retired
    }

    /// Returns whether no PDU was received since then on an open connection.
    pub(crate) fn is_silent_since(&self, then: Instant) -> bool {
        !self.is_retired && self.last_received < then
    }

    /// Closes the connection immediately, without sending the remaining data.
    pub(crate) fn retire(&mut self) {
        (self.is_ended, self.is_retired) = (true, true);
        self.leaving.clear();
        self.arrived.clear();
        self.stream.close();
    }

    /// Returns ExpStatSN, to acknowledge received statuses.
    pub(crate) fn exp_stat_sn(&self) -> StatSn {
        self.exp_stat_sn
    }

    /// Sends a PDU, but not before this time and not before earlier PDUs.
    pub(crate) fn send(&mut self, at: Instant, bhs: [u8; BHS_LEN], data: &[u8]) {
        let mut bytes = Vec::new();
        frame::put_pdu(bhs, &[], data, self.digests, &mut bytes);
        self.leaving.push_back((at, bytes));
    }

    /// Closes the stream.
    pub(crate) fn close(&mut self) {
        self.stream.close();
        self.is_ended = true;
    }

    /// Sends data that is corrupted in transit, if this can be detected by a digest.
    pub(crate) fn send_spoilt(&mut self, at: Instant, bhs: [u8; BHS_LEN], data: &[u8]) {
        self.send(at, bhs, data);
        if self.digests.data
            && !data.is_empty()
            && let Some((_, bytes)) = self.leaving.back_mut()
        {
            // The last byte before padding and digest.
            let last = bytes.len() - 5 - frame::padding(data.len());
            bytes[last] ^= 1;
        }
    }

    /// Returns the earliest time when the next PDU may be sent.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let next = self.leaving.front().map(|(at, _)| *at);
        next.filter(|_| !self.is_blocked)
    }

    /// Sends and receives data. Returns whether there was any.
    pub(crate) fn step(&mut self, now: Instant) -> bool {
        if self.is_retired {
            return false;
        }
        if let Some((request, text)) = self.login.as_mut().and_then(InitiatorLogin::poll_request) {
            self.send(now, request.header(), &text);
        }
        let mut moved = 0;
        self.is_blocked = false;
        while let Some((at, bytes)) = self.leaving.front_mut()
            && *at <= now
            && !self.is_ended
        {
            match self.stream.write(bytes) {
                Ok(len) => {
                    moved += len;
                    bytes.drain(..len);
                    if bytes.is_empty() {
                        self.leaving.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.is_blocked = true;
                    break;
                }
                Err(_) => self.is_ended = true,
            }
        }
        while !self.is_ended && !self.is_deaf {
            match self.stream.read(&mut self.scratch) {
                Ok(0) => self.is_ended = true,
                Ok(len) => {
                    moved += len;
                    self.last_received = now;
                    self.arrived.extend_from_slice(&self.scratch[..len]);
                    if len < self.scratch.len() {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.is_ended = true,
            }
        }
        moved > 0
    }

    /// Returns the next event. [`Event::Ended`] or [`Event::Fault`] is the last one, so a user that
    /// keeps polling does not receive it again.
    pub(crate) fn poll(&mut self) -> Option<Event> {
        if self.is_retired || self.is_reported {
            return None;
        }
        let event = self.next_event();
        self.is_reported = matches!(event, Some(Event::Ended | Event::Fault(_)));
        event
    }

    fn next_event(&mut self) -> Option<Event> {
        loop {
            let framed = self.framer.next(&self.arrived).map(|(used, frame)| {
                let pdu = frame.map(|frame| {
                    let parsed = FromTarget::parse(&frame);
                    (parsed, frame.is_intact, frame.data.to_vec())
                });
                (used, pdu)
            });
            let (used, pdu) = match framed {
                Ok(framed) => framed,
                Err(error) => return Some(Event::Fault(error.to_string())),
            };
            self.arrived.drain(..used);
            let Some((parsed, is_intact, data)) = pdu else {
                return self.is_ended.then_some(Event::Ended);
            };
            let (pdu, numbers) = match parsed {
                Ok(parsed) if is_intact => parsed,
                Ok(_) => return Some(Event::Fault("a data digest is wrong".into())),
                Err(error) => return Some(Event::Fault(error.to_string())),
            };
            if counts(&pdu) {
                self.exp_stat_sn = numbers.stat_sn.next();
            }
            match self.login.take() {
                None => return Some(Event::Pdu(pdu, numbers, data)),
                Some(login) => {
                    if let Some(event) = self.continue_login(login, &pdu, &data) {
                        return Some(event);
                    }
                }
            }
        }
    }

    /// Continues the login.
    fn continue_login(
        &mut self,
        mut login: InitiatorLogin,
        pdu: &FromTarget,
        data: &[u8],
    ) -> Option<Event> {
        let FromTarget::LoginResponse(response) = pdu else {
            return Some(Event::Fault(format!("{pdu:?} in a login")));
        };
        match login.handle_response(response, data) {
            Ok(LoginStep::Send) => {
                self.login = Some(login);
                None
            }
            Ok(LoginStep::FullFeature {
                tsih,
                session,
                connection,
                ..
            }) => {
                self.digests = connection.digests;
                self.max_send = connection.max_send_segment;
                self.framer.set(MAX_RECV, connection.digests);
                Some(Event::Ready(tsih, session))
            }
            Ok(LoginStep::Redirect { .. }) => Some(Event::Fault("sent elsewhere".into())),
            Err(_) => {
                // The login was not complete.
                self.retire();
                Some(Event::Ended)
            }
        }
    }
}

/// Returns whether a PDU has a StatSN of its connection (RFC 7143 11.4.8, 11.19.3).
fn counts(pdu: &FromTarget) -> bool {
    match pdu {
        FromTarget::DataIn(data) => data.status.is_some(),
        FromTarget::NopIn(ping) => ping.itt != Itt::NONE,
        FromTarget::R2t(_) => false,
        _ => true,
    }
}
