//! A queue pair of any type: its state machine, path and counters.

use std::net::SocketAddr;
use std::time::Instant;

use chacha20::ChaCha20Rng;
use chacha20::rand_core::Rng as _;

use super::TURN;
use super::config::{NicConfig, QpCounters, Wire};
use super::rate::Limiter;
use super::ud::UdQp;
use crate::rc::{DrainedChange, Env, RcConfig, RcQp, RecvQueue, RtrParams, RtsParams};
use crate::rdmap::{RdmapConfig, RdmapQp};
use crate::uc::{UcConfig, UcQp, UcRtrParams};
use crate::verbs::{
    Access, AltPath, CqId, Mtu, PathMigState, PdId, PostError, PostReason, QpAttr, QpCap, QpId,
    QpInitAttr, QpState, QpType, SendWr, SrqId, VerbsError, XrcdId,
};
use crate::wire::{IcrcFlow, MAX_HEADER_LEN, Psn, Qpn, RnrTimer, Service};

/// The responder sends an acknowledgement after this number of packets even if it was not
/// requested.
const ACK_EVERY: u32 = 32;

const REQUIRED: &str = "the state table requires it";

#[derive(Debug)]
pub(super) enum Machine {
    Rc(Box<RcQp>),
    /// Initiator or target of an extended reliable connection.
    Xrc(Box<RcQp>),
    Uc(Box<UcQp>),
    Ud(Box<UdQp>),
    /// Connection over a byte stream.
    Stream(Box<RdmapQp>),
}

/// Path used for packets of a connected QP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) addr: SocketAddr,
    /// Index of the local address.
    pub(super) from: u8,
    pub(super) flow: IcrcFlow,
    /// Type of service, without the ECN bits.
    pub(super) tos: u8,
    /// Set if this device is its own peer, so that packets don't leave the device.
    pub(super) is_own: bool,
}

/// Alternate path of a connection.
#[derive(Debug)]
pub(super) struct Alternate {
    pub(super) path: AltPath,
    pub(super) peer: Peer,
    /// Set after a migration to an unknown path has been rejected and reported. This is only
    /// reported once per alternate path, since the peer can repeat these packets.
    pub(super) has_refused: bool,
    /// Number of packets requesting migration to this path with an unexpected PSN.
    pub(super) guesses: u8,
}

#[derive(Debug)]
pub(super) struct Qp {
    pub(super) qpn: u32,
    pub(super) pd: PdId,
    pub(super) qp_type: QpType,
    pub(super) machine: Machine,
    /// Receive queue. If an SRQ is used, the capacity is zero.
    pub(super) rq: RecvQueue,
    /// SRQ. For an XRC target, this is the queue used by the last request.
    pub(super) srq: Option<SrqId>,
    pub(super) xrcd: Option<XrcdId>,
    pub(super) send_cq: CqId,
    pub(super) recv_cq: CqId,
    pub(super) attr: QpAttr,
    pub(super) peer: Option<Peer>,
    /// Path used after a migration.
    pub(super) alternate: Option<Box<Alternate>>,
    pub(super) mig_state: PathMigState,
    /// Set if the owner requested an event when the send queue is drained.
    pub(super) notifies_drain: bool,
    /// UDP source port of the last in-sequence packet from the peer.
    pub(super) source_port: Option<u16>,
    /// Set after accepting a connection, until the peer uses it.
    pub(super) awaits_first_packet: bool,
    /// Set if the QP is waiting to send.
    pub(super) is_queued: bool,
    /// Set if multicast packets sent by this QP should not be looped back to it.
    pub(super) blocks_own_mcast: bool,
    pub(super) limiter: Option<Box<Limiter>>,
    /// Time of the valid entry in the timer heap.
    pub(super) armed: Option<Instant>,
    pub(super) counters: QpCounters,
}

impl Qp {
    pub(super) fn state(&self) -> QpState {
        self.machine.state()
    }

