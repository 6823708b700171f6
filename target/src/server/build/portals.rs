//! Portal addresses: addresses of the host on which we can listen.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::Builder;
use crate::config::{Config, Listen};
use crate::server::ServerError;
use crate::server::addresses::Expansion;
use crate::server::problems::Subject;

impl Builder {
    /// Returns true if this is a portal of a wildcard that was used before, whose addresses may
    /// change.
    pub(super) fn is_of_known_wildcard(&self, subject: &Subject) -> bool {
        match subject {
            Subject::Backend(_)
            | Subject::SharedMemory(_)
            | Subject::Metrics(_)
            | Subject::Admin(_)
            | Subject::Identities => false,
            Subject::RdmaPortal(at) => !self.has_new_wildcards && self.expansion.is_wild(*at, true),
            Subject::TcpPortal(at) => !self.has_new_wildcards && self.expansion.is_wild(*at, false),
            Subject::Wildcard(listen, protocol) => self.wildcards.contains(&(*protocol, *listen)),
        }
    }

    /// Lists the current addresses of the host, and retries to read unit names.
    pub(in crate::server) fn refresh_addresses(&mut self, config: &Config) {
        self.addresses.refresh(config);
        self.read_identities_again(config);
    }

    /// Returns true if the portal addresses of the current configuration have changed.
    pub(in crate::server) fn is_elsewhere(&self, config: &Config) -> bool {
        Expansion::of(config, &self.addresses, &self.expansion) != self.expansion
    }

    /// Expands the portals of a configuration.
    pub(super) fn expand(&mut self, config: &Config) -> Result<(), ServerError> {
        let expansion = Expansion::of(config, &self.addresses, &self.expansion);
        for (protocol, listen, why) in &expansion.lacking {
            let (listen, why) = (*listen, why.clone());
            let subject = Subject::Wildcard(listen, *protocol);
            let error = ServerError::Wildcard { listen, why };
            if !self.tolerates(&subject) {
                return Err(error);
            }
            self.problems.add(subject, &error);
        }
        let lacking = expansion.lacking.iter();
        let lacks: BTreeSet<_> = lacking.map(|(p, listen, _)| (*p, *listen)).collect();
        self.problems.retain(|subject| match subject {
            Subject::Wildcard(listen, protocol) => lacks.contains(&(*protocol, *listen)),
            _ => true,
        });
        let portals = config.targets.iter().flat_map(|target| &target.portals);
        let wild = portals.filter(|portal| portal.listen.at().is_none());
        let wild: BTreeSet<_> = wild
            .map(|portal| (portal.protocol, portal.listen))
            .collect();
        self.has_new_wildcards = !wild.is_subset(&self.wildcards);
        self.wildcards = wild;
        self.expansion = expansion;
        Ok(())
    }

    /// Returns the addresses of portals with a literal address or an interface.
    pub(in crate::server) fn named_portals(&self, config: &Config) -> Vec<(Subject, IpAddr)> {
        let targets = config.targets.iter().zip(&self.expansion.targets);
        let portals = targets.flat_map(|(target, listens)| {
            let portals = listens.iter();
            portals.map(|listens| (&target.portals[listens.portal], listens.at))
        });
        let named = portals.filter_map(|(portal, at)| match &portal.listen {
            Listen::At(_) => Some((Subject::portal(portal.protocol, at), at.ip())),
            Listen::Wildcard(wildcard, _) if wildcard.is_interface() => {
                let subject = Subject::Wildcard(portal.listen, portal.protocol);
                Some((subject, at.ip()))
            }
            Listen::Wildcard(..) => None,
        });
        named.collect()
    }

