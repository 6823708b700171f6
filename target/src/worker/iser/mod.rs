//! iSER on a worker: connections that the CM brings, and what connects them to queue pairs.
//!
//! A request for a connection says in its private data what the initiator offers; the login itself
//! comes over the connection. So a connection exists before anybody knows whose it is: their number is
//! bounded like that of TCP connections. So is that of those which are not established, and that of those
//! which have not logged in: the oldest give way, and one of the latter never for one of the former, whose
//! request may be forged. Who may log in is decided by the gate of iSCSI: one target serves the same units
//! over both.
//!
//! # Modules
//! - `connect`: requests, queue pairs, the end.

mod connect;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::step::StepResult;
use riser_transport::verbs::{CmId, Completion, RKey, SendFlags, SendOp};
use slab::Slab;

use super::armed::Armed;
use super::exec::{Owner, Work};
use super::iscsi::gate::{Transport, WorkerGate, is_served};
use super::iscsi::sessions::Entered;
use super::mail::{IscsiSession, Mail, SessionAccount};
use super::queue::{ChainSend, Receive};
use super::registry::ChannelRef;
use super::session::Hardware;
use super::snapshot::accounts;
use super::unconfirmed::Unconfirmed;
use super::{PATIENCE, Worker};
use crate::config::Protocol;
use crate::fabric::TaskIdx;
use crate::iscsi::{Action, Channel, Counters, Cx, Phase};
use crate::iser::{ChainIdx, ConnState, IserAction, IserChannel, Post, RxIdx};
use crate::stats::Functions;

/// What a worker has of iSER.
#[derive(Debug, Default)]
pub(super) struct Isers {
    conns: Slab<Conn>,
    /// Connections whose channel may want something.
    pub(super) dirty: VecDeque<usize>,
    past: Counters,
    past_functions: Functions,
    post: Post,
    receives: Vec<Receive>,
}

/// A connection and its channel.
#[derive(Debug)]
struct Conn {
    channel: IserChannel,
    serial: u64,
    device: usize,
    cm: CmId,
    hardware: Hardware,
    listen: SocketAddr,
    peer: SocketAddr,
    entered: Option<Entered>,
    armed: Armed,
    waits_for_pool: bool,
    /// Whether its completion queue is in the worker's list.
    is_ready: bool,
    /// The CM has said that the connection is over.
    is_closed: bool,
    /// It was established: there is a peer that may answer a goodbye.
    was_established: bool,
    /// The initiator was asked to log out.
    is_leaving: bool,
}

impl Isers {
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
            accounts(Protocol::Iser, initiator, channel.accounts())
        })
    }

    /// The sessions at present.
    pub(super) fn sessions(&self) -> impl Iterator<Item = IscsiSession> + '_ {
        self.conns.iter().filter_map(|(_, conn)| {
            Some(IscsiSession {
                peer: conn.peer,
                is_rdma: true,
                memory: conn.channel.params().memory().total(),
                info: conn.channel.channel().session_info()?,
            })
        })
    }

    /// Whether a connection is on a device.
    pub(super) fn uses(&self, device: usize) -> bool {
        self.conns.iter().any(|(_, conn)| conn.device == device)
    }

    /// The device and the completion queue of a connection that still polls; it is no longer marked
    /// as ready.
    pub(super) fn take_ready(
        &mut self,
        key: usize,
    ) -> Option<(usize, riser_transport::verbs::CqId, u64)> {
        let conn = self.conns.get_mut(key)?;
        conn.is_ready = false;
        Some((conn.device, conn.hardware.cq, conn.serial))
    }

    /// Marks a connection as ready; whether it was not.
    pub(super) fn mark_ready(&mut self, key: usize) -> bool {
        let conn = self.conns.get_mut(key);
        conn.is_some_and(|conn| !std::mem::replace(&mut conn.is_ready, true))
    }

    /// Whether the connection at a place is still the one with a number.
    pub(super) fn is_same(&self, key: usize, serial: u64) -> bool {
        self.conns
            .get(key)
            .is_some_and(|conn| conn.serial == serial)
    }

    /// The connection with a queue pair.
    pub(super) fn with_qp(&self, device: usize, qp: riser_transport::verbs::QpId) -> Option<usize> {
        let mut conns = self.conns.iter();
        let found = conns.find(|(_, c)| c.device == device && c.hardware.qp == qp);
        found.map(|(key, _)| key)
    }

    fn by_serial(&self, serial: u64) -> Option<usize> {
        let found = self.conns.iter().find(|(_, conn)| conn.serial == serial);
        found.map(|(key, _)| key)
    }

    /// The connections in some of the states before a login, the oldest first.
    fn in_state(&self, states: &[ConnState]) -> Vec<Unconfirmed<usize>> {
        let is_meant = |conn: &Conn| states.contains(&conn.channel.state());
        let mut all: Vec<_> = self.conns.iter().filter(|(_, c)| is_meant(c)).collect();
        all.sort_unstable_by_key(|(_, conn)| conn.serial);
        let of = |(what, conn): (usize, &Conn)| Unconfirmed {
            address: conn.peer.ip().to_canonical(),
            what,
        };
        all.into_iter().map(of).collect()
    }

    fn keys(&self) -> Vec<usize> {
        self.conns.iter().map(|(key, _)| key).collect()
    }
}

