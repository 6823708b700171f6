//! Compares two small samples without assumptions about their distribution.
//!
//! This uses the confidence interval that corresponds to the Mann-Whitney test: we sort the ratios
//! for all pairs of values and remove as many from each end as the test allows at this confidence
//! level. The estimate is the median of the ratios (Hodges-Lehmann).

/// Minimum probability that the interval contains the true ratio.
pub const CONFIDENCE: f64 = 0.95;

/// Maximum sample size for which we compute the exact distribution. Beyond this, the normal
/// distribution is a good approximation.
const EXACT: usize = 30;

/// Two-sided quantile of the normal distribution for [`CONFIDENCE`].
const NORMAL: f64 = 1.959_963_985;

/// Ratio of B to A and its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Median of the ratios for all pairs.
    pub estimate: f64,
    /// Lower and upper bound at [`CONFIDENCE`], or `None` if the samples are too small.
    pub interval: Option<(f64, f64)>,
}

/// Compares two samples. Returns `None` if one is empty or contains a value that is not positive.
pub fn ratio(a: &[f64], b: &[f64]) -> Option<Ratio> {
    let positive = |values: &[f64]| values.iter().all(|v| v.is_finite() && *v > 0.0);
    if a.is_empty() || b.is_empty() || !positive(a) || !positive(b) {
        return None;
    }
    let ratios = Ratios::new(a, b);
    let (middle, last) = (ratios.len() / 2, ratios.len() - 1);
    let estimate = match ratios.len() % 2 {
        1 => ratios.nth(middle),
        // Use the geometric mean, so that swapping A and B results in the inverse ratio.
        _ => (ratios.nth(middle - 1) * ratios.nth(middle)).sqrt(),
    };
    let cut = cut(a.len(), b.len());
    Some(Ratio {
        estimate,
        interval: cut.map(|cut| (ratios.nth(cut), ratios.nth(last - cut))),
    })
}

/// Sorted ratios for all pairs. These are not stored, as there are too many for a large number of
/// rounds.
struct Ratios {
    /// Ascending.
    a: Vec<f64>,
    b: Vec<f64>,
}

impl Ratios {
    fn new(a: &[f64], b: &[f64]) -> Self {
        let sorted = |values: &[f64]| {
            let mut values = values.to_vec();
            values.sort_by(f64::total_cmp);
            values
        };
        Self {
            a: sorted(a),
            b: sorted(b),
        }
    }

    fn len(&self) -> usize {
        self.a.len() * self.b.len()
    }

    /// Returns the number of ratios up to `limit`.
    fn up_to(&self, limit: f64) -> usize {
        // With increasing values of A, an increasing number of values of B are within the limit.
        let (mut within, mut count) = (0, 0);
        for a in &self.a {
            let further = self.b[within..].iter().take_while(|b| **b / a <= limit);
            within += further.count();
            count += within;
        }
        count
    }

