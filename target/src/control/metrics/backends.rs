//! Backends: their size, room and failures.

use super::family::Family;
use crate::server::Server;

pub(super) fn families(server: &Server) -> Vec<Family> {
    let mut size = Family::gauge(
        "riser_backend_size_bytes",
        "What a backend offers, in bytes.",
    );
    let mut allocated = Family::gauge(
        "riser_backend_allocated_bytes",
        "What a backend's file has been allocated, in bytes; less than its size while it is sparse.",
    );
    let mut free = Family::gauge(
        "riser_backend_free_bytes",
        "What the file system of a backend's file has free, in bytes; several files may share it.",
    );
    let mut errors = Family::counter(
        "riser_backend_errors_total",
        "Operations that a backend's medium failed, by kind.",
    );
    for (name, store) in server.backends() {
        let labels = [("backend", name)];
        size.add(&labels, store.capacity() as f64);
        if let Some(space) = store.space() {
            allocated.add(&labels, space.allocated as f64);
            free.add(&labels, space.free as f64);
        }
        for (kind, n) in store.errors() {
            errors.add(&[("backend", name), ("kind", kind)], n as f64);
        }
    }
    vec![size, allocated, free, errors]
}
