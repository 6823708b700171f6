//! `riser bench wire`: measures the limits of this machine or network for RoCEv2 packets.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

use riser_bench::wire::{Responder, WireConfig, WireError, measure, measure_loopback};

use super::args::Global;
use super::disk::route_source;
use super::exit::{CliError, Exit};
use super::output;
use super::wire_args::WireArgs;

/// Runs the measurement, or responds to another host.
///
/// # Errors
/// Returns [`WireError`] with the corresponding exit status.
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
        WireError::NoResponse(_) | WireError::Nothing(..) => Exit::Timeout,
        WireError::NoAddress => Exit::Busy,
        WireError::Open { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
            Exit::Busy
        }
        _ => Exit::Failure,
    };
    CliError::new(exit, "cannot measure the wire").because(error)
}
