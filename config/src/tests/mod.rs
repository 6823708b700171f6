//! Tests for accepted configurations, errors and messages.

use std::net::IpAddr;
use std::path::PathBuf;

use proptest::prelude::*;
use riser_scsi::iscsi::name::IscsiName;

use super::*;

mod edit;
mod schema;
mod write;

const MINIMAL: &str = include_str!("../../../deploy/examples/minimal.yaml");
const FULL: &str = include_str!("../../../deploy/examples/full.yaml");

fn parse(text: &str) -> Config {
    Config::parse(text, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Returns a configuration with a backend `d`, for tests to insert errors.
fn with(backend: &str, target: &str, rest: &str) -> String {
    format!(
        "backends:\n  d: {{ kind: ram, size: 1MiB{backend} }}\n\
         targets:\n  - name: t\n    portals: [{{ protocol: srp, listen: 127.0.0.1 }}]\n{target}{rest}"
    )
}

#[test]
fn examples_are_valid() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            if let Err(e) = Config::parse(&text, &path.display().to_string()) {
                panic!("{e}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 2);
}

#[test]
fn minimal_example_is_read_correctly() {
    let c = parse(MINIMAL);
    assert_eq!(
        c.backends[0].spec.source,
        Source::File {
            path: "/var/lib/riser/disk0.img".into(),
            size: Some(1 << 30),
            create: true,
        }
    );
    let spec = &c.backends[0].spec;
    assert!(spec.write_cache && !spec.read_only && c.backends[0].thin);
    assert_eq!((spec.block_size, spec.direct), (512, Direct::Auto));
    let t = &c.targets[0];
    let at = t.portals[0].listen.at();
    assert_eq!(at, "127.0.0.1:5555".parse().ok());
    assert_eq!(t.access, Access::Open);
    assert_eq!(c.backend(&t.luns[&0]).name, "disk0");
    assert_eq!(c.limits, Limits::default());
    assert!(c.transport.faults.is_none() && c.notes.is_empty());
}

#[test]
fn full_example_contains_defaults() {
    let full = parse(FULL);
    assert_eq!(full.limits, Limits::default());
    assert_eq!(full.transport.mtu, None);
    assert_eq!(full.log, parse(MINIMAL).log);
    assert_eq!(full.backends[0].names.serial.as_deref(), Some("DB-0001"));
    assert!(full.targets[0].luns[&1].read_only);
    assert_eq!(full.workers.cpus, [0, 1]);
    assert_eq!(full.workers.number(16), 2);
    let faults = full.transport.faults.unwrap();
    assert_eq!((faults.loss, faults.seed), (Percent::ZERO, 1));
}

#[test]
fn srp_redirect_is_address_with_same_port() {
    let text = |protocol: &str, redirect: &str| {
        let portal = "protocol: srp, listen: 127.0.0.1";
        let with_redirect =
            format!("protocol: {protocol}, listen: '127.0.0.1:5556', redirect: {{ {redirect} }}");
        let target = "    iqn: iqn.2026-01.a:t\n    luns: { 0: d }\n";
        with("", target, "").replacen(portal, &with_redirect, 1)
    };
    for (to, shown) in [
        ("192.0.2.9", "192.0.2.9:5556"),
        ("192.0.2.9:5556", "192.0.2.9:5556"),
        ("2001:db8::9", "[2001:db8::9]:5556"),
    ] {
        let config = parse(&text("srp", &format!("to: '{to}'")));
        let redirect = config.targets[0].portals[0].redirect.clone().unwrap();
        assert_eq!(redirect.to.to_string(), shown);
        let ip = to.trim_end_matches(":5556").parse().ok();
        assert_eq!(redirect.ip(), ip);
    }
    for (protocol, redirect, message) in [
        (
            "srp",
            "to: other",
            "must be an IP address, with the same port",
        ),
        (
            "srp",
            "to: '192.0.2.9:5555'",
            "must be an IP address, with the same port",
        ),
        (
            "srp",
            "to: 0.0.0.0",
            "must be an IP address, with the same port",
        ),
        (
            "srp",
            "to: 239.1.1.1",
            "must be an IP address, with the same port",
        ),
        (
            "srp",
            "to: 192.0.2.9, permanent: true",
            "is always temporary",
        ),
        (
            "iser",
            "to: 192.0.2.9",
            "only supported for iSCSI and SRP portals",
        ),
    ] {
        let error = Config::parse(&text(protocol, redirect), "test.yaml").unwrap_err();
        assert!(error.to_string().contains(message), "{redirect}: {error}");
    }
}

#[test]
fn access_is_denied_by_default() {
    let c = parse(FULL);
    let t = &c.targets[0];
    let id = |text: &str| u128::from_str_radix(text, 16).unwrap().to_be_bytes();
    let at = |text: &str| text.parse::<IpAddr>().unwrap();
    let allowed = |port: &str, from: &str| {
        t.allowed_luns(&id(port), at(from))
            .map(|luns| luns.into_keys().collect::<Vec<_>>())
    };
    let by_guid = "77777777777777770002c90300a1b2c3";
    let by_port = "00000000000000010002c90300a1b2c4";
    assert_eq!(allowed(by_guid, "198.51.100.1"), Some(vec![0]));
    assert_eq!(allowed(by_port, "192.0.2.99"), Some(vec![0, 1]));
    assert_eq!(allowed(by_port, "198.51.100.1"), None);
    assert_eq!(allowed("00", "2001:db8::77"), Some(vec![0, 5]));
    assert_eq!(allowed("00", "2001:db9::77"), None);
    let nobody = parse(&with("", "    luns: { 0: d }\n", ""));
    assert_eq!(
        nobody.targets[0].allowed_luns(&[0; 16], at("127.0.0.1")),
        None
    );
    assert_eq!(
        nobody.notes,
        ["no initiator can log in to target `t`: add `access:` rules, or set `access: open`"]
    );
}

#[test]
fn rule_can_renumber_units() {
    let text = "backends: { a: { kind: ram, size: 1MiB }, b: { kind: ram, size: 1MiB } }
targets:
  - name: t
    iqn: iqn.2026-01.a:t
    portals: [{ protocol: iscsi, listen: 127.0.0.1 }]
    luns: { 0: a, 1: b, 2: { backend: b, read_only: true }, 3: { backend: a, read_only: true } }
    access:
      - { iqn: \"iqn.2026-01.a:one\", luns: { 0: b, 5: { backend: a, read_only: true } } }
      - { iqn: \"iqn.2026-01.a:two\", luns: { 9: { backend: b, read_only: true }, 10: a } }
      - { iqn: \"iqn.2026-01.a:three\", luns: {} }
      - { iqn: \"iqn.2026-01.a:four\", luns: [2, 0] }
";
    let config = parse(text);
    let seen = |name: &str| {
        let name = IscsiName::new(&format!("iqn.2026-01.a:{name}")).unwrap();
        let seen = config.targets[0].allowed_luns_of(&name, [127, 0, 0, 1].into());
        let seen = seen.unwrap().into_iter();
        seen.map(|(seen, lun)| (seen, lun.number, lun.read_only))
            .collect::<Vec<_>>()
    };
    assert_eq!(seen("one"), [(0, 1, false), (5, 3, true)]);
    assert_eq!(seen("two"), [(9, 2, true), (10, 0, false)]);
    assert_eq!(seen("three"), []);
    assert_eq!(seen("four"), [(0, 0, false), (2, 2, true)]);
    assert_eq!(parse(&config.to_yaml()), config);
    // A unit that is read-only in the target is read-only for all initiators.
    let text = text
        .replace("1: b, ", "")
        .replace("3: { backend: a, read_only: true } ", "");
    let config = parse(&text);
    let name = IscsiName::new("iqn.2026-01.a:one").unwrap();
    let seen = config.targets[0].allowed_luns_of(&name, [127, 0, 0, 1].into());
    let b = SeenLun {
        number: 2,
        read_only: true,
    };
    assert_eq!(seen.unwrap()[&0], b);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn names_are_stable_distinct_and_legal() {
    let c = parse(FULL);
    let host = HostId::of(&c);
    assert_eq!(host, HostId::new("rack-7-node-2"));
    let names: Vec<_> = c.backends.iter().map(|b| b.identity(&host)).collect();
    assert_eq!(names[0].serial, "DB-0001");
    assert_ne!(names[1].serial, names[2].serial);
    assert_ne!(names[1].naa, names[2].naa);
    // Existing initiators use these names to identify their disks, so they must not change.
    assert_eq!(names[2].serial, "fd2cc863b5fc27d0");
    assert_eq!(hex(&names[2].naa.bytes()), "3e01fd40a4cbb297");
    let portal = &c.targets[1].portals[0];
    let ioc = portal.ioc_guid(&host, "playground");
    assert_eq!(ioc.to_string(), "0xdedf84dcb1a4131b");
    assert_eq!(portal.id_ext(&host, "playground"), ioc);
    assert_ne!(ioc, portal.ioc_guid(&host, "other"));
    assert_eq!(
        c.targets[0].portals[0].ioc_guid(&host, "x"),
        Guid(0x0200_c0ff_ee00_0001)
    );
}

#[test]
fn worker_count_is_rounded_with_note() {
    let note = |count: usize| {
        let text = format!("backends: {{}}\ntargets: []\nworkers: {{ count: {count} }}\n");
        let config = Config::parse(&text, "test.yaml").unwrap();
        (config.workers.number(1), config.notes)
    };
    for count in [1, 2, 4, 64] {
        assert_eq!(note(count), (count, Vec::new()));
    }
    let (number, notes) = note(3);
    let text = "2 of 3 workers run: their number must be a power of two, at most 64";
    assert_eq!((number, &notes[..]), (2, &[text.to_owned()][..]));
    assert_eq!(note(1024).0, 64);
    let text = "backends: {}\ntargets: []\n";
    let auto = Config::parse(text, "test.yaml").unwrap().workers;
    assert_eq!((auto.number(6), auto.number(1)), (4, 1));
    assert_eq!((auto.number(2), auto.number(3), auto.number(4)), (1, 2, 4));
    assert!(auto.note(6).is_some() && auto.note(4).is_none());
}

#[test]
fn errors_have_position() {
    let luns = |l: &str| with("", &format!("    luns: {l}\n"), "");
    let access = |a: &str| with("", &format!("    luns: {{ 0: d }}\n    access: {a}\n"), "");
    let rest = |r: &str| with("", "", r);
    let backend = |b: &str| with(b, "", "");
    let cases = [
        // File structure.
        (
            String::new(),
            "1:1: targets: missing targets (list the targets with their portals and LUNs in \
             `targets:`)",
        ),
        ("- 1".into(), "1:1: expected a mapping (`key: value`)"),
        (
            "targets: 3".into(),
            "1:10: targets: expected a list (`- item`)",
        ),
        (
            "tragets: []".into(),
            "1:1: tragets: unknown key `tragets` (did you mean `targets`?)",
        ),
        (
            "a: 1\na: 2".into(),
            "1:1: a: unknown key `a` (valid keys are identity, strict, backends, targets, \
             discovery_chap, workers, limits, transport, admin, state, metrics, log)",
        ),
        (
            "identity: x\nidentity: y".into(),
            "2:1: duplicate key `identity`",
        ),
        (
            "identity: ''".into(),
            "1:11: identity: invalid identity: must not be empty",
        ),
        (
            rest("---\nfoo: 1\n"),
            "7:1: unsupported second YAML document (a configuration must be a single YAML document)",
        ),
        // Backends.
        (
            backend(", colour: red"),
            "2:31: backends.d.colour: unknown key `colour` (valid keys are kind, path, size, \
             create, block_size, protection, direct, write_cache, read_only, thin, threshold, \
             stoppable, rotational, serial, naa, vendor, product, revision, limits)",
        ),
        (
            backend(", bloc_size: 512"),
            "2:31: backends.d.bloc_size: unknown key `bloc_size` (did you mean `block_size`?)",
        ),
        (
            backend(", block_size: 1024"),
            "2:43: backends.d.block_size: unsupported block size 1024: must be 512 or 4096",
        ),
        (
            backend(", block_size: big"),
            "2:43: backends.d.block_size: expected a non-negative integer",
        ),
        (
            backend(", protection: { type: 4 }"),
            "2:51: backends.d.protection.type: unsupported protection type 4: must be 1, 2 or 3",
        ),
        (
            backend(", protection: {}"),
            "2:43: backends.d.protection: missing key `type`",
        ),
        (
            "backends: { d: { kind: device, path: /x, protection: { type: 1 } } }".into(),
            "1:54: backends.d.protection: `protection` is not supported for backends of kind device",
        ),
        (
            "backends: { d: { kind: file, path: /x, direct: on, protection: { type: 1 } } }".into(),
            "1:48: backends.d.direct: direct I/O is not supported with `protection`",
        ),
        (
            backend(", write_cache: maybe"),
            "2:44: backends.d.write_cache: expected on or off, not `maybe`",
        ),
        (
            backend(", read_only: on"),
            "2:42: backends.d.read_only: expected true or false",
        ),
        (
            backend(", direct: on"),
            "2:39: backends.d.direct: `direct` is not supported for backends of kind ram",
        ),
        (
            backend(", threshold: 80%"),
            "2:42: backends.d.threshold: `threshold` is only supported for thin backends of kind file",
        ),
        (
            backend(", threshold: 120%"),
            "2:42: backends.d.threshold: `120%` is not a percentage from 0 to 100",
        ),
        (
            backend(", path: /x"),
            "2:37: backends.d.path: `path` is not supported for backends of kind ram",
        ),
        (
            backend(", serial: ''"),
            "2:39: backends.d.serial: must be 1 to 64 printable ASCII characters",
        ),
        (
            backend(", naa: 5000"),
            "2:36: backends.d.naa: `5000` is not an NAA identifier; use 16 hexadecimal digits \
             starting with 3, or 32 starting with 6",
        ),
        (
            "backends: { d: { kind: fil } }".into(),
            "1:24: backends.d.kind: `fil` is not one of file, device, ram, null (did you mean `file`?)",
        ),
        (
            "backends: { d: { path: /x } }".into(),
            "1:18: backends.d: missing key `kind`",
        ),
        (
            "backends: { d: { kind: file } }".into(),
            "1:16: backends.d: missing key `path`, which is required for backends of kind file",
        ),
        (
            "backends: { d: { kind: ram } }".into(),
            "1:16: backends.d: missing key `size`, which is required for backends of kind ram",
        ),
        (
            "backends: { d: { kind: ram, size: 1000 } }".into(),
            "1:35: backends.d.size: 1000 bytes are not a multiple of the block size, 512 bytes",
        ),
        (
            "backends: { d: { kind: ram, size: lots } }".into(),
            "1:35: backends.d.size: `lots` is not a size; write bytes or a number with KiB, MiB, GiB, TiB or KB to TB",
        ),
        (
            "backends: { d: { kind: file, path: /x, create: true } }".into(),
            "1:16: backends.d: missing key `size`, which is required for backends of kind file \
             (`create: true` requires a size)",
        ),
        (
            "backends: { a b: { kind: ram, size: 512 } }".into(),
            "1:18: backends.a b: invalid name `a b` (use 1 to 64 letters, digits, `-`, `_`, `.` or \
             `:`)",
        ),
        (
            "backends:\n  a: { kind: file, path: /x/y }\n  b: { kind: file, path: /x/./y }".into(),
            "3:26: backends.b.path: /x/./y is already backend `a` (a single backend can be a LUN \
             of several targets)",
        ),
        (
            "backends:\n  a: { kind: ram, size: 512, naa: 3123456789abcdef }\n  b: { kind: ram, size: 512, naa: 3123456789ABCDEF }".into(),
            "3:35: backends.b.naa: backend `a` already has this world-wide name (initiators treat \
             disks with the same name as paths to a single disk)",
        ),
        (
            "backends:\n  a: { kind: ram, size: 512, serial: same }\n  b: { kind: ram, size: 512, serial: same }".into(),
            "3:38: backends.b.serial: backend `a` already has this serial number (initiators treat \
             disks with the same name as paths to a single disk)",
        ),
        (
            "backends:\n  a: { kind: file, path: ~/disk.img }".into(),
            "2:26: backends.a.path: `~` is not supported for home directories (use the full path, \
             or `./~` for a file with this name)",
        ),
        // Targets.
        (
            luns("{ 0: e }"),
            "6:16: targets[0].luns.0: unknown backend `e`",
        ),
        (
            luns("{ 0: d, 0: d }"),
            "6:19: targets[0].luns: duplicate key `0`",
        ),
        (
            luns("{ 1: d, 0x1: d }"),
            "6:19: targets[0].luns: duplicate key `0x1`",
        ),
        (
            luns("{ 16384: d }"),
            "6:20: targets[0].luns.16384: a LUN must be from 0 to 16383, not 16384",
        ),
        (
            luns("{ 99999: d }"),
            "6:20: targets[0].luns.99999: a LUN must be from 0 to 16383, not 99999",
        ),
        (
            luns("{ -1: d }"),
            "6:13: targets[0].luns: expected a non-negative integer",
        ),
        (
            luns("{ 0: { backend: d, ro: true } }"),
            "6:30: targets[0].luns.0.ro: unknown key `ro` (valid keys are backend, read_only)",
        ),
        (
            access("closed"),
            "7:5: targets[0].access: expected `open`, or a list of rules, not string \"closed\"",
        ),
        (
            access("[{ luns: [0] }]"),
            "7:14: targets[0].access[0]: missing initiator in access rule (set at least one of \
             `initiator`, `iqn` and `address`; `access: open` admits all initiators)",
        ),
        (
            access("[{ address: 10.0.0.1, luns: [0, 3] }]"),
            "7:45: targets[0].access[0].luns[1]: this target has no LUN 3",
        ),
        (
            access("[{ address: 10.0.0.1, luns: { 0: x } }]"),
            "7:46: targets[0].access[0].luns.0: unknown backend `x`",
        ),
        (
            access("[{ address: 10.0.0.1, luns: d }]"),
            "7:35: targets[0].access[0].luns: expected a list of numbers, or a mapping of numbers to backends, not string \"d\"",
        ),
        (
            "backends: { d: { kind: ram, size: 512 }, e: { kind: ram, size: 512 } }\n\
             targets: [{ name: t, portals: [{ protocol: srp, listen: 127.0.0.1 }], luns: { 0: d }, \
             access: [{ address: 10.0.0.1, luns: { 0: e } }] }]"
                .into(),
            "2:128: targets[0].access[0].luns.0: backend `e` is not a LUN of this target (add it \
             to the `luns` of the target; a rule only assigns a different number)",
        ),
        (
            access("[{ initiator: 12 }]"),
            "7:27: targets[0].access[0].initiator: `12` is not an initiator; use 16 hexadecimal \
             digits (its GUID) or 32 (its port identifier)",
        ),
        (
            access("[{ address: host }]"),
            "7:25: targets[0].access[0].address: `host` is neither an IP address nor a network such as 10.0.0.0/8",
        ),
        (
            "targets: [{ name: t }]".into(),
            "1:13: targets[0]: missing key `portals`",
        ),
        (
            "targets: [{ name: t, portals: [] }]".into(),
            "1:31: targets[0].portals: missing portals: a target must listen on at least one \
             address (- { protocol: srp, listen: 127.0.0.1 })",
        ),
        (
            "targets: [{ name: t, portals: [{ protocol: nfs, listen: ::1 }] }]".into(),
            "1:44: targets[0].portals[0].protocol: `nfs` is not one of srp, iscsi, iser",
        ),
        (
            "targets: [{ name: t, portals: [{ protocol: srp, listen: 224.0.0.1 }] }]".into(),
            "1:57: targets[0].portals[0].listen: a portal cannot listen on 224.0.0.1: this is a \
             multicast address",
        ),
        (
            rest("  - name: t\n    portals: [{ protocol: srp, listen: ::1 }]\n"),
            "6:11: targets[1].name: duplicate target `t`, first defined in line 4",
        ),
        (
            "targets: [{ name: t, portals: [{ protocol: srp, listen: 192.0.2.1000 }] }]".into(),
            "1:57: targets[0].portals[0].listen: `192.0.2.1000` is not an address; use 192.0.2.1, \
             192.0.2.1:5555 or [2001:db8::1]:5555, or for all addresses 0.0.0.0, [::], an \
             interface such as eth0:5555, or :5555",
        ),
        (
            rest("  - name: u\n    portals: [{ protocol: srp, listen: 0.0.0.0 }]\n"),
            "7:40: targets[1].portals[0].listen: 0.0.0.0:5555 overlaps with 127.0.0.1:5555, which \
             is already a portal of target `t`",
        ),
        (
            rest("  - name: u\n    portals: [{ protocol: iser, listen: :5555 }]\n"),
            "7:41: targets[1].portals[0].listen: :5555 overlaps with 127.0.0.1:5555, which is \
             already an RDMA portal of target `t`",
        ),
        (
            rest(
                "  - name: u\n    portals: [{ protocol: srp, listen: eth0 }, { protocol: srp, listen: eth0:5555 }]\n",
            ),
            "7:73: targets[1].portals[1].listen: eth0:5555 is already a portal of target `u`",
        ),
        (
            rest("  - name: u\n    portals: [{ protocol: srp, listen: 127.0.0.1:5555 }]\n"),
            "7:40: targets[1].portals[0].listen: 127.0.0.1:5555 is already a portal of target `t`",
        ),
        (
            rest("  - name: u\n    portals: [{ protocol: iser, listen: fe80::1 }]\n"),
            "7:41: targets[1].portals[0].listen: fe80::1 is a link-local address, which RDMA \
             portals do not support (use a global or unique local address of the interface)",
        ),
        (
            rest(
                "    iqn: iqn.2026-01.a:t\n  - name: u\n    iqn: iqn.2026-01.a:T\n    \
                 portals: [{ protocol: iscsi, listen: ::1 }]\n",
            ),
            "8:10: targets[1].iqn: target `t` already has the iSCSI name iqn.2026-01.a:t \
             (initiators identify a target by its iSCSI name)",
        ),
        // Other keys.
        (
            rest("workers: { count: 0 }\n"),
            "6:19: workers.count: must be auto or from 1 to 1024, not 0",
        ),
        (
            rest("workers: { count: 3, cpus: [1, 2] }\n"),
            "6:28: workers.cpus: 2 CPUs for 3 workers",
        ),
        (
            rest("workers: { cpus: [1, 1] }\n"),
            "6:22: workers.cpus[1]: duplicate CPU 1",
        ),
        (
            rest("limits: { queue_depth: 0 }\n"),
            "6:24: limits.queue_depth: must be from 1 to 4096, not 0",
        ),
        (
            rest("limits: { max_transfer: 1000 }\n"),
            "6:25: limits.max_transfer: must be from 64KiB to 32MiB, in whole 4096-byte blocks",
        ),
        (
            rest("limits: { buffer_pool_mib: 1 }\n"),
            "6:28: limits.buffer_pool_mib: 1 MiB of buffers are not enough for two commands",
        ),
        (
            rest("limits: { sessions_per_address: 300 }\n"),
            "6:33: limits.sessions_per_address: must not exceed max_sessions, which is 256",
        ),
        (
            rest("transport: { mtu: 1500 }\n"),
            "6:19: transport.mtu: must be auto, 256, 512, 1024, 2048 or 4096, not 1500",
        ),
        (
            rest("transport: { provider: shm, mtu: 1024 }\n"),
            "6:24: transport.provider: provider shm does not use a network; `mtu` is not supported",
        ),
        (
            rest("transport: { provider: iwarp, mtu: 1024 }\n"),
            "6:24: transport.provider: provider iwarp uses TCP; `mtu` only applies to RoCE packets",
        ),
        (
            rest("transport: { provider: iwarp }\n"),
            "6:24: transport.provider: target `t` has an SRP portal, but SRP is not supported over iWARP \
             (use iSER: `protocol: iser`)",
        ),
        (
            rest("transport: { provider: shm, on_link: true }\n"),
            "6:24: transport.provider: provider shm does not use a network; `on_link` is not supported",
        ),
        (
            rest("transport: { provider: shm, faults: { loss: 1 } }\n"),
            "6:24: transport.provider: provider shm does not use a network; `faults` is not supported",
        ),
        (
            rest("transport: { provider: shm, shm: true }\n"),
            "6:24: transport.provider: provider shm always shares memory; `shm: true` is only for \
             the other providers",
        ),
        (
            rest("transport: { provider: iwarp, administrator: 10.0.0.1 }\n"),
            "6:24: transport.provider: provider iwarp uses TCP; `administrator` only applies to RoCE packets",
        ),
        (
            rest("transport: { provider: rdma_core, administrator: 10.0.0.1 }\n"),
            "6:24: transport.provider: provider rdma_core cannot register ports; `administrator` only \
             applies to the software NIC",
        ),
        (
            rest("transport: { administrator: sa.example }\n"),
            "6:29: transport.administrator: `sa.example` is not an IP address",
        ),
        (
            rest("transport: { administrator: 239.0.0.1 }\n"),
            "6:29: transport.administrator: `239.0.0.1` is not the address of a host",
        ),
        (
            rest("transport: { faults: { loss: 101 } }\n"),
            "6:30: transport.faults.loss: `101` is not a percentage from 0 to 100",
        ),
        (
            rest("log: { filter: '==' }\n"),
            "6:16: log.filter: invalid log filter `==` (use a level such as `info`, or \
             `info,riser_target=debug`)",
        ),
    ];
    let mut wrong = Vec::new();
    for (text, expected) in cases {
        let said = Config::parse(&text, "f").map_or_else(|e| e.to_string(), |_| "fine".into());
        if said != format!("f:{expected}") {
            wrong.push(format!(
                "{text}\n  said:     {said}\n  expected: f:{expected}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn oversized_documents_are_rejected() {
    for deep in ["[", "{a: ", "- ", "? "] {
        assert!(Config::parse(&deep.repeat(100_000), "f").is_err());
    }
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for i in 1..20 {
        let list = vec![format!("*a{}", i - 1); 9].join(", ");
        bomb.push_str(&format!("a{i}: &a{i} [{list}]\n"));
    }
    bomb.push_str("targets: *a19\n");
    assert!(Config::parse(&bomb, "f").is_err());
    let bomb = bomb.replace("\n", "\n  ");
    assert!(Config::parse(&format!("backends:\n  {bomb}"), "f").is_err());
}

#[test]
fn unused_backends_add_note() {
    let c = parse(&with("", "    access: open\n", ""));
    assert_eq!(
        c.notes,
        [
            "backend `d` is not a LUN of any target",
            "target `t` has no LUN"
        ]
    );
}

#[test]
fn secret_file_has_same_length_limits() {
    let file = std::env::temp_dir().join(format!("riserd-secret-{}", std::process::id()));
    let user = ChapUser {
        name: "host".into(),
        secret: Secret::File(file.clone()),
    };
    for (text, len) in [("short\n", 5), ("", 0), (&*"x".repeat(256), 256)] {
        std::fs::write(&file, text).unwrap();
        let error = user.credentials().unwrap_err().to_string();
        let why = format!(
            "{}: a secret must have 12 to 255 bytes, not {len}",
            file.display()
        );
        assert_eq!(error, why);
    }
    std::fs::write(&file, "twelve bytes\r\n").unwrap();
    assert_eq!(user.credentials().unwrap().secret, b"twelve bytes");
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn world_readable_secret_causes_warning() {
    use std::os::unix::fs::PermissionsExt;
    let dir = std::env::temp_dir().join(format!("riserd-readable-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (file, log) = (dir.join("secret"), dir.join("log"));
    std::fs::write(&file, "twelve bytes\n").unwrap();
    let user = ChapUser {
        name: "host".into(),
        secret: Secret::File(file.clone()),
    };
    let logged = |mode| {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let to = std::sync::Mutex::new(std::fs::File::create(&log).unwrap());
        let subscriber = tracing_subscriber::fmt().with_writer(to).finish();
        tracing::subscriber::with_default(subscriber, || user.credentials().unwrap());
        std::fs::read_to_string(&log).unwrap()
    };
    for mode in [0o600, 0o640] {
        assert_eq!(logged(mode), "");
    }
    let warning = logged(0o644);
    assert!(
        warning.contains("secret is readable by all users of this host"),
        "{warning}"
    );
    assert!(warning.contains(file.to_str().unwrap()), "{warning}");
    std::fs::remove_dir_all(&dir).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC*") {
        if let Err(e) = Config::parse(&text, "f") {
            prop_assert!(e.offset_in(&text) <= text.len());
        }
    }

    #[test]
    fn yaml_like_text_never_panics(text in "[a-c0-9:{}\\[\\],&*!|>'\"#% \n\t-]{0,80}") {
        if let Err(e) = Config::parse(&text, "f") {
            prop_assert!(e.line > 0 && e.column > 0);
            prop_assert!(e.offset_in(&text) <= text.len());
        }
    }

    #[test]
    fn damaged_examples_never_panic(at in 0..FULL.len(), len in 0usize..40, insert in "\\PC{0,8}") {
        let end = (at + len).min(FULL.len());
        let mut text = String::from_utf8_lossy(&FULL.as_bytes()[..at]).into_owned();
        text.push_str(&insert);
        text.push_str(&String::from_utf8_lossy(&FULL.as_bytes()[end..]));
        if let Err(e) = Config::parse(&text, "f") {
            prop_assert!(e.offset_in(&text) <= text.len());
        }
    }
}
