//! Verbs objects for an rping connection, and the event loop used by client and server.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use riser_block::poll_fds::wait_readable;
use riser_memory::Memory;
use riser_transport::verbs::{
    Access, CmError, CmEvent, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, Notify, PdId,
    PortSpace, PostError, Provider, QpCap, QpId, QpInitAttr, QpType, RKey, RecvWr, RemoteAddr,
    SendOp, SendWr, Sge, VerbsError, WcOpcode,
};

use super::{MAX_SIZE, MIN_SIZE, Options, RdmaInfo, RpingError};

/// Number of receive buffers: one, and another in case the peer is ahead of us.
const RECEIVES: u64 = 2;

/// Memory layout in a single region: two receive slots, one send slot, source and sink.
struct Layout {
    source: usize,
    sink: usize,
    send: usize,
}

pub(super) struct Endpoint<'a> {
    provider: &'a mut dyn Provider,
    options: Options,
    memory: Memory,
    layout: Layout,
    pd: PdId,
    cq: CqId,
    mr: Mr,
    listener: Option<CmId>,
    id: Option<CmId>,
    qp: Option<QpId>,
    messages: Vec<RdmaInfo>,
    sent: Option<WcOpcode>,
    /// The peer has disconnected, as seen by a completion or an event.
    gone: bool,
    /// The disconnect event has been received; we only get it once.
    ended: bool,
    completions: Vec<Completion>,
}

fn cm(step: &'static str) -> impl Fn(CmError) -> RpingError {
    move |source| RpingError::Cm { step, source }
}

fn verbs(step: &'static str) -> impl Fn(VerbsError) -> RpingError {
    move |source| RpingError::Verbs { step, source }
}

fn posting(step: &'static str) -> impl Fn(PostError) -> RpingError {
    move |_| RpingError::Verbs {
        step,
        source: VerbsError::InvalidState("cannot post to the queue"),
    }
}

impl<'a> Endpoint<'a> {
    /// Registers memory and creates the queue pair.
    pub(super) fn new(
        provider: &'a mut dyn Provider,
        options: &Options,
    ) -> Result<Self, RpingError> {
        if !(MIN_SIZE..=MAX_SIZE).contains(&options.size) {
            return Err(RpingError::Size(options.size));
        }
        // We use a single region for messages and data, so there is only one key on each side.
        let slots = RdmaInfo::LEN * (RECEIVES as usize + 1);
        let layout = Layout {
            send: RdmaInfo::LEN * RECEIVES as usize,
            source: slots,
            sink: slots + options.size,
        };
        let memory = Memory::new(layout.sink + options.size)
            .map_err(|e| verbs("memory")(VerbsError::Os(e.raw_os_error().unwrap_or(0))))?;
        let pd = provider.alloc_pd().map_err(verbs("protection domain"))?;
        let cq = provider.create_cq(16).map_err(verbs("completion queue"))?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = provider
            .reg_mr(pd, &memory.whole(), access)
            .map_err(verbs("memory region"))?;
        Ok(Self {
            provider,
            options: options.clone(),
            memory,
            layout,
            pd,
            cq,
            mr,
            listener: None,
            id: None,
            qp: None,
            messages: Vec::new(),
            sent: None,
            gone: false,
            ended: false,
            completions: Vec::new(),
        })
    }

    pub(super) fn connect(&mut self, server: SocketAddr) -> Result<(), RpingError> {
        let timeout = self.options.timeout;
        let id = self
            .provider
            .create_id(PortSpace::Tcp)
            .map_err(cm("connection identifier"))?;
        self.id = Some(id);
        self.provider
            .resolve_addr(id, None, server, timeout)
            .map_err(cm("address resolution"))?;
        self.wait_event("address resolution", |k| *k == CmEventKind::AddrResolved)?;
        self.provider
            .resolve_route(id, timeout)
            .map_err(cm("route resolution"))?;
        self.wait_event("route resolution", |k| *k == CmEventKind::RouteResolved)?;
        self.make_qp(id)?;
        self.provider
            .connect(id, &conn_param())
            .map_err(cm("connect"))?;
        self.wait_event("connect", |k| matches!(k, CmEventKind::Established { .. }))
            .map(drop)
    }

    pub(super) fn accept(
        &mut self,
        listen: SocketAddr,
        on_ready: impl FnOnce(SocketAddr),
    ) -> Result<(), RpingError> {
        let listener = self
            .provider
            .create_id(PortSpace::Tcp)
            .map_err(cm("connection identifier"))?;
        self.listener = Some(listener);
        self.provider
            .bind_addr(listener, listen)
            .map_err(cm("bind"))?;
        self.provider.listen(listener, 1).map_err(cm("listen"))?;
        on_ready(self.provider.local_addr(listener).unwrap_or(listen));
        let request = self.wait_event_within("a client", None, |k| {
            matches!(k, CmEventKind::ConnectRequest { .. })
        })?;
        self.id = Some(request.id);
        self.make_qp(request.id)?;
        self.provider
            .accept(request.id, &conn_param())
            .map_err(cm("accept"))?;
        self.wait_event("accept", |k| matches!(k, CmEventKind::Established { .. }))
            .map(drop)
    }

