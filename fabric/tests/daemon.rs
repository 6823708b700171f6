//! Tests `riser-sa` with requests from hosts, the kernel and programs.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use riser_fabric::ls::{Body, Message, PathUse, Refused, Resolve};
use riser_fabric::netlink::LS_GROUP;
use riser_fabric::sa::client::{ClientConfig, Request, SaClient, SaError, SaEvent, SaResponse};
use riser_fabric::sa::wire::SaMethod;
use riser_fabric::sa::wire::inform::{InformInfo, Trap};
use riser_fabric::sa::wire::node::{NodeMask, NodeRecord};
use riser_fabric::sa::wire::path::PathRecord;
use riser_fabric::sa::wire::service::{ServiceMask, ServiceRecord};
use riser_testkit::programs::{missing, skip};
use riser_testkit::{eventually, eventually_some};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{Gid, Provider as _};
use riser_transport::wire::mad::MadClass;
use rustix::io::Errno;
use rustix::net::netlink::{SocketAddrNetlink, USERSOCK};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};

const PATIENCE: Duration = Duration::from_secs(10);

fn addr(last: u8) -> IpAddr {
    [127, 0, 67, last].into()
}

/// The program, with a separate directory.
struct Daemon {
    process: Child,
    dir: PathBuf,
}

impl Daemon {
    /// Starts the program at an address, optionally with a netlink socket.
    fn start(last: u8, netlink: Option<OwnedFd>) -> Self {
        Self::begin(last, netlink, false)
    }

