//! The connection: connecting, login, loss, reconnecting, and closing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::chap::CHALLENGE_LEN;
use riser_scsi::iscsi::login::{
    ConnectionParams, InitiatorConfig, InitiatorLogin, LoginError, LoginStep, SessionParams,
};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{
    LoginResponse, LogoutReason, LogoutRequest, LogoutResponse, LogoutStatus, TextRequest,
    TextResponse,
};
use riser_scsi::iscsi::text::{self, Collector};
use riser_scsi::iscsi::{Cid, Numbers, Tsih, Ttt};
use riser_state::become_state;

use super::numbers::SequenceNumbers;
use super::types::ConnState;
use super::{IscsiSession, LOGOUT_PATIENCE, LOGOUT_TAG, MAX_TARGETS, Output, TEXT_TAG};
use crate::session::{
    ConnectError, Down, IscsiFault, Machine, SessionState, TaskManager, settle_message,
};

impl IscsiSession {
    pub(super) fn connect(&mut self, now: Instant) {
        let until = now + self.core.life.login_patience();
        self.login = None;
        self.params = None;
        self.tasks.clear();
        self.numbers = SequenceNumbers::new();
        self.core.functions.clear(0);
        self.pinged = None;
        self.targets = Collector::with_limit(MAX_TARGETS);
        become_state(&mut self.conn, ConnState::XptWait(until));
        self.core.arm(until);
        self.core
            .outputs
            .push_back(Output::Connect(self.redirection.address().cloned()));
    }

    /// Sets the address of the next connection. A host name may have several addresses, of hosts
    /// that don't know about each other's sessions.
    pub fn set_peer(&mut self, address: SocketAddr) {
        self.peer = Some(address);
    }

    /// Called when the connection is established. `random` must be unpredictable.
    pub fn handle_connected(&mut self, random: [u8; CHALLENGE_LEN + 1], now: Instant) {
        let ConnState::XptWait(until) = self.conn else {
            return;
        };
        let config = &self.config;
        let login = InitiatorLogin::new(
            InitiatorConfig {
                name: config.name.clone(),
                target: config.target.clone(),
                isid: config.isid,
                tsih: Tsih(0),
                cid: Cid(0),
                cmd_sn: self.numbers.cmd_sn(),
                credentials: config.credentials.clone(),
                target_credentials: config.target_credentials.clone(),
                offer: config.offer,
                keys: config.keys.clone(),
            },
            random,
        );
        let login = login.with_algorithms(config.algorithms.clone());
        self.login = Some(Box::new(login));
        become_state(&mut self.conn, ConnState::InLogin(until));
        self.core.last_received = now;
        self.send_login();
    }

    fn send_login(&mut self) {
        let next = self.login.as_mut().and_then(|login| login.poll_request());
        if let Some((mut request, data)) = next {
            request.exp_stat_sn = self.numbers.exp_stat_sn();
            self.send_control(request.header(), data);
        }
    }

    pub(super) fn on_login_response(
        &mut self,
        response: &LoginResponse,
        data: &[u8],
        numbers: Numbers,
        now: Instant,
    ) {
        let Some(login) = self.login.as_mut() else {
            return;
        };
        match login.handle_response(response, data) {
            Ok(LoginStep::Send) => {
                self.numbers.on_login_response(numbers);
                self.send_login();
            }
            Ok(LoginStep::FullFeature {
                session,
                connection,
                portal_group,
                ..
            }) => {
                let redirect = self.redirection.address().and(self.peer);
                self.fence.set_port(portal_group, redirect);
                self.numbers.on_full_feature(numbers);
                self.on_full_feature(session, connection, now);
            }
            Ok(LoginStep::Redirect { to, permanent }) => {
                if !self.redirection.on_redirect(to, permanent) {
                    self.fail_login(ConnectError::Redirected);
                    return;
                }
                become_state(&mut self.conn, ConnState::CleanupWait);
                self.core.outputs.push_back(Output::Disconnect);
            }
            Err(error) => self.fail_login(ConnectError::IscsiLogin(error)),
        }
    }

    fn fail_login(&mut self, error: ConnectError) {
        self.redirection.reset(false);
        self.tear_down(error.into(), false);
    }

    fn on_full_feature(
        &mut self,
        session: SessionParams,
        connection: ConnectionParams,
        now: Instant,
    ) {
        let wanted = self.config.digests;
        let agreed = connection.digests;
        if (wanted.header && !agreed.header) || (wanted.data && !agreed.data) {
            let error = LoginError::Protocol("the required digest was rejected");
            self.fail_login(ConnectError::IscsiLogin(error));
            return;
        }
        self.login = None;
        self.redirection.on_login();
        self.params = Some((session, connection));
        become_state(&mut self.conn, ConnState::LoggedIn);
        self.core.outputs.push_back(Output::FullFeature(connection));
        let time2wait = Duration::from_secs(session.time2wait.into());
        self.core.life.set_time2wait(time2wait);
        self.core.on_live(now);
        self.settle_lost_commands(now);
        if self.is_discovery() {
            let mut wish = Vec::new();
            let sought = self.config.sought.as_ref();
            text::put_pair(
                &mut wish,
                "SendTargets",
                sought.map_or("All", IscsiName::as_str),
            );
            self.send_text(Ttt::NONE, wish);
        } else {
            self.pump(now);
        }
    }

