//! The tasks of a benchmark.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::config::{BenchConfig, BenchError, Pattern, Until};
use super::report::{Direction, Report, Verified};
use crate::block::{BlockDevice, BlockError, Buffer, task};

/// Interval of progress reports.
const TICK: Duration = Duration::from_millis(250);

/// Progress of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// From 0 to 1.
    pub done: f64,
    /// Operations per second since the last time.
    pub iops: f64,
    /// Bytes per second since the last time.
    pub bytes_per_second: f64,
    /// The warm-up lasts; figures do not count yet.
    pub warming_up: bool,
}

/// Spreads every bit of `z` over the result (the finaliser of SplitMix64).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Content of the block at an offset once it is written: the same from every job, and different
/// from every other block.
fn pattern(seed: u64, offset: u64, out: &mut [u8]) {
    for (i, word) in out.chunks_mut(8).enumerate() {
        let bytes = mix(seed ^ (offset + 8 * i as u64)).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

struct Latencies {
    read: Histogram<u64>,
    write: Histogram<u64>,
}

fn histogram() -> Histogram<u64> {
    // Three digits; it grows to the longest latency that occurs.
    Histogram::new(3).expect("three digits are allowed")
}

/// A job: its part of the region, and what its tasks share.
struct Job {
    blocks: Range<u64>,
    next: AtomicU64,
    /// Operations it may still begin.
    left: AtomicU64,
    latencies: Mutex<Latencies>,
}

/// State that all tasks share.
struct Shared<D> {
    device: Arc<D>,
    config: BenchConfig,
    jobs: Vec<Job>,
    measured_from: Instant,
    ends: Option<Instant>,
    ios: AtomicU64,
    /// One bit for each block of the region that is written; empty without verification.
    written: Vec<AtomicU64>,
    compared: AtomicU64,
    next_check: AtomicU64,
    stopped: AtomicBool,
    error: Mutex<Option<BenchError>>,
}

impl<D: BlockDevice> Shared<D> {
    fn new(device: Arc<D>, config: BenchConfig) -> Self {
        let size = u64::from(config.block_size);
        let blocks = (config.region.end - config.region.start) / size;
        let jobs = u64::from(config.jobs);
        let measured_from = Instant::now() + config.warm_up;
        let (ends, operations) = match config.until {
            Until::Time(time) => (Some(measured_from + time), None),
            Until::Bytes(bytes) => (None, Some(bytes / size)),
        };
        // The rounding is by the sums, so the shares of all jobs add up to the whole.
        let share = |of: u64, i: u64| of * (i + 1) / jobs - of * i / jobs;
        let words = if config.verify {
            blocks.div_ceil(64)
        } else {
            0
        };
        Self {
            device,
            jobs: (0..jobs)
                .map(|i| Job {
                    blocks: match config.pattern {
                        Pattern::Random => 0..blocks,
                        Pattern::Sequential => blocks * i / jobs..blocks * (i + 1) / jobs,
                    },
                    next: AtomicU64::new(0),
                    left: AtomicU64::new(operations.map_or(u64::MAX, |n| share(n, i))),
                    latencies: Mutex::new(Latencies {
                        read: histogram(),
                        write: histogram(),
                    }),
                })
                .collect(),
            measured_from,
            ends,
            ios: AtomicU64::new(0),
            written: (0..words).map(|_| AtomicU64::new(0)).collect(),
            compared: AtomicU64::new(0),
            next_check: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            error: Mutex::new(None),
            config,
        }
    }

    fn fail(&self, error: BenchError) {
        self.stopped.store(true, Ordering::Relaxed);
        self.error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(error);
    }

    fn failed(&self, operation: &'static str, offset: u64, error: BlockError) {
        self.fail(BenchError::Operation {
            operation,
            offset,
            len: self.config.block_size,
            error,
        });
    }

    fn offset(&self, block: u64) -> u64 {
        self.config.region.start + block * u64::from(self.config.block_size)
    }

    /// The next operation of a job, unless it is over.
    fn plan_next(
        &self,
        job: &Job,
        random: &mut fastrand::Rng,
        now: Instant,
    ) -> Option<(Kind, u64)> {
        if self.stopped.load(Ordering::Relaxed) || self.ends.is_some_and(|end| now >= end) {
            return None;
        }
        // Operations of the warm-up do not count, so they take nothing of a job's share.
        if self.ends.is_none() && now >= self.measured_from {
            job.left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    left.checked_sub(1)
                })
                .ok()?;
        }
        let count = job.blocks.end - job.blocks.start;
        let block = job.blocks.start
            + match self.config.pattern {
                Pattern::Random => random.u64(..count),
                Pattern::Sequential => job.next.fetch_add(1, Ordering::Relaxed) % count,
            };
        let kind = match self.config.mix.read_percent() {
            100 => Kind::Read,
            0 => Kind::Write,
            percent if random.u8(..100) < percent => Kind::Read,
            _ => Kind::Write,
        };
        Some((kind, block))
    }

    fn record(&self, job: &Job, kind: Kind, started: Instant, now: Instant) {
        self.ios.fetch_add(1, Ordering::Relaxed);
        // What straddles the end of the warm-up counts if it began within the time measured.
        if started < self.measured_from || self.ends.is_some_and(|end| now > end) {
            return;
        }
        let took = now.duration_since(started).as_nanos() as u64;
        let mut latencies = job.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        match kind {
            Kind::Read => latencies.read.record(took),
            Kind::Write => latencies.write.record(took),
        }
        .expect("it grows to what occurs");
    }

    fn is_written(&self, block: u64) -> bool {
        self.written
            .get((block / 64) as usize)
            .is_some_and(|word| word.load(Ordering::Acquire) >> (block % 64) & 1 != 0)
    }

    fn compare(&self, block: u64, buffer: &Buffer, scratch: &mut [u8]) {
        let offset = self.offset(block);
        let got = buffer.slice().to_vec();
        pattern(self.config.seed, offset, scratch);
        if let Some(at) = got.iter().zip(scratch.iter()).position(|(a, b)| a != b) {
            self.fail(BenchError::Mismatch {
                offset: offset + at as u64,
            });
        }
        self.compared.fetch_add(1, Ordering::Relaxed);
    }

    /// One operation after the other, until the benchmark is over.
    async fn work(&self, job: &Job, mut random: fastrand::Rng) {
        let size = self.config.block_size as usize;
        let mut buffer = self.device.buffer(size).await;
        let mut scratch = vec![0; size];
        // Something that neither compresses nor repeats.
        pattern(random.u64(..), 0, &mut scratch);
        buffer.slice().write(0, &scratch);
        let mut now = Instant::now();
        while let Some((kind, block)) = self.plan_next(job, &mut random, now) {
            let offset = self.offset(block);
            let known = kind == Kind::Read && self.is_written(block);
            if kind == Kind::Write && self.config.verify {
                pattern(self.config.seed, offset, &mut scratch);
                buffer.slice().write(0, &scratch);
            }
            let started = Instant::now();
            let result = match kind {
                Kind::Read => self.device.read(offset, buffer).await,
                Kind::Write => self.device.write(offset, buffer, self.config.fua).await,
            };
            now = Instant::now();
            buffer = match result {
                Ok(buffer) => buffer,
                Err(error) => {
                    let name = match kind {
                        Kind::Read => "reading",
                        Kind::Write => "writing",
                    };
                    return self.failed(name, offset, error);
                }
            };
            self.record(job, kind, started, now);
            if known {
                self.compare(block, &buffer, &mut scratch);
            } else if kind == Kind::Write
                && let Some(word) = self.written.get((block / 64) as usize)
            {
                word.fetch_or(1 << (block % 64), Ordering::Release);
            }
        }
    }

    /// Reads back what was written, block by block.
    async fn read_back(&self) {
        let size = self.config.block_size as usize;
        let mut buffer = self.device.buffer(size).await;
        let mut scratch = vec![0; size];
        loop {
            let block = self.next_check.fetch_add(1, Ordering::Relaxed);
            if block / 64 >= self.written.len() as u64 || self.stopped.load(Ordering::Relaxed) {
                return;
            }
            if !self.is_written(block) {
                continue;
            }
            let offset = self.offset(block);
            buffer = match self.device.read(offset, buffer).await {
                Ok(buffer) => buffer,
                Err(error) => return self.failed("reading back", offset, error),
            };
            self.compare(block, &buffer, &mut scratch);
        }
    }

    fn take_error(&self) -> Result<(), BenchError> {
        let error = self
            .error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        error.map_or(Ok(()), Err)
    }

    fn progress(&self, ios: u64, since: Duration) -> Progress {
        let now = Instant::now();
        let iops = ios as f64 / since.as_secs_f64().max(1e-9);
        Progress {
            done: match self.config.until {
                Until::Time(time) => {
                    let passed = now.saturating_duration_since(self.measured_from);
                    (passed.as_secs_f64() / time.as_secs_f64().max(1e-9)).min(1.0)
                }
                Until::Bytes(bytes) => {
                    let left = self.jobs.iter().map(|j| j.left.load(Ordering::Relaxed));
                    let left = left.sum::<u64>() * u64::from(self.config.block_size);
                    1.0 - left as f64 / bytes.max(1) as f64
                }
            },
            iops,
            bytes_per_second: iops * f64::from(self.config.block_size),
            warming_up: now < self.measured_from,
        }
    }
}

