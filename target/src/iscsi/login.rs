//! Login on a channel: uses the gate, and handles the transition to full-feature phase.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::{CompletedLogin, Gatekeeper, Identity, Outcome, Refusal, Terms};
use riser_scsi::iscsi::pdu::{FromTarget, LoginRequest, LoginStatus, LogoutStatus};
use riser_scsi::iscsi::{CmdSn, Tsih};
use riser_scsi::nexus::NexusId;
use riser_state::become_state;

use super::channel::Channel;
use super::context::{Cx, Gate, LoginGrant};
use super::datamover::Datamover;
use super::executor::SessionContext;
use super::pending::LoginResult;
use super::phase::Phase;
use super::timers::DISCOVERY_TIMEOUT;
use crate::fabric::LunMap;

/// Maximum time that a login waits for commands of the session it replaces. The login timeout of
/// initiators is at least 10 s.
pub(super) const REINSTATEMENT: Duration = Duration::from_secs(2);

/// Passes the gate's decisions to the login, and stores the result.
struct Keeper<'a> {
    gate: &'a mut dyn Gate,
    first: CmdSn,
    admitted: Option<LoginGrant>,
}

impl Gatekeeper for Keeper<'_> {
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal> {
        self.gate.admit(identity)
    }

    fn join(&mut self, joined: &CompletedLogin) -> Result<Tsih, LoginStatus> {
        let admitted = self.gate.join(joined, self.first)?;
        let tsih = admitted.tsih;
        self.admitted = Some(admitted);
        Ok(tsih)
    }

    fn random(&mut self, out: &mut [u8]) {
        self.gate.random(out);
    }
}

impl<D: Datamover> Channel<D> {
    pub(super) fn on_login(&mut self, cx: &mut Cx<'_>, request: &LoginRequest, data: &[u8]) {
        let mut keeper = Keeper {
            gate: &mut *cx.gate,
            first: request.cmd_sn,
            admitted: None,
        };
        let reply = self.login.handle(request, data, &mut keeper);
        self.first_cmd_sn = request.cmd_sn;
        self.cid = request.cid;
        let status = reply.response.status;
        let send = |channel: &mut Self, text| {
            channel
                .executor
                .send(FromTarget::LoginResponse(reply.response), text, true);
        };
        match reply.outcome {
            Outcome::Continue => send(self, reply.text),
            Outcome::Failed => {
                send(self, reply.text);
                let (identity, fault) = (self.login.identity(), self.login.fault());
                let user = self.login.claimed_name();
                cx.gate.refused(status, identity, fault, user);
                self.close(cx.now);
            }
            Outcome::FullFeature(joined) => {
                let admitted = keeper.admitted.expect("joined before");
                let is_leading = joined.identity.tsih == Tsih(0);
                let (nexus, luns) = admitted.nexus.unwrap_or_else(|| {
                    // A discovery session has no nexus and can't execute commands.
                    (NexusId(0), Arc::new(LunMap::default()))
                });
                self.executor.session = Some(SessionContext {
                    identity: joined.identity,
                    tsih: admitted.tsih,
                    params: admitted.params,
                    connection: joined.connection,
                    nexus,
                    luns,
                    window: admitted.window,
                });
                self.entering = Some(Box::new(LoginResult {
                    response: reply.response,
                    text: reply.text,
                    session: admitted.params,
                    connection: joined.connection,
                    is_leading,
                }));
                // The initiator can't send commands before it receives the final login response.
                // This ensures that new commands are executed after those of the replaced session.
                become_state(&mut self.executor.phase, Phase::Joining);
                if !admitted.waits {
                    self.enter_full_feature(cx.now);
                } else if is_leading {
                    self.executor.timers.phase = Some(cx.now + REINSTATEMENT);
                }
            }
        }
    }

    /// Sends the final login response.
    fn enter_full_feature(&mut self, now: Instant) {
        let entering = self.entering.take().expect("a login has succeeded");
        let response = FromTarget::LoginResponse(entering.response);
        // This must be called before `enable`, because the response doesn't use digests.
        self.executor.send(response, entering.text, true);
        self.executor
            .mover
            .enable(&entering.session, &entering.connection);
        self.new_params = Some(entering.connection);
        become_state(&mut self.executor.phase, Phase::FullFeature);
        self.executor.timers.phase = if entering.session.discovery {
            Some(now + DISCOVERY_TIMEOUT)
        } else {
            let contexts = self.executor.config.contexts();
            self.executor.tasks.allocate(contexts);
            None
        };
    }

    /// Completes the login while commands of the replaced session are still at a device, which
    /// could be blocked. The initiator should be able to use its other devices, so only units with
    /// such commands will refuse commands from this session.
    pub(super) fn start_early(&mut self, cx: &mut Cx<'_>) {
        cx.gate.stop_waiting();
        self.executor.timers.last_input = cx.now;
        self.enter_full_feature(cx.now);
    }

    /// Called when the connections we are waiting for have released their resources.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.awaits_others = false;
        self.respond_other_logouts(LogoutStatus::Closed);
        if self.executor.phase == Phase::Joining {
            // The initiator couldn't send anything while waiting for the response.
            self.executor.timers.last_input = cx.now;
            self.enter_full_feature(cx.now);
        }
        self.finish_input(cx);
    }
}
