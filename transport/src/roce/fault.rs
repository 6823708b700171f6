//! A bad wire: loses, repeats, spoils and reorders packets, by a seed.
//!
//! Packets go in with [`FaultInjector::handle_packet`] and come out of
//! [`FaultInjector::poll_packet`]. A reordered packet is held back until some others have passed
//! it, or until a time is up. With one seed and one sequence of inputs the outputs are the same.
//!
//! Bound: [`FaultConfig::reorder_depth`] packets are held back at most.

use std::collections::VecDeque;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Faults of a wire. Rates are in packets of a million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultConfig {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Packets lost, of a million.
    pub loss: u32,
    /// Packets sent twice, of a million.
    pub duplication: u32,
    /// Packets with some bits flipped, of a million.
    pub corruption: u32,
    /// Packets held back, of a million.
    pub reorder: u32,
    /// By how many later packets a held-back one is overtaken at most.
    pub reorder_depth: u32,
    /// Maximum time that a packet is held back.
    pub reorder_time: Duration,
}

impl Default for FaultConfig {
    fn default() -> Self {
        Self {
            seed: 1,
            loss: 0,
            duplication: 0,
            corruption: 0,
            reorder: 0,
            reorder_depth: 8,
            reorder_time: Duration::from_millis(1),
        }
    }
}

impl FaultConfig {
    /// The same with rates in percent.
    #[must_use]
    pub fn percent(seed: u64, loss: f64, duplication: f64, corruption: f64, reorder: f64) -> Self {
        let rate = |p: f64| (p * 10_000.0).round().clamp(0.0, 1e6) as u32;
        Self {
            seed,
            loss: rate(loss),
            duplication: rate(duplication),
            corruption: rate(corruption),
            reorder: rate(reorder),
            ..Self::default()
        }
    }
}

/// Faults of the wire of a device, by direction. As text they are what `riser --inject` takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoceFaults {
    /// Faults of what we send.
    pub transmit: Option<FaultConfig>,
    /// Faults of what we receive.
    pub receive: Option<FaultConfig>,
}

/// Errors of the text of [`RoceFaults`]. Each names the part that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultsError {
    /// A part without a value.
    #[error("`{0}` is not KEY=VALUE")]
    NoValue(String),
    /// A rate that is none.
    #[error("`{0}` is not a percentage from 0 to 100")]
    Percentage(String),
    /// A seed that is no number of 64 bits.
    #[error("`{0}` is not a number")]
    Seed(String),
    /// A key that does not exist.
    #[error("`{0}` is none of loss, duplication, corruption, reorder, seed")]
    Key(String),
}

impl FromStr for RoceFaults {
    type Err = FaultsError;

    /// Reads `loss=2,reorder=5,seed=7`: rates in percent of the packets sent, and of those received.
    ///
    /// # Errors
    /// Those of [`FaultsError`].
    fn from_str(text: &str) -> Result<Self, FaultsError> {
        let (mut loss, mut duplication, mut corruption, mut reorder) = (0.0, 0.0, 0.0, 0.0);
        let mut seed = 1_u64;
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let no_value = || FaultsError::NoValue(part.to_owned());
            let (key, value) = part.split_once('=').ok_or_else(no_value)?;
            // NaN fails here, too: no range contains it.
            let percent = || match value.trim_end_matches('%').parse::<f64>() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
                _ => Err(FaultsError::Percentage(value.to_owned())),
            };
            match key {
                "loss" => loss = percent()?,
                "dup" | "duplication" => duplication = percent()?,
                "corrupt" | "corruption" => corruption = percent()?,
                "reorder" => reorder = percent()?,
                "seed" => {
                    let none = |_| FaultsError::Seed(value.to_owned());
                    seed = value.parse().map_err(none)?;
                }
                _ => return Err(FaultsError::Key(key.to_owned())),
            }
        }
        let faults = |seed| {
            let config = FaultConfig::percent(seed, loss, duplication, corruption, reorder);
            Some(config)
        };
        // Both ways, as a bad wire is; with different numbers, or both would lose the same packets.
        Ok(Self {
            transmit: faults(seed),
            receive: faults(seed.wrapping_add(1)),
        })
    }
}

/// Counters of a faulty wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Packets that went in.
    pub packets: u64,
    /// Number of lost packets.
    pub lost: u64,
    /// Number of repeated packets.
    pub duplicated: u64,
    /// Number of corrupted packets.
    pub corrupted: u64,
    /// Number of packets that were overtaken.
    pub reordered: u64,
}

#[derive(Debug)]
struct Held<T> {
    release_after: u64,
    release_at: Instant,
    tag: T,
    bytes: Vec<u8>,
}

/// The bad wire. `T` is what travels with a packet: an address, say.
#[derive(Debug)]
pub struct FaultInjector<T> {
    config: FaultConfig,
    random: fastrand::Rng,
    passed: u64,
    held: Vec<Held<T>>,
    ready: VecDeque<(T, Vec<u8>)>,
    counters: FaultCounters,
}

impl<T: Clone> FaultInjector<T> {
    /// A wire with these faults.
    #[must_use]
    pub fn new(config: FaultConfig) -> Self {
        Self {
            config,
            random: fastrand::Rng::with_seed(config.seed),
            passed: 0,
            held: Vec::new(),
            ready: VecDeque::new(),
            counters: FaultCounters::default(),
        }
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.counters
    }

