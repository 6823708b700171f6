use std::collections::BTreeMap;

use riser_transport::verbs::Mtu;

use super::*;
use crate::sa::administrator::AdministratorConfig;

// Literals of <rdma/rdma_netlink.h>, as a little-endian kernel has them.

/// Builds a request like `ib_sa` of Linux 6.1 (`ib_nl_set_path_rec_attrs`), with every attribute.
fn golden_resolve() -> Vec<u8> {
    let mut bytes = vec![];
    // struct nlmsghdr: length, RDMA_NL_GET_TYPE(RDMA_NL_LS, RESOLVE), REQUEST, sequence, port.
    bytes.extend([164, 0, 0, 0, 0x00, 0x10, 0x01, 0x00, 7, 0, 0, 0, 0, 0, 0, 0]);
    // struct rdma_ls_resolve_header: name, port 1, LS_RESOLVE_PATH_USE_GMP, padding.
    bytes.extend(b"mlx5_0");
    bytes.resize(16 + 64, 0);
    bytes.extend([1, 2, 0, 0]);
    // struct nlattr: length, type with RDMA_NLA_F_MANDATORY.
    bytes.extend([12, 0, 0x03, 0x20, 8, 7, 6, 5, 4, 3, 2, 1]);
    bytes.extend([20, 0, 0x04, 0x20]);
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]);
    bytes.extend([20, 0, 0x05, 0x20]);
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
    bytes.extend([5, 0, 0x06, 0x00, 0x40, 0, 0, 0]);
    bytes.extend([6, 0, 0x07, 0x20, 0xff, 0x7f, 0, 0]);
    bytes.extend([6, 0, 0x08, 0x00, 0x23, 0x01, 0, 0]);
    let len = bytes.len() as u8;
    bytes[0] = len;
    bytes
}

fn resolve() -> Resolve {
    Resolve {
        device: "mlx5_0".to_owned(),
        port: 1,
        path_use: PathUse::Gmp,
        service_id: Some(0x0102_0304_0506_0708),
        dgid: Some(IpAddr::from([10, 0, 0, 2]).into()),
        sgid: Some(IpAddr::from([10, 0, 0, 1]).into()),
        traffic_class: Some(0x40),
        pkey: Some(0x7fff),
        qos_class: Some(0x123),
    }
}

fn message(sequence: u32, body: Body) -> Message {
    Message {
        sequence,
        port: 0,
        body,
    }
}

fn of_host() -> (Resolver, Administrator) {
    let addr = IpAddr::from([10, 0, 0, 1]);
    let administrator = Administrator::new(AdministratorConfig::new(addr, Mtu::Mtu4096, [1; 16]));
    (Resolver::new(vec![addr], BTreeMap::new()), administrator)
}

#[test]
fn request_matches_kernel() {
    let golden = golden_resolve();
    let resolve = message(7, Body::Resolve(resolve()));
    assert_eq!(Message::parse(&golden), Ok(resolve.clone()));
    assert_eq!(resolve.emit(), golden);
    // A message truncated before its trailing padding is invalid, even if its length field matches.
    for len in 0..golden.len() - 2 {
        assert!(Message::parse(&golden[..len]).is_err(), "{len}");
        let mut cut = golden[..len].to_vec();
        if len >= 16 {
            cut[0] = len as u8;
            if let Ok(message) = Message::parse(&cut) {
                assert_ne!(message, resolve);
            }
        }
    }
}

