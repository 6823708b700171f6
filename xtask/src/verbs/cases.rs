//! Test cases, which contain the programs to run and the expected output.
//!
//! A command is split at spaces. `{server}` and `{client}` are replaced by the addresses of the two
//! sides, `{port}` by a port that is not used in any other case, `{dir}` by a directory for this
//! case, and `{programs}` by the directory of our programs.

/// Default timeout of a case in seconds.
const SECONDS: u64 = 30;

/// Condition used to check if a server is ready for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// The server is listening on TCP port `{port}`.
    Port,
    /// The device has opened its UDP socket. We can't observe any other system call before the
    /// server is listening.
    Device,
    /// The server has printed this text.
    Says(&'static str),
}

/// How a server is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The server exits with success when it's done.
    Itself,
    /// We have to send SIGTERM.
    Asked,
}

/// Where to run a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Use loopback addresses.
    Loopback,
    /// Use namespaces with a network interface and `/dev/infiniband` ([`super::namespace`]). This
    /// only supports a single client.
    Network,
}

/// A test case.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) group: &'static str,
    pub(super) name: String,
    /// Command to start first.
    pub(super) server: Option<String>,
    pub(super) ready: Ready,
    pub(super) end: End,
    /// Command to start when the server is ready.
    pub(super) client: Option<String>,
    /// Number of parallel clients, each with a separate address. They are started with a short
    /// delay, because `rping -P` can only handle one request at a time and will lose requests
    /// received in between.
    pub(super) clients: usize,
    /// Text that must be found in the output of each client or, if there are no clients, of the
    /// server.
    pub(super) says: Vec<&'static str>,
    /// If set, the client is expected to reject the operation and return an exit status other than
    /// 0.
    pub(super) is_refused: bool,
    /// Faults to inject on both sides.
    pub(super) faults: Option<&'static str>,
    /// Configuration for `riserd`, which is written to `{dir}/riserd.yaml`.
    pub(super) config: Option<&'static str>,
    /// Environment variable to set on both sides.
    pub(super) variable: Option<(&'static str, &'static str)>,
    pub(super) place: Place,
    /// Source path of one of our programs, which is compiled with MPI as `{dir}/program`.
    pub(super) source: Option<&'static str>,
    /// Timeout in seconds.
    pub(super) seconds: u64,
    /// Set if the programs may lose messages and would then block. In this case, we need to allow a
    /// second attempt.
    pub(super) may_lose: bool,
}

