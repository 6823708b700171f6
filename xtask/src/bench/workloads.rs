//! Workloads used to measure all systems.

use std::sync::LazyLock;

use serde::Deserialize;

use super::tables::{self, Text, text};

/// A single load, using fio's terms.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Load {
    /// Access pattern, using fio's name.
    #[serde(deserialize_with = "text")]
    pub(super) rw: Text,
    /// Size of an operation in bytes.
    pub(super) block_size: u32,
    /// Number of operations in flight per job.
    pub(super) depth: u32,
}

impl Load {
    /// Returns whether this load writes; loads never mix reads and writes.
    pub(super) fn is_write(&self) -> bool {
        self.rw.ends_with("write")
    }

    pub(super) fn is_random(&self) -> bool {
        self.rw.starts_with("rand")
    }
}

/// A named load, used as a table column.
#[derive(Debug, Deserialize)]
pub(super) struct Workload {
    /// Name used in the results file and on the command line.
    #[serde(deserialize_with = "text")]
    pub(super) id: Text,
    /// Name used in documents.
    #[serde(deserialize_with = "text")]
    pub(super) name: Text,
    pub(super) load: Load,
}

impl Workload {
    pub(super) fn is_sequential(&self) -> bool {
        !self.load.is_random()
    }
}

#[cfg(test)]
pub(super) const READ_1: &str = "randread-4k-1";
#[cfg(test)]
pub(super) const READ_32: &str = "randread-4k-32";
pub(super) const READ_SEQ: &str = "read-128k-8";
#[cfg(test)]
pub(super) const WRITE_SEQ: &str = "write-128k-8";

/// All workloads, in the order of the tables.
pub(super) static WORKLOADS: LazyLock<Vec<Workload>> = LazyLock::new(|| tables::read("workloads"));

pub(super) fn named(id: &str) -> Option<&'static Workload> {
    WORKLOADS.iter().find(|workload| workload.id == id)
}
