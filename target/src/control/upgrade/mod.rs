//! Another program takes over from this one, within the process: the process id, and what the
//! service manager has given it, stay.
//!
//! ```text
//! asked to → the program checks the running configuration → secrets and files are looked for
//!   any failure: refused, and nothing has changed
//! → no request is answered any longer, and clients that connect wait
//!   → a shutdown: commands end, initiators are logged out, data are made durable
//!   → the handover state is written: what a start would not find again
//!   → execve
//!        fails: this program starts serving again, with the same state
//! → the program reads the state, adopts the sockets, serves; initiators log in again
//! ```
//!
//! # Handover state
//! Descriptors: a sealed file with the [`HandoverState`], the listening sockets of the admin API,
//! of metrics and of iSCSI, and a file for each RAM disk. A socket says by itself where it listens,
//! so even a program that cannot read the state loses no connection that waits. The sockets of
//! software NICs are not part of it: peers repeat their requests to connect.
//!
//! # Versions
//! The state has a [`VERSION`]. Fields may be added within it, with a default. A program reports
//! with `check` which versions it reads, so that it gets no other. If it does after all, that is an
//! error in the log, and it starts without the state.
//!
//! # Modules
//! - `candidate`: whether a program can take over.
//! - `process`: descriptors and `execve`.

mod candidate;
mod process;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

pub use riser_admin_api::upgrade::{Upgrade, UpgradeRecord};
use riser_transport::shm;
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio::sync::mpsc;
use tokio::time::timeout;

use self::candidate::Candidate;
use super::Control;
use super::api::{AdminRequest, Failure};
use super::history::Entry;
use super::http::Listening;
use super::open::{PREDECESSOR, start};
use super::signals::EndSignals;
use super::socket::Admin;
use super::watchdog::Watchdog;
use crate::audit;
use crate::config::Config;
use crate::server::handover::{RamFiles, ServerState, StateDocument};
use crate::server::{Server, ServerError};
use crate::worker::TcpListener;

pub(super) use process::own_program;

/// Format version of the handover state that this program writes and reads.
pub const VERSION: u32 = 1;

/// Longest handover state that is read, in bytes.
const MAX_STATE: u64 = 256 << 20;

/// Time limit for closing what other users have sent to sockets of the server that has shut down.
const CLOSING: Duration = Duration::from_secs(1);

/// Grace period for signals that arrive just before `execve`; later ones would be lost.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// Handover state of a program, as it is written.
#[derive(Debug, Serialize, Deserialize)]
struct HandoverState {
    version: u32,
    /// Under the name that programs of this version have always written.
    #[serde(rename = "tenure")]
    upgrade_record: UpgradeRecord,
    /// As YAML, secrets included.
    configuration: String,
    history: Vec<Entry>,
    server: StateDocument,
}

/// The part of the handover state that says whether the rest can be read.
#[derive(Deserialize)]
struct StateVersion {
    version: u32,
}

/// The program that served before.
#[derive(Debug)]
pub(super) struct Predecessor {
    config: Config,
    pub(super) upgrade_record: UpgradeRecord,
    pub(super) history: Vec<Entry>,
}

/// Handover state that this process was given.
#[derive(Debug, Default)]
pub struct Handover {
    pub(super) predecessor: Option<Predecessor>,
    pub(super) server_state: ServerState,
    pub(super) admin: Option<UnixListener>,
    broken: Option<String>,
}

impl Handover {
    /// Takes the state that this process was given, as a rule none. Has to be called before the
    /// process opens anything.
    #[must_use]
    pub fn take() -> Self {
        process::take_passed().map_or_else(Self::default, Self::of)
    }

    fn of(passed: process::PassedDescriptors) -> Self {
        let mut fds = passed.fds.into_iter();
        let state = match (fds.next(), passed.problem) {
            (Some(state), None) => read_state(state),
            (_, problem) => Err(problem.unwrap_or_default()),
        };
        let mut handover = Self::default();
        let (mut sockets, mut files) = (Vec::new(), BTreeMap::new());
        // Sockets are adopted even where the state cannot be read, so that connections that wait
        // are served by the ordinary start.
        for fd in fds {
            let is_file =
                |(state, _): &(HandoverState, Config)| state.server.has_file(fd.as_raw_fd());
            if state.as_ref().is_ok_and(is_file) {
                files.insert(fd.as_raw_fd(), File::from(fd));
            } else if SockRef::from(&fd).local_addr().is_ok_and(|a| a.is_unix()) {
                handover.admin = Some(fd.into());
            } else if let Ok(socket) = TcpListener::adopt(fd) {
                sockets.push(socket);
            }
        }
        let predecessor = state.and_then(|(state, config)| {
            let file_of = |fd: RawFd| files.remove(&fd);
            handover.server_state = ServerState::import(state.server, file_of)
                .map_err(|error| format!("a RAM disk cannot be taken over: {error}"))?;
            Ok(Predecessor {
                config,
                upgrade_record: state.upgrade_record,
                history: state.history,
            })
        });
        match predecessor {
            Ok(predecessor) => handover.predecessor = Some(predecessor),
            Err(broken) => handover.broken = Some(broken),
        }
        handover.server_state.add_sockets(sockets);
        handover
    }