impl Case {
    /// Returns the group and name.
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.group, self.name)
    }

    pub(super) fn alone(
        group: &'static str,
        name: &str,
        command: &str,
        says: &[&'static str],
    ) -> Self {
        Self {
            group,
            name: name.to_owned(),
            server: None,
            ready: Ready::Device,
            end: End::Itself,
            client: Some(command.to_owned()),
            clients: 1,
            says: says.to_vec(),
            is_refused: false,
            faults: None,
            config: None,
            variable: None,
            place: Place::Loopback,
            source: None,
            seconds: SECONDS,
            may_lose: false,
        }
    }

    pub(super) fn pair(
        group: &'static str,
        name: &str,
        [server, client]: [&str; 2],
        says: &[&'static str],
    ) -> Self {
        Self {
            server: Some(server.to_owned()),
            ..Self::alone(group, name, client, says)
        }
    }

    pub(super) fn ready(self, ready: Ready) -> Self {
        Self { ready, ..self }
    }

    /// Sets that the server needs to be stopped with SIGTERM.
    pub(super) fn with_sigterm(self) -> Self {
        Self {
            end: End::Asked,
            ..self
        }
    }

    fn clients(self, clients: usize) -> Self {
        Self { clients, ..self }
    }

    /// Sets that a network interface is required.
    pub(super) fn on_network(self) -> Self {
        Self {
            place: Place::Network,
            ..self
        }
    }

    /// Returns the programs used by this case, excluding `env` and its variables.
    pub(super) fn programs(&self) -> impl Iterator<Item = &str> {
        let commands = [&self.server, &self.client].into_iter().flatten();
        commands.filter_map(|command| {
            let mut words = command.split(' ');
            words.find(|word| *word != "env" && !word.contains('='))
        })
    }

    fn refused(self) -> Self {
        Self {
            is_refused: true,
            ..self
        }
    }

    fn faults(self, faults: &'static str) -> Self {
        Self {
            faults: Some(faults),
            ..self
        }
    }

    pub(super) fn seconds(self, seconds: u64) -> Self {
        Self { seconds, ..self }
    }
}

/// GID index to use for programs: this is the RoCEv2 GID for the device's address.
const GID: &str = "0";

/// Returns the cases that use rdma-core programs, perftest and our own programs, in order.
pub(super) fn all() -> Vec<Case> {
    let mut cases = info();
    cases.extend(management());
    cases.extend(pingpong());
    cases.extend(rdmacm());
    cases.extend(perftest());
    cases.extend(disks());
    cases.extend(misuse());
    cases
}

fn info() -> Vec<Case> {
    let watch = Case {
        server: Some("ibv_asyncwatch -d riser0".to_owned()),
        client: None,
        ready: Ready::Says("async event"),
        end: End::Asked,
        ..Case::alone("info", "ibv_asyncwatch", "", &["riser0"])
    };
    vec![
        Case::alone("info", "ibv_devices", "ibv_devices", &["riser0"]),
        Case::alone("info", "ibv_devinfo", "ibv_devinfo", &["PORT_ACTIVE"]),
        Case::alone(
            "info",
            "ibv_devinfo -v",
            "ibv_devinfo -v -d riser0",
            &["link_layer:\t\tEthernet", "max_mr_size", "GID["],
        ),
        watch,
    ]
}

/// Programs that send management datagrams to the device.
fn management() -> Vec<Case> {
    const RUNS: &[(&str, &[&str])] = &[
        ("ibstat", &["CA 'riser0'", "State: Active", "Ethernet"]),
        ("perfquery", &["PortRcvPkts:", "PortXmitData:"]),
        ("perfquery -x", &["PortMulticastRcvPkts:"]),
        ("perfquery -R", &[]),
        ("smpquery -D nodeinfo 0", &["Channel Adapter", "NumPorts:"]),
        ("smpquery -D portinfo 0", &["LinkState:", "Active"]),
        ("smpquery -D nodedesc 0", &["roce-"]),
    ];
    let case = |&(command, says): &(&str, &[&'static str])| {
        Case::alone("management", command, command, says)
    };
    let switch = Case::alone(
        "management",
        "smpquery -D switchinfo 0",
        "smpquery -D switchinfo 0",
        &[],
    );
    let cases = RUNS.iter().map(case).chain([switch.refused()]);
    cases.chain(administration()).collect()
}

/// Programs that send queries to subnet administration, either in their own process or in
/// `riser-sa`.
fn administration() -> Vec<Case> {
    const SERVER: &str = "{programs}/riser-sa --no-netlink --addr {server}";
    let ask = |name: &str, command: &str, says: &[&'static str]| {
        let client = format!("env RISER_LINK_LAYER=infiniband RISER_SA={{server}} {command}");
        Case {
            end: End::Asked,
            ..Case::pair("management", name, [SERVER, &client], says)
        }
    };
    // Joining a netlink group requires a capability, which the programs have in their namespaces.
    let network = |name: &str, words: &str, says: &[&'static str]| {
        let command = format!("python3 {{dir}}/{IBACM} {words}");
        Case {
            place: Place::Network,
            ..Case::alone("management", name, &command, says)
        }
    };
    vec![
        Case {
            variable: Some(("RISER_LINK_LAYER", "infiniband")),
            ..Case::alone(
                "management",
                "saquery NR",
                "saquery NR",
                &["NodeRecord dump"],
            )
        },
        ask("riser-sa, saquery NR", "saquery NR", &["NodeRecord dump"]),
        ask("riser-sa, saquery PR", "saquery PR", &["PathRecord dump"]),
        ask(
            "riser-sa, saquery PIR",
            "saquery PIR",
            &["PortInfoRecord dump"],
        ),
        ask("riser-sa, saquery -c", "saquery -c", &["SA ClassPortInfo"]),
        // There is no host with a subnet manager.
        ask(
            "riser-sa, saquery -s",
            "saquery -s",
            &["IsSM ports\n\nIsSM"],
        ),
        network(
            "ibacm",
            "alone {dir} fd17::1 fd17::9",
            &["the kernel has its path", "SA verification: success"],
        ),
        network(
            "ibacm, ibacm, riser-sa",
            "pair {dir} fd17::1 fd17::2 fd17::3 {programs}/riser-sa",
            &["both have found each other", "what they have set is listed"],
        ),
    ]
}

fn pingpong() -> Vec<Case> {
    // Program, options, and the name to use for the options.
    const RUNS: &[(&str, &str)] = &[
        ("ibv_rc_pingpong", "-c"),
        ("ibv_rc_pingpong", "-c -e"),
        ("ibv_rc_pingpong", "-c -N"),
        ("ibv_rc_pingpong", "-c -t"),
        ("ibv_rc_pingpong", "-c -o"),
        ("ibv_rc_pingpong", "-c -o -P"),
        ("ibv_rc_pingpong", "-c -O"),
        ("ibv_rc_pingpong", "-c -j"),
        ("ibv_rc_pingpong", "-c -s 1048576 -m 4096 -n 100"),
        ("ibv_uc_pingpong", "-c"),
        ("ibv_uc_pingpong", "-c -e"),
        ("ibv_ud_pingpong", "-c -s 1024"),
        ("ibv_ud_pingpong", "-c -s 1024 -e"),
        ("ibv_srq_pingpong", "-c"),
        ("ibv_srq_pingpong", "-c -e"),
        ("ibv_srq_pingpong", "-c -q 4"),
        ("ibv_xsrq_pingpong", ""),
        ("ibv_xsrq_pingpong", "-e"),
    ];
    let case = |(program, options): &(&str, &str)| {
        let server = format!("{program} -d riser0 -g {GID} -p {{port}} {options}");
        let client = format!("{server} {{server}}");
        // When all messages have been received, these programs print their results or success.
        let says = match *program {
            "ibv_xsrq_pingpong" => "success",
            _ => "usec/iter",
        };
        let name = format!("{program} {options}");
        Case::pair("pingpong", name.trim(), [&server, &client], &[says]).ready(Ready::Port)
    };
    RUNS.iter().map(case).collect()
}

fn rdmacm() -> Vec<Case> {
    let rping = |name: &str, server: &str, client: &str| {
        let server = format!("rping -s -V -a {{server}} -p {{port}} {server}");
        let client = format!("rping -c -V -v -a {{server}} -I {{client}} -p {{port}} {client}");
        Case::pair("rdmacm", name, [&server, &client], &["rdma-ping-19: "])
    };
    let mut cases = vec![
        rping("rping", "-C 20", "-C 20"),
        rping("rping -S 32768", "-C 20 -S 32768", "-C 20 -S 32768"),
        rping("rping -q", "-q -C 20", "-q -C 20"),
        rping("rping, packets lost", "-C 20", "-C 20").faults("loss=1,seed=7"),
        rping("rping -P, four clients", "-P", "-C 1000")
            .clients(4)
            .with_sigterm(),
    ];
    let both = |name: &str, program: &str, options: &str, says: &[&'static str]| {
        let server = format!("{program} -b {{server}} {options}");
        let client = format!("{program} -s {{server}} -b {{client}} {options}");
        Case::pair("rdmacm", name, [&server, &client], says)
    };
    let done = &["return status 0"];
    // The GID is an IPv4-mapped IPv6 address.
    let gids = |name: &str, program: &str, options: &str| {
        let server = format!("{program} -f gid -b ::ffff:{{server}} {options}");
        let client =
            format!("{program} -f gid -s ::ffff:{{server}} -b ::ffff:{{client}} {options}");
        Case::pair("rdmacm", name, [&server, &client], done)
    };
    cases.extend([
        both("ucmatose", "ucmatose", "", done),
        both("ucmatose -c 10", "ucmatose", "-c 10 -C 100 -S 4096", done),
        both("ucmatose -P ib", "ucmatose", "-P ib", done),
        both("ucmatose -m", "ucmatose", "-m -c 4", done),
        gids("ucmatose -f gid", "ucmatose", "-c 4"),
        gids("ucmatose -f gid -P ib", "ucmatose", "-P ib"),
        gids("udaddy -f gid", "udaddy", ""),
        both("udaddy", "udaddy", "", done),
        both("udaddy -c 5", "udaddy", "-c 5 -C 20 -S 1000", done),
        both("udaddy -p 2", "udaddy", "-p 0x0002", done),
        both("cmtime", "cmtime", "-c 50 -p {port}", &["disconnect"]).with_sigterm(),
    ]);
    let group = "239.255.17.1";
    let mckey = Case::pair(
        "rdmacm",
        "mckey",
        [
            &format!("mckey -m {group} -b {{server}}"),
            &format!("mckey -m {group} -s -b {{client}}"),
        ],
        done,
    );
    // Messages sent before the client has joined are lost.
    cases.push(mckey.ready(Ready::Says("receiving data transfers")));
    let simple = |name: &str, server: &str, client: &str, says: &[&'static str]| {
        let server = format!("{server} -p {{port}}");
        let client = format!("{client} -s {{server}} -p {{port}}");
        Case::pair("rdmacm", name, [&server, &client], says)
    };
    cases.extend([
        simple("rdma_client", "rdma_server", "rdma_client", &["end 0"]),
        simple("rdma_xclient", "rdma_xserver", "rdma_xclient", &["end 0"]),
        simple(
            "rdma_xclient -c x",
            "rdma_xserver -c x",
            "rdma_xclient -c x",
            &["end 0"],
        ),
    ]);
    cases
}

/// Program that runs a subnet administrator.
pub(super) const ADMINISTRATOR: &str = "riser-sa";

/// Script in `{dir}` that starts ibacm and sends requests to it.
pub(super) const IBACM: &str = "ibacm.py";

/// A perftest program, with its supported transport services, and a flag set if it supports `-e`.
struct Test {
    program: &'static str,
    services: &'static [&'static str],
    has_events: bool,
    options: &'static [&'static str],
}

