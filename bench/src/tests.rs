//! Tests complete runs using a disk in memory.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use riser_block::{BlockDevice, MemoryDevice, task};

use super::job::{Access, Amount, BlockSizes, Checksum, Content, Pattern, Rate, RateProcess};
use super::outcome::{OpKind, Outcome};
use super::prepare::prepare;
use super::{BenchError, Difference, Job, RunOptions, Task, run};

const SIZE: u64 = 8 << 20;

fn device() -> Arc<MemoryDevice> {
    let device = MemoryDevice::new(SIZE, 512).unwrap();
    Arc::new(device.with_thread().unwrap())
}

fn job() -> Job {
    Job {
        access: Access::Mixed,
        pattern: Pattern::Random,
        iodepth: 8,
        numjobs: 2,
        total: Some(4 << 20),
        splits_region: true,
        verify: Some(Checksum::Crc32c),
        randseed: 7,
        ..Job::default()
    }
}

fn blocks(size: u32) -> [BlockSizes; 3] {
    std::array::from_fn(|_| BlockSizes::Fixed(size))
}

fn run_on(device: &Arc<MemoryDevice>, job: Job) -> Result<Outcome, BenchError> {
    let task = Task {
        job,
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "mem".into(),
        devices: vec![device.clone()],
    };
    let outcomes = run(&[task], RunOptions::default(), |_| {})?;
    Ok(outcomes.into_iter().next().expect("one for each task"))
}

fn ios(outcome: &Outcome) -> [u64; 4] {
    OpKind::ALL.map(|kind| outcome.of(kind).ios())
}

#[test]
fn run_transfers_exact_amount() {
    let outcome = run_on(&device(), job()).unwrap();
    let [reads, writes, ..] = ios(&outcome);
    assert_eq!(reads + writes, 1024);
    let bytes = outcome.measured.iter().map(|measured| measured.bytes);
    assert_eq!(bytes.sum::<u64>(), 4 << 20);
    let times = &outcome.of(OpKind::Read).service;
    assert!(times.min() <= times.value_at_percentile(50.0) && times.max() > 0);
    assert!(outcome.verified.unwrap().blocks > 0);
    let of_intervals = outcome
        .intervals
        .iter()
        .map(|i| i.measured[0].ios() + i.measured[1].ios());
    assert_eq!(of_intervals.sum::<u64>(), 1024);
    assert!(
        outcome.of(OpKind::Read).response.is_none(),
        "it is a closed loop"
    );
    assert_eq!(outcome.holes.map(|holes| holes.of), Some(SIZE));
}

#[test]
fn sequential_clones_cover_region_once() {
    let device = device();
    let sequential = Job {
        access: Access::Write,
        pattern: Pattern::Sequential,
        total: Some(SIZE),
        sizes: blocks(32768),
        numjobs: 4,
        ..job()
    };
    let outcome = run_on(&device, sequential).unwrap();
    assert_eq!(ios(&outcome), [0, 256, 0, 0]);
    assert_eq!(outcome.verified.unwrap().blocks, 256);
    // A later run checks each block separately.
    let read = Job {
        access: Access::Read,
        total: None,
        numjobs: 1,
        sizes: blocks(32768),
        ..job()
    };
    let outcome = run_on(&device, read.clone()).unwrap();
    assert_eq!(outcome.verified.unwrap().blocks, 256);
    device.rot(1_000_001);
    let error = run_on(
        &device,
        Job {
            pattern: Pattern::Sequential,
            ..read
        },
    )
    .unwrap_err();
    assert!(matches!(error, BenchError::Mismatch(_)), "{error}");
}

#[test]
fn timed_run_excludes_ramp() {
    let timed = Job {
        access: Access::Read,
        // Long enough to read something if other tests use the processors.
        runtime: Some(Duration::from_millis(600)),
        time_based: true,
        ramp_time: Duration::from_millis(30),
        total: None,
        verify: None,
        ..job()
    };
    let outcome = run_on(&device(), timed).unwrap();
    assert_eq!(outcome.runtime, Duration::from_millis(600));
    let [reads, writes, ..] = ios(&outcome);
    assert!(reads > 0 && writes == 0);
    assert_eq!(outcome.intervals.len(), 1);
    assert_eq!(outcome.intervals[0].length, Duration::from_millis(600));
}

