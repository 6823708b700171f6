//! iSCSI sessions: performs the outputs of the machine on a datamover (RFC 5047), which is either a
//! TCP or an RDMA connection.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_block::oneshot::Sender;
use riser_block::poll_fds::PollInterest;
use riser_memory::MemSlice;
use riser_scsi::iscsi::name::{DiscoveredTarget, TargetAddress};
use riser_transport::verbs::{CmEventKind, Completion, Provider, VerbsError};

use super::context::{Context, MoverError, Report};
use super::iser::IserMover;
use super::plan::IscsiOpen;
use super::tcp::TcpMover;
use crate::engine::env::Env;
use crate::engine::hostname::HostName;
use crate::engine::io::Target;
use crate::engine::iser::{IserConfig, MAX_PIECES};
use crate::engine::rdma::Device;
use crate::iscsi::session::{IscsiSession, Output};
use crate::session::{ConnectError, IscsiFault, Machine};

/// Interval for polling the result of a lookup.
const LOOKUP: Duration = Duration::from_millis(20);

/// Datamover of a session. It has at most one connection, which may be opened and closed many
/// times.
enum Datamover {
    Tcp(TcpMover),
    Iser(IserMover),
}

/// A session and its datamover.
pub(super) struct IscsiLink {
    pub(super) machine: IscsiSession,
    target: Target,
    mover: Datamover,
    found: Option<Sender<Vec<DiscoveredTarget>>>,
    /// Host name of the portal that the target moved to, and the time of the next poll. Present
    /// during the lookup.
    lookup: Option<(Arc<HostName>, Instant)>,
}

impl IscsiLink {
    fn new(target: Target, open: IscsiOpen, mover: Datamover, now: Instant) -> Self {
        Self {
            machine: IscsiSession::new(open.config, now),
            target,
            mover,
            found: open.found,
            lookup: None,
        }
    }

    pub(super) fn tcp(target: Target, open: IscsiOpen, now: Instant) -> Self {
        Self::new(target, open, Datamover::Tcp(TcpMover::default()), now)
    }

    pub(super) fn iser<P: Provider>(
        device: &mut Device<P>,
        pool: &MemSlice,
        target: Target,
        open: IscsiOpen,
        config: IserConfig,
        now: Instant,
    ) -> Result<Self, VerbsError> {
        let mover = IserMover::new(device, pool, config)?;
        Ok(Self::new(target, open, Datamover::Iser(mover), now))
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) fn is_rdma(&self) -> bool {
        matches!(self.mover, Datamover::Iser(_))
    }

