//! Work requests that leave together at the end of a round.
//!
//! A device takes a list of requests with one doorbell, which is a system call with some. So what a
//! round asks of a queue pair is collected, and posted as one list of receives and one of requests.
//!
//! # Bounds
//! The queue's own: who asks for a request has counted it before ([`RdmaLimits`]).
//!
//! [`RdmaLimits`]: super::RdmaLimits

use std::ops::Range;

use arrayvec::ArrayVec;
use riser_transport::verbs::{
    PostError, Provider, QpId, RecvWr, SendFlags, SendOp, SendWr, Sge, WrId,
};

/// Requests of one list. It lies on the stack, so that posting allocates nothing.
const LIST: usize = 64;

/// What waits for one queue pair. The memory is kept from round to round.
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

    /// Posts everything, and forgets it whether or not the device has taken it: of a list that
    /// failed in the middle nothing is posted again, since the connection ends.
    ///
    /// # Errors
    /// The device has refused a request, and those behind it have not been posted.
    pub(super) fn post<P: Provider>(
        &mut self,
        provider: &mut P,
        qp: QpId,
    ) -> Result<(), PostError> {
        // Receives first: a request may bring the message that takes one.
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
