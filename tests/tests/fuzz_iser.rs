//! Fuzz targets for data parsed by iSER: headers, messages and private data.

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget};
use riser_scsi::iser::{CmHeader, Header, Message, put_control};
use riser_tests::seeds;

/// A valid message must have the length set in its header, and must be the same when it's written
/// again.
fn check_message(bytes: &[u8]) {
    let mut message = bytes.to_vec();
    for first in [None, Some(0x10), Some(0x1c), Some(0x20), Some(0x30)] {
        if let (Some(first), Some(byte)) = (first, message.first_mut()) {
            *byte = first;
        }
        match Message::parse(&message) {
            Ok(Message::Control { buffers, frame }) => {
                let whole = 76 + frame.ahs.len() + frame.data.len();
                assert!((whole..whole + 4).contains(&message.len()));
                let mut out = Vec::new();
                put_control(buffers, *frame.bhs, frame.ahs, frame.data, &mut out);
                // If data was announced but is sent via the advertised buffer, it's not announced
                // any more.
                let mut bhs = *frame.bhs;
                if frame.data.is_empty() {
                    bhs[5..8].fill(0);
                }
                let frame = Frame { bhs: &bhs, ..frame };
                assert_eq!(
                    Message::parse(&out),
                    Ok(Message::Control { buffers, frame })
                );
                parse_pdu(&frame);
            }
            Ok(Message::Hello(hello)) => {
                let header = Header::Hello(hello).bytes();
                assert_eq!(Message::parse(&header), Ok(Message::Hello(hello)));
                assert!(hello.build_reply(16).ord <= 16);
            }
            Ok(Message::HelloReply(reply)) => {
                let header = Header::HelloReply(reply).bytes();
                assert_eq!(Message::parse(&header), Ok(Message::HelloReply(reply)));
            }
            Err(_) => {}
        }
    }
}

#[test]
fn message() {
    bolero::check!().for_each(check_message);
}

#[test]
fn changed_message() {
    let seeds = seeds::corpus("message");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_message(&seeds::change(&seeds, changes)));
}

fn parse_pdu(frame: &Frame<'_>) {
    let _ = FromInitiator::parse(frame);
    let _ = FromTarget::parse(frame);
}

/// Parses the header in the private data of a connection request or response.
fn check_private_data(bytes: &[u8]) {
    let header = CmHeader::parse(bytes);
    assert_eq!(CmHeader::parse(&header.bytes()), header);
    assert_eq!(header.and(CmHeader::default()), CmHeader::default());
}

#[test]
fn private_data() {
    bolero::check!().for_each(check_private_data);
}

#[test]
fn changed_private_data() {
    let seeds = seeds::corpus("private_data");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_private_data(&seeds::change(&seeds, changes)));
}
