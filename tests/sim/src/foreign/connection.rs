//! A connection of iSCSI or iSER to a node of a foreign target.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use riser_transport::verbs::QpId;

use super::Mischief;
use super::pdu::{BHS, IserBuffer, Pdu, header, iser_header, request, response};
use super::rdma::{Remote, Work};
use super::scsi::sense_data;
use super::text::Offer;
use super::unit::{Reply, Write};

/// Phases of a connection that the target distinguishes.
///
/// ```text
/// Login ──▶ Reinstating ──▶ FullFeature ──▶ Closing
///   └──────────────────────────▲
/// ```
#[derive(Debug)]
pub(super) enum State {
    /// No login has completed.
    Login,
    /// The last login response waits until writes of the replaced session have completed.
    Reinstating(Box<Pdu>),
    /// Commands are executed.
    FullFeature,
    /// The connection closes once its output is sent.
    Closing,
}

/// A write that is receiving its data.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) write: Write,
    pub(super) data: Vec<u8>,
    /// Bytes that the command transfers.
    pub(super) expected: usize,
    /// Bytes that came with the command.
    pub(super) immediate: usize,
    /// The initiator's buffer (iSER).
    pub(super) buffer: Option<IserBuffer>,
    /// An R2T has been sent.
    pub(super) is_solicited: bool,
    /// Unsolicited data follow.
    pub(super) awaits_unsolicited: bool,
}

/// Transport of PDUs.
#[derive(Debug)]
pub(super) enum Carrier {
    Tcp {
        stream: UnixStream,
        input: Vec<u8>,
        output: Vec<u8>,
    },
    Iser {
        qp: QpId,
        input: VecDeque<Vec<u8>>,
        output: VecDeque<Work>,
    },
}

impl Carrier {
    pub(super) fn tcp(stream: UnixStream) -> Self {
        let (input, output) = Default::default();
        Self::Tcp {
            stream,
            input,
            output,
        }
    }

    pub(super) fn iser(qp: QpId) -> Self {
        let (input, output) = Default::default();
        Self::Iser { qp, input, output }
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    carrier: Carrier,
    pub(super) state: State,
    pub(super) number: u64,
    pub(super) isid: [u8; 6],
    stat_sn: u32,
    exp_cmd_sn: u32,
    /// Commands that the target accepts at once.
    window: u32,
    pub(super) offer: Offer,
    pub(super) gathering: BTreeMap<[u8; 4], Gathering>,
    /// Buffers of commands that read (iSER).
    buffers: BTreeMap<[u8; 4], IserBuffer>,
    /// Remaining text of a response to SendTargets.
    listing: Vec<u8>,
    /// A login response has declared the portal group.
    pub(super) has_declared_group: bool,
    pub(super) is_eof: bool,
}

impl Connection {
    pub(super) fn new(carrier: Carrier, number: u64, window: u16) -> Self {
        Self {
            carrier,
            state: State::Login,
            number,
            isid: [0; 6],
            stat_sn: 1,
            exp_cmd_sn: 1,
            window: window.into(),
            offer: Offer::default(),
            gathering: BTreeMap::new(),
            buffers: BTreeMap::new(),
            listing: Vec::new(),
            has_declared_group: false,
            is_eof: false,
        }
    }

    /// Queue pair of the connection (iSER).
    pub(super) fn qp(&self) -> Option<QpId> {
        match self.carrier {
            Carrier::Tcp { .. } => None,
            Carrier::Iser { qp, .. } => Some(qp),
        }
    }