fn perftest() -> Vec<Case> {
    const TESTS: &[Test] = &[
        Test {
            program: "ib_send_bw",
            services: &["RC", "UC", "UD", "XRC"],
            has_events: true,
            options: &[
                "-b",
                "-q 4",
                "--use-srq",
                "-l 8",
                "-I 64 -s 64",
                "-s 8 -Q 1",
            ],
        },
        Test {
            program: "ib_send_lat",
            services: &["RC", "UC", "UD", "XRC"],
            has_events: true,
            options: &["-I 0 -s 8"],
        },
        Test {
            program: "ib_write_bw",
            services: &["RC", "UC", "XRC"],
            has_events: false,
            options: &["-b", "-q 4", "-l 8", "--odp"],
        },
        Test {
            program: "ib_write_lat",
            services: &["RC", "UC", "XRC"],
            has_events: false,
            options: &["-I 0 -s 8"],
        },
        Test {
            program: "ib_read_bw",
            services: &["RC", "XRC"],
            has_events: true,
            options: &["-b", "-q 4", "-o 1", "--odp"],
        },
        Test {
            program: "ib_read_lat",
            services: &["RC", "XRC"],
            has_events: true,
            options: &[],
        },
        Test {
            program: "ib_atomic_bw",
            services: &["RC", "XRC"],
            has_events: true,
            options: &["-A CMP_AND_SWAP", "-A FETCH_AND_ADD", "-q 4"],
        },
        Test {
            program: "ib_atomic_lat",
            services: &["RC", "XRC"],
            has_events: true,
            options: &["-A CMP_AND_SWAP"],
        },
    ];
    TESTS.iter().flat_map(Test::cases).collect()
}

