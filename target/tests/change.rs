//! Changes the configuration of a running server, over UDP on loopback addresses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::opcode::Kind;
use riser_scsi::srp::{DataBuffer, InitiatorPortId, TskMgmtFunction};
use riser_target::backend::{Fault, FaultOn, Faults, Store};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_target::server::reload::{ChangeError, check};
use riser_test_peers::mini::{Mini, Said, login_req, real};
use riser_test_peers::pdus::cdb10;
use riser_testkit::eventually;
use riser_transport::roce::{Roce, RoceConfig};

fn addr(net: u8, host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 79, net, host))
}

/// A file used in this test, which is removed on drop.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let name = format!("riser-change-{}-{name}.img", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        Self(path)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Creates a configuration with two backends and these LUNs.
fn text(net: u8, image: &Image, luns: &str, rest: &str) -> Config {
    let text = format!(
        "backends:\n  d: {{ kind: ram, size: 16MiB }}\n  e: {{ kind: file, path: {} }}\n\
         targets:\n  - name: t\n    portals: [{{ protocol: srp, listen: \"{}\" }}]\n    \
         luns: {luns}\n    {rest}\nworkers: {{ count: 2 }}\n",
        image.0.display(),
        SocketAddr::new(addr(net, 1), 5555),
    );
    Config::parse(&text, "test.yaml").unwrap()
}

fn connect(server: &Server, net: u8, host: u8) -> Mini<Roce> {
    let dev = Roce::open(&RoceConfig::new(addr(net, host))).unwrap();
    connect_on(dev, server, net, host)
}

fn connect_on(dev: Roce, server: &Server, net: u8, host: u8) -> Mini<Roce> {
    let target = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let dst = SocketAddr::new(addr(net, 1), 5555);
    let mut mini = Mini::connected(dev, dst, &login_req(host, target), &mut real);
    mini.clear_unit_attention(&mut real);
    mini
}

/// Sends TEST UNIT READY. Returns the status, and ASC and ASCQ if there is sense data.
fn ready(mini: &mut Mini<Roce>, lun: u8) -> (u8, Option<[u8; 2]>) {
    mini.send_cmd(7, lun, &[0; 6], DataBuffer::None, DataBuffer::None);
    let response = mini.receive_response(&mut real);
    let sense = response.sense.get(12..14).map(|s| [s[0], s[1]]);
    (response.status, sense.filter(|_| response.status == 2))
}

const LUNS_CHANGED: (u8, Option<[u8; 2]>) = (2, Some([0x3f, 0x0e]));
const POWER_ON: (u8, Option<[u8; 2]>) = (2, Some([0x29, 0x00]));
const NO_SUCH_UNIT: (u8, Option<[u8; 2]>) = (2, Some([0x25, 0x00]));
const GOOD: (u8, Option<[u8; 2]>) = (0, None);

#[test]
fn unit_is_added_and_removed() {
    let image = Image::new("comes");
    let mut server = Server::start(&text(1, &image, "{ 0: d }", "access: open")).unwrap();
    let mut mini = connect(&server, 1, 2);
    assert_eq!(ready(&mut mini, 1), NO_SUCH_UNIT);
    let both = text(1, &image, "{ 0: d, 1: e }", "access: open");
    server.change(both.clone()).unwrap();
    assert_eq!(ready(&mut mini, 0), LUNS_CHANGED);
    assert_eq!(ready(&mut mini, 0), GOOD);
    assert_eq!(ready(&mut mini, 1), POWER_ON);
    assert_eq!(ready(&mut mini, 1), LUNS_CHANGED);
    assert_eq!(ready(&mut mini, 1), GOOD);
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let into = mini.desc(0, 256);
    let response = mini.command(
        &report,
        DataBuffer::None,
        DataBuffer::Direct(into),
        &mut real,
    );
    assert_eq!(response.status, 0);
    let list = mini.data.slice(0..24).unwrap().to_vec();
    assert_eq!(list[..4], [0, 0, 0, 16]);
    assert_eq!((list[9], list[17]), (0, 1));
    // The same configuration again must not change anything, and must not notify any session.
    server.change(both).unwrap();
    assert_eq!(ready(&mut mini, 0), GOOD);
    server
        .change(text(1, &image, "{ 0: d }", "access: open"))
        .unwrap();
    assert_eq!(ready(&mut mini, 0), LUNS_CHANGED);
    assert_eq!(ready(&mut mini, 1), NO_SUCH_UNIT);
    server.shutdown().unwrap();
}

