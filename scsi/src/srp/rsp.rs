//! SRP_RSP: the answer to a command or a task-management request.

use num_enum::{FromPrimitive, IntoPrimitive};

use super::raw::{Cursor, RawRsp, expect};
use super::{Opcode, RSP_LEN, SrpError, Tag};

const RSPVALID: u8 = 0x01;
const SNSVALID: u8 = 0x02;
const DOOVER: u8 = 0x04;
const DOUNDER: u8 = 0x08;
const DIOVER: u8 = 0x10;
const DIUNDER: u8 = 0x20;

/// Length of response data, in bytes.
const RESPONSE_DATA_LEN: usize = 4;

/// Difference between a data buffer's length and what the command moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Residual {
    /// No residual is reported.
    #[default]
    None,
    /// Bytes of the buffer that were not used.
    Under(u32),
    /// Bytes that the command would have moved beyond the buffer.
    Over(u32),
}

impl Residual {
    fn parse(field: &'static str, bits: Bits, count: u32) -> Result<Self, SrpError> {
        match (bits.flags & bits.under != 0, bits.flags & bits.over != 0) {
            (false, false) => Ok(Self::None),
            (true, false) => Ok(Self::Under(count)),
            (false, true) => Ok(Self::Over(count)),
            (true, true) => Err(SrpError::Illegal {
                field,
                value: bits.flags.into(),
            }),
        }
    }

    /// The flag to set and the count to write.
    fn fields(self, under: u8, over: u8) -> (u8, u32) {
        match self {
            Self::None => (0, 0),
            Self::Under(count) => (under, count),
            Self::Over(count) => (over, count),
        }
    }
}

/// The flags byte and the two bits of it that concern one direction.
struct Bits {
    flags: u8,
    under: u8,
    over: u8,
}

/// RSP_CODE of response data (SRP r16a, response data): how a task-management function ended, or
/// what was wrong with a request that never became a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum RspCode {
    /// No failure, or the function is complete.
    Complete = 0x00,
    /// A field of the request is invalid.
    RequestFieldsInvalid = 0x02,
    /// The function is not supported.
    TskMgmtNotSupported = 0x04,
    /// TASK MANAGEMENT FUNCTION FAILED: it has had no effect.
    TskMgmtFailed = 0x05,
    /// A code that the standard reserves.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Fields of an SRP_RSP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rsp<'a> {
    /// SOLNT: the request asked to be notified of this answer.
    pub solicited: bool,
    /// Added to the request limit.
    pub req_lim_delta: i32,
    /// Tag of the request that it answers.
    pub tag: Tag,
    /// SCSI status (SAM-5 clause 5.3). Without meaning when `response` is present.
    pub status: u8,
    /// Of the data-out buffer.
    pub data_out: Residual,
    /// Of the data-in buffer.
    pub data_in: Residual,
    /// Response data, if any (RSPVALID).
    pub response: Option<RspCode>,
    /// Sense data, if any (SNSVALID).
    pub sense: Option<&'a [u8]>,
}

impl<'a> Rsp<'a> {
    /// Parses an SRP_RSP. Length fields count only when their flag is set; what they declare must
    /// have been received.
    ///
    /// # Errors
    /// A wrong type, too few bytes for the header or the declared data, over- and underflow of one
    /// buffer at once, or response data shorter than its four bytes.
    pub fn parse(iu: &'a [u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawRsp::split(iu)?;
        expect(raw.opcode, Opcode::Rsp)?;
        let flags = raw.flags;
        let out = Bits {
            flags,
            under: DOUNDER,
            over: DOOVER,
        };
        let data_out = Residual::parse("DOUNDER and DOOVER", out, raw.data_out_res_cnt.get())?;
        let into = Bits {
            flags,
            under: DIUNDER,
            over: DIOVER,
        };
        let data_in = Residual::parse("DIUNDER and DIOVER", into, raw.data_in_res_cnt.get())?;
        // Response data come first; a length counts only where its flag says that the part is
        // there.
        let mut at = Cursor::new(iu, RSP_LEN);
        let mut response = None;
        if flags & RSPVALID != 0 {
            let len = raw.resp_data_len.get();
            // As long as it says, though four bytes are all that is defined: sense data begin
            // behind it.
            let data = at.take("response data", len.into())?;
            let code = data.get(3).ok_or(SrpError::Illegal {
                field: "RESPONSE DATA LENGTH",
                value: len.into(),
            })?;
            response = Some(RspCode::from(*code));
        }
        let mut sense = None;
        if flags & SNSVALID != 0 {
            sense = Some(at.take("sense data", raw.sense_data_len.get().into())?);
        }
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            req_lim_delta: raw.req_lim_delta.get(),
            tag: Tag(raw.tag.get()),
            status: raw.status,
            data_out,
            data_in,
            response,
            sense,
        })
    }

    /// Length of the information unit, in bytes.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        RSP_LEN + self.response.map_or(0, |_| RESPONSE_DATA_LEN) + self.sense.map_or(0, <[u8]>::len)
    }

    /// Writes the information unit and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = &mut out[..self.wire_len()];
        let (out_flag, out_count) = self.data_out.fields(DOUNDER, DOOVER);
        let (in_flag, in_count) = self.data_in.fields(DIUNDER, DIOVER);
        let mut flags = out_flag | in_flag;
        let mut resp_data_len = 0;
        if self.response.is_some() {
            flags |= RSPVALID;
            resp_data_len = RESPONSE_DATA_LEN as u32;
        }
        let mut sense_data_len = 0;
        if let Some(sense) = self.sense {
            flags |= SNSVALID;
            sense_data_len = sense.len() as u32;
        }
        let mut at = RawRsp {
            opcode: Opcode::Rsp as u8,
            sol_not: self.solicited.into(),
            req_lim_delta: self.req_lim_delta.into(),
            tag: self.tag.0.into(),
            flags,
            status: self.status,
            data_out_res_cnt: out_count.into(),
            data_in_res_cnt: in_count.into(),
            sense_data_len: sense_data_len.into(),
            resp_data_len: resp_data_len.into(),
            ..RawRsp::default()
        }
        .put(out);
        // Response data come before sense data, where there are both.
        if let Some(code) = self.response {
            out[at..at + RESPONSE_DATA_LEN].copy_from_slice(&[0, 0, 0, code.into()]);
            at += RESPONSE_DATA_LEN;
        }
        if let Some(sense) = self.sense {
            out[at..].copy_from_slice(sense);
        }
        out.len()
    }
}
