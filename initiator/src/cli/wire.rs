//! `riser bench wire`: what this machine or network carries in packets of RoCEv2.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::args::Global;
use super::disk::route_source;
use super::exit::{CliError, Exit};
use super::{output, units};
use crate::bench::wire::{Responder, WireConfig, WireError, measure, measure_loopback};

/// Arguments of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct WireArgs {
    /// Answer another host's measurement at this local address, until a signal
    #[arg(long, value_name = "IP", conflicts_with_all = ["to", "runtime", "warm_up", "mtu"])]
    pub listen: Option<IpAddr>,
    /// Measure the way to the host that listens at this address, instead of this machine's loopback
    #[arg(long, value_name = "IP")]
    pub to: Option<IpAddr>,
    /// Local address [default: that of the route]
    #[arg(long, value_name = "IP", requires = "to")]
    pub addr: Option<IpAddr>,
    /// Longest payload of a packet: 256, 512, 1024, 2048 or 4096 [default: the largest that the
    /// interface carries]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u16>,
    /// Time of each case
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = units::duration)]
    pub runtime: Duration,
    /// Time of each case before it is measured
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = units::duration)]
    pub warm_up: Duration,
}

/// Carries out the measurement, or answers one.
///
/// # Errors
/// Those of [`WireError`], with their exit status.
pub(super) fn run(args: &WireArgs, global: &Global) -> Result<(), CliError> {
    if let Some(addr) = args.listen {
        let mut responder = Responder::open(addr).map_err(failed)?;
        tracing::warn!("listening at {addr}; measure with `riser bench wire --to {addr}`");
        responder.run(&AtomicBool::new(false));
        return Ok(());
    }
    let config = WireConfig {
        runtime: args.runtime,
        warm_up: args.warm_up,
        path_mtu: args.mtu,
    };
    let report = match args.to {
        None => measure_loopback(config),
        Some(peer) => {
            let local = match args.addr {
                Some(addr) => addr,
                None => route_source(SocketAddr::new(peer, 1))?,
            };
            measure(local, peer, config)
        }
    };
    let report = report.map_err(failed)?;
    output::result(&report, global, |out| write!(out, "{}", report.table()))
}

fn failed(error: WireError) -> CliError {
    let exit = match &error {
        WireError::Family(..) | WireError::SameAddress(_) | WireError::PathMtu(_) => Exit::Usage,
        WireError::NoAnswer(_) | WireError::Nothing(..) => Exit::Timeout,
        WireError::NoAddress => Exit::Busy,
        WireError::Open { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
            Exit::Busy
        }
        _ => Exit::Failure,
    };
    CliError::new(exit, "the wire was not measured").because(error)
}