#[test]
fn removed_unit_waits_for_last_command() {
    let image = Image::new("goes");
    let mut parsed = text(2, &image, "{ 0: d, 1: e }", "access: open");
    let slow = Fault {
        on: FaultOn::Write,
        offset: 0,
        len: 512,
        times: None,
        delay: Duration::from_millis(500),
        error: None,
    };
    parsed.backends[1].spec.faults = Some(Arc::new(Faults::new(vec![slow])));
    let mut server = Server::start(&parsed).unwrap();
    let mut mini = connect(&server, 2, 2);
    assert_eq!(ready(&mut mini, 1), POWER_ON);
    mini.data.fill(0, 512, 0x5a);
    let desc = mini.desc(0, 512);
    let write = cdb10(0x2a, 0, 1);
    mini.send_cmd(9, 1, &write, DataBuffer::Direct(desc), DataBuffer::None);
    let unit = Arc::clone(&server.shared().registry.catalog().targets[0].units[1].1);
    let until = Instant::now() + Duration::from_secs(10);
    while unit.tasks() == 0 {
        assert!(Instant::now() < until);
        real(&mut mini.dev);
    }
    drop(unit);
    server
        .change(text(2, &image, "{ 0: d }", "access: open"))
        .unwrap();
    mini.send_cmd(10, 1, &[0; 6], DataBuffer::None, DataBuffer::None);
    let refused = mini.receive_response(&mut real);
    assert_eq!((refused.tag, refused.status), (10, 2), "nothing new");
    let done = mini.receive_response(&mut real);
    assert_eq!(
        (done.tag, done.status),
        (9, 0),
        "what was under way ends well"
    );
    // The image is available for another process.
    let spec = &text(2, &image, "{ 0: e }", "access: open").backends[1].spec;
    let free = loop {
        match Store::open(spec) {
            Ok(store) => break store,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        real(&mut mini.dev);
    };
    drop(free);
    assert_eq!(std::fs::read(&image.0).unwrap()[..512], [0x5a; 512]);
    server.shutdown().unwrap();
}

/// If a command is waiting for a rate limit, it must not keep the backend of a removed unit open.
#[test]
fn removed_unit_has_no_rate_limits() {
    let image = Image::new("limits");
    let mut parsed = text(17, &image, "{ 0: d, 1: e }", "access: open");
    parsed.backends[1].limits.bandwidth = Some(4096);
    let mut server = Server::start(&parsed).unwrap();
    let mut mini = connect(&server, 17, 2);
    assert_eq!(ready(&mut mini, 1), POWER_ON);
    // VERIFY (10) that would take more than four minutes.
    let verify = cdb10(0x2f, 0, 2048);
    mini.send_cmd(8, 1, &verify, DataBuffer::None, DataBuffer::None);
    assert_eq!(mini.receive_response(&mut real).status, 0);
    mini.send_cmd(9, 1, &verify, DataBuffer::None, DataBuffer::None);
    let unit = Arc::clone(&server.shared().registry.catalog().targets[0].units[1].1);
    let until = Instant::now() + Duration::from_secs(10);
    while unit.tasks() == 0 {
        assert!(Instant::now() < until);
        real(&mut mini.dev);
    }
    server
        .change(text(17, &image, "{ 0: d }", "access: open"))
        .unwrap();
    assert!(!unit.limits.is_active());
    let done = mini.receive_response(&mut real);
    assert_eq!((done.tag, done.status), (9, 0));
    server.shutdown().unwrap();
}

/// Limits must not depend on the name used by an initiator, unless its rule is for this name.
#[test]
fn rule_selects_limits_by_name_or_address() {
    let image = Image::new("rules");
    let rules = "access:\n      - { iqn: \"iqn.2026-01.com.example:v\", address: 127.79.18.2, limits: { iops: 9 } }\n      \
                 - { address: 127.79.18.0/24, limits: { iops: 9 } }";
    let server = Server::start(&text(18, &image, "{ 0: d }", rules)).unwrap();
    let catalog = server.shared().registry.catalog();
    let target = &catalog.targets[0];
    let of = |name: &str, host| {
        let name = IscsiName::new(&format!("iqn.2026-01.com.example:{name}")).unwrap();
        let luns = target.luns_of_name(&name, addr(18, host)).unwrap();
        Arc::as_ptr(luns.limiter().unwrap())
    };
    let port = InitiatorPortId([7; 16]);
    let of_port = |host| {
        let luns = target.luns_of(&port, addr(18, host)).unwrap();
        Arc::as_ptr(luns.limiter().unwrap())
    };
    let keep = [2, 3, 4].map(|host| {
        let name = IscsiName::new("iqn.2026-01.com.example:v").unwrap();
        target.luns_of_name(&name, addr(18, host)).unwrap()
    });
    assert_eq!(of("v", 2), of("v", 2));
    assert_ne!(of("v", 2), of("v", 3), "another rule");
    assert_eq!(of("v", 3), of("w", 3), "one address");
    assert_eq!(of("v", 3), of_port(3));
    assert_ne!(of("v", 3), of("v", 4));
    drop(keep);
    drop(catalog);
    server.shutdown().unwrap();
}

#[test]
fn denied_initiator_is_logged_out() {
    let image = Image::new("access");
    let mut server = Server::start(&text(3, &image, "{ 0: d }", "access: open")).unwrap();
    let (mut out, mut stays) = (connect(&server, 3, 2), connect(&server, 3, 3));
    let rules = "access: [{ address: 127.79.3.3 }]";
    server.change(text(3, &image, "{ 0: d }", rules)).unwrap();
    assert_eq!(out.next(&mut real), Said::Logout(0));
    out.wait_closed(&mut real);
    assert_eq!(ready(&mut stays, 0), GOOD);
    server.shutdown().unwrap();
}

#[test]
fn unsupported_change_is_rejected_completely() {
    let image = Image::new("refused");
    let old = text(4, &image, "{ 0: d }", "access: open");
    let mut more = text(4, &image, "{ 0: d, 1: e }", "access: open");
    more.limits.buffer_pool /= 2;
    let refused = |new: &Config| match check(&old, new, u32::MAX, &|_| false) {
        Err(ChangeError::NeedsRestart(what) | ChangeError::InUse(what)) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&more), "/limits/buffer_pool_mib");
    let mut other = old.clone();
    other.workers.count = Some(1);
    assert_eq!(refused(&other), "/workers");
    let mut other = old.clone();
    other.backends[0].thin = !other.backends[0].thin;
    assert_eq!(refused(&other), "d");
    let mut other = old.clone();
    other.backends[0].threshold = Some(50);
    let threshold = check(&old, &other, u32::MAX, &|_| false);
    assert!(matches!(threshold, Err(ChangeError::Threshold(name)) if name == "d"));
    let mut other = old.clone();
    other.backends[1].thin = !other.backends[1].thin;
    assert!(
        check(&old, &other, u32::MAX, &|_| false).is_ok(),
        "it is not in use"
    );
    let mut server = Server::start(&old).unwrap();
    let mut mini = connect(&server, 4, 2);
    assert!(server.change(more).is_err());
    let mut missing = text(4, &image, "{ 0: d, 1: e }", "access: open");
    std::fs::remove_file(&image.0).unwrap();
    missing.limits = old.limits;
    assert!(matches!(
        server.change(missing),
        Err(ChangeError::Server(_))
    ));
    assert_eq!(ready(&mut mini, 0), GOOD);
    assert_eq!(ready(&mut mini, 1), NO_SUCH_UNIT);
    server.shutdown().unwrap();
}

