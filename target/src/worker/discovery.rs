//! Device-management agent. Used by initiators to find targets in a network without a subnet
//! manager. There is a slot for each I/O controller, and a service for each of its portals. Hosts
//! that only know a subnet administrator find the port there ([`Registration`]).

use std::net::IpAddr;
use std::time::Instant;

use riser_memory::{MemSlice, Memory};
use riser_transport::verbs::{
    Access, AhAttr, CmError, CqId, Gid, LKey, MrId, Notify, PdId, PollContext, PortCapabilities,
    Provider, QKey, QpCap, QpId, QpInitAttr, QpType, RecvWr, SendFlags, SendOp, SendWr, Sge,
    UdDest, VerbsError, WrId, make_gsi_ready,
};
use riser_transport::wire::Qpn;
use riser_transport::wire::dm::{
    Attribute, ClassPortInfo, DmHeader, IoUnitInfo, IocProfile, MAD_LEN, Method, SERVICES_PER_MAD,
    ServiceEntry, Status,
};

use super::registration::Registration;
use crate::sessions::catalog::TargetDef;

/// Maximum number of pending requests.
const DEPTH: u32 = 32;

/// Size of the header before a received datagram, in bytes.
const GRH: usize = 40;

/// Number of slots in our I/O unit.
const SLOTS: u8 = 16;

/// I/O controller and its services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Controller {
    profile: IocProfile,
    services: Vec<ServiceEntry>,
}

/// I/O unit of a device, in slot order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct IoUnit {
    controllers: Vec<Controller>,
}

impl IoUnit {
    /// Creates the I/O unit for the targets available on a device.
    pub(super) fn new(
        targets: &[TargetDef],
        ip: std::net::IpAddr,
        login: crate::srp::LoginLimits,
    ) -> Self {
        let mut controllers: Vec<Controller> = Vec::new();
        for target in targets {
            for portal in target.portals.iter().filter(|p| p.listen.ip() == ip) {
                let services = [
                    ServiceEntry::srp_at_port(portal.id_ext, portal.listen.port()),
                    ServiceEntry::srp(portal.id_ext, portal.service_id),
                ];
                // Portals with the same GUID are added to the same controller as different
                // services.
                let known = controllers
                    .iter_mut()
                    .find(|c| c.profile.guid == portal.ioc_guid);
                if let Some(controller) = known {
                    controller.services.extend(services);
                    continue;
                }
                controllers.push(Controller {
                    profile: IocProfile {
                        guid: portal.ioc_guid,
                        send_queue_depth: login.req_lim as u16,
                        read_depth: 16,
                        send_size: login.max_it_iu_len,
                        rdma_size: u32::MAX,
                        services: 0,
                        name: target.config.name.clone(),
                    },
                    services: services.into(),
                });
            }
        }
        // If there are more targets, they can be used but not discovered.
        controllers.truncate(usize::from(SLOTS));
        for controller in &mut controllers {
            controller.services.truncate(255);
            controller.profile.services = controller.services.len() as u8;
        }
        Self { controllers }
    }

    /// Returns the response to a request, or `None` if this is not a valid request.
    pub(super) fn response_to(&self, mad: &[u8]) -> Option<[u8; MAD_LEN]> {
        let (request, _) = DmHeader::parse(mad).ok()?;
        let (status, data) = match request.method {
            Method::Get => match self.attribute(request.attribute) {
                Ok(data) => (Status::Success, data),
                Err(status) => (status, Vec::new()),
            },
            // This is already a response.
            Method::GetResp => return None,
            Method::Other(code) if code & 0x80 != 0 => return None,
            Method::Other(_) => (Status::UnsupportedMethod, Vec::new()),
        };
        let reply = DmHeader {
            method: Method::GetResp,
            status,
            ..request
        };
        Some(reply.emit(&data))
    }

