//! Zipf distribution using rejection-inversion (W. Hörmann and G. Derflinger, 1996). This doesn't
//! need a table, and the cost per sample is independent of the number of ranks.

use fastrand::Rng;

/// Ranks from 1 to `n`. The probability of rank `k` is proportional to `k^-theta`.
pub(super) struct Zipf {
    n: f64,
    theta: f64,
    /// Integral at 1.5, minus the density of rank 1.
    low: f64,
    /// Integral at `n + 0.5`.
    high: f64,
    /// Maximum distance from a rank for which a sample is accepted immediately.
    near: f64,
}

impl Zipf {
    pub(super) fn new(n: u64, theta: f64) -> Self {
        let n = n as f64;
        Self {
            n,
            theta,
            low: integral(1.5, theta) - 1.0,
            high: integral(n + 0.5, theta),
            near: 2.0 - inverse(integral(2.5, theta) - density(2.0, theta), theta),
        }
    }

    pub(super) fn sample(&self, random: &mut Rng) -> u64 {
        loop {
            let u = self.high + random.f64() * (self.low - self.high);
            let x = inverse(u, self.theta);
            let k = x.round().clamp(1.0, self.n);
            if k - x <= self.near || u >= integral(k + 0.5, self.theta) - density(k, self.theta) {
                return k as u64;
            }
        }
    }
}

fn density(x: f64, theta: f64) -> f64 {
    (-theta * x.ln()).exp()
}

/// Returns `(x^(1-theta) - 1) / (1-theta)`, or the logarithm of `x` if `theta` is 1.
fn integral(x: f64, theta: f64) -> f64 {
    let log = x.ln();
    let power = (1.0 - theta) * log;
    match power.abs() > 1e-8 {
        true => power.exp_m1() / (1.0 - theta),
        false => log * (1.0 + power / 2.0),
    }
}

fn inverse(y: f64, theta: f64) -> f64 {
    // Due to rounding, this may be slightly outside of the domain of the logarithm.
    let scaled = (y * (1.0 - theta)).max(-1.0);
    match scaled.abs() > 1e-8 {
        true => (scaled.ln_1p() / (1.0 - theta)).exp(),
        false => (y * (1.0 - scaled / 2.0)).exp(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_match_defined_probabilities() {
        const SAMPLES: u32 = 200_000;
        for theta in [0.5, 0.99, 1.0, 1.2, 2.5] {
            let zipf = Zipf::new(1000, theta);
            let mut random = Rng::with_seed(11);
            let mut counts = [0_u32; 1001];
            for _ in 0..SAMPLES {
                counts[zipf.sample(&mut random) as usize] += 1;
            }
            assert_eq!(counts[0], 0);
            let sum: f64 = (1..=1000).map(|k| f64::from(k).powf(-theta)).sum();
            for rank in [1, 2, 3, 10, 100] {
                let expected = f64::from(SAMPLES) * f64::from(rank).powf(-theta) / sum;
                let found = f64::from(counts[rank as usize]);
                // Five standard deviations.
                let distance = (found - expected).abs();
                assert!(
                    distance <= 5.0 * expected.sqrt() + 1.0,
                    "{theta} {rank}: {found}, {expected}"
                );
            }
        }
    }

    #[test]
    fn zipf_supports_few_and_many_blocks() {
        let mut random = Rng::with_seed(1);
        let one = Zipf::new(1, 1.2);
        assert!((0..100).all(|_| one.sample(&mut random) == 1));
        let many = Zipf::new(1 << 40, 1.2);
        assert!((0..1000).all(|_| (1..=1 << 40).contains(&many.sample(&mut random))));
    }
}
