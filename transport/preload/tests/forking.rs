//! Servers that fork for each connection, and their clients.

#![allow(unsafe_code, reason = "calls of the C library are made")]

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::process::Child;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

mod preloaded;

use preloaded::*;
use riser_testkit::eventually;

/// Has sockets connect by TCP first.
const FORK_SAFE: (&str, &str) = ("RDMAV_FORK_SAFE", "1");

/// Has a server wait for its client for longer than a test may take, so it is waiting when the test goes on.
const PATIENT: (&str, &str) = ("RISER_RSOCKET_PATIENCE", "120000");

/// The host that plain TCP connections come from.
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 45, 7);

/// Reads a word, and says how it came.
fn answer(mut stream: TcpStream) {
    let mut text = [0; 5];
    if stream.read_exact(&mut text).is_ok() {
        assert_eq!(&text, b"hello");
        let is_tcp = has_tcp(stream.peer_addr().unwrap().port());
        let _ = stream.write_all(if is_tcp { b"by TCP" } else { b"by RDMA" });
    }
}

/// Accepts connections without end, each of which has a process of its own.
fn serve(listener: &TcpListener) {
    // SAFETY: the children end without the harness; no other thread uses the library here.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        loop {
            let (stream, _) = listener.accept().unwrap();
            if libc::fork() == 0 {
                libc::alarm(60);
                answer(stream);
                libc::_exit(0);
            }
        }
    }
}

/// Says a word to a server, and answers what it answers.
fn ask(mut stream: TcpStream) -> String {
    let mut text = String::new();
    // A server that closes the connection may do so before all has come.
    if stream.write_all(b"hello").is_ok() {
        let _ = stream.read_to_string(&mut text);
    }
    text
}

/// Waits for the first bytes of a server that is ready for an rsocket.
fn await_ready(stream: &mut TcpStream) {
    let mut ready = [1; 4];
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.read_exact(&mut ready).unwrap();
    assert_eq!(ready, [0; 4]);
}

/// Ends a server.
fn end(mut server: Child) {
    server.kill().unwrap();
    server.wait().unwrap();
}

/// Waits for a server that listens by TCP.
fn await_server(port: u16) {
    // Without a connection, which would be a client.
    eventually("the server listens", Duration::from_secs(20), || {
        has_tcp(port)
    });
}

#[test]
fn servers_that_fork() {
    if !is_preloaded("servers_that_fork", &[("RDMAV_FORK_SAFE", "1")]) {
        return;
    }
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    // The server is a process of its own, which has no device before it forks.
    // SAFETY: no other thread runs yet, so the child may do all.
    let server = unsafe { libc::fork() };
    if server == 0 {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            // SAFETY: as above.
            if unsafe { libc::fork() } == 0 {
                let mut text = [0; 5];
                stream.read_exact(&mut text).unwrap();
                let is_tcp = has_tcp(stream.peer_addr().unwrap().port());
                stream
                    .write_all(if is_tcp { b"by TCP" } else { b"by RDMA" })
                    .unwrap();
                drop(stream);
                // SAFETY: the child ends without the harness.
                unsafe { libc::_exit(0) };
            }
        }
        // SAFETY: as above; the statuses are not asked for.
        unsafe {
            while libc::wait(ptr::null_mut()) > 0 {}
            libc::_exit(0);
        }
    }
    drop(listener);
    let clients = [0, 1].map(|_| {
        thread::spawn(move || {
            let mut stream = TcpStream::connect(addr).unwrap();
            stream.write_all(b"hello").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        })
    });
    for client in clients {
        assert_eq!(client.join().unwrap(), "by RDMA");
    }
    // SAFETY: the child is this process's.
    assert_eq!(unsafe { libc::waitpid(server, ptr::null_mut(), 0) }, server);
}

