//! A host's offer for a program that wants an RDMA device, as text: addresses for the software
//! NIC, and the devices behind rdma-core, or why there are none.

use std::error::Error;
use std::fmt;
use std::io;

use crate::netif::{Interface, interfaces};
use crate::rdma_core::{self, DeviceSummary};

/// Addresses and devices of a host. The text form names the provider on each of its lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Addresses that the software NIC can have.
    pub interfaces: Vec<Interface>,
    /// Names of the RDMA devices that the kernel has.
    pub kernel: Vec<String>,
    /// The devices that libibverbs finds, or why there are none.
    pub rdma_core: Result<Vec<DeviceSummary>, String>,
}

impl Host {
    /// Looks at this host.
    ///
    /// # Errors
    /// The addresses cannot be listed.
    pub fn look() -> io::Result<Self> {
        let found = rdma_core::devices().map_err(|e| with_causes(&rdma_core::OpenError::from(e)));
        let some = |devices: Vec<DeviceSummary>| match devices.is_empty() {
            true => Err("the kernel has none".to_owned()),
            false => Ok(devices),
        };
        Ok(Self {
            interfaces: interfaces()?,
            kernel: rdma_devices(),
            rdma_core: found.and_then(some),
        })
    }
}

/// An error and what it came from, on one line.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some errors say their cause themselves.
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
        writeln!(f, "roce, the software NIC, can have:")?;
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
            Err(why) => write!(f, "rdma_core: no devices, because {why}"),
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

/// Names of the RDMA devices that the kernel has, sorted; empty where it has no RDMA.
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
    fn a_host_says_what_it_has_and_why_it_lacks_the_rest() {
        let mut host = Host {
            interfaces: vec![Interface {
                name: "eth0".into(),
                address: IpAddr::from([192, 0, 2, 1]),
                mtu: Some(1500),
            }],
            kernel: vec![],
            rdma_core: Err("rdma-core is not installed: libibverbs.so.1: not found".into()),
        };
        let expected = "roce, the software NIC, can have:\n  \
            192.0.2.1                               eth0            path MTU up to 1024\n\
            RDMA devices of the kernel: none\n\
            rdma_core: no devices, because rdma-core is not installed: libibverbs.so.1: not found";
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
