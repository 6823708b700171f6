//! Scripted connection tests: login, data transfer in both directions, flow control, and all kinds
//! of termination.

use std::time::Duration;

use riser_scsi::iscsi::keys::Key;
use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, LoginStatus, TmfFunction, TmfStatus};
use riser_scsi::iscsi::{Itt, StatSn};
use riser_scsi::iser::{Buffers, HEADERS_LEN, Hello, put_control};
use riser_scsi::nexus::NexusId;
use riser_scsi::task::TaskManagement;
use riser_state::testing::{assert_all_taken, table};

use super::{ConnState, IserChannel, IserParams};
use crate::iscsi::{Channel, Datamover as _, MAX_QUEUED, Phase, TaskState};
use crate::pool::Owner;
use crate::qos::IoLimits;
use crate::tests::rig;
use crate::tests::rig::iser::{Got, IserPeer, WINDOW, is_good, offer, only, params, remote_buffer};
use crate::worker::fabrics::Input;

type Rig = rig::Rig<IserPeer>;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn login_negotiates_segment_lengths() {
    let mut rig = Rig::up();
    assert_eq!(rig.conn.state(), ConnState::Up);
    let got = rig.login("InitialR2T=No\0");
    let (FromTarget::LoginResponse(response), text, None) = only(&got) else {
        panic!("{got:?}");
    };
    assert_eq!(response.status, LoginStatus::SUCCESS);
    let text = String::from_utf8(text.to_vec()).unwrap();
    for pair in [
        "RDMAExtensions=Yes\0",
        "InitiatorRecvDataSegmentLength=65536\0",
        "TargetRecvDataSegmentLength=8192\0",
    ] {
        assert!(text.contains(pair), "{text:?}");
    }
    assert_eq!(rig.conn.state(), ConnState::FullFeature);
    let info = rig.conn.channel().session_info().unwrap();
    assert!(info.params.rdma_extensions);
    rig.close();
}

#[test]
fn messages_before_established_are_deferred() {
    let mut rig = Rig::accepted(params());
    assert!(rig.login("").is_empty());
    assert!(rig.notified);
    assert_eq!(rig.conn.state(), ConnState::Init);
    let got = rig.with(IserChannel::handle_established);
    assert!(matches!(only(&got).0, FromTarget::LoginResponse(_)));
    assert_eq!(rig.receives(), params().receives() as usize);
    rig.close();
}

#[test]
fn read_writes_data_then_response_invalidates_key() {
    let mut rig = Rig::logged_in("");
    rig.disks[0] = pattern(rig.disks[0].len());
    let got = rig.read(7, 3, 16);
    assert!(is_good(&got, 7));
    assert_eq!(only(&got).2, Some(7));
    assert_eq!(rig.memory[&7], rig.disks[0][3 * 512..19 * 512]);
    rig.close();
}

#[test]
fn keys_stay_valid_without_remote_invalidate() {
    let mut rig = Rig::accepted(IserParams {
        remote_invalidate: false,
        ..params()
    });
    rig.with(IserChannel::handle_established);
    rig.login("");
    let got = rig.command(1, &[0; 6], None, 0, &[], true);
    assert_eq!(only(&got).2, None);
    let got = rig.read(7, 0, 1);
    assert!(is_good(&got, 7));
    assert_eq!(only(&got).2, None);
    rig.close();
}

/// Immediate, unsolicited and solicited data with any alignment and in any combination.
#[test]
fn write_combines_all_kinds_of_data() {
    let data = pattern(40 * 512);
    let cases = [
        // All data by READ, all data with the command, some data with the command.
        (0, 0),
        (8192, 8192),
        (1, 1),
        (513, 513),
        (8191, 8191),
        // With unsolicited data in between.
        (0, 8192),
        (3, 1000),
        (8192, 16384),
        (511, 15_001),
        (0, 16384),
    ];
    for (immediate, solicited) in cases {
        let mut rig = Rig::logged_in("");
        let mut got = rig.write(9, &data, immediate, solicited);
        let (mut at, mut sn) = (immediate, 0);
        while at < solicited {
            assert!(got.is_empty(), "{immediate} {solicited}");
            let end = (at + 8192).min(solicited);
            let is_final = end == solicited;
            got = rig.data_out(9, sn, at as u32, &data[at..end], is_final);
            (at, sn) = (end, sn + 1);
        }
        assert!(is_good(&got, 9), "{immediate} {solicited} {got:?}");
        assert_eq!(rig.disks[0][..data.len()], data, "{immediate} {solicited}");
        let invalidated = (solicited < data.len()).then_some(9);
        assert_eq!(only(&got).2, invalidated);
        assert_eq!(
            rig.conn.channel().executor().stats().counters.bytes_out,
            data.len() as u64
        );
        rig.close();
    }
}

