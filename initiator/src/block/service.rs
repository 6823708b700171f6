//! Servers of a device's clients that share a thread with others: [`Service`].

use std::time::{Duration, Instant};

use crate::poll_fds::{WaitedFds, wait};

/// What a turn of a service has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It did something, and may have more to do.
    Worked,
    /// It has nothing to do until what it waits for.
    Waiting,
    /// It is over, and wants no further turn.
    Over,
}

/// A connection of a client, served by turns on a thread that has other things to do as well: that
/// of a device, whose completions it then meets without a switch of threads, or one of its own
/// ([`serve`]).
///
/// No call blocks.
pub trait Service: Send {
    /// Does what there is to do, but not for long: others wait for their turns.
    fn turn(&mut self) -> Turn;

    /// The thread is about to sleep. Returns false if there is something to do by now. From here on
    /// what happens on other threads ends the sleep, by a descriptor of [`Service::put_waited`].
    fn prepare_sleep(&mut self) -> bool;

    /// Adds the descriptors that end the sleep.
    fn put_waited<'a>(&'a self, out: &mut WaitedFds<'a>);

    /// The sleep is over, or did not take place, after [`Service::prepare_sleep`].
    fn end_sleep(&mut self);
}

/// The services of a thread.
#[derive(Default)]
pub(crate) struct Services(Vec<Box<dyn Service>>);

impl Services {
    pub(crate) fn push(&mut self, service: Box<dyn Service>) {
        self.0.push(service);
    }

    /// Gives each its turn, and drops those that are over. Returns whether any of them had
    /// something to do.
    pub(crate) fn turn(&mut self) -> bool {
        let mut worked = false;
        self.0.retain_mut(|service| {
            let turn = service.turn();
            worked |= turn != Turn::Waiting;
            turn != Turn::Over
        });
        worked
    }

    /// Prepares all of them for a sleep; false if one has something to do by now.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for service in &mut self.0 {
            may_sleep &= service.prepare_sleep();
        }
        may_sleep
    }

    /// Adds the descriptors that end the sleep.
    pub(crate) fn put_waited<'a>(&'a self, out: &mut WaitedFds<'a>) {
        for service in &self.0 {
            service.put_waited(out);
        }
    }

    /// The sleep is over, or did not take place.
    pub(crate) fn end_sleep(&mut self) {
        for service in &mut self.0 {
            service.end_sleep();
        }
    }
}

/// Looks in vain after which a service looks at its descriptor only once in [`LOOK`].
const VAIN: u32 = 64;
const LOOK: Duration = Duration::from_micros(50);

/// Times at which a service looks at its descriptor, which costs a system call: a thread that is
/// awake for others gives it many turns.
#[derive(Debug)]
pub(crate) struct Looks {
    /// Looks in a row that found nothing.
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

    /// Returns whether this turn looks.
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

    /// A look has found nothing.
    pub(crate) fn note_vain(&mut self) {
        self.vain = self.vain.saturating_add(1);
    }

    /// Something has come, or is likely to come soon: an answer was sent, a sleep is over.
    pub(crate) fn expect(&mut self) {
        self.vain = 0;
    }

    /// Returns whether it looks by time only.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.vain >= VAIN
    }

    /// Stops its looks by time, so that a test sees what else makes it look.
    #[cfg(test)]
    pub(crate) fn put_off(&mut self) {
        self.vain = VAIN;
        self.last = Instant::now() + Duration::from_secs(3600);
    }
}

/// Serves on the calling thread until it is over.
pub fn serve(service: &mut dyn Service) {
    loop {
        match service.turn() {
            Turn::Over => return,
            Turn::Worked => continue,
            Turn::Waiting => {}
        }
        if service.prepare_sleep() {
            let mut waited = WaitedFds::new();
            service.put_waited(&mut waited);
            wait(waited, None::<Duration>);
        }
        service.end_sleep();
    }
}
