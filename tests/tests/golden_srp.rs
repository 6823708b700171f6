//! Tests SRP information units using data that was not created by us: a capture of `ib_srp` and
//! `ib_srpt`, and layouts written by hand based on SRP r16a. The expected values never use our own
//! constants.

use riser_scsi::srp::{
    BufferFormats, Cmd, DataBuffer, FromInitiator, FromTarget, ImmediateDataOffset, LoginRej,
    LoginRejReason, LoginReq, LoginRsp, MemDesc, MultiChannelAction, MultiChannelResult, Opcode,
    Residual, RspCode, TLogoutReason, TskMgmtFunction,
};
use riser_tests::capture::packets;

const CAPTURE: &[u8] = include_bytes!("../data/golden_srp.pcap");

/// Returns all messages sent using SEND, reassembled from their packets, and their source.
fn sends() -> Vec<([u8; 4], Vec<u8>)> {
    let mut partial = std::collections::HashMap::<_, Vec<u8>>::new();
    let mut whole = Vec::new();
    for packet in packets(CAPTURE) {
        let key = (packet.source, packet.destination_qp);
        match packet.opcode {
            0x00 => drop(partial.insert(key, packet.rest.to_vec())),
            0x01 => partial
                .get_mut(&key)
                .unwrap()
                .extend_from_slice(packet.rest),
            0x02 => {
                let mut message = partial.remove(&key).unwrap();
                message.extend_from_slice(packet.rest);
                whole.push((packet.source, message));
            }
            0x04 => whole.push((packet.source, packet.rest.to_vec())),
            _ => {}
        }
    }
    assert!(partial.is_empty());
    whole
}

/// Returns the CM MADs in this capture: attribute, and private data starting at the given byte.
fn mads() -> impl Iterator<Item = (u16, &'static [u8])> {
    packets(CAPTURE).filter(|p| p.opcode == 0x64).map(|p| {
        let mad = &p.rest[8..];
        assert_eq!(mad.len(), 256);
        (u16::from_be_bytes([mad[16], mad[17]]), &mad[24..])
    })
}

#[test]
fn captured_logins_round_trip() {
    let mut seen = (Vec::new(), Vec::new());
    for (attribute, message) in mads() {
        match attribute {
            0x10 => {
                // The private data of a REQ starts at byte 140 of the message, and the first 36
                // bytes are the RDMA CM header.
                let private = &message[140 + 36..];
                assert_eq!(private.len(), 56);
                let req = LoginReq::parse_rdma(private).unwrap();
                let mut out = [0xee; 56];
                assert_eq!(req.emit_rdma(&mut out), 56);
                assert_eq!(out, private);
                seen.0.push(req);
            }
            0x13 => {
                let private = &message[36..];
                let rsp = LoginRsp::parse(private).unwrap();
                let mut out = [0xee; 52];
                assert_eq!(rsp.emit(&mut out), 52);
                assert_eq!(out, private[..52]);
                seen.1.push(rsp);
            }
            _ => {}
        }
    }
    let (reqs, rsps) = seen;
    assert_eq!((reqs.len(), rsps.len()), (2, 2));
    assert_eq!(reqs[0].req_it_iu_len, 8260);
    assert_eq!(
        reqs[0].formats,
        BufferFormats::DIRECT | BufferFormats::INDIRECT
    );
    assert_eq!(reqs[0].immediate, ImmediateDataOffset::new(68));
    assert_eq!(reqs[0].multi_channel, MultiChannelAction::Single);
    assert_eq!(reqs[1].multi_channel, MultiChannelAction::Multi);
    assert_eq!(reqs[0].initiator_port, reqs[1].initiator_port);
    assert_eq!(rsps[0].req_lim_delta, 128);
    assert_eq!(
        (rsps[0].max_it_iu_len, rsps[0].max_ti_iu_len),
        (0x2054, 0x2044)
    );
    assert_eq!(rsps[0].multi_channel, MultiChannelResult::NoChannels);
    assert_eq!(rsps[1].multi_channel, MultiChannelResult::Maintained);
    assert!(rsps[0].immediate && !rsps[0].solicited_notification);
}

