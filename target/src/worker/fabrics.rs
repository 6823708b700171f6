//! The fabrics of connections: the one place that knows all three of them.
//!
//! Inputs that reach a connection from its worker, and from others by mail, are an [`Input`]; which
//! of them a fabric takes, and how, is said once, in [`Input::apply`]. Inputs of one fabric only,
//! such as bytes and completions, come from `tcp`, `srp` and `iser`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::attention::Attention;
use riser_scsi::iscsi::Cid;
use riser_scsi::step::StepResult;

use super::Worker;
use super::conns::{Conn, ConnKey, Connection, Conns};
use super::gate::{Transport, WorkerGate};
use super::mail::Mail;
use super::queue::Receive;
use super::rdma::RdmaLink;
use super::stream::Stream;
use crate::audit::Parting;
use crate::config::Protocol;
use crate::fabric::{Accounts, ConnRef, LunMap, Spare, TaskIdx, TaskRef, UnitIdx};
use crate::iscsi::{
    self, Channel, Datamover, Phase, ReassignRequest, ReassignedTask, SpareTasks, TcpChannel,
};
use crate::iser::{IserAction, IserChannel};
use crate::pool::{Buffer, Pool};
use crate::sessions::catalog::Entrance;
use crate::sessions::guard::SessionGuard;
use crate::sessions::iscsi::Membership;
use crate::sessions::nexus::NexusKey;
use crate::srp;
use crate::stats::Functions;

/// Contexts of commands that no connection has, for those of each kind.
#[derive(Debug, Default)]
pub(super) struct Spares {
    pub(super) srp: Spare<srp::SendIoctx>,
    pub(super) iscsi: SpareTasks,
}

impl Spares {
    /// Returns their memory in bytes.
    pub(super) fn memory(&self) -> usize {
        self.srp.memory() + self.iscsi.memory()
    }
}

/// A connection of some fabric. Boxed, since their sizes differ.
#[derive(Debug)]
pub(super) enum Fabric {
    Srp(Box<SrpConn>),
    Tcp(Box<TcpConn>),
    Iser(Box<IserConn>),
}

/// An SRP channel with its queue pair.
#[derive(Debug)]
pub(super) struct SrpConn {
    pub(super) channel: srp::Channel,
    pub(super) key: NexusKey,
    /// Its part in the session of the nexus.
    pub(super) guard: SessionGuard,
    /// The listener that it came by.
    pub(super) entrance: Entrance,
    pub(super) rdma: RdmaLink,
}

/// An iSCSI connection on TCP.
#[derive(Debug)]
pub(super) struct TcpConn {
    pub(super) channel: TcpChannel,
    pub(super) socket: Stream,
    pub(super) login: Login,
}

/// An iSCSI connection on RDMA.
#[derive(Debug)]
pub(super) struct IserConn {
    pub(super) channel: IserChannel,
    pub(super) rdma: RdmaLink,
    pub(super) login: Login,
}

/// An iSCSI connection's portal, and its session once it has one.
#[derive(Debug)]
pub(super) struct Login {
    pub(super) listen: SocketAddr,
    pub(super) membership: Option<Membership>,
}

impl Login {
    /// Makes the record of a connection that has not logged in.
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

