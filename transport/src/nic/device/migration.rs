//! Path migration of connections (IBTA 17.2.8): alternate paths, and the packets, commands and
//! timeouts that cause a connection to switch to its alternate path.
//!
//! A path consists of a local address and a peer address ([`Peer`]). A queue pair has a primary
//! path, and optionally an alternate path and a [`PathMigState`], which contains a diagram of all
//! transitions. Connections without an alternate path are in the MIGRATED state and don't use any
//! of this: here `is_from_peer` only compares a packet with the primary path. In the other two
//! states, all packets are handled by this module.
//!
//! # Packets
//! How we handle a packet depends on its path and its MigReq bit:
//!
//! | state | primary path, no MigReq | primary path, MigReq | alternate path, MigReq | otherwise |
//! | --- | --- | --- | --- | --- |
//! | MIGRATED | accept | accept | drop | drop |
//! | REARM | accept, change to ARMED | accept | drop | drop |
//! | ARMED | accept | accept | change to MIGRATED, accept | drop; report an event if MigReq |
//!
//! A packet can only change the state or report an event if it passes all checks, including the
//! ICRC, and if its PSN is currently expected from the peer
//! ([`RcQp::knows`](crate::rc::RcQp::knows)). Otherwise, anyone who knows a queue pair number could
//! redirect its connection by sending a single packet with the spoofed address of the alternate
//! path. An unreliable connection accepts any PSN, so we can only check the address and the state
//! there.
//!
//! If an armed connection receives a packet with MigReq on its primary path, the packet is accepted
//! without changing the state, because it could have been sent before the peer was rearmed.
//!
//! # After a migration
//! The alternate path is now the primary path, and there is no alternate path until the owner loads
//! a new one. All state of the old path is discarded: the window, the round-trip time, and the
//! source port of the peer. Outstanding packets are retransmitted, and a reliable connection sends
//! an acknowledgement for received data, so that the peer also migrates if there is nothing else to
//! send.

use std::mem;

use super::Device;
use crate::cm::CmRoute;
use crate::nic::Wire;
use crate::nic::qp::{Alternate, Machine, Peer, Qp};
use crate::nic::received::Received;
use crate::nic::with_env;
use crate::rc::Env;
use crate::verbs::{AltPath, AsyncEvent, PathMigState, QpAttr, QpId, QpState, QpType, VerbsError};
use crate::wire::Packet;

/// After this number of wrong guesses, packets can no longer migrate the connection to its
/// alternate path. A valid peer does not need to guess, and only one in a few thousand PSNs is
/// accepted. The connection can still be migrated by the owner or when retries are exhausted.
const MAX_GUESSES: u8 = 64;

/// Classification of a packet for a connection with two paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// Received on the primary path.
    Plain,
    /// Received on the primary path, and indicates that the peer is ready to migrate.
    Arms,
    /// Received on the alternate path after the peer has migrated to it.
    Migrates,
    /// The peer has migrated to an unknown path.
    Refused,
    /// Received from a wrong address.
    Stranger,
}

/// Implements the table above. `is_known` is set if the PSN is currently expected from the peer.
fn plan_arrival(
    state: PathMigState,
    is_on_path: bool,
    is_on_alternate: bool,
    has_mig_req: bool,
    is_known: bool,
) -> Arrival {
    match (state, has_mig_req) {
        // Check this first, because both paths can use the same addresses.
        (PathMigState::Armed, true) if is_on_alternate && is_known => Arrival::Migrates,
        (PathMigState::Rearm, false) if is_on_path && is_known => Arrival::Arms,
        _ if is_on_path => Arrival::Plain,
        (PathMigState::Armed, true) if is_known => Arrival::Refused,
        _ => Arrival::Stranger,
    }
}

impl Peer {
    /// Returns whether a packet was received on this path.
    pub(in crate::nic) fn is_way_of(&self, received: &Received<'_>) -> bool {
        self.addr.ip() == received.src.ip() && self.from == received.ip.gid_index
    }
}