    /// Returns the counters of the QP and its state machine.
    pub(super) fn counters(&self) -> QpCounters {
        let mut counters = self.counters;
        match &self.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => counters.rc = *rc.counters(),
            Machine::Uc(uc) => counters.uc = *uc.counters(),
            Machine::Ud(ud) => counters.dropped_datagrams = ud.dropped,
            Machine::Stream(stream) => counters.rdmap = *stream.counters(),
        }
        counters
    }

    /// Returns the service used by the packets of this QP.
    pub(super) fn service(&self) -> Service {
        match &self.machine {
            Machine::Rc(_) => Service::Rc,
            Machine::Xrc(_) => Service::Xrc,
            Machine::Uc(_) => Service::Uc,
            // There are no packets, and no path to migrate to.
            Machine::Ud(_) | Machine::Stream(_) => Service::Ud,
        }
    }

    /// Returns the next time the state machine needs to be called even if nothing is received.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let machine = match &self.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => rc.poll_timeout(),
            Machine::Uc(uc) => uc.poll_timeout(),
            Machine::Ud(_) | Machine::Stream(_) => None,
        };
        let release = self.limiter.as_deref().and_then(Limiter::release);
        [machine, release].into_iter().flatten().min()
    }

    /// Returns the number of packets that the QP can send when it is scheduled, based on a path MTU
    /// of `mtu` bytes.
    pub(super) fn turn_budget(&mut self, now: Instant, mtu: u32) -> usize {
        let mtu = self.attr.path_mtu.map_or(mtu, Mtu::bytes) as usize;
        match &mut self.limiter {
            None => TURN,
            Some(limiter) => limiter.allow(now, mtu + MAX_HEADER_LEN, TURN),
        }
    }

    /// Updates the limiter after the QP has sent this number of bytes.
    pub(super) fn on_sent(&mut self, now: Instant, bytes: usize) {
        if let Some(limiter) = &mut self.limiter {
            limiter.on_sent(now, bytes);
        }
    }

    /// Returns the time of a new timer entry if required by the current deadline.
    pub(super) fn rearm(&mut self) -> Option<Instant> {
        // If the deadline has been moved back, we keep the earlier entry and add a new one when it
        // fires. If the deadline is now earlier, the old entry becomes invalid.
        let at = self.poll_timeout()?;
        if self.armed.is_some_and(|armed| armed <= at) {
            return None;
        }
        self.armed = Some(at);
        self.armed
    }
}

impl Machine {
    /// Creates the state machine of a QP with this id and number.
    pub(super) fn new(
        config: &NicConfig,
        (id, qpn): (QpId, u32),
        init: &QpInitAttr,
        cap: QpCap,
        random: &mut ChaCha20Rng,
    ) -> Self {
        if config.wire == Wire::Streams {
            return Self::Stream(Box::new(RdmapQp::new(RdmapConfig {
                qp: id,
                qp_num: qpn,
                pd: init.pd,
                cap,
                sq_sig_all: init.sq_sig_all,
                has_srq: init.srq.is_some(),
            })));
        }
        let service = match init.qp_type {
            QpType::Rc => Some(Service::Rc),
            QpType::XrcIni | QpType::XrcTgt => Some(Service::Xrc),
            _ => None,
        };
        if let Some(service) = service {
            let rc = Box::new(RcQp::new(RcConfig {
                qp_num: qpn,
                service,
                sq_sig_all: init.sq_sig_all,
                has_srq: init.srq.is_some() || init.xrcd.is_some(),
                max_inflight_bytes: config.max_inflight_bytes,
                ack_every: ACK_EVERY,
                seed: random.next_u32(),
                ..RcConfig::new(id, init.pd, cap)
            }));
            return match service {
                Service::Rc => Self::Rc(rc),
                _ => Self::Xrc(rc),
            };
        }
        if init.qp_type == QpType::Uc {
            return Self::Uc(Box::new(UcQp::new(UcConfig {
                qp: id,
                qp_num: qpn,
                pd: init.pd,
                cap,
                sq_sig_all: init.sq_sig_all,
                has_srq: init.srq.is_some(),
                max_burst_bytes: config.max_inflight_bytes,
            })));
        }
        // MADs are always 256 bytes, regardless of the path (IBTA 13.5.1).
        let mtu = match init.qp_type {
            QpType::Gsi => 256,
            _ => config.mtu.bytes() as usize,
        };
        let qpn = Qpn::new(qpn);
        Self::Ud(Box::new(UdQp::new(
            id,
            init.pd,
            qpn,
            cap,
            init.sq_sig_all,
            mtu,
        )))
    }

