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
//! later than a newer one on another connection. At error recovery level 0 the session ends with
//! any of its connections, and the next one takes its place (RFC 7143 6.3.5).
//!
//! # Verdict
//! Its data are in the history of the disk like all others. Besides:
//! - A command is answered once. An answer to a tag that was answered, or never sent, is an error;
//!   so is ABORT TASK on the connection of a command that finds nothing, without an answer before.
//! - When a function of task management is complete, what it has ended takes effect no longer
//!   (SAM-5 clause 7): the history takes it for ended then. Of another connection than the
//!   function's, the answer may come later, for it may have been on its way.
//! - What was under way in an old session takes effect no longer once the login that takes its place
//!   is accepted.

pub(crate) mod connection;
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
        }
    }
}

/// State of a rival's session.
#[derive(Debug)]
enum Phase {
    /// There is none until then.
    Down { until: Instant },
    /// The first connection logs in; `fence` stands for the login in the history.
    LoggingIn { fence: ReadId, until: Instant },
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
    connections: Vec<Connection>,
    tsih: Tsih,
    params: Option<SessionParams>,
    cmd_sn: CmdSn,
    max_cmd_sn: CmdSn,
    /// Commands without an answer, by tag.
    tasks: BTreeMap<u32, Task>,
    /// Functions without an answer, by tag.
    functions: BTreeMap<u32, Function>,
    /// Commands that functions have ended, by tag, whose answer may be on its way.
    aborted: BTreeMap<u32, Aborted>,
    next_tag: u32,
    /// The unit may be taken away.
    may_vanish: bool,
    /// It may be registered.
    is_registered: bool,
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
            connections: Vec::new(),
            tsih: Tsih(0),
            params: None,
            cmd_sn: CmdSn(1),
            max_cmd_sn: CmdSn(0),
            tasks: BTreeMap::new(),
            functions: BTreeMap::new(),
            aborted: BTreeMap::new(),
            next_tag: 1,
            may_vanish: whole.may_lose_target(),
            is_registered: plan.reservations > 0,
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
            Phase::Down { until } | Phase::LoggingIn { until, .. } => Some(until),
            Phase::LoggingOut { until } => Some(until),
            Phase::Up if self.may_act() => Some(self.next_action.min(self.next_look)),
            Phase::Up => Some(self.next_look),
            Phase::Over => None,
        };
        let leaving = self
            .connections
            .iter()
            .filter_map(Connection::next_deadline);
        leaving.chain(own).min()
    }

    fn fail(&self, what: &str) {
        let why = format!("rival of port {}: {what}", self.user.port.0);
        self.user.judge::<(), _>(Err(why));
    }

    fn on_event(&mut self, at: usize, event: Event, now: Instant) {
        match event {
            Event::Ready(tsih, params) => self.on_ready(at, tsih, params, now),
            Event::Pdu(pdu, numbers, data) => self.on_pdu(at, pdu, numbers, &data, now),
            Event::Ended => self.lose(now),
            Event::Fault(what) => {
                self.fail(&what);
                self.lose(now);
            }
        }
    }

    /// A connection has logged in. The first one takes the place of an older session of the port,
    /// whose commands have ended now.
    fn on_ready(&mut self, at: usize, tsih: Tsih, params: SessionParams, now: Instant) {
        if at > 0 {
            return;
        }
        let before = std::mem::replace(&mut self.phase, Phase::Up);
        let Phase::LoggingIn { fence, .. } = before else {
            self.phase = before;
            return self.fail("a login that nobody began");
        };
        self.user.judge(self.user.history.end_read(fence, &[]));
        self.model.lose_change(self.user.port);
        self.model.log_in(self.user.port);
        (self.tsih, self.params) = (tsih, Some(params));
        (self.next_action, self.next_look) = (now, now + PING);
        debug!(port = self.user.port.0, ?params, "logged in");
    }

    fn on_pdu(&mut self, at: usize, pdu: FromTarget, numbers: Numbers, data: &[u8], now: Instant) {
        if self.max_cmd_sn.is_before(numbers.max_cmd_sn) {
            self.max_cmd_sn = numbers.max_cmd_sn;
            self.next_action = self.next_action.min(now + SOON);
        }
        match pdu {
            FromTarget::ScsiResponse(response) => self.on_response(at, &response, data),
            FromTarget::DataIn(header) => self.on_data_in(at, &header, data),
            FromTarget::R2t(r2t) => self.on_r2t(at, &r2t, now),
            FromTarget::TmfResponse(response) => self.on_function_end(at, response),
            FromTarget::NopIn(ping) if ping.ttt != Ttt::NONE => self.answer_ping(at, ping.ttt, now),
            FromTarget::LogoutResponse(_) => self.end(),
            FromTarget::NopIn(_) | FromTarget::AsyncMessage(_) => {}
            // A function for which the target has no room; its tag is in the header that comes back.
            FromTarget::Reject(Reject {
                reason: RejectReason::TooManyImmediate,
            }) => self.on_function_refused(data),
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
        for (_, task) in std::mem::take(&mut self.tasks) {
            task.lose(&self.user);
        }
        let until = now + Duration::from_micros(self.rng.u64(..200_000));
        match std::mem::replace(&mut self.phase, Phase::Down { until }) {
            Phase::LoggingIn { fence, .. } => self.user.history.abandon_read(fence),
            Phase::LoggingOut { .. } | Phase::Over => self.phase = Phase::Over,
            Phase::Down { .. } | Phase::Up => {}
        }
    }

    fn end(&mut self) {
        self.model.log_out(self.user.port);
        self.connections.clear();
        self.phase = Phase::Over;
    }

    /// Whether there is something to send. If as many commands as may be are under way, functions
    /// are, as long as they are answered.
    fn may_act(&self) -> bool {
        let has_room = self.tasks.len() < self.plan.depth;
        let may_manage = self.plan.functions > 0 && self.functions.len() < FUNCTIONS;
        self.left > 0 && (has_room || may_manage)
    }

    /// Does what is due.
    fn act(&mut self, now: Instant) -> bool {
        match self.phase {
            Phase::Down { until } if until <= now => self.log_in(now),
            Phase::LoggingIn { until, .. } if until <= now => self.lose(now),
            Phase::LoggingOut { until } if until <= now => self.end(),
            Phase::Up if self.next_look <= now => self.look(now),
            Phase::Up if self.left == 0 && self.tasks.is_empty() && self.functions.is_empty() => {
                return self.finish(now);
            }
            Phase::Up if self.may_act() && self.next_action <= now => {
                self.next_action = now + SOON.mul_f64(self.rng.f64());
                self.do_something(now);
            }
            _ => return false,
        }
        true
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
        (self.tsih, self.params) = (Tsih(0), None);
        self.cmd_sn = CmdSn(self.rng.u32(..));
        self.max_cmd_sn = self.cmd_sn;
        let (port, history) = (self.user.port, &self.user.history);
        // A command of no blocks: when it has ended, what was lost before it began has ended.
        let fence = history.begin_read(port, 0..0);
        let until = now + LOGIN;
        self.phase = Phase::LoggingIn { fence, until };
        self.dial(now);
    }

    /// Opens the next connection of the session.
    fn dial(&mut self, now: Instant) {
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
        if self.connections.is_empty() {
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
            cid: Cid(self.connections.len() as u16),
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
        self.connections.push(connection);
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
        self.connections[0].send(now, request.header(), &[]);
    }

    /// Looks for what takes too long: pings silent connections, leaves dead ones, aborts commands.
    fn look(&mut self, now: Instant) {
        self.next_look = now + LATE;
        if self
            .connections
            .iter()
            .any(|c| c.last_heard + 3 * PING < now)
        {
            return self.lose(now);
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