impl Qp {
    fn plan_arrival(&self, received: &Received<'_>, packet: &Packet<'_>) -> Arrival {
        let is_known = match &self.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => rc.knows(packet),
            Machine::Uc(uc) => {
                !matches!(uc.state(), QpState::Reset | QpState::Init | QpState::Error)
            }
            Machine::Ud(_) | Machine::Stream(_) => false,
        };
        let is_guessed = |alternate: &Alternate| alternate.guesses >= MAX_GUESSES;
        let is_known = is_known
            && !(packet.bth.is_migrated() && self.alternate.as_deref().is_some_and(is_guessed));
        let is_way = |peer: &Peer| peer.is_way_of(received);
        plan_arrival(
            self.mig_state,
            self.peer.as_ref().is_some_and(is_way),
            self.alternate.as_ref().is_some_and(|a| is_way(&a.peer)),
            packet.bth.is_migrated(),
            is_known,
        )
    }

    /// Returns the alternate path and the migration state for a query.
    pub(super) fn migration_attr(&self) -> (Option<AltPath>, Option<PathMigState>) {
        let is_connected = !matches!(self.qp_type, QpType::Ud | QpType::Gsi);
        (
            self.alternate.as_ref().map(|alternate| alternate.path),
            is_connected.then_some(self.mig_state),
        )
    }

    /// Changes the migration state.
    fn become_mig_state(&mut self, next: PathMigState) {
        if self.mig_state != next {
            riser_state::become_state(&mut self.mig_state, next);
        }
        if let Machine::Rc(rc) | Machine::Xrc(rc) = &mut self.machine {
            rc.set_armed(next == PathMigState::Armed);
        }
    }

    /// Removes the alternate path, as required for RESET.
    pub(in crate::nic) fn forget_alternate(&mut self) {
        self.alternate = None;
        self.become_mig_state(PathMigState::Migrated);
    }
}

impl Device {
    /// Checks if a packet is valid for a QP with two paths, after `is_from_peer` has failed. If
    /// not, it is counted as an error. The ICRC has not been verified yet.
    #[cold]
    pub(in crate::nic) fn is_on_path(
        &mut self,
        id: QpId,
        received: &Received<'_>,
        packet: &Packet<'_>,
    ) -> bool {
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        // A packet with the wrong service type is not valid for this QP, even if it is from its
        // peer.
        if packet.op.service != qp.service() {
            self.counters.rx_unknown_qp += 1;
            return false;
        }
        let is_ours = qp.plan_arrival(received, packet) != Arrival::Stranger;
        if !is_ours {
            if let Some(alternate) = &mut qp.alternate
                && packet.bth.is_migrated()
                && alternate.peer.is_way_of(received)
            {
                alternate.guesses = alternate.guesses.saturating_add(1);
            }
            qp.counters.wrong_source += 1;
            self.counters.rx_wrong_source += 1;
        }
        is_ours
    }

    /// Updates the migration state for a packet accepted by [`Device::is_on_path`], after its ICRC has
    /// been verified. This will return whether the packet should be processed.
    #[cold]
    pub(in crate::nic) fn follow_path(
        &mut self,
        id: QpId,
        received: &Received<'_>,
        packet: &Packet<'_>,
    ) -> bool {
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        match qp.plan_arrival(received, packet) {
            Arrival::Plain => {}
            Arrival::Arms => qp.become_mig_state(PathMigState::Armed),
            Arrival::Migrates => self.migrate(id),
            Arrival::Refused => {
                qp.counters.wrong_source += 1;
                self.counters.rx_wrong_source += 1;
                let alternate = qp.alternate.as_mut();
                let is_first = alternate
                    .is_some_and(|alternate| !mem::replace(&mut alternate.has_refused, true));
                if is_first {
                    self.events.raise(AsyncEvent::PathMigError(id));
                }
                return false;
            }
            Arrival::Stranger => return false,
        }
        true
    }

    /// Checks the migration attributes of a request. Returns the alternate path, if included.
    pub(in crate::nic) fn plan_alternate(
        &mut self,
        id: QpId,
        attr: &QpAttr,
    ) -> Result<Option<Box<Alternate>>, VerbsError> {
        let alternate = match attr.alt_path {
            Some(path) => {
                if self.config.wire == Wire::Links {
                    return Err(VerbsError::Unsupported("alternate paths"));
                }
                if path.pkey_index != 0 {
                    return Err(VerbsError::InvalidIndex(path.pkey_index));
                }
                if path.timeout > 31 {
                    return Err(VerbsError::InvalidParameter("alternate timeout"));
                }
                let peer = self.plan_way(id, &path.ah, attr)?;
                Some(Box::new(Alternate {
                    path,
                    peer,
                    has_refused: false,
                    guesses: 0,
                }))
            }
            None => None,
        };
        let has_path = alternate.is_some() || self.qps.get(id)?.alternate.is_some();
        match attr.path_mig_state {
            // This state is only set when receiving packets from the peer.
            Some(PathMigState::Armed) => Err(VerbsError::InvalidParameter("path_mig_state")),
            Some(PathMigState::Rearm) if !has_path => Err(VerbsError::InvalidParameter(
                "path_mig_state without an alternate path",
            )),
            _ => Ok(alternate),
        }
    }

