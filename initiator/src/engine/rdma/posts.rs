//! Work requests posted together at the end of a round.
//!
//! A device accepts a list of requests with one doorbell, which is a system call on some devices.
//! So requests for a queue pair are collected during a round, and posted as one list of receives
//! and one list of sends.
//!
//! # Bounds
//! Bounded by the queue pair: the caller reserves an entry for each request ([`RdmaLimits`]).
//!
//! [`RdmaLimits`]: super::RdmaLimits

use std::ops::Range;

use arrayvec::ArrayVec;
use riser_transport::verbs::{
    PostError, Provider, QpId, RecvWr, SendFlags, SendOp, SendWr, Sge, WrId,
};

/// Maximum number of requests per list. The list is on the stack, so posting does not allocate.
const LIST: usize = 64;

/// Queued requests of a queue pair. The memory is reused in every round.
#[derive(Debug, Default)]
pub(super) struct Posts {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    receives: Vec<(WrId, Sge)>,
}

#[derive(Debug)]
struct Request {
    id: WrId,
    op: SendOp,
    flags: SendFlags,
    sges: Range<usize>,
}

impl Posts {
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.receives.is_empty()
    }

    pub(super) fn push_send(&mut self, wr: &SendWr<'_>) {
        let first = self.sges.len();
        self.sges.extend_from_slice(wr.sges);
        self.requests.push(Request {
            id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            sges: first..self.sges.len(),
        });
    }

    pub(super) fn push_recv(&mut self, id: WrId, sge: Sge) {
        self.receives.push((id, sge));
    }

    /// Posts all requests and clears the queue, even on error: if a list fails in the middle, it is
    /// not posted again, because the connection is broken.
    ///
    /// # Errors
    /// The device rejected a request. The following requests were not posted.
    pub(super) fn post<P: Provider>(
        &mut self,
        provider: &mut P,
        qp: QpId,
    ) -> Result<(), PostError> {
        // Receives first, because the peer may respond immediately to a request.
        let posted = self.post_receives(provider, qp);
        let posted = posted.and_then(|()| self.post_requests(provider, qp));
        self.requests.clear();
        self.sges.clear();
        self.receives.clear();
        posted
    }

    fn post_receives<P: Provider>(&self, provider: &mut P, qp: QpId) -> Result<(), PostError> {
        for list in self.receives.chunks(LIST) {
            let mut wrs: ArrayVec<RecvWr<'_>, LIST> = ArrayVec::new();
            wrs.extend(list.iter().map(|(id, sge)| RecvWr {
                wr_id: *id,
                sges: std::slice::from_ref(sge),
            }));
            provider.post_recv(qp, &wrs)?;
        }
        Ok(())
    }

    fn post_requests<P: Provider>(&self, provider: &mut P, qp: QpId) -> Result<(), PostError> {
        for list in self.requests.chunks(LIST) {
            let mut wrs: ArrayVec<SendWr<'_>, LIST> = ArrayVec::new();
            wrs.extend(list.iter().map(|request| SendWr {
                wr_id: request.id,
                op: request.op,
                sges: &self.sges[request.sges.clone()],
                inline: None,
                remote_srqn: None,
                flags: request.flags,
                ud: None,
            }));
            provider.post_send(qp, &wrs)?;
        }
        Ok(())
    }
}
