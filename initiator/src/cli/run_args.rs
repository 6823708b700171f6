//! Options of `riser run`.

use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueHint;
use riser_transport::roce::RoceFaults;
use riser_transport::roce::fault::FaultsError;

/// Longest name of an RDMA device, without the zero that ends it (`IBV_SYSFS_NAME_MAX`).
const NAME_MAX: usize = 63;

/// Arguments of `riser run`.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// Addresses of this host, with commas between them: each gets a device, riser0, riser1 and so on
    /// [default: the devices in RISER_DEVICES, or else riser0 at 127.0.0.1]
    #[arg(long, value_name = "IP", value_delimiter = ',', value_parser = ip)]
    pub addr: Vec<IpAddr>,
    /// A device with this name, at this address of this host; may be repeated, and goes with --addr.
    /// Further addresses, after commas, are for alternate paths of its connections
    #[arg(long, value_name = "NAME=IP[,IP...]")]
    pub device: Vec<Device>,
    /// Inject faults: a comma-separated list of loss, duplication, corruption and reorder, each in
    /// percent of the packets sent and of those received, and seed
    #[arg(long, value_name = "FAULTS", env = "RISER_INJECT", value_parser = faults)]
    pub inject: Option<String>,
    /// Capture all packets: each process writes to FILE.PID, and those of devices after the first
    /// one to FILE.NAME.PID
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

/// Reads an address.
fn ip(text: &str) -> Result<IpAddr, String> {
    let wrong = |_| format!("`{text}` is not an IP address; names of hosts are not looked up");
    text.parse().map_err(wrong)
}

/// Checks faults, which the library then reads in the same way.
fn faults(text: &str) -> Result<String, FaultsError> {
    text.parse::<RoceFaults>().map(|_| text.to_owned())
}

/// A device that a program is to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name as in `ibv_devices`.
    pub name: String,
    /// Its addresses, one or more of this host's.
    pub addrs: Vec<IpAddr>,
}

impl FromStr for Device {
    type Err = String;

    /// Reads `NAME=IP`, or `NAME=IP,IP` and so on.
    fn from_str(text: &str) -> Result<Self, String> {
        let pair = text.split_once('=');
        let (name, addrs) = pair.ok_or_else(|| format!("`{text}` is not NAME=IP"))?;
        // Names become parts of paths in programs, and of a list with commas here.
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if !(1..=NAME_MAX).contains(&name.len())
            || !name.chars().all(is_allowed)
            || name.starts_with('.')
        {
            return Err(format!(
                "`{name}` is not a device's name: 1 to {NAME_MAX} letters, digits, `_`, `-` and `.`"
            ));
        }
        Ok(Self {
            name: name.to_owned(),
            addrs: addrs.split(',').map(ip).collect::<Result<_, _>>()?,
        })
    }
}

/// Reads the devices of a list, `NAME=IP,…`.
///
/// # Errors
/// Those of reading a device.
pub(super) fn parse_devices(list: &str) -> Result<Vec<Device>, String> {
    let mut devices: Vec<String> = Vec::new();
    for part in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        match devices.last_mut() {
            // One more address of the same device.
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
