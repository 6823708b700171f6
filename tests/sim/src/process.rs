//! The target process: start, configuration changes, and normal exit with an optional handover.
//!
//! All of this is implemented by the released code ([`Server`]), which uses mailboxes to control
//! the workers. This module replaces the control plane and its threads, and runs in steps on the
//! virtual clock.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use riser_reactor::simulated::Listener;
use riser_reactor::{Ring, RingConfig, mailbox};
use riser_target::backend::{OpenError, OpenedStores, Spec, Store};
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::drain::Drain;
use riser_target::server::handover::{Handover, RamFiles, ServerState};
use riser_target::server::hanging::BlockCheck;
use riser_target::server::reload::{Change, ChangeError, ChangeStep};
use riser_target::server::shutdown::Shutdown;
use riser_target::server::{Keepers, Part, Server, SimulatedNetwork};
use riser_target::worker::mail::{MAILBOX, Outbox};
use riser_target::worker::{Report, TcpListener, Worker, WorkerConfig};
use riser_testkit::alloc::Attributed;
use riser_tests::history::{History, Port};
use riser_transport::loopback::{Endpoint, Fabric};
use riser_transport::verbs::Mtu;
use tracing::debug;

use crate::admin::{self, Layout, Refusal};
use crate::target::{Member, SimulatedEnv, Target, config_of};
use crate::tcp::Listeners;

/// Port of the administrator in the history.
const ADMINISTRATOR: Port = Port(999);

/// Provides the devices and sockets of the target.
#[derive(Debug)]
pub(crate) struct Ground {
    fabric: Fabric,
    mtu: Mtu,
    listeners: Listeners,
}

impl Ground {
    pub(crate) fn new(fabric: &Fabric, mtu: Mtu, listeners: &Listeners) -> Self {
        fabric.occupy(admin::TAKEN_RDMA);
        Self {
            fabric: fabric.clone(),
            mtu,
            listeners: Arc::clone(listeners),
        }
    }

    pub(crate) fn fabric(&self) -> &Fabric {
        &self.fabric
    }
}

