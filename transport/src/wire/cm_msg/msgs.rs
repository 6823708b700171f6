//! All CM messages except REQ.

use zerocopy::byteorder::big_endian::{U16, U32, U64};

use super::fields::{
    AdditionalInfo, AprStatus, Bits, CaGuid, CmTimeout, CommId, Failover, MraOf, PrivateData,
    RejOf, RejReason, ServiceId, SidrStatus,
};
use super::raw::{
    AprRaw, DreqRaw, LapRaw, MraRaw, PairRaw, RejRaw, RepRaw, SidrRepRaw, SidrReqRaw,
};
use super::req::CmPath;
use crate::verbs::PKey;
use crate::wire::ids::{Psn, Qpn};

/// MRA (IBTA 12.6.6): the message was received, but the response will be delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MraMsg {
    /// The sender's communication ID.
    pub local_comm_id: CommId,
    /// The receiver's communication ID.
    pub remote_comm_id: CommId,
    /// Message that was received.
    pub message: MraOf,
    /// Time the sender may need to respond.
    pub service_timeout: CmTimeout,
    /// Private data.
    pub private_data: PrivateData<222>,
}

impl MraMsg {
    pub(super) fn parse(raw: &MraRaw) -> Self {
        Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            message: MraOf::from(raw.message >> 6),
            service_timeout: CmTimeout::new(raw.timeout >> 3),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> MraRaw {
        MraRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            remote_comm_id: U32::new(self.remote_comm_id.0),
            message: u8::from(self.message) << 6,
            timeout: self.service_timeout.exponent() << 3,
            private_data: self.private_data.0,
        }
    }
}

/// REJ (IBTA 12.6.7): the connection is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejMsg {
    /// The sender's communication ID, or 0 if not assigned.
    pub local_comm_id: CommId,
    /// The receiver's communication ID, or 0 if the sender doesn't know it.
    pub remote_comm_id: CommId,
    /// Message that is rejected.
    pub message: RejOf,
    /// Reject reason.
    pub reason: RejReason,
    /// Additional information in a format that depends on the reason.
    pub info: AdditionalInfo,
    /// Private data.
    pub private_data: PrivateData<148>,
}

impl RejMsg {
    /// Returns `None` if the declared length of the additional information exceeds the field size.
    pub(super) fn parse(raw: &RejRaw) -> Option<Self> {
        Some(Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            message: RejOf::from(raw.message >> 6),
            reason: RejReason::from(raw.reason.get()),
            // The seven-bit length can exceed the field size.
            info: AdditionalInfo::from_wire(raw.info_len >> 1, raw.info)?,
            private_data: PrivateData(raw.private_data),
        })
    }

    pub(super) fn emit(&self) -> RejRaw {
        RejRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            remote_comm_id: U32::new(self.remote_comm_id.0),
            message: u8::from(self.message) << 6,
            info_len: self.info.wire_len() << 1,
            reason: U16::new(self.reason.into()),
            info: self.info.wire_bytes(),
            private_data: self.private_data.0,
        }
    }
}

/// REP (IBTA 12.6.8): the passive side's reply to a REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepMsg {
    /// Communication ID assigned by the responder.
    pub local_comm_id: CommId,
    /// The requester's communication ID.
    pub remote_comm_id: CommId,
    /// Q_Key, for datagram services.
    pub qkey: u32,
    /// The responder's queue pair number.
    pub qpn: Qpn,
    /// The responder's IEEE vendor ID, usually 0.
    pub vendor_id: Bits<24>,
    /// The responder's end-to-end context. For an extended reliable connection, this is the
    /// responder's queue pair number and should be used instead of `qpn` (IBTA annex A14).
    pub eecn: Bits<24>,
    /// The responder's vendor options. This is the attribute modifier of the MAD, used by Linux for
    /// enhanced connection establishment.
    pub vendor_options: u32,
    /// Starting PSN that the **receiver** of this message must use when sending.
    pub starting_psn: Psn,
    /// Maximum number of READs and atomics that the responder can process concurrently.
    pub responder_resources: u8,
    /// Maximum number of outstanding READs and atomics used by the responder.
    pub initiator_depth: u8,
    /// Maximum time the responder's adapter needs to send an acknowledgement.
    pub target_ack_delay: CmTimeout,
    /// Result for the alternate path.
    pub failover: Failover,
    /// Set if the responder's queue pair uses end-to-end credits.
    pub flow_control: bool,
    /// RNR retry count to be used by the requester's queue pair; 7 means unlimited.
    pub rnr_retry_count: Bits<3>,
    /// Set if the responder's queue pair uses a shared receive queue.
    pub srq: bool,
    /// The responder's channel adapter GUID.
    pub ca_guid: CaGuid,
    /// Private data.
    pub private_data: PrivateData<196>,
}

