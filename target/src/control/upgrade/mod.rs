//! Another program takes over from this one, within the process: the process id, and what the service
//! manager has given it, stay.
//!
//! ```text
//! asked to → the program checks the running configuration → secrets and files are looked for
//!   any failure: refused, and nothing has changed
//! → nobody is answered any more, and everybody who connects waits
//!   → a shutdown: commands end, initiators are logged out, data are made durable
//!   → the will is written: what a start would not find again
//!   → execve
//!        fails: this program starts serving again, with what it would have left
//! → the program reads the will, adopts the sockets, serves; initiators log in again
//! ```
//!
//! # What is left
//! Descriptors: a sealed file with the [`Will`], the listening sockets of the admin API, of metrics and
//! of iSCSI, and a file for each RAM disk. A socket says by itself where it listens, so even one who
//! cannot read the will loses no connection that waits. The sockets of software NICs are not among it:
//! peers send their requests to connect again.
//!
//! # Versions
//! A will has a [`VERSION`]. Fields may be added within it, with a default. A program says with `check`
//! which versions it takes, so that what it would not understand is not given to it. If it is after
//! all, that is an error in the log, and it starts as if nothing had been left.
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

use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio::sync::mpsc;
use tokio::time::timeout;

use self::candidate::Candidate;
use super::api::{Failure, Request};
use super::history::Entry;
use super::http::Listening;
use super::open::start;
use super::socket::Admin;
use super::watchdog::Watchdog;
use super::{Control, EndSignals};
use crate::audit;
use crate::config::Config;
use crate::server::legacy::{Legacy, Packed, Written};
use crate::server::{Server, ServerError};
use crate::worker::iscsi::TcpListener;

pub(super) use process::own_program;

/// The version of the will that this program writes and reads.
pub const VERSION: u32 = 1;

/// The longest will that is read, in bytes.
const MAX_WILL: u64 = 256 << 20;

/// How long a signal may take to be seen that came before the program changes: the next one would never
/// hear of it.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// Which of the programs that have served in this process the present one is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenure {
    /// Programs that served before.
    #[serde(default)]
    pub upgrades: u32,
    /// The version of the last of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgraded_from: Option<String>,
    /// Why the last upgrade that was begun has failed, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade_error: Option<String>,
}

/// An upgrade that has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// The program that takes over.
    pub program: PathBuf,
    /// The version that serves now.
    pub from: String,
    /// The version of the program.
    pub to: String,
    /// What [`Tenure::upgrades`] will be once it serves.
    pub upgrades: u32,
}

/// What a program leaves in writing.
#[derive(Debug, Serialize, Deserialize)]
struct Will {
    version: u32,
    tenure: Tenure,
    /// As YAML, secrets included.
    configuration: String,
    history: Vec<Entry>,
    server: Written,
}

/// The part of a will that says whether the rest can be read.
#[derive(Deserialize)]
struct Form {
    version: u32,
}

/// What the program before has told.
#[derive(Debug)]
pub(super) struct Past {
    config: Config,
    pub(super) tenure: Tenure,
    pub(super) history: Vec<Entry>,
}

/// What was left to this process.
#[derive(Debug, Default)]
pub struct Inheritance {
    pub(super) past: Option<Past>,
    pub(super) legacy: Legacy,
    pub(super) admin: Option<UnixListener>,
    broken: Option<String>,
}

impl Inheritance {
    /// Takes what was left to this process, nothing as a rule. To be called before the process opens
    /// anything.
    #[must_use]
    pub fn take() -> Self {
        process::take_left().map_or_else(Self::default, Self::of)
    }

