use std::net::UdpSocket;

use riser_transport::nic::batch::TxBatch;

use super::packets::{Kind, Message, Received, Sender, parse};
use super::requester::{Requester, Shape, Tally};
use super::*;

const SHORT: WireConfig = WireConfig {
    runtime: Duration::from_millis(60),
    warm_up: Duration::from_millis(10),
    path_mtu: None,
};

fn at(last: u8) -> SocketAddr {
    SocketAddr::from(([127, 77, 1, last], ROCE_PORT))
}

#[test]
fn short_run_measures_all_cases() {
    for path_mtu in [None, Some(1024)] {
        let report = measure_loopback(WireConfig { path_mtu, ..SHORT }).unwrap();
        assert_eq!(report.path_mtu, path_mtu.unwrap_or(4096));
        assert_eq!(report.cases.len(), 6);
        for case in &report.cases {
            assert!(case.operations > 0, "{case:?}");
            assert_eq!((case.corrupted, case.foreign), (0, 0), "{case:?}");
            let bytes = case.bytes_per_second * case.seconds;
            let wanted = case.operations as f64 * f64::from(case.reply_bytes);
            // The difference is limited by the replies in flight at the start and the end.
            let slack = f64::from(case.depth * case.reply_bytes)
                + case.lost_packets as f64 * f64::from(report.path_mtu);
            assert!(
                (bytes - wanted).abs() <= slack,
                "{bytes} of {wanted}: {case:?}"
            );
            assert_eq!(case.latency_ns.is_some(), case.depth == 1, "{case:?}");
        }
        let table = report.table();
        assert!(table.contains("4 KiB replies") && table.contains("loopback"));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["cases"][1]["icrc"], true);
    }
}

#[test]
fn corrupted_and_foreign_packets_are_counted() {
    let (local, peer) = (at(1), at(2));
    let mut batch = TxBatch::new(64);
    let mut sender = Sender::new(peer, local).unwrap();
    let memory = riser_memory::Memory::new(8192).unwrap();
    memory.fill(0, 8192, 0x5a);
    sender.push_data(&mut batch, &memory.whole(), 0, 4096, true);
    let mut response = Message::new(Kind::Response, true);
    response.seq = 7.into();
    sender.push_response(&mut batch, &response);
    // Trains of packets as received from the kernel.
    let trains: Vec<_> = batch
        .groups()
        .iter()
        .map(|g| batch.copy_packets(g))
        .collect();
    let packets: usize = trains.iter().map(Vec::len).sum();
    assert_eq!(packets, 3, "two of data and a response");
    let deliver = |tally: &mut Tally, damage: Option<usize>| {
        let mut number = 0;
        for train in &trains {
            let segment = train[0].len();
            let mut bytes = train.concat();
            for (index, packet) in train.iter().enumerate() {
                if damage == Some(number) {
                    bytes[index * segment + packet.len() / 2] ^= 0x10;
                }
                number += 1;
            }
            tally.process_datagram(peer, segment, &bytes);
        }
    };
    let mut tally = Tally::new(local, peer).unwrap();
    deliver(&mut tally, None);
    assert_eq!((tally.packets, tally.bytes, tally.corrupted), (2, 8192, 0));
    assert_eq!(tally.completed, [7]);
    for damaged in 0..packets {
        let mut tally = Tally::new(local, peer).unwrap();
        deliver(&mut tally, Some(damaged));
        assert_eq!(tally.corrupted, 1);
        let data = if damaged < 2 { 1 } else { 2 };
        assert_eq!(tally.packets, data);
        assert_eq!(tally.completed.len(), usize::from(damaged != 2));
    }
    // From another host, and from a previous run.
    let mut tally = Tally::new(local, peer).unwrap();
    tally.process_datagram(at(3), 100, &[0; 100]);
    assert_eq!(tally.foreign, 1);
    tally.epoch = 1;
    deliver(&mut tally, None);
    assert!(tally.completed.is_empty());
}

