//! Fuzz targets for SRP information units in both directions.

use riser_scsi::srp::{DataBuffer, FromInitiator, FromTarget, ImmediateDataOffset, LoginReq};
use riser_tests::seeds;

/// If a target can parse the data, writing and parsing it again must return the same value.
fn check_from_initiator(bytes: &[u8]) {
    let mut iu = bytes.to_vec();
    for opcode in [0x00, 0x01, 0x02, 0x03, 0x41, 0x42] {
        if let Some(first) = iu.first_mut() {
            *first = opcode;
        }
        for immediate in [None, ImmediateDataOffset::new(68)] {
            if let Ok(parsed) = FromInitiator::parse(&iu, immediate) {
                let mut out = vec![0; iu.len().max(512)];
                let len = parsed.emit(&mut out);
                assert_eq!(FromInitiator::parse(&out[..len], immediate), Ok(parsed));
                visit(&parsed);
            }
        }
    }
}

#[test]
fn from_initiator() {
    bolero::check!().for_each(check_from_initiator);
}

#[test]
fn changed_from_initiator() {
    let seeds = seeds::corpus("from_initiator");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_from_initiator(&seeds::change(&seeds, changes)));
}

/// Reads all descriptors in a command.
fn visit(iu: &FromInitiator<'_>) {
    let FromInitiator::Cmd(cmd) = iu else { return };
    for buffer in [&cmd.data_out, &cmd.data_in] {
        if let DataBuffer::Indirect(table) = buffer {
            assert!(table.inline.len() as u64 <= u64::from(table.entries()));
        }
    }
}

/// If an initiator can parse the data, writing and parsing it again must return the same value.
fn check_from_target(bytes: &[u8]) {
    let mut iu = bytes.to_vec();
    for opcode in [0x80, 0x81, 0xc0, 0xc1, 0xc2] {
        if let Some(first) = iu.first_mut() {
            *first = opcode;
        }
        if let Ok(parsed) = FromTarget::parse(&iu) {
            let mut out = vec![0; iu.len().max(512)];
            let len = parsed.emit(&mut out);
            assert_eq!(FromTarget::parse(&out[..len]), Ok(parsed));
        }
    }
}

#[test]
fn from_target() {
    bolero::check!().for_each(check_from_target);
}

#[test]
fn changed_from_target() {
    let seeds = seeds::corpus("from_target");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_from_target(&seeds::change(&seeds, changes)));
}

/// Parses the login request in RDMA CM private data.
fn check_login_in_private_data(bytes: &[u8]) {
    let _ = LoginReq::parse_rdma(bytes);
}

#[test]
fn login_in_private_data() {
    bolero::check!().for_each(check_login_in_private_data);
}

#[test]
fn changed_login_in_private_data() {
    let seeds = seeds::corpus("login_in_private_data");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_login_in_private_data(&seeds::change(&seeds, changes)));
}
