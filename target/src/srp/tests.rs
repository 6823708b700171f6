//! Scripted tests: information units and completions as input, actions as output.

use std::time::Duration;

use riser_scsi::attention::Attention;
use riser_scsi::data::designator::Naa;
use riser_scsi::nexus::NexusId;
use riser_scsi::srp::{
    AerRsp, CredRsp, FromTarget, ILogout, LoginReq, MemDesc, Residual, TLogoutReason, Tag,
    TaskAttr, TskMgmtFunction,
};
use riser_scsi::task::TaskManagement;
use riser_state::testing::{assert_all_taken, table};

use super::channel::{ChState, Channel};
use super::ioctx::{ChainKind, IoctxState};
use super::login::ChannelParams;
use super::timers::{JOIN_TIMEOUT, KEEPALIVE};
use crate::fabric::{TaskIdx, UnitIdx};

use crate::tests::rig::srp::{
    Data, KEY, SrpPeer, SrpResponse, TABLE, blocks, cmd, indirect, params, read10, table_bytes,
    tmf, write10,
};
use crate::tests::rig::{self, Work};

type Rig = rig::Rig<SrpPeer>;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8).collect()
}

fn state(channel: &Channel) -> Vec<IoctxState> {
    (0..4)
        .map(|i| channel.requests().state(TaskIdx(i)))
        .filter(|s| *s != IoctxState::Done)
        .collect()
}

fn good(tag: u64) -> SrpResponse {
    SrpResponse {
        tag,
        delta: 1,
        status: 0,
        code: None,
        key: None,
        data_in: Residual::None,
        data_out: Residual::None,
    }
}

#[test]
fn read_is_sent_in_one_post() {
    let mut rig = Rig::live();
    rig.disks[0][512..1536].copy_from_slice(&pattern(1024));
    rig.memory.insert(KEY, vec![0; 4096]);
    let iu = read10(1, 2).into(Data::Direct(MemDesc::new(100, KEY, 1024)));
    rig.send(0, &iu.bytes());
    assert_eq!(state(&rig.channel), [IoctxState::DataIn]);
    rig.complete();
    assert_eq!(state(&rig.channel), [IoctxState::CmdRspSent]);
    assert_eq!(rig.work.len(), 1, "data and response are one chain");
    rig.complete();
    assert_eq!(rig.rsp(), good(1));
    assert_eq!(rig.memory[&KEY][100..1124], pattern(1024));
    assert_eq!(state(&rig.channel), []);
    rig.close();
}

#[test]
fn write_fetches_data_first() {
    let mut rig = Rig::live();
    rig.memory.insert(KEY, pattern(2048));
    let iu = write10(4, 4).tag(9).out(Data::direct(2048));
    rig.send(0, &iu.bytes());
    assert_eq!(state(&rig.channel), [IoctxState::NeedData]);
    rig.complete();
    assert_eq!(state(&rig.channel), [IoctxState::DataIn]);
    rig.complete_all();
    assert_eq!(rig.rsp(), good(9));
    assert_eq!(rig.disks[0][2048..4096], pattern(2048));
    rig.close();
}

#[test]
fn immediate_data_keeps_its_receive() {
    let mut rig = Rig::live();
    let before = rig.receives.len();
    let iu = write10(0, 8).out(Data::Immediate(pattern(4096)));
    rig.send(0, &iu.bytes());
    assert_eq!(state(&rig.channel), [IoctxState::DataIn]);
    assert_eq!(rig.receives.len(), before, "taken over, receive is back");
    rig.complete_all();
    assert_eq!(rig.rsp(), good(1));
    assert_eq!(rig.disks[0][..4096], pattern(4096));
    rig.close();
}

#[test]
fn indirect_tables_of_any_kind_work() {
    for (entries, inline) in [(3u32, 3), (40, 40), (40, 0), (200, 30)] {
        let mut rig = Rig::live();
        let len = entries * 512;
        rig.disks[0][..len as usize].copy_from_slice(&pattern(len as usize));
        let descs: Vec<_> = (0..entries)
            .map(|i| MemDesc::new(u64::from(entries - 1 - i) * 1000, KEY, 512))
            .collect();
        rig.memory.insert(KEY, vec![0; 1000 * entries as usize]);
        rig.memory.insert(TABLE, table_bytes(&descs));
        let iu = read10(0, entries as u16).into(indirect(&descs, inline));
        rig.send(0, &iu.bytes());
        let external = inline < entries as usize;
        let first = if external {
            IoctxState::FetchTable
        } else {
            IoctxState::DataIn
        };
        assert_eq!(state(&rig.channel), [first]);
        rig.complete_all();
        assert_eq!(rig.rsp(), good(1));
        for (i, block) in pattern(len as usize).chunks(512).enumerate() {
            let at = (entries as usize - 1 - i) * 1000;
            assert_eq!(rig.memory[&KEY][at..at + 512], *block);
        }
        rig.close();
    }
}

