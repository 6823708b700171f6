//! New requests after a rejection: with a smaller path MTU, or to another port.

use std::net::SocketAddr;

use super::calls::check_destination;
use super::{CmAgent, Id, IdState};
use crate::cm::IbCmId;
use crate::nic::{Device, Wire};
use crate::verbs::{CmId, Mtu};
use crate::wire::Qpn;
use crate::wire::cm_msg::{AdditionalInfo, Redirect, RejReason};

impl CmAgent {
    /// Sends a new request as requested by the peer with its rejection. Returns `false` if this is
    /// not possible.
    pub(super) fn retry_request(
        &mut self,
        device: &mut Device,
        id: CmId,
        ib: IbCmId,
        reason: RejReason,
        info: &AdditionalInfo,
    ) -> bool {
        let Ok(entry) = self.ids.get_mut(id) else {
            return false;
        };
        if entry.state != IdState::Connecting || entry.ib != Some(ib) {
            return false;
        }
        let mtu = match reason {
            RejReason::InvalidMtu => entry.reduce_mtu(device, info),
            _ => entry.follow_redirect(device, reason, info),
        };
        let (Some(mtu), Some(param)) = (mtu, entry.param.clone()) else {
            return false;
        };
        // The id was closed by the REJ, even if we cannot send another request: the IB CM can reuse
        // it for a new connection.
        entry.ib = None;
        self.by_ib.remove(&ib);
        self.send_request(device, id, &param, mtu).is_ok()
    }
}

impl Id {
    /// Returns a path MTU that is supported by the peer.
    fn reduce_mtu(&mut self, device: &Device, info: &AdditionalInfo) -> Option<Mtu> {
        let supported = info.first().and_then(|&code| Mtu::from_code(code));
        let mtu = supported.filter(|&mtu| mtu < device.config().mtu)?;
        // Only retry once, because a peer could reject every path MTU.
        let is_first = !std::mem::replace(&mut self.retried, true);
        is_first.then_some(mtu)
    }

    /// Replaces the port of the peer, without an alternate path, and returns the path MTU for the next
    /// request. Returns `None` if the limit is reached, or if the port cannot be used.
    fn follow_redirect(
        &mut self,
        device: &Device,
        reason: RejReason,
        info: &AdditionalInfo,
    ) -> Option<Mtu> {
        let redirect = Redirect::parse(reason, info)?;
        let (own, mtu) = (device.port.addr().ip(), device.config().mtu);
        let to = redirect.gid.ip();
        // A device reaches other CMs only by QP 1, and peers on shared memory only by their link.
        let is_reachable = redirect.qpn == Qpn::GSI
            && device.config().wire == Wire::Network
            && check_destination(own, to, false).is_ok();
        let peer = self.peer.filter(|peer| peer.ip() != to && is_reachable)?;
        // Ports could refer to each other forever.
        if self.redirects == self.options.redirects {
            return None;
        }
        self.redirects += 1;
        self.peer = Some(SocketAddr::new(to, peer.port()));
        // It leads to the previous port, whose host may be another one.
        self.alternate = None;
        // The path MTU of the new port can be different.
        self.retried = false;
        Some(self.options.path_mtu.map_or(mtu, |most| most.min(mtu)))
    }
}
