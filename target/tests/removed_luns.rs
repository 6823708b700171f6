//! Tests LUNs that are removed and added again while their backends are kept.

use std::net::TcpListener;

use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::tcp::Client;

const IQN: &str = "iqn.2026-01.org.example:removed";

const RESERVATION_CONFLICT: u8 = 0x18;

fn config(port: u16, luns: &str) -> Config {
    let text = format!(
        "backends:\n\
         \x20 disk: {{ kind: ram, size: 1MiB }}\n\
         \x20 other: {{ kind: ram, size: 1MiB }}\n\
         targets:\n\
         - name: {IQN}\n\
         \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
         \x20 luns: {luns}\n\
         \x20 access: open\n\
         workers: {{ count: 1 }}\n"
    );
    Config::parse(&text, "test.yaml").unwrap()
}

/// Sends PERSISTENT RESERVE OUT without APTPL.
fn reserve_out(client: &mut Client, action: u8, kind: u8, own: u64, key: u64) -> u8 {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&own.to_be_bytes());
    list[8..16].copy_from_slice(&key.to_be_bytes());
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    client.command(&cdb, true, 24, &list).0
}

#[test]
fn reservation_survives_removal_of_lun() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let with = config(port, "{ 0: disk, 1: other }");
    let without = config(port, "{ 1: other }");
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
    assert_eq!(reserve_out(&mut holder, 0, 0, 0, 0xa), 0, "REGISTER");
    assert_eq!(reserve_out(&mut holder, 1, 5, 0xa, 0), 0, "RESERVE");
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