    /// Receives available bytes; returns whether there were any. Once the initiator has closed the
    /// connection, its kernel has reset it, and unprocessed bytes are discarded.
    pub(super) fn receive(&mut self) -> bool {
        let Carrier::Tcp { stream, input, .. } = &mut self.carrier else {
            return false;
        };
        let mut scratch = [0; 16 << 10];
        let mut has_moved = false;
        while !self.is_eof {
            match stream.read(&mut scratch) {
                Ok(0) => self.is_eof = true,
                Ok(len) => input.extend_from_slice(&scratch[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.is_eof = true,
            }
            has_moved = true;
        }
        if self.is_eof {
            input.clear();
        }
        has_moved
    }

    /// Receives a message of iSER.
    pub(super) fn receive_message(&mut self, message: Vec<u8>) {
        if let Carrier::Iser { input, .. } = &mut self.carrier {
            input.push_back(message);
        }
    }

    /// Returns the next received PDU.
    pub(super) fn next_pdu(&mut self) -> Option<Pdu> {
        let pdu = match &mut self.carrier {
            Carrier::Tcp { input, .. } => Pdu::split(input)?,
            Carrier::Iser { input, .. } => Pdu::of_message(&input.pop_front()?)?,
        };
        if !pdu.is_immediate() && pdu.opcode() != request::DATA_OUT {
            self.exp_cmd_sn = pdu.word(24).wrapping_add(1);
        }
        if let Some(buffer) = pdu.read_buffer {
            self.buffers.insert(pdu.itt(), buffer);
        }
        Some(pdu)
    }

    /// Initializes the sequence numbers from a login request.
    pub(super) fn begin_numbers(&mut self, request: &Pdu) {
        self.exp_cmd_sn = request.word(24);
    }

    /// Sends buffered output over TCP; returns whether any byte was sent.
    pub(super) fn send(&mut self) -> bool {
        let Carrier::Tcp { stream, output, .. } = &mut self.carrier else {
            return false;
        };
        let mut has_moved = false;
        while !output.is_empty() {
            match stream.write(output) {
                Ok(len) => drop(output.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.is_eof = true;
                    output.clear();
                }
            }
            has_moved = true;
        }
        has_moved
    }

    /// Returns the next work request (iSER).
    pub(super) fn next_work(&mut self) -> Option<Work> {
        match &mut self.carrier {
            Carrier::Tcp { .. } => None,
            Carrier::Iser { output, .. } => output.pop_front(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let is_sent = match &self.carrier {
            Carrier::Tcp { output, .. } => output.is_empty(),
            Carrier::Iser { output, .. } => output.is_empty(),
        };
        self.is_eof || matches!(self.state, State::Closing) && is_sent
    }

    /// Queues a PDU that carries a status number.
    pub(super) fn push(&mut self, bhs: [u8; BHS], data: &[u8]) {
        self.queue(bhs, data);
        self.stat_sn = self.stat_sn.wrapping_add(1);
    }

    /// Queues a PDU without a status number: Data-In and R2T.
    fn queue(&mut self, mut bhs: [u8; BHS], data: &[u8]) {
        bhs[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
        bhs[24..28].copy_from_slice(&self.stat_sn.to_be_bytes());
        bhs[28..32].copy_from_slice(&self.exp_cmd_sn.to_be_bytes());
        let max_cmd_sn = self.exp_cmd_sn.wrapping_add(self.window).wrapping_sub(1);
        bhs[32..36].copy_from_slice(&max_cmd_sn.to_be_bytes());
        let put = |output: &mut Vec<u8>| {
            output.extend_from_slice(&bhs);
            output.extend_from_slice(data);
            output.resize(
                output.len() + data.len().next_multiple_of(4) - data.len(),
                0,
            );
        };
        match &mut self.carrier {
            Carrier::Tcp { output, .. } => put(output),
            Carrier::Iser { output, .. } => {
                let mut message = iser_header().to_vec();
                put(&mut message);
                output.push_back(Work::Send(message));
            }
        }
    }

    /// Queues the data of a command that reads: as PDUs that the initiator can receive, or as an
    /// RDMA WRITE to its buffer.
    fn push_data(&mut self, itt: [u8; 4], data: &[u8]) {
        if let Carrier::Iser { output, .. } = &mut self.carrier {
            if let Some(buffer) = self.buffers.get(&itt) {
                output.push_back(Work::Write(buffer.at(0), data.to_vec()));
            }
            return;
        }
        let most = self.offer.max_recv.unwrap_or(8192).max(4);
        let pieces = data.chunks(most).count();
        for (number, piece) in data.chunks(most).enumerate() {
            let mut bhs = header(response::DATA_IN, itt);
            bhs[1] = if number + 1 == pieces { 0x80 } else { 0 };
            bhs[20..24].fill(0xff);
            bhs[36..40].copy_from_slice(&(number as u32).to_be_bytes());
            bhs[40..44].copy_from_slice(&((number * most) as u32).to_be_bytes());
            self.queue(bhs, piece);
        }
    }

    /// Queues the data and the SCSI Response of a command.
    pub(super) fn push_reply(&mut self, itt: [u8; 4], reply: &Reply, mischief: Option<Mischief>) {
        const TARGET_FAILURE: u8 = 1;
        if !reply.data.is_empty() {
            self.push_data(itt, &reply.data);
        }
        self.buffers.remove(&itt);
        let mut bhs = header(response::SCSI_RESPONSE, itt);
        let residual = reply.residual;
        let (over, under, at) = match residual.is_reverse {
            false => (0x04, 0x02, 44),
            true => (0x10, 0x08, 40),
        };
        bhs[1] |= if residual.over { over } else { 0 };
        bhs[1] |= if residual.under { under } else { 0 };
        bhs[at..at + 4].copy_from_slice(&residual.count.to_be_bytes());
        bhs[2] = if reply.is_failure { TARGET_FAILURE } else { 0 };
        bhs[3] = reply.status;
        let segment = reply.sense.map(|sense| {
            let sense = sense_data(sense);
            [&(sense.len() as u16).to_be_bytes()[..], &sense].concat()
        });
        let segment = segment.unwrap_or_default();
        match mischief {
            None => {}
            Some(Mischief::SkipNumbers) => self.stat_sn = self.stat_sn.wrapping_add(3),
            Some(Mischief::Repeat) => self.push(bhs, &segment),
            Some(Mischief::Unknown(bits)) => {
                let mut other = bhs;
                let tag = u32::from_be_bytes(itt) ^ (bits as u32 | 1 << 20);
                other[16..20].copy_from_slice(&tag.to_be_bytes());
                self.push(other, &segment);
            }
        }
        self.push(bhs, &segment);
    }

    /// Requests a logout by an asynchronous message.
    pub(super) fn request_logout(&mut self) {
        const LOGOUT_REQUESTED: u8 = 1;
        if matches!(self.state, State::FullFeature) {
            let mut bhs = header(response::ASYNC, [0xff; 4]);
            bhs[36] = LOGOUT_REQUESTED;
            // Time for the logout, in seconds.
            bhs[43] = 5;
            self.push(bhs, &[]);
        }
    }

    /// Requests missing data of a write: by an R2T, or by an RDMA READ of the initiator's buffer.
    pub(super) fn request_data(&mut self, itt: [u8; 4]) {
        let max_burst = self.offer.max_burst.unwrap_or(262_144);
        let Some(write) = self.gathering.get_mut(&itt) else {
            return;
        };
        write.is_solicited = true;
        let from = write.data.len();
        let len = (write.expected - from).min(max_burst);
        if let Carrier::Iser { output, .. } = &mut self.carrier {
            // The initiator advertises its buffer from the end of the immediate data on.
            if let Some(buffer) = write.buffer {
                let remote = buffer.at(from - write.immediate);
                let token = u32::from_be_bytes(itt).into();
                output.push_back(Work::Read(remote, write.expected - from, token));
            }
            return;
        }
        let mut bhs = header(response::R2T, itt);
        bhs[20..24].copy_from_slice(&itt);
        bhs[40..44].copy_from_slice(&(from as u32).to_be_bytes());
        bhs[44..48].copy_from_slice(&(len as u32).to_be_bytes());
        self.queue(bhs, &[]);
    }

    /// Queues a text response, with as much of the listing as the initiator can receive at once.
    pub(super) fn push_text(&mut self, itt: [u8; 4], begins: Option<Vec<u8>>) {
        const CONTINUES: u8 = 0x40;
        if let Some(listing) = begins {
            self.listing = listing;
        }
        let most = self.offer.max_recv.unwrap_or(8192).max(4);
        let rest = self.listing.split_off(most.min(self.listing.len()));
        let part = std::mem::replace(&mut self.listing, rest);
        let mut bhs = header(response::TEXT, itt);
        bhs[20..24].fill(0xff);
        if !self.listing.is_empty() {
            bhs[1] = CONTINUES;
            bhs[20..24].copy_from_slice(&[0, 0, 0, 1]);
        }
        self.push(bhs, &part);
    }
}

impl IserBuffer {
    /// The remaining buffer from an offset on.
    fn at(self, offset: usize) -> Remote {
        Remote {
            addr: self.base + offset as u64,
            key: self.stag,
        }
    }
}
