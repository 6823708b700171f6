//! Processes messages from the peer: data for receives and memory, READs and atomics.

use std::collections::VecDeque;

use riser_memory::fault;

use super::wire::ddp::{
    AtomicRequest, AtomicResponse, Header, IMMEDIATE_LEN, Opcode, Placement, Queue, ReadRequest,
};
use super::wire::terminate::{Reason, Terminate};
use super::{RdmapConfig, Tx};
use crate::mr::{KeyError, MrTable};
use crate::rc::{Env, MAX_MESSAGE, RcEvent, RecvWqe};
use crate::verbs::{Access, AsyncEvent, Completion, RKey, WcOpcode, WcStatus};

/// READ or atomic from the peer waiting for a response.
#[derive(Clone, Copy, Debug)]
enum PendingResponse {
    Read {
        request: ReadRequest,
        msn: u32,
        sent: u32,
    },
    Atomic(AtomicResponse),
}

/// Responder of a QP.
#[derive(Debug)]
pub(super) struct Responder {
    /// Receive used by the current message.
    recv: RecvWqe,
    /// Operation of the current message, if any.
    receiving: Option<Opcode>,
    /// Number of bytes received.
    offset: u32,
    /// Size of the last WRITE, needed for immediate data following it, and whether it is complete.
    written: (u32, bool),
    /// READs and atomics waiting for a response, oldest first. Limited to `ird`.
    responses: VecDeque<PendingResponse>,
    /// Set if a READ response was started but is not complete.
    is_sending: bool,
    ird: u16,
    access: Access,
    /// Next expected message numbers from the peer.
    send_msn: u32,
    read_msn: u32,
    /// Next number for an atomic response.
    response_msn: u32,
}

/// Returns the tagged buffer error for an invalid key.
fn tagged_reason(e: KeyError, to: u64, len: u32) -> Reason {
    match e {
        KeyError::Key | KeyError::Kind => Reason::DdpInvalidStag,
        KeyError::Domain => Reason::DdpNotAssociated,
        KeyError::Right => Reason::RdmapAccess,
        KeyError::Range if to.checked_add(len.into()).is_none() => Reason::DdpWrap,
        KeyError::Range => Reason::DdpBounds,
    }
}

/// Returns the RDMAP error for an invalid key in a request.
fn rdmap_reason(e: KeyError, to: u64, len: u32) -> Reason {
    match e {
        KeyError::Key | KeyError::Kind => Reason::RdmapInvalidStag,
        KeyError::Domain => Reason::RdmapNotAssociated,
        KeyError::Right => Reason::RdmapAccess,
        KeyError::Range if to.checked_add(len.into()).is_none() => Reason::RdmapWrap,
        KeyError::Range => Reason::RdmapBounds,
    }
}

/// Creates a Terminate message for a request that can't be processed anymore.
fn about_request(reason: Reason, request: &ReadRequest, msn: u32) -> Terminate {
    let header = Header {
        opcode: Opcode::ReadRequest,
        last: true,
        place: Placement::Untagged {
            invalidate: 0,
            qn: Queue::ReadRequest as u32,
            msn,
            mo: 0,
        },
    };
    let mut ulpdu = Vec::new();
    header.emit(&mut ulpdu);
    request.emit(&mut ulpdu);
    Terminate::about(reason, &ulpdu)
}

/// Returns whether this is reported to the owner as an invalid key or access right.
pub(super) fn is_access_error(reason: Reason) -> bool {
    let (layer, etype, _) = reason.codes();
    // An invalid version is also an error of the DDP tagged buffer model.
    layer < 2 && etype == 1 && reason != Reason::DdpTaggedVersion
}

impl Responder {
    pub(super) fn new(max_recv_sge: u32) -> Self {
        Self {
            recv: RecvWqe::new(max_recv_sge),
            receiving: None,
            offset: 0,
            written: (0, true),
            responses: VecDeque::new(),
            is_sending: false,
            ird: 0,
            access: Access::empty(),
            send_msn: 1,
            read_msn: 1,
            response_msn: 1,
        }
    }