    fn attribute(&self, attribute: Attribute) -> Result<Vec<u8>, Status> {
        match attribute {
            Attribute::ClassPortInfo => Ok(ClassPortInfo { response_time: 18 }.emit().to_vec()),
            Attribute::IoUnitInfo => {
                let n = self.controllers.len() as u8;
                Ok(IoUnitInfo::new(1, SLOTS, n).emit().to_vec())
            }
            Attribute::IocProfile { slot } => Ok(self.controller(slot)?.profile.emit().to_vec()),
            Attribute::ServiceEntries { slot, first, last } => {
                let services = &self.controller(u32::from(slot))?.services;
                let range = usize::from(first)..usize::from(last) + 1;
                if first > last || range.len() > SERVICES_PER_MAD || range.start >= services.len() {
                    return Err(Status::InvalidField);
                }
                let end = range.end.min(services.len());
                Ok(ServiceEntry::emit_list(&services[range.start..end]).to_vec())
            }
            Attribute::Other { .. } => Err(Status::UnsupportedAttribute),
        }
    }

    fn controller(&self, slot: u32) -> Result<&Controller, Status> {
        if !(1..=u32::from(SLOTS)).contains(&slot) {
            return Err(Status::InvalidField);
        }
        self.controllers
            .get(slot as usize - 1)
            .ok_or(Status::NoController)
    }
}

/// Agent for queue pair 1 of a device.
#[derive(Debug)]
pub(super) struct DiscoveryAgent {
    unit: IoUnit,
    pd: PdId,
    cq: CqId,
    qp: QpId,
    lkey: LKey,
    /// Memory for receives, followed by a send buffer for each of them and for the registration.
    memory: MemSlice,
    /// Registration with a subnet administrator, if there is one.
    registration: Option<Registration>,
    /// A request of the registration is being sent.
    is_registering: bool,
}

const RECV_LEN: usize = GRH + MAD_LEN;
const SEND_BASE: usize = DEPTH as usize * RECV_LEN;

/// Slot of the registration, which has no receive.
const REGISTRATION: usize = DEPTH as usize;

/// Maximum number of pending sends.
const SENDS: u32 = DEPTH + 1;

/// Objects created before an error.
#[derive(Debug, Default)]
struct Made {
    mr: Option<MrId>,
    cq: Option<CqId>,
    qp: Option<QpId>,
}

impl Made {
    /// Creates the objects in a protection domain.
    fn fill(
        &mut self,
        dev: &mut dyn Provider,
        pd: PdId,
        memory: &MemSlice,
    ) -> Result<(CqId, QpId, LKey), CmError> {
        let mr = dev.reg_mr(pd, memory, Access::LOCAL_WRITE)?;
        self.mr = Some(mr.id);
        // All receives and sends can complete before we poll the queue.
        let cq = dev.create_cq(DEPTH + SENDS)?;
        self.cq = Some(cq);
        let qp = dev.create_qp(&QpInitAttr {
            sq_sig_all: true,
            ..QpInitAttr::new(pd, cq, QpType::Gsi, QpCap::new(SENDS, DEPTH))
        })?;
        self.qp = Some(qp);
        make_gsi_ready(dev, qp)?;
        dev.req_notify_cq(cq, Notify::Next)?;
        dev.modify_port(
            1,
            PortCapabilities::DEVICE_MANAGEMENT,
            PortCapabilities::empty(),
        )?;
        Ok((cq, qp, mr.lkey))
    }

    /// Destroys the objects in reverse order. There can be no pending work requests.
    fn destroy(self, dev: &mut dyn Provider) {
        if let Some(qp) = self.qp {
            let _ = dev.destroy_qp(qp);
        }
        if let Some(cq) = self.cq {
            let _ = dev.destroy_cq(cq);
        }
        if let Some(mr) = self.mr {
            let _ = dev.dereg_mr(mr);
        }
    }
}

