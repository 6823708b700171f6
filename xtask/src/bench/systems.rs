//! Systems to measure. Each has a server, a disk address and a client.

use super::workloads::Load;

pub(super) const FILE: &str = "file";
pub(super) const NBDKIT: &str = "nbdkit";
pub(super) const QEMU_NBD: &str = "qemu-nbd";
pub(super) const TGT: &str = "tgt";
pub(super) const SRP: &str = "srp";
pub(super) const ISER: &str = "iser";
pub(super) const ISCSI: &str = "iscsi";
pub(super) const ISCSI_PERF: &str = "iscsi-perf";
pub(super) const ATTACH_NBD: &str = "attach-nbd";
pub(super) const ATTACH_FUSE: &str = "attach-fuse";
pub(super) const SHM: &str = "shm";
pub(super) const WIRE: &str = "wire";

/// Server program for the file, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Srp,
    Iser,
    Iscsi,
}

/// Type of attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Export {
    Nbd,
    Fuse,
}

/// Program used to generate the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Client {
    /// fio, using a file.
    Fio,
    /// fio with its nbd engine, or `riser bench` if fio doesn't support it.
    Nbd,
    IscsiPerf,
    Riser,
    /// `riser bench`, using memory shared with the target.
    Sharing,
    /// `riser bench wire`, which doesn't need a server.
    Wire,
}

/// A table row.
#[derive(Debug)]
pub(super) struct System {
    /// Name used in the results file and on the command line.
    pub(super) id: &'static str,
    /// Short name, used in charts and when the client is not relevant.
    pub(super) label: &'static str,
    /// Name used in documents, where `{nbd}` is replaced by the client for NBD servers.
    name: &'static str,
    pub(super) server: Server,
    pub(super) client: Client,
}

impl System {
    /// Returns the name used in documents, including the client for NBD servers.
    pub(super) fn name(&self, nbd_client: &str) -> String {
        let client = match nbd_client {
            "fio" => "`fio` nbd engine",
            _ => "`riser bench`",
        };
        self.name.replace("{nbd}", client)
    }

    /// Returns the programs required from Debian packages.
    pub(super) fn programs(&self) -> impl Iterator<Item = &'static str> {
        let server: &[_] = match self.server {
            Server::None | Server::Riserd(_) | Server::Sharing | Server::Attached(Export::Nbd) => {
                &[]
            }
            Server::Nbdkit => &["nbdkit"],
            Server::QemuNbd => &["qemu-nbd"],
            Server::Tgt => &["tgtd", "tgtadm"],
            Server::Attached(Export::Fuse) => &["fusermount3"],
        };
        let client: &[_] = match self.client {
            Client::Fio | Client::Nbd => &["fio"],
            Client::IscsiPerf => &["iscsi-perf"],
            Client::Riser | Client::Sharing | Client::Wire => &[],
        };
        server.iter().chain(client).copied()
    }

    /// Returns true if the client supports this load.
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
pub(super) const SYSTEMS: &[System] = &[
    system(
        (FILE, "file"),
        "`fio` (io_uring) on the file itself",
        (Server::None, Client::Fio),
    ),
    system(
        (NBDKIT, "nbdkit"),
        "`nbdkit` file plugin, Unix socket, {nbd}",
        (Server::Nbdkit, Client::Nbd),
    ),
    system(
        (QEMU_NBD, "qemu-nbd"),
        "`qemu-nbd`, Unix socket, {nbd}",
        (Server::QemuNbd, Client::Nbd),
    ),
    system(
        (TGT, "tgt"),
        "`tgt`, iSCSI/TCP, `iscsi-perf`",
        (Server::Tgt, Client::IscsiPerf),
    ),
    system(
        (SRP, "SRP"),
        "`riserd`, SRP over `roce`, `riser bench`",
        (Server::Riserd(Protocol::Srp), Client::Riser),
    ),
    system(
        (ISER, "iSER"),
        "`riserd`, iSER over `roce`, `riser bench`",
        (Server::Riserd(Protocol::Iser), Client::Riser),
    ),
    system(
        (ISCSI, "iSCSI/TCP"),
        "`riserd`, iSCSI/TCP, `riser bench`",
        (Server::Riserd(Protocol::Iscsi), Client::Riser),
    ),
    system(
        (ISCSI_PERF, "iSCSI/TCP, iscsi-perf"),
        "`riserd`, iSCSI/TCP, `iscsi-perf`",
        (Server::Riserd(Protocol::Iscsi), Client::IscsiPerf),
    ),
    system(
        (ATTACH_NBD, "SRP, attach --nbd"),
        "`riserd`, SRP, `riser attach --nbd`, {nbd}",
        (Server::Attached(Export::Nbd), Client::Nbd),
    ),
    system(
        (ATTACH_FUSE, "SRP, attach --fuse"),
        "`riserd`, SRP, `riser attach --fuse`, `fio` (io_uring, direct)",
        (Server::Attached(Export::Fuse), Client::Fio),
    ),
    system(
        (SHM, "SRP, shared memory"),
        "`riserd`, SRP over `shm` (one host, no network), `riser bench`",
        (Server::Sharing, Client::Sharing),
    ),
    system(
        (WIRE, "wire"),
        "`riser bench wire`: packets of `roce` without a target",
        (Server::None, Client::Wire),
    ),
];

const fn system(
    (id, label): (&'static str, &'static str),
    name: &'static str,
    (server, client): (Server, Client),
) -> System {
    System {
        id,
        label,
        name,
        server,
        client,
    }
}

/// Returns the system with the given ID.
pub(super) fn named(id: &str) -> Option<&'static System> {
    SYSTEMS.iter().find(|system| system.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nbd_server_names_include_client() {
        let nbdkit = named(NBDKIT).unwrap();
        assert!(nbdkit.name("fio").ends_with("`fio` nbd engine"));
        assert!(nbdkit.name("riser").ends_with("`riser bench`"));
        assert_eq!(named("nope").map(|system| system.id), None);
    }

    #[test]
    fn programs_include_both_sides() {
        let programs = |id| named(id).unwrap().programs().collect::<Vec<_>>();
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