#[test]
fn pauses_follow_their_operations() {
    let thinking = Job {
        access: Access::Read,
        thinktime: Duration::from_millis(10),
        thinktime_blocks: 4,
        total: None,
        number_ios: Some(10),
        numjobs: 1,
        verify: None,
        ..job()
    };
    let outcome = run_on(&device(), thinking).unwrap();
    assert_eq!(ios(&outcome), [10, 0, 0, 0]);
    // After the fourth and eighth operation.
    assert!(
        outcome.runtime >= Duration::from_millis(20),
        "{:?}",
        outcome.runtime
    );
}

#[test]
fn delayed_job_starts_later_and_loops() {
    let delayed = Job {
        access: Access::Read,
        pattern: Pattern::Sequential,
        startdelay: Duration::from_millis(50),
        loops: 3,
        total: None,
        size: Some(Amount::Bytes(1 << 20)),
        splits_region: false,
        numjobs: 1,
        verify: None,
        ..job()
    };
    let begun = std::time::Instant::now();
    let outcome = run_on(&device(), delayed).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(50));
    assert_eq!(ios(&outcome), [768, 0, 0, 0]);
    // The delay is not included.
    assert!(outcome.runtime < begun.elapsed() - Duration::from_millis(40));
}

#[test]
fn errors_and_mismatches_abort_run() {
    let bad = device();
    bad.spoil(0..SIZE);
    let error = run_on(&bad, job()).unwrap_err();
    assert!(matches!(error, BenchError::Operation { .. }), "{error}");
    let rotten = device();
    rotten.rot(1_000_001);
    let sequential = Job {
        access: Access::Write,
        pattern: Pattern::Sequential,
        total: Some(SIZE),
        ..job()
    };
    let error = run_on(&rotten, sequential).unwrap_err();
    let BenchError::Mismatch(mismatch) = &error else {
        panic!("{error}");
    };
    assert_eq!((mismatch.offset, mismatch.block), (1_000_001, 999_424));
    assert!(
        matches!(mismatch.what, Difference::Byte { generation: 1, .. }),
        "{error}"
    );
}

#[test]
fn mixed_sizes_are_verified_per_block() {
    let split = Job {
        sizes: std::array::from_fn(|_| BlockSizes::Split(vec![(4096, 60.0), (65536, 40.0)])),
        rwmixread: 30,
        ..job()
    };
    let outcome = run_on(&device(), split).unwrap();
    let writes = outcome.of(OpKind::Write);
    assert!(writes.bytes > writes.ios() * 4096);
    assert!(outcome.verified.unwrap().blocks > writes.ios());
}

#[test]
fn fsync_and_end_fsync_flush() {
    let device = device();
    let job = Job {
        access: Access::Write,
        total: Some(64 * 4096),
        numjobs: 1,
        fsync: 8,
        verify: None,
        ..job()
    };
    let outcome = run_on(&device, job.clone()).unwrap();
    let [_, writes, _, flushes] = ios(&outcome);
    // The flush after the last eight writes was not started.
    assert_eq!((writes, flushes), (64, 7));
    assert_eq!(device.flushes(), 7);
    let end = Job {
        fsync: 0,
        end_fsync: true,
        ..job.clone()
    };
    assert_eq!(ios(&run_on(&device, end).unwrap()), [0, 64, 0, 1]);
    assert_eq!(device.flushes(), 8);
    // As in fio, flushes are not included in the number of operations.
    let number = Job {
        total: None,
        fsync: 1,
        number_ios: Some(10),
        ..job.clone()
    };
    assert_eq!(ios(&run_on(&device, number).unwrap())[1], 10);
    let only = Job {
        access: Access::Flush,
        number_ios: Some(5),
        total: None,
        io_size: Some(Amount::Bytes(u64::MAX)),
        ..Job::default()
    };
    assert_eq!(ios(&run_on(&device, only).unwrap()), [0, 0, 0, 5]);
}

