//! Command statistics with a low overhead, so that they are always enabled.
//!
//! # Modules
//! - `histogram`: duration histograms with power-of-two buckets.
//! - `lun`: [`LunStats`], for a logical unit of a target; [`SessionStats`], the part of a single
//!   session.
//! - `timer`: [`CommandTimer`], measures the time a command spends in each stage.
//! - `trace`: [`Tracer`], traces individual commands on request.
//! - `tally`: [`Tally`], counts rare events by kind.
//! - `target`: [`TargetStats`], logins and logouts of iSCSI initiators.
//!
//! # Concurrency
//! A counter is updated by a single worker and can be read by any thread, so an update is a load
//! and a store rather than an atomic read-modify-write instruction. If there are several writers,
//! each has separate counters and the reader adds them.
//!
//! # Clock
//! Reading a clock is not necessary for most commands. They start and end at the start time of a
//! worker round. One command in [`SAMPLE`], and each traced command, is *timed*: the clock of the
//! unit ([`LunStats::new`]) is read at each stage. The durations by stage only include timed
//! commands.
//!
//! # Limits
//! A logical unit of a target uses [`lun::WORKER_BYTES`] for each worker that has served it. A
//! session uses a [`SessionStats`] for each unit it has accessed. Both are allocated for the first
//! command, so later commands do not allocate memory. A unit keeps the names of up to
//! [`lun::MAX_INITIATORS`] initiators with closed sessions.

mod histogram;
mod lun;
mod outcome;
mod tally;
mod target;
mod timer;
mod trace;

pub use riser_config::MAX_WORKERS;
use riser_scsi::opcode::Kind;

pub use histogram::{BUCKETS, Counter, Histogram, Times, bound};
pub use lun::{
    ClassCounts, ClassTotals, Faults, LunStats, MAX_INITIATORS, SAMPLE, SessionStats, WORKER_BYTES,
};
pub use outcome::{CHECKS, Clock, Fault, Throttle, check_name};
pub use tally::{Functions, Tally};
pub use target::{Refused, SessionEvent, TargetCounts, TargetStats};
pub use timer::CommandTimer;
pub use trace::{CDB_TRACED, Record, TraceKey, Tracer};

/// Kinds of commands with separate statistics.
pub const CLASSES: [Kind; 6] = [
    Kind::Read,
    Kind::Write,
    Kind::Flush,
    Kind::Unmap,
    Kind::Compare,
    Kind::Other,
];

/// Returns the name of a kind of command, to be used as a label.
#[must_use]
pub fn class_name(class: Kind) -> &'static str {
    match class {
        Kind::Read => "read",
        Kind::Write => "write",
        Kind::Flush => "flush",
        Kind::Unmap => "unmap",
        Kind::Compare => "compare",
        Kind::Other => "other",
    }
}

/// Stage of command processing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Receiving descriptors and data from the initiator.
    FabricIn,
    /// Delayed by a limit of the unit or initiator.
    Limits,
    /// Waiting for previous tasks in the task set.
    Order,
    /// Waiting for a data buffer.
    Memory,
    /// Processed by the logical unit.
    Scsi,
    /// Executing a block operation, or waiting for other operations that the device must complete
    /// first.
    Backend,
    /// Sending data and the response. With a reliable connection, this ends when the initiator has
    /// acknowledged them. With TCP, it ends when they were written to the socket.
    FabricOut,
}

impl Stage {
    /// All stages, in processing order.
    pub const ALL: [Self; 7] = [
        Self::FabricIn,
        Self::Limits,
        Self::Order,
        Self::Memory,
        Self::Scsi,
        Self::Backend,
        Self::FabricOut,
    ];

    /// Returns the name, to be used as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FabricIn => "fabric_in",
            Self::Limits => "limits",
            Self::Order => "order",
            Self::Memory => "memory",
            Self::Scsi => "scsi",
            Self::Backend => "backend",
            Self::FabricOut => "fabric_out",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use riser_admin_api::live::LiveShare;
    use riser_scsi::sense::SenseData;
    use riser_scsi::step::{DataIn, Residual, Response, Status};

    use super::*;

    fn response(status: Status, sense: &[u8]) -> Response {
        Response {
            status,
            sense: sense.iter().copied().collect::<SenseData>(),
            data_in: DataIn::None,
            residual_in: Residual::None,
            residual_out: Residual::None,
        }
    }

    fn subject() -> TraceKey {
        TraceKey {
            tag: 7,
            nexus: 1,
            cdb: [0x2a, 0, 0, 0, 0, 9, 0, 0, 8, 0].into_iter().collect(),
        }
    }

