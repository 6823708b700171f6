//! Upgrades to another program within the same process. The process ID and the resources from the
//! service manager don't change.
//!
//! ```text
//! requested → the program checks the running configuration → secrets and files are verified
//!   → no block operation and no thread hangs
//!   any failure: rejected, and nothing has changed
//! → no requests are handled any more, and clients that connect have to wait
//!   → a drain: commands complete, initiators log out, data is made durable
//!        fails: this server resumes service
//!   → a shutdown, which does not need to wait for anything
//!   → the handover state is written: everything that a start could not restore
//!   → execve
//!        fails: this program starts serving again, with the same state
//! → the program reads the state, adopts the sockets, serves; initiators log in again
//! ```
//!
//! # Handover state
//! Descriptors: a sealed file with the [`HandoverState`], the listening sockets for the admin API,
//! metrics and iSCSI, and a file for each RAM disk. A socket knows its own address, so even if a
//! program cannot read the state, waiting connections are not lost. Sockets of software NICs are
//! not included, because peers retransmit their connection requests.
//!
//! # Versions
//! The state has a [`VERSION`]. Fields can be added without a new version if they have a default
//! value. A program reports its supported versions via `check`, so that it does not receive any
//! other version. If this still happens, it logs an error and starts without the state.
//!
//! # Modules
//! - `candidate`: checks if a program can be used.
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
pub(crate) use self::candidate::ProgramInfo;
use super::Control;
use super::api::{AdminRequest, Failure};
use super::history::Entry;
use super::http::Listening;
use super::open::{PREDECESSOR, start};
use super::signals::EndSignals;
use super::socket::Admin;
use super::watchdog::Watchdog;
use crate::audit;
use crate::backend::check_threads;
use crate::config::Config;
use crate::server::handover::{RamFiles, ServerState, StateDocument};
use crate::server::{Server, ServerError};
use crate::worker::TcpListener;

pub(super) use process::own_program;

/// Format version of the handover state used by this program.
pub const VERSION: u32 = 1;

/// Maximum size of the handover state in bytes.
const MAX_STATE: u64 = 256 << 20;

/// Timeout to close data sent by other users to the sockets of a server that was shut down.
const CLOSING: Duration = Duration::from_secs(1);

/// Timeout for threads that access or close files of backends.
const THREADS: Duration = Duration::from_secs(3);

/// Grace period for signals that arrive just before `execve`. Later signals would be lost.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// Handover state of a program, in serialized form.
#[derive(Debug, Serialize, Deserialize)]
struct HandoverState {
    version: u32,
    /// We use the name that older programs with this version have always used.
    #[serde(rename = "tenure")]
    upgrade_record: UpgradeRecord,
    /// In YAML format, including secrets.
    configuration: String,
    history: Vec<Entry>,
    server: StateDocument,
}

/// Part of the handover state needed to check if the rest is supported.
#[derive(Deserialize)]
struct StateVersion {
    version: u32,
}

/// The previous program.
#[derive(Debug)]
pub(super) struct Predecessor {
    config: Config,
    pub(super) upgrade_record: UpgradeRecord,
    pub(super) history: Vec<Entry>,
}

/// Handover state passed to this process.
#[derive(Debug, Default)]
pub struct Handover {
    pub(super) predecessor: Option<Predecessor>,
    pub(super) server_state: ServerState,
    pub(super) admin: Option<UnixListener>,
    broken: Option<String>,
}