impl SimulatedNetwork for Ground {
    fn open(&self, addr: IpAddr, worker: usize, workers: usize) -> io::Result<Endpoint> {
        if self.fabric.is_unplugged(addr) {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        let bits = workers.ilog2() as u8;
        // A device that was removed returns with its initial settings.
        let endpoint = || self.fabric.endpoint_of(addr, worker as u32, bits);
        let mut device = Attributed::others(endpoint);
        device.set_mtu(self.mtu);
        Ok(device)
    }

    fn listen(&self, portal: SocketAddr) -> io::Result<TcpListener> {
        if portal == admin::TAKEN_TCP {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let listener = Listener::new(portal);
        let socket = TcpListener::simulated(&listener);
        let mut all = self.listeners.lock();
        all.as_mut()
            .unwrap_or_else(|poisoned: &mut PoisonError<_>| poisoned.get_mut())
            .push(listener);
        Ok(socket)
    }
}

/// A configuration change in progress.
pub(crate) struct Job {
    change: Change,
    layout: Layout,
    refusal: Option<Refusal>,
    is_committed: bool,
    /// Set if the change was withdrawn because its numbers could not be saved.
    unsaved: Option<ChangeError>,
}

/// Progress of a change.
#[derive(Debug)]
pub(crate) enum JobStep {
    /// In progress. `is_committed` is set when it was just committed.
    Waiting { is_committed: bool },
    /// Applied by all workers.
    Applied,
    /// Not applied because of this error, or `None` if the change was withdrawn.
    Undone(Option<ChangeError>),
}

/// The reason for a normal exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndKind {
    /// Restart by an administrator.
    Restart,
    /// Handover to another program, which may fail.
    Upgrade { fails: bool },
    /// Failure of a worker.
    Failure,
}

/// A normal exit in progress.
pub(crate) enum Ending {
    /// Waiting for a configuration change.
    Waiting(EndKind),
    /// Workers check if block operations are hanging.
    Checking { check: BlockCheck, fails: bool },
    /// Workers duplicate their sockets.
    Duplicating {
        replies: Vec<Receiver<io::Result<Vec<TcpListener>>>>,
        sockets: Vec<TcpListener>,
        fails: bool,
    },
    /// Closing sessions. This can still be reverted.
    Draining {
        drain: Drain,
        sockets: Vec<TcpListener>,
        fails: bool,
    },
    /// Closing sessions and flushing data.
    Stopping {
        shutdown: Shutdown,
        handover: Option<(Handover, Vec<TcpListener>, bool)>,
        kind: EndKind,
    },
}

/// Progress of a normal exit.
#[derive(Debug)]
pub(crate) enum Ended {
    /// In progress.
    NotYet,
    /// No change, because a handover is not possible.
    Refused(String),
    /// Sessions were closed, but the process continues to serve.
    Resumed(String),
    /// The process has exited. All acknowledged data is durable.
    Over,
    /// The process has exited, and has left state for its successor.
    HandedOver,
    /// The process has exited, as after a crash.
    Failed(String),
}

impl Target {
    /// Starts the process with the state of its predecessor.
    ///
    /// # Panics
    /// Panics if it cannot serve the previous configuration.
    pub(crate) fn begin(&mut self) {
        let state = self.heritage.take().unwrap_or_default();
        let host = SimulatedHost::new(self.threads.clone(), self.start).with_boot(self.boots);
        let host: Arc<dyn Host> = Arc::new(host);
        let mut opened = OpenedStores::default();
        for backend in self.config.clone().backends {
            if self.disk_of(&backend.name).is_some() {
                let store = self.open(&backend.name, &backend.spec, &host);
                opened.insert(&backend.name, &backend.spec, store);
            }
        }
        let keepers = Keepers {
            flushes: Some(Arc::new(self.failures())),
            reservations: Some(Arc::new(self.kept.clone())),
            ports: Some(Arc::new(self.kept.clone())),
            identities: Some(Arc::new(self.kept.clone())),
            blocklist: None,
        };
        let network = Arc::clone(&self.ground);
        let started = Server::simulated(&self.config, &state, keepers, opened, network);
        let (mut server, parts, reports) = started.expect("the configuration can be served");
        self.shared = Some(Arc::clone(server.shared()));
        self.begin_workers(parts, &host, &reports);
        server.attach(self.mail.clone());
        (self.server, self.reports) = (Some(server), Some(reports));
    }

    fn begin_workers(&mut self, parts: Vec<Part>, host: &Arc<dyn Host>, reports: &Sender<Report>) {
        let config = RingConfig {
            capacity: self.plan.ring,
            ..RingConfig::default()
        };
        let rings = parts.iter().map(|_| Ring::simulated(config));
        let rings: Vec<_> = rings.map(|ring| ring.expect("memory")).collect();
        let mailboxes = rings.iter().map(|(ring, _)| mailbox(MAILBOX, ring.waker()));
        let (senders, inboxes): (Vec<_>, Vec<_>) = mailboxes.unzip();
        let shared = self.shared.clone().expect("just made");
        let parts = rings.into_iter().zip(inboxes).zip(parts);
        for (index, (((ring, kernel), inbox), part)) in parts.enumerate() {
            let waker = ring.waker();
            let env = SimulatedEnv {
                random: self.rng.fork(),
                host: Arc::clone(host),
            };
            let devices = part.devices.into_iter().map(|(_, device)| device);
            let (worker, unserved) = Worker::new(WorkerConfig {
                index: index as u16,
                now: self.ground.fabric().now(),
                env: Box::new(env),
                pool: self.plan.pool,
                shared: Arc::clone(&shared),
                devices: devices.collect(),
                sockets: part.sockets,
                ring,
                mailbox: inbox,
                outbox: Outbox::new(senders.clone()),
                reports: reports.clone(),
            })
            .expect("a worker");
            assert_eq!(unserved, [], "all portals are free");
            self.members.push(Some(Member {
                worker,
                kernel,
                due: BTreeMap::new(),
                held: BTreeMap::new(),
                wakes: None,
                waker,
                is_parked: false,
            }));
        }
        self.mail = senders;
    }