    fn account() -> Arc<SessionStats> {
        let stats = Arc::new(LunStats::new("demo", 3, None));
        Arc::new(SessionStats::new(stats, 0))
    }

    #[test]
    fn command_counts_once_with_stage_times() {
        let (account, mut timer) = (account(), CommandTimer::default());
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        timer.start(Arc::clone(&account), subject, at(0));
        timer.classify(Kind::Write);
        timer.enter_stage(Stage::Scsi, at(0));
        timer.enter_stage(Stage::FabricIn, at(0));
        timer.carry(4096);
        timer.enter_stage(Stage::Scsi, at(30));
        timer.enter_stage(Stage::Backend, at(30));
        assert_eq!(account.lun().queue_depth(), 1);
        timer.enter_stage(Stage::Scsi, at(130));
        let reply = response(Status::Good, &[]);
        timer.record_response(&reply, 0, at(130));
        timer.record_response(&reply, 0, at(131));
        timer.arrive(at(140));
        timer.abandon();
        let stats = account.lun();
        let counts = stats.class(Kind::Write);
        assert_eq!((counts.total.count(), counts.total.nanos), (1, 140_000));
        let nanos = counts.stages.map(|times| times.nanos);
        assert_eq!(nanos, [30_000, 0, 0, 0, 0, 100_000, 10_000]);
        assert!(counts.stages.iter().all(|times| times.count() == 1));
        assert_eq!((counts.bytes, stats.queue_depth()), (4096, 0));
        let view = account.class(Kind::Write);
        assert_eq!((view.commands, view.bytes), (1, 4096));
        assert_eq!(account.faults().total(), 0);
    }

    #[test]
    fn sampled_command_reads_clock_per_stage() {
        thread_local! {
            static READ: Cell<u64> = const { Cell::new(0) };
            static START: Instant = Instant::now();
        }
        // Each reading is ten microseconds after the previous one.
        let clock: Clock = || {
            READ.set(READ.get() + 10);
            START.with(|start| *start) + Duration::from_micros(READ.get())
        };
        let stats = Arc::new(LunStats::new("demo", 3, Some(clock)));
        let account = Arc::new(SessionStats::new(stats, 0));
        let round = START.with(|start| *start);
        let mut timer = CommandTimer::default();
        let mut run = || {
            timer.start(Arc::clone(&account), subject, round);
            timer.classify(Kind::Read);
            timer.enter_stage(Stage::Scsi, round);
            timer.enter_stage(Stage::Scsi, round);
            timer.enter_stage(Stage::Backend, round);
            timer.enter_stage(Stage::Scsi, round);
            timer.record_response(&response(Status::Good, &[]), 512, round);
            timer.arrive(round);
        };
        run();
        let spent = |times: Times| (times.count(), times.nanos);
        let counts = account.lun().class(Kind::Read);
        let zero = (1, 0);
        let stages = [
            (1, 10_000),
            zero,
            zero,
            zero,
            (1, 20_000),
            (1, 10_000),
            (1, 10_000),
        ];
        assert_eq!(counts.stages.map(spent), stages);
        assert_eq!(spent(counts.total), (1, 50_000));
        assert_eq!(READ.get(), 60);
        // Most commands don't read the clock.
        run();
        assert_eq!(READ.get(), 60);
        let counts = account.lun().class(Kind::Read);
        assert_eq!(counts.stages.map(spent), stages);
        assert_eq!(spent(counts.total), (2, 50_000));
    }

    #[test]
    fn initiator_totals_outlive_session() {
        let (account, mut timer) = (account(), CommandTimer::default());
        for (kind, bytes) in [(Kind::Read, 512), (Kind::Write, 4096), (Kind::Other, 36)] {
            timer.start(Arc::clone(&account), subject, Instant::now());
            timer.classify(kind);
            timer.carry(bytes);
            timer.record_response(&response(Status::Good, &[]), 0, Instant::now());
            timer.arrive(Instant::now());
        }
        let share = LiveShare {
            commands: 3,
            read: 548,
            written: 4096,
        };
        assert_eq!(account.share(), share);
        let unit = account.lun();
        unit.keep("one", share);
        unit.keep("one", share);
        assert_eq!(unit.kept()["one"].commands, 6);
        for n in 0..2 * MAX_INITIATORS {
            unit.keep(&n.to_string(), share);
        }
        assert_eq!(unit.kept().len(), MAX_INITIATORS);
        unit.keep("one", share);
        assert_eq!(unit.kept()["one"].written, 3 * 4096);
    }