#[test]
fn captured_information_units_round_trip() {
    let immediate = ImmediateDataOffset::new(68);
    let (mut commands, mut responses, mut immediates) = (0, 0, 0);
    for (_, message) in sends() {
        let mut out = vec![0xee; message.len()];
        match Opcode::of(&message).unwrap() {
            Opcode::Cmd => {
                let iu = FromInitiator::parse(&message, immediate).unwrap();
                assert_eq!(iu.emit(&mut out), message.len());
                let FromInitiator::Cmd(cmd) = iu else {
                    unreachable!()
                };
                commands += 1;
                if let DataBuffer::Immediate { data, .. } = cmd.data_out {
                    immediates += 1;
                    assert_eq!(data.len(), message.len() - 68);
                    // The sender doesn't clear the buffer between the descriptor and the offset.
                    out[52..68].copy_from_slice(&message[52..68]);
                }
            }
            _ => {
                let iu = FromTarget::parse(&message).unwrap();
                assert_eq!(iu.emit(&mut out), message.len());
                let FromTarget::Rsp(rsp) = iu else {
                    panic!("{iu:?}")
                };
                responses += 1;
                if let Some(sense) = rsp.sense {
                    assert_eq!((rsp.status, sense[0] & 0x7f), (2, 0x70));
                }
            }
        }
        assert!(out == message, "{commands} commands, {responses} responses");
    }
    assert_eq!((commands, responses, immediates), (55, 55, 1));
}

#[test]
fn captured_inquiry_is_decoded() {
    let (source, inquiry) = &sends()[0];
    assert_eq!(*source, [10, 99, 1, 2]);
    let cmd = Cmd::parse(inquiry, None).unwrap();
    assert_eq!(cmd.cdb[..6], [0x12, 0, 0, 0, 0x24, 0]);
    assert_eq!(
        cmd.data_in,
        DataBuffer::Direct(MemDesc::new(0xff2e_c96a_1f27_3c00, 0xf102, 36))
    );
    assert_eq!(cmd.data_out, DataBuffer::None);
}

/// SRP r16a, SRP_LOGIN_REJ: type C2h, reason in bytes 4-7, tag in 8-15, formats in 24-25.
#[test]
fn login_reject_layout() {
    let reasons = [
        (0x0001_0000, LoginRejReason::UnableToEstablishChannel),
        (0x0001_0001, LoginRejReason::InsufficientResources),
        (0x0001_0002, LoginRejReason::ReqItIuLengthTooLarge),
        (0x0001_0003, LoginRejReason::UnableToAssociateChannel),
        (0x0001_0004, LoginRejReason::UnsupportedDescriptorFormat),
        (0x0001_0005, LoginRejReason::MultiChannelUnsupported),
        (0x0001_0006, LoginRejReason::ChannelLimitReached),
        (0x0001_0007, LoginRejReason::Other(0x0001_0007)),
    ];
    for (code, reason) in reasons {
        let mut iu = [0u8; 32];
        iu[0] = 0xc2;
        iu[4..8].copy_from_slice(&u32::to_be_bytes(code));
        iu[15] = 9;
        iu[25] = 6;
        let rej = LoginRej::parse(&iu).unwrap();
        assert_eq!((rej.reason, rej.tag.0), (reason, 9));
        let mut out = [0xee; 32];
        rej.emit(&mut out);
        assert_eq!(out, iu);
    }
}

/// SRP r16a, SRP_TSK_MGMT: LUN in bytes 20-27, function in 30, task tag in 32-39.
#[test]
fn task_management_layout() {
    #[rustfmt::skip]
    let iu = [
        0x01, 0x06, 0, 0, 0, 0, 0, 0, // type; UCSOLNT and SCSOLNT
        0, 0, 0, 0, 0, 0, 0, 5,       // tag
        0, 0, 0, 0,                   // reserved
        0, 3, 0, 0, 0, 0, 0, 0,       // logical unit 3
        0, 0, 0x08, 0,                // LOGICAL UNIT RESET
        0, 0, 0, 0, 0, 0, 0, 4,       // task tag
        0, 0, 0, 0, 0, 0, 0, 0,       // reserved
    ];
    let parsed = FromInitiator::parse(&iu, None).unwrap();
    let FromInitiator::TskMgmt(tmf) = parsed else {
        panic!("{parsed:?}")
    };
    assert_eq!(tmf.function, TskMgmtFunction::LogicalUnitReset);
    assert_eq!((tmf.tag.0, tmf.task_tag.0, tmf.lun[1]), (5, 4, 3));
    assert!(tmf.notify_success && tmf.notify_failure);
    let mut out = [0xee; 48];
    assert_eq!(parsed.emit(&mut out), 48);
    assert_eq!(out, iu);
}

