//! InfiniBand communication manager messages (IBTA 12.6, 12.8, 12.11). Each message is a struct
//! containing all fields, which can be parsed from or written to a 256-byte MAD.
//!
//! The structs can only contain valid values: [`Bits`] is used for fields narrower than an integer,
//! [`CmTimeout`] for timeouts, and enums for codes, with unknown codes preserved. Reserved bits are
//! ignored on receive and set to zero when sending.

mod fields;
mod msgs;
mod raw;
mod redirect;
mod req;

use num_enum::TryFromPrimitive;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use fields::{
    ADDITIONAL_INFO_LEN, AdditionalInfo, AprStatus, Bits, CaGuid, CmTimeout, CommId, Failover,
    MraOf, PrivateData, RejOf, RejReason, ServiceId, SidrStatus, TooLong, TransportType,
};
pub use msgs::{AprMsg, DreqMsg, LapMsg, MraMsg, PairMsg, RejMsg, RepMsg, SidrRepMsg, SidrReqMsg};
pub use redirect::Redirect;
pub(crate) use req::transport_of;
pub use req::{CmPath, ReqMsg};

use super::mad::{
    MAD_BODY_LEN, MAD_LEN, Mad, MadClass, MadError, MadHeader, MadMethod, TransactionId,
};

/// Supported class version of communication management.
pub const CM_CLASS_VERSION: u8 = 2;

/// Attribute IDs of CM messages (IBTA 16.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u16)]
pub enum CmAttribute {
    /// REQ: connection request (IBTA 12.6.5).
    Req = 0x10,
    /// MRA: message receipt acknowledgement (IBTA 12.6.6).
    Mra = 0x11,
    /// REJ: connection reject (IBTA 12.6.7).
    Rej = 0x12,
    /// REP: connection reply (IBTA 12.6.8).
    Rep = 0x13,
    /// RTU: ready to use (IBTA 12.6.9).
    Rtu = 0x14,
    /// DREQ: disconnection request (IBTA 12.6.10).
    Dreq = 0x15,
    /// DREP: disconnection reply (IBTA 12.6.11).
    Drep = 0x16,
    /// SIDR_REQ: service ID resolution request (IBTA 12.11.1).
    SidrReq = 0x17,
    /// SIDR_REP: service ID resolution reply (IBTA 12.11.2).
    SidrRep = 0x18,
    /// LAP: load alternate path (IBTA 12.8.1).
    Lap = 0x19,
    /// APR: alternate path response (IBTA 12.8.2).
    Apr = 0x1a,
}

impl CmAttribute {
    /// Messages starting with a SIDR request ID or with the requester's communication ID, which is
    /// the only ID known to both sides.
    pub const NAMED_BY_FIRST_ID: [Self; 3] = [Self::Req, Self::SidrReq, Self::SidrRep];
}

/// Offset of the management class in a MAD.
pub const MAD_CLASS_OFFSET: usize = 1;
/// Offset of the attribute ID in a MAD, 16 bits in big-endian order.
pub const MAD_ATTRIBUTE_OFFSET: usize = 16;
/// Offset of the first ID in a CM message, 32 bits in big-endian order: the sender's communication
/// ID or the SIDR request ID.
pub const FIRST_ID_OFFSET: usize = 24;
/// Offset of the receiver's communication ID in a CM message, 32 bits in big-endian order, if
/// present.
pub const SECOND_ID_OFFSET: usize = 28;

