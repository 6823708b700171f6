//! Servers of a device's clients that share a thread with others: [`Service`].

use std::time::Duration;

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
