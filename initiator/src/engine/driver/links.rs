//! Connections: events of the connection manager, making and releasing.

use std::time::{Duration, Instant};

use riser_scsi::srp::LOGIN_REQ_LEN;
use riser_transport::verbs::{CmEvent, CmEventKind, ConnParam, PortSpace, Provider};

use super::link::{Link, srp};
use super::{DISCONNECT_PATIENCE, Driver};
use crate::engine::conn::Conn;
use crate::session::ConnectError;
use crate::srp::session::ChannelIndex;

impl<P: Provider> Driver<P> {
    pub(super) fn handle_cm_event(&mut self, event: CmEvent, now: Instant) {
        let Some(&(index, channel)) = self.ids.get(&event.id) else {
            let over = matches!(
                event.kind,
                CmEventKind::Disconnected | CmEventKind::TimewaitExit
            );
            if over && let Some(at) = self.leaving.iter().position(|(id, _)| *id == event.id) {
                self.leaving.swap_remove(at);
                let _ = self.provider.destroy_id(event.id);
            }
            return;
        };
        if let Link::Iser(_) = self.sessions[index].link {
            self.handle_iser_cm_event(index, event, now);
            return;
        }
        let channel = ChannelIndex(channel);
        let conn = srp(&mut self.sessions, index).conns[usize::from(channel.0)].as_mut();
        if conn.is_some_and(|c| c.closing_until.is_some()) {
            // Whatever it was that was on its way, it has ended.
            self.tear_down(index, channel, now);
            return;
        }
        let timeout = Duration::from_secs(2);
        match event.kind {
            CmEventKind::AddrResolved => {
                if let Err(e) = self.provider.resolve_route(event.id, timeout) {
                    self.fail_connect(index, channel, ConnectError::Cm(e), now);
                }
            }
            CmEventKind::RouteResolved => self.connect(index, channel, now),
            CmEventKind::AddrError(e) | CmEventKind::RouteError(e) => {
                self.fail_connect(index, channel, ConnectError::Address(e), now);
            }
            CmEventKind::ConnectError(e) => {
                self.fail_connect(index, channel, ConnectError::Cm(e), now);
            }
            CmEventKind::Unreachable => {
                self.fail_connect(index, channel, ConnectError::Unreachable, now);
            }
            CmEventKind::Rejected {
                reason,
                private_data,
            } => {
                self.release(index, channel, false, now);
                srp(&mut self.sessions, index).machine.handle_rejected(
                    channel,
                    reason,
                    &private_data,
                    now,
                );
                self.drain(index, now);
            }
            CmEventKind::Established { param } => {
                let link = srp(&mut self.sessions, index);
                if let Some(conn) = &mut link.conns[usize::from(channel.0)] {
                    conn.is_connecting = false;
                }
                link.machine
                    .handle_connected(channel, &param.private_data, now);
                self.drain(index, now);
            }
            CmEventKind::Disconnected | CmEventKind::DeviceRemoval => {
                self.break_channel(index, channel.0, now);
            }
            CmEventKind::TimewaitExit | CmEventKind::ConnectRequest { .. } => {}
        }
    }

    /// Begins to find the path for a channel.
    pub(super) fn resolve(&mut self, index: usize, channel: ChannelIndex, now: Instant) {
        let session = srp(&mut self.sessions, index);
        let target = session.target;
        let space = match target.service_id {
            Some(service_id) => PortSpace::Ib {
                service_id,
                mask: u64::MAX,
            },
            None => PortSpace::Tcp,
        };
        let id = match self.provider.create_id(space) {
            Ok(id) => id,
            Err(e) => {
                let error = ConnectError::Cm(e);
                session.machine.handle_connect_failed(channel, error, now);
                return;
            }
        };
        self.ids.insert(id, (index, channel.0));
        session.conns[usize::from(channel.0)] = Some(Conn::new(id, session.conn_config));
        let timeout = Duration::from_secs(2);
        if let Err(e) = self
            .provider
            .resolve_addr(id, target.src, target.dst, timeout)
        {
            self.release(index, channel, false, now);
            srp(&mut self.sessions, index)
                .machine
                .handle_connect_failed(channel, ConnectError::Address(e), now);
        }
    }

    /// The path is found: makes the queue pair and sends the request with the login in it.
    pub(super) fn connect(&mut self, index: usize, channel: ChannelIndex, now: Instant) {
        let session = srp(&mut self.sessions, index);
        let Some(conn) = session.conns[usize::from(channel.0)].as_mut() else {
            return;
        };
        let made = conn.set_up(&mut self.provider, session.rdma.pd, session.rdma.cq);
        if let Some(qp) = conn.qp() {
            self.qps.insert(qp, (index, channel.0));
        }
        if let Err(e) = made {
            self.fail_connect(index, channel, ConnectError::Local(e), now);
            return;
        }
        let login = session.machine.begin_login(channel);
        let mut private_data = vec![0; LOGIN_REQ_LEN];
        // The RDMA CM's address header leaves no room for the information unit as such.
        let len = match session.target.service_id {
            Some(_) => login.emit(&mut private_data),
            None => login.emit_rdma(&mut private_data),
        };
        private_data.truncate(len);
        let param = ConnParam {
            private_data,
            ..ConnParam::default()
        };
        conn.is_connecting = true;
        if let Err(e) = self.provider.connect(conn.id, &param) {
            self.fail_connect(index, channel, ConnectError::Cm(e), now);
        }
    }

    pub(super) fn fail_connect(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        error: ConnectError,
        now: Instant,
    ) {
        self.release(index, channel, false, now);
        srp(&mut self.sessions, index)
            .machine
            .handle_connect_failed(channel, error, now);
        self.drain(index, now);
    }

    /// Lets go of a channel's connection. With `linger` the peer is told, and the identifier lives
    /// until the peer has heard of it.
    pub(super) fn release(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        linger: bool,
        now: Instant,
    ) {
        let conn = srp(&mut self.sessions, index).conns[usize::from(channel.0)].take();
        let Some(mut conn) = conn else {
            return;
        };
        self.ids.remove(&conn.id);
        let told = linger && self.provider.disconnect(conn.id).is_ok();
        if let Some(qp) = conn.qp() {
            self.qps.remove(&qp);
        }
        conn.release(&mut self.provider);
        if told {
            self.leaving.push((conn.id, now + DISCONNECT_PATIENCE));
        } else {
            let _ = self.provider.destroy_id(conn.id);
        }
    }

    /// Tears a channel down now and tells the session.
    pub(super) fn tear_down(&mut self, index: usize, channel: ChannelIndex, now: Instant) {
        self.release(index, channel, true, now);
        srp(&mut self.sessions, index)
            .machine
            .handle_channel_gone(channel, now);
        self.drain(index, now);
    }
}
