//! Plans the operations of a clone: kinds, offsets, sizes and arrivals. This doesn't depend on a
//! clock, and operations are reproducible for a given seed.

mod arrivals;
mod offsets;
mod zipf;

use std::ops::Range;

use fastrand::Rng;

pub(super) use arrivals::Arrivals;
use offsets::Offsets;

use super::job::{Access, BlockSizes, Job};
use super::outcome::OpKind;

/// An operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Op {
    pub(super) kind: OpKind,
    /// Range on the device in bytes, empty for a flush.
    pub(super) range: Range<u64>,
}

impl Op {
    pub(super) const FLUSH: Self = Self {
        kind: OpKind::Flush,
        range: 0..0,
    };

    pub(super) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Sequence of planned operations.
pub(super) struct Plan {
    access: Access,
    rwmixread: u8,
    sizes: [BlockSizes; 3],
    /// Offsets of reads, writes and trims. Sequential operations of each kind have separate
    /// positions.
    offsets: [Offsets; 3],
    random: Rng,
    fsync: u32,
    /// Number of writes since the last flush.
    unsynced: u32,
}

impl Plan {
    /// Creates a plan for a clone and its region.
    pub(super) fn new(job: &Job, region: &Range<u64>, random: Rng) -> Self {
        // Align offsets to the smallest block size, so that they match the position of headers.
        let align = job.min_block();
        Self {
            access: job.access,
            rwmixread: job.rwmixread,
            sizes: job.sizes.clone(),
            offsets: std::array::from_fn(|_| Offsets::new(job, region, align)),
            random,
            fsync: job.fsync,
            unsynced: 0,
        }
    }

    /// Returns the next operation. This has the given `kind` if it was already planned together
    /// with its arrival.
    pub(super) fn next(&mut self, kind: Option<OpKind>) -> Op {
        if self.fsync > 0 && self.unsynced >= self.fsync {
            self.unsynced = 0;
            return Op::FLUSH;
        }
        let kind = kind.unwrap_or_else(|| self.kind());
        if kind == OpKind::Flush {
            return Op::FLUSH;
        }
        self.unsynced += u32::from(kind == OpKind::Write);
        let index = kind as usize;
        let len = size(&self.sizes[index], &mut self.random);
        let range = self.offsets[index].next(len.into(), &mut self.random);
        Op { kind, range }
    }

    /// Returns another random range for an operation, or `None` if offsets are not all random.
    pub(super) fn another_place(&mut self, op: &Op) -> Option<Range<u64>> {
        let offsets = &mut self.offsets[op.kind as usize];
        let is_free = offsets.is_random();
        is_free.then(|| offsets.next(op.len(), &mut self.random))
    }

    fn kind(&mut self) -> OpKind {
        match self.access {
            Access::Read => OpKind::Read,
            Access::Write => OpKind::Write,
            Access::Mixed if self.random.u8(..100) < self.rwmixread => OpKind::Read,
            Access::Mixed => OpKind::Write,
            Access::Trim | Access::TrimWrite => OpKind::Trim,
            Access::Flush => OpKind::Flush,
        }
    }
}

fn size(sizes: &BlockSizes, random: &mut Rng) -> u32 {
    match sizes {
        BlockSizes::Fixed(size) => *size,
        BlockSizes::Range { min, max } => min * random.u32(1..=max / min),
        BlockSizes::Split(parts) => {
            let mut left = random.f64() * 100.0;
            let chosen = parts.iter().find(|(_, percent)| {
                left -= percent;
                left < 0.0
            });
            // Due to rounding, the sum of percentages may be slightly less than 100.
            chosen.or(parts.last()).map_or(0, |(size, _)| *size)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::{Distribution, Pattern};
    use super::*;

    fn plan(job: &Job, region: Range<u64>) -> Plan {
        Plan::new(job, &region, Rng::with_seed(7))
    }

    fn job(access: Access, pattern: Pattern) -> Job {
        Job {
            access,
            pattern,
            ..Job::default()
        }
    }

    #[test]
    fn plan_is_reproducible_by_seed() {
        let job = Job {
            sizes: std::array::from_fn(|_| BlockSizes::Range {
                min: 512,
                max: 8192,
            }),
            ..job(Access::Mixed, Pattern::Random)
        };
        let ops = |seed| {
            let mut plan = Plan::new(&job, &(0..1 << 20), Rng::with_seed(seed));
            (0..100).map(|_| plan.next(None)).collect::<Vec<_>>()
        };
        assert_eq!(ops(3), ops(3));
        assert_ne!(ops(3), ops(4));
    }

    #[test]
    fn operations_respect_region_and_sizes() {
        let sizes = BlockSizes::Split(vec![(4096, 60.0), (65536, 40.0)]);
        let job = Job {
            sizes: std::array::from_fn(|_| sizes.clone()),
            distribution: Distribution::Zipf(1.1),
            rwmixread: 70,
            ..job(Access::Mixed, Pattern::Random)
        };
        let region = 8192..(1 << 20) + 8192;
        let mut plan = plan(&job, region.clone());
        let (mut small, mut reads) = (0, 0);
        for _ in 0..20_000 {
            let op = plan.next(None);
            assert!(op.range.start >= region.start && op.range.end <= region.end);
            assert!((op.range.start - region.start).is_multiple_of(4096));
            assert!(matches!(op.len(), 4096 | 65536));
            small += u32::from(op.len() == 4096);
            reads += u32::from(op.kind == OpKind::Read);
        }
        assert!((11_400..12_600).contains(&small), "{small}");
        assert!((13_500..14_500).contains(&reads), "{reads}");
    }

    #[test]
    fn flush_follows_n_writes() {
        let job = Job {
            fsync: 3,
            ..job(Access::Write, Pattern::Sequential)
        };
        let mut plan = plan(&job, 0..1 << 20);
        let kinds: Vec<_> = (0..8).map(|_| plan.next(None).kind).collect();
        let (w, f) = (OpKind::Write, OpKind::Flush);
        assert_eq!(kinds, [w, w, w, f, w, w, w, f]);
    }

    #[test]
    fn sequential_reads_and_writes_are_independent() {
        let mut plan = plan(&job(Access::Mixed, Pattern::Sequential), 0..1 << 20);
        let mut next = [0, 0];
        for _ in 0..100 {
            let op = plan.next(None);
            let next = &mut next[op.kind as usize];
            assert_eq!(op.range.start, *next);
            *next = op.range.end;
        }
        assert!(next[0] > 0 && next[1] > 0);
    }
}
