//! TAP device: this process sends and receives the frames of the interface (see Linux `tun(4)`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use riser_fabric::vnic::wire::Mac;
use rustix::fs::OFlags;
use rustix::ioctl::Opcode;
use rustix::net::{AddressFamily, SocketType, socket};

const TUNSETIFF: Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 202);
const TUNGETIFF: Opcode = rustix::ioctl::opcode::read::<u32>(b'T', 210);
const TUNSETCARRIER: Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 226);
const SIOCGIFFLAGS: Opcode = 0x8913;
const SIOCSIFFLAGS: Opcode = 0x8914;
const SIOCSIFMTU: Opcode = 0x8922;
const SIOCSIFHWADDR: Opcode = 0x8924;
const SIOCGIFHWADDR: Opcode = 0x8927;

const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
/// Don't allow other processes to use the device at the same time.
const IFF_TUN_EXCL: u16 = 0x8000;
const IFF_UP: u16 = 1;
const ARPHRD_ETHER: u16 = 1;

/// Max interface name length in bytes (`IFNAMSIZ`, without the terminating zero).
pub const MAX_NAME: usize = 15;
/// Offset of the union in `struct ifreq`.
const UNION: usize = 16;

/// `struct ifreq` on 64-bit Linux: a name and a union.
type Ifreq = [u8; 40];

/// TAP device. It is removed on drop.
#[derive(Debug)]
pub struct Tap {
    file: File,
    /// Socket used for interface requests.
    socket: OwnedFd,
    name: String,
}

/// Current interface state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceState {
    /// The interface is up.
    pub is_up: bool,
    /// MAC address.
    pub mac: Mac,
}

#[allow(unsafe_code, reason = "ioctl(2) has no safe wrapper")]
fn request<const OPCODE: Opcode>(fd: BorrowedFd<'_>, ifreq: &mut Ifreq) -> io::Result<()> {
    // SAFETY: all requests used here expect a pointer to `struct ifreq`, which has this size, and
    // don't read or write more.
    let request = unsafe { rustix::ioctl::Updater::<OPCODE, Ifreq>::new(ifreq) };
    // SAFETY: as above; the descriptor is borrowed for the call.
    unsafe { rustix::ioctl::ioctl(fd, request)? };
    Ok(())
}

impl Tap {
    /// Creates a new interface with this name. It is down and the carrier is not set.
    ///
    /// # Errors
    /// Returns a system error: `PermissionDenied` without CAP_NET_ADMIN, `NotFound` without the
    /// device file, `ResourceBusy` if the name is in use, `InvalidInput` if the name is invalid.
    pub fn create(name: &str) -> io::Result<Self> {
        let is_name = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b'%';
        let fits = (1..=MAX_NAME).contains(&name.len()) && name != "." && name != "..";
        if !fits || !name.bytes().all(is_name) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed();
        let mut options = File::options();
        let file = options.read(true).write(true).custom_flags(flags);
        let file = file.open("/dev/net/tun")?;
        let socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        let tap = Self {
            file,
            socket,
            name: name.to_owned(),
        };
        let mut ifreq = tap.ifreq();
        let flags = IFF_TAP | IFF_NO_PI | IFF_TUN_EXCL;
        ifreq[UNION..UNION + 2].copy_from_slice(&flags.to_ne_bytes());
        request::<TUNSETIFF>(tap.file.as_fd(), &mut ifreq)?;
        tap.set_carrier(false)?;
        Ok(tap)
    }

    /// Updates the interface name, because the user can change it.
    ///
    /// # Errors
    /// Returns a system error: `EBADFD` if the interface was deleted, `InvalidData` if the name is
    /// not UTF-8.
    pub fn find_name(&mut self) -> io::Result<()> {
        let mut ifreq = [0; size_of::<Ifreq>()];
        request::<TUNGETIFF>(self.file.as_fd(), &mut ifreq)?;
        let name = ifreq[..UNION].split(|byte| *byte == 0).next();
        let name = std::str::from_utf8(name.unwrap_or_default());
        let name = name.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        if name != self.name {
            tracing::info!(before = self.name, now = name, "the interface was renamed");
            name.clone_into(&mut self.name);
        }
        Ok(())
    }

