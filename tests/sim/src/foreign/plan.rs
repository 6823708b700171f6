//! Properties and faults of a foreign target, and the plans of its seeds.

use std::time::Duration;

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use super::scsi::RESERVATION_CONFLICT;
use crate::plan::{Fault, Plan, Protocol, Trouble};

/// ASCQs of LOGICAL UNIT NOT READY for which the initiator retries: becoming ready, operation in
/// progress, long write in progress, self-test in progress, space allocation in progress.
const RETRIED: [u8; 5] = [0x01, 0x07, 0x08, 0x09, 0x14];

/// ASCQs of 29h that don't indicate a lost cache: SCSI BUS RESET, BUS DEVICE RESET FUNCTION
/// OCCURRED.
const RESETS: [u8; 2] = [0x02, 0x03];

/// Statuses for which the initiator retries: BUSY and TASK SET FULL.
const BUSY: [u8; 2] = [0x08, 0x28];

/// Protocols of the initiator. Damaged data and redirections are only used with iSCSI.
const PROTOCOLS: [Protocol; 4] = [
    Protocol::Iscsi,
    Protocol::Iscsi,
    Protocol::Iser,
    Protocol::Srp,
];

/// An optional command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lack {
    /// READ CAPACITY (16).
    ReadCapacity16,
    /// READ, WRITE and SYNCHRONIZE CACHE with CDBs of 16 bytes.
    LongCdbs,
    /// REPORT LUNS.
    ReportLuns,
}

/// Properties of a foreign target that do not change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Traits {
    /// READ and WRITE support the FUA bit.
    pub dpofua: bool,
    /// DefaultTime2Wait, in seconds.
    pub time2wait: u16,
    /// InitialR2T=Yes.
    pub initial_r2t: bool,
    /// FirstBurstLength, in bytes.
    pub first_burst: u32,
    /// MaxBurstLength, in bytes.
    pub max_burst: u32,
    /// Set if immediate data is allowed.
    pub immediate: bool,
    /// Maximum number of commands per session: the iSCSI window or the SRP request limit.
    pub window: u16,
    /// Maximum latency of a write to the medium.
    #[serde(with = "crate::text::duration")]
    pub slowest: Duration,
    /// Commands that the target does not support.
    pub lacks: Vec<Lack>,
    /// The first session at a node after an interruption reports POWER ON OCCURRED.
    pub reports_restarts: bool,
    /// Number of targets that a discovery session finds; without any, there is no such session.
    pub targets: u32,
    /// Number of channels per SRP session.
    pub channels: u8,
    /// All nodes report the same portal group tag, without knowledge of each other's sessions. Only
    /// for a single path: the portals of a group belong to the same target port.
    pub same_group: bool,
}

impl Default for Traits {
    fn default() -> Self {
        Self {
            dpofua: true,
            time2wait: 0,
            initial_r2t: false,
            first_burst: 65_536,
            max_burst: 262_144,
            immediate: true,
            window: 32,
            slowest: Duration::from_millis(1),
            lacks: Vec::new(),
            reports_restarts: false,
            targets: 0,
            channels: 1,
            same_group: false,
        }
    }
}

/// A fault of a foreign target.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForeignFault {
    /// A portal closes its connections and refuses new ones.
    StopPortal(usize),
    /// A portal accepts connections, but does not process anything.
    HangPortal(usize),
    /// The first portal closes its connections and redirects logins to the second.
    Redirect,
    /// Immediate data is damaged on the wire, with this probability.
    DamageData(f64),
    /// Commands succeed with RECOVERED ERROR, with this probability.
    RecoverErrors(f64),
    /// Responses have the response code TARGET FAILURE, with this probability.
    FailResponses(f64),
    /// The unit is not ready, with this ASCQ.
    NotReady(u8),
    /// Writeback of the cache fails, which is reported as a deferred error.
    LoseCache,
    /// All nodes lose power.
    LosePower,
    /// Reads and writes complete with wrong residuals, with this probability.
    WrongResiduals(f64),
    /// Reads with status GOOD only return part of the data, with this probability.
    ShortReads(f64),
    /// Commands complete with this status instead of being executed, with this probability.
    ReturnStatus(u8, f64),
    /// The unit aborts its commands and reports this ASCQ of 29h.
    ResetUnit(u8),
    /// The target hides the unit.
    RemoveUnit,
    /// The target presents another unit with the same LUN.
    ReplaceUnit,
    /// The target requests a logout of all sessions.
    RequestLogout,
    /// Responses are sent twice, with this probability.
    RepeatResponses(f64),
    /// Responses with unknown tags are sent, with this probability.
    UnknownTags(f64),
    /// Responses skip status numbers, with this probability.
    SkipNumbers(f64),
}