#[test]
fn clients_that_stay_silent() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            return serve(&TcpListener::bind((ADDR, port)).unwrap());
        }
        wait_for_word();
        assert_eq!(ask(TcpStream::connect((ADDR, port)).unwrap()), "by RDMA");
        return;
    }
    const TEST: &str = "clients_that_stay_silent";
    let links = Links::new(TEST);
    let ports = [(); 2].map(|()| free_port().to_string());
    let patience = ("RISER_RSOCKET_PATIENCE", "10000");
    let servers = ports.each_ref().map(|port| {
        let variables = [FORK_SAFE, patience, ("PORT", port), ("SERVER", "1")];
        links.start(TEST, ADDR, &variables)
    });
    let mut clients = ports
        .each_ref()
        .map(|port| links.start(TEST, "127.0.45.2", &[FORK_SAFE, ("PORT", port)]));
    let numbers = ports.each_ref().map(|port| port.parse::<u16>().unwrap());
    numbers.into_iter().for_each(await_server);
    // They connect to the first server by TCP, and do not go on.
    let mut first = connect_from(CLIENT, numbers[0]).unwrap();
    await_ready(&mut first);
    let silent = [(); 5].map(|()| connect_from(CLIENT, numbers[0]).unwrap());
    // Those of the other port first.
    clients.reverse();
    for mut client in clients {
        go_on(&mut client);
        finish(client);
    }
    // The last of those that are silent has its turn after twenty seconds.
    let is_ready = |stream: &&TcpStream| {
        stream.set_nonblocking(true).unwrap();
        stream.peek(&mut [0]).is_ok()
    };
    assert!(silent.iter().filter(is_ready).count() < silent.len());
    drop((first, silent));
    servers.into_iter().for_each(end);
}

#[test]
fn strangers_in_the_place_of_a_client() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            return serve(&TcpListener::bind((ADDR, port)).unwrap());
        }
        // Its device is there when its time begins.
        let devices = env::var("RISER_DEVICES").unwrap();
        let (_, own) = devices.split_once('=').unwrap();
        let _listener = TcpListener::bind((own, 0)).unwrap();
        wait_for_word();
        // The rsocket alone, without TCP before it.
        let said = TcpStream::connect((ADDR, port))
            .map(ask)
            .unwrap_or_default();
        assert_eq!(said, env::var("ANSWER").unwrap());
        return;
    }
    const TEST: &str = "strangers_in_the_place_of_a_client";
    let links = Links::new(TEST);
    let number = free_port();
    let port = &*number.to_string();
    let variables = [FORK_SAFE, PATIENT, ("PORT", port), ("SERVER", "1")];
    let server = links.start(TEST, ADDR, &variables);
    let mut stranger = links.start(TEST, "127.0.45.2", &[("PORT", port), ("ANSWER", "")]);
    let client_addr = CLIENT.to_string();
    let mut client = links.start(TEST, &client_addr, &[("PORT", port), ("ANSWER", "by RDMA")]);
    await_server(number);
    let mut tcp = connect_from(CLIENT, number).unwrap();
    await_ready(&mut tcp);
    go_on(&mut stranger);
    finish(stranger);
    go_on(&mut client);
    finish(client);
    drop(tcp);
    end(server);
}

#[test]
fn clients_without_rsockets() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let listener = TcpListener::bind((ADDR, port)).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert!(is_readable(stream.as_raw_fd(), 20_000));
        return answer(stream);
    }
    const TEST: &str = "clients_without_rsockets";
    let links = Links::new(TEST);
    let port = free_port();
    let server = links.start(TEST, ADDR, &[FORK_SAFE, ("PORT", &port.to_string())]);
    assert_eq!(ask(connect_to_server(CLIENT, port)), "by TCP");
    finish(server);
}

#[test]
fn servers_that_cannot_be_reached_by_rdma() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        assert_eq!(ask(TcpStream::connect((ADDR, port)).unwrap()), "welcome");
        return;
    }
    const TEST: &str = "servers_that_cannot_be_reached_by_rdma";
    let links = Links::new(TEST);
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let addr: SocketAddr = listener.local_addr().unwrap();
    let port = addr.port().to_string();
    // The device refuses: nothing listens at its port.
    let client = links.start(TEST, ADDR, &[FORK_SAFE, ("PORT", &port)]);
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&[0; 4]).unwrap();
    let mut text = [0; 5];
    stream.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello");
    stream.write_all(b"welcome").unwrap();
    drop(stream);
    finish(client);
}