#[test]
fn response_has_residuals_and_sense() {
    let mut rig = Rig::live();
    rig.memory.insert(KEY, vec![0; 4096]);
    let iu = read10(0, 1).into(Data::direct(4096));
    rig.send(0, &iu.bytes());
    rig.complete_all();
    assert_eq!(rig.rsp().data_in, Residual::Under(3584));
    let iu = read10(u32::MAX, 1).into(Data::direct(512));
    rig.send(0, &iu.bytes());
    rig.complete_all();
    let rsp = rig.rsp();
    assert_eq!((rsp.status, rsp.key), (2, Some(5)));
    let iu = read10(0, 1).into(Data::direct(512));
    rig.send(0, &iu.bytes());
    rig.complete_nth(0, false);
    rig.complete_all();
    let rsp = rig.rsp();
    assert_eq!((rsp.status, rsp.key), (2, Some(3)), "medium error");
    rig.close();
}

#[test]
fn early_commands_wait_for_establishment() {
    let mut rig = Rig::new();
    rig.add_channel(params(), 1);
    rig.send(0, &cmd(&[0; 6]).tag(1).bytes());
    rig.send(0, &cmd(&[0; 6]).tag(2).bytes());
    assert_eq!((rig.notified, rig.work.len()), (1, 0));
    rig.establish(0);
    assert_eq!(rig.channel.state(), ChState::Live);
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 2]);
    rig.close();
}

#[test]
fn unestablished_connection_times_out() {
    let mut rig = Rig::new();
    rig.add_channel(params(), 1);
    rig.send(0, &cmd(&[0; 6]).bytes());
    rig.advance(Duration::from_secs(19));
    assert_eq!(rig.channel.state(), ChState::Connecting);
    rig.advance(Duration::from_secs(2));
    assert_eq!(rig.channel.state(), ChState::Draining);
    rig.close();
}

#[test]
fn requests_without_context_wait_in_order() {
    let mut rig = Rig::live();
    for tag in 1..=7 {
        assert!(rig.send(0, &cmd(&[0x35; 1]).tag(tag).bytes()));
    }
    assert_eq!(rig.channel.requests().len(), 4);
    assert_eq!(
        rig.channel.sender().req_lim.over_limit(),
        0,
        "not looked at yet"
    );
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(rig.channel.sender().req_lim.at_initiator(), 4);
    rig.close();
}

#[test]
fn command_waits_for_pool_memory() {
    let mut rig = Rig::live();
    let all = rig.pool.allocate(4 << 20).unwrap();
    rig.memory.insert(KEY, vec![1; 512]);
    rig.send(0, &write10(0, 1).out(Data::direct(512)).bytes());
    rig.send(
        0,
        &write10(1, 1)
            .tag(2)
            .out(Data::Immediate(vec![2; 512]))
            .bytes(),
    );
    assert_eq!(
        state(&rig.channel),
        [IoctxState::AwaitBuffer, IoctxState::AwaitBuffer]
    );
    rig.pool.release(all);
    rig.pump();
    rig.complete_all();
    assert_eq!(
        rig.srp_responses(),
        [good(2), good(1)],
        "no READ for the second"
    );
    assert_eq!(rig.disks[0][512..1024], [2; 512]);
    rig.close();
}

/// The same while its table is being fetched.
#[test]
fn table_fetch_keeps_its_memory() {
    const MIB: u32 = 1 << 20;
    let mut rig = Rig::live();
    rig.memory.insert(KEY, vec![7; MIB as usize]);
    let descs = [MemDesc::new(0, KEY, MIB)];
    rig.memory.insert(TABLE, table_bytes(&descs));
    let most = rig.pool.allocate(2 * MIB).unwrap();
    let table = indirect(&descs, 0);
    let ordered = write10(0, 2048).attr(TaskAttr::Ordered).out(table);
    rig.send(0, &ordered.bytes());
    for tag in [2, 3] {
        let data = Data::direct(MIB);
        rig.send(0, &write10(0, 2048).tag(tag).out(data).bytes());
    }
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 2, 3]);
    rig.pool.release(most);
    rig.close();
}

