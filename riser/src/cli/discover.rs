//! `riser discover`: lists SRP ports or iSCSI targets at an address, and their logical units.

use std::time::{Duration, Instant};

use riser_block::task;
use riser_initiator::engine::{Client, EngineError, Session};
use riser_initiator::lun::{LunError, LunInfo};
use riser_initiator::protection::PiSupport;
use riser_initiator::request::RequestError;
use riser_initiator::session::{ConnectError, Down};
use riser_initiator::srp::discovery::{DiscoveryError, plan_logins};
use riser_initiator::url::IscsiUrl;
use riser_initiator::url::SrpUrl;
use riser_initiator::url::TargetUrl;
use riser_scsi::lun::LunId;
use serde::Serialize;

use super::args::{DiscoverArgs, Global};
use super::disk::{connect, login_failed, login_once, lun_failed, start_engine, with_link};
use super::exit::{CliError, Exit};
use super::{output, units};

/// A target port.
#[derive(Debug, Serialize)]
struct Port {
    url: String,
    /// Name of the target, if it was queried.
    name: Option<String>,
    /// Addresses and portal groups of an iSCSI target.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    portals: Vec<String>,
    luns: Vec<Unit>,
    /// Reason why there are no units, for example if the login was rejected.
    error: Option<String>,
    /// Corresponding exit status.
    #[serde(skip)]
    exit: Option<Exit>,
}

/// Address, name and portals of a target port.
type Named = (TargetUrl, String, Vec<String>);

/// A logical unit.
#[derive(Debug, Serialize)]
struct Unit {
    lun: u32,
    url: String,
    vendor: String,
    product: String,
    revision: String,
    /// This and the following fields are not available if the unit is not a disk or not ready.
    capacity: Option<u64>,
    block_size: Option<u32>,
    read_only: Option<bool>,
    /// Protection information of the medium, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    protection: Option<PiSupport>,
    /// Reason why the unit can't be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Corresponding exit status.
    #[serde(skip)]
    exit: Option<Exit>,
}

impl Port {
    fn new(url: &TargetUrl, name: Option<String>) -> Self {
        Self {
            url: url.clone().with_lun(None).to_string(),
            name,
            portals: Vec::new(),
            luns: Vec::new(),
            error: None,
            exit: None,
        }
    }

    /// Returns the first error and its exit status if no unit can be used. Returns `None` if at
    /// least one unit can be used.
    fn failure(&self) -> Option<(&str, Option<Exit>)> {
        if let Some(error) = &self.error {
            return Some((error, self.exit));
        }
        if self.luns.iter().any(|unit| unit.error.is_none()) {
            return None;
        }
        let unit = self.luns.first()?;
        Some((unit.error.as_deref()?, unit.exit))
    }
}

pub(super) fn run(args: &DiscoverArgs, global: &Global) -> Result<(), CliError> {
    let url = args.url.target()?;
    // Only the first portal is required to list the units of a target.
    let first = with_link(&url.first(), &args.link);
    let is_named = match &first {
        TargetUrl::Srp(srp) => srp.id_ext.is_some() || srp.ioc_guid.is_some(),
        TargetUrl::Iscsi(iscsi) => iscsi.target.is_some(),
    };
    let ports = if is_named && !args.targets_only {
        // If this fails, another provider may be tried.
        let session = connect(&first, &args.link, global.timeout)?;
        vec![only(&first, &session)?]
    } else {
        let client = start_engine(url, &args.link, global.timeout)?;
        let patience = Instant::now() + global.timeout;
        let named = match &first {
            TargetUrl::Srp(srp) => query_ports(&client, srp, global.timeout / 2)?,
            TargetUrl::Iscsi(iscsi) => targets(&client, iscsi, global)?,
        };
        if args.targets_only || matches!(first, TargetUrl::Iscsi(_)) {
            let ports = match args.targets_only {
                true => named.into_iter().map(Port::from).collect(),
                false => list(&client, named, global),
            };
            print(&ports, global)?;
            return check(&first, &ports);
        }
        if named.is_empty() {
            let session = login_once(&client, &first, global.timeout, patience)
                .map_err(|error| login_failed(&first, error))?;
            vec![only(&first, &session.with_timeout(global.timeout))?]
        } else {
            list(&client, named, global)
        }
    };
    print(&ports, global)?;
    check(&first, &ports)
}