/// A write with all its data in the command does not advertise a buffer, and does not need it.
#[test]
fn short_write_needs_no_buffer() {
    let mut rig = Rig::logged_in("");
    let data = pattern(1024);
    let got = rig.write(9, &data, 1024, 1024);
    assert!(is_good(&got, 9));
    assert_eq!(rig.disks[0][..1024], data);
    rig.close();
}

/// libiscsi announces immediate data but leaves it in its buffer. We read it like all other data.
#[test]
fn missing_immediate_data_is_read() {
    let data = pattern(4 * 512);
    let mut rig = Rig::logged_in("ImmediateData=Yes\0");
    rig.memory.insert(9, data.clone());
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    let command = FromInitiator::ScsiCommand(rig.scsi(9, &cdb, true, 4 * 512));
    let write = Some(remote_buffer(9));
    let buffers = Buffers { write, read: None };
    let mut bytes = Vec::new();
    put_control(buffers, command.header(), &[], &data, &mut bytes);
    bytes.truncate(HEADERS_LEN);
    let got = rig.send_bytes(&bytes);
    assert!(is_good(&got, 9), "{got:?}");
    assert_eq!(rig.disks[0][..data.len()], data);
    rig.close();
}

/// If negotiated, an initiator advertises a buffer with all data of a write, and READs skip the
/// data already received.
#[test]
fn tagged_buffer_can_hold_whole_write() {
    let data = pattern(32 * 512);
    for (key, whole) in [
        ("TaggedBufferForSolicitedDataOnly=No\0", true),
        ("TaggedBufferForSolicitedDataOnly=Yes\0", false),
    ] {
        let mut rig = Rig::logged_in(key);
        let advertised = if whole { &data[..] } else { &data[700..] };
        rig.memory.insert(9, advertised.to_vec());
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 32, 0];
        let got = rig.command(9, &cdb, Some(true), 32 * 512, &data[..700], true);
        assert!(is_good(&got, 9));
        assert_eq!(rig.disks[0][..data.len()], data);
        rig.close();
    }
}

/// Transfers longer than the send queue are split into portions, and never exceed the queue.
#[test]
fn long_transfers_are_split_into_portions() {
    let mut rig = Rig::with_params(IserParams {
        send_queue: 5,
        max_sge: 1,
        ..params()
    });
    // If every other page of the pool is in use, a buffer consists of single pages.
    let mut held: Vec<_> = std::iter::from_fn(|| rig.pool.allocate(4096)).collect();
    for at in (0..held.len()).rev().step_by(2) {
        let buffer = held.swap_remove(at);
        rig.pool.release(buffer);
    }
    let data = pattern(128 * 512);
    let got = rig.write(9, &data, 0, 0);
    assert!(is_good(&got, 9), "{got:?}");
    assert_eq!(rig.disks[0][..data.len()], data);
    let got = rig.read(10, 0, 128);
    assert!(is_good(&got, 10), "{got:?}");
    assert_eq!(rig.memory[&10], data);
    assert!((2..=4).contains(&rig.most_posted), "{}", rig.most_posted);
    held.into_iter().for_each(|buffer| rig.pool.release(buffer));
    rig.close();
}

#[test]
fn responses_are_sent_in_statsn_order() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    rig.stalled = true;
    for tag in 1..=u32::from(WINDOW) {
        rig.read(tag, tag as u8, 64);
    }
    // The disk completes them in a different order.
    for at in [2, 0, 1, 0] {
        rig.finish_block(at);
    }
    rig.stalled = false;
    let got = rig.run_actions();
    let numbers: Vec<_> = got
        .iter()
        .map(|got| match got {
            Got::Pdu {
                pdu: FromTarget::ScsiResponse(r),
                numbers,
                ..
            } => (r.itt, numbers.stat_sn),
            other => panic!("{other:?}"),
        })
        .collect();
    let tags: Vec<_> = numbers.iter().map(|(itt, _)| itt.0).collect();
    assert_eq!(tags, [3, 1, 4, 2]);
    let first = numbers[0].1;
    for (i, (_, stat_sn)) in numbers.iter().enumerate() {
        assert_eq!(*stat_sn, StatSn(first.0 + i as u32));
    }
    rig.close();
}