impl DiscoveryAgent {
    /// Creates the agent for a device. If this fails, all objects are destroyed, so that the device
    /// can be used for connections but without discovery.
    ///
    /// # Errors
    /// Returns an error if the device can't create the objects.
    pub(super) fn start(dev: &mut dyn Provider, unit: IoUnit) -> Result<Self, CmError> {
        let len = SEND_BASE + SENDS as usize * MAD_LEN;
        let memory = Memory::new(len)
            .map_err(|e| VerbsError::Os(e.raw_os_error().unwrap_or(0)))?
            .whole();
        let pd = dev.alloc_pd()?;
        let mut made = Made::default();
        let (cq, qp, lkey) = match made.fill(dev, pd, &memory) {
            Ok(objects) => objects,
            Err(error) => {
                made.destroy(dev);
                let _ = dev.dealloc_pd(pd);
                return Err(error);
            }
        };
        let agent = Self {
            unit,
            pd,
            cq,
            qp,
            lkey,
            memory,
            registration: None,
            is_registering: false,
        };
        for slot in 0..DEPTH as usize {
            agent.post_recv(dev, slot);
        }
        Ok(agent)
    }

    /// Updates the I/O unit.
    pub(super) fn follow(&mut self, unit: IoUnit) {
        self.unit = unit;
    }

    /// Registers the port with a subnet administrator, or with none. The registration with a
    /// previous administrator expires.
    pub(super) fn register(&mut self, dev: &dyn Provider, administrator: Option<IpAddr>) {
        let current = self.registration.as_ref().map(Registration::administrator);
        if current == administrator {
            return;
        }
        self.registration = administrator.and_then(|administrator| {
            let mut first = [0; 4];
            getrandom::fill(&mut first).expect("the system has random numbers");
            let capabilities = dev.query_port(1).ok()?.capabilities;
            let first = u32::from_ne_bytes(first);
            Some(Registration::new(administrator, capabilities, first))
        });
    }

    /// Returns the time of the next call to [`Self::poll_registration`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        // The completion of a send wakes the worker.
        let registration = self.registration.as_ref().filter(|_| !self.is_registering);
        registration.and_then(Registration::deadline)
    }

    /// Sends the next request of the registration. Returns true if there was one.
    pub(super) fn poll_registration(&mut self, dev: &mut dyn Provider, now: Instant) -> bool {
        let Some(registration) = self.registration.as_mut().filter(|_| !self.is_registering) else {
            return false;
        };
        let administrator = registration.administrator();
        let Some(mad) = registration.poll(now) else {
            return false;
        };
        self.is_registering = self.send(dev, REGISTRATION, administrator.into(), Qpn::GSI, &mad);
        true
    }

    fn sge(&self, offset: usize, len: usize) -> [Sge; 1] {
        [Sge {
            addr: self.memory.addr() + offset as u64,
            length: len as u32,
            lkey: self.lkey,
        }]
    }

    fn post_recv(&self, dev: &mut dyn Provider, slot: usize) {
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &self.sge(slot * RECV_LEN, RECV_LEN),
        };
        if let Err(error) = dev.post_recv(self.qp, &[wr]) {
            tracing::warn!(%error, "cannot post a receive for discovery; fewer requests are handled at once");
        }
    }

    /// Processes received requests and sends the responses.
    ///
    /// Calls `report` for each initiator that requests the list of controllers, with the number of
    /// controllers.
    pub(super) fn poll(
        &mut self,
        dev: &mut dyn Provider,
        cq: CqId,
        now: Instant,
        report: &mut dyn FnMut(IpAddr, usize),
    ) {
        if cq != self.cq {
            return;
        }
        let mut completions = Vec::new();
        loop {
            completions.clear();
            let n = PollContext::Workqueue.poll(dev, self.cq, &mut completions);
            for completion in &completions {
                let slot = completion.wr_id.0 as usize;
                if slot == REGISTRATION {
                    self.is_registering = false;
                    continue;
                }
                let responded = completion.opcode.is_recv()
                    && completion.status.is_ok()
                    && self.respond(
                        dev,
                        slot,
                        completion.byte_len as usize,
                        completion.src_qp,
                        now,
                        report,
                    );
                if !responded {
                    // If the send is complete, or there is nothing to send, use the slot for the
                    // next request.
                    self.post_recv(dev, slot);
                }
            }
            if !n.is_ok_and(|n| PollContext::Workqueue.has_more(dev, self.cq, n)) {
                break;
            }
        }
    }

    /// Sends a response to a request. Returns false if there is none.
    fn respond(
        &mut self,
        dev: &mut dyn Provider,
        slot: usize,
        len: usize,
        src_qp: u32,
        now: Instant,
        report: &mut dyn FnMut(IpAddr, usize),
    ) -> bool {
        let mut bytes = [0; RECV_LEN];
        self.memory.read(slot * RECV_LEN, &mut bytes);
        let Some(mad) = bytes.get(GRH..len.clamp(GRH, RECV_LEN)) else {
            return false;
        };
        let source = source_gid(&bytes[..GRH]);
        if let Some(registration) = &mut self.registration {
            registration.handle_mad(now, source, mad);
        }
        let Some(reply) = self.unit.response_to(mad) else {
            return false;
        };
        if is_first_question(mad) {
            report(source.ip(), self.unit.controllers.len());
        }
        self.send(dev, slot, source, Qpn::new(src_qp), &reply)
    }

    /// Sends a MAD from the buffer of a slot. Returns false if this is not possible.
    fn send(
        &self,
        dev: &mut dyn Provider,
        slot: usize,
        to: Gid,
        qpn: Qpn,
        mad: &[u8; MAD_LEN],
    ) -> bool {
        let at = SEND_BASE + slot * MAD_LEN;
        self.memory.write(at, mad);
        let Ok(ah) = dev.create_ah(self.pd, AhAttr::new(to)) else {
            return false;
        };
        let wr = SendWr {
            wr_id: WrId(slot as u64),
            op: SendOp::Send,
            sges: &self.sge(at, MAD_LEN),
            inline: None,
            remote_srqn: None,
            flags: SendFlags::SIGNALED,
            ud: Some(UdDest {
                ah,
                qpn: qpn.value(),
                qkey: QKey::GSI,
            }),
        };
        let sent = dev.post_send(self.qp, &[wr]).is_ok();
        // The address handle is no longer needed after the send was posted.
        let _ = dev.destroy_ah(ah);
        sent
    }
}