/// Returns the target port if the address refers to a single port.
fn only(url: &TargetUrl, session: &Session) -> Result<Port, CliError> {
    let port = describe(session, None);
    port.map_err(|e| lun_failed(format!("cannot list the logical units of {url}"), e))
}

/// Returns the targets of an iSCSI portal.
fn targets(client: &Client, url: &IscsiUrl, global: &Global) -> Result<Vec<Named>, CliError> {
    let found = task::block_on(client.timeout(global.timeout, client.discover_targets(url)));
    let timed_out = || EngineError::Login(ConnectError::TimedOut.into());
    let found = found
        .unwrap_or_else(|_| Err(timed_out()))
        .map_err(|error| match error {
            EngineError::Login(Down::IscsiFault(_)) => {
                let what = format!("invalid list of targets from {url}");
                CliError::new(Exit::Failure, what).because(error)
            }
            error => login_failed(&url.into(), error),
        })?;
    let targets = found.into_iter().map(|target| {
        let addresses = target.addresses.iter().map(ToString::to_string).collect();
        let mut url = url.clone();
        url.target = Some(target.name.clone());
        (TargetUrl::Iscsi(url), target.name.to_string(), addresses)
    });
    Ok(targets.collect())
}

impl From<Named> for Port {
    fn from((url, name, portals): Named) -> Self {
        Self {
            portals,
            ..Self::new(&url, Some(name))
        }
    }
}

/// Fails if none of the targets has a usable logical unit. If all targets have the same exit
/// status, this is returned.
fn check(url: &TargetUrl, ports: &[Port]) -> Result<(), CliError> {
    let failures: Vec<_> = ports.iter().filter_map(Port::failure).collect();
    let Some((error, exit)) = failures.first() else {
        return Ok(());
    };
    if failures.len() < ports.len() {
        return Ok(());
    }
    let exit = exit.filter(|_| failures.iter().all(|(_, other)| other == exit));
    let what = match ports.len() {
        1 => format!("cannot use the target at {url}"),
        n => format!("cannot use any of the {n} targets at {url}"),
    };
    Err(CliError::new(exit.unwrap_or(Exit::Refused), what).because((*error).to_owned()))
}

/// Logs in to each of the targets and lists their logical units.
fn list(client: &Client, named: Vec<Named>, global: &Global) -> Vec<Port> {
    let mut ports = Vec::new();
    for (url, name, portals) in named {
        let until = Instant::now() + global.timeout;
        let described = login_once(client, &url, global.timeout, until)
            .map_err(|e| (e.to_string(), login_failed(&url, e).exit))
            .and_then(|session| {
                describe(&session.with_timeout(global.timeout), Some(name.clone()))
                    .map_err(|e| (e.to_string(), lun_failed(String::new(), e).exit))
            });
        let mut port = described.unwrap_or_else(|(error, exit)| Port {
            error: Some(error),
            exit: Some(exit),
            ..Port::new(&url, Some(name))
        });
        port.portals = portals;
        ports.push(port);
    }
    ports
}