impl Test {
    fn cases(&self) -> Vec<Case> {
        let is_atomic = self.program.contains("atomic");
        let is_bandwidth = self.program.ends_with("_bw");
        // Use all sizes up to 8 MiB, but only a few messages of each, because an incorrect split
        // will be detected immediately. Atomic operations have a single size.
        let sizes = match (is_atomic, is_bandwidth) {
            (true, _) => "-n 500",
            (false, true) => "-a -n 20 -t 16",
            (false, false) => "-a -n 5",
        };
        let mut options = Vec::new();
        for service in self.services {
            options.push(format!("-c {service} {sizes}"));
        }
        if self.has_events {
            // If UC messages are this small, they will all fit into the socket buffer of a receiver
            // that is not running.
            let more = |service| if service == "UC" { " -s 64" } else { "" };
            let events = self.services.iter();
            options.extend(events.map(|at| format!("-c {at} -e -n 200{}", more(*at))));
        }
        if self.program.ends_with("_lat") && self.services.contains(&"UC") {
            // Avoid larger sizes, because the receiver's socket might drop packets.
            options.push("-c UC -s 4096 -n 200".to_owned());
        }
        for service in ["RC", "UD"] {
            if self.services.contains(&service) {
                options.push(format!("-c {service} -R -n 200"));
            }
        }
        let more = self.options.iter();
        options.extend(more.map(|more| format!("-c RC {more} -n 200")));
        options.iter().map(|options| self.case(options)).collect()
    }

