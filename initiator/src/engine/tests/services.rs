//! Clients of disks, served on the engine's thread.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;

use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{Service, ServiceStatus};

use crate::engine::Client;

/// Echoes bytes with the name of the thread; a zero closes the connection.
struct Echo(UnixStream);

impl Service for Echo {
    fn run_once(&mut self) -> ServiceStatus {
        let mut byte = [0];
        match self.0.read(&mut byte) {
            Ok(1) if byte != [0] => {
                let name = thread::current().name().unwrap().to_owned();
                self.0
                    .write_all(&[&byte, name.as_bytes()].concat())
                    .unwrap();
                ServiceStatus::Worked
            }
            Ok(_) => ServiceStatus::Over,
            Err(_) => ServiceStatus::Waiting,
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        true
    }

    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        out.push(PollInterest::reading(self.0.as_fd()));
    }

    fn end_sleep(&mut self) {}
}

fn echo() -> (UnixStream, Box<dyn Service>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    (ours, Box::new(Echo(theirs)))
}

#[test]
fn engine_thread_serves_clients_until_either_closes() {
    let client = Client::builder().pool(1 << 20).without_device().unwrap();
    let mut clients: Vec<_> = (0..3)
        .map(|_| {
            let (ours, service) = echo();
            assert!(client.host(service).is_ok());
            ours
        })
        .collect();
    let mut reply = [0; 13];
    for round in 1..4 {
        for ours in &mut clients {
            // The engine is usually asleep by now.
            thread::sleep(std::time::Duration::from_millis(2));
            ours.write_all(&[round]).unwrap();
            ours.read_exact(&mut reply).unwrap();
            assert_eq!((reply[0], &reply[1..]), (round, &b"riser-engine"[..]));
        }
    }
    clients[0].write_all(&[0]).unwrap();
    assert_eq!(clients[0].read(&mut reply).unwrap(), 0, "it was dropped");
    client.shutdown();
    assert_eq!(
        clients[1].read(&mut reply).unwrap(),
        0,
        "it went with the engine"
    );
    let (mut ours, service) = echo();
    assert!(client.host(service).is_err());
    assert_eq!(ours.read(&mut reply).unwrap(), 0);
}
