//! Tests for a kernel and a real network: all lengths with all path MTUs, late receivers,
//! disconnected peers, unplugged devices.

use std::process::Command;
use std::time::{Duration, Instant};

use riser_transport::rdma_core::{RdmaCoreDevice, has_device};
use riser_transport::verbs::{
    AsyncEvent, CmEventKind, ConnParam, Provider as _, QpAttr, QpState, SendOp, Verbs as _,
    WcOpcode, WcStatus, WrId,
};

use crate::Test;
use crate::suite::world::{End, REGION, Side, Wants, World, connect_on, connected, pattern};
use crate::with_kernel::Devices;

pub(crate) const TESTS: &[Test] = &[
    ("stress::sizes", sizes),
    ("stress::late_receivers", late_receivers),
    ("stress::peer_vanishes", peer_vanishes),
    ("stress::peer_closes", peer_closes),
    ("stress::device_is_unplugged", device_is_unplugged),
    ("stress::events_reach_their_owner", events_reach_their_owner),
];

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

fn run(variable: &str) -> std::process::Child {
    let command = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is a command"));
    Command::new("sh")
        .args(["-c", &command])
        .spawn()
        .expect("sh")
}

fn finish(w: &mut Devices, variable: &str) {
    let mut child = run(variable);
    let status = w.until(variable, |_| child.try_wait().expect("a child"));
    assert!(status.success(), "{variable}: {status}");
}

fn done(w: &mut Devices, side: &Side, opcode: WcOpcode) {
    let c = side.completion(w);
    assert_eq!((c.status, c.opcode), (WcStatus::Success, opcode), "{c:?}");
}

/// Sends one message of this length for each operation.
fn one_of_each(w: &mut Devices, from: &Side, to: &Side, length: usize) {
    let data = pattern(length as u64 + 3, length);
    from.memory.write(0, &data);
    to.memory.fill(0, length, 0);
    from.send(w, 1, SendOp::Write(to.remote(0)), 0, length);
    done(w, from, WcOpcode::Write);
    assert!(to.bytes(0, length) == data, "{length} bytes written");
    from.memory.fill(0, length, 0);
    from.send(w, 2, SendOp::Read(to.remote(0)), 0, length);
    done(w, from, WcOpcode::Read);
    assert!(from.bytes(0, length) == data, "{length} bytes read");
    to.memory.fill(0, length, 0);
    to.recv(w, 3, 0, length);
    from.send(w, 3, SendOp::SendImm(length as u32), 0, length);
    done(w, from, WcOpcode::Send);
    let c = to.completion(w);
    assert_eq!(
        (c.status, c.byte_len as usize, c.imm),
        (WcStatus::Success, length, Some(length as u32))
    );
    assert!(to.bytes(0, length) == data, "{length} bytes sent");
    to.memory.write(8, &7u64.to_ne_bytes());
    let add = SendOp::FetchAdd {
        remote: to.remote(8),
        add: length as u64,
    };
    from.send(w, 4, add, 16, 8);
    done(w, from, WcOpcode::FetchAdd);
    assert_eq!(from.bytes(16, 8), 7u64.to_ne_bytes());
    let swap = SendOp::CmpSwap {
        remote: to.remote(8),
        compare: 7 + length as u64,
        swap: 1,
    };
    from.send(w, 5, swap, 16, 8);
    done(w, from, WcOpcode::CmpSwap);
    assert_eq!(to.bytes(8, 8), 1u64.to_ne_bytes());
}

/// Tests lengths around each packet boundary, then powers of two up to `RISER_LENGTH`, in both
/// directions.
fn sizes(mut w: Devices) {
    let w = &mut w;
    let longest = number("RISER_LENGTH").unwrap_or(REGION);
    let wants = Wants {
        region: longest.max(REGION),
        ..Wants::default()
    };
    let (a, b) = connect_on(w, 5000, &wants, &wants);
    let mtu = w.provider(End::A).query_qp(a.qp).unwrap().path_mtu.unwrap();
    if let Some(expected) = number("RISER_MTU") {
        assert_eq!(mtu.bytes() as usize, expected, "path MTU");
    }
    let m = mtu.bytes() as usize;
    let edges = [1, 3, m - 1, m, m + 1, 2 * m, 2 * m + 1, 5 * m - 1];
    let powers = (13..).map(|n| 1usize << n).take_while(|l| *l <= longest);
    for length in edges.into_iter().chain(powers) {
        one_of_each(w, &a, &b, length);
        one_of_each(w, &b, &a, length);
    }
}

/// Sends messages before their receives are posted, in both directions concurrently, many times.
fn late_receivers(mut w: Devices) {
    let w = &mut w;
    let (a, b) = connected(w);
    let data = pattern(9, 10_000);
    for side in [&a, &b] {
        side.memory.write(0, &data);
    }
    for round in 0..20 {
        a.send(w, 1, SendOp::Send, 0, 10_000);
        b.send(w, 1, SendOp::Send, 0, 10_000);
        w.pass(Duration::from_millis(round));
        for side in [&a, &b] {
            side.recv(w, 2, 500_000, 10_000);
        }
        for side in [&a, &b] {
            let mut ids: Vec<_> = side
                .completions(w, 2)
                .iter()
                .map(|c| {
                    assert!(c.status.is_ok(), "{c:?}");
                    c.wr_id
                })
                .collect();
            ids.sort_by_key(|id| id.0);
            assert_eq!(ids, [WrId(1), WrId(2)]);
            assert!(side.bytes(500_000, 10_000) == data);
            side.memory.fill(500_000, 10_000, 0);
        }
    }
}

