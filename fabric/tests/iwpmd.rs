//! Runs `riser-iwpmd` and rdma-core's `iwpmd` at the two ends of a link, and both with a simulated
//! kernel that replaces netlink.
//!
//! Each end is a network namespace, which requires root.

use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use riser_fabric::iwpm::message::{Connection, Request, Response};
use riser_fabric::iwpm::wire::{MessageType, WireMessage};
use riser_fabric::iwpm::{ABI, LIBRARY, NO_PORT_MAP};
use riser_fabric::netlink::message::{Header, Kind, Message, Messages, Writer};
use riser_testkit::skip::skip;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::{Domain, SockAddr, Socket, Type};

const OURS: &str = env!("CARGO_BIN_EXE_riser-iwpmd");
const THEIRS: &str = "/usr/sbin/iwpmd";

/// Client of the kernel's connection manager.
const IWCM: u8 = 2;

/// Timeout for a daemon's response on this machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ip(words: &str) -> bool {
    let status = Command::new("ip").args(words.split(' ')).status();
    status.is_ok_and(|status| status.success())
}

/// Two hosts connected by a link: 10.98.0.1 and fd98::1, 10.98.0.2 and fd98::2.
struct Link {
    names: [String; 2],
    directory: PathBuf,
    shim: PathBuf,
}

