//! iSCSI on a worker: its listening sockets, its connections, and what connects them to the ring.
//!
//! Every worker has a listening socket for every portal, which the server binds; the kernel deals
//! new connections out among them (`SO_REUSEPORT`). A connection has at most one receive and one
//! send in the ring at a time. It is closed in this order: the socket is shut down, both operations
//! end, the channel releases its tasks, the socket is closed.
//!
//! # Modules
//! - `socket`: accepting, receiving, sending.
//!
//! # Bounds
//! Connections of a worker are bounded by twice the sessions and some for logins; further ones are
//! closed at once. Half of them may be logging in, a quarter from one address: beyond that the
//! oldest of them gives way. The ring has a slot for each operation of each connection, which block
//! operations do not take. A connection's memory is its receive buffer, its channel, and a batch of
//! headers; before it has logged in, these are a few KiB.

mod socket;

use std::io;
use std::net::SocketAddr;

use slab::Slab;

use super::Worker;
use super::conns::{Conn, ConnKey};
use super::fabrics::Fabric;
use super::listener::TcpListener;
use super::mail::Mail;
use crate::fabric::ConnRef;
use crate::iscsi::{Action, Phase};
use crate::pool::Owner;
use socket::Listener;

/// Sockets of a worker: those that listen, and what waits for the ring.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    listeners: Slab<Listener>,
    /// Connections that found no slot in the ring.
    stalled: Vec<ConnKey>,
    /// Bytes that may still be sent in calls of this round.
    at_once: usize,
}

impl Sockets {
    /// Addresses at which the worker listens now.
    pub(super) fn listening(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.listeners.iter().filter_map(|(_, l)| l.address())
    }

    /// Returns duplicates of the sockets that listen.
    pub(super) fn duplicate_listeners(&self) -> io::Result<Vec<TcpListener>> {
        let all = self.listeners.iter().map(|(_, l)| l.duplicate());
        all.filter_map(Result::transpose).collect()
    }
}

impl Worker {
    /// A connection is lost, and its commands are kept.
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
        // The initiator may not have noticed, as where only the way to it is broken.
        if let Some(other) = lost.reporter {
            let serial = other.serial;
            self.post_mail(other.worker, Mail::Lost { serial, cid });
        }
        self.terminate_all(lost.terminate);
    }

    /// Other connections may have the commands of one that is lost.
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

    /// A connection waits for pool memory: those that are lost keep none, and those that have more
    /// than their share are waited for less. RDMA waits for no initiator that long.
    pub(super) fn relieve_pool(&mut self) {
        let pool = &self.pool;
        let has_some = |conn: &Conn<Fabric>| match &conn.fabric {
            Fabric::Tcp(tcp) => match tcp.channel.channel().phase() {
                Phase::CleanupWait | Phase::Retaining => true,
                Phase::FullFeature => pool.is_owed_by(Owner(conn.serial())),
                _ => false,
            },
            _ => false,
        };
        for key in self.conns.keys(has_some) {
            self.with_tcp(key, |ch, cx| ch.channel_mut().handle_pressure(cx));
        }
    }

    /// Notifies a connection that it may have its session's next command.
    pub(super) fn give_turn(&mut self, ConnRef { worker, serial }: ConnRef) {
        self.post_mail(worker, Mail::TakeTurn { serial });
    }

    /// Ends the other connections of a connection's session; it is notified when they are gone.
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

    /// Carries out what a channel on TCP asks for, and sends what it has to send.
    pub(super) fn pump_tcp(&mut self, key: ConnKey) {
        while let Some(conn) = self.conns.tcp_mut(key) {
            let Some(action) = conn.channel.channel_mut().poll_action() else {
                break;
            };
            match action {
                Action::Task(action) => self.carry_out_task(key, action),
                Action::TakeTurn(conn) => self.give_turn(conn),
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
        // Sending comes first: while too much waits to be sent, the channel takes no input.
        self.send_next(key);
        self.read_on(key);
        self.receive_next(key);
    }
}