/// Runs a benchmark, and reports progress several times a second.
///
/// # Errors
/// The device cannot do it, an operation failed, or what was read back was wrong.
pub fn run<D: BlockDevice>(
    device: Arc<D>,
    config: BenchConfig,
    mut tell: impl FnMut(Progress),
) -> Result<Report, BenchError> {
    config.check(device.geometry())?;
    let shared = Arc::new(Shared::new(device, config));
    let config = &shared.config;
    // A worker's clone of the sender is dropped when the worker is done, which ends the channel.
    let (done, finished) = mpsc::channel::<()>();
    let mut seeds = fastrand::Rng::with_seed(config.seed);
    for index in 0..shared.jobs.len() {
        for _ in 0..config.depth {
            let (shared, done) = (shared.clone(), done.clone());
            let random = seeds.fork();
            task::spawn(async move {
                shared.work(&shared.jobs[index], random).await;
                drop(done);
            });
        }
    }
    drop(done);
    let (mut seen, mut last) = (0, Instant::now());
    while finished.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
        let ios = shared.ios.load(Ordering::Relaxed);
        tell(shared.progress(ios - seen, last.elapsed()));
        (seen, last) = (ios, Instant::now());
    }
    let ended = shared.ends.unwrap_or_else(Instant::now);
    shared.take_error()?;
    if config.verify {
        let (done, finished) = mpsc::channel::<()>();
        for _ in 0..config.depth {
            let (shared, done) = (shared.clone(), done.clone());
            task::spawn(async move {
                shared.read_back().await;
                drop(done);
            });
        }
        drop(done);
        // Nothing is ever sent.
        let _ = finished.recv();
        shared.take_error()?;
    }
    let (mut read, mut write) = (histogram(), histogram());
    for job in &shared.jobs {
        let latencies = job.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        read.add(&latencies.read).expect("it grows by itself");
        write.add(&latencies.write).expect("it grows by itself");
    }
    let runtime = ended.saturating_duration_since(shared.measured_from);
    let seconds = runtime.as_secs_f64().max(1e-9);
    Ok(Report {
        pattern: config.pattern,
        read_percent: config.mix,
        block_size: config.block_size,
        depth: config.depth,
        jobs: config.jobs,
        runtime_seconds: seconds,
        read: Direction::new(&read, config.block_size, seconds),
        write: Direction::new(&write, config.block_size, seconds),
        verified: config.verify.then(|| Verified {
            blocks: shared.compared.load(Ordering::Relaxed),
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::super::config::Mix;
    use super::*;
    use crate::block::MemoryDevice;

    fn device() -> Arc<MemoryDevice> {
        Arc::new(
            MemoryDevice::new(8 << 20, 512)
                .unwrap()
                .with_thread()
                .unwrap(),
        )
    }

    fn config() -> BenchConfig {
        BenchConfig {
            pattern: Pattern::Random,
            mix: Mix::new(50).unwrap(),
            block_size: 4096,
            depth: 8,
            jobs: 2,
            until: Until::Bytes(4 << 20),
            warm_up: Duration::ZERO,
            region: 0..8 << 20,
            verify: true,
            fua: false,
            seed: 7,
        }
    }

    #[test]
    fn moves_exactly_what_it_was_told_to() {
        let report = run(device(), config(), |_| {}).unwrap();
        assert_eq!(report.read.total_ios + report.write.total_ios, 1024);
        assert_eq!(report.read.io_bytes + report.write.io_bytes, 4 << 20);
        let latency = report.read.lat_ns.unwrap();
        assert!(latency.min <= latency.p50 && latency.p50 <= latency.max);
        // Nothing goes through two threads in less than this.
        assert!(latency.max > 100);
        assert!(report.verified.unwrap().blocks > 0);
    }

    #[test]
    fn sequential_jobs_cover_the_region_once() {
        let device = device();
        let config = BenchConfig {
            pattern: Pattern::Sequential,
            mix: Mix::WRITE,
            until: Until::Bytes(8 << 20),
            block_size: 32768,
            jobs: 4,
            ..config()
        };
        let report = run(device.clone(), config, |_| {}).unwrap();
        assert_eq!(report.write.total_ios, 256);
        assert_eq!(report.verified.unwrap().blocks, 256);
        let mut want = vec![0; 32768];
        pattern(7, 65536, &mut want);
        let mut got = vec![0; 32768];
        device.memory().read(65536, &mut got);
        assert!(got == want);
    }

    #[test]
    fn stops_by_time_and_does_not_count_the_warm_up() {
        let config = BenchConfig {
            until: Until::Time(Duration::from_millis(60)),
            warm_up: Duration::from_millis(30),
            verify: false,
            mix: Mix::READ,
            ..config()
        };
        let begun = Instant::now();
        let report = run(device(), config, |_| {}).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(90));
        assert!((report.runtime_seconds - 0.06).abs() < 1e-6);
        assert_eq!(report.write.total_ios, 0);
        assert_eq!(report.write.lat_ns, None);
    }

    #[test]
    fn errors_and_spoilt_data_are_found() {
        let bad = device();
        bad.spoil(0..8 << 20);
        assert!(matches!(
            run(bad, config(), |_| {}),
            Err(BenchError::Operation { .. })
        ));
        let device = device();
        device.rot(1_000_001);
        let config = BenchConfig {
            pattern: Pattern::Sequential,
            mix: Mix::WRITE,
            until: Until::Bytes(8 << 20),
            ..config()
        };
        assert_eq!(
            run(device, config, |_| {}).unwrap_err(),
            BenchError::Mismatch { offset: 1_000_001 }
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_reason() {
        let refused = |change: fn(&mut BenchConfig)| {
            let mut config = config();
            change(&mut config);
            run(device(), config, |_| {}).unwrap_err().to_string()
        };
        assert!(refused(|c| c.block_size = 1000).contains("no multiple"));
        assert!(refused(|c| c.block_size = 2 << 20).contains("more than one transfer"));
        assert!(refused(|c| c.depth = 0).contains("product"));
        assert!(refused(|c| c.depth = u32::MAX).contains("product"));
        assert!(refused(|c| c.region = 0..16 << 20).contains("16777216, beyond the end"));
        assert!(refused(|c| c.region = 100..8 << 20).contains("begins at byte 100, which is not"));
        assert!(refused(|c| c.region = 0..4096).contains("each job"));
    }
}
