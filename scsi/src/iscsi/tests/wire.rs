//! Tests for PDUs, framing, text, names and CHAP values.

use proptest::prelude::*;

use crate::iscsi::frame::{self, Digests, Frame, FrameError, Framer};
use crate::iscsi::name::{self, IscsiName, NameError, TargetAddress};
use crate::iscsi::pdu::{FromInitiator, FromTarget, PduError, ScsiResponse, TaskAttr};
use crate::iscsi::text::{self, TextError};
use crate::iscsi::{BHS_LEN, CmdSn, Itt, StatSn, chap, keys};

/// A WRITE(16) of 16 KiB with 8 KiB of immediate data, encoded as in RFC 7143 11.3.
const WRITE: [u8; BHS_LEN] = [
    0x01, 0xa1, 0, 0, 0, 0, 0x20, 0, // F, W, SIMPLE; 8192 bytes of data
    0, 5, 0, 0, 0, 0, 0, 0, // LUN 5
    0x12, 0x34, 0x56, 0x78, 0, 0, 0x40, 0, // tag, expected length
    0, 0, 0, 9, 0, 0, 0, 7, // CmdSN, ExpStatSN
    0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0x20, 0, 0,
];

fn frame_of<'a>(bhs: &'a [u8; BHS_LEN], ahs: &'a [u8], data: &'a [u8]) -> Frame<'a> {
    Frame {
        bhs,
        ahs,
        data,
        is_intact: true,
    }
}

#[test]
fn command_layout_matches_rfc() {
    let FromInitiator::ScsiCommand(pdu) =
        FromInitiator::parse(&frame_of(&WRITE, &[], &[])).unwrap()
    else {
        panic!("expected a command");
    };
    assert!(pdu.is_final && pdu.writes && !pdu.reads && !pdu.immediate);
    assert_eq!(pdu.attribute, TaskAttr::Simple);
    assert_eq!(pdu.lun, [0, 5, 0, 0, 0, 0, 0, 0]);
    assert_eq!((pdu.itt, pdu.expected_length), (Itt(0x1234_5678), 16384));
    assert_eq!((pdu.cmd_sn, pdu.exp_stat_sn), (CmdSn(9), StatSn(7)));
    assert_eq!(pdu.cdb[..], WRITE[32..]);
}

#[test]
fn additional_headers_extend_cdb_and_length() {
    let mut bhs = WRITE;
    bhs[4] = 7;
    let ahs = [
        0, 17, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, // 16 more bytes
        0, 5, 2, 0, 0, 0, 2, 0, // 512 bytes of read
    ];
    let FromInitiator::ScsiCommand(pdu) = FromInitiator::parse(&frame_of(&bhs, &ahs, &[])).unwrap()
    else {
        panic!("expected a command");
    };
    assert_eq!(pdu.cdb.len(), 32);
    assert_eq!(pdu.cdb[31], 16);
    assert_eq!(pdu.bidi_read_length, Some(512));
    assert_eq!(pdu.ahs(), ahs);
    for broken in [
        &ahs[..3],
        &[0, 0, 1, 0],
        &[0, 9, 1, 0, 1, 2, 3, 4],
        &[0, 5, 3, 0, 1, 2, 3, 4],
    ] {
        let result = FromInitiator::parse(&frame_of(&bhs, broken, &[]));
        assert_eq!(result, Err(PduError::Ahs), "{broken:?}");
    }
}

#[test]
fn maximum_cdb_length_is_260() {
    for (more, is_legal) in [(244_u16, true), (245, false)] {
        let mut ahs = [&(more + 1).to_be_bytes()[..], &[1, 0]].concat();
        ahs.extend((0..more).map(|n| n as u8));
        ahs.resize(ahs.len().next_multiple_of(4), 0);
        let mut bhs = WRITE;
        bhs[4] = (ahs.len() / 4) as u8;
        match FromInitiator::parse(&frame_of(&bhs, &ahs, &[])) {
            Ok(FromInitiator::ScsiCommand(pdu)) => {
                assert!(is_legal && pdu.cdb.len() == 260);
                assert_eq!(
                    (pdu.cdb[15], pdu.cdb[16], pdu.cdb[259]),
                    (WRITE[47], 0, 243)
                );
            }
            other => assert!(!is_legal && other == Err(PduError::Ahs)),
        }
    }
}

