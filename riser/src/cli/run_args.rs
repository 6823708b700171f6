//! Options of `riser run`.

use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueHint;
use riser_transport::roce::RoceFaults;
use riser_transport::roce::fault::FaultsError;

/// Maximum length of an RDMA device name, excluding the terminating NUL (`IBV_SYSFS_NAME_MAX`).
const NAME_MAX: usize = 63;

/// Arguments of `riser run`.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// Create a device for each of these comma-separated local addresses, named riser0, riser1 and
    /// so on [default: the devices in RISER_DEVICES, or riser0 at 127.0.0.1]
    #[arg(long, value_name = "IP", value_delimiter = ',', value_parser = ip)]
    pub addr: Vec<IpAddr>,
    /// Create a device with this name and local address; can be repeated and combined with --addr.
    /// Additional comma-separated addresses are used for alternate paths of its connections
    #[arg(long, value_name = "NAME=IP[,IP...]")]
    pub device: Vec<Device>,
    /// Inject faults: a comma-separated list of loss, duplication, corruption and reorder, each as
    /// a percentage of packets sent and received, and seed
    #[arg(long, value_name = "FAULTS", env = "RISER_INJECT", value_parser = faults)]
    pub inject: Option<String>,
    /// Capture all packets: each process writes to FILE.PID, and to FILE.NAME.PID for all devices
    /// except the first
    #[arg(long, value_name = "FILE", env = "RISER_PCAP")]
    pub pcap: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        required = true,
        value_name = "COMMAND",
        value_hint = ValueHint::CommandWithArguments,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<OsString>,
}

/// Parses an address.
fn ip(text: &str) -> Result<IpAddr, String> {
    let wrong = |_| format!("`{text}` is not an IP address; host names are not resolved");
    text.parse().map_err(wrong)
}

/// Validates faults. The library uses the same parser.
fn faults(text: &str) -> Result<String, FaultsError> {
    text.parse::<RoceFaults>().map(|_| text.to_owned())
}

/// An RDMA device for the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name as shown by `ibv_devices`.
    pub name: String,
    /// One or more local addresses.
    pub addrs: Vec<IpAddr>,
}

impl FromStr for Device {
    type Err = String;

    /// Parses `NAME=IP` or `NAME=IP,IP,…`.
    fn from_str(text: &str) -> Result<Self, String> {
        let pair = text.split_once('=');
        let (name, addrs) = pair.ok_or_else(|| format!("`{text}` is not NAME=IP"))?;
        // Programs use names as part of paths, and we also use them in a comma-separated list.
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if !(1..=NAME_MAX).contains(&name.len())
            || !name.chars().all(is_allowed)
            || name.starts_with('.')
        {
            return Err(format!(
                "invalid device name `{name}`: expected 1 to {NAME_MAX} letters, digits, `_`, `-` \
                 and `.`"
            ));
        }
        Ok(Self {
            name: name.to_owned(),
            addrs: addrs.split(',').map(ip).collect::<Result<_, _>>()?,
        })
    }
}

/// Parses a list of devices, `NAME=IP,…`.
///
/// # Errors
/// Returns the first error of parsing a device.
pub(super) fn parse_devices(list: &str) -> Result<Vec<Device>, String> {
    let mut devices: Vec<String> = Vec::new();
    for part in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        match devices.last_mut() {
            // Additional address of the same device.
            Some(device) if !part.contains('=') => {
                device.push(',');
                device.push_str(part);
            }
            _ => devices.push(part.to_owned()),
        }
    }
    devices.iter().map(|device| device.parse()).collect()
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addrs: Vec<_> = self.addrs.iter().map(IpAddr::to_string).collect();
        write!(f, "{}={}", self.name, addrs.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        let refused = |text: &str| text.parse::<Device>().unwrap_err();
        assert!(refused("=::1").contains("name"));
        assert!(refused("a/b=::1").contains("name"));
        assert!(refused("..=::1").contains("name"));
        assert!(refused(&format!("{}=::1", "x".repeat(64))).contains("63"));
        assert!(format!("{}=::1", "x".repeat(63)).parse::<Device>().is_ok());
        assert!(refused("a=localhost").contains("`localhost` is not an IP address"));
        assert!(refused("a=::1,").contains("`` is not an IP address"));
    }
}