#[test]
fn response_matches_ibacm() {
    let (resolver, administrator) = of_host();
    let response = respond(&golden_resolve(), 99, &resolver, &administrator).unwrap();
    let mut expected = vec![92, 0, 0, 0, 0x00, 0x10, 0, 0, 7, 0, 0, 0, 99, 0, 0, 0];
    // LS_NLA_TYPE_PATH_RECORD; struct ib_path_rec_data: PRIMARY, GMP, OUTBOUND, INBOUND_REVERSE.
    expected.extend([76, 0, 1, 0, 0x2b, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([1, 2, 3, 4, 5, 6, 7, 8]);
    expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]);
    expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
    expected.extend([0, 0, 0, 0, 0, 0, 0, 64, 0x40, 0x80, 0x7f, 0xff, 0x12, 0x30]);
    expected.extend([0x85, 0x82, 0x92, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(response, expected);
    let parsed = Message::parse(&response).unwrap();
    let Body::Resolved(Ok(paths)) = &parsed.body else {
        panic!("{parsed:?}");
    };
    assert_eq!(paths[0].flags, resolve().flags());
    assert_eq!(parsed.emit(), response);
    // A response is not a request.
    assert_eq!(
        super::respond(&response, 99, &resolver, &administrator),
        None
    );
}

#[test]
fn missing_path_is_rejected() {
    let (resolver, administrator) = of_host();
    let refusal = |resolve: Resolve| {
        let bytes = message(9, Body::Resolve(resolve)).emit();
        respond(&bytes, 99, &resolver, &administrator).unwrap()
    };
    // RDMA_NL_LS_F_ERR, without payload.
    let expected = [16, 0, 0, 0, 0x00, 0x10, 0x00, 0x01, 9, 0, 0, 0, 99, 0, 0, 0];
    let strange = Resolve {
        sgid: Some(IpAddr::from([10, 0, 0, 9]).into()),
        ..resolve()
    };
    assert_eq!(refusal(strange), expected);
    let nowhere = Resolve {
        dgid: None,
        ..resolve()
    };
    assert_eq!(refusal(nowhere), expected);
    let partition = Resolve {
        pkey: Some(0x8001),
        ..resolve()
    };
    assert_eq!(refusal(partition), expected);
    assert_eq!(
        Message::parse(&expected).unwrap().body,
        Body::Resolved(Err(Refused))
    );
    // Unidirectional and without a source.
    let datagrams = Resolve {
        path_use: PathUse::Unidirectional,
        sgid: None,
        ..resolve()
    };
    let response = Message::parse(&refusal(datagrams)).unwrap();
    let Body::Resolved(Ok(paths)) = response.body else {
        panic!("{response:?}");
    };
    assert_eq!(paths[0].flags.bits(), 0x0a);
}

#[test]
fn address_resolves_to_gid() {
    // struct rdma_ls_ip_resolve_header: interface 3; LS_NLA_TYPE_IPV4, mandatory.
    let mut golden = vec![28, 0, 0, 0, 0x02, 0x10, 0x01, 0x00, 5, 0, 0, 0, 0, 0, 0, 0];
    golden.extend([3, 0, 0, 0, 8, 0, 0x09, 0x20, 10, 0, 0, 2]);
    let addr = IpAddr::from([10, 0, 0, 2]);
    let body = Body::IpResolve { interface: 3, addr };
    assert_eq!(Message::parse(&golden), Ok(message(5, body.clone())));
    assert_eq!(message(5, body).emit(), golden);
    let (resolver, administrator) = of_host();
    let respond_to = |bytes: &[u8]| respond(bytes, 99, &resolver, &administrator).unwrap();
    let mut expected = vec![36, 0, 0, 0, 0x02, 0x10, 0, 0, 5, 0, 0, 0, 99, 0, 0, 0];
    expected.extend([
        20, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2,
    ]);
    assert_eq!(respond_to(&golden), expected);
    let parsed = Message::parse(&expected).unwrap();
    assert_eq!(parsed.body, Body::IpResolved(Ok(addr.into())));
    // IPv6, and a multicast address, which is not a host.
    let v6 = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]);
    let request = |addr| message(6, Body::IpResolve { interface: 1, addr }).emit();
    assert_eq!(request(v6).len(), 16 + 4 + 20);
    let parsed = Message::parse(&respond_to(&request(v6))).unwrap();
    assert_eq!(parsed.body, Body::IpResolved(Ok(v6.into())));
    let parsed = Message::parse(&respond_to(&request([224, 0, 0, 1].into()))).unwrap();
    assert_eq!(parsed.body, Body::IpResolved(Err(Refused)));
}