    fn make_qp(&mut self, id: CmId) -> Result<(), RpingError> {
        let init = QpInitAttr {
            sq_sig_all: true,
            ..QpInitAttr::new(self.pd, self.cq, QpType::Rc, QpCap::new(4, 4))
        };
        let qp = self
            .provider
            .create_cm_qp(id, &init)
            .map_err(cm("queue pair"))?;
        self.qp = Some(qp);
        (0..RECEIVES).try_for_each(|slot| self.post_receive(slot))
    }

    fn sge(&self, offset: usize, length: u32) -> Sge {
        self.mr.sge(offset, length as usize)
    }

    fn queue(&self) -> Result<QpId, RpingError> {
        self.qp.ok_or(RpingError::Verbs {
            step: "post",
            source: VerbsError::InvalidState("not connected"),
        })
    }

    fn post_receive(&mut self, slot: u64) -> Result<(), RpingError> {
        let sges = [self.sge(RdmaInfo::LEN * slot as usize, RdmaInfo::LEN as u32)];
        let wr = RecvWr {
            wr_id: riser_transport::verbs::WrId(slot),
            sges: &sges,
        };
        let qp = self.queue()?;
        self.provider
            .post_recv(qp, &[wr])
            .map_err(posting("receive"))
    }

    /// Posts a work request and waits for its completion.
    fn work(&mut self, step: &'static str, op: SendOp, sge: Sge) -> Result<(), RpingError> {
        let qp = self.queue()?;
        self.sent = None;
        self.provider
            .post_send(qp, &[SendWr::new(RECEIVES, op, &[sge])])
            .map_err(posting(step))?;
        let limit = Some(Instant::now() + self.options.timeout);
        while self.sent.is_none() {
            if self.gone && self.messages.is_empty() {
                return Err(RpingError::Disconnected(0));
            }
            self.run_once(step, limit)?;
        }
        Ok(())
    }

    fn send(&mut self, step: &'static str, info: RdmaInfo) -> Result<(), RpingError> {
        self.memory.write(self.layout.send, &info.emit());
        let sge = self.sge(self.layout.send, RdmaInfo::LEN as u32);
        self.work(step, SendOp::Send, sge)
    }

    fn info(&self, offset: usize) -> RdmaInfo {
        RdmaInfo {
            addr: self.mr.addr + offset as u64,
            rkey: self.mr.rkey.0,
            size: self.options.size as u32,
        }
    }

    pub(super) fn fill_source(&mut self, data: &[u8]) {
        self.memory.write(self.layout.source, data);
        self.memory.fill(self.layout.sink, self.options.size, 0);
    }

    pub(super) fn sink(&self) -> Vec<u8> {
        let mut out = vec![0; self.options.size];
        self.memory.read(self.layout.sink, &mut out);
        out
    }

    pub(super) fn advertise_source(&mut self) -> Result<(), RpingError> {
        self.send(
            "sending the source's address",
            self.info(self.layout.source),
        )
    }

    pub(super) fn advertise_sink(&mut self) -> Result<(), RpingError> {
        self.send("sending the sink's address", self.info(self.layout.sink))
    }

    /// Sends a message to the client so that it continues. The contents are ignored.
    pub(super) fn send_go_ahead(&mut self) -> Result<(), RpingError> {
        self.send(
            "sending the go-ahead to the client",
            self.info(self.layout.sink),
        )
    }

    pub(super) fn read(&mut self, from: RdmaInfo) -> Result<(), RpingError> {
        let size = from.size as usize;
        if size > self.options.size {
            return Err(RpingError::Size(size));
        }
        let remote = RemoteAddr {
            addr: from.addr,
            rkey: RKey(from.rkey),
        };
        let sge = self.sge(self.layout.sink, from.size);
        self.work("reading the client's source", SendOp::Read(remote), sge)
    }

    pub(super) fn write(&mut self, to: RdmaInfo, length: u32) -> Result<(), RpingError> {
        let remote = RemoteAddr {
            addr: to.addr,
            rkey: RKey(to.rkey),
        };
        let sge = self.sge(self.layout.sink, length);
        self.work("writing the client's sink", SendOp::Write(remote), sge)
    }

    /// Waits for the next message from the peer.
    pub(super) fn wait_message(
        &mut self,
        step: &'static str,
        pings: u64,
    ) -> Result<RdmaInfo, RpingError> {
        let limit = Some(Instant::now() + self.options.timeout);
        loop {
            if !self.messages.is_empty() {
                return Ok(self.messages.remove(0));
            }
            if self.gone {
                return Err(RpingError::Disconnected(pings));
            }
            self.run_once(step, limit)?;
        }
    }

    fn wait_event(
        &mut self,
        step: &'static str,
        wanted: impl Fn(&CmEventKind) -> bool,
    ) -> Result<CmEvent, RpingError> {
        let limit = Instant::now() + self.options.timeout;
        self.wait_event_within(step, Some(limit), wanted)
    }