#[test]
fn long_transfers_yield_between_portions() {
    let mut rig = Rig::live();
    let entries = 60;
    rig.disks[0][..entries * 512].copy_from_slice(&pattern(entries * 512));
    rig.memory.insert(KEY, vec![0; entries * 512]);
    let iu = read10(0, entries as u16).into(indirect(&blocks(entries as u32), entries));
    rig.send(0, &iu.tag(1).bytes());
    rig.send(0, &cmd(&[0; 6]).tag(2).bytes());
    rig.complete();
    assert_eq!(
        rig.channel.requests().state(TaskIdx(0)),
        IoctxState::WriteData
    );
    let portions = rig.work.iter().map(|p| match p {
        Work::Chain { requests, .. } => requests.len(),
        _ => 0,
    });
    assert!(portions.max().unwrap() <= 8);
    rig.complete_all();
    assert_eq!(rig.tags(), [2, 1]);
    assert_eq!(rig.memory[&KEY], pattern(entries * 512));
    rig.close();
}

/// While its response is sent, a command is no longer in the task set of the unit, but its data
/// transfer may have just started.
#[test]
fn aborted_command_sends_no_more_data() {
    for function in [
        TskMgmtFunction::AbortTaskSet,
        TskMgmtFunction::ClearTaskSet,
        TskMgmtFunction::LogicalUnitReset,
    ] {
        let mut rig = Rig::live();
        rig.memory.insert(KEY, vec![0; 60 * 512]);
        let read = read10(0, 60).into(indirect(&blocks(60), 60));
        rig.send(0, &read.tag(1).bytes());
        rig.complete();
        // The function does not affect the other unit.
        rig.send(0, &read10(0, 1).lun(1).tag(2).bytes());
        assert_eq!(
            rig.channel.requests().state(TaskIdx(0)),
            IoctxState::WriteData
        );
        rig.send(0, &tmf(6, 0, function, 0));
        rig.complete_all();
        let mut tags = rig.tags();
        tags.retain(|tag| *tag != 2);
        assert_eq!(tags, [6], "{function:?}");
        assert_eq!(rig.channel.sender().req_lim.at_initiator(), 4);
        rig.close();
    }
}

/// A command may have been removed from the task set before its channel is notified that it was
/// aborted by another nexus.
#[test]
fn cleared_command_completes_started_response() {
    let mut rig = Rig::live();
    rig.memory.insert(KEY, vec![0; 60 * 512]);
    let read = read10(0, 60).into(indirect(&blocks(60), 60));
    rig.send(0, &read.tag(1).bytes());
    let managed = rig.units[0].manage(NexusId(99), TaskManagement::ClearTaskSet);
    let task = managed.aborted[0];
    rig.complete();
    assert_eq!(
        rig.channel.requests().state(TaskIdx(0)),
        IoctxState::WriteData
    );
    rig.abort(task);
    rig.complete_all();
    assert_eq!(rig.statuses(), [(1, 0x40)]);
    assert_eq!(rig.channel.sender().req_lim.at_initiator(), 4);
    rig.close();
}

/// A response to an older command with the same tag could be mistaken for the newer command, and a
/// command aborted by its own nexus does not have a status. Both also apply if it was aborted by
/// another nexus.
#[test]
fn own_abort_suppresses_response_after_clear() {
    let overlapped = cmd(&[0; 6]).lun(1).tag(5).bytes();
    let abort = tmf(6, 0, TskMgmtFunction::AbortTask, 5);
    for (iu, tag) in [(overlapped, 5), (abort, 6)] {
        for is_first in [true, false] {
            let mut rig = Rig::live();
            rig.send(0, &cmd(&[0x35]).tag(5).bytes());
            let managed = rig.units[0].manage(NexusId(99), TaskManagement::ClearTaskSet);
            let task = managed.aborted[0];
            let idx = task.index;
            assert_eq!(rig.channel.requests().state(idx), IoctxState::DataIn);
            if !is_first {
                rig.send(0, &iu);
            }
            rig.abort(task);
            if is_first {
                rig.send(0, &iu);
            }
            rig.complete_all();
            let responses = rig.srp_responses();
            let ended: Vec<_> = responses
                .iter()
                .map(|a| (a.tag, a.status == 0x40))
                .collect();
            assert_eq!(ended, [(tag, false)]);
            assert_eq!(rig.channel.sender().req_lim.at_initiator(), 4);
            rig.close();
        }
    }
}

