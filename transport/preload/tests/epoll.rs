//! Sets of `epoll` with rsockets, in programs that fork, copy and close descriptors and handle signals.

#![allow(unsafe_code, reason = "calls of the C library are made")]

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io::{self, Read, Write};
use std::mem::zeroed;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

mod preloaded;

use preloaded::*;
use riser_testkit::eventually;

/// Has sockets connect by TCP first.
const FORK_SAFE: (&str, &str) = ("RDMAV_FORK_SAFE", "1");

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

/// Starts a thread that waits for events, and waits until it does.
fn start_waiter(epoll: c_int) -> thread::JoinHandle<Vec<(u32, u64)>> {
    let (send, receive) = mpsc::channel();
    let waiter = thread::spawn(move || {
        // SAFETY: the call cannot fail.
        send.send(unsafe { libc::gettid() }).unwrap();
        wait(epoll, 20_000)
    });
    let stat = format!("/proc/self/task/{}/stat", receive.recv().unwrap());
    eventually("the thread sleeps", Duration::from_secs(20), || {
        // The state is behind the name, which is in brackets.
        let stat = fs::read_to_string(&stat).unwrap();
        stat.rsplit(')').next().unwrap().starts_with(" S")
    });
    waiter
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
    let waiter = start_waiter(epoll);
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

#[test]
fn a_first_rsocket_while_a_thread_waits_for_files() {
    if !is_preloaded("a_first_rsocket_while_a_thread_waits_for_files", &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    // SAFETY: the calls may be made at any time.
    let (epoll, eventfd) = unsafe { (libc::epoll_create1(0), libc::eventfd(0, 0)) };
    let add = |fd, data| control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, data);
    assert_eq!(add(eventfd, 8), 0);
    let waiter = start_waiter(epoll);
    assert_eq!(add(server.as_raw_fd(), 7), 0);
    client.write_all(b"x").unwrap();
    assert_eq!(waiter.join().unwrap(), [(libc::EPOLLIN as u32, 7)]);
}

/// Makes rsockets of two sockets that have waited for their use. Answers the client's.
fn settle((mut client, mut server): (TcpStream, &TcpStream)) -> TcpStream {
    let reader = thread::spawn(move || {
        client.read_exact(&mut [0]).unwrap();
        client
    });
    server.write_all(b"x").unwrap();
    assert!(!has_tcp(server.peer_addr().unwrap().port()), "by RDMA");
    reader.join().unwrap()
}

#[test]
fn sockets_that_are_reported_once_and_become_rsockets() {
    if !is_preloaded(
        "sockets_that_are_reported_once_and_become_rsockets",
        &[FORK_SAFE],
    ) {
        return;
    }
    let (_listener, client, server) = pair();
    // SAFETY: the calls may be made at any time.
    let (epoll, eventfd) = unsafe { (libc::epoll_create1(0), libc::eventfd(1, 0)) };
    let fd = server.as_raw_fd();
    let once = libc::EPOLLOUT | libc::EPOLLONESHOT;
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, once, 7), 0);
    let writable = (libc::EPOLLOUT as u32, 7);
    assert_eq!(wait(epoll, 5000), [writable]);
    let _client = settle((client, &server));
    // What is readable at all times has the wait end at once.
    let file = (libc::EPOLLIN as u32, 8);
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_ADD, eventfd, libc::EPOLLIN, 8),
        0
    );
    assert_eq!(wait(epoll, 5000), [file], "it was reported");
    assert_eq!(control(epoll, libc::EPOLL_CTL_MOD, fd, once, 9), 0);
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLOUT as u32, 9), file]);

    // One that has had no event is still to be reported.
    let (_listener, client, server) = pair();
    let once = libc::EPOLLIN | libc::EPOLLONESHOT;
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_ADD, server.as_raw_fd(), once, 5),
        0
    );
    let mut client = settle((client, &server));
    client.write_all(b"x").unwrap();
    assert!(is_readable(server.as_raw_fd(), 5000));
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLIN as u32, 5), file]);
}

