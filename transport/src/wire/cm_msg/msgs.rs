//! All CM messages but REQ.

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

/// MRA (IBTA 12.6.6): the message arrived, its answer will take a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MraMsg {
    /// Local Communication ID: the sender's.
    pub local_comm_id: CommId,
    /// Remote Communication ID: the receiver's.
    pub remote_comm_id: CommId,
    /// Message that has arrived.
    pub message: MraOf,
    /// Time that the sender may take to answer it.
    pub service_timeout: CmTimeout,
    /// Private data of the user.
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

/// REJ (IBTA 12.6.7): the connection will not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejMsg {
    /// The sender's id; 0 if it has none.
    pub local_comm_id: CommId,
    /// The receiver's id; 0 if the sender does not know it.
    pub remote_comm_id: CommId,
    /// Message that is refused.
    pub message: RejOf,
    /// Reason of the refusal.
    pub reason: RejReason,
    /// More about why; its form depends on the reason.
    pub info: AdditionalInfo,
    /// Private data of the user.
    pub private_data: PrivateData<148>,
}

impl RejMsg {
    /// `None` if the declared length of the information exceeds its field.
    pub(super) fn parse(raw: &RejRaw) -> Option<Self> {
        Some(Self {
            local_comm_id: CommId(raw.local_comm_id.get()),
            remote_comm_id: CommId(raw.remote_comm_id.get()),
            message: RejOf::from(raw.message >> 6),
            reason: RejReason::from(raw.reason.get()),
            // Seven bits can claim more than the field holds.
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

/// REP (IBTA 12.6.8): the passive side's answer to a REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepMsg {
    /// The responder's id for the connection.
    pub local_comm_id: CommId,
    /// Remote Communication ID: the requester's.
    pub remote_comm_id: CommId,
    /// Queue key, for datagram services.
    pub qkey: u32,
    /// The responder's queue pair.
    pub qpn: Qpn,
    /// IEEE vendor id of the responder; usually 0.
    pub vendor_id: Bits<24>,
    /// The responder's end-to-end context; for an extended reliable connection its queue pair, of
    /// which `qpn` says nothing then (IBTA annex A14).
    pub eecn: Bits<24>,
    /// Vendor options of the responder: the attribute modifier of the MAD, where Linux puts those of
    /// enhanced connection establishment.
    pub vendor_options: u32,
    /// The PSN with which the **receiver** of this message begins to send.
    pub starting_psn: Psn,
    /// READs and atomics the responder can answer at a time.
    pub responder_resources: u8,
    /// READs and atomics the responder may have outstanding.
    pub initiator_depth: u8,
    /// Time that the responder's adapter may take to acknowledge.
    pub target_ack_delay: CmTimeout,
    /// Outcome for the alternate path.
    pub failover: Failover,
    /// The responder's queue pair sends end-to-end credits.
    pub flow_control: bool,
    /// RNR retries that the requester's queue pair should make; 7 is forever.
    pub rnr_retry_count: Bits<3>,
    /// The responder's queue pair uses a shared receive queue.
    pub srq: bool,
    /// The responder's channel adapter.
    pub ca_guid: CaGuid,
    /// Private data of the user.
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

/// RTU (IBTA 12.6.9): the active side is ready to use the connection; and DREP
/// (IBTA 12.6.11): the connection is gone. They have one form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairMsg {
    /// Local Communication ID: the sender's.
    pub local_comm_id: CommId,
    /// Remote Communication ID: the receiver's.
    pub remote_comm_id: CommId,
    /// Private data of the user.
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

/// DREQ (IBTA 12.6.10): a request to end the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DreqMsg {
    /// Local Communication ID: the sender's.
    pub local_comm_id: CommId,
    /// Remote Communication ID: the receiver's.
    pub remote_comm_id: CommId,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// Private data of the user.
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

/// LAP (IBTA 12.8.1): a request to load another alternate path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapMsg {
    /// Local Communication ID: the sender's.
    pub local_comm_id: CommId,
    /// Remote Communication ID: the receiver's.
    pub remote_comm_id: CommId,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// Time that the sender waits for an answer.
    pub remote_cm_timeout: CmTimeout,
    /// Alternate path that is proposed.
    pub alternate: CmPath,
    /// Private data of the user.
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

/// APR (IBTA 12.8.2): the answer to a LAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AprMsg {
    /// Local Communication ID: the sender's.
    pub local_comm_id: CommId,
    /// Remote Communication ID: the receiver's.
    pub remote_comm_id: CommId,
    /// Outcome for the path.
    pub status: AprStatus,
    /// Additional information of the status.
    pub info: AdditionalInfo,
    /// Private data of the user.
    pub private_data: PrivateData<148>,
}

impl AprMsg {
    /// `None` if the declared length of the information exceeds its field.
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

/// SIDR_REQ (IBTA 12.11.1): which queue pair serves a service id?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReqMsg {
    /// The requester's id for the question.
    pub request_id: CommId,
    /// Partition key of the service.
    pub pkey: PKey,
    /// ServiceID that is asked for.
    pub service_id: ServiceId,
    /// The user's data, with the address header of the RDMA CM at its start.
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

/// SIDR_REP (IBTA 12.11.2): the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRepMsg {
    /// The requester's id for the question.
    pub request_id: CommId,
    /// Result of the query: whether there is such a service.
    pub status: SidrStatus,
    /// Additional information of the status.
    pub info: AdditionalInfo,
    /// IEEE vendor id of the responder; usually 0.
    pub vendor_id: Bits<24>,
    /// The queue pair that serves.
    pub qpn: Qpn,
    /// The length that was asked for.
    pub service_id: ServiceId,
    /// The queue pair's queue key.
    pub qkey: u32,
    /// Private data of the user.
    pub private_data: PrivateData<136>,
}

impl SidrRepMsg {
    /// `None` if the declared length of the information exceeds its field.
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