/// Reads a big-endian word from a MAD of the CM class.
fn word(mad: &[u8], at: usize) -> Option<u32> {
    let bytes = mad.get(at..at + 4)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

/// Returns the receiver's communication ID from a CM message, which is zero if the sender doesn't
/// know it, or `None` if the message does not contain this field. Returns an error if the data is
/// too short or uses a different management class, but does not check otherwise if the message is
/// valid.
fn second_id(mad: &[u8]) -> Result<Option<CommId>, CmMsgError> {
    let short = || CmMsgError::Mad(MadError::Length { len: mad.len() });
    // Only read the required bytes: this is called before parsing each message, to select the
    // worker that will parse it.
    let class = *mad.get(MAD_CLASS_OFFSET).ok_or_else(short)?;
    if class != MadClass::ComMgt as u8 {
        return Err(CmMsgError::Class { class });
    }
    let attribute = word(mad, MAD_ATTRIBUTE_OFFSET).ok_or_else(short)? >> 16;
    let has_none = CmAttribute::NAMED_BY_FIRST_ID
        .iter()
        .any(|&named| attribute == u32::from(named as u16));
    if has_none {
        return Ok(None);
    }
    let id = word(mad, SECOND_ID_OFFSET).ok_or_else(short)?;
    Ok(Some(CommId(id)))
}

/// Returns the receiver's communication ID if it is set in the CM message.
#[must_use]
pub fn receiver_id(mad: &[u8]) -> Option<CommId> {
    second_id(mad).ok()?.filter(|&id| id != CommId(0))
}

/// Returns the ID used to distribute the CM messages of a connection to the workers sharing queue
/// pair 1, or `None` if the data is too short or uses a different management class.
///
/// This is the ID assigned by the receiver ([`receiver_id`]) if there is one, or else the first ID,
/// so that a REJ that cancels a pending REQ is received by the same worker as that REQ.
#[must_use]
pub fn routing_id(mad: &[u8]) -> Option<CommId> {
    match second_id(mad).ok()? {
        Some(id) if id != CommId(0) => Some(id),
        _ => word(mad, FIRST_ID_OFFSET).map(CommId),
    }
}

/// Returns whether a MAD of the CM class does not contain an ID assigned by the receiver. In this
/// case it is a request, or refers to a pending request.
#[must_use]
pub fn is_request(mad: &[u8]) -> bool {
    let attribute = word(mad, MAD_ATTRIBUTE_OFFSET).map(|word| word >> 16);
    // The first ID in a SIDR response was assigned by us when we sent the request.
    attribute != Some(CmAttribute::SidrRep as u32) && receiver_id(mad).is_none()
}

/// Error returned for a MAD that is not a valid CM message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CmMsgError {
    /// The data is not a valid MAD.
    #[error(transparent)]
    Mad(#[from] MadError),
    /// The management class is not supported.
    #[error("management class {class:#04x} is not communication management")]
    Class {
        /// Management class received.
        class: u8,
    },
    /// The class version is not 2.
    #[error("unsupported communication management version {version}")]
    ClassVersion {
        /// Class version received.
        version: u8,
    },
    /// The method is not Send.
    #[error("method {method:#04x} is not Send")]
    Method {
        /// Method received.
        method: u8,
    },
    /// The attribute is not a CM message.
    #[error("unknown attribute {attribute:#06x}")]
    Attribute {
        /// Attribute ID received.
        attribute: u16,
    },
    /// The declared length of the additional information exceeds the field size.
    #[error("additional information exceeds its field")]
    InfoLength,
}

/// CM message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmMessage {
    /// Connection request.
    Req(ReqMsg),
    /// Request for more time to process a message.
    Mra(MraMsg),
    /// Connection reject.
    Rej(RejMsg),
    /// Connection reply.
    Rep(RepMsg),
    /// Ready to use: confirms a reply.
    Rtu(PairMsg),
    /// Disconnection request.
    Dreq(DreqMsg),
    /// Disconnection reply.
    Drep(PairMsg),
    /// Service ID resolution request.
    SidrReq(SidrReqMsg),
    /// Service ID resolution reply.
    SidrRep(SidrRepMsg),
    /// Request to load an alternate path.
    Lap(LapMsg),
    /// Response to an alternate path request.
    Apr(AprMsg),
}

/// All layouts have the same size as the body, so this cannot fail.
fn view<T: FromBytes + KnownLayout + Immutable + zerocopy::Unaligned>(
    body: &[u8; MAD_BODY_LEN],
) -> &T {
    T::ref_from_bytes(body).expect("layout matches the MAD body length")
}