    /// Same as [`Self::start`], but optionally with a state file. Existing files in the directory
    /// are preserved.
    fn begin(last: u8, netlink: Option<OwnedFd>, has_state: bool) -> Self {
        let dir = Self::directory(last);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("hosts"), "127.0.67.99 far # a host\n").unwrap();
        // Like a service manager, pass sockets starting at descriptor 3.
        let script = match &netlink {
            Some(_) => "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0 </dev/null",
            None => "exec \"$0\" --no-netlink \"$@\"",
        };
        let process = Command::new("sh")
            .args(["-c", script, env!("CARGO_BIN_EXE_riser-sa")])
            .args(["--addr", &addr(last).to_string()])
            .arg("--socket")
            .arg(dir.join("socket"))
            .arg("--hosts")
            .arg(dir.join("hosts"))
            .args(
                has_state
                    .then(|| "--state".into())
                    .into_iter()
                    .chain(has_state.then(|| dir.join("state"))),
            )
            .stdin(netlink.map_or_else(Stdio::null, Stdio::from))
            .stderr(File::create(dir.join("log")).unwrap())
            .spawn()
            .unwrap();
        let daemon = Self { process, dir };
        eventually("riser-sa is running", PATIENCE, || {
            daemon.log().contains("is running")
        });
        daemon
    }

    fn directory(last: u8) -> PathBuf {
        std::env::temp_dir().join(format!("riser-sa-{}-{last}", std::process::id()))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    fn socket(&self) -> String {
        self.dir.join("socket").display().to_string()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

/// A host that queries the administrator.
struct Host {
    device: Roce,
    client: SaClient,
    /// Received notices.
    notices: Vec<(Trap, Gid)>,
}

impl Host {
    fn open(last: u8, administrator: u8) -> Self {
        let mut device = Roce::open(&RoceConfig::new(addr(last))).unwrap();
        device.register_agent(MadClass::SubnetAdm).unwrap();
        let config = ClientConfig {
            timeout: Duration::from_millis(500),
            ..ClientConfig::new(addr(administrator).into())
        };
        Self {
            device,
            client: SaClient::new(config, u32::from(last) << 16),
            notices: Vec::new(),
        }
    }

    fn turn(&mut self) -> Option<SaEvent> {
        let now = Instant::now();
        self.device.progress(now);
        while let Some((from, mad)) = self.device.poll_mad() {
            self.client.handle_mad(now, from.into(), &mad);
        }
        self.client.handle_timeout(now);
        while let Some(mad) = self.client.poll_transmit() {
            let administrator = self.client.config().administrator;
            self.device.send_mad(administrator.ip(), &mad).unwrap();
        }
        self.device.progress(now);
        self.client.poll_event()
    }

    fn query(&mut self, request: Request) -> Result<SaResponse, SaError> {
        let query = self.client.query(Instant::now(), request).unwrap();
        eventually_some("response received", PATIENCE, || match self.turn() {
            Some(SaEvent::Completed { id, result }) if id == query => Some(result),
            Some(SaEvent::Notice(notice)) => {
                self.notices.extend(notice.event());
                None
            }
            _ => None,
        })
    }
}

#[test]
fn hosts_query_over_queue_pair_1() {
    let _daemon = Daemon::start(1, None);
    let mut host = Host::open(2, 1);
    let mut other = Host::open(3, 1);
    let [sgid, dgid] = [2, 3].map(|last| Gid::from(addr(last)));
    let path = host.query(Request::path(sgid, dgid, None, None)).unwrap();
    let path: PathRecord = path.record().unwrap();
    assert_eq!((path.sgid(), path.dgid(), path.mtu.code()), (sgid, dgid, 5));
    // The first host finds a service of the second host.
    let subscription = Request::inform(&InformInfo::new(Some(Trap::GidInService), true));
    host.query(subscription).unwrap();
    let record = ServiceRecord::new(0x1234, dgid).with_name("riser.storage");
    other.query(Request::set_service(&record)).unwrap();
    let find = Request::service(SaMethod::Get, ServiceMask::NAME, &record);
    assert_eq!(host.query(find.clone()).unwrap().record(), Some(record));
    // The second host came into service after the subscription.
    let delete = Request::service(SaMethod::Delete, ServiceMask::ALL, &record);
    other.query(delete).unwrap();
    assert_eq!(host.query(find), Err(SaError::Status(0x0300)));
    // A table has several segments.
    let wanted = zerocopy::FromZeros::new_zeroed();
    let nodes = Request::new::<NodeRecord>(SaMethod::GetTable, NodeMask::empty().bits(), &wanted);
    let nodes = host.query(nodes).unwrap();
    assert_eq!(nodes.records::<NodeRecord>().count(), 3);
    assert_eq!(host.notices, [(Trap::GidInService, dgid)]);
}

#[test]
fn client_times_out_without_administrator() {
    let mut host = Host::open(4, 5);
    let request = Request::path(addr(4).into(), addr(6).into(), None, None);
    assert_eq!(host.query(request), Err(SaError::TimedOut));
}

/// Opens a netlink socket in the group of local services, using a protocol for communication
/// between programs that every kernel has. It replaces the RDMA protocol, which requires the
/// kernel's InfiniBand stack. Joining a group requires CAP_NET_ADMIN.
fn netlink() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags,
        Some(USERSOCK),
    );
    let socket = socket?;
    bind(&socket, &SocketAddrNetlink::new(0, LS_GROUP))?;
    Ok(socket)
}

/// Sends a request to the group, like the kernel does, and returns the response.
fn query_group(kernel: &OwnedFd, sequence: u32, body: Body) -> Body {
    let message = Message {
        sequence,
        port: 0,
        body,
    };
    let group = SocketAddrNetlink::new(0, LS_GROUP);
    // The message is delivered to the group, and to the kernel, which rejects this protocol.
    let sent = sendto(kernel, &message.emit(), SendFlags::empty(), &group);
    assert!(matches!(sent, Ok(_) | Err(Errno::CONNREFUSED)), "{sent:?}");
    let mut buffer = [0; 4096];
    eventually_some("response received", PATIENCE, || {
        let (len, _) = recv(kernel, &mut buffer[..], RecvFlags::DONTWAIT).ok()?;
        let message = Message::parse(&buffer[..len]).unwrap();
        let is_response = matches!(message.body, Body::Resolved(_) | Body::IpResolved(_));
        (is_response && message.sequence == sequence).then_some(message.body)
    })
}

