//! SRP logins on multiple workers, in many interleavings.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::srp::{
    BufferFormats, InitiatorPortId, LoginReq, LoginReqFlags, MultiChannelAction, Tag,
};
use riser_sync::atomic::{AtomicBool, AtomicU32, Ordering};
use riser_sync::mpsc::{Receiver, Sender, channel};
use riser_sync::testing::explore;
use riser_sync::thread;

use super::catalog::Entrance;
use super::guard::Departure;
use super::nexus::{Endpoints, NexusKey, Registry};
use crate::config::Config;
use crate::fabric::ConnRef;

const LOGINS: u16 = 3;

/// A message to the worker of a channel.
enum Note {
    Start,
    Terminate,
}

/// State shared by all channels.
struct Shared {
    registry: Registry,
    /// Set while a session has commands in flight.
    serves: AtomicBool,
    served: AtomicU32,
    channels: Vec<Sender<Note>>,
}

fn registry() -> Registry {
    let text = "backends: { a: { kind: ram, size: 1MiB } }\n\
         targets: [{ name: t, portals: [{ protocol: srp, listen: 10.0.0.1 }], luns: { 0: a }, \
         access: open }]\nworkers: { count: 1 }\n";
    let config = Config::parse(text, "test.yaml").unwrap();
    crate::server::build_shared(&config, None).unwrap().registry
}

impl Shared {
    fn notify(&self, channels: Vec<ConnRef>, note: fn() -> Note) {
        for channel in channels {
            // A channel that has left is not waiting.
            let _ = self.channels[usize::from(channel.worker)].send(note());
        }
    }

    /// Logs in, executes commands once allowed, and leaves. If a newer session replaces this one
    /// first, no commands are executed.
    fn log_in(&self, channel: ConnRef, mailbox: &Receiver<Note>) {
        let catalog = self.registry.catalog();
        let portal = &catalog.targets[0].portals[0];
        let key = NexusKey {
            initiator: InitiatorPortId([1; 16]),
            target: portal.target_port(),
        };
        let req = LoginReq {
            tag: Tag(1),
            req_it_iu_len: 8260,
            formats: BufferFormats::DIRECT,
            multi_channel: MultiChannelAction::Single,
            flags: LoginReqFlags::empty(),
            immediate: None,
            initiator_port: key.initiator,
            target_port: key.target,
        };
        let ends = Endpoints {
            peer: SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)), 1),
            local: portal.listen.ip(),
            entrance: Entrance::Port(portal.listen.port()),
        };
        let now = Instant::now();
        let entered = self.registry.login(&req, ends, channel, now);
        let (grant, guard) = entered.expect("there is room");
        self.notify(grant.displaced, || Note::Terminate);
        let established = self.registry.establish(key, channel);
        self.notify(established.terminate, || Note::Terminate);
        self.notify(established.start, || Note::Start);
        let may_start = established.may_start || {
            let note = mailbox.recv_timeout(Duration::from_secs(10));
            matches!(note.expect("no login is forgotten"), Note::Start)
        };
        if may_start {
            assert!(!self.serves.swap(true, Ordering::SeqCst), "two sessions");
            thread::yield_now();
            self.served.fetch_add(1, Ordering::SeqCst);
            self.serves.store(false, Ordering::SeqCst);
        }
        let left = guard.leave_session(Departure::default());
        self.notify(left.notify, || Note::Start);
        self.notify(left.terminate, || Note::Terminate);
    }
}

#[test]
fn interleavings_of_logins_serve_one_session() {
    explore(|| {
        let (channels, mailboxes): (Vec<_>, Vec<_>) = (0..LOGINS).map(|_| channel()).unzip();
        let shared = Arc::new(Shared {
            registry: registry(),
            serves: AtomicBool::new(false),
            served: AtomicU32::new(0),
            channels,
        });
        let logins: Vec<_> = (0..)
            .zip(mailboxes)
            .map(|(worker, mailbox)| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.log_in(ConnRef { worker, serial: 1 }, &mailbox))
            })
            .collect();
        logins.into_iter().for_each(|one| one.join().unwrap());
        assert!(shared.served.load(Ordering::SeqCst) > 0, "none was served");
        assert_eq!(shared.registry.sessions(), 0);
        assert_eq!(shared.registry.unconfirmed(), 0);
    });
}