fn print(ports: &[Port], global: &Global) -> Result<(), CliError> {
    output::result(&ports, global, |out| {
        if ports.is_empty() {
            return writeln!(out, "no targets available to this initiator");
        }
        for port in ports {
            let name = port.name.as_deref().unwrap_or("target");
            writeln!(out, "{name}  {}", port.url)?;
            for portal in &port.portals {
                writeln!(out, "  portal {portal}")?;
            }
            if let Some(error) = &port.error {
                writeln!(out, "  {error}")?;
            }
            for unit in &port.luns {
                let size = match (unit.capacity, &unit.error) {
                    (Some(bytes), _) => units::show_size(bytes),
                    (None, None) => "no disk".into(),
                    (None, Some(_)) => "unusable".into(),
                };
                let what = format!("{} {}", unit.vendor, unit.product);
                write!(out, "  {size:>11}  {}  {}", what.trim(), unit.url)?;
                if let Some(protection) = &unit.protection {
                    write!(out, "  protection type {}", protection.protection_type)?;
                }
                match &unit.error {
                    Some(error) => writeln!(out, "  {error}")?,
                    None => writeln!(out)?,
                }
            }
        }
        Ok(())
    })
}

/// Returns the target ports at this address, or an empty list if they can't be queried.
fn query_ports(client: &Client, url: &SrpUrl, limit: Duration) -> Result<Vec<Named>, CliError> {
    let found = match task::block_on(client.timeout(limit, client.discover(url))) {
        Ok(Ok(found)) => found,
        // Queries are not supported by all targets.
        Ok(Err(EngineError::Discovery(DiscoveryError::NoResponse))) | Err(_) => {
            tracing::info!("{url} does not report its ports; logging in without discovery");
            return Ok(Vec::new());
        }
        Ok(Err(EngineError::Discovery(DiscoveryError::Unsupported))) => {
            return Err(login_failed(&url.into(), EngineError::Unnamed));
        }
        Ok(Err(error)) => {
            return Err(CliError::new(Exit::Refused, format!("cannot query {url}")).because(error));
        }
    };
    let named = plan_logins(found).into_iter().map(|port| {
        let mut url = url.clone();
        // Service IDs that don't belong to the RDMA connection manager don't have a port number.
        url.port = port.port().unwrap_or(url.port);
        (url.id_ext, url.ioc_guid) = (Some(port.id_ext), Some(port.ioc_guid));
        url.lun = None;
        (TargetUrl::Srp(url), port.name, Vec::new())
    });
    Ok(named.collect())
}

fn describe(session: &Session, name: Option<String>) -> Result<Port, LunError> {
    let mut port = Port::new(session.url(), name);
    for id in task::block_on(session.luns())? {
        port.luns.push(describe_unit(session, id)?);
    }
    task::block_on(session.close());
    Ok(port)
}

/// Returns a logical unit, which may include the reason why it can't be used.
///
/// # Errors
/// Fails if the session has failed, so that no further units can be queried.
fn describe_unit(session: &Session, id: LunId) -> Result<Unit, LunError> {
    let url = session
        .url()
        .clone()
        .with_lun(u16::try_from(id.number()).ok());
    let mut unit = Unit {
        lun: id.number(),
        url: url.to_string(),
        vendor: String::new(),
        product: String::new(),
        revision: String::new(),
        capacity: None,
        block_size: None,
        read_only: None,
        protection: None,
        error: None,
        exit: None,
    };
    let description = task::block_on(session.inquiry(id)).and_then(|inquiry| {
        unit.vendor = inquiry.vendor.trim().to_owned();
        unit.product = inquiry.product.trim().to_owned();
        unit.revision = inquiry.revision.trim().to_owned();
        task::block_on(session.lun(id.number()))
    });
    match description {
        Ok(lun) => {
            let LunInfo {
                capacity,
                caching,
                protection,
                ..
            } = lun.info();
            unit.capacity = Some(capacity.blocks * u64::from(capacity.block_size));
            unit.block_size = Some(capacity.block_size);
            unit.read_only = Some(caching.write_protected);
            unit.protection = *protection;
        }
        // Tapes, enclosures and well-known units are included without a size.
        Err(LunError::NotADisk(_)) => {}
        Err(error @ LunError::Request(RequestError::Closed)) => return Err(error),
        Err(error) => {
            unit.error = Some(error.to_string());
            unit.exit = Some(lun_failed(String::new(), error).exit);
        }
    }
    Ok(unit)
}
