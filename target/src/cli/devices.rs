//! RDMA devices and addresses that can be used by portals on this host.

use std::io;

use riser_transport::host::Host;
use riser_transport::rdma_core::DeviceSummary;
use serde_json::json;

use super::ask::Output;

pub(super) fn devices(output: Output) -> io::Result<String> {
    let host = Host::query()?;
    if output != Output::Json {
        return Ok(host.to_string());
    }
    let list: Vec<_> = host
        .interfaces
        .iter()
        .map(|i| {
            json!({
                "interface": i.name,
                "address": i.address.to_string(),
                "mtu": i.mtu,
                "path_mtu": i.path_mtu(),
            })
        })
        .collect();
    let rdma_core = rdma_core_json(&host.rdma_core);
    Ok(json!({ "roce": list, "rdma": host.kernel, "rdma_core": rdma_core }).to_string())
}

fn rdma_core_json(usable: &Result<Vec<DeviceSummary>, String>) -> serde_json::Value {
    match usable {
        Err(why) => json!({ "devices": [], "unavailable": why }),
        Ok(devices) => {
            let devices = devices
                .iter()
                .map(|d| json!({ "name": d.name, "active": d.active, "addresses": d.addrs }));
            json!({ "devices": devices.collect::<Vec<_>>() })
        }
    }
}