#[test]
fn sets_that_change_while_a_socket_becomes_an_rsocket() {
    if !is_preloaded(
        "sets_that_change_while_a_socket_becomes_an_rsocket",
        &[FORK_SAFE],
    ) {
        return;
    }
    for _ in 0..20 {
        let (_listener, client, server) = pair();
        // SAFETY: the call may be made at any time.
        let epoll = unsafe { libc::epoll_create1(0) };
        let fd = server.as_raw_fd();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let changes = scope.spawn(|| {
                let call = |op| assert_eq!(control(epoll, op, fd, libc::EPOLLOUT, 7), 0, "{op}");
                while !is_over.load(Ordering::Relaxed) {
                    call(libc::EPOLL_CTL_ADD);
                    call(libc::EPOLL_CTL_MOD);
                    call(libc::EPOLL_CTL_DEL);
                }
                call(libc::EPOLL_CTL_ADD);
            });
            let _client = settle((client, &server));
            is_over.store(true, Ordering::Relaxed);
            changes.join().unwrap();
            assert_eq!(wait(epoll, 5000), [(libc::EPOLLOUT as u32, 7)]);
        });
        // SAFETY: the descriptor is the test's.
        unsafe { libc::close(epoll) };
    }
}

#[test]
fn sets_without_a_descriptor_for_their_own() {
    if !is_preloaded("sets_without_a_descriptor_for_their_own", &[FORK_SAFE]) {
        return;
    }
    let (_listener, _client, server) = pair();
    let fd = server.as_raw_fd();
    // SAFETY: the limit is alive; the descriptors are the test's.
    unsafe {
        let epoll = libc::epoll_create1(0);
        let limit = libc::rlimit {
            rlim_cur: 100,
            rlim_max: 100,
        };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        let mut last = -1;
        while let copy @ 0.. = libc::dup(0) {
            last = copy;
        }
        let add = || control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLOUT, 7);
        assert_eq!(add(), libc::EMFILE);
        libc::close(last);
        assert_eq!(add(), 0, "it is in no set");
        assert_eq!(wait(epoll, 5000), [(libc::EPOLLOUT as u32, 7)]);
    }
}

/// A set with a socket that is readable.
fn readable_set(socket: c_int, data: u64) -> c_int {
    // SAFETY: the call may be made at any time.
    let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert_eq!(
        control(epoll, libc::EPOLL_CTL_ADD, socket, libc::EPOLLIN, data),
        0
    );
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLIN as u32, data)]);
    epoll
}

/// Descriptors of this process that are an `eventfd`.
fn eventfds() -> Vec<c_int> {
    let all = fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap);
    let is_eventfd = |path: PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("[eventfd]"))
    };
    let ours = all.filter(|entry| is_eventfd(entry.path()));
    ours.map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
        .collect()
}

/// The descriptor that a set has of its own, and what it was made by.
fn with_bell<T>(make: impl FnOnce() -> T) -> (T, c_int) {
    let before = eventfds();
    let made = make();
    let new: Vec<c_int> = eventfds()
        .into_iter()
        .filter(|fd| !before.contains(fd))
        .collect();
    assert_eq!(new.len(), 1, "{new:?}");
    (made, new[0])
}

