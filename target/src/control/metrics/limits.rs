//! Rate limits of backends and initiators, and the time that commands were delayed by them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::family::Family;
use crate::qos::Limiter;
use crate::server::Server;

/// Metrics for one type of limiter.
struct Families {
    rates: Family,
    waits: Family,
    time: Family,
}

impl Families {
    /// Adds the sum of several limiters which are used by the same sessions or units with different
    /// rules.
    fn add(&mut self, labels: &[(&str, &str)], limiters: &[&Limiter]) {
        let mut rates = BTreeMap::new();
        let (mut commands, mut time) = (0, Duration::ZERO);
        for limiter in limiters {
            for (name, rate) in limiter.limits().named() {
                if let Some(rate) = rate {
                    *rates.entry(name).or_default() += rate as f64;
                }
            }
            let waits = limiter.waits();
            commands += waits.commands;
            time += waits.time;
        }
        if commands > 0 || !rates.is_empty() {
            self.waits.add(labels, commands as f64);
            self.time.add(labels, time.as_secs_f64());
        }
        for (name, rate) in rates {
            let mut labels = labels.to_vec();
            labels.push(("rate", name));
            self.rates.add(&labels, rate);
        }
    }

    fn all(self) -> [Family; 3] {
        [self.rates, self.waits, self.time]
    }
}

pub(super) fn families(server: &Server) -> Vec<Family> {
    let mut backends = Families {
        rates: Family::gauge(
            "riser_backend_limit",
            "Rate limit of a backend, in commands or bytes per second.",
        ),
        waits: Family::counter(
            "riser_backend_limit_waits_total",
            "Commands that waited for a backend's limits.",
        ),
        time: Family::counter(
            "riser_backend_limit_wait_seconds_total",
            "Time that commands waited for a backend's limits, in seconds.",
        ),
    };
    for (name, unit) in server.units() {
        backends.add(&[("backend", name)], &[&unit.limits]);
    }
    let mut initiators = Families {
        rates: Family::gauge(
            "riser_initiator_limit",
            "Rate limit of an initiator at a target, while it has a session, in commands or bytes per \
             second.",
        ),
        waits: Family::counter(
            "riser_initiator_limit_waits_total",
            "Commands that waited for an initiator's limits.",
        ),
        time: Family::counter(
            "riser_initiator_limit_wait_seconds_total",
            "Time that commands waited for an initiator's limits, in seconds.",
        ),
    };
    for target in &server.shared().registry.catalog().targets {
        // Several rules can limit the same initiator of a target, but Prometheus rejects a scrape
        // with duplicate label sets.
        for same in target.initiators.used().chunk_by(|a, b| a.0 == b.0) {
            let labels = [
                ("target", target.config.name.as_str()),
                ("initiator", &same[0].0),
            ];
            let limiters: Vec<&Limiter> = same.iter().map(|(_, limiter)| &**limiter).collect();
            initiators.add(&labels, &limiters);
        }
    }
    backends.all().into_iter().chain(initiators.all()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::IoLimits;

    /// If there is a duplicate series, Prometheus will reject the whole response.
    #[test]
    fn initiator_with_two_rules_has_single_series() {
        let limiter = |iops| {
            Limiter::new(&IoLimits {
                iops: Some(iops),
                ..IoLimits::default()
            })
        };
        let mut families = Families {
            rates: Family::gauge("rate", "A rate."),
            waits: Family::counter("waits", "Waits."),
            time: Family::counter("time", "Time."),
        };
        let limiters = [limiter(3), limiter(4)];
        for limiter in &limiters {
            limiter.count(Duration::from_secs(2));
        }
        families.add(&[("initiator", "a")], &limiters.each_ref());
        let values = families.all().map(|family| {
            let family = family.finish().unwrap();
            let [metric] = family.get_metric() else {
                panic!("{family:?}");
            };
            metric.get_gauge().get_value() + metric.get_counter().get_value()
        });
        assert_eq!(values, [7.0, 2.0, 4.0]);
    }
}
