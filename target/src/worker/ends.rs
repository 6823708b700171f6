//! Setup and teardown of connections for all fabrics.

use std::sync::Arc;
use std::time::Instant;

use riser_transport::verbs::{CmId, ConnParam};

use super::conns::{Conn, ConnKey, Connection};
use super::fabrics::{Fabric, Input};
use super::gate::{ConnAddrs, is_served};
use super::mail::Mail;
use super::rdma::{SetupError, accept_params};
use super::{LINGER, PATIENCE, Phase, PollGroup, Worker};
use crate::audit::CloseReason;
use crate::fabric::ConnRef;
use crate::iscsi::Ending;
use crate::pool::Owner;
use crate::sessions::guard::{Departure, SessionGuard};

impl Worker {
    /// Accepts a new RDMA connection using our private data. On failure, this will remove the
    /// connection and, if necessary, leave its session.
    pub(super) fn accept(
        &mut self,
        key: ConnKey,
        param: &ConnParam,
        private_data: &[u8],
    ) -> Result<(), SetupError> {
        let accepted = self.try_accept(key, param, private_data);
        if accepted.is_err() {
            let mut conn = self.group.conns.remove(key);
            conn.fabric.abandon(&mut self.group.pool);
            self.group.pool.remove_member(Owner(conn.serial()));
            if let Some(link) = conn.fabric.rdma_mut() {
                link.hardware.destroy(&mut self.group.devices[link.device]);
            }
            if let Some(guard) = conn.fabric.into_guard() {
                self.group.leave_session(guard, Departure::default());
            }
        }
        accepted
    }

    fn try_accept(
        &mut self,
        key: ConnKey,
        param: &ConnParam,
        private_data: &[u8],
    ) -> Result<(), SetupError> {
        let Some(conn) = self.group.conns.get_mut(key) else {
            return Ok(());
        };
        // The receives have to be posted before the peer can send. We don't use the actions of the
        // connection for this: if the device is removed at this point, it would be closed like a
        // connection that was accepted.
        let receives = conn.fabric.take_first_receives();
        let Some(link) = conn.fabric.rdma() else {
            return Ok(());
        };
        let (device, cm) = (link.device, link.cm);
        let qp = link.hardware.qp;
        if self.group.devices.post_recvs(device, qp, &receives) < receives.len() {
            return Err(SetupError::Receives);
        }
        self.group.devices[device].accept(cm, &accept_params(param, private_data))?;
        // Its timer is set when we process the connections of this round.
        self.group.conns.mark_dirty(key);
        Ok(())
    }

    /// Handles the reply to a disconnect request for a released channel.
    pub(super) fn on_disconnect_completed(&mut self, device: usize, cm: CmId) {
        if self.group.disconnects.remove_completed(device, cm) {
            self.destroy_id(device, cm);
        }
    }

    pub(super) fn destroy_id(&mut self, device: usize, cm: CmId) {
        if let Some(dev) = self.group.devices.get_mut(device) {
            let _ = dev.destroy_id(cm);
        }
    }

    /// Pauses the listeners and requests a logout for all sessions. [`Worker::resume`] reverts
    /// this.
    pub(super) fn begin_drain(&mut self, until: Instant) {
        if self.phase != Phase::Serving {
            return;
        }
        self.phase = Phase::Draining(until);
        // This has to be first, because connections accepted after this would not be logged out.
        self.group.sockets.pause(&mut self.group.ring);
        for key in self.group.conns.keys(|_| true) {
            self.group.log_out(key, until);
        }
        self.group.drain_dirty();
    }

    /// Resumes normal operation after a drain was canceled.
    pub(super) fn resume(&mut self) {
        if let Phase::Draining(_) | Phase::Drained = self.phase {
            self.phase = Phase::Serving;
            self.group
                .sockets
                .resume(&mut self.group.ring, self.group.now);
        }
    }

    /// Stops listening and requests a logout for all sessions.
    pub(super) fn begin_shutdown(&mut self, until: Instant) {
        if let Phase::Stopping(_) | Phase::Quiet = self.phase {
            return;
        }
        self.phase = Phase::Stopping(until);
        // This has to be first. Otherwise new connections could delay the shutdown forever.
        self.group.portals.stop(&mut self.group.devices);
        self.group.sockets.close(&mut self.group.ring, |_| true);
        for key in self.group.conns.keys(|_| true) {
            self.group.log_out(key, until);
        }
        self.group.drain_dirty();
    }
}

impl PollGroup {
    /// Releases a connection after it has finished, and notifies its session.
    pub(super) fn release(&mut self, key: ConnKey) {
        let mut conn = self.conns.remove(key);
        self.pool.remove_member(Owner(conn.serial()));
        if let Some(link) = conn.fabric.rdma_mut() {
            let dev = &mut self.devices[link.device];
            link.hardware.destroy(dev);
            // We are still waiting for a reply to our request, which refers to this identifier.
            if link.owes_disconnect() {
                let until = self.now + LINGER;
                self.disconnects.add(link.device, link.cm, until);
            } else {
                let _ = dev.destroy_id(link.cm);
            }
        }
        self.past.add(&conn.fabric);
        self.end_session(conn);
    }

