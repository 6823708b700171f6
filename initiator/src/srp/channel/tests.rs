use proptest::prelude::*;
use riser_state::testing::{assert_all_taken, table};

use riser_scsi::srp::{
    InitiatorPortId, LoginRejReason, MultiChannelAction, TargetPortId, TaskAttr,
};

use super::*;
use crate::request::Cdb;

fn config() -> ChannelConfig {
    ChannelConfig {
        queue_size: 3,
        max_it_iu_len: 8260,
        inline_descriptors: 12,
        external_descriptors: 0,
        max_immediate: 8192,
        initiator_port: InitiatorPortId([1; 16]),
        target_port: TargetPortId([2; 16]),
        multi_channel: MultiChannelAction::Single,
    }
}

/// Encodes a login response of a target: limit, maximum request length, immediate data support.
fn login_rsp(limit: i32, max_it: u32, immediate: bool) -> [u8; 52] {
    let mut iu = [0; 52];
    iu[0] = 0xc0;
    iu[4..8].copy_from_slice(&limit.to_be_bytes());
    iu[16..20].copy_from_slice(&max_it.to_be_bytes());
    iu[20..24].copy_from_slice(&1024u32.to_be_bytes());
    iu[25] = 6;
    iu[26] = if immediate { 0x80 } else { 0 };
    iu
}

fn live(limit: i32) -> InitiatorChannel {
    let mut channel = InitiatorChannel::new(config());
    let login = channel.begin_login();
    assert_eq!(login.immediate.unwrap().bytes(), 68);
    channel
        .handle_established(&login_rsp(limit, 0x2054, true))
        .unwrap();
    channel
}

/// Returns a response with GOOD status.
fn rsp(tag: Tag, delta: i32) -> [u8; 36] {
    let mut iu = [0; 36];
    iu[0] = 0xc1;
    iu[4..8].copy_from_slice(&delta.to_be_bytes());
    iu[8..16].copy_from_slice(&tag.0.to_be_bytes());
    iu
}

fn tmf_tag(iu: &[u8]) -> Tag {
    Tag(u64::from_be_bytes(iu[8..16].try_into().unwrap()))
}

#[test]
fn login_negotiates_parameters() {
    let mut channel = InitiatorChannel::new(config());
    assert_eq!(channel.state(), ChannelState::Connecting);
    channel.begin_login();
    assert_eq!(channel.state(), ChannelState::LoggingIn);
    let agreed = channel
        .handle_established(&login_rsp(128, 0x2054, true))
        .unwrap();
    assert_eq!(channel.state(), ChannelState::Live);
    assert_eq!(agreed.immediate.unwrap().max_len, 8192);
    assert_eq!(agreed.descriptors.inline, 12);
    assert_eq!(channel.request_limit(), 128);
}

#[test]
fn small_information_unit_limits_descriptors() {
    let mut channel = InitiatorChannel::new(config());
    channel.begin_login();
    let agreed = channel
        .handle_established(&login_rsp(8, 48 + 16 + 20 + 35, false))
        .unwrap();
    assert_eq!(agreed.descriptors.inline, 2);
    assert_eq!(agreed.immediate, None);
}

#[test]
fn malformed_login_responses_are_rejected() {
    let edited = |at: usize, byte: u8| {
        let mut iu = login_rsp(8, 8260, true);
        iu[at] = byte;
        iu
    };
    let (no_format, too_short) = (
        SrpFault::Login("missing a required buffer format"),
        SrpFault::Login("maximum length below 64 bytes"),
    );
    for (bad, why) in [
        (login_rsp(0, 8260, true), SrpFault::RequestLimit(0)),
        (login_rsp(-1, 8260, true), SrpFault::RequestLimit(-1)),
        (login_rsp(8, 63, true), too_short),
        (edited(15, 1), SrpFault::UnknownTag(Tag(1))),
        (edited(25, 2), no_format),
    ] {
        let mut channel = InitiatorChannel::new(config());
        channel.begin_login();
        assert_eq!(channel.handle_established(&bad), Err(why));
    }
    for malformed in [&edited(0, 0xc1)[..], &[]] {
        let mut channel = InitiatorChannel::new(config());
        channel.begin_login();
        let refused = channel.handle_established(malformed);
        assert!(
            matches!(refused, Err(SrpFault::Malformed(_))),
            "{refused:?}"
        );
    }
}

const STATES: [ChannelState; 5] = [
    ChannelState::Connecting,
    ChannelState::LoggingIn,
    ChannelState::Live,
    ChannelState::Disconnecting,
    ChannelState::Disconnected,
];

