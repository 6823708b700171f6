//! Calculates medians and ratios of rounds, and checks if they are significant.

/// Median and range of a set of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Summary {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Summary {
    /// Returns the summary, or `None` if there are no values.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values);
        Some(Self {
            median: middle(&sorted)?,
            min: *sorted.first()?,
            max: *sorted.last()?,
        })
    }
}

/// Interval that contains the true median with a confidence of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interval {
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Confidence level used for [`Interval`].
const CONFIDENCE: f64 = 0.95;

impl Interval {
    /// Calculates the interval using only the order of values, so that it's valid for noise with
    /// any distribution: the number of values below the true median has a binomial distribution
    /// with p = 1/2. With fewer than six values we can't reach this confidence, so the interval is
    /// the full range.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values);
        let n = sorted.len();
        // Probabilities that the number of values below the true median is equal to `rank`, and
        // less than `rank`.
        let (mut exactly, mut fewer) = (0.5_f64.powi(i32::try_from(n).ok()?), 0.0);
        let mut rank = 0;
        // Find the maximum rank, counted from both sides, where the values still include the median
        // with this confidence.
        while rank < n / 2 {
            fewer += exactly;
            if 1.0 - 2.0 * fewer < CONFIDENCE {
                break;
            }
            exactly *= (n - rank) as f64 / (rank + 1) as f64;
            rank += 1;
        }
        let outside = rank.saturating_sub(1);
        Some(Self {
            low: *sorted.get(outside)?,
            high: *sorted.get(n.checked_sub(1 + outside)?)?,
        })
    }
}

/// Returns the ratio of values from the same round. Each value is passed with its round; if one
/// side has no value for a round, the round is ignored.
pub(super) fn ratios(ours: &[(usize, f64)], theirs: &[(usize, f64)]) -> Vec<f64> {
    let baseline = |round| theirs.iter().find(|(other, _)| *other == round);
    ours.iter()
        .filter_map(|(round, value)| Some(value / baseline(*round)?.1))
        .collect()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns the median of sorted values. For an even number of values, this is the mean of the
/// middle two.
fn middle(sorted: &[f64]) -> Option<f64> {
    let n = sorted.len();
    let upper = *sorted.get(n / 2)?;
    if n % 2 == 1 {
        return Some(upper);
    }
    Some((sorted[n / 2 - 1] + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_handles_odd_and_even_counts() {
        let of = |values: &[f64]| Summary::of(values).map(|s| (s.min, s.median, s.max));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]), Some((3.0, 3.0, 3.0)));
        assert_eq!(of(&[9.0, 1.0, 2.0]), Some((1.0, 2.0, 9.0)));
        assert_eq!(of(&[9.0, 1.0, 2.0, 4.0]), Some((1.0, 3.0, 9.0)));
    }

    #[test]
    fn interval_matches_sign_test() {
        // Sign test tables (5 %, two-sided): with 5 values there is no such interval, 6 to 8 need
        // the full range, 9 to 11 can drop one on each side, and 12 to 14 can drop two.
        for (n, left_out) in [
            (1, 0),
            (5, 0),
            (6, 0),
            (8, 0),
            (9, 1),
            (11, 1),
            (12, 2),
            (14, 2),
        ] {
            let values: Vec<_> = (0..n).rev().map(f64::from).collect();
            let interval = Interval::of(&values).unwrap();
            let expected = Interval {
                low: f64::from(left_out),
                high: f64::from(n - 1 - left_out),
            };
            assert_eq!(interval, expected, "{n} values");
        }
        assert_eq!(Interval::of(&[]), None);
    }

    #[test]
    fn ratios_use_same_round() {
        let ours = [(1, 10.0), (2, 30.0), (4, 5.0)];
        let theirs = [(2, 10.0), (1, 5.0), (3, 1.0)];
        assert_eq!(ratios(&ours, &theirs), [2.0, 3.0]);
        assert_eq!(ratios(&ours, &[]), [0.0; 0]);
    }
}
