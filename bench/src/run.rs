//! Runs jobs: starts their workers, collects their reports, and verifies the data written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime};

use hdrhistogram::Histogram;
use riser_block::BlockDevice;

use super::error::BenchError;
use super::job::Job;
use super::outcome::{Holes, OpKind, Outcome, Usage, Verified};
use super::prepare::{self, Context, Prepared};
use super::reports::{self, Report, Reports};
use super::source::ScanPosition;
use super::stats::Collector;
use super::task::{RunOptions, Task};
use super::usage::Meter;
use super::worker::{Clock, RemainingWork, Worker};
use super::{checks, holes, scan, setup};

/// Interval between progress reports.
const TICK: Duration = Duration::from_millis(250);

/// Maximum size in bytes of results that workers have reported, but are not collected yet.
const MAX_WAITING: usize = 256 << 20;

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Progress from 0 to 1, based on time, bytes or operations.
    pub done: f64,
    /// Set during ramp time, when results are not included yet.
    pub is_ramp: bool,
    /// Set while the data written by a completed job is verified. In this case, `done` is the
    /// progress of the verification.
    pub is_read_back: bool,
    /// Operations per second in the last interval.
    pub iops: f64,
    /// Bytes per second in the last interval.
    pub bytes_per_second: f64,
    /// Median latency in the last interval. For an open loop, this is measured from the planned
    /// arrival.
    pub p50: Duration,
    /// 99th percentile of the latency in the last interval.
    pub p99: Duration,
}

/// Runs jobs concurrently, and reports progress several times per second.
///
/// # Errors
/// Fails if a job is not valid for its device, an operation fails, or the data read is wrong. All
/// jobs are aborted after the first error.
pub fn run<D: BlockDevice>(
    tasks: &[Task<D>],
    options: RunOptions,
    mut progress: impl FnMut(&Progress),
) -> Result<Vec<Outcome>, BenchError> {
    // Find errors before creating any state files below.
    checks::check(tasks, options)?;
    let mut all = prepare_all(tasks, options.run)?;
    checks::overlaps(tasks, |index| Ok(all[index].region.clone()))?;
    // Query all holes first, as a slow response must not delay the start of some of the jobs.
    let holes: Vec<_> = tasks.iter().zip(&all).map(holes_of).collect();
    let (reporter, reports) = reports::channel(MAX_WAITING);
    let stop = Arc::new(AtomicBool::new(false));
    let mut meter = Meter::new(options.server_pid);
    let begun = Instant::now();
    let mut jobs = Vec::new();
    for (index, (task, prepared)) in tasks.iter().zip(&mut all).enumerate() {
        let mut job = Running::new(task, prepared, options, begun);
        job.start_metering(begun, &mut meter);
        let context = Context {
            clock: job.clock,
            stop: stop.clone(),
            interval: options.interval,
            reporter: reporter.clone(),
        };
        let workers = prepare::workers(index, &task.job, prepared, &context);
        job.workers = workers.len();
        if let Err(error) = start(&task.devices, workers) {
            stop.store(true, Ordering::Relaxed);
            return Err(error);
        }
        jobs.push(job);
    }
    drop(reporter);
    wait(&mut jobs, &reports, &mut meter, &mut progress)?;
    let mut outcomes = Vec::new();
    for (((task, job), prepared), holes) in tasks.iter().zip(jobs).zip(&all).zip(holes) {
        let read_back = read_back(task, prepared, options, &mut progress)?;
        outcomes.push(job.outcome(task, read_back, holes));
    }
    meter.divide(&mut outcomes);
    Ok(outcomes)
}

/// Prepares all jobs in order. Jobs that only verify a state file are prepared last, because they
/// use any remaining buffers.
fn prepare_all<D: BlockDevice>(tasks: &[Task<D>], run: u64) -> Result<Vec<Prepared>, BenchError> {
    let mut all = Vec::new();
    for is_scan in [false, true] {
        let mine = tasks.iter().enumerate();
        for (index, task) in mine.filter(|(_, task)| task.job.verify_only == is_scan) {
            let prepared = match is_scan {
                true => scan::prepare(task),
                false => prepare::prepare(run, index, task),
            };
            let named = prepared.map_err(|error| error.of_job(&task.job));
            all.push((index, named?));
        }
    }
    all.sort_unstable_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, prepared)| prepared).collect())
}

fn holes_of<D: BlockDevice>((task, prepared): (&Task<D>, &Prepared)) -> Option<Holes> {
    let job = &task.job;
    let reads = job.access.kinds().contains(&OpKind::Read) && !job.verify_only;
    let device = task.devices.first().filter(|_| reads)?;
    holes::of(&**device, &prepared.region)
}

