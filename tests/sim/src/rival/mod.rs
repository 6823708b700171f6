//! An iSCSI initiator that uses features which ours does not use: multiple connections per session,
//! all ways to send data, task management at any time, and session reinstatement.
//!
//! ```text
//!   Down ─→ LoggingIn ─→ Up ─→ LoggingOut ─→ Over
//!    ↑          │         │         │
//!    └──────────┴─────────┘         └─ the connection breaks: Over
//! ```
//!
//! Commands are numbered in order and sent on a random connection, possibly after a newer command
//! on another connection. At error recovery level 2, the session continues with the remaining
//! connections ([`recovery`]). At lower levels, it is closed with any of its connections, and the
//! next session reinstates it (RFC 7143 6.3.5).
//!
//! # Verdict
//! Its data is part of the history of the disk, as for all other initiators. In addition:
//! - Each command is completed once. It is an error if a response has a tag that was already
//!   completed or never used. It's also an error if ABORT TASK on the connection of a command does
//!   not find it, unless its response was received before.
//! - When a task management function is complete, aborted commands have no further effect (SAM-5
//!   clause 7), so they are completed in the history at this time. On another connection than that
//!   of the function, the response may arrive later, because it may have been in flight. An
//!   immediate function may be executed before older commands: a command that was sent after it on
//!   another connection may or may not be aborted.
//! - Commands of an old session have no further effect after a command of the session that
//!   reinstates it was successful. While a disk is hanging, the login is accepted before that, but
//!   the unit is BUSY.

pub(crate) mod connection;
mod recovery;
mod tasks;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{InitiatorConfig, SessionParams};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{
    FromTarget, LogoutReason, LogoutRequest, NopOut, Reject, RejectReason,
};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Numbers, StatSn, Tsih, Ttt};
use riser_test_peers::pdus;
use riser_tests::history::ReadId;
use serde::{Deserialize, Serialize};
use tracing::debug;

use self::connection::{Connection, Event, MAX_RECV};
use self::recovery::{Lost, Orphan};
use self::tasks::{Aborted, Function, Task};
use crate::initiator::{Dial, Dialed, User};
use crate::model::Model;
use crate::plan::Plan;
use crate::stream::Stream;
use crate::target;

/// Timeout for a login or logout.
const LOGIN: Duration = Duration::from_secs(10);

/// The connection is pinged if nothing was received for this time, and closed after twice this
/// time.
const PING: Duration = Duration::from_secs(5);

/// Age at which a command is aborted, and the delay before this is repeated.
const LATE: Duration = Duration::from_secs(3);

/// Maximum delay between two commands that can be sent.
const SOON: Duration = Duration::from_millis(2);

/// If the maximum number of commands is in flight, only this number of functions is used at a time.
const FUNCTIONS: usize = 2;

/// The plan of a rival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RivalPlan {
    /// Number of connections in its session.
    pub connections: usize,
    /// Maximum number of commands in flight.
    pub depth: usize,
    /// Total number of commands.
    pub commands: usize,
    /// Number of task management functions per 32 commands.
    pub functions: u8,
    /// Number of commands for persistent reservations per 32 commands.
    pub reservations: u8,
    /// Number of abandoned sessions per 256 actions.
    pub departures: u8,
    /// Number of COMPARE AND WRITE commands per 32 commands.
    pub swaps: u8,
    /// Offered error recovery level.
    pub recovery_level: u8,
    /// Number of closed connections per 256 actions.
    pub breaks: u8,
    /// Number of corrupted PDUs per 256 Data-Out PDUs with a digest.
    pub spoils: u8,
}

impl Default for RivalPlan {
    /// A rival that reads and writes.
    fn default() -> Self {
        Self {
            connections: 1,
            depth: 1,
            commands: 10,
            functions: 0,
            reservations: 0,
            departures: 0,
            swaps: 0,
            recovery_level: 0,
            breaks: 0,
            spoils: 0,
        }
    }
}

