//! The control plane of `riserd`: signals, and the admin API on a Unix socket.
//!
//! ```text
//! signals ─────────────────────┐
//!                              ├──→ run: owns the Server, does one thing at a time
//! admin socket ─ AdminRequest ─┘            │
//!   (tokio, axum: `api`)                    └──→ workers, through their mailboxes
//! ```
//!
//! Workers don't use tokio. Requests from users and tools are sent to the thread that owns the
//! [`Server`] via a queue for [`WAITING`] requests. When the queue is full, requests are rejected.
//!
//! # Modules
//! - [`run`]: implements `riserd run`: starts up, notifies the service manager, serves and shuts
//!   down.
//! - [`routes`]: paths of the admin API. [`api`]: requests to the daemon. [`view`]: the objects of
//!   the daemon, from which all responses are created, using the types from `riser-admin-api`.
//! - [`http`]: routes that are also available via TCP: [`metrics`], [`health`], and the status page
//!   with the data from [`live`]; [`top`] shows its rates in a terminal. [`timeline`]: history for
//!   the last minutes on this page; [`events`]: recent events.
//! - [`trace`]: command traces.
//! - [`socket`]: path and permissions of the API socket.
//! - [`history`]: previous configurations. [`state`]: the state directory, also used for
//!   [`reservations`] and [`identities`] of logical units, failed [`flushes`] and [`ports`]
//!   numbers.
//! - `room`: measures the free space of backends.
//! - [`upgrade`]: upgrades to a new program.
//! - `open`: opens sockets and the server at startup. `serving`: HTTP servers with graceful
//!   shutdown.
//! - `bounded`: HTTP listener which protects its clients from each other.
//! - `watchdog`: a separate thread that notifies the service manager while all workers make
//!   progress.
//! - [`report`]: output of `riserd sessions` and similar commands, which use the client in
//!   `riser-admin-api`; [`objects`]: configuration objects with the corresponding daemon data.

pub mod api;
mod blocked;
mod bounded;
pub mod events;
pub mod flushes;
#[cfg(test)]
mod fuzz;
pub mod health;
pub mod history;
pub mod http;
pub mod identities;
pub mod live;
pub mod logging;
pub mod metrics;
pub mod objects;
mod open;
pub mod ports;
mod renumbering;
pub mod report;
pub mod reservations;
mod room;
pub mod routes;
mod serving;
mod signals;
pub mod socket;
pub mod state;
pub mod timeline;
pub mod top;
pub mod trace;
pub mod upgrade;
pub mod view;
mod watchdog;

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use riser_admin_api::view::ScrubView;
use sd_notify::NotifyState;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, interval_at};

use self::api::{AdminCommand, AdminRequest, Block, Failure, Kept, Proposal};
use self::history::{Entry, History};
use self::http::Listening;
use self::metrics::{ConfigState, Reload};
use self::open::{
    PREDECESSOR, admin_at, admin_or_problem, is_edited, open_metrics, restored, start,
};
use self::renumbering::Renumbered;
use self::room::Room;
use self::signals::Signals;
use self::socket::Admin;
use self::timeline::Timeline;
use self::trace::{Search, Wanted};
use self::upgrade::{Handover, HandoverEnd, PreparedUpgrade, UpgradeRecord};
use self::view::{Changes, Inventory, Standing};
use self::watchdog::Watchdog;
use crate::audit::{self, ChangeOrigin};
use crate::backend::{OpenError, OpenedStores, open_each, query};
use crate::config::{Config, Difference, Location, diff};
use crate::server::handover::ServerState;
use crate::server::problems::Subject;
use crate::server::reload::ChangeError;
use crate::server::{Server, ServerError};
use crate::sessions::blocklist::Initiator;

// Admin API clients must still be waiting when a file system check times out.
const _: () = assert!(query::LONGEST.as_secs() < riser_admin_api::client::PATIENCE.as_secs());

/// Maximum number of queued requests.
pub const WAITING: usize = 16;

/// Origin of the daemon's configuration.
pub struct Source<'a> {
    /// Configuration from the file.
    pub config: Config,
    /// File path, or `None` if the configuration is on the command line.
    pub file: Option<PathBuf>,
    /// Reads the file again, or parses the command line again.
    pub reread: &'a dyn Fn() -> Result<Config, String>,
    /// If set, use the configuration that was last applied instead of the file.
    pub restore: bool,
    /// Handover state of the previous program. If it contains a configuration, this is always used.
    pub handover: Handover,
}

