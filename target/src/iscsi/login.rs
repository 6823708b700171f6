//! The login on a channel: what the gate decides, and the way into full-feature phase.

use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::login::{CompletedLogin, Gatekeeper, Identity, Outcome, Refusal, Terms};
use riser_scsi::iscsi::pdu::{FromTarget, LoginRequest, LoginStatus, LogoutStatus};
use riser_scsi::iscsi::{CmdSn, Tsih};
use riser_scsi::nexus::NexusId;
use riser_state::become_state;

use super::channel::{Channel, Cx, DISCOVERY_TIMEOUT, Gate, LoginGrant, Phase, SessionContext};
use super::datamover::Datamover;
use super::pending::LoginResult;
use crate::fabric::LunMap;

/// Gives the login what the channel's gate says, and keeps what was entered.
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
        let answer = self.login.handle(request, data, &mut keeper);
        self.first_cmd_sn = request.cmd_sn;
        self.cid = request.cid;
        let status = answer.response.status;
        let send = |channel: &mut Self, text| {
            channel.send(FromTarget::LoginResponse(answer.response), text, true);
        };
        match answer.outcome {
            Outcome::Continue => send(self, answer.text),
            Outcome::Failed => {
                send(self, answer.text);
                cx.gate.refused(status, self.login.identity());
                self.close(cx.now);
            }
            Outcome::FullFeature(joined) => {
                let admitted = keeper.admitted.expect("joined before");
                let (nexus, luns) = admitted.nexus.unwrap_or_else(|| {
                    // A discovery session has no nexus, and runs no command.
                    (NexusId(0), Arc::new(LunMap::default()))
                });
                self.session = Some(SessionContext {
                    identity: joined.identity,
                    tsih: admitted.tsih,
                    params: admitted.params,
                    connection: joined.connection,
                    nexus,
                    luns,
                    window: admitted.window,
                });
                self.entering = Some(Box::new(LoginResult {
                    response: answer.response,
                    text: answer.text,
                    session: admitted.params,
                    connection: joined.connection,
                }));
                // Without the last answer the initiator sends no command, so none can overtake
                // those of the session that is replaced.
                become_state(&mut self.phase, Phase::Joining);
                if !admitted.waits {
                    self.enter_full_feature(cx.now);
                }
            }
        }
    }

    /// Sends the login's last answer.
    fn enter_full_feature(&mut self, now: Instant) {
        let entering = self.entering.take().expect("a login has succeeded");
        let response = FromTarget::LoginResponse(entering.response);
        // Before `enable`: the answer still goes without digests.
        self.send(response, entering.text, true);
        self.mover.enable(&entering.session, &entering.connection);
        self.new_params = Some(entering.connection);
        become_state(&mut self.phase, Phase::FullFeature);
        self.phase_deadline = if entering.session.discovery {
            Some(now + DISCOVERY_TIMEOUT)
        } else {
            self.make_contexts();
            None
        };
    }

    /// The others that this connection waits for hold nothing any more.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.awaits_others = false;
        self.answer_logouts_of_others(LogoutStatus::Closed);
        if self.phase == Phase::Joining {
            // The initiator could not but be silent while it waited.
            self.last_input = cx.now;
            self.enter_full_feature(cx.now);
        }
        self.settle(cx);
    }
}
