//! The opcode table (IBTA 9.2.1, table 38), used by the parser, emitter, requester and responder to
//! determine the header layout and to validate packets.
//!
//! We support reliable connected, unreliable connected, unreliable datagram, extended reliable
//! connected (annex A14) and the RoCEv2 congestion notification. Reliable datagram is not
//! supported, so its opcodes are treated as unknown.

use super::ext::{Aeth, AtomicAckEth, AtomicEth, Deth, Ieth, ImmDt, Reth, XrcEth};

/// Transport service of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection (RC) service.
    Rc,
    /// Unreliable connection (UC) service.
    Uc,
    /// Unreliable datagram (UD) service.
    Ud,
    /// Extended reliable connection (XRC) service.
    Xrc,
}

impl Service {
    /// Returns the top three bits used for opcodes of this service (IBTA 9.2.1, table 37).
    const fn opcode_bits(self) -> u8 {
        match self {
            Self::Rc => 0x00,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
            Self::Xrc => 0xa0,
        }
    }
}

/// Operation a packet belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// SEND, with or without immediate data or invalidation.
    Send,
    /// RDMA WRITE, with or without immediate data.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// ACK or NAK.
    Acknowledge,
    /// Atomic response.
    AtomicAck,
    /// Atomic compare-and-swap request.
    CmpSwap,
    /// Atomic fetch-and-add request.
    FetchAdd,
    /// Congestion notification (annex A17).
    CongestionNotification,
}

/// Packet position in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Position {
    /// First packet of a multi-packet message.
    First,
    /// Neither first nor last packet.
    Middle,
    /// Last packet of a multi-packet message.
    Last,
    /// Single packet of a message.
    Only,
}

impl Position {
    /// Returns whether this is the first packet of a message.
    #[must_use]
    pub const fn is_start(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Returns true if this is the last packet of a message.
    #[must_use]
    pub const fn is_end(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// Extended header type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtHeader {
    /// Datagram extended transport header: [`Deth`].
    Deth,
    /// RDMA extended transport header: [`Reth`].
    Reth,
    /// Atomic extended transport header: [`AtomicEth`].
    AtomicEth,
    /// ACK extended transport header: [`Aeth`].
    Aeth,
    /// Atomic ACK extended transport header: [`AtomicAckEth`].
    AtomicAckEth,
    /// Immediate extended transport header: [`ImmDt`].
    ImmDt,
    /// Invalidate extended transport header: [`Ieth`].
    Ieth,
    /// XRC extended transport header: [`XrcEth`].
    XrcEth,
    /// Sixteen reserved bytes, set to zero and ignored on receive.
    Reserved,
}

/// Size of the reserved field in a congestion notification.
pub const RESERVED_LEN: usize = 16;

impl ExtHeader {
    /// Returns the header size in bytes.
    #[must_use]
    pub const fn wire_len(self) -> usize {
        match self {
            Self::Deth => size_of::<Deth>(),
            Self::Reth => size_of::<Reth>(),
            Self::AtomicEth => size_of::<AtomicEth>(),
            Self::Aeth => size_of::<Aeth>(),
            Self::AtomicAckEth => size_of::<AtomicAckEth>(),
            Self::ImmDt => size_of::<ImmDt>(),
            Self::Ieth => size_of::<Ieth>(),
            Self::XrcEth => size_of::<XrcEth>(),
            Self::Reserved => RESERVED_LEN,
        }
    }
}

/// Valid payload sizes for a packet (IBTA 9.7.4.1.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PayloadRule {
    /// No payload.
    Empty,
    /// Exactly the path MTU, for first and middle packets.
    ExactlyMtu,
    /// One byte up to the path MTU, for last packets.
    OneToMtu,
    /// Zero bytes up to the path MTU, for single packets.
    ZeroToMtu,
}

impl PayloadRule {
    /// Returns whether a payload of `len` bytes is valid for this path MTU.
    #[must_use]
    pub const fn allows(self, len: usize, mtu: usize) -> bool {
        match self {
            Self::Empty => len == 0,
            Self::ExactlyMtu => len == mtu,
            Self::OneToMtu => len >= 1 && len <= mtu,
            Self::ZeroToMtu => len <= mtu,
        }
    }
}

/// Row in the opcode table.
#[derive(Debug, PartialEq, Eq)]
pub struct OpcodeInfo {
    /// Opcode.
    pub opcode: Opcode,
    /// Transport service.
    pub service: Service,
    /// Operation the packet belongs to.
    pub operation: Operation,
    /// Packet position in its message.
    pub position: Position,
    /// Extended headers following the BTH, in order.
    pub headers: &'static [ExtHeader],
    /// Total size of the extended headers in bytes.
    pub ext_len: usize,
    /// Valid payload sizes.
    pub payload: PayloadRule,
}

impl OpcodeInfo {
    /// Returns true if this packet is sent by the responder.
    #[must_use]
    pub const fn is_response(&self) -> bool {
        matches!(
            self.operation,
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAck
        )
    }