/// Serves a configuration until SIGTERM or SIGINT is received, or until another program takes over.
/// The configuration can be replaced on SIGHUP or via the admin API, if [`Server::change`] supports
/// the change.
///
/// # Errors
/// Returns a [`ServerError`] if the start failed, if a worker failed, or if data could not be made
/// durable.
pub fn run(source: Source<'_>) -> Result<(), ServerError> {
    let runtime = runtime().map_err(ServerError::ControlPlane)?;
    let Handover {
        predecessor,
        server_state,
        admin: listener,
        ..
    } = source.handover;
    // We need to get the path now, because an upgrade replaces the file, and then the kernel will
    // report it as deleted.
    let program = upgrade::own_program().map_err(ServerError::Program)?;
    runtime.block_on(async {
        // This must be done before we open anything. Otherwise, a signal would terminate the
        // process immediately, and could leave incomplete files behind.
        let mut signals = Signals::new().map_err(ServerError::Signal)?;
        // Open this before the server, because it stores reservations there. The directory lock
        // ensures that only one daemon can use it at a time.
        let mut history = History::open(&source.config.state).map_err(ServerError::State)?;
        let (upgrade_record, how) = match predecessor {
            Some(predecessor) => {
                history.adopt(predecessor.history);
                (predecessor.upgrade_record, "upgrade")
            }
            None => (UpgradeRecord::default(), "start"),
        };
        // After an upgrade, the configuration in the handover state is used instead of the file.
        let file = (how == "start").then(|| source.config.to_yaml());
        let config = match source.restore && file.is_some() {
            true => restored(source.config, &history)?,
            false => source.config,
        };
        // The log was started with the filter from the file.
        logging::set_filter(&config.log);
        let mut server = start(|| {
            let keepers = history.keepers();
            Server::start_patiently(&config, &server_state, keepers, PREDECESSOR)
        })?;
        let yaml = config.to_yaml();
        // A start with the last configuration is not a change, so it should not displace older
        // entries from the history.
        if history
            .entries()
            .first()
            .is_none_or(|last| last.yaml != yaml)
        {
            let entry = Entry::now("riserd", how, yaml);
            tolerate(&config, history.record(entry))?;
        }
        if let Some(file) = file {
            tolerate(&config, history.see_file(file))?;
        }
        let (requests, queue) = mpsc::channel(WAITING);
        // This is done after starting the server, so that an unavailable metrics address does not
        // delay initiators.
        let metrics = match start(|| open_metrics(&config, &server_state, &requests)) {
            Err(error) if !config.strict => {
                let wanted = config.metrics.as_ref();
                server.set_metrics_problem(wanted.map(|wanted| (wanted.listen, &error)));
                None
            }
            metrics => metrics?,
        };
        let admin = admin_or_problem(&config, listener, &requests, &mut server)?;
        // Drop sockets that were not adopted, or else clients that connect to them would wait
        // forever.
        drop(server_state);
        if let Some(from) = &upgrade_record.upgraded_from {
            tracing::info!(%from, to = env!("CARGO_PKG_VERSION"), "took over");
        }
        let origin = ChangeOrigin { who: "riserd", how };
        audit::changed(origin, &revision(&config.to_yaml()), &[]);
        let control = Control {
            server,
            file: ConfigFile {
                path: source.file,
                reread: source.reread,
                last: RefCell::default(),
            },
            history,
            reloads: Reload::at_start(),
            restores: source.restore,
            since: Instant::now(),
            requests,
            metrics,
            timeline: Timeline::default(),
            search: None,
            retry_failed: None,
            admin,
            program,
            upgrade_record,
            handing: None,
        };
        control.serve(&mut signals, queue).await
    })
}

/// Creates the runtime for the control plane.
///
/// # Errors
/// Fails if a thread or a descriptor cannot be created.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let build = || {
        // We use a separate thread for HTTP: the control plane can block on files and devices while
        // it handles a request, and clients should still be able to connect and to time out.
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("riser-control")
            .enable_all()
            .build()
    };
    // Tokio panics if the system cannot create a thread or the sockets used for signals. This is
    // not a bug in this program, so it should not look like one.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let built = std::panic::catch_unwind(build);
    std::panic::set_hook(hook);
    built.unwrap_or_else(|panic| {
        let why = panic.downcast_ref::<String>().map(String::as_str);
        let why = why.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(std::io::Error::other(
            why.unwrap_or("cannot create the runtime").to_owned(),
        ))
    })
}

/// Logs a history error, which is only fatal in strict mode.
fn tolerate(config: &Config, kept: std::io::Result<()>) -> Result<(), ServerError> {
    match kept {
        Err(error) if !config.strict => {
            tracing::error!(%error, "cannot write the history");
            Ok(())
        }
        kept => kept.map_err(ServerError::State),
    }
}

