//! Workloads used to measure all systems.

/// A single load, using fio's terms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Access pattern, using fio's name.
    pub(super) rw: &'static str,
    /// Size of an operation in bytes.
    pub(super) block_size: u32,
    /// Number of operations in flight per job.
    pub(super) depth: u32,
}

impl Load {
    /// Returns true if this load writes; loads never mix reads and writes.
    pub(super) fn is_write(&self) -> bool {
        self.rw.ends_with("write")
    }

    /// Returns true if offsets are random.
    pub(super) fn is_random(&self) -> bool {
        self.rw.starts_with("rand")
    }
}

/// A named load, used as a table column.
#[derive(Debug)]
pub(super) struct Workload {
    /// Name used in the results file and on the command line.
    pub(super) id: &'static str,
    /// Name used in documents.
    pub(super) name: &'static str,
    pub(super) load: Load,
}

impl Workload {
    /// Returns true if we should compare bytes per second instead of operations per second.
    pub(super) fn is_sequential(&self) -> bool {
        !self.load.is_random()
    }
}

pub(super) const READ_1: &str = "randread-4k-1";
pub(super) const WRITE_1: &str = "randwrite-4k-1";
pub(super) const READ_32: &str = "randread-4k-32";
pub(super) const WRITE_32: &str = "randwrite-4k-32";
pub(super) const READ_SEQ: &str = "read-128k-8";
pub(super) const WRITE_SEQ: &str = "write-128k-8";

/// All workloads, in the order of the tables.
pub(super) const WORKLOADS: &[Workload] = &[
    workload(
        READ_1,
        "4 KiB random read, depth 1",
        ("randread", 4 << 10, 1),
    ),
    workload(
        WRITE_1,
        "4 KiB random write, depth 1",
        ("randwrite", 4 << 10, 1),
    ),
    workload(
        READ_32,
        "4 KiB random read, depth 32",
        ("randread", 4 << 10, 32),
    ),
    workload(
        WRITE_32,
        "4 KiB random write, depth 32",
        ("randwrite", 4 << 10, 32),
    ),
    workload(
        READ_SEQ,
        "128 KiB sequential read, depth 8",
        ("read", 128 << 10, 8),
    ),
    workload(
        WRITE_SEQ,
        "128 KiB sequential write, depth 8",
        ("write", 128 << 10, 8),
    ),
];

const fn workload(
    id: &'static str,
    name: &'static str,
    (rw, block_size, depth): (&'static str, u32, u32),
) -> Workload {
    let load = Load {
        rw,
        block_size,
        depth,
    };
    Workload { id, name, load }
}

/// Returns the workload with the given ID.
pub(super) fn named(id: &str) -> Option<&'static Workload> {
    WORKLOADS.iter().find(|workload| workload.id == id)
}
