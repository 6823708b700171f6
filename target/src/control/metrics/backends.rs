//! Backends: their size, room and failures.

use std::time::{Instant, SystemTime};

use super::family::Family;
use crate::server::Server;

pub(super) fn families(server: &Server) -> Vec<Family> {
    let mut size = Family::gauge("riser_backend_size_bytes", "Size of a backend, in bytes.");
    let mut allocated = Family::gauge(
        "riser_backend_allocated_bytes",
        "Room allocated to a backend's file, in bytes; less than its size while it is sparse.",
    );
    let mut free = Family::gauge(
        "riser_backend_free_bytes",
        "Free room in the file system of a backend's file, in bytes; several files may share it.",
    );
    let mut errors = Family::counter(
        "riser_backend_errors_total",
        "Operations that a backend's medium failed, by kind.",
    );
    let mut failing = Family::gauge(
        "riser_backend_failing",
        "1 while a backend that is open fails operations, else 0.",
    );
    let mut filling = Family::gauge(
        "riser_backend_threshold_reached",
        "1 if a backend's file has reached its threshold, at which initiators are warned, else 0; a backend without a \
         threshold has no series.",
    );
    let (now, date) = (Instant::now(), SystemTime::now());
    for (name, store) in server.backends() {
        let labels = [("backend", name)];
        size.add(&labels, store.capacity() as f64);
        if let Some(space) = store.space() {
            allocated.add(&labels, space.allocated as f64);
            free.add(&labels, space.free as f64);
        }
        // Without a threshold there is no series: a 0 would say that there is room, which was not
        // measured.
        if let Some(unit) = server.unit_on(name)
            && unit.lu.threshold().is_some()
        {
            filling.add(&labels, f64::from(u8::from(unit.lu.is_filling())));
        }
        failing.add(
            &labels,
            f64::from(u8::from(store.failing(now, date).is_some())),
        );
        for (kind, n) in store.errors() {
            errors.add(&[("backend", name), ("kind", kind)], n as f64);
        }
    }
    vec![size, allocated, free, filling, failing, errors]
}