    /// Returns whether requests started before a change to SQD are still outstanding.
    pub(super) fn is_draining(&self) -> bool {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.is_draining(),
            Self::Uc(uc) => uc.is_draining(),
            Self::Stream(stream) => stream.is_draining(),
            // A datagram that has been started is always complete.
            Self::Ud(_) => false,
        }
    }

    /// Changes the maximum number of in-flight bytes.
    pub(super) fn set_max_inflight(&mut self, bytes: u32) {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.set_max_inflight(bytes),
            Self::Uc(uc) => uc.set_max_burst(bytes),
            // A stream uses the flow control of its transport.
            Self::Ud(_) | Self::Stream(_) => {}
        }
    }

    fn state(&self) -> QpState {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.state(),
            Self::Uc(uc) => uc.state(),
            Self::Ud(ud) => ud.state(),
            Self::Stream(stream) => stream.state(),
        }
    }

    /// Moves the QP to the ERROR state due to an internal error of the device.
    pub(super) fn fail(&mut self, env: &mut Env<'_>) {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.to_error(env),
            Self::Uc(uc) => uc.to_error(env),
            Self::Ud(ud) => ud.on_state(QpState::Error, env.rq, env.out),
            Self::Stream(stream) => stream.to_error(env),
        }
    }

    /// Applies attributes after they have been verified. `merged` also contains attributes of
    /// previous requests, since access rights may have been set in INIT.
    pub(super) fn apply(
        &mut self,
        (from, to): (QpState, QpState),
        attr: &QpAttr,
        merged: &QpAttr,
        has_srq: bool,
        env: &mut Env<'_>,
    ) {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => move_rc(rc, from, to, attr, merged, env),
            Self::Uc(uc) => move_uc(uc, from, to, attr, merged, env),
            Self::Stream(stream) => move_stream(stream, from, to, attr, env),
            Self::Ud(ud) => {
                if let Some(qkey) = attr.qkey {
                    ud.set_qkey(qkey);
                }
                if let Some(psn) = attr.sq_psn {
                    ud.set_sq_psn(psn);
                }
                // Do this even if the state was already ERROR, to flush receives that have been
                // posted since.
                if from != to || to == QpState::Error {
                    ud.on_state(to, env.rq, env.out);
                }
                return;
            }
        }
        // In the RESET state, receives are discarded without a completion.
        if to == QpState::Reset && !has_srq {
            env.rq.clear();
        }
    }

    /// Removes the last `count` sends.
    pub(super) fn unpost_send(&mut self, count: usize) {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.unpost_send(count),
            Self::Uc(uc) => uc.unpost_send(count),
            Self::Ud(ud) => ud.unpost_send(count),
            Self::Stream(stream) => stream.unpost_send(count),
        }
    }
}

/// If there are outstanding requests, only unrelated attributes can be changed (IBTA 10.3.1.5).
pub(super) fn check_sqd(attr: &QpAttr, is_draining: bool) -> Result<(), VerbsError> {
    let waits = [
        ("ah", attr.ah.is_some()),
        ("port", attr.port.is_some()),
        ("pkey_index", attr.pkey_index.is_some()),
        ("timeout", attr.timeout.is_some()),
        ("retry_cnt", attr.retry_cnt.is_some()),
        ("rnr_retry", attr.rnr_retry.is_some()),
        ("max_rd_atomic", attr.max_rd_atomic.is_some()),
        ("max_dest_rd_atomic", attr.max_dest_rd_atomic.is_some()),
    ];
    match waits.into_iter().find(|(_, given)| *given && is_draining) {
        Some((name, _)) => Err(VerbsError::InvalidParameter(name)),
        None => Ok(()),
    }
}

/// Adds the attributes of a request to the current attributes.
pub(super) fn merge(into: &mut QpAttr, attr: &QpAttr) {
    macro_rules! take {
        ($($field:ident)*) => { $(if attr.$field.is_some() { into.$field = attr.$field; })* };
    }
    take!(pkey_index port access qkey ah path_mtu dest_qp rq_psn sq_psn max_dest_rd_atomic
        max_rd_atomic min_rnr_timer timeout retry_cnt rnr_retry);
}

