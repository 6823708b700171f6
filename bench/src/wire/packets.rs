//! RoCEv2 packets used for measurements: commands, data and responses.

use std::net::SocketAddr;

use riser_memory::MemSlice;
use riser_transport::nic::batch::{TxBatch, TxPath};
use riser_transport::roce::gather::update_icrc;
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, Credit, ExtHeaders, ICRC_LEN, IcrcFlow, Msn, Opcode, Operation,
    Packet, Psn, Qpn, Reth, emit_headers,
};
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Queue pair number used in both directions. The socket doesn't belong to any RDMA device on this
/// host.
const QPN: Qpn = Qpn::new(0x52_57);

/// Payload of a command in bytes. This is the padded size of an SRP_CMD with one direct descriptor.
const COMMAND_LEN: usize = 68;
/// Payload of a response in bytes. This is the padded size of an SRP_RSP.
const RESPONSE_LEN: usize = 40;

/// `RWIR`, at the start of commands and responses.
const MAGIC: u32 = 0x5257_4952;

/// Type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Requests the cookie of the responder.
    Hello = 0,
    /// Requests data.
    Command = 1,
    /// Contains the cookie, or completes a command.
    Response = 2,
}

/// Start of the payload for commands and responses.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Message {
    magic: U32,
    kind: u8,
    /// Set to 1 if ICRCs are generated and verified.
    icrc: u8,
    /// Maximum payload of data packets in bytes.
    pub(super) mtu: U16,
    /// Number that proves that the requester can receive packets at its address.
    pub(super) cookie: U64,
    /// Length of the data in bytes.
    pub(super) len: U32,
    /// Used by the requester to ignore responses from previous runs.
    pub(super) epoch: U32,
    /// Sequence number of the command.
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

    /// Returns whether ICRCs are generated and verified.
    pub(super) fn has_icrc(&self) -> bool {
        self.icrc != 0
    }

    /// Returns the response for this command.
    pub(super) fn response(mut self) -> Self {
        self.kind = Kind::Response as u8;
        self
    }
}

/// A received packet.
pub(super) enum Received<'a> {
    /// A command or response.
    Message(Message),
    /// Data. The first packet also contains the address.
    Data(Option<u64>, &'a [u8]),
    /// An acknowledgement.
    Acknowledge,
}

/// Parses a packet. Returns `None` if it doesn't belong to a measurement.
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

/// Adds packets for a peer to a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    data: TxPath,
    flow: IcrcFlow,
    psn: Psn,
}

impl Sender {
    /// Creates a sender from `local` to `peer`. Returns `None` if they use different address
    /// families.
    pub(super) fn new(local: SocketAddr, peer: SocketAddr) -> Option<Self> {
        Some(Self {
            // As in the NIC, data is ECN-capable. The socket sets this for all packets.
            data: TxPath::to(peer).markable(true),
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

    /// Adds a command.
    pub(super) fn push_command(&mut self, batch: &mut TxBatch, message: &Message) {
        self.push_message(batch, message, COMMAND_LEN);
    }

    /// Adds a response.
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

    /// Adds an acknowledgement, as sent by a target for all commands in a round.
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
        let way = TxPath::to(self.peer());
        let id = batch.begin(way, QPN, headers.len() + ICRC_LEN);
        batch.push_bytes(&headers);
        batch.push_bytes(&self.flow.compute(&headers, id).to_le_bytes());
    }

    /// Adds the data of a reply, using packets of `mtu` bytes. If `icrc` is not set, the ICRC is 0.
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
