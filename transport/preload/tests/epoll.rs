//! `epoll` with rsockets.

#![allow(unsafe_code, reason = "calls of the C library are made")]

use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::mem::zeroed;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

mod preloaded;

use preloaded::*;

/// Waits for events of an `epoll` descriptor.
fn wait(epoll: c_int, ms: c_int) -> Vec<(u32, u64)> {
    // SAFETY: all-zero bytes are valid, and there is room for as many.
    unsafe {
        let mut events: [libc::epoll_event; 8] = zeroed();
        let n = libc::epoll_wait(epoll, events.as_mut_ptr(), 8, ms);
        assert!(n >= 0, "{}", io::Error::last_os_error());
        let all = events[..n as usize].iter();
        all.map(|event| (event.events, event.u64)).collect()
    }
}

fn control(epoll: c_int, op: c_int, fd: c_int, events: c_int, data: u64) -> c_int {
    let mut event = libc::epoll_event {
        events: events as u32,
        u64: data,
    };
    // SAFETY: the event is alive.
    match unsafe { libc::epoll_ctl(epoll, op, fd, &raw mut event) } {
        0 => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap(),
    }
}

#[test]
fn epoll() {
    if !is_preloaded("epoll", &[]) {
        return;
    }
    let (_listener, mut client, mut server) = pair();
    // SAFETY: the calls may be made at any time.
    let (epoll, eventfd) = unsafe { (libc::epoll_create1(0), libc::eventfd(0, 0)) };
    let fd = server.as_raw_fd();
    let level = libc::EPOLLIN;
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_MOD, fd, level, 0),
        libc::ENOENT
    );
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, level, 7), 0);
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_ADD, fd, level, 7),
        libc::EEXIST
    );
    assert_eq!(
        control(eventfd, libc::EPOLL_CTL_ADD, fd, level, 7),
        libc::EINVAL
    );
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, eventfd, level, 8), 0);
    assert_eq!(wait(epoll, 20), []);
    client.write_all(b"ab").unwrap();
    let readable = (libc::EPOLLIN as u32, 7);
    assert_eq!(wait(epoll, 5000), [readable]);
    assert_eq!(
        wait(epoll, 5000),
        [readable],
        "as long as there is something"
    );
    let one = 1_u64;
    // SAFETY: the number is alive.
    unsafe { libc::write(eventfd, (&raw const one).cast(), 8) };
    let mut both = wait(epoll, 5000);
    both.sort_unstable();
    assert_eq!(both, [readable, (libc::EPOLLIN as u32, 8)]);
    assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, eventfd, 0, 0), 0);

    let edge = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET;
    assert_eq!(control(epoll, libc::EPOLL_CTL_MOD, fd, edge, 9), 0);
    assert_eq!(
        wait(epoll, 5000),
        [((libc::EPOLLIN | libc::EPOLLOUT) as u32, 9)]
    );
    assert_eq!(wait(epoll, 20), [], "it was reported");
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 1);
    assert_eq!(
        wait(epoll, 5000),
        [(libc::EPOLLIN as u32, 9)],
        "more is there"
    );
    assert_eq!(server.read(&mut [0; 10]).unwrap(), 1);
    // A thread that waits hears of what another one makes possible.
    let waiter = thread::spawn(move || wait(epoll, 5000));
    thread::sleep(Duration::from_millis(50));
    client.write_all(b"c").unwrap();
    assert_eq!(waiter.join().unwrap(), [(libc::EPOLLIN as u32, 9)]);

    let once = libc::EPOLLIN | libc::EPOLLONESHOT;
    assert_eq!(control(epoll, libc::EPOLL_CTL_MOD, fd, once, 1), 0);
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLIN as u32, 1)]);
    assert_eq!(wait(epoll, 20), []);
    assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, fd, 0, 0), 0);
    assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, fd, 0, 0), libc::ENOENT);
    // One that is closed is in no set.
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, level, 7), 0);
    drop(server);
    assert_eq!(wait(epoll, 20), []);
}
