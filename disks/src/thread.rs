//! Disk thread.
//!
//! In each round, the thread processes backend completions, which will wake tasks, then workloads,
//! clients, and messages, including messages sent by these tasks. Then everything is submitted to
//! the kernel in a single call. If there is nothing to do, the thread polls for a short time and
//! then sleeps on its mailbox and on the file descriptors used by the backend and the clients.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_block::Mailbox;
use riser_block::oneshot::Sender;
use riser_block::poll_fds::PollInterests;
use riser_block::{Buffer, Command, Service, Services, Workload};
use riser_reactor::{Next, Spinner};

use super::backend::Backend;
use super::limits::Limits;
use super::operation::{Done, Ended, Operation};
use super::workload::Workloads;

/// Max polling time when idle, same as for the session engine.
const SPIN: Duration = Duration::from_micros(50);

enum Message {
    Operation(Command, Option<Buffer>, Sender<Ended>),
    Host(Box<dyn Service>),
    Drive(Box<dyn Workload>),
    Close,
}

/// Running thread. The disk is closed on drop.
pub(super) struct DiskThread {
    mailbox: Arc<Mailbox<Message>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DiskThread {
    /// Starts a thread and calls `make` on it to create the backend for a disk with these limits.
    ///
    /// # Errors
    /// Returns an error from `make`, or if the thread can't be started.
    pub(super) fn start<B: Backend>(
        name: &str,
        limits: Arc<Limits>,
        make: impl FnOnce() -> io::Result<B> + Send + 'static,
    ) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        let (ready, made) = mpsc::channel();
        let inbox = mailbox.clone();
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || match make() {
            Ok(backend) => {
                let _ = ready.send(Ok(()));
                Round::new(inbox, backend, limits).run();
            }
            Err(error) => drop(ready.send(Err(error))),
        })?;
        let gone = || Err(io::Error::other("the disk's thread has exited"));
        made.recv().unwrap_or_else(|_| gone())?;
        Ok(Self {
            mailbox,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Sends an operation to the thread. If the thread has already exited, the operation is
    /// dropped, which notifies the caller.
    pub(super) fn submit(&self, command: Command, buffer: Option<Buffer>, done: Sender<Ended>) {
        drop(self.mailbox.send(Message::Operation(command, buffer, done)));
    }

    /// Adds a client that is served by this thread.
    pub(super) fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        let sent = self.mailbox.send(Message::Host(service));
        sent.map_err(|message| match message {
            Message::Host(service) => service,
            _ => unreachable!("the mailbox returns a rejected message"),
        })
    }

    /// Adds a workload to run on this thread.
    pub(super) fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        let sent = self.mailbox.send(Message::Drive(workload));
        sent.map_err(|message| match message {
            Message::Drive(workload) => workload,
            _ => unreachable!("the mailbox returns a rejected message"),
        })
    }

    /// Completes operations in flight and stops the thread. Waits for the thread, unless this is
    /// called on the thread.
    pub(super) fn close(&self) {
        drop(self.mailbox.send(Message::Close));
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for DiskThread {
    fn drop(&mut self) {
        self.close();
    }
}

/// Thread state.
struct Round<B> {
    mailbox: Arc<Mailbox<Message>>,
    backend: B,
    workloads: Workloads,
    services: Services,
    inbox: Vec<Message>,
}

impl<B: Backend> Round<B> {
    fn new(mailbox: Arc<Mailbox<Message>>, backend: B, limits: Arc<Limits>) -> Self {
        Self {
            mailbox,
            backend,
            workloads: Workloads::new(limits),
            services: Services::default(),
            inbox: Vec::new(),
        }
    }

    fn run(&mut self) {
        let mut spinner = Spinner::new(SPIN);
        loop {
            let now = Instant::now();
            let worked = self.run_once(now);
            if self.backend.is_over() {
                // All operations have completed: notify workloads and clients.
                self.workloads.run(&mut self.backend, now);
                self.services.run_all();
                return;
            }
            let deadlines = [self.backend.deadline(), self.workloads.due()];
            match spinner.plan(now, worked, deadlines.into_iter().flatten().min()) {
                Next::Poll => std::hint::spin_loop(),
                Next::Park(timeout) => self.park(timeout),
            }
        }
    }

    /// Processes all available work once. Returns whether there was anything to do.
    fn run_once(&mut self, now: Instant) -> bool {
        // Process messages after waking tasks, so that their operations are submitted in the same
        // round.
        let mut worked = self.backend.complete(now);
        worked |= self.workloads.run(&mut self.backend, now);
        worked |= self.services.run_all();
        let mut inbox = std::mem::take(&mut self.inbox);
        self.mailbox.receive(&mut inbox);
        worked |= !inbox.is_empty();
        for message in inbox.drain(..) {
            match message {
                Message::Operation(command, buffer, done) => {
                    let done = Done::Task(done);
                    let operation = Operation {
                        command,
                        buffer,
                        done,
                    };
                    self.backend.submit(operation, now);
                }
                Message::Host(service) => self.services.push(service),
                Message::Drive(workload) => {
                    self.workloads
                        .start_workload(workload, &mut self.backend, now);
                }
                Message::Close => self.backend.close(),
            }
        }
        self.inbox = inbox;
        self.backend.flush(now);
        worked || self.workloads.has_ended()
    }

    fn park(&mut self, timeout: Option<Duration>) {
        let may_sleep = self.backend.prepare_sleep();
        if self.services.prepare_sleep() && may_sleep {
            let mut waited = PollInterests::new();
            self.backend.add_interests(&mut waited);
            self.services.add_interests(&mut waited);
            self.mailbox.park(&waited, timeout);
        }
        self.services.end_sleep();
    }
}

/// Closes the mailbox, even after a panic. Callers of the remaining messages are notified because
/// their oneshots are dropped.
impl<B> Drop for Round<B> {
    fn drop(&mut self) {
        drop(self.mailbox.close());
    }
}