impl RivalPlan {
    /// Draws a rival for a seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            connections: [1, 1, 2, 4][rng.usize(..4)],
            depth: [1, 4, 16][rng.usize(..3)],
            commands: rng.usize(5..=60),
            functions: [0, 2, 8][rng.usize(..3)],
            reservations: 0,
            departures: [0, 0, 4, 16][rng.usize(..4)],
            ..Self::default()
        }
    }

    /// Draws further properties for a seed: some rivals occasionally fill the entire window.
    #[must_use]
    pub fn with_more(self, rng: &mut Rng) -> Self {
        let is_deep = rng.u8(..8) == 0;
        let more = Self {
            swaps: [0, 0, 4][rng.usize(..3)],
            recovery_level: [0, 1, 2, 2][rng.usize(..4)],
            breaks: [0, 0, 4, 16][rng.usize(..4)],
            spoils: [0, 0, 0, 16][rng.usize(..4)],
            ..self
        };
        // It would make almost no progress.
        let breaks = if more.recovery_level < 2 {
            0
        } else {
            more.breaks
        };
        match is_deep {
            true => Self {
                depth: 128,
                commands: self.commands * 8,
                breaks,
                ..more
            },
            false => Self { breaks, ..more },
        }
    }
}

/// State of the session.
#[derive(Debug)]
enum Phase {
    /// There is no session until this time.
    Down { until: Instant },
    /// The first connection is logging in.
    LoggingIn { until: Instant },
    /// Full-feature phase.
    Up,
    /// All commands are done.
    LoggingOut { until: Instant },
    /// The rival has left.
    Over,
}

/// An iSCSI initiator, see the module documentation.
#[derive(Debug)]
pub struct Rival {
    user: User,
    model: Rc<Model>,
    plan: RivalPlan,
    blocks: u64,
    longest: u64,
    /// Number of paths to the target, which are chosen at random for each connection.
    paths: usize,
    address: IpAddr,
    isid: Isid,
    dialed: Dialed,
    rng: Rng,
    phase: Phase,
    /// Represents the login in the history until a command of the session was successful.
    fence: Option<ReadId>,
    connections: Vec<Connection>,
    tsih: Tsih,
    params: Option<SessionParams>,
    cmd_sn: CmdSn,
    max_cmd_sn: CmdSn,
    exp_cmd_sn: CmdSn,
    /// Commands in flight, by tag.
    tasks: BTreeMap<u32, Task>,
    /// Functions in flight, by tag.
    functions: BTreeMap<u32, Function>,
    /// Aborted commands whose response may still be in flight, by tag.
    aborted: BTreeMap<u32, Aborted>,
    /// Lost connections, by number.
    lost: BTreeMap<usize, Lost>,
    /// Commands of lost connections, by tag.
    orphans: BTreeMap<u32, Orphan>,
    /// Logouts for lost connections in flight, by tag.
    logouts: BTreeMap<u32, usize>,
    /// CmdSNs that were reused and may not have been received.
    plugs: Vec<CmdSn>,
    next_tag: u32,
    /// The unit may be removed.
    may_vanish: bool,
    /// The nexus may be registered.
    is_registered: bool,
    /// The target never closes a connection.
    keeps_connections: bool,
    /// Commands may be delayed by a rate limit.
    is_limited: bool,
    /// The session will be closed by I_T NEXUS RESET.
    is_reset: bool,
    /// A block that was read, and its contents.
    seen: Option<(u64, Vec<u8>)>,
    /// Number of remaining commands.
    left: usize,
    next_action: Instant,
    next_look: Instant,
}

impl Rival {
    /// Creates a rival that is about to log in. The index must be unique.
    #[must_use]
    pub fn new(
        (index, plan): (usize, RivalPlan),
        (user, model): (User, Rc<Model>),
        whole: &Plan,
        dialed: &Dialed,
        (now, rng): (Instant, Rng),
    ) -> Self {
        Self {
            user,
            model,
            plan,
            blocks: whole.blocks,
            longest: whole.longest,
            paths: whole.paths,
            address: IpAddr::from([10, 0, 0, 200 + index as u8]),
            isid: Isid([0x80, 0, 0, 0, 1, index as u8]),
            dialed: dialed.clone(),
            rng,
            phase: Phase::Down { until: now },
            fence: None,
            connections: Vec::new(),
            tsih: Tsih(0),
            params: None,
            cmd_sn: CmdSn(1),
            max_cmd_sn: CmdSn(0),
            tasks: BTreeMap::new(),
            functions: BTreeMap::new(),
            aborted: BTreeMap::new(),
            lost: BTreeMap::new(),
            orphans: BTreeMap::new(),
            logouts: BTreeMap::new(),
            plugs: Vec::new(),
            exp_cmd_sn: CmdSn(0),
            next_tag: 1,
            may_vanish: whole.may_lose_target(),
            is_registered: plan.reservations > 0,
            keeps_connections: whole.keeps_connections(),
            is_limited: whole.is_limited(),
            is_reset: false,
            seen: None,
            left: plan.commands,
            next_action: now,
            next_look: now,
        }
    }

