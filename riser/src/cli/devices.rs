//! `riser devices`: lists local addresses and devices for connections to targets.

use riser_transport::host::Host;

use super::args::Global;
use super::exit::CliError;
use super::output;

pub(super) fn run(global: &Global) -> Result<(), CliError> {
    let host =
        Host::query().map_err(|e| CliError::io("cannot list the addresses of this host", e))?;
    output::result(&host, global, |out| writeln!(out, "{host}"))
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
        let json = serde_json::to_value(&host).unwrap();
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
        let json = serde_json::to_value(&host).unwrap();
        assert_eq!(
            json["rdma_core"],
            serde_json::json!({
                "devices": [{ "name": "rxe0", "active": true, "addresses": ["10.0.0.1"] }],
            })
        );
    }
}
