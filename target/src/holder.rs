//! Finds the process that uses a locked file or an address, for error messages.
//!
//! If a process belongs to another user or has more capabilities, its files are only visible to
//! root with all of these capabilities, so the process may not be found. This does not access any
//! file system that might hang.

use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

/// A process that has a file open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pid: u32,
    name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// Suffix for an error message with the process, if it was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldBy(pub(crate) Option<Holder>);

impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(holder) => write!(f, ": in use by {holder}"),
            None => Ok(()),
        }
    }
}

/// Transport protocol of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

/// Returns another process that has a file open.
pub(crate) fn of_file(path: &Path) -> Option<Holder> {
    // We can't use `canonicalize`, because it would access the file system, which may hang.
    let path = std::path::absolute(path).ok()?;
    find(&[path])
}

/// Returns another process with a socket for this address.
pub(crate) fn of_address(address: SocketAddr, transport: Transport) -> Option<Holder> {
    let table = match (transport, address.is_ipv4()) {
        (Transport::Tcp, true) => "/proc/net/tcp",
        (Transport::Tcp, false) => "/proc/net/tcp6",
        (Transport::Udp, true) => "/proc/net/udp",
        (Transport::Udp, false) => "/proc/net/udp6",
    };
    let table = fs::read_to_string(table).ok()?;
    let sockets: Vec<_> = inodes(&table, address)
        .map(|inode| PathBuf::from(format!("socket:[{inode}]")))
        .collect();
    find(&sockets)
}

/// Returns the process that has any of these files open, using the names reported by the kernel.
fn find(files: &[PathBuf]) -> Option<Holder> {
    let own = std::process::id();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // Ignore this process, because it can use its own locks and ports.
    let mut others = pids.filter(|pid| *pid != own);
    others.find_map(|pid| {
        // The process may have exited, or belong to another user.
        let mut open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        open.find(|fd| fs::read_link(fd.path()).is_ok_and(|link| files.contains(&link)))?;
        let name = printable(&fs::read(format!("/proc/{pid}/comm")).ok()?);
        Some(Holder { pid, name })
    })
}

/// Returns a process name without control characters. A process can set any name, and messages are
/// printed to terminals.
fn printable(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    name.trim_end().replace(char::is_control, "?")
}

/// Returns the inodes of sockets for an address, from a table in proc_net(5).
fn inodes(table: &str, address: SocketAddr) -> impl Iterator<Item = u64> {
    let mut name = String::new();
    // The address is printed as 32-bit words in host byte order.
    let words: Vec<u8> = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    for word in words.chunks_exact(4) {
        // The kernel prints each word as an integer, but the octets are in network byte order.
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        name += &format!("{word:08X}");
    }
    name += &format!(":{:04X}", address.port());
    table.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_ascii_whitespace();
        let is_it = fields.nth(1)? == name;
        let inode = fields.nth(7)?.parse().ok()?;
        is_it.then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn process_is_found_by_open_file() {
        let name = format!("riserd-holder-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = fs::File::create(&path).unwrap();
        assert_eq!(of_file(&path), None, "this process does not count");
        let mut other = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::from(file))
            .spawn()
            .unwrap();
        let holder = of_file(&path).map(|holder| holder.to_string());
        other.kill().unwrap();
        other.wait().unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(holder, Some(format!("sleep (process {})", other.id())));
    }

    #[test]
    fn process_name_cannot_control_terminal() {
        for (name, expected) in [
            (&b"sleep\n"[..], "sleep"),
            (b"a\x1b[2J\nb\n", "a?[2J?b"),
            (b"a\xff\n", "a\u{fffd}"),
        ] {
            assert_eq!(printable(name), expected);
        }
    }

    #[test]
    fn sockets_are_found_by_address() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let table = fs::read_to_string("/proc/net/tcp").unwrap();
        assert_eq!(inodes(&table, address).count(), 1);
        let v6 = "  sl  local_address\n   0: 00000000000000000000000001000000:10D7 \
                  00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000 \
                  0 0 4711 2\n";
        let found: Vec<_> = inodes(v6, "[::1]:4311".parse().unwrap()).collect();
        assert_eq!(found, [4711]);
    }
}
