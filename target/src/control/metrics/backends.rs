//! Backend metrics: size, free space and errors.

use super::family::Family;
use crate::control::view::Inventory;

pub(super) fn families(inventory: &Inventory<'_>) -> Vec<Family> {
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
    for backend in inventory.backends() {
        let name = &*backend.name;
        let labels = [("backend", name)];
        failing.add(&labels, f64::from(u8::from(backend.error.is_some())));
        // A backend that is not open does not have a size.
        let Some(bytes) = backend.size else {
            continue;
        };
        size.add(&labels, bytes as f64);
        for cause in &backend.causes {
            fault.add(&[("backend", name), ("cause", cause)], 1.0);
        }
        for (family, bytes) in [
            (&mut allocated, backend.allocated),
            (&mut free, backend.free),
        ] {
            if let Some(bytes) = bytes {
                family.add(&labels, bytes as f64);
            }
        }
        // Without a threshold, we don't export this metric: a 0 would mean that there is enough
        // space, but it was not measured.
        if backend.threshold.is_some() {
            filling.add(&labels, f64::from(u8::from(backend.is_filling)));
        }
        for (kind, n) in &backend.errors {
            errors.add(&[("backend", name), ("kind", kind)], *n as f64);
        }
    }
    let mut all = vec![size, allocated, free, filling, failing, fault, errors];
    all.extend(scrubs(inventory));
    all
}

/// Returns the metrics of the last scrub of each backend.
fn scrubs(inventory: &Inventory<'_>) -> [Family; 5] {
    let mut running = Family::gauge("riser_scrub_running", "1 while a scrub is running, else 0.");
    let mut blocks = Family::gauge(
        "riser_scrub_blocks",
        "Number of blocks to verify in the current or last scrub.",
    );
    let mut checked = Family::gauge(
        "riser_scrub_checked_blocks",
        "Number of blocks that were verified in the current or last scrub.",
    );
    let mut defects = Family::gauge(
        "riser_scrub_defective_blocks",
        "Number of blocks in the current or last scrub that do not match their protection \
         information, by field, or cannot be read.",
    );
    let mut completed = Family::gauge(
        "riser_scrub_last_completion_timestamp_seconds",
        "Time when the last scrub has verified all blocks, in seconds since 1970; not reported if \
         there was none since the start.",
    );
    for scrub in inventory.server.scrubs() {
        let name = &*scrub.backend;
        let labels = [("backend", name)];
        running.add(&labels, f64::from(u8::from(scrub.ended.is_none())));
        blocks.add(&labels, scrub.blocks as f64);
        checked.add(&labels, scrub.checked as f64);
        for (defect, n) in &scrub.defects {
            defects.add(&[("backend", name), ("defect", defect)], *n as f64);
        }
        if let Some(at) = scrub.completed {
            completed.add(&labels, at as f64);
        }
    }
    [running, blocks, checked, defects, completed]
}
