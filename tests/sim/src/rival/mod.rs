//! An initiator of iSCSI that uses what ours does not: several connections of a session, every way
//! to send data, task management at any moment, logins over sessions that live.
//!
//! ```text
//!   Down ─→ LoggingIn ─→ Up ─→ LoggingOut ─→ Over
//!    ↑          │         │         │
//!    └──────────┴─────────┘         └─ the connection breaks: Over
//! ```
//!
//! Commands are numbered in their order and leave by a connection that the seed chooses, perhaps
//! later than a newer one on another connection. At error recovery level 2 the session goes on
//! with the connections that are left ([`recovery`]). Below that it ends with any of its
//! connections, and the next one takes its place (RFC 7143 6.3.5).
//!
//! # Verdict
//! Its data are in the history of the disk like all others. Besides:
//! - A command is answered once. An answer to a tag that was answered, or never sent, is an error;
//!   so is ABORT TASK on the connection of a command that finds nothing, without an answer before.
//! - When a function of task management is complete, what it has ended takes effect no longer
//!   (SAM-5 clause 7): the history takes it for ended then. Of another connection than the
//!   function's, the answer may come later, for it may have been on its way.
//!   A function that goes before its turn ends what it meets: a command that was sent after it on
//!   another connection may be ended by it or not.
//! - Commands of an old session take effect no longer once a command of the session that takes its
//!   place succeeds. The login is accepted before, and the unit is BUSY, while a disk hangs.

pub(crate) mod connection;
mod recovery;
mod tasks;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
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
use crate::target;

/// Longest login, and longest logout.
const LOGIN: Duration = Duration::from_secs(10);

/// Silence of a connection after which it is pinged, and twice of which ends it.
const PING: Duration = Duration::from_secs(5);

/// Age of a command at which it is aborted, and the wait for the next attempt.
const LATE: Duration = Duration::from_secs(3);

/// Longest wait between two commands that may be sent.
const SOON: Duration = Duration::from_millis(2);

/// Functions without an answer, at which no others are sent beside a full set of commands.
const FUNCTIONS: usize = 2;

/// What a rival does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RivalPlan {
    /// Connections of its session.
    pub connections: usize,
    /// Commands outstanding at most.
    pub depth: usize,
    /// Commands in all.
    pub commands: usize,
    /// Of 32 commands, those that are functions of task management.
    pub functions: u8,
    /// Of 32 commands, those about persistent reservations.
    pub reservations: u8,
    /// Of 256 actions, those that leave the session for another one.
    pub departures: u8,
    /// Of 32 commands, those that compare and write.
    pub swaps: u8,
    /// Error recovery level that it offers.
    pub recovery_level: u8,
    /// Of 256 actions, those that break a connection off.
    pub breaks: u8,
    /// Of 256 Data-Out PDUs with a digest, those that are spoilt on their way.
    pub spoils: u8,
}

impl Default for RivalPlan {
    /// One that reads and writes.
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
    /// A rival of a seed.
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

    /// The same with more that a seed draws: one that fills the whole window now and then.
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
        // It would hardly get to its work.
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

/// State of a rival's session.
#[derive(Debug)]
enum Phase {
    /// There is none until then.
    Down { until: Instant },
    /// The first connection logs in.
    LoggingIn { until: Instant },
    /// Full-feature phase.
    Up,
    /// All is done.
    LoggingOut { until: Instant },
    /// It is gone.
    Over,
}

/// A rival.
#[derive(Debug)]
pub struct Rival {
    user: User,
    model: Rc<Model>,
    plan: RivalPlan,
    blocks: u64,
    longest: u64,
    /// Paths to the target, of which its connections take any.
    paths: usize,
    address: IpAddr,
    isid: Isid,
    dialed: Dialed,
    rng: Rng,
    phase: Phase,
    /// Stands for the login in the history, until a command of the session succeeds.
    fence: Option<ReadId>,
    connections: Vec<Connection>,
    tsih: Tsih,
    params: Option<SessionParams>,
    cmd_sn: CmdSn,
    max_cmd_sn: CmdSn,
    exp_cmd_sn: CmdSn,
    /// Commands without an answer, by tag.
    tasks: BTreeMap<u32, Task>,
    /// Functions without an answer, by tag.
    functions: BTreeMap<u32, Function>,
    /// Commands that functions have ended, by tag, whose answer may be on its way.
    aborted: BTreeMap<u32, Aborted>,
    /// Connections that are gone, by their numbers.
    lost: BTreeMap<usize, Lost>,
    /// Commands of such connections, by tag.
    orphans: BTreeMap<u32, Orphan>,
    /// Logouts of such connections without an answer, by tag.
    logouts: BTreeMap<u32, usize>,
    /// Numbers that were used again, and may not have arrived.
    plugs: Vec<CmdSn>,
    next_tag: u32,
    /// The unit may be taken away.
    may_vanish: bool,
    /// It may be registered.
    is_registered: bool,
    /// The target ends no connection by itself.
    keeps_connections: bool,
    /// Commands may wait for the limits of a rate.
    is_limited: bool,
    /// The session ends with I_T NEXUS RESET.
    is_reset: bool,
    /// A block that was read, and its content.
    seen: Option<(u64, Vec<u8>)>,
    /// Commands that are still to be sent.
    left: usize,
    next_action: Instant,
    next_look: Instant,
}

impl Rival {
    /// A rival that is about to log in; the index distinguishes it from others.
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

