//! REQ: a request for a connection, and the paths it offers.

use zerocopy::byteorder::big_endian::{U16, U32, U64};

use super::fields::{Bits, CaGuid, CmTimeout, CommId, PrivateData, ServiceId, TransportType};
use super::raw::{LapRaw, PathRaw, ReqRaw};
use crate::verbs::{Gid, Mtu, PKey, QpType};
use crate::wire::ids::{Psn, Qpn, U24};

/// A path between two ports (IBTA 12.7). "Local" is the side that
/// sends the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CmPath {
    /// Local LID; 0xffff on RoCE.
    pub local_lid: u16,
    /// Remote LID; 0xffff on RoCE.
    pub remote_lid: u16,
    /// Local GID; on RoCE the IP address.
    pub local_gid: Gid,
    /// GID of the remote port.
    pub remote_gid: Gid,
    /// Flow label of the IPv6 header.
    pub flow_label: Bits<20>,
    /// Static rate, as a code of six bits.
    pub packet_rate: Bits<6>,
    /// Traffic class of the IP header.
    pub traffic_class: u8,
    /// Hop limit of the IP header.
    pub hop_limit: u8,
    /// Service level of the path.
    pub service_level: Bits<4>,
    /// Both ports are on one subnet, with no router between.
    pub subnet_local: bool,
    /// Time the local side needs to acknowledge, with the packet's lifetime:
    /// what the remote queue pair should use as its ACK timeout.
    pub ack_timeout: CmTimeout,
}

/// The LID of every port on RoCE.
const PERMISSIVE_LID: u16 = 0xffff;

impl CmPath {
    /// A RoCE path between two GIDs as Linux describes one: permissive LIDs,
    /// hop limit 64.
    #[must_use]
    pub fn roce(local: Gid, remote: Gid, ack_timeout: CmTimeout) -> Self {
        Self {
            local_lid: PERMISSIVE_LID,
            remote_lid: PERMISSIVE_LID,
            local_gid: local,
            remote_gid: remote,
            hop_limit: 64,
            ack_timeout,
            ..Self::default()
        }
    }

    fn parse(raw: &PathRaw) -> Self {
        let flow_rate = raw.flow_rate.get();
        Self {
            local_lid: raw.local_lid.get(),
            remote_lid: raw.remote_lid.get(),
            local_gid: Gid(raw.local_gid),
            remote_gid: Gid(raw.remote_gid),
            flow_label: Bits::truncate(flow_rate >> 12),
            packet_rate: Bits::truncate(flow_rate),
            traffic_class: raw.traffic_class,
            hop_limit: raw.hop_limit,
            service_level: Bits::truncate(u32::from(raw.sl_local >> 4)),
            subnet_local: raw.sl_local & 0x08 != 0,
            ack_timeout: CmTimeout::new(raw.ack_timeout >> 3),
        }
    }

    fn emit(&self) -> PathRaw {
        PathRaw {
            local_lid: U16::new(self.local_lid),
            remote_lid: U16::new(self.remote_lid),
            local_gid: self.local_gid.0,
            remote_gid: self.remote_gid.0,
            flow_rate: U32::new(self.flow_label.value() << 12 | self.packet_rate.value()),
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            sl_local: self.service_level.byte() << 4 | u8::from(self.subnet_local) << 3,
            ack_timeout: self.ack_timeout.exponent() << 3,
        }
    }

    /// A LAP lays the same fields out differently.
    pub(super) fn parse_lap(raw: &LapRaw) -> Self {
        let flow_class = raw.flow_class.get();
        Self {
            local_lid: raw.local_lid.get(),
            remote_lid: raw.remote_lid.get(),
            local_gid: Gid(raw.local_gid),
            remote_gid: Gid(raw.remote_gid),
            flow_label: Bits::truncate(flow_class >> 12),
            packet_rate: Bits::truncate(u32::from(raw.rate)),
            traffic_class: (flow_class & 0xff) as u8,
            hop_limit: raw.hop_limit,
            service_level: Bits::truncate(u32::from(raw.sl_local >> 4)),
            subnet_local: raw.sl_local & 0x08 != 0,
            ack_timeout: CmTimeout::new(raw.ack_timeout >> 3),
        }
    }