#[test]
fn sense_data_is_sent_with_response() {
    let mut rig = Rig::logged_in("");
    rig.memory.insert(5, vec![0; 512]);
    let cdb = [0x28, 0, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0];
    let got = rig.command(5, &cdb, Some(false), 512, &[], true);
    let (FromTarget::ScsiResponse(response), data, invalidated) = only(&got) else {
        panic!("{got:?}");
    };
    assert_eq!((response.status, invalidated), (2, Some(5)));
    assert_eq!((data[2] & 0x7f, data[4] & 0xf), (0x70, 5));
    assert!(data.len() <= 128, "it fits what an initiator has for it");
    rig.close();
}

#[test]
fn ping_response_is_truncated() {
    let mut rig = Rig::logged_in("");
    let data = pattern(300);
    let got = rig.nop(3, &data);
    let (FromTarget::NopIn(nop), echoed, None) = only(&got) else {
        panic!("{got:?}");
    };
    assert_eq!((nop.itt, echoed), (Itt(3), &data[..128]));
    let got = rig.wait(Duration::from_secs(15));
    assert!(matches!(only(&got).0, FromTarget::NopIn(n) if n.itt == Itt::NONE));
    assert!(rig.wait(Duration::from_secs(10)).is_empty());
    rig.check_gone();
}

/// There is a receive for every message that a well-behaved initiator can send at the same time.
#[test]
fn receives_cover_all_legal_messages() {
    let params = params();
    let mut rig = Rig::logged_in("");
    let all = params.receives() as usize;
    assert_eq!(rig.receives(), all);
    rig.prompt = false;
    rig.stalled = true;
    let data = pattern(16384);
    for tag in 1..=u32::from(WINDOW) {
        rig.write(tag, &data, 0, 16384);
        rig.data_out(tag, 0, 0, &data[..8192], false);
        rig.data_out(tag, 1, 8192, &data[8192..], true);
        assert_eq!(rig.receives(), all, "a receive is posted again at once");
    }
    assert_eq!(rig.blocks().len(), usize::from(WINDOW));
    rig.close();
}

/// If a peer sends too many requests, we stop receiving until the responses are sent. This limits
/// the memory usage.
#[test]
fn ping_flood_holds_back_receives() {
    let mut rig = Rig::logged_in("");
    rig.stalled = true;
    let all = rig.receives();
    let mut sent = 0;
    while rig.receives() > 0 {
        rig.nop(sent, &[]);
        sent += 1;
        assert!(rig.conn.channel().mover().queued() <= MAX_QUEUED + all);
        assert!((sent as usize) < MAX_QUEUED + 2 * all);
    }
    rig.stalled = false;
    let got = rig.run_actions();
    assert_eq!(got.len(), sent as usize);
    assert_eq!(rig.receives(), all);
    rig.close();
}

#[test]
fn abort_waits_for_transfers_in_flight() {
    let mut rig = Rig::logged_in("");
    rig.stalled = true;
    let data = pattern(64 * 512);
    rig.write(9, &data, 0, 0);
    let free = rig.pool.free();
    assert!(rig.tmf(20, TmfFunction::AbortTask, 9).is_empty());
    assert_eq!(rig.pool.free(), free, "the device writes to the buffer");
    rig.stalled = false;
    let got = rig.run_actions();
    let (FromTarget::TmfResponse(response), ..) = only(&got) else {
        panic!("{got:?}");
    };
    assert_eq!(response.status, TmfStatus::Complete);
    assert_eq!(rig.pool.free(), rig.pool.size());
    assert_eq!(rig.conn.channel().executor().stats().counters.aborted, 1);
    rig.close();
}

