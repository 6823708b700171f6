//! Fuzz targets for iSCSI: framing, PDUs, text, CHAP values, names, and login on the target.

use riser_scsi::iscsi::chap;
use riser_scsi::iscsi::frame::{Digests, Framer};
use riser_scsi::iscsi::keys::Offer;
use riser_scsi::iscsi::login::{
    Auth, CompletedLogin, Gatekeeper, Identity, Outcome, Refusal, TargetLogin, Terms,
};
use riser_scsi::iscsi::name::{IscsiName, TargetAddress, parse_targets};
use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, LoginStatus, ScsiResponse};
use riser_scsi::iscsi::{BHS_LEN, Tsih, text};
use riser_tests::seeds;

/// No matter how the stream is split, all PDUs must be within the limits. If a PDU can be parsed,
/// writing and parsing it again must return the same value.
fn check_stream(bytes: &[u8]) {
    let Some((&flags, stream)) = bytes.split_first() else {
        return;
    };
    let digests = Digests {
        header: flags & 1 != 0,
        data: flags & 2 != 0,
    };
    let mut framer = Framer::new(4096);
    framer.set(4096, digests);
    for mut piece in stream.chunks(usize::from(flags >> 2) + 1) {
        while !piece.is_empty() {
            let Ok((used, Some(frame))) = framer.next(piece) else {
                break;
            };
            assert!(frame.data.len() <= 4096);
            if let Ok(pdu) = FromInitiator::parse(&frame) {
                let (bhs, ahs) = (pdu.header(), pdu.ahs());
                let again = riser_scsi::iscsi::frame::Frame {
                    bhs: &bhs,
                    ahs: &ahs,
                    ..frame
                };
                assert_eq!(FromInitiator::parse(&again), Ok(pdu));
            }
            if let Ok((pdu, numbers)) = FromTarget::parse(&frame) {
                let _: [u8; BHS_LEN] = pdu.header(numbers);
            }
            let _ = ScsiResponse::sense_of(frame.data);
            piece = &piece[used..];
        }
    }
}

#[test]
fn stream() {
    bolero::check!().for_each(check_stream);
}

#[test]
fn changed_stream() {
    let seeds = seeds::corpus("stream");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_stream(&seeds::change(&seeds, changes)));
}

/// Parses text, values and names received from a peer.
fn check_words(bytes: &[u8]) {
    for (key, value) in text::pairs(bytes).filter_map(Result::ok) {
        assert!(key.len() <= text::MAX_KEY && !value.chars().any(char::is_control));
    }
    let Ok(word) = std::str::from_utf8(bytes) else {
        return;
    };
    let mut small = [0; 16];
    if let Some(len) = chap::decode_into(word, &mut small) {
        assert!(len <= 16);
    }
    if let Ok(name) = IscsiName::new(word) {
        assert!(!name.as_str().contains(['/', '\n', '\0', ' ']));
        assert_eq!(IscsiName::new(name.as_str()), Ok(name));
    }
    if let Some(address) = TargetAddress::parse(word) {
        assert_eq!(TargetAddress::parse(&address.to_string()), Some(address));
    }
    let _ = parse_targets(bytes);
}

#[test]
fn words() {
    bolero::check!().for_each(check_words);
}

#[test]
fn changed_words() {
    let seeds = seeds::corpus("words");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_words(&seeds::change(&seeds, changes)));
}

struct Gate;

impl Gatekeeper for Gate {
    fn admit(&mut self, _: &Identity) -> Result<Terms, Refusal> {
        Ok(Terms {
            offer: Offer::default(),
            auth: Auth::Chap {
                accepted: vec![chap::Credentials {
                    name: "user".into(),
                    secret: b"a secret of its own".to_vec(),
                }],
                own: None,
                algorithms: chap::ALGORITHMS.to_vec(),
            },
            portal_group: 1,
        })
    }

    fn join(&mut self, _: &CompletedLogin) -> Result<Tsih, LoginStatus> {
        panic!("no initiator proves to know the secret")
    }

    fn random(&mut self, out: &mut [u8]) {
        out.fill(7);
    }
}

/// Sends login PDUs: the size of the responses must be limited, and the login must not succeed.
#[test]
fn login() {
    bolero::check!().for_each(|bytes: &[u8]| {
        let mut login = TargetLogin::new();
        let mut text = b"InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t\0".to_vec();
        for part in bytes.split(|byte| *byte == 0xff) {
            let mut bhs = [0; BHS_LEN];
            bhs[0] = 0x43;
            bhs[1] = part.first().copied().unwrap_or(0);
            text.extend_from_slice(part.get(1..).unwrap_or(&[]));
            let frame = riser_scsi::iscsi::frame::Frame {
                bhs: &bhs,
                ahs: &[],
                data: &[],
                is_intact: true,
            };
            let Ok(FromInitiator::LoginRequest(request)) = FromInitiator::parse(&frame) else {
                continue;
            };
            let response = login.handle(&request, &text, &mut Gate);
            text.clear();
            assert!(response.text.len() <= 8192);
            if response.outcome != Outcome::Continue {
                break;
            }
        }
    });
}

/// Keys with valid and almost valid values.
const KEYS: [(&str, &[&str]); 14] = [
    ("SessionType", &["Normal", "Discovery"]),
    ("AuthMethod", &["CHAP,None", "CHAP", "None", "KRB5,CHAP"]),
    ("CHAP_A", &["5", "7,5", "6,7,8", "99"]),
    ("CHAP_N", &["user", "", "another"]),
    (
        "CHAP_R",
        &["0x00112233445566778899aabbccddeeff", "0bAAECAwQF", "17"],
    ),
    ("CHAP_I", &["1", "256"]),
    ("CHAP_C", &["0x0011223344556677", "0x"]),
    ("HeaderDigest", &["CRC32C,None", "None", "CRC32C"]),
    ("MaxConnections", &["1", "65535", "0", "65536"]),
    ("InitialR2T", &["Yes", "No", "Maybe"]),
    ("MaxRecvDataSegmentLength", &["8192", "16777215", "511"]),
    ("FirstBurstLength", &["65536", "0x10000"]),
    ("RDMAExtensions", &["Yes", "No"]),
    ("X-example", &["anything", "NotUnderstood"]),
];

/// Uses existing keys and login stages. Without the secret, the peer must not be able to complete
/// the login.
#[test]
fn login_of_known_keys() {
    bolero::check!()
        .with_type::<Vec<(u8, bool, bool, Vec<(u8, u8)>)>>()
        .for_each(|requests| {
            let mut login = TargetLogin::new();
            let mut text = b"InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t\0".to_vec();
            for (stages, transits, continues, pairs) in requests {
                for (key, value) in pairs {
                    let (key, values) = KEYS[usize::from(*key) % KEYS.len()];
                    let value = values[usize::from(*value) % values.len()];
                    text::put_pair(&mut text, key, value);
                }
                let mut bhs = [0; BHS_LEN];
                bhs[0] = 0x43;
                // Transit, continue, and the current and next stages.
                bhs[1] = u8::from(*transits) << 7 | u8::from(*continues) << 6 | stages & 0x0f;
                let frame = riser_scsi::iscsi::frame::Frame {
                    bhs: &bhs,
                    ahs: &[],
                    data: &[],
                    is_intact: true,
                };
                let Ok(FromInitiator::LoginRequest(request)) = FromInitiator::parse(&frame) else {
                    continue;
                };
                let response = login.handle(&request, &text, &mut Gate);
                text.clear();
                assert!(response.text.len() <= 8192);
                if response.outcome != Outcome::Continue {
                    break;
                }
            }
        });
}
