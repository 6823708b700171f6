//! Fault injection: drops, duplicates, corrupts and reorders packets based on a seed.
//!
//! Packets are passed to [`FaultInjector::handle_packet`] and returned by
//! [`FaultInjector::poll_packet`]. A reordered packet is delayed until some later packets have been
//! returned, or until a timeout. The output is deterministic for a given seed and input.
//!
//! Bound: up to [`FaultConfig::reorder_depth`] packets are delayed at a time.

use std::collections::VecDeque;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Fault configuration. All rates are per million packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultConfig {
    /// Seed for the random number generator.
    pub seed: u64,
    /// Rate of dropped packets, per million.
    pub loss: u32,
    /// Rate of duplicated packets, per million.
    pub duplication: u32,
    /// Rate of packets with bit errors, per million.
    pub corruption: u32,
    /// Rate of delayed packets, per million.
    pub reorder: u32,
    /// Maximum number of later packets that can overtake a delayed packet.
    pub reorder_depth: u32,
    /// Maximum delay of a packet.
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
    /// Creates a configuration from rates in percent.
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

/// Faults for each direction. The text format is used by `riser --inject`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoceFaults {
    /// Faults for sent packets.
    pub transmit: Option<FaultConfig>,
    /// Faults for received packets.
    pub receive: Option<FaultConfig>,
}

/// Error when parsing [`RoceFaults`]. Each error contains the invalid part of the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultsError {
    /// Missing value.
    #[error("`{0}` is not KEY=VALUE")]
    NoValue(String),
    /// Invalid percentage.
    #[error("`{0}` is not a percentage from 0 to 100")]
    Percentage(String),
    /// The seed is not a valid 64-bit number.
    #[error("`{0}` is not a number")]
    Seed(String),
    /// Unknown key.
    #[error("`{0}` is not one of loss, duplication, corruption, reorder, seed")]
    Key(String),
}

impl FromStr for RoceFaults {
    type Err = FaultsError;

    /// Parses text like `loss=2,reorder=5,seed=7`. The rates are given in percent, and used for
    /// both sent and received packets.
    ///
    /// # Errors
    /// See [`FaultsError`].
    fn from_str(text: &str) -> Result<Self, FaultsError> {
        let (mut loss, mut duplication, mut corruption, mut reorder) = (0.0, 0.0, 0.0, 0.0);
        let mut seed = 1_u64;
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let no_value = || FaultsError::NoValue(part.to_owned());
            let (key, value) = part.split_once('=').ok_or_else(no_value)?;
            // This also rejects NaN, since it is not in any range.
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
        // Use these faults in both directions, but with different seeds, since otherwise the same
        // packets would be lost in both.
        Ok(Self {
            transmit: faults(seed),
            receive: faults(seed.wrapping_add(1)),
        })
    }
}

/// Fault injection counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Packets passed in.
    pub packets: u64,
    /// Lost packets.
    pub lost: u64,
    /// Duplicated packets.
    pub duplicated: u64,
    /// Corrupted packets.
    pub corrupted: u64,
    /// Packets that have been overtaken.
    pub reordered: u64,
}

#[derive(Debug)]
struct DelayedPacket<T> {
    release_after: u64,
    release_at: Instant,
    tag: T,
    bytes: Vec<u8>,
}

/// Injects faults into a stream of packets. `T` is additional data for each packet, e.g. an
/// address.
#[derive(Debug)]
pub struct FaultInjector<T> {
    config: FaultConfig,
    random: fastrand::Rng,
    passed: u64,
    held: Vec<DelayedPacket<T>>,
    ready: VecDeque<(T, Vec<u8>)>,
    counters: FaultCounters,
}

impl<T: Clone> FaultInjector<T> {
    /// Creates a fault injector.
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

    /// Returns the counters since the injector was created.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.counters
    }

    /// Passes a packet to the injector.
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

    /// Randomly decides whether a fault with this rate (per million) should occur.
    fn happens(&mut self, rate: u32) -> bool {
        rate > 0 && self.random.u32(..1_000_000) < rate
    }

    fn pass(&mut self, now: Instant, tag: T, bytes: Vec<u8>) {
        let depth = u64::from(self.config.reorder_depth);
        // Limit this to the configured depth, so we don't delay all packets if the rate is one
        // million.
        if (self.held.len() as u64) < depth && self.happens(self.config.reorder) {
            self.counters.reordered += 1;
            let by = 1 + self.random.u64(..depth);
            self.held.push(DelayedPacket {
                release_after: self.passed + by,
                release_at: now + self.config.reorder_time,
                tag,
                bytes,
            });
            return;
        }
        self.passed += 1;
        self.ready.push_back((tag, bytes));
        // Each packet passed in may release delayed packets.
        self.release(|h, passed| h.release_after <= passed);
    }

    fn release(&mut self, due: impl Fn(&DelayedPacket<T>, u64) -> bool) {
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

    /// Returns the next packet.
    pub fn poll_packet(&mut self, now: Instant) -> Option<(T, Vec<u8>)> {
        // We only release packets based on time if no other packets are ready, so that the order
        // only depends on the seed.
        if self.ready.is_empty() {
            self.release(|h, _| h.release_at <= now);
        }
        self.ready.pop_front()
    }

    /// Returns when a delayed packet will be released even if it isn't overtaken.
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
    fn faults_are_parsed() {
        let got: RoceFaults = "loss=2,reorder=1.5%,dup=0,seed=9".parse().unwrap();
        let wanted = FaultConfig {
            seed: 9,
            loss: 20_000,
            reorder: 15_000,
            ..FaultConfig::default()
        };
        assert_eq!(got.transmit, Some(wanted));
        // The other direction uses a different seed.
        assert_eq!(got.receive, Some(FaultConfig { seed: 10, ..wanted }));
        let refused = |text: &str| text.parse::<RoceFaults>().unwrap_err().to_string();
        assert!(refused("loss").contains("KEY=VALUE"));
        assert!(refused("loss=101").contains("101"));
        assert!(refused("loss=NaN").contains("percentage"));
        assert!(refused("delay=1").contains("delay"));
        assert!(refused("seed=-1").contains("not a number"));
    }

    #[test]
    fn good_wire_preserves_order() {
        let (out, _) = run(FaultConfig::default(), 100);
        assert_eq!(out, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn seed_determines_faults() {
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
    fn reordering_is_bounded_by_depth() {
        let config = FaultConfig {
            reorder: 300_000,
            reorder_depth: 4,
            ..FaultConfig::default()
        };
        let (out, _) = run(config, 1000);
        for (at, &tag) in out.iter().enumerate() {
            let overtaken_by = out[..at].iter().filter(|&&t| t > tag).count();
            // Packets delayed at the same time can also be returned before it.
            assert!(overtaken_by <= 8, "{tag} at {at}");
        }
    }
}