/// The function may be received on another channel of the nexus.
#[test]
fn abort_from_other_channel_stops_data() {
    for (function, is_last) in [
        (TskMgmtFunction::AbortTaskSet, false),
        (TskMgmtFunction::ClearTaskSet, false),
        (TskMgmtFunction::LogicalUnitReset, false),
        (TskMgmtFunction::LogicalUnitReset, true),
    ] {
        let mut rig = Rig::live();
        rig.add_channel(params(), 1);
        rig.establish(1);
        let entries = 60;
        rig.memory.insert(KEY, vec![0; entries * 512]);
        let descs: Vec<_> = (0..entries as u64)
            .map(|i| MemDesc::new(i * 512, KEY, 512))
            .collect();
        let read = read10(0, entries as u16).into(Data::Indirect {
            table: MemDesc::new(0, 3, descs.len() as u32 * 16),
            len: entries as u32 * 512,
            inline: descs,
        });
        rig.send(1, &read.tag(1).bytes());
        rig.complete();
        let left = rig.peers[1].channel.requests().state(TaskIdx(0));
        assert_eq!(left, IoctxState::WriteData);
        while is_last && rig.peers[1].channel.requests().state(TaskIdx(0)) != IoctxState::CmdRspSent
        {
            rig.complete();
        }
        rig.send(0, &tmf(6, 0, function, 0));
        assert_eq!(state(&rig.channel), [IoctxState::Mgmt], "{function:?}");
        rig.complete_all();
        let sent = std::mem::take(&mut rig.received);
        let is_rsp = |bytes: &[u8]| matches!(FromTarget::parse(bytes), Ok(FromTarget::Rsp(_)));
        let responses: Vec<_> = sent.iter().filter(|(_, bytes)| is_rsp(bytes)).collect();
        match is_last {
            // Its data and response were posted earlier.
            true => assert!(matches!(responses[..], [(1, _), (0, _)]), "{function:?}"),
            false => assert!(matches!(responses[..], [(0, _)]), "{function:?}"),
        }
        rig.close();
    }
}

#[test]
fn full_send_queue_delays_chains() {
    let mut rig = Rig::new();
    rig.add_channel(
        ChannelParams {
            send_queue: 7,
            ..params()
        },
        1,
    );
    rig.establish(0);
    for tag in 1..=4 {
        rig.send(0, &cmd(&[0; 6]).tag(tag).bytes());
    }
    assert_eq!(
        state(&rig.channel)[2..],
        [IoctxState::AwaitCredit(ChainKind::Respond); 2]
    );
    rig.complete_all();
    assert_eq!(rig.srp_responses().len(), 4);
    rig.close();
}

#[test]
fn abort_task_waits_for_device() {
    let mut rig = Rig::live();
    rig.memory.insert(KEY, vec![0; 512]);
    let iu = read10(0, 1).tag(5).into(Data::direct(512));
    rig.send(0, &iu.bytes());
    rig.send(0, &tmf(6, 0, TskMgmtFunction::AbortTask, 5));
    assert_eq!(
        state(&rig.channel),
        [IoctxState::DataIn, IoctxState::Mgmt],
        "the buffer is still the disk's"
    );
    assert!(matches!(rig.work[..], [Work::Block { aborted: true, .. }]));
    rig.complete_all();
    let rsp = rig.rsp();
    assert_eq!(
        (rsp.tag, rsp.code, rsp.delta),
        (6, Some(0), 2),
        "two credits come back"
    );
    assert_eq!(rig.channel.stats().counters.aborted, 1);
    rig.close();
}

#[test]
fn abort_of_unknown_task_completes() {
    let mut rig = Rig::live();
    rig.send(0, &tmf(6, 0, TskMgmtFunction::AbortTask, 99));
    rig.complete_all();
    assert_eq!(rig.rsp().code, Some(0));
    for (function, lun, code) in [
        (TskMgmtFunction::ClearAca, 0, 4),
        (TskMgmtFunction::Other(0x3c), 0, 4),
        (TskMgmtFunction::LogicalUnitReset, 9, 2),
    ] {
        rig.send(0, &tmf(6, lun, function, 0));
        rig.complete_all();
        assert_eq!(rig.rsp().code, Some(code), "{function:?}");
    }
    rig.close();
}

/// CVE-2016-6327: repeated ABORT TASK for a command in any state must not crash or lose a command.
#[test]
fn cve_2016_6327_aborts_lose_no_command() {
    for steps in 0..6 {
        let mut rig = Rig::live();
        rig.memory.insert(KEY, pattern(512 * 40));
        let descs = blocks(40);
        rig.memory.insert(TABLE, table_bytes(&descs));
        let iu = write10(0, 40).tag(5).out(indirect(&descs, 0));
        rig.send(0, &iu.bytes());
        for _ in 0..steps {
            if !rig.work.is_empty() {
                rig.complete();
            }
        }
        rig.send(0, &tmf(6, 0, TskMgmtFunction::AbortTask, 5));
        rig.send(0, &tmf(7, 0, TskMgmtFunction::AbortTask, 5));
        rig.send(0, &tmf(8, 0, TskMgmtFunction::LogicalUnitReset, 0));
        rig.complete_all();
        let mut tags = rig.tags();
        tags.retain(|&t| t != 5);
        assert_eq!(tags, [6, 7, 8], "after {steps} steps");
        assert_eq!(rig.channel.sender().req_lim.at_initiator(), 4);
        rig.close();
    }
}

