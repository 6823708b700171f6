//! `riser devices`: lists local addresses and devices for connections to targets.

use std::net::IpAddr;

use riser_transport::host::Host;
use serde::Serialize;

use super::args::Global;
use super::exit::CliError;
use super::output;

/// This uses the same format as `riserd devices -o json`.
#[derive(Serialize)]
struct Document<'a> {
    roce: Vec<Interface<'a>>,
    rdma: &'a [String],
    rdma_core: RdmaCore<'a>,
}

#[derive(Serialize)]
struct Interface<'a> {
    interface: &'a str,
    address: IpAddr,
    mtu: Option<u32>,
    path_mtu: Option<u16>,
}

#[derive(Serialize)]
struct RdmaCore<'a> {
    devices: Vec<Device<'a>>,
    /// Reason why there are no devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<&'a str>,
}

#[derive(Serialize)]
struct Device<'a> {
    name: &'a str,
    active: bool,
    addresses: &'a [IpAddr],
}

pub(super) fn run(global: &Global) -> Result<(), CliError> {
    let host =
        Host::query().map_err(|e| CliError::io("cannot list the addresses of this host", e))?;
    output::result(&document(&host), global, |out| writeln!(out, "{host}"))
}

fn document(host: &Host) -> Document<'_> {
    let roce = host.interfaces.iter().map(|i| Interface {
        interface: &i.name,
        address: i.address,
        mtu: i.mtu,
        path_mtu: i.path_mtu(),
    });
    let devices = host.rdma_core.as_deref().unwrap_or_default().iter();
    let devices = devices.map(|d| Device {
        name: &d.name,
        active: d.active,
        addresses: &d.addrs,
    });
    Document {
        roce: roce.collect(),
        rdma: &host.kernel,
        rdma_core: RdmaCore {
            devices: devices.collect(),
            unavailable: host.rdma_core.as_ref().err().map(String::as_str),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn document_reports_unavailable_devices() {
        let mut host = Host {
            interfaces: vec![riser_transport::netif::Interface {
                name: "lo".into(),
                address: [127, 0, 0, 1].into(),
                mtu: Some(65_536),
            }],
            kernel: vec!["rxe0".into()],
            rdma_core: Err("because".into()),
        };
        let json = serde_json::to_value(document(&host)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "roce": [
                    { "interface": "lo", "address": "127.0.0.1", "mtu": 65_536, "path_mtu": 4096 },
                ],
                "rdma": ["rxe0"],
                "rdma_core": { "devices": [], "unavailable": "because" },
            })
        );
        host.rdma_core = Ok(vec![riser_transport::rdma_core::DeviceSummary {
            name: "rxe0".into(),
            guid: 1,
            active: true,
            addrs: vec![[10, 0, 0, 1].into()],
        }]);
        let json = serde_json::to_value(document(&host)).unwrap();
        assert_eq!(
            json["rdma_core"],
            serde_json::json!({
                "devices": [{ "name": "rxe0", "active": true, "addresses": ["10.0.0.1"] }],
            })
        );
    }
}
