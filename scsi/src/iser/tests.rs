//! Tests for headers, messages and private data, using both fixed bytes and properties.

use proptest::prelude::*;

use super::*;
use crate::iscsi::BHS_LEN;

/// Header sent by `ib_iser` for a command that reads 36 bytes.
const READ_36: [u8; 28] = [
    0x14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0x38, 0xff, 0x2e, 0xc9, 0x6a, 0x1f,
    0x4e, 0xde, 0,
];

/// Header sent for a write of 64 KiB, with 8 KiB of immediate data.
const WRITE_64K: [u8; 28] = [
    0x18, 0, 0, 0, 0, 0, 3, 0x51, 0xff, 0x2e, 0xc9, 0x6a, 3, 0x0c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0,
];

fn buffer(stag: u32, base: u64) -> Option<RemoteBuffer> {
    Some(RemoteBuffer {
        stag: Stag(stag),
        base,
    })
}

#[test]
fn kernel_headers_parse_correctly() {
    let cases = [
        (
            READ_36,
            Buffers {
                write: None,
                read: buffer(0x338, 0xff2e_c96a_1f4e_de00),
            },
        ),
        (
            WRITE_64K,
            Buffers {
                write: buffer(0x351, 0xff2e_c96a_030c_0000),
                read: None,
            },
        ),
    ];
    for (bytes, buffers) in cases {
        let header = Header::Control(buffers);
        assert_eq!(Header::parse(&bytes), Ok((header, &[][..])));
        assert_eq!(header.bytes(), bytes);
    }
}

#[test]
fn unflagged_buffer_is_ignored() {
    let mut bytes = READ_36;
    bytes[0] = 0x10;
    let header = Header::Control(Buffers::default());
    assert_eq!(Header::parse(&bytes), Ok((header, &[][..])));
}

#[test]
fn hello_contains_versions_and_reads() {
    let mut hello = [0; 28];
    hello[..4].copy_from_slice(&[0x20, 0xa1, 1, 2]);
    let parsed = Hello {
        max_version: 10,
        min_version: 1,
        ird: 0x102,
    };
    assert_eq!(Message::parse(&hello), Ok(Message::Hello(parsed)));
    assert_eq!(Header::Hello(parsed).bytes(), hello);
    let mut reply = [0; 28];
    reply[..4].copy_from_slice(&[0x30, 0xaa, 0, 16]);
    let hello_reply = parsed.build_reply(16);
    assert_eq!(Message::parse(&reply), Ok(Message::HelloReply(hello_reply)));
    assert_eq!(Header::HelloReply(hello_reply).bytes(), reply);
    reply[0] = 0x31;
    let refused = Hello {
        max_version: 12,
        min_version: 11,
        ird: 16,
    }
    .build_reply(16);
    assert!(refused.rejected);
    assert_eq!(Header::HelloReply(refused).bytes(), reply);
}

/// RFC 7145 10.1.3.2: there must be a common version, and READs must be possible.
#[test]
fn hello_requires_common_version() {
    let version_of = |max_version, min_version, (ird, ord)| {
        let hello = Hello {
            max_version,
            min_version,
            ird,
        };
        let reply = hello.build_reply(ord);
        (!reply.rejected).then_some(reply.current_version)
    };
    for (max, min, current) in [
        (10, 10, Some(10)),
        (15, 0, Some(10)),
        (1, 1, Some(1)),
        (9, 1, Some(1)),
        (9, 2, None),
        (15, 11, None),
        (0, 0, None),
        (1, 10, None),
    ] {
        assert_eq!(version_of(max, min, (4, 4)), current, "{min} to {max}");
    }
    assert_eq!(version_of(10, 10, (4, 0)), None);
    assert_eq!(version_of(10, 10, (0, 0)), Some(10));
}

#[test]
fn unknown_message_types_are_refused() {
    for first in (0..=0xff_u8).filter(|b| !matches!(b >> 4, 1..=3)) {
        let mut bytes = READ_36;
        bytes[0] = first;
        assert_eq!(Message::parse(&bytes), Err(IserError::Opcode(first >> 4)));
    }
}

#[test]
fn private_data_bits_are_inverted() {
    let offers = |zero_based, remote_invalidate| CmHeader {
        zero_based,
        remote_invalidate,
    };
    let cases = [
        ([0x80, 0, 0, 0], offers(false, true)),
        ([0xc0, 0, 0, 0], offers(false, false)),
        ([0x00, 0, 0, 0], offers(true, true)),
        ([0x40, 0, 0, 0], offers(true, false)),
    ];
    for (bytes, header) in cases {
        assert_eq!(CmHeader::parse(&bytes), header);
        assert_eq!(header.bytes(), bytes);
    }
    assert_eq!(CmHeader::parse(&[]), offers(false, false));
    assert_eq!(
        offers(false, true).and(offers(true, false)),
        offers(false, false)
    );
}

