//! Systems to measure. Each has a server, a disk address and a client.

use std::sync::LazyLock;

use serde::Deserialize;

use super::tables::{self, Text, text, texts};
use super::workloads::Load;

pub(super) const NBDKIT: &str = "nbdkit";
#[cfg(test)]
pub(super) const TGT: &str = "tgt";
pub(super) const SRP: &str = "srp";
pub(super) const ISER: &str = "iser";
pub(super) const ISCSI: &str = "iscsi";
#[cfg(test)]
pub(super) const ATTACH_NBD: &str = "attach-nbd";
#[cfg(test)]
pub(super) const ATTACH_FUSE: &str = "attach-fuse";
pub(super) const WIRE: &str = "wire";

/// Server program for the file, if any.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Server {
    None,
    Nbdkit,
    QemuNbd,
    Tgt,
    /// Our target, using one of its protocols.
    Riserd(Protocol),
    /// Our target using SRP and memory shared with its initiators.
    Sharing,
    /// Our target using SRP, attached with `riser attach`.
    Attached(Export),
}

/// Protocol used with our target.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Protocol {
    Srp,
    Iser,
    Iscsi,
}

/// Type of attachment.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Export {
    Nbd,
    Fuse,
}

/// Program used to generate the load.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Client {
    /// fio, using a file.
    Fio,
    /// fio with its nbd engine.
    Nbd,
    IscsiPerf,
    Riser,
    /// `riser bench`, using memory shared with the target.
    Sharing,
    /// `riser bench wire`, which doesn't need a server.
    Wire,
}

#[derive(Debug, Deserialize)]
pub(super) struct System {
    /// Name used in the results file and on the command line.
    #[serde(deserialize_with = "text")]
    pub(super) id: Text,
    /// Short name, used in charts and when the client is not relevant.
    #[serde(deserialize_with = "text")]
    pub(super) label: Text,
    /// Name used in documents.
    #[serde(deserialize_with = "text")]
    pub(super) name: Text,
    pub(super) server: Server,
    pub(super) client: Client,
    /// Programs required from Debian packages.
    #[serde(deserialize_with = "texts")]
    pub(super) programs: Vec<Text>,
}

impl System {
    pub(super) fn runs(&self, load: &Load) -> bool {
        match self.client {
            // This client only supports reads.
            Client::IscsiPerf => !load.is_write(),
            // This client moves data in one direction and runs all of its loads in a single run.
            Client::Wire => !load.is_random() && !load.is_write(),
            Client::Fio | Client::Nbd | Client::Riser | Client::Sharing => true,
        }
    }
}

/// All systems, in the order of the tables.
pub(super) static SYSTEMS: LazyLock<Vec<System>> = LazyLock::new(|| tables::read("systems"));

pub(super) fn named(id: &str) -> Option<&'static System> {
    SYSTEMS.iter().find(|system| system.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_include_both_sides() {
        let programs = |id| named(id).unwrap().programs.clone();
        assert_eq!(programs(TGT), ["tgtd", "tgtadm", "iscsi-perf"]);
        assert_eq!(programs(ATTACH_FUSE), ["fusermount3", "fio"]);
        assert_eq!(programs(SRP), [""; 0]);
    }

    #[test]
    fn clients_reject_unsupported_loads() {
        let load = |rw| Load {
            rw,
            block_size: 4096,
            depth: 1,
        };
        let runs = |id, rw| named(id).unwrap().runs(&load(rw));
        assert!(runs(TGT, "randread") && !runs(TGT, "randwrite"));
        assert!(runs(WIRE, "read") && !runs(WIRE, "write") && !runs(WIRE, "randread"));
        assert!(runs(SRP, "randwrite"));
    }
}
