//! Axes: convert values to positions, and select values for ticks.

/// Maximum number of ticks on an axis.
const TICKS: f64 = 6.0;

/// Conversion from a value to its position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    /// The distance is the difference between values.
    Linear,
    /// The distance is the ratio of values.
    Log,
}

/// A scale with lower and upper bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Range {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Range {
    /// Returns a range from 0 to a round number that includes all values.
    pub(super) fn from_zero(values: impl Iterator<Item = f64>) -> Self {
        let high = values.filter(|v| v.is_finite()).fold(0.0, f64::max);
        let high = if high > 0.0 { high } else { 1.0 };
        let step = step(high);
        Self {
            scale: Scale::Linear,
            low: 0.0,
            high: (high / step).ceil() * step,
        }
    }

    /// Returns a range with these bounds.
    pub(super) fn exact(low: f64, high: f64) -> Self {
        Self {
            scale: Scale::Linear,
            low,
            high: if high > low { high } else { low + 1.0 },
        }
    }

    /// Returns a logarithmic range that includes all positive values. Both bounds are 1, 2 or 5
    /// times a power of ten.
    pub(super) fn ratios(values: impl Iterator<Item = f64>) -> Self {
        let positive = values.filter(|v| v.is_finite() && *v > 0.0);
        let (low, high) = positive.fold((f64::INFINITY, 0.0), |(low, high), v| {
            (f64::min(low, v), f64::max(high, v))
        });
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, 10.0) };
        let (low, mut high) = (round_down(low), round_up(high));
        // Make sure the range isn't empty if there is only one value.
        if high < 4.0 * low {
            high = round_up(4.0 * low);
        }
        Self {
            scale: Scale::Log,
            low,
            high,
        }
    }

    /// Returns the position of a value, from 0 for the lower bound to 1 for the upper bound. Values
    /// outside of the range are clamped.
    pub(super) fn place(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        };
        if place.is_finite() {
            place.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// Returns the values for ticks.
    pub(super) fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.high - self.low);
                let first = (self.low / step).ceil() as i64;
                let last = (self.high / step * (1.0 + 1e-9)).floor() as i64;
                (first..=last).map(|i| i as f64 * step).collect()
            }
            Scale::Log => self.ratio_ticks(),
        }
    }

    fn ratio_ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        // With few decades, there are ticks between powers of ten. With many decades, some powers
        // are skipped.
        let factors: &[f64] = if decades <= 2.05 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        let every = (decades / TICKS).ceil().max(1.0) as i32;
        let (first, last) = (exponent(self.low), exponent(self.high));
        let inside = |v: &f64| *v >= self.low * 0.999 && *v <= self.high * 1.001;
        (first..=last)
            .filter(|power| power % every == 0)
            .flat_map(|power| factors.iter().map(move |f| f * 10_f64.powi(power)))
            .filter(inside)
            .collect()
    }
}

/// Returns the distance between ticks: 1, 2 or 5 times a power of ten.
fn step(extent: f64) -> f64 {
    round_up(extent / TICKS)
}

fn exponent(value: f64) -> i32 {
    // The logarithm of a power of ten may be slightly less than an integer.
    (value.log10() + 1e-9).floor() as i32
}

fn round_up(value: f64) -> f64 {
    let power = 10_f64.powi(exponent(value));
    let steps = [1.0, 2.0, 5.0, 10.0];
    let fits = steps
        .iter()
        .find(|step| *step * power >= value * (1.0 - 1e-9));
    fits.unwrap_or(&10.0) * power
}

fn round_down(value: f64) -> f64 {
    let power = 10_f64.powi(exponent(value));
    let steps = [5.0, 2.0, 1.0];
    let fits = steps
        .iter()
        .find(|step| *step * power <= value * (1.0 + 1e-9));
    fits.unwrap_or(&1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_from_zero_ends_at_tick() {
        let range = Range::from_zero([3.0, 870.0].into_iter());
        assert_eq!(range.ticks(), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(
            (range.place(0.0), range.place(500.0), range.place(2000.0)),
            (0.0, 0.5, 1.0)
        );
        assert!(Range::from_zero([0.0].into_iter()).ticks().len() > 2);
    }

    #[test]
    fn ratios_have_equal_distances() {
        let range = Range::ratios([15_000.0, 1_300_000.0, 0.0].into_iter());
        assert_eq!(range.place(10_000.0), 0.0);
        let step = range.place(200_000.0) - range.place(100_000.0);
        let other = range.place(40_000.0) - range.place(20_000.0);
        assert!((step - other).abs() < 1e-12);
        let ticks = range.ticks();
        assert_eq!(ticks, [1e4, 1e5, 1e6]);
        let near = Range::ratios([15_000.0, 90_000.0].into_iter()).ticks();
        assert_eq!(near, [10_000.0, 20_000.0, 50_000.0, 100_000.0]);
    }

    #[test]
    fn single_value_has_nonempty_range() {
        for value in [1.0, 77.0, 1e-3, 1e12] {
            let range = Range::ratios([value].into_iter());
            assert!(range.ticks().len() >= 2, "{value}: {:?}", range.ticks());
            assert!(range.place(value).is_finite());
        }
        assert!(Range::ratios(std::iter::empty()).ticks().len() >= 2);
    }

    #[test]
    fn many_decades_have_few_ticks() {
        let ticks = Range::ratios([1.0, 1e12].into_iter()).ticks();
        assert!((3..=7).contains(&ticks.len()), "{ticks:?}");
    }
}
