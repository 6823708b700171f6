//! `riser discover`: the SRP ports of an address, and the logical units behind them.

use serde::Serialize;

use super::args::{DiscoverArgs, Global};
use super::disk::{login, lun_failed, start_engine};
use super::exit::{CliError, Exit};
use super::{output, units};
use crate::block::task;
use crate::engine::{EngineError, Session};
use crate::lun::LunError;
use crate::srp::url::SrpUrl;

/// A target port.
#[derive(Serialize)]
struct Port {
    url: String,
    /// What it calls itself, if it was asked.
    name: Option<String>,
    luns: Vec<Unit>,
    /// Why there are none: it does not let us in, for example.
    error: Option<String>,
}

/// A logical unit.
#[derive(Serialize)]
struct Unit {
    lun: u32,
    url: String,
    vendor: String,
    product: String,
    revision: String,
    /// Absent, as the next, for what is not a disk.
    capacity: Option<u64>,
    block_size: Option<u32>,
    read_only: Option<bool>,
}

pub(super) fn run(args: &DiscoverArgs, global: &Global) -> Result<(), CliError> {
    let url = args.url.target()?;
    let client = start_engine(url, &args.link, global.timeout)?;
    let asked = url.id_ext.is_none() && url.ioc_guid.is_none();
    let found = match asked {
        true => task::block_on(client.discover(url)),
        false => Ok(Vec::new()),
    };
    let named: Vec<(SrpUrl, Option<String>)> = match found {
        Ok(found) => found
            .into_iter()
            .filter_map(|port| {
                let mut url = url.clone();
                url.port = port.port()?;
                (url.id_ext, url.ioc_guid) = (Some(port.id_ext), Some(port.ioc_guid));
                Some((url, Some(port.name)))
            })
            .collect(),
        // Not every target can be asked.
        Err(EngineError::Discovery(error)) => {
            tracing::info!(%error, "logging in without asking for ports first");
            Vec::new()
        }
        Err(error) => {
            return Err(CliError::new(Exit::Refused, format!("cannot ask {url}")).because(error));
        }
    };
    let ports = if named.is_empty() {
        let session = login(&client, url, &args.link, global.timeout)?;
        let port = describe(&session, None);
        task::block_on(session.close());
        vec![port.map_err(|e| lun_failed(format!("cannot list the logical units of {url}"), e))?]
    } else {
        let mut ports = Vec::new();
        for (mut url, name) in named {
            url.lun = None;
            let described = login(&client, &url, &args.link, global.timeout)
                .map_err(|e| e.causes().pop().unwrap_or(e.what))
                .and_then(|session| {
                    let port = describe(&session, name.clone()).map_err(|e| e.to_string());
                    task::block_on(session.close());
                    port
                });
            ports.push(described.unwrap_or_else(|error| Port {
                url: url.to_string(),
                name,
                luns: Vec::new(),
                error: Some(error),
            }));
        }
        ports
    };
    output::result(&ports, global, |out| {
        for port in &ports {
            let name = port.name.as_deref().unwrap_or("target");
            writeln!(out, "{name}  {}", port.url)?;
            if let Some(error) = &port.error {
                writeln!(out, "  {error}")?;
            }
            for unit in &port.luns {
                let size = unit.capacity.map_or("no disk".into(), units::show_size);
                let what = format!("{} {}", unit.vendor, unit.product);
                writeln!(out, "  {:>11}  {what}  {}", size, unit.url)?;
            }
        }
        Ok(())
    })
}

fn describe(session: &Session, name: Option<String>) -> Result<Port, LunError> {
    let mut luns = Vec::new();
    for id in task::block_on(session.luns())? {
        let inquiry = task::block_on(session.inquiry(id))?;
        let disk = match task::block_on(session.lun(id.number())) {
            Ok(lun) => Some(lun.info().clone()),
            Err(LunError::NotADisk(_)) => None,
            Err(e) => return Err(e),
        };
        let mut url = session.url().clone();
        url.lun = u16::try_from(id.number()).ok();
        let disk = disk.as_ref();
        luns.push(Unit {
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
    let mut url = session.url().clone();
    url.lun = None;
    Ok(Port {
        url: url.to_string(),
        name,
        luns,
        error: None,
    })
}