    fn waits_for_pool(&self) -> bool {
        match self {
            Self::Srp(conn) => conn.channel.waits_for_pool(),
            Self::Tcp(conn) => conn.channel.channel().waits_for_pool(),
            Self::Iser(conn) => conn.channel.channel().waits_for_pool(),
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

    /// The portal and session of an iSCSI connection, over either.
    pub(super) fn login(&self) -> Option<(Transport, &Login)> {
        match self {
            Self::Srp(_) => None,
            Self::Tcp(conn) => Some((Transport::Tcp, &conn.login)),
            Self::Iser(conn) => Some((Transport::Iser, &conn.login)),
        }
    }

    /// Returns its part in its session, if it has logged in.
    pub(super) fn into_guard(self) -> Option<SessionGuard> {
        let login = match self {
            Self::Srp(conn) => return Some(conn.guard),
            Self::Tcp(conn) => conn.login,
            Self::Iser(conn) => conn.login,
        };
        login.membership.map(|membership| membership.guard)
    }

    /// Returns how it has ended, and whether the initiator has logged it out before.
    pub(super) fn end(&self) -> (Parting, bool) {
        match self {
            Self::Srp(conn) => (conn.channel.end(), false),
            Self::Tcp(conn) => end_of(conn.channel.channel()),
            Self::Iser(conn) => end_of(conn.channel.channel()),
        }
    }

    /// Takes the receives that a new connection wants to have posted before it is accepted.
    ///
    /// # Panics
    /// If it wants something else, which a connection does after its first input only.
    pub(super) fn take_first_receives(&mut self) -> Vec<Receive> {
        match self {
            Self::Srp(conn) => {
                let actions = std::iter::from_fn(|| conn.channel.poll_action());
                // Collected first, since the channel is asked for their slots next.
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

    /// Returns the data buffer of a task, for a block operation, if that needs one.
    pub(super) fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        match self {
            Self::Srp(conn) => conn.channel.data_buffer(task),
            Self::Tcp(conn) => conn.channel.channel().data_buffer(task),
            Self::Iser(conn) => conn.channel.channel().data_buffer(task),
        }
    }

    /// Notes that the initiator has ended the connection.
    pub(super) fn note_closed(&mut self) {
        match self {
            Self::Srp(conn) => conn.channel.note_closed(),
            Self::Tcp(conn) => conn.channel.channel_mut().note_closed(),
            Self::Iser(conn) => conn.channel.note_closed(),
        }
    }

    /// Ends everything at once: the devices are closed, and the ring is next.
    pub(super) fn abandon(&mut self, pool: &mut Pool) {
        match self {
            Self::Srp(conn) => conn.channel.abandon(pool),
            Self::Tcp(conn) => conn.channel.channel_mut().abandon(pool),
            Self::Iser(conn) => conn.channel.abandon(pool),
        }
    }

    /// Task-management functions that it has answered.
    pub(super) fn functions(&self) -> &Functions {
        match self {
            Self::Srp(conn) => conn.channel.functions(),
            Self::Tcp(conn) => conn.channel.channel().functions(),
            Self::Iser(conn) => conn.channel.channel().functions(),
        }
    }

    /// Accounts of its session at each unit, and its initiator.
    pub(super) fn accounts(&self) -> (String, &Accounts) {
        match self {
            Self::Srp(conn) => (conn.key.initiator.to_string(), conn.channel.accounts()),
            Self::Tcp(conn) => accounts_of(conn.channel.channel()),
            Self::Iser(conn) => accounts_of(conn.channel.channel()),
        }
    }
}

fn end_of<M: Datamover>(channel: &Channel<M>) -> (Parting, bool) {
    (channel.end(), channel.has_logged_out())
}

fn accounts_of<M: Datamover>(channel: &Channel<M>) -> (String, &Accounts) {
    let initiator = channel.initiator().unwrap_or_default();
    (initiator, channel.accounts())
}

/// A machine with what it works with for the length of a call.
pub(super) enum Machine<'a, 'b> {
    Srp(&'a mut srp::Channel, &'a mut srp::Cx<'b>),
    Tcp(&'a mut TcpChannel, &'a mut iscsi::Cx<'b>),
    Iser(&'a mut IserChannel, &'a mut iscsi::Cx<'b>),
}

/// An input that does not come by the connection's own wire.
#[derive(Debug)]
pub(super) enum Input {
    /// A block operation of a task has ended.
    BlockDone(TaskIdx, StepResult),
    /// There may be pool memory for commands that wait for it.
    Pool,
    /// The deadline has come.
    Timeout,
    /// The limits of units or initiators are others.
    Limits,
    /// Its session sees these units now.
    Luns(Arc<LunMap>),
    /// The initiator is to be logged out until then.
    Shutdown(Instant),
    /// A newer login replaces the connection.
    Terminate,
    /// The time of a shutdown is over.
    Cut,
    /// The connection is of no further use.
    Disconnected,
    /// The drain marker has completed, or was not taken.
    Drained,
    /// The queues are gone, alone or with their device, and will complete nothing.
    QueuesGone,
    /// The session that this one replaces has ended.
    OthersGone,
    /// A task may start.
    StartTask(TaskRef),
    /// A task is to be aborted, for which a function waits.
    AbortTask { task: TaskRef, watcher: TaskRef },
    /// A task that a function waits for is gone.
    TaskGone(TaskRef),
    /// Something happened to a unit.
    Event { unit: UnitIdx, attention: Attention },
    /// It may have its session's next command.
    Turn,
}

/// An input of error recovery, which connections on TCP have only.
#[derive(Debug)]
pub(super) enum RecoveryInput {
    /// It was logged out for recovery.
    Detach,
    /// Another connection of its session is lost.
    Lost(Cid),
    /// Another connection takes a command over.
    Reassign(ReassignRequest),
    /// A command that it takes over, or nothing where that has ended.
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
    /// Gives the input to a machine. Inputs that its fabric does not know are dropped: they were
    /// meant for a connection that is gone.
    fn apply(self, machine: Machine<'_, '_>) {
        match machine {
            Machine::Srp(channel, cx) => self.apply_srp(channel, cx),
            Machine::Tcp(channel, cx) => match self {
                // The answer to a login that waited may change how bytes are taken.
                Self::OthersGone => channel.handle_others_gone(cx),
                Self::Disconnected => channel.channel_mut().handle_disconnected(cx),
                Self::Cut if channel.channel().phase() == Phase::Closed => {}
                Self::Cut => channel.channel_mut().handle_terminate(cx),
                input => input.apply_iscsi(channel.channel_mut(), cx),
            },
            // The RDMA beneath the channel handles each end of the connection first.
            Machine::Iser(conn, cx) => match self {
                Self::OthersGone => conn.handle_others_gone(cx),
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
            Self::Turn => {}
        }
    }

    fn apply_iscsi<M: Datamover>(self, channel: &mut Channel<M>, cx: &mut iscsi::Cx<'_>) {
        match self {
            Self::BlockDone(task, result) => channel.handle_block_done(cx, task, result),
            Self::Pool => channel.handle_pool(cx),
            Self::Timeout => channel.handle_timeout(cx),
            Self::Limits => channel.handle_limits(cx),
            Self::Luns(luns) => channel.handle_luns(luns),
            Self::Shutdown(until) => channel.handle_shutdown(cx, until),
            Self::Terminate => channel.handle_terminate(cx),
            Self::StartTask(task) => channel.handle_task_start(cx, task),
            Self::AbortTask { task, watcher } => channel.handle_abort(cx, task, watcher),
            Self::TaskGone(watcher) => channel.handle_task_gone(cx, watcher),
            Self::Turn => channel.handle_turn(cx),
            // Asynchronous events of units have no way to an iSCSI initiator; it reads unit
            // attentions.
            Self::Event { .. } => {}
            Self::Cut
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

    /// Connections on TCP, with their common parts.
    pub(super) fn tcps(&self) -> impl Iterator<Item = (ConnKey, &Conn<Fabric>, &TcpConn)> {
        self.iter().filter_map(|(key, conn)| match &conn.fabric {
            Fabric::Tcp(tcp) => Some((key, conn, &**tcp)),
            _ => None,
        })
    }

    /// Connections of iSER, with their common parts.
    pub(super) fn isers(&self) -> impl Iterator<Item = (ConnKey, &Conn<Fabric>, &IserConn)> {
        self.iter().filter_map(|(key, conn)| match &conn.fabric {
            Fabric::Iser(iser) => Some((key, conn, &**iser)),
            _ => None,
        })
    }
}

impl Worker {
    /// Gives a connection an input, and notes that it may ask for something.
    pub(super) fn input(&mut self, key: ConnKey, input: Input) {
        self.with(key, |machine| input.apply(machine));
    }

    /// Gives a connection an input of error recovery. One whose fabric has none, which is a mistake
    /// of this or another worker, answers what is asked of it and changes nothing else.
    pub(super) fn recover(&mut self, serial: u64, input: RecoveryInput) {
        let key = self.conns.by_serial(serial);
        if let Some(key) = key.filter(|key| self.conns.tcp_mut(*key).is_some()) {
            return self.with_tcp(key, |channel, cx| input.apply(channel, cx));
        }
        match input {
            // The command has ended, with its connection or long before.
            RecoveryInput::Reassign(ReassignRequest { to, .. }) => {
                self.post_mail(to.worker, Mail::Reassigned { to, moved: None });
            }
            // A login takes the place of the connection, which keeps no commands for it.
            RecoveryInput::Detach => {
                if let Some(key) = key {
                    self.input(key, Input::Terminate);
                }
            }
            RecoveryInput::Lost(_) | RecoveryInput::Reassigned(..) => {}
        }
    }

    /// Gives an SRP channel an input of its own.
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

    /// Gives a connection on TCP an input of its own.
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

    /// Gives a connection of iSER an input of its own.
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

    /// Lends a machine what it works with for the length of a call. What it asks for is carried out
    /// later, from the list of those that may ask: an input may come while actions are carried out.
    fn with(&mut self, key: ConnKey, input: impl FnOnce(Machine<'_, '_>)) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        let now = self.now;
        // Before the rest is put together, which SRP does not need.
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
                // Taken apart, since the gate changes the login while the channel is being called.
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
        // The gate may enter a session during the call, with units that are newer than the
        // worker's catalog. That is followed before anything is carried out for the connection.
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
        self.has_entered |= !had_session && login.membership.is_some();
        self.conns.mark_dirty(key);
        // Not before the call has ended: a connection of this worker that ends is an input to the
        // table, and may be of the same session.
        if !ending.is_empty() {
            self.end_all(ending);
        }
    }
}

/// A machine of iSCSI without what it works with.
enum IscsiMachine<'a> {
    Tcp(&'a mut TcpChannel),
    Iser(&'a mut IserChannel),
}