#[test]
fn write_never_sends_previously_read_data() {
    let device = device();
    for at in (0..SIZE as usize).step_by(4096) {
        device.memory().write(at, &[0x11; 4096]);
    }
    let mixed = Job {
        pattern: Pattern::Sequential,
        rwmixread: 90,
        iodepth: 1,
        numjobs: 1,
        content: Content {
            pattern: vec![0xaa],
            ..Content::default()
        },
        verify: None,
        ..job()
    };
    let outcome = run_on(&device, mixed).unwrap();
    let content = content(&device);
    let written = content.chunks(4096).filter(|block| block[0] == 0xaa);
    let [reads, writes, ..] = ios(&outcome);
    assert!(reads > writes && writes > 0);
    assert_eq!(written.count() as u64, writes);
}

#[test]
fn trims_create_holes_before_writes() {
    let device = device();
    let trim = Job {
        access: Access::Trim,
        pattern: Pattern::Sequential,
        total: None,
        numjobs: 1,
        sizes: blocks(65536),
        verify: None,
        ..job()
    };
    device.memory().write(0, &[1; 4096]);
    assert_eq!(ios(&run_on(&device, trim.clone()).unwrap()), [0, 0, 128, 0]);
    let mut first = [1; 4096];
    device.memory().read(0, &mut first);
    assert_eq!(first, [0; 4096]);
    let both = Job {
        access: Access::TrimWrite,
        verify: Some(Checksum::Crc64),
        ..trim
    };
    let outcome = run_on(&device, both).unwrap();
    assert_eq!(ios(&outcome), [0, 128, 128, 0]);
    assert_eq!(outcome.verified.unwrap().blocks, 128);
}

#[test]
fn open_loop_latency_includes_queueing() {
    let open = Job {
        access: Access::Read,
        iodepth: 1,
        numjobs: 1,
        total: None,
        number_ios: Some(2000),
        io_size: Some(Amount::Bytes(u64::MAX)),
        // The rate is too high for one operation in flight, so arrivals are queued.
        rates: [Some(Rate::Iops(100_000_000)), None, None],
        verify: None,
        ..job()
    };
    let outcome = run_on(&device(), open.clone()).unwrap();
    let reads = outcome.of(OpKind::Read);
    let response = reads.response.as_ref().unwrap();
    assert_eq!((reads.ios(), response.len()), (2000, 2000));
    // The last operation is due 20 us after the first, but has to wait for all previous operations.
    let runtime = outcome.runtime.as_nanos() as u64;
    assert!(
        response.max() > runtime / 2,
        "{} of {runtime}",
        response.max()
    );
    assert!(response.mean() > 10.0 * reads.service.mean());
    let poisson = Job {
        rate_process: RateProcess::Poisson,
        number_ios: Some(50),
        rates: [Some(Rate::Iops(1000)), None, None],
        ..open
    };
    let outcome = run_on(&device(), poisson).unwrap();
    assert_eq!(outcome.of(OpKind::Read).ios(), 50);
    // Even with a fast device, 50 arrivals take about 50 ms.
    assert!(
        outcome.runtime > Duration::from_millis(10),
        "{:?}",
        outcome.runtime
    );
}

#[test]
fn open_loop_counts_late_and_unstarted_operations() {
    let open = Job {
        access: Access::Read,
        iodepth: 4,
        numjobs: 1,
        total: None,
        time_based: true,
        runtime: Some(Duration::from_millis(40)),
        rates: [Some(Rate::Iops(100_000_000)), None, None],
        verify: None,
        ..job()
    };
    let outcome = run_on(&device(), open).unwrap();
    let reads = outcome.of(OpKind::Read);
    // Each of the 4 million arrivals is either completed and has a latency, or was not started.
    let all = reads.ios() + outcome.not_started;
    assert!(all.abs_diff(4_000_000) <= 1, "{all}, by rounding");
    assert!(outcome.not_started > 0);
    assert!(outcome.runtime >= Duration::from_millis(40));
}

#[test]
fn ramp_does_not_change_operation_count() {
    // With this rate, many operations are still overdue after the ramp time.
    for rate in [None, Some(Rate::Iops(100_000_000))] {
        let ramped = Job {
            access: Access::Read,
            numjobs: 1,
            total: None,
            number_ios: Some(500),
            io_size: Some(Amount::Bytes(u64::MAX)),
            ramp_time: Duration::from_millis(20),
            rates: [rate, None, None],
            verify: None,
            ..job()
        };
        let outcome = run_on(&device(), ramped).unwrap();
        assert_eq!(outcome.of(OpKind::Read).ios(), 500, "{rate:?}");
    }
}

