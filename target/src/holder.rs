//! The process that has something we want, for error messages: a file that is locked, or an
//! address that is in use.
//!
//! The kernel shows the files of processes of other users, or with more capabilities, to root with
//! all of them alone, so there may be no name. Nothing here asks a file system, which might hang.

use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

/// Process that holds something open.
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

/// The end of a message: which process has what it is about, if that can be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldBy(pub(crate) Option<Holder>);

impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(holder) => write!(f, ": {holder} has it"),
            None => Ok(()),
        }
    }
}

/// The transport of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

/// Another process that has a file open.
pub(crate) fn of_file(path: &Path) -> Option<Holder> {
    // Not canonicalized: that asks the file system, which may be the one that hangs.
    let path = std::path::absolute(path).ok()?;
    find(&[path])
}

/// Another process that has a socket at an address.
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

/// The process that has one of these files open, by the names that the kernel shows.
fn find(files: &[PathBuf]) -> Option<Holder> {
    let own = std::process::id();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // One's own descriptors are never the obstacle: locks and ports of this process are ours to
    // use.
    let mut others = pids.filter(|pid| *pid != own);
    others.find_map(|pid| {
        // Of a process that has ended meanwhile, or of another user, there is nothing to see.
        let mut open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        open.find(|fd| fs::read_link(fd.path()).is_ok_and(|link| files.contains(&link)))?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        let name = name.trim_end().to_owned();
        Some(Holder { pid, name })
    })
}

/// The inodes of the sockets at an address, in a table of proc_net(5).
fn inodes(table: &str, address: SocketAddr) -> impl Iterator<Item = u64> {
    let mut name = String::new();
    // Words of 32 bits in the host's order.
    let words: Vec<u8> = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    for word in words.chunks_exact(4) {
        // The kernel prints the words as its integers, while the octets are in network order.
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
    fn a_process_is_named_by_what_it_has_open() {
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
    fn sockets_are_found_by_their_addresses() {
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