    /// Returns whether this packet is sent by the requester.
    #[must_use]
    pub const fn is_request(&self) -> bool {
        !self.is_response() && !matches!(self.operation, Operation::CongestionNotification)
    }

    /// Returns true if this packet contains `header`.
    #[must_use]
    pub const fn has(&self, header: ExtHeader) -> bool {
        let mut i = 0;
        while i < self.headers.len() {
            if self.headers[i] as u8 == header as u8 {
                return true;
            }
            i += 1;
        }
        false
    }

    /// Returns whether this packet contains immediate data.
    #[must_use]
    pub const fn has_imm(&self) -> bool {
        self.has(ExtHeader::ImmDt)
    }

    /// Returns true if this packet contains a request to invalidate an R_Key.
    #[must_use]
    pub const fn has_ieth(&self) -> bool {
        self.has(ExtHeader::Ieth)
    }

    /// Returns whether this packet consumes a receive work request when the message completes, as
    /// for a SEND or an RDMA WRITE with immediate data.
    #[must_use]
    pub const fn consumes_receive(&self) -> bool {
        matches!(self.operation, Operation::Send) || self.has_imm()
    }
}

/// Maximum size of the extended headers in bytes: an XRCETH and an AtomicETH.
pub const MAX_EXT_LEN: usize = size_of::<XrcEth>() + size_of::<AtomicEth>();

const fn ext_len(headers: &[ExtHeader]) -> usize {
    let mut len = 0;
    let mut i = 0;
    while i < headers.len() {
        len += headers[i].wire_len();
        i += 1;
    }
    len
}

/// Generates the enum, the table and the lookup function from a single list.
macro_rules! opcodes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $service:ident $operation:ident $position:ident [$($header:ident)*] $payload:ident;)*) => {
        /// Opcode in the table. The value is the wire code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Opcode {
            $($(#[$doc])* $name = $code,)*
        }

        /// All rows, ordered by opcode.
        pub static OPCODES: &[OpcodeInfo] = &[$(OpcodeInfo {
            opcode: Opcode::$name,
            service: Service::$service,
            operation: Operation::$operation,
            position: Position::$position,
            headers: &[$(ExtHeader::$header),*],
            ext_len: ext_len(&[$(ExtHeader::$header),*]),
            payload: PayloadRule::$payload,
        }),*];
    };
}

