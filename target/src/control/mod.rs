//! The control plane of `riserd`: signals, and the admin API on a Unix socket.
//!
//! ```text
//! signals ───────────────┐
//!                        ├──→ run: owns the Server, does one thing at a time
//! admin socket ─ Request ┘            │
//!   (tokio, axum: `api`)              └──→ workers, through their mailboxes
//! ```
//!
//! Workers know nothing of tokio. What people and tools ask for waits in a queue of [`WAITING`]
//! requests for the thread that owns the [`Server`]; a request that finds it full is refused.
//!
//! # Modules
//! - [`run`]: what `riserd run` does: start, tell the service manager, serve, shut down.
//! - [`api`]: the routes. [`view`]: what they say.
//! - [`socket`]: where the API is, and who may use it.
//! - [`client`]: the other end, for `riserd sessions` and its like; [`report`]: its words for people.

pub mod api;
pub mod client;
pub mod report;
pub mod socket;
pub mod view;

use std::time::Instant;

use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use self::api::{Ask, Failure, Request};
use crate::config::{Config, Location};
use crate::server::{Server, ServerError};

/// Requests that wait at most.
pub const WAITING: usize = 16;

/// Serves a configuration until SIGTERM or SIGINT. At SIGHUP, and when the admin API asks for it,
/// takes what `reread` gives, as far as [`Server::change`] allows.
///
/// # Errors
/// [`ServerError`]: it could not start, a worker failed, or data could not be made durable.
pub fn run(
    config: &Config,
    reread: &dyn Fn() -> Result<Config, String>,
) -> Result<(), ServerError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("riser-control")
        .enable_all()
        .build()
        .map_err(ServerError::Thread)?;
    runtime.block_on(async {
        let mut signals = Signals::new().map_err(ServerError::Signal)?;
        let server = Server::start(config)?;
        let (requests, queue) = mpsc::channel(WAITING);
        let admin = admin(&config.admin, requests)?;
        let control = Control {
            server,
            reread,
            since: Instant::now(),
        };
        let result = control.serve(&mut signals, queue).await;
        drop(admin);
        result
    })
}

/// Opens the admin API where the configuration wants it. A default place that cannot be had is no
/// reason not to serve.
fn admin(
    wanted: &Location,
    requests: mpsc::Sender<Request>,
) -> Result<Option<socket::Bound>, ServerError> {
    let (path, is_default) = match wanted {
        Location::Off => return Ok(None),
        Location::At(path) => (path.clone(), false),
        Location::Default => match socket::default_path() {
            Some(path) => (path, true),
            None => return Ok(None),
        },
    };
    match socket::bind(&path) {
        Ok((listener, bound)) => {
            tracing::info!(socket = %path.display(), "admin API");
            let service = axum::serve(listener, api::router(requests));
            tokio::spawn(std::future::IntoFuture::into_future(service));
            Ok(Some(bound))
        }
        Err(error) if is_default => {
            tracing::warn!(socket = %path.display(), %error, "no admin API");
            Ok(None)
        }
        Err(source) => Err(ServerError::Admin { path, source }),
    }
}

/// The signals that the daemon looks at.
#[derive(Debug)]
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }
}

/// A server with those who tell it what to do.
struct Control<'a> {
    server: Server,
    reread: &'a dyn Fn() -> Result<Config, String>,
    since: Instant,
}

impl Control<'_> {
    async fn serve(
        mut self,
        signals: &mut Signals,
        mut queue: mpsc::Receiver<Request>,
    ) -> Result<(), ServerError> {
        self.announce();
        let failure = self.server.failure();
        notify(&[NotifyState::Ready]);
        let why = loop {
            tokio::select! {
                _ = signals.hangup.recv() => { let _ = self.reload(); }
                _ = signals.terminate.recv() => break "SIGTERM",
                _ = signals.interrupt.recv() => break "SIGINT",
                () = failure.notified() => break "a worker failed",
                Some(request) = queue.recv() => self.answer(request),
            }
        };
        notify(&[NotifyState::Stopping]);
        self.shut_down(why)
    }

    /// Says what is served.
    fn announce(&self) {
        for target in view::targets(&self.server) {
            for portal in &target.portals {
                tracing::info!(
                    target = %target.name, protocol = %portal.protocol, listen = %portal.listen,
                    iqn = target.iqn.as_deref(), luns = target.luns.len(), "serving"
                );
            }
        }
    }

    fn answer(&mut self, request: Request) {
        let answer = match request.ask {
            Ask::Status => to_json(&view::status(&self.server, self.since.elapsed().as_secs())),
            Ask::Sessions => to_json(&view::sessions(&self.server)),
            Ask::Targets => to_json(&view::targets(&self.server)),
            Ask::Reload => self
                .reload()
                .map_err(Failure::Refused)
                .and_then(|()| to_json(&view::targets(&self.server))),
            Ask::Rescan => self
                .server
                .rescan()
                .map_err(|e| Failure::Failed(e.to_string()))
                .and_then(|()| to_json(&view::targets(&self.server))),
        };
        // Whoever asked may have gone.
        let _ = request.reply.send(answer);
    }

    /// Reads the configuration again and applies it; says in the log what came of it.
    fn reload(&mut self) -> Result<(), String> {
        notify(&[NotifyState::Reloading]);
        let changed = (self.reread)()
            .and_then(|config| self.server.change(config).map_err(|e| e.to_string()));
        match &changed {
            Ok(()) => {
                for target in view::targets(&self.server) {
                    let luns = target.luns.len();
                    tracing::info!(target = %target.name, luns, "configuration applied");
                }
            }
            Err(error) => tracing::error!(%error, "configuration not applied"),
        }
        notify(&[NotifyState::Ready]);
        changed
    }

    fn shut_down(self, why: &str) -> Result<(), ServerError> {
        tracing::info!(why, sessions = self.server.sessions(), "shutting down");
        for session in view::sessions(&self.server) {
            tracing::info!(
                initiator = %session.initiator, peer = %session.peer, state = %session.state,
                in_flight = session.in_flight, "session"
            );
        }
        self.server.shutdown()?;
        tracing::info!("ended");
        Ok(())
    }
}

fn to_json(view: &impl serde::Serialize) -> api::Answer {
    serde_json::to_value(view).map_err(|e| Failure::Failed(e.to_string()))
}

/// Tells the service manager, if there is one.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "the service manager was not told");
    }
}
