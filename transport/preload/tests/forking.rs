//! Servers that fork for each connection, and their clients.

#![allow(unsafe_code, reason = "calls of the C library are made")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ptr;
use std::thread;

mod preloaded;

use preloaded::*;

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