    fn wait_event_within(
        &mut self,
        step: &'static str,
        limit: Option<Instant>,
        wanted: impl Fn(&CmEventKind) -> bool,
    ) -> Result<CmEvent, RpingError> {
        loop {
            while let Some(event) = self.provider.poll_cm_event() {
                if wanted(&event.kind) {
                    return Ok(event);
                }
                match event.kind {
                    CmEventKind::Rejected { reason, .. } => {
                        return Err(RpingError::Rejected(reason));
                    }
                    CmEventKind::AddrError(e)
                    | CmEventKind::RouteError(e)
                    | CmEventKind::ConnectError(e) => return Err(cm(step)(e)),
                    CmEventKind::Unreachable => return Err(RpingError::Timeout(step)),
                    kind => self.note_end(&kind),
                }
            }
            if self.ended {
                return Err(RpingError::Disconnected(0));
            }
            self.wait(step, limit)?;
        }
    }

    /// Runs the event loop once: processes events and completions, or sleeps if there are none.
    fn run_once(&mut self, step: &'static str, limit: Option<Instant>) -> Result<(), RpingError> {
        self.provider.progress(Instant::now());
        while let Some(event) = self.provider.poll_cm_event() {
            self.note_end(&event.kind);
        }
        if self.reap(step)? == 0 && !self.gone {
            let waiting = self
                .provider
                .req_notify_cq(self.cq, Notify::Next)
                .map_err(verbs(step))?;
            if !waiting {
                self.wait(step, limit)?;
            }
        }
        Ok(())
    }

    /// Processes completions and returns the number of completions.
    fn reap(&mut self, step: &'static str) -> Result<usize, RpingError> {
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let n = self
            .provider
            .poll_cq(self.cq, 16, &mut completions)
            .map_err(verbs(step))?;
        for c in &completions {
            self.on_completion(step, c)?;
        }
        self.completions = completions;
        Ok(n)
    }

    fn on_completion(&mut self, step: &'static str, c: &Completion) -> Result<(), RpingError> {
        if !c.status.is_ok() {
            // If the peer disconnects, our receives are flushed. This is normal and not an error.
            if c.opcode.is_recv() {
                self.gone = true;
                return Ok(());
            }
            return Err(RpingError::Work {
                step,
                status: c.status,
            });
        }
        if !c.opcode.is_recv() {
            self.sent = Some(c.opcode);
            return Ok(());
        }
        if c.byte_len as usize != RdmaInfo::LEN {
            return Err(RpingError::Protocol(c.byte_len));
        }
        let mut bytes = [0; RdmaInfo::LEN];
        self.memory
            .read(RdmaInfo::LEN * c.wr_id.0 as usize, &mut bytes);
        self.messages.push(RdmaInfo::parse(bytes));
        self.post_receive(c.wr_id.0)
    }

    /// Sleeps until a file descriptor is readable, or the device deadline or the limit expires.
    fn wait(&mut self, step: &'static str, limit: Option<Instant>) -> Result<(), RpingError> {
        // We can ignore these, because errors are also reported by completions and connection
        // events.
        while self.provider.poll_async_event().is_some() {}
        // Drop events for completions that have already been polled; otherwise we would never
        // sleep.
        while self.provider.poll_cq_event().is_some() {}
        if self.provider.progress(Instant::now()) > 0 {
            return Ok(());
        }
        let now = Instant::now();
        if limit.is_some_and(|l| l <= now) {
            return Err(RpingError::Timeout(step));
        }
        let until = self.provider.deadline().into_iter().chain(limit).min();
        let timeout = until.map(|u| u.saturating_duration_since(now) + Duration::from_millis(1));
        if !self.provider.arm_fds() {
            wait_readable(&self.provider.event_fds(), timeout);
        }
        self.provider.progress(Instant::now());
        Ok(())
    }

    fn note_end(&mut self, kind: &CmEventKind) {
        if matches!(kind, CmEventKind::Disconnected | CmEventKind::DeviceRemoval) {
            self.gone = true;
            self.ended = true;
        }
    }

    /// Disconnects and waits for the peer to disconnect, unless this has already happened.
    pub(super) fn disconnect(&mut self) {
        let Some(id) = self.id else { return };
        let _ = self.provider.disconnect(id);
        if !self.ended {
            let _ = self.wait_event("disconnect", |k| *k == CmEventKind::Disconnected);
        }
    }
}

impl Drop for Endpoint<'_> {
    /// Releases all resources, so that the device can be used again.
    fn drop(&mut self) {
        if let Some(qp) = self.qp.take() {
            let _ = self.provider.destroy_qp(qp);
        }
        for id in self.id.take().into_iter().chain(self.listener.take()) {
            let _ = self.provider.destroy_id(id);
        }
        let _ = self.provider.dereg_mr(self.mr.id);
        let _ = self.provider.destroy_cq(self.cq);
        let _ = self.provider.dealloc_pd(self.pd);
        self.provider.progress(Instant::now());
    }
}

fn conn_param() -> ConnParam {
    ConnParam {
        responder_resources: 1,
        initiator_depth: 1,
        // With `rdma_rxe`, 7 means infinite retries, and we would never detect a dead peer.
        retry_count: 6,
        ..Default::default()
    }
}
