//! Identifier options.

use std::net::IpAddr;

use super::calls::port_space;
use super::{CmAgent, Id, IdState};
use crate::verbs::{CmError, CmId, CmOption, Mtu, QpType, VerbsError};

/// Max ACK timeout exponent, which is a 5-bit value.
const MAX_ACK_TIMEOUT: u8 = 31;

/// Identifier options; `None` if not set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// Traffic class for sent packets, without the ECN bits.
    pub(crate) traffic_class: Option<u8>,
    /// Allows the port to be shared with other ids.
    pub(crate) reuse: bool,
    family_only: Option<bool>,
    /// Requests don't include an address header.
    is_bare: bool,
    /// Maximum path MTU to request.
    pub(super) path_mtu: Option<Mtu>,
    /// ACK timeout exponent for the QP.
    pub(crate) ack_timeout: Option<u8>,
    /// Allows the peer to load alternate paths.
    pub(super) alternate_paths: bool,
    /// Maximum number of redirections to follow.
    pub(super) redirects: u8,
}

impl Options {
    /// Returns the options inherited by the requests of a listener.
    pub(super) fn of_request(&self) -> Self {
        Self {
            alternate_paths: self.alternate_paths,
            ..Self::default()
        }
    }

    /// Returns whether an id bound to this address is restricted to its address family.
    pub(crate) fn is_family_only(&self, bound: IpAddr) -> bool {
        self.family_only.unwrap_or(bound.is_ipv4())
    }

    /// Sets an option of an id, given its current state and QP type.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] if the option can no longer be changed. This will also return an
    /// error if the value is invalid.
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
                // After bind, all the other owners of the port rely on this.
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
                self.path_mtu = Some(state.precedes_request().then_some(mtu).ok_or(late)?);
            }
            CmOption::Redirects(count) => {
                self.redirects = state.precedes_request().then_some(count).ok_or(late)?;
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
    /// Returns whether requests start with an address header, which is not used for bare service
    /// ids.
    pub(super) fn has_header(&self) -> bool {
        port_space(self.space).is_some() && !self.options.is_bare
    }
}

impl CmAgent {
    pub(crate) fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError> {
        let entry = self.cm_id(id, "set_option")?;
        entry.options.set(option, entry.state, entry.qp_type)
    }
}
