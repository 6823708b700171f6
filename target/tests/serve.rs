//! Tests the entire server in this process, over UDP on loopback addresses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use std::sync::Arc;

use riser_scsi::srp::{DataBuffer, InitiatorPortId, LoginReq, MultiChannelAction, TskMgmtFunction};
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::mini::{Mini, Said, config, login_req, real};
use riser_test_peers::pdus::cdb10;
use riser_testkit::eventually;
use riser_transport::roce::{Roce, RoceConfig};

fn addr(net: u8, host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 77, net, host))
}

fn start(net: u8, workers: usize, rest: &str) -> Server {
    let text = config(addr(net, 1), workers, rest);
    Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap()
}

fn connect(server: &Server, net: u8, host: u8) -> Mini<Roce> {
    let dev = Roce::open(&RoceConfig::new(addr(net, host))).unwrap();
    let target = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let dst = SocketAddr::new(addr(net, 1), 5555);
    let mut mini = Mini::connected(dev, dst, &login_req(host, target), &mut real);
    mini.clear_unit_attention(&mut real);
    mini
}

#[test]
fn disk_over_udp_shuts_down_cleanly() {
    let server = start(1, 1, "");
    assert_eq!(server.addresses(), [SocketAddr::new(addr(1, 1), 5555)]);
    let mut mini = connect(&server, 1, 2);
    let data: Vec<u8> = (0..1 << 20).map(|i| (i % 253) as u8).collect();
    mini.data.write(0, &data);
    assert_eq!(mini.write(16, 2048, 0, &mut real).status, 0);
    assert_eq!(mini.read(16, 2048, 2 << 20, &mut real).status, 0);
    let back = mini.data.slice(2 << 20..3 << 20).unwrap().to_vec();
    assert!(back == data);
    assert_eq!(server.sessions(), 1);
    let snapshot = &server.snapshot()[0];
    assert_eq!(snapshot.sessions.len(), 1);
    assert!(snapshot.sessions[0].params.memory().total() < 2 << 20);
    let shutdown = std::thread::spawn(move || server.shutdown());
    assert_eq!(mini.next(&mut real), Said::Logout(0));
    mini.wait_closed(&mut real);
    let until = Instant::now() + Duration::from_secs(10);
    while !shutdown.is_finished() && Instant::now() < until {
        real(&mut mini.dev);
    }
    shutdown.join().unwrap().unwrap();
}

#[test]
fn sessions_spread_over_workers() {
    let server = start(2, 2, "");
    let mut minis: Vec<_> = (2..10).map(|host| connect(&server, 2, host)).collect();
    for (i, mini) in minis.iter_mut().enumerate() {
        mini.data.fill(0, 4096, i as u8 + 1);
        assert_eq!(mini.write(i as u32 * 8, 8, 0, &mut real).status, 0);
    }
    for (i, mini) in minis.iter_mut().enumerate() {
        let other = (i + 3) % 8;
        assert_eq!(mini.read(other as u32 * 8, 8, 8192, &mut real).status, 0);
        let got = mini.data.slice(8192..12288).unwrap().to_vec();
        assert!(got.iter().all(|&b| b == other as u8 + 1));
    }
    let used = server
        .snapshot()
        .iter()
        .filter(|s| s.logins.total() > 0)
        .count();
    assert!((1..=2).contains(&used));
    let logins: u64 = server.snapshot().iter().map(|s| s.logins.total()).sum();
    assert_eq!(logins, 8);
    // A reset from one session is reported to all other sessions on any worker.
    minis[0].send_tmf(5, TskMgmtFunction::LogicalUnitReset, 0);
    assert_eq!(minis[0].receive_response(&mut real).code, Some(0));
    let none = || DataBuffer::None;
    let response = minis[7].command(&[0; 6], none(), none(), &mut real);
    assert_eq!(response.status, 2);
    drop(server);
}

/// Creates two sessions on different workers.
fn pair(server: &Server, net: u8) -> (Mini<Roce>, Mini<Roce>) {
    let worker_of = |host: u8| {
        let initiator = InitiatorPortId([host; 16]);
        let all = server.snapshot();
        let mut sessions = all.iter().flat_map(|s| &s.sessions);
        sessions
            .find(|s| s.initiator == initiator)
            .map(|s| s.worker)
    };
    let first = connect(server, net, 2);
    for host in 3..40 {
        let other = connect(server, net, host);
        if worker_of(host) != worker_of(2) {
            return (first, other);
        }
        drop(other.disconnect(&mut real));
    }
    panic!("every session is at one worker");
}