/// Creates a configuration with LUN mappings by rule. `first` is the mapping for host 127.79.NET.2.
fn mapped(net: u8, image: &Image, first: &str, faults: Option<&Arc<Faults>>) -> Config {
    let rules = format!(
        "access: [{{ address: 127.79.{net}.2, luns: {first} }}, {{ address: 127.79.{net}.3, luns: [0] }}]"
    );
    let mut config = text(net, image, "{ 0: d, 1: e }", &rules);
    config.backends[1].spec.faults = faults.cloned();
    config
}

/// Sends a command that reads. Returns its status and data.
fn read(mini: &mut Mini<Roce>, lun: u8, cdb: &[u8], len: u32) -> (u8, Vec<u8>) {
    let into = DataBuffer::Direct(mini.desc(0, len));
    mini.data.fill(0, len as usize, 0);
    mini.send_cmd(11, lun, cdb, DataBuffer::None, into);
    let response = mini.receive_response(&mut real);
    let data = mini.data.slice(0..len as usize).unwrap().to_vec();
    (response.status, data)
}

fn write(mini: &mut Mini<Roce>, lun: u8, byte: u8) -> u8 {
    mini.data.fill(0, 512, byte);
    let from = DataBuffer::Direct(mini.desc(0, 512));
    mini.send_cmd(12, lun, &cdb10(0x2a, 0, 1), from, DataBuffer::None);
    mini.receive_response(&mut real).status
}

