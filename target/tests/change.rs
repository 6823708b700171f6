//! A running server takes another configuration, over UDP on loopback addresses.

mod mini;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mini::{Mini, Said, cdb10, login_req, real};
use riser_scsi::srp::DataBuffer;
use riser_target::backend::{Fault, FaultOn, Faults, Store};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_target::server::reload::{ChangeError, check};
use riser_transport::roce::{Roce, RoceConfig};

fn addr(net: u8, host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 79, net, host))
}

/// A file of this test's own, gone when the value is.
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

/// Two backends, of which some are LUNs.
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
    let target = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let dst = SocketAddr::new(addr(net, 1), 5555);
    let mut mini = Mini::connect(dev, dst, &login_req(host, target), &mut real)
        .map_err(|(_, e)| e)
        .unwrap();
    mini.settle(&mut real);
    mini
}

/// TEST UNIT READY: status, and additional sense where there is some.
fn ready(mini: &mut Mini<Roce>, lun: u8) -> (u8, Option<[u8; 2]>) {
    mini.send_cmd(7, lun, &[0; 6], DataBuffer::None, DataBuffer::None);
    let answer = mini.answer(&mut real);
    let sense = answer.sense.get(12..14).map(|s| [s[0], s[1]]);
    (answer.status, sense.filter(|_| answer.status == 2))
}

const LUNS_CHANGED: (u8, Option<[u8; 2]>) = (2, Some([0x3f, 0x0e]));
const POWER_ON: (u8, Option<[u8; 2]>) = (2, Some([0x29, 0x00]));
const NO_SUCH_UNIT: (u8, Option<[u8; 2]>) = (2, Some([0x25, 0x00]));
const GOOD: (u8, Option<[u8; 2]>) = (0, None);

#[test]
fn a_unit_comes_and_goes() {
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
    let answer = mini.command(
        &report,
        DataBuffer::None,
        DataBuffer::Direct(into),
        &mut real,
    );
    assert_eq!(answer.status, 0);
    let list = mini.data.slice(0..24).unwrap().to_vec();
    assert_eq!(list[..4], [0, 0, 0, 16]);
    assert_eq!((list[9], list[17]), (0, 1));
    // The same once more changes nothing and tells nobody.
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
fn a_unit_goes_when_its_last_command_has_ended() {
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
    let refused = mini.answer(&mut real);
    assert_eq!((refused.tag, refused.status), (10, 2), "nothing new");
    let done = mini.answer(&mut real);
    assert_eq!(
        (done.tag, done.status),
        (9, 0),
        "what was under way ends well"
    );
    // The image is free for others then.
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

#[test]
fn whoever_may_not_log_in_any_more_is_logged_out() {
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
fn what_cannot_change_is_refused_whole() {
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
