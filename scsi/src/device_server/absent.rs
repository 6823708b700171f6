//! Responses to commands for a LUN without a logical unit (SAM-5 5.11, SPC-4 6.6.2).

use super::Request;
use crate::cdb::Cdb;
use crate::commands::inquiry;
use crate::commands::report_luns::luns_data;
use crate::data::cdb as field;
use crate::opcode::Opcode;
use crate::sense::{AdditionalSense, Sense, SenseFormat};
use crate::step::{DataIn, Residual, Response, Status};

/// Returns the response to a command for a LUN that does not exist for this nexus.
///
/// INQUIRY and REQUEST SENSE report this in their data. REPORT LUNS works as usual, because a
/// target must support this for LUN 0 and the REPORT LUNS well-known LU, even if neither exists.
/// Any other command will fail with LOGICAL UNIT NOT SUPPORTED.
pub fn respond_absent(request: &Request<'_>) -> Response {
    match absent_data(request) {
        Ok((mut data, allocation_length)) => {
            data.truncate(allocation_length as usize);
            let wanted = data.len() as u32;
            // ALLOCATION LENGTH is part of the command, so truncating the data to this length
            // doesn't result in a residual. Truncating it to the size of the initiator's buffer
            // does.
            data.truncate(request.expected.data_in as usize);
            Response {
                data_in: DataIn::Inline(data),
                residual_in: Residual::between(wanted, request.expected.data_in),
                ..Response::status_only(Status::Good, request.expected)
            }
        }
        // There is no LU, so D_SENSE can't be set to request the descriptor format.
        Err(sense) => Response::check_condition(&sense, SenseFormat::Fixed, request.expected),
    }
}

fn absent_data(request: &Request<'_>) -> Result<(Vec<u8>, u32), Sense> {
    const INQUIRY: &Opcode = Opcode::named("INQUIRY");
    const REQUEST_SENSE: &Opcode = Opcode::named("REQUEST SENSE");
    const REPORT_LUNS: &Opcode = Opcode::named("REPORT LUNS");
    let not_supported = Sense::illegal(AdditionalSense::LOGICAL_UNIT_NOT_SUPPORTED);
    // Don't check the CDB of any other command, because there is no LU to define which values are
    // valid.
    let row = request.opcode;
    if ![INQUIRY, REQUEST_SENSE, REPORT_LUNS]
        .iter()
        .any(|known| row.is(known))
    {
        return Err(not_supported);
    }
    let cdb = Cdb::parse(request.cdb, &row.usage)?;
    if row.is(INQUIRY) {
        if cdb.get(field::inquiry::EVPD) || cdb.get(field::inquiry::PAGE_CODE) != 0 {
            return Err(Sense::cdb_field(2, Some(7)));
        }
        let allocation_length = cdb.get(field::inquiry::ALLOCATION_LENGTH);
        return Ok((inquiry::absent(), u32::from(allocation_length)));
    }
    if row.is(REPORT_LUNS) {
        let data = luns_data(cdb.get(field::report_luns::SELECT_REPORT), request.luns)?;
        return Ok((data, cdb.get(field::report_luns::ALLOCATION_LENGTH)));
    }
    let format = if cdb.get(field::request_sense::DESC) {
        SenseFormat::Descriptor
    } else {
        SenseFormat::Fixed
    };
    let sense = not_supported.encode(format);
    Ok((
        sense.to_vec(),
        cdb.get(field::request_sense::ALLOCATION_LENGTH).into(),
    ))
}