    /// Starts a connection with a limit of `ird` READs and atomics from the peer.
    pub(super) fn start(&mut self, ird: u16, access: Access) {
        self.receiving = None;
        self.written = (0, true);
        self.responses.clear();
        self.is_sending = false;
        (self.ird, self.access) = (ird, access);
        (self.send_msn, self.read_msn, self.response_msn) = (1, 1, 1);
    }

    pub(super) fn set_access(&mut self, access: Access) {
        self.access = access;
    }

    /// Returns true if a READ response was started and must be completed first.
    pub(super) fn is_sending(&self) -> bool {
        self.is_sending
    }

    /// Returns whether there are pending responses.
    pub(super) fn has_responses(&self) -> bool {
        !self.responses.is_empty()
    }

    /// Flushes receives: the current receive, and the queue if it is not shared.
    pub(super) fn flush(&mut self, cfg: &RdmapConfig, env: &mut Env<'_>) {
        if self.receiving.take().is_some() {
            self.recv_failed(cfg, env, WcStatus::WrFlushErr);
        }
        self.responses.clear();
        self.is_sending = false;
        // Don't flush a shared queue, since it is still used by other QPs.
        if !cfg.has_srq {
            while let Some(wr_id) = env.rq.pop_id() {
                let status = WcStatus::WrFlushErr;
                let flushed = Completion::new(wr_id, status, WcOpcode::Recv, cfg.qp, cfg.qp_num);
                env.out.push(RcEvent::Recv(flushed));
            }
        }
    }

    fn recv_failed(&mut self, cfg: &RdmapConfig, env: &mut Env<'_>, status: WcStatus) {
        self.receiving = None;
        let wr_id = self.recv.wr_id;
        let failed = Completion::new(wr_id, status, WcOpcode::Recv, cfg.qp, cfg.qp_num);
        env.out.push(RcEvent::Recv(failed));
    }

