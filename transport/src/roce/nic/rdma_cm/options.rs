//! Options of identifiers.

use std::net::IpAddr;

use super::calls::port_space;
use super::{Id, IdState};
use crate::roce::nic::Nic;
use crate::verbs::{CmError, CmId, CmOption, Mtu, QpType, VerbsError};

/// Most that an ACK timeout's exponent may be: it has five bits.
const MAX_ACK_TIMEOUT: u8 = 31;

/// Values of an identifier's options; `None` for those that were not set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// Traffic class of its packets, without the bits of ECN.
    pub(crate) traffic_class: Option<u8>,
    /// Others may own its port.
    pub(crate) reuse: bool,
    family_only: Option<bool>,
    /// Requests have no address header.
    is_bare: bool,
    /// Largest path MTU that is asked for.
    pub(super) path_mtu: Option<Mtu>,
    /// Exponent of the queue pair's ACK timeout.
    pub(crate) ack_timeout: Option<u8>,
    /// The peer may load alternate paths.
    pub(super) alternate_paths: bool,
}

impl Options {
    /// Options of a listener's requests.
    pub(super) fn of_request(&self) -> Self {
        Self {
            alternate_paths: self.alternate_paths,
            ..Self::default()
        }
    }

    /// Whether an identifier that is bound to an address takes what comes to addresses of the other
    /// family as well.
    pub(crate) fn is_family_only(&self, bound: IpAddr) -> bool {
        self.family_only.unwrap_or(bound.is_ipv4())
    }

    /// Sets an option of an identifier in a state, whose queue pairs are of a type.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] once it is too late, and values that there are not.
    pub(crate) fn set(
        &mut self,
        option: CmOption,
        state: IdState,
        qp_type: QpType,
    ) -> Result<(), CmError> {
        let late = CmError::InvalidState("set_option");
        match option {
            CmOption::TypeOfService(class) => self.traffic_class = Some(class & !0b11),
            CmOption::AlternatePaths(allowed) => self.alternate_paths = allowed,
            CmOption::ReuseAddress(reuse) => {
                // The others that own the port have relied on it since it was bound.
                let may = state == IdState::Idle || reuse && state != IdState::Listening;
                self.reuse = may.then_some(reuse).ok_or(late)?;
            }
            CmOption::AddressFamilyOnly(only) => {
                let may = matches!(state, IdState::Idle | IdState::Bound);
                self.family_only = Some(may.then_some(only).ok_or(late)?);
            }
            CmOption::BareRequests(bare) => {
                let may = state == IdState::Idle;
                self.is_bare = may.then_some(bare).ok_or(late)?;
            }
            CmOption::PathMtu(mtu) => {
                let may = matches!(
                    state,
                    IdState::Idle | IdState::Bound | IdState::AddrResolved | IdState::RouteResolved
                );
                self.path_mtu = Some(may.then_some(mtu).ok_or(late)?);
            }
            CmOption::AckTimeout(exponent) => {
                let has_one = matches!(qp_type, QpType::Rc | QpType::XrcIni);
                if !has_one || exponent > MAX_ACK_TIMEOUT {
                    return Err(VerbsError::InvalidParameter("ACK timeout").into());
                }
                let may = matches!(
                    state,
                    IdState::Idle
                        | IdState::Bound
                        | IdState::AddrResolved
                        | IdState::RouteResolved
                        | IdState::Requested
                );
                self.ack_timeout = Some(may.then_some(exponent).ok_or(late)?);
            }
        }
        Ok(())
    }
}

impl Id {
    /// Whether requests begin with an address header; those for a bare service id do not.
    pub(super) fn has_header(&self) -> bool {
        port_space(self.space).is_some() && !self.options.is_bare
    }
}

#[allow(missing_docs, reason = "a call of the RDMA CM trait, documented there")]
impl Nic {
    pub fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError> {
        let entry = self.cm_id(id, "set_option")?;
        entry.options.set(option, entry.state, entry.qp_type)
    }
}
