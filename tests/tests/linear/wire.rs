//! A switch in this process, which loses, repeats, spoils, delays and holds back the frames that
//! pass it. Each of its ports is a TAP device, in the network namespace of one host.
//!
//! The kernel completes checksums and cuts segments before a TAP device's reader gets a frame, so
//! what passes here is what would pass a cable.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::mem;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riser_tests::load::Chance;

use super::net::{Network, sh};

/// Ethernet: two addresses and a type.
const HEADER: usize = 14;
const IPV4: [u8; 2] = [8, 0];

/// Longest frame, in bytes.
const LONGEST: usize = 1 << 16;

/// Most frames that are held back for a host; what comes after them is lost.
const HELD: usize = 4096;

/// What happens to the frames of one host.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    /// Of 10,000 frames, how many are lost.
    pub(crate) lost: u64,
    /// How many come twice.
    pub(crate) repeated: u64,
    /// How many have a wrong byte behind the Ethernet header. ARP, which has no checksum, is spared.
    pub(crate) spoiled: u64,
    /// How many come late, and so behind later ones.
    pub(crate) late: u64,
    /// How late these are at most.
    pub(crate) by: Duration,
    /// Frames from the host, and to it, are lost, or held back until the weather changes.
    pub(crate) blocked: [Block; 2],
}

/// Which frames of one direction do not pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Block {
    #[default]
    None,
    Lost,
    Held,
}

impl Weather {
    /// What a network does on a good day, so that nothing runs without it.
    pub(crate) const FAIR: Self = Self {
        lost: 5,
        repeated: 5,
        spoiled: 2,
        late: 20,
        by: Duration::from_millis(2),
        blocked: [Block::None; 2],
    };
}

/// A frame on its way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Late {
    due: Instant,
    to: usize,
    frame: Vec<u8>,
}

/// The cable of one host.
struct Cable {
    /// The end at the switch.
    end: File,
    weather: Mutex<Weather>,
    /// Frames that are held back, with the ports that they go to.
    held: Mutex<Vec<(usize, Vec<u8>)>>,
}

impl Cable {
    fn weather(&self) -> MutexGuard<'_, Weather> {
        self.weather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, Vec<(usize, Vec<u8>)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hosts behind one switch, each in a network namespace of its own.
pub(crate) struct Wire {
    pub(crate) hosts: Vec<Network>,
    cables: Arc<[Cable]>,
}

/// The address of a host, by its number.
pub(crate) fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 12, 0, host as u8 + 1)
}

fn mac(host: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, host as u8 + 1]
}

impl Wire {
    pub(crate) fn new(hosts: usize, seed: u64) -> Result<Self, String> {
        let networks: Vec<Network> = (0..hosts)
            .map(|_| Network::new())
            .collect::<Result<_, _>>()?;
        let mut cables = Vec::new();
        for (host, network) in networks.iter().enumerate() {
            let end = network.run(move || -> Result<File, String> {
                let end = tap().map_err(|e| format!("a TAP device: {e}"))?;
                sh("ip link set lo up")?;
                let [.., last] = mac(host);
                sh(&format!(
                    "ip link set eth0 address 02:00:00:00:00:{last:02x} up"
                ))?;
                sh(&format!("ip addr add {}/24 dev eth0", address(host)))?;
                Ok(end)
            })?;
            cables.push(Cable {
                end,
                weather: Mutex::new(Weather::FAIR),
                held: Mutex::default(),
            });
        }
        let cables: Arc<[Cable]> = cables.into();
        let (late, waiting) = channel();
        for from in 0..hosts {
            let port = Port {
                from,
                cables: cables.clone(),
                late: late.clone(),
                chance: Chance::new(seed, 0x3173 + from as u64),
            };
            thread::spawn(move || port.forward());
        }
        let ends = cables.clone();
        thread::spawn(move || deliver(&ends, &waiting));
        Ok(Self {
            hosts: networks,
            cables,
        })
    }