    fn case(&self, options: &str) -> Case {
        let program = self.program;
        // This is a perftest option that disables the CPU frequency warning.
        let mut server = format!("{program} -F -d riser0 -p {{port}} {options}");
        let mut client = format!("{server} {{server}}");
        let mut ready = Ready::Port;
        if options.contains("-R") {
            // The connection manager uses these addresses to select the device.
            server += " --source_ip {server}";
            client += " --source_ip {client}";
            ready = Ready::Device;
        }
        let figures = if program.ends_with("_bw") {
            "BW average"
        } else {
            "t_typical"
        };
        let name = format!("{program} {options}");
        let case = Case::pair("perftest", &name, [&server, &client], &[figures]);
        let case = case.ready(ready).seconds(90);
        // If the receiver is busy and its socket drops a message, which is allowed for UC, the
        // program will wait forever.
        let may_lose = options.contains("-c UC");
        Case { may_lose, ..case }
    }
}

/// `riserd` and `riser` using the `rdma_core` provider, which loads libibverbs and librdmacm. Here,
/// this uses our libraries.
fn disks() -> Vec<Case> {
    const AT_ANY_ADDRESS: &str = "\
backends: { disk: { kind: ram, size: 64MiB } }
targets:
  - name: iqn.2026-01.com.example:disks
    portals: [{ protocol: iser, listen: 0.0.0.0 }]
    luns: { 0: disk }
    access: open
transport: { provider: rdma_core }
";
    const CONFIG: &str = "\
backends: { disk: { kind: ram, size: 64MiB } }
targets:
  - name: iqn.2026-01.com.example:disks
    portals:
      - { protocol: srp, listen: {server}, ioc_guid: 0x0200c0ffee000001 }
      - { protocol: iser, listen: {server} }
    luns: { 0: disk }
    access: open
transport: { provider: rdma_core }
";
    const ISER: &str = "iser://{server}/iqn.2026-01.com.example:disks/0";
    let server = "{programs}/riserd run --config {dir}/riserd.yaml";
    let case = |name: &str, url: &str| {
        let client = format!(
            "{{programs}}/riser bench {url} --provider rdma_core --addr {{client}} --overwrite --verify \
             --rw randrw --mix 40 --bs 64k --depth 16 --jobs 2 --total 64M --size 32M --warm-up 0"
        );
        Case {
            config: Some(CONFIG),
            ..Case::pair(
                "disks",
                name,
                [server, &client],
                &["over riser0", "no mismatch"],
            )
        }
        .ready(Ready::Says(" serving "))
        .with_sigterm()
    };
    vec![
        // This provider doesn't support queries for the target's ports.
        case(
            "srp",
            "srp://{server}/0?id_ext=0200c0ffee000001&ioc_guid=0200c0ffee000001",
        ),
        case("iser", ISER),
        // The portal uses the addresses of the library's devices, which don't exist in the kernel.
        Case {
            config: Some(AT_ANY_ADDRESS),
            ..case("iser at any address", ISER).on_network()
        },
    ]
}

fn misuse() -> Vec<Case> {
    let refused = |name: &str, command: &str, says: &'static str| {
        Case::alone("misuse", name, command, &[says]).refused()
    };
    vec![
        refused(
            "a device that does not exist",
            "ibv_devinfo -d riser7",
            "wasn't found",
        ),
        refused(
            "a device that does not exist, rc_pingpong",
            "ibv_rc_pingpong -d riser7",
            "not found",
        ),
        refused(
            "port 2",
            "ibv_rc_pingpong -d riser0 -i 2 -g 0 -p {port}",
            "",
        ),
        refused(
            "a queue that is too long",
            "ibv_rc_pingpong -d riser0 -g 0 -r 100000000 -p {port}",
            "",
        ),
        refused(
            "rping without a server",
            "rping -c -a {server} -I {client} -p {port} -C 1",
            "",
        ),
        refused(
            "rping to an address of no host",
            "rping -c -a 192.0.2.77 -p {port} -C 1",
            "",
        ),
        refused(
            "rping from an address of no device",
            "rping -c -a {server} -I 192.0.2.77",
            "",
        ),
        refused(
            "more connections than a queue pair number has",
            "ib_send_bw -d riser0 -q 17000000 -p {port}",
            "",
        ),
    ]
}