    /// Opens the disk of a backend, which can only be opened once.
    fn open(
        &mut self,
        backend: &str,
        spec: &Spec,
        host: &Arc<dyn Host>,
    ) -> Result<Arc<Store>, OpenError> {
        let path = || spec.source.path().unwrap_or("/".as_ref()).to_owned();
        let Some(disk) = self.disk_of(backend) else {
            return Err(OpenError::Io {
                path: path(),
                action: "open it",
                source: io::ErrorKind::NotFound.into(),
            });
        };
        let is_open = |store: &Weak<Store>| store.strong_count() > 0;
        if self.stores.get(backend).is_some_and(is_open) {
            return Err(OpenError::Locked {
                path: path(),
                holder: None,
                is_accessed: true,
                file: None,
            });
        }
        let store = Store::on_disk(spec, disk, Arc::clone(host))?;
        self.stores
            .insert(backend.to_owned(), Arc::downgrade(&store));
        Ok(store)
    }

    /// Returns whether there is a process that can start an administrative operation.
    pub(crate) fn is_free(&self) -> bool {
        self.server.is_some() && self.job.is_none() && self.ending.is_none()
    }

    /// Starts to change the layout, possibly in a way that must be rejected.
    pub(crate) fn begin_change(
        &mut self,
        layout: Layout,
        refusal: Option<Refusal>,
        now: Instant,
    ) -> Result<(), ChangeError> {
        let config = config_of(&layout, &self.plan);
        let host = SimulatedHost::new(self.threads.clone(), self.start).with_boot(self.boots);
        let host: Arc<dyn Host> = Arc::new(host);
        let server = self.server.as_ref().expect("it is free");
        // Same as in the control plane: check the change before opening anything for it.
        server.check(&config)?;
        let mut opened = OpenedStores::default();
        for wish in server.wishes_for(&config) {
            let store = self.open(&wish.backend, &wish.spec, &host);
            opened.insert(&wish.backend, &wish.spec, store);
        }
        let server = self.server.as_ref().expect("as before");
        let change = server.begin_change(config, opened, now)?;
        self.job = Some(Job {
            change,
            layout,
            refusal,
            is_committed: false,
            unsaved: None,
        });
        Ok(())
    }

    /// Continues with the change.
    ///
    /// # Errors
    /// Returns an error if a change is possible that must be rejected.
    pub(crate) fn continue_job(&mut self, now: Instant) -> Result<JobStep, String> {
        let (Some(server), Some(job)) = (&mut self.server, &mut self.job) else {
            return Ok(JobStep::Waiting {
                is_committed: false,
            });
        };
        let was_committed = job.is_committed;
        let end = match server.poll_change(&mut job.change, now) {
            ChangeStep::Waiting => None,
            ChangeStep::Staged => {
                match job.refusal {
                    Some(Refusal::NotKept) => server.withdraw_change(&mut job.change, now),
                    Some(refusal) => {
                        return Err(format!(
                            "workers accepted a change that must be rejected: {refusal:?}"
                        ));
                    }
                    None => match server.save_numbers(&mut job.change) {
                        Ok(()) => {
                            server.commit_change(&mut job.change, now);
                            job.is_committed = true;
                            self.layout = job.layout.clone();
                            self.config = server.config().clone();
                        }
                        Err(error) => {
                            server.withdraw_change(&mut job.change, now);
                            job.unsaved = Some(error);
                        }
                    },
                }
                None
            }
            ChangeStep::Applied => Some(JobStep::Applied),
            ChangeStep::Undone(error) => Some(JobStep::Undone(error.or(job.unsaved.take()))),
        };
        let is_committed = job.is_committed && !was_committed;
        match end {
            Some(end) => {
                self.job = None;
                Ok(end)
            }
            None => Ok(JobStep::Waiting { is_committed }),
        }
    }

