//! Tests iSER using data that was not created by us: a capture of `ib_iser` and LIO. The expected
//! values never use our own constants.

use std::collections::HashMap;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{
    Auth, CompletedLogin, Gatekeeper, Identity, Outcome, Refusal, TargetLogin, Terms,
};
use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, LoginStatus};
use riser_scsi::iscsi::{CmdSn, Numbers, StatSn, Tsih};
use riser_scsi::iser::{Buffers, CmHeader, Header, Message, put_control};
use riser_tests::capture::packets;

const CAPTURE: &[u8] = include_bytes!("../data/golden_iser.pcap");

/// Host part of the initiator's address.
const INITIATOR: u8 = 2;

/// A message that was sent using SEND.
struct Sent {
    source: u8,
    /// Key that was invalidated by this message.
    invalidated: Option<u32>,
    bytes: Vec<u8>,
}

/// Returns all messages sent using SEND, reassembled from their packets.
fn sends() -> Vec<Sent> {
    let mut partial = HashMap::<_, Vec<u8>>::new();
    let mut whole = Vec::new();
    for packet in packets(CAPTURE) {
        let key = (packet.source, packet.destination_qp);
        let (invalidated, bytes) = match packet.opcode {
            0x00 => {
                partial.insert(key, packet.rest.to_vec());
                continue;
            }
            0x01 => {
                let so_far = partial.get_mut(&key).unwrap();
                so_far.extend_from_slice(packet.rest);
                continue;
            }
            0x02 => {
                let mut bytes = partial.remove(&key).unwrap();
                bytes.extend_from_slice(packet.rest);
                (None, bytes)
            }
            0x04 => (None, packet.rest.to_vec()),
            0x17 => {
                let (rkey, rest) = packet.rest.split_at(4);
                let rkey = u32::from_be_bytes(rkey.try_into().unwrap());
                (Some(rkey), rest.to_vec())
            }
            _ => continue,
        };
        whole.push(Sent {
            source: packet.source[3],
            invalidated,
            bytes,
        });
    }
    assert!(partial.is_empty());
    whole
}

fn control(bytes: &[u8]) -> (Buffers, Frame<'_>) {
    match Message::parse(bytes) {
        Ok(Message::Control { buffers, frame }) => (buffers, frame),
        other => panic!("{other:?}"),
    }
}

#[test]
fn kernel_private_data_round_trips() {
    let mut seen = Vec::new();
    for packet in packets(CAPTURE).filter(|p| p.opcode == 0x64) {
        let mad = &packet.rest[8..];
        // The private data of a REQ starts at byte 140 of the message, after 36 bytes used for the
        // RDMA CM.
        let private = match u16::from_be_bytes([mad[16], mad[17]]) {
            0x10 => &mad[24 + 140 + 36..],
            0x13 => &mad[24 + 36..],
            _ => continue,
        };
        let header = CmHeader::parse(private);
        assert_eq!(header.bytes(), private[..4]);
        seen.push((header.zero_based, header.remote_invalidate));
    }
    assert_eq!(seen, [(false, true), (false, true)]);
}

#[test]
fn captured_messages_round_trip() {
    let (mut from_initiator, mut from_target) = (0, 0);
    for sent in sends() {
        let (buffers, frame) = control(&sent.bytes);
        assert_eq!(Header::Control(buffers).bytes(), sent.bytes[..28]);
        let bhs = if sent.source == INITIATOR {
            from_initiator += 1;
            let pdu = FromInitiator::parse(&frame).unwrap();
            assert_eq!(pdu.ahs(), frame.ahs);
            pdu.header()
        } else {
            from_target += 1;
            let (pdu, numbers): (FromTarget, Numbers) = FromTarget::parse(&frame).unwrap();
            pdu.header(numbers)
        };
        let mut out = Vec::new();
        put_control(buffers, bhs, frame.ahs, frame.data, &mut out);
        assert_eq!(out, sent.bytes, "{:x?}", frame.bhs);
    }
    assert_eq!((from_initiator, from_target), (42, 42));
}

/// If a response invalidates a key, it must have been advertised by the command with the same tag.
#[test]
fn responses_invalidate_advertised_keys() {
    let mut advertised = HashMap::new();
    let mut invalidated = 0;
    for sent in sends() {
        let (buffers, frame) = control(&sent.bytes);
        let tag = frame.bhs[16..20].to_vec();
        if sent.source == INITIATOR {
            let buffer = buffers.read.or(buffers.write);
            advertised.insert(tag, buffer.map(|b| b.stag.0));
        } else {
            assert_eq!(advertised[&tag], sent.invalidated);
            invalidated += usize::from(sent.invalidated.is_some());
        }
    }
    assert!(invalidated > 30, "{invalidated}");
}