opcodes! {
    /// First packet of a SEND.
    RcSendFirst = 0x00, Rc Send First [] ExactlyMtu;
    /// Middle packet of a SEND.
    RcSendMiddle = 0x01, Rc Send Middle [] ExactlyMtu;
    /// Last packet of a SEND.
    RcSendLast = 0x02, Rc Send Last [] OneToMtu;
    /// Last packet of a SEND with immediate data.
    RcSendLastImm = 0x03, Rc Send Last [ImmDt] OneToMtu;
    /// Single-packet SEND.
    RcSendOnly = 0x04, Rc Send Only [] ZeroToMtu;
    /// Single-packet SEND with immediate data.
    RcSendOnlyImm = 0x05, Rc Send Only [ImmDt] ZeroToMtu;
    /// First packet of an RDMA WRITE.
    RcWriteFirst = 0x06, Rc Write First [Reth] ExactlyMtu;
    /// Middle packet of an RDMA WRITE.
    RcWriteMiddle = 0x07, Rc Write Middle [] ExactlyMtu;
    /// Last packet of an RDMA WRITE.
    RcWriteLast = 0x08, Rc Write Last [] OneToMtu;
    /// Last packet of an RDMA WRITE with immediate data.
    RcWriteLastImm = 0x09, Rc Write Last [ImmDt] OneToMtu;
    /// Single-packet RDMA WRITE.
    RcWriteOnly = 0x0a, Rc Write Only [Reth] ZeroToMtu;
    /// Single-packet RDMA WRITE with immediate data.
    RcWriteOnlyImm = 0x0b, Rc Write Only [Reth ImmDt] ZeroToMtu;
    /// RDMA READ request.
    RcReadRequest = 0x0c, Rc ReadRequest Only [Reth] Empty;
    /// First packet of an RDMA READ response.
    RcReadResponseFirst = 0x0d, Rc ReadResponse First [Aeth] ExactlyMtu;
    /// Middle packet of an RDMA READ response.
    RcReadResponseMiddle = 0x0e, Rc ReadResponse Middle [] ExactlyMtu;
    /// Last packet of an RDMA READ response.
    RcReadResponseLast = 0x0f, Rc ReadResponse Last [Aeth] OneToMtu;
    /// Single-packet RDMA READ response.
    RcReadResponseOnly = 0x10, Rc ReadResponse Only [Aeth] ZeroToMtu;
    /// ACK or NAK for requests.
    RcAcknowledge = 0x11, Rc Acknowledge Only [Aeth] Empty;
    /// Atomic response.
    RcAtomicAcknowledge = 0x12, Rc AtomicAck Only [Aeth AtomicAckEth] Empty;
    /// Atomic compare-and-swap request.
    RcCmpSwap = 0x13, Rc CmpSwap Only [AtomicEth] Empty;
    /// Atomic fetch-and-add request.
    RcFetchAdd = 0x14, Rc FetchAdd Only [AtomicEth] Empty;
    /// Last packet of a SEND with invalidate.
    RcSendLastInvalidate = 0x16, Rc Send Last [Ieth] OneToMtu;
    /// Single-packet SEND with invalidate.
    RcSendOnlyInvalidate = 0x17, Rc Send Only [Ieth] ZeroToMtu;
    /// First packet of a UC SEND.
    UcSendFirst = 0x20, Uc Send First [] ExactlyMtu;
    /// Middle packet of a UC SEND.
    UcSendMiddle = 0x21, Uc Send Middle [] ExactlyMtu;
    /// Last packet of a UC SEND.
    UcSendLast = 0x22, Uc Send Last [] OneToMtu;
    /// Last packet of a UC SEND with immediate data.
    UcSendLastImm = 0x23, Uc Send Last [ImmDt] OneToMtu;
    /// Single-packet UC SEND.
    UcSendOnly = 0x24, Uc Send Only [] ZeroToMtu;
    /// Single-packet UC SEND with immediate data.
    UcSendOnlyImm = 0x25, Uc Send Only [ImmDt] ZeroToMtu;
    /// First packet of a UC RDMA WRITE.
    UcWriteFirst = 0x26, Uc Write First [Reth] ExactlyMtu;
    /// Middle packet of a UC RDMA WRITE.
    UcWriteMiddle = 0x27, Uc Write Middle [] ExactlyMtu;
    /// Last packet of a UC RDMA WRITE.
    UcWriteLast = 0x28, Uc Write Last [] OneToMtu;
    /// Last packet of a UC RDMA WRITE with immediate data.
    UcWriteLastImm = 0x29, Uc Write Last [ImmDt] OneToMtu;
    /// Single-packet UC RDMA WRITE.
    UcWriteOnly = 0x2a, Uc Write Only [Reth] ZeroToMtu;
    /// Single-packet UC RDMA WRITE with immediate data.
    UcWriteOnlyImm = 0x2b, Uc Write Only [Reth ImmDt] ZeroToMtu;
    /// Datagram.
    UdSendOnly = 0x64, Ud Send Only [Deth] ZeroToMtu;
    /// Datagram with immediate data.
    UdSendOnlyImm = 0x65, Ud Send Only [Deth ImmDt] ZeroToMtu;
    /// Congestion notification (annex A17.9.3). This uses a separate opcode space but refers to a
    /// connection.
    Cnp = 0x81, Rc CongestionNotification Only [Reserved] Empty;
    /// First packet of an XRC SEND.
    XrcSendFirst = 0xa0, Xrc Send First [XrcEth] ExactlyMtu;
    /// Middle packet of an XRC SEND.
    XrcSendMiddle = 0xa1, Xrc Send Middle [XrcEth] ExactlyMtu;
    /// Last packet of an XRC SEND.
    XrcSendLast = 0xa2, Xrc Send Last [XrcEth] OneToMtu;
    /// Last packet of an XRC SEND with immediate data.
    XrcSendLastImm = 0xa3, Xrc Send Last [XrcEth ImmDt] OneToMtu;
    /// Single-packet XRC SEND.
    XrcSendOnly = 0xa4, Xrc Send Only [XrcEth] ZeroToMtu;
    /// Single-packet XRC SEND with immediate data.
    XrcSendOnlyImm = 0xa5, Xrc Send Only [XrcEth ImmDt] ZeroToMtu;
    /// First packet of an XRC RDMA WRITE.
    XrcWriteFirst = 0xa6, Xrc Write First [XrcEth Reth] ExactlyMtu;
    /// Middle packet of an XRC RDMA WRITE.
    XrcWriteMiddle = 0xa7, Xrc Write Middle [XrcEth] ExactlyMtu;
    /// Last packet of an XRC RDMA WRITE.
    XrcWriteLast = 0xa8, Xrc Write Last [XrcEth] OneToMtu;
    /// Last packet of an XRC RDMA WRITE with immediate data.
    XrcWriteLastImm = 0xa9, Xrc Write Last [XrcEth ImmDt] OneToMtu;
    /// Single-packet XRC RDMA WRITE.
    XrcWriteOnly = 0xaa, Xrc Write Only [XrcEth Reth] ZeroToMtu;
    /// Single-packet XRC RDMA WRITE with immediate data.
    XrcWriteOnlyImm = 0xab, Xrc Write Only [XrcEth Reth ImmDt] ZeroToMtu;
    /// XRC RDMA READ request.
    XrcReadRequest = 0xac, Xrc ReadRequest Only [XrcEth Reth] Empty;
    /// First packet of an XRC RDMA READ response.
    XrcReadResponseFirst = 0xad, Xrc ReadResponse First [Aeth] ExactlyMtu;
    /// Middle packet of an XRC RDMA READ response.
    XrcReadResponseMiddle = 0xae, Xrc ReadResponse Middle [] ExactlyMtu;
    /// Last packet of an XRC RDMA READ response.
    XrcReadResponseLast = 0xaf, Xrc ReadResponse Last [Aeth] OneToMtu;
    /// Single-packet XRC RDMA READ response.
    XrcReadResponseOnly = 0xb0, Xrc ReadResponse Only [Aeth] ZeroToMtu;
    /// ACK or NAK for XRC requests.
    XrcAcknowledge = 0xb1, Xrc Acknowledge Only [Aeth] Empty;
    /// XRC atomic response.
    XrcAtomicAcknowledge = 0xb2, Xrc AtomicAck Only [Aeth AtomicAckEth] Empty;
    /// XRC atomic compare-and-swap request.
    XrcCmpSwap = 0xb3, Xrc CmpSwap Only [XrcEth AtomicEth] Empty;
    /// XRC atomic fetch-and-add request.
    XrcFetchAdd = 0xb4, Xrc FetchAdd Only [XrcEth AtomicEth] Empty;
    /// Last packet of an XRC SEND with invalidate.
    XrcSendLastInvalidate = 0xb6, Xrc Send Last [XrcEth Ieth] OneToMtu;
    /// Single-packet XRC SEND with invalidate.
    XrcSendOnlyInvalidate = 0xb7, Xrc Send Only [XrcEth Ieth] ZeroToMtu;
}

