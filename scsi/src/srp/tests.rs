use proptest::prelude::*;

use super::*;

const OFFSET: u16 = 68;

fn offset() -> Option<ImmediateDataOffset> {
    ImmediateDataOffset::new(OFFSET)
}

/// Returns a 64-byte SRP_CMD with READ (10) and a direct descriptor for data-in.
fn direct_read() -> [u8; 64] {
    let mut iu = [0; 64];
    iu[0] = 0x02;
    iu[5] = 0x01;
    iu[8..16].copy_from_slice(&7u64.to_be_bytes());
    iu[32] = 0x28;
    iu[48..56].copy_from_slice(&0x1000u64.to_be_bytes());
    iu[56..60].copy_from_slice(&0xabcdu32.to_be_bytes());
    iu[60..64].copy_from_slice(&4096u32.to_be_bytes());
    iu
}

/// Returns an SRP_CMD with an indirect table for data-in. There are `entries` in the table, of
/// which `inline` with 512 bytes each are in the command, and `len` bytes of data.
fn indirect(entries: u32, inline: u8, len: u32) -> Vec<u8> {
    let mut iu = vec![0; 48];
    iu[0] = 0x02;
    iu[5] = 0x02;
    iu[7] = inline;
    iu.extend_from_slice(&[0; 8]);
    iu.extend_from_slice(&1u32.to_be_bytes());
    iu.extend_from_slice(&(entries * 16).to_be_bytes());
    iu.extend_from_slice(&len.to_be_bytes());
    for i in 0..inline {
        iu.extend_from_slice(&(u64::from(i) * 512).to_be_bytes());
        iu.extend_from_slice(&1u32.to_be_bytes());
        iu.extend_from_slice(&512u32.to_be_bytes());
    }
    iu
}

#[test]
fn direct_descriptor_is_parsed_in_place() {
    let iu = direct_read();
    let cmd = Cmd::parse(&iu, None).unwrap();
    assert_eq!(cmd.tag, Tag(7));
    assert_eq!(cmd.data_out, DataBuffer::None);
    assert_eq!(
        cmd.data_in,
        DataBuffer::Direct(MemDesc::new(0x1000, 0xabcd, 4096))
    );
}

#[test]
fn truncated_command_is_refused() {
    for iu in [direct_read().to_vec(), indirect(3, 3, 1536)] {
        for len in 0..iu.len() {
            let error = Cmd::parse(&iu[..len], None).unwrap_err();
            assert!(
                matches!(error, SrpError::Truncated { .. }),
                "{len}: {error}"
            );
        }
        assert!(Cmd::parse(&iu, None).is_ok());
    }
}

#[test]
fn additional_cdb_past_end_is_refused() {
    let mut iu = direct_read();
    iu[31] = 0xff;
    assert_eq!(
        Cmd::parse(&iu, None),
        Err(SrpError::Truncated {
            field: "additional CDB",
            need: 48 + 252,
            have: 64
        })
    );
}

#[test]
fn partial_table_is_not_complete() {
    let iu = indirect(10, 2, 5120);
    let DataBuffer::Indirect(table) = Cmd::parse(&iu, None).unwrap().data_in else {
        panic!("indirect");
    };
    assert_eq!((table.entries(), table.inline.len()), (10, 2));
    assert!(!table.is_complete());
    let iu = indirect(2, 2, 1024);
    let DataBuffer::Indirect(table) = Cmd::parse(&iu, None).unwrap().data_in else {
        panic!("indirect");
    };
    assert!(table.is_complete());
}

#[test]
fn inconsistent_tables_are_refused() {
    let illegal = |iu: &[u8]| matches!(Cmd::parse(iu, None), Err(SrpError::Illegal { .. }));
    assert!(
        illegal(&indirect(1, 2, 512)),
        "more inline descriptors than in the table"
    );
    assert!(
        illegal(&indirect(2, 2, 1025)),
        "descriptors are shorter than the data length"
    );
    let mut odd = indirect(2, 2, 1024);
    odd[63] = 33;
    assert!(illegal(&odd), "not a multiple of the descriptor size");
    let mut format = direct_read();
    format[5] = 0x04;
    assert!(illegal(&format), "undefined format");
    format[5] = 0x03;
    assert!(illegal(&format), "immediate data-in");
}

fn immediate_write(len: u32, sent: usize) -> Vec<u8> {
    let mut iu = vec![0; usize::from(OFFSET)];
    iu[0] = 0x02;
    iu[5] = 0x30;
    iu[48..52].copy_from_slice(&len.to_be_bytes());
    iu.resize(iu.len() + sent, 0x5a);
    iu
}