#[test]
fn reset_aborts_tasks_of_other_channels() {
    let mut rig = Rig::live();
    rig.add_live_channel(params(), 2);
    rig.send(1, &cmd(&[0x35]).tag(5).bytes());
    rig.send(0, &tmf(6, 0, TskMgmtFunction::ClearTaskSet, 0));
    assert_eq!(state(&rig.channel), [IoctxState::Mgmt]);
    rig.complete_all();
    let (mgmt, other): (Vec<_>, Vec<_>) = rig.received.drain(..).partition(|(c, _)| *c == 0);
    assert_eq!(mgmt.len(), 1);
    assert_eq!(other.len(), 1, "TAS is one");
    let FromTarget::Rsp(rsp) = FromTarget::parse(&other[0].1).unwrap() else {
        panic!("an SRP_RSP");
    };
    let ended = (rsp.tag, rsp.status, rsp.req_lim_delta, rsp.sense);
    assert_eq!(ended, (Tag(5), 0x40, 1, None));
    rig.send(1, &cmd(&[0; 6]).tag(8).bytes());
    rig.complete_all();
    let rsp = rig.rsp();
    assert_eq!((rsp.tag, rsp.key), (8, None), "which says all");
    assert_eq!(rig.peers[1].channel.sender().req_lim.at_initiator(), 4);
    rig.close();
}

#[test]
fn initiator_logout_closes_channel() {
    let mut rig = Rig::live();
    rig.send(0, &cmd(&[0x35]).bytes());
    let mut iu = [0; 16];
    ILogout { tag: Tag(4) }.emit(&mut iu);
    rig.send(0, &iu);
    assert_eq!(rig.channel.state(), ChState::Draining);
    assert_eq!(rig.disconnects, 1);
    rig.complete_all();
    assert!(rig.released);
    assert_eq!(rig.channel.stats().counters.torn_down, 1);
    rig.close();
}

fn t_logout(rig: &mut Rig) -> TLogoutReason {
    let (_, bytes) = rig.received.pop().expect("a message");
    match FromTarget::parse(&bytes).unwrap() {
        FromTarget::TLogout(iu) => iu.reason,
        other => panic!("a T_LOGOUT, not {other:?}"),
    }
}

#[test]
fn shutdown_completes_commands_before_logout() {
    let mut rig = Rig::live();
    rig.send(0, &cmd(&[0x35]).bytes());
    let until = rig.now + Duration::from_secs(5);
    rig.with(0, |ch, cx| ch.handle_shutdown(cx, until));
    assert_eq!(rig.channel.state(), ChState::Live);
    rig.complete();
    rig.complete();
    assert_eq!(rig.channel.state(), ChState::Disconnecting);
    rig.complete_all();
    assert_eq!(t_logout(&mut rig), TLogoutReason::NoReason);
    assert_eq!(rig.rsp(), good(1));
    assert!(rig.released);

    let mut rig = Rig::live();
    rig.send(0, &cmd(&[0x35]).bytes());
    let until = rig.now + Duration::from_secs(5);
    rig.with(0, |ch, cx| ch.handle_shutdown(cx, until));
    rig.advance(Duration::from_secs(6));
    assert_eq!(
        rig.channel.state(),
        ChState::Disconnecting,
        "its time is up"
    );
    rig.advance(Duration::from_secs(2));
    assert_eq!(
        rig.channel.state(),
        ChState::Draining,
        "nor does the logout hang"
    );
    rig.close();
}

#[test]
fn terminated_channel_gets_logout_reason() {
    let mut rig = Rig::live();
    rig.with(0, |ch, cx| {
        ch.handle_terminate(cx);
    });
    rig.complete_all();
    assert_eq!(t_logout(&mut rig), TLogoutReason::MultiChannelAction);
    rig.close();
}

#[test]
fn terminated_channel_waits_for_device() {
    let mut rig = Rig::live();
    let write = |byte| write10(0, 1).out(Data::Immediate(vec![byte; 512]));
    rig.send(0, &write(0xaa).tag(1).bytes());
    rig.send(0, &write(0xbb).tag(2).attr(TaskAttr::Ordered).bytes());
    assert_eq!(rig.work.len(), 1, "one write runs, the other waits for it");
    rig.with(0, |ch, cx| {
        ch.handle_terminate(cx);
    });
    while rig.work.len() > 1 {
        rig.complete_nth(1, true);
    }
    assert!(!rig.released, "the disk still has the first write");
    rig.complete();
    rig.complete_all();
    assert_eq!(rig.disks[0][..512], [0; 512]);
    assert_eq!(rig.channel.stats().counters.torn_down, 2);
    assert!(rig.released);
    rig.close();
}