/// A server with the signals and requests to control it.
struct Control<'a> {
    server: Server,
    file: ConfigFile<'a>,
    history: History,
    reloads: Reload,
    /// If set, a restart uses the configuration that was applied last.
    restores: bool,
    since: Instant,
    requests: mpsc::Sender<AdminRequest>,
    metrics: Option<Listening>,
    timeline: Timeline,
    /// The active command trace.
    search: Option<Search>,
    /// Error of the last failed retry, so that it is only logged once.
    retry_failed: Option<String>,
    admin: Option<Admin>,
    /// Path of this program at startup.
    program: PathBuf,
    upgrade_record: UpgradeRecord,
    /// The upgrade to be performed next.
    handing: Option<PreparedUpgrade>,
}

/// The configuration file, with the result of the last comparison.
struct ConfigFile<'a> {
    path: Option<PathBuf>,
    reread: &'a dyn Fn() -> Result<Config, String>,
    /// File version at the last comparison, and its configuration if it was valid.
    last: RefCell<Option<(Version, Option<String>)>>,
}

/// File version: device, inode, length, and the modification and change times.
type Version = (u64, u64, u64, (i64, i64), (i64, i64));

impl ConfigFile<'_> {
    /// Returns the current configuration in the file, as written by [`Config::to_yaml`], or `None`
    /// if it is not valid. The file is only read again if it has changed.
    fn yaml(&self) -> Option<String> {
        let read = || (self.reread)().ok().map(|config| config.to_yaml());
        let Some(path) = &self.path else {
            return read();
        };
        let file = std::fs::metadata(path).ok()?;
        let changed = (file.mtime(), file.mtime_nsec());
        let moved = (file.ctime(), file.ctime_nsec());
        let version = (file.dev(), file.ino(), file.len(), changed, moved);
        let mut last = self.last.borrow_mut();
        match &*last {
            // This is called for each status request, and it takes time to read and check the file.
            Some((seen, yaml)) if *seen == version => yaml.clone(),
            _ => {
                let yaml = read();
                *last = Some((version, yaml.clone()));
                yaml
            }
        }
    }
}

/// Returns the response for a scrub that was started or stopped.
fn scrub_response(result: Result<ScrubView, String>) -> Result<serde_json::Value, Failure> {
    let refused = |why| Failure::Refused { why, errno: None };
    result.map_err(refused).and_then(|view| to_json(&view))
}

/// Interval to retry unavailable objects.
const RETRY: Duration = Duration::from_secs(5);