    /// Called when a connection is closed: saves its statistics and the reason, and leaves the
    /// session.
    fn end_session(&mut self, conn: Conn<Fabric>) {
        let (_, accounts) = conn.fabric.accounts();
        let who = match &conn.fabric {
            Fabric::Srp(own) => {
                accounts.keep(&own.key.initiator.to_string());
                self.who_of_srp(conn.peer, own)
            }
            Fabric::Tcp(_) | Fabric::Iser(_) => {
                let login = conn.fabric.login();
                let member = login.and_then(|(_, login)| login.membership.as_ref());
                let (Some((transport, login)), Some(member)) = (login, member) else {
                    return;
                };
                accounts.keep(member.initiator.as_str());
                let addrs = ConnAddrs {
                    transport,
                    listen: login.listen,
                    peer: conn.peer,
                };
                addrs.who(&self.catalog, member)
            }
        };
        let (end, logged_out) = conn.fabric.close_reason();
        self.logins.audit.log_close(self.now, &who, end);
        // An SRP initiator which only disconnects, like Linux before a reconnect, continues to use
        // its disks. An iSCSI initiator will log in again if we have requested the logout.
        let again = (end != CloseReason::Logout).then_some(self.now);
        if let Some(guard) = conn.fabric.into_guard() {
            self.leave_session(guard, Departure { logged_out, again });
        }
    }

    /// Removes a connection from its session, and handles the effects on other connections.
    pub(super) fn leave_session(&mut self, guard: SessionGuard, departure: Departure) {
        let left = guard.leave_session(departure);
        self.notify_waiting(left.notify);
        self.terminate_all(left.terminate);
    }

    /// Returns a reference to a connection of this worker, which can be used by all workers.
    pub(super) fn channel_ref(&self, serial: u64) -> ConnRef {
        ConnRef {
            worker: self.index,
            serial,
        }
    }

    /// Terminates connections on any worker.
    pub(super) fn end_all(&mut self, channels: Vec<(ConnRef, Ending)>) {
        for (channel, how) in channels {
            let serial = channel.serial;
            let mail = match how {
                Ending::Terminate => Mail::Terminate { serial },
                Ending::Detach => Mail::Detach { serial },
            };
            self.post_mail(channel.worker, mail);
        }
    }

    /// Terminates connections on any worker and aborts their commands.
    pub(super) fn terminate_all(&mut self, channels: Vec<ConnRef>) {
        let all = channels.into_iter().map(|c| (c, Ending::Terminate));
        self.end_all(all.collect());
    }

    /// Notifies channels that they can stop waiting.
    pub(super) fn notify_waiting(&mut self, waiting: Vec<ConnRef>) {
        for ConnRef { worker, serial } in waiting {
            self.post_mail(worker, Mail::OthersGone { serial });
        }
    }

    /// Requests a logout only once. The connection will be closed at `until`.
    pub(super) fn log_out(&mut self, key: ConnKey, until: Instant) {
        if self.conns.begin_leaving(key) {
            self.input(key, Input::Shutdown(until));
        }
    }

    /// Updates the LUN maps and limits of all sessions, and logs out sessions that are no longer
    /// served.
    pub(super) fn follow_sessions(&mut self) {
        let until = self.now + PATIENCE;
        let catalog = Arc::clone(&self.catalog);
        // Do this again for iSCSI sessions that were added using the previous catalog.
        for ConnRef { worker, serial } in self.shared.iscsi.change(&catalog) {
            self.post_mail(worker, Mail::LogOut { serial, until });
        }
        for key in self.conns.keys(|_| true) {
            let luns = self.conns.get(key).and_then(|conn| match &conn.fabric {
                Fabric::Srp(own) => {
                    let luns = self
                        .shared
                        .registry
                        .luns(&own.key, own.channel.config().nexus)?;
                    let is_same = Arc::ptr_eq(&luns, &own.channel.config().luns);
                    (!is_same).then_some(luns)
                }
                Fabric::Tcp(_) | Fabric::Iser(_) => {
                    let (_, login) = conn.fabric.login()?;
                    self.shared.iscsi.luns(login.membership.as_ref()?.tsih)
                }
            });
            if let Some(luns) = luns {
                self.input(key, Input::Luns(luns));
            }
            // This is also required if the units are the same, because the limits can be changed in
            // place.
            self.input(key, Input::Limits);
        }
        self.log_out_unserved();
        self.drain_dirty();
    }

    /// Logs out all connections with a portal that was removed or belongs to a different target
    /// now.
    pub(super) fn log_out_unserved(&mut self) {
        let until = self.now + PATIENCE;
        for key in self.conns.keys(|conn| self.is_unserved(conn)) {
            self.log_out(key, until);
        }
    }

    fn is_unserved(&self, conn: &Conn<Fabric>) -> bool {
        match &conn.fabric {
            Fabric::Srp(own) => self.is_unserved_srp(own),
            Fabric::Tcp(_) | Fabric::Iser(_) => {
                let login = conn.fabric.login();
                let is_served = |(transport, login): (_, &super::fabrics::Login)| {
                    is_served(
                        &self.catalog,
                        transport,
                        login.listen,
                        login.membership.as_ref(),
                    )
                };
                !login.is_some_and(is_served)
            }
        }
    }
}