#[test]
fn replacing_channel_waits_for_replaced() {
    let waiting = || {
        let mut rig = Rig::new();
        let chan = rig.add_channel(params(), 1);
        rig.with(chan, |ch, cx| ch.handle_established(cx, false));
        rig.send(chan, &cmd(&[0x35]).bytes());
        assert_eq!(rig.peers[chan].channel.state(), ChState::Joining);
        assert!(rig.work.is_empty());
        rig
    };
    let mut rig = waiting();
    rig.with(0, Channel::handle_others_gone);
    rig.complete_all();
    assert_eq!(rig.rsp().tag, 1);
    rig.close();

    let mut rig = waiting();
    rig.advance(JOIN_TIMEOUT);
    rig.complete_all();
    assert_eq!(t_logout(&mut rig), TLogoutReason::NoReason);
    assert!(rig.released);
    rig.close();
}

#[test]
fn duplicate_tag_aborts_nexus_commands() {
    let mut rig = Rig::live();
    let write = |byte| write10(0, 1).out(Data::Immediate(vec![byte; 512]));
    rig.send(0, &write(0xaa).tag(1).bytes());
    rig.send(0, &cmd(&[0x35]).tag(2).bytes());
    // This is for another unit, but its commands are aborted too.
    rig.send(0, &cmd(&[0x35]).tag(3).lun(1).bytes());
    rig.send(0, &cmd(&[0; 6]).tag(1).lun(1).bytes());
    assert_eq!(
        rig.srp_responses().len(),
        0,
        "those that it ends are at the disks"
    );
    rig.complete_all();
    let responses = rig.srp_responses();
    let ended: Vec<_> = responses.iter().map(|a| (a.tag, a.status, a.key)).collect();
    assert_eq!(ended, [(2, 0, None), (1, 2, Some(0xb))]);
    assert_eq!(rig.channel.stats().counters.aborted, 2);
    assert_eq!(rig.disks[0][..512], [0; 512]);
    // A tag can be reused once the response was sent, even before the send has completed.
    rig.send(0, &cmd(&[0; 6]).tag(1).bytes());
    rig.send(0, &cmd(&[0; 6]).tag(1).bytes());
    rig.complete_all();
    let again = rig.srp_responses();
    assert!(
        again.iter().all(|a| (a.tag, a.status) == (1, 0)),
        "{again:?}"
    );
    assert_eq!(again.len(), 2);
    rig.close();
}

#[test]
fn malformed_messages_close_one_channel() {
    let login = LoginReq {
        tag: Tag(1),
        req_it_iu_len: 100,
        formats: riser_scsi::srp::BufferFormats::empty(),
        multi_channel: riser_scsi::srp::MultiChannelAction::Single,
        flags: riser_scsi::srp::LoginReqFlags::empty(),
        immediate: None,
        initiator_port: riser_scsi::srp::InitiatorPortId([0; 16]),
        target_port: riser_scsi::srp::TargetPortId([0; 16]),
    };
    let mut login_iu = vec![0; 64];
    login.emit(&mut login_iu);
    let mut cred = vec![0; 16];
    CredRsp { tag: Tag(3) }.emit(&mut cred);
    let cases = [
        (vec![], TLogoutReason::InvalidIuType),
        (vec![0x55; 40], TLogoutReason::InvalidIuType),
        (vec![0xc1; 40], TLogoutReason::InvalidIuType),
        (vec![2, 0, 0], TLogoutReason::InvalidIuType),
        (login_iu, TLogoutReason::InvalidIuType),
        (cred, TLogoutReason::SpuriousResponse),
    ];
    for (iu, reason) in cases {
        let mut rig = Rig::live();
        rig.add_channel(params(), 2);
        rig.establish(1);
        rig.send(0, &iu);
        rig.complete_all();
        assert_eq!(t_logout(&mut rig), reason);
        assert_eq!(rig.peers[1].channel.state(), ChState::Live);
        rig.close();
    }
}

#[test]
fn malformed_command_gets_response() {
    let mut rig = Rig::live();
    let mut iu = read10(0, 1).tag(5).into(Data::direct(512)).bytes();
    iu[5] = 0x0f;
    rig.send(0, &iu);
    rig.complete_all();
    let rsp = rig.rsp();
    assert_eq!((rsp.tag, rsp.code, rsp.delta), (5, Some(2), 1));
    assert_eq!(rig.channel.state(), ChState::Live);
    rig.close();
}