impl CmMessage {
    /// Parses a complete MAD.
    pub fn parse(mad: &[u8]) -> Result<(TransactionId, Self), CmMsgError> {
        let (header, body) = MadHeader::parse(mad)?;
        // Check class, version and method first, as the meaning of the attribute depends on them.
        if header.class() != MadClass::ComMgt as u8 {
            return Err(CmMsgError::Class {
                class: header.class(),
            });
        }
        if header.class_version() != CM_CLASS_VERSION {
            return Err(CmMsgError::ClassVersion {
                version: header.class_version(),
            });
        }
        if header.method() != MadMethod::Send as u8 {
            return Err(CmMsgError::Method {
                method: header.method(),
            });
        }
        let info = CmMsgError::InfoLength;
        let attribute = header.attribute();
        let kind = CmAttribute::try_from(attribute);
        let message = match kind.map_err(|_| CmMsgError::Attribute { attribute })? {
            CmAttribute::Req => Self::Req(ReqMsg::parse(view(body), header.modifier())),
            CmAttribute::Mra => Self::Mra(MraMsg::parse(view(body))),
            CmAttribute::Rej => Self::Rej(RejMsg::parse(view(body)).ok_or(info)?),
            CmAttribute::Rep => Self::Rep(RepMsg::parse(view(body), header.modifier())),
            CmAttribute::Rtu => Self::Rtu(PairMsg::parse(view(body))),
            CmAttribute::Dreq => Self::Dreq(DreqMsg::parse(view(body))),
            CmAttribute::Drep => Self::Drep(PairMsg::parse(view(body))),
            CmAttribute::SidrReq => Self::SidrReq(SidrReqMsg::parse(view(body))),
            CmAttribute::SidrRep => Self::SidrRep(SidrRepMsg::parse(view(body)).ok_or(info)?),
            CmAttribute::Lap => Self::Lap(LapMsg::parse(view(body))),
            CmAttribute::Apr => Self::Apr(AprMsg::parse(view(body)).ok_or(info)?),
        };
        Ok((header.transaction(), message))
    }

    /// Returns the attribute ID for this message.
    #[must_use]
    pub fn attribute(&self) -> CmAttribute {
        match self {
            Self::Req(_) => CmAttribute::Req,
            Self::Mra(_) => CmAttribute::Mra,
            Self::Rej(_) => CmAttribute::Rej,
            Self::Rep(_) => CmAttribute::Rep,
            Self::Rtu(_) => CmAttribute::Rtu,
            Self::Dreq(_) => CmAttribute::Dreq,
            Self::Drep(_) => CmAttribute::Drep,
            Self::SidrReq(_) => CmAttribute::SidrReq,
            Self::SidrRep(_) => CmAttribute::SidrRep,
            Self::Lap(_) => CmAttribute::Lap,
            Self::Apr(_) => CmAttribute::Apr,
        }
    }

    /// Returns the attribute modifier: the vendor options, or 0.
    fn modifier(&self) -> u32 {
        match self {
            Self::Req(m) => m.vendor_options,
            Self::Rep(m) => m.vendor_options,
            _ => 0,
        }
    }