#[test]
fn immediate_data_uses_negotiated_offset() {
    let iu = immediate_write(512, 512);
    let cmd = Cmd::parse(&iu, offset()).unwrap();
    let DataBuffer::Immediate { data, len, .. } = cmd.data_out else {
        panic!("immediate");
    };
    assert_eq!((data.len(), len), (512, 512));
    assert!(data.iter().all(|&b| b == 0x5a));
}

/// CVE-2026-74394: the sum of offset and length overflows, so a check of the sum would be
/// successful.
#[test]
fn cve_2026_74394_immediate_length_overflow_fails() {
    for len in [513, u32::MAX, u32::MAX - 67, u32::MAX - 68, 1 << 31] {
        let iu = immediate_write(len, 512);
        assert_eq!(
            Cmd::parse(&iu, offset()),
            Err(SrpError::Truncated {
                field: "immediate data",
                need: 68 + u64::from(len),
                have: 580
            })
        );
    }
}

#[test]
fn immediate_data_requires_negotiation_and_space() {
    let iu = immediate_write(512, 512);
    assert!(matches!(
        Cmd::parse(&iu, None),
        Err(SrpError::Illegal { .. })
    ));
    let mut overlapping = iu.clone();
    overlapping[31] = 20;
    assert!(matches!(
        Cmd::parse(&overlapping, offset()),
        Err(SrpError::Illegal {
            field: "immediate data offset",
            ..
        })
    ));
    assert!(ImmediateDataOffset::new(47).is_none());
}

/// CVE-2026-53186, CVE-2026-74556, CVE-2026-74557: an initiator that trusts the lengths in a
/// response would read sense data past the end of the received bytes.
#[test]
fn cve_2026_53186_2026_74556_and_2026_74557_lengths_are_checked() {
    let mut iu = [0; 36 + 4 + 18];
    iu[0] = 0xc1;
    iu[18] = 0x03;
    iu[31] = 18;
    iu[35] = 4;
    iu[39] = 5;
    let rsp = Rsp::parse(&iu).unwrap();
    assert_eq!(rsp.response, Some(RspCode::TskMgmtFailed));
    assert_eq!(rsp.sense.unwrap().len(), 18);
    for at in [28, 29, 30, 32, 33, 34] {
        let mut bad = iu;
        bad[at] = 0xff;
        assert!(
            matches!(Rsp::parse(&bad), Err(SrpError::Truncated { .. })),
            "{at}"
        );
    }
    let mut bad = iu;
    bad[35] = 3;
    assert!(matches!(Rsp::parse(&bad), Err(SrpError::Illegal { .. })));
    let mut ignored = iu;
    ignored[18] = 0;
    ignored[28..36].fill(0xff);
    let rsp = Rsp::parse(&ignored).unwrap();
    assert_eq!((rsp.response, rsp.sense), (None, None));
}

#[test]
fn residual_cannot_overflow_and_underflow() {
    let mut iu = [0; 36];
    iu[0] = 0xc1;
    for (flags, legal) in [(0x0c, false), (0x30, false), (0x28, true), (0x14, true)] {
        iu[18] = flags;
        assert_eq!(Rsp::parse(&iu).is_ok(), legal, "{flags:#x}");
    }
}

#[test]
fn truncated_event_sense_is_refused() {
    let mut iu = [0; 36 + 18];
    iu[0] = 0x82;
    iu[31] = 18;
    assert_eq!(AerReq::parse(&iu).unwrap().sense.len(), 18);
    iu[28] = 0x80;
    assert!(matches!(
        AerReq::parse(&iu),
        Err(SrpError::Truncated { .. })
    ));
}

#[test]
fn message_direction_is_checked() {
    let mut iu = [0; 64];
    iu[0] = 0xc1;
    assert_eq!(
        FromInitiator::parse(&iu, None),
        Err(SrpError::UnexpectedOpcode(Opcode::Rsp))
    );
    iu[0] = 0x02;
    assert_eq!(
        FromTarget::parse(&iu),
        Err(SrpError::UnexpectedOpcode(Opcode::Cmd))
    );
    iu[0] = 0x77;
    assert_eq!(FromTarget::parse(&iu), Err(SrpError::UnknownOpcode(0x77)));
    assert!(FromTarget::parse(&[]).is_err());
}

