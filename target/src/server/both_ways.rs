//! Detects an address that is served by two processes: over the network and via shared memory.
//!
//! Nothing prevents this, because the address does not identify a process. `riser --provider auto`
//! on this host would use the process that shares memory, but other hosts would use the process on
//! the network.

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
    /// Logs a warning for other processes that serve the addresses of our RDMA portals.
    pub fn warn_of_other_servers(&self) {
        if self.network.is_some() {
            return;
        }
        if let Some(warning) = descriptors(&self.config.transport, shm::refuses_descriptors()) {
            tracing::warn!("{warning}");
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

/// Returns a warning if another process serves an address of this server.
fn other_server(transport: &Transport, addr: IpAddr) -> Option<String> {
    if transport.provider == Provider::Shm {
        let at = SocketAddr::new(addr, ROCE_PORT);
        let error = check_free(at, holder::Transport::Udp).err()?;
        // Other errors do not mean that there is another process.
        let is_in_use = error.kind() == io::ErrorKind::AddrInUse;
        let holder = is_in_use.then(|| holder_of(&error, at, holder::Transport::Udp))?;
        return Some(format!(
            "UDP port {ROCE_PORT} of {addr} is used by another process{holder}; if it is a target, \
             `riser --provider auto` on this host connects to this daemon instead"
        ));
    }
    // Otherwise, we have the name, or it is already reported as a problem.
    let process = (!transport.shm).then(|| shm::listening_process(addr))??;
    Some(squatter(process.uid, &process.to_string(), addr))
}

/// Returns the warning for a process that owns the shared memory name for an address. `riser`
/// checks the user of that process.
fn squatter(uid: Option<u32>, process: &str, addr: IpAddr) -> String {
    let own = rustix::process::geteuid().as_raw();
    let has_name = format!("{process} owns the name for shared memory at {addr}");
    let auto = "`riser --provider auto` on this host";
    match uid {
        None => format!(
            "{has_name}; if it runs as root or as our user, {auto} connects to it instead of this \
             daemon"
        ),
        Some(uid) if uid == 0 || uid == own => {
            format!("{has_name}; {auto} connects to it instead of this daemon")
        }
        Some(_) => {
            format!(
                "{has_name}; {auto} only connects to it as that user, or if that user is `riser`"
            )
        }
    }
}

/// Returns a warning if we share memory, but other processes can send descriptors that the kernel
/// cannot reject.
fn descriptors(transport: &Transport, are_refused: bool) -> Option<&'static str> {
    let shares = transport.shm || transport.provider == Provider::Shm;
    (shares && !are_refused).then_some(
        "kernels older than Linux 6.16 cannot reject descriptors sent by other processes: any \
         local user can block shared memory and prevent this daemon from terminating, which keeps \
         its addresses and locks in use even after SIGKILL; only share memory on hosts without \
         untrusted local users",
    )
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
    fn other_process_at_address_causes_warning() {
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
        // The process has the same user ID.
        let warning = other_server(&transport("{ provider: roce }"), shared).unwrap();
        assert!(warning.contains("instead of this daemon"), "{warning}");
        // It owns the name itself.
        assert_eq!(other_server(&transport("{ shm: true }"), shared), None);
    }

    #[test]
    fn squatter_of_other_user_is_not_reached() {
        let addr = IpAddr::from([127, 97, 9, 4]);
        let own = rustix::process::geteuid().as_raw();
        let other = if own == 54_321 { 54_322 } else { 54_321 };
        for (uid, is_reached) in [(0, true), (own, true), (other, false)] {
            let warning = squatter(Some(uid), "a process", addr);
            assert_eq!(
                warning.contains("instead of this daemon"),
                is_reached,
                "{warning}"
            );
            assert!(warning.starts_with("a process owns the name"), "{warning}");
            assert!(warning.contains("127.97.9.4"), "{warning}");
        }
    }

    #[test]
    fn shared_memory_on_old_kernel_causes_warning() {
        for text in ["{ shm: true }", "{ provider: shm }"] {
            let warning = descriptors(&transport(text), false).unwrap();
            assert!(warning.contains("untrusted local users"), "{warning}");
            assert_eq!(descriptors(&transport(text), true), None, "{text}");
        }
        assert_eq!(descriptors(&transport("{ provider: roce }"), false), None);
    }
}