/// CVE-2026-74394: immediate data is rejected if its offset and length overflow.
#[test]
fn cve_2026_74394_immediate_data_length_wraps() {
    for len in [u32::MAX, u32::MAX - 79, u32::MAX - 80, 8181, 4097] {
        let mut rig = Rig::live();
        let mut iu = write10(0, 8)
            .tag(5)
            .out(Data::Immediate(vec![0; 4096]))
            .bytes();
        let at = 48;
        iu[at..at + 4].copy_from_slice(&len.to_be_bytes());
        rig.send(0, &iu);
        rig.complete_all();
        assert_eq!(rig.rsp().code, Some(2), "{len:#x}");
        assert!(rig.disks[0].iter().all(|&b| b == 0));
        rig.close();
    }
}

/// CVE-2020-28374, CVE-2021-3139: a copy command of one unit contains the designator of another
/// unit, which may not be visible to the initiator. No command to LUN 0 should access another unit.
#[test]
fn cve_2020_28374_and_2021_3139_other_unit_is_unreachable() {
    let mut rig = Rig::live();
    rig.disks[1].fill(0x77);
    // EXTENDED COPY (LID1) with two targets by NAA designator, and a segment from the second to the
    // first.
    let mut list = vec![0; 16];
    (list[3], list[11]) = (64, 28);
    for unit in 0..2 {
        let config = rig.units[unit].lu.config();
        let Naa::LocallyAssigned(name) = config.identity.naa else {
            panic!("{config:?}");
        };
        list.extend([0xe4, 0, 0, 0, 1, 3, 0, 8]);
        list.extend((3 << 60 | name).to_be_bytes());
        list.extend([0; 16]);
    }
    list.extend([2, 2, 0, 24, 0, 1, 0, 0, 0, 0, 0, 8]);
    list.extend([0; 16]);
    list.resize(512, 0);
    let was = rig.disks.clone();
    for opcode in [0x83, 0x84] {
        for action in 0..0x20 {
            let mut cdb = [0; 16];
            (cdb[0], cdb[1]) = (opcode, action);
            cdb[12..14].copy_from_slice(&512_u16.to_be_bytes());
            let out = Data::Immediate(list.clone());
            rig.send(0, &cmd(&cdb).tag(5).out(out).bytes());
            assert!(rig.blocks().is_empty(), "{opcode:#x}/{action:#x}");
            rig.complete_all();
            let rsp = rig.rsp();
            assert_eq!(
                (rsp.status, rsp.key),
                (2, Some(5)),
                "{opcode:#x}/{action:#x}"
            );
        }
    }
    // No other opcode should access it with the same list.
    for opcode in 0..=0xff {
        for action in 0..0x20 {
            let mut cdb = [0; 16];
            (cdb[0], cdb[1]) = (opcode, action);
            let out = Data::Immediate(list.clone());
            rig.send(0, &cmd(&cdb).tag(6).out(out).bytes());
            for pending in &rig.work {
                if let Work::Block { unit, .. } = pending {
                    assert_eq!(*unit, UnitIdx(0), "{opcode:#x}/{action:#x}");
                }
            }
            rig.complete_all();
            rig.received.clear();
        }
    }
    assert_eq!(rig.disks[1], was[1]);
    // If a LUN is not mapped for this initiator, there is no unit, even if it is mapped for another
    // initiator.
    for lun in [2, 9, 255] {
        rig.received.clear();
        rig.send(0, &read10(0, 1).tag(7).lun(lun).bytes());
        rig.complete_all();
        assert_eq!(rig.rsp().key, Some(5), "{lun}");
    }
    rig.close();
}

/// CVE-2026-100075: if an indirect table fails halfway, send-queue credit must not change.
#[test]
fn cve_2026_100075_failed_table_keeps_credit() {
    let mut rig = Rig::live();
    let free = rig.channel.sender().queue.free();
    for round in 0..50 {
        // The fetched table describes less data than the length in the command.
        let mut descs = blocks(20);
        let data = indirect(&descs, 5);
        descs[19] = MemDesc::new(0, KEY, 511);
        rig.memory.insert(TABLE, table_bytes(&descs));
        rig.memory.insert(KEY, vec![0; 20 * 512]);
        let iu = write10(0, 20).tag(round).out(data);
        rig.send(0, &iu.bytes());
        rig.complete_all();
        assert_eq!(rig.rsp().code, Some(2));
        assert_eq!(rig.channel.sender().queue.free(), free);
        assert_eq!(rig.channel.sender().req_lim.at_initiator(), 4);
    }
    rig.close();
}

