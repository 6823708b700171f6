//! Tries to open the resources of a configuration on this host.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::SystemTime;

use riser_admin_api::view::ProblemView;
use riser_scsi::iscsi::login::Auth;
use riser_transport::shm::ShmListener;
use serde::Serialize;

use super::image;
use crate::backend::{Source, open_in_time};
use crate::config::{Access, Backend, Chap, ChapUser, Config, Protocol, Provider};
use crate::control::report;
use crate::control::view::seconds;
use crate::server::addresses::Expansion;
use crate::server::build::check_own;
use crate::server::problems::NOT_SERVED;
use crate::units::bytes;

/// Results of opening all backends and portals, and of reading all secrets.
#[derive(Debug, Default, Serialize)]
pub(super) struct Probe {
    #[serde(rename = "backends")]
    opened: Vec<Opened>,
    pub(super) problems: Vec<ProblemView>,
}

/// A backend that could be opened.
#[derive(Debug, Serialize)]
pub(super) struct Opened {
    name: String,
    /// Size in bytes.
    size: u64,
    notes: Vec<String>,
}

impl Probe {
    /// Opens and closes all backends, portal addresses and the metrics address, and reads secrets.
    /// A missing file is an error if `is_known` returns true for it, same as in the daemon.
    pub(super) fn of(config: &Config, is_known: impl Fn(&Backend) -> bool) -> Self {
        let mut probe = Self::default();
        for backend in &config.backends {
            let name = backend.name.clone();
            match open_in_time(&backend.spec, is_known(backend)) {
                Ok(store) => {
                    // Undo any changes. The daemon will create or extend the file when it starts.
                    store.undo();
                    let (size, mut notes) = (store.capacity(), store.notes().to_vec());
                    if let Source::File { path, .. } | Source::Device { path } =
                        &backend.spec.source
                    {
                        notes.extend(image::note(path));
                    }
                    probe.opened.push(Opened { name, size, notes });
                }
                Err(error) => probe.fail("backend", name, &error),
            }
        }
        let mut rdma: Vec<IpAddr> = Vec::new();
        let expansion = Expansion::now(config);
        for (_, listen, why) in &expansion.lacking {
            probe.fail("portal", listen.to_string(), why);
        }
        for portal in expansion.targets.iter().flatten() {
            let listen = portal.at;
            let tried = match portal.protocol {
                Protocol::Iscsi => TcpListener::bind(listen).map(drop),
                Protocol::Srp | Protocol::Iser if rdma.contains(&listen.ip()) => Ok(()),
                Protocol::Srp | Protocol::Iser => {
                    rdma.push(listen.ip());
                    bind_nic(config, listen.ip())
                }
            };
            if let Err(error) = tried {
                probe.fail("portal", listen.to_string(), &error);
            }
        }
        for addr in rdma.iter().filter(|_| config.transport.shm) {
            if let Err(error) = ShmListener::bind(*addr) {
                probe.fail("shared memory", addr.to_string(), &error);
            }
        }
        if let Some(metrics) = &config.metrics
            && let Err(error) = TcpListener::bind(metrics.listen)
        {
            probe.fail("metrics", metrics.listen.to_string(), &error);
        }
        probe.read_secrets(config);
        probe
    }

    /// Reads secrets and compares them like on startup, except for secrets that could not be read,
    /// which are already reported.
    fn read_secrets(&mut self, config: &Config) {
        let mut read = Vec::new();
        if let Some(chap) = &config.discovery_chap {
            read.push(self.read_chap("/discovery_chap".to_owned(), chap));
        }
        for target in &config.targets {
            let place = format!("/targets/{}", target.name);
            if let Some(chap) = &target.chap {
                read.push(self.read_chap(format!("{place}/chap"), chap));
            }
            let Access::Rules(rules) = &target.access else {
                continue;
            };
            for (n, rule) in rules.iter().enumerate() {
                if let Some(chap) = &rule.chap {
                    read.push(self.read_chap(format!("{place}/access/{n}/chap"), chap));
                }
            }
        }
        let all: Vec<&Auth> = read.iter().map(|(_, auth)| auth).collect();
        for (place, auth) in &read {
            if let Err(error) = check_own(auth, &all) {
                self.fail("secret", format!("{place}/mutual"), &error);
            }
        }
    }

    /// Reads the secrets of users and of the target for a path.
    fn read_chap(&mut self, place: String, chap: &Chap) -> (String, Auth) {
        let mut read = |place: String, user: &ChapUser| {
            let credentials = user.credentials();
            credentials
                .map_err(|error| self.fail("secret", place, &error))
                .ok()
        };
        let users = chap.users.iter();
        let auth = Auth::Chap {
            accepted: users
                .filter_map(|user| read(format!("{place}/users/{}", user.name), user))
                .collect(),
            own: (chap.mutual.as_ref()).and_then(|user| read(format!("{place}/mutual"), user)),
            algorithms: chap.algorithms.clone(),
        };
        (place, auth)
    }

    fn fail(&mut self, kind: &'static str, name: String, error: &dyn std::fmt::Display) {
        self.problems.push(ProblemView {
            kind: kind.to_owned(),
            name,
            error: error.to_string(),
            since: seconds(SystemTime::now()),
            state: NOT_SERVED.to_owned(),
            ..ProblemView::default()
        });
    }

    /// Formats the results for users.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for Opened { name, size, notes } in &self.opened {
            lines.push(format!("backend {name}: {}", bytes(*size)));
            lines.extend(
                notes
                    .iter()
                    .map(|note| format!("note: backend {name}: {note}")),
            );
        }
        lines.extend(self.problems.iter().map(report::problem));
        lines
    }
}

/// Binds the port used by the software NIC, or the name used for shared memory. If the address may
/// belong to an RDMA device, binds any port.
fn bind_nic(config: &Config, address: IpAddr) -> io::Result<()> {
    let port = match config.transport.provider {
        Provider::Roce => riser_transport::wire::packet::ROCE_PORT,
        Provider::RdmaCore | Provider::Auto | Provider::Iwarp => 0,
        Provider::Shm => {
            ShmListener::bind(address)?;
            0
        }
    };
    UdpSocket::bind(SocketAddr::new(address, port)).map(drop)
}