impl Handover {
    /// Returns the state passed to this process, which is usually empty. This must be called before
    /// the process opens any files.
    #[must_use]
    pub fn from_env() -> Self {
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
        // We adopt sockets even if the state cannot be read, so that waiting connections are served
        // by the normal start.
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
                .map_err(|error| format!("cannot restore a RAM disk: {error}"))?;
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

    /// Returns true if this program takes over from another program in the same process.
    #[must_use]
    pub fn takes_over(&self) -> bool {
        self.predecessor.is_some() || self.broken.is_some()
    }

    /// Returns the configuration of the previous program.
    #[must_use]
    pub fn config(&self) -> Option<&Config> {
        self.predecessor
            .as_ref()
            .map(|predecessor| &predecessor.config)
    }

    /// Returns the error if the state cannot be used. In this case, we do a normal start.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
}

/// Reads a handover state and its configuration.
fn read_state(fd: OwnedFd) -> Result<(HandoverState, Config), String> {
    let file = File::from(fd);
    let read = || -> io::Result<Vec<u8>> {
        // Limit the allocation size: the descriptor comes from the environment, and could be any
        // file.
        let len = file.metadata()?.len().min(MAX_STATE);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| format!("cannot read the handover state: {error}"))?;
    let garbled = |error: serde_json::Error| format!("invalid handover state: {error}");
    // Check the version first, because we may not be able to parse the fields of another version.
    let head: StateVersion = serde_json::from_slice(&bytes).map_err(garbled)?;
    if head.version != VERSION {
        let version = head.version;
        return Err(format!(
            "unsupported version {version} of the handover state, expected {VERSION}"
        ));
    }
    let state: HandoverState = serde_json::from_slice(&bytes).map_err(garbled)?;
    let config = Config::parse(&state.configuration, "the handover configuration");
    let config = config.map_err(|error| error.to_string())?;
    Ok((state, config))
}

/// An upgrade that is ready to start.
#[derive(Debug)]
pub(super) struct PreparedUpgrade {
    candidate: Candidate,
    /// Duplicates of the listening iSCSI sockets, one per worker and portal.
    sockets: Vec<TcpListener>,
}

/// Result of a handover that did not start another program.
pub(super) enum HandoverEnd<'a> {
    /// The handover failed, and this program continues to serve.
    Back(Control<'a>),
    /// The daemon was terminated by a signal.
    Ended,
}

impl<'a> Control<'a> {
    /// Verifies that a program can take over. The default is the program at the current path.
    pub(super) fn prepare_upgrade(
        &self,
        named: Option<PathBuf>,
        who: &str,
    ) -> Result<(Upgrade, PreparedUpgrade), Failure> {
        let program = named.unwrap_or_else(|| self.program.clone());
        // Use the current configuration instead of the file, because this is the configuration that
        // the candidate has to serve. Check the disks first: the child process that runs the check
        // closes its copies of their descriptors, and close(2) can block on a file system that does
        // not respond.
        let ready = self.server.check_block_operations();
        let prepared = ready
            .and_then(|()| self.server.check_successor())
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let check = candidate::check(&program, &self.server.config().to_yaml());
                let candidate = check.map_err(|error| error.to_string())?;
                // Sockets are duplicated last, because they are only used for the handover, which
                // cannot be rejected after this.
                let ready = self.server.check_block_operations();
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

    /// Performs the handover. Only returns if it failed.
    pub(super) async fn hand_over(
        self,
        prepared: PreparedUpgrade,
        signals: &mut EndSignals,
        queue: &mut mpsc::Receiver<AdminRequest>,
    ) -> Result<HandoverEnd<'a>, ServerError> {
        let Control {
            mut server,
            history,
            requests,
            metrics,
            admin,
            upgrade_record,
            ..
        } = self;
        // The shutdown consumes the server including its configuration.
        let config = server.config().clone();
        let problems = server.problems();
        // This must be done before the shutdown, because we cannot handle requests during that
        // time. Clients that connect will wait in the socket's queue for the next program.
        let (admin, metrics) = end_http(admin, metrics, queue).await;
        let program = prepared.candidate.program.display();
        // Until this point, everything can be undone. After the drain, the shutdown does not need
        // to wait.
        if let Err(error) = drain(&mut server) {
            let error = format!("{program}: cannot close the sessions: {error}");
            tracing::error!(%error, "handover failed; continuing to serve");
            return Ok(HandoverEnd::Back(Control {
                server,
                history,
                admin: reopen_admin(admin, &requests)?,
                metrics: reopen_metrics(metrics, &requests)?,
                upgrade_record: UpgradeRecord {
                    upgrade_error: Some(error),
                    ..upgrade_record
                },
                requests,
                ..self
            }));
        }
        // If we cannot run the new program, we start a new server in this program with the same
        // state.
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
        // execve(2) would wait for the thread that closes data left in the listeners, and for threads
        // of backends, which may have been in use until the drain.
        let closed = shm::check_closed(CLOSING).and_then(|()| check_threads(THREADS));
        let written = closed.and_then(|()| {
            let server = server_state.export(&mut files)?;
            let bytes = serde_json::to_vec(&state(server))?;
            process::sealed(&bytes)
        });
        // This is the last chance to handle a signal: execve(2) resets the handlers, so a signal
        // that was already caught would be lost. It is possible that only the flag was set.
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
        let error = format!("{program}: cannot execute the program: {error}");
        tracing::error!(%error, "handover failed; continuing to serve");
        // Restore RAM disks first: without their content, a server would return zeros.
        server_state.restore(files).map_err(ServerError::TakeBack)?;
        let mut server = start(|| {
            let keepers = history.keepers();
            Server::start_patiently(&config, &server_state, keepers, PREDECESSOR)
        })?;
        // The new server did not try these objects itself, so it would not report them.
        server.keep_control_problems(&problems);
        Ok(HandoverEnd::Back(Control {
            server,
            history,
            admin: reopen_admin(admin, &requests)?,
            metrics: reopen_metrics(metrics, &requests)?,
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

type AdminSocket = Option<(UnixListener, Option<super::socket::Bound>)>;

type MetricsSocket = Option<std::net::TcpListener>;

/// Reopens the admin API.
fn reopen_admin(
    socket: AdminSocket,
    requests: &mpsc::Sender<AdminRequest>,
) -> Result<Option<Admin>, ServerError> {
    let admin = socket.map(|(listener, bound)| Admin::open(listener, bound, requests.clone()));
    admin.transpose().map_err(ServerError::Inherited)
}

/// Reopens metrics.
fn reopen_metrics(
    socket: MetricsSocket,
    requests: &mpsc::Sender<AdminRequest>,
) -> Result<Option<Listening>, ServerError> {
    let metrics = socket.map(|listener| Listening::on(listener, requests.clone()));
    metrics.transpose().map_err(ServerError::TakeBack)
}

/// Stops the HTTP servers but keeps their sockets open, so new connections have to wait. Pending
/// requests are rejected.
async fn end_http(
    admin: Option<Admin>,
    metrics: Option<Listening>,
    queue: &mut mpsc::Receiver<AdminRequest>,
) -> (AdminSocket, MetricsSocket) {
    let ended = async {
        let admin = match admin {
            Some(admin) => Some(admin.shut_down().await),
            None => None,
        };
        let metrics = match metrics {
            Some(metrics) => Some(metrics.shut_down().await),
            None => None,
        };
        (admin, metrics)
    };
    tokio::pin!(ended);
    loop {
        tokio::select! {
            ended = &mut ended => return ended,
            Some(request) = queue.recv() => {
                // The client may have disconnected. The HTTP servers only stop after all requests
                // have a response, and nobody else will respond to queued requests.
                let _ = request.reply.send(Err(Failure::Busy));
            }
        }
    }
}

/// Closes all sessions, or resumes service: see [`Server::drain`]. As in [`shut_down`], a separate
/// thread notifies the service manager.
fn drain(server: &mut Server) -> Result<(), ServerError> {
    let _watchdog = Watchdog::start(Vec::new);
    server.drain()
}

/// Shuts down the server while a separate thread notifies the service manager. We cannot use a
/// runtime thread for this, because tokio panics if the system cannot create a thread. Signals
/// received during this time are only recorded in their flags, because we must not interrupt the
/// final flush.
fn shut_down(server: Server, sockets: Vec<TcpListener>) -> Result<ServerState, ServerError> {
    // The shutdown has its own timeouts.
    let _watchdog = Watchdog::start(Vec::new);
    server.export_state(sockets)
}