/// Reason to stop serving.
enum Turn {
    /// The daemon should terminate.
    End(&'static str),
    /// Another program takes over.
    HandOver(PreparedUpgrade),
}

/// Change of the metrics address.
#[derive(Debug)]
enum MetricsChange {
    /// Same address, which is active or will be retried.
    Kept,
    /// A different address, or no address.
    Opened(Option<Listening>),
    /// The address is not available, but the change allows this.
    Unavailable(ServerError),
}

/// Reason why a configuration was not applied.
#[derive(Debug, thiserror::Error)]
enum ApplyError {
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error("{0}; nothing was applied")]
    Renumbered(#[from] Renumbered),
    #[error("{0}; nothing was applied")]
    Metrics(#[source] ServerError),
    #[error("cannot save the configuration: {0}; nothing was applied")]
    Keep(#[source] std::io::Error),
}

impl Control<'_> {
    async fn serve(
        mut self,
        signals: &mut Signals,
        mut queue: mpsc::Receiver<AdminRequest>,
    ) -> Result<(), ServerError> {
        loop {
            self.announce();
            self.server.warn_of_other_servers();
            // This is also required after a failed handover, because the service manager is waiting
            // for the reload to complete.
            notify(&[NotifyState::Ready]);
            match self.attend(signals, &mut queue).await {
                Turn::End(why) => {
                    notify(&[NotifyState::Stopping]);
                    return self.shut_down(why);
                }
                Turn::HandOver(handing) => {
                    // For the service manager, a handover is a reload: the process continues to
                    // exist, and is not ready until one of the programs is serving again.
                    notify_reloading();
                    self.notify_sessions();
                    match self
                        .hand_over(handing, &mut signals.end, &mut queue)
                        .await?
                    {
                        HandoverEnd::Back(same) => self = same,
                        HandoverEnd::Ended => {
                            notify(&[NotifyState::Stopping]);
                            tracing::info!("stopped");
                            return Ok(());
                        }
                    }
                }
            }
        }
    }

    /// Handles signals and requests one after another.
    async fn attend(
        &mut self,
        signals: &mut Signals,
        queue: &mut mpsc::Receiver<AdminRequest>,
    ) -> Turn {
        // These belong to the current server, because a failed handover creates a new server.
        let failure = self.server.failure();
        let _watchdog = Watchdog::start(self.server.pinger());
        let _room = Room::start(self.server.measurer());
        let mut sample = interval(timeline::EVERY);
        // After a long request, we don't want a burst of samples for the same time.
        sample.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut retry = interval_at(tokio::time::Instant::now() + RETRY, RETRY);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Channel from the threads that open missing objects. Each thread terminates after a few
        // seconds.
        let (opened, mut openings) = mpsc::channel(1);
        loop {
            tokio::select! {
                _ = sample.tick() => {
                    let sums = live::sums(&self.server, self.since.elapsed());
                    self.timeline.add_sample(sums);
                }
                _ = retry.tick() => if self.server.check_resources() {
                    self.open_missing(opened.clone());
                },
                Some(opened) = openings.recv() => self.retry(opened),
                () = signals.hangup.recv() => { let _ = self.reload("SIGHUP"); }
                why = signals.end.next() => return Turn::End(why),
                () = failure.notified() => return Turn::End("worker failed"),
                Some(request) = queue.recv() => self.handle_request(request),
            }
            // We do this here because the response to the client is already being sent, and the
            // next step stops the HTTP server.
            if let Some(handing) = self.handing.take() {
                return Turn::HandOver(handing);
            }
        }
    }

    /// Returns the difference between the current configuration and the configuration after a
    /// restart.
    fn standing(&self) -> Standing {
        let Some(file) = self.file.yaml() else {
            return Standing::Unsaved;
        };
        // We compare the text in our own format, so comments and the order in the file don't
        // matter.
        if file == self.server.config().to_yaml() {
            return Standing::Saved;
        }
        let is_kept = self.restores && self.history.is_kept();
        match is_kept && is_edited(&file, &self.history).is_ok_and(|is_edited| !is_edited) {
            true => Standing::Restored,
            false => Standing::Unsaved,
        }
    }

    fn inventory(&self) -> Inventory<'_> {
        Inventory::new(&self.server)
    }

    /// Opens missing objects on a separate thread, because a file system might not respond.
    fn open_missing(&self, opened: mpsc::Sender<OpenedStores>) {
        let open_requests = self.server.open_requests();
        // If the receiver was dropped, we undo the changes.
        let open = move || open_each(open_requests, |stores| drop(opened.blocking_send(stores)));
        let thread = std::thread::Builder::new().name("retry".into()).spawn(open);
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot retry unavailable objects");
        }
    }

    /// Retries objects that were not available, including addresses that were added to the host.
    fn retry(&mut self, opened: OpenedStores) {
        // This is retried every few seconds.
        let failed = self.server.retry(opened).err();
        // The same text means the same error, which should not be logged every five seconds.
        let failed = failed.map(|error| error.to_string());
        if let Some(error) = failed.as_ref().filter(|_| failed != self.retry_failed) {
            tracing::warn!(error, "cannot retry unavailable objects");
        }
        self.retry_failed = failed;
        let config = self.server.config();
        if self.metrics.is_none() && config.metrics.is_some() {
            let opened = open_metrics(config, &ServerState::default(), &self.requests);
            if let Ok(metrics) = opened {
                self.metrics = metrics;
                self.server.set_metrics_problem(None);
            }
        }
        if let (None, Location::At(path)) = (&self.admin, &self.server.config().admin)
            && let Ok(admin) = admin_at(path, &self.requests)
        {
            self.admin = Some(admin);
            self.server.set_admin_problem(None);
        }
    }

    /// Logs the active objects.
    fn announce(&self) {
        for target in self.inventory().targets() {
            let portals = target.portals.iter();
            for portal in portals.filter(|portal| portal.problem.is_none()) {
                tracing::info!(
                    target = %target.name, protocol = %portal.protocol, listen = %portal.listen,
                    iqn = target.iqn.as_deref(), luns = target.luns.len(), "serving"
                );
            }
        }
    }