    /// Starts to exit normally, unless an exit is already in progress.
    pub(crate) fn begin_end(&mut self, kind: EndKind) {
        if self.server.is_some() && self.ending.is_none() {
            self.ending = Some(Ending::Waiting(kind));
        }
    }

    /// Called when a worker thread fails. The control plane reacts later.
    pub(crate) fn fail_worker(&mut self, index: usize) -> bool {
        let Some(member) = self.members.get_mut(index).and_then(Option::take) else {
            return false;
        };
        let was_unseen = self.disk().has_unseen_error();
        member.abandon(&mut self.rng);
        self.update_reported(was_unseen);
        drop(member);
        let message = Some("a simulated failure".to_owned());
        if let Some(reports) = &self.reports {
            let _ = reports.send(Report::Ended(index as u16, message));
        }
        true
    }

    /// Continues to exit.
    pub(crate) fn continue_ending(&mut self, now: Instant, history: &History) -> Ended {
        match self.ending.take() {
            None => {}
            Some(Ending::Waiting(kind)) if self.job.is_some() => {
                self.ending = Some(Ending::Waiting(kind));
            }
            Some(Ending::Waiting(kind)) => return self.end_now(kind, now),
            Some(Ending::Checking { mut check, fails }) => {
                let server = self.server.as_mut().expect("it ends");
                self.ending = Some(match check.poll(now) {
                    None => Ending::Checking { check, fails },
                    Some(Err(error)) => return Ended::Refused(error.to_string()),
                    Some(Ok(())) => Ending::Duplicating {
                        replies: server.request_sockets(),
                        sockets: Vec::new(),
                        fails,
                    },
                });
            }
            Some(Ending::Duplicating {
                replies,
                sockets,
                fails,
            }) => return self.take_sockets(replies, sockets, fails, now),
            Some(Ending::Draining {
                drain,
                sockets,
                fails,
            }) => return self.continue_draining(drain, sockets, fails, now),
            Some(Ending::Stopping {
                mut shutdown,
                handover,
                kind,
            }) => {
                let server = self.server.as_mut().expect("it ends");
                if server.poll_shutdown(&mut shutdown, now) {
                    return self.finish(shutdown, handover, kind, history);
                }
                self.ending = Some(Ending::Stopping {
                    shutdown,
                    handover,
                    kind,
                });
            }
        }
        Ended::NotYet
    }

    fn end_now(&mut self, kind: EndKind, now: Instant) -> Ended {
        let server = self.server.as_mut().expect("it ends");
        self.ending = Some(match kind {
            EndKind::Upgrade { fails } => {
                if let Err(error) = server.check_successor() {
                    return Ended::Refused(error.to_string());
                }
                let check = server.begin_block_check(now);
                Ending::Checking { check, fails }
            }
            EndKind::Restart | EndKind::Failure => Ending::Stopping {
                shutdown: server.begin_shutdown(now),
                handover: None,
                kind,
            },
        });
        Ended::NotYet
    }

    fn take_sockets(
        &mut self,
        mut replies: Vec<Receiver<io::Result<Vec<TcpListener>>>>,
        mut sockets: Vec<TcpListener>,
        fails: bool,
        now: Instant,
    ) -> Ended {
        while let Some(reply) = replies.first() {
            match reply.try_recv() {
                Ok(Ok(more)) => sockets.extend(more),
                Ok(Err(error)) => return Ended::Refused(error.to_string()),
                Err(TryRecvError::Disconnected) => {
                    return Ended::Refused("a worker exited".to_owned());
                }
                Err(TryRecvError::Empty) => {
                    self.ending = Some(Ending::Duplicating {
                        replies,
                        sockets,
                        fails,
                    });
                    return Ended::NotYet;
                }
            }
            replies.remove(0);
        }
        let server = self.server.as_mut().expect("it ends");
        self.ending = Some(Ending::Draining {
            drain: server.begin_drain(now),
            sockets,
            fails,
        });
        Ended::NotYet
    }