/// Returns true if this is the first request of a discovery.
fn is_first_question(mad: &[u8]) -> bool {
    DmHeader::parse(mad).is_ok_and(|(request, _)| {
        request.method == Method::Get && request.attribute == Attribute::IoUnitInfo
    })
}

/// Returns the sender of a datagram: the source address of the IPv6 header, or of the IPv4 header
/// in the last 20 bytes.
fn source_gid(grh: &[u8]) -> Gid {
    if grh[0] >> 4 == 6 {
        Gid(grh[8..24].try_into().expect("sixteen bytes"))
    } else {
        let v4: [u8; 4] = grh[32..36].try_into().expect("four bytes");
        Gid::from(std::net::IpAddr::from(v4))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use riser_transport::loopback::{Fabric, FabricConfig};

    use super::*;

    #[test]
    fn agent_sets_port_capability() {
        let fabric = Fabric::new(FabricConfig::default());
        let mut dev = fabric.endpoint(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        let has_agent = |dev: &dyn Provider| {
            let port = dev.query_port(1).unwrap();
            port.capabilities
                .contains(PortCapabilities::DEVICE_MANAGEMENT)
        };
        assert!(!has_agent(&dev));
        DiscoveryAgent::start(&mut dev, IoUnit::default()).unwrap();
        assert!(has_agent(&dev));
    }

    #[test]
    fn failed_start_leaves_device_unchanged() {
        let fabric = Fabric::new(FabricConfig::default());
        let mut dev = fabric.endpoint(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        DiscoveryAgent::start(&mut dev, IoUnit::default()).unwrap();
        let before = dev.usage();
        // There is only one queue pair 1.
        for _ in 0..3 {
            DiscoveryAgent::start(&mut dev, IoUnit::default()).unwrap_err();
        }
        assert_eq!(dev.usage(), before);
    }
}
