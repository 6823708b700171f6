//! Implements [`World`] using the files, devices and addresses of this host, and the sessions of
//! the daemon.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use riser_admin_api::live::Live;
use riser_config::mounts;

use crate::rules::port_guid;
use crate::world::{BlockDevice, Medium, Session, World};

/// Provides daemon state that can change at any time.
pub trait LiveSource: Send {
    /// Returns the current initiator sessions.
    fn sessions(&self) -> Vec<Session>;

    /// Returns the counters since the daemon was started.
    fn live(&self) -> Live;
}

/// Used if there is no daemon.
impl LiveSource for () {
    fn sessions(&self) -> Vec<Session> {
        Vec::new()
    }

    fn live(&self) -> Live {
        Live::default()
    }
}

/// This host and its daemon.
pub struct Host {
    daemon: Box<dyn LiveSource>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

impl Host {
    /// Creates a host that uses this daemon for sessions and counters.
    #[must_use]
    pub fn new(daemon: impl LiveSource + 'static) -> Self {
        Self {
            daemon: Box::new(daemon),
        }
    }
}

impl World for Host {
    fn medium(&self, path: &str) -> Medium {
        let path = Path::new(path);
        if let Some(mount) = mounts::find(path) {
            // This might be our own mount, and then this thread would wait for itself to respond.
            tracing::warn!("refused: {}", mounts::why(path, &mount));
            return Medium::None;
        }
        let Ok(found) = fs::metadata(path) else {
            let parent = path.parent();
            return match parent.is_some_and(Path::is_dir) {
                true => Medium::Vacant,
                false => Medium::None,
            };
        };
        let kind = found.file_type();
        if kind.is_file() {
            Medium::File { size: found.len() }
        } else if kind.is_dir() {
            Medium::Directory
        } else if kind.is_block_device() {
            block_device(found.rdev()).map_or(Medium::None, Medium::Device)
        } else {
            Medium::None
        }
    }

    fn port_addresses(&self, port: &str) -> Vec<IpAddr> {
        let Some(gid) = gid(port) else {
            return Vec::new();
        };
        let interfaces = own_interfaces();
        let address = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
        if interfaces.iter().any(|(_, own)| *own == address) {
            return vec![address];
        }
        // A link-local GID belongs to an interface, and we serve the other addresses of this
        // interface.
        let name = interface_of(gid);
        let of_it = interfaces
            .into_iter()
            .filter(|(interface, _)| Some(interface) == name.as_ref());
        of_it.map(|(_, address)| address).collect()
    }

    fn sessions(&self) -> Vec<Session> {
        self.daemon.sessions()
    }

    fn live(&self) -> Live {
        self.daemon.live()
    }

    fn uptime(&self) -> Duration {
        let text = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let seconds = text.split(' ').next().and_then(|word| word.parse().ok());
        seconds.map_or(Duration::ZERO, Duration::from_secs_f64)
    }

    fn cpus(&self) -> u32 {
        std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
    }
}

/// Same as [`Host`], but for a configuration that may be for a different host. If a device doesn't
/// exist here, we use its path to guess the type, and SRP ports use the address contained in the
/// name.
#[derive(Debug)]
pub struct OtherHost(Host);

impl Default for OtherHost {
    fn default() -> Self {
        Self(Host::new(()))
    }
}

impl World for OtherHost {
    fn medium(&self, path: &str) -> Medium {
        match self.0.medium(path) {
            Medium::None | Medium::Vacant if is_device(path) => Medium::Device(BlockDevice {
                size: 0,
                block_size: 512,
                name: path.trim_start_matches("/dev/").to_owned(),
                major: 0,
                minor: 0,
            }),
            Medium::None => Medium::Vacant,
            known => known,
        }
    }

    fn port_addresses(&self, port: &str) -> Vec<IpAddr> {
        let here = self.0.port_addresses(port);
        if !here.is_empty() {
            return here;
        }
        let address = gid(port).map(|gid| match gid.is_unicast_link_local() {
            // If the GID is link-local, the IP address of the port is only known on its own host.
            true => placeholder(gid),
            false => gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4),
        });
        address.into_iter().collect()
    }

    fn sessions(&self) -> Vec<Session> {
        Vec::new()
    }

    fn live(&self) -> Live {
        Live::default()
    }

    fn uptime(&self) -> Duration {
        self.0.uptime()
    }

    fn cpus(&self) -> u32 {
        self.0.cpus()
    }
}

/// Network to use for example addresses (RFC 5737), which is never used by a real host.
const EXAMPLES: [u8; 3] = [192, 0, 2];

