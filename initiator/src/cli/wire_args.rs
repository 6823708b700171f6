//! Options of `riser bench wire`.

use std::net::IpAddr;
use std::time::Duration;

use super::units;

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
