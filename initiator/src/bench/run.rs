//! Runs jobs: starts their workers, collects what these report, reads back what was written.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use hdrhistogram::Histogram;

use super::error::BenchError;
use super::job::Job;
use super::outcome::{Holes, OpKind, Outcome, Usage, Verified};
use super::prepare::{self, Context, Prepared};
use super::stats::Collector;
use super::worker::{Clock, Report, Worker};
use super::{holes, setup, usage};
use crate::block::{self, BlockDevice};

/// Interval of progress reports.
const TICK: Duration = Duration::from_millis(250);

/// A job with the device that it runs on.
#[derive(Debug)]
pub struct Task<D> {
    /// The job.
    pub job: Job,
    /// Address of the device, for the result.
    pub address: String,
    /// The device, opened at least once: the clones are distributed over the connections.
    pub devices: Vec<Arc<D>>,
}

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Length of the intervals of the figures.
    pub interval: Duration,
    /// Process that serves the device, if its use of the processor is to be measured.
    pub server_pid: Option<u32>,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            server_pid: None,
        }
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Part of the time or of the bytes, from 0 to 1.
    pub done: f64,
    /// The ramp lasts; figures do not count yet.
    pub is_ramp: bool,
    /// Operations per second, in the last interval.
    pub iops: f64,
    /// Bytes per second, in the last interval.
    pub bytes_per_second: f64,
    /// Median time of an operation, in the last interval; from its planned start in an open loop.
    pub p50: Duration,
    /// Time that 99 % of the operations did not exceed, in the last interval.
    pub p99: Duration,
}

/// Runs jobs side by side, and reports progress several times a second.
///
/// # Errors
/// A job is not possible on its device, an operation failed, or what was read was wrong. The first
/// error ends all jobs.
pub fn run<D: BlockDevice>(
    tasks: &[Task<D>],
    options: RunOptions,
    mut progress: impl FnMut(&Progress),
) -> Result<Vec<Outcome>, BenchError> {
    check_options(options)?;
    check_buffers(tasks)?;
    let mut all = Vec::new();
    for task in tasks {
        all.push(prepare::prepare(&task.job, &task.devices)?);
    }
    let regions: Vec<_> = all.iter().map(|prepared| prepared.region.clone()).collect();
    check_overlaps(tasks, &regions)?;
    let (sender, reports) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let mut jobs = Vec::new();
    for (index, (task, prepared)) in tasks.iter().zip(&mut all).enumerate() {
        let mut job = Running::new(task, prepared, options);
        let context = Context {
            clock: job.clock,
            stop: stop.clone(),
            interval: options.interval,
            reports: sender.clone(),
        };
        let workers = prepare::workers(index, &task.job, prepared, &context);
        job.workers = workers.len();
        if let Err(error) = start(&task.devices, workers) {
            stop.store(true, Ordering::Relaxed);
            return Err(error);
        }
        jobs.push(job);
    }
    drop(sender);
    wait(&mut jobs, &reports, &mut progress)?;
    let mut outcomes = Vec::new();
    for ((task, job), prepared) in tasks.iter().zip(jobs).zip(&all) {
        let read_back = read_back(task, prepared, options)?;
        outcomes.push(job.outcome(task, read_back));
    }
    Ok(outcomes)
}

fn check_options(options: RunOptions) -> Result<(), BenchError> {
    let fail = |what| Err(BenchError::Config(what));
    if options.interval < Duration::from_millis(1) {
        return fail("an interval is at least a millisecond".into());
    }
    match options.server_pid.map(|pid| (pid, usage::of(pid))) {
        Some((pid, Err(error))) => fail(format!("process {pid} cannot be measured: {error}")),
        _ => Ok(()),
    }
}

/// Fails if the buffers of all jobs do not fit into those of their devices: a job would wait for
/// another's without end.
fn check_buffers<D: BlockDevice>(tasks: &[Task<D>]) -> Result<(), BenchError> {
    let mut needs: Vec<(&Arc<D>, u64)> = Vec::new();
    for task in tasks.iter().filter(|task| !task.job.verify_only) {
        if let Some(device) = task.devices.first() {
            // What else is wrong with it comes first: its buffers may only be too many for that.
            setup::shares(&task.job, device.geometry())?;
        }
        let bytes = setup::buffer_bytes(&task.job, task.devices.len() as u32);
        for device in &task.devices {
            match needs
                .iter_mut()
                .find(|(known, _)| Arc::ptr_eq(known, device))
            {
                Some((_, need)) => *need = need.saturating_add(bytes),
                None => needs.push((device, bytes)),
            }
        }
    }
    for (device, need) in needs {
        let available = device.buffer_bytes();
        if need > available {
            return Err(BenchError::Config(format!(
                "the operations in flight need {need} bytes of buffers, and the device has \
                 {available}: smaller blocks, fewer operations or more sessions will do"
            )));
        }
    }
    Ok(())
}