#[test]
fn clients_whose_device_has_another_address() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            return serve(&TcpListener::bind((ADDR, port)).unwrap());
        }
        assert_eq!(
            ask(connect_to_server(CLIENT, port)),
            env::var("ANSWER").unwrap()
        );
        return;
    }
    const TEST: &str = "clients_whose_device_has_another_address";
    let links = Links::new(TEST);
    let port = &*free_port().to_string();
    let server = links.start(TEST, ADDR, &[FORK_SAFE, ("PORT", port), ("SERVER", "1")]);
    for (addr, answer) in [("127.0.45.2", "by TCP"), (&CLIENT.to_string(), "by RDMA")] {
        finish(links.start(TEST, addr, &[FORK_SAFE, ("PORT", port), ("ANSWER", answer)]));
    }
    end(server);
}

#[test]
fn servers_that_say_little_by_tcp() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let mut stream = TcpStream::connect((ADDR, port)).unwrap();
        let mut text = [0; 3];
        stream.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"OK\n");
        assert_eq!(ask(stream), "welcome");
        return;
    }
    const TEST: &str = "servers_that_say_little_by_tcp";
    let links = Links::new(TEST);
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let client = links.start(TEST, ADDR, &[FORK_SAFE, ("PORT", &port)]);
    let (mut stream, _) = listener.accept().unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    stream.write_all(b"OK\n").unwrap();
    let mut text = [0; 5];
    let read = stream.read_exact(&mut text);
    stream.write_all(b"welcome").unwrap();
    drop(stream);
    finish(client);
    read.unwrap();
    assert_eq!(&text, b"hello");
}

/// Closes a socket while a thread waits for its client, and gives its number to another file.
fn close_while_it_waits(test: &str, close: impl FnOnce(c_int) -> c_int) {
    let file_of = |process| env::temp_dir().join(format!("riser-preload-closed-{process}"));
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let listener = TcpListener::bind((ADDR, port)).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let path = file_of(std::process::id());
        fs::write(&path, "secret").unwrap();
        let fd = stream.into_raw_fd();
        let reader = thread::spawn(move || {
            let mut text = [0_u8; 16];
            // SAFETY: there is room for as many bytes.
            let n = unsafe { libc::read(fd, text.as_mut_ptr().cast(), text.len()) };
            (n, io::Error::last_os_error().raw_os_error())
        });
        wait_for_word();
        assert_eq!(close(fd), 0);
        let file = fs::File::open(&path).unwrap();
        assert_eq!(file.as_raw_fd(), fd, "the number is a file's");
        let _ = fs::remove_file(&path);
        assert_eq!(reader.join().unwrap(), (-1, Some(libc::EBADF)));
        return;
    }
    let links = Links::new(test);
    let port = free_port();
    let variables = [FORK_SAFE, PATIENT, ("PORT", &port.to_string())];
    let mut server = links.start(test, ADDR, &variables);
    let mut silent = connect_to_server(CLIENT, port);
    await_ready(&mut silent);
    let file = file_of(server.id());
    assert!(file.exists());
    go_on(&mut server);
    eventually("it is closed", Duration::from_secs(20), || !file.exists());
    // The wait ends, and the call does not go on with the file.
    drop(silent);
    finish(server);
}

#[test]
fn sockets_that_are_closed_while_they_wait() {
    const TEST: &str = "sockets_that_are_closed_while_they_wait";
    // SAFETY: the descriptor is the test's.
    close_while_it_waits(TEST, |fd| unsafe { libc::close(fd) });
}

