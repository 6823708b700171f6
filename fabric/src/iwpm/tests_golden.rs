//! Bytes of the netlink messages, from `rdma/rdma_netlink.h` of Linux 6.12 and from `iwpmd` of
//! rdma-core 44, on a little-endian host.

#![cfg(target_endian = "little")]

use std::net::SocketAddr;

use super::message::{Connection, Invalid, Request, Response};
use crate::netlink::message::{Message, Messages};

/// Decodes hexadecimal digits; `~N` represents N zeros.
fn bytes(text: &str) -> Vec<u8> {
    let words = text.split_whitespace();
    let bytes = words.flat_map(|word| match word.strip_prefix('~') {
        Some(zeros) => vec![0; zeros.parse().unwrap()],
        None => (0..word.len() / 2)
            .map(|at| u8::from_str_radix(&word[2 * at..][..2], 16).unwrap())
            .collect(),
    });
    bytes.collect()
}

/// Splits a message into operation and payload.
fn split(message: &[u8]) -> (u8, u16, u32, u32, &[u8]) {
    match Messages::new(message).next() {
        Some(Ok(Message::Client { header, payload })) => (
            header.kind.client,
            header.kind.operation,
            header.sequence,
            header.port,
            payload,
        ),
        other => panic!("{other:?}"),
    }
}

fn is_request(request: &Request, golden: &str) {
    let golden = bytes(golden);
    let (client, operation, sequence, port, payload) = split(&golden);
    assert_eq!((client, sequence, port), (2, 7, 0));
    assert_eq!(operation, request.operation());
    assert_eq!(request.write(2, 7), golden);
    assert_eq!(Request::read(operation, payload).as_ref(), Ok(request));
    lacks_nothing(payload, |payload| {
        Request::read(operation, payload).map(|_| ())
    });
}

fn is_response(response: &Response, golden: &str) {
    let golden = bytes(golden);
    let (client, operation, sequence, port, payload) = split(&golden);
    assert_eq!((client, sequence, port), (2, 9, 0x1234));
    assert_eq!(operation, response.operation());
    assert_eq!(response.write(2, 9, 0x1234), golden);
    assert_eq!(Response::read(operation, payload).as_ref(), Ok(response));
    lacks_nothing(payload, |payload| {
        Response::read(operation, payload).map(|_| ())
    });
}

