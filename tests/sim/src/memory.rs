//! Memory limit of the target: a base amount, plus the amount announced by its sessions.

use riser_testkit::alloc::Attributed;
use riser_transport::loopback::Fabric;

use crate::plan::{Fault, Plan};
use crate::target::{Target, rdma_address};

#[global_allocator]
static HEAP: Attributed = Attributed;

/// Bytes used by a worker without connections.
const OF_WORKER: usize = 384 << 10;

/// Bytes used by a connection without its contexts: queue pair, session, send queue and data in
/// flight.
const OF_CONNECTION: usize = 256 << 10;

/// Bytes used by an RDMA device without connections: 1.5 MiB when it is opened, and its tables that
/// have grown with earlier connections.
const OF_DEVICE: usize = 1640 << 10;

/// Bytes that remain allocated after a connection, because tables of the worker have grown.
const OF_PLACE: usize = 4 << 10;

/// Bytes that remain allocated after a queued command, for the same tables.
const OF_COMMAND: usize = 2 << 10;

/// Bytes used by a disk with protection information: four bitmaps of its write-intent log, and a
/// bitmap page that is written.
const OF_PROTECTED_DISK: usize = 4 * (60 << 10) + 4096;

/// Growth after which we calculate the limit, because this is slow.
const GROWTH: usize = 64 << 10;

/// Number of steps after which we calculate the limit in any case.
const STEPS: u64 = 4096;

/// Measures the memory allocated by workers since the start of a run. This excludes devices that
/// were opened at the start, but includes devices that are opened again later.
#[derive(Debug)]
pub struct Meter {
    before: isize,
    /// Bytes for devices that are opened again.
    of_devices: usize,
    of_disk: usize,
    /// Bytes that remain allocated after a flood of connections and deep queues.
    of_flood: usize,
    /// Bytes in use at the last check.
    seen: usize,
    /// Largest number of connections at a check.
    peak: usize,
    /// Number of target addresses.
    paths: usize,
}

impl Meter {
    /// Creates a meter that starts now.
    #[must_use]
    pub fn begin(plan: &Plan) -> Self {
        let mut faults = plan.troubles.iter().map(|trouble| trouble.fault);
        let of_devices = match faults.any(Fault::unplugs_target) {
            true => OF_DEVICE * plan.workers * plan.paths,
            false => 0,
        };
        let commands = plan.hogs.iter().map(|hog| hog.depth);
        Self {
            before: Attributed::in_use(),
            of_devices,
            of_disk: match plan.protection {
                0 => 0,
                _ => OF_PROTECTED_DISK,
            },
            of_flood: OF_PLACE * plan.flood as usize + OF_COMMAND * commands.sum::<usize>(),
            seen: 0,
            peak: 0,
            paths: plan.paths,
        }
    }

    /// Checks the memory usage from time to time. Returns an error message if it exceeds the limit.
    #[must_use]
    pub fn check_usage(&mut self, target: &Target, fabric: &Fabric, steps: u64) -> Option<String> {
        let used = (Attributed::in_use() - self.before).max(0) as usize;
        if used < self.seen + GROWTH && !steps.is_multiple_of(STEPS) {
            return None;
        }
        self.seen = used;
        let announced = target.announced();
        self.peak = self.peak.max(announced.connections);
        let base = OF_WORKER * target.workers() + OF_CONNECTION * announced.connections;
        let base = base + OF_PLACE * self.peak;
        let most = base + announced.bytes + self.of_devices + self.of_disk + self.of_flood;
        if used <= most {
            return None;
        }
        // Packets on a slow wire do not belong to the target any more.
        let is_its = |addr| (0..self.paths).any(|path| rdma_address(path) == addr);
        let used = used.saturating_sub(fabric.bytes_from(is_its));
        (used > most).then(|| {
            format!(
                "the target has {used} bytes, more than the {most} of its {} connections",
                announced.connections
            )
        })
    }
}

/// Runs the code of a worker, so that its allocations are attributed to the target.
pub fn of_target<T>(run: impl FnOnce() -> T) -> T {
    Attributed::part(run)
}