    pub(super) fn poll_interest(&self) -> Option<PollInterest<'_>> {
        match &self.mover {
            Datamover::Tcp(mover) => mover.poll_interest(),
            Datamover::Iser(_) => None,
        }
    }

    /// Returns whether the memory of a command may have this many segments. An iSER command has a
    /// single key for its memory, and its CmdSN is lost if it cannot be sent.
    pub(super) fn accepts_segments(&self, count: usize) -> bool {
        match &self.mover {
            Datamover::Tcp(_) => true,
            Datamover::Iser(mover) => count <= MAX_PIECES.min(mover.region_segments()),
        }
    }

    pub(super) fn release_device<P: Provider>(&self, device: &mut Device<P>) {
        match &self.mover {
            Datamover::Tcp(_) => {}
            Datamover::Iser(mover) => mover.release_device(device),
        }
    }

    /// Returns the session and its TCP connection.
    pub(super) fn on_tcp(&mut self) -> Option<(&mut IscsiSession, &mut TcpMover)> {
        match &mut self.mover {
            Datamover::Tcp(mover) => Some((&mut self.machine, mover)),
            Datamover::Iser(_) => None,
        }
    }

    fn on_iser(&mut self) -> Option<(&mut IscsiSession, &mut IserMover)> {
        match &mut self.mover {
            Datamover::Tcp(_) => None,
            Datamover::Iser(mover) => Some((&mut self.machine, mover)),
        }
    }

    pub(super) fn poll<E: Env>(&mut self, cx: &mut Context<'_, E>) -> Option<Report> {
        loop {
            while let Some(output) = self.machine.poll_output() {
                let report = self.execute_output(output, cx);
                if report.is_some() {
                    return report;
                }
            }
            let (machine, mover) = self.on_iser()?;
            let is_full_feature = machine.params().is_some();
            let reposted = mover.repost(is_full_feature, cx)?;
            self.handle_mover_result(reposted, cx.now);
        }
    }

    fn handle_mover_result(&mut self, moved: Result<(), MoverError>, now: Instant) {
        match moved {
            Ok(()) => {}
            Err(MoverError::Fault(fault)) => self.machine.handle_fault(fault),
            Err(MoverError::Broken) => self.machine.handle_broken(now),
        }
    }

    fn execute_output<E: Env>(
        &mut self,
        output: Output,
        cx: &mut Context<'_, E>,
    ) -> Option<Report> {
        let machine = &mut self.machine;
        let moved = match (output, &mut self.mover) {
            (Output::Connect(moved), _) => {
                self.connect(moved.as_ref(), cx);
                Ok(())
            }
            (Output::Send(pdu), Datamover::Tcp(mover)) => mover.send(pdu),
            (Output::Send(pdu), Datamover::Iser(mover)) => mover.send(pdu, cx),
            (Output::FullFeature(params), Datamover::Tcp(mover)) => {
                mover.enter_full_feature(params)
            }
            (Output::FullFeature(_), Datamover::Iser(mover)) => mover.enter_full_feature(cx),
            (Output::Start(request), Datamover::Tcp(mover)) => mover.start_command(request),
            (Output::Start(request), Datamover::Iser(mover)) => {
                mover.start_command(request, machine, cx)
            }
            (Output::SendData(order), Datamover::Tcp(mover)) => mover.send_data(order),
            // The target reads the data with RDMA and must not solicit it.
            (Output::SendData(_), Datamover::Iser(_)) => Err(MoverError::Fault(IscsiFault::R2t)),
            (Output::Retire(request), mover) => {
                let retired = match mover {
                    Datamover::Tcp(mover) => Ok(mover.retire(request)),
                    Datamover::Iser(mover) => mover.retire(request, cx),
                };
                if let Ok(true) = retired {
                    machine.handle_retired(request, cx.now);
                }
                retired.map(|_| ())
            }
            (Output::Disconnect, mover) => {
                self.lookup = None;
                let is_gone = match mover {
                    Datamover::Tcp(mover) => mover.disconnect(),
                    Datamover::Iser(mover) => mover.begin_close(cx),
                };
                if is_gone {
                    machine.handle_disconnected(cx.now);
                }
                Ok(())
            }
            (Output::Found(found), _) => {
                if let Some(reply) = self.found.take() {
                    reply.send(found);
                }
                Ok(())
            }
            (Output::Complete(request, result), _) => {
                return Some(Report::Complete(request, result));
            }
            (Output::Event(event), _) => return Some(Report::Event(event)),
        };
        self.handle_mover_result(moved, cx.now);
        None
    }

    /// Starts to connect to the target, or to the portal that it moved to.
    fn connect<E: Env>(&mut self, moved: Option<&TargetAddress>, cx: &mut Context<'_, E>) {
        let Some(moved) = moved else {
            self.target.renew();
            self.connect_to(self.target.dst, cx);
            return;
        };
        let host = moved.host.trim_start_matches('[').trim_end_matches(']');
        match host.parse::<IpAddr>() {
            Ok(ip) => self.connect_to(SocketAddr::new(ip, moved.port), cx),
            Err(_) => {
                let family = self.target.src.unwrap_or(self.target.dst);
                let host = HostName::look_up(host, moved.port, Some(family));
                self.lookup = Some((host, cx.now));
            }
        }
    }

    fn connect_to<E: Env>(&mut self, dst: SocketAddr, cx: &mut Context<'_, E>) {
        self.machine.set_peer(dst);
        let target = Target {
            dst,
            ..self.target.clone()
        };
        let begun = match &mut self.mover {
            Datamover::Tcp(mover) => mover.connect(&target, cx.env),
            Datamover::Iser(mover) => mover.resolve(&target, cx),
        };
        if let Err(error) = begun {
            self.machine.handle_connect_failed(error, cx.now);
        }
    }

    /// Connects to the portal that the target moved to, once its name is resolved.
    fn poll_lookup<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        let Some((host, at)) = &mut self.lookup else {
            return;
        };
        let Some(found) = host.poll() else {
            *at = cx.now + LOOKUP;
            return;
        };
        self.lookup = None;
        match found {
            Some(dst) => self.connect_to(dst, cx),
            None => {
                let error = ConnectError::Redirected;
                self.machine.handle_connect_failed(error, cx.now);
            }
        }
    }

    pub(super) fn handle_cm_event<E: Env>(&mut self, event: CmEventKind, cx: &mut Context<'_, E>) {
        if let Some((machine, mover)) = self.on_iser() {
            mover.handle_cm_event(event, machine, cx);
        }
    }

    pub(super) fn handle_completion<E: Env>(
        &mut self,
        completion: &Completion,
        cx: &mut Context<'_, E>,
    ) {
        if let Some((machine, mover)) = self.on_iser() {
            let moved = mover.handle_completion(completion, machine, cx);
            self.handle_mover_result(moved, cx.now);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let connection = match &self.mover {
            Datamover::Tcp(mover) => mover.next_deadline(),
            Datamover::Iser(mover) => mover.next_deadline(),
        };
        self.machine
            .next_deadline()
            .into_iter()
            .chain(connection)
            .chain(self.lookup.as_ref().map(|(_, at)| *at))
            .min()
    }

    pub(super) fn handle_timeout<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        if let Some((machine, mover)) = self.on_iser() {
            if mover.closing_until().is_some_and(|until| until <= cx.now) {
                mover.close_now(machine, cx);
            }
            mover.probe(cx);
        }
        self.poll_lookup(cx);
        if let Some((machine, mover)) = self.on_tcp() {
            mover.check_liveness(machine, cx.now);
        }
        self.machine.handle_timeout(cx.now);
    }
}