/// A message without its first attribute is invalid, and a truncated message is never read beyond
/// its end.
fn lacks_nothing(payload: &[u8], read: impl Fn(&[u8]) -> Result<(), Invalid>) {
    let first = usize::from(u16::from_ne_bytes([payload[0], payload[1]])).next_multiple_of(4);
    assert_eq!(read(&payload[first..]), Err(Invalid));
    for len in 0..payload.len() {
        let _ = read(&payload[..len]);
    }
    assert_eq!(read(&payload[..first - 4]), Err(Invalid));
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn connection() -> Connection {
    Connection {
        local: addr("10.99.0.1:40000"),
        remote: addr("10.99.0.2:3260"),
        mapped_local: addr("10.99.0.1:49153"),
        mapped_remote: addr("10.99.0.2:49154"),
    }
}

const FOUR: &str = "8400 0200 0200 9c40 0a630001 ~120 8400 0300 0200 0cbc 0a630002 ~120
    8400 0400 0200 c001 0a630001 ~120 8400 0500 0200 c002 0a630002 ~120";

#[test]
fn requests_of_version_3_have_no_flags() {
    is_request(
        &Request::AddMapping {
            echo: 5,
            local: addr("10.99.0.1:3260"),
            flags: None,
        },
        "9c000000 0108 0100 07000000 00000000 0800 0100 05000000
         8400 0200 0200 0cbc 0a630001 ~120",
    );
    is_request(
        &Request::QueryMapping {
            echo: 5,
            local: addr("10.99.0.1:40000"),
            remote: addr("10.99.0.2:3260"),
            flags: None,
        },
        "20010000 0208 0100 07000000 00000000 0800 0100 05000000
         8400 0200 0200 9c40 0a630001 ~120 8400 0300 0200 0cbc 0a630002 ~120",
    );
    is_request(
        &Request::MapInfo {
            local: addr("[fd99::1]:3260"),
            mapped: addr("[fd99::1]:49153"),
            flags: None,
        },
        "18010000 0608 0100 07000000 00000000
         8400 0100 0a00 0cbc 00000000 fd99 ~13 01 ~104
         8400 0200 0a00 c001 00000000 fd99 ~13 01 ~104",
    );
}

#[test]
fn requests_of_version_4_have_flags() {
    is_request(
        &Request::AddMapping {
            echo: 5,
            local: addr("0.0.0.0:3260"),
            flags: Some(1),
        },
        "a4000000 0108 0100 07000000 00000000 0800 0100 05000000
         8400 0200 0200 0cbc 00000000 ~120 0800 0300 01000000",
    );
    is_request(
        &Request::QueryMapping {
            echo: 5,
            local: addr("10.99.0.1:40000"),
            remote: addr("10.99.0.2:3260"),
            flags: Some(0),
        },
        "28010000 0208 0100 07000000 00000000 0800 0100 05000000
         8400 0200 0200 9c40 0a630001 ~120 8400 0300 0200 0cbc 0a630002 ~120
         0800 0400 00000000",
    );
    is_request(
        &Request::MapInfo {
            local: addr("10.99.0.1:3260"),
            mapped: addr("10.99.0.1:49153"),
            flags: Some(1),
        },
        "20010000 0608 0100 07000000 00000000
         8400 0100 0200 0cbc 0a630001 ~120 8400 0200 0200 c001 0a630001 ~120
         0800 0300 01000000",
    );
}

#[test]
fn other_requests_are_those_of_both_versions() {
    is_request(
        &Request::RegPid {
            echo: 0,
            interface: "eth0".to_owned(),
            device: "siw0".to_owned(),
            library: "iWarpPortMapperUser".to_owned(),
        },
        "74000000 0008 0100 07000000 00000000 0800 0100 00000000
         1400 0200 65746830 ~12 2400 0300 73697730 ~28
         2400 0400 695761727050 6f72744d6170706572 55736572 ~13",
    );
    is_request(
        &Request::RemoveMapping {
            echo: 5,
            local: addr("10.99.0.1:3260"),
        },
        "9c000000 0308 0100 07000000 00000000 0800 0100 05000000
         8400 0200 0200 0cbc 0a630001 ~120",
    );
    is_request(
        &Request::MapInfoNum { echo: 0, sent: 3 },
        "20000000 0708 0100 07000000 00000000 0800 0100 00000000 0800 0200 03000000",
    );
    is_request(
        &Request::Hello { abi: 4 },
        "18000000 0808 0100 07000000 00000000 0600 0100 0400 0000",
    );
}

#[test]
fn responses_are_those_of_iwpmd() {
    let library = || "iWarpPortMapperUser".to_owned();
    is_response(
        &Response::RegPid {
            sequence: 7,
            device: "siw0".to_owned(),
            library: library(),
            version: 4,
            error: 0,
        },
        "4c000000 0008 0100 09000000 34120000 0800 0100 07000000
         0900 0200 73697730 00 ~3 1800 0300 695761727050 6f72744d6170706572 55736572 00
         0600 0400 0400 ~2 0600 0500 0000 ~2",
    );
    is_response(
        &Response::AddMapping {
            sequence: 7,
            local: addr("10.99.0.1:3260"),
            mapped: addr("10.99.0.1:49153"),
            error: 0,
        },
        "28010000 0108 0100 09000000 34120000 0800 0100 07000000
         8400 0200 0200 0cbc 0a630001 ~120 8400 0300 0200 c001 0a630001 ~120
         0600 0400 0000 ~2",
    );
    is_response(
        &Response::QueryMapping {
            sequence: 7,
            connection: connection(),
            error: 16,
        },
        &format!(
            "30020000 0208 0100 09000000 34120000 0800 0100 07000000 {FOUR} 0600 0600 1000 ~2"
        ),
    );
    is_response(
        &Response::RemoteInfo {
            connection: connection(),
        },
        &format!(
            "30020000 0408 0100 09000000 34120000 0800 0100 00000000 {FOUR} 0600 0600 0000 ~2"
        ),
    );
    is_response(
        &Response::HandleErr {
            sequence: 7,
            code: 12,
        },
        "20000000 0508 0100 09000000 34120000 0800 0100 07000000 0600 0200 0c00 ~2",
    );
    is_response(
        &Response::MapInfo {
            library: library(),
            version: 3,
        },
        "30000000 0608 0100 09000000 34120000
         1800 0100 695761727050 6f72744d6170706572 55736572 00 0600 0200 0300 ~2",
    );
    is_response(
        &Response::MapInfoNum {
            sequence: 7,
            sent: 3,
            acknowledged: 2,
        },
        "28000000 0708 0100 09000000 34120000
         0800 0100 07000000 0800 0200 03000000 0800 0300 02000000",
    );
    is_response(
        &Response::Hello { abi: 4 },
        "18000000 0808 0100 09000000 34120000 0600 0100 0400 ~2",
    );
}

#[test]
fn messages_for_wrong_direction_are_invalid() {
    for operation in [4, 5, 9, 1023] {
        assert_eq!(Request::read(operation, &[]), Err(Invalid));
    }
    for operation in [3, 9, 1023] {
        assert_eq!(Response::read(operation, &[]), Err(Invalid));
    }
    // An address of another family, and a name longer than its field.
    let unix = bytes("0800 0100 05000000 8400 0200 0100 ~126");
    assert_eq!(Request::read(1, &unix), Err(Invalid));
    let long = bytes("1800 0100 69576172 ~16 0600 0200 0300 ~2");
    assert!(Response::read(6, &long).is_ok());
    let long = bytes("2800 0100 69576172 ~32 0600 0200 0300 ~2");
    assert_eq!(Response::read(6, &long), Err(Invalid));
}
