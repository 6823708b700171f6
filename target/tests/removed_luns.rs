//! Tests LUNs that are removed and added again while their backends are kept.

use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::open_target;
use riser_test_peers::tcp::{Client, free_port};

const IQN: &str = "iqn.2026-01.org.example:removed";

const RESERVATION_CONFLICT: u8 = 0x18;

fn config(port: u16, luns: &str) -> Config {
    let portals = [("iscsi", format!("127.0.0.1:{port}"))];
    let backends = "disk: { kind: ram, size: 1MiB }, other: { kind: ram, size: 1MiB }";
    let text = open_target(IQN, &portals, backends, luns, "workers: { count: 1 }\n");
    Config::parse(&text, "test.yaml").unwrap()
}

#[test]
fn reservation_survives_removal_of_lun() {
    let port = free_port();
    let with = config(port, "0: disk, 1: other");
    let without = config(port, "1: other");
    let log_in = |isid| {
        let mut client = Client::login(port, IQN, isid, None).unwrap();
        client.command(&[0; 6], false, 0, &[]);
        client
    };
    let write = |client: &mut Client| {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        client.command(&cdb, true, 512, &[7; 512]).0
    };
    let mut server = Server::start(&with).unwrap();
    let mut holder = log_in(1);
    assert_eq!(holder.reserve_out(0, 0, 0, 0xa), 0, "REGISTER");
    assert_eq!(holder.reserve_out(1, 5, 0xa, 0), 0, "RESERVE");
    assert_eq!(write(&mut log_in(2)), RESERVATION_CONFLICT);
    drop(holder);
    server.change(without.clone()).unwrap();
    server.change(with.clone()).unwrap();
    assert_eq!(write(&mut log_in(3)), RESERVATION_CONFLICT);
    let generation = server.unit_on("disk").unwrap().lu.registrations();
    assert_eq!((generation.generation, generation.kind), (1, Some(5)));
    // A server that takes over in the meantime must also keep it.
    server.change(without.clone()).unwrap();
    let state = server.export_state(Vec::new()).unwrap();
    let mut server = Server::start_after(&without, &state, Default::default()).unwrap();
    server.change(with).unwrap();
    assert_eq!(write(&mut log_in(4)), RESERVATION_CONFLICT);
    server.shutdown().unwrap();
}
