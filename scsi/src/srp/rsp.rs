//! SRP_RSP: the response to a command or a task management request.

use num_enum::{FromPrimitive, IntoPrimitive};

use super::raw::{Cursor, RawRsp, expect};
use super::{Opcode, RSP_LEN, SrpError, Tag};

const RSPVALID: u8 = 0x01;
const SNSVALID: u8 = 0x02;
const DOOVER: u8 = 0x04;
const DOUNDER: u8 = 0x08;
const DIOVER: u8 = 0x10;
const DIUNDER: u8 = 0x20;

/// Size of the response data, in bytes.
const RESPONSE_DATA_LEN: usize = 4;

/// Difference between the length of a data buffer and the number of bytes transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Residual {
    /// There is no residual.
    #[default]
    None,
    /// Number of bytes in the buffer that were not used.
    Under(u32),
    /// Number of additional bytes that did not fit into the buffer.
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

    /// Returns the flag and the count to write.
    fn fields(self, under: u8, over: u8) -> (u8, u32) {
        match self {
            Self::None => (0, 0),
            Self::Under(count) => (under, count),
            Self::Over(count) => (over, count),
        }
    }
}

/// The flags byte, with the two bits used for a direction.
struct Bits {
    flags: u8,
    under: u8,
    over: u8,
}

/// RSP_CODE in response data (SRP r16a, response data). This is either the result of a task
/// management function, or the error for a request that never became a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum RspCode {
    /// No failure, or the function was completed.
    Complete = 0x00,
    /// A field in the request is invalid.
    RequestFieldsInvalid = 0x02,
    /// The function is not supported.
    TskMgmtNotSupported = 0x04,
    /// TASK MANAGEMENT FUNCTION FAILED: nothing was changed.
    TskMgmtFailed = 0x05,
    /// A reserved code.
    #[num_enum(catch_all)]
    Other(u8),
}

/// The fields of an SRP_RSP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rsp<'a> {
    /// SOLNT: set if a notification was requested.
    pub solicited: bool,
    /// Value to add to the request limit.
    pub req_lim_delta: i32,
    /// Tag from the request.
    pub tag: Tag,
    /// SCSI status (SAM-5 clause 5.3). This is not valid if `response` is set.
    pub status: u8,
    /// Residual for the data-out buffer.
    pub data_out: Residual,
    /// Residual for the data-in buffer.
    pub data_in: Residual,
    /// Response data, if available (RSPVALID).
    pub response: Option<RspCode>,
    /// Sense data, if available (SNSVALID).
    pub sense: Option<&'a [u8]>,
}

impl<'a> Rsp<'a> {
    /// Parses an SRP_RSP. A length field is only used when the corresponding flag is set. The data
    /// must have been received.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected, the buffer is too short for the header or the
    /// data, both overflow and underflow are set for a buffer, or the response data is shorter than
    /// 4 bytes.
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
        // The response data is first. Only use the length if the flag indicates that the data is
        // available.
        let mut at = Cursor::new(iu, RSP_LEN);
        let mut response = None;
        if flags & RSPVALID != 0 {
            let len = raw.resp_data_len.get();
            // Use the length from the header, even though only 4 bytes are defined, because the
            // sense data is located after this.
            let data = at.take_bytes("response data", len.into())?;
            let code = data.get(3).ok_or(SrpError::Illegal {
                field: "RESPONSE DATA LENGTH",
                value: len.into(),
            })?;
            response = Some(RspCode::from(*code));
        }
        let mut sense = None;
        if flags & SNSVALID != 0 {
            sense = Some(at.take_bytes("sense data", raw.sense_data_len.get().into())?);
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

    /// Returns the size of the IU, in bytes.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        RSP_LEN + self.response.map_or(0, |_| RESPONSE_DATA_LEN) + self.sense.map_or(0, <[u8]>::len)
    }

    /// Writes the IU to `out` and returns the number of bytes.
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
        .write_to(out);
        // If we have both, the response data is before the sense data.
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
