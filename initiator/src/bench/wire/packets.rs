//! Packets of a measurement: commands, data and responses, in the form that RoCEv2 gives them.

use std::net::SocketAddr;

use riser_memory::MemSlice;
use riser_transport::roce::batch::{TxBatch, Way};
use riser_transport::roce::gather::update_icrc;
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, Credit, ExtHeaders, ICRC_LEN, IcrcFlow, Msn, Opcode, Operation,
    Packet, Psn, Qpn, Reth, emit_headers,
};
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Queue pair that the packets name at either end. No device of this host has the socket.
const QPN: Qpn = Qpn::new(0x52_57);

/// Payload of a command in bytes, that of an SRP_CMD with one direct descriptor, padded.
const COMMAND_LEN: usize = 68;
/// Payload of a response in bytes, that of an SRP_RSP, padded.
const RESPONSE_LEN: usize = 40;

/// `RWIR`, first of the payload of commands and responses.
const MAGIC: u32 = 0x5257_4952;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Asks for the responder's cookie.
    Hello = 0,
    /// Asks for data.
    Command = 1,
    /// Brings the cookie, or ends a reply.
    Response = 2,
}

/// Beginning of the payload of a command or response.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Message {
    magic: U32,
    kind: u8,
    /// 1 where ICRCs are made and verified.
    icrc: u8,
    /// Longest payload of a packet of data, in bytes.
    pub(super) mtu: U16,
    /// Number that only a requester knows that receives at its address.
    pub(super) cookie: U64,
    /// Length of the data in bytes.
    pub(super) len: U32,
    /// Run of the requester; replies of an earlier one are late.
    pub(super) epoch: U32,
    /// Number of the command.
    pub(super) seq: U32,
}

const _: () = assert!(size_of::<Message>() <= RESPONSE_LEN);

impl Message {
    pub(super) fn new(kind: Kind, icrc: bool) -> Self {
        Self {
            magic: MAGIC.into(),
            kind: kind as u8,
            icrc: icrc.into(),
            mtu: 0.into(),
            cookie: 0.into(),
            len: 0.into(),
            epoch: 0.into(),
            seq: 0.into(),
        }
    }

    pub(super) fn is(&self, kind: Kind) -> bool {
        self.kind == kind as u8
    }

    /// Returns whether ICRCs are made and verified.
    pub(super) fn has_icrc(&self) -> bool {
        self.icrc != 0
    }

    /// The response to this command.
    pub(super) fn response(mut self) -> Self {
        self.kind = Kind::Response as u8;
        self
    }
}

/// A packet as its receiver sees it.
pub(super) enum Received<'a> {
    /// A command or response.
    Message(Message),
    /// Data, and their place where they are the first of a reply.
    Data(Option<u64>, &'a [u8]),
    /// An acknowledgement.
    Acknowledge,
}

/// Parses a packet. `None` for one that is not of a measurement.
pub(super) fn parse(datagram: &[u8]) -> Option<Received<'_>> {
    let packet = Packet::parse(datagram).ok()?;
    if packet.bth.dest_qpn() != QPN {
        return None;
    }
    match packet.op.operation {
        Operation::Send => {
            let (message, _) = Message::read_from_prefix(packet.payload).ok()?;
            (message.magic.get() == MAGIC).then_some(Received::Message(message))
        }
        Operation::Write => {
            let place = packet.ext.reth.map(|reth| reth.va());
            Some(Received::Data(place, packet.payload))
        }
        Operation::Acknowledge => Some(Received::Acknowledge),
        _ => None,
    }
}

/// Puts packets for one peer into a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    data: Way,
    flow: IcrcFlow,
    psn: Psn,
}

impl Sender {
    /// A sender from `local` to `peer`; `None` where they are not of one address family.
    pub(super) fn new(local: SocketAddr, peer: SocketAddr) -> Option<Self> {
        Some(Self {
            // As the NIC's data: capable of ECN, which the socket sets for all.
            data: Way::to(peer).markable(true),
            flow: IcrcFlow::new(local, peer)?,
            psn: Psn::new(0),
        })
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.data.dst
    }

    fn next_psn(&mut self) -> Psn {
        let psn = self.psn;
        self.psn = psn.next();
        psn
    }

    /// A command.
    pub(super) fn push_command(&mut self, batch: &mut TxBatch, message: &Message) {
        self.push_message(batch, message, COMMAND_LEN);
    }

    /// A response.
    pub(super) fn push_response(&mut self, batch: &mut TxBatch, message: &Message) {
        self.push_message(batch, message, RESPONSE_LEN);
    }

    fn push_message(&mut self, batch: &mut TxBatch, message: &Message, len: usize) {
        let bth = Bth::new(Opcode::RcSendOnly, QPN, self.next_psn());
        let mut packet = emit_headers(&bth, &ExtHeaders::default()).to_vec();
        packet.extend_from_slice(message.as_bytes());
        packet.resize(Bth::LEN + len, 0);
        let total = packet.len() + ICRC_LEN;
        let id = batch.begin(self.data, QPN, total);
        let icrc = self.flow.compute(&packet, id);
        packet.extend_from_slice(&icrc.to_le_bytes());
        batch.push_bytes(&packet);
    }

    /// An acknowledgement, as a target sends one for the commands of a round.
    pub(super) fn push_acknowledge(&mut self, batch: &mut TxBatch) {
        let bth = Bth::new(Opcode::RcAcknowledge, QPN, self.psn);
        let ext = ExtHeaders {
            aeth: Some(Aeth::new(
                AethSyndrome::Ack(Credit::UNLIMITED),
                Msn::new(self.psn.value()),
            )),
            ..ExtHeaders::default()
        };
        let headers = emit_headers(&bth, &ext);
        let way = Way::to(self.peer());
        let id = batch.begin(way, QPN, headers.len() + ICRC_LEN);
        batch.push_bytes(&headers);
        batch.push_bytes(&self.flow.compute(&headers, id).to_le_bytes());
    }

    /// The data of a reply, in packets of `mtu` bytes. Without `icrc` that field is 0.
    pub(super) fn push_data(
        &mut self,
        batch: &mut TxBatch,
        data: &MemSlice,
        va: u64,
        mtu: usize,
        icrc: bool,
    ) {
        let mut at = 0;
        while at < data.len() {
            let payload = mtu.min(data.len() - at);
            let is_last = at + payload == data.len();
            let opcode = match (at == 0, is_last) {
                (true, true) => Opcode::RcWriteOnly,
                (true, false) => Opcode::RcWriteFirst,
                (false, false) => Opcode::RcWriteMiddle,
                (false, true) => Opcode::RcWriteLast,
            };
            let ext = ExtHeaders {
                reth: (at == 0).then(|| Reth::new(va, 1, data.len() as u32)),
                ..ExtHeaders::default()
            };
            let bth = Bth::new(opcode, QPN, self.next_psn()).with_pad_for(payload);
            let headers = emit_headers(&bth, &ext);
            let total = headers.len() + payload + ICRC_LEN;
            let id = batch.begin(self.data, QPN, total);
            let piece = data.slice(at..at + payload).expect("within the data");
            let check = match icrc {
                true => {
                    let mut check = self.flow.start(total as u16, id);
                    check.update_headers(&headers);
                    update_icrc(&mut check, &piece);
                    check.finish_bytes()
                }
                false => [0; ICRC_LEN],
            };
            batch.push_bytes(&headers);
            batch.push_memory(piece);
            batch.push_bytes(&check);
            at += payload;
        }
    }
}
