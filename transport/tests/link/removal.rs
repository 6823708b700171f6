//! Removal and return of addresses, links and interfaces.

use std::time::{Duration, Instant};

use riser_transport::netif::{AddressState, AddressWatch};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    AsyncEvent, CmError, CmEventKind, PortSpace, PortState, Provider as _, QpAttr, QpState,
    RdmaCm as _, SendOp, Verbs as _, VerbsError, WcStatus,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::strangers::write_arrives;
use super::{Link, V4, V6, on_a_link, sh};
use crate::suite::world::{End, Side, World as _, connected};

fn port_state(w: &mut Link, end: End) -> PortState {
    w.provider(end).query_port(1).unwrap().state
}

/// Connects two queue pairs after both ports have become active, which the kernel may report late,
/// and consumes the events.
fn connected_and_active(w: &mut Link) -> (Side, Side) {
    let sides = connected(w);
    for end in [End::A, End::B] {
        w.until("an active port", |w| {
            (port_state(w, end) == PortState::Active).then_some(())
        });
        while w.provider(end).poll_async_event().is_some() {}
    }
    sides
}

/// Waits until a device has received all of these events, in this order, possibly interleaved with
/// other events.
fn events(w: &mut Link, end: End, wanted: &[AsyncEvent]) {
    for next in wanted {
        w.until(&format!("{next:?}"), |w| {
            let event = w.provider(end).poll_async_event()?;
            (event == *next).then_some(())
        });
    }
}

/// Runs commands while the owner of device A sleeps, and checks that it is woken.
fn while_asleep(w: &mut Link, commands: &[&str]) {
    // Process all pending work first.
    w.pass(Duration::from_millis(20));
    assert!(!w.a.arm_fds());
    for command in commands {
        sh(command).unwrap();
    }
    let until = Instant::now() + w.patience();
    // The device may sleep again, for example if an IPv6 packet arrives first.
    while !has_event(&w.a) {
        {
            let fds = w.a.event_fds();
            let fds = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN));
            let wait = Timespec {
                tv_sec: 5,
                tv_nsec: 0,
            };
            let ready = poll(&mut fds.collect::<Vec<_>>(), Some(&wait)).unwrap();
            assert!(ready > 0, "{commands:?} wake it");
        }
        w.a.progress(Instant::now());
        assert!(Instant::now() < until);
        let _ = w.a.arm_fds();
    }
}

/// Returns whether an event is pending, so that the owner of the device must not sleep.
fn has_event(device: &Roce) -> bool {
    device.deadline().is_some_and(|at| at <= Instant::now())
}

#[test]
fn port_follows_address_and_link() {
    let test = "port_follows_address_and_link";
    on_a_link(
        test,
        V4,
        |_| {},
        |w| {
            let (a, b) = connected_and_active(w);
            write_arrives(w, &a, &b);
            while_asleep(w, &["ip addr del 10.9.0.1/24 dev v0"]);
            events(
                w,
                End::A,
                &[AsyncEvent::GidChange(1), AsyncEvent::PortError(1)],
            );
            assert_eq!(port_state(w, End::A), PortState::Down);
            while_asleep(w, &["ip addr add 10.9.0.1/24 dev v0"]);
            events(
                w,
                End::A,
                &[AsyncEvent::GidChange(1), AsyncEvent::PortActive(1)],
            );
            assert_eq!(port_state(w, End::A), PortState::Active);
            write_arrives(w, &a, &b);
            // This affects both ends of the link.
            while_asleep(w, &["ip link set v0 down"]);
            events(w, End::A, &[AsyncEvent::PortError(1)]);
            events(w, End::B, &[AsyncEvent::PortError(1)]);
            assert_eq!(port_state(w, End::B), PortState::Down);
            while_asleep(w, &["ip link set v0 up"]);
            events(w, End::A, &[AsyncEvent::PortActive(1)]);
            events(w, End::B, &[AsyncEvent::PortActive(1)]);
            write_arrives(w, &a, &b);
            // A device that is not removable stays even if its interface is deleted.
            while_asleep(w, &["ip link del v0"]);
            events(
                w,
                End::A,
                &[AsyncEvent::GidChange(1), AsyncEvent::PortError(1)],
            );
            assert!(!w.a.is_removed());
            let query = w.a.query_qp(a.qp).unwrap();
            assert_eq!(query.state, Some(QpState::Rts));
        },
    );
}

