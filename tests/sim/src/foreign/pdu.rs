//! Encodes and decodes iSCSI PDUs (RFC 7143 section 11). Doesn't share code with the initiator.

/// Length of a basic header segment.
pub(super) const BHS: usize = 48;

/// Initiator opcodes, without the immediate bit.
pub(super) mod request {
    pub(crate) const NOP_OUT: u8 = 0x00;
    pub(crate) const SCSI_COMMAND: u8 = 0x01;
    pub(crate) const TASK_MANAGEMENT: u8 = 0x02;
    pub(crate) const LOGIN: u8 = 0x03;
    pub(crate) const TEXT: u8 = 0x04;
    pub(crate) const DATA_OUT: u8 = 0x05;
    pub(crate) const LOGOUT: u8 = 0x06;
}

/// Target opcodes.
pub(super) mod response {
    pub(crate) const NOP_IN: u8 = 0x20;
    pub(crate) const SCSI_RESPONSE: u8 = 0x21;
    pub(crate) const TASK_MANAGEMENT: u8 = 0x22;
    pub(crate) const LOGIN: u8 = 0x23;
    pub(crate) const TEXT: u8 = 0x24;
    pub(crate) const DATA_IN: u8 = 0x25;
    pub(crate) const LOGOUT: u8 = 0x26;
    pub(crate) const R2T: u8 = 0x31;
    pub(crate) const ASYNC: u8 = 0x32;
    pub(crate) const REJECT: u8 = 0x3f;
}

/// Length of an iSER header (RFC 7145 section 9).
const ISER_HEADER: usize = 28;

/// Type of a control-type PDU in an iSER header.
const CONTROL: u8 = 0x10;

/// Buffer of the initiator that an iSER header advertises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IserBuffer {
    pub(super) stag: u32,
    pub(super) base: u64,
}

/// A received PDU.
#[derive(Clone, Debug)]
pub(super) struct Pdu {
    pub(super) bhs: [u8; BHS],
    pub(super) data: Vec<u8>,
    /// Buffer of the data that the command writes (iSER).
    pub(super) write_buffer: Option<IserBuffer>,
    /// Buffer of the data that the command reads (iSER).
    pub(super) read_buffer: Option<IserBuffer>,
}

impl Pdu {
    /// Splits the first complete PDU from `input`.
    pub(super) fn split(input: &mut Vec<u8>) -> Option<Self> {
        let bhs: [u8; BHS] = input.get(..BHS)?.try_into().ok()?;
        let len = u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]) as usize;
        let begin = BHS + usize::from(bhs[4]) * 4;
        let end = begin + len.next_multiple_of(4);
        let data = input.get(begin..end)?[..len].to_vec();
        input.drain(..end);
        Some(Self::new(bhs, data))
    }

    pub(super) fn new(bhs: [u8; BHS], data: Vec<u8>) -> Self {
        Self {
            bhs,
            data,
            write_buffer: None,
            read_buffer: None,
        }
    }

    /// Reads a message of iSER.
    pub(super) fn of_message(message: &[u8]) -> Option<Self> {
        let (header, rest) = message.split_at_checked(ISER_HEADER)?;
        let buffer = |is_valid: bool, at: usize| {
            is_valid.then(|| IserBuffer {
                stag: u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes")),
                base: u64::from_be_bytes(header[at + 4..at + 12].try_into().expect("eight bytes")),
            })
        };
        // Padding may be missing.
        let mut rest = rest.to_vec();
        rest.resize(rest.len().next_multiple_of(4), 0);
        Some(Self {
            write_buffer: buffer(header[0] & 0x08 != 0, 4),
            read_buffer: buffer(header[0] & 0x04 != 0, 16),
            ..Self::split(&mut rest)?
        })
    }

    pub(super) fn opcode(&self) -> u8 {
        self.bhs[0] & 0x3f
    }

    pub(super) fn is_immediate(&self) -> bool {
        self.bhs[0] & 0x40 != 0
    }

    pub(super) fn is_final(&self) -> bool {
        self.bhs[1] & 0x80 != 0
    }

    /// Initiator task tag.
    pub(super) fn itt(&self) -> [u8; 4] {
        self.array(16)
    }

    /// Returns the big-endian word at `at`.
    pub(super) fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    fn array(&self, at: usize) -> [u8; 4] {
        self.bhs[at..at + 4].try_into().expect("four bytes")
    }
}

/// Header of a target PDU with the final bit set.
pub(super) fn header(opcode: u8, itt: [u8; 4]) -> [u8; BHS] {
    let mut bhs = [0; BHS];
    (bhs[0], bhs[1]) = (opcode, 0x80);
    bhs[16..20].copy_from_slice(&itt);
    bhs
}

/// The iSER header of a target's PDU, which advertises no buffer.
pub(super) fn iser_header() -> [u8; ISER_HEADER] {
    let mut header = [0; ISER_HEADER];
    header[0] = CONTROL;
    header
}