impl Worker {
    /// Gives a connection an input, and remembers to carry out what it asks for.
    pub(super) fn with_iser(
        &mut self,
        key: usize,
        input: impl FnOnce(&mut IserChannel, &mut Cx<'_>),
    ) {
        let Some(conn) = self.isers.conns.get_mut(key) else {
            return;
        };
        let mut ending = Vec::new();
        let mut gate = WorkerGate {
            shared: &self.shared,
            catalog: &self.catalog,
            now: self.now,
            transport: Transport::Iser,
            audit: &mut self.audit,
            logins: &mut self.logins,
            rejects: &mut self.rejects,
            detail: None,
            listen: conn.listen,
            peer: conn.peer,
            channel: ChannelRef {
                worker: self.index,
                serial: conn.serial,
            },
            commands: conn.channel.params().commands,
            entered: &mut conn.entered,
            ending: &mut ending,
        };
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            gate: &mut gate,
        };
        input(&mut conn.channel, &mut cx);
        self.isers.dirty.push_back(key);
        self.end_all(ending);
    }

    /// Carries out what a connection asks for, and posts what it has to post.
    pub(super) fn pump_iser(&mut self, key: usize) {
        let mut released = false;
        let mut receives = std::mem::take(&mut self.isers.receives);
        while let Some(conn) = self.isers.conns.get_mut(key) {
            let Some(action) = conn.channel.poll_action() else {
                break;
            };
            match action {
                IserAction::PostRecv(rx) => {
                    let slot = conn.channel.receive_slot(rx);
                    receives.push((Work::IserRecv(rx).id(), slot));
                }
                IserAction::NotifyEstablished => {
                    let dev = &mut self.devices[conn.device];
                    // The message may have arrived meanwhile; then there is nothing to tell.
                    let _ = dev.notify_established(conn.cm);
                }
                IserAction::Disconnect => {
                    let (device, cm, qp) = (conn.device, conn.cm, conn.hardware.qp);
                    if !self.cut(device, cm, qp) {
                        self.with_iser(key, IserChannel::handle_drained);
                    }
                }
                IserAction::Release => released = true,
                IserAction::Channel(action) => self.carry_out_iser(key, action),
            }
        }
        self.post_iser_receives(key, &mut receives);
        self.isers.receives = receives;
        if released {
            return self.release_iser(key);
        }
        self.post_iser_chains(key);
        self.arm_iser(key);
    }

    fn carry_out_iser(&mut self, key: usize, action: Action) {
        match action {
            Action::Task(action) => {
                self.carry_out_task(action, |task| Owner::Iser(key, task));
            }
            Action::TakeTurn(member) => self.give_turn(member),
            Action::EndOthers(others) => {
                let conn = &self.isers.conns[key];
                let (entered, serial) = (conn.entered.clone(), conn.serial);
                self.end_others(entered.as_ref(), serial, others);
            }
            Action::Disconnect | Action::Release => {
                unreachable!("the connection keeps these for itself")
            }
            Action::Lost | Action::Detached | Action::TakeOver(_) | Action::HandOver => {
                unreachable!("error recovery level 0")
            }
        }
    }

