//! No RDMA device: for engines whose sessions all run on TCP.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_transport::verbs::{
    Access, AhAttr, AhId, AsyncEvent, CmError, CmEvent, CmId, Completion, ConnParam, CqId,
    DeviceAttr, Gid, Mr, MrAttr, MrId, Notify, PKey, PdId, PortAttr, PortSpace, PostError,
    PostReason, Provider, QpAttr, QpId, QpInitAttr, RdmaCm, RecvWr, SendWr, SrqAttr, SrqId, Verbs,
    VerbsError,
};

const NO: VerbsError = VerbsError::InvalidState("this engine has no RDMA device");
const NO_POST: PostError = PostError {
    index: 0,
    reason: PostReason::InvalidHandle,
};
const NO_CM: CmError = CmError::Verbs(NO);

/// A provider that refuses everything, and has nothing to do ever.
#[derive(Debug, Default)]
pub(super) struct NoDevice(DeviceAttr);

impl NoDevice {
    pub(super) fn new() -> Self {
        Self(DeviceAttr {
            name: "none".to_owned(),
            provider: "none",
            ..DeviceAttr::default()
        })
    }
}

impl Verbs for NoDevice {
    fn device_attr(&self) -> &DeviceAttr {
        &self.0
    }

    fn query_port(&self, _: u8) -> Result<PortAttr, VerbsError> {
        Err(NO)
    }

    fn query_gid(&self, _: u8, _: u16) -> Result<Gid, VerbsError> {
        Err(NO)
    }

    fn query_pkey(&self, _: u8, _: u16) -> Result<PKey, VerbsError> {
        Err(NO)
    }

    fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        Err(NO)
    }

    fn dealloc_pd(&mut self, _: PdId) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn reg_mr(&mut self, _: PdId, _: &MemSlice, _: Access) -> Result<Mr, VerbsError> {
        Err(NO)
    }

    fn query_mr(&self, _: MrId) -> Result<MrAttr, VerbsError> {
        Err(NO)
    }

    fn dereg_mr(&mut self, _: MrId) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn alloc_fast_mr(&mut self, _: PdId, _: u32) -> Result<Mr, VerbsError> {
        Err(NO)
    }

    fn map_mr_sg(&mut self, _: MrId, _: &[MemSlice]) -> Result<u64, VerbsError> {
        Err(NO)
    }

    fn create_cq(&mut self, _: u32) -> Result<CqId, VerbsError> {
        Err(NO)
    }

    fn resize_cq(&mut self, _: CqId, _: u32) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn destroy_cq(&mut self, _: CqId) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn poll_cq(&mut self, _: CqId, _: usize, _: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        Err(NO)
    }

    fn peek_cq(&self, _: CqId, _: usize) -> Result<usize, VerbsError> {
        Err(NO)
    }

    fn req_notify_cq(&mut self, _: CqId, _: Notify) -> Result<bool, VerbsError> {
        Err(NO)
    }

    fn create_srq(&mut self, _: PdId, _: SrqAttr) -> Result<SrqId, VerbsError> {
        Err(NO)
    }

    fn modify_srq(&mut self, _: SrqId, _: Option<u32>, _: Option<u32>) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn query_srq(&self, _: SrqId) -> Result<SrqAttr, VerbsError> {
        Err(NO)
    }

    fn destroy_srq(&mut self, _: SrqId) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn create_qp(&mut self, _: &QpInitAttr) -> Result<QpId, VerbsError> {
        Err(NO)
    }

    fn qp_num(&self, _: QpId) -> Result<u32, VerbsError> {
        Err(NO)
    }

    fn modify_qp(&mut self, _: QpId, _: &QpAttr) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn query_qp(&self, _: QpId) -> Result<QpAttr, VerbsError> {
        Err(NO)
    }

    fn destroy_qp(&mut self, _: QpId) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn create_ah(&mut self, _: PdId, _: AhAttr) -> Result<AhId, VerbsError> {
        Err(NO)
    }

    fn destroy_ah(&mut self, _: AhId) -> Result<(), VerbsError> {
        Err(NO)
    }

    fn post_srq_recv(&mut self, _: SrqId, _: &[RecvWr<'_>]) -> Result<(), PostError> {
        Err(NO_POST)
    }

    fn post_send(&mut self, _: QpId, _: &[SendWr<'_>]) -> Result<(), PostError> {
        Err(NO_POST)
    }

    fn post_recv(&mut self, _: QpId, _: &[RecvWr<'_>]) -> Result<(), PostError> {
        Err(NO_POST)
    }

    fn poll_async_event(&mut self) -> Option<AsyncEvent> {
        None
    }

    fn poll_cq_event(&mut self) -> Option<CqId> {
        None
    }
}

impl RdmaCm for NoDevice {
    fn create_id(&mut self, _: PortSpace) -> Result<CmId, CmError> {
        Err(NO_CM)
    }

    fn bind_addr(&mut self, _: CmId, _: SocketAddr) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn resolve_addr(
        &mut self,
        _: CmId,
        _: Option<SocketAddr>,
        _: SocketAddr,
        _: Duration,
    ) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn resolve_route(&mut self, _: CmId, _: Duration) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn create_cm_qp(&mut self, _: CmId, _: &QpInitAttr) -> Result<QpId, CmError> {
        Err(NO_CM)
    }

    fn listen(&mut self, _: CmId, _: u32) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn connect(&mut self, _: CmId, _: &ConnParam) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn accept(&mut self, _: CmId, _: &ConnParam) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn reject(&mut self, _: CmId, _: &[u8]) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn mra(&mut self, _: CmId) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn notify_established(&mut self, _: CmId) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn disconnect(&mut self, _: CmId) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn destroy_id(&mut self, _: CmId) -> Result<(), CmError> {
        Err(NO_CM)
    }

    fn local_addr(&self, _: CmId) -> Option<SocketAddr> {
        None
    }

    fn peer_addr(&self, _: CmId) -> Option<SocketAddr> {
        None
    }

    fn poll_cm_event(&mut self) -> Option<CmEvent> {
        None
    }
}

impl Provider for NoDevice {
    fn progress(&mut self, _: Instant) -> usize {
        0
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn event_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }
}
