//! Sessions of iSCSI on RDMA.

use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_scsi::iscsi::chap::CHALLENGE_LEN;
use riser_scsi::iscsi::name::{Found, TargetAddress};
use riser_scsi::iser::{CmHeader, Message};
use riser_transport::verbs::{
    CmEvent, CmEventKind, Completion, ConnParam, PortSpace, Provider, VerbsError,
};

use super::link::{IserOpen, Link, Rdma, iser};
use super::tcp::literal;
use super::{CLOSING_PATIENCE, DISCONNECT_PATIENCE, Driver, Target};
use crate::engine::iser::{IserConfig, IserConn, Work};
use crate::engine::oneshot::Sender;
use crate::iscsi::session::{Output, Session};
use crate::request::RequestId;
use crate::session::{ConnectError, IscsiFault, SrpLoginError};

/// How long finding an address or a route may take.
const RESOLVE: Duration = Duration::from_secs(2);

/// A session and its connection.
pub(super) struct IserLink {
    pub(super) machine: Session,
    pub(super) target: Target,
    pub(super) rdma: Rdma,
    pub(super) config: IserConfig,
    pub(super) conn: Option<IserConn>,
    found: Option<Sender<Vec<Found>>>,
}

impl IserLink {
    pub(super) fn new<P: Provider>(
        provider: &mut P,
        pool: &MemSlice,
        target: Target,
        open: IserOpen,
        now: Instant,
    ) -> Result<Self, VerbsError> {
        let rdma = Rdma::new(provider, pool, open.conn.completions(), false)?;
        Ok(Self {
            machine: Session::new(open.config, now),
            target,
            rdma,
            config: open.conn,
            conn: None,
            found: open.found,
        })
    }
}

impl<P: Provider> Driver<P> {
    /// Carries out a session's outputs until there are none.
    pub(super) fn drain_iser(&mut self, index: usize, now: Instant) {
        while let Some(output) = iser(&mut self.sessions, index).machine.poll_output() {
            match output {
                Output::Connect(moved) => self.resolve_iser(index, moved.as_ref(), now),
                Output::Send(pdu) => {
                    let link = iser(&mut self.sessions, index);
                    let conn = link.conn.as_mut();
                    if !conn.is_some_and(|c| c.send_control(&mut self.provider, pdu)) {
                        link.machine.handle_broken(now);
                    }
                }
                Output::FullFeature(_) => {
                    let link = iser(&mut self.sessions, index);
                    let conn = link.conn.as_mut();
                    if conn.is_none_or(|c| c.enter_full_feature(&mut self.provider).is_err()) {
                        link.machine.handle_broken(now);
                    }
                }
                Output::Start(request) => self.start_iser(index, request, now),
                // The target reads data by itself, and asks for none.
                Output::SendData(_) => iser(&mut self.sessions, index)
                    .machine
                    .handle_fault(IscsiFault::R2t),
                Output::Retire(request) => self.retire_iser(index, request, now),
                Output::Disconnect => self.begin_tear_down_iser(index, now),
                Output::Found(found) => {
                    if let Some(reply) = iser(&mut self.sessions, index).found.take() {
                        reply.send(found);
                    }
                }
                Output::Complete(request, result) => self.complete(index, request, result, now),
                Output::Event(event) => self.handle_event(index, event, now),
            }
        }
    }

    fn start_iser(&mut self, index: usize, request: RequestId, now: Instant) {
        if iser(&mut self.sessions, index).conn.is_some() && !self.try_start_iser(index, request) {
            let link = iser(&mut self.sessions, index);
            link.machine.handle_broken(now);
        }
    }

    /// Sends a command; false if the connection is broken.
    fn try_start_iser(&mut self, index: usize, request: RequestId) -> bool {
        let running = &mut self.sessions[index];
        let Link::Iser(link) = &mut running.link else {
            return false;
        };
        let io = running.ios.get(request.0 as usize).and_then(Option::as_ref);
        let (Some(io), Some(conn)) = (io, &mut link.conn) else {
            return false;
        };
        // A request that was given up meanwhile has used up a number that is never sent.
        let Some(command) = link.machine.emit_command(request) else {
            return false;
        };
        io.io.data.slices(&mut self.scratch.slices);
        conn.start(
            &mut self.provider,
            request,
            &command,
            io.io.command.len,
            &self.scratch.slices,
            &link.rdma.pool,
        )
    }