    fn continue_draining(
        &mut self,
        mut drain: Drain,
        sockets: Vec<TcpListener>,
        fails: bool,
        now: Instant,
    ) -> Ended {
        let server = self.server.as_mut().expect("it ends");
        self.ending = Some(match server.poll_drain(&mut drain, now) {
            None => Ending::Draining {
                drain,
                sockets,
                fails,
            },
            Some(Err(error)) => return Ended::Resumed(error.to_string()),
            Some(Ok(())) => Ending::Stopping {
                handover: Some((server.hand_over(), sockets, fails)),
                shutdown: server.begin_shutdown(now),
                kind: EndKind::Upgrade { fails },
            },
        });
        Ended::NotYet
    }

    fn finish(
        &mut self,
        shutdown: Shutdown,
        handover: Option<(Handover, Vec<TcpListener>, bool)>,
        kind: EndKind,
        history: &History,
    ) -> Ended {
        // Wait for threads that save flush failures.
        while let [thread, ..] = self.threads.runnable()[..] {
            self.threads.step(thread);
        }
        let server = self.server.take().expect("it ends");
        let result = server.finish_shutdown(shutdown);
        debug!(?kind, ?result, "the process ends");
        if let Err(error) = result {
            self.crash(history);
            return Ended::Failed(error.to_string());
        }
        // All data that was acknowledged before was flushed at exit, for all served disks. If the
        // target was removed before, its disks have already been closed.
        if self.layout.has_target() {
            let flush = history.begin_flush(ADMINISTRATOR);
            if let Err(violation) = history.end_flush(flush) {
                return Ended::Failed(violation.to_string());
            }
        }
        self.clear();
        let Some((handover, sockets, fails)) = handover else {
            return Ended::Over;
        };
        match hand_over(handover, sockets, fails) {
            Ok(state) => {
                self.heritage = Some(state);
                Ended::HandedOver
            }
            Err(error) => Ended::Failed(error.to_string()),
        }
    }

    /// Returns the time of the next action.
    pub(crate) fn next_step(&self) -> Option<Instant> {
        let change = self.job.as_ref().and_then(|job| job.change.deadline());
        let end = self.ending.as_ref().and_then(|ending| match ending {
            Ending::Checking { check, .. } => Some(check.deadline()),
            Ending::Draining { drain, .. } => Some(drain.deadline()),
            Ending::Stopping { shutdown, .. } => Some(shutdown.deadline()),
            Ending::Waiting(_) | Ending::Duplicating { .. } => None,
        });
        change.into_iter().chain(end).min()
    }
}

/// Returns the state for the next program. It is saved and loaded again, or unchanged if the
/// program could not be started.
fn hand_over(
    handover: Handover,
    sockets: Vec<TcpListener>,
    fails: bool,
) -> io::Result<ServerState> {
    let before = handover.after_shutdown(sockets);
    let mut files = RamFiles::default();
    let document = serde_json::to_vec(&before.export(&mut files)?)?;
    if fails {
        before.restore(files)?;
        return Ok(before);
    }
    let open: Vec<_> = files.files().collect();
    let file_of = |fd| {
        let file = open.iter().find(|file| file.as_raw_fd() == fd);
        file.and_then(|file| file.try_clone().ok())
    };
    let mut after = ServerState::import(serde_json::from_slice(&document)?, file_of)?;
    let sockets = before.sockets().iter().map(TcpListener::try_clone);
    after.add_sockets(sockets.collect::<io::Result<_>>()?);
    Ok(after)
}