    /// Returns whether all commands have been completed and the rival has left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Performs pending work. Returns whether there was any.
    pub fn step(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for connection in &mut self.connections {
            worked |= connection.step(now);
        }
        let mut at = 0;
        while at < self.connections.len() {
            match self.connections[at].poll() {
                Some(event) => self.on_event(at, event, now),
                None => at += 1,
            }
        }
        worked | self.act(now)
    }

    /// Returns the time of the next action.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let own = match self.phase {
            Phase::Down { until } | Phase::LoggingIn { until } => Some(until),
            Phase::LoggingOut { until } => Some(until),
            Phase::Up if self.may_act() => Some(self.next_action.min(self.next_look)),
            Phase::Up => Some(self.next_look),
            Phase::Over => None,
        };
        let leaving = self
            .connections
            .iter()
            .filter_map(Connection::next_deadline);
        let recovery = match self.phase {
            Phase::Up => self.next_recovery(),
            _ => None,
        };
        leaving.chain(own).chain(recovery).min()
    }

    fn fail(&self, what: &str) {
        let why = format!("rival of port {}: {what}", self.user.port.0);
        self.user.check_result::<(), _>(Err(why));
    }

    fn on_event(&mut self, at: usize, event: Event, now: Instant) {
        match event {
            Event::Ready(tsih, params) => self.on_ready(at, tsih, params, now),
            Event::Pdu(pdu, numbers, data) => self.on_pdu(at, pdu, numbers, &data, now),
            Event::Ended => {
                let is_up = matches!(self.phase, Phase::Up);
                let may_end = !self.keeps_connections || self.is_reset;
                if is_up && !may_end && self.connections[at].is_ready() {
                    self.fail(&format!("the target ends connection {at}"));
                }
                self.lose_connection(at, now);
            }
            Event::Fault(what) => {
                self.fail(&what);
                self.lose(now);
            }
        }
    }

    /// Called when a connection has logged in. The first connection reinstates the previous session
    /// of the port. Other connections may reinstate a lost connection, which is then detached.
    fn on_ready(&mut self, at: usize, tsih: Tsih, params: SessionParams, now: Instant) {
        if matches!(self.phase, Phase::Up | Phase::LoggingOut { .. }) {
            if self.lost.remove(&at).is_some() {
                self.plug_all(now);
            }
            return;
        }
        let before = std::mem::replace(&mut self.phase, Phase::Up);
        let Phase::LoggingIn { .. } = before else {
            self.phase = before;
            return self.fail("unexpected end of a login");
        };
        self.model.lose_change(self.user.port);
        self.model.log_in(self.user.port);
        (self.tsih, self.params) = (tsih, Some(params));
        (self.next_action, self.next_look) = (now, now + PING);
        debug!(port = self.user.port.0, ?params, "logged in");
    }

    fn on_pdu(&mut self, at: usize, pdu: FromTarget, numbers: Numbers, data: &[u8], now: Instant) {
        if self.exp_cmd_sn.is_before(numbers.exp_cmd_sn) {
            self.exp_cmd_sn = numbers.exp_cmd_sn;
        }
        if self.max_cmd_sn.is_before(numbers.max_cmd_sn) {
            self.max_cmd_sn = numbers.max_cmd_sn;
            self.next_action = self.next_action.min(now + SOON);
        }
        match pdu {
            FromTarget::ScsiResponse(response) => self.on_response(at, &response, data),
            FromTarget::DataIn(header) => self.on_data_in(at, &header, data, now),
            FromTarget::R2t(r2t) => self.on_r2t(at, &r2t, now),
            FromTarget::TmfResponse(response) => self.on_function_end(at, response, now),
            FromTarget::NopIn(ping) if ping.ttt != Ttt::NONE => self.send_pong(at, ping.ttt, now),
            FromTarget::LogoutResponse(reply) => match self.logouts.remove(&reply.itt.0) {
                Some(lost) => self.on_detached(lost, now),
                None => self.end_session(),
            },
            FromTarget::NopIn(_) | FromTarget::AsyncMessage(_) => {}
            // The target could not accept another function. Its tag is in the returned header.
            FromTarget::Reject(Reject {
                reason: RejectReason::TooManyImmediate,
            }) => self.on_function_refused(data),
            // The target requests the data again, or the command fails.
            FromTarget::Reject(Reject {
                reason: RejectReason::DataDigestError,
            }) if self.plan.spoils > 0 => {}
            other => self.fail(&format!("{other:?}")),
        }
    }

    fn send_pong(&mut self, at: usize, ttt: Ttt, now: Instant) {
        let pdu = NopOut {
            itt: Itt::NONE,
            ttt,
            exp_stat_sn: self.connections[at].exp_stat_sn(),
            ..pdus::nop_out(0, self.cmd_sn.0)
        };
        self.connections[at].send(now, pdu.header(), &[]);
    }

    /// Called when the session was lost. Commands in flight may still have an effect until the next
    /// login.
    fn lose(&mut self, now: Instant) {
        debug!(port = self.user.port.0, "the session is lost");
        self.model.log_out(self.user.port);
        // The target may have lost its cache, which a later flush would not report to this
        // initiator.
        let history = &self.user.history;
        history.fail_flush(history.begin_flush(self.user.port));
        self.connections.clear();
        self.functions.clear();
        self.aborted.clear();
        let orphans = std::mem::take(&mut self.orphans).into_values();
        let tasks = std::mem::take(&mut self.tasks).into_values();
        for task in tasks.chain(orphans.map(Orphan::into_task)) {
            task.lose(&self.user);
        }
        self.lost.clear();
        self.logouts.clear();
        self.plugs.clear();
        if let Some(fence) = self.fence.take() {
            self.user.history.abandon_read(fence);
        }
        let until = now + Duration::from_micros(self.rng.u64(..200_000));
        match std::mem::replace(&mut self.phase, Phase::Down { until }) {
            Phase::LoggingOut { .. } | Phase::Over => self.phase = Phase::Over,
            Phase::Down { .. } | Phase::LoggingIn { .. } | Phase::Up => {}
        }
    }

    /// Called when a command was successful: commands from previous sessions have no further
    /// effect.
    fn end_fence(&mut self) {
        if let Some(fence) = self.fence.take() {
            self.user
                .check_result(self.user.history.end_read(fence, &[]));
        }
    }

    fn end_session(&mut self) {
        if let Some(fence) = self.fence.take() {
            self.user.history.abandon_read(fence);
        }
        self.model.log_out(self.user.port);
        self.connections.clear();
        self.phase = Phase::Over;
    }

    /// Returns whether there is something to send. Functions can still be sent if the maximum
    /// number of commands is in flight, if they are completed.
    fn may_act(&self) -> bool {
        let has_room = self.tasks.len() + self.orphans.len() < self.plan.depth;
        let may_manage = self.plan.functions > 0 && self.functions.len() < FUNCTIONS;
        self.left > 0 && (has_room || may_manage)
    }

    /// Runs the action that is due.
    fn act(&mut self, now: Instant) -> bool {
        if matches!(self.phase, Phase::Up) && self.recover(now) {
            return true;
        }
        match self.phase {
            Phase::Down { until } if until <= now => self.log_in(now),
            Phase::LoggingIn { until } if until <= now => self.lose(now),
            Phase::LoggingOut { until } if until <= now => self.end_session(),
            Phase::Up if self.next_look <= now => self.check_timeouts(now),
            Phase::Up if self.left == 0 && self.is_idle() => return self.finish(now),
            Phase::Up if self.may_act() && self.next_action <= now => {
                // To fill a window, commands must be sent faster than disks complete them.
                let soon = if self.plan.depth > 16 {
                    SOON / 64
                } else {
                    SOON
                };
                self.next_action = now + soon.mul_f64(self.rng.f64());
                self.do_something(now);
            }
            _ => return false,
        }
        true
    }

    /// Returns whether nothing is in flight.
    fn is_idle(&self) -> bool {
        self.tasks.is_empty() && self.orphans.is_empty() && self.functions.is_empty()
    }

    /// Unregisters or logs out. Returns whether this was possible.
    fn finish(&mut self, now: Instant) -> bool {
        if self.is_registered {
            return self.unregister(now);
        }
        self.log_out(now);
        true
    }

    fn log_in(&mut self, now: Instant) {
        (self.tsih, self.params, self.is_reset) = (Tsih(0), None, false);
        self.cmd_sn = CmdSn(self.rng.u32(..));
        (self.max_cmd_sn, self.exp_cmd_sn) = (self.cmd_sn, self.cmd_sn);
        let (port, history) = (self.user.port, &self.user.history);
        // Recorded as a read of no blocks: when it completes, writes that were lost before it
        // started have no further effect.
        let fence = history.begin_read(port, 0..0);
        let until = now + LOGIN;
        self.fence = Some(fence);
        self.phase = Phase::LoggingIn { until };
        self.dial(0, now);
    }

    /// Opens a connection of the session, possibly to reinstate a lost connection.
    fn dial(&mut self, at: usize, now: Instant) {
        let rng = &mut self.rng;
        let values = [
            (Key::MaxConnections, self.plan.connections as u32),
            (Key::InitialR2T, rng.u32(..2)),
            (Key::ImmediateData, rng.u32(..2)),
            (Key::FirstBurstLength, [512, 4096, 65_536][rng.usize(..3)]),
            (Key::MaxBurstLength, [512, 8192, 262_144][rng.usize(..3)]),
            (Key::IscsiProtocolLevel, 2),
        ];
        let digests = [1, 3][rng.usize(..2)];
        let mut offer = Offer::default()
            .with(
                Key::MaxRecvDataSegmentLength,
                [512, 8192, MAX_RECV][rng.usize(..3)],
            )
            .with_list(Key::HeaderDigest, digests)
            .with_list(Key::DataDigest, digests);
        let mut keys = vec![Key::HeaderDigest, Key::DataDigest];
        let mut values = Vec::from(values);
        if self.plan.recovery_level > 0 {
            values.extend([
                (Key::ErrorRecoveryLevel, u32::from(self.plan.recovery_level)),
                (Key::DefaultTime2Wait, [0, 2, 3600][rng.usize(..3)]),
                (Key::DefaultTime2Retain, [0, 20, 20][rng.usize(..3)]),
            ]);
        }
        if self.tsih == Tsih(0) {
            for (key, value) in values {
                offer = offer.with(key, value);
                keys.push(key);
            }
        }
        let name = format!("iqn.2026-01.org.example:rival{}", self.user.port.0);
        let config = InitiatorConfig {
            name: IscsiName::new(&name).expect("a name"),
            target: IscsiName::new(target::IQN).ok(),
            isid: self.isid,
            tsih: self.tsih,
            cid: Cid(at as u16),
            cmd_sn: self.cmd_sn,
            credentials: None,
            target_credentials: None,
            offer,
            keys,
        };
        let (ours, theirs) = Stream::pair();
        let path = self.rng.usize(..self.paths);
        self.dialed.borrow_mut().push(Dial {
            from: self.address,
            to: target::tcp_address(path),
            stream: theirs,
        });
        let connection = Connection::new(ours, config, [9; 33], now);
        match self.connections.get_mut(at) {
            Some(lost) => *lost = connection,
            None => self.connections.push(connection),
        }
    }

    fn log_out(&mut self, now: Instant) {
        self.phase = Phase::LoggingOut { until: now + LOGIN };
        let request = LogoutRequest {
            immediate: true,
            reason: LogoutReason::CloseSession,
            itt: Itt(self.next_tag),
            cid: Cid(0),
            cmd_sn: self.cmd_sn,
            exp_stat_sn: StatSn(0),
        };
        let out = self.pick_connection();
        self.connections[out].send(now, request.header(), &[]);
    }

    /// Checks timeouts: pings silent connections, closes dead ones, aborts commands.
    fn check_timeouts(&mut self, now: Instant) {
        self.next_look = now + LATE;
        let is_silent = |c: &Connection| c.is_silent_since(now - 3 * PING);
        if let Some(at) = self.connections.iter().position(is_silent) {
            return self.lose_connection(at, now);
        }
        for at in 0..self.connections.len() {
            if self.connections[at].is_ready() && self.connections[at].last_received + PING < now {
                let tag = self.take_tag();
                let exp_stat_sn = self.connections[at].exp_stat_sn();
                let ping = NopOut {
                    exp_stat_sn,
                    ..pdus::nop_out(tag, self.cmd_sn.0)
                };
                self.connections[at].send(now, ping.header(), &[]);
            }
        }
        self.abort_late(now);
    }

    fn take_tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }
}