    /// Returns true if this program takes over from another one in the same process.
    #[must_use]
    pub fn takes_over(&self) -> bool {
        self.predecessor.is_some() || self.broken.is_some()
    }

    /// The configuration that was served.
    #[must_use]
    pub fn config(&self) -> Option<&Config> {
        self.predecessor
            .as_ref()
            .map(|predecessor| &predecessor.config)
    }

    /// Reason why the state cannot be used, if that is so: the start is an ordinary one.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
}

/// Reads a handover state and the configuration in it.
fn read_state(fd: OwnedFd) -> Result<(HandoverState, Config), String> {
    let file = File::from(fd);
    let read = || -> io::Result<Vec<u8>> {
        // A bound for what is allocated: the descriptor comes from the environment, and may be of
        // any file.
        let len = file.metadata()?.len().min(MAX_STATE);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| format!("it cannot be read: {error}"))?;
    let garbled = |error: serde_json::Error| format!("it is garbled: {error}");
    // The version alone first: the fields of another one need not parse as ours.
    let head: StateVersion = serde_json::from_slice(&bytes).map_err(garbled)?;
    if head.version != VERSION {
        let version = head.version;
        return Err(format!("its version is {version}, and {VERSION} is known"));
    }
    let state: HandoverState = serde_json::from_slice(&bytes).map_err(garbled)?;
    let config = Config::parse(&state.configuration, "the configuration that was served");
    let config = config.map_err(|error| error.to_string())?;
    Ok((state, config))
}

/// An upgrade that can begin.
#[derive(Debug)]
pub(super) struct PreparedUpgrade {
    candidate: Candidate,
    /// Duplicates of the listening sockets of iSCSI, one for each worker and portal.
    sockets: Vec<TcpListener>,
}

/// End of a hand-over that has not led to another program.
pub(super) enum HandoverEnd<'a> {
    /// It was not possible; this program serves on.
    Back(Control<'a>),
    /// A signal has ended the daemon meanwhile.
    Ended,
}

impl<'a> Control<'a> {
    /// Makes sure that a program, by default the one at this one's place, can take over.
    pub(super) fn prepare_upgrade(
        &self,
        named: Option<PathBuf>,
        who: &str,
    ) -> Result<(Upgrade, PreparedUpgrade), Failure> {
        let program = named.unwrap_or_else(|| self.program.clone());
        // The configuration that runs, not the file: that is what the candidate has to serve.
        let prepared = candidate::check(&program, &self.server.config().to_yaml())
            .map_err(|error| error.to_string())
            // Sockets last: they serve the hand-over alone, which nothing can refuse after that.
            .and_then(|candidate| {
                let ready = self.server.check_successor();
                let sockets = ready.and_then(|()| self.server.duplicate_sockets());
                let sockets = sockets.map_err(|error| error.to_string())?;
                Ok(PreparedUpgrade { candidate, sockets })
            });
        match prepared {
            Ok(prepared) => {
                let upgrade = Upgrade {
                    program: prepared.candidate.program.clone(),
                    from: env!("CARGO_PKG_VERSION").to_owned(),
                    to: prepared.candidate.version.clone(),
                    upgrades: self.upgrade_record.upgrades + 1,
                };
                audit::upgrading(who, &upgrade.program, &upgrade.from, &upgrade.to);
                Ok((upgrade, prepared))
            }
            Err(error) => {
                audit::not_upgraded(who, &program, &error);
                let why = format!("{}: {error}; nothing has changed", program.display());
                Err(Failure::Refused { why, errno: None })
            }
        }
    }