    fn post_iser_receives(&mut self, key: usize, receives: &mut Vec<Receive>) {
        let Some(conn) = self.isers.conns.get(key).filter(|_| !receives.is_empty()) else {
            return;
        };
        let (device, qp, lkey) = (conn.device, conn.hardware.qp, conn.hardware.receive_key);
        let taken = self.post_recvs(device, qp, lkey, receives);
        for (id, _) in receives.drain(..).skip(taken) {
            if let Work::IserRecv(rx) = Work::of(id) {
                self.with_iser(key, |conn, cx| conn.handle_recv_flushed(cx, rx));
            }
        }
    }

    /// Posts chains as far as there is room for them.
    fn post_iser_chains(&mut self, key: usize) {
        let mut post = std::mem::take(&mut self.isers.post);
        while let Some(conn) = self.isers.conns.get_mut(key) {
            if !conn.channel.poll_post(&mut post) {
                break;
            }
            let (pool, lkey) = (self.pool.memory(), conn.hardware.pool_key);
            let built = self.chain.build(post.requests.drain(..), pool, lkey);
            let send = post.send.take().map(|send| ChainSend {
                bytes: send.bytes,
                lkey: conn.hardware.send_key,
                op: match send.invalidate {
                    Some(stag) => SendOp::SendInv(RKey(stag.0)),
                    None => SendOp::Send,
                },
                flags: SendFlags::SOLICITED,
            });
            let (qp, id) = (conn.hardware.qp, Work::IserPost(post.chain).id());
            let is_posted = match built {
                Ok(()) => self
                    .chain
                    .post(&mut self.devices[conn.device], qp, id, send.as_ref()),
                Err(error) => {
                    tracing::debug!(%error, "a descriptor names no memory");
                    false
                }
            };
            if !is_posted {
                let idx = post.chain;
                self.with_iser(key, |conn, cx| conn.handle_post_done(cx, idx, false));
            }
        }
        self.isers.post = post;
    }

    /// A completion of a connection's queue.
    pub(super) fn on_iser_completion(&mut self, key: usize, completion: &Completion) {
        let ok = completion.status.is_ok();
        let work = Work::of(completion.wr_id);
        if !ok && let Some(conn) = self.isers.conns.get(key) {
            tracing::debug!(
                peer = %conn.peer, status = ?completion.status, ?work, "work failed"
            );
        }
        match work {
            Work::IserRecv(rx) if ok => self.on_iser_message(key, rx, completion.byte_len as usize),
            Work::IserRecv(rx) => self.with_iser(key, |conn, cx| conn.handle_recv_flushed(cx, rx)),
            Work::IserPost(chain) => self.on_iser_posted(key, chain, ok),
            Work::Drain => self.with_iser(key, IserChannel::handle_drained),
            // One before the last of its chain, which fails as well.
            _ => self.with_iser(key, IserChannel::handle_disconnected),
        }
    }

    fn on_iser_posted(&mut self, key: usize, chain: ChainIdx, ok: bool) {
        self.with_iser(key, |conn, cx| conn.handle_post_done(cx, chain, ok));
    }

    fn on_iser_message(&mut self, key: usize, rx: RxIdx, len: usize) {
        let Some(conn) = self.isers.conns.get(key) else {
            return;
        };
        let slot = conn.channel.receive_slot(rx);
        self.with_received(&slot, len, |worker, bytes| {
            worker.with_iser(key, |conn, cx| conn.handle_recv(cx, rx, bytes));
        });
    }

    fn arm_iser(&mut self, key: usize) {
        let Some(conn) = self.isers.conns.get_mut(key) else {
            return;
        };
        let channel = conn.channel.channel();
        if let Some(at) = conn.channel.deadline()
            && conn.armed.set(at)
        {
            self.timers.push(std::cmp::Reverse((at, conn.serial)));
        }
        let has_waited = std::mem::replace(&mut conn.waits_for_pool, channel.waits_for_pool());
        if conn.waits_for_pool && !has_waited {
            self.relieve_pool();
        }
    }

    /// The data buffer of a task, for the driver; whether the connection is there.
    pub(super) fn iser_slices(
        &self,
        key: usize,
        task: TaskIdx,
        out: &mut Vec<riser_memory::MemSlice>,
    ) -> bool {
        let Some(conn) = self.isers.conns.get(key) else {
            return false;
        };
        out.extend(conn.channel.channel().block_slices(task, 0..u32::MAX));
        true
    }