    fn of(left: process::Left) -> Self {
        let mut fds = left.fds.into_iter();
        let will = match (fds.next(), left.problem) {
            (Some(will), None) => read_will(will),
            (_, problem) => Err(problem.unwrap_or_default()),
        };
        let mut inheritance = Self::default();
        let (mut sockets, mut files) = (Vec::new(), BTreeMap::new());
        for fd in fds {
            let is_file = |(will, _): &(Will, Config)| will.server.has_file(fd.as_raw_fd());
            if will.as_ref().is_ok_and(is_file) {
                files.insert(fd.as_raw_fd(), File::from(fd));
            } else if SockRef::from(&fd).local_addr().is_ok_and(|a| a.is_unix()) {
                inheritance.admin = Some(fd.into());
            } else if let Ok(socket) = TcpListener::adopt(fd) {
                sockets.push(socket);
            }
        }
        let past = will.and_then(|(will, config)| {
            let file_of = |fd: RawFd| files.remove(&fd);
            inheritance.legacy = Legacy::unpack(will.server, file_of)
                .map_err(|error| format!("a RAM disk cannot be taken over: {error}"))?;
            Ok(Past {
                config,
                tenure: will.tenure,
                history: will.history,
            })
        });
        match past {
            Ok(past) => inheritance.past = Some(past),
            Err(broken) => inheritance.broken = Some(broken),
        }
        inheritance.legacy.add_sockets(sockets);
        inheritance
    }

    /// The configuration that was served.
    #[must_use]
    pub fn config(&self) -> Option<&Config> {
        self.past.as_ref().map(|past| &past.config)
    }

    /// Why what was left is of no use, if that is so: the start is an ordinary one.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
}

/// Reads a will and the configuration in it.
fn read_will(fd: OwnedFd) -> Result<(Will, Config), String> {
    let file = File::from(fd);
    let read = || -> io::Result<Vec<u8>> {
        let len = file.metadata()?.len().min(MAX_WILL);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| format!("it cannot be read: {error}"))?;
    let garbled = |error: serde_json::Error| format!("it is garbled: {error}");
    let form: Form = serde_json::from_slice(&bytes).map_err(garbled)?;
    if form.version != VERSION {
        let version = form.version;
        return Err(format!("its version is {version}, and {VERSION} is known"));
    }
    let will: Will = serde_json::from_slice(&bytes).map_err(garbled)?;
    let config = Config::parse(&will.configuration, "the configuration that was served");
    let config = config.map_err(|error| error.to_string())?;
    Ok((will, config))
}

/// An upgrade with all that it takes.
#[derive(Debug)]
pub(super) struct Handing {
    candidate: Candidate,
    /// Those of iSCSI.
    sockets: Vec<TcpListener>,
}

/// What comes of a hand-over, if not another program.
pub(super) enum Handed<'a> {
    /// It was not possible; this program serves on.
    Back(Control<'a>),
    /// The daemon was told to end meanwhile, and has.
    Ended,
}