impl Link {
    /// Returns `None`, and logs a skipped test, if this is not possible.
    fn new(test: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if !Path::new(THEIRS).exists() {
            skip(test, "iwpmd (Debian package rdma-core) is missing");
            return None;
        }
        let name = format!("iwpm-{}-{number}", std::process::id());
        let names = ["a", "b"].map(|end| format!("{name}{end}"));
        if !names.iter().all(|name| ip(&format!("netns add {name}"))) {
            skip(test, "it takes root and network namespaces");
            return None;
        }
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir_all(&directory).unwrap();
        let shim = directory.join("netlink.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/iwpmd/netlink.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .args([&shim, &source])
            .status();
        assert!(built.unwrap().success(), "cc builds the stand-in");
        let link = Self {
            names,
            directory,
            shim,
        };
        let [a, b] = &link.names;
        assert!(ip(&format!(
            "-n {a} link add v type veth peer name v netns {b}"
        )));
        for (name, last) in [(a, 1), (b, 2)] {
            assert!(ip(&format!("-n {name} addr add 10.98.0.{last}/24 dev v")));
            assert!(ip(&format!(
                "-n {name} addr add fd98::{last}/64 dev v nodad"
            )));
            assert!(ip(&format!("-n {name} link set v up")));
        }
        Some(link)
    }

    /// Returns a command that runs a program at one end.
    fn command(&self, end: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[end], program]);
        command
    }

    fn query(&self, end: usize, local: &str, remote: &str) -> Output {
        let mut query = self.command(end, OURS);
        query.args(["query", local, remote]).output().unwrap()
    }

    /// Starts a port mapper at one end, with a simulated kernel, and waits for its hello.
    fn daemon(&self, end: usize, program: &str) -> Daemon {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("kernel-{number}"));
        let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(1).unwrap();
        listener.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut command = self.command(end, program);
        if program == THEIRS {
            command.arg("--systemd");
        }
        command.env("LD_PRELOAD", &self.shim);
        command.env("RISER_TEST_NETLINK", &path);
        let process = Process(command.spawn().unwrap());
        let (netlink, _) = listener.accept().unwrap();
        netlink.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut daemon = Daemon {
            process,
            netlink,
            sequence: 0,
        };
        assert_eq!(daemon.receive(), Response::Hello { abi: ABI });
        daemon
    }

    /// Same as [`Self::daemon`], with a registered client.
    fn registered(&self, end: usize, program: &str) -> Daemon {
        let mut daemon = self.daemon(end, program);
        let response = daemon.send_request(&Request::Hello { abi: ABI });
        assert_eq!(response, mapinfo_request());
        let (sequence, registered) = (daemon.sequence + 1, daemon.send_request(&reg_pid()));
        assert_eq!(registered, reg_pid_response(sequence));
        daemon
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A process that is killed on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port mapper and the kernel's end of its netlink socket.
struct Daemon {
    process: Process,
    netlink: Socket,
    sequence: u32,
}

impl Daemon {
    fn send(&mut self, request: &Request) {
        self.sequence += 1;
        let message = request.write(IWCM, self.sequence);
        self.netlink.send(&message).unwrap();
    }

    fn receive(&mut self) -> Response {
        let mut buffer = vec![0; 8192];
        let len = (&self.netlink).read(&mut buffer).expect("response");
        match Messages::new(&buffer[..len]).next() {
            Some(Ok(Message::Client { header, payload })) => {
                assert_eq!((header.kind.client, header.flags), (IWCM, 1));
                assert_ne!(header.port, 0);
                let mut response = Response::read(header.kind.operation, payload).unwrap();
                if let Response::QueryMapping { connection, .. }
                | Response::RemoteInfo { connection } = &mut response
                {
                    // iwpmd does not initialize the other fields.
                    let plain = |addr: SocketAddr| SocketAddr::new(addr.ip(), addr.port());
                    connection.remote = plain(connection.remote);
                    connection.mapped_remote = plain(connection.mapped_remote);
                }
                response
            }
            other => panic!("{other:?}"),
        }
    }

    fn send_request(&mut self, request: &Request) -> Response {
        self.send(request);
        self.receive()
    }

    /// Adds a mapping and returns the mapped address.
    fn add(&mut self, local: &str, flags: u32) -> SocketAddr {
        let request = add_mapping(local, flags);
        match self.send_request(&request) {
            Response::AddMapping {
                sequence,
                local: is,
                mapped,
                error: 0,
            } if sequence == self.sequence && is == addr(local) => mapped,
            other => panic!("{other:?}"),
        }
    }

    fn query(&mut self, local: &str, remote: &str) -> (Connection, u16) {
        let request = Request::QueryMapping {
            echo: 0,
            local: addr(local),
            remote: addr(remote),
            flags: Some(0),
        };
        match self.send_request(&request) {
            Response::QueryMapping {
                sequence,
                connection,
                error,
            } if sequence == self.sequence => (connection, error),
            other => panic!("{other:?}"),
        }
    }
}

fn add_mapping(local: &str, flags: u32) -> Request {
    Request::AddMapping {
        echo: 0,
        local: addr(local),
        flags: Some(flags),
    }
}

fn reg_pid() -> Request {
    Request::RegPid {
        echo: 0,
        interface: "v".to_owned(),
        device: "siw0".to_owned(),
        library: LIBRARY.to_owned(),
    }
}

fn reg_pid_response(sequence: u32) -> Response {
    Response::RegPid {
        sequence,
        device: "siw0".to_owned(),
        library: LIBRARY.to_owned(),
        version: ABI,
        error: 0,
    }
}

fn mapinfo_request() -> Response {
    Response::MapInfo {
        library: LIBRARY.to_owned(),
        version: ABI,
    }
}

/// Maps connections between two port mappers with kernels in both directions, and queries addresses
/// without a mapping.
fn connect_both_ways(test: &str, programs: [&str; 2]) {
    let Some(link) = Link::new(test) else {
        return;
    };
    let mut daemons = [0, 1].map(|end| link.registered(end, programs[end]));
    for (from, to, from_ip, to_ip) in [
        (0, 1, "10.98.0.1", "10.98.0.2"),
        (1, 0, "10.98.0.2", "10.98.0.1"),
        (0, 1, "[fd98::1]", "[fd98::2]"),
        (1, 0, "[fd98::2]", "[fd98::1]"),
    ] {
        let (local, remote) = (format!("{from_ip}:40000"), format!("{to_ip}:3260"));
        let mapped = daemons[to].add(&remote, 0);
        assert_eq!(mapped.ip(), addr(&remote).ip());
        let (connection, error) = daemons[from].query(&local, &remote);
        let expected = Connection {
            local: addr(&local),
            remote: addr(&remote),
            mapped_local: connection.mapped_local,
            mapped_remote: mapped,
        };
        assert_eq!((connection, error), (expected, 0));
        assert_ne!(connection.mapped_local.port(), 40_000);
        let seen = Connection {
            local: addr(&remote),
            remote: addr(&local),
            mapped_local: mapped,
            mapped_remote: connection.mapped_local,
        };
        assert_eq!(
            daemons[to].receive(),
            Response::RemoteInfo { connection: seen }
        );

        let (local, remote) = (format!("{from_ip}:40001"), format!("{to_ip}:3261"));
        let (connection, error) = daemons[from].query(&local, &remote);
        assert_eq!((connection.mapped_remote, error), (addr(&remote), 16));
    }
}

#[test]
fn connections_are_mapped_with_rdma_core() {
    connect_both_ways("iwpmd", [OURS, THEIRS]);
}

#[test]
fn connections_are_mapped_between_our_daemons() {
    connect_both_ways("two riser-iwpmd", [OURS, OURS]);
}

/// Returns the capability sets of a process: inheritable, permitted, effective.
fn capabilities(process: &Process) -> [u64; 3] {
    let status = fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
    ["CapInh:", "CapPrm:", "CapEff:"].map(|name| {
        let mut lines = status.lines().filter_map(|line| line.strip_prefix(name));
        u64::from_str_radix(lines.next().unwrap().trim(), 16).unwrap()
    })
}

#[test]
fn root_drops_unneeded_capabilities() {
    let Some(link) = Link::new("capabilities of riser-iwpmd") else {
        return;
    };
    let daemon = link.registered(0, OURS);
    const NET_ADMIN: u64 = 1 << 12;
    assert_eq!(capabilities(&daemon.process), [0, NET_ADMIN, NET_ADMIN]);
    let mut alone = link.command(1, OURS);
    alone.args(["--no-kernel", "--map", "10.98.0.2:3260"]);
    let mut alone = Process(alone.stdout(Stdio::piped()).spawn().unwrap());
    let mut byte = [0];
    let printed = alone.0.stdout.as_mut().unwrap();
    printed.read_exact(&mut byte).unwrap();
    assert_eq!(capabilities(&alone), [0; 3]);
}

#[test]
fn invalid_options_are_explained() {
    let Some(link) = Link::new("messages of riser-iwpmd") else {
        return;
    };
    let ours = |end: usize, words: &str| {
        let mut command = link.command(end, OURS);
        command.args(words.split(' '));
        command
    };
    let refused = |mut command: Command, code: i32, why: &str| {
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(why), "{text}");
    };
    let mapped = |command: &mut Command| {
        let mut daemon = Process(command.stdout(Stdio::piped()).spawn().unwrap());
        daemon
            .0
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut [0])
            .unwrap();
        daemon
    };
    // A host without IPv6 serves IPv4, unless IPv6 is requested explicitly.
    let mut without = ours(0, "--no-kernel --map 10.98.0.1:3260");
    let without = without
        .env("LD_PRELOAD", &link.shim)
        .env("RISER_TEST_NO_IPV6", "1");
    let _first = mapped(without);
    refused(ours(0, "--no-kernel"), 1, "another port mapper");
    let mut requested = ours(1, "--no-kernel --listen ::");
    requested
        .env("LD_PRELOAD", &link.shim)
        .env("RISER_TEST_NO_IPV6", "1");
    refused(requested, 1, "cannot listen on [::]:3935");
    refused(
        ours(1, "--no-kernel --map 10.98.0.2:0"),
        2,
        "from 1 to 65535",
    );
    refused(
        ours(1, "--no-kernel --map 10.98.0.2:1=0"),
        2,
        "from 1 to 65535",
    );
    refused(
        ours(1, "query 10.98.0.2:1 [fd98::1]:1"),
        2,
        "different IP versions",
    );
    refused(
        ours(1, "query 10.98.0.99:1 10.98.0.1:1"),
        2,
        "cannot listen on 10.98.0.99:0",
    );
    refused(ours(1, "query 10.98.0.2:1 10.98.0.1:1"), 1, "no mapping");
}

