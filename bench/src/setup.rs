//! Validates a job for a device, and calculates the region and the amount of work for each clone.

use std::ops::Range;

use riser_block::{Geometry, MAX_TRANSFER};

use super::content::HEADER;
use super::error::BenchError;
use super::job::{Access, Amount, BlockSizes, Job, Pattern};
use super::outcome::OpKind;

/// Maximum number of operations in flight for a job.
const MAX_IN_FLIGHT: u32 = 4096;

/// Size of a page in bytes.
const PAGE: u64 = 4096;

/// Region and amount of work for a clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Region on the device in bytes.
    pub(super) region: Range<u64>,
    /// Number of bytes to transfer.
    pub(super) bytes: u64,
    /// Number of operations.
    pub(super) ios: u64,
}

/// Validates a job for a device, and calculates the share of each clone.
///
/// # Errors
/// Returns the reason if the job is invalid.
pub(super) fn shares(job: &Job, geometry: &Geometry) -> Result<Vec<Share>, BenchError> {
    check_sizes(job, geometry)?;
    check_in_flight(job)?;
    if job.access.is_destructive() && geometry.read_only {
        return fail("the device is read-only".into());
    }
    if job.access == Access::Flush && !geometry.flushes {
        return fail("the disk does not support flushes, so there is nothing to measure".into());
    }
    if job.access == Access::Flush && job.runtime.is_none() && job.number_ios.is_none() {
        return fail("flushes transfer no bytes: set runtime or number_ios".into());
    }
    if job.time_based && job.runtime.is_none() {
        return fail("time_based requires runtime".into());
    }
    check_rates(job)?;
    check_verify(job)?;
    let shares: Vec<Share> = (0..job.numjobs)
        .map(|index| share(job, geometry, index))
        .collect();
    for share in &shares {
        check_region(job, geometry, &share.region)?;
    }
    if shares.iter().all(|share| share.bytes == 0) {
        return fail(format!(
            "the bytes to transfer are less than one block of {} bytes",
            job.min_block()
        ));
    }
    Ok(shares)
}

/// Fails if there are too many operations in flight.
pub(super) fn check_in_flight(job: &Job) -> Result<(), BenchError> {
    // Each operation in flight requires a buffer, so we check the product instead of the factors.
    let in_flight = job.iodepth.checked_mul(job.numjobs);
    match in_flight.is_none_or(|n| n == 0 || n > MAX_IN_FLIGHT) {
        true => fail(format!(
            "{} jobs of depth {}: the product must be from 1 to {MAX_IN_FLIGHT}",
            job.numjobs, job.iodepth
        )),
        false => Ok(()),
    }
}

fn fail<T>(what: String) -> Result<T, BenchError> {
    Err(BenchError::Config(what))
}

fn check_sizes(job: &Job, geometry: &Geometry) -> Result<(), BenchError> {
    for kind in job.access.kinds() {
        let sizes = job.sizes_of(*kind);
        for size in all_sizes(sizes) {
            if size == 0 || !size.is_multiple_of(geometry.block_size) {
                return fail(format!(
                    "the block size {size} is not a multiple of the device's {}",
                    geometry.block_size
                ));
            }
        }
        let size = sizes.max();
        let limit = match kind {
            // The same blocks are then written, so the limit for transfers also applies.
            OpKind::Trim if job.access == Access::TrimWrite => {
                geometry.max_discard.min(geometry.max_transfer.into())
            }
            OpKind::Trim => geometry.max_discard,
            OpKind::Read | OpKind::Write => geometry.max_transfer.into(),
            OpKind::Flush => u64::MAX,
        };
        if limit == 0 {
            return fail("the device does not support trim".into());
        }
        if u64::from(size) > limit {
            let what = if *kind == OpKind::Trim {
                "trim"
            } else {
                "transfer"
            };
            return fail(format!(
                "the block size {size} exceeds the limit of one {what}, {limit}"
            ));
        }
    }
    Ok(())
}