fn start<D: BlockDevice>(devices: &[Arc<D>], workers: Vec<Worker>) -> Result<(), BenchError> {
    for (worker, device) in workers.into_iter().zip(devices.iter().cycle()) {
        riser_block::drive(device, Box::new(worker))
            .map_err(|error| BenchError::Config(format!("cannot start a thread: {error}")))?;
    }
    Ok(())
}

/// A running or completed job.
struct Running {
    clock: Clock,
    is_open_loop: bool,
    /// Set if any worker was stopped at the end of the run before it reached its amount of work.
    is_by_time: bool,
    /// Total amount of work for all workers.
    left: RemainingWork,
    /// Kinds of operations included in this amount.
    kinds: &'static [OpKind],
    /// Position if this reads the blocks recorded in a state file.
    scan: Option<ScanPosition>,
    /// Number of running workers.
    workers: usize,
    collector: Collector,
    checked: Verified,
    not_started: u64,
    /// Time of the last completion.
    last: Instant,
    is_measuring: bool,
}

impl Running {
    fn new<D>(task: &Task<D>, prepared: &Prepared, options: RunOptions, begun: Instant) -> Self {
        let job = &task.job;
        let is_open_loop = job.is_open_loop() && !job.verify_only;
        // When verifying a state file, there is no ramp time or time limit.
        let (ramp, ends) = match job.verify_only {
            true => (Duration::ZERO, None),
            false => (job.ramp_time, job.runtime),
        };
        let begun = match job.verify_only {
            true => begun,
            false => begun + job.startdelay,
        };
        let measured_from = begun + ramp;
        Self {
            clock: Clock {
                begun,
                measured_from,
                ends: ends.map(|time| measured_from + time),
            },
            is_open_loop,
            is_by_time: false,
            left: prepared.remaining_work(),
            kinds: job.access.planned(),
            scan: prepared.scan_place(),
            workers: 0,
            collector: Collector::new(options.interval, is_open_loop, options.memory),
            checked: Verified::default(),
            not_started: 0,
            last: begun,
            is_measuring: false,
        }
    }

    /// Starts measuring CPU usage at the start of the measurement.
    fn start_metering(&mut self, now: Instant, meter: &mut Meter) {
        if !self.is_measuring && now >= self.clock.measured_from {
            self.is_measuring = true;
            meter.start_measurement();
        }
    }

    /// Handles a report from a worker.
    fn handle(&mut self, report: Report, meter: &mut Meter) -> Result<(), BenchError> {
        match report {
            Report::Measurements(index, measurements) => self.collector.add(index, measurements),
            Report::Ended(end) => {
                self.last = self.last.max(end.at);
                self.checked += end.checked;
                self.is_by_time |= end.is_by_time;
                self.not_started = self.not_started.saturating_add(end.not_started);
                self.workers -= 1;
                if self.workers == 0 {
                    meter.stop_measurement();
                }
                end.result?;
            }
        }
        Ok(())
    }

    fn runtime(&self) -> Duration {
        let end = match self.clock.ends {
            // Operations that complete after the end are included, so the runtime must also include
            // this time.
            Some(end) if self.is_open_loop && self.is_by_time => self.last.max(end),
            None => self.last,
            _ if self.is_open_loop => self.last,
            Some(end) if self.is_by_time => end,
            Some(end) => self.last.min(end),
        };
        end.saturating_duration_since(self.clock.measured_from)
    }

    fn outcome<D: BlockDevice>(
        self,
        task: &Task<D>,
        read_back: Verified,
        holes: Option<Holes>,
    ) -> Outcome {
        let runtime = self.runtime();
        let job = &task.job;
        let is_verified = job.verify.is_some() || job.verify_only;
        let mut verified = self.checked;
        verified += read_back;
        let device = task.devices.first();
        let begun = SystemTime::now().checked_sub(self.clock.measured_from.elapsed());
        let (measured, intervals) = self.collector.finish(runtime);
        Outcome {
            name: job.name.clone(),
            address: task.address.clone(),
            device: task.rdma_device.clone(),
            protection: task.protection,
            options: job.options(),
            started: begun.unwrap_or(SystemTime::UNIX_EPOCH),
            runtime,
            measured,
            intervals,
            client: Usage::default(),
            server: None,
            verified: is_verified.then_some(verified),
            holes,
            unstable: device.is_some_and(|device| setup::is_unstable(job, device.geometry())),
            not_started: self.not_started,
        }
    }

