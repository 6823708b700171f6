//! Scripts of messages from the kernel and peers, and the expected output.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::message::{Connection, Request, Response};
use super::wire::{MessageType, WireMessage};
use super::*;
use crate::netlink::message::{Header, Kind, Message, Messages, Writer};

/// Port of the netlink socket.
const NETLINK_PORT: u32 = 4242;

/// Address of the peer's port mapper, the destination of our requests.
const PEER: &str = "10.99.0.2:3935";

/// Reserved ports.
type Reserved = Rc<RefCell<BTreeSet<u16>>>;

/// Host with a hundred free ports.
#[derive(Debug)]
struct TestHost {
    reserved: Reserved,
    next_random: u64,
}

#[derive(Debug)]
struct Reservation(u16, Reserved);

impl Drop for Reservation {
    fn drop(&mut self) {
        self.1.borrow_mut().remove(&self.0);
    }
}

impl Host for TestHost {
    type Reservation = Reservation;

    fn reserve(&mut self, _ip: IpAddr, port: Option<u16>) -> io::Result<(u16, Reservation)> {
        let mut reserved = self.reserved.borrow_mut();
        let free = (50_000..50_100).find(|port| !reserved.contains(port));
        let port = port.or(free).ok_or(io::ErrorKind::AddrInUse)?;
        if !reserved.insert(port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok((port, Reservation(port, Rc::clone(&self.reserved))))
    }

    fn random(&mut self) -> u64 {
        self.next_random += 1;
        self.next_random
    }
}

struct Rig {
    mapper: Mapper<TestHost>,
    reserved: Reserved,
    now: Instant,
    sequence: u32,
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl Rig {
    /// Creates a port mapper after version negotiation and registration of the kernel's client.
    fn new(abi: u16) -> Self {
        let mut rig = Self::begun();
        assert_eq!(rig.responses(), [Response::Hello { abi: 4 }]);
        rig.request(Request::Hello { abi });
        let expected = Response::MapInfo {
            library: LIBRARY.to_owned(),
            version: abi,
        };
        let responses = rig.responses();
        assert!(responses.iter().all(|response| *response == expected));
        assert_eq!(responses.len(), if abi == 3 { 2 } else { 1 });
        rig.request(Request::RegPid {
            echo: 0,
            interface: "v0".to_owned(),
            device: "siw0".to_owned(),
            library: LIBRARY.to_owned(),
        });
        let registered = Response::RegPid {
            sequence: rig.sequence,
            device: "siw0".to_owned(),
            library: LIBRARY.to_owned(),
            version: abi,
            error: 0,
        };
        assert_eq!(rig.responses(), [registered]);
        rig
    }

    fn begun() -> Self {
        let reserved = Reserved::default();
        let host = TestHost {
            reserved: Rc::clone(&reserved),
            next_random: 0x1000,
        };
        Self {
            mapper: Mapper::new(host, Some(NETLINK_PORT)),
            reserved,
            now: Instant::now(),
            sequence: 100,
        }
    }

    fn request(&mut self, request: Request) {
        self.request_of(2, request);
    }

    #[allow(
        clippy::needless_pass_by_value,
        reason = "requests are written where they are sent"
    )]
    fn request_of(&mut self, client: u8, request: Request) {
        self.sequence += 1;
        let message = request.write(client, self.sequence);
        self.mapper.handle_netlink(self.now, &message);
    }

