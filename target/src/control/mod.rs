//! The control plane of `riserd`: signals, and the admin API on a Unix socket.
//!
//! ```text
//! signals ─────────────────────┐
//!                              ├──→ run: owns the Server, does one thing at a time
//! admin socket ─ AdminRequest ─┘            │
//!   (tokio, axum: `api`)                    └──→ workers, through their mailboxes
//! ```
//!
//! Workers know nothing of tokio. What people and tools ask for waits in a queue of [`WAITING`]
//! requests for the thread that owns the [`Server`]; a request that finds it full is refused.
//!
//! # Modules
//! - [`run`]: what `riserd run` does: start, notify the service manager, serve, shut down.
//! - [`routes`]: the paths of the admin API. [`api`]: what they ask the daemon. [`view`]: fills
//!   what they say, whose types are those of `riser-admin-api`.
//! - [`http`]: those that may be had on a TCP address too: [`metrics`], [`health`], the status
//!   page, which shows what [`live`] says; [`top`] shows its rates in a terminal. [`timeline`]:
//!   what the page shows of the last minutes; [`events`]: what happened.
//! - [`trace`]: the ways of single commands.
//! - [`socket`]: place and access of the API.
//! - [`history`]: the configurations that were applied. [`state`]: the directory where they are
//!   kept, with [`reservations`] and [`identities`] of logical units, failed [`flushes`] and the
//!   numbers of [`ports`].
//! - `room`: measures the room of backends.
//! - [`upgrade`]: another program takes over.
//! - `open`: what is opened at the start. `serving`: servers of HTTP that come to an end.
//! - `bounded`: their listener, whose clients cannot keep each other out.
//! - `watchdog`: reports to the service manager that all workers make progress, on a separate
//!   thread.
//! - [`report`]: what `riserd sessions` and its like print, whose client is that of
//!   `riser-admin-api`; [`objects`]: the configuration's objects with the daemon's data about them.

pub mod api;
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
pub mod metrics;
pub mod objects;
mod open;
pub mod ports;
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

use sd_notify::NotifyState;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, interval_at};

use self::api::{AdminRequest, Ask, Failure, Kept, Proposal};
use self::history::{Entry, History};
use self::http::Listening;
use self::open::{
    PREDECESSOR, admin_at, admin_or_problem, is_edited, open_metrics, restored, start,
};
use self::room::Room;
use self::signals::Signals;
use self::socket::Admin;
use self::timeline::Timeline;
use self::trace::{Search, Wanted};
use self::upgrade::{Handover, HandoverEnd, PreparedUpgrade, UpgradeRecord};
use self::view::{Changes, Standing};
use self::watchdog::Watchdog;
use crate::audit::{self, Asked};
use crate::backend::{OpenError, OpenedStores, look, open_each};
use crate::config::{Config, Difference, Location, diff};
use crate::server::handover::ServerState;
use crate::server::problems::Subject;
use crate::server::reload::ChangeError;
use crate::server::{Server, ServerError};

// Clients of the admin API still wait when file systems have had their time to answer.
const _: () = assert!(look::LONGEST.as_secs() < riser_admin_api::client::PATIENCE.as_secs());

/// Requests that wait at most.
pub const WAITING: usize = 16;

/// Origin of a daemon's configuration.
pub struct Source<'a> {
    /// Configuration that the file has.
    pub config: Config,
    /// Path of the file.
    pub file: PathBuf,
    /// Reads the file again.
    pub reread: &'a dyn Fn() -> Result<Config, String>,
    /// The configuration that was applied last comes before the file's.
    pub restore: bool,
    /// Handover state of the program before. A configuration among it comes before all others.
    pub handover: Handover,
}