    pub(super) fn emit_lap(&self, raw: &mut LapRaw) {
        raw.local_lid = U16::new(self.local_lid);
        raw.remote_lid = U16::new(self.remote_lid);
        raw.local_gid = self.local_gid.0;
        raw.remote_gid = self.remote_gid.0;
        raw.flow_class = U32::new(self.flow_label.value() << 12 | u32::from(self.traffic_class));
        raw.hop_limit = self.hop_limit;
        raw.rate = self.packet_rate.byte();
        raw.sl_local = self.service_level.byte() << 4 | u8::from(self.subnet_local) << 3;
        raw.ack_timeout = self.ack_timeout.exponent() << 3;
    }
}

/// REQ, a request for a connection (IBTA 12.6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReqMsg {
    /// The requester's id for the connection.
    pub local_comm_id: CommId,
    /// IEEE vendor id of the requester, for vendor options; usually 0.
    pub vendor_id: Bits<24>,
    /// ServiceID that is asked for.
    pub service_id: ServiceId,
    /// The requester's channel adapter.
    pub ca_guid: CaGuid,
    /// Queue key, for datagram services.
    pub qkey: u32,
    /// The requester's queue pair.
    pub qpn: Qpn,
    /// READs and atomics the requester can answer at a time.
    pub responder_resources: u8,
    /// READs and atomics the requester may have outstanding.
    pub initiator_depth: u8,
    /// The requester's end-to-end context; reliable datagram only.
    pub local_eecn: Bits<24>,
    /// The responder's end-to-end context; reliable datagram only.
    pub remote_eecn: Bits<24>,
    /// Time that the requester waits for an answer before it sends again.
    pub remote_cm_timeout: CmTimeout,
    /// Transport service of the connection.
    pub transport: TransportType,
    /// The requester's queue pair sends end-to-end credits.
    pub flow_control: bool,
    /// The PSN with which the **receiver** of this message begins to send.
    pub starting_psn: Psn,
    /// Time in which the requester answers CM messages.
    pub local_cm_timeout: CmTimeout,
    /// Transport retries that the responder's queue pair should make.
    pub retry_count: Bits<3>,
    /// Partition key of the connection.
    pub pkey: PKey,
    /// Path MTU; `None` for codes that no MTU has.
    pub path_mtu: Option<Mtu>,
    /// A reliable datagram channel exists already.
    pub rdc_exists: bool,
    /// RNR retries that the responder's queue pair should make; 7 is forever.
    pub rnr_retry_count: Bits<3>,
    /// Repetitions of a CM message before the requester gives up.
    pub max_cm_retries: Bits<4>,
    /// The requester's queue pair uses a shared receive queue.
    pub srq: bool,
    /// Extended transport type, if [`TransportType::Extended`].
    pub extended_transport: Bits<3>,
    /// Vendor options of the requester: the attribute modifier of the MAD, where Linux puts those of
    /// enhanced connection establishment.
    pub vendor_options: u32,
    /// The path to use.
    pub primary: CmPath,
    /// A second path; all zero if there is none.
    pub alternate: CmPath,
    /// The user's data, with the address header of the RDMA CM at its start.
    pub private_data: PrivateData<92>,
}

/// Extended transport type of XRC (IBTA annex A14).
const EXTENDED_XRC: Bits<3> = Bits::truncate(1);

/// Transport service of a REQ for a connection of the requester's queue pair, and the extended one
/// beside it. Every kind that is not connected is named like a reliable connection.
pub(crate) const fn transport_of(qp_type: QpType) -> (TransportType, Bits<3>) {
    match qp_type {
        QpType::Uc => (TransportType::Uc, Bits::truncate(0)),
        QpType::XrcIni => (TransportType::Extended, EXTENDED_XRC),
        _ => (TransportType::Rc, Bits::truncate(0)),
    }
}

