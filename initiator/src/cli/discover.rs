//! `riser discover`: the logical units of a target.

use serde::Serialize;

use super::args::{DiscoverArgs, Global};
use super::disk::{connect, lun_failed};
use super::exit::CliError;
use super::{output, units};
use crate::block::task;
use crate::lun::LunError;

#[derive(Serialize)]
struct Found {
    lun: u32,
    url: String,
    vendor: String,
    product: String,
    revision: String,
    /// Absent for what is not a disk.
    capacity: Option<u64>,
    block_size: Option<u32>,
    read_only: Option<bool>,
}

pub(super) fn run(args: &DiscoverArgs, global: &Global) -> Result<(), CliError> {
    let url = args.url.target()?;
    let session = connect(url, &args.link, global.timeout)?;
    let failed = |e: LunError| lun_failed(format!("cannot list the logical units of {url}"), e);
    let mut found = Vec::new();
    for id in task::block_on(session.luns()).map_err(failed)? {
        let inquiry = task::block_on(session.inquiry(id)).map_err(failed)?;
        let disk = match task::block_on(session.lun(id.number())) {
            Ok(lun) => Some(lun.info().clone()),
            Err(LunError::NotADisk(_)) => None,
            Err(e) => return Err(failed(e)),
        };
        let mut url = url.clone();
        url.lun = u16::try_from(id.number()).ok();
        let disk = disk.as_ref();
        found.push(Found {
            lun: id.number(),
            url: url.to_string(),
            vendor: inquiry.vendor.trim().to_owned(),
            product: inquiry.product.trim().to_owned(),
            revision: inquiry.revision.trim().to_owned(),
            capacity: disk.map(|d| d.capacity.blocks * u64::from(d.capacity.block_size)),
            block_size: disk.map(|d| d.capacity.block_size),
            read_only: disk.map(|d| d.caching.write_protected),
        });
    }
    task::block_on(session.close());
    output::result(&found, global, |out| {
        if found.is_empty() {
            return writeln!(out, "the target has no logical units for this initiator");
        }
        for f in &found {
            let size = f.capacity.map_or("no disk".into(), units::show_size);
            writeln!(out, "{:>11}  {} {}  {}", size, f.vendor, f.product, f.url)?;
        }
        Ok(())
    })
}