#[test]
fn channel_transitions_match_diagram() {
    let expected = "Connecting: LoggingIn Disconnecting Disconnected\n\
                    LoggingIn: Live Disconnecting Disconnected\n\
                    Live: Disconnecting\n\
                    Disconnecting: Disconnected\n\
                    Disconnected: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn channel_transition_coverage_is_complete() {
    assert_all_taken(&STATES, || {
        let mut channel = live(4);
        channel.begin_disconnect();
        channel.handle_disconnected();
        // The path was not resolved, or the attempt timed out.
        InitiatorChannel::new(config()).handle_disconnected();
        InitiatorChannel::new(config()).begin_disconnect();
        // The login timed out, or was rejected.
        let mut late = InitiatorChannel::new(config());
        late.begin_login();
        late.begin_disconnect();
        let mut refused = InitiatorChannel::new(config());
        refused.begin_login();
        refused.handle_disconnected();
    });
}

#[test]
fn rejection_contains_reason() {
    let mut rej = [0; 148];
    rej[0] = 0xc2;
    rej[4..8].copy_from_slice(&0x0001_0006u32.to_be_bytes());
    assert_eq!(
        InitiatorChannel::rejection(28, &rej),
        SrpLoginError::Rejected(LoginRejReason::ChannelLimitReached)
    );
    let no_reason = InitiatorChannel::rejection(8, &[]);
    assert_eq!(no_reason, SrpLoginError::Refused(8));
    let mut channel = InitiatorChannel::new(config());
    channel.begin_login();
    channel.handle_disconnected();
    assert_eq!(channel.state(), ChannelState::Disconnected);
}

#[test]
fn request_limit_and_queue_bound_commands() {
    let mut channel = live(3);
    let a = channel.reserve(10, DataLen::None).unwrap();
    let _b = channel.reserve(11, DataLen::None).unwrap();
    assert!(
        channel.reserve(12, DataLen::None).is_none(),
        "one is reserved"
    );
    assert!(
        channel
            .start_tsk_mgmt([0; 8], TskMgmtFunction::LogicalUnitReset, None)
            .is_some(),
        "for task management"
    );
    let iu = rsp(a, 2);
    let Received::Response { owner, .. } = channel.handle_iu(&iu).unwrap() else {
        panic!("response");
    };
    assert_eq!(owner, 10);
    assert_eq!(channel.request_limit(), 2);
    let mut channel = live(100);
    for i in 0..3 {
        channel.reserve(i, DataLen::None).unwrap();
    }
    assert!(channel.reserve(3, DataLen::None).is_none(), "queue size");
    assert_eq!(channel.outstanding(), 3);
}

#[test]
fn request_limit_of_one_allows_commands() {
    let mut channel = live(1);
    assert!(channel.reserve(0, DataLen::None).is_some());
    assert!(!channel.can_start());
}

#[test]
fn late_tags_are_accepted_unknown_rejected() {
    let mut channel = live(16);
    assert!(matches!(
        channel.handle_iu(&rsp(Tag(0), 1)),
        Err(SrpFault::UnknownTag(_))
    ));
    let tag = channel.reserve(1, DataLen::None).unwrap();
    channel.handle_iu(&rsp(tag, 1)).unwrap();
    assert_eq!(
        channel.handle_iu(&rsp(tag, 1)),
        Err(SrpFault::UnknownTag(tag))
    );
    let tag = channel.reserve(1, DataLen::None).unwrap();
    channel.abandon_command(tag);
    assert_eq!(channel.handle_iu(&rsp(tag, 1)), Ok(Received::Stale));
    assert_eq!(
        channel.handle_iu(&rsp(tag, 1)),
        Err(SrpFault::UnknownTag(tag))
    );
    assert_eq!(
        channel.handle_iu(&rsp(Tag(TMF_TAG | 1), 1)),
        Err(SrpFault::UnknownTag(Tag(TMF_TAG | 1)))
    );
}

#[test]
fn task_management_is_serialized() {
    let mut channel = live(16);
    let task = channel.reserve(1, DataLen::None).unwrap();
    let iu = channel
        .start_tsk_mgmt(
            [0, 5, 0, 0, 0, 0, 0, 0],
            TskMgmtFunction::AbortTask,
            Some(task),
        )
        .unwrap();
    assert_eq!((iu[0], iu[21], iu[30]), (1, 5, 1));
    assert_eq!(iu[32..40], task.0.to_be_bytes());
    assert!(channel.has_tsk_mgmt());
    assert!(
        channel
            .start_tsk_mgmt([0; 8], TskMgmtFunction::ClearAca, None)
            .is_none()
    );
    let mut response = [0; 40];
    response[..36].copy_from_slice(&rsp(tmf_tag(&iu), 1));
    response[18] = 1;
    response[35] = 4;
    response[39] = 4;
    assert_eq!(
        channel.handle_iu(&response),
        Ok(Received::TskMgmt(RspCode::TskMgmtNotSupported))
    );
    assert_eq!(channel.handle_iu(&response), Ok(Received::Stale));
}

