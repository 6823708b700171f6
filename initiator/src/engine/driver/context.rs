//! Interface between a session's link and the driver.

use std::time::Instant;

use riser_scsi::iscsi::chap::CHALLENGE_LEN;

use crate::engine::env::Env;
use crate::engine::io::Io;
use crate::engine::rdma::{Device, Owner};
use crate::iscsi;
use crate::paths;
use crate::request::{RequestId, RequestResult};
use crate::session::{IscsiFault, SessionEvent};

/// An output of a session for the engine.
pub(super) enum Report {
    /// The request completed.
    Complete(RequestId, RequestResult),
    /// An event for the session's user.
    Event(SessionEvent),
    /// Check the target with a ping command.
    Ping,
    /// A request of paths concerning their sessions.
    Path(paths::Output),
}

/// Environment of a link during a call.
pub(super) struct Context<'a, E: Env> {
    /// `None` in an engine without an RDMA device.
    pub(super) device: Option<&'a mut Device<E::Provider>>,
    pub(super) env: &'a mut E,
    /// Commands of the session, by request.
    pub(super) ios: &'a [Option<Io>],
    /// Index of the session in the engine.
    pub(super) index: usize,
    pub(super) now: Instant,
}

impl<E: Env> Context<'_, E> {
    /// Returns the device of a session on RDMA.
    pub(super) fn device(&mut self) -> &mut Device<E::Provider> {
        let device = self.device.as_deref_mut();
        device.expect("an engine without a device makes no session on RDMA")
    }

    /// Returns the owner for a channel's connection.
    pub(super) fn owner(&self, channel: u8) -> Owner {
        Owner {
            session: self.index,
            channel,
        }
    }
}

/// Error of a datamover.
#[derive(Clone, Copy, Debug)]
pub(super) enum MoverError {
    /// The target violated the protocol.
    Fault(IscsiFault),
    /// The connection is broken.
    Broken,
}

/// Notifies the machine that its connection is established.
pub(super) fn log_in<E: Env>(
    machine: &mut iscsi::session::IscsiSession,
    env: &mut E,
    now: Instant,
) {
    let mut random = [0; CHALLENGE_LEN + 1];
    match env.fill_random(&mut random) {
        Ok(()) => machine.handle_connected(random, now),
        // Without random numbers, the login would be predictable.
        Err(_) => machine.handle_broken(now),
    }
}