#[test]
fn reserved_multi_channel_codes_are_refused() {
    let mut iu = [0; 64];
    iu[26] = 2;
    assert!(matches!(
        LoginReq::parse(&iu),
        Err(SrpError::Illegal { .. })
    ));
    let mut rsp = [0; 52];
    rsp[0] = 0xc0;
    rsp[26] = 3;
    assert!(matches!(
        LoginRsp::parse(&rsp),
        Err(SrpError::Illegal { .. })
    ));
}

#[test]
fn port_ids_split_into_two_parts() {
    let parts = PortIdParts {
        extension: 0x0102_0304_0506_0708,
        guid: 0x1112_1314_1516_1718,
    };
    let id = TargetPortId::from_parts(parts);
    assert_eq!(id.0[..2], [1, 2]);
    assert_eq!(id.0[15], 0x18);
    assert_eq!(id.parts(), parts);
    assert_eq!(id.to_string(), "0102030405060708:1112131415161718");
}

prop_compose! {
    fn mem_desc()(va: u64, key: u32, len: u32) -> MemDesc { MemDesc::new(va, key, len) }
}

#[derive(Clone, Debug)]
enum Buffer {
    None,
    Direct(MemDesc),
    Indirect {
        inline: Vec<MemDesc>,
        more: u32,
        va: u64,
    },
    Immediate(Vec<u8>),
}

impl Buffer {
    fn borrow(&self) -> DataBuffer<'_> {
        match self {
            Self::None => DataBuffer::None,
            Self::Direct(desc) => DataBuffer::Direct(*desc),
            Self::Indirect { inline, more, va } => DataBuffer::Indirect(IndirectTable {
                table: MemDesc::new(*va, 9, (inline.len() as u32 + more) * 16),
                len: inline
                    .iter()
                    .map(MemDesc::data_len)
                    .fold(0, u32::saturating_add),
                inline,
            }),
            Self::Immediate(data) => DataBuffer::Immediate {
                offset: ImmediateDataOffset::new(600).unwrap(),
                len: data.len() as u32,
                data,
            },
        }
    }
}

fn buffer() -> impl Strategy<Value = Buffer> {
    prop_oneof![
        Just(Buffer::None),
        mem_desc().prop_map(Buffer::Direct),
        (
            proptest::collection::vec(mem_desc(), 0..12),
            0u32..9,
            any::<u64>()
        )
            .prop_map(|(inline, more, va)| Buffer::Indirect { inline, more, va }),
    ]
}

fn out_buffer() -> impl Strategy<Value = Buffer> {
    prop_oneof![
        3 => buffer(),
        1 => proptest::collection::vec(any::<u8>(), 0..300).prop_map(Buffer::Immediate),
    ]
}

