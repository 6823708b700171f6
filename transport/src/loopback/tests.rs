use super::*;
use crate::nic::batch::TxPath;
use crate::wire::Qpn;

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

fn at(addr: IpAddr) -> SocketAddr {
    SocketAddr::new(addr, 4791)
}

/// Sends a packet and returns whether it arrives.
fn arrives(fabric: &Fabric, from: IpAddr, to: IpAddr) -> bool {
    fabric.inject(at(from), at(to), vec![0; 64]);
    let due = fabric.now() + fabric.socket().1;
    fabric.receive_packet(due, (to, 0)).is_some()
}

#[test]
fn partition_can_block_single_direction() {
    let pair = Pair::new(FabricConfig::default());
    let ways = || [arrives(&pair.fabric, A, B), arrives(&pair.fabric, B, A)];
    for (inbound, outbound) in [(true, false), (false, true), (true, true), (false, false)] {
        pair.fabric.partition(A, Blocked { inbound, outbound });
        assert_eq!(ways(), [!outbound, !inbound]);
    }
}

#[test]
fn held_packet_arrives_at_replacement_device() {
    let fabric = Fabric::new(FabricConfig::default());
    let old = fabric.endpoint(B);
    let most = Duration::from_secs(5);
    let delay = Delay {
        seed: 1,
        rate: 1_000_000,
        most,
    };
    fabric.hold(Some(delay));
    assert!(!arrives(&fabric, A, B));
    fabric.hold(None);
    assert!(arrives(&fabric, A, B), "a later one");
    drop(old);
    let _new = fabric.endpoint(B);
    let due = fabric.next_arrival().expect("it is held");
    assert!(due <= fabric.now() + most);
    fabric.advance_to(due);
    assert_eq!(fabric.next_arrival(), Some(due + fabric.socket().1));
    let arrived = fabric.receive_packet(due + fabric.socket().1, (B, 0));
    assert_eq!(arrived, Some(((at(A), at(B)), vec![0; 64])));
    assert_eq!(fabric.next_arrival(), None);
}

/// Appends packets for a QP to the batch of a device.
fn append(device: &mut Endpoint, qpn: u32, count: usize) {
    for _ in 0..count {
        device.batch.begin(TxPath::to(at(B)), Qpn::new(qpn), 64);
        device.batch.push_bytes(&[0; 64]);
    }
}

#[test]
fn trains_are_not_split_by_full_socket() {
    let mut pair = Pair::new(FabricConfig {
        segments: 64,
        socket_room: 4,
        ..FabricConfig::default()
    });
    append(&mut pair.a, 2, 10);
    append(&mut pair.a, 3, 1);
    pair.a.transmit(pair.fabric.now());
    assert_eq!(pair.fabric.packets(), 10);
    pair.advance(Duration::from_millis(1));
    assert_eq!(pair.fabric.packets(), 11);
}

#[test]
fn full_socket_has_no_deadline() {
    let mut pair = Pair::new(FabricConfig::default());
    pair.fabric.fill_sockets(A, true);
    append(&mut pair.a, 2, 1);
    pair.a.transmit(pair.fabric.now());
    assert_eq!((pair.fabric.packets(), pair.a.deadline()), (0, None));
    pair.fabric.fill_sockets(A, false);
    pair.a.transmit(pair.fabric.now());
    assert_eq!(pair.fabric.packets(), 1);
}

#[test]
fn unsegmentable_route_falls_back_to_single_packets() {
    let mut pair = Pair::new(FabricConfig {
        segments: 64,
        ..FabricConfig::default()
    });
    pair.fabric.refuse_trains(A, true);
    append(&mut pair.a, 2, 3);
    append(&mut pair.a, 3, 1);
    pair.a.transmit(pair.fabric.now());
    assert_eq!(pair.fabric.packets(), 1);
    append(&mut pair.a, 2, 3);
    pair.a.transmit(pair.fabric.now());
    assert_eq!(pair.fabric.packets(), 4, "one by one");
}

#[test]
fn device_removal_is_reported_once() {
    let mut pair = Pair::new(FabricConfig::default());
    pair.fabric.unplug(A);
    pair.step();
    let fatal = Some(crate::verbs::AsyncEvent::DeviceFatal);
    assert_eq!(crate::verbs::Verbs::poll_async_event(&mut pair.a), fatal);
    pair.step();
    assert_eq!(crate::verbs::Verbs::poll_async_event(&mut pair.a), None);
    assert_eq!(crate::verbs::Verbs::poll_async_event(&mut pair.b), None);
}
