//! Congestion marks on packets between real sockets. The sender's socket sets the mark on all its
//! data, instead of a router. All later steps are the same as in a network: receiving the control
//! message with the mark, the notification, and the reaction of its receiver.

#![allow(
    unsafe_code,
    reason = "the socket of a device is found among the process's descriptors"
)]

use std::os::fd::BorrowedFd;
use std::time::Instant;

use riser_transport::roce::Roce;
use riser_transport::verbs::{Mtu, Provider as _, SendOp, WcStatus};
use socket2::SockRef;

use crate::software::Real;
use crate::suite::world::{Side, connected, pattern};

/// "Congestion experienced" (RFC 3168, section 5).
const CE: u32 = 3;
const LEN: usize = 64 << 10;
/// Maximum number of attempts to measure windows without retransmissions.
const ATTEMPTS: usize = 100;

/// Marks all further data sent by a device.
fn mark_data_of(device: &Roce) {
    let local = device.socket_addr();
    let mut found = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let number = entry.unwrap().file_name().into_string().unwrap();
        // SAFETY: the descriptor may belong to another thread and be closed concurrently. We only
        // query its address, unless it is the address of the device, which is open.
        let fd = unsafe { BorrowedFd::borrow_raw(number.parse().unwrap()) };
        let socket = SockRef::from(&fd);
        if socket.local_addr().ok().and_then(|a| a.as_socket()) == Some(local) {
            socket.set_tos_v4(CE).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1, "the socket of {local}");
}

/// Returns devices with short packets, with windows above the minimum.
fn devices() -> Real {
    Real::with(|config| config.mtu = Some(Mtu::Mtu1024))
}

fn transfer(w: &mut Real, a: &Side, b: &Side, op: fn(&Side) -> SendOp, times: usize) {
    for n in 0..times {
        let (from, to) = match op(b) {
            SendOp::Read(_) => (b, a),
            _ => (a, b),
        };
        let data = pattern(n as u64, LEN);
        from.memory.write(0, &data);
        to.memory.fill(0, LEN, 0);
        a.send(w, n as u64, op(b), 0, LEN);
        assert_eq!(a.completion(w).status, WcStatus::Success);
        assert!(to.bytes(0, LEN) == data);
    }
}

/// Returns the window: the number of packets of a long WRITE that the requester sends before the
/// first acknowledgement.
fn window(w: &mut Real, a: &Side, b: &Side) -> u64 {
    let before = w.a.rc_counters().tx_packets;
    a.send(w, 99, SendOp::Write(b.remote(0)), 0, 2 * LEN);
    w.a.progress(Instant::now());
    let sent = w.a.rc_counters().tx_packets - before;
    assert_eq!(a.completion(w).status, WcStatus::Success);
    sent
}

/// A busy machine delays or drops packets. Their retransmissions narrow the window as well, so an
/// attempt with retransmissions proves nothing: repeats it.
#[test]
fn marked_write_narrows_requester_window() {
    let mut attempts = (0..ATTEMPTS).filter_map(|_| measure_windows());
    let (wide, narrow) = attempts.next().expect("no attempt without retransmissions");
    assert!(2 * narrow <= wide, "{wide} packets, then {narrow}");
}

/// Returns the windows without marks and with marks; `None` if there were retransmissions.
fn measure_windows() -> Option<(u64, u64)> {
    let mut w = devices();
    let (a, b) = connected(&mut w);
    let write = |b: &Side| SendOp::Write(b.remote(0));
    transfer(&mut w, &a, &b, write, 10);
    let wide = window(&mut w, &a, &b);
    let (at_a, at_b) = (w.a.rc_counters(), w.b.rc_counters());
    assert_eq!((at_b.rx_marked, at_b.tx_cnps, at_a.rx_cnps), (0, 0, 0));

    mark_data_of(&w.a);
    transfer(&mut w, &a, &b, write, 10);
    let narrow = window(&mut w, &a, &b);
    let (at_a, at_b) = (w.a.rc_counters(), w.b.rc_counters());
    assert!(at_b.rx_marked > 0, "{at_b:?}");
    assert!((1..=at_b.rx_marked).contains(&at_b.tx_cnps), "{at_b:?}");
    assert!((1..=at_b.tx_cnps).contains(&at_a.rx_cnps), "{at_a:?}");
    assert_eq!(at_a.rx_marked, 0, "acknowledgements are not markable");
    (at_a.retransmits == 0 && at_a.timeouts == 0).then_some((wide, narrow))
}

#[test]
fn marked_read_responses_cause_cnps() {
    let mut w = devices();
    let (a, b) = connected(&mut w);
    mark_data_of(&w.b);
    transfer(&mut w, &a, &b, |b| SendOp::Read(b.remote(0)), 10);
    let (at_a, at_b) = (w.a.rc_counters(), w.b.rc_counters());
    assert!(at_a.rx_marked > 0, "{at_a:?}");
    assert!((1..=at_a.rx_marked).contains(&at_a.tx_cnps), "{at_a:?}");
    assert!((1..=at_a.tx_cnps).contains(&at_b.rx_cnps), "{at_b:?}");
}