    /// Changes the weather of a host; what was held back for it or from it comes now.
    pub(crate) fn change(&self, host: usize, weather: Weather) {
        let cable = &self.cables[host];
        *cable.weather() = weather;
        for (to, frame) in mem::take(&mut *cable.held()) {
            put(&self.cables[to], &frame);
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Readers of a device that is gone end.
        for host in &self.hosts {
            let _ = host.run(|| sh("ip link delete eth0"));
        }
    }
}

/// A TAP device `eth0` in the namespace of the calling thread.
fn tap() -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: the structure is plain numbers, of which all may be zero.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, byte) in request.ifr_name.iter_mut().zip(b"eth0") {
        *to = *byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request is one of this call's, and outlives it.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives a frame to a host; one whose device is down does not get it.
fn put(cable: &Cable, frame: &[u8]) {
    let _ = (&cable.end).write(frame);
}

/// Delivers late frames when they are due, until no port sends any.
fn deliver(cables: &[Cable], waiting: &Receiver<Late>) {
    let mut late = BinaryHeap::new();
    loop {
        let due = late.peek().map(|Reverse(Late { due, .. })| *due);
        let wait = due.map_or(Duration::from_secs(3600), |due| {
            due.saturating_duration_since(Instant::now())
        });
        match waiting.recv_timeout(wait) {
            Ok(frame) => late.push(Reverse(frame)),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                if let Some(Reverse(Late { to, frame, .. })) = late.pop() {
                    put(&cables[to], &frame);
                }
            }
        }
    }
}

/// What a host sends.
struct Port {
    from: usize,
    cables: Arc<[Cable]>,
    late: Sender<Late>,
    chance: Chance,
}

impl Port {
    fn forward(mut self) {
        let mut buffer = vec![0; LONGEST];
        loop {
            let len = match (&self.cables[self.from].end).read(&mut buffer) {
                Ok(len) => len,
                // The device is down, and may be up again.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                }
                Err(_) => return,
            };
            let frame = &mut buffer[..len];
            if frame.len() < HEADER {
                continue;
            }
            let is_for_all = frame[0] & 1 == 1;
            for to in 0..self.cables.len() {
                if to != self.from && (is_for_all || frame[..6] == mac(to)) {
                    self.pass(to, frame);
                }
            }
        }
    }

    /// One frame to one host. The weather is that of the host which is not number 0, the target.
    fn pass(&mut self, to: usize, frame: &mut [u8]) {
        let (host, direction) = match self.from {
            0 => (to, 1),
            from => (from, 0),
        };
        let cable = &self.cables[host];
        let weather = *cable.weather();
        match weather.blocked[direction] {
            Block::None => {}
            Block::Lost => return,
            Block::Held => {
                let mut held = cable.held();
                if held.len() < HELD {
                    held.push((to, frame.to_vec()));
                }
                return;
            }
        }
        let mut happens = |of| self.chance.below(10_000) < of;
        if happens(weather.lost) {
            return;
        }
        let (is_repeated, is_late) = (happens(weather.repeated), happens(weather.late));
        let mut spoiled = None;
        if happens(weather.spoiled) && frame[12..14] == IPV4 {
            let at = HEADER + self.chance.below((frame.len() - HEADER) as u64) as usize;
            spoiled = Some((at, frame[at]));
            frame[at] ^= 1 + self.chance.below(255) as u8;
        }
        let most = weather.by;
        for is_late in [Some(is_late), is_repeated.then_some(true)]
            .into_iter()
            .flatten()
        {
            if is_late {
                let due = Instant::now() + self.chance.between(Duration::ZERO, most);
                let frame = frame.to_vec();
                let _ = self.late.send(Late { due, to, frame });
            } else {
                put(&self.cables[to], frame);
            }
        }
        // Other hosts get it as it was.
        if let Some((at, byte)) = spoiled {
            frame[at] = byte;
        }
    }
}
