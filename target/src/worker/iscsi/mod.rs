//! iSCSI support for a worker: listening sockets, connections, and their use of the ring.
//!
//! For each portal, each worker has a listening socket created by the server. The kernel
//! distributes new connections to these sockets (`SO_REUSEPORT`). A connection has at most one
//! receive and one send operation in the ring. It is closed in the following order: shut down the
//! socket, wait for both operations, release all tasks of the channel, close the socket.
//!
//! # Modules
//! - `socket`: accept, receive, and send.
//!
//! # Limits
//! The number of connections is limited to twice the number of sessions, plus some for logins. If
//! there are more, a new connection is closed immediately. Half of them can be in login phase, and
//! a quarter from the same address: if this is exceeded, the oldest one is closed. There is a ring
//! slot for each operation of a connection, which is not available to block operations. The memory
//! used by a connection is the receive buffer, its channel, and headers for a batch. This is only a
//! few KiB before login.

mod socket;

use std::io;
use std::net::SocketAddr;

use slab::Slab;

use super::PollGroup;
use super::conns::{Conn, ConnKey};
use super::fabrics::{Fabric, Input};
use super::listener::TcpListener;
use super::mail::Mail;
use crate::fabric::ConnRef;
use crate::iscsi::{Action, Phase};
use crate::pool::Owner;
use socket::Listener;

/// Listening sockets of a worker, and connections waiting for the ring.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// Set if we don't accept connections: see [`Sockets::pause`].
    pub(super) is_paused: bool,
    listeners: Slab<Listener>,
    /// Connections waiting for a slot in the ring.
    stalled: Vec<ConnKey>,
    /// Number of bytes that can still be sent directly in this round.
    at_once: usize,
}

impl Sockets {
    /// Returns the addresses of all listeners.
    pub(super) fn listening(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.listeners.iter().filter_map(|(_, l)| l.address())
    }

    /// Returns duplicates of the listening sockets.
    pub(super) fn duplicate_listeners(&self) -> io::Result<Vec<TcpListener>> {
        let all = self.listeners.iter().map(|(_, l)| l.duplicate());
        all.filter_map(Result::transpose).collect()
    }
}

impl PollGroup {
    /// Called when a connection is lost but its commands are kept.
    fn lose_iscsi(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.get(key) else {
            return;
        };
        let Fabric::Tcp(tcp) = &conn.fabric else {
            return;
        };
        let (Some(member), cid) = (&tcp.login.membership, tcp.channel.channel().cid()) else {
            return;
        };
        let channel = self.channel_ref(conn.serial());
        let lost = self.shared.iscsi.lose(member.tsih, channel);
        tracing::info!(
            peer = %conn.peer, initiator = %member.initiator, cid = cid.0, "connection lost"
        );
        // The initiator may not know this, for example if only a network path failed.
        if let Some(other) = lost.reporter {
            let serial = other.serial;
            self.post_mail(other.worker, Mail::Lost { serial, cid });
        }
        self.terminate_all(lost.terminate);
    }

    /// Allows other connections to claim the commands of a lost connection.
    fn detach_iscsi(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.get(key) else {
            return;
        };
        let login = conn.fabric.login().map(|(_, login)| login);
        let Some(member) = login.and_then(|login| login.membership.as_ref()) else {
            return;
        };
        let channel = self.channel_ref(conn.serial());
        let detached = self.shared.iscsi.detached(member.tsih, channel);
        self.notify_waiting(detached.notify);
        self.terminate_all(detached.terminate);
    }

    /// Called when a connection is waiting for pool memory: lost connections have to release their
    /// memory, and the timeout is reduced for connections that use more than their share.
    pub(super) fn relieve_pool(&mut self) {
        let pool = &self.pool;
        let is_lost = |conn: &Conn<Fabric>| match &conn.fabric {
            Fabric::Tcp(tcp) => {
                let phase = tcp.channel.channel().phase();
                matches!(phase, Phase::CleanupWait | Phase::Retaining)
            }
            _ => false,
        };
        let is_meant = |conn: &Conn<Fabric>| is_lost(conn) || pool.is_owed_by(Owner(conn.serial()));
        for key in self.conns.keys(is_meant) {
            self.input(key, Input::Pressure);
        }
    }

    /// Notifies a connection that it may have the next command of its session.
    pub(super) fn notify_turn(&mut self, ConnRef { worker, serial }: ConnRef) {
        self.post_mail(worker, Mail::TakeTurn { serial });
    }

    /// Closes all other connections of a session, and notifies this one when that is complete.
    pub(super) fn end_others(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.get(key) else {
            return;
        };
        let serial = conn.serial();
        let login = conn.fabric.login().map(|(_, login)| login);
        let member = login.and_then(|login| login.membership.as_ref());
        let channel = self.channel_ref(serial);
        let sessions = &self.shared.iscsi;
        let ending =
            member.map_or_else(Vec::new, |member| sessions.end_others(member.tsih, channel));
        if !sessions.is_waiting(channel) {
            self.post_mail(self.index, Mail::OthersGone { serial });
        }
        self.terminate_all(ending);
    }

    /// Executes the actions of a TCP channel and sends its data.
    pub(super) fn pump_tcp(&mut self, key: ConnKey) {
        while let Some(conn) = self.conns.tcp_mut(key) {
            let Some(action) = conn.channel.channel_mut().poll_action() else {
                break;
            };
            match action {
                Action::Task(action) => self.carry_out_task(key, action),
                Action::TakeTurn(conn) => self.notify_turn(conn),
                Action::EndOthers => self.end_others(key),
                Action::Lost => self.lose_iscsi(key),
                Action::Detached => self.detach_iscsi(key),
                Action::Reassign(reassign) => {
                    self.post_mail(reassign.task.worker, Mail::Reassign(reassign));
                }
                Action::DeliverTask => {
                    let (to, moved) = conn.channel.channel_mut().take_reassigned();
                    self.post_mail(to.worker, Mail::Reassigned { to, moved });
                }
                Action::Disconnect => self.shut_down_socket(key),
                Action::Release => return self.release(key),
            }
        }
        // Send first, because the channel stops reading if there is too much data to be sent.
        self.send_next(key);
        self.read_on(key);
        self.receive_next(key);
    }
}
