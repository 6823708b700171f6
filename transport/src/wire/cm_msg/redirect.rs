//! Redirection of a request to another port (IBTA 12.6.7.2).

use super::fields::{AdditionalInfo, RejReason};
use crate::verbs::{Gid, PKey};
use crate::wire::ids::Qpn;

/// Size of ClassPortInfo in bytes (IBTA 13.4.8.1).
const CLASS_PORT_INFO_LEN: usize = 72;
/// Offset of RedirectGID in ClassPortInfo.
const GID: usize = 8;
/// Offset of RedirectP_Key.
const PKEY: usize = 30;
/// Offset of RedirectQP: 8 reserved bits, followed by the number.
const QP: usize = 32;
/// Offset of RedirectQ_Key.
const QKEY: usize = 36;
/// Q_Key of QP 1 (IBTA 3.5.3).
const GSI_QKEY: u32 = 0x8001_0000;

/// Port and CM to which a request should be sent instead. Contained in the additional information
/// of a REJ with reason [`RejReason::PortCmRedirect`] or [`RejReason::PortRedirect`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// GID of the port. This is an IP address on RoCE.
    pub gid: Gid,
    /// QP used by the CM of the port.
    pub qpn: Qpn,
}

impl Redirect {
    /// Creates a redirection to the CM on QP 1 of a port.
    #[must_use]
    pub fn to_port(gid: Gid) -> Self {
        Self { gid, qpn: Qpn::GSI }
    }

    /// Returns the additional information for [`RejReason::PortCmRedirect`]: ClassPortInfo of the
    /// CM class. It uses the default partition.
    #[must_use]
    pub fn emit(&self) -> AdditionalInfo {
        let mut info = [0; CLASS_PORT_INFO_LEN];
        info[0] = crate::wire::mad::BASE_VERSION;
        info[1] = super::CM_CLASS_VERSION;
        info[GID..GID + 16].copy_from_slice(&self.gid.0);
        info[PKEY..QP].copy_from_slice(&PKey::DEFAULT.0.to_be_bytes());
        info[QP..QKEY].copy_from_slice(&self.qpn.value().to_be_bytes());
        info[QKEY..QKEY + 4].copy_from_slice(&GSI_QKEY.to_be_bytes());
        AdditionalInfo::new(&info).expect("the attribute fits")
    }

    /// Parses the additional information of a REJ. Returns `None` for other reasons, or if it is
    /// too short.
    #[must_use]
    pub fn parse(reason: RejReason, info: &AdditionalInfo) -> Option<Self> {
        match reason {
            RejReason::PortCmRedirect => {
                let info = info.get(..CLASS_PORT_INFO_LEN)?;
                let qpn = u32::from_be_bytes(*info[QP..].first_chunk()?);
                Some(Self {
                    gid: Gid(*info[GID..].first_chunk()?),
                    qpn: Qpn::new(qpn & 0x00ff_ffff),
                })
            }
            RejReason::PortRedirect => Some(Self::to_port(Gid(*info.first_chunk()?))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn redirect_matches_class_port_info() {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 3]));
        let redirect = Redirect::to_port(gid);
        let info = redirect.emit();
        let mut expected = [0; 72];
        expected[..2].copy_from_slice(&[1, 2]);
        expected[18..24].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 3]);
        expected[30..36].copy_from_slice(&[0xff, 0xff, 0, 0, 0, 1]);
        expected[36..40].copy_from_slice(&[0x80, 1, 0, 0]);
        assert_eq!(*info, expected);
        let parsed = Redirect::parse(RejReason::PortCmRedirect, &info);
        assert_eq!(parsed, Some(redirect));
        let other_qp = Redirect {
            qpn: Qpn::new(0x00ab_cdef),
            ..redirect
        };
        let parsed = Redirect::parse(RejReason::PortCmRedirect, &other_qp.emit());
        assert_eq!(parsed, Some(other_qp));
    }

    #[test]
    fn port_redirect_contains_only_gid() {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 3]));
        let info = AdditionalInfo::new(&gid.0).unwrap();
        let parsed = Redirect::parse(RejReason::PortRedirect, &info);
        assert_eq!(parsed, Some(Redirect::to_port(gid)));
    }

    #[test]
    fn short_or_unrelated_information_is_ignored() {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 3]));
        let info = Redirect::to_port(gid).emit();
        for reason in [RejReason::ConsumerDefined, RejReason::InvalidMtu] {
            assert_eq!(Redirect::parse(reason, &info), None);
        }
        let short = |len: usize| AdditionalInfo::new(&info[..len]).unwrap();
        for (reason, len) in [
            (RejReason::PortCmRedirect, 71),
            (RejReason::PortRedirect, 15),
        ] {
            assert_eq!(Redirect::parse(reason, &short(len)), None);
            assert_eq!(Redirect::parse(reason, &short(0)), None);
        }
    }
}
