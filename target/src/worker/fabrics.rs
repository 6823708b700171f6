//! Connections of all fabrics. This is the only module that handles all three of them.
//!
//! All inputs passed to a connection by its worker or via mail are defined in [`Input`]. The
//! function [`Input::apply`] defines how each fabric handles them. Inputs for a single fabric only,
//! such as received bytes or completions, are passed by the modules `tcp`, `srp` and `iser`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::attention::Attention;
use riser_scsi::iscsi::Cid;
use riser_scsi::step::StepResult;

use super::PollGroup;
use super::conns::{Conn, ConnKey, Connection, Conns};
use super::gate::{Transport, WorkerGate};
use super::mail::Mail;
use super::queue::Receive;
use super::rdma::RdmaLink;
use super::stream::Stream;
use crate::audit::CloseReason;
use crate::config::Protocol;
use crate::fabric::{Accounts, ConnRef, LunMap, Spare, TaskIdx, TaskRef, UnitIdx};
use crate::iscsi::{
    self, Channel, Datamover, Phase, ReassignRequest, ReassignedTask, SpareTasks, TcpChannel,
};
use crate::iser::{IserAction, IserChannel};
use crate::pool::{Buffer, Owner, Pool};
use crate::sessions::catalog::Entrance;
use crate::sessions::guard::SessionGuard;
use crate::sessions::iscsi::Membership;
use crate::sessions::nexus::NexusKey;
use crate::srp;
use crate::stats::Functions;

/// Unused command contexts for each type of connection.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    pub(crate) srp: Spare<srp::SendIoctx>,
    pub(crate) iscsi: SpareTasks,
}

impl Spares {
    /// Returns the memory used, in bytes.
    pub(super) fn memory(&self) -> usize {
        self.srp.memory() + self.iscsi.memory()
    }
}

/// Connection for one of the fabrics. This is boxed because the sizes are different.
#[derive(Debug)]
pub(super) enum Fabric {
    Srp(Box<SrpConn>),
    Tcp(Box<TcpConn>),
    Iser(Box<IserConn>),
}

/// SRP channel and its queue pair.
#[derive(Debug)]
pub(super) struct SrpConn {
    pub(super) channel: srp::Channel,
    pub(super) key: NexusKey,
    /// Membership in the session of the nexus.
    pub(super) guard: SessionGuard,
    /// Listener that received the connect request.
    pub(super) entrance: Entrance,
    pub(super) rdma: RdmaLink,
}

/// iSCSI connection over TCP.
#[derive(Debug)]
pub(super) struct TcpConn {
    pub(super) channel: TcpChannel,
    pub(super) socket: Stream,
    pub(super) login: Login,
}

/// iSCSI connection over RDMA.
#[derive(Debug)]
pub(super) struct IserConn {
    pub(super) channel: IserChannel,
    pub(super) rdma: RdmaLink,
    pub(super) login: Login,
}

/// Portal of an iSCSI connection, and its session after login.
#[derive(Debug)]
pub(super) struct Login {
    pub(super) listen: SocketAddr,
    pub(super) membership: Option<Membership>,
}

impl Login {
    /// Creates the state for a connection before login.
    pub(super) fn at(listen: SocketAddr) -> Self {
        Self {
            listen,
            membership: None,
        }
    }
}

impl Connection for Fabric {
    fn rdma(&self) -> Option<&RdmaLink> {
        match self {
            Self::Srp(conn) => Some(&conn.rdma),
            Self::Tcp(_) => None,
            Self::Iser(conn) => Some(&conn.rdma),
        }
    }

    fn rdma_mut(&mut self) -> Option<&mut RdmaLink> {
        match self {
            Self::Srp(conn) => Some(&mut conn.rdma),
            Self::Tcp(_) => None,
            Self::Iser(conn) => Some(&mut conn.rdma),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Srp(conn) => conn.channel.deadline(),
            Self::Tcp(conn) => conn.channel.channel().deadline(),
            Self::Iser(conn) => conn.channel.deadline(),
        }
    }

    fn pool_waits_begun(&self) -> u64 {
        match self {
            Self::Srp(conn) => conn.channel.pool_waits_begun(),
            Self::Tcp(conn) => conn.channel.channel().executor().pool_waits_begun(),
            Self::Iser(conn) => conn.channel.channel().executor().pool_waits_begun(),
        }
    }
}

impl Fabric {
    pub(super) fn protocol(&self) -> Protocol {
        match self {
            Self::Srp(_) => Protocol::Srp,
            Self::Tcp(_) => Protocol::Iscsi,
            Self::Iser(_) => Protocol::Iser,
        }
    }