    /// Processes a segment for a receive.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_send(
        &mut self,
        cfg: &RdmapConfig,
        env: &mut Env<'_>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let Placement::Untagged {
            invalidate,
            msn,
            mo,
            ..
        } = header.place
        else {
            return Err(Reason::UnexpectedOpcode);
        };
        if msn != self.send_msn {
            return Err(Reason::InvalidMsn);
        }
        match self.receiving {
            // All segments of a message must use the same operation.
            Some(opcode) if opcode != header.opcode => return Err(Reason::UnexpectedOpcode),
            Some(_) => {}
            None => {
                if !env.rq.pop(&mut self.recv) {
                    return Err(Reason::NoBuffer);
                }
                self.receiving = Some(header.opcode);
                self.offset = 0;
            }
        }
        if mo != self.offset {
            return Err(Reason::InvalidMo);
        }
        let end = u64::from(self.offset) + payload.len() as u64;
        if end > self.recv.length.into() {
            self.recv_failed(cfg, env, WcStatus::LocLenErr);
            return Err(Reason::TooLong);
        }
        let offset = self.offset as usize;
        if self.recv.scatter(cfg.pd, env.mrs, offset, payload).is_err() {
            self.recv_failed(cfg, env, WcStatus::LocProtErr);
            return Err(Reason::DdpCatastrophic);
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the receive's length at most"
        )]
        {
            self.offset = end as u32;
        }
        if !header.last {
            return Ok(());
        }
        let invalidated = match header.opcode {
            Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate => Some(RKey(invalidate)),
            _ => None,
        };
        if let Some(key) = invalidated
            && env.mrs.invalidate(cfg.pd, cfg.qp, key).is_err()
        {
            self.recv_failed(cfg, env, WcStatus::LocAccessErr);
            return Err(Reason::CannotInvalidate);
        }
        self.send_msn = self.send_msn.wrapping_add(1);
        self.receiving = None;
        env.out.push(RcEvent::Recv(Completion {
            byte_len: self.offset,
            invalidated,
            solicited: header.opcode.is_solicited(),
            ..self.completion(cfg, WcOpcode::Recv)
        }));
        Ok(())
    }

    fn completion(&self, cfg: &RdmapConfig, opcode: WcOpcode) -> Completion {
        let (wr_id, status) = (self.recv.wr_id, WcStatus::Success);
        Completion::new(wr_id, status, opcode, cfg.qp, cfg.qp_num)
    }

    /// Processes immediate data, which belongs to the preceding WRITE.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_immediate(
        &mut self,
        cfg: &RdmapConfig,
        env: &mut Env<'_>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let data: [u8; IMMEDIATE_LEN] = payload.try_into().map_err(|_| Reason::Framing)?;
        let Placement::Untagged { msn, mo, .. } = header.place else {
            return Err(Reason::UnexpectedOpcode);
        };
        if self.receiving.is_some() || !header.last {
            return Err(Reason::UnexpectedOpcode);
        }
        if msn != self.send_msn {
            return Err(Reason::InvalidMsn);
        }
        if mo != 0 {
            return Err(Reason::InvalidMo);
        }
        if !env.rq.pop(&mut self.recv) {
            return Err(Reason::NoBuffer);
        }
        self.send_msn = self.send_msn.wrapping_add(1);
        // Verbs only use four bytes, stored in the lower half.
        #[expect(clippy::cast_possible_truncation, reason = "as it says")]
        let imm = u64::from_be_bytes(data) as u32;
        // A peer can also send immediate data without a WRITE.
        let (written, _) = std::mem::replace(&mut self.written, (0, true));
        env.out.push(RcEvent::Recv(Completion {
            byte_len: written,
            imm: Some(imm),
            solicited: header.opcode.is_solicited(),
            ..self.completion(cfg, WcOpcode::RecvWriteImm)
        }));
        Ok(())
    }

    /// Processes a WRITE segment.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_write(
        &mut self,
        cfg: &RdmapConfig,
        env: &mut Env<'_>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let Placement::Tagged { stag, to } = header.place else {
            return Err(Reason::UnexpectedOpcode);
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "an FPDU has less than 64 KiB"
        )]
        let len = payload.len() as u32;
        let before = if self.written.1 { 0 } else { self.written.0 };
        self.written = (before.saturating_add(len), header.last);
        // Like on InfiniBand, a zero-length WRITE requires neither access rights nor a key.
        if len == 0 {
            return Ok(());
        }
        let right = Access::REMOTE_WRITE;
        if !self.access.contains(right) {
            return Err(Reason::RdmapAccess);
        }
        let span = env
            .mrs
            .resolve_remote(cfg.pd, cfg.qp, RKey(stag), to, len, right)
            .map_err(|e| tagged_reason(e, to, len))?;
        span.write(0, payload);
        Ok(())
    }

    /// Checks the position of a request in its queue. Each request is a single segment.
    fn check_request(&self, header: &Header) -> Result<(), Reason> {
        let Placement::Untagged { msn, mo, .. } = header.place else {
            return Err(Reason::UnexpectedOpcode);
        };
        if msn != self.read_msn {
            return Err(Reason::InvalidMsn);
        }
        if mo != 0 {
            return Err(Reason::InvalidMo);
        }
        if !header.last {
            return Err(Reason::TooLong);
        }
        // The peer knows this limit.
        if self.responses.len() >= usize::from(self.ird) {
            return Err(Reason::NoBuffer);
        }
        Ok(())
    }

    /// Processes a READ request.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_read(
        &mut self,
        cfg: &RdmapConfig,
        mrs: &MrTable,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        self.check_request(header)?;
        let request = ReadRequest::parse(payload).ok_or(Reason::Framing)?;
        let (to, len, right) = (request.source_to, request.size, Access::REMOTE_READ);
        if len > MAX_MESSAGE {
            return Err(Reason::RdmapBounds);
        }
        if len > 0 {
            if !self.access.contains(right) {
                return Err(Reason::RdmapAccess);
            }
            // This is checked again for each response segment. We also check it here, so that an
            // invalid READ is reported with its own header.
            let key = RKey(request.source_stag);
            mrs.resolve_remote_head(cfg.pd, cfg.qp, key, to, len, 0, right)
                .map_err(|e| rdmap_reason(e, to, len))?;
        }
        let (msn, sent) = (self.read_msn, 0);
        self.responses
            .push_back(PendingResponse::Read { request, msn, sent });
        self.read_msn = msn.wrapping_add(1);
        Ok(())
    }

    /// Executes an atomic.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_atomic(
        &mut self,
        cfg: &RdmapConfig,
        mrs: &MrTable,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        self.check_request(header)?;
        let request = AtomicRequest::parse(payload).ok_or(Reason::UnexpectedOpcode)?;
        let (to, right) = (request.to, Access::REMOTE_ATOMIC);
        if !self.access.contains(right) {
            return Err(Reason::RdmapAccess);
        }
        if !to.is_multiple_of(8) {
            return Err(Reason::RdmapBounds);
        }
        let span = mrs
            .resolve_remote(cfg.pd, cfg.qp, RKey(request.stag), to, 8, right)
            .map_err(|e| rdmap_reason(e, to, 8))?;
        let mut bytes = [0; 8];
        let faults = fault::count();
        span.read(0, &mut bytes);
        // The memory uses host byte order.
        let original = u64::from_ne_bytes(bytes);
        span.write(0, &request.atomic.apply(original).to_ne_bytes());
        if fault::count() != faults {
            return Err(Reason::RdmapBounds);
        }
        self.read_msn = self.read_msn.wrapping_add(1);
        self.responses
            .push_back(PendingResponse::Atomic(AtomicResponse {
                id: request.id,
                original,
            }));
        Ok(())
    }

    /// Creates the next response segment.
    ///
    /// # Errors
    /// Returns the Terminate message for a request that cannot be processed.
    pub(super) fn poll(&mut self, tx: &mut Tx<'_>) -> Result<bool, Terminate> {
        let (request, msn, sent) = match self.responses.front_mut() {
            None => return Ok(false),
            Some(PendingResponse::Atomic(response)) => {
                let (response, msn) = (*response, self.response_msn);
                let queue = Queue::AtomicResponse;
                tx.message(Opcode::AtomicResponse, queue, msn, |out| response.emit(out));
                self.response_msn = msn.wrapping_add(1);
                self.responses.pop_front();
                return Ok(true);
            }
            Some(PendingResponse::Read { request, msn, sent }) => (*request, *msn, sent),
        };
        let offset = *sent;
        let place = Placement::Tagged {
            stag: request.sink_stag,
            to: request.sink_to.wrapping_add(offset.into()),
        };
        let room = tx.mulpdu - Header::len(place);
        let left = request.size - offset;
        #[expect(clippy::cast_possible_truncation, reason = "what is left at most")]
        let len = (left as usize).min(room) as u32;
        let header = Header {
            opcode: Opcode::ReadResponse,
            last: len == left,
            place,
        };
        let (cfg, key) = (tx.cfg, RKey(request.source_stag));
        let to = request.source_to.wrapping_add(offset.into());
        tx.segment(&header, |mrs, out| {
            // The owner may have invalidated the region since the request was received.
            let span = mrs.resolve_remote(cfg.pd, cfg.qp, key, to, len, Access::REMOTE_READ)?;
            span.append_to(0, len as usize, out);
            Ok(())
        })
        .map_err(|e| about_request(rdmap_reason(e, to, len), &request, msn))?;
        *sent += len;
        self.is_sending = !header.last;
        if header.last {
            self.responses.pop_front();
        }
        Ok(true)
    }
}

/// Returns the event used to report an error by the peer.
pub(super) fn event_of(cfg: &RdmapConfig, reason: Reason) -> AsyncEvent {
    match is_access_error(reason) {
        true => AsyncEvent::QpAccessError(cfg.qp),
        false => AsyncEvent::QpReqError(cfg.qp),
    }
}
