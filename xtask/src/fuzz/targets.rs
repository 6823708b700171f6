//! List of fuzz targets, which are bolero tests, by topic.

use std::path::PathBuf;

use crate::root;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// Name of the test function, also used as the name of its corpus directory.
    pub(super) name: &'static str,
    /// Description of the input.
    pub(super) about: &'static str,
    /// Package with this test.
    pub(super) package: &'static str,
    /// Test program: the name of an integration test, or `lib` for unit tests.
    pub(super) program: &'static str,
    /// Module path to prepend to the name.
    modules: &'static str,
    /// Directory of the test's source file.
    folder: &'static str,
}

impl Target {
    /// Returns the directory with the files of this target: `corpus`, which is part of the
    /// repository, and `crashes`.
    pub(super) fn folder(&self) -> PathBuf {
        root().join(self.folder).join("__fuzz__").join(self.name)
    }

    /// Returns the full name of the test in its program.
    pub(super) fn test(&self) -> String {
        format!("{}{}", self.modules, self.name)
    }

    /// Returns the Cargo argument to select the program.
    pub(super) fn program_arg(&self) -> String {
        match self.program {
            "lib" => "--lib".to_owned(),
            test => format!("--test={test}"),
        }
    }
}

/// Creates a target for a test that uses several crates.
const fn test(program: &'static str, name: &'static str, about: &'static str) -> Target {
    Target {
        name,
        about,
        package: "riser-tests",
        program,
        modules: "",
        folder: "tests/tests",
    }
}

/// Same as `test`, but for a test in a module.
const fn reference(modules: &'static str, name: &'static str, about: &'static str) -> Target {
    Target {
        modules,
        folder: "tests/tests/reference",
        ..test("fuzz_reference", name, about)
    }
}

/// Creates a target for a unit test of a crate.
const fn unit(
    (package, folder): (&'static str, &'static str),
    modules: &'static str,
    name: &'static str,
    about: &'static str,
) -> Target {
    Target {
        name,
        about,
        package,
        program: "lib",
        modules,
        folder,
    }
}

const RC: (&str, &str) = ("riser-transport", "transport/src/rc/tests");
const UC: (&str, &str) = ("riser-transport", "transport/src/uc");
const RDMAP: (&str, &str) = ("riser-transport", "transport/src/rdmap");
const CM: (&str, &str) = ("riser-transport", "transport/src/cm/tests");
const IWPM: (&str, &str) = ("riser-fabric", "fabric/src/iwpm");
const ADMINISTRATION: (&str, &str) = ("riser-fabric", "fabric/src/sa/administrator");
const LOCAL_SERVICE: (&str, &str) = ("riser-fabric", "fabric/src/ls");
const ACM: (&str, &str) = ("riser-fabric", "fabric/src");
const VNIC: (&str, &str) = ("riser-fabric", "fabric/src/vnic");
const VNIC_PORT: (&str, &str) = ("riser-fabric", "fabric/src/vnic/port");
const VNIC_MANAGER: (&str, &str) = ("riser-fabric", "fabric/src/vnic/manager");
const SRP: (&str, &str) = ("riser-target", "target/src/srp");
const ISCSI: (&str, &str) = ("riser-target", "target/src/iscsi");
const ISER: (&str, &str) = ("riser-target", "target/src/iser");
const CONTROL: (&str, &str) = ("riser-target", "target/src/control");
const SAVED: (&str, &str) = ("riser-configfs-emu", "configfs-emu/src/saved");
const SRP_SESSION: (&str, &str) = ("riser-initiator", "initiator/src/srp/session");
const ISCSI_SESSION: (&str, &str) = ("riser-initiator", "initiator/src/iscsi/session");
const ENGINE: (&str, &str) = ("riser-initiator", "initiator/src/engine/tests");