    fn wire(&mut self, message: WireMessage) {
        self.mapper
            .handle_wire(self.now, addr(PEER), &message.write());
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.mapper.handle_timeout(self.now);
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.mapper.poll_output()).collect()
    }

    /// Returns messages to the kernel; there must be no other output.
    fn responses(&mut self) -> Vec<Response> {
        let outputs = self.outputs().into_iter();
        outputs.map(|output| response(&output)).collect()
    }

    /// Returns messages to peers; there must be no other output.
    fn sent(&mut self) -> Vec<(SocketAddr, WireMessage)> {
        let outputs = self.outputs().into_iter();
        outputs.map(|output| message(&output)).collect()
    }

    fn add(&mut self, local: &str, flags: u32) -> Result<SocketAddr, u16> {
        self.request(Request::AddMapping {
            echo: 0,
            local: addr(local),
            flags: Some(flags),
        });
        let sequence = self.sequence;
        match &self.responses()[..] {
            [
                Response::AddMapping {
                    sequence: of,
                    local: is,
                    mapped,
                    error: 0,
                },
            ] if *of == sequence && *is == addr(local) => Ok(*mapped),
            [Response::HandleErr { sequence: of, code }] if *of == sequence => Err(*code),
            other => panic!("{other:?}"),
        }
    }

    fn remove(&mut self, local: &str) {
        self.request(Request::RemoveMapping {
            echo: 0,
            local: addr(local),
        });
        assert_eq!(self.outputs(), []);
    }

    fn query(&mut self, local: &str, remote: &str, flags: u32) {
        self.request(Request::QueryMapping {
            echo: 0,
            local: addr(local),
            remote: addr(remote),
            flags: Some(flags),
        });
    }
}

fn response(output: &Output) -> Response {
    let Output::Netlink(message) = output else {
        panic!("{output:?}")
    };
    match Messages::new(message).next() {
        Some(Ok(Message::Client { header, payload })) => {
            assert_eq!(header.port, NETLINK_PORT);
            Response::read(header.kind.operation, payload).unwrap()
        }
        other => panic!("{other:?}"),
    }
}

fn message(output: &Output) -> (SocketAddr, WireMessage) {
    let Output::Wire { to, datagram, .. } = output else {
        panic!("{output:?}")
    };
    (*to, WireMessage::read(datagram).unwrap())
}

/// Builds a request from the peer at 10.99.0.2:40000.
fn peer_request(ap: &str, handle: u64) -> WireMessage {
    WireMessage {
        message_type: MessageType::Request {
            mapped_cp: addr("10.99.0.2:60000"),
        },
        assoc_handle: handle,
        cp: addr("10.99.0.2:40000"),
        ap: addr(ap),
    }
}

fn accept(request: WireMessage, mapped: &str) -> WireMessage {
    WireMessage {
        message_type: MessageType::Accept,
        ap: addr(mapped),
        ..request
    }
}

#[test]
fn error_response_selects_version_3() {
    let mut rig = Rig::begun();
    let Some(Output::Netlink(hello)) = rig.mapper.poll_output() else {
        panic!()
    };
    let kind = Kind {
        client: 0,
        operation: 2,
    };
    let header = Header {
        kind,
        flags: 0,
        sequence: 0,
        port: 0,
    };
    let error = |errno: i32, of: &[u8]| Writer::new(header).raw(&errno.to_ne_bytes()).raw(of);
    // An acknowledgment is not an error.
    let zero = error(0, &hello[..16]).finish();
    rig.mapper.handle_netlink(rig.now, &zero);
    assert_eq!(rig.mapper.abi(), 4);
    let error = error(-22, &hello[..16]).finish();
    rig.mapper.handle_netlink(rig.now, &error);
    assert_eq!(rig.mapper.abi(), 3);
    let outputs = rig.outputs();
    let clients: Vec<_> = outputs.iter().map(client_of).collect();
    assert_eq!(clients, [2, 3]);
    // Without a client no version is selected; a client that loads later supports the latest
    // version.
    let [Output::Netlink(mapinfo), _] = &outputs[..] else {
        panic!()
    };
    let error = Writer::new(header)
        .raw(&(-22_i32).to_ne_bytes())
        .raw(&mapinfo[..16])
        .finish();
    rig.mapper.handle_netlink(rig.now, &error);
    assert_eq!(rig.mapper.abi(), 4);
}