    #[test]
    fn target_keeps_last_refusal_and_error() {
        use std::net::{IpAddr, Ipv4Addr};

        use riser_scsi::iscsi::pdu::LoginStatus;

        let stats = TargetStats::default();
        let refused = |status, initiator: &str| Refused {
            status,
            initiator: initiator.to_owned(),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            at: Instant::now(),
        };
        stats.count_login();
        stats.count_refused(refused(LoginStatus::AUTHENTICATION_FAILURE, "one"));
        stats.count_refused(refused(LoginStatus::AUTHORIZATION_FAILURE, "two"));
        stats.count_event(SessionEvent::FormatError, "one");
        stats.count_event(SessionEvent::LoggedOut, "two");
        let counts = stats.counts();
        assert_eq!((counts.logins, counts.refused.total()), (1, 2));
        assert_eq!(counts.last_refused.unwrap().initiator, "two");
        let last = (SessionEvent::FormatError, "one".to_owned());
        assert_eq!((counts.events.total(), counts.last_error), (2, Some(last)));
    }

    #[test]
    fn command_without_response_is_not_counted() {
        let (account, mut timer) = (account(), CommandTimer::default());
        timer.start(Arc::clone(&account), subject, Instant::now());
        timer.abandon();
        assert_eq!(account.lun().class(Kind::Read), ClassCounts::default());
        assert_eq!(account.lun().queue_depth(), 0);
    }

    #[test]
    fn failures_are_grouped_by_status_and_sense() {
        let (account, mut timer) = (account(), CommandTimer::default());
        let sense: [&[u8]; 2] = [&[0x70, 0, 0x05], &[0x72, 0x05]];
        for (status, sense) in [
            (Status::CheckCondition, sense[0]),
            (Status::CheckCondition, sense[1]),
            (Status::Busy, &[]),
        ] {
            timer.start(Arc::clone(&account), subject, Instant::now());
            timer.classify(Kind::Read);
            timer.record_response(&response(status, sense), 0, Instant::now());
            timer.arrive(Instant::now());
        }
        let fault = |status, sense_key, throttle| Fault {
            class: Kind::Read,
            status,
            sense_key,
            check: None,
            throttle,
        };
        for tally in [account.faults(), account.lun().faults()] {
            let faults: Vec<_> = tally.iter().collect();
            let busy = fault(8, None, Some(Throttle::Queue));
            assert_eq!(faults, [(fault(2, Some(5), None), 2), (busy, 1)]);
            assert!(!busy.is_error());
        }
    }

    #[test]
    fn failed_checks_are_counted_by_field() {
        let (account, mut timer) = (account(), CommandTimer::default());
        // ABORTED COMMAND and MISCOMPARE with LOGICAL BLOCK GUARD CHECK FAILED, in both formats,
        // APPLICATION TAG, REFERENCE TAG, then MISCOMPARE DURING VERIFY OPERATION.
        let fixed = |key, code, qualifier| {
            [
                0x70, 0, key, 0, 0, 0, 9, 10, 0, 0, 0, 0, code, qualifier, 0, 0, 0, 0,
            ]
        };
        let senses: [&[u8]; 5] = [
            &fixed(0xb, 0x10, 1),
            &[0x72, 0xe, 0x10, 1, 0, 0, 0, 0],
            &fixed(0xb, 0x10, 2),
            &fixed(0xb, 0x10, 3),
            &fixed(0xe, 0x1d, 0),
        ];
        for sense in senses {
            timer.start(Arc::clone(&account), subject, Instant::now());
            timer.classify(Kind::Compare);
            let response = response(Status::CheckCondition, sense);
            timer.record_response(&response, 0, Instant::now());
            timer.arrive(Instant::now());
        }
        let faults = account.lun().faults();
        let failed = |check| faults.total_of(|fault| fault.check == check);
        assert_eq!(CHECKS.map(|check| failed(Some(check))), [2, 1, 1]);
        assert_eq!(failed(None), 1);
        let guard = faults.iter().map(|(fault, _)| fault);
        let names: Vec<_> = guard.map(|fault| fault.name()).collect();
        assert_eq!(names[..2], ["GUARD CHECK FAILED"; 2]);
        assert_eq!(
            CHECKS.map(check_name),
            ["guard", "application_tag", "reference_tag"]
        );
    }

    #[test]
    fn flow_control_is_counted_by_reason() {
        let (account, mut timer) = (account(), CommandTimer::default());
        for is_limited in [true, false, false] {
            timer.start(Arc::clone(&account), subject, Instant::now());
            if is_limited {
                timer.limit();
            }
            timer.record_response(&response(Status::TaskSetFull, &[]), 0, Instant::now());
            timer.arrive(Instant::now());
        }
        let faults = account.faults();
        let reasons: Vec<_> = faults.iter().map(|(f, n)| (f.throttle, n)).collect();
        let (limit, queue) = (Some(Throttle::Limit), Some(Throttle::Queue));
        assert_eq!(reasons, [(limit, 1), (queue, 2)]);
        assert!(faults.iter().all(|(fault, _)| !fault.is_error()));
    }