/// CVE-2022-50129 and CVE-2024-26872: if the connection is closed at any point, no resource may be
/// used after it was released, and none may leak.
#[test]
fn cve_2022_50129_and_2024_26872_teardown_leaks_nothing() {
    for before in 0..12 {
        for after in 0..8 {
            let mut rig = Rig::live();
            rig.add_channel(params(), 2);
            rig.establish(1);
            rig.memory.insert(KEY, pattern(512 * 60));
            let descs = blocks(60);
            rig.memory.insert(TABLE, table_bytes(&descs));
            let write = write10(0, 60).tag(1).out(indirect(&descs, 0));
            rig.send(0, &write.bytes());
            let read = read10(0, 60).tag(2).into(indirect(&descs, 60));
            rig.send(0, &read.bytes());
            let ordered = write10(0, 1).tag(3).attr(TaskAttr::Ordered);
            rig.send(0, &ordered.out(Data::Immediate(vec![1; 512])).bytes());
            rig.send(1, &tmf(9, 0, TskMgmtFunction::LogicalUnitReset, 0));
            for _ in 0..before {
                if !rig.work.is_empty() {
                    rig.complete();
                }
            }
            rig.with(0, Channel::handle_disconnected);
            for i in 0..after {
                if !rig.work.is_empty() {
                    rig.complete_nth(i % rig.work.len(), true);
                }
            }
            rig.complete_all();
            assert!(rig.released);
            assert!(
                rig.received.iter().any(|(c, b)| *c == 1 && b[0] == 0xc1),
                "the reset of the other channel gets a response"
            );
            rig.close();
        }
    }
}

#[test]
fn events_are_sent_one_by_one() {
    let mut rig = Rig::live();
    rig.add_channel(
        ChannelParams {
            wants_events: false,
            ..params()
        },
        2,
    );
    rig.establish(1);
    for chan in [0, 1] {
        for attention in [Attention::CapacityChanged, Attention::LunsChanged] {
            rig.with(chan, |ch, cx| ch.handle_event(cx, UnitIdx(1), attention));
        }
    }
    rig.complete_all();
    let mut seen = Vec::new();
    while let Some((chan, bytes)) = rig.received.pop() {
        let FromTarget::AerReq(req) = FromTarget::parse(&bytes).unwrap() else {
            panic!("an AER_REQ");
        };
        assert_eq!((chan, req.lun), (0, [0, 1, 0, 0, 0, 0, 0, 0]));
        seen.push(req.sense[12]);
        let mut rsp = [0; 16];
        AerRsp { tag: req.tag }.emit(&mut rsp);
        rig.send(0, &rsp);
        rig.complete_all();
    }
    assert_eq!(seen, [0x2a, 0x3f]);
    rig.close();
}

#[test]
fn silent_initiator_is_probed() {
    let mut rig = Rig::live();
    rig.advance(KEEPALIVE - Duration::from_secs(1));
    rig.send(0, &cmd(&[0; 6]).bytes());
    rig.complete_all();
    rig.advance(Duration::from_secs(2));
    assert!(rig.work.is_empty(), "it was received just now");
    rig.advance(KEEPALIVE);
    assert!(matches!(rig.work[..], [Work::Probe { peer: 0 }]));
    rig.complete_all();
    assert_eq!(rig.channel.state(), ChState::Live);
    rig.advance(KEEPALIVE);
    rig.complete_nth(0, false);
    assert_eq!(rig.channel.state(), ChState::Draining);
    rig.close();
}

#[test]
fn table_for_missing_unit_is_fetched() {
    let mut rig = Rig::live();
    let descs = [MemDesc::new(0, KEY, 96)];
    rig.memory.insert(TABLE, table_bytes(&descs));
    rig.memory.insert(KEY, vec![0xff; 96]);
    let inquiry = cmd(&[0x12, 0, 0, 0, 96, 0]);
    let iu = inquiry.lun(7).into(indirect(&descs, 0));
    rig.send(0, &iu.bytes());
    rig.complete_all();
    assert_eq!(rig.memory[&KEY][0], 0x7f, "no unit has this number");
    rig.close();
}

const STATES: [ChState; 6] = [
    ChState::Connecting,
    ChState::Joining,
    ChState::Live,
    ChState::Disconnecting,
    ChState::Draining,
    ChState::Disconnected,
];

#[test]
fn channel_table_matches_diagram() {
    let expected = "Connecting: Joining Draining\n\
                    Joining: Live Disconnecting Draining\n\
                    Live: Disconnecting Draining\n\
                    Disconnecting: Draining\n\
                    Draining: Disconnected\n\
                    Disconnected: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn channel_transition_coverage_is_complete() {
    assert_all_taken(&STATES, || {
        unestablished_connection_times_out();
        // Normally, after a shutdown, and after a logout of the initiator.
        replacing_channel_waits_for_replaced();
        shutdown_completes_commands_before_logout();
        initiator_logout_closes_channel();
        // The connection is closed before the replaced session.
        let mut rig = Rig::new();
        let chan = rig.add_channel(params(), 1);
        rig.with(chan, |ch, cx| ch.handle_established(cx, false));
        rig.close();
    });
}
