//! iSCSI on a worker: its listening sockets, its connections, and what connects them to the ring.
//!
//! Every worker has a listening socket for every portal, which the server binds; the kernel deals new
//! connections out among them (`SO_REUSEPORT`). A connection has at most one receive and one send in the ring at a time. It is
//! closed in this order: the socket is shut down, both operations end, the channel lets go of its
//! tasks, the socket is closed.
//!
//! # Modules
//! - `gate`: who may log in. `sessions`: the sessions of all workers.
//! - `socket`: accepting, receiving, sending.
//!
//! # Bounds
//! Connections of a worker are bounded by twice the sessions and some for logins; further ones are
//! closed at once. Half of them may be logging in, a quarter from one address: beyond that the oldest
//! of them gives way. The ring has a slot for each operation of each connection, which block operations
//! do not take. A connection's memory is its receive buffer, its channel, and a batch of headers; before
//! it has logged in, these are a few KiB.

pub(super) mod gate;
pub(super) mod sessions;
mod socket;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::step::StepResult;
use slab::Slab;

use super::armed::Armed;
use super::exec::Owner;
use super::mail::{IscsiSession, Mail, SessionAccount};
use super::registry::ChannelRef;
use super::snapshot::accounts;
use super::{PATIENCE, Worker};
use crate::audit::Parting;
use crate::config::Protocol;
use crate::fabric::TaskIdx;
use crate::iscsi::{Action, Channel, Counters, Cx, Datamover, Member, Others, Phase, TcpChannel};
use crate::stats::Functions;
use gate::{Connected, Transport, WorkerGate, is_served};
use sessions::{Ending, Entered};
use socket::{Connection, Listener};

pub use sessions::IscsiSessions;
pub use socket::TcpListener;

/// Connections of a worker that serves this many sessions at most.
pub(super) const fn connections(sessions: u32) -> usize {
    2 * sessions as usize + 64
}

/// What a worker has of iSCSI.
#[derive(Debug, Default)]
pub(super) struct Iscsi {
    listeners: Slab<Listener>,
    conns: Slab<Conn>,
    /// Connections whose channel may want something.
    pub(super) dirty: VecDeque<usize>,
    /// Connections that found no slot in the ring.
    stalled: Vec<usize>,
    /// A connection has entered a session, which may have units that this worker has not heard of.
    has_entered: bool,
    past: Counters,
    past_functions: Functions,
}

/// A connection and its channel.
#[derive(Debug)]
struct Conn {
    channel: TcpChannel,
    connection: Connection,
    serial: u64,
    listen: SocketAddr,
    peer: SocketAddr,
    entered: Option<Entered>,
    armed: Armed,
    waits_for_pool: bool,
    /// The initiator was asked to log out.
    is_leaving: bool,
}

impl Iscsi {
    /// Whether there is no connection.
    pub(super) fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// Sums over all channels, those that are gone included.
    pub(super) fn counters(&self) -> Counters {
        self.conns.iter().fold(self.past, |mut sum, (_, conn)| {
            sum += conn.channel.channel().counters();
            sum
        })
    }

    /// Where it listens.
    pub(super) fn listening(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.listeners.iter().filter_map(|(_, l)| l.address())
    }

    /// The sockets that listen, once more.
    pub(super) fn duplicate_listeners(&self) -> io::Result<Vec<TcpListener>> {
        let all = self.listeners.iter().map(|(_, l)| l.duplicate());
        all.filter_map(Result::transpose).collect()
    }

    /// Functions of all channels, those that are gone included.
    pub(super) fn functions(&self) -> Functions {
        let mut sum = self.past_functions.clone();
        for (_, conn) in &self.conns {
            sum.merge(conn.channel.channel().functions());
        }
        sum
    }

    /// What the sessions have done at each unit.
    pub(super) fn accounts(&self) -> impl Iterator<Item = SessionAccount> + '_ {
        self.conns.iter().flat_map(|(_, conn)| {
            let channel = conn.channel.channel();
            let initiator = channel.initiator().unwrap_or_default();
            accounts(Protocol::Iscsi, initiator, channel.accounts())
        })
    }

    /// The sessions at present.
    pub(super) fn sessions(&self) -> impl Iterator<Item = IscsiSession> + '_ {
        self.conns.iter().filter_map(|(_, conn)| {
            let channel = conn.channel.channel();
            Some(IscsiSession {
                peer: conn.peer,
                is_rdma: false,
                memory: conn.connection.memory() + channel.memory(),
                info: channel.session_info()?,
            })
        })
    }

    fn by_serial(&self, serial: u64) -> Option<usize> {
        let found = self.conns.iter().find(|(_, conn)| conn.serial == serial);
        found.map(|(key, _)| key)
    }
}

