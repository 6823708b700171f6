//! Worker threads, their mailboxes and their reports.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riser_reactor::{MailSender, Ring, RingConfig, RingError, mailbox};
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::sync::Notify;

use super::{LAST_IO, ServerError, acquire, build};
use crate::config::Config;
use crate::fabric::ConnRef;
use crate::worker::mail::{MAILBOX, Mail, Outbox};
use crate::worker::portals::Unserved;
use crate::worker::{Report, Shared, System, Worker, WorkerConfig};

/// Mailboxes of all workers, which are sent to each worker when all of them exist.
type Setup = Vec<MailSender<Mail>>;

/// Sends a request to each worker, with a channel for the reply.
pub(super) fn send_to_workers<T>(
    senders: &[MailSender<Mail>],
    mail: impl Fn(Sender<T>) -> Mail,
) -> Vec<Receiver<T>> {
    let send_request = |sender: &MailSender<Mail>| {
        let (tx, rx) = channel();
        let _ = sender.send(mail(tx));
        rx
    };
    senders.iter().map(send_request).collect()
}

/// Workers of a server.
#[derive(Debug)]
pub(super) struct Workers {
    pub(super) senders: Vec<MailSender<Mail>>,
    threads: Vec<Option<JoinHandle<()>>>,
    pub(super) reports: Receiver<Report>,
    /// Number of workers that have exited.
    pub(super) gone: usize,
    /// Number of flushes requested by the server.
    flushes: u64,
    /// Error of the first worker that has exited.
    pub(super) failed: Option<ServerError>,
    /// Notified when a worker fails.
    pub(super) failure: Arc<Notify>,
}

impl Workers {
    /// Also returns the channel for the reports of workers.
    pub(super) fn new() -> (Self, Sender<Report>) {
        let (sender, reports) = channel();
        let workers = Self {
            senders: Vec::new(),
            threads: Vec::new(),
            reports,
            gone: 0,
            flushes: 0,
            failed: None,
            failure: Arc::default(),
        };
        (workers, sender)
    }

    /// Starts the workers, and returns the portals that they cannot listen on.
    pub(super) fn start(
        &mut self,
        config: &Config,
        ring: u32,
        shared: &Arc<Shared>,
        parts: Vec<acquire::Part>,
        reports: &Sender<Report>,
    ) -> Result<Vec<Unserved>, ServerError> {
        let mut setups = Vec::new();
        for (index, part) in parts.into_iter().enumerate() {
            let (setup_tx, setup_rx) = channel::<Setup>();
            let (mail_tx, mail_rx) = channel();
            let parts = ThreadParts {
                index: index as u16,
                cpu: build::cpu(config, index),
                pool: config.limits.buffer_pool,
                ring,
                shared: Arc::clone(shared),
                part,
                reports: reports.clone(),
                failure: Arc::clone(&self.failure),
            };
            let thread = std::thread::Builder::new()
                .name(format!("riser-worker-{index}"))
                .spawn(move || parts.run(&mail_tx, &setup_rx))
                .map_err(ServerError::Thread)?;
            self.threads.push(Some(thread));
            // If a thread cannot create its ring, it sends a report and closes the channel. We have
            // to start threads one by one: the mailbox of a worker can only be created by its
            // thread, after the ring.
            match mail_rx.recv() {
                Ok(sender) => self.senders.push(sender),
                Err(_) => return Err(self.wait_failure()),
            }
            setups.push(setup_tx);
        }
        for setup in setups {
            // Same as above, the error is in its report.
            let _ = setup.send(self.senders.clone());
        }
        let mut unserved = Vec::new();
        // All workers must start, because each of them handles some of the connections.
        for _ in 0..self.threads.len() {
            match self.reports.recv() {
                Ok(Report::Started(_, without)) => unserved.extend(without),
                Ok(Report::Ended(index, message)) => return Err(ended(index, message)),
                Ok(_) | Err(_) => return Err(ServerError::Timeout("a worker to start")),
            }
        }
        Ok(unserved)
    }

    /// Returns the report of a worker that has just exited.
    fn wait_failure(&self) -> ServerError {
        loop {
            match self.reports.recv_timeout(LAST_IO) {
                Ok(Report::Ended(index, message)) => return ended(index, message),
                Ok(_) => {}
                Err(_) => return ServerError::Timeout("a worker to start"),
            }
        }
    }