    pub(super) fn on_iser_block(&mut self, key: usize, task: TaskIdx, result: StepResult) {
        self.with_iser(key, |conn, cx| {
            conn.input(cx, |ch, cx| ch.handle_block_done(cx, task, result));
        });
    }

    /// Mail about a channel; whether it is one of iSER.
    pub(super) fn handle_iser_mail(&mut self, serial: u64, mail: &Mail) -> bool {
        let Some(key) = self.isers.by_serial(serial) else {
            return false;
        };
        if let Mail::LogOut { until, .. } = mail {
            self.log_out_iser(key, *until);
            return true;
        }
        self.with_iser(key, |conn, cx| {
            match mail {
                Mail::OthersGone { .. } => return conn.handle_others_gone(cx),
                Mail::Terminate { .. } => return conn.handle_terminate(cx),
                _ => {}
            }
            conn.input(cx, |channel, cx| match *mail {
                Mail::StartTask(task) => channel.handle_task_start(cx, task),
                Mail::AbortTask { task, watcher } => channel.handle_abort(cx, task, watcher),
                Mail::TaskGone(watcher) => channel.handle_task_gone(cx, watcher),
                Mail::TakeTurn { .. } => channel.handle_turn(cx),
                _ => {}
            });
        });
        true
    }

    pub(super) fn on_iser_timer(&mut self, serial: u64, at: Instant) {
        if let Some(key) = self.isers.by_serial(serial)
            && self.isers.conns[key].armed.fire(at)
        {
            self.with_iser(key, |conn, cx| {
                conn.input(cx, Channel::handle_timeout);
            });
        }
    }

    /// Gives connections the units that their sessions may use now, and asks those to log out whose
    /// portal is gone.
    pub(super) fn follow_iser(&mut self) {
        let catalog = Arc::clone(&self.catalog);
        let until = self.now + PATIENCE;
        let sessions = &self.shared.iscsi;
        let mut ended = Vec::new();
        for (key, conn) in &mut self.isers.conns {
            let luns = conn.entered.as_ref().and_then(|e| sessions.luns(e.tsih));
            if let Some(luns) = luns {
                conn.channel.handle_luns(luns);
            }
            let entered = conn.entered.as_ref();
            if !is_served(&catalog, Transport::Iser, conn.listen, entered) {
                ended.push(key);
            }
        }
        let all: Vec<_> = self.isers.conns.iter().map(|(key, _)| key).collect();
        for key in all {
            self.with_iser(key, |conn, cx| conn.input(cx, Channel::handle_limits));
        }
        for key in ended {
            self.log_out_iser(key, until);
        }
        self.drain_dirty();
    }

    /// Asks an initiator to log out, once; the connection is cut at `until`.
    fn log_out_iser(&mut self, key: usize, until: Instant) {
        let Some(conn) = self.isers.conns.get_mut(key) else {
            return;
        };
        if !std::mem::replace(&mut conn.is_leaving, true) {
            self.with_iser(key, |conn, cx| {
                conn.input(cx, |ch, cx| ch.handle_shutdown(cx, until));
            });
        }
    }

    /// A connection may get the pool memory that its commands wait for.
    pub(super) fn resume_iser(&mut self, serial: u64) {
        if let Some(key) = self.isers.by_serial(serial) {
            self.with_iser(key, |conn, cx| conn.input(cx, Channel::handle_pool));
        }
    }

    /// Asks initiators to log out.
    pub(super) fn begin_iser_shutdown(&mut self, until: Instant) {
        for key in self.isers.keys() {
            self.log_out_iser(key, until);
        }
    }

    /// Cuts all connections.
    pub(super) fn end_iser(&mut self) {
        for key in self.isers.keys() {
            if self.isers.conns[key].channel.channel().phase() != Phase::Closed {
                self.with_iser(key, IserChannel::handle_disconnected);
            }
        }
    }

    /// Ends the connections of a device that is gone.
    pub(super) fn remove_isers(&mut self, device: usize) {
        for key in self.isers.keys() {
            if self.isers.conns[key].device == device {
                self.isers.conns[key].is_closed = true;
                self.with_iser(key, IserChannel::handle_device_gone);
            }
        }
    }

    /// Ends everything without a word: the devices are gone.
    pub(super) fn abandon_isers(&mut self) {
        for (_, conn) in &mut self.isers.conns {
            conn.channel.abandon(&mut self.pool);
        }
    }
}