impl Worker {
    /// Gives a channel an input, and remembers to carry out what it asks for.
    fn with_iscsi(&mut self, key: usize, input: impl FnOnce(&mut TcpChannel, &mut Cx<'_>)) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let mut ending = Vec::new();
        let was_entered = conn.entered.is_some();
        let mut gate = WorkerGate {
            shared: &self.shared,
            catalog: &self.catalog,
            now: self.now,
            transport: Transport::Tcp,
            listen: conn.listen,
            peer: conn.peer,
            channel: ChannelRef {
                worker: self.index,
                serial: conn.serial,
            },
            commands: conn.channel.channel().config().commands,
            entered: &mut conn.entered,
            ending: &mut ending,
            audit: &mut self.audit,
            logins: &mut self.logins,
            rejects: &mut self.rejects,
            detail: None,
        };
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            gate: &mut gate,
        };
        input(&mut conn.channel, &mut cx);
        self.iscsi.has_entered |= !was_entered && conn.entered.is_some();
        self.iscsi.dirty.push_back(key);
        self.end_all(ending);
    }

    /// Ends connections, of whichever worker.
    pub(super) fn end_all(&mut self, channels: Vec<(ChannelRef, Ending)>) {
        for (channel, how) in channels {
            let serial = channel.serial;
            let mail = match how {
                Ending::Terminate => Mail::Terminate { serial },
                Ending::Detach => Mail::Detach { serial },
            };
            self.post_mail(channel.worker, mail);
        }
    }

    /// Ends connections for good, of whichever worker.
    pub(super) fn terminate_all(&mut self, channels: Vec<ChannelRef>) {
        let all = channels.into_iter().map(|c| (c, Ending::Terminate));
        self.end_all(all.collect());
    }

    /// A connection is lost, and its commands are kept.
    fn lose_iscsi(&mut self, key: usize) {
        let conn = &self.iscsi.conns[key];
        let (Some(entered), cid) = (&conn.entered, conn.channel.channel().cid()) else {
            return;
        };
        let channel = self.channel_ref(conn.serial);
        let lost = self.shared.iscsi.lose(entered.tsih, channel);
        tracing::info!(
            peer = %conn.peer, initiator = %entered.initiator, cid = cid.0, "connection lost"
        );
        if let Some(other) = lost.tell {
            let serial = other.serial;
            self.post_mail(other.worker, Mail::Lost { serial, cid });
        }
        self.terminate_all(lost.terminate);
    }

    /// Other connections may have the commands of one that is lost.
    fn detach_iscsi(&mut self, key: usize) {
        let conn = &self.iscsi.conns[key];
        let Some(entered) = &conn.entered else {
            return;
        };
        let channel = self.channel_ref(conn.serial);
        let detached = self.shared.iscsi.detached(entered.tsih, channel);
        self.notify_waiting(detached.notify);
        self.terminate_all(detached.terminate);
    }

    /// Connections wait for nobody any more.
    fn notify_waiting(&mut self, waiting: Vec<ChannelRef>) {
        for waiting in waiting {
            let serial = waiting.serial;
            self.post_mail(waiting.worker, Mail::OthersGone { serial });
        }
    }