    /// Returns the transport and login state of an iSCSI connection.
    pub(super) fn login(&self) -> Option<(Transport, &Login)> {
        match self {
            Self::Srp(_) => None,
            Self::Tcp(conn) => Some((Transport::Tcp, &conn.login)),
            Self::Iser(conn) => Some((Transport::Iser, &conn.login)),
        }
    }

    /// Returns the session membership if there is a session.
    pub(super) fn into_guard(self) -> Option<SessionGuard> {
        let login = match self {
            Self::Srp(conn) => return Some(conn.guard),
            Self::Tcp(conn) => conn.login,
            Self::Iser(conn) => conn.login,
        };
        login.membership.map(|membership| membership.guard)
    }

    /// Returns the reason for closing the connection, and if the initiator has logged out before.
    pub(super) fn close_reason(&self) -> (CloseReason, bool) {
        match self {
            Self::Srp(conn) => (conn.channel.close_reason(), false),
            Self::Tcp(conn) => close_reason_of(conn.channel.channel()),
            Self::Iser(conn) => close_reason_of(conn.channel.channel()),
        }
    }

    /// Returns the receives to post before a new connection is accepted.
    ///
    /// # Panics
    /// Panics if there are other actions, which are only possible after the first input.
    pub(super) fn take_first_receives(&mut self) -> Vec<Receive> {
        match self {
            Self::Srp(conn) => {
                let actions = std::iter::from_fn(|| conn.channel.poll_action());
                // Collect them first, because we need to borrow the channel to get the slots.
                let actions: Vec<_> = actions.collect();
                let receive = |action| match action {
                    srp::Action::PostRecv(recv) => conn.receive(recv),
                    other => unreachable!("{other:?} before the first input"),
                };
                actions.into_iter().map(receive).collect()
            }
            Self::Tcp(_) => Vec::new(),
            Self::Iser(conn) => {
                let actions = std::iter::from_fn(|| conn.channel.poll_action());
                let actions: Vec<_> = actions.collect();
                let receive = |action| match action {
                    IserAction::PostRecv(rx) => conn.receive(rx),
                    other => unreachable!("{other:?} before the first input"),
                };
                actions.into_iter().map(receive).collect()
            }
        }
    }

    /// Returns the data buffer of a task for a block operation, if it needs one.
    #[inline]
    pub(super) fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        match self {
            Self::Srp(conn) => conn.channel.requests().data_buffer(task),
            Self::Tcp(conn) => conn.channel.channel().executor().data_buffer(task),
            Self::Iser(conn) => conn.channel.channel().executor().data_buffer(task),
        }
    }

    /// Called when the initiator has closed the connection.
    pub(super) fn note_closed(&mut self) {
        match self {
            Self::Srp(conn) => conn.channel.note_closed(),
            Self::Tcp(conn) => conn.channel.channel_mut().note_closed(),
            Self::Iser(conn) => conn.channel.note_closed(),
        }
    }

    /// Aborts everything immediately. The devices are already closed, and the ring will be closed
    /// next.
    pub(super) fn abandon(&mut self, pool: &mut Pool) {
        match self {
            Self::Srp(conn) => conn.channel.abandon(pool),
            Self::Tcp(conn) => conn.channel.channel_mut().abandon(pool),
            Self::Iser(conn) => conn.channel.abandon(pool),
        }
    }

    /// Returns the number of task-management functions by response.
    pub(super) fn functions(&self) -> &Functions {
        match self {
            Self::Srp(conn) => &conn.channel.stats().functions,
            Self::Tcp(conn) => &conn.channel.channel().executor().stats().functions,
            Self::Iser(conn) => &conn.channel.channel().executor().stats().functions,
        }
    }

    /// Returns the initiator name, and the statistics of its session for each unit.
    pub(super) fn accounts(&self) -> (String, &Accounts) {
        match self {
            Self::Srp(conn) => (
                conn.key.initiator.to_string(),
                &conn.channel.stats().accounts,
            ),
            Self::Tcp(conn) => accounts_of(conn.channel.channel()),
            Self::Iser(conn) => accounts_of(conn.channel.channel()),
        }
    }
}

fn close_reason_of<M: Datamover>(channel: &Channel<M>) -> (CloseReason, bool) {
    (channel.close_reason(), channel.has_logged_out())
}

fn accounts_of<M: Datamover>(channel: &Channel<M>) -> (String, &Accounts) {
    let initiator = channel.initiator().unwrap_or_default();
    (initiator, &channel.executor().stats().accounts)
}