/// SRP r16a, SRP_RSP: flags in byte 18, status in 19, residuals in 20-27, lengths in 28-35.
/// Response data is before sense data.
#[test]
fn response_layout() {
    #[rustfmt::skip]
    let iu = [
        0xc1, 0x01, 0, 0, 0xff, 0xff, 0xff, 0xfe, // type; SOLNT; request limit delta -2
        0, 0, 0, 0, 0, 0, 0, 0x20,                // tag
        0, 0, 0x27, 0x02,                         // DIUNDER, DOOVER, SNSVALID, RSPVALID; CHECK CONDITION
        0, 0, 0, 7, 0, 0, 2, 0,                   // data-out and data-in residual counts
        0, 0, 0, 8, 0, 0, 0, 4,                   // lengths of sense data and response data
        0, 0, 0, 4,                               // TASK MANAGEMENT FUNCTION NOT SUPPORTED
        0x72, 0x05, 0x24, 0, 0, 0, 0, 0,          // sense data in descriptor format
    ];
    let parsed = FromTarget::parse(&iu).unwrap();
    let FromTarget::Rsp(rsp) = parsed else {
        panic!("{parsed:?}")
    };
    assert_eq!(rsp.req_lim_delta, -2);
    assert_eq!(rsp.data_out, Residual::Over(7));
    assert_eq!(rsp.data_in, Residual::Under(512));
    assert_eq!(rsp.response, Some(RspCode::TskMgmtNotSupported));
    assert_eq!(rsp.sense, Some(&[0x72, 0x05, 0x24, 0, 0, 0, 0, 0][..]));
    let mut out = [0xee; 48];
    assert_eq!(parsed.emit(&mut out), 48);
    assert_eq!(out, iu);
}

/// SRP r16a: all information units with 16 bytes, and SRP_AER_REQ.
#[test]
fn short_layouts() {
    #[rustfmt::skip]
    let from_target: [&[u8]; 3] = [
        &[0x80, 1, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1],
        &[0x81, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 2],
        &[
            0x82, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, // delta 1, tag 3
            0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0,                 // logical unit 9
            0, 0, 0, 8, 0, 0, 0, 0,                             // eight bytes of sense data
            0x72, 0x06, 0x3f, 0x0e, 0, 0, 0, 0,                 // REPORTED LUNS DATA HAS CHANGED
        ],
    ];
    for bytes in from_target {
        let iu = FromTarget::parse(bytes).unwrap();
        let mut out = [0xee; 44];
        assert_eq!(iu.emit(&mut out), bytes.len());
        assert_eq!(&out[..bytes.len()], bytes);
        match iu {
            FromTarget::TLogout(iu) => assert_eq!(iu.reason, TLogoutReason::MultiChannelAction),
            FromTarget::CredReq(iu) => assert_eq!(iu.req_lim_delta, 16),
            FromTarget::AerReq(iu) => assert_eq!((iu.lun[1], iu.sense[2]), (9, 0x3f)),
            other => panic!("{other:?}"),
        }
    }
    for opcode in [0x03, 0x41, 0x42] {
        let bytes = [opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x77];
        let iu = FromInitiator::parse(&bytes, None).unwrap();
        let mut out = [0xee; 16];
        assert_eq!(iu.emit(&mut out), 16);
        assert_eq!(out, bytes);
    }
}

/// SRP r16a, SRP_LOGIN_REQ, 64 bytes, with the immediate data fields from SRP-2.
#[test]
fn login_request_layout() {
    #[rustfmt::skip]
    let iu = [
        0x00, 0, 0, 0, 0, 0, 0, 0,
        1, 2, 3, 4, 5, 6, 7, 8,             // tag
        0, 0, 0x20, 0x44, 0, 0, 0, 0,       // requested length 8260
        0x00, 0x06, 0x81, 0, 0, 0x44, 0, 0, // formats; immediate, multi-channel; offset 68
        0, 0, 0, 0, 0, 0, 0, 1, 0x52, 0x54, 0, 0xff, 0xfe, 0, 0, 1, // initiator port
        0, 0, 0, 0, 0, 0, 0, 2, 0x52, 0x54, 0, 0xff, 0xfe, 0, 0, 2, // target port
    ];
    let req = LoginReq::parse(&iu).unwrap();
    assert_eq!(req.tag.0, 0x0102_0304_0506_0708);
    assert_eq!(req.req_it_iu_len, 8260);
    assert_eq!(req.multi_channel, MultiChannelAction::Multi);
    assert_eq!(req.initiator_port.parts().extension, 1);
    assert_eq!(req.target_port.parts().guid, 0x5254_00ff_fe00_0002);
    let mut out = [0xee; 64];
    assert_eq!(req.emit(&mut out), 64);
    assert_eq!(out, iu);
}