fn message(ahs_words: u8, declared: u32, follows: usize) -> Vec<u8> {
    let mut bytes = [&READ_36[..], &[0; BHS_LEN]].concat();
    bytes[28] = 0x01;
    bytes[32] = ahs_words;
    bytes[33..36].copy_from_slice(&declared.to_be_bytes()[1..]);
    bytes.resize(76 + follows, 0x5a);
    bytes
}

/// CVE-2026-53176: a login PDU that is shorter than the 76 bytes of headers.
#[test]
fn cve_2026_53176_short_message_is_refused() {
    let whole = message(0, 0, 0);
    for len in 0..76 {
        let error = Message::parse(&whole[..len]).unwrap_err();
        let need = if len < 28 { 28 } else { 76 };
        assert!(
            matches!(error, IserError::Truncated { need: n, have, .. } if n == need && have == len),
            "{error:?}"
        );
    }
    assert!(Message::parse(&whole).is_ok());
}

/// Only a command with a buffer can have a data length without including the data. It must not
/// include only some of the data, and this is not allowed for any other PDU or for a command
/// without a buffer.
#[test]
fn immediate_data_may_stay_in_buffer() {
    let write = |opcode, follows| {
        let mut bytes = message(0, 512, follows);
        bytes[..28].copy_from_slice(&WRITE_64K);
        bytes[28] = opcode;
        bytes
    };
    let bytes = write(0x41, 0);
    let Ok(Message::Control { frame, .. }) = Message::parse(&bytes) else {
        panic!("expected a command without immediate data");
    };
    assert!(frame.data.is_empty());
    for bytes in [
        write(0x01, 1),
        write(0x01, 511),
        write(0x00, 0),
        message(0, 512, 0),
    ] {
        let error = Message::parse(&bytes).unwrap_err();
        assert!(matches!(error, IserError::Truncated { .. }), "{error:?}");
    }
}

/// CVE-2026-90413, CVE-2026-90414: a DataSegmentLength that is larger than the received data.
#[test]
fn cve_2026_90413_and_2026_90414_data_length_is_checked() {
    let truncated = |bytes: &[u8], need| {
        let error = Message::parse(bytes).unwrap_err();
        assert!(
            matches!(error, IserError::Truncated { need: n, .. } if n == need),
            "{error:?}"
        );
    };
    truncated(&message(0, 1, 0), 77);
    truncated(&message(0, 0xff_ffff, 8192), 76 + 0xff_ffff);
    truncated(&message(3, 4, 12), 76 + 16);
    truncated(&message(3, 0, 8), 76 + 12);
    assert_eq!(
        Message::parse(&message(255, 0, 1020)),
        Err(IserError::TotalAhsLength(1020))
    );
    assert_eq!(
        Message::parse(&message(0, 5, 9)),
        Err(IserError::Trailing(4))
    );
    // With and without padding.
    for follows in 5..=8 {
        let bytes = message(0, 5, follows);
        let Ok(Message::Control { frame, .. }) = Message::parse(&bytes) else {
            panic!("{follows} bytes");
        };
        assert_eq!(frame.data, [0x5a; 5]);
    }
}

fn buffers() -> impl Strategy<Value = Buffers> {
    let one = || {
        proptest::option::of(
            (any::<u32>(), any::<u64>()).prop_map(|(stag, base)| RemoteBuffer {
                stag: Stag(stag),
                base,
            }),
        )
    };
    (one(), one()).prop_map(|(write, read)| Buffers { write, read })
}

proptest! {
    #[test]
    fn messages_roundtrip(
        buffers in buffers(),
        bhs in any::<[u8; BHS_LEN]>(),
        ahs in proptest::collection::vec(any::<u8>(), 0..80),
        data in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let ahs = &ahs[..ahs.len() / 4 * 4];
        let mut out = Vec::new();
        put_control(buffers, bhs, ahs, &data, &mut out);
        prop_assert_eq!(out.len() % 4, 0);
        let Ok(Message::Control { buffers: read, frame }) = Message::parse(&out) else {
            panic!("expected a valid message");
        };
        prop_assert_eq!(read, buffers);
        prop_assert_eq!((frame.ahs, frame.data), (ahs, &data[..]));
        prop_assert_eq!(&frame.bhs[..4], &bhs[..4]);
        prop_assert_eq!(&frame.bhs[8..], &bhs[8..]);
    }

    #[test]
    fn arbitrary_messages_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Message::parse(&bytes);
    }
}
