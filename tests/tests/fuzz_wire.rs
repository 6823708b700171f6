//! Fuzz targets for all data that is decoded from a RoCEv2 packet.
//!
//! Each target is a normal test that uses its corpus and random inputs. `changed_*` uses valid
//! messages with a few changes, so that headers are accepted. Use `cargo bolero test -p riser-tests
//! NAME` to run a target with coverage.

use riser_tests::seeds;
use riser_transport::wire::cm_msg::CmMessage;
use riser_transport::wire::cma::CmaHeader;
use riser_transport::wire::dm;
use riser_transport::wire::icrc::{ICRC_LEN, IcrcFlow};
use riser_transport::wire::packet::{Packet, emit_headers};
use riser_transport::wire::{Bth, Opcode};

/// If a packet can be parsed, it must be the same when it's written again.
fn check_packet(datagram: &[u8]) {
    let Ok(packet) = Packet::parse(datagram) else {
        return;
    };
    let headers = emit_headers(&packet.bth, &packet.ext);
    // In a congestion notification, reserved fields are ignored and always written as zero.
    let is_cnp = packet.bth.opcode() == Some(Opcode::Cnp);
    let compared = if is_cnp { Bth::LEN } else { headers.len() };
    assert_eq!(datagram[..compared], headers.as_slice()[..compared]);
    let pad = packet.bth.pad();
    assert_eq!(
        headers.len() + packet.payload.len() + pad + ICRC_LEN,
        datagram.len()
    );
}

#[test]
fn packet() {
    bolero::check!().for_each(check_packet);
}

#[test]
fn changed_packet() {
    let seeds = seeds::corpus("packet");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_packet(&seeds::change(&seeds, changes)));
}

/// If a message can be parsed, writing and parsing it again must return the same value.
fn check_cm_message(bytes: &[u8]) {
    let mut mad = [0; 256];
    let len = bytes.len().min(mad.len());
    mad[..len].copy_from_slice(&bytes[..len]);
    // Most random bytes are for an unknown class, so we set the class to the connection manager.
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[16] = 0;
    let _ = CmMessage::parse(bytes);
    for attribute in 0x10..0x1c {
        mad[17] = attribute;
        if let Ok((transaction, message)) = CmMessage::parse(&mad) {
            let again = message.emit(transaction);
            let reparsed = CmMessage::parse(&again);
            assert_eq!(reparsed, Ok((transaction, message)));
        }
    }
}

#[test]
fn cm_message() {
    bolero::check!().for_each(check_cm_message);
}

#[test]
fn changed_cm_message() {
    let seeds = seeds::corpus("cm_message");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_cm_message(&seeds::change(&seeds, changes)));
}

/// Parses the RDMA CM header, which is sent before the user's private data.
fn check_cma_header(bytes: &[u8]) {
    if let Ok((header, user)) = CmaHeader::parse(bytes) {
        assert_eq!(user.len() + header.emit().len(), bytes.len());
        let (again, _) = CmaHeader::parse(&header.emit()).expect("what we write parses");
        assert_eq!(again, header);
    }
}

#[test]
fn cma_header() {
    bolero::check!().for_each(check_cma_header);
}

#[test]
fn changed_cma_header() {
    let seeds = seeds::corpus("cma_header");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_cma_header(&seeds::change(&seeds, changes)));
}

/// Parses the device management MADs received by a target.
fn check_dm_mad(bytes: &[u8]) {
    let mut mad = [0; 256];
    let len = bytes.len().min(mad.len());
    mad[..len].copy_from_slice(&bytes[..len]);
    mad[..4].copy_from_slice(&[1, 6, 1, 1]);
    let (header, data) = dm::DmHeader::parse(&mad).expect("its class is right");
    assert_eq!(
        dm::DmHeader::parse(&header.emit(data)),
        Ok((header, data)),
        "what is written is read again"
    );
    let _ = dm::ClassPortInfo::parse(data);
    let _ = dm::IoUnitInfo::parse(data).map(|i| i.controllers().count());
    let _ = dm::IocProfile::parse(data);
    assert!(dm::ServiceEntry::parse_list(data, usize::from(bytes.len() as u8)).len() <= 4);
    let _ = dm::DmHeader::parse(bytes);
}

#[test]
fn dm_mad() {
    bolero::check!().for_each(check_dm_mad);
}

#[test]
fn changed_dm_mad() {
    let seeds = seeds::corpus("dm_mad");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_dm_mad(&seeds::change(&seeds, changes)));
}

/// Changing any single bit must change the ICRC.
#[test]
fn icrc_sees_every_bit() {
    bolero::check!()
        .with_type::<(Vec<u8>, usize)>()
        .for_each(|(bytes, at)| {
            if bytes.len() < 12 || bytes.len() > 4160 {
                return;
            }
            let [a, b] =
                ["127.0.0.1:4791", "127.0.0.2:4791"].map(|a| a.parse().expect("an address"));
            let flow = IcrcFlow::new(a, b).expect("both are IPv4");
            let before = flow.compute(bytes, 0);
            let mut changed = bytes.clone();
            let bit = at % (bytes.len() * 8);
            // The fifth byte of the BTH is the only byte that may be changed by a router.
            if bit / 8 != 4 {
                changed[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(before, flow.compute(&changed, 0));
            }
        });
}