/// Serves a configuration until SIGTERM or SIGINT, or until another program takes over. At SIGHUP,
/// and when the admin API asks for it, takes another one, as far as [`Server::change`] allows.
///
/// # Errors
/// [`ServerError`]: it could not start, a worker failed, or data could not be made durable.
pub fn run(source: Source<'_>) -> Result<(), ServerError> {
    let runtime = runtime().map_err(ServerError::ControlPlane)?;
    let Handover {
        predecessor,
        server_state,
        admin: listener,
        ..
    } = source.handover;
    // Looked up now: an upgrade replaces the file, after which the kernel calls it deleted.
    let program = upgrade::own_program().map_err(ServerError::Program)?;
    runtime.block_on(async {
        // Before anything is opened: until then a signal would end the process at once, with files
        // half made.
        let mut signals = Signals::new().map_err(ServerError::Signal)?;
        // Before the server, which keeps reservations there: the directory's lock lets one daemon
        // use them at a time.
        let mut history = History::open(&source.config.state).map_err(ServerError::State)?;
        let (upgrade_record, how) = match predecessor {
            Some(predecessor) => {
                history.adopt(predecessor.history);
                (predecessor.upgrade_record, "upgrade")
            }
            None => (UpgradeRecord::default(), "start"),
        };
        // After an upgrade the configuration that was handed over counts, not the file.
        let file = (how == "start").then(|| source.config.to_yaml());
        let config = match source.restore && file.is_some() {
            true => restored(source.config, &history)?,
            false => source.config,
        };
        let mut server = start(|| {
            let keepers = history.keepers();
            Server::start_patiently(&config, &server_state, keepers, PREDECESSOR)
        })?;
        let yaml = config.to_yaml();
        // A start that serves what was served last is no change, and would push older ones out of
        // the history.
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
        // After the server: an address that metrics cannot have must not delay what initiators
        // need.
        let metrics = match start(|| open_metrics(&config, &server_state, &requests)) {
            Err(error) if !config.strict => {
                let wanted = config.metrics.as_ref();
                server.set_metrics_problem(wanted.map(|wanted| (wanted.listen, &error)));
                None
            }
            metrics => metrics?,
        };
        let admin = admin_or_problem(&config, listener, &requests, &mut server)?;
        // Clients that connect to sockets that were not adopted would wait for ever.
        drop(server_state);
        if let Some(from) = &upgrade_record.upgraded_from {
            tracing::info!(%from, to = env!("CARGO_PKG_VERSION"), "took over");
        }
        let asked = Asked { who: "riserd", how };
        audit::changed(asked, &revision(&config.to_yaml()), &[]);
        let control = Control {
            server,
            file: ConfigFile {
                path: source.file,
                reread: source.reread,
                last: RefCell::default(),
            },
            history,
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

/// Makes the runtime of the control plane.
///
/// # Errors
/// A thread, or a descriptor, cannot be had.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let build = || {
        // A thread of its own for HTTP: the control plane blocks in files and devices while it
        // answers a request, and clients must be able to connect and to give up meanwhile.
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("riser-control")
            .enable_all()
            .build()
    };
    // Tokio panics where the system refuses it a thread or the sockets that its signals take, which
    // is no defect of this program, and is not to look like one.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let built = std::panic::catch_unwind(build);
    std::panic::set_hook(hook);
    built.unwrap_or_else(|panic| {
        let why = panic.downcast_ref::<String>().map(String::as_str);
        let why = why.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(std::io::Error::other(
            why.unwrap_or("its runtime cannot be made").to_owned(),
        ))
    })
}

/// Logs an error of the history, which is fatal only in strict mode.
fn tolerate(config: &Config, kept: std::io::Result<()>) -> Result<(), ServerError> {
    match kept {
        Err(error) if !config.strict => {
            tracing::error!(%error, "the history cannot be written");
            Ok(())
        }
        kept => kept.map_err(ServerError::State),
    }
}

/// A server with the signals and requests that control it.
struct Control<'a> {
    server: Server,
    file: ConfigFile<'a>,
    history: History,
    /// A restart serves what was applied last.
    restores: bool,
    since: Instant,
    requests: mpsc::Sender<AdminRequest>,
    metrics: Option<Listening>,
    timeline: Timeline,
    /// Search for commands that is under way.
    search: Option<Search>,
    /// Reason why the last retry failed, so that it is logged once.
    retry_failed: Option<String>,
    admin: Option<Admin>,
    /// Path of this program at the start.
    program: PathBuf,
    upgrade_record: UpgradeRecord,
    /// An upgrade that is to be done next.
    handing: Option<PreparedUpgrade>,
}

/// Configuration file, with its last comparison.
struct ConfigFile<'a> {
    path: PathBuf,
    reread: &'a dyn Fn() -> Result<Config, String>,
    /// Version of the file at the last comparison, and its configuration if that was valid.
    last: RefCell<Option<(Version, Option<String>)>>,
}

/// The device, inode, length and times of the last change of a file.
type Version = (u64, u64, u64, (i64, i64), (i64, i64));