/// CVE-2026-53176, CVE-2026-90413, CVE-2026-90414, CVE-2021-28361: lengths which are larger than
/// the received data, or zero.
#[test]
fn cve_2026_53176_2026_90413_2026_90414_and_2021_28361_lengths_are_checked() {
    let mut framer = Framer::new(8192);
    let mut long = WRITE;
    long[5..8].copy_from_slice(&[0xff, 0xff, 0xff]);
    let error = FrameError::DataSegmentLength {
        len: 0xff_ffff,
        limit: 8192,
    };
    assert_eq!(framer.next(&long), Err(error));
    assert_eq!(framer.buffered_len(), 0);

    let mut framer = Framer::new(1 << 24);
    assert_eq!(framer.next(&long), Ok((BHS_LEN, None)));
    assert_eq!(
        framer.buffered_len(),
        BHS_LEN,
        "only received bytes are buffered"
    );

    for short in 0..BHS_LEN {
        let mut framer = Framer::new(8192);
        assert_eq!(framer.next(&WRITE[..short]), Ok((short, None)));
    }
    let mut ahs = WRITE;
    ahs[4] = 255;
    let mut framer = Framer::new(8192);
    assert_eq!(framer.next(&ahs), Err(FrameError::TotalAhsLength(1020)));
}

#[test]
fn digests_are_crc32c_and_are_checked() {
    // RFC 7143 A.4: 32 bytes of zeros, ones, and increasing values.
    assert_eq!(frame::digest(&[&[0; 32]]), [0xaa, 0x36, 0x91, 0x8a]);
    assert_eq!(frame::digest(&[&[0xff; 32]]), [0x43, 0xab, 0xa8, 0x62]);
    let rising: Vec<u8> = (0..32).collect();
    assert_eq!(frame::digest(&[&rising]), [0x4e, 0x79, 0xdd, 0x46]);

    let digests = Digests {
        header: true,
        data: true,
    };
    let mut pdu = Vec::new();
    frame::put_pdu(WRITE, &[], b"hello", digests, &mut pdu);
    assert_eq!(pdu.len(), 48 + 4 + 8 + 4);
    let read = |pdu: &[u8]| {
        let mut framer = Framer::new(8192);
        framer.set(8192, digests);
        framer
            .next(pdu)
            .map(|(_, frame)| frame.map(|f| (f.data.to_vec(), f.is_intact)))
    };
    assert_eq!(read(&pdu), Ok(Some((b"hello".to_vec(), true))));
    let mut bad_data = pdu.clone();
    bad_data[53] ^= 1;
    assert_eq!(
        read(&bad_data).map(|f| f.map(|(_, intact)| intact)),
        Ok(Some(false))
    );
    let mut bad_header = pdu;
    bad_header[16] ^= 1;
    assert_eq!(read(&bad_header), Err(FrameError::HeaderDigest));
}

/// CVE-2026-74556, CVE-2026-74557: the length of sense data is sent by the target.
#[test]
fn cve_2026_74556_and_2026_74557_sense_length_is_checked() {
    assert_eq!(ScsiResponse::sense_of(&[]), Ok(&[][..]));
    assert_eq!(ScsiResponse::sense_of(&[0]), Ok(&[][..]));
    assert_eq!(
        ScsiResponse::sense_of(&[0, 2, 0x70, 0, 9]),
        Ok(&[0x70, 0][..])
    );
    assert!(ScsiResponse::sense_of(&[0xff, 0xff, 1]).is_err());
}

/// CVE-2013-2850: a key that is too long.
#[test]
fn cve_2013_2850_invalid_keys_are_refused() {
    let long = [&[b'A'; 64][..], b"=1"].concat();
    let first = |text: &[u8]| {
        text::pairs(text)
            .next()
            .unwrap()
            .map(|(k, v)| (k.len(), v.len()))
    };
    assert_eq!(first(&long), Err(TextError::Key));
    assert_eq!(first(&long[1..]), Ok((63, 1)));
    assert_eq!(first(b"Key"), Err(TextError::NoEquals));
    assert_eq!(first(b"=x"), Err(TextError::Key));
    assert_eq!(first(b"A=\x1b[2J"), Err(TextError::Value));
    assert_eq!(first(b"A=\xff"), Err(TextError::Value));
    let pairs: Vec<_> = text::pairs(b"A=1\0\0B=x=y\0").collect();
    assert_eq!(pairs, [Ok(("A", "1")), Ok(("B", "x=y"))]);
}

#[test]
fn collected_text_is_limited() {
    let mut collector = text::Collector::default();
    let part = [b'x'; 8192];
    assert_eq!(collector.add_part(&part, true), Ok(None));
    assert_eq!(collector.add_part(&part, true), Ok(None));
    let too_long = Err(TextError::TooLong(text::MAX_TEXT));
    assert_eq!(collector.add_part(b"y", false), too_long);
    assert!(collector.is_empty());
    let mut long = text::Collector::with_limit(3 * part.len());
    for _ in 0..3 {
        assert_eq!(long.add_part(&part, true), Ok(None));
    }
    assert!(long.add_part(b"y", false).is_err());
}

