//! `riser rping`: RDMA pings compatible with `rping` from rdma-core.

use std::net::SocketAddr;

use riser_transport::iwarp::{Iwarp, IwarpConfig};
use riser_transport::rdma_core::RdmaCoreDevice;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::shm::{Shm, ShmConfig};
use riser_transport::verbs::Provider;
use serde::Serialize;

use super::args::{Global, ProviderChoice, Rping};
use super::exit::{CliError, Exit};
use super::output;
use crate::rping::{self, Options, RpingError};

#[derive(Serialize)]
struct Document {
    device: String,
    pings: u64,
    bytes: u64,
    seconds: f64,
}

pub(super) fn run(verb: &Rping, global: &Global) -> Result<(), CliError> {
    let (Rping::Client { args, .. } | Rping::Server { args }) = verb;
    let mut device = open(verb)?;
    let (count, size) = match verb {
        Rping::Client { .. } => (10, 64),
        // The number and size of pings are selected by the client. By default, a server accepts
        // pings of up to 64 KiB until the client disconnects.
        Rping::Server { .. } => (0, 64 << 10),
    };
    let options = Options {
        count: args.count.unwrap_or(count),
        size: args.size.unwrap_or(size) as usize,
        timeout: global.timeout,
    };
    let report = match verb {
        Rping::Client { server, .. } => {
            let server = SocketAddr::new(*server, args.port);
            rping::client(device.as_mut(), server, &options)
        }
        Rping::Server { .. } => {
            let listen = SocketAddr::new(args.addr, args.port);
            let on_ready = |at| tracing::info!(%at, "listening");
            rping::server(device.as_mut(), listen, &options, on_ready)
        }
    };
    let report = report.map_err(failed)?;
    let document = Document {
        device: device.device_attr().name.clone(),
        pings: report.pings,
        bytes: report.bytes,
        seconds: report.elapsed.as_secs_f64(),
    };
    output::result(&document, global, |out| {
        writeln!(
            out,
            "{} pings over {}, {} bytes each way, all as sent, in {:.3} s",
            document.pings, document.device, document.bytes, document.seconds
        )
    })
}

fn open(verb: &Rping) -> Result<Box<dyn Provider>, CliError> {
    let (Rping::Client { args, .. } | Rping::Server { args }) = verb;
    let what = || format!("cannot find an RDMA device at {}", args.addr);
    if args.provider == ProviderChoice::Shm {
        let config = match verb {
            Rping::Client { .. } => Ok(ShmConfig::new(args.addr)),
            Rping::Server { .. } => ShmConfig::listening(args.addr),
        };
        let device = config.and_then(Shm::open);
        let device = device.map_err(|e| CliError::new(Exit::Failure, what()).because(e))?;
        return Ok(Box::new(device));
    }
    if args.provider == ProviderChoice::Iwarp {
        let device = Iwarp::open(IwarpConfig::new(args.addr));
        let device = device.map_err(|e| CliError::new(Exit::Failure, what()).because(e))?;
        return Ok(Box::new(device));
    }
    if args.provider != ProviderChoice::Roce {
        match RdmaCoreDevice::open(args.addr) {
            Ok(device) => return Ok(Box::new(device)),
            Err(e) if args.provider == ProviderChoice::RdmaCore => {
                return Err(CliError::new(Exit::Failure, what()).because(e));
            }
            Err(error) => tracing::info!(%error, "using the software NIC"),
        }
    }
    let device = Roce::open(&RoceConfig::new(args.addr));
    Ok(Box::new(device.map_err(|e| {
        CliError::new(Exit::Failure, what()).because(e)
    })?))
}

fn failed(e: RpingError) -> CliError {
    let exit = match &e {
        RpingError::Size(_) => Exit::Usage,
        RpingError::Rejected(_) => Exit::Refused,
        RpingError::Timeout(_) => Exit::Timeout,
        _ => Exit::Failure,
    };
    CliError::new(exit, "the pings failed").because(e)
}