/// A task management function can use the context of a previous command, but the key of this
/// command must not be invalidated.
#[test]
fn tmf_response_invalidates_no_key() {
    let functions = [
        TmfFunction::AbortTask,
        TmfFunction::AbortTaskSet,
        TmfFunction::QueryTask,
        TmfFunction::LogicalUnitReset,
        TmfFunction::TargetWarmReset,
    ];
    for function in functions {
        let mut rig = Rig::logged_in("");
        let invalidated_by = |got: &[Got]| match only(got) {
            (FromTarget::TmfResponse(_), _, invalidated) => invalidated,
            other => panic!("{function:?}: {other:?}"),
        };
        assert!(is_good(&rig.read(7, 0, 1), 7));
        let got = rig.tmf(20, function, 7);
        assert_eq!(invalidated_by(&got), None, "{function:?}");
        // Clear the unit attention of the function for its own nexus.
        rig.command(30, &[0; 6], None, 0, &[], true);
        // Neither is the key of an aborted command invalidated. This is up to the initiator.
        rig.prompt = false;
        rig.read(8, 0, 1);
        rig.read(9, 0, 1);
        rig.finish_block(1);
        assert!(is_good(&rig.run_actions(), 9));
        let got = rig.tmf(21, function, 8);
        assert_eq!(invalidated_by(&got), None, "{function:?}");
        rig.close();
    }
}

#[test]
fn abort_cancels_unposted_transfer() {
    let mut rig = Rig::with_params(IserParams {
        send_queue: 3,
        ..params()
    });
    rig.stalled = true;
    let data = pattern(4096);
    for tag in 1..=3 {
        rig.write(tag, &data, 0, 0);
    }
    // Two READs fill the queue. The third waits and is removed immediately.
    let free = rig.pool.free();
    rig.tmf(20, TmfFunction::AbortTask, 3);
    assert!(rig.pool.free() > free);
    rig.stalled = false;
    let got = rig.run_actions();
    assert_eq!(
        got.len(),
        3,
        "expected two responses and the function's: {got:?}"
    );
    rig.close();
}

#[test]
fn announced_hello_gets_reply() {
    let mut rig = Rig::logged_in("iSERHelloRequired=Yes\0");
    let got = rig.hello(Hello {
        max_version: 10,
        min_version: 1,
        ird: 4,
    });
    let [Got::Hello(reply)] = &got[..] else {
        panic!("{got:?}");
    };
    assert_eq!(
        (reply.rejected, reply.ord, reply.current_version),
        (false, 4, 10)
    );
    assert!(!rig.command(1, &[0; 6], None, 0, &[], true).is_empty());
    // A second Hello is an error.
    rig.hello(Hello {
        max_version: 10,
        min_version: 1,
        ird: 4,
    });
    rig.check_gone();
}

/// RFC 7145 5.1.3: an RFC 5046 initiator sends a Hello without announcing it.
#[test]
fn unannounced_hello_gets_reply() {
    let hello = Hello {
        max_version: 1,
        min_version: 1,
        ird: 4,
    };
    let mut rig = Rig::in_full_feature(1 << 20, "");
    let got = rig.hello(hello);
    assert!(matches!(&got[..], [Got::Hello(reply)] if !reply.rejected));
    assert!(!rig.command(1, &[0; 6], None, 0, &[], true).is_empty());
    // It must be the first message.
    rig.hello(hello);
    rig.check_gone();
    let mut rig = Rig::in_full_feature(1 << 20, "iSERHelloRequired=No\0");
    assert!(rig.hello(hello).is_empty());
    rig.check_gone();
}

#[test]
fn required_hello_must_be_first() {
    let mut rig = Rig::logged_in("iSERHelloRequired=Yes\0");
    assert!(rig.nop(1, &[]).is_empty());
    rig.check_gone();
    let mut rig = Rig::logged_in("iSERHelloRequired=Yes\0");
    let got = rig.hello(Hello {
        max_version: 15,
        min_version: 11,
        ird: 4,
    });
    assert!(matches!(&got[..], [Got::Hello(reply)] if reply.rejected));
    rig.check_parting();
}

#[test]
fn logout_responds_then_disconnects() {
    let mut rig = Rig::logged_in("");
    let got = rig.log_out();
    assert!(matches!(only(&got).0, FromTarget::LogoutResponse(_)));
    rig.check_parting();
}

/// The units have removed a session when its logout response is sent, even if the initiator does
/// not disconnect.
#[test]
fn logout_removes_nexus_before_disconnect() {
    let mut rig = Rig::logged_in("");
    assert!(rig.units[0].lu.nexus(NexusId(7)).is_some());
    rig.log_out();
    assert!(rig.units[0].lu.nexus(NexusId(7)).is_none());
    rig.check_parting();
}