#[test]
fn responder_requires_cookie_for_data() {
    let addr = at(10);
    let mut responder = Responder::open(addr.ip()).unwrap();
    let stop = AtomicBool::new(false);
    let socket = UdpSocket::bind((at(11).ip(), 0)).unwrap();
    let local = socket.local_addr().unwrap();
    // Receives the expected packets, and any additional packets within a short time.
    let send = |kind, cookie: u64, expected: usize| {
        let mut message = Message::new(kind, true);
        message.cookie = cookie.into();
        message.len = 4096.into();
        message.mtu = 4096.into();
        let mut batch = TxBatch::new(1);
        let mut sender = Sender::new(local, addr).unwrap();
        sender.push_command(&mut batch, &message);
        let packets = batch.copy_packets(&batch.groups()[0]);
        socket.send_to(&packets[0], addr).unwrap();
        let mut room = [0; 8192];
        let mut got: Vec<Vec<u8>> = Vec::new();
        loop {
            let patience = if got.len() < expected { 20_000 } else { 50 };
            let patience = Duration::from_millis(patience);
            socket.set_read_timeout(Some(patience)).unwrap();
            match socket.recv(&mut room) {
                Ok(n) => got.push(room[..n].to_vec()),
                Err(_) => return got,
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| responder.run(&stop));
        let greeting = send(Kind::Hello, 0, 1);
        let guessed = send(Kind::Command, 1, 0);
        // Don't panic before the responder was stopped, because this is required to exit the scope.
        let cookie = match greeting.first().map(|packet| parse(packet)) {
            Some(Some(Received::Message(response))) => response.cookie.get(),
            _ => 0,
        };
        let known = send(Kind::Command, cookie, 3);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(greeting.len(), 1);
        assert!(greeting[0].len() < 84, "no more than was sent");
        assert!(guessed.is_empty());
        let lengths: Vec<_> = known.iter().map(Vec::len).collect();
        assert_eq!(lengths, [20, 4128, 56], "acknowledgement, data, response");
    });
}

/// Sends two responses for each command (without data), except for the given sequence numbers.
/// Returns the number of commands with a response.
fn respond_to_all_but(socket: &UdpSocket, left_out: &[u32], stop: &AtomicBool) -> u64 {
    let local = socket.local_addr().unwrap();
    let mut room = [0; 8192];
    let mut responses = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok((n, src)) = socket.recv_from(&mut room) else {
            continue;
        };
        let Some(Received::Message(message)) = parse(&room[..n]) else {
            continue;
        };
        let is_command = message.is(Kind::Command);
        if is_command && left_out.contains(&message.seq.get()) {
            continue;
        }
        responses += u64::from(is_command);
        let mut batch = TxBatch::new(1);
        let mut sender = Sender::new(local, src).unwrap();
        sender.push_response(&mut batch, &message.response());
        let packets = batch.copy_packets(&batch.groups()[0]);
        for _ in 0..2 {
            socket.send_to(&packets[0], src).unwrap();
        }
    }
    responses
}

#[test]
fn lost_command_is_counted_and_replaced() {
    let (local, peer) = (at(30), at(31));
    let socket = UdpSocket::bind(peer).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_millis(10)))
        .unwrap();
    let driver = open(local.ip()).unwrap();
    let mut requester = Requester::new(driver, peer, 4096).unwrap();
    let shape = Shape {
        name: "four at once",
        depth: 4,
        reply: 0,
        icrc: true,
    };
    let config = WireConfig {
        runtime: Duration::from_secs(1),
        warm_up: Duration::ZERO,
        path_mtu: None,
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // This leaves only one index without a lost command.
        let server = scope.spawn(|| respond_to_all_but(&socket, &[9, 10, 11], &stop));
        let greeted = requester.greet();
        let case = greeted.and_then(|()| requester.run(shape, config));
        stop.store(true, Ordering::Relaxed);
        let responses = server.join().unwrap();
        let case = case.unwrap();
        // On a busy machine, additional commands may time out.
        assert!(case.lost_commands >= 3, "{case:?}");
        assert!(
            (1..=responses).contains(&case.operations),
            "{responses} responses: {case:?}"
        );
        assert_eq!((case.corrupted, case.foreign), (0, 0));
    });
}

#[test]
fn invalid_addresses_fail() {
    let own = at(20).ip();
    assert!(matches!(
        measure(own, own, SHORT),
        Err(WireError::SameAddress(_))
    ));
    assert!(matches!(
        measure(own, "::1".parse().unwrap(), SHORT),
        Err(WireError::Family(..))
    ));
    // An address reserved for documentation, which is not used by any host.
    let foreign = "192.0.2.1".parse().unwrap();
    assert!(matches!(
        measure(foreign, own, SHORT),
        Err(WireError::Open { .. })
    ));
    let error = measure(
        own,
        at(21).ip(),
        WireConfig {
            path_mtu: Some(1500),
            ..SHORT
        },
    );
    assert!(matches!(error, Err(WireError::PathMtu(1500))));
    // There is no responder at this address.
    assert!(matches!(
        measure(own, at(21).ip(), SHORT),
        Err(WireError::NoResponse(_))
    ));
}
