//! An address that two processes serve: one over the network, and one by shared memory.
//!
//! Neither keeps the other from its address, and an address names no process. So `riser --provider
//! auto` on this host reaches the one that shares memory, and other hosts the one on the network.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use riser_transport::shm;
use riser_transport::wire::ROCE_PORT;

use super::Server;
use super::acquire::{check_free, holder_of};
use crate::config::{Provider, Transport};
use crate::holder;

impl Server {
    /// Warns of other processes at the addresses of our RDMA portals.
    pub fn warn_of_other_servers(&self) {
        if self.network.is_some() {
            return;
        }
        let catalog = self.shared.registry.catalog();
        let addresses: BTreeSet<_> = catalog.rdma_portals().map(|portal| portal.ip()).collect();
        for addr in addresses {
            if let Some(warning) = other_server(&self.config.transport, addr) {
                tracing::warn!("{warning}");
            }
        }
    }
}

/// What is to be known about another process at an address that we serve.
fn other_server(transport: &Transport, addr: IpAddr) -> Option<String> {
    if transport.provider == Provider::Shm {
        let at = SocketAddr::new(addr, ROCE_PORT);
        let error = check_free(at, holder::Transport::Udp).err()?;
        // Any other error says nothing about a process.
        let is_in_use = error.kind() == io::ErrorKind::AddrInUse;
        let holder = is_in_use.then(|| holder_of(&error, at, holder::Transport::Udp))?;
        return Some(format!(
            "another process has UDP port {ROCE_PORT} of {addr}{holder}; if it is a target, `riser --provider \
             auto` on this host reaches this daemon in its place"
        ));
    }
    // Otherwise the name is ours, or reported as not served.
    let process = (!transport.shm).then(|| shm::listening_process(addr))??;
    Some(format!(
        "{process} shares memory at {addr}; `riser --provider auto` on this host reaches it in the place of \
         this daemon"
    ))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::config::Config;

    fn transport(text: &str) -> Transport {
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\ntargets:\n- name: t\n  \
             portals: [{{ protocol: srp, listen: 127.97.9.1 }}]\n  luns: {{ 0: a }}\n  \
             access: open\ntransport: {text}\nstate: {{ directory: none }}\n"
        );
        Config::parse(&text, "test.yaml").unwrap().transport
    }

    #[test]
    fn another_process_at_the_address_is_warned_of() {
        let [network, shared] = [1, 2].map(|last| IpAddr::from([127, 97, 9, last]));
        let _network = UdpSocket::bind((network, ROCE_PORT)).unwrap();
        let _shared = shm::ShmListener::bind(shared).unwrap();
        for (text, other, none) in [
            ("{ provider: shm }", network, shared),
            ("{ provider: roce }", shared, network),
        ] {
            let transport = transport(text);
            let warning = other_server(&transport, other).unwrap();
            assert!(warning.contains(&other.to_string()), "{warning}");
            assert_eq!(other_server(&transport, none), None, "{text}");
        }
        // The name is its own.
        assert_eq!(other_server(&transport("{ shm: true }"), shared), None);
    }
}