/// The buffer advertised for a write starts after the data that was sent with the command.
#[test]
fn write_advertises_remaining_data() {
    let mut commands = HashMap::new();
    for sent in sends().into_iter().filter(|s| s.source == INITIATOR) {
        let (buffers, frame) = control(&sent.bytes);
        if let (Some(write), Ok(FromInitiator::ScsiCommand(command))) =
            (buffers.write, FromInitiator::parse(&frame))
        {
            let missing = command.expected_length - frame.data.len() as u32;
            commands.insert(write.stag.0, (write.base, missing));
        }
    }
    let mut read = HashMap::<_, u32>::new();
    for packet in packets(CAPTURE).filter(|p| p.opcode == 0x0c) {
        let va = u64::from_be_bytes(packet.rest[..8].try_into().unwrap());
        let rkey = u32::from_be_bytes(packet.rest[8..12].try_into().unwrap());
        let len = u32::from_be_bytes(packet.rest[12..16].try_into().unwrap());
        let so_far = read.entry(rkey).or_default();
        assert_eq!(va, commands[&rkey].0 + u64::from(*so_far));
        *so_far += len;
    }
    let expected = commands
        .iter()
        .map(|(rkey, (_, missing))| (*rkey, *missing));
    assert_eq!(read, expected.collect());
    assert!(!read.is_empty());
}

struct Gate;

impl Gatekeeper for Gate {
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal> {
        assert_eq!(
            identity.target.as_ref().unwrap().as_str(),
            "iqn.2026-01.x:ram"
        );
        Ok(Terms {
            offer: Offer::default()
                .with(Key::RdmaExtensions, 1)
                .with(Key::TargetRecvDataSegmentLength, 65536)
                .with(Key::InitiatorRecvDataSegmentLength, 4096)
                .with(Key::InitialR2T, 0),
            auth: Auth::None,
            portal_group: 7,
        })
    }

    fn join(&mut self, _: &CompletedLogin) -> Result<Tsih, LoginStatus> {
        Ok(Tsih(1))
    }

    fn random(&mut self, _: &mut [u8]) {}
}

/// Our login state machine must accept the keys offered by the kernel and return a value for each
/// key that needs a response.
#[test]
fn kernel_login_is_accepted() {
    let sent = sends();
    let (_, frame) = control(&sent[0].bytes);
    let Ok(FromInitiator::LoginRequest(request)) = FromInitiator::parse(&frame) else {
        panic!("the first message is a login");
    };
    let response = TargetLogin::new().handle(&request, frame.data, &mut Gate);
    let Outcome::FullFeature(joined) = response.outcome else {
        panic!("{response:?}");
    };
    assert!(joined.session.rdma_extensions);
    assert!(!joined.session.initial_r2t && joined.session.immediate_data);
    assert_eq!(joined.session.tagged_solicited_only, None);
    assert_eq!(joined.session.hello_required, None);
    assert_eq!(joined.connection.max_send_segment, 4096);
    assert_eq!(joined.connection.max_recv_segment, 8192);
    let text = String::from_utf8(response.text).unwrap();
    let pairs: Vec<&str> = text.split_terminator('\0').collect();
    for pair in [
        "TargetPortalGroupTag=7",
        "RDMAExtensions=Yes",
        "InitiatorRecvDataSegmentLength=4096",
        "TargetRecvDataSegmentLength=8192",
        "InitialR2T=No",
    ] {
        assert!(pairs.contains(&pair), "{pair} in {pairs:?}");
    }
    let unsolicited = [
        "MaxRecv",
        "MaxOutstandingUnexpected",
        "MaxAHS",
        "NotUnderstood",
    ];
    assert!(
        !unsolicited.iter().any(|key| text.contains(key)),
        "{pairs:?}"
    );
    let header = FromTarget::LoginResponse(response.response).header(Numbers {
        stat_sn: StatSn(1),
        exp_cmd_sn: CmdSn(1),
        max_cmd_sn: CmdSn(1),
    });
    assert_eq!(header[..2], sent[1].bytes[28..30]);
}