/// An initiator can disconnect after its logout without being cut off.
#[test]
fn initiator_may_disconnect_after_logout() {
    let mut rig = Rig::logged_in("");
    rig.log_out();
    assert!(!rig.in_error);
    // Any further messages are ignored.
    assert!(rig.nop(9, &[]).is_empty());
    rig.close();
    // Another login that replaces this connection doesn't wait for the disconnect.
    let mut rig = Rig::logged_in("");
    rig.log_out();
    rig.apply(Input::Terminate);
    rig.check_gone();
}

#[test]
fn refused_login_responds_then_disconnects() {
    let mut rig = Rig::up();
    let got = rig.login("MaxConnections=1\0MaxConnections=1\0");
    let (FromTarget::LoginResponse(response), ..) = only(&got) else {
        panic!("{got:?}");
    };
    assert_ne!(response.status, LoginStatus::SUCCESS);
    rig.check_parting();
}

/// The connection can be terminated in any state, and more than once.
#[test]
fn connection_terminates_in_any_state() {
    let in_login = || {
        let mut rig = Rig::up();
        // A login with continued text.
        let mut bhs = [0; 48];
        bhs[..2].copy_from_slice(&[0x43, 0x44]);
        bhs[5..8].copy_from_slice(&[0, 0, 4]);
        let mut bytes = vec![0x10; 1];
        bytes.resize(28, 0);
        bytes.extend_from_slice(&bhs);
        bytes.extend_from_slice(b"Init");
        rig.send_bytes(&bytes);
        rig
    };
    let states: [(fn() -> Rig, ConnState); 4] = [
        (|| Rig::accepted(params()), ConnState::Init),
        (Rig::up, ConnState::Up),
        (in_login, ConnState::Bound),
        (|| Rig::logged_in(""), ConnState::FullFeature),
    ];
    for (make, state) in states {
        // The peer disconnects.
        let mut rig = make();
        assert_eq!(rig.conn.state(), state);
        rig.apply(Input::Disconnected);
        rig.apply(Input::Disconnected);
        rig.check_gone();
        // Terminated by an administrator, or by another login.
        let mut rig = make();
        rig.apply(Input::Terminate);
        rig.check_gone();
        // The queue pair fails and a receive is flushed.
        let mut rig = make();
        let rx = rig.take_receive();
        rig.with(|conn, cx| conn.handle_recv_flushed(cx, rx));
        rig.check_gone();
        // Shutdown without a logout.
        let mut rig = make();
        let until = rig.now + Duration::from_secs(2);
        rig.apply(Input::Shutdown(until));
        rig.wait(Duration::from_secs(2));
        rig.check_gone();
        // The device is removed with all posted work requests.
        let mut rig = make();
        rig.apply(Input::QueuesGone);
        assert!(rig.released);
        assert_eq!(rig.conn.state(), ConnState::Down);
        // Login timeout.
        if state != ConnState::FullFeature {
            let mut rig = make();
            rig.wait(Duration::from_secs(15));
            rig.check_gone();
        }
    }
}

/// The connection is terminated with a command in each of its states. The command's buffer is
/// released when the device no longer uses it, but not before.
#[test]
fn commands_in_any_state_end_with_connection() {
    let data = pattern(64 * 512);
    let cases: [(&str, TaskState); 6] = [
        ("limit", TaskState::AwaitLimit),
        ("buffer", TaskState::AwaitBuffer),
        ("unsolicited", TaskState::Receive),
        ("read", TaskState::Receive),
        ("block", TaskState::Block),
        ("response", TaskState::Sent),
    ];
    for (what, state) in cases {
        for abort_first in [false, true] {
            let mut rig = Rig::logged_in("");
            let mut hog = None;
            rig.stalled = true;
            rig.prompt = false;
            match what {
                "limit" => {
                    let limits = IoLimits {
                        iops: Some(1),
                        burst: Duration::ZERO,
                        ..IoLimits::default()
                    };
                    rig.units[0].limits.set(&limits);
                    rig.prompt = true;
                    rig.stalled = false;
                    rig.read(8, 0, 64);
                    rig.write(9, &data, 0, 0);
                }
                "buffer" => {
                    hog = rig.pool.allocate(4 << 20);
                    rig.write(9, &data, 0, 0);
                }
                // Commands that wait for unsolicited data: `isert_put_unsol_pending_cmds`.
                "unsolicited" => drop(rig.write(9, &data, 0, 8192)),
                "read" => drop(rig.write(9, &data, 0, 0)),
                "block" => drop(rig.read(9, 0, 64)),
                _ => {
                    rig.read(9, 0, 64);
                    rig.finish_block(0);
                    rig.run_actions();
                }
            }
            assert_eq!(
                rig.conn.channel().executor().task_state(Itt(9)),
                Some(state),
                "{what}"
            );
            if abort_first {
                rig.tmf(20, TmfFunction::AbortTask, 9);
            }
            rig.apply(Input::Disconnected);
            if let Some(hog) = hog {
                rig.pool.release(hog);
            }
            if what == "read" || what == "response" {
                assert_ne!(rig.pool.free(), rig.pool.size(), "{what} is under way");
            }
            rig.check_gone();
        }
    }
}