impl ForeignFault {
    /// Returns whether the fault loses cached data, or appears to: a unit that returns may have
    /// been restarted.
    pub(super) fn loses_data(self) -> bool {
        match self {
            Self::LoseCache | Self::LosePower | Self::RemoveUnit | Self::ReplaceUnit => true,
            Self::ResetUnit(qualifier) => !RESETS.contains(&qualifier),
            _ => false,
        }
    }

    /// Returns whether the fault only affects the first path.
    pub(super) fn is_of_first_path(self) -> bool {
        matches!(self, Self::StopPortal(0) | Self::HangPortal(0))
    }

    /// Returns whether the fault interrupts the only path.
    pub(super) fn interrupts(self) -> bool {
        matches!(
            self,
            Self::StopPortal(_) | Self::HangPortal(_) | Self::Redirect | Self::DamageData(_)
        )
    }

    /// Returns whether the initiator closes sessions because of this fault, on all paths.
    pub(super) fn ends_sessions(self) -> bool {
        matches!(
            self,
            Self::WrongResiduals(_)
                | Self::RepeatResponses(_)
                | Self::UnknownTags(_)
                | Self::RequestLogout
                | Self::DamageData(_)
                | Self::RemoveUnit
        )
    }

    /// Returns whether requests may fail because of this fault.
    pub(super) fn fails_requests(self) -> bool {
        match self {
            Self::WrongResiduals(_) | Self::ShortReads(_) => true,
            Self::RemoveUnit | Self::ReplaceUnit => true,
            Self::ReturnStatus(status, _) => status == RESERVATION_CONFLICT,
            _ => false,
        }
    }

    fn draw(rng: &mut Rng, protocol: Protocol, paths: usize) -> Self {
        let share = |rng: &mut Rng| [0.02, 0.1][rng.usize(..2)];
        // With two paths, the second one is always working.
        match rng.u8(..21) {
            0 | 1 => Self::StopPortal(0),
            2 => Self::HangPortal(0),
            3 if paths == 1 && protocol != Protocol::Srp => Self::Redirect,
            3 => Self::StopPortal(0),
            4 => Self::DamageData([0.05, 0.5][rng.usize(..2)]),
            5 => Self::RecoverErrors([0.1, 1.0][rng.usize(..2)]),
            6 => Self::FailResponses(0.1),
            7 => Self::NotReady(RETRIED[rng.usize(..RETRIED.len())]),
            8 => Self::LoseCache,
            9 => Self::LosePower,
            10 => Self::WrongResiduals([0.1, 1.0][rng.usize(..2)]),
            11 => Self::ShortReads([0.1, 1.0][rng.usize(..2)]),
            12 => Self::ReturnStatus(BUSY[rng.usize(..BUSY.len())], [0.3, 1.0][rng.usize(..2)]),
            13 => Self::ReturnStatus(RESERVATION_CONFLICT, 0.3),
            14 => Self::ResetUnit([0, 1, RESETS[0], RESETS[1]][rng.usize(..4)]),
            15 => Self::RemoveUnit,
            16 => Self::ReplaceUnit,
            17 => Self::RepeatResponses(share(rng)),
            18 => Self::UnknownTags(share(rng)),
            19 => Self::RequestLogout,
            _ => Self::SkipNumbers(share(rng)),
        }
    }
}