    /// Stops the workers, and waits for their threads, optionally with a deadline: a thread cannot
    /// exit while block operations in its ring are in flight.
    pub(super) fn abandon(&mut self, until: Option<Instant>) {
        for sender in &self.senders {
            let _ = sender.send_blocking(Mail::Exit);
        }
        self.senders.clear();
        for thread in self.threads.drain(..).flatten() {
            if until.is_none_or(|until| ends_in_time(&thread, until)) {
                let _ = thread.join();
            }
        }
    }

    /// Sends a request to each worker, with a channel for the reply.
    pub(super) fn send_to_all<T>(&self, mail: impl Fn(Sender<T>) -> Mail) -> Vec<Receiver<T>> {
        send_to_workers(&self.senders, mail)
    }

    /// Requests a logout from these initiators. Their connections are terminated at `until`.
    pub(super) fn log_out_until(
        &self,
        channels: impl IntoIterator<Item = ConnRef>,
        until: Instant,
    ) {
        for ConnRef { worker, serial } in channels {
            if let Some(sender) = self.senders.get(usize::from(worker)) {
                let _ = sender.send_blocking(Mail::LogOut { serial, until });
            }
        }
    }

    /// Records workers that have exited.
    pub(super) fn note(&mut self, report: &Report) {
        if let Report::Ended(index, message) = report {
            self.gone += 1;
            self.failed.get_or_insert(ended(*index, message.clone()));
        }
    }

    /// Handles pending reports.
    pub(super) fn poll_reports(&mut self) {
        while let Ok(report) = self.reports.try_recv() {
            self.note(&report);
        }
    }

    /// Returns the number of the next flush, which is returned in its report.
    pub(super) fn next_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }
}

/// Waits until a thread has exited, with a deadline. Returns whether it has.
fn ends_in_time(thread: &JoinHandle<()>, until: Instant) -> bool {
    while !thread.is_finished() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    thread.is_finished()
}

pub(super) fn ended(index: u16, message: Option<String>) -> ServerError {
    ServerError::Worker {
        index,
        message: message.unwrap_or_else(|| "ended".into()),
    }
}

/// Parameters for the thread of a worker.
struct ThreadParts {
    index: u16,
    cpu: Option<usize>,
    pool: usize,
    /// Ring size, which must be large enough for all sessions.
    ring: u32,
    shared: Arc<Shared>,
    part: acquire::Part,
    reports: Sender<Report>,
    failure: Arc<Notify>,
}

impl ThreadParts {
    fn run(self, mail: &Sender<MailSender<Mail>>, setup: &Receiver<Setup>) {
        let (index, reports) = (self.index, self.reports.clone());
        let failure = Arc::clone(&self.failure);
        let work = std::panic::AssertUnwindSafe(|| self.work(mail, setup));
        let outcome = std::panic::catch_unwind(work)
            .unwrap_or_else(|_| Err("panicked; this is a bug".into()));
        let message = outcome.err();
        if let Some(message) = &message {
            tracing::error!(worker = index, %message, "worker failed");
        }
        let failed = message.is_some();
        let _ = reports.send(Report::Ended(index, message));
        if failed {
            // Do this after sending the report, so that the control plane finds the reason.
            failure.notify_one();
        }
    }

    fn work(self, mail: &Sender<MailSender<Mail>>, setup: &Receiver<Setup>) -> Result<(), String> {
        if let Some(cpu) = self.cpu
            && let Err(error) = pin(cpu)
        {
            tracing::warn!(cpu, %error, "cannot pin a worker to its CPU");
        }
        let ring = Ring::new(RingConfig {
            capacity: self.ring,
            ..RingConfig::default()
        })
        .map_err(|e: RingError| e.to_string())?;
        let (sender, mailbox) = mailbox(MAILBOX, ring.waker());
        let _ = mail.send(sender);
        let Ok(senders) = setup.recv() else {
            return Ok(());
        };
        // Initial devices use the first slots.
        let devices = self.part.devices.into_iter();
        let (mut worker, unserved) = Worker::new(WorkerConfig {
            index: self.index,
            now: Instant::now(),
            env: Box::new(System),
            pool: self.pool,
            shared: self.shared,
            devices: devices.map(|(_, device)| device).collect(),
            sockets: self.part.sockets,
            ring,
            mailbox,
            outbox: Outbox::new(senders),
            reports: self.reports.clone(),
        })
        .map_err(|e| e.to_string())?;
        let _ = self.reports.send(Report::Started(self.index, unserved));
        worker.run().map_err(|e| e.to_string())
    }
}

/// Pins the calling thread to a CPU.
fn pin(cpu: usize) -> io::Result<()> {
    // `CpuSet::set` would panic if this is too large.
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