/// A chain fails: the data of its command is lost and the connection is closed.
#[test]
fn failed_chain_closes_connection() {
    for write in [false, true] {
        let mut rig = Rig::logged_in("");
        rig.stalled = true;
        if write {
            rig.write(9, &pattern(8192), 0, 0);
        } else {
            rig.read(9, 0, 8);
        }
        rig.fail_chain();
        rig.check_gone();
    }
}

/// This applies even if the gate permits more: at level 2, commands on TCP would wait for another
/// connection.
#[test]
fn commands_end_with_their_connection() {
    let mut rig = Rig::up();
    rig.gate.offer = offer()
        .with(Key::ErrorRecoveryLevel, 2)
        .with(Key::DefaultTime2Retain, 20);
    rig.login("InitialR2T=No\0ErrorRecoveryLevel=2\0DefaultTime2Retain=20\0");
    let info = rig.conn.channel().session_info().unwrap();
    assert_eq!(info.params.error_recovery_level, 2);
    rig.with(|conn, cx| conn.input(cx, Channel::handle_detach));
    rig.close();
}

/// The drain marker and the receives are posted separately, so they can complete in any order.
#[test]
fn last_completion_releases_connection() {
    let mut rig = Rig::logged_in("");
    rig.apply(Input::Disconnected);
    rig.apply(Input::Drained);
    assert!(!rig.released);
    while rig.receives() > 0 {
        assert!(!rig.released);
        let rx = rig.take_receive();
        rig.with(|conn, cx| conn.handle_recv_flushed(cx, rx));
    }
    assert!(rig.released);
}

/// CVE-2026-53176: a login PDU shorter than its 76 bytes of headers.
#[test]
fn cve_2026_53176_short_login_closes_connection() {
    for len in [0, 1, 27, 28, 75] {
        let mut rig = Rig::up();
        let mut bytes = vec![0; len];
        if let Some(first) = bytes.first_mut() {
            *first = 0x10;
        }
        assert!(rig.send_bytes(&bytes).is_empty(), "{len}");
        rig.check_gone();
    }
}

/// CVE-2026-90413, CVE-2026-90414: a DataSegmentLength that exceeds the received message, during
/// login and afterwards.
#[test]
fn cve_2026_90413_and_2026_90414_oversized_data_segment() {
    for mut rig in [Rig::up(), Rig::logged_in("")] {
        let mut bytes = vec![0x10; 1];
        bytes.resize(28, 0);
        let mut bhs = [0; 48];
        bhs[0] = if rig.conn.state() == ConnState::Up {
            0x43
        } else {
            0x01
        };
        bhs[1] = 0x87;
        bhs[5..8].copy_from_slice(&[0, 0x20, 0]);
        bytes.extend_from_slice(&bhs);
        bytes.extend_from_slice(&[0; 100]);
        assert!(rig.send_bytes(&bytes).is_empty());
        rig.check_gone();
    }
}

/// A data segment longer than TargetRecvDataSegmentLength, even if the receive is long enough.
#[test]
fn data_segment_over_limit_closes_connection() {
    let mut rig = Rig::up();
    rig.login("");
    rig.close();
    let mut rig = Rig::up();
    rig.gate.offer = offer().with(
        riser_scsi::iscsi::keys::Key::TargetRecvDataSegmentLength,
        512,
    );
    rig.login("InitialR2T=No\0");
    assert_eq!(rig.conn.state(), ConnState::FullFeature);
    rig.write(1, &pattern(1024), 513, 1024);
    rig.check_gone();
}