/// All targets.
pub(super) const TARGETS: &[Target] = &[
    test("fuzz_wire", "packet", "BTH and extended headers"),
    test("fuzz_wire", "cm_message", "MADs of the connection manager"),
    test("fuzz_wire", "cma_header", "private data of the RDMA CM"),
    test("fuzz_wire", "dm_mad", "MADs of device management"),
    unit(
        RC,
        "rc::tests::hostile::",
        "queue_pair",
        "RC queue pair: packets, requests, time",
    ),
    unit(UC, "uc::tests::", "uc_queue_pair", "UC queue pair: packets"),
    unit(
        RDMAP,
        "rdmap::tests::",
        "rdmap_stream",
        "iWARP: a stream, requests and replies of MPA",
    ),
    unit(
        CM,
        "cm::tests::hostile::",
        "connection_manager",
        "CM: MADs, calls, time",
    ),
    unit(
        IWPM,
        "iwpm::tests::",
        "port_mapper",
        "port mapper: netlink messages, datagrams, time",
    ),
    unit(
        ADMINISTRATION,
        "sa::administrator::tests::",
        "subnet_administrator",
        "MADs of subnet administration to an administrator",
    ),
    unit(
        ADMINISTRATION,
        "sa::administrator::tests::",
        "subnet_administration_client",
        "MADs of subnet administration to a client",
    ),
    unit(
        LOCAL_SERVICE,
        "ls::tests::",
        "local_service",
        "the kernel's path requests over netlink",
    ),
    unit(
        ACM,
        "acm::tests::",
        "acm_message",
        "messages of programs to ibacm's socket",
    ),
    unit(
        VNIC_PORT,
        "vnic::port::tests::",
        "vnic_packets",
        "port of a virtual Ethernet: packets and frames",
    ),
    unit(
        VNIC,
        "vnic::vema::tests::",
        "vnic_mads",
        "agent of a virtual Ethernet: MADs",
    ),
    unit(
        VNIC_MANAGER,
        "vnic::manager::tests::",
        "vnic_manager",
        "manager of a virtual Ethernet: responses",
    ),
    test(
        "fuzz_srp",
        "from_initiator",
        "SRP information units to a target",
    ),
    test(
        "fuzz_srp",
        "from_target",
        "SRP information units to an initiator",
    ),
    test(
        "fuzz_srp",
        "login_in_private_data",
        "SRP login in private data",
    ),
    unit(
        SRP,
        "srp::table::tests::",
        "descriptor_tables",
        "SRP descriptor tables",
    ),
    unit(
        SRP,
        "srp::tests_random::",
        "srp_channel",
        "SRP channel: messages, disks, devices, time",
    ),
    test("fuzz_iscsi", "stream", "iSCSI PDUs"),
    test("fuzz_iscsi", "words", "iSCSI text, names, CHAP values"),
    test("fuzz_iscsi", "login", "iSCSI login, as bytes"),
    test(
        "fuzz_iscsi",
        "login_of_known_keys",
        "iSCSI login, as keys and stages",
    ),
    unit(
        ISCSI,
        "iscsi::tests::",
        "full_feature",
        "iSCSI full feature: PDUs, disks, time",
    ),
    unit(
        ISCSI,
        "iscsi::tests_allegiance::",
        "reassignment",
        "iSCSI tasks between two connections",
    ),
    test("fuzz_iser", "message", "iSER messages"),
    test("fuzz_iser", "private_data", "iSER private data"),
    test(
        "fuzz_iser_machine",
        "machine",
        "iSER connection: any messages, also before login",
    ),
    unit(
        ISER,
        "iser::tests_random::",
        "iser_channel",
        "iSER connection: messages, memory, devices",
    ),
    test("fuzz_scsi", "cdb", "CDBs to a unit, as bytes"),
    test("fuzz_scsi", "known_commands", "CDBs to a unit, as commands"),
    test(
        "fuzz_scsi",
        "parameter_data",
        "parameter data from a target",
    ),
    test("fuzz_config", "arbitrary_text", "configuration YAML"),
    test(
        "fuzz_config",
        "mutated_file",
        "configuration YAML, as changes of a file",
    ),
    test("fuzz_nbd", "nbd_stream", "NBD, as bytes"),
    test("fuzz_nbd", "nbd_session", "NBD, as options and requests"),
    test(
        "fuzz_nbd_client",
        "nbd_negotiation",
        "negotiation of an NBD server",
    ),
    test("fuzz_nbd_client", "nbd_replies", "replies of an NBD server"),
    unit(
        CONTROL,
        "control::fuzz::",
        "admin_api",
        "admin API: HTTP, patches, configurations",
    ),
    unit(SAVED, "saved::tests::", "saveconfig", "saveconfig.json"),
    unit(
        SRP_SESSION,
        "srp::session::tests::",
        "hostile_srp_target",
        "SRP initiator with a hostile target",
    ),
    unit(
        ISCSI_SESSION,
        "iscsi::session::tests::",
        "hostile_iscsi_target",
        "iSCSI initiator with a hostile target",
    ),
    unit(
        ENGINE,
        "engine::tests::hostile_iser::",
        "hostile_iser_target",
        "iSER initiator with a hostile target",
    ),
    reference(
        "unit::",
        "unit_beside_model",
        "responses to CDBs compared with a model",
    ),
    reference(
        "reports::",
        "reports_beside_standards",
        "INQUIRY, MODE SENSE and others compared with SPC-4 and SBC-3",
    ),
    reference(
        "negotiation::",
        "login_beside_rules",
        "iSCSI negotiation compared with its rules",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use walkdir::WalkDir;

    use super::*;

    /// Maximum size of an input in the repository and maximum total size, in bytes.
    const LONGEST: u64 = 16 << 10;
    const ALL: u64 = 512 << 10;

    #[test]
    fn targets_match_tests_in_directory() {
        let names: BTreeSet<_> = TARGETS.iter().map(|target| target.name).collect();
        assert_eq!(names.len(), TARGETS.len());
        for target in TARGETS {
            let function = format!("fn {}() {{", target.name);
            let files = fs::read_dir(root().join(target.folder)).unwrap();
            let is_there = files.map(|file| file.unwrap().path()).any(|file| {
                let text = fs::read_to_string(file).unwrap_or_default();
                let at = text.find(&function);
                at.is_some_and(|at| text[at..].contains("bolero::check!("))
            });
            assert!(is_there, "{} in {}", target.name, target.folder);
        }
    }

    /// We might not notice if the inputs found by a fuzzer become too large.
    #[test]
    fn targets_have_small_corpus() {
        let mut sum = 0;
        for target in TARGETS {
            let corpus = target.folder().join("corpus");
            let files = WalkDir::new(&corpus).into_iter().filter_map(Result::ok);
            let files: Vec<_> = files.filter(|file| file.file_type().is_file()).collect();
            assert!(!files.is_empty(), "{}", corpus.display());
            for file in files {
                let len = file.metadata().unwrap().len();
                assert!(len <= LONGEST, "{}", file.path().display());
                sum += len;
            }
        }
        assert!(sum <= ALL, "{sum} bytes");
    }
}