    fn handle_request(&mut self, request: AdminRequest) {
        let who = &request.who;
        let response = match request.command {
            AdminCommand::Status => {
                let (uptime, record) = (self.since.elapsed(), &self.upgrade_record);
                to_json(&self.inventory().status(uptime, record, self.standing()))
            }
            AdminCommand::Sessions => to_json(&self.inventory().sessions()),
            AdminCommand::Targets => to_json(&self.inventory().targets()),
            AdminCommand::History => to_json(&view::history(self.history.entries())),
            AdminCommand::Metrics => {
                let config = ConfigState {
                    is_unsaved: self.standing() != Standing::Saved,
                    reload: self.reloads,
                };
                match metrics::text(&self.inventory(), config, self.since.elapsed()) {
                    Ok(text) => to_json(&text),
                    Err(error) => Err(Failure::Failed(error.to_string())),
                }
            }
            AdminCommand::Live => {
                let uptime = self.since.elapsed();
                to_json(&self.inventory().live(uptime, self.standing()))
            }
            AdminCommand::Recent(since) => to_json(&self.timeline.recent(since)),
            AdminCommand::Health => Ok(serde_json::Value::Null),
            AdminCommand::Ready => self
                .inventory()
                .ready()
                .map(|()| serde_json::Value::Null)
                .map_err(|why| Failure::Refused { why, errno: None }),
            AdminCommand::Config => self.kept().and_then(|kept| to_json(&kept)),
            AdminCommand::Apply {
                proposal,
                replaces,
                how,
                allow_unavailable,
            } => {
                let how = how.name();
                let config = self
                    .check_revision(replaces.as_deref())
                    .and_then(|()| self.proposed(&proposal))
                    .inspect_err(|failure| self.reject(ChangeOrigin { who, how }, failure));
                config.and_then(|config| {
                    to_json(&self.apply(config, ChangeOrigin { who, how }, allow_unavailable)?)
                })
            }
            AdminCommand::Diff(proposal) => self
                .proposed(&proposal)
                .and_then(|config| to_json(&self.changes(&config))),
            AdminCommand::Rollback {
                back,
                allow_unavailable,
            } => {
                let done = self.roll_back(back, who, allow_unavailable);
                done.and_then(|done| to_json(&done))
            }
            AdminCommand::Reload => self.reload(who).and_then(|changes| to_json(&changes)),
            AdminCommand::Trace(wanted) => self.trace(wanted).map(|()| serde_json::Value::Null),
            AdminCommand::TraceLook => match &mut self.search {
                Some(search) => to_json(&search.poll(&self.server)),
                None => to_json(&true),
            },
            AdminCommand::TraceEnd => {
                let search = self.search.take();
                to_json(
                    &search
                        .map(|search| search.stop(&self.server))
                        .unwrap_or_default(),
                )
            }
            AdminCommand::Upgrade(program) => {
                self.prepare_upgrade(program, who)
                    .and_then(|(upgrade, handing)| {
                        self.handing = Some(handing);
                        to_json(&upgrade)
                    })
            }
            AdminCommand::Scrubs => to_json(&self.server.scrubs()),
            AdminCommand::Scrub { backend, rate } => {
                let started = self.server.start_scrub(&backend, rate);
                scrub_response(started)
            }
            AdminCommand::StopScrub(backend) => scrub_response(self.server.stop_scrub(&backend)),
            AdminCommand::Disconnect { name, block } => self.disconnect(who, &name, block),
            AdminCommand::Unblock(name) => self.unblock(who, &name),
            AdminCommand::ClearFlushFailure(serial) => self.clear_flush_failure(serial.as_deref()),
            AdminCommand::Rescan => self
                .server
                .rescan()
                .map_err(|e| Failure::Failed(e.to_string()))
                .and_then(|()| to_json(&self.inventory().targets())),
        };
        // The client may have disconnected.
        let _ = request.reply.send(response);
    }

    /// Requests a logout for all sessions of an initiator, or for the session with a number. If
    /// `block` is set, the initiator cannot log in again.
    fn disconnect(
        &self,
        who: &str,
        name: &str,
        block: Option<Block>,
    ) -> Result<serde_json::Value, Failure> {
        let refused = |why| Err(Failure::Refused { why, errno: None });
        let (channels, sessions) = self.inventory().sessions_named(name);
        if let Some(block) = block {
            let of_sessions = sessions.iter().map(|view| &*view.initiator);
            let names = of_sessions.chain(sessions.is_empty().then_some(name));
            let initiators: Option<Vec<_>> = names.map(Initiator::parse).collect();
            let Some(mut initiators) = initiators else {
                let why = format!(
                    "`{name}` is neither a session nor an initiator: use an iSCSI name, or the \
                     GUID or port identifier of an SRP initiator"
                );
                return refused(why);
            };
            initiators.dedup();
            let blocklist = self.server.blocklist();
            if let Err(error) = blocklist.block(&initiators, block.duration(), who) {
                return refused(format!("cannot block `{name}`: {error}"));
            }
            for initiator in &initiators {
                audit::blocked(who, initiator, block.duration());
            }
            self.server.log_out_blocked();
        } else if channels.is_empty() {
            return refused(format!(
                "no session of `{name}`: `riserd sessions` lists initiators and numbers"
            ));
        }
        if !channels.is_empty() {
            audit::disconnecting(who, name, channels.len());
            self.server.log_out(channels);
        }
        to_json(&sessions)
    }