    /// Returns the message as a MAD.
    #[must_use]
    pub fn emit(&self, transaction: TransactionId) -> Mad {
        let header = MadHeader::new(
            MadClass::ComMgt,
            CM_CLASS_VERSION,
            MadMethod::Send,
            transaction,
            self.attribute() as u16,
        )
        .with_modifier(self.modifier());
        let mut mad = [0; MAD_LEN];
        let (head, body) = mad.split_at_mut(MAD_LEN - MAD_BODY_LEN);
        head.copy_from_slice(header.as_bytes());
        match self {
            Self::Req(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Mra(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Rej(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Rep(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Rtu(m) | Self::Drep(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Dreq(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::SidrReq(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::SidrRep(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Lap(m) => body.copy_from_slice(m.emit().as_bytes()),
            Self::Apr(m) => body.copy_from_slice(m.emit().as_bytes()),
        }
        mad
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::verbs::QpType;

    fn mad(attribute: u8, body: &[u8]) -> Vec<u8> {
        let mut mad = vec![
            1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, attribute, 0, 0, 0, 0, 0, 0,
        ];
        mad.extend_from_slice(body);
        mad.resize(256, 0);
        mad
    }

    #[test]
    fn lap_matches_specification_layout() {
        let mut body = [0u8; 232];
        body[..8].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 2]);
        body[12..16].copy_from_slice(&[0, 0x12, 0x34, 20 << 3]);
        body[20..24].copy_from_slice(&[0xff, 0xff, 0, 7]);
        body[24] = 0xfe;
        body[40] = 0xfd;
        body[56..64].copy_from_slice(&[0x12, 0x34, 0x50, 0x77, 64, 0x13, 0x58, 17 << 3]);
        body[64] = 0xaa;
        body[231] = 0xbb;
        let bytes = mad(0x19, &body);
        let (transaction, message) = CmMessage::parse(&bytes).unwrap();
        assert_eq!(transaction, TransactionId(9));
        let CmMessage::Lap(lap) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (lap.local_comm_id, lap.remote_comm_id),
            (CommId(1), CommId(2))
        );
        assert_eq!(lap.remote_qpn.value(), 0x1234);
        assert_eq!(lap.remote_cm_timeout.exponent(), 20);
        let path = lap.alternate;
        assert_eq!((path.local_lid, path.remote_lid), (0xffff, 7));
        assert_eq!((path.local_gid.0[0], path.remote_gid.0[0]), (0xfe, 0xfd));
        assert_eq!(
            (path.flow_label.value(), path.traffic_class),
            (0x12345, 0x77)
        );
        assert_eq!((path.hop_limit, path.packet_rate.value()), (64, 0x13));
        assert_eq!((path.service_level.value(), path.subnet_local), (5, true));
        assert_eq!(path.ack_timeout.exponent(), 17);
        assert_eq!((lap.private_data[0], lap.private_data[167]), (0xaa, 0xbb));
        assert_eq!(message.emit(transaction)[..], bytes[..]);
    }

    #[test]
    fn vendor_options_use_attribute_modifier() {
        let mut bytes = mad(0x10, &[]);
        bytes[20..24].copy_from_slice(&[0xde, 0xad, 0xbe, 0xef]);
        bytes[24 + 5..24 + 8].copy_from_slice(&[0x00, 0x15, 0xb3]);
        // MTU of 256 bytes.
        bytes[24 + 50] = 0x10;
        let (tid, message) = CmMessage::parse(&bytes).unwrap();
        let CmMessage::Req(req) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (req.vendor_id.value(), req.vendor_options),
            (0x15b3, 0xdead_beef)
        );
        assert_eq!(message.emit(tid)[..], bytes[..]);
        let mut bytes = mad(0x13, &[]);
        bytes[20..24].copy_from_slice(&[1, 2, 3, 4]);
        (bytes[24 + 15], bytes[24 + 19], bytes[24 + 23]) = (0xa1, 0xa2, 0xa3);
        let (tid, message) = CmMessage::parse(&bytes).unwrap();
        let CmMessage::Rep(rep) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (rep.vendor_id.value(), rep.vendor_options),
            (0x00a1_a2a3, 0x0102_0304)
        );
        assert_eq!(message.emit(tid)[..], bytes[..]);
    }

    #[test]
    fn req_contains_qp_type() {
        for (code, extended, expected) in [
            (0, 0, Some(QpType::Rc)),
            (1, 0, Some(QpType::Uc)),
            (2, 0, None),
            (3, 1, Some(QpType::XrcTgt)),
            (3, 0, None),
            (3, 2, None),
        ] {
            let mut bytes = mad(0x10, &[]);
            bytes[24 + 43] = code << 1;
            bytes[24 + 51] = extended;
            let (_, message) = CmMessage::parse(&bytes).unwrap();
            let CmMessage::Req(req) = message else {
                panic!("{message:?}")
            };
            assert_eq!(req.qp_type(), expected, "{code} {extended}");
        }
    }

    #[test]
    fn mra_apr_sidr_match_specification_layout() {
        let bytes = mad(0x11, &[0, 0, 0, 1, 0, 0, 0, 2, 0x40, 21 << 3, 0xaa]);
        let (tid, message) = CmMessage::parse(&bytes).unwrap();
        let CmMessage::Mra(mra) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (mra.message, mra.service_timeout.exponent()),
            (MraOf::Rep, 21)
        );
        assert_eq!(mra.private_data[0], 0xaa);
        assert_eq!(message.emit(tid)[..], bytes[..]);

        let mut body = [0u8; 232];
        body[..16].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 2, 3, 2, 0, 0, 7, 8, 9, 0]);
        (body[84], body[231]) = (0xcc, 0xdd);
        let bytes = mad(0x1a, &body);
        let (tid, message) = CmMessage::parse(&bytes).unwrap();
        let CmMessage::Apr(apr) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (apr.status, &*apr.info),
            (AprStatus::Unsupported, &[7u8, 8, 9][..])
        );
        assert_eq!((apr.private_data[0], apr.private_data[147]), (0xcc, 0xdd));
        assert_eq!(message.emit(tid)[..], bytes[..]);

        let bytes = mad(
            0x17,
            &[
                0, 0, 0, 5, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 1, 0x11, 0x12, 0x34, 0xee,
            ],
        );
        let (tid, message) = CmMessage::parse(&bytes).unwrap();
        let CmMessage::SidrReq(req) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (req.request_id, req.service_id),
            (CommId(5), ServiceId(0x0111_1234))
        );
        assert_eq!(req.private_data[0], 0xee);
        assert_eq!(message.emit(tid)[..], bytes[..]);