#[test]
fn kernel_queries_over_netlink() {
    let (kernel, for_daemon) = match (netlink(), netlink()) {
        (Ok(kernel), Ok(for_daemon)) => (kernel, for_daemon),
        (Err(error), _) | (_, Err(error)) => {
            skip("groups of netlink", &error.to_string());
            return;
        }
    };
    let _daemon = Daemon::start(7, Some(for_daemon));
    let resolve = Resolve {
        device: "rxe0".to_owned(),
        port: 1,
        path_use: PathUse::All,
        service_id: Some(0x0106_1234),
        dgid: Some(addr(8).into()),
        sgid: Some(addr(7).into()),
        traffic_class: Some(0),
        pkey: Some(0xffff),
        qos_class: Some(0),
    };
    let Body::Resolved(Ok(paths)) = query_group(&kernel, 1, Body::Resolve(resolve.clone())) else {
        panic!("no path");
    };
    assert_eq!(paths.len(), 1);
    assert_eq!(paths[0].record.dgid(), addr(8).into());
    assert_eq!(paths[0].record.service_id.get(), 0x0106_1234);
    let strange = Resolve {
        sgid: Some(addr(9).into()),
        ..resolve
    };
    let refused = query_group(&kernel, 2, Body::Resolve(strange));
    assert_eq!(refused, Body::Resolved(Err(Refused)));
    let question = Body::IpResolve {
        interface: 1,
        addr: addr(8),
    };
    let gid = query_group(&kernel, 3, question);
    assert_eq!(gid, Body::IpResolved(Ok(addr(8).into())));
}

#[test]
fn rejecting_kernel_does_not_flood_log() {
    let Ok(for_daemon) = netlink() else {
        skip("groups of netlink", "it takes CAP_NET_ADMIN");
        return;
    };
    let daemon = Daemon::start(27, Some(for_daemon));
    for sequence in 1..=50 {
        // This socket sends a request and is closed.
        let body = Body::IpResolve {
            interface: 1,
            addr: addr(8),
        };
        let message = Message {
            sequence,
            port: 0,
            body,
        };
        let group = SocketAddrNetlink::new(0, LS_GROUP);
        let kernel = netlink().unwrap();
        let sent = sendto(&kernel, &message.emit(), SendFlags::empty(), &group);
        assert!(matches!(sent, Ok(_) | Err(Errno::CONNREFUSED)), "{sent:?}");
    }
    let lines = || {
        daemon
            .log()
            .matches("cannot send a response to the kernel")
            .count()
    };
    eventually("it is said", PATIENCE, || lines() > 0);
    // The last request receives a response, so all previous requests have been processed.
    let kernel = netlink().unwrap();
    let question = Body::IpResolve {
        interface: 1,
        addr: addr(8),
    };
    let response = query_group(&kernel, 100, question);
    assert_eq!(response, Body::IpResolved(Ok(addr(8).into())));
    assert_eq!(lines(), 1, "{}", daemon.log());
}

#[test]
fn programs_wait_without_free_descriptors() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    use std::io::{Read as _, Write as _};

    let daemon = Daemon::start(28, None);
    let pid = daemon.process.id();
    let is_free = |fd: &u64| !std::path::Path::new(&format!("/proc/{pid}/fd/{fd}")).exists();
    let free = (0..).find(is_free).unwrap();
    let limit = |most: u64| {
        let rlimit = Rlimit {
            current: Some(most),
            maximum: Some(1024),
        };
        let process = Some(Pid::from_child(&daemon.process));
        prlimit(process, Resource::Nofile, rlimit).unwrap();
    };
    limit(free);
    // Processor time, in ticks of 10 ms: fields 12 and 13 after the name.
    let used = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields = stat.rsplit(')').next().unwrap().split_whitespace();
        let times = fields.skip(11).take(2).map(|n| n.parse::<u64>().unwrap());
        times.sum::<u64>()
    };
    let before = used();
    let mut program = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    program
        .write_all(&[1, 3, 0, 1, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0])
        .unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    assert!(used() - before < 50, "{} ticks", used() - before);
    let lines = daemon.log().matches("cannot accept programs").count();
    assert_eq!(lines, 1, "{}", daemon.log());
    limit(1024);
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut response = [0; 160];
    program.read_exact(&mut response).unwrap();
    assert_eq!(response[..4], [1, 0x83, 0, 1]);
}