    /// Returns the ratio at index `n`.
    fn nth(&self, n: usize) -> f64 {
        // Floating-point numbers that are not negative can be sorted by their bits.
        let (mut low, mut high) = (0, f64::INFINITY.to_bits());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.up_to(f64::from_bits(middle)) > n {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        f64::from_bits(low)
    }
}

/// Returns the number of ratios to remove from each end, or `None` if even the full range doesn't
/// reach the required confidence.
pub fn cut(a: usize, b: usize) -> Option<usize> {
    let tail = (1.0 - CONFIDENCE) / 2.0;
    if a.max(b) > EXACT {
        let (a, b) = (a as f64, b as f64);
        let deviation = (a * b * (a + b + 1.0) / 12.0).sqrt();
        // Continuity correction, because the statistic is an integer.
        let cut = a * b / 2.0 - NORMAL * deviation - 0.5;
        return (cut >= 0.0).then_some(cut as usize);
    }
    let counts = counts(a, b);
    let all: f64 = counts.iter().sum();
    let mut below = 0.0;
    let mut cut = None;
    // If we remove `cut` values, the interval doesn't contain the true ratio if the statistic is at
    // most `cut`.
    for (statistic, count) in counts.iter().enumerate() {
        below += count;
        if below / all > tail {
            break;
        }
        cut = Some(statistic);
    }
    cut
}

/// Returns the number of permutations of `a + b` values for each value of the statistic. The
/// statistic is the number of pairs where the value from A is smaller.
fn counts(a: usize, b: usize) -> Vec<f64> {
    let width = a * b + 1;
    // Row `j` contains the counts for `j` values from B and the values from A that have been added
    // so far.
    let mut rows = vec![vec![0.0; width]; b + 1];
    for row in &mut rows {
        row[0] = 1.0;
    }
    for i in 1..=a {
        for j in 1..=b {
            let (before, rest) = rows.split_at_mut(j);
            // If the largest value is from A, it isn't the smaller one in any pair, and this is
            // already included in the row. If it is from B, it forms a pair with each value from A.
            let fewer = &before[j - 1];
            for (count, add) in rest[0][i..].iter_mut().zip(fewer) {
                *count += add;
            }
        }
    }
    rows.swap_remove(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_match_enumeration() {
        for (a, b) in [(1, 1), (2, 3), (4, 3), (4, 4)] {
            let mut expected = vec![0.0; a * b + 1];
            for order in 0..1_u32 << (a + b) {
                if order.count_ones() as usize != b {
                    continue;
                }
                // Each bit that is set is a value from B, with smaller values in lower bits.
                let places = (0..a + b).filter(|bit| order >> bit & 1 == 1);
                let pairs: usize = places
                    .map(|bit| bit - (order & ((1 << bit) - 1)).count_ones() as usize)
                    .sum();
                expected[pairs] += 1.0;
            }
            assert_eq!(counts(a, b), expected, "{a} {b}");
        }
    }

    #[test]
    fn critical_values_match_published_table() {
        // Mann-Whitney, two-sided, 5 %.
        let table = [
            (3, 3, None),
            (3, 4, None),
            (3, 5, Some(0)),
            (2, 7, None),
            (2, 8, Some(0)),
            (4, 4, Some(0)),
            (5, 5, Some(2)),
            (6, 8, Some(8)),
            (10, 10, Some(23)),
            (20, 20, Some(127)),
        ];
        for (a, b, expected) in table {
            assert_eq!(cut(a, b), expected, "{a} {b}");
            assert_eq!(cut(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn normal_approximation_continues_exact_values() {
        let (exact, normal) = (cut(EXACT, EXACT).unwrap(), cut(EXACT + 1, EXACT).unwrap());
        assert!((10..25).contains(&(normal - exact)), "{exact} {normal}");
    }

    #[test]
    fn ratios_are_sorted() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| random.f64() + 0.1).collect() };
        for (a, b) in [(1, 1), (3, 5), (40, 7)] {
            let (a, b) = (draw(a), draw(b));
            let mut all: Vec<f64> = a
                .iter()
                .flat_map(|a| b.iter().map(move |b| b / a))
                .collect();
            all.sort_by(f64::total_cmp);
            let ratios = Ratios::new(&a, &b);
            assert_eq!(ratios.len(), all.len());
            for (n, ratio) in all.iter().enumerate() {
                assert_eq!(ratios.nth(n), *ratio);
            }
        }
        // There are ten billion pairs, which would not fit into memory.
        let (a, b) = (draw(100_000), draw(100_000));
        let found = ratio(&a, &b).unwrap();
        let (low, high) = found.interval.unwrap();
        assert!(0.98 < low && low < found.estimate && found.estimate < high && high < 1.02);
    }

    #[test]
    fn interval_contains_ratio() {
        let a = [100.0, 101.0, 99.0, 102.0, 98.0];
        let b = a.map(|value| 2.0 * value);
        let found = ratio(&a, &b).unwrap();
        let (low, high) = found.interval.unwrap();
        assert!(
            low < 2.0 && 2.0 < high && low > 1.9 && high < 2.1,
            "{found:?}"
        );
        let inverse = ratio(&b, &a).unwrap();
        assert!((inverse.estimate * found.estimate - 1.0).abs() < 1e-12);
    }

    #[test]
    fn interval_reaches_nominal_coverage() {
        let mut random = fastrand::Rng::with_seed(7);
        // Skewed distribution, similar to latencies.
        let mut draw = |scale: f64| [(); 6].map(|()| scale / (1.0 - 0.9 * random.f64()).sqrt());
        let mut hits = 0;
        for _ in 0..4000 {
            let (a, b) = (draw(50.0), draw(60.0));
            let (low, high) = ratio(&a, &b).unwrap().interval.unwrap();
            hits += u32::from(low <= 1.2 && 1.2 <= high);
        }
        // The exact level for two samples of six is 95.9 %. Both bounds are six standard deviations
        // away from this.
        assert!((3760..3910).contains(&hits), "{hits}");
    }

    #[test]
    fn samples_without_ratios() {
        assert_eq!(ratio(&[], &[1.0]), None);
        assert_eq!(ratio(&[0.0, 1.0], &[1.0]), None);
        assert_eq!(ratio(&[1.0], &[f64::NAN]), None);
        let one = ratio(&[2.0], &[3.0]).unwrap();
        assert_eq!((one.estimate, one.interval), (1.5, None));
    }
}