/// CVE-2026-90293: a command before the login is complete.
#[test]
fn cve_2026_90293_early_command_closes_connection() {
    let mut rig = Rig::up();
    assert!(rig.command(1, &[0; 6], None, 0, &[], true).is_empty());
    assert_eq!(rig.gate.joined, 0);
    assert_eq!(rig.conn.channel().executor().stats().counters.commands, 0);
    rig.check_gone();
}

#[test]
fn command_without_buffer_closes_connection() {
    let mut rig = Rig::logged_in("");
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    rig.command(5, &cdb, Some(false), 512, &[], true);
    rig.check_gone();
    let mut rig = Rig::logged_in("");
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    rig.command(5, &cdb, Some(true), 512, &[], true);
    rig.check_gone();
}

/// Data-Out with a target transfer tag of an R2T, which does not exist over RDMA.
#[test]
fn unsolicited_ttt_closes_connection() {
    let mut rig = Rig::logged_in("");
    let pdu = riser_scsi::iscsi::pdu::DataOut {
        is_final: true,
        lun: [0; 8],
        itt: Itt(9),
        ttt: riser_scsi::iscsi::Ttt(5),
        exp_stat_sn: StatSn(0),
        data_sn: 0,
        offset: 0,
    };
    rig.send(&FromInitiator::DataOut(pdu), &[0; 512]);
    rig.check_gone();
}

/// Buffers of an ignored command are never used for another command.
#[test]
fn buffers_of_ignored_command_are_not_reused() {
    let mut rig = Rig::logged_in("");
    rig.memory.insert(1, vec![0; 512]);
    // Out of order, so this is ignored silently.
    let mut command = rig.scsi(1, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], false, 512);
    command.cmd_sn.0 += 7;
    let buffers = Buffers {
        write: None,
        read: Some(remote_buffer(1)),
    };
    assert!(
        rig.send_with(buffers, &FromInitiator::ScsiCommand(command), &[])
            .is_empty()
    );
    rig.cmd_sn -= 1;
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    rig.command(2, &cdb, Some(false), 512, &[], true);
    assert_eq!(rig.conn.channel().phase(), Phase::Closed);
    assert_eq!(rig.memory[&1], [0; 512]);
    rig.check_gone();
}

#[test]
fn memory_size_is_fixed() {
    let params = IserParams::new(128);
    assert_eq!(params.receives(), 2 * 128 + 32);
    let memory = params.memory();
    assert_eq!(memory.receive_ring, 288 * 8640);
    assert_eq!(memory.send_ring, 144 * 256 + 2 * 8320);
    assert!(memory.total() < 3200 << 10, "{memory:?}");
}

/// Data longer than the window uses a single page of the pool. This applies to any length of
/// unsolicited data, and to initiator buffers that start with the first byte or with the first
/// solicited byte. The key is only invalidated by the response.
#[test]
fn long_data_uses_bounded_buffer() {
    let data = pattern(20 * 512);
    for (keys, whole) in [("", false), ("TaggedBufferForSolicitedDataOnly=No\0", true)] {
        for immediate in [0, 512, 2048, 2560, 8192] {
            let mut rig = Rig::with_window(2048, keys);
            let got = if whole {
                rig.memory.insert(3, data.clone());
                let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 20, 0];
                let len = data.len() as u32;
                rig.command(3, &cdb, Some(true), len, &data[..immediate], true)
            } else {
                rig.write(3, &data, immediate, immediate)
            };
            assert!(is_good(&got, 3), "{keys:?} {immediate} {got:?}");
            assert_eq!(only(&got).2, Some(3));
            assert_eq!(rig.disks[0][..data.len()], data, "{keys:?} {immediate}");
            let got = rig.read(4, 0, 20);
            assert!(is_good(&got, 4));
            assert_eq!(only(&got).2, Some(4));
            assert_eq!(rig.memory[&4], data);
            assert!(rig.pool.size() - rig.pool.lowest_free() <= 4096);
            rig.close();
        }
    }
}

