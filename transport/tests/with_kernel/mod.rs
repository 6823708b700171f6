//! Two devices of any provider, selected by name.

pub(crate) mod stress;

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use riser_transport::iwarp::{Iwarp, IwarpConfig};
use riser_transport::rdma_core::RdmaCoreDevice;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::Provider;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::suite::world::{End, World};

/// A device and its configuration.
struct Named {
    /// An iWARP device opens sockets on demand, so its calls are executed in its network namespace.
    namespace: Option<File>,
    provider: Option<Box<dyn Provider + Send>>,
    addr: IpAddr,
    name: String,
}

/// The two devices selected by `RISER_SUITE`.
pub(crate) struct Devices {
    a: Named,
    b: Named,
    /// Network namespace of the tests.
    home: Option<File>,
}

impl Devices {
    pub(crate) fn open(spec: &str) -> Self {
        let mut names = spec.split_whitespace();
        let mut next = || Named::open(names.next().expect("RISER_SUITE names two devices"));
        let (a, b) = (next(), next());
        Self { a, b, home: None }
    }

    fn named(&mut self, end: End) -> &mut Named {
        match end {
            End::A => &mut self.a,
            End::B => &mut self.b,
        }
    }

    /// Enters the network namespace of a device, if either device uses a separate one.
    fn enter(&mut self, end: End) {
        if [&self.a, &self.b]
            .iter()
            .all(|named| named.namespace.is_none())
        {
            return;
        }
        let home = self
            .home
            .get_or_insert_with(|| File::open("/proc/thread-self/ns/net").expect("a namespace"));
        let own = match end {
            End::A => self.a.namespace.as_ref(),
            End::B => self.b.namespace.as_ref(),
        };
        let to = own.unwrap_or(home);
        move_into_link_name_space(to.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("entering a network namespace");
    }

    /// Closes a device, as if its process exited.
    pub(crate) fn close(&mut self, end: End) {
        self.named(end).provider = None;
    }

    /// Closes and reopens a device.
    pub(crate) fn reopen(&mut self, end: End) {
        let named = self.named(end);
        named.provider = None;
        *named = Named::open(&named.name.clone());
    }
}

/// Return to the network namespace of the tests for the next test.
impl Drop for Devices {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("entering a network namespace");
        }
    }
}

impl Named {
    fn open(name: &str) -> Self {
        let (kind, at) = name.split_once(':').expect("PROVIDER:ADDRESS");
        let (addr, namespace) = match at.split_once('@') {
            Some((addr, namespace)) => (addr, Some(namespace.to_owned())),
            None => (at, None),
        };
        let addrs = addr
            .split(',')
            .map(|addr| addr.parse().expect("an address"));
        let addrs: Vec<IpAddr> = addrs.collect();
        let addr = addrs[0];
        let file = |path: &str| File::open(path).expect("a network namespace");
        let home = namespace.as_ref().filter(|_| kind == "iwarp");
        let home = home.map(|namespace| file(&format!("/run/netns/{namespace}")));
        let kind = kind.to_owned();
        // A thread that enters a namespace stays there, so use a separate thread.
        let opening = thread::spawn(move || {
            if let Some(namespace) = namespace {
                let path = format!("/run/netns/{namespace}");
                let file = File::open(path).expect("a network namespace");
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("entering a network namespace");
            }
            open(&kind, &addrs)
        });
        Self {
            namespace: home,
            provider: Some(opening.join().expect("a device")),
            addr,
            name: name.to_owned(),
        }
    }
}

fn open(kind: &str, addrs: &[IpAddr]) -> Box<dyn Provider + Send> {
    let addr = addrs[0];
    match kind {
        "roce" => {
            let config = RoceConfig {
                other_addrs: addrs[1..].to_vec(),
                ..RoceConfig::new(addr)
            };
            Box::new(Roce::open(&config).expect("a RoCE device"))
        }
        "iwarp" => Box::new(Iwarp::open(IwarpConfig::new(addr)).expect("an iWARP device")),
        "rdma_core" => Box::new(RdmaCoreDevice::open(addr).expect("an RDMA device")),
        _ => panic!("no provider {kind}"),
    }
}

impl World for Devices {
    type P = dyn Provider + Send;

    fn provider(&mut self, end: End) -> &mut Self::P {
        self.enter(end);
        let device = self.named(end).provider.as_mut();
        device.expect("an open device").as_mut()
    }

    fn addr(&self, end: End) -> IpAddr {
        match end {
            End::A => self.a.addr,
            End::B => self.b.addr,
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        let devices = [&mut self.a, &mut self.b];
        let open = devices.into_iter().filter_map(|d| d.provider.as_mut());
        if open.map(|p| p.progress(now)).sum::<usize>() == 0 {
            thread::sleep(Duration::from_micros(100));
        }
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    /// The kernel may run on an emulated machine, with a network that loses every tenth packet.
    fn patience(&self) -> Duration {
        Duration::from_secs(300)
    }
}