fn all_sizes(sizes: &BlockSizes) -> Vec<u32> {
    match sizes {
        BlockSizes::Fixed(size) => vec![*size],
        BlockSizes::Range { min, .. } => vec![*min],
        BlockSizes::Split(parts) => parts.iter().map(|(size, _)| *size).collect(),
    }
}

fn check_rates(job: &Job) -> Result<(), BenchError> {
    let kinds = job.access.planned();
    let rated = kinds.iter().filter(|kind| job.rate_of(**kind).is_some());
    match rated.count() {
        0 if job.rates.iter().any(Option::is_some) => {
            fail("the rate applies to operations that the job does not plan".into())
        }
        0 => Ok(()),
        count if count != kinds.len() => {
            fail("unsupported rate for only one of reads and writes: set both rates".into())
        }
        _ if !job.thinktime.is_zero() => fail(
            "thinktime has no effect on operations with planned times: remove thinktime or \
                 the rate"
                .into(),
        ),
        // We can't distinguish the default from an explicit value.
        _ if job.access == Access::Mixed && job.rwmixread != 50 => fail(
            "rwmixread has no effect on reads and writes with rates, which determine the mix"
                .into(),
        ),
        _ => Ok(()),
    }
}

fn check_verify(job: &Job) -> Result<(), BenchError> {
    if job.verify.is_none() {
        return match job.state.is_some() {
            true => fail("a state file requires verify".into()),
            false => Ok(()),
        };
    }
    if job.state.is_some() && !job.access.is_destructive() {
        return fail(
            "a state file records writes, but the job has none; use verify_only to verify \
             recorded writes"
                .into(),
        );
    }
    let block = u64::from(job.min_block());
    if (block as usize) < HEADER {
        return fail(format!("the block size {block} is too small for a header"));
    }
    let kinds = job.access.kinds().iter();
    let mut sizes = kinds.flat_map(|kind| all_sizes(job.sizes_of(*kind)));
    if let Some(size) = sizes.find(|size| !u64::from(*size).is_multiple_of(block)) {
        return fail(format!(
            "the block size {size} is not a multiple of the smallest, {block}, as required by \
             verify"
        ));
    }
    if job.pattern == Pattern::Sequential && !job.modifier.is_multiple_of(block) {
        return fail(format!(
            "the stride {} is not a multiple of the smallest block size, {block}, as required by \
             verify",
            job.modifier
        ));
    }
    Ok(())
}

fn share(job: &Job, geometry: &Geometry, index: u32) -> Share {
    let whole = geometry.capacity;
    let align = u64::from(job.min_block().max(geometry.block_size));
    let start = start(job, whole, align, index);
    let end = match job.size {
        // Don't exceed the end of the device.
        Some(size @ Amount::Percent(_)) => start
            .saturating_add(size.of(whole, align))
            .min(whole.max(start)),
        Some(size) => start.saturating_add(size.of(whole, align)),
        None => whole.max(start),
    };
    let (count, index) = (u64::from(job.numjobs), u64::from(index));
    // Calculate the bounds from rounded sums, so that the shares of all clones add up to the whole.
    let part =
        |of: u64, index: u64| (u128::from(of) * u128::from(index) / u128::from(count)) as u64;
    let region = match job.splits_region && job.pattern == Pattern::Sequential {
        true => {
            let blocks = (end - start) / align;
            start + part(blocks, index) * align..start + part(blocks, index + 1) * align
        }
        false => start..end,
    };
    let length = region.end - region.start;
    let bytes = match (job.total, job.io_size) {
        _ if job.time_based => u64::MAX,
        (Some(total), _) => {
            let blocks = total / align;
            (part(blocks, index + 1) - part(blocks, index)) * align
        }
        // Round down to whole blocks. Otherwise the last operation would wrap around to the start.
        (None, Some(size)) => size.of(length, align) / align * align,
        (None, None) => length / align * align,
    };
    let bytes = match strided(job, whole, &region) {
        Some(most) if bytes <= length => bytes.min(most),
        _ => bytes,
    };
    Share {
        region,
        bytes: bytes.saturating_mul(job.loops),
        ios: job.number_ios.unwrap_or(u64::MAX).saturating_mul(job.loops),
    }
}

