//! The machine of a session and the objects it drives: connections, or other sessions.
//!
//! The engine is mostly independent of protocols. It passes inputs to a link and processes the
//! resulting [`Report`]s ([`Link::poll`]). All other outputs of a machine are handled in the link's
//! module: `srp`, `iscsi` (with the datamovers `tcp` and `iser`) and `multipath`.

use std::time::Instant;

use riser_block::poll_fds::PollInterest;
use riser_transport::verbs::{CmEventKind, Completion, Provider};

use super::context::{Context, Report};
use super::iscsi::IscsiLink;
use super::multipath::PathsLink;
use super::srp::SrpLink;
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::rdma::Device;
use crate::paths::PortTag;
use crate::request::{RequestId, RequestSpec};
use crate::session::{Machine, SubmitError};

/// See the documentation of the module.
pub(super) enum Link {
    Srp(Box<SrpLink>),
    Iscsi(Box<IscsiLink>),
    Paths(Box<PathsLink>),
}

/// Calls the same method for each kind of link.
macro_rules! each {
    ($link:expr, $it:ident => $call:expr) => {
        match $link {
            Link::Srp($it) => $call,
            Link::Iscsi($it) => $call,
            Link::Paths($it) => $call,
        }
    };
}

impl Link {
    /// Processes the machine's outputs and returns the next one for the engine.
    pub(super) fn poll<E: Env>(&mut self, cx: &mut Context<'_, E>) -> Option<Report> {
        each!(self, link => link.poll(cx))
    }

    /// Handles an event of the connection manager for a channel.
    pub(super) fn handle_cm_event<E: Env>(
        &mut self,
        channel: u8,
        event: CmEventKind,
        cx: &mut Context<'_, E>,
    ) {
        match self {
            Self::Srp(link) => link.handle_cm_event(channel, event, cx),
            Self::Iscsi(link) => link.handle_cm_event(event, cx),
            Self::Paths(_) => {}
        }
    }

    /// Handles a completion on a channel.
    pub(super) fn handle_completion<E: Env>(
        &mut self,
        channel: u8,
        completion: &Completion,
        cx: &mut Context<'_, E>,
    ) {
        match self {
            Self::Srp(link) => link.handle_completion(channel, completion, cx),
            Self::Iscsi(link) => link.handle_completion(completion, cx),
            Self::Paths(_) => {}
        }
    }

    /// Called when the connection of a channel is broken.
    pub(super) fn handle_broken(&mut self, channel: u8, now: Instant) {
        match self {
            Self::Srp(link) => link.handle_broken(channel, now),
            Self::Iscsi(link) => link.machine.handle_broken(now),
            Self::Paths(_) => {}
        }
    }

    /// Returns the time of the next timeout.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        each!(self, link => link.next_deadline())
    }

    /// Handles expired timeouts.
    pub(super) fn handle_timeout<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        each!(self, link => link.handle_timeout(cx));
    }

    /// Returns whether the memory of a command may have this many segments.
    pub(super) fn accepts_segments(&self, count: usize) -> bool {
        match self {
            Self::Iscsi(link) => link.accepts_segments(count),
            // For paths, this is decided by the session of the selected path.
            Self::Srp(_) | Self::Paths(_) => true,
        }
    }

    /// Returns the address of the session's target.
    pub(super) fn target(&self) -> &Target {
        each!(self, link => link.target())
    }

    /// Returns the target port of a logged-in session.
    pub(super) fn port(&self) -> Option<PortTag> {
        match self {
            Self::Srp(link) => {
                let (port, redirect) = link.machine.target_port();
                Some(PortTag::Port(port, redirect))
            }
            Self::Iscsi(link) => {
                let (group, redirect) = link.machine.target_port();
                group.map(|group| PortTag::Group(group, redirect))
            }
            Self::Paths(_) => None,
        }
    }

    /// Returns the number of SRP request-limit credits held by the target without an outstanding
    /// request.
    pub(super) fn unreturned(&self) -> i64 {
        match self {
            Self::Srp(link) => link.machine.unreturned(),
            Self::Iscsi(_) | Self::Paths(_) => 0,
        }
    }

    /// Returns whether the session uses RDMA.
    pub(super) fn is_rdma(&self) -> bool {
        match self {
            Self::Srp(_) => true,
            Self::Iscsi(link) => link.is_rdma(),
            Self::Paths(_) => false,
        }
    }

    /// Returns the descriptor to poll, for sessions on TCP.
    pub(super) fn poll_interest(&self) -> Option<PollInterest<'_>> {
        match self {
            Self::Iscsi(link) => link.poll_interest(),
            Self::Srp(_) | Self::Paths(_) => None,
        }
    }

    /// Returns the link of an iSCSI session.
    pub(super) fn iscsi(&mut self) -> Option<&mut IscsiLink> {
        match self {
            Self::Iscsi(link) => Some(link),
            Self::Srp(_) | Self::Paths(_) => None,
        }
    }

    /// Returns the paths of the session.
    pub(super) fn paths(&self) -> Option<&PathsLink> {
        match self {
            Self::Paths(link) => Some(link),
            Self::Srp(_) | Self::Iscsi(_) => None,
        }
    }

    /// Mutable variant of [`Self::paths`].
    pub(super) fn paths_mut(&mut self) -> Option<&mut PathsLink> {
        match self {
            Self::Paths(link) => Some(link),
            Self::Srp(_) | Self::Iscsi(_) => None,
        }
    }

    /// Releases the device resources of a closed session.
    pub(super) fn release_device<P: Provider>(self, device: Option<&mut Device<P>>) {
        let Some(device) = device else {
            return;
        };
        match self {
            Self::Srp(link) => link.release_device(device),
            Self::Iscsi(link) => link.release_device(device),
            Self::Paths(_) => {}
        }
    }

    pub(super) fn submit(
        &mut self,
        spec: RequestSpec,
        now: Instant,
    ) -> Result<RequestId, SubmitError> {
        each!(self, link => link.machine.submit(spec, now))
    }

    /// Returns the machine, for infrequent calls.
    pub(super) fn machine(&mut self) -> &mut dyn Machine {
        each!(self, link => &mut link.machine)
    }
}
