//! Limits of backends and initiators, and how long commands waited for them.

use super::family::Family;
use crate::qos::Limiter;
use crate::server::Server;

/// What is said of one kind of limiters.
struct Families {
    rates: Family,
    waits: Family,
    time: Family,
}

impl Families {
    fn add(&mut self, labels: &[(&str, &str)], limiter: &Limiter) {
        for (name, rate) in limiter.limits().named() {
            if let Some(rate) = rate {
                let mut labels = labels.to_vec();
                labels.push(("rate", name));
                self.rates.add(&labels, rate as f64);
            }
        }
        let waits = limiter.waits();
        if limiter.is_active() || waits.commands > 0 {
            self.waits.add(labels, waits.commands as f64);
            self.time.add(labels, waits.time.as_secs_f64());
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
            "A limit of a backend: commands or bytes a second.",
        ),
        waits: Family::counter(
            "riser_backend_limit_waits_total",
            "Commands that waited for a backend's limits.",
        ),
        time: Family::counter(
            "riser_backend_limit_wait_seconds_total",
            "How long they waited, in seconds.",
        ),
    };
    for (name, unit) in server.units() {
        backends.add(&[("backend", name)], &unit.limits);
    }
    let mut initiators = Families {
        rates: Family::gauge(
            "riser_initiator_limit",
            "A limit of an initiator at a target, while it has a session: commands or bytes a second.",
        ),
        waits: Family::counter(
            "riser_initiator_limit_waits_total",
            "Commands that waited for an initiator's limits.",
        ),
        time: Family::counter(
            "riser_initiator_limit_wait_seconds_total",
            "How long they waited, in seconds.",
        ),
    };
    for target in &server.shared().registry.catalog().targets {
        for (name, limiter) in target.initiators.used() {
            let labels = [
                ("target", target.config.name.as_str()),
                ("initiator", &name),
            ];
            initiators.add(&labels, &limiter);
        }
    }
    backends.all().into_iter().chain(initiators.all()).collect()
}