const UNKNOWN: u8 = 0xff;

/// Maps each code to its row in [`OPCODES`], or to [`UNKNOWN`].
static ROWS: [u8; 256] = {
    let mut rows = [UNKNOWN; 256];
    let mut row = 0;
    while row < OPCODES.len() {
        let code = OPCODES[row].opcode as usize;
        assert!(rows[code] == UNKNOWN, "two rows with one code");
        assert!(row < UNKNOWN as usize);
        #[expect(clippy::cast_possible_truncation, reason = "less than `UNKNOWN`")]
        let index = row as u8;
        rows[code] = index;
        row += 1;
    }
    rows
};

impl OpcodeInfo {
    /// Returns the row for a received code, or `None` if it is unknown.
    #[must_use]
    pub fn lookup(code: u8) -> Option<&'static Self> {
        OPCODES.get(usize::from(ROWS[usize::from(code)]))
    }
}

impl Opcode {
    /// Returns the opcode for a received code, or `None` if it is unknown.
    #[must_use]
    pub fn from_u8(code: u8) -> Option<Self> {
        OpcodeInfo::lookup(code).map(|info| info.opcode)
    }

    /// Returns the opcode of the same packet in a different service. This is possible because the
    /// low five bits are the same for all services (IBTA 9.2.1, table 38).
    ///
    /// # Panics
    /// Panics if this packet does not exist in `service`.
    #[must_use]
    pub fn in_service(self, service: Service) -> Self {
        let code = self as u8 & 0x1f | service.opcode_bits();
        Self::from_u8(code).expect("packet exists in the service")
    }