/// CVE-2026-18724 to CVE-2026-18728: names with control characters, or which could be used as a
/// path.
#[test]
fn cve_2026_18724_to_2026_18728_discovery_names_are_checked() {
    for good in [
        "iqn.2026-01.org.example:disk.1",
        "eui.02004567A425678D",
        "naa.52004567BA64678D",
        "naa.62004567BA64678D0123456789ABCDEF",
    ] {
        assert_eq!(IscsiName::new(good).unwrap().as_str(), good.to_lowercase());
    }
    let cases = [
        ("", NameError::Length),
        ("iqn.2026-01.a/../b", NameError::Character),
        ("iqn.2026-01.a\nb", NameError::Character),
        ("iqn.2026-01.a b", NameError::Character),
        ("iqn.26-1.a", NameError::Form),
        ("iqn.2026-01.", NameError::Form),
        ("eui.123", NameError::Form),
        ("foo.2026-01.a", NameError::Type),
    ];
    for (bad, error) in cases {
        assert_eq!(IscsiName::new(bad), Err(error), "{bad:?}");
    }
    assert!(IscsiName::new(&format!("iqn.2026-01.{}", "a".repeat(300))).is_err());
    let text = b"TargetName=iqn.2026-01.a:x\0TargetAddress=10.0.0.1:3260,1\0\
        TargetName=iqn.2026-01.b/../../etc\0TargetAddress=10.0.0.2,1\0\
        TargetName=iqn.2026-01.c\0TargetAddress=a;reboot\0";
    let (found, refused) = name::parse_targets(text).unwrap();
    let names: Vec<_> = found.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["iqn.2026-01.a:x", "iqn.2026-01.c"]);
    assert_eq!(found[0].addresses[0].to_string(), "10.0.0.1:3260,1");
    assert_eq!(refused, 2);
}

#[test]
fn target_addresses_parse_all_formats() {
    let parse = |s| TargetAddress::parse(s).map(|a| (a.host, a.port, a.group));
    let of = |host: &str, port, group| Some((host.to_owned(), port, group));
    assert_eq!(parse("10.0.0.1"), of("10.0.0.1", 3260, None));
    assert_eq!(parse("10.0.0.1:1,2"), of("10.0.0.1", 1, Some(2)));
    assert_eq!(parse("[fe80::1]:99,1"), of("[fe80::1]", 99, Some(1)));
    assert_eq!(parse("[fe80::1],1"), of("[fe80::1]", 3260, Some(1)));
    assert_eq!(parse("host.example:3260"), of("host.example", 3260, None));
    for bad in [
        "", ":1", "a:b", "a,b", "[fe80::1", "a b", "[::1]x", "a:70000",
    ] {
        assert_eq!(parse(bad), None, "{bad}");
    }
}

/// CVE-2018-14633, CVE-2026-63886: hex and base64 values that are larger than the buffer.
#[test]
fn cve_2018_14633_and_2026_63886_decoder_respects_buffer() {
    let mut small = [0; 4];
    assert_eq!(chap::decode_into("0x01020304", &mut small), Some(4));
    assert_eq!(small, [1, 2, 3, 4]);
    assert_eq!(chap::decode_into("0x0102030405", &mut small), None);
    assert_eq!(chap::decode_into("0bAQIDBA==", &mut small), Some(4));
    assert_eq!(chap::decode_into("0bAQIDBAU=", &mut small), None);
    assert_eq!(chap::decode("0x123").unwrap(), [1, 0x23]);
    for bad in [
        "", "0x", "0b", "0xg1", "0b====", "0bA", "0bA===", "0bAQ=", "0bAQ=A", "0bAR==", "12",
    ] {
        assert_eq!(chap::decode(bad), None, "{bad}");
    }
    assert!(chap::decode(&format!("0x{}", "ab".repeat(1024))).is_some());
    assert!(chap::decode(&format!("0x{}", "ab".repeat(1025))).is_none());
    assert!(chap::decode(&format!("0b{}", "A".repeat(1400))).is_none());
}