impl RepMsg {
    pub(super) fn parse(raw: &RepRaw, vendor_options: u32) -> Self {
        let vendor_id = [0, raw.vendor_id_high, raw.vendor_id_mid, raw.vendor_id_low];
        Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            qkey: raw.qkey.get(),
            qpn: raw.qpn.into(),
            vendor_id: Bits::truncate(u32::from_be_bytes(vendor_id)),
            eecn: Bits::truncate(raw.eecn.value()),
            vendor_options,
            starting_psn: raw.starting_psn.into(),
            responder_resources: raw.responder_resources,
            initiator_depth: raw.initiator_depth,
            target_ack_delay: CmTimeout::new(raw.ack_delay >> 3),
            failover: Failover::from((raw.ack_delay >> 1) & 3),
            flow_control: raw.ack_delay & 1 != 0,
            rnr_retry_count: Bits::truncate(u32::from(raw.rnr_srq >> 5)),
            srq: raw.rnr_srq & 0x10 != 0,
            ca_guid: CaGuid(raw.ca_guid.get()),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> RepRaw {
        let [_, vendor_id_high, vendor_id_mid, vendor_id_low] =
            self.vendor_id.value().to_be_bytes();
        RepRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            remote_comm_id: U32::new(self.remote_comm_id.0),
            qkey: U32::new(self.qkey),
            qpn: self.qpn.into(),
            vendor_id_high,
            eecn: crate::wire::ids::U24::new(self.eecn.value()),
            vendor_id_mid,
            starting_psn: self.starting_psn.into(),
            vendor_id_low,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            ack_delay: self.target_ack_delay.exponent() << 3
                | (u8::from(self.failover) & 3) << 1
                | u8::from(self.flow_control),
            rnr_srq: self.rnr_retry_count.byte() << 5 | u8::from(self.srq) << 4,
            ca_guid: U64::new(self.ca_guid.0),
            private_data: self.private_data.0,
        }
    }
}

/// RTU (IBTA 12.6.9), which indicates that the active side is ready to use the connection, or DREP
/// (IBTA 12.6.11), which indicates that the connection is closed. Both messages use the same
/// format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairMsg {
    /// The sender's communication ID.
    pub local_comm_id: CommId,
    /// The receiver's communication ID.
    pub remote_comm_id: CommId,
    /// Private data.
    pub private_data: PrivateData<224>,
}

impl PairMsg {
    pub(super) fn parse(raw: &PairRaw) -> Self {
        Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> PairRaw {
        PairRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            remote_comm_id: U32::new(self.remote_comm_id.0),
            private_data: self.private_data.0,
        }
    }
}

/// DREQ (IBTA 12.6.10): disconnection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DreqMsg {
    /// The sender's communication ID.
    pub local_comm_id: CommId,
    /// The receiver's communication ID.
    pub remote_comm_id: CommId,
    /// The receiver's queue pair number.
    pub remote_qpn: Qpn,
    /// Private data.
    pub private_data: PrivateData<220>,
}

impl DreqMsg {
    pub(super) fn parse(raw: &DreqRaw) -> Self {
        Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            remote_qpn: raw.remote_qpn.into(),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> DreqRaw {
        DreqRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            remote_comm_id: U32::new(self.remote_comm_id.0),
            remote_qpn: self.remote_qpn.into(),
            reserved11: 0,
            private_data: self.private_data.0,
        }
    }
}

/// LAP (IBTA 12.8.1): request to load a new alternate path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapMsg {
    /// The sender's communication ID.
    pub local_comm_id: CommId,
    /// The receiver's communication ID.
    pub remote_comm_id: CommId,
    /// The receiver's queue pair number.
    pub remote_qpn: Qpn,
    /// Time the sender will wait for a response.
    pub remote_cm_timeout: CmTimeout,
    /// Proposed alternate path.
    pub alternate: CmPath,
    /// Private data.
    pub private_data: PrivateData<168>,
}