/// Fails if a job would change blocks that another one verifies at the same time.
fn check_overlaps<D>(tasks: &[Task<D>], regions: &[Range<u64>]) -> Result<(), BenchError> {
    let all: Vec<_> = tasks.iter().zip(regions).collect();
    for (index, (one, region)) in all.iter().enumerate() {
        for (two, other) in &all[index + 1..] {
            let is_verified = one.job.verify.is_some() || two.job.verify.is_some();
            let is_changed = one.job.is_destructive() || two.job.is_destructive();
            let overlaps = region.start < other.end && other.start < region.end;
            if one.address == two.address && is_verified && is_changed && overlaps {
                return Err(BenchError::Config(format!(
                    "jobs `{}` and `{}` use the same blocks at the same time, and one verifies them",
                    one.job.name, two.job.name
                )));
            }
        }
    }
    Ok(())
}

fn start<D: BlockDevice>(devices: &[Arc<D>], workers: Vec<Worker>) -> Result<(), BenchError> {
    for (worker, device) in workers.into_iter().zip(devices.iter().cycle()) {
        block::drive(device, Box::new(worker))
            .map_err(|error| BenchError::Config(format!("cannot start a thread: {error}")))?;
    }
    Ok(())
}

/// Use of the processor by a process.
struct Sample {
    pid: Option<u32>,
    before: Option<Usage>,
    after: Option<Usage>,
}

impl Sample {
    fn new(pid: Option<u32>) -> Self {
        Self {
            pid,
            before: None,
            after: None,
        }
    }

    fn now(&self) -> Option<Usage> {
        usage::of(self.pid?).ok()
    }

    fn difference(&self) -> Option<Usage> {
        Some(usage::between(self.before?, self.after?))
    }
}

/// A job that runs, or has run.
struct Running {
    clock: Clock,
    time_based: bool,
    /// Bytes that its workers move, if these are limited.
    bytes: Option<u64>,
    /// Workers that are not over.
    workers: usize,
    collector: Collector,
    checked: u64,
    /// Time of the last completion.
    last: Instant,
    client: Sample,
    server: Sample,
    is_measuring: bool,
    holes: Option<Holes>,
}

impl Running {
    fn new<D: BlockDevice>(task: &Task<D>, prepared: &Prepared, options: RunOptions) -> Self {
        let job = &task.job;
        let reads = job.access.kinds().contains(&OpKind::Read) && !job.verify_only;
        let device = task.devices.first().filter(|_| reads);
        let holes = device.and_then(|device| holes::of(&**device, &prepared.region));
        let begun = Instant::now();
        // Checking what a state file records is no load: it has neither ramp nor end.
        let (ramp, ends) = match job.verify_only {
            true => (Duration::ZERO, None),
            false => (job.ramp_time, job.runtime),
        };
        let measured_from = begun + ramp;
        let mut running = Self {
            clock: Clock {
                begun,
                measured_from,
                ends: ends.map(|time| measured_from + time),
            },
            time_based: job.time_based,
            bytes: prepared.bytes(),
            workers: 0,
            collector: Collector::new(options.interval, job.is_open_loop() && !job.verify_only),
            checked: 0,
            last: begun,
            client: Sample::new(Some(std::process::id())),
            server: Sample::new(options.server_pid),
            is_measuring: false,
            holes,
        };
        running.look(begun);
        running
    }

    /// Takes the use of the processor when the measurement begins.
    fn look(&mut self, now: Instant) {
        if !self.is_measuring && now >= self.clock.measured_from {
            self.is_measuring = true;
            self.client.before = self.client.now();
            self.server.before = self.server.now();
        }
    }

    /// Handles a report of a worker.
    fn handle(&mut self, report: Report) -> Result<(), BenchError> {
        match report {
            Report::Figures(index, figures) => self.collector.add(index, figures),
            Report::Ended {
                at,
                checked,
                result,
            } => {
                self.last = self.last.max(at);
                self.checked += checked;
                self.workers -= 1;
                if self.workers == 0 {
                    self.client.after = self.client.now();
                    self.server.after = self.server.now();
                }
                result?;
            }
        }
        Ok(())
    }