    /// Somebody waits for pool memory: connections that are lost keep none.
    pub(super) fn relieve_pool(&mut self) {
        let is_lost = |conn: &Conn| {
            matches!(
                conn.channel.channel().phase(),
                Phase::CleanupWait | Phase::Retaining
            )
        };
        let conns = self.iscsi.conns.iter().filter(|(_, conn)| is_lost(conn));
        let lost: Vec<usize> = conns.map(|(key, _)| key).collect();
        for key in lost {
            self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_pressure(cx));
        }
    }

    /// Tells a connection that it may have its session's next command.
    pub(super) fn give_turn(&mut self, member: Member) {
        let serial = member.channel;
        self.post_mail(member.worker, Mail::TakeTurn { serial });
    }

    /// Ends other connections of a connection's session; it is told when they are gone.
    pub(super) fn end_others(&mut self, entered: Option<&Entered>, serial: u64, others: Others) {
        let channel = self.channel_ref(serial);
        let sessions = &self.shared.iscsi;
        let ending = entered.map_or_else(Vec::new, |entered| {
            sessions.end_others(entered.tsih, channel, others)
        });
        if ending.is_empty() {
            self.post_mail(self.index, Mail::OthersGone { serial });
        }
        self.terminate_all(ending);
    }

    /// Gives connections the units that their sessions may use now, and asks those to log out whose
    /// portal is gone.
    pub(super) fn follow_iscsi(&mut self) {
        // Once more, for sessions that have been entered by the old catalog meanwhile.
        let catalog = Arc::clone(&self.catalog);
        let until = self.now + PATIENCE;
        for channel in self.shared.iscsi.change(&catalog) {
            let serial = channel.serial;
            self.post_mail(channel.worker, Mail::LogOut { serial, until });
        }
        let sessions = &self.shared.iscsi;
        let mut ended = Vec::new();
        for (key, conn) in &mut self.iscsi.conns {
            let luns = conn.entered.as_ref().and_then(|e| sessions.luns(e.tsih));
            if let Some(luns) = luns {
                conn.channel.channel_mut().handle_luns(luns);
            }
            if !is_served(&catalog, Transport::Tcp, conn.listen, conn.entered.as_ref()) {
                ended.push(key);
            }
        }
        let all: Vec<_> = self.iscsi.conns.iter().map(|(key, _)| key).collect();
        for key in all {
            self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_limits(cx));
        }
        for key in ended {
            self.log_out_iscsi(key, until);
        }
        self.drain_dirty();
    }

    /// Asks an initiator to log out, once; the connection is cut at `until`.
    fn log_out_iscsi(&mut self, key: usize, until: Instant) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        if !std::mem::replace(&mut conn.is_leaving, true) {
            self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_shutdown(cx, until));
        }
    }

    /// Carries out what a channel asks for, and sends what it has to send.
    pub(super) fn pump_iscsi(&mut self, key: usize) {
        if std::mem::take(&mut self.iscsi.has_entered) {
            self.follow_catalog();
        }
        while let Some(conn) = self.iscsi.conns.get_mut(key) {
            let Some(action) = conn.channel.channel_mut().poll_action() else {
                break;
            };
            match action {
                Action::Task(action) => {
                    self.carry_out_task(action, |task| Owner::Iscsi(key, task));
                }
                Action::TakeTurn(member) => self.give_turn(member),
                Action::EndOthers(others) => {
                    let (entered, serial) = (conn.entered.clone(), conn.serial);
                    self.end_others(entered.as_ref(), serial, others);
                }
                Action::Lost => self.lose_iscsi(key),
                Action::Detached => self.detach_iscsi(key),
                Action::TakeOver(take_over) => {
                    self.post_mail(take_over.task.worker, Mail::TakeOver(take_over));
                }
                Action::HandOver => {
                    let (to, parcel) = conn.channel.channel_mut().take_parcel();
                    self.post_mail(to.worker, Mail::Parcel { to, parcel });
                }
                Action::Disconnect => self.shut_down_socket(key),
                Action::Release => return self.release_iscsi(key),
            }
        }
        self.send_next(key);
        self.read_on(key);
        self.receive_next(key);
        self.arm_iscsi(key);
    }

    fn arm_iscsi(&mut self, key: usize) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let channel = conn.channel.channel();
        if let Some(at) = channel.deadline()
            && conn.armed.set(at)
        {
            self.timers.push(std::cmp::Reverse((at, conn.serial)));
        }
        let has_waited = std::mem::replace(&mut conn.waits_for_pool, channel.waits_for_pool());
        if conn.waits_for_pool && !has_waited {
            self.relieve_pool();
        }
    }

    /// The channel holds nothing any more.
    fn release_iscsi(&mut self, key: usize) {
        let conn = self.iscsi.conns.remove(key);
        self.iscsi.past += conn.channel.channel().counters();
        let functions = conn.channel.channel().functions();
        self.iscsi.past_functions.merge(functions);
        if let Some(entered) = &conn.entered {
            let place = Connected {
                transport: Transport::Tcp,
                listen: conn.listen,
                peer: conn.peer,
            };
            self.leave_iscsi(conn.channel.channel(), entered, conn.serial, place);
        }
    }

    /// A connection of a session is gone.
    pub(super) fn leave_iscsi<M: Datamover>(
        &mut self,
        channel: &Channel<M>,
        entered: &Entered,
        serial: u64,
        place: Connected,
    ) {
        channel.accounts().keep(entered.initiator.as_str());
        let sessions = &self.shared.iscsi;
        let channel_ref = self.channel_ref(serial);
        // An initiator that was asked to log out logs in again.
        let again = (channel.end() != Parting::Logout).then_some(self.now);
        let logged_out = channel.has_logged_out();
        let left = sessions.leave(entered.tsih, channel_ref, logged_out, again);
        if let Some(address) = left.ended {
            self.shared.registry.close_nexus(address);
        }
        let who = place.who(&self.catalog, entered);
        self.audit.end(self.now, &who, channel.end());
        self.notify_waiting(left.notify);
        self.terminate_all(left.terminate);
    }

    fn channel_ref(&self, serial: u64) -> ChannelRef {
        ChannelRef {
            worker: self.index,
            serial,
        }
    }

    /// Block operations of a connection, for the driver.
    pub(super) fn iscsi_slices(
        &self,
        key: usize,
        task: TaskIdx,
        out: &mut Vec<riser_memory::MemSlice>,
    ) -> bool {
        let Some(conn) = self.iscsi.conns.get(key) else {
            return false;
        };
        out.extend(conn.channel.channel().block_slices(task, 0..u32::MAX));
        true
    }

    pub(super) fn on_iscsi_block(&mut self, key: usize, task: TaskIdx, result: StepResult) {
        self.with_iscsi(key, |ch, cx| {
            ch.channel_mut().handle_block_done(cx, task, result);
        });
    }

    /// Mail about a channel that is no SRP channel; whether there is an iSCSI channel for it.
    pub(super) fn handle_iscsi_mail(&mut self, serial: u64, mail: &mut Mail) -> bool {
        let Some(key) = self.iscsi.by_serial(serial) else {
            return false;
        };
        if let Mail::LogOut { until, .. } = mail {
            self.log_out_iscsi(key, *until);
            return true;
        }
        self.with_iscsi(key, |ch, cx| {
            if let Mail::OthersGone { .. } = mail {
                return ch.handle_others_gone(cx);
            }
            let channel = ch.channel_mut();
            if let Mail::Parcel { to, parcel } = mail {
                return channel.handle_parcel(cx, *to, parcel.take());
            }
            match *mail {
                Mail::TakeTurn { .. } => channel.handle_turn(cx),
                Mail::Detach { .. } => channel.handle_detach(cx),
                Mail::Lost { cid, .. } => channel.handle_lost(cx, cid),
                Mail::TakeOver(take_over) => channel.handle_take_over(cx, take_over),
                Mail::StartTask(task) => channel.handle_task_start(cx, task),
                Mail::AbortTask { task, watcher } => channel.handle_abort(cx, task, watcher),
                Mail::TaskGone(watcher) => channel.handle_task_gone(cx, watcher),
                Mail::Terminate { .. } => channel.handle_terminate(cx),
                _ => {}
            }
        });
        true
    }

    pub(super) fn on_iscsi_timer(&mut self, serial: u64, at: Instant) {
        if let Some(key) = self.iscsi.by_serial(serial)
            && self.iscsi.conns[key].armed.fire(at)
        {
            self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_timeout(cx));
        }
    }

    /// A connection may get the pool memory that its commands wait for.
    pub(super) fn resume_iscsi(&mut self, serial: u64) {
        if let Some(key) = self.iscsi.by_serial(serial) {
            self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_pool(cx));
        }
    }

    /// Stops listening, and asks initiators to log out.
    pub(super) fn begin_iscsi_shutdown(&mut self, until: Instant) {
        self.stop_listening(|_| true);
        for key in self.iscsi_keys() {
            self.log_out_iscsi(key, until);
        }
    }

    /// Drops everything without logouts: the ring is closed next, and with it the sockets.
    pub(super) fn abandon_iscsi(&mut self) {
        for (_, conn) in &mut self.iscsi.conns {
            conn.channel.channel_mut().abandon(&mut self.pool);
        }
    }

    /// Cuts all connections.
    pub(super) fn end_iscsi(&mut self) {
        for key in self.iscsi_keys() {
            if self.iscsi.conns[key].channel.channel().phase() != Phase::Closed {
                self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_terminate(cx));
            }
        }
    }

    fn iscsi_keys(&self) -> Vec<usize> {
        self.iscsi.conns.iter().map(|(key, _)| key).collect()
    }
}