    /// Returns the table row for this opcode.
    #[must_use]
    pub fn info(self) -> &'static OpcodeInfo {
        &OPCODES[usize::from(ROWS[self as usize])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_lengths_match_specification() {
        let expected: [(u8, usize); 61] = [
            (0x00, 12),
            (0x01, 12),
            (0x02, 12),
            (0x03, 16),
            (0x04, 12),
            (0x05, 16),
            (0x06, 28),
            (0x07, 12),
            (0x08, 12),
            (0x09, 16),
            (0x0a, 28),
            (0x0b, 32),
            (0x0c, 28),
            (0x0d, 16),
            (0x0e, 12),
            (0x0f, 16),
            (0x10, 16),
            (0x11, 16),
            (0x12, 24),
            (0x13, 40),
            (0x14, 40),
            (0x16, 16),
            (0x17, 16),
            (0x20, 12),
            (0x21, 12),
            (0x22, 12),
            (0x23, 16),
            (0x24, 12),
            (0x25, 16),
            (0x26, 28),
            (0x27, 12),
            (0x28, 12),
            (0x29, 16),
            (0x2a, 28),
            (0x2b, 32),
            (0x64, 20),
            (0x65, 24),
            (0x81, 28),
            (0xa0, 16),
            (0xa1, 16),
            (0xa2, 16),
            (0xa3, 20),
            (0xa4, 16),
            (0xa5, 20),
            (0xa6, 32),
            (0xa7, 16),
            (0xa8, 16),
            (0xa9, 20),
            (0xaa, 32),
            (0xab, 36),
            (0xac, 32),
            (0xad, 16),
            (0xae, 12),
            (0xaf, 16),
            (0xb0, 16),
            (0xb1, 16),
            (0xb2, 24),
            (0xb3, 44),
            (0xb4, 44),
            (0xb6, 20),
            (0xb7, 20),
        ];
        for code in 0..=255u8 {
            let want = expected
                .iter()
                .find(|(c, _)| *c == code)
                .map(|(_, len)| *len);
            assert_eq!(
                OpcodeInfo::lookup(code).map(|info| 12 + info.ext_len),
                want,
                "{code:#04x}"
            );
            if let Some(info) = OpcodeInfo::lookup(code) {
                assert_eq!(info.opcode as u8, code);
                assert_eq!(info.opcode.info(), info);
                assert!(info.ext_len <= MAX_EXT_LEN);
            }
        }
    }

    #[test]
    fn sends_and_immediate_writes_consume_receives() {
        let consuming: Vec<u8> = OPCODES
            .iter()
            .filter(|i| i.consumes_receive())
            .map(|i| i.opcode as u8)
            .collect();
        assert_eq!(
            consuming,
            [
                0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x09, 0x0b, 0x16, 0x17, 0x20, 0x21, 0x22, 0x23,
                0x24, 0x25, 0x29, 0x2b, 0x64, 0x65, 0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa9, 0xab,
                0xb6, 0xb7
            ]
        );
        let responses: Vec<u8> = OPCODES
            .iter()
            .filter(|i| i.is_response())
            .map(|i| i.opcode as u8)
            .collect();
        assert_eq!(
            responses,
            [
                0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0xad, 0xae, 0xaf, 0xb0, 0xb1, 0xb2
            ]
        );
    }

    #[test]
    fn payload_rules_limit_length() {
        assert!(
            PayloadRule::ExactlyMtu.allows(1024, 1024)
                && !PayloadRule::ExactlyMtu.allows(1023, 1024)
        );
        assert!(PayloadRule::OneToMtu.allows(1, 1024) && !PayloadRule::OneToMtu.allows(0, 1024));
        assert!(
            PayloadRule::ZeroToMtu.allows(0, 1024) && !PayloadRule::ZeroToMtu.allows(1025, 1024)
        );
        assert!(PayloadRule::Empty.allows(0, 1024) && !PayloadRule::Empty.allows(4, 1024));
    }
}