    fn retire_iser(&mut self, index: usize, request: RequestId, now: Instant) {
        let link = iser(&mut self.sessions, index);
        // Without a connection, its end tells the session.
        let Some(conn) = &mut link.conn else {
            return;
        };
        match conn.retire(&mut self.provider, request) {
            Some(true) => self.on_retired_iser(index, request, now),
            Some(false) => {}
            None => link.machine.handle_broken(now),
        }
    }

    fn on_retired_iser(&mut self, index: usize, request: RequestId, now: Instant) {
        iser(&mut self.sessions, index)
            .machine
            .handle_retired(request, now);
    }

    pub(super) fn handle_iser_completion(
        &mut self,
        index: usize,
        completion: &Completion,
        now: Instant,
    ) {
        let Some(work) = Work::of(completion.wr_id) else {
            return;
        };
        if !completion.status.is_ok() {
            tracing::debug!(?work, status = ?completion.status, "work request failed");
            iser(&mut self.sessions, index).machine.handle_broken(now);
            self.drain(index, now);
            return;
        }
        let Some(conn) = &mut iser(&mut self.sessions, index).conn else {
            return;
        };
        let provider = &mut self.provider;
        match work {
            Work::Recv(slot) => {
                if let Some(key) = completion.invalidated
                    && !conn.on_remote_invalidated(key)
                {
                    tracing::debug!(?key, "the target invalidated a key that is none of ours");
                }
                self.receive_iser(index, slot, completion.byte_len, now);
            }
            Work::Command(slot) | Work::Invalidate(slot, _) => {
                let back = match work {
                    Work::Invalidate(_, key) => conn.on_invalidated(provider, slot, key),
                    _ => conn.on_command_sent(provider, slot),
                };
                if let Some(request) = back {
                    self.on_retired_iser(index, request, now);
                }
            }
            Work::Register(_) => {}
            Work::Control(slot) => {
                if !conn.on_control_sent(provider, slot) {
                    iser(&mut self.sessions, index).machine.handle_broken(now);
                }
            }
        }
        self.drain(index, now);
    }

    fn receive_iser(&mut self, index: usize, slot: u16, len: u32, now: Instant) {
        let link = iser(&mut self.sessions, index);
        let Some(conn) = &mut link.conn else {
            return;
        };
        let mut message = std::mem::take(&mut self.message);
        conn.received(slot, len, &mut message);
        match Message::parse(&message) {
            Ok(Message::Control { frame, .. }) => link.machine.handle_pdu(&frame, now),
            Ok(Message::Hello(_) | Message::HelloReply(_)) => {
                link.machine.handle_fault(IscsiFault::Unexpected("a Hello"));
            }
            Err(error) => link.machine.handle_fault(IscsiFault::Iser(error)),
        }
        self.message = message;
        self.drain(index, now);
        let link = iser(&mut self.sessions, index);
        let is_full_feature = link.machine.params().is_some();
        if let Some(conn) = &mut link.conn
            && !conn.repost(&mut self.provider, slot, is_full_feature)
        {
            link.machine.handle_broken(now);
        }
    }

    pub(super) fn handle_iser_cm_event(&mut self, index: usize, event: CmEvent, now: Instant) {
        let conn = iser(&mut self.sessions, index).conn.as_ref();
        if conn.is_some_and(|c| c.closing_until.is_some()) {
            // The connection request has been answered, accepted or not.
            self.tear_down_iser(index, now);
            return;
        }
        match event.kind {
            CmEventKind::AddrResolved => {
                if let Err(e) = self.provider.resolve_route(event.id, RESOLVE) {
                    self.fail_iser(index, ConnectError::Cm(e), now);
                }
            }
            CmEventKind::RouteResolved => self.connect_iser(index, now),
            CmEventKind::AddrError(e) | CmEventKind::RouteError(e) => {
                self.fail_iser(index, ConnectError::Address(e), now);
            }
            CmEventKind::ConnectError(e) => self.fail_iser(index, ConnectError::Cm(e), now),
            CmEventKind::Unreachable => self.fail_iser(index, ConnectError::Unreachable, now),
            CmEventKind::Rejected { reason, .. } => {
                let error = ConnectError::Login(SrpLoginError::Refused(reason));
                self.fail_iser(index, error, now);
            }
            CmEventKind::Established { param } => {
                let link = iser(&mut self.sessions, index);
                if let Some(conn) = &mut link.conn {
                    conn.is_connecting = false;
                    let theirs = CmHeader::parse(&param.private_data);
                    conn.agreed = link.config.offer().and(theirs);
                }
                let mut random = [0; CHALLENGE_LEN + 1];
                match getrandom::fill(&mut random) {
                    Ok(()) => link.machine.handle_connected(random, now),
                    // Without it a login could be foreseen.
                    Err(_) => link.machine.handle_broken(now),
                }
            }
            CmEventKind::Disconnected | CmEventKind::DeviceRemoval => {
                iser(&mut self.sessions, index).machine.handle_broken(now);
            }
            CmEventKind::TimewaitExit | CmEventKind::ConnectRequest { .. } => {}
        }
        self.drain(index, now);
    }