#[test]
fn device_is_removed_with_its_interface() {
    let test = "device_is_removed_with_its_interface";
    let removable: fn(&mut RoceConfig) = |config| config.is_removable = true;
    on_a_link(test, V4, removable, |w| {
        let (a, b) = connected_and_active(w);
        write_arrives(w, &a, &b);
        let bound = w.a.create_id(PortSpace::Tcp).unwrap();
        w.a.bind_addr(bound, "10.9.0.1:7000".parse().unwrap())
            .unwrap();
        let idle = w.a.create_id(PortSpace::Tcp).unwrap();
        a.recv(w, 7, 0, 64);
        while_asleep(w, &["ip link del v0"]);
        events(
            w,
            End::A,
            &[AsyncEvent::PortError(1), AsyncEvent::DeviceFatal],
        );
        assert!(w.a.is_removed());
        assert_eq!(w.a.progress(Instant::now()), 0);
        assert_eq!(w.a.deadline().filter(|at| *at > Instant::now()), None);
        let flushed = a.completion(w);
        assert_eq!((flushed.wr_id.0, flushed.status), (7, WcStatus::WrFlushErr));
        // Later requests are flushed as well, and new objects cannot be created.
        a.send(w, 8, SendOp::Send, 0, 64);
        assert_eq!(a.completion(w).status, WcStatus::WrFlushErr);
        let gone = VerbsError::DeviceGone;
        assert_eq!(w.a.alloc_pd(), Err(gone));
        assert_eq!(
            w.a.reg_mr(
                a.pd,
                &a.memory.whole(),
                riser_transport::verbs::Access::LOCAL_WRITE
            ),
            Err(gone)
        );
        assert_eq!(w.a.create_cq(1), Err(gone));
        assert_eq!(w.a.query_port(1), Err(gone));
        let reset = QpAttr::to(QpState::Reset);
        assert_eq!(w.a.modify_qp(a.qp, &reset), Err(gone));
        assert_eq!(w.a.create_id(PortSpace::Tcp), Err(CmError::Verbs(gone)));
        assert_eq!(w.a.disconnect(a.id), Err(CmError::Verbs(gone)));
        let mut ended = Vec::new();
        while let Some(event) = w.a.poll_cm_event() {
            assert_eq!(event.kind, CmEventKind::DeviceRemoval);
            ended.push(event.id);
        }
        assert!(ended.contains(&a.id) && ended.contains(&bound), "{ended:?}");
        assert!(!ended.contains(&idle), "it has no device");
        // The objects can be destroyed in the usual order.
        for id in [a.id, bound, idle] {
            w.a.destroy_id(id).unwrap();
        }
        w.a.destroy_qp(a.qp).unwrap();
        w.a.destroy_cq(a.cq).unwrap();
        w.a.dereg_mr(a.mr.id).unwrap();
        w.a.dealloc_pd(a.pd).unwrap();
        // When the address is back, another device can use it.
        let config = RoceConfig::new(V4[0].parse().unwrap());
        assert!(Roce::open(&config).is_err());
        sh("ip link add v0 type veth peer name v1").unwrap();
        sh("ip addr add 10.9.0.1/24 dev v0").unwrap();
        sh("ip link set v0 up").unwrap();
        sh("ip link set v1 up").unwrap();
        let mut back = Roce::open(&config).unwrap();
        w.until("an active port", |_| {
            back.progress(Instant::now());
            let port = back.query_port(1).unwrap();
            (port.state == PortState::Active).then_some(())
        });
        assert!(w.a.is_removed());
    });
}

#[test]
fn address_is_followed_between_interfaces() {
    let test = "address_is_followed_between_interfaces";
    on_a_link(
        test,
        V6,
        |_| {},
        |w| {
            let mut watch = AddressWatch::open("fd09::77".parse().unwrap()).unwrap();
            let mut after = |w: &mut Link, command: &str, expected| {
                sh(command).unwrap();
                w.until(&format!("{expected:?} after {command}"), |_| {
                    watch.follow();
                    (watch.state() == expected).then_some(())
                });
            };
            after(w, "ip link add w0 type veth peer name w1", AddressState::Up);
            after(
                w,
                "ip addr add fd09::77/64 dev w0 nodad",
                AddressState::Down,
            );
            after(w, "ip addr add fd09::77/64 dev v0 nodad", AddressState::Up);
            after(w, "ip link del w0", AddressState::Up);
            after(w, "ip addr del fd09::77/64 dev v0", AddressState::Absent);
            after(w, "ip link del v0", AddressState::Gone);
        },
    );
}