#[test]
fn timeout_message_matches_kernel() {
    let golden = [
        24, 0, 0, 0, 0x01, 0x10, 0x01, 0x00, 1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 2, 0, 0xd0, 7, 0, 0,
    ];
    let body = Body::SetTimeout(Duration::from_secs(2));
    assert_eq!(message(1, body.clone()).emit(), golden);
    assert_eq!(Message::parse(&golden), Ok(message(1, body)));
    // Only requests from the kernel are served.
    let (resolver, administrator) = of_host();
    assert_eq!(respond(&golden, 99, &resolver, &administrator), None);
}

#[test]
fn first_message_requests_acknowledgment() {
    // NLM_F_ACK with RDMA_NL_LS_F_ERR in a response, and with NLM_F_REQUEST in a request.
    let golden = [16, 0, 0, 0, 0x00, 0x10, 0x04, 0x01, 0, 0, 0, 0, 99, 0, 0, 0];
    assert_eq!(hello(None, 99), golden);
    let golden = [
        24, 0, 0, 0, 0x01, 0x10, 0x05, 0x00, 0, 0, 0, 0, 99, 0, 0, 0, 8, 0, 2, 0, 0xd0, 7, 0, 0,
    ];
    assert_eq!(hello(Some(Duration::from_secs(2)), 99), golden);
}

#[test]
fn unknown_mandatory_attribute_is_rejected() {
    let (resolver, administrator) = of_host();
    let refused = |bytes: &[u8]| {
        let response = respond(bytes, 99, &resolver, &administrator).unwrap();
        split(&response).unwrap().0.flags == F_ERR
    };
    let with = |attribute: &[u8]| {
        let mut bytes = golden_resolve();
        bytes.extend(attribute);
        bytes[0] += attribute.len() as u8;
        bytes
    };
    assert!(!refused(&with(&[8, 0, 60, 0x00, 1, 2, 3, 4])));
    assert!(refused(&with(&[8, 0, 60, 0x20, 1, 2, 3, 4])));
    let unknown = Message::parse(&with(&[8, 0, 60, 0x20, 1, 2, 3, 4]));
    assert_eq!(unknown, Err(LsError::Mandatory(60)));
    // Invalid lengths, an unknown operation and an unknown use.
    assert!(refused(&with(&[8, 0, 4, 0x20, 1, 2, 3, 4])));
    assert!(refused(&with(&[3, 0, 4, 0x20, 1, 2, 3, 4])));
    let mut bytes = golden_resolve();
    bytes[16 + 65] = 3;
    assert_eq!(Message::parse(&bytes), Err(LsError::PathUse(3)));
    assert!(refused(&bytes));
    bytes[4] = 9;
    assert_eq!(Message::parse(&bytes), Err(LsError::Operation(9)));
    assert!(refused(&bytes));
    // Port-mapper messages belong to another service.
    bytes[5] = 0x08;
    assert_eq!(Message::parse(&bytes), Err(LsError::Service(0x0809)));
    assert_eq!(respond(&bytes, 99, &resolver, &administrator), None);
}

#[test]
fn local_service() {
    let (resolver, administrator) = of_host();
    bolero::check!(name = "local_service").for_each(|input: &[u8]| {
        if let Ok(message) = Message::parse(input) {
            // Invalid UTF-8 in a name is replaced on the first pass only.
            let again = Message::parse(&message.emit()).expect("what was emitted can be read");
            assert_eq!(Message::parse(&again.emit()), Ok(again));
        }
        if let Some(response) = respond(input, 1, &resolver, &administrator) {
            let (header, _) = split(&response).expect("a response has a header");
            assert_eq!(header.flags & REQUEST, 0);
        }
    });
}