#[test]
fn damaged_state_is_moved_aside() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    // Possible result of a power cut.
    let dir = Daemon::directory(29);
    std::fs::create_dir_all(&dir).unwrap();
    let (file, bad, new) = (
        dir.join("state"),
        dir.join("state.bad"),
        dir.join("state.new"),
    );
    std::fs::write(&file, [0; 283]).unwrap();
    // A temporary file of an earlier process, which is a link to another file.
    let other = dir.join("other");
    std::fs::write(&other, "other").unwrap();
    symlink(&other, &new).unwrap();
    let mut daemon = Daemon::begin(29, None, true);
    assert!(daemon.log().contains("state.bad"), "{}", daemon.log());
    assert_eq!(std::fs::read(&bad).unwrap(), [0; 283]);
    let pid = rustix::process::Pid::from_child(&daemon.process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.process.wait().unwrap().success());
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "other");
    let metadata = std::fs::symlink_metadata(&file).unwrap();
    assert!(metadata.is_file() && metadata.permissions().mode() & 0o777 == 0o600);
}

#[test]
fn last_state_option_takes_precedence() {
    // The service's unit sets this option, and the configured options may set it again.
    let dir = Daemon::directory(30);
    std::fs::create_dir_all(&dir).unwrap();
    let [none, other] = ["none", "other"].map(|name| dir.join(name).display().to_string());
    // The file that is read is rejected.
    std::fs::write(&other, "another program's").unwrap();
    let addr = addr(30).to_string();
    let said = refused(&["--state", &none, "--state", &other, "--addr", &addr]);
    assert!(said.contains(&other), "{said}");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Runs the program, which must fail, and returns its standard error.
fn refused(args: &[&str]) -> String {
    let program = Command::new(env!("CARGO_BIN_EXE_riser-sa"))
        .arg("--no-netlink")
        .args(args)
        .output()
        .unwrap();
    assert!(!program.status.success(), "{args:?}");
    String::from_utf8_lossy(&program.stderr).into_owned()
}

#[test]
fn startup_errors_are_reported() {
    use std::os::unix::fs::PermissionsExt as _;

    // Records would contain an address that belongs to no host.
    for addr in ["0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "host"] {
        let said = refused(&["--addr", addr]);
        assert!(
            said.contains("--addr") && said.contains("address"),
            "{said}"
        );
    }
    let said = refused(&["--addr", "192.0.2.77"]);
    assert!(said.contains("no interface"), "{said}");
    let daemon = Daemon::start(21, None);
    let said = refused(&["--addr", &addr(21).to_string()]);
    assert!(said.contains("UDP port 4791"), "{said}");
    let (own, other) = (daemon.socket(), addr(22).to_string());
    let said = refused(&["--addr", &other, "--socket", &own]);
    assert!(said.contains(&own) && said.contains("riser-sa"), "{said}");
    let file = daemon.dir.join("hosts").display().to_string();
    let said = refused(&["--addr", &other, "--socket", &file]);
    assert!(said.contains("not a socket"), "{said}");
    // A socket of the service manager that does not accept connections.
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let program = Command::new("sh")
        .args([
            "-c",
            "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0 </dev/null",
        ])
        .args([env!("CARGO_BIN_EXE_riser-sa"), "--addr", &other])
        .stdin(OwnedFd::from(datagrams))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&program.stderr);
    assert!(said.contains("ListenStream"), "{said}");
    // Programs of all users may send requests.
    let mode = std::fs::metadata(&own).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
}

#[test]
fn registrations_survive_restart() {
    let mut daemon = Daemon::begin(23, None, true);
    let mut host = Host::open(24, 23);
    let mut record = ServiceRecord::new(0x1234, addr(24).into());
    record.lease = 600.into();
    host.query(Request::set_service(&record)).unwrap();
    // An upgrade restarts the program.
    let pid = rustix::process::Pid::from_child(&daemon.process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.process.wait().unwrap().success());
    let file = daemon.dir.join("state");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 11 + 16 + 256);
    std::fs::remove_file(daemon.dir.join("log")).unwrap();
    let again = Daemon::begin(23, None, true);
    let find = Request::service(SaMethod::Get, ServiceMask::SERVICE_ID, &record);
    let lease = eventually_some("the service is back", PATIENCE, || {
        let response = host.query(find.clone()).ok()?;
        Some(response.record::<ServiceRecord>().unwrap().lease.get())
    });
    assert!((590..=600).contains(&lease), "{lease}");
    // A file of another program is not modified.
    let hosts = again.dir.join("hosts").display().to_string();
    let said = refused(&["--addr", &addr(25).to_string(), "--state", &hosts]);
    assert!(said.contains(&hosts), "{said}");
}