#[test]
fn credit_requests_and_events_get_responses() {
    let mut channel = live(4);
    let mut req = [0; 16];
    req[0] = 0x81;
    req[7] = 9;
    req[15] = 0x42;
    let mut response = [0; 16];
    response[0] = 0x41;
    response[15] = 0x42;
    assert_eq!(channel.handle_iu(&req), Ok(Received::Reply(response)));
    assert_eq!(channel.request_limit(), 13);
    let mut req = [0; 44];
    req[0] = 0x82;
    req[15] = 7;
    req[21] = 3;
    req[31] = 8;
    req[36] = 0x72;
    let Received::Event {
        lun,
        sense,
        response,
    } = channel.handle_iu(&req).unwrap()
    else {
        panic!("event");
    };
    assert_eq!(
        (lun[1], sense[0], response[0], response[15]),
        (3, 0x72, 0x42, 7)
    );
}

#[test]
fn invalid_limits_and_residuals_are_faults() {
    let mut channel = live(4);
    let mut req = [0; 16];
    req[0] = 0x81;
    req[4..8].copy_from_slice(&i32::MAX.to_be_bytes());
    assert_eq!(
        channel.handle_iu(&req),
        Err(SrpFault::RequestLimit(i32::MAX))
    );
    let tag = channel.reserve(0, DataLen::In(512)).unwrap();
    let mut iu = rsp(tag, 1);
    iu[18] = 0x20;
    iu[24..28].copy_from_slice(&513u32.to_be_bytes());
    assert_eq!(
        channel.handle_iu(&iu),
        Err(SrpFault::Residual {
            residual: 513,
            len: 512
        })
    );
}

#[test]
fn target_logout_prevents_new_requests() {
    let mut channel = live(4);
    let mut iu = [0; 16];
    iu[0] = 0x80;
    assert!(matches!(channel.handle_iu(&iu), Ok(Received::Logout(_))));
    assert_eq!(channel.state(), ChannelState::Disconnecting);
    assert!(!channel.can_start());
    assert!(channel.begin_disconnect().is_none());
    channel.handle_disconnected();
    assert!(matches!(
        channel.handle_iu(&iu),
        Err(SrpFault::Unexpected { .. })
    ));
}

#[test]
fn commands_are_encoded_with_data() {
    let mut channel = live(4);
    let cdb = Cdb::new(&[0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0]).unwrap();
    let tag = channel.reserve(0, DataLen::Out(512)).unwrap();
    let mut out = [0xee; 256];
    let command = CommandIu {
        lun: [0; 8],
        attr: TaskAttr::Simple,
        cdb: &cdb,
        len: DataLen::Out(512),
        data: CommandData::Direct(MemDesc::new(0x1000, 7, 512)),
    };
    assert_eq!(channel.emit_command(tag, &command, &mut out), 64);
    assert_eq!((out[0], out[5], out[32]), (2, 0x10, 0x2a));
    let command = CommandIu {
        data: CommandData::Immediate,
        ..command
    };
    assert_eq!(channel.emit_command(tag, &command, &mut out), 68);
    assert_eq!((out[5], &out[48..52]), (0x30, &[0, 0, 2, 0][..]));
}

#[test]
fn long_cdb_uses_additional_words() {
    let mut channel = live(4);
    let bytes: Vec<u8> = (0..32).collect();
    assert!(Cdb::new(&[]).is_none() && Cdb::new(&[0; 33]).is_none());
    let cdb = Cdb::new(&bytes[..30]).unwrap();
    let tag = channel.reserve(0, DataLen::None).unwrap();
    let mut out = [0xee; 256];
    let command = CommandIu {
        lun: [0; 8],
        attr: TaskAttr::Ordered,
        cdb: &cdb,
        len: DataLen::None,
        data: CommandData::None,
    };
    assert_eq!(channel.emit_command(tag, &command, &mut out), 64);
    assert_eq!((out[29], out[31]), (2, 16));
    assert_eq!(out[32..62], bytes[..30]);
    assert_eq!(out[62..64], [0, 0]);
}

proptest! {
    #[test]
    fn arbitrary_target_data_never_panics(
        ius in proptest::collection::vec((0u8..8, proptest::collection::vec(any::<u8>(), 0..60)), 0..40),
    ) {
        let mut channel = live(16);
        for (kind, mut iu) in ius {
            let opcode = [0xc1, 0xc1, 0xc1, 0x81, 0x82, 0x80, 0xc0, 0x55][usize::from(kind)];
            if let Some(first) = iu.first_mut() {
                *first = opcode;
            }
            if let Some(tag) = channel.reserve(1, DataLen::In(10))
                && kind < 2
                && iu.len() >= 16
            {
                iu[8..16].copy_from_slice(&tag.0.to_be_bytes());
            }
            let _ = channel.handle_iu(&iu);
            prop_assert!(channel.outstanding() <= 3);
        }
    }
}