#[test]
fn early_completion_shortens_runtime() {
    let short = Job {
        access: Access::Read,
        total: None,
        number_ios: Some(10),
        time_based: true,
        runtime: Some(Duration::from_secs(3600)),
        verify: None,
        ..job()
    };
    let outcome = run_on(&device(), short).unwrap();
    assert_eq!(outcome.of(OpKind::Read).ios(), 20);
    assert!(outcome.runtime < Duration::from_secs(3600));
}

#[test]
fn error_stops_jobs_awaiting_arrivals() {
    let device = device();
    device.spoil(SIZE / 2..SIZE);
    let task = |job| Task {
        job,
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "mem".into(),
        devices: vec![device.clone()],
    };
    let half = |offset| Job {
        access: Access::Read,
        offset: Amount::Bytes(offset),
        size: Some(Amount::Bytes(SIZE / 2)),
        verify: None,
        ..job()
    };
    let slow = Job {
        // One operation takes more than an hour.
        rates: [Some(Rate::Bytes(1)), None, None],
        ..half(0)
    };
    let tasks = [task(slow), task(half(SIZE / 2))];
    let error = run(&tasks, RunOptions::default(), |_| {}).unwrap_err();
    assert!(matches!(error, BenchError::Operation { .. }), "{error}");
}

/// Returns the contents of the device.
fn content(device: &MemoryDevice) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    device.memory().read(0, &mut bytes);
    bytes
}

#[test]
fn second_run_writes_different_blocks() {
    let device = device();
    let write = Job {
        access: Access::Write,
        pattern: Pattern::Sequential,
        total: Some(SIZE),
        ..job()
    };
    run_on(&device, write.clone()).unwrap();
    let first = content(&device);
    run_on(&device, write).unwrap();
    let second = content(&device);
    // If a write of the second run is lost, the remaining block must be detected as wrong.
    let mut blocks = first.chunks(4096).zip(second.chunks(4096));
    assert!(blocks.all(|(first, second)| first[8..40] != second[8..40]));
}

#[test]
fn runs_write_different_contents() {
    for refill in [false, true] {
        let job = Job {
            access: Access::Write,
            pattern: Pattern::Sequential,
            total: Some(SIZE),
            content: Content {
                refill,
                ..Content::default()
            },
            verify: None,
            ..job()
        };
        let written = |run_number| {
            let device = device();
            let task = Task {
                job: job.clone(),
                address: "mem".into(),
                rdma_device: None,
                protection: None,
                identity: "mem".into(),
                devices: vec![device.clone()],
            };
            let options = RunOptions {
                run: run_number,
                ..RunOptions::default()
            };
            run(&[task], options, |_| {}).unwrap();
            content(&device)
        };
        let (first, second) = (written(0), written(1));
        let known: HashSet<_> = first.chunks(4096).collect();
        let mut blocks = second.chunks(4096);
        assert!(
            blocks.all(|block| !known.contains(block)),
            "refill: {refill}"
        );
    }
}

#[test]
fn concurrent_clones_and_jobs_write_different_contents() {
    let device = device();
    for refill in [false, true] {
        let half = |offset| Job {
            access: Access::Write,
            pattern: Pattern::Sequential,
            offset: Amount::Bytes(offset),
            size: Some(Amount::Bytes(SIZE / 2)),
            total: Some(SIZE / 2),
            iodepth: 1,
            content: Content {
                refill,
                ..Content::default()
            },
            verify: None,
            ..job()
        };
        let task = |job| Task {
            job,
            address: "mem".into(),
            rdma_device: None,
            protection: None,
            identity: "mem".into(),
            devices: vec![device.clone()],
        };
        let tasks = [task(half(0)), task(half(SIZE / 2))];
        run(&tasks, RunOptions::default(), |_| {}).unwrap();
        // The first block for each of the two clones in both jobs.
        let content = content(&device);
        let mut first: Vec<_> = content
            .chunks(SIZE as usize / 4)
            .map(|c| &c[..4096])
            .collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 4, "refill: {refill}");
    }
}

