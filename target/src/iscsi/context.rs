//! Worker context for a call, and decisions of the target about login and discovery.

use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::login::{
    CompletedLogin, Identity, LoginFault, Refusal, SessionParams, Terms,
};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, CmdSn, Tsih};
use riser_scsi::nexus::NexusId;

use super::action::Ending;
use super::task::SpareTasks;
use super::window::Window;
use crate::fabric::{CallContext, LunMap};
use crate::pool::Pool;
use crate::stats::SessionEvent;

/// Decisions about login and discovery, implemented by the target.
pub trait Gate {
    /// Returns the authentication terms for a login.
    ///
    /// # Errors
    /// Returns the reason if the login is refused.
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal>;

    /// Creates a session with `first` as the first CmdSN, or adds a connection to an existing
    /// session.
    ///
    /// # Errors
    /// Returns the login status if this is refused.
    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus>;

    /// Called when a login fails with this status. Includes the identity if it's already known, and
    /// the CHAP user name that was used.
    fn refused(
        &mut self,
        status: LoginStatus,
        identity: Option<&Identity>,
        fault: Option<&LoginFault>,
        user: Option<&str>,
    );

    /// Counts an event for the target of this session.
    fn count(&mut self, event: SessionEvent);

    /// Starts the logout of another connection, and returns false if there is no such connection.
    /// When that connection is closed, or its commands can be reassigned,
    /// [`Channel::handle_others_gone`](super::Channel::handle_others_gone) is called.
    fn end_other(&mut self, cid: Cid, ending: Ending) -> bool;

    /// The channel no longer waits for the sessions that are being replaced.
    fn stop_waiting(&mut self);

    /// Fills `out` with cryptographically secure random bytes.
    fn random(&mut self, out: &mut [u8]);

    /// Returns the targets visible to an initiator. If `wanted` is set, only this target is
    /// returned.
    fn targets(
        &mut self,
        initiator: &IscsiName,
        wanted: Option<&IscsiName>,
    ) -> Vec<DiscoveredTarget>;
}

/// Result of joining a session.
#[derive(Clone, Debug)]
pub struct LoginGrant {
    /// Target session identifying handle, must not be 0.
    pub tsih: Tsih,
    /// I_T nexus and LUN map, or `None` for a discovery session.
    pub nexus: Option<(NexusId, Arc<LunMap>)>,
    /// Parameters from the leading login of the session.
    pub params: SessionParams,
    /// Command window, shared by all connections of the session.
    pub window: Arc<Window>,
    /// Set if the new session replaces sessions which may still have commands at a device.
    /// [`Channel::handle_others_gone`](super::Channel::handle_others_gone) is called when these have
    /// completed. If this takes too long, the affected units will refuse new commands until then.
    pub waits: bool,
}

/// Worker context for a call.
pub struct Cx<'a> {
    /// Current time of the worker loop.
    pub now: Instant,
    /// Data buffers for this worker.
    pub pool: &'a mut Pool,
    /// Unused contexts of this worker.
    pub spare: &'a mut SpareTasks,
    /// Used for login and discovery.
    pub gate: &'a mut dyn Gate,
}

impl CallContext for Cx<'_> {
    fn now(&self) -> Instant {
        self.now
    }

    fn pool(&mut self) -> &mut Pool {
        self.pool
    }
}