/// Starts long transfers in both directions.
fn busy(w: &mut Devices) -> (Side, Side) {
    const LENGTH: usize = 64 << 20;
    let wants = Wants {
        region: LENGTH,
        param: ConnParam {
            // With 7, rdma_rxe retries forever.
            retry_count: 6,
            ..ConnParam::default()
        },
        ..Wants::default()
    };
    let (a, b) = connect_on(w, 5000, &wants, &wants);
    for (side, other) in [(&a, &b), (&b, &a)] {
        for n in 0..4 {
            side.send(w, n, SendOp::Write(other.remote(0)), 0, LENGTH);
        }
    }
    w.pass(Duration::from_millis(300));
    (a, b)
}

/// Waits until all four requests of a side have completed, and returns the status of the first
/// failed request.
fn first_error(w: &mut Devices, side: &Side) -> WcStatus {
    let mut out = Vec::new();
    w.until("the end of all work", |w| {
        w.provider(side.end).poll_cq(side.cq, 8, &mut out).unwrap();
        (out.len() == 4).then_some(())
    });
    let error = out.iter().find(|c| !c.status.is_ok());
    error.expect("work that the cut ended").status
}

/// Disconnects and reconnects the network.
fn peer_vanishes(mut w: Devices) {
    let w = &mut w;
    let (a, b) = busy(w);
    finish(w, "RISER_CUT");
    for side in [&a, &b] {
        let status = first_error(w, side);
        // rdma_rxe flushes requests if it detects that its own link is down.
        let is_flush = status == WcStatus::WrFlushErr && w.is_rxe(side.end);
        assert!(is_flush || status == WcStatus::RetryExcErr, "{status:?}");
    }
    finish(w, "RISER_HEAL");
    for end in [End::A, End::B] {
        w.reopen(end);
    }
    let (a, b) = connected(w);
    one_of_each(w, &a, &b, 100_000);
}

/// Closes the listening device during transfers, then the connecting device.
fn peer_closes(mut w: Devices) {
    let w = &mut w;
    for closing in [End::B, End::A] {
        let (a, b) = busy(w);
        let stays = if closing == End::A { b } else { a };
        let is_rxe = w.is_rxe(closing);
        w.close(closing);
        let status = first_error(w, &stays);
        // A kernel disconnects on behalf of dead processes, but the software NIC dies with its
        // process.
        if is_rxe {
            assert!(
                matches!(status, WcStatus::WrFlushErr | WcStatus::RetryExcErr),
                "{status:?}"
            );
        } else {
            assert_eq!(status, WcStatus::RetryExcErr);
        }
        for end in [End::A, End::B] {
            w.reopen(end);
        }
        let (a, b) = connected(w);
        one_of_each(w, &a, &b, 100_000);
        for end in [End::A, End::B] {
            w.reopen(end);
        }
    }
}

/// Removes the first device during transfers and adds it again: its user is notified, closes it,
/// and can reopen it.
fn device_is_unplugged(mut w: Devices) {
    let w = &mut w;
    let addr = w.addr(End::A);
    assert!(has_device(addr));
    let (_a, b) = busy(w);
    let mut cut = run("RISER_CUT");
    let (mut removal, mut fatal) = (false, false);
    w.until("the device's good-bye", |w| {
        let p = w.provider(End::A);
        while let Some(e) = p.poll_cm_event() {
            removal |= e.kind == CmEventKind::DeviceRemoval;
        }
        while let Some(e) = p.poll_async_event() {
            fatal |= e == AsyncEvent::DeviceFatal;
        }
        (removal || fatal).then_some(())
    });
    // The kernel waits for its users before it releases the device.
    w.close(End::A);
    let status = w.until("the removal", |_| cut.try_wait().expect("a child"));
    assert!(status.success(), "{status}");
    assert!(!has_device(addr));
    let status = first_error(w, &b);
    assert!(
        matches!(status, WcStatus::WrFlushErr | WcStatus::RetryExcErr),
        "{status:?}"
    );
    finish(w, "RISER_HEAL");
    w.until("the device's return", |_| has_device(addr).then_some(()));
    for end in [End::A, End::B] {
        w.reopen(end);
    }
    let (a, b) = connected(w);
    one_of_each(w, &a, &b, 100_000);
}

/// Opens the RDMA device a second time in this process. The second instance reads events of the
/// first.
fn events_reach_their_owner(mut w: Devices) {
    let w = &mut w;
    let mut other = RdmaCoreDevice::open(w.addr(End::A)).expect("a second device");
    let (a, b) = connected(w);
    let drain = QpAttr {
        state: Some(QpState::Sqd),
        en_sqd_async_notify: Some(true),
        ..QpAttr::default()
    };
    w.provider(End::A).modify_qp(a.qp, &drain).unwrap();
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        other.progress(Instant::now());
    }
    assert_eq!(other.poll_async_event(), None);
    assert_eq!(a.event(w), AsyncEvent::SqDrained(a.qp));
    drop(other);
    // The first instance still has its device.
    b.send(w, 1, SendOp::Write(a.remote(0)), 0, 100_000);
    done(w, &b, WcOpcode::Write);
}