/// Returns the start of the region for a clone. As in fio, percentages are rounded up to blocks.
fn start(job: &Job, whole: u64, align: u64, index: u32) -> u64 {
    let increment = job.offset_increment.exact(whole);
    let increments = increment.saturating_mul(index.into());
    let start = job.offset.exact(whole).saturating_add(increments);
    let is_part = |amount| matches!(amount, Amount::Percent(_));
    match is_part(job.offset) || is_part(job.offset_increment) {
        true => start.checked_next_multiple_of(align).unwrap_or(start),
        false => start,
    }
}

/// Returns the number of bytes in a single pass of a strided job over its region. As in fio, the
/// job completes after one pass. Returns `None` if the job isn't strided, or if fio would wrap
/// around. This is the case if the last operation is before the end of the device, but the stride
/// after it isn't.
fn strided(job: &Job, whole: u64, region: &Range<u64>) -> Option<u64> {
    let [kind] = job.access.kinds() else {
        return None;
    };
    let BlockSizes::Fixed(block) = *job.sizes_of(*kind) else {
        return None;
    };
    if job.pattern != Pattern::Sequential || job.modifier == 0 || block == 0 {
        return None;
    }
    let (block, length) = (u64::from(block), region.end - region.start);
    let stride = block.saturating_add(job.modifier);
    let last = length.saturating_sub(block) / stride * stride;
    let end = region.start.saturating_add(last).saturating_add(block);
    let begins_again = end < whole && end.saturating_add(job.modifier) >= whole;
    match begins_again && region.end >= whole {
        true => None,
        false => Some((last / stride + 1) * block),
    }
}

/// Returns the region from the start of the first share to the end of the last share.
pub(super) fn region(shares: &[Share]) -> Range<u64> {
    let start = shares.iter().map(|share| share.region.start).min();
    let end = shares.iter().map(|share| share.region.end).max();
    start.unwrap_or(0)..end.unwrap_or(0)
}

/// Returns the size in bytes which is atomic after a crash. Files use the page size of the kernel,
/// even if a server only supports larger blocks.
pub(super) fn atom(geometry: &Geometry) -> u64 {
    u64::from(geometry.block_size).min(PAGE)
}

/// Returns whether a job requires stable storage, but this is not supported by its device.
pub(super) fn is_unstable(job: &Job, geometry: &Geometry) -> bool {
    let writes = job.is_destructive() && job.access.kinds().contains(&OpKind::Write);
    let flushes = job.end_fsync && job.is_destructive() || job.fsync > 0 && writes;
    flushes && !geometry.flushes || job.fua && writes && !geometry.stable_writes
}

fn check_region(job: &Job, geometry: &Geometry, region: &Range<u64>) -> Result<(), BenchError> {
    let (start, end) = (region.start, region.end);
    if end > geometry.capacity {
        return fail(format!(
            "the region ends at byte {end}, beyond the end of the device, which has {} bytes",
            geometry.capacity
        ));
    }
    if !start.is_multiple_of(u64::from(geometry.block_size)) {
        return fail(format!(
            "the region starts at byte {start}, which is not a multiple of the device's blocks of \
             {} bytes",
            geometry.block_size
        ));
    }
    let block = u64::from(job.max_block());
    if end.saturating_sub(start) < block.max(1) {
        return fail(format!(
            "the region of {} bytes has less than one block of {block} bytes for each job",
            end.saturating_sub(start)
        ));
    }
    Ok(())
}

/// Returns the buffer size for an operation, and the size required for its parameters, both in
/// bytes.
fn buffer_size(job: &Job) -> (u64, u64) {
    let data = u64::from(job.max_block()).next_multiple_of(PAGE);
    match job.access {
        // The parameters of a trim require a separate buffer.
        Access::Trim => (0, PAGE),
        Access::Flush => (0, 0),
        Access::TrimWrite => (data, PAGE),
        Access::Read | Access::Write | Access::Mixed => (data, 0),
    }
}