#[test]
fn heavy_user_does_not_disconnect_others() {
    use std::io::{Read as _, Write as _};

    if let Some(tool) = missing(&["setpriv", "/usr/bin/python3"]) {
        skip("another user", &format!("{tool} is not installed"));
        return;
    }
    if !rustix::process::geteuid().is_root() {
        skip("another user", "it takes root");
        return;
    }
    let daemon = Daemon::start(26, None);
    let mut ours = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    let script = "import socket, sys\n\
        all = [socket.socket(socket.AF_UNIX) for _ in range(200)]\n\
        for one in all: one.connect(sys.argv[1])\n\
        ask = bytes([1, 3, 0, 1, 0, 0, 0, 16]) + bytes(8)\n\
        all[-1].send(ask)\n\
        print(len(all[-1].recv(1000)))\n";
    let other = Command::new("setpriv")
        .args([
            "--reuid=65534",
            "--clear-groups",
            "/usr/bin/python3",
            "-c",
            script,
        ])
        .arg(daemon.socket())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&other.stdout), "160\n", "{other:?}");
    ours.write_all(&[1, 3, 0, 1, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0])
        .unwrap();
    let mut response = [0; 160];
    ours.read_exact(&mut response).unwrap();
    assert_eq!(response[..4], [1, 0x83, 0, 1]);
}

#[test]
fn missing_kernel_rdma_is_reported() {
    let rdma = rustix::net::netlink::RDMA;
    let flags = SocketFlags::CLOEXEC;
    if socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(rdma)).is_ok() {
        skip("a kernel without RDMA", "this kernel has it");
        return;
    }
    let program = Command::new(env!("CARGO_BIN_EXE_riser-sa"))
        .args(["--addr", &addr(10).to_string()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&program.stderr);
    assert!(!program.status.success());
    assert!(
        said.contains("ib_core") && said.contains("--no-netlink"),
        "{said}"
    );
}

/// Debian's `ib_acme`, which normally queries `ibacm`.
#[test]
fn ib_acme_queries_over_socket() {
    if let Some(tool) = missing(&["ib_acme"]) {
        skip(
            "ib_acme",
            &format!("{tool} is not installed (package ibacm)"),
        );
        return;
    }
    let daemon = Daemon::start(11, None);
    let acme = |args: &[&str]| {
        let done = Command::new("ib_acme")
            .args(args)
            .args(["-S", &daemon.socket()])
            .output()
            .unwrap();
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    let (own, other) = (addr(11).to_string(), addr(12).to_string());
    // By address, with and without a source, and verified by the administrator.
    let said = acme(&["-f", "i", "-s", &own, "-d", &other, "-v"]);
    for line in [
        "dgid: ::ffff:127.0.67.12",
        "sgid: ::ffff:127.0.67.11",
        "hop limit: 64",
        "mtu: 5",
        "SA verification: success",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let said = acme(&["-f", "i", "-d", &other, "-v", "-c"]);
    assert!(said.contains(&format!("Source: {own}")), "{said}");
    assert!(said.contains("SA verification: success"), "{said}");
    // By GID and by name.
    let gids = ["::ffff:127.0.67.11", "::ffff:127.0.67.12"];
    let said = acme(&["-f", "g", "-s", gids[0], "-d", gids[1], "-v"]);
    assert!(said.contains("SA verification: success"), "{said}");
    let said = acme(&["-f", "n", "-d", "far", "-v"]);
    assert!(said.contains("dgid: ::ffff:127.0.67.99"), "{said}");
    let said = acme(&["-f", "i", "-d", "224.0.0.1"]);
    assert!(said.contains("ib_acm_resolve_ip failed"), "{said}");
    // Endpoints and counters.
    let said = acme(&["-e"]);
    assert!(said.contains(",riser-sa,127.0.67.11"), "{said}");
    let said = acme(&["-P"]);
    assert!(said.contains("Resolve Count"), "{said}");
}