    /// Takes a packet in.
    pub fn handle_packet(&mut self, now: Instant, tag: T, mut bytes: Vec<u8>) {
        self.counters.packets += 1;
        if self.happens(self.config.loss) {
            self.counters.lost += 1;
            return;
        }
        if self.happens(self.config.corruption) && !bytes.is_empty() {
            self.counters.corrupted += 1;
            for _ in 0..=self.random.u64(..3) {
                let bit = self.random.u64(..bytes.len() as u64 * 8);
                bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
            }
        }
        if self.happens(self.config.duplication) {
            self.counters.duplicated += 1;
            self.pass(now, tag.clone(), bytes.clone());
        }
        self.pass(now, tag, bytes);
    }

    /// Draws whether something befalls a packet, for `rate` of a million of them.
    fn happens(&mut self, rate: u32) -> bool {
        rate > 0 && self.random.u32(..1_000_000) < rate
    }

    fn pass(&mut self, now: Instant, tag: T, bytes: Vec<u8>) {
        let depth = u64::from(self.config.reorder_depth);
        // Bounded by the depth, so that a rate of a million does not hold back everything.
        if (self.held.len() as u64) < depth && self.happens(self.config.reorder) {
            self.counters.reordered += 1;
            let by = 1 + self.random.u64(..depth);
            self.held.push(Held {
                release_after: self.passed + by,
                release_at: now + self.config.reorder_time,
                tag,
                bytes,
            });
            return;
        }
        self.passed += 1;
        self.ready.push_back((tag, bytes));
        // Each packet that passes may be the one that a held-back one waited for.
        self.release(|h, passed| h.release_after <= passed);
    }

    fn release(&mut self, due: impl Fn(&Held<T>, u64) -> bool) {
        let mut i = 0;
        while i < self.held.len() {
            if due(&self.held[i], self.passed) {
                let h = self.held.remove(i);
                self.ready.push_back((h.tag, h.bytes));
            } else {
                i += 1;
            }
        }
    }

    /// The next packet that comes out.
    pub fn poll_packet(&mut self, now: Instant) -> Option<(T, Vec<u8>)> {
        // Time releases only where no packets do, which keeps the order a matter of the seed.
        if self.ready.is_empty() {
            self.release(|h, _| h.release_at <= now);
        }
        self.ready.pop_front()
    }

    /// Time at which a held-back packet comes out though no other passes.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.held.iter().map(|h| h.release_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(config: FaultConfig, n: u32) -> (Vec<u32>, FaultCounters) {
        let mut f = FaultInjector::new(config);
        let now = Instant::now();
        let mut out = Vec::new();
        for i in 0..n {
            f.handle_packet(now, i, i.to_be_bytes().to_vec());
            while let Some((tag, _)) = f.poll_packet(now) {
                out.push(tag);
            }
        }
        let later = f.deadline().unwrap_or(now);
        while let Some((tag, _)) = f.poll_packet(later) {
            out.push(tag);
        }
        (out, f.counters())
    }

    #[test]
    fn faults_are_read_by_name() {
        let got: RoceFaults = "loss=2,reorder=1.5%,dup=0,seed=9".parse().unwrap();
        let wanted = FaultConfig {
            seed: 9,
            loss: 20_000,
            reorder: 15_000,
            ..FaultConfig::default()
        };
        assert_eq!(got.transmit, Some(wanted));
        // The other way with another seed.
        assert_eq!(got.receive, Some(FaultConfig { seed: 10, ..wanted }));
        let refused = |text: &str| text.parse::<RoceFaults>().unwrap_err().to_string();
        assert!(refused("loss").contains("KEY=VALUE"));
        assert!(refused("loss=101").contains("101"));
        assert!(refused("loss=NaN").contains("percentage"));
        assert!(refused("delay=1").contains("delay"));
        assert!(refused("seed=-1").contains("not a number"));
    }

    #[test]
    fn a_good_wire_passes_everything_in_order() {
        let (out, _) = run(FaultConfig::default(), 100);
        assert_eq!(out, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn one_seed_gives_one_sequence_and_every_packet_is_accounted_for() {
        let config = FaultConfig::percent(7, 10.0, 5.0, 5.0, 20.0);
        let (a, counters) = run(config, 10_000);
        assert_eq!(run(config, 10_000).0, a);
        let other = FaultConfig { seed: 8, ..config };
        assert_ne!(run(other, 10_000).0, a);
        assert_eq!(
            a.len() as u64,
            counters.packets - counters.lost + counters.duplicated
        );
        for (n, low, high) in [
            (counters.lost, 900, 1100),
            (counters.duplicated, 380, 520),
            (counters.corrupted, 380, 520),
            (counters.reordered, 1500, 2200),
        ] {
            assert!((low..high).contains(&n), "{counters:?}");
        }
    }

    #[test]
    fn a_packet_is_overtaken_by_no_more_than_the_depth() {
        let config = FaultConfig {
            reorder: 300_000,
            reorder_depth: 4,
            ..FaultConfig::default()
        };
        let (out, _) = run(config, 1000);
        for (at, &tag) in out.iter().enumerate() {
            let overtaken_by = out[..at].iter().filter(|&&t| t > tag).count();
            // Those held back at the same time may come out before it as well.
            assert!(overtaken_by <= 8, "{tag} at {at}");
        }
    }
}