fn client_of(output: &Output) -> u8 {
    match output {
        Output::Netlink(message) => match Messages::new(message).next() {
            Some(Ok(Message::Client { header, .. })) => header.kind.client,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn unknown_versions_are_rejected() {
    for abi in [0, 2, 5, u16::MAX] {
        let mut rig = Rig::begun();
        rig.outputs();
        rig.request(Request::Hello { abi });
        let sequence = rig.sequence;
        assert_eq!(
            rig.responses(),
            [Response::HandleErr { sequence, code: 17 }]
        );
        assert_eq!(rig.mapper.abi(), 4);
    }
}

#[test]
fn client_must_register_before_requests() {
    let mut rig = Rig::begun();
    rig.outputs();
    assert_eq!(rig.add("10.99.0.1:3260", 0), Err(14));
    rig.query("10.99.0.1:40000", "10.99.0.2:3260", 0);
    let sequence = rig.sequence;
    assert_eq!(
        rig.responses(),
        [Response::HandleErr { sequence, code: 14 }]
    );
    rig.request(Request::RegPid {
        echo: 0,
        interface: String::new(),
        device: "siw0".to_owned(),
        library: "another".to_owned(),
    });
    let sequence = rig.sequence;
    assert_eq!(
        rig.responses(),
        [Response::HandleErr { sequence, code: 15 }]
    );
}

#[test]
fn missing_attribute_is_rejected() {
    let mut rig = Rig::new(4);
    let kind = Kind {
        client: 2,
        operation: 1,
    };
    let header = Header {
        kind,
        flags: 1,
        sequence: 55,
        port: 0,
    };
    let null = Writer::new(header).attribute(1, &[0; 4]).finish();
    rig.mapper.handle_netlink(rig.now, &null);
    let refused = Response::HandleErr {
        sequence: 55,
        code: 10,
    };
    assert_eq!(rig.responses(), [refused]);
}

#[test]
fn mapping_reserves_port_until_removal() {
    let mut rig = Rig::new(4);
    assert_eq!(rig.add("10.99.0.1:3260", 0), Ok(addr("10.99.0.1:50000")));
    assert_eq!(rig.add("[fd99::1]:3260", 0), Ok(addr("[fd99::1]:50001")));
    assert_eq!(rig.reserved.borrow().len(), 2);
    // Address in use; overlapping address.
    assert_eq!(rig.add("10.99.0.1:3260", 0), Err(12));
    assert_eq!(rig.add("0.0.0.0:3260", 0), Err(12));
    // Removal by another client, and of another address.
    let local = addr("10.99.0.1:3260");
    rig.request_of(3, Request::RemoveMapping { echo: 0, local });
    rig.remove("10.99.0.1:3261");
    assert_eq!(rig.reserved.borrow().len(), 2);
    rig.remove("10.99.0.1:3260");
    rig.remove("10.99.0.1:3260");
    assert_eq!(*rig.reserved.borrow(), [50_001].into());
    assert_eq!(rig.add("0.0.0.0:3260", 0), Ok(addr("0.0.0.0:50000")));
    assert_eq!(rig.add("10.99.0.1:3260", 0), Err(12));
}

#[test]
fn host_tcp_address_is_not_mapped() {
    let mut rig = Rig::new(4);
    assert_eq!(rig.add("10.99.0.1:3260", 1), Ok(addr("10.99.0.1:3260")));
    assert!(rig.reserved.borrow().is_empty());
}

#[test]
fn wildcard_listeners_share_mapping() {
    let mut rig = Rig::new(4);
    for _ in 0..3 {
        assert_eq!(rig.add("0.0.0.0:3260", 0), Ok(addr("0.0.0.0:50000")));
    }
    rig.remove("0.0.0.0:3260");
    rig.remove("0.0.0.0:3260");
    assert_eq!(rig.mapper.mappings().count(), 1);
    rig.remove("0.0.0.0:3260");
    assert_eq!(rig.mapper.mappings().count(), 0);
}

#[test]
fn port_exhaustion_is_reported() {
    let mut rig = Rig::new(4);
    rig.reserved.borrow_mut().extend(50_000..50_100);
    assert_eq!(rig.add("10.99.0.1:3260", 0), Err(11));
}

#[test]
fn mappings_of_previous_daemon_are_adopted() {
    let mut rig = Rig::new(4);
    let mapinfo = |local: &str, mapped: &str, flags| Request::MapInfo {
        local: addr(local),
        mapped: addr(mapped),
        flags: Some(flags),
    };
    rig.request(mapinfo("10.99.0.1:3260", "10.99.0.1:50007", 0));
    rig.request(mapinfo("10.99.0.1:3261", "10.99.0.1:3261", 1));
    // Repeated, as for another user.
    rig.request(mapinfo("10.99.0.1:3260", "10.99.0.1:50007", 0));
    assert_eq!(rig.outputs(), []);
    assert_eq!(*rig.reserved.borrow(), [50_007].into());
    // Another mapping of the same address; a port in use; another IP address.
    for (request, code) in [
        (mapinfo("10.99.0.1:3260", "10.99.0.1:50008", 0), 12),
        (mapinfo("10.99.0.1:3262", "10.99.0.1:50007", 0), 11),
        (mapinfo("10.99.0.1:3262", "[fd99::1]:50009", 0), 10),
    ] {
        rig.request(request);
        let sequence = rig.sequence;
        assert_eq!(rig.responses(), [Response::HandleErr { sequence, code }]);
    }
    rig.request(Request::MapInfoNum { echo: 0, sent: 6 });
    let acknowledged = Response::MapInfoNum {
        sequence: rig.sequence,
        sent: 6,
        acknowledged: 3,
    };
    assert_eq!(rig.responses(), [acknowledged]);
}

#[test]
fn query_completes_with_peer_accept() {
    let mut rig = Rig::new(4);
    rig.query("10.99.0.1:40000", "10.99.0.2:3260", 0);
    let sequence = rig.sequence;
    let request = WireMessage {
        message_type: MessageType::Request {
            mapped_cp: addr("10.99.0.1:50000"),
        },
        assoc_handle: 0x1001,
        cp: addr("10.99.0.1:40000"),
        ap: addr("10.99.0.2:3260"),
    };
    assert_eq!(rig.sent(), [(addr(PEER), request)]);
    let accept = accept(request, "10.99.0.2:51000");
    // Responses with the handle of another query, and with another address.
    rig.wire(WireMessage {
        assoc_handle: 0x1002,
        ..accept
    });
    rig.wire(WireMessage {
        cp: addr("10.99.0.1:40001"),
        ..accept
    });
    // An accept that would redirect the program to a third host.
    rig.wire(WireMessage {
        ap: addr("10.99.0.3:51000"),
        ..accept
    });
    assert_eq!(rig.outputs(), []);
    rig.wire(accept);
    let outputs = rig.outputs();
    let connection = Connection {
        local: addr("10.99.0.1:40000"),
        remote: addr("10.99.0.2:3260"),
        mapped_local: addr("10.99.0.1:50000"),
        mapped_remote: addr("10.99.0.2:51000"),
    };
    let reply = Response::QueryMapping {
        sequence,
        connection,
        error: 0,
    };
    assert_eq!(response(&outputs[0]), reply);
    let ack = WireMessage {
        message_type: MessageType::Ack,
        ..accept
    };
    assert_eq!(message(&outputs[1]), (addr(PEER), ack));
    // A retransmitted accept, because the acknowledgment was lost, and a late reject.
    rig.wire(accept);
    assert_eq!(rig.sent(), [(addr(PEER), ack)]);
    rig.wire(WireMessage {
        message_type: MessageType::Reject,
        ..request
    });
    assert_eq!(rig.outputs(), []);
    rig.pass(ACCEPTED_LIFETIME);
    rig.wire(accept);
    assert_eq!(rig.outputs(), []);
    assert_eq!(rig.mapper.deadline(), None);
    // The kernel closed the connection.
    rig.remove("10.99.0.1:40000");
    assert!(rig.reserved.borrow().is_empty());
}

#[test]
fn request_is_retransmitted_then_fails() {
    let mut rig = Rig::new(4);
    rig.query("10.99.0.1:40000", "10.99.0.2:3260", 1);
    let sequence = rig.sequence;
    let first = rig.sent();
    for _ in 1..QUERY_TRIES {
        rig.pass(QUERY_INTERVAL / 2);
        assert_eq!(rig.outputs(), []);
        rig.pass(QUERY_INTERVAL / 2);
        assert_eq!(rig.sent(), first);
    }
    rig.pass(QUERY_INTERVAL);
    assert_eq!(
        rig.responses(),
        [Response::HandleErr { sequence, code: 13 }]
    );
    assert_eq!(rig.mapper.deadline(), None);
}

#[test]
fn reject_completes_query() {
    let mut rig = Rig::new(4);
    rig.query("[fd99::1]:40000", "[fd99::2]:3260", 1);
    let sequence = rig.sequence;
    let (to, request) = rig.sent()[0];
    assert_eq!(to, addr("[fd99::2]:3935"));
    let reject = WireMessage {
        message_type: MessageType::Reject,
        ..request
    };
    rig.wire(reject);
    let connection = Connection {
        local: addr("[fd99::1]:40000"),
        remote: addr("[fd99::2]:3260"),
        mapped_local: addr("[fd99::1]:40000"),
        mapped_remote: addr("[fd99::2]:3260"),
    };
    let rejected = Response::QueryMapping {
        sequence,
        connection,
        error: 16,
    };
    assert_eq!(rig.responses(), [rejected]);
    rig.wire(reject);
    assert_eq!(rig.outputs(), []);
    assert_eq!(rig.mapper.deadline(), None);
}

#[test]
fn unconnectable_address_pairs_are_rejected() {
    let mut rig = Rig::new(4);
    for (local, remote, code) in [
        ("10.99.0.1:1", "[fd99::2]:3260", 10),
        ("0.0.0.0:1", "10.99.0.2:3260", 10),
        ("10.99.0.1:1", "0.0.0.0:3260", 10),
    ] {
        rig.query(local, remote, 0);
        let sequence = rig.sequence;
        assert_eq!(rig.responses(), [Response::HandleErr { sequence, code }]);
    }
}

#[test]
fn connections_share_local_address() {
    let mut rig = Rig::new(4);
    rig.query("10.99.0.1:40000", "10.99.0.2:3260", 0);
    rig.query("10.99.0.1:40000", "10.99.0.3:3260", 0);
    let sent = rig.sent();
    assert_ne!(sent[0].1.assoc_handle, sent[1].1.assoc_handle);
    rig.remove("10.99.0.1:40000");
    assert_eq!(rig.reserved.borrow().len(), 1);
    rig.remove("10.99.0.1:40000");
    assert_eq!(rig.reserved.borrow().len(), 0);
}

#[test]
fn too_many_queries_are_refused() {
    let mut rig = Rig::new(4);
    for _ in 0..MAX_QUERIES {
        rig.query("10.99.0.1:40000", "10.99.0.2:3260", 0);
    }
    let sent = rig.sent();
    rig.query("10.99.0.1:40000", "10.99.0.2:3260", 0);
    let sequence = rig.sequence;
    assert_eq!(
        rig.responses(),
        [Response::HandleErr { sequence, code: 11 }]
    );
    // Completed queries do not count towards the limit, and the same number of them is remembered.
    for _ in 0..2 {
        for (_, request) in &sent {
            rig.wire(accept(*request, "10.99.0.2:51000"));
        }
        rig.outputs();
    }
    for _ in 0..MAX_QUERIES {
        rig.query("10.99.0.1:40000", "10.99.0.2:3260", 0);
    }
    for (_, request) in rig.sent() {
        rig.wire(accept(request, "10.99.0.2:51000"));
    }
    rig.outputs();
    rig.wire(accept(sent[0].1, "10.99.0.2:51000"));
    assert_eq!(rig.outputs(), [], "the first was forgotten");
    rig.pass(ACCEPTED_LIFETIME);
    assert_eq!(rig.mapper.deadline(), None);
}

#[test]
fn peer_request_notifies_kernel_once() {
    let mut rig = Rig::new(4);
    rig.add("10.99.0.1:3260", 0).unwrap();
    let request = peer_request("10.99.0.1:3260", 9);
    rig.wire(request);
    let outputs = rig.outputs();
    let accepted = accept(request, "10.99.0.1:50000");
    assert_eq!(message(&outputs[0]), (addr(PEER), accepted));
    let connection = Connection {
        local: addr("10.99.0.1:3260"),
        remote: addr("10.99.0.2:40000"),
        mapped_local: addr("10.99.0.1:50000"),
        mapped_remote: addr("10.99.0.2:60000"),
    };
    assert_eq!(response(&outputs[1]), Response::RemoteInfo { connection });
    // The accept was lost.
    rig.wire(request);
    assert_eq!(rig.sent(), [(addr(PEER), accepted)]);
    rig.wire(WireMessage {
        message_type: MessageType::Ack,
        ..accepted
    });
    rig.wire(request);
    assert_eq!(rig.sent(), [(addr(PEER), accepted)]);
    // Nothing is retransmitted without an acknowledgment.
    rig.pass(ASSOCIATION_LIFETIME);
    assert_eq!(rig.outputs(), []);
    assert_eq!(rig.mapper.deadline(), None);
    rig.wire(request);
    assert_eq!(rig.outputs().len(), 2);
}

#[test]
fn peer_cannot_impersonate_another_host() {
    let mut rig = Rig::new(4);
    rig.add("10.99.0.1:3260", 0).unwrap();
    // The peer would connect from its own address, but appear to be another host.
    let request = WireMessage {
        cp: addr("10.99.0.9:40000"),
        ..peer_request("10.99.0.1:3260", 9)
    };
    rig.wire(request);
    let accepted = accept(request, "10.99.0.1:50000");
    assert_eq!(rig.sent(), [(addr(PEER), accepted)]);
}

#[test]
fn wildcard_mapping_serves_requested_address() {
    let mut rig = Rig::new(4);
    rig.add("0.0.0.0:3260", 0).unwrap();
    let request = peer_request("10.99.0.1:3260", 9);
    rig.wire(request);
    let outputs = rig.outputs();
    let accepted = accept(request, "10.99.0.1:50000");
    assert_eq!(message(&outputs[0]), (addr(PEER), accepted));
    let Response::RemoteInfo { connection } = response(&outputs[1]) else {
        panic!()
    };
    // The kernel uses this address to find its listener.
    assert_eq!(connection.mapped_local, addr("0.0.0.0:50000"));
}

#[test]
fn unmapped_address_is_rejected() {
    let mut rig = Rig::new(4);
    rig.add("10.99.0.1:3260", 0).unwrap();
    let request = peer_request("10.99.0.1:3261", 9);
    rig.wire(request);
    let reject = WireMessage {
        message_type: MessageType::Reject,
        ..request
    };
    assert_eq!(rig.sent(), [(addr(PEER), reject)]);
}

#[test]
fn peer_floods_get_bounded_responses() {
    let mut rig = Rig::new(4);
    rig.add("10.99.0.1:3260", 0).unwrap();
    let mut notified = 0;
    // A flood from a single peer, and a flood with forged addresses.
    for peer in 0..40_u8 {
        for handle in 0..300 {
            let request = peer_request("10.99.0.1:3260", handle);
            let from = SocketAddr::new([10, 99, 1, peer].into(), 3935);
            rig.mapper.handle_wire(rig.now, from, &request.write());
            let outputs = rig.outputs();
            assert_eq!(message(&outputs[0]).0, from);
            notified += outputs.len() - 1;
        }
        assert_eq!(
            notified,
            MAX_ASSOCIATIONS.min(MAX_PEER_ASSOCIATIONS * (usize::from(peer) + 1))
        );
    }
    rig.pass(ASSOCIATION_LIFETIME);
    rig.wire(peer_request("10.99.0.1:3260", 0));
    assert_eq!(rig.outputs().len(), 2);
}

#[test]
fn mappings_and_queries_work_without_kernel() {
    let host = TestHost {
        reserved: Reserved::default(),
        next_random: 0x1000,
    };
    let mut mapper = Mapper::new(host, None);
    let now = Instant::now();
    assert_eq!(mapper.poll_output(), None);
    let local = addr("10.99.0.1:3260");
    assert_eq!(mapper.add(local, None), Ok(addr("10.99.0.1:50000")));
    assert_eq!(mapper.add(local, None), Err(ErrorCode::DuplicateMapping));
    let other = addr("10.99.0.1:3261");
    assert_eq!(mapper.add(other, Some(77)), Ok(addr("10.99.0.1:77")));
    let request = peer_request("10.99.0.1:3261", 1);
    mapper.handle_wire(now, addr(PEER), &request.write());
    let accepted = accept(request, "10.99.0.1:77");
    assert_eq!(
        mapper.poll_output().map(|output| message(&output)),
        Some((addr(PEER), accepted))
    );
    assert_eq!(mapper.poll_output(), None);

    let remote = addr("10.99.0.2:3260");
    mapper.query(now, addr("10.99.0.1:40000"), remote).unwrap();
    let (_, request) = message(&mapper.poll_output().unwrap());
    let accept = accept(request, "10.99.0.2:51000");
    mapper.handle_wire(now, addr(PEER), &accept.write());
    let mapped = Ok(addr("10.99.0.2:51000"));
    let response = QueryResult { remote, mapped };
    assert_eq!(mapper.poll_output(), Some(Output::QueryResult(response)));
}

/// Decodes actions from bytes: valid, almost valid and arbitrary messages from the kernel and
/// peers, and the passage of time.
fn act(rig: &mut Rig, bytes: &mut std::slice::Iter<'_, u8>) -> Option<()> {
    let mut next = || bytes.next().copied();
    let place = |n: u8| {
        let ip = if n & 0x40 == 0 { "10.99.0." } else { "fd99::" };
        let ip: IpAddr = format!("{ip}{}", n >> 4 & 3).parse().unwrap();
        SocketAddr::new(ip, 3260 + u16::from(n & 3))
    };
    match next()? % 8 {
        0 => rig.pass(Duration::from_millis(100 * u64::from(next()?))),
        1 => {
            let flags = Some(u32::from(next()? & 1));
            let (echo, local) = (0, place(next()?));
            rig.request(Request::AddMapping { echo, local, flags });
        }
        2 => {
            let flags = Some(u32::from(next()? & 1));
            let (echo, local, remote) = (0, place(next()?), place(next()?));
            rig.request(Request::QueryMapping {
                echo,
                local,
                remote,
                flags,
            });
        }
        3 => {
            let (echo, local) = (0, place(next()?));
            rig.request(Request::RemoveMapping { echo, local });
        }
        4 => {
            let (local, mapped) = (place(next()?), place(next()?));
            let flags = Some(u32::from(next()? & 1));
            rig.request(Request::MapInfo {
                local,
                mapped,
                flags,
            });
        }
        5 => {
            let (cp, ap) = (place(next()?), place(next()?));
            if cp.is_ipv4() == ap.is_ipv4() {
                let message_type = match next()? % 4 {
                    0 => MessageType::Request { mapped_cp: cp },
                    1 => MessageType::Accept,
                    2 => MessageType::Ack,
                    _ => MessageType::Reject,
                };
                let assoc_handle = 0x1000 + u64::from(next()? % 16);
                rig.wire(WireMessage {
                    message_type,
                    assoc_handle,
                    cp,
                    ap,
                });
            }
        }
        6 => {
            let len = usize::from(next()?);
            let datagram: Vec<u8> = bytes.by_ref().take(len).copied().collect();
            rig.mapper.handle_wire(rig.now, addr(PEER), &datagram);
        }
        _ => {
            let (operation, len) = (next()?, usize::from(next()?));
            let payload: Vec<u8> = bytes.by_ref().take(len).copied().collect();
            let kind = Kind {
                client: 2,
                operation: u16::from(operation % 10),
            };
            let header = Header {
                kind,
                flags: 1,
                sequence: 0,
                port: 0,
            };
            let message = Writer::new(header).raw(&payload).finish();
            rig.mapper.handle_netlink(rig.now, &message);
        }
    }
    Some(())
}

#[test]
fn port_mapper() {
    bolero::check!(name = "port_mapper").for_each(|bytes: &[u8]| {
        let mut rig = Rig::new(4);
        let mut bytes = bytes.iter();
        while act(&mut rig, &mut bytes).is_some() {
            // Each input has few outputs, all of them valid.
            let outputs = rig.outputs();
            assert!(outputs.len() <= 64, "{}", outputs.len());
            for output in &outputs {
                match output {
                    Output::Wire { .. } => drop(message(output)),
                    Output::Netlink(_) => drop(response(output)),
                    Output::QueryResult(_) => panic!("no query of the program's own"),
                }
            }
            // Each reservation belongs to a mapping.
            assert!(rig.reserved.borrow().len() <= rig.mapper.mappings().count());
        }
        for _ in 0..=QUERY_TRIES {
            rig.pass(Duration::from_secs(60));
        }
        assert_eq!(rig.mapper.deadline(), None);
    });
}