#[test]
fn reset_waits_for_other_workers() {
    let mut parsed = Config::parse(&config(addr(6, 1), 2, ""), "test.yaml").unwrap();
    let slow = Fault {
        on: FaultOn::Read,
        offset: 0,
        len: 512,
        times: None,
        delay: Duration::from_secs(60),
        error: None,
    };
    parsed.backends[0].spec.faults = Some(Arc::new(Faults::new(vec![slow])));
    let server = Server::start(&parsed).unwrap();
    let (mut a, mut b) = pair(&server, 6);
    let desc = b.desc(0, 512);
    b.send_cmd(
        4,
        0,
        &cdb10(0x28, 0, 1),
        DataBuffer::None,
        DataBuffer::Direct(desc),
    );
    let until = Instant::now() + Duration::from_secs(5);
    while server.shared().registry.catalog().targets[0].units[0]
        .1
        .tasks()
        == 0
    {
        assert!(Instant::now() < until);
        real(&mut b.dev);
    }
    // A task is added to its set before the command is started, and a command that starts after the
    // reset reports its unit attention. Workers respond to this query after the iteration in which
    // the command was started.
    drop(server.snapshot());
    a.send_tmf(5, TskMgmtFunction::LogicalUnitReset, 0);
    let both = |a: &mut Mini<Roce>, b: &mut Mini<Roce>| {
        real(&mut a.dev);
        real(&mut b.dev);
        a.poll();
        b.poll();
    };
    while a.said.is_empty() || b.said.is_empty() {
        assert!(Instant::now() < until, "{:?} {:?}", a.said, b.said);
        both(&mut a, &mut b);
    }
    let Some(Said::Response(response)) = a.said.pop_front() else {
        panic!("expected a response");
    };
    assert_eq!((response.tag, response.code), (5, Some(0)));
    let Some(Said::Response(ended)) = b.said.pop_front() else {
        panic!("TASK ABORTED");
    };
    assert_eq!((ended.tag, ended.status, ended.delta), (4, 0x40, 1));
    assert_eq!(
        server.shared().registry.catalog().targets[0].units[0]
            .1
            .tasks(),
        0
    );
    drop(server);
}

#[test]
fn new_login_closes_channels_on_other_workers() {
    let server = start(7, 2, "");
    let target = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let dst = SocketAddr::new(addr(7, 1), 5555);
    let mut req = login_req(1, target);
    req.multi_channel = MultiChannelAction::Multi;
    let log_in = |host: u8, req: &LoginReq| {
        let dev = Roce::open(&RoceConfig::new(addr(7, host))).unwrap();
        let mut mini = Mini::connected(dev, dst, req, &mut real);
        // When a command was completed, the target knows that the connection is established.
        // Otherwise there would be no T_LOGOUT.
        let none = || DataBuffer::None;
        mini.command(&[0; 6], none(), none(), &mut real);
        mini
    };
    let mut old: Vec<_> = (2..8).map(|host| log_in(host, &req)).collect();
    assert_eq!(server.sessions(), 1);
    req.multi_channel = MultiChannelAction::Single;
    let _new = log_in(9, &req);
    for mini in &mut old {
        assert_eq!(mini.next(&mut real), Said::Logout(4));
        mini.wait_closed(&mut real);
    }
    assert_eq!(server.sessions(), 1);
    drop(server);
}

/// Anyone can send a login request.
#[test]
fn half_open_login_takes_no_pool_memory() {
    let text = config(addr(8, 1), 1, "limits: { buffer_pool_mib: 8 }\n");
    let mut parsed = Config::parse(&text, "test.yaml").unwrap();
    parsed.backends[0].spec.faults = Some(Arc::new(Faults::new(vec![Fault {
        on: FaultOn::Read,
        offset: 0,
        len: 16 << 20,
        times: None,
        delay: Duration::from_secs(20),
        error: None,
    }])));
    let server = Server::start(&parsed).unwrap();
    let mut mini = connect(&server, 8, 2);
    let target = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let half_open: Vec<_> = (3..6)
        .map(|host| {
            let mut dev = Roce::open(&RoceConfig::new(addr(8, host))).unwrap();
            let mut request = vec![0; 56];
            login_req(host, target).emit_rdma(&mut request);
            Mini::request(
                &mut dev,
                SocketAddr::new(addr(8, 1), 5555),
                request,
                &mut real,
            );
            dev
        })
        .collect();
    eventually("logins", Duration::from_secs(5), || {
        server.snapshot()[0].logins.total() == 4
    });
    for n in 0..16 {
        let into = DataBuffer::Direct(mini.desc(0, 512 << 10));
        mini.send_cmd(100 + n, 0, &cdb10(0x28, 0, 1024), DataBuffer::None, into);
    }
    eventually("a pool in use", Duration::from_secs(10), || {
        real(&mut mini.dev);
        server.snapshot()[0].pool_free == 0
    });
    drop((server, half_open));
}

/// A worker that doesn't sleep for no reason would run one or more iterations for each query of its
/// sleep counter. A sleeping worker only wakes up for the query, and rarely for a timer.
#[test]
fn idle_server_sleeps() {
    const QUESTIONS: u64 = 20;
    let server = start(3, 1, "");
    let _mini = connect(&server, 3, 2);
    // First, wait for remaining work after the login. We don't need a time limit, because each
    // attempt is checked separately.
    eventually("a worker that sleeps", Duration::from_secs(60), || {
        let before = server.snapshot()[0].parks;
        let mut last = before;
        for _ in 0..QUESTIONS {
            last = server.snapshot()[0].parks;
        }
        last - before <= 2 * QUESTIONS
    });
    server.shutdown().unwrap();
}

#[test]
fn backend_in_use_is_reported_by_name() {
    let file = std::env::temp_dir().join(format!("riser-serve-{}.img", std::process::id()));
    let text = |net| {
        config(addr(net, 1), 1, "").replace(
            "{ kind: ram, size: 16MiB }",
            &format!(
                "{{ kind: file, path: {}, size: 1MiB, create: true }}",
                file.display()
            ),
        )
    };
    let parse = |net| {
        let text = format!("strict: true\n{}", text(net));
        Config::parse(&text, "test.yaml").unwrap()
    };
    let first = Server::start(&parse(4)).unwrap();
    let error = Server::start(&parse(5)).unwrap_err().to_string();
    assert!(
        error.starts_with("backend d: ") && error.contains("in use"),
        "{error}"
    );
    first.shutdown().unwrap();
    Server::start(&parse(5)).unwrap().shutdown().unwrap();
    std::fs::remove_file(file).unwrap();
}