    /// Interface name, as of the last check.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    fn ifreq(&self) -> Ifreq {
        let mut ifreq = [0; size_of::<Ifreq>()];
        ifreq[..self.name.len()].copy_from_slice(self.name.as_bytes());
        ifreq
    }

    /// Sets or clears the carrier.
    ///
    /// # Errors
    /// Returns a system error.
    #[allow(unsafe_code, reason = "ioctl(2) has no safe wrapper")]
    pub fn set_carrier(&self, on: bool) -> io::Result<()> {
        // SAFETY: the request expects a pointer to an int, which is only read.
        let request = unsafe { rustix::ioctl::Setter::<TUNSETCARRIER, i32>::new(i32::from(on)) };
        // SAFETY: as above; the descriptor is borrowed for the call.
        unsafe { rustix::ioctl::ioctl(self.file.as_fd(), request)? };
        Ok(())
    }

    /// Sets the MTU in bytes.
    ///
    /// # Errors
    /// Returns a system error.
    pub fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        let mut ifreq = self.ifreq();
        ifreq[UNION..UNION + 4].copy_from_slice(&i32::from(mtu).to_ne_bytes());
        request::<SIOCSIFMTU>(self.socket.as_fd(), &mut ifreq)
    }

    /// Sets the MAC address.
    ///
    /// # Errors
    /// Returns a system error.
    pub fn set_mac(&self, mac: Mac) -> io::Result<()> {
        let mut ifreq = self.ifreq();
        ifreq[UNION..UNION + 2].copy_from_slice(&ARPHRD_ETHER.to_ne_bytes());
        ifreq[UNION + 2..UNION + 8].copy_from_slice(&mac.0);
        request::<SIOCSIFHWADDR>(self.socket.as_fd(), &mut ifreq)
    }

    /// Sets the interface up, like `ip link set up`.
    ///
    /// # Errors
    /// Returns a system error.
    pub fn set_up(&self) -> io::Result<()> {
        let mut ifreq = self.ifreq();
        request::<SIOCGIFFLAGS>(self.socket.as_fd(), &mut ifreq)?;
        let flags = u16::from_ne_bytes([ifreq[UNION], ifreq[UNION + 1]]) | IFF_UP;
        ifreq[UNION..UNION + 2].copy_from_slice(&flags.to_ne_bytes());
        request::<SIOCSIFFLAGS>(self.socket.as_fd(), &mut ifreq)
    }

    /// Returns the current interface state, because the user can change it.
    ///
    /// # Errors
    /// Returns an error from [`Self::find_name`]; `ENODEV` if it's in a different network
    /// namespace.
    pub fn state(&mut self) -> io::Result<InterfaceState> {
        self.find_name()?;
        let mut ifreq = self.ifreq();
        request::<SIOCGIFFLAGS>(self.socket.as_fd(), &mut ifreq)?;
        let flags = u16::from_ne_bytes([ifreq[UNION], ifreq[UNION + 1]]);
        let mut ifreq = self.ifreq();
        request::<SIOCGIFHWADDR>(self.socket.as_fd(), &mut ifreq)?;
        let mut mac = [0; 6];
        mac.copy_from_slice(&ifreq[UNION + 2..UNION + 8]);
        Ok(InterfaceState {
            is_up: flags & IFF_UP != 0,
            mac: Mac(mac),
        })
    }

    /// Returns multicast groups joined by the interface.
    ///
    /// # Errors
    /// Returns an error if `/proc/net/dev_mcast` can't be read.
    pub fn multicast_macs(&self) -> io::Result<Vec<Mac>> {
        // Use the thread's file, because its network namespace may not be the same as for the
        // process.
        let text = std::fs::read_to_string("/proc/thread-self/net/dev_mcast")?;
        Ok(multicast_macs(&text, &self.name))
    }

    /// Reads the next frame sent by the host; `None` if there are no frames.
    ///
    /// # Errors
    /// Returns a system error.
    pub fn read(&self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.file).read(frame) {
            Ok(len) => Ok(Some(len)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // Interrupted by a signal, or the interface is down: there are no frames.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends a frame to the host. If the host doesn't accept it, the frame is lost, just like on a
    /// wire.
    pub fn write(&self, frame: &[u8]) {
        if let Err(error) = (&self.file).write(frame) {
            tracing::debug!(%error, "the host rejected a frame");
        }
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Parses `/proc/net/dev_mcast` and returns the groups for this interface: index, name, users,
/// global users, address.
fn multicast_macs(text: &str, name: &str) -> Vec<Mac> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let is_of = words.nth(1) == Some(name);
        let hex = words.nth(2).filter(|hex| is_of && hex.len() == 12)?;
        let number = u64::from_str_radix(hex, 16).ok()?;
        let [_, _, mac @ ..] = number.to_be_bytes();
        Some(Mac(mac))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_parsed_from_status_file() {
        let text = "\
2    eth0            1     0     333300000001
7    vnic0           1     0     01005e000001
7    vnic0           2     0     3333ff000102
8    vnic01          1     0     01005e0000fb
9    vnic0           1     0     xyz
";
        let macs = [Mac([1, 0, 0x5e, 0, 0, 1]), Mac([0x33, 0x33, 0xff, 0, 1, 2])];
        assert_eq!(multicast_macs(text, "vnic0"), macs);
        assert_eq!(multicast_macs(text, "vnic"), []);
    }

    #[test]
    fn invalid_interface_names_are_rejected() {
        for name in ["", "sixteen-letters-", "a b", "a/b", "vnic%d", ".", ".."] {
            let refused = Tap::create(name).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }
}
