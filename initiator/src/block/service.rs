//! Serving the clients of a device on a shared thread: [`Service`].

use std::time::{Duration, Instant};

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
pub(crate) struct Services(Vec<Box<dyn Service>>);

impl Services {
    pub(crate) fn push(&mut self, service: Box<dyn Service>) {
        self.0.push(service);
    }

    /// Runs all services once, and drops the services that are closed. Returns whether there was
    /// any work to do.
    pub(crate) fn run_all(&mut self) -> bool {
        let mut worked = false;
        self.0.retain_mut(|service| {
            let turn = service.run_once();
            worked |= turn != ServiceStatus::Waiting;
            turn != ServiceStatus::Over
        });
        worked
    }

    /// Prepares all services for sleep; returns false if there is work to do.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for service in &mut self.0 {
            may_sleep &= service.prepare_sleep();
        }
        may_sleep
    }

    /// Adds the file descriptors to poll while sleeping.
    pub(crate) fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        for service in &self.0 {
            service.add_interests(out);
        }
    }

    /// Must be called when the thread is awake again, or if it didn't sleep.
    pub(crate) fn end_sleep(&mut self) {
        for service in &mut self.0 {
            service.end_sleep();
        }
    }
}

/// After this number of unsuccessful checks, a service will only check its descriptor every
/// [`LOOK`].
const VAIN: u32 = 64;
const LOOK: Duration = Duration::from_micros(50);

/// Decides when a service should check its descriptor. This requires a system call, and if the
/// thread is busy with other services, it would be done very often.
#[derive(Debug)]
pub(crate) struct Looks {
    /// Number of unsuccessful checks in a row.
    vain: u32,
    last: Instant,
}

impl Looks {
    pub(crate) fn new() -> Self {
        Self {
            vain: 0,
            last: Instant::now(),
        }
    }

    /// Returns whether the descriptor should be checked now.
    pub(crate) fn is_due(&mut self) -> bool {
        if self.vain < VAIN {
            return true;
        }
        let now = Instant::now();
        let is_due = now.saturating_duration_since(self.last) >= LOOK;
        if is_due {
            self.last = now;
        }
        is_due
    }

    /// Must be called after an unsuccessful check.
    pub(crate) fn note_vain(&mut self) {
        self.vain = self.vain.saturating_add(1);
    }

    /// Must be called after data was received, or if new data is likely, for example because we
    /// sent a response or a sleep was interrupted.
    pub(crate) fn expect(&mut self) {
        self.vain = 0;
    }

    /// Returns whether the descriptor is only checked at intervals.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.vain >= VAIN
    }

    /// Disables the interval, so that a test can see other reasons for a check.
    #[cfg(test)]
    pub(crate) fn defer_check(&mut self) {
        self.vain = VAIN;
        self.last = Instant::now() + Duration::from_secs(3600);
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