/// Situations that rarely occur with independent faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// Any situation.
    Any,
    /// A path returns after its node was restarted, while another path is in use.
    ReturningPath,
    /// A session moves to another portal group while writes are in flight to the medium.
    MovingSession,
}

impl Scene {
    fn draw(rng: &mut Rng) -> Self {
        match rng.u8(..8) {
            0 => Self::ReturningPath,
            1 => Self::MovingSession,
            _ => Self::Any,
        }
    }

    /// Returns the fault with this number that causes the situation.
    fn fault(self, number: usize) -> Option<ForeignFault> {
        match self {
            Self::Any => None,
            Self::ReturningPath => Some(ForeignFault::StopPortal(0)),
            Self::MovingSession if number.is_multiple_of(2) => Some(ForeignFault::Redirect),
            Self::MovingSession => Some(ForeignFault::StopPortal(1)),
        }
    }

    /// Changes a plan so that the situation occurs.
    fn stage(self, plan: &mut Plan, traits: &mut Traits) {
        match self {
            Self::Any => return,
            Self::ReturningPath => {
                (plan.paths, plan.write_cache) = (2, true);
                traits.reports_restarts = true;
            }
            Self::MovingSession => {
                plan.paths = 1;
                plan.initiators[0] = match plan.initiators[0] {
                    Protocol::Srp => Protocol::Iscsi,
                    other => other,
                };
                traits.slowest = Duration::from_secs(10);
            }
        }
        (plan.tasks, plan.commands) = (4, 60);
        (plan.blocks, plan.longest) = (16, 8);
    }
}

/// Returns the plan of a seed against a foreign target.
pub(crate) fn draw(seed: u64, is_wanted: impl Fn(Fault) -> bool) -> Plan {
    let mut rng = Rng::with_seed(seed ^ 0xf0_4e16);
    let mut lacks = vec![Lack::ReadCapacity16, Lack::LongCdbs, Lack::ReportLuns];
    lacks.retain(|_| rng.u8(..4) == 0);
    let mut traits = Traits {
        dpofua: rng.bool(),
        time2wait: [0, 0, 3, 5][rng.usize(..4)],
        initial_r2t: rng.bool(),
        first_burst: [512, 8192, 65_536][rng.usize(..3)],
        max_burst: [65_536, 262_144][rng.usize(..2)],
        immediate: rng.u8(..4) > 0,
        window: [1, 2, 3, 32][rng.usize(..4)],
        slowest: Duration::from_millis([1, 100, 10_000][rng.usize(..3)]),
        lacks,
        reports_restarts: rng.u8(..3) == 0,
        targets: [0, 0, 0, 0, 1, 200, 10_000][rng.usize(..7)],
        channels: rng.u8(1..=3),
        same_group: false,
    };
    let mut plan = Plan {
        seed,
        initiators: vec![PROTOCOLS[rng.usize(..PROTOCOLS.len())]],
        paths: rng.usize(1..=2),
        tasks: rng.usize(1..=4),
        commands: rng.usize(10..=60),
        blocks: [16, 64, 512][rng.usize(..3)],
        longest: [1, 8, 64][rng.usize(..3)],
        write_cache: rng.u8(..4) > 0,
        ..Plan::default()
    };
    let scene = Scene::draw(&mut rng);
    scene.stage(&mut plan, &mut traits);
    let (protocol, paths) = (plan.initiators[0], plan.paths);
    let trouble = |number| {
        let from = Duration::from_micros(rng.u64(..60_000_000));
        let length = [1_000, 1_500_000, 25_000_000][rng.usize(..3)];
        let any = ForeignFault::draw(&mut rng, protocol, paths);
        Trouble {
            from,
            until: from + Duration::from_micros(rng.u64(1..=length)),
            fault: Fault::Foreign(scene.fault(number).unwrap_or(any)),
        }
    };
    let mut troubles: Vec<_> = (0..4).map(trouble).collect();
    if scene == Scene::Any {
        troubles.truncate(rng.usize(..=4));
    }
    troubles.retain(|trouble| is_wanted(trouble.fault));
    Plan {
        foreign: Some(traits),
        troubles,
        ..plan
    }
}
