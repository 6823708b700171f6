//! The whole server in this process, over UDP on loopback addresses.

mod mini;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use mini::{Mini, Said, config, login_req, real};
use riser_target::config::Config;
use riser_target::server::Server;
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
    let target = server.shared().targets[0].portals[0].target_port();
    let dst = SocketAddr::new(addr(net, 1), 5555);
    let mut mini = Mini::connect(dev, dst, &login_req(host, target), &mut real)
        .map_err(|(_, e)| e)
        .unwrap();
    mini.settle(&mut real);
    mini
}

#[test]
fn a_disk_over_udp_and_a_clean_end() {
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
    assert!(snapshot.sessions[0].memory.total() < 2 << 20);
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
    let used = server.snapshot().iter().filter(|s| s.logins > 0).count();
    assert!((1..=2).contains(&used));
    let logins: u64 = server.snapshot().iter().map(|s| s.logins).sum();
    assert_eq!(logins, 8);
    // A reset from one session reaches the others, whichever worker they are at.
    minis[0].send_tmf(5, riser_scsi::srp::TskMgmtFunction::LogicalUnitReset, 0);
    assert_eq!(minis[0].answer(&mut real).code, Some(0));
    let none = || riser_scsi::srp::DataBuffer::None;
    let answer = minis[7].command(&[0; 6], none(), none(), &mut real);
    assert_eq!(answer.status, 2);
    drop(server);
}

#[test]
fn an_idle_server_sleeps() {
    let server = start(3, 1, "");
    let _mini = connect(&server, 3, 2);
    std::thread::sleep(Duration::from_millis(300));
    let before = server.snapshot()[0].parks;
    std::thread::sleep(Duration::from_millis(500));
    let after = server.snapshot()[0].parks;
    assert!(
        after - before < 50,
        "{} wake-ups in half a second",
        after - before
    );
    server.shutdown().unwrap();
}

#[test]
fn a_backend_in_use_is_an_error_that_names_it() {
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
    let parse = |net| Config::parse(&text(net), "test.yaml").unwrap();
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