/// A slow initiator is served without a limit.
#[test]
fn slow_initiator_has_no_time_limit() {
    let mut rig = Rig::with_window(2048, "");
    for tag in 3..20 {
        rig.stalled = true;
        rig.read(tag, 0, 20);
        for n in 0..10 {
            rig.wait(Duration::from_secs(10));
            rig.nop(0xffff_ffff, b"");
            // Several pieces, then the last piece with the response, which is delayed.
            if n < 4 {
                rig.finish_chain(true);
                rig.run_actions();
            }
        }
        assert!(!rig.in_error);
        rig.stalled = false;
        assert!(is_good(&rig.run_actions(), tag));
    }
    rig.close();
}

/// All data transferred by the connection is counted immediately.
#[test]
fn data_is_counted_when_transferred() {
    let mut rig = Rig::with_window(2048, "");
    let moved = |rig: &Rig| rig.conn.channel().executor().pace().moved();
    let data = pattern(20 * 512);
    let before = moved(&rig);
    rig.write(3, &data, 512, 512);
    assert_eq!(moved(&rig) - before, data.len() as u64 - 512);
    let before = moved(&rig);
    rig.read(4, 0, 20);
    assert_eq!(moved(&rig) - before, data.len() as u64);
    rig.close();
}

/// A command aborted by another nexus completes with TASK ABORTED when the device no longer uses
/// its buffer. This also invalidates its key.
#[test]
fn command_ended_by_other_nexus_gets_response() {
    for write in [true, false] {
        let mut rig = Rig::with_window(2048, "");
        rig.stalled = true;
        if write {
            rig.write(3, &pattern(20 * 512), 2048, 2048);
        } else {
            rig.read(3, 0, 20);
        }
        let function = TaskManagement::ClearTaskSet;
        let managed = rig.units[0].manage(NexusId(8), function);
        let task = managed.aborted[0];
        let got = rig.abort_by_other(task);
        assert!(got.is_empty());
        assert_eq!(rig.units[0].tasks(), 1, "a device has its buffer");
        rig.stalled = false;
        let got = rig.run_actions();
        let (pdu, _, invalidated) = only(&got);
        assert!(
            matches!(pdu, FromTarget::ScsiResponse(r) if r.itt == Itt(3) && r.status == 0x40),
            "{pdu:?}"
        );
        assert_eq!(invalidated, Some(3));
        assert_eq!(rig.units[0].tasks(), 0);
        assert!(is_good(&rig.read(4, 0, 1), 4));
        rig.close();
    }
}

const STATES: [ConnState; 6] = [
    ConnState::Init,
    ConnState::Up,
    ConnState::Bound,
    ConnState::FullFeature,
    ConnState::Terminating,
    ConnState::Down,
];

#[test]
fn transition_table_matches_diagram() {
    let expected = "Init: Up Terminating\n\
                    Up: Bound Terminating\n\
                    Bound: FullFeature Terminating\n\
                    FullFeature: Terminating\n\
                    Terminating: Down\n\
                    Down: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn transition_coverage_is_complete() {
    assert_all_taken(&STATES, connection_terminates_in_any_state);
}

/// If an initiator's data is read after other transfers, its time limit starts at this time, as for
/// TCP.
#[test]
fn data_timeout_starts_with_fetch() {
    let mut rig = Rig::with_params(IserParams {
        send_queue: 3,
        ..params()
    });
    rig.stalled = true;
    for tag in 1..4 {
        rig.read(tag, 0, 1);
    }
    rig.write(9, &pattern(512), 0, 0);
    let more: Vec<_> = std::iter::from_fn(|| rig.pool.grant(Owner(1), 4096)).collect();
    rig.pool.wait(Owner(2));
    rig.apply(Input::Pressure);
    let mut waited = 0;
    while !rig.is_fetching() {
        for _ in 0..29 {
            rig.wait(Duration::from_millis(100));
        }
        waited += 29;
        assert!(
            !rig.in_error,
            "cut while it takes what lies before: {waited}"
        );
        rig.finish_chain(true);
        rig.run_actions();
    }
    for tenth in 1..40 {
        rig.wait(Duration::from_millis(100));
        assert!(
            !rig.in_error,
            "cut {tenth} tenths of a second after its data began to be fetched"
        );
    }
    rig.pool.leave_line(Owner(2));
    more.into_iter().for_each(|buffer| rig.pool.release(buffer));
    rig.stalled = false;
    rig.run_actions();
    rig.close();
}
