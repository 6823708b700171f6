//! Offsets of operations.

use std::ops::Range;

use fastrand::Rng;

use super::zipf::Zipf;
use crate::job::{Distribution, Job, Pattern};

/// Offsets for one kind of operation.
pub(super) struct Offsets {
    region: Range<u64>,
    /// Alignment of offsets, relative to the start of the region.
    align: u64,
    pattern: Pattern,
    modifier: u64,
    distribution: Blocks,
    /// Offset of the next sequential operation.
    next: u64,
    /// Number of sequential operations remaining after the last random offset.
    left: u64,
}

/// Distribution of block numbers, starting from 0.
enum Blocks {
    Uniform,
    Zipf(Zipf, Scatter),
    /// Cumulative distribution of operations and blocks, both from 0 to 1.
    Zoned(Vec<(f64, f64)>),
}

impl Offsets {
    pub(super) fn new(job: &Job, region: &Range<u64>, align: u32) -> Self {
        let align = u64::from(align.max(1));
        let blocks = (region.end - region.start) / align;
        let distribution = match &job.distribution {
            Distribution::Uniform => Blocks::Uniform,
            Distribution::Zipf(theta) => Blocks::Zipf(
                Zipf::new(blocks.max(1), *theta),
                Scatter::new(blocks.max(1)),
            ),
            Distribution::Zoned(zones) => Blocks::Zoned(limits(zones)),
        };
        Self {
            region: region.clone(),
            align,
            pattern: job.pattern,
            modifier: job.modifier,
            distribution,
            next: region.start,
            left: 0,
        }
    }

    /// Returns whether the offsets of all operations are random.
    pub(super) fn is_random(&self) -> bool {
        self.pattern == Pattern::Random && self.modifier <= 1
    }

    /// Returns the range for an operation of this length.
    pub(super) fn next(&mut self, len: u64, random: &mut Rng) -> Range<u64> {
        let fits = |start: u64| {
            start
                .checked_add(len)
                .is_some_and(|end| end <= self.region.end)
        };
        let start = match self.pattern {
            Pattern::Sequential if fits(self.next) => self.next,
            Pattern::Sequential => self.region.start,
            Pattern::Random if self.left > 0 && fits(self.next) => {
                self.left -= 1;
                self.next
            }
            Pattern::Random => {
                self.left = self.modifier.saturating_sub(1);
                self.random(len, random)
            }
        };
        self.next = start + len;
        if self.pattern == Pattern::Sequential {
            self.next = self.next.saturating_add(self.modifier);
        }
        start..start + len
    }

    fn random(&self, len: u64, random: &mut Rng) -> u64 {
        // Number of valid offsets for this length. For operations longer than a block, this is less
        // than the number of blocks.
        let places = (self.region.end - self.region.start - len) / self.align + 1;
        let block = match &self.distribution {
            Blocks::Uniform => random.u64(..places),
            Blocks::Zipf(zipf, scatter) => scatter.place(zipf.sample(random) - 1).min(places - 1),
            Blocks::Zoned(limits) => zoned(limits, places, random),
        };
        self.region.start + block * self.align
    }
}

/// Calculates cumulative sums of percentages.
fn limits(zones: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let sum = |(ops, blocks): &mut (f64, f64), zone: &(f64, f64)| {
        *ops += zone.0 / 100.0;
        *blocks += zone.1 / 100.0;
        Some((*ops, *blocks))
    };
    zones.iter().scan((0.0, 0.0), sum).collect()
}

fn zoned(limits: &[(f64, f64)], places: u64, random: &mut Rng) -> u64 {
    let at = random.f64();
    let zone = limits.partition_point(|(ops, _)| *ops <= at);
    let zone = zone.min(limits.len() - 1);
    let low = zone.checked_sub(1).map_or(0.0, |before| limits[before].1);
    let place = |share: f64| ((share * places as f64) as u64).min(places);
    let low = place(low).min(places - 1);
    let high = place(limits[zone].1).max(low + 1);
    random.u64(low..high)
}

/// Permutation of blocks, so that frequent blocks are not adjacent.
struct Scatter {
    blocks: u64,
    factor: u64,
}

impl Scatter {
    fn new(blocks: u64) -> Self {
        // Using the golden ratio separates adjacent blocks. This is a permutation if the factor and
        // the number of blocks are coprime.
        let start = ((blocks as f64 * 0.618_033_988_749_895) as u64).max(1);
        let factor = (start..).find(|factor| gcd(*factor, blocks) == 1);
        Self {
            blocks,
            factor: factor.unwrap_or(1),
        }
    }

    fn place(&self, block: u64) -> u64 {
        let product = u128::from(block) * u128::from(self.factor);
        (product % u128::from(self.blocks)) as u64
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(pattern: Pattern, modifier: u64, distribution: Distribution) -> Offsets {
        let job = Job {
            pattern,
            modifier,
            distribution,
            ..Job::default()
        };
        Offsets::new(&job, &(4096..4096 + 40960), 4096)
    }

    fn starts(offsets: &mut Offsets, count: usize) -> Vec<u64> {
        let mut random = Rng::with_seed(1);
        (0..count)
            .map(|_| offsets.next(4096, &mut random).start / 4096)
            .collect()
    }

    #[test]
    fn sequence_wraps_and_strides_skip() {
        let mut plain = offsets(Pattern::Sequential, 0, Distribution::Uniform);
        assert_eq!(
            starts(&mut plain, 12),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]
        );
        let mut strided = offsets(Pattern::Sequential, 8192, Distribution::Uniform);
        assert_eq!(starts(&mut strided, 5), [1, 4, 7, 10, 1]);
        let mut endless = offsets(Pattern::Sequential, u64::MAX, Distribution::Uniform);
        assert_eq!(starts(&mut endless, 3), [1, 1, 1]);
    }

    #[test]
    fn random_modifier_continues_sequentially() {
        let mut runs = offsets(Pattern::Random, 4, Distribution::Uniform);
        let starts = starts(&mut runs, 400);
        let follows = starts.windows(2).filter(|w| w[1] == w[0] + 1).count();
        // This is three out of four, except for sequences that reach the end of the region.
        assert!(follows > 200, "{follows}");
    }

    #[test]
    fn uniform_distribution_selects_blocks_equally() {
        let mut counts = [0; 11];
        for block in starts(
            &mut offsets(Pattern::Random, 0, Distribution::Uniform),
            20_000,
        ) {
            counts[block as usize] += 1;
        }
        assert_eq!(counts[0], 0);
        assert!(
            counts[1..].iter().all(|n| (1800..2200).contains(n)),
            "{counts:?}"
        );
    }

    #[test]
    fn zones_get_their_share() {
        let zones = Distribution::Zoned(vec![(80.0, 20.0), (0.0, 30.0), (20.0, 50.0)]);
        let starts = starts(&mut offsets(Pattern::Random, 0, zones), 20_000);
        let within = |blocks: Range<u64>| starts.iter().filter(|b| blocks.contains(b)).count();
        assert!((15_600..16_400).contains(&within(1..3)), "{}", within(1..3));
        assert_eq!(within(3..6), 0);
        assert!((3600..4400).contains(&within(6..11)));
    }

    #[test]
    fn scatter_permutes_and_separates_blocks() {
        for blocks in [1, 2, 10, 64, 97, 1000] {
            let scatter = Scatter::new(blocks);
            let mut seen: Vec<_> = (0..blocks).map(|b| scatter.place(b)).collect();
            assert!(blocks < 64 || seen[1].abs_diff(seen[0]) > blocks / 4);
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..blocks));
        }
    }
}