/// Returns the LUNs from REPORT LUNS.
fn numbers(mini: &mut Mini<Roce>, lun: u8) -> Vec<u8> {
    let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let (status, list) = read(mini, lun, &report, 256);
    assert_eq!(status, 0);
    let len = u32::from_be_bytes(list[..4].try_into().unwrap()) as usize;
    list[8..8 + len].chunks(8).map(|entry| entry[1]).collect()
}

const INQUIRY: [u8; 6] = [0x12, 0, 0, 0, 36, 0];
/// CDB to read the Device Identification page, which contains the names of the unit.
const NAMES: [u8; 6] = [0x12, 1, 0x83, 0, 64, 0];

/// Sends TEST UNIT READY until it is successful. Returns all responses.
fn until_ready(mini: &mut Mini<Roce>, lun: u8) -> Vec<(u8, Option<[u8; 2]>)> {
    let mut said = Vec::new();
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match ready(mini, lun) {
            GOOD => return said,
            other => said.push(other),
        }
        assert!(Instant::now() < until, "{said:?}");
        real(&mut mini.dev);
    }
}

/// Checks that all commands for this LUN fail.
fn assert_held_back(mini: &mut Mini<Roce>, lun: u8) {
    for _ in 0..4 {
        assert_eq!(ready(mini, lun), LUNS_CHANGED);
        assert_eq!(write(mini, lun, 0x77), 2);
    }
}