    /// Called when a login has succeeded: holds requests until the commands of lost sessions have
    /// completed.
    fn settle_lost_commands(&mut self, now: Instant) {
        let pending = self.core.settle_at;
        self.core.settle_at = self.fence.on_login(pending, now + self.core.settle);
        if pending.is_none() && self.core.settle_at.is_some() {
            let target = self.config.target.as_ref().map_or("", IscsiName::as_str);
            let (_, redirect) = self.fence.port();
            tracing::warn!(%target, "{}", settle_message(self.core.settle, redirect));
        }
        match self.core.settle_at {
            Some(at) => self.core.settle_until(at),
            None => {
                self.core.release_settled(now);
            }
        }
    }

    /// Resumes all commands, once the unit is known and the commands of lost sessions have
    /// completed.
    pub(super) fn release_settled(&mut self, now: Instant) {
        if self.core.settle_at.is_some_and(|at| at <= now) {
            self.fence.on_settled();
        }
        if self.core.release_settled(now) {
            self.pump(now);
        }
    }

    fn send_text(&mut self, ttt: Ttt, data: Vec<u8>) {
        let request = TextRequest {
            immediate: true,
            is_final: true,
            continues: false,
            lun: [0; 8],
            itt: TEXT_TAG,
            ttt,
            cmd_sn: self.numbers.cmd_sn(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
        };
        self.send_control(request.header(), data);
    }

    /// Handles a part of the response to SendTargets.
    pub(super) fn on_text(
        &mut self,
        response: &TextResponse,
        data: &[u8],
        now: Instant,
    ) -> Result<(), IscsiFault> {
        if !self.is_discovery() || response.itt != TEXT_TAG {
            return Err(IscsiFault::Unexpected("Text Response"));
        }
        // If there is more text, a target either sets the C bit, or doesn't set the F bit.
        let more = response.continues || !response.is_final;
        match self.targets.add_part(data, more)? {
            None => self.send_text(response.ttt, Vec::new()),
            Some(text) => {
                let (found, refused) = riser_scsi::iscsi::name::parse_targets(&text)?;
                if refused > 0 {
                    tracing::warn!("ignored {refused} invalid names or addresses of targets");
                }
                self.core.outputs.push_back(Output::Found(found));
                self.close(now);
            }
        }
        Ok(())
    }

    /// Called when connecting failed. The owner has released the connection's resources.
    pub fn handle_connect_failed(&mut self, error: ConnectError, now: Instant) {
        // On iSER, a REJ may also be received for an established connection (IBTA 12.9.7).
        if self.conn.is_open() {
            self.handle_broken(now);
            return;
        }
        if !matches!(self.conn, ConnState::XptWait(_)) {
            return;
        }
        become_state(&mut self.conn, ConnState::Free);
        self.redirection.reset(false);
        if self.state() == SessionState::LoggingIn {
            self.core.life.tear_down(error.into(), false);
        }
        self.on_down(now);
    }

    /// Called when the connection broke, or was closed by the peer.
    pub fn handle_broken(&mut self, now: Instant) {
        match self.conn {
            ConnState::InLogout(_) => self.disconnect(),
            ConnState::XptWait(_) | ConnState::InLogin(_) | ConnState::LoggedIn => {
                self.redirection.reset(self.conn == ConnState::LoggedIn);
                self.tear_down(Down::ConnectionLost, false);
            }
            ConnState::Free | ConnState::CleanupWait => {}
        }
        self.pump(now);
    }

    /// Called when the target violated the protocol.
    pub fn handle_fault(&mut self, fault: IscsiFault) {
        if self.conn.is_open() {
            self.tear_down(fault.into(), false);
        }
    }

    /// Called when the connection was closed: nothing can be received anymore, and no request's
    /// memory is in use.
    pub fn handle_disconnected(&mut self, now: Instant) {
        become_state(&mut self.conn, ConnState::Free);
        self.params = None;
        self.pinged = None;
        if self.core.on_channel_closed(0, now) {
            self.fence.on_changes_lost();
            self.core.settle_at = None;
        }
        if self.state() == SessionState::LoggingIn {
            // The target has moved.
            self.connect(now);
            return;
        }
        self.on_down(now);
    }

    /// Continues after the connection was closed: either closes the session, or waits for the next
    /// login.
    pub(super) fn on_down(&mut self, now: Instant) {
        if self.conn != ConnState::Free {
            return;
        }
        self.core.on_disconnected(now);
    }

    /// Starts to close the connection.
    pub(super) fn disconnect(&mut self) {
        if !matches!(self.conn, ConnState::Free | ConnState::CleanupWait) {
            become_state(&mut self.conn, ConnState::CleanupWait);
            self.core.outputs.push_back(Output::Disconnect);
        }
    }

    /// Logs out, then closes the connection.
    pub(super) fn log_out(&mut self, why: Down, last: bool, now: Instant) {
        if self.conn != ConnState::LoggedIn {
            self.tear_down(why, last);
            return;
        }
        self.core.life.tear_down(why, last);
        let until = now + LOGOUT_PATIENCE;
        become_state(&mut self.conn, ConnState::InLogout(until));
        self.core.arm(until);
        let request = LogoutRequest {
            immediate: true,
            reason: LogoutReason::CloseSession,
            itt: LOGOUT_TAG,
            cid: Cid(0),
            cmd_sn: self.numbers.cmd_sn(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
        };
        self.send_control(request.header(), Vec::new());
    }

    /// Called for a logout response, which may request a wait before the next login.
    pub(super) fn on_logout_response(&mut self, response: &LogoutResponse) {
        if response.status == LogoutStatus::Closed {
            let time2wait = Duration::from_secs(response.time2wait.into());
            self.core.life.set_time2wait(time2wait);
        }
        self.on_logged_out();
    }

    pub(super) fn on_logged_out(&mut self) {
        if matches!(self.conn, ConnState::InLogout(_)) {
            self.disconnect();
        }
    }
}
