//! Path migration of connections (IBTA 17.2.8): alternate paths, and the packets, commands and
//! time-outs by which a connection takes its own.
//!
//! A path is an address of ours and one of the peer's ([`Peer`]). A queue pair has one; it may have an
//! alternate one beside it, and a [`PathMigState`], whose diagram says what changes it. A connection
//! without an alternate path is in MIGRATED and pays for none of this: in that state a packet is
//! compared with the one path, by `is_from_peer`. In the two others all packets come here.
//!
//! # Packets
//! What a packet does depends on the path that it came by and on its MigReq bit:
//!
//! | state | by the path, without MigReq | by the path, with MigReq | by the alternate path, with MigReq | otherwise |
//! | --- | --- | --- | --- | --- |
//! | MIGRATED | taken | taken | dropped | dropped |
//! | REARM | taken, and to ARMED | taken | dropped | dropped |
//! | ARMED | taken | taken | to MIGRATED, and taken | dropped; an event if it has MigReq |
//!
//! A packet changes the state, or raises an event, only behind all checks, that of its ICRC included,
//! and only if its PSN is one that the peer has reason to send
//! ([`RcQp::knows`](crate::rc::RcQp::knows)). Anyone who knows the number of a queue pair could move
//! its connection otherwise: it costs one forged packet from the address of the alternate path. An
//! unreliable connection takes every PSN, so there the address and the state are all that is
//! compared.
//!
//! A packet with MigReq by the path of an armed connection is taken without consequence. It may have
//! been sent before the peer was rearmed.
//!
//! # After a migration
//! The alternate path is the path, and there is no alternate one until the owner loads another. What
//! the device knew of the old path is forgotten: window, round trip, and the port of the peer's
//! packets. What is outstanding is sent again, and a reliable connection acknowledges what it has
//! had, so that the peer migrates even if there is nothing to send.

use super::Wire;
use super::qp::with_env;
use super::rx::Received;
use super::{Machine, Nic, Peer, Qp};
use std::mem;

use crate::cm::CmRoute;
use crate::rc::Env;
use crate::verbs::{AltPath, AsyncEvent, PathMigState, QpAttr, QpId, QpState, QpType, VerbsError};
use crate::wire::{Packet, Service};

/// Alternate path of a connection.
#[derive(Debug)]
pub(super) struct Alternate {
    path: AltPath,
    peer: Peer,
    /// A migration to another path was refused and reported, which happens once for each alternate
    /// path: peers can repeat what asks for it.
    has_refused: bool,
    /// Packets that asked for a migration to this path with PSNs that the peer has no reason to send.
    guesses: u8,
}

/// Wrong guesses after which no packet migrates the connection to its alternate path. A peer makes
/// none, and one PSN in a few thousand is right. The owner's command and retries still migrate it.
const MAX_GUESSES: u8 = 64;

/// What a packet is to a connection that has two paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// It came by the path.
    Plain,
    /// The same, and it shows that the peer is ready to migrate.
    Arms,
    /// It came by the alternate path, and the peer has migrated there.
    Migrates,
    /// The peer has migrated to a path that is not known.
    Refused,
    /// It has come from a wrong address.
    Stranger,
}

/// The rows of the module's table. `is_known` says whether its PSN is one that the peer has reason to
/// send.
fn plan_arrival(
    state: PathMigState,
    is_on_path: bool,
    is_on_alternate: bool,
    has_mig_req: bool,
    is_known: bool,
) -> Arrival {
    match (state, has_mig_req) {
        // Both paths may have the same addresses.
        (PathMigState::Armed, true) if is_on_alternate && is_known => Arrival::Migrates,
        (PathMigState::Rearm, false) if is_on_path && is_known => Arrival::Arms,
        _ if is_on_path => Arrival::Plain,
        (PathMigState::Armed, true) if is_known => Arrival::Refused,
        _ => Arrival::Stranger,
    }
}

