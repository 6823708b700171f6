//! RDMA devices and addresses that can be used by portals on this host.

use std::io;

use riser_transport::host::Host;

use super::request::Output;

pub(super) fn devices(output: Output) -> io::Result<String> {
    let host = Host::query()?;
    match output {
        Output::Text => Ok(host.to_string()),
        Output::Json => Ok(serde_json::to_string(&host)?),
    }
}