/// Returns a placeholder address for an unknown port. Ports of the same adapter will get different
/// addresses.
fn placeholder(gid: Ipv6Addr) -> IpAddr {
    let [a, b, c] = EXAMPLES;
    let host = 1 + (gid.to_bits() % 254) as u8;
    IpAddr::from([a, b, c, host])
}

/// Returns true if this is a placeholder address.
pub(crate) fn is_placeholder(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V4(ip) if ip.octets().starts_with(&EXAMPLES))
}

/// Returns true if this path should be a device. Note that this also matches some in-memory files.
fn is_device(path: &str) -> bool {
    path.starts_with("/dev/") && !path.starts_with("/dev/shm/")
}

/// Returns the interfaces of this host, with one entry for each address.
fn own_interfaces() -> Vec<(String, IpAddr)> {
    let addresses = match getifaddrs() {
        Ok(addresses) => addresses,
        Err(error) => {
            tracing::warn!(%error, "cannot list this host's addresses");
            return Vec::new();
        }
    };
    let named = addresses.filter_map(|entry| {
        let address = entry.address?;
        let v4 = address.as_sockaddr_in().map(|at| IpAddr::V4(at.ip()));
        let v6 = || address.as_sockaddr_in6().map(|at| IpAddr::V6(at.ip()));
        Some((entry.interface_name, v4.or_else(v6)?))
    });
    named.collect()
}

/// Returns the GID of an SRP target port: either `0x` and 32 digits, or the GUID of a link-local
/// GID.
fn gid(port: &str) -> Option<Ipv6Addr> {
    if let Some(guid) = port_guid(port) {
        let prefix = 0xfe80_u128 << 112;
        return Some(Ipv6Addr::from_bits(prefix | u128::from(guid)));
    }
    let digits = port.strip_prefix("0x").filter(|d| d.len() == 32)?;
    u128::from_str_radix(digits, 16)
        .ok()
        .map(Ipv6Addr::from_bits)
}

/// Returns the interface with this IPv6 address.
fn interface_of(address: Ipv6Addr) -> Option<String> {
    let digits = format!("{:032x}", address.to_bits());
    let list = fs::read_to_string("/proc/net/if_inet6").ok()?;
    let mut lines = list
        .lines()
        .map(|l| l.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|words| words.first() == Some(&digits.as_str()))?;
    line.last().map(|name| (*name).to_owned())
}

fn block_device(number: u64) -> Option<BlockDevice> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let dir = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let read = |path: &Path| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    // A partition uses the queue of its disk.
    let queue = [dir.join("queue"), dir.parent()?.join("queue")];
    let block_size = queue
        .iter()
        .find_map(|q| read(&q.join("logical_block_size")))?;
    Some(BlockDevice {
        size: read(&dir.join("size"))? * 512,
        block_size: block_size as u32,
        name: dir.file_name()?.to_string_lossy().into_owned(),
        major,
        minor,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_paths_have_their_type() {
        let host = Host::new(());
        assert_eq!(host.medium("/"), Medium::Directory);
        assert_eq!(host.medium("/nonexistent-file"), Medium::Vacant);
        assert_eq!(host.medium("/nonexistent/file"), Medium::None);
        assert_eq!(host.medium("/dev/null"), Medium::None);
        let file = std::env::temp_dir().join(format!("configfs-medium-{}", std::process::id()));
        fs::write(&file, b"four").unwrap();
        let found = host.medium(file.to_str().unwrap());
        fs::remove_file(&file).unwrap();
        assert_eq!(found, Medium::File { size: 4 });
    }

    #[test]
    fn other_host_trusts_configuration() {
        let there = OtherHost::default();
        assert_eq!(there.medium("/nonexistent/file"), Medium::Vacant);
        assert!(matches!(
            there.medium("/dev/nonexistent"),
            Medium::Device(_)
        ));
        let port = "0x00000000000000000000ffffc0000201";
        let address: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(there.port_addresses(port), [address]);
        let unknown = there.port_addresses("0002:c903:00a1:b2c3");
        assert!(matches!(unknown.as_slice(), [address] if is_placeholder(address)));
    }

    #[test]
    fn gid_resolves_to_address() {
        let host = Host::new(());
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let gid = "0x00000000000000000000ffff7f000001";
        assert_eq!(host.port_addresses(gid), [loopback]);
        assert!(host.port_addresses("0002:c903:00a1:b2c3").is_empty());
        assert!(host.port_addresses("nonsense").is_empty());
        assert_eq!(
            super::gid("0002:c903:00a1:b2c3"),
            Some("fe80::2:c903:a1:b2c3".parse().unwrap())
        );
    }
}