#[test]
fn streams_that_are_closed_while_they_wait() {
    const TEST: &str = "streams_that_are_closed_while_they_wait";
    // The C library closes it without a call of `close`.
    // SAFETY: as above, and the mode ends with a zero byte.
    close_while_it_waits(TEST, |fd| unsafe {
        libc::fclose(libc::fdopen(fd, c"r".as_ptr()))
    });
}

#[test]
fn children_of_a_process_that_makes_an_rsocket() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let listener = TcpListener::bind((ADDR, port)).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let fd = stream.as_raw_fd();
        let reader = thread::spawn(move || stream.read(&mut [0; 16]));
        wait_for_word();
        let mut ends = [0; 2];
        // The descriptor is the child's as well, and the thread is not. The child lives as long as this process.
        // SAFETY: the child ends without the harness, and there is room for both ends.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            if libc::fork() == 0 {
                libc::alarm(60);
                let copy = libc::dup(fd);
                let n = libc::write(copy, c"hello".as_ptr().cast(), 5);
                libc::close(copy);
                libc::close(fd);
                libc::close(ends[1]);
                libc::read(ends[0], [0_u8].as_mut_ptr().cast(), 1);
                libc::_exit(c_int::from(n != 5));
            }
        }
        assert_eq!(reader.join().unwrap().unwrap(), 0);
        // The client goes on.
        listener.accept().unwrap();
        return;
    }
    const TEST: &str = "children_of_a_process_that_makes_an_rsocket";
    let links = Links::new(TEST);
    let port = free_port();
    let variables = [FORK_SAFE, PATIENT, ("PORT", &port.to_string())];
    let mut server = links.start(TEST, ADDR, &variables);
    let mut silent = connect_to_server(CLIENT, port);
    await_ready(&mut silent);
    go_on(&mut server);
    let mut text = [0; 5];
    silent.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello", "by TCP, as it was when the child began");
    silent.shutdown(Shutdown::Write).unwrap();
    // The server closes it, and so has the child.
    assert_eq!(silent.read(&mut text).unwrap(), 0);
    drop(connect_to_server(CLIENT, port));
    finish(server);
}

/// Reads from a socket in a thread whose wait a signal interrupts when the thread waits for a word; the handler
/// writes to the socket. Answers how much was read in the end.
fn interrupt(mut stream: TcpStream, await_wait: impl FnOnce(libc::pid_t)) -> usize {
    static SOCKET: AtomicI32 = AtomicI32::new(-1);
    static WRITTEN: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn say(_: c_int) {
        let fd = SOCKET.load(Ordering::Relaxed);
        // SAFETY: the bytes are alive.
        let n = unsafe { libc::write(fd, c"hello".as_ptr().cast(), 5) };
        WRITTEN.store(n as c_int, Ordering::Relaxed);
    }
    SOCKET.store(stream.as_raw_fd(), Ordering::Relaxed);
    let (send, receive) = mpsc::channel();
    let reader = thread::spawn(move || {
        // SAFETY: the calls cannot fail.
        let ids = unsafe { (libc::gettid(), libc::pthread_self()) };
        send.send(ids).unwrap();
        stream.read(&mut [0; 16]).unwrap()
    });
    let (id, thread) = receive.recv().unwrap();
    await_wait(id);
    // SAFETY: the thread reads, and the handler makes calls only that may be made there.
    unsafe {
        let handler = say as extern "C" fn(c_int);
        libc::signal(libc::SIGUSR1, handler as libc::sighandler_t);
        libc::pthread_kill(thread, libc::SIGUSR1);
    }
    eventually("the handler returns", Duration::from_secs(20), || {
        WRITTEN.load(Ordering::Relaxed) == 5
    });
    reader.join().unwrap()
}

#[test]
fn handlers_of_signals_in_a_server_that_waits() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let listener = TcpListener::bind((ADDR, port)).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert_eq!(interrupt(stream, |_| wait_for_word()), 0);
        return;
    }
    const TEST: &str = "handlers_of_signals_in_a_server_that_waits";
    let links = Links::new(TEST);
    let port = free_port();
    let variables = [FORK_SAFE, PATIENT, ("PORT", &port.to_string())];
    let mut server = links.start(TEST, ADDR, &variables);
    let mut silent = connect_to_server(CLIENT, port);
    await_ready(&mut silent);
    go_on(&mut server);
    let mut text = [0; 5];
    silent.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello");
    drop(silent);
    finish(server);
}