impl ReqMsg {
    /// Kind of the queue pair that the requester's is to be connected with; `None` for transport
    /// services that have no connections.
    #[must_use]
    pub fn qp_type(&self) -> Option<QpType> {
        match (self.transport, self.extended_transport) {
            (TransportType::Rc, _) => Some(QpType::Rc),
            (TransportType::Uc, _) => Some(QpType::Uc),
            (TransportType::Extended, EXTENDED_XRC) => Some(QpType::XrcTgt),
            _ => None,
        }
    }

    pub(super) fn parse(raw: &ReqRaw, vendor_options: u32) -> Self {
        // Several fields share a byte, the first of them in the upper bits (IBTA 12.6.5).
        Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            vendor_id: Bits::truncate(raw.vendor_id.value()),
            service_id: ServiceId(raw.service_id.get()),
            ca_guid: CaGuid(raw.ca_guid.get()),
            qkey: raw.qkey.get(),
            qpn: raw.qpn.into(),
            responder_resources: raw.responder_resources,
            initiator_depth: raw.initiator_depth,
            local_eecn: Bits::truncate(raw.local_eecn.value()),
            remote_eecn: Bits::truncate(raw.remote_eecn.value()),
            remote_cm_timeout: CmTimeout::new(raw.remote_timeout >> 3),
            transport: TransportType::from((raw.remote_timeout >> 1) & 3),
            flow_control: raw.remote_timeout & 1 != 0,
            starting_psn: raw.starting_psn.into(),
            local_cm_timeout: CmTimeout::new(raw.local_timeout >> 3),
            retry_count: Bits::truncate(u32::from(raw.local_timeout)),
            pkey: PKey(raw.pkey.get()),
            path_mtu: Mtu::from_code(raw.mtu_rnr >> 4),
            rdc_exists: raw.mtu_rnr & 0x08 != 0,
            rnr_retry_count: Bits::truncate(u32::from(raw.mtu_rnr)),
            max_cm_retries: Bits::truncate(u32::from(raw.retries_srq >> 4)),
            srq: raw.retries_srq & 0x08 != 0,
            extended_transport: Bits::truncate(u32::from(raw.retries_srq)),
            vendor_options,
            primary: CmPath::parse(&raw.primary),
            alternate: CmPath::parse(&raw.alternate),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> ReqRaw {
        // Code 0 is reserved: a path MTU that was not understood is not repeated as another.
        let mtu = self.path_mtu.map_or(0, Mtu::code);
        ReqRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            reserved4: 0,
            vendor_id: U24::new(self.vendor_id.value()),
            service_id: U64::new(self.service_id.0),
            ca_guid: U64::new(self.ca_guid.0),
            reserved24: U32::ZERO,
            qkey: U32::new(self.qkey),
            qpn: self.qpn.into(),
            responder_resources: self.responder_resources,
            local_eecn: U24::new(self.local_eecn.value()),
            initiator_depth: self.initiator_depth,
            remote_eecn: U24::new(self.remote_eecn.value()),
            remote_timeout: self.remote_cm_timeout.exponent() << 3
                | (u8::from(self.transport) & 3) << 1
                | u8::from(self.flow_control),
            starting_psn: self.starting_psn.into(),
            local_timeout: self.local_cm_timeout.exponent() << 3 | self.retry_count.byte(),
            pkey: U16::new(self.pkey.0),
            mtu_rnr: mtu << 4 | u8::from(self.rdc_exists) << 3 | self.rnr_retry_count.byte(),
            retries_srq: self.max_cm_retries.byte() << 4
                | u8::from(self.srq) << 3
                | self.extended_transport.byte(),
            primary: self.primary.emit(),
            alternate: self.alternate.emit(),
            private_data: self.private_data.0,
        }
    }
}
