//! Backend metrics: size, free space and errors.

use std::collections::BTreeSet;

use super::family::Family;
use crate::server::Server;
use crate::server::problems::Subject;

pub(super) fn families(server: &Server) -> Vec<Family> {
    let mut size = Family::gauge("riser_backend_size_bytes", "Size of a backend, in bytes.");
    let mut allocated = Family::gauge(
        "riser_backend_allocated_bytes",
        "Space allocated to a backend's file, in bytes; less than its size while it is sparse.",
    );
    let mut free = Family::gauge(
        "riser_backend_free_bytes",
        "Free space in the file system of a backend's file, in bytes; several files may share it.",
    );
    let mut errors = Family::counter(
        "riser_backend_errors_total",
        "Failed operations of a backend's medium, by kind.",
    );
    let mut failing = Family::gauge(
        "riser_backend_failing",
        "1 while a backend cannot be opened or needs an operator, else 0; riser_backend_fault has the cause.",
    );
    let mut filling = Family::gauge(
        "riser_backend_threshold_reached",
        "1 if a backend's file has reached its threshold, at which initiators are warned, else 0; \
         not reported for backends without a threshold.",
    );
    let mut fault = Family::gauge(
        "riser_backend_fault",
        "1 for each cause for which an open backend needs an operator.",
    );
    let problems = server.problems();
    for (name, store) in server.backends() {
        let labels = [("backend", name)];
        let is_failing = problems.has(&Subject::Backend(name.to_owned()));
        failing.add(&labels, f64::from(u8::from(is_failing)));
        // A backend that is not open does not have a size.
        if store.is_absent() {
            continue;
        }
        size.add(&labels, store.capacity() as f64);
        let causes: BTreeSet<_> = server.causes(name, store).iter().map(|c| c.cause).collect();
        for cause in causes {
            fault.add(&[("backend", name), ("cause", cause.label())], 1.0);
        }
        if let Some(space) = store.space() {
            allocated.add(&labels, space.allocated as f64);
            free.add(&labels, space.free as f64);
        }
        // Without a threshold, we don't export this metric: a 0 would mean that there is enough
        // space, but it was not measured.
        if let Some(unit) = server.unit_on(name)
            && unit.lu.threshold().is_some()
        {
            filling.add(&labels, f64::from(u8::from(unit.lu.is_filling())));
        }
        for (kind, n) in store.errors() {
            errors.add(&[("backend", name), ("kind", kind)], n as f64);
        }
    }
    vec![size, allocated, free, filling, failing, fault, errors]
}
