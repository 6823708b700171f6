//! `riser inquiry`: shows all information reported by a logical unit.

use std::time::Duration;

use riser_block::task;
use riser_initiator::engine::{IoData, ScsiIo, Session};
use riser_initiator::lun::LunError;
use riser_initiator::protection::PiSupport;
use riser_initiator::request::RequestError;
use riser_initiator::scsi::{Command, INQUIRY_LEN};
use riser_scsi::data::{inquiry, vpd};
use riser_scsi::lun::LunId;
use serde::Serialize;

use super::args::{Global, TargetArgs};
use super::disk::{connect, lun_failed};
use super::exit::{CliError, Exit};
use super::output;
use crate::inquiry::{Fields, Value, page, page_name, standard, supported_pages};

#[derive(Serialize)]
struct Page {
    code: String,
    name: &'static str,
    fields: Fields,
}

#[derive(Serialize)]
struct Document {
    url: String,
    lun: u32,
    standard: Fields,
    pages: Vec<Page>,
    /// Protection information of its medium, from READ CAPACITY (16), page 86h and the Control mode
    /// page.
    #[serde(skip_serializing_if = "Option::is_none")]
    protection: Option<PiSupport>,
}

pub(super) fn run(args: &TargetArgs, global: &Global) -> Result<(), CliError> {
    let url = args.url.target()?;
    let number = args.url.lun();
    let lun = LunId::new(number).ok_or_else(|| {
        CliError::new(Exit::Usage, format!("invalid logical unit number {number}"))
    })?;
    let session = connect(url, &args.link, global.timeout)?;
    let failed = |e: LunError| lun_failed(format!("INQUIRY of {url} failed"), e);
    let malformed = |e| CliError::new(Exit::Failure, format!("INQUIRY data of {url}")).because(e);
    // Targets also respond to INQUIRY if the logical unit doesn't exist. This is indicated by the
    // peripheral qualifier (SPC-4 6.6.2) and is not an error.
    let data = standard_data(&session, lun, global.timeout).map_err(failed)?;
    if inquiry::PERIPHERAL_QUALIFIER.get(&data) == Some(inquiry::QUALIFIER_INCAPABLE) {
        return Err(CliError::new(
            Exit::NotFound,
            format!("the target has no logical unit {number}"),
        ));
    }
    let fetch = |code| task::block_on(session.vpd(lun, code)).map_err(failed);
    let mut document = Document {
        url: url.to_string(),
        lun: number,
        standard: standard(&data).map_err(malformed)?,
        pages: Vec::new(),
        protection: None,
    };
    for code in supported_pages(&fetch(vpd::SUPPORTED_PAGES)?).map_err(malformed)? {
        document.pages.push(Page {
            code: format!("{code:02x}h"),
            name: page_name(code),
            fields: page(code, &fetch(code)?).map_err(malformed)?,
        });
    }
    if inquiry::PROTECT.get(&data) == Some(true) {
        document.protection = task::block_on(session.protection(lun)).map_err(failed)?;
    }
    task::block_on(session.close());
    output::result(&document, global, |out| {
        writeln!(out, "{}\n\nstandard INQUIRY data\n", document.url)?;
        write!(out, "{}", indent(&document.standard))?;
        for page in &document.pages {
            writeln!(out, "\npage {} {}\n", page.code, page.name)?;
            write!(out, "{}", indent(&page.fields))?;
        }
        if let Some(protection) = &document.protection {
            writeln!(out, "\nprotection information\n")?;
            write!(out, "{}", indent(&protection_fields(protection)))?;
        }
        Ok(())
    })
}

fn protection_fields(found: &PiSupport) -> Fields {
    Fields(vec![
        (
            "protection_type",
            Value::Number(found.protection_type.into()),
        ),
        (
            "interval_exponent",
            Value::Number(found.interval_exponent.into()),
        ),
        ("guard_check", Value::Flag(found.guard_check)),
        (
            "application_tag_check",
            Value::Flag(found.application_tag_check),
        ),
        (
            "reference_tag_check",
            Value::Flag(found.reference_tag_check),
        ),
        (
            "application_tag_owner",
            Value::Flag(found.application_tag_owner),
        ),
        (
            "disables_zero_check",
            Value::Flag(found.disables_zero_check),
        ),
    ])
}

fn indent(fields: &Fields) -> String {
    let lines = fields.to_string();
    lines.lines().map(|line| format!("  {line}\n")).collect()
}

fn standard_data(session: &Session, lun: LunId, timeout: Duration) -> Result<Vec<u8>, LunError> {
    task::block_on(async {
        let buffer = session
            .client()
            .buffers()
            .take_buffer(INQUIRY_LEN.into())
            .await;
        let io = ScsiIo::new(lun, Command::inquiry(), IoData::One(buffer), timeout);
        let end = session.submit(io).await;
        let response = end.result?;
        if !response.is_success() {
            return Err(LunError::Status(response.status));
        }
        let buffer = end.data.into_one().ok_or(RequestError::Closed)?;
        let mut data = buffer.slice().to_vec();
        data.truncate(response.transferred as usize);
        Ok(data)
    })
}