/// Sends requests at the second end on behalf of nonexistent hosts until it is dropped.
fn forge(link: &Link) -> Forger {
    let stop = Arc::new(AtomicBool::new(false));
    let is_over = Arc::clone(&stop);
    let namespace = fs::File::open(Path::new("/run/netns").join(&link.names[1])).unwrap();
    let thread = std::thread::spawn(move || {
        let network = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(namespace.as_fd(), network).unwrap();
        let sockets: Vec<_> = (50..60)
            .map(|last| {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                socket.set_ip_transparent_v4(true).unwrap();
                let own = SocketAddr::from(([10, 98, 0, last], 4000));
                socket.bind(&own.into()).unwrap();
                socket.connect(&addr("10.98.0.1:3935").into()).unwrap();
                socket
            })
            .collect();
        let mut handle = 0;
        while !is_over.load(Ordering::Relaxed) {
            for socket in &sockets {
                for _ in 0..100 {
                    handle += 1;
                    let request = WireMessage {
                        message_type: MessageType::Request {
                            mapped_cp: addr("10.98.0.50:1"),
                        },
                        assoc_handle: handle,
                        cp: addr("10.98.0.50:1"),
                        ap: addr("10.98.0.1:1"),
                    };
                    let _ = socket.send(&request.write());
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    Forger(stop, Some(thread))
}

struct Forger(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Drop for Forger {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        let ended = self.1.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

#[test]
fn responses_to_missing_hosts_delay_no_query() {
    let Some(link) = Link::new("port mapper beside forged requests") else {
        return;
    };
    let mut requester = link.registered(0, OURS);
    let mut responder = link.registered(1, OURS);
    let mapped = responder.add("10.98.0.2:3260", 0);
    let _forger = forge(&link);
    for port in 40_000..40_010 {
        // Wait until the kernel's first lookup of these hosts has failed.
        std::thread::sleep(Duration::from_millis(200));
        let (connection, error) = requester.query(&format!("10.98.0.1:{port}"), "10.98.0.2:3260");
        assert_eq!((connection.mapped_remote, error), (mapped, 0));
    }
}

#[test]
fn wildcard_listener_is_found_at_each_address() {
    let Some(link) = Link::new("iwpmd at all addresses") else {
        return;
    };
    let [mut a, mut b] = [(0, OURS), (1, THEIRS)].map(|(end, name)| link.registered(end, name));
    // A listener that uses the host's TCP stack, like siw.
    b.add("10.98.0.2:3262", NO_PORT_MAP);
    let (connection, error) = a.query("10.98.0.1:40000", "10.98.0.2:3262");
    assert_eq!((connection.mapped_remote, error), (connection.remote, 0));
    b.receive();
    // We query iwpmd, which responds for the requested address.
    let mapped = a.add("0.0.0.0:3260", 0);
    let (connection, error) = b.query("10.98.0.2:40000", "10.98.0.1:3260");
    let expected = SocketAddr::new(connection.remote.ip(), mapped.port());
    assert_eq!((connection.mapped_remote, error), (expected, 0));
    let Response::RemoteInfo { connection } = a.receive() else {
        panic!()
    };
    assert_eq!(connection.mapped_local, mapped);
}

#[test]
fn daemon_interoperates_with_rdma_core_without_kernel() {
    let Some(link) = Link::new("iwpmd without a kernel") else {
        return;
    };
    let mut theirs = link.registered(1, THEIRS);
    let mapped = theirs.add("10.98.0.2:3260", 0);
    let found = link.query(0, "10.98.0.1:40000", "10.98.0.2:3260");
    assert!(found.status.success(), "{found:?}");
    assert_eq!(
        String::from_utf8_lossy(&found.stdout),
        format!("{mapped}\n")
    );
    assert!(matches!(theirs.receive(), Response::RemoteInfo { .. }));
    let rejected = link.query(0, "10.98.0.1:40000", "10.98.0.2:3261");
    assert_eq!(rejected.status.code(), Some(1));
    let why = String::from_utf8_lossy(&rejected.stderr).into_owned();
    assert!(why.contains("no mapping"), "{why}");

    let mut ours = link.command(0, OURS);
    ours.args(["--no-kernel", "--map", "10.98.0.1:3260=4711"]);
    ours.args(["--map", "[fd98::1]:3260"])
        .stdout(Stdio::piped());
    let mut ours = Process(ours.spawn().unwrap());
    // Both lines are printed before it responds to requests.
    let mut printed = ours.0.stdout.take().unwrap();
    let mut lines = Vec::new();
    while lines.iter().filter(|byte| **byte == b'\n').count() < 2 {
        let mut byte = [0];
        printed.read_exact(&mut byte).unwrap();
        lines.extend(byte);
    }
    let lines = String::from_utf8(lines).unwrap();
    let (first, second) = lines.trim_end().split_once('\n').unwrap();
    assert_eq!(first, "10.98.0.1:3260 10.98.0.1:4711");
    let mapped = addr(second.strip_prefix("[fd98::1]:3260 ").unwrap());
    let (connection, error) = theirs.query("10.98.0.2:40000", "10.98.0.1:3260");
    assert_eq!(
        (connection.mapped_remote, error),
        (addr("10.98.0.1:4711"), 0)
    );
    let (connection, error) = theirs.query("[fd98::2]:40000", "[fd98::1]:3260");
    assert_eq!((connection.mapped_remote, error), (mapped, 0));
}

/// Returns a message that lacks a required attribute.
fn null(operation: u16) -> Vec<u8> {
    let header = Header {
        kind: Kind {
            client: IWCM,
            operation,
        },
        flags: 1,
        sequence: 900,
        port: 0,
    };
    Writer::new(header).attribute(1, &[0; 4]).finish()
}

/// Sends the requests of a kernel to a daemon at the first end, and returns the responses.
fn interview(link: &Link, program: &str) -> Vec<Response> {
    let mut daemon = link.daemon(0, program);
    let mut responses = Vec::new();
    responses.push(daemon.send_request(&Request::Hello { abi: ABI }));
    responses.push(daemon.send_request(&reg_pid()));
    let mapped = daemon.add("10.98.0.1:3260", 0);
    let mapinfo = |local: &str, mapped: SocketAddr, flags| Request::MapInfo {
        local: addr(local),
        mapped,
        flags: Some(flags),
    };
    // The same mapping again; a listener that uses the host's TCP stack; another version; and a
    // mapping of an earlier daemon, whose port is in use.
    for request in [
        add_mapping("10.98.0.1:3260", 0),
        add_mapping("10.98.0.1:3261", NO_PORT_MAP),
        Request::Hello { abi: ABI + 1 },
        mapinfo("10.98.0.1:3263", mapped, 0),
    ] {
        responses.push(daemon.send_request(&request));
    }
    daemon.send(&mapinfo("10.98.0.1:3260", mapped, 0));
    daemon.send(&mapinfo(
        "10.98.0.1:3264",
        addr("10.98.0.1:3264"),
        NO_PORT_MAP,
    ));
    responses.push(daemon.send_request(&Request::MapInfoNum { echo: 0, sent: 3 }));
    for operation in [1, 2, 3, 6] {
        daemon.netlink.send(&null(operation)).unwrap();
        responses.push(daemon.receive());
    }
    // Remove and add it again.
    daemon.send(&Request::RemoveMapping {
        echo: 0,
        local: addr("10.98.0.1:3261"),
    });
    responses.push(daemon.send_request(&add_mapping("10.98.0.1:3261", NO_PORT_MAP)));
    responses
}

#[test]
fn kernel_receives_same_responses_from_both() {
    let Some(link) = Link::new("responses of iwpmd") else {
        return;
    };
    let ours = interview(&link, OURS);
    assert_eq!(ours, interview(&link, THEIRS));
    let codes = ours.iter().filter_map(|response| match response {
        Response::HandleErr { code, .. } => Some(*code),
        _ => None,
    });
    assert_eq!(codes.collect::<Vec<_>>(), [12, 17, 11, 10, 10, 10, 10]);
}

#[test]
fn missing_kernel_rdma_is_reported() {
    let socket = nix::sys::socket::socket(
        nix::sys::socket::AddressFamily::Netlink,
        nix::sys::socket::SockType::Raw,
        nix::sys::socket::SockFlag::SOCK_CLOEXEC,
        nix::sys::socket::SockProtocol::NetlinkRDMA,
    );
    if socket.is_ok() {
        skip("a kernel without RDMA", "this kernel has it");
        return;
    }
    let output = Command::new(OURS).args(["--listen", "127.0.0.9"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(why.contains("does not support RDMA"), "{why}");
}