    /// Begins to find the path.
    fn resolve_iser(&mut self, index: usize, moved: Option<&TargetAddress>, now: Instant) {
        let link = iser(&mut self.sessions, index);
        let dst = match moved.map(literal) {
            None => link.target.dst,
            Some(Some(dst)) => dst,
            Some(None) => {
                link.machine
                    .handle_connect_failed(ConnectError::Redirected, now);
                return;
            }
        };
        let id = match self.provider.create_id(PortSpace::Tcp) {
            Ok(id) => id,
            Err(e) => {
                link.machine.handle_connect_failed(ConnectError::Cm(e), now);
                return;
            }
        };
        self.ids.insert(id, (index, 0));
        link.conn = Some(IserConn::new(id, link.config));
        let src = link.target.src;
        if let Err(e) = self.provider.resolve_addr(id, src, dst, RESOLVE) {
            self.release_iser(index, false, now);
            let machine = &mut iser(&mut self.sessions, index).machine;
            machine.handle_connect_failed(ConnectError::Address(e), now);
        }
    }

    /// The path is found: makes the queue pair and sends the request.
    fn connect_iser(&mut self, index: usize, now: Instant) {
        let link = iser(&mut self.sessions, index);
        let Some(conn) = &mut link.conn else {
            return;
        };
        let made = conn.set_up(&mut self.provider, link.rdma.pd, link.rdma.cq);
        if let Some(qp) = conn.qp() {
            self.qps.insert(qp, (index, 0));
        }
        if let Err(e) = made {
            self.fail_iser(index, ConnectError::Local(e), now);
            return;
        }
        let param = ConnParam {
            private_data: link.config.offer().bytes().to_vec(),
            ..ConnParam::default()
        };
        conn.is_connecting = true;
        if let Err(e) = self.provider.connect(conn.id, &param) {
            self.fail_iser(index, ConnectError::Cm(e), now);
        }
    }

    fn fail_iser(&mut self, index: usize, error: ConnectError, now: Instant) {
        self.release_iser(index, false, now);
        iser(&mut self.sessions, index)
            .machine
            .handle_connect_failed(error, now);
    }

    /// Closes the connection, once the answer to its request is here: a peer that has answered a
    /// request and learns that it is withdrawn may keep what it has made for it.
    fn begin_tear_down_iser(&mut self, index: usize, now: Instant) {
        let conn = iser(&mut self.sessions, index).conn.as_mut();
        match conn.filter(|conn| conn.is_connecting) {
            Some(conn) => conn.closing_until = Some(now + CLOSING_PATIENCE),
            None => {
                self.release_iser(index, true, now);
                iser(&mut self.sessions, index).machine.handle_gone(now);
            }
        }
    }

    /// Closes the connection now and notifies the session.
    pub(super) fn tear_down_iser(&mut self, index: usize, now: Instant) {
        self.release_iser(index, true, now);
        iser(&mut self.sessions, index).machine.handle_gone(now);
        self.drain(index, now);
    }

    /// Lets go of the connection. With `linger` the peer is told, and the identifier lives until the
    /// peer has heard of it.
    fn release_iser(&mut self, index: usize, linger: bool, now: Instant) {
        let Some(mut conn) = iser(&mut self.sessions, index).conn.take() else {
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
}