#[test]
fn handlers_of_signals_in_a_server_that_has_no_turn_yet() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let listener = TcpListener::bind((ADDR, port)).unwrap();
        let (mut first, _) = listener.accept().unwrap();
        thread::spawn(move || first.read(&mut [0]));
        let (second, _) = listener.accept().unwrap();
        let read = interrupt(second, |thread| {
            let call = format!("/proc/self/task/{thread}/syscall");
            let is_it = format!("{} ", libc::SYS_clock_nanosleep);
            eventually("it is in the queue", Duration::from_secs(20), || {
                fs::read_to_string(&call).is_ok_and(|line| line.starts_with(&is_it))
            });
        });
        assert_eq!(read, 7);
        return;
    }
    const TEST: &str = "handlers_of_signals_in_a_server_that_has_no_turn_yet";
    let links = Links::new(TEST);
    let port = free_port();
    let variables = [FORK_SAFE, PATIENT, ("PORT", &port.to_string())];
    let server = links.start(TEST, ADDR, &variables);
    let mut silent = connect_to_server(CLIENT, port);
    await_ready(&mut silent);
    let mut second = connect_from(CLIENT, port).unwrap();
    let timeout = |secs| Some(Duration::from_secs(secs));
    second.set_read_timeout(timeout(20)).unwrap();
    let mut text = [0; 5];
    second.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello");
    // It has its turn.
    drop(silent);
    second.set_read_timeout(timeout(1)).unwrap();
    let more = second.read(&mut text).unwrap_err().kind();
    assert_eq!(more, io::ErrorKind::WouldBlock, "no offer");
    second.write_all(b"welcome").unwrap();
    assert_eq!(second.read(&mut text).unwrap(), 0);
    finish(server);
}

#[test]
fn handlers_of_signals_in_a_client_that_waits() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let stream = TcpStream::connect((ADDR, port)).unwrap();
        let read = interrupt(stream, |thread| {
            // The wait for the server is the only such call.
            let call = format!("/proc/self/task/{thread}/syscall");
            let is_it = format!("{} ", libc::SYS_recvfrom);
            eventually("the thread waits", Duration::from_secs(20), || {
                fs::read_to_string(&call).is_ok_and(|line| line.starts_with(&is_it))
            });
        });
        assert_eq!(read, 7);
        return;
    }
    const TEST: &str = "handlers_of_signals_in_a_client_that_waits";
    let links = Links::new(TEST);
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let client = links.start(TEST, ADDR, &[FORK_SAFE, ("PORT", &port)]);
    let (mut stream, _) = listener.accept().unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut text = [0; 5];
    stream.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello");
    stream.write_all(b"welcome").unwrap();
    drop(stream);
    finish(client);
}

#[test]
fn servers_whose_port_another_program_has() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        let listener = TcpListener::bind((ADDR, port)).unwrap();
        if let Some(listens) = env::var_os("LISTENS") {
            fs::write(listens, "").unwrap();
            return wait_for_word();
        }
        // SAFETY: the children end without the harness; no other thread uses the library here.
        unsafe {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            loop {
                let (mut stream, _) = listener.accept().unwrap();
                if libc::fork() == 0 {
                    libc::alarm(60);
                    let _ = stream.write_all(b"hello");
                    libc::_exit(0);
                }
            }
        }
    }
    const TEST: &str = "servers_whose_port_another_program_has";
    let links = Links::new(TEST);
    let number = free_port();
    let port = &*number.to_string();
    let listens = env::temp_dir().join(format!("riser-preload-{TEST}-{port}"));
    let file = listens.to_str().unwrap();
    let mut other = links.start(TEST, ADDR, &[("PORT", port), ("LISTENS", file)]);
    eventually("the other listens", Duration::from_secs(20), || {
        listens.exists()
    });
    let _ = fs::remove_file(&listens);
    let patience = ("RISER_RSOCKET_PATIENCE", "40000");
    let server = links.start(TEST, ADDR, &[FORK_SAFE, patience, ("PORT", port)]);
    await_server(number);
    let hosts = (100..110).map(|n| Ipv4Addr::new(127, 0, 45, n));
    let clients: Vec<TcpStream> = hosts
        .map(|host| connect_from(host, number).unwrap())
        .collect();
    for mut client in clients {
        let mut text = [0; 5];
        client
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        client.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hello");
    }
    go_on(&mut other);
    finish(other);
    end(server);
}