/// Channel with its context for a call.
pub(crate) enum Machine<'a, 'b> {
    Srp(&'a mut srp::Channel, &'a mut srp::Cx<'b>),
    Tcp(&'a mut TcpChannel, &'a mut iscsi::Cx<'b>),
    Iser(&'a mut IserChannel, &'a mut iscsi::Cx<'b>),
}

/// Input that is not received from the connection itself.
#[derive(Debug)]
pub(crate) enum Input {
    /// A block operation of a task has completed.
    BlockDone(TaskIdx, StepResult),
    /// There may be pool memory for waiting commands.
    Pool,
    /// The deadline has expired.
    Timeout,
    /// The rate limits of units or initiators have changed.
    Limits,
    /// The LUN map has changed.
    Luns(Arc<LunMap>),
    /// Request a logout, to be completed until this time.
    Shutdown(Instant),
    /// The connection is replaced by a new login.
    Terminate,
    /// The time for a shutdown has expired.
    Cut,
    /// The connection has been closed.
    Disconnected,
    /// The drain marker has completed, or could not be posted.
    Drained,
    /// The queues were destroyed, either alone or with the device. There will be no more
    /// completions.
    QueuesGone,
    /// The session that is being replaced has been closed.
    OthersGone,
    /// A task can start.
    StartTask(TaskRef),
    /// Abort a task. A function is waiting for this.
    AbortTask { task: TaskRef, watcher: TaskRef },
    /// A task that a function is waiting for has completed.
    TaskGone(TaskRef),
    /// Unit event.
    Event { unit: UnitIdx, attention: Attention },
    /// The next command of the session may be on this connection.
    Turn,
    /// There are connections waiting for pool memory.
    Pressure,
}

/// Input for error recovery, which is only supported for TCP.
#[derive(Debug)]
pub(super) enum RecoveryInput {
    /// The connection was logged out for recovery.
    Detach,
    /// Another connection of the session was lost.
    Lost(Cid),
    /// A command was claimed by another connection.
    Reassign(ReassignRequest),
    /// Command to be handed over to this connection, or `None` if it has completed.
    Reassigned(TaskRef, Option<Box<ReassignedTask>>),
}

impl RecoveryInput {
    fn apply(self, channel: &mut TcpChannel, cx: &mut iscsi::Cx<'_>) {
        let channel = channel.channel_mut();
        match self {
            Self::Detach => channel.handle_detach(cx),
            Self::Lost(cid) => channel.handle_lost(cx, cid),
            Self::Reassign(reassign) => channel.handle_reassign(cx, reassign),
            Self::Reassigned(to, moved) => channel.handle_reassigned(cx, to, moved),
        }
    }
}

impl Input {
    /// Passes the input to a channel. If the fabric does not support this input, it is ignored,
    /// because it was meant for a connection that was closed.
    pub(crate) fn apply(self, machine: Machine<'_, '_>) {
        match machine {
            Machine::Srp(channel, cx) => self.apply_srp(channel, cx),
            Machine::Tcp(channel, cx) => match self {
                // This may send a login response, which can change how received bytes are
                // processed.
                Self::OthersGone => channel.handle_others_gone(cx),
                Self::Timeout => channel.handle_timeout(cx),
                Self::Disconnected => channel.channel_mut().handle_disconnected(cx),
                Self::Cut if channel.channel().phase() == Phase::Closed => {}
                Self::Cut => channel.channel_mut().handle_terminate(cx),
                input => input.apply_iscsi(channel.channel_mut(), cx),
            },
            // The RDMA layer has to handle each type of disconnect first.
            Machine::Iser(conn, cx) => match self {
                Self::OthersGone => conn.handle_others_gone(cx),
                Self::Timeout => conn.handle_timeout(cx),
                Self::Terminate => conn.handle_terminate(cx),
                Self::Cut if conn.channel().phase() == Phase::Closed => {}
                Self::Disconnected | Self::Cut => conn.handle_disconnected(cx),
                Self::Drained => conn.handle_drained(cx),
                Self::QueuesGone => conn.handle_queues_gone(cx),
                input => conn.input(cx, |channel, cx| input.apply_iscsi(channel, cx)),
            },
        }
    }

    fn apply_srp(self, channel: &mut srp::Channel, cx: &mut srp::Cx<'_>) {
        match self {
            Self::BlockDone(task, result) => channel.handle_block_done(cx, task, result),
            Self::Pool => channel.handle_pool(cx),
            Self::Timeout => channel.handle_timeout(cx),
            Self::Limits => channel.handle_limits(cx),
            Self::Luns(luns) => channel.handle_luns(cx, luns),
            Self::Shutdown(until) => channel.handle_shutdown(cx, until),
            Self::Terminate => channel.handle_terminate(cx),
            Self::Cut | Self::Disconnected => channel.handle_disconnected(cx),
            Self::Drained => channel.handle_drained(cx),
            Self::QueuesGone => channel.handle_queues_gone(cx),
            Self::OthersGone => channel.handle_others_gone(cx),
            Self::StartTask(task) => channel.handle_task_start(cx, task),
            Self::AbortTask { task, watcher } => channel.handle_abort(cx, task, watcher),
            Self::TaskGone(watcher) => channel.handle_task_gone(cx, watcher),
            Self::Event { unit, attention } => channel.handle_event(cx, unit, attention),
            Self::Pressure => channel.handle_pressure(cx),
            Self::Turn => {}
        }
    }

    fn apply_iscsi<M: Datamover>(self, channel: &mut Channel<M>, cx: &mut iscsi::Cx<'_>) {
        match self {
            Self::BlockDone(task, result) => channel.handle_block_done(cx, task, result),
            Self::Pool => channel.handle_pool(cx),
            Self::Limits => channel.handle_limits(cx),
            Self::Luns(luns) => channel.handle_luns(luns),
            Self::Shutdown(until) => channel.handle_shutdown(cx, until),
            Self::Terminate => channel.handle_terminate(cx),
            Self::StartTask(task) => channel.handle_task_start(cx, task),
            Self::AbortTask { task, watcher } => channel.handle_abort(cx, task, watcher),
            Self::TaskGone(watcher) => channel.handle_task_gone(cx, watcher),
            Self::Turn => channel.handle_turn(cx),
            Self::Pressure => channel.handle_pressure(cx),
            // There are no asynchronous unit events in iSCSI. The initiator will receive a unit
            // attention.
            Self::Event { .. } => {}
            Self::Cut
            | Self::Timeout
            | Self::Disconnected
            | Self::Drained
            | Self::QueuesGone
            | Self::OthersGone => unreachable!("the connection takes these itself"),
        }
    }
}

impl Conns<Fabric> {
    pub(super) fn srp(&self, key: ConnKey) -> Option<&SrpConn> {
        match &self.get(key)?.fabric {
            Fabric::Srp(conn) => Some(conn),
            _ => None,
        }
    }

    pub(super) fn srp_mut(&mut self, key: ConnKey) -> Option<&mut SrpConn> {
        match &mut self.get_mut(key)?.fabric {
            Fabric::Srp(conn) => Some(conn),
            _ => None,
        }
    }

    pub(super) fn tcp_mut(&mut self, key: ConnKey) -> Option<&mut TcpConn> {
        match &mut self.get_mut(key)?.fabric {
            Fabric::Tcp(conn) => Some(conn),
            _ => None,
        }
    }

    pub(super) fn iser(&self, key: ConnKey) -> Option<&IserConn> {
        match &self.get(key)?.fabric {
            Fabric::Iser(conn) => Some(conn),
            _ => None,
        }
    }

    pub(super) fn iser_mut(&mut self, key: ConnKey) -> Option<&mut IserConn> {
        match &mut self.get_mut(key)?.fabric {
            Fabric::Iser(conn) => Some(conn),
            _ => None,
        }
    }

    /// Returns all connections over TCP.
    pub(super) fn tcps(&self) -> impl Iterator<Item = (ConnKey, &Conn<Fabric>, &TcpConn)> {
        self.iter().filter_map(|(key, conn)| match &conn.fabric {
            Fabric::Tcp(tcp) => Some((key, conn, &**tcp)),
            _ => None,
        })
    }

    /// Returns all iSER connections.
    pub(super) fn isers(&self) -> impl Iterator<Item = (ConnKey, &Conn<Fabric>, &IserConn)> {
        self.iter().filter_map(|(key, conn)| match &conn.fabric {
            Fabric::Iser(iser) => Some((key, conn, &**iser)),
            _ => None,
        })
    }
}

impl PollGroup {
    /// Passes an input to a connection and adds it to the list to check for actions.
    pub(super) fn input(&mut self, key: ConnKey, input: Input) {
        self.with(key, |machine| input.apply(machine));
    }

    /// Passes an input for error recovery to a connection. If the fabric doesn't support this,
    /// which would be a bug in this or another worker, we send the necessary responses but ignore
    /// it otherwise.
    pub(super) fn recover(&mut self, serial: u64, input: RecoveryInput) {
        let key = self.conns.by_serial(serial);
        if let Some(key) = key.filter(|key| self.conns.tcp_mut(*key).is_some()) {
            return self.with_tcp(key, |channel, cx| input.apply(channel, cx));
        }
        match input {
            // The command has completed, either with its connection or before.
            RecoveryInput::Reassign(ReassignRequest { to, .. }) => {
                self.post_mail(to.worker, Mail::Reassigned { to, moved: None });
            }
            // The connection is replaced by a login, and does not keep any commands.
            RecoveryInput::Detach => {
                if let Some(key) = key {
                    self.input(key, Input::Terminate);
                }
            }
            RecoveryInput::Lost(_) | RecoveryInput::Reassigned(..) => {}
        }
    }

    /// Passes an input to an SRP channel.
    pub(super) fn with_srp(
        &mut self,
        key: ConnKey,
        input: impl FnOnce(&mut srp::Channel, &mut srp::Cx<'_>),
    ) {
        self.with(key, |machine| {
            if let Machine::Srp(channel, cx) = machine {
                input(channel, cx);
            }
        });
    }

    /// Passes an input to a TCP connection.
    pub(super) fn with_tcp(
        &mut self,
        key: ConnKey,
        input: impl FnOnce(&mut TcpChannel, &mut iscsi::Cx<'_>),
    ) {
        self.with(key, |machine| {
            if let Machine::Tcp(channel, cx) = machine {
                input(channel, cx);
            }
        });
    }

    /// Passes an input to an iSER connection.
    pub(super) fn with_iser(
        &mut self,
        key: ConnKey,
        input: impl FnOnce(&mut IserChannel, &mut iscsi::Cx<'_>),
    ) {
        self.with(key, |machine| {
            if let Machine::Iser(channel, cx) = machine {
                input(channel, cx);
            }
        });
    }

    /// Creates the context for a channel and calls `input`. The actions are executed later, using
    /// the list of connections to check, because this can be called while executing actions.
    fn with(&mut self, key: ConnKey, input: impl FnOnce(Machine<'_, '_>)) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        let now = self.now;
        // This is done first, because SRP doesn't need anything else.
        if let Fabric::Srp(own) = &mut conn.fabric {
            let mut cx = srp::Cx {
                now,
                pool: &mut self.pool,
                spare: &mut self.spares.srp,
            };
            input(Machine::Srp(&mut own.channel, &mut cx));
            return self.conns.mark_dirty(key);
        }
        let peer = conn.peer;
        let channel = ConnRef {
            worker: self.index,
            serial: conn.serial(),
        };
        let (machine, login, transport, commands) = match &mut conn.fabric {
            Fabric::Srp(_) => unreachable!("it has its input"),
            Fabric::Tcp(own) => {
                let own = &mut **own;
                let commands = own.channel.channel().config().commands;
                // Split the borrows, because the gate updates the login state during the call.
                let machine = IscsiMachine::Tcp(&mut own.channel);
                (machine, &mut own.login, Transport::Tcp, commands)
            }
            Fabric::Iser(own) => {
                let own = &mut **own;
                let commands = own.channel.params().commands;
                let machine = IscsiMachine::Iser(&mut own.channel);
                (machine, &mut own.login, Transport::Iser, commands)
            }
        };
        // During this call, the gate may create a session with units that are newer than the
        // catalog of this worker. We have to update the catalog before executing any actions for
        // the connection.
        let had_session = login.membership.is_some();
        let mut ending = Vec::new();
        let mut gate = WorkerGate {
            shared: &self.shared,
            env: &mut *self.env,
            catalog: &self.catalog,
            now,
            transport,
            listen: login.listen,
            peer,
            channel,
            commands,
            membership: &mut login.membership,
            ending: &mut ending,
            logins: &mut self.logins,
            detail: None,
        };
        let mut cx = iscsi::Cx {
            now,
            pool: &mut self.pool,
            spare: &mut self.spares.iscsi,
            gate: &mut gate,
        };
        match machine {
            IscsiMachine::Tcp(channel) => input(Machine::Tcp(channel, &mut cx)),
            IscsiMachine::Iser(channel) => input(Machine::Iser(channel, &mut cx)),
        }
        if let Some(member) = login.membership.as_ref().filter(|_| !had_session) {
            self.has_entered = true;
            // There are no commands in a discovery session.
            if member.target.is_some() {
                self.pool
                    .add_member(Owner(channel.serial), &member.initiator);
            }
        }
        self.conns.mark_dirty(key);
        // This has to be done after the call, because closing a connection of this worker is also
        // an input, and it may be in the same session.
        if !ending.is_empty() {
            self.end_all(ending);
        }
    }
}

/// iSCSI channel without its context.
enum IscsiMachine<'a> {
    Tcp(&'a mut TcpChannel),
    Iser(&'a mut IserChannel),
}
