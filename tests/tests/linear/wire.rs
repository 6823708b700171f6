//! A switch running in this process, which can lose, duplicate, corrupt, delay and hold frames.
//! Each port is a TAP device in the network namespace of a host.
//!
//! The kernel calculates checksums and splits segments before we receive a frame from a TAP device,
//! so we see the same frames as on a real cable.

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

/// Ethernet header: two addresses and a type.
const HEADER: usize = 14;
const IPV4: [u8; 2] = [8, 0];

/// Maximum frame size in bytes.
const LONGEST: usize = 1 << 16;

/// Maximum number of frames to hold for a host. Any further frames are lost.
const HELD: usize = 4096;

/// Faults for the frames of a host.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    /// Number of lost frames out of 10,000.
    pub(crate) lost: u64,
    /// Number of duplicated frames.
    pub(crate) repeated: u64,
    /// Number of frames with an incorrect byte after the Ethernet header. ARP is not affected
    /// because it has no checksum.
    pub(crate) spoiled: u64,
    /// Number of delayed frames, which are received after later frames.
    pub(crate) late: u64,
    /// Maximum delay.
    pub(crate) by: Duration,
    /// If set, frames from the host and to the host are lost, or held until the faults are changed.
    pub(crate) blocked: [Block; 2],
}

/// Selects which frames are blocked in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Block {
    #[default]
    None,
    Lost,
    Held,
}

impl Weather {
    /// Faults of a normal network, which are always enabled.
    pub(crate) const FAIR: Self = Self {
        lost: 5,
        repeated: 5,
        spoiled: 2,
        late: 20,
        by: Duration::from_millis(2),
        blocked: [Block::None; 2],
    };
}

/// A delayed frame.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Late {
    due: Instant,
    to: usize,
    frame: Vec<u8>,
}

/// Cable to a host.
struct Cable {
    /// Switch side of the cable.
    end: File,
    weather: Mutex<Weather>,
    /// Frames that are currently held, and their destination ports.
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

/// Hosts connected to the same switch. Each host uses a separate network namespace.
pub(crate) struct Wire {
    pub(crate) hosts: Vec<Network>,
    cables: Arc<[Cable]>,
}

/// Returns the address of a host by number.
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

    /// Sets the faults of a host. Any frames held for this host, or sent by it, are delivered now.
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
        // When the device is removed, its readers will exit.
        for host in &self.hosts {
            let _ = host.run(|| sh("ip link delete eth0"));
        }
    }
}

/// Creates the TAP device `eth0` in the namespace of the current thread.
fn tap() -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: this structure only contains integers, which can all be zero.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, byte) in request.ifr_name.iter_mut().zip(b"eth0") {
        *to = *byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request is valid for this call.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a frame to a host. If its device is down, the frame is lost.
fn put(cable: &Cable, frame: &[u8]) {
    let _ = (&cable.end).write(frame);
}

/// Delivers delayed frames when they are due, until all ports are closed.
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

/// Receives frames sent by a host.
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
                // The device is down, but may be up again later.
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

    /// Sends a frame to a host. Uses the faults of the host that is not the target (number 0).
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
        // Other hosts must receive the original frame.
        if let Some((at, byte)) = spoiled {
            frame[at] = byte;
        }
    }
}
