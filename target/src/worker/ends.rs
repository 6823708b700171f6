//! The beginning and the end of connections of every fabric.

use std::sync::Arc;
use std::time::Instant;

use riser_transport::verbs::{CmId, ConnParam};

use super::conns::{Conn, ConnKey, Connection};
use super::fabrics::{Fabric, Input};
use super::gate::{ConnAddrs, is_served};
use super::mail::Mail;
use super::rdma::{SetupError, answer};
use super::{LINGER, PATIENCE, Phase, Worker};
use crate::audit::Parting;
use crate::fabric::ConnRef;
use crate::iscsi::Ending;
use crate::sessions::guard::{Departure, SessionGuard};

impl Worker {
    /// Accepts a connection on RDMA that has just been made, with our private data. Where that
    /// fails, nothing of it is left, and it leaves its session if it has one.
    pub(super) fn accept(
        &mut self,
        key: ConnKey,
        param: &ConnParam,
        private_data: &[u8],
    ) -> Result<(), SetupError> {
        let accepted = self.try_accept(key, param, private_data);
        if accepted.is_err() {
            let mut conn = self.conns.remove(key);
            conn.fabric.abandon(&mut self.pool);
            if let Some(link) = conn.fabric.rdma_mut() {
                link.hardware.destroy(&mut self.devices[link.device]);
            }
            if let Some(guard) = conn.fabric.into_guard() {
                self.leave(guard, Departure::default());
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
        let Some(conn) = self.conns.get_mut(key) else {
            return Ok(());
        };
        // The receives must be there before the peer may send. They are not posted by way of the
        // connection's actions: one whose device dies meanwhile would end like a connection that
        // was accepted.
        let receives = conn.fabric.take_first_receives();
        let Some(link) = conn.fabric.rdma() else {
            return Ok(());
        };
        let (device, cm) = (link.device, link.cm);
        let qp = link.hardware.qp;
        if self.post_recvs(device, qp, &receives) < receives.len() {
            return Err(SetupError::Receives);
        }
        self.devices[device].accept(cm, &answer(param, private_data))?;
        // Its timer is set with the other connections of this round that may want something.
        self.conns.mark_dirty(key);
        Ok(())
    }

    /// A connection holds nothing any longer: what is left of it goes, and its session is notified.
    pub(super) fn release(&mut self, key: ConnKey) {
        let mut conn = self.conns.remove(key);
        if let Some(link) = conn.fabric.rdma_mut() {
            let dev = &mut self.devices[link.device];
            link.hardware.destroy(dev);
            // The peer has yet to answer our request, and its answer names the identifier.
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

    /// A connection is gone: its session's numbers and its end are kept, and it leaves the session.
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
        let (end, logged_out) = conn.fabric.end();
        self.logins.audit.end(self.now, &who, end);
        // An initiator of SRP that only disconnects, as Linux does before it connects again, goes
        // on with its disks; one of iSCSI that was asked to log out logs in again.
        let again = (end != Parting::Logout).then_some(self.now);
        if let Some(guard) = conn.fabric.into_guard() {
            self.leave(guard, Departure { logged_out, again });
        }
    }

    /// A connection leaves its session, with what that means for others.
    pub(super) fn leave(&mut self, guard: SessionGuard, departure: Departure) {
        let left = guard.leave(departure);
        self.notify_waiting(left.notify);
        self.terminate_all(left.terminate);
    }

    /// A peer has answered the disconnect request of a connection whose channel is gone.
    pub(super) fn on_disconnect_answered(&mut self, device: usize, cm: CmId) {
        if self.disconnects.take_answered(device, cm) {
            self.destroy_id(device, cm);
        }
    }

    pub(super) fn destroy_id(&mut self, device: usize, cm: CmId) {
        if let Some(dev) = self.devices.get_mut(device) {
            let _ = dev.destroy_id(cm);
        }
    }

    /// The name of a connection of this worker among all workers.
    pub(super) fn channel_ref(&self, serial: u64) -> ConnRef {
        ConnRef {
            worker: self.index,
            serial,
        }
    }

    /// Ends connections, of any worker.
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

    /// Ends connections for good, of any worker.
    pub(super) fn terminate_all(&mut self, channels: Vec<ConnRef>) {
        let all = channels.into_iter().map(|c| (c, Ending::Terminate));
        self.end_all(all.collect());
    }

    /// Channels wait for no others any longer.
    pub(super) fn notify_waiting(&mut self, waiting: Vec<ConnRef>) {
        for ConnRef { worker, serial } in waiting {
            self.post_mail(worker, Mail::OthersGone { serial });
        }
    }

    /// Asks an initiator to log out, once; the connection is cut at `until`.
    pub(super) fn log_out(&mut self, key: ConnKey, until: Instant) {
        if self.conns.begin_leaving(key) {
            self.input(key, Input::Shutdown(until));
        }
    }

    /// Gives sessions the units and limits that they have now, and logs those out that are not
    /// served any longer.
    pub(super) fn follow_sessions(&mut self) {
        let until = self.now + PATIENCE;
        let catalog = Arc::clone(&self.catalog);
        // Once more, for sessions of iSCSI that have been entered by the old catalog meanwhile.
        for ConnRef { worker, serial } in self.shared.iscsi.change(&catalog) {
            self.post_mail(worker, Mail::LogOut { serial, until });
        }
        for key in self.conns.keys(|_| true) {
            let luns = self.conns.get(key).and_then(|conn| match &conn.fabric {
                Fabric::Srp(own) => {
                    let luns = self.shared.registry.luns(&own.key, own.channel.nexus())?;
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
            // Also where the units are the same: their limits may have been changed in place.
            self.input(key, Input::Limits);
        }
        self.log_out_unserved();
        self.drain_dirty();
    }

    /// Logs out connections whose portal is gone, or is another target's now.
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

    /// Stops listening, and asks all initiators to log out.
    pub(super) fn begin_shutdown(&mut self, until: Instant) {
        if self.phase != Phase::Serving {
            return;
        }
        self.phase = Phase::Stopping(until);
        // First, or those that come might keep the worker from ever being without connections.
        self.portals.stop(&mut self.devices);
        self.sockets.close(&mut self.ring, |_| true);
        for key in self.conns.keys(|_| true) {
            self.log_out(key, until);
        }
        self.drain_dirty();
    }
}