    /// Allows a blocked initiator to log in again.
    fn unblock(&self, who: &str, name: &str) -> Result<serde_json::Value, Failure> {
        let refused = |why| Err(Failure::Refused { why, errno: None });
        let blocklist = self.server.blocklist();
        let Some(initiator) = Initiator::parse(name) else {
            return refused(format!(
                "invalid initiator `{name}`: `riserd status` lists blocked initiators"
            ));
        };
        match blocklist.unblock(&initiator) {
            Ok(true) => audit::unblocked(who, &initiator),
            Ok(false) => {
                return refused(format!(
                    "`{name}` is not blocked: `riserd status` lists blocked initiators"
                ));
            }
            Err(error) => return refused(format!("cannot unblock `{name}`: {error}")),
        }
        to_json(&blocklist.list())
    }

    fn clear_flush_failure(&self, serial: Option<&str>) -> Result<serde_json::Value, Failure> {
        let cleared = self.server.clear_flush_failure(serial).map_err(|error| {
            let other = match serial {
                None => "; other units can be cleared by their serial numbers",
                Some(_) => "",
            };
            let why = format!("cannot clear the flush failure of {error}{other}");
            Failure::Refused { why, errno: None }
        })?;
        if cleared == 0 {
            let targets = self.inventory().targets();
            let is_known = |serial| {
                let mut luns = targets.iter().flat_map(|target| target.luns.values());
                luns.any(|lun| lun.serial == serial)
            };
            let why = match serial {
                None => "no flush failure is recorded".to_owned(),
                Some(serial) if is_known(serial) => {
                    format!("no flush failure of unit {serial} is recorded")
                }
                Some(serial) => format!("no unit has the serial number {serial}"),
            };
            return Err(Failure::Refused { why, errno: None });
        }
        to_json(&self.inventory().targets())
    }

    /// Starts a command trace.
    fn trace(&mut self, wanted: Wanted) -> Result<(), Failure> {
        wanted.check().map_err(Failure::Mistake)?;
        // A client that was killed does not stop its trace, so we replace the trace if it was not
        // polled recently.
        if self.search.as_ref().is_some_and(|s| !s.is_forgotten()) {
            let why = "another client is tracing commands".to_owned();
            return Err(Failure::Refused { why, errno: None });
        }
        // The old tracer must release the units first.
        self.search = None;
        let refused = |why| Failure::Refused { why, errno: None };
        self.search = Some(Search::start(&self.server, wanted).map_err(refused)?);
        Ok(())
    }

    /// Returns the current configuration in both formats.
    fn kept(&self) -> Result<Kept, Failure> {
        let config = self.server.config();
        let yaml = config.to_yaml();
        Ok(Kept {
            revision: revision(&yaml),
            json: to_json(&config.to_value())?,
            yaml,
        })
    }

    /// Checks the revision of the current configuration.
    fn check_revision(&self, wanted: Option<&str>) -> Result<(), Failure> {
        match wanted {
            Some(wanted) if wanted != revision(&self.server.config().to_yaml()) => {
                Err(Failure::Outdated)
            }
            _ => Ok(()),
        }
    }

    /// Returns the configuration proposed by a client.
    fn proposed(&self, proposal: &Proposal) -> Result<Config, Failure> {
        match proposal {
            Proposal::Whole(text) => parse(text),
            Proposal::Patch(patch) => {
                let config = patch.apply(self.server.config());
                config.map_err(|error| Failure::Mistake(error.to_string()))
            }
        }
    }

    /// Returns the changes made by a new configuration.
    fn changes(&self, config: &Config) -> Changes {
        let refused = self.server.check(config).map_err(ApplyError::from);
        let refused = refused.and_then(|()| self.check_numbers(config));
        Changes {
            changes: diff(self.server.config(), config),
            refused: refused.err().map(|error| error.to_string()),
            warnings: view::warnings(&self.server, self.server.config(), config),
            written: view::written(view::drift(&self.server, config), None),
        }
    }