    /// Hands over. Returns only if that was not possible.
    pub(super) async fn hand_over(
        self,
        prepared: PreparedUpgrade,
        signals: &mut EndSignals,
        queue: &mut mpsc::Receiver<AdminRequest>,
    ) -> Result<HandoverEnd<'a>, ServerError> {
        let Control {
            server,
            history,
            requests,
            metrics,
            admin,
            upgrade_record,
            ..
        } = self;
        // The shutdown takes the server, and with it all that says what it served.
        let config = server.config().clone();
        let problems = server.problems();
        // Before the shutdown, since no request could be answered during it; clients that connect
        // wait in the sockets' queues for the next program.
        let (admin, metrics) = end_http(admin, metrics, queue).await;
        // The shutdown has ended every session, but nothing is lost yet: if another program cannot
        // be run, a server of this one starts with the same state.
        let server_state = shut_down(server, prepared.sockets)?;
        let state = |server| HandoverState {
            version: VERSION,
            upgrade_record: UpgradeRecord {
                upgrades: upgrade_record.upgrades + 1,
                upgraded_from: Some(env!("CARGO_PKG_VERSION").to_owned()),
                upgrade_error: None,
            },
            configuration: config.to_yaml(),
            history: history.entries().to_vec(),
            server,
        };
        let mut files = RamFiles::default();
        // execve(2) would wait for the thread that closes what has waited at the listeners.
        let written = shm::check_closed(CLOSING).and_then(|()| {
            let server = server_state.export(&mut files)?;
            let bytes = serde_json::to_vec(&state(server))?;
            process::sealed(&bytes)
        });
        // The last moment to heed a signal: execve(2) sets handlers back, and one that was caught
        // is lost. Its flag may be all that has come of it.
        if timeout(LAST_LOOK, signals.next()).await.is_ok() || signals.has_come() {
            return Ok(HandoverEnd::Ended);
        }
        let error = match written {
            Ok(document) => {
                let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
                fds.extend(admin.as_ref().map(|(listener, _)| listener.as_fd()));
                fds.extend(metrics.as_ref().map(AsFd::as_fd));
                fds.extend(server_state.sockets().iter().filter_map(TcpListener::fd));
                fds.extend(files.files().map(AsFd::as_fd));
                process::become_program(&prepared.candidate.program, &document, &fds)
            }
            Err(error) => error,
        };
        let program = prepared.candidate.program.display();
        let error = format!("{program}: it cannot be run: {error}");
        tracing::error!(%error, "not handed over; serving on");
        // RAM disks first: a server that started without their content would serve zeroes.
        server_state.restore(files).map_err(ServerError::TakeBack)?;
        let mut server = start(|| {
            let keepers = history.keepers();
            Server::start_patiently(&config, &server_state, keepers, PREDECESSOR)
        })?;
        // This server has not tried those itself, and would show none of them.
        server.keep_control_problems(&problems);
        let admin = admin.map(|(listener, bound)| Admin::open(listener, bound, requests.clone()));
        let metrics = metrics.map(|listener| Listening::on(listener, requests.clone()));
        Ok(HandoverEnd::Back(Control {
            server,
            history,
            admin: admin.transpose().map_err(ServerError::Inherited)?,
            metrics: metrics.transpose().map_err(ServerError::TakeBack)?,
            upgrade_record: UpgradeRecord {
                upgrade_error: Some(error),
                ..upgrade_record
            },
            requests,
            search: None,
            ..self
        }))
    }
}

type HttpSockets = (
    Option<(UnixListener, Option<super::socket::Bound>)>,
    Option<std::net::TcpListener>,
);

/// Ends the servers of HTTP but not their sockets: clients that connect from here on wait. Requests
/// on their way are refused.
async fn end_http(
    admin: Option<Admin>,
    metrics: Option<Listening>,
    queue: &mut mpsc::Receiver<AdminRequest>,
) -> HttpSockets {
    let ended = async {
        let admin = match admin {
            Some(admin) => Some(admin.end().await),
            None => None,
        };
        let metrics = match metrics {
            Some(metrics) => Some(metrics.end().await),
            None => None,
        };
        (admin, metrics)
    };
    tokio::pin!(ended);
    loop {
        tokio::select! {
            ended = &mut ended => return ended,
            Some(request) = queue.recv() => {
                // The client may have disconnected.
                // The servers of HTTP end only after their requests are answered, and those in the
                // queue are not otherwise.
                let _ = request.reply.send(Err(Failure::Busy));
            }
        }
    }
}

/// Shuts the server down, while a thread of its own notifies the service manager. Not on a thread of
/// the runtime, which panics where the system refuses it one. A signal that comes meanwhile leaves
/// its flag: data are being made durable, which nothing may cut short.
fn shut_down(server: Server, sockets: Vec<TcpListener>) -> Result<ServerState, ServerError> {
    // A shutdown has time limits of its own.
    let _watchdog = Watchdog::start(Vec::new);
    server.export_state(sockets)
}