#[test]
fn concurrent_jobs_have_separate_outcomes() {
    let device = device();
    let task = |job| Task {
        job,
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "mem".into(),
        devices: vec![device.clone(), device.clone()],
    };
    let half = |offset, name: &str| Job {
        name: name.into(),
        offset: Amount::Bytes(offset),
        size: Some(Amount::Bytes(SIZE / 2)),
        ..job()
    };
    let tasks = [task(half(0, "a")), task(half(SIZE / 2, "b"))];
    let outcomes = run(&tasks, RunOptions::default(), |_| {}).unwrap();
    let names: Vec<_> = outcomes
        .iter()
        .map(|outcome| outcome.name.as_str())
        .collect();
    assert_eq!(names, ["a", "b"]);
    // This doesn't depend on the address of the disk.
    for address in ["mem", "other"] {
        let other = Task {
            address: address.into(),
            ..task(half(SIZE / 4, "b"))
        };
        let overlapping = [task(half(0, "a")), other];
        let error = run(&overlapping, RunOptions::default(), |_| {}).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("`a` and `b` use the same blocks"),
            "{error}"
        );
    }
}

#[test]
fn concurrent_jobs_plan_different_operations() {
    let task = Task {
        job: Job {
            access: Access::Read,
            verify: None,
            ..job()
        },
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "mem".into(),
        devices: vec![device()],
    };
    let ops = |run, index| {
        let mut prepared = prepare(run, index, &task).unwrap();
        let verifier = prepared.verifier.clone();
        let source = &mut prepared.clones[0].source;
        let next = |_| source.next(&verifier, None);
        (0..20).map(next).collect::<Vec<_>>()
    };
    assert_eq!(ops(0, 0), ops(0, 0));
    assert_ne!(ops(0, 0), ops(0, 1));
    // Later runs must also differ, because the data of this run may be cached.
    assert_ne!(ops(0, 0), ops(1, 0));
    assert_ne!(ops(0, 1), ops(1, 0));
}

#[test]
fn excessive_buffers_are_rejected() {
    let device = MemoryDevice::new(SIZE, 512)
        .unwrap()
        .with_buffer_budget(1 << 20);
    let error = run_on(
        &Arc::new(device),
        Job {
            sizes: blocks(1 << 20),
            ..job()
        },
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("the device has 1048576"),
        "{error}"
    );
}

/// A state file that is removed on drop.
struct StateFile(PathBuf);

