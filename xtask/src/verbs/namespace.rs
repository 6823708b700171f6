//! A place with a network interface and a folder `/dev/infiniband`, without any right.
//!
//! libfabric makes connections only at interfaces other than loopback, and UCX opens a device only
//! where its file in `/dev/infiniband` is a character device, though it never opens that file. Both
//! are made in namespaces of a user, a network and mounts, in which any user is root.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Failure, sh};

/// Addresses of the interface, of which each program of a case has one.
pub(super) const ADDRESSES: [Ipv4Addr; 2] =
    [Ipv4Addr::new(10, 17, 0, 1), Ipv4Addr::new(10, 17, 0, 2)];

/// Longest time that the namespaces take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is made: an interface of a kind that the kernel has, and another `/dev` in the folder `$1`
/// with what programs need. The arguments after it are the addresses.
const SETUP: &str = r#"
set -e
dev=$1
shift
ip link set lo up
ip link add rdma0 type dummy 2>/dev/null || ip link add rdma0 type bridge 2>/dev/null ||
    ip link add rdma0 type veth
for address; do ip address add "$address/32" dev rdma0; done
# Multicast groups of ibacm are those of IPv6, which a kernel may be without.
for n in 1 2 3; do ip address add "fd17::$n/64" dev rdma0 nodad || true; done
ip link set rdma0 up
mount -t tmpfs -o mode=755 none "$dev"
mkdir "$dev/shm" "$dev/infiniband"
chmod 1777 "$dev/shm"
for name in null zero full random urandom tty; do
    : >"$dev/$name"
    mount --bind "/dev/$name" "$dev/$name"
done
ln -s /proc/self/fd "$dev/fd"
ln -s ../null "$dev/infiniband/uverbs0"
ln -s ../null "$dev/infiniband/uverbs1"
mount --rbind "$dev" /dev
echo ready
exec sleep infinity
"#;

/// The namespaces. They end with the value.
pub(super) struct Namespace {
    holder: std::process::Child,
}

impl Namespace {
    /// Makes the namespaces, by a command that has the rights of the programs to come (`as_user`).
    /// `folder` is theirs, and empty.
    pub(super) fn new(
        as_user: impl FnOnce(Command) -> Command,
        folder: &Path,
        log: &Path,
    ) -> Result<Self, Failure> {
        let mut unshare = sh::cmd("unshare", ["--user", "--map-root-user", "--net", "--mount"]);
        unshare.args(["--", "sh", "-c", SETUP, "sh"]).arg(folder);
        unshare.args(ADDRESSES.map(|address| address.to_string()));
        let mut command = as_user(unshare);
        let out = fs::File::create(log)?;
        command
            .stdin(Stdio::null())
            .stderr(out.try_clone()?)
            .stdout(out)
            .process_group(0);
        let holder = command.spawn().map_err(|e| format!("unshare: {e}"))?;
        let mut namespace = Self { holder };
        let until = Instant::now() + PATIENCE;
        loop {
            let said = fs::read_to_string(log).unwrap_or_default();
            if said.lines().any(|line| line == "ready") {
                return Ok(namespace);
            }
            if namespace.holder.try_wait()?.is_some() || Instant::now() > until {
                let why = said.lines().next().unwrap_or("no answer");
                return Err(format!("no namespaces of a user's own: {why}").into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A command within them, in a folder, since a process that enters starts at the root of the
    /// file system.
    pub(super) fn enter(&self, folder: &Path, command: &Command) -> Command {
        let target = self.holder.id().to_string();
        let folder = format!("--wdns={}", folder.display());
        let enter = [
            "--target",
            &target,
            "--user",
            "--net",
            "--mount",
            "--preserve-credentials",
            &folder,
            "--",
        ];
        sh::behind(sh::cmd("nsenter", enter), command)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