    /// Returns the progress from 0 to 1.
    fn done(&self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.clock.measured_from);
        let of_time = self.clock.ends.map(|end| {
            let whole = end.saturating_duration_since(self.clock.measured_from);
            passed.as_secs_f64() / whole.as_secs_f64().max(1e-9)
        });
        let (ios, bytes) = self.collector.amount(self.kinds);
        let of_amount = Some(self.left.part(ios, bytes));
        let of_scan = self.scan.as_ref().map(ScanPosition::done);
        let parts = [of_time, of_amount, of_scan].into_iter().flatten();
        parts.fold(0.0, f64::max).min(1.0)
    }
}

/// Waits until all workers have completed and returns the first error.
fn wait(
    jobs: &mut [Running],
    reports: &Reports,
    meter: &mut Meter,
    progress: &mut dyn FnMut(&Progress),
) -> Result<(), BenchError> {
    let mut error = None;
    let mut shown = Instant::now();
    while jobs.iter().any(|job| job.workers > 0) {
        let now = Instant::now();
        jobs.iter_mut()
            .for_each(|job| job.start_metering(now, meter));
        if now.saturating_duration_since(shown) >= TICK {
            shown = now;
            progress(&sum(jobs, now));
        }
        let starts = jobs.iter().filter(|job| !job.is_measuring);
        let starts = starts.map(|job| job.clock.measured_from);
        let until = starts.chain([shown + TICK]).min().unwrap_or(now);
        match reports.receive(until.saturating_duration_since(now)) {
            Ok((index, report)) => {
                if let Err(e) = jobs[index].handle(report, meter) {
                    // If a device was closed, the cause may be another error.
                    match &error {
                        None | Some(BenchError::Closed) => error = Some(e),
                        Some(_) => {}
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    error.map_or(Ok(()), Err)
}

/// Returns the overall progress of all jobs.
fn sum(jobs: &[Running], now: Instant) -> Progress {
    let mut sum = Progress {
        done: jobs.iter().map(|job| job.done(now)).fold(1.0, f64::min),
        is_ramp: jobs.iter().all(|job| !job.is_measuring),
        ..Progress::default()
    };
    let mut times: Option<Histogram<u64>> = None;
    for job in jobs {
        let passed = now.saturating_duration_since(job.clock.measured_from);
        let Some((measurements, length)) = job.collector.last(passed) else {
            continue;
        };
        for measured in measurements {
            let seconds = length.as_secs_f64();
            sum.iops += measured.ios() as f64 / seconds;
            sum.bytes_per_second += measured.bytes as f64 / seconds;
            let response = measured.response.as_ref().unwrap_or(&measured.service);
            match &mut times {
                Some(times) => times.add(response).expect("it grows by itself"),
                None if response.is_empty() => {}
                none => *none = Some(response.clone()),
            }
        }
    }
    if let Some(times) = times {
        let at = |percent| Duration::from_nanos(times.value_at_percentile(percent));
        (sum.p50, sum.p99) = (at(50.0), at(99.0));
    }
    sum
}

/// Verifies the data written by a job if this is enabled.
fn read_back<D: BlockDevice>(
    task: &Task<D>,
    prepared: &Prepared,
    options: RunOptions,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Verified, BenchError> {
    let job = &task.job;
    let mut checked = Verified::default();
    if !job.do_verify || job.verify_only || prepared.verifier.ledger().is_none() {
        return Ok(checked);
    }
    let mut scan = scan::reads(&prepared.verifier, &task.devices, job.iodepth);
    let place = scan.scan_place();
    let reader = Job {
        verify_only: true,
        runtime: None,
        ..job.clone()
    };
    let (reporter, reports) = reports::channel(MAX_WAITING);
    let now = Instant::now();
    let context = Context {
        clock: Clock {
            begun: now,
            measured_from: now,
            ends: None,
        },
        stop: Arc::default(),
        interval: options.interval,
        reporter,
    };
    let workers = prepare::workers(0, &reader, &mut scan, &context);
    drop(context);
    start(&task.devices, workers)?;
    let mut shown = now;
    loop {
        match reports.receive(TICK) {
            Ok((_, Report::Ended(end))) => {
                end.result?;
                checked += end.checked;
            }
            Ok((_, Report::Measurements(..))) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(checked),
        }
        if shown.elapsed() >= TICK {
            shown = Instant::now();
            progress(&Progress {
                done: place.as_ref().map_or(0.0, ScanPosition::done),
                is_read_back: true,
                ..Progress::default()
            });
        }
    }
}