#[test]
fn initiators_have_separate_luns() {
    let image = Image::new("numbers");
    let first = mapped(5, &image, "{ 0: e, 5: d }", None);
    let mut server = Server::start(&first).unwrap();
    let (mut one, mut other) = (connect(&server, 5, 2), connect(&server, 5, 3));
    assert_eq!(numbers(&mut one, 0), [0, 5]);
    assert_eq!(numbers(&mut other, 0), [0]);
    assert_eq!(ready(&mut one, 5), POWER_ON);
    let block = cdb10(0x28, 0, 1);
    assert_eq!(write(&mut one, 5, 0xd5), 0);
    assert_eq!(read(&mut other, 0, &block, 512), (0, vec![0xd5; 512]));
    assert_eq!(read(&mut one, 0, &block, 512), (0, vec![0; 512]));
    let (status, absent) = read(&mut one, 3, &INQUIRY, 36);
    assert_eq!((status, absent[0]), (0, 0x7f));
    assert_eq!(ready(&mut one, 3), NO_SUCH_UNIT);

    // A registration is for the unit and not for the LUN.
    let register = [0x5f, 0x06, 0, 0, 0, 0, 0, 0, 24, 0];
    let mut list = [0; 24];
    list[15] = 7;
    one.data.write(0, &list);
    let from = DataBuffer::Direct(one.desc(0, 24));
    one.send_cmd(13, 5, &register, from, DataBuffer::None);
    assert_eq!(one.receive_response(&mut real).status, 0);

    // The unit moves to another LUN. Initiators with an unchanged mapping must not notice this.
    let second = mapped(5, &image, "{ 0: e, 6: d }", None);
    server.change(second).unwrap();
    assert_eq!(ready(&mut other, 0), GOOD);
    assert_eq!(ready(&mut one, 0), LUNS_CHANGED);
    assert_eq!(ready(&mut one, 0), GOOD);
    assert_eq!(ready(&mut one, 5), NO_SUCH_UNIT);
    assert_eq!(ready(&mut one, 6), LUNS_CHANGED);
    assert_eq!(numbers(&mut one, 6), [0, 6]);
    let keys = [0x5e, 0, 0, 0, 0, 0, 0, 0, 16, 0];
    for (mini, lun) in [(&mut one, 6), (&mut other, 0)] {
        let (status, found) = read(mini, lun, &keys, 16);
        assert_eq!((status, found[7], found[15]), (0, 8, 7));
    }
    server.shutdown().unwrap();
}

/// A LUN is mapped to another unit while commands for the previous unit are in flight.
#[test]
fn moved_lun_requires_identification() {
    let image = Image::new("moved");
    let mut server = Server::start(&mapped(6, &image, "{ 0: d, 4: d }", None)).unwrap();
    let mut mini = connect(&server, 6, 2);
    assert_eq!(ready(&mut mini, 4), GOOD);
    server
        .change(mapped(6, &image, "{ 0: d, 4: e }", None))
        .unwrap();
    assert_held_back(&mut mini, 4);
    // Standard INQUIRY data doesn't identify a unit, and neither does the header of the page.
    assert_eq!(read(&mut mini, 4, &INQUIRY, 36).0, 0);
    assert_eq!(read(&mut mini, 4, &[0x12, 1, 0x83, 0, 4, 0], 4).0, 0);
    assert_held_back(&mut mini, 4);
    assert_eq!(std::fs::read(&image.0).unwrap()[..512], [0; 512]);
    assert_eq!(read(&mut mini, 4, &NAMES, 64).0, 0);
    // Now the initiator has identified the unit, which also reports its own unit attention.
    let said = until_ready(&mut mini, 4);
    assert!(said.contains(&POWER_ON), "{said:?}");
    assert_eq!(write(&mut mini, 4, 0x78), 0);
    server.shutdown().unwrap();
}

/// Commands that an initiator sends together with the INQUIRY may be intended for the previous
/// unit.
#[test]
fn commands_before_inquiry_response_are_rejected() {
    let image = Image::new("together");
    let mut server = Server::start(&mapped(13, &image, "{ 0: d, 4: d }", None)).unwrap();
    let mut mini = connect(&server, 13, 2);
    assert_eq!(ready(&mut mini, 4), GOOD);
    server
        .change(mapped(13, &image, "{ 0: d, 4: e }", None))
        .unwrap();
    mini.data.fill(0, 512, 0x77);
    let into = DataBuffer::Direct(mini.desc(1024, 64));
    mini.send_cmd(20, 4, &NAMES, DataBuffer::None, into);
    for tag in 21..24 {
        let from = DataBuffer::Direct(mini.desc(0, 512));
        mini.send_cmd(tag, 4, &cdb10(0x2a, 0, 1), from, DataBuffer::None);
    }
    for _ in 20..24 {
        let response = mini.receive_response(&mut real);
        assert_eq!(response.status == 0, response.tag == 20);
    }
    assert_eq!(std::fs::read(&image.0).unwrap()[..512], [0; 512]);
    until_ready(&mut mini, 4);
    server.shutdown().unwrap();
}