impl<'a> Control<'a> {
    /// Makes sure that a program, by default the one at this one's place, can take over.
    pub(super) fn prepare_upgrade(
        &self,
        named: Option<PathBuf>,
        who: &str,
    ) -> Result<(Upgrade, Handing), Failure> {
        let program = named.unwrap_or_else(|| self.program.clone());
        let prepared = candidate::check(&program, &self.server.config().to_yaml())
            .map_err(|error| error.to_string())
            .and_then(|candidate| {
                let ready = self.server.check_successor();
                let sockets = ready.and_then(|()| self.server.duplicate_sockets());
                let sockets = sockets.map_err(|error| error.to_string())?;
                Ok(Handing { candidate, sockets })
            });
        match prepared {
            Ok(handing) => {
                let upgrade = Upgrade {
                    program: handing.candidate.program.clone(),
                    from: env!("CARGO_PKG_VERSION").to_owned(),
                    to: handing.candidate.version.clone(),
                    upgrades: self.tenure.upgrades + 1,
                };
                audit::upgrading(who, &upgrade.program, &upgrade.from, &upgrade.to);
                Ok((upgrade, handing))
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
        handing: Handing,
        signals: &mut EndSignals,
        queue: &mut mpsc::Receiver<Request>,
    ) -> Result<Handed<'a>, ServerError> {
        let Control {
            server,
            history,
            requests,
            metrics,
            admin,
            tenure,
            ..
        } = self;
        let config = server.config().clone();
        let problems = server.problems();
        let (admin, metrics) = fall_silent(admin, metrics, queue).await;
        let Some(legacy) = shut_down(server, handing.sockets, signals).await? else {
            return Ok(Handed::Ended);
        };
        let will = |server| Will {
            version: VERSION,
            tenure: Tenure {
                upgrades: tenure.upgrades + 1,
                upgraded_from: Some(env!("CARGO_PKG_VERSION").to_owned()),
                upgrade_error: None,
            },
            configuration: config.to_yaml(),
            history: history.entries().to_vec(),
            server,
        };
        let mut packed = Packed::default();
        let written = legacy.pack(&mut packed).and_then(|server| {
            let bytes = serde_json::to_vec(&will(server))?;
            process::sealed(&bytes)
        });
        if timeout(LAST_LOOK, signals.next()).await.is_ok() {
            return Ok(Handed::Ended);
        }
        let error = match written {
            Ok(will) => {
                let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
                fds.extend(admin.as_ref().map(|(listener, _)| listener.as_fd()));
                fds.extend(metrics.as_ref().map(AsFd::as_fd));
                fds.extend(legacy.sockets().iter().map(AsFd::as_fd));
                fds.extend(packed.files().map(AsFd::as_fd));
                process::become_program(&handing.candidate.program, &will, &fds)
            }
            Err(error) => error,
        };
        let program = handing.candidate.program.display();
        let error = format!("{program}: it cannot be run: {error}");
        tracing::error!(%error, "not handed over; serving on");
        legacy.take_back(packed).map_err(ServerError::TakeBack)?;
        let mut server = start(|| Server::start_after(&config, &legacy, history.keepers()))?;
        server.keep_control_problems(&problems);
        let admin = admin.map(|(listener, bound)| Admin::open(listener, bound, requests.clone()));
        let metrics = metrics.map(|listener| Listening::on(listener, requests.clone()));
        Ok(Handed::Back(Control {
            server,
            history,
            admin: admin.transpose().map_err(ServerError::Inherited)?,
            metrics: metrics.transpose().map_err(ServerError::TakeBack)?,
            tenure: Tenure {
                upgrade_error: Some(error),
                ..tenure
            },
            requests,
            search: None,
            ..self
        }))
    }
}

type Silent = (
    Option<(UnixListener, Option<super::socket::Bound>)>,
    Option<std::net::TcpListener>,
);

/// Ends the servers of HTTP but not their sockets: who connects from here on waits. Requests on their
/// way are refused.
async fn fall_silent(
    admin: Option<Admin>,
    metrics: Option<Listening>,
    queue: &mut mpsc::Receiver<Request>,
) -> Silent {
    let silent = async {
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
    tokio::pin!(silent);
    loop {
        tokio::select! {
            silent = &mut silent => return silent,
            Some(request) = queue.recv() => {
                // Whoever asked may have gone.
                let _ = request.reply.send(Err(Failure::Busy));
            }
        }
    }
}

/// Shuts the server down, on a thread of its own, so that the service manager hears of us meanwhile;
/// nothing where the daemon was told to end.
async fn shut_down(
    server: Server,
    sockets: Vec<TcpListener>,
    signals: &mut EndSignals,
) -> Result<Option<Legacy>, ServerError> {
    // A shutdown has time limits of its own.
    let _watchdog = Watchdog::start(Vec::new);
    let mut ending = tokio::task::spawn_blocking(move || server.bequeath(sockets));
    let mut is_over = false;
    let ended = loop {
        tokio::select! {
            ended = &mut ending => break ended,
            _ = signals.next() => is_over = true,
        }
    };
    let ended = ended.map_err(|panic| ServerError::Thread(io::Error::other(panic)))?;
    ended.map(|legacy| (!is_over).then_some(legacy))
}