#[test]
fn servers_that_are_paused_while_a_client_connects() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            // A group of its processes, which are paused at once.
            // SAFETY: the call takes any numbers.
            assert_eq!(unsafe { libc::setpgid(0, 0) }, 0);
            return serve(&TcpListener::bind((ADDR, port)).unwrap());
        }
        fs::write(env::var("BEGINS").unwrap(), "").unwrap();
        // The rsocket alone, without TCP before it.
        assert_eq!(ask(TcpStream::connect((ADDR, port)).unwrap()), "by RDMA");
        return;
    }
    const TEST: &str = "servers_that_are_paused_while_a_client_connects";
    let links = Links::new(TEST);
    let number = free_port();
    let port = &*number.to_string();
    let patience = Duration::from_secs(5);
    let ms = patience.as_millis().to_string();
    let variables = [
        FORK_SAFE,
        ("RISER_RSOCKET_PATIENCE", &*ms),
        ("PORT", port),
        ("SERVER", "1"),
    ];
    let server = links.start(TEST, ADDR, &variables);
    await_server(number);
    let mut tcp = connect_from(CLIENT, number).unwrap();
    await_ready(&mut tcp);
    let group = -(server.id() as libc::pid_t);
    // SAFETY: the group is the server's.
    unsafe { assert_eq!(libc::kill(group, libc::SIGSTOP), 0) };
    // A pause of that length, in which nothing is to happen.
    thread::sleep(patience + Duration::from_secs(1));
    let begins = env::temp_dir().join(format!("riser-preload-{TEST}-{port}"));
    let variables = [("PORT", port), ("BEGINS", begins.to_str().unwrap())];
    let client = links.start(TEST, &CLIENT.to_string(), &variables);
    eventually("the client begins", Duration::from_secs(20), || {
        begins.exists()
    });
    let _ = fs::remove_file(&begins);
    // SAFETY: as above.
    unsafe { assert_eq!(libc::kill(group, libc::SIGCONT), 0) };
    finish(client);
    drop(tcp);
    end(server);
}

/// A client whose rsocket a server accepts and does not take for the client's, beside the TCP connection to this
/// process. The server does with it as it is to do.
fn refuse_an_rsocket(test: &str, patience: &str, refuse: impl FnOnce(TcpStream)) {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            // The rsockets of a server.
            let listener = TcpListener::bind((ADDR, port)).unwrap();
            fs::write(env::var("LISTENS").unwrap(), "").unwrap();
            return refuse(listener.accept().unwrap().0);
        }
        assert_eq!(ask(connect_to_server(CLIENT, port)), "by TCP");
        return;
    }
    let links = Links::new(test);
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let port = &*listener.local_addr().unwrap().port().to_string();
    let listens = env::temp_dir().join(format!("riser-preload-{test}-{port}"));
    let file = listens.to_str().unwrap();
    let variables = [("PORT", port), ("SERVER", "1"), ("LISTENS", file)];
    let mut server = links.start(test, ADDR, &variables);
    eventually("the server listens", Duration::from_secs(20), || {
        listens.exists()
    });
    let _ = fs::remove_file(&listens);
    let patience = ("RISER_RSOCKET_PATIENCE", patience);
    let client = links.start(test, "127.0.45.2", &[FORK_SAFE, patience, ("PORT", port)]);
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&[0; 4]).unwrap();
    answer(stream);
    finish(client);
    go_on(&mut server);
    finish(server);
}