/// If a LUN was temporarily removed, it must still be identified when it's mapped to another unit,
/// but not if it's mapped to the same unit again.
#[test]
fn removed_luns_still_require_identification() {
    let image = Image::new("again");
    let mut server = Server::start(&mapped(12, &image, "{ 0: d, 4: d }", None)).unwrap();
    let mut mini = connect(&server, 12, 2);
    assert_eq!(ready(&mut mini, 4), GOOD);
    let change = |server: &mut Server, luns: &str| {
        server.change(mapped(12, &image, luns, None)).unwrap();
    };
    change(&mut server, "{ 0: d, 4: e }");
    assert_held_back(&mut mini, 4);
    change(&mut server, "{ 0: d, 4: d }");
    until_ready(&mut mini, 4);
    change(&mut server, "{ 0: d }");
    assert_eq!(ready(&mut mini, 4), NO_SUCH_UNIT);
    change(&mut server, "{ 0: d, 4: e }");
    assert_held_back(&mut mini, 4);
    // Adding another LUN doesn't change this.
    change(&mut server, "{ 0: d, 4: e, 5: d }");
    assert_held_back(&mut mini, 4);
    assert_eq!(std::fs::read(&image.0).unwrap()[..512], [0; 512]);
    assert_eq!(read(&mut mini, 4, &NAMES, 64).0, 0);
    until_ready(&mut mini, 4);
    server.shutdown().unwrap();
}

/// Returns faults that delay writes to the first block.
fn slow_writes() -> Arc<Faults> {
    Arc::new(Faults::new(vec![Fault {
        on: FaultOn::Write,
        offset: 0,
        len: 512,
        times: None,
        delay: Duration::from_millis(800),
        error: None,
    }]))
}

/// If a LUN has moved, aborting its commands on the previous unit must only abort commands of the
/// same initiator on the new unit.
#[test]
fn functions_for_moved_lun_spare_others() {
    let image = Image::new("others");
    let faults = Some(slow_writes());
    let config = |number: &str| {
        let rules = format!(
            "access: [{{ address: 127.79.15.2, luns: {{ 0: d, 4: {number} }} }}, \
             {{ address: 127.79.15.3, luns: {{ 0: e }} }}]"
        );
        let mut config = text(15, &image, "{ 0: d, 1: e }", &rules);
        config.backends[1].spec.faults = faults.clone();
        config
    };
    let mut server = Server::start(&config("d")).unwrap();
    let (mut mini, mut other) = (connect(&server, 15, 2), connect(&server, 15, 3));
    assert_eq!(ready(&mut mini, 4), GOOD);
    server.change(config("e")).unwrap();
    let unit = Arc::clone(&server.shared().registry.catalog().targets[0].units[1].1);
    let functions = [
        TskMgmtFunction::LogicalUnitReset,
        TskMgmtFunction::ClearTaskSet,
    ];
    for (tag, function) in (30..).zip(functions) {
        let from = DataBuffer::Direct(other.desc(0, 512));
        other.send_cmd(9, 0, &cdb10(0x2a, 0, 1), from, DataBuffer::None);
        let until = Instant::now() + Duration::from_secs(10);
        while unit.tasks() == 0 {
            assert!(Instant::now() < until);
            real(&mut other.dev);
        }
        mini.send_tmf_to(tag, 4, function, 0);
        assert_eq!(mini.receive_response(&mut real).code, Some(0));
        assert_eq!(other.receive_response(&mut real).status, 0, "{function:?}");
        assert_eq!(ready(&mut other, 0), GOOD);
    }
    assert_eq!(unit.management().resets, 0);
    drop(unit);
    server.shutdown().unwrap();
}

