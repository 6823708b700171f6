//! Ports of hosts and their capabilities.
//!
//! A subnet manager reads the PortInfo of each port, but RoCE has no subnet management. A host
//! therefore registers the CapabilityMask of its port with SubnAdmSet(PortInfoRecord), which
//! subnet administration does not define otherwise. A registration expires after [`LIFETIME`] unless
//! it is renewed. All other ports only support communication management.

use std::time::{Duration, Instant};

use riser_transport::nic::device_guid;
use riser_transport::verbs::{Gid, Mtu, PortCapabilities};
use riser_transport::wire::Mad;
use riser_transport::wire::mad::BASE_VERSION;
use riser_transport::wire::smp::{self, NodeInfo, PortInfo};
use zerocopy::FromZeros as _;
use zerocopy::big_endian::{U16, U32, U64};

use super::super::wire::SaStatus;
use super::super::wire::node::{NodeRecord, PortInfoMask, PortInfoRecord};
use super::{RESPONSE_TIME, Refusal, request};

/// Time after which a registration expires.
pub(super) const LIFETIME: Duration = Duration::from_secs(300);

struct Port {
    gid: Gid,
    capabilities: PortCapabilities,
    /// Expiration time of the registration.
    until: Instant,
}

/// Ports with registered capabilities, at most one per host.
#[derive(Default)]
pub(super) struct Ports {
    all: Vec<Port>,
}

impl Ports {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the hosts of all ports.
    pub(super) fn hosts(&self) -> impl Iterator<Item = Gid> {
        self.all.iter().map(|port| port.gid)
    }

    /// Returns the capabilities of a port.
    pub(super) fn capabilities(&self, gid: Gid) -> PortCapabilities {
        let port = self.all.iter().find(|port| port.gid == gid);
        port.map_or(PortCapabilities::COMMUNICATION_MANAGEMENT, |port| {
            port.capabilities
        })
    }

    /// Removes the registration of a host.
    pub(super) fn remove(&mut self, gid: Gid) {
        self.all.retain(|port| port.gid != gid);
    }

    /// Returns requests that repeat the registrations.
    pub(super) fn requests(&self) -> impl Iterator<Item = (Gid, Mad)> {
        self.all.iter().map(|port| {
            let mut record = PortInfoRecord::new_zeroed();
            record.info.capabilities = U32::new(port.capabilities.bits());
            let mask = PortInfoMask::CAPABILITIES.bits();
            (port.gid, request(mask, &record))
        })
    }

    /// Registers the capabilities of the requesting port, or renews its registration.
    pub(super) fn register(
        &mut self,
        now: Instant,
        from: Gid,
        mask: PortInfoMask,
        record: &PortInfoRecord,
    ) -> Result<(), Refusal> {
        if !mask.contains(PortInfoMask::CAPABILITIES) {
            return Err(SaStatus::InsufficientComponents.into());
        }
        // The remaining fields of a port are not up to its host.
        if mask != PortInfoMask::CAPABILITIES {
            return Err(SaStatus::ReqInvalid.into());
        }
        self.remove(from);
        self.all.push(Port {
            gid: from,
            capabilities: PortCapabilities::from_bits_retain(record.info.capabilities.get()),
            until: now + LIFETIME,
        });
        Ok(())
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.all.iter().map(|port| port.until).min()
    }

    /// Removes expired registrations.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.all.retain(|port| port.until > now);
    }
}

/// Returns the high and low half of a GID.
fn halves(gid: Gid) -> (u64, u64) {
    let gid = u128::from_be_bytes(gid.0);
    ((gid >> 64) as u64, gid as u64)
}

/// Builds the record of a host, which is a channel adapter with one port.
pub(super) fn node_record(gid: Gid, lid: u16) -> NodeRecord {
    const CHANNEL_ADAPTER: u8 = 1;
    let guid = U64::new(device_guid(gid.ip()));
    let mut description = [0; 64];
    let name = gid.ip().to_string();
    description[..name.len()].copy_from_slice(name.as_bytes());
    NodeRecord {
        lid: U16::new(lid),
        reserved: U16::ZERO,
        info: NodeInfo {
            base_version: BASE_VERSION,
            class_version: smp::CLASS_VERSION,
            node_type: CHANNEL_ADAPTER,
            ports: 1,
            system_image_guid: guid,
            node_guid: guid,
            port_guid: U64::new(halves(gid).1),
            partition_cap: U16::new(1),
            device_id: U16::ZERO,
            revision: U32::ZERO,
            port_and_vendor: U32::new(1 << 24),
        },
        description,
    }
}

/// Builds the record of a port. `lids` are the LIDs of the port and of the administrator.
pub(super) fn port_info_record(
    gid: Gid,
    lids: [u16; 2],
    mtu: Mtu,
    capabilities: PortCapabilities,
) -> PortInfoRecord {
    /// Active and linked; one lane of 2.5 Gbit/s, the lowest encodable value.
    const ACTIVE: u8 = 4;
    const LINKED: u8 = 5;
    let mut info = PortInfo::default();
    info.gid_prefix = U64::new(halves(gid).0);
    [info.lid, info.master_sm_lid] = lids.map(U16::new);
    info.capabilities = U32::new(capabilities.bits());
    info.local_port = 1;
    info.link_width_enabled = 1;
    info.link_width_supported = 1;
    info.link_width_active = 1;
    info.speed_supported_and_state = 1 << 4 | ACTIVE;
    info.physical_state = LINKED << 4 | 2;
    info.speed_active_and_enabled = 1 << 4 | 1;
    info.neighbor_mtu = mtu.code() << 4;
    info.vl_cap = 1 << 4;
    info.mtu_cap = mtu.code();
    info.operational_vls = 1 << 4;
    info.guid_cap = 1;
    info.response_time = RESPONSE_TIME;
    PortInfoRecord {
        lid: info.lid,
        port: 1,
        options: 0,
        info,
    }
}
