//! Report of the RDMA support on a host, as text or JSON: addresses for the software NIC, and the
//! devices available via rdma-core, or the reason if not available.

use std::error::Error;
use std::fmt;
use std::io;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::netif::{Interface, interfaces};
use crate::rdma_core::{self, DeviceSummary};

/// Addresses and devices of a host. Each line of the text format contains the provider name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Host {
    /// Addresses that can be used by the software NIC.
    #[serde(rename = "roce")]
    pub interfaces: Vec<Interface>,
    /// RDMA device names known by the kernel.
    #[serde(rename = "rdma")]
    pub kernel: Vec<String>,
    /// Devices found by libibverbs, or the reason if not available.
    #[serde(serialize_with = "serialize_devices")]
    pub rdma_core: Result<Vec<DeviceSummary>, String>,
}

impl Host {
    /// Collects the information for this host.
    ///
    /// # Errors
    /// Returns an error if the addresses cannot be listed.
    pub fn query() -> io::Result<Self> {
        let found = rdma_core::devices().map_err(|e| with_causes(&rdma_core::OpenError::from(e)));
        let some = |devices: Vec<DeviceSummary>| match devices.is_empty() {
            true => Err("the kernel has no RDMA devices".to_owned()),
            false => Ok(devices),
        };
        Ok(Self {
            interfaces: interfaces()?,
            kernel: rdma_devices(),
            rdma_core: found.and_then(some),
        })
    }
}

fn serialize_devices<S: Serializer>(
    found: &Result<Vec<DeviceSummary>, String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut fields = serializer.serialize_struct("RdmaCore", 2)?;
    fields.serialize_field("devices", found.as_deref().unwrap_or_default())?;
    match found {
        Ok(_) => fields.skip_field("unavailable")?,
        Err(why) => fields.serialize_field("unavailable", why)?,
    }
    fields.end()
}

/// Formats an error and its causes on a single line.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some error messages already include the cause.
        let said = error.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "roce, the software NIC, supports:")?;
        for i in &self.interfaces {
            let mtu = i
                .path_mtu()
                .map_or("unknown".into(), |m| format!("up to {m}"));
            let address = i.address.to_string();
            writeln!(f, "  {address:<39} {:<15} path MTU {mtu}", i.name)?;
        }
        match self.kernel.as_slice() {
            [] => writeln!(f, "RDMA devices of the kernel: none")?,
            names => writeln!(f, "RDMA devices of the kernel: {}", names.join(", "))?,
        }
        match &self.rdma_core {
            Err(why) => write!(f, "rdma_core: no devices: {why}"),
            Ok(devices) => {
                let line = |d: &DeviceSummary| {
                    let addrs: Vec<_> = d.addrs.iter().map(ToString::to_string).collect();
                    let state = if d.active { "" } else { ", not active" };
                    format!("rdma_core: {} at {}{state}", d.name, addrs.join(", "))
                };
                let lines: Vec<_> = devices.iter().map(line).collect();
                write!(f, "{}", lines.join("\n"))
            }
        }
    }
}

/// Returns the sorted names of RDMA devices known by the kernel. This is empty if the kernel has no
/// RDMA support.
#[must_use]
pub fn rdma_devices() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn host_lists_devices_and_reasons() {
        let mut host = Host {
            interfaces: vec![Interface {
                name: "eth0".into(),
                address: IpAddr::from([192, 0, 2, 1]),
                mtu: Some(1500),
            }],
            kernel: vec![],
            rdma_core: Err("rdma-core is not installed: libibverbs.so.1: not found".into()),
        };
        let expected = "roce, the software NIC, supports:\n  \
            192.0.2.1                               eth0            path MTU up to 1024\n\
            RDMA devices of the kernel: none\n\
            rdma_core: no devices: rdma-core is not installed: libibverbs.so.1: not found";
        assert_eq!(host.to_string(), expected);
        host.kernel = vec!["rxe0".into(), "rxe1".into()];
        let device = |name: &str, active| DeviceSummary {
            name: name.into(),
            guid: 1,
            active,
            addrs: vec![[192, 0, 2, 1].into(), "fd99::1".parse().unwrap()],
        };
        host.rdma_core = Ok(vec![device("rxe0", true), device("rxe1", false)]);
        let text = host.to_string();
        let tail: Vec<_> = text.lines().skip(2).collect();
        assert_eq!(
            tail,
            [
                "RDMA devices of the kernel: rxe0, rxe1",
                "rdma_core: rxe0 at 192.0.2.1, fd99::1",
                "rdma_core: rxe1 at 192.0.2.1, fd99::1, not active",
            ]
        );
    }
}
