//! Thread of a disk.
//!
//! One round: completions of the backend, which wake tasks; workloads; clients; messages, among
//! them what these have submitted; and one call that hands it all to the kernel. With nothing to do
//! it polls for a while and then sleeps on the descriptors of backend and clients, and on its
//! mailbox.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_reactor::{Next, Spinner};

use super::backend::Backend;
use super::limits::Limits;
use super::operation::{Command, Done, Ended, Operation};
use super::workload::Workloads;
use crate::block::{Buffer, Service, Services, Workload};
use crate::engine::{Mailbox, Sender};
use crate::poll_fds::WaitedFds;

/// Longest time of polling after the last work, as the engine of sessions has.
const SPIN: Duration = Duration::from_micros(50);

enum Message {
    Operation(Command, Option<Buffer>, Sender<Ended>),
    Host(Box<dyn Service>),
    Drive(Box<dyn Workload>),
    Close,
}

/// A running thread. Dropping it closes the disk.
pub(super) struct DiskThread {
    mailbox: Arc<Mailbox<Message>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DiskThread {
    /// Starts a thread on which `make` makes the backend of a disk with these limits.
    ///
    /// # Errors
    /// Those of the thread and of `make`.
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
        let gone = || Err(io::Error::other("the disk's thread has ended"));
        made.recv().unwrap_or_else(|_| gone())?;
        Ok(Self {
            mailbox,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Leaves an operation to the thread. One that comes too late is dropped, which its caller
    /// notices.
    pub(super) fn submit(&self, command: Command, buffer: Option<Buffer>, done: Sender<Ended>) {
        drop(self.mailbox.send(Message::Operation(command, buffer, done)));
    }

    /// Has a client served there.
    pub(super) fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        let sent = self.mailbox.send(Message::Host(service));
        sent.map_err(|message| match message {
            Message::Host(service) => service,
            _ => unreachable!("a mailbox gives back what it was sent"),
        })
    }

    /// Has a workload run there.
    pub(super) fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        let sent = self.mailbox.send(Message::Drive(workload));
        sent.map_err(|message| match message {
            Message::Drive(workload) => workload,
            _ => unreachable!("a mailbox gives back what it was sent"),
        })
    }

    /// Ends what is in flight and the thread, and waits for that, unless this is that thread.
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

/// State of the thread.
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
            let worked = self.turn(now);
            if self.backend.is_over() {
                // The last operations have ended: workloads and clients get the answers.
                self.workloads.run(&mut self.backend, now);
                self.services.turn();
                return;
            }
            let deadlines = [self.backend.deadline(), self.workloads.due()];
            match spinner.plan(now, worked, deadlines.into_iter().flatten().min()) {
                Next::Poll => std::hint::spin_loop(),
                Next::Park(timeout) => self.park(timeout),
            }
        }
    }

    /// Does what there is to do, once. Returns whether there was anything.
    fn turn(&mut self, now: Instant) -> bool {
        // Messages come after what wakes tasks: what these submit leaves in the same round.
        let mut worked = self.backend.complete(now);
        worked |= self.workloads.run(&mut self.backend, now);
        worked |= self.services.turn();
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
                    self.workloads.start(workload, &mut self.backend, now);
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
            let mut waited = WaitedFds::new();
            self.backend.put_waited(&mut waited);
            self.services.put_waited(&mut waited);
            self.mailbox.park(&waited, timeout);
        }
        self.services.end_sleep();
    }
}

/// Refuses messages from now on, also after a panic; the callers of those that are left are
/// notified by the ends of their oneshots.
impl<B> Drop for Round<B> {
    fn drop(&mut self) {
        drop(self.mailbox.close());
    }
}