impl Peer {
    /// Whether a packet has come by this path.
    pub(super) fn is_way_of(&self, received: &Received<'_>) -> bool {
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

    fn service(&self) -> Service {
        match &self.machine {
            Machine::Rc(_) => Service::Rc,
            Machine::Xrc(_) => Service::Xrc,
            Machine::Uc(_) => Service::Uc,
            // It has no packets, and no path to migrate to.
            Machine::Ud(_) | Machine::Stream(_) => Service::Ud,
        }
    }

    /// Changes the state of migration.
    fn become_mig_state(&mut self, next: PathMigState) {
        if self.mig_state != next {
            riser_state::become_state(&mut self.mig_state, next);
        }
        if let Machine::Rc(rc) | Machine::Xrc(rc) = &mut self.machine {
            rc.set_armed(next == PathMigState::Armed);
        }
    }

    /// Forgets the alternate path, as RESET does.
    pub(super) fn forget_alternate(&mut self) {
        self.alternate = None;
        self.become_mig_state(PathMigState::Migrated);
    }
}

impl Nic {
    /// Whether a packet that is not plainly the peer's may be for a queue pair all the same: it has
    /// two paths. Counts the packet where it is not. Its ICRC has not been checked.
    #[cold]
    pub(super) fn is_on_path(
        &mut self,
        id: QpId,
        received: &Received<'_>,
        packet: &Packet<'_>,
    ) -> bool {
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        // A packet of another service is not for this queue pair, even from its peer.
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

    /// Does what a packet of [`Nic::is_on_path`] does to the state of migration, once its ICRC has
    /// been checked; returns whether it is taken.
    #[cold]
    pub(super) fn follow_path(
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
                    self.raise(AsyncEvent::PathMigError(id));
                }
                return false;
            }
            Arrival::Stranger => return false,
        }
        true
    }

    /// Checks the attributes of migration that a request gives; answers the alternate path, if it
    /// has one.
    pub(super) fn plan_alternate(
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
            // Only the peer's packets lead there.
            Some(PathMigState::Armed) => Err(VerbsError::InvalidParameter("path_mig_state")),
            Some(PathMigState::Rearm) if !has_path => Err(VerbsError::InvalidParameter(
                "path_mig_state without an alternate path",
            )),
            _ => Ok(alternate),
        }
    }

    /// Carries out a change of a path or of the state of migration that has been found legal.
    pub(super) fn apply_alternate(
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

    /// The alternate path and the state of migration, as a query answers them.
    pub(super) fn migration_attr(qp: &Qp) -> (Option<AltPath>, Option<PathMigState>) {
        let is_connected = !matches!(qp.qp_type, QpType::Ud | QpType::Gsi);
        (
            qp.alternate.as_ref().map(|alternate| alternate.path),
            is_connected.then_some(qp.mig_state),
        )
    }

    /// Takes a connection to its alternate path.
    pub(super) fn migrate(&mut self, id: QpId) {
        let now = self.now;
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
        // Whether the peer may have another queue pair was asked when the path was loaded: there is
        // no other way now.
        self.change_peer(id, peer);
        if let Ok(qp) = self.qps.get_mut(id)
            && let Machine::Rc(rc) | Machine::Xrc(rc) = &mut qp.machine
        {
            rc.on_migrated(now, path.timeout);
        }
        self.counters.migrations += 1;
        self.raise(AsyncEvent::PathMig(id));
        let route = CmRoute {
            peer: peer.addr.ip(),
            gid_index: peer.from,
            traffic_class: path.ah.traffic_class,
        };
        self.migrate_cm_qp(id, route);
        self.settle(id);
    }

    /// Fires the timer of a connection; takes it to its alternate path where its retries are used
    /// up.
    pub(super) fn fire_rc_timer(&mut self, id: QpId) {
        let now = self.now;
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
    fn states_are_those_of_the_diagram() {
        use PathMigState::{Armed, Migrated, Rearm};
        let all = table(&[Migrated, Rearm, Armed]);
        assert_eq!(
            all,
            "Migrated: Rearm\nRearm: Migrated Armed\nArmed: Migrated Rearm\n"
        );
    }

    #[test]
    fn packets_do_what_the_table_says() {
        use Arrival::{Arms, Migrates, Plain, Refused, Stranger};
        use PathMigState::{Armed, Migrated, Rearm};
        // By the path without and with MigReq, by the alternate path without and with it, by
        // another without and with it.
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
        // Paths that differ in their traffic class alone.
        assert_eq!(plan_arrival(Armed, true, true, true, true), Migrates);
        assert_eq!(plan_arrival(Armed, true, true, false, true), Plain);
    }
}