    /// Applies a configuration and stores it, or does neither of them, and logs the result.
    fn apply(
        &mut self,
        config: Config,
        origin: ChangeOrigin<'_>,
        allow_unavailable: bool,
    ) -> Result<Changes, Failure> {
        let ChangeOrigin { who, how } = origin;
        let old = self.server.config().clone();
        let changes = diff(&old, &config);
        let before = self.standing();
        if before == Standing::Saved {
            // For example, after `save`: writing the file should not be treated as an edit that is
            // used after a restart.
            let file = self.server.config().to_yaml();
            if let Err(error) = self.history.see_file(file) {
                tracing::warn!(%error, "cannot record that the file was read");
            }
        }
        // With a strict configuration, the next start would fail without these objects.
        let is_lenient = allow_unavailable && !config.strict;
        let opened = self
            .check_numbers(&config)
            .and_then(|()| self.open_other_metrics(&config, is_lenient));
        let history = &mut self.history;
        // The contents of referenced files may have changed, so we apply the configuration even if
        // it is the same.
        let entry = (!changes.is_empty()).then(|| Entry::now(who, how, config.to_yaml()));
        let applied = opened.and_then(|metrics| {
            let agree = || {
                entry
                    .map_or(Ok(()), |entry| history.record(entry))
                    .map_err(ApplyError::Keep)
            };
            match is_lenient {
                true => self.server.change_without_unavailable(config, agree)?,
                false => self.server.change_if(config, agree)?,
            }
            Ok(metrics)
        });
        match applied {
            Ok(metrics) => {
                self.change_metrics(metrics);
                let log = &self.server.config().log;
                if old.log != *log {
                    logging::set_filter(log);
                }
                let revision = revision(&self.server.config().to_yaml());
                audit::changed(origin, &revision, &changes);
                for change in &changes {
                    tracing::info!(path = %change.path, old = %change.old, new = %change.new, "changed");
                }
                let warnings = view::warnings(&self.server, &old, self.server.config());
                for warning in &warnings {
                    tracing::warn!("{warning}");
                }
                let drift = view::drift(&self.server, self.server.config());
                // Only show this once, not for each change.
                let standing = Some(self.standing()).filter(|standing| *standing != before);
                Ok(Changes {
                    changes,
                    refused: None,
                    warnings,
                    written: view::written(drift, standing),
                })
            }
            Err(error) => {
                self.reject(origin, &error);
                let (why, errno) = (error.to_string(), errno(&error));
                Err(Failure::Refused { why, errno })
            }
        }
    }

    /// Returns an error if disks would exchange numbers while they are in use.
    fn check_numbers(&self, config: &Config) -> Result<(), ApplyError> {
        let is_used = |target: &str| {
            let sessions = self.inventory().sessions();
            sessions.iter().any(|session| session.target == target)
        };
        match renumbering::find(self.server.config(), config, is_used) {
            Some(renumbered) => Err(renumbered.into()),
            None => Ok(()),
        }
    }

    /// Opens the metrics address of a new configuration.
    fn open_other_metrics(
        &self,
        config: &Config,
        is_lenient: bool,
    ) -> Result<MetricsChange, ApplyError> {
        if let Some(wanted) = &config.metrics {
            let listening = self.metrics.as_ref().map(Listening::addr);
            // A missing address is retried separately.
            let is_missing = Subject::Metrics(wanted.listen);
            if listening == Some(wanted.listen) || self.server.problems().has(&is_missing) {
                return Ok(MetricsChange::Kept);
            }
        }
        match open_metrics(config, &ServerState::default(), &self.requests) {
            Ok(opened) => Ok(MetricsChange::Opened(opened)),
            Err(error) if is_lenient => Ok(MetricsChange::Unavailable(error)),
            Err(error) => Err(ApplyError::Metrics(error)),
        }
    }

    /// Updates the metrics listener for the configuration that was just applied.
    fn change_metrics(&mut self, change: MetricsChange) {
        let (opened, error) = match change {
            MetricsChange::Kept => return,
            MetricsChange::Opened(opened) => (opened, None),
            MetricsChange::Unavailable(error) => (None, Some(error)),
        };
        self.metrics = opened;
        let wanted = self.server.config().metrics.as_ref();
        let listen = wanted.map(|wanted| wanted.listen);
        self.server.set_metrics_problem(listen.zip(error.as_ref()));
    }

    /// Applies the configuration from `back` changes ago.
    fn roll_back(
        &mut self,
        back: usize,
        who: &str,
        allow_unavailable: bool,
    ) -> Result<Changes, Failure> {
        let how = format!("rollback {back}");
        let Some(entry) = self.history.entries().get(back) else {
            let kept = self.history.entries().len();
            let why = format!("cannot roll back {back} configurations: the history has {kept}");
            self.reject(ChangeOrigin { who, how: &how }, &why);
            return Err(Failure::Refused { why, errno: None });
        };
        let config = parse(&entry.yaml)?;
        self.apply(config, ChangeOrigin { who, how: &how }, allow_unavailable)
    }

    /// Returns changes since the file was last read.
    fn unsaved(&self) -> Vec<Difference> {
        let Some(seen) = self.history.file() else {
            return Vec::new();
        };
        let seen = Config::parse(seen, "the previous configuration file");
        seen.map_or_else(|_| Vec::new(), |seen| diff(&seen, self.server.config()))
    }

