//! REQ: connection request and the paths it contains.

use zerocopy::byteorder::big_endian::{U16, U32, U64};

use super::fields::{Bits, CaGuid, CmTimeout, CommId, PrivateData, ServiceId, TransportType};
use super::raw::{LapRaw, PathRaw, ReqRaw};
use crate::verbs::{Gid, Mtu, PKey, QpType};
use crate::wire::ids::{Psn, Qpn, U24};

/// Path between two ports (IBTA 12.7). "Local" is the side sending the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CmPath {
    /// Local LID, set to 0xffff on RoCE.
    pub local_lid: u16,
    /// Remote LID, set to 0xffff on RoCE.
    pub remote_lid: u16,
    /// Local GID. This is the IP address on RoCE.
    pub local_gid: Gid,
    /// Remote port GID.
    pub remote_gid: Gid,
    /// IPv6 flow label.
    pub flow_label: Bits<20>,
    /// Static rate, as a six-bit code.
    pub packet_rate: Bits<6>,
    /// IP traffic class.
    pub traffic_class: u8,
    /// IP hop limit.
    pub hop_limit: u8,
    /// Path service level.
    pub service_level: Bits<4>,
    /// Set if both ports are on the same subnet.
    pub subnet_local: bool,
    /// Time the local side needs to send an acknowledgement, including the packet lifetime. The
    /// remote queue pair should use this as its ACK timeout.
    pub ack_timeout: CmTimeout,
}

/// LID used for all ports on RoCE.
const PERMISSIVE_LID: u16 = 0xffff;

impl CmPath {
    /// Creates a RoCE path between two GIDs using the same values as Linux: permissive LIDs and hop
    /// limit 64.
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

    /// LAP uses the same fields in a different layout.
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

/// Connection request (IBTA 12.6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReqMsg {
    /// Communication ID assigned by the requester.
    pub local_comm_id: CommId,
    /// The requester's IEEE vendor ID for the vendor options, usually 0.
    pub vendor_id: Bits<24>,
    /// Requested service ID.
    pub service_id: ServiceId,
    /// The requester's channel adapter GUID.
    pub ca_guid: CaGuid,
    /// Q_Key, for datagram services.
    pub qkey: u32,
    /// The requester's queue pair number.
    pub qpn: Qpn,
    /// Maximum number of READs and atomics that the requester can process concurrently.
    pub responder_resources: u8,
    /// Maximum number of outstanding READs and atomics used by the requester.
    pub initiator_depth: u8,
    /// The requester's end-to-end context. Only used for reliable datagram.
    pub local_eecn: Bits<24>,
    /// The responder's end-to-end context. Only used for reliable datagram.
    pub remote_eecn: Bits<24>,
    /// Time the requester will wait for a response before a retry.
    pub remote_cm_timeout: CmTimeout,
    /// Transport service for the connection.
    pub transport: TransportType,
    /// Set if the requester's queue pair uses end-to-end credits.
    pub flow_control: bool,
    /// Starting PSN that the **receiver** of this message must use when sending.
    pub starting_psn: Psn,
    /// Maximum time the requester needs to respond to CM messages.
    pub local_cm_timeout: CmTimeout,
    /// Transport retry count to be used by the responder's queue pair.
    pub retry_count: Bits<3>,
    /// P_Key for the connection.
    pub pkey: PKey,
    /// Path MTU, or `None` for an invalid code.
    pub path_mtu: Option<Mtu>,
    /// Set if the reliable datagram channel already exists.
    pub rdc_exists: bool,
    /// RNR retry count to be used by the responder's queue pair; 7 means unlimited.
    pub rnr_retry_count: Bits<3>,
    /// Maximum number of times the requester will resend a CM message.
    pub max_cm_retries: Bits<4>,
    /// Set if the requester's queue pair uses a shared receive queue.
    pub srq: bool,
    /// Extended transport type, used for [`TransportType::Extended`].
    pub extended_transport: Bits<3>,
    /// The requester's vendor options. This is the attribute modifier of the MAD, used by Linux for
    /// enhanced connection establishment.
    pub vendor_options: u32,
    /// Primary path.
    pub primary: CmPath,
    /// Alternate path, set to zero if not used.
    pub alternate: CmPath,
    /// Private data, starting with the RDMA CM address header.
    pub private_data: PrivateData<92>,
}

/// Extended transport type for XRC (IBTA annex A14).
const EXTENDED_XRC: Bits<3> = Bits::truncate(1);

/// Returns the transport service and extended transport type used in a REQ for this queue pair
/// type. Types that are not connected are sent as a reliable connection.
pub(crate) const fn transport_of(qp_type: QpType) -> (TransportType, Bits<3>) {
    match qp_type {
        QpType::Uc => (TransportType::Uc, Bits::truncate(0)),
        QpType::XrcIni => (TransportType::Extended, EXTENDED_XRC),
        _ => (TransportType::Rc, Bits::truncate(0)),
    }
}

impl ReqMsg {
    /// Returns the queue pair type that can be connected to the requester's queue pair, or `None`
    /// if this transport service does not use connections.
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
        // Some bytes contain multiple fields, with the first field in the upper bits (IBTA 12.6.5).
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
        // We use the reserved code 0 if the received path MTU was unknown, instead of replacing it
        // with a valid MTU.
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
