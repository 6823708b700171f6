//! Serving the clients of a device on a shared thread: [`Service`].

use std::time::Duration;

use crate::poll_fds::{PollInterests, wait};

/// Result of [`Service::run_once`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceStatus {
    /// Did some work, and there may be more.
    Worked,
    /// No work to do; waiting for events.
    Waiting,
    /// The service is closed and should be dropped.
    Over,
}

/// Client connection that can share a thread with other work. This is usually the device thread, so
/// there is no thread switch on completions, but it can also be a dedicated thread ([`serve`]).
///
/// These calls must not block.
pub trait Service: Send {
    /// Processes available work. This should return after a short time, because other services are
    /// waiting for their turn.
    fn run_once(&mut self) -> ServiceStatus;

    /// Must be called before the thread goes to sleep. Returns false if there is work to do. After
    /// this, events from other threads must make a descriptor in [`Service::add_interests`] readable.
    fn prepare_sleep(&mut self) -> bool;

    /// Adds the file descriptors to poll while sleeping.
    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>);

    /// Must be called after [`Service::prepare_sleep`] when the thread is awake again, or if it
    /// didn't sleep.
    fn end_sleep(&mut self);
}

/// Services on a thread.
#[derive(Default)]
pub struct Services(Vec<Box<dyn Service>>);

impl Services {
    /// Adds a service. It is dropped once it is closed.
    pub fn push(&mut self, service: Box<dyn Service>) {
        self.0.push(service);
    }

    /// Runs all services once, and drops the services that are closed. Returns whether there was
    /// any work to do.
    pub fn run_all(&mut self) -> bool {
        let mut worked = false;
        self.0.retain_mut(|service| {
            let turn = service.run_once();
            worked |= turn != ServiceStatus::Waiting;
            turn != ServiceStatus::Over
        });
        worked
    }

    /// Prepares all services for sleep; returns false if there is work to do.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for service in &mut self.0 {
            may_sleep &= service.prepare_sleep();
        }
        may_sleep
    }

    /// Adds the file descriptors to poll while sleeping.
    pub fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        for service in &self.0 {
            service.add_interests(out);
        }
    }

    /// Must be called when the thread is awake again, or if it didn't sleep.
    pub fn end_sleep(&mut self) {
        for service in &mut self.0 {
            service.end_sleep();
        }
    }
}

/// Serves on the current thread until the service is closed.
pub fn serve(service: &mut dyn Service) {
    loop {
        match service.run_once() {
            ServiceStatus::Over => return,
            ServiceStatus::Worked => continue,
            ServiceStatus::Waiting => {}
        }
        if service.prepare_sleep() {
            let mut waited = PollInterests::new();
            service.add_interests(&mut waited);
            wait(waited, None::<Duration>);
        }
        service.end_sleep();
    }
}