#[test]
fn servers_that_are_slow_to_refuse_an_rsocket() {
    const TEST: &str = "servers_that_are_slow_to_refuse_an_rsocket";
    refuse_an_rsocket(TEST, "120000", |stream| {
        thread::sleep(Duration::from_secs(1));
        drop(stream);
        wait_for_word();
    });
}

#[test]
fn servers_that_keep_an_rsocket_that_they_do_not_take() {
    const TEST: &str = "servers_that_keep_an_rsocket_that_they_do_not_take";
    refuse_an_rsocket(TEST, "100", |stream| {
        wait_for_word();
        drop(stream);
    });
}

#[test]
fn sets_of_epoll_while_a_socket_becomes_an_rsocket() {
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            return serve(&TcpListener::bind((ADDR, port)).unwrap());
        }
        let mut stream = connect_to_server("127.0.45.2".parse().unwrap(), port);
        stream.set_nodelay(true).unwrap();
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 7,
        };
        // SAFETY: the calls may be made at any time, and the event is alive.
        let epoll = unsafe {
            let epoll = libc::epoll_create1(0);
            let fd = stream.as_raw_fd();
            for (op, data) in [(libc::EPOLL_CTL_ADD, 7), (libc::EPOLL_CTL_MOD, 8)] {
                event.u64 = data;
                assert_eq!(libc::epoll_ctl(epoll, op, fd, &raw mut event), 0);
            }
            event.u64 = 0;
            epoll
        };
        stream.write_all(b"hello").unwrap();
        // SAFETY: there is room for an event.
        let n = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, 20_000) };
        assert_eq!((n, { event.u64 }), (1, 8));
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "by RDMA");
        assert!(stream.nodelay().unwrap(), "as it was set before");
        return;
    }
    const TEST: &str = "sets_of_epoll_while_a_socket_becomes_an_rsocket";
    let links = Links::new(TEST);
    let port = &*free_port().to_string();
    let server = links.start(TEST, ADDR, &[FORK_SAFE, ("PORT", port), ("SERVER", "1")]);
    finish(links.start(TEST, "127.0.45.2", &[FORK_SAFE, ("PORT", port)]));
    end(server);
}

#[test]
fn servers_that_take_an_rsocket_from_another_address() {
    let file_of = |port| env::temp_dir().join(format!("riser-preload-take-{port}"));
    if is_inside() {
        let port: u16 = env::var("PORT").unwrap().parse().unwrap();
        if env::var_os("SERVER").is_some() {
            // The rsockets of a server that takes them from any address.
            let listener = TcpListener::bind((ADDR, port)).unwrap();
            fs::write(file_of(port), "").unwrap();
            let (stream, _) = listener.accept().unwrap();
            fs::remove_file(file_of(port)).unwrap();
            return answer(stream);
        }
        assert_eq!(ask(connect_to_server(CLIENT, port)), "by RDMA");
        return;
    }
    const TEST: &str = "servers_that_take_an_rsocket_from_another_address";
    let links = Links::new(TEST);
    let listener = TcpListener::bind((ADDR, 0)).unwrap();
    let number = listener.local_addr().unwrap().port();
    let port = &*number.to_string();
    let server = links.start(TEST, ADDR, &[("PORT", port), ("SERVER", "1")]);
    let await_file = |exists| {
        eventually("the server goes on", Duration::from_secs(20), || {
            file_of(number).exists() == exists
        });
    };
    await_file(true);
    // A client without patience of its own.
    let patience = ("RISER_RSOCKET_PATIENCE", "0");
    let client = links.start(TEST, "127.0.45.2", &[FORK_SAFE, patience, ("PORT", port)]);
    let (mut tcp, _) = listener.accept().unwrap();
    tcp.write_all(&[0; 4]).unwrap();
    await_file(false);
    drop(tcp);
    finish(client);
    finish(server);
}