/// Returns the total size of the buffers of a job on each of its connections, in bytes.
#[must_use]
pub fn buffer_bytes(job: &Job, connections: u32) -> u64 {
    if job.verify_only {
        // A single buffer with the maximum block size of a state file.
        return MAX_TRANSFER.into();
    }
    let (data, extra) = buffer_size(job);
    let clones = job.numjobs.div_ceil(connections.max(1));
    let operations = u64::from(job.iodepth).saturating_mul(clones.into());
    (data + extra).saturating_mul(operations)
}

/// Returns whether the operations of a job require buffers.
pub(super) fn has_buffers(job: &Job) -> bool {
    buffer_size(job).0 > 0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::job::{Checksum, Rate};
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            block_size: 512,
            physical_block_size: 4096,
            capacity: 8 << 20,
            max_transfer: 1 << 20,
            optimal_transfer: 64 << 10,
            max_discard: 0,
            max_write_zeroes: 0,
            reports_status: false,
            read_only: false,
            volatile_cache: false,
            flushes: true,
            stable_writes: true,
        }
    }

    fn regions(job: &Job) -> Vec<Range<u64>> {
        let shares = shares(job, &geometry()).unwrap();
        shares.into_iter().map(|share| share.region).collect()
    }

    #[test]
    fn clones_share_split_or_shift_region() {
        let job = Job {
            numjobs: 2,
            offset: Amount::Percent(50),
            size: Some(Amount::Bytes(1 << 20)),
            ..Job::default()
        };
        let (start, half) = (4 << 20, 1 << 19);
        assert_eq!(regions(&job), vec![start..start + (1 << 20); 2]);
        let split = Job {
            splits_region: true,
            ..job.clone()
        };
        assert_eq!(
            regions(&split),
            [start..start + half, start + half..start + 2 * half]
        );
        let apart = Job {
            offset_increment: Amount::Bytes(2 << 20),
            ..job
        };
        assert_eq!(regions(&apart)[1].start, 6 << 20);
    }

    #[test]
    fn percentages_round_to_job_blocks() {
        let job = Job {
            numjobs: 2,
            sizes: std::array::from_fn(|_| BlockSizes::Fixed(65536)),
            offset: Amount::Percent(33),
            offset_increment: Amount::Percent(7),
            size: Some(Amount::Percent(31)),
            io_size: Some(Amount::Percent(77)),
            ..Job::default()
        };
        let shares = shares(&job, &geometry()).unwrap();
        for Share { region, bytes, .. } in &shares {
            let places = [region.start, region.end, *bytes];
            assert!(places.iter().all(|n| n.is_multiple_of(65536)), "{places:?}");
        }
        // As in fio, 33 and 40 percent are rounded up.
        assert_eq!(shares[0].region, 43 << 16..82 << 16);
        assert_eq!(shares[1].region.start, 52 << 16);
        assert_eq!(shares[0].bytes, 30 << 16);
    }

    fn bytes(job: &Job) -> u64 {
        shares(job, &geometry()).unwrap()[0].bytes
    }

    /// These are the same values as in fio 3.33.
    #[test]
    fn strides_stop_at_region_end() {
        let job = |size, modifier| Job {
            size: Some(Amount::Bytes(size)),
            modifier,
            ..Job::default()
        };
        assert_eq!(bytes(&job(4 << 20, 12 << 10)), 256 * 4096);
        assert_eq!(bytes(&job(4 << 20, 10 << 10)), 293 * 4096);
        // For a whole device, fio wraps around if the stride exceeds the end.
        for (skip, blocks) in [(9, 630), (10, 585), (12, 2048), (20, 2048)] {
            assert_eq!(bytes(&job(8 << 20, skip << 10)), blocks * 4096, "{skip}");
        }
        let more = Job {
            io_size: Some(Amount::Bytes(5 << 20)),
            ..job(4 << 20, 12 << 10)
        };
        assert_eq!(bytes(&more), 5 << 20);
        let loops = Job {
            loops: 2,
            ..job(4 << 20, 12 << 10)
        };
        assert_eq!(bytes(&loops), 512 * 4096);
    }

    #[test]
    fn loops_multiply_bytes_and_operations() {
        let job = Job {
            size: Some(Amount::Bytes(1 << 20)),
            number_ios: Some(10),
            loops: 3,
            ..Job::default()
        };
        let share = shares(&job, &geometry()).unwrap().remove(0);
        assert_eq!((share.bytes, share.ios), (3 << 20, 30));
        let endless = Job {
            time_based: true,
            runtime: Some(Duration::from_secs(1)),
            ..job
        };
        assert_eq!(bytes(&endless), u64::MAX);
    }

    #[test]
    fn size_percentage_stops_at_device_end() {
        let job = Job {
            offset: Amount::Bytes(2 << 20),
            size: Some(Amount::Percent(100)),
            ..Job::default()
        };
        assert_eq!(regions(&job)[0], 2 << 20..8 << 20);
        let apart = Job {
            numjobs: 3,
            size: Some(Amount::Bytes(4096)),
            offset_increment: Amount::Percent(20),
            ..Job::default()
        };
        // Each offset is rounded up separately.
        let starts: Vec<u64> = regions(&apart).iter().map(|region| region.start).collect();
        assert_eq!(starts, [0, 1_679_360, 3_358_720]);
    }

    #[test]
    fn clone_transfers_whole_blocks() {
        let geometry = Geometry {
            capacity: (8 << 20) + 512,
            ..geometry()
        };
        let bytes = |io_size| {
            let job = Job {
                sizes: std::array::from_fn(|_| BlockSizes::Fixed(65536)),
                io_size,
                ..Job::default()
            };
            shares(&job, &geometry).unwrap()[0].bytes
        };
        assert_eq!(bytes(None), 8 << 20);
        assert_eq!(bytes(Some(Amount::Bytes(100_000))), 65536);
    }

    #[test]
    fn missing_stable_storage_is_detected() {
        let without = Geometry {
            flushes: false,
            stable_writes: false,
            ..geometry()
        };
        let flush = Job {
            access: Access::Flush,
            number_ios: Some(5),
            ..Job::default()
        };
        assert!(shares(&flush, &geometry()).is_ok());
        let error = shares(&flush, &without).unwrap_err().to_string();
        assert!(
            error.contains("the disk does not support flushes"),
            "{error}"
        );
        let plain = Job {
            access: Access::Write,
            ..Job::default()
        };
        let job = |change: fn(&mut Job)| {
            let mut job = plain.clone();
            change(&mut job);
            job
        };
        let only_writes = Geometry {
            stable_writes: true,
            ..without.clone()
        };
        let fua = job(|job| job.fua = true);
        for requires in [job(|job| job.fsync = 1), job(|job| job.end_fsync = true)] {
            assert!(is_unstable(&requires, &without) && is_unstable(&requires, &only_writes));
            assert!(!is_unstable(&requires, &geometry()));
        }
        assert!(is_unstable(&fua, &without) && !is_unstable(&fua, &only_writes));
        assert!(!is_unstable(&plain, &without));
    }

    #[test]
    fn clones_divide_total_work() {
        let amounts = |job: &Job| {
            let shares = shares(job, &geometry()).unwrap();
            shares.iter().map(|share| share.bytes).collect::<Vec<_>>()
        };
        let job = Job {
            numjobs: 3,
            ..Job::default()
        };
        assert_eq!(amounts(&job), [8 << 20; 3]);
        let total = Job {
            total: Some(10 * 4096),
            ..job.clone()
        };
        assert_eq!(amounts(&total).iter().sum::<u64>(), 10 * 4096);
        let io_size = Job {
            io_size: Some(Amount::Percent(25)),
            ..job.clone()
        };
        assert_eq!(amounts(&io_size), [2 << 20; 3]);
        let endless = Job {
            time_based: true,
            runtime: Some(Duration::from_secs(1)),
            ..job
        };
        assert_eq!(amounts(&endless), [u64::MAX; 3]);
    }

    #[test]
    fn invalid_jobs_fail_with_reason() {
        let refused = |change: fn(&mut Job)| {
            let mut job = Job::default();
            change(&mut job);
            shares(&job, &geometry()).unwrap_err().to_string()
        };
        let bs = |size| std::array::from_fn(|_| BlockSizes::Fixed(size));
        let refused_size = |size| {
            let job = Job {
                sizes: bs(size),
                ..Job::default()
            };
            shares(&job, &geometry()).unwrap_err().to_string()
        };
        assert!(refused_size(1000).contains("not a multiple of the device's 512"));
        assert!(refused_size(2 << 20).contains("exceeds the limit of one transfer"));
        let beyond_the_optimum = Job {
            sizes: bs(1 << 20),
            ..Job::default()
        };
        assert!(shares(&beyond_the_optimum, &geometry()).is_ok());
        assert!(refused(|j| j.iodepth = 0).contains("from 1 to 4096"));
        assert!(refused(|j| (j.iodepth, j.numjobs) = (u32::MAX, 2)).contains("product"));
        let beyond = refused(|j| j.size = Some(Amount::Bytes(16 << 20)));
        assert!(beyond.contains("16777216, beyond the end"), "{beyond}");
        let before = refused(|j| j.offset = Amount::Bytes(100));
        assert!(
            before.contains("starts at byte 100, which is not"),
            "{before}"
        );
        assert!(refused(|j| j.size = Some(Amount::Bytes(512))).contains("each job"));
        assert!(refused(|j| j.offset = Amount::Bytes(9 << 20)).contains("beyond the end"));
        assert!(refused(|j| j.access = Access::Trim).contains("does not support trim"));
        assert!(refused(|j| j.access = Access::Flush).contains("number_ios"));
        assert!(refused(|j| j.time_based = true).contains("requires runtime"));
        assert!(refused(|j| j.state = Some("f".into())).contains("requires verify"));
        let no_writes = refused(|j| {
            j.state = Some("f".into());
            j.verify = Some(Checksum::Crc32c);
        });
        assert!(no_writes.contains("the job has none"), "{no_writes}");
        let nothing = refused(|j| j.total = Some(4095));
        assert!(nothing.contains("less than one block of 4096"), "{nothing}");
        assert!(refused(|j| j.io_size = Some(Amount::Bytes(0))).contains("less than one block"));
        let one_rate = refused(|j| {
            j.access = Access::Mixed;
            j.rates[0] = Some(Rate::Iops(5));
        });
        assert!(one_rate.contains("set both rates"), "{one_rate}");
        let mix = refused(|j| {
            j.access = Access::Mixed;
            j.rwmixread = 70;
            j.rates = [Some(Rate::Iops(5)); 3];
        });
        assert!(mix.contains("rwmixread has no effect"), "{mix}");
        let flushes = refused(|j| {
            j.access = Access::Flush;
            j.number_ios = Some(5);
            j.rates = [Some(Rate::Iops(5)); 3];
        });
        assert!(flushes.contains("does not plan"), "{flushes}");
        let stride = refused(|j| {
            j.verify = Some(Checksum::Crc32c);
            j.modifier = 512;
        });
        assert!(stride.contains("stride 512"), "{stride}");
    }

    #[test]
    fn trimwrite_is_limited_by_transfer_size() {
        let geometry = Geometry {
            max_discard: 4 << 20,
            ..geometry()
        };
        let job = |access| Job {
            access,
            sizes: [4096, 4096, 2 << 20].map(BlockSizes::Fixed),
            ..Job::default()
        };
        assert!(shares(&job(Access::Trim), &geometry).is_ok());
        let error = shares(&job(Access::TrimWrite), &geometry).unwrap_err();
        assert!(error.to_string().contains("limit of one trim, 1048576"));
    }

    #[test]
    fn buffers_are_whole_pages() {
        let job = Job {
            iodepth: 4,
            numjobs: 2,
            sizes: std::array::from_fn(|_| BlockSizes::Fixed(512)),
            ..Job::default()
        };
        assert_eq!(buffer_bytes(&job, 1), 8 * 4096);
        assert_eq!(buffer_bytes(&job, 2), 4 * 4096);
        let check = Job {
            verify_only: true,
            ..job.clone()
        };
        assert_eq!(buffer_bytes(&check, 1), 4 << 20);
    }
}