/// Digests of 01h, `secret` and 32 bytes of 07h, computed with a different implementation.
#[test]
fn chap_responses_match_reference() {
    let cases = [
        (chap::Algorithm::Md5, "0xf13858c8111b55783ca32c9950d8b6b5"),
        (
            chap::Algorithm::Sha1,
            "0x7dda244a989797b40aa0a300581c9429a23a7182",
        ),
        (
            chap::Algorithm::Sha256,
            "0xeeb209ccd64cb9e7d76755aa27b43f198e5bdafd48054b987a604eaa20e4a491",
        ),
        (
            chap::Algorithm::Sha3_256,
            "0x42662ff1bd38ebbca47f200cc089fcaeaa041d7d3476322e50f82a3b003702bf",
        ),
    ];
    for (algorithm, response) in cases {
        let challenge = chap::Challenge {
            algorithm,
            id: 1,
            bytes: [7; 32],
        };
        assert!(challenge.is_valid_response(response, b"secret"));
        assert!(!challenge.is_valid_response(response, b"other"));
        assert!(!challenge.is_valid_response(&response[..response.len() - 2], b"secret"));
        assert!(!challenge.is_valid_response("", b"secret"));
    }
}

#[test]
fn numbers_are_unsigned_decimal_or_hex() {
    assert_eq!(keys::parse_number("262144"), Some(262_144));
    assert_eq!(keys::parse_number("0x40000"), Some(262_144));
    for bad in ["", "0x", "+1", "-1", "1 ", "4294967296", "0x+1", "1k"] {
        assert_eq!(keys::parse_number(bad), None, "{bad}");
    }
}

#[test]
fn table_order_matches_keys() {
    for (place, row) in keys::TABLE.iter().enumerate() {
        assert_eq!(row.key as usize, place);
        assert_eq!(keys::Key::of(row.name), Some(row.key));
    }
}

proptest! {
    /// The resulting PDUs should not depend on how a stream is split.
    #[test]
    fn framing_is_independent_of_splits(
        pdus in proptest::collection::vec((any::<u32>(), proptest::collection::vec(any::<u8>(), 0..300)), 1..8),
        cuts in proptest::collection::vec(1..200_usize, 1..40),
        header in any::<bool>(), data in any::<bool>(),
    ) {
        let digests = Digests { header, data };
        let mut stream = Vec::new();
        for (tag, data) in &pdus {
            let mut bhs = WRITE;
            bhs[16..20].copy_from_slice(&tag.to_be_bytes());
            frame::put_pdu(bhs, &[], data, digests, &mut stream);
        }
        let mut framer = Framer::new(512);
        framer.set(512, digests);
        let mut out = Vec::new();
        let (mut at, mut turn) = (0, 0);
        while at < stream.len() {
            let end = (at + cuts[turn % cuts.len()]).min(stream.len());
            let mut piece = &stream[at..end];
            loop {
                let (used, frame) = framer.next(piece).unwrap();
                piece = &piece[used..];
                let Some(frame) = frame else { break };
                prop_assert!(frame.is_intact);
                let tag = u32::from_be_bytes(frame.bhs[16..20].try_into().unwrap());
                out.push((tag, frame.data.to_vec()));
            }
            prop_assert!(piece.is_empty());
            (at, turn) = (end, turn + 1);
        }
        prop_assert_eq!(framer.buffered_len(), 0);
        prop_assert_eq!(out, pdus);
    }

    /// If a PDU was parsed, writing it and parsing it again should return the same value.
    #[test]
    fn pdus_roundtrip(
        mut bhs in proptest::array::uniform32(any::<u8>()),
        rest in proptest::array::uniform16(any::<u8>()),
        opcode in proptest::sample::select(vec![0, 1, 2, 3, 4, 5, 6, 0x10, 0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x31, 0x32, 0x3f_u8]),
    ) {
        bhs[0] = opcode | bhs[0] & 0x40;
        bhs[2] %= 12;
        let mut whole = [0; BHS_LEN];
        whole[..32].copy_from_slice(&bhs);
        whole[32..].copy_from_slice(&rest);
        if let Ok(pdu) = FromInitiator::parse(&frame_of(&whole, &[], &[])) {
            let written = pdu.header();
            prop_assert_eq!(FromInitiator::parse(&frame_of(&written, &pdu.ahs(), &[])).unwrap(), pdu);
        }
        if let Ok((pdu, numbers)) = FromTarget::parse(&frame_of(&whole, &[], &[])) {
            let written = pdu.header(numbers);
            prop_assert_eq!(FromTarget::parse(&frame_of(&written, &[], &[])).unwrap().0, pdu);
        }
    }

    /// Encoding a value as hex and decoding it should return the same value.
    #[test]
    fn hex_values_roundtrip(bytes in proptest::collection::vec(any::<u8>(), 1..1024)) {
        prop_assert_eq!(chap::decode(&chap::encode(&bytes)).unwrap(), bytes);
    }
}
