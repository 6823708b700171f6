//! Options of `riser bench wire`.

use std::net::IpAddr;
use std::time::Duration;

use super::units;

/// Arguments of `riser bench wire`.
#[derive(Clone, Debug, clap::Args)]
pub struct WireArgs {
    /// Respond to measurements by another host at this local address, until a signal is received
    #[arg(long, value_name = "IP", conflicts_with_all = ["to", "runtime", "warm_up", "mtu"])]
    pub listen: Option<IpAddr>,
    /// Measure the network to the responder at this address, instead of loopback on this machine
    #[arg(long, value_name = "IP")]
    pub to: Option<IpAddr>,
    /// Use this local address [default: the source address of the route]
    #[arg(long, value_name = "IP", requires = "to")]
    pub addr: Option<IpAddr>,
    /// Set the maximum payload of a packet: 256, 512, 1024, 2048 or 4096 [default: the maximum of
    /// the interface]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u16>,
    /// Set the duration of each case
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = units::duration)]
    pub runtime: Duration,
    /// Set the warm-up time before each case
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = units::duration)]
    pub warm_up: Duration,
}