    fn runtime(&self) -> Duration {
        let end = match self.clock.ends {
            Some(end) if self.time_based => end,
            Some(end) => self.last.min(end),
            None => self.last,
        };
        end.saturating_duration_since(self.clock.measured_from)
    }

    fn outcome<D>(self, task: &Task<D>, read_back: Option<u64>) -> Outcome {
        let runtime = self.runtime();
        let job = &task.job;
        let is_verified = job.verify.is_some() || job.verify_only;
        let begun = SystemTime::now().checked_sub(self.clock.measured_from.elapsed());
        let (measured, intervals) = self.collector.finish(runtime);
        Outcome {
            name: job.name.clone(),
            address: task.address.clone(),
            options: job.options(),
            started: begun.unwrap_or(SystemTime::UNIX_EPOCH),
            runtime,
            measured,
            intervals,
            client: self.client.difference().unwrap_or_default(),
            server: self.server.difference(),
            verified: is_verified.then(|| Verified {
                blocks: self.checked + read_back.unwrap_or(0),
            }),
            holes: self.holes,
        }
    }

    /// Part of the work that is done, from 0 to 1.
    fn done(&self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.clock.measured_from);
        let of_time = self.clock.ends.map(|end| {
            let whole = end.saturating_duration_since(self.clock.measured_from);
            passed.as_secs_f64() / whole.as_secs_f64().max(1e-9)
        });
        let of_bytes = self
            .bytes
            .map(|bytes| self.collector.bytes() as f64 / bytes.max(1) as f64);
        let done = of_time.into_iter().chain(of_bytes).fold(0.0, f64::max);
        done.min(1.0)
    }
}

/// Waits until all workers are over. Returns the first error.
fn wait(
    jobs: &mut [Running],
    reports: &mpsc::Receiver<(usize, Report)>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<(), BenchError> {
    let mut error = None;
    let mut shown = Instant::now();
    while jobs.iter().any(|job| job.workers > 0) {
        let now = Instant::now();
        jobs.iter_mut().for_each(|job| job.look(now));
        if now.saturating_duration_since(shown) >= TICK {
            shown = now;
            progress(&sum(jobs, now));
        }
        let starts = jobs.iter().filter(|job| !job.is_measuring);
        let starts = starts.map(|job| job.clock.measured_from);
        let until = starts.chain([shown + TICK]).min().unwrap_or(now);
        match reports.recv_timeout(until.saturating_duration_since(now)) {
            Ok((index, report)) => {
                if let Err(e) = jobs[index].handle(report) {
                    // That a device was closed may be the consequence of another error.
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

/// Progress of all jobs together.
fn sum(jobs: &[Running], now: Instant) -> Progress {
    let mut sum = Progress {
        done: jobs.iter().map(|job| job.done(now)).fold(1.0, f64::min),
        is_ramp: jobs.iter().all(|job| !job.is_measuring),
        ..Progress::default()
    };
    let mut times: Option<Histogram<u64>> = None;
    for job in jobs {
        let passed = now.saturating_duration_since(job.clock.measured_from);
        let Some((figures, length)) = job.collector.last(passed) else {
            continue;
        };
        for measured in figures {
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

/// Reads back what a job has written. Returns the number of blocks, or `None` if that is not wanted.
fn read_back<D: BlockDevice>(
    task: &Task<D>,
    prepared: &Prepared,
    options: RunOptions,
) -> Result<Option<u64>, BenchError> {
    let job = &task.job;
    if !job.do_verify || job.verify_only || prepared.verifier.ledger().is_none() {
        return Ok(None);
    }
    let mut scan = prepare::scan(&prepared.verifier, &task.devices, job.iodepth);
    let reader = Job {
        verify_only: true,
        runtime: None,
        ..job.clone()
    };
    let (sender, reports) = mpsc::channel();
    let now = Instant::now();
    let context = Context {
        clock: Clock {
            begun: now,
            measured_from: now,
            ends: None,
        },
        stop: Arc::default(),
        interval: options.interval,
        reports: sender,
    };
    let workers = prepare::workers(0, &reader, &mut scan, &context);
    drop(context);
    start(&task.devices, workers)?;
    let mut checked = 0;
    for (_, report) in reports {
        if let Report::Ended {
            checked: blocks,
            result,
            ..
        } = report
        {
            result?;
            checked += blocks;
        }
    }
    Ok(Some(checked))
}