/// Posts to an extended connection. Each request specifies a queue of the peer.
pub(super) fn post_xrc(
    rc: &mut RcQp,
    qp_type: QpType,
    wrs: &[SendWr<'_>],
    env: &mut Env<'_>,
) -> Result<(), PostError> {
    let is_good = |wr: &SendWr<'_>| qp_type.has_operation(&wr.op) && names_srq(wr);
    let bad = wrs.iter().position(|wr| !is_good(wr));
    rc.post_send(&wrs[..bad.unwrap_or(wrs.len())], env)?;
    let Some(index) = bad else {
        return Ok(());
    };
    let reason = match qp_type.has_operation(&wrs[index].op) {
        false => PostReason::InvalidOpcode,
        true => PostReason::InvalidRequest("missing remote shared receive queue"),
    };
    Err(PostError { index, reason })
}

/// Returns whether a request specifies an SRQ, or doesn't need it because nothing is sent.
fn names_srq(wr: &SendWr<'_>) -> bool {
    wr.op.is_local() || wr.remote_srqn.is_some_and(|srqn| srqn < 1 << 24)
}

/// Changes the state of an unreliable connection. See [`move_rc`].
fn move_uc(
    uc: &mut UcQp,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
    merged: &QpAttr,
    env: &mut Env<'_>,
) {
    let access = merged.access.unwrap_or_default() & Access::REMOTE;
    match (from, to) {
        (_, QpState::Reset) => uc.to_reset(),
        (_, QpState::Error) => uc.to_error(env),
        (_, QpState::Init) => uc.to_init(),
        (_, QpState::Rtr) => uc.to_rtr(&UcRtrParams {
            path_mtu: attr.path_mtu.expect(REQUIRED),
            dest_qpn: Qpn::new(attr.dest_qp.expect(REQUIRED)),
            rq_psn: Psn::new(attr.rq_psn.expect(REQUIRED)),
            access,
        }),
        (QpState::Rtr, QpState::Rts) => uc.to_rts(Psn::new(attr.sq_psn.expect(REQUIRED))),
        (QpState::Rts, QpState::Sqd) => uc.to_sqd(env),
        (QpState::Sqd | QpState::Sqe, QpState::Rts) => uc.resume(),
        _ => {}
    }
    if matches!(to, QpState::Rts | QpState::Sqd) && attr.access.is_some() {
        uc.set_access(access);
    }
}

/// Changes the state of a stream connection. See [`move_rc`].
fn move_stream(stream: &mut RdmapQp, from: QpState, to: QpState, attr: &QpAttr, env: &mut Env<'_>) {
    match (from, to) {
        (_, QpState::Reset) => stream.to_reset(),
        (_, QpState::Error) => stream.to_error(env),
        (_, QpState::Init) => stream.to_init(),
        (QpState::Rts, QpState::Sqd) => stream.to_sqd(env),
        (QpState::Sqd, QpState::Rts) => stream.resume(),
        _ => {}
    }
    if let Some(access) = attr.access
        && matches!(to, QpState::Rts | QpState::Sqd)
    {
        stream.set_access(access & Access::REMOTE);
    }
}

/// Changes the state of a reliable connection. `merged` contains all attributes that are required
/// for this state.
fn move_rc(
    rc: &mut RcQp,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
    merged: &QpAttr,
    env: &mut Env<'_>,
) {
    let access = merged.access.unwrap_or_default() & Access::REMOTE;
    // For RTR and RTS, the state is changed first since this includes the attributes. For any other
    // state, this is done afterwards.
    match (from, to) {
        (_, QpState::Reset) => rc.to_reset(),
        (_, QpState::Error) => rc.to_error(env),
        (_, QpState::Init) => rc.to_init(),
        (_, QpState::Rtr) => rc.to_rtr(&RtrParams {
            path_mtu: attr.path_mtu.expect(REQUIRED),
            dest_qpn: Qpn::new(attr.dest_qp.expect(REQUIRED)),
            rq_psn: Psn::new(attr.rq_psn.expect(REQUIRED)),
            // An XRC initiator does not receive requests.
            max_dest_rd_atomic: attr.max_dest_rd_atomic.unwrap_or(0),
            min_rnr_timer: RnrTimer::new(attr.min_rnr_timer.unwrap_or(0)),
            access,
        }),
        (QpState::Rtr, QpState::Rts) => rc.to_rts(&RtsParams {
            sq_psn: Psn::new(attr.sq_psn.expect(REQUIRED)),
            timeout: attr.timeout.expect(REQUIRED),
            // An XRC target doesn't send requests.
            retry_cnt: attr.retry_cnt.unwrap_or(0),
            rnr_retry: attr.rnr_retry.unwrap_or(0),
            max_rd_atomic: attr.max_rd_atomic.unwrap_or(0),
        }),
        (QpState::Rts, QpState::Sqd) => rc.to_sqd(env),
        (QpState::Sqd, QpState::Rts) => rc.resume(),
        _ => {}
    }
    if matches!(to, QpState::Rts | QpState::Sqd) {
        if attr.access.is_some() {
            rc.set_access(access);
        }
        if let Some(code) = attr.min_rnr_timer {
            rc.set_min_rnr_timer(RnrTimer::new(code));
        }
    }
    if (from, to) == (QpState::Sqd, QpState::Sqd) {
        rc.change_drained(&DrainedChange {
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
        });
    }
}