impl LapMsg {
    pub(super) fn parse(raw: &LapRaw) -> Self {
        Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            remote_qpn: raw.remote_qpn.into(),
            remote_cm_timeout: CmTimeout::new(raw.remote_timeout >> 3),
            alternate: CmPath::parse_lap(raw),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> LapRaw {
        let mut raw: LapRaw = zerocopy::FromZeros::new_zeroed();
        raw.local_comm_id = U32::new(self.local_comm_id.0);
        raw.remote_comm_id = U32::new(self.remote_comm_id.0);
        raw.remote_qpn = self.remote_qpn.into();
        raw.remote_timeout = self.remote_cm_timeout.exponent() << 3;
        self.alternate.emit_lap(&mut raw);
        raw.private_data = self.private_data.0;
        raw
    }
}

/// APR (IBTA 12.8.2): response to a LAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AprMsg {
    /// The sender's communication ID.
    pub local_comm_id: CommId,
    /// The receiver's communication ID.
    pub remote_comm_id: CommId,
    /// Result for the path.
    pub status: AprStatus,
    /// Additional information for the status.
    pub info: AdditionalInfo,
    /// Private data.
    pub private_data: PrivateData<148>,
}

impl AprMsg {
    /// Returns `None` if the declared length of the additional information exceeds the field size.
    pub(super) fn parse(raw: &AprRaw) -> Option<Self> {
        Some(Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            status: AprStatus::from(raw.status),
            info: AdditionalInfo::from_wire(raw.info_len, raw.info)?,
            private_data: PrivateData(raw.private_data),
        })
    }

    pub(super) fn emit(&self) -> AprRaw {
        AprRaw {
            local_comm_id: U32::new(self.local_comm_id.0),
            remote_comm_id: U32::new(self.remote_comm_id.0),
            info_len: self.info.wire_len(),
            status: self.status.into(),
            reserved10: U16::ZERO,
            info: self.info.wire_bytes(),
            private_data: self.private_data.0,
        }
    }
}

/// SIDR_REQ (IBTA 12.11.1): requests the queue pair number for a service ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReqMsg {
    /// Request ID assigned by the requester.
    pub request_id: CommId,
    /// P_Key to use for the service.
    pub pkey: PKey,
    /// Requested service ID.
    pub service_id: ServiceId,
    /// Private data, starting with the RDMA CM address header.
    pub private_data: PrivateData<216>,
}

impl SidrReqMsg {
    pub(super) fn parse(raw: &SidrReqRaw) -> Self {
        Self {
            request_id: CommId(raw.request_id.get()),
            pkey: PKey(raw.pkey.get()),
            service_id: ServiceId(raw.service_id.get()),
            private_data: PrivateData(raw.private_data),
        }
    }

    pub(super) fn emit(&self) -> SidrReqRaw {
        SidrReqRaw {
            request_id: U32::new(self.request_id.0),
            pkey: U16::new(self.pkey.0),
            reserved6: U16::ZERO,
            service_id: U64::new(self.service_id.0),
            private_data: self.private_data.0,
        }
    }
}

/// SIDR_REP (IBTA 12.11.2): response to a SIDR_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRepMsg {
    /// Request ID assigned by the requester.
    pub request_id: CommId,
    /// Status, which indicates if the service is available.
    pub status: SidrStatus,
    /// Additional information for the status.
    pub info: AdditionalInfo,
    /// The responder's IEEE vendor ID, usually 0.
    pub vendor_id: Bits<24>,
    /// The service's queue pair number.
    pub qpn: Qpn,
    /// Requested service ID.
    pub service_id: ServiceId,
    /// Q_Key of the queue pair.
    pub qkey: u32,
    /// Private data.
    pub private_data: PrivateData<136>,
}

impl SidrRepMsg {
    /// Returns `None` if the declared length of the additional information exceeds the field size.
    pub(super) fn parse(raw: &SidrRepRaw) -> Option<Self> {
        let vendor_id = u32::from(raw.vendor_id_high.get()) << 8 | u32::from(raw.vendor_id_low);
        Some(Self {
            request_id: CommId(raw.request_id.get()),
            status: SidrStatus::from(raw.status),
            info: AdditionalInfo::from_wire(raw.info_len, raw.info)?,
            vendor_id: Bits::truncate(vendor_id),
            qpn: raw.qpn.into(),
            service_id: ServiceId(raw.service_id.get()),
            qkey: raw.qkey.get(),
            private_data: PrivateData(raw.private_data),
        })
    }

    pub(super) fn emit(&self) -> SidrRepRaw {
        SidrRepRaw {
            request_id: U32::new(self.request_id.0),
            status: self.status.into(),
            info_len: self.info.wire_len(),
            vendor_id_high: U16::new((self.vendor_id.value() >> 8 & 0xffff) as u16),
            qpn: self.qpn.into(),
            vendor_id_low: (self.vendor_id.value() & 0xff) as u8,
            service_id: U64::new(self.service_id.0),
            qkey: U32::new(self.qkey),
            info: self.info.wire_bytes(),
            private_data: self.private_data.0,
        }
    }
}