    /// Logs wildcard addresses that were added or removed since the previous builder.
    pub(in crate::server) fn log_addresses_since(&self, before: &Self) {
        self.expansion.log_since(&before.expansion);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::{TcpListener, UdpSocket};
    use std::path::{Path, PathBuf};
    use std::time::{Duration, Instant};

    use riser_transport::netif::Interface;
    use riser_transport::shm::{ShmListener, ShmUsers, query_listener};
    use riser_transport::wire::ROCE_PORT;

    use super::*;
    use crate::backend::open_all;
    use crate::server::handover::ServerState;
    use crate::server::reload::ChangeError;
    use crate::server::{Keepers, Server};

    /// A directory that is removed on drop.
    pub(in super::super) struct Dir(pub(in super::super) PathBuf);

    impl Dir {
        pub(in super::super) fn new(name: &str) -> Self {
            let name = format!("riserd-{name}-{}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir(&dir).unwrap();
            Self(dir)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Returns a configuration of a target with a missing disk file.
    fn config(dir: &Path, rest: &str, portals: &str) -> Config {
        let text = format!(
            "backends: {{ a: {{ kind: file, path: {}/a, size: 1MiB }} }}\n\
             targets:\n\
             - name: t\n\
             \x20 iqn: iqn.2026-01.com.example:t\n\
             \x20 portals: [{portals}]\n\
             \x20 luns: {{ 0: a }}\n\
             \x20 access: open\n\
             workers: {{ count: 2 }}\n{rest}",
            dir.display()
        );
        Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}"))
    }

    pub(in super::super) fn retry(server: &mut Server) -> Result<(), ChangeError> {
        let opened = open_all(server.open_requests());
        server.retry(opened)
    }

    pub(in super::super) fn problems(server: &Server) -> Vec<Subject> {
        let problems = server.problems();
        problems
            .iter()
            .map(|(subject, _)| subject.clone())
            .collect()
    }

    /// Returns two portals. If the second is open, we cannot listen on the first, because its
    /// service ID is the same as for the port of the second (RDMA IP CM Service, InfiniBand
    /// Architecture Release 1.3 annex A11.2).
    fn rivals(listen: &str) -> String {
        format!(
            "{{ protocol: srp, listen: \"{listen}:5555\", service_guid: \"0x0000000001060cbd\" }}, \
             {{ protocol: iser, listen: \"{listen}:3261\" }}"
        )
    }

    #[test]
    fn unavailable_portal_does_not_affect_others() {
        let dir = Dir::new("unserved");
        let portals = format!(
            "{{ protocol: iscsi, listen: \"127.97.8.1:3290\" }}, {}",
            rivals("eth99")
        );
        let mut server = Server::start(&config(&dir.0, "", &portals)).unwrap();
        assert_eq!(problems(&server).len(), 3, "{:?}", server.problems());
        // Now the interface and the disk exist.
        let address: IpAddr = [127, 97, 8, 2].into();
        let name = "eth99".to_owned();
        let interface = Interface {
            name,
            address,
            mtu: None,
        };
        let addresses = &mut server.builder.addresses;
        addresses.observe(vec![interface], Instant::now());
        std::fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        retry(&mut server).unwrap();
        let unserved = Subject::RdmaPortal((address, 5555).into());
        assert_eq!(problems(&server), std::slice::from_ref(&unserved));
        let all = server.problems();
        let problem = all.of(&unserved).unwrap();
        assert!(problem.why.contains("cannot listen on"), "{}", problem.why);
        assert!(server.unit_on("a").unwrap().lu.has_medium());
        let served = server.addresses();
        assert!(served.contains(&(address, 3261).into()), "{served:?}");
        assert!(!served.contains(&(address, 5555).into()), "{served:?}");
        // The problem remains.
        assert!(server.check_resources());
        retry(&mut server).unwrap();
        assert_eq!(server.problems().of(&unserved), Some(problem));
        server.shutdown().unwrap();
    }

    #[test]
    fn start_continues_without_unavailable_portal() {
        let dir = Dir::new("unserved-start");
        std::fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        let portals = rivals("127.97.8.3");
        let mut server = Server::start(&config(&dir.0, "", &portals)).unwrap();
        let unserved = Subject::RdmaPortal("127.97.8.3:5555".parse().unwrap());
        assert_eq!(problems(&server), std::slice::from_ref(&unserved));
        assert_eq!(server.addresses(), ["127.97.8.3:3261".parse().unwrap()]);
        retry(&mut server).unwrap();
        assert_eq!(problems(&server), [unserved]);
        // The other portal is removed.
        let alone = portals.split(", {").next().unwrap().to_owned();
        server.change(config(&dir.0, "", &alone)).unwrap();
        retry(&mut server).unwrap();
        assert_eq!(problems(&server), []);
        assert_eq!(server.addresses(), ["127.97.8.3:5555".parse().unwrap()]);
        // A change is atomic.
        let error = server.change(config(&dir.0, "", &portals)).unwrap_err();
        assert!(error.to_string().contains("cannot listen on"), "{error}");
        server.shutdown().unwrap();
        let strict = config(&dir.0, "strict: true\n", &portals);
        let error = Server::start(&strict).unwrap_err();
        assert!(error.to_string().contains("cannot listen on"), "{error}");
    }

    /// Starts a server after the wait for the previous process has timed out.
    fn start_after_the_wait(config: &Config) -> Result<Server, ServerError> {
        let state = ServerState::default();
        Server::start_patiently(config, &state, Keepers::default(), Duration::from_nanos(1))
    }

    #[test]
    fn address_in_use_does_not_affect_others() {
        let dir = Dir::new("in-use");
        std::fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        let (tcp, rdma) = ("127.97.8.21:3290", "127.97.8.22:5555");
        let (tcp_at, rdma_at) = (tcp.parse().unwrap(), rdma.parse().unwrap());
        let taken = format!(
            "{{ protocol: iscsi, listen: \"{tcp}\" }}, {{ protocol: srp, listen: \"{rdma}\" }}"
        );
        let portals = format!("{taken}, {{ protocol: iscsi, listen: \"127.97.8.23:3290\" }}");
        let listener = TcpListener::bind(tcp).unwrap();
        let nic = UdpSocket::bind(("127.97.8.22", ROCE_PORT)).unwrap();
        let all = config(&dir.0, "", &portals);
        // The address may belong to the previous process.
        let error = Server::start(&all).unwrap_err();
        assert!(error.is_in_use(), "{error}");
        let strict = config(&dir.0, "strict: true\n", &portals);
        let error = start_after_the_wait(&strict).unwrap_err();
        assert!(error.is_in_use(), "{error}");
        let mut server = start_after_the_wait(&all).unwrap();
        let unserved = [Subject::RdmaPortal(rdma_at), Subject::TcpPortal(tcp_at)];
        assert_eq!(problems(&server), unserved);
        assert_eq!(server.addresses(), ["127.97.8.23:3290".parse().unwrap()]);
        retry(&mut server).unwrap();
        assert_eq!(problems(&server), unserved);
        drop((listener, nic));
        retry(&mut server).unwrap();
        assert_eq!(problems(&server), []);
        assert_eq!(server.addresses().len(), 3);
        // If no other portal is available, another daemon is using all of them.
        let error = start_after_the_wait(&config(&dir.0, "", &taken)).unwrap_err();
        assert!(error.is_in_use(), "{error}");
        server.shutdown().unwrap();
    }

    #[test]
    fn shared_memory_name_is_retried() {
        let dir = Dir::new("shm");
        std::fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        let addr = IpAddr::from([127, 97, 8, 24]);
        let portals = format!("{{ protocol: srp, listen: \"{addr}:5555\" }}");
        let taken = ShmListener::bind(addr).unwrap();
        let shared = "transport: { shm: true }\n";
        let all = config(&dir.0, shared, &portals);
        // The name may belong to the previous process.
        let error = Server::start(&all).unwrap_err();
        assert!(error.is_in_use(), "{error}");
        let strict = config(&dir.0, &format!("strict: true\n{shared}"), &portals);
        for wanted in [all, strict] {
            let mut server = start_after_the_wait(&wanted).unwrap();
            let unserved = [Subject::SharedMemory(addr)];
            assert_eq!(problems(&server), unserved);
            assert_eq!(server.addresses(), [(addr, 5555).into()]);
            retry(&mut server).unwrap();
            assert_eq!(problems(&server), unserved);
            server.shutdown().unwrap();
        }
        let mut server = start_after_the_wait(&config(&dir.0, shared, &portals)).unwrap();
        drop(taken);
        retry(&mut server).unwrap();
        assert_eq!(problems(&server), []);
        query_listener(addr, &ShmUsers::default()).unwrap();
        server.shutdown().unwrap();
    }

    #[test]
    fn used_shared_memory_name_delays_no_portal() {
        let dir = Dir::new("shm-taken");
        std::fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        let addr = IpAddr::from([127, 97, 8, 25]);
        let _taken = ShmListener::bind(addr).unwrap();
        let portals = format!("{{ protocol: srp, listen: \"{addr}:5555\" }}");
        let all = config(&dir.0, "transport: { shm: true }\n", &portals);
        let (begin, patience) = (Instant::now(), Duration::from_secs(120));
        let state = ServerState::default();
        let server = Server::start_patiently(&all, &state, Keepers::default(), patience).unwrap();
        assert!(begin.elapsed() < patience, "it has waited for the name");
        assert_eq!(problems(&server), [Subject::SharedMemory(addr)]);
        assert_eq!(server.addresses(), [(addr, 5555).into()]);
        server.shutdown().unwrap();
    }

    #[test]
    fn slow_disk_is_added_after_others() {
        let dir = Dir::new("partly");
        let portals = "{ protocol: iscsi, listen: \"127.97.8.8:3290\" }";
        let text = config(&dir.0, "", portals).to_yaml();
        let b = "\n  b: { kind: file, size: 1MiB, path: DIR/b }\n  a:";
        let b = b.replace("DIR", dir.0.to_str().unwrap());
        let text = text.replacen("\n  a:", &b, 1);
        let mut both = Config::parse(&text, "test.yaml").unwrap();
        let backend = both.backends.iter().position(|b| b.name == "b").unwrap();
        let lun = crate::config::Lun {
            backend,
            ..both.targets[0].luns[&0]
        };
        both.targets[0].luns.insert(1, lun);
        let mut server = Server::start(&both).unwrap();
        for name in ["a", "b"] {
            std::fs::write(dir.0.join(name), vec![0; 1 << 20]).unwrap();
        }
        let open_requests = server.open_requests();
        assert_eq!(open_requests.len(), 2);
        let (fast, slow): (Vec<_>, Vec<_>) =
            open_requests.into_iter().partition(|w| w.backend == "a");
        let has_medium = |server: &Server, name| server.unit_on(name).unwrap().lu.has_medium();
        server.retry(open_all(fast)).unwrap();
        assert!(has_medium(&server, "a") && !has_medium(&server, "b"));
        let problem = Subject::Backend("b".to_owned());
        let why = server.problems().of(&problem).unwrap().why.clone();
        assert!(why.contains("No such file"), "{why}");
        server.retry(open_all(slow)).unwrap();
        assert!(has_medium(&server, "b"));
        assert_eq!(problems(&server), []);
        server.shutdown().unwrap();
    }

    #[test]
    fn retry_ignores_unreadable_secret() {
        let dir = Dir::new("secret");
        let secret = dir.0.join("secret");
        std::fs::write(&secret, "a secret of enough bytes").unwrap();
        let user = format!(
            "discovery_chap: {{ users: [{{ name: u, secret_file: {} }}] }}\n",
            secret.display()
        );
        let portals = "{ protocol: iscsi, listen: \"127.97.8.4:3290\" }";
        let config = config(&dir.0, &user, portals);
        let mut server = Server::start(&config).unwrap();
        let before = server.shared().registry.catalog().discovery.clone();
        // The file is being written.
        std::fs::write(&secret, "another secret").unwrap();
        retry(&mut server).unwrap();
        assert_eq!(server.shared().registry.catalog().discovery, before);
        std::fs::remove_file(&secret).unwrap();
        std::fs::write(dir.0.join("a"), vec![0; 1 << 20]).unwrap();
        retry(&mut server).unwrap();
        assert_eq!(problems(&server), []);
        // If the configuration is applied again, the secret must be read.
        let error = server.change(config).unwrap_err();
        assert!(error.to_string().contains("the secret of u"), "{error}");
        server.shutdown().unwrap();
    }
}