impl ConfigFile<'_> {
    /// Configuration of the file now, as [`Config::to_yaml`] writes it; `None` if it cannot be
    /// served. A file that did not change since is not read again.
    fn yaml(&self) -> Option<String> {
        let file = std::fs::metadata(&self.path).ok()?;
        let changed = (file.mtime(), file.mtime_nsec());
        let moved = (file.ctime(), file.ctime_nsec());
        let version = (file.dev(), file.ino(), file.len(), changed, moved);
        let mut last = self.last.borrow_mut();
        match &*last {
            // Each request for the status asks, and reading and checking the file takes time.
            Some((seen, yaml)) if *seen == version => yaml.clone(),
            _ => {
                let yaml = (self.reread)().ok().map(|config| config.to_yaml());
                *last = Some((version, yaml.clone()));
                yaml
            }
        }
    }
}

/// Interval of retries for what cannot be served.
const RETRY: Duration = Duration::from_secs(5);

/// Reason for which the daemon stops serving as it did.
enum Turn {
    /// It is to end.
    End(&'static str),
    /// Another program takes over.
    HandOver(PreparedUpgrade),
}

/// Reason why a configuration was not applied.
#[derive(Debug, thiserror::Error)]
enum ApplyError {
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error("{0}; nothing was applied")]
    Metrics(#[source] ServerError),
    #[error("it cannot be kept: {0}; nothing was applied")]
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
            // Also after a hand-over that has failed: the service manager waits for the end of the
            // reload.
            notify(&[NotifyState::Ready]);
            match self.attend(signals, &mut queue).await {
                Turn::End(why) => {
                    notify(&[NotifyState::Stopping]);
                    return self.shut_down(why);
                }
                Turn::HandOver(handing) => {
                    // For the service manager a hand-over is a reload: the process stays, and is
                    // not ready until one of the two programs serves again.
                    notify_reloading();
                    self.notify_sessions();
                    match self
                        .hand_over(handing, &mut signals.end, &mut queue)
                        .await?
                    {
                        HandoverEnd::Back(same) => self = same,
                        HandoverEnd::Ended => {
                            notify(&[NotifyState::Stopping]);
                            tracing::info!("ended");
                            return Ok(());
                        }
                    }
                }
            }
        }
    }

    /// Does what signals and requests ask for, one after another.
    async fn attend(
        &mut self,
        signals: &mut Signals,
        queue: &mut mpsc::Receiver<AdminRequest>,
    ) -> Turn {
        // All of these are of the present server: after a hand-over that has failed there is
        // another one.
        let failure = self.server.failure();
        let _watchdog = Watchdog::start(self.server.pinger());
        let _room = Room::start(self.server.measurer());
        let mut sample = interval(timeline::EVERY);
        // A request that took seconds must not be followed by a burst of samples of the same
        // moment.
        sample.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut retry = interval_at(tokio::time::Instant::now() + RETRY, RETRY);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // From the threads that open what is missing: each ends after some seconds.
        let (opened, mut openings) = mpsc::channel(1);
        loop {
            tokio::select! {
                _ = sample.tick() => {
                    let sums = live::sums(&self.server, self.since.elapsed());
                    self.timeline.take(sums);
                }
                _ = retry.tick() => if self.server.look() {
                    self.open_missing(opened.clone());
                },
                Some(opened) = openings.recv() => self.retry(opened),
                () = signals.hangup.recv() => { let _ = self.reload("SIGHUP"); }
                why = signals.end.next() => return Turn::End(why),
                () = failure.notified() => return Turn::End("a worker failed"),
                Some(request) = queue.recv() => self.answer(request),
            }
            // Only here, with the answer to the client on its way: what follows ends the server of
            // HTTP.
            if let Some(handing) = self.handing.take() {
                return Turn::HandOver(handing);
            }
        }
    }

    /// Standing of the configuration: what a restart would serve.
    fn standing(&self) -> Standing {
        let Some(file) = self.file.yaml() else {
            return Standing::Unsaved;
        };
        // Compared as configurations are written by us, so comments and order in the file do not
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

    /// Opens what could not be opened, on a thread of its own: a file system may not answer.
    fn open_missing(&self, opened: mpsc::Sender<OpenedStores>) {
        let wishes = self.server.wishes();
        // Without a receiver they are undone.
        let open = move || open_each(wishes, |stores| drop(opened.blocking_send(stores)));
        let thread = std::thread::Builder::new().name("retry".into()).spawn(open);
        if let Err(error) = thread {
            tracing::warn!(%error, "what is not served cannot be tried again");
        }
    }

    /// Tries again to serve what could not be served, also at addresses that the host has only now.
    fn retry(&mut self, opened: OpenedStores) {
        // It is tried every few seconds.
        let failed = self.server.retry(opened).err();
        // The same text again is the same obstacle, which needs no line every five seconds.
        let failed = failed.map(|error| error.to_string());
        if let Some(error) = failed.as_ref().filter(|_| failed != self.retry_failed) {
            tracing::warn!(error, "what is not served cannot be tried again");
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

    /// Says what is served.
    fn announce(&self) {
        let problems = self.server.problems();
        for target in view::targets(&self.server) {
            for portal in &target.portals {
                if problems.has_portal(&portal.protocol, &portal.listen) {
                    continue;
                }
                tracing::info!(
                    target = %target.name, protocol = %portal.protocol, listen = %portal.listen,
                    iqn = target.iqn.as_deref(), luns = target.luns.len(), "serving"
                );
            }
        }
    }

    fn answer(&mut self, request: AdminRequest) {
        let who = &request.who;
        let answer = match request.ask {
            Ask::Status => {
                let uptime = self.since.elapsed().as_secs();
                to_json(&view::status(
                    &self.server,
                    uptime,
                    &self.upgrade_record,
                    self.standing(),
                ))
            }
            Ask::Sessions => to_json(&view::sessions(&self.server)),
            Ask::Targets => to_json(&view::targets(&self.server)),
            Ask::History => to_json(&view::history(self.history.entries())),
            Ask::Metrics => match metrics::text(&self.server, self.since.elapsed()) {
                Ok(text) => to_json(&text),
                Err(error) => Err(Failure::Failed(error.to_string())),
            },
            Ask::Live => to_json(&live::live(&self.server, self.since.elapsed())),
            Ask::Recent(since) => to_json(&self.timeline.recent(since)),
            Ask::Health => Ok(serde_json::Value::Null),
            Ask::Ready => health::ready(&self.server, &self.server.snapshot())
                .map(|()| serde_json::Value::Null)
                .map_err(|why| Failure::Refused { why, errno: None }),
            Ask::Config => self.kept().and_then(|kept| to_json(&kept)),
            Ask::Apply { proposal, replaces } => {
                let how = "apply";
                let config = self
                    .check_revision(replaces.as_deref())
                    .and_then(|()| self.proposed(&proposal))
                    .inspect_err(|failure| self.reject(Asked { who, how }, failure));
                config.and_then(|config| to_json(&self.apply(config, Asked { who, how })?))
            }
            Ask::Diff(proposal) => self
                .proposed(&proposal)
                .and_then(|config| to_json(&self.changes(&config))),
            Ask::Rollback(back) => self.roll_back(back, who).and_then(|done| to_json(&done)),
            Ask::Reload => self.reload(who).and_then(|changes| to_json(&changes)),
            Ask::Trace(wanted) => self.trace(wanted).map(|()| serde_json::Value::Null),
            Ask::TraceLook => match &mut self.search {
                Some(search) => to_json(&search.look(&self.server)),
                None => to_json(&true),
            },
            Ask::TraceEnd => {
                let search = self.search.take();
                to_json(
                    &search
                        .map(|search| search.end(&self.server))
                        .unwrap_or_default(),
                )
            }
            Ask::Upgrade(program) => {
                self.prepare_upgrade(program, who)
                    .and_then(|(upgrade, handing)| {
                        self.handing = Some(handing);
                        to_json(&upgrade)
                    })
            }
            Ask::ClearFlushFailure(serial) => self.clear_flush_failure(serial.as_deref()),
            Ask::Rescan => self
                .server
                .rescan()
                .map_err(|e| Failure::Failed(e.to_string()))
                .and_then(|()| to_json(&view::targets(&self.server))),
        };
        // The client may have disconnected.
        let _ = request.reply.send(answer);
    }

    fn clear_flush_failure(&self, serial: Option<&str>) -> Result<serde_json::Value, Failure> {
        if self.server.clear_flush_failure(serial) == 0 {
            let targets = view::targets(&self.server);
            let is_known = |serial| {
                let mut luns = targets.iter().flat_map(|target| target.luns.values());
                luns.any(|lun| lun.serial == serial)
            };
            let why = match serial {
                None => "no flush has failed".to_owned(),
                Some(serial) if is_known(serial) => format!("no flush of unit {serial} has failed"),
                Some(serial) => format!("no unit has the serial number {serial}"),
            };
            return Err(Failure::Refused { why, errno: None });
        }
        to_json(&view::targets(&self.server))
    }

    /// Begins to look for commands.
    fn trace(&mut self, wanted: Wanted) -> Result<(), Failure> {
        wanted.check().map_err(Failure::Mistake)?;
        // A client that was killed does not end its search, so one that is not looked at gives
        // way.
        if self.search.as_ref().is_some_and(|s| !s.is_forgotten()) {
            let why = "another client is tracing commands".to_owned();
            return Err(Failure::Refused { why, errno: None });
        }
        // The old server has to release the units first.
        self.search = None;
        let refused = |why| Failure::Refused { why, errno: None };
        self.search = Some(Search::begin(&self.server, wanted).map_err(refused)?);
        Ok(())
    }

    /// The configuration that is served, in both forms.
    fn kept(&self) -> Result<Kept, Failure> {
        let config = self.server.config();
        let yaml = config.to_yaml();
        Ok(Kept {
            revision: revision(&yaml),
            json: to_json(&config.to_value())?,
            yaml,
        })
    }

    /// Returns an error unless this is the configuration's revision.
    fn check_revision(&self, wanted: Option<&str>) -> Result<(), Failure> {
        match wanted {
            Some(wanted) if wanted != revision(&self.server.config().to_yaml()) => {
                Err(Failure::Outdated)
            }
            _ => Ok(()),
        }
    }

    /// Returns the configuration that a client asks for.
    fn proposed(&self, proposal: &Proposal) -> Result<Config, Failure> {
        match proposal {
            Proposal::Whole(text) => parse(text),
            Proposal::Patch(patch) => {
                let config = patch.apply(self.server.config());
                config.map_err(|error| Failure::Mistake(error.to_string()))
            }
        }
    }

    /// Changes that another configuration would make.
    fn changes(&self, config: &Config) -> Changes {
        let refused = self.server.check(config);
        Changes {
            changes: diff(self.server.config(), config),
            refused: refused.err().map(|error| error.to_string()),
            written: view::written(view::drift(&self.server, config), None),
        }
    }

    /// Applies a configuration and keeps it, or does neither; says in the log what came of it.
    fn apply(&mut self, config: Config, asked: Asked<'_>) -> Result<Changes, Failure> {
        let Asked { who, how } = asked;
        let changes = diff(self.server.config(), &config);
        let before = self.standing();
        if before == Standing::Saved {
            // Such as after `save`: that the file was written is no edit, which would be served
            // after a restart.
            let file = self.server.config().to_yaml();
            if let Err(error) = self.history.see_file(file) {
                tracing::warn!(%error, "cannot record that the file was read");
            }
        }
        let stays = |listening: &Listening| {
            let wanted = config.metrics.as_ref();
            wanted.is_some_and(|wanted| wanted.listen == listening.addr())
        };
        // An address that cannot be had is tried again elsewhere.
        let is_missing = |listen| {
            let problems = self.server.problems();
            problems.has(&Subject::Metrics(listen))
        };
        let keeps_metrics = self.metrics.as_ref().is_some_and(stays)
            || config
                .metrics
                .as_ref()
                .is_some_and(|wanted| is_missing(wanted.listen));
        let opened = if keeps_metrics {
            Ok(None)
        } else {
            let none = ServerState::default();
            open_metrics(&config, &none, &self.requests).map_err(ApplyError::Metrics)
        };
        let history = &mut self.history;
        // Files that it names may say something else now, so it is applied even if it is the same.
        let entry = (!changes.is_empty()).then(|| Entry::now(who, how, config.to_yaml()));
        let applied = opened.and_then(|metrics| {
            self.server.change_if(config, || {
                entry
                    .map_or(Ok(()), |entry| history.record(entry))
                    .map_err(ApplyError::Keep)
            })?;
            Ok(metrics)
        });
        match applied {
            Ok(metrics) => {
                if !keeps_metrics {
                    self.metrics = metrics;
                    self.server.set_metrics_problem(None);
                }
                let revision = revision(&self.server.config().to_yaml());
                audit::changed(asked, &revision, &changes);
                for change in &changes {
                    tracing::info!(path = %change.path, old = %change.old, new = %change.new, "changed");
                }
                let drift = view::drift(&self.server, self.server.config());
                // Once, not with every change.
                let standing = Some(self.standing()).filter(|standing| *standing != before);
                Ok(Changes {
                    changes,
                    refused: None,
                    written: view::written(drift, standing),
                })
            }
            Err(error) => {
                self.reject(asked, &error);
                let (why, errno) = (error.to_string(), errno(&error));
                Err(Failure::Refused { why, errno })
            }
        }
    }

    /// Applies the configuration that was served `back` configurations before the present one.
    fn roll_back(&mut self, back: usize, who: &str) -> Result<Changes, Failure> {
        let how = format!("rollback {back}");
        let Some(entry) = self.history.entries().get(back) else {
            let kept = self.history.entries().len();
            let why = format!("there is no configuration {back} before; {kept} are kept");
            self.reject(Asked { who, how: &how }, &why);
            return Err(Failure::Refused { why, errno: None });
        };
        let config = parse(&entry.yaml)?;
        self.apply(config, Asked { who, how: &how })
    }

    /// Changes that were made to what the file said when it was read last.
    fn unsaved(&self) -> Vec<Difference> {
        let Some(seen) = self.history.file() else {
            return Vec::new();
        };
        let seen = Config::parse(seen, "the configuration file as it was read last");
        seen.map_or_else(|_| Vec::new(), |seen| diff(&seen, self.server.config()))
    }

    /// Reads the configuration file again and applies it.
    fn reload(&mut self, who: &str) -> Result<Changes, Failure> {
        let how = "reload";
        let asked = Asked { who, how };
        notify_reloading();
        let applied = match (self.file.reread)() {
            Ok(config) => {
                let file = config.to_yaml();
                // Before it is applied: then nothing is unsaved any more.
                let unsaved = self.unsaved();
                self.apply(config, asked).inspect(|applied| {
                    for change in taken_back(&applied.changes, &unsaved) {
                        tracing::warn!(
                            path = %change.path, old = %change.old, new = %change.new,
                            "a change that was not saved is taken back"
                        );
                    }
                    // It would be served again as an edited file, which comes to the same.
                    if let Err(error) = self.history.see_file(file) {
                        tracing::warn!(%error, "cannot record that the file was read");
                    }
                })
            }
            Err(error) => {
                self.reject(asked, &error);
                let (why, errno) = (error, None);
                Err(Failure::Refused { why, errno })
            }
        };
        notify(&[NotifyState::Ready]);
        applied
    }

    /// Says in the audit log that a configuration is not served.
    fn reject(&self, asked: Asked<'_>, reason: &dyn std::fmt::Display) {
        let stays = revision(&self.server.config().to_yaml());
        audit::rejected(asked, &stays, reason);
    }

    fn shut_down(self, why: &str) -> Result<(), ServerError> {
        tracing::info!(why, "shutting down");
        self.history.note_ending();
        self.notify_sessions();
        self.server.shutdown()?;
        tracing::info!("ended");
        Ok(())
    }

    /// Says whose sessions end.
    fn notify_sessions(&self) {
        tracing::info!(sessions = self.server.sessions(), "sessions end");
        for session in view::sessions(&self.server) {
            tracing::info!(
                initiator = %session.initiator, peer = %session.peer, state = %session.state,
                in_flight = session.in_flight, "session"
            );
        }
    }
}

/// Changes of a reload that concern what was changed and not saved.
fn taken_back<'a>(
    changes: &'a [Difference],
    unsaved: &'a [Difference],
) -> impl Iterator<Item = &'a Difference> {
    // An object that was created may be changed or replaced by the file's of that name.
    let is_in = |inner: &str, outer: &str| {
        let rest = inner.strip_prefix(outer);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    changes.iter().filter(move |change| {
        let mut paths = unsaved.iter().map(|unsaved| &unsaved.path);
        paths.any(|path| is_in(path, &change.path) || is_in(&change.path, path))
    })
}

/// Reads a configuration that came by the socket.
fn parse(text: &str) -> Result<Config, Failure> {
    Config::parse(text, "configuration").map_err(|error| Failure::Mistake(error.to_string()))
}

/// A name for a configuration's content.
fn revision(yaml: &str) -> String {
    let mut hasher = DefaultHasher::new();
    yaml.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Error number of the operating system, if it is the cause of an error.
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

fn to_json(view: &impl serde::Serialize) -> api::Answer {
    serde_json::to_value(view).map_err(|e| Failure::Failed(e.to_string()))
}

/// Notifies the service manager that the daemon is busy with itself, until it is ready again.
fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "the service manager was not notified"),
    }
}

/// Notifies the service manager, if there is one.
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
    fn a_reload_takes_back_what_concerns_unsaved_changes() {
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