    #[test]
    fn bytes_of_failed_commands_are_not_counted() {
        let (account, mut timer) = (account(), CommandTimer::default());
        for status in [Status::Good, Status::CheckCondition] {
            timer.start(Arc::clone(&account), subject, Instant::now());
            timer.classify(Kind::Write);
            timer.carry(4096);
            timer.record_response(&response(status, &[0x70, 0, 0x07]), 0, Instant::now());
            timer.arrive(Instant::now());
        }
        let counts = account.lun().class(Kind::Write);
        assert_eq!((counts.total.count(), counts.bytes), (2, 4096));
        assert_eq!(account.share().written, 4096);
    }

    #[test]
    fn reassigned_command_counts_on_new_connection() {
        let (one, other, mut timer) = (account(), account(), CommandTimer::default());
        let now = Instant::now();
        timer.start(Arc::clone(&one), subject, now);
        timer.record_response(&response(Status::Good, &[]), 512, now);
        timer.stop_counting();
        timer.join(Some(Arc::clone(&other)));
        assert_eq!(other.lun().queue_depth(), 1);
        timer.record_response(&response(Status::Good, &[]), 512, now);
        timer.arrive(now);
        assert_eq!(one.class(Kind::Read).commands, 0);
        assert_eq!(other.class(Kind::Read).commands, 1);
        assert_eq!(other.class(Kind::Read).bytes, 512);
        assert_eq!((one.lun().queue_depth(), other.lun().queue_depth()), (0, 0));
        // The response was lost, and another connection sends it again.
        timer.stop_counting();
        timer.join(Some(Arc::clone(&one)));
        timer.arrive(now);
        assert_eq!(one.class(Kind::Read).commands, 0);
        assert_eq!(one.lun().queue_depth(), 0);
    }

    #[test]
    fn trace_records_stage_times_and_counts_command() {
        let (account, mut timer) = (account(), CommandTimer::default());
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let tracer = Arc::new(Tracer::new(Some(7), Duration::from_micros(100), 1));
        let run = |timer: &mut CommandTimer, end: u64| {
            timer.start(Arc::clone(&account), subject, at(0));
            timer.classify(Kind::Write);
            timer.enter_stage(Stage::Scsi, at(0));
            timer.enter_stage(Stage::Backend, at(30));
            timer.enter_stage(Stage::Scsi, at(40));
            timer.record_response(&response(Status::Good, &[]), 512, at(40));
            timer.arrive(at(end));
            timer.abandon();
        };
        run(&mut timer, 200);
        account.lun().trace(Some(Arc::clone(&tracer)));
        run(&mut timer, 50);
        assert_eq!(tracer.take_records(), [], "too fast");
        // A command without a response isn't reported and doesn't leave any state.
        timer.start(Arc::clone(&account), subject, at(0));
        timer.enter_stage(Stage::Scsi, at(10));
        timer.abandon();
        run(&mut timer, 200);
        run(&mut timer, 300);
        assert_eq!(tracer.missed(), 1);
        let records = tracer.take_records();
        assert_eq!(records.len(), 1);
        let micros = |(stage, at): &(Stage, Duration)| (*stage, at.as_micros());
        let steps: Vec<_> = records[0].steps.iter().map(micros).collect();
        let expected = [
            (Stage::FabricIn, 0),
            (Stage::Scsi, 0),
            (Stage::Backend, 30),
            (Stage::Scsi, 40),
            (Stage::FabricOut, 40),
        ];
        assert_eq!(steps, expected);
        assert_eq!((records[0].took.as_micros(), records[0].bytes), (200, 512));
        assert_eq!((records[0].target.as_str(), records[0].lun), ("demo", 3));
        account.lun().trace(None);
        run(&mut timer, 200);
        assert_eq!(tracer.take_records(), []);
        let counts = account.lun().class(Kind::Write);
        assert_eq!((counts.total.count(), counts.total.nanos), (5, 950_000));
        // The first command is in the sample, and three commands were traced.
        let backend = counts.stages[Stage::Backend as usize];
        assert_eq!((backend.count(), backend.nanos), (4, 40_000));
        // Commands with a different tag aren't traced.
        let other = Arc::new(Tracer::new(Some(8), Duration::ZERO, 1));
        account.lun().trace(Some(Arc::clone(&other)));
        run(&mut timer, 200);
        assert_eq!((other.take_records(), other.missed()), (Vec::new(), 0));
    }
}