        let mut body = [0u8; 232];
        body[..24].copy_from_slice(&[
            0, 0, 0, 5, 0, 1, 0xa1, 0xa2, 0, 0x12, 0x34, 0xa3, 0, 0, 0, 0, 1, 0x11, 0x12, 0x34,
            0x01, 0x23, 0x45, 0x67,
        ]);
        (body[24], body[96], body[231]) = (9, 0xcc, 0xdd);
        let bytes = mad(0x18, &body);
        let (tid, message) = CmMessage::parse(&bytes).unwrap();
        let CmMessage::SidrRep(rep) = message else {
            panic!("{message:?}")
        };
        assert_eq!(
            (rep.qpn.value(), rep.qkey, rep.vendor_id.value()),
            (0x1234, 0x0123_4567, 0xa1_a2a3)
        );
        assert_eq!((rep.status, &*rep.info), (SidrStatus::Success, &[9u8][..]));
        assert_eq!((rep.private_data[0], rep.private_data[135]), (0xcc, 0xdd));
        assert_eq!(message.emit(tid)[..], bytes[..]);
    }

    #[test]
    fn cm_parse_error_names_field() {
        let good = mad(0x14, &[]);
        let change = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            CmMessage::parse(&bytes).unwrap_err()
        };
        assert_eq!(
            CmMessage::parse(&good[..10]),
            Err(CmMsgError::Mad(MadError::Length { len: 10 }))
        );
        assert_eq!(
            change(0, 3),
            CmMsgError::Mad(MadError::BaseVersion { version: 3 })
        );
        assert_eq!(change(1, 6), CmMsgError::Class { class: 6 });
        assert_eq!(change(2, 1), CmMsgError::ClassVersion { version: 1 });
        assert_eq!(change(3, 1), CmMsgError::Method { method: 1 });
        assert_eq!(change(17, 0x1b), CmMsgError::Attribute { attribute: 0x1b });
        let mut rej = mad(0x12, &[]);
        rej[24 + 9] = 73 << 1;
        assert_eq!(CmMessage::parse(&rej), Err(CmMsgError::InfoLength));
    }

    proptest! {
        #[test]
        fn emitting_parsed_message_is_stable(attribute in 0x10u8..0x1b, body in proptest::collection::vec(any::<u8>(), 232)) {
            let bytes = mad(attribute, &body);
            match CmMessage::parse(&bytes) {
                Ok((transaction, message)) => {
                    // Reserved bits are cleared the first time. After this, nothing should change.
                    let emitted = message.emit(transaction);
                    prop_assert_eq!(CmMessage::parse(&emitted), Ok((transaction, message)));
                }
                // REJ, SIDR_REP and APR contain the length of the additional information, which is
                // the only field that can be invalid.
                Err(error) => {
                    prop_assert_eq!(error, CmMsgError::InfoLength);
                    prop_assert!([0x12, 0x18, 0x1a].contains(&attribute), "{attribute:#x}");
                }
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = CmMessage::parse(&bytes);
        }
    }
}