#[test]
fn sets_whose_numbers_others_get() {
    if !is_preloaded("sets_whose_numbers_others_get", &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    client.write_all(b"x").unwrap();
    let fd = server.as_raw_fd();
    let before = eventfds();
    // SAFETY: the descriptors are the test's.
    unsafe {
        let first = readable_set(fd, 7);
        let other = libc::epoll_create1(0);
        assert_eq!(libc::dup2(other, first), first);
        assert_eq!(wait(first, 20), [], "it is another set");
        assert_eq!(eventfds(), before);

        let second = readable_set(fd, 8);
        assert_eq!(libc::dup3(other, second, libc::O_CLOEXEC), second);
        assert_eq!(wait(second, 20), [], "it is another set");

        let third = readable_set(fd, 9);
        assert_eq!(libc::close_range(third as u32, third as u32, 0), 0);
        assert_eq!(libc::epoll_create1(0), third);
        assert_eq!(wait(third, 20), [], "it is another set");
        assert_eq!(eventfds(), before);

        // One that is not closed stays.
        let fourth = readable_set(fd, 10);
        let flags = libc::CLOSE_RANGE_CLOEXEC as c_int;
        assert_eq!(libc::close_range(fourth as u32, fourth as u32, flags), 0);
        assert_eq!(libc::dup2(-1, fourth), -1);
        assert_eq!(libc::dup2(fourth, fourth), fourth);
        assert_eq!(wait(fourth, 5000), [(libc::EPOLLIN as u32, 10)]);
    }
}

#[test]
fn descriptors_that_sets_have_of_their_own() {
    if !is_preloaded("descriptors_that_sets_have_of_their_own", &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    client.write_all(b"x").unwrap();
    let fd = server.as_raw_fd();
    let path = env::temp_dir().join(format!("riser-preload-bell-{}", std::process::id()));
    let file = fs::File::create(&path).unwrap();
    let length = || fs::metadata(&path).unwrap().len();
    let is_open = |fd: c_int| {
        // SAFETY: the call takes any number.
        unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
    };
    // A waiter is woken, so the set has what it needs for that.
    let is_whole = |epoll: c_int| {
        assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, fd, 0, 0), 0);
        let waiter = start_waiter(epoll);
        assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, 3), 0);
        assert_eq!(waiter.join().unwrap(), [(libc::EPOLLIN as u32, 3)]);
    };
    // SAFETY: the descriptors are the test's, or those that a program closes that closes all.
    unsafe {
        // A program that closes all descriptors closes one that it does not know of.
        let (epoll, bell) = with_bell(|| readable_set(fd, 7));
        assert_eq!(libc::close(bell), -1);
        is_whole(epoll);
        assert_eq!(libc::close_range(bell as u32, bell as u32, 0), 0);
        let taken = libc::dup(file.as_raw_fd());
        is_whole(epoll);
        assert_eq!(length(), 0, "nothing is written to another file");
        assert_eq!(libc::close(epoll), 0);
        assert!(is_open(taken));

        // A program chooses the number of that for a file.
        let (epoll, bell) = with_bell(|| readable_set(fd, 7));
        assert_eq!(libc::dup2(file.as_raw_fd(), bell), bell);
        is_whole(epoll);
        assert_eq!(length(), 0, "nothing is written to another file");
        assert_eq!(libc::close(epoll), 0);
        assert!(is_open(bell), "nor is it closed");
        libc::close(bell);

        // Both are closed at once, and their numbers are given to files. No other is between them.
        while libc::dup(0) < 200 {}
        let (epoll, bell) = with_bell(|| readable_set(fd, 7));
        let (low, high) = (epoll.min(bell), epoll.max(bell));
        assert_eq!(high, low + 1);
        assert_eq!(libc::close_range(low as u32, high as u32, 0), 0);
        let files = [0; 2].map(|_| libc::dup(file.as_raw_fd()));
        assert_eq!(files, [low, high]);
        readable_set(fd, 8);
        assert!(files.iter().all(|fd| is_open(*fd)));
        assert_eq!(length(), 0);
        assert_eq!(files.map(|fd| libc::close(fd)), [0, 0]);
    }
    let _ = fs::remove_file(&path);
}

#[test]
fn children_that_close_all_descriptors() {
    if !is_preloaded("children_that_close_all_descriptors", &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    // SAFETY: the call may be made at any time.
    let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    let fd = server.as_raw_fd();
    let add = || control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, 7);
    let (added, bell) = with_bell(add);
    assert_eq!((added, wait(epoll, 20)), (0, vec![]));
    let [mut down, mut up] = [[0; 2]; 2];
    // SAFETY: there is room for both ends. The child makes calls only that may be made there.
    let child = unsafe {
        assert_eq!(libc::pipe(down.as_mut_ptr()), 0);
        assert_eq!(libc::pipe(up.as_mut_ptr()), 0);
        let child = libc::fork();
        if child == 0 {
            let mut byte = [0_u8];
            libc::close_range(bell as u32, bell as u32, 0);
            libc::write(up[1], byte.as_ptr().cast(), 1);
            libc::read(down[0], byte.as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
        child
    };
    // The set of the kernel is the parent's as well, and has no event because of that.
    assert!(is_readable(up[0], 20_000));
    assert!(!is_readable(epoll, 20));
    client.write_all(b"x").unwrap();
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLIN as u32, 7)]);
    // SAFETY: the child is this process's, and there is a byte for it.
    unsafe {
        libc::write(down[1], [0_u8].as_ptr().cast(), 1);
        assert_eq!(libc::waitpid(child, ptr::null_mut(), 0), child);
    }
}

