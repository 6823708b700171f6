//! `riser discover`: the SRP ports of an address, and the logical units behind them.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::args::{DiscoverArgs, Global};
use super::disk::{login_failed, login_once, lun_failed, start_engine};
use super::exit::{CliError, Exit};
use super::{output, units};
use crate::block::task;
use crate::engine::{Client, EngineError, Session};
use crate::lun::LunError;
use crate::srp::discovery::DiscoveryError;
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
    let patience = Instant::now() + global.timeout;
    let mut url = url.clone();
    url.channels = args.link.channels.or(url.channels);
    let named = if url.id_ext.is_none() && url.ioc_guid.is_none() {
        ask(&client, &url, global.timeout / 2)?
    } else {
        Vec::new()
    };
    let ports = if named.is_empty() {
        let session =
            login_once(&client, &url, patience).map_err(|error| login_failed(&url, error))?;
        let port = describe(&session.with_timeout(global.timeout), None);
        vec![port.map_err(|e| lun_failed(format!("cannot list the logical units of {url}"), e))?]
    } else {
        let mut ports = Vec::new();
        for (url, name) in named {
            let described = login_once(&client, &url, Instant::now() + global.timeout)
                .map_err(|e| e.to_string())
                .and_then(|session| {
                    describe(&session.with_timeout(global.timeout), Some(name.clone()))
                        .map_err(|e| e.to_string())
                });
            ports.push(described.unwrap_or_else(|error| Port {
                url: url.to_string(),
                name: Some(name),
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

/// The ports that an address offers, with their names; none where it cannot be asked.
fn ask(client: &Client, url: &SrpUrl, limit: Duration) -> Result<Vec<(SrpUrl, String)>, CliError> {
    let found = match task::block_on(client.timeout(limit, client.discover(url))) {
        Ok(Ok(found)) => found,
        // Not every target can be asked.
        Ok(Err(EngineError::Discovery(DiscoveryError::NoAnswer))) | Err(_) => {
            tracing::info!("{url} does not tell its ports; logging in without them");
            return Ok(Vec::new());
        }
        Ok(Err(EngineError::Discovery(DiscoveryError::Unsupported))) => {
            return Err(login_failed(url, EngineError::Unnamed));
        }
        Ok(Err(error)) => {
            return Err(CliError::new(Exit::Refused, format!("cannot ask {url}")).because(error));
        }
    };
    let named = found.into_iter().map(|port| {
        let mut url = url.clone();
        // A service that is not one of the RDMA connection manager says nothing of the port.
        url.port = port.port().unwrap_or(url.port);
        (url.id_ext, url.ioc_guid) = (Some(port.id_ext), Some(port.ioc_guid));
        url.lun = None;
        (url, port.name)
    });
    Ok(named.collect())
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
    task::block_on(session.close());
    Ok(Port {
        url: url.to_string(),
        name,
        luns,
        error: None,
    })
}