impl StateFile {
    fn new(name: &str) -> Self {
        let name = format!("riser-bench-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn state_file_is_verified_by_later_run() {
    let device = device();
    let file = StateFile::new("state");
    let write = Job {
        access: Access::Write,
        state: Some(file.0.clone()),
        do_verify: false,
        ..job()
    };
    run_on(&device, write.clone()).unwrap();
    let check = Job {
        verify_only: true,
        state: Some(file.0.clone()),
        ramp_time: Duration::from_secs(60),
        ..Job::default()
    };
    let outcome = run_on(&device, check.clone()).unwrap();
    assert!(outcome.of(OpKind::Read).ios() > 0, "its reads are measured");
    let checked = outcome.verified.unwrap().blocks;
    assert!((600..=1024).contains(&checked), "{checked}");
    // A truncated copy must not be accepted.
    let kept = std::fs::read(&file.0).unwrap();
    let cut = std::fs::OpenOptions::new().write(true).open(&file.0);
    cut.unwrap().set_len(4096).unwrap();
    let error = run_on(&device, check.clone()).unwrap_err().to_string();
    assert!(error.contains("records no write"), "{error}");
    let mut blank = kept.clone();
    blank[4096..].fill(0);
    std::fs::write(&file.0, blank).unwrap();
    let error = run_on(&device, check.clone()).unwrap_err().to_string();
    assert!(error.contains("records no write"), "{error}");
    std::fs::write(&file.0, kept).unwrap();
    let before = content(&device);
    // Another run continues from the state of the first.
    run_on(&device, write).unwrap();
    let again = run_on(&device, check.clone()).unwrap();
    assert!(again.verified.unwrap().blocks >= checked);
    // If an acknowledged write is lost, we detect the old block.
    let after = content(&device);
    let mut blocks = before.chunks(4096).zip(after.chunks(4096));
    let is_newer = |(old, new): (&[u8], &[u8])| old[..4] == *b"RBV2" && old[32..36] != new[32..36];
    let lost = blocks.position(is_newer).expect("one was written again");
    let buffer = device.try_buffer(4096).unwrap();
    buffer.slice().write(0, &before[4096 * lost..][..4096]);
    task::block_on(device.write(4096 * lost as u64, buffer, false)).unwrap();
    let error = run_on(&device, check).unwrap_err().to_string();
    let expected = format!("byte {}: the block has generation", 4096 * lost);
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn state_file_requires_same_layout() {
    let device = device();
    let file = StateFile::new("layout");
    let write = |size| Job {
        access: Access::Write,
        sizes: blocks(size),
        state: Some(file.0.clone()),
        ..job()
    };
    let check = Job {
        verify_only: true,
        state: Some(file.0.clone()),
        ..Job::default()
    };
    let error = run_on(&device, check).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    run_on(&device, write(4096)).unwrap();
    let error = run_on(&device, write(8192)).unwrap_err().to_string();
    assert!(error.contains("block size is 4096"), "{error}");
    let other = Task {
        job: write(4096),
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "another".into(),
        devices: vec![device],
    };
    let error = run(&[other], RunOptions::default(), |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("belongs to another disk"),
        "{error}"
    );
}

#[test]
fn truncated_state_file_invalidates_old_blocks() {
    let device = device();
    let file = StateFile::new("lost");
    let write = Job {
        access: Access::Write,
        pattern: Pattern::Sequential,
        total: Some(SIZE),
        state: Some(file.0.clone()),
        ..job()
    };
    run_on(&device, write.clone()).unwrap();
    let before = content(&device);
    let cut = std::fs::OpenOptions::new().write(true).open(&file.0);
    cut.unwrap().set_len(4096).unwrap();
    run_on(&device, write).unwrap();
    // All writes are lost. The old blocks from the previous run have the same generation.
    device.memory().write(0, &before);
    let check = Job {
        verify_only: true,
        state: Some(file.0.clone()),
        ..Job::default()
    };
    let error = run_on(&device, check).unwrap_err();
    assert!(error.to_string().contains("another run"), "{error}");
}

#[test]
fn conflicting_jobs_leave_no_state_file() {
    let file = StateFile::new("overlap");
    let device = device();
    let task = |name: &str, state| Task {
        job: Job {
            name: name.into(),
            access: Access::Write,
            state,
            ..job()
        },
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "mem".into(),
        devices: vec![device.clone()],
    };
    let tasks = [task("a", Some(file.0.clone())), task("b", None)];
    let error = run(&tasks, RunOptions::default(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("the same blocks"), "{error}");
    assert!(!file.0.exists());
}

#[test]
fn rounds_continue_with_same_state_file() {
    let device = device();
    let file = StateFile::new("rounds");
    let write = Job {
        access: Access::Write,
        state: Some(file.0.clone()),
        ..job()
    };
    for _ in 0..20 {
        run_on(&device, write.clone()).unwrap();
    }
}

#[test]
fn state_file_check_uses_available_buffers() {
    let device = MemoryDevice::new(SIZE, 512).unwrap();
    let device = device.with_buffer_budget(1 << 20).with_thread().unwrap();
    let device = Arc::new(device);
    let file = StateFile::new("buffers");
    let write = Job {
        access: Access::Write,
        sizes: blocks(1 << 20),
        iodepth: 1,
        numjobs: 1,
        state: Some(file.0.clone()),
        do_verify: false,
        ..job()
    };
    run_on(&device, write).unwrap();
    // This could use 32 buffers, but only one is available.
    let check = Task {
        job: Job {
            verify_only: true,
            iodepth: 32,
            state: Some(file.0.clone()),
            ..Job::default()
        },
        address: "mem".into(),
        rdma_device: None,
        protection: None,
        identity: "mem".into(),
        devices: vec![device],
    };
    let outcomes = run(&[check], RunOptions::default(), |_| {}).unwrap();
    assert!(outcomes[0].verified.unwrap().blocks > 0);
}