fn residual() -> impl Strategy<Value = Residual> {
    prop_oneof![
        Just(Residual::None),
        any::<u32>().prop_map(Residual::Under),
        any::<u32>().prop_map(Residual::Over),
    ]
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(iu: Vec<u8>, at in proptest::option::of(48u16..200)) {
        let immediate = at.and_then(ImmediateDataOffset::new);
        let _ = FromInitiator::parse(&iu, immediate);
        let _ = FromTarget::parse(&iu);
        let _ = LoginReq::parse_rdma(&iu);
    }

    #[test]
    fn parsed_commands_roundtrip(
        mut iu in proptest::collection::vec(any::<u8>(), 48..400),
        format in 0u8..64,
        counts in (0u8..8, 0u8..8),
    ) {
        iu[0] = 2;
        iu[5] = (format & 0x30) | (format & 3);
        (iu[6], iu[7]) = counts;
        iu[31] &= 0x0c;
        let immediate = ImmediateDataOffset::new(120);
        if let Ok(cmd) = Cmd::parse(&iu, immediate) {
            let mut out = vec![0xee; cmd.wire_len()];
            prop_assert_eq!(cmd.emit(&mut out), out.len());
            prop_assert_eq!(Cmd::parse(&out, immediate), Ok(cmd));
        }
    }

    #[test]
    fn commands_roundtrip(
        tag: u64,
        lun: [u8; 8],
        cdb: [u8; 16],
        additional in proptest::collection::vec(any::<[u8; 4]>(), 0..6),
        out_buffer in out_buffer(),
        in_buffer in buffer(),
        notify: (bool, bool),
    ) {
        let additional = additional.concat();
        let cmd = Cmd {
            tag: Tag(tag),
            lun,
            task_attr: TaskAttr::Ordered,
            notify_success: notify.0,
            notify_failure: notify.1,
            cdb,
            additional_cdb: &additional,
            data_out: out_buffer.borrow(),
            data_in: in_buffer.borrow(),
        };
        let mut wire = vec![0xee; cmd.wire_len()];
        prop_assert_eq!(cmd.emit(&mut wire), wire.len());
        prop_assert_eq!(Cmd::parse(&wire, ImmediateDataOffset::new(600)), Ok(cmd));
    }

    #[test]
    fn responses_roundtrip(
        solicited: bool,
        req_lim_delta: i32,
        tag: u64,
        status: u8,
        data_out in residual(),
        data_in in residual(),
        code in proptest::option::of(any::<u8>()),
        sense in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..252)),
    ) {
        let rsp = Rsp {
            solicited,
            req_lim_delta,
            tag: Tag(tag),
            status,
            data_out,
            data_in,
            response: code.map(RspCode::from),
            sense: sense.as_deref(),
        };
        let mut wire = vec![0xee; rsp.wire_len()];
        prop_assert_eq!(FromTarget::Rsp(rsp).emit(&mut wire), wire.len());
        prop_assert_eq!(FromTarget::parse(&wire), Ok(FromTarget::Rsp(rsp)));
    }

    #[test]
    fn logins_roundtrip(
        tag: u64,
        lens: (u32, u32),
        delta: i32,
        ports: ([u8; 16], [u8; 16]),
        multi: bool,
        immediate in proptest::option::of(48u16..),
        reason: u32,
    ) {
        let formats = BufferFormats::all();
        let req = LoginReq {
            tag: Tag(tag),
            req_it_iu_len: lens.0,
            formats,
            multi_channel: if multi { MultiChannelAction::Multi } else { MultiChannelAction::Single },
            flags: LoginReqFlags::CRSOLNT,
            immediate: immediate.and_then(ImmediateDataOffset::new),
            initiator_port: InitiatorPortId(ports.0),
            target_port: TargetPortId(ports.1),
        };
        let mut wire = [0xee; 64];
        prop_assert_eq!(req.emit(&mut wire), 64);
        prop_assert_eq!(LoginReq::parse(&wire), Ok(req));
        let mut wire = [0xee; 56];
        prop_assert_eq!(req.emit_rdma(&mut wire), 56);
        prop_assert_eq!(LoginReq::parse_rdma(&wire), Ok(req));
        let rsp = LoginRsp {
            req_lim_delta: delta,
            tag: Tag(tag),
            max_it_iu_len: lens.0,
            max_ti_iu_len: lens.1,
            formats,
            multi_channel: MultiChannelResult::Maintained,
            solicited_notification: multi,
            immediate: immediate.is_some(),
        };
        let mut wire = [0xee; 52];
        prop_assert_eq!(rsp.emit(&mut wire), 52);
        prop_assert_eq!(LoginRsp::parse(&wire), Ok(rsp));
        let rej = LoginRej { reason: reason.into(), tag: Tag(tag), formats };
        let mut wire = [0xee; 32];
        prop_assert_eq!(rej.emit(&mut wire), 32);
        prop_assert_eq!(LoginRej::parse(&wire), Ok(rej));
    }

    #[test]
    fn management_messages_roundtrip(tags: (u64, u64), lun: [u8; 8], number: u32, code: u8, sense: Vec<u8>) {
        let tag = Tag(tags.0);
        let mut wire = vec![0xee; 64 + sense.len()];
        for iu in [
            FromTarget::TLogout(TLogout { solicited: true, reason: number.into(), tag }),
            FromTarget::CredReq(CredReq { solicited: false, req_lim_delta: number.cast_signed(), tag }),
            FromTarget::AerReq(AerReq { solicited: true, req_lim_delta: 1, tag, lun, sense: &sense }),
        ] {
            let len = iu.emit(&mut wire);
            prop_assert_eq!(FromTarget::parse(&wire[..len]), Ok(iu));
        }
        for iu in [
            FromInitiator::TskMgmt(TskMgmt {
                tag,
                notify_success: true,
                notify_failure: false,
                lun,
                function: code.into(),
                task_tag: Tag(tags.1),
            }),
            FromInitiator::ILogout(ILogout { tag }),
            FromInitiator::CredRsp(CredRsp { tag }),
            FromInitiator::AerRsp(AerRsp { tag }),
        ] {
            let len = iu.emit(&mut wire);
            prop_assert_eq!(FromInitiator::parse(&wire[..len], None), Ok(iu));
        }
    }
}
