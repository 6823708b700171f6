//! Memory of the target: it must not exceed what its sessions announce, and what it has without any.

use riser_testkit::alloc::Attributed;
use riser_transport::loopback::Fabric;

use crate::plan::{Fault, Plan};
use crate::target::{Target, rdma_address};

#[global_allocator]
static HEAP: Attributed = Attributed;

/// Bytes of a worker without connections.
const OF_WORKER: usize = 384 << 10;

/// Bytes of a connection besides its contexts: its queue pair, its session, what waits to be sent,
/// and what is on its way.
const OF_CONNECTION: usize = 256 << 10;

/// Bytes of an RDMA device without connections.
const OF_DEVICE: usize = 1536 << 10;

/// Bytes that a connection leaves behind, of the tables of its worker that have grown.
const OF_PLACE: usize = 4 << 10;

/// Bytes that a queued command leaves behind, of the same tables.
const OF_COMMAND: usize = 2 << 10;

/// Growth for which all connections are asked, which takes time.
const GROWTH: usize = 64 << 10;

/// Steps after which they are asked in any case.
const STEPS: u64 = 4096;

/// Measures what workers have allocated since a run began. Their devices are not among it, which are
/// there from the beginning, but those that they open when one comes back are.
#[derive(Debug)]
pub struct Meter {
    before: isize,
    /// Bytes of devices that come back.
    of_devices: usize,
    /// Bytes that a flood of connections and deep queues leave behind.
    of_flood: usize,
    /// Bytes in use at the last look.
    seen: usize,
    /// Addresses of the target.
    paths: usize,
}

impl Meter {
    /// One that begins now.
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
            of_flood: OF_PLACE * plan.flood as usize + OF_COMMAND * commands.sum::<usize>(),
            seen: 0,
            paths: plan.paths,
        }
    }

    /// Looks now and then; returns what is wrong.
    #[must_use]
    pub fn look(&mut self, target: &Target, fabric: &Fabric, steps: u64) -> Option<String> {
        let used = (Attributed::in_use() - self.before).max(0) as usize;
        if used < self.seen + GROWTH && !steps.is_multiple_of(STEPS) {
            return None;
        }
        self.seen = used;
        let announced = target.announced();
        let base = OF_WORKER * target.workers() + OF_CONNECTION * announced.connections;
        let most = base + announced.bytes + self.of_devices + self.of_flood;
        if used <= most {
            return None;
        }
        // A slow wire has packets that the target has no more.
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

/// What a worker does: what it allocates is the target's.
pub fn of_target<T>(run: impl FnOnce() -> T) -> T {
    Attributed::part(run)
}