/// Keeps the lists of sets busy with a socket that is not readable, until it is to stop.
fn use_sets(socket: c_int, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        // SAFETY: there is room for a byte.
        unsafe { libc::recv(socket, [0_u8].as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) };
    }
}

/// Sets that all have a socket, so that a call with it takes long in their lists.
fn many_sets(socket: c_int) -> Vec<c_int> {
    let make = |_| {
        // SAFETY: the call may be made at any time.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        assert_eq!(
            control(epoll, libc::EPOLL_CTL_ADD, socket, libc::EPOLLIN, 1),
            0
        );
        epoll
    };
    (0..100).map(make).collect()
}

#[test]
fn children_of_threaded_programs() {
    if !is_preloaded("children_of_threaded_programs", &[]) {
        return;
    }
    let (_listener, _client, server) = pair();
    let fd = server.as_raw_fd();
    let sets = many_sets(fd);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| use_sets(fd, &is_over));
        for n in 0..100 {
            // SAFETY: the child makes calls only that may be made there.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    // A file, and in every second child a set.
                    libc::close(0);
                    if n % 2 == 0 {
                        libc::close(sets[0]);
                    }
                    libc::_exit(0);
                }
                let until = Instant::now() + Duration::from_secs(10);
                while libc::waitpid(child, ptr::null_mut(), libc::WNOHANG) == 0 {
                    if Instant::now() > until {
                        libc::kill(child, libc::SIGKILL);
                        is_over.store(true, Ordering::Relaxed);
                        panic!("child {n} hangs");
                    }
                    thread::sleep(Duration::from_micros(200));
                }
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn handlers_of_signals() {
    extern "C" fn close_a_file(_: c_int) {
        // SAFETY: the calls may be made in a handler, and the copy is the handler's.
        unsafe { libc::close(libc::dup(0)) };
    }
    if !is_preloaded("handlers_of_signals", &[]) {
        return;
    }
    let (_listener, _client, server) = pair();
    let fd = server.as_raw_fd();
    let _sets = many_sets(fd);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // SAFETY: the handler makes calls only that may be made there.
        unsafe {
            let handler = close_a_file as extern "C" fn(c_int);
            libc::signal(libc::SIGUSR1, handler as libc::sighandler_t);
        }
        let (send, receive) = mpsc::channel();
        let user = scope.spawn({
            let is_over = &is_over;
            move || {
                // SAFETY: the call cannot fail.
                send.send(unsafe { libc::pthread_self() }).unwrap();
                use_sets(fd, is_over);
            }
        });
        let thread = receive.recv().unwrap();
        for _ in 0..500 {
            // SAFETY: the thread runs until it is to stop.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            thread::sleep(Duration::from_micros(500));
        }
        is_over.store(true, Ordering::Relaxed);
        let until = Instant::now() + Duration::from_secs(10);
        while !user.is_finished() {
            assert!(Instant::now() < until, "the thread hangs in its handler");
            thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Time of the processor that this thread has used.
fn used() -> Duration {
    // SAFETY: all-zero bytes are valid, and the call fills them.
    let time = unsafe {
        let mut time: libc::timespec = zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_copy_of_a_set_waits_without_work() {
    if !is_preloaded("a_copy_of_a_set_waits_without_work", &[]) {
        return;
    }
    let (_listener, _client, server) = pair();
    // SAFETY: the calls may be made at any time.
    let (epoll, copy) = unsafe {
        let epoll = libc::epoll_create1(0);
        (epoll, libc::dup(epoll))
    };
    let added = control(
        epoll,
        libc::EPOLL_CTL_ADD,
        server.as_raw_fd(),
        libc::EPOLLIN,
        7,
    );
    assert_eq!(added, 0);
    let before = used();
    assert_eq!(wait(copy, 3000), []);
    assert!(used() - before < Duration::from_millis(600));
}

#[test]
fn copies_of_a_set() {
    if !is_preloaded("copies_of_a_set", &[]) {
        return;
    }
    let (_listener, mut first, server) = pair();
    let (_other_listener, mut second, other_server) = pair();
    let (one, two) = (server.as_raw_fd(), other_server.as_raw_fd());
    // SAFETY: the calls may be made at any time.
    let (set, copy, last) = unsafe {
        let set = libc::epoll_create1(0);
        let copy = libc::fcntl(set, libc::F_DUPFD_CLOEXEC, 0);
        (set, copy, libc::dup(copy))
    };
    let (_third_listener, mut third, third_server) = pair();
    third.write_all(b"x").unwrap();
    let other = readable_set(third_server.as_raw_fd(), 5);
    assert_eq!(wait(last, 20), [], "it has no rsocket");
    let add = |set, fd, data| control(set, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, data);
    let ((), bell) = with_bell(|| {
        assert_eq!(add(set, one, 1), 0);
        assert_eq!(add(copy, one, 1), libc::EEXIST);
        assert_eq!(add(copy, two, 2), 0);
    });
    assert_eq!(wait(last, 20), []);
    let waiter = start_waiter(last);
    second.write_all(b"x").unwrap();
    assert_eq!(waiter.join().unwrap(), [(libc::EPOLLIN as u32, 2)]);
    first.write_all(b"x").unwrap();
    assert!(is_readable(one, 5000));
    for set in [set, copy, last] {
        let mut both = wait(set, 5000);
        both.sort_unstable();
        assert_eq!(both, [1, 2].map(|data| (libc::EPOLLIN as u32, data)));
    }
    assert_eq!(control(last, libc::EPOLL_CTL_DEL, two, 0, 0), 0);
    assert_eq!(control(set, libc::EPOLL_CTL_MOD, two, 0, 0), libc::ENOENT);
    // Another set has no part in that, and that goes on with each copy.
    assert_eq!(wait(other, 20), [(libc::EPOLLIN as u32, 5)]);
    // SAFETY: the descriptors are the test's.
    unsafe {
        for fd in [set, copy] {
            assert_eq!(libc::close(fd), 0);
        }
        assert_eq!(wait(last, 5000), [(libc::EPOLLIN as u32, 1)]);
        let new = libc::dup2(last, set);
        assert_eq!(libc::close(last), 0);
        assert_eq!(wait(new, 5000), [(libc::EPOLLIN as u32, 1)]);
        // The number of a copy is another set's.
        assert_eq!(libc::epoll_create1(0), copy);
        assert_eq!(wait(copy, 20), []);
        assert_eq!(libc::close(new), 0);
        assert_eq!(libc::fcntl(bell, libc::F_GETFD), -1, "all are closed");
    }
}

#[test]
fn a_set_whose_first_descriptor_is_closed_before_its_copy_is_used() {
    const TEST: &str = "a_set_whose_first_descriptor_is_closed_before_its_copy_is_used";
    if !is_preloaded(TEST, &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    let fd = server.as_raw_fd();
    // Closed, as event loops close a clone of their registry, and replaced.
    // SAFETY: the descriptors are the test's.
    let sets = [true, false].map(|is_closed| unsafe {
        let epoll = libc::epoll_create1(0);
        let copy = libc::fcntl(epoll, libc::F_DUPFD_CLOEXEC, 0);
        let ((), bell) = with_bell(|| {
            let added = control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, 7);
            assert_eq!(added, 0);
        });
        let result = match is_closed {
            true => libc::close(epoll),
            false => libc::dup2(copy, epoll) - epoll,
        };
        assert_eq!(result, 0);
        (copy, epoll, bell)
    });
    client.write_all(b"x").unwrap();
    let [(first, _, first_bell), (second, new, second_bell)] = sets;
    for set in [first, second, new] {
        assert_eq!(wait(set, 5000), [(libc::EPOLLIN as u32, 7)]);
        let changed = control(set, libc::EPOLL_CTL_MOD, fd, libc::EPOLLIN, 7);
        assert_eq!(changed, 0);
    }
    // SAFETY: as above.
    unsafe {
        for set in [first, second, new] {
            assert_eq!(libc::close(set), 0);
        }
        for bell in [first_bell, second_bell] {
            assert_eq!(libc::fcntl(bell, libc::F_GETFD), -1, "all are closed");
        }
    }
}

#[test]
fn two_threads_that_wait_for_a_set_that_changes() {
    if !is_preloaded("two_threads_that_wait_for_a_set_that_changes", &[]) {
        return;
    }
    let [silent, mut first, mut second] = [(); 3].map(|()| pair());
    let fds = [&silent, &first, &second].map(|(_, _, server)| server.as_raw_fd());
    // SAFETY: the call may be made at any time.
    let epoll = unsafe { libc::epoll_create1(0) };
    let add = |n: usize| {
        control(
            epoll,
            libc::EPOLL_CTL_ADD,
            fds[n],
            libc::EPOLLIN | libc::EPOLLET,
            n as u64,
        )
    };
    assert_eq!(add(0), 0);
    for _ in 0..30 {
        let waiters = [(); 2].map(|()| start_waiter(epoll));
        assert_eq!([1, 2].map(add), [0, 0]);
        // One of them has the first, and the other one the second.
        let mut came = Vec::new();
        for (at, (_, client, _)) in [&mut first, &mut second].into_iter().enumerate() {
            client.write_all(b"x").unwrap();
            eventually("it is reported", Duration::from_secs(10), || {
                waiters.iter().filter(|waiter| waiter.is_finished()).count() > at
            });
        }
        for waiter in waiters {
            came.extend(waiter.join().unwrap());
        }
        came.sort_unstable();
        assert_eq!(came, [1, 2].map(|data| (libc::EPOLLIN as u32, data)));
        for fd in [fds[1], fds[2]] {
            // SAFETY: there is room for a byte.
            let n = unsafe { libc::read(fd, [0_u8].as_mut_ptr().cast(), 1) };
            assert_eq!(n, 1);
            assert_eq!(control(epoll, libc::EPOLL_CTL_DEL, fd, 0, 0), 0);
        }
    }
}

#[test]
fn a_first_rsocket_by_a_copy_while_a_thread_waits_for_files() {
    const TEST: &str = "a_first_rsocket_by_a_copy_while_a_thread_waits_for_files";
    if !is_preloaded(TEST, &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    // SAFETY: the calls may be made at any time.
    let (epoll, copy) = unsafe {
        let epoll = libc::epoll_create1(0);
        (epoll, libc::dup(epoll))
    };
    let waiter = start_waiter(epoll);
    let fd = server.as_raw_fd();
    assert_eq!(control(copy, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, 7), 0);
    client.write_all(b"x").unwrap();
    assert_eq!(waiter.join().unwrap(), [(libc::EPOLLIN as u32, 7)]);
}

#[test]
fn a_set_that_has_the_bells_of_two_processes() {
    if !is_preloaded("a_set_that_has_the_bells_of_two_processes", &[]) {
        return;
    }
    let (_listener, mut client, server) = pair();
    let fd = server.as_raw_fd();
    let (mut down, mut up) = ([0; 2], [0; 2]);
    // SAFETY: there is room for the ends of pipes; the child ends without the harness.
    let (epoll, child) = unsafe {
        let epoll = libc::epoll_create1(0);
        assert_eq!(libc::pipe(down.as_mut_ptr()), 0);
        assert_eq!(libc::pipe(up.as_mut_ptr()), 0);
        let child = libc::fork();
        if child == 0 {
            libc::alarm(60);
            // The child has the set with the kernel's part of its parent's.
            let added = control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, 9);
            libc::write(up[1], (&raw const added).cast(), 1);
            libc::read(down[0], [0_u8].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
        (epoll, child)
    };
    assert!(is_readable(up[0], 20_000));
    let mut added = [1_u8];
    // SAFETY: there is room for a byte.
    let n = unsafe { libc::read(up[0], added.as_mut_ptr().cast(), 1) };
    assert_eq!(n, 1);
    assert_eq!(added, [0]);
    assert_eq!(control(epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, 7), 0);
    assert_eq!(wait(epoll, 20), [], "neither of the bells is an event");
    let before = used();
    assert_eq!(wait(epoll, 3000), []);
    assert!(used() - before < Duration::from_millis(600));
    client.write_all(b"x").unwrap();
    assert_eq!(wait(epoll, 5000), [(libc::EPOLLIN as u32, 7)]);
    // SAFETY: the child is this process's, and there is a byte for it.
    unsafe {
        libc::write(down[1], [0_u8].as_ptr().cast(), 1);
        assert_eq!(libc::waitpid(child, ptr::null_mut(), 0), child);
    }
}