    /// Applies a path or migration state change after it has been verified.
    pub(in crate::nic) fn apply_alternate(
        &mut self,
        id: QpId,
        alternate: Option<Box<Alternate>>,
        state: Option<PathMigState>,
    ) -> Result<(), VerbsError> {
        let qp = self.qps.get_mut(id)?;
        if alternate.is_some() {
            qp.alternate = alternate;
        }
        match state {
            Some(PathMigState::Migrated) if qp.mig_state == PathMigState::Armed => self.migrate(id),
            Some(state) => qp.become_mig_state(state),
            None => {}
        }
        Ok(())
    }

    /// Migrates a connection to its alternate path.
    pub(in crate::nic) fn migrate(&mut self, id: QpId) {
        let now = self.clock.now();
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        let Some(alternate) = qp.alternate.take() else {
            return;
        };
        let Alternate { path, peer, .. } = *alternate;
        qp.become_mig_state(PathMigState::Migrated);
        qp.attr.ah = Some(path.ah);
        qp.attr.port = Some(path.ah.port);
        qp.attr.pkey_index = Some(path.pkey_index);
        if qp.attr.timeout.is_some() {
            qp.attr.timeout = Some(path.timeout);
        }
        // The limit for the number of QPs per peer was checked when the path was loaded. We can't
        // check it again, because there is no other path.
        self.change_peer(id, peer);
        if let Ok(qp) = self.qps.get_mut(id)
            && let Machine::Rc(rc) | Machine::Xrc(rc) = &mut qp.machine
        {
            rc.on_migrated(now, path.timeout);
        }
        self.counters.migrations += 1;
        self.events.raise(AsyncEvent::PathMig(id));
        let route = CmRoute {
            peer: peer.addr.ip(),
            gid_index: peer.from,
            traffic_class: path.ah.traffic_class,
        };
        self.migrated.push((id, route));
        self.finish_turn(id);
    }

    /// Handles a connection timer. If there are no retries left, the connection is migrated to its
    /// alternate path.
    pub(in crate::nic) fn fire_rc_timer(&mut self, id: QpId) {
        let now = self.clock.now();
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        with_env!(self, qp, env);
        if let Machine::Rc(rc) | Machine::Xrc(rc) = &mut qp.machine {
            rc.handle_timeout(now, &mut env);
            if rc.take_path_wish() {
                self.migrate(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_state::testing::table;

    use super::*;

    #[test]
    fn transitions_match_diagram() {
        use PathMigState::{Armed, Migrated, Rearm};
        let all = table(&[Migrated, Rearm, Armed]);
        assert_eq!(
            all,
            "Migrated: Rearm\nRearm: Migrated Armed\nArmed: Migrated Rearm\n"
        );
    }

    #[test]
    fn packets_follow_migration_table() {
        use Arrival::{Arms, Migrates, Plain, Refused, Stranger};
        use PathMigState::{Armed, Migrated, Rearm};
        // Primary path without and with MigReq, alternate path without and with MigReq, unknown
        // path without and with MigReq.
        let row = |state, is_known| {
            [(true, false), (false, true), (false, false)].map(|(path, alternate)| {
                [false, true].map(|bit| plan_arrival(state, path, alternate, bit, is_known))
            })
        };
        let migrated = [[Plain, Plain], [Stranger, Stranger], [Stranger, Stranger]];
        assert_eq!(row(Migrated, true), migrated);
        assert_eq!(row(Migrated, false), migrated);
        let rearm = [[Arms, Plain], [Stranger, Stranger], [Stranger, Stranger]];
        assert_eq!(row(Rearm, true), rearm);
        assert_eq!(row(Rearm, false), migrated, "a guess arms nothing");
        let armed = [[Plain, Plain], [Stranger, Migrates], [Stranger, Refused]];
        assert_eq!(row(Armed, true), armed);
        assert_eq!(row(Armed, false), migrated, "a guess moves nothing");
        // These paths only differ in their traffic class.
        assert_eq!(plan_arrival(Armed, true, true, true, true), Migrates);
        assert_eq!(plan_arrival(Armed, true, true, false, true), Plain);
    }
}