    /// Whether all has been done that it was to do.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Does what there is to do; returns whether there was anything.
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

    /// When the next thing happens by itself.
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
        self.user.judge::<(), _>(Err(why));
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

    /// A connection has logged in. The first one takes the place of an older session of the port;
    /// another one that of one that was lost, which is detached then.
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
            return self.fail("a login that nobody began");
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
            FromTarget::NopIn(ping) if ping.ttt != Ttt::NONE => self.answer_ping(at, ping.ttt, now),
            FromTarget::LogoutResponse(answer) => match self.logouts.remove(&answer.itt.0) {
                Some(lost) => self.on_detached(lost, now),
                None => self.end(),
            },
            FromTarget::NopIn(_) | FromTarget::AsyncMessage(_) => {}
            // A function for which the target has no room; its tag is in the header that comes back.
            FromTarget::Reject(Reject {
                reason: RejectReason::TooManyImmediate,
            }) => self.on_function_refused(data),
            // The data are asked for again, or their command fails.
            FromTarget::Reject(Reject {
                reason: RejectReason::DataDigestError,
            }) if self.plan.spoils > 0 => {}
            other => self.fail(&format!("{other:?}")),
        }
    }

    fn answer_ping(&mut self, at: usize, ttt: Ttt, now: Instant) {
        let pdu = NopOut {
            itt: Itt::NONE,
            ttt,
            exp_stat_sn: self.connections[at].exp_stat_sn(),
            ..pdus::nop_out(0, self.cmd_sn.0)
        };
        self.connections[at].send(now, pdu.header(), &[]);
    }

    /// The session is gone. What it had under way may still take effect, until another login.
    fn lose(&mut self, now: Instant) {
        debug!(port = self.user.port.0, "the session is lost");
        self.model.log_out(self.user.port);
        // The target may have lost its cache, of which the next flush says nothing to this one.
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

    /// A command has succeeded: those of older sessions have ended.
    fn end_fence(&mut self) {
        if let Some(fence) = self.fence.take() {
            self.user.judge(self.user.history.end_read(fence, &[]));
        }
    }

    fn end(&mut self) {
        if let Some(fence) = self.fence.take() {
            self.user.history.abandon_read(fence);
        }
        self.model.log_out(self.user.port);
        self.connections.clear();
        self.phase = Phase::Over;
    }

    /// Whether there is something to send. If as many commands as may be are under way, functions
    /// are, as long as they are answered.
    fn may_act(&self) -> bool {
        let has_room = self.tasks.len() + self.orphans.len() < self.plan.depth;
        let may_manage = self.plan.functions > 0 && self.functions.len() < FUNCTIONS;
        self.left > 0 && (has_room || may_manage)
    }

    /// Does what is due.
    fn act(&mut self, now: Instant) -> bool {
        if matches!(self.phase, Phase::Up) && self.recover(now) {
            return true;
        }
        match self.phase {
            Phase::Down { until } if until <= now => self.log_in(now),
            Phase::LoggingIn { until } if until <= now => self.lose(now),
            Phase::LoggingOut { until } if until <= now => self.end(),
            Phase::Up if self.next_look <= now => self.look(now),
            Phase::Up if self.left == 0 && self.is_idle() => return self.finish(now),
            Phase::Up if self.may_act() && self.next_action <= now => {
                // One that is to fill a window needs more at once than disks take in that time.
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

    /// Whether nothing is under way.
    fn is_idle(&self) -> bool {
        self.tasks.is_empty() && self.orphans.is_empty() && self.functions.is_empty()
    }

    /// Takes its registration away, and logs out; returns whether it could do either.
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
        // A command of no blocks: when it has ended, what was lost before it began has ended.
        let fence = history.begin_read(port, 0..0);
        let until = now + LOGIN;
        self.fence = Some(fence);
        self.phase = Phase::LoggingIn { until };
        self.dial(0, now);
    }

    /// Opens a connection of the session, perhaps in the place of one that was lost.
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
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        for end in [&ours, &theirs] {
            end.set_nonblocking(true).expect("a socket");
        }
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

    /// Looks for what takes too long: pings silent connections, leaves dead ones, aborts commands.
    fn look(&mut self, now: Instant) {
        self.next_look = now + LATE;
        let is_silent = |c: &Connection| c.is_silent_since(now - 3 * PING);
        if let Some(at) = self.connections.iter().position(is_silent) {
            return self.lose_connection(at, now);
        }
        for at in 0..self.connections.len() {
            if self.connections[at].is_ready() && self.connections[at].last_heard + PING < now {
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