/// An initiator that logs in again, with or without an existing session, continues to use its
/// disks.
#[test]
fn login_does_not_replace_lun_identification() {
    let image = Image::new("login");
    let mut server = Server::start(&mapped(14, &image, "{ 0: d, 4: d }", None)).unwrap();
    let mut first = connect(&server, 14, 2);
    assert_eq!(ready(&mut first, 4), GOOD);
    server
        .change(mapped(14, &image, "{ 0: d, 4: e }", None))
        .unwrap();
    assert_held_back(&mut first, 4);
    let mut second = connect_on(first.dev, &server, 14, 2);
    assert_held_back(&mut second, 4);
    // The next session is closed before the change.
    server
        .change(mapped(14, &image, "{ 0: d, 4: d }", None))
        .unwrap();
    until_ready(&mut second, 4);
    let dev = second.disconnect(&mut real);
    eventually("the session to end", Duration::from_secs(60), || {
        server.shared().registry.sessions() == 0
    });
    server
        .change(mapped(14, &image, "{ 0: d, 4: e }", None))
        .unwrap();
    let mut third = connect_on(dev, &server, 14, 2);
    assert_held_back(&mut third, 4);
    assert_eq!(std::fs::read(&image.0).unwrap()[..512], [0; 512]);
    assert_eq!(read(&mut third, 4, &NAMES, 64).0, 0);
    until_ready(&mut third, 4);
    server.shutdown().unwrap();
}

/// A unit is moved to another number on its target, while the LUN for an initiator doesn't change.
/// Commands must be counted for the current number.
#[test]
fn commands_are_counted_for_current_lun() {
    let image = Image::new("counted");
    let config = |luns: &str| {
        let rules = "access: [{ address: 127.79.16.2, luns: { 0: d, 1: e } }]";
        text(16, &image, luns, rules)
    };
    let mut server = Server::start(&config("{ 0: d, 1: e }")).unwrap();
    let mut mini = connect(&server, 16, 2);
    assert_eq!(ready(&mut mini, 1), POWER_ON);
    server.change(config("{ 0: d, 3: e }")).unwrap();
    for _ in 0..3 {
        assert_eq!(ready(&mut mini, 1), GOOD);
    }
    let stats = Arc::clone(&server.shared().registry.catalog().targets[0].stats[1]);
    assert_eq!(stats.lun(), 3);
    // After the last response was sent, it can take some time until it's counted.
    let counted = || stats.total(Kind::Other).total.count();
    let until = Instant::now() + Duration::from_secs(10);
    while counted() < 3 {
        assert!(Instant::now() < until, "{}", counted());
        real(&mut mini.dev);
    }
    server.shutdown().unwrap();
}

/// If a LUN is mapped to another unit or removed, commands in flight can still be aborted using
/// this LUN.
#[test]
fn functions_abort_commands_of_previous_unit() {
    let image = Image::new("functions");
    let faults = slow_writes();
    let faults = Some(&faults);
    for (net, after, function) in [
        (7, "{ 0: d, 1: d }", TskMgmtFunction::AbortTask),
        (8, "{ 0: d }", TskMgmtFunction::AbortTask),
        (9, "{ 0: d, 1: d }", TskMgmtFunction::LogicalUnitReset),
        (10, "{ 0: d }", TskMgmtFunction::AbortTaskSet),
    ] {
        let mut server = Server::start(&mapped(net, &image, "{ 0: d, 1: e }", faults)).unwrap();
        let mut mini = connect(&server, net, 2);
        assert_eq!(ready(&mut mini, 1), POWER_ON);
        let from = DataBuffer::Direct(mini.desc(0, 512));
        mini.send_cmd(9, 1, &cdb10(0x2a, 0, 1), from, DataBuffer::None);
        let unit = Arc::clone(&server.shared().registry.catalog().targets[0].units[1].1);
        let until = Instant::now() + Duration::from_secs(10);
        while unit.tasks() == 0 {
            assert!(Instant::now() < until);
            real(&mut mini.dev);
        }
        server.change(mapped(net, &image, after, faults)).unwrap();
        mini.send_tmf_to(10, 1, function, 9);
        let response = mini.receive_response(&mut real);
        assert_eq!(
            (response.tag, response.code),
            (10, Some(0)),
            "{after} {function:?}"
        );
        assert_eq!(unit.tasks(), 0, "the response waits for the command");
        drop(unit);
        server.shutdown().unwrap();
    }
}