    /// Reloads the configuration file and applies it.
    fn reload(&mut self, who: &str) -> Result<Changes, Failure> {
        let how = "reload";
        let origin = ChangeOrigin { who, how };
        notify_reloading();
        let applied = match (self.file.reread)() {
            Ok(config) => {
                let file = config.to_yaml();
                // We must get this before applying the file, because after that nothing is unsaved.
                let unsaved = self.unsaved();
                self.apply(config, origin, false).inspect(|applied| {
                    for change in taken_back(&applied.changes, &unsaved) {
                        tracing::warn!(
                            path = %change.path, old = %change.old, new = %change.new,
                            "reverted a change that was not saved"
                        );
                    }
                    // The file will be treated as edited and applied again, which has the same
                    // result.
                    if let Err(error) = self.history.see_file(file) {
                        tracing::warn!(%error, "cannot record that the file was read");
                    }
                })
            }
            Err(error) => {
                self.reject(origin, &error);
                let (why, errno) = (error, None);
                Err(Failure::Refused { why, errno })
            }
        };
        notify(&[NotifyState::Ready]);
        self.reloads.record(applied.is_ok());
        applied
    }

    /// Writes an audit log event for a rejected configuration.
    fn reject(&self, origin: ChangeOrigin<'_>, reason: &dyn std::fmt::Display) {
        let stays = revision(&self.server.config().to_yaml());
        audit::rejected(origin, &stays, reason);
    }

    fn shut_down(self, why: &str) -> Result<(), ServerError> {
        tracing::info!(why, "shutting down");
        self.history.note_ending();
        self.notify_sessions();
        self.server.shutdown()?;
        tracing::info!("stopped");
        Ok(())
    }

    /// Logs the sessions that will be closed.
    fn notify_sessions(&self) {
        tracing::info!(sessions = self.server.sessions(), "closing sessions");
        for session in self.inventory().sessions() {
            tracing::info!(
                initiator = %session.initiator, peer = %session.peer, state = %session.state,
                in_flight = session.in_flight, "session"
            );
        }
    }
}

/// Returns the reload changes that affect unsaved changes.
fn taken_back<'a>(
    changes: &'a [Difference],
    unsaved: &'a [Difference],
) -> impl Iterator<Item = &'a Difference> {
    // A created object could be changed or replaced by an object with the same name in the file.
    let is_in = |inner: &str, outer: &str| {
        let rest = inner.strip_prefix(outer);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    changes.iter().filter(move |change| {
        let mut paths = unsaved.iter().map(|unsaved| &unsaved.path);
        paths.any(|path| is_in(path, &change.path) || is_in(&change.path, path))
    })
}

/// Parses a configuration received via the socket.
fn parse(text: &str) -> Result<Config, Failure> {
    Config::parse(text, "configuration").map_err(|error| Failure::Mistake(error.to_string()))
}

/// Returns the revision for the contents of a configuration.
fn revision(yaml: &str) -> String {
    let mut hasher = DefaultHasher::new();
    yaml.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Returns the `errno` value if this was caused by a system error.
fn errno(error: &ApplyError) -> Option<i32> {
    if let ApplyError::Change(ChangeError::InUse(_) | ChangeError::Threshold(_)) = error {
        return Some(rustix::io::Errno::BUSY.raw_os_error());
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(OpenError::Locked { .. }) = error.downcast_ref() {
            return Some(rustix::io::Errno::BUSY.raw_os_error());
        }
        let io = error.downcast_ref::<std::io::Error>();
        if let Some(errno) = io.and_then(std::io::Error::raw_os_error) {
            return Some(errno);
        }
        cause = error.source();
    }
    None
}

fn to_json(view: &impl serde::Serialize) -> api::AdminResult {
    serde_json::to_value(view).map_err(|e| Failure::Failed(e.to_string()))
}

/// Notifies the service manager that the daemon is reloading until it is ready again.
fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "the service manager was not notified"),
    }
}

/// Notifies the service manager, if any.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "the service manager was not notified");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn reload_reports_reverted_unsaved_changes() {
        let change = |path: &str| Difference {
            path: path.to_owned(),
            old: Value::Null,
            new: 1.into(),
        };
        let unsaved = ["/targets/t/luns/1", "/targets/new", "/limits/a"].map(change);
        let changes = [
            "/targets/t/luns/1",
            "/targets/t/luns/10",
            "/targets/new/luns/0",
            "/limits",
            "/metrics",
        ];
        let changes = changes.map(change);
        let taken_back = taken_back(&changes, &unsaved).map(|change| change.path.as_str());
        let expected = ["/targets/t/luns/1", "/targets/new/luns/0", "/limits"];
        assert_eq!(taken_back.collect::<Vec<_>>(), expected);
    }
}
